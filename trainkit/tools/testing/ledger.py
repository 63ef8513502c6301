"""Count the collectives of a step and their bytes, by axis and kind.

The counts are of operators that pass torch's dispatcher: those of `torch.distributed`, FSDP2 and
DTensor, sends and receives, in forward and in backward. Compiled code bypasses the dispatcher, so
collectives inside it are not counted; trainkit compiles blocks, which have none.
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

# "reducescatter" is before "reduce", because the first start that fits is taken.
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
"""Kinds by the start of their operators' names, without underscores."""
_FIRST = (*Layout().axes["world"], "fsdp", "sp", "sp_unfolded")
"""Names that take precedence for a group of several axes."""


@attrs.frozen
class Collective:
    """The calls of one kind on one axis of `size` ranks, by one rank, and their bytes.

    The bytes of a call are those of its full tensor: the one that is summed, sent or received, the
    output of an all-gather, the input of a reduce-scatter.
    """

    axis: str
    size: int
    kind: str
    count: int
    bytes: int


@attrs.frozen
class CollectiveLedger:
    """The collectives of a function, one row per axis and kind, in the order of their first use."""

    rows: tuple[Collective, ...]

    def count(self, axis: str, kind: str) -> int:
        """Return how many calls of a kind there were on an axis."""
        return sum(row.count for row in self.rows if (row.axis, row.kind) == (axis, kind))

    def bytes(self, axis: str, kind: str) -> int:
        """Return the bytes of a kind on an axis."""
        return sum(row.bytes for row in self.rows if (row.axis, row.kind) == (axis, kind))


def count_collectives(fn: Callable[[], Any], axes: Any = ()) -> CollectiveLedger:
    """Call a function, and return the collectives that this rank issued.

    Args:
        fn: Called once, without arguments: a step, for instance.
        axes: A `ParallelState`, or several `Axis`, to name groups by; other groups are named
            "other". Of several axes over the same ranks the first gives the name, and in a
            `ParallelState` those of the layout's degrees come first.

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
    if isinstance(axes, ParallelState):
        values = attrs.astuple(axes, recurse=False)
        axes = [value for value in values if isinstance(value, Axis)]
        axes.sort(key=lambda axis: (*_FIRST, axis.name).index(axis.name))
    # Reversed, so that the first axis of a group overwrites the names of later ones.
    names = {
        str(axis.group.group_name): axis.name
        for axis in reversed([*axes])
        if axis.group is not None
    }
    sizes_by_key: dict[tuple[str, int, str], list[int]] = {}
    with _Counting(sizes_by_key, names):
        fn()
    return CollectiveLedger(
        tuple(Collective(*key, len(sizes), sum(sizes)) for key, sizes in sizes_by_key.items())
    )


class _Counting(TorchDispatchMode):
    """Collects the tensor sizes of collectives, which all pass the dispatcher."""

    def __init__(
        self, sizes: dict[tuple[str, int, str], list[int]], names: Mapping[str, str]
    ) -> None:
        super().__init__()
        self.sizes = sizes
        self.names = names

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
        if getattr(func, "namespace", "") not in ("c10d", "_c10d_functional"):
            return out
        operator = func.overloadpacket.__name__.replace("_", "")
        for start, kind in _KINDS.items():
            if not operator.startswith(start):
                continue
            values = [*args, *(kwargs or {}).values()]
            group = next(x for x in map(_find_group, values) if x is not None)
            # Of its inputs and outputs the largest is the full tensor, which some are shards of.
            sizes = [sum(x.nbytes for x in _iterate_tensors(value)) for value in (*values, out)]
            name = self.names.get(str(group.group_name), "other")
            self.sizes.setdefault((name, group.size(), kind), []).append(max(sizes))
            break
        return out


def _find_group(value: Any) -> dist.ProcessGroup | None:
    """Return the process group of an argument: the group, a boxed one, or its name."""
    if isinstance(value, dist.ProcessGroup):
        return value
    # Functional collectives name their group by a string, and their reduction too.
    if isinstance(value, str) and value not in ("sum", "avg", "max", "min", "product"):
        name: Any = value
        return dist.distributed_c10d._resolve_process_group(name)  # noqa: SLF001 (from 2.11 on)
    # Operators of c10d get the group in an object of TorchScript.
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
