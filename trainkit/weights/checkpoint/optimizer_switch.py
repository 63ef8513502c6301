"""Resume with another optimizer, and carry over the state that it can use.

State is carried over by name and shape, and is converted where it is stored in another format.
Moments with a bias correction are carried over together with their step count, or not at all: a
first moment of 1000 steps with a second moment of none would make the next step many times too
large.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.optim.elementwise import ElementwiseOptimizer
from trainkit.optim.storage import BLOCK, encode_moment, get_step_dtype, read_moment, scale_name
from trainkit.parallel.grad_reduction import get_local
from trainkit.parallel.parameters import empty_rows_like, get_named_parameters
from trainkit.weights.checkpoint.load_targets import (
    check_shared_state,
    find_inner_optimizer,
    get_saved_name,
    probe_state,
)
from trainkit.weights.checkpoint.reading import Target
from trainkit.weights.checkpoint.run_state import optimizer_state

_MEAN = "mean"
"""The mean of the weights that `combine_optimizers` keeps; it does not depend on a step count."""


def select_carried_over(
    index: Mapping[str, Any],
    stages: Sequence[nn.Module],
    optimizer: torch.optim.Optimizer,
) -> tuple[dict[str, Any], list[str]]:
    r"""Select the saved optimizer state that another optimizer can carry over.

    Args:
        index: The entries of the checkpoint's index.
        stages: This rank's stages.
        optimizer: The run's optimizer, which is not the saved one.

    Returns:
        The entries of the index to load for the parameters on this rank; and for each parameter a
        message "NAME\nMESSAGE".
    """
    saved: dict[str, dict[str, Any]] = {}
    for full, entry in index.items():
        if full.startswith("optimizer/"):
            _, key, name = full.split("/", 2)
            saved.setdefault(name, {})[key] = entry
    named = get_named_parameters(stages)
    after_step = probe_state(optimizer)
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    entries: dict[str, Any] = {}
    messages: list[str] = []
    for live in optimizer_state(stages, optimizer):
        p = named[live]
        name = get_saved_name(live)
        saved_state = saved.get(name, {})
        # What the new optimizer will have for this parameter, as a step of a probe has shown.
        expected = _drop_scales(after_step[p])
        keys = _find_matching_keys(
            p, saved_state, expected, find_inner_optimizer(optimizer, groups[id(p)])
        )
        entries |= {f"optimizer/{key}/{name}": saved_state[key] for key in keys}
        scales = {scale_name(key) for key in saved_state}  # part of their moments in a message
        verbs = {
            "carries over": [key for key in expected if key in keys],
            "initializes": [key for key in expected if key not in keys],
            "drops": [key for key in saved_state if key not in {*keys, *scales}],
        }
        parts = [f"{verb} {' and '.join(moved)}" for verb, moved in verbs.items() if moved]
        messages.append(f"{name}\n{', '.join(parts) or 'has no state'}")
    return entries, messages


def install_carried_over_(
    targets: Mapping[str, Target],
    stages: Sequence[nn.Module],
    optimizer: torch.optim.Optimizer,
) -> None:
    """Replace an optimizer's state by the carried-over state, in the formats that it stores.

    Raises:
        ValueError: As `install_moments_`.

    Effects:
        Replaces the optimizer's state.
    """
    # A probe or an earlier load may have left state that the checkpoint does not have.
    optimizer.state.clear()
    named = get_named_parameters(stages)
    after_step = probe_state(optimizer)
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    by_name: dict[str, dict[str, Tensor]] = {}
    for full, target in targets.items():
        if full.startswith("optimizer/"):
            _, key, name = full.split("/", 2)
            by_name.setdefault(name, {})[key] = target.tensor
    for live, loaded in by_name.items():
        p = named[live]
        part = find_inner_optimizer(optimizer, groups[id(p)])
        state: dict[str, Tensor] = {}
        # An elementwise optimizer initializes a parameter only while its state is empty, so what is
        # not loaded gets its initial values here.
        if isinstance(part, ElementwiseOptimizer) and loaded.keys() != {_MEAN}:
            state = part.make_state(p, groups[id(p)])
        for key, like in _drop_scales(after_step[p]).items():
            if key in loaded:
                is_scaled = scale_name(key) in after_step[p]
                state |= _convert_state(p, key, loaded, like.dtype, is_scaled=is_scaled)
        optimizer.state[p].update(state)
    check_shared_state(optimizer)


def _drop_scales(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of a state without block scales, which belong to their moments."""
    scales = {scale_name(key) for key in state}
    return {k: x for k, x in state.items() if isinstance(x, Tensor) and k not in scales}


def _find_matching_keys(
    p: nn.Parameter,
    saved_state: Mapping[str, Any],
    expected: Mapping[str, Tensor],
    part: torch.optim.Optimizer,
) -> list[str]:
    """Return the keys of a parameter's state to carry over, block scales included."""

    def fits(key: str) -> bool:
        shape = tuple(p.shape) if expected[key].dim() else ()
        return key in saved_state and tuple(saved_state[key]["shape"]) == shape

    # Of an unknown optimizer any moment may have a bias correction: all are taken, or none.
    moments = [key for key, x in expected.items() if x.dim()]
    corrected: Collection[str] = [key for key in moments if key != _MEAN]
    if isinstance(part, ElementwiseOptimizer):
        corrected = [key for key in part.moments if key not in part.copies]
        corrected += [key for key in part.counts if key == "step"]
    keys = [key for key in expected if fits(key)]
    # The mean needs no step count, so it is carried over in any case.
    if not all(key in keys for key in corrected):
        keys = [key for key in keys if key == _MEAN]
    return keys + [scale_name(key) for key in keys if scale_name(key) in saved_state]


def _convert_state(
    p: nn.Parameter,
    key: str,
    loaded: Mapping[str, Tensor],
    dtype: torch.dtype,
    *,
    is_scaled: bool,
) -> dict[str, Tensor]:
    """Convert a loaded count or moment to the dtype, or the block scales, of the new optimizer."""
    if not loaded[key].dim():
        return {key: loaded[key].to(dtype)}
    length = p.shape[-1]
    keys = [x for x in (key, scale_name(key)) if x in loaded]
    parts = {x: get_local(loaded[x]).reshape(-1) for x in keys}
    # Through full-precision values: block scales of another format cannot be copied.
    values = read_moment(key, parts, get_step_dtype(p.dtype))
    state = {key: empty_rows_like(p.data, length, dtype)}
    if is_scaled:
        # A scale for each block of a row.
        state[scale_name(key)] = empty_rows_like(p.data, length // BLOCK, torch.float32)
    # The rounding of a moment depends on the step; with a constant a resume is reproducible.
    for x, converted in encode_moment(key, values, state, 0).items():
        local = get_local(state[x])
        local.copy_(converted.view(local.shape))
    return state
