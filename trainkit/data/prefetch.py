"""Step batches made ahead of the step that needs them, in a thread."""

from __future__ import annotations

import queue
import threading
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Protocol

import attrs
import torch

from trainkit.batch import map_tensors, to_device
from trainkit.types import DataError, StepBatch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from trainkit.types import Cursor


@attrs.frozen(eq=False)
class _Line:
    """What a thread and its consumer share: batches in order, each with when it has arrived."""

    made: queue.SimpleQueue[tuple[StepBatch | BaseException | None, torch.cuda.Event | None]]
    room: threading.Semaphore
    closed: threading.Event


class NextBatch(Protocol):
    """Return the next batch, or with a cursor the one there: another place begins anew."""

    def __call__(self, cursor: Cursor | None = None) -> StepBatch | None: ...


@contextmanager
def prefetch_batches(
    make_batch: Callable[[Cursor], StepBatch | None],
    cursor: Cursor,
    *,
    ahead: int = 2,
    device: torch.device | str | None = None,
    timeout: float = 120.0,
) -> Iterator[NextBatch]:
    """Yield `next_batch()`, which gives the batches of `make_batch` that a thread makes ahead.

    Batch and cursor are those that `make_batch` gives when it is called step by step: a checkpoint
    holds the cursor of the last batch that was used, and what was made ahead is made again.
    `next_batch(cursor)` gives the batch at a cursor: what is ahead, if it begins there, and after a
    jump (a roll-back) what is made from there on.

    Args:
        make_batch: Makes the batch at a cursor, whose `cursor` is where the next one begins; None
            says that the source has ended. It runs in the thread only, one call at a time.
        cursor: Where the first batch begins.
        ahead: How many batches may be ready or in the making at a time.
        device: Where the batches shall be. To a CUDA device they go through pinned memory, on a
            stream of their own.
        timeout: How long `next_batch` waits, in seconds.

    Yields:
        `next_batch`, for one thread; it gives None from the end of the source on. What `make_batch`
        raised it raises in place of that batch, the same object, and at every call from there on.

    Raises:
        ValueError: `ahead` is below 1, or `timeout` not above 0.
        DataError: From `next_batch`: no batch came in time.

    Effects:
        Runs a thread until the block is left, which waits for the batch in the making, at most for
        `timeout`, and not for one that `next_batch` gave up.

    Examples:
        >>> from trainkit.types import Cursor
        >>> def make_batch(cursor):
        ...     return StepBatch([], Cursor(cursor.batch + 1)) if cursor.batch < 2 else None
        >>> with prefetch_batches(make_batch, Cursor()) as next_batch:
        ...     while (batch := next_batch()) is not None:
        ...         batch.cursor.batch
        1
        2
    """
    if ahead < 1 or not timeout > 0:
        must = "ahead must be at least 1 and timeout above 0"
        raise ValueError(f"prefetch: {must}, got ahead={ahead}, timeout={timeout}")
    start = partial(_start, make_batch, ahead=ahead, device=_with_index(device))
    (line, thread), place = start(cursor), cursor
    ended: list[BaseException | None] = []
    given_up = closed = False

    def next_batch(cursor: Cursor | None = None) -> StepBatch | None:
        nonlocal line, thread, place, given_up
        if closed:
            raise ValueError("prefetch: next_batch was called after its block")
        if cursor is not None and cursor != place:
            _close(line, thread, 0 if given_up else timeout)
            (line, thread), place, given_up = start(cursor), cursor, False
            ended.clear()
        if not ended:
            try:
                made, arrival = line.made.get(timeout=timeout)
            except queue.Empty:
                given_up, made, arrival = True, _timeout_error(place, timeout), None
            if isinstance(made, StepBatch):
                line.room.release()
                place = made.cursor
                return _received(made, arrival)
            ended.append(made)
        if ended[0] is not None:
            raise ended[0]
        return None

    try:
        yield next_batch
    finally:
        closed = True
        _close(line, thread, 0 if given_up else timeout)


def _start(
    make_batch: Callable[[Cursor], StepBatch | None],
    cursor: Cursor,
    *,
    ahead: int,
    device: torch.device | None,
) -> tuple[_Line, threading.Thread]:
    """Start a thread that makes the batches from a cursor on."""
    line = _Line(queue.SimpleQueue(), threading.Semaphore(ahead), threading.Event())
    thread = threading.Thread(
        target=_fill,
        args=(line, make_batch, cursor, device),
        name="trainkit-prefetch",
        daemon=True,  # one that hangs must not keep the process
    )
    thread.start()
    return line, thread


def _close(line: _Line, thread: threading.Thread, patience: float) -> None:
    line.closed.set()
    line.room.release()
    thread.join(patience)


def _timeout_error(cursor: Cursor, timeout: float) -> DataError:
    return DataError(
        f"prefetch: timeout: the thread that makes batches did not make batch {cursor.batch} in "
        f"{timeout:g} s",
        where=f"batch {cursor.batch}",
        want=f"{timeout:g} s",
        hint="see whether its files can still be read, or raise `timeout`",
    )


def _with_index(device: torch.device | str | None) -> torch.device | None:
    """Say which CUDA device is meant: a new thread's current one need not be this thread's."""
    device = None if device is None else torch.device(device)
    if device is not None and device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _fill(
    line: _Line,
    make_batch: Callable[[Cursor], StepBatch | None],
    cursor: Cursor,
    device: torch.device | None,
) -> None:
    """Put batches into the line while there is room, until it is closed, or there are no more."""
    try:
        stream = None
        if device is not None and device.type == "cuda":
            torch.cuda.set_device(device)
            stream = torch.cuda.Stream(device)
        while line.room.acquire() and not line.closed.is_set():
            batch = make_batch(cursor)
            if batch is None:
                line.made.put((None, None))
                return
            cursor = batch.cursor
            line.made.put(_sent(batch, device, stream))
    except BaseException as error:  # noqa: BLE001 (the consumer raises it)
        line.made.put((error, None))


def _sent(
    batch: StepBatch, device: torch.device | None, stream: torch.cuda.Stream | None
) -> tuple[StepBatch, torch.cuda.Event | None]:
    """Send a batch to the device; with a stream, return an event that says when it has arrived."""
    if device is None:
        return batch, None
    if stream is None:
        return _moved(batch, device), None
    pinned = [map_tensors(part, _pinned) for part in batch.microbatches]
    # make_batch may itself put tensors on the device, and does so on this thread's own stream.
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        moved = _moved(attrs.evolve(batch, microbatches=pinned), device)
        arrival = torch.cuda.Event()
        arrival.record(stream)
    return moved, arrival


def _moved(batch: StepBatch, device: torch.device) -> StepBatch:
    return attrs.evolve(
        batch, microbatches=[to_device(part, device) for part in batch.microbatches]
    )


def _pinned(x: Tensor) -> Tensor:
    return x.pin_memory() if x.device.type == "cpu" else x


def _received(batch: StepBatch, arrival: torch.cuda.Event | None) -> StepBatch:
    """Make the consumer's stream wait for a batch, and its memory wait for that stream."""
    if arrival is not None and batch.microbatches:
        stream = torch.cuda.current_stream(batch.microbatches[0].input_ids.device)
        stream.wait_event(arrival)

        def hold(x: Tensor) -> Tensor:
            x.record_stream(stream)
            return x

        for part in batch.microbatches:
            map_tensors(part, hold)
    return batch
