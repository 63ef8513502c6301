"""The state of components as JSON: what `state.json` holds of them. Without torch.

Plain values stand for themselves, and tables with sorted names too. Whatever JSON lacks is a table
with one name that begins with "$": "$tensor" is a tensor in a file of the checkpoint, "$tuple" a
tuple, "$int" an integer of more than 64 bits, "$float" a number that is not finite, and "$dict" a
dictionary with other keys than sorted text, as a list of pairs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import orjson

from trainkit.types import ConfigError
from trainkit.weights.checkpoint.boxes import shorten

TENSORS = "components/"
"""What the names of the tensors of components begin with in the index of a checkpoint."""

MAX_DEPTH = 50
"""The deepest nesting of a state."""

Tree = Any
"""The state of a component as JSON."""


def decode_tree(tree: Tree, get_tensor: Callable[[Mapping[str, Any]], Any], depth: int = 0) -> Any:
    """Return the state that a tree describes.

    Args:
        tree: The tree; it may be from a hostile file.
        get_tensor: Returns the tensor of a table with "$tensor".
        depth: How deep the tree lies in another one.

    Raises:
        ValueError: It is no such tree. Also a KeyError or a TypeError.

    Examples:
        >>> decode_tree({"decay": 0.5, "steps": {"$tuple": [1, 2]}}, lambda _: None)
        {'decay': 0.5, 'steps': (1, 2)}
    """
    if depth > MAX_DEPTH + 1:
        raise ValueError("it is nested too deep")

    def decode(item: Tree) -> Any:
        return decode_tree(item, get_tensor, depth + 1)

    if isinstance(tree, list):
        return [decode(item) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if "$tensor" in tree:
        return get_tensor(tree)
    kind = next(iter(tree), "")
    if not kind.startswith("$"):
        return {key: decode(item) for key, item in tree.items()}
    ((kind, value),) = tree.items()
    decoders: dict[str, Callable[[Any], Any]] = {
        "$tuple": lambda items: tuple(decode(item) for item in items),
        # A comprehension, since dict() would take any two letters as a pair.
        "$dict": lambda pairs: {key: decode(item) for key, item in pairs},
        "$int": lambda text: int(text, 16),
        "$float": float,
    }
    return decoders[kind](value)


def list_leaves(tree: Tree, path: str) -> Iterator[tuple[str, Any]]:
    """Yield the plain values and the tensors of a tree with their paths.

    Examples:
        >>> list(list_leaves({"a": [1, {"$tuple": [2]}]}, "ema"))
        [('ema/a/0', 1), ('ema/a/1/0', 2)]
    """
    pending = [(path, tree)]  # no recursion: a file may be nested deeper than Python's stack allows
    while pending:
        path, tree = pending.pop()
        items: list[Any] = []
        if isinstance(tree, list):
            items = [*enumerate(tree)]
        elif isinstance(tree, dict) and "$dict" in tree:
            items = tree["$dict"]
        elif isinstance(tree, dict) and "$tuple" in tree:
            items = [*enumerate(tree["$tuple"])]
        elif isinstance(tree, dict) and not next(iter(tree), "$").startswith("$"):
            items = [*tree.items()]
        if items:
            pending += [(f"{path}/{key}", item) for key, item in reversed(items)]
        else:
            yield path, tree


def list_states(components: Mapping[str, Any]) -> dict[str, Any]:
    """Return {path: value} of all components in a `state.json`; of a tensor its description.

    Examples:
        >>> list_states({"ema": {"per_rank": False, "states": [{"decay": 0.5}]}})
        {'ema/decay': 0.5}
    """
    return {
        name: value
        for component, saved in components.items()
        for label, state in zip(_label_states(saved), saved["states"], strict=True)
        for name, value in list_leaves(state, f"{component}/{label}" if label else component)
    }


def _label_states(saved: Mapping[str, Any]) -> list[str]:
    """Return what tells the states of a component apart: "" if there is only one."""
    if saved["per_rank"]:
        return [f"rank_{rank:05d}" for rank in range(len(saved["states"]))]
    return [f"ranks_{ranks[0]:05d}" for ranks in saved.get("groups", [])] or [""]


def hash_states(components: Mapping[str, Any]) -> dict[str, int]:
    """Return a hash of 64 bits of the plain values of each component in a `state.json`."""
    hashes = {}
    for name, saved in components.items():
        data = orjson.dumps([name, saved], option=orjson.OPT_SORT_KEYS)
        hashes[f"{TENSORS}{name} values"] = int.from_bytes(
            hashlib.sha256(data).digest()[:8], "little"
        )
    return hashes


def merge_states(
    trees: Sequence[Mapping[str, Any]], hashes: Sequence[Mapping[str, int]], *, by: str
) -> dict[str, Any]:
    """Merge the components of all ranks into the "components" of `state.json`.

    Args:
        trees: {name: {"per_rank", "ranks", "state", "sharded"}} of each rank.
        hashes: Those of each rank's boxes of tensors, by "NAME OFFSET".
        by: The function that the error names.

    Raises:
        ConfigError: A component differs on ranks that should have it equally; names the ranks and
            the keys. Or ranks disagree about a group.
    """
    groups = {name: _gather_groups(name, trees, by=by) for name in trees[0]}
    ranks: dict[str, list[int]] = {}
    for rank, other in enumerate(trees):
        for path in _find_differences(trees, other, hashes, hashes[rank]):
            ranks.setdefault(path, []).append(rank)
    if ranks:
        problems = [
            f"{path} on rank{'s' * (len(ranks[path]) > 1)} {', '.join(map(str, ranks[path]))}"
            for path in sorted(ranks)
        ]
        is_grouped = any(groups.get(path.partition("/")[0]) for path in ranks)
        first = "the first rank of their group" if is_grouped else "rank 0"
        raise ConfigError(
            f"{by}: components differ from those of {first}: {shorten(problems)}",
            where=min(ranks),
            got=problems,
            want="the same state on every rank",
            hint="compute it from what all ranks have in common, or give Component(it, "
            "per_rank=True), of which each rank saves its own",
        )
    return {
        name: {
            "per_rank": own["per_rank"],
            **({"groups": groups[name]} if groups[name] else {}),
            "states": [
                other[name]["state"]
                for rank, other in enumerate(trees)
                if own["per_rank"] or rank == _get_first(other[name])
            ],
        }
        for name, own in trees[0].items()
    }


def _get_first(tree: Mapping[str, Any]) -> int:
    """Return the rank that writes a component which several have equally."""
    return tree["ranks"][0] if tree["ranks"] else 0


def _gather_groups(
    name: str, trees: Sequence[Mapping[str, Any]], *, by: str
) -> list[list[int]] | None:
    """Return the groups of ranks that have a component equally; None if it has no groups."""
    by_rank = [other[name]["ranks"] if name in other else None for other in trees]
    if not any(by_rank):
        return None
    for rank, ranks in enumerate(by_rank):
        others = [x for x in ranks or [] if x >= len(trees) or by_rank[x] != ranks]
        if others or not ranks:
            raise ConfigError(
                f"{by}: the component {name!r} is of the ranks {ranks} on rank {rank}, and "
                + (
                    f"rank {others[0]} says otherwise or does not exist" if others else "has groups"
                ),
                where=f"components.{name}",
                got=by_rank,
                want="on each rank the ranks of its own group",
            )
    return [ranks for rank, ranks in enumerate(by_rank) if ranks and rank == ranks[0]]


def _find_differences(
    trees: Sequence[Mapping[str, Any]],
    other: Mapping[str, Any],
    hashes: Sequence[Mapping[str, int]],
    other_hashes: Mapping[str, int],
) -> list[str]:
    """Return the paths of what must be equal on a rank and on the first one, and is not."""
    paths: list[str] = []
    for name in trees[0].keys() | other.keys():
        if name not in trees[0] or name not in other:
            paths.append(name)
            continue
        b, first = other[name], _get_first(other[name])
        a = trees[first][name]
        if a["per_rank"] != b["per_rank"]:
            paths.append(name)
        elif not a["per_rank"]:
            left = _hash_leaves(a, name, hashes[first])
            right = _hash_leaves(b, name, other_hashes)
            # None is a value of a state, so an absent one must be another.
            found = [
                x for x in left.keys() | right.keys() if left.get(x, left) != right.get(x, left)
            ]
            # A list and a tuple have the same leaves.
            paths += found or [name] * (a != b)
    return paths


def _hash_leaves(tree: Mapping[str, Any], name: str, hashes: Mapping[str, int]) -> dict[str, Any]:
    """Return a component's values by path, with the hash of each tensor that is not sharded."""

    def describe(value: Any) -> Any:
        if not isinstance(value, dict) or "$tensor" not in value:
            return value
        tensor = value["$tensor"]
        # A tensor that is not sharded is one box. Ranks have different shards.
        box = f"{tensor} {(0,) * len(value['shape'])}"
        return [value, None if tensor in tree["sharded"] else hashes.get(box)]

    return {path: describe(value) for path, value in list_leaves(tree["state"], name)}


def find_state_problems(components: Any, index: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with the "components" of a `state.json` from a file.

    Args:
        components: The parsed value.
        index: The checked entries of the checkpoint's index.

    Examples:
        >>> find_state_problems({"ema": {"per_rank": False, "states": [{}]}}, {})
        []
    """

    def check_tensor(described: Mapping[str, Any]) -> None:
        name = described["$tensor"]
        entry = index[name]
        if not name.startswith(TENSORS) or described["on"] not in ("cpu", "device"):
            raise ValueError(f"{name} is no tensor of a component")
        if (described["dtype"], described["shape"]) != (entry["dtype"], entry["shape"]):
            raise ValueError(f"{name} is another one in the index")

    if not isinstance(components, dict):
        return ["the components in state.json are no table"]
    problems = []
    for name, saved in components.items():
        try:
            for state in saved["states"]:
                decode_tree(state, check_tensor)
            is_valid = saved["per_rank"] in (True, False) and isinstance(saved["states"], list)
            is_valid = is_valid and len(saved["states"]) > 0
            is_valid = is_valid and ("groups" not in saved or _has_valid_groups(saved))
        except (KeyError, TypeError, ValueError, AttributeError):
            is_valid = False
        if not is_valid:
            problems.append(f"the component {name[:100]!r} in state.json is damaged")
    return problems


def _has_valid_groups(saved: Mapping[str, Any]) -> bool:
    """Return whether the groups of a component are all ranks, each once, with a state each."""
    groups = saved["groups"]
    ranks = sorted(rank for group in groups for rank in group)
    is_sorted = all(group and group == sorted(group) for group in groups)
    is_each = ranks == [*range(len(ranks))] and len(groups) == len(saved["states"]) > 0
    return is_sorted and is_each and not saved["per_rank"]
