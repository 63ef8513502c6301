"""Where metrics go. A sink is any function `sink(step, values)`; `step` counts finished steps.

Values are plain numbers and strings (what `trainkit.to_host` returns), so a sink never waits for a
device. Sinks that hold a file or the terminal are context managers that yield the function.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
