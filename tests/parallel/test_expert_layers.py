"""Layers of experts in layouts: what the certificate does not show of them."""

import os
from functools import partial

import attrs
import numpy as np
import pytest
import torch
from every_pair import ONLY_ALL, WITH_ALL
from torch import nn

import trainkit as tk
from trainkit.batch import split_batch
from trainkit.data import TokenCorpus
from trainkit.losses import add_router_losses, next_token
from trainkit.mesh import solo_parallel
from trainkit.models import Decoder, biased_topk, build_decoder, call_routed, init_weights
from trainkit.models.dispatch import ep_combine, ep_dispatch
from trainkit.models.experts import ExpertWeights
from trainkit.packing import pack_bins
from trainkit.parallel import (
    build_stages,
    expert_parallel,
    fsdp,
    get_local_box,
    grad_reduction,
    make_call,
    mixed_precision,
    recompute,
    sequence_parallel,
    tensor_parallel,
)
from trainkit.parallel.grad_reduction import Reduction
from trainkit.post.adapters import Lora, lora
from trainkit.post.generation import generate
from trainkit.tools.testing import certify, count_collectives, run_ranks, train
from trainkit.tools.testing.builtin import (
    CAPACITY,
    CONFIG,
    EXPERTS,
    decoder_batch,
    decoder_plan,
    expert_loss,
    with_experts,
)
from trainkit.tools.testing.cases import LayoutCase
from trainkit.tools.testing.certificate import TIERS, format_text
from trainkit.tools.testing.distribute_batch import distribute_batch
from trainkit.tools.testing.train import certificate_weights
from trainkit.types import Axis, ConfigError, Layout, Share

CONFIG = attrs.evolve(CONFIG, layers=2, experts=EXPERTS)  # a dense layer, and one of experts
QUIET = attrs.evolve(CONFIG, experts=attrs.evolve(EXPERTS, jitter=0.0))
LAYERS = len(CONFIG.expert_layers)


@pytest.mark.parametrize(
    ("axis", "transform"), [("tp", tensor_parallel), ("ring", sequence_parallel)]
)
def test_documents_that_ranks_would_share_are_not_balanced_apart(axis, transform):
    with torch.device("meta"):
        model = Decoder(CONFIG, balance="document")
    ps = attrs.evolve(solo_parallel(), **{axis: Axis(axis, Share(0, 2))})
    with pytest.raises(ConfigError, match=r'layers.1.mlp balances its experts by "document"'):
        transform()(model, ps)


# ----------------------------------------------------------------------------- expert parallelism


@pytest.mark.parametrize(
    ("model", "ep", "message"),
    [
        (partial(nn.Linear, 1, 1), 2, "ep = 2, and Linear has no layer of experts"),
        (partial(Decoder, CONFIG), 3, "8 experts of layers.1.mlp do not divide by ep = 3"),
    ],
)
def test_experts_that_cannot_be_sharded_are_refused(model, ep, message):
    ps = attrs.evolve(solo_parallel(), ep=Axis("ep", Share(0, ep)))
    with torch.device("meta"), pytest.raises(ConfigError, match=message):
        expert_parallel()(model(), ps)


def test_a_stage_of_a_dense_decoder_is_refused_too():
    ps = attrs.evolve(solo_parallel(), ep=Axis("ep", Share(0, 2)), pp=Axis("pp", Share(0, 2)))
    with torch.device("meta"), pytest.raises(ConfigError, match="Decoder has no layer of experts"):
        expert_parallel()(Decoder(attrs.evolve(CONFIG, experts=None)), ps)


def test_half_a_pair_and_a_wire_of_integers_are_refused():
    with pytest.raises(ConfigError, match="one of them was given alone; give both"):
        expert_parallel(dispatch=lambda *_: None)
    with pytest.raises(ConfigError, match=r"rows cannot travel in .*int8; take bf16"):
        expert_parallel(wire_dtype=torch.int8)


def test_counts_that_are_not_of_the_rows_are_refused():
    model, batch = build_decoder(CONFIG, seed=0).eval(), decoder_batch(0)
    for change in (lambda counts: counts - 1, lambda counts: counts[:4]):

        def wrong(x, indices, counts, change=change):
            rows, counts, route = ep_dispatch(x, indices, counts)
            return rows, change(counts), route

        model.layers["1"].mlp.dispatch = wrong
        with pytest.raises(ValueError, match="counts must be those of the 8 local experts"):
            call_routed(model, batch)


def stage_of(ps, *plan, config=CONFIG, **options):
    weights, plan = init_weights(config, seed=0), [*plan, fsdp(**options)]
    return build_stages(partial(Decoder, config), ps, plan, weights=weights)


def gradients(ps, *plan, batch=None, **options):
    """Return the gradients of one step, whole, by name."""
    (model,) = stages = stage_of(ps, *plan, **options)
    batches = distribute_batch(batch or decoder_batch(0), ps.data_shard)
    run = tk.make_forward_backward(stages, add_router_losses(next_token), call=call_routed)
    run(batches, denominator={"loss": torch.tensor(100)})
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return {name: p.grad.full_tensor() for name, p in trained.items()}


def with_a_pair_of_ones_own():
    """Return how often a pair was called, and whether it changed a gradient."""
    calls = []

    def there(x, indices, counts, axis):
        calls.append("there")
        rows, own, route = ep_dispatch(x, indices, counts, axis)
        return rows, own, (route, "of my own")

    def back(rows, weights, route, axis):
        calls.append("back")
        assert route[1] == "of my own"
        return ep_combine(rows, weights, route[0], axis)

    with tk.parallel_session(ep=2) as ps:
        ours = gradients(ps, expert_parallel())
        theirs = gradients(ps, expert_parallel(dispatch=there, combine=back))
        return calls, all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_pair_of_ones_own_takes_tokens_there_and_back():
    calls, same = run_ranks(with_a_pair_of_ones_own, 2)[0]
    assert calls == ["there", "back"] * LAYERS
    assert same


def exchanges():
    """Return the all-to-alls of a step by what is recomputed, and what a layer holds."""
    with tk.parallel_session(ep=2) as ps:
        plans = {
            mode: [expert_parallel(), recompute(mode)] for mode in ("none", "full", "selective")
        }

        def with_adapters(p):
            return lora(Lora("**.experts.*", rank=2, dropout=p), trained="embedding")

        plans |= {f"{x}, dropout": [with_adapters(0.1), *plans[x]] for x in ("full", "selective")}
        plans["adapters"] = [with_adapters(0.0), *plans["none"]]
        count = {}
        for mode, plan in plans.items():
            rows = count_collectives(partial(gradients, ps, *plan), ps).rows
            count[mode] = sum(row.count for row in rows if row.kind == "all_to_all")
        (model,) = stage_of(ps, expert_parallel())
        gate = model.layers["1"].mlp.experts.gate
        held = gate.shape, gate.to_local().shape, get_local_box(gate).offset[0]
        return count, held


def test_full_recomputation_sends_tokens_again_and_selective_keeps_what_came():
    (count, _), _ = found = run_ranks(exchanges, 2)
    # A rank holds neighbours, so that a group of experts is on neighbouring ranks.
    assert [held for _, held in found] == [((8, 16, 32), (4, 16, 32), first) for first in (0, 4)]
    # Counts and rows, and rows back; in backward both ways of the rows.
    assert count["none"] == (3 + 2) * LAYERS
    assert count["full"] == (3 + 3 + 2) * LAYERS
    assert count["selective"] == count["none"]
    # Noise keys travel for adapters that drop something, and for nobody else.
    assert count["adapters"] == count["none"]
    assert count["full, dropout"] == count["full"] + 2 * LAYERS
    assert count["selective, dropout"] == count["selective"] + LAYERS


def drawn(ep):
    with tk.parallel_session(ep=ep) as ps:
        stages = stage_of(ps, expert_parallel())
        call = make_call(stages)
        return generate(stages[0], [[1, 2, 3], [4]], max_new_tokens=6, context=16, call=call)


def test_text_is_drawn_with_experts_on_other_ranks():
    alone = build_decoder(CONFIG, seed=0)
    want = generate(alone, [[1, 2, 3], [4]], max_new_tokens=6, context=16)
    assert run_ranks(partial(drawn, 2), 2) == [want] * 2


def test_a_token_reaches_no_more_nodes_than_the_groups_it_may_choose():
    ep, groups, chosen = 8, 4, 2  # a group of 8 experts on each node of two ranks
    logits = torch.randn(200, 32, generator=torch.Generator().manual_seed(0))
    ranks = biased_topk(logits, 8, groups=groups, groups_chosen=chosen).indices // (32 // ep)
    nodes = ranks // (ep // groups)
    assert max(len(set(row)) for row in nodes.tolist()) == chosen
    assert max(len(set(row // 2)) for row in biased_topk(logits, 8).indices.numpy() // 4) > chosen


IN_GROUPS = attrs.evolve(EXPERTS, count=16, top_k=4, groups=4, groups_chosen=2)


def of_groups(experts):
    return Decoder(attrs.evolve(CONFIG, experts=experts), head="hidden")


def to_few_ranks(x, indices, counts, axis):
    """Dispatch tokens, none of which may reach more ranks than it may choose groups."""
    rank_of = torch.cat([torch.arange(16) // (16 // axis.count), torch.tensor([-1])])
    for token in rank_of[indices].tolist():
        if len({*token} - {-1}) > IN_GROUPS.groups_chosen:
            raise ValueError(f"to_few_ranks: a token reaches the ranks {token}")
    return ep_dispatch(x, indices, counts, axis)


def node_limited_plan(_ps, case):
    return [expert_parallel(dispatch=to_few_ranks, combine=partial(ep_combine)), fsdp(case.layout)]


@pytest.mark.parametrize("groups", [4, 1])
def test_groups_of_experts_on_the_ranks_of_ep_keep_tokens_on_few_of_them(groups):
    experts = attrs.evolve(IN_GROUPS, groups=groups, groups_chosen=min(groups, 2))
    certificate = certify(
        partial(of_groups, experts),
        decoder_batch,
        [LayoutCase(Layout(dp_shard=4, ep=4))],
        plan=node_limited_plan,
        loss=expert_loss,
        call=call_routed,
        steps=1,
    )
    assert certificate.ok == (groups == 4), format_text(certificate)
    assert groups == 4 or "a token reaches the ranks" in certificate.rows[0].error


# ------------------------------------------------------------------------------- padding of pieces


def documents(multiple_of):
    """Return documents as a batch of rows, pieces padded to multiples of so many tokens."""
    random = np.random.default_rng(0)
    lengths = random.integers(1, 60, size=9)
    corpus = TokenCorpus(random.integers(0, 64, lengths.sum()), np.append(0, lengths.cumsum()))
    bins = pack_bins(lengths, CAPACITY, multiple_of=multiple_of)
    return tk.collate_bins(corpus, bins, range(len(bins)))


def sums_of(batch, layout, *, config=QUIET, balance="batch", rows=1):
    """Return a step's sums, the norm of its gradient, and what it divides by, in fp64."""
    with tk.parallel_session(layout) as ps:
        plan = decoder_plan(ps, LayoutCase(layout))
        stages = build_stages(
            lambda: Decoder(config, head="hidden", balance=balance).double(),
            ps,
            plan,
            weights=certificate_weights,
        )
        loads = torch.arange(len(config.expert_layers) * 8).view(-1, 8)
        tk.models.update_routers_(stages, loads, rate=0.05)
        batches = distribute_batch(batch, ps.data_shard, rows_per_microbatch=rows)
        trained = tk.all_sum(tk.count_valid_tokens(batches), ps.loss)
        seen = tk.all_sum(tk.count_tokens(batches), ps.loss)
        run = tk.make_forward_backward(stages, expert_loss, call=call_routed)
        sums = run(batches, denominator={"loss": trained, "balance": seen, "router_z": seen})
        params = tk.get_parameters(stages)
        tk.sync_sp_grads(params, ps.sp_unfolded)
        norm = tk.grad_norm(params, axis=ps.pp)
        return {**tk.reduce_metrics(sums, ps.loss), "norm": norm, "trained": trained, "seen": seen}


def assert_equal_sums(found, wanted):
    assert found.keys() == wanted.keys()
    for name, value in found.items():
        exact = name.partition("/")[2] == "count" or name in ("load", "dropped", "trained", "seen")
        torch.testing.assert_close(value, wanted[name], rtol=0 if exact else 1e-12, atol=0)


ALIGNED = [Layout(ring=2), Layout(ulysses=2), Layout(tp=2), Layout(pp=2), Layout(dp_shard=2, ep=2)]


def aligned_sums():
    return [sums_of(documents(16), layout) for layout in ALIGNED]


def test_what_aligns_pieces_is_in_no_sum_of_any_layout():
    whole, aligned = documents(1), documents(16)
    assert (aligned.document_ids < -1).sum() > 50
    want = sums_of(whole, Layout())
    assert int(want["seen"]) == int((whole.document_ids >= 0).sum())
    assert (want["load"].sum(-1) == 2 * want["seen"]).all()
    assert_equal_sums(sums_of(aligned, Layout()), want)
    for found in run_ranks(aligned_sums, 2):
        for sums in found:
            assert_equal_sums(sums, want)


@pytest.mark.parametrize("balance", ["document", "microbatch"])
def test_what_aligns_pieces_is_in_no_balance(balance):
    found = [sums_of(documents(n), Layout(), balance=balance, rows=None) for n in (16, 1)]
    assert_equal_sums(*found)


def test_what_aligns_pieces_takes_no_room_of_an_expert():
    small = attrs.evolve(QUIET, layers=2, experts=attrs.evolve(QUIET.experts, capacity=1.0))
    found = [sums_of(documents(n), Layout(), config=small, rows=None) for n in (16, 1)]
    assert found[0]["dropped"].sum() > 10
    for name in ("load", "dropped", "seen"):  # others are of which are dropped: rows are in order
        assert torch.equal(found[0][name], found[1][name]), name


# ----------------------------------------------------------------- choices that come with a batch


def chosen_beforehand(step):
    """Return the batch of a step with choices that no router would make."""
    batch = decoder_batch(step)
    first = (batch.token_index.unsqueeze(2) + torch.arange(2)) % 8
    choices = torch.stack([first, (first + 5) % 8], -1)
    return attrs.evolve(batch, extra={**batch.extra, "choices": choices})


TWO_LAYERS = attrs.evolve(CONFIG, layers=3)  # of experts, each with choices of its own
SHARED = [
    LayoutCase(Layout(ring=2, ep=2)),
    LayoutCase(Layout(tp=2)),
    LayoutCase(Layout(pp=2), recompute="full"),
]


def test_choices_that_come_with_a_batch_are_shared_out_as_its_tokens_are():
    certificate = certify(
        partial(with_experts, TWO_LAYERS),
        chosen_beforehand,
        SHARED,
        plan=decoder_plan,
        loss=expert_loss,
        call=call_routed,
        steps=1,
    )
    assert certificate.ok, format_text(certificate)


# -------------------------------------------------------- gradients that are sent in bf16


def own_gradients(ps, stages, step=0, reduce="last"):
    """Return this rank's gradients of one batch, with the noise of a step."""
    key = {"noise_key": decoder_batch(step).extra["noise_key"]}
    (batch,) = distribute_batch(attrs.evolve(decoder_batch(0), extra=key), ps.data_shard)
    batches = split_batch(batch, 1)
    run = tk.make_forward_backward(
        stages, add_router_losses(next_token), call=call_routed, reduce=reduce
    )
    run(batches, denominator={"loss": torch.tensor(100)})
    found = {name: p.grad.to_local() for name, p in stages[0].named_parameters()}
    stages[0].zero_grad()
    return found


def rounded_gradients():
    """Return what the rounding of gradients of experts does to them, and to what is sent."""
    with tk.parallel_session(dp_shard=4, ep=2) as ps:
        still = attrs.evolve(CONFIG, experts=attrs.evolve(EXPERTS, jitter=0.0))
        plain = stage_of(ps, expert_parallel(), config=still)
        rounding = stage_of(ps, expert_parallel(), config=still, expert_wire_dtype=torch.bfloat16)
        sent_bytes = []
        for stages in (plain, rounding):
            rows = count_collectives(partial(own_gradients, ps, stages), ps).rows
            own = {row.kind: row.bytes for row in rows if row.axis == "expert_fsdp"}
            sent_bytes.append([own.get(kind, 0) for kind in ("reduce_scatter", "all_to_all")])
            stages[0].zero_grad()
        wanted = own_gradients(ps, plain)
        found = [own_gradients(ps, rounding, step) for step in (*range(8), 0)]
        each = own_gradients(ps, rounding, reduce="each")

        experts = [name for name in wanted if ".experts." in name]

        def off(gradient):
            """Return how far gradients of experts are off, of their norm."""
            return max(float((gradient[n] - wanted[n]).norm() / wanted[n].norm()) for n in experts)

        assert all(torch.equal(found[0][n], wanted[n]) for n in wanted if n not in experts)
        mean = {name: sum(one[name] for one in found[:8]) / 8 for name in wanted}
        same = [all(torch.equal(found[0][n], other[n]) for n in wanted) for other in found[1:]]
        return sent_bytes, [off(found[0]), off(each), off(mean)], same


def test_gradients_of_experts_that_travel_in_bf16_are_right_in_the_mean():
    for sent_bytes, (once, each, mean), same in run_ranks(rounded_gradients, 4, timeout=200):
        (scattered, none), (nothing, exchanged) = sent_bytes
        assert none == nothing == 0
        assert exchanged == scattered / 2 > 0
        assert 2.0**-12 < once < 2.0**-7
        assert 2.0**-12 < each < 2.0**-7
        assert mean < once / 2  # of 8: about the third part
        assert same == [False] * 7 + [True]


def refused_to_round():
    with tk.parallel_session(dp_shard=4, ep=2) as ps:
        messages = []
        low = [expert_parallel(), mixed_precision(torch.bfloat16)]
        gradients_without_key = partial(
            gradients,
            ps,
            batch=attrs.evolve(decoder_batch(0), extra={}),
            expert_wire_dtype=torch.bfloat16,
        )
        for run in (
            partial(gradients_without_key, *low, reduce_dtype=torch.bfloat16),
            partial(gradients_without_key, expert_parallel()),
        ):
            with pytest.raises(ValueError, match="expert_wire_dtype") as caught:
                run()
            messages.append(str(caught.value))
        (model,) = stage_of(ps, expert_parallel(), expert_wire_dtype=torch.bfloat16)
        (batch,) = distribute_batch(decoder_batch(0), ps.data_shard)
        with pytest.raises(RuntimeError, match="expert_wire_dtype") as caught:
            call_routed(model, batch).output.sum().backward()
        return [*messages, str(caught.value)]


def test_gradients_that_cannot_be_rounded_are_refused():
    with pytest.raises(ConfigError, match=r"gradients cannot travel in .*float16; take bf16"):
        fsdp(expert_wire_dtype=torch.float16)
    for low, keyless, alone in run_ranks(refused_to_round, 4):
        assert "gradients of layers.1.mlp are summed in torch.bfloat16; leave it out" in low
        assert 'the batch\'s "noise_key", which is missing' in keyless
        assert "rounded by the key of a step; call forward_backward" in alone


# ------------------------------------------------------------------------------ the grouped way

SOUND = {
    "sharded": LayoutCase(Layout(dp_shard=4, ep=2)),
    "replica": LayoutCase(Layout(dp_replicate=2, dp_shard=2, ep=2)),
    "tp": LayoutCase(Layout(dp_shard=2, tp=2, ep=2)),
}
PATCH = pytest.MonkeyPatch()


def not_summed_over_tp(module, _ps):
    for part in module.modules():
        if isinstance(part, ExpertWeights):
            grad_reduction._PARTIAL.write_(part, ())
    return module


def not_summed_over_replicas(module, _ps):
    run = Reduction._run_post_backward

    def without(reduction, unit, *, now, last):
        is_expert = "expert_fsdp" in unit.mesh_info.mesh.mesh_dim_names
        return run(reduction, unit, now=now, last=last and not is_expert)

    PATCH.setattr(Reduction, "_run_post_backward", without)
    return module


def summed_again(axis, module, ps):
    """Sum the gradients of experts over an axis once more, when all sums are done."""
    own = [p for x in module.modules() if isinstance(x, ExpertWeights) for p in x.parameters()]
    sync = train.sync_sp_grads

    def twice(params, sp_axis):
        sync(params, sp_axis)
        sync(own, getattr(ps, axis))

    PATCH.setattr(train, "sync_sp_grads", twice)
    return module


MISTAKES = {
    "not summed over tp": (not_summed_over_tp, "tp"),
    "not summed over replicas": (not_summed_over_replicas, "replica"),
    "summed twice over replicas": (partial(summed_again, "dp_replicate"), "replica"),
    "summed twice over shards": (partial(summed_again, "expert_fsdp"), "sharded"),
    "summed over ep": (partial(summed_again, "ep"), "sharded"),
}
BESIDE = {"summed twice over replicas", "summed twice over shards"}  # sums too many, as over ep
PLANTED = [x for x in MISTAKES if x not in BESIDE or os.environ.get(WITH_ALL)]


def planting_plan(ps, case):
    PATCH.undo()
    planted = [MISTAKES[case.note][0]] if case.note else []
    return [*decoder_plan(ps, case), *planted]


@pytest.fixture(scope="module")
def certificate():
    wrong = [attrs.evolve(SOUND[MISTAKES[note][1]], note=note) for note in PLANTED]
    return certify(
        partial(with_experts, CONFIG),
        decoder_batch,
        [*SOUND.values(), *wrong],
        plan=planting_plan,
        loss=expert_loss,
        call=call_routed,
        tier="fp32",
        steps=1,
    )


def test_experts_multiplied_at_once_are_within_the_bounds_of_fp32(certificate):
    wrong = {row.layout for row in certificate.red}
    assert not wrong & {case.name for case in SOUND.values()}, format_text(certificate)


@pytest.mark.parametrize(
    "note", [pytest.param(x, marks=ONLY_ALL if x in BESIDE else ()) for x in MISTAKES]
)
def test_a_reduction_too_few_or_too_many_exceeds_the_bounds_a_hundred_times(certificate, note):
    (row,) = (row for row in certificate.rows if row.layout.endswith(f", {note}"))
    assert not row.error
    bounds = TIERS["fp32"]
    assert max(row.grad_norm / bounds.norm_bound, row.state / bounds.state_bound) > 100
