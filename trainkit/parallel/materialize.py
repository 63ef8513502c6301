"""Allocation of a module on the meta device, and the values of this rank's shard of every tensor.

Values come from a `Weights` function: a counter-based initializer, a folder (`open_weights`), or a
module that was initialized by its own code (`weights_from_module`). If the function lists its
tensors in an attribute `shapes`, the model must use all of them, persistent buffers too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from trainkit.collectives import all_gather_objects
from trainkit.parallel.parameters import (
    PlacedAlike,
    canonical_name,
    find_ties,
    get_local_box,
    get_named_buffers,
    get_named_parameters,
    hash_values,
    retie_,
)
from trainkit.types import SOLO, Axis, CheckpointError, ConfigError, Weights

Fill = Callable[[Weights, str, Sequence[int], Sequence[int]], Tensor]
"""`Fill(weights, name, shape, offset) -> Tensor`: a box of a parameter that a transform has made.

A module has those of its parameters in a dictionary `fills`, by their names in the module. They may
read any box of the original model from `weights`.
"""


def materialize_(
    module: nn.Module,
    weights: Weights,
    device: torch.device | str,
    *,
    buffers: Mapping[str, Tensor] | None = None,
) -> None:
    """Allocate a module that is on the meta device, and fill this rank's shard of every parameter.

    A tensor that several modules share is allocated once. It is read by its first name, or by
    those of its names that `weights` lists, whose values must be equal.

    Args:
        module: A module whose parameters are all on the meta device, sharded or not.
        weights: Returns the values of any box of a parameter, by its name in the whole model.
        device: The device of the parameters.
        buffers: The values of its buffers by their names in the whole model; see `compute_buffers`.

    Raises:
        ValueError: A parameter is not on the meta device, a buffer has no value, or `weights`
            returns a wrong shape.
        ConfigError: A buffer is computed from parameters, which have no values yet.
        CheckpointError: `weights` has two different values for one parameter.

    Effects:
        Allocates and writes the parameters and buffers of `module`.

    Examples:
        >>> with torch.device("meta"):
        ...     model = nn.Linear(2, 2)
        >>> materialize_(model, lambda name, shape, offset: torch.ones(tuple(shape)), "cpu")
        >>> model.bias
        Parameter containing:
        tensor([1., 1.], requires_grad=True)
    """
    real = [name for name, p in get_named_parameters([module]).items() if not p.is_meta]
    unknown = list_buffers(module).keys() - (buffers or {}).keys()
    if real or unknown:
        what = f"{real[0]!r} is not on" if real else f"the buffer {min(unknown)!r} has no value on"
        raise ValueError(
            f"build_stages: {what} the meta device; make_model must build every parameter under "
            "torch.device('meta'), and a buffer in __init__, from numbers alone"
        )
    for name in list_buffers(module):
        if (buffers or {})[name].is_meta:
            raise ConfigError(
                f"build_stages: the buffer {name!r} is computed from a parameter when the model is "
                "made, as spectral_norm does, and make_model makes parameters without values; "
                "compute it in the forward pass, or take what computes it off "
                "(torch.nn.utils.parametrize.remove_parametrizations)",
                where=name,
                want="a buffer that is made from numbers alone",
            )
    ties = find_ties(module)
    with PlacedAlike():  # DTensor's own `empty_like` is slow
        module.to_empty(device=device)
    retie_(module, ties)  # to_empty makes a tensor for every module that shares it
    names = {name: tie for tie in ties for name in tie}
    listed_shapes = shapes_of(weights)
    fills = fills_of(module)
    stored = {name: x for name, x in get_named_buffers([module]).items() if name in listed_shapes}
    with torch.no_grad():
        for name, buffer in list_buffers(module).items():
            # Computed values; persistent buffers that the weights list are overwritten below.
            buffer.copy_((buffers or {})[name])
        for name, tensor in (get_named_parameters([module]) | stored).items():
            box = get_local_box(tensor)
            # Of an uneven sharding some ranks have no elements.
            if box.local.numel():
                # A parameter that a transform has added is computed from the original weights.
                read = partial(fills[name], weights) if name in fills else weights
                tie = names.get(name, (name,))
                box.local.copy_(_read_values(read, tie, tuple(box.local.shape), box.offset))


def fills_of(module: nn.Module) -> dict[str, Fill]:
    """Return the functions that fill parameters made by transforms, by name in the whole model.

    Examples:
        >>> fills_of(nn.Linear(1, 1))
        {}
    """
    parts = ((path, vars(part).get("fills", {})) for path, part in module.named_modules())
    return {
        canonical_name(f"{path}.{key}" if path else key): fill
        for path, fills in parts
        for key, fill in fills.items()
    }


def _read_values(
    weights: Weights, names: Sequence[str], shape: tuple[int, ...], offset: tuple[int, ...]
) -> Tensor:
    """Return a box of a tensor, and check that it is the same by each of its names."""
    # Weights may list a tied tensor under any of its names; those without a list have the first.
    available = [name for name in names if name in shapes_of(weights)] or names[:1]
    results = [weights(name, shape, offset) for name in available]
    for name, values in zip(available, results, strict=True):
        if values.shape != shape:
            raise ValueError(
                f"build_stages: weights gave shape {tuple(values.shape)} for {name!r}, where "
                f"{shape} at offset {offset} was requested"
            )
        if values is not results[0] and not torch.equal(values, results[0]):
            raise CheckpointError(
                f"build_stages: {available[0]!r} and {name!r} are one parameter of the model, but "
                "the weights differ; untie them in the model, or leave one out by allow_extra",
                where=name,
            )
    return results[0]


def list_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return all buffers of a module, persistent or not, by each of their names in the whole model.

    Examples:
        >>> list(list_buffers(nn.BatchNorm1d(2)))
        ['running_mean', 'running_var', 'num_batches_tracked']
    """
    named = module.named_buffers(remove_duplicate=False)
    return {canonical_name(name): buffer for name, buffer in named}


def compute_buffers(make_model: Callable[[], nn.Module]) -> dict[str, Tensor]:
    """Return the buffers that a model computes when it is made: rotary frequencies, running means.

    The model is made once more, with real buffers and parameters that have no memory: each goes to
    the meta device as it is registered, before anything writes to it.

    Args:
        make_model: Makes the whole model.

    Returns:
        {name in the whole model: values}, on the CPU.

    Effects:
        While it runs, modules of this process that are made elsewhere lose their parameters too.

    Examples:
        >>> list(compute_buffers(lambda: nn.BatchNorm1d(2)))
        ['running_mean', 'running_var', 'num_batches_tracked']
    """

    def without_memory(_: nn.Module, __: str, parameter: nn.Parameter) -> nn.Parameter:
        on_meta = parameter.detach().to("meta")
        return nn.Parameter(on_meta, requires_grad=parameter.requires_grad)

    # torch has only a hook for all modules of the process.
    handle = register_module_parameter_registration_hook(cast("Any", without_memory))
    try:
        return {name: x.clone() for name, x in list_buffers(make_model()).items()}
    finally:
        handle.remove()


# ---------------------------------------------------------------------------- weights with a list


def attach_shapes(weights: Weights, shapes: Mapping[str, Sequence[int]]) -> Weights:
    """Attach the shapes of its full tensors to a `Weights` function; a model must use all of them.

    Effects:
        Sets an attribute of the function.

    Examples:
        >>> ones = lambda name, shape, offset: torch.ones(tuple(shape))
        >>> shapes_of(attach_shapes(ones, {"a": [2]}))
        {'a': (2,)}
    """
    tuples = {name: tuple(shape) for name, shape in shapes.items()}
    setattr(weights, "shapes", tuples)  # noqa: B010 (a function has no such attribute)
    return weights


def shapes_of(weights: Weights) -> Mapping[str, tuple[int, ...]]:
    """Return the shapes of the full tensors that `attach_shapes` has attached; by default none.

    Examples:
        >>> shapes_of(lambda name, shape, offset: torch.ones(tuple(shape)))
        {}
    """
    return getattr(weights, "shapes", {})


def check_fit(model: nn.Module, weights: Weights) -> None:
    """Raise CheckpointError if weights list tensors that are not those of a model.

    Args:
        model: The whole model.
        weights: The weights. A tensor that they lack raises an error when it is read.

    Raises:
        CheckpointError: The model has no such tensor, or one of another shape; `got` names all.

    Examples:
        >>> ones = lambda name, shape, offset: torch.ones(tuple(shape))
        >>> check_fit(nn.Linear(1, 1), attach_shapes(ones, {"weight": (1, 1), "scale": (1,)}))
        Traceback (most recent call last):
        trainkit.types.CheckpointError: build_stages: the weights hold 'scale', which the model ...
    """
    shapes = {name: tuple(x.shape) for name, x in _get_named_tensors(model).items()}
    shapes |= {  # a quantized matrix is made from the full one
        canonical_name(f"{path}.{key}" if path else key): quantization.shape
        for path, part in model.named_modules()
        for key, quantization in vars(part).get("quantizations", {}).items()
    }
    problems = [
        f"{name!r} of shape {shape}, where the model's has {shapes[name]}"
        for name, shape in shapes_of(weights).items()
        if name in shapes and shapes[name] != shape
    ]
    problems += [
        f"{name!r}, which the model does not have"
        for name in shapes_of(weights)
        if name not in shapes
    ]
    if problems:
        more = f" (and {len(problems) - 1} more such tensors)" if len(problems) > 1 else ""
        raise CheckpointError(
            f"build_stages: the weights hold {problems[0]}{more}; make the model that they belong "
            "to, or let open_weights leave some out by allow_extra",
            where="weights",
            got=problems,
        )


def _get_named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by all of their names in the whole model."""
    named: dict[str, Tensor] = {**get_named_parameters([module]), **get_named_buffers([module])}
    # Ties of buffers that are not persistent are left out: no weights have them.
    ties = [tie for tie in find_ties(module) if tie[0] in named]
    return named | {name: named[tie[0]] for tie in ties for name in tie}


def narrow_to_box(full: Tensor, shape: Sequence[int], offset: Sequence[int]) -> Tensor:
    """Return a box of a tensor as a view.

    Examples:
        >>> narrow_to_box(torch.arange(4), (2,), (1,))
        tensor([1, 2])
    """
    for dim, (start, size) in enumerate(zip(offset, shape, strict=True)):
        full = full.narrow(dim, start, size)
    return full


def weights_from_module(module: nn.Module, *, axis: Axis = SOLO) -> Weights:
    """Return the values of an initialized module as `Weights`.

    `build_stages(make_model, ps, plan, weights=weights_from_module(make_model(), axis=ps.world))`
    starts from the initial values of any model. Each rank makes the full module on its CPU, from
    the same seed, and keeps it while the stages are built.

    Args:
        module: The full module, not sharded. Tied tensors are found by each of their names.
        axis: The ranks that call this together, whose modules must hold the same values.

    Returns:
        A `Weights` function of boxes of the module's own tensors.

    Raises:
        ValueError: A tensor is on the meta device, or a rank holds other values; then all ranks
            raise it.

    Effects:
        With several ranks it hashes the module, and communicates on `axis`.

    Examples:
        >>> from trainkit.mesh import solo_parallel
        >>> from trainkit.parallel import build_stages
        >>> _ = torch.manual_seed(0)
        >>> make_model = lambda: nn.Linear(3, 2)
        >>> made = make_model()
        >>> (model,) = build_stages(
        ...     make_model, solo_parallel(), [], weights=weights_from_module(made)
        ... )
        >>> torch.equal(model.weight, made.weight)
        True
    """
    named = _get_named_tensors(module)
    for name, tensor in named.items():
        if tensor.is_meta:
            raise ValueError(
                f"weights_from_module: {name!r} is on the meta device, and has no values"
            )
    if axis.count > 1:
        # Hashes are compared, as the module may not fit a message.
        hashes = {name: hash_values(tensor) for name, tensor in named.items()}
        first, *others = all_gather_objects(hashes, axis)
        for rank, other in enumerate(others, start=1):
            # All ranks compare the same list, and so raise together.
            different = [name for name in first if other.get(name) != first[name]]
            if different:
                raise ValueError(
                    f"weights_from_module: rank {rank} holds other values of {different[0]!r} than "
                    "rank 0; make the module from the same seed on every rank"
                )

    def read(name: str, shape: Sequence[int], offset: Sequence[int]) -> Tensor:
        if name not in named:
            raise ValueError(f"weights_from_module: the module has no tensor {name!r}")
        return narrow_to_box(named[name].detach(), shape, offset)

    return attach_shapes(read, {name: tensor.shape for name, tensor in named.items()})
