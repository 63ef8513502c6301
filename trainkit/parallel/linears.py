"""Which linear layers a transform lets compute otherwise: those of a pattern, or all that can."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from trainkit.models.experts import ExpertWeights, Router
from trainkit.parallel.names import canonical_name, fitting_names
from trainkit.parallel.notes import Note
from trainkit.types import ConfigError

_COMPUTES: Note[tuple[str, ...]] = Note("computes_in", default=())
_HEADS = ("head", "lm_head")


def choose_layers(
    module: nn.Module, pattern: str | None, *, by: str, problem: Callable[[nn.Module], str | None]
) -> tuple[dict[str, nn.Module], list[str]]:
    """Return the layers that a pattern chooses by name, and the names of those that are left out.

    Args:
        module: The whole model, so that every layout chooses alike.
        pattern: A regular expression of whole names, all of which must be able to; None for all
            that can, but for experts and a head, a decoder's or "lm_head".
        by: Who asks, for the message.
        problem: Says why a layer cannot, or None.

    Raises:
        ConfigError: The pattern is none or matches nothing, or a layer that cannot; or none can.

    Examples:
        >>> model = nn.ModuleDict({"up": nn.Linear(2, 4), "head": nn.Linear(4, 2)})
        >>> found, left_out = choose_layers(model, None, by="float8", problem=lambda _: None)
        >>> [*found], left_out
        (['up'], ['head'])
    """
    kinds = nn.Linear, Router, ExpertWeights
    named = {
        canonical_name(x): part for x, part in module.named_modules() if isinstance(part, kinds)
    }
    problems = {name: problem(part) for name, part in named.items()}
    if pattern is None:
        usual = [x for x, part in named.items() if not isinstance(part, ExpertWeights)]
        asked = [x for x in usual if not problems[x] and x.rpartition(".")[2] not in _HEADS]
    else:
        asked = fitting_names(pattern, named, by=by, what="linear layer")
    for name in asked:
        if problems[name]:
            raise ConfigError(
                f"{by}: {name!r} {problems[name]}; let the pattern leave it out",
                where=name,
                got=pattern,
            )
    if not asked:
        told = [f"{_of_blocks(x)!r} {why}" for x, why in problems.items() if why]
        told = [*dict.fromkeys(told)] or ["there is none"]
        told[3:] = [f"and {len(told) - 3} more"] if len(told) > 3 else []
        what = f"{by}: no linear layer can: {'; '.join(told)}"
        raise ConfigError(what, where="modules", got=pattern, hint="leave them plain")
    return {name: named[name] for name in asked}, [x for x in named if x not in asked]


def _of_blocks(name: str) -> str:
    return re.sub(r"\.\d+\.", ".*.", name)


def plain_problem(part: nn.Module) -> str | None:
    """Say why a layer is no plain linear one, or None.

    Examples:
        >>> plain_problem(nn.Linear(1, 1))
        >>> plain_problem(ExpertWeights(1, 1, 1))
        'holds experts, whose products are grouped'
    """
    if isinstance(part, ExpertWeights):
        return "holds experts, whose products are grouped"
    if isinstance(part, Router):
        return "is a router, which decides in fp32"
    if type(part).forward is not nn.Linear.forward:
        return f"has a forward pass of its own ({type(part).__name__})"
    return None


def change_(
    layers: dict[str, nn.Module],
    left_out: Iterable[str],
    change: Callable[[str, Any], None],
    *,
    told: str,
) -> None:
    """Change layers, and let them say so at the start of a run.

    Args:
        layers: The layers by name, from `choose_layers`.
        left_out: The names of the others.
        change: What to do to each.
        told: What they compute in, in words.

    Effects:
        Changes the layers, and sets an attribute of each.

    Examples:
        >>> layer = nn.Linear(1, 1)
        >>> change_({"up": layer}, ["layers.1.mlp.router"], lambda name, part: None, told="float8")
        >>> told_of([layer])
        'float8 in 1 linear layer, not in layers.*.mlp.router'
    """
    others = dict.fromkeys(map(_of_blocks, left_out))
    told += f" in {len(layers)} linear layer{'s' * (len(layers) > 1)}"
    told += f", not in {', '.join(others)}" if others else ""
    for name, layer in layers.items():
        change(name, layer)
        _COMPUTES.write_(layer, (*_COMPUTES.read(layer), told))


def told_of(stages: Iterable[nn.Module]) -> str:
    """Return what some layers of stages compute in, in words; of others nothing.

    Examples:
        >>> told_of([nn.Linear(1, 1)])
        ''
    """
    found = [text for stage in stages for texts in _COMPUTES.read_all(stage) for text in texts]
    return "; ".join(dict.fromkeys(found))
