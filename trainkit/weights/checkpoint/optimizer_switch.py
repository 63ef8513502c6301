"""A run goes on with another optimizer: what it can take over of what the one before remembered.

State of a name and a shape that the new one knows is taken over, through numbers where it is kept
in other bits. Moments that a count of steps corrects are taken over together with it, or not at
all: a first moment of 1000 steps beside a second one of none would make the next step many times
as large.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.optim.elementwise import ElementwiseOptimizer
from trainkit.optim.storage import BLOCK, read_moment, scale_name, wide, written_moment
from trainkit.parallel.names import empty_rows_like, get_named_parameters
from trainkit.parallel.reduction import local_of
from trainkit.weights.checkpoint.boxes import parameter_of
from trainkit.weights.checkpoint.reading import Target
from trainkit.weights.checkpoint.targets import (
    part_of,
    refuse_copies,
    saved_name,
    state_after_a_step,
)
from trainkit.weights.checkpoint.tensors import optimizer_state

_MEAN = "mean"
"""The mean of weights that `together` keeps: of the run, whatever steps."""


def taken_over(
    index: Mapping[str, Any], stages: Sequence[nn.Module], optimizer: torch.optim.Optimizer
) -> tuple[dict[str, Any], list[str]]:
    r"""Return what another optimizer takes over of a checkpoint, and what becomes of the rest.

    Args:
        index: The entries of the checkpoint's index.
        stages: This rank's stages.
        optimizer: The run's optimizer, which is not the one that was saved.

    Returns:
        The entries of the index that are to be loaded, of the parameters on this rank; and by
        parameter, as "NAME\nWHAT", what is done.
    """
    saved: dict[str, dict[str, Any]] = {}
    for full, entry in index.items():
        kind, *rest = full.split("/", 2)
        if kind == "optimizer":
            saved.setdefault(rest[1], {})[rest[0]] = entry
    named, after = get_named_parameters(stages), state_after_a_step(optimizer)
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    entries, told = dict[str, Any](), list[str]()
    for live in optimizer_state(stages, optimizer):
        p, name = named[live], saved_name(live)
        held = saved.get(name, {})
        part = part_of(optimizer, groups[id(p)])
        keys = _kept_of(p, held, _tensors(after[p]), part)
        entries |= {f"optimizer/{key}/{name}": held[key] for key in keys}
        told.append(f"{name}\n{_what_becomes(keys, held, _tensors(after[p]))}")
    return entries, told


def install_taken_over_(
    targets: Mapping[str, Target], stages: Sequence[nn.Module], optimizer: torch.optim.Optimizer
) -> None:
    """Give an optimizer what it takes over, as it keeps it, in place of what it remembered.

    Raises:
        ValueError: As `install_moments_`.

    Effects:
        Replaces the optimizer's state.
    """
    optimizer.state.clear()
    named, after = get_named_parameters(stages), state_after_a_step(optimizer)
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    by_name: dict[str, dict[str, Tensor]] = {}
    for full, target in targets.items():
        if full.startswith("optimizer/"):
            by_name.setdefault(parameter_of(full), {})[full.split("/", 2)[1]] = target.tensor
    for live, held in by_name.items():
        p, part = named[live], part_of(optimizer, groups[id(named[live])])
        made: dict[str, Tensor] = {}
        if isinstance(part, ElementwiseOptimizer) and held.keys() != {_MEAN}:
            made = part.begun(p, groups[id(p)])
        for key, like in _tensors(after[p]).items():
            if key in held:
                made |= _as_kept(p, key, held, like.dtype, scaled=scale_name(key) in after[p])
        optimizer.state[p].update(made)
    refuse_copies(optimizer)


def _tensors(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return what is remembered in tensors, but for scales, which belong to their moments."""
    scales = {scale_name(key) for key in state}
    return {k: x for k, x in state.items() if isinstance(x, Tensor) and k not in scales}


def _kept_of(
    p: nn.Parameter,
    held: Mapping[str, Any],
    wanted: Mapping[str, Tensor],
    part: torch.optim.Optimizer,
) -> list[str]:
    """Return which keys of a parameter are taken over, those of scales too."""

    def fits(key: str) -> bool:
        shape = tuple(p.shape) if wanted[key].dim() else ()
        return key in held and tuple(held[key]["shape"]) == shape

    corrected: Collection[str] = [key for key, x in wanted.items() if x.dim() and key != _MEAN]
    if isinstance(part, ElementwiseOptimizer):
        corrected = [key for key in part.moments if key not in part.copies]
        corrected += [key for key in part.counts if key == "step"]
    keys = [key for key in wanted if fits(key)]
    if not all(key in keys for key in corrected):
        keys = [key for key in keys if key == _MEAN]
    return keys + [scale_name(key) for key in keys if scale_name(key) in held]


def _what_becomes(keys: Collection[str], held: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    scales = {scale_name(key) for key in held}
    lists = {
        "takes over": [key for key in wanted if key in keys],
        "begins afresh with": [key for key in wanted if key not in keys],
        "drops": [key for key in held if key not in {*keys, *scales}],
    }
    return ", ".join(f"{do} {' and '.join(x)}" for do, x in lists.items() if x) or "keeps nothing"


def _as_kept(
    p: nn.Parameter, key: str, held: Mapping[str, Tensor], dtype: torch.dtype, *, scaled: bool
) -> dict[str, Tensor]:
    """Return a number or a moment that was read in the dtype, or the blocks, that it is kept in."""
    if not held[key].dim():
        return {key: held[key].to(dtype)}
    length = p.shape[-1]
    parts = {x: local_of(held[x]).reshape(-1) for x in (key, scale_name(key)) if x in held}
    values = read_moment(key, parts, wide(p.dtype))
    made = {key: empty_rows_like(p.data, length, dtype)}
    if scaled:
        made[scale_name(key)] = empty_rows_like(p.data, length // BLOCK, torch.float32)
    for x, kept in written_moment(key, values, made, 0).items():
        local = local_of(made[x])
        local.copy_(kept.view(local.shape))
    return made
