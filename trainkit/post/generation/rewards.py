"""What answers earn: a checker of one's own, whose time is bounded and whose failures are told."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import torch
from torch import Tensor

from trainkit.collectives import run_on_all_ranks
from trainkit.post.generation.rollouts import Answer
from trainkit.post.objectives.advantages import group_advantages
from trainkit.types import SOLO, Axis

RewardFunction = Callable[[str, str], float]
"""`checker(prompt, answer) -> reward`."""


@attrs.frozen
class Rewards:
    """What answers earned, equal on all ranks.

    Attributes:
        rewards: Of each answer; 0 where it was cut off, or the checker failed.
        raised: How many times the checker raised, or gave no finite number.
        hung: How many times it took too long.
        told: The first failure in a sentence; None where there was none.
    """

    rewards: list[float]
    raised: int = 0
    hung: int = 0
    told: str | None = None

    def report(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """Return what a rollout came to, for an event: the mean reward, counts, the first failure.

        Examples:
            >>> answers = [Answer("1+1=", [1], "2", [2], 0), Answer("1+1=", [1], "", [3], 0)]
            >>> Rewards([1.0, 0.0]).report(answers)
            {'answers': 2, 'reward': 0.5, 'empty': 1, 'truncated': 0, 'raised': 0, 'hung': 0, ...}
        """
        return {
            "answers": len(answers),
            "reward": math.fsum(self.rewards) / max(1, len(answers)),
            "empty": sum(not answer.text for answer in answers),
            "truncated": sum(answer.truncated for answer in answers),
            "raised": self.raised,
            "hung": self.hung,
            "told": self.told,
        }


def compute_rewards(
    checker: RewardFunction, answers: Sequence[Answer], *, seconds: float = 1.0, axis: Axis = SOLO
) -> Rewards:
    """Return what each answer earns by a checker that may raise, or hang.

    An answer that was cut off has not ended, earns 0 and is not shown to the checker; one without
    text is. The first rank of the axis checks for all, as what took too long there need not have
    elsewhere.

    Args:
        checker: What is asked of each.
        answers: What was sampled; the same on all ranks.
        seconds: How long the checker may take for one answer. It is interrupted by a signal, so it
            has to be Python, or C that looks at signals as `re` does; a call that never looks ends
            by the run's `step_timeout`.
        axis: The ranks that call this together, `ps.world`.

    Returns:
        Rewards, and how often it failed.

    Raises:
        ValueError: `seconds` is not above 0, or this is not the main thread.

    Effects:
        Calls the checker; takes SIGALRM while it runs, and sets its handler back. Communicates on
        `axis`.

    Examples:
        >>> def checker(prompt, answer):
        ...     return float(int(answer) == 19)
        >>> given = [("19", False), ("", False), ("1911", True)]
        >>> answers = [Answer("12+7=", [1], text, [2], 0, cut) for text, cut in given]
        >>> compute_rewards(checker, answers).rewards, compute_rewards(checker, answers).raised
        ([1.0, 0.0, 0.0], 1)
    """
    if not seconds > 0:
        raise ValueError(f"compute_rewards: seconds must be above 0, got {seconds}")

    def check() -> dict[str, Any] | None:
        return attrs.asdict(_checked(checker, answers, seconds)) if axis.index == 0 else None

    return Rewards(**run_on_all_ranks(check, axis)[0])


def compute_advantages(answers: Sequence[Answer], checked: Rewards) -> Tensor:
    """Return how far each answer is above the mean of those to its prompt, in their deviations.

    This is `objectives.group_advantages` of a rollout; any function of rewards and groups serves
    as well.

    Returns:
        fp64 `[N]`.

    Examples:
        >>> answers = [Answer("1+1=", [1], text, [2], 0) for text in "23"]
        >>> compute_advantages(answers, Rewards([1.0, 0.0]))
        tensor([ 0.7070, -0.7070], dtype=torch.float64)
    """
    groups = torch.tensor([answer.group for answer in answers])
    rewards = torch.tensor(checked.rewards, dtype=torch.float64)
    return group_advantages(rewards, groups, num_groups=int(groups.max()) + 1)


def _checked(checker: RewardFunction, answers: Sequence[Answer], seconds: float) -> Rewards:
    rewards, raised, hung, told = list[float](), 0, 0, None
    for answer in answers:
        rewards.append(0.0)
        if answer.truncated:
            continue
        try:
            with _alarm(seconds):
                rewards[-1] = _finite(checker(answer.prompt, answer.text))
        except _TimeIsUp:
            hung += 1
            told = told or f"it took more than {seconds} s for {answer.prompt!r}, {answer.text!r}"
        except Exception as error:  # noqa: BLE001 (counted and told)
            raised += 1
            what = f"{type(error).__name__}: {error}"
            told = told or f"it raised {what} for {answer.prompt!r}, {answer.text!r}"
    return Rewards(rewards, raised, hung, told)


def _finite(reward: float) -> float:
    if not math.isfinite(reward):
        raise ValueError(f"it gave {reward}")
    return float(reward)


class _TimeIsUp(BaseException):
    """What a checker is interrupted with; no `except Exception` of its own catches it."""


@contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    """Raise `_TimeIsUp` in the block once its time is up, and again if it goes on."""

    def ring(*_: object) -> None:
        raise _TimeIsUp

    handler = signal.signal(signal.SIGALRM, ring)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds, seconds)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)  # a signal may have come before the line above
        signal.signal(signal.SIGALRM, handler)
