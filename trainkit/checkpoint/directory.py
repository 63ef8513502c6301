"""Which run a directory belongs to: 128 random bits, drawn at its first save and kept for good."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainkit.checkpoint.manifest import (
    dump_json,
    is_sealed,
    list_checkpoints,
    read_manifest,
    sealed,
    verify_checkpoint,
)
from trainkit.checkpoint.plain import read_json
from trainkit.files import replacing
from trainkit.types import CheckpointError

_RUN = re.compile(r"[0-9a-f]{32}")


def run_identity(run_dir: Path | str) -> dict[str, Any]:
    """Return which run a directory belongs to; a directory that does not say so yet is told.

    It stands in `run.json`, and in every checkpoint. When the file is lost or damaged, the newest
    checkpoint that verifies says it.

    Args:
        run_dir: The run directory, which exists.

    Returns:
        {"run": 32 hex digits, "parent": None or {"run", "step", "path"} of the checkpoint that the
        run was forked from}.

    Raises:
        DiskError: `run.json` is not there and cannot be written.

    Effects:
        Writes `run.json` where it was lost or never was. For one rank.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     run_identity(folder) == run_identity(folder)
        True
    """
    run_dir = Path(run_dir)
    known = _read_identity(run_dir / "run.json") or _adopted(run_dir / "checkpoints")
    if known is None:
        return fork_run(run_dir, None)
    if not (run_dir / "run.json").exists() or not _read_identity(run_dir / "run.json"):
        _write_identity(run_dir, known)
    return known


def fork_run(run_dir: Path | str, parent: Mapping[str, Any] | None) -> dict[str, Any]:
    """Give a directory the identity of a new run.

    Args:
        run_dir: The run directory, which exists.
        parent: What it goes on from: {"run", "step", "path"} of another run's checkpoint.

    Returns:
        As `run_identity`.

    Raises:
        DiskError: `run.json` cannot be written.

    Effects:
        Writes `run.json`, by a rename. For one rank.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     fork_run(folder, None) == fork_run(folder, None)
        False
    """
    identity = {
        "run": secrets.token_hex(16),
        "parent": None if parent is None else dict(parent),
    }
    _write_identity(Path(run_dir), identity)
    return identity


def _read_identity(path: Path) -> dict[str, Any] | None:
    try:
        record = read_json(path, most_bytes=65536)
    except CheckpointError:
        return None
    return _identity_in(record) if is_sealed(record) else None


def _identity_in(record: Mapping[str, Any]) -> dict[str, Any] | None:
    run = record.get("run")
    if not isinstance(run, str) or not _RUN.fullmatch(run):
        return None
    return {"run": run, "parent": record.get("parent")}


def _adopted(directory: Path) -> dict[str, Any] | None:
    for path in list_checkpoints(directory):
        if not verify_checkpoint(path):
            return _identity_in(read_manifest(path))
    return None


def _write_identity(run_dir: Path, identity: Mapping[str, Any]) -> None:
    with replacing(run_dir / "run.json", by="run_identity") as file:
        file.write(dump_json(sealed(identity)) + b"\n")
