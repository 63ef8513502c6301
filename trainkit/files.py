"""Write files completely or not at all; read files of a bounded size; find trainkit's own."""

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
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from trainkit.types import DiskError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from io import BufferedReader


_AT_FDCWD = -100  # from fcntl.h
_RENAME_EXCHANGE = 2  # from linux/fs.h; Python has no binding of renameat2


@contextmanager
def atomic_write(path: Path, *, by: str) -> Iterator[BinaryIO]:
    """Open a temporary file that replaces `path` at the end, and is deleted on failure.

    The file is locked, so that `remove_stale_files` ignores it until its process has exited.

    Args:
        path: The file to create or replace.
        by: The function that writes, for the message.

    Raises:
        DiskError: It cannot be written, or is a device.

    Effects:
        Writes `path`; file and folder have reached the disk when the block has ended.
    """
    # As root, a rename would replace a device such as /dev/null for every process of the machine.
    if path.is_char_device() or path.is_block_device():
        raise DiskError(
            f"{by}: {path} is a device, which the file would replace",
            where=str(path),
            hint="write to another path",
        )
    with convert_disk_errors(path, by=by):
        for tries_left in reversed(range(_LOCK_TRIES)):
            temporary = _make_temporary_name(path)
            file = temporary.open("xb")
            if _lock(file.fileno(), temporary) or not tries_left:
                break
            file.close()
    try:
        yield file
        with convert_disk_errors(path, by=by):
            file.flush()
            os.fsync(file.fileno())
            temporary.replace(path)  # still locked, or another process could remove it
            file.close()
            fsync_folder(path.parent)
    except BaseException:
        with suppress(OSError):  # closing flushes, and fails again if writing has failed
            file.close()
        temporary.unlink(missing_ok=True)
        raise


@contextmanager
def atomic_folder(path: Path, *, by: str, replace: bool = False) -> Iterator[Path]:
    """Yield an empty temporary folder that becomes `path` at the end, and is deleted on failure.

    Its files must have reached the disk when the block ends; then one rename makes it `path`. The
    folder is locked, so that another process which makes the same folder removes the leftovers of
    killed processes, but never what is still being written.

    Args:
        path: The folder to create.
        by: The function that writes, for the message.
        replace: Exchange an existing folder with the new one in one rename, and then delete it. If
            the kernel or the disk cannot do that (`swap_paths`), the old one is renamed first. If
            the process is killed between these two renames, the next call for `path` restores it.

    Raises:
        DiskError: It cannot be written.

    Effects:
        Creates `path` and the folders above it; removes what killed processes left next to it.

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
        for tries_left in reversed(range(_LOCK_TRIES)):
            staging = _make_temporary_name(path)
            staging.mkdir()
            handle = os.open(staging, os.O_RDONLY)
            if _lock(handle, staging) or not tries_left:
                break
            os.close(handle)
    try:
        yield staging
        with convert_disk_errors(path, by=by):
            if replace and path.exists():
                _replace_folder(staging, path)
            else:
                commit_folder(staging, path)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    finally:
        os.close(handle)


def commit_folder(staging: Path, path: Path) -> None:
    """Rename a finished folder, after its contents have reached the disk.

    Raises:
        OSError: It failed; then there is no `path`, and `staging` still exists.

    Effects:
        Renames a folder, and waits for the disk.
    """
    fsync_folder(staging)
    staging.rename(path)
    try:
        fsync_folder(path.parent)
    except OSError:  # undo the rename: what is reported as a failure must not exist
        with suppress(OSError):
            path.rename(staging)
        raise


def swap_paths(one: Path, other: Path) -> bool:
    """Exchange two files or folders in one rename; return False if that is not supported.

    It needs Linux's `renameat2`, and a file system with RENAME_EXCHANGE: ext4, xfs, btrfs and tmpfs
    have it, NFS does not.

    Raises:
        OSError: It failed for another reason; then both are where they were.

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
    first = os.fsencode(one.absolute())
    second = os.fsencode(other.absolute())
    if rename(_AT_FDCWD, first, _AT_FDCWD, second, _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EXDEV):
        return False
    raise OSError(code, os.strerror(code), str(other))


def _replace_folder(staging: Path, path: Path) -> None:
    """Replace a folder by a finished one.

    Where `swap_paths` works, there is always a complete folder at `path`, the old or the new one,
    even if the process is killed.
    """
    fsync_folder(staging)
    if swap_paths(staging, path):
        try:
            fsync_folder(path.parent)
        except OSError:  # undo the rename: what is reported as a failure must not exist
            swap_paths(staging, path)
            raise
        shutil.rmtree(staging, ignore_errors=True)
        return
    # For a moment there is no folder at `path`: `recover_folder` restores this one.
    aside = path.with_name(f".{path.name}.replaced-{secrets.token_hex(4)}")
    path.rename(aside)
    try:
        commit_folder(staging, path)
    except OSError:
        aside.rename(path)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def recover_folder(path: Path) -> None:
    """Clean up after a killed `atomic_folder`: restore the old folder, remove temporary ones.

    Effects:
        Renames and removes folders next to `path`.
    """
    for aside in sorted(path.parent.glob(f".{path.name}.replaced-*")):
        if path.exists():
            shutil.rmtree(aside, ignore_errors=True)
        else:
            aside.rename(path)
    remove_stale_files(path.parent.glob(f".{path.name}.staging-*"))


def remove_stale_files(paths: Iterable[Path]) -> None:
    """Remove the temporary files and folders of killed processes.

    Effects:
        Removes those that no process has locked.
    """
    for path in paths:
        with suppress(OSError):
            handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                # Its maker holds the lock, which ends with the process however that dies.
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            finally:
                os.close(handle)


_LOCK_TRIES = 4
"""Attempts to create a temporary file or folder and lock it before another process removes it."""


def _make_temporary_name(path: Path) -> Path:
    return path.with_name(f".{path.name}.staging-{secrets.token_hex(4)}")


def _lock(handle: int, path: Path) -> bool:
    """Lock an open file or folder, and return whether it still exists at its path.

    Another process's `remove_stale_files` may have removed it before it was locked.
    """
    with suppress(OSError):  # without locks on this disk, no process can remove it either
        fcntl.flock(handle, fcntl.LOCK_EX)
    return path.exists()


@contextmanager
def convert_disk_errors(
    path: Path,
    *,
    by: str,
    needed: int | None = None,
    hint: str | None = None,
) -> Iterator[None]:
    """Convert an `OSError` of the block to a `DiskError` with the file and the free space."""
    try:
        yield
    except OSError as error:
        free = None
        space = f"; the next part needs {needed} bytes" if needed else ""
        if error.errno not in {errno.EMFILE, errno.ENFILE}:  # too many open files: not the disk
            with suppress(OSError):
                existing = next(x for x in (path, *path.parents) if x.exists())
                free = shutil.disk_usage(existing).free
                space += f"; {free} bytes are free"
                info = os.statvfs(existing)
                if info.f_files > 0 and info.f_favail == 0:
                    space += ", but no inode is, which every file needs: delete some files"
        # The symbol too, which manuals and searches know.
        code = errno.errorcode.get(error.errno or 0, "no code")
        raise DiskError(
            f"{by}: cannot write {path}: {error.strerror or error} ({code}){space}",
            where=path,
            got=free,
            want=needed,
            hint=hint,
        ) from error


def read_limited(path: Path, *, max_bytes: int) -> bytes:
    """Read a regular file of at most `max_bytes`.

    Raises:
        OSError: As from `open`; or it is not a regular file, or is larger.

    Examples:
        >>> from pathlib import Path
        >>> read_limited(Path("/dev/null"), max_bytes=10)
        Traceback (most recent call last):
        ...
        OSError: [Errno 22] is no regular file: '/dev/null'
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > max_bytes:
            raise OSError(
                errno.EFBIG, f"has {size} bytes, where {max_bytes} are the most", str(path)
            )
        return file.read(max_bytes)


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file for reading; a pipe, for instance, might never end.

    Raises:
        OSError: As from `open`; or it is not a regular file.

    Examples:
        >>> from pathlib import Path
        >>> open_regular(Path("/dev/null"))
        Traceback (most recent call last):
        ...
        OSError: [Errno 22] is no regular file: '/dev/null'
    """
    # Without O_NONBLOCK a pipe that nobody writes to cannot even be opened.
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    kind = os.fstat(handle).st_mode
    if stat.S_ISREG(kind):
        return open(handle, "rb")  # noqa: PTH123
    os.close(handle)
    if stat.S_ISDIR(kind):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "is no regular file", str(path))


def find_other_writers(path: Path) -> list[str]:
    """Find other users who can write a file or folder, or may have written it.

    No file that is read is ever executed, so they can only choose its numbers.

    Args:
        path: A file or folder; links are followed.

    Returns:
        At most one sentence about each of the owner, the group and everybody.

    Examples:
        >>> import tempfile
        >>> from pathlib import Path
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     find_other_writers(Path(folder))
        []
    """
    found = path.stat()
    mode = f"(mode {stat.S_IMODE(found.st_mode):o})"
    problems = []
    # The owner can always change the mode, so it does not matter here.
    if found.st_uid not in {os.geteuid(), 0}:  # root can write everywhere anyway
        problems.append(f"{path} belongs to user {found.st_uid}, not to {os.geteuid()}")
    # Systems with a private group per user, of the user's number, usually also have umask 002.
    if found.st_mode & stat.S_IWGRP and found.st_gid != os.geteuid():
        problems.append(f"{path} can be written by the group {found.st_gid} {mode}")
    if found.st_mode & stat.S_IWOTH:
        problems.append(f"{path} can be written by everybody {mode}")
    return problems


def fsync_folder(path: Path) -> None:
    """Wait until the names in a folder have reached the disk.

    Raises:
        OSError: The disk fails.

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


def flatten_table(table: Any) -> Iterator[tuple[str, Any]]:
    """Yield the values of nested tables, under names that are joined by dots.

    A list is one value, and so is an empty table inside another.

    Examples:
        >>> list(flatten_table({"lr": 0.1, "logging": {"sinks": [], "more": {}}}))
        [('lr', 0.1), ('logging.sinks', []), ('logging.more', {})]
    """
    pending = [("", table)]  # no recursion: a file may be nested deeper than Python's stack allows
    while pending:
        name, value = pending.pop()
        if isinstance(value, Mapping) and (value or not name):
            prefix = f"{name}." if name else ""
            pending += [(f"{prefix}{key}", item) for key, item in reversed([*value.items()])]
        else:
            yield name, value


def format_toml(values: Mapping[str, Any]) -> str:
    """Format plain values by name as a TOML file.

    TOML has no null: None is written as "None", which `config.read_config` reads as None.

    Raises:
        TypeError: A value is none of str, number, bool, None and lists of these.

    Examples:
        >>> print(format_toml({"lr": 0.1, "out": "runs/a", "data": ["a", "b"]}), end="")
        lr = 0.1
        out = "runs/a"
        data = ["a", "b"]
    """
    return "".join(f"{name} = {_format_value(value)}\n" for name, value in values.items())


def _format_value(value: Any) -> str:
    if value is None:
        return '"None"'
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        # A JSON string is a TOML string, except that TOML forbids a bare DEL.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Sequence):
        return f"[{', '.join(map(_format_value, value))}]"
    raise TypeError(f"format_toml: {value!r} is no str, number, bool, None or list")


def hide_piped_script() -> None:
    """Keep multiprocessing from importing a script that came through a pipe.

    `python - <<EOF` sets `__main__.__file__` to "<stdin>", which child processes would look for.

    Effects:
        Removes `__file__` of the main module where it is "<stdin>".

    Examples:
        >>> hide_piped_script()
    """
    main = sys.modules["__main__"]
    if getattr(main, "__file__", None) == "<stdin>":
        del main.__file__


def redirect_to_devnull(stream: Any) -> None:
    """Discard everything that is written to a stream from now on, because its reader has left.

    Effects:
        Points the descriptor of `stream` at the null device.

    Examples:
        >>> reader, writer = os.pipe()
        >>> with open(writer, "w") as stream:
        ...     os.close(reader)
        ...     redirect_to_devnull(stream)
        ...     print("read by nobody", file=stream)
    """
    # The descriptor, not the object: Python flushes the stream once more when it exits.
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


def flush(stream: Any) -> None:
    """Flush a stream; if its reader has left, discard what is written from now on.

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
        return  # a full disk, a closed stream, or None: there is nowhere to report it


def print_to(text: str, stream: Any) -> None:
    """Write lines to a stream and flush it; a stream that is closed or has no reader is ignored.

    Effects:
        Writes to `stream`, and never fails.

    Examples:
        >>> print_to("step 1", sys.stdout)
        step 1
    """
    # A run must not fail because nobody reads its log.
    with suppress(OSError, ValueError, AttributeError):
        stream.write(f"{text}\n")
    flush(stream)


def print_to_stderr(text: str) -> None:
    """Write lines to stderr and flush it; see `print_to`.

    Effects:
        Writes to stderr, and never fails.
    """
    print_to(text, sys.stderr)


def read_version() -> str:
    """Return the version of trainkit that is installed, "source" if it is only imported.

    An editable installation has the version of the day on which it was installed.

    Examples:
        >>> read_version() != ""
        True
    """
    try:
        return metadata.version("trainkit-lm")
    except metadata.PackageNotFoundError:
        return "source"


def find_recipes() -> Path:
    """Return the folder of the recipes: that of the checkout, or the one packed into a wheel.

    Examples:
        >>> (find_recipes() / "pretrain.py").is_file()
        True
    """
    package = Path(__file__).parent
    packed = package / "recipes"
    # A checkout has them next to the package; setup.py copies them into a wheel.
    return packed if packed.is_dir() else package.parent / "recipes"
