"""Collectives on an axis: every rank of the axis must call them, in the same order.

On an axis of size 1 each is the identity and needs no process group, so callers have no branch on
parallelism. All reductions are sums or maxima, never means. Values that are not tensors travel as
JSON, never as pickles.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson
import torch
import torch.distributed as dist
from torch import Tensor

from trainkit.types import (
    Axis,
    CheckpointError,
    ConfigError,
    DataError,
    DiskError,
    TrainkitError,
)


def all_sum(x: Tensor, axis: Axis) -> Tensor:
    """Return the sum of `x` over the ranks of an axis.

    Args:
        x: Any tensor, of the same shape and dtype on every rank.
        axis: The axis to sum over.

    Returns:
        A new tensor, equal on all ranks; `x` itself when the axis has size 1.

    Effects:
        Communicates: one all-reduce on `axis`.

    Examples:
        >>> from trainkit.mesh import solo_parallel
        >>> all_sum(torch.tensor(3), solo_parallel().loss)
        tensor(3)
    """
    return _reduced(x, axis, dist.ReduceOp.SUM)


def all_max(x: Tensor, axis: Axis) -> Tensor:
    """Return the elementwise maximum of `x` over the ranks of an axis.

    Returns:
        A new tensor, equal on all ranks; `x` itself when the axis has size 1.

    Effects:
        Communicates: one all-reduce on `axis`.

    Examples:
        >>> from trainkit.mesh import solo_parallel
        >>> all_max(torch.tensor(3), solo_parallel().dp)
        tensor(3)
    """
    return _reduced(x, axis, dist.ReduceOp.MAX)


def _reduced(x: Tensor, axis: Axis, op: Any) -> Tensor:
    if axis.count == 1:
        return x
    out = x.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out, op=op, group=axis.group)
    return out


def broadcast(x: Tensor, axis: Axis, *, source: int = 0) -> Tensor:
    """Return what rank `source` of the axis holds in `x`.

    Args:
        x: A tensor of the same shape and dtype on every rank; its values matter on `source` alone.
        axis: The axis.
        source: The index on the axis of the rank whose values all get.

    Effects:
        Communicates: one broadcast on `axis`.

    Examples:
        >>> from trainkit.mesh import solo_parallel
        >>> broadcast(torch.tensor(3), solo_parallel().world)
        tensor(3)
    """
    if axis.count == 1:
        return x
    out = x.detach().clone(memory_format=torch.contiguous_format)
    dist.broadcast(out, group=axis.group, group_src=source)
    return out


def agree(flag: bool, axis: Axis) -> bool:
    """Return whether any rank of the axis says yes: the same answer on all of them.

    Effects:
        Communicates: one all-reduce of one byte on `axis`, and waits for it.

    Examples:
        >>> from trainkit.mesh import solo_parallel
        >>> agree(True, solo_parallel().world)
        True
    """
    if axis.count == 1:
        return flag
    return bool(
        all_max(torch.tensor([flag], dtype=torch.uint8, device=communication_device(axis)), axis)
    )


def all_gather_json(value: Any, axis: Axis) -> list[Any]:
    """Return the values of all ranks, in rank order; for set-up and checkpoints, not for a step.

    Args:
        value: Anything that JSON holds.
        axis: The axis.

    Effects:
        Communicates: two all-gathers on `axis`, and waits for them.

    Examples:
        >>> from trainkit.mesh import solo_parallel
        >>> all_gather_json({"rank": 0}, solo_parallel().world)
        [{'rank': 0}]
    """
    text = orjson.dumps(value)
    if axis.count == 1:
        return [orjson.loads(text)]
    device = communication_device(axis)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(axis.count)]
    dist.all_gather(sizes, torch.tensor([len(text)], device=device), group=axis.group)
    longest = max(int(size) for size in sizes)
    padded = torch.frombuffer(bytearray(text.ljust(longest)), dtype=torch.uint8).to(device)
    texts = [torch.empty_like(padded) for _ in range(axis.count)]
    dist.all_gather(texts, padded, group=axis.group)
    return [orjson.loads(received.cpu().numpy().tobytes()) for received in texts]


def together(work: Callable[[], Any], axis: Axis) -> list[Any]:
    """Return what `work()` gives on every rank, in rank order; if it raises on one, raise on all.

    A rank that raised alone would leave the others waiting in the next collective.

    Args:
        work: Done once on this rank; gives anything that JSON holds. It must not communicate.
        axis: The axis.

    Raises:
        Exception: On the rank that failed, what it raised; on the others the first failure, told
            with its rank, of the same kind where it is a bad argument or one of trainkit's errors.

    Effects:
        Those of `work`; communicates as `all_gather_json`.

    Examples:
        >>> from trainkit.mesh import solo_parallel
        >>> together(lambda: 3, solo_parallel().world)
        [3]
    """
    failure: Exception | None = None
    report: dict[str, Any] = {}
    try:
        report["value"] = orjson.loads(orjson.dumps(work()))
    except Exception as error:  # noqa: BLE001 (told to the others, then raised)
        failure, report = error, {"error": _told(error)}
    reports = all_gather_json(report, axis)
    if failure is not None:
        raise failure
    for rank, other in enumerate(reports):
        if "error" in other:
            raise _as_raised(other["error"], rank)
    return [other["value"] for other in reports]


def _told(error: Exception) -> dict[str, str | None]:
    names = ("where", "got", "want", "hint")
    facts = {name: getattr(error, name, None) for name in names}
    plain = {name: None if value is None else str(value) for name, value in facts.items()}
    return plain | {"kind": type(error).__name__, "what": str(error)}


def _as_raised(told: dict[str, Any], rank: int) -> Exception:
    kinds = {kind.__name__: kind for kind in (ConfigError, DataError, CheckpointError, DiskError)}
    kind, what = told.pop("kind"), told.pop("what")
    if kind == "ValueError":
        return TrainkitError(f"rank {rank}: {what}", **told)
    if kind not in kinds:
        return RuntimeError(f"rank {rank} failed: {kind}: {what}")
    return kinds[kind](f"rank {rank}: {what}", **told)


def communication_device(axis: Axis) -> torch.device:
    """Return a device on which the ranks of an axis can communicate: the CPU when it can be.

    Effects:
        None; the group is only asked.

    Examples:
        >>> from trainkit.mesh import solo_parallel
        >>> communication_device(solo_parallel().world)
        device(type='cpu')
    """
    if axis.group is None:
        return torch.device("cpu")
    kinds = [device.type for device in axis.group._device_types]  # noqa: SLF001 (no public name up to 2.13)
    return torch.device("cpu" if "cpu" in kinds else kinds[0])
