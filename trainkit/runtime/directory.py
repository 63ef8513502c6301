"""The run directory: made, and found to be writable, before anything else is done."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from trainkit.types import ConfigError, DiskError


def make_run_dir(path: str | Path) -> Path:
    """Return `path` as a directory that exists and can be written, as a probe of 4 KiB has shown.

    Raises:
        ConfigError: `path` is a file.
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
            hint="make room, mend the permissions, or name another directory with --out",
        ) from error
    return path
