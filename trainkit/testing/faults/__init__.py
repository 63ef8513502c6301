"""Faults to put into a run on purpose: what a trainer must survive, in the tests of anybody.

`steps` says what an injector is, and when and where it acts; a rank's process goes wrong in
`processes`, its numbers in `numbers`, and files in `files`.
"""

from __future__ import annotations

from trainkit.testing.faults.files import (
    add_file,
    flip_bit,
    remove_file,
    swap_files,
    truncate,
    zero_page,
)
from trainkit.testing.faults.numbers import (
    flip_bit_at,
    nan_gradient_at,
    nan_loss_at,
    nan_moment_at,
    nan_parameter_at,
)
from trainkit.testing.faults.processes import (
    exit_at,
    fail_at,
    hang_at,
    kill_at,
    signal_at,
    slow_at,
    stop_at,
)
from trainkit.testing.faults.steps import (
    At,
    Injector,
    Ranks,
    TrainStep,
    act_after,
    act_at,
    during,
    until_next,
)

__all__ = [
    "At",
    "Injector",
    "Ranks",
    "TrainStep",
    "act_after",
    "act_at",
    "add_file",
    "during",
    "exit_at",
    "fail_at",
    "flip_bit",
    "flip_bit_at",
    "hang_at",
    "kill_at",
    "nan_gradient_at",
    "nan_loss_at",
    "nan_moment_at",
    "nan_parameter_at",
    "remove_file",
    "signal_at",
    "slow_at",
    "stop_at",
    "swap_files",
    "truncate",
    "until_next",
    "zero_page",
]
