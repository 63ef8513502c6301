"""After pretraining: adapters, objectives over answers, generation, evaluation.

What begins with a trained model belongs here.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
