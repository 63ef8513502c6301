"""Prefetch step batches in a thread."""

from __future__ import annotations

import queue
import threading
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Protocol

import attrs
import torch

from trainkit.batch import to_device
from trainkit.batch.batches import map_tensors
from trainkit.phases import as_phase
from trainkit.types import DataError, StepBatch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from trainkit.types import Cursor


class NextBatch(Protocol):
    """Return the next batch, or the one at a cursor."""

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
    """Yield `next_batch()`, which returns the batches of `make_batch` from a background thread.

    Batches and cursors are those of calling `make_batch` step by step. A checkpoint holds the
    cursor of the last batch that was used, and prefetched batches are made again after a resume.
    `next_batch(cursor)` returns the batch at a cursor: the prefetched one if it begins there, and
    after a jump (a roll-back) a new one.

    Args:
        make_batch: Returns the batch at a cursor, with the cursor of the next one; None at the end
            of the source. It runs in the thread only, one call at a time.
        cursor: The cursor of the first batch.
        ahead: The number of batches that may be ready or in preparation at a time.
        device: The device of the batches. They go to a CUDA device through pinned memory, on their
            own stream.
        timeout: The time that `next_batch` waits, in seconds.

    Yields:
        `next_batch`, for one thread; it returns None from the end of the source on. An error of
        `make_batch` is raised in place of its batch, as the same object, and at every later call.

    Raises:
        ValueError: `ahead` is below 1, or `timeout` is not above 0.
        DataError: From `next_batch`: no batch came in time.

    Effects:
        Runs a thread until the end of the block, which waits at most `timeout` for the batch in
        preparation, and not at all after a timeout.

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
        raise ValueError(
            "prefetch_batches: ahead must be at least 1 and timeout above 0, got "
            f"ahead={ahead}, timeout={timeout}"
        )
    # Starts a thread at a cursor: for the first batch, and again after each jump.
    start = partial(_Worker, make_batch, ahead=ahead, device=_add_index(device))
    worker = start(cursor)
    next_cursor = cursor
    end: list[BaseException | None] = []  # the error or the None that ended the batches
    is_timed_out = is_closed = False

    @as_phase("data")
    def next_batch(cursor: Cursor | None = None) -> StepBatch | None:
        nonlocal worker, next_cursor, is_timed_out
        if is_closed:
            raise ValueError("prefetch_batches: next_batch was called after its block")
        if cursor is not None and cursor != next_cursor:
            # A jump: prefetched batches are of another place. A thread that hangs is not waited for
            # again.
            worker.close(0 if is_timed_out else timeout)
            worker = start(cursor)
            next_cursor = cursor
            is_timed_out = False
            end.clear()
        if not end:
            try:
                batch, arrival = worker.batches.get(timeout=timeout)
            except queue.Empty:
                is_timed_out = True
                batch = _make_timeout_error(next_cursor, timeout)
                arrival = None
            if isinstance(batch, StepBatch):
                # The batch is in use from here on, and makes room for another one.
                worker.room.release()
                next_cursor = batch.cursor
                return _synchronize(batch, arrival)
            end.append(batch)
        if end[0] is not None:
            raise end[0]
        return None

    try:
        yield next_batch
    finally:
        is_closed = True
        worker.close(0 if is_timed_out else timeout)


class _Worker:
    """A thread that makes the batches from a cursor on, and puts each into a queue."""

    def __init__(
        self,
        make_batch: Callable[[Cursor], StepBatch | None],
        cursor: Cursor,
        *,
        ahead: int,
        device: torch.device | None,
    ) -> None:
        self.batches = queue.SimpleQueue[
            tuple[StepBatch | BaseException | None, torch.cuda.Event | None]
        ]()
        # The queue is unbounded: `room` bounds the batches before one is made, not when it is put.
        self.room = threading.Semaphore(ahead)
        self.closed = threading.Event()
        self.thread = threading.Thread(
            target=self._run,
            args=(make_batch, cursor, device),
            name="trainkit-prefetch",
            daemon=True,  # a thread that hangs must not keep the process alive
        )
        self.thread.start()

    def _run(
        self,
        make_batch: Callable[[Cursor], StepBatch | None],
        cursor: Cursor,
        device: torch.device | None,
    ) -> None:
        """Make batches while there is room, until the worker is closed or they end."""
        try:
            # Copies to the device run on a stream of their own, in parallel with the computation.
            stream = None
            if device is not None and device.type == "cuda":
                # The current device is a setting of the thread.
                torch.cuda.set_device(device)
                stream = torch.cuda.Stream(device)
            while self.room.acquire() and not self.closed.is_set():
                batch = make_batch(cursor)
                if batch is None:
                    self.batches.put((None, None))
                    return
                cursor = batch.cursor
                self.batches.put(_send(batch, device, stream))
        except BaseException as error:  # noqa: BLE001 (the consumer raises it)
            self.batches.put((error, None))

    def close(self, timeout: float) -> None:
        """Stop the thread, and wait for the batch in preparation."""
        self.closed.set()
        # Wakes a thread that waits for room, so that it sees `closed`.
        self.room.release()
        self.thread.join(timeout)


def _make_timeout_error(cursor: Cursor, timeout: float) -> DataError:
    return DataError(
        f"prefetch_batches: timeout: the thread that makes batches did not make batch "
        f"{cursor.batch} in {timeout:g} s",
        where=f"batch {cursor.batch}",
        want=f"{timeout:g} s",
        hint="see whether its files can still be read, or raise `timeout`",
    )


def _add_index(device: torch.device | str | None) -> torch.device | None:
    """Add the current index to a CUDA device; the new thread may have another current device."""
    device = None if device is None else torch.device(device)
    if device is not None and device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _send(
    batch: StepBatch, device: torch.device | None, stream: torch.cuda.Stream | None
) -> tuple[StepBatch, torch.cuda.Event | None]:
    """Copy a batch to the device; with a stream, return the event of its arrival."""
    if device is None:
        return batch, None
    if stream is None:
        return _move(batch, device), None

    def pin(x: Tensor) -> Tensor:
        return x.pin_memory() if x.device.type == "cpu" else x

    pinned = [map_tensors(microbatch, pin) for microbatch in batch.microbatches]
    # make_batch may itself put tensors on the device, on the current stream of this thread.
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        moved = _move(attrs.evolve(batch, microbatches=pinned), device)
        arrival = torch.cuda.Event()
        arrival.record(stream)
    return moved, arrival


def _move(batch: StepBatch, device: torch.device) -> StepBatch:
    return attrs.evolve(batch, microbatches=[to_device(x, device) for x in batch.microbatches])


def _synchronize(batch: StepBatch, arrival: torch.cuda.Event | None) -> StepBatch:
    """Make the consumer's stream wait for a batch, and keep its memory for that stream."""
    if arrival is not None and batch.microbatches:
        stream = torch.cuda.current_stream(batch.microbatches[0].input_ids.device)
        # The host does not wait, and the memory is not reused before this stream is done with it.
        stream.wait_event(arrival)

        def record(x: Tensor) -> Tensor:
            x.record_stream(stream)
            return x

        for microbatch in batch.microbatches:
            map_tensors(microbatch, record)
    return batch
