"""Modules without the overhead of `nn.Module`, for generation with small models.

A token of a small model takes some hundred operators of some microseconds. `nn.Module` doubles
that: each call looks for hooks, and each child or parameter is found after a failed lookup.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.models.layers import Linear
from trainkit.models.mixins import mixed_class

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_MAX_COPIED = 2**19
"""The most elements of a matrix that is copied: for larger ones reading it dominates the time."""


def bare(module: Any) -> Any:
    """Return a function equal to a module, up to rounding, with fewer calls and operators.

    The result is an object of a class derived from the module's own, in which children and
    parameters are plain attributes and a call is `forward`. Modules with hooks, with a replaced
    `forward` (recomputation, precision) or compiled ones are used unchanged, with all below them.
    Small matrices of linear layers without bias are copied and transposed, for few rows. A class
    may declare

    - `joined`: methods that apply several linear layers to one input; they become one product if
      all of these are small;
    - `constant`: methods that depend on no parameter; they are computed once.

    Args:
        module: A module in evaluation mode, whose parameters do not change while the result is in
            use.

    Returns:
        An object to call like the module, without gradients; nothing else is supported.

    Examples:
        >>> from trainkit.models import build_decoder, make_decoder_config
        >>> attention = build_decoder(make_decoder_config("tiny"), seed=0).layers["0"].attention
        >>> with torch.no_grad():
        ...     [x.shape[-1] for x in bare(attention).projected(torch.ones(1, 1, 128))]
        [128, 128, 128]
    """
    # Instance attributes alone: a `forward` among them replaces that of the class.
    fields = vars(module)
    is_replaced = fields.get("_compiled_call_impl") is not None or "forward" in fields
    if is_replaced or any(fields[hooks] for hooks in _HOOKS):
        return module
    # By the exact type: an adapted or quantized layer computes something else.
    mixin: Any = _FAST.get(type(module))
    ready = None if mixin is None else mixin.prepare(module)
    result_class = mixed_class(Bare if ready is None else mixin, type(module))
    # Without __init__, which would allocate the parameters anew.
    result = object.__new__(result_class)
    children = {
        name: None if child is None else bare(child) for name, child in fields["_modules"].items()
    }
    # Plain attributes, which Python finds before it calls `nn.Module.__getattr__`.
    vars(result).update(fields | fields["_parameters"] | fields["_buffers"] | children)
    vars(result).update(_modules=children, ready=ready)
    for method in getattr(module, "constant", ()):
        vars(result)[method] = cache(getattr(module, method))
    for method, names in getattr(module, "joined", {}).items():
        # Large, sharded or biased ones are not ready, and then the method stays as it is.
        matrices: list[Any] = [getattr(children.get(name), "ready", None) for name in names]
        if all(matrix is not None for matrix in matrices):
            sizes = [matrix.shape[1] for matrix in matrices]
            vars(result)[method] = partial(_multiply, torch.cat(matrices, dim=1), sizes)
    return result


class Bare(nn.Module):
    """Mixin: a call is `forward` itself, without `nn.Module.__call__` and its hooks."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        # Python looks up `__call__` on the class, so it is set once per derived class.
        cls.__call__ = cls.forward


class BareLinear(Bare):
    """Mixin: a small matrix `[N, D]` laid out as `[D, N]`, which multiplies one row faster."""

    ready: Tensor

    @staticmethod
    def prepare(linear: Linear) -> Tensor | None:
        """Return the transposed matrix; None if it is large or sharded, or there is a bias."""
        weight = linear.weight
        # Exactly a Parameter: DTensors and quantized weights are subclasses of Tensor.
        is_plain = type(weight) is nn.Parameter and linear.bias is None
        is_small = is_plain and weight.numel() <= _MAX_COPIED
        return weight.t().contiguous() if is_small else None

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
        # Without an eps torch takes that of the input's dtype.
        if norm.eps is None or weight is None or weight.ndim > 1:
            return None
        is_fp32_on_cpu = weight.device.type == "cpu" and weight.dtype == torch.float32
        return weight * len(weight) ** 0.5 if is_fp32_on_cpu else None

    def forward(self, x: Tensor) -> Tensor:
        """Compute x w sqrt(D) / sqrt(sum(x^2) + D eps), which saves the division of the mean."""
        if x.dtype != torch.float32:
            return super().forward(x)
        squares = x.square().sum(-1, keepdim=True)
        scale = squares.add_(x.shape[-1] * self.eps).rsqrt_()
        return (x * scale).mul_(self.ready)


_FAST: dict[type[nn.Module], type[BareLinear | BareRMSNorm]] = {
    Linear: BareLinear,
    nn.RMSNorm: BareRMSNorm,
}


def _multiply(matrix: Tensor, sizes: list[int], x: Tensor) -> tuple[Tensor, ...]:
    return (x @ matrix).split_with_sizes(sizes, -1)
