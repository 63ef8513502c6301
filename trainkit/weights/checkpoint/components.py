"""Components: objects of a user's own, whose state is saved with a run and loaded again.

An average of the weights, a curriculum, a sampler, metrics: anything with `state_dict` and
`load_state_dict`. What they hold in common with PyTorch's own `Stateful` is these two methods.
"""

from __future__ import annotations

import math
import re
import socket
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import attrs
import torch
from torch import Tensor, nn

from trainkit.collectives import all_gather_objects, run_on_all_ranks
from trainkit.parallel.parameters import Box, get_local_box
from trainkit.types import Axis, ConfigError
from trainkit.weights.checkpoint.boxes import DTYPES, get_dtype_name
from trainkit.weights.checkpoint.component_trees import (
    MAX_DEPTH,
    TENSORS,
    Tree,
)

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,99}")
_MAX_VALUES = 100_000  # plain values of all components; a million would slow every save
MAX_COPIED = 1 << 20
"""The most bytes of all components on a rank that are copied after each step."""

MAX_COPIED_VALUES = 100
"""The most values, tensors among them, of components that are copied after each step."""

_MAX_NAME = 400  # letters of a tensor's name, before a number that makes it unique


@runtime_checkable
class Stateful(Protocol):
    """What a component is: its state can be read, and loaded again."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return the state: tensors and plain values in dictionaries, lists and tuples."""
        ...

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Take a state that `state_dict` has returned; its tensors are the component's to keep."""
        ...


@attrs.frozen(eq=False)
class Component:
    """An object whose state is saved with a run.

    Examples:
        >>> Component(nn.Linear(1, 1)).per_rank
        False
    """

    state: Stateful
    """The object. Its `state_dict()` holds tensors, numbers, strings, booleans and None in
    dictionaries, lists and tuples."""

    per_rank: bool = attrs.field(default=False, kw_only=True)
    """Each rank saves and loads its own state, so a run resumes with as many ranks only. By default
    the state is equal on all ranks; the first one writes it, and a save fails if another differs.
    """

    ranks: Sequence[int] | None = attrs.field(default=None, kw_only=True)
    """The ranks that have it equally, this one among them: a group of an axis, or those of a node
    (`find_ranks_of_node`). The first of them writes it, and a save fails if another differs. A run
    resumes with the same groups only."""

    required: bool = attrs.field(default=True, kw_only=True)
    """A checkpoint without it does not fit the run. If False, a message says that the object stays
    as it is."""


Components = Mapping[str, Any]
"""Components by name, each a `Component`, or an object that is a required one equal on all ranks.
"""


def get_components(components: Components | None, *, by: str) -> dict[str, Component]:
    """Return components by name as records, or raise ConfigError for one that is none.

    Examples:
        >>> get_components({"curriculum": 3}, by="resume")
        Traceback (most recent call last):
        ...
        trainkit.types.ConfigError: resume: the component 'curriculum' is an `int` without state_...
    """
    found: dict[str, Component] = {}
    for name, value in (components or {}).items():
        component = value if isinstance(value, Component) else Component(value)
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ConfigError(
                f"{by}: a component is named {name!r}; use letters, digits, - and _, at most 100",
                where="components",
            )
        if not isinstance(component.state, Stateful) or isinstance(component.state, type):
            raise ConfigError(
                f"{by}: the component {name!r} is an `{type(component.state).__name__}` without "
                "state_dict and load_state_dict, which say what is saved of it",
                where=f"components.{name}",
            )
        if component.per_rank and component.ranks is not None:
            raise ConfigError(
                f"{by}: the component {name!r} has both per_rank and ranks; give one of them",
                where=f"components.{name}",
            )
        found[name] = component
    return found


def find_ranks_of_node(world: Axis) -> list[int]:
    """Return the ranks on this rank's node, by the name of its host, in ascending order.

    Args:
        world: All ranks, `ps.world`.

    Effects:
        Communicates on `world`.

    Examples:
        >>> from trainkit.types import SOLO
        >>> find_ranks_of_node(SOLO)
        [0]
    """
    hosts = all_gather_objects(socket.gethostname(), world)
    return [rank for rank, host in enumerate(hosts) if host == hosts[world.index]]


@attrs.frozen(eq=False)
class ComponentStates:
    """The states of this rank's components at one moment; the tensors are those of the objects.

    `trees` has {"per_rank", "ranks", "state", "sharded"} of each component, the last with the names
    of its sharded tensors. Tensors have the names of the index: those in `replicated` are equal on
    all ranks, those in `sharded` are DTensors, those in `own` this rank writes, and those in
    `copies` the first rank of a group writes.
    """

    trees: Mapping[str, Any]
    replicated: Mapping[str, Tensor]
    sharded: Mapping[str, Tensor]
    own: Mapping[str, Tensor]
    copies: Mapping[str, Tensor]
    values: int = 0  # of all trees, tensors among them


def read_components(components: Components | None, *, rank: int, by: str) -> ComponentStates:
    """Read the states of components, without copying a tensor.

    Two keys with one tensor (the same storage, offset, shape and strides) share one name, also of
    two components.

    Args:
        components: The components.
        rank: This rank.
        by: The function that errors name.

    Raises:
        ConfigError: A state holds what no checkpoint can; names its path.

    Effects:
        Calls `state_dict` of each component.

    Examples:
        >>> weight = torch.ones(2)
        >>> layer = nn.Linear(1, 1)
        >>> read_components({"layer": layer}, rank=0, by="save").replicated.keys()
        dict_keys(['components/layer/weight', 'components/layer/bias'])
    """
    common, own = _Encoder(by), _Encoder(by, may_be_sharded=False)
    encoders, copies = [common, own], dict[str, Tensor]()
    trees: dict[str, Any] = {}
    for name, component in get_components(components, by=by).items():
        encoder, prefix, ranks = common, f"{TENSORS}{name}", None
        # Names of ranks differ: each is a tensor of its own in the index.
        if component.per_rank:
            encoder, prefix = own, f"{prefix}/rank_{rank:05d}"
        elif component.ranks is not None:
            ranks = _check_group(component.ranks, name, rank=rank, by=by)
            # Of its own, as a name shared with another component would differ in the group.
            encoder, prefix = _Encoder(by, may_be_sharded=False), f"{prefix}/ranks_{ranks[0]:05d}"
            encoders.append(encoder)
        tree = encoder.encode(component.state.state_dict(), (name,), prefix)
        trees[name] = {"per_rank": component.per_rank, "ranks": ranks, "state": tree}
        if ranks is not None:
            (own.tensors if rank == ranks[0] else copies).update(encoder.tensors)
    values = sum(encoder.values for encoder in encoders)
    if values > _MAX_VALUES:
        raise ConfigError(
            f"{by}: the components {', '.join(trees)} hold {values} plain "
            f"values, and a checkpoint at most {_MAX_VALUES}; put long lists of numbers into "
            "tensors",
            where="components",
        )
    sharded = {name: x for name, x in common.tensors.items() if is_sharded(x)}
    replicated = {name: x for name, x in common.tensors.items() if name not in sharded}
    for name, tree in trees.items():
        tree["sharded"] = [x for x in sharded if x.startswith(f"{TENSORS}{name}/")]
    return ComponentStates(trees, replicated, sharded, own.tensors, copies, values)


def _check_group(ranks: Sequence[int], name: str, *, rank: int, by: str) -> list[int]:
    found = sorted({*ranks})
    if rank not in found:
        raise ConfigError(
            f"{by}: the component {name!r} is of the ranks {found}, and this is rank {rank}",
            where=f"components.{name}",
            hint="give each rank the ranks of its own group",
        )
    return found


def copy_components(components: Components | None) -> Components | None:
    """Copy the states of components, so that they can be saved when the objects have moved on.

    Args:
        components: The components.

    Returns:
        Components that can be saved in place of them, with tensors on the same devices; None if
        they have more than `MAX_COPIED` bytes on this rank, or more than `MAX_COPIED_VALUES`
        values, since a copy after each step would then slow a run. What no checkpoint can hold is
        not looked for.

    Effects:
        Calls `state_dict` of each component. No host sync.

    Examples:
        >>> layer = nn.Linear(1, 1)
        >>> copies = copy_components({"layer": layer})
        >>> _ = layer.weight.data.fill_(7)
        >>> bool(copies["layer"].state.state_dict()["weight"] == 7)
        False
        >>> copy_components({"layer": nn.Linear(512, 512)}) is None
        True
    """
    copier = _Copier()
    copies: dict[str, Component] = {}
    for name, component in get_components(components, by="copy_components").items():
        state = copier.copy(component.state.state_dict())
        if copier.is_full:
            return None
        copies[name] = attrs.evolve(component, state=_Copy(state))
    return copies


@attrs.frozen(eq=False)
class _Copy:
    """A state that a component had."""

    state: Any

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state_dict: Any, /) -> None:
        raise TypeError(f"a copy of the state of a component takes no other: {state_dict!r:.100}")


@attrs.define(eq=False)
class _Copier:
    """Copies states, until they are too large."""

    bytes: int = 0
    values: int = 0
    # By what makes two tensors one: the tensor, which keeps its memory from being used by another
    # one meanwhile, and its copy.
    tensors: dict[Any, tuple[Tensor, Tensor]] = attrs.field(factory=dict)

    @property
    def is_full(self) -> bool:
        return self.bytes > MAX_COPIED or self.values > MAX_COPIED_VALUES

    def copy(self, value: Any) -> Any:
        self.values += 1
        if isinstance(value, Tensor):
            return self._copy_tensor(value)
        if self.is_full:
            return None
        if isinstance(value, Mapping):
            return {key: self.copy(x) for key, x in value.items()}
        if type(value) in (list, tuple):
            return type(value)(self.copy(x) for x in value)
        return value

    def _copy_tensor(self, x: Tensor) -> Tensor | None:
        key = _get_identity(x)
        if key not in self.tensors:
            local = get_local_box(x).local if is_sharded(x) else x
            self.bytes += local.numel() * local.element_size()
            if self.is_full:
                return None
            self.tensors[key] = x, x.detach().clone()
        return self.tensors[key][1]


def _get_identity(x: Tensor) -> Any:
    """Return what is equal of two tensors that share all of their memory."""
    is_plain = type(x) in (Tensor, nn.Parameter) and x.layout == torch.strided
    # Empty tensors have no storage that could tell them apart, and a shard may be empty.
    if not is_plain or not x.numel():
        return id(x)
    return x.untyped_storage().data_ptr(), x.storage_offset(), x.shape, x.stride(), x.dtype


def check_components(components: Components | None, axis: Axis, *, by: str) -> None:
    """Check that components can be saved, and that all ranks have components of the same names.

    Raises:
        ConfigError: On all ranks.

    Effects:
        Calls `state_dict` of each component; communicates on `axis`.

    Examples:
        >>> from trainkit.types import SOLO
        >>> check_components({"layer": nn.Linear(1, 1)}, SOLO, by="resume")
    """

    def read() -> list[str]:
        return sorted(read_components(components, rank=axis.index, by=by).trees)

    by_rank = run_on_all_ranks(read, axis)
    for rank, names in enumerate(by_rank):
        if names != by_rank[0]:
            raise ConfigError(
                f"{by}: ranks 0 and {rank} do not have the same components: {by_rank[0]} and "
                f"{names}",
                where="components",
                hint="give every rank the same names; Component(it, per_rank=True) may differ",
            )


@attrs.define(eq=False)
class _Encoder:
    """Turns states into trees, and collects their tensors by name."""

    by: str
    may_be_sharded: bool = True
    tensors: dict[str, Tensor] = attrs.field(factory=dict)
    names: dict[Any, str] = attrs.field(factory=dict)  # of tensors, by what makes two one
    values: int = 0

    def encode(self, value: Any, path: tuple[Any, ...], prefix: str) -> Tree:
        self.values += 1
        kind = type(value)
        if isinstance(value, Tensor):
            return self._encode_tensor(value, path, prefix)
        if len(path) > MAX_DEPTH:
            raise self._refuse(path, f"is nested more than {MAX_DEPTH} deep")
        if isinstance(value, Mapping):
            return self._encode_table(value, path, prefix)
        if kind in (list, tuple):
            items = [self.encode(item, (*path, i), prefix) for i, item in enumerate(value)]
            return items if kind is list else {"$tuple": items}
        if value is None or kind is bool or (kind is str and _is_unicode(value)):
            return value
        if kind in (int, float):
            return _encode_number(value)
        # Exact types: a numpy.float64 is a float, and would come back as another class.
        raise self._refuse(path, f"is a `{kind.__module__}.{kind.__qualname__}`")

    def _encode_table(self, value: Mapping[Any, Any], path: tuple[Any, ...], prefix: str) -> Tree:
        for key in value:
            is_int = type(key) is int and -(2**63) <= key < 2**63
            if not is_int and not (type(key) is str and _is_unicode(key)):
                raise self._refuse(path, f"has the key {key!r:.100}, which is neither text nor int")
        items = [(key, self.encode(x, (*path, key), prefix)) for key, x in value.items()]
        # JSON is written with sorted names, and the order of a dictionary may matter.
        is_plain = all(type(key) is str and not key.startswith("$") for key in value)
        if is_plain and [*value] == sorted(value):
            return dict(items)
        return {"$dict": [[key, item] for key, item in items]}

    def _encode_tensor(self, x: Tensor, path: tuple[Any, ...], prefix: str) -> Tree:
        dtype = get_dtype_name(x.dtype)
        is_plain = type(x) in (Tensor, nn.Parameter) and x.layout == torch.strided
        if x.is_meta or not (is_plain or (self.may_be_sharded and is_sharded(x))):
            what = "is a " + ("tensor without values" if x.is_meta else f"`{type(x).__name__}`")
            raise self._refuse(path, f"{what}; give a plain tensor: of a shard to_local()")
        if dtype not in DTYPES or x.is_quantized:
            raise self._refuse(path, f"has the dtype {dtype}, which no checkpoint holds")
        key = _get_identity(x)
        if key not in self.names:
            self.names[key] = self._choose_name(path, prefix)
            self.tensors[self.names[key]] = x
        return {
            "$tensor": self.names[key],
            "dtype": dtype,
            "shape": list(x.shape),
            "on": "cpu" if x.device.type == "cpu" else "device",
        }

    def _choose_name(self, path: tuple[Any, ...], prefix: str) -> str:
        # Only a label: the tree holds the keys. Files and commands accept no other letters.
        parts = [re.sub(r"[^A-Za-z0-9_.:-]", "_", str(key)) or "_" for key in path[1:]]
        label = "/".join((prefix, *parts))[:_MAX_NAME].replace("..", "._")
        name, number = label, len(self.tensors)
        while name in self.tensors:
            name, number = f"{label}-{number}", number + 1
        return name

    def _refuse(self, path: tuple[Any, ...], what: str) -> ConfigError:
        where = "/".join(map(str, path))
        return ConfigError(
            f"{self.by}: {where[:200]} of the components {what}; a checkpoint holds tensors, "
            "numbers, strings, booleans and None, in dictionaries, lists and tuples",
            where=f"components.{where[:200]}",
            hint="change what state_dict returns: torch.from_numpy of an array, float of a number",
        )


def is_sharded(x: Tensor) -> bool:
    """Return whether a tensor is a DTensor whose shards a checkpoint can hold.

    Examples:
        >>> is_sharded(torch.ones(1))
        False
    """
    placements = getattr(x, "placements", None)
    return placements is not None and all(p.is_shard() or p.is_replicate() for p in placements)


def _encode_number(value: float) -> Tree:
    if isinstance(value, int):
        return value if -(2**63) <= value < 2**63 else {"$int": hex(value)}
    return value if math.isfinite(value) else {"$float": repr(value)}


def _is_unicode(text: str) -> bool:
    # Half of a surrogate pair is text to Python, and to no file.
    return text.isascii() or text.encode(errors="ignore").decode() == text


def get_component_boxes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Box]]:
    """Return the boxes of tensors of components that this rank writes, each after its tensor."""
    boxes = {name: (x, get_local_box(x)) for name, x in tensors.items()}
    return {name: (x, box) for name, (x, box) in boxes.items() if box.writes}
