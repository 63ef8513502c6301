"""Weights for others: full tensors in safetensors files of a bounded size, hashed, and read back.

The layout is the one that the Hub knows: `model.safetensors`, or `model-00001-of-00003.safetensors`
with `model.safetensors.index.json`; `manifest.json` holds the size and sha256 of each, and of
itself.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit.files import atomic_folder, convert_disk_errors, recover_folder
from trainkit.types import SOLO, Axis, CheckpointError, ConfigError, Weights, check_range
from trainkit.weights.checkpoint.boxes import DTYPES, shared_out, shortened
from trainkit.weights.checkpoint.manifest import (
    MANIFEST,
    READABLE,
    WEIGHTS,
    dump_json,
    find_checkpoint,
    read_manifest,
    sealed,
)
from trainkit.weights.checkpoint.safe_files import refusal, refuse_no_room, write_durably
from trainkit.weights.checkpoint.sources import INDEX, model_of
from trainkit.weights.checkpoint.stored import Stored, safetensors_header

if TYPE_CHECKING:
    from torch import Tensor

SHARD_BYTES = 4_000_000_000
_CHUNK = 32 * 1024 * 1024
Sizes = tuple[int, ...]
_FLOATS = ("float64", "float32", "float16", "bfloat16")


def export_checkpoint(
    checkpoint: Path | str,
    folder: Path | str,
    *,
    dtype: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Write the weights of a checkpoint of any layout as full tensors that others can read.

    Args:
        checkpoint: A checkpoint, or a run directory, of which the newest that verifies is taken.
        folder: The new folder; it appears by one rename when it is complete.
        dtype: What floating-point tensors become, "bfloat16" for instance; None keeps them.
        shard_bytes: The most bytes of one file, unless a single tensor is larger.
        overwrite: Replace a folder that an earlier export wrote. It stays until the new one is
            complete.

    Returns:
        What has been written: {"folder", "files", "tensors", "bytes", "from"}.

    Raises:
        CheckpointError: The checkpoint does not verify.
        ConfigError: The folder is there already.
        DiskError: It cannot be written; then there is no folder, or the old one.

    Effects:
        Writes a folder; reads with the memory of a few chunks of 32 MiB.

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
        model_of(path),
        folder,
        dtype=dtype,
        shard_bytes=shard_bytes,
        overwrite=overwrite,
        origin=origin_of(path),
    )


def save_tensors(
    tensors: Mapping[str, Tensor],
    folder: Path | str,
    *,
    dtype: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    overwrite: bool = False,
    beside: Mapping[str, bytes] | None = None,
) -> dict[str, Any]:
    """Write tensors in memory as a folder of safetensors files that is there whole or not at all.

    `open_weights(folder)` reads it into any layout, after every byte has been compared with its
    hash; `verify_weights(folder)` only compares. What others read safetensors with reads it too.

    Args:
        tensors: Whole tensors by name, on any device; what shares memory is written twice.
        folder: The new folder; it appears by one rename when it is complete.
        dtype: See `export_checkpoint`.
        shard_bytes: See `export_checkpoint`.
        overwrite: See `export_checkpoint`.
        beside: Other files of the folder, by their names: a `config.json`, say.

    Returns:
        {"folder", "files", "tensors", "bytes", "from"}.

    Raises:
        ConfigError: A tensor is no plain one (a DTensor, a sparse tensor, one on the meta device),
            or of a dtype that safetensors files do not hold; or the folder is there already.
        CheckpointError: There are no tensors.
        DiskError: It cannot be written; then there is no folder, or the old one.

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
    import torch  # noqa: PLC0415 - see `_chunks`

    kinds = {name: str(x.dtype).removeprefix("torch.") for name, x in tensors.items()}
    wrong = [
        f"{name} of {kinds[name]} ({x.layout}, {type(x).__name__} on {x.device.type})"
        for name, x in tensors.items()
        if kinds[name] not in DTYPES
        or x.layout != torch.strided
        or x.device.type == "meta"
        or hasattr(x, "full_tensor")
    ]
    if wrong:
        raise ConfigError(
            f"save_tensors: {shortened(wrong)} cannot be written as they are; give whole dense "
            "tensors, of a DTensor its full_tensor()",
            where="tensors",
            got=wrong,
        )

    def read(name: str, shape: Sequence[int], offset: Sequence[int]) -> Tensor:
        box = tuple(slice(a, a + n) for a, n in zip(offset, shape, strict=True))
        return tensors[name].detach()[box].cpu()

    described = {name: Stored(kinds[name], tuple(x.shape), ()) for name, x in tensors.items()}
    return write_weights(
        described,
        folder,
        dtype=dtype,
        shard_bytes=shard_bytes,
        overwrite=overwrite,
        read=read,
        beside=beside,
    )


def origin_of(checkpoint: Path) -> dict[str, Any]:
    """Return what a folder made of a checkpoint says of it: its name, step, run and hash."""
    saved = read_manifest(checkpoint)
    found = {name: saved[name] for name in ("step", "run", "state_hash") if name in saved}
    return {"checkpoint": checkpoint.name, **found}


# ----------------------------------------------------------------------------------------- plans


def plan_shards(
    tensors: Mapping[str, int], *, shard_bytes: int = SHARD_BYTES, stem: str = "model"
) -> dict[str, tuple[str, ...]]:
    """Return which tensors go into which file: in the order of their names, each file full.

    Args:
        tensors: The bytes of each tensor by name.
        shard_bytes: The most bytes of a file, unless a single tensor is larger.
        stem: What the names of the files begin with.

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
    groups = shared_out(sizes, most_bytes=shard_bytes)
    if len(groups) == 1:
        return {f"{stem}.safetensors": tuple(groups[0])}
    return {
        f"{stem}-{number:05d}-of-{len(groups):05d}.safetensors": tuple(names)
        for number, names in enumerate(groups, 1)
    }


def _cast(stored: Stored, dtype: str | None) -> Stored:
    """Return how a tensor is described once it has been written, in one extent."""
    kept = dtype is None or stored.dtype not in _FLOATS
    return Stored(stored.dtype if kept else str(dtype), stored.shape, ())


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
    beside: Mapping[str, bytes] | None = None,
    stem: str = "model",
    axis: Axis = SOLO,
) -> dict[str, Any]:
    """Write described tensors as a folder of safetensors files that is there whole or not at all.

    Args:
        tensors: What `checkpoint_tensors` or `read_foreign_tensors` has found.
        folder: The new folder.
        dtype: See `export_checkpoint`.
        shard_bytes: See `export_checkpoint`.
        overwrite: See `export_checkpoint`.
        origin: Where the weights come from, for the manifest.
        read: Reads a box of a tensor by its name; by default from the tensors' own extents.
        beside: Other files of the folder, by their names.
        stem: What the names of the files of tensors begin with.
        axis: The ranks that call this together, on one disk: each writes its share of the files.

    Returns:
        {"folder", "files", "tensors", "bytes", "from"}.

    Raises:
        ConfigError: The folder is there already, or the dtype is unknown.
        CheckpointError: There are no tensors.
        DiskError: It cannot be written.

    Effects:
        Writes a folder; communicates on `axis`.
    """
    target = Path(folder).absolute()
    if dtype is not None and dtype not in _FLOATS:
        raise ConfigError(
            f"export: dtype must be one of {', '.join(_FLOATS)}, got {dtype!r}", where="dtype"
        )
    if not tensors:
        raise refusal(target, "would hold no tensor: the source has none of those asked for")
    described = {name: _cast(tensors[name], dtype) for name in sorted(tensors)}
    sizes = {name: stored.nbytes for name, stored in described.items()}
    plan = plan_shards(sizes, shard_bytes=shard_bytes, stem=stem)
    total = sum(sizes.values())
    mine, others = list(plan)[axis.index :: axis.count], {**(beside or {})}
    if len(plan) > 1:
        weights = {name: file for file, names in plan.items() for name in names}
        others[INDEX] = dump_json({"metadata": {"total_size": total}, "weight_map": weights})
    needed = total + sum(map(len, others.values()))
    with _folder_of_all(target, needed=needed, overwrite=overwrite, axis=axis) as staging:

        def write() -> dict[str, Any]:
            from trainkit.weights.checkpoint.reading import reader  # noqa: PLC0415 - see `_chunks`

            give = read or reader(tensors)
            with convert_disk_errors(staging, by="export"):
                return {f: _write_shard(staging / f, plan[f], described, give) for f in mine}

        files = {f: facts for told in _on_all(write, axis) for f, facts in told.items()}
        _on_all(lambda: _seal(staging, files, others, origin) if axis.index == 0 else None, axis)
    return {
        "folder": str(target),
        "files": [*plan, *others],
        "tensors": len(described),
        "bytes": total,
        "from": dict(origin or {}),
    }


@contextmanager
def _folder_of_all(target: Path, *, needed: int, overwrite: bool, axis: Axis) -> Iterator[Path]:
    """Yield the `atomic_folder` of rank 0, into which all ranks write."""
    with ExitStack() as stack:

        def begin() -> str | None:
            if axis.index:
                return None
            with convert_disk_errors(target, by="export"):
                target.parent.mkdir(parents=True, exist_ok=True)
                recover_folder(target)
                _check_target(target, overwrite=overwrite)
                free = shutil.disk_usage(target.parent).free
                refuse_no_room(f"export: {target}", target, free=free, needed=needed)
            return str(stack.enter_context(atomic_folder(target, by="export", replace=overwrite)))

        yield Path(_on_all(begin, axis)[0])
        _on_all(stack.close, axis)


def _on_all(work: Callable[[], Any], axis: Axis) -> list[Any]:
    """Do work as `run_on_all_ranks` does; alone, without torch."""
    if axis.count == 1:
        return [work()]
    from trainkit.collectives import run_on_all_ranks  # noqa: PLC0415 - see `_chunks`

    return run_on_all_ranks(work, axis)


def _seal(
    staging: Path,
    files: Mapping[str, Any],
    others: Mapping[str, bytes],
    origin: Mapping[str, Any] | None,
) -> None:
    """Write what a folder holds beside tensors, and its manifest."""
    with convert_disk_errors(staging, by="export"):
        known = {**files}
        for name, data in others.items():
            known[name] = write_durably(staging / name, [data])
        body = {"format": WEIGHTS, "version": READABLE[WEIGHTS][-1], "files": known}
        write_durably(staging / MANIFEST, [dump_json(sealed(body | {"from": dict(origin or {})}))])


def _write_shard(
    path: Path, names: Sequence[str], described: Mapping[str, Stored], read: Weights
) -> dict[str, Any]:
    """Write one file in chunks, hashing what is written; return its size and sha256."""
    ordered = sorted(names, key=lambda name: (-DTYPES[described[name].dtype][1], name))
    header = safetensors_header(
        {name: described[name] for name in ordered}, metadata={"format": "pt"}
    )
    size = len(header) + sum(described[name].nbytes for name in ordered)
    parts = (part for name in ordered for part in _chunks(name, described[name], read))
    with convert_disk_errors(path, by="export", needed=size):
        return write_durably(path, chain([header], parts))


def _chunks(name: str, described: Stored, read: Weights) -> Iterator[memoryview]:
    """Yield the bytes of a tensor in its order, a bounded number at a time."""
    import torch  # noqa: PLC0415 - the command line plans, refuses and verifies without it

    most = max(1, _CHUNK // DTYPES[described.dtype][1])
    for shape, offset in row_boxes(described.shape, most):
        part = read(name, shape, offset).to(getattr(torch, described.dtype)).contiguous()
        yield part.reshape(-1).view(torch.uint8).numpy().data


def row_boxes(
    shape: Sizes, most: int, offset: Sizes | None = None
) -> Iterator[tuple[Sizes, Sizes]]:
    """Cut a box into boxes that lie one after another in row-major order, (shape, offset) each.

    Args:
        shape: The shape of the box.
        most: How many elements a part may have.
        offset: Where the box begins, by default at the beginning.

    Examples:
        >>> list(row_boxes((2, 3), 3))
        [((1, 3), (0, 0)), ((1, 3), (1, 0))]
    """
    offset = offset or (0,) * len(shape)
    if math.prod(shape) <= most:
        if math.prod(shape):
            yield shape, offset
        return
    cut = next(dim for dim, size in enumerate(shape) if size > 1)
    rows = max(1, most // math.prod(shape[cut + 1 :]))
    for first in range(0, shape[cut], rows):
        count = min(rows, shape[cut] - first)
        start = (*offset[:cut], offset[cut] + first, *offset[cut + 1 :])
        yield from row_boxes((*shape[:cut], count, *shape[cut + 1 :]), most, start)


# --------------------------------------------------------------------------------------- folders


def _check_target(target: Path, *, overwrite: bool) -> None:
    if not (target.exists() or target.is_symlink()):
        return
    if not overwrite:
        raise ConfigError(
            f"export: {target} is there already",
            where=str(target),
            hint="name another folder, or give --overwrite to replace what an export wrote",
        )
    problem = "is not a folder that an export wrote"
    with suppress(CheckpointError):
        manifest = read_manifest(target, form=WEIGHTS)
        extra = {entry.name for entry in target.iterdir()} - {*manifest["files"], MANIFEST}
        problem = f"also holds {min(extra)!r}, which would be lost" if extra else ""
    if problem or target.is_symlink():
        raise ConfigError(
            f"export: {target} {problem or 'is a link'}; it is not overwritten",
            where=str(target),
            hint="name another folder, or move what is there",
        )
