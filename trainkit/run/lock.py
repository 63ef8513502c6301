"""A lock file that lets only one run use a directory.

Two runs in one directory would mix their lines and delete each other's checkpoints. The lock is
the kernel's (flock): it ends with the process that owns it, however that ends, so no stale lock
blocks the next run. The text in the file only names the owner.
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
from typing import BinaryIO

import attrs
import orjson

from trainkit.collectives import run_on_all_ranks
from trainkit.files import convert_disk_errors
from trainkit.run.peers import Member, is_gone
from trainkit.types import Axis, ConfigError, Log, log_warning

# Errors of file systems without locks, such as Lustre without its option `flock`.
_NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL}


@attrs.frozen
class Holder:
    """The process that owns a run directory; `job` is the scheduler's number, if there is one."""

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
    """Lock a run directory for the length of a `with` block, or raise on all ranks.

    Rank 0 locks the file `lock` in the directory; a file that a dead process has left is taken
    over, with a message. A run changes nothing in the directory before that. All ranks must read
    there what rank 0 has written: a rank with a disk of its own would save nothing.

    Args:
        run_dir: The run directory, which exists.
        axis: The ranks of the run, `ps.world`.
        log: Called on rank 0 when a lock is taken over.
        patience: Seconds that children of a dead owner may take to end, and that the file may take
            to appear on all ranks.

    Yields:
        `renew_lock()`: if the directory was moved or removed, it creates a new one and locks that;
        it raises ConfigError if another run is there by then. Rank 0 calls it from time to time, as
        `watch_ranks` does.

    Raises:
        ConfigError: Another run uses the directory (the message names its host, process and job),
            or a rank does not see the directory of rank 0 (it names the rank and its host).
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
    path = Path(run_dir) / "lock"
    # By it the other ranks recognize the file of this start, even on a host that sees it late.
    token = secrets.token_hex(8)
    with contextlib.ExitStack() as stack:
        # The last is the lock; those before it are in directories that were moved away.
        files: list[BinaryIO] = []

        def lock(patience: float) -> str:
            if axis.index == 0:
                files.append(stack.enter_context(_lock_file(path, token, log, patience)))
            return token

        def renew_lock() -> None:
            if files and not _is_same_file(files[-1], path):
                path.parent.mkdir(parents=True, exist_ok=True)
                lock(0.0)

        token_of_rank_0 = run_on_all_ranks(lambda: lock(patience), axis)[0]
        run_on_all_ranks(lambda: _wait_for_token(path, token_of_rank_0, axis.index, patience), axis)
        yield renew_lock


def _wait_for_token(path: Path, token: str, rank: int, patience: float) -> None:
    """Wait until the file has the token of rank 0; another host may see it late."""
    deadline = time.monotonic() + patience
    while True:
        text = ""
        try:
            with path.open(encoding="utf-8", errors="replace") as file:
                text = file.read(4096)
        except OSError as error:
            if error.errno in {errno.EMFILE, errno.ENFILE}:  # says nothing about this file
                raise
        if token in text:
            return
        if time.monotonic() >= deadline:
            raise ConfigError(
                f"lock_run: rank {rank} on {socket.gethostname()} does not see the run directory "
                f"of rank 0: {path} {'is another file' if text else 'does not exist'}",
                where=str(path.parent),
                want="one directory for all ranks, on a disk that their hosts share",
                hint="give all ranks the same --out, on a shared disk",
            )
        time.sleep(0.1)


@contextlib.contextmanager
def _lock_file(path: Path, token: str, log: Log, patience: float) -> Iterator[BinaryIO]:
    with convert_disk_errors(path, by="lock_run"), contextlib.ExitStack() as opened:
        file = opened.enter_context(_open_locked(path, patience))
        dead = _read_holder(file)
        if dead is not None:
            log(f"{path}: taken over; {dead}, has ended without releasing it")
        file.seek(0)
        file.truncate()
        holder = Holder(
            host=socket.gethostname(),
            pid=os.getpid(),
            job=os.environ.get("SLURM_JOB_ID") or os.environ.get("TORCHELASTIC_RUN_ID"),
            since=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        file.write(orjson.dumps(attrs.asdict(holder) | {"token": token}) + b"\n")
        file.flush()
        # From here on errors come from the run, and are not converted.
        opened.pop_all()
    with file:
        try:
            yield file
        finally:
            # Removed before it is unlocked: who has opened it meanwhile finds that it was removed.
            with contextlib.suppress(OSError):
                if _is_same_file(file, path):  # the directory may be another run's by now
                    path.unlink()


def _open_locked(path: Path, patience: float) -> BinaryIO:
    """Return the file, locked, or raise ConfigError with the process that has locked it."""
    deadline = time.monotonic() + patience
    while True:
        # A link is not followed: it could lead to a file that is no lock, and is overwritten.
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
        file = os.fdopen(os.open(path, flags, 0o666), "r+b")
        is_locked = _try_lock(file)
        is_late = time.monotonic() >= deadline
        # Between open and flock the last owner may have removed the file: then this lock is on a
        # file that nobody else will open, and the next attempt gets the new one.
        if is_locked and (_is_same_file(file, path) or is_late):
            return file
        holder = _read_holder(file)
        file.close()
        if is_locked:
            continue
        # A forked child shares the lock, and may outlive its parent for some seconds.
        may_end_soon = holder is None or _has_ended(holder)
        if not may_end_soon or is_late:
            has_ended = holder is not None and _has_ended(holder)
            child = "; it has ended, but a child process still has the lock" if has_ended else ""
            raise ConfigError(
                f"lock_run: {path.parent} is in use by {holder or 'another run'}{child}",
                where=str(path),
                got=None if holder is None else str(holder),
                want="a directory that no other run writes to",
                hint="wait for that run to end, or name another directory with --out; if it is "
                f"certain that no run is there, remove {path}",
            )
        time.sleep(0.1)


def _try_lock(file: BinaryIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        holder = _read_holder(file)  # without locks, the text has to do
        return holder is None or _has_ended(holder)
    return True


def _is_same_file(file: BinaryIO, path: Path) -> bool:
    """Return whether the path still leads to the open file; its last owner may have removed it."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file.fileno()), path.stat(follow_symlinks=False))
    return False


def _read_holder(file: BinaryIO) -> Holder | None:
    """Return the owner that is written in the file, if this module has written it."""
    file.seek(0)
    with contextlib.suppress(orjson.JSONDecodeError, TypeError, KeyError, ValueError):
        values = orjson.loads(file.read(4096))
        job = None if values["job"] is None else str(values["job"])
        return Holder(
            host=str(values["host"]),
            pid=int(values["pid"]),
            job=job,
            since=str(values["since"]),
        )
    return None


def _has_ended(holder: Holder) -> bool:
    """Return whether the owner has certainly ended; False for a process of another host."""
    member = Member(0, holder.host, holder.host, holder.pid, started="")
    return is_gone(member, here=socket.gethostname())
