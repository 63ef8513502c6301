"""The table of optimizers, and the construction of one by its name.

A new optimizer is a function or class that takes groups and options, and a row of `OPTIMIZERS`.
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
from trainkit.optim.groups import make_decay_groups, split_by_pattern
from trainkit.optim.muon import Muon, hidden_matrices
from trainkit.optim.offload import offload_optimizer_
from trainkit.optim.rules import Lion, Momentum, ScheduleFree, SignSGD
from trainkit.optim.storage import moment_bytes
from trainkit.parallel.parameters import get_named_parameters, modules_of
from trainkit.types import SOLO, Axis, ConfigError, Precision, Stages


@attrs.frozen
class OptimizerRow:
    """A row of `OPTIMIZERS`: the constructor of an optimizer and the size of its state.

    Attributes:
        make: Returns the optimizer of some parameter groups.
        low_precision_moments: The number of moments that the option "moments" may store in low
            precision.
        fp32_moments: The number of moments that are always stored in fp32.
        counts: The number of counters per parameter. Rounding that draws by the step adds one
            where there is none.
        other_parameters: If set, the optimizer steps only `hidden_matrices`, and the optimizer of
            this name steps all other parameters.
    """

    make: Callable[..., torch.optim.Optimizer]
    low_precision_moments: int = 0
    fp32_moments: int = 0
    counts: int = 1
    other_parameters: str | None = None

    @property
    def parameters(self) -> dict[str, Any]:
        """The keyword parameters of `make` and their defaults."""
        parameters = dict(inspect.signature(self.make).parameters)
        # `**options` of an elementwise optimizer: those of all, and those that its class declares.
        if "options" in parameters:
            parameters = {**inspect.signature(ElementwiseOptimizer).parameters, **parameters}
        defaults = {
            name: parameter.default
            for name, parameter in parameters.items()
            if name not in ("params", "options", "lr")
        }
        return defaults | dict(getattr(self.make, "options", {}))

    @property
    def options(self) -> dict[str, Any]:
        """The options that a user can set, with their defaults, without rate and decay."""
        # Decay is an argument of its own; the others follow from the model, the layout and the run.
        hidden = {"weight_decay", "seed", "axis", "parts", "parts_dim"}
        if self.make is ScheduleFree:  # its parameters are always fp32
            hidden.add("rounding")
        return {name: default for name, default in self.parameters.items() if name not in hidden}


OPTIMIZERS: dict[str, OptimizerRow] = {
    "adamw": OptimizerRow(adamw, low_precision_moments=2),
    "lion": OptimizerRow(Lion, low_precision_moments=1, counts=0),
    "momentum": OptimizerRow(Momentum, low_precision_moments=1, counts=0),
    # "match_rms", so that one rate and one decay serve Muon and the AdamW of the other parameters.
    "muon": OptimizerRow(
        partial(Muon, scale="match_rms"), fp32_moments=1, counts=0, other_parameters="adamw"
    ),
    "schedule-free": OptimizerRow(ScheduleFree, low_precision_moments=1, fp32_moments=1, counts=3),
    "signsgd": OptimizerRow(SignSGD, counts=0),
}
"""The optimizers by name; the page "Choose an optimizer" compares them."""


def state_bytes(
    optimizer: str,
    options: Mapping[str, Any] = MappingProxyType({}),
    *,
    hidden: bool = True,
    in_blocks: bool = True,
) -> float:
    """Return the bytes of optimizer state per element of an fp32 matrix.

    Args:
        optimizer: Its name in `OPTIMIZERS`.
        options: As `make_optimizer` takes them.
        hidden: Whether the matrix is that of a hidden layer, not an embedding or a head.
        in_blocks: Whether its rows can be split into blocks of 8-bit moments; others have theirs
            in fp32.

    Examples:
        >>> bf16 = {"moments": "bf16"}
        >>> state_bytes("adamw"), state_bytes("adamw", bf16), state_bytes("signsgd")
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
    row = OPTIMIZERS[optimizer]
    if row.other_parameters and not hidden:
        # It has its default options: the user's are for the optimizer that was named.
        return state_bytes(row.other_parameters)
    moments = options.get("moments", "fp32")
    bytes_per_moment = moment_bytes(moments if in_blocks or moments != "8bit" else "fp32")
    return row.low_precision_moments * bytes_per_moment + 4 * row.fp32_moments


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
    r"""Return the optimizer of a name, over all trainable parameters of a model.

    Args:
        stages_or_model: This rank's stages, or a module.
        lr: The learning rate; a group's "lr_scale" multiplies it, see `clip_and_step`.
        optimizer: A name of `OPTIMIZERS`.
        weight_decay: The decay of matrices; vectors have none.
        options: Options of this optimizer, such as {"betas": (0.9, 0.99), "moments": "bf16"};
            `parse_options` makes them from the texts of a command line.
        groups: Settings of other parameters, by a pattern of their names in the whole model:
            {"layers.*.mlp.**": {"lr_scale": 0.5, "optimizer": "lion"}}.
            The settings are "lr_scale", "weight_decay", "max_norm", "optimizer" and options of
            that optimizer. `parse_groups` makes them from texts.
        mean: As in `combine_optimizers`.
        precision: Its `moments`, and stochastic rounding if parameters are stored in bf16, become
            options of every optimizer here; an option that is set explicitly takes precedence.
        seed: The seed of stochastic rounding.
        axis: The pipeline axis of plain modules; a `Stages` has its own.
        offload: Whether optimizer state is in host memory; see `offload_optimizer_`.

    Raises:
        ConfigError: A name, an option or a pattern is unknown; two patterns match one name; or an
            optimizer does not support `precision`.

    Effects:
        Communicates on `axis` if there are groups, or the optimizer steps hidden matrices only.

    Examples:
        >>> model = nn.ModuleDict({"up": nn.Linear(2, 3), "head": nn.Linear(3, 4)})
        >>> groups = {"head.*": {"lr_scale": 0.5, "optimizer": "lion"}}
        >>> optimizer = make_optimizer(model, lr=0.1, groups=groups)
        >>> [(x["optimizer"], x.get("lr_scale"), len(x["params"])) for x in optimizer.param_groups]
        [('Lion', 0.5, 1), ('Lion', 0.5, 1), ('AdamW', None, 1), ('AdamW', None, 1)]
    """
    axis = stages_or_model.pp if isinstance(stages_or_model, Stages) else axis
    stages = modules_of(stages_or_model)
    _check_mapping("options", options)
    _check_mapping("groups", groups)
    split = [get_named_parameters(stages)]
    if groups:
        split = split_by_pattern(split[0], list(groups), axis=axis)
    # `_list_hidden_parts` communicates, so all stages decide by the same names whether to call it.
    names = (optimizer, *(group.get("optimizer", optimizer) for group in groups.values()))
    parts = (
        _list_hidden_parts(stages, axis)
        if any(_get_row(name).other_parameters for name in names)
        else {}
    )
    optimizers = list[torch.optim.Optimizer]()
    # The last part of the split has the parameters that match no pattern.
    settings: list[Mapping[str, Any]] = [*groups.values(), MappingProxyType({})]
    for named, group in zip(split, settings, strict=True):
        _check_group(group)
        name = group.get("optimizer", optimizer)
        optimizers += _make_optimizers(
            named,
            parts,
            lr,
            {
                # Later entries win: precision, the options of the main optimizer, those of the
                # group.
                **list_precision_options(name, precision or Precision()),
                **(options if name == optimizer else {}),
                **{key: value for key, value in group.items() if key not in _NO_OPTIONS},
            },
            optimizer=name,
            weight_decay=group.get("weight_decay", weight_decay),
            seed=seed,
            settings={key: group[key] for key in ("lr_scale", "max_norm") if key in group},
        )
    if len(optimizers) == 1 and mean is None:
        combined = optimizers[0]
    else:
        combined = combine_optimizers(optimizers, mean=mean)
    if offload:
        offload_optimizer_(combined)
    return combined


def _check_mapping(argument: str, value: Any) -> None:
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"make_optimizer: {argument} must be a mapping of names to values, got {value!r}; "
            f"optim.parse_{argument} makes one from the texts of a command line",
            where=argument,
            got=value,
        )


def list_precision_options(optimizer: str, precision: Precision) -> dict[str, Any]:
    """Return the options by which an optimizer stores its state, and rounds, in a precision.

    Raises:
        ConfigError: The optimizer does not support parameters or moments of that precision.

    Examples:
        >>> list_precision_options("lion", Precision(storage="bf16", moments="8bit"))
        {'moments': '8bit', 'rounding': 'stochastic'}
        >>> list_precision_options("muon", Precision(storage="bf16"))
        Traceback (most recent call last):
        trainkit.types.ConfigError: muon does not support parameters in bf16: ...
    """
    options: dict[str, Any] = {}
    if precision.moments != "fp32":
        options["moments"] = precision.moments
    if precision.storage == "bf16":
        options["rounding"] = "stochastic"
    # Without the option bf16 parameters would lose small updates, and moments would be in fp32.
    supported = _get_row(optimizer).options
    for name in (name for name in options if name not in supported):
        tensors = "parameters in bf16" if name == "rounding" else f"moments in {precision.moments}"
        others = ", ".join(other for other, row in OPTIMIZERS.items() if name in row.options)
        raise ConfigError(
            f"{optimizer} does not support {tensors}: it has no option {name}; choose {others}",
            where="optimizer",
            got=optimizer,
            want=others,
        )
    return options


def _get_row(optimizer: str) -> OptimizerRow:
    if optimizer not in OPTIMIZERS:
        names = ", ".join(OPTIMIZERS)
        raise ConfigError(
            f"there is no optimizer {optimizer!r}; there are {names}",
            where="optimizer",
            got=optimizer,
            want=names,
        )
    return OPTIMIZERS[optimizer]


def _list_hidden_parts(
    stages: Sequence[nn.Module], axis: Axis
) -> dict[tuple[int, ...] | None, list[str]]:
    """Return the names of `hidden_matrices` by their parts, all parts that the whole model has."""
    # Every stage has a group for every kind of parts, if need be empty, as a checkpoint wants it.
    parts_by_name = hidden_matrices(stages)
    by_rank = all_gather_objects([*parts_by_name.values()], axis)
    # JSON has no tuples: what was gathered has lists.
    kinds = {None if parts is None else tuple(parts) for rank in by_rank for parts in rank}
    ordered = sorted(kinds, key=lambda parts: () if parts is None else parts)
    return {
        kind: [name for name, parts in parts_by_name.items() if parts == kind] for kind in ordered
    }


def check_options(
    *, groups: Mapping[str, Mapping[str, Any]] = MappingProxyType({}), **options: Any
) -> None:
    """Raise ConfigError where `make_optimizer` would, except for patterns of unknown names.

    Raises:
        ConfigError: See `make_optimizer`.

    Examples:
        >>> check_options(lr=0.1, optimizer="lion", groups={"**.bias": {"betas": (0.5, 0.9)}})
        >>> check_options(lr=0.1, optimizer="lino")
        Traceback (most recent call last):
        trainkit.types.ConfigError: there is no optimizer 'lino'; there are adamw, lion, ...
    """
    # Each group is tried as `.*` on a model of one parameter: real names are not known here.
    probe = [nn.Linear(1, 1, bias=False)]
    make_optimizer(probe, **options)
    for group in groups.values():
        make_optimizer(probe, **options, groups={"**": group})


def _make_optimizers(
    named: Mapping[str, nn.Parameter],
    hidden: Mapping[tuple[int, ...] | None, Sequence[str]],
    lr: float,
    options: Mapping[str, Any],
    *,
    optimizer: str,
    weight_decay: float,
    seed: int,
    settings: Mapping[str, Any],
) -> list[torch.optim.Optimizer]:
    """Return the optimizer of some parameters, followed by that of the others, if it has one."""
    _check_values(optimizer, options)
    row = OPTIMIZERS[optimizer]
    # Only elementwise optimizers round stochastically.
    if "seed" in row.parameters:
        options = {**options, "seed": seed}
    groups = make_decay_groups(named.items(), weight_decay=weight_decay)
    rest: list[torch.optim.Optimizer] = []
    if row.other_parameters:
        groups = []
        for parts, names in hidden.items():
            matrices = [(name, named[name]) for name in names if name in named]
            # The second group, without decay, is for vectors, and empty.
            group, _ = make_decay_groups(matrices, weight_decay=weight_decay)
            groups.append(group | {"parts": parts})
        stepped = {name for group in groups for name in group["param_names"]}
        rest = _make_optimizers(
            {name: p for name, p in named.items() if name not in stepped},
            {},
            lr,
            {},
            optimizer=row.other_parameters,
            weight_decay=weight_decay,
            seed=seed,
            settings=settings,
        )
    groups = [{**group, **settings} for group in groups]
    try:
        return [row.make(groups, lr=lr, **options), *rest]
    # Ranges are checked by the optimizers themselves; a command needs the option's place.
    except ValueError as error:
        raise ConfigError(str(error), where="optimizer_options", got=options) from error


_GROUP_SETTINGS = ("lr_scale", "weight_decay", "max_norm")
_NO_OPTIONS = (*_GROUP_SETTINGS, "optimizer")


def _check_group(group: Mapping[str, Any]) -> None:
    for name in _GROUP_SETTINGS:
        value = group.get(name, 0.0)
        # Not isinstance: True is an int.
        if type(value) not in (int, float) or not 0 <= value < math.inf:
            raise ConfigError(
                f"optimizer groups: {name} must be a finite number of at least 0, got {value!r}",
                where=name,
                got=value,
            )


def _check_values(optimizer: str, options: Mapping[str, Any]) -> None:
    """Raise ConfigError for an unknown option, or a value of another type than its default."""
    defaults = _get_row(optimizer).options
    for name, value in options.items():
        if name not in defaults:
            supported = ", ".join(f"{x}={default}" for x, default in defaults.items())
            raise ConfigError(
                f"{optimizer} has no option {name!r}; it has {supported}",
                where="options",
                got=name,
                want=supported,
            )
        default = defaults[name]
        if default is None:
            continue  # it says no type; the optimizer checks the value, as it checks ranges
        # Users write 1 for 1.0, so numbers are of one type.
        expected_type = (int, float) if type(default) in (int, float) else type(default)
        if not isinstance(value, expected_type):
            raise ConfigError(
                f"{optimizer}: {name} must be of the type of {default!r}, got {value!r}",
                where="options",
                got=value,
                want=default,
            )


# --------------------------------------------------------------------------- texts of command lines


def parse_options(texts: Iterable[str], *, optimizer: str = "adamw") -> dict[str, Any]:
    """Parse the options of an optimizer from the texts of a command line.

    Args:
        texts: Texts "NAME=VALUE": "betas=(0.9, 0.99)", "moments=bf16", "cautious=True".
        optimizer: A name of `OPTIMIZERS`. An option whose default is a string stays a string.

    Raises:
        ConfigError: The optimizer has no such option, or a value has another type than the default.

    Examples:
        >>> parse_options(["betas=(0.9, 0.99)", "moments=bf16"], optimizer="lion")
        {'betas': (0.9, 0.99), 'moments': 'bf16'}
    """
    defaults = _get_row(optimizer).options
    options: dict[str, Any] = {}
    for text in texts:
        name, _, value = text.partition("=")
        options[name] = value if isinstance(defaults.get(name), str) else _parse_literal(value)
        _check_values(optimizer, {name: options[name]})
    return options


def parse_groups(texts: Iterable[str], *, optimizer: str = "adamw") -> dict[str, dict[str, Any]]:
    """Parse the settings of parameter groups from the texts of a command line.

    Args:
        texts: Each is a pattern of names of parameters, followed by "NAME=VALUE" pairs
            without spaces: "head.* lr_scale=0.5 optimizer=lion".
        optimizer: The optimizer of groups that name none.

    Raises:
        ConfigError: As `parse_options`; or two texts start with the same pattern.

    Examples:
        >>> parse_groups(["head.* lr_scale=0.5 optimizer=lion betas=(0.8,0.9)"])
        {'head.*': {'lr_scale': 0.5, 'optimizer': 'lion', 'betas': (0.8, 0.9)}}
    """
    groups: dict[str, dict[str, Any]] = {}
    for text in texts:
        # The empty pattern of an empty text matches no name, which is an error later.
        pattern, *pairs = text.split() or [""]
        if pattern in groups:
            raise ConfigError(
                f"optimizer groups: {pattern!r} is given twice; a parameter is in one group",
                where="pattern",
                got=pattern,
            )
        values = {name: value for name, _, value in (pair.partition("=") for pair in pairs)}
        # Settings of the group itself; all other pairs are options of its optimizer, with their own
        # types.
        group = {name: _parse_literal(values[name]) for name in _GROUP_SETTINGS if name in values}
        if "optimizer" in values:
            group["optimizer"] = values["optimizer"]
        options = [pair for pair in pairs if pair.partition("=")[0] not in _NO_OPTIONS]
        optimizer_name = values.get("optimizer", optimizer)
        groups[pattern] = group | parse_options(options, optimizer=optimizer_name)
    return groups


def _parse_literal(text: str) -> Any:
    try:
        # Words such as bf16 are no literals, and stay strings.
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        try:
            return float(text)  # nan and inf, which the check of the range rejects
        except ValueError:
            return text
