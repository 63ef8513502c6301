"""Any layout reads the checkpoints of any other: equal bits, samples and losses."""

import functools
import os

import attrs
import pytest
import torch
from every_pair import ONLY_ALL, WITH_ALL
from torch import nn
from weights.checkpoint.small import quiet
from whole_step import CAPACITY, Layout, build, corpus, input_of, step_function

import trainkit as tk
from trainkit.models import Decoder, DecoderConfig, Experts, init_weights
from trainkit.optim import adamw
from trainkit.parallel import build_stages, expert_parallel, fsdp
from trainkit.tools.testing import run_ranks
from trainkit.types import Cursor
from trainkit.weights.checkpoint import boxes, reading, staging
from trainkit.weights.checkpoint.load import load_checkpoint

STEPS = 3
SAVED = 1  # the step that is saved
UNEVEN_ON = 4  # ranks that write what divides among no number of them
EXPERT_DEGREES = {1: [1], 2: [1, 2], 3: [3], 4: [-2, 2, 1, 4], 8: [2, 4, -4]}  # of ep, by ranks
EXPERTS_WRITTEN_ON = (4, -2)  # ranks, ep; -2 are 2 that are no neighbours


def layout_on(ranks, **degrees):
    return Layout(ranks, rows=8, multiple_of=8, vocab_size=36, **degrees)


LAYOUTS = {
    "1": layout_on(1),
    "dp2": layout_on(2),
    "tp2": layout_on(2, tp=2),
    "pp2": layout_on(2, pp=2),
    "dp3": layout_on(3),
    "dp4": layout_on(4),
    "ring2 x dp2": layout_on(4, ring=2),
    "ring2 x ulysses2": layout_on(4, ring=2, ulysses=2, fold_sp="none"),
    "pp2 x tp2": layout_on(4, pp=2, tp=2),
    "replica2 x dp2": layout_on(4, dp_replicate=2),
    "pp2 x dp2 x tp2": layout_on(8, pp=2, tp=2),
}
EIGHT = "pp2 x dp2 x tp2"
STARTS = (  # ranks, the layouts that train and save, and the pairs (written by, read by), in order
    (1, ["1"], []),
    (
        4,
        ["ring2 x dp2", "pp2 x tp2"],
        [
            ("1", "ring2 x ulysses2"),
            ("1", "dp4"),
            ("ring2 x dp2", "pp2 x tp2"),
            ("pp2 x tp2", "replica2 x dp2"),
        ],
    ),
    (3, ["dp3"], [("1", "dp3"), ("pp2 x tp2", "dp3")]),
    (8, [EIGHT], [("dp3", EIGHT)]),
    (
        2,
        ["tp2"],
        [("1", "pp2"), (EIGHT, "dp2"), ("ring2 x dp2", "tp2"), ("dp3", "tp2"), ("tp2", "pp2")],
    ),
    (1, [], [("dp3", "1"), ("pp2 x tp2", "1"), (EIGHT, "1"), ("tp2", "1")]),
)
PAIRS = [pair for _, _, pairs in STARTS for pair in pairs]
# Whose writer and whose reader, or each of their degrees, stand in another pair; (ranks, ep).
THIRD_LOOKS = {
    *(("1", name) for name in ("dp4", "dp3", "pp2")),
    *(("ring2 x dp2", name) for name in ("tp2", "pp2 x tp2")),
    *(("pp2 x tp2", "1"), (4, 1), (4, 2)),
}


def left_out(row):
    """Return whether only --all runs a row: a third check, or eight ranks on two cores."""
    return row in THIRD_LOOKS or row == 8 or (isinstance(row, tuple) and bool({EIGHT, 8} & {*row}))


def marked(rows):
    """Return rows as parameters."""
    return [pytest.param(row, marks=ONLY_ALL if left_out(row) else ()) for row in rows]


def running():
    """Return the selected rows of STARTS."""
    if os.environ.get(WITH_ALL):
        return STARTS
    read = {pair[0] for pair in PAIRS if not left_out(pair)}
    return [
        (world, [x for x in names if x in read], [p for p in pairs if not left_out(p)])
        for world, names, pairs in STARTS
        if world < 8
    ]


def session(layout):
    return tk.parallel_session(
        dp_replicate=layout.dp_replicate,
        pp=layout.pp,
        tp=layout.tp,
        ring=layout.ring,
        ulysses=layout.ulysses,
        fold_sp=layout.fold_sp,
    )


def go_on(layout, ps, state, stages, optimizer, *, until):
    """Train; return the counters, and batch hashes and losses by step."""
    text = corpus()
    bins = tk.pack_bins(text.lengths, CAPACITY, multiple_of=layout.multiple_of)
    train_step = step_function(layout, ps, stages, optimizer)
    seen = {}
    while state.step < until:
        batch = input_of(state.cursor, ps, layout, text=text, bins=bins)
        found = int(tk.all_sum(tk.batch_hash(batch.microbatches), ps.loss))
        state, metrics = train_step(state, batch)
        seen[state.step] = found, float(metrics["loss"])
    return state, seen


def write(name, folder):
    """Train and save in a layout; return the state's hash."""
    layout = LAYOUTS[name]
    with session(layout) as ps:
        stages, optimizer = build(layout, ps)
        state = tk.TrainState(cursor=Cursor())
        state, _ = go_on(layout, ps, state, stages, optimizer, until=SAVED)
        tk.save_checkpoint(folder / name, state, stages, optimizer, ps)
        return tk.state_hash(state, stages, optimizer, ps)


def read(pair, folder, *, forget=False):
    """Load in a layout and train on, by choice from row one; return the state's hash and steps."""
    layout = LAYOUTS[pair[1]]
    with session(layout) as ps:
        rest = *build(layout, ps), ps
        state = tk.resume(folder / pair[0], tk.TrainState(), *rest, log=quiet)
        loaded = tk.state_hash(state, *rest)
        state = attrs.evolve(state, cursor=Cursor()) if forget else state
        return loaded, go_on(layout, ps, state, *rest[:2], until=STEPS)[1]


def visit(names, pairs, folder):
    """Do all the work of one start of ranks."""
    written = {name: write(name, folder) for name in names}
    found = {pair: read(pair, folder) for pair in pairs}
    with tk.parallel_session() as ps:
        if ps.world.count == UNEVEN_ON:
            written["uneven"] = save(uneven, folder / "uneven", ps)
        if (folder / "uneven").exists():
            found["uneven", ps.world.count] = load(uneven, folder / "uneven", ps)
        world = ps.world.count
    for ep in EXPERT_DEGREES[world]:
        if left_out((world, ep)) and not os.environ.get(WITH_ALL):
            continue
        with tk.parallel_session(ep=abs(ep), ep_adjacent=ep > 0) as ps:
            if (world, ep) == EXPERTS_WRITTEN_ON:
                written["experts"] = save(experts, folder / "experts", ps)
            if (folder / "experts").exists():
                found["experts", world, ep] = load(experts, folder / "experts", ps)
    return written, found


@pytest.fixture(scope="module")
def visited(tmp_path_factory):
    """Return the folder, the hash that each layout wrote, and the result of each pair."""
    folder = tmp_path_factory.mktemp("elastic")
    written, found = {}, {}
    for world, *work in running():
        alone = world == 1
        ends = visit(*work, folder) if alone else run_ranks(visit, world, *work, folder)[0]
        written |= ends[0]
        found |= ends[1]
    return folder, written, found


@functools.cache
def reference():
    layout = LAYOUTS["1"]
    with session(layout) as ps:
        state = tk.TrainState(cursor=Cursor())
        return go_on(layout, ps, state, *build(layout, ps), until=STEPS)[1]


@pytest.mark.case("X7", "X8")
@pytest.mark.parametrize("pair", marked(PAIRS), ids=" -> ".join)
def test_another_layout_goes_on_with_the_same_bits_samples_and_losses(pair, visited):
    _, written, found = visited
    loaded, seen = found[pair]
    assert loaded == written[pair[0]]
    for step, (batch, loss) in seen.items():
        assert batch == reference()[step][0]
        assert loss == pytest.approx(reference()[step][1], rel=1e-6)
    assert list(seen) == list(range(SAVED + 1, STEPS + 1))


# ------------------------------------------------------------------------------- 7 rows on 4 ranks


class Uneven(nn.Module):
    """Matrices whose sizes no number of ranks divides."""

    def __init__(self):
        super().__init__()
        self.seven = nn.Parameter(torch.arange(21.0).reshape(7, 3))
        self.one = nn.Parameter(torch.arange(5.0).reshape(1, 5))
        self.vector = nn.Parameter(torch.arange(3.0))


def uneven(ps, *, filled):
    from torch.distributed.fsdp import fully_shard

    model = Uneven()
    if ps.world.count > 1:
        fully_shard(model, mesh=ps.world.mesh)
    optimizer = adamw(model.parameters(), lr=0.1)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.zero_grad()
    if not filled:
        with torch.no_grad():
            for x in (
                *model.parameters(),
                *(v for s in optimizer.state.values() for v in s.values()),
            ):
                x.zero_()
    return model, optimizer


def save(make, folder, ps):
    """Save the model of `make`; return its hash."""
    model, optimizer = make(ps, filled=True)
    state = tk.TrainState(step=1)
    tk.save_checkpoint(folder, state, [model], optimizer, ps)
    return tk.state_hash(state, [model], optimizer, ps)


def load(make, folder, ps):
    """Load that model over zeros; return its hash."""
    model, optimizer = make(ps, filled=False)
    path = folder / "checkpoints/step_00000001"
    state = load_checkpoint(path, [model], optimizer, axis=ps.world)
    return tk.state_hash(state, [model], optimizer, ps)


@pytest.mark.case("X8")
@pytest.mark.parametrize("world", marked([1, 2, 3, 4, 8]))
def test_seven_rows_of_four_ranks_are_read_by_any_number(world, visited):
    _, written, found = visited
    assert found["uneven", world] == written["uneven"]


# --------------------------------------------------------------------------------------- experts


CONFIG = DecoderConfig(
    vocab_size=16,
    width=8,
    layers=2,
    heads=2,
    kv_heads=1,
    mlp_width=8,
    experts=Experts(count=12, top_k=2, width=8, first=1, scores="sigmoid", biased=True),
)


def experts(ps, *, filled):
    """Return a decoder whose experts lie on the ranks of ep; six on four ranks are each cut."""
    drawn = init_weights(CONFIG, seed=0)

    def weights(name, shape, offset):
        return drawn(name, shape, offset) if filled else torch.zeros(shape)

    (model,) = build_stages(
        functools.partial(Decoder, CONFIG), ps, [expert_parallel(), fsdp()], weights=weights
    )
    model.layers["1"].mlp.router.bias.fill_(0.25 if filled else 0)
    optimizer = adamw(model.parameters(), lr=0.1)
    for p in model.parameters():
        p.grad = p.detach() * 0 + 1 if filled else torch.zeros_like(p)
    optimizer.step()
    return model, optimizer


@pytest.mark.case("X7", "X8")
@pytest.mark.parametrize(
    "layout", marked([(w, ep) for w, eps in EXPERT_DEGREES.items() for ep in eps])
)
def test_experts_of_four_ranks_are_read_by_any_number(layout, visited):
    _, written, found = visited
    assert found["experts", *layout] == written["experts"]


@pytest.mark.case("X8")
def test_rows_read_from_where_they_do_not_belong_would_be_seen(visited, monkeypatch):
    """The negative control."""
    swapped = {0: 2, 2: 0}

    def wrong(offset, *rest):
        return boxes.overlap(
            [swapped.get(offset[0], offset[0]), *offset[1:]] if offset else [], *rest
        )

    monkeypatch.setattr(reading, "overlap", wrong)
    folder, hashes, _ = visited
    with tk.parallel_session() as ps:
        assert load(uneven, folder / "uneven", ps) != hashes["uneven"]


@pytest.mark.case("X9")
def test_without_its_moments_a_resumed_run_is_another(visited, monkeypatch):
    """The negative control: the losses of the table would differ."""
    monkeypatch.setattr(staging, "install_moments_", lambda *_: None)
    folder, hashes, _ = visited
    loaded, seen = read(("1", "1"), folder)
    assert loaded != hashes["1"]
    assert seen[STEPS][1] != pytest.approx(reference()[STEPS][1], rel=1e-6)


@pytest.mark.case("X7")
def test_without_its_cursor_a_resumed_run_sees_other_samples(visited):
    """The negative control."""
    _, seen = read(("1", "1"), visited[0], forget=True)
    assert seen[STEPS][0] != reference()[STEPS][0]
