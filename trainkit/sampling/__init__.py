"""Which row at which step: functions of the seed and the step, so no loader state can be lost.

The rows of all epochs form one endless stream, each epoch in an order of its own. Step s takes the
next piece of it wherever it runs: ranks only decide who computes which of its rows.
"""

from __future__ import annotations

from trainkit.sampling.blocks import rows_in_blocks
from trainkit.sampling.buffers import buffer_sorted_order
from trainkit.sampling.epochs import epoch_of, plan_steps
from trainkit.sampling.mixtures import (
    Phase,
    make_phases,
    mixture_weights,
    phase_at,
    rows_of_mixture,
)
from trainkit.sampling.permutation import permute, rows_of_step
from trainkit.sampling.shares import share_of_rows

__all__ = [
    "Phase",
    "buffer_sorted_order",
    "epoch_of",
    "make_phases",
    "mixture_weights",
    "permute",
    "phase_at",
    "plan_steps",
    "rows_in_blocks",
    "rows_of_mixture",
    "rows_of_step",
    "share_of_rows",
]
