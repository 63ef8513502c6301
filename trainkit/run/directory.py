"""Create the run directory, and check that it is writable, before anything else happens.

All files in it, checkpoints and logs, have the permissions of the user's umask: start a run that
others must not read under `umask 077`.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from trainkit.buckets.urls import find_url
from trainkit.files import find_other_writers
from trainkit.types import ConfigError, DiskError, Log, log_info

_FILES = ("lock", "metrics.jsonl", "events.jsonl", "run.json", "config.toml", "final.json")


def make_run_dir(
    path: str | Path,
    *,
    strict_owner: bool = False,
    log: Log = log_info,
) -> Path:
    """Create a directory if it does not exist, check by a probe of 4 KiB that it is writable.

    Args:
        path: The directory.
        strict_owner: Raise if others can write to the directory, instead of logging it.
        log: Called with each reason to distrust the directory.

    Returns:
        The path.

    Raises:
        ConfigError: `path` is a URL or a file, or a name that a run writes to is a pipe, a folder
            or the like; or others can write to it and `strict_owner` is set.
        DiskError: `path` cannot be created or written.

    Effects:
        Creates the directory and its parents; writes a probe and removes it. Any rank may call it.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     make_run_dir(f"{folder}/runs/first").is_dir()
        True
    """
    if find_url(path) is not None:
        raise ConfigError(
            f"make_run_dir: {find_url(path)} is in a bucket, and only runs that train work there",
            where="out",
            hint="name a folder of this machine with --out, and copy it when it is done",
        )
    path = Path(path)
    for name in _FILES:  # opening a pipe would block; another kind would be overwritten
        file = path / name
        if file.exists() and not file.is_file():
            raise ConfigError(
                f"make_run_dir: {file} is no regular file, and a run writes there",
                where=str(file),
                hint=f"remove {file}, or name another directory with --out",
            )
    if path.exists() and not path.is_dir():
        raise ConfigError(
            f"make_run_dir: {path} is a file; a run needs a directory", where=str(path)
        )
    try:
        path.mkdir(parents=True, exist_ok=True)
        # Only writing shows a full disk, a quota or a file system that is mounted read-only.
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
