"""Cross entropy and z-loss of logits, as sums over the tokens in the loss.

Sums add up over microbatches, ranks and pipeline stages. One place divides, where the number of
tokens in the global batch is known.

Each function takes an `axis` for logits that are sharded over the vocabulary, in rank order. The
result is equal on all ranks, and communication does not grow with the vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.batch.denominators import can_read_values
from trainkit.losses.softmax import compute_scores, make_vocabulary_axis
from trainkit.types import IGNORED_LABEL, SOLO, Axis


def cross_entropy(logits: Tensor, labels: Tensor, *, axis: Axis = SOLO) -> Tensor:
    """Return the summed cross entropy, in nats, of all tokens whose label is not -100.

    The sum is accumulated in fp32 (fp64 logits stay fp64). Ignored tokens add exactly zero to the
    sum and to every gradient: with nothing but ignored tokens the result is a zero that is attached
    to the graph, and all gradients are zeros. No host sync.

    Logits of minus infinity exclude a word. A NaN or plus infinity, even at an ignored token, makes
    the gradient of its row NaN, so that the gradient norm shows a broken model.

    Args:
        logits: Scores, any floating dtype, `[..., V]`, or `[..., V_r]`, this rank's shard. Shards
            may differ in size, and may be empty.
        labels: The next token of each position among all V words, int64 `[...]`, equal on all ranks
            of the axis; -100 is ignored.
        axis: The axis over which the vocabulary is sharded: `ps.tp`. With a `make_vocabulary_axis`
            ranks need not exchange the sizes of their shards.

    Returns:
        A scalar, fp32 or fp64.

    Raises:
        ValueError: The shapes do not match, the labels are not int64, the logits are not floating
            or empty, or, on a CPU, a label is out of range (on CUDA the device asserts it).

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
    return sum_cross_entropy("cross_entropy", logits, labels, axis)


def cross_entropy_per_token(logits: Tensor, labels: Tensor, *, axis: Axis = SOLO) -> Tensor:
    """Return the cross entropy of each token, differentiable; 0 where the label is -100.

    Use it for losses that weight tokens, or that use log-probabilities, which are the negative.

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
    return _compute_each(logits, labels, axis).view(labels.shape)


def sum_cross_entropy(where: str, logits: Tensor, labels: Tensor, axis: Axis = SOLO) -> Tensor:
    """Return `cross_entropy`; `where` is the calling function, for the message.

    Effects:
        Communicates as `cross_entropy`.

    Examples:
        >>> import torch
        >>> sum_cross_entropy("mine", torch.zeros(3, 4), torch.tensor([0, -100, 2]))
        tensor(2.7726)
    """
    if axis.count > 1:
        return sum_and_parts(where, logits, labels, axis)[0]
    check_shapes(where, logits, labels, words=logits.shape[-1])
    # On a CPU the kernel checks each label itself; a check before would cost 15 us.
    try:
        return nn.functional.cross_entropy(
            _flatten_exact(logits),
            labels.flatten(),
            ignore_index=IGNORED_LABEL,
            reduction="sum",
        )
    except IndexError:
        check_values(where, labels, words=logits.shape[-1])
        raise


def sum_and_parts(where: str, logits: Tensor, labels: Tensor, axis: Axis) -> tuple[Tensor, Tensor]:
    """Return `cross_entropy` and the detached loss of each token `[...]`, from one softmax.

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
        losses = _compute_each(logits, labels, axis)
        return losses.sum(), losses.detach().view(labels.shape)
    # One log-softmax serves the sum and the parts.
    logprobs = _flatten_exact(logits).log_softmax(-1)
    flat = labels.flatten()
    total = nn.functional.nll_loss(logprobs, flat, ignore_index=IGNORED_LABEL, reduction="sum")
    return total, _pick_losses(logprobs.detach(), flat).view(labels.shape)


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
    # Labels matter only for the mask; a sharded softmax computes their losses as well.
    if axis.count == 1:
        normalizers = _flatten_exact(logits).logsumexp(-1)
    else:
        _, normalizers = compute_scores(logits.flatten(0, -2), flat, axis)
    return normalizers.square().masked_fill(flat == IGNORED_LABEL, 0).sum()


def _flatten_exact(logits: Tensor) -> Tensor:
    """Flatten logits to `[T, V]` in fp32 or fp64."""
    # torch's log-softmax of bf16 logits rounds each log-probability to bf16.
    if logits.dtype not in (torch.float32, torch.float64):
        logits = logits.float()
    return logits.flatten(0, -2)


def _pick_losses(logprobs: Tensor, labels: Tensor) -> Tensor:
    # nll_loss gives 0 at ignored labels.
    return nn.functional.nll_loss(logprobs, labels, ignore_index=IGNORED_LABEL, reduction="none")


def _compute_each(logits: Tensor, labels: Tensor, axis: Axis) -> Tensor:
    """Return the cross entropy of each token, differentiable `[T]`."""
    flat = labels.flatten()
    if axis.count == 1:
        return _pick_losses(_flatten_exact(logits).log_softmax(-1), flat)
    # Here an ignored token has the loss of some word.
    losses, _ = compute_scores(logits.flatten(0, -2), flat, axis)
    return losses.masked_fill(flat == IGNORED_LABEL, 0)


# ------------------------------------------------------------------------------------------ checks


def check_labels(function: str, x: Tensor, labels: Tensor, *, words: int) -> None:
    """Raise ValueError unless there is a valid label for each vector along the last dimension.

    Args:
        function: The calling function, for the message.
        x: Logits or hidden states `[..., V or D]`.
        labels: int64 `[...]`.
        words: V, the size of the whole vocabulary.

    Raises:
        ValueError: The shapes do not match, the labels are not int64, `x` is not floating, or the
            vocabulary is empty; and on a CPU, where it costs no sync, a label is out of range.

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
    """Check the same as `check_labels` without the values of labels.

    Raises:
        ValueError: As `check_labels`.

    Examples:
        >>> import torch
        >>> check_shapes("cross_entropy", torch.zeros(2, 4), torch.tensor([3, 4]), words=4)
    """
    shape = x.shape
    if len(shape) < 2 or labels.shape != shape[:-1]:
        raise ValueError(
            f"{function}: labels must have shape {tuple(x.shape[:-1])}, one per vector of an input "
            f"of shape {tuple(x.shape)} with two or more dimensions, got {tuple(labels.shape)}"
        )
    if labels.dtype != torch.int64:
        raise ValueError(f"{function}: labels must be int64, got {labels.dtype}")
    if not x.is_floating_point():
        raise ValueError(f"{function}: logits and hidden states are floating, got {x.dtype}")
    if words < 1:
        raise ValueError(f"{function}: the vocabulary must have a word, got one of size {words}")


def check_values(function: str, labels: Tensor, *, words: int) -> None:
    """Raise ValueError if a label on a CPU is out of range.

    Raises:
        ValueError: As `check_labels`.

    Examples:
        >>> import torch
        >>> check_values("cross_entropy", torch.tensor([3, -100]), words=4)
    """
    if can_read_values(labels):
        flat = labels.flatten()
        is_out_of_range = (flat < 0) | (flat >= words)
        wrong = (flat != IGNORED_LABEL) & is_out_of_range
        if wrong.any():
            index = int(wrong.nonzero()[0])
            raise ValueError(
                f"{function}: labels must be {IGNORED_LABEL} or in [0, {words}), the vocabulary, "
                f"got {int(flat[index])} at index {index} of the flattened labels; set tokens that "
                f"are not in the loss to {IGNORED_LABEL}"
            )


# How a batch gets the columns that losses read, for messages.
_COLUMN_HINTS = {
    "labels": "collate_bins makes them, and shift_labels those of your own rows",
    "document_ids": "collate_bins and batch_from_rows make them: the document of each token in its "
    "row, below 0 for padding",
    "position_ids": "collate_bins and batch_from_rows make them: the position of each token in its "
    "document, from 0",
    "old_logprobs": "parallel.add_columns(stages, microbatches, "
    "generation.compute_old_logprobs) adds it, before the first update",
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


def get_column_hint(name: str) -> str:
    """Return a sentence about how a batch gets a column, for messages.

    Examples:
        >>> get_column_hint("kl"), get_column_hint("mine")
        ('objectives.add_reference_point adds it', 'put a tensor of the shape of the labels ...')
    """
    return _COLUMN_HINTS.get(name, "put a tensor of the shape of the labels under this name")


def read_field(where: str, batch: Mapping[str, Any], name: str) -> Tensor:
    """Return a tensor of a batch.

    Raises:
        ValueError: The batch has none of that name; the message names a function that makes one.

    Examples:
        >>> read_field("mine", {"input_ids": 0}, "labels")
        Traceback (most recent call last):
        ...
        ValueError: mine: the batch has no "labels" (it has input_ids); collate_bins makes them...
    """
    # Not `name in batch` first: a `Batch` reads the tensor for that, too.
    try:
        return batch[name]
    except KeyError:
        raise ValueError(
            f'{where}: the batch has no "{name}" (it has {", ".join(batch) or "nothing"}); '
            f"{get_column_hint(name)}"
        ) from None
