"""Describe checkpoints fast: by their manifests and the sizes of their files."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import orjson

from trainkit.weights.checkpoint.manifest import FORMAT, MANIFEST, READABLE, inspect_files
from trainkit.weights.checkpoint.retention import PIN

_FROM_MANIFEST = ("step", "run", "version", "score")
_MAX_MANIFEST = 1024 * 1024  # bytes, of a thousand ranks; a larger one takes the slow path


def describe_checkpoint(path: Path | str) -> dict[str, Any]:
    """Describe a checkpoint without hashing its tensors: 10,000 of them take about a second.

    It checks that every file exists and has its size. `verify_checkpoint` checks every byte.

    Args:
        path: A checkpoint directory.

    Returns:
        {"name", "step", "run", "version", "score", "bytes", "saved", "pinned", "complete",
        "problems"}. "saved" is when its manifest was written, in seconds since 1970. A "pinned"
        checkpoint is never deleted by retention. "run" is None in the first format.

    Examples:
        >>> describe_checkpoint("/does/not/exist")["complete"]
        False
    """
    directory = os.fspath(path)
    # Strings and not Path objects: for ten thousand checkpoints those take 0.1 s.
    name = directory.rstrip("/").rpartition("/")[2]
    row: dict[str, Any] = {"name": name} | dict.fromkeys((*_FROM_MANIFEST, "saved"))
    row["bytes"] = 0
    row["pinned"] = os.path.lexists(f"{directory.rstrip('/')}{PIN}")
    row["complete"] = False
    try:
        sizes, manifest, row["saved"] = _read_sizes(directory)
        row |= {key: manifest.get(key) for key in _FROM_MANIFEST}
        expected = {file: entry["size"] for file, entry in manifest["files"].items()}
        row["bytes"] = sum(expected.values())
        # Equal tables: no file is missing, and none is there in addition.
        if sizes == expected and manifest.get("version") in READABLE[FORMAT]:
            return row | {"complete": True, "problems": []}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass  # the slow path below finds out what is wrong
    problems, _ = inspect_files(directory)
    return row | {"complete": not problems, "problems": problems}


def _read_sizes(directory: str) -> tuple[dict[str, int], dict[str, Any], int]:
    """Return the sizes of the other files, the parsed manifest, and when that was written."""
    sizes: dict[str, int] = {}
    with os.scandir(directory) as entries:
        for entry in entries:
            info = entry.stat(follow_symlinks=False)
            if stat.S_ISREG(info.st_mode):
                sizes[entry.name] = info.st_size
    if sizes.pop(MANIFEST) > _MAX_MANIFEST:
        raise ValueError("the manifest is too large")
    handle = os.open(f"{directory}/{MANIFEST}", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        saved = int(os.fstat(handle).st_mtime)
        return sizes, orjson.loads(os.read(handle, _MAX_MANIFEST)), saved
    finally:
        os.close(handle)
