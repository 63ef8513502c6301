"""The optimizers by name, and the one that a recipe's options ask for.

To add one: a function or class that takes groups and options, and a row. Nothing else knows names.
"""

from __future__ import annotations

import ast
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import attrs
import torch
from torch import nn

from trainkit.collectives import all_gather_objects
from trainkit.optim.adamw import adamw
from trainkit.optim.combine import combine_optimizers
from trainkit.optim.elementwise import ElementwiseOptimizer
from trainkit.optim.groups import grouped, split_by_pattern
from trainkit.optim.muon import Muon, hidden_matrices
from trainkit.optim.offload import offload_optimizer_
from trainkit.optim.rules import Lion, Momentum, ScheduleFree, SignSGD
from trainkit.optim.storage import moment_bytes
from trainkit.parallel.parameters import get_named_parameters, modules_of
from trainkit.types import SOLO, Axis, ConfigError, Precision, Stages


@attrs.frozen
class Kind:
    """A row: what makes an optimizer of groups, and what it remembers of each element.

    `narrow` moments are kept as the option "moments" says, `wide` ones in fp32; `counts` are
    numbers of each parameter (one where there is none and rounding draws by the step). One with a
    `rest` steps `hidden_matrices` alone, and the optimizer of that name all others.
    """

    make: Callable[..., torch.optim.Optimizer]
    narrow: int = 0
    wide: int = 0
    counts: int = 1
    rest: str | None = None

    @property
    def parameters(self) -> dict[str, Any]:
        """What `make` takes by keyword, with what holds otherwise."""
        found = dict(inspect.signature(self.make).parameters)
        if "options" in found:
            found = {**inspect.signature(ElementwiseOptimizer).parameters, **found}
        known = {x: y.default for x, y in found.items() if x not in ("params", "options", "lr")}
        return known | dict(getattr(self.make, "options", {}))

    @property
    def options(self) -> dict[str, Any]:
        """What a user can tell it beside rate and decay."""
        ours = ["weight_decay", "seed", "axis", "parts", "parts_dim"]
        ours += ["rounding"] if self.make is ScheduleFree else []  # whose parameters are fp32
        return {x: default for x, default in self.parameters.items() if x not in ours}


OPTIMIZERS: dict[str, Kind] = {
    "adamw": Kind(adamw, narrow=2),
    "lion": Kind(Lion, narrow=1, counts=0),
    "momentum": Kind(Momentum, narrow=1, counts=0),
    "muon": Kind(partial(Muon, scale="match_rms"), wide=1, counts=0, rest="adamw"),
    "schedule-free": Kind(ScheduleFree, narrow=1, wide=1, counts=3),
    "signsgd": Kind(SignSGD, counts=0),
}
"""All by name; docs/howto/choose-an-optimizer.md says when which."""


def state_bytes(
    optimizer: str,
    options: Mapping[str, Any] = MappingProxyType({}),
    *,
    hidden: bool = True,
    in_blocks: bool = True,
) -> float:
    """Return what an optimizer remembers of each element of a matrix in fp32, in bytes.

    Args:
        optimizer: Its name in `OPTIMIZERS`.
        options: As `make_optimizer` takes them.
        hidden: Of a matrix of a hidden layer; or of embeddings, heads and the like.
        in_blocks: Of one whose rows are blocks of moments in 8 bits; others have them in fp32.

    Examples:
        >>> few = {"moments": "bf16"}
        >>> state_bytes("adamw"), state_bytes("adamw", few), state_bytes("signsgd")
        (8.0, 4.0, 0.0)
        >>> state_bytes("muon"), state_bytes("muon", hidden=False)
        (4.0, 8.0)
        >>> (
        ...     state_bytes("lion", {"moments": "8bit"}),
        ...     state_bytes("lion", {"moments": "8bit"}, in_blocks=False),
        ... )
        (1.015625, 4.0)
    """
    _check_values(optimizer, options)
    kind = OPTIMIZERS[optimizer]
    if kind.rest and not hidden:
        return state_bytes(kind.rest)
    moments = options.get("moments", "fp32")
    kept = moment_bytes(moments if in_blocks or moments != "8bit" else "fp32")
    return kind.narrow * kept + 4 * kind.wide


def make_optimizer(
    stages_or_model: Iterable[nn.Module] | nn.Module,
    *,
    lr: float,
    optimizer: str = "adamw",
    weight_decay: float = 0.0,
    options: Mapping[str, Any] = MappingProxyType({}),
    groups: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
    mean: float | None = None,
    precision: Precision | None = None,
    seed: int = 0,
    axis: Axis = SOLO,
    offload: bool = False,
) -> torch.optim.Optimizer:
    r"""Return an optimizer by its name, over all trainable parameters of a model.

    Args:
        stages_or_model: This rank's stages of the model, whose trainable parameters it steps; or
            a module.
        lr: The rate; a group's "lr_scale" multiplies it, see `clip_and_step`.
        optimizer: A name of `OPTIMIZERS`.
        weight_decay: Of matrices; vectors have none.
        options: Its own options: {"betas": (0.9, 0.99), "moments": "bf16"}. What a command line
            says becomes such a mapping by `parse_options`.
        groups: What other parameters get, by a regular expression of names in the whole model:
            {r"layers\.\d+\.mlp\..*": {"lr_scale": 0.5, "optimizer": "lion"}}, with "lr_scale",
            "weight_decay", "max_norm", "optimizer" and the options of that. What no expression
            matches is as all the rest of the arguments say. See `parse_groups` for texts.
        mean: As in `combine_optimizers`.
        precision: Its `moments` and, where parameters are kept in bf16, stochastic rounding are
            options of every optimizer here, before those of its own.
        seed: What stochastic rounding follows from.
        axis: The pipeline axis of plain modules; a `Stages` has its own.
        offload: Keep what it remembers in host memory; see `offload_optimizer_`.

    Raises:
        ConfigError: A name, an option or a pattern is not known; two patterns match a name; or an
            optimizer cannot keep what `precision` says.

    Effects:
        Communicates on `axis` where there are groups, or an optimizer of hidden matrices alone.

    Examples:
        >>> model = nn.ModuleDict({"up": nn.Linear(2, 3), "head": nn.Linear(3, 4)})
        >>> groups = {"head.*": {"lr_scale": 0.5, "optimizer": "lion"}}
        >>> optimizer = make_optimizer(model, lr=0.1, groups=groups)
        >>> [(x["optimizer"], x.get("lr_scale"), len(x["params"])) for x in optimizer.param_groups]
        [('Lion', 0.5, 1), ('Lion', 0.5, 1), ('AdamW', None, 1), ('AdamW', None, 1)]
    """
    axis = stages_or_model.pp if isinstance(stages_or_model, Stages) else axis
    stages = modules_of(stages_or_model)
    for which, given in (("options", options), ("groups", groups)):
        if not isinstance(given, Mapping):
            raise ConfigError(
                f"make_optimizer: {which} must be a mapping of names to values, got {given!r}; "
                f"optim.parse_{which} makes one of a command line's texts",
                where=which,
                got=given,
            )
    split = [get_named_parameters(stages)]
    if groups:
        split = split_by_pattern(split[0], list(groups), axis=axis)
    names = (optimizer, *(own.get("optimizer", optimizer) for own in groups.values()))
    parts = _hidden_parts(stages, axis) if any(_kind(name).rest for name in names) else {}
    main = {"optimizer": optimizer, "weight_decay": weight_decay, "seed": seed}
    made = list[torch.optim.Optimizer]()
    of_groups: list[Mapping[str, Any]] = [*groups.values(), MappingProxyType({})]
    for named, own in zip(split, of_groups, strict=True):
        told: dict[str, Any] = main | _of_a_group(own)
        shared = options if told["optimizer"] == optimizer else {}
        own_options = {name: x for name, x in own.items() if name not in _NO_OPTIONS}
        kept = options_of(told["optimizer"], precision or Precision())
        made += _made(named, parts, lr, {**kept, **shared, **own_options}, **told)
    whole = made[0] if len(made) == 1 and mean is None else combine_optimizers(made, mean=mean)
    if offload:
        offload_optimizer_(whole)
    return whole


def options_of(optimizer: str, precision: Precision) -> dict[str, Any]:
    """Return what a precision says to an optimizer, as options.

    Raises:
        ConfigError: It cannot keep parameters, or what it remembers, in so few bits.

    Examples:
        >>> options_of("lion", Precision(storage="bf16", moments="8bit"))
        {'moments': '8bit', 'rounding': 'stochastic'}
        >>> options_of("muon", Precision(storage="bf16"))
        Traceback (most recent call last):
        trainkit.types.ConfigError: muon cannot keep parameters in bf16: ...
    """
    asked = {"moments": precision.moments} if precision.moments != "fp32" else {}
    asked |= {"rounding": "stochastic"} if precision.storage == "bf16" else {}
    known = _kind(optimizer).options
    for name in (name for name in asked if name not in known):
        can = ", ".join(other for other, kind in OPTIMIZERS.items() if name in kind.options)
        what = "parameters in bf16" if name == "rounding" else f"moments in {precision.moments}"
        told = f"{optimizer} cannot keep {what}: it has no option {name}; {can} have"
        raise ConfigError(told, where="optimizer", got=optimizer, want=can)
    return asked


def _kind(optimizer: str) -> Kind:
    if optimizer not in OPTIMIZERS:
        known = ", ".join(OPTIMIZERS)
        told = f"there is no optimizer {optimizer!r}; there are {known}"
        raise ConfigError(told, where="optimizer", got=optimizer, want=known)
    return OPTIMIZERS[optimizer]


def _hidden_parts(
    stages: Sequence[nn.Module], axis: Axis
) -> dict[tuple[int, ...] | None, list[str]]:
    """Return the names of `hidden_matrices` by their parts, all parts that the whole model has."""
    own = hidden_matrices(stages)
    kinds = all_gather_objects([*own.values()], axis)
    known = {None if x is None else tuple(x) for part in kinds for x in part}
    ordered = sorted(known, key=lambda x: () if x is None else x)
    return {x: [name for name, parts in own.items() if parts == x] for x in ordered}


def check_options(
    *, groups: Mapping[str, Mapping[str, Any]] = MappingProxyType({}), **asked: Any
) -> None:
    """Refuse what `make_optimizer` would refuse, but for patterns, which need the model's names.

    Raises:
        ConfigError: See `make_optimizer`.

    Examples:
        >>> check_options(lr=0.1, optimizer="lion", groups={".*bias": {"betas": (0.5, 0.9)}})
        >>> check_options(lr=0.1, optimizer="lino")
        Traceback (most recent call last):
        trainkit.types.ConfigError: there is no optimizer 'lino'; there are adamw, lion, ...
    """
    probe = [nn.Linear(1, 1, bias=False)]
    make_optimizer(probe, **asked)
    for own in groups.values():
        make_optimizer(probe, **asked, groups={".*": own})


def _made(
    named: Mapping[str, nn.Parameter],
    hidden: Mapping[tuple[int, ...] | None, Sequence[str]],
    lr: float,
    options: Mapping[str, Any],
    *,
    optimizer: str,
    weight_decay: float,
    seed: int,
    **of_groups: Any,
) -> list[torch.optim.Optimizer]:
    """Return the optimizer of these parameters: with its `rest`, two."""
    _check_values(optimizer, options)
    told, kind = dict(options), OPTIMIZERS[optimizer]
    told |= {"seed": seed} if "seed" in kind.parameters else {}
    groups = grouped(named.items(), weight_decay=weight_decay)
    others: list[torch.optim.Optimizer] = []
    if kind.rest:
        groups = [
            grouped([(x, named[x]) for x in names if x in named], weight_decay=weight_decay)[0]
            | {"parts": parts}
            for parts, names in hidden.items()
        ]
        taken = {name for group in groups for name in group["param_names"]}
        left = {name: p for name, p in named.items() if name not in taken}
        how: dict[str, Any] = {"weight_decay": weight_decay, "seed": seed, **of_groups}
        others = _made(left, {}, lr, {}, optimizer=kind.rest, **how)
    try:
        return [kind.make([group | of_groups for group in groups], lr=lr, **told), *others]
    except ValueError as error:
        raise ConfigError(str(error), where="optimizer_options", got=options) from error


_OF_GROUPS = ("lr_scale", "weight_decay", "max_norm")
_NO_OPTIONS = (*_OF_GROUPS, "optimizer")


def _of_a_group(own: Mapping[str, Any]) -> dict[str, Any]:
    """Return what holds for a group beside options of its optimizer."""
    for name in _OF_GROUPS:
        value = own.get(name, 0.0)
        if type(value) not in (int, float) or not 0 <= value < math.inf:
            raise ConfigError(
                f"optimizer groups: {name} must be a finite number of at least 0, got {value!r}",
                where=name,
                got=value,
            )
    return {name: value for name, value in own.items() if name in _NO_OPTIONS}


def _check_values(optimizer: str, options: Mapping[str, Any]) -> None:
    """Refuse options that an optimizer does not have, or values of another type."""
    known = _kind(optimizer).options
    for name, value in options.items():
        if name not in known:
            listed = ", ".join(f"{x}={default}" for x, default in known.items())
            raise ConfigError(
                f"{optimizer} has no option {name!r}; it has {listed}",
                where="options",
                got=name,
                want=listed,
            )
        default = known[name]
        kind = (int, float) if type(default) in (int, float) else type(default)
        if not isinstance(value, kind):
            raise ConfigError(
                f"{optimizer}: {name} must be as {default!r}, got {value!r}",
                where="options",
                got=value,
                want=default,
            )


# --------------------------------------------------------------------------- texts of command lines


def parse_options(texts: Iterable[str], *, optimizer: str = "adamw") -> dict[str, Any]:
    """Return options of an optimizer, as a command line says them, as values.

    Args:
        texts: "NAME=VALUE" each: "betas=(0.9, 0.99)", "moments=bf16", "cautious=True".
        optimizer: Whose they are, a name of `OPTIMIZERS`: its defaults say which are texts.

    Raises:
        ConfigError: It has no such option, or the value is of another type than the default.

    Examples:
        >>> parse_options(["betas=(0.9, 0.99)", "moments=bf16"], optimizer="lion")
        {'betas': (0.9, 0.99), 'moments': 'bf16'}
    """
    known, found = _kind(optimizer).options, dict[str, Any]()
    for text in texts:
        name, _, value = text.partition("=")
        found[name] = value if isinstance(known.get(name), str) else _literal(value)
        _check_values(optimizer, {name: found[name]})
    return found


def parse_groups(texts: Iterable[str], *, optimizer: str = "adamw") -> dict[str, dict[str, Any]]:
    """Return what groups of parameters get, as a command line says it, as values.

    Args:
        texts: A regular expression of names each, and after it "NAME=VALUE" pairs without
            spaces: "head.* lr_scale=0.5 optimizer=lion".
        optimizer: The optimizer of groups that do not say.

    Raises:
        ConfigError: As `parse_options`; or two texts begin with the same expression.

    Examples:
        >>> parse_groups(["head.* lr_scale=0.5 optimizer=lion betas=(0.8,0.9)"])
        {'head.*': {'lr_scale': 0.5, 'optimizer': 'lion', 'betas': (0.8, 0.9)}}
    """
    found = dict[str, dict[str, Any]]()
    for text in texts:
        pattern, *pairs = text.split() or [""]
        if pattern in found:
            raise ConfigError(
                f"optimizer groups: {pattern!r} is given twice; a parameter is in one group",
                where="pattern",
                got=pattern,
            )
        named = {name: value for name, _, value in (pair.partition("=") for pair in pairs)}
        own = {name: _literal(named[name]) for name in _OF_GROUPS if name in named}
        own |= {"optimizer": named["optimizer"]} if "optimizer" in named else {}
        others = [pair for pair in pairs if pair.partition("=")[0] not in _NO_OPTIONS]
        found[pattern] = own | parse_options(others, optimizer=named.get("optimizer", optimizer))
    return found


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        try:
            return float(text)  # nan and inf, which are refused by their range
        except ValueError:
            return text
