"""The tensors of a run by name, the same in every layout, and their hash."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.collectives import all_gather_objects
from trainkit.noise.hashing import MASK64, hash_box, hash_counters
from trainkit.parallel.names import (
    Box,
    get_local_box,
    get_named_buffers,
    get_named_parameters,
    is_base,
    is_tied_copy,
    modules_of,
)
from trainkit.parallel.reduction import reducers_of, reshard_
from trainkit.types import ParallelState, TrainState
from trainkit.weights.checkpoint.boxes import shortened
from trainkit.weights.checkpoint.optimizer_internals import hidden_state

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By bytes of an element the integers that its bits are looked at as."""


MOST_BATCHES = 1 << 54
"""The last batch that a cursor may name: rows are numbered in 64 bits, some hundred to a batch."""
MOST_STREAM = 1000
"""How many numbers a source may need to go on from: each is hashed by itself, in every save."""


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
    named = get_named_parameters(stages)
    return {name: optimizer.state.get(p, {}) for name, p in named.items() if id(p) in stepped}


_IMPLEMENTATION = ("params", "param_names", "lr", "initial_lr")
_IMPLEMENTATION += ("foreach", "fused", "capturable", "differentiable")


def group_options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return each parameter group's options that shape its steps, but for the learning rate.

    Examples:
        >>> model = nn.Linear(1, 1)
        >>> group_options(torch.optim.SGD(model.parameters(), momentum=0.9))[0]["momentum"]
        0.9
    """
    return [
        {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in group.items()
            if name not in _IMPLEMENTATION and not isinstance(value, Tensor)
        }
        for group in optimizer.param_groups
    ]


def check_optimizer(stages: Iterable[nn.Module], optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer whose memory a checkpoint could not hold.

    Raises:
        ValueError: It steps a parameter that is in no stage; keeps local tensors for a sharded
            parameter, of which it cannot be known what they are a part of; remembers an object of
            Python's; or what its own `state` does not show, see `hidden_state`.

    Examples:
        >>> model = nn.Linear(1, 1)
        >>> check_optimizer([model], torch.optim.SGD(model.parameters()))
    """
    names = {id(p): name for name, p in get_named_parameters(stages).items()}
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        if id(p) not in names:
            raise ValueError(
                f"save_checkpoint: the optimizer steps a parameter of shape {tuple(p.shape)} that "
                "is in none of the stages; pass every module that it steps"
            )
        for key, value in optimizer.state.get(p, {}).items():
            local = isinstance(value, Tensor) and value.dim() and not hasattr(value, "placements")
            if local and hasattr(p, "placements"):
                raise ValueError(
                    f"save_checkpoint: the optimizer keeps {key!r} of {names[id(p)]} as a local "
                    "tensor, but the parameter is sharded; make it like the parameter (zeros_like)"
                )
            if not isinstance(value, Tensor | float | int | str | None):
                raise ValueError(  # noqa: TRY004 (as all that is wrong with an optimizer)
                    f"save_checkpoint: the optimizer keeps {key!r} of {names[id(p)]} as a "
                    f"`{type(value).__name__}`; a checkpoint holds tensors and plain numbers "
                    "alone; keep a tensor there"
                )
    hidden = hidden_state(optimizer, names)
    if hidden:
        raise ValueError(
            f"save_checkpoint: {type(optimizer).__name__} holds what its own state does not show, "
            f"and no checkpoint would hold: {shortened(hidden)}; give it a `state` and "
            "`param_groups` that are those of all its parts"
        )


def check_modules(stages: Iterable[nn.Module]) -> None:
    """Refuse modules that remember what is neither a parameter nor a buffer.

    Raises:
        ValueError: A module's `get_extra_state` gives something: an object, which a checkpoint does
            not hold.

    Examples:
        >>> check_modules([nn.Linear(1, 1)])
    """
    for name, part in (x for stage in stages for x in stage.named_modules()):
        if type(part).get_extra_state is nn.Module.get_extra_state:
            continue
        extra = part.get_extra_state()
        size = extra.numel() if isinstance(extra, Tensor) else int(extra is not None)
        if len(extra) if isinstance(extra, Sized) and not isinstance(extra, Tensor) else size:
            raise ValueError(
                f"save_checkpoint: {name or 'the model'} ({type(part).__name__}) has an extra state"
                f", a `{type(extra).__name__}`; a checkpoint holds parameters and buffers alone: "
                "make it a buffer"
            )


def model_tensors(stages: Iterable[nn.Module]) -> dict[str, Tensor]:
    """Return parameters and persistent buffers as "model/NAME", but for a base kept elsewhere.

    Effects:
        Gives gathered parameters back to their shards.

    Examples:
        >>> list(model_tensors([nn.Linear(1, 1, bias=False)]))
        ['model/weight']
    """
    stages = list(stages)
    named = {name: p for name, p in _parameters(stages).items() if not is_base(p)}
    tensors = {name: p.data for name, p in named.items()} | get_named_buffers(stages)
    return {f"model/{name}": x for name, x in tensors.items()}


def _parameters(stages: Sequence[nn.Module]) -> dict[str, nn.Parameter]:
    for stage in stages:
        reshard_(reducers_of(stage))
    return get_named_parameters(stages)


def run_tensors(
    stages: Iterable[nn.Module], optimizer: torch.optim.Optimizer, *, copies: bool = False
) -> dict[str, Tensor]:
    """Return every tensor that a checkpoint holds: "model/NAME" and "optimizer/KEY/NAME".

    A pipeline's copy of a tied embedding is the same as its owner's, and left out but for `copies`.

    Examples:
        >>> model = nn.Linear(1, 1, bias=False)
        >>> list(run_tensors([model], torch.optim.SGD(model.parameters())))
        ['model/weight']
    """
    stages = list(stages)
    left_out = set[str]() if copies else tied_copies_of(stages)
    tensors = model_tensors(stages)
    for name in left_out:
        tensors.pop(f"model/{name}", None)
    for name, values in optimizer_state(stages, optimizer).items():
        for key, value in values.items():
            if isinstance(value, Tensor) and name not in left_out:
                tensors[f"optimizer/{key}/{name}"] = value
    return tensors


def tied_copies_of(stages: Iterable[nn.Module]) -> set[str]:
    """Return the names of the parameters that are copies of another stage's.

    Examples:
        >>> tied_copies_of([nn.Linear(1, 1)])
        set()
    """
    return {name for name, p in get_named_parameters(stages).items() if is_tied_copy(p)}


def boxes_to_write(
    stages: Iterable[nn.Module], optimizer: torch.optim.Optimizer, ps: ParallelState
) -> dict[str, tuple[Tensor, Box]]:
    """Return the tensors of which this rank writes a box to a checkpoint, and the boxes."""
    return _own_boxes(run_tensors(stages, optimizer), ps)


def _own_boxes(tensors: Mapping[str, Tensor], ps: ParallelState) -> dict[str, tuple[Tensor, Box]]:
    replica = ps.loss.index * ps.tp.count + ps.tp.index  # 0 writes what is not sharded
    found = {name: (x, get_local_box(x, replica=replica)) for name, x in tensors.items()}
    return {name: (tensor, box) for name, (tensor, box) in found.items() if box.writes}


def counters_of(state: TrainState) -> dict[str, int]:
    """Return the counters of a run as integers, by name; of what health remembers, the bits.

    What it remembers of evaluations is left out: a run that is evaluated more often, or that was
    stopped and evaluated there, is the same run.

    Examples:
        >>> counters_of(TrainState(step=2, tokens=10))
        {'step': 2, 'tokens': 10, 'cursor/batch': 0}
        >>> counters_of(TrainState(health={"losses": [0.0]}))["health/losses/length"]
        1
    """
    stream = {f"cursor/stream/{i}": value for i, value in enumerate(state.cursor.stream)}
    counters = {
        "step": state.step,
        "tokens": int(state.tokens),
        "cursor/batch": state.cursor.batch,
        **stream,
    }
    for name, value in state.health.items():
        if name.startswith("evaluation_"):
            continue
        if isinstance(value, Sequence):
            counters[f"health/{name}/length"] = len(value)
            counters |= {f"health/{name}/{i}": _bits_of(item) for i, item in enumerate(value)}
        else:
            counters[f"health/{name}"] = _bits_of(float(value))
    return counters


def _bits_of(value: float) -> int:
    return struct.unpack("<q", struct.pack("<d", value))[0]


def box_hash(name: str, local: Tensor, *, shape: Sequence[int], offset: Sequence[int]) -> int:
    """Return the part of a state's hash that is one box of a tensor.

    Examples:
        >>> halves = [box_hash("a", torch.ones(2), shape=(4,), offset=(at,)) for at in (0, 2)]
        >>> sum(halves) & MASK64 == box_hash("a", torch.ones(4), shape=(4,), offset=(0,))
        True
    """
    if local.is_complex():
        raise ValueError(f"state_hash: {name} is {local.dtype}, which has no integer twin")
    bits = local.detach().contiguous().view(INTEGERS[local.element_size()])
    return hash_box(f"{name} {local.dtype}", bits.cpu().numpy(), shape=shape, offset=offset)


def state_hash(
    state: TrainState,
    stages: Iterable[nn.Module] | nn.Module,
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
    stages = modules_of(stages)
    return hash_of_boxes(_box_hashes(boxes_to_write(stages, optimizer, ps), ps), state)


def base_hash(stages: Iterable[nn.Module] | nn.Module, ps: ParallelState) -> str:
    """Return the hash of what `mark_base_` has marked: 16 hex digits, the same in every layout.

    Effects:
        Communicates on `ps.world`, and waits.

    Examples:
        >>> from trainkit.mesh import solo_parallel
        >>> base_hash([nn.Linear(1, 1)], solo_parallel())
        '0000000000000000'
    """
    return _hash_of_parameters(stages, ps, is_base)


def weights_hash(stages: Iterable[nn.Module] | nn.Module, ps: ParallelState) -> str:
    """Return the hash of all parameters: 16 hex digits, the same in every layout.

    Effects:
        Communicates on `ps.world`, and waits.

    Examples:
        >>> from trainkit.mesh import solo_parallel
        >>> zeros, ones = (nn.Linear(1, 1, bias=False) for _ in range(2))
        >>> _ = nn.init.zeros_(zeros.weight), nn.init.ones_(ones.weight)
        >>> weights_hash([zeros], solo_parallel()) == weights_hash([ones], solo_parallel())
        False
    """
    return _hash_of_parameters(stages, ps, lambda _: True)


def _hash_of_parameters(
    stages: Iterable[nn.Module] | nn.Module,
    ps: ParallelState,
    is_hashed: Callable[[nn.Parameter], bool],
) -> str:
    named = {
        f"model/{name}": p.data
        for name, p in _parameters(modules_of(stages)).items()
        if is_hashed(p) and not is_tied_copy(p)
    }
    return f"{sum(_box_hashes(_own_boxes(named, ps), ps).values()) & MASK64:016x}"


def _box_hashes(boxes: Mapping[str, tuple[Tensor, Box]], ps: ParallelState) -> dict[str, int]:
    """Return the hash of every box of all ranks, by its name and place."""
    own = {
        f"{name} {box.offset}": box_hash(name, box.local, shape=tensor.shape, offset=box.offset)
        for name, (tensor, box) in boxes.items()
        if box.local.numel()
    }
    # By box and not summed at once: ranks outside a tensor's mesh may hold the same box.
    return {
        name: part for parts in all_gather_objects(own, ps.world) for name, part in parts.items()
    }


def hash_of_boxes(boxes: Mapping[str, int], state: TrainState) -> str:
    """Return the hash of a state whose boxes have these hashes.

    Examples:
        >>> hash_of_boxes({}, TrainState()) == hash_of_boxes({"a": 1}, TrainState())
        False
    """
    return f"{(sum(boxes.values()) + hash_counters(counters_of(state))) & MASK64:016x}"
