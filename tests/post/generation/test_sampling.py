"""Sampling: the logits of `transformers`, and tokens that follow the distribution."""

import math
from functools import partial

import attrs
import pytest
import torch

from trainkit.post.generation import Sampling, filter_top_k, sample_from_cdf, shape_logits
from trainkit.post.generation.sampling import make_noise, next_tokens
from trainkit.types import ConfigError


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0.3),
        Sampling(top_k=5),
        Sampling(top_k=1000),
        Sampling(top_p=0.6),
        Sampling(top_p=1e-6),
        Sampling(min_p=0.2),
        Sampling(min_p=1.0),
        Sampling(repetition_penalty=1.7),
        Sampling(repetition_penalty=0.5, temperature=2.0),
        Sampling(temperature=1.3, top_k=20, top_p=0.7, min_p=0.05, repetition_penalty=1.2),
    ],
)
def test_logits_are_shaped_as_by_transformers(sampling):
    transformers = pytest.importorskip("transformers")
    generator = torch.Generator().manual_seed(len(str(sampling)))
    logits = 4 * torch.randn(6, 50, generator=generator)
    ids = torch.randint(50, (6, 12), generator=generator)
    seen = torch.zeros(6, 50, dtype=torch.bool).scatter_(1, ids, True)
    config = transformers.GenerationConfig(
        do_sample=True,
        temperature=sampling.temperature,
        top_k=sampling.top_k or 0,
        top_p=sampling.top_p,
        min_p=sampling.min_p or None,
        repetition_penalty=sampling.repetition_penalty,
    )
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
    changes = attrs.asdict(sampling).items() - attrs.asdict(Sampling()).items()
    assert len(lists) >= len(changes)
    torch.testing.assert_close(shape_logits(logits, sampling, seen=seen), lists(ids, logits))


def test_draws_follow_the_distribution():
    logits, places = torch.tensor([1.0, 3.0, -1.0, 2.0]), (torch.arange(4000) + 0.5) / 4000
    for temperature, k in ((1.0, None), (0.5, None), (2.0, 2)):
        sampling = Sampling(temperature=temperature, top_k=k)
        tokens = next_tokens(logits.expand(4000, 4), places, sampling)
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
    ("make", "match"),
    [
        (partial(Sampling, temperature=-0.5), "temperature must be at least 0 and .*, got -0.5"),
        (partial(Sampling, temperature=math.nan), "temperature must be at least 0 and .*, got nan"),
        (partial(Sampling, top_k=0), "top_k must be above 0, got 0"),
        (partial(Sampling, top_p=0.0), "top_p must be above 0 and at most 1, got 0"),
        (partial(Sampling, min_p=1.1), "min_p must be between 0 and 1, got 1.1"),
        (partial(Sampling, repetition_penalty=0.0), "repetition_penalty must be above 0 and .*got"),
    ],
)
def test_numbers_out_of_their_range_are_refused(make, match):
    with pytest.raises(ConfigError, match=match):
        make()
