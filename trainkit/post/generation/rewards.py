"""Compute rewards of answers with a reward function that may fail or hang."""

from __future__ import annotations

import ctypes
import math
import signal
import threading
import time
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
"""`reward_function(prompt, answer) -> reward`."""


@attrs.frozen
class Rewards:
    """Rewards of a rollout, equal on all ranks.

    Attributes:
        rewards: One per answer; 0 if it is truncated or the reward function failed.
        raised: How often the reward function raised, or returned a value that is not finite.
        hung: How often it timed out.
        first_failure: A description of the first failure, or None.
    """

    rewards: list[float]
    raised: int = 0
    hung: int = 0
    first_failure: str | None = None

    def report(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """Summarize a rollout for an event: the mean reward, counts, and the first failure.

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
            "first_failure": self.first_failure,
        }


def compute_rewards(
    reward_function: RewardFunction,
    answers: Sequence[Answer],
    *,
    seconds: float = 1.0,
    axis: Axis = SOLO,
) -> Rewards:
    """Compute the reward of each answer; failures of the reward function count as 0.

    A truncated answer gets 0 without a call; an empty one is passed to the reward function. Only
    the first rank of the axis calls it: timeouts could differ between ranks.

    Args:
        reward_function: Called with prompt and answer.
        answers: The rollout, equal on all ranks.
        seconds: Timeout of one call. It is enforced by a signal, so the reward function must be
            Python, or C that handles signals, as `re` does; other calls are ended by the run's
            `step_timeout`. Outside the main thread, as in a worker of Ray, it must be Python: a
            call of C is interrupted when it is over.
        axis: The ranks that call this together, `ps.world`.

    Returns:
        The rewards, and the number of failures.

    Raises:
        ValueError: `seconds` is not above 0.

    Effects:
        Calls the reward function. Meanwhile sets a handler of SIGALRM and its timer, and restores
        the old ones; outside the main thread it starts a thread instead. Communicates on `axis`.

    Examples:
        >>> def is_correct(prompt, answer):
        ...     return float(int(answer) == 19)
        >>> samples = [("19", False), ("", False), ("1911", True)]
        >>> answers = [Answer("12+7=", [1], text, [2], 0, cut) for text, cut in samples]
        >>> compute_rewards(is_correct, answers).rewards
        [1.0, 0.0, 0.0]
        >>> compute_rewards(is_correct, answers).raised
        1
    """
    # Written so that NaN is rejected, too.
    if not seconds > 0:
        raise ValueError(f"compute_rewards: seconds must be above 0, got {seconds}")

    def compute() -> dict[str, Any] | None:
        if axis.index:
            return None
        rewards: list[float] = []
        failures: list[str] = []
        raised = hung = 0
        for answer in answers:
            rewards.append(0.0)  # stays, unless the reward function returns another one
            if answer.truncated:
                continue
            # A failure is no reason to end a run of days; the first one is reported.
            example = f"{answer.prompt!r}, {answer.text!r}"
            try:
                with _time_limit(seconds):
                    reward = reward_function(answer.prompt, answer.text)
                    if not math.isfinite(reward):
                        raise ValueError(f"it returned {reward}")  # noqa: TRY301 (counted)
                    rewards[-1] = float(reward)
            except _RewardTimeout:
                hung += 1
                failures.append(f"it took more than {seconds} s for {example}")
            except Exception as error:  # noqa: BLE001 - any error of a user's function is counted
                raised += 1
                failures.append(f"it raised {type(error).__name__}: {error} for {example}")
        return attrs.asdict(Rewards(rewards, raised, hung, failures[0] if failures else None))

    return Rewards(**run_on_all_ranks(compute, axis)[0])


def compute_advantages(answers: Sequence[Answer], rewards: Rewards) -> Tensor:
    """Normalize rewards by mean and standard deviation of the answers to the same prompt.

    `objectives.group_advantages` of a rollout; any other function of rewards and groups can take
    its place.

    Returns:
        fp64 `[N]`.

    Examples:
        >>> answers = [Answer("1+1=", [1], text, [2], 0) for text in "23"]
        >>> compute_advantages(answers, Rewards([1.0, 0.0]))
        tensor([ 0.7070, -0.7070], dtype=torch.float64)
    """
    groups = torch.tensor([answer.group for answer in answers])
    values = torch.tensor(rewards.rewards, dtype=torch.float64)
    return group_advantages(values, groups, num_groups=int(groups.max()) + 1)


class _RewardTimeout(BaseException):
    """Interrupts a reward function; no `except Exception` in it catches a BaseException."""


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise `_RewardTimeout` in the block after some seconds, and again each time they pass."""
    if threading.current_thread() is not threading.main_thread():
        with _interrupt_thread(seconds):
            yield
        return

    def interrupt(*_: object) -> None:
        raise _RewardTimeout

    handler = signal.signal(signal.SIGALRM, interrupt)
    begin = time.monotonic()
    # Somebody else's timer waits, and goes on from here.
    left, interval = signal.getitimer(signal.ITIMER_REAL)
    try:
        # Again each time: a bare `except:` in the reward function may swallow the first one.
        signal.setitimer(signal.ITIMER_REAL, seconds, seconds)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)  # the signal may interrupt the line above
        signal.signal(signal.SIGALRM, handler)
        if left:
            left = max(left - (time.monotonic() - begin), 1e-6)
            signal.setitimer(signal.ITIMER_REAL, left, interval)


@contextmanager
def _interrupt_thread(seconds: float) -> Iterator[None]:
    """Raise `_RewardTimeout` in this thread, which is not the main one and gets no signals."""
    ident = ctypes.c_ulong(threading.get_ident())
    raise_in_thread = ctypes.pythonapi.PyThreadState_SetAsyncExc
    is_over = False
    lock = threading.Lock()  # nothing is raised once the block is over
    done = threading.Event()

    def interrupt() -> None:
        while not done.wait(seconds):
            with lock:
                if not is_over:
                    raise_in_thread(ident, ctypes.py_object(_RewardTimeout))

    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()

    def end() -> None:
        nonlocal is_over
        with lock:
            is_over = True
            raise_in_thread(ident, None)  # what was raised last, and has not arrived
        done.set()
        thread.join()

    try:
        try:
            yield
        finally:
            end()
    finally:
        end()  # the exception may have arrived in the line above
