"""A watch over the ranks of a run: whoever dies or hangs is named, and all end.

A process group knows that a connection broke or that time is up, never who is to blame. Here a
thread per rank writes down what its rank is at, and looks at the others when it has reason to. It
ends a process whose main thread cannot: one that waits in a collective for a rank that is dead.
"""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import io
import os
import secrets
import sys
import sysconfig
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, repeat
from pathlib import Path
from typing import Any, NoReturn

import attrs

from trainkit.collectives import all_gather_objects
from trainkit.files import say_on_stderr
from trainkit.run import peers
from trainkit.run.errors import (
    EXIT_SAVED,
    bytes_asked,
    get_exit_code,
    is_out_of_memory,
    last_step,
    last_words,
    report_errors,
)
from trainkit.types import (
    Axis,
    ConfigError,
    DiskError,
    Log,
    PeerError,
    PreemptedError,
    TrainkitError,
    format_error,
)
from trainkit.weights.checkpoint.background_save import save_threads
from trainkit.weights.checkpoint.manifest import list_checkpoints, step_of

Announce = Callable[..., None]
"""`Announce(name, allow=seconds)`: says what comes now, and how long it may take."""

_START = "start"  # the phase before the first that is announced
_TICK = 0.2  # seconds between two samples of what the main thread is at
_PER_BEAT = 5  # ticks between two beats
_CAUSE_GRACE = 5.0  # seconds the main thread has to notice that a peer has failed, and to end
_ECHO_GRACE = 5.0  # seconds in which the cause behind a broken connection may still be told
_SAVE_AFTER_ERROR = (
    "/trainkit/weights/checkpoint/interrupted.py"  # the main thread has noticed, and saves
)
_AHEAD = 75.0  # seconds before a phase is overdue from which on the others are looked at
_SAMPLES = 150  # what the busy share is a mean of: half a minute
_FEWEST = 25  # samples from which on it is told
_GONE = (
    "warning: watch: the run directory {} was removed or moved while the run goes on: there is no "
    "checkpoint there any more to go back to; the next save begins a new one in its place"
)
_APART = (
    "ranks that wait for each other at different places are most often a fault of the recipe, "
    "which the same command meets again: every rank must call the same collectives in the same "
    "order"
)
_UNITS = (
    "every rank must use all units of fsdp() in one order, in every microbatch: leave modules that "
    "only some rows need (experts, the tower of a further modality) out of its `blocks`, so that "
    "they are gathered with the unit around them, or call them on every rank"
)
_LOOKS = 5  # looks at which a rank must be slow in a row
_GRACE = 25.0  # seconds for a stop, at least: most launchers kill after 30
_SECOND = 1.0  # between two looks at the watch itself
_STUCK = 8  # such looks after which it hangs: it needs 6 s for its own last words
_WORDS = 5.0  # seconds for last words and the traceback
_STILL = 10.0  # seconds without a part of a save written after which the disk is taken to hang
_STEPS = 8  # steps of which the longest counts


@attrs.define(eq=False)
class _Self:
    """What the main thread and the watching thread of a rank share; each field has one writer."""

    member: peers.Member
    members: Sequence[peers.Member]
    folder: Path
    session: str
    thread: int
    phase: tuple[str, float]
    beat: peers.Beat
    busy: deque[bool]
    others: dict[int, peers.Sighting]
    elapsed: float = 0.0  # seconds in this phase in which the process could run
    unseen: float = 0.0  # seconds since the others were last looked at
    doomed: float = 0.0  # seconds since a failure has been known
    stopping: float = 0.0  # seconds since a stop was asked for
    steps: deque[float] = attrs.field(factory=lambda: deque(maxlen=_STEPS))  # how long they took
    save: float = 0.0  # how long the longest save has taken in its thread
    saving: float = 0.0  # for how long a save has been under way there
    still: float = 0.0  # seconds since a save has last written something
    parts: int | None = None  # that saves had written then
    pause: float = 0.0  # the longest such time within a save that then went on
    looked: float = attrs.field(factory=time.monotonic)  # when the thread last went round
    state: str = "running"
    unwinding: bool = False
    is_there: Callable[[], bool] = lambda: True  # the run directory
    hold: Callable[[], None] = lambda: None  # keep it this run's
    asked: Callable[[], str | None] = lambda: None  # why the run shall stop
    written: Callable[[], int] | None = None  # parts that saves have written
    grace: float | None = None  # seconds that a stop may take
    warn: Log = say_on_stderr
    told: set[str] = attrs.field(factory=set)  # what is warned of once
    late: dict[int, int] = attrs.field(factory=dict)  # looks at which a rank was slow, in a row
    timed: tuple[str, float] | None = None  # the phase that `elapsed` is of

    @property
    def number(self) -> int:
        return self.member.rank

    @property
    def near(self) -> dict[int, bool]:
        return {x.rank: x.place == self.member.place for x in self.members}


@contextlib.contextmanager
def watch_ranks(
    run_dir: str | Path,
    axis: Axis,
    *,
    asked: Callable[[], str | None] = lambda: None,
    allow: float = 1800.0,
    grace: float | None = None,
    hold: Callable[[], None] = lambda: None,
    written: Callable[[], int] | None = None,
    log: Log = say_on_stderr,
) -> Iterator[Announce]:
    """Watch over the ranks of a run: end all when one dies or hangs, and say which and where.

    Every rank beats: about once a second it writes what it is at to `run_dir/ranks`. The main
    thread says by `phase` what comes, and how long that may take. Then

    - a rank whose process is gone, or that has failed, ends all others within some seconds;
    - a phase that takes longer than it may ends its rank if another one is gone, silent or at its
      end, or if all are late. A rank that waits for one that has time (rank 0 prunes with
      `allow=3600`) waits on;
    - an error that only says that a connection broke becomes a `PeerError` with the cause;
    - a stop that was asked for and is not done within `grace` ends the process (76, not saved),
      also where the disk does not answer any more;
    - a rank that others always wait for is named in a warning, and so is a run directory that
      somebody has removed.

    A process whose main thread is stuck is ended where it stands, after its last words.

    Args:
        run_dir: The run directory, which all ranks see.
        axis: All ranks of the run.
        asked: Tells why the run shall stop, or None, as `trap_signals` yields it.
        allow: Seconds for what comes before the first `phase`.
        grace: Seconds between being asked to stop and the end. None: 25, as torchrun kills after
            30, or as many as two steps and a save have taken, with 5 to spare; a save that is under
            way by then has as long again, or what its phase allows if it is the first, unless the
            disk hangs.
        hold: Called on rank 0 once a second, in the watching thread: keeps the directory this
            run's, as `lock_run` yields it. A ConfigError of it ends the process (74).
        written: Returns how many parts of checkpoints this rank has written. A save hangs if no
            rank has written one for 10 s, or twice as long as a pause has been in a save that went
            on. None: no save is taken to hang.
        log: Takes warnings, in the watching thread; by default they go to stderr.

    Yields:
        `phase(name, allow=seconds)`: what this rank does from now on, and how long it may take; the
        last `allow` holds where none is given. It costs a microsecond.

    Raises:
        PeerError: Another rank failed, has gone or is stuck: in place of the echo that came here.

    Effects:
        Communicates once on `axis`. Starts a thread; it has ended when the block is left. Writes
        under `run_dir/ranks`, where files of an earlier run are removed. Lets Python show its stack
        when the process crashes (`faulthandler`). May end the process, and kill a process of the
        run on this host that has stopped.

    Examples:
        >>> import tempfile
        >>> from trainkit.mesh import solo_parallel
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with watch_ranks(folder, solo_parallel().world) as phase:
        ...         phase("step 1", allow=60)
        ...         print(*(path.name for path in Path(folder, "ranks").iterdir()))
        rank_00000.json
    """
    rank, stop = _join(Path(run_dir), axis, allow), threading.Event()
    rank.hold, rank.asked, rank.grace, rank.warn = hold, asked, grace, log
    rank.written = written
    work = (rank, stop)
    thread = threading.Thread(target=_keep_watch, args=work, name="trainkit watch", daemon=True)
    guard = threading.Thread(target=_guard_the_watch, args=work, daemon=True)

    def phase(name: str, allow: float | None = None) -> None:
        rank.phase = name, rank.phase[1] if allow is None else allow

    with _crashes_shown(), _held_directory(Path(run_dir)) as rank.is_there:
        thread.start()
        guard.start()
        try:
            yield phase
            rank.state = "ended"
        except BaseException as error:
            rank.unwinding = True
            raised = _resolve_echo(rank, error) if is_echo(error) else _own_failure(rank, error)
            rank.state = "failed"
            if raised is error:
                raise
            raise raised from error
        finally:
            stop.set()
            thread.join(10.0)
            guard.join(1.0)
            with _going_on(rank):
                _beat(rank)


def _join(run_dir: Path, axis: Axis, allow: float) -> _Self:
    """Agree with the others on a name for this session, so that no older file is believed."""
    folder = run_dir / "ranks"
    if axis.index == 0:
        with contextlib.suppress(OSError):
            peers.clear_folder(folder)
    member = peers.this_member(axis.index)
    told = all_gather_objects([secrets.token_hex(8), attrs.asdict(member)], axis)
    members = [peers.Member(**fields) for _, fields in told]
    session, phase = told[0][0], (_START, allow)
    rank = _Self(
        member=member,
        members=members,
        folder=folder,
        session=session,
        thread=threading.get_ident(),
        phase=phase,
        beat=peers.Beat(session, 0, *phase[:1], 0.0, allow, ""),
        busy=deque(maxlen=_SAMPLES),
        others={x.rank: peers.Sighting() for x in members if x.rank != axis.index},
    )
    with contextlib.suppress(OSError):
        folder.mkdir(exist_ok=True)
    peers.write_beat(folder, member, rank.beat)
    return rank


@contextlib.contextmanager
def _crashes_shown() -> Iterator[None]:
    """Let a crash (a bus error: a mapped file was cut off) show where it was."""
    if faulthandler.is_enabled():
        yield
        return
    with contextlib.suppress(io.UnsupportedOperation, AttributeError, ValueError, RuntimeError):
        faulthandler.enable(sys.stderr)
    try:
        yield
    finally:
        faulthandler.disable()


# ------------------------------------------------------------------------------------ the thread


def _keep_watch(rank: _Self, stop: threading.Event) -> None:
    before, ticks, on_one_host = time.monotonic(), 0, all(rank.near.values())
    while not stop.wait(_TICK):
        # Of a pause in which this process itself was stopped, nobody is at fault.
        now = time.monotonic()
        passed, before, ticks = min(now - before, 5 * _TICK), now, ticks + 1
        rank.looked = now
        is_turn = ticks % _PER_BEAT == 0
        jobs: list[Callable[[_Self], None]] = [partial(_measure, passed=passed)]
        if is_turn or (on_one_host and rank.phase[0] != rank.beat.phase):
            jobs.append(_beat)
        if is_turn:
            jobs += [_look_around, partial(_act, passed=passed * _PER_BEAT)]
            jobs += [_warn_of_stragglers, _keep_directory]
        for job in jobs:
            with _going_on(rank):
                job(rank)


def _keep_directory(rank: _Self) -> None:
    """Warn once if the directory is gone; end this process if another run is in its place."""
    if rank.number != 0:
        return
    if "gone" not in rank.told and not rank.is_there():
        rank.told.add("gone")
        rank.warn(_GONE.format(rank.folder.parent))
    try:
        rank.hold()
    except ConfigError as error:
        _end(
            rank,
            DiskError(
                f"watch: the run directory {rank.folder.parent} was moved away, and another run "
                f"has begun in its place: {error}",
                where=rank.folder.parent,
                hint="look for the checkpoints of this run where its directory was moved to, and "
                "go on with another --out",
            ),
        )


@contextlib.contextmanager
def _going_on(rank: _Self) -> Iterator[None]:
    """Warn of what goes wrong in the watch itself, once of each kind: a run does not end of it."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 (a thread that ended would look like a dead rank)
        if type(error).__name__ not in rank.told:
            rank.told.add(type(error).__name__)
            with contextlib.suppress(Exception):
                rank.warn(f"watch: this went wrong in the watch itself, which goes on: {error!r}")


@contextlib.contextmanager
def _held_directory(folder: Path) -> Iterator[Callable[[], bool]]:
    """Yield a function that tells whether a directory is still there: the same one, and no other.

    It is held open, for a new directory may get the number of one that is gone.
    """
    try:
        held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        yield lambda: True
        return

    def is_there() -> bool:
        try:
            return os.path.samestat(os.fstat(held), folder.stat())
        except OSError as error:  # a server that does not answer has removed nothing
            return error.errno not in {errno.ENOENT, errno.ENOTDIR, errno.ESTALE}

    try:
        yield is_there
    finally:
        os.close(held)


def _beat(rank: _Self) -> None:
    """Write what this rank is at, or that it is there at all: who is silent looks like the dead."""
    rank.beat = attrs.evolve(rank.beat, count=rank.beat.count + 1, state=rank.state)
    try:
        rank.beat = _fresh_beat(rank)
    finally:
        peers.write_beat(rank.folder, rank.member, rank.beat)


def _fresh_beat(rank: _Self) -> peers.Beat:
    name, allow = rank.phase
    return peers.Beat(
        session=rank.session,
        count=rank.beat.count + 1,
        phase=name,
        elapsed=rank.elapsed,
        allow=allow,
        doing="" if rank.unwinding else _doing(rank.thread),
        busy=sum(rank.busy) / len(rank.busy) if len(rank.busy) >= _FEWEST else -1.0,
        waits=_waits(rank.thread),
        still=rank.still,
        state=rank.state,
    )


def _look_around(rank: _Self) -> None:
    """Look at the others: rank 0 always, as it warns; the rest when there may be reason to act."""
    near_end = rank.elapsed > rank.beat.allow - _AHEAD or rank.stopping
    is_turn = rank.number == 0 and rank.beat.count % (1 + len(rank.members) // 64) == 0
    if not (near_end or is_turn):
        return
    passed, rank.unseen = rank.unseen, 0.0
    for number, before in rank.others.items():
        beat = peers.read_beat(rank.folder, number, rank.session)
        rank.others[number] = peers.look(before, beat, passed)


def _warn_of_stragglers(rank: _Self) -> None:
    """Warn once of each rank that the others have been waiting for, five looks in a row."""
    if rank.number != 0 or not rank.others:
        return
    beats = {0: rank.beat} | {number: x.beat for number, x in rank.others.items()}
    busy = {number: x.busy for number, x in beats.items() if x is not None and x.busy >= 0}
    kinds = {x.phase.rstrip("0123456789") for x in beats.values() if x is not None}
    # Who prunes while others step is no laggard.
    found = peers.stragglers(busy) if len(kinds) == 1 else []
    for number in beats:
        looks = rank.late.get(number, 0)
        rank.late[number] = looks + 1 if number in found else min(looks, 0)
        if rank.late[number] == _LOOKS:
            rank.late[number] = -sys.maxsize
            waiting = 1 - min(busy.values())
            rank.warn(
                f"watch: {peers.name_of(rank.members[number])} is slower than the others, who "
                f"spend up to {waiting:.0%} of their time waiting; it is "
                f"{peers.describe(beats[number])}"
            )


def _measure(rank: _Self, passed: float) -> None:
    """Count the time of this phase and of a stop, and how long steps and saves have taken."""
    if rank.timed is not rank.phase:
        if rank.timed is not None and rank.timed[0].startswith("step "):
            rank.steps.append(rank.elapsed)
        rank.timed, rank.elapsed = rank.phase, 0.0
    rank.elapsed += passed
    rank.unseen += passed
    _measure_saves(rank, passed)
    if rank.phase[0] != _START:
        rank.busy.append(not _waits(rank.thread))
    if rank.stopping or rank.asked() is not None:
        rank.stopping += passed


def _measure_saves(rank: _Self, passed: float) -> None:
    """Note how long a save has taken, and what pauses it has made, once it has gone on."""
    is_saving, parts = bool(save_threads()), None if rank.written is None else rank.written()
    if not is_saving and not rank.stopping:
        rank.save = max(rank.save, rank.saving)
    if parts != rank.parts and not rank.stopping:
        rank.pause = max(rank.pause, min(rank.still, rank.saving))
    rank.saving = rank.saving + passed if is_saving else 0.0
    rank.still = 0.0 if parts is None or parts != rank.parts else rank.still + passed
    rank.parts = parts


def _time_to_stop(rank: _Self) -> float:
    """Return how many seconds a stop may take: what is asked for, or what was measured."""
    measured = 2 * max(rank.steps, default=0.0) + rank.save + 5.0
    return max(_GRACE, measured) if rank.grace is None else rank.grace


def _guard_the_watch(rank: _Self, stop: threading.Event) -> None:
    """End a process that shall stop when the watch itself hangs, as a disk can make it."""
    since, seen, stuck = 0.0, rank.looked, 0
    while not stop.wait(_SECOND):
        since += 1.0 if since or rank.asked() is not None else 0.0
        stuck, seen = stuck + 1 if rank.looked == seen else 0, rank.looked
        if since > _time_to_stop(rank) and stuck > _STUCK:
            what = f"was asked to stop ({rank.asked()}), but the disk of {rank.folder.parent}"
            _end_without_disk(PreemptedError.code, f"watch: {what} does not answer")


def _act(rank: _Self, *, passed: float) -> None:
    """End the process if the main thread, which could go on or end by itself, does not."""
    if rank.unwinding or rank.state != "running":
        return
    failure = peers.read_failure(rank.folder, rank.session) or _find_gone(rank)
    rank.doomed = rank.doomed + passed if failure else 0.0
    if failure is None:
        culprits = peers.find_culprits(rank.number, rank.beat, rank.others, rank.near)
        failure = _accused(rank, culprits) if culprits else None
    # Who is late or accused has nothing to wait for: the main thread has noticed nothing.
    hopeless = failure is not None and (rank.beat.is_overdue or failure.rank == rank.number)
    noticed = any(file.endswith(_SAVE_AFTER_ERROR) for file, _, _ in _stack(rank.thread))
    if failure is not None and (hopeless or (rank.doomed > _CAUSE_GRACE and not noticed)):
        _end(rank, _error_of(rank, failure))
    if rank.stopping > (_GRACE if rank.grace is None else rank.grace):
        _end_late_stop(rank)


def _end_late_stop(rank: _Self) -> None:
    """End a process that was to stop, or say once that it takes long, if it may go on."""
    allowed = _time_to_stop(rank)
    # The first save of a run may be this one: nothing says yet how long one takes.
    longest = 2 * allowed if rank.save else max(2 * allowed, rank.phase[1])
    may_go_on = rank.stopping <= longest and _may_finish_saving(rank)
    if rank.grace is None and (rank.stopping <= allowed or may_go_on):
        if "late" not in rank.told:  # a launcher may kill at any time from now on
            rank.told.add("late")
            words, _ = _unsaved(rank, _GRACE)
            rank.warn(f"warning: watch: rank {rank.number} {words}; it goes on for some time")
        return
    what, code = _unsaved(rank, allowed)
    failure = peers.Failure(rank.session, rank.number, what, code=code)
    peers.tell_failure(rank.folder, failure)
    _end(rank, _error_of(rank, failure))


def _find_gone(rank: _Self) -> peers.Failure | None:
    """Find a rank of this host whose process has ended before its work had, and tell all."""
    for member in rank.members:
        if peers.is_gone(member, rank.member.place):
            beat = peers.read_beat(rank.folder, member.rank, rank.session)
            if beat is not None and beat.state == "running":
                what = f"(process {member.pid} on {member.host}) is gone; it was last "
                failure = peers.Failure(rank.session, member.rank, what + peers.describe(beat))
                return peers.tell_failure(rank.folder, failure)
    return None


def _accused(rank: _Self, culprits: Sequence[int]) -> peers.Failure:
    beats = {x.rank: peers.read_beat(rank.folder, x.rank, rank.session) for x in rank.members}
    beats[rank.number] = rank.beat
    why, hint = "is stuck", ""
    if peers.are_in_units(beats):
        why, hint = "waits for parameters or gradients of another unit than others", _UNITS
    elif peers.are_apart(beats):
        why, hint = "waits at another place than others", _APART
    elif culprits[0] in rank.others:
        sighting = rank.others[culprits[0]]
        if peers.is_silent(sighting, near=rank.near[culprits[0]]):
            why = f"has stopped: no sign of life for {sighting.still:.0f} s"
        elif peers.is_at_fault(sighting, near=True):
            why = "has left the others alone"
    number, what, detail = peers.accuse(culprits, beats, rank.members, why)
    failure = peers.Failure(rank.session, number, what, detail, hint=hint)
    return peers.tell_failure(rank.folder, failure)


def _may_finish_saving(rank: _Self) -> bool:
    """Return whether a stop takes long because the checkpoint does, and nobody is missing.

    A rank that has written its own part waits for the others: one of all must go on writing.
    """
    found = rank.others.items()
    stills = [rank.still, *(x.beat.still for x in rank.others.values() if x.beat)]
    at_fault = any(peers.is_at_fault(x, near=rank.near[number]) for number, x in found)
    saving = any("/trainkit/weights/checkpoint/" in file for file, _, _ in _stack(rank.thread))
    hangs = min(stills) > max(_STILL, 2 * rank.pause)
    return saving and not hangs and not at_fault and not rank.beat.is_overdue


def _error_of(rank: _Self, failure: peers.Failure) -> TrainkitError:
    own = failure.rank == rank.number
    detail = failure.detail or ("" if own else f"this rank was {peers.describe(_fresh_beat(rank))}")
    words = f"watch: {'' if own else 'peer '}rank {failure.rank} {failure.what}"
    kind = PeerError if failure.code == PeerError.code else PreemptedError
    text, hint = f"{words}; {detail}" if detail else words, failure.hint or None
    error = kind(text, where=f"rank {failure.rank}", hint=hint)
    error.code = failure.code
    return error


def _unsaved(rank: _Self, grace: float) -> tuple[str, int]:
    """Return what a rank has to say that was asked to stop and is stuck, and its exit code."""
    run_dir, saved = rank.folder.parent, list[int]()
    with contextlib.suppress(OSError):
        saved = [step_of(path) for path in list_checkpoints(run_dir / "checkpoints")]
    last = f"the last checkpoint is step {saved[0]}" if saved else "there is no checkpoint"
    what = (
        f"was asked to stop ({rank.asked() or 'a signal'}), but not saved within {grace:g} s: "
        f"{last}; it was {peers.describe(rank.beat)}"
    )
    # Nothing may have been trained since.
    is_saved = bool(saved) and saved[0] >= (last_step(run_dir / "metrics.jsonl") or 0)
    return what, EXIT_SAVED if is_saved else PreemptedError.code


def _end(rank: _Self, error: TrainkitError) -> NoReturn:
    """End this process where it stands, after its last words (5 s at most)."""
    with contextlib.suppress(Exception):  # no thread can be started any more, for instance
        for member in rank.members:
            sighting = rank.others.get(member.rank, peers.Sighting())
            if peers.is_silent(sighting, near=True) or peers.has_stopped(member, rank.member.place):
                peers.put_down(member, rank.member.place)
        words = threading.Thread(target=_last_words, args=(rank, error), daemon=True)
        words.start()
        words.join(_WORDS)
        if words.is_alive():  # the disk does not take the traceback
            _end_without_disk(error.code, str(error))
    os._exit(error.code)


def _end_without_disk(code: int, what: str) -> NoReturn:
    """End this process after last words that touch no file (1 s at most: a pipe may be full)."""
    words = last_words(code, what)
    teller = threading.Thread(target=os.write, args=(2, words), daemon=True)
    teller.start()
    teller.join(1.0)
    os._exit(code)


def _last_words(rank: _Self, error: TrainkitError) -> None:
    run_dir = rank.folder.parent
    with contextlib.suppress(OSError):
        path = run_dir / "errors" / f"rank_{rank.number:05d}.txt"
        path.parent.mkdir(exist_ok=True)
        with path.open("a") as told:
            for thread in threading.enumerate():
                told.write(f"Thread {thread.name} (most recent call first):\n")
                told.writelines(f"  {f}:{n} in {g}\n" for f, g, n in _stack(thread.ident or 0))
    with contextlib.suppress(SystemExit), report_errors(run_dir):
        raise error


# ------------------------------------------------------------------------------------ the main one


def is_echo(error: BaseException) -> bool:
    """Return whether an error may only say that another rank has ended.

    Examples:
        >>> is_echo(RuntimeError("Connection closed by peer")), is_echo(PeerError("rank 1 is gone"))
        (True, False)
    """
    return not isinstance(error, TrainkitError) and get_exit_code(error) == PeerError.code


def _own_failure(rank: _Self, error: BaseException) -> BaseException:
    """Tell the others what went wrong here, and return what is to be raised for it."""
    if isinstance(error, PeerError):
        return error
    text = (
        f"{type(error).__name__}: {' '.join(format_error(error, most=2000).split())}".removesuffix(
            ": "
        )
    )
    what = f"failed: {text} (in phase {rank.phase[0]!r})"
    if isinstance(error, SystemExit):
        if len(rank.members) == 1:
            return error
        what = f"left with exit code {error.code or 0} in phase {rank.phase[0]!r}, before the end"
    peers.tell_failure(rank.folder, peers.Failure(rank.session, rank.number, what))
    if isinstance(error, SystemExit) and not error.code:
        return RuntimeError(f"watch: rank {rank.number} {what}")
    return _out_of_memory(rank, error, text) if is_out_of_memory(error) else error


def _out_of_memory(rank: _Self, error: BaseException, text: str) -> MemoryError:
    """Return an error that says in which phase memory ran out, and what was asked for and used."""
    import resource  # noqa: PLC0415 (Unix has it)

    asked = bytes_asked(error)
    wanted = "" if asked is None else f" for {asked} more"
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    bound = "" if limit == resource.RLIM_INFINITY else f", and RLIMIT_AS lets it have {limit} bytes"
    what = (
        f"rank {rank.number} had no memory left{wanted} in phase {rank.phase[0]!r}: its process "
        f"has used up to {peak} bytes of the host's{bound}; {text}"
    )
    return MemoryError(what).with_traceback(error.__traceback__)


def _resolve_echo(rank: _Self, error: BaseException) -> BaseException:
    """Return the cause behind a broken connection, which may be told a little later."""
    seen, begin = dict.fromkeys(rank.others, peers.Sighting()), time.monotonic()
    for second in range(round(_ECHO_GRACE) if rank.others else 0):
        while time.monotonic() < begin + second:
            failure = peers.read_failure(rank.folder, rank.session) or _find_gone(rank)
            if failure is not None:
                return _error_of(rank, failure)
            time.sleep(0.05)
        for number, before in seen.items():
            seen[number] = peers.look(
                before, peers.read_beat(rank.folder, number, rank.session), 1.0
            )
        ended = [number for number, x in seen.items() if x.beat and x.beat.state != "running"]
        if ended and second > 0:
            return _error_of(rank, _accused(rank, ended))
    return _unexplained(rank, error, seen)


def _unexplained(
    rank: _Self, error: BaseException, seen: Mapping[int, peers.Sighting]
) -> BaseException:
    """Return what can be said when nobody has told a cause: who has not been heard of meanwhile."""
    if not seen or not isinstance(error, RuntimeError):  # a connection of the recipe's own, perhaps
        return error
    silent = [number for number, x in seen.items() if x.still > _ECHO_GRACE / 2]
    lines = " ".join(format_error(error, most=300).split())
    shown = [*silent, *(number for number in seen if number not in silent)][:16]
    states = "; ".join(
        f"{peers.name_of(rank.members[number])} was {peers.describe(seen[number].beat)}"
        + (", and has not been heard of since" if number in silent else "")
        for number in shown
    )
    where = f"rank {silent[0]}" if silent else None
    return PeerError(
        f"watch: a peer was lost in phase {rank.phase[0]!r}: {states}; {lines}", where=where
    )


# ------------------------------------------------------------------------------------ the stack

_OF_UNITS = "/torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py"
_OTHERS = (sysconfig.get_path("stdlib"), "<")


def _stack(thread: int) -> list[tuple[str, str, int]]:
    """Return (file, function, line) of a thread's innermost 100 Python frames, innermost first.

    They are reached in one call, in which no other thread runs: to go from frame to frame of a
    thread that goes on meanwhile has crashed a process (Python 3.11.7). So has `faulthandler` with
    all threads, beside threads of C++ (autograd's, say) that begin or end: it waits for none.
    """
    frames, innermost = list[Any](), sys._current_frames().get(thread)  # noqa: SLF001 (its public name)
    if innermost is None:  # there is no such thread
        return []
    with contextlib.suppress(AttributeError):  # of None: there is nothing before the outermost
        frames.extend(accumulate(repeat("f_back", 99), getattr, initial=innermost))
    known = (frame for frame in frames if frame is not None)
    return [(x.f_code.co_filename, x.f_code.co_name, x.f_lineno or 0) for x in known]


def _waits(thread: int) -> bool:
    """Return whether a thread is inside torch.distributed (not to compute on a DTensor)."""
    frame = sys._current_frames().get(thread)  # noqa: SLF001 (its public name)
    file = "" if frame is None else frame.f_code.co_filename
    return "/torch/distributed/" in file and "/torch/distributed/tensor/" not in file


def _doing(thread: int) -> str:
    """Return the three innermost functions of the recipe or of trainkit, outermost first.

    Behind them stands what FSDP2 does to a unit, if it is at that.
    """
    stack = _stack(thread)
    own = [
        f"{function} ({Path(file).name}:{line})"
        for file, function, line in stack
        if "/trainkit/" in file or not ("/site-packages/" in file or file.startswith(_OTHERS))
        if not file.endswith("/trainkit/run/errors.py")
    ]
    of_unit = [function for file, function, _ in stack if file.endswith(_OF_UNITS)]
    return " > ".join([*reversed(own[:3]), *(f"{peers.IN_UNIT} ({x})" for x in of_unit[:1])])
