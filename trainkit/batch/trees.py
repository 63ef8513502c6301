"""Trees of tensors: cut into microbatches, and put together again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import attrs
import torch

from trainkit.types import check_range


@attrs.frozen
class Along:
    """Along which dimension a tensor is cut; with `stack` each part is one slice without it."""

    dim: int = 0
    stack: bool = False


def shard_tree(tree: Any, count: int, *, spec: Any = Along(), even: bool = True) -> list[Any]:
    """Cut a tree of tensors and lists into microbatches.

    Dicts and tuples are structure, and every part has the same. A tensor is cut along one
    dimension, a list by its length; scalars, 0-d tensors among them, go into every part. This is
    for what runs alongside the batches; a `Batch`, whose spans have to be cut too, is cut by
    `split_batch`.

    Args:
        tree: Dicts, tuples, tensors, lists, and scalars (numbers, texts, None).
        count: The number of parts.
        spec: An `Along` for the whole tree, or None for what goes into every part as it is, or
            dicts and tuples as in the tree with such inside.
        even: Refuse what `count` does not divide. Without it the sizes of parts differ by at most
            one, larger ones first, and may be 0.

    Returns:
        `count` trees; their tensors are views, through which gradients go.

    Raises:
        ValueError: A leaf is no such thing, has no such dimension or does not divide, or the spec
            is of another structure; the message names the place in the tree.

    Examples:
        >>> parts = shard_tree({"x": torch.arange(4), "names": ["a", "b"], "scale": 2}, 2)
        >>> parts[1]
        {'x': tensor([2, 3]), 'names': ['b'], 'scale': 2}
        >>> shard_tree(torch.eye(2), 2, spec=Along(1, stack=True))
        [tensor([1., 0.]), tensor([0., 1.])]

    The idea is d9d's, for the state of its pipelines.
    """
    check_range("shard_tree", at_least=1, count=count)
    return _shards(tree, count, spec, even, "the tree")


def unshard_tree(parts: Sequence[Any], *, spec: Any = Along()) -> Any:
    """Put microbatches of trees together again: the inverse of `shard_tree`.

    Tensors are concatenated along the spec's dimension, or stacked where it says so; lists are
    joined. 0-d tensors, such as the loss of each part, are stacked to one entry per part.

    Args:
        parts: At least one tree, all of one structure.
        spec: As in `shard_tree`. Where it is None the first part's value stands for all.

    Returns:
        One tree; its tensors are new.

    Raises:
        ValueError: The parts or the spec differ in structure, tensors do not fit together, or a
            scalar differs between parts; the message names the place in the tree.

    Examples:
        >>> parts = [{"x": torch.ones(2), "loss": torch.tensor(float(i))} for i in range(2)]
        >>> unshard_tree(parts)
        {'x': tensor([1., 1., 1., 1.]), 'loss': tensor([0., 1.])}
    """
    if isinstance(parts, Mapping) or len(parts) == 0:
        raise ValueError("unshard_tree: parts must be a sequence of at least one tree")
    return _whole(list(parts), spec, "the tree")


# ----------------------------------------------------------------------------------------- to parts


def _shards(tree: Any, count: int, spec: Any, even: bool, place: str) -> list[Any]:
    inner = _inner("shard_tree", tree, spec, place)
    if inner is not None:
        cut = {
            name: _shards(tree[name], count, own, even, f"{place}[{name!r}]")
            for name, own in inner.items()
        }
        rows = [{name: parts[i] for name, parts in cut.items()} for i in range(count)]
        return rows if isinstance(tree, dict) else [tuple(row.values()) for row in rows]
    _check_leaf("shard_tree", tree, place)
    if spec is not None and isinstance(tree, torch.Tensor) and tree.ndim > 0:
        return _cut(tree, count, spec, even, place)
    if spec is None or not isinstance(tree, list):
        return [tree] * count
    if spec.stack:
        raise ValueError(f"shard_tree: {place} is a list, of which nothing can be stacked")
    ends = _ends(len(tree), count, even, place)
    return [tree[first:end] for first, end in pairwise([0, *ends])]


def _cut(tensor: torch.Tensor, count: int, spec: Along, even: bool, place: str) -> list[Any]:
    if not -tensor.ndim <= spec.dim < tensor.ndim:
        what = f"{place} has no dimension {spec.dim}, it is {tuple(tensor.shape)}"
        raise ValueError(f"shard_tree: {what}")
    size = tensor.shape[spec.dim]
    if not spec.stack:
        return list(tensor.tensor_split(_ends(size, count, even, place)[:-1], spec.dim))
    if size != count:
        must = f"dimension {spec.dim} must have one slice for each of the {count} parts"
        raise ValueError(f"shard_tree: {place} is {tuple(tensor.shape)}: {must}")
    return list(tensor.unbind(spec.dim))


def _ends(size: int, count: int, even: bool, place: str) -> list[int]:
    if even and size % count:
        what = f"{size} entries of {place} do not divide into {count} parts"
        raise ValueError(f"shard_tree: {what}; even=False allows parts that differ by one")
    small, larger = divmod(size, count)
    return [small * part + min(part, larger) for part in range(1, count + 1)]


# --------------------------------------------------------------------------------------- to a whole


def _whole(parts: list[Any], spec: Any, place: str) -> Any:
    first = parts[0]
    inner = _inner("unshard_tree", first, spec, place)
    kinds = [_structure(part) for part in parts]
    differs = next((i for i, kind in enumerate(kinds) if kind != kinds[0]), None)
    if differs is not None:
        what = f"is {kinds[0]} in part 0 and {kinds[differs]} in part {differs}"
        raise ValueError(f"unshard_tree: {place} {what}")
    if inner is not None:
        found = {
            name: _whole([part[name] for part in parts], own, f"{place}[{name!r}]")
            for name, own in inner.items()
        }
        return found if isinstance(first, dict) else tuple(found.values())
    _check_leaf("unshard_tree", first, place)
    if spec is None:
        return first
    if isinstance(first, torch.Tensor):
        return _joined(parts, spec, place)
    if isinstance(first, list):
        return [entry for part in parts for entry in part]
    if any(part != first for part in parts):
        raise ValueError(f"unshard_tree: {place} is a scalar that differs between parts: {parts}")
    return first


def _joined(parts: list[torch.Tensor], spec: Along, place: str) -> torch.Tensor:
    try:
        if parts[0].ndim == 0:
            return torch.stack(parts)
        return torch.stack(parts, spec.dim) if spec.stack else torch.cat(parts, spec.dim)
    except (RuntimeError, IndexError) as error:
        shapes = [tuple(part.shape) for part in parts]
        what = f"{place} cannot be put together along dimension {spec.dim}: {shapes}"
        raise ValueError(f"unshard_tree: {what}") from error


# ---------------------------------------------------------------------------------------- structure


def _inner(where: str, tree: Any, spec: Any, place: str) -> dict[Any, Any] | None:
    """Return the spec of each child of a node; None for a leaf."""
    is_node = isinstance(tree, dict) or type(tree) is tuple
    if spec is None or isinstance(spec, Along):
        return dict.fromkeys(_names(tree), spec) if is_node else None
    if not is_node or _structure(spec) != _structure(tree):
        what = f"{place} is {_structure(tree)}, and its spec is {_structure(spec)}"
        must = "a spec is an Along, None, or of the tree's structure"
        raise ValueError(f"{where}: {what}; {must}")
    return {name: spec[name] for name in _names(tree)}


def _names(node: Any) -> list[Any]:
    return list(node if isinstance(node, dict) else range(len(node)))


def _structure(node: Any) -> str:
    """Return what must be equal between parts: the kind of a node, and its children's names."""
    if isinstance(node, dict):
        return f"a dict of {', '.join(sorted(map(repr, node)))}"
    if type(node) is tuple:
        return f"a tuple of {len(node)}"
    if isinstance(node, torch.Tensor):
        return f"a {node.ndim}-d tensor of {node.dtype}"
    return "a list" if isinstance(node, list) else "no dict, tuple, list or tensor"


def _check_leaf(where: str, leaf: Any, place: str) -> None:
    kinds = (torch.Tensor, list, bool, int, float, str, bytes, type(None))
    if not isinstance(leaf, kinds):
        what = f"{place} is a {type(leaf).__name__}, which cannot be cut"
        mend = "make it tensors, lists, dicts, tuples and scalars (split_batch cuts a Batch)"
        raise ValueError(f"{where}: {what}; {mend}")  # noqa: TRY004 -- as of all arguments
