"""One rank reads for all, and ranks whose sources end at different times stop together."""

import attrs
import numpy as np
import pytest
import torch
from strategies import corpus_of

import trainkit as tk
from trainkit.data.dispatch import scatter_batches, stop_at_shortest
from trainkit.data.packed import PackedCorpus
from trainkit.data.steps import make_microbatches, make_step_batch
from trainkit.mesh import solo_parallel
from trainkit.packing import pack_bins
from trainkit.sampling import shuffle_epochs
from trainkit.text.streams.stream import make_document_opener, pack_stream
from trainkit.tools.testing import run_ranks
from trainkit.types import Cursor, DataError, DataShard, Share, StepBatch

STEPS = 3


def with_extra(batch):
    """Add what a batch may carry besides: other dtypes, and a third dimension."""
    weights = torch.linspace(0, 1, batch.labels.numel()).view(batch.labels.shape)
    extra = {
        "weights": weights.bfloat16(),
        "chosen": weights > 0.5,
        "experts": (weights[..., None] * torch.arange(3)).to(torch.int32),
    }
    return attrs.evolve(batch, extra={**batch.extra, **extra})


def batch_at(cursor, share):
    """What a rank would make itself; None after STEPS steps."""
    if cursor.batch >= STEPS:
        return None
    corpus = corpus_of(np.random.default_rng(0).integers(1, 30, 60))
    bins = pack_bins(corpus.lengths, 32, multiple_of=4)
    packed = PackedCorpus(corpus, bins, {"a": 3, "b": 0, "c": len(bins) - 3})
    made = make_step_batch(
        packed,
        shuffle_epochs(len(bins), rows_per_step=7, seed=0),
        cursor,
        data_shard=DataShard(share),
        rows_per_microbatch=2,
        noise_seed=1,
    )
    after = attrs.evolve(made.cursor, stream=(cursor.batch + 1, 2**62))
    return StepBatch([with_extra(one) for one in made.microbatches], after)


def parts_at(cursor, count):
    parts = [batch_at(cursor, Share(index, count)) for index in range(count)]
    return None if None in parts else parts


def streamed(cursor, count):
    """The parts of the step of a stream that only rank 0 reads."""
    documents = make_document_opener(lambda: iter([np.arange(n) for n in range(1, 30)]))
    step = next(pack_stream(documents, cursor, capacity=32, rows=4, seed=0), None)
    if step is None:
        return None
    rows, places = range(4), [DataShard(Share(index, count)) for index in range(count)]
    return [
        StepBatch(
            make_microbatches(step.packed, rows, data_shard=data_shard, rows_per_microbatch=1),
            step.cursor,
        )
        for data_shard in places
    ]


def same(one, other):
    """Compare two step batches bit for bit, with all that they hold."""
    if one is None or other is None:
        return one is other
    pairs = list(zip(one.microbatches, other.microbatches, strict=True))
    tensors = all(
        torch.equal(a[name], b[name]) and a[name].dtype == b[name].dtype
        for a, b in pairs
        for name in a
        if name != "spans"
    )
    spans = all(
        torch.equal(a.spans.cu_seqlens, b.spans.cu_seqlens)
        and a.spans.cu_seqlens.dtype == b.spans.cu_seqlens.dtype
        and a.spans.lengths.tolist() == b.spans.lengths.tolist()
        and a.spans.lengths.dtype == b.spans.lengths.dtype
        and a.spans.max_length == b.spans.max_length
        for a, b in pairs
    )
    names = all(set(a) == set(b) for a, b in pairs)
    return tensors and spans and names and one.cursor == other.cursor


def received(tp):
    """All batches that a rank is sent, of two sources, and how often it was asked to make them."""
    with tk.parallel_session(tp=tp) as ps:
        share, calls, batches = ps.dp.share, [], []
        for source in (parts_at, streamed):

            def parts(cursor, source=source):
                calls.append(cursor)
                return source(cursor, share.count)

            make_batch, cursor = scatter_batches(parts, ps.world, share), Cursor()
            batches.append([make_batch(cursor)])
            while batches[-1][-1] is not None:
                cursor = batches[-1][-1].cursor
                batches[-1].append(make_batch(cursor))
        return batches, len(calls), share


def failures(kinds):
    def make_parts(cursor):
        raise kinds[cursor.batch]("shard-3.parquet: 5 bytes are missing")

    found = []
    with tk.parallel_session() as ps:
        make_batch = scatter_batches(make_parts, ps.world, ps.dp.share)
        for number in range(len(kinds)):
            try:
                make_batch(Cursor(number))
            except Exception as error:  # noqa: BLE001 (which it is, is the question)
                found.append((type(error), str(error)))
    return found


def broken_extra():
    def make_parts(cursor):
        part = parts_at(cursor, 1)[0].microbatches[0]
        broken = attrs.evolve(part, extra={"weight": part.labels.numpy()})
        return [StepBatch([broken], Cursor(1)), StepBatch([part], Cursor(1))]

    with tk.parallel_session() as ps:
        make_batch = scatter_batches(make_parts, ps.world, ps.dp.share)
        try:
            make_batch(Cursor())
        except Exception as error:  # noqa: BLE001 (which it is, is the question)
            return str(error)


def source_of(count):
    """Numbers up to `count`, after which a negative one fails."""
    yield from range(abs(count))
    if count < 0:
        raise DataError("line 7 of part-1.jsonl is no JSON")


ENDS = [(3, 5), (5, 3), (4, 4), (0, 2)]


def stopped(cases):
    found = []
    with tk.parallel_session() as ps:
        for counts in cases:
            seen, left, message = [], [], None
            batches = source_of(counts[ps.dp.index])
            try:
                seen.extend(stop_at_shortest(batches, ps.dp, left_over=left.append))
            except DataError as error:
                message = str(error)
            found.append((seen, left, list(batches), message))
    return found


def differing_counts():
    with tk.parallel_session() as ps:
        try:
            scatter_batches(print, ps.world, Share(0, 1 + ps.world.index))
        except ValueError as error:
            return str(error)


def all_of_it():
    return {
        "received": received(1),
        "failures": failures((DataError, OSError)),
        "broken_extra": broken_extra(),
        "stopped": stopped(ENDS),
        "failed": stopped([(4, -1)]),
        "counts": differing_counts(),
    }


@pytest.fixture(scope="module")
def on_two():
    """Return what each of two ranks saw: they start once for all tests."""
    return run_ranks(all_of_it, 2)


@pytest.mark.parametrize("tp", [1, 2])
def test_every_rank_is_sent_what_it_would_have_made_itself(tp, on_two):
    found = [seen["received"] for seen in on_two] if tp == 1 else run_ranks(received, 4, tp)
    for rank, (batches, calls, share) in enumerate(found):
        for source, sent in zip((parts_at, streamed), batches, strict=True):
            assert len(sent) > STEPS
            cursors = [Cursor(), *(batch.cursor for batch in sent[:-1])]
            own = [source(cursor, share.count) for cursor in cursors]
            assert own[-1] is None
            assert all(same(a, b and b[share.index]) for a, b in zip(sent, own, strict=True))
        assert share == Share(rank // tp, 2)
        assert calls == (sum(map(len, batches)) if rank == 0 else 0)


def test_what_fails_on_the_reading_rank_is_raised_on_all(on_two):
    message = "shard-3.parquet: 5 bytes are missing"
    first, second = (seen["failures"] for seen in on_two)
    assert first == [(DataError, message), (OSError, message)]
    assert second == [
        (DataError, f"rank 0: {message}"),
        (RuntimeError, f"rank 0 failed: OSError: {message}"),
    ]


def test_a_batch_that_cannot_be_sent_is_an_error_on_all_ranks(on_two):
    message = "scatter_batches: `extra` of a batch must hold tensors, ['weight'] are none"
    first, second = (seen["broken_extra"] for seen in on_two)
    assert first == message
    assert second.startswith("rank 0")
    assert second.endswith(message)


def test_one_process_gets_its_batches_without_a_group():
    ps = solo_parallel()
    make_batch = scatter_batches(lambda cursor: parts_at(cursor, 1), ps.world, ps.dp.share)
    assert same(make_batch(Cursor(1)), batch_at(Cursor(1), Share(0, 1)))
    assert make_batch(Cursor(STEPS)) is None


def test_a_device_is_where_batches_go():
    ps = solo_parallel()
    make_batch = scatter_batches(
        lambda cursor: parts_at(cursor, 1), ps.world, ps.dp.share, device="meta"
    )
    assert make_batch(Cursor()).microbatches[0].input_ids.device.type == "meta"


def test_parts_for_another_number_of_shares_are_refused():
    ps = solo_parallel()
    make_batch = scatter_batches(lambda cursor: parts_at(cursor, 3), ps.world, ps.dp.share)
    with pytest.raises(ValueError, match="one StepBatch for each of 1 shares, got 3"):
        make_batch(Cursor())


@pytest.mark.case("D12")
def test_ranks_stop_at_the_same_step_and_tell_what_nobody_trained_on(on_two):
    for rank, found in enumerate(on_two):
        for counts, (seen, left, unread, message) in zip(ENDS, found["stopped"], strict=True):
            rest = list(range(min(counts), counts[rank]))
            assert seen == list(range(min(counts)))
            assert (left, unread, message) == (rest[:1], rest[1:], None)


def test_a_source_that_fails_on_one_rank_fails_on_all(on_two):
    message = "line 7 of part-1.jsonl is no JSON"
    (first,), (second,) = (seen["failed"] for seen in on_two)
    assert first[3] == f"rank 1: {message}"
    assert second[3] == message
    assert first[1] == second[1] == []


def test_ranks_that_ask_for_parts_of_different_counts_are_told(on_two):
    for seen in on_two:
        assert "shares of different counts: [(0, 1), (0, 2)]" in seen["counts"]
