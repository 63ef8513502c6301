"""A bare module computes what the module does, and leaves alone what is more than its class."""

import copy

import attrs
import pytest
import torch
from torch import nn

from trainkit.batch import batch_from_rows
from trainkit.models import build_decoder, call_routed, make_decoder_config
from trainkit.models.config import Experts, FeedForward, Latents, Sliding
from trainkit.models.functional import bare
from trainkit.post.generation import Sampling, generate
from trainkit.types import drop_routing

CONFIG = make_decoder_config("tiny", width=32, layers=2, mlp_width=48, vocab_size=40)
SLIDING = Sliding(window=3, first=1, rope_theta=50.0)
KINDS = {
    "plain": CONFIG,
    "grouped, gated": attrs.evolve(CONFIG, kv_heads=2, qk_norm=True, attention_gate=True),
    "biased": attrs.evolve(CONFIG, qkv_bias=True, feed_forward=FeedForward(bias=True)),
    "ungated": attrs.evolve(CONFIG, feed_forward=FeedForward(gated=False, activation="gelu")),
    "sliding": attrs.evolve(CONFIG, sliding=SLIDING),
    "latent": attrs.evolve(
        CONFIG, kv_heads=4, latents=Latents(query_rank=12, kv_rank=8, plain=6, rotary=4, values=10)
    ),
    "routed": attrs.evolve(
        CONFIG, experts=Experts(count=4, top_k=2, width=16, shared=8, shared_gate=True)
    ),
}


def greedy(model, prompt, *, tokens=4):
    return generate(
        model, [prompt], max_new_tokens=tokens, context=16, sampling=Sampling(temperature=0)
    )


def model_of(config):
    return build_decoder(config, seed=0).eval()


@torch.inference_mode()
def logits_of(model):
    batch = batch_from_rows(torch.tensor([[1, 5, 2, 9, 3]]))
    fields = {
        "input_ids": batch.input_ids,
        "position_ids": batch.position_ids,
        "spans": batch.spans,
        "document_ids": batch.document_ids,
    }
    return drop_routing(call_routed(model, fields))


@pytest.mark.parametrize("config", KINDS.values(), ids=KINDS)
def test_it_computes_what_the_module_does_and_changes_nothing_in_it(config):
    model = model_of(config).double()
    before = [{**vars(module)} for module in model.modules()]
    want, found = logits_of(model), logits_of(bare(model))
    torch.testing.assert_close(found, want, rtol=1e-12, atol=1e-12)
    assert [{**vars(module)} for module in model.modules()] == before
    assert "projected" not in vars(model.layers["0"].attention)


@pytest.mark.filterwarnings("ignore:Mismatch dtype")
def test_its_norm_is_that_of_the_module_in_every_dtype():
    norm = nn.RMSNorm(33, 1e-3)
    generator = torch.Generator().manual_seed(0)
    norm.weight.data.normal_(generator=generator)
    x = 0.01 * torch.randn(1, 7, 33, generator=generator)
    with torch.inference_mode():
        torch.testing.assert_close(bare(norm)(x), norm(x), rtol=1e-6, atol=1e-7)
        for dtype in (torch.bfloat16, torch.float64):
            wide, other = x.to(dtype), copy.deepcopy(norm).to(dtype)
            assert torch.equal(bare(other)(wide), other(wide))
        assert torch.equal(bare(norm)(x.double()), norm(x.double()))
        for other in (nn.RMSNorm(33), nn.RMSNorm(33, 1e-5, elementwise_affine=False)):
            assert torch.equal(bare(other)(x), other(x))


def test_matrices_of_one_input_are_joined_where_they_are_plain_and_small(monkeypatch):
    attention = model_of(CONFIG).layers["0"].attention
    assert "projected" in vars(bare(attention))
    assert "projected" not in vars(bare(model_of(KINDS["biased"]).layers["0"].attention))
    with monkeypatch.context() as patch:
        patch.setattr("trainkit.models.functional._MAX_COPIED", 32 * 32 - 1)
        assert "projected" not in vars(bare(attention))
    attention.wk.__class__ = type("Adapted", (type(attention.wk),), {})
    assert "projected" not in vars(bare(attention))


def test_what_has_hooks_or_a_forward_of_its_own_runs_as_it_is():
    model, seen = model_of(CONFIG), []
    want = greedy(model, [1, 2])
    attention, mlp = (getattr(model.layers["1"], name) for name in ("attention", "mlp"))
    attention.wq.register_forward_hook(lambda *_: seen.append("hook"))
    attention.register_forward_pre_hook(lambda *_: seen.append("before"))
    forward = mlp.forward
    mlp.forward = lambda x: seen.append("own") or forward(x)
    model.norm.compile(backend="eager")
    assert greedy(model, [1, 2]) == want
    assert seen == ["before", "hook", "own"] * 4
    assert bare(model.norm) is model.norm


def test_a_step_of_generation_is_few_products_and_makes_no_table_anew(monkeypatch):
    linear, calls = nn.functional.linear, []
    monkeypatch.setattr(nn.functional, "linear", lambda *x: calls.append("linear") or linear(*x))
    arange = torch.arange
    monkeypatch.setattr(torch, "arange", lambda *x, **y: calls.append("arange") or arange(*x, **y))
    model, counts = model_of(CONFIG), []
    for new in (4, 5):
        calls.clear()
        greedy(model, [1, 2], tokens=new)
        counts.append([calls.count(name) for name in ("linear", "arange")])
    ((few, made), (more, again)) = counts
    assert more - few == 1  # that of the head
    assert again == made


def test_nothing_of_the_weights_is_kept_from_one_text_to_the_next():
    model, other = model_of(CONFIG), build_decoder(CONFIG, seed=1)
    first = greedy(model, [1, 2], tokens=10)
    model.load_state_dict(other.state_dict())
    assert greedy(model, [1, 2], tokens=10) == greedy(other, [1, 2], tokens=10) != first
