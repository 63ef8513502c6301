"""The choice of results that recomputation saves under a byte budget: the most expensive first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from trainkit.parallel.grad_reduction import get_local

Keeps = Callable[[str, int], bool]
"""`keeps(group, number)`: whether the result of an operator is saved."""
# Results with the most operations per byte come first.
_ORDER = ("exchanges", "attention", "products")
WHOLE = -1
"""The number of a result whose group is saved completely or not at all."""


@attrs.frozen
class Result:
    """The result of an operator.

    Attributes:
        group: "products", "attention" or "exchanges".
        number: The index of a product among those of its block; for other groups `WHOLE`.
        inner: The width that a product sums over.
        size: The size in bytes.
    """

    group: str
    number: int
    inner: float
    size: float


class Priced(TorchDispatchMode):
    """Records the results of operators that can be saved, and the tensors that autograd saves."""

    def __init__(self, groups: Mapping[Any, str]) -> None:
        super().__init__()
        self.groups = groups
        self.seen = Counter[str]()
        self.found: list[tuple[Result, int]] = []
        self.saved: list[Tensor] = []

    def save(self, x: Tensor) -> None:
        """Record a tensor that autograd saves."""
        # Returns None to autograd: a result that its own node refers to would never be freed.
        self.saved.append(get_local(x.detach()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if (group := self.groups.get(func)) is not None:
            # The arguments are (matrix, matrix) or (bias, matrix, matrix). For attention it is the
            # width of the queries, which is not used.
            inner = args[func.overloadpacket is torch.ops.aten.addmm].shape[-1]
            size = _bytes_of(x for x in tree_iter(out) if isinstance(x, Tensor))
            number = self.seen[group] if group == "products" else WHOLE
            self.found.append((Result(group, number, inner, size), len(self.saved)))
            self.seen[group] += 1
        return out


def _bytes_of(tensors: Iterable[Tensor], *, without: Iterable[Tensor] = ()) -> int:
    """Return the bytes of the storages of tensors, each counted once, without those of others."""
    sizes = {StorageWeakRef(x.untyped_storage()): x.untyped_storage().nbytes() for x in tensors}
    storages = sizes.keys() - {StorageWeakRef(x.untyped_storage()) for x in without}
    return sum(sizes[storage] for storage in storages)


def choose(
    forward: Callable[..., Any],
    block: nn.Module,
    inputs: tuple[Sequence[Any], Mapping[str, Any]],
    *,
    groups: Mapping[Any, str],
    budget: float,
) -> Keeps:
    """Choose the results that a block saves for backward, by a trial forward pass.

    A product of inner width K takes 2 K operations per element of its result, so products are
    ranked by K. Exchanges are always saved: ranks that chose differently would communicate
    differently. Attention is saved completely or not at all, since its number of calls depends on
    the documents. A result that no backward pass in the block needs is not saved.

    Args:
        forward: `forward(block, *args, **kwargs)`.
        block: The block; its parameters do not count as activations.
        inputs: (args, kwargs).
        groups: The operators whose results can be saved; see `recompute.groups_of`.
        budget: The fraction of the bytes that the block saves without recomputation, with its
            input.

    Effects:
        Those of the forward pass; torch's generators are restored.

    Examples:
        >>> block, x = nn.Linear(4, 4), torch.ones(1, 4, requires_grad=True)
        >>> groups = {torch.ops.aten.addmm.default: "products"}
        >>> keeps = choose(nn.Linear.forward, block, ([x], {}), groups=groups, budget=0.9)
        >>> keeps("products", 0)  # no backward pass needs it
        False
    """
    priced = Priced(groups)
    devices = {p.device for p in block.parameters() if p.device.type == "cuda"}
    hooks = torch.autograd.graph.saved_tensors_hooks(priced.save, lambda x: x)
    # The trial must leave the generators alone: the real pass draws its dropout from them.
    with torch.random.fork_rng(devices), hooks, priced:
        forward(block, *inputs[0], **inputs[1])
    tensors = [x for x in tree_iter(inputs) if isinstance(x, Tensor)]
    weights = [get_local(p) for p in block.parameters()]
    activations = [get_local(x) for x in tensors if x.requires_grad]
    # They stay in memory anyway: positions, spans, rotary tables.
    constants = [get_local(x) for x in tensors if not x.requires_grad]
    total = _bytes_of(priced.saved, without=[*weights, *constants])
    # A result that was followed by a saved tensor is needed by a backward pass.
    needed = [result for result, before in priced.found if before < len(priced.saved)]
    return choose_fitting(needed, budget * total - _bytes_of(activations))


def choose_fitting(results: Iterable[Result], room: float) -> Keeps:
    """Choose the most expensive results that fit into a number of bytes.

    Examples:
        >>> keeps = choose_fitting(
        ...     [Result("products", i, inner, 4) for i, inner in enumerate((1, 2))], 6
        ... )
        >>> keeps("products", 0), keeps("products", 1)
        (False, True)
    """
    sizes: dict[tuple[str, int], float] = {}
    inner: dict[tuple[str, int], float] = {}
    for result in results:
        key = result.group, result.number
        sizes[key] = sizes.get(key, 0) + result.size
        inner[key] = result.inner

    def get_preference(key: tuple[str, int]) -> tuple[int, float, int]:
        group, number = key
        return _ORDER.index(group), -inner[key], number

    chosen = set()
    for key in sorted(sizes, key=get_preference):
        if key[0] == "exchanges" or sizes[key] <= room:
            chosen.add(key)
            room -= sizes[key]

    def is_saved(group: str, number: int) -> bool:
        return (group, number if group == "products" else WHOLE) in chosen

    return is_saved
