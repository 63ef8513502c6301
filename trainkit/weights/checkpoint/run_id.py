"""The id of the run in a directory, 128 random bits, and whether that run has saved."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from trainkit.files import atomic_write
from trainkit.types import CheckpointError
from trainkit.weights.checkpoint.manifest import (
    dump_json,
    find_first_verified,
    is_sealed,
    list_checkpoints,
    read_manifest,
    seal,
)
from trainkit.weights.checkpoint.safe_files import read_json

_RUN_ID = re.compile(r"[0-9a-f]{32}")
_MAX_RECORD_BYTES = 1 << 20  # of events.jsonl; what follows in a longer record is not read


def get_run_id(run_dir: Path | str) -> dict[str, Any]:
    """Return the id of the run in a directory, and write one where there is none.

    It is stored in `run.json` and in every checkpoint. If the file is lost or damaged, the newest
    checkpoint that verifies restores it.

    Args:
        run_dir: The run directory, which exists.

    Returns:
        {"run": 32 hex digits, "parent": None or {"run", "step", "path"} of the checkpoint that the
        run was forked from}.

    Raises:
        DiskError: `run.json` is missing and cannot be written.

    Effects:
        Writes `run.json` if it is missing or damaged. For one rank.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     get_run_id(folder) == get_run_id(folder)
        True
    """
    run_dir = Path(run_dir)
    identity = _read_identity(run_dir / "run.json")
    if identity is not None:
        return {name: identity[name] for name in ("run", "parent")}
    newest, _ = find_first_verified(list_checkpoints(run_dir / "checkpoints"), lambda _: None)
    identity = None if newest is None else _parse_identity(read_manifest(newest))
    if identity is None:
        return fork_run(run_dir, None)
    _write_identity(run_dir, identity | {"saved": True})  # as that checkpoint shows
    return identity


def fork_run(run_dir: Path | str, parent: Mapping[str, Any] | None) -> dict[str, Any]:
    """Give a directory the id of a new run.

    Args:
        run_dir: The run directory, which exists.
        parent: The checkpoint of another run that it resumes from: {"run", "step", "path"}.

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
    """Record in `run.json` that the run has saved; see `find_saved_mark`.

    Raises:
        DiskError: `run.json` cannot be written.

    Effects:
        Writes `run.json` after the first save. For one rank.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     mark_saved(folder)
        ...     find_saved_mark(folder)
        'run.json'
    """
    run_dir = Path(run_dir)
    # Only the first save of a run writes: later ones find the mark.
    if find_saved_mark(run_dir) != "run.json":
        _write_identity(run_dir, get_run_id(run_dir) | {"saved": True})


def find_saved_mark(run_dir: Path | str) -> str | None:
    """Return the file of a run directory which shows that its run has saved, or None.

    Args:
        run_dir: The run directory. In `events.jsonl` only records of the same run count.

    Examples:
        >>> find_saved_mark("/does/not/exist")
    """
    run_dir = Path(run_dir)
    identity = _read_identity(run_dir / "run.json") or {}
    if identity.get("saved") is True:
        return "run.json"
    events = run_dir / "events.jsonl"
    if not events.is_file():
        return None
    run = identity.get("run")
    with events.open("rb") as file:
        while line := file.readline(_MAX_RECORD_BYTES):
            # Parsing only starts and saves keeps a file of gigabytes fast.
            if b'"event":"start"' not in line and b'"event":"save"' not in line:
                continue
            try:
                event = orjson.loads(line)
            except orjson.JSONDecodeError:  # a crash has cut it, or it is longer than is read
                continue
            if not isinstance(event, dict):
                continue
            # A directory may have been copied from another run, together with its events.
            if event.get("event") == "start":
                run = event.get("run")
            elif event.get("path") and (run == identity.get("run") or not identity):
                return "events.jsonl"
    return None


def _read_identity(path: Path) -> dict[str, Any] | None:
    try:
        record = read_json(path, max_bytes=65536)
    except CheckpointError:
        return None
    # A damaged file counts as a missing one: a wrong id would make this another run.
    identity = _parse_identity(record) if is_sealed(record) else None
    return None if identity is None else {**identity, "saved": record.get("saved")}


def _parse_identity(record: Mapping[str, Any]) -> dict[str, Any] | None:
    run = record.get("run")
    if not isinstance(run, str) or not _RUN_ID.fullmatch(run):
        return None
    return {"run": run, "parent": record.get("parent")}


def _write_identity(run_dir: Path, identity: Mapping[str, Any]) -> None:
    with atomic_write(run_dir / "run.json", by="get_run_id") as file:
        file.write(dump_json(seal(identity)) + b"\n")
