"""From rows to tensors: every token with its label, its position, its document and its index."""

from functools import partial
from itertools import groupby, pairwise

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from operators import OperatorMode, move
from strategies import batches, corpus_of, packed
from torch._dynamo import lookup_backend

from trainkit.attention import sdpa
from trainkit.batch import (
    Along,
    batch_from_rows,
    batch_hash,
    collate_bins,
    contiguous_shard,
    count_documents,
    count_tokens,
    count_valid_tokens,
    find_padding_rows,
    make_padding_batch,
    make_spans,
    pad_stack,
    pooling_mask,
    shard_batch,
    shard_tree,
    shift_labels,
    shift_tokens,
    spans_from_rows,
    split_batch,
    to_device,
    unshard_tree,
)
from trainkit.batch.batches import map_tensors
from trainkit.batch.shards import shard_sequence
from trainkit.data.concat import concat_corpora
from trainkit.data.corpus import TokenCorpus
from trainkit.noise.hashing import GOLDEN, make_key, mix_bits
from trainkit.packing import pack_bins
from trainkit.tools.testing.distribute_batch import distribute_batch
from trainkit.types import IGNORED_LABEL, Bins, DataError, DataShard, Share, Spans

TENSORS = ("input_ids", "labels", "position_ids", "document_ids", "token_index")


def plain_row(corpus, pieces, capacity, multiple_of):
    """Write a row out token by token: lists of ids, labels, positions, documents."""
    ids, labels, positions, documents = [], [], [], []
    for number, (document, start, length) in enumerate(pieces):
        tokens = corpus.tokens[corpus.offsets[document] + start :][:length].tolist()
        padding = -length % multiple_of
        ids += tokens + [999] * padding
        labels += tokens[1:] + [IGNORED_LABEL] * (1 + padding)
        positions += range(length + padding)
        documents += [number] * length + [-2 - number] * padding
    rest = capacity - len(ids)
    return (
        ids + [999] * rest,
        labels + [IGNORED_LABEL] * rest,
        positions + list(range(rest)),
        documents + [-1] * rest,
    )


@given(packed(), st.data())
def test_rows_are_what_they_are_token_by_token(case, data):
    corpus, bins = case
    rows = data.draw(st.lists(st.integers(-1, len(bins) - 1), min_size=1, max_size=4))
    places = [number if row >= 0 else -1 for number, row in enumerate(rows)]
    batch = collate_bins(corpus, bins, rows, pad_id=999, row_positions=places)
    pieces = [bins[row] if row >= 0 else [] for row in rows]
    plain = [plain_row(corpus, part, bins.capacity, bins.multiple_of) for part in pieces]
    for name, column in zip(TENSORS, zip(*plain, strict=True), strict=False):
        assert batch[name].dtype == torch.int64
        assert batch[name].tolist() == list(column), name
    index = np.arange(len(rows) * bins.capacity).reshape(len(rows), -1)
    index[np.array(rows) < 0] = -1
    assert batch.token_index.tolist() == index.tolist()


@given(packed(), st.integers(0, 2**32 - 1))
def test_a_label_asks_for_trained_tokens_only(case, seed):
    corpus, bins = case
    trained = np.random.default_rng(seed).integers(0, 2, len(corpus.tokens)).astype(bool)
    rows = np.arange(len(bins))
    plain = collate_bins(corpus, bins, rows, pad_id=999)
    for mask in (trained, trained.astype(np.uint8)):
        batch = collate_bins(attrs.evolve(corpus, loss_mask=mask), bins, rows, pad_id=999)
        for row in rows.tolist():
            want = plain.labels[row].tolist()
            for number, (document, start, length) in enumerate(bins[row]):
                begin = plain.document_ids[row].tolist().index(number)
                first = int(corpus.offsets[document]) + start
                for i in range(length - 1):
                    if not trained[first + i + 1]:
                        want[begin + i] = IGNORED_LABEL
            assert batch.labels[row].tolist() == want
        for name in set(TENSORS) - {"labels"}:
            assert torch.equal(batch[name], plain[name]), name


def test_a_corpus_of_which_nothing_is_trained_has_no_labels():
    corpus = attrs.evolve(corpus_of([3, 5]), loss_mask=np.zeros(8, bool))
    batch = collate_bins(corpus, pack_bins(corpus.lengths, 8), [0])
    assert int(count_valid_tokens([batch])) == 0
    assert batch.input_ids[0].tolist() == list(range(8))


@given(packed(), st.data())
def test_documents_in_parts_collate_as_documents_in_one(case, data):
    corpus, bins = case
    trained = (np.arange(len(corpus.tokens)) % 3 > 0).astype(np.uint8)
    corpus = attrs.evolve(corpus, loss_mask=trained)
    num_documents = len(corpus.offsets) - 1
    inner = st.lists(st.integers(0, num_documents), max_size=4)
    cuts = [0, *sorted(data.draw(inner)), num_documents]
    parts = []
    for first, end in pairwise(cuts):  # every other part begins inside its own array of tokens
        begin = corpus.offsets[first] if len(parts) % 2 else 0
        span = slice(begin, corpus.offsets[end])
        dtype = (np.uint16, np.uint32)[len(parts) // 2 % 2]
        offsets = corpus.offsets[first : end + 1] - begin
        parts.append(
            TokenCorpus(corpus.tokens[span].astype(dtype), offsets, 1000, loss_mask=trained[span])
        )
    rows = [*range(len(bins)), -1]
    whole = collate_bins(corpus, bins, rows, pad_id=999, row_positions=rows)
    joined = collate_bins(concat_corpora(parts), bins, rows, pad_id=999, row_positions=rows)
    for name in TENSORS:
        assert torch.equal(joined[name], whole[name]), name


# numba compiles the collation of each dtype for a second
ALL = pytest.mark.only_all
OTHERS = [pytest.param(name, marks=ALL) for name in ("uint8", "uint32", "int16", "int64")]


@pytest.mark.parametrize("dtype", ["uint16", "uint64", *OTHERS])
def test_tokens_of_every_dtype_give_the_same_batch(dtype):
    corpus = corpus_of([5, 9, 2], vocab_size=100)
    bins = pack_bins(corpus.lengths, 8)
    want = collate_bins(corpus, bins, [0, 1])
    tokens = corpus.tokens.astype(dtype)
    strided = [] if dtype == "uint64" else [np.ascontiguousarray(tokens[::-1])[::-1]]
    read_only = tokens.copy()
    read_only.setflags(write=False)
    for same in (tokens, read_only, *strided):
        batch = collate_bins(attrs.evolve(corpus, tokens=same), bins, [0, 1])
        for name in TENSORS:
            assert torch.equal(batch[name], want[name]), name


def test_tables_that_are_read_only_give_the_same_batch():
    corpus = corpus_of([5, 9, 2])
    bins = pack_bins(corpus.lengths, 8)
    want = collate_bins(corpus, bins, [0])
    for array in (bins.offsets, bins.documents, bins.starts, bins.lengths, corpus.offsets):
        array.setflags(write=False)
    assert torch.equal(collate_bins(corpus, bins, [0]).labels, want.labels)


@given(packed(), st.integers(1, 3), st.integers(1, 3))
def test_a_split_batch_is_its_parts_collated_alone(case, size, count):
    corpus, bins = case
    rows = np.resize(np.append(np.arange(len(bins)), -1), size * count)
    places = np.where(rows < 0, -1, np.arange(len(rows)))
    whole = collate_bins(corpus, bins, rows, row_positions=places)
    whole = attrs.evolve(whole, extra={"weights": torch.rand(len(rows), bins.capacity)})
    parts = split_batch(whole, size)
    assert len(parts) == count
    for number, part in enumerate(parts):
        chosen = slice(number * size, (number + 1) * size)
        alone = collate_bins(corpus, bins, rows[chosen], row_positions=places[chosen])
        for name in TENSORS:
            assert torch.equal(part[name], alone[name]), name
            assert part[name].is_contiguous()
        assert torch.equal(part["weights"], whole["weights"][chosen])
        assert part.spans.lengths.tolist() == alone.spans.lengths.tolist()
        assert torch.equal(part.spans.cu_seqlens, alone.spans.cu_seqlens)
        assert part.spans.cu_seqlens.dtype == torch.int32
        assert part.spans.max_length == alone.spans.max_length


def piece_of(number):
    """Return the piece that a place belongs to, -1 for the padding of a row."""
    return -2 - number if number < -1 else number


@given(batches())
def test_spans_are_the_documents_of_the_flattened_rows(batch):
    rows = batch.document_ids.tolist()
    runs = [len(list(run)) for row in rows for _, run in groupby(map(piece_of, row))]
    assert batch.spans.lengths.tolist() == make_spans(batch.document_ids).lengths.tolist() == runs
    assert batch.spans.cu_seqlens.tolist() == [0, *np.cumsum(runs)]
    assert (batch.spans.cu_seqlens.dtype, batch.spans.lengths.dtype) == (torch.int32, np.int64)
    assert batch.spans.max_length == max(runs)


@pytest.mark.case("S6")
@given(batches())
def test_labels_never_cross_a_document_boundary(batch):
    trained = batch.labels != IGNORED_LABEL
    row, column = torch.nonzero(trained, as_tuple=True)
    assert (column + 1 < batch.labels.shape[1]).all()
    assert (batch.document_ids[row, column] >= 0).all()
    assert torch.equal(batch.document_ids[row, column], batch.document_ids[row, column + 1])
    assert torch.equal(batch.labels[row, column], batch.input_ids[row, column + 1])


@given(batches())
def test_collation_shifts_as_shift_labels_does(batch):
    assert torch.equal(batch.labels, shift_labels(batch.input_ids, batch.document_ids))


@given(st.lists(st.lists(st.integers(-1, 2), min_size=6, max_size=6), min_size=1, max_size=3))
def test_shift_labels_gives_the_next_token_of_the_same_document(ids):
    documents = torch.tensor(ids)
    tokens = torch.arange(documents.numel()).reshape(documents.shape)
    labels = shift_labels(tokens, documents).tolist()
    for row, line in enumerate(ids):
        for i, document in enumerate(line):
            goes_on = i + 1 < len(line) and line[i + 1] == document and document != -1
            assert labels[row][i] == (int(tokens[row, i]) + 1 if goes_on else IGNORED_LABEL)


@given(batches(multiple_of=1, blanks=False))
def test_rows_packed_elsewhere_become_the_batch_that_collation_makes(batch):
    of_rows = partial(batch_from_rows, batch.input_ids, padding=batch.document_ids < 0)
    for of_documents in (
        partial(of_rows, starts=batch.position_ids == 0),
        partial(of_rows, position_ids=batch.position_ids),
    ):
        assert torch.equal(of_documents(labels=batch.labels).labels, batch.labels)
        found = of_documents()
        for name in TENSORS:
            assert torch.equal(found[name], batch[name]), name
        assert torch.equal(found.spans.cu_seqlens, batch.spans.cu_seqlens)
        assert found.spans.max_length == batch.spans.max_length


def test_rows_packed_elsewhere_say_what_is_wrong_with_them():
    ids = torch.arange(6).view(2, 3)
    assert batch_from_rows(ids, first_row=4).token_index.tolist() == [[12, 13, 14], [15, 16, 17]]
    assert batch_from_rows(ids, extra={"weights": ids})["weights"] is ids
    with pytest.raises(ValueError, match="batch_from_rows: starts must be"):
        batch_from_rows(ids, starts=ids)
    with pytest.raises(ValueError, match="batch_from_rows: padding must be"):
        batch_from_rows(ids, padding=ids[:1] > 0)
    with pytest.raises(ValueError, match="batch_from_rows: labels must be"):
        batch_from_rows(ids, labels=ids.int())
    with pytest.raises(ValueError, match="not both"):
        batch_from_rows(ids, starts=ids > 0, position_ids=ids)
    with pytest.raises(ValueError, match="input_ids must be"):
        batch_from_rows(ids[0])


def test_row_positions_say_where_a_row_is_in_the_global_step():
    corpus = corpus_of([4, 4, 4])
    bins = pack_bins(corpus.lengths, 4)
    batch = collate_bins(corpus, bins, [2, 0, -1], row_positions=[5, 1, -1])
    assert batch.token_index.tolist() == [[20, 21, 22, 23], [4, 5, 6, 7], [-1, -1, -1, -1]]


def test_a_blank_row_is_a_blank_batch():
    corpus = corpus_of([4])
    bins, none = pack_bins(corpus.lengths, 4), [-1, -1]
    collated = collate_bins(corpus, bins, none, pad_id=7, row_positions=none)
    blank = make_padding_batch(2, 4, pad_id=7)
    for name in TENSORS:
        assert torch.equal(collated[name], blank[name]), name
    assert collated.spans.cu_seqlens.tolist() == blank.spans.cu_seqlens.tolist() == [0, 4, 8]


def test_plain_rows_are_seen_whole_and_blank_ones_can_be_told_from_them():
    """From token 96 on a blank batch's spans hide what stands before: they are those of padding."""
    rows, length = 2, 200
    plain, blank = spans_from_rows(rows, length), make_padding_batch(rows, length)
    assert plain.lengths.tolist() == [length] * rows
    assert plain.cu_seqlens.dtype == torch.int32
    assert plain.max_length == length
    ours = batch_from_rows(torch.zeros(rows, length, dtype=torch.int64))
    assert torch.equal(plain.cu_seqlens, ours.spans.cu_seqlens)
    draw = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, rows, length, 2, 8, generator=draw, dtype=torch.float64)
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    want = torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=True)
    far = [
        (sdpa(q, k, v, spans=x) - want.transpose(1, 2)).abs().amax() for x in (plain, blank.spans)
    ]
    assert far[0] < 1e-12
    assert far[1] > 0.1
    assert find_padding_rows(blank).all()
    assert not find_padding_rows(ours).any()
    mixed = corpus_of([150])
    bins = pack_bins(mixed.lengths, length)
    assert find_padding_rows(
        collate_bins(mixed, bins, [0, -1], row_positions=[0, -1])
    ).tolist() == [
        False,
        True,
    ]
    assert find_padding_rows(shard_batch(blank, Share(1, 2), split=contiguous_shard)).all()
    for bad in ((0, 4), (4, 0), (1 << 16, 1 << 16)):
        with pytest.raises(ValueError, match=r"spans_from_rows: .* got"):
            spans_from_rows(*bad)


def halves_and_longest(batch):
    """Read a batch and its spans, and make others of them, as a compiled function of a user may."""
    first, second = split_batch(batch, 1)
    moved = attrs.evolve(second, input_ids=second.input_ids + 1)
    document = torch.bucketize(torch.arange(64), first.spans.cu_seqlens[1:], right=True)
    total = (document * first["input_ids"].flatten()).sum() + moved["input_ids"].sum()
    return total * batch.spans.max_length + count_valid_tokens([first, moved])


def test_a_compiled_function_reads_and_makes_batches_and_is_not_compiled_for_each():
    compiled, random = [], np.random.default_rng(0)

    def backend(module, inputs):
        compiled.append(module)
        return lookup_backend("aot_eager")(module, inputs)

    run = torch.compile(halves_and_longest, backend=backend, fullgraph=True)
    for _ in range(8):
        corpus = corpus_of(random.integers(3, 20, size=30).tolist())
        batch = collate_bins(corpus, pack_bins(corpus.lengths, 64), [0, 1])
        assert run(batch) == halves_and_longest(batch)
    assert len(compiled) <= 3, "once, and for sizes that change"
    torch._dynamo.reset()


@given(packed(), st.integers(1, 5))
def test_valid_tokens_and_hashes_add_over_any_cut_into_microbatches(case, size):
    corpus, bins = case
    rows = np.arange(len(bins))
    whole = collate_bins(corpus, bins, rows)
    padded = np.append(rows, np.full(-len(rows) % size, -1))
    parts = [
        collate_bins(corpus, bins, part, row_positions=part) for part in padded.reshape(-1, size)
    ]
    assert count_valid_tokens(parts) == count_valid_tokens([whole])
    assert count_tokens(parts) == count_tokens([whole]) == bins.lengths.sum()
    assert batch_hash(parts) == batch_hash([whole])
    assert batch_hash(parts[::-1]) == batch_hash([whole])
    assert batch_hash(parts[:1]) + sum(batch_hash([part]) for part in parts[1:]) == batch_hash(
        parts
    )


def test_valid_tokens_are_the_tokens_that_have_a_successor_in_their_piece():
    corpus = corpus_of([3, 5, 1])
    batch = collate_bins(corpus, pack_bins(corpus.lengths, 12), [0])
    count = count_valid_tokens([batch, {"labels": batch.labels}])
    assert (count.dtype, count.shape, int(count)) == (torch.int64, (), 12)


@pytest.mark.parametrize("name", ["input_ids", "labels", "position_ids", "token_index"])
def test_the_hash_sees_one_changed_value_of_every_field(name):
    corpus = corpus_of([8])
    batch = collate_bins(corpus, pack_bins(corpus.lengths, 8), [0])
    before = batch_hash([batch])
    batch[name][0, 3] += 1
    assert batch_hash([batch]) != before


@pytest.mark.parametrize("ring", [1, 3])
def test_padding_is_short_spans_wherever_it_comes_from(ring):
    """Attention costs the squares of spans: 3 tokens in a row of 3,072 must not cost 3,072^2."""
    corpus, solo, multiple_of = corpus_of([3]), Share(0, 1), 2 * ring
    bins = pack_bins(corpus.lengths, 3072, multiple_of=multiple_of)
    row, filled = (collate_bins(corpus, bins, x, row_positions=x) for x in ([0], [0, -1]))
    [microbatch] = distribute_batch(row, DataShard(), rows_per_microbatch=2)
    whole = [row, filled, microbatch, make_padding_batch(2, 3072, multiple_of=multiple_of)]
    for batch in [*whole, *(shard_sequence(x, ring=Share(0, ring), ulysses=solo) for x in whole)]:
        lengths = batch.spans.lengths
        assert lengths.sum() == batch.input_ids.numel()
        assert (lengths**2).sum() <= 96 * lengths.sum()
        assert not (lengths % 2).any()
        assert batch.spans.max_length == lengths.max()
        assert batch.spans.cu_seqlens.tolist() == [0, *np.cumsum(lengths)]
    again = make_spans(filled.document_ids, multiple_of=multiple_of)
    assert again.lengths.tolist() == filled.spans.lengths.tolist()


def test_short_spans_of_padding_change_no_token():
    batch = collate_bins(corpus_of([300]), pack_bins([300], 1024), [0])
    make = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 1024, 2, 8, generator=make)
    long = Spans(torch.tensor([0, 300, 1024], dtype=torch.int32), np.array([300, 724]), 724)
    found, whole = (sdpa(q, k, v, spans=spans_) for spans_ in (batch.spans, long))
    assert torch.equal(found[:, :300], whole[:, :300])
    assert torch.equal(found, sdpa(q, k, v, spans=batch.spans))
    assert found.isfinite().all()


def test_the_hash_leaves_out_padding_but_not_swapped_tokens():
    corpus = corpus_of([5, 6])
    bins = pack_bins(corpus.lengths, 8)
    one, two = (collate_bins(corpus, bins, [0, 1], pad_id=pad_id) for pad_id in (0, 1))
    swapped = collate_bins(corpus, bins, [1, 0])
    assert batch_hash([one]) == batch_hash([two])
    assert batch_hash([one]) != batch_hash([swapped])
    assert batch_hash([one]).dtype == torch.int64


def hash_by_hand(batch, columns):
    """Return the hash of a batch modulo 2^64, one number after another."""
    total, kept = 0, (batch.document_ids != -1).flatten().tolist()
    index = batch.token_index.flatten().tolist()
    fields = {name: (make_key(name), batch[name]) for name in ("input_ids", "labels")}
    fields["position_ids"] = make_key("position_ids"), batch.position_ids
    for name, bits in columns.items():
        fields[name] = make_key("column", name, bits.shape[2]), bits
    with np.errstate(over="ignore"):
        for key, values in fields.values():
            rows = values.reshape(len(kept), -1).tolist()
            for place, row, is_kept in zip(index, rows, kept, strict=True):
                for i, value in enumerate(row):
                    where = (place * len(row) + i) * GOLDEN + key
                    inner = int(mix_bits(np.uint64(where % 2**64)))
                    total += is_kept * int(mix_bits(np.uint64((inner + value) % 2**64)))
    return total % 2**64


def test_the_hash_is_the_same_on_a_device_and_for_columns_and_by_hand():
    corpus = corpus_of([5, 6, 2])
    bins = pack_bins(corpus.lengths, 8)
    batch = collate_bins(corpus, bins, [0, 1, -1], row_positions=[3, 2, -1])
    pairs = torch.arange(3 * 8 * 2).view(3, 8, 2) - 7
    weights = torch.linspace(-1, 1, 24).view(3, 8)
    batch = attrs.evolve(batch, extra={"pairs": pairs, "weights": weights})
    bits = {"pairs": pairs, "weights": weights.view(torch.int32).unsqueeze(2)}
    expected = hash_by_hand(batch, bits)
    for cut in (batch, map_tensors(batch, move)):
        parts = split_batch(cut, 1)
        assert int(batch_hash([cut])) % 2**64 == int(batch_hash(parts)) % 2**64 == expected
        # A microbatch of padding has no columns.
        assert int(batch_hash([*parts, make_padding_batch(1, 8)])) % 2**64 == expected


def test_launches_do_not_grow_with_the_number_of_microbatches():
    """A step of 16 microbatches would else launch 1,000 kernels on a device for its hash."""
    whole = map_tensors(make_padding_batch(16, 8), move)
    found = []
    for parts in ([whole], split_batch(whole, 1)):
        operators = []
        with OperatorMode(lambda operator, _, seen=operators: seen.append(str(operator))):
            batch_hash(parts)
            count_tokens(parts)
            count_documents(parts)
        views = {"aten.view.default", "aten._unsafe_view.default", "aten.alias.default"}
        found.append([x for x in operators if x not in views and "cat" not in x])
    assert found[0] == found[1]
    assert len(found[0]) < 50


def test_what_runs_in_a_step_reads_nothing_back_from_the_device():
    # On the meta device there are no values: whoever reads one raises.
    batch = to_device(make_padding_batch(2, 4), "meta")
    assert batch.spans.cu_seqlens.device.type == "meta"
    assert count_valid_tokens([batch]).device.type == "meta"
    assert count_tokens([batch]).device.type == "meta"
    assert batch_hash([batch, batch]).device.type == "meta"
    assert shift_labels(batch.input_ids, batch.document_ids).device.type == "meta"


def test_to_device_moves_everything_or_nothing():
    batch = attrs.evolve(make_padding_batch(1, 4), extra={"weights": torch.ones(1, 4)})
    assert to_device(batch, "cpu") is batch
    moved = to_device(batch, "meta")
    devices = {moved[name].device.type for name in (*TENSORS, "weights")}
    assert devices | {moved.spans.cu_seqlens.device.type} == {"meta"}
    assert moved.spans.lengths is batch.spans.lengths


CORPUS = corpus_of([3, 3])
BINS = pack_bins(CORPUS.lengths, 4)
NAMED = TokenCorpus(
    np.array([1, 2, 3, 4, 5, 6, 70_000, 8]),
    np.array([0, 4, 8]),
    50_000,
    names=["a.md", "b.md"],
    sources={"part.tokens": "00"},
)


def of_tokens(tokens, **changes):
    """Collate one row of one document of these tokens."""
    corpus = TokenCorpus(tokens, np.array([0, 3]), **changes)
    return collate_bins(corpus, pack_bins([3], 4), [0])


@pytest.mark.case("D2")
def test_a_token_outside_the_vocabulary_is_named_with_file_document_and_offset():
    message = r"file part.tokens: document 1 \(b.md\), offset 2: token 70000 .* \[0, 50000\)"
    bins = pack_bins([4, 4], 8)
    with pytest.raises(DataError, match=message) as caught:
        collate_bins(NAMED, bins, [0])
    assert (caught.value.code, caught.value.got, caught.value.want) == (65, 70_000, 50_000)
    joined = concat_corpora([corpus_of([6]), NAMED])
    with pytest.raises(DataError, match=message):
        collate_bins(joined, pack_bins(joined.lengths, 16), [0])
    other = attrs.evolve(bins, starts=bins.starts, lengths=np.array([4, 2]))
    assert collate_bins(NAMED, other, [0]).input_ids.max() == 6  # what is not read is not looked at


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.int32, np.int64])
@pytest.mark.parametrize("vocab_size", [None, 100])
def test_a_negative_token_is_refused(dtype, vocab_size):
    with pytest.raises(DataError, match="a corpus without a file: document 0, offset 1: token -2 "):
        of_tokens(np.array([1, -2, 3], dtype), vocab_size=vocab_size)


def test_the_largest_token_of_a_vocabulary_is_no_error():
    assert of_tokens(np.array([0, 255, 1], np.uint8), vocab_size=256).input_ids[0, 1] == 255
    assert of_tokens(np.array([0, 9, 1], np.int64), vocab_size=10).input_ids[0, 1] == 9
    with pytest.raises(DataError, match="token 9 is outside"):
        of_tokens(np.array([0, 9, 1], np.uint8), vocab_size=9)


@pytest.mark.parametrize(
    "bins",  # as no packing makes them
    [
        attrs.evolve(BINS, documents=np.array([0, -1])),
        attrs.evolve(BINS, documents=np.array([0, -2])),
        attrs.evolve(BINS, documents=np.array([0, 2])),
        attrs.evolve(BINS, documents=np.array([0, 1 << 40])),
        attrs.evolve(BINS, starts=np.array([0, -3])),
        attrs.evolve(BINS, starts=np.array([0, 1])),
        attrs.evolve(BINS, lengths=np.array([3, 0])),
        attrs.evolve(BINS, lengths=np.array([3, -1])),
        attrs.evolve(BINS, offsets=np.array([0, 0, 2])),
        attrs.evolve(BINS, offsets=np.array([0, 1, 3])),
        attrs.evolve(BINS, offsets=np.array([0, 1, 1 << 40])),
        attrs.evolve(BINS, offsets=np.array([0, 2, 1])),
        attrs.evolve(BINS, offsets=np.array([0, -1, 2])),
    ],
)
def test_a_table_that_would_leave_its_arrays_is_refused(bins):
    with pytest.raises(ValueError, match=r"do not fit the corpus|row 1 of bins"):
        collate_bins(CORPUS, bins, [1])


def test_offsets_beyond_the_tokens_are_refused():
    short = attrs.evolve(CORPUS, tokens=CORPUS.tokens[:5])
    with pytest.raises(ValueError, match="fewer tokens than its offsets say"):
        collate_bins(short, BINS, [0, 1])
    with pytest.raises(DataError, match="its 5 tokens are fewer than its offsets say"):
        collate_bins(concat_corpora([CORPUS, short]), pack_bins([3] * 4, 4), [0, 1, 2, 3])


def test_blank_rows_need_no_tokens():
    empty = TokenCorpus(np.empty(0, np.uint16), np.array([0]))
    batch = collate_bins(empty, pack_bins([], 4), [-1], pad_id=3, row_positions=[-1])
    assert batch.input_ids.tolist() == [[3, 3, 3, 3]]


@pytest.mark.case("S7")
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: collate_bins(CORPUS, BINS, [0, 2, -2]), r"no rows \[2, -2\]: bins has 2"),
        (lambda: collate_bins(CORPUS, BINS, [-1]), r"no rows \[-1\]: .* padding row has -1 both"),
        (lambda: collate_bins(CORPUS, BINS, [-1], row_positions=[0]), r"no rows \[-1\]"),
        (lambda: collate_bins(CORPUS, BINS, [0], row_positions=[-1]), r"no rows \[0\]"),
        (lambda: collate_bins(CORPUS, BINS, [-1], row_positions=[-2]), r"got \[-2\] there"),
        (lambda: collate_bins(CORPUS, BINS, []), "at least one integer"),
        (lambda: collate_bins(CORPUS, BINS, [0.5]), "indices must be integers, got float64"),
        (lambda: collate_bins(CORPUS, BINS, [[0], [0, 1]]), "indices must be .* ragged"),
        (lambda: collate_bins(CORPUS, BINS, [[0]]), r"one dimension, got int64 \(1, 1\)"),
        (lambda: collate_bins(CORPUS, BINS, [0], row_positions=[0, 1]), "row_positions must be"),
        (lambda: collate_bins(CORPUS, BINS, [0], row_positions=[0.5]), "row_positions .*float64"),
        (lambda: of_tokens(np.ones(3)), "tokens must be integers .* got float64"),
        (lambda: of_tokens(np.ones((3, 1), int)), r"tokens must be integers .* \(3, 1\)"),
        (lambda: of_tokens(np.ones(3, ">u2")), "machine's byte order"),
        (
            lambda: of_tokens(np.ones(3, int), loss_mask=np.ones(2, bool)),
            r"loss_mask .* \(2,\)",
        ),
        (lambda: of_tokens(np.ones(3, int), loss_mask=np.ones(3)), "loss_mask .* got float64"),
        (lambda: split_batch(make_padding_batch(3, 2), 2), "3 rows do not divide into parts of 2"),
        (lambda: split_batch(make_padding_batch(3, 2), 0), "parts of 0"),
        (lambda: collate_bins(corpus_of([3]), BINS, [0, 1]), "do not fit the corpus"),
        (lambda: collate_bins(corpus_of([3, 2]), BINS, [0, 1]), "3 tokens of document 1 from 0"),
        (
            lambda: collate_bins(CORPUS, attrs.evolve(BINS, capacity=1 << 30), [0, 1]),
            "too many for int32",
        ),
        (lambda: make_padding_batch(0, 4), "at least 1, got 0 and 4"),
        (lambda: shift_labels(torch.ones(1, 2), torch.ones(1, 3)), r"one shape \[B, S\]"),
        (lambda: make_spans(torch.ones(1, 2, device="meta")), "on the host, got .* on meta"),
        (lambda: count_valid_tokens([]), "at least one batch, got none"),
        (lambda: count_valid_tokens(make_padding_batch(1, 2)), "got one batch"),
        (lambda: batch_hash([]), "at least one batch, got none"),
    ],
)
def test_bad_arguments_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_bins_read_back_as_pieces():
    assert isinstance(BINS, Bins)
    assert BINS[0] == BINS[-2] == [(0, 0, 3)]
    with pytest.raises(IndexError, match="row 2 of 2"):
        BINS[2]


# ---------------------------------------------------------------------- samples from elsewhere


TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=9)  # few, so that neighbours repeat


@given(TOKENS, st.data())
def test_a_sample_is_shifted_once_with_all_that_belongs_to_its_targets(ids, data):
    tokens = torch.tensor(ids)
    trained = torch.tensor(data.draw(st.lists(st.booleans(), min_size=len(ids), max_size=len(ids))))
    place = torch.arange(len(ids))
    sample = {
        "input_ids": tokens,
        "labels": torch.where(trained, tokens, IGNORED_LABEL),
        "position_ids": place + 7,
        "attention_mask": place,
        "weights": place,
        "logprobs": torch.stack([place, place], 1),
        "temperature": torch.tensor(0.5),
        "name": "a",
        "image": torch.zeros(len(ids) + 1),
    }
    shifted = shift_tokens(sample, mode="always")
    rest = list(range(1, len(ids)))
    assert shifted["input_ids"].tolist() == ids[:-1]
    assert shifted["labels"].tolist() == sample["labels"].tolist()[1:]
    assert shifted["weights"].tolist() == shifted["logprobs"][:, 1].tolist() == rest
    for name in ("attention_mask", "position_ids"):
        assert shifted[name].tolist() == list(range(len(rest)))
    for name in ("temperature", "name", "image"):
        assert shifted[name] is sample[name]
    is_shifted = any(trained[i] and ids[i] != ids[i + 1] for i in range(len(ids) - 1))
    found = shift_tokens(sample)
    assert len(found["input_ids"]) == len(ids) - is_shifted
    assert found.keys() == sample.keys()
    again = shift_tokens(found)  # a shifted sample is never shifted again
    assert not is_shifted or again["labels"].tolist() == shifted["labels"].tolist()


@pytest.mark.parametrize(
    ("ids", "labels", "is_shifted"),
    [
        ([1, 2, 3], [1, 2, 3], True),
        ([1, 2, 3], [-100, 2, 3], True),
        ([1, 2, 3], [2, 3, -100], False),
        ([1, 2, 3], [-100, 3, 4], False),
        ([5, 5, 6], [5, 5, 6], True),  # the first label alone would say "shifted already"
        ([5, 5, 6], [5, 6, -100], False),
        ([5, 5, 5], [5, 5, 5], False),
        ([1, 2, 3], [9, 2, 3], False),  # neither
        ([1, 2, 3], [-100, -100, 3], False),  # the last label has no next token to look at
        ([1, 2, 3], [2, 3], False),
        ([1], [1], False),
        ([], [], False),
    ],
)
def test_labels_tell_whether_they_are_shifted(ids, labels, is_shifted):
    sample = {"input_ids": torch.tensor(ids), "labels": torch.tensor(labels)}
    sample = {name: x.long() for name, x in sample.items()}
    found = shift_tokens(sample)
    assert found["labels"].tolist() == (labels[1:] if is_shifted else labels)
    assert found["input_ids"].tolist() == (ids[:-1] if is_shifted else ids)
    assert shift_tokens(sample | {"target_tokens": 0})["labels"] is sample["labels"]


def test_targets_may_be_named():
    sample = {"input_ids": torch.arange(3), "labels": torch.arange(3), "reward": torch.arange(3)}
    assert shift_tokens(sample)["reward"].tolist() == [0, 1]
    named = shift_tokens(sample, targets={"reward"})
    assert named["reward"].tolist() == named["labels"].tolist() == [1, 2]


@given(st.lists(TOKENS, min_size=1, max_size=4), st.integers(1, 5), st.booleans())
def test_padded_rows_hold_each_row_and_padding(rows, multiple_of, is_left):
    side = "left" if is_left else "right"
    longest = max(map(len, rows))
    for dtype, value in ((torch.int64, -100), (torch.float32, -0.5), (torch.bool, True)):
        tensors = [torch.tensor(row).to(dtype) for row in rows]
        padded = pad_stack(tensors, value, side=side, multiple_of=multiple_of)
        width = padded.shape[1]
        assert (padded.dtype, len(padded)) == (dtype, len(rows))
        assert width % multiple_of == 0 <= width - longest < multiple_of
        for tensor, line in zip(tensors, padded.tolist(), strict=True):
            padding = [value] * (width - len(tensor))
            own = tensor.tolist()
            assert line == (padding + own if is_left else own + padding)


def test_padding_has_no_gradient_and_no_row_needs_a_token():
    row = torch.ones(2, requires_grad=True)
    pad_stack([row, torch.ones(3)], 7.0).sum().backward()
    assert row.grad is not None
    assert row.grad.tolist() == [1, 1]
    empty = torch.empty(0)
    assert pad_stack([empty, empty], 0).shape == (2, 0)
    assert pad_stack([empty, torch.ones(1)], 2).tolist() == [[2], [1]]


@given(st.lists(st.lists(st.booleans(), min_size=5, max_size=5), min_size=1, max_size=3))
def test_a_pooling_mask_takes_the_first_place_the_last_token_or_all(rows):
    for mask in (torch.tensor(rows), torch.tensor(rows).long()):
        before = mask.clone()
        masks = {kind: pooling_mask(mask, kind) for kind in ("first", "last", "all")}
        for i, row in enumerate(rows):
            last = max((j for j in range(5) if row[j]), default=None)
            assert masks["first"][i].tolist() == [1, 0, 0, 0, 0]
            assert masks["last"][i].tolist() == [int(j == last) for j in range(5)]
            assert masks["all"][i].tolist() == list(map(int, row))
        assert {x.dtype for x in masks.values()} == {torch.int64}
        masks["all"].fill_(9)
        assert torch.equal(mask, before)
    assert pooling_mask(torch.ones(2, 3, device="meta"), "last").device.type == "meta"


# ---------------------------------------------------------------------- trees


@given(st.integers(1, 4), st.integers(0, 9), st.booleans())
def test_a_tree_that_was_cut_is_the_same_when_put_together(count, size, is_even):
    size = size * count if is_even else size
    tree = {
        "x": torch.arange(2 * size).reshape(size, 2),
        "inner": (torch.arange(3 * size).reshape(3, size), {"names": list(range(size))}),
        "slices": torch.arange(3 * count).reshape(3, count),
        "kept": torch.arange(5),
        "rate": 0.5,
        "nothing": None,
    }
    spec = {
        "x": Along(),
        "inner": (Along(-1), Along()),
        "slices": Along(1, stack=True),
        "kept": None,
        "rate": Along(),
        "nothing": None,
    }
    parts = shard_tree(tree, count, spec=spec, even=is_even)
    assert len(parts) == count
    sizes = [len(part["x"]) for part in parts]
    assert sizes == [part["inner"][0].shape[1] for part in parts]
    assert sizes == [len(part["inner"][1]["names"]) for part in parts]
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= (0 if is_even else 1)
    assert all(part["slices"].shape == (3,) and part["kept"] is tree["kept"] for part in parts)
    whole = unshard_tree(parts, spec=spec)
    assert repr(whole) == repr(tree)


def test_parts_are_views_and_scalars_of_parts_are_stacked():
    x = torch.ones(4, requires_grad=True)
    parts = shard_tree({"x": x, "scale": torch.tensor(2.0)}, 2)
    losses = [{"loss": (part["x"] * part["scale"]).sum()} for part in parts]
    assert parts[1]["x"]._base is x
    whole = unshard_tree(losses)["loss"]
    assert whole.tolist() == [4, 4]
    whole[1].backward()
    assert x.grad is not None
    assert x.grad.tolist() == [0, 0, 2, 2]
    kept = unshard_tree(parts, spec={"x": Along(), "scale": None})
    assert (kept["scale"].ndim, len(kept["x"])) == (0, 4)


def of_parts(*parts, **more):
    return unshard_tree(list(parts), **more)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: shift_tokens({"labels": torch.ones(2)}), r"input_ids must be .* got NoneType"),
        (
            lambda: shift_tokens({"input_ids": torch.ones(2), "labels": torch.ones(1, 2)}),
            r"labels must be a tensor \[S\], got \(1, 2\)",
        ),
        (lambda: shift_tokens({}, mode="never"), "must be .* got 'never'"),
        (
            lambda: shift_tokens(
                {"input_ids": torch.ones(2), "labels": torch.ones(1)}, mode="always"
            ),
            "2 input_ids, 1 labels: these are shifted",
        ),
        (
            lambda: shift_tokens(
                {"input_ids": torch.ones(2), "labels": torch.ones(2), "weights": torch.ones(1)},
                mode="always",
            ),
            r"weights must have one entry for each of the 2 tokens, .* got \(1,\)",
        ),
        (lambda: pad_stack([], 0), "at least one row"),
        (lambda: pad_stack([torch.ones(1), torch.ones(1).long()], 0), "row 1 is .* torch.int64"),
        (lambda: pad_stack([torch.ones(1, 1)], 0), r"row 0 is \(1, 1\)"),
        (lambda: pad_stack([torch.ones(1).long()], 0.5), "int64 cannot be padded with 0.5"),
        (lambda: pad_stack([torch.ones(1).byte()], -100), "uint8 cannot be padded with -100"),
        (lambda: pad_stack([torch.ones(1).long()], float("nan")), "padded with nan"),
        (lambda: pad_stack([torch.ones(1)], 0, side="up"), "side must be"),
        (lambda: pad_stack([torch.ones(1)], 0, multiple_of=0), "multiple_of must be at least 1"),
        (lambda: pooling_mask(torch.ones(1, 2), "mean"), "got 'mean'"),
        (lambda: pooling_mask(torch.tensor(1), "all"), "got a scalar"),
        (lambda: shard_tree({}, 0), "count must be at least 1, got 0"),
        (lambda: shard_tree({"a": ([1, 2, 3],)}, 2), r"3 entries of the tree\['a'\]\[0\] do not"),
        (lambda: shard_tree(torch.ones(3), 2, spec=Along(1)), r"no dimension 1, it is \(3,\)"),
        (lambda: shard_tree(torch.ones(3), 2, spec=Along(stack=True)), "one slice for each of"),
        (lambda: shard_tree([1, 2], 2, spec=Along(stack=True)), "cannot split"),
        (lambda: shard_tree(make_padding_batch(2, 2), 2), "is a Batch, which cannot be cut"),
        (lambda: shard_tree({"a": np.ones(2)}, 2), r"the tree\['a'\] is a ndarray"),
        (lambda: shard_tree({"a": 1}, 2, spec={"b": None}), "dict of 'a', and its spec is a dict"),
        (lambda: shard_tree(torch.ones(2), 2, spec=0), "its spec is no dict"),
        (lambda: shard_tree(torch.ones(2), 2, spec={}), "1-d tensor .* its spec is a dict"),
        (lambda: unshard_tree([]), "at least one tree"),
        (lambda: unshard_tree({"a": 1}), "at least one tree"),
        (lambda: of_parts({"a": 1}, {"b": 1}), "dict of 'a' in part 0 and a dict of 'b' in part 1"),
        (lambda: of_parts((1,), (1, 2)), "a tuple of 1 in part 0 and a tuple of 2"),
        (
            lambda: of_parts(torch.ones(1), [1.0]),
            "1-d tensor of torch.float32 in part 0 and a list",
        ),
        (lambda: of_parts({"a": 1}, {"a": 2}), r"the tree\['a'\] is a scalar that differs .*1, 2"),
        (lambda: of_parts(torch.ones(1, 2), torch.ones(1, 3)), r"\[\(1, 2\), \(1, 3\)\]"),
        (lambda: of_parts(torch.ones(1), spec=Along(3)), "along dimension 3"),
        (lambda: of_parts(1, spec=(None,)), "its spec is a tuple of 1"),
    ],
)
def test_samples_and_trees_that_cannot_be_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
