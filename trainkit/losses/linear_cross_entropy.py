"""Cross entropy straight from hidden states and the output weight, without ever holding all logits.

The logits of a batch are its largest tensor by far: 2,048 tokens by 131,072 words take 1 GiB, and
the plain path holds three of them. Here they exist for one chunk of tokens at a time. Each chunk's
gradient is computed while its logits are there, in the forward pass, so that backward has nothing
left to do but multiply by the incoming scalar.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from trainkit.losses.cross_entropy import (
    accumulation_dtype,
    check_labels,
    cross_entropy,
    cross_entropy_per_token,
)
from trainkit.types import IGNORED_LABEL

Softmax = Callable[[Tensor, Tensor, bool], Tensor]
"""From logits `[T, V]` and labels `[T]` to losses `[T]`.

With True as the third argument, the logits are overwritten by the gradient of the losses' sum;
else they may hold anything afterwards.
"""

_SMALL = 2**22  # elements, 16 MiB of fp32: logits below this are not worth splitting further


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, chunk: int | None = None
) -> Tensor:
    """Return `cross_entropy(hidden @ weight.T, labels)` without holding all logits at once.

    The loss and the weight's gradient are accumulated in fp32 (fp64 stays fp64); gradients are cast
    to the dtype of their input once, at the end. Only the gradients that are needed are computed,
    none under `torch.no_grad()`. Ignored tokens are treated as in `cross_entropy`; they cost their
    share of the time, since leaving them out would need a host sync. Factors in bf16 are multiplied
    as they are on CUDA, with fp32 results, and in fp32 elsewhere. Under autocast both inputs are
    cast first, as a linear layer would.

    Chunks have no second derivative, and run as they are inside `torch.compile`, which would
    otherwise keep several of them at a time.

    Args:
        hidden: what enters the output layer, `[..., D]`.
        weight: the output layer's weight `[V, D]`, same dtype and device.
        labels: the next token of each position, int64 `[...]`; -100 is ignored.
        chunk: tokens whose logits exist at a time. By default D / 2, so that they take half of the
            memory of the weight's gradient, or as many as fit into 16 MiB, if that is more; and if
            all fit into that, the plain path is taken, which has less overhead.

    Returns:
        A scalar, fp32 or fp64.

    Raises:
        ValueError: if shapes or dtypes do not match or `chunk` is below 1.

    Examples:
        >>> import torch
        >>> from trainkit.losses import cross_entropy
        >>> draw = torch.Generator().manual_seed(0)
        >>> hidden = torch.randn(2, 8, 4, generator=draw, requires_grad=True)
        >>> weight = torch.randn(50, 4, generator=draw, requires_grad=True)
        >>> labels = torch.randint(50, (2, 8), generator=draw)
        >>> loss = linear_cross_entropy(hidden, weight, labels, chunk=3)
        >>> bool(torch.isclose(loss, cross_entropy(hidden @ weight.T, labels)))
        True
        >>> loss.backward()
        >>> weight.grad.shape
        torch.Size([50, 4])

    The idea of the gradient in the forward pass is Liger Kernel's (Hsu et al. 2024).
    """
    hidden, weight = cast_factors("linear_cross_entropy", hidden, weight, labels, chunk)
    if chunk is None and _fits_at_once(weight, labels):
        return cross_entropy(nn.functional.linear(hidden, weight), labels)
    return linear_in_chunks(hidden, weight, labels, _cross_entropy_, chunk=chunk)[0]


def linear_cross_entropy_per_token(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, chunk: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return `linear_cross_entropy` and each token's part of it, detached; 0 at ignored tokens.

    The parts exist anyway while the sum is made; they cost no further work.

    Args:
        hidden: what enters the output layer, `[..., D]`.
        weight: the output layer's weight `[V, D]`, same dtype and device.
        labels: the next token of each position, int64 `[...]`; -100 is ignored.
        chunk: as in `linear_cross_entropy`.

    Returns:
        The scalar of `linear_cross_entropy`, to the last bit, and the parts, fp32 or fp64 `[...]`.

    Raises:
        ValueError: if shapes or dtypes do not match or `chunk` is below 1.

    Examples:
        >>> import torch
        >>> labels = torch.tensor([0, -100, 2])
        >>> linear_cross_entropy_per_token(torch.zeros(3, 8), torch.zeros(4, 8), labels)
        (tensor(2.7726), tensor([1.3863, 0.0000, 1.3863]))
    """
    where = "linear_cross_entropy_per_token"
    hidden, weight = cast_factors(where, hidden, weight, labels, chunk)
    if chunk is None and _fits_at_once(weight, labels):
        return cross_entropy_per_token(nn.functional.linear(hidden, weight), labels)
    return linear_in_chunks(hidden, weight, labels, _cross_entropy_, chunk=chunk)


# ------------------------------------------------------------------------------- for any softmax


def cast_factors(
    where: str, hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int | None
) -> tuple[Tensor, Tensor]:
    """Refuse factors that do not fit, and cast them under autocast as a linear layer would.

    Args:
        where: who asks, for the message.
        hidden: what enters the output layer, `[..., D]`.
        weight: rows of the output layer's weight, `[V, D]`, or this rank's of them.
        labels: int64 `[...]`.
        chunk: as in `linear_cross_entropy`.

    Raises:
        ValueError: if shapes or dtypes do not match or `chunk` is below 1.

    Examples:
        >>> import torch
        >>> labels = torch.tensor([0, 2])
        >>> cast_factors("mine", torch.zeros(2, 8), torch.zeros(4, 9), labels, None)
        Traceback (most recent call last):
        ...
        ValueError: mine: weight must have shape (vocabulary, 8) for ... got (4, 9)
    """
    check_labels(where, hidden, labels)
    if weight.ndim != 2 or weight.shape[1] != hidden.shape[-1]:
        raise ValueError(
            f"{where}: weight must have shape (vocabulary, {hidden.shape[-1]}) for "
            f"hidden states of shape {tuple(hidden.shape)}, got {tuple(weight.shape)}"
        )
    autocast = torch.is_autocast_enabled(hidden.device.type)
    if hidden.dtype != weight.dtype and not autocast:
        raise ValueError(
            f"{where}: hidden and weight must have one dtype, got {hidden.dtype} and {weight.dtype}"
        )
    if chunk is not None and chunk < 1:
        raise ValueError(f"{where}: chunk must be at least 1, got {chunk}")
    if autocast:
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    return hidden, weight


def linear_in_chunks(
    hidden: Tensor, weight: Tensor, labels: Tensor, softmax: Softmax, *, chunk: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return the sum of the losses of `hidden @ weight.T`, and each token's, detached `[...]`.

    Args:
        hidden: what enters the output layer, `[..., D]`.
        weight: the output layer's weight `[V, D]`, or this rank's rows of it.
        labels: int64 `[...]`.
        softmax: what makes losses and their gradient of the logits of a chunk.
        chunk: as in `linear_cross_entropy`.

    Examples:
        >>> import torch
        >>> def largest(logits, labels, gradient):
        ...     return logits.amax(-1)
        >>> hidden, labels = torch.tensor([[1.0], [2.0]]), torch.tensor([0, 0])
        >>> linear_in_chunks(hidden, torch.ones(3, 1), labels, largest, chunk=1)
        (tensor(3.), tensor([1., 2.]))
    """
    if chunk is None:
        chunk = max(1, weight.shape[1] // 2, _SMALL // len(weight))
    compute = partial(_chunk_by_chunk, softmax=softmax, chunk=chunk)
    rows = hidden.flatten(0, -2)
    total, parts = run_untraced(_InChunks, rows, weight, labels.flatten(), compute)
    return total, parts.view(labels.shape)


def run_untraced(function: type[torch.autograd.Function], *args: Any) -> Any:
    """Run a Function as it is inside `torch.compile`, and without gradients where none are wanted.

    Traced, 512 tokens of the benchmark of `linear_cross_entropy` take twice the memory.

    Examples:
        >>> import torch
        >>> class Doubled(torch.autograd.Function):
        ...     @staticmethod
        ...     def forward(ctx, x):
        ...         return 2 * x, ctx.needs_input_grad[0]
        >>> with torch.no_grad():
        ...     run_untraced(Doubled, torch.ones(1, requires_grad=True))
        (tensor([2.]), False)
    """
    if not torch.is_grad_enabled():  # which a Function does not ask
        args = tuple(x.detach() if isinstance(x, Tensor) else x for x in args)
    run = function.apply
    if torch.compiler.is_compiling():
        run = torch.compiler.disable(run)
    return run(*args)


def _fits_at_once(weight: Tensor, labels: Tensor) -> bool:
    return labels.numel() * len(weight) <= _SMALL and weight.dtype == accumulation_dtype(weight)


class _InChunks(torch.autograd.Function):
    """The sum and its parts, with gradients of the sum that are ready when forward returns.

    Torch declares both methods as taking and returning anything, and so they override it unsoundly.
    """

    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        compute: Callable[..., Any],
    ) -> tuple[Tensor, Tensor]:
        needs = ctx.needs_input_grad[0], ctx.needs_input_grad[1]
        losses, d_hidden, d_weight = compute(hidden, weight, labels, needs=needs)
        ctx.save_for_backward(d_hidden, d_weight)
        ctx.dtype = weight.dtype
        ctx.mark_non_differentiable(losses)
        return losses.sum(), losses

    @staticmethod
    @once_differentiable
    def backward(  # pyrefly: ignore[bad-override]
        ctx: Any,
        d_total: Tensor,
        _: Tensor,
    ) -> tuple[Tensor | None, ...]:
        # Not in place: a second backward over the same graph would scale twice. The weight's
        # gradient is cast after it is scaled: a sum over many tokens overflows fp16.
        d_hidden, d_weight = (g if g is None else g * d_total for g in ctx.saved_tensors)
        return d_hidden, d_weight if d_weight is None else d_weight.to(ctx.dtype), None, None


def _chunk_by_chunk(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    softmax: Softmax,
    chunk: int,
    needs: tuple[bool, bool],
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return losses `[N]` and the gradients that are needed; hidden `[N, D]`, weight `[V, D]`."""
    dtype, exact = weight.dtype, accumulation_dtype(weight)
    if not weight.is_cuda:  # only CUDA multiplies bf16 into fp32
        hidden, weight = hidden.to(exact), weight.to(exact)
    losses = hidden.new_zeros(len(hidden), dtype=exact)
    d_hidden = hidden.new_empty(hidden.shape) if needs[0] else None
    d_weight = weight.new_zeros(weight.shape, dtype=exact) if needs[1] else None
    # One buffer for all chunks: fresh memory for each would be cleared by the system each time.
    buffer = hidden.new_empty((min(chunk, len(hidden)), len(weight)), dtype=exact)
    for start in range(0, len(hidden), chunk):
        rows = slice(start, start + chunk)
        inputs = hidden[rows]
        logits = _product(inputs, weight.t(), out=buffer[: len(inputs)])
        losses[rows] = softmax(logits, labels[rows], any(needs))
        slopes = logits.to(weight.dtype)
        if d_hidden is not None:
            torch.mm(slopes, weight, out=d_hidden[rows])
        if d_weight is not None:
            _add_product_(d_weight, slopes.t(), inputs)
    return losses, d_hidden if d_hidden is None else d_hidden.to(dtype), d_weight


def _cross_entropy_(logits: Tensor, labels: Tensor, gradient: bool) -> Tensor:
    """Return each token's loss; turn its logits into the gradient of their sum: a `Softmax`."""
    ignored = (labels == IGNORED_LABEL).unsqueeze(-1)
    labels = labels.unsqueeze(-1).masked_fill(ignored, 0)
    picked = logits.sub_(logits.amax(-1, keepdim=True)).gather(-1, labels)
    total = logits.exp_().sum(-1, keepdim=True)
    if gradient:
        logits.mul_(total.reciprocal().masked_fill(ignored, 0))
        at_label = (picked.exp() / total - 1).masked_fill(ignored, 0)
        logits.scatter_(-1, labels, at_label)
    return (total.log() - picked).masked_fill(ignored, 0).squeeze(-1)


def _product(a: Tensor, b: Tensor, *, out: Tensor) -> Tensor:
    """Write a @ b into `out`, which is fp32 for bf16 factors (CUDA only)."""
    if a.dtype == out.dtype:
        return torch.mm(a, b, out=out)
    return torch.mm(a, b, out_dtype=out.dtype, out=out)


def _add_product_(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b to `total`, which is fp32 for bf16 factors (CUDA only)."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        total.add_(torch.mm(a, b, out_dtype=total.dtype))
