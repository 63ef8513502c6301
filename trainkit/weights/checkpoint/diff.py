"""What two checkpoints have in common and what not: told from their JSON, values if asked for."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trainkit.weights.checkpoint.export import row_boxes
from trainkit.weights.checkpoint.manifest import refuse_deleted
from trainkit.weights.checkpoint.safe_files import read_json
from trainkit.weights.checkpoint.sources import checkpoint_tensors
from trainkit.weights.checkpoint.stored import Stored

_TOLD = 200  # entries of a kind; more would hide the others
_ELEMENTS = 4 * 1024 * 1024


def diff_checkpoints(a: Path | str, b: Path | str, *, values: bool = False) -> dict[str, Any]:
    """Compare two verified checkpoints: tensors, counters, facts, configuration and layout.

    Args:
        a: A checkpoint.
        b: Another, of the same run or of any.
        values: Compare the numbers as well, which reads all of both and needs torch.

    Returns:
        {"same", "tensors", "state", "facts", "config", "optimizer", "layout", "manifest"}.
        "tensors" has "only_a", "only_b" and "dtype_or_shape". The others are {name: [in
        a, in b]} for what differs, names joined by dots. "bytes" says whether the tensors of both
        have the same bytes: True, False, or None when only the values could tell. With `values`,
        "values" is {name: {"max_abs", "max_b", "relative", "unequal"}} for the tensors that differ.
        "same" is True when the tensors and counters are: the same state.

    Raises:
        CheckpointError: One of them cannot be read.

    Examples:
        >>> import tempfile, torch
        >>> from trainkit.weights.checkpoint import save_checkpoint
        >>> from trainkit.mesh import solo_parallel
        >>> from trainkit.types import TrainState
        >>> model = torch.nn.Linear(3, 2)
        >>> rest = [model], torch.optim.SGD(model.parameters()), solo_parallel()
        >>> with tempfile.TemporaryDirectory() as run:
        ...     a, b = (save_checkpoint(run, TrainState(step=step), *rest) for step in (1, 2))
        ...     diff_checkpoints(a, b)["state"]
        {'step': [1, 2]}
    """
    a, b = Path(a), Path(b)
    for path in (a, b):
        refuse_deleted(path)
    saved = [read_json(path / "state.json") for path in (a, b)]
    manifests = [read_json(path / "manifest.json") for path in (a, b)]
    indices = [checkpoint_tensors(path) for path in (a, b)]
    report: dict[str, Any] = {"a": str(a), "b": str(b)}
    report["tensors"] = _tensor_difference(*indices)
    for part in ("state", "facts", "optimizer", "layout"):
        report[part] = _difference(saved[0].get(part), saved[1].get(part))
    report["config"] = _difference(manifests[0].get("config"), manifests[1].get("config"))
    report["manifest"] = _difference(
        *({name: m.get(name) for name in ("run", "version", "step", "parent")} for m in manifests)
    )
    report["bytes"] = _same_bytes(a, b, manifests, indices)
    if values:
        report["values"] = _value_difference(*indices)
        report["bytes"] = not report["values"]
    unequal = any(report["tensors"].values()) or report["state"] or report["bytes"] is False
    report["same"] = not unequal if report["bytes"] is not None or unequal else None
    return report


def _tensor_difference(a: Mapping[str, Stored], b: Mapping[str, Stored]) -> dict[str, Any]:
    changed = {
        name: [[a[name].dtype, list(a[name].shape)], [b[name].dtype, list(b[name].shape)]]
        for name in sorted(a.keys() & b.keys())
        if (a[name].dtype, a[name].shape) != (b[name].dtype, b[name].shape)
    }
    return {
        "only_a": sorted(a.keys() - b.keys()),
        "only_b": sorted(b.keys() - a.keys()),
        "dtype_or_shape": changed,
    }


def _leaves(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the values of nested tables with their paths; a list is one value."""
    todo = [("", value)]  # by hand: a file may be nested more deeply than Python recurs
    while todo:
        name, value = todo.pop()
        if isinstance(value, Mapping) and value:
            todo += [(f"{name}.{key}" if name else str(key), item) for key, item in value.items()]
        else:
            yield name, value


def _difference(a: Any, b: Any) -> dict[str, list[Any]]:
    """Return {path: [in a, in b]} of the values that are not equal; None where there is none.

    Examples:
        >>> _difference({"x": {"y": 1}, "z": 2}, {"x": {"y": 3}, "z": 2})
        {'x.y': [1, 3]}
    """
    left, right = dict(_leaves(a)), dict(_leaves(b))
    names = sorted(left.keys() | right.keys())
    differ = {name: [left.get(name), right.get(name)] for name in names}
    unequal = ((name, pair) for name, pair in differ.items() if pair[0] != pair[1])
    return dict(itertools.islice(unequal, _TOLD))


def _same_bytes(
    a: Path, b: Path, manifests: list[Any], indices: list[dict[str, Stored]]
) -> bool | None:
    """Say whether all tensors are equal where hashes tell: those of the state, or of the files."""
    files = [
        {name: want["sha256"] for name, want in m["files"].items() if name.startswith("rank_")}
        for m in manifests
    ]
    if a.resolve() == b.resolve() or files[0] == files[1]:
        return True
    hashes = [m.get("state_hash") for m in manifests]
    if None not in hashes and hashes[0] == hashes[1]:
        return True
    cuts = [
        {
            name: [(p.path.name, p.start, p.offset, p.shape) for p in s.extents]
            for name, s in i.items()
        }
        for i in indices
    ]
    return False if cuts[0] == cuts[1] else None  # the same files, cut alike, with other bytes


def _value_difference(a: Mapping[str, Stored], b: Mapping[str, Stored]) -> dict[str, Any]:
    found = {}
    for name in sorted(a.keys() & b.keys()):
        if (a[name].dtype, a[name].shape) == (b[name].dtype, b[name].shape):
            told = _compare_values(a[name], b[name])
            if told["unequal"]:
                found[name] = told
    return found


def _compare_values(a: Stored, b: Stored) -> dict[str, Any]:
    """Compare two tensors in parts: the largest difference, and how many elements differ."""
    import torch  # noqa: PLC0415 - all but values is told without it

    from trainkit.weights.checkpoint.reading import read_box  # noqa: PLC0415 - likewise

    largest = scale = 0.0
    unequal = 0
    for shape, offset in row_boxes(a.shape, _ELEMENTS):
        x, y = (read_box(stored, shape, offset) for stored in (a, b))
        bits = [v.contiguous().reshape(-1, 1).view(torch.uint8) for v in (x, y)]
        unequal += int((bits[0] != bits[1]).any(1).sum())
        x, y = x.double(), y.double()
        gap = (x - y).abs()
        largest = max(largest, float(gap.nan_to_num(nan=float("inf")).max()))
        scale = max(scale, float(y.abs().nan_to_num(nan=float("inf")).max()))
    # JSON has no infinity: orjson writes it as null.
    relative = largest / scale if scale else (0.0 if not largest else float("inf"))
    return {"max_abs": largest, "max_b": scale, "relative": relative, "unequal": unequal}
