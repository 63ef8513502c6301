"""The rows of each step as functions of a seed and a batch number, so there is no loader state.

The rows of all epochs form one endless stream, each epoch in an order of its own. Global batch b
takes the next stretch of it in every layout; ranks only split its rows. The number of a global
batch is `Cursor.batch`. A roll-back goes back in steps, never in batches, so that skipped batches
do not come again. Rows, and the phases of a mixture with their weights, are functions of that
number; schedules are functions of the step.
"""

from trainkit.sampling.blocks import rows_of_blocks
from trainkit.sampling.buffers import buffer_sorted_order
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
    "buffer_sorted_order",
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
