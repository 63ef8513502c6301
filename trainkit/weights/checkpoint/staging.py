"""Stage a checkpoint: verify it, compare it with the run, read it; the run is untouched till then.

Everything that can fail happens here, on all ranks. What is left is to put the values in place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import nn

from trainkit.collectives import run_on_all_ranks
from trainkit.parallel.names import get_named_parameters
from trainkit.types import Axis, CheckpointError, Cursor, TrainState
from trainkit.weights.checkpoint import compare
from trainkit.weights.checkpoint.boxes import index_problems, shortened
from trainkit.weights.checkpoint.reading import Target, read_tensors
from trainkit.weights.checkpoint.safe_files import read_json
from trainkit.weights.checkpoint.targets import (
    beside,
    install_moments_,
    moment_targets,
    saved_name,
    weight_targets,
    write_targets_,
)
from trainkit.weights.checkpoint.tensors import MOST_BATCHES, MOST_STREAM, check_optimizer

_JSON = ("index.json", "state.json")
_VALUES = 2_000_000  # that any state or index may hold; a run of many tensors may hold more

Check = Callable[[Mapping[str, Any]], list[str]]
"""From what `state.json` holds to what is wrong with it for the run."""


@attrs.frozen(eq=False)
class Staged:
    """What has been read of a checkpoint; with `problems`, it is damaged, and nothing else counts.

    `index` has the entries of its tensors, `saved` is what `state.json` holds, `targets` hold
    what was read, and say where it goes. Where the run has another optimizer than the one that was
    saved, which its user allows, `changes` say so, and what becomes of each parameter's state.
    """

    problems: Sequence[str] = ()
    index: Mapping[str, Any] = attrs.field(factory=dict)
    saved: Mapping[str, Any] = attrs.field(factory=dict)
    targets: Mapping[str, Target] = attrs.field(factory=dict)
    changes: Sequence[str] = ()


def stage_checkpoint(
    path: Path,
    manifest: Mapping[str, Any],
    stages: Sequence[nn.Module],
    optimizer: torch.optim.Optimizer | None,
    *,
    axis: Axis,
    check: Check,
    leeway: compare.Leeway,
) -> Staged:
    """Read a checkpoint into memory beside the run, after comparing it with the run.

    Args:
        path: The checkpoint's directory.
        manifest: Its manifest, the same on all ranks; the names and sizes of the files in it have
            been compared with the directory.
        stages: This rank's stages.
        optimizer: The optimizer of their parameters; None leaves moments aside.
        axis: All ranks that read it.
        check: What else may be wrong with its state, the same on all ranks.
        leeway: What may differ from the run.

    Returns:
        The checkpoint, ready for `install_`, or what is damaged in it, the same on all ranks.

    Raises:
        CheckpointError: It is whole, but does not fit the run; all differences are named.

    Effects:
        Reads every file of the checkpoint once, dealt to the ranks, and what each needs of the
            others; allocates what the run's tensors take; communicates on `axis`.
    """
    held: list[Staged] = []

    def look() -> dict[str, Sequence[str]]:
        held.append(_look(path, manifest, stages, optimizer, leeway))
        return _told(held[0], stages, optimizer)

    looks = run_on_all_ranks(look, axis)
    told = {name: {text for look in looks for text in look[name]} for name in looks[0]}
    if told["problems"]:
        return Staged(sorted(told["problems"]))
    (read,) = held
    differences = run_on_all_ranks(
        lambda: [check(read.saved), _differences(read, told, stages, optimizer, leeway)], axis
    )
    facts, tensors = (_union([found[i] for found in differences]) for i in (0, 1))
    if facts and tensors:  # of another model, say, which the facts name
        tensors = [f"tensors and options of its optimizer that differ too: {len(tensors)}"]
    _refuse(path, facts + tensors)
    targets = {name: t for name, t in read.targets.items() if t.saved in read.index}
    made: dict[str, Target] = {}

    def read_all() -> list[str]:
        made.update(beside(targets, read.index))
        wanted = [*made.values()]
        return read_tensors(path, _tensor_files(manifest), read.index, wanted, axis.share)

    problems = _union(run_on_all_ranks(read_all, axis))
    return attrs.evolve(read, problems=problems, targets=made, changes=sorted(told["changes"]))


def install_(
    staged: Staged, stages: Sequence[nn.Module], optimizer: torch.optim.Optimizer | None
) -> TrainState:
    """Put a staged checkpoint in place; return its counters.

    Effects:
        Writes the parameters, and replaces the optimizer's state.
    """
    write_targets_(staged.targets)
    if optimizer is not None and staged.changes:
        from trainkit.weights.checkpoint.optimizer_switch import install_taken_over_  # noqa: PLC0415 -- rarely

        install_taken_over_(staged.targets, stages, optimizer)
    elif optimizer is not None:
        scalars = staged.saved["optimizer"]["scalars"]
        install_moments_(staged.targets, scalars, stages, optimizer)
    return state_from(staged.saved["state"])


def summed_up(told: Iterable[str]) -> list[str]:
    r"""Return one sentence for all parameters of which the same becomes.

    Args:
        told: What `changed.taken_over` says on all ranks.

    Examples:
        >>> summed_up(["a\ntakes over step", "b\ntakes over step", "a\ntakes over step"])
        ['the optimizer takes over step (2 parameters)']
    """
    counts = Counter(text.partition("\n")[2] for text in sorted(set(told)))
    return [
        f"the optimizer {what} ({count} parameter{'s' * (count > 1)})"
        for what, count in counts.items()
    ]


def state_from(saved: Mapping[str, Any]) -> TrainState:
    """Return the counters that a checkpoint holds.

    Examples:
        >>> saved = {"step": 1, "tokens": 2, "cursor": {"batch": 3, "stream": []}, "health": {}}
        >>> state_from(saved).cursor
        Cursor(batch=3, stream=())
    """
    cursor = Cursor(saved["cursor"]["batch"], tuple(saved["cursor"]["stream"]))
    return TrainState(saved["step"], saved["tokens"], cursor, saved["health"])


def _union(lists: Sequence[Sequence[str]]) -> list[str]:
    """Return what all ranks say, each thing once and in their order."""
    return list(dict.fromkeys(text for texts in lists for text in texts))


def _tensor_files(manifest: Mapping[str, Any]) -> dict[str, Any]:
    return {name: want for name, want in manifest["files"].items() if name not in _JSON}


def _told(
    read: Staged, stages: Sequence[nn.Module], optimizer: torch.optim.Optimizer | None
) -> dict[str, Sequence[str]]:
    """Return what the other ranks need to know of this one: a pipeline rank has some of all."""
    return {
        "problems": read.problems,
        "changes": read.changes,
        "wanted": [target.saved for target in read.targets.values()],
        "parameters": [saved_name(name) for name in get_named_parameters(stages)],
        "trained": [] if optimizer is None else compare.trained_names(stages, optimizer),
    }


def _differences(
    read: Staged,
    names: Mapping[str, set[str]],
    stages: Sequence[nn.Module],
    optimizer: torch.optim.Optimizer | None,
    leeway: compare.Leeway,
) -> list[str]:
    """Say where the checkpoint's tensors, and its optimizer, are not the run's."""
    found: list[str] = []
    index, frozen = read.index, set[str]()
    if optimizer is None or names["changes"]:
        index = {
            name: entry
            for name, entry in index.items()
            if name.startswith("model/") or name in names["wanted"]
        }
    if optimizer is not None:
        memory, step = read.saved["optimizer"], read.saved["state"]["step"]
        found += compare.optimizer_problems(
            memory, index, stages, optimizer, step=step, leeway=leeway
        )
        frozen = memory["scalars"].keys() & (names["parameters"] - names["trained"])
        found += compare.frozen_problems(frozen, leeway)
    return found + compare.tensor_problems(
        index, read.targets, wanted=names["wanted"], frozen=frozen, leeway=leeway
    )


def _refuse(path: Path, problems: list[str]) -> None:
    if problems:
        raise CheckpointError(
            f"load_checkpoint: {path} does not fit the run: {shortened(problems)}",
            where=path,
            got=problems,
            hint="name another --out, or begin afresh here with --resume never",
        )


def _look(
    path: Path,
    manifest: Mapping[str, Any],
    stages: Sequence[nn.Module],
    optimizer: torch.optim.Optimizer | None,
    leeway: compare.Leeway,
) -> Staged:
    """Read the two JSON files and check them; return what is wrong, or what they say."""
    weights = weight_targets(stages)
    if optimizer is not None:
        check_optimizer(stages, optimizer)
    most = _VALUES + 128 * len(weights) * (1 + len(manifest["files"]))
    try:
        read = {
            name: read_json(
                path / name, most_bytes=32 * most, most_values=most, want=manifest["files"][name]
            )
            for name in _JSON
        }
    except (CheckpointError, KeyError) as error:
        return Staged([error.what if isinstance(error, CheckpointError) else f"it has no {error}"])
    problems = _state_problems(read["state.json"], manifest)
    sizes = {name: want["size"] for name, want in _tensor_files(manifest).items()}
    problems += index_problems(read["index.json"], sizes)
    if problems:
        return Staged(problems)
    index = read["index.json"]["tensors"]
    is_cast = partial(compare.matches, patterns=leeway.cast)
    saved, changes = migrate(read["state.json"], manifest["version"]), list[str]()
    if optimizer is None:
        return Staged((), index, saved, weights)
    entries = index
    if leeway.optimizer and compare.kind_problems(saved["optimizer"], optimizer, leeway):
        from trainkit.weights.checkpoint.optimizer_switch import taken_over  # noqa: PLC0415 -- rarely needed

        entries, changes = taken_over(index, stages, optimizer)
    moments = moment_targets(entries, stages, optimizer, is_cast)
    return Staged((), index, saved, weights | moments, changes)


def migrate(state: Mapping[str, Any], version: int) -> dict[str, Any]:
    """Return what a `state.json` holds as the present format has it; nothing on disk is rewritten.

    One of every format ever written stays in `tests/weights/checkpoint/fixtures`.

    Args:
        state: What the `state.json` of a checkpoint holds.
        version: The format of the checkpoint, up to the present one.

    Examples:
        >>> migrate({"step": 3}, 1)
        {'step': 3, 'machine': None}
    """
    return {**state, "machine": None} if version == 1 else dict(state)


def _is_memory(health: Any) -> bool:
    """Say whether `health` remembers numbers and lists of numbers alone."""
    values = [one for v in health.values() for one in (v if isinstance(v, list) else [v])]
    return all(isinstance(value, int | float) for value in values)


def _state_problems(saved: Any, manifest: Mapping[str, Any]) -> list[str]:
    """Say whether `state.json` has the form that loading relies on."""
    try:
        state, memory = saved["state"], saved["optimizer"]
        counts = [state["step"], state["tokens"], state["cursor"]["batch"]]
        are_counts = all(type(n) is int and 0 <= n < 2**63 for n in counts)
        are_counts = are_counts and counts[2] <= MOST_BATCHES
        numbers = state["cursor"]["stream"]
        stream = isinstance(numbers, list) and len(numbers) <= MOST_STREAM
        stream = stream and all(type(n) is int and -(2**63) <= n < 2**63 for n in numbers)
        plain = _is_memory(state["health"]) and isinstance(saved["facts"], dict)
        plain = plain and (saved.get("machine") is None or isinstance(saved["machine"], dict))
        named = all(isinstance(values, dict) for values in memory["scalars"].values())
        named = named and (manifest["version"] == 1 or isinstance(memory["untouched"], list))
        options = all(isinstance(group, dict) for group in memory["options"])
        if not (are_counts and stream and plain and named and options and memory["class"]):
            return ["state.json is not the state of a run"]
        if state["step"] != manifest["step"]:
            return [f"state.json is of step {state['step']}, manifest.json of {manifest['step']}"]
    except (KeyError, TypeError, AttributeError):
        return ["state.json is not the state of a run"]
    return []
