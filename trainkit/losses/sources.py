"""The loss of each corpus of a mixture, from the same forward pass."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import torch

from trainkit.losses.logits import read_field
from trainkit.losses.terms import declare_terms, next_token

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from trainkit.losses.terms import NamedLoss, Terms


def report_by_source(names: Sequence[str], loss: NamedLoss = next_token) -> NamedLoss:
    """Return a loss that also reports the loss of each corpus: the same sum, and two sums more.

    For each name there are the terms `loss/{name}`, the sum over the tokens of that corpus, and
    `loss/{name}/count`, how many were trained on, or their weights if the loss is weighted.
    Dividing one by the other, after both have been summed over microbatches and ranks, gives the
    mean per token; 0 / 0 says that a step had none.
    Nothing is computed twice, and no host sync is made.

    Args:
        names: What the sources are called, in the order of their numbers in `batch["source"]`
            (int64 `[B, S]`). Tokens of other numbers are in the loss alone.
        loss: `next_token`, `next_token_linear`, `weighted`, or any that has a `per_token`.

    Raises:
        ValueError: There is no name, one comes twice or ends in "count", or the loss does not know
            its parts; later, a batch has no "source".

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
    if per_token is None or rest not in ([], [f"{first}/count"]):
        what = f"{getattr(loss, '__name__', loss)} does not say what each token adds"
        mend = "take next_token or next_token_linear, or declare_terms(name, per_token=...)"
        others = "add other terms outside: add_terms((report_by_source(...), 1.0), ...)"
        raise ValueError(f"report_by_source: {what}; {mend}, and {others}")
    twice = [name for name, count in Counter(names).items() if count > 1]
    if isinstance(names, str) or not names or twice:
        raise ValueError(
            f"report_by_source: names must be different names, at least one, got {names!r}"
        )
    counts = [source for source in names if source.split("/")[-1] == "count"]
    if counts:  # loss/count would be taken for the denominator of loss
        raise ValueError(
            f"report_by_source: {counts} must not be called count, which ends denominators"
        )
    own = tuple(f"{first}/{source}{end}" for source in names for end in ("", "/count"))

    @declare_terms(*loss.terms, *own)
    def loss_by_source(output: Any, batch: Mapping[str, Any]) -> Terms:
        if "source" not in batch:
            mend = "make_step_batch and make_eval_batches add it where PackedCorpus has num_rows"
            raise ValueError(f'report_by_source: the batch has no "source"; {mend}')
        labels = read_field("report_by_source", batch, "labels")
        want, got = tuple(labels.shape), tuple(batch["source"].shape)
        if got != want:
            must = f"must have the shape of labels {want}, one for each token"
            raise ValueError(f"report_by_source: source {must}, got {got}")
        total, parts, counted = per_token(output, batch)
        sums, counts = (_sums(x, batch["source"], len(names)) for x in (parts, counted))
        values = [value for pair in zip(sums, counts, strict=True) for value in pair]
        whole = dict(zip(loss.terms, (total.detach(), counted.sum()), strict=False))
        return total, {**whole, **dict(zip(own, values, strict=True))}

    return loss_by_source


def _sums(parts: Tensor, source: Tensor, count: int) -> tuple[Tensor, ...]:
    """Return each source's sum of parts, added in the same order every time."""
    numbers = torch.arange(count, device=source.device).view(-1, 1)
    own = source.flatten() == numbers  # [count, N]; index_add_ would add in any order on CUDA
    return torch.where(own, parts.flatten(), 0).sum(-1).unbind()
