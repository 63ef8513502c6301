"""Export weights for other programs: full tensors in hashed safetensors files of a bounded size.

The folder is laid out as on the Hugging Face Hub: `model.safetensors`, or
`model-00001-of-00003.safetensors` and so on with `model.safetensors.index.json`. `manifest.json`
has the size and sha256 of each file, and its own hash.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit.files import atomic_folder, convert_disk_errors, recover_folder
from trainkit.types import SOLO, Axis, CheckpointError, ConfigError, Weights, check_range
from trainkit.weights.checkpoint.boxes import (
    DTYPES,
    FLOATS,
    get_dtype_name,
    shorten,
    split_into_files,
)
from trainkit.weights.checkpoint.manifest import (
    MANIFEST,
    READABLE,
    WEIGHTS,
    dump_json,
    find_checkpoint,
    read_manifest,
    seal,
)
from trainkit.weights.checkpoint.safe_files import check_free_space, refusal, write_durably
from trainkit.weights.checkpoint.sources import INDEX, read_model_tensors
from trainkit.weights.checkpoint.tensor_files import Stored, make_safetensors_header

if TYPE_CHECKING:
    from torch import Tensor

SHARD_BYTES = 4_000_000_000
_CHUNK = 32 * 1024 * 1024  # bytes of a tensor that are in memory at once
Sizes = tuple[int, ...]


def export_checkpoint(
    checkpoint: Path | str,
    folder: Path | str,
    *,
    dtype: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Export the weights of a checkpoint, saved in any layout, as full tensors.

    Args:
        checkpoint: A checkpoint, or a run directory, of which the newest checkpoint that verifies
            is read.
        folder: The new folder. It appears by one rename when it is complete.
        dtype: The dtype that floating-point tensors are cast to, for instance "bfloat16"; by
            default they keep theirs.
        shard_bytes: The maximum bytes of a file; a single larger tensor gets a file alone.
        overwrite: Replace a folder that an earlier export wrote, once the new one is complete.

    Returns:
        {"folder", "files", "tensors", "bytes", "from"}.

    Raises:
        CheckpointError: The checkpoint does not verify.
        ConfigError: The folder exists.
        DiskError: It cannot be written. An existing folder is left as it was.

    Effects:
        Writes a folder, with a few chunks of 32 MiB in memory.

    Examples:
        >>> import tempfile, torch
        >>> from trainkit.weights.checkpoint import save_checkpoint, open_weights
        >>> from trainkit.mesh import solo_parallel
        >>> from trainkit.types import TrainState
        >>> model = torch.nn.Linear(3, 2)
        >>> rest = [model], torch.optim.SGD(model.parameters()), solo_parallel()
        >>> with tempfile.TemporaryDirectory() as run:
        ...     path = save_checkpoint(run, TrainState(), *rest)
        ...     export_checkpoint(path, f"{run}/weights")["bytes"]
        ...     open_weights(f"{run}/weights")("bias", (1,), (1,)).shape
        32
        torch.Size([1])
    """
    path = find_checkpoint(checkpoint)
    return write_weights(
        read_model_tensors(path),
        folder,
        dtype=dtype,
        shard_bytes=shard_bytes,
        overwrite=overwrite,
        origin=describe_origin(path),
    )


def save_tensors(
    tensors: Mapping[str, Tensor],
    folder: Path | str,
    *,
    dtype: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    overwrite: bool = False,
    extra_files: Mapping[str, bytes] | None = None,
) -> dict[str, Any]:
    """Write tensors from memory as a folder of safetensors files, completely or not at all.

    `open_weights(folder)` verifies every hash and reads the folder into any layout.
    `verify_weights(folder)` only verifies. Any other safetensors reader works too.

    Args:
        tensors: Full tensors by name, on any device. Tensors that share memory are each written.
        folder: The new folder. It appears by one rename when it is complete.
        dtype: See `export_checkpoint`.
        shard_bytes: See `export_checkpoint`.
        overwrite: See `export_checkpoint`.
        extra_files: The contents of other files by name, for instance of `config.json`.

    Returns:
        {"folder", "files", "tensors", "bytes", "from"}.

    Raises:
        ConfigError: A tensor is a DTensor, sparse, on the meta device, or of a dtype that
            safetensors does not have; or the folder exists.
        CheckpointError: There are no tensors.
        DiskError: The folder cannot be written. An existing one is left as it was.

    Effects:
        Writes a folder.

    Examples:
        >>> import tempfile, torch
        >>> from trainkit.weights.checkpoint import open_weights
        >>> with tempfile.TemporaryDirectory() as home:
        ...     save_tensors({"weight": torch.ones(2, 3)}, f"{home}/mine")["files"]
        ...     open_weights(f"{home}/mine")("weight", (1, 3), (1, 0))
        ['model.safetensors']
        tensor([[1., 1., 1.]])
    """
    import torch  # noqa: PLC0415 - see `_split_into_chunks`

    from trainkit.parallel.materialize import narrow_to_box  # noqa: PLC0415 - likewise

    dtypes = {name: get_dtype_name(x.dtype) for name, x in tensors.items()}
    unsupported = [
        f"{name} of {dtypes[name]} ({x.layout}, {type(x).__name__} on {x.device.type})"
        for name, x in tensors.items()
        if dtypes[name] not in DTYPES
        or x.layout != torch.strided
        or x.device.type == "meta"
        or hasattr(x, "full_tensor")
    ]
    if unsupported:
        raise ConfigError(
            f"save_tensors: {shorten(unsupported)} cannot be written; pass full dense tensors, "
            "for a DTensor its full_tensor()",
            where="tensors",
            got=unsupported,
        )

    def read(name: str, shape: Sequence[int], offset: Sequence[int]) -> Tensor:
        return narrow_to_box(tensors[name].detach(), shape, offset).cpu()

    return write_weights(
        {name: Stored(dtypes[name], tuple(x.shape), ()) for name, x in tensors.items()},
        folder,
        dtype=dtype,
        shard_bytes=shard_bytes,
        overwrite=overwrite,
        read=read,
        extra_files=extra_files,
    )


def describe_origin(checkpoint: Path) -> dict[str, Any]:
    """Return the name, step, run and hash of a checkpoint, for the manifest of its export."""
    manifest = read_manifest(checkpoint)
    origin = {name: manifest[name] for name in ("step", "run", "state_hash") if name in manifest}
    return {"checkpoint": checkpoint.name, **origin}


# ----------------------------------------------------------------------------------------- plans


def plan_shards(
    tensors: Mapping[str, int],
    *,
    shard_bytes: int = SHARD_BYTES,
    stem: str = "model",
) -> dict[str, tuple[str, ...]]:
    """Assign tensors to files in the order of their names, filling each file.

    Args:
        tensors: The bytes of each tensor by name.
        shard_bytes: The maximum bytes of a file; a single larger tensor gets a file alone.
        stem: The start of the file names.

    Returns:
        The names of the tensors in each file, by file name.

    Raises:
        ValueError: `shard_bytes` is below 1.

    Examples:
        >>> plan_shards({"a": 2, "b": 2, "c": 2}, shard_bytes=4)["model-00001-of-00002.safetensors"]
        ('a', 'b')
        >>> plan_shards({"a": 2})
        {'model.safetensors': ('a',)}
    """
    check_range("plan_shards", at_least=1, shard_bytes=shard_bytes)
    sizes = {name: tensors[name] for name in sorted(tensors)}
    groups = split_into_files(sizes, max_bytes=shard_bytes)
    if len(groups) == 1:  # the Hub's convention: a single file has no number and no index
        return {f"{stem}.safetensors": tuple(groups[0])}
    return {
        f"{stem}-{index:05d}-of-{len(groups):05d}.safetensors": tuple(names)
        for index, names in enumerate(groups, 1)
    }


def _cast(stored: Stored, dtype: str | None) -> Stored:
    """Return the tensor as it will be written: floating-point tensors in another dtype."""
    if dtype is None or stored.dtype not in FLOATS:
        dtype = stored.dtype
    return Stored(dtype, stored.shape, ())


# --------------------------------------------------------------------------------------- writing


def write_weights(
    tensors: Mapping[str, Stored],
    folder: Path | str,
    *,
    dtype: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    overwrite: bool = False,
    origin: Mapping[str, Any] | None = None,
    read: Weights | None = None,
    extra_files: Mapping[str, bytes] | None = None,
    stem: str = "model",
    axis: Axis = SOLO,
) -> dict[str, Any]:
    """Write tensors from files as a folder of safetensors files, completely or not at all.

    Args:
        tensors: The tensors by name, from `read_checkpoint_tensors` or `read_foreign_tensors`.
        folder: The new folder.
        dtype: See `export_checkpoint`.
        shard_bytes: See `export_checkpoint`.
        overwrite: See `export_checkpoint`.
        origin: Where the weights come from, for the manifest.
        read: Reads a box of a tensor by its name; by default from the tensors' own extents.
        extra_files: The contents of other files by name.
        stem: The start of the names of the safetensors files.
        axis: The ranks that write together to one disk, each its part of the files.

    Returns:
        {"folder", "files", "tensors", "bytes", "from"}.

    Raises:
        ConfigError: The folder exists, or the dtype is unknown.
        CheckpointError: There are no tensors.
        DiskError: The folder cannot be written.

    Effects:
        Writes a folder; communicates on `axis`.
    """
    target = Path(folder).absolute()
    if dtype is not None and dtype not in FLOATS:
        raise ConfigError(
            f"export: dtype must be one of {', '.join(FLOATS)}, got {dtype!r}", where="dtype"
        )
    if not tensors:
        raise refusal(target, "would hold no tensor: the source has none of the requested ones")
    # Sorted, so that every export of the same weights has the same files.
    written = {name: _cast(tensors[name], dtype) for name in sorted(tensors)}
    sizes = {name: stored.nbytes for name, stored in written.items()}
    plan = plan_shards(sizes, shard_bytes=shard_bytes, stem=stem)
    total = sum(sizes.values())
    # Complete files per rank, so that no two ranks write to one file.
    local_files = list(plan)[axis.index :: axis.count]
    extra_files = dict(extra_files or {})
    if len(plan) > 1:  # readers of the Hub's layout find a tensor's file by this index
        weight_map = {name: file for file, names in plan.items() for name in names}
        extra_files[INDEX] = dump_json(
            {"metadata": {"total_size": total}, "weight_map": weight_map}
        )
    needed = total + sum(map(len, extra_files.values()))
    with _open_shared_folder(target, needed=needed, overwrite=overwrite, axis=axis) as staging:
        # An error on one rank is raised on all, and then none of them renames the folder.
        def write() -> dict[str, Any]:
            from trainkit.weights.checkpoint.reading import make_weights_reader  # noqa: PLC0415 - see `_split_into_chunks`

            read_box = read or make_weights_reader(tensors)
            with convert_disk_errors(staging, by="export"):
                return {
                    f: _write_shard(staging / f, plan[f], written, read_box) for f in local_files
                }

        files = {f: hashes for part in _run_on_all(write, axis) for f, hashes in part.items()}
        # The manifest comes last, since it has the hash of every other file.
        seal_folder = partial(_seal_folder, staging, files, extra_files, origin)
        _run_on_all(seal_folder if axis.index == 0 else lambda: None, axis)
    return {
        "folder": str(target),
        "files": [*plan, *extra_files],
        "tensors": len(written),
        "bytes": total,
        "from": dict(origin or {}),
    }


@contextmanager
def _open_shared_folder(
    target: Path, *, needed: int, overwrite: bool, axis: Axis
) -> Iterator[Path]:
    """Yield the first rank's staging folder to all ranks, and rename it at the end."""
    with ExitStack() as stack:

        def open_folder() -> str | None:
            if axis.index:
                return None
            # All checks come before the first byte is written.
            with convert_disk_errors(target, by="export"):
                target.parent.mkdir(parents=True, exist_ok=True)
                recover_folder(target)
                _check_target(target, overwrite=overwrite)
                free = shutil.disk_usage(target.parent).free
                check_free_space(f"export: {target}", target, free=free, needed=needed)
            return str(stack.enter_context(atomic_folder(target, by="export", replace=overwrite)))

        yield Path(_run_on_all(open_folder, axis)[0])
        _run_on_all(stack.close, axis)  # renames; if that fails, all ranks raise


def _run_on_all(work: Callable[[], Any], axis: Axis) -> list[Any]:
    """Run work as `run_on_all_ranks` does, but without torch on a single rank."""
    if axis.count == 1:
        return [work()]
    from trainkit.collectives import run_on_all_ranks  # noqa: PLC0415 - see `_split_into_chunks`

    return run_on_all_ranks(work, axis)


def _seal_folder(
    staging: Path,
    files: Mapping[str, Any],
    extra_files: Mapping[str, bytes],
    origin: Mapping[str, Any] | None,
) -> None:
    """Write the other files of a folder, and then its manifest."""
    with convert_disk_errors(staging, by="export"):
        hashes = {**files}
        for name, data in extra_files.items():
            hashes[name] = write_durably(staging / name, [data])
        manifest = {
            "format": WEIGHTS,
            "version": READABLE[WEIGHTS][-1],
            "files": hashes,
            "from": dict(origin or {}),
        }
        write_durably(staging / MANIFEST, [dump_json(seal(manifest))])


def _write_shard(
    path: Path,
    names: Sequence[str],
    tensors: Mapping[str, Stored],
    read: Weights,
) -> dict[str, Any]:
    """Write one file in chunks and hash them; return its size and sha256."""
    # The widest elements first: then every tensor is aligned to the size of its elements.
    ordered = sorted(names, key=lambda name: (-DTYPES[tensors[name].dtype][1], name))
    header = make_safetensors_header(
        {name: tensors[name] for name in ordered}, metadata={"format": "pt"}
    )
    size = len(header) + sum(tensors[name].nbytes for name in ordered)
    chunks = (chunk for name in ordered for chunk in _split_into_chunks(name, tensors[name], read))
    with convert_disk_errors(path, by="export", needed=size):
        return write_durably(path, chain([header], chunks))


def _split_into_chunks(name: str, stored: Stored, read: Weights) -> Iterator[memoryview]:
    """Yield the bytes of a tensor in row-major order, a bounded number at a time."""
    import torch  # noqa: PLC0415 - the command line plans, checks and verifies without torch

    max_elements = max(1, _CHUNK // DTYPES[stored.dtype][1])
    for shape, offset in split_into_row_boxes(stored.shape, max_elements):
        part = read(name, shape, offset).to(getattr(torch, stored.dtype)).contiguous()
        # As bytes: numpy has neither bfloat16 nor float8.
        yield part.reshape(-1).view(torch.uint8).numpy().data


def split_into_row_boxes(
    shape: Sizes, max_elements: int, offset: Sizes | None = None
) -> Iterator[tuple[Sizes, Sizes]]:
    """Split a box into consecutive boxes in row-major order, and yield (shape, offset) of each.

    Args:
        shape: The shape of the box.
        max_elements: The maximum elements of a part.
        offset: The offset of the box, by default all zeros.

    Examples:
        >>> list(split_into_row_boxes((2, 3), 3))
        [((1, 3), (0, 0)), ((1, 3), (1, 0))]
    """
    offset = offset or (0,) * len(shape)
    if math.prod(shape) <= max_elements:
        if math.prod(shape):
            yield shape, offset
        return
    # Splitting the first dimension longer than 1 keeps every part contiguous.
    cut = next(dim for dim, size in enumerate(shape) if size > 1)
    rows = max(1, max_elements // math.prod(shape[cut + 1 :]))
    for first in range(0, shape[cut], rows):
        count = min(rows, shape[cut] - first)
        start = (*offset[:cut], offset[cut] + first, *offset[cut + 1 :])
        yield from split_into_row_boxes(
            (*shape[:cut], count, *shape[cut + 1 :]), max_elements, start
        )


# --------------------------------------------------------------------------------------- folders


def _check_target(target: Path, *, overwrite: bool) -> None:
    if not (target.exists() or target.is_symlink()):
        return
    if not overwrite:
        raise ConfigError(
            f"export: {target} exists already",
            where=str(target),
            hint="name another folder, or give --overwrite to replace what an export wrote",
        )
    # Never delete what an export did not write, not even a file that was added to its folder.
    # This stays the reason where the manifest cannot be read.
    problem = "is not a folder that an export wrote"
    with suppress(CheckpointError):
        manifest = read_manifest(target, form=WEIGHTS)
        unknown = {entry.name for entry in target.iterdir()} - {*manifest["files"], MANIFEST}
        problem = f"also holds {min(unknown)!r}, which would be lost" if unknown else ""
    if problem or target.is_symlink():
        raise ConfigError(
            f"export: {target} {problem or 'is a link'}; it is not overwritten",
            where=str(target),
            hint="name another folder, or move what is in this one",
        )
