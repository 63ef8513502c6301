"""The watchdog of a run: it finds ranks that died or hang, names them, and ends all processes.

A process group reports that a connection broke or that time is up, never which rank caused it. So
each rank has a second thread. About once a second it writes down what the main thread is doing, and
it reads what other ranks wrote when there is reason to. It can end a process whose main thread
cannot end itself, because it waits in a collective for a rank that is dead.

The state is in small records, and each has one owner, the thread that writes it: the main thread
(`_MainThread`), the watching thread (the clocks, `_Alarms`, `_Others`, `_Pulse`), or nobody after
the start (`_Team`, `_Options`). Other threads only read it.
"""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import io
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

import attrs

from trainkit.collectives import all_gather_objects
from trainkit.files import print_to_stderr
from trainkit.run import peers
from trainkit.run.clocks import START, Phase, PhaseClock, SaveClock
from trainkit.run.errors import (
    EXIT_SAVED,
    end_process,
    end_without_disk,
    get_exit_code,
    is_out_of_memory,
    parse_requested_memory,
    read_last_step,
)
from trainkit.run.stacks import describe_stack, is_in_collective, read_stack
from trainkit.types import (
    Axis,
    CheckpointError,
    ConfigError,
    DataError,
    DiskError,
    Log,
    PeerError,
    PreemptedError,
    TrainkitError,
    format_error,
)
from trainkit.weights.checkpoint.background_save import list_save_threads
from trainkit.weights.checkpoint.manifest import list_checkpoints, parse_step


class Announce(Protocol):
    """Name the next phase, and how many seconds it may take; by default as long as the last."""

    def __call__(self, name: str, allow: float | None = None) -> None: ...


_TICK = 0.2  # seconds between two samples of the main thread
_PER_BEAT = 5  # ticks between two beats
_REFUSED = {ConfigError.code, DataError.code, CheckpointError.code}
_CAUSE_GRACE = 5.0  # seconds the main thread has to notice that a peer has failed, and to end
_ECHO_GRACE = 5.0  # seconds in which the cause of a broken connection may still become known
# In a stack: the main thread has noticed that a peer failed, and saves.
_SAVE_AFTER_ERROR = "/trainkit/weights/checkpoint/emergency_save.py"
_AHEAD = 75.0  # seconds before a phase is overdue from which on the others are read
_LOOKS = 5  # looks in a row at which a rank must be slow
_GRACE = 25.0  # seconds for a stop, at least: most launchers kill after 30
_SECOND = 1.0  # between two looks at the watching thread
_STUCK = 8  # such looks after which it hangs: its own last words take up to 6 s
_STILL = 10.0  # seconds without progress of a save after which the disk is taken to hang
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


# ----------------------------------------------------------------------------------------- records


@attrs.frozen(eq=False)
class _Team:
    """The processes of this session. Nobody writes it after the start."""

    own: peers.Member
    members: Sequence[peers.Member]
    run_dir: Path
    session: str

    @property
    def folder(self) -> Path:
        """Where every rank writes its beats."""
        return self.run_dir / "ranks"

    @property
    def near(self) -> dict[int, bool]:
        """Which ranks are on this host."""
        return {x.rank: x.place == self.own.place for x in self.members}


@attrs.frozen(eq=False)
class _Options:
    """The arguments of `watch_ranks`, and whether its directory exists. Nobody writes it."""

    stop_reason: Callable[[], str | None]
    grace: float | None
    renew_lock: Callable[[], None]
    count_written: Callable[[], int] | None
    log: Log
    report_straggler: Callable[[peers.Straggler], object]
    is_there: Callable[[], bool]
    owns_process: bool


@attrs.define(eq=False)
class _MainThread:
    """What the main thread is doing. The main thread writes it."""

    ident: int
    phase: Phase
    state: str = "running"
    is_unwinding: bool = False


@attrs.define(eq=False)
class _Alarms:
    """Seconds since a stop was requested, and since a failure is known; of the watching thread.

    `verdict` is why the process would have ended by now, if it were the run's own.
    """

    stopping: float = 0.0
    failing: float = 0.0
    verdict: TrainkitError | None = None


@attrs.define(eq=False)
class _Others:
    """What this rank knows of the other ranks. The watching thread writes it."""

    sightings: dict[int, peers.Sighting]
    unseen: float = 0.0  # seconds since the last look
    slow: dict[int, int] = attrs.field(factory=dict)  # looks in a row at which a rank was slow


@attrs.define(eq=False)
class _Pulse:
    """The signs of life of the watching thread, which writes it."""

    beat: peers.Beat  # the last one that was written
    looked: float  # when the thread last went round


@attrs.define(eq=False)
class _Warnings:
    """Which warnings were given already. The watching thread writes it."""

    given: set[str] = attrs.field(factory=set)

    def is_first(self, kind: str) -> bool:
        """Return whether a kind of warning has not been given yet, and record it."""
        is_first = kind not in self.given
        self.given.add(kind)
        return is_first


@attrs.frozen(eq=False)
class _Watch:
    """The records of one rank."""

    team: _Team
    options: _Options
    main: _MainThread
    clock: PhaseClock
    saves: SaveClock
    alarms: _Alarms
    others: _Others
    pulse: _Pulse
    warnings: _Warnings


# ------------------------------------------------------------------------------------------- watch


@contextlib.contextmanager
def watch_ranks(
    run_dir: str | Path,
    axis: Axis,
    *,
    stop_reason: Callable[[], str | None] = lambda: None,
    allow: float = 1800.0,
    grace: float | None = None,
    renew_lock: Callable[[], None] = lambda: None,
    count_written: Callable[[], int] | None = None,
    log: Log = print_to_stderr,
    report_straggler: Callable[[peers.Straggler], object] | None = None,
    owns_process: bool = True,
) -> Iterator[Announce]:
    """Watch over the ranks of a run: end all when one dies or hangs, and name it and its place.

    About once a second every rank writes a beat, what it is doing, to `run_dir/ranks`. The main
    thread announces each `phase`, and how long it may take. Then

    - a rank whose process is gone, or that has failed, ends all others within some seconds;
    - a phase that takes longer than it may ends its rank if another one is gone, silent or at its
      end, or if all are late. A rank goes on waiting for one that has time (rank 0 prunes with
      `allow=3600`);
    - an error that only reports a broken connection becomes a `PeerError` with the cause;
    - a requested stop that is not done within `grace` ends the process (76, not saved), also where
      the disk does not answer any more;
    - a warning names a rank that others always wait for, and a run directory that was removed.

    A process whose main thread is stuck ends where it stands, after its last words. A process that
    is not the run's own goes on: the next `phase` raises instead, or the collective that the main
    thread waits in does, when its timeout is over.

    Args:
        run_dir: The run directory, which all ranks see.
        axis: All ranks of the run.
        stop_reason: Returns why the run should stop, or None, as `trap_signals` yields it.
        allow: Seconds for what comes before the first `phase`.
        grace: Seconds that a stop may take. None: 25, as torchrun kills after 30, or the time of
            two steps and a save with 5 seconds to spare, if that is more. A save that is under way
            by then has as long again, or what its phase allows if it is the first, unless the disk
            hangs.
        renew_lock: Called on rank 0 once a second, in the watching thread, to keep the lock on the
            directory; `lock_run` yields it. A ConfigError of it ends the process (74).
        count_written: Returns the number of parts of checkpoints that this rank has written. A save
            hangs if no rank has written one for 10 s, and for twice the longest pause of a save
            that went on. None: no save is taken to hang.
        log: Receives warnings, in the watching thread; by default they go to stderr.
        report_straggler: Receives each rank that others wait for, once, on rank 0 and in the
            watching thread; by default `log` receives its sentence.
        owns_process: Whether the process may be ended, and processes of the run that have stopped
            be killed; see `errors.owns_process`.

    Yields:
        `phase(name, allow=seconds)`: announces what this rank does next, and how long it may take,
        by default as long as the phase before. It costs a microsecond.

    Raises:
        PeerError: Another rank failed, is gone or is stuck; it replaces the broken connection.

    Effects:
        Communicates once on `axis`. Starts a thread; it has ended when the block is left. Writes
        under `run_dir/ranks`, where files of an earlier run are removed. With `owns_process` it
        lets Python show its stack when the process crashes (`faulthandler`), and may end the
        process, and kill a process of the run on this host that has stopped.

    Examples:
        >>> import tempfile
        >>> from trainkit.mesh import solo_parallel
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with watch_ranks(folder, solo_parallel().world) as phase:
        ...         phase("step 1", allow=60)
        ...         print(*(path.name for path in Path(folder, "ranks").iterdir()))
        rank_00000.json
    """
    team = _join(Path(run_dir), axis)
    stop = threading.Event()
    with (
        _show_crashes() if owns_process else contextlib.nullcontext(),
        _open_directory(team.run_dir) as is_there,
    ):
        options = _Options(
            stop_reason=stop_reason,
            grace=grace,
            renew_lock=renew_lock,
            count_written=count_written,
            log=log,
            report_straggler=report_straggler or (lambda found: log(found.what)),
            is_there=is_there,
            owns_process=owns_process,
        )
        rank = _make_watch(team, options, allow=allow)
        thread = threading.Thread(
            target=_keep_watch, args=(rank, stop), name="trainkit watch", daemon=True
        )
        guard = threading.Thread(target=_guard_the_watch, args=(rank, stop), daemon=True)

        def phase(name: str, allow: float | None = None) -> None:
            if rank.alarms.verdict is not None:
                raise rank.alarms.verdict
            # One assignment, so that the watching thread never sees a half of it.
            rank.main.phase = Phase(name, rank.main.phase.allow if allow is None else allow)

        thread.start()
        if owns_process:
            guard.start()
        try:
            yield phase
            rank.main.state = "ended"
        except BaseException as error:
            rank.main.is_unwinding = True
            raised = _find_cause(rank, error) if is_echo(error) else _report_own(rank, error)
            rank.main.state = "failed"
            if raised is error:
                raise
            raise raised from error
        finally:
            stop.set()
            thread.join(10.0)
            if owns_process:
                guard.join(1.0)
            with _warn_of_errors(rank):
                # The last beat says how the rank ended, so that nobody waits for the next one.
                _beat(rank)


def _join(run_dir: Path, axis: Axis) -> _Team:
    """Agree with the other ranks on a name for this session, so that older files are ignored."""
    if axis.index == 0:
        with contextlib.suppress(OSError):
            peers.clear_folder(run_dir / "ranks")
    own = peers.this_member(axis.index)
    received = all_gather_objects([secrets.token_hex(8), attrs.asdict(own)], axis)
    members = [peers.Member(**fields) for _, fields in received]
    # The token of rank 0 is the name; the others are not used.
    team = _Team(own, members, run_dir, session=received[0][0])
    with contextlib.suppress(OSError):
        team.folder.mkdir(exist_ok=True)
    return team


def _make_watch(team: _Team, options: _Options, *, allow: float) -> _Watch:
    """Return the records of a rank whose main thread is this one, and write its first beat."""
    first = peers.Beat(team.session, 0, START, elapsed=0.0, allow=allow, doing="")
    peers.write_beat(team.folder, team.own, first)
    others = {x.rank: peers.Sighting() for x in team.members if x.rank != team.own.rank}
    return _Watch(
        team=team,
        options=options,
        main=_MainThread(threading.get_ident(), Phase(START, allow)),
        clock=PhaseClock(),
        saves=SaveClock(),
        alarms=_Alarms(),
        others=_Others(others),
        pulse=_Pulse(first, looked=time.monotonic()),
        warnings=_Warnings(),
    )


@contextlib.contextmanager
def _show_crashes() -> Iterator[None]:
    """Let Python print its stack if the process crashes (a bus error: a mapped file was cut)."""
    # `run_main` or the user has switched it on, and it stays on.
    if faulthandler.is_enabled():
        yield
        return
    with contextlib.suppress(io.UnsupportedOperation, AttributeError, ValueError, RuntimeError):
        faulthandler.enable(sys.stderr)
    try:
        yield
    finally:
        faulthandler.disable()


@contextlib.contextmanager
def _open_directory(folder: Path) -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether a directory is still there: the same one, no other."""
    # An open directory keeps its inode: a new one could get the number of one that is gone.
    try:
        opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        yield lambda: True
        return

    def is_there() -> bool:
        try:
            return os.path.samestat(os.fstat(opened), folder.stat())
        except OSError as error:  # a server that does not answer has removed nothing
            return error.errno not in {errno.ENOENT, errno.ENOTDIR, errno.ESTALE}

    try:
        yield is_there
    finally:
        os.close(opened)


# ----------------------------------------------------------------------------- the watching thread


def _keep_watch(rank: _Watch, stop: threading.Event) -> None:
    before = time.monotonic()
    on_one_host = all(rank.team.near.values())
    ticks = 0
    while not stop.wait(_TICK):
        now = time.monotonic()
        # A pause in which this whole process was stopped is nobody's fault: it counts as 5 ticks.
        passed = min(now - before, 5 * _TICK)
        before = now
        ticks += 1
        rank.pulse.looked = now
        is_turn = ticks % _PER_BEAT == 0
        jobs: list[Callable[[_Watch], None]] = [partial(_measure, passed=passed)]
        # A new phase is written at once where the disk is sure to be near.
        if is_turn or (on_one_host and rank.main.phase.name != rank.pulse.beat.phase):
            jobs.append(_beat)
        if is_turn:
            jobs += [_look_around, partial(_act, passed=passed * _PER_BEAT)]
            jobs += [_warn_of_stragglers, _check_directory]
        for job in jobs:
            with _warn_of_errors(rank):
                job(rank)


@contextlib.contextmanager
def _warn_of_errors(rank: _Watch) -> Iterator[None]:
    """Warn of an error of the watch itself, once of each kind: it must not end the run."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 (a thread that ended would look like a dead rank)
        if rank.warnings.is_first(type(error).__name__):
            with contextlib.suppress(Exception):
                rank.options.log(
                    f"watch: this went wrong in the watch itself, which goes on: {error!r}"
                )


def _measure(rank: _Watch, *, passed: float) -> None:
    """Advance the clocks."""
    rank.clock.advance(rank.main.phase, passed)
    rank.others.unseen += passed
    count_written = rank.options.count_written
    rank.saves.advance(
        passed,
        is_saving=bool(list_save_threads()),
        parts=None if count_written is None else count_written(),
        is_stopping=rank.alarms.stopping > 0,
    )
    rank.clock.sample(waits=is_in_collective(rank.main.ident))
    if rank.alarms.stopping or rank.options.stop_reason() is not None:
        rank.alarms.stopping += passed


def _beat(rank: _Watch) -> None:
    """Write what this rank is doing."""
    # If that cannot be found out, the beat goes out all the same: a silent rank looks dead.
    pulse = rank.pulse
    pulse.beat = attrs.evolve(pulse.beat, count=pulse.beat.count + 1, state=rank.main.state)
    try:
        pulse.beat = _measure_beat(rank)
    finally:
        peers.write_beat(rank.team.folder, rank.team.own, pulse.beat)


def _measure_beat(rank: _Watch) -> peers.Beat:
    return peers.Beat(
        session=rank.team.session,
        count=rank.pulse.beat.count + 1,
        phase=rank.main.phase.name,
        elapsed=rank.clock.elapsed,
        allow=rank.main.phase.allow,
        doing="" if rank.main.is_unwinding else describe_stack(rank.main.ident),
        busy=rank.clock.busy_share,
        waits=is_in_collective(rank.main.ident),
        still=rank.saves.still,
        state=rank.main.state,
    )


def _look_around(rank: _Watch) -> None:
    """Read the others' beats: rank 0 always, as it warns; the rest when they may have to act."""
    beat = rank.pulse.beat
    near_end = rank.clock.elapsed > beat.allow - _AHEAD or rank.alarms.stopping
    # Rank 0 looks for stragglers all the time, and the more rarely the more ranks there are.
    interval = 1 + len(rank.team.members) // 64  # beats
    is_turn = rank.team.own.rank == 0 and beat.count % interval == 0
    if not (near_end or is_turn):
        return
    passed = rank.others.unseen
    rank.others.unseen = 0.0
    for number, before in rank.others.sightings.items():
        beat = peers.read_beat(rank.team.folder, number, rank.team.session)
        rank.others.sightings[number] = peers.update_sighting(before, beat, passed)


def _warn_of_stragglers(rank: _Watch) -> None:
    """Warn once of each rank that the others have been waiting for, five looks in a row."""
    sightings = rank.others.sightings
    if rank.team.own.rank != 0 or not sightings:
        return
    beats = {0: rank.pulse.beat} | {number: x.beat for number, x in sightings.items()}
    busy = {number: x.busy for number, x in beats.items() if x is not None and x.busy >= 0}
    phases = {x.phase.rstrip("0123456789") for x in beats.values() if x is not None}
    # A rank that prunes checkpoints while the others step is no straggler.
    found = peers.find_stragglers(busy) if len(phases) == 1 else {}
    for number in beats:
        looks = rank.others.slow.get(number, 0) + 1 if number in found else 0
        rank.others.slow[number] = looks
        if looks == _LOOKS and rank.warnings.is_first(f"rank {number} is slow"):
            what = (
                f"watch: {peers.format_member(rank.team.members[number])} is slower than the "
                f"others, which spend up to {1 - min(busy.values()):.0%} of their time waiting; "
                f"it is {peers.describe_beat(beats[number])}"
            )
            straggler = peers.Straggler(number, busy[number], found[number], what)
            rank.options.report_straggler(straggler)


def _check_directory(rank: _Watch) -> None:
    """Warn once if the run directory is gone; end this process if another run is in its place."""
    run_dir = rank.team.run_dir
    if rank.team.own.rank != 0:
        return
    if not rank.options.is_there() and rank.warnings.is_first("directory"):
        rank.options.log(
            f"warning: watch: the run directory {run_dir} was removed or moved while the run goes "
            "on: there is no checkpoint there any more to go back to; the next save begins a new "
            "one in its place"
        )
    try:
        rank.options.renew_lock()
    except ConfigError as error:
        _end(
            rank,
            DiskError(
                f"watch: the run directory {run_dir} was moved away, and another run has started "
                f"in its place: {error}",
                where=run_dir,
                hint="look for the checkpoints of this run where its directory was moved to, and "
                "go on with another --out",
            ),
        )


# --------------------------------------------------------------------------------- ending a process


def _act(rank: _Watch, *, passed: float) -> None:
    """End the process if the main thread, which could go on or end by itself, does not."""
    # It is ending by itself, or will at its next phase.
    if rank.main.is_unwinding or rank.main.state != "running" or rank.alarms.verdict:
        return
    team = rank.team
    beat = rank.pulse.beat
    failure = peers.read_failure(team.folder, team.session) or _find_gone(team)
    rank.alarms.failing = rank.alarms.failing + passed if failure else 0.0
    if failure is None:
        culprits = peers.find_culprits(team.own.rank, beat, rank.others.sightings, team.near)
        failure = _accuse(rank, culprits) if culprits else None
    if failure is not None:
        # A main thread that is late or at fault has noticed nothing, and nothing to wait for.
        hopeless = beat.is_overdue or failure.rank == team.own.rank
        stack = read_stack(rank.main.ident)
        has_noticed = any(file.endswith(_SAVE_AFTER_ERROR) for file, _, _ in stack)
        if hopeless or (rank.alarms.failing > _CAUSE_GRACE and not has_noticed):
            _end(rank, _make_error(rank, failure))
            return
    if rank.alarms.stopping > (_GRACE if rank.options.grace is None else rank.options.grace):
        _end_late_stop(rank)


def _end_late_stop(rank: _Watch) -> None:
    """End a process that did not stop in time; or warn once, if it may take longer."""
    stopping = rank.alarms.stopping
    allowed = _time_to_stop(rank)
    # The first save of a run may be this one: nothing is known yet about how long one takes.
    longest = 2 * allowed if rank.saves.longest else max(2 * allowed, rank.main.phase.allow)
    may_go_on = stopping <= longest and _may_finish_saving(rank)
    if rank.options.grace is None and (stopping <= allowed or may_go_on):
        if rank.warnings.is_first("late"):  # a launcher may kill at any time from now on
            text, _ = _describe_unsaved(rank, _GRACE)
            rank.options.log(
                f"warning: watch: rank {rank.team.own.rank} {text}; it goes on for some time"
            )
        return
    text, code = _describe_unsaved(rank, allowed)
    failure = peers.Failure(rank.team.session, rank.team.own.rank, text, code=code)
    peers.write_failure(rank.team.folder, failure)
    _end(rank, _make_error(rank, failure))


def _time_to_stop(rank: _Watch) -> float:
    """Return how many seconds a stop may take, by the arguments or by what was measured."""
    if rank.options.grace is not None:
        return rank.options.grace
    return max(_GRACE, 2 * rank.clock.longest_step + rank.saves.longest + 5.0)


def _may_finish_saving(rank: _Watch) -> bool:
    """Return whether a stop takes long because the checkpoint does, and no rank is missing."""
    # A rank that has written its own part waits for the others: one of them all must go on writing.
    found = rank.others.sightings.items()
    stills = [rank.saves.still, *(x.beat.still for _, x in found if x.beat)]
    near = rank.team.near
    at_fault = any(peers.is_at_fault(x, near=near[number]) for number, x in found)
    stack = read_stack(rank.main.ident)
    is_saving = any("/trainkit/weights/checkpoint/" in file for file, _, _ in stack)
    hangs = min(stills) > max(_STILL, 2 * rank.saves.pause)
    return is_saving and not hangs and not at_fault and not rank.pulse.beat.is_overdue


def _describe_unsaved(rank: _Watch, grace: float) -> tuple[str, int]:
    """Return the message and the exit code of a rank that did not stop within `grace` seconds."""
    run_dir = rank.team.run_dir
    steps = list[int]()
    with contextlib.suppress(OSError):
        steps = [parse_step(path) for path in list_checkpoints(run_dir / "checkpoints")]
    last = f"the last checkpoint is step {steps[0]}" if steps else "there is no checkpoint"
    text = (
        f"was asked to stop ({rank.options.stop_reason() or 'a signal'}), but not saved within "
        f"{grace:g} s: {last}; it was {peers.describe_beat(rank.pulse.beat)}"
    )
    # Nothing may have been trained since the last checkpoint.
    is_saved = bool(steps) and steps[0] >= (read_last_step(run_dir / "metrics.jsonl") or 0)
    return text, EXIT_SAVED if is_saved else PreemptedError.code


def _end(rank: _Watch, error: TrainkitError) -> None:
    """End this process, and kill processes of the run on this host that have stopped.

    If the process is not the run's own, the main thread gets the error at its next phase.
    """
    team = rank.team
    if not rank.options.owns_process:
        if rank.alarms.verdict is None:
            rank.alarms.verdict = error
            rank.options.log(f"error: {error}")
        return
    with contextlib.suppress(Exception):
        for member in team.members:
            sighting = rank.others.sightings.get(member.rank, peers.Sighting())
            is_silent = peers.is_silent(sighting, near=True)
            if is_silent or peers.has_stopped(member, team.own.place):
                peers.kill_member(member, team.own.place)
    end_process(error, run_dir=team.run_dir, rank=team.own.rank)


def _guard_the_watch(rank: _Watch, stop: threading.Event) -> None:
    """End a process that must stop when the watching thread itself hangs, as a disk can make it."""
    since = 0.0
    stuck = 0
    seen = rank.pulse.looked
    while not stop.wait(_SECOND):
        since += 1.0 if since or rank.options.stop_reason() is not None else 0.0
        stuck = stuck + 1 if rank.pulse.looked == seen else 0
        seen = rank.pulse.looked
        if since > _time_to_stop(rank) and stuck > _STUCK:
            end_without_disk(
                PreemptedError.code,
                f"watch: was asked to stop ({rank.options.stop_reason()}), but the disk of "
                f"{rank.team.run_dir} does not answer",
            )


# ---------------------------------------------------------------------------------- finding causes


def _find_gone(team: _Team) -> peers.Failure | None:
    """Find a rank of this host whose process ended before its work, and write that down for all."""
    for member in team.members:
        if peers.is_gone(member, team.own.place):
            beat = peers.read_beat(team.folder, member.rank, team.session)
            if beat is not None and beat.state == "running":
                text = (
                    f"(process {member.pid} on {member.host}) is gone; it was last "
                    f"{peers.describe_beat(beat)}"
                )
                failure = peers.Failure(team.session, member.rank, text)
                return peers.write_failure(team.folder, failure)
    return None


def _accuse(rank: _Watch, culprits: Sequence[int]) -> peers.Failure:
    """Say why some ranks are at fault, and write it down for all."""
    team = rank.team
    beats = {x.rank: peers.read_beat(team.folder, x.rank, team.session) for x in team.members}
    beats[team.own.rank] = rank.pulse.beat
    why = "is stuck"
    hint = ""
    sighting = rank.others.sightings.get(culprits[0])
    # First, since the last beat of a rank that has stopped may come from any place.
    if sighting is not None and peers.is_silent(sighting, near=team.near[culprits[0]]):
        why = f"has stopped: no sign of life for {sighting.still:.0f} s"
    # A special case of different places, with a cause that can be named.
    elif peers.wait_in_fsdp_units(beats):
        why = "waits for parameters or gradients of another unit than others"
        hint = _UNITS
    elif peers.wait_in_different_places(beats):
        why = "waits at another place than others"
        hint = _APART
    elif sighting is not None and peers.is_at_fault(sighting, near=True):
        why = "has left the others alone"
    number, text, detail = peers.describe_culprits(culprits, beats, team.members, why)
    failure = peers.Failure(team.session, number, text, detail, hint=hint)
    return peers.write_failure(team.folder, failure)


def _make_error(rank: _Watch, failure: peers.Failure) -> TrainkitError:
    """Return the error of this rank for a failure of itself or another one."""
    is_own = failure.rank == rank.team.own.rank
    detail = failure.detail
    if not detail and not is_own:
        detail = f"this rank was {peers.describe_beat(_measure_beat(rank))}"
    text = f"watch: {'' if is_own else 'peer '}rank {failure.rank} {failure.what}"
    kind = PeerError if failure.code == PeerError.code else PreemptedError
    error = kind(
        f"{text}; {detail}" if detail else text,
        where=f"rank {failure.rank}",
        hint=failure.hint or None,
    )
    error.code = failure.code
    return error


# --------------------------------------------------------------------------------- the main thread


def is_echo(error: BaseException) -> bool:
    """Return whether an error may only mean that another rank has ended.

    Examples:
        >>> is_echo(RuntimeError("Connection closed by peer")), is_echo(PeerError("rank 1 is gone"))
        (True, False)
    """
    return not isinstance(error, TrainkitError) and get_exit_code(error) == PeerError.code


def _report_own(rank: _Watch, error: BaseException) -> BaseException:
    """Write down for the other ranks what went wrong here, and return the error to raise."""
    # It is about another rank: there is nothing to report of this one.
    if isinstance(error, PeerError):
        return error
    team = rank.team
    name = rank.main.phase.name
    message = " ".join(format_error(error, most=2000).split())
    text = f"{type(error).__name__}: {message}".removesuffix(": ")
    failed = f"failed: {text} (in phase {name!r})"
    if isinstance(error, SystemExit):
        if len(team.members) == 1:
            return error
        failed = f"left with exit code {error.code or 0} in phase {name!r}, before the end"
    refused = name == START and get_exit_code(error) in _REFUSED
    failure = peers.Failure(team.session, team.own.rank, failed, refused=refused)
    peers.write_failure(team.folder, failure)
    # With an exit code of 0 the launcher would take the run for finished.
    if isinstance(error, SystemExit) and not error.code:
        return RuntimeError(f"watch: rank {team.own.rank} {failed}")
    if not is_out_of_memory(error):
        return error
    import resource  # noqa: PLC0415 (Unix has it)

    size = parse_requested_memory(error)
    # ru_maxrss is in KiB on Linux.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return MemoryError(
        f"rank {team.own.rank} had no memory left"
        + ("" if size is None else f" for {size} more")
        + f" in phase {name!r}: its process has used up to {peak} bytes of the host's"
        + ("" if limit == resource.RLIM_INFINITY else f", and RLIMIT_AS lets it have {limit} bytes")
        + f"; {text}"
    ).with_traceback(error.__traceback__)


def _find_cause(rank: _Watch, error: BaseException) -> BaseException:
    """Return the cause of a broken connection, waiting some seconds for it to become known."""
    team = rank.team
    # Read anew: the watching thread may not have looked at the others yet.
    seen = dict.fromkeys(rank.others.sightings, peers.Sighting())
    begin = time.monotonic()
    for second in range(round(_ECHO_GRACE) if seen else 0):
        while time.monotonic() < begin + second:
            failure = peers.read_failure(team.folder, team.session) or _find_gone(team)
            if failure is not None:
                return _make_error(rank, failure)
            time.sleep(0.05)
        for number, before in seen.items():
            beat = peers.read_beat(team.folder, number, team.session)
            seen[number] = peers.update_sighting(before, beat, 1.0)
        ended = [number for number, x in seen.items() if x.beat and x.beat.state != "running"]
        if ended and second > 0:
            return _make_error(rank, _accuse(rank, ended))
    return _describe_loss(rank, error, seen)


def _describe_loss(
    rank: _Watch, error: BaseException, seen: Mapping[int, peers.Sighting]
) -> BaseException:
    """Return an error that says which ranks have been silent, where no cause became known."""
    if not seen or not isinstance(error, RuntimeError):  # a connection of the recipe's own, perhaps
        return error
    silent = [number for number, x in seen.items() if x.still > _ECHO_GRACE / 2]
    shown = [*silent, *(number for number in seen if number not in silent)][:16]
    states = "; ".join(
        f"{peers.format_member(rank.team.members[number])} was "
        f"{peers.describe_beat(seen[number].beat)}"
        + (", and has been silent since" if number in silent else "")
        for number in shown
    )
    message = " ".join(format_error(error, most=300).split())
    return PeerError(
        f"watch: a peer was lost in phase {rank.main.phase.name!r}: {states}; {message}",
        where=f"rank {silent[0]}" if silent else None,
    )
