"""The layers that a decoder is made of: they stay empty until a `Weights` function fills them."""

from __future__ import annotations

from torch import Tensor, nn


class Linear(nn.Linear):
    """`nn.Linear` that stays empty until it is filled: drawing numbers nobody keeps takes time."""

    head_size: int | None = None
    """How many rows belong to one head, where that differs among the matrices of an attention."""

    def reset_parameters(self) -> None:
        """Leave the values as they are; a `Weights` function fills them."""


class Embedding(nn.Embedding):
    """`nn.Embedding` that stays empty until it is filled."""

    def reset_parameters(self) -> None:
        """Leave the values as they are; a `Weights` function fills them."""


class Mlp(nn.Module):
    """SwiGLU (Shazeer, "GLU variants improve transformer", 2020)."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate = Linear(width, inner, bias=False)
        self.up = Linear(width, inner, bias=False)
        self.down = Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[B, S, D]` to `[B, S, D]`."""
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))
