"""The tensors of a run by names that are equal in every layout, and their hash."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.collectives import all_gather_objects, run_on_all_ranks
from trainkit.noise.hashing import MASK64, hash_box, hash_counters
from trainkit.parallel.grad_reduction import find_reducers, reshard_
from trainkit.parallel.parameters import (
    Box,
    get_local_box,
    get_named_buffers,
    get_named_parameters,
    is_base,
    is_tied_copy,
    modules_of,
)
from trainkit.types import Axis, ParallelState, TrainState
from trainkit.weights.checkpoint.boxes import shorten
from trainkit.weights.checkpoint.component_trees import hash_states, merge_states
from trainkit.weights.checkpoint.components import Components, get_component_boxes, read_components
from trainkit.weights.checkpoint.optimizer_internals import find_hidden_state

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integer dtype with which the bits of an element are viewed, by its bytes."""


MAX_BATCHES = 1 << 54
"""The largest batch of a cursor: rows have 64-bit indices, and a batch has hundreds of them."""
MAX_STREAM = 1000
"""The most integers of an online source in a cursor: each save hashes them one by one."""


def optimizer_state(
    stages: Iterable[nn.Module], optimizer: torch.optim.Optimizer
) -> dict[str, Mapping[str, Any]]:
    """Return the state of every parameter that the optimizer steps, by its name in the model.

    A parameter that never had a gradient has an empty state.

    Examples:
        >>> model = nn.Linear(1, 1, bias=False)
        >>> optimizer_state([model], torch.optim.AdamW(model.parameters()))
        {'weight': {}}
    """
    # `get`, since `state` is a defaultdict: reading by [] would add an entry to it.
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    named = get_named_parameters(stages)
    return {name: optimizer.state.get(p, {}) for name, p in named.items() if id(p) in stepped}


# Entries of a parameter group that may differ on resume: where and how steps are computed, and the
# learning rate, which the schedule sets.
_NOT_OPTIONS = {
    "params",
    "param_names",
    "lr",
    "initial_lr",
    "foreach",
    "fused",
    "capturable",
    "differentiable",
}


def get_group_options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the hyperparameters of each parameter group, except for the learning rate.

    Examples:
        >>> model = nn.Linear(1, 1)
        >>> get_group_options(torch.optim.SGD(model.parameters(), momentum=0.9))[0]["momentum"]
        0.9
    """
    return [
        {
            # Lists, as saved options have them: JSON has no tuples.
            name: list(value) if isinstance(value, tuple) else value
            for name, value in group.items()
            if name not in _NOT_OPTIONS and not isinstance(value, Tensor)
        }
        for group in optimizer.param_groups
    ]


def check_optimizer(stages: Iterable[nn.Module], optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError for an optimizer whose state a checkpoint cannot store.

    Raises:
        ValueError: It steps a parameter that is in no stage; has local tensors for a sharded
            parameter, so that it is unknown which part they are; has state that is neither tensors
            nor numbers; or has state outside of its `state`, see `find_hidden_state`.

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
            # A number, such as the step count, is local even where the parameter is sharded.
            is_local = (
                isinstance(value, Tensor) and value.dim() and not hasattr(value, "placements")
            )
            if is_local and hasattr(p, "placements"):
                raise ValueError(
                    f"save_checkpoint: the optimizer keeps {key!r} of {names[id(p)]} as a local "
                    "tensor, but the parameter is sharded; make it like the parameter (zeros_like)"
                )
            if not isinstance(value, Tensor | float | int | str | None):
                raise ValueError(  # noqa: TRY004 (one class for all problems of an optimizer)
                    f"save_checkpoint: the optimizer keeps {key!r} of {names[id(p)]} as a "
                    f"`{type(value).__name__}`; a checkpoint holds tensors and plain numbers "
                    "alone; keep a tensor there"
                )
    # A wrapper that forwards `step` but not `state` would silently save nothing.
    hidden = find_hidden_state(optimizer, names)
    if hidden:
        raise ValueError(
            f"save_checkpoint: {type(optimizer).__name__} holds what its own state does not show, "
            f"and no checkpoint would hold: {shorten(hidden)}; give it a `state` and "
            "`param_groups` that are those of all its parts"
        )


def check_modules(stages: Iterable[nn.Module]) -> None:
    """Raise ValueError for modules with state that is neither a parameter nor a buffer.

    Raises:
        ValueError: A module's `get_extra_state` returns an object, which a checkpoint cannot store.

    Examples:
        >>> check_modules([nn.Linear(1, 1)])
    """
    for name, module in (x for stage in stages for x in stage.named_modules()):
        # PyTorch's own raises; a module that replaces it may still return nothing.
        if type(module).get_extra_state is nn.Module.get_extra_state:
            continue
        extra = module.get_extra_state()
        if isinstance(extra, Tensor):
            has_state = extra.numel() > 0
        else:
            has_state = len(extra) > 0 if isinstance(extra, Sized) else extra is not None
        if has_state:
            raise ValueError(
                f"save_checkpoint: {name or 'the model'} ({type(module).__name__}) has an extra "
                f"state, a `{type(extra).__name__}`; a checkpoint holds parameters and buffers "
                "alone: make it a buffer"
            )


def model_tensors(stages: Iterable[nn.Module]) -> dict[str, Tensor]:
    """Return parameters and persistent buffers as "model/NAME", without the base of adapters.

    Effects:
        Reshards gathered parameters.

    Examples:
        >>> list(model_tensors([nn.Linear(1, 1, bias=False)]))
        ['model/weight']
    """
    stages = list(stages)
    named = {name: p for name, p in _reshard_parameters(stages).items() if not is_base(p)}
    tensors = {name: p.data for name, p in named.items()} | get_named_buffers(stages)
    return {f"model/{name}": x for name, x in tensors.items()}


def _reshard_parameters(stages: Sequence[nn.Module]) -> dict[str, nn.Parameter]:
    # FSDP may still have full parameters gathered: only the shards are boxes of this rank.
    for stage in stages:
        reshard_(find_reducers(stage))
    return get_named_parameters(stages)


def get_run_tensors(
    stages: Iterable[nn.Module],
    optimizer: torch.optim.Optimizer,
    *,
    copies: bool = False,
) -> dict[str, Tensor]:
    """Return every tensor of a checkpoint: "model/NAME" and "optimizer/KEY/NAME".

    A pipeline's copy of a tied embedding equals the original, and is only returned with `copies`.

    Examples:
        >>> model = nn.Linear(1, 1, bias=False)
        >>> list(get_run_tensors([model], torch.optim.SGD(model.parameters())))
        ['model/weight']
    """
    stages = list(stages)
    # The first and the last stage have the same bits of a tied embedding; one of them writes it.
    excluded = set[str]() if copies else find_tied_copies(stages)
    tensors = model_tensors(stages)
    for name in excluded:
        tensors.pop(f"model/{name}", None)
    for name, values in optimizer_state(stages, optimizer).items():
        for key, value in values.items():
            # Plain numbers are stored in state.json.
            if isinstance(value, Tensor) and name not in excluded:
                tensors[f"optimizer/{key}/{name}"] = value
    return tensors


def find_tied_copies(stages: Iterable[nn.Module]) -> set[str]:
    """Return the names of the parameters that are tied copies of another stage's.

    Examples:
        >>> find_tied_copies([nn.Linear(1, 1)])
        set()
    """
    return {name for name, p in get_named_parameters(stages).items() if is_tied_copy(p)}


def get_boxes_to_write(
    stages: Iterable[nn.Module],
    optimizer: torch.optim.Optimizer,
    ps: ParallelState,
) -> dict[str, tuple[Tensor, Box]]:
    """Return the boxes that this rank writes to a checkpoint, each after its tensor, by name."""
    return _select_boxes(get_run_tensors(stages, optimizer), ps)


def _select_boxes(
    tensors: Mapping[str, Tensor], ps: ParallelState
) -> dict[str, tuple[Tensor, Box]]:
    """Return the tensors and boxes that this rank writes, so that no box is written twice."""
    replica = ps.loss.index * ps.tp.count + ps.tp.index  # 0 writes what is not sharded
    boxes = {name: (x, get_local_box(x, replica=replica)) for name, x in tensors.items()}
    return {name: (tensor, box) for name, (tensor, box) in boxes.items() if box.writes}


def list_counters(state: TrainState) -> dict[str, int]:
    """Return the counters of a run as integers by name; of floats in its health the bits.

    Evaluations are left out of the health: a run that is evaluated more often, or was stopped and
    evaluated there, is the same run.

    Examples:
        >>> list_counters(TrainState(step=2, tokens=10))
        {'step': 2, 'tokens': 10, 'cursor/batch': 0}
        >>> list_counters(TrainState(health={"losses": [0.0]}))["health/losses/length"]
        1
    """
    # A name for each integer: their hashes add up with those of the tensors, in any order.
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
            counters |= {f"health/{name}/{i}": _get_bits(item) for i, item in enumerate(value)}
        else:
            counters[f"health/{name}"] = _get_bits(float(value))
    return counters


def _get_bits(value: float) -> int:
    """Return the bits of a float64 as an int64."""
    return struct.unpack("<q", struct.pack("<d", value))[0]


def hash_tensor_box(
    name: str,
    local: Tensor,
    *,
    shape: Sequence[int],
    offset: Sequence[int],
) -> int:
    """Return the hash of one box of a tensor; the hashes of all boxes add up to the state's.

    Examples:
        >>> halves = [
        ...     hash_tensor_box("a", torch.ones(2), shape=(4,), offset=(at,)) for at in (0, 2)
        ... ]
        >>> sum(halves) & MASK64 == hash_tensor_box("a", torch.ones(4), shape=(4,), offset=(0,))
        True
    """
    if local.is_complex():
        raise ValueError(f"state_hash: {name} is {local.dtype}, which has no integer twin")
    # The bits and not the values: -0.0 and NaN count too.
    bits = local.detach().contiguous().view(INTEGERS[local.element_size()])
    # With the dtype: equal bits of two dtypes are different values.
    return hash_box(f"{name} {local.dtype}", bits.cpu().numpy(), shape=shape, offset=offset)


def state_hash(
    state: TrainState,
    stages: Iterable[nn.Module] | nn.Module,
    optimizer: torch.optim.Optimizer,
    ps: ParallelState,
    components: Components | None = None,
) -> str:
    """Hash a run's parameters, optimizer state and counters: 16 hex digits, equal in every layout.

    With `components` (see `Component`) it covers their state as well.

    Raises:
        ConfigError: A component cannot be saved, or differs on a rank.

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
    hashes = _hash_boxes(get_boxes_to_write(stages, optimizer, ps), ps)
    if components:
        hashes |= hash_components(components, ps.world, by="state_hash")
    return combine_hashes(hashes, state)


def hash_components(components: Components | None, axis: Axis, *, by: str) -> dict[str, int]:
    """Hash the states of components, after checking that those equal on all ranks are.

    Args:
        components: The components.
        axis: All ranks, `ps.world`.
        by: The function that errors name.

    Returns:
        Hashes by name, equal on all ranks; their sum belongs to the hash of a run's state.

    Raises:
        ConfigError: A state cannot be saved, or differs; names the ranks and the keys.

    Effects:
        Communicates on `axis`, if there are components.

    Examples:
        >>> from trainkit.types import SOLO
        >>> len(hash_components({"layer": nn.Linear(1, 1)}, SOLO, by="state_hash"))
        3
    """
    if not components:
        return {}

    def read() -> list[Any]:
        states = read_components(components, rank=axis.index, by=by)
        boxes = get_component_boxes(
            {**states.replicated, **states.sharded, **states.own, **states.copies}
        )
        hashes = {
            f"{name} {box.offset}": hash_tensor_box(
                name, box.local, shape=x.shape, offset=box.offset
            )
            for name, (x, box) in boxes.items()
            if box.local.numel()
        }
        return [states.trees, hashes]

    by_rank = run_on_all_ranks(read, axis)
    merged = merge_states([trees for trees, _ in by_rank], [hashes for _, hashes in by_rank], by=by)
    return {name: x for _, own in by_rank for name, x in own.items()} | hash_states(merged)


def hash_base(stages: Iterable[nn.Module] | nn.Module, ps: ParallelState) -> str:
    """Hash the parameters that `mark_base_` has marked: 16 hex digits, equal in every layout.

    Effects:
        Communicates on `ps.world`, and waits.

    Examples:
        >>> from trainkit.mesh import solo_parallel
        >>> hash_base([nn.Linear(1, 1)], solo_parallel())
        '0000000000000000'
    """
    return _hash_parameters(stages, ps, is_base)


def hash_weights(stages: Iterable[nn.Module] | nn.Module, ps: ParallelState) -> str:
    """Hash all parameters: 16 hex digits, equal in every layout.

    Effects:
        Communicates on `ps.world`, and waits.

    Examples:
        >>> from trainkit.mesh import solo_parallel
        >>> zeros, ones = (nn.Linear(1, 1, bias=False) for _ in range(2))
        >>> _ = nn.init.zeros_(zeros.weight), nn.init.ones_(ones.weight)
        >>> hash_weights([zeros], solo_parallel()) == hash_weights([ones], solo_parallel())
        False
    """
    return _hash_parameters(stages, ps, lambda _: True)


def _hash_parameters(
    stages: Iterable[nn.Module] | nn.Module,
    ps: ParallelState,
    is_hashed: Callable[[nn.Parameter], bool],
) -> str:
    named = {
        f"model/{name}": p.data
        for name, p in _reshard_parameters(modules_of(stages)).items()
        if is_hashed(p) and not is_tied_copy(p)
    }
    hashes = _hash_boxes(_select_boxes(named, ps), ps)
    return f"{sum(hashes.values()) & MASK64:016x}"


def _hash_boxes(boxes: Mapping[str, tuple[Tensor, Box]], ps: ParallelState) -> dict[str, int]:
    """Return the hash of every box of all ranks, by its name and offset."""
    hashes = {
        f"{name} {box.offset}": hash_tensor_box(
            name, box.local, shape=tensor.shape, offset=box.offset
        )
        for name, (tensor, box) in boxes.items()
        if box.local.numel()
    }
    # Merged by box and not summed: ranks outside a tensor's mesh may have the same box.
    return {key: x for part in all_gather_objects(hashes, ps.world) for key, x in part.items()}


def combine_hashes(boxes: Mapping[str, int], state: TrainState) -> str:
    """Return the hash of a state from the hashes of its boxes and its counters.

    Examples:
        >>> combine_hashes({}, TrainState()) == combine_hashes({"a": 1}, TrainState())
        False
    """
    # A sum does not depend on how boxes and ranks divide the state.
    return f"{(sum(boxes.values()) + hash_counters(list_counters(state))) & MASK64:016x}"
