"""Losses as a training step sees them: functions of an output and a batch, whose terms have names.

A `Loss` returns the sum to differentiate and a dict of detached sums to report. Its attribute
`terms` names them in advance, for the pipeline stages that see no loss and must still join the
sums. A term with a denominator of its own reports two sums, `name` and `name/count`. A loss that
knows what each token adds has a second function for it in its attribute `per_token`; one that is a
function of a token's cross entropy, log-sum-exp and entropy, and of what stands beside it in the
batch, says so in `of_scores`: `make_score_loss` makes such losses.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from trainkit.batch import get_divisor, make_divisors
from trainkit.losses.linear import (
    Factors,
    LabelColumns,
    OfScores,
    TokenScores,
    cast_factors,
    columns_of,
    linear_in_chunks,
    linear_sum,
    linear_sum_and_parts,
    linear_terms,
    squared_normalizer,
    token_loss,
    weigh_terms,
)
from trainkit.losses.logits import (
    check_labels,
    cross_entropy_per_token,
    read_field,
    sum_and_parts,
    summed_cross_entropy,
    z_loss,
)
from trainkit.losses.logprobs import logprobs_of
from trainkit.losses.shaping import UNSHAPED, Shaping, reshaped
from trainkit.losses.softmax import (
    accumulation_dtype,
    gather_words,
    make_vocabulary_axis,
    words_of_rank,
)
from trainkit.types import (
    IGNORED_LABEL,
    SOLO,
    Denominator,
    Hidden,
    VocabularyAxis,
    check_range,
    drop_routing,
)

Terms = tuple[Tensor, dict[str, Tensor]]
"""The sum to differentiate, and the detached sums to report by name."""

PerToken = Callable[[Any, Mapping[str, Any]], tuple[Tensor, Tensor, Tensor]]
"""From an output and a batch to the sum to differentiate, its detached parts `[B, S]`, and what
each token adds to the denominator, `[B, S]`."""


ShapingOf = Callable[[Mapping[str, Any]], Shaping]
"""From a batch to how its logits are shaped, where its tokens were drawn otherwise each."""


class NamedLoss(Protocol):
    """A `Loss` that says which terms it reports, and may have other forms, for other losses."""

    terms: tuple[str, ...]
    per_token: PerToken | None
    of_scores: tuple[tuple[OfScores, float], ...]

    def __call__(self, output: Any, batch: Mapping[str, Any], /) -> Terms:
        """Return the sum to differentiate, and the terms."""
        ...


def declare_terms(
    *terms: str,
    per_token: PerToken | None = None,
    of_scores: Sequence[tuple[OfScores, float]] = (),
) -> Callable[[Callable[[Any, Mapping[str, Any]], Terms]], NamedLoss]:
    """Return a decorator that makes a function a `Loss` by writing down which terms it reports.

    Args:
        terms: The keys of the dict that the function returns.
        per_token: The same loss with its parts, for `report_by_source`.
        of_scores: For each term what a token adds, as a function of its scores and what stands
            beside it, and the term's weight in the sum: `add_terms` then takes all such terms of a
            `Hidden` from one pass.

    Examples:
        >>> import torch
        >>> @declare_terms("squares")
        ... def squares(output, batch):
        ...     total = (output - batch["targets"]).square().sum()
        ...     return total, {"squares": total.detach()}
        >>> squares.terms
        ('squares',)
    """

    def decorate(function: Callable[[Any, Mapping[str, Any]], Terms]) -> NamedLoss:
        loss = cast("NamedLoss", function)
        loss.terms, loss.per_token, loss.of_scores = terms, per_token, tuple(of_scores)
        return loss

    return decorate


def read_output(
    where: str, output: Any, batch: Mapping[str, Any]
) -> tuple[Factors, Tensor, VocabularyAxis]:
    """Return the factors, the labels and the axis of a `Hidden` or a plain pair.

    Raises:
        ValueError: It is neither, or there are no labels; as `cast_factors`.

    Examples:
        >>> batch = {"labels": torch.tensor([[1, -100]])}
        >>> read_output("mine", torch.zeros(1, 2, 4), batch)
        Traceback (most recent call last):
        ...
        ValueError: mine: a Hidden or a pair (hidden, weight), ... got a Tensor; ...
    """
    output = drop_routing(output)
    if not isinstance(output, tuple):
        must = (
            'a Hidden or a pair (hidden, weight), as of a decoder with head="hidden", was expected'
        )
        what = f"{must}, got a {type(output).__name__}; for logits take next_token"
        raise ValueError(f"{where}: {what}")  # noqa: TRY004 (a bad argument, as all others)
    hidden, weight, axis, softcap = Hidden(*output)
    labels, axis = read_field(where, batch, "labels"), make_vocabulary_axis(weight, axis)
    factors = cast_factors(where, hidden, weight, labels, softcap=softcap, axis=axis)
    return factors, labels, axis


def _logits_and_labels(logits: Any, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    logits = drop_routing(logits)
    if not isinstance(logits, Tensor):
        got = type(logits).__name__
        mend = "take next_token_linear for a Hidden, for other records a call that returns logits"
        raise ValueError(f"next_token: logits are needed, got a {got}; {mend}")  # noqa: TRY004
    return logits, read_field("next_token", batch, "labels")


def _of_logits(logits: Any, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    logits, labels = _logits_and_labels(logits, batch)
    return *sum_and_parts("next_token", logits, labels, SOLO), (labels != IGNORED_LABEL).long()


def _of_hidden(output: Any, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    factors, labels, axis = read_output("next_token_linear", output, batch)
    parts = linear_sum_and_parts(factors, labels, axis=axis)
    return *parts, (labels != IGNORED_LABEL).long()


@declare_terms("loss", per_token=_of_logits)
def next_token(logits: Tensor, batch: Mapping[str, Any]) -> Terms:
    """Return the summed cross entropy of a batch, for a model that returns logits `[B, S, V]`.

    Examples:
        >>> import torch
        >>> total, terms = next_token(torch.zeros(1, 2, 4), {"labels": torch.tensor([[1, -100]])})
        >>> float(terms["loss"])  # log 4
        1.38...
    """
    total = summed_cross_entropy("next_token", *_logits_and_labels(logits, batch))
    return total, {"loss": total.detach()}


@declare_terms("loss", per_token=_of_hidden, of_scores=[(token_loss, 1.0)])
def next_token_linear(output: tuple[Any, ...], batch: Mapping[str, Any]) -> Terms:
    """Return what `next_token` does, of a `Hidden`: the whole logits exist nowhere.

    A plain pair of hidden states `[B, S, D]` and a whole output weight `[V, D]` serves as well.

    Examples:
        >>> import torch
        >>> output = torch.zeros(1, 2, 8), torch.zeros(4, 8)
        >>> total, terms = next_token_linear(output, {"labels": torch.tensor([[1, -100]])})
        >>> float(terms["loss"])  # log 4
        1.38...
    """
    factors, labels, axis = read_output("next_token_linear", output, batch)
    total = linear_sum(factors, labels, axis=axis)
    return total, {"loss": total.detach()}


def make_score_loss(
    terms: Mapping[str, tuple[OfScores, float]],
    *,
    shaping: Shaping | ShapingOf = UNSHAPED,
) -> NamedLoss:
    """Return the loss that adds up functions of each token's scores, of logits or of a `Hidden`.

    It can take a denominator of its own: `name/count` is a term like the others, measured only.
    Of a `Hidden` all terms come out of one pass over the logits, which exist for some tokens at a
    time, and their gradient too.

    Args:
        terms: For each name what a token adds, and how much of it counts in what is differentiated:
            0 only reports it. The functions are called with the `TokenScores` of T tokens, and with
            the columns of the batch, `[T, *]` each, and return `[T]`. Ignored tokens add 0, and
            nothing that stands beside them is seen.
        shaping: How logits are shaped before, as a sampler does, or a function of the batch that
            says so.

    Raises:
        ValueError: A weight is not finite.

    Examples:
        >>> def focal(scores, columns):  # Lin et al. 2017, "Focal loss"
        ...     return (1 - (-scores.losses).exp()) ** columns["gamma"] * scores.losses
        >>> loss = make_score_loss({"focal": (focal, 1.0)})
        >>> batch = {"labels": torch.tensor([[1, -100]]), "gamma": torch.full((1, 2), 2.0)}
        >>> total, terms = loss(torch.zeros(1, 2, 4), batch)
        >>> float(total)  # (3 / 4)^2 log 4
        0.77...
    """
    for name, (_, weight) in terms.items():
        check_range("make_score_loss", **{name: weight})
    names, of_scores = tuple(terms), tuple(terms.values())
    one_for_all = shaping if isinstance(shaping, Shaping) else None

    def values_of(output: Any, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        how = one_for_all or cast("ShapingOf", shaping)(batch)
        return _values(" and ".join(names), output, batch, of_scores, how)

    def per_token(output: Any, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
        total, values = values_of(output, batch)
        labels = batch["labels"]
        own = values.view(*labels.shape, -1).unbind(-1)
        return total, own[0], own[1] if len(own) > 1 else (labels != IGNORED_LABEL).long()

    alone = names in {names[:1], (names[0], f"{names[0]}/count")}
    known = of_scores if shaping is UNSHAPED else ()

    @declare_terms(*names, per_token=per_token if alone else None, of_scores=known)
    def loss(output: Any, batch: Mapping[str, Any]) -> Terms:
        total, values = values_of(output, batch)
        return total, dict(zip(names, values.sum(0).unbind(), strict=True))

    return loss


def _values(
    where: str,
    output: Any,
    batch: Mapping[str, Any],
    terms: Sequence[tuple[OfScores, float]],
    shaping: Shaping = UNSHAPED,
) -> tuple[Tensor, Tensor]:
    """Return the sum of terms of an output, and each token's part of each, `[T, K]`, detached."""
    output = drop_routing(output)
    if isinstance(output, tuple):
        factors, labels, axis = read_output(where, output, batch)
        how: dict[str, Any] = {"beside": batch, "shaping": shaping, "axis": axis}
        return linear_terms(factors, labels, terms, **how)
    labels = read_field(where, batch, "labels")
    check_labels(where, output, labels, words=output.shape[-1])
    flat = labels.flatten()
    rows = output.to(accumulation_dtype(output)).flatten(0, -2)
    rows = reshaped(rows, shaping.flat(where, labels))
    found = rows.log_softmax(-1)
    losses = -found.gather(-1, flat.clamp(min=0).unsqueeze(-1)).squeeze(-1)

    def entropies() -> Tensor:
        return -(found.exp() * found.masked_fill(found == -torch.inf, 0)).sum(-1)

    losses = torch.where(losses == torch.inf, losses.detach(), losses)  # as of a `Hidden`
    losses = losses.masked_fill(flat == IGNORED_LABEL, 0)
    scores = TokenScores(losses, rows.logsumexp(-1), entropies)
    total, values = weigh_terms(terms, scores, columns_of(batch, labels), flat)
    return total.sum(), torch.stack(values, dim=-1).detach()


def output_logprobs(
    where: str, output: Any, batch: Mapping[str, Any]
) -> tuple[Tensor, LabelColumns]:
    """Return the log-probability of each label `[B, S]` of logits or of a `Hidden`, differentiable.

    Beside it stand the batch's columns, `[T, *]`. Where the label is -100 a log-probability is 0.

    Examples:
        >>> batch = {"labels": torch.tensor([[1, -100]])}
        >>> output_logprobs("mine", torch.zeros(1, 2, 4), batch)[0]
        tensor([[-1.3863, -0.0000]])
    """
    output = drop_routing(output)
    if isinstance(output, tuple):
        factors, labels, axis = read_output(where, output, batch)
        logprobs = logprobs_of(factors, labels, axis=axis)
    else:
        labels = read_field(where, batch, "labels")
        logprobs = -cross_entropy_per_token(output, labels)
    return logprobs, LabelColumns(columns_of(batch, labels))


def _weighted_losses(scores: TokenScores, columns: LabelColumns) -> Tensor:
    return columns["weights"].to(scores.losses.dtype) * scores.losses


def _weights(_: TokenScores, columns: LabelColumns) -> Tensor:
    return columns["weights"]


_WEIGHTED = make_score_loss({"loss": (_weighted_losses, 1.0), "loss/count": (_weights, 0.0)})


@declare_terms(*_WEIGHTED.terms, per_token=_WEIGHTED.per_token, of_scores=_WEIGHTED.of_scores)
def weighted_next_token(output: Any, batch: Mapping[str, Any]) -> Terms:
    """Return each token's cross entropy times `batch["weights"]`, of logits or of a `Hidden`.

    Weights are floating, one for each label. The denominator is their sum over the global batch,
    `batch.count_weights`, and stands beside it as "loss/count": weights of 0.1 each give what
    weights of 1 do, and a token with 0.3 counts as 0.3 of one.

    Examples:
        >>> batch = {"labels": torch.tensor([[1, 2]]), "weights": torch.tensor([[0.25, 0.05]])}
        >>> total, terms = weighted_next_token(torch.zeros(1, 2, 4), batch)
        >>> float(terms["loss"] / terms["loss/count"])  # log 4
        1.38...
    """
    return _WEIGHTED(output, batch)


@declare_terms("z_loss", of_scores=[(squared_normalizer, 1.0)])
def z_term(output: Any, batch: Mapping[str, Any]) -> Terms:
    """Return `z_loss` of a batch as a `Loss`, of logits `[B, S, V]` or of a `Hidden`.

    Examples:
        >>> import torch
        >>> total, terms = z_term(torch.zeros(1, 2, 4), {"labels": torch.tensor([[1, -100]])})
        >>> float(terms["z_loss"])  # (log 4)^2
        1.92...
    """
    output = drop_routing(output)
    if isinstance(output, tuple):
        return _in_one_pass(z_term, output, batch)
    total = z_loss(output, read_field("z_term", batch, "labels"))
    return total, {"z_loss": total.detach()}


def _in_one_pass(loss: NamedLoss, output: Any, batch: Mapping[str, Any]) -> Terms:
    """Return the terms of a loss of scores, from one pass over the chunks of a `Hidden`."""
    total, values = _values(" and ".join(loss.terms), output, batch, loss.of_scores)
    return total, dict(zip(loss.terms, values.sum(0).unbind(), strict=True))


def chunk_loss(loss: NamedLoss, *, chunk: int | None = None) -> NamedLoss:
    """Return a loss on logits as one of a `Hidden`: it gets whole logits, some tokens at a time.

    For terms that are no function of cross entropy and log-sum-exp, beside `next_token_linear`:
    `add_terms((next_token_linear, 0.9), (chunk_loss(uniform), 0.1))`. They cost a pass of their
    own. Under tensor parallelism the logits of a chunk are gathered.

    Args:
        loss: A sum over tokens, each of which needs its own logits alone. It is called with logits
            `[1, T, V]` in fp32 (fp64 stays fp64), and with those tensors of the batch that begin
            with the dimensions of the labels, cut alike.
        chunk: T, as in `linear_cross_entropy`.

    Raises:
        ValueError: `chunk` is below 1.

    Examples:
        >>> import torch
        >>> batch = {"labels": torch.tensor([[1, -100]])}
        >>> hidden, weight = torch.ones(1, 2, 8), torch.ones(4, 8)
        >>> one, _ = chunk_loss(z_term, chunk=1)(Hidden(hidden, weight), batch)
        >>> bool(torch.isclose(one, z_term(hidden @ weight.T, batch)[0]))
        True
    """
    check_range("chunk_loss", at_least=1, chunk=chunk)

    @declare_terms(*loss.terms)
    def chunked(output: Any, batch: Mapping[str, Any]) -> Terms:
        factors, labels, axis = read_output(f"chunk_loss of {loss.terms}", output, batch)
        tokens = columns_of(batch, labels)

        def compute(logits: Tensor, rows: slice, gradient: bool) -> Tensor:
            whole = gather_words(logits, axis).detach().requires_grad_(gradient)
            with torch.set_grad_enabled(gradient):
                part = {name: x[rows][None] for name, x in tokens.items()}
                total, terms = loss(whole[None], part)
            if gradient:
                (slopes,) = torch.autograd.grad(total, whole)
                logits.copy_(words_of_rank(slopes, axis))
            return torch.stack([total.detach(), *(terms[name] for name in loss.terms)])[None]

        total, values = linear_in_chunks(factors, compute, axis=axis, chunk=chunk)
        return total, dict(zip(loss.terms, values.sum(0).unbind(), strict=True))

    return chunked


def add_terms(*weighted: tuple[NamedLoss, float]) -> NamedLoss:
    """Return the weighted sum of several losses as one loss, which reports every term, unweighted.

    Of a `Hidden`, all terms of cross entropy and log-sum-exp come out of one pass over its logits:
    `add_terms((next_token_linear, 1.0), (z_term, 1e-4))` costs what `next_token_linear` does.

    Args:
        weighted: Pairs of a loss and its weight. All see the same output and batch.

    Raises:
        ValueError: There is no loss, a loss without `terms`, two terms of one name, or a weight
            that is not finite.

    Examples:
        >>> import torch
        >>> loss = add_terms((next_token, 1.0), (z_term, 1e-4))
        >>> loss.terms
        ('loss', 'z_loss')
        >>> total, terms = loss(torch.zeros(1, 2, 4), {"labels": torch.tensor([[1, -100]])})
        >>> bool(torch.isclose(total, terms["loss"] + 1e-4 * terms["z_loss"]))
        True
    """
    _check(weighted)
    scored = [(loss, weight) for loss, weight in weighted if loss.of_scores]
    others = [(loss, weight) for loss, weight in weighted if not loss.of_scores]
    of_scores = [(of, own * weight) for loss, weight in scored for of, own in loss.of_scores]
    names = tuple(term for loss, _ in weighted for term in loss.terms)

    @declare_terms(*(term for loss, _ in scored for term in loss.terms), of_scores=of_scores)
    def together(output: Any, batch: Mapping[str, Any]) -> Terms:
        return _in_one_pass(together, output, batch)

    @declare_terms(*names, of_scores=() if others else of_scores)
    def total_loss(output: Any, batch: Mapping[str, Any]) -> Terms:
        output = drop_routing(output)
        one_pass = len(scored) > 1 and isinstance(output, tuple)
        pairs = [(together, 1.0), *others] if one_pass else weighted
        parts = [(loss(output, batch), weight) for loss, weight in pairs]
        first, *rest = (weight * total for (total, _), weight in parts)
        terms = {name: value for (_, each), _ in parts for name, value in each.items()}
        return sum(rest, first), {name: terms[name] for name in names}

    return total_loss


def average_terms(sums: Mapping[str, Tensor], tokens: Denominator) -> dict[str, Tensor]:
    """Return the means of summed terms: `name` over `name/count` if there is one, else over tokens.

    What is more than one number counts things of many kinds, such as the `load` of
    `losses.add_router_losses`, and stays a sum.

    Args:
        sums: Values by name, summed over microbatches and ranks.
        tokens: How many tokens they were summed over, or that for each term; 0 counts as 1, so that
            a step without any has a loss of 0.

    Returns:
        The means, without the counts. A term whose own count is 0 is NaN: there was nothing to
        measure.

    Examples:
        >>> import torch
        >>> sums = {"loss": torch.tensor(6.0), "loss/web": torch.tensor(4.0)}
        >>> average_terms(sums | {"loss/web/count": torch.tensor(2)}, torch.tensor(4))
        {'loss': tensor(1.5000), 'loss/web': tensor(2.)}
    """
    divisors = make_divisors(tokens)

    def mean(name: str, total: Tensor) -> Tensor:
        count = sums.get(f"{name}/count")
        if count is None and total.ndim:
            return total
        return total / (get_divisor(name, divisors) if count is None else count)

    named = {name: x for name, x in sums.items() if not name.endswith("/count")}
    return {name: mean(name, total) for name, total in named.items()}


def _check(weighted: tuple[tuple[NamedLoss, float], ...]) -> None:
    if not weighted:
        raise ValueError("add_terms: at least one (loss, weight) pair is needed, got none")
    for loss, weight in weighted:
        if not hasattr(loss, "terms"):
            what = f"{loss!r} does not say which terms it reports"
            raise ValueError(f"add_terms: {what}; decorate it with declare_terms(...)")
        if not math.isfinite(weight):
            raise ValueError(f"add_terms: the weight of {loss.terms} must be finite, got {weight}")
    counts = Counter(term for loss, _ in weighted for term in loss.terms)
    twice = sorted(term for term, count in counts.items() if count > 1)
    if twice:
        must = f"every term must have a name of its own, got {twice} more than once"
        raise ValueError(f"add_terms: {must}")
