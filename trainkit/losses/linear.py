"""Cross entropy from hidden states and the output weight, without materializing all logits.

The logits of a batch are its largest tensor by far: 2,048 tokens with a vocabulary of 131,072 take
1 GiB, and the plain path needs three of them. Here they exist for one chunk of tokens at a time.
The gradient of a chunk is computed in the forward pass, while its logits exist, so that backward
only multiplies by the incoming scalar.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from trainkit.losses.logits import (
    check_labels,
    get_column_hint,
    sum_and_parts,
    sum_cross_entropy,
)
from trainkit.losses.shaping import UNSHAPED, Shaping, apply_shaping_, undo_shaping_
from trainkit.losses.softmax import (
    Scores,
    accumulation_dtype,
    compute_entropies,
    make_vocabulary_axis,
    run_untraced,
    scores_,
    slopes_,
)
from trainkit.types import IGNORED_LABEL, SOLO, Axis, VocabularyAxis, apply_softcap, check_range


class Factors(NamedTuple):
    """Hidden states `[..., D]`, the output weight and its bias, full or this rank's rows.

    With a `softcap` c the logits are c * tanh of the product divided by c (`apply_softcap`).
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None = None
    softcap: float | None = None


class TokenScores:
    """The scores of T tokens: `losses`, `normalizers` and `entropies`, `[T]` each.

    `losses` are the cross entropies of the labels, 0 where the label is -100. `normalizers` are the
    log-sum-exps of the logits. Entropies are computed on first use, in one pass over the logits.
    """

    def __init__(self, losses: Tensor, normalizers: Tensor, measure: Callable[[], Tensor]) -> None:
        self.losses = losses
        self.normalizers = normalizers
        self._measure = measure

    @cached_property
    def entropies(self) -> Tensor:
        """The entropy of each token's softmax, in nats."""
        return self._measure()

    @property
    def leaves(self) -> list[Tensor]:
        """The tensors that terms may depend on; entropies only if a term has used them."""
        used = [self.losses, self.normalizers]
        return [*used, self.entropies] if "entropies" in vars(self) else used


class LabelColumns(Mapping[str, Tensor]):
    """The columns of a batch with a value for each label, by name.

    Values of ignored tokens read as 0, whatever the batch has there. Columns that are not read are
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
        self._columns = columns
        self._ignored = ignored
        self._cache = dict[str, Tensor]()

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._columns:
            raise ValueError(
                f'the batch has no "{name}" for each of its labels (it has '
                f"{', '.join(self) or 'no column'}); {get_column_hint(name)}"
            )
        if name not in self._cache:
            x = self._columns[name]
            if self._ignored is not None:
                # [T, 1, ...], for columns [T] and [T, k].
                is_ignored = self._ignored.view(-1, *(1,) * (x.ndim - 1))
                x = x.masked_fill(is_ignored, 0)
            self._cache[name] = x
        return self._cache[name]

    # Mapping's own methods read the column to see whether it exists, and expect a KeyError.
    def __contains__(self, name: object) -> bool:
        return name in self._columns

    def get(self, name: str, default: Any = None) -> Any:
        """Return a column, or `default` if there is none."""
        return self[name] if name in self._columns else default

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)


OfScores = Callable[[TokenScores, LabelColumns], Tensor]
"""`OfScores(scores, columns) -> values`: a term of the loss of T tokens, `[T]`."""

OfLogits = Callable[[Tensor, slice, bool], Tensor]
"""`OfLogits(logits, rows, gradient) -> values`: from logits `[T, V]` of rows to `[T or 1, K]`.

With `gradient` it overwrites the logits with the gradient of the sum of the first column; without,
they may hold anything afterwards.
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

    The loss and the gradient of the weight are accumulated in fp32 (fp64 stays fp64); gradients are
    cast to the dtype of their input once, at the end. Only the gradients that are needed are
    computed, none under `torch.no_grad()`. Ignored tokens are handled as in `cross_entropy`, and
    cost as much time as others, because dropping them would need a host sync. Factors in bf16 are
    multiplied in bf16 on CUDA, with fp32 results, and in fp32 elsewhere. Under autocast the inputs
    are cast first, as by a linear layer.

    A soft cap on the logits needs the memory of a second chunk.

    Chunks have no second derivative. They are not traced by `torch.compile`, which would keep
    several of them at a time.

    Over an `axis` of several ranks, the gradient of `hidden` is the addend of this rank's part of
    the vocabulary. Use a `hidden` from `collectives.all_gather` or `collectives.sum_grad`, which
    sum it once.

    Args:
        hidden: The input of the output layer, `[..., D]`, equal on all ranks of the axis.
        weight: The output layer's weight `[V, D]`, same dtype and device; or this rank's rows of it
            `[V_r, D]`, in rank order; a rank may have none.
        labels: The next token of each position among all V words, int64 `[...]`; -100 is ignored.
        bias: The output layer's bias `[V]` or `[V_r]`, of the same dtype.
        softcap: The bound of the logits, above 0, applied with tanh.
        axis: The axis over which the vocabulary is sharded: `ps.tp`, or a `make_vocabulary_axis`.
        chunk: The number of tokens whose logits exist at a time. The default is D / 2, half of the
            memory of the weight's gradient, or the number that fits into 16 MiB if that is more. If
            all tokens fit into 16 MiB the plain path is used, which has less overhead.

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
    """Check factors, and cast them under autocast as a linear layer does.

    The arguments are those of `linear_cross_entropy`; `where` is the calling function, for the
    message.

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
        raise ValueError(
            f"{where}: weight must have shape (vocabulary, {hidden.shape[-1]}) for hidden states "
            f"of shape {tuple(hidden.shape)}, got {tuple(weight.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"{where}: bias must have shape ({len(weight)},) for a weight of shape "
            f"{tuple(weight.shape)}, got {tuple(bias.shape)}"
        )
    # Autocast casts the inputs of a linear layer, but not those of an autograd Function.
    autocast = torch.is_autocast_enabled(hidden.device.type)
    dtypes = {x.dtype for x in (hidden, weight, bias) if x is not None}
    if len(dtypes) > 1 and not autocast:
        raise ValueError(
            f"{where}: hidden, weight and bias must have one dtype, got "
            f"{', '.join(sorted(map(str, dtypes)))}"
        )
    if chunk is not None:
        check_range(where, at_least=1, chunk=chunk)
    if softcap is not None:
        check_range(where, above=0, softcap=softcap)
    dtype = torch.get_autocast_dtype(hidden.device.type) if autocast else weight.dtype
    return Factors(
        hidden=hidden.to(dtype),
        weight=weight.to(dtype),
        bias=None if bias is None else bias.to(dtype),
        softcap=softcap,
    )


def linear_sum(
    factors: Factors, labels: Tensor, *, axis: Axis = SOLO, chunk: int | None = None
) -> Tensor:
    """Return `linear_cross_entropy` of factors from `cast_factors`.

    Effects:
        Communicates as `linear_cross_entropy`.

    Examples:
        >>> import torch
        >>> labels = torch.tensor([0, -100, 2])
        >>> linear_sum(Factors(torch.zeros(3, 8), torch.zeros(4, 8)), labels)
        tensor(2.7726)
    """
    # No name for messages: `cast_factors` has checked the arguments.
    if chunk is None and axis.count == 1 and _fits_at_once(factors.weight, labels):
        return sum_cross_entropy("", _compute_logits(factors), labels)
    return linear_terms(factors, labels, [(token_loss, 1.0)], axis=axis, chunk=chunk)[0]


def _compute_logits(factors: Factors) -> Tensor:
    hidden, weight, bias, softcap = factors
    return apply_softcap(nn.functional.linear(hidden, weight, bias), softcap)


def linear_sum_and_parts(
    factors: Factors, labels: Tensor, *, axis: Axis = SOLO, chunk: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return `linear_cross_entropy`, and the detached loss of each token.

    Effects:
        Communicates as `linear_cross_entropy`.

    Examples:
        >>> import torch
        >>> labels = torch.tensor([0, -100, 2])
        >>> linear_sum_and_parts(Factors(torch.zeros(3, 8), torch.zeros(4, 8)), labels)
        (tensor(2.7726), tensor([1.3863, 0.0000, 1.3863]))
    """
    if chunk is None and axis.count == 1 and _fits_at_once(factors.weight, labels):
        return sum_and_parts("", _compute_logits(factors), labels, axis)
    total, parts = linear_terms(factors, labels, [(token_loss, 1.0)], axis=axis, chunk=chunk)
    return total, parts.view(labels.shape)


def linear_terms(
    factors: Factors,
    labels: Tensor,
    terms: Sequence[tuple[OfScores, float]],
    *,
    batch: Mapping[str, Any] | None = None,
    shaping: Shaping = UNSHAPED,
    axis: Axis = SOLO,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the weighted sum of several terms of the same logits, and the terms `[T, K]`.

    All terms are computed in one pass over the chunks. Those that are returned are unweighted and
    detached. A term of weight 0 is only reported. Ignored tokens add 0, whatever their columns
    hold.

    Args:
        factors: The factors of the logits, full or this rank's rows.
        labels: int64 `[...]`.
        terms: Functions of tokens with their weights in the sum.
        batch: A mapping with columns `[..., *]`; other entries are not used.
        shaping: Sampling settings to apply to the logits.
        axis: The axis over which the vocabulary is sharded.
        chunk: As in `linear_cross_entropy`.

    Effects:
        Communicates as `token_logprobs`, and once more for entropies.

    Examples:
        >>> import torch
        >>> terms = [(token_loss, 1.0), (squared_normalizer, 10.0)]
        >>> factors = Factors(torch.zeros(2, 8), torch.zeros(4, 8))
        >>> total, values = linear_terms(factors, torch.tensor([0, -100]), terms)
        >>> values
        tensor([[1.3863, 1.9218],
                [0.0000, 0.0000]])
    """
    columns = select_columns(batch or {}, labels)
    flat_shaping = shaping.flat("linear_terms", labels)
    labels = labels.flatten()

    def compute(logits: Tensor, rows: slice, gradient: bool) -> Tensor:
        chunk_labels = labels[rows]
        chunk_shaping = flat_shaping.of(rows)
        # From here on `logits` holds exponentials, from which the entropies and the gradient
        # follow.
        scores = scores_(apply_shaping_(logits, chunk_shaping, axis), chunk_labels, axis)
        leaves = _make_leaves(scores, logits, chunk_labels, axis, gradient)
        chunk_columns = {name: x[rows] for name, x in columns.items()}
        with torch.set_grad_enabled(gradient):
            total, values = weigh_terms(terms, leaves, chunk_columns, chunk_labels)
            total_sum = total.sum()
        # A graph over [T] numbers: the terms give the derivatives by losses, normalizers and
        # entropies, and the chain rule to the logits is written out in `slopes_`.
        if gradient and total_sum.requires_grad:
            d_losses, d_normalizers, *d_entropies = torch.autograd.grad(
                total_sum, leaves.leaves, allow_unused=True, materialize_grads=True
            )
            slopes_(
                logits,
                chunk_labels,
                axis,
                chunk_shaping.known(d_losses, scores.losses),
                d_normalizers,
                scale=scores.scale,
                curved=(leaves.entropies.detach(), d_entropies[0]) if d_entropies else None,
            )
            undo_shaping_(logits, chunk_shaping)
        # No term depends on the logits: the gradient is 0.
        elif gradient:
            logits.zero_()
        return torch.stack([total, *values], dim=-1).detach()

    return linear_in_chunks(factors, compute, axis=axis, chunk=chunk)


def _make_leaves(
    scores: Scores, logits: Tensor, labels: Tensor, axis: Axis, gradient: bool
) -> TokenScores:
    """Convert scores to leaves of a graph, with losses of 0 at ignored labels."""

    def measure() -> Tensor:
        # Cut off from the logits: `slopes_` has the derivative of entropies by them.
        with torch.no_grad():
            entropies = compute_entropies(logits, scores.scale, axis)
        return entropies.requires_grad_(gradient)

    # An ignored token has the loss of some word, which terms must not see.
    losses = scores.losses.masked_fill(labels == IGNORED_LABEL, 0)
    losses.requires_grad_(gradient)
    normalizers = scores.normalizers.requires_grad_(gradient)
    return TokenScores(losses, normalizers, measure)


def weigh_terms(
    terms: Sequence[tuple[OfScores, float]],
    scores: TokenScores,
    columns: Mapping[str, Tensor],
    labels: Tensor,
) -> tuple[Tensor, list[Tensor]]:
    """Return the weighted sum of terms and each term, `[T]` each, with zeros at ignored labels.

    Columns may be NaN at ignored tokens.

    Examples:
        >>> one = torch.ones(2)
        >>> scores, labels = TokenScores(one, one, lambda: one), torch.tensor([3, -100])
        >>> weighed = lambda scores, columns: scores.losses * columns["weights"]
        >>> columns = {"weights": torch.tensor([0.5, torch.nan])}
        >>> weigh_terms([(weighed, 2.0)], scores, columns, labels)
        (tensor([1., 0.]), [tensor([0.5000, 0.0000])])
    """
    ignored = labels == IGNORED_LABEL
    label_columns = LabelColumns(columns, ignored)
    values = [term(scores, label_columns).masked_fill(ignored, 0) for term, _ in terms]
    # Terms of weight 0 are left out, not multiplied: 0 * inf would be NaN.
    weighted = [w * x for (_, w), x in zip(terms, values, strict=True) if w]
    total = torch.stack(weighted).sum(0) if weighted else torch.zeros_like(scores.losses)
    return total, [x.to(total.dtype) for x in values]


def select_columns(batch: Mapping[str, Any], labels: Tensor) -> dict[str, Tensor]:
    """Return the tensors of a batch whose first dimensions are those of the labels, flattened.

    Examples:
        >>> batch = {"weights": torch.ones(2, 3), "spans": None, "scale": torch.ones(1)}
        >>> {name: x.shape for name, x in select_columns(batch, torch.zeros(2, 3)).items()}
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
    """Apply a function to the logits of one chunk after another.

    Args:
        factors: The factors of the logits, full or this rank's rows.
        compute: Computes values of the logits of a chunk, and the gradient of the first column.
        axis: The axis over which the vocabulary is sharded; all ranks use the same chunks.
        chunk: As in `linear_cross_entropy`.

    Returns:
        The differentiable sum of the first column, and the other columns, detached, of all chunks.

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
    run_chunks = partial(
        _run_chunks,
        compute=compute,
        chunk=chunk or get_chunk_size(weight, axis),
        softcap=softcap,
    )
    # Tensors are arguments of the Function, whose gradients autograd asks for; the rest is bound.
    return run_untraced(_LinearInChunks, hidden.flatten(0, -2), weight, bias, run_chunks)


def _fits_at_once(weight: Tensor, labels: Tensor) -> bool:
    # In 16 bits the plain path would round the logits, which the chunks keep in fp32.
    is_exact = weight.dtype == accumulation_dtype(weight)
    return labels.numel() * len(weight) <= _SMALL and is_exact


def get_chunk_size(weight: Tensor, axis: Axis = SOLO) -> int:
    """Return the default number of tokens in a chunk, for an output weight `[V, D]`.

    It is equal on all ranks of an axis over which the vocabulary is sharded.

    Effects:
        None; of `axis` only the sizes of the ranks' shards are read.

    Examples:
        >>> import torch
        >>> get_chunk_size(torch.zeros(4096, 8))
        1024
    """
    # The largest shard decides, so that all ranks make equal chunks and meet in the collectives.
    words = axis.largest if isinstance(axis, VocabularyAxis) else len(weight)
    return max(1, weight.shape[1] // 2, _SMALL // words)


class _LinearInChunks(torch.autograd.Function):
    """A sum and further values; forward computes the gradients of the sum too.

    Torch declares both methods as taking and returning anything, so the type checker sees unsound
    overrides.
    """

    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        run_chunks: Callable[..., Any],
    ) -> tuple[Tensor, Tensor]:
        values, gradients = run_chunks(hidden, weight, bias, needs=ctx.needs_input_grad[:3])
        # Gradients for a derivative of 1 of the sum; backward multiplies them by the actual one.
        ctx.save_for_backward(*gradients)
        ctx.dtype = weight.dtype
        # Column 0 is the sum that is differentiated.
        others = values[:, 1:]
        ctx.mark_non_differentiable(others)
        return values[:, 0].sum(), others

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
    """Split `size` tokens or words into chunks of `part`; there is at least one.

    Examples:
        >>> cuts(5, 3)
        [slice(0, 3, None), slice(3, 5, None)]
    """
    # An empty slice for 0 tokens: a rank without tokens must join the collectives.
    starts = range(0, max(1, size), part)
    return [slice(start, min(start + part, size)) for start in starts]


def _run_chunks(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    compute: OfLogits,
    chunk: int,
    softcap: float | None,
    needs: Sequence[bool],
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """Return the values of all chunks and the gradients that are needed.

    `hidden` is `[N, D]`, `weight` `[V, D]`.
    """
    dtype = weight.dtype
    exact = accumulation_dtype(weight)
    factors = exact_factors(Factors(hidden, weight, bias, softcap))
    hidden, weight = factors[:2]
    # Each row of d_hidden is written once, so it needs no zeros and no fp32; d_weight sums over
    # all chunks.
    d_hidden = hidden.new_empty(hidden.shape) if needs[0] else None
    d_weight = weight.new_zeros(weight.shape, dtype=exact) if needs[1] else None
    d_bias = weight.new_zeros(len(weight), dtype=exact) if needs[2] else None
    # One buffer for all chunks: the system has to clear fresh memory, for each chunk again.
    largest_chunk = min(chunk, len(hidden))
    buffer = hidden.new_empty(largest_chunk * len(weight), dtype=exact)
    values = []
    for rows in cuts(len(hidden), chunk):
        logits, d_softcap = logits_of(factors, rows, slice(None), buffer, needs_slope=any(needs))
        values.append(compute(logits, rows, any(needs)))  # logits become their gradient
        if d_softcap is not None:
            logits.mul_(d_softcap)
        d_logits = logits.to(weight.dtype)
        if d_hidden is not None:
            torch.mm(d_logits, weight, out=d_hidden[rows])
        if d_weight is not None:
            add_product_(d_weight, d_logits.t(), hidden[rows])
        if d_bias is not None:
            d_bias.add_(logits.sum(0))
    return torch.cat(values), (
        d_hidden if d_hidden is None else d_hidden.to(dtype),
        d_weight,
        d_bias,
    )


def make_logits_function(factors: Factors) -> Callable[..., Tensor]:
    """Return make(rows, words), which computes logits in one buffer for all calls.

    Args:
        factors: Hidden states `[N, D]` with the weight, full or this rank's rows.

    Returns:
        A function from slices of tokens and of words (all by default) to their logits, fp32 or
        fp64, which may be overwritten. The first call must be the largest.

    Examples:
        >>> import torch
        >>> make = make_logits_function(Factors(torch.ones(3, 2), torch.ones(4, 2)))
        >>> make(slice(0, 2)).shape, make(slice(2, 3), slice(0, 2)).shape
        (torch.Size([2, 4]), torch.Size([1, 2]))
    """
    exact = accumulation_dtype(factors.weight)
    factors = exact_factors(factors)
    buffers: list[Tensor] = []

    def make(rows: slice, words: slice = slice(None)) -> Tensor:
        if not buffers:
            size = len(factors.hidden[rows]) * len(factors.weight[words])
            buffers.append(factors.hidden.new_empty(size, dtype=exact))
        return logits_of(factors, rows, words, buffers[0], needs_slope=False)[0]

    return make


def exact_factors(factors: Factors) -> Factors:
    """Convert factors to the dtype they are multiplied in: only CUDA multiplies bf16 into fp32.

    Examples:
        >>> import torch
        >>> two = torch.zeros(2, 8, dtype=torch.bfloat16)
        >>> exact_factors(Factors(two, two)).weight.dtype
        torch.float32
    """
    if factors.weight.is_cuda:
        return factors
    exact = accumulation_dtype(factors.weight)
    return factors._replace(
        hidden=factors.hidden.to(exact),
        weight=factors.weight.to(exact),
    )


def logits_of(
    factors: Factors, rows: slice, words: slice, buffer: Tensor, *, needs_slope: bool
) -> tuple[Tensor, Tensor | None]:
    """Compute logits of some tokens and words in a buffer, and the derivative of their soft cap.

    Args:
        factors: Factors from `exact_factors`.
        rows: The tokens.
        words: The words.
        buffer: fp32 or fp64 `[N]`, large enough.
        needs_slope: Whether to compute the derivative.

    Effects:
        Overwrites the buffer.

    Examples:
        >>> import torch
        >>> factors, buffer = Factors(torch.ones(3, 2), torch.ones(4, 2)), torch.empty(8)
        >>> logits_of(factors, slice(1, 3), slice(0, 2), buffer, needs_slope=True)
        (tensor([[2., 2.],
                [2., 2.]]), None)
    """
    hidden = factors.hidden[rows]
    weight = factors.weight[words]
    # The last chunk is smaller, and takes the front of the buffer.
    num_tokens = len(hidden)
    num_words = len(weight)
    out = buffer[: num_tokens * num_words].view(num_tokens, num_words)
    if hidden.dtype == out.dtype:
        logits = torch.mm(hidden, weight.t(), out=out)
    else:  # bf16 factors on CUDA, with fp32 logits
        logits = torch.mm(hidden, weight.t(), out_dtype=out.dtype, out=out)
    if factors.bias is not None:
        logits.add_(factors.bias[words])
    if factors.softcap is None:
        return logits, None
    logits.div_(factors.softcap).tanh_()
    # d/dx c tanh(x / c) = 1 - tanh(x / c)^2
    slope = 1 - logits.square() if needs_slope else None
    logits.mul_(factors.softcap)
    return logits, slope


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
