"""A save after an error, for which ranks do not communicate: another one may be in a collective.

A rank that has failed writes its part before it ends. Its end breaks the connections of the others,
so that they leave the collective that they wait in, and write theirs.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from threading import Event

import attrs

from trainkit.types import Axis, CheckpointError, Log, TrainState
from trainkit.weights.checkpoint.background_save import save_threads
from trainkit.weights.checkpoint.directory import mark_saved
from trainkit.weights.checkpoint.snapshot import Snapshot
from trainkit.weights.checkpoint.write import Destination, commit, point_to, write_rank


@attrs.frozen(eq=False)
class UnsavedState:
    """A whole state that is saved nowhere when an error ends the run.

    `follows` says that the error came from the end of another rank: this rank then writes its part
    only if another one has, since a rank that was killed has left nothing to complete. `log` takes
    a sentence on any rank.
    """

    state: TrainState
    log: Log
    score: float | None = None
    follows: bool = False


def write_and_commit(
    take: Callable[[], Snapshot], target: Destination, axis: Axis, *, follows: bool
) -> Path | None:
    """Write this rank's part of a checkpoint, and commit it if it is the last part.

    Args:
        take: Takes the snapshot, without communicating; all facts are in it.
        target: Where it goes, the same on all ranks that hold the same state.
        axis: The ranks. Nothing is sent on it.
        follows: Write only where another rank has written its part.

    Returns:
        The checkpoint, on the rank that has committed it.

    Raises:
        CheckpointError: The save before has not ended.
        DiskError: Something cannot be written.
        NumericsError: A number is not finite.

    Effects:
        Writes to disk, and waits until it is durable.
    """
    if save_threads():
        raise CheckpointError("the save before it has not ended, and holds the memory of the copy")
    written = target.staging.with_name(f"{target.staging.name}-written")
    if follows and not written.exists():
        return None
    snapshot = take()
    write_rank(snapshot, target, axis.index, Event())
    written.mkdir(exist_ok=True)
    (written / f"{axis.index}").touch()
    if not _is_last(written, axis.count):
        return None
    path = commit(snapshot, target)
    shutil.rmtree(written, ignore_errors=True)
    point_to(path)
    mark_saved(target.run_dir)
    return path


def _is_last(written: Path, ranks: int) -> bool:
    """Return whether all ranks have written their parts, and no other rank commits them."""
    if not all((written / f"{rank}").exists() for rank in range(ranks)):
        return False
    try:
        (written / "commit").touch(exist_ok=False)
    except OSError:  # another rank has begun to commit, or is done
        return False
    return True
