"""Copy what this rank writes of a state to host memory, in the layout of the files.

Training waits for this copy alone. Its memory is reused for the next one, because the system zeroes
new pages, which takes longer than filling them.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import attrs
import numpy as np
import orjson
import torch
from torch import Tensor, nn

from trainkit.parallel.parameters import Box, get_named_buffers
from trainkit.types import ParallelState, TrainState
from trainkit.weights.checkpoint.boxes import (
    find_description_problem,
    get_dtype_name,
    split_into_files,
)
from trainkit.weights.checkpoint.component_trees import TENSORS
from trainkit.weights.checkpoint.components import (
    Components,
    get_component_boxes,
    read_components,
)
from trainkit.weights.checkpoint.run_state import (
    INTEGERS,
    MAX_BATCHES,
    MAX_STREAM,
    check_modules,
    check_optimizer,
    find_tied_copies,
    get_boxes_to_write,
    get_group_options,
    hash_components,
    optimizer_state,
)
from trainkit.weights.checkpoint.tensor_files import Stored, make_safetensors_header

_FILE_BYTES = 128 * 1024 * 1024  # the files of a rank are written and hashed in parallel
_FILES = 16  # of a rank, about; a rank with more bytes writes larger files
_FILE_BOXES = 50_000  # a reader parses all names of a file to find one


@attrs.frozen(eq=False)
class SavedBox:
    """One box in a file: its values, and which part of which tensor they are.

    `values` is a view of the file's memory. A number whose bits without the sign are at least
    `not_below` is not finite; None allows any value.
    """

    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    values: Tensor
    not_below: int | None


@attrs.frozen(eq=False)
class TensorFile:
    """A safetensors file to write: its name, its header, and the bytes of its boxes."""

    name: str
    header: bytes
    data: np.ndarray[Any, Any]
    boxes: tuple[SavedBox, ...]


@attrs.frozen(eq=False)
class Snapshot:
    """What one rank writes of a state, in host memory.

    `tensors` are its entries of the index, `scalars` the optimizer state that is not tensors,
    `untouched` the parameters without optimizer state, and `described` the rest of `state.json`,
    which the first rank writes. `components` are the plain values of components. The files in
    `replicas` are not written: they hold what must be equal to the first rank's.
    """

    state: TrainState
    files: tuple[TensorFile, ...]
    tensors: Mapping[str, Any]
    scalars: Mapping[str, Any]
    untouched: Sequence[str]
    described: Mapping[str, Any]
    components: Mapping[str, Any] = attrs.field(factory=dict)
    replicas: tuple[TensorFile, ...] = ()


class TakeSnapshot(Protocol):
    """See `make_snapshot_taker`."""

    def __call__(
        self, state: TrainState, facts: Mapping[str, Any], copies: Components | None = None, /
    ) -> Snapshot:
        """Copy what this rank writes; `copies` are saved in place of the components."""
        ...


def make_snapshot_taker(
    stages: Sequence[nn.Module],
    optimizer: torch.optim.Optimizer,
    ps: ParallelState,
    components: Components | None = None,
) -> TakeSnapshot:
    """Return `take(state, facts)`, which copies what this rank writes of a state to host memory.

    `take(state, facts, copies)` has the states of these copies of the components
    (`copy_components`), in place of those that the objects have now. Each snapshot reuses the
    memory of the previous one, which must have been written by then.

    Args:
        stages: This rank's stages.
        optimizer: The optimizer of their parameters.
        ps: The layout.
        components: Objects whose state is saved too; see `Component`.

    Raises:
        ValueError: A module has an extra state; or from `take`: the optimizer state cannot be
            saved, or a fact or a value of `state.health` is not JSON.

    Effects:
        From `take`: reshards gathered parameters; on a GPU waits for the copy.

    Examples:
        >>> from trainkit.mesh import solo_parallel
        >>> model = nn.Linear(1, 1)
        >>> optimizer = torch.optim.SGD(model.parameters())
        >>> take = make_snapshot_taker([model], optimizer, solo_parallel())
        >>> [box.name for box in take(TrainState(), {}).files[0].boxes]
        ['model/bias', 'model/weight']
    """
    check_modules(stages)
    memory = _Memory(f"rank_{ps.world.index:05d}")
    # In files of their own: metrics may grow, and the memory of the rest must not be made anew.
    component_memory = _Memory(f"components_{ps.world.index:05d}")
    replica_memory = _Memory("")

    def take(
        state: TrainState, facts: Mapping[str, Any], copies: Components | None = None
    ) -> Snapshot:
        # Device scalars are read here; the thread that writes only touches host memory.
        health = {x: v.item() if isinstance(v, Tensor) else v for x, v in state.health.items()}
        state = attrs.evolve(state, tokens=int(state.tokens), health=health)
        boxes = get_boxes_to_write(stages, optimizer, ps)
        check_optimizer(stages, optimizer)
        read = read_components(copies or components, rank=ps.world.index, by="save_checkpoint")
        # Before the copy: a state that cannot be saved raises while the old snapshot is intact.
        described = _describe_state(state, optimizer, ps, facts)
        # A buffer may be infinite on purpose: a mask, for instance.
        buffers = {f"model/{name}" for name in get_named_buffers(stages)}
        files, tensors = memory.fit(boxes, may_be_infinite=buffers)
        is_first = ps.world.index == 0
        common = read.replicated if is_first else {}
        written = get_component_boxes({**read.own, **read.sharded, **common})
        compared = get_component_boxes({**({} if is_first else read.replicated), **read.copies})
        more, entries = component_memory.fit(written)
        replicas, _ = replica_memory.fit(compared)
        sources = boxes | written | compared
        saved = [box for file in (*files, *more, *replicas) for box in file.boxes]
        _copy([sources[box.name][1].local for box in saved], [box.values for box in saved])
        moments = optimizer_state(stages, optimizer)
        tied = find_tied_copies(stages)
        return Snapshot(
            state=state,
            files=(*files, *more),
            tensors={**tensors, **entries},
            scalars={
                name: {key: x for key, x in values.items() if not isinstance(x, Tensor)}
                for name, values in moments.items()
                if name not in tied
            },
            untouched=[name for name, values in moments.items() if not values],
            described=described,
            components=read.trees,
            replicas=replicas,
        )

    return take


def check_savable(
    state: TrainState,
    stages: Sequence[nn.Module],
    optimizer: torch.optim.Optimizer,
    ps: ParallelState,
    components: Components | None = None,
) -> None:
    """Raise ValueError for a state that a checkpoint cannot store, without saving it.

    An optimizer creates its state in its first step. A check after that step reports a problem
    hundreds of steps before the first save would.

    Args:
        state: The counters of the run.
        stages: This rank's stages.
        optimizer: The optimizer of their parameters.
        ps: The layout.
        components: Objects whose state is saved too; see `Component`.

    Raises:
        ValueError: Names the tensor, the module or the entry of the optimizer state that a
            checkpoint cannot store, as `save_checkpoint` would; or what of a component cannot be
            stored, or is not equal on all ranks.

    Effects:
        Reshards gathered parameters; communicates on `ps.world`, if there are components.

    Examples:
        >>> from trainkit.mesh import solo_parallel
        >>> model = nn.Linear(1, 1)
        >>> optimizer = torch.optim.SGD(model.parameters())
        >>> check_savable(TrainState(step=1), [model], optimizer, solo_parallel())
    """
    check_modules(stages)
    _make_entries(get_boxes_to_write(stages, optimizer, ps))
    check_optimizer(stages, optimizer)
    zeros = dict.fromkeys(state.health, 0.0)  # reading the real values would wait for the device
    _describe_state(attrs.evolve(state, tokens=0, health=zeros), optimizer, ps, {})
    hash_components(components, ps.world, by="save_checkpoint")


def _copy(values: list[Tensor], into: list[Tensor]) -> None:
    """Copy tensors to host memory in one call, and wait once per device."""
    devices = {value.device for value in values if value.is_cuda}
    with torch.no_grad():
        if values:  # one call for all: thousands of small copies would each cost a launch
            torch._foreach_copy_(into, values, non_blocking=bool(devices))
    # Training may overwrite the parameters as soon as this returns.
    for device in devices:
        torch.cuda.current_stream(device).synchronize()


def _describe_state(
    state: TrainState,
    optimizer: torch.optim.Optimizer,
    ps: ParallelState,
    facts: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the contents of `state.json` as plain values, copied now."""
    for name, value in state.health.items():
        if not np.isfinite(value).all():
            raise ValueError(
                f"save_checkpoint: health[{name!r}] is {value}; JSON holds finite numbers only"
            )
    if len(state.cursor.stream) > MAX_STREAM or state.cursor.batch > MAX_BATCHES:
        raise ValueError(
            f"save_checkpoint: the cursor is at batch {state.cursor.batch} and has "
            f"{len(state.cursor.stream)} numbers of a stream; a checkpoint holds {MAX_BATCHES} "
            f"and {MAX_STREAM} at most"
        )
    return orjson.loads(
        orjson.dumps(
            {
                "state": attrs.asdict(state),
                "optimizer": {
                    "class": type(optimizer).__name__,
                    "options": get_group_options(optimizer),
                },
                "layout": ps.degrees,
                "facts": dict(facts),
                "machine": describe_machine(ps.device),
            }
        )
    )


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Return the properties of a machine that determine the order in which sums are taken.

    Examples:
        >>> describe_machine(torch.device("cpu"))["device"]
        'cpu'
    """
    return {
        "device": "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device),
        "threads": torch.get_num_threads(),
        "isa": torch.backends.cpu.get_cpu_capability(),
    }


# ------------------------------------------------------------------------------------------ memory


@attrs.define(eq=False)
class _Memory:
    """The files of the last snapshot, which the next one of the same layout reuses."""

    stem: str
    layout: list[Any] | None = None
    files: tuple[TensorFile, ...] = ()
    entries: Mapping[str, Any] = attrs.field(factory=dict)

    def fit(
        self,
        boxes: Mapping[str, tuple[Tensor, Box]],
        *,
        may_be_infinite: Collection[str] = (),
    ) -> tuple[tuple[TensorFile, ...], Mapping[str, Any]]:
        """Return files with room for some boxes, and the entries of the index."""
        layout = [
            (name, x.dtype, box.shape, box.offset, box.local.shape)
            for name, (x, box) in boxes.items()
        ]
        # They depend on names and shapes only, so they serve for every save.
        if self.layout != layout:
            # Frees the old memory before the new is allocated, which may fail.
            self.files, self.layout = (), None
            self.files, self.entries = _allocate(boxes, self.stem, may_be_infinite=may_be_infinite)
            self.layout = layout
        return self.files, self.entries


def _allocate(
    boxes: Mapping[str, tuple[Tensor, Box]],
    stem: str,
    *,
    may_be_infinite: Collection[str],
) -> tuple[tuple[TensorFile, ...], dict[str, Any]]:
    """Assign boxes to files and allocate these; return them, and their entries of the index."""
    entries = _make_entries(boxes)
    full = {name: box.local for name, (_, box) in boxes.items() if box.local.numel()}
    # The widest elements first: then every box is aligned to the size of its elements.
    order = sorted(full, key=lambda name: (-full[name].element_size(), name))
    sizes = {name: full[name].nbytes for name in order}
    max_bytes = max(_FILE_BYTES, sum(sizes.values()) // _FILES)
    files = []
    for index, names in enumerate(
        split_into_files(sizes, max_bytes=max_bytes, max_names=_FILE_BOXES)
    ):
        file = f"{stem}-{index}.safetensors" if index else f"{stem}.safetensors"
        files.append(_allocate_file(file, {x: boxes[x] for x in names}, may_be_infinite))
        for box in files[-1].boxes:
            entries[box.name]["boxes"].append(
                {"offset": list(box.offset), "shape": list(box.values.shape), "file": file}
            )
    return tuple(files), entries


def _make_entries(boxes: Mapping[str, tuple[Tensor, Box]]) -> dict[str, dict[str, Any]]:
    """Return the entries of the index without boxes; raise ValueError if one is not valid."""
    entries: dict[str, dict[str, Any]] = {
        name: {"dtype": get_dtype_name(tensor.dtype), "shape": list(tensor.shape), "boxes": []}
        for name, (tensor, _) in boxes.items()
    }
    for name, entry in entries.items():
        problem = find_description_problem(name, entry)
        if problem is not None:
            raise ValueError(f"save_checkpoint: {problem}")
    return entries


def _allocate_file(
    file: str,
    boxes: Mapping[str, tuple[Tensor, Box]],
    may_be_infinite: Collection[str],
) -> TensorFile:
    """Allocate the memory of one file, with a view of it for each box."""
    locals_ = [box.local for _, box in boxes.values()]
    # empty, not zeros: every byte is overwritten.
    data = np.empty(sum(local.nbytes for local in locals_), np.uint8)
    if any(local.is_cuda for local in locals_):  # else each of thousands of copies would wait
        _pin(data)
    parts = torch.from_numpy(data).split([local.nbytes for local in locals_])
    saved = []
    for (name, (tensor, box)), part in zip(boxes.items(), parts, strict=True):
        values = part.view(tensor.dtype).view(box.local.shape)
        # A component may hold any number: the smallest value so far starts at infinity.
        limit = None
        if not name.startswith(TENSORS):
            limit = _find_limit(tensor.dtype, may_be_infinite=name in may_be_infinite)
        saved.append(SavedBox(name, tuple(tensor.shape), box.offset, values, limit))
    stored = {
        b.name: Stored(get_dtype_name(b.values.dtype), tuple(b.values.shape), ()) for b in saved
    }
    return TensorFile(file, make_safetensors_header(stored), data, tuple(saved))


def _find_limit(dtype: torch.dtype, *, may_be_infinite: bool) -> int | None:
    """Return the bits of infinity, or of the smallest NaN if infinity is allowed."""
    if not dtype.is_floating_point:
        return None
    # In IEEE formats the bits after those of the largest number are infinity, then come the NaNs.
    largest = torch.tensor(torch.finfo(dtype).max, dtype=dtype)
    bits = int(largest.view(INTEGERS[largest.element_size()])) + 1
    return bits + (may_be_infinite and dtype != torch.float8_e4m3fn)  # which has no infinity


def _pin(data: np.ndarray[Any, Any]) -> None:
    """Pin an array until it is deleted."""
    # `pin_memory=True` would round the allocation up to a power of two.
    runtime: Any = torch.cuda.cudart()
    torch.cuda.check_error(runtime.cudaHostRegister(data.ctypes.data, data.nbytes, 0))
    # CUDA must release the memory before numpy frees it.
    weakref.finalize(data, runtime.cudaHostUnregister, data.ctypes.data)
