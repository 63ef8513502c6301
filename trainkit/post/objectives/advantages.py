"""Advantages: pure functions of rewards and values.

The results belong at the labels of an answer, in the column "advantages".
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainkit.types import check_range


def group_advantages(
    rewards: Tensor,
    groups: Tensor,
    *,
    num_groups: int,
    deviation: bool = True,
    eps: float = 1e-4,
) -> Tensor:
    """Return the group-normalized advantages of GRPO: (reward - mean) / (deviation + eps).

    Args:
        rewards: Floating `[N]`, one for each answer.
        groups: int64 `[N]`, the index of its prompt, below `num_groups`.
        num_groups: The number of prompts.
        deviation: Whether to divide by the standard deviation of the group (that of a sample, with
            n - 1), as GRPO does; Dr. GRPO does not.
        eps: The number added to the deviation, at least 0.

    Returns:
        `[N]`; 0 in a group of one, and in one of equal rewards.

    Raises:
        ValueError: Rewards are not floating, groups have another shape, or a number is out of
            range.

    References:
        Shao et al., "DeepSeekMath" (2024); Liu et al., "Understanding R1-Zero-like training"
        (2025).

    Examples:
        >>> rewards, groups = torch.tensor([1.0, 0.0, 5.0]), torch.tensor([0, 0, 1])
        >>> group_advantages(rewards, groups, num_groups=2, deviation=False)
        tensor([ 0.5000, -0.5000,  0.0000])
    """
    check_range("group_advantages", at_least=1, num_groups=num_groups)
    check_range("group_advantages", at_least=0, eps=eps)
    exact = _to_fp64(rewards)
    counts, sums = _sum_by_group(exact, groups, num_groups)
    advantages = exact - (sums / counts)[groups]  # the mean of each answer's group
    if deviation:
        _, squares = _sum_by_group(advantages.square(), groups, num_groups)
        # n - 1, and 1 for a group of one, whose advantage is 0 anyway.
        variances = squares / (counts - 1).clamp(min=1)
        advantages = advantages / (variances.sqrt()[groups] + eps)
    return advantages.to(rewards.dtype)


def leave_one_out(rewards: Tensor, groups: Tensor, *, num_groups: int) -> Tensor:
    """Return the leave-one-out advantages of RLOO: reward minus the mean of the others.

    Args:
        rewards: Floating `[N]`, one for each answer.
        groups: int64 `[N]`, as in `group_advantages`.
        num_groups: The number of prompts.

    Returns:
        `[N]`; 0 in a group of one, which has no others.

    Raises:
        ValueError: As `group_advantages`.

    References:
        Kool et al., "Buy 4 REINFORCE samples, get a baseline for free" (2019); Ahmadian et al.,
        "Back to basics" (2024), RLOO.

    Examples:
        >>> rewards, groups = torch.tensor([3.0, 1.0, 2.0]), torch.tensor([0, 0, 0])
        >>> leave_one_out(rewards, groups, num_groups=1)
        tensor([ 1.5000, -1.5000,  0.0000])
    """
    check_range("leave_one_out", at_least=1, num_groups=num_groups)
    exact = _to_fp64(rewards)
    counts, sums = _sum_by_group(exact, groups, num_groups)
    num_others = (counts - 1).clamp(min=1)[groups]
    mean_of_others = (sums[groups] - exact) / num_others
    has_others = counts[groups] > 1
    return torch.where(has_others, exact - mean_of_others, 0).to(rewards.dtype)


def gae(
    rewards: Tensor,
    values: Tensor,
    document_ids: Tensor,
    *,
    bootstrap: Tensor | None = None,
    discount: float = 1.0,
    trace: float = 0.95,
) -> Tensor:
    """Return generalized advantage estimates for packed rows, separately for each document.

    The value after the last step of a document is `bootstrap`: 0 if the answer has ended, and the
    critic's value if it was truncated. It takes log2 S passes over the rows.

    Args:
        rewards: Floating `[B, S]`, the reward of the step at each token.
        values: Floating `[B, S]`, the critic's value before it.
        document_ids: int64 `[B, S]`. The steps of a document are adjacent; ids below 0 are no
            steps. For rows with prompts, whose tokens are not steps, pass
            `document_ids.masked_fill(labels == -100, -1)`.
        bootstrap: Floating `[B, S]`; the value at the last step of each document is the critic's
            value after it, 0 for an answer that has ended. By default all have ended.
        discount: The discount factor gamma, from 0 to 1.
        trace: The trace decay lambda, from 0 to 1.

    Returns:
        `[B, S]`, 0 where there is no step. The critic's targets are the values plus these.

    Raises:
        ValueError: `discount` or `trace` is not between 0 and 1.

    References:
        Schulman et al., "High-dimensional continuous control using generalized advantage
        estimation" (2015).

    Examples:
        >>> rewards, values = torch.tensor([[0.0, 1.0, 2.0]]), torch.tensor([[0.5, 0.5, 0.5]])
        >>> gae(rewards, values, torch.tensor([[0, 0, 1]]), trace=1.0)
        tensor([[0.5000, 0.5000, 1.5000]])
        >>> truncated = torch.tensor([[0.0, 0.25, 0.0]])  # the first document
        >>> gae(rewards, values, torch.tensor([[0, 0, 1]]), bootstrap=truncated, trace=1.0)
        tensor([[0.7500, 0.7500, 1.5000]])
    """
    check_range("gae", at_least=0, at_most=1, discount=discount, trace=trace)
    # The TD errors: delta_t = r_t + gamma V_{t+1} - V_t, and A_t = delta_t + gamma lambda A_{t+1}.
    # The recursion runs backward and stops where the next token is of another document.
    is_step = document_ids >= 0
    has_next = torch.zeros_like(is_step)
    is_same = document_ids[:, :-1] == document_ids[:, 1:]
    has_next[:, :-1] = is_step[:, :-1] & is_same
    last_values = torch.zeros_like(values) if bootstrap is None else bootstrap
    next_values = torch.where(has_next, values.roll(-1, 1), last_values)
    advantages = torch.where(is_step, rewards + discount * next_values - values, 0)
    weight = has_next.to(advantages.dtype) * (discount * trace)
    # A parallel scan of x_t = delta_t + weight_t x_{t+1}: each pass doubles the steps covered.
    shift = 1
    while shift < advantages.shape[1]:
        zeros = torch.zeros_like(advantages[:, :shift])
        advantages = advantages + weight * torch.cat([advantages[:, shift:], zeros], dim=1)
        weight = weight * torch.cat([weight[:, shift:], zeros], dim=1)
        shift *= 2
    return advantages


def _to_fp64(rewards: Tensor) -> Tensor:
    """Convert to fp64: the rounding error of equal rewards would be divided by itself."""
    if not rewards.is_floating_point():
        raise ValueError(f"advantages: rewards must be floating, got {rewards.dtype}")
    return rewards.double()


def _sum_by_group(x: Tensor, groups: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the number of values of each group, at least 1, and their sum."""
    if x.ndim != 1 or groups.shape != x.shape:
        raise ValueError(
            "advantages: rewards and groups must be [N], one of each for an answer, got "
            f"{tuple(x.shape)} and {tuple(groups.shape)}"
        )
    # Out of place, so that `zeros` serves both sums.
    zeros = x.new_zeros(count)
    counts = zeros.scatter_add(0, groups, torch.ones_like(x)).clamp(min=1)
    return counts, zeros.scatter_add(0, groups, x)
