"""No layout changes a bit of a step; and what one layout has saved, another goes on with.

Gradients are given by name and index, so that sums over ranks have no part in it. All optimizers
step in each layout, as one: `SEVERAL` says which steps what.
"""

import functools
import os

import attrs
import pytest
import torch
from every_pair import ONLY_ALL, WITH_ALL
from optim.rows import BF16, ROWS, Row, give_gradients_, rate
from torch import nn

import trainkit as tk
from trainkit.noise.counters import normal
from trainkit.noise.hashing import make_key
from trainkit.optim.table import OPTIMIZERS
from trainkit.parallel import build_stages, fsdp, tensor_parallel
from trainkit.parallel.parameters import get_local_box
from trainkit.tools.testing import run_ranks
from trainkit.types import Layout, TrainState
from trainkit.weights.checkpoint.diff import diff_checkpoints
from trainkit.weights.checkpoint.facts import ResumeRules
from trainkit.weights.checkpoint.replica_check import find_nonfinite_state
from trainkit.weights.checkpoint.run_state import get_run_tensors


class Block(nn.Module):
    """Matrices of which tensor parallelism cuts the columns of one and the rows of the other."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(256, 6, bias=False)
        self.down = nn.Linear(512, 5, bias=False)
        self.experts = nn.Parameter(torch.empty(4, 3, 256))
        self.norm = nn.Parameter(torch.empty(7))

    def forward(self, x):
        return self.down(self.up(x))


class Model(nn.Module):
    """Blocks, with something before and after them that no other stage has."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(3, 256)
        self.layers = nn.ModuleDict({str(i): Block() for i in range(2)})
        self.head = nn.Linear(256, 3)

    def forward(self, x):
        return self.head(self.embedding(x))


def split(model, num_stages):
    """Cut the model into stages."""
    stages = [Model() for _ in range(num_stages)]
    for index, stage in enumerate(stages):
        names = [str(i) for i in range(2) if i * num_stages // 2 == index]
        stage.layers = nn.ModuleDict({name: model.layers[name] for name in names})
        stage.embedding = model.embedding if index == 0 else None
        stage.head = model.head if index == num_stages - 1 else None
    return stages


def several(options="", **rest):
    """Return a row in which every optimizer steps something; with random rounding two of them."""
    patterns = {
        "lion": "layers.*.up.weight",
        "momentum": "layers.1.down.weight",  # no group of the first of two stages has any
        "schedule-free": "**experts",
        "signsgd": "embedding.*",
    }
    groups = [
        f"{pattern} optimizer={name} lr_scale=0.5 {options}"
        for name, pattern in patterns.items()
        # Rounding is the same code for all, of which each compiles a loop for what it keeps.
        if rest.get("dtype") != BF16 or (name == "lion" and "stochastic" in options)
    ]
    return Row(groups=tuple(groups), options=tuple(options.split()), **rest)


SEVERAL = {
    "in fp64": several("", mean=0.5),
    "8 bits": several("moments=8bit cautious=True", mean=0.5, dtype=torch.float32),
    "stochastic": several("moments=bf16 rounding=stochastic", dtype=BF16),
    "Kahan": several("moments=8bit rounding=kahan", dtype=BF16),
}
TO = Row("lion", ("moments=bf16",), dtype=torch.float32)
PLAIN = Layout()
LAYOUTS = {
    "dp2": Layout(dp_shard=2),
    "tp2": Layout(tp=2),
    "pp2": Layout(pp=2),
    "dp2 x tp2": Layout(dp_shard=2, tp=2),
    "replica2 x dp2": Layout(dp_replicate=2, dp_shard=2),
    "pp2 x tp2": Layout(pp=2, tp=2),
}
STEPS = 2
# In fp64 the certificate trains by all of these; two axes at once are in one layout besides.
BESIDE = {"in fp64", "replica2 x dp2", "pp2 x tp2"}


def running(rows):
    """Return those of {name: row} that run here."""
    return {x: row for x, row in rows.items() if x not in BESIDE or os.environ.get(WITH_ALL)}


def marked(rows):
    return [pytest.param(x, marks=ONLY_ALL if x in BESIDE else ()) for x in rows]


def weights(name, shape, offset):
    return normal(make_key(0, name), shape, offset)


def build(row, layout, ps):
    """Return this rank's stages and the optimizer of a row."""
    cut = tensor_parallel(
        {"layers.*": "replicated", "layers.*.up": "column", "layers.*.down": "row"}
    )
    stages = build_stages(
        lambda: Model().to(row.dtype), ps, [cut, fsdp(layout)], weights=weights, split=split
    )
    # So runs go from layouts without offloading to one with it, and back.
    return stages, row.make(stages, axis=ps.pp, offload=layout.tp > 1)


def train(stages, optimizer, ps, *, begin, end):
    named = tk.get_named_parameters(stages)
    for step in range(begin, end):
        give_gradients_(named, step)
        tk.clip_and_step(named.values(), optimizer, lr=rate(step), max_norm=None, axis=ps.pp)
    return TrainState(step=end)


@functools.cache
def whole(row, steps):
    """Return what one process comes to, by name."""
    ps = tk.solo_parallel()
    stages, optimizer = build(row, PLAIN, ps)
    train(stages, optimizer, ps, begin=0, end=steps)
    return get_run_tensors(stages, optimizer)


def farthest(stages, optimizer, row, steps):
    """Return how far the farthest tensor is from one process, its unequal bits, and its name."""
    found = []
    for name, x in get_run_tensors(stages, optimizer).items():
        box, alone = get_local_box(x), whole(row, steps)[name]
        cut = tuple(slice(a, a + n) for a, n in zip(box.offset, box.local.shape, strict=True))
        assert (box.local.dtype, box.shape) == (alone.dtype, tuple(alone.shape)), name
        a, b = box.local.double(), alone[cut].detach().double()
        far = float((a - b).abs().max() / alone.double().abs().max()) if a.numel() else 0.0
        found.append((far, int((a != b).sum()), name))
    return max(found)


def visit(names, came_from, folder):
    """Train and save in each layout, and go on in it with what the one before has saved."""
    found = {}
    for name in names:
        with tk.parallel_session(LAYOUTS[name]) as ps:
            for kind, row in running(SEVERAL).items():
                stages, optimizer = build(row, LAYOUTS[name], ps)
                state = train(stages, optimizer, ps, begin=0, end=STEPS)
                ends = [farthest(stages, optimizer, row, STEPS)]
                assert find_nonfinite_state(stages, optimizer, ps.world) == []
                tk.save_checkpoint(folder / kind / name, state, stages, optimizer, ps)
                written = tk.state_hash(state, stages, optimizer, ps)
                stages, optimizer = build(row, LAYOUTS[name], ps)
                run = folder / kind / came_from
                state = tk.resume(run, TrainState(), stages, optimizer, ps, log=lambda _: None)
                read = tk.state_hash(state, stages, optimizer, ps)
                train(stages, optimizer, ps, begin=STEPS, end=STEPS + 1)
                ends.append(farthest(stages, optimizer, row, STEPS + 1))
                found[name, kind] = ends, written, read
            found[name, "to lion"] = changed(LAYOUTS[name], ps, folder / "8 bits" / came_from)
        came_from = name
    return found


def changed(layout, ps, run):
    """Resume with another optimizer; return the state's hash and the messages about it."""
    stages, optimizer = build(TO, layout, ps)
    messages, rules = [], ResumeRules(allow=("optimizer",))
    state = tk.resume(run, TrainState(), stages, optimizer, ps, log=messages.append, rules=rules)
    train(stages, optimizer, ps, begin=STEPS, end=STEPS + 1)
    of_optimizer = [x for x in messages if x.startswith("the optimizer")]
    return tk.state_hash(state, stages, optimizer, ps), of_optimizer


@pytest.fixture(scope="module")
def visited(tmp_path_factory):
    folder = tmp_path_factory.mktemp("layouts")
    ps, hashes = tk.solo_parallel(), {}
    for kind, row in running(SEVERAL).items():
        stages, optimizer = build(row, PLAIN, ps)
        state = train(stages, optimizer, ps, begin=0, end=STEPS)
        tk.save_checkpoint(folder / kind / "1", state, stages, optimizer, ps)
        hashes[kind] = tk.state_hash(state, stages, optimizer, ps)
    hashes["to lion"] = changed(PLAIN, ps, folder / "8 bits" / "1")
    names, found, before = running(LAYOUTS), {}, "1"
    for world in (2, 4):
        here = [name for name in names if LAYOUTS[name].world == world]
        for rank in run_ranks(visit, world, here, before, folder):
            for key, ends in rank.items():
                found.setdefault(key, []).append(ends)
        before = here[-1]
    return folder, hashes, found


@pytest.mark.parametrize("kind", marked(SEVERAL))
@pytest.mark.parametrize("layout", marked(LAYOUTS))
def test_a_layout_steps_saves_and_goes_on_as_one_process(layout, kind, visited):
    _, hashes, found = visited
    for ends, written, read in found[layout, kind]:
        for far, unequal, name in ends:
            if kind == "in fp64":
                assert far <= 1e-12, name
            else:
                assert unequal == 0, name
        assert written == read or kind == "in fp64"
        if kind != "in fp64":
            assert written == hashes[kind]


@pytest.mark.parametrize("layout", marked(LAYOUTS))
def test_another_optimizer_takes_over_the_same_in_every_layout(layout, visited):
    _, hashes, found = visited
    assert hashes["to lion"][1]
    for rank, (found_hash, messages) in enumerate(found[layout, "to lion"]):
        assert found_hash == hashes["to lion"][0]
        assert messages == (hashes["to lion"][1] if rank == 0 else [])


def test_checkpoints_of_two_layouts_differ_in_nothing_but_the_layout(visited):
    folder, _, _ = visited
    paths = [folder / "8 bits" / name / "checkpoints/step_00000002" for name in ("1", "dp2 x tp2")]
    found = diff_checkpoints(*paths, values=True)
    assert found["same"]
    assert not found["values"]


def test_every_optimizer_is_in_every_layout():
    names = [name for name, _ in Model().named_parameters()]
    stepped = {
        row.settings_of(name)["optimizer"] for row in running(SEVERAL).values() for name in names
    }
    assert stepped | {"muon"} == {*OPTIMIZERS}  # of Muon see test_muon.py
    assert {*OPTIMIZERS} == {x.optimizer for x in ROWS.values()}


def test_blocks_that_a_layout_cuts_are_refused_by_name(tmp_path):
    row = attrs.evolve(ROWS["adamw, 8-bit moments"], dtype=torch.float32)
    ps = tk.solo_parallel()
    stages, optimizer = build(row, PLAIN, ps)
    state = train(stages, optimizer, ps, begin=0, end=1)
    tk.save_checkpoint(tmp_path, state, stages, optimizer, ps)
    for messages in run_ranks(cut_within_blocks, 2, row, tmp_path):
        assert "sharded into 128 per rank, which splits blocks of 256" in messages[0]
        assert "sharded into 128 per rank" in messages[1]


def cut_within_blocks(row, run):
    """Return the errors of a layout that splits rows of 256 numbers in two."""
    wide = attrs.evolve(row, options=())
    with tk.parallel_session(tp=2) as ps:
        cut = tensor_parallel({"layers.*": "replicated", "layers.*.up": "row"})
        stages = build_stages(
            lambda: Model().to(row.dtype), ps, [cut], weights=weights, split=split
        )
        with pytest.raises(ValueError, match="rows of") as made:
            row.make(stages, axis=ps.pp)
        optimizer = wide.make(stages, axis=ps.pp)
        with pytest.raises(ValueError, match="rows of") as read:
            tk.resume(run, TrainState(), stages, optimizer, ps, log=lambda _: None)
        return str(made.value), str(read.value)
