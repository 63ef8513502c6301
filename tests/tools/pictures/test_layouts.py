"""The pictures of a layout: what they show is what the code does, and their words can be read."""

import importlib.util
import math
import re
import subprocess
import sys
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pytest
import torch

from trainkit import pictures
from trainkit.attention.ring import _make_views
from trainkit.batch.shards import spans_of_runs, zigzag_shard
from trainkit.mesh.axes import partitions_of
from trainkit.parallel.split import SCHEDULES, assign_stages
from trainkit.run.plots.drawing import check_picture
from trainkit.tools.pictures.delta_scan import state_hops
from trainkit.tools.pictures.zigzag import ring_blocks, zigzag_chunks
from trainkit.types import Axis, ConfigError, DiskError, Layout, Share

NAMES = list(SCHEDULES)
MANY = [name for name in NAMES if name not in {"gpipe", "1f1b"}]


def words_of(path):
    return re.findall(r"<text[^>]*>([^<]*)</text>", path.read_text())


# ------------------------------------------------------------------------------------ the mesh

WORLD_AXES = Layout().axes["world"]


@pytest.mark.parametrize("fold_sp", ["all", "ring", "ulysses", "none"])
@pytest.mark.parametrize("left_out", [[], ["pp", "ring"], ["dp_shard", "tp"]], ids=str)
def test_places_are_those_of_the_axes(fold_sp, left_out):
    degrees = {name: 1 if name in left_out else 2 for name in WORLD_AXES} | {"dp_replicate": 3}
    layout = Layout(**degrees, fold_sp=fold_sp)
    places = pictures.mesh_places(layout)
    found = partitions_of(layout)
    index = {
        name: {rank: ranks.index(rank) for ranks in lists for rank in ranks}
        for name, lists in found.items()
    }
    for place in places:
        assert place.index == {name: index[name][place.rank] for name in WORLD_AXES}
        assert place.tokens == index["loss"][place.rank]
    held = {p.rank: tuple(index[name][p.rank] for name in ("pp", "fsdp", "tp")) for p in places}
    for one, other in product(places[:12], places):
        same = held[one.rank] == held[other.rank]
        assert (one.parameters == other.parameters) == same
    assert len({p.parameters for p in places}) == math.prod(
        len(found[name][0]) for name in ("pp", "fsdp", "tp")
    )


def test_a_picture_of_a_mesh_names_axes_ranks_tokens_and_parameters(tmp_path):
    layout = Layout(pp=2, dp_replicate=2, tp=2)
    words = words_of(pictures.plot_mesh(layout, tmp_path / "mesh.svg"))
    assert "8 ranks: pp 2 x dp_replicate 2 x tp 2" in words
    assert "2 parts of the tokens, 4 of the parameters" in words
    assert {"pp", "dp_replicate", "tp", "rank", "tokens", "parameters", "7", "A", "B"} <= {*words}
    assert "ring" not in words
    assert words.count("A") == 2  # both stages see the same tokens


@pytest.mark.parametrize("neighbours", [True, False])
@pytest.mark.parametrize("fold_sp", ["all", "none"])
def test_places_of_dealt_experts_are_those_of_their_axes(fold_sp, neighbours):
    layout = Layout(dp_shard=4, ring=2, tp=2, ep=2, fold_sp=fold_sp, ep_adjacent=neighbours)
    found = partitions_of(layout)
    for place in pictures.mesh_places(layout):
        for name in ("ep", "expert_fsdp"):
            (ranks,) = [ranks for ranks in found[name] if place.rank in ranks]
            assert ranks[place.index[name]] == place.rank


def test_a_picture_of_a_mesh_with_dealt_experts_names_their_axes(tmp_path):
    words = words_of(pictures.plot_mesh(Layout(dp_shard=4, ep=2), tmp_path / "mesh.svg"))
    assert {"ep", "expert_fsdp"} <= {*words}


def test_a_mesh_that_is_too_large_is_refused(tmp_path):
    with pytest.raises(ValueError, match="128 ranks are more than the 64"):
        pictures.plot_mesh(Layout(dp_shard=128), tmp_path / "mesh.svg")


# ------------------------------------------------------------------------------------ the zigzag

ROWS = [([32, 16, 48], 2), ([64, 24, 8], 4), ([12, 6], 3), ([7, 3], 1)]


def lengths_of(row):
    return [2 * row[1] * length for length in row[0]] if row[1] == 1 else row[0]


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_chunks_are_those_of_zigzag_shard(row):
    lengths, ring = lengths_of(row), row[1]
    bounds = np.append(0, np.cumsum(lengths))
    tokens = torch.arange(bounds[-1])
    chunks = zigzag_chunks(lengths, ring)
    for rank in range(ring):
        held = zigzag_shard(tokens, Share(rank, ring), dim=0, cu_seqlens=bounds).tolist()
        mine = [range(c.begin, c.end) for c in chunks if c.rank == rank]
        assert held == [token for part in mine for token in part]


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_blocks_are_causal_attention_and_every_rank_does_the_same_work_at_each_step(row):
    lengths, ring = lengths_of(row), row[1]
    blocks = ring_blocks(lengths, ring)
    assert sum(b.pairs for b in blocks) == sum(n * (n + 1) // 2 for n in lengths)
    seen = np.zeros((sum(lengths), sum(lengths)), int)
    for b in blocks:
        seen[b.query.begin : b.query.end, b.key.begin : b.key.end] += 1
        assert b.rank == b.query.rank
    document = np.repeat(np.arange(len(lengths)), lengths)
    causal = np.tril(document[:, None] == document)
    assert (seen[causal] == 1).all()
    for step in range(ring):
        work = [sum(b.pairs for b in blocks if (b.rank, b.step) == (r, step)) for r in range(ring)]
        assert len(set(work)) == 1


@pytest.mark.parametrize("ring", [2, 3, 4])
def test_the_steps_are_those_of_ring_attention(ring):
    lengths = [4 * ring, 2 * ring]
    bounds = np.append(0, np.cumsum(lengths))
    tokens, document = torch.arange(bounds[-1]), torch.repeat_interleave(torch.tensor(lengths))
    shares = [Share(rank, ring) for rank in range(ring)]
    held = [zigzag_shard(tokens, share, dim=0, cu_seqlens=bounds) for share in shares]
    blocks = ring_blocks(lengths, ring)
    for rank, share in enumerate(shares):
        spans = spans_of_runs(document[held[rank]].numpy()[None])
        for step, view in enumerate(_make_views(spans, Axis("ring", share), scale=1.0)):
            queries, keys = held[rank][view.queries], held[rank - step][view.keys]
            seen = {(q, k) for q in queries.tolist() for k in keys.tolist()}
            seen = {(q, k) for q, k in seen if document[q] == document[k] and k <= q}
            assert seen == {
                (q, k)
                for b in blocks
                if (b.rank, b.step) == (rank, step)
                for q in range(b.query.begin, b.query.end)
                for k in range(b.key.begin, min(b.key.end, q + 1))
            }


def test_a_picture_of_a_zigzag_names_ranks_chunks_and_steps(tmp_path):
    words = words_of(pictures.plot_zigzag([64, 40], 4, tmp_path / "zigzag.svg"))
    assert "each document cut into 8 chunks: rank r holds chunks r and 7 - r" in words
    assert "what is computed: colour is the rank, number the step" in words
    assert {"rank 0", "rank 3", "row", "tokens", "queries", "keys", "25 %"} <= {*words}


def test_a_zigzag_that_does_not_divide_is_refused_with_both_numbers(tmp_path):
    with pytest.raises(ValueError, match=r"12 tokens is no multiple of 8 .* multiple_of=8"):
        zigzag_chunks([16, 12], 4)
    with pytest.raises(ValueError, match="no ring of 2 ranks over documents of"):
        zigzag_chunks([], 2)
    with pytest.raises(ValueError, match="at most 8 ranks, got 9"):
        pictures.plot_zigzag([18], 9, tmp_path / "zigzag.svg")


# ------------------------------------------------------------------------------------ the pipeline

SIZES = [(2, 4), (4, 8), (3, 6), (4, 16)]


@pytest.mark.parametrize("pp", [1, 2, 4, 5])
@pytest.mark.parametrize("microbatches", [1, 3, 8])
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_the_bubble_of_one_stage_per_rank_is_that_of_the_formula(name, pp, microbatches):
    tasks = pictures.simulate_pipeline(name, pp=pp, microbatches=microbatches)
    share = pictures.bubble_fraction(tasks)
    assert share == pytest.approx((pp - 1) / (microbatches + pp - 1), abs=1e-11)


@pytest.mark.parametrize(("pp", "microbatches"), SIZES)
def test_more_stages_and_split_backwards_shrink_the_bubble_as_published(pp, microbatches):
    share = {
        name: pictures.bubble_fraction(
            pictures.simulate_pipeline(name, pp=pp, microbatches=microbatches)
        )
        for name in MANY
    }
    looped = (pp - 1) / (2 * microbatches + pp - 1)
    split = (pp - 1) / (6 * microbatches + pp - 1)  # only the first forwards are waited for
    wanted = dict.fromkeys(MANY, split) | dict.fromkeys(["interleaved_1f1b", "looped_bfs"], looped)
    assert share == pytest.approx(wanted, abs=1e-11)
    four = pictures.simulate_pipeline(
        "interleaved_1f1b", pp=pp, microbatches=microbatches, stages_per_rank=4
    )
    assert pictures.bubble_fraction(four) == pytest.approx(
        (pp - 1) / (4 * microbatches + pp - 1), abs=1e-11
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("pp", "microbatches"), SIZES)
def test_a_timeline_does_all_work_once_in_an_order_that_can_be(name, pp, microbatches):
    tasks = pictures.simulate_pipeline(name, pp=pp, microbatches=microbatches)
    stages = max(task.stage for task in tasks) + 1
    ranks = assign_stages(name, pp)
    assert {task.stage: task.rank for task in tasks} == dict(enumerate(ranks))
    done = {(task.kind, task.stage, task.microbatch): task for task in tasks}
    assert len(done) == len(tasks)
    for stage, microbatch in product(range(stages), range(microbatches)):
        forward = done["F", stage, microbatch]
        halves = [done.get((kind, stage, microbatch)) for kind in "BIW"]
        assert [half is None for half in halves] in ([False, True, True], [True, False, False])
        back = halves[0] or halves[1]
        assert forward.rank == back.rank
        assert forward.end <= back.begin
        assert halves[2] is None or back.end <= halves[2].begin
        if stage:
            below = done["F", stage - 1, microbatch]
            assert below.end <= forward.begin
            (below,) = (done[k] for kind in "BI" if (k := (kind, stage - 1, microbatch)) in done)
            assert back.end <= below.begin
    for rank in range(pp):
        mine = [task for task in tasks if task.rank == rank]
        assert all(a.end <= b.begin for a, b in pairwise(mine))
        assert sum(task.end - task.begin for task in mine) == pytest.approx(3 * microbatches)


@pytest.mark.parametrize(("name", "whole"), [("gpipe", 4), ("1f1b", 3)])
def test_the_order_of_one_stage_per_rank_is_torch_s(name, whole):
    """Torch's record of 1F1B for the last rank begins with microbatch 1: it is left out."""
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    tasks = pictures.simulate_pipeline(name, pp=4, microbatches=6)
    for rank, order in enumerate(get_schedule_ops(name, 4, 6)[:whole]):
        mine = [f"{t.stage}{t.kind}{t.microbatch}" for t in tasks if t.rank == rank]
        assert mine == [str(action) for action in order if action is not None][: len(mine)]
    last = [(t.kind, t.microbatch) for t in tasks if t.rank == 3]
    in_turn = [(kind, index) for index in range(6) for kind in "FB"]
    assert last == in_turn if name == "1f1b" else sorted(last) == sorted(in_turn)


def test_1f1b_holds_no_more_microbatches_than_there_are_stages():
    for name, most in (("1f1b", 3), ("gpipe", 8)):
        tasks = pictures.simulate_pipeline(name, pp=3, microbatches=8)
        held = np.cumsum([{"F": 1, "B": -1}[task.kind] for task in tasks if task.rank == 0])
        assert held.max() == most


def test_a_pipeline_that_cannot_be_is_refused():
    for name, pp, microbatches, stages_per_rank, message in [
        ("1f2b", 4, 8, None, "no pipeline schedule '1f2b'; there are gpipe, 1f1b, "),
        ("1f1b", 0, 8, None, "must be at least 1, got 0, 8"),
        ("1f1b", 4, 8, 2, r"1f1b has 1 stage\(s\) on each rank, got 2"),
        ("looped_bfs", 4, 8, 1, "looped_bfs is drawn with at least two stages a rank"),
        ("dual_pipe_v", 4, 4, None, "dual_pipe_v: DualPipeV requires at least as many"),
    ]:
        with pytest.raises(ValueError, match=message):
            pictures.simulate_pipeline(
                name, pp=pp, microbatches=microbatches, stages_per_rank=stages_per_rank
            )


def test_a_picture_of_a_pipeline_prints_the_bubble_of_each_schedule(tmp_path):
    names = ["1f1b", "zero_bubble_v"]
    words = words_of(pictures.plot_pipeline(names, tmp_path / "p.svg", pp=4, microbatches=8))
    assert "1f1b: bubble 27.3 %" in words
    assert "zero_bubble_v: bubble 5.9 %" in words
    assert {"rank 0", "rank 3", "forward", "backward for the weights", "bubble"} <= {*words}
    alone = words_of(pictures.plot_pipeline("1f1b", tmp_path / "p.svg", pp=2, microbatches=3))
    assert {"1f1b: bubble 25.0 %", "backward"} <= {*alone}
    assert "backward for the weights" not in alone


# ------------------------------------------------------------------------------------ the files


@pytest.mark.parametrize("room", ["run.sinks", "run.plots", "tools.pictures"])
def test_sinks_and_pictures_are_imported_without_torch(room):
    code = f"import sys, trainkit.{room}; print(*{{'torch', 'matplotlib'}} & {{*sys.modules}})"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == ""


PICTURES = {
    "plot_mesh": lambda path: pictures.plot_mesh(Layout(dp_shard=2, tp=2), path),
    "plot_zigzag": lambda path: pictures.plot_zigzag([16, 8], 2, path),
    "plot_pipeline": lambda path: pictures.plot_pipeline("gpipe", path, pp=2, microbatches=2),
}


# all are saved by one function
OTHERS = [pytest.param(name, marks=pytest.mark.only_all) for name in [*PICTURES][1:]]


@pytest.mark.parametrize("name", [next(iter(PICTURES)), *OTHERS])
def test_a_picture_is_the_same_bytes_each_time_and_leaves_no_global_behind(
    tmp_path, monkeypatch, name
):
    monkeypatch.delitem(sys.modules, "matplotlib.pyplot", raising=False)  # torchmetrics imports it
    one, two = (PICTURES[name](tmp_path / f"{index}.svg") for index in (1, 2))
    assert one.read_bytes() == two.read_bytes()
    assert len(one.read_bytes()) < 100_000
    assert PICTURES[name](tmp_path / "1.png").read_bytes().startswith(b"\x89PNG")
    assert "matplotlib.pyplot" not in sys.modules


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_without_a_format_or_matplotlib_is_refused(tmp_path, monkeypatch, name):
    with pytest.raises(ValueError, match=rf"{name}: a picture ends in \.png, \.svg, \.pdf"):
        PICTURES[name](tmp_path / "picture")
    with pytest.raises(DiskError, match=f"{name}: .*missing is not a directory"):
        PICTURES[name](tmp_path / "missing" / "picture.svg")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r'pip install "trainkit-lm\[recipes\]"'):
        PICTURES[name](tmp_path / "picture.svg")


def test_a_directory_is_no_picture(tmp_path):
    folder = tmp_path / "picture.svg"
    folder.mkdir()
    with pytest.raises(DiskError, match="is a directory; give a file"):
        check_picture("plot", folder)


def test_the_pictures_of_the_pages_show_what_their_script_draws(tmp_path):
    """By their words, which no version of matplotlib changes."""
    folder = Path(__file__).parents[3] / "docs" / "pictures"
    spec = importlib.util.spec_from_file_location("pictures_of_layouts", folder / "layouts.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    script.FOLDER = tmp_path
    script.main()
    for name in ("mesh.svg", "experts-mesh.svg", "zigzag.svg", "pipeline.svg"):
        assert words_of(folder / name) == words_of(tmp_path / name)


def test_the_scan_is_drawn_with_a_message_where_the_next_part_is_of_another_rank(tmp_path):
    owners = [chunk.rank for chunk in zigzag_chunks([16], 4)]
    assert state_hops(4) == list(pairwise(owners))
    words = words_of(pictures.plot_delta_scan(4, tmp_path / "scan.svg"))
    assert words.count("sent") == sum(a != b for a, b in pairwise(owners)) == 6
    assert words.count("stays") == 1
    with pytest.raises(ValueError, match="2 to 4 ranks"):
        pictures.plot_delta_scan(5, tmp_path / "scan.svg")
