"""Low-rank adapters: their forward pass, initial values, dropout, checkpoints and resumption."""

import json
from functools import partial

import attrs
import pytest
import torch
from torch import nn

from trainkit import adapters, noise
from trainkit.batch import batch_from_rows, split_batch
from trainkit.grads import clip_and_step, get_named_parameters, get_parameters
from trainkit.losses import add_router_losses, next_token_linear
from trainkit.mesh import parallel_session, solo_parallel
from trainkit.models import (
    Decoder,
    RoutingTape,
    build_decoder,
    call_model,
    call_routed,
    call_with_noise,
    init_weights,
)
from trainkit.models.experts import ExpertWeights
from trainkit.optim import adamw, decay_groups, make_optimizer, use_averaged_parameters
from trainkit.parallel import build_stages, fsdp, tensor_parallel
from trainkit.post.adapters import Lora, lora
from trainkit.post.adapters.frozen import dequantize_parameter
from trainkit.step import forward_backward, make_forward_backward
from trainkit.tools.testing import run_ranks
from trainkit.tools.testing.builtin import CONFIG, EXPERTS, decoder_batch
from trainkit.types import CheckpointError, ConfigError, Layout, TrainState
from trainkit.weights.checkpoint import ResumeRules, resume, save_checkpoint, state_hash

CONFIG = attrs.evolve(CONFIG, layers=2)
ATTENTION = "layers.*.attention.w[qv]"
ROW = "layers.*.mlp.down"
LORAS = [Lora(ATTENTION, rank=3, alpha=6, dropout=0.2), Lora(ROW, rank=2, dora=True)]


def build(ps, *, loras=LORAS, seed=0, of=0, layout=None, **options):
    plan = [lora(*loras, seed=seed, **options), tensor_parallel(), fsdp(layout or Layout())]
    make_model = partial(Decoder, CONFIG, head="hidden")
    return build_stages(make_model, ps, plan, weights=init_weights(CONFIG, seed=of))


def randomised_(stages):
    for name, p in get_named_parameters(stages).items():
        if ".lora." in name and not name.endswith("magnitude"):
            nn.init.normal_(p, std=0.3)
    return stages


# --------------------------------------------------------------------------------- what is computed


@pytest.mark.parametrize("dora", [False, True])
def test_a_linear_layer_has_its_low_rank_path(dora):
    torch.manual_seed(0)
    model = nn.ModuleDict({"up": nn.Linear(5, 7), "down": nn.Linear(7, 5, bias=False)}).double()
    x, plain = torch.randn(3, 5).double(), model.up.weight.clone()
    before = model.down(model.up(x))
    lora(Lora("{up,down}", rank=2, alpha=3, dora=dora))(model, solo_parallel())
    assert torch.allclose(model.down(model.up(x)), before, rtol=1e-14, atol=1e-14)
    own = model.up.lora["default"]
    nn.init.normal_(own.b)
    whole = plain + 1.5 * own.b @ own.a
    if dora:
        nn.init.normal_(own.magnitude)
        whole = (own.magnitude / whole.norm(dim=1)).unsqueeze(1) * whole
    assert torch.allclose(model.up(x), nn.functional.linear(x, whole, model.up.bias))
    assert torch.equal(model.up.weight, plain)
    model.up(x).sum().backward()
    trained = {name for name, p in model.named_parameters() if p.grad is not None}
    assert trained == {f"up.lora.default.{x}" for x in ("a", "b", *(["magnitude"] * dora))}


@pytest.mark.parametrize("form", [None, "nf4", "int8", "fp8"])
def test_dora_takes_the_norms_of_plain_and_of_quantized_matrices(form, monkeypatch):
    monkeypatch.setattr("trainkit.post.adapters.lowrank._MAX_ELEMENTS", 500)  # some rows at a time
    torch.manual_seed(0)
    model = nn.ModuleDict({"up": nn.Linear(72, 20), "experts": ExpertWeights(3, 72, 20)})
    for p in model.parameters():
        nn.init.normal_(p, std=0.2)
    if form:
        adapters.quantized(form, modules="{up,experts}")(model, solo_parallel())
    x, counts = torch.randn(7, 72), torch.tensor([2, 0, 5])
    before = model.up(x), model.experts(x, counts)
    lora(Lora("{up,experts.*}", rank=2, alpha=3, dora=True))(model, solo_parallel())
    for y, want in zip((model.up(x), model.experts(x, counts)), before, strict=True):
        assert torch.allclose(y, want, rtol=1e-4, atol=1e-5)
    own = {name: p for name, p in model.named_parameters() if ".lora." in name}
    for name, p in own.items():
        nn.init.normal_(p, mean=float("magnitude" in name), std=0.2)

    def whole(module, key, adapters):
        adapter = adapters["default"]
        total = dequantize_parameter(module, key) + 1.5 * adapter.b @ adapter.a
        lengths = total.detach().norm(dim=-1)
        return (adapter.magnitude / lengths).unsqueeze(-1) * total

    plain = {k: whole(model.experts, k, model.experts.lora[k]) for k in ("gate", "up", "down")}
    wanted = torch.func.functional_call(ExpertWeights(3, 72, 20), plain, (x, counts))
    linear = nn.functional.linear(x, whole(model.up, "weight", model.up.lora), model.up.bias)
    for y, want in ((model.up(x), linear), (model.experts(x, counts), wanted)):
        assert torch.allclose(y, want, rtol=1e-4, atol=1e-5)
        grads = (torch.autograd.grad(z.sum(), own.values(), allow_unused=True) for z in (y, want))
        for got, other in zip(*grads, strict=True):
            assert got is other is None or torch.allclose(got, other, rtol=1e-3, atol=1e-4)


def test_dora_begins_with_the_lengths_of_what_the_codes_stand_for():
    plan = [adapters.quantized("nf4"), lora(Lora(ROW, dora=True))]
    weights = init_weights(CONFIG, seed=0)
    (model,) = build_stages(partial(Decoder, CONFIG), solo_parallel(), plan, weights=weights)
    row = model.layers["1"].mlp.down
    lengths = dequantize_parameter(row).norm(dim=1)
    assert torch.allclose(row.lora["default"].magnitude, lengths, rtol=1e-6)
    first = weights("layers.1.mlp.down.weight", (32, 48), (0, 0)).norm(dim=1)
    assert not torch.allclose(first, lengths, rtol=1e-4)


def test_the_scale_is_stabilised_by_the_root_of_the_rank():
    assert Lora("x", rank=16, alpha=32).scale == 2
    assert Lora("x", rank=16, alpha=32, rank_stabilised=True).scale == 8


def test_side_by_side_the_last_is_trained_and_any_is_chosen():
    model = nn.ModuleDict({"up": nn.Linear(2, 2), "down": nn.Linear(2, 2)})
    x = torch.ones(1, 2)
    for name, where in (("one", "{up,down}"), ("two", "up")):
        lora(Lora(where, rank=1, name=name))(model, solo_parallel())
        nn.init.ones_(model.up.lora[name].b)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trained == ["up.lora.two.a", "up.lora.two.b"]
    outputs = {}
    for name in ("one", "two", None):
        adapters.select_adapter_([model], name)
        outputs[name] = model.up(x)
    assert len({tuple(y.flatten().tolist()) for y in outputs.values()}) == 3
    assert torch.equal(outputs[None], nn.functional.linear(x, model.up.weight, model.up.bias))
    with pytest.raises(ConfigError, match="no adapter 'three', but one, two"):
        adapters.select_adapter_([model], "three")


def test_an_embedding_is_trained_with_adapters():
    model = build(solo_parallel(), trained="{embedding,**attention_norm.weight}")[0]
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    rest = [name for name in trained if ".lora." not in name]
    assert rest == ["embedding.weight", *(f"layers.{i}.attention_norm.weight" for i in range(2))]


def test_dropout_needs_keys_in_training_alone():
    (model,) = build(solo_parallel())
    batch = decoder_batch(0)
    bare = attrs.evolve(batch, extra={})
    run = partial(forward_backward, model, loss=next_token_linear, denominator=torch.tensor(9))
    with pytest.raises(ValueError, match=r"layers.0.attention.wq.lora.default gets no noise_key"):
        run([bare])
    randomised_([model])
    first, again = (run([batch], call=call_with_noise)["loss"] for _ in range(2))
    other_batch = attrs.evolve(batch, extra={"noise_key": batch["noise_key"] + 1})
    other = run([other_batch], call=call_with_noise)["loss"]
    assert first == again != other
    model.eval()
    assert run([bare])["loss"] not in (first, other)


def test_side_by_side_each_drops_in_its_own_way():
    (model,) = stages = [build_decoder(CONFIG, seed=0, head="hidden")]
    for name in ("one", "two"):
        lora(Lora(ATTENTION, dropout=0.2, name=name))(model, solo_parallel())
    randomised_(stages)
    for name in ("one", "two"):
        adapters.select_adapter_(stages, name)
        first, again = (call_with_noise(model, decoder_batch(0)).hidden for _ in range(2))
        assert torch.equal(first, again)
        model.eval()
        assert not torch.allclose(first, call_with_noise(model, decoder_batch(0)).hidden)
        model.train()
        bare = attrs.evolve(decoder_batch(0), extra={})
        with pytest.raises(ValueError, match=rf"wq.lora.{name} gets no noise_key"):
            call_model(model, bare)


# ------------------------------------------------------------------------------ dropout of experts

MOE = attrs.evolve(CONFIG, experts=attrs.evolve(EXPERTS, jitter=0.0))
OF_EXPERTS = "**experts.*"


class Sorted(nn.Module):
    """Experts that are given rows in their order, and a noise key for each."""

    def __init__(self):
        super().__init__()
        self.experts = ExpertWeights(8, 16, 20)

    def forward(self, rows, counts, *, noise_key):
        return self.experts(rows, counts, noise_key)


@pytest.mark.parametrize("dora", [False, True])
def test_adapters_of_experts_drop_what_they_see_and_nothing_else(dora, monkeypatch):
    torch.manual_seed(0)
    model, counts = nn.ModuleDict({"mlp": Sorted()}), torch.tensor([3, 0, 2, 0, 0, 7, 0, 1])
    rows, keys = torch.randn(13, 16), noise.make_token_keys(torch.arange(13), seed=0, step=0)
    lora(Lora(OF_EXPERTS, rank=2, alpha=3, dropout=0.4, dora=dora))(model, solo_parallel())
    for p in model.parameters():
        nn.init.normal_(p, std=0.3)
    experts, whose = model.mlp.experts, torch.arange(8).repeat_interleave(counts)

    def product(name, x):
        own, plain = experts.lora[name]["default"], getattr(experts, name)
        assert own.whole_name == f"mlp.experts.lora.{name}.default"
        seen = noise.dropout(x, keys, name=own.whole_name, p=0.4, width=x.shape[-1])
        low = torch.einsum("nor,nri,ni->no", own.b[whose], own.a[whose], seen)
        total = torch.einsum("noi,ni->no", plain[whose], x) + 1.5 * low
        length = (plain + 1.5 * own.b @ own.a).norm(dim=-1)
        return (own.magnitude / length)[whose] * total if dora else total

    wanted = product("down", nn.functional.silu(product("gate", rows)) * product("up", rows))
    found = [model.mlp(rows, counts, noise_key=keys)]  # in one grouped product, and one by one
    monkeypatch.setattr("trainkit.models.experts.can_group", lambda *_: False)
    found.append(model.mlp(rows, counts, noise_key=keys))
    for y in found:
        assert torch.allclose(y, wanted, rtol=1e-4, atol=1e-5)


def moe(dropout):
    model = build_decoder(MOE, seed=0, head="hidden")
    lora(Lora(OF_EXPERTS, rank=2, alpha=6, dropout=dropout))(model, solo_parallel())
    torch.manual_seed(0)
    return randomised_([model])[0].double()


def hidden_of(model, batch, *, rows=None, changes=None):
    """Return the hidden states of the tokens `[T, D]`."""
    parts = [dict(part) | (changes or {}) for part in split_batch(batch, rows or len(batch.labels))]
    outputs = [call_routed(model, part).output.hidden.detach() for part in parts]
    return torch.cat(outputs)[batch.document_ids >= 0]


def test_a_token_drops_the_same_in_any_rows_alone_or_packed_and_in_any_order_of_its_choices():
    model, batch = moe(0.3), decoder_batch(0)
    whole = hidden_of(model, batch)
    assert torch.allclose(hidden_of(model, batch, rows=1), whole, rtol=0, atol=1e-12)
    last = int((batch.document_ids[0] == 0).sum())
    alone = batch_from_rows(batch.input_ids[:1, :last])
    alone = attrs.evolve(alone, extra={"noise_key": batch["noise_key"][:1, :last]})
    assert torch.allclose(hidden_of(model, alone), whole[:last], rtol=0, atol=1e-12)
    tape = RoutingTape()
    model(
        batch.input_ids,
        position_ids=batch.position_ids,
        is_token=batch.document_ids >= 0,
        spans=batch.spans,
        noise_key=batch["noise_key"],
        tape=tape,
    )
    (choices,) = tape.choices.values()
    flipped = {"choices": choices.flip(1).view(*batch.labels.shape, 1, -1)}
    assert torch.allclose(hidden_of(model, batch, changes=flipped), whole, rtol=0, atol=1e-12)
    other_keys = {"noise_key": batch["noise_key"] + 1}
    assert (hidden_of(model, batch, changes=other_keys) - whole).abs().max() > 0.1


def test_experts_adapters_without_dropout_compute_what_they_did(monkeypatch):
    batch, dropping = decoder_batch(0), moe(0.3)
    with pytest.raises(ValueError, match=r"layers.1.mlp.experts.lora.gate.default gets no noise_"):
        hidden_of(dropping, attrs.evolve(batch, extra={}))
    monkeypatch.delattr("trainkit.noise.counters.split_keys")  # none are made, and none are sent
    model = moe(0.0)
    plain = hidden_of(model, batch)
    for other in (model, model.eval(), dropping.eval()):
        for extra in (batch.extra, {}):
            assert torch.equal(hidden_of(other, attrs.evolve(batch, extra=extra)), plain)


def test_a_resumed_run_drops_in_experts_what_it_would_have_dropped(tmp_path):
    ps = solo_parallel()
    run = [(stages := [moe(0.3)]), optimizer_of(stages), ps]

    def step(number, stages, optimizer, ps):
        forward_backward(
            stages[0],
            [decoder_batch(number)],
            loss=add_router_losses(next_token_linear),
            denominator=torch.tensor(100),
            call=call_routed,
        )
        clip_and_step(get_parameters(stages), optimizer, lr=1e-2, max_norm=1.0)
        return state_hash(TrainState(step=number + 1), stages, optimizer, ps)

    step(0, *run)
    save_checkpoint(tmp_path, TrainState(step=1), *run)
    wanted = step(1, *run)
    again = [(stages := [moe(0.3)]), optimizer_of(stages), ps]
    state = resume(tmp_path, TrainState(), *again, log=lambda _: None)
    assert step(state.step, *again) == wanted


# -------------------------------------------------------------------------------- what does not fit

TWO = nn.ModuleDict({"up": nn.Linear(2, 2), "norm": nn.RMSNorm(2)})


@pytest.mark.parametrize(
    ("transform", "message"),
    [
        (lora(Lora("u")), "'u' matches the name of no matrix; those there are: layers.0."),
        (lora(Lora("{up")), "'{up' has a bracket without its other half"),
        (lora(Lora("head")), "'head' matches the name of no matrix"),
        (lora(Lora(ROW), Lora("**down")), "'layers.0.mlp.down' is matched twice"),
        (lora(Lora(ROW), trained="emb"), "'emb' matches the name of no module or parameter"),
    ],
)
def test_what_does_not_fit_is_reported_before_anything_is_built(transform, message):
    (problem,) = adapters.find_problems([transform], CONFIG)
    assert message in str(problem)


def test_matrices_of_bytes_and_their_base_are_looked_at_before_anything_is_built(monkeypatch):
    held = adapters.quantized("nf4", modules="layers.0.attention.wq")
    assert not adapters.find_problems([held, lora(Lora("**wq"))], CONFIG, layout=Layout(tp=2))
    monkeypatch.setattr("trainkit.post.adapters.frozen.can_shard_bytes", lambda: False)
    facts = {"base": "0", "base_from": "the/base"}
    of_base, bytes_ = adapters.find_problems([held], CONFIG, layout=Layout(dp_shard=2), base=facts)
    assert "it holds adapters alone, of a base at the/base; merge them into it" in str(of_base)
    assert "cannot shard bytes" in str(bytes_)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (partial(Lora, "x", rank=0), "rank must be a positive number, got 0"),
        (partial(Lora, "x", alpha=0.0), "alpha must be positive"),
        (partial(Lora, "x", dropout=1.0), r"dropout must be in \[0, 1\)"),
        (partial(Lora, "x", name="a.b"), "name must be a name without dots"),
    ],
)
def test_a_field_out_of_range_is_named(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_adapters_that_are_added_at_once_have_one_name():
    with pytest.raises(ConfigError, match=r"adapters of one name, and was given \['a', 'b'\]"):
        lora(Lora(ROW, name="a"), Lora(ATTENTION, name="b"))


def test_a_foreign_model_has_no_dropout_by_token():
    for name in ("up", "experts.up"):
        foreign = nn.ModuleDict({"up": nn.Linear(2, 2), "experts": ExpertWeights(2, 2, 2)})
        with pytest.raises(ConfigError, match=r"no module around '.*up\..*' takes one"):
            lora(Lora(name, dropout=0.1))(foreign, solo_parallel())


def test_adapters_stand_before_what_cuts_matrices():
    with pytest.raises(ConfigError, match="adapter must come before tensor"):
        build_stages(
            partial(Decoder, CONFIG),
            solo_parallel(),
            [tensor_parallel(), lora(Lora(ROW))],
            weights=init_weights(CONFIG, seed=0),
        )


# --------------------------------------------------------------------------------- initial values


def test_the_initial_values_are_uniform_and_add_nothing():
    (model,) = build(solo_parallel())
    own = model.layers["1"].attention.wq.lora["default"]
    bound = CONFIG.width**-0.5  # kaiming_uniform_(a=sqrt(5))
    assert own.a.abs().max() <= bound
    assert own.a.std().item() == pytest.approx(bound / 3**0.5, rel=0.2)
    assert not own.b.any()
    row = model.layers["1"].mlp.down
    assert torch.allclose(row.lora["default"].magnitude, row.weight.norm(dim=1))
    plain, batch = build_decoder(CONFIG, seed=0, head="hidden"), decoder_batch(0)
    run = partial(forward_backward, loss=next_token_linear, denominator=torch.tensor(9))
    wanted = run(plain, [batch])["loss"]
    assert float(run(model, [batch], call=call_with_noise)["loss"]) == pytest.approx(
        float(wanted), rel=1e-6
    )
    again = build_decoder(CONFIG, seed=0, head="hidden")
    lora(*LORAS)(again, solo_parallel())  # a model that holds its values gets the same
    for name, p in get_named_parameters([again]).items():
        assert torch.equal(p, get_named_parameters([model])[name]), name


# -------------------------------------------------------------------------------------- checkpoints


def optimizer_of(stages):
    return adamw(decay_groups(get_named_parameters(stages), weight_decay=0.1), lr=1e-2)


def trained(ps, stages, optimizer, *, steps=2, begin=0):
    run = make_forward_backward(stages, next_token_linear, call=call_with_noise)
    for step in range(begin, steps):
        batch = decoder_batch(step)
        run([batch] * ps.pp.count, denominator=torch.tensor(100.0))
        clip_and_step(get_parameters(stages), optimizer, lr=1e-2, max_norm=1.0, axis=ps.pp)
    return attrs.evolve(TrainState(), step=steps)


def test_a_checkpoint_holds_what_is_trained_and_knows_its_base(tmp_path):
    ps = solo_parallel()
    stages = build(ps, trained="head")
    facts = adapters.exclude_frozen_(stages, ps, source="the/base")
    optimizer = optimizer_of(stages)
    state = trained(ps, stages, optimizer)
    path = save_checkpoint(tmp_path, state, stages, optimizer, ps, facts=facts)
    tensors = json.loads((path / "index.json").read_text())["tensors"]
    held = {name.removeprefix("model/") for name in tensors if name.startswith("model/")}
    assert held == {name for name, p in get_named_parameters(stages).items() if p.requires_grad}
    assert "head.weight" in held
    again = build(ps, seed=1, trained="head")
    facts = adapters.exclude_frozen_(again, ps, source="moved")
    other = optimizer_of(again)
    resume_again = partial(
        resume, tmp_path, TrainState(), again, other, ps, facts=facts, log=lambda _: None
    )
    with pytest.raises(CheckpointError, match="its base_from is the/base, the run's is moved"):
        resume_again()
    back = resume_again(rules=ResumeRules(allow=["base_from"]))
    assert state_hash(back, again, other, ps) == state_hash(state, stages, optimizer, ps)
    wrong = build(ps, of=1, trained="head")
    facts = adapters.exclude_frozen_(wrong, ps, source="the/base")
    with pytest.raises(CheckpointError, match=r"its base is [0-9a-f]{16}, the run's is"):
        resume(tmp_path, TrainState(), wrong, optimizer_of(wrong), ps, facts=facts)
    with pytest.raises(CheckpointError, match="of a base at the/base"):
        adapters.open_base_weights(path)


def test_a_run_is_a_base(tmp_path):
    ps, plain = solo_parallel(), build_decoder(CONFIG, seed=3)
    save_checkpoint(tmp_path, TrainState(), [plain], optimizer_of([plain]), ps)
    make_model = partial(Decoder, CONFIG)
    plan = [lora(*LORAS)]
    (model,) = build_stages(make_model, ps, plan, weights=adapters.open_base_weights(tmp_path))
    for name, p in plain.named_parameters():
        assert torch.equal(get_named_parameters([model])[name], p)


def test_a_trained_model_is_built_on_its_own_base_alone(tmp_path):
    ps, make_model = solo_parallel(), partial(Decoder, CONFIG)
    base, other = tmp_path / "base", tmp_path / "other"
    for seed, folder in enumerate((base, other)):
        plain = build_decoder(CONFIG, seed=seed)
        save_checkpoint(folder, TrainState(), [plain], optimizer_of([plain]), ps)
    weights = adapters.open_base_weights(base)
    stages = randomised_(build_stages(make_model, ps, [lora(*LORAS)], weights=weights))
    facts = adapters.exclude_frozen_(stages, ps, source=base)
    run = tmp_path / "run"
    path = save_checkpoint(run, TrainState(), stages, optimizer_of(stages), ps, facts=facts)
    (again,) = adapters.build_trained_stages(path, make_model, ps, [])
    for name, p in get_named_parameters(stages).items():
        assert torch.equal(get_named_parameters([again])[name], p), name
    message = f"build_trained_stages: the weights in {other} are not the base of {path}"
    with pytest.raises(CheckpointError, match=message):
        adapters.build_trained_stages(path, make_model, ps, [], base=other)


def test_a_mean_of_adapters_is_what_is_built(tmp_path):
    ps, make_model = solo_parallel(), partial(Decoder, CONFIG)
    plain = build_decoder(CONFIG, seed=0)
    save_checkpoint(tmp_path / "base", TrainState(), [plain], optimizer_of([plain]), ps)
    weights = adapters.open_base_weights(tmp_path / "base")
    stages = build_stages(make_model, ps, [lora(*LORAS)], weights=weights)
    facts = adapters.exclude_frozen_(stages, ps, source=tmp_path / "base")
    optimizer, params = make_optimizer(stages, lr=0.1, mean=0.5), get_parameters(stages)
    for _ in range(2):  # the mean begins with what the first step gives
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
    path = save_checkpoint(tmp_path / "run", TrainState(), stages, optimizer, ps, facts=facts)
    (again,) = adapters.build_trained_stages(path, make_model, ps, [])
    with use_averaged_parameters(optimizer):
        means = [p.clone() for p in params]
    assert not any(map(torch.equal, means, params))
    assert all(map(torch.equal, get_parameters([again]), means))


def save_on_two(folder, layout):
    with parallel_session(layout) as ps:
        stages = build(ps, layout=layout)
        facts = adapters.exclude_frozen_(stages, ps, source="x")
        optimizer = optimizer_of(stages)
        state = trained(ps, stages, optimizer)
        save_checkpoint(folder, state, stages, optimizer, ps, facts=facts)
        return facts["base"], state_hash(state, stages, optimizer, ps)


def resume_in(layouts, folder, want):
    for layout in layouts:
        resume_in_one(folder, layout, want)


def resume_in_one(folder, layout, want):
    with parallel_session(layout) as ps:
        stages = build(ps, layout=layout, seed=1)
        facts = adapters.exclude_frozen_(stages, ps, source="x")
        optimizer = optimizer_of(stages)
        state = resume(folder, TrainState(), stages, optimizer, ps, facts=facts, log=lambda _: None)
        assert (facts["base"], state_hash(state, stages, optimizer, ps)) == want


def test_any_layout_goes_on_from_any_other(tmp_path):
    alone = build(solo_parallel())
    base = adapters.exclude_frozen_(alone, solo_parallel(), source="x")["base"]
    known = set(run_ranks(save_on_two, 2, tmp_path, Layout(tp=2)))
    assert len(known) == 1
    assert {base} == {found for found, _ in known}
    run_ranks(resume_in, 2, [Layout(dp_shard=2), Layout(pp=2)], tmp_path, *known)
    resume_in([Layout()], tmp_path, *known)
