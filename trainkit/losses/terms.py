"""Losses for a training step: functions of an output and a batch, with named terms.

A `Loss` returns the sum to differentiate and a dict of detached sums to report. Its attribute
`terms` names them in advance, because pipeline stages that compute no loss must still join the
all-reduce of the sums. A term with its own denominator reports two sums, `name` and `name/count`.

Two more attributes are optional. `per_token` is a function that returns the loss of each token.
`of_scores` are functions of a token's cross entropy, log-sum-exp and entropy, and of the columns of
the batch, from which several losses are computed in one pass; `make_score_loss` makes such losses.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from trainkit.batch.denominators import get_divisor, make_divisors
from trainkit.losses.linear import (
    Factors,
    LabelColumns,
    OfScores,
    TokenScores,
    cast_factors,
    linear_in_chunks,
    linear_sum,
    linear_sum_and_parts,
    linear_terms,
    select_columns,
    squared_normalizer,
    token_loss,
    weigh_terms,
)
from trainkit.losses.logits import (
    check_labels,
    cross_entropy_per_token,
    read_field,
    sum_and_parts,
    sum_cross_entropy,
    z_loss,
)
from trainkit.losses.logprobs import compute_logprobs
from trainkit.losses.shaping import UNSHAPED, Shaping, apply_shaping
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

NamedTerms = tuple[Tensor | Mapping[str, Tensor], dict[str, Tensor]]
"""The same, or a sum to differentiate for each denominator, by the name of its term."""

PerToken = Callable[[Any, Mapping[str, Any]], tuple[Tensor, Tensor, Tensor]]
"""`PerToken(output, batch) -> (sum, losses, counts)`: the sum to differentiate, the detached loss
of each token `[B, S]`, and its addend of the denominator `[B, S]`."""


ShapingOf = Callable[[Mapping[str, Any]], Shaping]
"""`ShapingOf(batch) -> Shaping`, for tokens that were sampled with different settings."""


class NamedLoss(Protocol):
    """A `Loss` with the names of its terms, and with other forms for combined losses."""

    terms: tuple[str, ...]
    per_token: PerToken | None
    of_scores: tuple[tuple[OfScores, float], ...]

    def __call__(self, output: Any, batch: Mapping[str, Any], /) -> NamedTerms:
        """Return the sum to differentiate, or several by name, and the terms."""
        ...


def declare_terms(
    *terms: str,
    per_token: PerToken | None = None,
    of_scores: Sequence[tuple[OfScores, float]] = (),
) -> Callable[[Callable[[Any, Mapping[str, Any]], NamedTerms]], NamedLoss]:
    """Return a decorator that sets the names of the terms of a `Loss`.

    Args:
        terms: The keys of the dict that the function returns.
        per_token: The same loss for each token, for `report_by_source`.
        of_scores: For each term, a function of the scores of tokens and the columns of the batch,
            and its weight in the sum. `add_terms` computes all such terms of a `Hidden` in one
            pass.

    Examples:
        >>> import torch
        >>> @declare_terms("squares")
        ... def squares(output, batch):
        ...     total = (output - batch["targets"]).square().sum()
        ...     return total, {"squares": total.detach()}
        >>> squares.terms
        ('squares',)
    """

    def decorate(function: Callable[[Any, Mapping[str, Any]], NamedTerms]) -> NamedLoss:
        # Attributes of the function itself, which stays a plain `Loss`.
        loss = cast("NamedLoss", function)
        loss.terms = terms
        loss.per_token = per_token
        loss.of_scores = tuple(of_scores)
        return loss

    return decorate


def read_output(
    where: str, output: Any, batch: Mapping[str, Any]
) -> tuple[Factors, Tensor, VocabularyAxis]:
    """Return the factors, the labels and the vocabulary axis of a `Hidden` or a plain pair.

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
        raise ValueError(  # noqa: TRY004 (as for all bad arguments)
            f'{where}: a Hidden or a pair (hidden, weight), as of a decoder with head="hidden", '
            f"was expected, got a {type(output).__name__}; for logits use next_token"
        )
    # A plain pair takes the defaults of Hidden: no axis, no soft cap.
    hidden, weight, axis, softcap = Hidden(*output)
    labels = read_field(where, batch, "labels")
    axis = make_vocabulary_axis(weight, axis)
    factors = cast_factors(where, hidden, weight, labels, softcap=softcap, axis=axis)
    return factors, labels, axis


def _read_logits(logits: Any, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    logits = drop_routing(logits)
    if not isinstance(logits, Tensor):
        raise ValueError(  # noqa: TRY004 (as for all bad arguments)
            f"next_token: logits are needed, got a {type(logits).__name__}; use next_token_linear "
            "for a Hidden, and for other records a call that returns logits"
        )
    return logits, read_field("next_token", batch, "labels")


def _compute_per_token(logits: Any, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    logits, labels = _read_logits(logits, batch)
    total, losses = sum_and_parts("next_token", logits, labels, SOLO)
    # Each label adds 1 to the denominator.
    return total, losses, (labels != IGNORED_LABEL).long()


def _compute_per_token_linear(
    output: Any, batch: Mapping[str, Any]
) -> tuple[Tensor, Tensor, Tensor]:
    factors, labels, axis = read_output("next_token_linear", output, batch)
    parts = linear_sum_and_parts(factors, labels, axis=axis)
    return *parts, (labels != IGNORED_LABEL).long()


@declare_terms("loss", per_token=_compute_per_token)
def next_token(logits: Tensor, batch: Mapping[str, Any]) -> Terms:
    """Return the summed cross entropy of a batch, for a model that returns logits `[B, S, V]`.

    Examples:
        >>> import torch
        >>> total, terms = next_token(torch.zeros(1, 2, 4), {"labels": torch.tensor([[1, -100]])})
        >>> float(terms["loss"])  # log 4
        1.38...
    """
    total = sum_cross_entropy("next_token", *_read_logits(logits, batch))
    return total, {"loss": total.detach()}


@declare_terms("loss", per_token=_compute_per_token_linear, of_scores=[(token_loss, 1.0)])
def next_token_linear(output: tuple[Any, ...], batch: Mapping[str, Any]) -> Terms:
    """Return the same as `next_token`, for a `Hidden`, without materializing all logits.

    A pair of hidden states `[B, S, D]` and a full output weight `[V, D]` works as well.

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
    """Return a loss that sums functions of each token's scores, for logits or for a `Hidden`.

    It can have its own denominator: `name/count` is a term of weight 0. For a `Hidden`, all terms
    and their gradient are computed in one pass over the logits, which exist for some tokens at a
    time.

    Args:
        terms: By name, a function of tokens and its weight in the differentiated sum; with weight 0
            the term is only reported. The functions get the `TokenScores` of T tokens and the
            columns of the batch, `[T, *]` each, and return `[T]`. Ignored tokens add 0, and their
            values in columns are read as 0.
        shaping: The sampling settings applied to the logits, or a function of the batch that
            returns them.

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
    names = tuple(terms)
    of_scores = tuple(terms.values())
    # A Shaping is a tuple, not callable; anything else is a function of the batch.
    fixed_shaping = shaping if isinstance(shaping, Shaping) else None

    def compute(output: Any, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        batch_shaping = fixed_shaping or cast("ShapingOf", shaping)(batch)
        return _compute_terms(" and ".join(names), output, batch, of_scores, batch_shaping)

    def per_token(output: Any, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
        total, values = compute(output, batch)
        labels = batch["labels"]
        # One column for each term: the loss, and perhaps its count.
        columns = values.view(*labels.shape, -1).unbind(-1)
        counts = columns[1] if len(columns) > 1 else (labels != IGNORED_LABEL).long()
        return total, columns[0], counts

    # A loss of one term, with or without its count, can be split by source.
    is_single = names in {names[:1], (names[0], f"{names[0]}/count")}

    @declare_terms(
        *names,
        per_token=per_token if is_single else None,
        # One pass of several losses has one shaping: that of none.
        of_scores=of_scores if shaping is UNSHAPED else (),
    )
    def loss(output: Any, batch: Mapping[str, Any]) -> Terms:
        total, values = compute(output, batch)
        return total, dict(zip(names, values.sum(0).unbind(), strict=True))

    return loss


def _compute_terms(
    where: str,
    output: Any,
    batch: Mapping[str, Any],
    terms: Sequence[tuple[OfScores, float]],
    shaping: Shaping = UNSHAPED,
) -> tuple[Tensor, Tensor]:
    """Return the weighted sum of terms, and the detached terms of each token, `[T, K]`."""
    output = drop_routing(output)
    if isinstance(output, tuple):
        factors, labels, axis = read_output(where, output, batch)
        return linear_terms(factors, labels, terms, batch=batch, shaping=shaping, axis=axis)
    # From logits that exist anyway: the same scores, differentiated by autograd.
    labels = read_field(where, batch, "labels")
    check_labels(where, output, labels, words=output.shape[-1])
    flat = labels.flatten()
    rows = output.to(accumulation_dtype(output)).flatten(0, -2)
    rows = apply_shaping(rows, shaping.flat(where, labels))
    logprobs = rows.log_softmax(-1)
    # Clamped, as -100 is no index of a word; ignored tokens become 0 below.
    index = flat.clamp(min=0).unsqueeze(-1)
    losses = -logprobs.gather(-1, index).squeeze(-1)

    def entropies() -> Tensor:
        # 0 * -inf is NaN.
        finite_logprobs = logprobs.masked_fill(logprobs == -torch.inf, 0)
        return -(logprobs.exp() * finite_logprobs).sum(-1)

    # A label that the sampler excludes has no gradient, as in `linear_terms`.
    losses = torch.where(losses == torch.inf, losses.detach(), losses)
    losses = losses.masked_fill(flat == IGNORED_LABEL, 0)
    scores = TokenScores(losses, rows.logsumexp(-1), entropies)
    total, values = weigh_terms(terms, scores, select_columns(batch, labels), flat)
    return total.sum(), torch.stack(values, dim=-1).detach()


def output_logprobs(
    where: str, output: Any, batch: Mapping[str, Any]
) -> tuple[Tensor, LabelColumns]:
    """Return the log-probability of each label `[B, S]`, differentiable, and the batch's columns.

    The output is logits or a `Hidden`. Columns are `[T, *]`. A log-probability is 0 where the label
    is -100.

    Examples:
        >>> batch = {"labels": torch.tensor([[1, -100]])}
        >>> output_logprobs("mine", torch.zeros(1, 2, 4), batch)[0]
        tensor([[-1.3863, -0.0000]])
    """
    output = drop_routing(output)
    if isinstance(output, tuple):
        factors, labels, axis = read_output(where, output, batch)
        logprobs = compute_logprobs(factors, labels, axis=axis)
    else:
        labels = read_field(where, batch, "labels")
        logprobs = -cross_entropy_per_token(output, labels)
    return logprobs, LabelColumns(select_columns(batch, labels))


# The count has weight 0: it is reported as a denominator, and not part of the gradient.
_WEIGHTED = make_score_loss(
    {
        "loss": (
            lambda scores, columns: columns["weights"].to(scores.losses.dtype) * scores.losses,
            1.0,
        ),
        "loss/count": (lambda _, columns: columns["weights"], 0.0),
    }
)


@declare_terms(*_WEIGHTED.terms, per_token=_WEIGHTED.per_token, of_scores=_WEIGHTED.of_scores)
def weighted_next_token(output: Any, batch: Mapping[str, Any]) -> NamedTerms:
    """Return the cross entropy weighted by `batch["weights"]`, for logits or for a `Hidden`.

    Weights are floating, one for each label. The denominator is their sum over the global batch,
    `batch.count_weights`, which the loss also reports as "loss/count". So weights of 0.1 each give
    the same loss as weights of 1.

    Examples:
        >>> batch = {"labels": torch.tensor([[1, 2]]), "weights": torch.tensor([[0.25, 0.05]])}
        >>> total, terms = weighted_next_token(torch.zeros(1, 2, 4), batch)
        >>> float(terms["loss"] / terms["loss/count"])  # log 4
        1.38...
    """
    return _WEIGHTED(output, batch)


@declare_terms("z_loss", of_scores=[(squared_normalizer, 1.0)])
def z_term(output: Any, batch: Mapping[str, Any]) -> Terms:
    """Return `z_loss` of a batch as a `Loss`, for logits `[B, S, V]` or for a `Hidden`.

    Examples:
        >>> import torch
        >>> total, terms = z_term(torch.zeros(1, 2, 4), {"labels": torch.tensor([[1, -100]])})
        >>> float(terms["z_loss"])  # (log 4)^2
        1.92...
    """
    output = drop_routing(output)
    if isinstance(output, tuple):
        return _compute_in_one_pass(z_term, output, batch)
    total = z_loss(output, read_field("z_term", batch, "labels"))
    return total, {"z_loss": total.detach()}


def _compute_in_one_pass(loss: NamedLoss, output: Any, batch: Mapping[str, Any]) -> Terms:
    """Compute the terms of a loss of scores in one pass over the chunks of a `Hidden`."""
    total, values = _compute_terms(" and ".join(loss.terms), output, batch, loss.of_scores)
    return total, dict(zip(loss.terms, values.sum(0).unbind(), strict=True))


def chunk_loss(loss: NamedLoss, *, chunk: int | None = None) -> NamedLoss:
    """Convert a loss on logits to one on a `Hidden`, called on the logits of some tokens at a time.

    Use it for terms that are not functions of cross entropy, log-sum-exp and entropy:
    `add_terms((next_token_linear, 0.9), (chunk_loss(uniform), 0.1))`. They cost a separate pass.
    Under tensor parallelism the logits of a chunk are gathered.

    Args:
        loss: A sum over tokens, each of which depends on its own logits alone. It is called with
            logits `[1, T, V]` in fp32 (fp64 stays fp64), and with the same tokens of those tensors
            of the batch whose first dimensions are those of the labels.
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
        tokens = select_columns(batch, labels)

        def compute(logits: Tensor, rows: slice, gradient: bool) -> Tensor:
            # A leaf of its own: the loss is differentiated up to the logits, and
            # `linear_in_chunks` goes on.
            full = gather_words(logits, axis).detach().requires_grad_(gradient)
            with torch.set_grad_enabled(gradient):
                # With a dimension of rows in front, as losses have in a batch: [1, T].
                chunk_batch = {name: x[rows][None] for name, x in tokens.items()}
                total, terms = loss(full[None], chunk_batch)
                assert isinstance(total, Tensor)
            if gradient:
                (d_full,) = torch.autograd.grad(total, full)
                # The contract of `OfLogits`: the logits become their gradient.
                logits.copy_(words_of_rank(d_full, axis))
            # [1, 1 + K]: the sum, which is differentiated, and the K reported terms.
            reported = [terms[name] for name in loss.terms]
            return torch.stack([total.detach(), *reported])[None]

        total, values = linear_in_chunks(factors, compute, axis=axis, chunk=chunk)
        return total, dict(zip(loss.terms, values.sum(0).unbind(), strict=True))

    return chunked


def add_terms(*weighted: tuple[NamedLoss, float]) -> NamedLoss:
    """Return the weighted sum of several losses as one loss, which reports every unweighted term.

    The reported terms do not add up to what is optimized: that is the sum of weight times term.

    A loss may return a sum for each of several denominators, `{name: sum}`. Then so does the
    result, with each sum times the loss's weight. The losses that return a single sum share one
    denominator: their total has the name of the first term of the first of them.

    For a `Hidden`, all terms with `of_scores` are computed in one pass over its logits:
    `add_terms((next_token_linear, 1.0), (z_term, 1e-4))` costs the same as `next_token_linear`.

    Args:
        weighted: Pairs of a loss and its weight. All get the same output and batch.

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
    if not weighted:
        raise ValueError("add_terms: at least one (loss, weight) pair is needed, got none")
    for loss, weight in weighted:
        if not hasattr(loss, "terms"):
            raise ValueError(
                f"add_terms: {loss!r} has no `terms`, the names that it reports; decorate it with "
                "declare_terms(...)"
            )
        if not math.isfinite(weight):
            raise ValueError(f"add_terms: the weight of {loss.terms} must be finite, got {weight}")
    # Reported sums are a dictionary, in which a second term of a name would replace the first.
    names = tuple(term for loss, _ in weighted for term in loss.terms)
    repeated = sorted(term for term, count in Counter(names).items() if count > 1)
    if repeated:
        raise ValueError(
            f"add_terms: every term must have its own name, got {repeated} more than once"
        )
    # Weights of losses multiply those of their terms, so that one pass has them all.
    scored = [(loss, weight) for loss, weight in weighted if loss.of_scores]
    others = [(loss, weight) for loss, weight in weighted if not loss.of_scores]
    of_scores = [(term, w * weight) for loss, weight in scored for term, w in loss.of_scores]

    @declare_terms(*(term for loss, _ in scored for term in loss.terms), of_scores=of_scores)
    def scored_loss(output: Any, batch: Mapping[str, Any]) -> Terms:
        return _compute_in_one_pass(scored_loss, output, batch)

    @declare_terms(*names, of_scores=() if others else of_scores)
    def total_loss(output: Any, batch: Mapping[str, Any]) -> NamedTerms:
        output = drop_routing(output)
        in_one_pass = len(scored) > 1 and isinstance(output, tuple)
        # `scored_loss` has the weights in its `of_scores` already.
        pairs = [(scored_loss, 1.0), *others] if in_one_pass else weighted
        results = [(loss(output, batch), weight) for loss, weight in pairs]
        terms = {name: value for (_, reported), _ in results for name, value in reported.items()}
        # In the declared order, whatever was computed in one pass.
        terms = {name: terms[name] for name in names}
        totals = [(total, weight) for (total, _), weight in results]
        by_name = [
            loss
            for (loss, _), (total, _) in zip(pairs, totals, strict=True)
            if isinstance(total, Mapping)
        ]
        # In the order of the arguments, so that the name does not depend on what is in one pass.
        shared = next((loss.terms[0] for loss, _ in weighted if loss not in by_name), "")
        return _weigh_totals(totals, shared=shared), terms

    return total_loss


def _weigh_totals(
    totals: Sequence[tuple[Any, float]], *, shared: str
) -> Tensor | Mapping[str, Tensor]:
    """Return the weighted sum of totals; by name if one is, with single sums under `shared`."""
    single = [weight * total for total, weight in totals if not isinstance(total, Mapping)]
    # sum() would start with the integer 0, an addition more.
    sums = {shared: sum(single[1:], single[0])} if single else {}
    if len(single) == len(totals):
        return sums[shared]
    for total, weight in totals:
        for name, x in total.items() if isinstance(total, Mapping) else ():
            sums[name] = sums[name] + weight * x if name in sums else weight * x
    return sums


def average_terms(sums: Mapping[str, Tensor], tokens: Denominator) -> dict[str, Tensor]:
    """Divide summed terms: `name` by `name/count` if there is one, and otherwise by the tokens.

    Tensors of more than one number are counts, such as the `load` of `losses.add_router_losses`,
    and stay sums.

    Args:
        sums: Values by name, summed over microbatches and ranks.
        tokens: The number of tokens they were summed over, one for all or one for each term; 0
            counts as 1, so that a step without tokens has a loss of 0.

    Returns:
        The means, without the counts. A term whose own count is 0 is NaN.

    Examples:
        >>> import torch
        >>> sums = {"loss": torch.tensor(6.0), "loss/web": torch.tensor(4.0)}
        >>> average_terms(sums | {"loss/web/count": torch.tensor(2)}, torch.tensor(4))
        {'loss': tensor(1.5000), 'loss/web': tensor(2.)}
    """
    divisors = make_divisors(tokens)

    def mean(name: str, total: Tensor) -> Tensor:
        count = sums.get(f"{name}/count")
        # Counts by layer and expert, no sums over tokens.
        if count is None and total.ndim:
            return total
        return total / (get_divisor(name, divisors) if count is None else count)

    names = [name for name in sums if not name.endswith("/count")]
    return {name: mean(name, sums[name]) for name in names}
