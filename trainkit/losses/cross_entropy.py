"""Losses over logits, cross entropy and the z-loss, as sums over the tokens that are trained on.

A sum can be added up over microbatches, ranks and pipeline stages; dividing is left to the one
place that knows the number of trained tokens in the whole global batch.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trainkit.types import IGNORED_LABEL


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the summed cross entropy, in nats, of all tokens whose label is not -100.

    The sum is accumulated in fp32 (fp64 logits stay fp64). Ignored tokens add exactly zero to the
    sum and to every gradient: with nothing but ignored tokens the result is a zero that is attached
    to the graph, and all gradients are zeros. No host sync.

    Logits of minus infinity rule a word out. Any NaN or plus infinity, at an ignored token too,
    makes the gradient of its row NaN, so that the gradient norm shows a model that has broken.

    Args:
        logits: scores, any floating dtype, `[..., V]`.
        labels: the next token of each position, int64 `[...]`; -100 is ignored.

    Returns:
        A scalar, fp32 or fp64.

    Raises:
        ValueError: if the shapes do not match or the labels are not int64.

    Examples:
        >>> import torch
        >>> logits = torch.zeros(3, 4, requires_grad=True)
        >>> cross_entropy(logits, torch.tensor([0, -100, 2]))  # 2 log 4
        tensor(2.7726, grad_fn=<NllLossBackward0>)
        >>> cross_entropy(logits, torch.tensor([-100, -100, -100])).backward()
        >>> float(logits.grad.abs().sum())
        0.0
    """
    check_labels("cross_entropy", logits, labels)
    rows = logits.to(accumulation_dtype(logits)).flatten(0, -2)
    return nn.functional.cross_entropy(
        rows, labels.flatten(), ignore_index=IGNORED_LABEL, reduction="sum"
    )


def cross_entropy_per_token(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return `cross_entropy` and each token's part of it, detached; 0 at ignored tokens.

    Both come from one softmax.

    Args:
        logits: scores, any floating dtype, `[..., V]`.
        labels: the next token of each position, int64 `[...]`; -100 is ignored.

    Returns:
        The scalar of `cross_entropy`, to the last bit, and the parts, fp32 or fp64 `[...]`.

    Raises:
        ValueError: if the shapes do not match or the labels are not int64.

    Examples:
        >>> import torch
        >>> cross_entropy_per_token(torch.zeros(3, 4), torch.tensor([0, -100, 2]))
        (tensor(2.7726), tensor([1.3863, 0.0000, 1.3863]))
    """
    check_labels("cross_entropy_per_token", logits, labels)
    rows = logits.to(accumulation_dtype(logits)).flatten(0, -2).log_softmax(-1)
    flat = labels.flatten()
    total = nn.functional.nll_loss(rows, flat, ignore_index=IGNORED_LABEL, reduction="sum")
    parts = nn.functional.nll_loss(
        rows.detach(), flat, ignore_index=IGNORED_LABEL, reduction="none"
    )
    return total, parts.view(labels.shape)


def z_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the sum of logsumexp(logits)^2 over all tokens whose label is not -100.

    A small multiple of it (1e-4 is usual) keeps the normalizer of the softmax near 1, and so the
    logits small enough for bf16. Accumulation, ignored tokens and host syncs are as in
    `cross_entropy`. From PaLM (Chowdhery et al. 2022, section 5).

    Args:
        logits: scores, any floating dtype, `[..., V]`.
        labels: the next token of each position, int64 `[...]`; -100 is ignored.

    Returns:
        A scalar, fp32 or fp64.

    Raises:
        ValueError: if the shapes do not match or the labels are not int64.

    Examples:
        >>> import torch
        >>> float(z_loss(torch.zeros(3, 4), torch.tensor([0, -100, 2])))  # 2 (log 4)^2
        3.84...
    """
    check_labels("z_loss", logits, labels)
    normalizers = logits.to(accumulation_dtype(logits)).logsumexp(-1)
    return normalizers.square().masked_fill(labels == IGNORED_LABEL, 0).sum()


def check_labels(function: str, x: Tensor, labels: Tensor) -> None:
    """Refuse labels that do not belong to `x`, one label for each vector along its last dimension.

    Args:
        function: who asks, for the message.
        x: logits or hidden states `[..., V or D]`.
        labels: int64 `[...]`.

    Raises:
        ValueError: if the shapes do not match or the labels are not int64.

    Examples:
        >>> import torch
        >>> check_labels(
        ...     "cross_entropy", torch.zeros(2, 3, 4), torch.zeros(2, 2, dtype=torch.int64)
        ... )
        Traceback (most recent call last):
        ...
        ValueError: cross_entropy: labels must have shape (2, 3), ... got (2, 2)
    """
    if x.ndim < 2 or labels.shape != x.shape[:-1]:
        raise ValueError(
            f"{function}: labels must have shape {tuple(x.shape[:-1])}, one per vector of an input "
            f"of shape {tuple(x.shape)} with two or more dimensions, got {tuple(labels.shape)}"
        )
    if labels.dtype != torch.int64:
        raise ValueError(f"{function}: labels must be int64, got {labels.dtype}")


def accumulation_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which sums over `x` are made: fp32, or fp64 if that is what it holds.

    Examples:
        >>> accumulation_dtype(torch.zeros(1, dtype=torch.bfloat16))
        torch.float32
    """
    return torch.float64 if x.dtype == torch.float64 else torch.float32
