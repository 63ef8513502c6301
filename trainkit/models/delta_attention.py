"""A delta layer: the gated delta rule in place of attention, between projections of its own.

Yang et al., "Gated Delta Networks" (2024); the layer is that of Qwen3-Next (2025).
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from trainkit.attention.attend_delta import attend_delta
from trainkit.attention.untraced import untraced
from trainkit.models.config import DecoderConfig
from trainkit.models.layers import Joined, Linear
from trainkit.types import AttendDelta, Spans


class DeltaAttention(nn.Module):
    """The gated delta rule with convolutions before it, a gated norm after it, and projections.

    The number of heads follows from the shapes of the weights, so it also works on a shard of them.
    """

    # For `bare`, which fuses the products in generation.
    joined: ClassVar[Joined] = {"projected": ("wq", "wk", "wv", "wg")}

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        assert config.delta is not None
        delta = config.delta
        # Not traced by torch.compile: it reads the lengths of documents, or communicates.
        self.attend_delta: AttendDelta = untraced(attend_delta)
        self.wq = _make_heads(config.width, delta.key_heads, delta.key_size)
        self.wk = _make_heads(config.width, delta.key_heads, delta.key_size)
        self.wv = _make_heads(config.width, delta.value_heads, delta.value_size)
        self.wg = _make_heads(config.width, delta.value_heads, delta.value_size)
        self.wb = _make_heads(config.width, delta.value_heads, 1)
        self.wa = DecayGate(config.width, delta.value_heads)
        self.q_conv = ShortConv(delta.key_heads, delta.key_size, delta.conv)
        self.k_conv = ShortConv(delta.key_heads, delta.key_size, delta.conv)
        self.v_conv = ShortConv(delta.value_heads, delta.value_size, delta.conv)
        self.gated_norm = GatedNorm(delta.value_size, config.norm_eps)
        self.wo = Linear(delta.value_heads * delta.value_size, config.width, bias=False)

    def forward(self, x: Tensor, *, spans: Spans, attend: AttendDelta | None = None) -> Tensor:
        """Map `[B, S, D]` to `[B, S, D]`; `attend`, that of a cache, replaces the module's own."""
        q, k, v, gate = (
            part.unflatten(-1, (-1, linear.head_size))
            for part, linear in zip(
                self.projected(x), (self.wq, self.wk, self.wv, self.wg), strict=True
            )
        )
        beta = self.wb(x)
        attend = attend or self.attend_delta
        out = attend(
            q,
            k,
            v,
            convolutions=(self.q_conv(), self.k_conv(), self.v_conv()),
            log_decay=self.wa(x),
            beta=beta.to(torch.promote_types(beta.dtype, torch.float32)).sigmoid(),
            spans=spans,
        )
        return self.wo(self.gated_norm(out, gate).flatten(2))

    def projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return queries and keys `[B, S, K D]`, values and the gate of the output `[B, S, H E]`.

        All heads side by side.
        """
        return self.wq(x), self.wk(x), self.wv(x), self.wg(x)


def _make_heads(width: int, heads: int, size: int) -> Linear:
    linear = Linear(width, heads * size, bias=False)
    # Heads of keys and of values differ in their rows; tensor parallelism splits between heads.
    linear.head_size = size
    return linear


class DecayGate(nn.Module):
    """The logarithm of the decay of each head: -exp(log_rate) * softplus(W x + bias)."""

    # No `Linear`: what an adapter adds to its output would not be inside of the softplus.
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads, width))
        self.bias = nn.Parameter(torch.empty(heads))
        self.log_rate = nn.Parameter(torch.empty(heads))
        self.head_size = 1

    def forward(self, x: Tensor) -> Tensor:
        """Map `[B, S, D]` to `[B, S, H]`, in at least fp32."""
        product = nn.functional.linear(x, self.weight)
        dtype = torch.promote_types(product.dtype, torch.float32)
        times = nn.functional.softplus(product.to(dtype) + self.bias.to(dtype))
        return -self.log_rate.to(dtype).exp() * times


class ShortConv(nn.Module):
    """The kernels of a causal convolution, one for each channel of some heads."""

    def __init__(self, heads: int, size: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads * size, width))
        self.head_size = size

    def forward(self) -> Tensor:
        """Return the kernels `[heads, size, W]`."""
        return self.weight.unflatten(0, (-1, self.head_size))


class GatedNorm(nn.Module):
    """RMSNorm of each head, times SiLU of a gate, computed in fp32 (fp64 stays fp64)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Map heads `[..., size]` and their gate to `[..., size]`."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        weight = self.weight.to(dtype)
        normal = nn.functional.rms_norm(x.to(dtype), weight.shape, weight, self.eps)
        return (normal * nn.functional.silu(gate.to(dtype))).to(x.dtype)
