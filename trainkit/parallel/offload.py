"""Activation offloading: tensors saved for backward move to host memory, and are prefetched."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from trainkit.models.mixins import Forward, wrap_forward_
from trainkit.parallel.grad_reduction import find_reducers, get_storage_id
from trainkit.parallel.parameters import find_blocks
from trainkit.parallel.transforms import Transform
from trainkit.types import ConfigError, ParallelState

StartCopy = Callable[[], Callable[[], Tensor]]
Store = Callable[[Tensor], StartCopy]
"""`start = store(x)` starts to copy x, uint8 `[N]` on the device, away; `ready = start()` starts
the copy back; `ready()` returns its result, for use by the work that is queued next."""


def copy_to_host(x: Tensor) -> StartCopy:
    """Copy bytes to host memory and back: the default `Store` of `offload_activations`.

    On CUDA the host memory is pinned, and a separate stream copies. On other devices the copies are
    synchronous.

    Examples:
        >>> copy_to_host(torch.ones(2, dtype=torch.uint8))()()
        tensor([1, 1], dtype=torch.uint8)
    """
    device = x.device
    if device.type != "cuda":
        stored = x.to("cpu", copy=True)
        return lambda: partial(stored.to, device)
    side = _get_copy_stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    with torch.cuda.stream(side):
        host.copy_(x, non_blocking=True)
    # The caller drops x at once: the allocator must not reuse it before the copy is done.
    x.record_stream(side)

    def start() -> Callable[[], Tensor]:
        with torch.cuda.stream(side):
            back = host.to(device, non_blocking=True)
            done = side.record_event()

        def ready() -> Tensor:
            now = torch.cuda.current_stream(device)
            now.wait_event(done)
            back.record_stream(now)
            return back

        return ready

    return start


@cache  # one for all stores of a device
def _get_copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def offload_activations(
    *, budget: int, smallest: int = 2**16, blocks: str = "layers.*", store: Store = copy_to_host
) -> Transform:
    """Return the transform that offloads activations of the blocks to host memory until backward.

    When saved tensors exceed `budget` bytes on the device, the oldest are offloaded first, since
    backward needs them last. While backward uses some, the next ones are prefetched as far as the
    budget allows; it should hold what two blocks save. All microbatches in flight share it.

    Storage that is saved several times, or through several views, is offloaded once. Parameters
    stay on the device, and so do the results that `recompute` saves by name or by cost, which it
    holds itself; with `recompute("full")` the inputs of blocks are offloaded. Results are the same,
    bit for bit.

    Args:
        budget: Bytes of saved tensors that may stay on the device. A tensor that is in use is there
            in any case.
        smallest: Bytes below which storage is not offloaded.
        blocks: The name pattern of the blocks.
        store: Copies bytes away and back; see `Store`.

    Returns:
        A transform for `build_stages`. It replaces `forward` on each block and renames nothing.

    Raises:
        ConfigError: `budget` or `smallest` is below 0.
        ValueError: When applied: `blocks` matches nothing.
        RuntimeError: In backward: a saved tensor was changed in place.

    References:
        Rhu et al., "vDNN" (2016); Ren et al., "ZeRO-Offload" (2021).

    Examples:
        >>> offload_activations(budget=2**30).kind
        'offload'
    """
    for name, value in (("budget", budget), ("smallest", smallest)):
        if not 0 <= value < math.inf:
            raise ConfigError(
                f"offload_activations: {name} is in bytes, at least 0, got {value}", where=name
            )

    def apply(module: nn.Module, ps: ParallelState) -> nn.Module:
        del ps
        units = find_blocks(module, blocks, needed_by="offload_activations")
        for unit in units:
            wrap_forward_(unit, partial(offload_saved, is_first=unit is units[0]))
        return module

    saved = _SavedTensors(budget, smallest, store)  # shared by all stages

    def offload_saved(forward: Forward, *, is_first: bool) -> Forward:
        # Only this frame is not compiled: compiled frames inside it pack their tensors as they run.
        @torch.compiler.disable(recursive=False)
        def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if is_first:
                saved.current = _Pass()
            saved.enter(self)
            with torch.autograd.graph.saved_tensors_hooks(saved.pack, saved.unpack):
                return forward(self, *args, **kwargs)

        return call

    return Transform(apply, kind="offload")


class _Pass:
    """The tensors that one forward pass has saved, in order, and the next to prefetch."""

    def __init__(self) -> None:
        self.entries: list[weakref.ref[_Entry]] = []
        self.next: int | None = None


class _Entry:
    """The storage of a saved tensor: on the device, on its way there, or elsewhere."""

    def __init__(self, saved: _SavedTensors, x: Tensor) -> None:
        self.saved = saved
        self.forward_pass = saved.current
        self.index = len(saved.current.entries)
        self.num_bytes = x.untyped_storage().nbytes()
        # It expires with the model's storage, whose identity another storage may then have.
        self.origin = StorageWeakRef(x.untyped_storage())
        self.on_device: Tensor | None = x.detach()
        self.version, self.is_changed = x._version, False  # noqa: SLF001 (which autograd compares)
        self.start: StartCopy | None = None
        self.ready: Callable[[], Tensor] | None = None

    def offload(self) -> None:
        """Free the device memory, after a copy unless one was made before."""
        if self.start is None:
            self.check_version()
            assert self.on_device is not None
            flat = torch.empty(0, dtype=torch.uint8, device=self.on_device.device)
            self.start = self.saved.store(flat.set_(self.on_device.untyped_storage()))
        self.on_device = self.ready = None

    def fetch(self) -> None:
        """Start to copy the storage back."""
        assert self.start is not None
        self.ready = self.start()

    def get(self) -> Tensor:
        """Return the storage on the device as a tensor."""
        if self.on_device is None:
            assert self.ready is not None
            self.on_device, self.ready = self.ready(), None
        self.check_version()
        if self.is_changed:
            raise RuntimeError(
                "offload_activations: a tensor that was saved for backward has been changed in "
                "place since; autograd would refuse that too. Change a copy of it"
            )
        return self.on_device

    def check_version(self) -> None:
        """Note a change in place; only the model's own storage can have one, not a copy."""
        if self.start is None and self.on_device is not None:
            self.is_changed |= self.on_device._version != self.version  # noqa: SLF001

    def __del__(self) -> None:
        self.saved.remove(id(self))


class _SavedTensors:
    """The storages of saved tensors on a rank, of which `budget` bytes may be on the device."""

    def __init__(self, budget: int, smallest: int, store: Store) -> None:
        self.budget, self.smallest, self.store = budget, smallest, store
        self.unit = nn.Module()
        self.weights = set[int]()
        self.has_inner_units: weakref.WeakKeyDictionary[nn.Module, bool] = (
            weakref.WeakKeyDictionary()
        )
        self.num_bytes = 0
        # Entries on the device by identity, oldest first. All references are weak: packed tensors
        # own the entries, so that a graph that is dropped frees them.
        self.on_device: dict[int, tuple[weakref.ref[_Entry], int]] = {}
        self.entries: weakref.WeakValueDictionary[int, _Entry] = weakref.WeakValueDictionary()
        self.current = _Pass()

    def enter(self, unit: nn.Module) -> None:
        """Record the block whose forward pass runs, and the storages of its weights."""
        self.unit = unit
        if unit not in self.has_inner_units:  # at the first call: FSDP comes later in the plan
            inner = (module for _, module in find_reducers(unit).fsdp)
            self.has_inner_units[unit] = any(module is not unit for module in inner)
        tensors = (*unit.parameters(), *unit.buffers())
        self.weights = {get_storage_id(x) for x in tensors}

    def pack(self, x: Tensor) -> Any:
        """Return an entry and the view of it that x is; or x itself if it is not offloaded."""
        # Bytes, offset and strides describe no conjugate views, sparse tensors and subclasses.
        is_plain = type(x) in (Tensor, nn.Parameter) and x.layout == torch.strided
        key = get_storage_id(x) if is_plain and not (x.is_conj() or x.is_neg()) else None
        if key is None or key in self.weights or x.untyped_storage().nbytes() < self.smallest:
            return x if x.is_leaf else x.detach()  # an output would keep its own node alive
        entry = self.entries.get(key)
        if entry is None or entry.origin.expired() or entry.version != x._version:  # noqa: SLF001
            # Experts may be an FSDP unit of their own, gathered since the block started. FSDP frees
            # their storage, and fills it again for backward.
            if self.has_inner_units[self.unit]:
                self.enter(self.unit)
                if key in self.weights:
                    return x if x.is_leaf else x.detach()
            entry = self.entries[key] = _Entry(self, x)
            self.current.entries.append(weakref.ref(entry))
            self.add(entry)
            self.make_room(0)
        return entry, x.dtype, x.storage_offset(), x.size(), x.stride()

    def unpack(self, packed: Any) -> Tensor:
        """Return a packed tensor, and prefetch those that backward needs next."""
        if isinstance(packed, Tensor):
            return packed
        entry, dtype, *view = packed
        if entry.on_device is None and entry.ready is None:
            self.make_room(entry.num_bytes)
            self.fetch(entry)
        flat = entry.get()
        self.prefetch(entry)
        return torch.empty(0, dtype=dtype, device=flat.device).set_(flat.untyped_storage(), *view)

    def prefetch(self, entry: _Entry) -> None:
        """Fetch the entries saved before this one, last first, as long as they fit."""
        forward_pass = entry.forward_pass
        index = entry.index - 1
        if forward_pass.next is not None:
            # Entries after `next` have been looked at already.
            index = min(forward_pass.next, index)
        while index >= 0:
            other = forward_pass.entries[index]()
            if other is not None and other.on_device is None and other.ready is None:
                if self.num_bytes + other.num_bytes > self.budget:
                    break
                self.fetch(other)
            index -= 1
        forward_pass.next = index

    def make_room(self, num_bytes: int) -> None:
        """Offload the oldest entries until so many more bytes fit, or none is left."""
        while self.on_device and self.num_bytes + num_bytes > self.budget:
            entry = self.remove(next(iter(self.on_device)))
            if entry is not None:
                entry.offload()

    def fetch(self, entry: _Entry) -> None:
        """Start to copy an entry back; from then on it counts."""
        entry.fetch()
        self.add(entry)

    def add(self, entry: _Entry) -> None:
        """Count an entry as on the device."""
        self.on_device[id(entry)] = weakref.ref(entry), entry.num_bytes
        self.num_bytes += entry.num_bytes

    def remove(self, key: int) -> _Entry | None:
        """Count an entry as no longer on the device, and return it if it still exists."""
        reference, num_bytes = self.on_device.pop(key, (None, 0))
        self.num_bytes -= num_bytes
        return None if reference is None else reference()
