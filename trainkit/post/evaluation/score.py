"""Log-probabilities of tokens, of a model in any layout, many examples in a row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor, nn

from trainkit.batch import collate_bins, to_device
from trainkit.batch.shards import shard_sequence
from trainkit.collectives import all_max, all_sum
from trainkit.data.corpus import make_corpus
from trainkit.losses import cross_entropy_per_token
from trainkit.losses.linear import cast_factors, linear_in_chunks
from trainkit.losses.softmax import make_vocabulary_axis, scores_
from trainkit.packing import pack_bins
from trainkit.packing.pieces import align
from trainkit.parallel.stage_forward import compute_device, evaluating, forward_stages
from trainkit.parallel.stage_ranks import as_stages, places_of
from trainkit.post.evaluation.examples import Example
from trainkit.post.objectives.teachers import likeliest, log_softmax_
from trainkit.types import (
    IGNORED_LABEL,
    SOLO,
    Axis,
    Bins,
    Call,
    DataShard,
    Hidden,
    IntArray,
    NumericsError,
    Stages,
    VocabularyAxis,
    check_range,
    drop_routing,
)


@attrs.frozen(eq=False)
class ExampleScores:
    """What the counting tokens of an example score.

    Attributes:
        logprobs: The log-probability of each, in nats, float64 `[scored]`.
        greedy: Whether each of them is the likeliest token in its place.
    """

    logprobs: np.ndarray[tuple[int], np.dtype[np.float64]]
    greedy: bool

    @property
    def logprob(self) -> float:
        """The log-probability of all of them together."""
        return float(self.logprobs.sum())


Scorer = Callable[[Sequence[Example]], list[ExampleScores]]
"""`Scorer(examples) -> what each scores`, in their order, on every rank."""

TopWords = Callable[[Sequence[Example]], list[tuple[np.ndarray[Any, Any], ...]]]
"""`TopWords(examples) -> (ids, logprobs) of each`, `[scored, k]`, in their order, on every rank."""


def make_scorer(
    stages_or_model: Stages | nn.Module,
    *,
    axis: Axis = SOLO,
    call: Call | None = None,
    tokens_per_batch: int = 8192,
) -> Scorer:
    """Return the function that scores examples with a model in its layout.

    Examples are packed into rows as long as the longest of them, as documents that do not see each
    other; ranks that read different rows share these, and what each rank finds is summed. A number
    depends on what stands beside it by rounding alone. Of a `Hidden`, logits exist for some tokens
    at a time, and under tensor parallelism each rank makes those of its own words.

    Args:
        stages_or_model: This rank's stages, or any module.
        axis: For a plain module, the ranks that share the rows. A `Stages` has its own axes.
        call: How a batch enters the model, in place of the stages' own call, or of `call_model`.
        tokens_per_batch: How many tokens a rank computes at a time, or one row if that is longer.

    Returns:
        `score(examples) -> [ExampleScores]`; equal on all ranks, all of which must call it with the
        same examples. It raises NumericsError where a log-probability is not finite, and ValueError
        where an example has less than one token to be scored, or no token before them.

    Effects:
        None here. The returned function puts the stages into evaluation mode and back, communicates
        on all axes that they are spread over, and waits for the device.

    Examples:
        >>> from trainkit.models.decoder import build_decoder
        >>> from trainkit.models.decoder_sizes import make_decoder_config
        >>> score = make_scorer(build_decoder(make_decoder_config("tiny"), seed=0))
        >>> one, two = score([Example(np.array([5, 6, 7]), 1), Example(np.array([5, 6, 7]), 2)])
        >>> bool(abs(one.logprob - two.logprobs[1]) < 1e-5), len(two.logprobs)
        (True, 2)
    """
    stages = as_stages(stages_or_model, "make_scorer", axis=axis, call=call)
    values_of = _bind(stages, token_scores, 2, tokens_per_batch=tokens_per_batch)

    def score(examples: Sequence[Example]) -> list[ExampleScores]:
        return [_scored(x, number) for number, x in enumerate(values_of(examples))]

    return score


def make_top_k_scorer(
    stages_or_model: Stages | nn.Module,
    top_k: int,
    *,
    temperature: float = 1.0,
    axis: Axis = SOLO,
    call: Call | None = None,
    tokens_per_batch: int = 8192,
) -> TopWords:
    """Return the function that finds a model's likeliest words, as `make_scorer` does a score.

    Args:
        stages_or_model: As in `make_scorer`.
        top_k: How many words are kept for each token.
        temperature: What logits are divided by first.
        axis: As in `make_scorer`.
        call: How a batch enters the model.
        tokens_per_batch: How many tokens a rank computes at a time.

    Returns:
        `top_words(examples) -> [(ids, logprobs)]`, of the words that might have stood where each
        counting token does: int64 and float64 `[scored, top_k]`, likeliest first.

    Raises:
        ValueError: `top_k` is below 1, or `temperature` is not above 0; later, there are not so
            many words.

    Effects:
        As `make_scorer`.

    Examples:
        >>> from trainkit.models.decoder import build_decoder
        >>> from trainkit.models.decoder_sizes import make_decoder_config
        >>> model = build_decoder(make_decoder_config("tiny"), seed=0)
        >>> [(ids, logprobs)] = make_top_k_scorer(model, 3)([Example(np.array([5, 6, 7]), 2)])
        >>> ids.shape, bool((logprobs[:, 0] > logprobs[:, 2]).all())
        ((2, 3), True)
    """
    check_range("make_top_k_scorer", at_least=1, top_k=top_k)
    if temperature <= 0:
        raise ValueError(f"make_top_k_scorer: temperature must be above 0, got {temperature}")
    stages = as_stages(stages_or_model, "make_top_k_scorer", axis=axis, call=call)
    measure = partial(_top_words, top_k=top_k, temperature=temperature)
    values_of = _bind(stages, measure, 2 * top_k, tokens_per_batch=tokens_per_batch)

    def top_words(examples: Sequence[Example]) -> list[tuple[np.ndarray[Any, Any], ...]]:
        found = list[tuple[np.ndarray[Any, Any], ...]]()
        for number, values in enumerate(values_of(examples)):
            ids, logprobs = values[:top_k].T.astype(np.int64), values[top_k:].T.copy()
            _check_finite(logprobs, number)
            found.append((ids, logprobs))
        return found

    return top_words


def _bind(
    stages: Stages,
    measure: Callable[[Any, Tensor], Sequence[Tensor]],
    width: int,
    *,
    tokens_per_batch: int,
) -> Callable[[Sequence[Example]], list[np.ndarray[Any, Any]]]:
    """Return what gives `width` numbers of each counting token, `[width, scored]` of an example."""
    check_range("make_scorer", at_least=1, tokens_per_batch=tokens_per_batch)
    place = stages.place
    multiple = 2 * place.ring.count if place.ring.count > 1 else 1
    length_multiple = multiple * place.ulysses.count * stages.tp.count

    def values_of(examples: Sequence[Example]) -> list[np.ndarray[Any, Any]]:
        if not examples:
            return []
        _check(examples)
        lengths = np.array([len(example.ids) - 1 for example in examples])
        longest = int(align(lengths, multiple).max())
        capacity = -(-longest // length_multiple) * length_multiple
        bins = pack_bins(lengths, capacity, multiple_of=multiple, overlong="error", group_size=0)
        ends = _begins(bins) + lengths
        counting = [slice(end - x.scored, end) for end, x in zip(ends, examples, strict=True)]
        labels = np.full(len(bins) * capacity + 1, IGNORED_LABEL)  # the last one is nowhere: -1
        for example, own in zip(examples, counting, strict=True):
            labels[own] = example.ids[-example.scored :]
        rows = _dealt(len(bins), place, rows=max(1, tokens_per_batch // capacity))
        found = _run(
            stages,
            examples,
            bins,
            torch.from_numpy(labels),
            rows,
            measure=measure,
            width=width,
        )
        table = all_sum(all_sum(found, stages.loss), stages.pp).cpu().numpy()
        return [table[:, own] for own in counting]

    return values_of


def _run(
    stages: Stages,
    examples: Sequence[Example],
    bins: Bins,
    labels: Tensor,
    rows: np.ndarray[Any, Any],
    *,
    measure: Callable[[Any, Tensor], Sequence[Tensor]],
    width: int,
) -> Tensor:
    """Return what is measured of the tokens of this rank `[width, rows x S]`, else 0."""
    device, last = compute_device(stages[0]), places_of(stages, stages.pp)[-1].last
    table = torch.zeros(width, len(labels) - 1, dtype=torch.float64, device=device)
    inputs = make_corpus(example.ids[:-1] for example in examples)
    with evaluating(stages):
        for chosen in rows:
            batch = collate_bins(inputs, bins, chosen, row_positions=chosen)
            batch = attrs.evolve(batch, labels=labels[batch.token_index])
            part = shard_sequence(batch, ring=stages.ring.share, ulysses=stages.ulysses.share)
            part = to_device(part, device)
            output = forward_stages(stages, part)
            if last:
                kept = part.labels != IGNORED_LABEL
                found = [x[kept].double() for x in measure(output, part.labels)]
                table[:, part.token_index[kept]] = torch.stack(found)
    return table


def _begins(bins: Bins) -> IntArray:
    """Return where each document begins in the flattened rows; each is one piece."""
    sizes = align(bins.lengths, bins.multiple_of)
    ends = np.cumsum(sizes)
    row_of = np.repeat(np.arange(len(bins)), np.diff(bins.offsets))
    before = np.append(0, ends)[bins.offsets[:-1]][row_of]
    begins = np.empty(len(bins.documents), np.int64)
    begins[bins.documents] = row_of * bins.capacity + ends - sizes - before
    return begins


def _dealt(num_rows: int, place: DataShard, *, rows: int) -> np.ndarray[Any, Any]:
    """Return this rank's rows, batch after batch `[batches, rows]`; -1 is a blank one.

    All ranks have the same number of batches.
    """
    ranks = place.rows.count
    rows = min(rows, -(-num_rows // ranks))
    order = np.arange(-(-num_rows // (rows * ranks)) * rows * ranks)
    order[num_rows:] = -1
    return order.reshape(-1, ranks, rows)[:, place.rows.index]


def _scored(values: np.ndarray[Any, Any], number: int) -> ExampleScores:
    _check_finite(values[0], number)
    return ExampleScores(values[0].copy(), bool(values[1].all()))


def _check_finite(logprobs: np.ndarray[Any, Any], number: int) -> None:
    if not np.isfinite(logprobs).all():
        wrong = logprobs[~np.isfinite(logprobs)][0]
        what = f"score: a token of example {number} has the log-probability {wrong}"
        raise NumericsError(what, got=float(wrong), hint="look at the model's weights")


def _check(examples: Sequence[Example]) -> None:
    for number, example in enumerate(examples):
        if not 1 <= example.scored < len(example.ids):
            has = f"{len(example.ids)} tokens of which {example.scored} count"
            raise ValueError(
                f"score: example {number} has {has}; at least one counts and one does not"
            )


# ------------------------------------------------------------------------------------------ tokens


def token_scores(output: Any, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log-probability of each label, and whether it is the likeliest word.

    Args:
        output: Logits `[..., V]`, or a `Hidden`, whose logits are then made for some tokens at a
            time, of this rank's words alone.
        labels: int64 `[...]`; what stands where it is -100 means nothing.

    Returns:
        fp32 or fp64 `[...]` and bool `[...]`, detached and equal on all ranks of the vocabulary. Of
        equal logits the first word counts as the likeliest, as for `argmax`.

    Raises:
        ValueError: As `losses.cross_entropy_per_token` and `linear_cross_entropy`.

    Examples:
        >>> hidden, weight = torch.ones(1, 2, 1), torch.tensor([[0.0], [1.0], [1.0]])
        >>> labels = torch.tensor([[1, 2]])
        >>> token_scores(Hidden(hidden, weight), labels)
        (tensor([[-0.8620, -0.8620]]), tensor([[ True, False]]))
        >>> token_scores(hidden @ weight.T, labels)
        (tensor([[-0.8620, -0.8620]]), tensor([[ True, False]]))
    """
    output = drop_routing(output)
    if isinstance(output, Tensor):
        logits = output.detach()
        return -cross_entropy_per_token(logits, labels), logits.argmax(-1) == labels
    hidden, weight, axis, softcap = Hidden(*output)
    axis = make_vocabulary_axis(weight, axis)
    factors = cast_factors("token_scores", hidden, weight, labels, softcap=softcap, axis=axis)
    flat = labels.flatten()

    def compute(logits: Tensor, rows: slice, _: bool) -> Tensor:
        is_best = _likeliest(logits, axis) == flat[rows]
        losses = scores_(logits, flat[rows], axis).losses
        return torch.stack([losses, losses, is_best.to(losses.dtype)], dim=-1)

    with torch.no_grad():
        _, values = linear_in_chunks(factors, compute, axis=axis)
    losses, is_best = values.unbind(-1)
    return -losses.view(labels.shape), is_best.view(labels.shape).bool()


def _top_words(output: Any, labels: Tensor, *, top_k: int, temperature: float) -> list[Tensor]:
    """Return the likeliest words of each token and their log-probabilities, 2 k times `[...]`.

    The ids are floating: exact below 2^24 words in fp32.
    """
    output = drop_routing(output)
    if isinstance(output, Tensor):
        _check_top_k(top_k, output.shape[-1])
        flat = (output.detach().flatten(0, -2).float() / temperature).log_softmax(-1)
        found = torch.cat([x.float() for x in likeliest(flat, top_k, SOLO)], dim=-1)
    else:
        hidden, weight, axis, softcap = Hidden(*output)
        axis = make_vocabulary_axis(weight, axis)
        _check_top_k(top_k, axis.total)
        factors = cast_factors("top_words", hidden, weight, labels, softcap=softcap, axis=axis)

        def compute(logits: Tensor, _rows: slice, _gradient: bool) -> Tensor:
            ids, logprobs = likeliest(log_softmax_(logits.div_(temperature), axis), top_k, axis)
            return torch.cat([logprobs[:, :1], ids.to(logprobs.dtype), logprobs], dim=-1)

        with torch.no_grad():
            _, found = linear_in_chunks(factors, compute, axis=axis)
    return [x.view(labels.shape) for x in found.unbind(-1)]


def _check_top_k(top_k: int, words: int) -> None:
    if top_k > words:
        raise ValueError(f"make_top_k_scorer: top_k is {top_k}, and the model has {words} words")


def _likeliest(logits: Tensor, axis: VocabularyAxis) -> Tensor:
    """Return the first of the likeliest words of each token `[T]`, of logits `[T, V_r]`."""
    if not logits.shape[-1]:
        first = torch.full(logits.shape[:1], axis.total, device=logits.device)
        all_max(logits.new_full(logits.shape[:1], -torch.inf), axis)
        return -all_max(-first, axis)
    largest, index = logits.max(-1)
    is_largest = largest == all_max(largest, axis)
    first = torch.where(is_largest, index + axis.first, axis.total)
    return -all_max(-first, axis)
