"""The name and the manifest that make a directory a checkpoint. Without torch."""

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

from trainkit.types import (
    CheckpointError,
    Log,
    log_warning,
)
from trainkit.weights.checkpoint.boxes import shorten
from trainkit.weights.checkpoint.safe_files import (
    find_file_problem,
    parse_json,
    read_bounded,
    read_json,
)

FORMAT = "trainkit-checkpoint"
VERSION = 2
WEIGHTS = "trainkit-weights"
READABLE = {FORMAT: (1, 2), WEIGHTS: (1,)}
"""The versions of checkpoints and of exported folders that this trainkit reads."""
MANIFEST = "manifest.json"
# At least eight digits, so that names sort by step; a second save of a step appends "-1".
_NAME = re.compile(r"step_([0-9]{8,18})(?:-([0-9]{1,9}))?")
# Neither a slash nor a leading dot: such a name stays in its directory, and is not hidden there.
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
_MANIFEST_BYTES = 8 * 1024 * 1024  # of some 50,000 files
_MANIFEST_VALUES = 500_000
_READERS = 8  # files that are hashed at once; each SHA-256 is bound by one core


# ---------------------------------------------------------------------------------------- manifest


def seal(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record of plain values with its own hash added as "sha256".

    Examples:
        >>> is_sealed(seal({"step": 3})), is_sealed({"step": 3, "sha256": "0"})
        (True, False)
    """
    # With sorted keys the hash is one of the values, in whatever order a reader has them.
    data = orjson.dumps(dict(body), option=orjson.OPT_SORT_KEYS)
    return {**body, "sha256": hashlib.sha256(data).hexdigest()}


def is_sealed(record: Any) -> bool:
    """Return whether a record contains its own hash, as `seal` adds it."""
    if not isinstance(record, dict):
        return False
    try:
        return record == seal({key: value for key, value in record.items() if key != "sha256"})
    except orjson.JSONEncodeError:  # orjson refuses deep nesting, which no save writes
        return False


def dump_json(value: Any) -> bytes:
    """Return indented JSON with sorted keys: readable, and equal for equal values."""
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS | orjson.OPT_INDENT_2)


def make_manifest(step: int, files: Mapping[str, Mapping[str, Any]], **facts: Any) -> bytes:
    """Return the manifest of a checkpoint, with its own hash.

    Args:
        step: The step that the checkpoint was saved after.
        files: {"size", "sha256"} of every other file, by name.
        facts: Further plain values: run, parent, state_hash, score, config, and the versions of
            trainkit and torch.

    Examples:
        >>> orjson.loads(make_manifest(3, {}, run="0" * 32))["run"][:4]
        '0000'
    """
    # Null where they are not given: all manifests have the same keys.
    names = ("run", "parent", "state_hash", "score", "config", "trainkit", "torch")
    body = {"format": FORMAT, "version": VERSION, "step": step, "files": dict(files)}
    return dump_json(seal(dict.fromkeys(names) | facts | body))


def read_manifest(path: Path | str, *, form: str = FORMAT) -> dict[str, Any]:
    """Return the manifest of a checkpoint after checking its hash and its version.

    The other files are not read; see `verify_checkpoint`.

    Args:
        path: A checkpoint directory.
        form: The expected format: `FORMAT`, or `WEIGHTS` for an exported folder.

    Raises:
        CheckpointError: It is missing, damaged, not a manifest, or of a later version.
    """
    return parse_manifest(path, read_bounded(Path(path) / MANIFEST, _MANIFEST_BYTES), form=form)


def parse_manifest(
    path: Path | str, data: bytes | bytearray, *, form: str = FORMAT
) -> dict[str, Any]:
    """Return a manifest that has been read from `path`, as `read_manifest`.

    Raises:
        CheckpointError: See `read_manifest`.
    """
    file = Path(path) / MANIFEST
    manifest = parse_json(file, data, _MANIFEST_VALUES)
    problems = _find_manifest_problems(manifest, data, form)
    if problems:
        raise CheckpointError(f"checkpoint: {path}: {problems[0]}", where=file, got=problems)
    return manifest


def read_format(path: Path | str) -> str | None:
    """Return the format that a directory's manifest claims, even if damaged; None without one.

    Examples:
        >>> read_format("/does/not/exist")
    """
    file = Path(path) / MANIFEST
    try:
        manifest = read_json(file, max_bytes=_MANIFEST_BYTES, max_values=_MANIFEST_VALUES)
    except CheckpointError:
        return None
    return manifest.get("format") if isinstance(manifest, dict) else None


def _find_manifest_problems(manifest: Any, data: bytes | bytearray, form: str) -> list[str]:
    if not isinstance(manifest, dict) or not isinstance(manifest.get("files"), dict):
        return [f"{MANIFEST} is not a manifest"]
    if not is_sealed(manifest):
        return [f"{MANIFEST} does not match its own sha256"]
    if manifest.get("format") != form:
        return [f"{MANIFEST} has the format {manifest.get('format')!r}, not {form!r}"]
    if manifest.get("version") not in READABLE[form]:
        readable = " and ".join(map(str, READABLE[form]))
        problem = (
            f"{MANIFEST} has version {manifest.get('version')}, written by trainkit "
            f"{manifest.get('trainkit')}; this trainkit reads {readable}: upgrade trainkit"
        )
        return [problem]
    # The seal is over the values. Comparing the bytes too rejects duplicate keys, of which a
    # parser sees only the last.
    if data != dump_json(manifest):
        return [f"{MANIFEST} is not written as trainkit writes it"]
    files = manifest["files"]
    problems = [
        f"{MANIFEST} names {name!r}, which is no plain file name"
        for name in files
        if not is_plain_file_name(name)
    ]
    # On a disk that ignores case both would be the same file.
    if len({name.casefold() for name in files}) < len(files):
        problems.append(f"{MANIFEST} names two files that differ by upper and lower case alone")
    # An exported folder may come from no run, and so has no step.
    if manifest["format"] == FORMAT and not _is_count(manifest.get("step")):
        problems.append(f"{MANIFEST} names no step")
    problems += [
        f"{MANIFEST} does not say the size and sha256 of {name}"
        for name, entry in files.items()
        if not (
            isinstance(entry, dict)
            and _is_count(entry.get("size"))
            and isinstance(entry.get("sha256"), str)
        )
    ]
    return problems


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def is_plain_file_name(name: str) -> bool:
    """Return whether a name from a file names another file of the same directory.

    Examples:
        >>> is_plain_file_name("rank_00000.safetensors"), is_plain_file_name("../x")
        (True, False)
    """
    return isinstance(name, str) and _FILE_NAME.fullmatch(name) is not None


def verify_checkpoint(path: Path | str) -> list[str]:
    """Verify every byte of a checkpoint, and return the problems; none if it is intact.

    Args:
        path: A checkpoint directory.

    Returns:
        One sentence per problem: a missing, added, truncated or changed file, or a manifest that
            trainkit did not write.

    Effects:
        Reads every file; hashes up to eight at once, in threads.

    Examples:
        >>> verify_checkpoint("/does/not/exist")
        ['/does/not/exist is not there']
    """
    path = Path(path)
    problems, manifest = inspect_files(path)
    if problems:
        return problems
    return find_file_problems(path, manifest["files"])


def find_file_problems(path: Path, files: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Verify every byte of some files of a folder against its manifest; return the problems.

    Effects:
        Reads the files; hashes up to eight at once, in threads.
    """
    # The largest first, so that no thread starts a large file when the others are done.
    largest = sorted(files.items(), key=lambda item: -item[1]["size"])
    # Threads suffice, since hashlib releases the GIL.
    with ThreadPoolExecutor(min(_READERS, os.cpu_count() or 1)) as pool:
        problems = pool.map(
            find_file_problem, (path / name for name, _ in largest), (entry for _, entry in largest)
        )
        return [problem for problem in problems if problem is not None]


def inspect_files(path: Path | str, *, form: str = FORMAT) -> tuple[list[str], dict[str, Any]]:
    """Check a checkpoint's manifest and the names and sizes of its files, not their contents.

    Args:
        path: A checkpoint directory.
        form: See `read_manifest`. An exported folder may contain other files, a `config.json` for
            instance, but no other weights.

    Returns:
        The problems, as `verify_checkpoint` returns them, and the manifest, which is empty if it
            cannot be trusted.

    Examples:
        >>> inspect_files("/does/not/exist")
        (['/does/not/exist is not there'], {})
    """
    path = Path(path)
    if not path.exists():
        return [f"{path} is not there"], {}
    # A link could be changed to another directory between the check and the load.
    if not path.is_dir() or path.is_symlink():
        return [f"{path} is not a directory"], {}
    if (path / "checkpoints").is_dir():
        return [f"{path} is a run directory; name one of its checkpoints/step_..."], {}
    try:
        manifest = read_manifest(path, form=form)
        present = {entry.name for entry in os.scandir(path)} - {MANIFEST}
    except CheckpointError as error:
        return error.got if isinstance(error.got, list) else [error.what], {}
    except OSError as error:  # deleted between the checks above and here, for instance
        return [f"{path} cannot be read: {error.strerror}"], {}
    problems = []
    # Renamed by hand, it would be taken for newer or older than it is.
    has_step = form == FORMAT and _NAME.fullmatch(path.name)
    if has_step and parse_step(path) != manifest["step"]:
        problems.append(f"{path.name} holds step {manifest['step']}")
    problems += [
        f"{name} is not in the manifest"
        for name in sorted(present - set(manifest["files"]))
        if form == FORMAT or name.endswith(".safetensors")
    ]
    for name, entry in manifest["files"].items():
        problem = find_file_problem(path / name, entry, check_hash=False)
        problems += [problem] if problem else []
    return problems, manifest


# ------------------------------------------------------------------------------------- directories


def list_checkpoints(directory: Path | str) -> list[Path]:
    """List the checkpoints in a directory by their names, newest first, verified or not.

    Args:
        directory: A `checkpoints/` directory; if it is missing the list is empty.

    Examples:
        >>> list_checkpoints("/does/not/exist")
        []
    """
    directory = Path(directory)
    if not directory.is_dir():
        return []
    checkpoints = [path for path in directory.iterdir() if _NAME.fullmatch(path.name)]
    return sorted(checkpoints, key=_parse_name, reverse=True)


def _parse_name(path: Path) -> tuple[int, int]:
    """Return the step in a checkpoint's name, and the index of the save of that step."""
    parsed = parse_checkpoint_name(path.name)
    assert parsed is not None
    return parsed


def parse_checkpoint_name(name: str) -> tuple[int, int] | None:
    """Return the step in a name and the index of the save of that step; None for another name.

    Examples:
        >>> parse_checkpoint_name("step_00000012-1"), parse_checkpoint_name("lock")
        ((12, 1), None)
    """
    match = _NAME.fullmatch(name)
    return None if match is None else (int(match[1]), int(match[2] or 0))


def find_first_verified(paths: Iterable[Path], log: Log) -> tuple[Path | None, list[str]]:
    """Return the first checkpoint that verifies, or None, and the problems of those before it."""
    skipped: list[str] = []
    for path in paths:
        problems = verify_checkpoint(path)
        if not problems:
            return path, skipped
        skipped.append(f"{path.name}: {problems[0]}")
        log(f"skipped {path}: {problems[0]}")
    return None, skipped


def no_checkpoint_error(directory: Path, skipped: Sequence[str]) -> CheckpointError:
    """Return the error for a run whose checkpoints are all damaged.

    It is never a reason to start from scratch: somebody wants to continue this run.
    """
    return CheckpointError(
        f"resume: none of the {len(skipped)} checkpoints in {directory} verifies "
        f"({shorten(skipped)})",
        where=directory,
        got=list(skipped),
        hint="to start from scratch use --resume never, or choose another --out",
    )


def damage_error(path: Path, problems: Sequence[str]) -> CheckpointError:
    """Return the error for a requested checkpoint that does not verify."""
    return CheckpointError(
        f"resume: {path} was requested, but {shorten(problems, max_problems=3)}",
        where=path,
        got=list(problems),
        want="a checkpoint directory that verifies",
    )


def find_checkpoint(path: Path | str, *, best: bool = False, log: Log = log_warning) -> Path:
    """Return the checkpoint to read weights from: `path` itself, or one of a run directory.

    Args:
        path: A checkpoint, or a run directory with `checkpoints/`.
        best: Take the checkpoint of a run with the lowest score that verifies (of equal scores the
            newest); by default the newest.
        log: Called with a message about each damaged checkpoint.

    Raises:
        CheckpointError: There is no checkpoint, or none that verifies; with `best`, none has a
            score; or `path` is a folder of weights without a run.

    Examples:
        >>> find_checkpoint("/does/not/exist")
        Traceback (most recent call last):
        ...
        trainkit.types.CheckpointError: find_checkpoint: there is no checkpoint in ...
    """
    path = Path(path)
    _check_not_weights(path)
    check_not_deleted(path)
    if (path / MANIFEST).exists():  # a checkpoint, and not a run
        problems = verify_checkpoint(path)
        if problems:
            raise damage_error(path, problems)
        return path
    directory = path / "checkpoints"
    paths = list_checkpoints(directory)
    if not paths:
        raise CheckpointError(
            f"find_checkpoint: there is no checkpoint in {path}",
            where=path,
            hint="name a run that has saved, or one of its checkpoints",
        )
    if best:
        scores = {path: get_score(inspect_files(path)[1]) for path in paths}
        # sorted() is stable, and the paths come newest first.
        candidates = sorted(
            (path for path in paths if scores[path] is not None),
            key=lambda path: scores[path] or 0.0,
        )
    else:
        candidates = paths
    checkpoint, skipped = find_first_verified(candidates, log)
    if checkpoint is not None:
        return checkpoint
    if not best:
        raise no_checkpoint_error(directory, skipped)
    raise CheckpointError(
        f"find_checkpoint: of the {len(paths)} checkpoints in {directory} none has a score and "
        "verifies",
        where=directory,
        hint="save with score=, the lower the better; without best=True the newest is taken",
    )


def check_not_deleted(path: Path) -> None:
    """Raise CheckpointError for a path that is missing from a directory of checkpoints.

    Raises:
        CheckpointError: It is missing; lists the checkpoints that exist, and how to retain one.

    Examples:
        >>> check_not_deleted(Path("/does/not/exist"))
    """
    others = [other.name for other in list_checkpoints(path.parent)]
    if others and not path.exists():
        raise CheckpointError(
            f"checkpoint: there is no {path.name} in {path.parent} (any more); there are "
            f"{shorten(others)}",
            where=path,
            got=others,
            hint="a run retains its newest (--keep), every Nth step (--keep-every N) and each "
            f"checkpoint that has a pin file, here {path.name}.pin",
        )


def _check_not_weights(path: Path) -> None:
    """Raise if the path is a folder of weights alone, from Hugging Face, `export` or `convert`."""
    # A checkpoint of ours has safetensors files too, but also a manifest of its format.
    patterns = ("*.safetensors", "pytorch_model*.bin", ".metadata")
    if (
        not path.is_dir()
        or read_format(path) == FORMAT
        or not any(any(path.glob(pattern)) for pattern in patterns)
    ):
        return
    raise CheckpointError(
        f"find_checkpoint: {path} holds weights alone, and no checkpoint of a run: it does not say "
        "of which model",
        where=path,
        want="a run directory, or one of its checkpoints",
        hint="build the model and fill it by build_stages(..., weights=open_weights(folder)); "
        "convert foreign files into such a folder by python -m trainkit checkpoint convert SOURCE "
        "FOLDER",
    )


def get_score(manifest: Mapping[str, Any]) -> float | None:
    """Return the score that a checkpoint was saved with, or None; a lower score is better.

    Examples:
        >>> get_score({"score": 2}), get_score({})
        (2.0, None)
    """
    score = manifest.get("score")
    is_number = isinstance(score, int | float) and not isinstance(score, bool)
    return float(score) if is_number else None


def clear_directory(directory: Path, chosen: Path | None, request: str | Path, *, log: Log) -> None:
    """Prepare a `checkpoints/` directory for a run that resumes from `chosen`.

    Args:
        directory: The directory; it is made if it is missing.
        chosen: The checkpoint that the run resumes from, or None.
        request: The requested checkpoint; with "auto" nothing is moved.
        log: Called with a message about what is moved.

    Effects:
        Removes the incomplete output of a killed save or deletion; moves the checkpoints that are
        not on the run's branch into `abandoned-1`, `abandoned-2`, and so on.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for incomplete in (*directory.glob(".staging-*"), *directory.glob(".deleting-*")):
        shutil.rmtree(incomplete, ignore_errors=True)
    # After "never", or a checkpoint of another run, none of these is on the branch.
    last = -1
    if chosen is not None and chosen.resolve().parent == directory.resolve():
        last = parse_step(chosen)
    off_branch = [path for path in list_checkpoints(directory) if parse_step(path) > last]
    if request == "auto" or not off_branch:
        return
    # Moved and not deleted: after a wrong flag they can be moved back.
    index = 1
    while (directory / f"abandoned-{index}").exists():
        index += 1
    abandoned = directory / f"abandoned-{index}"
    abandoned.mkdir()
    for path in off_branch:
        path.rename(abandoned / path.name)
    log(f"set {len(off_branch)} checkpoints of another branch aside in {abandoned}")


def parse_step(path: Path) -> int:
    """Return the step in a checkpoint's name.

    Examples:
        >>> parse_step(Path("step_00000012-1"))
        12
    """
    return _parse_name(path)[0]


def choose_checkpoint_name(directory: Path, step: int) -> str:
    """Return a free directory name for a step: a second save appends -1, a third -2.

    The number is above all existing ones, so the newest checkpoint of a step sorts last.

    Examples:
        >>> choose_checkpoint_name(Path("/does/not/exist"), 12)
        'step_00000012'
    """
    parsed = map(_parse_name, list_checkpoints(directory))
    taken = [index for other, index in parsed if other == step]
    name = f"step_{step:08d}"
    return f"{name}-{max(taken) + 1}" if taken else name
