"""Advantages: how much better an answer, or a token, was than was to be expected.

Pure functions of rewards and values. What they return goes to the labels of an answer as the column
"advantages".
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainkit.types import check_range


def group_advantages(
    rewards: Tensor, groups: Tensor, *, num_groups: int, deviation: bool = True, eps: float = 1e-4
) -> Tensor:
    """Return how far each reward is above the mean of its group, in deviations of the group.

    Args:
        rewards: Floating `[N]`, one for each answer.
        groups: int64 `[N]`, the number of the prompt that it answers, below `num_groups`.
        num_groups: How many prompts there are.
        deviation: Whether to divide by the standard deviation of the group (that of a sample, with
            n - 1), as GRPO does; Dr. GRPO does not.
        eps: What is added to the deviation, at least 0.

    Returns:
        `[N]`; 0 in a group of one, and in one of equal rewards.

    Raises:
        ValueError: Rewards are not floating, there is not one group for each, or a number is out of
            its range.

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
    exact = _exact(rewards)
    counts, sums = _by_group(exact, groups, num_groups)
    above = exact - (sums / counts)[groups]
    if deviation:
        _, squares = _by_group(above.square(), groups, num_groups)
        above = above / ((squares / (counts - 1).clamp(min=1)).sqrt()[groups] + eps)
    return above.to(rewards.dtype)


def leave_one_out(rewards: Tensor, groups: Tensor, *, num_groups: int) -> Tensor:
    """Return how far each reward is above the mean of the others of its group.

    Args:
        rewards: Floating `[N]`, one for each answer.
        groups: int64 `[N]`, as in `group_advantages`.
        num_groups: How many prompts there are.

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
    exact = _exact(rewards)
    counts, sums = _by_group(exact, groups, num_groups)
    others = (sums[groups] - exact) / (counts - 1).clamp(min=1)[groups]
    return torch.where(counts[groups] > 1, exact - others, 0).to(rewards.dtype)


def gae(
    rewards: Tensor,
    values: Tensor,
    document_ids: Tensor,
    *,
    bootstrap: Tensor | None = None,
    discount: float = 1.0,
    trace: float = 0.95,
) -> Tensor:
    """Return generalized advantage estimates of packed rows, each document by itself.

    What comes after the last step of a document is worth `bootstrap`: nothing, where an answer has
    ended, and what the critic expects, where it was cut off. All is done in log2 S walks over the
    rows.

    Args:
        rewards: Floating `[B, S]`, what the step at each token earned.
        values: Floating `[B, S]`, what the critic expected before it.
        document_ids: int64 `[B, S]`; the steps of a document stand side by side, and what is below
            0 is no step. With prompts, whose tokens are no steps, give
            `document_ids.masked_fill(labels == -100, -1)`.
        bootstrap: Floating `[B, S]`, of which the value at the last step of each document counts:
            what the critic expects after it, 0 of an answer that has ended. Without it all have.
        discount: What a reward of the next step is worth, gamma, from 0 to 1.
        trace: How far the estimates look ahead, lambda, from 0 to 1.

    Returns:
        `[B, S]`, 0 where there is no step. Values plus these are the critic's targets.

    Raises:
        ValueError: `discount` or `trace` is not between 0 and 1.

    References:
        Schulman et al., "High-dimensional continuous control using generalized advantage
        estimation" (2015).

    Examples:
        >>> rewards, values = torch.tensor([[0.0, 1.0, 2.0]]), torch.tensor([[0.5, 0.5, 0.5]])
        >>> gae(rewards, values, torch.tensor([[0, 0, 1]]), trace=1.0)
        tensor([[0.5000, 0.5000, 1.5000]])
        >>> cut_off = torch.tensor([[0.0, 0.25, 0.0]])  # the first document goes on
        >>> gae(rewards, values, torch.tensor([[0, 0, 1]]), bootstrap=cut_off, trace=1.0)
        tensor([[0.7500, 0.7500, 1.5000]])
    """
    check_range("gae", at_least=0, at_most=1, discount=discount, trace=trace)
    steps = document_ids >= 0
    goes_on = torch.zeros_like(steps)
    goes_on[:, :-1] = steps[:, :-1] & (document_ids[:, :-1] == document_ids[:, 1:])
    after = torch.zeros_like(values) if bootstrap is None else bootstrap
    following = torch.where(goes_on, values.roll(-1, 1), after)
    found = torch.where(steps, rewards + discount * following - values, 0)
    weight = goes_on.to(found.dtype) * (discount * trace)
    # x_t = found_t + weight_t x_{t+1}, of which every walk does twice as many steps as before.
    shift = 1
    while shift < found.shape[1]:
        zeros = torch.zeros_like(found[:, :shift])
        found = found + weight * torch.cat([found[:, shift:], zeros], dim=1)
        weight = weight * torch.cat([weight[:, shift:], zeros], dim=1)
        shift *= 2
    return found


def _exact(rewards: Tensor) -> Tensor:
    """Return rewards in fp64: what rounding left of equal ones would be divided by itself."""
    if not rewards.is_floating_point():
        raise ValueError(f"advantages: rewards must be floating, got {rewards.dtype}")
    return rewards.double()


def _by_group(x: Tensor, groups: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return how many values each group has, at least 1, and their sum."""
    if x.ndim != 1 or groups.shape != x.shape:
        must = "rewards and groups must be [N], one of each for an answer"
        raise ValueError(f"advantages: {must}, got {tuple(x.shape)} and {tuple(groups.shape)}")
    nothing = x.new_zeros(count)
    counts = nothing.scatter_add(0, groups, torch.ones_like(x)).clamp(min=1)
    return counts, nothing.scatter_add(0, groups, x)
