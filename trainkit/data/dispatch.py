"""Batches for sources that differ between ranks: scatter from rank 0, or stop at the shortest."""

from __future__ import annotations

from collections import defaultdict
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

import attrs
import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load, save

from trainkit.batch import to_device
from trainkit.batch.shards import spans_of_lengths
from trainkit.collectives import all_gather_objects, get_comm_device, run_on_all_ranks
from trainkit.types import Batch, Cursor, StepBatch

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

    Rank 0 makes the batches of all shares, and every rank receives its own, equal to the one that
    it would have made itself. At the end of the source all ranks get None; if rank 0 fails, all
    ranks raise.

    Args:
        make_parts: Takes a cursor; returns one `StepBatch` on the host for each share, in order, or
            None at the end. Only rank 0 calls it.
        axis: The ranks that receive batches, `ps.world` for all.
        share: The share of this rank, `ps.dp.share`; several ranks may have the same one.
        device: The device of the batch; the host by default.

    Returns:
        A function that every rank of the axis calls at each step.

    Raises:
        ValueError: Shares of ranks differ in their counts; later, `make_parts` does not return one
            batch for each share.

    Effects:
        Communicates on `axis`, now and at each call of the returned function. The order of
        collectives must be the same on all ranks, so call it from the training loop and not from a
        prefetch thread.

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
    shares = [tuple(x) for x in all_gather_objects([share.index, share.count], axis)]
    if len({count for _, count in shares}) > 1:
        raise ValueError(f"scatter_batches: ranks have shares of different counts: {shares}")

    def make_batch(cursor: Cursor) -> StepBatch | None:
        parts: list[StepBatch] = []
        buffers: list[Tensor] = []

        def make() -> int | None:
            if axis.index:
                return None
            parts.extend(make_parts(cursor) or ())
            if parts and len(parts) != share.count:
                raise ValueError(
                    f"scatter_batches: make_parts must give one StepBatch for each of "
                    f"{share.count} shares, got {len(parts)}"
                )
            if axis.count == 1:
                return len(parts)
            # Everything that can fail happens here: after it the other ranks wait in a collective.
            buffers.extend(_make_buffers(parts, get_comm_device(axis)))
            # The size that receivers allocate; 0 is the end of the source.
            return max((len(buffer) for buffer in buffers), default=0)

        size = run_on_all_ranks(make, axis)[0]
        if size == 0:
            return None
        if axis.count == 1:
            batch = parts[share.index]
        else:
            # All buffers have one size, as scatter needs it; the first 8 bytes are the length of
            # the data.
            received = torch.empty(size, dtype=torch.uint8, device=get_comm_device(axis))
            send = [buffers[index] for index, _ in shares] if axis.index == 0 else None
            dist.scatter(received, send, group=axis.group, group_src=0)
            batch = _deserialize(received.cpu())
        if device is None:
            return batch
        return attrs.evolve(batch, microbatches=[to_device(x, device) for x in batch.microbatches])

    return make_batch


def stop_at_shortest(
    batches: Iterator[T], axis: Axis, *, left_over: Callable[[T], object]
) -> Iterator[T]:
    """Yield the batches of this rank until one rank has no more; then all ranks stop.

    Args:
        batches: The batches of this rank.
        axis: The ranks that stop together; each must iterate to the end.
        left_over: Called with the batch that this rank had when another had none, which is not
            trained on. Later batches are not read.

    Returns:
        An iterator of equally many batches on every rank.

    Raises:
        Exception: An error of `batches` on one rank, on all ranks: see
            `collectives.run_on_all_ranks`.

    Effects:
        Communicates for each batch as `collectives.run_on_all_ranks`.

    Examples:
        >>> from trainkit.mesh import solo_parallel
        >>> list(stop_at_shortest(iter([1, 2]), solo_parallel().dp, left_over=print))
        [1, 2]
    """
    current: list[T] = []

    def read() -> int:
        current[:] = islice(batches, 1)
        return len(current)

    # One small collective a batch, before any rank starts a step that another cannot take.
    while all(run_on_all_ranks(read, axis)):
        yield current[0]
    for batch in current:
        left_over(batch)


def _make_buffers(parts: Sequence[StepBatch], device: torch.device) -> list[Tensor]:
    """Convert batches to uint8 buffers of equal size on a device."""
    serialized = [_serialize(part) for part in parts]
    size = max((len(data) for data in serialized), default=0)
    padded = (torch.nn.functional.pad(data, (0, size - len(data))) for data in serialized)
    return [data.to(device) for data in padded]


def _serialize(batch: StepBatch) -> Tensor:
    """Convert a batch to uint8: the length of a safetensors file, and its bytes."""
    # The cursor goes along as one tensor: its batch, then its stream.
    tensors = {"cursor": torch.tensor([batch.cursor.batch, *batch.cursor.stream])}
    for i, microbatch in enumerate(batch.microbatches):
        # Only tensors have a place in a safetensors file.
        others = [name for name, x in microbatch.extra.items() if not isinstance(x, torch.Tensor)]
        if others:
            raise ValueError(
                f"scatter_batches: `extra` of a batch must hold tensors, {others} are none"
            )
        lengths = torch.from_numpy(np.ascontiguousarray(microbatch.spans.lengths))
        for name, x in {**microbatch, "spans": lengths}.items():
            # Microbatches are views of one batch, which safetensors does not take.
            tensors[f"{i}/{name}"] = x.detach().cpu().clone().contiguous()
    data = torch.frombuffer(bytearray(save(tensors)), dtype=torch.uint8)
    length = torch.tensor([len(data)])  # int64, which is 8 bytes
    return torch.cat([length.view(torch.uint8), data])


def _deserialize(data: Tensor) -> StepBatch:
    size = int(data[:8].view(torch.int64))
    file = load(data[8 : 8 + size].numpy().tobytes())
    first, *stream = file.pop("cursor").tolist()
    fields: dict[int, dict[str, Any]] = defaultdict(dict)
    for path, x in file.items():
        i, name = path.split("/", 1)
        fields[int(i)][name] = x
    microbatches = [
        Batch(
            input_ids=tensors.pop("input_ids"),
            labels=tensors.pop("labels"),
            position_ids=tensors.pop("position_ids"),
            document_ids=tensors.pop("document_ids"),
            token_index=tensors.pop("token_index"),
            spans=spans_of_lengths(tensors.pop("spans").numpy()),
            extra=tensors,  # those that remain
        )
        for _, tensors in sorted(fields.items())
    ]
    return StepBatch(microbatches, Cursor(first, tuple(stream)))
