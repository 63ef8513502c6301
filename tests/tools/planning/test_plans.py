"""The planner lists every layout, ranks them, and gives the reasons against impossible ones."""

import json
import math
from functools import partial

import attrs
import pytest

from trainkit.__main__ import main
from trainkit.models import DecoderConfig, Experts, count_parameters
from trainkit.models.decoder_sizes import make_decoder_config
from trainkit.tools.planning import (
    Job,
    estimate_memory,
    estimate_seconds,
    format_estimates,
    get_hardware,
    list_layouts,
    rank_layouts,
)
from trainkit.tools.planning.jobs import explain_refusal
from trainkit.tools.planning.machines import Hardware
from trainkit.tools.planning.plans import _count_row_flops
from trainkit.tools.planning.stages import Part, find_part
from trainkit.tools.planning.traffic import Transfer, estimate_traffic
from trainkit.tools.planning.weights import compute_units
from trainkit.tools.testing.builtin import GEMMA_LIKE, GPT_LIKE, GPT_OSS_LIKE, OLMO_LIKE
from trainkit.types import ConfigError, Layout, Precision
from trainkit.weights.hub import write_decoder_config

TINY = DecoderConfig(vocab_size=256, width=64, layers=4, heads=4, kv_heads=4, mlp_width=128)
BF16, FP32 = Precision(compute="bf16"), Precision(compute="fp32")


def job(**changes):
    return attrs.evolve(Job(config=TINY, precision=FP32, row_length=128, rows=16), **changes)


def toy(**changes):
    """A machine with round figures."""
    machine = Hardware(
        name="toy",
        memory=2**30,
        flops={"bf16": 1e12, "fp32": 1e12},
        intra_node=1e9,
        inter_node=1e8,
        ranks_per_node=4,
    )
    return attrs.evolve(machine, **changes)


# -------------------------------------------------------------------------------- layouts


@pytest.mark.parametrize("world", [1, 2, 6, 8, 64])
def test_every_factorisation_of_the_world_is_there_once(world):
    found = list(list_layouts(world))
    assert len(set(found)) == len(found)
    assert {layout.world for layout in found} == {world}
    exponents = []
    for prime in (2, 3):
        exponent = 0
        while world % prime ** (exponent + 1) == 0:
            exponent += 1
        exponents.append(exponent)
    assert len(found) == math.prod(math.comb(exponent + 5, 5) for exponent in exponents)


@pytest.mark.parametrize(
    ("layout", "rows", "words"),
    [
        (Layout(tp=3), 16, "4 heads do not divide by tp = 3"),
        (Layout(ulysses=8), 16, "4 heads do not divide by ulysses = 8"),
        (Layout(ring=3), 16, "row of 128 tokens does not divide over ring = 3"),
        (Layout(dp_shard=32), 16, "16 rows for dp_replicate x dp_shard = 32"),
        (Layout(pp=8), 16, "4 layers are too few for 8 stages"),
        (Layout(pp=4), 2, "schedule = '1f1b' needs"),
    ],
)
def test_an_impossible_layout_is_refused_with_both_numbers(layout, rows, words):
    assert words in explain_refusal(job(rows=rows), layout)
    (one,) = rank_layouts(job(rows=rows), [layout], toy(), recompute=["none"])
    assert (one.fits, one.memory, one.seconds) == (False, None, None)
    assert words in one.refusal


def test_a_possible_layout_is_not_refused():
    assert explain_refusal(job(), Layout(pp=2, dp_shard=2, ring=2, tp=2)) is None
    assert explain_refusal(job(), Layout(pp=2, dp_shard=2, schedule="dual_pipe_v")) is None


def test_offload_is_refused_where_nothing_is_sharded():
    assert "cpu_offload is FSDP's" in explain_refusal(job(), Layout(tp=2, cpu_offload=True))
    unfolded = Layout(ring=2, fold_sp="none", cpu_offload=True)
    assert "raise dp_shard" in explain_refusal(job(), unfolded)
    assert explain_refusal(job(), Layout(ring=2, cpu_offload=True)) is None
    assert explain_refusal(job(), Layout(dp_replicate=2, cpu_offload=True)) is None


# -------------------------------------------------------------------------------- memory


@pytest.mark.parametrize(
    "config",
    [GEMMA_LIKE, OLMO_LIKE, GPT_LIKE, attrs.evolve(GPT_OSS_LIKE, experts=None)],
    ids=["gemma", "olmo", "gpt", "sinks"],
)
def test_the_parameters_of_every_option_are_counted(config):
    one = Job(config=config, row_length=64, rows=8)
    units, every = compute_units(one, Layout()), range(config.layers)
    parts = units.blocks(every) + units.embedding + units.positions + units.norm
    assert (parts + units.head).trained.whole == count_parameters(config)
    half = compute_units(one, Layout(tp=2))
    whole, size = (x.trained.whole for x in (half.whole(every), units.blocks(every)))
    assert 0 < whole < size
    assert half.blocks(every).trained.whole == (size - whole) // 2 + whole
    assert half.embedding.trained.whole * 2 == units.embedding.trained.whole
    assert half.positions == units.positions


def test_windows_save_operations():
    sees_all = attrs.evolve(GEMMA_LIKE, sliding=None)
    jobs = [Job(config=config, row_length=64, rows=8) for config in (GEMMA_LIKE, sees_all)]
    part = Part(tuple(range(GEMMA_LIKE.layers)), embedding=True, head=True)
    windowed, full = (_count_row_flops(job, part, products=False) for job in jobs)
    pairs, in_window = 64 * 65 / 2, 9 * 64 - 9 * 8 / 2
    assert windowed == pytest.approx(full * (pairs + in_window) / (2 * pairs))


@pytest.mark.parametrize(
    ("fold", "fsdp", "axis"),
    [("all", 16, None), ("ring", 4, "ulysses"), ("ulysses", 8, "ring"), ("none", 2, "sp")],
)
def test_axes_that_are_not_folded_are_summed_over_not_sharded(fold, fsdp, axis):
    layout = Layout(dp_shard=2, ring=2, ulysses=4, fold_sp=fold)
    assert (layout.count("fsdp"), layout.count("sp_unfolded")) == (fsdp, 16 // fsdp)
    whole = 4 * count_parameters(TINY)
    memory = estimate_memory(job(), layout)
    assert [memory.parameters * fsdp, memory.gradients * fsdp] == [whole, whole]
    summed = [one for one in estimate_traffic(job(), layout) if one.kind == "all_reduce"]
    flags = summed.pop(0)  # of FSDP: who has gradients
    assert (flags.axis, flags.count) == ("fsdp", 1)
    assert [one.axis for one in summed] == ([] if axis is None else [axis])
    assert all(one.bytes > memory.gradients for one in summed)
    seconds = estimate_seconds(job(), layout, toy(inter_node=1e8), efficiency=0.5)
    assert all(seconds.exposed > one.sent / 1e8 for one in summed)  # nothing is left to hide it


def test_the_rank_with_the_highest_peak_may_be_the_first_with_experts():
    experts = Experts(count=64, top_k=1, width=128, first=2, renormalize=False)
    config = attrs.evolve(TINY, layers=8, experts=experts)
    layout = Layout(pp=8, dp_shard=2)
    assert [find_part(job(config=config), layout, rank).experts for rank in range(3)] == [0, 0, 1]
    found = estimate_memory(job(config=config, rows=32), layout)
    assert found.pp_rank == 2
    assert found.parameters > 64 * 3 * 64 * 128 * 4 / 2


def test_strided_experts_send_tokens_between_nodes_and_weights_inside():
    experts = Experts(count=8, top_k=2, width=128, renormalize=False)
    mixture, slow = job(config=attrs.evolve(TINY, experts=experts)), {"bf16": 1e6, "fp32": 1e6}
    adjacent = Layout(dp_shard=8, ep=2)
    strided = attrs.evolve(adjacent, ep_adjacent=False)
    transfers = estimate_traffic(mixture, adjacent)
    assert estimate_traffic(mixture, strided) == transfers
    sent = {
        axis: sum(one.sent for one in transfers if one.axis == axis)
        for axis in ("ep", "expert_fsdp")
    }
    assert min(sent.values()) > 0
    inside, between = 1 / 1e9, 1 / 1e8
    near, far = (
        estimate_seconds(mixture, layout, toy(flops=slow), efficiency=0.5).exposed
        for layout in (adjacent, strided)
    )
    # The next operation waits for tokens; of the gradients' time a tenth is not hidden.
    more = (sent["ep"] - 0.1 * sent["expert_fsdp"]) * (between - inside)
    assert far - near == pytest.approx(more, rel=1e-6)


def test_more_recomputation_saves_fewer_activations():
    saved = [estimate_memory(job(recompute=policy), Layout()).activations for policy in POLICIES]
    assert saved == sorted(saved, reverse=True)
    assert len(set(saved)) == len(POLICIES)


POLICIES = ("none", "selective", "0.4", "products/2", "attention", "full")


def test_a_degree_divides_what_it_should():
    big = job(config=make_decoder_config("llama-3.1-8b"), row_length=8192, precision=BF16)
    solo = estimate_memory(big, Layout())
    assert estimate_memory(big, Layout(tp=8)).parameters == pytest.approx(
        solo.parameters / 8, rel=1e-3
    )
    assert estimate_memory(big, Layout(ring=8)).activations * 8 == pytest.approx(solo.activations)
    assert estimate_memory(big, Layout(dp_replicate=8)).parameters == solo.parameters
    whole, cut = (
        estimate_memory(attrs.evolve(big, loss=loss), Layout()) for loss in ("plain", "linear")
    )
    assert whole.logits > 2 * cut.logits


def test_a_layout_that_does_not_fit_names_what_exceeds_what():
    one = attrs.evolve(get_hardware("h100"), ranks_per_node=1)
    large = Job(config=make_decoder_config("llama-3.1-8b"), row_length=8192, rows=1)
    plans = rank_layouts(large, list_layouts(1), one)
    assert not any(found.fits for found in plans)
    peaks = [found.memory.peak for found in plans]
    assert peaks == sorted(peaks)
    assert f"{peaks[0] / 2**30:.1f} GiB" in plans[0].refusal
    assert "exceed 71.1 GiB; most are optimizer: 59.8 GiB" in plans[0].refusal
    enough = attrs.evolve(one, memory=peaks[0])
    fitting = rank_layouts(large, list_layouts(1), enough, headroom=0.0)
    assert [found.fits for found in fitting] == [peak == peaks[0] for peak in peaks]
    assert not fitting[-1].fits


# -------------------------------------------------------------------------------- time


def test_compute_is_the_models_operations_over_the_rate():
    found = estimate_seconds(job(), Layout(), toy(), efficiency=0.5)
    block = 4 * 64 * 64 + 3 * 64 * 128 + 2 * 64
    tokens = 128 * 16
    flops = 6 * (4 * block + 256 * 64) * tokens + 12 * 4 * 64 * (128 * 129 / 2) * 16
    assert found.step == found.compute == pytest.approx(flops / 0.5e12)
    again = {
        mode: estimate_seconds(job(recompute=mode), Layout(), toy(), efficiency=0.5).compute
        for mode in ("full", "selective", "attention", "products", "attention+products/2")
    }
    assert again["full"] == pytest.approx(found.compute * 4 / 3)
    assert again["selective"] == found.compute
    attention = 4 * 4 * 64 * (128 * 129 / 2) * 16 / 0.5e12
    assert again["products"] == pytest.approx(found.compute + attention)
    assert again["attention"] == pytest.approx(again["full"] - attention)
    # of wq, wk, wv, wo, gate and up the second, the fourth and the sixth: 4 of 8 units of work
    half = (again["attention"] + found.compute) / 2
    assert again["attention+products/2"] == pytest.approx(half)


@pytest.mark.parametrize(
    ("kind", "sent"),
    [
        ("all_gather", 750.0),  # each rank passes on three of four shards
        ("reduce_scatter", 750.0),
        ("all_reduce", 1500.0),  # a reduce-scatter, then an all-gather
        ("all_to_all", 750.0),  # its own quarter stays
        ("send", 1000.0),
    ],
)
def test_what_leaves_a_rank_is_what_ring_algorithms_send(kind, sent):
    assert Transfer("tp", 4, kind, count=1, bytes=1000).sent == sent


def test_a_message_takes_its_bytes_over_the_bandwidth_of_its_wire():
    sent = sum(one.sent for one in estimate_traffic(job(), Layout(tp=4)))
    near = estimate_seconds(job(), Layout(tp=4), toy(), efficiency=0.5)
    far = estimate_seconds(job(), Layout(tp=4), toy(ranks_per_node=2), efficiency=0.5)
    assert near.exposed == pytest.approx(sent / 1e9)
    assert far.exposed == pytest.approx(sent / 1e8)
    assert near.hidden == 0


def test_what_can_be_hidden_is_hidden_only_behind_arithmetic():
    fast = estimate_seconds(job(), Layout(dp_shard=4), toy(intra_node=1e15), efficiency=0.5)
    assert fast.exposed == pytest.approx(0, abs=fast.compute * 1e-3)
    slow = estimate_seconds(job(), Layout(dp_shard=4), toy(intra_node=1e5), efficiency=0.5)
    sent = sum(one.sent for one in estimate_traffic(job(), Layout(dp_shard=4)))
    assert slow.compute + slow.exposed == pytest.approx(sent / 1e5, rel=0.01)


def test_a_pipeline_waits_at_its_ends():
    wires = toy(intra_node=1e20)
    bubbles = {
        schedule: estimate_seconds(job(), Layout(pp=2, schedule=schedule), wires, efficiency=0.5)
        for schedule in ("1f1b", "interleaved_1f1b", "zero_bubble_v")
    }
    shares = [found.bubble / found.compute for found in bubbles.values()]
    assert shares == pytest.approx([1 / 16, 1 / 32, 1 / 96])
    assert estimate_seconds(job(), Layout(dp_shard=2), wires, efficiency=0.5).bubble == 0


def test_documents_make_attention_cheaper():
    one, four = (
        estimate_seconds(job(documents=n, row_length=4096), Layout(), toy(), efficiency=0.5).compute
        for n in (1, 4)
    )
    assert four < one


# -------------------------------------------------------------------------------- the list


def test_the_fastest_that_fits_is_first_and_the_impossible_last():
    plans = rank_layouts(job(), list_layouts(8), toy())
    assert len(plans) == 56 * 3
    fitting = [one for one in plans if one.fits]
    seconds = [one.seconds.step for one in fitting]
    assert seconds == sorted(seconds)
    assert plans[: len(fitting)] == fitting
    assert plans[-1].memory is None
    assert all(0 < one.utilization <= 0.5 for one in fitting)
    tokens = 16 * 128
    assert plans[0].tokens_per_second == pytest.approx(tokens / plans[0].seconds.step)


rank = partial(rank_layouts, job(), [Layout()], toy())


@pytest.mark.parametrize(
    ("fail", "words"),
    [
        (partial(rank, headroom=1.0), "headroom at least 0 and below 1, got 0.5 and 1.0"),
        (partial(rank, efficiency=0.0), "efficiency must be above 0 .* got 0.0 and 0.1"),
        (partial(job, rows=0), "rows must be above 0, got 0"),
        (partial(rank, recompute=["some"]), 'must be "none", "selective" or "full"; .* got \'some'),
        (partial(rank, recompute=["1.5"]), "the fraction of the bytes to save, .* got '1.5'"),
        (partial(job, offload_activations=-1), "offload_activations must be at least 0 .* got -1"),
        (partial(job, precision=Precision()), "precision must be of a compute other than auto"),
    ],
)
def test_a_wrong_argument_is_named(fail, words):
    with pytest.raises(ValueError, match=words):
        fail()


def test_machines_are_records_that_anyone_can_write():
    names = ("a100", "h100", "h200", "b200", "cpu")
    assert tuple(get_hardware(name).name for name in names) == names
    assert all(get_hardware(name.upper()) == get_hardware(name) for name in names)
    with pytest.raises(ValueError, match="no machine is named 'abacus'; there are a100, h100"):
        get_hardware("abacus")
    with pytest.raises(ValueError, match="every figure must be positive"):
        toy(intra_node=0.0)
    with pytest.raises(ValueError, match='flops needs "fp32" and "bf16"'):
        toy(flops={"bf16": 1.0})


def test_both_reductions_are_tried_where_they_differ():
    """An 8B model with its gradients whole until the last microbatch does not fit on 8 x H100."""
    large = Job(config=make_decoder_config("llama-3.1-8b"), row_length=8192, rows=32)
    layouts = [Layout(dp_shard=8), Layout(dp_replicate=8), Layout(tp=8)]
    plans = rank_layouts(
        large, layouts, get_hardware("H100"), recompute=["selective"], reduce=("last", "each")
    )
    assert sorted((str(one.layout), one.layout.reduce, one.fits) for one in plans) == [
        ("dp_replicate 8", "each", False),
        ("dp_replicate 8", "last", False),
        ("dp_shard 8", "each", True),
        ("dp_shard 8", "last", False),
        ("tp 8", "last", True),  # without FSDP there is one way
    ]
    assert (str(plans[0].layout), plans[0].layout.reduce) == ("dp_shard 8", "each")
    once = attrs.evolve(large, rows=8)  # one microbatch on each rank
    assert len(rank_layouts(once, layouts[:1], get_hardware("h100"), reduce=("last", "each"))) == 3


# -------------------------------------------------------------------------------- the command


def test_the_table_shows_units_and_one_line_for_what_does_not_fit():
    small = toy(memory=4 * 2**20)
    table = format_estimates(rank_layouts(job(), list_layouts(2), small), limit=3).splitlines()
    assert table[0].split()[:5] == ["layout", "recompute", "reduce", "peak", "GiB"]
    assert len({len(line) for line in table[:2]}) == 1
    assert any(line.startswith("  ... and ") for line in table)
    assert "does not fit:" in table
    assert any("exceed 0.00352 GiB; most are " in line for line in table)
    nothing = format_estimates(rank_layouts(job(), list_layouts(7), toy(memory=2**20)))
    assert nothing.startswith("nothing fits")
    assert "not possible:\n  3 x  " in nothing


def test_the_command_prints_a_table_and_json(capsysbinary):
    flags = "--size 10m --world 4 --hardware cpu --row-length 256 --tp 2"
    words = ["plan", *flags.split()]
    assert main(words) == 0
    out = capsysbinary.readouterr().out.decode()
    assert out.startswith("10m, 10.0 million parameters, on 4 x cpu with 16 GiB, of which 10% stay")
    assert "\nlayout " in out
    assert "dp_shard 2 x tp 2" in out
    flags = ["--memory", "4", "--recompute", "full", "--reduce", "last"]
    assert main([*words, "--json", *flags]) == 0
    found = json.loads(capsysbinary.readouterr().out)
    assert len(found) == 5
    assert {one["layout"]["tp"] for one in found} == {2}
    assert {(one["recompute"], one["compute"]) for one in found} == {("full", "fp32")}
    assert all(one["fits"] == (one["refusal"] == "") for one in found)


def test_the_command_takes_fold_sp_and_cpu_offload(capsysbinary):
    flags = "--size 10m --world 4 --hardware cpu --row-length 256 --ring 2"
    words = ["plan", *flags.split()]
    assert main([*words, "--cpu-offload", "--fold-sp", "none"]) == 0
    out = capsysbinary.readouterr().out.decode()
    assert "peak GiB    host  params" in out
    assert "dp_shard 2 x ring 2, fold none" in out
    assert " x  cpu_offload is FSDP's" in out
    flags = ["--dp-shard", "2", "--recompute", "full", "--reduce", "last", "--cpu-offload"]
    assert main([*words, *flags, "--json"]) == 0
    (one,) = json.loads(capsysbinary.readouterr().out)
    memory = one["memory"]
    assert memory["host"] == 2 * memory["parameters"] + memory["optimizer"]
    assert one["layout"]["fold_sp"] == "all"


def test_the_command_lists_both_reductions_where_they_differ(capsysbinary):
    flags = "--size llama-3.1-8b --world 8 --hardware H100 --row-length 8192 --json"
    only = "--recompute selective --dp-replicate 1 --pp 1 --ring 1 --ulysses 1"
    assert main(["plan", *flags.split(), *only.split()]) == 0
    found = json.loads(capsysbinary.readouterr().out)
    best = found[0]
    assert (best["layout"]["dp_shard"], best["layout"]["reduce"], best["fits"]) == (8, "each", True)
    assert best["memory"]["peak"] < 50 * 2**30
    of_tp = [one["layout"]["reduce"] for one in found if one["layout"]["tp"] == 8]
    assert of_tp == ["last"]  # nothing is sharded by FSDP: the same figures twice
    reduced = [(one["layout"]["dp_shard"], one["layout"]["reduce"]) for one in found]
    assert {(8, "last"), (8, "each"), (4, "last"), (4, "each")} <= {*reduced}
    assert len({*reduced}) == len(reduced)


def test_the_command_plans_the_model_of_a_folder(capsysbinary, tmp_path):
    folder = tmp_path / "model"
    config = make_decoder_config("tiny", vocab_size=320)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(write_decoder_config(config, context=64)))
    words = ["plan", "--hardware", "CPU", "--row-length", "128", "--json"]
    assert main([*words, "--init", str(folder)]) == 0
    found = json.loads(capsysbinary.readouterr().out)
    assert main([*words, "--size", "tiny", "--vocab-size", "320"]) == 0
    assert json.loads(capsysbinary.readouterr().out) == found
    assert main([*words, "--init", str(folder), "--vocab-size", "640"]) == 0
    assert json.loads(capsysbinary.readouterr().out) != found
    assert main([*words, "--init", str(tmp_path / "none")]) == 66
    assert b"there is no folder" in capsysbinary.readouterr().out
    assert main([*words, "--init", str(folder), "--size", "tiny"]) == 64


def test_the_command_takes_a_recipes_flags_of_recomputation_offload_and_mean(capsysbinary):
    words = [
        "plan",
        *["--size", "10m", "--hardware", "cpu", "--row-length", "1024", "--json", "--recompute"],
    ]
    assert main([*words, "0.2", "attention"]) == 0
    plain = {x["recompute"]: x["memory"] for x in json.loads(capsysbinary.readouterr().out)}
    more = "--offload-activations", "100000", "--mean", "0.99"
    assert main([*words, "0.2", "attention", *more]) == 0
    for one in json.loads(capsysbinary.readouterr().out):
        before, now = plain[one["recompute"]], one["memory"]
        assert now["optimizer"] == before["optimizer"] + before["parameters"]
        config = make_decoder_config("10m")
        inputs = config.layers * 1024 * config.width * 4
        assert now["host"] == inputs - 100_000


def test_the_command_says_what_is_wrong(capsysbinary):
    assert main(["plan", "--method", "qlora", "--rank", "0"]) == 64
    assert b"rank must be a positive number" in capsysbinary.readouterr().out
    assert main(["plan", "--world", "4", "--tp", "3"]) == 64
    output = capsysbinary.readouterr().out
    assert b"no layout of 4 ranks has tp 3, which must divide 4" in output
    assert main(["plan", "--recompute", "attention/2"]) == 64
    assert b"recompute must be" in capsysbinary.readouterr().out
    assert main(["plan", "--world", "0"]) == 64
    assert b"--world must be at least 1, got 0" in capsysbinary.readouterr().out
    assert main(["plan", "--size", "10n"]) == 64
    assert main(["plan", "--hardware", "abacus"]) == 64


def test_storage_reduction_and_moments_in_bf16_take_half():
    all_bf16 = Precision(compute="bf16", storage="bf16", reduction="bf16", moments="bf16")
    wide, low = (job(precision=one) for one in (BF16, all_bf16))
    for layout in (Layout(), Layout(dp_shard=2)):  # gradients are in fp32
        was, now = estimate_memory(wide, layout), estimate_memory(low, layout)
        assert (2 * now.parameters, now.gradients) == (was.parameters, was.gradients)
        assert now.optimizer < 0.51 * was.optimizer
    sent = [
        sum(x.sent for x in estimate_traffic(one, Layout(dp_shard=2)) if x.kind == "reduce_scatter")
        for one in (wide, low)
    ]
    assert sent[0] == 2 * sent[1]
    with pytest.raises(ConfigError, match="muon does not support moments in bf16"):
        estimate_memory(attrs.evolve(low, optimizer="muon", precision=all_bf16), Layout())
