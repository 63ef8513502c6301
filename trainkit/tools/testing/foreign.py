"""A model without any trainkit in it, for the certificate: like GPT-2, in plain torch.

It has biases and layer norms, learned positions, a head tied to the embedding, a buffer, and in one
variant a layer that only some microbatches use.
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

# The head shares the embedding's shard of the vocabulary, and gathers its logits for a plain loss.
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
        """Map `[B, S, D]` to `[B, S, D]`; `mask` `[B, 1, S, S]` is true where queries attend."""
        y = self.norm(x)
        q, k, v = (
            # -1 and not the number of heads, of which a rank of tp has fewer.
            project(y).unflatten(-1, (-1, HEAD_SIZE)).transpose(1, 2)
            for project in (self.q, self.k, self.v)
        )
        attended = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        return x + self.down(nn.functional.gelu(self.up(self.mlp_norm(x))))


class ForeignModel(nn.Module):
    """The whole model, or a pipeline stage, in which the layers of other stages are None.

    With `sometimes` one more matrix is applied to rows that start with certain tokens. They are a
    quarter, so most microbatches of one row do not use it, and some ranks may not at all.
    """

    def __init__(self, *, sometimes: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.positions: nn.Embedding | None = nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleDict({str(i): ForeignBlock() for i in range(LAYERS)})
        self.sometimes = nn.Linear(WIDTH, WIDTH) if sometimes else None
        self.norm: nn.LayerNorm | None = nn.LayerNorm(WIDTH)
        self.head: nn.Linear | None = nn.Linear(WIDTH, VOCABULARY, bias=False)
        # Tied as in plain torch: both modules have one parameter.
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: Tensor, *, position_ids: Tensor, document_ids: Tensor) -> Tensor:
        """Map ids `[B, S]` to logits `[B, S, V]`; a pipeline stage does its part of that."""
        # Only the first stage has positions; on a later one `x` is the hidden state.
        if self.positions is not None:
            # `[B, 1, 1]`: the first token of a row decides for all of it.
            is_used = (x[:, :1, None] % 7 == 1).to(self.scale)
            x = self.embedding(x) * self.scale + self.positions(position_ids)
            if self.sometimes is not None and is_used.any():
                x = x + is_used * self.sometimes(x)
        # `[B, S, S]`: pairs of tokens of one document; `tril` leaves the causal ones.
        same = document_ids.unsqueeze(1) == document_ids.unsqueeze(2)
        mask = same.tril().unsqueeze(1)
        for block in self.layers.values():
            x = block(x, mask)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))

    def boundary(self, batch: Mapping[str, Any]) -> Tensor:
        """Return the shape and dtype of a pipeline stage's output, as a tensor on meta."""
        shape = (*batch["labels"].shape, WIDTH)
        return torch.empty(shape, dtype=next(self.parameters()).dtype, device="meta")


def split_foreign(model: Any, num_stages: int) -> Sequence[nn.Module]:
    """Split the model into two stages; the last has a copy of the embedding, tied to its head.

    Examples:
        >>> [list(stage.layers) for stage in split_foreign(ForeignModel(), 2)]
        [['0'], ['1']]
    """
    assert num_stages == 2
    first, last = model, copy.deepcopy(model)
    # The last stage keeps `embedding`: two stages with one tied parameter are what it is here for.
    first.norm = first.head = last.positions = last.sometimes = None
    del first.layers["1"], last.layers["0"]
    return [first, last]


def call_foreign(model: nn.Module, batch: Mapping[str, Any]) -> Any:
    """Call the model with a batch's ids, positions and documents.

    Examples:
        >>> batch = {"input_ids": 1, "position_ids": 2, "document_ids": 3}
        >>> call_foreign(lambda ids, position_ids, document_ids: ids + position_ids, batch)
        3
    """
    return model(
        batch["input_ids"],
        position_ids=batch["position_ids"],
        document_ids=batch["document_ids"],
    )


def foreign_plan(ps: Any, case: LayoutCase) -> list[Transform]:
    """Return the plan of the model, which gives `tensor_parallel` styles by name.

    Examples:
        >>> from trainkit.mesh import solo_parallel
        >>> [step.kind for step in foreign_plan(solo_parallel(), LayoutCase())]
        ['tensor', 'recompute', 'fsdp']
    """
    del ps
    return [tensor_parallel(STYLES), recompute(case.recompute), fsdp()]
