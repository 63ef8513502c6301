"""Experts: the grouped way against the plain one, and what is counted.

`tests/hub` compares with `transformers`.
"""

import attrs
import pytest
import torch
from torch import nn

from trainkit import parallel
from trainkit.batch import count_tokens, count_valid_tokens, make_padding_batch
from trainkit.batch.denominators import divide_terms, make_divisors
from trainkit.losses import (
    add_router_losses,
    add_terms,
    next_token,
    next_token_linear,
    z_term,
)
from trainkit.mesh import solo_parallel
from trainkit.metrics import to_host
from trainkit.models import (
    Decoder,
    Experts,
    RoutingTape,
    biased_topk,
    build_decoder,
    call_model,
    call_routed,
    experts,
    grouped_linear,
    softmax_topk,
    update_routers_,
)
from trainkit.models.decoder import decoder_stage
from trainkit.models.experts import balance_loss_sum
from trainkit.models.routers import hash_experts
from trainkit.parallel import make_call, make_stages, recompute
from trainkit.post.generation import generate
from trainkit.step import evaluate, forward_backward
from trainkit.tools.testing import builtin
from trainkit.tools.testing.builtin import decoder_batch
from trainkit.tools.testing.distribute_batch import distribute_batch
from trainkit.types import SOLO, ConfigError, DataShard

CONFIG = attrs.evolve(
    builtin.CONFIG,
    layers=3,
    qk_norm=False,
    experts=Experts(count=8, top_k=2, width=16, first=1),
)
BIASED = attrs.evolve(CONFIG, experts=attrs.evolve(builtin.EXPERTS, first=0, scale=2.5, jitter=0.0))


def through(model, batch, tape):
    """Enter a batch into a model as `call_routed` does, with a tape of one's own."""
    return model(
        batch.input_ids,
        position_ids=batch.position_ids,
        spans=batch.spans,
        is_token=batch.document_ids >= 0,
        tape=tape,
    )


# --------------------------------------------------------------------------- one multiplication


def rows_of(counts, beyond, size, dtype=torch.float32):
    torch.manual_seed(0)
    rows = torch.randn(sum(counts) + beyond, size, dtype=dtype, requires_grad=True)
    weight = torch.randn(len(counts), 12, size, dtype=dtype, requires_grad=True)
    return rows, torch.tensor(counts), weight


@pytest.mark.parametrize("counts", [[3, 0, 5, 1], [0, 0, 0, 0], [9, 0, 0, 0]])
@pytest.mark.parametrize("beyond", [0, 4])
def test_grouped_and_plain_agree_in_values_and_gradients(counts, beyond, monkeypatch):
    found = []
    for grouped in (True, False):
        rows, sizes, weight = rows_of(counts, beyond, 16)
        if not grouped:
            monkeypatch.setattr(experts, "can_group", lambda *_: False)
        elif len(rows):
            assert experts.can_group(rows, weight)
        out = grouped_linear(rows, sizes, weight)
        (out * torch.linspace(-1, 1, 12)).sum().backward()
        found.append((out, rows.grad, weight.grad))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    out, d_rows, _ = found[0]
    nobodys = slice(sum(counts), None)
    assert not out[nobodys].any()
    assert not d_rows[nobodys].any()  # torch leaves them uninitialised


def test_sizes_that_torch_does_not_group_are_multiplied_one_by_one():
    rows, sizes, weight = rows_of([2, 1], 0, 15)
    assert not experts.can_group(rows, weight)
    want = torch.cat([rows[:2] @ weight[0].T, rows[2:] @ weight[1].T])
    torch.testing.assert_close(grouped_linear(rows, sizes, weight), want)


def test_a_layer_of_experts_is_the_same_grouped_and_one_by_one(monkeypatch):
    torch.manual_seed(0)
    layer, found = experts.ExpertWeights(4, 16, 24, bias=True, clamp=0.5, sigmoid_scale=1.7), []
    for p in layer.parameters():
        nn.init.normal_(p, std=0.3)
    rows, counts = torch.randn(9, 16, requires_grad=True), torch.tensor([4, 0, 3, 2])
    for grouped in (True, False):
        if not grouped:
            monkeypatch.setattr(experts, "can_group", lambda *_: False)
        out = layer(rows, counts)
        grads = torch.autograd.grad((out * out.detach()).sum(), [rows, *layer.parameters()])
        found.append((out, *grads))
    out = by_hand(layer, rows, counts)
    grads = torch.autograd.grad((out * out.detach()).sum(), [rows, *layer.parameters()])
    found += [(out, *grads), found[1]]
    for pair in (found[:2], found[2:]):
        for one, other in zip(*pair, strict=True):
            assert one.isfinite().all()
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def by_hand(layer, rows, counts):
    """The experts of gpt-oss, one row after the other."""
    chosen, out = torch.arange(len(counts)).repeat_interleave(counts), []
    for x, e in zip(rows, chosen, strict=True):
        gate = torch.minimum(layer.gate[e] @ x + layer.gate_bias[e], torch.tensor(0.5))
        up = (layer.up[e] @ x + layer.up_bias[e]).clamp(-0.5, 0.5)
        inner = (up + 1) * gate / (1 + torch.exp(-1.7 * gate))
        out.append(layer.down[e] @ inner + layer.down_bias[e])
    return torch.stack(out)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("activation", ["gelu", "relu2"])
def test_experts_of_another_kind_are_mlps_of_that_kind(gated, activation):
    """A layer of experts is the sum of its MLPs, weighted; the shared one is of the same kind."""
    config = Experts(count=3, top_k=2, width=5, shared=7, gated=gated, activation=activation)
    torch.manual_seed(0)
    layer = experts.ExpertMlp(4, config, name="layers.0.mlp", number=0, balance="batch").double()
    for x in layer.parameters():
        nn.init.normal_(x)
    x = torch.randn(1, 6, 4, dtype=torch.float64)
    is_token = torch.ones(1, 6, dtype=torch.bool)
    spans = decoder_batch(0).spans
    y, _ = layer(x, spans=spans, is_token=is_token, tape=RoutingTape())
    act = {"gelu": nn.functional.gelu, "relu2": lambda z: z.clamp(min=0) ** 2}[activation]

    def mlp(z, up, down, gate=None):
        inner = z @ up.T
        return (act(z @ gate.T) * inner if gated else act(inner)) @ down.T

    routing, _ = layer.router(x[0], None, None)
    weights, shared = layer.experts, layer.shared
    for t, (chosen, by) in enumerate(zip(routing.indices, routing.weights, strict=True)):
        z = x[0, t]
        wanted = mlp(z, shared.up.weight, shared.down.weight, shared.gate.weight if gated else None)
        for e, weight in zip(chosen, by, strict=True):
            gate = weights.gate[e] if gated else None
            wanted = wanted + weight * mlp(z, weights.up[e], weights.down[e], gate)
        torch.testing.assert_close(y[0, t], wanted, rtol=1e-12, atol=1e-12)


def test_hashed_layers_choose_by_the_token_and_need_its_id():
    sparse = attrs.evolve(CONFIG.experts, hash_layers=1)
    config = attrs.evolve(CONFIG, experts=sparse)
    model, tape = build_decoder(config, seed=0), RoutingTape()
    batch = decoder_batch(0)
    out = through(model, batch, tape)
    ids = batch.input_ids.flatten()
    wanted = hash_experts(ids, 8, 2, name="layers.1.mlp")
    is_token = (batch.document_ids >= 0).flatten()
    assert torch.equal(tape.choices["layers.1.mlp"][is_token], wanted[is_token])
    assert not torch.equal(tape.choices["layers.2.mlp"], wanted)
    # Balance cannot move what scores do not choose; weights still train the router.
    assert out.sums[0, 0] == 0
    assert out.sums[1, 0] > 0
    out.output.square().sum().backward()
    assert model.layers["1"].mlp.router.weight.grad.any()
    with pytest.raises(ConfigError, match=r"decoder_stage: layers \[1\] choose experts by a hash"):
        decoder_stage(model, range(1, 3), first=False, last=True)


def test_under_autocast_experts_compute_in_the_dtype_of_the_tokens():
    model, batch = build_decoder(CONFIG, seed=0), decoder_batch(0)
    seen = []
    for layer in model.layers.values():
        if isinstance(layer.mlp, experts.ExpertMlp):
            layer.mlp.experts.register_forward_hook(lambda _, __, y: seen.append(y.dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = call_routed(model, batch)
    assert seen == [torch.bfloat16] * 2
    want = call_routed(model, batch)
    assert out.sums.dtype == torch.float32
    far = (out.output.float() - want.output).norm() / want.output.norm()
    assert 1e-4 < far < 0.1


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch looks at it
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")  # torch 2.11, of attention
@pytest.mark.parametrize(
    "dtype",
    [
        torch.bfloat16,
        *(
            pytest.param(dtype, marks=pytest.mark.only_all)
            for dtype in (torch.float32, torch.float64)
        ),
    ],
)
def test_a_compiled_layer_has_the_values_and_gradients_of_a_plain_one(dtype):
    model = build_decoder(attrs.evolve(CONFIG, layers=2), seed=0).to(dtype)
    batch, found = decoder_batch(0), []  # some of its places are padding
    for backend in (None, "aot_eager"):
        if backend:
            model.layers["1"].compile(backend=backend)  # the one with experts
        model.zero_grad()
        out = call_routed(model, batch)
        out.output.square().mean().backward()
        found.append((out.output, out.sums, {n: p.grad for n, p in model.named_parameters()}))
    torch.compiler.reset()
    torch.testing.assert_close(*found)


# -------------------------------------------------------------------------------------- routers


def test_padding_goes_nowhere_and_is_counted_nowhere():
    logits = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    is_token = torch.tensor([True, False, True, True, False])
    for route in (softmax_topk, biased_topk):
        routing = route(logits, 2, is_token=is_token)
        assert routing.counts.sum() == 6
        assert (routing.indices[~is_token] == 4).all()
        assert not routing.weights[~is_token].any()
        assert not routing.shares[~is_token].any()
        few = route(logits[is_token], 2)
        assert torch.equal(routing.counts, few.counts)
        assert torch.equal(routing.weights[is_token], few.weights)


def test_a_bias_chooses_and_never_weighs():
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    bias = torch.tensor([9.0, 9.0, 0.0, 0.0])
    routing = biased_topk(logits, 2, bias=bias)
    assert sorted(routing.indices[0].tolist()) == [0, 1]
    scores = logits.sigmoid()[0, :2]
    want = (scores / scores.sum()).sort().values
    torch.testing.assert_close(routing.weights[0].sort().values, want)


def test_choices_that_were_made_before_are_taken_with_weights_of_now():
    logits = torch.randn(4, 6, requires_grad=True)
    given = torch.tensor([[0, 1], [2, 3], [4, 5], [0, 5]])
    for route in (softmax_topk, biased_topk):
        routing = route(logits, 2, indices=given, renormalize=False)
        assert torch.equal(routing.indices, given)
        assert routing.weights.requires_grad


@pytest.mark.parametrize(
    ("choose", "message"),
    [
        (lambda route, logits: route(logits, 5), "5 of 4 experts cannot be chosen"),
        (lambda route, logits: route(logits, 0), "0 of 4 experts"),
        (
            lambda route, logits: route(logits, 1, is_token=torch.ones(2, dtype=torch.bool)),
            r"is_token must be \[3\]",
        ),
        (
            lambda route, logits: route(logits, 2, indices=torch.zeros(3, 1).long()),
            r"indices must be \[3, 2\]",
        ),
    ],
)
def test_what_does_not_fit_is_refused(choose, message):
    for route in (softmax_topk, biased_topk):
        with pytest.raises(ValueError, match=f"{route.__name__}: .*{message}"):
            choose(route, torch.zeros(3, 4))
    with pytest.raises(ValueError, match="cannot be chosen from 1 of 3 equal groups"):
        biased_topk(torch.zeros(3, 4), 1, groups=3)
    with pytest.raises(ConfigError, match="9 of 8 experts"):
        Experts(count=8, top_k=9, width=4)
    with pytest.raises(ConfigError, match="are for scores='sigmoid'"):
        Experts(count=8, top_k=2, width=4, biased=True)
    with pytest.raises(ConfigError, match="trains no router; set renormalize=False"):
        Experts(count=8, top_k=1, width=4)
    with pytest.raises(ConfigError, match="shared must be at least 0 and finite, got -4"):
        Experts(count=8, top_k=2, width=4, shared=-4)
    with pytest.raises(ConfigError, match="shared_gate=True needs a shared expert"):
        Experts(count=8, top_k=2, width=4, shared_gate=True)
    with pytest.raises(ValueError, match="experts must be in some of the 3 layers"):
        attrs.evolve(CONFIG, experts=Experts(count=8, top_k=2, width=4, first=99))
    with pytest.raises(ValueError, match=r"biased_topk: bias must be \[4\]"):
        biased_topk(torch.zeros(3, 4), 1, bias=torch.zeros(4, 1))
    with pytest.raises(ValueError, match='Decoder: balance must be "batch"'):
        Decoder(CONFIG, balance="sequence")


def test_padding_whose_first_expert_has_no_share_leaves_gradients_finite():
    logits = torch.tensor([[0.0, 200.0, 1.0], [0.0, 1.0, 2.0]], requires_grad=True)
    routing = softmax_topk(logits, 2, is_token=torch.tensor([False, True]))
    routing.weights.sum().backward()
    assert not logits.grad[0].any()
    assert logits.grad.isfinite().all()


# --------------------------------------------------------------------------------- what is counted


@pytest.mark.parametrize("config", [CONFIG, BIASED])
@pytest.mark.parametrize("balance", ["batch", "document"])
def test_microbatches_and_padding_change_no_gradient_and_no_count(config, balance):
    loss = add_router_losses(next_token, balance=0.5, router_z=0.1)
    whole, found = decoder_batch(0), []
    for rows, blanks in ((None, 0), (1, 0), (3, 2)):
        model = build_decoder(config, seed=0, balance=balance).double()
        for layer in model.layers.values():
            if isinstance(layer.mlp, experts.ExpertMlp):
                layer.mlp.router.load.copy_(torch.linspace(0.02, 0.23, 8))
        batches = [*distribute_batch(whole, DataShard(), rows_per_microbatch=rows)]
        batches += [make_padding_batch(2, whole.input_ids.shape[1])] * blanks
        seen = count_tokens(batches)
        per = {"loss": count_valid_tokens(batches), "balance": seen, "router_z": seen}
        sums = forward_backward(model, batches, loss, denominator=per, call=call_routed)
        found.append((sums, {name: p.grad for name, p in model.named_parameters()}))
    for sums, grads in found[1:]:
        assert torch.equal(sums["load"], found[0][0]["load"])
        assert (sums["load"].sum(-1) == 2 * (whole.document_ids >= 0).sum()).all()
        torch.testing.assert_close(sums, found[0][0], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(grads, found[0][1], rtol=1e-10, atol=1e-13)


def test_balance_is_1_per_token_where_all_are_chosen_alike_and_more_where_they_are_not():
    flat = softmax_topk(torch.zeros(6, 4), 1)
    even = torch.full((4,), 0.25)
    assert float(balance_loss_sum(flat, even, experts=4)) == pytest.approx(6)
    logits = torch.tensor([5.0, 0, 0, 0]).expand(6, 4).clone().requires_grad_()
    steep = softmax_topk(logits, 1)
    total = balance_loss_sum(steep, torch.tensor([1.0, 0, 0, 0]), experts=4)
    assert float(total.detach()) > 20
    total.backward()
    assert (logits.grad[:, 0] > 0).all()  # less of the one that has all


def test_the_bias_moves_once_a_step_on_global_counts_and_not_when_a_step_is_skipped():
    model = build_decoder(BIASED, seed=0)
    counts = torch.arange(24).view(3, 8)
    update_routers_([model], counts, rate=0.25, applied=torch.tensor(False))
    assert not any(layer.mlp.router.bias.any() for layer in model.layers.values())
    update_routers_([model], counts, rate=0.25)
    for i, layer in enumerate(model.layers.values()):
        router = layer.mlp.router
        assert router.bias.tolist() == [0.25] * 4 + [-0.25] * 4
        torch.testing.assert_close(router.load, counts[i] / counts[i].sum())
    assert {name for name, _ in model.named_buffers()} >= {"layers.0.mlp.router.bias"}
    for wrong in (counts[:2], counts[:, :1], counts[0]):
        with pytest.raises(ValueError, match=r"update_routers_: counts must be \[L, 8\]"):
            update_routers_([model], wrong, rate=0.25)
    with pytest.raises(ValueError, match="bfloat16, in which small changes"):
        update_routers_([model.bfloat16()], counts, rate=0.25)


def biases_after_a_step(rows, *, per_microbatch):
    """Return the biases after a step in microbatches of so many rows, moved once or each time."""
    model = build_decoder(BIASED, seed=0)
    batches = [*distribute_batch(decoder_batch(0), DataShard(), rows_per_microbatch=rows)]
    for part in [[x] for x in batches] if per_microbatch else [batches]:
        ones = dict.fromkeys(("loss", "balance", "router_z"), torch.tensor(1))
        sums = forward_backward(
            model, part, add_router_losses(next_token), denominator=ones, call=call_routed
        )
        update_routers_([model], sums["load"], rate=0.25)
    return torch.stack([layer.mlp.router.bias for layer in model.layers.values()])


def test_biases_are_those_of_the_step_unless_they_move_with_every_microbatch():
    want = biases_after_a_step(None, per_microbatch=False)
    assert torch.equal(biases_after_a_step(2, per_microbatch=False), want)
    assert not torch.equal(biases_after_a_step(2, per_microbatch=True), want)


def test_an_unbalanced_router_is_balanced_by_its_bias():
    model, batch = build_decoder(BIASED, seed=0), decoder_batch(0)
    with torch.no_grad():
        for layer in model.layers.values():
            layer.mlp.router.bias[0] += 0.5
    worst = []
    for _ in range(40):
        with torch.no_grad():
            load = call_routed(model, batch).sums[:, 3:]
        worst.append(float((load.max(-1).values / load.mean(-1)).max()))
        update_routers_([model], load, rate=0.05)
    assert worst[0] > 3
    assert worst[-1] < 1.5


# ------------------------------------------------------------------------------------------- tape


class Forgetful(dict):
    """The choices of a tape that holds nothing."""

    def get(self, _name):
        return None


def gradients_under_noise(choices, *, recomputed):
    """Return the gradients of a model whose routers see other noise in every call."""
    model = build_decoder(CONFIG, seed=0)  # in fp32 experts are grouped: no shape shows a change
    generator = torch.Generator().manual_seed(0)

    def jitter(_, args):
        x, *rest = args
        return (x + torch.randn(x.shape, generator=generator, dtype=x.dtype), *rest)

    for layer in model.layers.values():
        if isinstance(layer.mlp, experts.ExpertMlp):
            layer.mlp.router.register_forward_pre_hook(jitter)
            # What a choice weighs is of the noise too; here it is 1, so that only choices differ.
            layer.mlp.router.register_forward_hook(lambda _, __, made: (even(made[0]), made[1]))
    recompute("full" if recomputed else "none")(model, solo_parallel())
    batch = decoder_batch(0)
    next_token(through(model, batch, RoutingTape(choices)), batch)[0].backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def even(routing):
    return routing._replace(weights=torch.ones_like(routing.weights))


def test_with_a_tape_a_recomputed_router_repeats_its_choices_and_without_it_does_not():
    want = gradients_under_noise({}, recomputed=False)
    torch.testing.assert_close(gradients_under_noise({}, recomputed=True), want)
    lost = gradients_under_noise(Forgetful(), recomputed=True)
    name = "layers.1.mlp.experts.down"
    assert (lost[name] - want[name]).norm() > 0.1 * want[name].norm()


def test_choices_that_come_with_a_batch_are_taken_instead_of_the_routers():
    model, batch = build_decoder(CONFIG, seed=0), decoder_batch(0)
    given = torch.arange(4).repeat(128).view(256, 2)
    tape = RoutingTape({"layers.1.mlp": given, "layers.2.mlp": given + 4})
    out = through(model, batch, tape)
    seen = torch.bincount(given[(batch.document_ids >= 0).flatten()].flatten()).tolist()
    assert out.sums[:, 3:].tolist() == [seen + [0] * 4, [0] * 4 + seen]


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"layers.1.mlp": (256, 2)}, "has the choices of layers.1.mlp; the model's .*layers.2.mlp"),
        ({"layers.1.mlp": (256, 2), "layers.7.mlp": (256, 2)}, r"layers\.7\.mlp; the model's"),
        ({"layers.1.mlp": (256, 3), "layers.2.mlp": (256, 2)}, r"layers.1.mlp: .* \[256, 2\], of"),
        ({"layers.1.mlp": (99, 2), "layers.2.mlp": (256, 2)}, r"layers.1.mlp: .* \[99, 2\]"),
        ({"layers.1.mlp": (256, 2), "layers.2.mlp": (256, 2)}, r"layers.1.mlp: .* from 0 to 0"),
    ],
)
def test_a_tape_of_another_model_is_refused(choices, message):
    given = {name: torch.zeros(shape, dtype=torch.int64) for name, shape in choices.items()}
    with pytest.raises(ValueError, match=f"RoutingTape: .*{message}"):
        check(given)


def check(given, *, is_token=None, own=None):
    layers = ["layers.1.mlp", "layers.2.mlp"]
    is_token = torch.ones(4, 64, dtype=torch.bool) if is_token is None else is_token
    experts.check_tape(RoutingTape(given), layers, CONFIG.experts, is_token=is_token, own=own)


def test_a_tape_may_be_of_a_stage_and_say_anything_of_padding():
    given = torch.tensor([[0, 1], [8, 8], [7, 3]])
    is_token = torch.tensor([[True, False, True]])
    check({"layers.1.mlp": given}, is_token=is_token, own=["layers.1.mlp"])
    for wrong in (torch.ones_like(is_token), torch.tensor([[False, True, False]])):
        with pytest.raises(ValueError, match=r"distinct ones in \[0, 8\), got .* to 8"):
            check({"layers.1.mlp": given}, is_token=wrong, own=["layers.1.mlp"])


WRONG = {"too large": [7, 8], "below 0": [-1, 3], "twice": [3, 3]}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("layer", ["layers.1.mlp", "layers.2.mlp"])
@pytest.mark.parametrize("wrong", WRONG)
def test_on_a_device_one_assertion_looks_at_the_choices_of_all_layers(
    monkeypatch, wrong, layer, compiled
):
    """With the assertion of a CPU, which raises at once."""
    monkeypatch.setattr(experts, "can_read_values", lambda _: False)
    look = experts.check_tape
    if compiled:
        look = torch.compile(look, backend="aot_eager", fullgraph=True)
    given = {f"layers.{i}.mlp": torch.tensor([[0, 1], [7, 3], [2, 5]]) for i in (1, 2)}
    tape, is_token = RoutingTape(given), torch.tensor([[True, True, False]])
    look(tape, [*given], CONFIG.experts, is_token=is_token)
    given[layer][2] = torch.tensor(WRONG[wrong])  # of padding
    look(tape, [*given], CONFIG.experts, is_token=is_token)
    given[layer][1] = torch.tensor(WRONG[wrong])
    with pytest.raises(
        RuntimeError, match=r"RoutingTape: choices must be int64 \[3, 2\], .* in \[0, 8\)"
    ):
        look(tape, [*given], CONFIG.experts, is_token=is_token)


def test_on_a_device_no_choice_is_read_by_the_host():
    """Tensors without values, of which none could be read."""
    given = torch.empty(512, 2, dtype=torch.int64, device="meta")
    is_token = torch.empty(512, dtype=torch.bool, device="meta")
    check({"layers.1.mlp": given, "layers.2.mlp": given}, is_token=is_token)
    with pytest.raises(ValueError, match=r"layers.1.mlp: .* got torch.int64 \[512, 1\]"):
        check({"layers.1.mlp": given[:, :1], "layers.2.mlp": given}, is_token=is_token)


def test_held_out_terms_of_routers_are_divided_by_all_tokens():
    model, batch = build_decoder(CONFIG, seed=0), decoder_batch(0)
    means = evaluate(model, [batch], add_router_losses(next_token), axis=SOLO, call=call_routed)
    assert float(means["balance"]) == pytest.approx(1, rel=1e-6)  # loads are even at first
    assert to_host(means)["load"] == means["load"].tolist()
    assert (means["load"].sum(-1) == 2 * count_tokens([batch])).all()  # no mean


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")  # torch 2.11, of attention
@pytest.mark.only_all  # the certificate compiles such blocks over two ranks
def test_compiled_blocks_leave_experts_as_they_are():
    model, batch = build_decoder(CONFIG, seed=0), decoder_batch(0)
    want = call_routed(model, batch)
    found = call_routed(parallel.compile_blocks(backend="aot_eager")(model, solo_parallel()), batch)
    torch.testing.assert_close(tuple(found), tuple(want))


def test_a_decoder_with_experts_must_know_what_is_padding():
    model, batch = build_decoder(CONFIG, seed=0), decoder_batch(0)
    with pytest.raises(ValueError, match="needs is_token"):
        model(batch.input_ids, position_ids=batch.position_ids, spans=batch.spans)


def test_text_is_drawn_and_a_call_without_padding_is_told_what_to_pass():
    model = build_decoder(BIASED, seed=0)
    drawn = generate(model, [[1, 2, 3]], max_new_tokens=4, context=8)
    for call in (call_routed, make_call(make_stages([model], solo_parallel()), call=call_routed)):
        assert drawn == generate(model, [[1, 2, 3]], max_new_tokens=4, context=8, call=call)
    with pytest.raises(ValueError, match=r"call=tk\.models\.call_routed"):
        generate(model, [[1, 2, 3]], max_new_tokens=4, context=8, call=call_model)


def test_a_loss_may_look_at_the_output_alone():
    model, batch = build_decoder(CONFIG, seed=0), decoder_batch(0)
    out = call_routed(model, batch)
    assert next_token(out, batch)[0] == next_token(out.output, batch)[0]
    hidden = Decoder(CONFIG, head="hidden")
    hidden.load_state_dict(model.state_dict())
    loss = add_terms((next_token_linear, 1.0), (z_term, 0.1))
    total, _ = loss(call_routed(hidden, batch), batch)
    want, _ = add_terms((next_token, 1.0), (z_term, 0.1))(out, batch)
    torch.testing.assert_close(total, want)
    with pytest.raises(ValueError, match=r"add_router_losses: a RoutedOutput .*got a Tensor"):
        add_router_losses(next_token)(out.output, batch)


def test_denominators_of_terms_divide_each_by_its_own():
    parts = {"loss": torch.tensor(6.0), "balance": torch.tensor(8.0)}
    assert float(divide_terms(parts, torch.tensor(2))) == 7
    none_to_balance = {"loss": torch.tensor(0.5), "balance": torch.tensor(0)}
    assert float(divide_terms(parts, make_divisors(none_to_balance))) == 20
    with pytest.raises(ValueError, match="no denominator for the term 'balance'"):
        divide_terms(parts, {"loss": torch.tensor(1)})
    with pytest.raises(ValueError, match="returns one sum for all its terms"):
        divide_terms(torch.tensor(1.0), {"loss": torch.tensor(1), "balance": torch.tensor(1)})


# ------------------------------------------------------------------------- capacity, noise, choices


def test_what_experts_have_no_room_for_is_left_out_and_counted():
    config = attrs.evolve(CONFIG, experts=attrs.evolve(CONFIG.experts, capacity=0.75))
    full, free = build_decoder(config, seed=0), build_decoder(CONFIG, seed=0)
    batch = decoder_batch(0)
    batch = attrs.evolve(batch, document_ids=batch.document_ids.masked_fill(batch.labels < 0, -1))
    outs = []
    for model in (free, full):
        _, terms = add_router_losses(next_token)(call_routed(model, batch), batch)
        outs.append(terms)
    choices = 2 * (batch.document_ids >= 0).sum()
    assert outs[0]["dropped"].tolist() == [0, 0]
    room = -(-choices * 3 // 4 // 8)
    load = outs[1]["load"]
    assert torch.equal(load.sum(-1), choices.expand(2))  # what was wanted, dropped or not
    assert torch.equal(outs[1]["dropped"], (load - room).clamp(min=0).sum(-1))
    assert (outs[1]["dropped"] >= choices // 4 - 8).all()
    with pytest.raises(ConfigError, match="capacity must be at least 0"):
        Experts(count=8, top_k=2, width=16, capacity=-1.0)


def test_jitter_is_for_the_router_alone_and_experts_compute_on_the_tokens():
    own = attrs.evolve(CONFIG, experts=attrs.evolve(CONFIG.experts, jitter=0.3, shared=8))
    model, batch = build_decoder(own, seed=0), decoder_batch(0)
    layer, seen = model.layers["1"].mlp, {}
    layer.register_forward_pre_hook(lambda _, given: seen.update(tokens=given[0]))
    for name in ("experts", "shared", "router"):
        part = getattr(layer, name)
        part.register_forward_pre_hook(lambda _, given, name=name: seen.update({name: given[0]}))
    call_routed(model, batch)
    tokens = seen["tokens"].flatten(0, 1)
    known = {row.numpy().tobytes() for row in (*tokens.detach(), torch.zeros(32))}  # padding's
    assert {row.numpy().tobytes() for row in seen["experts"].detach()} <= known
    assert torch.equal(seen["shared"], seen["tokens"])
    assert not torch.equal(seen["router"], tokens)


@pytest.mark.parametrize("balance", ["batch", "microbatch", "document"])
def test_balance_looks_at_the_choices_of_before_capacity_dropped_some(balance):
    sums, batch = {}, decoder_batch(0)
    for capacity in (0.0, 0.5):
        last = attrs.evolve(CONFIG.experts, first=CONFIG.layers - 1, capacity=capacity)
        config = attrs.evolve(CONFIG, experts=last)
        model = build_decoder(config, seed=0, balance=balance)
        sums[capacity] = call_routed(model, batch).sums.squeeze(0).detach()
    dropped = 2
    assert (sums[0.0][dropped], sums[0.5][dropped] > 0) == (0, True)
    others = torch.arange(len(sums[0.0])) != dropped
    assert torch.equal(sums[0.0][others], sums[0.5][others])


def test_noise_moves_routers_while_training_and_needs_keys():
    config = attrs.evolve(CONFIG, experts=attrs.evolve(CONFIG.experts, jitter=0.5))
    model, batch = build_decoder(config, seed=0), decoder_batch(0)
    found = []
    for training in (True, True, False):
        model.train(training)
        found.append(call_routed(model, batch).output)
    assert torch.equal(found[0], found[1])  # a function of the keys
    assert not torch.equal(found[0], found[2])
    assert torch.equal(found[2], call_routed(build_decoder(CONFIG, seed=0), batch).output)
    model.train()
    with pytest.raises(ValueError, match=r"jitter is 0.5 and the model is training, but there is"):
        call_routed(model, attrs.evolve(batch, extra={}))


def test_choices_that_come_with_a_batch_are_taken_and_wrong_ones_are_refused():
    model, batch = build_decoder(CONFIG, seed=0), decoder_batch(0)
    ids = batch.input_ids
    choices = torch.stack([ids % 8, (ids + 3) % 8], -1).unsqueeze(2).repeat(1, 1, 2, 1)
    out = call_routed(model, attrs.evolve(batch, extra={"choices": choices, **batch.extra}))
    is_token = batch.document_ids >= 0
    want = torch.bincount(choices[:, :, 0][is_token].flatten(), minlength=8)
    assert torch.equal(out.sums[:, 3:], want.float().expand(2, -1))
    for wrong, message in (
        (choices[:, :, :1], r"choices must be \[B, S, 2, k\], for 2 layers, got \[4, 64, 1, 2\]"),
        (choices + 4, r"choices must be int64 \[256, 2\], of each token distinct ones in \[0, 8\)"),
        (choices[..., :1], r"choices must be int64 \[256, 2\], .* got torch.int64 \[256, 1\]"),
    ):
        with pytest.raises(ValueError, match=message):
            call_routed(model, attrs.evolve(batch, extra={"choices": wrong, **batch.extra}))
