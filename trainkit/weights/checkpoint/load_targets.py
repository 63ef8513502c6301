"""Where a checkpoint's tensors are loaded to: the parameters, and new tensors for the moments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import attrs
import torch
from torch import nn

from trainkit.optim.offload import copy_to_pinned, is_offloaded
from trainkit.optim.storage import BLOCK
from trainkit.parallel.parameters import (
    COPY_SUFFIX,
    empty_rows_like,
    get_local_box,
    get_named_parameters,
)
from trainkit.weights.checkpoint.boxes import get_parameter_name
from trainkit.weights.checkpoint.optimizer_internals import find_inner_optimizers
from trainkit.weights.checkpoint.reading import Target
from trainkit.weights.checkpoint.run_state import model_tensors, optimizer_state


def get_saved_name(name: str) -> str:
    """Return the name that a tensor is saved under: of a tied copy its owner's.

    Examples:
        >>> get_saved_name("model/embedding.weight (copy)")
        'model/embedding.weight'
    """
    return name.removesuffix(COPY_SUFFIX)


def make_weight_targets(stages: Sequence[nn.Module]) -> dict[str, Target]:
    """Return the parameters and persistent buffers of this rank's stages as load targets.

    Examples:
        >>> list(make_weight_targets([nn.Linear(1, 1, bias=False)]))
        ['model/weight']
    """
    return {
        name: Target(get_saved_name(name), x, get_local_box(x))
        for name, x in model_tensors(stages).items()
    }


def make_moment_targets(
    index: Mapping[str, Any],
    stages: Sequence[nn.Module],
    optimizer: torch.optim.Optimizer,
    is_cast: Callable[[str], bool],
) -> dict[str, Target]:
    """Allocate the optimizer state of the parameters on this rank, as load targets.

    An optimizer that has not stepped has no moments yet. A moment with its parameter's shape, or
    with other rows of the same number (the scales of 8-bit moments), is sharded like its parameter.
    Anything else, as a step count, is a plain tensor.

    Args:
        index: The entries of a checkpoint's index, which have been checked.
        stages: This rank's stages.
        optimizer: The optimizer of their parameters.
        is_cast: Returns whether the parameter of an entry may be stored in another dtype. A moment
            that was saved in its parameter's dtype then gets the parameter's new dtype.
    """
    named = get_named_parameters(stages)
    # torch's fused and capturable optimizers read the step count on the device, others on the host.
    on_device = {
        id(p): bool(group.get("fused") or group.get("capturable"))
        for group in optimizer.param_groups
        for p in group["params"]
    }
    targets: dict[str, Target] = {}
    for full, entry in index.items():
        if not full.startswith("optimizer/"):
            continue
        name = get_parameter_name(full)
        shape = tuple(entry["shape"])
        dtype = getattr(torch, entry["dtype"])
        weight = index.get(f"model/{name}", {})
        # A moment in its parameter's dtype follows it; one that is stored in float32 for a bfloat16
        # parameter, or in 8 bits, was chosen by the optimizer.
        follows = weight.get("dtype") == entry["dtype"] and is_cast(full)
        for suffix in ("", COPY_SUFFIX):
            p = named.get(name + suffix)
            if p is None or id(p) not in on_device:
                continue
            if shape == tuple(p.shape) and shape:
                tensor = torch.empty_like(p.data, dtype=p.dtype if follows else dtype)
            elif len(shape) > 1 and shape[:-1] == tuple(p.shape[:-1]):
                tensor = empty_rows_like(p.data, shape[-1], dtype)
            else:
                is_host_count = not shape and not on_device[id(p)]
                device = "cpu" if is_host_count else p.device
                tensor = torch.empty(shape, dtype=dtype, device=device)
            if shape and is_offloaded(optimizer):  # its moments live in pinned host memory
                tensor = copy_to_pinned(tensor)
            targets[full + suffix] = Target(full, tensor, get_local_box(tensor))
    return targets


def allocate_buffers(targets: Mapping[str, Target], index: Mapping[str, Any]) -> dict[str, Target]:
    """Return the targets with a buffer to read into, so that the run itself is not written yet.

    Args:
        targets: The tensors to load.
        index: The entries of a checkpoint's index.
    """
    buffered: dict[str, Target] = {}
    for name, target in targets.items():
        local = target.box.local
        dtype = getattr(torch, index[target.saved]["dtype"])
        # New moments on the CPU are their own buffers: the optimizer does not have them yet.
        # Reading straight into them saves a copy of the whole optimizer state.
        is_buffer = (
            target.saved.startswith("optimizer/")
            and local.is_contiguous()
            and local.device.type == "cpu"
            and local.dtype == dtype
        )
        out = local if is_buffer else torch.empty(local.shape, dtype=dtype)
        buffered[name] = attrs.evolve(target, out=out)
    return buffered


def write_targets_(targets: Mapping[str, Target]) -> None:
    """Copy the buffers that were read into their tensors.

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
    """Replace the optimizer's state by the loaded one.

    Raises:
        ValueError: The optimizer's `state` is a copy, which its parts will not step with.

    Effects:
        Replaces the optimizer's state.
    """
    # State of parameters that the checkpoint does not have must not survive the load.
    optimizer.state.clear()
    named = get_named_parameters(stages)
    for full, target in targets.items():
        kind, *rest = full.split("/", 2)
        if kind == "optimizer":
            optimizer.state[named[rest[1]]][rest[0]] = target.tensor
    for name, values in scalars.items():
        # A tied embedding is saved once, and both stages step their copy of it.
        for parameter in (named.get(name), named.get(name + COPY_SUFFIX)):
            if parameter is not None:
                optimizer.state[parameter].update(values)
    check_shared_state(optimizer)


def check_shared_state(optimizer: torch.optim.Optimizer) -> None:
    """Check that the parts of an optimizer share its state.

    Raises:
        ValueError: A part has a state of its own, into which nothing was loaded.

    Examples:
        >>> check_shared_state(torch.optim.SGD(nn.Linear(1, 1).parameters()))
    """
    for part in find_inner_optimizers(optimizer):
        for p, keys in probe_state(part).items():
            inner = part.state.get(p, {})
            outer = optimizer.state.get(p, {})
            missing = [key for key in keys if inner.get(key) is not outer.get(key)]
            if missing:
                raise ValueError(
                    f"load_checkpoint: the {type(part).__name__} in {type(optimizer).__name__} "
                    f"has not got {', '.join(sorted(missing))}, which were loaded into a copy: "
                    "`state` must be that of its parts, not made anew"
                )


def predict_state(
    stages: Sequence[nn.Module], optimizer: torch.optim.Optimizer
) -> dict[str, dict[str, Any]]:
    """Return the state that the optimizer will have for each parameter after its first step.

    The only general way to know is to step: another optimizer of its class and with its options
    steps a small parameter. If that fails, no state is expected.

    Examples:
        >>> model = nn.Linear(1, 1, bias=False)
        >>> predict_state([model], torch.optim.AdamW(model.parameters()))["weight"]["step"]
        tensor(1.)
    """
    by_parameter = probe_state(optimizer)
    named = get_named_parameters(stages)
    return {
        name: by_parameter[named[name]]
        for name in optimizer_state(stages, optimizer)
        if named[name].requires_grad
    }


def probe_state(optimizer: torch.optim.Optimizer) -> dict[nn.Parameter, dict[str, Any]]:
    """Return the state of an optimizer's parameters after a step, for small probe parameters.

    Examples:
        >>> weight = nn.Parameter(torch.ones(7, 3))
        >>> probe_state(torch.optim.SGD([weight], momentum=0.5))[weight]
        {'momentum_buffer': tensor([[0., 0.],
                [0., 0.]])}
    """
    probed: dict[Any, dict[str, Any]] = {}
    states: dict[nn.Parameter, dict[str, Any]] = {}
    for index, group in enumerate(optimizer.param_groups):
        for p in group["params"]:
            shape = tuple(min(size, 2) for size in p.shape) or (1,)
            if p.dim() and p.shape[-1] % BLOCK == 0:  # 8-bit moments need rows of full blocks
                shape = (*shape[:-1], BLOCK)
            # One step for all parameters that are alike: a large model has thousands.
            key = index, p.dtype, *shape
            if key not in probed:
                probed[key] = _step_probe(optimizer, group, p.dtype, shape)
            states[p] = probed[key]
    return states


def _step_probe(
    optimizer: torch.optim.Optimizer,
    group: Mapping[str, Any],
    dtype: torch.dtype,
    shape: tuple[int, ...],
) -> dict[str, Any]:
    """Step a new optimizer, with the class and options of a group, and return its state."""
    probe = nn.Parameter(torch.zeros(shape, dtype=dtype))
    probe.grad = torch.zeros_like(probe)  # only the keys, dtypes and shapes of the state matter
    # On the host, where neither fused nor capturable steps are needed.
    options = {**group, "params": [probe], "fused": None, "capturable": False}
    if "param_names" in group:
        options["param_names"] = ["probe"]
    if "parts" in group:
        options["parts"] = None
    with suppress(Exception):  # a foreign optimizer may need other arguments, or a closure
        make: Any = type(find_inner_optimizer(optimizer, group))
        other = make([options], lr=group["lr"])
        # `combine_optimizers` adds state of its own, the mean, around the parts.
        again: Any = getattr(optimizer, "again", None)
        other = other if again is None else again([other])
        other.step()
        return dict(other.state[probe])
    return {}


def find_inner_optimizer(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any]
) -> torch.optim.Optimizer:
    """Return the optimizer inside another one that steps a group, or the optimizer itself.

    Examples:
        >>> from trainkit.optim import combine_optimizers
        >>> inner = torch.optim.SGD([nn.Parameter(torch.ones(1))])
        >>> outer = combine_optimizers([inner])
        >>> find_inner_optimizer(outer, outer.param_groups[0]) is inner
        True
    """
    parts = [x for x in find_inner_optimizers(optimizer) if any(g is group for g in x.param_groups)]
    return parts[0] if parts else optimizer
