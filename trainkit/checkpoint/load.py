"""Read a checkpoint into any layout: verify, compare, read all, and only then change the run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from safetensors import safe_open
from torch import Tensor, nn

from trainkit.checkpoint.manifest import choose_checkpoint, read_json
from trainkit.checkpoint.tensors import model_tensors, optimizer_state
from trainkit.collectives import all_gather_json
from trainkit.parallel.naming import Box, box_of, named_parameters_of
from trainkit.types import CheckpointError, Cursor, ParallelState, TrainState


def resume(
    run_dir: Path | str,
    state: TrainState,
    stages: Sequence[nn.Module],
    optimizer: torch.optim.Optimizer,
    ps: ParallelState,
    *,
    request: str | Path = "auto",
    tell: Callable[[str], None] = print,
) -> TrainState:
    """Go on from a checkpoint of a run, written by any layout.

    Args:
        run_dir: The run directory.
        state: The counters of a fresh run, returned when there is nothing to go on from.
        stages: This rank's stages, filled with anything.
        optimizer: The optimizer of their parameters.
        ps: The layout.
        request: "auto" takes the newest checkpoint that verifies, "never" takes none, a path takes
            that one.
        tell: Called on rank 0 with what was passed over and what was taken.

    Returns:
        The counters to go on with.

    Raises:
        CheckpointError: Nothing verifies where there is something, or it does not fit the run.

    Effects:
        Writes parameters and optimizer state, after everything has been read and compared;
        communicates on `ps.world`.
    """
    chosen: dict[str, str | None] = {"path": None, "error": None}
    if ps.world.index == 0:
        try:
            path = choose_checkpoint(Path(run_dir) / "checkpoints", request, tell=tell)
            if path is not None:
                tell(f"going on from {path}")
                chosen["path"] = str(path.absolute())
        except CheckpointError as error:
            chosen["error"] = error.what
    chosen = all_gather_json(chosen, ps.world)[0]
    if chosen["error"]:
        raise CheckpointError(chosen["error"], where=run_dir)
    if chosen["path"] is None:
        return state
    return load_checkpoint(Path(chosen["path"]), stages, optimizer)


def load_checkpoint(
    path: Path, stages: Sequence[nn.Module], optimizer: torch.optim.Optimizer
) -> TrainState:
    """Read one checkpoint, which has been verified, into stages and their optimizer.

    Returns:
        The counters it holds.

    Raises:
        CheckpointError: Names every tensor that is missing, left over, or of another shape or
            dtype.

    Effects:
        Writes parameters and optimizer state, after everything has been read and compared.
    """
    index = read_json(path / "index.json")["tensors"]
    saved = read_json(path / "state.json")
    targets = _targets(index, stages, optimizer)
    _compare(index, targets, path, more=_optimizer_problems(saved["optimizer"], stages, optimizer))
    values = {name: _read_box(path, name, index[name], box_of(t)) for name, t in targets.items()}
    with torch.no_grad():
        for name, target in targets.items():
            box_of(target).local.copy_(values[name])
    _install(targets, saved["optimizer"]["scalars"], stages, optimizer)
    return _state_from(saved["state"])


def load_weights(path: Path, stages: Sequence[nn.Module]) -> TrainState:
    """Read the parameters of one verified checkpoint and leave the optimizer state aside.

    Returns:
        The counters it holds.

    Raises:
        CheckpointError: Names every parameter that is missing, left over, or of another shape or
            dtype.

    Effects:
        Writes the parameters of `stages`.
    """
    index = read_json(path / "index.json")["tensors"]
    weights = {name: entry for name, entry in index.items() if name.startswith("model/")}
    targets = model_tensors(stages)
    _compare(weights, targets, path)
    values = {name: _read_box(path, name, index[name], box_of(t)) for name, t in targets.items()}
    with torch.no_grad():
        for name, target in targets.items():
            box_of(target).local.copy_(values[name])
    return _state_from(read_json(path / "state.json")["state"])


def read_facts(path: Path) -> dict[str, Any]:
    """Return the facts that were saved with a checkpoint, which has been verified."""
    return read_json(path / "state.json")["facts"]


def _state_from(saved: Mapping[str, Any]) -> TrainState:
    cursor = Cursor(saved["cursor"]["batch"], tuple(saved["cursor"]["stream"]))
    return TrainState(saved["step"], saved["tokens"], cursor, saved["health"])


# ----------------------------------------------------------------------------------------- targets


def _targets(
    index: Mapping[str, Any], stages: Sequence[nn.Module], optimizer: torch.optim.Optimizer
) -> dict[str, Tensor]:
    """Return the live parameters, and for the optimizer new tensors of the layout to read into.

    An optimizer that has not stepped holds no moments, so they are made like their parameter where
    the shape is the parameter's, and as plain tensors elsewhere (the step counter).
    """
    named = named_parameters_of(stages)
    targets = model_tensors(stages)
    on_device = {
        id(p): group.get("fused") or group.get("capturable")
        for group in optimizer.param_groups
        for p in group["params"]
    }
    for full, entry in index.items():
        kind, *rest = full.split("/", 2)
        parameter = named.get(rest[-1])
        if kind != "optimizer" or parameter is None or id(parameter) not in on_device:
            continue
        dtype = getattr(torch, entry["dtype"])
        if tuple(entry["shape"]) == tuple(parameter.shape) and parameter.dim():
            targets[full] = torch.zeros_like(parameter.data, dtype=dtype)
        else:
            device = parameter.device if on_device[id(parameter)] else "cpu"
            targets[full] = torch.zeros(entry["shape"], dtype=dtype, device=device)
    return targets


def _optimizer_problems(
    saved: Mapping[str, Any], stages: Sequence[nn.Module], optimizer: torch.optim.Optimizer
) -> list[str]:
    """Say where the saved optimizer is not the run's: moments must never begin afresh unseen."""
    if saved["class"] != type(optimizer).__name__:
        return [f"its optimizer is {saved['class']}, the run has {type(optimizer).__name__}"]
    live = optimizer_state(stages, optimizer)
    return [f"{name} was not trained when it was saved" for name in live.keys() - saved["scalars"]]


def _compare(
    index: Mapping[str, Any],
    targets: Mapping[str, Tensor],
    path: Path,
    *,
    more: Sequence[str] = (),
) -> None:
    """Refuse a checkpoint that does not hold exactly the run's tensors; name all differences."""
    problems = [f"{name} is missing in the checkpoint" for name in targets if name not in index]
    problems += more
    problems += [f"{name} is left over" for name in index if name not in targets]
    for name in targets.keys() & index.keys():
        want = (str(targets[name].dtype).removeprefix("torch."), list(targets[name].shape))
        found = (index[name]["dtype"], index[name]["shape"])
        if want != found:
            problems.append(f"{name} is {found[0]}{found[1]}, the run has {want[0]}{want[1]}")
    if problems:
        shown = "; ".join(sorted(problems)[:10])
        more = f"; and {len(problems) - 10} more" if len(problems) > 10 else ""
        raise CheckpointError(
            f"load_checkpoint: {path} does not fit the run: {shown}{more}",
            where=path,
            got=sorted(problems),
        )


def _install(
    targets: Mapping[str, Tensor],
    scalars: Mapping[str, Mapping[str, Any]],
    stages: Sequence[nn.Module],
    optimizer: torch.optim.Optimizer,
) -> None:
    """Give the optimizer the moments that were read."""
    optimizer.state.clear()
    named = named_parameters_of(stages)
    for full, tensor in targets.items():
        kind, *rest = full.split("/", 2)
        if kind == "optimizer":
            optimizer.state[named[rest[1]]][rest[0]] = tensor
    for name, values in scalars.items():
        optimizer.state[named[name]].update(values)


# ------------------------------------------------------------------------------------------- boxes


@attrs.frozen
class _Overlap:
    """Where two boxes meet: slices into the saved one and into the wanted one."""

    saved: tuple[slice, ...]
    wanted: tuple[slice, ...]
    size: int


def _overlap(saved: Mapping[str, Any], wanted: Box) -> _Overlap | None:
    """Intersect a saved box with a wanted one.

    Examples:
        >>> box = Box(torch.zeros(2, 2), (4, 2), (1, 0), writes=True)
        >>> found = _overlap({"offset": [2, 0], "shape": [2, 2]}, box)
        >>> found.saved[0], found.wanted[0]
        (slice(0, 1, None), slice(1, 2, None))
    """
    ours: list[slice] = []
    theirs: list[slice] = []
    size = 1
    dims = zip(saved["offset"], saved["shape"], wanted.offset, wanted.local.shape, strict=True)
    for start, length, own_start, own_length in dims:
        low, high = max(start, own_start), min(start + length, own_start + own_length)
        if low >= high:
            return None
        theirs.append(slice(low - start, high - start))
        ours.append(slice(low - own_start, high - own_start))
        size *= high - low
    return _Overlap(tuple(theirs), tuple(ours), size)


def _read_box(path: Path, name: str, entry: Mapping[str, Any], box: Box) -> Tensor:
    """Read this rank's box of a tensor from the boxes that were saved of it."""
    out = torch.empty(box.local.shape, dtype=getattr(torch, entry["dtype"]))
    read = 0
    for saved in entry["boxes"]:
        overlap = _overlap(saved, box)
        if overlap is None:
            continue
        with safe_open(path / saved["file"], framework="pt") as file:
            if saved["shape"]:
                out[overlap.wanted] = file.get_slice(name)[overlap.saved]
            else:
                out.copy_(file.get_tensor(name))
        read += overlap.size
    if read != math.prod(box.local.shape):
        raise CheckpointError(
            f"load_checkpoint: the boxes of {name} in {path} hold {read} of the "
            f"{math.prod(box.local.shape)} elements that this rank needs",
            where=path,
            got=read,
        )
    return out
