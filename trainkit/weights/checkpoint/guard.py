"""Guard the numbers of a run: what happens after a step with a bad loss, state or replica."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import attrs
import torch
from torch import nn

from trainkit.collectives import all_gather_objects
from trainkit.grads import find_nonfinite
from trainkit.health import Action, HealthState, Policy, judge_step, make_stop_error
from trainkit.parallel.parameters import modules_of
from trainkit.types import (
    CheckpointError,
    ConfigError,
    ForwardBackward,
    Log,
    NumericsError,
    ParallelState,
    StepBatch,
    TrainState,
    log_warning,
)
from trainkit.weights.checkpoint.components import Components
from trainkit.weights.checkpoint.emergency_save import UnsavedState
from trainkit.weights.checkpoint.facts import Facts
from trainkit.weights.checkpoint.replica_check import (
    find_nonfinite_state,
    make_replica_check,
    refuse_drift,
)
from trainkit.weights.checkpoint.retention import Retention
from trainkit.weights.checkpoint.rollback import roll_back
from trainkit.weights.checkpoint.save import Collect, Save, open_saver
from trainkit.weights.checkpoint.write import SaveProgress


class Guard(Protocol):
    """Return the state to continue with after a step on a batch, whatever its numbers were.

    `batch` is None for a step that others have followed since, whose parameters are gone. `seen` is
    the health at the start of the step, if earlier steps had not been checked by then.
    """

    def __call__(
        self,
        state: TrainState,
        record: Mapping[str, Any],
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
    retention: Retention | None = None,
    background: bool = True,
    grace: float = 25.0,
    before_commit: Callable[[], None] | None = None,
    get_unsaved: Callable[[BaseException], UnsavedState | None] | None = None,
    progress: SaveProgress | None = None,
    components: Components | None = None,
) -> Iterator[tuple[Save, Guard]]:
    """Yield `(save, guard)`: `open_saver` and `make_guard` of one run.

    Args:
        run_dir: The run directory.
        stages: This rank's stages.
        optimizer: The optimizer of their parameters.
        ps: The layout.
        policy: What to do about bad numbers; see `make_guard`.
        replay: Computes the gradients of a step; see `make_guard`.
        event: Where records of saves and of bad steps go, from `open_run_sinks`.
        log: Called on rank 0 with messages for the user.
        facts: As for `save_checkpoint`.
        config: The resolved configuration, plain values.
        retention: As for `open_saver`.
        background: As for `open_saver`.
        grace: As for `open_saver`.
        before_commit: As for `open_saver`.
        get_unsaved: As for `open_saver`.
        progress: As for `open_saver`.
        components: As for `open_saver`; a roll-back loads them again.

    Raises:
        DiskError: On leaving: the last save could not be written.
        NumericsError: See `make_guard` and `open_saver`.

    Effects:
        Those of `open_saver` and of `make_guard`.
    """
    with open_saver(
        run_dir,
        stages,
        optimizer,
        ps,
        facts=facts,
        config=config,
        retention=retention,
        background=background,
        grace=grace,
        log=log,
        before_commit=before_commit,
        event=event,
        get_unsaved=get_unsaved,
        progress=progress,
        components=components,
    ) as (save, collect_saves):
        guard = make_guard(
            run_dir,
            stages,
            optimizer,
            ps,
            policy=policy,
            collect_saves=collect_saves,
            replay=replay,
            event=event,
            log=log,
            facts=facts,
            config=config,
            components=components,
        )
        yield _skip_duplicate_saves(save, guard)
        collect_saves(wait=True)  # writes the event of the last save


def _skip_duplicate_saves(save: Save, guard: Guard) -> tuple[Save, Guard]:
    """Return both functions, wrapped so that a state saved by a roll-back is not saved again."""
    # The state of the last call if that was a roll-back, else none.
    rolled_back: list[TrainState] = []

    def guard_and_remember(
        state: TrainState,
        record: Mapping[str, Any],
        batch: StepBatch | None,
        *,
        seen: HealthState | None = None,
    ) -> TrainState:
        # A roll-back has saved the state that it returns: a save that is due now is a duplicate.
        after = guard(state, record, batch, seen=seen)
        rolled_back[:] = [after] if after.step < state.step else []
        return after

    def save_if_new(state: TrainState, score: float | None = None) -> None:
        is_saved = any(x.step == state.step and x.cursor == state.cursor for x in rolled_back)
        if not is_saved:
            save(state, score)

    return save_if_new, guard_and_remember


def make_guard(
    run_dir: Path | str,
    stages: Sequence[nn.Module] | nn.Module,
    optimizer: torch.optim.Optimizer,
    ps: ParallelState,
    *,
    policy: Policy,
    collect_saves: Collect,
    replay: ForwardBackward,
    event: Callable[..., None],
    log: Log = log_warning,
    facts: Facts | None = None,
    config: Mapping[str, Any] | None = None,
    components: Components | None = None,
) -> Guard:
    """Return `guard(state, record, batch)`, which reports, rolls back or ends a run by a policy.

    A good step costs only the hashes of the replica check. A bad step was skipped, so its
    parameters are still there: its forward and backward pass runs again, and the report names the
    rank and the parameter whose numbers stop being finite. A roll-back happens at once: `guard`
    then returns an earlier state, saved under a new name, whose data starts after the bad batches.
    A save that finds a non-finite state has the same effect. Replicas that differ end the run,
    because nothing shows which of them is right.

    Args:
        run_dir: The run directory.
        stages: This rank's stages.
        optimizer: The optimizer of their parameters.
        ps: The layout.
        policy: See `health.Policy`.
        collect_saves: Returns the saves that have finished, from `open_saver`.
        replay: Computes the gradients of a step, from `make_forward_backward`. It runs again after
            a bad step; the optimizer does not.
        event: Where a record of each bad step goes, from `open_run_sinks`.
        log: Called on rank 0 with what was bad in a step, and what a roll-back did.
        facts: As for `save_checkpoint`, for the checkpoint of a roll-back.
        config: Likewise.
        components: Objects whose state a roll-back loads too; see `resume`.

    Returns:
        A function of the state after a step, of its record (`loss`, `grad_norm`, `tokens` and
        `skipped`) and of its batch. Every rank must call it for every step in order, if not at
        once; see `Guard`.

    Raises:
        NumericsError: From `guard`: the roll-backs are used up, there is no checkpoint to roll back
            to, or replicas differ.
        ConfigError: From `guard`: a save has failed because of a component.

    Effects:
        `guard` may write parameters, optimizer state and checkpoints. It communicates on `ps.world`
        after bad steps and when replicas are checked.
    """
    stages = modules_of(stages)
    return _Guard(
        stages=stages,
        optimizer=optimizer,
        ps=ps,
        policy=policy,
        collect_saves=collect_saves,
        replay=replay,
        event=event,
        log=log,
        restore=partial(
            roll_back,
            run_dir,
            stages=stages,
            optimizer=optimizer,
            ps=ps,
            max_rollbacks=policy.max_rollbacks,
            facts=facts,
            config=config,
            log=log,
            components=components,
        ),
        # By default a part every 10 steps, and all of the state within 100.
        check_replicas=make_replica_check(stages, optimizer, ps),
    )


@attrs.define(eq=False)
class _Guard:
    """The guard of a run; see `make_guard`."""

    stages: Sequence[nn.Module]
    optimizer: torch.optim.Optimizer
    ps: ParallelState
    policy: Policy
    collect_saves: Collect
    replay: ForwardBackward
    event: Callable[..., None]
    log: Log
    restore: Callable[..., TrainState]
    check_replicas: Callable[[int], list[str]]

    def __call__(
        self,
        state: TrainState,
        record: Mapping[str, Any],
        batch: StepBatch | None,
        *,
        seen: HealthState | None = None,
    ) -> TrainState:
        # It reads all of the state, and is called only if the step was bad.
        damage = partial(find_nonfinite_state, self.stages, self.optimizer, self.ps.world)
        action, state = judge_step(state, record, self.policy, seen=seen, damage=damage)
        if action.reason:
            self._report(state.step, action, record, batch)
        # A save hashes and checks all of the state, so it may find what the step's numbers hid.
        finished = self.collect_saves()
        # No later save would succeed either: a component differs, or holds what no file can.
        for save in finished:
            if isinstance(save.error, ConfigError):
                raise save.error
        bad = [save for save in finished if isinstance(save.error, NumericsError)]
        # The saved state is bad, so the last good step is one before it, or earlier.
        if bad and action.kind not in ("rollback", "stop"):
            action = Action("rollback", str(bad[0].error), before=bad[0].step - 1)
        if action.kind == "stop":
            raise make_stop_error(action, state.health)
        if action.kind != "rollback":  # after one all replicas hold what was just loaded
            refuse_drift(self.check_replicas(state.step))
            return state
        # A save of the abandoned branch must not commit after the roll-back.
        self.collect_saves(wait=True)
        try:
            state = self.restore(state, before=action.before)
        except CheckpointError as error:
            # The numbers ended the run, not the checkpoints: the exit code is theirs.
            action = attrs.evolve(action, reason=f"{action.reason}; {error.what}")
            raise make_stop_error(action, state.health) from error
        self.collect_saves(forgive=True)  # the roll-back's checkpoint replaces any failed save
        self.event("rolled back", step=state.step, reason=action.reason)
        # A new one, since the old one refers to the moments from before.
        self.check_replicas = make_replica_check(self.stages, self.optimizer, self.ps)
        return state

    def _report(
        self, step: int, action: Action, record: Mapping[str, Any], batch: StepBatch | None
    ) -> None:
        """Record a bad step and log it, with where its numbers stop being finite."""
        culprits: list[str] = []
        # The passes run again only where the parameters are still those of the step.
        if batch and action.kind != "apply":
            # A loss spike is finite everywhere, and has no culprit. Running the passes again is
            # collective: all ranks decide by what any of them has seen.
            is_finite = [math.isfinite(record[name]) for name in ("loss", "grad_norm")]
            if not all(map(all, all_gather_objects(is_finite, self.ps.world))):
                # With the step's own denominator they compute the same numbers.
                tokens = torch.as_tensor(record["tokens"])
                run_again = partial(self.replay, batch.microbatches, denominator=tokens)
                culprits = find_nonfinite(run_again, self.stages, self.ps.world)
        self.event(action.kind, step=step, reason=action.reason, guilty=culprits)
        if self.ps.world.index == 0:
            # A roll-back and a stop have messages of their own.
            outcomes = {"apply": "it was taken", "skip": "it was skipped"}
            outcome = outcomes.get(action.kind, action.kind)
            self.log(f"step {step}: {'; '.join([action.reason, *culprits, outcome])}")
