"""Where a checkpoint's tensors go: the run's parameters, and new tensors for the moments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import attrs
import torch
from torch import nn

from trainkit.optim.offload import in_host_memory, is_offloaded
from trainkit.optim.storage import BLOCK
from trainkit.parallel.names import (
    COPY_SUFFIX,
    empty_rows_like,
    get_local_box,
    get_named_parameters,
)
from trainkit.weights.checkpoint.optimizer_internals import optimizers_in
from trainkit.weights.checkpoint.reading import Target
from trainkit.weights.checkpoint.tensors import model_tensors, optimizer_state


def saved_name(name: str) -> str:
    """Return the name under which a tensor is saved: a tied copy has its owner's.

    Examples:
        >>> saved_name("model/embedding.weight (copy)")
        'model/embedding.weight'
    """
    return name.removesuffix(COPY_SUFFIX)


def weight_targets(stages: Sequence[nn.Module]) -> dict[str, Target]:
    """Return the parameters and persistent buffers of this rank's stages as targets.

    Examples:
        >>> list(weight_targets([nn.Linear(1, 1, bias=False)]))
        ['model/weight']
    """
    return {
        name: Target(saved_name(name), x, get_local_box(x))
        for name, x in model_tensors(stages).items()
    }


def moment_targets(
    index: Mapping[str, Any],
    stages: Sequence[nn.Module],
    optimizer: torch.optim.Optimizer,
    is_cast: Callable[[str], bool],
) -> dict[str, Target]:
    """Return new tensors for what the optimizer remembers of the parameters on this rank.

    An optimizer that has not stepped holds no moments, so they are made: placed as their parameter
    where the shape is the parameter's, or differs in the length of its rows alone (the scales of
    8-bit moments), and as plain tensors elsewhere (the step counter).

    Args:
        index: The entries of a checkpoint's index, which have been checked.
        stages: This rank's stages.
        optimizer: The optimizer of their parameters.
        is_cast: Says by an entry's name whether its parameter may be stored in another dtype. A
            moment that had its parameter's dtype then has it again.
    """
    named = get_named_parameters(stages)
    on_device = {
        id(p): bool(group.get("fused") or group.get("capturable"))
        for group in optimizer.param_groups
        for p in group["params"]
    }
    targets: dict[str, Target] = {}
    for full, entry in index.items():
        kind, *rest = full.split("/", 2)
        if kind != "optimizer":
            continue
        weight = index.get(f"model/{rest[1]}", {})
        follows = weight.get("dtype") == entry["dtype"] and is_cast(full)
        for suffix in ("", COPY_SUFFIX):
            parameter = named.get(rest[1] + suffix)
            if parameter is None or id(parameter) not in on_device:
                continue
            shape, dtype = tuple(entry["shape"]), getattr(torch, entry["dtype"])
            if shape == tuple(parameter.shape) and shape:
                made = torch.empty_like(parameter.data, dtype=parameter.dtype if follows else dtype)
            elif len(shape) > 1 and shape[:-1] == tuple(parameter.shape[:-1]):
                made = empty_rows_like(parameter.data, shape[-1], dtype)
            else:
                is_counter = not entry["shape"] and not on_device[id(parameter)]
                device = "cpu" if is_counter else parameter.device
                made = torch.empty(entry["shape"], dtype=dtype, device=device)
            if shape and is_offloaded(optimizer):
                made = in_host_memory(made)
            targets[full + suffix] = Target(full, made, get_local_box(made))
    return targets


def beside(targets: Mapping[str, Target], index: Mapping[str, Any]) -> dict[str, Target]:
    """Return the targets with memory beside the run to be read into; new moments have it already.

    Args:
        targets: What is to be loaded.
        index: The entries of a checkpoint's index.
    """
    made: dict[str, Target] = {}
    for name, target in targets.items():
        local, dtype = target.box.local, getattr(torch, index[target.saved]["dtype"])
        is_new = target.saved.startswith("optimizer/") and local.is_contiguous()
        ready = is_new and local.device.type == "cpu" and local.dtype == dtype
        out = local if ready else torch.empty(local.shape, dtype=dtype)
        made[name] = attrs.evolve(target, out=out)
    return made


def write_targets_(targets: Mapping[str, Target]) -> None:
    """Put what was read where it belongs.

    Effects:
        Writes the parameters, in place.
    """
    with torch.no_grad():
        for target in targets.values():
            if target.out is not target.box.local:
                target.box.local.copy_(target.out)


def install_moments_(
    targets: Mapping[str, Target],
    scalars: Mapping[str, Mapping[str, Any]],
    stages: Sequence[nn.Module],
    optimizer: torch.optim.Optimizer,
) -> None:
    """Give the optimizer the moments that were read, in place of what it remembered.

    Raises:
        ValueError: The optimizer's `state` is a copy: what its parts will step with is elsewhere.

    Effects:
        Replaces the optimizer's state.
    """
    optimizer.state.clear()
    named = get_named_parameters(stages)
    for full, target in targets.items():
        kind, *rest = full.split("/", 2)
        if kind == "optimizer":
            optimizer.state[named[rest[1]]][rest[0]] = target.tensor
    for name, values in scalars.items():
        for parameter in (named.get(name), named.get(name + COPY_SUFFIX)):
            if parameter is not None:
                optimizer.state[parameter].update(values)
    refuse_copies(optimizer)


def refuse_copies(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer whose parts have not got what its own state was given.

    Raises:
        ValueError: They have not.

    Examples:
        >>> refuse_copies(torch.optim.SGD(nn.Linear(1, 1).parameters()))
    """
    for part in optimizers_in(optimizer):
        for p, keys in state_after_a_step(part).items():
            own, given = part.state.get(p, {}), optimizer.state.get(p, {})
            lost = [key for key in keys if own.get(key) is not given.get(key)]
            if lost:
                raise ValueError(
                    f"load_checkpoint: the {type(part).__name__} in {type(optimizer).__name__} "
                    f"has not got {', '.join(sorted(lost))}, which were loaded into a copy: "
                    "`state` must be that of its parts, not made anew"
                )


def expected_state(
    stages: Sequence[nn.Module], optimizer: torch.optim.Optimizer
) -> dict[str, dict[str, Any]]:
    """Return by parameter what the optimizer will remember of it once it has stepped.

    An optimizer says so only by stepping: one of its kind, with the options of each group, steps a
    parameter of its own. One that cannot be made like that is expected to remember nothing.

    Examples:
        >>> model = nn.Linear(1, 1, bias=False)
        >>> expected_state([model], torch.optim.AdamW(model.parameters()))["weight"]["step"]
        tensor(1.)
    """
    by_parameter, named = state_after_a_step(optimizer), get_named_parameters(stages)
    return {
        name: by_parameter[named[name]]
        for name in optimizer_state(stages, optimizer)
        if named[name].requires_grad
    }


def state_after_a_step(optimizer: torch.optim.Optimizer) -> dict[nn.Parameter, dict[str, Any]]:
    """Return what an optimizer will remember of each of its parameters, as small as can be.

    Examples:
        >>> weight = nn.Parameter(torch.ones(7, 3))
        >>> state_after_a_step(torch.optim.SGD([weight], momentum=0.5))[weight]
        {'momentum_buffer': tensor([[0., 0.],
                [0., 0.]])}
    """
    known, found = dict[Any, dict[str, Any]](), dict[nn.Parameter, dict[str, Any]]()
    for number, group in enumerate(optimizer.param_groups):
        for p in group["params"]:
            kind = number, p.dtype, *_probe_shape(p)
            if kind not in known:
                known[kind] = _stepped(optimizer, group, p)
            found[p] = known[kind]
    return found


def _probe_shape(p: nn.Parameter) -> tuple[int, ...]:
    """Return a small shape of which an optimizer remembers what it does of the parameter's."""
    least = [min(size, 2) for size in p.shape] or [1]  # so that a number is told from a count
    return (*least[:-1], BLOCK) if p.dim() and p.shape[-1] % BLOCK == 0 else tuple(least)


def _stepped(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], p: nn.Parameter
) -> dict[str, Any]:
    probe = nn.Parameter(torch.zeros(_probe_shape(p), dtype=p.dtype))
    probe.grad = torch.zeros_like(probe)
    options = {**group, "params": [probe], "fused": None, "capturable": False}
    options |= {"param_names": ["probe"]} if "param_names" in group else {}
    options |= {"parts": None} if "parts" in group else {}
    with suppress(Exception):  # an optimizer may need anything to be made, or to step
        make: Any = type(part_of(optimizer, group))
        twin = make([options], lr=group["lr"])
        again: Any = getattr(optimizer, "again", None)
        twin = twin if again is None else again([twin])
        twin.step()
        return dict(twin.state[probe])
    return {}


def part_of(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> torch.optim.Optimizer:
    """Return the optimizer inside of one that steps a group, or the one itself.

    Examples:
        >>> from trainkit.optim import combine_optimizers
        >>> inner = torch.optim.SGD([nn.Parameter(torch.ones(1))])
        >>> outer = combine_optimizers([inner])
        >>> part_of(outer, outer.param_groups[0]) is inner
        True
    """
    parts = [x for x in optimizers_in(optimizer) if any(g is group for g in x.param_groups)]
    return parts[0] if parts else optimizer
