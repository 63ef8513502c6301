"""Files and folders that are there whole or not at all."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import secrets
import shutil
import stat
import sys
from collections.abc import Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, BinaryIO

from trainkit.types import DiskError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from io import BufferedReader
    from pathlib import Path


_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


@contextmanager
def atomic_write(path: Path, *, by: str) -> Iterator[BinaryIO]:
    """Open a temporary file that becomes `path` at the end, and goes on failure.

    The file is locked meanwhile: `remove_stale_files` leaves it alone until its process is gone.

    Args:
        path: The file to make, or to replace.
        by: Which function writes, for the message.

    Raises:
        DiskError: It cannot be written.

    Effects:
        Writes `path`; file and folder have reached the disk when the block has ended.
    """
    with convert_disk_errors(path, by=by):
        for again in reversed(range(_TRIES)):
            temporary = _beside(path)
            file = temporary.open("xb")
            if _locked(file.fileno(), temporary) or not again:
                break
            file.close()
    try:
        yield file
        with convert_disk_errors(path, by=by):
            file.flush()
            os.fsync(file.fileno())
            temporary.replace(path)  # while it is locked
            file.close()
            fsync_folder(path.parent)
    except BaseException:
        with suppress(OSError):  # closing writes what is left, and fails again where writing failed
            file.close()
        temporary.unlink(missing_ok=True)
        raise


@contextmanager
def atomic_folder(path: Path, *, by: str, replace: bool = False) -> Iterator[Path]:
    """Yield an empty folder beside `path` that becomes it at the end, and goes on failure.

    What is written into it must have reached the disk when the block ends; then one rename makes it
    `path`. The folder is locked meanwhile, so that another process that makes the same removes what
    killed ones have left, and never what is still being written.

    Args:
        path: The folder to make.
        by: Which function writes, for the message.
        replace: A folder that is there changes places with the new one, in one rename, and goes
            then. Where the kernel or the disk cannot do that (`swap_paths`), it steps aside
            first: of a process that is killed between these two renames it lies beside `path`,
            where the next one that makes `path` finds it.

    Raises:
        DiskError: It cannot be written.

    Effects:
        Makes `path`, and the folders above it; removes what killed processes left beside it.

    Examples:
        >>> import tempfile
        >>> from pathlib import Path
        >>> with tempfile.TemporaryDirectory() as home:
        ...     with atomic_folder(Path(home) / "made", by="example") as staging:
        ...         _ = (staging / "file").write_text("whole")
        ...     [path.name for path in Path(home).rglob("*")]
        ['made', 'file']
    """
    with convert_disk_errors(path, by=by):
        path.parent.mkdir(parents=True, exist_ok=True)
        recover_folder(path)
        staging, handle = _locked_folder(path)
    try:
        yield staging
        with convert_disk_errors(path, by=by):
            (_swap if replace and path.exists() else commit_folder)(staging, path)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    finally:
        os.close(handle)


def commit_folder(staging: Path, path: Path) -> None:
    """Give a finished folder its name: what it holds is on the disk before the name is.

    Raises:
        OSError: It could not; then there is no `path`, and `staging` is still there.

    Effects:
        Renames a folder, and waits for the disk.
    """
    fsync_folder(staging)
    staging.rename(path)
    try:
        fsync_folder(path.parent)
    except OSError:  # what is told to have failed must not be there
        with suppress(OSError):
            path.rename(staging)
        raise


def swap_paths(one: Path, other: Path) -> bool:
    """Exchange two files or folders in one rename; return False where that cannot be done.

    It takes Linux's `renameat2`, and a disk that knows RENAME_EXCHANGE, as ext4, xfs, btrfs and
    tmpfs do, and NFS does not.

    Raises:
        OSError: It could not, for another reason; then both are where they were.

    Effects:
        Renames two paths of one disk.

    Examples:
        >>> import tempfile
        >>> from pathlib import Path
        >>> with tempfile.TemporaryDirectory() as home:
        ...     one, other = Path(home) / "one", Path(home) / "other"
        ...     _ = one.write_text("1"), other.write_text("2")
        ...     exchanged = swap_paths(one, other)
        ...     one.read_text() == ("2" if exchanged else "1")
        True
    """
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    paths = os.fsencode(one.absolute()), os.fsencode(other.absolute())
    if rename(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EXDEV):
        return False
    raise OSError(code, os.strerror(code), str(other))


def _swap(staging: Path, path: Path) -> None:
    """Give a finished folder the name of another, which is removed.

    Killed at any point, there is the old folder or the new one at `path`, whole, if the two can be
    exchanged.
    """
    fsync_folder(staging)
    if swap_paths(staging, path):
        try:
            fsync_folder(path.parent)
        except OSError:  # what is told to have failed must not be there
            swap_paths(staging, path)
            raise
        shutil.rmtree(staging, ignore_errors=True)
        return
    aside = path.with_name(f".{path.name}.replaced-{secrets.token_hex(4)}")
    path.rename(aside)
    try:
        commit_folder(staging, path)
    except OSError:
        aside.rename(path)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def recover_folder(path: Path) -> None:
    """Undo what a killed `atomic_folder` left: put the old one back, remove what nobody writes to.

    Effects:
        Renames and removes folders beside `path`.
    """
    for aside in sorted(path.parent.glob(f".{path.name}.replaced-*")):
        if path.exists():
            shutil.rmtree(aside, ignore_errors=True)
        else:
            aside.rename(path)
    remove_stale_files(path.parent.glob(f".{path.name}.staging-*"))


def remove_stale_files(paths: Iterable[Path]) -> None:
    """Remove what `atomic_write` and `atomic_folder` were making when their process was killed.

    Effects:
        Removes files and folders on which nobody has a lock.
    """
    for path in paths:
        with suppress(OSError):
            handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            finally:
                os.close(handle)


_TRIES = 4
"""Of making something that another process does not take for a dead one's before it is locked."""


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.staging-{secrets.token_hex(4)}")


def _locked_folder(path: Path) -> tuple[Path, int]:
    """Return a new folder beside a path, and the handle by which it is locked."""
    for again in reversed(range(_TRIES)):
        staging = _beside(path)
        staging.mkdir()
        handle = os.open(staging, os.O_RDONLY)
        if _locked(handle, staging) or not again:
            break
        os.close(handle)
    return staging, handle


def _locked(handle: int, path: Path) -> bool:
    """Lock what a handle is of, and say whether it is still at its path.

    Another process's `remove_stale_files` may have taken it for dead before it was locked.
    """
    with suppress(OSError):  # not every disk has locks; then nobody takes what is made for dead
        fcntl.flock(handle, fcntl.LOCK_EX)
    return path.exists()


@contextmanager
def convert_disk_errors(
    path: Path, *, by: str, needed: int | None = None, hint: str | None = None
) -> Iterator[None]:
    """Turn an `OSError` of the block into a `DiskError` that names the file and what is free."""
    try:
        yield
    except OSError as error:
        free, room = None, f"; the next part needs {needed} bytes" if needed else ""
        if error.errno not in {errno.EMFILE, errno.ENFILE}:  # a full disk is another matter
            with suppress(OSError):
                there = next(each for each in (path, *path.parents) if each.exists())
                free = shutil.disk_usage(there).free
                room += f"; {free} bytes are free{_without_inodes(there)}"
        what = f"{error.strerror or error} ({errno.errorcode.get(error.errno or 0, 'no code')})"
        raise DiskError(
            f"{by}: cannot write {path}: {what}{room}",
            where=path,
            got=free,
            want=needed,
            hint=hint,
        ) from error


def _without_inodes(path: Path) -> str:
    """Say that a disk with bytes left takes no other file, where that is so."""
    found = os.statvfs(path)
    is_full = found.f_files > 0 and found.f_favail == 0
    return ", but no inode is, which every file needs: delete some files" if is_full else ""


def read_limited(path: Path, *, most: int) -> bytes:
    """Return the bytes of a regular file of at most `most`; what is none, or larger, is not read.

    Raises:
        OSError: As `open` does; or it is a pipe, which might never end, or too large.

    Examples:
        >>> from pathlib import Path
        >>> read_limited(Path("/dev/null"), most=10)
        Traceback (most recent call last):
        ...
        OSError: [Errno 22] is no regular file: '/dev/null'
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            what = f"has {size} bytes, where {most} are the most"
            raise OSError(errno.EFBIG, what, str(path))
        return file.read(most)


def open_regular(path: Path) -> BufferedReader:
    """Open a file to be read, if it is a regular one; a pipe might never end.

    Raises:
        OSError: As `open` does; or it is no regular file.

    Examples:
        >>> from pathlib import Path
        >>> open_regular(Path("/dev/null"))
        Traceback (most recent call last):
        ...
        OSError: [Errno 22] is no regular file: '/dev/null'
    """
    # Without O_NONBLOCK a pipe that nobody writes to cannot even be opened.
    file = open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb")  # noqa: PTH123, SIM115
    kind = os.fstat(file.fileno()).st_mode
    if stat.S_ISREG(kind):
        return file
    file.close()
    if stat.S_ISDIR(kind):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "is no regular file", str(path))


def find_other_writers(path: Path) -> list[str]:
    """Return who else than this user may have written a file or folder, or can change it.

    Nothing that is read is ever executed, so this is about numbers that somebody else chose.

    Args:
        path: What is there; a link stands for what it leads to.

    Returns:
        A sentence for each of the owner, the group and everybody, if there is something to say.

    Examples:
        >>> import tempfile
        >>> from pathlib import Path
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     find_other_writers(Path(folder))
        []
    """
    found = path.stat()
    mode = f"(mode {stat.S_IMODE(found.st_mode):o})"
    is_foreign = found.st_uid not in {os.geteuid(), 0}
    # A group with the user's own number is the user's own: where that is usual, so is umask 002.
    is_shared = bool(found.st_mode & stat.S_IWGRP) and found.st_gid != os.geteuid()
    is_open = bool(found.st_mode & stat.S_IWOTH)
    return [
        *([f"{path} belongs to user {found.st_uid}, not to {os.geteuid()}"] if is_foreign else []),
        *([f"{path} can be written by the group {found.st_gid} {mode}"] if is_shared else []),
        *([f"{path} can be written by everybody {mode}"] if is_open else []),
    ]


def fsync_folder(path: Path) -> None:
    """Return once the names in a folder have reached the disk; raises `OSError`.

    Effects:
        Waits for the disk.

    Examples:
        >>> import tempfile
        >>> from pathlib import Path
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     fsync_folder(Path(folder))
    """
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def format_toml(values: Mapping[str, Any]) -> str:
    """Return plain values by name as the text of a TOML file.

    TOML has no null: None is written as "None", which `config.read_config` reads as one.

    Raises:
        TypeError: A value is none of str, number, bool, None and lists of these.

    Examples:
        >>> print(format_toml({"lr": 0.1, "out": "runs/a", "data": ["a", "b"]}), end="")
        lr = 0.1
        out = "runs/a"
        data = ["a", "b"]
    """
    return "".join(f"{name} = {_toml(value)}\n" for name, value in values.items())


def _toml(value: Any) -> str:
    if value is None:
        return '"None"'
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Sequence):
        return f"[{', '.join(map(_toml, value))}]"
    raise TypeError(f"format_toml: {value!r} is no str, number, bool, None or list")


def hide_piped_script() -> None:
    """Let processes that Python starts look for no script "<stdin>", which came through a pipe.

    `python - <<EOF` leaves that name, under which multiprocessing's processes would import it.

    Effects:
        Removes `__file__` of the main module where it is "<stdin>".

    Examples:
        >>> hide_piped_script()
    """
    main = sys.modules["__main__"]
    if getattr(main, "__file__", None) == "<stdin>":
        del main.__file__


def redirect_to_devnull(stream: Any) -> None:
    """Let what is written to a file from now on go nowhere, as its reader has left.

    Effects:
        Points the descriptor of `stream` at the null device.

    Examples:
        >>> reader, writer = os.pipe()
        >>> with open(writer, "w") as stream:
        ...     os.close(reader)
        ...     redirect_to_devnull(stream)
        ...     print("read by nobody", file=stream)
    """
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


def flush(stream: Any) -> None:
    """Flush what was printed; where its reader has left, let the rest go nowhere.

    Effects:
        Writes to `stream`, and never fails.

    Examples:
        >>> flush(sys.stdout)
    """
    try:
        stream.flush()
    except BrokenPipeError:
        redirect_to_devnull(stream)
    except (OSError, ValueError, AttributeError):
        return  # a full disk, a closed stream, none at all: there is nobody left to tell


def say(text: str, stream: Any) -> None:
    """Write lines on a stream at once; they are lost where it is closed or has no reader.

    Effects:
        Writes to `stream`, and never fails.

    Examples:
        >>> say("step 1", sys.stdout)
        step 1
    """
    with suppress(OSError, ValueError, AttributeError):
        stream.write(f"{text}\n")
    flush(stream)


def say_on_stderr(text: str) -> None:
    """Write lines on stderr at once; see `say`.

    Effects:
        Writes to stderr, and never fails.
    """
    say(text, sys.stderr)
