"""Compare two checkpoints: by their JSON files, and on request by their values."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from trainkit.files import flatten_table
from trainkit.weights.checkpoint.component_trees import list_states
from trainkit.weights.checkpoint.export import split_into_row_boxes
from trainkit.weights.checkpoint.manifest import check_not_deleted
from trainkit.weights.checkpoint.safe_files import read_json
from trainkit.weights.checkpoint.sources import read_checkpoint_tensors
from trainkit.weights.checkpoint.tensor_files import Stored

_MAX_ENTRIES = 200  # of one table of the report
_ELEMENTS = 4 * 1024 * 1024  # compared at once


def diff_checkpoints(a: Path | str, b: Path | str, *, values: bool = False) -> dict[str, Any]:
    """Compare two verified checkpoints: tensors, counters, facts, configuration and layout.

    Args:
        a: A checkpoint.
        b: Another one, of the same run or of any.
        values: Also compare the numbers. This reads all of both, and needs torch.

    Returns:
        {"same", "tensors", "state", "components", "facts", "config", "optimizer", "layout",
        "manifest"}.
        "tensors" has "only_a", "only_b" and "dtype_or_shape". The others are {name: [in
        a, in b]} of the values that differ, names joined by dots. "bytes" is whether the tensors of
        both have the same bytes: True, False, or None when only the values could show it. With
        `values`, "values" is {name: {"max_abs", "max_b", "relative", "unequal"}} of the tensors
        that differ. "same" is True when tensors and counters are equal: the same state.

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
        check_not_deleted(path)
    saved = [read_json(path / "state.json") for path in (a, b)]
    manifests = [read_json(path / "manifest.json") for path in (a, b)]
    indices = [read_checkpoint_tensors(path) for path in (a, b)]
    report: dict[str, Any] = {"a": str(a), "b": str(b)}
    tensors_a, tensors_b = indices
    in_both = sorted(tensors_a.keys() & tensors_b.keys())
    described = {
        name: [[index[name].dtype, [*index[name].shape]] for index in indices] for name in in_both
    }
    report["tensors"] = {
        "only_a": sorted(tensors_a.keys() - tensors_b.keys()),
        "only_b": sorted(tensors_b.keys() - tensors_a.keys()),
        "dtype_or_shape": {name: [x, y] for name, (x, y) in described.items() if x != y},
    }
    for part in ("state", "facts", "optimizer", "layout"):
        report[part] = diff_tables(saved[0].get(part), saved[1].get(part))
    # By their paths, as "ema/decay"; of a tensor the name, dtype and shape.
    states = [list_states(read.get("components", {})) for read in saved]
    report["components"] = {
        name: [x.get(name) for x in states]
        for name in sorted(states[0].keys() | states[1].keys())[:_MAX_ENTRIES]
        if states[0].get(name, states) != states[1].get(name, states)
    }
    report["config"] = diff_tables(manifests[0].get("config"), manifests[1].get("config"))
    origins = [
        {name: manifest.get(name) for name in ("run", "version", "step", "parent")}
        for manifest in manifests
    ]
    report["manifest"] = diff_tables(*origins)
    report["bytes"] = _have_same_bytes(a, b, manifests, indices)
    if values:
        compared = {
            name: _compare_values(tensors_a[name], tensors_b[name])
            for name in in_both
            if name not in report["tensors"]["dtype_or_shape"]
        }
        report["values"] = {name: gap for name, gap in compared.items() if gap["unequal"]}
        report["bytes"] = not report["values"]
    is_unequal = (
        any(report["tensors"].values())
        or report["state"]
        or report["components"]
        or report["bytes"] is False
    )
    # Nothing that was compared differs, but the bytes could not be compared.
    is_unknown = report["bytes"] is None and not is_unequal
    report["same"] = None if is_unknown else not is_unequal
    return report


def diff_tables(a: Any, b: Any) -> dict[str, list[Any]]:
    """Return {path: [in a, in b]} of the values that differ; None for one that is absent.

    Examples:
        >>> diff_tables({"x": {"y": 1}, "z": 2}, {"x": {"y": 3}, "z": 2})
        {'x.y': [1, 3]}
    """
    left = dict(flatten_table(a))
    right = dict(flatten_table(b))
    unequal = (
        (name, [left.get(name), right.get(name)])
        for name in sorted(left.keys() | right.keys())
        if left.get(name) != right.get(name)
    )
    return dict(itertools.islice(unequal, _MAX_ENTRIES))


def _have_same_bytes(
    a: Path,
    b: Path,
    manifests: list[Any],
    indices: list[dict[str, Stored]],
) -> bool | None:
    """Return whether all tensors are equal, or None where no hash decides it."""
    # Of tensors only: the counters in `state.json` are compared by value.
    files = [
        {
            name: file["sha256"]
            for name, file in manifest["files"].items()
            if name.endswith(".safetensors")
        }
        for manifest in manifests
    ]
    if a.resolve() == b.resolve() or files[0] == files[1]:
        return True
    # Another layout writes other files of the same values; the state hash is equal in all of them.
    hashes = [manifest.get("state_hash") for manifest in manifests]
    if None not in hashes and hashes[0] == hashes[1]:
        return True
    boxes = [
        {
            name: [(x.path.name, x.start, x.offset, x.shape) for x in stored.extents]
            for name, stored in index.items()
        }
        for index in indices
    ]
    # With the same boxes at the same offsets, other file hashes mean other values.
    return False if boxes[0] == boxes[1] else None


def _compare_values(a: Stored, b: Stored) -> dict[str, Any]:
    """Return the largest difference of two tensors and how many elements differ, part by part."""
    import torch  # noqa: PLC0415 - everything but the values is compared without torch

    from trainkit.weights.checkpoint.reading import read_box  # noqa: PLC0415 - likewise

    max_abs = max_b = 0.0
    unequal = 0
    for shape, offset in split_into_row_boxes(a.shape, _ELEMENTS):
        x = read_box(a, shape, offset)
        y = read_box(b, shape, offset)
        # Bits and not values: NaN is equal to NaN here, and 0.0 differs from -0.0.
        x_bits = x.contiguous().reshape(-1, 1).view(torch.uint8)
        y_bits = y.contiguous().reshape(-1, 1).view(torch.uint8)
        unequal += int((x_bits != y_bits).any(1).sum())
        # In float64, where a difference of two bfloat16 or float32 numbers is not rounded away.
        gap = (x.double() - y.double()).abs()
        size = y.double().abs()
        max_abs = max(max_abs, float(gap.nan_to_num(nan=float("inf")).max()))
        max_b = max(max_b, float(size.nan_to_num(nan=float("inf")).max()))
    relative = 0.0
    if max_abs:  # infinite if b is all zeros; JSON has no infinity, orjson writes it as null
        relative = max_abs / max_b if max_b else float("inf")
    return {
        "max_abs": max_abs,
        "max_b": max_b,
        "relative": relative,
        "unequal": unequal,
    }
