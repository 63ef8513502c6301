"""Token weights that turn a weighted sum into a sum of means, with one denominator.

A unit is a microbatch or a document. Each token gets the weight 1 / (tokens of its unit), counted
over all ranks. Then `losses.weighted_next_token`, or another weighted loss, is the sum of the means
of units, and `batch.count_weights` is their number. Units without a token in the loss do not count.
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
    """Weight tokens so that the loss is the mean of the means of microbatches.

    The result depends on how a step is split into microbatches. Use it only to reproduce the
    numbers of systems that average this way.

    Args:
        microbatches: Mappings with "labels"; with "weights" their means are weighted.
        axis: The ranks over which the tokens of a microbatch are sharded: `ps.sp`.

    Returns:
        The microbatches with "weights" (fp64) that sum to 1 in each that has a token in the loss.

    Effects:
        Communicates: one all-reduce on `axis` for each.

    Examples:
        >>> from trainkit.types import SOLO
        >>> batch = {"labels": torch.tensor([[4, -100, 5]])}
        >>> weight_by_microbatch([batch], axis=SOLO)[0]["weights"]
        tensor([[0.5000, 0.0000, 0.5000]], dtype=torch.float64)
    """
    # All tokens of a microbatch are in unit 0.
    labels = [read_field("weight_by_microbatch", batch, "labels") for batch in microbatches]
    return [
        _weight_by_unit(batch, x, torch.zeros_like(x), 1, axis=axis)
        for batch, x in zip(microbatches, labels, strict=True)
    ]


def weight_by_document(
    microbatches: Sequence[Mapping[str, Any]], *, axis: Axis
) -> list[Mapping[str, Any]]:
    """Weight tokens so that the loss is the mean of the means of documents.

    The sum over answers of the mean over their tokens is the loss of GRPO (Shao et al. 2024). As a
    denominator, `batch.count_documents` counts empty answers too, `batch.count_weights` does not.

    Args:
        microbatches: Mappings with "labels" and "document_ids".
        axis: The ranks over which the tokens of a document are sharded: `ps.sp`.

    Returns:
        The microbatches with "weights" (fp64) that sum to 1 in each document with a token in the
        loss.

    Effects:
        Communicates: one all-reduce on `axis` for each.

    Examples:
        >>> from trainkit.types import SOLO
        >>> labels, ids = torch.tensor([[4, 5, 6, -100]]), torch.tensor([[0, 0, 1, 1]])
        >>> weight_by_document([{"labels": labels, "document_ids": ids}], axis=SOLO)[0]["weights"]
        tensor([[0.5000, 0.5000, 1.0000, 0.0000]], dtype=torch.float64)
    """
    weighted = []
    for batch in microbatches:
        labels = read_field("weight_by_document", batch, "labels")
        ids = read_field("weight_by_document", batch, "document_ids")
        # A row cannot have more documents than tokens, over all ranks of the axis.
        max_documents = ids.shape[1] * axis.count
        rows = torch.arange(len(ids), device=ids.device).unsqueeze(1)
        # Padding, below 0, joins a document with a weight of 0.
        units = rows * max_documents + ids.clamp(min=0)
        weighted.append(_weight_by_unit(batch, labels, units, len(ids) * max_documents, axis=axis))
    return weighted


def _weight_by_unit(
    batch: Mapping[str, Any],
    labels: Tensor,
    units: Tensor,
    count: int,
    *,
    axis: Axis,
) -> Any:
    """Divide the weight of each token by the sum over its unit, an index below `count`."""
    weights = (labels != IGNORED_LABEL).double()
    if "weights" in batch:
        weights = torch.where(weights > 0, batch["weights"].double(), 0)
    units = units.flatten()
    # fp64, so that the order of the additions hardly matters.
    sums = weights.new_zeros(count).scatter_add(0, units, weights.flatten())
    unit_weights = all_sum(sums, axis)[units].view(weights.shape)
    # A unit without weight has the mean 0, not 0 / 0.
    normalized = torch.where(unit_weights == 0, 0, weights / unit_weights)
    return add_column(batch, "weights", normalized)


def add_column(batch: Mapping[str, Any], name: str, column: Tensor) -> Mapping[str, Any]:
    """Return a batch, or a mapping, with one more tensor.

    Examples:
        >>> add_column({"labels": torch.tensor([[1]])}, "kl", torch.tensor([[0.5]]))
        {'labels': tensor([[1]]), 'kl': tensor([[0.5000]])}
    """
    if isinstance(batch, Batch):
        return attrs.evolve(batch, extra={**batch.extra, name: column})
    return {**batch, name: column}
