"""Sums over the documents of packed rows, whose tokens may lie on several ranks.

Losses of whole answers are functions of such sums. A value is counted on the one rank where the
document begins; its gradient reaches the tokens of every rank.
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
    """What is known of the documents of B rows, by their numbers in the row: `[B, N]` each.

    `sums` are those of columns over the tokens that are trained on, `tokens` how many these are.
    `begun` is true for documents that begin on this rank, which counts them; `known` for all that
    there are, on whatever rank.
    """

    sums: dict[str, Tensor]
    tokens: Tensor
    begun: Tensor
    known: Tensor

    def means(self, name: str) -> Tensor:
        """Return the mean of a column over the trained tokens of each document; 0 without any."""
        return self.sums[name] / self.tokens.clamp(min=1)


def sum_documents(
    batch: Mapping[str, Any],
    columns: Mapping[str, Tensor],
    *,
    axis: Axis,
    where: str = "sum_documents",
) -> Documents:
    """Return the sums of columns over the trained tokens of each document, differentiable.

    N is large enough for documents of one token each: their number is not known without waiting for
    the device. Numbers that no document has hold zeros.

    Args:
        batch: "labels", "document_ids" and "position_ids", `[B, S]`.
        columns: Floating columns `[B, S]`; what they hold elsewhere is not looked at.
        axis: The ranks over which the tokens of a row are dealt, `ps.sp`.
        where: Who asks, for messages.

    Raises:
        ValueError: The batch lacks one of the three.

    Effects:
        Communicates: one all-reduce on `axis`, and in backward another.

    Examples:
        >>> from trainkit.types import SOLO
        >>> batch = {"labels": torch.tensor([[5, 6, 7, -100]])}
        >>> batch["document_ids"] = torch.tensor([[0, 0, 1, 1]])
        >>> batch["position_ids"] = torch.tensor([[0, 1, 0, 1]])
        >>> found = sum_documents(batch, {"x": torch.tensor([[1.0, 2.0, 4.0, 8.0]])}, axis=SOLO)
        >>> found.sums["x"], found.tokens
        (tensor([[3., 4., 0., 0.]]), tensor([[2., 1., 0., 0.]]))
    """
    ids, positions = (read_field(where, batch, x) for x in ("document_ids", "position_ids"))
    kept = read_field(where, batch, "labels") != IGNORED_LABEL
    rows, most = len(ids), ids.shape[1] * axis.count
    most += most % 2
    first = most * torch.arange(rows, device=ids.device).unsqueeze(1)
    index = (first + ids.clamp(min=0)).flatten()
    dtype = next(iter(columns.values())).dtype

    def add(x: Tensor) -> Tensor:
        # In one dimension, which is the order of the tokens wherever torch promises one.
        return x.new_zeros(rows * most).scatter_add(0, index, x.flatten()).view(rows, most)

    own = [add(torch.where(kept, x, 0).to(dtype)) for x in columns.values()]
    begun = add(((positions == 0) & (ids >= 0)).to(dtype))
    parts = torch.stack([*own, add(kept.to(dtype)), begun])
    *sums, tokens, known = sum_grad(sum_forward(parts, axis), axis).unbind()
    named = dict(zip(columns, sums, strict=True))
    return Documents(named, tokens.detach(), begun > 0, known > 0)


def counted(values: Mapping[str, Tensor], where: Tensor) -> dict[str, Tensor]:
    """Return each value's sum where it is counted, and how many these are as `name/count`.

    Examples:
        >>> counted({"margin": torch.tensor([1.0, 2.0])}, torch.tensor([True, False]))
        {'margin': tensor(1.), 'margin/count': tensor(1)}
    """
    count = where.sum()
    sums = {name: torch.where(where, x, 0).sum().detach() for name, x in values.items()}
    return {k: v for name, x in sums.items() for k, v in ((name, x), (f"{name}/count", count))}


def count_names(*names: str) -> tuple[str, ...]:
    """Return the names of terms that have a count of their own.

    Examples:
        >>> count_names("margin")
        ('margin', 'margin/count')
    """
    return tuple(f"{name}{end}" for name in names for end in ("", "/count"))
