"""Attention in blocks: parts of a softmax merge into the whole, and each kernel gives its part."""

import types

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from trainkit.attention import blocks
from trainkit.attention.blocks import (
    BlockSpans,
    choose_block_kernel,
    cpu_flash,
    cuda_flash,
    matmul,
    merge_lse,
)
from trainkit.types import Spans


def spans_of(lengths):
    bounds = torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32)
    return Spans(bounds, np.array(lengths), max(lengths))


def difference(found, wanted):
    return max(
        float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, wanted, strict=True)
    )


# ----------------------------------------------------------------------------------------- merging


def attention_over(scores, values, keys):
    """Return (out, lse) over some of the keys; nothing visible gives 0 and -inf."""
    chosen = scores[:, keys]
    lse = chosen.logsumexp(1)
    weights = torch.exp(chosen - lse.masked_fill(lse == -torch.inf, 0.0)[:, None])
    return weights @ values[keys], lse


@given(
    st.integers(1, 4),
    st.lists(st.integers(0, 3), min_size=1, max_size=12),
    st.integers(0, 2**31),
    st.floats(0, 1),
)
def test_parts_of_the_keys_merge_into_all_of_them(queries, part_of_key, seed, masked):
    """Parts may be empty, and a query may see none of a part, or nothing at all."""
    make = torch.Generator().manual_seed(seed)
    scores = 30 * torch.randn(queries, len(part_of_key), generator=make, dtype=torch.float64)
    hidden = torch.rand(scores.shape, generator=make) < masked
    scores = scores.masked_fill(hidden, -torch.inf)
    values = torch.randn(len(part_of_key), 3, generator=make, dtype=torch.float64)
    merged = attention_over(scores, values, [])
    for part in range(4):
        keys = [key for key, own in enumerate(part_of_key) if own == part]
        merged = merge_lse(*merged, *attention_over(scores, values, keys))
    out, lse = attention_over(scores, values, list(range(len(part_of_key))))
    assert torch.equal(merged[1] == -torch.inf, hidden.all(1))
    assert torch.allclose(merged[0], out, rtol=0, atol=1e-13)
    assert torch.allclose(merged[1], lse, rtol=1e-14, atol=1e-13)


def test_without_the_guard_nothing_visible_would_be_nan():
    nothing = torch.tensor([-torch.inf])
    assert torch.exp(nothing - torch.logaddexp(nothing, nothing)).isnan().all()
    out, lse = merge_lse(torch.zeros(1, 2), nothing, torch.zeros(1, 2), nothing)
    assert out.tolist() == [[0.0, 0.0]]
    assert lse.tolist() == [-torch.inf]


# ----------------------------------------------------------------------------------------- kernels


def made(*shape, dtype=torch.float64):
    make = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=make, dtype=dtype)


BLOCKS = {
    "causal, lengths differ": ([3, 1, 6], [3, 1, 6], True),
    "causal, equal lengths": ([4, 4], [4, 4], True),
    "half of the keys": ([4, 8, 2], [2, 4, 1], False),
    "half of the queries": ([2, 4, 1], [4, 8, 2], False),
    "one document": ([5], [10], False),
}


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("values", [8, 5, 12])
def test_the_flash_kernel_equals_attention_written_out(name, kv_heads, values):
    queries, keys, causal = BLOCKS[name]
    block = BlockSpans(spans_of(queries), spans_of(keys), causal, scale=0.3)
    q = made(sum(queries), 4, 8)
    k, v = made(sum(keys), kv_heads, 8), made(sum(keys), kv_heads, values) + 1
    want = matmul.forward((q, k, v), block)
    found = cpu_flash.forward((q, k, v), block)
    assert found[1].dtype == torch.float64
    assert difference(found, want) < 1e-14
    # The result over all keys has a larger log-sum-exp than this block's alone.
    whole = want[0] + 1, want[1] + 2
    d_out = made(sum(queries), 4, values) - 1
    gradients = [kernel.backward(d_out, (q, k, v), whole, block) for kernel in (cpu_flash, matmul)]
    assert difference(*gradients) < 1e-13


def test_the_written_out_kernel_has_the_gradient_of_its_forward():
    queries = [3, 5]
    block = BlockSpans(spans_of(queries), spans_of(queries), causal=True, scale=0.3)
    qkv = [made(8, heads, size).requires_grad_() for heads, size in ((4, 4), (2, 4), (2, 3))]
    out, lse = matmul.forward(tuple(qkv), block)
    d_out = made(8, 4, 3)
    want = torch.autograd.grad((out * d_out).sum(), qkv)
    with torch.no_grad():
        assert difference(matmul.backward(d_out, tuple(qkv), (out, lse), block), want) < 1e-14


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str
)
def test_the_last_dimension_need_not_lie_in_order(dtype):
    """As `q, k, v = qkv.unbind(-1)` gives them; the gradient that comes in may be so too."""
    block = BlockSpans(spans_of([3, 6]), spans_of([3, 6]), causal=True, scale=0.3)
    tensors = [made(9, heads, 8).to(dtype) + n for n, heads in enumerate((4, 4, 2, 2))]
    strided = [torch.stack([x, x], -1)[..., 0] for x in tensors]
    out, lse = want = cpu_flash.forward(tuple(tensors[1:]), block)
    for a, b in zip(cpu_flash.forward(tuple(strided[1:]), block), want, strict=True):
        assert torch.equal(a, b)
    strided_out = torch.stack([out, out], -1)[..., 0]
    found = cpu_flash.backward(strided[0], tuple(strided[1:]), (strided_out, lse), block)
    want = cpu_flash.backward(tensors[0], tuple(tensors[1:]), (out, lse), block)
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("at_once", [1, 8 * 20 * 4])
def test_queries_by_chunks_are_the_same_attention(monkeypatch, causal, at_once):
    """At least 16 queries at a time, and as many as the scores in memory allow."""
    block = BlockSpans(spans_of([40, 1, 17]), spans_of([40, 1, 17]), causal, scale=0.3)
    d_out, *qkv = (made(58, heads, 8) + n for n, heads in enumerate((4, 4, 2, 2)))
    want = matmul.forward(tuple(qkv), block)
    gradients = matmul.backward(d_out, tuple(qkv), want, block)
    monkeypatch.setattr(blocks, "_MAX_SCORES", at_once)
    assert difference(matmul.forward(tuple(qkv), block), want) < 1e-14
    assert difference(matmul.backward(d_out, tuple(qkv), want, block), gradients) < 1e-13


class Largest(TorchDispatchMode):
    """The most bytes of any tensor that an operator gives."""

    found = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in tree_iter(out):
            if isinstance(x, torch.Tensor):
                self.found = max(self.found, x.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize("causal", [True, False])
def test_scores_written_out_take_memory_that_does_not_grow_with_the_square(monkeypatch, causal):
    """2^14 tokens of two heads have 2 GiB of scores; shapes alone are computed here."""
    monkeypatch.setattr(blocks, "_MAX_SCORES", 1 << 22, raising=False)
    spans = spans_of([1 << 14])
    block = BlockSpans(on_meta(spans), on_meta(spans), causal, scale=0.3)
    qkv = tuple(torch.empty(1 << 14, heads, 8, device="meta") for heads in (2, 1, 1))
    with Largest() as seen:
        result = matmul.forward(qkv, block)
        matmul.backward(torch.empty_like(qkv[0]), qkv, result, block)
    assert seen.found <= 4 << 22


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kernel", [cpu_flash, matmul], ids=["cpu_flash", "matmul"])
def test_lower_precision_keeps_the_log_sum_exp_in_fp32(kernel, dtype):
    block = BlockSpans(spans_of([5]), spans_of([5]), causal=True, scale=0.3)
    exact = [made(5, heads, 8).to(dtype) for heads in (4, 2, 2)]
    out, lse = kernel.forward(tuple(exact), block)
    want = matmul.forward(tuple(x.double() for x in exact), block)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    assert difference([lse], [want[1]]) < 1e-6
    assert difference([out], [want[0]]) < (1e-2 if dtype == torch.bfloat16 else 1e-6)
    gradients = kernel.backward(out, tuple(exact), (out, lse), block)
    assert [x.dtype for x in gradients] == [dtype] * 3


def test_the_cuda_kernel_fits_the_schemas_of_its_operators():
    """On the meta device torch checks the arguments and gives the shapes; no GPU is needed."""
    queries, keys = (on_meta(spans_of(lengths)) for lengths in ([4, 2], [2, 1]))
    block = BlockSpans(queries, keys, causal=False, scale=0.3)
    shapes = ((6, 4, 16), (3, 2, 16), (3, 2, 8))
    qkv = tuple(torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in shapes)
    out, lse = cuda_flash.forward(qkv, block)
    assert (out.shape, lse.shape, lse.dtype) == ((6, 4, 8), (6, 4), torch.float32)
    gradients = cuda_flash.backward(torch.empty_like(out), qkv, (out, lse), block)
    assert [tuple(x.shape) for x in gradients] == list(shapes)


def on_meta(spans):
    return Spans(spans.cu_seqlens.to("meta"), spans.lengths, spans.max_length)


def test_the_kernel_is_chosen_by_device_dtype_and_head_size(monkeypatch):
    assert choose_block_kernel(torch.ones(1, 1, 7, dtype=torch.bfloat16)) is cpu_flash
    assert choose_block_kernel(torch.ones(1, 1, 8, device="meta")) is matmul
    low = torch.bfloat16
    for major, size, dtype, kernel in (
        (8, 8, low, cuda_flash),
        (9, 256, torch.float16, cuda_flash),
        (8, 12, low, matmul),
        (8, 264, low, matmul),
        (7, 8, low, matmul),
        (8, 8, torch.float32, matmul),
    ):
        device = types.SimpleNamespace(major=major)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, found=device: found)
        q = types.SimpleNamespace(device=torch.device("cuda"), is_cuda=True, dtype=dtype)
        q.shape = (1, 1, size)
        assert choose_block_kernel(q) is kernel, (major, size, dtype)
