"""Faults to put into a run on purpose: what a trainer must survive, in the tests of anybody.

A training step is a function `(state, batch) -> (state, metrics)`. An injector is a function from a
step to a step that does as it did, but for one thing that goes wrong: so a library needs no hooks
for its tests, and a user's own loop can be tried in the same way.

    train_step = kill_at(7, rank=1)(make_train_step(cfg, ps, stages, optimizer))

`at` says when: the number of a step (the 7 that metrics.jsonl will call step 7, which begins with
`state.step == 6`), several of them, or a question about the state. A step that is taken again after
a rollback has the same number: `lambda state: state.cursor.batch == 6` follows the data instead.
`rank` says where: on one rank, on several, by default on all. Files have faults of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch.distributed as dist

from trainkit.types import StepBatch, TrainState

TrainStep = Callable[[TrainState, StepBatch], tuple[TrainState, Any]]
"""`TrainStep(state, batch) -> (state, metrics)`: all of one step, as a recipe writes it."""

Injector = Callable[[TrainStep], TrainStep]
"""From a train step to one in which something goes wrong."""

At = int | Collection[int] | Callable[[TrainState], bool]
"""When: the number of a step, several, or whether a step that begins with this state is meant."""

Ranks = int | Collection[int] | None
"""Where: a rank, several, or all of them."""


def act_at(at: At, act: Callable[[TrainState], Any], *, rank: Ranks = None) -> Injector:
    """Return an injector that calls a function before a step: any fault that has no name here.

    Args:
        at: When; see the head of this module.
        act: Called with the state that the step begins with.
        rank: Where; by default on all ranks.

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
    """Return an injector that calls a function after a step, before its caller hears of it.

    The parameters have moved and the counters of the caller have not.

    Args:
        at: When; see the head of this module.
        act: Called with the state that the step has come to.
        rank: Where; by default on all ranks.

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
    """Return an injector that takes a step inside a `with` block: any fault that lasts for a step.

    Args:
        at: When; see the head of this module.
        around: Makes the block's context.
        rank: Where; by default on all ranks.

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
    """Return an injector like `wrap_step` whose `with` block lasts until the next step begins.

    What a batch does to a step it does again when the step is taken once more, as a guard does that
    looks for what was wrong.

    Args:
        at: When; see the head of this module.
        around: Makes the block's context.
        rank: Where; by default on all ranks.

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
        held = ExitStack()

        def injected(state: TrainState, batch: StepBatch) -> tuple[TrainState, Any]:
            held.close()
            if _is_due(at, rank, state):
                held.enter_context(around())
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


def _is_due(at: At, ranks: Ranks, state: TrainState) -> bool:
    own = dist.get_rank() if dist.is_initialized() else 0
    if ranks is not None and own not in ({ranks} if isinstance(ranks, int) else ranks):
        return False
    if callable(at):
        return at(state)
    return state.step + 1 in ({at} if isinstance(at, int) else at)
