"""Save after an error without communication: another rank may be inside a collective.

A rank that failed writes its files before it exits. Its exit breaks the connections of the others,
so they leave the collective that they wait in, and write theirs.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from threading import Event

import attrs

from trainkit.types import (
    Axis,
    CheckpointError,
    Log,
    TrainState,
)
from trainkit.weights.checkpoint.background_save import list_save_threads
from trainkit.weights.checkpoint.components import Components
from trainkit.weights.checkpoint.run_id import mark_saved
from trainkit.weights.checkpoint.snapshot import Snapshot
from trainkit.weights.checkpoint.write import Destination, commit, point_to, write_rank


@attrs.frozen(eq=False)
class UnsavedState:
    """A complete state that is not saved yet when an error ends the run.

    With `after_peer_error` the error was caused by the exit of another rank. This rank then writes
    its files only if another one has: a rank that was killed leaves nothing to complete. `log`
    takes a message on any rank. `components` are copies of them as they were with this one; by
    default the objects are read.
    """

    state: TrainState
    log: Log
    score: float | None = None
    after_peer_error: bool = False
    components: Components | None = None


def write_and_commit(
    take: Callable[[], Snapshot],
    target: Destination,
    axis: Axis,
    *,
    after_peer_error: bool,
) -> Path | None:
    """Write this rank's files of a checkpoint, and commit it if this rank is the last to do so.

    Args:
        take: Takes the snapshot, without communicating, with the facts on every rank.
        target: Where it goes, the same on all ranks that hold the same state.
        axis: The ranks. Nothing is sent on it.
        after_peer_error: Write only if another rank has written its files.

    Returns:
        The checkpoint, on the rank that has committed it.

    Raises:
        CheckpointError: The previous save has not finished.
        DiskError: A file cannot be written.
        NumericsError: A number is not finite.

    Effects:
        Writes to disk, and waits until it is durable.
    """
    # A snapshot reuses the memory that such a thread is still writing.
    if list_save_threads():
        raise CheckpointError("the save before it has not ended, and holds the memory of the copy")
    # Each rank leaves a mark here, outside of the directory that the commit renames.
    written = target.staging.with_name(f"{target.staging.name}-written")
    if after_peer_error and not written.exists():
        return None
    snapshot = take()
    # With an event that nobody sets: nothing abandons this save.
    write_rank(snapshot, target, axis.index, Event())
    written.mkdir(exist_ok=True)
    (written / f"{axis.index}").touch()
    if not all((written / f"{rank}").exists() for rank in range(axis.count)):
        return None
    # Two ranks may both see all marks. Creating a file exclusively chooses one of them.
    try:
        (written / "commit").touch(exist_ok=False)
    except OSError:  # another rank is committing, or has committed
        return None
    path = commit(snapshot, target)
    shutil.rmtree(written, ignore_errors=True)
    point_to(path)
    mark_saved(target.run_dir)
    return path
