"""Which row at which step: functions of the seed and a number, so no loader state can be lost.

The rows of all epochs form one endless stream, each epoch in an order of its own. Global
batch b takes the next piece of it wherever it runs: ranks only decide who computes which of its
rows. The number of a global batch is `Cursor.batch`: a roll-back goes back in steps, never in
batches, so the batches it has seen do not come again. Rows, and the phases of a mixture with their
rates, are functions of that number; schedules are functions of the step.
"""

from trainkit.sampling.blocks import rows_of_blocks
from trainkit.sampling.epochs import epoch_of, plan_steps, rows_of_epochs
from trainkit.sampling.mixtures import (
    Phase,
    facts_with_phases,
    make_phases,
    mixture_weights,
    phase_at,
    rows_of_mixture,
)
from trainkit.sampling.permutation import permute
from trainkit.sampling.shares import share_of_rows

__all__ = [
    "Phase",
    "epoch_of",
    "facts_with_phases",
    "make_phases",
    "mixture_weights",
    "permute",
    "phase_at",
    "plan_steps",
    "rows_of_blocks",
    "rows_of_epochs",
    "rows_of_mixture",
    "share_of_rows",
]
