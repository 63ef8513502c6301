"""What makes a directory a checkpoint: its name, its manifest, one rename. No torch here."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import orjson

from trainkit.types import CheckpointError, Log, log_warning
from trainkit.weights.checkpoint.boxes import shortened
from trainkit.weights.checkpoint.safe_files import file_problem, parse_json, read_bounded, read_json

FORMAT = "trainkit-checkpoint"
VERSION = 2
WEIGHTS = "trainkit-weights"
READABLE = {FORMAT: (1, 2), WEIGHTS: (1,)}
"""The versions that this trainkit reads, of checkpoints and of exported folders."""
MANIFEST = "manifest.json"
_NAME = re.compile(r"step_([0-9]{8,18})(?:-([0-9]{1,9}))?")
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
_MANIFEST_BYTES = 8 * 1024 * 1024
_MANIFEST_VALUES = 500_000
_READERS = 8  # files hashed at once, at most; one SHA-256 is bound by its core


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
    try:
        return record == sealed({key: value for key, value in record.items() if key != "sha256"})
    except orjson.JSONEncodeError:  # it is nested more deeply than anything that was written
        return False


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


def read_manifest(path: Path | str, *, form: str = FORMAT) -> dict[str, Any]:
    """Return the manifest of a checkpoint, whose own hash is right and whose version can be read.

    The other files are not looked at; see `verify_checkpoint`.

    Args:
        path: A checkpoint directory.
        form: What it must be: `FORMAT`, or `WEIGHTS` for an exported folder.

    Raises:
        CheckpointError: It is missing, damaged, no manifest, or of a later format.
    """
    file = Path(path) / MANIFEST
    data = read_bounded(file, _MANIFEST_BYTES)
    manifest = parse_json(file, data, _MANIFEST_VALUES)
    problems = _manifest_problems(manifest, data, form)
    if problems:
        raise CheckpointError(f"checkpoint: {path}: {problems[0]}", where=file, got=problems)
    return manifest


def format_of(path: Path | str) -> str | None:
    """Return which format the manifest of a directory claims, be it damaged; None without one.

    Examples:
        >>> format_of("/does/not/exist")
    """
    file = Path(path) / MANIFEST
    try:
        manifest = read_json(file, most_bytes=_MANIFEST_BYTES, most_values=_MANIFEST_VALUES)
    except CheckpointError:
        return None
    return manifest.get("format") if isinstance(manifest, dict) else None


def _manifest_problems(manifest: Any, data: bytes | bytearray, form: str) -> list[str]:
    if not isinstance(manifest, dict) or not isinstance(manifest.get("files"), dict):
        return [f"{MANIFEST} is not a manifest"]
    if not is_sealed(manifest):
        return [f"{MANIFEST} does not match its own sha256"]
    if manifest.get("format") != form:
        return [f"{MANIFEST} has the format {manifest.get('format')!r}, not {form!r}"]
    if manifest.get("version") not in READABLE[form]:
        found, by = manifest.get("version"), manifest.get("trainkit")
        reads = " and ".join(map(str, READABLE[form]))
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
    if manifest["format"] == FORMAT and not _is_count(manifest.get("step")):
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
    problems, manifest = outline(path)
    if problems:
        return problems
    return file_problems(path, manifest["files"])


def file_problems(path: Path, files: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return which files of a folder are not as its manifest says, by every byte.

    Effects:
        Reads them; hashes up to eight at once, in threads.
    """
    largest = sorted(files.items(), key=lambda item: -item[1]["size"])
    with ThreadPoolExecutor(min(_READERS, os.cpu_count() or 1)) as pool:
        found = pool.map(
            file_problem, (path / name for name, _ in largest), (w for _, w in largest)
        )
        return [problem for problem in found if problem is not None]


def outline(path: Path | str, *, form: str = FORMAT) -> tuple[list[str], dict[str, Any]]:
    """Return what can be seen to be wrong with a checkpoint without its tensors; and its manifest.

    Args:
        path: A checkpoint directory.
        form: See `read_manifest`. Beside the files of an exported folder others may put some, a
            `config.json` say, but no other weights.

    Returns:
        What `verify_checkpoint` would say of its manifest and of the names and sizes of its files;
            the manifest, empty where it cannot be believed.

    Examples:
        >>> outline("/does/not/exist")
        (['/does/not/exist is not there'], {})
    """
    path = Path(path)
    if not path.exists():
        return [f"{path} is not there"], {}
    if not path.is_dir() or path.is_symlink():
        return [f"{path} is not a directory"], {}
    if (path / "checkpoints").is_dir():
        return [f"{path} is a run directory; name one of its checkpoints/step_..."], {}
    try:
        manifest = read_manifest(path, form=form)
        present = {entry.name for entry in os.scandir(path)} - {MANIFEST}
    except CheckpointError as error:
        return error.got if isinstance(error.got, list) else [error.what], {}
    except OSError as error:  # deleted between two looks, for instance
        return [f"{path} cannot be read: {error.strerror}"], {}
    problems = []
    named = form == FORMAT and _NAME.fullmatch(path.name)
    if named and step_of(path) != manifest["step"]:
        problems.append(f"{path.name} holds step {manifest['step']}")
    problems += [
        f"{name} is not in the manifest"
        for name in sorted(present - set(manifest["files"]))
        if form == FORMAT or name.endswith(".safetensors")
    ]
    sizes = (file_problem(path / f, w, whole=False) for f, w in manifest["files"].items())
    return [*problems, *filter(None, sizes)], manifest


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
    found = [path for path in directory.iterdir() if _NAME.fullmatch(path.name)]
    return sorted(found, key=_place_of, reverse=True)


def _place_of(path: Path) -> tuple[int, int]:
    """Return the step in a checkpoint's name, and which save of that step it is."""
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1]), int(match[2] or 0)


def first_verified(paths: Iterable[Path], passed_over: list[str], log: Log) -> Path | None:
    """Return the first of some checkpoints that verifies; tell of the others, and list them."""
    for path in paths:
        problems = verify_checkpoint(path)
        if not problems:
            return path
        passed_over.append(f"{path.name}: {problems[0]}")
        log(f"passed over {path}: {problems[0]}")
    return None


def none_verifies(directory: Path, passed_over: Sequence[str]) -> CheckpointError:
    """Return the error for a run whose every checkpoint is damaged.

    A fresh start would throw away a run that somebody wants to continue.
    """
    return CheckpointError(
        f"resume: none of the {len(passed_over)} checkpoints in {directory} verifies "
        f"({shortened(passed_over)})",
        where=directory,
        got=list(passed_over),
        hint="to begin afresh say --resume never, or choose another --out",
    )


def damaged(path: Path, problems: Sequence[str]) -> CheckpointError:
    """Return the error for a checkpoint that was named, and does not verify."""
    return CheckpointError(
        f"resume: {path} was asked for, but {shortened(problems, most=3)}",
        where=path,
        got=list(problems),
        want="a checkpoint directory that verifies",
    )


def find_checkpoint(path: Path | str, *, best: bool = False, log: Log = log_warning) -> Path:
    """Return the checkpoint to read weights from: `path` itself, or one of a run directory.

    Args:
        path: A checkpoint, or a run directory with `checkpoints/`.
        best: Of a run, the one of the lowest score that verifies (of equal ones the newest), not
            the newest.
        log: Called with one sentence about each checkpoint passed over.

    Raises:
        CheckpointError: There is none, or none that verifies; with `best`, none has a score; or
            `path` is a folder of weights alone, and what such weights are for is said.

    Examples:
        >>> find_checkpoint("/does/not/exist")
        Traceback (most recent call last):
        ...
        trainkit.types.CheckpointError: find_checkpoint: there is no checkpoint in /does/not/exist
    """
    path = Path(path)
    _refuse_weights(path)
    refuse_deleted(path)
    if (path / MANIFEST).exists():
        problems = verify_checkpoint(path)
        if problems:
            raise damaged(path, problems)
        return path
    directory, passed_over = path / "checkpoints", list[str]()
    paths = list_checkpoints(directory)
    if not paths:
        what = f"find_checkpoint: there is no checkpoint in {path}"
        hint = "name a run that has saved, or one of its checkpoints"
        raise CheckpointError(what, where=path, hint=hint)
    found = first_verified(_by_score(paths) if best else paths, passed_over, log)
    if found is not None:
        return found
    if not best:
        raise none_verifies(directory, passed_over)
    raise CheckpointError(
        f"find_checkpoint: of the {len(paths)} checkpoints in {directory} none has a score and "
        "verifies",
        where=directory,
        hint="save with score=, the lower the better; without best=True the newest is taken",
    )


def refuse_deleted(path: Path) -> None:
    """Refuse the path of a checkpoint that is not there, beside others of its run.

    Raises:
        CheckpointError: It is not; names those that are, and how to keep one.

    Examples:
        >>> refuse_deleted(Path("/does/not/exist"))
    """
    others = [other.name for other in list_checkpoints(path.parent)]
    if others and not path.exists():
        raise CheckpointError(
            f"checkpoint: there is no {path.name} in {path.parent} (any more); there are "
            f"{shortened(others)}",
            where=path,
            got=others,
            hint="a run keeps its newest (--keep), every so many steps (--keep-every) and those "
            f"with a file beside them: {path.name}.pin",
        )


def _by_score(paths: Sequence[Path]) -> list[Path]:
    """Return the checkpoints that have a score, the lowest first, and of equal ones the newest."""
    scores = {path: score_of(outline(path)[1]) for path in paths}
    return sorted((p for p in paths if scores[p] is not None), key=lambda p: scores[p] or 0.0)


def _refuse_weights(path: Path) -> None:
    """Refuse a Hugging Face folder, or one that `export` or `convert` wrote, in words."""
    kinds = ("*.safetensors", "pytorch_model*.bin", ".metadata")
    if (
        not path.is_dir()
        or format_of(path) == FORMAT
        or not any(any(path.glob(kind)) for kind in kinds)
    ):
        return
    raise CheckpointError(
        f"find_checkpoint: {path} holds weights alone, and no checkpoint of a run: it does not say "
        "of which model",
        where=path,
        want="a run directory, or one of its checkpoints",
        hint="build the model that they fit and fill it by build_stages(..., weights=open_weights("
        "folder)); others' files first become such a folder by python -m trainkit checkpoint "
        "convert SOURCE FOLDER",
    )


def score_of(manifest: Mapping[str, Any]) -> float | None:
    """Return the score that a checkpoint was saved with, the lower the better, if it has one.

    Examples:
        >>> score_of({"score": 2}), score_of({})
        (2.0, None)
    """
    score = manifest.get("score")
    plain = isinstance(score, int | float) and not isinstance(score, bool)
    return float(score) if plain else None


def clear_directory(directory: Path, chosen: Path | None, request: str | Path, *, log: Log) -> None:
    """Make a `checkpoints/` directory ready for a run that goes on from `chosen`.

    Args:
        directory: The directory; it is made if need be.
        chosen: The checkpoint that the run goes on from, or None.
        request: What was asked for; after "auto" nothing is set aside.
        log: Called with what is set aside.

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
    log(f"set {len(off_branch)} checkpoints of another branch aside in {aside}")


def step_of(path: Path) -> int:
    """Return the step in a checkpoint's name.

    Examples:
        >>> step_of(Path("step_00000012-1"))
        12
    """
    return _place_of(path)[0]


def next_name(directory: Path, step: int) -> str:
    """Return a free directory name for a step: a second save appends -1, a third -2.

    It is above all that are there, so that the newest of a step is the one saved last.

    Examples:
        >>> next_name(Path("/does/not/exist"), 12)
        'step_00000012'
    """
    places = map(_place_of, list_checkpoints(directory))
    taken = [number for found, number in places if found == step]
    name = f"step_{step:08d}"
    return f"{name}-{max(taken) + 1}" if taken else name
