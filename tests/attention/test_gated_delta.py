"""The gated delta rule in chunks equals its recurrence, token by token, and so does one step."""

from functools import partial
from itertools import product

import numpy as np
import pytest
import torch

from trainkit.attention.causal_conv import causal_conv, last_inputs
from trainkit.attention.gated_delta import (
    choose_chunk,
    gated_delta,
    gated_delta_with_states,
    step_gated_delta,
)
from trainkit.types import Spans


def spans_of(lengths):
    bounds = torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32)
    return Spans(bounds, np.array(lengths), max(lengths))


def written_out(tensors, *, lengths, scale):
    """The recurrence of the paper, one token after another; the output, and the last states."""
    q, k, v, log_decay, beta, initial = tensors
    groups = v.shape[2] // k.shape[2]
    q, k = (x.flatten(0, 1).repeat_interleave(groups, dim=1) for x in (q, k))
    values, log_decay, beta = (x.flatten(0, 1) for x in (v, log_decay, beta))
    out, states, token = [], [], 0
    for document, length in enumerate(lengths):
        state = initial[document]
        for t in range(token, token + length):
            state = log_decay[t].exp()[:, None, None] * state
            error = values[t] - torch.einsum("hd,hde->he", k[t], state)
            state = state + torch.einsum("hd,he->hde", k[t], beta[t][:, None] * error)
            out.append(torch.einsum("hd,hde->he", scale * q[t], state))
        token += length
        states.append(state)
    return torch.stack(out).view_as(v), torch.stack(states)


def inputs(lengths, *, decay, rows=1, heads=4, dtype=torch.float64):
    """Return q, k, v, log_decay, beta and initial states; decays between exp(-decay) and 1."""
    make = torch.Generator().manual_seed(sum(lengths))
    tokens = sum(lengths) // rows

    def normal(*shape):
        return torch.randn(*shape, generator=make, dtype=torch.float64)

    q, k, v = normal(rows, tokens, 2, 8), normal(rows, tokens, 2, 8), normal(rows, tokens, heads, 5)
    k = k / k.norm(dim=-1, keepdim=True)
    gates = torch.rand(2, rows, tokens, heads, generator=make, dtype=torch.float64)
    tensors = q, k, v, -decay * gates[0], gates[1], normal(len(lengths), heads, 8, 5)
    return [x.to(dtype).requires_grad_() for x in tensors]


def chunked(tensors, *, lengths, scale, chunk):
    q, k, v, log_decay, beta, initial = tensors
    return gated_delta_with_states(
        q,
        k,
        v,
        log_decay=log_decay,
        beta=beta,
        spans=spans_of(lengths),
        scale=scale,
        initial=initial,
        chunk=chunk,
    )


def results(outputs, tensors):
    weights = [torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view_as(x) for x in outputs]
    total = sum((x * w).sum() for x, w in zip(outputs, weights, strict=True))
    return [*(x.detach() for x in outputs), *torch.autograd.grad(total, tensors)]


def largest_difference(found, wanted):
    return max(
        float((a - b).detach().abs().max() / (b.detach().abs().max() + 1e-3))
        for a, b in zip(found, wanted, strict=True)
    )


LENGTHS = [[1], [63, 1, 65], [64, 64], [100, 28], [128], [7, 6, 8, 14], [1] * 20, [0, 5, 0, 130, 3]]


@pytest.mark.parametrize("chunk", [1, 7, 64, None])
def test_chunks_equal_the_recurrence(chunk):
    for lengths, decay in product(LENGTHS, [1e-3, 0.3, 40.0]):
        tensors = inputs(lengths, decay=decay)
        wanted = results(written_out(tensors, lengths=lengths, scale=0.3), tensors)
        found = results(chunked(tensors, lengths=lengths, scale=0.3, chunk=chunk), tensors)
        assert largest_difference(found, wanted) < 1e-12, (lengths, decay)


@pytest.mark.parametrize(
    ("lengths", "key_size", "want"),
    [([4096], 128, 64), ([4096], 64, 32), ([4096], 32, 16), ([8] * 512, 128, 16)],
)
def test_small_keys_and_short_documents_have_small_chunks(lengths, key_size, want):
    assert choose_chunk(spans_of(lengths), key_size) == want


def test_rows_are_documents_side_by_side_and_the_scale_is_that_of_attention():
    lengths = [5, 3, 8]
    q, k, v, log_decay, beta, _ = inputs(lengths, decay=0.3, rows=2)
    zeros = torch.zeros(3, 4, 8, 5, dtype=torch.float64)
    wanted, _ = written_out((q, k, v, log_decay, beta, zeros), lengths=lengths, scale=8**-0.5)
    found = gated_delta(q, k, v, log_decay=log_decay, beta=beta, spans=spans_of(lengths))
    assert found.shape == v.shape
    assert largest_difference([found], [wanted]) < 1e-12


def test_what_a_strong_decay_leaves_is_as_exact_as_without_one():
    """In fp32 a sum of 40 decays of e^-40 would round the decays after them to 1e-4."""
    lengths = [64]
    tensors = inputs(lengths, decay=0.01, dtype=torch.float32)
    with torch.no_grad():
        tensors[3][0, :40] = -40.0
    exact = [x.double() for x in tensors]
    wanted, _ = written_out(exact, lengths=lengths, scale=1.0)
    found, _ = chunked(tensors, lengths=lengths, scale=1.0, chunk=64)
    assert largest_difference([found.double()], [wanted]) < 2e-6


def test_low_precision_is_summed_in_fp32():
    lengths = [100, 28]
    *tensors, _ = (x.detach() for x in inputs(lengths, decay=0.1, dtype=torch.bfloat16))
    low, exact = (
        gated_delta(*x[:3], log_decay=x[3], beta=x[4], spans=spans_of(lengths))
        for x in (tensors, [y.double() for y in tensors])
    )
    assert low.dtype == torch.bfloat16
    with torch.autocast("cpu", dtype=torch.bfloat16):
        again = gated_delta(
            *tensors[:3], log_decay=tensors[3], beta=tensors[4], spans=spans_of(lengths)
        )
    assert torch.equal(low, again)
    assert largest_difference([low.double()], [exact.bfloat16().double()]) < 2**-7


def test_steps_of_generation_go_on_from_the_state_after_a_prompt():
    lengths = [9, 9]
    q, k, v, log_decay, beta, initial = (x.detach() for x in inputs(lengths, decay=0.3))
    wanted, last = chunked(
        (q, k, v, log_decay, beta, initial), lengths=lengths, scale=None, chunk=64
    )
    rows = [x.view(2, 9, *x.shape[2:]) for x in (q, k, v, log_decay, beta)]
    prompts = (x[:, :6].reshape(1, 12, *x.shape[2:]) for x in rows)
    _, state = chunked([*prompts, initial], lengths=[6, 6], scale=None, chunk=4)
    out = []
    for t in range(6, 9):
        q_, k_, v_, log_decay_, beta_ = (x[:, t] for x in rows)
        step, state = step_gated_delta(q_, k_, v_, log_decay=log_decay_, beta=beta_, state=state)
        out.append(step)
    assert largest_difference([torch.stack(out, 1)], [wanted.view(2, 9, 4, 5)[:, 6:]]) < 1e-12
    assert largest_difference([state], [last]) < 1e-12


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": torch.ones(1, 4, 3, 8)}, r"q and k must be \[B, S, K, D\]"),
        ({"v": torch.ones(1, 4, 3, 5)}, "K a divisor of H"),
        ({"beta": torch.ones(1, 4, 2)}, r"beta \(1, 4, 2\)"),
        ({"spans": spans_of([5])}, "spans have 5 tokens, q has 1 x 4"),
        ({"chunk": 0}, "chunk must be at least 1, got 0"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(change, message):
    tensors = {
        "q": torch.ones(1, 4, 2, 8),
        "k": torch.ones(1, 4, 2, 8),
        "v": torch.ones(1, 4, 4, 5),
        "log_decay": torch.zeros(1, 4, 4),
        "beta": torch.ones(1, 4, 4),
    }
    call = partial(gated_delta, spans=spans_of([4]), **tensors)
    call()
    with pytest.raises(ValueError, match=f"gated_delta: .*{message}"):
        call(**change)


# ----------------------------------------------------------------------------------- convolution


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("lengths", [[1, 5, 0, 3], [9], [1] * 9, [2, 7]])
def test_the_convolution_reads_the_tokens_of_its_document_and_the_halo(width, lengths):
    make = torch.Generator().manual_seed(width)
    normal = partial(torch.randn, generator=make, dtype=torch.float64)
    x, weight = normal(1, 9, 3), normal(3, width)
    bias, halo = normal(3), normal(len(lengths), width - 1, 3)
    tensors = [y.requires_grad_() for y in (x, weight, bias, halo)]
    spans = spans_of(lengths)
    found = [
        causal_conv(x, weight, spans=spans, bias=bias, halo=halo),
        last_inputs(x, spans=spans, count=width - 1, halo=halo),
    ]
    out, tails = [], []
    for document, part in enumerate(x[0].split(lengths)):
        extended = torch.cat([halo[document], part])
        tails.append(extended[len(part) :])
        out += [
            bias + sum(weight[:, j] * extended[t + j] for j in range(width))
            for t in range(len(part))
        ]
    wanted = [torch.stack(out)[None], torch.stack(tails)]
    if width == 1:  # there is no halo, and no gradient of one
        found, wanted, tensors = found[:1], wanted[:1], tensors[:3]
    assert largest_difference(results(found, tensors), results(wanted, tensors)) < 1e-12


def test_without_a_halo_a_document_begins_with_zeros():
    x, weight = torch.ones(1, 4, 1), torch.tensor([[2.0, 1.0]])
    out = causal_conv(x, weight, spans=spans_of([3, 1]))
    assert out.flatten().tolist() == [1.0, 3.0, 3.0, 1.0]


def test_convolutions_that_do_not_fit_are_refused():
    x = torch.ones(1, 4, 3)
    with pytest.raises(ValueError, match=r"weight \[C, W\], got x .1, 4, 3. and weight .2, 4."):
        causal_conv(x, torch.ones(2, 4), spans=spans_of([4]))
    with pytest.raises(ValueError, match="the spans have 5 tokens, x has 1 x 4"):
        causal_conv(x, torch.ones(3, 4), spans=spans_of([5]))
