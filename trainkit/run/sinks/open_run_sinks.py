"""What a run tells: a line per step, events, its progress, and how its time was spent."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

from trainkit.files import say_on_stderr
from trainkit.run.sinks.console import escape_control_characters, open_console, printed
from trainkit.run.sinks.guards import isolate_sinks
from trainkit.run.sinks.jsonl import open_events, open_jsonl, read_jsonl, rewind_jsonl
from trainkit.run.sinks.tee import tee
from trainkit.run.sinks.timing import measure_goodput
from trainkit.types import DiskError, Share, Sink
from trainkit.weights.checkpoint.directory import get_run_id


@contextlib.contextmanager
def open_run_sinks(
    run_dir: str | Path,
    share: Share,
    *,
    step: int,
    last: int,
    extra: Mapping[str, Callable[..., AbstractContextManager[Sink]]] | None = None,
    patience: float = 5.0,
) -> Iterator[tuple[Sink, Callable[..., None]]]:
    """Yield `(log, event)`, which write to a run directory on the first rank, and never fail.

    `log(step, values)` adds a line to `metrics.jsonl` and shows the progress; `event(name,
    **facts)` adds a line to `events.jsonl`, which begins with a "start" and ends with an "end".
    `extra` sinks get what is logged as `train/NAME`; what an `event("evaluation", step=...,
    NAME=...)` found is `eval/NAME` in its line and, but for the number of tokens, which is no
    curve, in those sinks too. `read_metrics` joins both.
    The lines are written at once, by the caller: a disk that is full is told about, and gets them
    when it has room. Everything else runs behind the caller's back (see `isolate_sinks`). What goes
    wrong is told once, on stderr and as an event called "warning". After a roll-back `log` may be
    given
    earlier steps again: they take the place of those from there on.

    Args:
        run_dir: The run directory.
        share: Which rank of how many, `ps.world.share`.
        step: The step that the run goes on from.
        last: The step that it stops after.
        extra: More sinks by name, each opened as `make(step=step)`: `tensorboard` or `wandb` with
            their first argument bound, or any context manager that yields a sink.
        patience: Seconds that closing may take, for the console and for all other sinks together.

    Raises:
        DiskError: The files cannot be opened.

    Effects:
        Writes to `run_dir` and to stdout, on the first rank alone, with a thread per sink; gives a
        new run its `run.json`; removes the `final.json` of a run that goes further.
    """
    if share.index != 0:
        yield _ignore, _ignore
        return
    run_dir = Path(run_dir)
    if step < last:
        (run_dir / "final.json").unlink(missing_ok=True)  # it told of an earlier end
    found = rewind_jsonl(run_dir / "metrics.jsonl", step)
    reached = step
    with open_events(run_dir / "events.jsonl", tell=_warn) as event:

        def tell(problem: str) -> None:
            event("warning", step=reached, what=problem)
            _warn(problem)

        def count(step: int, values: Mapping[str, Any]) -> None:
            nonlocal reached
            del values
            if step <= reached:
                event("rewind", step=step - 1, repeated=reached - step + 1)
            reached = step

        bar: dict[str, Any] = {}
        if sys.stdout is not None:  # it is None where it was closed before Python started
            bar["console"] = partial(open_console, last, start=step, stream=sys.stdout)
        makers = {name: partial(make, step=step) for name, make in (extra or {}).items()}
        facts = {"ranks": share.count, "last": last, "run": _identity(run_dir)}
        event("start", step=step, repeated=found.dropped, **facts)
        if found.missing:
            tell(f"metrics.jsonl has no line for {found.missing} of the steps up to {step}")
        with (
            _told_end(event, lambda: reached),
            open_jsonl(run_dir / "metrics.jsonl", step=step, tell=tell) as lines,
            isolate_sinks(bar, tell=tell, patience=patience) as progress,
            isolate_sinks(makers, tell=tell, patience=patience) as others,
        ):
            yield tee(count, lines, progress, _under_train(others)), _telling(event, others)


def _under_train(sink: Sink) -> Sink:
    def write(step: int, values: Mapping[str, Any]) -> None:
        sink(step, {f"train/{name}": value for name, value in values.items()})

    return write


def _telling(event: Callable[..., None], sink: Sink) -> Callable[..., None]:
    """Return an `event` that tells a sink too what an evaluation found, as eval/NAME."""

    def tell(name: str, **facts: Any) -> None:
        if name == "evaluation" and "step" in facts:
            step = facts.pop("step")
            found = {f"eval/{key}": value for key, value in facts.items()}
            sink(step, {key: value for key, value in found.items() if key != "eval/tokens"})
            facts = {"step": step, **found}
        event(name, **facts)

    return tell


def summarize_run(run_dir: str | Path) -> str:
    """Return how the time of a run was spent, over all its restarts, in one line.

    Args:
        run_dir: A run directory with `metrics.jsonl` and `events.jsonl`.

    Examples:
        >>> summarize_run("no/such/run")
        'goodput -: 0 steps, 0 repeated, 0 starts, 0 saves that blocked for 0.0 s, 0.0 s in all'
    """
    run_dir = Path(run_dir)
    found = measure_goodput(
        read_jsonl(run_dir / "metrics.jsonl"), read_jsonl(run_dir / "events.jsonl")
    )
    share = f"{found.share:.1%}" if found.wall else "-"
    down = f", and {found.down:.1f} s in which nothing ran" if found.starts > 1 else ""
    return (
        f"goodput {share}: {found.steps} steps, {found.repeated} repeated, {found.starts} starts, "
        f"{found.saves} saves that blocked for {found.blocked:.1f} s, "
        f"{found.wall:.1f} s in all{down}"
    )


def printer(share: Share) -> Callable[[str], None]:
    """Return a `print` for one text that prints on the first rank alone, and never fails.

    Control characters are replaced, as `escape_control_characters` does: a text may be what a model
        wrote.
    A run outlives whoever reads its output: what nobody reads any more goes nowhere.

    Args:
        share: Which rank of how many, `ps.world.share`.

    Examples:
        >>> say = printer(Share(0, 2))
        >>> say("reading the corpus")
        reading the corpus
    """
    return _print_safely if share.index == 0 else _ignore


def _print_safely(text: str) -> None:
    printed(escape_control_characters(text))


def _identity(run_dir: Path) -> str | None:
    # Here and not in a sink's thread: no save is in flight yet that could draw another one.
    with contextlib.suppress(DiskError):
        return get_run_id(run_dir)["run"]
    return None


@contextlib.contextmanager
def _told_end(event: Callable[..., None], reached: Callable[[], int]) -> Iterator[None]:
    """Add an "end" when the block ends, with the kind of what ended it early."""
    try:
        yield
    except BaseException as error:
        event("end", step=reached(), failure=type(error).__name__)
        raise
    event("end", step=reached(), failure=None)


def _warn(problem: str) -> None:
    say_on_stderr(f"warning: {problem}")


def _ignore(*args: Any, **kwargs: Any) -> None:
    del args, kwargs
