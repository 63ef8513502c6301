"""From rows to tensors: every token with its label, its position, its document and its index."""

from itertools import groupby

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import batches, corpus_of, packed

from trainkit.batch import (
    batch_hash,
    blank_batch,
    collate_bins,
    count_valid_tokens,
    shift_labels,
    spans,
    to_device,
)
from trainkit.packing import pack_bins
from trainkit.types import IGNORED_LABEL, Bins

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
        documents += [number] * (length + padding)
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
    batch = collate_bins(corpus, bins, rows, pad_id=999)
    pieces = [bins[row] if row >= 0 else [] for row in rows]
    plain = [plain_row(corpus, part, bins.capacity, bins.multiple_of) for part in pieces]
    for name, column in zip(TENSORS, zip(*plain, strict=True), strict=False):
        assert batch[name].dtype == torch.int64
        assert batch[name].tolist() == list(column), name
    index = np.arange(len(rows) * bins.capacity).reshape(len(rows), -1)
    index[np.array(rows) < 0] = -1
    assert batch.token_index.tolist() == index.tolist()


@given(batches())
def test_spans_are_the_documents_of_the_flattened_rows(batch):
    runs = [len(list(run)) for row in batch.document_ids.tolist() for _, run in groupby(row)]
    assert batch.spans.lengths.tolist() == spans(batch.document_ids).lengths.tolist() == runs
    assert batch.spans.cu_seqlens.tolist() == [0, *np.cumsum(runs)]
    assert (batch.spans.cu_seqlens.dtype, batch.spans.lengths.dtype) == (torch.int32, np.int64)
    assert batch.spans.max_length == max(runs)


@given(batches())
def test_labels_never_cross_a_document_boundary(batch):
    trained = batch.labels != IGNORED_LABEL
    row, column = torch.nonzero(trained, as_tuple=True)
    assert (column + 1 < batch.labels.shape[1]).all()
    assert (batch.document_ids[row, column] >= 0).all()
    assert torch.equal(batch.document_ids[row, column], batch.document_ids[row, column + 1])
    assert torch.equal(batch.labels[row, column], batch.input_ids[row, column + 1])


@given(batches(multiple_of=1))
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


def test_row_positions_say_where_a_row_is_in_the_global_step():
    corpus = corpus_of([4, 4, 4])
    bins = pack_bins(corpus.lengths, 4)
    batch = collate_bins(corpus, bins, [2, 0, -1], row_positions=[5, 1, -1])
    assert batch.token_index.tolist() == [[20, 21, 22, 23], [4, 5, 6, 7], [-1, -1, -1, -1]]


def test_a_blank_row_is_a_blank_batch():
    corpus = corpus_of([4])
    collated = collate_bins(corpus, pack_bins(corpus.lengths, 4), [-1, -1], pad_id=7)
    blank = blank_batch(2, 4, pad_id=7)
    for name in TENSORS:
        assert torch.equal(collated[name], blank[name]), name
    assert collated.spans.cu_seqlens.tolist() == blank.spans.cu_seqlens.tolist() == [0, 4, 8]


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
    changed = batch[name].clone()
    changed[0, 3] += 1
    assert batch_hash([attrs.evolve(batch, **{name: changed})]) != batch_hash([batch])


def test_the_hash_leaves_out_padding_but_not_swapped_tokens():
    corpus = corpus_of([5, 6])
    bins = pack_bins(corpus.lengths, 8)
    one, two = (collate_bins(corpus, bins, [0, 1], pad_id=pad_id) for pad_id in (0, 1))
    swapped = collate_bins(corpus, bins, [1, 0])
    assert batch_hash([one]) == batch_hash([two])
    assert batch_hash([one]) != batch_hash([swapped])
    assert batch_hash([one]).dtype == torch.int64


def test_what_runs_in_a_step_reads_nothing_back_from_the_device():
    # On the meta device there are no values: whoever reads one raises.
    batch = to_device(blank_batch(2, 4), "meta")
    assert batch.spans.cu_seqlens.device.type == "meta"
    assert count_valid_tokens([batch]).device.type == "meta"
    assert batch_hash([batch, batch]).device.type == "meta"
    assert shift_labels(batch.input_ids, batch.document_ids).device.type == "meta"


def test_to_device_moves_everything_or_nothing():
    batch = attrs.evolve(blank_batch(1, 4), extra={"weights": torch.ones(1, 4)})
    assert to_device(batch, "cpu") is batch
    moved = to_device(batch, "meta")
    devices = {moved[name].device.type for name in (*TENSORS, "weights")}
    assert devices | {moved.spans.cu_seqlens.device.type} == {"meta"}
    assert moved.spans.lengths is batch.spans.lengths


CORPUS = corpus_of([3, 3])
BINS = pack_bins(CORPUS.lengths, 4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: collate_bins(CORPUS, BINS, [0, 2, -2]), r"no rows \[2, -2\]: bins has 2"),
        (lambda: collate_bins(CORPUS, BINS, []), "at least one integer"),
        (lambda: collate_bins(CORPUS, BINS, [0.5]), "at least one integer"),
        (lambda: collate_bins(CORPUS, BINS, [0], row_positions=[0, 1]), "row_positions must be"),
        (lambda: collate_bins(corpus_of([3]), BINS, [0, 1]), "do not fit the corpus"),
        (lambda: collate_bins(corpus_of([3, 2]), BINS, [0, 1]), "3 tokens of document 1 from 0"),
        (
            lambda: collate_bins(CORPUS, attrs.evolve(BINS, capacity=1 << 30), [0, 1]),
            "too many for int32",
        ),
        (lambda: blank_batch(0, 4), "at least 1, got 0 and 4"),
        (lambda: shift_labels(torch.ones(1, 2), torch.ones(1, 3)), r"one shape \[B, S\]"),
        (lambda: spans(torch.ones(1, 2, device="meta")), "on the host, got .* on meta"),
        (lambda: count_valid_tokens([]), "at least one batch, got none"),
        (lambda: count_valid_tokens(blank_batch(1, 2)), "got one batch"),
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
