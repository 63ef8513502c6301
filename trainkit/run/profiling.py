"""Profiles: a trace of some steps for each rank, the most expensive operations, and idle time."""

from __future__ import annotations

import contextlib
import errno
import gzip
import os
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import attrs
import torch
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity

from trainkit.files import atomic_write, convert_disk_errors
from trainkit.phases import BETWEEN_STEPS, get_phase_times
from trainkit.run.log import COLUMNS

_SHOWN = 10  # operations in the table
_MEMORY_ENTRIES = 200_000  # allocations that a snapshot of CUDA's memory can hold


@attrs.frozen
class Operation:
    """One kind of operation of a profile: how often it ran, and its own seconds, not its parts'."""

    name: str
    calls: int
    seconds: float


@attrs.frozen
class ProfileSummary:
    """What a profile shows at a glance.

    Attributes:
        seconds: The time that was profiled, without what was left out.
        idle: The share of it in which nothing computed: no kernel on an accelerator, otherwise no
            operator of torch in any thread.
        operations: The most expensive operations, in this order.
        on: What the seconds of the operations are of, "cuda" or "cpu".
        left_out: The seconds of evaluations and samples, which are in no trace.
    """

    seconds: float
    idle: float
    operations: tuple[Operation, ...]
    on: str
    left_out: float = 0.0

    def __str__(self) -> str:
        lines = [
            f"{self.seconds:.3f} s, of which nothing computed on the {self.on} in {self.idle:.1%}"
        ]
        for one in self.operations:
            numbers = (
                f"  {one.seconds / max(self.seconds, 1e-9):6.1%}  {one.seconds * 1e3:9.2f} ms  "
                f"{one.calls:6d} x  "
            )
            # A row stays one line: the name of a kernel may have hundreds of characters.
            room = COLUMNS - len(numbers)
            name = one.name if len(one.name) <= room else f"{one.name[: room - 1]}…"
            lines.append(numbers + name)
        if self.left_out:
            lines.append(f"  evaluations and samples are left out of it, {self.left_out:.1f} s")
        return "\n".join(lines)


def measure_covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of intervals, each counted once where they overlap.

    Examples:
        >>> measure_covered([(0.0, 2.0), (1.0, 3.0), (5.0, 6.0)])
        4.0
    """
    covered = 0.0
    reached = float("-inf")
    for begin, end in sorted(intervals):
        covered += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return covered


def summarize_profile(
    events: Iterable[Any], *, on: str, seconds: float, left_out: float = 0.0
) -> ProfileSummary:
    """Return the most expensive operations and the idle share of the events of torch's profiler.

    Args:
        events: `torch.profiler.profile(...).events()`.
        on: "cuda" counts kernels, "cpu" operators.
        seconds: The time that was profiled.
        left_out: The seconds of it that no event is of.
    """
    seconds -= left_out
    totals: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    intervals = list[tuple[float, float]]()
    for event in events:
        is_kernel = event.device_type == torch.autograd.DeviceType.CUDA
        if event.is_user_annotation or is_kernel != (on == "cuda"):
            continue
        microseconds = event.self_device_time_total if is_kernel else event.self_cpu_time_total
        totals[event.name][0] += 1
        totals[event.name][1] += microseconds / 1e6
        intervals.append((event.time_range.start, event.time_range.end))
    most_expensive = sorted(totals.items(), key=lambda item: -item[1][1])[:_SHOWN]
    covered = measure_covered(intervals) / 1e6
    return ProfileSummary(
        seconds=seconds,
        idle=min(1.0, max(0.0, 1 - covered / seconds)) if seconds > 0 else 0.0,
        operations=tuple(Operation(name, int(n), total) for name, (n, total) in most_expensive),
        on=on,
        left_out=left_out,
    )


@contextlib.contextmanager
def profile(
    folder: str | Path,
    *,
    rank: int = 0,
    device: torch.device | str = "cpu",
    report: Callable[[ProfileSummary], None] = print,
) -> Iterator[None]:
    """Profile a block: write a trace, and report the most expensive operations and the idle time.

    The trace opens in Perfetto (ui.perfetto.dev) or chrome://tracing. Phases of a step
    (`measure_phase`) are spans in it. Evaluations and samples (`phases.BETWEEN_STEPS`) are
    empty spans: with their operations it would take minutes to write. On CUDA a snapshot of the
    memory is written too, for pytorch.org/memory_viz. The profiler itself makes a block slower, on
    a CPU often by a third.

    Args:
        folder: Where to write, created if it does not exist; equal on all ranks.
        rank: The rank, `ps.world.index`.
        device: The device of this rank, `ps.device`.
        report: Called with the summary, before anything is written.

    Raises:
        DiskError: A file cannot be written.

    Effects:
        Writes `rank_00000.json.gz`, and on CUDA `rank_00000.memory.pickle`. Inside the block
        KINETO_LOG_LEVEL is set, as torch's profiler prints lines of its own otherwise.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with profile(folder, report=lambda found: print(found.operations[0].name)):
        ...         _ = torch.ones(256, 256) @ torch.ones(256, 256)
        ...     [path.name for path in Path(folder).iterdir()]
        aten::mm
        ['rank_00000.json.gz']
    """
    device = torch.device(device)
    path = Path(folder) / f"rank_{rank:05d}.json.gz"
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with _record_cuda_memory(device):
        with (
            _silence_kineto(),
            torch.profiler.profile(activities=activities) as profiler,
            _mark_phases(profiler) as left_out,
        ):
            yield
            if device.type == "cuda":  # so that the kernels of the last step are in the trace
                torch.cuda.synchronize(device)
        events: Any = profiler.events()
        begin = min((event.time_range.start for event in events), default=0.0)
        end = max((event.time_range.end for event in events), default=0.0)
        on = "cuda" if device.type == "cuda" else "cpu"
        seconds = (end - begin) / 1e6
        # Before the files, which may not be writable.
        report(summarize_profile(events, on=on, seconds=seconds, left_out=sum(left_out)))
        with convert_disk_errors(path, by="profile"):
            path.parent.mkdir(parents=True, exist_ok=True)
            _write_trace(profiler, path)
            if device.type == "cuda":
                snapshot = path.with_name(f"rank_{rank:05d}.memory.pickle")
                torch.cuda.memory._dump_snapshot(str(snapshot))  # noqa: SLF001 (as in torch's pages)


@contextlib.contextmanager
def _record_cuda_memory(device: torch.device) -> Iterator[None]:
    """Record the allocations of the block on CUDA, and no longer, however it ends."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.memory._record_memory_history(max_entries=_MEMORY_ENTRIES)  # noqa: SLF001
    try:
        yield
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)  # noqa: SLF001


def _write_trace(profiler: torch.profiler.profile, path: Path) -> None:
    """Write a trace, whole or not at all."""
    with tempfile.TemporaryDirectory() as folder, atomic_write(path, by="profile") as file:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        with trace.open("rb") as source, gzip.GzipFile(fileobj=file, mode="wb") as target:
            shutil.copyfileobj(source, target)
            # torch says nothing where the disk of temporary files was full.
            source.seek(max(0, source.tell() - 64))
            if not source.read().rstrip().endswith(b"}"):
                raise OSError(errno.ENOSPC, f"{folder} has no room for the trace")


@contextlib.contextmanager
def _silence_kineto() -> Iterator[None]:
    """Set KINETO_LOG_LEVEL inside the block, unless it is set."""
    name = "KINETO_LOG_LEVEL"
    if name in os.environ:
        yield
        return
    os.environ[name] = "6"
    try:
        yield
    finally:
        os.environ.pop(name, None)


@contextlib.contextmanager
def _mark_phases(profiler: torch.profiler.profile) -> Iterator[list[float]]:
    """Let the phases of a step be spans of the trace; yield the seconds that are left out of it."""
    times = get_phase_times()
    spans: list[Any] = []
    left_out: list[float] = []
    began: list[tuple[int, float]] = []  # of the outermost phase that is left out: depth, time

    def mark(name: str | None) -> None:
        if name is None:
            if not spans:  # the end of a phase that the profile began in
                return
            if began and began[0][0] == len(spans):
                left_out.append(time.perf_counter() - began.pop()[1])
                _collect(profiler, is_on=True)
            spans.pop().__exit__(None, None, None)
        else:
            spans.append(record_function(name))
            spans[-1].__enter__()
            if name in BETWEEN_STEPS and not began:
                _collect(profiler, is_on=False)
                began.append((len(spans), time.perf_counter()))

    if times is None:
        yield left_out
        return
    before: Callable[[str | None], None] | None = times.mark
    times.mark = mark
    try:
        yield left_out
    finally:
        times.mark = before
        while spans:
            mark(None)


def _collect(profiler: torch.profiler.profile, *, is_on: bool) -> None:
    """Let the profiler record operations and kernels, or not."""
    # Not the profiler's own switch, which for operations prints a warning each time.
    torch._C._autograd._enable_record_function(is_on)  # noqa: SLF001
    if ProfilerActivity.CUDA in profiler.activities:
        profiler.toggle_collection_dynamic(is_on, [ProfilerActivity.CUDA])
