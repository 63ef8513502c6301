"""Put a snapshot on the disk: each rank its files and a report, then the first rank the rest.

All of it runs in a thread beside the training, and none of it communicates: what ranks tell each
other of a save lies in the staging directory until it is committed.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from threading import Event
from typing import Any

import attrs
import orjson
import torch

from trainkit.files import commit_folder, convert_disk_errors
from trainkit.types import CheckpointError, NumericsError
from trainkit.weights.checkpoint.boxes import index_problems, shortened
from trainkit.weights.checkpoint.directory import get_run_id
from trainkit.weights.checkpoint.manifest import (
    MANIFEST,
    dump_json,
    is_sealed,
    make_manifest,
    next_name,
    sealed,
)
from trainkit.weights.checkpoint.safe_files import parse_json, read_json, write_all, write_durably
from trainkit.weights.checkpoint.snapshot import SavedBox, Snapshot, TensorFile
from trainkit.weights.checkpoint.tensors import INTEGERS, box_hash, hash_of_boxes

_CHUNK = 4 * 1024 * 1024  # written and hashed at once, out of the same cache
_BEGUN = 32 * 1024 * 1024  # the disk begins with so much of a file while the rest is hashed
_LOOKED_AT = 1 << 16  # elements tested at once, out of the nearest cache
# Files of a rank under way at once: while some wait for the disk, others are hashed. On two cores 4
# wrote 1 GB at 0.89 to 0.98 of the rate of a plain write, 2 at 0.73 to 0.80, and 8 were no better.
_WRITERS = 4
_REPORT_BYTES = 1 << 30


@attrs.define(eq=False)
class SaveProgress:
    """How many parts of checkpoints this rank has written: it stands still while the disk hangs."""

    parts: int = 0


@attrs.frozen(eq=False)
class Destination:
    """Where a save goes, and what is written beside the state.

    `ranks` is how many write, `config` the resolved configuration, `before_commit` is called when
    all data is on the disk and the manifest is not, `progress` counts what is written.
    """

    run_dir: Path
    staging: Path
    ranks: int
    config: Mapping[str, Any] | None = None
    score: float | None = None
    before_commit: Callable[[], None] | None = None
    progress: SaveProgress = attrs.field(factory=SaveProgress)


_disk_errors = partial(
    convert_disk_errors,
    by="save_checkpoint",
    hint="free space, make it writable or choose another --out; every earlier checkpoint is intact",
)
"""Turn an `OSError` of a save into a `DiskError`."""


# ---------------------------------------------------------------------------------------- one rank


def write_rank(snapshot: Snapshot, target: Destination, rank: int, stopped: Event) -> None:
    """Write what one rank has, and a report of it, into the staging directory.

    Args:
        snapshot: What this rank has.
        target: Where it goes.
        rank: This rank.
        stopped: When it is set the rest is not written, and there is no report.

    Raises:
        NumericsError: A number is not finite; names the tensor.
        DiskError: Something cannot be written; what has been is removed.

    Effects:
        Writes to disk, and waits until it is durable; hashes and writes in threads of its own.
    """
    sizes = {file.name: len(file.header) + file.data.nbytes for file in snapshot.files}
    try:
        with _disk_errors(target.staging, needed=sum(sizes.values())):
            target.staging.mkdir(parents=True, exist_ok=True)
            for name, size in sizes.items():
                _reserve(target.staging / name, size)
            with ThreadPoolExecutor(_WRITERS) as pool:
                work = [pool.submit(_write_file, f, target, stopped) for f in snapshot.files]
            written = [future.result() for future in work]
            if stopped.is_set():
                return
            report = {
                "tensors": snapshot.tensors,
                "scalars": snapshot.scalars,
                "untouched": snapshot.untouched,
                "files": dict(zip(sizes, (file for file, _ in written), strict=True)),
                "hashes": {name: part for _, parts in written for name, part in parts.items()},
            }
            write_durably(target.staging / _report(rank), [orjson.dumps(sealed(report))])
    except BaseException:
        for name in sizes:
            with suppress(OSError):
                (target.staging / name).unlink()
        raise


def _report(rank: int) -> str:
    return f".report_{rank:05d}.json"


def _reserve(path: Path, size: int) -> None:
    """Make a file of a size, so that a disk without room says so before anything is written."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    handle = os.open(path, flags, 0o666)  # as every file: the umask decides
    try:
        os.posix_fallocate(handle, 0, size)
    except OSError as error:
        if error.errno not in {errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS}:  # cannot reserve
            raise
    finally:
        os.close(handle)


def _write_file(
    file: TensorFile, target: Destination, stopped: Event
) -> tuple[dict[str, Any], dict[str, int]]:
    """Write one file; return its size and sha256, and the hashes of its boxes."""
    try:
        path = target.staging / file.name
        handle = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            sha256 = _stream(file, handle, stopped, target.progress)
            hashes = _hashes(file, stopped)  # while the disk is busy with what was written last
            os.fsync(handle)
            target.progress.parts += 1
        finally:
            os.close(handle)
    except BaseException:
        stopped.set()
        raise
    return {"size": len(file.header) + file.data.nbytes, "sha256": sha256}, hashes


def _stream(file: TensorFile, handle: int, stopped: Event, progress: SaveProgress) -> str:
    """Hash and write a file, chunk by chunk; return its sha256."""
    digest, written, begun = hashlib.sha256(), 0, 0
    for chunk in _chunks(file):
        if stopped.is_set():
            break
        digest.update(chunk)
        write_all(handle, chunk)
        written += len(chunk)
        progress.parts += 1
        if written - begun >= _BEGUN or written == len(file.header) + file.data.nbytes:
            # Linux begins to write what is said not to be needed: the disk works while the rest is
            # hashed, and the last fsync finds little to do. Elsewhere it is a hint.
            os.posix_fadvise(handle, begun, written - begun, os.POSIX_FADV_DONTNEED)
            begun = written
    return digest.hexdigest()


def _chunks(file: TensorFile) -> Iterator[memoryview]:
    for whole in (memoryview(file.header), file.data.data):
        for begin in range(0, len(whole), _CHUNK):
            yield whole[begin : begin + _CHUNK]


def _hashes(file: TensorFile, stopped: Event) -> dict[str, int]:
    """Return the part of the state's hash that each box of a file is; refuse what is not finite."""
    hashes = {}
    for box in file.boxes:
        if stopped.is_set():
            break
        _check_finite(box)
        hashes[f"{box.name} {box.offset}"] = box_hash(
            box.name, box.values, shape=box.shape, offset=box.offset
        )
    return hashes


def _check_finite(box: SavedBox) -> None:
    if box.not_below is None:
        return
    size = box.values.element_size()
    flat = box.values.view(INTEGERS[size]).numpy().reshape(-1).view(f"u{size}")
    sign = 1 << (8 * size - 1)
    for begin in range(0, len(flat), _LOOKED_AT):
        part = flat[begin : begin + _LOOKED_AT]
        # The largest positive number is the largest as a signed integer, a negative one as an
        # unsigned: that takes no memory, and a third of the time of masking the sign.
        if part.view(f"i{size}").max() < box.not_below and part.max() < sign + box.not_below:
            continue
        place = begin + int(((part & part.dtype.type(sign - 1)) >= box.not_below).argmax())
        raise NumericsError(
            f"save_checkpoint: {box.name} is not finite (element {place} of the part that"
            f" begins at {box.offset}); the state is not saved",
            where=box.name,
            hint="go on from an earlier checkpoint",
        )


# -------------------------------------------------------------------------------------- first rank


def commit(snapshot: Snapshot, target: Destination) -> Path:
    """Join what all ranks have written, then the manifest, then give the directory its name.

    Everything is on the disk before what refers to it: data, manifest, directory, name.

    Args:
        snapshot: What the first rank has; of its counters and facts, the whole.
        target: Where it goes.

    Returns:
        The checkpoint.

    Raises:
        DiskError: Something cannot be written. Nothing is committed then.
        CheckpointError: The parts that the ranks wrote are not the whole; the same.

    Effects:
        Writes to disk, and waits until it is durable.
    """
    directory = target.run_dir / "checkpoints"
    with _disk_errors(directory, needed=_REST_BYTES):
        reports = [_read_report(target.staging / _report(rank)) for rank in range(target.ranks)]
        for rank in range(target.ranks):
            (target.staging / _report(rank)).unlink()
        files = _joined(report["files"] for report in reports)
        index = {"tensors": _merged(r["tensors"] for r in reports)}
        _refuse_gaps(index, files)
        texts = {
            "state.json": dump_json(_described(snapshot, reports)),
            "index.json": orjson.dumps(index),
        }
        for name, data in texts.items():
            parse_json(target.staging / name, data)  # what is written must be readable
            files[name] = write_durably(target.staging / name, [data])
            target.progress.parts += 1
        if target.before_commit is not None:
            target.before_commit()
        manifest = make_manifest(snapshot.state.step, files, **_facts(snapshot, target, reports))
        write_durably(target.staging / MANIFEST, [manifest])
        path = directory / next_name(directory, snapshot.state.step)
        commit_folder(target.staging, path)
    return path


def _described(snapshot: Snapshot, reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what `state.json` says: what the first rank knows, and all ranks of the optimizer."""
    scalars = _joined(report["scalars"] for report in reports)
    # Every parameter is among the scalars, a tied copy under its owner's name alone.
    empty = {name for report in reports for name in report["untouched"]} & scalars.keys()
    optimizer = {"scalars": scalars, "untouched": sorted(empty)}
    return {**snapshot.described, "optimizer": snapshot.described["optimizer"] | optimizer}


def _refuse_gaps(index: Mapping[str, Any], files: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse to commit what no load would take: boxes that are not the whole of a tensor."""
    problems = index_problems(index, {name: file["size"] for name, file in files.items()})
    if problems:
        raise CheckpointError(
            f"save_checkpoint: what the ranks wrote could not be read back: {shortened(problems)}",
            got=problems,
            hint="every earlier checkpoint is intact; this is a fault of trainkit or of a layout",
        )


_REST_BYTES = 1 << 20  # what a commit needs beside the tensors, in round numbers


def _read_report(path: Path) -> dict[str, Any]:
    report = read_json(path, most_bytes=_REPORT_BYTES, most_values=_REPORT_BYTES)
    if not is_sealed(report):
        raise CheckpointError(f"save_checkpoint: {path} is not what was written", where=path)
    return report


def _facts(
    snapshot: Snapshot, target: Destination, reports: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    # By box and not summed at once: ranks outside a tensor's mesh may hold the same box.
    boxes = _joined(report["hashes"] for report in reports)
    return {
        **get_run_id(target.run_dir),
        "state_hash": hash_of_boxes(boxes, snapshot.state),
        "score": target.score,
        "config": target.config,
        "trainkit": _trainkit_version(),
        "torch": torch.__version__,
    }


def _trainkit_version() -> str | None:
    try:
        return version("trainkit-lm")
    except PackageNotFoundError:  # read from a checkout that is not installed
        return None


def _joined(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    return {name: value for part in parts for name, value in part.items()}


def _merged(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Join the boxes that different ranks wrote of one tensor; of equal boxes the first stands."""
    merged: dict[str, Any] = {}
    for part in parts:
        for name, entry in part.items():
            known = merged.setdefault(name, {**entry, "boxes": []})["boxes"]
            offsets = [box["offset"] for box in known]
            known += [box for box in entry["boxes"] if box["offset"] not in offsets]
    return merged


def point_to(path: Path) -> None:
    """Write the name of the newest checkpoint into `latest`, for people: no program reads it.

    Effects:
        Replaces a file beside the checkpoint, by a rename.
    """
    new = path.with_name(".latest")
    new.unlink(missing_ok=True)  # a link would be followed
    new.write_text(f"{path.name}\n")
    new.replace(path.with_name("latest"))


def remove_staging(staging: Path) -> None:
    """Remove what a save that failed has left.

    Effects:
        Deletes a directory.
    """
    shutil.rmtree(staging, ignore_errors=True)
