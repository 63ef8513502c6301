"""Maps of names and tensors in memory that compose, and run in both directions.

A map takes some tensors by name and gives others. Small ones (`rename`, `stack`, `split`,
`transpose`) are combined one after the other (`chain`) and side by side (`join`); `inverse` of the
whole is then that of its parts. `hub` has such maps for folders, of which every rank reads boxes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import attrs
import torch
from torch import Tensor

from trainkit.types import ConfigError
from trainkit.weights.checkpoint.boxes import shorten

Run = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]
"""From the tensors of all inputs to those of all outputs."""


@attrs.frozen(eq=False)
class TensorMap:
    """A map from some tensors to others, with its inverse.

    Attributes:
        inputs: The names of the tensors that it takes.
        outputs: The names of the tensors that it gives.
        run: From inputs to outputs.
        run_back: From outputs to inputs.

    Examples:
        >>> both = chain(rename({"w": "up"}), transpose("up"))
        >>> there = both.apply({"w": torch.zeros(2, 3), "other": torch.zeros(1)})
        >>> {name: tuple(x.shape) for name, x in there.items()}
        {'other': (1,), 'up': (3, 2)}
        >>> sorted(both.inverse().apply(there))
        ['other', 'w']
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    run: Run
    run_back: Run

    def apply(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors with the outputs in place of the inputs; others stay as they are.

        Views of the tensors are returned where that is possible.

        Raises:
            ConfigError: An input is missing, or an output has the name of another tensor.
        """
        missing = [name for name in self.inputs if name not in tensors]
        if missing:
            raise ConfigError(
                f"TensorMap: {shorten(missing)} of its inputs are missing; the tensors are "
                f"{shorten([*tensors])}",
                got=missing,
            )
        others = {name: x for name, x in tensors.items() if name not in self.inputs}
        _check_distinct("TensorMap", "tensor", [*others, *self.outputs])
        return others | self.run({name: tensors[name] for name in self.inputs})

    def inverse(self) -> TensorMap:
        """Return the map from the outputs to the inputs."""
        return TensorMap(self.outputs, self.inputs, self.run_back, self.run)


def rename(names: Mapping[str, str]) -> TensorMap:
    """Return a map that gives tensors other names: old names to new ones.

    Raises:
        ConfigError: Two tensors would have one name.

    Examples:
        >>> list(rename({"a": "b", "b": "a"}).apply({"a": torch.zeros(1), "b": torch.ones(1)}))
        ['b', 'a']
    """
    _check_distinct("rename", "output", [*names.values()])
    back = {new: old for old, new in names.items()}
    return TensorMap(
        tuple(names),
        tuple(back),
        lambda tensors: {names[name]: x for name, x in tensors.items()},
        lambda tensors: {back[name]: x for name, x in tensors.items()},
    )


def stack(names: Sequence[str], into: str, *, dim: int = 0) -> TensorMap:
    """Return a map that stacks tensors of one shape along a new dimension, such as experts.

    Raises:
        ConfigError: There are no names, or one comes twice.

    Examples:
        >>> experts = [f"experts.{e}.up" for e in range(4)]
        >>> tensors = {name: torch.zeros(3, 2) for name in experts}
        >>> stack(experts, "experts.up").apply(tensors)["experts.up"].shape
        torch.Size([4, 3, 2])
    """
    _check_distinct("stack", "input", names)
    return TensorMap(
        tuple(names),
        (into,),
        lambda tensors: {into: torch.stack([tensors[name] for name in names], dim)},
        lambda tensors: dict(zip(names, tensors[into].unbind(dim), strict=True)),
    )


def split(name: str, into: Mapping[str, int], *, dim: int = 0) -> TensorMap:
    """Return a map that splits a tensor along a dimension; the inverse concatenates.

    Args:
        name: The tensor.
        into: The names of the parts, with their sizes along the dimension.
        dim: The dimension.

    Raises:
        ConfigError: There are no parts.

    Examples:
        >>> parts = split("qkv", {"q": 4, "k": 2, "v": 2})
        >>> there = parts.apply({"qkv": torch.zeros(8, 4)})
        >>> there["v"].shape, parts.inverse().apply(there)["qkv"].shape
        (torch.Size([2, 4]), torch.Size([8, 4]))
    """
    _check_distinct("split", "output", [*into])

    def run(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        size = tensors[name].shape[dim]
        if size != sum(into.values()):
            raise ConfigError(
                f"split: {name} has {size} elements along dimension {dim}, and the parts have "
                f"{'+'.join(map(str, into.values()))}",
                where=name,
                got=size,
                want=sum(into.values()),
            )
        return dict(zip(into, tensors[name].split([*into.values()], dim), strict=True))

    return TensorMap(
        (name,),
        tuple(into),
        run,
        lambda tensors: {name: torch.cat([tensors[part] for part in into], dim)},
    )


def transpose(*names: str, dims: tuple[int, int] = (-2, -1)) -> TensorMap:
    """Return a map that exchanges two dimensions of each tensor; it is its own inverse.

    Examples:
        >>> transpose("a").apply({"a": torch.zeros(2, 3)})["a"].shape
        torch.Size([3, 2])
    """
    _check_distinct("transpose", "input", names)

    def run(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: x.transpose(*dims) for name, x in tensors.items()}

    return TensorMap(names, names, run, run)


def chain(*maps: TensorMap) -> TensorMap:
    """Return the map that applies maps one after the other, the first one first.

    A map need not take all that the one before gives, and may take more.

    Raises:
        ConfigError: There are no maps; a map takes a tensor that an earlier one has taken and not
            given back, or gives one that exists already.

    Examples:
        >>> chain(rename({"a": "b"}), rename({"b": "c", "x": "y"})).outputs
        ('c', 'y')
    """
    if not maps:
        raise ConfigError("chain: it needs at least one map")
    inputs: list[str] = []
    made: set[str] = set()
    for each in maps:
        fresh = [name for name in each.inputs if name not in made]
        # One that was taken from outside before is something else by now.
        _check_distinct("chain", "input", [*inputs, *fresh])
        inputs += fresh
        made = made - {*each.inputs} | {*each.outputs}
    current = [*inputs]
    for each in maps:
        # Inputs of later maps are there from the start, and may not be overwritten.
        current = [name for name in current if name not in each.inputs] + [*each.outputs]
        _check_distinct("chain", "output", current)
    return TensorMap(
        tuple(inputs),
        tuple(current),
        _run_one_by_one([each.apply for each in maps]),
        _run_one_by_one([each.inverse().apply for each in reversed(maps)]),
    )


def join(*maps: TensorMap) -> TensorMap:
    """Return the map that applies maps side by side, to tensors that differ.

    Raises:
        ConfigError: There are no maps; or two take, or give, a tensor of one name.

    Examples:
        >>> join(rename({"a": "b"}), transpose("c")).outputs
        ('b', 'c')
        >>> join(rename({"a": "b"}), rename({"c": "b"}))
        Traceback (most recent call last):
        trainkit.types.ConfigError: join: the output b comes more than once
    """
    inputs = [name for each in maps for name in each.inputs]
    outputs = [name for each in maps for name in each.outputs]
    _check_distinct("join", "input", inputs)
    _check_distinct("join", "output", outputs)

    def side_by_side(runs: Sequence[tuple[tuple[str, ...], Run]]) -> Run:
        def run(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
            made: dict[str, Tensor] = {}
            for names, each in runs:
                made |= each({name: tensors[name] for name in names})
            return made

        return run

    return TensorMap(
        tuple(inputs),
        tuple(outputs),
        side_by_side([(each.inputs, each.run) for each in maps]),
        side_by_side([(each.outputs, each.run_back) for each in maps]),
    )


def _run_one_by_one(steps: Sequence[Run]) -> Run:
    def run(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        current = dict(tensors)
        for step in steps:
            current = step(current)
        return current

    return run


def _check_distinct(function: str, kind: str, names: Sequence[str]) -> None:
    """Raise ConfigError if there are no names, or one comes twice."""
    if not names:
        raise ConfigError(f"{function}: it needs at least one {kind}")
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ConfigError(
            f"{function}: the {kind} {shorten(repeated)} comes more than once", got=repeated
        )
