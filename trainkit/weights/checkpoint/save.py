"""Save a run: copy its state, write the copy beside the training, commit it by one rename."""

from __future__ import annotations

import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Protocol

import attrs
import orjson
import torch
from torch import nn

from trainkit.collectives import all_gather_objects
from trainkit.files import atomic_write
from trainkit.mesh import open_gloo_axis
from trainkit.noise.hashing import hash_counters
from trainkit.parallel.names import get_local_box, modules_of
from trainkit.parallel.offload_state import check_awake
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
from trainkit.weights.checkpoint.background_save import Flight, SaveResult, at_once, fly, in_thread
from trainkit.weights.checkpoint.directory import mark_saved
from trainkit.weights.checkpoint.facts import Facts, facts_at
from trainkit.weights.checkpoint.interrupted import UnsavedState, write_and_commit
from trainkit.weights.checkpoint.manifest import dump_json
from trainkit.weights.checkpoint.retention import Retention, apply_retention
from trainkit.weights.checkpoint.safe_files import refuse_no_room
from trainkit.weights.checkpoint.snapshot import Snapshot, bind_snapshots
from trainkit.weights.checkpoint.tensors import counters_of, model_tensors, state_hash
from trainkit.weights.checkpoint.write import Destination, SaveProgress, point_to

_WORTH_TELLING = 0.1  # seconds that a save had to wait for the one before


class Save(Protocol):
    """Begin to save a state; every rank must call it."""

    def __call__(self, state: TrainState, score: float | None = None) -> None: ...


class Collect(Protocol):
    """Return the saves that have ended since the last call; every rank must call it.

    `wait` waits for the one under way. `forgive` says that another checkpoint stands in for what
    has failed so far: leaving the block does not raise it.
    """

    def __call__(self, *, wait: bool = False, forgive: bool = False) -> list[SaveResult]: ...


def _no_event(name: str, **facts: Any) -> None:
    del name, facts


def _nothing(error: BaseException) -> None:
    del error


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
    event: Callable[..., None] = _no_event,
    unsaved: Callable[[BaseException], UnsavedState | None] = _nothing,
    progress: SaveProgress | None = None,
) -> Iterator[tuple[Save, Collect]]:
    """Save a run again and again, for a `with` block, while training goes on.

    `save(state, score=None)` copies the state to host memory; a thread hashes the copy, looks for
    numbers that are not finite, and writes it. There is one copy, so a save waits for the one
    before. The thread never communicates: what ranks tell each other travels when all call
    `saved()`, once a step, over a group of its own, and only while a save is under way. It returns
    what has ended since, the same on all ranks, a failure too. Snapshots in host memory follow
    CheckFreq (Mohan, Phanishayee and Chidambaram, 2021).

    Leaving the block waits, and raises when the last save failed. An exception that leaves it does
    not wait for other ranks: a commit under way is let finish, any other save is given up. Then
    the state that `unsaved` returns is saved, if it returns one, and the exception goes on,
    whatever comes of that save. Ranks do not communicate for it, as another one may be in a
    collective of the step: each writes its part, and the last one to do so commits the checkpoint.
    Ranks whose counters differ write into different folders, of which none is ever complete.

    Args:
        run_dir: The run directory, on a disk that all ranks share.
        stages: This rank's stages.
        optimizer: The optimizer of their parameters.
        ps: The layout.
        facts: As for `save_checkpoint`; rank 0's are saved.
        config: The resolved configuration, plain values.
        retention: Which checkpoints stay, by default the last three; None deletes none.
        background: False saves completely before `save` returns; the rest is the same.
        grace: Seconds that a run has for its last save when it is told to stop; a save that took
            longer is told of.
        log: Called on rank 0 with what could not be saved, was waited for, is damaged, or could
            not be deleted.
        before_commit: Called on rank 0, in the thread, when a checkpoint is complete but for its
            manifest: for what must not be older than it, `sync` of a metrics file for instance. If
            it raises, the save fails.
        event: Called with "save" and what is known of each save that `saved` returns.
        unsaved: Called with an exception that leaves the block. Returns the state that the stages
            and the optimizer hold, or None if they are in the middle of a step or it is saved
            already.
        progress: Counts what this rank writes, for a watch to see whether the disk hangs.

    Yields:
        `save` and `saved`, of the types `Save` and `Collect`.

    Raises:
        DiskError: On leaving: the last save could not be written.
        NumericsError: On leaving: the last state saved was not finite.

    Effects:
        Opens a process group; holds host memory of the size of what this rank writes; writes and
        deletes under `run_dir/checkpoints`; `save` and `saved` communicate.
    """
    stages = modules_of(stages)
    run_dir, config = Path(run_dir), _plain(config)
    take = bind_snapshots(stages, optimizer, ps)
    after, progress = _pruning(retention), progress or SaveProgress()
    own_group = open_gloo_axis(ps.world, name="saves") if background else nullcontext(ps.world)
    with own_group as axis:
        outcomes = _Outcomes((lambda _: None) if axis.index else log, grace, event)
        token, number = all_gather_objects(secrets.token_hex(8), axis)[0], count()
        start = in_thread if background else at_once

        def save(state: TrainState, score: float | None = None) -> None:
            check_awake(stages, by="save")
            outcomes.make_room_for(state)
            staging = run_dir / "checkpoints" / f".staging-{token}-{next(number)}"
            target = Destination(
                run_dir, staging, axis.count, config, score, before_commit, progress
            )

            def taken() -> Snapshot:
                return take(state, {} if axis.index else facts_at(facts, state.cursor.batch))

            outcomes.follow(fly(taken, target, axis, step=state.step, start=start, after=after))
            if not background:
                outcomes.land()

        try:
            yield save, outcomes.collect
        except BaseException as error:
            outcomes.give_up()
            found = unsaved(error)
            if found is not None:
                name = f".staging-{token}-{hash_counters(counters_of(found.state)):016x}"
                staging = run_dir / "checkpoints" / name
                target = Destination(
                    run_dir, staging, axis.count, config, found.score, before_commit, progress
                )

                def taken_whole() -> Snapshot:
                    check_awake(stages, by="save")
                    return take(found.state, facts_at(facts, found.state.cursor.batch))

                outcomes.save_unsaved(found, taken_whole, target, axis)
            raise
        outcomes.land()
        outcomes.raise_last()


@attrs.define(eq=False)
class _Outcomes:
    """The save under way, if there is one, and what has become of those before."""

    log: Log
    grace: float
    event: Callable[..., None]
    flights: list[Flight] = attrs.field(factory=list)  # one at most
    ended: list[SaveResult] = attrs.field(factory=list)
    latest: list[SaveResult] = attrs.field(factory=list)  # that was collected

    def make_room_for(self, state: TrainState) -> None:
        """Wait for the save before, and tell of it if that took long."""
        began = time.perf_counter()
        self.land()
        waited = time.perf_counter() - began
        if waited > _WORTH_TELLING:
            self.log(f"step {state.step} waited {waited:.1f} s for the save before to be written")

    def follow(self, flight: Flight) -> None:
        """Begin a save."""
        self.flights.append(flight)
        next(flight)

    def land(self, *, polls: int | None = None) -> None:
        """Ask a save under way so many times how far it is, or wait for its end."""
        while self.flights and polls != 0:
            try:
                self.flights[0].send(polls is None)
            except StopIteration as end:
                self.flights.clear()
                self.ended.append(end.value)
                for line in _complaints(end.value, self.grace):
                    self.log(line)
            polls = None if polls is None else polls - 1

    def collect(self, *, wait: bool = False, forgive: bool = False) -> list[SaveResult]:
        """Return what has ended since the last call; see `Collect`."""
        self.land(polls=None if wait else 1)
        found = self.ended.copy()
        self.latest[:] = [] if forgive else self.ended[-1:] or self.latest
        for done in found:
            self.event("save", **_told(done))
        self.ended.clear()
        return found

    def give_up(self) -> None:
        """Let a commit under way finish, and nothing else."""
        for flight in self.flights:
            flight.close()

    def save_unsaved(
        self, found: UnsavedState, take: Callable[[], Snapshot], target: Destination, axis: Axis
    ) -> None:
        """Save a state after an error, or say why that failed; raises nothing."""
        began, step = time.perf_counter(), found.state.step
        try:
            path = write_and_commit(take, target, axis, follows=found.follows)
        except Exception as error:  # noqa: BLE001 (the error that ended the run is raised)
            found.log(f"warning: step {step} was not saved after the error: {format_error(error)}")
            return
        if path is not None:
            seconds = time.perf_counter() - began
            self.event("save", **_told(SaveResult(step, path, seconds, seconds)))
            found.log(f"step {step}, the last one before the error, is saved in {path}")

    def raise_last(self) -> None:
        """Raise what the last save failed with, if it has failed."""
        outcomes = [*self.latest, *self.ended]
        if outcomes and outcomes[-1].error is not None:
            raise outcomes[-1].error


def _told(done: SaveResult) -> dict[str, Any]:
    """Return what a line of events.jsonl says of a save."""
    said = attrs.asdict(done, filter=attrs.filters.exclude("told"))
    return said | {name: said[name] and str(said[name]) for name in ("path", "error")}


def _complaints(outcome: SaveResult, grace: float) -> list[str]:
    """Return what a user has to know of a save that has ended."""
    found = list(outcome.told)
    if outcome.error is not None:
        found.append(f"warning: step {outcome.step} was not saved: {format_error(outcome.error)}")
    if outcome.seconds > grace:
        took = f"the save of step {outcome.step} took {outcome.seconds:.1f} s"
        late = f"a run that is told to stop has {grace:.0f} s to save, and may be killed before"
        found.append(f"{took}; {late}: save more often, or to a faster disk")
    return found


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
) -> Path:
    """Write a checkpoint of a run; it is there completely, or not at all.

    A loop that saves again and again uses `open_saver`, which writes while training goes on.

    Args:
        run_dir: The run directory, on a disk that all ranks share; checkpoints go to
            `run_dir/checkpoints`.
        state: The counters of the run.
        stages: This rank's stages.
        optimizer: The optimizer of their parameters.
        ps: The layout.
        facts: Anything that JSON holds, for `resume` to compare: for instance the configuration. Or
            a function from the step to that. Rank 0's are saved.
        config: The resolved configuration, plain values, for the manifest.
        score: What `Retention.best` ranks checkpoints by, the lower the better.

    Returns:
        The new directory; a second save of a step appends `-1`.

    Raises:
        DiskError: A rank could not write. Then all ranks raise, nothing is committed, and nothing
            old has changed.
        NumericsError: A parameter, or what the optimizer remembers of it, is not finite; the same.
        ValueError: A tensor has a name, a shape or a dtype that no checkpoint holds; the same.

    Effects:
        Writes to disk and waits until it is durable; communicates on `ps.world`. The run is not
        changed.
    """
    paths: list[Path] = []
    options: dict[str, Any] = {"retention": None, "background": False}
    with open_saver(run_dir, stages, optimizer, ps, facts=facts, config=config, **options) as both:
        save, saved = both
        save(state, score)
        paths = [outcome.path for outcome in saved() if outcome.path is not None]
    return paths[0]


def _plain(config: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    try:
        return orjson.loads(orjson.dumps(None if config is None else dict(config)))
    except TypeError as error:
        raise ConfigError(
            f"saves: config holds what JSON does not ({error}); give plain values", where="config"
        ) from error


def _pruning(retention: Retention | None) -> Callable[[Path], list[str]]:
    """Return what follows a commit: the pointer, the mark, the deletion of what need not stay."""
    good: set[str] = set()

    def after(path: Path) -> list[str]:
        told: list[str] = []

        def prune() -> None:
            if retention is not None:
                known = {*good, path.name}
                found = apply_retention(path.parent, retention, known_good=known, log=told.append)
                good.clear()
                good.update(found["verified"])

        mark = partial(mark_saved, path.parent.parent)
        for work in (partial(point_to, path), mark, prune):
            try:
                work()
            except Exception as error:  # noqa: BLE001 (the checkpoint stands, whatever follows)
                told.append(f"beside {path}: {type(error).__name__}: {error}")
        return told

    return after


def check_disk_space(
    run_dir: Path | str,
    stages: Iterable[nn.Module] | nn.Module,
    *,
    copies: int = 3,
    axis: Axis = SOLO,
    log: Log = log_info,
) -> None:
    """Refuse to begin where the disk has no room for one checkpoint; warn where two do not fit.

    Args:
        run_dir: The run directory, which exists.
        stages: This rank's stages.
        copies: Tensors of a parameter's size in a checkpoint; with AdamW the parameter and two.
        axis: The ranks that write to this disk.
        log: Called on the first rank with a sentence when there is room for one but not for two,
            of which the older goes only when the newer is committed.

    Raises:
        DiskError: On all ranks: names the bytes that will be needed and those that are free.

    Effects:
        Communicates on `axis`.

    Examples:
        >>> check_disk_space("/", [nn.Linear(1, 1)])
    """
    stages = modules_of(stages)
    own = copies * sum(
        get_local_box(tensor).local.nbytes for tensor in model_tensors(stages).values()
    )
    needed = int(1.1 * sum(all_gather_objects(own, axis)))  # a tenth for what else is written
    free = min(all_gather_objects(shutil.disk_usage(run_dir).free, axis))
    what = f"check_disk_space: a checkpoint in {run_dir}"
    refuse_no_room(what, run_dir, free=free, needed=needed)
    if free < 2 * needed and axis.index == 0:
        log(
            f"{run_dir} has {free} bytes free, and a checkpoint needs about {needed}: there is room"
            " for one, but not for a second beside it"
        )


def write_final(
    run_dir: Path | str,
    state: TrainState,
    stages: Sequence[nn.Module] | nn.Module,
    optimizer: torch.optim.Optimizer,
    ps: ParallelState,
) -> None:
    """Write `final.json`: the step, the tokens and the hash with which a run has ended.

    Raises:
        DiskError: It cannot be written.

    Effects:
        Writes a file on the first rank, by a rename; communicates on `ps.world`.
    """
    stages = modules_of(stages)
    end = {
        "step": state.step,
        "tokens_total": int(state.tokens),
        "state_hash": state_hash(state, stages, optimizer, ps),
    }
    if ps.world.index == 0:
        with atomic_write(Path(run_dir) / "final.json", by="write_final") as file:
            file.write(dump_json(end) + b"\n")
