"""All that a training process needs around it, opened in the order that makes each part work."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from trainkit.mesh import parallel_session
from trainkit.runtime.errors import report_errors
from trainkit.runtime.lock import run_lock
from trainkit.runtime.signals import stop_votes, trap_signals
from trainkit.runtime.startup import agree_at_start
from trainkit.runtime.watchdog import watch

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from datetime import timedelta
    from pathlib import Path

    from trainkit.runtime.signals import Asked
    from trainkit.runtime.watchdog import Phase
    from trainkit.types import ParallelState


@contextlib.contextmanager
def open_run(
    run_dir: Path, *, facts: Mapping[str, Any], start_timeout: timedelta, **layout: Any
) -> Iterator[tuple[ParallelState, Phase, Asked]]:
    """Open the process groups, with signals trapped, the directory locked and a watch over all.

    From the outside in, and why there: `report_errors` tells of every error and gives it its exit
    code; `trap_signals` hears a signal while ranks still look for each other; `parallel_session`
    brings them together; `run_lock` refuses a directory that another job trains in, before anything
    is written there; `report_errors` again, since from here on a traceback has a directory to lie
    in; `watch` ends all ranks when one is lost or stuck; `stop_votes` lets all stop after the same
    step; `agree_at_start` compares what the ranks were started with. Each is a context of its own:
    a script that wants fewer of them opens those, down to `parallel_session` alone.

    Args:
        run_dir: The run directory, made by `make_run_dir`.
        facts: What all ranks must have alike: the configuration and `code_facts(__file__)`.
        start_timeout: How long ranks may take to find each other, and everything before the end of
            the first step.
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
        >>> from trainkit.runtime import make_run_dir
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     how = {"facts": {"lr": 0.1}, "start_timeout": timedelta(minutes=1)}
        ...     with open_run(make_run_dir(folder), **how) as (ps, phase, stopping):
        ...         ps.world.count, stopping()
        (1, None)
    """
    with (
        report_errors(),
        trap_signals() as asked,
        parallel_session(start_timeout=start_timeout, **layout, asked=asked) as ps,
        run_lock(run_dir, ps.world),
        report_errors(run_dir),
        watch(run_dir, ps.world, asked=asked, allow=start_timeout.total_seconds()) as phase,
        stop_votes(asked, ps.world) as stopping,
    ):
        agree_at_start(ps.world, facts)
        yield ps, phase, stopping
