"""Stage a checkpoint: verify it, compare it with the run, and read it, without touching the run.

Everything that can fail happens here, on all ranks. Afterwards the values only have to be copied.
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
from trainkit.parallel.parameters import get_named_parameters
from trainkit.types import Axis, CheckpointError, Cursor, TrainState
from trainkit.weights.checkpoint import compare
from trainkit.weights.checkpoint.boxes import find_index_problems, shorten
from trainkit.weights.checkpoint.load_targets import (
    allocate_buffers,
    get_saved_name,
    install_moments_,
    make_moment_targets,
    make_weight_targets,
    write_targets_,
)
from trainkit.weights.checkpoint.reading import Target, read_tensors
from trainkit.weights.checkpoint.run_state import MAX_BATCHES, MAX_STREAM, check_optimizer
from trainkit.weights.checkpoint.safe_files import read_json

_JSON_FILES = ("index.json", "state.json")
_MIN_VALUES = 2_000_000  # allowed in any state or index; a run with many tensors may have more

CheckFacts = Callable[[Mapping[str, Any]], list[str]]
"""Returns the problems of a parsed `state.json` for the run."""


@attrs.frozen(eq=False)
class Staged:
    """The contents of a checkpoint in memory; with `problems` it is damaged, and the rest empty.

    `index` has the entries of its tensors, `saved` is the parsed `state.json`, and `targets` are
    the tensors that were read and where they go. If the run has another optimizer than the saved
    one, which its user allows, `changes` lists what happens to each parameter's state.
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
    check: CheckFacts,
    tolerance: compare.Tolerance,
) -> Staged:
    """Compare a checkpoint with the run, and read it into separate memory.

    Args:
        path: The checkpoint's directory.
        manifest: Its manifest, equal on all ranks; the names and sizes of the files have been
            compared with it.
        stages: This rank's stages.
        optimizer: The optimizer of their parameters; None ignores the optimizer state.
        axis: All ranks that load it.
        check: Finds further problems of its state, equal on all ranks.
        tolerance: Which differences from the run are allowed.

    Returns:
        The checkpoint, ready for `install_`, or its damage, the same on all ranks.

    Raises:
        CheckpointError: It is intact, but does not fit the run; the message lists all differences.

    Effects:
        Reads every file of the checkpoint once, each on one rank, and what each rank needs of the
            others; allocates as much memory as the run's tensors; communicates on `axis`.
    """
    # What this rank has read stays here: only names travel to the other ranks.
    local: list[Staged] = []

    def read_headers() -> dict[str, Sequence[str]]:
        local.append(_read_headers(path, manifest, stages, optimizer, tolerance))
        return _list_names(local[0], stages, optimizer)

    # A rank that raised here alone would leave the others in a collective; on a network disk only
    # one of them may see the damage.
    by_rank = run_on_all_ranks(read_headers, axis)
    names = {key: {x for headers in by_rank for x in headers[key]} for key in by_rank[0]}
    if names["problems"]:
        return Staged(sorted(names["problems"]))
    (staged,) = local

    def find_differences() -> list[list[str]]:
        facts = check(staged.saved)
        return [facts, _compare_tensors(staged, names, stages, optimizer, tolerance)]

    differences = run_on_all_ranks(find_differences, axis)
    # Two lists per rank: the facts are equal on all, of the tensors each knows its own.
    facts, tensors = (_merge([lists[i] for lists in differences]) for i in (0, 1))
    if facts and tensors:  # the facts explain it: another model, for instance
        tensors = [f"tensors and options of its optimizer that differ too: {len(tensors)}"]
    problems = facts + tensors
    if problems:
        raise CheckpointError(
            f"load_checkpoint: {path} does not fit the run: {shorten(problems)}",
            where=path,
            got=problems,
            hint="choose another --out, or start from scratch here with --resume never",
        )
    # The others may be missing, as the tolerance allows, and keep their values.
    targets = {name: t for name, t in staged.targets.items() if t.saved in staged.index}
    buffered: dict[str, Target] = {}

    def read_all() -> list[str]:
        # Within the collective call: a rank without enough memory raises on all ranks.
        buffered.update(allocate_buffers(targets, staged.index))
        return read_tensors(
            path, _select_tensor_files(manifest), staged.index, [*buffered.values()], axis.share
        )

    return attrs.evolve(
        staged,
        problems=_merge(run_on_all_ranks(read_all, axis)),
        targets=buffered,
        changes=sorted(names["changes"]),
    )


def install_(
    staged: Staged,
    stages: Sequence[nn.Module],
    optimizer: torch.optim.Optimizer | None,
) -> TrainState:
    """Copy a staged checkpoint into the run, and return its counters.

    Effects:
        Writes the parameters, and replaces the optimizer's state.
    """
    write_targets_(staged.targets)
    if optimizer is not None and staged.changes:
        # Imported here because it loads our optimizers, which most runs do not need.
        from trainkit.weights.checkpoint.optimizer_switch import (  # noqa: PLC0415
            install_carried_over_,
        )

        install_carried_over_(staged.targets, stages, optimizer)
    elif optimizer is not None:
        scalars = staged.saved["optimizer"]["scalars"]
        install_moments_(staged.targets, scalars, stages, optimizer)
    counters = staged.saved["state"]
    cursor = Cursor(counters["cursor"]["batch"], tuple(counters["cursor"]["stream"]))
    return TrainState(counters["step"], counters["tokens"], cursor, counters["health"])


def count_messages(messages: Iterable[str]) -> list[str]:
    r"""Merge the messages about single parameters into one sentence for each kind.

    Args:
        messages: "NAME\nMESSAGE" of each parameter, from `select_carried_over` on all ranks.

    Examples:
        >>> count_messages(["a\ncarries over step", "b\ncarries over step"])
        ['the optimizer carries over step (2 parameters)']
    """
    counts = Counter(text.partition("\n")[2] for text in sorted(set(messages)))
    return [
        f"the optimizer {message} ({count} parameter{'s' * (count > 1)})"
        for message, count in counts.items()
    ]


def _merge(lists: Sequence[Sequence[str]]) -> list[str]:
    """Return the texts of all ranks without duplicates, in order."""
    return list(dict.fromkeys(text for texts in lists for text in texts))


def _select_tensor_files(manifest: Mapping[str, Any]) -> dict[str, Any]:
    return {name: entry for name, entry in manifest["files"].items() if name not in _JSON_FILES}


def _list_names(
    staged: Staged,
    stages: Sequence[nn.Module],
    optimizer: torch.optim.Optimizer | None,
) -> dict[str, Sequence[str]]:
    """Return the names that other ranks need, as a pipeline rank has only some of the tensors."""
    return {
        "problems": staged.problems,
        "changes": staged.changes,
        "wanted": [target.saved for target in staged.targets.values()],
        "parameters": [get_saved_name(name) for name in get_named_parameters(stages)],
        "trained": [] if optimizer is None else compare.list_trained_names(stages, optimizer),
    }


def _compare_tensors(
    staged: Staged,
    names: Mapping[str, set[str]],
    stages: Sequence[nn.Module],
    optimizer: torch.optim.Optimizer | None,
    tolerance: compare.Tolerance,
) -> list[str]:
    """List the differences between the checkpoint's tensors and optimizer and the run's."""
    problems: list[str] = []
    index = staged.index
    frozen: set[str] = set()
    # Without an optimizer, or with another one, most of the saved optimizer state is not wanted.
    if optimizer is None or names["changes"]:
        index = {
            name: entry
            for name, entry in index.items()
            if name.startswith("model/") or name in names["wanted"]
        }
    if optimizer is not None:
        saved = staged.saved["optimizer"]
        problems += compare.find_optimizer_problems(
            saved,
            index,
            stages,
            optimizer,
            step=staged.saved["state"]["step"],
            tolerance=tolerance,
        )
        # Trained when it was saved and frozen now: its moments have no place in the run.
        frozen = saved["scalars"].keys() & (names["parameters"] - names["trained"])
        problems += compare.find_frozen_problems(frozen, tolerance)
    return problems + compare.find_tensor_problems(
        index, staged.targets, wanted=names["wanted"], frozen=frozen, tolerance=tolerance
    )


def _read_headers(
    path: Path,
    manifest: Mapping[str, Any],
    stages: Sequence[nn.Module],
    optimizer: torch.optim.Optimizer | None,
    tolerance: compare.Tolerance,
) -> Staged:
    """Read and check the two JSON files of a checkpoint, and find out where its tensors go."""
    weights = make_weight_targets(stages)
    if optimizer is not None:
        check_optimizer(stages, optimizer)
    # An index has at most one box per tensor and file.
    max_values = _MIN_VALUES + 128 * len(weights) * (1 + len(manifest["files"]))
    try:
        read = {
            name: read_json(
                path / name,
                max_bytes=32 * max_values,
                max_values=max_values,
                want=manifest["files"][name],
            )
            for name in _JSON_FILES
        }
    except (CheckpointError, KeyError) as error:
        # A KeyError comes from the manifest, if it lists no such file.
        return Staged([error.what if isinstance(error, CheckpointError) else f"it has no {error}"])
    problems = _find_state_problems(read["state.json"], manifest)
    # The names and shapes in the index are checked before memory is allocated for any of them.
    sizes = {name: entry["size"] for name, entry in _select_tensor_files(manifest).items()}
    problems += find_index_problems(read["index.json"], sizes)
    if problems:
        return Staged(problems)
    index = read["index.json"]["tensors"]
    saved = migrate(read["state.json"], manifest["version"])
    if optimizer is None:
        return Staged((), index, saved, weights)
    entries = index
    changes: list[str] = []
    if tolerance.optimizer and compare.find_kind_problems(saved["optimizer"], optimizer, tolerance):
        from trainkit.weights.checkpoint.optimizer_switch import (  # noqa: PLC0415 - see `install_`
            select_carried_over,
        )

        entries, changes = select_carried_over(index, stages, optimizer)
    # Moments are allocated here, on the devices of their parameters, and filled later.
    is_cast = partial(compare.matches, patterns=tolerance.cast)
    moments = make_moment_targets(entries, stages, optimizer, is_cast)
    return Staged((), index, saved, weights | moments, changes)


def migrate(state: Mapping[str, Any], version: int) -> dict[str, Any]:
    """Convert a parsed `state.json` to the present format; nothing on disk is rewritten.

    `tests/weights/checkpoint/fixtures` has a checkpoint of every format ever written.

    Args:
        state: The parsed `state.json` of a checkpoint.
        version: The format of the checkpoint, up to the present one.

    Examples:
        >>> migrate({"step": 3}, 1)
        {'step': 3, 'machine': None}
    """
    # The first format does not store the machine.
    return {**state, "machine": None} if version == 1 else dict(state)


def _find_state_problems(saved: Any, manifest: Mapping[str, Any]) -> list[str]:
    """Return the problems of a parsed `state.json`: a wrong structure, or another step."""
    not_a_state = ["state.json is not the state of a run"]
    try:
        # A missing key or a wrong type raises below, and means the same as a wrong value.
        state = saved["state"]
        optimizer = saved["optimizer"]
        counts = [state["step"], state["tokens"], state["cursor"]["batch"]]
        stream = state["cursor"]["stream"]
        health = [
            number
            for value in state["health"].values()
            for number in (value if isinstance(value, list) else [value])
        ]
        is_valid = (
            # type() and not isinstance(): True is an int in Python, but not a count.
            all(type(n) is int and 0 <= n < 2**63 for n in counts)
            and counts[2] <= MAX_BATCHES
            and isinstance(stream, list)
            and len(stream) <= MAX_STREAM
            and all(type(n) is int and -(2**63) <= n < 2**63 for n in stream)
            and all(isinstance(number, int | float) for number in health)
            and isinstance(saved["facts"], dict)
            and (saved.get("machine") is None or isinstance(saved["machine"], dict))
            and all(isinstance(values, dict) for values in optimizer["scalars"].values())
            and (manifest["version"] == 1 or isinstance(optimizer["untouched"], list))
            and all(isinstance(group, dict) for group in optimizer["options"])
            and optimizer["class"]
        )
        if not is_valid:
            return not_a_state
        if state["step"] != manifest["step"]:
            return [f"state.json is of step {state['step']}, manifest.json of {manifest['step']}"]
    except (KeyError, TypeError, AttributeError):
        return not_a_state
    return []
