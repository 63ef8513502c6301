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
from trainkit.corpora.tokens import memory_corpus
from trainkit.evaluation.examples import Example
from trainkit.losses import cross_entropy_per_token
from trainkit.losses.linear import cast_factors, linear_in_chunks
from trainkit.losses.softmax import scores_
from trainkit.models.call import call_model
from trainkit.packing import pack_bins
from trainkit.packing.pieces import align
from trainkit.parallel.places import places_of
from trainkit.parallel.stage_forward import compute_device, evaluating, forward_stages
from trainkit.types import (
    IGNORED_LABEL,
    SOLO,
    Axis,
    Batch,
    Bins,
    Call,
    Hidden,
    IntArray,
    NumericsError,
    Place,
    at_least,
    unrouted,
)


@attrs.frozen(eq=False)
class Scored:
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


Score = Callable[[Sequence[Example]], list[Scored]]
"""`Score(examples) -> what each scores`, in their order, on every rank."""


def bind_score(
    stages: Sequence[nn.Module],
    *,
    place: Place = Place(),  # noqa: B008 (frozen)
    axis: Axis = SOLO,
    pp: Axis = SOLO,
    tp: Axis = SOLO,
    call: Call = call_model,
    tokens_per_batch: int = 8192,
    pad_id: int = 0,
) -> Score:
    """Return the function that scores examples with a model in its layout.

    Examples are packed into rows as long as the longest of them, as documents that do not see each
    other; ranks that read different rows share these, and what each rank finds is summed. A number
    depends on what stands beside it by rounding alone. Of a `Hidden`, logits exist for some tokens
    at a time, and under tensor parallelism each rank makes those of its own words.

    Args:
        stages: This rank's stages, from `build_stages`; or one model.
        place: Which part of a batch this rank holds, `ps.place`.
        axis: The ranks that hold distinct tokens, `ps.loss`.
        pp: The pipeline axis, `ps.pp`.
        tp: The tensor-parallel axis, `ps.tp`.
        call: How a batch enters the model.
        tokens_per_batch: How many tokens a rank computes at a time, or one row if that is longer.
        pad_id: The token id of padding.

    Returns:
        `score(examples) -> [Scored]`; equal on all ranks, all of which must call it with the same
        examples. It raises NumericsError where a log-probability is not finite, and ValueError
        where an example has less than one token to be scored, or no token before them.

    Effects:
        None here. The returned function puts the stages into evaluation mode and back, communicates
        on all axes that they are spread over, and waits for the device.

    Examples:
        >>> from trainkit.models.decoder import build_decoder
        >>> from trainkit.models.sizes import decoder_config
        >>> score = bind_score([build_decoder(decoder_config("tiny"), seed=0)])
        >>> one, two = score([Example(np.array([5, 6, 7]), 1), Example(np.array([5, 6, 7]), 2)])
        >>> bool(abs(one.logprob - two.logprobs[1]) < 1e-5), len(two.logprobs)
        (True, 2)
    """
    at_least(1, "bind_score", tokens_per_batch=tokens_per_batch)
    multiple = 2 * place.ring.count if place.ring.count > 1 else 1
    length_multiple = multiple * place.ulysses.count * tp.count
    run = partial(_run, stages, pp=pp, call=call, place=place, pad_id=pad_id)

    def score(examples: Sequence[Example]) -> list[Scored]:
        if not examples:
            return []
        _check(examples)
        lengths = np.array([len(example.ids) - 1 for example in examples])
        longest = int(align(lengths, multiple).max())
        capacity = -(-longest // length_multiple) * length_multiple
        bins = pack_bins(lengths, capacity, multiple_of=multiple, overlong="error", group_size=0)
        begins = _begins(bins)
        labels = np.full(len(bins) * capacity + 1, IGNORED_LABEL)  # the last one is nowhere: -1
        for example, begin, length in zip(examples, begins, lengths, strict=True):
            counting = slice(begin + length - example.scored, begin + length)
            labels[counting] = example.ids[-example.scored :]
        rows = _dealt(len(bins), place, rows=max(1, tokens_per_batch // capacity))
        found = run(examples, bins, torch.from_numpy(labels), rows)
        table = all_sum(all_sum(found, axis), pp).cpu().numpy()
        return [
            _scored(table[:, begin + length - example.scored : begin + length], number)
            for number, (example, begin, length) in enumerate(
                zip(examples, begins, lengths, strict=True)
            )
        ]

    return score


def _run(
    stages: Sequence[nn.Module],
    examples: Sequence[Example],
    bins: Bins,
    labels: Tensor,
    rows: np.ndarray[Any, Any],
    *,
    pp: Axis,
    call: Call,
    place: Place,
    pad_id: int,
) -> Tensor:
    """Return log-probability and greediness of the tokens of this rank `[2, rows x S]`, else 0."""
    device, last = compute_device(stages[0]), places_of(stages, pp)[-1].last
    table = torch.zeros(2, len(labels) - 1, dtype=torch.float64, device=device)
    inputs = memory_corpus(example.ids[:-1] for example in examples)
    with evaluating(stages):
        for chosen in rows:
            batch = collate_bins(inputs, bins, chosen, pad_id=pad_id, row_positions=chosen)
            batch = attrs.evolve(batch, labels=labels[batch.token_index])
            part = _part(batch, place, device)
            output = forward_stages(stages, part, axis=pp, call=call)
            if last:
                kept = part.labels != IGNORED_LABEL
                found = [x[kept].double() for x in token_scores(output, part.labels)]
                table[:, part.token_index[kept]] = torch.stack(found)
    return table


def _part(batch: Batch, place: Place, device: torch.device) -> Batch:
    part = shard_sequence(batch, ring=place.ring, ulysses=place.ulysses)
    return to_device(part, device)


def _begins(bins: Bins) -> IntArray:
    """Return where each document begins in the flattened rows; each is one piece."""
    sizes = align(bins.lengths, bins.multiple_of)
    ends = np.cumsum(sizes)
    row_of = np.repeat(np.arange(len(bins)), np.diff(bins.offsets))
    before = np.append(0, ends)[bins.offsets[:-1]][row_of]
    begins = np.empty(len(bins.documents), np.int64)
    begins[bins.documents] = row_of * bins.capacity + ends - sizes - before
    return begins


def _dealt(num_rows: int, place: Place, *, rows: int) -> np.ndarray[Any, Any]:
    """Return this rank's rows, batch after batch `[batches, rows]`; -1 is a blank one.

    All ranks have the same number of batches.
    """
    ranks = place.rows.count
    rows = min(rows, -(-num_rows // ranks))
    order = np.arange(-(-num_rows // (rows * ranks)) * rows * ranks)
    order[num_rows:] = -1
    return order.reshape(-1, ranks, rows)[:, place.rows.index]


def _scored(values: np.ndarray[Any, Any], number: int) -> Scored:
    if not np.isfinite(values).all():
        wrong = values[0][~np.isfinite(values[0])][0]
        what = f"score: a token of example {number} has the log-probability {wrong}"
        raise NumericsError(what, got=float(wrong), hint="look at the model's weights")
    return Scored(values[0].copy(), bool(values[1].all()))


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
    output = unrouted(output)
    if isinstance(output, Tensor):
        logits = output.detach()
        return -cross_entropy_per_token(logits, labels), logits.argmax(-1) == labels
    hidden, weight, axis, softcap = Hidden(*output)
    factors = cast_factors("token_scores", hidden, weight, labels, softcap=softcap, axis=axis)
    flat = labels.flatten()

    def compute(logits: Tensor, rows: slice, _: bool) -> Tensor:
        is_best = _likeliest(logits, axis) == flat[rows]
        losses = scores_(logits, flat[rows], axis).losses
        return torch.stack([losses, losses, is_best.to(losses.dtype)], dim=-1)

    with torch.no_grad():
        _, values = linear_in_chunks(factors, compute)
    losses, is_best = values.unbind(-1)
    return -losses.view(labels.shape), is_best.view(labels.shape).bool()


def _likeliest(logits: Tensor, axis: Axis) -> Tensor:
    """Return the first of the likeliest words of each token `[T]`, of logits `[T, V / N]`."""
    largest, index = logits.max(-1)
    is_largest = largest == all_max(largest, axis)
    words = logits.shape[-1]
    first = torch.where(is_largest, index + axis.index * words, axis.count * words)
    return -all_max(-first, axis)
