"""Quantization formats: error bounds, codes and scales, and values that are not finite."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainkit.post.adapters import dequantize, quantize
from trainkit.post.adapters.fake import quietly
from trainkit.post.adapters.formats import NF4_VALUES, scales_of
from trainkit.types import NumericsError

FORMATS = ["nf4", "int8", "fp8", "int4", "nvfp4", "fp8_row"]
EPS = 2.0**-22  # some roundings of fp32, as parts of a block's largest magnitude
GAP = max(b - a for a, b in pairwise(NF4_VALUES)) / 2


def largest(x, block, *, rows=1):
    """Return for each element the largest magnitude of its block."""
    out = torch.empty_like(x)
    for top in range(0, x.shape[-2], rows):
        for left in range(0, x.shape[-1], block):
            place = (..., slice(top, top + rows), slice(left, left + block))
            out[place] = x[place].abs().amax((-2, -1), keepdim=True)
    return out


def bound(x, form):
    """Return how far off each element may be, by the words of the docstrings."""
    if form == "int8":
        top = largest(x, 128)
        return top / 254 + EPS * top
    if form == "int4":
        top = largest(x, 32)
        return top / 15 + EPS * top
    if form == "nvfp4":
        whole = x.abs().amax((-2, -1), keepdim=True)
        return largest(x, 16) * 17 / 96 + whole / 458_752 + EPS * whole
    if form in ("fp8", "fp8_row"):
        top = largest(x, 128, rows=128) if form == "fp8" else x.abs().amax(-1, keepdim=True)
        return torch.maximum(x.abs() / 16, top / 28_672) + EPS * top
    top, spread = largest(x, 64), torch.empty_like(x)
    for left in range(0, x.shape[-1], 64 * 256):
        place = (..., slice(left, left + 64 * 256))
        spread[place] = top[place].amax(-1, keepdim=True) - top[place].amin(-1, keepdim=True)
    return GAP * top + spread / 510 + EPS * largest(x, 64 * 256)


KINDS = {
    "normal": lambda x: x,
    "zeros": torch.zeros_like,
    "blocks of zeros": lambda x: x * (torch.arange(x.shape[-1]) // 64 % 2),
    "one size": lambda x: x.sign() * 3,
    "outliers": lambda x: x.masked_fill(x > 2, 1e4),
    "tiny": lambda x: x * 1e-44,
    "huge": lambda x: x.clamp(-3, 3) * 1e38,
}


@pytest.mark.parametrize("form", FORMATS)
@given(
    rows=st.sampled_from([1, 2, 127, 128, 129]),
    columns=st.sampled_from([1, 2, 63, 64, 65, 127, 300]),
    kind=st.sampled_from(list(KINDS)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
)
def test_an_element_comes_back_within_the_bound(form, rows, columns, kind, dtype):
    random = torch.Generator().manual_seed(columns)
    lead = (2,) if rows + columns < 130 else ()
    x = KINDS[kind](torch.randn(*lead, rows, columns, generator=random)).to(dtype)
    held = quantize(x, form)
    back = dequantize(held)
    assert back.dtype == dtype
    assert back.shape == x.shape
    x, back = x.float(), dequantize(held, torch.float32)
    tiny = 2.0**-126  # where fp32 has fewer digits
    assert bool(((back - x).abs() <= bound(x, form) + tiny).all())
    assert bool((back[x == 0] == 0).all())


def test_scales_of_a_long_row_are_in_groups_of_their_own():
    x = torch.randn(2, 64 * 256 + 70, generator=torch.Generator().manual_seed(0))
    x[:, 64 * 256 :] *= 1e-3
    held = quantize(x, "nf4")
    assert held.levels.shape == (2, 2, 2)
    assert bool(((dequantize(held) - x).abs() <= bound(x, "nf4")).all())


def test_the_scales_of_nf4_are_rounded_to_256_levels_of_which_the_ends_are_exact():
    """As documented: a scale is off by at most the spread of its group over 510."""
    x = torch.ones(2, 64 * 256) * torch.linspace(0.5, 1.9, 64 * 256)
    tops = x.unflatten(-1, (-1, 64)).amax(-1)
    held = quantize(x, "nf4")
    assert (held.scales.min(), held.scales.max()) == (0, 255)
    off = scales_of(held.scales, held.levels) - tops
    spread = tops.max() - tops.min()
    assert off.abs().max() <= spread / 510 + EPS
    assert off[:, [0, -1]].abs().max() < EPS


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("shape", [(0, 64), (3, 0), (0, 0), (0, 4, 4)])
def test_an_empty_matrix_is_empty(form, shape):
    assert dequantize(quantize(torch.ones(shape), form)).shape == shape


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_refused(form, bad):
    x = torch.ones(3, 100)
    x[1, 99] = bad
    with pytest.raises(NumericsError, match="1 value is not finite"):
        quantize(x, form)


def test_what_is_no_matrix_is_refused():
    with pytest.raises(ValueError, match=r"quantize: it takes a matrix .* got torch.int64"):
        quantize(torch.ones(2, 2, dtype=torch.int64), "int8")
    with pytest.raises(ValueError, match=r"quantize: .* of shape \(2,\)"):
        quantize(torch.ones(2), "nf4")
    with pytest.raises(ValueError, match='"nvfp4" or "fp8_row", got \'e2m1\''):
        quantize(torch.ones(2, 2), "e2m1")


@pytest.mark.parametrize("form", FORMATS[:4])
def test_a_part_that_begins_where_blocks_do_is_quantised_as_in_the_whole(form):
    x = torch.randn(300, 64 * 300, generator=torch.Generator().manual_seed(0))
    whole = dequantize(quantize(x, form))
    place = slice(128, 300), slice(64 * 256, None)
    assert torch.equal(dequantize(quantize(x[place], form)), whole[place])


def test_the_sixteen_numbers_are_those_of_the_paper():
    # Appendix E: the middles of equally likely parts of a normal distribution, on either side of 0.
    offset = (1 - 1 / 30 + 1 - 1 / 32) / 2
    above = torch.special.ndtri(torch.linspace(offset, 0.5, 9, dtype=torch.float64)[:-1])
    below = -torch.special.ndtri(torch.linspace(offset, 0.5, 8, dtype=torch.float64)[:-1])
    values = torch.cat([below, torch.zeros(1), above.flip(0)]) / above.max()
    torch.testing.assert_close(torch.tensor(NF4_VALUES).double(), values, rtol=1e-6, atol=1e-7)


def test_codes_are_those_of_bitsandbytes():
    x = (((torch.arange(256) * 37) % 255 - 127.0) ** 3 / 2.0**21).view(2, 128)
    # By bitsandbytes 0.50.2 on a CPU: quantize_4bit(x, blocksize=64, quant_type="nf4").
    wanted = bytes.fromhex(
        "036778c046778c147779d157779d157779e25777ae25778ae26778bf36778bf3"
        "6778c046778c046779d147779d157779e15777ae25778ae26778bf36778bf367"
        "78c036778c046779d147779d157779e15777ae25778ae26778bf26778bf36778"
        "b036778c046779c147779d157779d15777ae25777ae26778ae36778bf36778b0"
    )
    assert quantize(x, "nf4").codes.numpy().tobytes() == wanted


def test_bytes_are_few():
    x = torch.ones(1024, 4096)
    bits = {form: 8 * quantize(x, form).nbytes / x.numel() for form in FORMATS}
    few = {"nf4": 4.140625, "int8": 8.25, "fp8": 8.001953125, "int4": 5.0}
    assert bits == few | {"nvfp4": 4.5 + 32 / x.numel(), "fp8_row": 8 + 32 / 4096}


def test_a_part_is_quantised_as_in_the_whole_if_it_knows_the_largest_of_it():
    x = torch.randn(40, 96, generator=torch.Generator().manual_seed(0))
    x[7, 5], part = 9, (slice(10, 40), slice(16, 96))
    rows, whole = x.abs().amax(-1, keepdim=True), x.abs().amax().view(1, 1)
    for form, largest in (("nvfp4", whole), ("fp8_row", rows[10:])):
        found = dequantize(quantize(x[part], form, largest=largest))
        assert torch.equal(found, dequantize(quantize(x, form))[part])
        assert not torch.equal(found, dequantize(quantize(x[part], form)))
    assert torch.equal(quantize(x, "fp8_row", largest=whole).scales, whole / 448)
    low = dequantize(quantize(x, "nvfp4", largest=whole / 4))  # blocks that go beyond are cut off
    assert bool((low.abs() <= 9 / 4).all())


def test_nvfp4_codes_are_signs_and_indices_and_halves_go_to_the_even_one():
    sixteenths = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]
    held = quantize(torch.tensor([[*sixteenths, *(-x for x in sixteenths)]]), "nvfp4")
    assert held.scales.float().item() == 448
    assert held.codes.tolist() == [[0x02, 0x24, 0x46, 0x67, 0x8A, 0xAC, 0xCE, 0xEF]]


def test_nvfp4_is_that_of_torchao():
    with quietly():
        pytest.importorskip("torchao")
        from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    theirs = NVFP4Tensor.to_nvfp4(x, per_tensor_scale=per_tensor_amax_to_scale(x.abs().max()))
    assert torch.equal(theirs.dequantize(torch.float32), dequantize(quantize(x, "nvfp4")))
