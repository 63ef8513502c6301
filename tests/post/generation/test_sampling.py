"""Samplings: those of `transformers`, and draws that follow the distribution."""

import pytest
import torch

from trainkit.post.generation import Sampling, filter_top_k, sample_from_cdf, shape_logits
from trainkit.post.generation.sampling import make_noise, next_tokens
from trainkit.types import ConfigError


@pytest.mark.parametrize(
    "how",
    [
        {"temperature": 0.3},
        {"top_k": 5},
        {"top_k": 1000},
        {"top_p": 0.6},
        {"top_p": 1e-6},
        {"min_p": 0.2},
        {"min_p": 1.0},
        {"repetition_penalty": 1.7},
        {"repetition_penalty": 0.5, "temperature": 2.0},
        {"temperature": 1.3, "top_k": 20, "top_p": 0.7, "min_p": 0.05, "repetition_penalty": 1.2},
    ],
)
def test_what_is_left_of_logits_is_what_transformers_leaves(how):
    transformers = pytest.importorskip("transformers")
    generator = torch.Generator().manual_seed(len(str(how)))
    logits = 4 * torch.randn(6, 50, generator=generator)
    ids = torch.randint(50, (6, 12), generator=generator)
    seen = torch.zeros(6, 50, dtype=torch.bool).scatter_(1, ids, True)
    config = transformers.GenerationConfig(do_sample=True, **{"top_k": 0, **how})
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            num_hidden_layers=1,
            vocab_size=50,
            hidden_size=8,
            intermediate_size=8,
            num_attention_heads=1,
        )
    )
    lists = model._get_logits_processor(config, 12, ids, None, transformers.LogitsProcessorList())
    assert len(lists) >= len(how)
    torch.testing.assert_close(shape_logits(logits, Sampling(**how), seen=seen), lists(ids, logits))


def test_draws_follow_the_distribution():
    logits, places = torch.tensor([1.0, 3.0, -1.0, 2.0]), (torch.arange(4000) + 0.5) / 4000
    for temperature, k in ((1.0, None), (0.5, None), (2.0, 2)):
        how = Sampling(temperature=temperature, top_k=k)
        tokens = next_tokens(logits.expand(4000, 4), places, how)
        left = logits if k is None else filter_top_k(logits[None], k)[0]
        want = torch.softmax(left / temperature, 0)
        got = torch.bincount(tokens, minlength=4) / len(tokens)
        torch.testing.assert_close(got, want, atol=1e-3, rtol=0)


def test_the_end_of_the_range_is_a_token():
    end = torch.tensor([1 - 2**-53], dtype=torch.float64)
    assert sample_from_cdf(torch.zeros(1, 7), end).item() == 6
    assert sample_from_cdf(torch.tensor([[0.0, -torch.inf]]), end).item() == 0


def test_the_noise_of_a_place_is_its_own_and_even():
    places = make_noise([0, 1, 7], [5, 9, 0], 4000, seed=3, device=torch.device("cpu"))
    assert places.dtype == torch.float64
    assert places.unique().numel() == 12000
    assert places.min() >= 0
    assert places.max() < 1
    assert (places.mean(1) - 0.5).abs().max() < 0.02
    again = make_noise([7], [10], 10, seed=3, device=torch.device("cpu"))
    assert torch.equal(again[0], places[2, 10:20])


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"temperature": -0.5}, "temperature must be at least 0 and finite, got -0.5"),
        ({"temperature": float("nan")}, "temperature must be at least 0 and finite, got nan"),
        ({"top_k": 0}, "top_k must be above 0, got 0"),
        ({"top_p": 0.0}, "top_p must be above 0 and at most 1, got 0"),
        ({"min_p": 1.1}, "min_p must be between 0 and 1, got 1.1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be above 0 and finite, got 0"),
    ],
)
def test_numbers_out_of_their_range_are_refused(change, match):
    with pytest.raises(ConfigError, match=match):
        Sampling(**change)
