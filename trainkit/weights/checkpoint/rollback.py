"""Roll back to an earlier checkpoint, and skip the batches that were read since.

A spike in PaLM's loss did not recur when training restarted a hundred steps earlier and skipped the
batches around the spike (Chowdhery et al., "PaLM: Scaling Language Modeling with Pathways", 2022,
section 5.1). It takes that data and that state together to cause a spike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import nn

from trainkit.collectives import run_on_all_ranks
from trainkit.health import Action, make_stop_error, restore_health
from trainkit.types import (
    CheckpointError,
    Log,
    ParallelState,
    TrainState,
    log_warning,
)
from trainkit.weights.checkpoint.components import Components
from trainkit.weights.checkpoint.facts import Facts, ResumeRules
from trainkit.weights.checkpoint.load import load_checkpoint
from trainkit.weights.checkpoint.manifest import (
    clear_directory,
    find_first_verified,
    list_checkpoints,
    parse_step,
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
    config: Mapping[str, Any] | None = None,
    log: Log = log_warning,
    components: Components | None = None,
) -> TrainState:
    """Load the newest checkpoint before the numbers went bad, and continue with the data after.

    The result is the checkpoint's state with the present cursor: the batches in between are never
    trained on. It is saved at once under a new name, so that a run that is killed now resumes from
    it. Checkpoints of the abandoned branch are moved, and none is deleted.

    Args:
        run_dir: The run directory.
        state: The present counters. The cursor stays, and `health` counts earlier roll-backs.
        stages: This rank's stages.
        optimizer: The optimizer of their parameters.
        ps: The layout.
        before: The last step with good numbers; no later checkpoint is loaded.
        max_rollbacks: How many roll-backs a run may do.
        facts: As for `save_checkpoint`. They are not compared with the loaded checkpoint.
        config: As for `save_checkpoint`.
        log: Called on rank 0 with what was done.
        components: Objects whose state goes back too; see `resume`.

    Returns:
        The counters to continue with; see `health.restore_health` for their health.

    Raises:
        NumericsError: The run has used up its roll-backs; the message lists their steps.
        CheckpointError: No checkpoint at or before step `before` verifies.
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
    # The health may know an earlier bad step, which counts.
    live = {"first_bad": float(before + 1), **state.health}
    if int(live.get("rollbacks", 0)) >= max_rollbacks:  # pyrefly: ignore[bad-argument-type]
        raise make_stop_error(
            Action("stop", f"a run may roll back {max_rollbacks} times", before), live
        )
    # On one rank: hashing on all would read every checkpoint once per rank.
    chosen = run_on_all_ranks(
        lambda: _find_newest(run_dir, before) if ps.world.index == 0 else None, ps.world
    )[0]
    loaded = load_checkpoint(
        chosen,
        stages,
        optimizer,
        # The checkpoint may be older than a change of these that the user allowed then.
        rules=ResumeRules(allow=("optimizer", "components")),
        axis=ps.world,
        log=log,
        components=components,
    )
    health = restore_health(loaded.health, live)
    rolled_back = attrs.evolve(loaded, cursor=state.cursor, health=health)

    def move_branch() -> None:
        if ps.world.index == 0:
            log(
                f"rolled back from step {state.step} to {chosen}; the data of the steps between is "
                f"left out (rollback {health['rollbacks']:.0f} of {max_rollbacks})"
            )
            # As if the checkpoint had been requested by its path: later ones are moved aside.
            clear_directory(run_dir / "checkpoints", Path(chosen), chosen, log=log)

    run_on_all_ranks(move_branch, ps.world)
    # At once: a run that is killed now must not resume before the bad batches again.
    save_checkpoint(
        run_dir,
        rolled_back,
        stages,
        optimizer,
        ps,
        facts=facts,
        config=config,
        components=components,
    )
    return rolled_back


def _find_newest(run_dir: Path, before: int) -> str:
    paths = [
        path for path in list_checkpoints(run_dir / "checkpoints") if parse_step(path) <= before
    ]
    newest, skipped = find_first_verified(paths, lambda _: None)
    if newest is not None:
        return str(newest.absolute())
    raise CheckpointError(
        f"roll_back: there is no checkpoint at or before step {before} that verifies in {run_dir}",
        where=run_dir,
        got=skipped,
        hint="start from scratch with --resume never, and save more often",
    )
