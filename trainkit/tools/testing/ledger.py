"""The ledger of a step: how many collectives of which kind it issues on which axis, and how large.

Counted is what reaches torch's dispatcher: calls of `torch.distributed`, of FSDP2 and DTensor,
sends and receives, in forward and in backward. Compiled code runs past the dispatcher, so what is
compiled together with its collectives is not seen; trainkit compiles blocks, which have none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from trainkit.types import Axis, Layout, ParallelState

_KINDS = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "barrier": "barrier",
    "monitoredbarrier": "barrier",
    "send": "send",
    "recv": "receive",
}
"""By how the names of their operators begin, without underscores."""
_FIRST = (*Layout().axes["world"], "fsdp", "sp", "sp_unfolded")
"""The names that come first for a group that several axes share."""


@attrs.frozen
class Collective:
    """Calls of one kind on one axis of `size` ranks, by one rank: how many, and how many bytes.

    Bytes are those of the whole tensor that a call is about: what is summed, sent or received, what
    an all-gather gives, what a reduce-scatter takes.
    """

    axis: str
    size: int
    kind: str
    count: int
    bytes: int


@attrs.frozen
class CollectiveLedger:
    """All collectives of one call, one row per axis and kind, in the order of their first use."""

    rows: tuple[Collective, ...]

    def count(self, axis: str, kind: str) -> int:
        """Return how many calls of a kind there were on an axis."""
        return sum(row.count for row in self.rows if (row.axis, row.kind) == (axis, kind))

    def bytes(self, axis: str, kind: str) -> int:
        """Return the bytes of a kind on an axis."""
        return sum(row.bytes for row in self.rows if (row.axis, row.kind) == (axis, kind))


def count_collectives(fn: Callable[[], Any], axes: Any = ()) -> CollectiveLedger:
    """Call a function, and return what this rank communicated meanwhile.

    Args:
        fn: Called once, without arguments: a step, for instance.
        axes: A `ParallelState`, or some `Axis`, that give groups their names; a group that is none
            of them counts as "other". Of several axes over the same ranks the first gives the name,
            those of a layout's degrees first of all.

    Returns:
        The ledger of this rank.

    Effects:
        Those of `fn`.

    Examples:
        >>> from trainkit.collectives import all_sum
        >>> from trainkit.mesh import solo_parallel
        >>> import torch
        >>> ps = solo_parallel()
        >>> count_collectives(lambda: all_sum(torch.ones(2), ps.loss), ps)
        CollectiveLedger(rows=())
    """
    named = [(axis.group, axis.name) for axis in reversed(_list_axes(axes))]
    names = {str(group.group_name): name for group, name in named if group is not None}
    counts: dict[tuple[str, int, str], list[int]] = {}
    with _Counting(counts, names):
        fn()
    return CollectiveLedger(
        tuple(Collective(*key, len(sizes), sum(sizes)) for key, sizes in counts.items())
    )


def _list_axes(axes: Any) -> list[Axis]:
    if not isinstance(axes, ParallelState):
        return list(axes)
    found = [value for value in attrs.astuple(axes, recurse=False) if isinstance(value, Axis)]
    return sorted(found, key=lambda axis: (*_FIRST, axis.name).index(axis.name))


class _Counting(TorchDispatchMode):
    """Notes the operators that communicate; a mode, because all of them pass the dispatcher."""

    def __init__(
        self, counts: dict[tuple[str, int, str], list[int]], names: Mapping[str, str]
    ) -> None:
        super().__init__()
        self.counts, self.names = counts, names

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if any(hasattr(kind, "device_mesh") for kind in types):
            return NotImplemented  # a DTensor: its own operators come past here one by one
        out = func(*args, **(kwargs or {}))
        kind = _find_kind(func)
        if kind is not None:
            everything = [*args, *(kwargs or {}).values()]
            group = next(found for found in map(_find_group, everything) if found is not None)
            sizes = [sum(x.nbytes for x in _iterate_tensors(value)) for value in (*everything, out)]
            name = self.names.get(str(group.group_name), "other")
            self.counts.setdefault((name, group.size(), kind), []).append(max(sizes))
        return out


def _find_kind(func: Any) -> str | None:
    if getattr(func, "namespace", "") not in ("c10d", "_c10d_functional"):
        return None
    name = func.overloadpacket.__name__.replace("_", "")
    return next((kind for start, kind in _KINDS.items() if name.startswith(start)), None)


def _find_group(value: Any) -> dist.ProcessGroup | None:
    """Return the process group of an argument: the group, a boxed one, or its name."""
    if isinstance(value, dist.ProcessGroup):
        return value
    if isinstance(value, str) and value not in ("sum", "avg", "max", "min", "product"):
        name: Any = value
        return dist.distributed_c10d._resolve_process_group(name)  # noqa: SLF001 (from 2.11 on)
    boxed: Any = value
    if isinstance(boxed, torch.ScriptObject) and "ProcessGroup" in str(boxed._type()):  # noqa: SLF001 (no public name)
        return dist.ProcessGroup.unbox(boxed)
    return None


def _iterate_tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for part in value:
            yield from _iterate_tensors(part)
