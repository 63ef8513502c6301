"""Routing of tokens to experts: top-k by scores, a hash of the token, jitter, and capacity.

Routers are pure functions of scores, always in fp32. The number of tokens per expert is an output,
not state, so a recomputed forward pass does not count twice.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from trainkit.models.config import check_expert_groups
from trainkit.noise import counters
from trainkit.types import check_choice, check_range


class Routing(NamedTuple):
    """The routing of T tokens to E experts, k for each token.

    Padding has weights and shares of 0 and an index of E, which is no expert.

    Attributes:
        weights: fp32 `[T, k]` (fp64 for fp64 scores).
        indices: int64 `[T, k]`.
        counts: int64 `[E]`, the number of tokens that chose each expert.
        shares: `[T, E]`, the normalized scores of all experts, for the balancing loss.
    """

    weights: Tensor
    indices: Tensor
    counts: Tensor
    shares: Tensor


def softmax_topk(
    logits: Tensor,
    top_k: int,
    *,
    renormalize: bool = True,
    is_token: Tensor | None = None,
    indices: Tensor | None = None,
) -> Routing:
    """Route each token to the experts with the largest softmax of its logits.

    Args:
        logits: Floating point `[T, E]`.
        top_k: k, experts per token.
        renormalize: Divide a token's weights by their sum, so that they sum to 1.
        is_token: bool `[T]`, False for padding, which goes to no expert; by default all are tokens.
        indices: int64 `[T, k]`, choices to replay (`RoutingTape`); weights still follow from these
            logits.

    Raises:
        ValueError: `top_k` is not in [1, E], or shapes do not fit.

    References:
        Shazeer et al., "Outrageously large neural networks" (2017); Jiang et al., "Mixtral of
        experts" (2024), which renormalizes.

    Examples:
        >>> routing = softmax_topk(torch.tensor([[2.0, 1.0, 0.0], [0.0, 0.0, 9.0]]), 1)
        >>> routing.indices.tolist(), routing.counts.tolist(), routing.weights.tolist()
        ([[0], [2]], [1, 0, 1], [[1.0], [1.0]])
    """
    _check("softmax_topk", logits, top_k, is_token, indices)
    shares = _to_fp32(logits).softmax(-1)
    if indices is None:
        indices = shares.detach().topk(top_k, -1).indices
    # As in `biased_topk`: a gather cannot read at index E.
    indices = _mask_padding(indices, is_token, 0)
    weights = shares.gather(-1, indices)
    if renormalize:  # a replayed choice may have a weight of 0
        weights = weights / weights.sum(-1, keepdim=True).clamp_min(1e-20)
    return _make_routing(weights, indices, shares, is_token)


def biased_topk(
    logits: Tensor,
    top_k: int,
    *,
    scores: Literal["sigmoid", "sqrtsoftplus"] = "sigmoid",
    bias: Tensor | None = None,
    groups: int = 1,
    groups_chosen: int = 1,
    renormalize: bool = True,
    scale: float = 1.0,
    is_token: Tensor | None = None,
    indices: Tensor | None = None,
) -> Routing:
    """Route each token to the experts with the largest scores, plus a bias.

    A score is a function of one logit, unlike a softmax. The bias affects the choice, not the
    weights: it balances experts without a gradient (`update_expert_bias`). With groups of experts,
    such as those of one machine, a token chooses from `groups_chosen` groups only, those whose two
    best experts have the largest sum.

    Args:
        logits: Floating point `[T, E]`.
        top_k: k, experts per token.
        scores: The function from a logit to a score: "sigmoid", or "sqrtsoftplus", the square root
            of softplus, which has no upper bound.
        bias: `[E]`, added to the scores for the choice.
        groups: The number of groups of consecutive experts.
        groups_chosen: The number of groups that a token may choose experts from.
        renormalize: Divide a token's weights by their sum.
        scale: The factor of the weights after that, above 0.
        is_token: As in `softmax_topk`.
        indices: As in `softmax_topk`.

    Raises:
        ValueError: As `softmax_topk`, or the groups do not divide the experts, those chosen hold
            fewer than `top_k` experts, or `scale` is not above 0.

    References:
        DeepSeek-AI, "DeepSeek-V3 technical report" (2024), section 2.1.2; "DeepSeek-V4" (2026) for
        sqrtsoftplus.

    Examples:
        >>> logits = torch.tensor([[1.0, 0.0, -1.0, 0.5]])
        >>> biased_topk(logits, 1, bias=torch.tensor([0.0, 0.0, 1.0, 0.0])).indices.tolist()
        [[2]]
        >>> biased_topk(logits, 2, groups=2).indices.sort().values.tolist()
        [[0, 1]]
        >>> biased_topk(torch.zeros(1, 2), 1, scores="sqrtsoftplus", renormalize=False).weights
        tensor([[0.8326]])
    """
    check_choice(("sigmoid", "sqrtsoftplus"), "biased_topk", scores=scores)
    _check("biased_topk", logits, top_k, is_token, indices)
    if bias is not None and bias.shape != logits.shape[-1:]:
        raise ValueError(
            f"biased_topk: bias must be [{logits.shape[-1]}], one for each expert, got "
            f"{tuple(bias.shape)}"
        )
    check_range("biased_topk", above=0, scale=scale)
    check_expert_groups("biased_topk", logits.shape[-1], top_k, groups, groups_chosen)
    x = _to_fp32(logits)
    if scores == "sigmoid":
        values = x.sigmoid()
    else:
        # Softplus underflows to 0, where the square root has an infinite slope.
        values = nn.functional.softplus(x).clamp_min(torch.finfo(x.dtype).tiny).sqrt()
    if indices is None:
        biased = values.detach() if bias is None else values.detach() + bias
        indices = _mask_groups(biased, groups, groups_chosen).topk(top_k, -1).indices
    # Padding points at expert 0 for the gather; `_make_routing` then points it at none.
    indices = _mask_padding(indices, is_token, 0)
    weights = values.gather(-1, indices)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    shares = values / (values.sum(-1, keepdim=True) + 1e-20)
    return _make_routing(weights * scale, indices, shares, is_token)


def hash_experts(token_ids: Tensor, experts: int, top_k: int, *, name: str) -> Tensor:
    """Return the experts of each token by a hash of its id: a fixed table that nothing trains.

    It is computed where it is needed, so that there is no table to store or to shard. Routers take
    it as `indices`; the weights of the experts still follow from logits.

    Args:
        token_ids: Integers `[T]`.
        experts: E, the number of experts.
        top_k: k, experts per token.
        name: The name of the expert layer in the whole model, whose table differs from others'.

    Returns:
        int64 `[T, k]`, distinct experts for each token.

    Raises:
        ValueError: `top_k` is not in [1, E].

    References:
        Roller et al., "Hash layers for large sparse models" (2021); DeepSeek-AI, "DeepSeek-V4"
        (2026), for the weights.

    Examples:
        >>> chosen = hash_experts(torch.tensor([5, 9, 5]), 8, 2, name="layers.0.mlp")
        >>> chosen.shape, torch.equal(chosen[0], chosen[2]), torch.equal(chosen[0], chosen[1])
        (torch.Size([3, 2]), True, False)
    """
    check_range("hash_experts", at_least=1, experts=experts)
    check_range("hash_experts", at_least=1, at_most=experts, top_k=top_k)
    # Not the seed of the run: the table is part of the model.
    keys = counters.make_token_keys(token_ids.long(), seed=0, step=0)
    bits = counters.make_random_bits(keys, name=f"{name}.hash", features=experts)
    return bits.topk(top_k, -1).indices


def _mask_groups(scores: Tensor, groups: int, groups_chosen: int) -> Tensor:
    """Return the scores with minus infinity for the experts of groups that are not chosen."""
    if groups_chosen == groups:
        return scores
    # A group's score is the sum of its two best experts, as in DeepSeek-V3.
    by_group = scores.unflatten(-1, (groups, -1))
    two_best = by_group.topk(min(2, by_group.shape[-1]), -1).values
    best = two_best.sum(-1)
    is_masked = torch.ones_like(best, dtype=torch.bool)
    is_masked.scatter_(-1, best.topk(groups_chosen, -1).indices, value=False)
    return by_group.masked_fill(is_masked.unsqueeze(-1), -torch.inf).flatten(-2)


def _to_fp32(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _make_routing(
    weights: Tensor,
    indices: Tensor,
    shares: Tensor,
    is_token: Tensor | None,
) -> Routing:
    # Only here may indices be E, which is past the scores.
    experts = shares.shape[-1]
    indices = _mask_padding(indices, is_token, experts)
    return Routing(
        weights=_mask_padding(weights, is_token, 0),
        indices=indices,
        counts=count_choices(indices, experts),
        shares=_mask_padding(shares, is_token, 0),
    )


def _mask_padding(x: Tensor, is_token: Tensor | None, value: int) -> Tensor:
    return x if is_token is None else x.masked_fill(~is_token.unsqueeze(-1), value)


def count_choices(indices: Tensor, experts: int) -> Tensor:
    """Count the choices of each expert, int64 `[E]`, without a host sync.

    Examples:
        >>> count_choices(torch.tensor([[0, 2], [2, 3]]), 3).tolist()  # 3 is no expert
        [1, 0, 2]
    """
    # Not `bincount`, which waits for the device; the last entry counts padding and dropped choices.
    counts = torch.zeros(experts + 1, dtype=torch.int64, device=indices.device)
    flat = indices.flatten()
    return counts.scatter_add_(0, flat, torch.ones_like(flat))[:experts]


# ---------------------------------------------------------------------------------------- capacity


def expert_capacity(counts: Tensor, factor: float) -> Tensor:
    """Return the capacity of an expert: `factor` times the mean count, rounded up, at least 1.

    Args:
        counts: int64 `[E]`, the number of choices of each expert.
        factor: Above 0, 1.25 for instance; 1 suffices if all experts have equal counts.

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
    capacity = counts.sum().double() * factor / len(counts)
    return capacity.ceil().clamp(min=1).long()


def apply_capacity(routing: Routing, capacity: Tensor | int) -> Routing:
    """Drop the choices beyond the capacity of each expert, the last ones in the order of tokens.

    A dropped choice has an index of E and a weight of 0; the token's other weights are unchanged.
    Shares are unchanged too, so that the balancing loss still moves tokens away from full experts.
    For the same reason that loss should use the counts from before, and a tape the choices from
    before. The number of dropped choices is the difference of the counts.

    Args:
        routing: The routing of the tokens. Padding does not count.
        capacity: The capacity of an expert; see `expert_capacity`.

    Returns:
        The routing without the dropped choices, computed without a host sync.

    Raises:
        ValueError: `capacity` is a number below 1.

    Examples:
        >>> routing = softmax_topk(torch.tensor([[2.0, 1.0], [2.0, 1.0], [1.0, 2.0]]), 1)
        >>> limited = apply_capacity(routing, 1)
        >>> limited.indices.tolist(), limited.weights.tolist()
        ([[0], [2], [1]], [[1.0], [0.0], [1.0]])
        >>> (routing.counts - limited.counts).tolist()
        [1, 0]
    """
    if not isinstance(capacity, Tensor):
        check_range("apply_capacity", at_least=1, capacity=capacity)
    # A stable sort by expert keeps the order of tokens, so a choice's position among those of its
    # expert is its position in the sort less the expert's start.
    flat = routing.indices.flatten()
    by_expert = flat.sort(stable=True)
    starts = torch.cat([routing.counts.new_zeros(1), routing.counts.cumsum(0)])
    position = torch.arange(len(flat), device=flat.device) - starts[by_expert.values]
    is_within = torch.empty_like(flat, dtype=torch.bool)
    is_within[by_expert.indices] = position < capacity
    is_dropped = ~is_within.view_as(routing.indices)
    return routing._replace(
        weights=routing.weights.masked_fill(is_dropped, 0),
        indices=routing.indices.masked_fill(is_dropped, len(routing.counts)),
        counts=routing.counts.clamp(max=capacity),
    )


def scale_by_load(routing: Routing, load: Tensor, *, factor: float) -> Routing:
    """Scale down the weights of experts with more than `factor` times an equal share of the load.

    Such an expert's outputs are multiplied by factor / (E * load), the part of its choices that a
    capacity with this factor would keep on average. Unlike `apply_capacity` it drops no choice, and
    the result depends on no layout: the load is that of the last global batch.

    Args:
        routing: The routing of the tokens.
        load: Each expert's fraction of the choices, `[E]`, without a gradient.
        factor: Above 0.

    Raises:
        ValueError: `factor` is not above 0, or not finite.

    Examples:
        >>> routing = softmax_topk(torch.tensor([[2.0, 1.0], [1.0, 2.0]]), 1)
        >>> scale_by_load(routing, torch.tensor([0.8, 0.2]), factor=1.0).weights.flatten().tolist()
        [0.625, 1.0]
    """
    check_range("scale_by_load", above=0, factor=factor)
    scale = (factor / (len(load) * load)).clamp_max(1.0)
    # Choices of padding have the index E, and a weight of 0 already.
    scale = torch.cat([scale, scale.new_zeros(1)]).to(routing.weights.dtype)
    return routing._replace(weights=routing.weights * scale[routing.indices])


# ------------------------------------------------------------------------------------------- noise


def add_jitter(x: Tensor, noise_key: Tensor, *, name: str, amount: float) -> Tensor:
    """Multiply the input of a router by uniform noise in [1 - amount, 1 + amount], for training.

    The noise is a function of the token's key, the layer's name and the feature, so it does not
    depend on rows, microbatches or shards, and recomputation repeats it.

    Args:
        x: Tokens `[..., D]`, with all features.
        noise_key: int64 `[...]`, from `noise.make_token_keys`.
        name: The name of the expert layer in the whole model, "layers.3.mlp" for instance.
        amount: In [0, 1), 0.01 for instance.

    Returns:
        `[..., D]` in fp32, which small noise needs (fp64 for fp64 tokens).

    Raises:
        ValueError: `amount` is not in [0, 1), or there is not one key for each token.

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
        raise ValueError(f"add_jitter: amount must be in [0, 1), got {amount}")
    if noise_key.shape != x.shape[:-1]:
        raise ValueError(
            f"add_jitter: noise_key must be {list(x.shape[:-1])}, one for each token, got "
            f"{list(noise_key.shape)}"
        )
    # Dropout after the layer uses the layer's own name, so this needs another.
    bits = counters.make_random_bits(noise_key, name=f"{name}.jitter", features=x.shape[-1])
    x = _to_fp32(x)
    # 53 random bits, scaled to [-1, 1).
    return x * (1 + amount * (bits.double() * 2.0**-52 - 1)).to(x.dtype)


def _check(
    function: str,
    logits: Tensor,
    top_k: int,
    is_token: Tensor | None,
    indices: Tensor | None,
) -> None:
    if logits.ndim != 2 or not logits.is_floating_point():
        raise ValueError(
            f"{function}: logits must be floating point [T, E], got {logits.dtype} "
            f"{tuple(logits.shape)}"
        )
    tokens, experts = logits.shape
    if not 1 <= top_k <= experts:
        raise ValueError(f"{function}: top_k={top_k} of {experts} experts cannot be chosen")
    if is_token is not None and is_token.shape != (tokens,):
        raise ValueError(f"{function}: is_token must be [{tokens}], got {tuple(is_token.shape)}")
    if indices is not None and indices.shape != (tokens, top_k):
        raise ValueError(
            f"{function}: indices must be [{tokens}, {top_k}], one for each choice, got "
            f"{tuple(indices.shape)}"
        )
