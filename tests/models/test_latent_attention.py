"""Latent attention: packed and not; YaRN; sizes that have it; `tests/hub` has `transformers`."""

from functools import partial

import attrs
import pytest
import torch

from trainkit.attention import sdpa
from trainkit.batch import batch_from_rows
from trainkit.losses import next_token
from trainkit.models import (
    Decoder,
    DecoderConfig,
    Experts,
    Latents,
    YarnScaling,
    build_decoder,
    call_model,
    call_routed,
    count_active_parameters,
    count_parameters,
    init_weights,
    make_decoder_config,
)
from trainkit.models.config import parameter_shapes
from trainkit.models.decoder_sizes import config_from_facts
from trainkit.models.rotary import rotary_frequencies
from trainkit.post.generation import Sampling, generate
from trainkit.tools.testing.builtin import decoder_batch
from trainkit.tools.testing.distribute_batch import distribute_batch
from trainkit.types import ConfigError, DataShard

CONFIG = DecoderConfig(
    vocab_size=64,
    width=32,
    layers=2,
    heads=4,
    kv_heads=4,
    mlp_width=48,
    norm_eps=1e-6,
    latents=Latents(query_rank=20, kv_rank=12, plain=10, rotary=8, values=6),
)
NO_QUERY_RANK = attrs.evolve(CONFIG, latents=attrs.evolve(CONFIG.latents, query_rank=None))
YARN = YarnScaling(factor=8.0, original_length=32, beta_fast=4.0, mscale=0.7)


EXPERTS = Experts(
    count=8,
    top_k=3,
    width=16,
    shared=32,
    first=1,
    scores="sigmoid",
    biased=True,
    groups=4,
    groups_chosen=2,
    scale=2.5,
)


# ---------------------------------------------------------------------------------- the decoder


def double(config):
    model = build_decoder(config, seed=3).double()
    with torch.no_grad():  # norms away from 1, where a mistake would not show
        for name, p in model.named_parameters():
            if p.ndim == 1:
                p.add_(0.1 * torch.sin(torch.arange(p.numel()) + len(name)))
    return model


@pytest.mark.parametrize("config", [CONFIG, attrs.evolve(NO_QUERY_RANK, rope_scaling=YARN)])
def test_rows_one_by_one_give_what_they_give_together(config):
    whole, found = decoder_batch(0), []
    for rows in (None, 1):
        model = double(config)
        for batch in distribute_batch(whole, DataShard(), rows_per_microbatch=rows):
            next_token(call_model(model, batch), batch)[0].backward()
        found.append({name: p.grad for name, p in model.named_parameters()})
    torch.testing.assert_close(*found, rtol=1e-11, atol=1e-13)


def written_out(model, ids):
    """One document through the first attention, head by head, by the paper's equations 37 to 47."""
    c, w = model.config, model.state_dict()
    latents, name = c.latents, "layers.0.attention"

    def norm(x, weight):
        return x / (x.pow(2).mean(-1, keepdim=True) + c.norm_eps).sqrt() * w[weight]

    def turned(x):
        half, positions = latents.rotary // 2, torch.arange(len(x), dtype=x.dtype)
        pairs = torch.complex(x[:, :half], x[:, half:])
        frequencies = c.rope_theta ** -(torch.arange(half, dtype=x.dtype) / half)
        pairs = pairs * torch.exp(1j * positions[:, None] * frequencies)
        return torch.cat([pairs.real, pairs.imag], -1)

    x = norm(w["embedding.weight"][ids], "layers.0.attention_norm.weight")
    q_latent = norm(x @ w[f"{name}.q_latent.weight"].T, f"{name}.q_latent_norm.weight")
    kv_latent = norm(x @ w[f"{name}.kv_latent.weight"].T, f"{name}.kv_latent_norm.weight")
    k_turned = turned(x @ w[f"{name}.k_rotary.weight"].T)
    heads = []
    for h in range(c.heads):
        q = q_latent @ w[f"{name}.wq.weight"].unflatten(0, (c.heads, -1))[h].T
        kv = kv_latent @ w[f"{name}.wkv.weight"].unflatten(0, (c.heads, -1))[h].T
        k, v = kv[:, : latents.plain], kv[:, latents.plain :]
        scores = q[:, : latents.plain] @ k.T + turned(q[:, latents.plain :]) @ k_turned.T
        future = torch.ones_like(scores).triu(1).bool()
        scores = scores / (latents.plain + latents.rotary) ** 0.5
        heads.append(scores.masked_fill(future, -torch.inf).softmax(-1) @ v)
    return torch.cat(heads, -1) @ w[f"{name}.wo.weight"].T


def test_attention_is_that_of_the_paper_written_out():
    model, ids, seen = double(CONFIG), torch.arange(11), []
    model.layers["0"].attention.register_forward_hook(lambda _, __, out: seen.append(out))
    call_model(model, batch_from_rows(ids[None]))
    torch.testing.assert_close(seen[0][0], written_out(model, ids), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("config", [CONFIG, NO_QUERY_RANK])
def test_names_shapes_and_scales_are_promised_before_a_model_is_made(config):
    with torch.device("meta"):
        model = Decoder(config)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert shapes == parameter_shapes(config)
    assert not list(model.buffers())
    values = build_decoder(config, seed=0).state_dict()
    for name in ("kv_latent", "k_rotary", "wkv", "wq"):
        weight = values[f"layers.0.attention.{name}.weight"]
        assert weight.std().item() == pytest.approx(weight.shape[1] ** -0.5, rel=0.2)
    norm = "layers.1.attention.kv_latent_norm.weight"
    assert torch.equal(init_weights(config, seed=0)(norm, (12,), (0,)), torch.ones(12))


def test_text_is_drawn():
    model = build_decoder(attrs.evolve(CONFIG, experts=EXPERTS), seed=0)
    ids = [1, 2, 3]
    (drawn,) = generate(
        model, [ids[:]], max_new_tokens=4, context=8, sampling=Sampling(temperature=0)
    )
    for token in drawn.ids:
        batch = batch_from_rows(torch.tensor([ids]))
        assert int(call_routed(model, batch).output[0, -1].argmax()) == token
        ids.append(token)


@pytest.mark.filterwarnings("ignore:Mismatch dtype")  # of norms behind a matrix, under autocast
def test_under_autocast_queries_keys_and_values_have_one_low_dtype():
    seen = []

    def attend(q, k, v, *, spans, scale=None, **how):
        assert how == {"window": None, "softcap": None}
        seen.extend(x.dtype for x in (q, k, v))
        return sdpa(q, k, v, spans=spans, scale=scale)

    model, batch = build_decoder(CONFIG, seed=0, attend=attend), decoder_batch(0)
    exact = call_model(model, batch)
    seen.clear()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = call_model(model, batch)
    assert set(seen) == {torch.bfloat16}
    assert 1e-4 < (low.float() - exact).norm() / exact.norm() < 0.1


# ------------------------------------------------------------------------------- configurations


def test_facts_bring_back_latents_and_yarn():
    config = make_decoder_config("deepseek-v3")
    assert config_from_facts(attrs.asdict(config)) == config


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"kv_heads": 2}, "kv_heads must be heads, with latents, got 2"),
        ({"head_dim": 8}, "head_dim must be left out, with latents, got 8"),
        ({"qk_norm": True}, "qk_norm must be left out, with latents, got True"),
        ({"qkv_bias": True}, "qkv_bias must be left out, with latents"),
        ({"value_norm": True}, "value_norm must be left out, with latents"),
        (
            {"layer_scales": True, "experts": EXPERTS},
            "layer_scales must be False, with experts",
        ),
    ],
)
def test_what_latents_leave_no_room_for_is_refused(change, match):
    with pytest.raises(ValueError, match=match):
        attrs.evolve(CONFIG, **change)


@pytest.mark.parametrize("field", ["query_rank", "kv_rank", "plain", "rotary", "values"])
def test_latents_of_no_size_are_refused(field):
    with pytest.raises(ConfigError, match=f"{field} must be .*got 0"):
        attrs.evolve(CONFIG.latents, **{field: 0})


@pytest.mark.parametrize(
    "make",
    [
        partial(attrs.evolve, YARN, factor=0.5),
        partial(attrs.evolve, YARN, beta_slow=9.0),
        partial(attrs.evolve, YARN, original_length=0),
        partial(attrs.evolve, YARN, mscale=-1.0),
    ],
)
def test_a_bad_yarn_is_refused(make):
    with pytest.raises(ValueError, match=r"YarnScaling: .* factor >= 1"):
        make()


def test_yarn_keeps_fast_pairs_and_slows_slow_ones():
    config = make_decoder_config("deepseek-v3")
    compute = partial(
        rotary_frequencies, config.rotary_size, theta=config.rope_theta, dtype=torch.float64
    )
    got, plain = compute(scaling=config.rope_scaling), compute()
    # Pairs 10 and 23 turn 32 times and once in 4,096 tokens, rounded outwards.
    assert torch.equal(got[:11], plain[:11])
    torch.testing.assert_close(got[23:], plain[23:] / 40, rtol=1e-14, atol=0)
    assert ((got < plain) & (got > plain / 40))[11:23].all()


PUBLISHED = {  # billions: all, and those that a token meets, as their reports cut or round them
    "mixtral-8x7b": (46.7, 12.9),
    "qwen3-30b-a3b": (30.5, 3.3),
    "qwen3-235b-a22b": (235, 22),
    "deepseek-v3": (671, 37),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_mixtures_have_their_published_numbers_of_parameters(name):
    config = make_decoder_config(name)
    every, active = PUBLISHED[name]
    assert count_parameters(config) / 1e9 == pytest.approx(every, rel=2e-3)
    assert count_active_parameters(config) / 1e9 == pytest.approx(active, rel=2e-2)
    with torch.device("meta"):
        model = Decoder(attrs.evolve(config, layers=5))
    shapes = {parameter: tuple(p.shape) for parameter, p in model.named_parameters()}
    assert shapes == parameter_shapes(model.config)


def test_active_parameters_are_those_of_the_dense_model_of_the_same_width():
    config = make_decoder_config("tiny")
    assert count_active_parameters(config) == count_parameters(config)
    sparse = attrs.evolve(config, experts=Experts(count=8, top_k=2, width=config.mlp_width // 2))
    routers = 8 * config.width * config.layers
    assert count_active_parameters(sparse) == count_parameters(config) + routers
