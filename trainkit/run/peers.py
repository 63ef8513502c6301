"""Heartbeats: files through which ranks watch each other without collectives.

Each rank writes a small file about itself, its heartbeat, and reads those of others when it needs
to. Nothing here communicates, so it works when a collective does not. Clocks are never compared
between ranks: a heartbeat has a count, and a rank is alive if two reads differ.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import orjson

from trainkit.types import PeerError

IN_UNIT = "a unit of fsdp"
"""Part of a beat's `doing` where a unit of FSDP2 is gathered or its gradients are reduced."""
SILENT = 4.0
"""Seconds without a new beat after which a rank on this host counts as silent."""
SILENT_AFAR = 65.0
"""The same for another host: a shared folder may show files that are a minute old."""


@attrs.frozen
class Member:
    """One rank's process: `place` identifies the host and container, `started` a reused pid."""

    rank: int
    host: str
    place: str
    pid: int
    started: str


@attrs.frozen
class Beat:
    """A rank's heartbeat, about once a second.

    `elapsed` is the duration of its phase and `allow` its limit, in seconds. `doing` is where its
    main thread was, `waits` whether that was a collective, `busy` the share of time outside of
    collectives (-1: not measured yet), `still` the seconds since it last wrote a part of a save.
    `state` is "running", "ended" or "failed".
    """

    session: str
    count: int
    phase: str
    elapsed: float
    allow: float
    doing: str
    busy: float = -1.0
    waits: bool = False
    still: float = 0.0
    state: str = "running"

    @property
    def is_overdue(self) -> bool:
        """Whether the phase has exceeded its limit."""
        return self.state == "running" and self.elapsed > self.allow


@attrs.frozen
class Sighting:
    """A rank's last beat as another rank has read it, and for how many seconds it has not changed.

    `beat` is None until one has been read.
    """

    beat: Beat | None = None
    still: float = 0.0


@attrs.frozen
class Failure:
    """Why the run ends: `what` continues "rank 3 ..."; `detail` describes the other ranks.

    `code` is the exit code of the other ranks; `hint` replaces the usual one. `refused` is whether
    the start was refused: its input was wrong, and no step was taken.
    """

    session: str
    rank: int
    what: str
    detail: str = ""
    code: int = PeerError.code
    hint: str = ""
    refused: bool = False


# ------------------------------------------------------------------------------------ processes


def this_member(rank: int) -> Member:
    """Return this process as a member.

    Examples:
        >>> this_member(3).pid == os.getpid()
        True
    """
    place = [socket.gethostname()]
    with contextlib.suppress(OSError):
        # Containers of one host share its boot id; their pids mean something in one namespace.
        place.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        place.append(str(Path("/proc/self/ns/pid").readlink()))
    pid = os.getpid()
    return Member(rank, place[0], "/".join(place), pid, _start_of(pid) or "")


def is_gone(member: Member, here: str) -> bool:
    """Return whether a rank's process has certainly ended; False for other places than `here`.

    A process that has ended but has not been waited for (a zombie) is gone.

    Examples:
        >>> own = this_member(0)
        >>> is_gone(own, own.place), is_gone(attrs.evolve(own, started="never"), own.place)
        (False, True)
    """
    if member.place != here:
        return False
    if member.started:
        start = _start_of(member.pid)
        return start is not None and start != member.started
    try:
        # Signal 0 only asks whether the process exists.
        os.kill(member.pid, 0)
    except OSError as error:  # PermissionError: the pid is another user's process
        return isinstance(error, ProcessLookupError)
    return False


def kill_member(member: Member, here: str) -> None:
    """Kill a rank's process at this place, so that the run leaves no stopped process behind.

    Effects:
        Sends SIGKILL, if the pid still belongs to the same process.
    """
    if member.place == here and member.pid != os.getpid() and not is_gone(member, here):
        with contextlib.suppress(OSError):
            os.kill(member.pid, signal.SIGKILL)


def has_stopped(member: Member, here: str) -> bool:
    """Return whether a rank's process at this place has certainly been stopped (SIGSTOP).

    Examples:
        >>> own = this_member(0)
        >>> has_stopped(own, own.place)
        False
    """
    if member.place != here or is_gone(member, here):
        return False
    return (status_of(member.pid) or [])[:1] == [b"T"]


def _start_of(pid: int) -> str | None:
    """Return a process's start time in the kernel's ticks, "ended", or None if it is unknown."""
    status = status_of(pid)
    if status is None:
        return None
    # Z is a zombie, X is dead. starttime is the 22nd field of proc(5), the 20th after the name.
    return "ended" if not status or status[0] in b"ZXx" else status[19].decode()


def status_of(pid: int) -> list[bytes] | None:
    """Return the fields of `/proc/PID/stat` from the state on; an empty list without a process.

    None where that is unknown: without `/proc`, or if no more files can be opened.

    Examples:
        >>> status_of(2**22 + 1)  # no process has this number
        []
    """
    try:
        # The second field, the program's name in parentheses, may contain spaces and parentheses.
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return [] if Path("/proc/self/stat").exists() else None
    except OSError:
        return None


# ------------------------------------------------------------------------------------ files


def beat_file(folder: Path, rank: int) -> Path:
    """Return the path of a rank's beats.

    Examples:
        >>> beat_file(Path("run/ranks"), 3).name
        'rank_00003.json'
    """
    return folder / f"rank_{rank:05d}.json"


def clear_folder(folder: Path) -> None:
    """Create the folder of beats, without those of an earlier run.

    Effects:
        Creates `folder`, and removes the files of ranks in it.

    Raises:
        OSError: It cannot be created or cleared.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for path in [*folder.glob("rank_*"), *folder.glob("failure*")]:
        path.unlink(missing_ok=True)


def write_beat(folder: Path, member: Member, beat: Beat) -> None:
    """Write a rank's beat atomically, if the disk allows it.

    Effects:
        Replaces the rank's file. On a full disk it overwrites the old one, or removes it if the
        rank has ended: otherwise a rank that has ended would look like a lost one.
    """
    path = beat_file(folder, member.rank)
    values = attrs.asdict(beat) | {"host": member.host, "pid": member.pid, "rank": member.rank}
    text = orjson.dumps(values)
    try:
        path.with_suffix(".new").write_bytes(text)
        path.with_suffix(".new").replace(path)
    except FileNotFoundError:  # the folder was removed: the next beat gets a new one
        with contextlib.suppress(OSError):
            folder.mkdir()
    except OSError:
        with contextlib.suppress(OSError):
            size = path.stat().st_size
            if len(text) <= size:
                with path.open("r+b") as file:
                    # JSON allows spaces at the end.
                    file.write(text.ljust(size))
            elif beat.state == "ended":
                path.unlink()


def read_beat(folder: Path, rank: int, session: str) -> Beat | None:
    """Return a rank's last beat; None if it is missing, unreadable or of another session.

    Examples:
        >>> read_beat(Path("no_such_folder"), 0, "a")
    """
    return _read(beat_file(folder, rank), Beat, session)


def read_failure(folder: Path, session: str) -> Failure | None:
    """Return why the run ends, if a rank has written it.

    Examples:
        >>> read_failure(Path("no_such_folder"), "a")
    """
    return _read(folder / "failure.json", Failure, session)


def write_failure(folder: Path, failure: Failure) -> Failure:
    """Write down why the run ends, and return the first failure: this one or another rank's.

    Effects:
        Writes `failure.json`, unless it is there already.
    """
    path = folder / "failure.json"
    own = path.with_suffix(f".{secrets.token_hex(8)}")  # pids repeat across containers
    with contextlib.suppress(OSError):
        own.write_bytes(orjson.dumps(attrs.asdict(failure)))
        try:
            path.hardlink_to(own)  # atomic: fails if the file exists, and never shows half of it
        except FileExistsError:
            pass
        except OSError:  # a file system without hard links
            with path.open("xb") as file:
                file.write(own.read_bytes())
    with contextlib.suppress(OSError):
        own.unlink()
    return read_failure(folder, failure.session) or failure


def _read(path: Path, kind: type[Any], session: str) -> Any:
    try:
        # A beat's file also has host, pid and rank, for people.
        values = orjson.loads(path.read_bytes())
        record = kind(**{field.name: values[field.name] for field in attrs.fields(kind)})
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return record if record.session == session else None


# ------------------------------------------------------------------------------------ diagnosis


def update_sighting(before: Sighting, beat: Beat | None, seconds: float) -> Sighting:
    """Return the sighting of a rank after another read, `seconds` after the last one.

    Examples:
        >>> beat = Beat("a", 7, "step 3", 1.0, 60.0, "")
        >>> twice = update_sighting(update_sighting(Sighting(), beat, 1.0), beat, 1.5)
        >>> twice.still, update_sighting(twice, attrs.evolve(beat, count=8), 1.0).still
        (1.5, 0.0)
    """
    if beat is None:
        return attrs.evolve(before, still=before.still + seconds)
    is_new = before.beat is None or beat.count != before.beat.count
    return Sighting(beat, 0.0 if is_new else before.still + seconds)


def is_silent(sighting: Sighting, *, near: bool) -> bool:
    """Return whether a running rank has stopped writing beats.

    Examples:
        >>> beat = Beat("a", 7, "step 3", 1.0, 60.0, "")
        >>> is_silent(Sighting(beat, 5.0), near=True), is_silent(Sighting(beat, 5.0), near=False)
        (True, False)
    """
    beat = sighting.beat
    limit = SILENT if near else SILENT_AFAR
    return beat is not None and beat.state == "running" and sighting.still > limit


def find_culprits(
    own: int, beat: Beat, others: Mapping[int, Sighting], near: Mapping[int, bool]
) -> list[int]:
    """Return the ranks at fault for an overdue phase of this rank; none if it should keep waiting.

    Silent, failed and ended ranks are at fault. If there are none, all ranks must be overdue: then
    those that do not wait in a collective are at fault. As long as one rank is within its limit,
    all wait for it.

    Args:
        own: This rank.
        beat: Its beat at this moment.
        others: The sightings of the other ranks.
        near: Whether each of them is at the same place.

    Examples:
        >>> late = Beat("a", 1, "step 3", 61.0, 60.0, "all_sum")
        >>> prunes = attrs.evolve(late, phase="prune", allow=3600.0)
        >>> find_culprits(0, late, {1: Sighting(prunes)}, {1: True})
        []
        >>> find_culprits(0, late, {1: Sighting(late, still=9.0)}, {1: True})
        [1]
    """
    if not beat.is_overdue:
        return []
    lost = [rank for rank, x in others.items() if is_at_fault(x, near=near[rank])]
    if lost:
        return lost
    beats = {own: beat} | {rank: x.beat for rank, x in others.items()}
    if any(x is not None and not x.is_overdue for x in beats.values()):
        return []
    active = [rank for rank, x in beats.items() if x is None or not x.waits]
    # If all of them wait, none is more at fault than another.
    return sorted(active or beats)


def is_at_fault(sighting: Sighting, *, near: bool) -> bool:
    """Return whether waiting for a rank is useless: it is silent, has failed or has ended.

    Examples:
        >>> failed = Beat("a", 7, "step 3", 1.0, 60.0, "", state="failed")
        >>> is_at_fault(Sighting(failed), near=True), is_at_fault(Sighting(), near=True)
        (True, False)
    """
    beat = sighting.beat
    ended = beat is not None and beat.state != "running"
    return ended or is_silent(sighting, near=near)


@attrs.frozen
class Straggler:
    """A rank that the others wait for.

    Attributes:
        rank: Its number.
        busy: The share of its time outside of collectives, 0 to 1.
        others: The median of that share over the other ranks. Each of them does the work of a step
            in `others` / `busy` of the time that this rank takes.
        what: A sentence for people.
    """

    rank: int
    busy: float
    others: float
    what: str


def find_stragglers(busy: Mapping[int, float]) -> dict[int, float]:
    """Return the ranks that the others wait for: those at least three times as busy as the median.

    Each has the median of the other ranks.

    Args:
        busy: By rank, the share of time outside of collectives.

    Examples:
        >>> find_stragglers({0: 0.2, 1: 1.0, 2: 0.25}), find_stragglers({0: 0.7, 1: 1.0})
        ({1: 0.25}, {})
    """
    found: dict[int, float] = {}
    for rank, share in busy.items():
        others = [other for name, other in busy.items() if name != rank]
        # A rank that itself waits for half of its time holds nobody up.
        if others and share > 0.5 and share >= 3.0 * statistics.median_high(others):
            found[rank] = statistics.median_high(others)
    return found


def wait_in_different_places(beats: Mapping[int, Beat | None]) -> bool:
    """Return whether all ranks wait for each other in collectives, at different places.

    Examples:
        >>> a = Beat("a", 1, "step 3", 61.0, 60.0, "all_sum (x.py:1)", waits=True)
        >>> b = attrs.evolve(a, doing="agree (x.py:7)")
        >>> wait_in_different_places({0: a, 1: b}), wait_in_different_places({0: a, 1: a})
        (True, False)
    """
    waiting = [beat for beat in beats.values() if beat is not None and beat.waits]
    return len(waiting) == len(beats) and len({beat.doing for beat in waiting}) > 1


def wait_in_fsdp_units(beats: Mapping[int, Beat | None]) -> bool:
    """Return whether all ranks wait in collectives, at least one of them in that of an FSDP unit.

    Examples:
        >>> a = Beat("a", 1, "step 3", 61.0, 60.0, f"forward (x.py:1) > {IN_UNIT} (unshard)")
        >>> a = attrs.evolve(a, waits=True)
        >>> busy = attrs.evolve(a, waits=False)
        >>> wait_in_fsdp_units({0: a, 1: a}), wait_in_fsdp_units({0: a, 1: busy})
        (True, False)
    """
    all_wait = all(beat is not None and beat.waits for beat in beats.values())
    return all_wait and any(beat is not None and IN_UNIT in beat.doing for beat in beats.values())


# ------------------------------------------------------------------------------------ texts


def format_member(member: Member) -> str:
    """Return the name of a rank in messages.

    Examples:
        >>> format_member(Member(3, "gpu07", "gpu07", 412, ""))
        'rank 3 (process 412 on gpu07)'
    """
    return f"rank {member.rank} (process {member.pid} on {member.host})"


def describe_beat(beat: Beat | None) -> str:
    """Return in words what a rank was doing.

    Examples:
        >>> describe_beat(Beat("a", 1, "step 3", 61.2, 60.0, "train_step (pretrain.py:9)"))
        "in phase 'step 3' for 61 s, at train_step (pretrain.py:9)"
    """
    if beat is None:
        return "not seen yet"
    if beat.state != "running":
        return f"{beat.state} after phase {beat.phase!r}"
    at = f", at {beat.doing}" if beat.doing else ""
    return f"in phase {beat.phase!r} for {beat.elapsed:.0f} s{at}"


def describe_culprits(
    culprits: Sequence[int], beats: Mapping[int, Beat | None], members: Sequence[Member], why: str
) -> tuple[int, str, str]:
    """Return the first culprit, a text about it, and one about the others (at most 16).

    Examples:
        >>> members = [Member(rank, "a", "a", 40 + rank, "") for rank in range(2)]
        >>> late = Beat("a", 1, "step 3", 61.0, 60.0, "")
        >>> describe_culprits([1], {0: late, 1: late}, members, "hangs")[1]
        "(process 41 on a) hangs, in phase 'step 3' for 61 s"
    """
    first, *more = culprits
    member = members[first]
    text = f"(process {member.pid} on {member.host}) {why}, {describe_beat(beats.get(first))}"
    if more:
        ranks = ", ".join(map(str, more[:16]))
        text += f" (and so {'are' if len(more) > 1 else 'is'} rank {ranks})"
    shown = [rank for rank in beats if rank != first][:16]
    detail = "; ".join(f"rank {rank} was {describe_beat(beats[rank])}" for rank in shown)
    return first, text, detail
