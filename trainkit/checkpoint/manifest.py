"""What makes a directory a checkpoint: its name, its manifest, one rename. No torch here."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import orjson

from trainkit.types import CheckpointError, DiskError

FORMAT = "trainkit-checkpoint"
VERSION = 1
MANIFEST = "manifest.json"
_NAME = re.compile(r"step_(\d{8,})(?:-(\d+))?")
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
_MAX_JSON = 256 * 1024 * 1024


# ------------------------------------------------------------------------------------------- files


def hash_file(path: Path) -> dict[str, Any]:
    """Return {"size": bytes, "sha256": hex} of a file.

    Examples:
        >>> import tempfile
        >>> with tempfile.NamedTemporaryFile() as file:
        ...     hash_file(Path(file.name))["size"]
        0
    """
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"size": file.tell(), "sha256": digest}


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_durably(path: Path, data: bytes) -> None:
    """Write a new file and wait until it is on the disk."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def read_json(path: Path) -> Any:
    """Read a JSON file of a checkpoint: a regular file of a bounded size.

    Raises:
        CheckpointError: It is missing, no regular file, too large, or not JSON.
    """
    try:
        facts = path.lstat()
        if not stat.S_ISREG(facts.st_mode) or facts.st_size > _MAX_JSON:
            raise CheckpointError(
                f"checkpoint: {path} is no regular file of a sane size", where=path
            )
        return orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError) as error:
        raise CheckpointError(f"checkpoint: {path} cannot be read: {error}", where=path) from error


def disk_error(error: OSError, path: Path, needed: int) -> DiskError:
    """Say what a failed write needed, and what there is."""
    probe = next(parent for parent in (path, *path.parents) if parent.exists())
    free = shutil.disk_usage(probe).free
    name = errno.errorcode.get(error.errno or 0, "")
    return DiskError(
        f"save_checkpoint: {path} could not be written: {name} {error.strerror or error}; about "
        f"{needed} bytes are needed and {free} are free",
        where=path,
        got=free,
        want=needed,
        hint="free space or choose another --out; every earlier checkpoint is intact",
    )


# ---------------------------------------------------------------------------------------- manifest


def _seal(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(orjson.dumps(dict(body), option=orjson.OPT_SORT_KEYS)).hexdigest()


def make_manifest(step: int, files: Mapping[str, Mapping[str, Any]]) -> bytes:
    """Return the manifest of a checkpoint, which also holds its own hash.

    Args:
        step: The step the checkpoint was taken after.
        files: For each other file its name and {"size", "sha256"}.
    """
    body = {"format": FORMAT, "version": VERSION, "step": step, "files": dict(files)}
    sealed = body | {"sha256": _seal(body)}
    return orjson.dumps(sealed, option=orjson.OPT_SORT_KEYS | orjson.OPT_INDENT_2)


def _manifest_problems(manifest: Any) -> list[str]:
    if not isinstance(manifest, dict) or not isinstance(manifest.get("files"), dict):
        return [f"{MANIFEST} is not a manifest"]
    body = {key: value for key, value in manifest.items() if key != "sha256"}
    if manifest.get("sha256") != _seal(body):
        return [f"{MANIFEST} does not match its own sha256"]
    if manifest.get("format") != FORMAT:
        return [f"{MANIFEST} has the format {manifest.get('format')!r}, not {FORMAT!r}"]
    if manifest.get("version") != VERSION:
        return [f"{MANIFEST} has version {manifest.get('version')}; this trainkit reads {VERSION}"]
    return [
        f"{MANIFEST} names {name!r}, which is no plain file name"
        for name in manifest["files"]
        if not plain_file_name(name)
    ]


def plain_file_name(name: str) -> bool:
    """Say whether a name read from a file names one in the same directory, and nothing else.

    Examples:
        >>> plain_file_name("rank_00000.safetensors"), plain_file_name("../x")
        (True, False)
    """
    return _FILE_NAME.fullmatch(name) is not None


def _file_problems(path: Path, want: Mapping[str, Any]) -> list[str]:
    try:
        facts = path.lstat()
        if not stat.S_ISREG(facts.st_mode):
            return [f"{path.name} is no regular file"]
        if facts.st_size != want["size"]:
            return [f"{path.name} has {facts.st_size} bytes, the manifest says {want['size']}"]
        if hash_file(path)["sha256"] != want["sha256"]:
            return [f"{path.name} does not match its sha256"]
    except FileNotFoundError:
        return [f"{path.name} is missing"]
    except OSError as error:
        return [f"{path.name} cannot be read: {error.strerror}"]
    return []


def verify_checkpoint(path: Path | str) -> list[str]:
    """Return what is wrong with a checkpoint: an empty list when every byte is as it was written.

    Args:
        path: A checkpoint directory.

    Returns:
        One sentence per problem: a missing, added, cut or changed file, or a manifest that is not
            ours.

    Examples:
        >>> verify_checkpoint("/does/not/exist")
        ['/does/not/exist is not there']
    """
    path = Path(path)
    if not path.exists():
        return [f"{path} is not there"]
    if not path.is_dir() or path.is_symlink():
        return [f"{path} is not a directory"]
    if (path / "checkpoints").is_dir():
        return [f"{path} is a run directory; name one of its checkpoints/step_..."]
    try:
        manifest = read_json(path / MANIFEST)
    except CheckpointError as error:
        return [error.what]
    problems = _manifest_problems(manifest)
    if problems:
        return problems
    name = _NAME.fullmatch(path.name)
    if name and int(name[1]) != manifest["step"]:
        problems.append(f"{path.name} holds step {manifest['step']}")
    present = {entry.name for entry in path.iterdir()} - {MANIFEST}
    problems += [
        f"{name} is not in the manifest" for name in sorted(present - set(manifest["files"]))
    ]
    for file, want in manifest["files"].items():
        problems += _file_problems(path / file, want)
    return problems


# ------------------------------------------------------------------------------------- directories


def list_checkpoints(directory: Path | str) -> list[Path]:
    """Return the checkpoints in a directory by name, newest first; verified or not.

    Args:
        directory: A `checkpoints/` directory; one that is missing holds none.

    Examples:
        >>> list_checkpoints("/does/not/exist")
        []
    """
    directory = Path(directory)
    if not directory.is_dir():
        return []
    found = [(match, path) for path in directory.iterdir() if (match := _NAME.fullmatch(path.name))]
    found.sort(key=lambda pair: (int(pair[0][1]), int(pair[0][2] or 0)), reverse=True)
    return [path for _, path in found]


def choose_checkpoint(
    directory: Path | str, request: str | Path = "auto", *, tell: Callable[[str], None] = print
) -> Path | None:
    """Return the checkpoint to go on from, or None for a fresh start.

    Args:
        directory: The `checkpoints/` directory of a run.
        request: "auto" takes the newest checkpoint that verifies; "never" takes none; a path takes
            that one.
        tell: Called with one sentence about each checkpoint passed over.

    Raises:
        CheckpointError: A path does not verify, or there are checkpoints and none verifies. A fresh
            start would throw away a run that somebody wants to continue.

    Examples:
        >>> choose_checkpoint("/does/not/exist") is None
        True
    """
    if request == "never":
        return None
    if request != "auto":
        problems = verify_checkpoint(request)
        if problems:
            raise CheckpointError(
                f"resume: {request} was asked for, but {problems[0]}",
                where=request,
                got=problems,
                want="a checkpoint directory that verifies",
            )
        return Path(request)
    passed_over = []
    for path in list_checkpoints(directory):
        problems = verify_checkpoint(path)
        if not problems:
            return path
        passed_over.append(f"{path.name}: {problems[0]}")
        tell(f"passed over {path}: {problems[0]}")
    if passed_over:
        raise CheckpointError(
            f"resume: none of the {len(passed_over)} checkpoints in {directory} verifies "
            f"({'; '.join(passed_over)})",
            where=directory,
            got=passed_over,
            hint="--resume never starts afresh; choose another --out to keep what is there",
        )
    return None


def find_checkpoint(path: Path | str, *, tell: Callable[[str], None] = print) -> Path:
    """Return the checkpoint to read weights from: `path` itself, or the newest of a run directory.

    Args:
        path: A checkpoint, or a run directory with `checkpoints/`.
        tell: Called with one sentence about each checkpoint passed over.

    Raises:
        CheckpointError: There is none, or none that verifies.

    Examples:
        >>> find_checkpoint("/does/not/exist")
        Traceback (most recent call last):
        ...
        trainkit.types.CheckpointError: find_checkpoint: there is no checkpoint in /does/not/exist
    """
    path = Path(path)
    if (path / "manifest.json").exists():
        found = choose_checkpoint(path.parent, path, tell=tell)
    else:
        found = choose_checkpoint(path / "checkpoints", tell=tell)
    if found is None:
        raise CheckpointError(f"find_checkpoint: there is no checkpoint in {path}", where=path)
    return found


def clear_directory(
    directory: Path, chosen: Path | None, request: str | Path, *, tell: Callable[[str], None]
) -> None:
    """Make a `checkpoints/` directory ready for a run that goes on from `chosen`.

    Args:
        directory: The directory; it is made if need be.
        chosen: The checkpoint that the run goes on from, or None.
        request: What was asked for; after "auto" nothing is set aside.
        tell: Called with what is set aside.

    Effects:
        Removes what a killed save left half done; moves the checkpoints that are not on the run's
        branch into `abandoned-1`, `abandoned-2`, and so on.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for half in (*directory.glob(".staging-*"), *directory.glob(".deleting-*")):
        shutil.rmtree(half, ignore_errors=True)
    last = -1
    if chosen is not None and chosen.resolve().parent == directory.resolve():
        last = step_of(chosen)
    off_branch = [path for path in list_checkpoints(directory) if step_of(path) > last]
    if request == "auto" or not off_branch:
        return
    number = 1
    while (directory / f"abandoned-{number}").exists():
        number += 1
    aside = directory / f"abandoned-{number}"
    aside.mkdir()
    for path in off_branch:
        path.rename(aside / path.name)
    tell(f"set {len(off_branch)} checkpoints of another branch aside in {aside}")


def step_of(path: Path) -> int:
    """Return the step in a checkpoint's name.

    Examples:
        >>> step_of(Path("step_00000012-1"))
        12
    """
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1])


def next_name(directory: Path, step: int) -> str:
    """Return a free directory name for a step: a second save appends -1, a third -2."""
    name, attempt = f"step_{step:08d}", 0
    while (directory / name).exists():
        attempt += 1
        name = f"step_{step:08d}-{attempt}"
    return name


def prune_checkpoints(
    directory: Path | str, *, keep: int, dry_run: bool = False
) -> dict[str, list[str]]:
    """Delete all but the newest checkpoints that verify.

    Those that do not verify do not count as kept, and are deleted only when something verified is
    newer or kept.

    Args:
        directory: A `checkpoints/` directory.
        keep: How many verified checkpoints stay, at least 1.
        dry_run: Only say what would go.

    Returns:
        {"kept": names, "deleted": names}.

    Raises:
        ValueError: `keep` is below 1.

    Effects:
        Deletes directories: renamed first, so that a deletion cut short leaves no half a checkpoint
            by that name.
    """
    if keep < 1:
        raise ValueError(f"prune_checkpoints: keep must be at least 1, got {keep}")
    kept: list[Path] = []
    deleted: list[Path] = []
    for path in list_checkpoints(directory):
        full = len(kept) == keep
        good = not full and not verify_checkpoint(path)
        (kept if good else deleted).append(path)
    if not kept:
        return {"kept": [path.name for path in deleted], "deleted": []}
    for path in deleted if not dry_run else []:
        doomed = path.with_name(f".deleting-{path.name}")
        path.rename(doomed)
        shutil.rmtree(doomed)
    return {"kept": [path.name for path in kept], "deleted": [path.name for path in deleted]}
