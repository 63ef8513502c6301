"""Save a run: copy its state, write the copy while training continues, commit it by one rename."""

from __future__ import annotations

import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import attrs
import orjson
import torch
from torch import nn

from trainkit.collectives import all_gather_objects
from trainkit.files import atomic_write
from trainkit.mesh.axes import open_gloo_axis
from trainkit.noise.hashing import hash_counters
from trainkit.parallel.offload_state import check_awake
from trainkit.parallel.parameters import get_local_box, modules_of
from trainkit.types import (
    SOLO,
    Axis,
    ConfigError,
    Log,
    ParallelState,
    TrainState,
    format_error,
    log_info,
    log_warning,
)
from trainkit.weights.checkpoint.background_save import (
    PendingSave,
    SaveResult,
    run_in_thread,
    run_now,
    start_save,
)
from trainkit.weights.checkpoint.components import Components, get_components
from trainkit.weights.checkpoint.emergency_save import UnsavedState, write_and_commit
from trainkit.weights.checkpoint.facts import Facts, facts_at
from trainkit.weights.checkpoint.manifest import dump_json
from trainkit.weights.checkpoint.retention import Retention, apply_retention
from trainkit.weights.checkpoint.run_id import mark_saved
from trainkit.weights.checkpoint.run_state import list_counters, model_tensors, state_hash
from trainkit.weights.checkpoint.safe_files import check_free_space
from trainkit.weights.checkpoint.snapshot import Snapshot, TakeSnapshot, make_snapshot_taker
from trainkit.weights.checkpoint.write import Destination, SaveProgress, point_to

_LONG_WAIT = 0.1  # seconds of waiting for the previous save that are worth a message


class Save(Protocol):
    """Start to save a state; every rank must call it."""

    def __call__(self, state: TrainState, score: float | None = None) -> None: ...


class Collect(Protocol):
    """Return the saves that have finished since the last call; every rank must call it.

    `wait` waits for the pending one. `forgive` says that another checkpoint replaces what has
    failed so far: leaving the block does not raise it.
    """

    def __call__(self, *, wait: bool = False, forgive: bool = False) -> list[SaveResult]: ...


@contextmanager
def open_saver(
    run_dir: Path | str,
    stages: Sequence[nn.Module] | nn.Module,
    optimizer: torch.optim.Optimizer,
    ps: ParallelState,
    *,
    facts: Facts | None = None,
    config: Mapping[str, Any] | None = None,
    retention: Retention | None = None,
    background: bool = True,
    grace: float = 25.0,
    log: Log = log_warning,
    before_commit: Callable[[], None] | None = None,
    event: Callable[..., None] | None = None,
    get_unsaved: Callable[[BaseException], UnsavedState | None] | None = None,
    progress: SaveProgress | None = None,
    components: Components | None = None,
) -> Iterator[tuple[Save, Collect]]:
    """Save a run repeatedly, for a `with` block, while training continues.

    `save(state, score=None)` copies the state to host memory. A thread hashes the copy, checks that
    its numbers are finite, and writes it. There is one copy, so a save waits for the previous one.
    The thread never communicates: the ranks exchange their progress when all of them call
    `collect()`, once a step, over a process group of its own, and only while a save is pending.
    `collect()` returns the saves that have finished since, failed ones too, the same on all ranks.
    Snapshots in host memory follow CheckFreq (Mohan, Phanishayee and Chidambaram, 2021).

    Leaving the block waits, and raises if the last save failed. An exception that leaves it does
    not wait for other ranks: a commit in progress may finish, and any other save is abandoned. Then
    the state that `get_unsaved` returns is saved, if it returns one, and the exception continues,
    whether that save succeeds or not. The ranks do not communicate for it, as another one may be
    inside a collective of the step: each writes its files, and the last one commits the checkpoint.
    Ranks whose counters differ write into different folders, none of which is ever complete.

    Args:
        run_dir: The run directory, on a disk that all ranks share.
        stages: This rank's stages.
        optimizer: The optimizer of their parameters.
        ps: The layout.
        facts: As for `save_checkpoint`; rank 0's are saved.
        config: The resolved configuration, plain values.
        retention: Which checkpoints to retain; None deletes none.
        background: False completes each save before `save` returns; the rest is the same.
        grace: Seconds that the run has for its last save after a stop signal; a save that took
            longer is logged.
        log: Called on rank 0 with saves that failed or were waited for, and with checkpoints that
            are damaged or could not be deleted.
        before_commit: Called on rank 0, in the thread, when a checkpoint is complete except for its
            manifest, for files that must not be older than it, for instance to `sync` a metrics
            file. If it raises, the save fails.
        event: Called with "save" and the fields of each save that `collect` returns.
        get_unsaved: Called with an exception that leaves the block. Returns the state of the stages
            and the optimizer, or None if they are in the middle of a step or it is saved already.
        progress: Counts what this rank writes, so that a watchdog can see whether the disk hangs.
        components: Objects whose state is saved too, by name: anything with `state_dict` and
            `load_state_dict`, or a `Component`. Those that should be equal on all ranks are
            compared, and a save fails if they are not.

    Yields:
        `save` and `collect`, of the types `Save` and `Collect`.

    Raises:
        DiskError: On leaving: the last save could not be written.
        NumericsError: On leaving: the last state saved was not finite.
        ConfigError: A component is none; or on leaving: its state could not be saved, or differed.

    Effects:
        Opens a process group; uses host memory of the size of what this rank writes; writes and
        deletes under `run_dir/checkpoints`; `save` and `collect` communicate.
    """
    stages = modules_of(stages)
    # A copy: the recipe may change its dictionary before the next save.
    try:
        config = orjson.loads(orjson.dumps(None if config is None else dict(config)))
    except TypeError as error:
        raise ConfigError(
            f"open_saver: config holds what JSON does not ({error}); give plain values",
            where="config",
        ) from error
    components = get_components(components, by="open_saver")
    take = make_snapshot_taker(stages, optimizer, ps, components)
    # A process group of its own: the order of its collectives must not depend on the step's.
    separate_group = open_gloo_axis(ps.world, name="saves") if background else nullcontext(ps.world)
    with separate_group as axis:
        saver = _Saver(
            run_dir=Path(run_dir),
            stages=stages,
            take=take,
            facts=facts,
            config=config,
            axis=axis,
            background=background,
            after=_make_after_commit(retention),
            before_commit=before_commit,
            progress=progress or SaveProgress(),
            # Equal on all ranks, and a name that no earlier process has used on the shared disk.
            token=all_gather_objects(secrets.token_hex(8), axis)[0],
            log=(lambda _: None) if axis.index else log,
            grace=grace,
            event=event,
        )
        try:
            yield saver.save, saver.collect
        except BaseException as error:
            # The ranks can no longer agree on anything: another may be inside a collective.
            saver.abandon()
            last = None if get_unsaved is None else get_unsaved(error)
            if last is not None:
                saver.save_last(last)
            raise
        saver.advance()
        saver.raise_last()


@attrs.define(eq=False)
class _Saver:
    """The pending save, if there is one, and the results of earlier saves."""

    run_dir: Path
    stages: Sequence[nn.Module]
    take: TakeSnapshot  # reuses its memory, so that only one save may be pending
    facts: Facts | None
    config: Mapping[str, Any] | None
    axis: Axis
    background: bool
    after: Callable[[Path], list[str]]
    before_commit: Callable[[], None] | None
    progress: SaveProgress
    token: str
    log: Log
    grace: float
    event: Callable[..., None] | None
    num_saves: int = 0
    pending: list[PendingSave] = attrs.field(factory=list)  # at most one
    finished: list[SaveResult] = attrs.field(factory=list)  # not collected yet
    latest: list[SaveResult] = attrs.field(factory=list)  # the last one that was collected

    def save(self, state: TrainState, score: float | None = None) -> None:
        """Start to save a state, after waiting for the previous save."""
        check_awake(self.stages, by="save")
        began = time.perf_counter()
        self.advance()
        waited = time.perf_counter() - began
        if waited > _LONG_WAIT:
            self.log(f"step {state.step} waited {waited:.1f} s for the save before to be written")
        facts = None if self.axis.index else self.facts  # only the first rank's are written
        pending = start_save(
            lambda: self.take(state, facts_at(facts, state.cursor.batch)),
            self._make_target(str(self.num_saves), score),
            self.axis,
            step=state.step,
            start=run_in_thread if self.background else run_now,
            after=self.after,
        )
        self.num_saves += 1
        self.pending.append(pending)
        next(pending)  # takes the snapshot, and starts to write
        if not self.background:
            self.advance()

    def _make_target(self, name: str, score: float | None) -> Destination:
        return Destination(
            run_dir=self.run_dir,
            staging=self.run_dir / "checkpoints" / f".staging-{self.token}-{name}",
            ranks=self.axis.count,
            config=self.config,
            score=score,
            before_commit=self.before_commit,
            progress=self.progress,
        )

    def advance(self, *, polls: int | None = None) -> None:
        """Poll the pending save a number of times, or wait until it finishes."""
        while self.pending and polls != 0:
            try:
                self.pending[0].send(polls is None)
            except StopIteration as end:  # a generator returns its result in this way
                self.pending.clear()
                result: SaveResult = end.value
                self.finished.append(result)
                self._log_result(result)
            polls = None if polls is None else polls - 1

    def _log_result(self, result: SaveResult) -> None:
        for message in result.messages:
            self.log(message)
        if result.error is not None:
            self.log(f"warning: step {result.step} was not saved: {format_error(result.error)}")
        if result.seconds > self.grace:
            self.log(
                f"the save of step {result.step} took {result.seconds:.1f} s; a run that gets a "
                f"stop signal has {self.grace:.0f} s to save, and may be killed before: save more "
                "often, or to a faster disk"
            )

    def collect(self, *, wait: bool = False, forgive: bool = False) -> list[SaveResult]:
        """Return the saves that have finished since the last call; see `Collect`."""
        self.advance(polls=None if wait else 1)
        finished = self.finished.copy()
        # Only the last save counts at the end: a later success makes up for an earlier failure.
        self.latest[:] = [] if forgive else self.finished[-1:] or self.latest
        for result in finished:
            self._record(result)
        self.finished.clear()
        return finished

    def _record(self, result: SaveResult) -> None:
        """Write the event of a save."""
        if self.event is not None:
            fields = attrs.asdict(result, filter=attrs.filters.exclude("messages"))
            for name in ("path", "error"):
                fields[name] = fields[name] and str(fields[name])
            self.event("save", **fields)

    def abandon(self) -> None:
        """Let a commit in progress finish, and abandon any other save."""
        for pending in self.pending:
            pending.close()

    def save_last(self, last: UnsavedState) -> None:
        """Save a state after an error, or log why that failed; raises nothing."""
        began = time.perf_counter()
        state = last.state
        # Named by a hash of the counters: ranks in different steps must not mix files.
        name = f"{hash_counters(list_counters(state)):016x}"

        def take() -> Snapshot:
            check_awake(self.stages, by="save")  # here, so that its error is logged
            # With facts on every rank: any of them may be the last to write, and so commit.
            return self.take(state, facts_at(self.facts, state.cursor.batch), last.components)

        try:
            path = write_and_commit(
                take,
                self._make_target(name, last.score),
                self.axis,
                after_peer_error=last.after_peer_error,
            )
        except Exception as error:  # noqa: BLE001 (the error that ended the run is raised instead)
            last.log(
                f"warning: step {state.step} was not saved after the error: {format_error(error)}"
            )
            return
        if path is not None:
            seconds = time.perf_counter() - began
            self._record(SaveResult(state.step, path, seconds, seconds))
            last.log(f"step {state.step}, the last one before the error, is saved in {path}")

    def raise_last(self) -> None:
        """Raise the error of the last save, if it failed."""
        results = [*self.latest, *self.finished]
        if results and results[-1].error is not None:
            raise results[-1].error


def save_checkpoint(
    run_dir: Path | str,
    state: TrainState,
    stages: Sequence[nn.Module] | nn.Module,
    optimizer: torch.optim.Optimizer,
    ps: ParallelState,
    *,
    facts: Facts | None = None,
    config: Mapping[str, Any] | None = None,
    score: float | None = None,
    components: Components | None = None,
) -> Path:
    """Write a checkpoint of a run, completely or not at all.

    A loop that saves repeatedly uses `open_saver`, which writes while training continues.

    Args:
        run_dir: The run directory, on a disk that all ranks share; checkpoints go to
            `run_dir/checkpoints`.
        state: The counters of the run.
        stages: This rank's stages.
        optimizer: The optimizer of their parameters.
        ps: The layout.
        facts: JSON values that `resume` compares, for instance the configuration; or a function of
            the number of global batches. Rank 0's are saved.
        config: The resolved configuration, plain values, for the manifest.
        score: The score by which `Retention.best` ranks checkpoints, the lower the better.
        components: Objects whose state is saved too; see `open_saver`.

    Returns:
        The new directory; a second save of a step appends `-1`.

    Raises:
        DiskError: A rank could not write. Then all ranks raise, nothing is committed, and no
            earlier checkpoint has changed.
        NumericsError: A parameter or its optimizer state is not finite; likewise.
        ValueError: A tensor has a name, shape or dtype that no checkpoint can store; likewise.
        ConfigError: A component cannot be saved, or is not equal on all ranks; likewise.

    Effects:
        Writes to disk and waits until it is durable; communicates on `ps.world`. The run is not
        changed.
    """
    # A save that failed raises on leaving the block, so there is a path at the end.
    paths: list[Path] = []
    with open_saver(
        run_dir,
        stages,
        optimizer,
        ps,
        facts=facts,
        config=config,
        retention=None,
        background=False,
        components=components,
    ) as (save, collect):
        save(state, score)
        paths = [result.path for result in collect() if result.path is not None]
    return paths[0]


def _make_after_commit(retention: Retention | None) -> Callable[[Path], list[str]]:
    """Return a function for after a commit: update `latest` and `run.json`, apply retention."""
    good: set[str] = set()  # verified by this run, and so not hashed again

    def after(path: Path) -> list[str]:
        messages: list[str] = []

        def prune() -> None:
            if retention is not None:
                result = apply_retention(
                    path.parent, retention, known_good={*good, path.name}, log=messages.append
                )
                good.clear()
                good.update(result["verified"])

        # The checkpoint is RUN/checkpoints/NAME.
        mark = partial(mark_saved, path.parent.parent)
        # Each by itself: one that fails must not prevent the others.
        for work in (partial(point_to, path), mark, prune):
            try:
                work()
            except Exception as error:  # noqa: BLE001 (the checkpoint is valid all the same)
                messages.append(f"after the commit of {path}: {type(error).__name__}: {error}")
        return messages

    return after


def check_disk_space(
    run_dir: Path | str,
    stages: Iterable[nn.Module] | nn.Module,
    *,
    copies: int = 3,
    axis: Axis = SOLO,
    log: Log = log_info,
) -> None:
    """Raise DiskError if the disk has no room for one checkpoint; warn if it has none for two.

    Args:
        run_dir: The run directory, which exists.
        stages: This rank's stages.
        copies: Tensors of a parameter's size in a checkpoint; with AdamW the parameter and two
            moments.
        axis: The ranks that write to this disk.
        log: Called on the first rank with a message if there is room for one checkpoint but not
            for two: the older one is deleted only after the newer is committed.

    Raises:
        DiskError: On all ranks, with the bytes that are needed and those that are free.

    Effects:
        Communicates on `axis`.

    Examples:
        >>> check_disk_space("/", [nn.Linear(1, 1)])
    """
    stages = modules_of(stages)
    # An estimate: before its first step an optimizer has no state to measure.
    local_bytes = copies * sum(
        get_local_box(x).local.nbytes for x in model_tensors(stages).values()
    )
    needed = int(1.1 * sum(all_gather_objects(local_bytes, axis)))  # a tenth for all else
    # Ranks on several nodes may see different disks.
    free = min(all_gather_objects(shutil.disk_usage(run_dir).free, axis))
    check_free_space(
        f"check_disk_space: a checkpoint in {run_dir}", run_dir, free=free, needed=needed
    )
    # The older checkpoint is deleted only after the newer one is committed.
    if free < 2 * needed and axis.index == 0:
        log(
            f"{run_dir} has {free} bytes free, and a checkpoint needs about {needed}: there is room"
            " for one, but not for a second one"
        )


def write_final(
    run_dir: Path | str,
    state: TrainState,
    stages: Sequence[nn.Module] | nn.Module,
    optimizer: torch.optim.Optimizer,
    ps: ParallelState,
    *,
    components: Components | None = None,
) -> None:
    """Write `final.json`: the step, the tokens and the state hash at the end of a run.

    The hash covers the state of `components`, if there are some.

    Raises:
        DiskError: It cannot be written.

    Effects:
        Writes a file on the first rank, by a rename; communicates on `ps.world`.
    """
    stages = modules_of(stages)
    final = {
        "step": state.step,
        "tokens_total": int(state.tokens),
        "state_hash": state_hash(state, stages, optimizer, ps, components),
    }
    if ps.world.index == 0:
        with atomic_write(Path(run_dir) / "final.json", by="write_final") as file:
            file.write(dump_json(final) + b"\n")
