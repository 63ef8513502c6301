"""Streams packed as they are read: every token once, a bounded buffer, cursors that restore."""

import json
from functools import partial
from itertools import count, islice, pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainkit.batch import batch_hash
from trainkit.data.prefetch import prefetch_batches
from trainkit.data.steps import make_microbatches
from trainkit.packing import best_fit, next_fit
from trainkit.text.streams.stream import (
    count_stream,
    make_document_opener,
    make_stream_reader,
    pack_stream,
)
from trainkit.types import Cursor, DataError, DataShard, Sample, Share, StepBatch

TENSORS = ("input_ids", "labels", "position_ids", "document_ids", "token_index")
pack_few = partial(pack_stream, capacity=16, rows=4, seed=3, buffer_rows=8)


def documents_of(sizes):
    """Documents whose tokens are numbered through."""
    ends = np.cumsum([0, *sizes])
    return [np.arange(a, b) for a, b in pairwise(ends)]


SIZES = np.random.default_rng(0).integers(0, [17, 50] * 15).tolist()
SIZES[8], SIZES[20], SIZES[21] = 300, 128, 129  # a window holds 128
DOCUMENTS = documents_of(SIZES)


def steps_of(documents=DOCUMENTS, cursor=Cursor(), *, rows=5, **changes):  # noqa: B008 (immutable)
    return pack_few(make_document_opener(lambda: iter(documents)), cursor, rows=rows, **changes)


def split_step(step, rows_per_microbatch, share=Share(0, 1)):  # noqa: B008 (immutable)
    rows = range(len(step.packed))
    data_shard = DataShard(share)
    parts = make_microbatches(
        step.packed, rows, data_shard=data_shard, rows_per_microbatch=rows_per_microbatch
    )
    return StepBatch(parts, step.cursor)


def same(one, other):
    return (
        one.cursor == other.cursor
        and len(one.microbatches) == len(other.microbatches)
        and all(
            torch.equal(a[name], b[name])
            for a, b in zip(one.microbatches, other.microbatches, strict=True)
            for name in (*TENSORS, *a.extra)
        )
        and all(
            a.spans.lengths.tolist() == b.spans.lengths.tolist()
            for a, b in zip(one.microbatches, other.microbatches, strict=True)
        )
    )


@settings(max_examples=25)
@given(
    st.lists(st.integers(0, 90), max_size=40),
    st.integers(1, 6),
    st.integers(1, 5),
    st.sampled_from([1, 4]),
    st.sampled_from([best_fit, next_fit]),
)
def test_every_token_of_a_stream_comes_exactly_once(sizes, rows, buffer_rows, multiple_of, fit):
    documents = documents_of(sizes)
    steps = list(
        steps_of(documents, rows=rows, buffer_rows=buffer_rows, multiple_of=multiple_of, fit=fit)
    )
    tokens = np.concatenate([np.arange(0), *(step.packed.corpus.tokens for step in steps)])
    assert sorted(tokens.tolist()) == list(range(sum(sizes)))
    assert all(len(step.packed.bins) == rows for step in steps)
    full = [np.diff(step.packed.bins.offsets) > 0 for step in steps]
    assert all(rows_.all() for rows_ in full[:-1])  # blank rows only fill the last step
    assert [step.cursor.batch for step in steps] == list(range(1, len(steps) + 1))
    if steps:
        assert steps[-1].cursor.stream == (len(sizes), 0, 0, 0, 0, 0)


@pytest.mark.parametrize("overlong", ["split", "truncate", "drop"])
def test_a_stream_goes_on_from_every_cursor_bit_for_bit(overlong):

    def steps_from(cursor):
        return list(steps_of(cursor=cursor, overlong=overlong, multiple_of=4, rows=3))

    steps = steps_from(Cursor())
    assert len(steps) > 2

    def deals(step):
        return [split_step(step, 2, share) for share in (Share(0, 1), Share(1, 3))]

    want = [deals(step) for step in steps]
    cursors = [Cursor(), *(step.cursor for step in steps)]
    for first, cursor in enumerate(cursors):
        read = json.loads(json.dumps([cursor.batch, list(cursor.stream)]))  # as a checkpoint's
        again = steps_from(Cursor(read[0], tuple(read[1])))
        assert len(again) == len(steps) - first
        for step, others in zip(again, want[first:], strict=True):
            assert all(same(one, other) for one, other in zip(deals(step), others, strict=True))


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_the_global_batch_of_a_stream_is_the_same_for_every_number_of_ranks(ranks):
    for step in islice(steps_of(), 4):
        parts = [split_step(step, 1, Share(r, ranks)) for r in range(ranks)]
        hashes = sum(int(batch_hash(part.microbatches)) for part in parts)
        whole = split_step(step, 5)
        assert (hashes - int(batch_hash(whole.microbatches))) % 2**64 == 0


def test_a_step_that_is_not_full_is_filled_with_blank_rows_that_count_for_nothing():
    steps = list(steps_of(documents_of([16] * 7)))
    (last,) = split_step(steps[-1], 5).microbatches
    assert (last.document_ids[:2] >= 0).all()
    assert (last.document_ids[2:] == -1).all()
    assert (last.labels[2:] == -100).all()
    short = list(steps_of(documents_of([16] * 7), rows=1))[5:]
    parts = [split_step(step, 1).microbatches[0] for step in short]
    assert torch.equal(torch.cat([part.input_ids for part in parts]), last.input_ids[:2])


def test_each_window_of_one_huge_document_has_an_order_of_its_own():
    steps = steps_of(documents_of([24 * 16]), rows=1)
    windows = np.array([int(step.packed.corpus.tokens[0]) // 16 for step in steps]).reshape(3, 8)
    assert (np.sort(windows, 1).reshape(-1) == np.arange(24)).all()
    assert len({tuple(window % 8) for window in windows}) == 3


def test_rows_leave_a_window_in_an_order_of_their_own():
    def order(seed):
        steps = steps_of(documents_of([16] * 24), rows=1, seed=seed)
        return [int(step.packed.corpus.tokens[0]) // 16 for step in steps]

    for seed in (0, 1):
        windows = np.array(order(seed)).reshape(3, 8)
        assert (np.sort(windows, 1).reshape(-1) == np.arange(24)).all()
        assert len({tuple(window % 8) for window in windows}) == 3
    assert order(0) != order(1)


def test_no_more_than_a_window_and_a_step_is_read_ahead():
    read, used = [0], 0

    def endless():
        for number in count():
            read[0] += 20
            yield np.full(20, number)

    steps = pack_stream(
        make_document_opener(endless), Cursor(), capacity=16, rows=5, seed=0, buffer_rows=8
    )
    assert read == [0]
    for step in islice(steps, 200):
        used += len(step.packed.corpus.tokens)
        assert read[0] - used <= 8 * 16 + 20
    assert used > 10_000


def test_a_document_of_any_size_is_cut_into_windows_of_full_rows():
    steps = list(steps_of([np.arange(10), np.arange(10_000)], rows=8))
    assert max(len(step.packed.corpus.tokens) for step in steps) <= 8 * 16
    pieces = np.concatenate([step.packed.corpus.lengths for step in steps])
    assert sorted(pieces.tolist()) == [10] + 625 * [16]


@pytest.mark.parametrize(
    ("overlong", "shortened", "tokens"),
    [("split", 0, 0), ("truncate", 2, 4 + 84), ("drop", 2, 20 + 100)],
)
def test_what_is_left_out_is_counted_in_the_cursor(overlong, shortened, tokens):
    steps = list(steps_of(documents_of([20, 5, 100, 16]), overlong=overlong))
    counts = count_stream(steps[-1].cursor)
    assert counts == {"documents": 4, "shortened_documents": shortened, "lost_tokens": tokens}
    assert sum(len(step.packed.corpus.tokens) for step in steps) == 141 - tokens


@pytest.mark.parametrize("after", [[17], [0, 40, 0, 17], [0]])
def test_documents_without_a_token_after_the_last_row_are_counted_in_the_last_step(after):
    dropped = [size for size in after if size > 16]
    for sizes in ([16, *after], [16, *after, 16]):  # a window holds one row
        steps = list(steps_of(documents_of(sizes), rows=1, buffer_rows=1, overlong="drop"))
        counts = [tuple(count_stream(step.cursor).values()) for step in steps]
        first = (1 + len(after), len(dropped), sum(dropped))
        assert counts == [first, (len(sizes), *first[1:])][: len(steps)]
        assert len(steps) == sizes.count(16)


def test_a_document_that_is_too_long_is_an_error_only_when_its_window_is_read():
    steps = steps_of(documents_of([16, 17]), rows=1, buffer_rows=1, overlong="error")
    assert next(steps).packed.corpus.tokens.tolist() == list(range(16))
    with pytest.raises(DataError, match="document 1 has 17 tokens"):
        next(steps)


def test_tokens_that_are_not_trained_on_stay_so():
    sizes = [20, 7, 40, 3]
    samples = [Sample(x, x % 3 == 0) for x in documents_of(sizes)]
    for step in steps_of(samples, multiple_of=4):
        for batch in split_step(step, 1).microbatches:
            trained_labels = batch.labels[batch.labels >= 0]
            assert (trained_labels % 3 == 0).all()
            follows = (batch.document_ids[:, 1:] == batch.document_ids[:, :-1]) & (
                batch.input_ids[:, 1:] == batch.input_ids[:, :-1] + 1
            )
            wanted = follows & (batch.input_ids[:, 1:] % 3 == 0)
            assert ((batch.labels[:, :-1] >= 0) == wanted).all()


def test_a_stream_can_be_prefetched_from_any_cursor():
    def batches_from(cursor):
        return (split_step(step, 5) for step in steps_of(cursor=cursor))

    want = list(batches_from(Cursor()))
    for first in (0, 3):
        cursor = want[first - 1].cursor if first else Cursor()
        with prefetch_batches(make_stream_reader(batches_from), cursor) as next_batch:
            have = [next_batch() for _ in want[first:]]
            assert next_batch() is None
        assert all(same(a, b) for a, b in zip(have, want[first:], strict=True))


def test_a_batch_maker_reads_on_and_begins_anew_only_at_another_cursor():
    opened = []

    def batches_from(cursor):
        opened.append(cursor.batch)
        return (split_step(step, 5) for step in steps_of(cursor=cursor))

    make_batch = make_stream_reader(batches_from)
    first = make_batch(Cursor())
    second = make_batch(first.cursor)
    assert opened == [0]
    assert same(make_batch(first.cursor), second)
    assert opened == [0, 1]


def test_a_batch_maker_that_failed_begins_anew_instead_of_saying_that_the_source_has_ended():
    failures = [OSError("the disk is away")]

    def batches_from(cursor):
        for step in steps_of(cursor=cursor):
            if step.cursor.batch == 2 and failures:
                raise failures.pop()
            yield split_step(step, 5)

    make_batch = make_stream_reader(batches_from)
    cursor = make_batch(Cursor()).cursor
    with pytest.raises(OSError, match="disk is away"):
        make_batch(cursor)
    assert same(make_batch(cursor), next(batches_from(cursor)))


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        ([[1], [2, -3]], "document 1 has token -3 at 1"),
        ([[1], [2, 300]], r"document 1 has token 300 at 1, outside \[0, 300"),
        ([[1], [[2]]], "document 1 must be integers in one dimension"),
        ([[1], [0.5]], "document 1 must be integers"),
        ([[1], Sample(np.arange(2), np.ones(2, bool))], "document 1 is a Sample, unlike"),
        ([[1], [2] * 17], "document 1 has 17 tokens; the capacity is 16"),
    ],
)
def test_documents_that_cannot_be_are_named(documents, message):
    with pytest.raises(DataError, match=message):
        list(steps_of(documents, vocab_size=300, overlong="error"))


@pytest.mark.parametrize(
    ("documents", "stream", "message"),
    [
        ([[1]], (3, 0, 0, 0, 0, 0), "ends after 1 doc.* document 3"),
        ([[1]], (1, 16, 0, 0, 0, 0), "token 16 of document 1, .* ends before"),
        ([[1], [2]], (1, 16, 0, 0, 0, 0), "token 16 of document 1, which"),
    ],
)
def test_a_cursor_beyond_the_documents_is_refused(documents, stream, message):
    with pytest.raises(DataError, match=message):
        list(steps_of(documents, Cursor(1, stream)))


def inside():
    """A cursor in the second window, from document 8 on, with four of its eight rows used."""
    step = next(islice(steps_of(documents_of([16] * 24), rows=4), 2, None))
    assert step.cursor.stream[:3] == (8, 0, 4)
    assert 0 < step.cursor.stream[-1] < 2**63
    return step.cursor


def changed(number, document):
    """The documents of `inside`, with another one in place of one of them."""
    documents = documents_of([16] * 24)
    return [*documents[:number], *document, *documents[number + 1 :]]


TOKENS = np.arange(8 * 16, 9 * 16)  # of document 8
reseeded = partial(steps_of, seed=4)
widened = partial(steps_of, capacity=32)


@pytest.mark.parametrize(
    ("documents", "steps", "found"),
    [
        (changed(8, [TOKENS[::-1]]), steps_of, "document 16 and has 128 tokens in 8 rows"),
        (changed(15, [TOKENS]), steps_of, "document 16 and has 128 tokens in 8 rows"),
        (
            changed(8, [TOKENS[:8], TOKENS[8:]]),
            steps_of,
            "document 17 and has 128 tokens in 8 rows",
        ),
        (changed(16, [[], TOKENS]), steps_of, "document 17 and has 128 tokens in 8 rows"),
        (changed(8, [TOKENS[1:]]), steps_of, "document 17 and has 143 tokens in 9 rows"),
        (documents_of([16] * 11), steps_of, "document 11 and has 48 tokens in 3 rows"),
        (documents_of([16] * 24), reseeded, "document 16 and has 128 tokens in 8 rows"),
        (documents_of([16] * 24), widened, "document 24 and has 256 tokens in 8 rows"),
    ],
)
def test_a_window_that_has_changed_since_its_cursor_was_saved_is_refused(documents, steps, found):
    cursor = inside()
    message = f"row 4 of the window from document 8 on, .* {found}, .* instead of .*: give the"
    with pytest.raises(DataError, match=message) as error:
        next(steps(documents, cursor, rows=4))
    assert (error.value.where, error.value.want) == ("document 8", cursor.stream[-1])


def test_which_tokens_are_trained_on_is_part_of_a_window():
    def samples(every):
        return [Sample(x, x % every == 0) for x in documents_of([16] * 8)]

    first = next(steps_of(samples(2), rows=4))
    assert next(steps_of(samples(2), first.cursor, rows=4)).cursor.batch == 2
    for other in (samples(3), documents_of([16] * 8)):
        with pytest.raises(DataError, match="window from document 0 on"):
            next(steps_of(other, first.cursor, rows=4))


def test_how_rows_are_packed_is_part_of_a_window():
    documents = documents_of([10, 6, 8, 8] * 4)
    first = next(steps_of(documents, rows=4))
    assert next(steps_of(documents, first.cursor, rows=4)).cursor.batch == 2
    for other, fit in ((documents, next_fit), (documents_of([8, 8, 10, 6] * 4), best_fit)):
        with pytest.raises(DataError, match="has 128 tokens in 8 rows"):
            next(steps_of(other, first.cursor, rows=4, fit=fit))


def test_a_cursor_beyond_the_rows_of_its_window_is_refused():
    stream = inside().stream
    for rows in (8, 9):
        cursor = Cursor(3, (*stream[:2], rows, *stream[3:]))
        with pytest.raises(DataError, match=f"row {rows} of the window from document 8"):
            next(steps_of(documents_of([16] * 24), cursor, rows=4))


@pytest.mark.parametrize("left", [7, 8])
def test_a_source_that_ends_before_the_window_of_its_cursor_is_refused(left):
    documents = documents_of([16] * left)
    with pytest.raises(DataError, match=r"document 8, with 4 rows used of .* ends before it: "):
        list(pack_few(lambda first: iter(documents[first:]), inside()))


def test_only_the_window_of_the_cursor_is_compared():
    documents, cursor = documents_of([16] * 24), inside()
    assert len(list(steps_of(documents[:16], cursor, rows=4))) == 1
    (between,) = (step.cursor for step in steps_of(documents[:16], cursor, rows=4))
    assert between.stream == (16, 0, 0, 0, 0, 0)
    assert list(steps_of(documents[:16], between, rows=4)) == []
    assert len(list(steps_of([*documents[:16], TOKENS], between, rows=4))) == 1


def breaking(number, error):
    """Documents of 16 tokens; reading one of them fails."""
    yield from documents_of([16] * number)
    raise error


@pytest.mark.parametrize(("first", "broken"), [(0, 70), (8, 70), (64, 70), (8, 5)])
def test_an_error_of_the_source_arrives_as_it_was_raised_and_names_the_document(first, broken):
    error = OSError("tape broke")
    cursor = Cursor(1, (first, 0, 0, 0, 0, 0))

    def batches_from(cursor):
        steps = pack_few(make_document_opener(lambda: breaking(broken, error)), cursor)
        return (split_step(step, 4) for step in steps)

    with prefetch_batches(make_stream_reader(batches_from), cursor) as next_batch:
        for _ in range(2):  # the second call raises it again
            with pytest.raises(OSError, match="tape broke") as caught:
                list(iter(next_batch, None))
            assert caught.value is error
    assert error.__notes__ == [f"stream: while reading document {broken}"]


@pytest.mark.parametrize(
    ("start", "message"),
    [
        (partial(steps_of, rows=0), "rows and buffer_rows must be at least 1, got 0 and 8"),
        (partial(steps_of, buffer_rows=0), "got 5 and 0"),
        (partial(steps_of, capacity=0), "capacity must be"),
        (partial(steps_of, multiple_of=3), "capacity 16 is no multiple of"),
        (partial(steps_of, overlong="cut"), "overlong must be"),
        (partial(steps_of, cursor=Cursor(3, (1, 2))), r"holds 6 integers, got \(1, 2\)"),
    ],
)
def test_bad_arguments_are_refused_before_a_document_is_read(start, message):
    with pytest.raises(ValueError, match=message):
        start(iter([]))
