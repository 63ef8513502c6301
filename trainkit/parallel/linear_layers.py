"""The choice of the linear layers that a transform changes: float8, fake quantization."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from torch import nn

from trainkit.models.experts import ExpertWeights, Router
from trainkit.parallel.name_patterns import match_names
from trainkit.parallel.notes import Note
from trainkit.parallel.parameters import canonical_name
from trainkit.types import ConfigError

# Several texts if several transforms have changed a layer.
_COMPUTES: Note[tuple[str, ...]] = Note("computes_in", default=())
_HEADS = ("head", "lm_head")


def choose_layers(
    module: nn.Module, pattern: str | None, *, by: str, problem: Callable[[nn.Module], str | None]
) -> tuple[dict[str, nn.Module], list[str]]:
    """Return the layers that a pattern matches, and the names of all others.

    Args:
        module: The whole model, so that every layout chooses the same layers.
        pattern: A pattern of names, such as "layers.*.mlp.*". None chooses all suitable layers
            except for experts and a head ("head", "lm_head").
        by: The name of the transform, for messages.
        problem: Returns the reason that a layer is not suitable, or None.

    Raises:
        ConfigError: The pattern is invalid, matches nothing, or matches a layer that is not
            suitable; or no layer is suitable.

    Examples:
        >>> model = nn.ModuleDict({"up": nn.Linear(2, 4), "head": nn.Linear(4, 2)})
        >>> found, left_out = choose_layers(model, None, by="float8", problem=lambda _: None)
        >>> [*found], left_out
        (['up'], ['head'])
    """
    # Routers and experts too: a pattern may name them, and `problem` decides.
    kinds = (nn.Linear, Router, ExpertWeights)
    named = {
        canonical_name(x): part for x, part in module.named_modules() if isinstance(part, kinds)
    }
    # Of all layers, for the message if none is suitable.
    problems = {name: problem(part) for name, part in named.items()}
    if pattern is None:
        # A transform that can change experts does so only if the pattern names them.
        usual = [x for x, part in named.items() if not isinstance(part, ExpertWeights)]
        chosen = [x for x in usual if not problems[x] and x.rpartition(".")[2] not in _HEADS]
    else:
        chosen = match_names(pattern, named, function=by, kind="linear layer")
    for name in chosen:
        if problems[name]:
            raise ConfigError(
                f"{by}: {name!r} {problems[name]}; let the pattern leave it out",
                where=name,
                got=pattern,
            )
    if not chosen:
        # Layers of different blocks have the same problem: name each kind of layer once.
        reasons = dict.fromkeys(
            f"{_join_blocks(name)!r} {reason}" for name, reason in problems.items() if reason
        )
        shown = [*reasons][:3] or ["there is none"]
        if len(reasons) > 3:
            shown.append(f"and {len(reasons) - 3} more")
        raise ConfigError(
            f"{by}: no linear layer can: {'; '.join(shown)}",
            where="modules",
            got=pattern,
            hint="leave them plain",
        )
    return {name: named[name] for name in chosen}, [x for x in named if x not in chosen]


def _join_blocks(name: str) -> str:
    """Return a name without the index of its block, as "layers.*.mlp.up"."""
    return re.sub(r"\.\d+\.", ".*.", name)


def plain_problem(part: nn.Module) -> str | None:
    """Return the reason that a layer is not a plain `nn.Linear`, or None.

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


def note_computation_(layers: Iterable[nn.Module], left_out: Iterable[str], how: str) -> None:
    """Record how layers compute, for the log at the start of a run.

    Args:
        layers: The layers that were changed.
        left_out: The names of the other linear layers.
        how: A description of the computation, such as "float8 (rowwise)".

    Effects:
        Writes a note on each layer.

    Examples:
        >>> layer = nn.Linear(1, 1)
        >>> note_computation_([layer], ["layers.1.mlp.router"], "float8")
        >>> describe_linears([layer])
        'float8 in 1 linear layer, not in layers.*.mlp.router'
    """
    layers = list(layers)
    text = f"{how} in {len(layers)} linear layer{'s' * (len(layers) > 1)}"
    others = dict.fromkeys(map(_join_blocks, left_out))
    if others:
        text += f", not in {', '.join(others)}"
    for layer in layers:
        _COMPUTES.write_(layer, (*_COMPUTES.read(layer), text))


def describe_linears(stages: Iterable[nn.Module]) -> str:
    """Describe how the changed layers of stages compute; "" if none was changed.

    Examples:
        >>> describe_linears([nn.Linear(1, 1)])
        ''
    """
    texts = [text for stage in stages for texts in _COMPUTES.read_all(stage) for text in texts]
    return "; ".join(dict.fromkeys(texts))  # every layer of a transform has the same text
