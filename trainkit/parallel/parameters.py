"""Parameters by their names in the whole model, their ties, and the boxes that ranks hold."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import product
from typing import Any, Literal

import attrs
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from trainkit.parallel.name_patterns import name_matches
from trainkit.parallel.notes import Note

ParameterKind = Literal["trained", "frozen", "packed"]
"""Trainable, frozen, or the packed bytes of a frozen quantized matrix."""

_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
_IS_TIED_COPY = Note("is_tied_copy", default=False)
_IS_BASE = Note("is_base", default=False)
# Which way to delete an attribute torch.compile gets right; see `unhide_`.
_IS_TRACED = torch.__version__ >= "2.13"
COPY_SUFFIX = " (copy)"
"""The suffix of a tied copy's name on a rank that holds both the owner's stage and the copy's."""


def canonical_name(name: str) -> str:
    """Return the name of a parameter or module in the whole model, without those of wrappers.

    Examples:
        >>> canonical_name("module._orig_mod.layers.3._checkpoint_wrapped_module.mlp.up.weight")
        'layers.3.mlp.up.weight'
        >>> canonical_name("_orig_mod")  # the model, in the wrapper of torch.compile
        ''
    """
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    # A leading "module" is DDP's; further inside it may be a name of the model's own.
    return ".".join(parts[1:] if parts[:1] == ["module"] else parts)


def name_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules inside a model by their names in the whole model, without the model.

    A wrapper and what it wraps have one name, which is that of the wrapper.

    Examples:
        >>> [*name_modules(nn.Sequential(nn.Linear(1, 1), nn.Tanh()))]
        ['0', '1']
    """
    found: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        if name := canonical_name(path):
            found.setdefault(name, module)
    return found


def unhide_(module: nn.Module, name: str) -> None:
    """Remove an attribute of an instance that hides the parameter of the same name.

    Effects:
        Writes `module`.

    Examples:
        >>> layer = nn.Linear(1, 1)
        >>> object.__setattr__(layer, "weight", None)
        >>> unhide_(layer, "weight")
        >>> layer.weight.shape
        torch.Size([1, 1])
    """
    if _IS_TRACED:
        del vars(module)[name]  # torch.compile cannot trace object.__delattr__
    else:
        object.__delattr__(module, name)  # of the other, compiled, 2.12 deletes the parameter


def modules_of(stages_or_model: Iterable[nn.Module] | nn.Module) -> list[nn.Module]:
    """Return the stages of a model as a list; a plain module is the only stage.

    Examples:
        >>> modules_of(nn.Sequential(nn.Identity(), nn.Identity()))
        [Sequential(
          (0): Identity()
          (1): Identity()
        )]
    """
    return [stages_or_model] if isinstance(stages_or_model, nn.Module) else list(stages_or_model)


def get_named_parameters(stages: Iterable[nn.Module] | nn.Module) -> dict[str, nn.Parameter]:
    """Return all parameters of a model or its stages, frozen ones too, by their whole-model names.

    If a rank holds the first and the last stage of a pipeline, it has a tied embedding twice; then
    the name of the copy ends with `COPY_SUFFIX`.

    Raises:
        ValueError: Two stages have a parameter of the same name.

    Examples:
        >>> list(get_named_parameters(nn.Linear(2, 3)))
        ['weight', 'bias']
    """
    named: dict[str, nn.Parameter] = {}
    for stage in modules_of(stages):
        for raw_name, parameter in stage.named_parameters():
            name = canonical_name(raw_name)
            # The owner is on the first stage, which comes before the copy's.
            if name in named and is_tied_copy(parameter):
                name += COPY_SUFFIX
            if name in named:
                raise ValueError(f"get_named_parameters: two parameters are called {name!r}")
            named[name] = parameter
    return named


def _iterate_slots(module: nn.Module) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield (name, dictionary, key) for each parameter and buffer, a shared one under each name."""
    # Dictionaries, not attributes: tensor parallelism shows local tensors as attributes.
    for path, owner in module.named_modules(remove_duplicate=False):
        for tensors in (owner._parameters, owner._buffers):  # noqa: SLF001 (see above)
            for key in [key for key, tensor in tensors.items() if tensor is not None]:
                yield canonical_name(f"{path}.{key}" if path else key), tensors, key


def find_ties(module: nn.Module) -> list[tuple[str, ...]]:
    """Return the names of each parameter and buffer that has several.

    Examples:
        >>> model = nn.ModuleDict({"embedding": nn.Embedding(3, 2), "head": nn.Linear(2, 3)})
        >>> model.head.weight = model.embedding.weight
        >>> find_ties(model)
        [('embedding.weight', 'head.weight')]
    """
    names: dict[int, list[str]] = {}
    for name, tensors, key in _iterate_slots(module):
        names.setdefault(id(tensors[key]), []).append(name)
    return [tuple(group) for group in names.values() if len(group) > 1]


def retie_(module: nn.Module, ties: Iterable[Sequence[str]]) -> None:
    """Tie parameters and buffers again: each name of a tie gets the tensor of the first.

    Args:
        module: A module whose tensors have been replaced one by one, as by `to_empty`.
        ties: The result of `find_ties` before that.

    Effects:
        Replaces parameters and buffers of `module`.

    Examples:
        >>> model = nn.ModuleDict({"a": nn.Linear(1, 1), "b": nn.Linear(1, 1)})
        >>> retie_(model, [("a.weight", "b.weight")])
        >>> model.b.weight is model.a.weight
        True
    """
    slots = {name: (tensors, key) for name, tensors, key in _iterate_slots(module)}
    for first, *others in ties:
        tensors, key = slots[first]
        for name in others:
            other_tensors, other_key = slots[name]
            other_tensors[other_key] = tensors[key]


def mark_tied_copy_(parameter: nn.Parameter) -> None:
    """Mark a parameter as the last stage's copy of one that the first stage owns.

    Effects:
        Sets an attribute of the parameter.

    Examples:
        >>> weight = nn.Parameter(torch.ones(1))
        >>> mark_tied_copy_(weight)
        >>> is_tied_copy(weight)
        True
    """
    _IS_TIED_COPY.write_(parameter, True)


def is_tied_copy(parameter: Tensor) -> bool:
    """Return whether a parameter is a tied copy: norms and counts over all parameters skip it.

    Examples:
        >>> is_tied_copy(nn.Parameter(torch.ones(1)))
        False
    """
    return _IS_TIED_COPY.read(parameter)


def mark_base_(parameter: nn.Parameter, *, is_base: bool = True) -> None:
    """Mark a parameter as one of a base that is stored elsewhere: no checkpoint holds it.

    Effects:
        Sets an attribute of the parameter.

    Examples:
        >>> weight = nn.Parameter(torch.ones(1))
        >>> mark_base_(weight)
        >>> is_base(weight)
        True
    """
    _IS_BASE.write_(parameter, is_base)


def is_base(parameter: Tensor) -> bool:
    """Return whether a parameter is one of a base that is stored elsewhere.

    Examples:
        >>> is_base(nn.Parameter(torch.ones(1)))
        False
    """
    return _IS_BASE.read(parameter)


def get_parameter_kind(parameter: Tensor) -> ParameterKind:
    """Return whether a parameter is trainable, frozen or packed bytes.

    Examples:
        >>> (
        ...     get_parameter_kind(nn.Parameter(torch.ones(1))),
        ...     get_parameter_kind(torch.ones(1, dtype=torch.uint8)),
        ... )
        ('trained', 'packed')
    """
    if parameter.dtype == torch.uint8:
        return "packed"
    return "trained" if parameter.requires_grad else "frozen"


def get_named_buffers(stages: Iterable[nn.Module]) -> dict[str, Tensor]:
    """Return the persistent buffers of a list of stages by their whole-model name.

    Examples:
        >>> list(get_named_buffers([nn.BatchNorm1d(2)]))
        ['running_mean', 'running_var', 'num_batches_tracked']
    """
    named: dict[str, Tensor] = {}
    for stage in stages:
        for path, module in stage.named_modules():
            for name, buffer in module.named_buffers(recurse=False):
                if name not in module._non_persistent_buffers_set:  # noqa: SLF001 (no public name)
                    named[canonical_name(f"{path}.{name}" if path else name)] = buffer
    return named


def hash_values(tensor: Tensor) -> str:
    """Return the SHA-256 of the values of a plain tensor, in hexadecimal.

    Examples:
        >>> hash_values(torch.zeros(1)) == hash_values(torch.zeros(1, 1))
        True
    """
    # As bytes: numpy has no bf16.
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().data).hexdigest()


def find_blocks(
    module: nn.Module, pattern: str | None, *, needed_by: str = "", otherwise: str = ""
) -> list[nn.Module]:
    """Return the submodules whose name matches a pattern, in the order of the model.

    Args:
        module: The model.
        pattern: A pattern of names, such as "layers.*"; None stands for no block.
        needed_by: The name of a caller that needs at least one block, for the message.
        otherwise: What else the caller accepts, for the message.

    Raises:
        ValueError: No name matches, and `needed_by` is set.

    Examples:
        >>> model = nn.ModuleDict({"layers": nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))})
        >>> len(find_blocks(model, "layers.*")), len(find_blocks(model, "*"))
        (2, 1)
    """
    if pattern is None:
        return []
    named = module.named_modules()
    # Not the model itself: its name "" would match "*".
    blocks = [
        block for name, block in named if name and name_matches(canonical_name(name), pattern)
    ]
    if needed_by and not blocks:
        children = [f"{name} ({type(child).__name__})" for name, child in module.named_children()]
        raise ValueError(
            f"{needed_by}: no submodule's name matches blocks={pattern!r}; the children of the "
            f"{type(module).__name__} are {', '.join(children) or 'none'}. Name its blocks, such "
            f'as blocks="blocks.*" for those of a list `blocks`{otherwise}'
        )
    return blocks


@attrs.frozen(eq=False)
class Box:
    """The local shard of a tensor, with the full tensor's shape and the shard's offset in it.

    `writes` is true on the one rank among its replicas that writes it to a checkpoint.
    """

    local: Tensor
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    writes: bool


def get_local_box(tensor: Tensor, *, replica: int = 0) -> Box:
    """Return the box of a tensor on this rank: its shard, or all of a plain tensor.

    Args:
        tensor: A plain tensor or a DTensor (sharded and replicated placements).
        replica: The index of this rank's replica of a plain tensor; replica 0 writes.

    Examples:
        >>> box = get_local_box(torch.ones(2, 3))
        >>> box.shape, box.offset, box.writes
        ((2, 3), (0, 0), True)
    """
    shape = tuple(tensor.shape)
    if type(tensor) in (Tensor, nn.Parameter):
        return Box(tensor.detach(), shape, (0,) * len(shape), writes=replica == 0)
    from torch.distributed.tensor import DTensor  # noqa: PLC0415 (a second of import time)
    from torch.distributed.tensor._utils import (  # noqa: PLC0415 (the same from 2.11 on)
        compute_local_shape_and_global_offset,
    )

    if not isinstance(tensor, DTensor):
        return Box(tensor.detach(), shape, (0,) * len(shape), writes=replica == 0)
    mesh, placements = tensor.device_mesh, tensor.placements
    _, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    coordinate = mesh.get_coordinate() or ()
    # A rank writes the box if it is the first on every mesh axis that replicates it.
    copies = [i for i, p in zip(coordinate, placements, strict=True) if p.is_replicate()]
    with torch.no_grad():
        local = tensor.to_local()
    return Box(local, shape, tuple(offset), writes=not any(copies))


def list_boxes(tensor: Any) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return the (offset, shape) of the box of each rank.

    Args:
        tensor: A DTensor (sharded and replicated placements).

    Returns:
        (offset, shape) for each rank of its mesh, in row-major order; equal for replicas, and
        possibly empty.

    Examples:
        >>> import torch.distributed as dist
        >>> from torch.distributed.tensor import DTensor, Shard, init_device_mesh
        >>> dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
        >>> mesh = init_device_mesh("cpu", (1,))
        >>> list_boxes(DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)]))
        [((0, 0), (2, 3))]
        >>> dist.destroy_process_group()
    """
    return _boxes(tuple(tensor.shape), tuple(tensor.device_mesh.shape), tuple(tensor.placements))


@cache  # many tensors of a model have one shape and one placement
def _boxes(
    full_shape: tuple[int, ...], sizes: tuple[int, ...], placements: tuple[Any, ...]
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    from torch.distributed.tensor._utils import (  # noqa: PLC0415 (a second of import time)
        _compute_local_shape_and_global_offset,
    )

    boxes: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    for coordinate in product(*map(range, sizes)):
        shape, offset = _compute_local_shape_and_global_offset(
            full_shape, sizes, [*coordinate], placements
        )
        boxes.append((tuple(offset), tuple(shape)))
    return boxes


class PlacedAlike(TorchFunctionMode):
    """A mode in which `empty_like` and `zeros_like` of a DTensor are made from its local shard.

    DTensor's own dispatch takes 5 ms for each shape on each new mesh.

    Examples:
        >>> with PlacedAlike():
        ...     torch.zeros_like(torch.ones(2))
        tensor([0., 0.])
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch, on the local shard if it is one of these two."""
        del types
        kwargs = kwargs or {}
        like: Any = args[0] if func in (torch.empty_like, torch.zeros_like) else None
        if not hasattr(like, "placements"):
            return func(*args, **kwargs)
        # Shape and stride are given: torch would infer them as if all shards were equal.
        return type(like).from_local(
            func(like.to_local(), **kwargs),
            like.device_mesh,
            like.placements,
            run_check=False,
            shape=like.shape,
            stride=like.stride(),
        )


def empty_rows_like(tensor: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """Return an empty tensor of a parameter's shape and placements, but with rows of other length.

    Args:
        tensor: A plain tensor or a DTensor. If its rows are sharded, so are those of the result.
        length: The length of a row of the result.
        dtype: The dtype of the result.

    Raises:
        ValueError: The sharding of the rows does not divide that length.

    Examples:
        >>> empty_rows_like(torch.ones(3, 8), 2, torch.float64).shape
        torch.Size([3, 2])
    """
    local = get_local_box(tensor).local
    if not tensor.dim() or length == tensor.shape[-1]:
        with PlacedAlike():
            return torch.empty_like(tensor.data, dtype=dtype)
    local_length, remainder = divmod(local.shape[-1] * length, tensor.shape[-1] or 1)
    if remainder:
        raise ValueError(
            f"empty_rows_like: rows of {tensor.shape[-1]} numbers are sharded into "
            f"{local.shape[-1]} per rank, which does not divide rows of {length}; choose another "
            "layout"
        )
    result = torch.empty(*local.shape[:-1], local_length, dtype=dtype, device=local.device)
    if not hasattr(tensor, "placements"):
        return result
    full: Any = tensor
    # Placements stay: the rows of the result are sharded in the same proportions.
    shape = torch.Size((*full.shape[:-1], length))
    return type(full.data).from_local(
        result,
        full.device_mesh,
        full.placements,
        run_check=False,
        shape=shape,
        stride=torch.empty(shape, device="meta").stride(),
    )


def redistribute_like(p: Any, grad: Any) -> Any:
    """Return a gradient with the placements of its parameter.

    The gradient of a foreign module's parameter may still be a partial sum.

    Examples:
        >>> grad = torch.ones(2)
        >>> redistribute_like(torch.ones(2), grad) is grad
        True
    """
    if type(grad) is Tensor and type(p) is nn.Parameter:
        return grad
    if getattr(grad, "placements", None) == getattr(p, "placements", None):
        return grad
    return grad.redistribute(placements=p.placements)
