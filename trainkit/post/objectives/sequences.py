"""Sums over the documents of packed rows, whose tokens may be sharded over ranks.

Losses of whole answers are functions of such sums. A document counts on the rank where it starts;
the gradient flows to its tokens on all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainkit.collectives import sum_forward, sum_grad
from trainkit.losses.logits import read_field
from trainkit.types import IGNORED_LABEL, Axis


class Documents(NamedTuple):
    """Sums over the documents of B rows, by document id: `[B, N]` each.

    `sums` are over the tokens in the loss, and `tokens` is their number. `starts_here` is True for
    documents that start on this rank, which counts them; `exists` for the documents of all ranks.
    """

    sums: dict[str, Tensor]
    tokens: Tensor
    starts_here: Tensor
    exists: Tensor

    def means(self, name: str) -> Tensor:
        """Return the mean of a column over the tokens in the loss of each document, or 0."""
        return self.sums[name] / self.tokens.clamp(min=1)


def sum_documents(
    batch: Mapping[str, Any],
    columns: Mapping[str, Tensor],
    *,
    axis: Axis,
    where: str = "sum_documents",
) -> Documents:
    """Return the differentiable sums of columns over the tokens in the loss of each document.

    N allows for documents of one token each, because the number of documents is not known without a
    host sync. Ids without a document have zeros.

    Args:
        batch: "labels", "document_ids" and "position_ids", `[B, S]`.
        columns: Floating columns `[B, S]`; values of tokens outside the loss are not used.
        axis: The ranks over which the tokens of a row are sharded, `ps.sp`.
        where: The calling function, for messages.

    Raises:
        ValueError: The batch lacks one of the three.

    Effects:
        Communicates: one all-reduce on `axis`, and in backward another.

    Examples:
        >>> from trainkit.types import SOLO
        >>> batch = {"labels": torch.tensor([[5, 6, 7, -100]])}
        >>> batch["document_ids"] = torch.tensor([[0, 0, 1, 1]])
        >>> batch["position_ids"] = torch.tensor([[0, 1, 0, 1]])
        >>> documents = sum_documents(batch, {"x": torch.tensor([[1.0, 2.0, 4.0, 8.0]])}, axis=SOLO)
        >>> documents.sums["x"], documents.tokens
        (tensor([[3., 4., 0., 0.]]), tensor([[2., 1., 0., 0.]]))
    """
    ids = read_field(where, batch, "document_ids")
    positions = read_field(where, batch, "position_ids")
    mask = read_field(where, batch, "labels") != IGNORED_LABEL
    rows = len(ids)
    size = ids.shape[1] * axis.count  # of the whole row, whose tokens this rank has a part of
    size += size % 2  # even, for pairs of documents
    # Padding joins document 0, where the masks below make its values 0.
    first = size * torch.arange(rows, device=ids.device).unsqueeze(1)
    index = (first + ids.clamp(min=0)).flatten()
    dtype = next(iter(columns.values())).dtype

    def add(x: Tensor) -> Tensor:
        # One dimension: torch's deterministic mode then adds in the order of the tokens.
        zeros = x.new_zeros(rows * size)
        return zeros.scatter_add(0, index, x.flatten()).view(rows, size)

    local_sums = [add(torch.where(mask, x, 0).to(dtype)) for x in columns.values()]
    # A document starts where its positions do: on one rank, whatever the sharding.
    starts = add(((positions == 0) & (ids >= 0)).to(dtype))
    # One all-reduce for all sums. The gradient of a sum belongs to the tokens of every rank.
    stacked = torch.stack([*local_sums, add(mask.to(dtype)), starts])
    summed = sum_grad(sum_forward(stacked, axis), axis)
    *sums, tokens, exists = summed.unbind()
    return Documents(
        sums=dict(zip(columns, sums, strict=True)),
        tokens=tokens.detach(),
        starts_here=starts > 0,
        exists=exists > 0,
    )


def sum_with_counts(values: Mapping[str, Tensor], where: Tensor) -> dict[str, Tensor]:
    """Return the sum of each value where a mask is True, and the count as `name/count`.

    Examples:
        >>> sum_with_counts({"margin": torch.tensor([1.0, 2.0])}, torch.tensor([True, False]))
        {'margin': tensor(1.), 'margin/count': tensor(1)}
    """
    count = where.sum()
    terms: dict[str, Tensor] = {}
    for name, x in values.items():
        terms[name] = torch.where(where, x, 0).sum().detach()
        terms[f"{name}/count"] = count
    return terms


def count_names(*names: str) -> tuple[str, ...]:
    """Return the names of terms, each followed by the name of its count.

    Examples:
        >>> count_names("margin")
        ('margin', 'margin/count')
    """
    return tuple(f"{name}{end}" for name in names for end in ("", "/count"))
