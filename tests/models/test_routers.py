"""Around a router's choice: how many of its choices an expert takes, and the noise before it."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainkit.models import Experts, biased_topk, hash_experts, scale_by_load, softmax_topk
from trainkit.models.routers import add_jitter, apply_capacity, expert_capacity
from trainkit.noise import dropout, make_token_keys
from trainkit.types import ConfigError


@st.composite
def routings(draw):
    """What a router decides for some tokens and padding; scores with ties, some experts wanted."""
    tokens, experts = draw(st.integers(0, 30)), draw(st.integers(1, 6))
    chosen = draw(st.integers(1, experts))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    logits = torch.randint(-2, 3, (tokens, experts), generator=generator).float()
    logits[:, 0] += draw(st.sampled_from([0, 5]))
    is_token = torch.rand(tokens, generator=generator) < draw(st.sampled_from([0.0, 0.6, 1.0]))
    route = draw(st.sampled_from([softmax_topk, biased_topk]))
    return route(logits.requires_grad_(), chosen, is_token=is_token), logits


@given(routings(), st.sampled_from([1, 2, 3, 1000]))
def test_an_expert_keeps_its_first_choices_and_no_other_number_moves(made, capacity):
    routing, logits = made
    limited, taken = apply_capacity(routing, capacity), [0] * len(routing.counts)
    want_indices, want_weights = routing.indices.tolist(), routing.weights.tolist()
    for token, experts in enumerate(routing.indices.tolist()):
        for choice, expert in enumerate(experts):
            if expert == len(taken):  # padding: it weighs nothing already, and takes no room
                continue
            if taken[expert] == capacity:
                want_indices[token][choice], want_weights[token][choice] = len(taken), 0.0
            else:
                taken[expert] += 1
    assert limited.indices.tolist() == want_indices
    assert limited.weights.tolist() == want_weights
    assert limited.counts.tolist() == taken
    assert limited.shares is routing.shares
    limited.weights.square().sum().backward()
    assert logits.grad.isfinite().all()


def test_what_is_dropped_trains_no_router():
    logits = torch.zeros(3, 2).requires_grad_()
    given_ = torch.zeros(3, 1, dtype=torch.int64)
    limited = apply_capacity(
        softmax_topk(logits, 1, renormalize=False, indices=given_), torch.tensor(2)
    )
    limited.weights.sum().backward()
    assert logits.grad.any(-1).tolist() == [True, True, False]


@given(st.lists(st.integers(0, 50), min_size=1, max_size=9), st.floats(0.01, 9))
def test_capacity_is_a_part_of_the_choices_and_never_nothing(counts, factor):
    want = max(1, math.ceil(factor * sum(counts) / len(counts)))
    assert expert_capacity(torch.tensor(counts), factor) == want


def test_a_capacity_or_noise_that_means_nothing_is_refused():
    for wrong in (-1.0, math.inf, math.nan):
        with pytest.raises(ConfigError, match="capacity must be at least 0 and finite"):
            Experts(count=8, top_k=2, width=4, capacity=wrong)
    for wrong in (-0.1, 1.0, math.nan):
        with pytest.raises(ConfigError, match=r"jitter must be in \[0, 1\)"):
            Experts(count=8, top_k=2, width=4, jitter=wrong)
        with pytest.raises(ValueError, match=r"add_jitter: amount must be in \[0, 1\)"):
            add_jitter(torch.ones(2, 4), torch.zeros(2).long(), name="mlp", amount=wrong)
    with pytest.raises(ValueError, match=r"add_jitter: noise_key must be \[2\].*got \[3\]"):
        add_jitter(torch.ones(2, 4), torch.zeros(3).long(), name="mlp", amount=0.1)


# ------------------------------------------------------------------------------------------- noise

KEYS = make_token_keys(torch.arange(2000).view(2, 1000), seed=1, step=4)
X = torch.ones(2, 1000, 16)


def noise_of(x=X, keys=KEYS, *, name="layers.1.mlp", amount=0.1):
    return add_jitter(x, keys, name=name, amount=amount)


def test_noise_is_uniform_and_another_for_every_token_step_layer_and_feature():
    noise = noise_of()
    assert noise.min() >= 0.9
    assert noise.max() <= 1.1
    assert float(noise.mean()) == pytest.approx(1, abs=2e-3)
    assert float(noise.std()) == pytest.approx(0.1 / math.sqrt(3), rel=0.02)
    later = make_token_keys(torch.arange(2000).view(2, 1000), seed=1, step=5)
    dropped = dropout(X, KEYS, name="layers.1.mlp", p=0.5, width=16)
    others = [noise_of(keys=later), noise_of(name="layers.2.mlp"), dropped]
    others += [noise.roll(1, 1), noise.roll(1, 2)]
    for other in others:
        both = torch.stack([noise.flatten(), other.flatten()])
        assert abs(float(both.corrcoef()[0, 1])) < 0.02


def test_parts_of_the_tokens_see_the_noise_of_the_whole():
    torch.manual_seed(0)
    x = torch.randn(X.shape)
    whole = noise_of(x)
    some = torch.randperm(2000)[:77]
    assert torch.equal(
        noise_of(x.flatten(0, 1)[some], KEYS.flatten()[some]), whole.flatten(0, 1)[some]
    )


def test_noise_keeps_the_precision_that_a_router_computes_in():
    half = noise_of(X.bfloat16(), amount=1e-3)
    assert half.dtype == torch.float32
    assert torch.equal(half, noise_of(amount=1e-3))
    wide = noise_of(X.double())
    assert wide.dtype == torch.float64
    assert torch.equal(wide.float(), noise_of())
    assert torch.equal(noise_of(amount=0.0), X)
    x = X[:, :5].double().requires_grad_()
    noise_of(x, KEYS[:, :5]).sum().backward()
    assert torch.equal(x.grad, wide[:, :5])


def test_a_group_is_chosen_by_its_two_best_experts_together():
    """Of two groups the first has the best expert, and the second the two that are best."""
    scores = torch.tensor([[0.9, 0.1, 0.6, 0.5]]).logit()
    routing = biased_topk(scores, 2, groups=2, groups_chosen=1)
    assert sorted(routing.indices[0].tolist()) == [2, 3]


# ------------------------------------------------------------------- scores, hashes, scale by load


def test_square_root_of_softplus_scores_as_deepseek_v4_does():
    """Choices by score and bias, weights by score alone; far below 0 no gradient is NaN."""
    logits = torch.randn(9, 6, generator=torch.Generator().manual_seed(0)).requires_grad_()
    bias = torch.linspace(0.8, -0.8, 6)
    routing = biased_topk(logits, 2, scores="sqrtsoftplus", bias=bias, scale=2.5)
    scores = (1 + logits.double().exp()).log().sqrt()
    chosen = (scores + bias).topk(2).indices
    weights = scores.gather(1, chosen)
    assert torch.equal(routing.indices, chosen)
    assert not torch.equal(chosen, scores.topk(2).indices)
    wanted = 2.5 * weights / weights.sum(-1, keepdim=True)
    torch.testing.assert_close(routing.weights.double(), wanted)
    torch.testing.assert_close(routing.shares.sum(-1), torch.ones(9))
    far = torch.tensor([[-200.0, 300.0, 0.0]]).requires_grad_()
    biased_topk(far, 3, scores="sqrtsoftplus").weights.square().sum().backward()
    assert far.grad.isfinite().all()
    with pytest.raises(ValueError, match="scores"):
        biased_topk(logits, 2, scores="softplus")


def test_a_hash_gives_a_token_the_same_experts_wherever_it_stands():
    ids = torch.arange(4096)
    chosen = hash_experts(ids, 8, 2, name="layers.0.mlp")
    assert torch.equal(hash_experts(ids[100:120], 8, 2, name="layers.0.mlp"), chosen[100:120])
    assert (chosen[:, 0] != chosen[:, 1]).all()
    other = hash_experts(ids, 8, 2, name="layers.1.mlp")
    # By chance a pair is the same once in 56.
    assert (other == chosen).all(-1).sum() < 200
    counts = chosen.flatten().bincount(minlength=8)
    assert counts.sum() == 8192
    assert (counts - 1024).abs().max() < 150  # five standard deviations of an even table
    with pytest.raises(ValueError, match="hash_experts: top_k"):
        hash_experts(ids, 8, 9, name="layers.0.mlp")


def test_experts_with_too_much_load_have_their_outputs_scaled_to_their_limit():
    logits = torch.eye(4).repeat(2, 1).requires_grad_()
    is_token = torch.arange(8) < 7
    routing = softmax_topk(logits, 2, is_token=is_token)
    load = torch.tensor([0.5, 0.25, 0.2, 0.05])
    scaled = scale_by_load(routing, load, factor=1.2)
    factors = [0.6, 1.0, 1.0, 1.0, 0.0]  # 1.2 times a quarter is 0.3, of 0.5; padding has none
    wanted = [
        [weight * factors[expert] for weight, expert in zip(*pair, strict=True)]
        for pair in zip(routing.weights.tolist(), routing.indices.tolist(), strict=True)
    ]
    torch.testing.assert_close(scaled.weights, torch.tensor(wanted))
    assert scaled.counts is routing.counts
    # An expert that nobody chose has a load of 0.
    none = scale_by_load(routing, torch.tensor([1.0, 0, 0, 0]), factor=4.0)
    assert torch.equal(none.weights, routing.weights)
    with pytest.raises(ValueError, match="scale_by_load: factor"):
        scale_by_load(routing, load, factor=0.0)
