"""A module as the functions it is made of, for steps so small that the calls are what takes time.

A token of a small model is some hundred operators of some microseconds, and `nn.Module` costs as
much again: each call looks for hooks, each child and parameter is found by a failed look-up first.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.models.layers import Linear
from trainkit.models.mixins import mixed_class

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
    quick = _QUICK.get(kind)
    ready = None if quick is None else quick.prepare(module)
    mixin = Bare if quick is None or ready is None else quick
    made = object.__new__(mixed_class(mixin, kind))
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


class Bare(nn.Module):
    """Mixin: a call is `forward` itself, without `nn.Module.__call__` and its hooks."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.__call__ = cls.forward


class BareLinear(Bare):
    """Mixin: a small matrix `[N, D]` laid out as `[D, N]`, which multiplies one row faster."""

    ready: Tensor

    @staticmethod
    def prepare(linear: Linear) -> Tensor | None:
        """Return the transposed matrix; None if it is large, or the layer is not a plain one."""
        weight = linear.weight
        plain = type(weight) is nn.Parameter and linear.bias is None
        return weight.t().contiguous() if plain and weight.numel() <= _SMALL else None

    def forward(self, x: Tensor) -> Tensor:
        """Multiply with the matrix."""
        return x @ self.ready


class BareRMSNorm(Bare):
    """Mixin: RMSNorm in few operators on a CPU; torch has a kernel for it elsewhere."""

    ready: Tensor
    eps: float

    @staticmethod
    def prepare(norm: nn.RMSNorm) -> Tensor | None:
        """Return the weight times sqrt(D); None if the shortcut does not apply."""
        weight = norm.weight
        if norm.eps is None or weight is None or weight.ndim > 1:
            return None
        plain = weight.device.type == "cpu" and weight.dtype == torch.float32
        return weight * len(weight) ** 0.5 if plain else None

    def forward(self, x: Tensor) -> Tensor:
        """Compute x w sqrt(D) / sqrt(sum(x^2) + D eps), which saves the division of the mean."""
        if x.dtype != torch.float32:
            return super().forward(x)
        scale = x.square().sum(-1, keepdim=True).add_(x.shape[-1] * self.eps).rsqrt_()
        return (x * scale).mul_(self.ready)


_QUICK: dict[type[nn.Module], type[BareLinear | BareRMSNorm]] = {
    Linear: BareLinear,
    nn.RMSNorm: BareRMSNorm,
}


def _products(matrix: Tensor, sizes: list[int], x: Tensor) -> tuple[Tensor, ...]:
    return (x @ matrix).split_with_sizes(sizes, -1)
