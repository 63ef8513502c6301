"""Others' checkpoints as descriptions of tensors: which bytes of which file hold what. No torch.

Three formats: the directories of torch.distributed.checkpoint (`.metadata` and `.distcp` files),
the files of torch.save, and folders of safetensors files as the Hub has them. The first two are
pickles: a process of its own reads them, see `trainkit.weights.convert.pickled`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import orjson

from trainkit.types import CheckpointError
from trainkit.weights.checkpoint.manifest import plain_file_name
from trainkit.weights.checkpoint.safe_files import read_bounded, refusal
from trainkit.weights.checkpoint.stored import (
    Extent,
    Stored,
    safetensors_file,
    sane_table,
    without_twins,
)

_MOST_INDEX = 64 * 1024 * 1024


@attrs.frozen
class Found:
    """What a foreign checkpoint holds: its tensors, and the names of what is not read."""

    kind: str
    tensors: Mapping[str, Stored]
    skipped: tuple[str, ...] = ()


def read_foreign_tensors(source: Path) -> Found:
    """Describe the tensors of a foreign checkpoint, of whichever of the three formats it is.

    Args:
        source: A directory with `.metadata`, a file of torch.save (`.pt`, `.pth`, `.bin`), a
            safetensors file, or a folder of those.

    Raises:
        CheckpointError: It is none of them, or not a good one.

    Effects:
        Reads files; pickles in a process of its own.

    Examples:
        >>> read_foreign_tensors(Path("/does/not/exist"))
        Traceback (most recent call last):
        ...
        trainkit.types.CheckpointError: checkpoint: /does/not/exist is not there
    """
    if not source.exists():
        raise refusal(source, "is not there")
    if source.is_file() and source.suffix == ".safetensors":
        return Found("safetensors", safetensors_file(source))
    if source.is_file() or (source / ".metadata").exists():
        return _told_by_torch(source)
    if any(source.glob("*.safetensors")):
        return Found("safetensors", safetensors_folder(source))
    if any(source.glob("pytorch_model*.bin")):
        return _told_by_torch(source)
    raise refusal(
        source, "is no checkpoint that can be converted: no .metadata, .safetensors or .bin in it"
    )


def _told_by_torch(source: Path) -> Found:
    """Let another process read the pickles of a source, and tell what they say."""
    command = [sys.executable, "-P", "-m", "trainkit.weights.convert.pickled", os.fspath(source)]
    home = os.pathsep.join(filter(None, sys.path))  # as this process finds trainkit and torch
    done = subprocess.run(  # noqa: S603 - our own
        command, env={**os.environ, "PYTHONPATH": home}, capture_output=True, check=False
    )
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2][:300]
        raise refusal(source, f"ended the process that read it ({done.returncode}): {last}")
    told = orjson.loads(done.stdout)
    if "refused" in told:
        hint = "nothing of it has been executed; where it comes from, save its tensors alone"
        raise CheckpointError(told["refused"], where=str(source), hint=hint)
    tensors = {name: _as_record(**stored) for name, stored in told["tensors"].items()}
    return Found(told["kind"], tensors, tuple(told["skipped"]))


def _as_record(dtype: str, shape: list[int], extents: list[dict[str, Any]]) -> Stored:
    made = []
    for said in extents:
        values: dict[str, Any] = {k: tuple(x) if type(x) is list else x for k, x in said.items()}
        values["path"] = Path(said["path"])
        made.append(Extent(**values))
    return Stored(dtype, tuple(shape), tuple(made))


def joined(parts: list[Found], source: Path) -> Found:
    """Join what the files of a folder hold; refuse a tensor that is in two of them."""
    tensors = without_twins((part.tensors for part in parts), source)
    return Found(parts[0].kind, tensors, tuple(name for part in parts for name in part.skipped))


def safetensors_folder(folder: Path) -> dict[str, Stored]:
    """Describe the tensors of a folder of safetensors files.

    `model.safetensors.index.json` says which when it is there, else all are read.

    Raises:
        CheckpointError: A file is missing, holds a tensor twice or not the ones that the index
            says, or is not a good one.
    """
    listed = folder / "model.safetensors.index.json"
    if not listed.exists():
        return without_twins(map(safetensors_file, sorted(folder.glob("*.safetensors"))), folder)
    where = sane_table(read_bounded(listed, _MOST_INDEX, shared=True), listed).get("weight_map")
    if not isinstance(where, dict) or not all(isinstance(name, str) for name in where.values()):
        raise refusal(listed, "holds no weight_map")
    for name in set(where.values()):
        if not plain_file_name(name):
            raise refusal(listed, f"names {name[:100]!r}, which is no plain file name")
    parts = {name: safetensors_file(folder / name) for name in sorted(set(where.values()))}
    for name, file in where.items():
        if name not in parts[file]:
            raise refusal(listed, f"says that {name[:100]} is in {file}, which it is not")
    for file, held in parts.items():
        for name in held:
            if where.get(name) != file:
                raise refusal(listed, f"does not say that {name[:100]} is in {file}, which it is")
    return {name: parts[file][name] for name, file in where.items()}
