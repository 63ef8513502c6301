"""What a checkpoint holds against what the run has: every difference, in one list."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from trainkit.weights.checkpoint.boxes import parameter_of
from trainkit.weights.checkpoint.reading import Target
from trainkit.weights.checkpoint.targets import expected_state, saved_name
from trainkit.weights.checkpoint.tensors import group_options, optimizer_state


@attrs.frozen
class Leeway:
    """What a caller says may differ: patterns of parameter names (`*` stands for any letters).

    `missing` parameters keep what they have and begin with no moments; `extra` ones in the
    checkpoint are left aside; those of `cast` may be stored in another floating dtype. Where
    `optimizer` is true, the run may have another one, or the same with other options, which goes
    on with what it can; see `changed.taken_over`. Options of a parameter group that `options` names
    may have another value.
    """

    missing: Sequence[str] = ()
    extra: Sequence[str] = ()
    cast: Sequence[str] = ()
    optimizer: bool = False
    options: Collection[str] = ()


def matches(full: str, patterns: Iterable[str]) -> bool:
    """Say whether a tensor's parameter is one of those that patterns name.

    Examples:
        >>> matches("optimizer/step/layers.0.lora_a", ["*.lora_*"])
        True
    """
    return any(fnmatchcase(parameter_of(full), pattern) for pattern in patterns)


def tensor_problems(
    index: Mapping[str, Any],
    targets: Mapping[str, Target],
    *,
    wanted: Collection[str],
    frozen: Collection[str],
    leeway: Leeway,
) -> list[str]:
    """Say which tensors are missing, left over, or of another shape or dtype than the run's.

    Args:
        index: The entries of the checkpoint's index that are to be loaded.
        targets: This rank's.
        wanted: The names of the targets of all ranks, of which a pipeline rank has some.
        frozen: Parameters whose moments are told of elsewhere; see `frozen_problems`.
        leeway: What may differ.
    """
    by_name = {target.saved: target for target in targets.values()}
    problems = [
        f"{name} is missing in the checkpoint"
        for name in by_name
        if name not in index and not matches(name, leeway.missing)
    ]
    problems += [
        f"{name} is left over"
        for name in index
        if name not in wanted and not matches(name, leeway.extra)
        if not (name.startswith("optimizer/") and parameter_of(name) in frozen)
    ]
    for name in sorted(by_name.keys() & index.keys()):
        tensor = by_name[name].tensor
        want = (str(tensor.dtype).removeprefix("torch."), list(tensor.shape))
        found = (index[name]["dtype"], index[name]["shape"])
        are_floats = all(getattr(torch, dtype).is_floating_point for dtype in (found[0], want[0]))
        may_cast = want[1] == found[1] and are_floats and matches(name, leeway.cast)
        if want != found and not may_cast:
            problems.append(f"{name} is {found[0]}{found[1]}, the run has {want[0]}{want[1]}")
    return problems


def optimizer_problems(
    saved: Mapping[str, Any],
    index: Mapping[str, Any],
    stages: Sequence[nn.Module],
    optimizer: torch.optim.Optimizer,
    *,
    step: int,
    leeway: Leeway,
) -> list[str]:
    """Say where the saved optimizer is not the run's: moments must never begin afresh unseen.

    Args:
        saved: Of `state.json` what it says of the optimizer.
        index: The entries of the checkpoint's index.
        stages: This rank's stages.
        optimizer: The optimizer of their parameters.
        step: The step of the checkpoint; before the first there are no moments.
        leeway: Parameters that may be missing.
    """
    differs = kind_problems(saved, optimizer, leeway)
    trained = {
        name
        for name in trained_names(stages, optimizer)
        if not matches(f"model/{name}", leeway.missing)
    }
    problems = [
        f"{name} was not trained when it was saved"
        for name in sorted(trained - saved["scalars"].keys())
    ]
    if differs:
        return problems if leeway.optimizer else problems + differs
    expected = expected_state(stages, optimizer)
    problems += _scalar_problems(saved["scalars"], expected)
    if step == 0:
        return problems
    known = trained & saved["scalars"].keys()
    return problems + [
        f"optimizer/{key}/{saved_name(live)} is missing in the checkpoint"
        for live, made in expected.items()
        if saved_name(live) in known
        for key in _missing_keys(
            saved_name(live), {k for k, v in made.items() if isinstance(v, Tensor)}, saved, index
        )
    ]


def kind_problems(
    saved: Mapping[str, Any], optimizer: torch.optim.Optimizer, leeway: Leeway
) -> list[str]:
    """Say where the saved optimizer is of another kind than the run's, or has other options.

    Args:
        saved: Of `state.json` what it says of the optimizer.
        optimizer: The run's.
        leeway: What may differ.
    """
    if saved["class"] != type(optimizer).__name__:
        return [f"its optimizer is {saved['class']}, the run has {type(optimizer).__name__}"]
    return _option_problems(saved["options"], group_options(optimizer), leeway)


def _missing_keys(
    name: str, keys: Collection[str], saved: Mapping[str, Any], index: Mapping[str, Any]
) -> list[str]:
    """Return which moments of a parameter a checkpoint lacks, and ought to have."""
    missing = sorted(key for key in keys if f"optimizer/{key}/{name}" not in index)
    if len(missing) < len(keys):
        return missing
    if "untouched" in saved:  # the parameters that never had a gradient; format 1 does not say
        return [] if name in saved["untouched"] else missing
    has_some = any(full.startswith("optimizer/") for full in index)
    return [] if has_some or saved["scalars"][name] else missing


def _scalar_problems(
    saved: Mapping[str, Mapping[str, Any]], expected: Mapping[str, Mapping[str, Any]]
) -> list[str]:
    """Say what the optimizer cannot have remembered beside tensors: it would fail in a step."""
    return [
        f"the optimizer's {key} of {name} is {str(value)[:50]!r}, which it never is"
        for live, made in expected.items()
        for name in [saved_name(live)]
        for key, value in saved.get(name, {}).items()
        if not _may_be(value, made.get(key, 0))
        if made or value is not None  # of one that cannot be made to step little is known
    ]


def _may_be(value: Any, made: Any) -> bool:
    """Say whether a value from a file may stand where an optimizer has put `made`."""
    if isinstance(made, Tensor) or type(value) not in (int, float):
        return type(value) is type(made)
    return type(made) is float or (type(made) is not str and value >= 0)


def _option_problems(
    saved: Sequence[Mapping[str, Any]], live: Sequence[Mapping[str, Any]], leeway: Leeway
) -> list[str]:
    if len(live) != len(saved):
        new_ones = " (parameters that may be missing go into the groups of the others)"
        return [
            f"it has {len(saved)} parameter groups, the run has {len(live)}"
            + new_ones * bool(leeway.missing)
        ]
    return [
        f"parameter group {group} has {name} = {old.get(name)}, the run's has {new.get(name)}"
        for group, (old, new) in enumerate(zip(saved, live, strict=True))
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name) and name not in leeway.options
    ]


def trained_names(stages: Sequence[nn.Module], optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the names of the parameters that the optimizer steps, as they are saved.

    Examples:
        >>> model = nn.Linear(1, 1, bias=False)
        >>> trained_names([model], torch.optim.SGD(model.parameters()))
        ['weight']
    """
    return [saved_name(name) for name in optimizer_state(stages, optimizer)]


def frozen_problems(frozen: Collection[str], leeway: Leeway) -> list[str]:
    """Say which of the parameters that the run trains no more the caller does not leave aside."""
    return [
        f"{name} was trained when it was saved and is frozen now"
        for name in sorted(frozen)
        if not matches(f"model/{name}", leeway.extra)
    ]
