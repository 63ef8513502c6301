"""Splits of the sequence: each token on one rank, and back in its place."""

from itertools import groupby, pairwise

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import batches

from trainkit.batch import blank_batch, collate_bins, spans
from trainkit.layout import contiguous_shard, shard_batch, zigzag_shard, zigzag_unshard
from trainkit.types import Share

TENSORS = ("input_ids", "labels", "position_ids", "document_ids", "token_index")


@st.composite
def cut_sequences(draw):
    """(x, dim, N, cu_seqlens or None) where every document divides by 2N."""
    count = draw(st.integers(1, 5))
    sizes = [2 * count * n for n in draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))]
    dim, shape = draw(st.integers(-2, 1)), [2, 3]
    shape[dim] = sum(sizes)
    cu_seqlens = np.concatenate([[0], np.cumsum(sizes)]) if draw(st.booleans()) else None
    return torch.arange(shape[0] * shape[1]).reshape(shape), dim, count, cu_seqlens


@given(cut_sequences())
def test_unshard_undoes_shard(case):
    x, dim, count, cu_seqlens = case
    shards = [
        zigzag_shard(x, Share(rank, count), dim=dim, cu_seqlens=cu_seqlens) for rank in range(count)
    ]
    assert {shard.shape for shard in shards} == {shards[0].shape}
    whole = zigzag_unshard(torch.cat(shards, dim), count, dim=dim, cu_seqlens=cu_seqlens)
    assert torch.equal(whole, x)


@given(cut_sequences())
def test_each_document_gives_a_rank_its_chunks_r_and_2n_1_r(case):
    x, dim, count, cu_seqlens = case
    bounds = [0, x.shape[dim]] if cu_seqlens is None else cu_seqlens.tolist()
    for rank in range(count):
        expected = []
        for begin, end in pairwise(bounds):
            chunks = x.narrow(dim, begin, end - begin).chunk(2 * count, dim)
            expected += [chunks[rank], chunks[2 * count - 1 - rank]]
        shard = zigzag_shard(x, Share(rank, count), dim=dim, cu_seqlens=cu_seqlens)
        assert torch.equal(shard, torch.cat(expected, dim))


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_two_documents_of_twenty_on_two_ranks(kind):
    x = torch.arange(40).unsqueeze(0)
    shard = zigzag_shard(x, Share(0, 2), cu_seqlens=kind([0, 20, 40]))
    assert shard.tolist() == [[*range(5), *range(15, 25), *range(35, 40)]]


def test_splits_pass_gradients():
    for cu_seqlens in (None, [0, 4, 12]):
        x = torch.zeros(1, 12, requires_grad=True)
        zigzag_shard(x, Share(1, 2), cu_seqlens=cu_seqlens).sum().backward()
        assert x.grad.sum() == 6


def test_one_part_is_the_whole_itself():
    x, batch = torch.arange(7).unsqueeze(0), blank_batch(1, 7)
    assert zigzag_shard(x, Share(0, 1)) is x
    assert zigzag_unshard(x, 1) is x
    assert contiguous_shard(x, Share(0, 1)) is x
    assert shard_batch(batch, Share(0, 1)) is batch


def test_contiguous_shards_are_slices():
    x = torch.arange(12).reshape(2, 6)
    parts = [contiguous_shard(x, Share(rank, 3), cu_seqlens=[0, 6]) for rank in range(3)]
    assert torch.equal(torch.cat(parts, 1), x)


def with_extra(batch):
    extra = {
        "weights": batch.token_index.double() / 7,
        "routes": torch.stack([batch.token_index, batch.input_ids], -1),
    }
    return attrs.evolve(batch, extra=extra)


@given(batches(multiple_of=12), st.sampled_from([2, 3, 6]), st.booleans())
def test_all_of_a_batch_travels_together(batch, count, zigzag):
    batch, split = with_extra(batch), zigzag_shard if zigzag else contiguous_shard
    shards = [shard_batch(batch, Share(rank, count), split=split) for rank in range(count)]
    rows = torch.arange(batch.input_ids.shape[0]).unsqueeze(1) * batch.input_ids.shape[1]
    for shard in shards:
        # In the whole batch, where is each token of the shard? Its own document and position say.
        document = batch.document_ids.unsqueeze(1) == shard.document_ids.unsqueeze(2)
        position = batch.position_ids.unsqueeze(1) == shard.position_ids.unsqueeze(2)
        assert ((document & position).sum(2) == 1).all()
        place = (document & position).int().argmax(2)
        for name in (*TENSORS, "weights", "routes"):
            assert torch.equal(batch[name].flatten(0, 1)[rows + place], shard[name]), name
    got = torch.cat([shard.position_ids + 1000 * shard.document_ids for shard in shards], 1)
    want = batch.position_ids + 1000 * batch.document_ids
    assert torch.equal(got.sort(1).values, want.sort(1).values)


@given(batches(multiple_of=12), st.sampled_from([2, 3, 6]), st.booleans())
def test_spans_of_a_shard_are_the_runs_of_its_documents(batch, count, zigzag):
    split = zigzag_shard if zigzag else contiguous_shard
    for rank in range(count):
        shard = shard_batch(batch, Share(rank, count), split=split)
        runs = [len(list(run)) for row in shard.document_ids.tolist() for _, run in groupby(row)]
        assert shard.spans.lengths.tolist() == runs
        assert shard.spans.cu_seqlens.tolist() == [0, *np.cumsum(runs)]
        assert shard.spans.cu_seqlens.dtype == torch.int32
        assert shard.spans.max_length == max(runs)


def test_zigzag_over_a_ring_then_slices_over_ulysses_hold_every_token_once():
    batch = blank_batch(2, 24)
    batch = attrs.evolve(batch, token_index=torch.arange(48).reshape(2, 24))
    tokens = [
        shard_batch(
            shard_batch(batch, Share(ring, 3)), Share(ulysses, 2), split=contiguous_shard
        ).token_index
        for ring in range(3)
        for ulysses in range(2)
    ]
    assert sorted(torch.cat(tokens).flatten().tolist()) == list(range(48))


X = torch.arange(12).unsqueeze(0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: zigzag_shard(X[:, :10], Share(0, 2)), "length of 10 .* 4 parts.*multiple of 4"),
        (lambda: zigzag_unshard(X[:, :10], 2), "length of 10 .* 4 parts.*multiple of 4"),
        (lambda: contiguous_shard(X[:, :10], Share(0, 3)), "length of 10 .* 3 parts"),
        (
            lambda: zigzag_shard(X, Share(0, 2), cu_seqlens=[0, 4, 10, 12]),
            "document 1 has 6 tokens",
        ),
        (lambda: zigzag_shard(X, Share(0, 2), cu_seqlens=[4, 12]), "rise from 0 to the length, 12"),
        (lambda: zigzag_shard(X, Share(0, 2), cu_seqlens=[0, 8]), "rise from 0 to the length, 12"),
        (lambda: zigzag_shard(X, Share(0, 2), cu_seqlens=[0, 8, 4, 12]), "rise from 0"),
        (lambda: zigzag_shard(X, Share(0, 2), cu_seqlens=[0.0, 12.0]), "integers in one dimension"),
        (lambda: zigzag_unshard(X, 2, cu_seqlens=[0, 8]), "zigzag_unshard: cu_seqlens must rise"),
        (lambda: zigzag_shard(X, Share(0, 2), cu_seqlens=torch.ones(1, device="meta")), "on meta"),
        (lambda: zigzag_shard(X, Share(2, 2)), "no part 2 of 2"),
        (lambda: zigzag_unshard(X, 0), "no part 0 of 0"),
    ],
)
def test_what_does_not_divide_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_spans_across_rows_are_refused():
    batch = blank_batch(2, 8)
    wrong = attrs.evolve(batch, spans=spans(torch.zeros(1, 16)))
    with pytest.raises(ValueError, match="do not end where the 2 rows of 8 tokens end"):
        shard_batch(wrong, Share(0, 2))


def test_a_batch_packed_without_alignment_is_refused():
    from strategies import corpus_of

    from trainkit.packing import pack_bins

    corpus = corpus_of([3, 5])
    batch = collate_bins(corpus, pack_bins(corpus.lengths, 8), [0])
    with pytest.raises(ValueError, match="pack with multiple_of=4"):
        shard_batch(batch, Share(0, 2))
