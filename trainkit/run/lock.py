"""One run per directory: who holds it is written there, and a second one is refused.

Two runs in one directory would mix their lines and prune each other's checkpoints. The lock is the
kernel's (flock): it goes with the process that holds it, however that ends, so a lock is never left
in the way of the next run. What is written in the file only tells people who holds it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO, NoReturn

import attrs
import orjson

from trainkit.collectives import run_on_all_ranks
from trainkit.files import convert_disk_errors
from trainkit.run.peers import Member, is_gone
from trainkit.types import Axis, ConfigError, Log, log_warning

# File systems that have no locks say one of these, Lustre without its option `flock` for example.
_NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL}


@attrs.frozen
class Holder:
    """Who holds a run directory; `job` is the scheduler's number, where there is one."""

    host: str
    pid: int
    job: str | None
    since: str

    def __str__(self) -> str:
        job = "" if self.job is None else f", job {self.job}"
        return f"process {self.pid} on {self.host}{job}, since {self.since}"


@contextlib.contextmanager
def lock_run(
    run_dir: str | Path,
    axis: Axis,
    *,
    log: Log = log_warning,
    patience: float = 10.0,
) -> Iterator[Callable[[], None]]:
    """Hold a run directory for the length of a `with` block, or refuse on all ranks alike.

    Rank 0 holds `lock` in the directory. A file that a dead process has left is taken over, and
    told of. Nothing that changes is written to the directory before the lock is held. All ranks
    must find in it what rank 0 has written: a rank with a disk of its own would save nothing.

    Args:
        run_dir: The run directory, which exists.
        axis: The ranks of the run, `ps.world`.
        log: What is called, on rank 0, with a sentence about a lock that is taken over.
        patience: Seconds that the children of a dead holder have to end, and that the file may take
            until all ranks see it.

    Yields:
        `hold()`, which takes the lock again where the directory was moved away or removed, in a
        directory that it makes anew; it raises ConfigError if another run is there by then. Rank 0
        calls it from time to time, as `watch` does.

    Raises:
        ConfigError: Another run is in the directory, and the message names its host, process and
            job; or a rank does not see the directory of rank 0, and it names the rank and its host.
        DiskError: The file cannot be written.

    Effects:
        Writes `lock` on rank 0 and removes it at the end; communicates as `run_on_all_ranks`.

    Examples:
        >>> import tempfile
        >>> from trainkit.mesh import solo_parallel
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with lock_run(folder, solo_parallel().world):
        ...         sorted(path.name for path in Path(folder).iterdir())
        ['lock']
    """
    path, token = Path(run_dir) / "lock", secrets.token_hex(8)
    with contextlib.ExitStack() as stack:
        taken: list[BinaryIO] = []

        def take(patience: float) -> str:
            if axis.index == 0:
                taken.append(stack.enter_context(_held(path, token, log, patience)))
            return token

        def hold() -> None:
            if taken and not _is_the_file(taken[-1], path):
                path.parent.mkdir(parents=True, exist_ok=True)
                take(0.0)

        own = run_on_all_ranks(lambda: take(patience), axis)[0]
        run_on_all_ranks(lambda: _see(path, own, axis.index, patience), axis)
        yield hold


def _see(path: Path, token: str, rank: int, patience: float) -> None:
    """Wait until the file says what rank 0 has written, as another host may learn of it late."""
    deadline = time.monotonic() + patience
    while not (said := _read_text(path)) or token not in said:
        if time.monotonic() >= deadline:
            raise ConfigError(
                f"lock_run: rank {rank} on {socket.gethostname()} does not see the run directory "
                f"of rank 0: {path} is {'another one' if said else 'not there'}",
                where=str(path.parent),
                want="one directory for all ranks, on a disk that their hosts share",
                hint="give all ranks the same --out, on a shared disk",
            )
        time.sleep(0.1)


def _read_text(path: Path) -> str:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return file.read(4096)
    except OSError as error:
        if error.errno in {errno.EMFILE, errno.ENFILE}:  # it says nothing of what is there
            raise
        return ""


@contextlib.contextmanager
def _held(path: Path, token: str, log: Log, patience: float) -> Iterator[BinaryIO]:
    with convert_disk_errors(path, by="lock_run"), contextlib.ExitStack() as opened:
        file = opened.enter_context(_take(path, patience))
        left = _read_holder(file)
        if left is not None:
            log(f"{path}: taken over; {left}, has ended without giving it back")
        file.seek(0)
        file.truncate()
        told = attrs.asdict(_this_process()) | {"token": token}
        file.write(orjson.dumps(told, option=orjson.OPT_APPEND_NEWLINE))
        file.flush()
        opened.pop_all()
    with file:
        try:
            yield file
        finally:
            # While it is held: whoever opened the same file meanwhile will find another one there.
            with contextlib.suppress(OSError):
                if _is_the_file(file, path):  # the directory may be another run's by now
                    path.unlink()


def _take(path: Path, patience: float) -> BinaryIO:
    """Return the file, locked, or say who has locked it."""
    deadline = time.monotonic() + patience
    while True:
        file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666), "r+b")
        is_locked, is_late = _is_locked(file), time.monotonic() >= deadline
        if is_locked and (_is_the_file(file, path) or is_late):
            return file
        holder = _read_holder(file)
        file.close()
        if is_locked:
            continue
        # A child that was forked shares the lock, and may outlive its parent for some seconds.
        is_passing = holder is None or _has_ended(holder)
        if not is_passing or is_late:
            _refuse(path, holder)
        time.sleep(0.1)


def _is_locked(file: BinaryIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        holder = _read_holder(file)  # what is written is all there is to know
        return holder is None or _has_ended(holder)
    return True


def _is_the_file(file: BinaryIO, path: Path) -> bool:
    """Return whether the path still leads to the open file: its last holder may have removed it."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file.fileno()), path.stat(follow_symlinks=False))
    return False


def _refuse(path: Path, holder: Holder | None) -> NoReturn:
    ended = holder is not None and _has_ended(holder)
    child = "; it has ended, but a process that it started still holds the lock" if ended else ""
    raise ConfigError(
        f"lock_run: {path.parent} is in use by {holder or 'another run'}{child}",
        where=str(path),
        got=None if holder is None else str(holder),
        want="a directory that no other run writes to",
        hint="wait for that run to end, or name another directory with --out; if it is certain "
        f"that nobody is there, remove {path}",
    )


def _read_holder(file: BinaryIO) -> Holder | None:
    """Return what is written in the file, if it is what this module writes."""
    file.seek(0)
    with contextlib.suppress(orjson.JSONDecodeError, TypeError, KeyError, ValueError):
        told = orjson.loads(file.read(4096))
        job = None if told["job"] is None else str(told["job"])
        return Holder(str(told["host"]), int(told["pid"]), job, str(told["since"]))
    return None


def _has_ended(holder: Holder) -> bool:
    """Return whether the holder is known to be gone; on another host nobody can know."""
    place = holder.host
    return is_gone(Member(0, place, place, holder.pid, started=""), here=socket.gethostname())


def _this_process() -> Holder:
    return Holder(
        socket.gethostname(),
        os.getpid(),
        os.environ.get("SLURM_JOB_ID") or os.environ.get("TORCHELASTIC_RUN_ID"),
        datetime.now(UTC).isoformat(timespec="seconds"),
    )
