"""The rows of each step as functions of a seed and a batch number, so there is no loader state.

The rows of all epochs form one endless stream, each epoch in an order of its own. Global batch b
takes the next stretch of it in every layout; ranks only split its rows. The number of a global
batch is `Cursor.batch`. A roll-back goes back in steps, never in batches, so that skipped batches
do not come again. Rows, and the phases of a mixture with their weights, are functions of that
number; schedules are functions of the step.
"""

from trainkit.sampling.blocks import shuffle_blocks
from trainkit.sampling.buffers import buffer_sorted_order
from trainkit.sampling.epochs import count_epochs, count_steps, shuffle_epochs
from trainkit.sampling.mixtures import (
    MixturePhase,
    add_phase_facts,
    anneal_phases,
    find_mixture_phase,
    make_mixture_phases,
    mixture_weights,
    sample_mixture,
)
from trainkit.sampling.permutation import permute
from trainkit.sampling.shares import assign_rows

__all__ = [
    "MixturePhase",
    "add_phase_facts",
    "anneal_phases",
    "assign_rows",
    "buffer_sorted_order",
    "count_epochs",
    "count_steps",
    "find_mixture_phase",
    "make_mixture_phases",
    "mixture_weights",
    "permute",
    "sample_mixture",
    "shuffle_blocks",
    "shuffle_epochs",
]
