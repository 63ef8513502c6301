"""All that a training process needs around it, opened in the order that makes each part work."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit.collectives import together
from trainkit.mesh import parallel_session
from trainkit.runtime.directory import make_run_dir
from trainkit.runtime.errors import report_errors
from trainkit.runtime.lock import run_lock
from trainkit.runtime.signals import stop_votes, trap_signals
from trainkit.runtime.startup import agree_at_start
from trainkit.runtime.watchdog import watch

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from datetime import timedelta

    from trainkit.runtime.signals import Asked
    from trainkit.runtime.watchdog import Phase
    from trainkit.types import Axis, ParallelState


@contextlib.contextmanager
def open_run(
    run_dir: str | Path,
    *,
    facts: Mapping[str, Any],
    start_timeout: timedelta,
    grace: float | None = None,
    **layout: Any,
) -> Iterator[tuple[ParallelState, Phase, Asked]]:
    """Open the process groups, with signals trapped, the directory locked and a watch over all.

    From the outside in, and why there: `report_errors` tells of every error and gives it its exit
    code; `trap_signals` hears a signal while ranks still look for each other; `parallel_session`
    brings them together; `make_run_dir` tries the directory on all ranks, and if one of them cannot
    write there, all end (on its own it would leave the others waiting for it); `run_lock` refuses a
    directory that another job trains in, or that not all ranks share; `report_errors` again, since
    from here on a traceback has a directory to lie in; `watch` ends all ranks when one is lost or
    stuck; `stop_votes` lets all stop after the same step; `agree_at_start` compares what the ranks
    were started with. A script that wants fewer of them opens those itself, down to
    `parallel_session` alone.

    Args:
        run_dir: The run directory; it is made.
        facts: What all ranks must have alike: the configuration and `code_facts(__file__)`.
        start_timeout: How long ranks may take to find each other, and everything before the end of
            the first step.
        grace: How many seconds a stop may take; see `watch`.
        **layout: The degrees and what else `parallel_session` takes.

    Yields:
        `(ps, phase, stopping)`: the `ParallelState` of this rank; `phase(name, allow=seconds)` of
        `watch`; `stopping()` of `stop_votes`.

    Raises:
        SystemExit: In place of any exception, with the exit code of `error_code`.

    Effects:
        Opens process groups, starts threads, sets signal handlers and writes the lock and the beats
        of this rank under `run_dir`; closes, ends and puts back what it can at the end.

    Examples:
        >>> import tempfile
        >>> from datetime import timedelta
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     how = {"facts": {"lr": 0.1}, "start_timeout": timedelta(minutes=1)}
        ...     with open_run(folder, **how) as (ps, phase, stopping):
        ...         ps.world.count, stopping()
        (1, None)
    """
    with (
        report_errors(),
        trap_signals() as asked,
        parallel_session(start_timeout=start_timeout, **layout, asked=asked) as ps,
        _made_on_all(run_dir, ps.world) as folder,
        run_lock(folder, ps.world) as hold,
        report_errors(folder),
        watch(
            folder,
            ps.world,
            asked=asked,
            allow=start_timeout.total_seconds(),
            grace=grace,
            hold=hold,
        ) as phase,
        stop_votes(asked, ps.world) as stopping,
    ):
        agree_at_start(ps.world, facts)
        yield ps, phase, stopping


@contextlib.contextmanager
def _made_on_all(run_dir: str | Path, axis: Axis) -> Iterator[Path]:
    together(lambda: str(make_run_dir(run_dir)), axis)
    yield Path(run_dir)
