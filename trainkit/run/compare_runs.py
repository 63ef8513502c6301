"""What differs between two runs: configuration, data, code, and the first step that is not equal.

Two runs that should be equal are bisected by their lines: `batch_hash`, `loss_hex`, `grad_norm_hex`
and `lr_hex` have every bit of what went into a step and what came out of it, in this order, so that
the first of them that differs says where to look. Everything but values of tensors is compared
without torch.
"""

from __future__ import annotations

import contextlib
import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainkit.files import read_limited
from trainkit.run.sinks.jsonl import read_jsonl
from trainkit.types import CheckpointError, ConfigError
from trainkit.weights.checkpoint.diff import diff_checkpoints, diff_tables
from trainkit.weights.checkpoint.manifest import list_checkpoints, parse_step
from trainkit.weights.checkpoint.safe_files import read_json

CAUSES = {
    "batch_hash": "the batch",
    "loss_hex": "the loss",
    "grad_norm_hex": "the gradient norm",
    "lr_hex": "the learning rate",
}
"""What differs where a field of two lines does; in the order in which a step computes them."""

_MAX_CONFIG = 1 << 16  # bytes
_IGNORED = ("out", "config", "resume")  # of the configuration: where a run is, not what it is


def compare_runs(a: str | Path, b: str | Path) -> dict[str, Any]:
    """Compare two runs by the files of their directories.

    Args:
        a: A run directory.
        b: Another one.

    Returns:
        {"a", "b", "equal", "steps", "config", "data", "code", "checkpoints"}. "equal" is whether
        all that both have computed is equal: at least one step, and the tensors of checkpoints of
        the same step. "steps" is as `compare_steps` returns it, "checkpoints" as
        `compare_saved_steps` does. The others are {name: [in a, in b]} of the values that differ:
        the configuration but for the run directory; the facts about data, model and tokenizer in
        the newest checkpoint of each; versions and hashes of the source at the last start.

    Raises:
        ConfigError: One of them is no run directory.

    Effects:
        Reads tensors, and then loads torch, only of the first checkpoint whose hashes differ.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for name, seed in {"a": 1, "b": 2}.items():
        ...         Path(folder, name).mkdir()
        ...         _ = Path(folder, name, "config.toml").write_text(f"seed = {seed}")
        ...     found = compare_runs(f"{folder}/a", f"{folder}/b")
        >>> found["config"], found["equal"]
        ({'seed': [1, 2]}, False)
    """
    a, b = Path(a), Path(b)
    for path in (a, b):
        _check_run(path)
    steps = compare_steps(read_jsonl(a / "metrics.jsonl"), read_jsonl(b / "metrics.jsonl"))
    saved = compare_saved_steps(a / "checkpoints", b / "checkpoints")
    events = [read_jsonl(path / "events.jsonl") for path in (a, b)]
    software = [
        next((x.get("software") for x in reversed(lines) if x.get("event") == "resume"), None)
        for lines in events
    ]
    return {
        "a": str(a),
        "b": str(b),
        "equal": steps["differs"] is None and steps["common"] > 0 and saved["differs"] is None,
        "steps": steps,
        "config": _diff_known(_read_config(a), _read_config(b)),
        "data": _diff_known(*map(_get_packing, events))
        | _diff_known(_read_facts(a), _read_facts(b)),
        "code": _diff_known(*software),
        "checkpoints": saved,
    }


def _check_run(path: Path) -> None:
    names = ("metrics.jsonl", "config.toml", "events.jsonl", "checkpoints")
    if any((path / name).exists() for name in names):
        return
    is_checkpoint = (path / "manifest.json").exists()
    raise ConfigError(
        f"diff: {path} is {'a checkpoint' if is_checkpoint else 'no run directory'}"
        f"{'' if path.exists() else ', it does not exist'}",
        where=str(path),
        hint="python -m trainkit checkpoint diff A B compares checkpoints"
        if is_checkpoint
        else f"a run has {', '.join(names[:-1])}; python -m trainkit runs lists those of a folder",
    )


# ------------------------------------------------------------------------------------ steps


def compare_steps(a: Sequence[Mapping[str, Any]], b: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Compare the lines of two runs step by step, and return the first that differs.

    Of a step that has several lines, as after a roll-back, the last one counts, and of the steps
    that were rolled back none. A field counts where both lines have it.

    Args:
        a: The lines of metrics.jsonl of a run.
        b: Those of another one.

    Returns:
        {"a", "b", "common", "unequal", "equal_until", "differs", "largest"}: the steps that each
        has, as [first, last, number]; the numbers of steps that both have, and that differ; the
        last step before the first that differs; that one, {"step", "fields": {name: [in a, in b]},
        "relative": {name: |a - b| / |b|}}, or None; and the largest of these relative differences
        over all steps, {name: [step, difference]}. Only fields of `CAUSES` are compared.

    Examples:
        >>> lines = [{"step": n, "batch_hash": "0f", "loss_hex": "0x1p+1"} for n in (1, 2, 3)]
        >>> found = compare_steps(lines, [*lines[:2], lines[2] | {"loss_hex": "0x1p+2"}])
        >>> found["equal_until"], found["differs"]["fields"]
        (2, {'loss_hex': ['0x1p+1', '0x1p+2']})
        >>> found["differs"]["relative"], found["largest"]
        ({'loss_hex': 0.5}, {'loss_hex': [3, 0.5]})
    """
    lines_a, lines_b = _index_lines(a), _index_lines(b)
    # Without a loss nothing shows that two steps are equal.
    common = [
        step
        for step in sorted(lines_a.keys() & lines_b.keys())
        if "loss_hex" in lines_a[step] and "loss_hex" in lines_b[step]
    ]
    unequal: dict[int, dict[str, Any]] = {}
    largest: dict[str, list[Any]] = {}
    for step in common:
        x, y = lines_a[step], lines_b[step]
        shared = [name for name in CAUSES if name in x and name in y]
        fields = {name: [x[name], y[name]] for name in shared if x[name] != y[name]}
        if fields:
            numbers = [name for name in fields if name != "batch_hash"]
            relative = {name: _measure_difference(*fields[name]) for name in numbers}
            unequal[step] = {"step": step, "fields": fields, "relative": relative}
            for name, size in relative.items():
                if size > largest.get(name, [0, 0.0])[1]:
                    largest[name] = [step, size]
    first = min(unequal, default=None)
    before = [step for step in common if first is None or step < first]
    return {
        "a": _describe_range(lines_a),
        "b": _describe_range(lines_b),
        "common": len(common),
        "unequal": len(unequal),
        "equal_until": before[-1] if before else None,
        "differs": None if first is None else unequal[first],
        "largest": largest,
    }


def _measure_difference(a: str, b: str) -> float:
    """Return |a - b| / |b| of two numbers in hex; infinity where one of them is none."""
    try:
        x, y = float.fromhex(a), float.fromhex(b)
        size = abs(x - y) / abs(y)
    except (ValueError, TypeError, ZeroDivisionError):
        return math.inf
    return math.inf if math.isnan(size) else size


def _index_lines(lines: Sequence[Mapping[str, Any]]) -> dict[int, Mapping[str, Any]]:
    """Return the lines that count by their steps: none of those that a roll-back has discarded."""
    found: dict[int, Mapping[str, Any]] = {}
    for line in reversed(lines):
        step = line.get("step")
        if type(step) is int and (not found or step < next(reversed(found))):
            found[step] = line
    return found


def _describe_range(lines: Mapping[int, Any]) -> list[int] | None:
    return [min(lines), max(lines), len(lines)] if lines else None


# ------------------------------------------------------------------------------------ checkpoints


def compare_saved_steps(a: str | Path, b: str | Path) -> dict[str, Any]:
    """Compare the checkpoints of two runs that have the same step, until the first that differs.

    Hashes decide where they can; then the tensors of one step are read to name what differs.

    Args:
        a: The `checkpoints/` directory of a run.
        b: That of another one.

    Returns:
        {"common", "equal_until", "differs", "problems"}: the steps that both have saved; the last
        that is equal before the first that differs; and that one, {"step", "first", "tensors",
        "relative", "largest", "counters"}: the first tensor that differs by name, those of the
        model before those of the optimizer (None if only counters do), how many differ,
        max|a - b| / max|b| of the first, [name, the same] of the parameter with the largest (None
        if none differs), and the counters that differ. "problems" is about checkpoints that cannot
        be read, which are left out.

    Effects:
        May read all tensors of one step, and load torch.

    Examples:
        >>> compare_saved_steps("no/checkpoints", "none/here")["common"]
        []
    """
    saved = [{parse_step(path): path for path in reversed(list_checkpoints(x))} for x in (a, b)]
    common = sorted(saved[0].keys() & saved[1].keys())
    report: dict[str, Any] = {
        "common": common,
        "equal_until": None,
        "differs": None,
        "problems": [],
    }
    for step in common:
        pair = saved[0][step], saved[1][step]
        try:
            found = diff_checkpoints(*pair)
            if not found["same"]:
                found = diff_checkpoints(*pair, values=True)
        except (CheckpointError, KeyError, TypeError) as error:
            report["problems"].append(f"step {step}: {error}")
            continue
        if not found["same"]:
            report["differs"] = {"step": step} | _find_first_tensor(found)
            break
        report["equal_until"] = step
    return report


def _find_first_tensor(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return the first tensor that differs, by its name, and how many do."""
    tables = report["tensors"]
    names = [*tables["only_a"], *tables["only_b"], *tables["dtype_or_shape"], *report["values"]]

    def place(name: str) -> tuple[object, ...]:  # layers.10 behind layers.9
        parts = [int(x) if x.isdigit() else x for x in re.split(r"(\d+)", name)]
        return not name.startswith("model/"), [(isinstance(x, int), x) for x in parts]

    first = min(names, key=place, default=None)
    sizes = {name: x["relative"] for name, x in report["values"].items()}
    parameters = [name for name in sizes if name.startswith("model/")]
    largest = max(parameters, key=sizes.__getitem__, default=None)
    return {
        "first": first,
        "tensors": len(names),
        "relative": sizes.get(first),
        "largest": None if largest is None else [largest, sizes[largest]],
        # What components hold beside tensors is counters of the user's own.
        "counters": report["state"]
        | {f"components/{x}": y for x, y in report["components"].items()},
    }


# ------------------------------------------------------------------------------------ facts


def _diff_known(a: Any, b: Any) -> dict[str, list[Any]]:
    """Return what differs between two tables, or nothing where one of them is not on record."""
    return diff_tables(a, b) if a and b else {}


def _read_config(run_dir: Path) -> dict[str, Any]:
    path = run_dir / "config.toml"
    if not path.exists():
        return {}
    try:
        table = tomllib.loads(read_limited(path, max_bytes=_MAX_CONFIG).decode())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"diff: {path} cannot be read: {error}", where=str(path)) from error
    return {name: value for name, value in table.items() if name not in _IGNORED}


def _read_facts(run_dir: Path) -> dict[str, Any]:
    """Return the facts about data, model and tokenizer that the newest readable checkpoint has."""
    for path in list_checkpoints(run_dir / "checkpoints"):
        with contextlib.suppress(CheckpointError, KeyError, TypeError, AttributeError):
            facts = read_json(path / "state.json")["facts"]
            return {
                name: value
                for name, value in facts.items()
                if name != "software" and not name.startswith("config.")
            }
    return {}


def _get_packing(events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return how each corpus was packed at the last start."""
    # Of events, since a run may have no checkpoint. The number of tokens identifies most corpora.
    return {
        f"packing of {event.get('corpus')}": {
            name: value
            for name, value in event.items()
            if name not in ("time", "event", "step", "corpus")
        }
        for event in events
        if event.get("event") == "packing"
    }
