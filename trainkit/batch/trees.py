"""Split trees of tensors into microbatches, and concatenate them again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import attrs
import torch

from trainkit.types import check_range


@attrs.frozen
class Along:
    """The dimension to split along; with `stack` each part is one slice without it."""

    dim: int = 0
    stack: bool = False


def shard_tree(tree: Any, count: int, *, spec: Any = Along(), even: bool = True) -> list[Any]:
    """Split a tree of tensors and lists into microbatches.

    Dicts and tuples are the structure of the tree, and every part has the same one. Tensors are
    split along a dimension and lists by their length. Scalars and 0-d tensors go into every part.
    Use it for inputs that accompany the batches. For a `Batch`, whose spans have to be split too,
    use `split_batch`.

    Args:
        tree: Dicts, tuples, tensors, lists, and scalars (numbers, strings, None).
        count: The number of parts.
        spec: An `Along` for the whole tree, or None for values that go into every part unchanged,
            or dicts and tuples as in the tree with these as leaves.
        even: Raise ValueError for a size that `count` does not divide. Otherwise the sizes of parts
            differ by at most one, larger ones first, and may be 0.

    Returns:
        `count` trees; their tensors are views, through which gradients flow.

    Raises:
        ValueError: A leaf has another type, lacks the dimension or does not divide, or the spec has
            another structure than the tree; the message names the path in the tree.

    Examples:
        >>> parts = shard_tree({"x": torch.arange(4), "names": ["a", "b"], "scale": 2}, 2)
        >>> parts[1]
        {'x': tensor([2, 3]), 'names': ['b'], 'scale': 2}
        >>> shard_tree(torch.eye(2), 2, spec=Along(1, stack=True))
        [tensor([1., 0.]), tensor([0., 1.])]

    The idea is d9d's, for the state of its pipelines.
    """
    check_range("shard_tree", at_least=1, count=count)
    return _split(tree, count, spec, even, "the tree")


def unshard_tree(parts: Sequence[Any], *, spec: Any = Along()) -> Any:
    """Concatenate microbatches of trees: the inverse of `shard_tree`.

    Tensors are concatenated along the dimension of the spec, or stacked with `stack`; lists are
    concatenated. 0-d tensors, such as the loss of each part, are stacked to one entry per part.

    Args:
        parts: At least one tree, all of one structure.
        spec: As in `shard_tree`. Where it is None the value of the first part is taken.

    Returns:
        One tree with new tensors.

    Raises:
        ValueError: The parts or the spec differ in structure, shapes of tensors do not fit, or a
            scalar differs between parts; the message names the path in the tree.

    Examples:
        >>> parts = [{"x": torch.ones(2), "loss": torch.tensor(float(i))} for i in range(2)]
        >>> unshard_tree(parts)
        {'x': tensor([1., 1., 1., 1.]), 'loss': tensor([0., 1.])}
    """
    if isinstance(parts, Mapping) or len(parts) == 0:
        raise ValueError("unshard_tree: parts must be a sequence of at least one tree")
    return _concat(list(parts), spec, "the tree")


# ----------------------------------------------------------------------------------- split a tree


def _split(tree: Any, count: int, spec: Any, even: bool, path: str) -> list[Any]:
    children = _get_child_specs("shard_tree", tree, spec, path)
    if children is not None:
        split = {
            name: _split(tree[name], count, child, even, f"{path}[{name!r}]")
            for name, child in children.items()
        }
        parts = [{name: values[i] for name, values in split.items()} for i in range(count)]
        return parts if isinstance(tree, dict) else [tuple(part.values()) for part in parts]
    _check_leaf("shard_tree", tree, path)
    if spec is not None and isinstance(tree, torch.Tensor) and tree.ndim > 0:
        if not -tree.ndim <= spec.dim < tree.ndim:
            raise ValueError(
                f"shard_tree: {path} has no dimension {spec.dim}, it is {tuple(tree.shape)}"
            )
        size = tree.shape[spec.dim]
        if not spec.stack:
            # `tensor_split` takes the cuts between parts, without the end of the last.
            return list(tree.tensor_split(_get_ends(size, count, even, path)[:-1], spec.dim))
        if size != count:
            raise ValueError(
                f"shard_tree: {path} is {tuple(tree.shape)}: dimension {spec.dim} must have one "
                f"slice for each of the {count} parts"
            )
        return list(tree.unbind(spec.dim))
    if spec is None or not isinstance(tree, list):
        return [tree] * count
    if spec.stack:
        raise ValueError(f"shard_tree: {path} is a list, which stack=True cannot split")
    ends = _get_ends(len(tree), count, even, path)
    return [tree[first:end] for first, end in pairwise([0, *ends])]


def _get_ends(size: int, count: int, even: bool, path: str) -> list[int]:
    if even and size % count:
        raise ValueError(
            f"shard_tree: {size} entries of {path} do not divide into {count} parts; even=False "
            "allows parts that differ by one"
        )
    # The first `larger` parts have one more, as of `torch.tensor_split`.
    small, larger = divmod(size, count)
    return [small * part + min(part, larger) for part in range(1, count + 1)]


# ------------------------------------------------------------------------------- concatenate trees


def _concat(parts: list[Any], spec: Any, path: str) -> Any:
    first = parts[0]
    children = _get_child_specs("unshard_tree", first, spec, path)
    # At every node, so that the message names the one that differs.
    structures = [_describe_structure(part) for part in parts]
    for i, structure in enumerate(structures):
        if structure != structures[0]:
            raise ValueError(
                f"unshard_tree: {path} is {structures[0]} in part 0 and {structure} in part {i}"
            )
    if children is not None:
        tree = {
            name: _concat([part[name] for part in parts], child, f"{path}[{name!r}]")
            for name, child in children.items()
        }
        return tree if isinstance(first, dict) else tuple(tree.values())
    _check_leaf("unshard_tree", first, path)
    if spec is None:  # the value that went into every part unchanged
        return first
    if isinstance(first, torch.Tensor):
        try:
            # `torch.cat` rejects 0-d tensors.
            if first.ndim == 0:
                return torch.stack(parts)
            return torch.stack(parts, spec.dim) if spec.stack else torch.cat(parts, spec.dim)
        except (RuntimeError, IndexError) as error:
            raise ValueError(
                f"unshard_tree: {path} cannot be put together along dimension {spec.dim}: "
                f"{[tuple(part.shape) for part in parts]}"
            ) from error
    if isinstance(first, list):
        return [entry for part in parts for entry in part]
    if any(part != first for part in parts):
        raise ValueError(f"unshard_tree: {path} is a scalar that differs between parts: {parts}")
    return first


# ---------------------------------------------------------------------------------------- structure


def _get_child_specs(function: str, tree: Any, spec: Any, path: str) -> dict[Any, Any] | None:
    """Return the spec of each child of a node, or None for a leaf."""
    # A named tuple is a leaf, and refused: it could not be rebuilt from a tuple.
    is_node = isinstance(tree, dict) or type(tree) is tuple
    if spec is None or isinstance(spec, Along):
        return dict.fromkeys(_get_names(tree), spec) if is_node else None
    if not is_node or _describe_structure(spec) != _describe_structure(tree):
        raise ValueError(
            f"{function}: {path} is {_describe_structure(tree)}, and its spec is "
            f"{_describe_structure(spec)}; a spec is an Along, None, or of the tree's structure"
        )
    return {name: spec[name] for name in _get_names(tree)}


def _get_names(node: Any) -> list[Any]:
    return list(node if isinstance(node, dict) else range(len(node)))


def _describe_structure(node: Any) -> str:
    """Describe the properties that must be equal between parts: the type and the children."""
    if isinstance(node, dict):
        return f"a dict of {', '.join(sorted(map(repr, node)))}"
    if type(node) is tuple:
        return f"a tuple of {len(node)}"
    if isinstance(node, torch.Tensor):
        return f"a {node.ndim}-d tensor of {node.dtype}"
    return "a list" if isinstance(node, list) else "no dict, tuple, list or tensor"


def _check_leaf(function: str, leaf: Any, path: str) -> None:
    types = (torch.Tensor, list, bool, int, float, str, bytes, type(None))
    if not isinstance(leaf, types):
        raise ValueError(  # noqa: TRY004 -- as for all bad arguments
            f"{function}: {path} is a {type(leaf).__name__}, which cannot be cut; make it tensors, "
            "lists, dicts, tuples and scalars (split_batch splits a Batch)"
        )
