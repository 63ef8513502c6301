"""The decoder: packing, heads, positions, ties, dropout, names and initial values."""

import json
import math
from functools import partial

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounter
from torch.nn import functional

from trainkit import noise
from trainkit.attention import sdpa
from trainkit.batch import make_padding_batch
from trainkit.models import (
    Decoder,
    DecoderConfig,
    Llama3Scaling,
    Norms,
    YarnScaling,
    build_decoder,
    call_model,
    call_with_noise,
    count_parameters,
    init_weights,
)
from trainkit.models.config import parameter_shapes
from trainkit.models.decoder import whole_logits
from trainkit.models.decoder_sizes import config_from_facts, list_decoder_sizes, make_decoder_config
from trainkit.models.rotary import rotary_frequencies, rotary_table, rotate
from trainkit.tools.testing.builtin import GEMMA_LIKE, GPT_LIKE, GPT_OSS_LIKE, OLMO_LIKE
from trainkit.types import SOLO, Spans, apply_softcap

SMALL = DecoderConfig(vocab_size=31, width=16, layers=2, heads=4, kv_heads=2, mlp_width=24)
RICH = attrs.evolve(
    SMALL,
    head_dim=6,
    qk_norm=True,
    qkv_bias=True,
    tied=True,
    rope_scaling=Llama3Scaling(factor=8.0, original_length=16),
)
GEMMA, OLMO, GPT = (
    attrs.evolve(config, vocab_size=31) for config in (GEMMA_LIKE, OLMO_LIKE, GPT_LIKE)
)
SINKS = attrs.evolve(GPT_OSS_LIKE, vocab_size=31)
OPTIONS = pytest.mark.parametrize(
    "config", [GEMMA, OLMO, GPT, SINKS], ids=["gemma", "olmo", "gpt", "gpt-oss"]
)
CONFIGS = pytest.mark.parametrize("config", [SMALL, RICH], ids=["llama", "qwen3, tied, scaled"])


def spans_of(lengths):
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return Spans(torch.tensor(offsets, dtype=torch.int32), np.array(lengths), max(lengths))


def packed(lengths, *, rows=1, seed=0):
    """Return a batch of rows with documents of these lengths (the same in every row)."""
    make = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, SMALL.vocab_size, (rows, sum(lengths)), generator=make)
    positions = torch.cat([torch.arange(n) for n in lengths]).expand(rows, -1)
    spans = spans_of(list(lengths) * rows)
    return {"input_ids": ids, "position_ids": positions, "spans": spans}


def double(config, **options):
    model = build_decoder(config, seed=3, **options).double()
    with torch.no_grad():  # norms and biases away from 1 and 0, where a mistake would not show
        for name, p in model.named_parameters():
            if p.ndim == 1:
                p.add_(0.1 * torch.sin(torch.arange(p.numel()) + len(name)))
    return model


def gradients(model):
    return {name: p.grad for name, p in model.named_parameters()}


def assert_equal(got, want):
    assert got.shape == want.shape
    # Without positions in it the bias of keys has no gradient: 0 up to rounding, on both sides.
    assert (got - want).abs().max() <= 1e-12 * want.abs().max() + 1e-14


def backward(logits):
    """Add the gradients of a sum whose terms depend on the logits alone, not on their place."""
    (logits.log_softmax(-1) * torch.linspace(0, 1, logits.shape[-1])).sum().backward()


# ------------------------------------------------------------------------------------- equivalences


@pytest.mark.parametrize(
    "config",
    [
        *(SMALL, RICH, GEMMA, OLMO, attrs.evolve(GPT, dropout=0.0)),
        attrs.evolve(SINKS, experts=None),
    ],
)
def test_packed_row_equals_its_documents_one_by_one(config):
    lengths = [5, 1, 9, 23]
    batch = packed(lengths)
    whole, alone = double(config), double(config)
    logits = call_model(whole, batch)
    backward(logits)
    parts = []
    for ids in batch["input_ids"].split(lengths, dim=1):
        parts.append(call_model(alone, packed([ids.shape[1]]) | {"input_ids": ids}))
        backward(parts[-1])
    assert_equal(logits, torch.cat(parts, dim=1))
    for name, gradient in gradients(whole).items():
        assert_equal(gradient, gradients(alone)[name])


def test_grouped_heads_equal_a_model_with_repeated_heads():
    grouped = double(SMALL)
    full = double(attrs.evolve(SMALL, kv_heads=SMALL.heads))
    values = grouped.state_dict()
    for name in values:
        if ".wk." in name or ".wv." in name:
            heads = values[name].unflatten(0, (SMALL.kv_heads, -1))
            values[name] = heads.repeat_interleave(2, dim=0).flatten(0, 1)
    full.load_state_dict(values)
    batch = packed([4, 7])
    logits = call_model(grouped, batch)
    backward(logits)
    want = call_model(full, batch)
    backward(want)
    assert_equal(logits, want)
    got = grouped.layers["0"].attention.wk.weight.grad.unflatten(0, (2, -1))
    want = full.layers["0"].attention.wk.weight.grad.unflatten(0, (2, 2, -1)).sum(1)
    assert_equal(got, want)


def test_tied_gradient_is_the_sum_of_both_uses():
    tied = double(attrs.evolve(SMALL, tied=True))
    untied = double(SMALL)
    values = tied.state_dict()
    assert "head.weight" not in values
    untied.load_state_dict(values | {"head.weight": values["embedding.weight"]})
    batch = packed([4, 7])
    for model in (tied, untied):
        backward(call_model(model, batch))
    both = untied.embedding.weight.grad + untied.head.weight.grad
    assert_equal(tied.embedding.weight.grad, both)


def test_hidden_head_holds_the_logits():
    for config in (SMALL, RICH, GEMMA):
        batch = packed([4, 7])
        logits = call_model(double(config), batch)
        model = double(config, head="hidden")
        hidden, weight, axis, softcap = call_model(model, batch)
        assert axis is SOLO
        assert_equal(apply_softcap(hidden @ weight.T, softcap), logits)
        assert_equal(whole_logits((hidden, weight, axis, softcap)), logits)
        assert not weight.is_leaf  # FSDP2 hooks what a module returns
        (hidden @ weight.T).sum().backward()
        assert all(p.grad is not None for p in model.parameters())


def written_out(model, ids, positions):
    """One document through the decoder's formulas, one head and one token pair at a time."""
    c, w = model.config, model.state_dict()

    def norm(x, weight):
        return x / (x.pow(2).mean(-1, keepdim=True) + c.norm_eps).sqrt() * weight

    def linear(x, name):
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0)

    def turned(x):
        out = torch.empty_like(x)
        half = c.head_size // 2
        for i, frequency in enumerate(reference_frequencies(c)):
            turn = torch.exp(1j * frequency * positions[0].double())
            pair = torch.complex(x[:, i], x[:, i + half]) * turn
            out[:, i], out[:, i + half] = pair.real, pair.imag
        return out

    x = w["embedding.weight"][ids[0]]
    for i in range(c.layers):
        name = f"layers.{i}"
        y = norm(x, w[f"{name}.attention_norm.weight"])
        q, k, v = (
            linear(y, f"{name}.attention.w{n}").unflatten(-1, (-1, c.head_size)) for n in "qkv"
        )
        heads = []
        for h in range(c.heads):
            g = h // (c.heads // c.kv_heads)
            q_, k_, v_ = q[:, h], k[:, g], v[:, g]
            if c.qk_norm:
                q_ = norm(q_, w[f"{name}.attention.q_norm.weight"])
                k_ = norm(k_, w[f"{name}.attention.k_norm.weight"])
            scores = turned(q_) @ turned(k_).T / math.sqrt(c.head_size)
            future = torch.ones_like(scores).triu(1).bool()
            heads.append(scores.masked_fill(future, -torch.inf).softmax(-1) @ v_)
        x = x + linear(torch.cat(heads, -1), f"{name}.attention.wo")
        y = norm(x, w[f"{name}.mlp_norm.weight"])
        gate, up = linear(y, f"{name}.mlp.gate"), linear(y, f"{name}.mlp.up")
        x = x + linear(gate * torch.sigmoid(gate) * up, f"{name}.mlp.down")
    return norm(x, w["norm.weight"]) @ w.get("head.weight", w["embedding.weight"]).T


def reference_frequencies(config):
    """The rotary frequencies of Llama 3, one Python float at a time, three cases."""
    scaling, out = config.rope_scaling, []
    for i in range(config.head_size // 2):
        frequency = config.rope_theta ** (-2 * i / config.head_size)
        if scaling is not None:
            length = 2 * math.pi / frequency
            low = scaling.original_length / scaling.low_freq_factor
            high = scaling.original_length / scaling.high_freq_factor
            if length > low:
                frequency /= scaling.factor
            elif length >= high:
                blend = (scaling.original_length / length - scaling.low_freq_factor) / (
                    scaling.high_freq_factor - scaling.low_freq_factor
                )
                frequency = (1 - blend) * frequency / scaling.factor + blend * frequency
        out.append(frequency)
    return out


@CONFIGS
def test_logits_equal_the_formulas_written_out(config):
    model = double(config)
    batch = packed([11])
    want = written_out(model, batch["input_ids"], batch["position_ids"])
    assert_equal(call_model(model, batch)[0], want)


@pytest.mark.parametrize("name", ["llama-3.1-8b", "llama-3.2-1b"])
def test_scaled_frequencies_follow_the_three_cases_of_llama3(name):
    config = make_decoder_config(name)
    compute = partial(
        rotary_frequencies, config.head_size, theta=config.rope_theta, dtype=torch.float64
    )
    got, plain = compute(scaling=config.rope_scaling), compute()
    assert_equal(got, torch.tensor(reference_frequencies(config), dtype=torch.float64))
    assert got[0] == plain[0]
    assert got[-1] == plain[-1] / config.rope_scaling.factor
    assert ((got < plain) & (got > plain / config.rope_scaling.factor)).any()


def test_rotary_scores_depend_on_distance_alone():
    frequencies = rotary_frequencies(8, theta=100.0, dtype=torch.float64)
    x, y = torch.randn(
        2, 1, 1, 1, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )

    def score(i, j):
        tables = [rotary_table(torch.tensor([[p]]), frequencies) for p in (i, j)]
        return (rotate(x, *tables[0]) * rotate(y, *tables[1])).sum()

    torch.testing.assert_close(score(3, 1), score(1003, 1001), rtol=1e-10, atol=0)
    assert (score(3, 1) - score(3, 2)).abs() > 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_turning_pairs_is_the_product_of_complex_numbers_bit_for_bit(dtype):
    generator = torch.Generator().manual_seed(0)
    x, grad = torch.randn(2, 1, 5, 3, 8, generator=generator).to(dtype)
    x.requires_grad_()
    table = rotary_table(torch.arange(5)[None], rotary_frequencies(8, theta=100.0))
    turned = rotate(x, *table)
    (got,) = torch.autograd.grad(turned, x, grad)
    cos, sin = (part[..., 4:] for part in table)
    re, im = x.chunk(2, dim=-1)
    want = torch.cat((re * cos - im * sin, im * cos + re * sin), dim=-1).to(dtype)
    assert torch.equal(turned, want)
    assert torch.equal(got, torch.autograd.grad(want, x, grad)[0])


def test_rotary_angles_and_products_of_a_half_precision_model_are_single_precision():
    model = build_decoder(SMALL, seed=0).bfloat16()
    positions = torch.tensor([[1001, 1002, 1003]])  # bf16 rounds these to one number
    (cos, sin), _ = model._make_rotary(positions, dtype=torch.bfloat16)
    assert cos.dtype == torch.float32
    want = torch.cos(positions[0].double()).float()
    torch.testing.assert_close(cos[0, :, 0, 0], want, rtol=0, atol=1e-6)
    x = torch.randn(1, 3, 2, 4, generator=torch.Generator().manual_seed(0)).bfloat16()
    turned = rotate(x, cos, sin)
    assert turned.dtype == x.dtype
    assert torch.equal(turned, rotate(x.float(), cos, sin).bfloat16())


def test_under_autocast_attention_sees_one_low_dtype():
    """A table in fp32 must not make queries and keys wider than values: flash would not take it."""
    seen = []

    def attend(q, k, v, *, spans, scale=None, **how):
        assert how == {"window": None, "softcap": None}
        seen.extend(x.dtype for x in (q, k, v))
        return sdpa(q, k, v, spans=spans, scale=scale)

    batch = packed([4, 7])
    with torch.autocast("cpu", torch.bfloat16):
        call_model(build_decoder(SMALL, seed=0, attend=attend), batch)
    assert set(seen) == {torch.bfloat16}


def test_attention_is_an_argument():
    seen = []

    def attend(q, k, v, *, spans, scale=None, **how):
        assert how == {"window": None, "softcap": None}
        seen.append((q.shape, k.shape))
        return sdpa(q, k, v, spans=spans, scale=scale)

    batch = packed([4, 7])
    call_model(build_decoder(SMALL, seed=0, attend=attend), batch)
    assert seen == [((1, 11, 4, 4), (1, 11, 2, 4))] * 2


# ------------------------------------------------------------------------------------------ dropout


def dropped(model, batch, keys):
    return call_with_noise(model, batch | {"noise_key": keys})


@pytest.mark.case("X3")
def test_dropout_does_not_depend_on_rows_or_microbatches():
    model = double(attrs.evolve(SMALL, dropout=0.3)).train()
    rows, length = 4, 6
    batch = packed([length], rows=rows)
    index = torch.arange(rows * length).view(rows, length)
    keys = noise.make_token_keys(index, seed=1, step=2)
    together = dropped(model, batch, keys)
    one_row = dropped(
        model,
        {
            "input_ids": batch["input_ids"].view(1, -1),
            "position_ids": batch["position_ids"].reshape(1, -1),
            "spans": batch["spans"],
        },
        keys.view(1, -1),
    )
    assert_equal(one_row.view_as(together), together)
    for row in range(rows):
        own = packed([length]) | {"input_ids": batch["input_ids"][row : row + 1]}
        assert_equal(dropped(model, own, keys[row : row + 1]), together[row : row + 1])


def test_dropout_uses_each_site_once_under_its_name_in_the_whole_model(monkeypatch):
    sites = []
    real = noise.dropout

    def recorded(x, keys, *, name, p, **options):
        sites.append((name, p))
        return real(x, keys, name=name, p=p, **options)

    monkeypatch.setattr("trainkit.noise.counters.dropout", recorded)
    model = build_decoder(attrs.evolve(SMALL, dropout=0.3), seed=0)
    batch = packed([4])
    dropped(model, batch, batch["input_ids"])
    names = ["embedding", *(f"layers.{i}.{site}" for i in (0, 1) for site in ("attention", "mlp"))]
    assert sites == [(name, 0.3) for name in names]


def test_dropout_changes_training_only_and_differs_between_steps():
    model = double(attrs.evolve(SMALL, dropout=0.3))
    batch = packed([4, 7])
    index = torch.arange(11)[None]
    first, second = (noise.make_token_keys(index, seed=0, step=step) for step in (0, 1))
    plain = call_model(double(SMALL), batch)
    training = dropped(model.train(), batch, first)
    assert torch.equal(training, dropped(model, batch, first))
    assert not torch.allclose(training, dropped(model, batch, second))
    assert not torch.allclose(training, plain)
    assert_equal(dropped(model.eval(), batch, first), plain)
    assert_equal(call_model(model.eval(), batch), plain)


def test_dropout_without_keys_is_refused():
    model = build_decoder(attrs.evolve(SMALL, dropout=0.1), seed=0).train()
    batch = packed([4])
    with pytest.raises(ValueError, match=r"no noise_key; put noise\.make_token_keys"):
        call_model(model, batch)


# --------------------------------------------------------------------------------- names and values


@CONFIGS
def test_meta_model_has_the_promised_names_and_no_buffers(config):
    with torch.device("meta"):
        model = Decoder(config)
    assert all(p.is_meta for p in model.parameters())
    assert not list(model.buffers())
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert shapes == parameter_shapes(config)
    assert set(model.state_dict()) == set(shapes)
    block = {name.removeprefix("layers.1.") for name in shapes if name.startswith("layers.1.")}
    want = {f"attention.{w}.weight" for w in ("wq", "wk", "wv", "wo")}
    want |= {f"mlp.{w}.weight" for w in ("gate", "up", "down")}
    want |= {"attention_norm.weight", "mlp_norm.weight"}
    if config is RICH:
        want |= {f"attention.{w}.bias" for w in ("wq", "wk", "wv")}
        want |= {"attention.q_norm.weight", "attention.k_norm.weight"}
    assert block == want
    outside = {name for name in shapes if not name.startswith("layers.")}
    tail = set() if config.tied else {"head.weight"}
    assert outside == {"embedding.weight", "norm.weight"} | tail


@OPTIONS
def test_options_have_the_promised_names_values_and_facts(config):
    model = build_decoder(config, seed=0)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert shapes == parameter_shapes(config)
    assert count_parameters(config) == sum(p.numel() for p in model.parameters())
    for name, p in model.named_parameters():
        if p.ndim == 1:
            value = 0.0 if name.endswith(("bias", "sinks")) or config is GEMMA else 1.0
            assert (p == value).all(), name
    saved = json.loads(json.dumps(attrs.asdict(config)))
    assert config_from_facts(saved) == config
    plain = attrs.asdict(SMALL)
    before = {name: x for name, x in plain.items() if name in _FIELDS_OF_OLD}
    assert config_from_facts(before) == SMALL
    later = {name: x for name, x in plain.items() if name not in before}
    assert {*later.values()} <= {None, False}  # which is no change to a run that began before
    yarn = attrs.evolve(SMALL, rope_scaling=YarnScaling(factor=2.0, original_length=16))
    old = attrs.asdict(yarn)
    assert old["rope_scaling"].pop("fractional") is False
    assert config_from_facts(old) == yarn


_FIELDS_OF_OLD = {
    *("vocab_size", "width", "layers", "heads", "kv_heads", "mlp_width", "head_dim", "norm_eps"),
    *("rope_theta", "rope_scaling", "qk_norm", "qkv_bias", "tied", "dropout", "experts", "latents"),
}


def test_embeddings_are_scaled_by_what_their_dtype_can_say():
    config = attrs.evolve(SMALL, width=48, embedding_scale=48**0.5)  # 6.93, in bf16 6.9375
    model = build_decoder(config, seed=0).bfloat16()
    batch = packed([4])
    x = model._embed(batch["input_ids"], batch["position_ids"], None)
    assert torch.equal(x, model.embedding(batch["input_ids"]) * torch.tensor(48**0.5).bfloat16())


def test_multipliers_and_layers_without_positions_compute_what_they_say():
    config = attrs.evolve(SMALL, residual_scale=0.3, logit_divisor=1.7, no_rope_every=2)
    model, plain = double(config), double(SMALL)
    with torch.no_grad():  # the matrices that end a branch, and the norm before the head
        for block in plain.layers.values():
            block.attention.wo.weight.mul_(0.3)
            block.mlp.down.weight.mul_(0.3)
        plain.norm.weight.div_(1.7)
    batch = packed([9])
    logits = call_model(model, batch)
    assert (logits - call_model(plain, batch)).abs().max() > 1e-3
    # The second layer sees no positions: all of them are 0 for it.
    nowhere = plain._make_rotary(torch.zeros_like(batch["position_ids"]), dtype=torch.float64)
    plain.layers["1"].register_forward_pre_hook(
        lambda _, args, kwargs: (args, kwargs | {"rotary": nowhere}), with_kwargs=True
    )
    assert_equal(logits, call_model(plain, batch))


def test_constructor_draws_no_random_numbers():
    state = torch.get_rng_state()
    Decoder(SMALL)
    assert torch.equal(torch.get_rng_state(), state)


@settings(max_examples=30)
@given(st.sampled_from(sorted(parameter_shapes(RICH))), st.data())
def test_any_box_of_an_initial_value_is_that_part_of_the_whole(name, data):
    weights = init_weights(RICH, seed=5)
    whole_shape = parameter_shapes(RICH)[name]
    whole = weights(name, whole_shape, (0,) * len(whole_shape))
    offset = [data.draw(st.integers(0, size)) for size in whole_shape]
    shape = [data.draw(st.integers(0, n - o)) for n, o in zip(whole_shape, offset, strict=True)]
    box = weights(name, shape, offset)
    part = tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))
    assert box.dtype == torch.float32
    assert torch.equal(box, whole[part])


def test_initial_values_have_the_stated_scales():
    config = DecoderConfig(
        vocab_size=300, width=128, layers=8, heads=4, kv_heads=2, mlp_width=256, qkv_bias=True
    )
    values = dict(build_decoder(config, seed=0).named_parameters())
    scales = {
        "embedding.weight": 128**-0.5,
        "head.weight": 128**-0.5,
        "layers.3.attention.wq.weight": 128**-0.5,
        "layers.3.mlp.up.weight": 128**-0.5,
        "layers.3.attention.wo.weight": (128 * 16) ** -0.5,
        "layers.3.mlp.down.weight": (256 * 16) ** -0.5,
    }
    for name, std in scales.items():
        assert values[name].detach().std().item() == pytest.approx(std, rel=0.05)
    assert torch.equal(values["layers.3.mlp_norm.weight"], torch.ones(128))
    assert torch.equal(values["layers.3.attention.wq.bias"], torch.zeros(128))
    assert not torch.equal(values["layers.3.mlp.up.weight"], values["layers.4.mlp.up.weight"])
    other = init_weights(config, seed=1)("layers.3.mlp.up.weight", (256, 128), (0, 0))
    assert not torch.equal(values["layers.3.mlp.up.weight"], other)


@pytest.mark.parametrize(
    ("name", "shape", "offset", "match"),
    [
        ("layers.2.mlp.up.weight", (24, 16), (0, 0), "'layers.2.mlp.up.weight' is no parameter"),
        ("head.bias", (31,), (0,), "'head.bias' is no parameter"),
        ("layers.1.mlp.up.weight", (24, 16), (1, 0), r"not inside layers.1.*shape \(24, 16\)"),
        ("layers.1.mlp.up.weight", (24,), (0,), "not inside"),
    ],
)
def test_initial_values_of_what_is_not_there_are_refused(name, shape, offset, match):
    with pytest.raises(ValueError, match=match):
        init_weights(SMALL, seed=0)(name, shape, offset)


# ----------------------------------------------------------------------------------- configurations


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"vocab_size": 0}, "vocab_size must be at least 1, got 0"),
        ({"layers": -1}, "layers must be at least 1, got -1"),
        ({"kv_heads": 3}, "kv_heads must be a divisor of heads = 4, got 3"),
        ({"heads": 5, "kv_heads": 5}, "width must be a multiple of heads = 5, or head_dim given"),
        ({"head_dim": 7}, "head_size must be even and at least 2, for the rotary pairs, got 7"),
        ({"head_dim": 0}, "head_dim must be a finite number of at least 1"),
        ({"dropout": 1.0}, r"dropout must be in \[0, 1\), got 1.0"),
        ({"norm_eps": 0.0}, "norm_eps must be positive, got 0.0"),
        ({"rope_theta": 1.0}, "rope_theta must be above 1, got 1.0"),
        ({"rotary_dim": 3}, "rotary_dim must be even, from 2 to head_size = 4, got 3"),
        ({"rotary_dim": 8}, "rotary_dim must be even, from 2 to head_size = 4, got 8"),
        ({"positions": 0}, "positions must be above 0, got 0"),
        ({"positions": 8, "rotary_dim": 2}, "positions must be left out, where rotary"),
        ({"logit_softcap": 0.0}, "logit_softcap must be above 0, got 0.0"),
        ({"residual_scale": 0.0}, "residual_scale must be above 0, got 0.0"),
        ({"logit_divisor": -1.0}, "logit_divisor must be above 0, got -1.0"),
        ({"no_rope_every": 0}, "no_rope_every must be above 0, got 0"),
        ({"positions": 8, "no_rope_every": 2}, "positions must be left out, where rotary"),
        ({"qk_norm": "all"}, "qk_norm must be False, True or 'wide', got all"),
        ({"qk_norm": "wide", "norms": Norms(kind="layer")}, "qk_norm must be per head"),
    ],
)
def test_a_bad_configuration_is_refused_by_field_value_and_rule(change, match):
    with pytest.raises(ValueError, match=match):
        attrs.evolve(SMALL, **change)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Llama3Scaling(factor=0.5),
        lambda: Llama3Scaling(factor=8.0, low_freq_factor=4.0),
        lambda: Llama3Scaling(factor=8.0, original_length=0),
    ],
)
def test_a_bad_rope_scaling_is_refused(make):
    with pytest.raises(ValueError, match=r"Llama3Scaling: .* factor >= 1"):
        make()


def test_an_unknown_head_is_refused():
    with pytest.raises(ValueError, match='head must be "logits" or "hidden", got \'logit\''):
        Decoder(SMALL, head="logit")


PUBLISHED = {
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
}
MIXTURES = {
    "mixtral-8x7b": 46_702_792_704,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "deepseek-v3": 671_026_404_352,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
}
SMALL_SIZES = {
    "tiny": 0.9e6,
    "tiny-hybrid": 0.9e6,
    "10m": 10e6,
    "60m": 60e6,
    "125m": 125e6,
    "350m": 350e6,
}


def test_every_named_size_is_pinned():
    assert set(list_decoder_sizes()) == {*PUBLISHED, *MIXTURES, *SMALL_SIZES}


@pytest.mark.parametrize("name", PUBLISHED | MIXTURES)
def test_public_sizes_have_their_published_number_of_parameters(name):
    assert count_parameters(make_decoder_config(name)) == (PUBLISHED | MIXTURES)[name]


@pytest.mark.parametrize("name", SMALL_SIZES)
def test_small_sizes_are_what_they_are_called(name):
    assert count_parameters(make_decoder_config(name)) == pytest.approx(SMALL_SIZES[name], rel=0.03)


@pytest.mark.parametrize("name", ["tiny", "llama-3.2-1b", "llama-3.1-8b", "qwen3-8b"])
def test_counted_parameters_are_those_of_the_model(name):
    with torch.device("meta"):
        model = Decoder(make_decoder_config(name))
    assert sum(p.numel() for p in model.parameters()) == count_parameters(make_decoder_config(name))


def test_overrides_replace_fields():
    config = make_decoder_config("tiny", width=64, dropout=0.1)
    assert (config.width, config.head_size, config.dropout) == (64, 16, 0.1)


def test_an_unknown_size_names_the_nearest():
    with pytest.raises(ValueError, match=r"no size is named 'llama-3.1-8B', .* 'llama-3.1-8b'"):
        make_decoder_config("llama-3.1-8B")


def test_a_small_model_learns():
    model = build_decoder(make_decoder_config("tiny", width=32, layers=2, mlp_width=64), seed=0)
    ids = torch.tensor([list(b"the cat sat on the mat. the cat sat on the mat.")])
    positions, spans = torch.arange(ids.shape[1])[None], spans_of([ids.shape[1]])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        logits = model(ids, position_ids=positions, spans=spans)
        loss = functional.cross_entropy(logits[0, :-1], ids[0, 1:])
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[0] == pytest.approx(math.log(259), abs=0.2)
    assert losses[-1] < 0.5


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # torch 2.13
def test_blocks_compile_and_give_the_same_numbers_for_other_documents():
    import torch._dynamo

    torch._dynamo.reset()
    config = attrs.evolve(SMALL, layers=1, dropout=0.2)
    plain, compiled = double(config), double(config)
    compiled.layers["0"].compile(backend="aot_eager")
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        for seed, lengths in enumerate(([5, 7], [3, 4, 5], [1, 11])):
            batch = packed(lengths, seed=seed)
            keys = noise.make_token_keys(batch["input_ids"], seed=0, step=seed)
            outputs = [dropped(model, batch, keys) for model in (compiled, plain)]
            assert_equal(*outputs)
            for output in outputs:
                backward(output)
    for name, gradient in gradients(compiled).items():
        assert_equal(gradient, gradients(plain)[name.replace("_orig_mod.", "")])
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch's own, inside dynamo
@pytest.mark.parametrize("dropout", [pytest.param(0.0, marks=pytest.mark.only_all), 0.5])
def test_all_layers_share_their_compiled_code(dropout):
    # Beyond 8 versions of one function torch.compile falls back to eager code without a word: a
    # version for each layer would show with the third.
    torch._dynamo.reset()
    config = make_decoder_config(
        "tiny", layers=3, width=16, heads=2, kv_heads=2, mlp_width=16, dropout=dropout
    )
    model, counter = build_decoder(config, seed=0), CompileCounter()
    for block in model.layers.values():
        block.compile(backend=counter)
    before_the_third = []
    model.layers["2"].register_forward_pre_hook(
        lambda *_: before_the_third.append(counter.frame_count)
    )
    batch = make_padding_batch(1, 4)
    keys = torch.arange(4).view(1, 4)
    model(batch.input_ids, position_ids=batch.position_ids, spans=batch.spans, noise_key=keys)
    assert before_the_third == [counter.frame_count]
    assert counter.frame_count > 0
