"""What recomputation keeps where it may keep so many bytes: what is dearest to compute again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from trainkit.parallel.grad_reduction import get_local

Keeps = Callable[[str, int], bool]
"""`keeps(group, number)`: whether the result of this operator of a group is kept."""
_ORDER = ("exchanges", "attention", "products")
WHOLE = -1
"""The number of a result of a group that is kept as a whole, or not at all."""


@attrs.frozen
class Result:
    """The result of an operator: of its group the number-th, with the inner width of a product.

    Args:
        group: "products", "attention" or "exchanges".
        number: Of a product, among the products of its block; of others `WHOLE`.
        inner: The width that a product sums over.
        size: Bytes.
    """

    group: str
    number: int
    inner: float
    size: float


class Priced(TorchDispatchMode):
    """Notes the results of operators that can be kept, and what autograd saves between them."""

    def __init__(self, groups: Mapping[Any, str]) -> None:
        super().__init__()
        self.groups, self.seen = groups, Counter[str]()
        self.found: list[tuple[Result, int]] = []
        self.saved: list[Tensor] = []

    def save(self, x: Tensor) -> None:
        """Note what autograd saves."""
        # Autograd gets nothing: a result that its own node held would never be freed.
        self.saved.append(get_local(x.detach()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if (group := self.groups.get(func)) is not None:
            # (matrix, matrix) or (bias, matrix, matrix); of attention queries, which nobody reads
            inner = args[func.overloadpacket is torch.ops.aten.addmm].shape[-1]
            size = _bytes_of(x for x in tree_iter(out) if isinstance(x, Tensor))
            number = self.seen[group] if group == "products" else WHOLE
            self.found.append((Result(group, number, inner, size), len(self.saved)))
            self.seen[group] += 1
        return out


def _bytes_of(tensors: Iterable[Tensor], *, without: Iterable[Tensor] = ()) -> int:
    """Return the bytes of the memory of tensors, each once, but for that of some others."""
    sizes = {StorageWeakRef(x.untyped_storage()): x.untyped_storage().nbytes() for x in tensors}
    own = sizes.keys() - {StorageWeakRef(x.untyped_storage()) for x in without}
    return sum(sizes[memory] for memory in own)


def choose(
    forward: Callable[..., Any],
    block: nn.Module,
    inputs: tuple[Sequence[Any], Mapping[str, Any]],
    *,
    groups: Mapping[Any, str],
    budget: float,
) -> Keeps:
    """Return which results a block keeps for backward, by a forward pass that is thrown away.

    A product takes 2 K operations for each number of its result, for an inner width of K, so that
    operations for each byte are as K is. Exchanges are kept whatever they take: ranks that choose
    otherwise than others must not send otherwise. So is attention kept wholly or not at all: how
    often it is called follows from the documents. What nothing after it in the block asks for in
    its backward pass is not kept.

    Args:
        forward: `forward(block, *args, **kwargs)`.
        block: The block: its parameters are no activations.
        inputs: (args, kwargs).
        groups: The operators that can be kept; see `recompute.groups_of`.
        budget: The fraction of what the block keeps without recomputation, its input included.

    Effects:
        What the forward pass has; torch's generators are as before.

    Examples:
        >>> block, x = nn.Linear(4, 4), torch.ones(1, 4, requires_grad=True)
        >>> groups = {torch.ops.aten.addmm.default: "products"}
        >>> keeps = choose(nn.Linear.forward, block, ([x], {}), groups=groups, budget=0.9)
        >>> keeps("products", 0)  # a sum of it asks for nothing
        False
    """
    priced = Priced(groups)
    devices = {p.device for p in block.parameters() if p.device.type == "cuda"}
    hooks = torch.autograd.graph.saved_tensors_hooks(priced.save, lambda x: x)
    with torch.random.fork_rng(devices), hooks, priced:
        forward(block, *inputs[0], **inputs[1])
    given = [x for x in tree_iter(inputs) if isinstance(x, Tensor)]
    weights = [get_local(p) for p in block.parameters()]
    own = [get_local(x) for x in given if x.requires_grad]
    others = [get_local(x) for x in given if not x.requires_grad]
    whole = _bytes_of(priced.saved, without=[*weights, *others])
    needed = [result for result, before in priced.found if before < len(priced.saved)]
    return fitting(needed, budget * whole - _bytes_of(own))


def fitting(results: Iterable[Result], room: float) -> Keeps:
    """Return which results are kept where there is room for so many bytes, the dearest first.

    Examples:
        >>> keeps = fitting([Result("products", i, inner, 4) for i, inner in enumerate((1, 2))], 6)
        >>> keeps("products", 0), keeps("products", 1)
        (False, True)
    """
    sizes, inner = dict[tuple[str, int], float](), dict[tuple[str, int], float]()
    for result in results:
        key = result.group, result.number
        sizes[key] = sizes.get(key, 0) + result.size
        inner[key] = result.inner
    kept = set()
    for key in sorted(sizes, key=lambda key: (_ORDER.index(key[0]), -inner[key], key[1])):
        if key[0] == "exchanges" or sizes[key] <= room:
            kept.add(key)
            room -= sizes[key]
    return partial(_is_chosen, frozenset(kept))


def _is_chosen(chosen: frozenset[tuple[str, int]], group: str, number: int) -> bool:
    return (group, number if group == "products" else WHOLE) in chosen
