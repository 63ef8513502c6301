"""Cross entropy straight from hidden states and the output weight, without ever holding all logits.

The logits of a batch are its largest tensor by far: 2,048 tokens by 131,072 words take 1 GiB, and
the plain path holds three of them. Here they exist for one chunk of tokens at a time. Each chunk's
gradient is computed while its logits are there, in the forward pass, so that backward has nothing
left to do but multiply by the incoming scalar.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from trainkit.losses.logits import check_labels, sum_and_parts
from trainkit.losses.shaping import UNSHAPED, Each, Shaping, shaped_, unshaped_slopes_
from trainkit.losses.softmax import (
    Scores,
    accumulation_dtype,
    entropies_of,
    run_untraced,
    scores_,
    slopes_,
)
from trainkit.types import IGNORED_LABEL, SOLO, Axis, at_least, capped


class Factors(NamedTuple):
    """Hidden states `[..., D]`, the output weight and its bias: whole, or this rank's rows of them.

    With a `softcap` c the logits are c * tanh of the product divided by c (`types.capped`).
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None = None
    softcap: float | None = None


class TokenScores:
    """What the logits of T tokens come to: `losses`, `normalizers` and `entropies`, `[T]` each.

    `losses` are the cross entropies of the labels, `normalizers` the log-sum-exps of the logits.
    Where the label is -100, a loss is 0. Entropies cost a walk over the logits, if they are asked.
    """

    def __init__(self, losses: Tensor, normalizers: Tensor, measure: Callable[[], Tensor]) -> None:
        self.losses, self.normalizers, self._measure = losses, normalizers, measure

    @cached_property
    def entropies(self) -> Tensor:
        """The entropy of each token's softmax, in nats."""
        return self._measure()

    @property
    def leaves(self) -> list[Tensor]:
        """What a term may have used: losses, normalizers, and entropies if any has asked."""
        own = [self.losses, self.normalizers]
        return [*own, self.entropies] if "entropies" in vars(self) else own


class Columns(dict[str, Tensor]):
    """The columns of a batch that hold a value for each label, by name.

    Examples:
        >>> Columns({"weights": torch.ones(2)})["advantages"]
        Traceback (most recent call last):
        ...
        ValueError: the batch has no "advantages" for each of its labels (it has weights); ...
    """

    def __missing__(self, name: str) -> Tensor:
        has = ", ".join(self) or "no column"
        what = f'the batch has no "{name}" for each of its labels (it has {has})'
        raise ValueError(f"{what}; put a tensor of the shape of the labels under this name")


OfScores = Callable[[TokenScores, Columns], Tensor]
"""From the scores of T tokens and what stands beside them in the batch to what each adds, `[T]`."""

OfLogits = Callable[[Tensor, slice, bool], Tensor]
"""From logits `[T, V]` and which tokens they are of, to values `[T or 1, K]`.

With True as the third argument, the logits are overwritten by the gradient of the sum of the first
column; else they may hold anything afterwards.
"""

_SMALL = 2**22  # elements, 16 MiB of fp32: logits below this are not worth splitting further


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    axis: Axis = SOLO,
    chunk: int | None = None,
) -> Tensor:
    """Return `cross_entropy(hidden @ weight.T, labels)` without holding all logits at once.

    The loss and the weight's gradient are accumulated in fp32 (fp64 stays fp64); gradients are cast
    to the dtype of their input once, at the end. Only the gradients that are needed are computed,
    none under `torch.no_grad()`. Ignored tokens are treated as in `cross_entropy`; they cost their
    share of the time, since leaving them out would need a host sync. Factors in bf16 are multiplied
    as they are on CUDA, with fp32 results, and in fp32 elsewhere. Under autocast the inputs are
    cast first, as a linear layer would.

    A soft cap is applied to each chunk's logits, which takes as much memory once more.

    Chunks have no second derivative, and run as they are inside `torch.compile`, which would
    otherwise keep several of them at a time.

    Over an `axis` of several ranks, the gradient of `hidden` is this rank's part, of its words
    alone. Let `hidden` come from `collectives.gather_dim` or go through `collectives.sum_grad`:
    these sum it, once.

    Args:
        hidden: What enters the output layer, `[..., D]`, equal on all ranks of the axis.
        weight: The output layer's weight `[V, D]`, same dtype and device; or this rank's rows of it
            `[V / N, D]`, in rank order.
        labels: The next token of each position among all V words, int64 `[...]`; -100 is ignored.
        bias: The output layer's bias `[V]` or `[V / N]`, of the same dtype.
        softcap: What logits are kept between by tanh.
        axis: The axis over which the vocabulary is cut, if it is: `ps.tp`.
        chunk: Tokens whose logits exist at a time. By default D / 2, so that they take half of the
            memory of the weight's gradient, or as many as fit into 16 MiB, if that is more; and if
            all fit into that, the plain path is taken, which has less overhead.

    Returns:
        A scalar, fp32 or fp64, equal on all ranks of the axis.

    Raises:
        ValueError: Shapes or dtypes do not match, `chunk` is below 1, or as `cross_entropy`.

    Effects:
        Communicates: two all-reduces on `axis` per chunk, of one and of two numbers per token.

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
    known: dict[str, Any] = {"bias": bias, "softcap": softcap, "axis": axis, "chunk": chunk}
    factors = cast_factors("linear_cross_entropy", hidden, weight, labels, **known)
    return linear_sum_and_parts(factors, labels, axis=axis, chunk=chunk)[0]


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: Each = 1.0,
    top_k: int | Tensor | None = None,
    top_p: Each = 1.0,
    min_p: Each = 0.0,
    softcap: float | None = None,
    axis: Axis = SOLO,
    chunk: int | None = None,
) -> Tensor:
    """Return the log-probability of each label, differentiable; 0 where the label is -100.

    It is the one by which a sampler with these settings has drawn the label; see
    `generation.Sampling`, whose order and code it shares. Without settings it is the cross entropy
    of `hidden @ weight.T`, negated. Whole logits exist for `chunk` tokens at a time: how the
    log-probabilities go on is not known before backward, which computes the logits of every chunk
    again, one product more than `linear_cross_entropy`. Where words are left out, the logits of a
    chunk are gathered on `axis`. A label that is left out has the log-probability -inf, and no
    gradient.

    Args:
        hidden: As in `linear_cross_entropy`, `[..., D]`.
        weight: `[V, D]`, or this rank's rows of it.
        labels: int64 `[...]`.
        bias: `[V]`, or this rank's part of it.
        temperature: What logits are divided by, above 0; a number, or a tensor `[...]` with one for
            each label, as the three that follow.
        top_k: How many of the likeliest words may be drawn; of equals there may be more.
        top_p: The likeliest words that together have this much.
        min_p: Words that are at least this likely, relative to the likeliest.
        softcap: What logits are kept between by tanh, before all else.
        axis: The axis over which the vocabulary is cut.
        chunk: Tokens whose logits exist at a time.

    Returns:
        fp32 or fp64 `[...]`, equal on all ranks of the axis.

    Raises:
        ValueError: As `linear_cross_entropy`, or a setting has another shape than the labels.

    Effects:
        Communicates as `linear_cross_entropy`, and gathers the logits of a chunk on `axis` where
        words are left out.

    Examples:
        >>> import torch
        >>> hidden, weight = torch.ones(3, 1), torch.tensor([[2.0], [2.0], [1.0]])
        >>> token_logprobs(hidden, weight, torch.tensor([0, -100, 2]))
        tensor([-0.8620,  0.0000, -1.8620])
        >>> token_logprobs(hidden, weight, torch.tensor([0, -100, 2]), top_k=2)
        tensor([-0.6931,  0.0000,    -inf])
    """
    known: dict[str, Any] = {"bias": bias, "softcap": softcap, "axis": axis, "chunk": chunk}
    factors = cast_factors("token_logprobs", hidden, weight, labels, **known)
    shaping = Shaping(temperature, top_k, top_p, min_p)
    return logprobs_of(factors, labels, shaping=shaping, axis=axis, chunk=chunk)[0]


def logprobs_of(
    factors: Factors,
    labels: Tensor,
    *,
    shaping: Shaping = UNSHAPED,
    axis: Axis = SOLO,
    chunk: int | None = None,
    entropies: bool = False,
) -> tuple[Tensor, ...]:
    """Return `token_logprobs`, and, if they are asked, the entropies of the same distributions.

    Raises:
        ValueError: A setting has another shape than the labels.

    Effects:
        Communicates as `token_logprobs`.

    Examples:
        >>> import torch
        >>> factors = Factors(torch.zeros(2, 8), torch.zeros(4, 8))
        >>> logprobs_of(factors, torch.tensor([0, -100]), entropies=True)
        (tensor([-1.3863,  0.0000]), tensor([1.3863, 0.0000]))
    """
    hidden, weight, bias, softcap = factors
    flat, chunk = labels.flatten(), chunk or _chunk_of(weight)
    how = shaping.flat("token_logprobs", labels)
    asked = flat, axis, how, entropies, {"chunk": chunk, "softcap": softcap}
    found = run_untraced(_EachToken, hidden.flatten(0, -2), weight, bias, asked)
    ignored = flat == IGNORED_LABEL
    return tuple(x.masked_fill(ignored, 0).view(labels.shape) for x in found)


# -------------------------------------------------------------------------------------- one pass


def cast_factors(
    where: str,
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    axis: Axis = SOLO,
    chunk: int | None = None,
) -> Factors:
    """Refuse factors that do not fit, and cast them under autocast as a linear layer would.

    The arguments are those of `linear_cross_entropy`; `where` is who asks, for the message.

    Raises:
        ValueError: As `linear_cross_entropy`.

    Effects:
        None; `axis` only says how many words there are.

    Examples:
        >>> import torch
        >>> cast_factors("mine", torch.zeros(2, 8), torch.zeros(4, 9), torch.tensor([0, 2]))
        Traceback (most recent call last):
        ...
        ValueError: mine: weight must have shape (vocabulary, 8) for ... got (4, 9)
    """
    check_labels(where, hidden, labels, words=len(weight) * axis.count)
    if weight.ndim != 2 or weight.shape[1] != hidden.shape[-1]:
        must = f"(vocabulary, {hidden.shape[-1]}) for hidden states of shape {tuple(hidden.shape)}"
        raise ValueError(f"{where}: weight must have shape {must}, got {tuple(weight.shape)}")
    if bias is not None and bias.shape != weight.shape[:1]:
        must = f"({len(weight)},) for a weight of shape {tuple(weight.shape)}"
        raise ValueError(f"{where}: bias must have shape {must}, got {tuple(bias.shape)}")
    autocast = torch.is_autocast_enabled(hidden.device.type)
    dtypes = {x.dtype for x in (hidden, weight, bias) if x is not None}
    if len(dtypes) > 1 and not autocast:
        got = ", ".join(sorted(map(str, dtypes)))
        raise ValueError(f"{where}: hidden, weight and bias must have one dtype, got {got}")
    at_least(1, where, chunk=chunk)
    dtype = torch.get_autocast_dtype(hidden.device.type) if autocast else weight.dtype
    cast = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    return Factors(*cast, softcap)


def linear_sum_and_parts(
    factors: Factors, labels: Tensor, *, axis: Axis = SOLO, chunk: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return `linear_cross_entropy`, and each token's part of it, detached.

    Effects:
        Communicates as `linear_cross_entropy`.

    Examples:
        >>> import torch
        >>> labels = torch.tensor([0, -100, 2])
        >>> linear_sum_and_parts(Factors(torch.zeros(3, 8), torch.zeros(4, 8)), labels)
        (tensor(2.7726), tensor([1.3863, 0.0000, 1.3863]))
    """
    hidden, weight, bias, softcap = factors
    if chunk is None and axis.count == 1 and _fits_at_once(weight, labels):
        logits = capped(nn.functional.linear(hidden, weight, bias), softcap)
        return sum_and_parts("", logits, labels, axis)
    total, parts = linear_terms(factors, labels, [(token_loss, 1.0)], axis=axis, chunk=chunk)
    return total, parts.view(labels.shape)


def linear_terms(
    factors: Factors,
    labels: Tensor,
    terms: Sequence[tuple[OfScores, float]],
    *,
    beside: Mapping[str, Tensor] | None = None,
    shaping: Shaping = UNSHAPED,
    axis: Axis = SOLO,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the weighted sum of several terms of the same logits, and each token's, `[T, K]`.

    All come out of one pass over the chunks; the values are unweighted and detached. A term of
    weight 0 is only measured. Ignored tokens add 0, whatever stands beside them.

    Args:
        factors: What logits are made of, whole or this rank's part.
        labels: int64 `[...]`.
        terms: What each token adds, and how much of it counts in the sum.
        beside: Columns of the batch, `[..., *]`; others are left out.
        shaping: How logits are shaped first.
        axis: The axis over which the vocabulary is cut.
        chunk: As in `linear_cross_entropy`.

    Effects:
        Communicates as `token_logprobs`, and once more where entropies are asked.

    Examples:
        >>> import torch
        >>> terms = [(token_loss, 1.0), (squared_normalizer, 10.0)]
        >>> factors = Factors(torch.zeros(2, 8), torch.zeros(4, 8))
        >>> total, values = linear_terms(factors, torch.tensor([0, -100]), terms)
        >>> values
        tensor([[1.3863, 1.9218],
                [0.0000, 0.0000]])
    """
    columns, how = columns_of(beside or {}, labels), shaping.flat("linear_terms", labels)
    labels = labels.flatten()

    def compute(logits: Tensor, rows: slice, gradient: bool) -> Tensor:
        own, here = labels[rows], how.of(rows)
        found = scores_(shaped_(logits, here, axis), own, axis)
        scores = _leaves(found, logits, own, axis, gradient)
        part = {name: x[rows] for name, x in columns.items()}
        with torch.set_grad_enabled(gradient):
            total, values = weigh_terms(terms, scores, part, own)
            whole = total.sum()
        if gradient and whole.requires_grad:
            asked = {"allow_unused": True, "materialize_grads": True}
            d_losses, *others = torch.autograd.grad(whole, scores.leaves, **asked)
            d_losses = here.known(d_losses, found.losses)
            curved = (scores.entropies.detach(), others[1]) if len(others) > 1 else None
            slopes_(logits, own, axis, d_losses, others[0], scale=found.scale, curved=curved)
            unshaped_slopes_(logits, here)
        elif gradient:
            logits.zero_()
        return torch.stack([total, *values], dim=-1).detach()

    return linear_in_chunks(factors, compute, chunk=chunk)


def _leaves(
    found: Scores, logits: Tensor, labels: Tensor, axis: Axis, gradient: bool
) -> TokenScores:
    """Return scores as leaves of a graph; what a label that is ignored has is no number of it."""

    def measure() -> Tensor:
        with torch.no_grad():
            entropies = entropies_of(logits, found.scale, axis)
        return entropies.requires_grad_(gradient)

    losses = found.losses.masked_fill(labels == IGNORED_LABEL, 0)
    leaves = [x.requires_grad_(gradient) for x in (losses, found.normalizers)]
    return TokenScores(leaves[0], leaves[1], measure)


def weigh_terms(
    terms: Sequence[tuple[OfScores, float]],
    scores: TokenScores,
    columns: Mapping[str, Tensor],
    labels: Tensor,
) -> tuple[Tensor, list[Tensor]]:
    """Return the weighted sum of terms and each term, `[T]` each, with zeros at ignored labels.

    What stands beside an ignored token is not looked at: it may be NaN.

    Examples:
        >>> one = torch.ones(2)
        >>> scores, labels = TokenScores(one, one, lambda: one), torch.tensor([3, -100])
        >>> weighed = lambda scores, columns: scores.losses * columns["weights"]
        >>> columns = {"weights": torch.tensor([0.5, torch.nan])}
        >>> weigh_terms([(weighed, 2.0)], scores, columns, labels)
        (tensor([1., 0.]), [tensor([0.5000, 0.0000])])
    """
    ignored = labels == IGNORED_LABEL
    known = Columns({name: _cleared(x, ignored) for name, x in columns.items()})
    values = [term(scores, known).masked_fill(ignored, 0) for term, _ in terms]
    weighted = [w * x for (_, w), x in zip(terms, values, strict=True) if w]
    total = torch.stack(weighted).sum(0) if weighted else torch.zeros_like(scores.losses)
    return total, [x.to(total.dtype) for x in values]


def _cleared(x: Tensor, ignored: Tensor) -> Tensor:
    return x.masked_fill(ignored.view(-1, *(1,) * (x.ndim - 1)), 0)


def columns_of(batch: Mapping[str, Any], labels: Tensor) -> dict[str, Tensor]:
    """Return those tensors of a batch that begin with the dimensions of the labels, one for each.

    Examples:
        >>> batch = {"weights": torch.ones(2, 3), "spans": None, "scale": torch.ones(1)}
        >>> {name: x.shape for name, x in columns_of(batch, torch.zeros(2, 3)).items()}
        {'weights': torch.Size([6])}
    """
    dims = labels.ndim
    return {
        name: x.flatten(0, dims - 1)
        for name, x in batch.items()
        if isinstance(x, Tensor) and x.shape[:dims] == labels.shape
    }


def token_loss(scores: TokenScores, _: Columns) -> Tensor:
    """Return the cross entropy of each token: an `OfScores`.

    Examples:
        >>> one = torch.ones(1)
        >>> token_loss(TokenScores(one, 2 * one, lambda: 3 * one), Columns())
        tensor([1.])
    """
    return scores.losses


def squared_normalizer(scores: TokenScores, _: Columns) -> Tensor:
    """Return the squared log-sum-exp of each token's logits: an `OfScores`, the z-loss.

    Examples:
        >>> three = torch.full((1,), 3.0)
        >>> squared_normalizer(TokenScores(three, three, lambda: three), Columns())
        tensor([9.])
    """
    return scores.normalizers.square()


def linear_in_chunks(
    factors: Factors, compute: OfLogits, *, chunk: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return the sum of the first column of what is computed of logits, and the other columns.

    Args:
        factors: What logits are made of, whole or this rank's part.
        compute: What makes values and the gradient of their first column of the logits of a chunk.
        chunk: As in `linear_cross_entropy`.

    Returns:
        A scalar that can be differentiated, and detached values, those of all chunks one after
        another.

    Examples:
        >>> import torch
        >>> def largest(logits, rows, gradient):
        ...     return logits.amax(-1, keepdim=True).expand(-1, 2)
        >>> factors = Factors(torch.tensor([[1.0], [2.0]]), torch.ones(3, 1))
        >>> linear_in_chunks(factors, largest, chunk=1)[0]
        tensor(3.)
    """
    hidden, weight, bias, softcap = factors
    how: dict[str, Any] = {"chunk": chunk or _chunk_of(weight), "softcap": softcap}
    walk = partial(_chunk_by_chunk, compute=compute, **how)
    return run_untraced(_InChunks, hidden.flatten(0, -2), weight, bias, walk)


def _fits_at_once(weight: Tensor, labels: Tensor) -> bool:
    return labels.numel() * len(weight) <= _SMALL and weight.dtype == accumulation_dtype(weight)


def _chunk_of(weight: Tensor) -> int:
    return max(1, weight.shape[1] // 2, _SMALL // len(weight))


class _InChunks(torch.autograd.Function):
    """A sum and values beside it, with gradients of the sum that are ready when forward returns.

    Torch declares both methods as taking and returning anything, and so they override it unsoundly.
    """

    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        walk: Callable[..., Any],
    ) -> tuple[Tensor, Tensor]:
        values, gradients = walk(hidden, weight, bias, needs=ctx.needs_input_grad[:3])
        ctx.save_for_backward(*gradients)
        ctx.dtype, beside = weight.dtype, values[:, 1:]
        ctx.mark_non_differentiable(beside)
        return values[:, 0].sum(), beside

    @staticmethod
    @once_differentiable
    def backward(  # pyrefly: ignore[bad-override]
        ctx: Any, d_total: Tensor, _: Tensor
    ) -> tuple[Tensor | None, ...]:
        # Not in place: a second backward over the same graph would scale twice. The weight's
        # gradient is cast after it is scaled: a sum over many tokens overflows fp16.
        scaled = [g if g is None else (g * d_total).to(ctx.dtype) for g in ctx.saved_tensors]
        return *scaled, None


class _EachToken(torch.autograd.Function):
    """Log-probabilities and entropies of tokens; backward computes the logits again."""

    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        asked: tuple[Tensor, Axis, Shaping, bool, dict[str, Any]],
    ) -> tuple[Tensor, ...]:
        labels, axis, shaping, entropies, how = asked

        def compute(logits: Tensor, rows: slice, _: bool) -> Tensor:
            found = scores_(shaped_(logits, shaping.of(rows), axis), labels[rows], axis)
            more = [entropies_of(logits, found.scale, axis)] if entropies else []
            return torch.stack([*found[:2], *more], dim=-1)

        none = (False,) * 3
        values, _ = _chunk_by_chunk(hidden, weight, bias, compute=compute, **how, needs=none)
        losses, normalizers, *more = values.unbind(-1)
        ctx.save_for_backward(hidden, weight, bias, labels, losses, normalizers, *more)
        ctx.how = axis, shaping, how
        # No views: of several outputs of a Function they could not be changed.
        return -losses, *(x.clone() for x in more)

    @staticmethod
    @once_differentiable
    def backward(  # pyrefly: ignore[bad-override]
        ctx: Any, d_logprobs: Tensor, *d_entropies: Tensor
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels, losses, normalizers, *entropies = ctx.saved_tensors
        axis, shaping, how = ctx.how

        def compute(logits: Tensor, rows: slice, _: bool) -> Tensor:
            here = shaping.of(rows)
            shaped_(logits, here, axis).sub_(normalizers[rows, None]).exp_()
            d = here.known(-d_logprobs[rows], losses[rows])
            curved = (entropies[0][rows], d_entropies[0][rows]) if entropies else None
            slopes_(logits, labels[rows], axis, d, torch.zeros_like(d), curved=curved)
            unshaped_slopes_(logits, here)
            return d[:, None]

        needs = ctx.needs_input_grad[:3]
        _, gradients = _chunk_by_chunk(hidden, weight, bias, compute=compute, **how, needs=needs)
        return *(g if g is None else g.to(weight.dtype) for g in gradients), None


def _chunk_by_chunk(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    compute: OfLogits,
    chunk: int,
    softcap: float | None,
    needs: Sequence[bool],
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """Return values and the gradients that are needed; hidden `[N, D]`, weight `[V, D]`."""
    dtype, exact = weight.dtype, accumulation_dtype(weight)
    if not weight.is_cuda:  # only CUDA multiplies bf16 into fp32
        hidden, weight = hidden.to(exact), weight.to(exact)
    d_hidden = hidden.new_empty(hidden.shape) if needs[0] else None
    d_weight = weight.new_zeros(weight.shape, dtype=exact) if needs[1] else None
    d_bias = weight.new_zeros(len(weight), dtype=exact) if needs[2] else None
    # One buffer for all chunks: fresh memory for each would be cleared by the system each time.
    buffer = hidden.new_empty((min(chunk, len(hidden)), len(weight)), dtype=exact)
    values = []
    for start in range(0, max(1, len(hidden)), chunk):
        rows = slice(start, start + chunk)
        inputs = hidden[rows]
        logits = _product(inputs, weight.t(), out=buffer[: len(inputs)])
        if bias is not None:
            logits.add_(bias)
        steep = None if softcap is None else _capped_(logits, softcap, needs_slope=any(needs))
        values.append(compute(logits, rows, any(needs)))
        if steep is not None:
            logits.mul_(steep)
        slopes = logits.to(weight.dtype)
        if d_hidden is not None:
            torch.mm(slopes, weight, out=d_hidden[rows])
        if d_weight is not None:
            _add_product_(d_weight, slopes.t(), inputs)
        if d_bias is not None:
            d_bias.add_(logits.sum(0))
    return torch.cat(values), (
        d_hidden if d_hidden is None else d_hidden.to(dtype),
        d_weight,
        d_bias,
    )


def logits_maker(factors: Factors) -> Callable[[slice], Tensor]:
    """Return a function that makes the logits of some tokens, in one buffer for all calls.

    Args:
        factors: Hidden states `[N, D]` and what makes logits of them, whole or this rank's part.

    Returns:
        From the numbers of tokens to their logits, fp32 or fp64, that may be overwritten; the first
        call asks for the most tokens.

    Examples:
        >>> import torch
        >>> make = logits_maker(Factors(torch.ones(3, 2), torch.ones(4, 2)))
        >>> make(slice(0, 2)).shape, make(slice(2, 4)).shape
        (torch.Size([2, 4]), torch.Size([1, 4]))
    """
    hidden, weight, bias, softcap = factors
    exact = accumulation_dtype(weight)
    if not weight.is_cuda:
        hidden, weight = hidden.to(exact), weight.to(exact)
    buffers: list[Tensor] = []

    def make(rows: slice) -> Tensor:
        inputs = hidden[rows]
        if not buffers:
            buffers.append(inputs.new_empty((len(inputs), len(weight)), dtype=exact))
        logits = _product(inputs, weight.t(), out=buffers[0][: len(inputs)])
        if bias is not None:
            logits.add_(bias)
        if softcap is not None:
            _capped_(logits, softcap, needs_slope=False)
        return logits

    return make


def _capped_(logits: Tensor, softcap: float, *, needs_slope: bool) -> Tensor | None:
    """Apply a soft cap to logits in place, and return its derivative there if it is needed."""
    logits.div_(softcap).tanh_()
    slope = 1 - logits.square() if needs_slope else None
    logits.mul_(softcap)
    return slope


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
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
