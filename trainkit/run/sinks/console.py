"""The progress of a run: a bar on a terminal, a line every two seconds in a log or a pipe."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any, TextIO

from trainkit.files import redirect_to_devnull
from trainkit.types import DelayedMetrics, Sink, needs_extra

_BAR_SECONDS = 0.1
_LINE_SECONDS = 2.0

Show = Callable[[int, str], None]


def escape_control_characters(text: str) -> str:
    """Return a text with its control characters replaced, so that it cannot garble a terminal.

    Examples:
        >>> escape_control_characters("red: " + chr(27) + "[31m")
        'red: \ufffd[31m'
    """
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)


@contextlib.contextmanager
def open_console(total: int, *, start: int = 0, stream: TextIO | None = None) -> Iterator[Sink]:
    """Yield a sink that shows step, loss, tokens per second, learning rate, norm and time left.

    It reads `loss`, `tokens_per_second`, `lr` and `grad_norm` of the values; a missing one shows
    as a dash. A model with experts also shows `load_over_mean`. A step that `overflowed` shows, in
    place of its norm, that it was skipped, and the next `loss_scale`. Of steps that are read at
    once it shows the last. Most calls only read the clock: a bar is redrawn ten times a second at
    most; a line is written for the first step, the last step and every two seconds between.

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
    show_in, interval = (
        (_open_bar, _BAR_SECONDS) if stream.isatty() else (_open_lines, _LINE_SECONDS)
    )
    first = (time.monotonic(), start)  # the speed is measured from here
    due = 0.0
    waiting: tuple[float, int, Mapping[str, Any]] | None = None
    with show_in(stream, start, total) as show:

        def flush() -> None:
            nonlocal waiting
            if waiting is not None:
                now, step, values = waiting
                pace = (now - first[0]) / max(1, step - first[1])
                try:
                    show(step, progress_text(values, seconds_left=pace * (total - step)))
                except BrokenPipeError:  # raised once: what is written later goes nowhere
                    with contextlib.suppress(OSError, ValueError):
                        redirect_to_devnull(stream)
                    raise
                waiting = None

        def sink(step: int, values: Mapping[str, Any]) -> None:
            nonlocal first, due, waiting
            if isinstance(values, DelayedMetrics):
                return
            now = time.monotonic()
            waiting = (now, step, values)
            if now >= due or step >= total:
                flush()
                first = first if due else (now, step)  # without the first step, which also warms up
                due = now + interval

        try:
            yield sink
        finally:
            flush()  # shows the last step, however the run ends


def progress_text(values: Mapping[str, Any], *, seconds_left: float) -> str:
    """Return loss, tokens per second, learning rate, gradient norm and time left in one line.

    Examples:
        >>> progress_text({"loss": 2.5, "tokens_per_second": 1234.5}, seconds_left=4000)
        'loss 2.5000  1.2k tok/s  lr -  norm -  left 1:06:40'
        >>> progress_text({"loss": 2.5, "mfu": 0.4, "load_over_mean": 1.32}, seconds_left=9)
        'loss 2.5000  - tok/s  mfu 40.0%  lr -  norm -  load 1.32  left 0:00:09'
        >>> skipped = {"grad_norm": float("inf"), "overflowed": 1, "loss_scale": 65536.0}
        >>> progress_text({"loss": 2.5} | skipped, seconds_left=9)
        'loss 2.5000  - tok/s  lr -  overflow: skipped, scale now 32768  left 0:00:09'
    """
    loss = _format_number(values.get("loss"), ".4f")
    lr = _format_number(values.get("lr"), ".2e")
    norm = f"norm {_format_number(values.get('grad_norm'), '.2f')}"
    if values.get("overflowed"):
        norm = f"overflow: skipped, scale now {values['loss_scale'] / 2:g}"
    speed = _format_thousands(values.get("tokens_per_second"))
    # Rounded, because str(timedelta) would show microseconds.
    left = timedelta(seconds=round(max(0.0, seconds_left)))
    mfu = f"  mfu {values['mfu']:.1%}" if "mfu" in values else ""
    load = f"  load {values['load_over_mean']:.2f}" if "load_over_mean" in values else ""
    return f"loss {loss}  {speed} tok/s{mfu}  lr {lr}  {norm}{load}  left {left}"


def _format_number(value: Any, form: str) -> str:
    return "-" if value is None else format(float(value), form)


def _format_thousands(value: Any) -> str:
    if value is None:
        return "-"
    for limit, scale, letter in ((1e3, 1.0, ""), (1e6, 1e3, "k"), (1e9, 1e6, "M")):
        if value < limit:
            return f"{value / scale:.{1 if letter else 0}f}{letter}"
    return f"{value / 1e9:.1f}G"


@contextlib.contextmanager
def _open_lines(stream: TextIO, start: int, total: int) -> Iterator[Show]:
    del start

    def show(step: int, text: str) -> None:
        print(f"step {step}/{total}  {text}", file=stream, flush=True)

    yield show


@contextlib.contextmanager
def _open_bar(stream: TextIO, start: int, total: int) -> Iterator[Show]:
    with needs_extra("recipes"):
        from rich.console import Console  # noqa: PLC0415 -- an extra
        from rich.progress import BarColumn, Progress, TextColumn  # noqa: PLC0415 -- an extra
    # Without a thread that refreshes it, the bar is drawn inside the sink, at a known cost.
    columns = (
        TextColumn("step {task.completed}/{task.total}", style="bold"),
        BarColumn(bar_width=None),
        TextColumn("{task.fields[text]}"),
    )
    with Progress(*columns, console=Console(file=stream), auto_refresh=False, expand=True) as bar:
        task = bar.add_task("", total=total, completed=start, text="")

        def show(step: int, text: str) -> None:
            bar.update(task, completed=step, text=text, refresh=True)

        yield show
