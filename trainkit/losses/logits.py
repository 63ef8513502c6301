"""Losses over logits, cross entropy and the z-loss, as sums over the tokens that are trained on.

A sum can be added up over microbatches, ranks and pipeline stages; dividing is left to the one
place that knows the number of trained tokens in the whole global batch.

Each takes an `axis`, for logits of which every rank has the part of its own words, in rank order.
The result is then equal on all ranks, and what is sent does not grow with the vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.batch.denominators import can_read_values
from trainkit.losses.softmax import make_vocabulary_axis, scores_of_logits
from trainkit.types import IGNORED_LABEL, SOLO, Axis


def cross_entropy(logits: Tensor, labels: Tensor, *, axis: Axis = SOLO) -> Tensor:
    """Return the summed cross entropy, in nats, of all tokens whose label is not -100.

    The sum is accumulated in fp32 (fp64 logits stay fp64). Ignored tokens add exactly zero to the
    sum and to every gradient: with nothing but ignored tokens the result is a zero that is attached
    to the graph, and all gradients are zeros. No host sync.

    Logits of minus infinity rule a word out. Any NaN or plus infinity, at an ignored token too,
    makes the gradient of its row NaN, so that the gradient norm shows a model that has broken.

    Args:
        logits: Scores, any floating dtype, `[..., V]`, or `[..., V_r]` of this rank's words. Ranks
            may have unequal numbers of words, or none.
        labels: The next token of each position among all V words, int64 `[...]`, equal on all ranks
            of the axis; -100 is ignored.
        axis: The axis over which the vocabulary is cut, if it is: `ps.tp`. A `make_vocabulary_axis`
            saves asking the ranks of a plain one how many words they have.

    Returns:
        A scalar, fp32 or fp64.

    Raises:
        ValueError: The shapes do not match, the labels are not int64, the logits hold no floating
            numbers or no word, or, on a CPU, a label is no word (on CUDA the device asserts it).

    Effects:
        Communicates: two all-reduces on `axis`, of one and of two numbers per token; as
        `make_vocabulary_axis`.

    Examples:
        >>> import torch
        >>> logits = torch.zeros(3, 4, requires_grad=True)
        >>> cross_entropy(logits, torch.tensor([0, -100, 2]))  # 2 log 4
        tensor(2.7726, grad_fn=<NllLossBackward0>)
        >>> cross_entropy(logits, torch.tensor([-100, -100, -100])).backward()
        >>> float(logits.grad.abs().sum())
        0.0
    """
    return summed_cross_entropy("cross_entropy", logits, labels, axis)


def cross_entropy_per_token(logits: Tensor, labels: Tensor, *, axis: Axis = SOLO) -> Tensor:
    """Return the cross entropy of each token, differentiable; 0 where the label is -100.

    For losses that weigh tokens, or go on with their log-probabilities, which are these, negated.

    Args:
        logits: As in `cross_entropy`.
        labels: As in `cross_entropy`.
        axis: As in `cross_entropy`.

    Returns:
        fp32 or fp64 `[...]`.

    Raises:
        ValueError: As `cross_entropy`.

    Effects:
        Communicates as `cross_entropy`.

    Examples:
        >>> import torch
        >>> cross_entropy_per_token(torch.zeros(3, 4), torch.tensor([0, -100, 2]))
        tensor([1.3863, 0.0000, 1.3863])
    """
    axis = make_vocabulary_axis(logits, axis, dim=-1)
    check_labels("cross_entropy_per_token", logits, labels, words=axis.total)
    return _each(logits, labels, axis).view(labels.shape)


def summed_cross_entropy(where: str, logits: Tensor, labels: Tensor, axis: Axis = SOLO) -> Tensor:
    """Return `cross_entropy`; `where` is who asks, for the message.

    Effects:
        Communicates as `cross_entropy`.

    Examples:
        >>> import torch
        >>> summed_cross_entropy("mine", torch.zeros(3, 4), torch.tensor([0, -100, 2]))
        tensor(2.7726)
    """
    if axis.count > 1:
        return sum_and_parts(where, logits, labels, axis)[0]
    check_shapes(where, logits, labels, words=logits.shape[-1])
    try:  # on a CPU the kernel looks at each label anyway, and a look before costs 15 us
        return nn.functional.cross_entropy(
            _rows(logits), labels.flatten(), ignore_index=IGNORED_LABEL, reduction="sum"
        )
    except IndexError:
        check_values(where, labels, words=logits.shape[-1])
        raise


def sum_and_parts(where: str, logits: Tensor, labels: Tensor, axis: Axis) -> tuple[Tensor, Tensor]:
    """Return `cross_entropy` and each token's part of it, detached `[...]`, from one softmax.

    Effects:
        Communicates as `cross_entropy`.

    Examples:
        >>> import torch
        >>> sum_and_parts("mine", torch.zeros(3, 4), torch.tensor([0, -100, 2]), SOLO)
        (tensor(2.7726), tensor([1.3863, 0.0000, 1.3863]))
    """
    axis = make_vocabulary_axis(logits, axis, dim=-1)
    check_labels(where, logits, labels, words=axis.total)
    if axis.count > 1:
        parts = _each(logits, labels, axis)
        return parts.sum(), parts.detach().view(labels.shape)
    rows, flat = _rows(logits).log_softmax(-1), labels.flatten()
    total = nn.functional.nll_loss(rows, flat, ignore_index=IGNORED_LABEL, reduction="sum")
    return total, _picked(rows.detach(), flat).view(labels.shape)


def z_loss(logits: Tensor, labels: Tensor, *, axis: Axis = SOLO) -> Tensor:
    """Return the sum of logsumexp(logits)^2 over all tokens whose label is not -100.

    A small multiple of it (1e-4 is usual) keeps the normalizer of the softmax near 1, and so the
    logits small enough for bf16. Accumulation, ignored tokens and host syncs are as in
    `cross_entropy`. From PaLM (Chowdhery et al. 2022, section 5).

    Args:
        logits: As in `cross_entropy`.
        labels: As in `cross_entropy`.
        axis: As in `cross_entropy`.

    Returns:
        A scalar, fp32 or fp64.

    Raises:
        ValueError: As `cross_entropy`.

    Effects:
        Communicates as `cross_entropy`.

    Examples:
        >>> import torch
        >>> float(z_loss(torch.zeros(3, 4), torch.tensor([0, -100, 2])))  # 2 (log 4)^2
        3.84...
    """
    axis = make_vocabulary_axis(logits, axis, dim=-1)
    check_labels("z_loss", logits, labels, words=axis.total)
    flat = labels.flatten()
    if axis.count == 1:
        normalizers = _rows(logits).logsumexp(-1)
    else:
        _, normalizers = scores_of_logits(logits.flatten(0, -2), flat, axis)
    return normalizers.square().masked_fill(flat == IGNORED_LABEL, 0).sum()


def _rows(logits: Tensor) -> Tensor:
    if logits.dtype not in (torch.float32, torch.float64):
        logits = logits.float()
    return logits.flatten(0, -2)


def _picked(rows: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.nll_loss(rows, labels, ignore_index=IGNORED_LABEL, reduction="none")


def _each(logits: Tensor, labels: Tensor, axis: Axis) -> Tensor:
    """Return each token's cross entropy, differentiable `[T]`."""
    flat = labels.flatten()
    if axis.count == 1:
        return _picked(_rows(logits).log_softmax(-1), flat)
    losses, _ = scores_of_logits(logits.flatten(0, -2), flat, axis)
    return losses.masked_fill(flat == IGNORED_LABEL, 0)


# ------------------------------------------------------------------------------------------ checks


def check_labels(function: str, x: Tensor, labels: Tensor, *, words: int) -> None:
    """Refuse labels that do not belong to `x`, one label for each vector along its last dimension.

    Args:
        function: Who asks, for the message.
        x: Logits or hidden states `[..., V or D]`.
        labels: int64 `[...]`.
        words: V, the size of the whole vocabulary.

    Raises:
        ValueError: The shapes do not match, the labels are not int64, `x` is not floating, or there
            is no word; and on a CPU, where looking at them costs no sync, a label is no word.

    Examples:
        >>> import torch
        >>> check_labels("cross_entropy", torch.zeros(2, 4), torch.tensor([3, 4]), words=4)
        Traceback (most recent call last):
        ...
        ValueError: cross_entropy: labels must be -100 or in [0, 4), ... got 4 at index 1 ...
    """
    check_shapes(function, x, labels, words=words)
    check_values(function, labels, words=words)


def check_shapes(function: str, x: Tensor, labels: Tensor, *, words: int) -> None:
    """Refuse what `check_labels` does, but for the values of labels.

    Raises:
        ValueError: As `check_labels`.

    Examples:
        >>> import torch
        >>> check_shapes("cross_entropy", torch.zeros(2, 4), torch.tensor([3, 4]), words=4)
    """
    shape = x.shape
    if len(shape) < 2 or labels.shape != shape[:-1]:
        of = f"an input of shape {tuple(x.shape)} with two or more dimensions"
        must = f"labels must have shape {tuple(x.shape[:-1])}, one per vector of {of}"
        raise ValueError(f"{function}: {must}, got {tuple(labels.shape)}")
    if labels.dtype != torch.int64:
        raise ValueError(f"{function}: labels must be int64, got {labels.dtype}")
    if not x.is_floating_point():
        raise ValueError(f"{function}: logits and hidden states are floating, got {x.dtype}")
    if words < 1:
        raise ValueError(f"{function}: the vocabulary must have a word, got one of size {words}")


def check_values(function: str, labels: Tensor, *, words: int) -> None:
    """Refuse labels on a CPU that are no word.

    Raises:
        ValueError: As `check_labels`.

    Examples:
        >>> import torch
        >>> check_values("cross_entropy", torch.tensor([3, -100]), words=4)
    """
    if can_read_values(labels):
        flat = labels.flatten()
        wrong = (flat != IGNORED_LABEL) & ((flat < 0) | (flat >= words))
        if wrong.any():
            place = int(wrong.nonzero()[0])
            must = f"labels must be {IGNORED_LABEL} or in [0, {words}), the vocabulary"
            got = f"got {int(flat[place])} at index {place} of the flattened labels"
            mend = f"set what is not to be trained on to {IGNORED_LABEL}"
            raise ValueError(f"{function}: {must}, {got}; {mend}")


_CURES = {
    "labels": "collate_bins makes them, and shift_labels those of rows of your own",
    "document_ids": "collate_bins and batch_from_rows make them: each token's document "
    "in its row, below 0 for padding",
    "position_ids": "collate_bins and batch_from_rows make them: the place of each token in its "
    "document, from 0",
    "old_logprobs": "parallel.add_columns(stages, microbatches, "
    "generation.compute_old_logprobs) adds it, "
    "before the first update",
    "sampler_logprobs": "generation.make_answer_corpus adds it where answers have logprobs",
    "advantages": "generation.make_answer_corpus adds it",
    "reference_logprobs": "evaluation.score_corpus with make_logprob_columns writes it",
    "desirable": "put 1 at the labels of good answers and 0 at those of bad ones",
    "kl": "objectives.add_reference_point adds it",
    "weights": "losses.weight_by_document makes them, or a Column of the corpus named weights",
    "teacher_hidden": "parallel.add_columns(teacher, microbatches, ...) adds it",
    "teacher_ids": "evaluation.score_corpus with make_top_k_columns writes a corpus that has it",
    "teacher_logprobs": "evaluation.score_corpus with make_top_k_columns writes it",
}


def cure_of(name: str) -> str:
    """Return what gives a batch the column of that name, for messages.

    Examples:
        >>> cure_of("kl"), cure_of("mine")
        ('objectives.add_reference_point adds it', 'put a tensor of the shape of the labels ...')
    """
    return _CURES.get(name, "put a tensor of the shape of the labels under this name")


def read_field(where: str, batch: Mapping[str, Any], name: str) -> Tensor:
    """Return a tensor of a batch.

    Raises:
        ValueError: It has none of that name; the message says what makes one.

    Examples:
        >>> read_field("mine", {"input_ids": 0}, "labels")
        Traceback (most recent call last):
        ...
        ValueError: mine: the batch has no "labels" (it has input_ids); collate_bins makes them...
    """
    try:
        return batch[name]
    except KeyError:
        raise ValueError(
            f'{where}: the batch has no "{name}" (it has {", ".join(batch) or "nothing"}); '
            f"{cure_of(name)}"
        ) from None
