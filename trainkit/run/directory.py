"""The run directory: made, and found to be writable, before anything else is done.

What is made in it has the permissions that the user's umask leaves, checkpoints and logs alike: a
run that others shall not read is started under `umask 077`.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from trainkit.files import find_other_writers
from trainkit.types import ConfigError, DiskError, Log, log_info

_FILES = ("lock", "metrics.jsonl", "events.jsonl", "run.json", "config.toml", "final.json")


def make_run_dir(
    path: str | Path,
    *,
    strict_owner: bool = False,
    log: Log = log_info,
) -> Path:
    """Return `path` as a directory that exists and can be written, as a probe of 4 KiB has shown.

    Args:
        path: The directory.
        strict_owner: Refuse a directory that others can write, too, instead of telling of it.
        log: What is called with a sentence for each reason to distrust the directory.

    Raises:
        ConfigError: `path` is a file, or what a run writes in it is a pipe, a folder or the like;
            or others can write it and `strict_owner` is set.
        DiskError: `path` cannot be made or written.

    Effects:
        Makes the directory and its parents; writes a probe and removes it. Any rank may call it.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     make_run_dir(f"{folder}/runs/first").is_dir()
        True
    """
    path = Path(path)
    _refuse_odd_files(path)
    if path.exists() and not path.is_dir():
        raise ConfigError(
            f"make_run_dir: {path} is a file; a run needs a directory", where=str(path)
        )
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path, prefix=".probe_") as probe:
            probe.write(bytes(4096))
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as error:
        raise DiskError(
            f"make_run_dir: user {os.geteuid()} cannot write {path}: {error.strerror}",
            where=str(path),
            got=error.strerror,
            want="a directory that this user can write",
            hint="make room, fix the permissions, or name another directory with --out",
        ) from error
    problems = find_other_writers(path)
    if problems and strict_owner:
        raise ConfigError(
            f"make_run_dir: {'; '.join(problems)}",
            where=str(path),
            hint=f"chmod go-w {path}, or use a directory of your own",
        )
    for problem in problems:
        log(problem)
    return path


def _refuse_odd_files(path: Path) -> None:
    """Refuse to wait for a pipe, or to write over what is no file."""
    for name in _FILES:
        file = path / name
        if file.exists() and not file.is_file():
            raise ConfigError(
                f"make_run_dir: {file} is no regular file, and a run writes there",
                where=str(file),
                hint=f"remove {file}, or name another directory with --out",
            )
