"""Activation offload: what waits for backward lies in host memory, and is fetched ahead."""

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
from trainkit.parallel.grad_reduction import find_reducers, get_local
from trainkit.parallel.parameters import find_blocks
from trainkit.parallel.transforms import Transform
from trainkit.types import ConfigError, ParallelState

Start = Callable[[], Callable[[], Tensor]]
Store = Callable[[Tensor], Start]
"""`store(x)`, uint8 `[N]` on the device, begins to copy it elsewhere and returns `start`;
`ready = start()` begins to bring it back, and `ready()` is there for what runs next."""


def copy_to_host(x: Tensor) -> Start:
    """Copy bytes to host memory and back: the `Store` of `offload_activations` by default.

    There memory is pinned, and copies are on a stream of their own. Elsewhere they are plain ones.

    Examples:
        >>> copy_to_host(torch.ones(2, dtype=torch.uint8))()()
        tensor([1, 1], dtype=torch.uint8)
    """
    device = x.device
    if device.type != "cuda":
        there = x.to("cpu", copy=True)
        return lambda: partial(there.to, device)
    side = _side_stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    with torch.cuda.stream(side):
        host.copy_(x, non_blocking=True)
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


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def offload_activations(
    *, budget: int, smallest: int = 2**16, blocks: str = "layers.*", store: Store = copy_to_host
) -> Transform:
    """Return the transform that keeps activations of the blocks in host memory until backward.

    Beyond `budget` bytes on the device, those that were saved first go, since backward asks for
    them last. While it uses some, the next ones are fetched ahead, as far as the budget has room:
    it should hold what two blocks save. All microbatches that are under way share it.

    What is saved more than once, or as several views of one memory, is kept once, whole.
    Parameters stay, and so do the results that `recompute` keeps by name or by cost, which it holds
    itself: with `recompute("full")` the inputs of blocks go. Numbers are the same, bit for bit.

    Args:
        budget: Bytes of saved tensors that may be on the device. One that is in use there is there
            whatever the budget is.
        smallest: Bytes below which a tensor's memory stays.
        blocks: The name pattern of the blocks.
        store: Where to and how; see `Store`.

    Returns:
        A transform for `build_stages`. It replaces `forward` on each block and renames nothing.

    Raises:
        ConfigError: `budget` or `smallest` is below 0.
        ValueError: When applied: `blocks` matches nothing.
        RuntimeError: In backward: a tensor that was saved has been changed in place.

    References:
        Rhu et al., "vDNN" (2016); Ren et al., "ZeRO-Offload" (2021).

    Examples:
        >>> offload_activations(budget=2**30).kind
        'offload'
    """
    for name, value in (("budget", budget), ("smallest", smallest)):
        if not 0 <= value < math.inf:
            raise ConfigError(f"offload: {name} is in bytes, at least 0, got {value}", where=name)

    def apply(module: nn.Module, ps: ParallelState) -> nn.Module:
        del ps
        units = find_blocks(module, blocks, needed_by="offload")
        for unit in units:
            wrap_forward_(unit, partial(_offloading, shelf=shelf, first=unit is units[0]))
        return module

    shelf = _Shelf(budget, smallest, store)  # of all stages of this rank
    return Transform(apply, kind="offload")


def _offloading(forward: Forward, *, shelf: _Shelf, first: bool) -> Forward:
    # Compiled are the frames inside: what they save is packed when they run.
    @torch.compiler.disable(recursive=False)
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if first:
            shelf.begin()
        shelf.enter(self)
        with torch.autograd.graph.saved_tensors_hooks(shelf.pack, shelf.unpack):
            return forward(self, *args, **kwargs)

    return call


def _key(x: Tensor) -> int:
    return x.untyped_storage()._cdata  # noqa: SLF001 (no public way)


class _Pass:
    """What one forward pass has saved, in order, and which of it is the next to be fetched."""

    def __init__(self) -> None:
        self.entries: list[weakref.ref[_Entry]] = []
        self.next: int | None = None


class _Entry:
    """The memory of a saved tensor: on the device, on its way there, or elsewhere."""

    def __init__(self, shelf: _Shelf, x: Tensor) -> None:
        self.shelf, self.within, self.index = shelf, shelf.current, len(shelf.current.entries)
        self.size = x.untyped_storage().nbytes()
        self.origin = StorageWeakRef(x.untyped_storage())
        self.here: Tensor | None = x.detach()
        self.version, self.changed = x._version, False  # noqa: SLF001 (which autograd compares)
        self.start: Start | None = None
        self.ready: Callable[[], Tensor] | None = None

    def leave(self) -> None:
        """Give up the device's memory; what has been fetched before is elsewhere already."""
        if self.start is None:
            self.check()
            assert self.here is not None
            flat = torch.empty(0, dtype=torch.uint8, device=self.here.device)
            self.start = self.shelf.store(flat.set_(self.here.untyped_storage()))
        self.here = self.ready = None

    def fetch(self) -> None:
        assert self.start is not None
        self.ready = self.start()

    def arrive(self) -> Tensor:
        if self.here is None:
            assert self.ready is not None
            self.here, self.ready = self.ready(), None
        self.check()
        if self.changed:
            raise RuntimeError(
                "offload: a tensor that was saved for backward has been changed in place since; "
                "autograd would refuse that too. Change a copy of it"
            )
        return self.here

    def check(self) -> None:
        if self.start is None and self.here is not None:  # it is the model's own memory
            self.changed |= self.here._version != self.version  # noqa: SLF001

    def __del__(self) -> None:
        self.shelf.forget(id(self))


class _Shelf:
    """The memory of saved tensors on a rank, and what of it is on the device."""

    def __init__(self, budget: int, smallest: int, store: Store) -> None:
        self.budget, self.smallest, self.store = budget, smallest, store
        self.unit, self.weights = nn.Module(), set[int]()
        self.gathers: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()
        self.held = 0
        # By identity, oldest first; weak, so that a graph that is dropped takes all of it along.
        self.here: dict[int, tuple[weakref.ref[_Entry], int]] = {}
        self.known: weakref.WeakValueDictionary[int, _Entry] = weakref.WeakValueDictionary()
        self.begin()

    def begin(self) -> None:
        self.current = _Pass()

    def enter(self, unit: nn.Module) -> None:
        """Note a block whose forward pass begins, and its weights' memory."""
        self.unit = unit
        if unit not in self.gathers:  # FSDP stands later in the plan
            inner = (module for _, module in find_reducers(unit).fsdp)
            self.gathers[unit] = any(module is not unit for module in inner)
        self.weights = {_key(get_local(p)) for p in (*unit.parameters(), *unit.buffers())}

    def pack(self, x: Tensor) -> Any:
        plain = type(x) in (Tensor, nn.Parameter) and x.layout == torch.strided
        key = _key(x) if plain and not (x.is_conj() or x.is_neg()) else None
        if key is None or key in self.weights or x.untyped_storage().nbytes() < self.smallest:
            return x if x.is_leaf else x.detach()  # an output itself would hold its own node
        entry = self.known.get(key)
        if entry is None or entry.origin.expired() or entry.version != x._version:  # noqa: SLF001
            # Experts may be an FSDP unit of their own, gathered since the block began: FSDP frees
            # their memory and fills it again for backward.
            if self.gathers[self.unit]:
                self.enter(self.unit)
                if key in self.weights:
                    return x if x.is_leaf else x.detach()
            entry = self.known[key] = _Entry(self, x)
            self.current.entries.append(weakref.ref(entry))
            self.count(entry)
            self.make_room(0)
        return entry, x.dtype, x.storage_offset(), x.size(), x.stride()

    def unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        entry, dtype, *place = packed
        if entry.here is None and entry.ready is None:
            self.make_room(entry.size)
            self.bring(entry)
        flat = entry.arrive()
        self.fetch_ahead(entry)
        return torch.empty(0, dtype=dtype, device=flat.device).set_(flat.untyped_storage(), *place)

    def fetch_ahead(self, entry: _Entry) -> None:
        """Fetch what was saved before an entry, last first, as long as it fits."""
        passed = entry.within
        at = entry.index - 1 if passed.next is None else min(passed.next, entry.index - 1)
        while at >= 0:
            other = passed.entries[at]()
            if other is not None and other.here is None and other.ready is None:
                if self.held + other.size > self.budget:
                    break
                self.bring(other)
            at -= 1
        passed.next = at

    def make_room(self, size: int) -> None:
        while self.here and self.held + size > self.budget:
            entry = self.forget(next(iter(self.here)))
            if entry is not None:
                entry.leave()

    def bring(self, entry: _Entry) -> None:
        entry.fetch()
        self.count(entry)

    def count(self, entry: _Entry) -> None:
        self.here[id(entry)] = weakref.ref(entry), entry.size
        self.held += entry.size

    def forget(self, number: int) -> _Entry | None:
        reference, size = self.here.pop(number, (None, 0))
        self.held -= size
        return None if reference is None else reference()
