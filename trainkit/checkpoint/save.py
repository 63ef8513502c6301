"""Write a checkpoint: every rank its boxes, rank 0 the rest, one rename to commit."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import orjson
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from trainkit.checkpoint.manifest import (
    MANIFEST,
    disk_error,
    hash_file,
    make_manifest,
    next_name,
    sync_directory,
    write_durably,
)
from trainkit.checkpoint.tensors import optimizer_state, replica_of, run_tensors, state_hash
from trainkit.collectives import all_gather_json
from trainkit.parallel.naming import Box, box_of
from trainkit.types import DiskError, ParallelState, TrainState


def save_checkpoint(
    run_dir: Path | str,
    state: TrainState,
    stages: Sequence[nn.Module],
    optimizer: torch.optim.Optimizer,
    ps: ParallelState,
    *,
    facts: Mapping[str, Any] | None = None,
) -> Path:
    """Write a checkpoint of a run; it is there completely, or not at all.

    Args:
        run_dir: The run directory, on a disk that all ranks share; checkpoints go to
            `run_dir/checkpoints`.
        state: The counters of the run.
        stages: This rank's stages.
        optimizer: The optimizer of their parameters.
        ps: The layout.
        facts: Anything that JSON holds, kept for readers: for instance the configuration.

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
    staging = directory / _shared_name(ps)
    boxes = _boxes_to_write(stages, optimizer, ps)
    outcome = _attempt(lambda: _write_rank(staging, boxes, ps), staging, boxes)
    outcomes = all_gather_json(outcome | {"scalars": _scalars(stages, optimizer)}, ps.world)
    target = directory / next_name(directory, state.step)
    if not any(outcome["error"] for outcome in outcomes) and ps.world.index == 0:
        scalars = {name: values for out in outcomes for name, values in out["scalars"].items()}
        memory = {"class": type(optimizer).__name__, "scalars": scalars}
        files = {"state.json": _describe(state, memory, ps, facts)}
        files["index.json"] = _dump({"tensors": _merge([out["tensors"] for out in outcomes])})
        written = {name: facts for out in outcomes for name, facts in out["files"].items()}
        outcome = _attempt(
            lambda: _commit(staging, target, state.step, files, written), staging, boxes
        )
    # What rank 0 says last decides: all ranks have saved, or none has.
    results = all_gather_json(outcome | {"target": str(target)}, ps.world)
    errors = [result["error"] for result in results if result["error"]]
    if errors:
        if ps.world.index == 0:
            shutil.rmtree(staging, ignore_errors=True)
        raise DiskError(errors[0], where=directory, hint="every earlier checkpoint is intact")
    return Path(results[0]["target"])


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


def _shared_name(ps: ParallelState) -> str:
    """Return rank 0's name for the staging directory, which nobody else uses."""
    return all_gather_json(f".staging-{secrets.token_hex(8)}", ps.world)[0]


def _boxes_to_write(
    stages: Sequence[nn.Module], optimizer: torch.optim.Optimizer, ps: ParallelState
) -> dict[str, tuple[Tensor, Box]]:
    found = {}
    for name, tensor in run_tensors(stages, optimizer).items():
        box = box_of(tensor, replica=replica_of(ps))
        if box.writes and box.local.numel():
            found[name] = (tensor, box)
    return found


def _attempt(write: Any, path: Path, boxes: Mapping[str, tuple[Tensor, Box]]) -> dict[str, Any]:
    """Run a write; turn its failure into a value that can be told to the other ranks."""
    try:
        return {"error": None, **write()}
    except OSError as error:
        needed = sum(box.local.nbytes for _, box in boxes.values())
        return {"error": disk_error(error, path, needed).what, "tensors": {}, "files": {}}


def _write_rank(
    staging: Path, boxes: Mapping[str, tuple[Tensor, Box]], ps: ParallelState
) -> dict[str, Any]:
    """Write this rank's boxes into one file; return what the index and the manifest say of them."""
    staging.mkdir(parents=True, exist_ok=True)
    if not boxes:
        return {"tensors": {}, "files": {}}
    path = staging / f"rank_{ps.world.index:05d}.safetensors"
    _save_tensors({name: box.local.contiguous().cpu() for name, (_, box) in boxes.items()}, path)
    tensors = {
        name: {
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": list(tensor.shape),
            "boxes": [{"offset": box.offset, "shape": list(box.local.shape), "file": path.name}],
        }
        for name, (tensor, box) in boxes.items()
    }
    return {"tensors": tensors, "files": {path.name: hash_file(path)}}


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
    """Join the boxes that different ranks wrote of one tensor."""
    merged: dict[str, Any] = {}
    for part in parts:
        for name, entry in part.items():
            if name in merged:
                merged[name]["boxes"] += entry["boxes"]
            else:
                merged[name] = dict(entry)
    return merged


def _scalars(
    stages: Sequence[nn.Module], optimizer: torch.optim.Optimizer
) -> dict[str, dict[str, Any]]:
    """Return what the optimizer remembers of each parameter that it steps besides tensors."""
    return {
        name: {key: value for key, value in values.items() if not isinstance(value, Tensor)}
        for name, values in optimizer_state(stages, optimizer).items()
    }


def _describe(
    state: TrainState,
    memory: Mapping[str, Any],
    ps: ParallelState,
    facts: Mapping[str, Any] | None,
) -> bytes:
    axes = ("pp", "dp_replicate", "dp_shard", "ring", "ulysses", "tp", "ep")
    return _dump(
        {
            "state": attrs.asdict(attrs.evolve(state, tokens=int(state.tokens))),
            "optimizer": memory,
            "layout": {axis: getattr(ps, axis).count for axis in axes},
            "torch": torch.__version__,
            "facts": dict(facts or {}),
        }
    )


def _dump(value: Any) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS | orjson.OPT_INDENT_2)


def _commit(
    staging: Path,
    target: Path,
    step: int,
    files: Mapping[str, bytes],
    written: Mapping[str, Mapping[str, Any]],
) -> dict[str, Any]:
    """Write what rank 0 writes, then the manifest, then give the directory its name."""
    for name, data in files.items():
        write_durably(staging / name, data)
    listing = {**written, **{name: hash_file(staging / name) for name in files}}
    write_durably(staging / MANIFEST, make_manifest(step, listing))
    sync_directory(staging)
    staging.rename(target)
    sync_directory(target.parent)
    return {}
