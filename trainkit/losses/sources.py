"""Report the loss of each corpus of a mixture."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from trainkit.losses.logits import read_field
from trainkit.losses.terms import declare_terms, next_token

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from trainkit.losses.terms import NamedLoss, Terms


def report_by_source(names: Sequence[str], loss: NamedLoss = next_token) -> NamedLoss:
    """Return a loss that also reports the loss of each corpus.

    For each name there are two more terms: `loss/{name}`, the sum over the tokens of that corpus,
    and `loss/{name}/count`, their number, or their weights if the loss is weighted. The ratio of
    both, after summation over microbatches and ranks, is the mean per token; it is 0 / 0 for a step
    without such tokens. Nothing is computed twice, without a host sync.

    Args:
        names: The names of the sources, in the order of their indices in `batch["source"]` (int64
            `[B, S]`). Tokens of other sources are in the total loss only.
        loss: `next_token`, `next_token_linear`, `weighted_next_token`, or any loss with a
            `per_token`.

    Raises:
        ValueError: There is no name, a name is repeated or ends in "count", or the loss has no
            `per_token`; later, a batch has no "source".

    Examples:
        >>> loss = report_by_source(["web", "code"])
        >>> loss.terms
        ('loss', 'loss/web', 'loss/web/count', 'loss/code', 'loss/code/count')
        >>> batch = {"labels": torch.tensor([[1, 2, -100]]), "source": torch.tensor([[0, 1, 1]])}
        >>> total, terms = loss(torch.zeros(1, 3, 4), batch)
        >>> float(terms["loss/web"]), int(terms["loss/code/count"])  # log 4
        (1.38..., 1)
    """
    per_token = getattr(loss, "per_token", None)
    first, *rest = loss.terms
    # Only a single loss, with or without its own count, can be split by source.
    if per_token is None or rest not in ([], [f"{first}/count"]):
        raise ValueError(
            f"report_by_source: {getattr(loss, '__name__', loss)} does not give the loss of each "
            "token; use next_token or next_token_linear, or declare_terms(name, per_token=...), "
            "and add other terms outside: add_terms((report_by_source(...), 1.0), ...)"
        )
    has_repeated = len(set(names)) < len(names)
    if isinstance(names, str) or not names or has_repeated:
        raise ValueError(
            f"report_by_source: names must be different names, at least one, got {names!r}"
        )
    counts = [source for source in names if source.split("/")[-1] == "count"]
    if counts:  # loss/count is the denominator of loss
        raise ValueError(
            f"report_by_source: {counts} must not be called count, which ends denominators"
        )
    source_terms = tuple(f"{first}/{source}{end}" for source in names for end in ("", "/count"))

    @declare_terms(*loss.terms, *source_terms)
    def loss_by_source(output: Any, batch: Mapping[str, Any]) -> Terms:
        if "source" not in batch:
            raise ValueError(
                'report_by_source: the batch has no "source"; make_step_batch and '
                "make_eval_batches add it where PackedCorpus has num_rows"
            )
        labels = read_field("report_by_source", batch, "labels")
        if batch["source"].shape != labels.shape:
            raise ValueError(
                f"report_by_source: source must have the shape of labels {tuple(labels.shape)}, "
                f"one for each token, got {tuple(batch['source'].shape)}"
            )
        total, losses, counts = per_token(output, batch)
        source_sums = _sum_by_source(losses, batch["source"], len(names))
        source_counts = _sum_by_source(counts, batch["source"], len(names))
        # In the order of `source_terms`: sum, count, sum, count.
        values = [x for pair in zip(source_sums, source_counts, strict=True) for x in pair]
        # A loss without a count of its own has one term, and drops the second value.
        terms = dict(zip(loss.terms, (total.detach(), counts.sum()), strict=False))
        return total, {**terms, **dict(zip(source_terms, values, strict=True))}

    return loss_by_source


def _sum_by_source(parts: Tensor, source: Tensor, count: int) -> tuple[Tensor, ...]:
    """Return the sum of parts of each source, in a deterministic order."""
    index = torch.arange(count, device=source.device).view(-1, 1)
    mask = source.flatten() == index  # [count, N]; index_add_ adds in any order on CUDA
    return torch.where(mask, parts.flatten(), 0).sum(-1).unbind()
