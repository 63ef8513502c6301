"""The tensors of a run by name, the same in every layout, and their hash."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.collectives import all_gather_json
from trainkit.hashing import MASK64, hash_box, hash_counters
from trainkit.parallel.naming import Box, box_of, named_buffers_of, named_parameters_of
from trainkit.types import ParallelState, TrainState

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def optimizer_state(
    stages: Iterable[nn.Module], optimizer: torch.optim.Optimizer
) -> dict[str, Mapping[str, Any]]:
    """Return the state of every parameter that the optimizer steps, by name in the whole model.

    One that has never had a gradient has an empty state.

    Examples:
        >>> model = nn.Linear(1, 1, bias=False)
        >>> optimizer_state([model], torch.optim.AdamW(model.parameters()))
        {'weight': {}}
    """
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    named = named_parameters_of(stages)
    return {name: optimizer.state.get(p, {}) for name, p in named.items() if id(p) in stepped}


def model_tensors(stages: Iterable[nn.Module]) -> dict[str, Tensor]:
    """Return parameters and persistent buffers as "model/NAME".

    Examples:
        >>> list(model_tensors([nn.Linear(1, 1, bias=False)]))
        ['model/weight']
    """
    stages = list(stages)
    named = {name: p.data for name, p in named_parameters_of(stages).items()}
    return {f"model/{name}": x for name, x in (named | named_buffers_of(stages)).items()}


def run_tensors(stages: Iterable[nn.Module], optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return every tensor that a checkpoint holds: "model/NAME" and "optimizer/KEY/NAME".

    Examples:
        >>> model = nn.Linear(1, 1, bias=False)
        >>> list(run_tensors([model], torch.optim.SGD(model.parameters())))
        ['model/weight']
    """
    stages = list(stages)
    tensors = model_tensors(stages)
    for name, values in optimizer_state(stages, optimizer).items():
        for key, value in values.items():
            if isinstance(value, Tensor):
                tensors[f"optimizer/{key}/{name}"] = value
    return tensors


def replica_of(ps: ParallelState) -> int:
    """Return which copy of an unsharded tensor this rank holds; 0 for the one that writes."""
    return ps.loss.index * ps.tp.count + ps.tp.index


def counters_of(state: TrainState) -> dict[str, int]:
    """Return the counters of a run as integers, by name.

    Examples:
        >>> counters_of(TrainState(step=2, tokens=10))
        {'step': 2, 'tokens': 10, 'cursor/batch': 0}
    """
    stream = {f"cursor/stream/{i}": value for i, value in enumerate(state.cursor.stream)}
    return {
        "step": state.step,
        "tokens": int(state.tokens),
        "cursor/batch": state.cursor.batch,
        **stream,
    }


def _hash(name: str, box: Box, shape: tuple[int, ...]) -> int:
    bits = box.local.detach().contiguous().view(_INTEGERS[box.local.element_size()])
    return hash_box(name, bits.cpu().numpy(), shape=shape, offset=box.offset)


def state_hash(
    state: TrainState,
    stages: Iterable[nn.Module],
    optimizer: torch.optim.Optimizer,
    ps: ParallelState,
) -> str:
    """Return the hash of a run's state: 16 hex digits, the same in every layout.

    It covers parameters, optimizer state and counters.

    Effects:
        Communicates on `ps.world`, and waits.

    Examples:
        >>> from trainkit.mesh import solo_parallel
        >>> model = nn.Linear(1, 1)
        >>> arguments = [model], torch.optim.SGD(model.parameters()), solo_parallel()
        >>> state_hash(TrainState(step=1), *arguments) == state_hash(TrainState(step=2), *arguments)
        False
    """
    total = 0
    for name, tensor in run_tensors(stages, optimizer).items():
        box = box_of(tensor, replica=replica_of(ps))
        if box.writes and box.local.numel():
            total += _hash(name, box, tuple(tensor.shape))
    if ps.world.index == 0:
        total += hash_counters(counters_of(state))
    parts = all_gather_json(total & MASK64, ps.world)
    return f"{sum(parts) & MASK64:016x}"
