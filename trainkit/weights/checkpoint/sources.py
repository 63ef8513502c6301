"""Open the verified tensors of a checkpoint or an exported folder.

Each tensor is described by where its bytes are, and is read box by box.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trainkit.types import SOLO, Axis, CheckpointError, Share, Weights
from trainkit.weights.checkpoint.boxes import find_index_problems, get_parameter_name
from trainkit.weights.checkpoint.manifest import (
    WEIGHTS,
    find_file_problems,
    inspect_files,
    read_format,
    read_manifest,
    verify_checkpoint,
)
from trainkit.weights.checkpoint.safe_files import read_json, refusal
from trainkit.weights.checkpoint.tensor_files import (
    Stored,
    find_extent,
    merge_tensors,
    safetensors_file,
)

INDEX = "model.safetensors.index.json"


def read_checkpoint_tensors(path: Path) -> dict[str, Stored]:
    """Describe the tensors of a checkpoint of trainkit, which has been verified.

    Raises:
        CheckpointError: The index and the files disagree, or boxes do not cover a tensor exactly
            once.
    """
    sizes = {name: want["size"] for name, want in read_manifest(path)["files"].items()}
    index = read_json(path / "index.json")
    problems = find_index_problems(index, sizes)
    if problems:
        raise refusal(path / "index.json", f"is not a good index: {problems[0]}")
    entries = index["tensors"]
    files = {box["file"] for entry in entries.values() for box in entry["boxes"]}
    # Every header once, although a file has boxes of many tensors.
    headers = {file: safetensors_file(path / file) for file in sorted(files)}
    tensors: dict[str, Stored] = {}
    for name, entry in entries.items():
        extents = tuple(
            find_extent(path / box["file"], name, entry, box, headers[box["file"]])
            for box in entry["boxes"]
        )
        tensors[name] = Stored(entry["dtype"], tuple(entry["shape"]), extents)
    return tensors


def read_model_tensors(path: Path) -> dict[str, Stored]:
    """Describe the tensors of the model in a checkpoint of trainkit, by their names in the model.

    They are the ones to evaluate: the mean of a parameter, if the optimizer maintains one.

    Raises:
        CheckpointError: As `read_checkpoint_tensors`.
    """
    tensors = read_checkpoint_tensors(path)
    return {
        # `combine_optimizers` stores the mean of the weights as a moment of its own.
        get_parameter_name(name): tensors.get(f"optimizer/mean/{get_parameter_name(name)}", x)
        for name, x in tensors.items()
        if name.startswith("model/")
    }


def verify_weights(folder: Path | str, *, share: Share = SOLO.share) -> list[str]:
    """Verify every byte of an exported folder, and return the problems; none if it is intact.

    Args:
        folder: The folder.
        share: Which of its files to hash, assigned in turn; by default all.

    Effects:
        Reads the files; hashes several at once, in threads.

    Examples:
        >>> verify_weights("/does/not/exist")
        ['/does/not/exist is not there']
    """
    folder = Path(folder)
    problems, manifest = inspect_files(folder, form=WEIGHTS)
    if problems:
        return problems
    # By the order in the manifest, which all ranks read.
    local_files = dict(list(manifest["files"].items())[share.index :: share.count])
    return find_file_problems(folder, local_files)


def open_weights(
    folder: Path | str,
    *,
    allow_extra: Sequence[str] = (),
    axis: Axis = SOLO,
) -> Weights:
    """Open an exported folder as a function that reads a box of a tensor by its name.

    `build_stages(..., weights=open_weights(folder, axis=ps.world))` fills every rank's shard of a
    model, in any layout; a rank reads only its own shard. The model must match the folder: tensors
    that the model does not have and other shapes are errors.

    Args:
        folder: A folder that `export_checkpoint` or `convert_weights` wrote.
        allow_extra: Patterns of tensors of the folder that the model may lack, such as
            "**.lora_*"; see `parallel.name_patterns`.
        axis: The ranks that call this together; each hashes its share of the files.

    Returns:
        A `Weights` function, which returns tensors on the CPU, of the dtypes of the files.

    Raises:
        CheckpointError: A file differs from the manifest; a tensor is in two files, or not in the
            one that the index says; or, from the returned function, there is no such tensor, or the
            box lies outside of it.

    Effects:
        Reads and hashes the folder once; communicates on `axis`. The returned function reads one
        box per call, and does not communicate.

    Examples:
        >>> open_weights("/does/not/exist")
        Traceback (most recent call last):
        ...
        trainkit.types.CheckpointError: open_weights: /does/not/exist does not verify: /does/no...
    """
    from trainkit.collectives import run_on_all_ranks  # noqa: PLC0415 - verifying needs no torch
    from trainkit.parallel.materialize import attach_shapes  # noqa: PLC0415 - likewise
    from trainkit.parallel.name_patterns import match_any  # noqa: PLC0415 - likewise
    from trainkit.weights.checkpoint.reading import make_weights_reader  # noqa: PLC0415 - likewise

    folder = Path(folder)
    by_rank = run_on_all_ranks(lambda: verify_weights(folder, share=axis.share), axis)
    problems = [problem for problems in by_rank for problem in problems]
    if problems:
        raise CheckpointError(
            f"open_weights: {folder} does not verify: {problems[0]}", where=folder, got=problems
        )
    files = read_manifest(folder, form=WEIGHTS)["files"]
    # After the hashes: from here on the bytes are those that were exported.
    parts = [safetensors_file(folder / name) for name in files if name.endswith(".safetensors")]
    tensors = merge_tensors(parts, folder)
    index = read_json(folder / INDEX)["weight_map"] if (folder / INDEX).exists() else tensors
    if index.keys() != tensors.keys():
        raise refusal(folder / INDEX, "does not list the tensors that are there")
    required = {
        name: stored.shape for name, stored in tensors.items() if not match_any(name, allow_extra)
    }
    return attach_shapes(make_weights_reader(tensors), required)


def verify_any(path: Path) -> list[str]:
    """Verify a checkpoint or an exported folder, and return the problems.

    Examples:
        >>> verify_any(Path("/does/not/exist"))
        ['/does/not/exist is not there']
    """
    return verify_weights(path) if read_format(path) == WEIGHTS else verify_checkpoint(path)
