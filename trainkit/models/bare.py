"""A module as the functions it is made of, for steps so small that the calls are what takes time.

A token of a small model is some hundred operators of some microseconds, and `nn.Module` costs as
much again: each call looks for hooks, each child and parameter is found by a failed look-up first.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.models.layers import Linear

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_SMALL = 2**19
"""The elements of a matrix from which on reading it takes so long that a call does not matter."""


def bare(module: Any) -> Any:
    """Return what computes the same as a module, up to rounding, in fewer calls and operators.

    Children and parameters are plain attributes, and a call is `forward`, in objects of a class
    derived from the module's own. A module with hooks, with a `forward` of its own (recomputation,
    precision) or compiled is left as it is, and so are parts of it. Small matrices of plain linear
    layers without bias are copied, and laid out for few rows. What a class declares as

    - `joined`, methods that give the products of one input with linear layers of some names, is one
      product where all these are such layers;
    - `constant`, methods that depend on no parameter, is computed once.

    Args:
        module: A module in evaluation mode, whose parameters stay as they are while the result is
            in use.

    Returns:
        An object that is called as the module is, without gradients, and is for nothing else.

    Examples:
        >>> from trainkit.models import build_decoder, make_decoder_config
        >>> attention = build_decoder(make_decoder_config("tiny"), seed=0).layers["0"].attention
        >>> with torch.no_grad():
        ...     [x.shape[-1] for x in bare(attention).projected(torch.ones(1, 1, 128))]
        [128, 128, 128]
    """
    own, kind = vars(module), type(module)
    changed = own.get("_compiled_call_impl") is not None or "forward" in own
    if changed or any(own[hooks] for hooks in _HOOKS):
        return module
    prepare, call = _QUICK.get(kind, (None, kind.forward))
    ready = None if prepare is None else prepare(module)
    made = object.__new__(_bare_kind(kind, kind.forward if ready is None else call))
    children = {k: None if child is None else bare(child) for k, child in own["_modules"].items()}
    values = own | own["_parameters"] | own["_buffers"] | children
    vars(made).update(values, _modules=children, ready=ready)
    for method in getattr(module, "constant", ()):
        vars(made)[method] = cache(getattr(module, method))
    for method, names in getattr(module, "joined", {}).items():
        parts: list[Any] = [getattr(children.get(name), "ready", None) for name in names]
        if all(part is not None for part in parts):
            sizes = [part.shape[1] for part in parts]
            vars(made)[method] = partial(_products, torch.cat(parts, dim=1), sizes)
    return made


@cache
def _bare_kind(kind: type[nn.Module], call: Callable[..., Any]) -> type[nn.Module]:
    """Return the class of what stands for modules of a class."""
    return type(f"Bare{kind.__name__}", (kind,), {"__call__": call})


def _products(matrix: Tensor, sizes: list[int], x: Tensor) -> tuple[Tensor, ...]:
    return (x @ matrix).split_with_sizes(sizes, -1)


def _turned(linear: Linear) -> Tensor | None:
    """Return a small matrix `[N, D]` as `[D, N]`, by which a row is multiplied faster."""
    weight = linear.weight
    plain = type(weight) is nn.Parameter and linear.bias is None
    return weight.t().contiguous() if plain and weight.numel() <= _SMALL else None


def _times(linear: Any, x: Tensor) -> Tensor:
    return x @ linear.ready


def _widened(norm: nn.RMSNorm) -> Tensor | None:
    """Return a norm's weight for `_normed`, which is for a CPU: torch has a kernel elsewhere."""
    weight = norm.weight
    if norm.eps is None or weight is None or weight.ndim > 1:
        return None
    plain = weight.device.type == "cpu" and weight.dtype == torch.float32
    return weight * len(weight) ** 0.5 if plain else None


def _normed(norm: Any, x: Tensor) -> Tensor:
    if x.dtype != torch.float32:
        return norm.forward(x)
    scale = x.square().sum(-1, keepdim=True).add_(x.shape[-1] * norm.eps).rsqrt_()
    return (x * scale).mul_(norm.ready)


_QUICK: dict[type[nn.Module], tuple[Callable[..., Tensor | None], Callable[..., Tensor]]] = {
    Linear: (_turned, _times),
    nn.RMSNorm: (_widened, _normed),
}
"""What is prepared of a module of a class, and the call that takes it; None where it has none."""
