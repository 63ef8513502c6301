"""Latent attention: against `transformers`, packed and not; YaRN; sizes that have it."""

import attrs
import pytest
import torch
from torch import nn

from trainkit.attention import sdpa
from trainkit.batch import batch_of_rows
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
    config_from_facts,
    count_active_parameters,
    count_parameters,
    decoder_config,
    generate,
    init_weights,
)
from trainkit.models.config import parameter_shapes
from trainkit.models.rotary import rotary_frequencies
from trainkit.testing.builtin import decoder_batch
from trainkit.testing.deal import deal_batch
from trainkit.types import ConfigError, Place

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


# -------------------------------------------------------------------------- against transformers

EXPERTS = Experts(
    count=8,
    chosen=3,
    width=16,
    shared=32,
    first=1,
    scores="sigmoid",
    biased=True,
    groups=4,
    groups_chosen=2,
    scale=2.5,
)


def hugging_face(config):
    transformers = pytest.importorskip("transformers")
    e, latents, yarn = config.experts, config.latents, config.rope_scaling
    rope = {"rope_type": "default", "rope_theta": config.rope_theta}
    if yarn is not None:
        rope |= {
            "rope_type": "yarn",
            "factor": yarn.factor,
            "original_max_position_embeddings": yarn.original_length,
            "beta_fast": yarn.beta_fast,
            "beta_slow": yarn.beta_slow,
            "mscale": yarn.mscale,
            "mscale_all_dim": yarn.mscale,
        }
    torch.manual_seed(0)
    theirs = transformers.DeepseekV3ForCausalLM(
        transformers.DeepseekV3Config(
            vocab_size=config.vocab_size,
            hidden_size=config.width,
            intermediate_size=config.mlp_width,
            moe_intermediate_size=e.width,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.kv_heads,
            n_shared_experts=e.shared // e.width,
            n_routed_experts=e.count,
            routed_scaling_factor=e.scale,
            kv_lora_rank=latents.kv_rank,
            q_lora_rank=latents.query_rank,
            qk_rope_head_dim=latents.rotary,
            v_head_dim=latents.values,
            qk_nope_head_dim=latents.plain,
            n_group=e.groups,
            topk_group=e.groups_chosen,
            num_experts_per_tok=e.chosen,
            first_k_dense_replace=e.first,
            norm_topk_prob=e.renormalise,
            max_position_embeddings=256,
            rms_norm_eps=config.norm_eps,  # the norms of its latents have 1e-6 whatever this is
            rope_parameters=rope,
            attn_implementation="eager",
        )
    ).eval()
    with torch.no_grad():
        for name, p in theirs.named_parameters():  # small values would make all scores alike
            nn.init.ones_(p) if p.ndim == 1 else nn.init.normal_(p, std=p.shape[-1] ** -0.5)
            if p.ndim == 1:
                p.add_(0.1 * torch.sin(torch.arange(p.numel()) + len(name)))
    return theirs


NAMES = {
    "embedding": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "layers": "model.layers",
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "attention": "self_attn",
    "q_latent": "q_a_proj",
    "q_latent_norm": "q_a_layernorm",
    "kv_latent": "kv_a_proj_with_mqa",
    "k_rotary": "kv_a_proj_with_mqa",
    "kv_latent_norm": "kv_a_layernorm",
    "wkv": "kv_b_proj",
    "wo": "o_proj",
    "router": "gate",
    "shared": "shared_experts",
    **{name: f"{name}_proj" for name in ("gate", "up", "down")},
}


def halves(rotary):
    """Return rows of neighbours, as DeepSeek has its rotary pairs, with first halves first."""
    return torch.cat([rotary[..., 0::2, :], rotary[..., 1::2, :]], -2)


def named_there(state, name, latents):
    """Return the tensor of a Hugging Face model for a parameter of ours."""
    names = NAMES | {"wq": "q_b_proj" if latents.query_rank else "q_proj"}
    *parents, owner, last = name.split(".")
    if owner == "experts":
        base = ".".join([names.get(part, part) for part in parents] + [owner])
        if last == "down":
            return state[f"{base}.down_proj"]
        return state[f"{base}.gate_up_proj"].chunk(2, 1)[last == "up"]
    there = state[".".join(names.get(part, part) for part in [*parents, owner, last])]
    if owner == "wq":
        heads = there.unflatten(0, (-1, latents.plain + latents.rotary))
        plain, rotary = heads.split([latents.plain, latents.rotary], 1)
        return torch.cat([plain, halves(rotary)], 1).flatten(0, 1)
    if owner == "kv_latent":
        return there[: latents.kv_rank]
    if owner == "k_rotary":
        return halves(there[latents.kv_rank :])
    return there


def same_as_there(config):
    """Return a decoder and DeepSeek-V3 of transformers with the same weights and biases."""
    theirs, ours = hugging_face(config), Decoder(config)
    state = dict(theirs.named_parameters())
    with torch.no_grad():
        for name, p in ours.named_parameters():
            p.copy_(named_there(state, name, config.latents))
        for i in config.expert_layers:
            # All wanted less than 0: experts of groups that are not chosen are at minus infinity in
            # both, and would be chosen here if they were at 0.
            bias = torch.linspace(-1.2, -0.6, config.experts.count)
            ours.layers[str(i)].mlp.router.bias.copy_(bias)
            theirs.model.layers[i].mlp.gate.e_score_correction_bias.copy_(bias)
    return ours, theirs


@pytest.mark.parametrize(
    ("latents", "experts", "yarn"),
    [
        (CONFIG.latents, EXPERTS, None),
        (CONFIG.latents, EXPERTS, YARN),
        (NO_QUERY_RANK.latents, attrs.evolve(EXPERTS, renormalise=False), None),
        (attrs.evolve(CONFIG.latents, values=24), attrs.evolve(EXPERTS, first=0), YARN),
    ],
    ids=["latent queries", "yarn", "queries of the stream", "wide values"],
)
@pytest.mark.parametrize("packed", [True, False])
def test_logits_and_gradients_are_those_of_transformers(latents, experts, yarn, packed):
    config = attrs.evolve(
        CONFIG, layers=3, latents=latents, experts=experts, rope_scaling=yarn, rope_theta=50.0
    )
    ours, theirs = same_as_there(config)
    batch, mask = decoder_batch(0), None
    if packed:
        documents = batch.document_ids
        same = documents.unsqueeze(-1) == documents.unsqueeze(-2)
        seen = (same & torch.ones_like(same).tril()).unsqueeze(1)
        mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo().min)
    else:
        batch = batch_of_rows(batch.input_ids)
    is_token = batch.document_ids >= 0
    logits = call_routed(ours, batch).output
    there = theirs(
        input_ids=batch.input_ids, position_ids=batch.position_ids, attention_mask=mask
    ).logits
    torch.testing.assert_close(logits[is_token], there[is_token], rtol=1e-5, atol=2e-5)
    for each in (logits, there):
        nn.functional.cross_entropy(each.flatten(0, 1), batch.labels.flatten()).backward()
    grads = {name: p.grad for name, p in theirs.named_parameters()}
    for name, p in ours.named_parameters():
        want = named_there(grads, name, config.latents)
        torch.testing.assert_close(p.grad, want, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: n + m)


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
        for batch in deal_batch(whole, Place(), rows_per_microbatch=rows):
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
    call_model(model, batch_of_rows(ids[None]))
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
    options = {"max_new_tokens": 4, "context": 8, "temperature": 0, "call": call_routed}
    drawn, ids = generate(model, [1, 2, 3], **options), [1, 2, 3]
    for token in drawn:
        batch = batch_of_rows(torch.tensor([ids]))
        assert int(call_routed(model, batch).output[0, -1].argmax()) == token
        ids.append(token)


@pytest.mark.filterwarnings("ignore:Mismatch dtype")  # of norms behind a matrix, under autocast
def test_under_autocast_queries_keys_and_values_have_one_low_dtype():
    seen = []

    def attend(q, k, v, *, spans, scale=None):
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
    config = decoder_config("deepseek-v3")
    assert config_from_facts(attrs.asdict(config)) == config


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"kv_heads": 2}, "kv_heads must be heads, with latents, got 2"),
        ({"head_dim": 8}, "head_dim must be left out, with latents, got 8"),
        ({"qk_norm": True}, "qk_norm must be left out, with latents, got True"),
        ({"qkv_bias": True}, "qkv_bias must be left out, with latents"),
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
    "change", [{"factor": 0.5}, {"beta_slow": 9.0}, {"original_length": 0}, {"mscale": -1.0}]
)
def test_a_bad_yarn_is_refused(change):
    with pytest.raises(ValueError, match="YarnScaling: want factor >= 1"):
        attrs.evolve(YARN, **change)


def test_yarn_keeps_fast_pairs_and_slows_slow_ones():
    config = decoder_config("deepseek-v3")
    options = {"theta": config.rope_theta, "dtype": torch.float64}
    plain = rotary_frequencies(config.rotary_size, **options)
    got = rotary_frequencies(config.rotary_size, scaling=config.rope_scaling, **options)
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
    config = decoder_config(name)
    every, active = PUBLISHED[name]
    assert count_parameters(config) / 1e9 == pytest.approx(every, rel=2e-3)
    assert count_active_parameters(config) / 1e9 == pytest.approx(active, rel=2e-2)
    with torch.device("meta"):
        model = Decoder(attrs.evolve(config, layers=5))
    shapes = {parameter: tuple(p.shape) for parameter, p in model.named_parameters()}
    assert shapes == parameter_shapes(model.config)


def test_active_parameters_are_those_of_the_dense_model_of_the_same_width():
    config = decoder_config("tiny")
    assert count_active_parameters(config) == count_parameters(config)
    sparse = attrs.evolve(config, experts=Experts(count=8, chosen=2, width=config.mlp_width // 2))
    routers = 8 * config.width * config.layers
    assert count_active_parameters(sparse) == count_parameters(config) + routers
