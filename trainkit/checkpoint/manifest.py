"""What makes a directory a checkpoint: its name, its manifest, one rename. No torch here."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any

import orjson

from trainkit.types import CheckpointError, DiskError

FORMAT = "trainkit-checkpoint"
VERSION = 2
READABLE = (1, 2)
"""The versions that this trainkit reads."""
MANIFEST = "manifest.json"
_NAME = re.compile(r"step_(\d{8,18})(?:-(\d{1,9}))?")
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
_MANIFEST_BYTES = 8 * 1024 * 1024
_MANIFEST_VALUES = 500_000
_JSON_BYTES = 256 * 1024 * 1024
# An index has about 13 values for a tensor: these are 400,000 of them. As one table of as many keys
# they take 0.8 GB, the most; `save_checkpoint` writes no more than can be read.
_JSON_VALUES = 5_000_000
_CHUNK = 1 << 20  # bytes read at once
_READERS = 8  # files hashed at once, at most; one SHA-256 is bound by its core


# ------------------------------------------------------------------------------------------- files


@contextmanager
def open_plain(path: Path) -> Iterator[FileIO]:
    """Open a file of a checkpoint to read: a regular one, which has no other name anywhere.

    A link, a device or a pipe is never followed, opened for its contents, or waited for.

    Raises:
        CheckpointError: It is none.
        OSError: The system would not open it.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        handle = os.open(path, flags)
    except OSError as error:
        if error.errno in {errno.ELOOP, errno.ENXIO}:
            raise CheckpointError(f"checkpoint: {path} is no regular file", where=path) from error
        raise
    facts = os.fstat(handle)
    what = None if stat.S_ISREG(facts.st_mode) else "is no regular file"
    if what is None and facts.st_nlink != 1:
        what = f"has {facts.st_nlink} names (hard links) and may change from elsewhere; copy it"
    if what is not None:
        os.close(handle)
        raise CheckpointError(f"checkpoint: {path} {what}", where=path)
    with FileIO(handle) as file:
        yield file


def hash_file(path: Path) -> dict[str, Any]:
    """Return {"size": bytes, "sha256": hex} of a regular file.

    Raises:
        CheckpointError: It is no regular file.
        OSError: It cannot be read.

    Examples:
        >>> import tempfile
        >>> with tempfile.NamedTemporaryFile() as file:
        ...     hash_file(Path(file.name))["size"]
        0
    """
    with open_plain(path) as file:
        digest, size, chunk = hashlib.sha256(), 0, bytearray(_CHUNK)
        while read := file.readinto(chunk):
            digest.update(memoryview(chunk)[:read])
            size += read
        return {"size": size, "sha256": digest.hexdigest()}


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_durably(path: Path, data: bytes) -> None:
    """Write a new file and wait until it is on the disk."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        write_all(handle, memoryview(data))
        os.fsync(handle)
    finally:
        os.close(handle)


def write_all(handle: int, data: memoryview) -> None:
    """Write all of some bytes, in as many calls as the system takes."""
    while data:
        data = data[os.write(handle, data) :]


def read_json(path: Path, *, most_bytes: int = _JSON_BYTES, most_values: int = _JSON_VALUES) -> Any:
    """Read a JSON file of a checkpoint: a regular file of a bounded size.

    Args:
        path: The file.
        most_bytes: Refuse a larger file before it is read.
        most_values: Refuse one with more commas and brackets before it is parsed: a value of a few
            bytes takes a hundred in memory.

    Raises:
        CheckpointError: It is missing, no regular file, too large, or not JSON.
    """
    return _parse(path, _read_bounded(path, most_bytes), most_values)


def _read_bounded(path: Path, most_bytes: int) -> bytes:
    try:
        with open_plain(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size > most_bytes:
                raise CheckpointError(
                    f"checkpoint: {path} has {size} bytes; no such file has more than {most_bytes}",
                    where=path,
                    got=size,
                    want=most_bytes,
                )
            return file.read(most_bytes)
    except OSError as error:
        raise CheckpointError(
            f"checkpoint: {path} cannot be read: {error.strerror}", where=path
        ) from error


def check_values(path: Path, data: bytes, most_values: int = _JSON_VALUES) -> None:
    """Refuse JSON with more commas and brackets than a file of a checkpoint may have.

    Raises:
        CheckpointError: It has.
    """
    values = sum(map(data.count, (b",", b"[", b"{")))
    if values > most_values:
        raise CheckpointError(
            f"checkpoint: {path} holds {values} values; no such file has more than {most_values}",
            where=path,
            got=values,
            want=most_values,
        )


def _parse(path: Path, data: bytes, most_values: int) -> Any:
    check_values(path, data, most_values)
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise CheckpointError(f"checkpoint: {path} is not JSON: {error}", where=path) from error


def disk_error(error: OSError, path: Path, needed: int) -> DiskError:
    """Say what a failed write needed, and what there is."""
    try:
        probe = next(parent for parent in (path, *path.parents) if parent.exists())
        free: int | str = shutil.disk_usage(probe).free
    except OSError:
        free = "an unknown number"
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


def sealed(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record of plain values with its own hash as "sha256".

    Examples:
        >>> is_sealed(sealed({"step": 3})), is_sealed({"step": 3, "sha256": "0"})
        (True, False)
    """
    data = orjson.dumps(dict(body), option=orjson.OPT_SORT_KEYS)
    return {**body, "sha256": hashlib.sha256(data).hexdigest()}


def is_sealed(record: Any) -> bool:
    """Say whether a record that was read is as `sealed` made it."""
    if not isinstance(record, dict):
        return False
    return record == sealed({key: value for key, value in record.items() if key != "sha256"})


def dump_json(value: Any) -> bytes:
    """Return JSON for people and for comparing: indented, keys sorted."""
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS | orjson.OPT_INDENT_2)


def make_manifest(step: int, files: Mapping[str, Mapping[str, Any]], **facts: Any) -> bytes:
    """Return the manifest of a checkpoint, which also holds its own hash.

    Args:
        step: The step the checkpoint was taken after.
        files: For each other file its name and {"size", "sha256"}.
        facts: What else it says, plain values: run, parent, state_hash, score, config, and the
            versions of trainkit and torch.

    Examples:
        >>> orjson.loads(make_manifest(3, {}, run="0" * 32))["run"][:4]
        '0000'
    """
    names = ("run", "parent", "state_hash", "score", "config", "trainkit", "torch")
    body = {"format": FORMAT, "version": VERSION, "step": step, "files": dict(files)}
    return dump_json(sealed(dict.fromkeys(names) | facts | body))


def read_manifest(path: Path | str) -> dict[str, Any]:
    """Return the manifest of a checkpoint, whose own hash is right and whose version can be read.

    The other files are not looked at; see `verify_checkpoint`.

    Args:
        path: A checkpoint directory.

    Raises:
        CheckpointError: It is missing, damaged, no manifest, or of a later format.
    """
    file = Path(path) / MANIFEST
    data = _read_bounded(file, _MANIFEST_BYTES)
    manifest = _parse(file, data, _MANIFEST_VALUES)
    problems = _manifest_problems(manifest, data)
    if problems:
        raise CheckpointError(f"checkpoint: {path}: {problems[0]}", where=file, got=problems)
    return manifest


def _manifest_problems(manifest: Any, data: bytes) -> list[str]:
    if not isinstance(manifest, dict) or not isinstance(manifest.get("files"), dict):
        return [f"{MANIFEST} is not a manifest"]
    if not is_sealed(manifest):
        return [f"{MANIFEST} does not match its own sha256"]
    if manifest.get("format") != FORMAT:
        return [f"{MANIFEST} has the format {manifest.get('format')!r}, not {FORMAT!r}"]
    if manifest.get("version") not in READABLE:
        found, by = manifest.get("version"), manifest.get("trainkit")
        reads = " and ".join(map(str, READABLE))
        told = f"has version {found}, written by trainkit {by}; this trainkit reads {reads}"
        return [f"{MANIFEST} {told}: upgrade trainkit"]
    if data != dump_json(manifest):  # the same values in other bytes
        return [f"{MANIFEST} is not written as trainkit writes it"]
    return _listing_problems(manifest)


def _listing_problems(manifest: Mapping[str, Any]) -> list[str]:
    files = manifest["files"]
    problems = [
        f"{MANIFEST} names {name!r}, which is no plain file name"
        for name in files
        if not plain_file_name(name)
    ]
    if len({name.casefold() for name in files}) < len(files):
        problems.append(f"{MANIFEST} names two files that differ by upper and lower case alone")
    if not _is_count(manifest.get("step")):
        problems.append(f"{MANIFEST} names no step")
    problems += [
        f"{MANIFEST} does not say the size and sha256 of {name}"
        for name, want in files.items()
        if not (
            isinstance(want, dict)
            and _is_count(want.get("size"))
            and isinstance(want.get("sha256"), str)
        )
    ]
    return problems


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def plain_file_name(name: str) -> bool:
    """Say whether a name read from a file names one in the same directory, and nothing else.

    Examples:
        >>> plain_file_name("rank_00000.safetensors"), plain_file_name("../x")
        (True, False)
    """
    return isinstance(name, str) and _FILE_NAME.fullmatch(name) is not None


def _size_problems(path: Path, want: Mapping[str, Any]) -> list[str]:
    try:
        facts = path.lstat()
    except FileNotFoundError:
        return [f"{path.name} is missing"]
    except OSError as error:
        return [f"{path.name} cannot be read: {error.strerror}"]
    if not stat.S_ISREG(facts.st_mode):
        return [f"{path.name} is no regular file"]
    if facts.st_size != want["size"]:
        return [f"{path.name} has {facts.st_size} bytes, the manifest says {want['size']}"]
    return []


def _hash_problems(path: Path, want: Mapping[str, Any]) -> list[str]:
    try:
        found = hash_file(path)
    except CheckpointError as error:
        return [f"{path.name} cannot be trusted: {error.what}"]
    except OSError as error:
        return [f"{path.name} cannot be read: {error.strerror}"]
    same = (want["size"], want["sha256"]) == (found["size"], found["sha256"])
    return [] if same else [f"{path.name} does not match its sha256"]


def verify_checkpoint(path: Path | str) -> list[str]:
    """Return what is wrong with a checkpoint: an empty list when every byte is as it was written.

    Args:
        path: A checkpoint directory.

    Returns:
        One sentence per problem: a missing, added, cut or changed file, or a manifest that is not
            ours.

    Effects:
        Reads every file; hashes up to eight at once, in threads.

    Examples:
        >>> verify_checkpoint("/does/not/exist")
        ['/does/not/exist is not there']
    """
    path = Path(path)
    problems, manifest = _outline(path)
    if problems:
        return problems
    files = sorted(manifest["files"].items(), key=lambda item: -item[1]["size"])
    with ThreadPoolExecutor(min(_READERS, os.cpu_count() or 1)) as pool:
        found = pool.map(_hash_problems, (path / name for name, _ in files), (w for _, w in files))
        return [problem for problems in found for problem in problems]


def outline_problems(path: Path | str) -> list[str]:
    """Return what can be seen to be wrong with a checkpoint without reading its tensors.

    Args:
        path: A checkpoint directory.

    Returns:
        What `verify_checkpoint` would say of its manifest and of the names and sizes of its files.

    Examples:
        >>> outline_problems("/does/not/exist")
        ['/does/not/exist is not there']
    """
    return _outline(Path(path))[0]


def _outline(path: Path) -> tuple[list[str], dict[str, Any]]:
    if not path.exists():
        return [f"{path} is not there"], {}
    if not path.is_dir() or path.is_symlink():
        return [f"{path} is not a directory"], {}
    if (path / "checkpoints").is_dir():
        return [f"{path} is a run directory; name one of its checkpoints/step_..."], {}
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        return error.got if isinstance(error.got, list) else [error.what], {}
    problems = []
    name = _NAME.fullmatch(path.name)
    if name and int(name[1]) != manifest["step"]:
        problems.append(f"{path.name} holds step {manifest['step']}")
    present = {entry.name for entry in os.scandir(path)} - {MANIFEST}
    problems += [
        f"{name} is not in the manifest" for name in sorted(present - set(manifest["files"]))
    ]
    for file, want in manifest["files"].items():
        problems += _size_problems(path / file, want)
    return problems, manifest


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
    """Return a free directory name for a step: a second save appends -1, a third -2.

    It is above all that are there, so that the newest of a step is the one saved last.

    Examples:
        >>> next_name(Path("/does/not/exist"), 12)
        'step_00000012'
    """
    found = [_NAME.fullmatch(path.name) for path in list_checkpoints(directory)]
    taken = [int(match[2] or 0) for match in found if match and int(match[1]) == step]
    name = f"step_{step:08d}"
    return f"{name}-{max(taken) + 1}" if taken else name


def remove_checkpoint(path: Path) -> None:
    """Delete a checkpoint: its name goes first, at once, then its manifest, then its data.

    Raises:
        OSError: It could not be deleted; by its name it is gone all the same, or untouched.

    Effects:
        Deletes a directory.
    """
    doomed = path.with_name(f".deleting-{path.name}")
    shutil.rmtree(doomed, ignore_errors=True)  # of a deletion that was cut short
    path.rename(doomed)
    sync_directory(path.parent)
    (doomed / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(doomed)


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
        remove_checkpoint(path)
    return {"kept": [path.name for path in kept], "deleted": [path.name for path in deleted]}
