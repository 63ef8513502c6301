"""Roll back: take an earlier state again, go on behind the data that went wrong, and remember it.

PaLM's authors found that a spike in the loss does not come back when training is taken up a hundred
steps before it and the batches around it are left out (Chowdhery et al., "PaLM: Scaling Language
Modeling with Pathways", 2022, section 5.1): it takes that data and that state together.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import nn

from trainkit.collectives import run_on_all_ranks
from trainkit.health import Action, make_stop_error, restore_health
from trainkit.types import CheckpointError, Log, ParallelState, TrainState, log_warning
from trainkit.weights.checkpoint.facts import Facts, ResumeRules
from trainkit.weights.checkpoint.load import load_checkpoint
from trainkit.weights.checkpoint.manifest import (
    clear_directory,
    first_verified,
    list_checkpoints,
    step_of,
)
from trainkit.weights.checkpoint.save import save_checkpoint


def roll_back(
    run_dir: Path | str,
    state: TrainState,
    stages: Sequence[nn.Module],
    optimizer: torch.optim.Optimizer,
    ps: ParallelState,
    *,
    before: int,
    max_rollbacks: int = 3,
    facts: Facts | None = None,
    log: Log = log_warning,
    **saving: Any,
) -> TrainState:
    """Take the newest checkpoint before the numbers went wrong, and go on with the data after.

    What comes back is the checkpoint's state with the present cursor: the batches between are never
    trained on. It is saved at once under a name of its own, so that a run that is killed now goes
    on from there. Checkpoints of the branch that is given up are set aside, none is deleted.

    Args:
        run_dir: The run directory.
        state: The counters now. Its cursor is kept, and `health` says what has been rolled back
            before.
        stages: This rank's stages.
        optimizer: The optimizer of their parameters.
        ps: The layout.
        before: The last step whose numbers were good: a later checkpoint is not taken.
        max_rollbacks: How many rollbacks a run may do.
        facts: As for `resume`; what has changed since the checkpoint is not asked about.
        log: Called on rank 0 with what was done.
        **saving: What `save_checkpoint` takes besides: the configuration, say.

    Returns:
        The counters to go on with; their health is as `health.restore_health` says.

    Raises:
        NumericsError: The run has rolled back as often as it may; all the steps are named.
        CheckpointError: There is no checkpoint at or before step `before` that verifies.
        DiskError: The state could not be saved.

    Effects:
        Writes parameters and optimizer state; moves directories; writes a checkpoint; communicates
        on `ps.world`.

    Examples:
        >>> import tempfile
        >>> from trainkit.mesh import solo_parallel
        >>> model = nn.Linear(1, 1)
        >>> run = [model], torch.optim.SGD(model.parameters()), solo_parallel()
        >>> with tempfile.TemporaryDirectory() as out:
        ...     _ = save_checkpoint(out, TrainState(step=2), *run)
        ...     roll_back(out, TrainState(step=5), *run, before=3, log=lambda _: None).step
        2
    """
    run_dir = Path(run_dir)
    live = {"first_bad": float(before + 1), **state.health}
    if int(live.get("rollbacks", 0)) >= max_rollbacks:  # pyrefly: ignore[bad-argument-type]
        raise make_stop_error(
            Action("stop", f"a run may roll back {max_rollbacks} times", before), live
        )
    chosen = run_on_all_ranks(
        lambda: _newest_before(run_dir, before) if ps.world.index == 0 else None, ps.world
    )[0]
    # It may be of before the run was continued with another optimizer, which was asked for then.
    changes = ResumeRules(free=("optimizer",))
    loaded = load_checkpoint(chosen, stages, optimizer, changes=changes, axis=ps.world, log=log)
    memory = restore_health(loaded.health, live)
    based = attrs.evolve(loaded, cursor=state.cursor, health=memory)

    def set_aside() -> None:
        if ps.world.index == 0:
            log(
                f"rolled back from step {state.step} to {chosen}; the data of the steps between is "
                f"left out (rollback {memory['rollbacks']:.0f} of {max_rollbacks})"
            )
            clear_directory(run_dir / "checkpoints", Path(chosen), chosen, log=log)

    run_on_all_ranks(set_aside, ps.world)
    save_checkpoint(run_dir, based, stages, optimizer, ps, facts=facts, **saving)
    return based


def _newest_before(run_dir: Path, before: int) -> str:
    passed_over: list[str] = []
    known = [path for path in list_checkpoints(run_dir / "checkpoints") if step_of(path) <= before]
    found = first_verified(known, passed_over, lambda _: None)
    if found is not None:
        return str(found.absolute())
    raise CheckpointError(
        f"roll_back: there is no checkpoint at or before step {before} that verifies in {run_dir}",
        where=run_dir,
        got=passed_over,
        hint="begin afresh with --resume never, and save more often",
    )
