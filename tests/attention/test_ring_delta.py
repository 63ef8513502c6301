"""The gated delta rule and its convolution around a ring equal those over the whole rows."""

from functools import partial

import attrs
import numpy as np
import pytest
import torch
import torch.distributed as dist

from trainkit.attention.causal_conv import causal_conv
from trainkit.attention.gated_delta import gated_delta
from trainkit.attention.ring_delta import ring_causal_conv, ring_gated_delta
from trainkit.batch import collate_bins
from trainkit.batch.shards import shard_sequence
from trainkit.data import TokenCorpus
from trainkit.mesh import parallel_session
from trainkit.packing import pack_bins
from trainkit.tools.testing import run_ranks
from trainkit.types import Axis, Share, Spans

CASES = {  # lengths of documents before they are padded to 2N, and rows
    "random documents": (1, 40, 2),
    "documents shorter than the kernel": (1, 6, 1),
    "one document": (96, 97, 1),
}


def make_batch(name, multiple_of):
    """Return packed rows with the inputs of a delta layer in `extra`."""
    shortest, longest, rows = CASES[name]
    sizes = np.random.default_rng(rows).integers(shortest, longest, size=200)
    corpus = TokenCorpus(np.zeros(sizes.sum(), np.int64), np.cumsum([0, *sizes]))
    batch = collate_bins(corpus, pack_bins(sizes, 96, multiple_of=multiple_of), range(rows))
    make = torch.Generator().manual_seed(rows)
    shape = batch.input_ids.shape
    extra = {
        name: torch.randn(*shape, *size, generator=make, dtype=torch.float64)
        for name, size in {"qkv": (21,), "gates": (2, 2), "d_out": (2, 5)}.items()
    }
    return attrs.evolve(batch, extra=extra)


WEIGHT = torch.randn(21, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def run_layer(batch, conv, delta):
    """Return the output and the gradients of a convolution and the rule after it."""
    tensors = [x.detach().requires_grad_() for x in (batch["qkv"], batch["gates"], WEIGHT)]
    qkv, gates, weight = tensors
    q, k, v = conv(qkv, weight, spans=batch.spans).split([5, 6, 10], dim=2)
    q = torch.nn.functional.pad(q, (0, 1)).unsqueeze(2)
    k = torch.nn.functional.normalize(k, dim=-1).unsqueeze(2)
    gates = gates.sigmoid()
    out = delta(
        q,
        k,
        v.unflatten(2, (2, 5)),
        log_decay=gates[..., 0].log(),
        beta=gates[..., 1],
        spans=batch.spans,
        chunk=8,
    )
    return [out.detach(), *torch.autograd.grad(out, tensors, batch["d_out"])]


def differences(ranks):
    """Return the largest relative difference of each case from one process."""
    found = {}
    with parallel_session(ring=ranks) as ps:
        shard = partial(shard_sequence, ring=ps.ring.share, ulysses=ps.ulysses.share)
        for name in CASES:
            whole = make_batch(name, multiple_of=2 * ranks)
            *got, d_weight = run_layer(
                shard(whole), ring_causal_conv(ps.ring), ring_gated_delta(ps.ring)
            )
            *wanted, d_weight_ = run_layer(whole, causal_conv, gated_delta)
            dist.all_reduce(d_weight, group=ps.ring.group)
            parts = shard(attrs.evolve(whole, extra=dict(enumerate(wanted)))).extra
            pairs = [*zip(got, parts.values(), strict=True), (d_weight, d_weight_)]
            found[name] = max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_around_a_ring_the_rule_and_the_convolution_are_those_of_one_process(ranks):
    for found in run_ranks(differences, ranks, ranks):
        assert max(found.values()) < 1e-12, found


def count_bytes(ranks):
    """Return the bytes that a rank sends for rows of 48 and of 96 tokens."""
    sent = []
    send = dist.send

    def counting(x, *args, **kwargs):
        sent[-1] += x.numel() * x.element_size()
        send(x, *args, **kwargs)

    dist.send = counting
    try:
        with parallel_session(ring=ranks) as ps:
            for tokens in (48, 96):
                sent.append(0)
                lengths = np.array([tokens // ranks])
                spans = Spans(torch.tensor([0, *lengths]), lengths, lengths.max())
                q, k, v = torch.ones(3, 1, lengths[0], 2, 4, requires_grad=True)
                gates = torch.zeros(1, lengths[0], 2)
                ring_gated_delta(ps.ring)(
                    q, k, v, log_decay=gates, beta=gates, spans=spans
                ).sum().backward()
    finally:
        dist.send = send
    return sent


def test_what_is_sent_does_not_grow_with_the_documents():
    first, last = run_ranks(count_bytes, 2, 2)
    # A rank in the middle of the chain sends two states in forward and two in backward; those at
    # its ends one of each.
    state = 2 * 4 * 4 * 4
    assert first == last == [2 * state] * 2


def test_on_one_rank_each_is_that_of_one_process():
    solo = Axis("solo", Share(0, 1))
    assert ring_gated_delta(solo) is gated_delta
    assert ring_causal_conv(solo) is causal_conv


def test_a_shard_of_an_odd_number_of_tokens_is_refused_before_anything_is_sent():
    axis = Axis("ring", Share(0, 2))
    spans = Spans(torch.tensor([0, 3]), np.array([3]), 3)
    q, k, v = torch.ones(3, 1, 3, 2, 4)
    gates = torch.zeros(1, 3, 2)
    with pytest.raises(ValueError, match=r"ring_gated_delta: .* got spans of 3 tokens; pack with"):
        ring_gated_delta(axis)(q, k, v, log_decay=gates, beta=gates, spans=spans)
    with pytest.raises(ValueError, match=r"ring_causal_conv: .* got spans of 3 tokens; pack with"):
        ring_causal_conv(axis)(torch.ones(1, 3, 2), torch.ones(2, 4), spans=spans)
