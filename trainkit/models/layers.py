"""The layers of a decoder, uninitialized until a `Weights` function fills them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from trainkit.models.config import Activation, DecoderConfig, FeedForward

Joined = Mapping[str, Sequence[str]]
"""Methods that apply several linear layers to one input, with the layers' names; see `bare`."""


class Linear(nn.Linear):
    """An uninitialized `nn.Linear`: random values that are overwritten would cost time."""

    head_size: int | None = None
    """The number of rows of a head, where the projections of an attention differ in it."""

    parts: tuple[int, ...] | None = None
    """The numbers of rows of the matrices that are fused in this one, repeated to the end; see
    `optim.Muon`."""

    def reset_parameters(self) -> None:
        """Leave the values as they are; a `Weights` function fills them."""


class Embedding(nn.Embedding):
    """An uninitialized `nn.Embedding`."""

    def reset_parameters(self) -> None:
        """Leave the values as they are; a `Weights` function fills them."""


ACTIVATIONS: Mapping[Activation, Callable[[Tensor], Tensor]] = {
    "silu": nn.functional.silu,
    "gelu": nn.functional.gelu,
    "gelu_tanh": partial(nn.functional.gelu, approximate="tanh"),
    "relu2": lambda x: nn.functional.relu(x).square(),
}
"""The activations of an MLP by their names."""


class Mlp(nn.Module):
    """SwiGLU (Shazeer, "GLU variants improve transformer", 2020), or the MLP of a `FeedForward`."""

    # For `bare`: both products have the same input.
    joined: ClassVar[Joined] = {"opened": ("gate", "up")}

    def __init__(self, width: int, inner: int, config: FeedForward | None = None) -> None:
        super().__init__()
        config = config or FeedForward()
        self.activation = ACTIVATIONS[config.activation]
        self.gate = Linear(width, inner, bias=config.bias) if config.gated else None
        self.up = Linear(width, inner, bias=config.bias)
        self.down = Linear(inner, width, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[B, S, D]` to `[B, S, D]`."""
        if self.gate is None:
            return self.down(self.activation(self.up(x)))
        gate, up = self.opened(x)
        return self.down(self.activation(gate) * up)

    def opened(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the products with `gate` and `up`, both `[B, S, inner]`."""
        assert self.gate is not None
        return self.gate(x), self.up(x)


# ------------------------------------------------------------------------------------------- norms


def make_norm(config: DecoderConfig, size: int, *, eps: float | None = None) -> nn.Module:
    """Return a norm of a decoder's kind, for vectors of some size.

    Args:
        config: The decoder.
        size: The size.
        eps: What is added to the mean square; `config.norm_eps` when None.

    Examples:
        >>> config = DecoderConfig(
        ...     vocab_size=259, width=64, layers=2, heads=4, kv_heads=2, mlp_width=128
        ... )
        >>> make_norm(config, 16)
        RMSNorm((16,), eps=1e-05, elementwise_affine=True)
    """
    kinds = {"rms": nn.RMSNorm, "offset": OffsetNorm, "layer": nn.LayerNorm}
    return kinds[config.norm_config.kind](size, config.norm_eps if eps is None else eps)


class OffsetNorm(nn.Module):
    """RMSNorm whose scale is 1 + its weight, computed in fp32 (fp64 stays fp64), as in Gemma."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Map `[..., size]` to `[..., size]`."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        # 1 + weight is rounded in fp32: bf16 would lose weights below 1/256.
        scale = 1 + self.weight.to(dtype)
        normal = nn.functional.rms_norm(x.to(dtype), scale.shape, scale, self.eps)
        return normal.to(x.dtype)


class WideNorm(nn.Module):
    """RMSNorm over all heads together, also if this module has only some of them (OLMo 2, 2024)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        # Stays that of all heads when tensor parallelism shards the weight.
        self.size = size
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Map `[..., size]`, or this rank's shard of the last dimension, to the same shape."""
        # In bf16 a sum of squares would lose the small ones.
        y = x.to(torch.promote_types(x.dtype, torch.float32))
        # Divided by the full size, also on a shard: `summed` then adds those of the other ranks.
        mean = self.summed(y.square().sum(-1, keepdim=True)) / self.size
        normal = y * torch.rsqrt(mean + self.eps)
        return (normal * self.weight.to(y.dtype)).to(x.dtype)

    def summed(self, squares: Tensor) -> Tensor:
        """Return the sum over all ranks; tensor parallelism overrides it with a collective."""
        return squares
