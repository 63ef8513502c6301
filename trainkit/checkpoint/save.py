"""Write a checkpoint: every rank its boxes, rank 0 the rest, one rename to commit."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import orjson
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from trainkit.checkpoint.facts import Facts, facts_at
from trainkit.checkpoint.manifest import (
    MANIFEST,
    disk_error,
    hash_file,
    make_manifest,
    next_name,
    sync_directory,
    write_durably,
)
from trainkit.checkpoint.tensors import (
    check_optimizer,
    group_options,
    model_tensors,
    optimizer_state,
    replica_of,
    run_tensors,
    state_hash,
    tied_copies_of,
)
from trainkit.collectives import all_gather_json, together
from trainkit.parallel.naming import Box, box_of
from trainkit.parallel.reduction import reducers_of, reshard_
from trainkit.types import DiskError, ParallelState, TrainState


def save_checkpoint(
    run_dir: Path | str,
    state: TrainState,
    stages: Sequence[nn.Module],
    optimizer: torch.optim.Optimizer,
    ps: ParallelState,
    *,
    facts: Facts | None = None,
) -> Path:
    """Write a checkpoint of a run; it is there completely, or not at all.

    Args:
        run_dir: The run directory, on a disk that all ranks share; checkpoints go to
            `run_dir/checkpoints`.
        state: The counters of the run.
        stages: This rank's stages.
        optimizer: The optimizer of their parameters.
        ps: The layout.
        facts: Anything that JSON holds, for `resume` to compare: for instance the configuration. Or
            a function from the step to that.

    Returns:
        The new directory; a second save of a step appends `-1`.

    Raises:
        DiskError: A rank could not write. Then all ranks raise, nothing is committed, and nothing
            old has changed.

    Effects:
        Writes to disk and waits until it is durable; communicates on `ps.world`. The run is not
        changed.
    """
    directory = Path(run_dir) / "checkpoints"
    staging = directory / all_gather_json(f".staging-{secrets.token_hex(8)}", ps.world)[0]
    try:
        outcomes = together(lambda: _write_rank(staging, stages, optimizer, ps), ps.world)

        def commit() -> str | None:
            if ps.world.index:
                return None
            memory = {
                "class": type(optimizer).__name__,
                "options": group_options(optimizer),
                "scalars": _joined(outcome["scalars"] for outcome in outcomes),
            }
            files = {
                "state.json": _describe(state, memory, ps, facts_at(facts, state.step)),
                "index.json": _dump({"tensors": _merge([out["tensors"] for out in outcomes])}),
            }
            written = _joined(outcome["files"] for outcome in outcomes)
            return str(_commit(staging, directory, state.step, files, written))

        return Path(together(commit, ps.world)[0])
    finally:
        if ps.world.index == 0:  # nothing is left of it after a commit
            shutil.rmtree(staging, ignore_errors=True)


def require_space(run_dir: Path | str, stages: Iterable[nn.Module], *, copies: int = 3) -> None:
    """Refuse to begin where the disk has no room for one checkpoint.

    Args:
        run_dir: The run directory, which exists.
        stages: This rank's stages.
        copies: Tensors of a parameter's size in a checkpoint; with AdamW the parameter and two.

    Raises:
        DiskError: Names the bytes that this rank will need and those that are free.

    Examples:
        >>> require_space("/", [nn.Linear(1, 1)])
    """
    needed = copies * sum(box_of(tensor).local.nbytes for tensor in model_tensors(stages).values())
    free = shutil.disk_usage(run_dir).free
    if free < needed:
        raise DiskError(
            f"require_space: a checkpoint in {run_dir} needs about {needed} bytes and {free} are "
            "free",
            where=run_dir,
            got=free,
            want=needed,
            hint="free space or choose another --out",
        )


def write_final(
    run_dir: Path | str,
    state: TrainState,
    stages: Sequence[nn.Module],
    optimizer: torch.optim.Optimizer,
    ps: ParallelState,
) -> None:
    """Write `final.json`: the step, the tokens and the hash with which a run has ended.

    Effects:
        Writes a file on the first rank, by a rename; communicates on `ps.world`.
    """
    end = {
        "step": state.step,
        "tokens_total": int(state.tokens),
        "state_hash": state_hash(state, stages, optimizer, ps),
    }
    if ps.world.index == 0:
        new = Path(run_dir) / ".final.json"
        new.write_bytes(_dump(end) + b"\n")
        new.replace(Path(run_dir) / "final.json")


def _joined(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    return {name: value for part in parts for name, value in part.items()}


def _boxes_to_write(
    stages: Sequence[nn.Module], optimizer: torch.optim.Optimizer, ps: ParallelState
) -> dict[str, tuple[Tensor, Box]]:
    found = {}
    for name, tensor in run_tensors(stages, optimizer).items():
        box = box_of(tensor, replica=replica_of(ps))
        if box.writes:
            found[name] = (tensor, box)
    return found


@contextmanager
def _disk_errors(path: Path, needed: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise disk_error(error, path, needed) from error


def _write_rank(
    staging: Path,
    stages: Sequence[nn.Module],
    optimizer: torch.optim.Optimizer,
    ps: ParallelState,
) -> dict[str, Any]:
    """Write this rank's boxes into one file; return what the index and the manifest say of them."""
    for stage in stages:
        reshard_(reducers_of(stage))
    check_optimizer(stages, optimizer)
    boxes = _boxes_to_write(stages, optimizer, ps)
    path = staging / f"rank_{ps.world.index:05d}.safetensors"
    tensors = {
        name: {
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": list(tensor.shape),
            "boxes": [{"offset": box.offset, "shape": list(box.local.shape), "file": path.name}]
            * bool(box.local.numel()),
        }
        for name, (tensor, box) in boxes.items()
    }
    values = {
        name: box.local.contiguous().cpu() for name, (_, box) in boxes.items() if box.local.numel()
    }
    report = {"tensors": tensors, "files": {}, "scalars": _scalars(stages, optimizer)}
    with _disk_errors(path, sum(value.nbytes for value in values.values())):
        staging.mkdir(parents=True, exist_ok=True)
        if values:
            _save_tensors(values, path)
            report["files"] = {path.name: hash_file(path)}
    return report


def _save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    try:
        save_file(tensors, path)
    except Exception as error:  # safetensors raises its own type for what the system refused
        code = next((c for c in (28, 122, 27, 30, 5, 13) if f"os error {c}" in str(error)), None)
        if code is None:
            raise
        raise OSError(code, os.strerror(code), str(path)) from error
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _merge(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join the boxes that different ranks wrote of one tensor; of equal boxes the first stands."""
    merged: dict[str, Any] = {}
    for part in parts:
        for name, entry in part.items():
            known = merged.setdefault(name, {**entry, "boxes": []})["boxes"]
            offsets = [box["offset"] for box in known]
            known += [box for box in entry["boxes"] if box["offset"] not in offsets]
    return merged


def _scalars(
    stages: Sequence[nn.Module], optimizer: torch.optim.Optimizer
) -> dict[str, dict[str, Any]]:
    """Return what the optimizer remembers of each parameter that it steps besides tensors."""
    copies = tied_copies_of(stages)
    return {
        name: {key: value for key, value in values.items() if not isinstance(value, Tensor)}
        for name, values in optimizer_state(stages, optimizer).items()
        if name not in copies
    }


def _describe(
    state: TrainState,
    memory: Mapping[str, Any],
    ps: ParallelState,
    facts: Mapping[str, Any],
) -> bytes:
    axes = ("pp", "dp_replicate", "dp_shard", "ring", "ulysses", "tp", "ep")
    return _dump(
        {
            "state": attrs.asdict(attrs.evolve(state, tokens=int(state.tokens))),
            "optimizer": memory,
            "layout": {axis: getattr(ps, axis).count for axis in axes},
            "torch": torch.__version__,
            "facts": dict(facts),
        }
    )


def _dump(value: Any) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS | orjson.OPT_INDENT_2)


def _commit(
    staging: Path,
    directory: Path,
    step: int,
    files: Mapping[str, bytes],
    written: Mapping[str, Mapping[str, Any]],
) -> Path:
    """Write what rank 0 writes, then the manifest, then give the directory its name."""
    with _disk_errors(directory, sum(map(len, files.values()))):
        for name, data in files.items():
            write_durably(staging / name, data)
        listing = {**written, **{name: hash_file(staging / name) for name in files}}
        write_durably(staging / MANIFEST, make_manifest(step, listing))
        sync_directory(staging)
        target = directory / next_name(directory, step)
        staging.rename(target)
        sync_directory(directory)
    return target
