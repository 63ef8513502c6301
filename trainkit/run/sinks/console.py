"""The progress of a run: two lines on a terminal, and ever fewer lines in a log or a pipe."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any, TextIO

from trainkit.files import redirect_to_devnull
from trainkit.run.log import COLUMNS
from trainkit.types import DelayedMetrics, Sink, needs_extra

_BAR_SECONDS = 0.1
_LINE_SECONDS = 2.0
# A log of a day would have 40,000 lines, so the time between two of them grows with the run's: the
# first minute has 15, the first hour 50, and every further hour 30.
_LINE_GROWTH = 0.1
_MOST_SECONDS = 120.0

_SHOWN = ("loss", "speed", "mfu", "lr", "norm", "load", "left")
_LEFT_OUT = ("lr", "load", "mfu", "speed")  # in this order, where a line has no room


def escape_control_characters(text: str) -> str:
    """Return a text with its control characters replaced, so that it cannot garble a terminal.

    Examples:
        >>> escape_control_characters("red: " + chr(27) + "[31m")
        'red: \ufffd[31m'
    """
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)


@contextlib.contextmanager
def open_console(total: int, *, start: int = 0, stream: TextIO | None = None) -> Iterator[Sink]:
    """Yield a sink that shows how far a run is, how long it takes yet, and its newest numbers.

    On a terminal these are two lines that are drawn again ten times a second at most: a bar with
    the time left; and loss, rate, norm, tokens per second, utilization and memory, those of them
    that a step has. Elsewhere a line is written for the first step and the last, and between them
    every two seconds at first and every two minutes after a while. A model with experts also shows
    `load_over_mean`. A step that `overflowed` shows, in place of its norm, that it was skipped, and
    the next `loss_scale`. Of steps that are read at once it shows the last. Most calls only read
    the clock.

    Args:
        total: The last step of the run.
        start: The step that the run resumes from.
        stream: Where to write; by default the stdout of the moment the context is entered.

    Effects:
        Writes to `stream`. On a terminal, other output appears above the bar.

    Examples:
        >>> with open_console(2) as sink:
        ...     sink(1, {"loss": 5.545, "tokens_per_second": 41e3, "lr": 3e-4, "grad_norm": 1.25})
        step 1/2  loss 5.5450  41.0k tok/s  lr 3.00e-04  norm 1.25  left ...
    """
    stream = sys.stdout if stream is None else stream
    with (
        open_display(total, start=start, stream=stream) as display,
        pace_display(display, total, start=start, is_terminal=stream.isatty()) as sink,
    ):
        yield sink


@contextlib.contextmanager
def open_display(total: int, *, start: int, stream: TextIO) -> Iterator[Sink]:
    """Yield a sink that shows every step that it gets, with its `seconds_left`.

    Examples:
        >>> with open_display(2, start=0, stream=sys.stdout) as sink:
        ...     sink(1, {"loss": 5.545, "seconds_left": 7.0})
        step 1/2  loss 5.5450  - tok/s  lr -  norm -  left 0:00:07
    """
    with (_open_bar if stream.isatty() else _open_lines)(stream, start, total) as show:

        def sink(step: int, values: Mapping[str, Any]) -> None:
            try:
                show(step, values)
            except BrokenPipeError:  # raised once: what is written later goes nowhere
                with contextlib.suppress(OSError, ValueError):
                    redirect_to_devnull(stream)
                raise

        yield sink


@contextlib.contextmanager
def pace_display(display: Sink, total: int, *, start: int, is_terminal: bool) -> Iterator[Sink]:
    """Yield a sink that passes on the steps that `open_console` shows, and at the end the last.

    Most of its calls only read the clock, so that a step does not wake up the thread of a display.

    Examples:
        >>> with pace_display(lambda step, _: print(step), 9, start=0, is_terminal=False) as sink:
        ...     for step in (1, 2, 3):
        ...         sink(step, {})
        1
        3
    """
    opened = time.monotonic()
    first = (opened, start)  # the speed is measured from here
    due = 0.0
    waiting: tuple[float, int, Mapping[str, Any]] | None = None

    def flush() -> None:
        nonlocal waiting
        if waiting is not None:
            now, step, values = waiting
            waiting = None
            pace = (now - first[0]) / max(1, step - first[1])
            display(step, {**values, "seconds_left": pace * (total - step)})

    def sink(step: int, values: Mapping[str, Any]) -> None:
        nonlocal first, due, waiting
        if isinstance(values, DelayedMetrics):
            return
        now = time.monotonic()
        waiting = (now, step, values)
        if now >= due or step >= total:
            flush()
            first = first if due else (now, step)  # without the first step, which also warms up
            due = now + (_BAR_SECONDS if is_terminal else _get_pause(now - opened))

    try:
        yield sink
    finally:
        flush()  # shows the last step, however the run ends


def _get_pause(elapsed: float) -> float:
    """Return the seconds until the next line of a log."""
    return min(max(_LINE_SECONDS, _LINE_GROWTH * elapsed), _MOST_SECONDS)


def progress_text(values: Mapping[str, Any], *, seconds_left: float, columns: int = COLUMNS) -> str:
    """Return loss, tokens per second, learning rate, gradient norm and time left in one line.

    What has no room is left out, the learning rate first.

    Examples:
        >>> progress_text({"loss": 2.5, "tokens_per_second": 1234.5}, seconds_left=4000)
        'loss 2.5000  1.2k tok/s  lr -  norm -  left 1:06:40'
        >>> progress_text({"loss": 2.5, "mfu": 0.4, "load_over_mean": 1.32}, seconds_left=9)
        'loss 2.5000  - tok/s  mfu 40.0%  lr -  norm -  load 1.32  left 0:00:09'
        >>> skipped = {"grad_norm": float("inf"), "overflowed": 1, "loss_scale": 65536.0}
        >>> progress_text({"loss": 2.5} | skipped, seconds_left=9)
        'loss 2.5000  - tok/s  lr -  overflow: scale 32768  left 0:00:09'
        >>> progress_text({"loss": 2.5, "lr": 1.0}, seconds_left=9, columns=44)
        'loss 2.5000  - tok/s  norm -  left 0:00:09'
    """
    parts = _format_parts(values) | {"left": f"left {_format_time(seconds_left)}"}
    return _join_parts({name: parts[name] for name in _SHOWN if name in parts}, columns)


def metrics_text(values: Mapping[str, Any], *, columns: int = COLUMNS) -> str:
    """Return the numbers of a step for the second line on a terminal.

    What has no room is left out, the learning rate first.

    Examples:
        >>> metrics_text({"loss": 2.5, "lr": 3e-4, "grad_norm": 1.2, "tokens_per_second": 1234.5})
        'loss 2.5000  lr 3.00e-04  norm 1.20  1.2k tok/s'
        >>> metrics_text({"loss": 2.5, "mfu": 0.41, "memory_peak": 75 * 2**30})
        'loss 2.5000  lr -  norm -  - tok/s  mfu 41.0%  75.0 GiB'
        >>> metrics_text({"loss": 2.5, "mfu": 0.41, "memory_peak": 75 * 2**30}, columns=50)
        'loss 2.5000  norm -  - tok/s  mfu 41.0%  75.0 GiB'
    """
    return _join_parts(_format_parts(values), columns)


def _join_parts(parts: Mapping[str, str], columns: int) -> str:
    names = [*parts]
    for name in _LEFT_OUT:
        if len("  ".join(parts[x] for x in names)) > columns and name in names:
            names.remove(name)
    return "  ".join(parts[name] for name in names)


def _format_parts(values: Mapping[str, Any]) -> dict[str, str]:
    norm = f"norm {_format_number(values.get('grad_norm'), '.2f')}"
    if values.get("overflowed"):
        norm = f"overflow: scale {values['loss_scale'] / 2:g}"
    parts = {
        "loss": f"loss {_format_number(values.get('loss'), '.4f')}",
        "lr": f"lr {_format_number(values.get('lr'), '.2e')}",
        "norm": norm,
        "speed": f"{format_thousands(values.get('tokens_per_second'))} tok/s",
    }
    if "mfu" in values:
        parts["mfu"] = f"mfu {values['mfu']:.1%}"
    if "memory_peak" in values:
        parts["memory"] = f"{values['memory_peak'] / 2**30:.1f} GiB"
    if "load_over_mean" in values:
        parts["load"] = f"load {values['load_over_mean']:.2f}"
    return parts


def _format_time(seconds: float) -> timedelta:
    # Rounded, because str(timedelta) would show microseconds.
    return timedelta(seconds=round(max(0.0, seconds)))


def _format_number(value: Any, form: str) -> str:
    return "-" if value is None else format(float(value), form)


def format_thousands(value: Any) -> str:
    """Return a number with three digits or so, and a letter; "-" for None.

    Examples:
        >>> [format_thousands(x) for x in (None, 850, 41_000, 5.3e6, 2e9)]
        ['-', '850', '41.0k', '5.3M', '2.0G']
    """
    if value is None:
        return "-"
    for limit, scale, letter in ((1e3, 1.0, ""), (1e6, 1e3, "k"), (1e9, 1e6, "M")):
        if value < limit:
            return f"{value / scale:.{1 if letter else 0}f}{letter}"
    return f"{value / 1e9:.1f}G"


@contextlib.contextmanager
def _open_lines(stream: TextIO, start: int, total: int) -> Iterator[Sink]:
    del start

    def show(step: int, values: Mapping[str, Any]) -> None:
        steps = f"step {step}/{total}  "
        text = progress_text(
            values, seconds_left=values["seconds_left"], columns=COLUMNS - len(steps)
        )
        print(f"{steps}{text}", file=stream, flush=True)

    yield show


@contextlib.contextmanager
def _open_bar(stream: TextIO, start: int, total: int) -> Iterator[Sink]:
    with needs_extra("recipes"):
        from rich.console import Console, Group  # noqa: PLC0415 -- an extra
        from rich.live import Live  # noqa: PLC0415 -- an extra
        from rich.progress import BarColumn, Progress, TextColumn  # noqa: PLC0415 -- an extra
        from rich.text import Text  # noqa: PLC0415 -- an extra
    progress = Progress(
        TextColumn("step {task.completed}/{task.total}", style="bold"),
        BarColumn(bar_width=None),
        TextColumn("{task.percentage:>3.0f}%  {task.fields[left]}"),
        expand=True,
    )
    task = progress.add_task("", total=total, completed=start, left="")
    # Two lines from the start: messages come from another thread than the sink's, and one that did
    # not know of the lines yet would be written onto them.
    lines = Group(progress, Text(""))
    # Without a thread that refreshes them, the lines are drawn inside the sink, at a known cost.
    with Live(lines, console=Console(file=stream), auto_refresh=False) as live:

        def show(step: int, values: Mapping[str, Any]) -> None:
            left = f"left {_format_time(values['seconds_left'])}"
            progress.update(task, completed=step, left=left)
            text = metrics_text(values, columns=live.console.width)
            numbers = Text(text, no_wrap=True, overflow="ellipsis")
            live.update(Group(progress, numbers), refresh=True)

        yield show
