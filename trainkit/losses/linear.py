"""Cross entropy straight from hidden states and the output weight, without ever holding all logits.

The logits of a batch are its largest tensor by far: 2,048 tokens by 131,072 words take 1 GiB, and
the plain path holds three of them. Here they exist for one chunk of tokens at a time. Each chunk's
gradient is computed while its logits are there, in the forward pass, so that backward has nothing
left to do but multiply by the incoming scalar.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from trainkit.losses.logits import check_labels, cure_of, sum_and_parts, summed_cross_entropy
from trainkit.losses.shaping import UNSHAPED, Shaping, shaped_, unshaped_slopes_
from trainkit.losses.softmax import (
    Scores,
    accumulation_dtype,
    entropies_of,
    make_vocabulary_axis,
    run_untraced,
    scores_,
    slopes_,
)
from trainkit.types import IGNORED_LABEL, SOLO, Axis, VocabularyAxis, apply_softcap, check_range


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


class LabelColumns(Mapping[str, Tensor]):
    """The columns of a batch that hold a value for each label, by name.

    Where a token is ignored, what is read is 0, whatever the batch holds there. What is not read is
    not copied.

    Examples:
        >>> weights, ignored = torch.tensor([0.5, torch.nan]), torch.tensor([False, True])
        >>> LabelColumns({"weights": weights}, ignored)["weights"]
        tensor([0.5000, 0.0000])
        >>> LabelColumns({"weights": torch.ones(2)})["advantages"]
        Traceback (most recent call last):
        ...
        ValueError: the batch has no "advantages" for each of its labels (it has weights); ...
    """

    def __init__(self, columns: Mapping[str, Tensor], ignored: Tensor | None = None) -> None:
        self._columns, self._ignored = columns, ignored
        self._read = dict[str, Tensor]()

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._columns:
            has = ", ".join(self) or "no column"
            what = f'the batch has no "{name}" for each of its labels (it has {has})'
            raise ValueError(f"{what}; {cure_of(name)}")
        if name not in self._read:
            own = self._columns[name]
            self._read[name] = own if self._ignored is None else _cleared(own, self._ignored)
        return self._read[name]

    def __contains__(self, name: object) -> bool:
        return name in self._columns

    def get(self, name: str, default: Any = None) -> Any:
        """Return a column, or something else where there is none."""
        return self[name] if name in self._columns else default

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)


OfScores = Callable[[TokenScores, LabelColumns], Tensor]
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
    alone. Let `hidden` come from `collectives.all_gather` or go through `collectives.sum_grad`:
    these sum it, once.

    Args:
        hidden: What enters the output layer, `[..., D]`, equal on all ranks of the axis.
        weight: The output layer's weight `[V, D]`, same dtype and device; or this rank's rows of it
            `[V_r, D]`, in rank order: as many as it has, which may be none.
        labels: The next token of each position among all V words, int64 `[...]`; -100 is ignored.
        bias: The output layer's bias `[V]` or `[V_r]`, of the same dtype.
        softcap: What logits are kept between by tanh, above 0.
        axis: The axis over which the vocabulary is cut, if it is: `ps.tp`, or a
            `make_vocabulary_axis`.
        chunk: Tokens whose logits exist at a time. By default D / 2, so that they take half of the
            memory of the weight's gradient, or as many as fit into 16 MiB, if that is more; and if
            all fit into that, the plain path is taken, which has less overhead.

    Returns:
        A scalar, fp32 or fp64, equal on all ranks of the axis.

    Raises:
        ValueError: Shapes or dtypes do not match, `chunk` is below 1, `softcap` is not above 0, or
            as `cross_entropy`.

    Effects:
        Communicates: two all-reduces on `axis` per chunk, of one and of two numbers per token; as
        `make_vocabulary_axis`.

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
    axis = make_vocabulary_axis(weight, axis)
    factors = cast_factors(
        "linear_cross_entropy",
        hidden,
        weight,
        labels,
        bias=bias,
        softcap=softcap,
        axis=axis,
        chunk=chunk,
    )
    return linear_sum(factors, labels, axis=axis, chunk=chunk)


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
        Communicates as `make_vocabulary_axis`.

    Examples:
        >>> import torch
        >>> cast_factors("mine", torch.zeros(2, 8), torch.zeros(4, 9), torch.tensor([0, 2]))
        Traceback (most recent call last):
        ...
        ValueError: mine: weight must have shape (vocabulary, 8) for ... got (4, 9)
    """
    check_labels(where, hidden, labels, words=make_vocabulary_axis(weight, axis).total)
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
    if chunk is not None:
        check_range(where, at_least=1, chunk=chunk)
    if softcap is not None:
        check_range(where, above=0, softcap=softcap)
    dtype = torch.get_autocast_dtype(hidden.device.type) if autocast else weight.dtype
    cast = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    return Factors(*cast, softcap)


def linear_sum(
    factors: Factors, labels: Tensor, *, axis: Axis = SOLO, chunk: int | None = None
) -> Tensor:
    """Return `linear_cross_entropy` of factors that `cast_factors` has looked at.

    Effects:
        Communicates as `linear_cross_entropy`.

    Examples:
        >>> import torch
        >>> labels = torch.tensor([0, -100, 2])
        >>> linear_sum(Factors(torch.zeros(3, 8), torch.zeros(4, 8)), labels)
        tensor(2.7726)
    """
    if chunk is None and axis.count == 1 and _fits_at_once(factors.weight, labels):
        return summed_cross_entropy("", _whole_logits(factors), labels)
    return linear_terms(factors, labels, [(token_loss, 1.0)], axis=axis, chunk=chunk)[0]


def _whole_logits(factors: Factors) -> Tensor:
    hidden, weight, bias, softcap = factors
    return apply_softcap(nn.functional.linear(hidden, weight, bias), softcap)


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
    if chunk is None and axis.count == 1 and _fits_at_once(factors.weight, labels):
        return sum_and_parts("", _whole_logits(factors), labels, axis)
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

    return linear_in_chunks(factors, compute, axis=axis, chunk=chunk)


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
    known = LabelColumns(columns, ignored)
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


def token_loss(scores: TokenScores, _: LabelColumns) -> Tensor:
    """Return the cross entropy of each token: an `OfScores`.

    Examples:
        >>> one = torch.ones(1)
        >>> token_loss(TokenScores(one, 2 * one, lambda: 3 * one), LabelColumns({}))
        tensor([1.])
    """
    return scores.losses


def squared_normalizer(scores: TokenScores, _: LabelColumns) -> Tensor:
    """Return the squared log-sum-exp of each token's logits: an `OfScores`, the z-loss.

    Examples:
        >>> three = torch.full((1,), 3.0)
        >>> squared_normalizer(TokenScores(three, three, lambda: three), LabelColumns({}))
        tensor([9.])
    """
    return scores.normalizers.square()


def linear_in_chunks(
    factors: Factors, compute: OfLogits, *, axis: Axis = SOLO, chunk: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return the sum of the first column of what is computed of logits, and the other columns.

    Args:
        factors: What logits are made of, whole or this rank's part.
        compute: What makes values and the gradient of their first column of the logits of a chunk.
        axis: The axis over which the vocabulary is cut: all ranks take the same chunks.
        chunk: As in `linear_cross_entropy`.

    Returns:
        A scalar that can be differentiated, and detached values, those of all chunks one after
        another.

    Effects:
        Communicates as `compute` does.

    Examples:
        >>> import torch
        >>> def largest(logits, rows, gradient):
        ...     return logits.amax(-1, keepdim=True).expand(-1, 2)
        >>> factors = Factors(torch.tensor([[1.0], [2.0]]), torch.ones(3, 1))
        >>> linear_in_chunks(factors, largest, chunk=1)[0]
        tensor(3.)
    """
    hidden, weight, bias, softcap = factors
    how: dict[str, Any] = {"chunk": chunk or chunk_of(weight, axis), "softcap": softcap}
    walk = partial(_chunk_by_chunk, compute=compute, **how)
    return run_untraced(_InChunks, hidden.flatten(0, -2), weight, bias, walk)


def _fits_at_once(weight: Tensor, labels: Tensor) -> bool:
    return labels.numel() * len(weight) <= _SMALL and weight.dtype == accumulation_dtype(weight)


def chunk_of(weight: Tensor, axis: Axis = SOLO) -> int:
    """Return of how many tokens logits exist at a time, for an output weight `[V, D]`.

    It is the same on all ranks of an axis over which the vocabulary is cut, whatever their parts.

    Effects:
        None; `axis` only says how many words the ranks have.

    Examples:
        >>> import torch
        >>> chunk_of(torch.zeros(4096, 8))
        1024
    """
    words = axis.largest if isinstance(axis, VocabularyAxis) else len(weight)
    return max(1, weight.shape[1] // 2, _SMALL // words)


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


def cuts(size: int, part: int) -> list[slice]:
    """Return the parts of so many tokens or words, at least one.

    Examples:
        >>> cuts(5, 3)
        [slice(0, 3, None), slice(3, 5, None)]
    """
    return [slice(begin, min(begin + part, size)) for begin in range(0, max(1, size), part)]


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
    factors = exact_factors(Factors(hidden, weight, bias, softcap))
    hidden, weight = factors[:2]
    d_hidden = hidden.new_empty(hidden.shape) if needs[0] else None
    d_weight = weight.new_zeros(weight.shape, dtype=exact) if needs[1] else None
    d_bias = weight.new_zeros(len(weight), dtype=exact) if needs[2] else None
    # One buffer for all chunks: fresh memory for each would be cleared by the system each time.
    buffer = hidden.new_empty(min(chunk, len(hidden)) * len(weight), dtype=exact)
    values = []
    for rows in cuts(len(hidden), chunk):
        logits, steep = logits_of(factors, rows, slice(None), buffer, needs_slope=any(needs))
        values.append(compute(logits, rows, any(needs)))
        if steep is not None:
            logits.mul_(steep)
        slopes = logits.to(weight.dtype)
        if d_hidden is not None:
            torch.mm(slopes, weight, out=d_hidden[rows])
        if d_weight is not None:
            add_product_(d_weight, slopes.t(), hidden[rows])
        if d_bias is not None:
            d_bias.add_(logits.sum(0))
    return torch.cat(values), (
        d_hidden if d_hidden is None else d_hidden.to(dtype),
        d_weight,
        d_bias,
    )


def logits_maker(factors: Factors) -> Callable[..., Tensor]:
    """Return a function that makes the logits of some tokens, in one buffer for all calls.

    Args:
        factors: Hidden states `[N, D]` and what makes logits of them, whole or this rank's part.

    Returns:
        From the numbers of tokens, and of words if not all are asked, to their logits, fp32 or
        fp64, that may be overwritten; the first call asks for the most.

    Examples:
        >>> import torch
        >>> make = logits_maker(Factors(torch.ones(3, 2), torch.ones(4, 2)))
        >>> make(slice(0, 2)).shape, make(slice(2, 3), slice(0, 2)).shape
        (torch.Size([2, 4]), torch.Size([1, 2]))
    """
    known, exact, buffers = (
        exact_factors(factors),
        accumulation_dtype(factors.weight),
        list[Tensor](),
    )

    def make(rows: slice, words: slice = slice(None)) -> Tensor:
        if not buffers:
            size = len(known.hidden[rows]) * len(known.weight[words])
            buffers.append(known.hidden.new_empty(size, dtype=exact))
        return logits_of(known, rows, words, buffers[0], needs_slope=False)[0]

    return make


def exact_factors(factors: Factors) -> Factors:
    """Return factors as they are multiplied: only CUDA multiplies bf16 into fp32.

    Examples:
        >>> import torch
        >>> two = torch.zeros(2, 8, dtype=torch.bfloat16)
        >>> exact_factors(Factors(two, two)).weight.dtype
        torch.float32
    """
    if factors.weight.is_cuda:
        return factors
    exact = accumulation_dtype(factors.weight)
    return factors._replace(hidden=factors.hidden.to(exact), weight=factors.weight.to(exact))


def logits_of(
    factors: Factors, rows: slice, words: slice, buffer: Tensor, *, needs_slope: bool
) -> tuple[Tensor, Tensor | None]:
    """Return logits of some tokens and words, in a buffer, and the derivative of their cap.

    Args:
        factors: Those of `exact_factors`.
        rows: Which tokens.
        words: Which words.
        buffer: fp32 or fp64 `[N]`, large enough.
        needs_slope: Whether the derivative is asked.

    Effects:
        Overwrites the buffer.

    Examples:
        >>> import torch
        >>> factors, buffer = Factors(torch.ones(3, 2), torch.ones(4, 2)), torch.empty(8)
        >>> logits_of(factors, slice(1, 3), slice(0, 2), buffer, needs_slope=True)
        (tensor([[2., 2.],
                [2., 2.]]), None)
    """
    hidden, weight = factors.hidden[rows], factors.weight[words]
    own = buffer[: len(hidden) * len(weight)].view(len(hidden), len(weight))
    logits = _product(hidden, weight.t(), out=own)
    if factors.bias is not None:
        logits.add_(factors.bias[words])
    cap = factors.softcap
    return logits, None if cap is None else _capped_(logits, cap, needs_slope=needs_slope)


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


def add_product_(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b to `total`, which is fp32 for bf16 factors (CUDA only).

    Effects:
        Writes `total`.

    Examples:
        >>> import torch
        >>> total = torch.ones(1, 1)
        >>> add_product_(total, torch.ones(1, 2), torch.ones(2, 1))
        >>> total
        tensor([[3.]])
    """
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
