"""Inject faults into training steps.

A training step is a function `(state, batch) -> (state, metrics)`. An injector takes a step and
returns one that does the same, except for one fault. So the library needs no hooks for its tests,
and a user's own loop can be tested in the same way.

    train_step = kill_at(7, rank=1)(make_train_step(cfg, ps, stages, optimizer))

`at` selects steps: the number of a step (7 is step 7 of metrics.jsonl, which starts with
`state.step == 6`), several numbers, or a function of the state. A step that is repeated after a
rollback has the same number; `lambda state: state.cursor.batch == 6` follows the data instead.
`rank` selects ranks: one, several, or by default all.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch.distributed as dist

from trainkit.types import StepBatch, TrainState

TrainStep = Callable[[TrainState, StepBatch], tuple[TrainState, Any]]
"""`TrainStep(state, batch) -> (state, metrics)`: all of one step, as in a recipe."""

Injector = Callable[[TrainStep], TrainStep]
"""`Injector(train_step) -> train_step`, with a fault."""

At = int | Collection[int] | Callable[[TrainState], bool]
"""The number of a step, several, or a predicate of the state that a step starts with."""

Ranks = int | Collection[int] | None
"""A rank, several, or None for all."""


def act_at(at: At, act: Callable[[TrainState], Any], *, rank: Ranks = None) -> Injector:
    """Return an injector that calls a function before a step, for any other fault.

    Args:
        at: The steps; see the head of this module.
        act: Called with the state that the step starts with.
        rank: The ranks; all by default.

    Examples:
        >>> step = act_at({2, 4}, lambda state: print("before step", state.step + 1))(
        ...     lambda state, batch: (state, {})
        ... )
        >>> _ = [step(TrainState(step=done), None) for done in range(5)]
        before step 2
        before step 4
    """

    def take(train_step: TrainStep, state: TrainState, batch: StepBatch) -> tuple[TrainState, Any]:
        act(state)
        return train_step(state, batch)

    return _replace_steps(at, rank, take)


def act_after(at: At, act: Callable[[TrainState], Any], *, rank: Ranks = None) -> Injector:
    """Return an injector that calls a function after a step, before the step returns.

    The parameters are updated, and the caller's counters are not.

    Args:
        at: The steps; see the head of this module.
        act: Called with the state that the step returns.
        rank: The ranks; all by default.

    Examples:
        >>> step = act_after(1, lambda state: print("step 1 done"))(
        ...     lambda state, batch: (state, {})
        ... )
        >>> _ = step(TrainState(), None)
        step 1 done
    """

    def take(train_step: TrainStep, state: TrainState, batch: StepBatch) -> tuple[TrainState, Any]:
        outcome = train_step(state, batch)
        act(outcome[0])
        return outcome

    return _replace_steps(at, rank, take)


def wrap_step(
    at: At, around: Callable[[], AbstractContextManager[Any]], *, rank: Ranks = None
) -> Injector:
    """Return an injector that runs a step inside a `with` block, for faults that last for a step.

    Args:
        at: The steps; see the head of this module.
        around: Returns the context manager.
        rank: The ranks; all by default.

    Examples:
        >>> import contextlib, io
        >>> output = io.StringIO()
        >>> step = wrap_step(2, lambda: contextlib.redirect_stdout(output))(
        ...     lambda state, batch: (state, print("step", state.step + 1))
        ... )
        >>> _ = [step(TrainState(step=done), None) for done in range(2)]
        step 1
    """

    def take(train_step: TrainStep, state: TrainState, batch: StepBatch) -> tuple[TrainState, Any]:
        with around():
            return train_step(state, batch)

    return _replace_steps(at, rank, take)


def until_next(
    at: At, around: Callable[[], AbstractContextManager[Any]], *, rank: Ranks = None
) -> Injector:
    """Return an injector like `wrap_step` whose `with` block lasts until the next step starts.

    So the fault is there again when a guard recomputes the batch to find its cause.

    Args:
        at: The steps; see the head of this module.
        around: Returns the context manager.
        rank: The ranks; all by default.

    Examples:
        >>> import contextlib, io
        >>> output = io.StringIO()
        >>> step = until_next(1, lambda: contextlib.redirect_stdout(output))(
        ...     lambda state, batch: (state, {})
        ... )
        >>> _ = step(TrainState(step=0), None)
        >>> print("as if in the step", end="")
        >>> _ = step(TrainState(step=1), None)
        >>> output.getvalue()
        'as if in the step'
    """

    def wrap(train_step: TrainStep) -> TrainStep:
        # Closed at the next step; after the last one the block is never left.
        stack = ExitStack()

        def injected(state: TrainState, batch: StepBatch) -> tuple[TrainState, Any]:
            stack.close()  # the block of an earlier step
            if _is_due(at, rank, state):
                stack.enter_context(around())
            return train_step(state, batch)

        return injected

    return wrap


def _replace_steps(
    at: At, rank: Ranks, take: Callable[[TrainStep, TrainState, StepBatch], tuple[TrainState, Any]]
) -> Injector:
    """Return an injector that replaces the matching steps by another function."""

    def wrap(train_step: TrainStep) -> TrainStep:
        def injected(state: TrainState, batch: StepBatch) -> tuple[TrainState, Any]:
            is_due = _is_due(at, rank, state)
            return take(train_step, state, batch) if is_due else train_step(state, batch)

        return injected

    return wrap


def is_this_rank(ranks: Ranks) -> bool:
    """Return whether this rank is one of some ranks; all are, for None.

    Examples:
        >>> is_this_rank(0), is_this_rank([1, 2]), is_this_rank(None)  # of a single process
        (True, False, True)
    """
    # Not when an injector is made, since that may be before the process group is.
    rank = dist.get_rank() if dist.is_initialized() else 0
    return ranks is None or rank in ({ranks} if isinstance(ranks, int) else ranks)


def _is_due(at: At, ranks: Ranks, state: TrainState) -> bool:
    if not is_this_rank(ranks):
        return False
    if callable(at):
        return at(state)
    # The state counts the steps before this one.
    return state.step + 1 in ({at} if isinstance(at, int) else at)
