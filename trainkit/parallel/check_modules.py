"""Checks for modules that a transform would compute wrongly, before anything is sharded."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from trainkit.parallel.parameters import canonical_name, get_named_parameters
from trainkit.types import ConfigError


def refuse_max_norm(module: nn.Module, *, by: str, weights: Collection[str] | None = None) -> None:
    """Raise ConfigError for an embedding with `max_norm`, whose forward pass writes to its weight.

    Changes of a gathered or cast copy are lost, and ranks with other tokens change other rows.

    Args:
        module: A model or a stage of one.
        by: The transform, for the message.
        weights: The names of the weights to check; by default all.

    Raises:
        ConfigError: There is one; the message names the first.

    Examples:
        >>> refuse_max_norm(nn.ModuleDict({"words": nn.Embedding(4, 2, max_norm=1.0)}), by="fsdp")
        Traceback (most recent call last):
        trainkit.types.ConfigError: fsdp: 'words' is an Embedding with max_norm = 1.0, which ...
    """
    for name, part in module.named_modules():
        # torch rescales rows in place before it looks them up, unseen by autograd.
        if not isinstance(part, nn.Embedding | nn.EmbeddingBag) or part.max_norm is None:
            continue
        # `build_stages` names tied weights only, of which another stage has a copy.
        if weights is None or canonical_name(f"{name}.weight") in weights:
            raise ConfigError(
                f"{by}: {canonical_name(name) or 'the model itself'!r} is an "
                f"{type(part).__name__} with max_norm = {part.max_norm}, which rescales rows of "
                "its weight in the forward pass; here it would rescale a copy, or other rows on "
                "each rank, and train another model. Build it with max_norm=None (rows that the "
                "model reads can be rescaled in its forward pass, out of place), or train on one "
                "rank in the dtype of the parameters",
                where=canonical_name(name),
                got=part.max_norm,
                want=None,
            )


def refuse_empty_parameters(module: nn.Module, *, by: str) -> None:
    """Raise ConfigError for a trained parameter without elements, which torch cannot shard.

    Args:
        module: A model or a stage of one.
        by: The transform, for the message.

    Raises:
        ConfigError: There is one; the message names the first.

    Examples:
        >>> import torch
        >>> model = nn.ParameterDict({"gate": nn.Parameter(torch.empty(0, 4))})
        >>> refuse_empty_parameters(model, by="fsdp")
        Traceback (most recent call last):
        trainkit.types.ConfigError: fsdp: 'gate' has the shape [0, 4], and so no element to ...
    """
    for name, parameter in get_named_parameters([module]).items():
        if parameter.requires_grad and not parameter.numel():
            shape = list(parameter.shape)
            raise ConfigError(
                f"{by}: {name!r} has the shape {shape}, and so no element to shard, which torch "
                "cannot take; leave the parameter out of the model (register_parameter(name, "
                "None)), or freeze it (requires_grad=False)",
                where=name,
                got=shape,
                want="a parameter with elements",
            )


def refuse_container(module: nn.Module, name: str, *, by: str) -> None:
    """Raise ConfigError for a container as a unit: units are gathered when they are called.

    Args:
        module: The module that becomes a unit.
        name: Its name, for the message.
        by: The transform, for the message.

    Raises:
        ConfigError: It has no forward pass.

    Examples:
        >>> refuse_container(nn.ModuleList([nn.Linear(1, 1)]), "experts", by="fsdp")
        Traceback (most recent call last):
        trainkit.types.ConfigError: fsdp: 'experts' is a ModuleList, which has no forward pass ...
    """
    # Containers such as ModuleList inherit the forward pass that only raises.
    if type(module).forward is nn.Module.forward:
        raise ConfigError(
            f"{by}: {name or 'the model itself'!r} is a {type(module).__name__}, which has no "
            "forward pass in which its parameters could be gathered; let `blocks` name the modules "
            f"inside ({f'{name}.*' if name else '*'!r}), or one around that is called",
            where=name,
            got=type(module).__name__,
            want="a module with a forward pass",
        )
