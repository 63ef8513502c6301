"""A model as others write theirs, for the certificate: of GPT-2's kind, in plain torch.

Biases and layer norms everywhere, learned positions, a head that is the embedding, a buffer, and
(in one variant) a part that only some microbatches use.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.parallel.fsdp import fsdp
from trainkit.parallel.recompute import recompute
from trainkit.parallel.tensor_parallel import tensor_parallel
from trainkit.parallel.transforms import Transform
from trainkit.tools.testing.cases import LayoutCase

VOCABULARY = 64
WIDTH = 32
HEAD_SIZE = 8
LAYERS = 2
LENGTH = 64

STYLES = {
    "embedding": "vocabulary",
    "layers.*.[qkv]": "column",
    "layers.*.out": "row",
    "layers.*.up": "column",
    "layers.*.down": "row",
    "head": "column_gathered",
}


class ForeignBlock(nn.Module):
    """Attention within documents, and an MLP; every matrix has a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Map `[B, S, D]` to `[B, S, D]`; `mask` `[B, 1, S, S]` says who sees whom."""
        y = self.norm(x)
        q, k, v = (
            project(y).unflatten(-1, (-1, HEAD_SIZE)).transpose(1, 2)
            for project in (self.q, self.k, self.v)
        )
        seen = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out(seen.transpose(1, 2).flatten(-2))
        return x + self.down(nn.functional.gelu(self.up(self.mlp_norm(x))))


class ForeignModel(nn.Module):
    """The whole model, or a pipeline stage of it, of which the parts of other stages are None.

    With `sometimes` a further matrix works on rows that begin with certain tokens: a quarter of
    them, so that most microbatches of one row do not use it, and whole ranks may not.
    """

    def __init__(self, *, sometimes: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.positions: nn.Embedding | None = nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleDict({str(i): ForeignBlock() for i in range(LAYERS)})
        self.sometimes = nn.Linear(WIDTH, WIDTH) if sometimes else None
        self.norm: nn.LayerNorm | None = nn.LayerNorm(WIDTH)
        self.head: nn.Linear | None = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: Tensor, *, position_ids: Tensor, document_ids: Tensor) -> Tensor:
        """Map ids `[B, S]` to logits `[B, S, V]`; a pipeline stage does its part of that."""
        if self.positions is not None:
            some = (x[:, :1, None] % 7 == 1).to(self.scale)
            x = self.embedding(x) * self.scale + self.positions(position_ids)
            if self.sometimes is not None and some.any():
                x = x + some * self.sometimes(x)
        same = document_ids.unsqueeze(1) == document_ids.unsqueeze(2)
        mask = same.tril().unsqueeze(1)
        for block in self.layers.values():
            x = block(x, mask)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))

    def boundary(self, batch: Mapping[str, Any]) -> Tensor:
        """Return what a pipeline stage passes on: `[B, S, D]`, on the meta device."""
        shape = (*batch["labels"].shape, WIDTH)
        return torch.empty(shape, dtype=next(self.parameters()).dtype, device="meta")


def split_foreign(model: Any, num_stages: int) -> Sequence[nn.Module]:
    """Cut the model into two stages; the last has a copy of the embedding, which its head is.

    Examples:
        >>> [list(stage.layers) for stage in split_foreign(ForeignModel(), 2)]
        [['0'], ['1']]
    """
    assert num_stages == 2
    first, last = model, copy.deepcopy(model)
    first.norm = first.head = last.positions = last.sometimes = None
    del first.layers["1"], last.layers["0"]
    return [first, last]


def call_foreign(model: nn.Module, batch: Mapping[str, Any]) -> Any:
    """Enter a batch into the model: its ids, positions and documents.

    Examples:
        >>> batch = {"input_ids": 1, "position_ids": 2, "document_ids": 3}
        >>> call_foreign(lambda ids, **rest: (ids, *rest.values()), batch)
        (1, 2, 3)
    """
    names = ("position_ids", "document_ids")
    return model(batch["input_ids"], **{name: batch[name] for name in names})


def foreign_plan(ps: Any, case: LayoutCase) -> list[Transform]:
    """Return the plan of the model: `tensor_parallel` gets styles by name.

    Examples:
        >>> from trainkit.mesh import solo_parallel
        >>> [step.kind for step in foreign_plan(solo_parallel(), LayoutCase())]
        ['tensor', 'recompute', 'fsdp']
    """
    del ps
    return [tensor_parallel(STYLES), recompute(case.recompute), fsdp()]
