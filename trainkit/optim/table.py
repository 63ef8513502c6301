"""The optimizers by name, and the one that a recipe's options ask for.

To add one: a function or class that takes groups and options, and a row. Nothing else knows names.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import nn

from trainkit.optim.adamw import adamw
from trainkit.optim.elementwise import Elementwise
from trainkit.optim.groups import grouped, split_by_pattern
from trainkit.optim.rules import Lion, Momentum, ScheduleFree, SignSGD
from trainkit.optim.storage import moment_bytes
from trainkit.optim.together import together
from trainkit.types import SOLO, Axis, ConfigError


@attrs.frozen
class Kind:
    """A row: what makes an optimizer of groups, and what it remembers of each element.

    `narrow` moments are kept as the option "moments" says, `wide` ones in fp32.
    """

    make: Callable[..., torch.optim.Optimizer]
    narrow: int = 0
    wide: int = 0

    @property
    def options(self) -> dict[str, Any]:
        """What it can be told beside rate, decay and seed, with what holds otherwise."""
        found = dict(inspect.signature(self.make).parameters)
        if "options" in found:
            found = {**inspect.signature(Elementwise).parameters, **found}
        given = ("params", "options", "lr", "weight_decay", "seed")
        return {name: x.default for name, x in found.items() if name not in given}


OPTIMIZERS: dict[str, Kind] = {
    "adamw": Kind(adamw, narrow=2),
    "lion": Kind(Lion, narrow=1),
    "momentum": Kind(Momentum, narrow=1),
    "schedule-free": Kind(ScheduleFree, narrow=1, wide=1),
    "signsgd": Kind(SignSGD),
}
"""All by name; docs/howto/choose-an-optimizer.md says when which."""


def state_bytes(optimizer: str, options: Sequence[str] = ()) -> float:
    """Return what an optimizer remembers of each element of a matrix in fp32, in bytes.

    Args:
        optimizer: Its name in `OPTIMIZERS`.
        options: As `make_optimizer` takes them.

    Examples:
        >>> state_bytes("adamw"), state_bytes("adamw", ["moments=bf16"]), state_bytes("signsgd")
        (8.0, 4.0, 0.0)
    """
    told, kind = _parsed(optimizer, options), OPTIMIZERS[optimizer]
    return kind.narrow * moment_bytes(told.get("moments", "fp32")) + 4 * kind.wide


def make_optimizer(
    named: Mapping[str, nn.Parameter],
    *,
    lr: float,
    optimizer: str = "adamw",
    weight_decay: float = 0.0,
    options: Sequence[str] = (),
    groups: Sequence[str] = (),
    mean: float | None = None,
    seed: int = 0,
    axis: Axis = SOLO,
) -> torch.optim.Optimizer:
    r"""Return the optimizer that names and texts ask for, as recipes take them from flags.

    Args:
        named: The parameters of this rank by their names in the whole model.
        lr: The rate; a group's "lr_scale" multiplies it, see `clip_and_step`.
        optimizer: A name of `OPTIMIZERS`.
        weight_decay: Of matrices; vectors have none.
        options: Its own options: "betas=(0.9, 0.99)", "moments=bf16".
        groups: What other parameters get: a regular expression of names in the whole model, and
            what holds for these: r"layers\.\d+\.mlp\..* lr_scale=0.5 optimizer=lion". What no
            expression matches is as all the rest of the arguments say.
        mean: As in `together`.
        seed: What stochastic rounding follows from.
        axis: The ranks that hold the parts of the model, `ps.pp`.

    Raises:
        ConfigError: A name, an option or a pattern is not known; or two patterns match a name.

    Effects:
        Communicates on `axis` where there are groups.

    Examples:
        >>> model = nn.ModuleDict({"up": nn.Linear(2, 3), "head": nn.Linear(3, 4)})
        >>> optimizer = make_optimizer(
        ...     dict(model.named_parameters()),
        ...     lr=0.1,
        ...     groups=["head.* lr_scale=0.5 optimizer=lion"],
        ... )
        >>> [(x["optimizer"], x.get("lr_scale"), len(x["params"])) for x in optimizer.param_groups]
        [('Lion', 0.5, 1), ('Lion', 0.5, 1), ('AdamW', None, 1), ('AdamW', None, 1)]
    """
    asked = [_of_group(text) for text in groups]
    split = [named]
    if asked:
        split = split_by_pattern(named, [pattern for pattern, _, _ in asked], axis=axis)
    main = {"optimizer": optimizer, "weight_decay": weight_decay, "seed": seed}
    made, rest = list[torch.optim.Optimizer](), ("", dict[str, Any](), list[str]())
    for part, (_, own, texts) in zip(split, [*asked, rest], strict=True):
        told: dict[str, Any] = main | own
        shared = options if told["optimizer"] == optimizer else ()
        made.append(_made(part, lr, [*shared, *texts], **told))
    return made[0] if len(made) == 1 and mean is None else together(made, mean=mean)


def _made(
    named: Mapping[str, nn.Parameter],
    lr: float,
    options: Sequence[str],
    *,
    optimizer: str,
    weight_decay: float,
    seed: int,
    **of_groups: Any,
) -> torch.optim.Optimizer:
    told, kind = _parsed(optimizer, options), OPTIMIZERS[optimizer]
    if "seed" in inspect.signature(kind.make).parameters or isinstance(kind.make, type):
        told["seed"] = seed
    groups = grouped(named.items(), weight_decay=weight_decay)
    return kind.make([group | of_groups for group in groups], lr=lr, **told)


_OF_GROUPS = ("lr_scale", "weight_decay", "max_norm")


def _of_group(text: str) -> tuple[str, dict[str, Any], list[str]]:
    """Return a group's pattern, what holds for it, and options of its optimizer."""
    pattern, *rest = text.split() or [""]
    own, options = dict[str, Any](), list[str]()
    for part in rest:
        name, _, value = part.partition("=")
        if name in _OF_GROUPS:
            own[name] = _number(name, value)
        elif name == "optimizer":
            own[name] = value
        else:
            options.append(part)
    return pattern, own, options


def _number(name: str, value: str) -> float:
    try:
        return float(value)
    except ValueError:
        told = f"optimizer groups: {name} must be a number, got {value!r}"
        raise ConfigError(told, where=name, got=value) from None


def _parsed(optimizer: str, options: Sequence[str]) -> dict[str, Any]:
    """Return options as values, each of the type of what holds without it."""
    if optimizer not in OPTIMIZERS:
        known = ", ".join(OPTIMIZERS)
        told = f"there is no optimizer {optimizer!r}; there are {known}"
        raise ConfigError(told, where="optimizer", got=optimizer, want=known)
    known, found = OPTIMIZERS[optimizer].options, dict[str, Any]()
    for text in options:
        name, _, value = text.partition("=")
        if name not in known:
            listed = ", ".join(f"{x}={default}" for x, default in known.items())
            told = f"{optimizer} has no option {name!r}; it has {listed}"
            raise ConfigError(told, where="options", got=text, want=listed)
        default = known[name]
        try:
            found[name] = value if isinstance(default, str) else ast.literal_eval(value)
        except (ValueError, SyntaxError):
            found[name] = value
        kind = float if type(default) is int or type(default) is float else type(default)
        if not isinstance(found[name], (int, float) if kind is float else kind):
            told = f"{optimizer}: {name} must be as {default!r}, got {value!r}"
            raise ConfigError(told, where="options", got=text, want=default)
    return found
