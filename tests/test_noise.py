"""Noise is a function of the step, the place and the feature of the whole model."""

import functools
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainkit import noise
from trainkit.noise import counters
from trainkit.noise.hashing import hash_box
from trainkit.noise.jit import LoopFiles

X = torch.ones(2, 3, 12)
KEYS = noise.make_token_keys(torch.arange(6).view(2, 3), seed=1, step=4)


def dropped(x=X, keys=KEYS, *, name="layers.0.mlp", width=12, offset=None):
    return noise.dropout(x, keys, name=name, p=0.5, width=width, offset=offset)


def test_every_place_and_every_step_has_a_mask_of_its_own():
    later = noise.make_token_keys(torch.arange(6).view(2, 3), seed=1, step=5)
    masks = [dropped(), dropped(name="layers.1.mlp"), dropped(keys=later)]
    for i, mask in enumerate(masks):
        others = masks[:i] + masks[i + 1 :]
        assert all((mask != other).float().mean() > 0.2 for other in others)


@pytest.mark.parametrize("parts", [2, 3, 4])
def test_a_part_of_the_features_drops_what_the_whole_drops_there(parts):
    size = 12 // parts
    cut = [dropped(x, offset=i * size) for i, x in enumerate(X.chunk(parts, -1))]
    assert torch.equal(torch.cat(cut, -1), dropped())


@pytest.mark.parametrize("offset", [None, -1, 7, 12])
def test_a_part_that_does_not_say_which_it_is_is_refused(offset):
    for p in (0.0, 0.5):
        with pytest.raises(ValueError, match=r"dropout: x has 6 of the 12 features .* offset="):
            noise.dropout(X[..., :6], KEYS, name="mlp", p=p, width=12, offset=offset)
    with pytest.raises(ValueError, match=r"dropout: x has 12 of the 12"):
        dropped(offset=1)


# ------------------------------------------------------------------------------- numbered places

NUMBERS = st.sampled_from([0, 1, 2, 511]), st.sampled_from([0, 1, 2, 255])
PLACES = st.lists(st.tuples(*NUMBERS), min_size=1, max_size=16, unique=True)


@given(PLACES, st.randoms(use_true_random=False), st.integers(0, 3))
def test_a_token_at_a_numbered_place_drops_the_same_whatever_stands_beside_it(pairs, random, step):
    def masks(some):
        tokens, numbers = torch.tensor(some).unbind(-1)
        keys = noise.make_token_keys(tokens, seed=0, step=step)
        own = noise.split_keys(keys, numbers.unsqueeze(-1))
        x = torch.ones(len(some), 1, 64)
        rows = dropped(x, own, width=64).squeeze(1)
        return dict(zip(some, map(tuple, rows.tolist()), strict=True))

    shuffled = random.sample(pairs, len(pairs))
    whole, cut = masks(shuffled), len(pairs) // 2
    assert whole == {
        k: v for part in (pairs[:cut], pairs[cut:]) if part for k, v in masks(part).items()
    }
    assert len({*whole.values()}) == len(pairs)  # of 2^64 no two are the same


def test_at_numbered_places_a_part_is_dropped_and_the_rest_scaled_each_by_itself():
    keys = noise.make_token_keys(torch.arange(100), seed=0, step=0)
    own = noise.split_keys(keys, torch.arange(8).expand(100, 8))
    x = noise.dropout(torch.ones(100, 8, 64).double(), own, name="up", p=0.25, width=64)
    assert torch.allclose(x[x != 0], torch.full((), 4 / 3).double())
    gone, deviation = (x == 0).double(), (0.25 * 0.75) ** 0.5
    for along in ((1, 2), (0, 2), (0, 1)):  # of a token, of an expert, of a feature
        mean, size = gone.mean(along), 100 * 8 * 64 / gone.mean(along).numel()
        assert (mean - 0.25).abs().max() < 4.5 * deviation / size**0.5
    both = torch.einsum("tef,tgf->eg", gone, gone) / (100 * 64)  # two experts of a token
    apart = both[~torch.eye(8, dtype=torch.bool)] - 0.25**2
    assert apart.abs().max() < 4.5 * 0.25 * (1 - 0.25**2) ** 0.5 / 80


# ---------------------------------------------------------------------------------- numbers


@pytest.mark.parametrize("numbers", [noise.normal, noise.uniform_symmetric])
def test_any_box_of_a_tensor_has_the_numbers_of_the_whole(numbers):
    whole = numbers(7, (5, 6, 7))
    assert len(whole.unique()) == whole.numel()
    for begin, end in [((0, 0, 0), (5, 6, 7)), ((1, 2, 3), (4, 3, 7)), ((4, 5, 6), (5, 6, 7))]:
        box = tuple(slice(a, b) for a, b in zip(begin, end, strict=True))
        shape = tuple(b - a for a, b in zip(begin, end, strict=True))
        assert torch.equal(numbers(7, shape, begin), whole[box])


@pytest.mark.parametrize(
    ("numbers", "moments"),
    [(noise.normal, (1.0, 3.0)), (noise.uniform_symmetric, (1 / 3, 1 / 5))],
)
def test_numbers_have_the_moments_of_their_distribution(numbers, moments):
    x = numbers(7, (100_000,)).double()
    # Some 5 standard deviations of the means of 100,000 powers.
    assert abs(x.mean()) < 0.016
    assert abs(x.square().mean() - moments[0]) < 0.023
    assert abs(x.pow(4).mean() - moments[1]) < 0.16


# -------------------------------------------------------------------------------- rounding

ODD = torch.cat(
    [
        torch.randn(500, generator=torch.Generator().manual_seed(0))
        * 10.0 ** torch.arange(-20, 30, 0.1),
        torch.tensor([1 + 2.0**-8, 1 - 2.0**-10, 2.0**-133, -(2.0**-130), 3.3e38, 1e-44]),
    ]
)


def neighbours(x):
    """Return the bf16 numbers around fp32 ones: that nearer to zero, and the next one."""
    bits = x.view(torch.int32) & ~0xFFFF
    return bits.view(torch.float32), (bits + 0x10000).view(torch.float32)


def rounded_by(keys, x=ODD):
    return torch.stack(
        [noise.round_bf16_stochastic(x, torch.tensor(key)).double() for key in range(keys)]
    )


def is_unbiased(found, x):
    low, high = (edge.double() for edge in neighbours(x))
    deviation = (high - low).abs() / 2 / len(found) ** 0.5  # of the mean, at most
    return bool(((found.mean(0) - x.double()).abs() < 5 * deviation).all())


def test_rounding_at_random_is_right_in_the_mean_and_to_nearest_is_not():
    found = rounded_by(1000)
    assert is_unbiased(found, ODD)
    assert not is_unbiased(ODD.bfloat16().double().expand(1000, -1), ODD)


def test_rounding_at_random_takes_one_of_the_two_neighbours():
    low, high = (edge.double() for edge in neighbours(ODD))
    found = rounded_by(50)
    assert ((found == low) | (found == high)).all()
    assert (found == low).any()
    assert (found == high).any()
    normal = ODD.abs() > 2.0**-126
    assert ((found - ODD.double()).abs() <= 2.0**-7 * ODD.double().abs())[:, normal].all()


def test_what_bf16_can_hold_and_what_is_not_finite_stay():
    x = torch.cat([ODD.bfloat16().float(), torch.tensor([0.0, -0.0, torch.inf, -torch.inf])])
    assert torch.equal(noise.round_bf16_stochastic(x, torch.tensor(3)), x.bfloat16())
    nan = torch.tensor([0x7FFFFFFF, 0x7F800001, -1], dtype=torch.int32).view(torch.float32)
    assert noise.round_bf16_stochastic(nan, torch.tensor(3)).isnan().all()
    odd = torch.cat([nan, torch.tensor([torch.inf, -torch.inf])])
    for key in range(8):
        found = noise.rounding.round_rows(
            odd, torch.tensor([key]), columns=len(odd), begin=0, first=0
        )
        assert torch.equal(found.isnan(), odd.isnan())
        assert torch.equal(found[3:], odd[3:].bfloat16())


def test_every_element_and_every_key_rounds_by_itself(monkeypatch):
    x = torch.full((4096,), 1 + 2.0**-8)
    up = noise.round_bf16_stochastic(x, torch.tensor(0)) > 1
    monkeypatch.setattr("trainkit.noise.rounding._CHUNK", 1024)
    chunks = (noise.round_bf16_stochastic(x, torch.tensor(0)) > 1).view(4, 1024)
    others = noise.round_bf16_stochastic(x, torch.tensor(1)) > 1
    pairs = [(up[:-1], up[1:]), (up, others), *itertools.pairwise(chunks)]
    assert all(0.45 < (a == b).float().mean() < 0.55 for a, b in pairs)
    shape = (8, 16, 32)
    assert noise.round_bf16_stochastic(x.view(shape).transpose(0, 1), torch.tensor(0)).shape == (
        16,
        8,
        32,
    )


@pytest.mark.parametrize("x", [torch.ones(2).double(), torch.ones(2).bfloat16()])
def test_only_fp32_is_rounded(x):
    with pytest.raises(ValueError, match="round_bf16_stochastic: it rounds fp32 by a key"):
        noise.round_bf16_stochastic(x, torch.tensor(0))


def test_processes_that_compile_at_once_keep_what_is_theirs(tmp_path, monkeypatch):
    first, second = (LoopFiles(str(tmp_path), "loop", "stamp") for _ in range(2))
    with monkeypatch.context() as before:  # what a process has read before the other wrote
        before.setattr(second, "_load_index", dict)
        first.save("floats", 1)
        second.save("doubles", 2)
    assert (first.load("floats"), first.load("doubles")) == (None, 2)  # lost, and never another's
    first.save("floats", 1)
    assert (second.load("floats"), second.load("doubles")) == (1, 2)
    nowhere = LoopFiles(str(tmp_path / "gone"), "loop", "stamp")
    nowhere.save("halves", 3)  # no error
    assert nowhere.load("halves") is None


def test_a_compiled_function_is_kept_by_what_it_is_of():
    assert type(counters._mix_array._cache._cache_file) is LoopFiles


def test_a_hash_depends_on_where_each_element_is_and_on_the_name():
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    hash_full = functools.partial(hash_box, shape=(2, 3), offset=(0, 0))
    others = [x[::-1].copy(), x[:, ::-1].copy(), x.reshape(3, 2).T.copy()]
    hashes = {hash_full("x", one) for one in (x, *others)}
    hashes |= {hash_full("y", x), hash_box("x", x, shape=(3, 3), offset=(1, 0))}
    assert len(hashes) == 6
