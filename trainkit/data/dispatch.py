"""Sources that not every rank can read to the same end: one reads for all, or all stop together."""

from __future__ import annotations

from collections import defaultdict
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load, save

from trainkit.batch import to_device
from trainkit.batch.shards import spans_of_lengths
from trainkit.collectives import all_gather_objects, get_comm_device, run_on_all_ranks
from trainkit.types import BATCH_TENSORS, Batch, Cursor, StepBatch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from trainkit.types import Axis, Share

T = TypeVar("T")


def scatter_batches(
    make_parts: Callable[[Cursor], Sequence[StepBatch] | None],
    axis: Axis,
    share: Share,
    *,
    device: torch.device | str | None = None,
) -> Callable[[Cursor], StepBatch | None]:
    """Return make_batch(cursor) for a source that only rank 0 of an axis can read.

    Rank 0 makes the batches of all shares, and every rank receives that of its own: the same that
    it would have made itself. When the source has ended, all get None; when making fails, all
    raise.

    Args:
        make_parts: From a cursor to one `StepBatch` on the host for each share, in their order, or
            None at the end. It is called on rank 0 alone.
        axis: The ranks that are served, `ps.world` for all.
        share: Which part this rank wants, `ps.dp.share`; several ranks may want the same.
        device: Where the batch shall be; the host by default.

    Returns:
        A function that every rank of the axis calls at each step.

    Raises:
        ValueError: Ranks name shares of different counts; later, `make_parts` does not give one
            batch for each share.

    Effects:
        Communicates on `axis`, now and at each call of what it returns: what all ranks of the axis
        communicate besides has to keep its order, so call it from the training loop and not from
        a prefetch thread.

    Examples:
        >>> from trainkit.batch import make_padding_batch
        >>> from trainkit.mesh import solo_parallel
        >>> def make_parts(cursor):
        ...     return [StepBatch([make_padding_batch(1, 4)], Cursor(cursor.batch + 1))]
        >>> ps = solo_parallel()
        >>> make_batch = scatter_batches(make_parts, ps.world, ps.dp.share)
        >>> make_batch(Cursor()).cursor
        Cursor(batch=1, stream=())
    """
    wanted = [tuple(one) for one in all_gather_objects([share.index, share.count], axis)]
    if len({count for _, count in wanted}) > 1:
        raise ValueError(f"dispatch: ranks want parts of different counts: {wanted}")

    def make_batch(cursor: Cursor) -> StepBatch | None:
        parts: list[StepBatch] = []
        buffers: list[Tensor] = []

        def make() -> int | None:
            if axis.index:
                return None
            parts.extend(_checked_parts(make_parts(cursor), share.count))
            if axis.count == 1:
                return len(parts)
            # All that can fail is done here: a rank that failed later would leave others waiting.
            buffers.extend(_sendable(parts, get_comm_device(axis)))
            return max((len(one) for one in buffers), default=0)

        size = run_on_all_ranks(make, axis)[0]
        if size == 0:
            return None
        batch = parts[share.index] if axis.count == 1 else _scatter(buffers, size, axis, wanted)
        if device is None:
            return batch
        return StepBatch([to_device(one, device) for one in batch.microbatches], batch.cursor)

    return make_batch


def stop_at_shortest(
    batches: Iterator[T], axis: Axis, *, left_over: Callable[[T], object]
) -> Iterator[T]:
    """Give every rank's batches until those of one rank have ended; then all stop.

    Args:
        batches: This rank's.
        axis: The ranks that stop together; each must go on until the end.
        left_over: Called with the batch that this rank had when another had none: nobody trains on
            it. What comes after it in `batches` is not read.

    Returns:
        An iterator of as many batches on every rank.

    Raises:
        Exception: What `batches` raised on one rank, on all ranks: see
            `collectives.run_on_all_ranks`.

    Effects:
        Communicates for each batch as `collectives.run_on_all_ranks`.

    Examples:
        >>> from trainkit.mesh import solo_parallel
        >>> list(stop_at_shortest(iter([1, 2]), solo_parallel().dp, left_over=print))
        [1, 2]
    """
    found: list[T] = []

    def read() -> int:
        found[:] = islice(batches, 1)
        return len(found)

    while all(run_on_all_ranks(read, axis)):
        yield found[0]
    for batch in found:
        left_over(batch)


def _checked_parts(parts: Sequence[StepBatch] | None, count: int) -> Sequence[StepBatch]:
    if parts is None:
        return ()
    if len(parts) != count:
        must = f"make_parts must give one StepBatch for each of {count} shares"
        raise ValueError(f"dispatch: {must}, got {len(parts)}")
    return parts


# --------------------------------------------------------------------------------- batches as bytes


def _sendable(parts: Sequence[StepBatch], device: torch.device) -> list[Tensor]:
    """Write batches into uint8 tensors of one length on a device."""
    packed = [_packed(part) for part in parts]
    size = max((len(one) for one in packed), default=0)
    return [torch.nn.functional.pad(one, (0, size - len(one))).to(device) for one in packed]


def _scatter(
    buffers: Sequence[Tensor], size: int, axis: Axis, wanted: Sequence[tuple[int, int]]
) -> StepBatch:
    """Send from rank 0 to each rank of an axis the buffer, of `size` bytes, that it wants."""
    received = torch.empty(size, dtype=torch.uint8, device=get_comm_device(axis))
    send = [buffers[index] for index, _ in wanted] if axis.index == 0 else None
    dist.scatter(received, send, group=axis.group, group_src=0)
    return _unpacked(received.cpu())


def _packed(batch: StepBatch) -> Tensor:
    """Write a batch into one uint8 tensor: the bytes of a safetensors file, after their number."""
    tensors = {"cursor": torch.tensor([batch.cursor.batch, *batch.cursor.stream])}
    for number, part in enumerate(batch.microbatches):
        others = [name for name, x in part.extra.items() if not isinstance(x, torch.Tensor)]
        if others:
            raise ValueError(f"dispatch: `extra` of a batch must hold tensors, {others} are none")
        lengths = torch.from_numpy(np.ascontiguousarray(part.spans.lengths))
        own = {name: x for name, x in part.items() if name != "spans"} | {"spans": lengths}
        for name, x in own.items():  # copied, for parts are views of one batch
            tensors[f"{number}/{name}"] = x.detach().cpu().clone().contiguous()
    data = torch.frombuffer(bytearray(save(tensors)), dtype=torch.uint8)
    return torch.cat([torch.tensor([len(data)]).view(torch.uint8), data])


def _unpacked(data: Tensor) -> StepBatch:
    size = int(data[:8].view(torch.int64))
    tensors = load(data[8 : 8 + size].numpy().tobytes())
    first, *stream = tensors.pop("cursor").tolist()
    parts: dict[int, dict[str, Any]] = defaultdict(dict)
    for name, x in tensors.items():
        number, own_name = name.split("/", 1)
        parts[int(number)][own_name] = x
    made = [_batch_of(parts[number]) for number in sorted(parts)]
    return StepBatch(made, Cursor(first, tuple(stream)))


def _batch_of(tensors: dict[str, Any]) -> Batch:
    own = {name: tensors.pop(name) for name in BATCH_TENSORS}
    spans = spans_of_lengths(tensors.pop("spans").numpy())
    return Batch(**own, spans=spans, extra=tensors)
