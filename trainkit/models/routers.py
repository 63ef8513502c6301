"""Routers: which experts a token goes to, and with which weights.

Functions of scores alone, in fp32 whatever the model computes in. They write nothing: how many
tokens each expert gets is an output, so that a recomputed forward pass cannot count twice. Before
them tokens may be moved a little (`add_jitter`), after them experts may be full (`apply_capacity`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from trainkit.models.config import check_groups
from trainkit.noise import counters
from trainkit.types import check_range


class Routing(NamedTuple):
    """What a router decides for T tokens and E experts, of which each token gets k.

    `weights` are fp32 `[T, k]` (fp64 for fp64 scores), `indices` int64 `[T, k]`, `counts` int64
    `[E]`, how many tokens chose each expert. `shares` `[T, E]` are what a token would give each
    expert if it could give to all; they sum to 1, and losses that balance experts look at them. A
    token that is padding has weights and shares of 0 and an index of E, which is no expert.
    """

    weights: Tensor
    indices: Tensor
    counts: Tensor
    shares: Tensor


def softmax_topk(
    logits: Tensor,
    chosen: int,
    *,
    renormalise: bool = True,
    is_token: Tensor | None = None,
    indices: Tensor | None = None,
) -> Routing:
    """Send each token to the experts with the largest softmax of its logits.

    Args:
        logits: Floating point `[T, E]`.
        chosen: k, experts per token.
        renormalise: Divide a token's weights by their sum, so that they sum to 1.
        is_token: bool `[T]`, False for padding, which goes nowhere; by default all are tokens.
        indices: int64 `[T, k]`, choices that were made before (`RoutingTape`); the weights are
            still those of these logits.

    Raises:
        ValueError: `chosen` is not in [1, E], or shapes do not fit.

    References:
        Shazeer et al., "Outrageously large neural networks" (2017); Jiang et al., "Mixtral of
        experts" (2024), which renormalises.

    Examples:
        >>> routing = softmax_topk(torch.tensor([[2.0, 1.0, 0.0], [0.0, 0.0, 9.0]]), 1)
        >>> routing.indices.tolist(), routing.counts.tolist(), routing.weights.tolist()
        ([[0], [2]], [1, 0, 1], [[1.0], [1.0]])
    """
    _check("softmax_topk", logits, chosen, is_token, indices)
    shares = _wide(logits).softmax(-1)
    if indices is None:
        indices = shares.detach().topk(chosen, -1).indices
    indices = _of_tokens(indices, is_token, 0)
    weights = shares.gather(-1, indices)
    if renormalise:  # a choice that was made before may weigh nothing by now
        weights = weights / weights.sum(-1, keepdim=True).clamp_min(1e-20)
    return _without_padding(weights, indices, shares, is_token)


def sigmoid_topk(
    logits: Tensor,
    chosen: int,
    *,
    bias: Tensor | None = None,
    groups: int = 1,
    groups_chosen: int = 1,
    renormalise: bool = True,
    scale: float = 1.0,
    is_token: Tensor | None = None,
    indices: Tensor | None = None,
) -> Routing:
    """Send each token to the experts with the largest sigmoid of its logits, plus a bias.

    The bias decides who is chosen and never what a choice weighs: it balances experts without a
    gradient (`update_expert_bias`). With groups of experts, for instance those of one machine, a
    token goes to experts of `groups_chosen` of them alone: those whose two best experts have the
    largest sum.

    Args:
        logits: Floating point `[T, E]`.
        chosen: k, experts per token.
        bias: `[E]`, added for the choice alone.
        groups: Into how many groups of neighbours the experts are divided.
        groups_chosen: Of how many groups a token may choose experts.
        renormalise: Divide a token's weights by their sum.
        scale: What weights are multiplied by then, above 0.
        is_token: As in `softmax_topk`.
        indices: As in `softmax_topk`.

    Raises:
        ValueError: As `softmax_topk`, or the groups do not divide the experts, those chosen hold
            fewer than `chosen` experts, or `scale` is not above 0.

    References:
        DeepSeek-AI, "DeepSeek-V3 technical report" (2024), section 2.1.2.

    Examples:
        >>> logits = torch.tensor([[1.0, 0.0, -1.0, 0.5]])
        >>> sigmoid_topk(logits, 1, bias=torch.tensor([0.0, 0.0, 1.0, 0.0])).indices.tolist()
        [[2]]
        >>> sigmoid_topk(logits, 2, groups=2).indices.sort().values.tolist()
        [[0, 1]]
    """
    _check("sigmoid_topk", logits, chosen, is_token, indices)
    if bias is not None and bias.shape != logits.shape[-1:]:
        want, got = [logits.shape[-1]], tuple(bias.shape)
        raise ValueError(f"sigmoid_topk: bias must be {want}, one for each expert, got {got}")
    check_range("sigmoid_topk", above=0, scale=scale)
    check_groups("sigmoid_topk", logits.shape[-1], chosen, groups, groups_chosen)
    scores = _wide(logits).sigmoid()
    if indices is None:
        wanted = scores.detach() if bias is None else scores.detach() + bias
        indices = _of_best_groups(wanted, groups, groups_chosen).topk(chosen, -1).indices
    indices = _of_tokens(indices, is_token, 0)
    weights = scores.gather(-1, indices)
    if renormalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    shares = scores / (scores.sum(-1, keepdim=True) + 1e-20)
    return _without_padding(weights * scale, indices, shares, is_token)


def _of_best_groups(scores: Tensor, groups: int, groups_chosen: int) -> Tensor:
    """Return the scores with minus infinity for the experts of groups that are not chosen."""
    if groups_chosen == groups:
        return scores
    parted = scores.unflatten(-1, (groups, -1))
    best = parted.topk(min(2, parted.shape[-1]), -1).values.sum(-1)
    left_out = torch.ones_like(best, dtype=torch.bool)
    left_out.scatter_(-1, best.topk(groups_chosen, -1).indices, value=False)
    return parted.masked_fill(left_out.unsqueeze(-1), -torch.inf).flatten(-2)


def _wide(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _without_padding(
    weights: Tensor, indices: Tensor, shares: Tensor, is_token: Tensor | None
) -> Routing:
    experts = shares.shape[-1]
    indices = _of_tokens(indices, is_token, experts)
    weights, shares = _of_tokens(weights, is_token, 0), _of_tokens(shares, is_token, 0)
    return Routing(weights, indices, counts_of(indices, experts), shares)


def _of_tokens(x: Tensor, is_token: Tensor | None, value: int) -> Tensor:
    """Return `x` with `value` for padding."""
    return x if is_token is None else x.masked_fill(~is_token.unsqueeze(-1), value)


def counts_of(indices: Tensor, experts: int) -> Tensor:
    """Return how often each expert stands in `indices`, int64 `[E]`, without a host sync.

    Examples:
        >>> counts_of(torch.tensor([[0, 2], [2, 3]]), 3).tolist()  # 3 is no expert
        [1, 0, 2]
    """
    counts = torch.zeros(experts + 1, dtype=torch.int64, device=indices.device)
    flat = indices.flatten()
    return counts.scatter_add_(0, flat, torch.ones_like(flat))[:experts]


# ---------------------------------------------------------------------------------------- capacity


def expert_capacity(counts: Tensor, factor: float) -> Tensor:
    """Return how many choices an expert may take: `factor` times the mean, rounded up, at least 1.

    Args:
        counts: int64 `[E]`, how often each expert was chosen.
        factor: 1.25 for instance; 1 is room for all choices if they are even. Above 0.

    Returns:
        int64, 0-d, without a host sync.

    Raises:
        ValueError: `factor` is not above 0, or not finite.

    References:
        Fedus et al., "Switch transformers" (2021), section 2.2.

    Examples:
        >>> (
        ...     expert_capacity(torch.tensor([6, 0, 1, 1]), 1.25),
        ...     expert_capacity(torch.tensor([0, 0]), 1.25),
        ... )
        (tensor(3), tensor(1))
    """
    check_range("expert_capacity", above=0, factor=factor)
    return (counts.sum().double() * factor / len(counts)).ceil().clamp(min=1).long()


def apply_capacity(routing: Routing, capacity: Tensor | int) -> Routing:
    """Keep what experts have room for: of each one's choices the first, in the order of tokens.

    A choice that is dropped has an index of E and a weight of 0; the token's other weights stay as
    they are. Shares stay too, so that a loss still moves tokens away from experts that are full;
    for the same reason balance is to look at the counts of before, and a tape is to hold the
    choices of before, which come to the same again. The difference of counts is what was dropped.

    Args:
        routing: What a router decided. Its padding takes no room.
        capacity: How many choices an expert may take; see `expert_capacity`.

    Returns:
        What is left of it, with counts of that. No host sync.

    Raises:
        ValueError: `capacity` is a number below 1.

    Examples:
        >>> routing = softmax_topk(torch.tensor([[2.0, 1.0], [2.0, 1.0], [1.0, 2.0]]), 1)
        >>> kept = apply_capacity(routing, 1)
        >>> kept.indices.tolist(), kept.weights.tolist(), (routing.counts - kept.counts).tolist()
        ([[0], [2], [1]], [[1.0], [0.0], [1.0]], [1, 0])
    """
    if not isinstance(capacity, Tensor):
        check_range("limited", at_least=1, capacity=capacity)
    experts, flat = len(routing.counts), routing.indices.flatten()
    ordered = flat.sort(stable=True)
    first = torch.cat([routing.counts.new_zeros(1), routing.counts.cumsum(0)])
    place = torch.arange(len(flat), device=flat.device) - first[ordered.values]
    is_kept = torch.empty_like(flat, dtype=torch.bool)
    is_kept[ordered.indices] = place < capacity
    is_dropped = ~is_kept.view_as(routing.indices)
    return routing._replace(
        weights=routing.weights.masked_fill(is_dropped, 0),
        indices=routing.indices.masked_fill(is_dropped, experts),
        counts=routing.counts.clamp(max=capacity),
    )


# ------------------------------------------------------------------------------------------- noise


def add_jitter(x: Tensor, noise_key: Tensor, *, name: str, amount: float) -> Tensor:
    """Multiply what a router sees by uniform noise in [1 - amount, 1 + amount], for training.

    The noise is a function of the token's key, the layer's name and the feature: recomputation, and
    any cut into rows, microbatches and shards of the sequence, sees the same.

    Args:
        x: Tokens `[..., D]`, all features of each.
        noise_key: int64 `[...]`, from `noise.make_token_keys`.
        name: The expert layer in the whole model, "layers.3.mlp" for instance.
        amount: In [0, 1), 0.01 for instance.

    Returns:
        `[..., D]` in fp32, which small noise needs (fp64 for fp64 tokens).

    Raises:
        ValueError: `amount` is not in [0, 1), or the keys are not one for each token.

    References:
        Fedus et al., "Switch transformers" (2021), section 2.4.

    Examples:
        >>> from trainkit.noise import make_token_keys
        >>> keys = make_token_keys(torch.arange(3), seed=0, step=4)
        >>> noisy = add_jitter(torch.ones(3, 8), keys, name="layers.0.mlp", amount=0.1)
        >>> bool(noisy.min() >= 0.9), bool(noisy.max() <= 1.1), noisy.unique().numel()
        (True, True, 24)
    """
    if not 0 <= amount < 1:
        raise ValueError(f"jittered: amount must be in [0, 1), got {amount}")
    if noise_key.shape != x.shape[:-1]:
        want, got = list(x.shape[:-1]), list(noise_key.shape)
        raise ValueError(f"jittered: noise_key must be {want}, one for each token, got {got}")
    # A name of its own: dropout after the layer has the layer's.
    bits = counters.make_random_bits(noise_key, name=f"{name}.jitter", features=x.shape[-1])
    wide = _wide(x)
    return wide * (1 + amount * (bits.double() * 2.0**-52 - 1)).to(wide.dtype)


def _check(
    where: str, logits: Tensor, chosen: int, is_token: Tensor | None, indices: Tensor | None
) -> None:
    if logits.ndim != 2 or not logits.is_floating_point():
        got = f"{logits.dtype} {tuple(logits.shape)}"
        raise ValueError(f"{where}: logits must be floating point [T, E], got {got}")
    tokens, experts = logits.shape
    if not 1 <= chosen <= experts:
        raise ValueError(f"{where}: {chosen} of {experts} experts cannot be chosen")
    if is_token is not None and is_token.shape != (tokens,):
        raise ValueError(f"{where}: is_token must be [{tokens}], got {tuple(is_token.shape)}")
    if indices is not None and indices.shape != (tokens, chosen):
        want, got = [tokens, chosen], tuple(indices.shape)
        raise ValueError(f"{where}: indices must be {want}, one for each choice, got {got}")
