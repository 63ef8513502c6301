"""Which row at which step: functions of the seed and a number, so no loader state can be lost.

The rows of all epochs form one endless stream, each epoch in an order of its own. Global
batch b takes the next piece of it wherever it runs: ranks only decide who computes which of its
rows. The number of a global batch is `Cursor.batch`: a roll-back goes back in steps, never in
batches, so the batches it has seen do not come again. Rows, and the phases of a mixture with their
rates, are functions of that number; schedules are functions of the step.
"""

from trainkit.sampling.blocks import shuffle_blocks
from trainkit.sampling.epochs import count_epochs, count_steps, shuffle_epochs
from trainkit.sampling.mixtures import (
    MixturePhase,
    add_phase_facts,
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
    "assign_rows",
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
