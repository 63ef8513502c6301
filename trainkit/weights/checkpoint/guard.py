"""The numbers of a run under guard: what is done after a step whose loss, state or replicas err."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import attrs
import torch
from torch import Tensor, nn

from trainkit.collectives import all_gather_objects
from trainkit.grads import find_nonfinite
from trainkit.health import Action, HealthState, Policy, judge_step, make_stop_error
from trainkit.parallel.names import modules_of
from trainkit.types import (
    Axis,
    CheckpointError,
    ForwardBackward,
    Log,
    NumericsError,
    ParallelState,
    StepBatch,
    TrainState,
    log_warning,
)
from trainkit.weights.checkpoint.background_save import SaveResult
from trainkit.weights.checkpoint.facts import Facts
from trainkit.weights.checkpoint.replicas import (
    find_nonfinite_state,
    make_replica_check,
    refuse_drift,
)
from trainkit.weights.checkpoint.rollback import roll_back
from trainkit.weights.checkpoint.save import Collect, Save, open_saver

_Record = Mapping[str, Any]


class Guard(Protocol):
    """Return the state to go on with after a step on a batch, whatever its numbers were.

    A step that others have followed since has no batch, as its parameters are gone; `seen` is the
    health that it began with, where steps before it had not been judged yet.
    """

    def __call__(
        self,
        state: TrainState,
        record: _Record,
        batch: StepBatch | None,
        *,
        seen: HealthState | None = None,
    ) -> TrainState: ...


@contextmanager
def open_guarded_saver(
    run_dir: Path | str,
    stages: Sequence[nn.Module] | nn.Module,
    optimizer: torch.optim.Optimizer,
    ps: ParallelState,
    *,
    policy: Policy,
    replay: ForwardBackward,
    event: Callable[..., None],
    log: Log = log_warning,
    facts: Facts | None = None,
    config: Mapping[str, Any] | None = None,
    **how: Any,
) -> Iterator[tuple[Save, Guard]]:
    """Yield `(save, guard)`: `open_saver` and `make_guard` of one run.

    Args:
        run_dir: The run directory.
        stages: This rank's stages.
        optimizer: The optimizer of their parameters.
        ps: The layout.
        policy: What is done about bad numbers; see `make_guard`.
        replay: What the steps take their gradients with; see `make_guard`.
        event: Where lines of saves and of bad steps go, as `open_run_sinks` yields it.
        log: Called on rank 0 with what a user wants to read.
        facts: As for `save_checkpoint`.
        config: The resolved configuration, plain values.
        **how: What `open_saver` takes besides: `retention`, `background`, `grace`, `before_commit`,
            `unsaved`, `progress`.

    Raises:
        DiskError: On leaving: the last save could not be written.
        NumericsError: See `make_guard` and `open_saver`.

    Effects:
        Those of `open_saver` and of `make_guard`.
    """
    run = (run_dir, stages, optimizer, ps)
    said: dict[str, Any] = {"facts": facts, "config": config, "log": log}
    with open_saver(*run, event=event, **said, **how) as (save, saved):
        numbers: dict[str, Any] = {"policy": policy, "replay": replay, "event": event}
        guard = make_guard(*run, saved=saved, **numbers, **said)
        yield _save_once(save, guard)
        saved(wait=True)


def _save_once(save: Save, guard: Guard) -> tuple[Save, Guard]:
    """Return the two so that a state which a roll-back has just saved is not saved again."""
    based: list[TrainState] = []

    def guard_and_see(
        state: TrainState,
        record: _Record,
        batch: StepBatch | None,
        *,
        seen: HealthState | None = None,
    ) -> TrainState:
        after = guard(state, record, batch, seen=seen)
        based[:] = [after] if after.step < state.step else []
        return after

    def save_what_is_new(state: TrainState, score: float | None = None) -> None:
        if not any((state.step, state.cursor) == (known.step, known.cursor) for known in based):
            save(state, score)

    return save_what_is_new, guard_and_see


def make_guard(
    run_dir: Path | str,
    stages: Sequence[nn.Module] | nn.Module,
    optimizer: torch.optim.Optimizer,
    ps: ParallelState,
    *,
    policy: Policy,
    saved: Collect,
    replay: ForwardBackward,
    event: Callable[..., None],
    log: Log = log_warning,
    **saving: Any,
) -> Guard:
    """Return `guard(state, record, batch)`: tells, rolls back or ends a run as a policy has it.

    A good step costs it nothing but the canary's hashes. A bad one has been skipped, so that its
    parameters are still there: its backward pass is taken once more, and the rank and the parameter
    are told where its numbers stop being finite. A run that has to go back goes back there and
    then: the state that `guard` returns is an earlier one, saved anew, whose data begins behind
    what went wrong. So do runs of which a save has found that they are not finite. Replicas that
    have come to differ end the run: which of them is right cannot be known from within.

    Args:
        run_dir: The run directory.
        stages: This rank's stages.
        optimizer: The optimizer of their parameters.
        ps: The layout.
        policy: See `health.Policy`.
        saved: What tells of saves that have ended, from `open_saver`.
        replay: What the steps take their gradients with, from `make_forward_backward`: it is taken
            again after a bad step, never the optimizer.
        event: Where a line for each bad step goes, as `open_run_sinks` yields it.
        log: Called on rank 0 with what was bad in a step, and with what a roll-back did.
        **saving: What `save_checkpoint` takes besides: the facts, the configuration.

    Returns:
        A function of the state after a step, of its record, which has `loss`, `grad_norm`,
        `tokens` and `skipped`, and of its batch; every rank must call it for every step, in their
        order, if not at once: see `Guard`.

    Raises:
        NumericsError: From `guard`: roll-backs are used up, there is no checkpoint to go back to,
            or replicas differ.

    Effects:
        `guard` may write parameters, optimizer state and checkpoints; it communicates on
        `ps.world` after bad steps and at the canary's.
    """
    stages = modules_of(stages)
    damage = partial(find_nonfinite_state, stages, optimizer, ps.world)
    looks = [make_replica_check(stages, optimizer, ps)]

    def guard(
        state: TrainState,
        record: _Record,
        batch: StepBatch | None,
        *,
        seen: HealthState | None = None,
    ) -> TrainState:
        action, state = judge_step(state, record, policy, seen=seen, damage=damage)
        if action.reason:
            guilty = list[str]()
            if batch and action.kind != "apply" and _is_bad_somewhere(record, ps.world):
                guilty = find_nonfinite(_again(replay, record, batch), stages, ps.world)
            event(action.kind, step=state.step, reason=action.reason, guilty=guilty)
            if ps.world.index == 0:
                log(_bad_step(state.step, action, guilty))
        action = _after_saves(saved(), action)
        if action.kind == "stop":
            raise make_stop_error(action, state.health)
        if action.kind == "rollback":
            saved(wait=True)  # a save of what is given up must not come after what is gone back to
            most = policy.max_rollbacks
            options: dict[str, Any] = {"before": action.before, "max_rollbacks": most, "log": log}
            try:
                state = roll_back(run_dir, state, stages, optimizer, ps, **options, **saving)
            except CheckpointError as error:  # the numbers ended the run, not the checkpoints
                told = attrs.evolve(action, reason=f"{action.reason}; {error}")
                raise make_stop_error(told, state.health) from error
            saved(forgive=True)  # the checkpoint that it has made stands in for a failed save
            event("rolled back", step=state.step, reason=action.reason)
            looks[0] = make_replica_check(stages, optimizer, ps)
        else:
            refuse_drift(looks[0](state.step))
        return state

    return guard


def _again(
    replay: ForwardBackward, record: _Record, batch: StepBatch
) -> Callable[[], Mapping[str, Tensor]]:
    """Return what takes a step's passes again."""
    tokens = torch.as_tensor(record["tokens"])
    return partial(replay, batch.microbatches, denominator=tokens)


def _is_bad_somewhere(record: _Record, axis: Axis) -> bool:
    """Say whether a number of a step is not finite on any rank: a spike has nothing to look for."""
    finite = [math.isfinite(record[name]) for name in ("loss", "grad_norm")]
    return not all(map(all, all_gather_objects(finite, axis)))


def _bad_step(step: int, action: Action, guilty: Sequence[str]) -> str:
    done = {"apply": "it was taken", "skip": "it was skipped"}.get(action.kind, action.kind)
    return f"step {step}: {'; '.join([action.reason, *guilty, done])}"


def _after_saves(ended: Sequence[SaveResult], action: Action) -> Action:
    """Return a roll-back where a save has found its state not finite, else the action."""
    bad = [done for done in ended if isinstance(done.error, NumericsError)]
    if not bad or action.kind in ("rollback", "stop"):
        return action
    return Action("rollback", str(bad[0].error), before=bad[0].step - 1)
