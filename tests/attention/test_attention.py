"""Attention of packed documents equals attention of each document alone."""

import inspect
import sys
import types
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from trainkit.attention import blocks, ring, sdpa, ulysses, varlen
from trainkit.types import Axis, Share, Spans


def spans_of(lengths):
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return Spans(torch.tensor(offsets, dtype=torch.int32), np.array(lengths), max(lengths))


def inputs(rows, tokens, *, heads=4, kv_heads=4, dim=8, values=8, dtype=torch.float64):
    make = torch.Generator().manual_seed(rows * tokens + heads)
    return [
        torch.randn(rows, tokens, h, size, generator=make, dtype=dtype).requires_grad_()
        for h, size in ((heads, dim), (kv_heads, dim), (kv_heads, values))
    ]


def written_out(q, k, v, lengths, scale=None, *, window=None, softcap=None):
    """Attention with an explicit softmax over an explicit mask of one whole flattened row."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    groups = q.shape[2] // k.shape[2]
    flat_q = q.flatten(0, 1)
    flat_k, flat_v = (x.flatten(0, 1).repeat_interleave(groups, dim=1) for x in (k, v))
    documents = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    allowed = (documents[:, None] == documents[None, :]).tril()
    allowed &= torch.ones_like(allowed).triu(1 - (window or len(allowed)))
    scores = torch.einsum("qhd,khd->hqk", flat_q, flat_k) * scale
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    weights = scores.masked_fill(~allowed, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, flat_v).unflatten(0, q.shape[:2])


def output_and_gradients(function, qkv):
    out = function(*qkv)
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), qkv)]


def assert_equal(got, want):
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape
        # A document of one token has no gradient at its query: 0 up to the rounding of terms of
        # about 1, whose order is the processor's.
        assert (a - b).abs().max() <= 1e-12 * b.abs().max() + 1e-14


@pytest.mark.parametrize("attend", [sdpa, varlen])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("lengths", [[3, 1, 5, 3], [4, 4, 4], [12], [1] * 12])
@pytest.mark.parametrize("values", [8, 5, 12])
def test_packed_equals_the_masked_softmax(attend, kv_heads, lengths, values):
    qkv = inputs(1, 12, kv_heads=kv_heads, values=values)
    got = output_and_gradients(lambda *x: attend(*x, spans=spans_of(lengths), scale=0.3), qkv)
    want = output_and_gradients(lambda *x: written_out(*x, lengths, scale=0.3), qkv)
    assert_equal(got, want)


@pytest.mark.parametrize("attend", [sdpa, varlen])
@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize("lengths", [[3, 1, 50, 10], [16] * 4, [64]])
@pytest.mark.parametrize("window", [None, 2, 7, 64])
@pytest.mark.parametrize("softcap", [None, 0.5])
def test_windows_and_soft_caps_equal_the_masked_softmax(attend, kv_heads, lengths, window, softcap):
    qkv = inputs(1, 64, kv_heads=kv_heads, values=5)
    tried = partial(attend, spans=spans_of(lengths), scale=0.7, window=window, softcap=softcap)
    masked = partial(written_out, lengths=lengths, scale=0.7, window=window, softcap=softcap)
    assert_equal(output_and_gradients(tried, qkv), output_and_gradients(masked, qkv))


def test_in_a_window_of_one_token_each_sees_itself():
    q, k, v = inputs(1, 12)
    assert_equal([sdpa(q, k, v, spans=spans_of([7, 5]), window=1, softcap=2.0)], [v])


def test_a_window_as_long_as_the_documents_changes_no_bit():
    qkv, spans = inputs(1, 12, dtype=torch.float32), spans_of([7, 5])
    got = output_and_gradients(lambda *x: sdpa(*x, spans=spans, window=7), qkv)
    for a, b in zip(got, output_and_gradients(partial(sdpa, spans=spans), qkv), strict=True):
        assert torch.equal(a, b)


def test_a_window_of_several_chunks_whose_first_keys_some_queries_do_not_see():
    """Chunks of 520 queries are more than a CPU's kernel takes keys at once."""
    qkv, window = inputs(1, 2700, heads=1, kv_heads=1), 2080
    got = output_and_gradients(lambda *x: sdpa(*x, spans=spans_of([2700]), window=window), qkv)
    want = partial(
        blocks.attend_spans,
        kernel=blocks.matmul,
        spans=spans_of([2700]),
        window=window,
        scale=8**-0.5,
    )
    assert_equal(got, output_and_gradients(want, qkv))


class Operators(TorchDispatchMode):
    """The names of all operators that run."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_in_a_window_too_torch_has_one_kernel_on_a_cpu_and_keeps_no_scores(dtype):
    saved_bytes = []
    for tokens in (512, 1024):
        qkv, memory = inputs(1, tokens, kv_heads=2, dtype=dtype), {}
        pack = lambda x, memory=memory: memory.update(  # noqa: E731
            {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes()}
        )
        with Operators() as operators, torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            sdpa(*qkv, spans=spans_of([tokens]), window=16)
        assert "_scaled_dot_product_flash_attention_for_cpu" in operators.seen
        assert not operators.seen & {"bmm", "mm", "_softmax", "_safe_softmax", "logsumexp"}
        saved_bytes.append(sum(memory.values()))
    assert saved_bytes[1] <= 2.05 * saved_bytes[0]


@pytest.mark.parametrize("window", [16, 256])
def test_a_window_costs_what_it_sees(window):
    """Operations grow with the tokens, not with their square, and are few more than are seen."""
    from torch.utils.flop_counter import FlopCounterMode

    found = []
    for tokens in (1024, 2048):
        qkv = [x.to("meta") for x in inputs(1, tokens)]
        with FlopCounterMode(display=False) as counter:
            sdpa(*qkv, spans=spans_of([tokens]), window=window)
        found.append(counter.get_total_flops() / (4 * 4 * 8))  # pairs of a query and a key
    assert found[1] - found[0] <= 1024 * 1.3 * max(window, 64)


@settings(max_examples=20)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=6), st.integers(1, 2))
def test_packed_equals_its_documents_one_by_one(lengths, rows):
    qkv = inputs(rows, sum(lengths), kv_heads=2)
    lengths = lengths * rows

    def one_by_one(q, k, v):
        edges = np.concatenate([[0], np.cumsum(lengths)])
        documents = [
            sdpa(*(x.flatten(0, 1)[None, a:b] for x in (q, k, v)), spans=spans_of([b - a]))
            for a, b in pairwise(edges)
        ]
        return torch.cat(documents, 1).view_as(q)

    got = output_and_gradients(lambda *x: sdpa(*x, spans=spans_of(lengths)), qkv)
    assert_equal(got, output_and_gradients(one_by_one, qkv))


def test_grouped_heads_equal_repeated_heads():
    q, k, v = inputs(2, 6, heads=6, kv_heads=2)
    spans = spans_of([2, 4, 5, 1])

    def repeated(q, k, v):
        return sdpa(q, *(x.repeat_interleave(3, dim=2) for x in (k, v)), spans=spans)

    got = output_and_gradients(lambda *x: sdpa(*x, spans=spans), [q, k, v])
    assert_equal(got, output_and_gradients(repeated, [q, k, v]))


def test_equal_lengths_take_one_call(monkeypatch):
    calls = []
    real = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional,
        "scaled_dot_product_attention",
        lambda *args, **kwargs: calls.append(args[0].shape) or real(*args, **kwargs),
    )
    q, k, v = inputs(2, 6)
    sdpa(q, k, v, spans=spans_of([3, 3, 3, 3]))
    assert calls == [(4, 4, 3, 8)]


def test_cost_is_a_sum_over_documents():
    """No score of two different documents is ever computed: counted in operations, not in time."""
    from torch.utils.flop_counter import FlopCounterMode

    def flops(lengths):
        qkv = [x.to("meta") for x in inputs(1, sum(lengths))]
        with FlopCounterMode(display=False) as counter:
            sdpa(*qkv, spans=spans_of(lengths))
        return counter.get_total_flops()

    assert flops([16] * 8) == 8 * flops([16]) > 0
    assert flops([10, 30]) == flops([10]) + flops([30])


@pytest.mark.parametrize(
    ("shapes", "lengths", "match"),
    [
        ([(1, 4, 4, 8), (1, 4, 3, 8), (1, 4, 3, 8)], [4], "K a divisor of H"),
        ([(1, 4, 4, 8), (1, 4, 2, 8), (1, 4, 4, 8)], [4], "K a divisor of H"),
        ([(1, 4, 4, 8), (1, 4, 2, 6), (1, 4, 2, 8)], [4], r"k \[B, S, K, D\]"),
        ([(1, 4, 4, 8), (1, 4, 4, 8), (1, 4, 4, 0)], [4], "attention: q must be .* no size 0"),
        ([(1, 4, 4, 8), (1, 5, 4, 8), (1, 5, 4, 8)], [4], "attention: q must be"),
        ([(4, 4, 8), (4, 4, 8), (4, 4, 8)], [4], "attention: q must be"),
        ([(2, 4, 4, 8), (2, 4, 4, 8), (2, 4, 4, 8)], [4, 3], "7 tokens, .* 2 x 4"),
        ([(1, 4, 4, 8), (1, 4, 4, 8), (1, 4, 4, 8)], [-2, 6], "a span has -2 tokens"),
        ([(1, 0, 4, 8), (1, 0, 4, 8), (1, 0, 4, 8)], [0], "attention: q must be .* no size 0"),
        ([(1, 4, 4, 8), (1, 4, 0, 8), (1, 4, 0, 8)], [4], "attention: q must be .* no size 0"),
        ([(1, 4, 4, 0), (1, 4, 4, 0), (1, 4, 4, 0)], [4], "attention: q must be .* no size 0"),
    ],
)
def test_bad_shapes_are_refused(shapes, lengths, match):
    for attend in KERNELS:
        with pytest.raises(ValueError, match=match):
            attend(*(torch.ones(shape) for shape in shapes), spans=spans_of(lengths))


# An axis without a process group: who communicates before it looks fails with other words.
KERNELS = (varlen, sdpa, ring(Axis("nobody", Share(0, 4))))


@pytest.mark.parametrize("scale", [0, -0.5, float("inf"), float("nan")])
def test_a_scale_that_makes_no_attention_is_refused(scale):
    qkv = [torch.ones(1, 4, 4, 8)] * 3
    slices = ulysses(sdpa, Axis("nobody", Share(0, 4)))
    for attend, tokens in ((slices, 16), *((kernel, 4) for kernel in KERNELS)):
        with pytest.raises(ValueError, match=f"scale must be .* got {scale}"):
            attend(*qkv, spans=spans_of([tokens]), scale=scale)


def test_a_window_or_cap_that_makes_no_attention_is_refused():
    qkv, spans = inputs(1, 8), spans_of([8])
    for attend in KERNELS:
        with pytest.raises(ValueError, match="attention: window must be at least 1, got 0"):
            attend(*qkv, spans=spans, window=0)
        with pytest.raises(ValueError, match="attention: softcap must be"):
            attend(*qkv, spans=spans, softcap=0.0)


def test_mixed_and_whole_number_dtypes_are_refused():
    x = torch.ones(1, 4, 4, 8)
    for attend in KERNELS:
        for qkv in ((x, x.double(), x), (x, x, x.half()), (x.int(), x.int(), x.int())):
            with pytest.raises(ValueError, match="one floating-point dtype"):
                attend(*qkv, spans=spans_of([4]))


# --------------------------------------------------------------------- paths of a CUDA that is not


class Cuda(torch.Tensor):
    """A tensor of the CPU that says it is on CUDA."""

    is_cuda = True


def cuda_inputs(dtype, size=8, *, kv_heads=4, values=None):
    values = size if values is None else values
    qkv = inputs(1, 12, kv_heads=kv_heads, dim=size, values=values, dtype=dtype)
    return [x.detach().as_subclass(Cuda).requires_grad_() for x in qkv]


@pytest.fixture
def taken(monkeypatch):
    """Give torch kernels as on CUDA; return a list of the calls, by their number of key heads."""
    log, room, low = [], torch.backends.cuda, (torch.float16, torch.bfloat16)
    real = torch.nn.functional.scaled_dot_product_attention

    def fused(q, k, v, **options):
        assert q.shape[-1] == v.shape[-1]  # or torch would keep all scores on a CPU
        log.append(k.shape[1])
        return real(q, k, v, **options)

    def flash(params):
        return params.query.dtype in low and params.attn_mask is None

    def efficient(params):
        same = params.query.shape[1] == params.key.shape[1]
        if params.attn_mask is not None:
            assert not params.is_causal
            assert params.attn_mask.shape == (params.query.shape[2], params.key.shape[2])
        return same and params.query.dtype != torch.float64

    names = "query", "key", "value", "attn_mask", "dropout", "is_causal", "enable_gqa"
    monkeypatch.setattr(
        room,
        "SDPAParams",
        lambda *x: types.SimpleNamespace(**dict(zip(names, x, strict=True))),
    )
    monkeypatch.setattr(room, "can_use_flash_attention", flash)
    monkeypatch.setattr(room, "can_use_efficient_attention", efficient)
    monkeypatch.setattr(room, "can_use_cudnn_attention", lambda _: False)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", fused)
    return log


@pytest.mark.parametrize(
    ("dtype", "kv_heads", "window", "calls"),
    [
        (torch.bfloat16, 2, None, {2}),
        (torch.bfloat16, 2, 3, {4}),  # what takes a mask here takes no shared key heads
        (torch.float32, 4, None, {4}),
        (torch.float32, 2, None, {4}),  # of shared key heads torch would write the scores out
        (torch.float64, 2, None, set()),  # and of fp64; so do we, some queries at a time
        (torch.float64, 2, 3, set()),
    ],
)
@pytest.mark.parametrize("values", [8, 6])
def test_no_path_on_cuda_keeps_all_scores(  # noqa: PLR0917 (a table)
    taken, dtype, kv_heads, window, calls, values
):
    def attend(*qkv):
        return sdpa(*qkv, spans=spans_of([7, 5]), scale=0.3, window=window)

    qkv = cuda_inputs(dtype, kv_heads=kv_heads, values=values)
    found = output_and_gradients(attend, qkv)
    assert set(taken) == calls
    exact = [x.detach().as_subclass(torch.Tensor).double().requires_grad_() for x in qkv]
    want = output_and_gradients(attend, exact)
    bound = {torch.bfloat16: 5e-2, torch.float32: 1e-5, torch.float64: 1e-12}[dtype]
    for a, b in zip(found, want, strict=True):
        assert (a.double() - b).abs().max() <= bound * b.abs().max()


@pytest.mark.parametrize(
    ("major", "size", "dtype", "autocast", "path"),
    [
        (8, 8, torch.bfloat16, False, "flash_varlen"),
        (8, (8, 6), torch.bfloat16, False, "flash_varlen"),
        (8, (8, 12), torch.bfloat16, False, "sdpa"),
        (9, 256, torch.float16, False, "flash_varlen"),
        (8, 8, torch.float32, True, "flash_varlen"),  # under autocast q and k may be wider than v
        (8, 8, torch.float32, False, "sdpa"),
        (8, 12, torch.bfloat16, False, "sdpa"),
        (8, 264, torch.bfloat16, False, "sdpa"),
        (7, 8, torch.bfloat16, False, "sdpa"),
    ],
)
def test_varlen_takes_its_kernel_for_what_the_kernel_takes(  # noqa: PLR0917 (a table)
    monkeypatch, major, size, dtype, autocast, path
):
    room = sys.modules["trainkit.attention.varlen"]
    device = types.SimpleNamespace(major=major)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)
    seen = []
    for name in ("flash_varlen", "sdpa"):
        monkeypatch.setattr(room, name, lambda *x, name=name, **_: seen.append((name, x)))
    size, values = size if isinstance(size, tuple) else (size, size)
    q, k, v = cuda_inputs(dtype, size, values=values)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        varlen(q, k, v.bfloat16() if autocast else v, spans=spans_of([12]))
    [(name, qkv)] = seen
    assert name == path
    assert {x.dtype for x in qkv} == {torch.bfloat16 if autocast else dtype}


def test_autocast_reaches_every_attention():
    q, k, v = inputs(1, 12, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        for attend in (sdpa, varlen):
            assert attend(q, k, v.bfloat16(), spans=spans_of([12])).dtype == torch.bfloat16


# torch 2.13 reads .grad of every tensor that enters a compiled frame, leaf or not.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_compile_survives_batches_of_different_documents():
    import torch._dynamo

    torch._dynamo.reset()
    batches = [[5, 7], [3, 4, 5], [12], [4, 4, 4], [1, 2, 3, 6], [2, 10], [6, 6], [1] * 12, [9, 3]]
    batches += [[8, 6], [1, 13], [7, 7], [2, 3, 9]]

    def block(q, k, v, spans):
        return 2 * varlen(q + 1, k, v, spans=spans) - 1

    compiled = torch.compile(block, backend="aot_eager")
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        for lengths in batches:
            qkv = inputs(1, sum(lengths), kv_heads=2)
            spans = spans_of(lengths)
            got = output_and_gradients(partial(compiled, spans=spans), qkv)
            assert_equal(got, output_and_gradients(partial(block, spans=spans), qkv))
    torch._dynamo.reset()


def kernel(signature):
    """A stand-in for torch's CUDA kernel: its signature, and the masked softmax on the CPU."""

    def compute(*args, scale, window_size):
        query, key, value, cu_seq_q, cu_seq_k, max_q, max_k = args
        assert query.shape[-1] == value.shape[-1]
        left, right = window_size
        assert right == 0
        assert cu_seq_q is cu_seq_k
        assert max_q == max_k == int(cu_seq_q.diff().max())
        rows = (query[None], key[None], value[None])
        return written_out(*rows, cu_seq_q.diff().tolist(), scale, window=left + 1 or None)[0]

    if "enable_gqa" in signature:

        def varlen_attn(*args, scale=None, window_size=(-1, -1), enable_gqa=False):
            assert enable_gqa or args[0].shape[1] == args[1].shape[1]
            return compute(*args, scale=scale, window_size=window_size)
    else:

        def varlen_attn(*args, scale=None, window_size=(-1, -1)):
            assert args[0].shape[1] == args[1].shape[1]
            return compute(*args, scale=scale, window_size=window_size)

    return varlen_attn


@pytest.mark.parametrize("signature", [("enable_gqa",), ()], ids=["torch 2.13", "torch 2.11"])
@pytest.mark.parametrize(("kv_heads", "values"), [(2, 8), (4, 8), (4, 5), (2, 12)])
def test_cuda_branch_calls_the_kernel_for_the_same_result(monkeypatch, signature, kv_heads, values):
    module = types.ModuleType("torch.nn.attention.varlen")
    module.varlen_attn = kernel(signature)
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", module)
    flash_varlen = sys.modules["trainkit.attention.varlen"].flash_varlen
    qkv, spans = inputs(2, 6, kv_heads=kv_heads, values=values), spans_of([2, 4, 5, 1])
    for window in (None, 2):
        got, want = (
            output_and_gradients(partial(attend, spans=spans, scale=0.3, window=window), qkv)
            for attend in (flash_varlen, sdpa)
        )
        assert_equal(got, want)


def test_installed_kernel_takes_what_the_cuda_branch_passes():
    from torch.nn.attention.varlen import varlen_attn

    parameters = inspect.signature(varlen_attn).parameters
    assert tuple(parameters)[:7] == (
        "query",
        "key",
        "value",
        "cu_seq_q",
        "cu_seq_k",
        "max_q",
        "max_k",
    )
    by_keyword = {n for n, p in parameters.items() if p.kind is inspect.Parameter.KEYWORD_ONLY}
    assert {"scale", "window_size"} <= by_keyword
    assert ("enable_gqa" in by_keyword) == ("enable_gqa" in varlen_attn.__kwdefaults__)
    assert parameters["window_size"].default == (-1, -1)
