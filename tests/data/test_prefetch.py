"""Batches made ahead are the batches made in turn; errors and ends come where they belong."""

import threading
import time
from contextlib import nullcontext

import attrs
import numpy as np
import pytest
import torch
from strategies import corpus_of

from trainkit.batch import batch_hash, make_padding_batch, to_device
from trainkit.batch.batches import map_tensors
from trainkit.data.packed import PackedCorpus
from trainkit.data.prefetch import prefetch_batches
from trainkit.data.steps import make_step_batch
from trainkit.packing import pack_bins
from trainkit.sampling import shuffle_epochs
from trainkit.types import Cursor, DataError, StepBatch

CORPUS = corpus_of(np.random.default_rng(0).integers(1, 30, 60))
BINS = pack_bins(CORPUS.lengths, 32)
PATIENCE = 20.0  # seconds that no test of a machine that is not stuck reaches


def make_batch(cursor):
    rows_at = shuffle_epochs(len(BINS), rows_per_step=5, seed=2)
    return make_step_batch(PackedCorpus(CORPUS, BINS), rows_at, cursor, rows_per_microbatch=2)


def counted(stop_at, *, error=None):
    """(make_batch, made): small batches up to one that raises or ends; what was asked for."""
    made = []

    def make(cursor):
        made.append(cursor.batch)
        if cursor.batch < stop_at:
            return StepBatch(
                [make_padding_batch(1, 2)], attrs.evolve(cursor, batch=cursor.batch + 1)
            )
        if error is not None:
            raise error
        return None

    return make, made


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "trainkit-prefetch"]


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    yield
    for thread in threads():
        thread.join(PATIENCE)
    assert not threads()


def seen(batch):
    return batch.cursor, [int(batch_hash([part])) for part in batch.microbatches]


@pytest.mark.case("X6")
@pytest.mark.parametrize("ahead", [1, 2, 7])
def test_batches_made_ahead_are_those_made_in_turn_from_any_cursor(ahead):
    cursor, want = Cursor(), []
    for _ in range(8):
        batch = make_batch(cursor)
        want.append(seen(batch))
        cursor = batch.cursor
    with prefetch_batches(make_batch, Cursor(), ahead=ahead) as next_batch:
        got = [seen(next_batch()) for _ in range(8)]
    assert got == want
    with prefetch_batches(make_batch, got[4][0], ahead=ahead) as next_batch:
        assert [seen(next_batch()) for _ in range(3)] == want[5:]


@pytest.mark.parametrize("ahead", [1, 3])
def test_never_more_than_ahead_are_ready_or_in_the_making(ahead):
    started, go_on = threading.Semaphore(0), threading.Semaphore(0)

    def make(cursor):
        started.release()
        assert go_on.acquire(timeout=PATIENCE)
        return StepBatch([], Cursor(cursor.batch + 1))

    with prefetch_batches(make, Cursor(), ahead=ahead, timeout=PATIENCE) as next_batch:
        for _ in range(ahead):
            assert started.acquire(timeout=PATIENCE)
            go_on.release()
        assert not started.acquire(timeout=0.05)
        next_batch()
        assert started.acquire(timeout=PATIENCE)
        go_on.release()


def test_an_error_is_raised_at_its_own_step_as_the_same_object():
    error = DataError("corpus.tokens: document 7 (a.txt): broken")
    make, made = counted(2, error=error)
    with prefetch_batches(make, Cursor(), ahead=5) as next_batch:
        assert [next_batch().cursor.batch for _ in range(2)] == [1, 2]
        for _ in range(2):
            with pytest.raises(DataError, match=r"document 7 \(a.txt\)") as caught:
                next_batch()
            assert caught.value is error
    assert made == [0, 1, 2]


def test_a_source_that_ends_gives_none_from_then_on():
    make, made = counted(3)
    with prefetch_batches(make, Cursor(), ahead=2) as next_batch:
        assert [next_batch() is None for _ in range(6)] == [False] * 3 + [True] * 3
    assert made == [0, 1, 2, 3]


def use_one_and_fail(make):
    with prefetch_batches(make, Cursor()) as next_batch:
        next_batch()
        assert len(threads()) == 1
        raise KeyError("mine")


def test_the_thread_ends_when_the_consumer_raises_or_stops_early():
    make, _ = counted(10**9)
    with pytest.raises(KeyError, match="mine"):
        use_one_and_fail(make)
    assert not threads()
    with prefetch_batches(make, Cursor(), ahead=1) as next_batch:
        pass
    assert not threads()
    with pytest.raises(ValueError, match="after its block"):
        next_batch()


@pytest.mark.case("D11")
def test_a_batch_that_does_not_come_is_a_data_error_that_nobody_waits_for_twice(monkeypatch):
    freed, waits = threading.Event(), []
    monkeypatch.setattr(threading.Thread, "join", lambda _, timeout: waits.append(timeout))

    def make(cursor):
        if cursor.batch == 1:
            freed.wait(PATIENCE)
        return StepBatch([], Cursor(cursor.batch + 1))

    with prefetch_batches(make, Cursor(), timeout=0.2) as next_batch:
        assert next_batch().cursor.batch == 1
        for _ in range(2):
            with pytest.raises(DataError, match=r"timeout: .* batch 1 in 0.2 s") as caught:
                next_batch()
        assert caught.value.code == 65
    assert len(threads()) == 1  # it is blocked, and the block was left without it
    assert waits == [0]
    freed.set()
    monkeypatch.undo()


def test_leaving_waits_for_the_batch_in_the_making():
    started, ended = threading.Event(), threading.Event()

    def make(cursor):
        started.set()
        threading.Event().wait(0.1)
        ended.set()
        return StepBatch([], Cursor(cursor.batch + 1))

    with prefetch_batches(make, Cursor(), ahead=1):
        assert started.wait(PATIENCE)
    assert ended.is_set()
    assert not threads()


def test_batches_go_to_the_device_that_was_asked_for():
    with prefetch_batches(make_batch, Cursor(), device="meta") as next_batch:
        parts = next_batch().microbatches
    assert {part[name].device.type for part in parts for name in ("input_ids", "labels")} == {
        "meta"
    }
    assert {part.spans.cu_seqlens.device.type for part in parts} == {"meta"}


def test_a_copy_to_a_cuda_device_begins_after_what_make_batch_did_there(monkeypatch):
    calls = []

    class Stream:
        def __init__(self, device):
            self.device = device

        def wait_stream(self, other):
            calls.append(("wait", other))

    class Event:
        def record(self, stream):
            calls.append(("record", stream.device))

    device = torch.device("cuda:0")
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: ("current", device))
    ends = iter([StepBatch([], Cursor(1)), None])  # a batch without microbatches is one as well
    with prefetch_batches(lambda _: next(ends), Cursor(), device=device) as next_batch:
        assert next_batch().cursor == Cursor(1)
        assert next_batch() is None
    assert calls == [("wait", ("current", device)), ("record", device)]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_batches_that_are_made_on_a_cuda_device_are_whole_when_they_come():
    def make(cursor):
        blank = to_device(make_padding_batch(4, 4096), "cuda")
        torch.cuda._sleep(10**8)  # clock cycles
        whole = map_tensors(blank, lambda x: torch.full_like(x, 7))
        return StepBatch([whole], Cursor(cursor.batch + 1))

    with (
        torch.cuda.stream(torch.cuda.Stream()),
        prefetch_batches(make, Cursor(), device="cuda") as next_batch,
    ):
        for _ in range(4):
            (part,) = next_batch().microbatches
            assert bool((part.labels == 7).all())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_batches_on_a_cuda_device_hold_what_they_hold_on_the_host():
    cursor, device = Cursor(), torch.device("cuda")
    with prefetch_batches(make_batch, cursor, ahead=3, device=device) as next_batch:
        for _ in range(20):
            want, got = make_batch(cursor), next_batch()
            assert {part.labels.device.type for part in got.microbatches} == {"cuda"}
            assert seen(got) == seen(want)
            cursor = want.cursor


@pytest.mark.parametrize(("ahead", "timeout"), [(0, 120.0), (2, 0.0), (2, float("nan"))])
def test_bad_arguments_are_refused(ahead, timeout):
    make, made = counted(1)
    with (
        pytest.raises(ValueError, match="ahead must be at least 1"),
        prefetch_batches(make, Cursor(), ahead=ahead, timeout=timeout),
    ):
        pass
    assert made == []


def test_after_a_jump_batches_come_from_there_and_one_is_made_at_a_time():
    made, busy = [], []

    def make(cursor):
        busy.append(cursor.batch)
        assert len(busy) == 1
        time.sleep(0.001)
        made.append(busy.pop())
        return StepBatch([], Cursor(cursor.batch + 1))

    with prefetch_batches(make, Cursor(0)) as next_batch:
        found = [next_batch(Cursor(at)).cursor.batch for at in (0, 1, 2, 7, 8, 1, 2)]
    assert found == [1, 2, 3, 8, 9, 2, 3]
    assert made[:3] == [0, 1, 2]


def test_a_jump_goes_on_after_the_end_and_after_an_error():
    def make(cursor):
        if cursor.batch == 5:
            raise DataError("five")
        return StepBatch([], Cursor(cursor.batch + 1)) if cursor.batch < 2 else None

    with prefetch_batches(make, Cursor(2)) as next_batch:
        assert next_batch() is None
        with pytest.raises(DataError, match="five"):
            next_batch(Cursor(5))
        assert next_batch(Cursor(1)).cursor.batch == 2
