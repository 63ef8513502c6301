"""Compare a checkpoint's tensors and optimizer with the run's, and list every difference."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from trainkit.parallel.name_patterns import match_any
from trainkit.weights.checkpoint.boxes import get_dtype_name, get_parameter_name
from trainkit.weights.checkpoint.load_targets import get_saved_name, predict_state
from trainkit.weights.checkpoint.reading import Target
from trainkit.weights.checkpoint.run_state import get_group_options, optimizer_state


@attrs.frozen
class Tolerance:
    """Which differences a caller allows; patterns match names of parameters.

    `missing` parameters keep their values and start without moments. `extra` ones in the checkpoint
    are ignored. Parameters of `cast` may be stored in another floating dtype. With `optimizer` the
    run may have another optimizer or other options of it, and carries over what it can; see
    `optimizer_switch.select_carried_over`. Options of a parameter group in `options` may have
    another value.
    """

    missing: Sequence[str] = ()
    extra: Sequence[str] = ()
    cast: Sequence[str] = ()
    optimizer: bool = False
    options: Collection[str] = ()


def matches(full: str, patterns: Iterable[str]) -> bool:
    """Return whether the parameter of a tensor matches one of the patterns.

    Examples:
        >>> matches("optimizer/step/layers.0.lora_a", ["**.lora_*"])
        True
    """
    return match_any(get_parameter_name(full), patterns)


def find_tensor_problems(
    index: Mapping[str, Any],
    targets: Mapping[str, Target],
    *,
    wanted: Collection[str],
    frozen: Collection[str],
    tolerance: Tolerance,
) -> list[str]:
    """List the tensors that are missing, left over, or of another shape or dtype than the run's.

    Args:
        index: The entries of the checkpoint's index that are to be loaded.
        targets: This rank's targets.
        wanted: The names of the targets of all ranks; a pipeline rank has only some.
        frozen: Parameters whose moments `find_frozen_problems` reports.
        tolerance: Which differences are allowed.
    """
    by_name = {target.saved: target for target in targets.values()}
    problems = [
        f"{name} is missing in the checkpoint"
        for name in by_name
        if name not in index and not matches(name, tolerance.missing)
    ]
    # Left over only if no rank has a place for it: a pipeline rank has some of the tensors.
    problems += [
        f"{name} is left over"
        for name in index
        if name not in wanted and not matches(name, tolerance.extra)
        if not (name.startswith("optimizer/") and get_parameter_name(name) in frozen)
    ]
    for name in sorted(by_name.keys() & index.keys()):
        tensor = by_name[name].tensor
        want = (get_dtype_name(tensor.dtype), list(tensor.shape))
        found = (index[name]["dtype"], index[name]["shape"])
        # An integer is never cast: a token count in another dtype is a bug, not a precision.
        are_floats = all(getattr(torch, dtype).is_floating_point for dtype in (found[0], want[0]))
        may_cast = want[1] == found[1] and are_floats and matches(name, tolerance.cast)
        if want != found and not may_cast:
            problems.append(f"{name} is {found[0]}{found[1]}, the run has {want[0]}{want[1]}")
    return problems


def find_optimizer_problems(
    saved: Mapping[str, Any],
    index: Mapping[str, Any],
    stages: Sequence[nn.Module],
    optimizer: torch.optim.Optimizer,
    *,
    step: int,
    tolerance: Tolerance,
) -> list[str]:
    """List where the saved optimizer differs from the run's.

    No parameter may silently start again without its moments.

    Args:
        saved: The "optimizer" table of `state.json`.
        index: The entries of the checkpoint's index.
        stages: This rank's stages.
        optimizer: The optimizer of their parameters.
        step: The step of the checkpoint; at step 0 there are no moments yet.
        tolerance: Which differences are allowed.
    """
    differences = find_kind_problems(saved, optimizer, tolerance)
    # Every parameter that was trained has an entry in "scalars", an empty one if all is tensors.
    trained = {
        name
        for name in list_trained_names(stages, optimizer)
        if not matches(f"model/{name}", tolerance.missing)
    }
    problems = [
        f"{name} was not trained when it was saved"
        for name in sorted(trained - saved["scalars"].keys())
    ]
    if differences:
        # The state of another optimizer has other keys: its moments cannot be compared.
        return problems if tolerance.optimizer else problems + differences
    expected = predict_state(stages, optimizer)
    # Without a probe step (an empty state) there is nothing to compare a None with.
    problems += [
        f"the optimizer's {key} of {get_saved_name(live)} is {str(value)[:50]!r}, which it never is"
        for live, state in expected.items()
        for key, value in saved["scalars"].get(get_saved_name(live), {}).items()
        if (state or value is not None) and not _is_possible(value, state.get(key, 0))
    ]
    for live, state in expected.items() if step else ():
        name = get_saved_name(live)
        if name in trained & saved["scalars"].keys():
            moments = {key for key, value in state.items() if isinstance(value, Tensor)}
            problems += [
                f"optimizer/{key}/{name} is missing in the checkpoint"
                for key in _find_missing_keys(name, moments, saved, index)
            ]
    return problems


def find_kind_problems(
    saved: Mapping[str, Any],
    optimizer: torch.optim.Optimizer,
    tolerance: Tolerance,
) -> list[str]:
    """List the differences in the class and the options of the saved and the run's optimizer.

    Args:
        saved: The "optimizer" table of `state.json`.
        optimizer: The run's optimizer.
        tolerance: Which differences are allowed.
    """
    if saved["class"] != type(optimizer).__name__:
        return [f"its optimizer is {saved['class']}, the run has {type(optimizer).__name__}"]
    # Groups are compared by their order, since they have no names.
    live = get_group_options(optimizer)
    if len(live) != len(saved["options"]):
        new_ones = " (parameters that may be missing go into the groups of the others)"
        return [
            f"it has {len(saved['options'])} parameter groups, the run has {len(live)}"
            + new_ones * bool(tolerance.missing)
        ]
    return [
        f"parameter group {group} has {name} = {old.get(name)}, the run's has {new.get(name)}"
        for group, (old, new) in enumerate(zip(saved["options"], live, strict=True))
        # An option that one side lacks counts as None: torch adds options in later versions.
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name) and name not in tolerance.options
    ]


def _find_missing_keys(
    name: str,
    keys: Collection[str],
    saved: Mapping[str, Any],
    index: Mapping[str, Any],
) -> list[str]:
    """Return the moments of a parameter that a checkpoint should hold and does not."""
    missing = sorted(key for key in keys if f"optimizer/{key}/{name}" not in index)
    # It has some of them: then it was stepped, and must have all.
    if len(missing) < len(keys):
        return missing
    # A parameter that never had a gradient has no moments. Format 1 does not list those.
    if "untouched" in saved:
        return [] if name in saved["untouched"] else missing
    has_moments = any(full.startswith("optimizer/") for full in index)
    return [] if has_moments or saved["scalars"][name] else missing


def _is_possible(value: Any, expected: Any) -> bool:
    """Return whether a value from a file may stand where the optimizer itself puts `expected`."""
    # type() and not isinstance(): True is an int in Python, but not a count.
    if isinstance(expected, Tensor) or type(value) not in (int, float):
        return type(value) is type(expected)
    # A float may be any number; a count starts at 0.
    return type(expected) is float or (type(expected) is not str and value >= 0)


def list_trained_names(stages: Sequence[nn.Module], optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the saved names of the parameters that the optimizer steps.

    Examples:
        >>> model = nn.Linear(1, 1, bias=False)
        >>> list_trained_names([model], torch.optim.SGD(model.parameters()))
        ['weight']
    """
    return [get_saved_name(name) for name in optimizer_state(stages, optimizer)]


def find_frozen_problems(frozen: Collection[str], tolerance: Tolerance) -> list[str]:
    """List the parameters that were trained and now are frozen, unless `extra` allows them."""
    return [
        f"{name} was trained when it was saved and is frozen now"
        for name in sorted(frozen)
        if not matches(f"model/{name}", tolerance.extra)
    ]
