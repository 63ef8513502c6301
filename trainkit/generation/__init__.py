"""Text from a model: one token after the other, for several prompts at once.

`sampling` makes a distribution of logits and draws from it, in functions of tensors; `text` turns
tokens into text while they come, and finds the strings that end it; `generate` is the loop. What a
decoder keeps of the tokens before is `models.Cache`. `rollouts` makes batches of answers that are
reinforced, `rewards` asks a checker what they earn.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
