import gc

import attrs
import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import trainkit as tk
from tests.measured_step import StorageCount
from trainkit.batch import make_padding_batch
from trainkit.losses import add_router_losses, next_token
from trainkit.models import Decoder, DecoderConfig, Experts, call_routed, init_weights
from trainkit.parallel import (
    compile_blocks,
    expert_parallel,
    fsdp,
    offload_activations,
    recompute,
    tensor_parallel,
)
from trainkit.parallel.grad_reduction import get_local
from trainkit.parallel.sequence_parallel import sequence_parallel
from trainkit.tools.testing import run_ranks

CONFIG = DecoderConfig(vocab_size=32, width=32, layers=4, heads=4, kv_heads=2, mlp_width=48)


class Elsewhere:
    """A `Store` whose memory no torch tensor holds, and what became of each thing stored."""

    def __init__(self):
        self.sizes, self.log, self.alive = [], [], 0

    def __call__(self, x):
        number, there = len(self.sizes), Kept(x.numpy().copy(), self)
        self.sizes.append(x.numel())
        self.log.append(("store", number))

        def start():
            self.log.append(("fetch", number))
            return lambda: torch.from_numpy(there.bytes.copy())

        return start


class Kept:
    """Bytes, counted while they live."""

    def __init__(self, values, store):
        self.bytes, self.store = values, store
        store.alive += 1

    def __del__(self):
        self.store.alive -= 1


def built(plan, ps=None, schedule="1f1b", config=CONFIG):
    return tk.build_stages(
        lambda: Decoder(config),
        ps or tk.solo_parallel(),
        plan,
        weights=init_weights(config, seed=0),
        schedule=schedule,
    )


def gradients(model, passes=2):
    batch = make_padding_batch(2, 16)
    outputs = [tk.call_model(model, batch) for _ in range(passes)]
    for output in outputs:
        output.square().sum().backward()
    found = [p.grad for p in model.parameters()]
    model.zero_grad()
    return found


def same(these, those):
    return all(map(torch.equal, these, those))


def saved_bytes(plan):
    """Return the bytes that torch's memory holds for backward, parameters left out."""
    (model,) = built(plan)
    batch = make_padding_batch(2, 16)
    gc.collect()
    counter = StorageCount()
    for x in (*model.parameters(), batch.input_ids):
        counter.see(x.detach())
    before = counter.now
    with counter:
        output = tk.call_model(model, batch)
    gc.collect()
    return counter.now - before, output


def test_no_more_than_the_budget_is_held_and_what_goes_went_first():
    whole, budget = saved_bytes([])[0], 100_000
    store = Elsewhere()
    held, output = saved_bytes([offload_activations(budget=budget, smallest=0, store=store)])
    outside, _ = saved_bytes([offload_activations(budget=10**9, smallest=0)])
    assert whole == outside
    assert whole - held == sum(store.sizes)
    none = saved_bytes([offload_activations(budget=0, smallest=0, store=Elsewhere())])[0]
    assert held - none <= budget < held - none + max(store.sizes)
    del output


@pytest.mark.parametrize(
    ("mode", "budget"),
    [("none", 20_000), ("none", 10**9), ("full", 0), ("selective", 5_000), ("0.4", 0)],
)
def test_gradients_are_the_same_bit_for_bit_and_nothing_is_left(mode, budget):
    store, plan = Elsewhere(), [recompute(mode, preserve_rng_state=False)]
    want = gradients(*built(plan))
    (model,) = built([*plan, offload_activations(budget=budget, smallest=0, store=store)])
    assert same(gradients(model), want)
    assert bool(store.sizes) == (budget < 10**9)
    assert store.alive == 0


def test_backward_fetches_ahead_what_it_asks_for_next():
    """In the reverse order of saving, and before it asks, as far as the budget has room."""
    blocks = nn.ModuleDict({"layers": nn.Sequential(*(Square() for _ in range(8)))})
    store = Elsewhere()
    requests = []
    offload_activations(budget=3 * 1024, smallest=0, store=store)(blocks, tk.solo_parallel())
    x = torch.full((256,), 1.01, requires_grad=True)
    y = blocks["layers"](x)
    for number, block in enumerate(blocks["layers"]):
        block.node.register_prehook(
            lambda _, number=number: requests.append((number, len(store.log)))
        )
    assert store.log == [("store", number) for number in range(5)]
    y.sum().backward()
    assert store.log[5:] == [("fetch", number) for number in (4, 3, 2, 1, 0)]
    fetched_by = {number: len(store.log[:at]) - 5 for number, at in requests}
    assert [number for number, _ in requests] == [*range(7, -1, -1)]
    # Before the node of block 4 runs, 4 is here already; 3 and 2 come while it is at work.
    assert all(fetched_by[number] >= 5 - number for number in range(5))


class Square(nn.Module):
    """x -> x * x, which saves x."""

    def forward(self, x):
        y = x.square()
        self.node = y.grad_fn
        return y


class Views(nn.Module):
    """Three views of one memory, each saved by two products."""

    def forward(self, x):
        a, b, c = (x * 1).view(3, -1).unbind()
        return (a * b + b * c + c * a).sum()


def test_views_of_one_memory_are_stored_once():
    for budget in (0, 10**6):
        model, store = nn.ModuleDict({"layers": nn.ModuleDict({"0": Views()})}), Elsewhere()
        offload_activations(budget=budget, smallest=0, store=store)(model, tk.solo_parallel())
        x = torch.arange(12.0, requires_grad=True)
        y = model["layers"]["0"](x)
        assert store.sizes == ([48] if budget == 0 else [])
        y.backward()
        assert x.grad.tolist() == [12, 14, 16, 18, 8, 10, 12, 14, 4, 6, 8, 10]


class Changed(nn.Module):
    """What is saved is changed afterwards."""

    def forward(self, x):
        y = x * 1
        z = y.square()
        y.add_(1)
        return z.sum()


def test_what_is_changed_in_place_is_refused_as_autograd_does():
    for budget in (0, 10**6):
        model = nn.ModuleDict({"layers": nn.ModuleDict({"0": Changed()})})
        offload_activations(budget=budget, smallest=0)(model, tk.solo_parallel())
        y = model["layers"]["0"](torch.ones(3, requires_grad=True))
        if budget:
            with pytest.raises(RuntimeError, match="changed in place"):
                y.backward()
        else:  # what went to the host before is as it was
            y.backward()


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_step_that_breaks_off_leaves_nothing(where):
    store = Elsewhere()
    (model,) = built([offload_activations(budget=20_000, smallest=0, store=store)])
    want = gradients(*built([]))
    batch = make_padding_batch(2, 16)

    def broken(*_):
        raise ZeroDivisionError

    last = model.layers["3"] if where == "forward" else nn.Module()
    hook = last.register_forward_pre_hook(broken)

    def step():
        output = tk.call_model(model, batch)
        block = output.grad_fn.next_functions[0][0]
        block.register_prehook(broken)
        output.sum().backward()

    with pytest.raises(ZeroDivisionError):
        step()
    hook.remove()
    gc.collect()
    assert store.sizes
    assert store.alive == 0
    model.zero_grad()
    assert same(gradients(model), want)
    assert store.alive == 0


def test_small_ones_and_parameters_stay():
    store = Elsewhere()
    (model,) = built([offload_activations(budget=0, smallest=10**9, store=store)])
    gradients(model)
    assert not store.sizes
    (model,) = built([offload_activations(budget=0, smallest=0, store=store)])
    batch = make_padding_batch(2, 7)  # no activation is as large as a weight
    requests = []
    model.layers["0"].buffers = lambda: requests.append(None) or iter(())
    tk.call_model(model, batch)
    assert store.sizes
    assert len(requests) == 1  # what its weights are, and not for each saved tensor
    assert not {p.nbytes for p in model.layers.parameters() if p.ndim > 1} & {*store.sizes}


class Exp(nn.Module):
    """exp(x), which saves its own result."""

    def forward(self, x):
        return x.exp()


@pytest.mark.parametrize("smallest", [0, 10**9])
def test_a_saved_result_goes_with_its_graph(smallest):
    model = nn.ModuleDict({"layers": nn.Sequential(Exp())})
    offload_activations(budget=10**6, smallest=smallest)(model, tk.solo_parallel())
    y = model["layers"](torch.ones(4, requires_grad=True))
    memory = StorageWeakRef(y.untyped_storage())
    del y
    assert memory.expired()


def test_what_is_below_0_is_refused():
    with pytest.raises(tk.types.ConfigError, match="budget is in bytes, at least 0, got -1"):
        offload_activations(budget=-1)


def in_layout(layout, plan, *, microbatches=4):
    """Return the gradients of a step of this rank, without and with offload, and what went."""
    found, store = [], Elsewhere()
    with tk.parallel_session(layout) as ps:
        for more in ([], [offload_activations(budget=5_000, smallest=0, store=store)]):
            stages = built(
                [tensor_parallel(), sequence_parallel(), *plan, *more, fsdp(layout)],
                ps=ps,
                schedule=layout.schedule,
            )
            batch = make_padding_batch(2, 16)
            batch = attrs.evolve(batch, labels=batch.input_ids)
            run = tk.make_forward_backward(stages, next_token, reduce=layout.reduce)
            run([batch] * microbatches, denominator=torch.tensor(7))
            found.append([get_local(p.grad) for stage in stages for p in stage.parameters()])
    return same(*found), len(store.sizes), store.alive


LAYOUTS = {
    "fsdp": (tk.Layout(dp_shard=2, reduce="each"), []),
    "tp, by cost": (tk.Layout(tp=2), [recompute("0.5")]),
    "pp": (tk.Layout(pp=2), []),
    "pp, full": (tk.Layout(pp=2), [recompute("full")]),
    "pp, zero bubble": (tk.Layout(pp=2, schedule="interleaved_zero_bubble"), []),
}


def in_layouts():
    return [in_layout(layout, plan) for layout, plan in LAYOUTS.values()]


def test_in_every_layout_gradients_are_the_same_bit_for_bit():
    for found in run_ranks(in_layouts, 2):
        for name, (equal, stored, alive) in zip(LAYOUTS, found, strict=True):
            assert equal, name
            assert stored, name
            assert alive == 0, name


EXPERTS = attrs.evolve(CONFIG, experts=Experts(count=4, top_k=2, width=16))


def with_experts():
    """Return the gradients of this rank in ep, without offload and by budgets."""
    found, batch = [], tk.batch.make_padding_batch(2, 16)
    batch.labels[:] = 3
    with tk.parallel_session(ep=2) as ps:
        for budget in (None, 0, 24_000):
            store = Elsewhere()
            more = (
                []
                if budget is None
                else [offload_activations(budget=budget, smallest=0, store=store)]
            )
            stages = built([expert_parallel(), *more, fsdp()], ps, config=EXPERTS)
            run = tk.make_forward_backward(stages, add_router_losses(next_token), call=call_routed)
            run([batch] * 2, denominator={"loss": torch.tensor(7)})
            found.append([get_local(p.grad) for p in stages[0].parameters()])
    return found


def test_experts_that_are_gathered_inside_of_a_block_are_no_activations():
    # FSDP cannot free what such a store has seen.
    for want, *others in run_ranks(with_experts, 2):
        for found in others:
            assert same(found, want)


@pytest.mark.only_all
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo's own, which it means to hide
def test_compiled_blocks_are_offloaded_too():
    store = Elsewhere()
    plan = [recompute("selective"), compile_blocks(backend="aot_eager")]
    want = gradients(*built(plan))
    plan.insert(1, offload_activations(budget=0, smallest=0, store=store))
    assert same(gradients(*built(plan)), want)
    assert store.sizes
    assert store.alive == 0
