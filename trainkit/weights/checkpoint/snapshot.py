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

from trainkit.parallel.names import Box, get_named_buffers
from trainkit.types import ParallelState, TrainState
from trainkit.weights.checkpoint.boxes import description_problem, shared_out
from trainkit.weights.checkpoint.stored import Stored, safetensors_header
from trainkit.weights.checkpoint.tensors import (
    INTEGERS,
    MOST_BATCHES,
    MOST_STREAM,
    boxes_to_write,
    check_modules,
    check_optimizer,
    group_options,
    optimizer_state,
    tied_copies_of,
)

_FILE_BYTES = 128 * 1024 * 1024  # files of a rank are written and hashed in parallel
_FILES = 16  # of a rank, about: with more bytes each file has more
_FILE_BOXES = 50_000  # a reader parses all names of a file to find one


@attrs.frozen(eq=False)
class SavedBox:
    """One box in a file: its values, and which part of which tensor they are.

    `values` lie in the memory of the file. A number whose bits, without the top one, are at least
    `not_below`, is not finite; None where any value will do.
    """

    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    values: Tensor
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
        ValueError: A module has an extra state; or from `take`: the optimizer's memory cannot be
            saved, or a value that JSON cannot hold is among the facts or in `state.health`.

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
    check_modules(stages)
    kept: list[tuple[list[Any], tuple[TensorFile, ...], Mapping[str, Any]]] = []

    def take(state: TrainState, facts: Mapping[str, Any]) -> Snapshot:
        state = _plain_counters(state)
        boxes = boxes_to_write(stages, optimizer, ps)
        check_optimizer(stages, optimizer)
        described = _described(state, optimizer, ps, facts)
        layout = [
            (name, x.dtype, box.shape, box.offset, box.local.shape)
            for name, (x, box) in boxes.items()
        ]
        if not kept or kept[0][0] != layout:
            kept.clear()  # before the next is asked for
            anything = {f"model/{name}" for name in get_named_buffers(stages)}
            kept.append((layout, *_allocate(boxes, ps, anything)))
        _, files, tensors = kept[0]
        saved = [box for file in files for box in file.boxes]
        _copy([boxes[box.name][1].local for box in saved], [box.values for box in saved])
        return Snapshot(
            state,
            files,
            tensors,
            _scalars(stages, optimizer),
            [name for name, held in optimizer_state(stages, optimizer).items() if not held],
            described,
        )

    return take


def check_savable(
    state: TrainState,
    stages: Sequence[nn.Module],
    optimizer: torch.optim.Optimizer,
    ps: ParallelState,
) -> None:
    """Refuse a state that no checkpoint could hold, without saving it.

    An optimizer makes its state in its first step, so this is worth asking after that step: the
    first save may come hundreds of steps later.

    Args:
        state: The counters of the run.
        stages: This rank's stages.
        optimizer: The optimizer of their parameters.
        ps: The layout.

    Raises:
        ValueError: Names the tensor, the module or the entry of the optimizer's state that a
            checkpoint cannot hold, as `save_checkpoint` would.

    Effects:
        Gives gathered parameters back to their shards.

    Examples:
        >>> from trainkit.mesh import solo_parallel
        >>> model = nn.Linear(1, 1)
        >>> optimizer = torch.optim.SGD(model.parameters())
        >>> check_savable(TrainState(step=1), [model], optimizer, solo_parallel())
    """
    check_modules(stages)
    _entries(boxes_to_write(stages, optimizer, ps))
    check_optimizer(stages, optimizer)
    counts = dict.fromkeys(state.health, 0.0)  # their values would be waited for
    _described(attrs.evolve(state, tokens=0, health=counts), optimizer, ps, {})


def _plain_counters(state: TrainState) -> TrainState:
    health = {x: v.item() if isinstance(v, Tensor) else v for x, v in state.health.items()}
    return attrs.evolve(state, tokens=int(state.tokens), health=health)


def _copy(values: list[Tensor], into: list[Tensor]) -> None:
    devices = {value.device for value in values if value.is_cuda}
    with torch.no_grad():
        if values:
            torch._foreach_copy_(into, values, non_blocking=bool(devices))
    for device in devices:
        torch.cuda.current_stream(device).synchronize()


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
                "state": attrs.asdict(state),
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


def _allocate(
    boxes: Mapping[str, tuple[Tensor, Box]], ps: ParallelState, anything: set[str]
) -> tuple[tuple[TensorFile, ...], dict[str, Any]]:
    """Lay boxes out in files; return these, and their entries of the index.

    Of boxes in `anything`, infinite values are saved too.
    """
    tensors = _entries(boxes)
    full = {name: box.local for name, (_, box) in boxes.items() if box.local.numel()}
    order = sorted(full, key=lambda name: (-full[name].element_size(), name))  # so all are aligned
    most = max(_FILE_BYTES, sum(x.nbytes for x in full.values()) // _FILES)
    sizes = {name: full[name].nbytes for name in order}
    files = []
    for number, names in enumerate(shared_out(sizes, most_bytes=most, most_names=_FILE_BOXES)):
        stem = f"rank_{ps.world.index:05d}"
        file = f"{stem}-{number}.safetensors" if number else f"{stem}.safetensors"
        files.append(_one_file(file, {name: boxes[name] for name in names}, anything))
        for box in files[-1].boxes:
            part = {"offset": list(box.offset), "shape": list(box.values.shape), "file": file}
            tensors[box.name]["boxes"].append(part)
    return tuple(files), tensors


def _entries(boxes: Mapping[str, tuple[Tensor, Box]]) -> dict[str, dict[str, Any]]:
    """Return the entries of the index, without the boxes; refuse what no index can hold."""
    tensors: dict[str, dict[str, Any]] = {
        name: {"dtype": _name_of(tensor.dtype), "shape": list(tensor.shape), "boxes": []}
        for name, (tensor, _) in boxes.items()
    }
    for name, entry in tensors.items():
        problem = description_problem(name, entry)
        if problem is not None:
            raise ValueError(f"save_checkpoint: {problem}")
    return tensors


def _one_file(file: str, boxes: Mapping[str, tuple[Tensor, Box]], anything: set[str]) -> TensorFile:
    """Give memory to the boxes of one file."""
    locals_ = [box.local for _, box in boxes.values()]
    data = np.empty(sum(local.nbytes for local in locals_), np.uint8)
    if any(local.is_cuda for local in locals_):
        _pin(data)
    parts = torch.from_numpy(data).split([local.nbytes for local in locals_])
    saved = []
    for (name, (tensor, box)), part in zip(boxes.items(), parts, strict=True):
        values = part.view(tensor.dtype).view(box.local.shape)
        limit = _not_below(tensor.dtype, may_be_infinite=name in anything)
        saved.append(SavedBox(name, tuple(tensor.shape), box.offset, values, limit))
    held = {b.name: Stored(_name_of(b.values.dtype), tuple(b.values.shape), ()) for b in saved}
    return TensorFile(file, safetensors_header(held), data, tuple(saved))


def _not_below(dtype: torch.dtype, *, may_be_infinite: bool) -> int | None:
    """Return the bits from which on a positive number is infinite; above, it is none."""
    if not dtype.is_floating_point:
        return None
    largest = torch.tensor(torch.finfo(dtype).max, dtype=dtype)
    bits = int(largest.view(INTEGERS[largest.element_size()])) + 1
    return bits + (may_be_infinite and dtype != torch.float8_e4m3fn)  # which has no infinity


def _pin(data: np.ndarray[Any, Any]) -> None:
    """Pin memory for as long as it is there; `pin_memory=True` would round it to a power of two."""
    runtime: Any = torch.cuda.cudart()
    torch.cuda.check_error(runtime.cudaHostRegister(data.ctypes.data, data.nbytes, 0))
    weakref.finalize(data, runtime.cudaHostUnregister, data.ctypes.data)


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
