"""Heartbeats: what ranks know of each other without collectives, through files.

Each rank writes a small file, its beat, and reads those of other ranks when there is reason to. No
collective is needed, so this works where one hangs. Clocks of ranks are never compared: a beat has
a count, and two reads show whether it grows.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import orjson

from trainkit.types import PeerError

IN_UNIT = "a unit of fsdp"
"""In a beat's `doing`: a unit of FSDP2 is gathered, or its gradients are reduced."""
SILENT = 4.0
"""Seconds without a new beat after which a rank on this host is silent."""
SILENT_AFAR = 65.0
"""The same for another host: a shared folder may show files that are a minute old."""


@attrs.frozen
class Member:
    """One rank's process. `place` identifies its host and container; `started` its use of a pid."""

    rank: int
    host: str
    place: str
    pid: int
    started: str


@attrs.frozen
class Beat:
    """What a rank writes about itself, about once a second.

    Attributes:
        session: The name of this start of the run.
        count: The number of beats before.
        phase: The name of the phase.
        elapsed: For how many seconds the phase has lasted.
        allow: How many it may last.
        doing: What the main thread was doing.
        busy: The share of time outside of collectives; -1 while it is not known.
        waits: Whether the main thread was in a collective.
        still: Seconds since the rank last wrote a part of a save.
        state: "running", "ended" or "failed".
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
        """Whether the phase has lasted longer than it may."""
        return self.state == "running" and self.elapsed > self.allow


@attrs.frozen
class Sighting:
    """A rank as another one sees it: its last beat, None before the first, and the beat's age."""

    beat: Beat | None = None
    still: float = 0.0


@attrs.frozen
class Failure:
    """Why the run ends.

    Attributes:
        session: The name of this start of the run.
        rank: The rank at fault.
        what: The end of a sentence that begins with "rank 3".
        detail: What the other ranks were doing.
        code: The exit code of the other ranks.
        hint: What to do, if it is not what the exit code implies.
    """

    session: str
    rank: int
    what: str
    detail: str = ""
    code: int = PeerError.code
    hint: str = ""


# ------------------------------------------------------------------------------------ processes


def this_member(rank: int) -> Member:
    """Return the record of this process.

    Examples:
        >>> this_member(3).pid == os.getpid()
        True
    """
    place = [socket.gethostname()]
    with contextlib.suppress(OSError):
        place.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        place.append(str(Path("/proc/self/ns/pid").readlink()))
    return Member(rank, place[0], "/".join(place), os.getpid(), _start_of(os.getpid()) or "")


def is_gone(member: Member, here: str) -> bool:
    """Return whether a rank's process has certainly ended; of other places than `here`, False.

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
        os.kill(member.pid, 0)
    except OSError as error:  # it may be somebody else's
        return isinstance(error, ProcessLookupError)
    return False


def put_down(member: Member, here: str) -> None:
    """Kill a rank's process of this place that has stopped, so that the run leaves nothing behind.

    Effects:
        Sends SIGKILL, if it is still the process that it was.
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
    """Return when a process started, in the kernel's ticks, or "ended"; None: it is not known."""
    status = status_of(pid)
    if status is None:
        return None
    return "ended" if not status or status[0] in b"ZXx" else status[19].decode()


def status_of(pid: int) -> list[bytes] | None:
    """Return the fields of `/proc/PID/stat`, from the state on; an empty list for no process.

    None without `/proc`, or if this process cannot open more files.

    Examples:
        >>> status_of(2**22 + 1)  # no process has this number
        []
    """
    try:
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
    """Make the folder of an earlier run's beats anew.

    Effects:
        Makes `folder`, and removes what ranks have written into it.

    Raises:
        OSError: It cannot be made or cleared.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for path in [*folder.glob("rank_*"), *folder.glob("failure*")]:
        path.unlink(missing_ok=True)


def write_beat(folder: Path, member: Member, beat: Beat) -> None:
    """Write a rank's beat, whole or not at all, as far as the disk lets it.

    Effects:
        Replaces the rank's file. On a full disk it writes over the old one, or removes it if the
        rank has ended, as a rank that has ended must not look as if it were gone.
    """
    path = beat_file(folder, member.rank)
    fields = attrs.asdict(beat) | {"host": member.host, "pid": member.pid, "rank": member.rank}
    text = orjson.dumps(fields)
    try:
        path.with_suffix(".new").write_bytes(text)
        path.with_suffix(".new").replace(path)
    except FileNotFoundError:  # somebody has tidied up: the next beat has a place again
        with contextlib.suppress(OSError):
            folder.mkdir()
    except OSError:
        with contextlib.suppress(OSError):
            _write_over(path, text, ended=beat.state == "ended")


def _write_over(path: Path, text: bytes, *, ended: bool) -> None:
    size = path.stat().st_size
    if len(text) <= size:
        with path.open("r+b") as file:
            file.write(text.ljust(size))
    elif ended:
        path.unlink()


def read_beat(folder: Path, rank: int, session: str) -> Beat | None:
    """Return a rank's last beat; None if there is none of this session, or it cannot be read.

    Examples:
        >>> read_beat(Path("no_such_folder"), 0, "a")
    """
    return _read(beat_file(folder, rank), Beat, session)


def read_failure(folder: Path, session: str) -> Failure | None:
    """Return why the run ends, if a rank wrote it down.

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
    own = path.with_suffix(f".{secrets.token_hex(8)}")  # a pid may be another container's, too
    with contextlib.suppress(OSError):
        own.write_bytes(orjson.dumps(attrs.asdict(failure)))
        try:
            path.hardlink_to(own)  # fails if there is one, and never shows half a file
        except FileExistsError:
            pass
        except OSError:  # no hard links here
            with path.open("xb") as file:
                file.write(own.read_bytes())
    with contextlib.suppress(OSError):
        own.unlink()
    return read_failure(folder, failure.session) or failure


def _read(path: Path, kind: type[Any], session: str) -> Any:
    try:
        stored = orjson.loads(path.read_bytes())
        found = kind(**{field.name: stored[field.name] for field in attrs.fields(kind)})
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if found.session == session else None


# ------------------------------------------------------------------------------------ judgement


def look(before: Sighting, beat: Beat | None, seconds: float) -> Sighting:
    """Return the sighting of a rank after another read, `seconds` after the last one.

    Examples:
        >>> beat = Beat("a", 7, "step 3", 1.0, 60.0, "")
        >>> twice = look(look(Sighting(), beat, 1.0), beat, 1.5)
        >>> twice.still, look(twice, attrs.evolve(beat, count=8), 1.0).still
        (1.5, 0.0)
    """
    if beat is None:
        return attrs.evolve(before, still=before.still + seconds)
    moved = before.beat is None or beat.count != before.beat.count
    return Sighting(beat, 0.0 if moved else before.still + seconds)


def is_silent(sighting: Sighting, *, near: bool) -> bool:
    """Return whether a rank that should beat does not.

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
    """Return the ranks at fault for a phase of this rank that is overdue; none if it may wait on.

    Ranks that are silent, failed or left are at fault. Without such a rank, all must be overdue,
    this one included: then the ranks that are not in a collective are at fault. While one rank is
    in a phase that has time left, all wait for it.

    Args:
        own: This rank.
        beat: Its own last beat.
        others: The other ranks.
        near: Which of them are at the same place.

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
    hard = [rank for rank, x in others.items() if is_at_fault(x, near=near[rank])]
    if hard:
        return hard
    beats = {own: beat} | {rank: x.beat for rank, x in others.items()}
    if any(x is not None and not x.is_overdue for x in beats.values()):
        return []
    active = [rank for rank, x in beats.items() if x is None or not x.waits]
    return sorted(active or beats)


def is_at_fault(sighting: Sighting, *, near: bool) -> bool:
    """Return whether a rank cannot be waited for: silent, failed, or already at its end.

    Examples:
        >>> failed = Beat("a", 7, "step 3", 1.0, 60.0, "", state="failed")
        >>> is_at_fault(Sighting(failed), near=True), is_at_fault(Sighting(), near=True)
        (True, False)
    """
    beat = sighting.beat
    ended = beat is not None and beat.state != "running"
    return ended or is_silent(sighting, near=near)


def stragglers(busy: Mapping[int, float]) -> list[int]:
    """Return the ranks that the others wait for: those three times as busy as the median.

    Args:
        busy: By rank, the share of time in which it did not wait for a collective.

    Examples:
        >>> stragglers({0: 0.2, 1: 1.0, 2: 0.25}), stragglers({0: 0.7, 1: 1.0})
        ([1], [])
    """
    found = []
    for rank, share in busy.items():
        rest = sorted(other for name, other in busy.items() if name != rank)
        if rest and share > 0.5 and share >= 3.0 * rest[len(rest) // 2]:
            found.append(rank)
    return found


def are_apart(beats: Mapping[int, Beat | None]) -> bool:
    """Return whether all ranks wait for each other in collectives, at different places.

    Examples:
        >>> a = Beat("a", 1, "step 3", 61.0, 60.0, "all_sum (x.py:1)", waits=True)
        >>> b = attrs.evolve(a, doing="agree (x.py:7)")
        >>> are_apart({0: a, 1: b}), are_apart({0: a, 1: a})
        (True, False)
    """
    known = [beat for beat in beats.values() if beat is not None and beat.waits]
    return len(known) == len(beats) and len({beat.doing for beat in known}) > 1


def are_in_units(beats: Mapping[int, Beat | None]) -> bool:
    """Return whether all ranks wait for each other in collectives, one at least in an FSDP unit's.

    Examples:
        >>> a = Beat("a", 1, "step 3", 61.0, 60.0, f"forward (x.py:1) > {IN_UNIT} (unshard)")
        >>> a = attrs.evolve(a, waits=True)
        >>> are_in_units({0: a, 1: a}), are_in_units({0: a, 1: attrs.evolve(a, waits=False)})
        (True, False)
    """
    all_wait = all(beat is not None and beat.waits for beat in beats.values())
    return all_wait and any(beat is not None and IN_UNIT in beat.doing for beat in beats.values())


# ------------------------------------------------------------------------------------ words


def name_of(member: Member) -> str:
    """Return the name of a rank for a message.

    Examples:
        >>> name_of(Member(3, "gpu07", "gpu07", 412, ""))
        'rank 3 (process 412 on gpu07)'
    """
    return f"rank {member.rank} (process {member.pid} on {member.host})"


def describe(beat: Beat | None) -> str:
    """Return what a rank was doing, for a message.

    Examples:
        >>> describe(Beat("a", 1, "step 3", 61.2, 60.0, "train_step (pretrain.py:9)"))
        "in phase 'step 3' for 61 s, at train_step (pretrain.py:9)"
    """
    if beat is None:
        return "silent so far"
    if beat.state != "running":
        return f"{beat.state} after phase {beat.phase!r}"
    at = f", at {beat.doing}" if beat.doing else ""
    return f"in phase {beat.phase!r} for {beat.elapsed:.0f} s{at}"


def accuse(
    culprits: Sequence[int], beats: Mapping[int, Beat | None], members: Sequence[Member], why: str
) -> tuple[int, str, str]:
    """Return the first rank at fault, the message about it, and one about up to 16 others.

    Examples:
        >>> members = [Member(rank, "a", "a", 40 + rank, "") for rank in range(2)]
        >>> late = Beat("a", 1, "step 3", 61.0, 60.0, "")
        >>> accuse([1], {0: late, 1: late}, members, "is stuck")[1]
        "(process 41 on a) is stuck, in phase 'step 3' for 61 s"
    """
    first, *more = culprits
    what = f"(process {members[first].pid} on {members[first].host}) {why}, "
    what += describe(beats.get(first))
    if more:
        what += (
            f" (and so {'are' if len(more) > 1 else 'is'} rank {', '.join(map(str, more[:16]))})"
        )
    shown = [rank for rank in beats if rank != first][:16]
    return first, what, "; ".join(f"rank {rank} was {describe(beats[rank])}" for rank in shown)
