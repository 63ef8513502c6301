"""A copy of what this rank writes, in host memory, laid out as it will lie in the files.

The blocking part of a save is this copy alone. The memory is kept for the next one: the system
zeroes pages that are new, which takes longer than to fill them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import orjson
import torch
from torch import Tensor, nn

from trainkit.checkpoint.boxes import description_problem, shared_out
from trainkit.checkpoint.stored import Stored, safetensors_header
from trainkit.checkpoint.tensors import (
    MOST_BATCHES,
    MOST_STREAM,
    check_optimizer,
    group_options,
    optimizer_state,
    replica_of,
    run_tensors,
    tied_copies_of,
)
from trainkit.parallel.naming import Box, box_of, named_buffers_of
from trainkit.parallel.reduction import reducers_of, reshard_
from trainkit.types import ParallelState, TrainState

_FILE_BYTES = 128 * 1024 * 1024  # files of a rank are written and hashed in parallel
_FILES = 16  # of a rank, about: with more bytes each file has more
_FILE_BOXES = 50_000  # a reader parses all names of a file to find one

# The bits of a number without its sign, from which on it is infinite; above, it is none.
_INFINITE = {
    torch.float64: 0x7FF0_0000_0000_0000,
    torch.float32: 0x7F80_0000,
    torch.float16: 0x7C00,
    torch.bfloat16: 0x7F80,
    torch.float8_e5m2: 0x7C,
    torch.float8_e4m3fn: 0x7E,  # it has no infinity: 0x7F is the next, and no number
}


@attrs.frozen(eq=False)
class SavedBox:
    """One box in a file: its bits, and which part of which tensor they are.

    `bits` are unsigned integers in the box's shape. One of at least `not_below`, without its top
    bit, is not finite; None where any value will do.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    bits: np.ndarray[Any, Any]
    not_below: int | None


@attrs.frozen(eq=False)
class TensorFile:
    """A safetensors file to write: its name, its header, and what follows."""

    name: str
    header: bytes
    data: np.ndarray[Any, Any]
    boxes: tuple[SavedBox, ...]


@attrs.frozen(eq=False)
class Snapshot:
    """What one rank writes of a state, at rest in host memory.

    `tensors` are its entries of the index, `scalars` what its optimizer remembers beside tensors,
    `untouched` the parameters of which it remembers nothing, and `described` the rest of
    `state.json`, on the first rank.
    """

    state: TrainState
    files: tuple[TensorFile, ...]
    tensors: Mapping[str, Any]
    scalars: Mapping[str, Any]
    untouched: Sequence[str]
    described: Mapping[str, Any]


TakeSnapshot = Callable[[TrainState, Mapping[str, Any]], Snapshot]


def bind_snapshots(
    stages: Sequence[nn.Module], optimizer: torch.optim.Optimizer, ps: ParallelState
) -> TakeSnapshot:
    """Return take(state, facts): copy what this rank writes of a state to host memory.

    Every snapshot lies in the memory of the one before, which must have been written by then.

    Args:
        stages: This rank's stages.
        optimizer: The optimizer of their parameters.
        ps: The layout.

    Raises:
        ValueError: From `take`: the optimizer's memory cannot be saved, or a value that JSON cannot
            hold is among the facts or in `state.health`.

    Effects:
        From `take`: gives gathered parameters back to their shards; on a GPU waits for the copy.

    Examples:
        >>> from trainkit.mesh import solo_parallel
        >>> model = nn.Linear(1, 1)
        >>> optimizer = torch.optim.SGD(model.parameters())
        >>> take = bind_snapshots([model], optimizer, solo_parallel())
        >>> [box.name for box in take(TrainState(), {}).files[0].boxes]
        ['model/bias', 'model/weight']
    """
    kept: list[tuple[list[Any], _Memory]] = []

    def take(state: TrainState, facts: Mapping[str, Any]) -> Snapshot:
        for stage in stages:
            reshard_(reducers_of(stage))
        check_optimizer(stages, optimizer)
        described = _described(state, optimizer, ps, facts)
        boxes = _boxes_to_write(stages, optimizer, ps)
        layout = [
            (name, x.dtype, box.shape, box.offset, box.local.shape)
            for name, (x, box) in boxes.items()
        ]
        if not kept or kept[0][0] != layout:
            kept.clear()  # before the next is asked for
            anything = {f"model/{name}" for name in named_buffers_of(stages)}
            kept.append((layout, _allocate(boxes, ps, anything)))
        memory = kept[0][1]
        _copy([box.local for _, box in boxes.values() if box.local.numel()], memory.into)
        return Snapshot(
            attrs.evolve(state, tokens=int(state.tokens)),
            memory.files,
            memory.tensors,
            _scalars(stages, optimizer),
            [name for name, held in optimizer_state(stages, optimizer).items() if not held],
            described,
        )

    return take


def _copy(values: list[Tensor], into: list[Tensor]) -> None:
    devices = {value.device for value in values if value.is_cuda}
    with torch.no_grad():
        if values:
            torch._foreach_copy_(into, values, non_blocking=bool(devices))
    for device in devices:
        torch.cuda.current_stream(device).synchronize()


def _boxes_to_write(
    stages: Sequence[nn.Module], optimizer: torch.optim.Optimizer, ps: ParallelState
) -> dict[str, tuple[Tensor, Box]]:
    found = {}
    for name, tensor in run_tensors(stages, optimizer).items():
        box = box_of(tensor, replica=replica_of(ps))
        if box.writes:
            found[name] = (tensor, box)
    return found


def _scalars(
    stages: Sequence[nn.Module], optimizer: torch.optim.Optimizer
) -> dict[str, dict[str, Any]]:
    """Return what the optimizer remembers of each parameter that it steps besides tensors."""
    copies = tied_copies_of(stages)
    return {
        name: {key: value for key, value in values.items() if not isinstance(value, Tensor)}
        for name, values in optimizer_state(stages, optimizer).items()
        if name not in copies
    }


def _described(
    state: TrainState,
    optimizer: torch.optim.Optimizer,
    ps: ParallelState,
    facts: Mapping[str, Any],
) -> dict[str, Any]:
    """Return what `state.json` will say, as plain values of this moment."""
    unfit = [name for name, value in state.health.items() if not np.isfinite(value).all()]
    if unfit:
        raise ValueError(
            f"save_checkpoint: health[{unfit[0]!r}] is {state.health[unfit[0]]}; JSON holds finite "
            "numbers only"
        )
    if len(state.cursor.stream) > MOST_STREAM or state.cursor.batch > MOST_BATCHES:
        raise ValueError(
            f"save_checkpoint: the cursor is at batch {state.cursor.batch} and has "
            f"{len(state.cursor.stream)} numbers of a stream; a checkpoint holds {MOST_BATCHES} "
            f"and {MOST_STREAM} at most"
        )
    return orjson.loads(
        orjson.dumps(
            {
                "state": attrs.asdict(attrs.evolve(state, tokens=int(state.tokens))),
                "optimizer": {
                    "class": type(optimizer).__name__,
                    "options": group_options(optimizer),
                },
                "layout": ps.degrees,
                "facts": dict(facts),
                "machine": machine_of(ps.device),
            }
        )
    )


def machine_of(device: torch.device) -> dict[str, Any]:
    """Return what of a machine decides in which order sums are taken.

    Examples:
        >>> machine_of(torch.device("cpu"))["device"]
        'cpu'
    """
    return {
        "device": "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device),
        "threads": torch.get_num_threads(),
        "isa": torch.backends.cpu.get_cpu_capability(),
    }


# ------------------------------------------------------------------------------------------ memory


@attrs.frozen(eq=False)
class _Memory:
    """Host memory laid out as files; `into` are where the boxes go, in order."""

    files: tuple[TensorFile, ...]
    tensors: dict[str, Any]
    into: list[Tensor]


def _allocate(
    boxes: Mapping[str, tuple[Tensor, Box]], ps: ParallelState, anything: set[str]
) -> _Memory:
    """Lay boxes out in files; of those in `anything`, infinite values are saved too."""
    tensors: dict[str, dict[str, Any]] = {
        name: {
            "dtype": _name_of(tensor.dtype),
            "shape": list(tensor.shape),
            "boxes": [],
        }
        for name, (tensor, _) in boxes.items()
    }
    for name, entry in tensors.items():
        problem = description_problem(name, entry)
        if problem is not None:
            raise ValueError(f"save_checkpoint: {problem}")
    full = {name: box.local for name, (_, box) in boxes.items() if box.local.numel()}
    order = sorted(full, key=lambda name: (-full[name].element_size(), name))  # so all are aligned
    most = max(_FILE_BYTES, sum(x.nbytes for x in full.values()) // _FILES)
    sizes = {name: full[name].nbytes for name in order}
    into: dict[str, Tensor] = {}
    files = []
    for number, names in enumerate(shared_out(sizes, most_bytes=most, most_names=_FILE_BOXES)):
        stem = f"rank_{ps.world.index:05d}"
        file = f"{stem}-{number}.safetensors" if number else f"{stem}.safetensors"
        views, made = _one_file(file, {name: boxes[name] for name in names}, anything)
        into |= views
        files.append(made)
        for name in names:
            box = boxes[name][1]
            part = {"offset": list(box.offset), "shape": list(box.local.shape), "file": file}
            tensors[name]["boxes"].append(part)
    return _Memory(tuple(files), tensors, [into[name] for name in boxes if name in into])


def _one_file(
    file: str, boxes: Mapping[str, tuple[Tensor, Box]], anything: set[str]
) -> tuple[dict[str, Tensor], TensorFile]:
    """Give memory to the boxes of one file."""
    total = sum(box.local.nbytes for _, box in boxes.values())
    pinned = any(box.local.is_cuda for _, box in boxes.values())
    data = np.empty(total, np.uint8)
    if pinned:
        _pin(data)
    memory = torch.from_numpy(data)
    views: dict[str, Tensor] = {}
    held: dict[str, Stored] = {}
    saved = []
    begin = 0
    for name, (tensor, box) in boxes.items():
        dtype, end = box.local.dtype, begin + box.local.nbytes
        shape = tuple(box.local.shape)
        views[name] = memory[begin:end].view(dtype).view(shape)
        held[name] = Stored(_name_of(dtype), shape, ())
        bits = data[begin:end].view(f"u{box.local.element_size()}").reshape(shape)
        limit = _INFINITE.get(dtype)
        if limit is not None and (name in anything or dtype == torch.float8_e4m3fn):
            limit += 1
        whole = (f"{tensor.dtype}", tuple(tensor.shape))
        saved.append(SavedBox(name, *whole, box.offset, bits, limit))
        begin = end
    return views, TensorFile(file, safetensors_header(held), data, tuple(saved))


def _pin(data: np.ndarray[Any, Any]) -> None:
    """Pin memory for as long as it is there; `pin_memory=True` would round it to a power of two."""
    runtime: Any = torch.cuda.cudart()
    torch.cuda.check_error(runtime.cudaHostRegister(data.ctypes.data, data.nbytes, 0))
    weakref.finalize(data, runtime.cudaHostUnregister, data.ctypes.data)


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
