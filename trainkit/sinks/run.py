"""What a run tells: a line per step, events, and its progress."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from trainkit.sinks.console import console
from trainkit.sinks.jsonl import events, jsonl
from trainkit.sinks.tee import on_first_rank, tee
from trainkit.types import Share, Sink


@contextlib.contextmanager
def run_sinks(
    run_dir: str | Path, share: Share, *, step: int, last: int
) -> Iterator[tuple[Sink, Callable[..., None]]]:
    """Yield `(log, event)`, which write to a run directory on the first rank.

    `log(step, values)` adds a line to `metrics.jsonl` and shows the progress; `event(name,
    **facts)` adds a line to `events.jsonl`, which begins with a "start".

    Args:
        run_dir: The run directory.
        share: Which rank of how many, `ps.world.share`.
        step: The step that the run goes on from.
        last: The step that it stops after.

    Effects:
        Writes to `run_dir` and to stdout, on the first rank alone; removes the `final.json` of a
        run that goes further.
    """
    run_dir = Path(run_dir)
    if share.index == 0 and step < last:
        (run_dir / "final.json").unlink(missing_ok=True)  # it told of an earlier end
    with contextlib.ExitStack() as stack:

        def opened(make: Any, *args: Any, **kwargs: Any) -> Any:
            return stack.enter_context(on_first_rank(share, make, *args, **kwargs))

        lines = opened(jsonl, run_dir / "metrics.jsonl", step=step)
        event = opened(events, run_dir / "events.jsonl")
        progress = opened(console, last, start=step)
        event("start", step=step, ranks=share.count)
        yield tee(lines, progress), event
