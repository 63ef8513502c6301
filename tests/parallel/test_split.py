"""Layers are cut into even stages, and stages hold the whole model, each parameter once."""

import itertools

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from whole_step import CONFIG

import trainkit as tk
from trainkit.models import Decoder, init_weights
from trainkit.parallel.check_layout import passes_to_itself
from trainkit.parallel.split import (
    SCHEDULES,
    assign_stages,
    decoder_costs,
    split_layer_ranges,
)
from trainkit.parallel.stage_ranks import StagePlace, get_stage_places, get_tied_names
from trainkit.parallel.stages import split_layers
from trainkit.tools.planning import Job
from trainkit.tools.planning.stages import find_part
from trainkit.types import ConfigError, Layout


def dearest(costs, ranges, first, last):
    totals = [sum(costs[i] for i in part) for part in ranges]
    totals[0] += first
    totals[-1] += last
    return max(totals)


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=7),
    st.integers(1, 7),
    st.integers(0, 6),
    st.integers(0, 6),
)
def test_no_cut_has_a_cheaper_dearest_stage(costs, stages, first, last):
    stages = min(stages, len(costs))
    ranges = split_layer_ranges(costs, stages, first=first, last=last)
    assert [i for part in ranges for i in part] == list(range(len(costs)))
    assert all(ranges)
    for cuts in itertools.combinations(range(1, len(costs)), stages - 1):
        bounds = [0, *cuts, len(costs)]
        other = [range(a, b) for a, b in itertools.pairwise(bounds)]
        assert dearest(costs, ranges, first, last) <= dearest(costs, other, first, last) + 1e-6


def test_the_first_and_the_last_stage_have_fewer_layers():
    config = tk.models.make_decoder_config("llama-3.1-8b")
    blocks, embedding, head = decoder_costs(config)
    sizes = list(map(len, split_layer_ranges(blocks, 4, first=embedding, last=head)))
    assert sizes[0] < sizes[1]
    assert sizes[3] < sizes[2]
    assert sum(sizes) == 32


def test_a_layer_costs_what_a_token_meets_of_it():
    v3 = tk.models.make_decoder_config("deepseek-v3")
    width, heads, latents = v3.width, v3.heads, v3.latents
    queries = latents.query_rank * (width + heads * (latents.plain + latents.rotary))
    keys = width * (latents.kv_rank + latents.rotary)
    keys += latents.kv_rank * heads * (latents.plain + latents.values)
    attention = queries + keys + heads * latents.values * width
    gains = 2 * width + latents.query_rank + latents.kv_rank
    dense = attention + gains + 3 * width * v3.mlp_width
    sparse = attention + gains + 256 * width + 9 * 3 * width * 2_048
    blocks, embedding, _ = decoder_costs(v3)
    assert blocks == [dense] * 3 + [sparse] * 58
    assert sum(blocks) + 4 * embedding + width == tk.models.count_active_parameters(v3)


def test_layers_without_experts_are_cut_by_what_they_cost():
    experts = tk.models.Experts(count=8, top_k=1, width=32, first=2, renormalize=False)
    config = attrs.evolve(CONFIG, layers=10, mlp_width=256, experts=experts)
    blocks, *_ = decoder_costs(config)
    assert blocks[0] == blocks[1] > 3 * blocks[2] == 3 * blocks[9]
    stages = [[*map(int, stage.layers)] for stage in split_layers(whole(config), 2)]
    assert stages == [[0, 1], [*range(2, 10)]]
    job = Job(config=config, row_length=64, rows=8)
    parts = [find_part(job, Layout(pp=2), rank) for rank in range(2)]
    assert [(part.layers, part.experts) for part in parts] == [
        (len(layers), sum(i >= 2 for i in layers)) for layers in stages
    ]


@pytest.mark.parametrize("scale", [1.0, 0.1, 1 / 3])
def test_what_does_not_divide_goes_to_the_first_stages(scale):
    def sizes(layers, stages, **more):
        return list(map(len, split_layer_ranges([scale] * layers, stages, **more)))

    assert sizes(10, 4) == [3, 3, 2, 2]
    assert sizes(7, 4) == [2, 2, 2, 1]
    assert sizes(32, 5) == [7, 7, 6, 6, 6]
    assert sizes(8, 4, first=scale, last=scale) == [2, 3, 2, 1]


def test_a_large_model_is_cut_at_once():
    assert len(split_layer_ranges([1.0] * 126, 32, first=2.0, last=2.0)) == 32


def test_too_few_layers_are_refused_with_both_numbers():
    with pytest.raises(ConfigError, match="3 layers cannot fill 4 stages"):
        split_layer_ranges([1.0] * 3, 4)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_rank_has_as_many_stages_and_torch_places_them_alike(schedule, ranks):
    from torch.distributed.pipelining._utils import generate_stage_to_rank_mapping

    found = assign_stages(schedule, ranks)
    style = "v" if SCHEDULES[schedule].placement == "v" else "loop"
    wanted = generate_stage_to_rank_mapping(ranks, len(found), style)
    assert dict(enumerate(found)) == wanted
    assert {found.count(rank) for rank in range(ranks)} == {len(found) // ranks}


def test_a_number_of_stages_that_a_schedule_cannot_have_is_refused():
    with pytest.raises(ConfigError, match=r"1f1b has 1 stage\(s\) on each rank, got 2"):
        assign_stages("1f1b", 2, per_rank=2)
    assert assign_stages("looped_bfs", 2, per_rank=3) == (0, 1, 0, 1, 0, 1)


def whole(config):
    with torch.device("meta"):
        return Decoder(config, head="hidden")


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_the_stages_of_a_decoder_are_the_decoder(count, tied):
    config = attrs.evolve(CONFIG, layers=4, tied=tied)
    names = list(dict(whole(config).named_parameters()))
    stages = split_layers(whole(config), count)
    found = [name for stage in stages for name, _ in stage.named_parameters()]
    if tied:
        assert found.count("embedding.weight") == 2
        assert stages[0].embedding is not stages[-1].embedding
        found.remove("embedding.weight")
    assert sorted(found) == sorted(names)


def of_rank(rank, count, schedule="1f1b", layers=4, **options):
    axis = tk.Axis("pp", tk.Share(rank, count))
    layout = attrs.evolve(tk.solo_parallel(), pp=axis)
    config = attrs.evolve(CONFIG, layers=layers, tied=True)
    return tk.build_stages(
        lambda: Decoder(config),
        layout,
        [],
        weights=options.pop("weights", init_weights(config, seed=0)),
        schedule=schedule,
        **options,
    ), axis


def test_stages_run_one_after_the_other_give_what_the_whole_gives():
    config = attrs.evolve(CONFIG, layers=4, tied=True)
    (model,) = tk.build_stages(
        lambda: Decoder(config), tk.solo_parallel(), [], weights=init_weights(config, seed=0)
    )
    batch = tk.batch.make_padding_batch(2, 6)
    x = torch.arange(12).reshape(2, 6)
    wanted = model(x, position_ids=batch.position_ids, spans=batch.spans)
    for rank in range(3):
        (stage,), _ = of_rank(rank, 3)
        edge = stage.boundary(batch)
        x = stage(x, position_ids=batch.position_ids, spans=batch.spans)
        assert rank == 2 or (edge.shape, edge.dtype) == (x.shape, x.dtype)
    assert torch.equal(x, wanted)


def test_a_stage_says_where_it_stands_and_what_it_shares():
    stages, axis = of_rank(1, 2, "interleaved_1f1b")
    assert get_stage_places(stages, axis) == [
        StagePlace(1, (0, 1, 0, 1)),
        StagePlace(3, (0, 1, 0, 1)),
    ]
    assert [get_tied_names(stage) for stage in stages] == [{}, {"embedding.weight": (0, 3)}]
    assert list(tk.get_named_parameters(stages))[-1] == "norm.weight"


def test_a_rank_holds_as_many_stages_as_are_asked_for():
    stages, axis = of_rank(1, 2, "interleaved_1f1b", layers=8, stages_per_rank=4)
    assert [place.index for place in get_stage_places(stages, axis)] == [1, 3, 5, 7]


@pytest.mark.skipif(not passes_to_itself(), reason="gloo has no connection to the own rank")
def test_a_rank_that_holds_both_ends_has_the_tied_embedding_twice():
    stages, axis = of_rank(0, 2, "zero_bubble_v")
    names = [name for name in tk.get_named_parameters(stages) if "embedding" in name]
    assert names == ["embedding.weight", "embedding.weight (copy)"]
    for stage in stages:
        stage.embedding.weight.grad = torch.ones_like(stage.embedding.weight)
    params = tk.get_parameters(stages)
    assert len(params) == len(tk.get_named_parameters(stages))
    assert tk.grad_norm(params) == stages[0].embedding.weight.numel() ** 0.5
    del axis


def test_nothing_but_the_own_stages_is_filled():
    read_names = []

    def weights(name, shape, _):
        read_names.append(name)
        return torch.zeros(tuple(shape))

    (stage,), _ = of_rank(1, 4, weights=weights)
    assert set(read_names) == {name for name, _ in stage.named_parameters()}
    assert all(name.startswith("layers.1.") for name in read_names)


class Sum(nn.Module):
    """A model of one's own."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)


def split_of_mine(model, num_stages):
    assert num_stages == 2
    return [nn.ModuleDict({name: getattr(model, name)}) for name in "ab"]


def ones(_name, shape, _offset):
    return torch.ones(tuple(shape))


def own_model(split):
    layout = attrs.evolve(tk.solo_parallel(), pp=tk.Axis("pp", tk.Share(1, 2)))
    return tk.build_stages(Sum, layout, [], weights=ones, split=split)


def test_a_model_of_one_s_own_is_split_by_a_function_of_one_s_own():
    (stage,) = own_model(split_of_mine)
    assert list(tk.get_named_parameters([stage])) == ["b.weight", "b.bias"]
    with pytest.raises(ConfigError, match="split a Decoder, not a Sum"):
        own_model(split_layers)


@pytest.mark.parametrize(
    ("split", "message"),
    [
        (lambda m, _: [m], "split returned 1 stages, where 2 were requested"),
        (lambda m, _: [nn.ModuleDict({"a": m.a})] * 2, "'b.bias' is in no stage"),
        (lambda m, _: [m, nn.ModuleDict({"c": m.a})], r"'c\.weight' of stage 1 is no parameter"),
    ],
)
def test_a_split_that_is_not_the_model_is_refused(split, message):
    with pytest.raises(ConfigError, match=message):
        own_model(split)
