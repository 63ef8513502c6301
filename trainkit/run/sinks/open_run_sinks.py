"""The sinks of a run, opened together: metrics.jsonl, events.jsonl, the progress, and others."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from trainkit.run.log import add_handler, make_logger, print_warning
from trainkit.run.sinks.console import open_display, pace_display
from trainkit.run.sinks.guards import isolate_sinks
from trainkit.run.sinks.jsonl import WriteEvent, open_events, open_jsonl, read_jsonl, rewind_jsonl
from trainkit.run.sinks.tee import tee
from trainkit.run.sinks.timing import measure_goodput
from trainkit.run.sinks.totals import describe_totals
from trainkit.types import DiskError, Log, OpenSink, Share, Sink
from trainkit.weights.checkpoint.run_id import get_run_id


@contextlib.contextmanager
def open_run_sinks(
    run_dir: str | Path,
    share: Share,
    *,
    step: int,
    last: int,
    extra: Mapping[str, OpenSink] | None = None,
    patience: float = 5.0,
    logger: logging.Logger | None = None,
) -> Iterator[tuple[Sink, WriteEvent]]:
    """Yield `(record, event)`, which write to a run directory on the first rank, and never fail.

    `record(step, values)` adds a line to `metrics.jsonl` and shows the progress; `event(name,
    **facts)` adds a line to `events.jsonl`, which starts with a "start" and ends with an "end".
    `extra` sinks receive the metrics as `train/NAME`. The results of an `event("evaluation",
    step=..., NAME=...)` are `eval/NAME` in its line and, except for the number of tokens, in those
    sinks too. `read_metrics` joins both.

    The caller writes the lines at once; a disk that is full gets them when it has room. Everything
    else runs on threads (see `isolate_sinks`). Each problem is a warning of `logger`, once; its
    warnings are events called "warning" too. After a roll-back `record` may be given earlier steps
    again: they replace the lines from there on.

    Args:
        run_dir: The run directory.
        share: Which rank of how many, `ps.world.share`.
        step: The step that the run resumes from.
        last: The step that it stops after.
        extra: More sinks by name, each opened as `make(step=step)`: `open_tensorboard` or
            `open_wandb` with their first argument bound, or any context manager that yields a sink.
        patience: Seconds that closing may take, for the console and for all other sinks together.
        logger: The logger of the run; by default a new one (`make_logger`).

    Raises:
        DiskError: The files cannot be opened.

    Effects:
        Writes to `run_dir` and to stdout, on the first rank alone, with a thread per sink; gives a
        new run its `run.json`; removes the `final.json` of a run that is extended.
    """
    if share.index != 0:
        yield _ignore, _ignore
        return
    run_dir = Path(run_dir)
    logger = logger or make_logger(share)
    warn: Log = logger.warning
    if step < last:
        (run_dir / "final.json").unlink(missing_ok=True)  # of an earlier end
    # Lines after the step that is resumed from go: those steps are repeated.
    rewound = rewind_jsonl(run_dir / "metrics.jsonl", step)
    reached = step
    # Problems of events.jsonl itself are only printed: as events they would wait for themselves.
    with open_events(run_dir / "events.jsonl", log=print_warning) as event:

        def count(step: int, values: Mapping[str, Any]) -> None:
            nonlocal reached
            del values
            if step <= reached:
                event("rewind", step=step - 1, repeated=reached - step + 1)
            reached = step

        bar: dict[str, Any] = {}
        is_terminal = False
        if sys.stdout is not None:  # it is None where it was closed before Python started
            bar["console"] = partial(open_display, last, start=step, stream=sys.stdout)
            with contextlib.suppress(ValueError):  # of a closed stream
                is_terminal = sys.stdout.isatty()
        run = _read_identity(run_dir)
        makers = {name: partial(make, step=step) for name, make in (extra or {}).items()}
        event("start", step=step, repeated=rewound.dropped, ranks=share.count, last=last, run=run)
        with (
            _end_event(event, lambda: reached),
            add_handler(
                logger,
                lambda message: event("warning", step=reached, what=message),
                level=logging.WARNING,
            ),
        ):
            if rewound.missing:
                warn(f"metrics.jsonl has no line for {rewound.missing} of the steps up to {step}")
            with (
                open_jsonl(run_dir / "metrics.jsonl", step=step, log=warn) as lines,
                # The console is separate, so that a sink that hangs does not use up its time to
                # close.
                isolate_sinks(bar, log=warn, patience=patience) as display,
                pace_display(display, last, start=step, is_terminal=is_terminal) as progress,
                isolate_sinks(makers, log=warn, patience=patience) as others,
            ):
                # The file comes before what only shows the step.
                shown = [_add_prefix(others)] if makers else []
                record = tee(count, lines, progress, *shown)
                yield record, _send_evaluations(event, others)


def _add_prefix(sink: Sink) -> Sink:
    # TensorBoard and W&B group curves by the part of a name before the slash.
    def write(step: int, values: Mapping[str, Any]) -> None:
        sink(step, {f"train/{name}": value for name, value in values.items()})

    return write


def _send_evaluations(event: WriteEvent, sink: Sink) -> WriteEvent:
    """Return an `event` that also passes the results of an evaluation to a sink, as eval/NAME."""

    def event_and_curves(name: str, **facts: Any) -> None:
        if name == "evaluation" and "step" in facts:
            step = facts.pop("step")
            results = {f"eval/{key}": value for key, value in facts.items()}
            # A number of tokens is no curve; it is the same at every evaluation.
            sink(step, {key: value for key, value in results.items() if key != "eval/tokens"})
            facts = {"step": step, **results}
        event(name, **facts)

    return event_and_curves


def summarize_run(run_dir: str | Path) -> str:
    """Return what a run has done, over all its restarts: goodput, then `describe_totals`.

    Args:
        run_dir: A run directory with `metrics.jsonl` and `events.jsonl`.

    Examples:
        >>> summarize_run("no/such/run")
        'goodput -: 0 steps, 0 repeated, 0 starts, 0 saves that blocked for 0.0 s, 0.0 s in all'
    """
    run_dir = Path(run_dir)
    metrics = read_jsonl(run_dir / "metrics.jsonl")
    time = measure_goodput(metrics, read_jsonl(run_dir / "events.jsonl"))
    share = f"{time.share:.1%}" if time.wall else "-"
    down = f", and {time.down:.1f} s in which nothing ran" if time.starts > 1 else ""
    goodput = (
        f"goodput {share}: {time.steps} steps, {time.repeated} repeated, {time.starts} starts, "
        f"{time.saves} saves that blocked for {time.blocked:.1f} s, "
        f"{time.wall:.1f} s in all{down}"
    )
    return "\n".join([goodput, *describe_totals(metrics)])


def _read_identity(run_dir: Path) -> str | None:
    # Read here, not in a sink's thread: no save runs yet that could create another identity.
    with contextlib.suppress(DiskError):
        return get_run_id(run_dir)["run"]
    return None


@contextlib.contextmanager
def _end_event(event: WriteEvent, reached: Callable[[], int]) -> Iterator[None]:
    """Add an event "end" when the block ends, with the type of the exception that ended it."""
    try:
        yield
    except BaseException as error:
        event("end", step=reached(), failure=type(error).__name__)
        raise
    event("end", step=reached(), failure=None)


def _ignore(*args: Any, **kwargs: Any) -> None:
    del args, kwargs
