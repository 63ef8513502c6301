"""Read a checkpoint into any layout: verify, compare, read all, and only then change the run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from safetensors import safe_open
from torch import Tensor, nn

from trainkit.checkpoint.facts import Facts, agree_on_facts, fact_problems, facts_at
from trainkit.checkpoint.manifest import (
    choose_checkpoint,
    clear_directory,
    plain_file_name,
    read_json,
)
from trainkit.checkpoint.tensors import (
    check_optimizer,
    group_options,
    model_tensors,
    optimizer_state,
)
from trainkit.collectives import together
from trainkit.parallel.naming import COPY_SUFFIX, Box, box_of, named_parameters_of
from trainkit.parallel.reduction import reducers_of, reshard_
from trainkit.types import (
    SOLO,
    Axis,
    CheckpointError,
    Cursor,
    ParallelState,
    TrainState,
)


def resume(
    run_dir: Path | str,
    state: TrainState,
    stages: Sequence[nn.Module],
    optimizer: torch.optim.Optimizer,
    ps: ParallelState,
    *,
    request: str | Path = "auto",
    facts: Facts | None = None,
    tell: Callable[[str], None] = print,
) -> TrainState:
    """Go on from a checkpoint of a run, written by any layout.

    Checkpoints of the run that are not on the branch that it goes on with (all of them after
    "never", later ones after a path) are set aside in `checkpoints/abandoned-1`, so that "auto"
    never goes back to them; nothing is deleted but what a killed save left half done.

    Args:
        run_dir: The run directory.
        state: The counters of a fresh run, returned when there is nothing to go on from.
        stages: This rank's stages, filled with anything.
        optimizer: The optimizer of their parameters.
        ps: The layout.
        request: "auto" takes the newest checkpoint that verifies, "never" takes none, a path takes
            that one.
        facts: What must be as it was saved, for instance the fingerprint of the data, or a function
            from a step to that, for what only the steps before it can have changed; the same on all
            ranks.
        tell: Called on rank 0 with what was passed over, taken and set aside.

    Returns:
        The counters to go on with.

    Raises:
        CheckpointError: Nothing verifies where there is something, or it does not fit the run.
        ConfigError: The ranks do not agree on `facts`.

    Effects:
        Writes parameters and optimizer state, on all ranks or on none, after everything has been
        read and compared; moves directories; communicates on `ps.world`.
    """
    directory = Path(run_dir) / "checkpoints"
    agree_on_facts(facts_at(facts, sys.maxsize), ps.world)

    def choose() -> str | None:
        if ps.world.index:
            return None
        path = choose_checkpoint(directory, request, tell=tell)
        if path is not None:
            tell(f"going on from {path}")
        clear_directory(directory, path, request, tell=tell)
        return None if path is None else str(path.absolute())

    chosen = together(choose, ps.world)[0]
    if chosen is None:
        return state
    return load_checkpoint(chosen, stages, optimizer, facts=facts, axis=ps.world)


def load_checkpoint(
    path: Path | str,
    stages: Sequence[nn.Module],
    optimizer: torch.optim.Optimizer,
    *,
    facts: Facts | None = None,
    axis: Axis = SOLO,
) -> TrainState:
    """Read one checkpoint, which has been verified, into stages and their optimizer.

    Args:
        path: The checkpoint's directory.
        stages: This rank's stages.
        optimizer: The optimizer of their parameters.
        facts: What must be as it was saved; see `resume`.
        axis: All ranks that read it, `ps.world`: if one cannot, none changes anything.

    Returns:
        The counters it holds.

    Raises:
        CheckpointError: Names every tensor that is missing, left over, or of another shape or
            dtype, and every fact that differs.

    Effects:
        Writes parameters and optimizer state, after everything has been read and compared;
        communicates on `axis`.
    """
    path = Path(path)
    read: dict[str, Any] = {}

    def look() -> list[str]:
        for module in stages:
            reshard_(reducers_of(module))
        check_optimizer(stages, optimizer)
        read["index"] = read_json(path / "index.json")["tensors"]
        read["saved"] = read_json(path / "state.json")
        read["targets"] = _targets(read["index"], stages, optimizer)
        return list(read["targets"])

    wanted = {name for names in together(look, axis) for name in names}

    def stage() -> None:
        step = read["saved"]["state"]["step"]
        problems = fact_problems(read["saved"]["facts"], facts_at(facts, step))
        problems += _optimizer_problems(read["saved"]["optimizer"], stages, optimizer)
        _compare(read["index"], read["targets"], path, wanted=wanted, also=problems)
        read["values"] = _read_all(path, read["index"], read["targets"])

    together(stage, axis)
    _write_all(read["targets"], read["values"])
    _install(read["targets"], read["saved"]["optimizer"]["scalars"], stages, optimizer)
    return _state_from(read["saved"]["state"])


def load_weights(path: Path | str, stages: Sequence[nn.Module], *, axis: Axis = SOLO) -> TrainState:
    """Read the parameters of one verified checkpoint and leave the optimizer state aside.

    Args:
        path: The checkpoint's directory.
        stages: This rank's stages.
        axis: The ranks that hold the other stages, `ps.pp` or `ps.world`.

    Returns:
        The counters it holds.

    Raises:
        CheckpointError: Names every parameter that is missing, left over, or of another shape or
            dtype.

    Effects:
        Writes the parameters and persistent buffers of `stages`; communicates on `axis`.
    """
    path = Path(path)
    targets = model_tensors(stages)
    wanted = {name for names in together(lambda: list(targets), axis) for name in names}
    index = read_json(path / "index.json")["tensors"]
    weights = {name: entry for name, entry in index.items() if name.startswith("model/")}
    _compare(weights, targets, path, wanted=wanted)
    _write_all(targets, _read_all(path, weights, targets))
    return _state_from(read_json(path / "state.json")["state"])


def _read_all(
    path: Path, index: Mapping[str, Any], targets: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    return {
        name: _read_box(path, _saved(name), index[_saved(name)], box_of(x))
        for name, x in targets.items()
    }


def _saved(name: str) -> str:
    """Return the name under which a tensor is saved: a tied copy has its owner's."""
    return name.removesuffix(COPY_SUFFIX)


def _write_all(targets: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, target in targets.items():
            box_of(target).local.copy_(values[name])


def read_facts(path: Path | str) -> dict[str, Any]:
    """Return the facts that were saved with a checkpoint, which has been verified."""
    return read_json(Path(path) / "state.json")["facts"]


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
        if kind != "optimizer":
            continue
        dtype = getattr(torch, entry["dtype"])
        for suffix in ("", COPY_SUFFIX):
            parameter = named.get(rest[-1] + suffix)
            if parameter is None or id(parameter) not in on_device:
                continue
            if tuple(entry["shape"]) == tuple(parameter.shape) and parameter.dim():
                made = torch.zeros_like(parameter.data, dtype=dtype)
            else:
                counter = not entry["shape"] and not on_device[id(parameter)]
                device = "cpu" if counter else parameter.device
                made = torch.zeros(entry["shape"], dtype=dtype, device=device)
            targets[full + suffix] = made
    return targets


def _optimizer_problems(
    saved: Mapping[str, Any], stages: Sequence[nn.Module], optimizer: torch.optim.Optimizer
) -> list[str]:
    """Say where the saved optimizer is not the run's: moments must never begin afresh unseen."""
    if saved["class"] != type(optimizer).__name__:
        return [f"its optimizer is {saved['class']}, the run has {type(optimizer).__name__}"]
    live = optimizer_state(stages, optimizer)
    names = {_saved(name) for name in live} - saved["scalars"].keys()
    problems = [f"{name} was not trained when it was saved" for name in names]
    options = group_options(optimizer)
    if len(options) != len(saved["options"]):
        return [*problems, f"it has {len(saved['options'])} parameter groups, not {len(options)}"]
    for group, (old, new) in enumerate(zip(saved["options"], options, strict=True)):
        names = sorted(name for name in old | new if old.get(name) != new.get(name))
        problems += [
            f"parameter group {group} has {name} = {old.get(name)}, the run's has {new.get(name)}"
            for name in names
        ]
    return problems


def _compare(
    index: Mapping[str, Any],
    targets: Mapping[str, Tensor],
    path: Path,
    *,
    wanted: Collection[str],
    also: Sequence[str] = (),
) -> None:
    """Refuse a checkpoint that does not hold exactly the run's tensors; name all differences.

    `wanted` are the names of the tensors of all ranks, of which a pipeline rank has some.
    """
    targets = {_saved(name): tensor for name, tensor in targets.items()}
    problems = [f"{name} is missing in the checkpoint" for name in targets if name not in index]
    problems += also
    problems += [f"{name} is left over" for name in index if name not in wanted]
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
            hint="name another --out, or begin afresh here with --resume never",
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
        for parameter in (named.get(name), named.get(name + COPY_SUFFIX)):
            if parameter is not None:
                optimizer.state[parameter].update(values)


# ------------------------------------------------------------------------------------------- boxes


@attrs.frozen
class _Overlap:
    """Where two boxes meet: slices into the saved one and into the wanted one."""

    saved: tuple[slice, ...]
    wanted: tuple[slice, ...]


def _overlap(saved: Mapping[str, Any], wanted: Box) -> _Overlap | None:
    """Intersect a saved box with a wanted one.

    Examples:
        >>> box = Box(torch.zeros(2, 2), (4, 2), (1, 0), writes=True)
        >>> found = _overlap({"offset": [2, 0], "shape": [2, 2]}, box)
        >>> found.saved[0], found.wanted[0]
        (slice(0, 1, None), slice(1, 2, None))
    """
    in_saved: list[slice] = []
    in_wanted: list[slice] = []
    dims = zip(saved["offset"], saved["shape"], wanted.offset, wanted.local.shape, strict=True)
    for start, length, own_start, own_length in dims:
        low, high = max(start, own_start), min(start + length, own_start + own_length)
        if low >= high:
            return None
        in_saved.append(slice(low - start, high - start))
        in_wanted.append(slice(low - own_start, high - own_start))
    return _Overlap(tuple(in_saved), tuple(in_wanted))


def _read_box(path: Path, name: str, entry: Mapping[str, Any], box: Box) -> Tensor:
    """Read this rank's box of a tensor from the boxes that were saved of it."""
    out = torch.empty(box.local.shape, dtype=getattr(torch, entry["dtype"]))
    filled = torch.zeros(box.local.shape, dtype=torch.bool)
    for saved in entry["boxes"]:
        overlap = _overlap(saved, box)
        if overlap is None:
            continue
        if not plain_file_name(saved["file"]):
            raise CheckpointError(f"load_checkpoint: {path} names the file {saved['file']!r}")
        with safe_open(path / saved["file"], framework="pt") as file:
            if saved["shape"]:
                out[overlap.wanted] = file.get_slice(name)[overlap.saved]
            else:
                out.copy_(file.get_tensor(name))
        filled[overlap.wanted] = True
    if not filled.all():
        raise CheckpointError(
            f"load_checkpoint: the boxes of {name} in {path} hold {int(filled.sum())} of the "
            f"{filled.numel()} elements that this rank needs",
            where=path,
            got=int(filled.sum()),
        )
    return out
