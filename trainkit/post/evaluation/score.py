"""Log-probabilities of tokens by a model in any layout, with examples packed into rows."""

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
from trainkit.parallel.stage_forward import compute_device, forward_stages, use_eval_mode
from trainkit.parallel.stage_ranks import as_stages, get_stage_places
from trainkit.post.evaluation.examples import Example
from trainkit.post.objectives.teachers import likeliest, log_softmax_
from trainkit.types import (
    IGNORED_LABEL,
    SOLO,
    Axis,
    Bins,
    Call,
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
    """Scores of one example.

    Attributes:
        logprobs: Log-probability of each scored token, in nats, float64 `[scored]`.
        greedy: Whether all scored tokens are the model's most likely ones.
    """

    logprobs: np.ndarray[tuple[int], np.dtype[np.float64]]
    greedy: bool

    @property
    def logprob(self) -> float:
        """The log-probability of all scored tokens."""
        return float(self.logprobs.sum())


Scorer = Callable[[Sequence[Example]], list[ExampleScores]]
"""`Scorer(examples) -> scores`, one per example, on every rank."""

TopKScorer = Callable[[Sequence[Example]], list[tuple[np.ndarray[Any, Any], ...]]]
"""`TopKScorer(examples) -> [(ids, logprobs)]`, each `[scored, k]`, on every rank."""


def make_scorer(
    stages_or_model: Stages | nn.Module,
    *,
    axis: Axis = SOLO,
    call: Call | None = None,
    tokens_per_batch: int = 8192,
) -> Scorer:
    """Make a function that scores examples with a model in its layout.

    Examples are packed into rows as long as the longest example, as separate documents; the rows
    are sharded over data-parallel ranks and the results all-reduced. Scores depend on the other
    examples of a row by rounding alone. From a `Hidden`, logits are computed in chunks of tokens,
    and under tensor parallelism for this rank's shard of the vocabulary.

    Args:
        stages_or_model: This rank's stages, or any module.
        axis: For a plain module, the ranks that share the rows. A `Stages` has its own axes.
        call: How a batch enters the model, in place of the stages' own call, or of `call_model`.
        tokens_per_batch: Tokens per forward pass of a rank, at least one row.

    Returns:
        `score(examples) -> [ExampleScores]`; equal on all ranks, all of which must call it with the
        same examples. It raises NumericsError if a log-probability is not finite, and ValueError
        if an example has no token to score, or none before those. It runs the stages in evaluation
        mode and restores theirs, communicates on all of their axes, and waits for the device.

    Effects:
        None here. The returned function communicates on the axes of the stages, and puts modules
        into evaluation mode for its duration.

    Examples:
        >>> from trainkit.models.decoder import build_decoder
        >>> from trainkit.models.decoder_sizes import make_decoder_config
        >>> score = make_scorer(build_decoder(make_decoder_config("tiny"), seed=0))
        >>> one, two = score([Example(np.array([5, 6, 7]), 1), Example(np.array([5, 6, 7]), 2)])
        >>> bool(abs(one.logprob - two.logprobs[1]) < 1e-5), len(two.logprobs)
        (True, 2)
    """
    stages = as_stages(stages_or_model, "make_scorer", axis=axis, call=call)
    # Two values per token: its log-probability, and whether it is the most likely one.
    compute = _make_compute(stages, token_scores, 2, tokens_per_batch=tokens_per_batch)

    def score(examples: Sequence[Example]) -> list[ExampleScores]:
        scores = []
        for index, (logprobs, is_best) in enumerate(compute(examples)):
            _check_finite(logprobs, index)
            # A copy: the values are a slice of the table of all examples.
            scores.append(ExampleScores(logprobs.copy(), bool(is_best.all())))
        return scores

    return score


def make_top_k_scorer(
    stages_or_model: Stages | nn.Module,
    top_k: int,
    *,
    temperature: float = 1.0,
    axis: Axis = SOLO,
    call: Call | None = None,
    tokens_per_batch: int = 8192,
) -> TopKScorer:
    """Make a function that finds a model's `top_k` most likely tokens at each scored position.

    Args:
        stages_or_model: As in `make_scorer`.
        top_k: Number of tokens per position.
        temperature: Divides the logits.
        axis: As in `make_scorer`.
        call: As in `make_scorer`.
        tokens_per_batch: As in `make_scorer`.

    Returns:
        `score(examples) -> [(ids, logprobs)]`: int64 and float64 `[scored, top_k]`, most likely
        first. Otherwise as in `make_scorer`; it raises ValueError if the vocabulary is smaller than
        `top_k`.

    Raises:
        ValueError: `top_k` is below 1, or `temperature` is not above 0.

    Effects:
        None here. The returned function communicates on the axes of the stages, and puts modules
        into evaluation mode for its duration.

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
    measure = partial(_find_top_k, top_k=top_k, temperature=temperature)
    compute = _make_compute(stages, measure, 2 * top_k, tokens_per_batch=tokens_per_batch)

    def score(examples: Sequence[Example]) -> list[tuple[np.ndarray[Any, Any], ...]]:
        results: list[tuple[np.ndarray[Any, Any], ...]] = []
        for index, values in enumerate(compute(examples)):
            logprobs = values[top_k:].T.copy()
            _check_finite(logprobs, index)
            results.append((values[:top_k].T.astype(np.int64), logprobs))
        return results

    return score


def _make_compute(
    stages: Stages,
    measure: Callable[[Any, Tensor], Sequence[Tensor]],
    width: int,
    *,
    tokens_per_batch: int,
) -> Callable[[Sequence[Example]], list[np.ndarray[Any, Any]]]:
    """Return a function that computes `width` values per scored token, `[width, scored]` each."""
    check_range("make_scorer", at_least=1, tokens_per_batch=tokens_per_batch)
    data_shard = stages.data_shard
    # With ring attention, each document is split into two chunks per rank.
    multiple = 2 * data_shard.ring.count if data_shard.ring.count > 1 else 1
    length_multiple = multiple * data_shard.ulysses.count * stages.tp.count

    def compute(examples: Sequence[Example]) -> list[np.ndarray[Any, Any]]:
        if not examples:
            return []
        for index, example in enumerate(examples):
            if not 1 <= example.scored < len(example.ids):
                raise ValueError(
                    f"score: example {index} has {len(example.ids)} tokens of which "
                    f"{example.scored} are scored; at least one must be scored, and at least one "
                    "not"
                )
        # Rows are as long as the longest example: shorter ones share a row.
        lengths = np.array([len(example.ids) - 1 for example in examples])  # the last is a label
        longest = int(align(lengths, multiple).max())
        capacity = -(-longest // length_multiple) * length_multiple
        bins = pack_bins(lengths, capacity, multiple_of=multiple, overlong="error", group_size=0)
        # The scored positions of each example in the flattened rows, the last ones of its inputs.
        ends = _find_starts(bins) + lengths
        scored = [slice(end - x.scored, end) for end, x in zip(ends, examples, strict=True)]
        # One more label at the end, where the token_index of padding, -1, points.
        # Labels of the flattened rows: only scored tokens have one.
        labels = np.full(len(bins) * capacity + 1, IGNORED_LABEL)
        for example, positions in zip(examples, scored, strict=True):
            labels[positions] = example.ids[-example.scored :]
        # This rank's rows, [batches, rows]: all ranks have the same number of batches, since they
        # run collectives together, and -1 is a padding row.
        num_ranks = data_shard.rows.count
        rows_that_fit = max(1, tokens_per_batch // capacity)
        rows_per_rank = -(-len(bins) // num_ranks)
        rows_per_batch = min(rows_that_fit, rows_per_rank)
        rows_per_step = rows_per_batch * num_ranks
        num_steps = -(-len(bins) // rows_per_step)
        order = np.arange(num_steps * rows_per_step)
        order[len(bins) :] = -1
        rows = order.reshape(-1, num_ranks, rows_per_batch)[:, data_shard.rows.index]
        local = _measure_rows(
            stages,
            examples,
            bins,
            torch.from_numpy(labels),
            rows,
            measure=measure,
            width=width,
        )
        # Each token is non-zero on one rank alone, so the sum gathers.
        summed = all_sum(local, stages.loss)
        table = all_sum(summed, stages.pp).cpu().numpy()
        return [table[:, positions] for positions in scored]

    return compute


def _measure_rows(
    stages: Stages,
    examples: Sequence[Example],
    bins: Bins,
    labels: Tensor,
    rows: np.ndarray[Any, Any],
    *,
    measure: Callable[[Any, Tensor], Sequence[Tensor]],
    width: int,
) -> Tensor:
    """Return the values of this rank's tokens, `[width, rows x S]`, and 0 for others."""
    device = compute_device(stages[0])
    is_last = get_stage_places(stages, stages.pp)[-1].last
    table = torch.zeros(width, len(labels) - 1, dtype=torch.float64, device=device)
    inputs = make_corpus(example.ids[:-1] for example in examples)  # the last token is a label
    with use_eval_mode(stages):
        for batch_rows in rows:
            batch = collate_bins(inputs, bins, batch_rows, row_positions=batch_rows)
            # Before the sequence is sharded, which shards the labels, too.
            batch = attrs.evolve(batch, labels=labels[batch.token_index])
            batch = shard_sequence(batch, ring=stages.ring.share, ulysses=stages.ulysses.share)
            batch = to_device(batch, device)
            output = forward_stages(stages, batch)
            if is_last:  # other stages of a pipeline have hidden states, and no scores
                is_label = batch.labels != IGNORED_LABEL
                values = [x[is_label].double() for x in measure(output, batch.labels)]
                table[:, batch.token_index[is_label]] = torch.stack(values)
    return table


def _find_starts(bins: Bins) -> IntArray:
    """Return the start of each document in the flattened rows; each document is one piece."""
    sizes = align(bins.lengths, bins.multiple_of)
    ends = np.cumsum(sizes)
    row_indices = np.repeat(np.arange(len(bins)), np.diff(bins.offsets))
    # Pieces of earlier rows, which the running sum counts without the padding of those rows.
    before_row = np.append(0, ends)[bins.offsets[:-1]][row_indices]
    start_in_row = ends - sizes - before_row
    # In the order of documents, not of pieces.
    starts = np.empty(len(bins.documents), np.int64)
    starts[bins.documents] = row_indices * bins.capacity + start_in_row
    return starts


def _check_finite(logprobs: np.ndarray[Any, Any], index: int) -> None:
    if not np.isfinite(logprobs).all():
        value = float(logprobs[~np.isfinite(logprobs)][0])
        raise NumericsError(
            f"score: a token of example {index} has the log-probability {value}",
            got=value,
            hint="check the model's weights",
        )


# ------------------------------------------------------------------------------------------ tokens


def token_scores(output: Any, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log-probability of each label, and whether it is the most likely token.

    Args:
        output: Logits `[..., V]`, or a `Hidden`, whose logits are computed in chunks of tokens, for
            this rank's shard of the vocabulary.
        labels: int64 `[...]`; results are undefined where it is -100.

    Returns:
        fp32 or fp64 `[...]` and bool `[...]`, detached and equal on all ranks of the vocabulary.
        Among equal logits the first is the most likely, as for `argmax`.

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
        # Before scores_, which overwrites the logits.
        is_best = _find_argmax(logits, axis) == flat[rows]
        losses = scores_(logits, flat[rows], axis).losses
        # linear_in_chunks sums the first column, and keeps the others per token.
        return torch.stack([losses, losses, is_best.to(losses.dtype)], dim=-1)

    with torch.no_grad():
        _, values = linear_in_chunks(factors, compute, axis=axis)
    losses, is_best = values.unbind(-1)
    return -losses.view(labels.shape), is_best.view(labels.shape).bool()


def _find_top_k(output: Any, labels: Tensor, *, top_k: int, temperature: float) -> list[Tensor]:
    """Return `top_k` ids, then their log-probabilities, of each position: 2 k tensors `[...]`.

    The ids are floating-point numbers, exact for vocabularies below 2^24 in fp32.
    """
    output = drop_routing(output)
    if isinstance(output, Tensor):
        _check_top_k(top_k, output.shape[-1])
        flat = output.detach().flatten(0, -2).float()
        flat = (flat / temperature).log_softmax(-1)
        # As floating-point numbers, ids share a tensor with the log-probabilities.
        ids, logprobs = likeliest(flat, top_k, SOLO)
        values = torch.cat([ids.float(), logprobs.float()], dim=-1)
    else:
        hidden, weight, axis, softcap = Hidden(*output)
        axis = make_vocabulary_axis(weight, axis)
        _check_top_k(top_k, axis.total)
        factors = cast_factors(
            "make_top_k_scorer",
            hidden,
            weight,
            labels,
            softcap=softcap,
            axis=axis,
        )

        def compute(logits: Tensor, _rows: slice, _gradient: bool) -> Tensor:
            chunk_logprobs = log_softmax_(logits.div_(temperature), axis)
            ids, logprobs = likeliest(chunk_logprobs, top_k, axis)
            # As in `token_scores`, the first column is only summed.
            return torch.cat([logprobs[:, :1], ids.to(logprobs.dtype), logprobs], dim=-1)

        with torch.no_grad():
            _, values = linear_in_chunks(factors, compute, axis=axis)
    return [x.view(labels.shape) for x in values.unbind(-1)]


def _check_top_k(top_k: int, vocab_size: int) -> None:
    if top_k > vocab_size:
        raise ValueError(
            f"make_top_k_scorer: top_k is {top_k}, but the vocabulary has {vocab_size} tokens"
        )


def _find_argmax(logits: Tensor, axis: VocabularyAxis) -> Tensor:
    """Return the argmax `[T]` over a sharded vocabulary, of local logits `[T, V_r]`."""
    if not logits.shape[-1]:  # a small vocabulary on many ranks: takes part in both collectives
        first = torch.full(logits.shape[:1], axis.total, device=logits.device)
        all_max(logits.new_full(logits.shape[:1], -torch.inf), axis)
        return -all_max(-first, axis)
    # Ids are negated for a minimum: the collective is a maximum.
    largest, index = logits.max(-1)
    is_largest = largest == all_max(largest, axis)
    # Among equal maxima the least index, as argmax has it: a minimum over ranks.
    first = torch.where(is_largest, index + axis.first, axis.total)
    return -all_max(-first, axis)
