"""What one step of a small decoder really holds and sends, for the tests of the planner."""

import gc
import weakref
from contextlib import nullcontext
from functools import partial

import attrs
import numpy as np
import pytest
import torch
from operators import OperatorMode
from torch.utils._pytree import tree_iter

import trainkit as tk
from trainkit.batch.shards import shard_sequence
from trainkit.grads import make_step_in_backward
from trainkit.losses import add_router_losses, next_token, next_token_linear
from trainkit.mesh import solo_parallel
from trainkit.models import Decoder, call_model, call_routed, init_weights
from trainkit.optim import make_optimizer
from trainkit.parallel import (
    expert_parallel,
    fsdp,
    mixed_precision,
    offload_activations,
    recompute,
    recompute_budget,
)
from trainkit.parallel.precision import DTYPES
from trainkit.parallel.sequence_parallel import sequence_parallel
from trainkit.parallel.tensor_parallel import tensor_parallel
from trainkit.post.adapters import apply_freeze_
from trainkit.tools.testing.ledger import count_collectives
from trainkit.types import Batch, Layout, Precision, Spans


def make_batch(config, rows, length, documents):
    """Return a batch of random tokens, whose rows hold documents of equal lengths."""
    tokens = torch.arange(rows * length).view(rows, length)
    ids = tokens * 7919 % config.vocab_size
    lengths = np.full(rows * documents, length // documents)
    ends = torch.tensor(np.concatenate([[0], np.cumsum(lengths)]), dtype=torch.int32)
    position = torch.arange(length).expand(rows, length) % (length // documents)
    return Batch(
        input_ids=ids,
        labels=(ids + 1) % config.vocab_size,
        position_ids=position.contiguous(),
        document_ids=tokens % length // (length // documents),
        token_index=tokens,
        spans=Spans(ends, lengths, int(lengths.max())),
    )


class StorageCount(OperatorMode):
    """Counts the bytes of every storage that an operator gives, while it lives."""

    def __init__(self):
        super().__init__(self.watch)
        self.sizes, self.now, self.peak = {}, 0, 0
        gc.collect()
        gc.freeze()  # the collections at every new peak need not walk what was there before

    def watch(self, _, result):
        for tensor_ in tree_iter(result):
            if isinstance(tensor_, torch.Tensor):
                self.see(tensor_)

    def see(self, seen):
        local = getattr(seen, "_local_tensor", seen)
        storage = getattr(local, "elem", local).untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self.sizes:
            self.sizes[key] = size
            self.now += size
            if self.now > self.peak:
                gc.collect()  # what only cycles hold would be counted or not as the collector comes
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self.drop, key)

    def drop(self, key):
        self.now -= self.sizes.pop(key)


@attrs.frozen
class Measured:
    """Bytes of one rank: parameters, gradients, optimizer state and the peak; and its ledger."""

    parameters: int
    gradients: int
    optimizer: int
    peak: int
    ledger: object = None
    moved: int = 0  # activations that went to the host


class Host:
    """Copies memory to where no tensor is, as `offload_activations` asks for; notes how much."""

    def __init__(self):
        self.size = 0

    def __call__(self, x):
        kept = bytes(memoryview(x.numpy()))
        self.size += len(kept)
        return lambda: lambda: torch.frombuffer(bytearray(kept), dtype=torch.uint8).clone()


HOST = Host()


def step_of(job, layout, ps, *, in_backward=False):
    """Return a model, its optimizer, and the two halves of a step in a job's way of computing.

    With `in_backward` the first is all of it.
    """
    plain = job.precision == Precision(compute="fp32")
    low = mixed_precision(
        None if plain else DTYPES[job.precision.compute], storage=DTYPES[job.precision.storage]
    )
    head = "hidden" if job.loss == "linear" else "logits"
    budget = job.offload_activations
    away = [] if budget is None else [offload_activations(budget=budget, store=HOST)]
    rest = (
        sequence_parallel(),
        expert_parallel(),
        low,
        recompute(job.recompute),
        *away,
        fsdp(layout),
    )
    plan = [*job.plan_prefix, tensor_parallel(), *rest]
    stages = tk.build_stages(
        lambda: Decoder(job.config, head=head),
        ps,
        plan,
        weights=init_weights(job.config, seed=0),
        schedule=layout.schedule,
    )
    if job.frozen:
        apply_freeze_(stages, job.frozen)
    params = tk.get_parameters(stages)
    optimizer = make_optimizer(
        stages,
        lr=1e-3,
        optimizer=job.optimizer,
        options=dict(job.optimizer_options),
        offload=job.offload_optimizer,
        mean=0.9 if job.mean else None,
        axis=ps.pp,
    )
    rows = job.rows // ps.dp.count
    whole = make_batch(job.config, job.microbatch, job.row_length, job.documents)
    batch = shard_sequence(whole, ring=ps.ring.share, ulysses=ps.ulysses.share)
    microbatches = [batch] * (rows // job.microbatch)
    loss, enter = next_token_linear if head == "hidden" else next_token, call_model
    denominator = torch.tensor(1)
    if job.config.experts is not None:
        loss, enter = add_router_losses(loss, balance=0.01), call_routed
        denominator = dict.fromkeys(("loss", "balance"), denominator)

    if in_backward:
        stepping = make_step_in_backward(
            stages, optimizer, axis=ps.pp, sp=ps.sp_unfolded, log=str, reduce=layout.reduce
        )

    def backward(before_forward=lambda: None):
        def call(model, batch):
            before_forward()
            return enter(model, batch)

        run = tk.make_forward_backward(stages, loss, call=call, reduce=layout.reduce)
        with stepping(lr=1e-3, microbatches=len(microbatches)) if in_backward else nullcontext():
            run(microbatches, denominator=denominator)

    if job.recompute.startswith("0"):  # blocks choose in their first pass, and never again
        backward()
        for p in params:
            p.grad = None

    def finish():
        tk.clip_and_step(params, optimizer, lr=1e-3, max_norm=1.0, axis=ps.pp)

    return stages, optimizer, backward, finish


def local_bytes(tensors):
    return sum(getattr(x, "_local_tensor", x).nbytes for x in tensors)


def tracker_of(*tracked):
    """Return torch's MemTracker of these, which leaves out the peaks of every single module.

    They are of no interest here, and walking through all modules takes it a third of its time.
    """
    from torch.distributed._tools.mem_tracker import MemTracker

    class Tracker(MemTracker):
        def _update_peak_stats(self, peak_state):
            modules, self.memory_tracking = self.memory_tracking, {}
            super()._update_peak_stats(peak_state)
            self.memory_tracking = modules

    tracker = Tracker()
    tracker.track_external(*tracked)
    return tracker


def measure(job, layout=Layout(), ps=None):  # noqa: B008 (frozen)
    """Return what a step holds at most, by torch's MemTracker or, if need be, by StorageCount."""
    ps = solo_parallel() if ps is None else ps
    stages, optimizer, backward, finish = step_of(job, layout, ps)
    params, state = tk.get_parameters(stages), first_state(optimizer, finish)
    every = [*tk.get_named_parameters(stages).values()]
    own = local_bytes(every), local_bytes(state)
    if ps.pp.count > 1 or len(params) < len(every):
        counter = StorageCount()  # MemTracker takes one microbatch at a time, and nothing frozen
        for x in (*every, *state):
            counter.see(x.detach())
        with counter:
            ledger = count_collectives(backward, ps)
            gradients = local_bytes(p.grad for p in params)
            finish()
        return Measured(own[0], gradients, own[1], counter.peak, ledger)
    tracker = tracker_of(*stages, optimizer)
    with tracker:
        ledger = count_collectives(partial(backward, tracker.reset_mod_stats), ps)
        gradients = local_bytes(p.grad for p in params)
        finish()
    (snapshot,) = tracker.get_tracker_snapshot("peak").values()
    return Measured(own[0], gradients, own[1], snapshot["Total"], ledger)


def first_state(optimizer, finish):
    """Let an optimizer make its state, of gradients that are zero; return its tensors."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.zeros_like(p, dtype=p.grad_dtype)
    finish()
    return [x for of in optimizer.state.values() for x in of.values() if torch.is_tensor(x)]


def measure_all(jobs):
    """Return what a rank of the default group measures, for each (layout, job)."""
    found = []
    for layout, job in jobs:
        with tk.parallel_session(layout) as ps:
            found.append(measure(job, layout, ps))
    return found


def results_made(job, layout, ps):
    """Return (group, number, inner width, bytes) of what blocks could keep, for each block."""
    found = []

    def note(results, room):
        found.append(
            [(x.group, x.number, x.group == "products" and x.inner, x.size) for x in results]
        )
        return cost_fitting(results, room)

    cost_fitting = recompute_budget.choose_fitting
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recompute_budget, "choose_fitting", note)
        step_of(attrs.evolve(job, recompute="0.4"), layout, ps)
    return found


class DeviceCount(StorageCount):
    """Counts storages, and says afterwards what their peak was without some of them."""

    def __init__(self, elsewhere):
        super().__init__()
        self.elsewhere, self.events = {key_of(x) for x in elsewhere}, []

    def see(self, seen):
        key = key_of(seen)
        if key not in self.elsewhere and key not in self.sizes:
            super().see(seen)
            self.events.append((key, self.sizes[key]))

    def drop(self, key):
        self.events.append((key, -self.sizes[key]))
        super().drop(key)

    def resize(self, storage, size):
        """FSDP frees gathered parameters so, by no operator."""
        grown = size - storage.nbytes()
        if storage._cdata in self.sizes:
            self.events.append((storage._cdata, grown))
            self.sizes[storage._cdata] += grown
            self.now += grown
            self.peak = max(self.peak, self.now)
        return RESIZE(storage, size)

    def peak_without(self, tensors):
        last = {key: i for i, (key, _) in enumerate(self.events)}
        skipped = {last[key] for key in map(key_of, tensors)}
        now = peak = 0
        for i, (_, size) in enumerate(self.events):
            now += 0 if i in skipped else size
            peak = max(peak, now)
        return peak


RESIZE = torch.UntypedStorage.resize_


def key_of(x):
    local = getattr(x.detach(), "_local_tensor", x)
    return getattr(local, "elem", local).untyped_storage()._cdata


def measure_choices(job, layout, ps, **how):
    """Return what a whole step holds on the device, with `sync_sp_grads` and the choices of fsdp.

    On a CPU "host" and "device" are one memory, so what the host would hold is told by name.
    """
    stages, optimizer, backward, finish = step_of(job, layout, ps, **how)
    params, state = tk.get_parameters(stages), first_state(optimizer, finish)
    HOST.size = 0

    def reduced():
        backward()
        tk.sync_sp_grads(params, ps.sp_unfolded)

    elsewhere = [*params, *state] if layout.cpu_offload else []
    counter = DeviceCount(state if job.offload_optimizer else elsewhere)
    for x in (*params, *state):
        counter.see(x)

    def resize(storage, size):
        return counter.resize(storage, size)

    with counter, pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.UntypedStorage, "resize_", resize)
        ledger = count_collectives(reduced, ps)
        held = [p.grad for p in params if p.grad is not None]
        gradients = local_bytes(held)
        peak = counter.peak_without(held if layout.cpu_offload else [])
        held.clear()
        finish()
    peak = peak if layout.cpu_offload else counter.peak
    own = local_bytes(params), gradients, local_bytes(state)
    return Measured(*own, peak, ledger, HOST.size)


def measure_all_choices(jobs):
    found = []
    for layout, job in jobs:
        with tk.parallel_session(layout) as ps:
            found.append(measure_choices(job, layout, ps))
    return found
