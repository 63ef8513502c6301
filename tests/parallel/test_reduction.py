"""Ranks whose rows take different ways through a model have the gradient of one process."""

import copy
from itertools import product

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import trainkit as tk
from trainkit.losses import declare_terms
from trainkit.parallel import fsdp, mixed_precision
from trainkit.parallel.stage_ranks import attach_axes
from trainkit.tools.testing import run_ranks

WIDTH = 4


class Block(nn.Module):
    """A unit with two adapters, of which a batch takes one, and a parameter that nobody uses."""

    def __init__(self, widths=(2, 2)):
        super().__init__()
        self.base = nn.Parameter(torch.randn(WIDTH, WIDTH).double(), requires_grad=False)
        self.a = nn.Parameter(torch.randn(WIDTH, widths[0]).double())
        self.b = nn.Parameter(torch.randn(WIDTH, widths[1]).double())
        self.unused = nn.Parameter(torch.randn(3).double())

    def forward(self, x, way):
        y = x @ self.base
        for name in way:
            adapter = getattr(self, name)
            y = y + (x @ adapter) @ adapter.T
        return torch.tanh(y)


class Ways(nn.Module):
    """Blocks of which a batch takes some: `batch["ways"]` has the way through each, None skips."""

    def __init__(self, widths=(2, 2)):
        super().__init__()
        torch.manual_seed(0)
        self.entry = nn.Linear(WIDTH, WIDTH).double()
        self.layers = nn.ModuleList(Block(widths) for _ in range(3))

    def forward(self, x, ways):
        x = self.entry(x)
        for block, way in zip(self.layers, ways, strict=True):
            x = x if way is None else block(x, way)
        return x


class Stage(Ways):
    """The same blocks as a pipeline stage; each stage has its own ways in the batch."""

    def __init__(self, index):
        super().__init__()
        self.index = index
        for p in self.parameters():
            p.data += index / 8

    def forward(self, x, ways):
        return super().forward(x, ways[self.index])

    def boundary(self, batch):
        return batch["input_ids"].to("meta")


@declare_terms("loss")
def loss(y, batch):
    total = (y * batch["weight"]).sum()
    return total, {"loss": total.detach()}


def call(model, batch):
    return model(batch["input_ids"], batch["ways"])


def batches_of(rank, ways):
    """Return one rank's microbatches, one for each of its ways."""
    made = torch.Generator().manual_seed(rank)
    rows = [torch.randn(2, 2, WIDTH, generator=made).double() for _ in ways]
    return [
        {"input_ids": x, "weight": weight, "ways": way}
        for (x, weight), way in zip(rows, ways, strict=True)
    ]


def alone(model, steps, world):
    """Return the gradients of one process, after steps that add to them."""
    for step, rank in product(steps, range(world)):
        batches = batches_of(rank, step[rank * len(step) // world])
        tk.forward_backward(model, batches, loss, denominator=torch.tensor(7), call=call)
    return gradients(model)


def gradients(model):
    def whole(grad):
        return grad.full_tensor() if hasattr(grad, "full_tensor") else grad

    return {name: whole(p.grad) for name, p in tk.get_named_parameters([model]).items()}


def differing(found, wanted, tolerance=1e-12):
    """Return what differs, by name."""

    def same(a, b):
        if a is None or b is None:
            return a is b
        return (a - b).abs().max() <= tolerance * b.abs().max()

    return [name for name in wanted if not same(found[name], wanted[name])]


A, B, BOTH, NEITHER = ("a",), ("b",), ("a", "b"), ()
SHARDED = {  # the ways of two ranks in some steps, each of some microbatches
    "other adapters": [[[[A] * 3], [[B] * 3]]],
    "one rank has none": [[[[A, BOTH, A]] * 2, [[A, NEITHER, A]] * 2]],
    "the last microbatch lacks a unit": [[[[A, A, A], [A, None, B]]] * 2] * 2,
    "a unit comes late": [[[[A, None, A]]] * 2, [[[A, A, A]], [[A, B, A]]]],
}
IN_THE_END = ("the last microbatch lacks a unit", "other units in the end")
REPLICATED = SHARDED | {
    "other units": [[[[A, None, None]], [[None, A, None]]]],
    "other units in the end": [[[[A] * 3, [A, None, A]], [[B] * 3, [A, A, None]]]] * 2,
}


def wrapped(kind, model, ps):
    if kind == "ddp":
        made = nn.parallel.DistributedDataParallel(model)
        tk.sum_gradients_(made)
        return made
    if kind == "no unit around the others":
        model.entry.requires_grad_(False)
        for block in model.layers:
            fully_shard(block, mesh=ps.mesh["fsdp"])
        tk.sum_gradients_(model)
        return model
    compute = torch.float32 if kind == "fp32" else None
    return fsdp(reduce_dtype=torch.float64)(mixed_precision(compute)(model, ps), ps)


def problems_of(kinds):
    """Return what differs from one process, in every case of some kinds of modules."""
    found = {}
    for kind, layout, widths in kinds:
        with tk.parallel_session(layout) as ps:
            rank, world = ps.world.index, ps.world.count
            cases = REPLICATED if layout.dp_replicate > 1 else SHARDED
            each = [(name, "each") for name in IN_THE_END if kind == "fsdp" and name in cases]
            for name, reduce in [*((name, "last") for name in cases), *each]:
                steps = cases[name]
                model = Ways(widths)
                wanted = alone(copy.deepcopy(model), steps, world)
                model = wrapped(kind, model, ps)
                for step in steps:
                    batches = batches_of(rank, step[rank * len(step) // world])
                    tk.forward_backward(
                        model, batches, loss, denominator=torch.tensor(7), call=call, reduce=reduce
                    )
                wanted |= dict.fromkeys([n for n in wanted if "entry" in n and kind[:2] == "no"])
                tolerance = 1e-5 if kind == "fp32" else 1e-12
                if wrong := differing(gradients(model), wanted, tolerance):
                    found[kind, name, reduce] = wrong
    return found


KINDS_OF_TWO = [
    ("fsdp", tk.Layout(), (1, 3)),
    ("fp32", tk.Layout(), (2, 2)),
    ("no unit around the others", tk.Layout(), (2, 2)),
    ("fsdp", tk.Layout(dp_replicate=2), (1, 3)),
    ("ddp", tk.Layout(dp_replicate=2), (1, 3)),
]


def test_ranks_whose_rows_take_different_ways_have_the_gradient_of_one_process():
    assert run_ranks(problems_of, 2, KINDS_OF_TWO) == [{}, {}]


def problems_of_four():
    return problems_of([("fsdp", tk.Layout(dp_replicate=2), (2, 2))]) | problems_in_a_pipeline()


def problems_in_a_pipeline():
    """Return what differs in a pipeline whose replicas take different ways in the end."""
    first, last = [[A] * 3, [B] * 3], [[A, None, A], [A, BOTH, None]]
    ways = [[first] * 3 + [[w, w[::-1]]] for w in last]  # of each replica
    whole, found = nn.ModuleList([Stage(0), Stage(1)]), {}
    for replica, index in product(range(2), range(4)):
        batch = batches_of(replica, ways[replica])[index]
        y = whole[1](whole[0](batch["input_ids"], batch["ways"]), batch["ways"])
        (loss(y, batch)[0] / 7).backward()
    with tk.parallel_session(pp=2, dp_replicate=2) as ps:
        wanted = gradients(whole[ps.pp.index])
        for reduce in ("last", "each"):
            stage = fsdp()(Stage(ps.pp.index), ps)
            stages = attach_axes([stage], ps)
            run = tk.make_forward_backward(stages, loss, call=call, reduce=reduce)
            run(batches_of(ps.dp.index, ways[ps.dp.index]), denominator=torch.tensor(7))
            if wrong := differing(gradients(stage), wanted):
                found["pipeline", reduce] = wrong
    return found


def test_so_have_hybrids_and_pipelines():
    assert run_ranks(problems_of_four, 4) == [{}] * 4
