"""Names and boxes of parameters: the whole model's name, and which part of it this rank holds."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from functools import cache
from itertools import product
from typing import Any, Literal

import attrs
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from trainkit.parallel.notes import Note
from trainkit.types import ConfigError

Kind = Literal["trained", "frozen", "packed"]
"""What a parameter is: trained; frozen; or the bytes of a frozen matrix in few bits."""

_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
_IS_TIED_COPY = Note("is_tied_copy", default=False)
_IS_BASE = Note("is_base", default=False)
_LISTED = 12  # names in an error message
_IS_TRACED = torch.__version__ >= "2.13"
COPY_SUFFIX = " (copy)"
"""What the name of a tied copy ends with where one rank holds the owner's stage and the copy's."""


def canonical_name(name: str) -> str:
    """Return a parameter's name in the whole model, without the prefixes that wrappers add.

    Examples:
        >>> canonical_name("module._orig_mod.layers.3._checkpoint_wrapped_module.mlp.up.weight")
        'layers.3.mlp.up.weight'
    """
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    return ".".join(parts[1:] if parts[0] == "module" else parts)


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
    """Return the stages of a model in a list, or a plain module as the only one.

    Examples:
        >>> modules_of(nn.Sequential(nn.Identity(), nn.Identity()))
        [Sequential(
          (0): Identity()
          (1): Identity()
        )]
    """
    return [stages_or_model] if isinstance(stages_or_model, nn.Module) else list(stages_or_model)


def get_named_parameters(stages: Iterable[nn.Module] | nn.Module) -> dict[str, nn.Parameter]:
    """Return all parameters of a model, or of its stages, by their whole-model name.

    Frozen ones too.

    Where a rank holds the first and the last stage of a pipeline, a tied embedding is there twice;
    the copy's name then ends with `COPY_SUFFIX`.

    Raises:
        ValueError: Two stages hold a parameter of the same name.

    Examples:
        >>> list(get_named_parameters(nn.Linear(2, 3)))
        ['weight', 'bias']
    """
    found: dict[str, nn.Parameter] = {}
    for stage in modules_of(stages):
        for raw, parameter in stage.named_parameters():
            name = canonical_name(raw)
            if name in found and is_tied_copy(parameter):
                name += COPY_SUFFIX
            if name in found:
                raise ValueError(f"get_named_parameters: two parameters are called {name!r}")
            found[name] = parameter
    return found


def _places(module: nn.Module) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Go through where a module holds tensors, a shared one as often: name, dictionary, key in it.

    Dictionaries and not attributes, behind which tensor parallelism shows local tensors.
    """
    for path, owner in module.named_modules(remove_duplicate=False):
        for held in (owner._parameters, owner._buffers):  # noqa: SLF001 (see above)
            for key in [key for key, tensor in held.items() if tensor is not None]:
                yield canonical_name(f"{path}.{key}" if path else key), held, key


def ties_of(module: nn.Module) -> list[tuple[str, ...]]:
    """Return the names of every parameter and buffer that goes by several, the first one first.

    Examples:
        >>> model = nn.ModuleDict({"embedding": nn.Embedding(3, 2), "head": nn.Linear(2, 3)})
        >>> model.head.weight = model.embedding.weight
        >>> ties_of(model)
        [('embedding.weight', 'head.weight')]
    """
    names: dict[int, list[str]] = {}
    for name, held, key in _places(module):
        names.setdefault(id(held[key]), []).append(name)
    return [tuple(group) for group in names.values() if len(group) > 1]


def retie_(module: nn.Module, ties: Iterable[Sequence[str]]) -> None:
    """Make one tensor of those that go by the names of a tie: the first name's.

    Args:
        module: A module whose tensors have been replaced one by one, as by `to_empty`.
        ties: What `ties_of` gave before that.

    Effects:
        Replaces parameters and buffers of `module`.

    Examples:
        >>> model = nn.ModuleDict({"a": nn.Linear(1, 1), "b": nn.Linear(1, 1)})
        >>> retie_(model, [("a.weight", "b.weight")])
        >>> model.b.weight is model.a.weight
        True
    """
    found = {name: (held, key) for name, held, key in _places(module)}
    for first, *others in ties:
        held, key = found[first]
        for name in others:
            other, its_key = found[name]
            other[its_key] = held[key]


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


def kind_of(parameter: Tensor) -> Kind:
    """Return what a parameter is: what has gradients, and what is counted in bytes.

    Examples:
        >>> kind_of(nn.Parameter(torch.ones(1))), kind_of(torch.ones(1, dtype=torch.uint8))
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
    found: dict[str, Tensor] = {}
    for stage in stages:
        for path, module in stage.named_modules():
            for name, buffer in module.named_buffers(recurse=False):
                if name not in module._non_persistent_buffers_set:  # noqa: SLF001 (no public name)
                    found[canonical_name(f"{path}.{name}" if path else name)] = buffer
    return found


def name_matches(name: str, pattern: str) -> bool:
    """Return whether a name matches a pattern, part by part.

    Args:
        name: The name of a module or parameter, with wrappers' prefixes or without.
        pattern: A name in which `*` stands for one part (or for some of its letters): "layers.*".

    Examples:
        >>> name_matches("_orig_mod.layers.3", "layers.*"), name_matches("layers.3.mlp", "layers.*")
        (True, False)
    """
    parts, wanted = canonical_name(name).split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def fitting_names(pattern: str, names: Iterable[str], *, by: str, what: str) -> list[str]:
    r"""Return the names that a regular expression matches as a whole, of which there must be one.

    Args:
        pattern: The regular expression, of names in the whole model: they are the same in every
            layout, so what it chooses is too.
        names: The names, as `canonical_name` gives them.
        by: The name of the caller, for the message.
        what: What they are names of, for the message.

    Raises:
        ConfigError: It is no regular expression, or matches no name; then those that there are are
            listed, layers alike as one.

    Examples:
        >>> names = ["layers.0.mlp.up", "layers.1.mlp.up", "head"]
        >>> fitting_names(r"layers\.\d+\.mlp\.up", names, by="lora", what="matrix")
        ['layers.0.mlp.up', 'layers.1.mlp.up']
        >>> fitting_names("up", names, by="lora", what="matrix")
        Traceback (most recent call last):
        trainkit.types.ConfigError: lora: 'up' matches the name of no matrix; those there are: ...
    """
    names = list(names)
    try:
        matches = re.compile(pattern).fullmatch
    except re.error as error:
        raise ConfigError(
            f"{by}: {pattern!r} is no regular expression: {error}", where="pattern", got=pattern
        ) from error
    found = [name for name in names if matches(name)]
    if not found:
        kinds = list(dict.fromkeys(re.sub(r"\.\d+\.", ".0.", name) for name in names))
        listed = "; ".join([*kinds[:_LISTED], *(["..."] if len(kinds) > _LISTED else [])])
        raise ConfigError(
            f"{by}: {pattern!r} matches the name of no {what}; those there are: {listed}",
            where="pattern",
            got=pattern,
            want="a regular expression that matches a whole name",
        )
    return found


def find_blocks(module: nn.Module, pattern: str, *, needed_by: str = "") -> list[nn.Module]:
    """Return the submodules whose name matches a pattern, in the order of the model.

    Args:
        module: The model.
        pattern: See `name_matches`.
        needed_by: The name of a caller that needs at least one block, for the message.

    Raises:
        ValueError: Nothing matches, and somebody needs a block.

    Examples:
        >>> model = nn.ModuleDict({"layers": nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))})
        >>> len(find_blocks(model, "layers.*")), len(find_blocks(model, "*"))
        (2, 1)
    """
    named = module.named_modules()
    blocks = [block for name, block in named if name and name_matches(name, pattern)]
    if needed_by and not blocks:
        raise ValueError(f"{needed_by}: no submodule's name matches blocks={pattern!r}")
    return blocks


@attrs.frozen(eq=False)
class Box:
    """The part of a tensor that this rank holds: its values, and where it begins in the whole.

    `writes` is true on the one rank among its replicas that writes it to a checkpoint.
    """

    local: Tensor
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    writes: bool


def get_local_box(tensor: Tensor, *, replica: int = 0) -> Box:
    """Return the box of a tensor that this rank holds; a plain tensor is a whole one.

    Args:
        tensor: A plain tensor or a DTensor (sharded and replicated placements).
        replica: For plain tensors, which of the equal copies this rank has; copy 0 writes.

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
    copies = [i for i, p in zip(coordinate, placements, strict=True) if p.is_replicate()]
    with torch.no_grad():
        local = tensor.to_local()
    return Box(local, shape, tuple(offset), writes=not any(copies))


def boxes_of(tensor: Any) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return of every rank where its box begins in the whole tensor, and the shape of the box.

    Args:
        tensor: A DTensor (sharded and replicated placements).

    Returns:
        (offset, shape) for each rank of its mesh, the last mesh dimension running fastest; replicas
        have equal ones, and a box may be empty.

    Examples:
        >>> import torch.distributed as dist
        >>> from torch.distributed.tensor import DTensor, Shard, init_device_mesh
        >>> dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
        >>> mesh = init_device_mesh("cpu", (1,))
        >>> boxes_of(DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)]))
        [((0, 0), (2, 3))]
        >>> dist.destroy_process_group()
    """
    return _boxes(tuple(tensor.shape), tuple(tensor.device_mesh.shape), tuple(tensor.placements))


@cache
def _boxes(
    whole: tuple[int, ...], sizes: tuple[int, ...], placements: tuple[Any, ...]
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    from torch.distributed.tensor._utils import (  # noqa: PLC0415 (a second of import time)
        _compute_local_shape_and_global_offset,
    )

    found: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    for coordinate in product(*map(range, sizes)):
        shape, offset = _compute_local_shape_and_global_offset(
            whole, sizes, [*coordinate], placements
        )
        found.append((tuple(offset), tuple(shape)))
    return found


class PlacedAlike(TorchFunctionMode):
    """A mode in which empties and zeros like a sharded tensor are made from what this rank holds.

    Where they lie DTensor finds out by itself in 5 ms, for each shape on each new mesh.

    Examples:
        >>> with PlacedAlike():
        ...     torch.zeros_like(torch.ones(2))
        tensor([0., 0.])
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch, on the local part where it is one of these."""
        del types
        kwargs = kwargs or {}
        like: Any = args[0] if func in (torch.empty_like, torch.zeros_like) else None
        if not hasattr(like, "placements"):
            return func(*args, **kwargs)
        return type(like).from_local(
            func(like.to_local(), **kwargs),
            like.device_mesh,
            like.placements,
            run_check=False,
            shape=like.shape,
            stride=like.stride(),
        )


def empty_rows_like(tensor: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """Return an empty tensor of a parameter's shape but for the length of its rows, placed as it.

    Args:
        tensor: A plain tensor or a DTensor. Where its rows are cut, those of the result are too.
        length: How many numbers stand in a row of the result.
        dtype: Their dtype.

    Raises:
        ValueError: This rank's part of a row is no whole number of them.

    Examples:
        >>> empty_rows_like(torch.ones(3, 8), 2, torch.float64).shape
        torch.Size([3, 2])
    """
    local = get_local_box(tensor).local
    if not tensor.dim() or length == tensor.shape[-1]:
        with PlacedAlike():
            return torch.empty_like(tensor.data, dtype=dtype)
    own, rest = divmod(local.shape[-1] * length, tensor.shape[-1] or 1)
    if rest:
        raise ValueError(
            f"empty_rows_like: rows of {tensor.shape[-1]} numbers share {length} each, and are cut "
            f"into parts of {local.shape[-1]}, within what one of these is for; cut them otherwise"
        )
    made = torch.empty(*local.shape[:-1], own, dtype=dtype, device=local.device)
    if not hasattr(tensor, "placements"):
        return made
    whole: Any = tensor
    shape = torch.Size((*whole.shape[:-1], length))
    stride = torch.empty(shape, device="meta").stride()
    where = (whole.device_mesh, whole.placements)
    return type(whole.data).from_local(made, *where, run_check=False, shape=shape, stride=stride)


def placed_as(p: Any, grad: Any) -> Any:
    """Return a gradient as its parameter is placed: that of a foreign module may still be parts.

    Examples:
        >>> grad = torch.ones(2)
        >>> placed_as(torch.ones(2), grad) is grad
        True
    """
    if type(grad) is Tensor and type(p) is nn.Parameter:
        return grad
    if getattr(grad, "placements", None) == getattr(p, "placements", None):
        return grad
    return grad.redistribute(placements=p.placements)
