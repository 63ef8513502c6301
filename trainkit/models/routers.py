"""Routers: which experts a token goes to, and with which weights.

Functions of scores alone, in fp32 whatever the model computes in. They write nothing: how many
tokens each expert gets is an output, so that a recomputed forward pass cannot count twice.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from trainkit.models.config import check_groups


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
        indices: int64 `[T, k]`, choices that were made before (`Tape`); the weights are still those
            of these logits.

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
        scale: What weights are multiplied by then.
        is_token: As in `softmax_topk`.
        indices: As in `softmax_topk`.

    Raises:
        ValueError: As `softmax_topk`, or the groups do not divide the experts, or those chosen hold
            fewer than `chosen` experts.

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
