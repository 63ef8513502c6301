"""Which run a directory belongs to, 128 random bits kept for good, and whether it has saved."""

from __future__ import annotations

import contextlib
import re
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson

from trainkit.files import atomic_write
from trainkit.types import CheckpointError
from trainkit.weights.checkpoint.manifest import (
    dump_json,
    first_verified,
    is_sealed,
    list_checkpoints,
    read_manifest,
    sealed,
)
from trainkit.weights.checkpoint.safe_files import read_json

_RUN = re.compile(r"[0-9a-f]{32}")


def get_run_id(run_dir: Path | str) -> dict[str, Any]:
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
        ...     get_run_id(folder) == get_run_id(folder)
        True
    """
    run_dir = Path(run_dir)
    told = _read_identity(run_dir / "run.json")
    if told is not None:
        return {name: told[name] for name in ("run", "parent")}
    known = _adopted(run_dir / "checkpoints")
    if known is None:
        return fork_run(run_dir, None)
    _write_identity(run_dir, known | {"saved": True})
    return known


def fork_run(run_dir: Path | str, parent: Mapping[str, Any] | None) -> dict[str, Any]:
    """Give a directory the identity of a new run.

    Args:
        run_dir: The run directory, which exists.
        parent: What it goes on from: {"run", "step", "path"} of another run's checkpoint.

    Returns:
        As `get_run_id`.

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


def mark_saved(run_dir: Path | str) -> None:
    """Let `run.json` say that the run has saved; see `saved_before`.

    Raises:
        DiskError: `run.json` cannot be written.

    Effects:
        Writes `run.json` after the first save. For one rank.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     mark_saved(folder)
        ...     saved_before(folder)
        'run.json'
    """
    run_dir = Path(run_dir)
    if saved_before(run_dir) != "run.json":
        _write_identity(run_dir, get_run_id(run_dir) | {"saved": True})


def saved_before(run_dir: Path | str) -> str | None:
    """Return which file of a run directory tells that its run has saved, or None.

    Args:
        run_dir: The run directory; in `events.jsonl` only what the same run has written counts.

    Examples:
        >>> saved_before("/does/not/exist")
    """
    run_dir = Path(run_dir)
    own = _read_identity(run_dir / "run.json") or {}
    if own.get("saved") is True:
        return "run.json"
    run = own.get("run")
    for event in _events_of(run_dir / "events.jsonl"):
        if event.get("event") == "start":
            run = event.get("run")
        elif event.get("path") and (run == own.get("run") or not own):
            return "events.jsonl"
    return None


_LINE = 1 << 20  # bytes of a line that is looked at


def _events_of(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of starts and saves."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        while line := file.readline(_LINE):
            if b'"event":"start"' in line or b'"event":"save"' in line:
                with contextlib.suppress(orjson.JSONDecodeError):
                    event = orjson.loads(line)
                    if isinstance(event, dict):
                        yield event


def _read_identity(path: Path) -> dict[str, Any] | None:
    try:
        record = read_json(path, most_bytes=65536)
    except CheckpointError:
        return None
    known = _identity_in(record) if is_sealed(record) else None
    return None if known is None else {**known, "saved": record.get("saved")}


def _identity_in(record: Mapping[str, Any]) -> dict[str, Any] | None:
    run = record.get("run")
    if not isinstance(run, str) or not _RUN.fullmatch(run):
        return None
    return {"run": run, "parent": record.get("parent")}


def _adopted(directory: Path) -> dict[str, Any] | None:
    path = first_verified(list_checkpoints(directory), [], lambda _: None)
    return None if path is None else _identity_in(read_manifest(path))


def _write_identity(run_dir: Path, identity: Mapping[str, Any]) -> None:
    with atomic_write(run_dir / "run.json", by="get_run_id") as file:
        file.write(dump_json(sealed(identity)) + b"\n")
