"""Weights that make a weighted sum of tokens a mean of means, still with one denominator.

Each token weighs 1 over the tokens that its unit has, wherever they lie: so
    `losses.weighted_next_token`, and
other losses that are weighted, add up the means of units, and `batch.count_weights` counts these.
A unit without a trained token is in neither.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from trainkit.collectives import all_sum
from trainkit.losses.logits import read_field
from trainkit.types import IGNORED_LABEL, Axis, Batch


def weight_by_microbatch(
    microbatches: Sequence[Mapping[str, Any]], *, axis: Axis
) -> list[Mapping[str, Any]]:
    """Weigh tokens so that the loss is the mean of the means of microbatches, as elsewhere.

    The result depends on how a step is cut into microbatches: it is there to repeat the numbers of
    systems that compute so, and for nothing else.

    Args:
        microbatches: Mappings with "labels"; with "weights" their means are weighted.
        axis: The ranks over which the tokens of a microbatch are dealt: `ps.sp`.

    Returns:
        The same with "weights" (fp64) that add up to 1 in each that has a trained token.

    Effects:
        Communicates: one all-reduce on `axis` for each.

    Examples:
        >>> from trainkit.types import SOLO
        >>> batch = {"labels": torch.tensor([[4, -100, 5]])}
        >>> weight_by_microbatch([batch], axis=SOLO)[0]["weights"]
        tensor([[0.5000, 0.0000, 0.5000]], dtype=torch.float64)
    """
    labels = [read_field("weight_by_microbatch", batch, "labels") for batch in microbatches]
    return [
        _weighed(batch, x, torch.zeros_like(x), 1, axis=axis)
        for batch, x in zip(microbatches, labels, strict=True)
    ]


def weight_by_document(
    microbatches: Sequence[Mapping[str, Any]], *, axis: Axis
) -> list[Mapping[str, Any]]:
    """Weigh tokens so that the loss is a mean of the means of documents: each counts once.

    The sum over answers of the mean over their tokens is the one of GRPO (Shao et al. 2024); a
    denominator of `batch.count_documents` counts empty answers too, `batch.count_weights` does not.

    Args:
        microbatches: Mappings with "labels" and "document_ids".
        axis: The ranks over which the tokens of a document are dealt: `ps.sp`.

    Returns:
        The same with "weights" (fp64) that add up to 1 in each document with a trained token.

    Effects:
        Communicates: one all-reduce on `axis` for each.

    Examples:
        >>> from trainkit.types import SOLO
        >>> labels, ids = torch.tensor([[4, 5, 6, -100]]), torch.tensor([[0, 0, 1, 1]])
        >>> weight_by_document([{"labels": labels, "document_ids": ids}], axis=SOLO)[0]["weights"]
        tensor([[0.5000, 0.5000, 1.0000, 0.0000]], dtype=torch.float64)
    """

    def units(batch: Mapping[str, Any]) -> tuple[Tensor, int]:
        ids = read_field("weight_by_document", batch, "document_ids")
        most = ids.shape[1] * axis.count
        rows = torch.arange(len(ids), device=ids.device).unsqueeze(1)
        return rows * most + ids.clamp(min=0), len(ids) * most

    return [
        _weighed(batch, read_field("weight_by_document", batch, "labels"), *units(batch), axis=axis)
        for batch in microbatches
    ]


def _weighed(
    batch: Mapping[str, Any], labels: Tensor, units: Tensor, count: int, *, axis: Axis
) -> Any:
    """Return a batch whose tokens weigh 1 over the weight of their unit, a number below a count."""
    kept = (labels != IGNORED_LABEL).double()
    if "weights" in batch:
        kept = torch.where(kept > 0, batch["weights"].double(), 0)
    units = units.flatten()
    sums = kept.new_zeros(count).scatter_add(0, units, kept.flatten())
    own = all_sum(sums, axis)[units].view(kept.shape)
    return add_column(batch, "weights", torch.where(own == 0, 0, kept / own))


def add_column(batch: Mapping[str, Any], name: str, column: Tensor) -> Mapping[str, Any]:
    """Return a batch, or a mapping, that holds a tensor more.

    Examples:
        >>> add_column({"labels": torch.tensor([[1]])}, "kl", torch.tensor([[0.5]]))
        {'labels': tensor([[1]]), 'kl': tensor([[0.5000]])}
    """
    if isinstance(batch, Batch):
        return attrs.evolve(batch, extra={**batch.extra, name: column})
    return {**batch, name: column}
