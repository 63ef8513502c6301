"""Which row at which step: functions of the seed and a number, so no loader state can be lost.

The rows of all epochs form one endless stream, each epoch in an order of its own. Global
batch b takes the next piece of it wherever it runs: ranks only decide who computes which of its
rows. The number of a global batch is `Cursor.batch`: a roll-back goes back in steps, never in
batches, so the batches it has seen do not come again. Rows, and the phases of a mixture with their
rates, are functions of that number; schedules are functions of the step.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
