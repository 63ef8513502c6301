"""Weights to read: the tensors of a checkpoint or of an exported folder, after they are verified.

Each is described by the bytes that hold it, and read box by box.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from trainkit.types import SOLO, Axis, CheckpointError, Share, Weights
from trainkit.weights.checkpoint.boxes import index_problems, parameter_of
from trainkit.weights.checkpoint.manifest import (
    WEIGHTS,
    file_problems,
    format_of,
    outline,
    read_manifest,
    verify_checkpoint,
)
from trainkit.weights.checkpoint.safe_files import read_json, refusal
from trainkit.weights.checkpoint.stored import Stored, extent_of, safetensors_file, without_twins

INDEX = "model.safetensors.index.json"


def checkpoint_tensors(path: Path) -> dict[str, Stored]:
    """Describe the tensors of one of our checkpoints, which has been verified.

    Raises:
        CheckpointError: The index and the files do not say the same, or boxes do not cover a tensor
            exactly once.
    """
    sizes = {name: want["size"] for name, want in read_manifest(path)["files"].items()}
    index = read_json(path / "index.json")
    problems = index_problems(index, sizes)
    if problems:
        raise refusal(path / "index.json", f"is not a good index: {problems[0]}")
    tensors = index["tensors"]
    files = {box["file"] for entry in tensors.values() for box in entry["boxes"]}
    held = {file: safetensors_file(path / file) for file in sorted(files)}
    found: dict[str, Stored] = {}
    for name, entry in tensors.items():
        places = [(path / box["file"], box, held[box["file"]]) for box in entry["boxes"]]
        extents = tuple(extent_of(file, name, entry, box, said) for file, box, said in places)
        found[name] = Stored(entry["dtype"], tuple(entry["shape"]), extents)
    return found


def model_of(path: Path) -> dict[str, Stored]:
    """Describe the tensors of the model in one of our checkpoints, by their names in it.

    They are those that are evaluated: where the optimizer keeps a mean of a parameter, the mean.

    Raises:
        CheckpointError: As `checkpoint_tensors`.
    """
    found = checkpoint_tensors(path)
    return {
        parameter_of(name): found.get(f"optimizer/mean/{parameter_of(name)}", x)
        for name, x in found.items()
        if name.startswith("model/")
    }


def verify_weights(folder: Path | str, *, share: Share = SOLO.share) -> list[str]:
    """Return what is wrong with an exported folder: an empty list when every byte is as written.

    Args:
        folder: The folder.
        share: Which of its files to hash, dealt in turn; by default all.

    Effects:
        Reads the files; hashes several at once, in threads.

    Examples:
        >>> verify_weights("/does/not/exist")
        ['/does/not/exist is not there']
    """
    folder = Path(folder)
    problems, manifest = outline(folder, form=WEIGHTS)
    if problems:
        return problems
    mine = dict(list(manifest["files"].items())[share.index :: share.count])
    return file_problems(folder, mine)


def open_weights(
    folder: Path | str, *, allow_extra: Sequence[str] = (), axis: Axis = SOLO
) -> Weights:
    """Return the weights of an exported folder as a function of a name and a box.

    `build_stages(..., weights=open_weights(folder, axis=ps.world))` fills every rank's part of a
    model from it, in any layout; no rank holds more of it than its own. The model must be the one
    that the folder is of: tensors that it has no place for are refused, and so are other shapes.

    Args:
        folder: A folder that `export_checkpoint` or `convert_weights` wrote.
        allow_extra: Patterns of tensors of the folder that the model may lack, in which `*` stands
            for any letters.
        axis: The ranks that call this together; each hashes its share of the files.

    Returns:
        A `Weights` function: tensors on the CPU, of the dtypes of the files.

    Raises:
        CheckpointError: A byte is not as it was written; its files hold a tensor twice, or not as
            its index says; or, when it is called, there is no such tensor, or none of such a shape.

    Effects:
        Reads and hashes all of the folder once, communicates on `axis`; the function that it
        returns reads one box per call, and does not communicate.

    Examples:
        >>> open_weights("/does/not/exist")
        Traceback (most recent call last):
        ...
        trainkit.types.CheckpointError: open_weights: /does/not/exist does not verify: /does/no...
    """
    from trainkit.collectives import run_on_all_ranks  # noqa: PLC0415 - likewise
    from trainkit.parallel.materialize import listed  # noqa: PLC0415 - likewise
    from trainkit.weights.checkpoint.reading import reader  # noqa: PLC0415 - verifying needs no torch

    folder = Path(folder)
    told = run_on_all_ranks(lambda: verify_weights(folder, share=axis.share), axis)
    problems = [problem for problems in told for problem in problems]
    if problems:
        raise CheckpointError(
            f"open_weights: {folder} does not verify: {problems[0]}", where=folder, got=problems
        )
    files = read_manifest(folder, form=WEIGHTS)["files"]
    parts = [safetensors_file(folder / name) for name in files if name.endswith(".safetensors")]
    tensors = without_twins(parts, folder)
    index = read_json(folder / INDEX)["weight_map"] if (folder / INDEX).exists() else tensors
    if index.keys() != tensors.keys():
        raise refusal(folder / INDEX, "does not list the tensors that are there")
    kept = {
        name: stored.shape
        for name, stored in tensors.items()
        if not any(fnmatchcase(name, pattern) for pattern in allow_extra)
    }
    return listed(reader(tensors), kept)


def verify_any(path: Path) -> list[str]:
    """Return what is wrong with a checkpoint or an exported folder.

    Examples:
        >>> verify_any(Path("/does/not/exist"))
        ['/does/not/exist is not there']
    """
    return verify_weights(path) if format_of(path) == WEIGHTS else verify_checkpoint(path)
