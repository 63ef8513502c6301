"""Attention with sinks equals a softmax with one more logit for each head."""

import re
import warnings
from functools import partial

import pytest
import torch
from attention.test_attention import Operators, assert_equal, inputs, output_and_gradients, spans_of
from attention.test_choose import attention_of, gpu, on_gpu

from trainkit.attention import add_sink, ring, sdpa, ulysses, varlen
from trainkit.attention.blocks import BlockSpans, cuda_flash
from trainkit.models.kv_cache import attend_slots
from trainkit.types import Axis, Share, Spans

assert gpu  # a fixture
LENGTHS = [150, 1, 29, 120]


def written_out(q, k, v, sinks=None, *, lengths, window=None, softcap=None, scale=0.7, causal=True):
    """An explicit softmax over all keys of a row and the sink, of which no value is taken."""
    flat_q = q.flatten(0, 1)
    groups = q.shape[2] // k.shape[2]
    flat_k, flat_v = (x.flatten(0, 1).repeat_interleave(groups, dim=1) for x in (k, v))
    documents = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    allowed = documents[:, None] == documents[None, :]
    allowed = allowed.tril() if causal else allowed
    allowed &= torch.ones_like(allowed).triu(1 - (window or len(allowed)))
    scores = torch.einsum("qhd,khd->hqk", flat_q, flat_k) * scale
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~allowed, -torch.inf)
    if sinks is None:
        sinks = scores.new_full(q.shape[2:3], -torch.inf)
    sink = sinks[:, None, None].expand(-1, len(flat_q), 1)
    weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
    return torch.einsum("hqk,khd->qhd", weights, flat_v).unflatten(0, q.shape[:2])


@pytest.mark.parametrize("softcap", [None, 0.5])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("name", ["sdpa", "flash", "math", "varlen", "flex", "ring", "ulysses"])
def test_every_attention_sees_both_sides_if_it_is_not_causal(monkeypatch, name, sinks, softcap):
    attend = attention_of(name, monkeypatch)
    tensors = inputs_with_sinks(kv_heads=2, dim=16, values=12)[: None if sinks else 3]

    def call(q, k, v, sinks=None):
        options = {} if sinks is None else {"sinks": sinks}
        spans = spans_of(LENGTHS)
        return attend(q, k, v, spans=spans, softcap=softcap, scale=0.7, causal=False, **options)

    masked = partial(written_out, lengths=LENGTHS, softcap=softcap, causal=False)
    with warnings.catch_warnings(action="ignore"):
        assert_equal(output_and_gradients(call, tensors), output_and_gradients(masked, tensors))
    with pytest.raises(ValueError, match="a window of 5 keys counts back from the query"):
        attend(*tensors[:3], spans=spans_of(LENGTHS), window=5, causal=False)


def inputs_with_sinks(heads=4, **sizes):
    qkv = inputs(2, 150, heads=heads, **sizes)
    # Sinks far below the scores, among them and far above.
    return [*qkv, torch.tensor([-9.0, 0.5, 2.0, 9.0], dtype=qkv[0].dtype).requires_grad_()]


@pytest.mark.parametrize(
    ("window", "softcap", "values"),
    [(None, None, 16), (20, None, 16), (70, None, 12), (None, 0.5, 16), (20, 0.5, 12)],
)
@pytest.mark.parametrize("name", ["sdpa", "flash", "math", "varlen", "flex", "ring", "ulysses"])
def test_every_attention_has_sinks(monkeypatch, name, window, softcap, values):
    attend = attention_of(name, monkeypatch)
    tensors = inputs_with_sinks(kv_heads=2, dim=16, values=values)

    def call(q, k, v, sinks):
        options = {"window": window, "softcap": softcap, "scale": 0.7, "sinks": sinks}
        return attend(q, k, v, spans=spans_of(LENGTHS), **options)

    masked = partial(written_out, lengths=LENGTHS, window=window, softcap=softcap)
    with warnings.catch_warnings(action="ignore"):  # that flex is in its plain form
        assert_equal(output_and_gradients(call, tensors), output_and_gradients(masked, tensors))


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("window", [None, 20])
def test_in_low_precision_sinks_are_added_in_fp32(dtype, bound, window):
    tensors = inputs_with_sinks(kv_heads=2, dtype=dtype)

    def call(q, k, v, sinks):
        options = {"spans": spans_of(LENGTHS), "scale": 0.7, "sinks": sinks}
        return sdpa(q, k, v, window=window, **options)

    exact = [x.detach().double().requires_grad_() for x in tensors]
    want = output_and_gradients(partial(written_out, lengths=LENGTHS, window=window), exact)
    for a, b in zip(output_and_gradients(call, tensors), want, strict=True):
        assert a.dtype == dtype
        assert (a - b).abs().max() <= bound * b.abs().max()


def test_a_sink_of_minus_infinity_changes_nothing():
    qkv, spans = inputs(1, 12, kv_heads=2), spans_of([7, 5])
    sinks = torch.full((4,), -torch.inf, dtype=torch.float64)
    got = output_and_gradients(lambda *x: sdpa(*x, spans=spans, sinks=sinks), qkv)
    assert_equal(got, output_and_gradients(partial(sdpa, spans=spans), qkv))


@pytest.mark.parametrize("softcap", [None, 0.5])
def test_the_newest_token_of_a_cache_has_the_sinks_of_its_row(softcap):
    q, k, v, sinks = (x.detach() for x in inputs_with_sinks(kv_heads=2))
    want = written_out(q, k, v, sinks, lengths=[150, 150], softcap=softcap)
    queries = q[:, -1].unflatten(1, (2, 2))
    slots = [x.transpose(1, 2) for x in (k, v)]
    options = {"scale": 0.7, "softcap": softcap, "sinks": sinks.view(2, 2)}
    got = attend_slots(queries, *slots, **options).flatten(1, 2)
    assert_equal([got], [want[:, -1]])


def test_where_no_key_is_visible_the_sink_takes_all():
    out, lse = add_sink(torch.zeros(1, 2), torch.tensor([-torch.inf]), torch.tensor([0.5]))
    assert torch.equal(out, torch.zeros(1, 2))
    assert lse.item() == 0.5


@pytest.mark.parametrize("window", [None, 16])
def test_sinks_keep_the_kernel_of_a_cpu_and_no_scores(window):
    q, k, v, sinks = inputs_with_sinks(kv_heads=2)
    with Operators() as operators:
        sdpa(q, k, v, spans=spans_of(LENGTHS), window=window, sinks=sinks).sum().backward()
    kernel = "_scaled_dot_product_flash_attention_for_cpu"
    assert {kernel, f"{kernel}_backward"} <= operators.seen
    assert not operators.seen & {"bmm", "mm", "_softmax", "_safe_softmax", "logsumexp"}


@pytest.mark.parametrize("sinks", [torch.zeros(2), torch.zeros(4, 1), torch.zeros(4).long()])
def test_sinks_that_do_not_fit_the_heads_are_refused(sinks):
    nobody = Axis("nobody", Share(0, 4))
    match = re.escape("attention: sinks must be one logit for each of 4 query heads, [4], got")
    for attend, tokens in ((sdpa, 8), (ring(nobody), 8), (ulysses(sdpa, nobody), 32)):
        with pytest.raises(ValueError, match=match):
            attend(*inputs(1, 8), spans=spans_of([tokens]), sinks=sinks)


@pytest.mark.usefixtures("gpu")
def test_a_kernel_without_a_log_sum_exp_is_not_chosen(monkeypatch):
    monkeypatch.setattr(torch.backends.cuda, "can_use_cudnn_attention", lambda _: True)
    chosen = on_gpu(["efficient", "cudnn", "flash"], sinks=True)
    reason = "it gives no log-sum-exp, which sinks need"
    assert (chosen.name, chosen.attend) == ("flash", varlen)
    assert chosen.refused == {"efficient": reason, "cudnn": reason}
    assert on_gpu(["efficient"]).name == "efficient"


def test_the_kernel_of_cuda_takes_the_window_of_a_document():
    """On the meta device torch checks the arguments; no GPU is needed."""
    whole = Spans(torch.empty(3, dtype=torch.int32, device="meta"), [4, 2], 4)
    block = BlockSpans(whole, whole, causal=True, scale=0.3, window=3)
    qkv = tuple(torch.empty(6, 4, 16, dtype=torch.bfloat16, device="meta") for _ in "qkv")
    result = cuda_flash.forward(qkv, block)
    gradients = cuda_flash.backward(torch.empty_like(result[0]), qkv, result, block)
    assert [x.shape for x in gradients] == [(6, 4, 16)] * 3
