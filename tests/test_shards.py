"""Splits of the sequence: each token on one rank, and back in its place."""

from itertools import groupby, pairwise

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import batches

from trainkit.batch import collate_bins, make_padding_batch, make_spans
from trainkit.batch.shards import (
    contiguous_shard,
    shard_batch,
    shard_sequence,
    zigzag_shard,
    zigzag_unshard,
)
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


@pytest.mark.case("S4")
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


DTYPES = [torch.int64, torch.int32, torch.bool, torch.float32, torch.bfloat16, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_compiled_copy_gives_what_an_index_gives(dtype):
    """Tensors out of order, or with a gradient to follow, take an index; all others a copy."""
    bounds, share = np.array([0, 8, 24, 32]), Share(1, 4)
    for shape, dim in [((32,), 0), ((2, 32), 1), ((2, 32, 3), 1), ((3, 2, 32), -1), ((32, 0), 0)]:
        x = (torch.arange(2 * 32 * 3)[: torch.Size(shape).numel()].reshape(shape) % 200).to(dtype)
        index = torch.tensor([1, 6, 10, 11, 20, 21, 25, 30])
        want = x.index_select(dim, index)
        found = zigzag_shard(x, share, dim=dim, cu_seqlens=bounds)
        assert torch.equal(found, want)
        assert found.dtype == dtype
        assert found.is_contiguous()
        out_of_order = x.movedim(dim, 0).contiguous().movedim(0, dim)
        assert torch.equal(zigzag_shard(out_of_order, share, dim=dim, cu_seqlens=bounds), want)


def test_bounds_that_are_wrong_write_nothing_outside():
    from trainkit.batch.shards import _copy_chunks

    memory, x = np.zeros(200, np.int64), np.ones(200, np.int64)
    for bounds in ([0, 80, 12], [0, -8, 12], [0, 12, 8], [4, 12], [0, 8, 8, 12]):
        assert not _copy_chunks(memory[100:106], x[100:112], 12, 1, np.array(bounds), 0, 2)
        assert not memory[:100].any()
        assert not memory[106:].any()


def test_a_shard_shares_no_memory_with_the_whole():
    x = torch.zeros(1, 8, dtype=torch.int64)
    shard = zigzag_shard(x, Share(0, 2), cu_seqlens=np.array([0, 8]))
    shard += 1
    assert x.sum() == 0


def test_splits_pass_gradients():
    for cu_seqlens in (None, [0, 4, 12]):
        x = torch.zeros(1, 12, requires_grad=True)
        zigzag_shard(x, Share(1, 2), cu_seqlens=cu_seqlens).sum().backward()
        assert x.grad.sum() == 6


def test_one_part_is_the_whole_itself():
    x, batch = torch.arange(7).unsqueeze(0), make_padding_batch(1, 7)
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


@pytest.mark.case("S4")
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
def test_spans_of_a_shard_are_the_runs_of_the_spans_of_the_whole(batch, count, zigzag):
    split = zigzag_shard if zigzag else contiguous_shard
    numbers = np.repeat(np.arange(len(batch.spans.lengths)), batch.spans.lengths)
    numbers = torch.from_numpy(numbers).view(batch.input_ids.shape)
    batch = attrs.evolve(batch, extra={"span": numbers})
    for rank in range(count):
        shard = shard_batch(batch, Share(rank, count), split=split)
        runs = [len(list(run)) for row in shard["span"].tolist() for _, run in groupby(row)]
        assert shard.spans.lengths.tolist() == runs
        assert shard.spans.cu_seqlens.tolist() == [0, *np.cumsum(runs)]
        assert shard.spans.cu_seqlens.dtype == torch.int32
        assert shard.spans.max_length == max(runs)


def test_zigzag_over_a_ring_then_slices_over_ulysses_hold_every_token_once():
    batch = make_padding_batch(2, 24)
    batch = attrs.evolve(batch, token_index=torch.arange(48).reshape(2, 24))
    tokens = [
        shard_batch(
            shard_batch(batch, Share(ring, 3)), Share(ulysses, 2), split=contiguous_shard
        ).token_index
        for ring in range(3)
        for ulysses in range(2)
    ]
    assert sorted(torch.cat(tokens).flatten().tolist()) == list(range(48))


@given(batches(multiple_of=12), st.sampled_from([(1, 1), (2, 1), (1, 3), (3, 2), (6, 1), (2, 3)]))
def test_sequence_shards_are_slices_of_zigzag_shards_with_the_spans_of_these(batch, counts):
    batch = with_extra(batch)
    rings, slices = counts
    for ring in (Share(r, rings) for r in range(rings)):
        zigzag = shard_batch(batch, ring)
        if zigzag.input_ids.shape[1] % slices:
            continue
        parts = [shard_sequence(batch, ring=ring, ulysses=Share(u, slices)) for u in range(slices)]
        for name in (*TENSORS, "weights", "routes"):
            assert torch.equal(torch.cat([part[name] for part in parts], 1), zigzag[name]), name
            assert all(part[name].is_contiguous() for part in parts)
        for part in parts:
            assert part.spans.lengths.tolist() == zigzag.spans.lengths.tolist()
            assert part.spans.cu_seqlens.tolist() == zigzag.spans.cu_seqlens.tolist()
            assert part.spans.max_length == zigzag.spans.max_length


def test_two_documents_on_ring_2_x_ulysses_2():
    """The example of DESIGN's table D5: two documents of 8."""
    batch = make_padding_batch(1, 16)
    batch = attrs.evolve(batch, token_index=torch.arange(16)[None])
    batch = attrs.evolve(batch, spans=make_spans(torch.tensor([[0] * 8 + [1] * 8])))
    found = [
        shard_sequence(batch, ring=Share(r, 2), ulysses=Share(u, 2)).token_index[0].tolist()
        for r in range(2)
        for u in range(2)
    ]
    assert found == [[0, 1, 6, 7], [8, 9, 14, 15], [2, 3, 4, 5], [10, 11, 12, 13]]


def test_one_rank_holds_the_batch_itself():
    batch = make_padding_batch(1, 7)
    assert shard_sequence(batch, ring=Share(0, 1), ulysses=Share(0, 1)) is batch


@pytest.mark.case("S3")
@pytest.mark.parametrize(("length", "ring", "ulysses"), [(18, 2, 1), (20, 2, 4), (10, 1, 4)])
def test_rows_that_do_not_divide_are_refused(length, ring, ulysses):
    part = f"a length of {length // ring} does not divide into {ulysses}"
    message = part if ulysses > 1 else f"{length} tokens, no multiple of {2 * ring}"
    with pytest.raises(ValueError, match=message):
        shard_sequence(
            make_padding_batch(1, length), ring=Share(0, ring), ulysses=Share(0, ulysses)
        )


@pytest.mark.case("S3")
def test_documents_that_do_not_divide_are_refused():
    ids = torch.tensor([[0] * 6 + [1] * 10])
    batch = attrs.evolve(make_padding_batch(1, 16), spans=make_spans(ids))
    with pytest.raises(ValueError, match=r"document 0 has 6 tokens, .* multiple_of=4"):
        shard_sequence(batch, ring=Share(0, 2), ulysses=Share(0, 1))
    ulysses_alone = shard_sequence(batch, ring=Share(0, 1), ulysses=Share(1, 2))
    assert ulysses_alone.spans is batch.spans
    with pytest.raises(ValueError, match="no part 2 of 2"):
        shard_sequence(batch, ring=Share(0, 1), ulysses=Share(2, 2))


ELEMENTS = {
    "fp16": torch.arange(16).half(),
    "bf16": torch.arange(16).bfloat16(),
    "float8": torch.arange(16).to(torch.float8_e4m3fn),
    "bool": torch.arange(16) % 3 == 0,
    "complex": torch.arange(16) * 1j,
    "16 bytes": torch.arange(16).to(torch.complex128),
    "a conjugate view": (torch.arange(16) * 1j).conj(),
    "a negative view": (torch.arange(16) * 1j).conj().imag,
}


@pytest.mark.parametrize("name", ELEMENTS)
def test_any_dtype_and_any_view_is_cut_and_joined(name):
    x, bounds = ELEMENTS[name], np.array([0, 4, 16])
    shards = [zigzag_shard(x, Share(rank, 2), dim=0, cu_seqlens=bounds) for rank in (0, 1)]
    expected = x.resolve_conj().resolve_neg()[[0, 3, 4, 5, 6, 13, 14, 15]]
    assert shards[0].dtype == x.dtype
    assert torch.equal(shards[0].to(torch.complex64), expected.to(torch.complex64))
    joined = zigzag_unshard(torch.cat(shards), 2, dim=0, cu_seqlens=bounds)
    assert torch.equal(joined.to(torch.complex64), x.to(torch.complex64))


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
        (lambda: zigzag_shard(X, Share(0, 2), cu_seqlens=np.array([0, 80, 12])), "rise from 0"),
        (lambda: zigzag_shard(X, Share(0, 2), cu_seqlens=np.array([0, 8, 8, 12])), "rise from 0"),
        (lambda: zigzag_shard(X, Share(0, 2), cu_seqlens=np.array([0, 6, 12])), "has 6 tokens"),
        (lambda: zigzag_shard(X, Share(0, 2), cu_seqlens=np.zeros(0, int)), "one dimension"),
        (lambda: zigzag_unshard(X, 2, cu_seqlens=[0, 8]), "zigzag_unshard: cu_seqlens must rise"),
        (lambda: zigzag_shard(X, Share(0, 2), cu_seqlens=torch.ones(1, device="meta")), "on meta"),
        (lambda: zigzag_shard(X, Share(2, 2)), "no part 2 of 2"),
        (lambda: zigzag_unshard(X, 0), "no part 0 of 0"),
        (lambda: zigzag_shard(X, Share(0, 2), dim=2), r"zigzag_shard: .* dimension 2 in \(1, 12\)"),
        (lambda: zigzag_shard(X, Share(0, 1), dim=-3), "zigzag_shard: .* dimension -3"),
        (
            lambda: zigzag_shard(X, Share(0, 2), dim=2, cu_seqlens=np.array([0, 12])),
            "zigzag_shard: .* dimension 2",
        ),
        (lambda: zigzag_unshard(X, 2, dim=2), "zigzag_unshard: .* dimension 2"),
        (lambda: contiguous_shard(X, Share(0, 2), dim=2), "contiguous_shard: .* dimension 2"),
    ],
)
def test_what_does_not_divide_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_spans_across_rows_are_refused():
    batch = make_padding_batch(2, 8)
    wrong = attrs.evolve(batch, spans=make_spans(torch.zeros(1, 16)))
    with pytest.raises(ValueError, match="do not end where the 2 rows of 8 tokens end"):
        shard_batch(wrong, Share(0, 2))


def test_a_batch_packed_without_alignment_is_refused():
    from strategies import corpus_of

    from trainkit.packing import pack_bins

    corpus = corpus_of([3, 5])
    batch = collate_bins(corpus, pack_bins(corpus.lengths, 8), [0])
    with pytest.raises(ValueError, match="pack with multiple_of=4"):
        shard_batch(batch, Share(0, 2))
