"""Describe the tensors of foreign checkpoints: which bytes of which file they are. Without torch.

Three formats: directories of torch.distributed.checkpoint (`.metadata` and `.distcp` files), files
of torch.save, and folders of safetensors files as on the Hugging Face Hub. The first two contain
pickles, which a separate process reads: see `trainkit.weights.convert.pickled`.
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
from trainkit.weights.checkpoint.manifest import is_plain_file_name
from trainkit.weights.checkpoint.safe_files import read_bounded, refusal
from trainkit.weights.checkpoint.sources import INDEX
from trainkit.weights.checkpoint.tensor_files import (
    Extent,
    Stored,
    merge_tensors,
    parse_untrusted_table,
    safetensors_file,
)

_MAX_INDEX = 64 * 1024 * 1024  # bytes


@attrs.frozen
class Found:
    """The tensors of a foreign checkpoint, and the names of objects that are not read."""

    kind: str
    tensors: Mapping[str, Stored]
    skipped: tuple[str, ...] = ()


def read_foreign_tensors(source: Path) -> Found:
    """Describe the tensors of a foreign checkpoint of any of the three formats.

    Args:
        source: A directory with `.metadata`, a file of torch.save (`.pt`, `.pth`, `.bin`), a
            safetensors file, or a folder of those.

    Raises:
        CheckpointError: It is not one of them, or is damaged or malicious.

    Effects:
        Reads files; pickles in a separate process.

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
    # Any other file counts as one of torch.save, whatever its suffix.
    if source.is_file() or (source / ".metadata").exists():
        return _read_pickles(source)
    if any(source.glob("*.safetensors")):
        return Found("safetensors", describe_safetensors_folder(source))
    if any(source.glob("pytorch_model*.bin")):
        return _read_pickles(source)
    raise refusal(
        source, "is no checkpoint that can be converted: no .metadata, .safetensors or .bin in it"
    )


def _read_pickles(source: Path) -> Found:
    """Read the pickles of a source in another process, and parse its report."""
    process = subprocess.run(  # noqa: S603 - our own module
        # -P: a torch.py in the working directory must not be imported.
        [sys.executable, "-P", "-m", "trainkit.weights.convert.pickled", os.fspath(source)],
        # It must find the same trainkit and torch as this process.
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        check=False,
    )
    # A bomb runs into a limit of memory or time there, and ends that process alone.
    if process.returncode:
        text = process.stderr.decode(errors="replace").strip()
        last = text.rpartition("\n")[2][:300]
        raise refusal(source, f"ended the process that read it ({process.returncode}): {last}")
    report = orjson.loads(process.stdout)
    if "refused" in report:
        raise CheckpointError(
            report["refused"],
            where=str(source),
            hint="nothing in it was executed; save only its tensors where it comes from",
        )
    # Plain JSON, and not trusted either: `convert_weights` checks every box against its file.
    tensors = {name: _parse_stored(stored) for name, stored in report["tensors"].items()}
    return Found(report["kind"], tensors, tuple(report["skipped"]))


def _parse_stored(values: Mapping[str, Any]) -> Stored:
    return Stored(
        dtype=values["dtype"],
        shape=tuple(values["shape"]),
        extents=tuple(
            Extent(
                path=Path(extent["path"]),
                start=extent["start"],
                size=extent["size"],
                offset=tuple(extent["offset"]),
                shape=tuple(extent["shape"]),
                stride=tuple(extent["stride"]),
                skip=extent["skip"],
                crc=extent["crc"],
            )
            for extent in values["extents"]
        ),
    )


def merge_found(parts: list[Found], source: Path) -> Found:
    """Merge the tensors of a folder's files; raise CheckpointError if one is in two files."""
    tensors = merge_tensors((part.tensors for part in parts), source)
    return Found(parts[0].kind, tensors, tuple(name for part in parts for name in part.skipped))


def describe_safetensors_folder(folder: Path) -> dict[str, Stored]:
    """Describe the tensors of a folder of safetensors files.

    Without `model.safetensors.index.json` all such files are read.

    Raises:
        CheckpointError: A file is missing or damaged, a tensor is in two files, or the files do not
            have the tensors that the index lists.
    """
    index = folder / INDEX
    if not index.exists():
        return merge_tensors(map(safetensors_file, sorted(folder.glob("*.safetensors"))), folder)
    file_of = parse_untrusted_table(read_bounded(index, _MAX_INDEX, shared=True), index).get(
        "weight_map"
    )
    if not isinstance(file_of, dict) or not all(isinstance(x, str) for x in file_of.values()):
        raise refusal(index, "holds no weight_map")
    files = sorted(set(file_of.values()))
    for file in files:
        if not is_plain_file_name(file):
            raise refusal(index, f"names {file[:100]!r}, which is no plain file name")
    # Both ways: no tensor of the index is elsewhere, and no tensor of a file is left out of it.
    tensors = {file: safetensors_file(folder / file) for file in files}
    for name, file in file_of.items():
        if name not in tensors[file]:
            raise refusal(index, f"says that {name[:100]} is in {file}, which it is not")
    for file in files:
        for name in tensors[file]:
            if file_of.get(name) != file:
                raise refusal(index, f"does not say that {name[:100]} is in {file}, which it is")
    return {name: tensors[file][name] for name, file in file_of.items()}
