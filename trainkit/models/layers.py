"""The layers that a decoder is made of: they stay empty until a `Weights` function fills them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from trainkit.models.config import DecoderConfig, FeedForward

Joined = Mapping[str, Sequence[str]]
"""Methods that are products of one input, and the names of their linear layers; see `bare`."""


class Linear(nn.Linear):
    """`nn.Linear` that stays empty until it is filled: drawing numbers nobody keeps takes time."""

    head_size: int | None = None
    """How many rows belong to one head, where that differs among the matrices of an attention."""

    parts: tuple[int, ...] | None = None
    """How many rows belong, over and over, to each of the matrices that stand in it, if several."""

    def reset_parameters(self) -> None:
        """Leave the values as they are; a `Weights` function fills them."""


class Embedding(nn.Embedding):
    """`nn.Embedding` that stays empty until it is filled."""

    def reset_parameters(self) -> None:
        """Leave the values as they are; a `Weights` function fills them."""


_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": nn.functional.silu,
    "gelu": nn.functional.gelu,
    "gelu_tanh": partial(nn.functional.gelu, approximate="tanh"),
}


class Mlp(nn.Module):
    """SwiGLU (Shazeer, "GLU variants improve transformer", 2020), or what a `FeedForward` says."""

    joined: ClassVar[Joined] = {"opened": ("gate", "up")}

    def __init__(self, width: int, inner: int, how: FeedForward | None = None) -> None:
        super().__init__()
        how = how or FeedForward()
        self.activation = _ACTIVATIONS[how.activation]
        self.gate = Linear(width, inner, bias=how.bias) if how.gated else None
        self.up = Linear(width, inner, bias=how.bias)
        self.down = Linear(inner, width, bias=how.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[B, S, D]` to `[B, S, D]`."""
        if self.gate is None:
            return self.down(self.activation(self.up(x)))
        gate, up = self.opened(x)
        return self.down(self.activation(gate) * up)

    def opened(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gate's part and the other, `[B, S, inner]`."""
        assert self.gate is not None
        return self.gate(x), self.up(x)


# ------------------------------------------------------------------------------------------- norms


def make_norm(config: DecoderConfig, size: int) -> nn.Module:
    """Return a decoder's kind of norm, for vectors of a size.

    Examples:
        >>> config = DecoderConfig(
        ...     vocab_size=259, width=64, layers=2, heads=4, kv_heads=2, mlp_width=128
        ... )
        >>> make_norm(config, 16)
        RMSNorm((16,), eps=1e-05, elementwise_affine=True)
    """
    kinds = {"rms": nn.RMSNorm, "offset": OffsetNorm, "layer": nn.LayerNorm}
    return kinds[config.how_normed.kind](size, config.norm_eps)


class OffsetNorm(nn.Module):
    """RMSNorm whose scale is 1 + its weight, computed in fp32 (fp64 stays fp64), as in Gemma."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.empty(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        """Map `[..., size]` to `[..., size]`."""
        wide = torch.promote_types(x.dtype, torch.float32)
        scale = 1 + self.weight.to(wide)
        return nn.functional.rms_norm(x.to(wide), scale.shape, scale, self.eps).to(x.dtype)


class WideNorm(nn.Module):
    """RMSNorm over all heads at once, of which this module may hold some (OLMo 2, 2024)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.size, self.eps = nn.Parameter(torch.empty(size)), size, eps

    def forward(self, x: Tensor) -> Tensor:
        """Map `[..., size]`, or a rank's part of it, to the same."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        mean = self.summed(wide.square().sum(-1, keepdim=True)) / self.size
        return (wide * torch.rsqrt(mean + self.eps) * self.weight.to(wide.dtype)).to(x.dtype)

    def summed(self, squares: Tensor) -> Tensor:
        """Return the sum of what each rank has: tensor parallelism puts a collective here."""
        return squares
