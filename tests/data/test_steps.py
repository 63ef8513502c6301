"""The rows of a step: a function of seed, step and corpus, never of who computes them."""

from functools import partial

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import corpus_of, packed, shares

from trainkit.batch import batch_hash, collate_bins, count_valid_tokens
from trainkit.data import (
    PackedCorpus,
    concat_corpora,
    make_dataset_batch,
    make_eval_batches,
    make_microbatches,
    make_step_batch,
)
from trainkit.noise import make_token_keys
from trainkit.packing import next_fit, pack_bins, row_costs
from trainkit.sampling import assign_rows, shuffle_epochs
from trainkit.text.corpora import write_corpus
from trainkit.types import Column, Cursor, DataError, DataShard, Sample, Share

TENSORS = ("input_ids", "labels", "position_ids", "document_ids", "token_index")
CORPUS = corpus_of(np.random.default_rng(0).integers(1, 30, 200))
BINS = pack_bins(CORPUS.lengths, 32, multiple_of=4)
PACKED = PackedCorpus(CORPUS, BINS)
NAMED = PackedCorpus(CORPUS, BINS, {"a": 40, "b": 0, "c": 7, "d": len(BINS) - 47})


def rows_of(rows, seed=0):
    return shuffle_epochs(len(BINS), rows_per_step=rows, seed=seed)


def tokens_of(batches):
    """All tokens of rows that are not blank, sorted by their index in the step: `[T, 5]`."""
    columns = torch.stack([torch.cat([b[name].flatten() for b in batches]) for name in TENSORS], 1)
    columns = columns[columns[:, -1] >= 0]
    return columns[columns[:, -1].argsort()]


def global_batch(count, *, rows, rows_per_microbatch, step=5, packed=PACKED, **more):
    ranks = [
        make_step_batch(
            packed,
            rows if callable(rows) else rows_of(rows, seed=3),
            Cursor(step),
            data_shard=DataShard(Share(rank, count)),
            rows_per_microbatch=rows_per_microbatch,
            **more,
        )
        for rank in range(count)
    ]
    assert {rank.cursor for rank in ranks} == {Cursor(step + 1)}
    assert len({len(rank.microbatches) for rank in ranks}) == 1
    return [batch for rank in ranks for batch in rank.microbatches]


def test_the_noise_of_a_step_is_that_of_its_number():
    for step in (5, 6):
        for batch in global_batch(2, rows=8, rows_per_microbatch=2, step=step, noise_seed=1):
            keys = make_token_keys(batch.token_index, seed=1, step=step)
            assert torch.equal(batch["noise_key"], keys)


@pytest.mark.case("X7")
@pytest.mark.parametrize("rows", [8, 13])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize("size", [1, 3])
def test_a_step_is_the_same_for_every_number_of_ranks(rows, count, size):
    whole = global_batch(1, rows=rows, rows_per_microbatch=rows)
    assert len(whole) == 1
    parts = global_batch(count, rows=rows, rows_per_microbatch=size)
    assert {batch.input_ids.shape for batch in parts} == {(size, 32)}
    assert torch.equal(tokens_of(parts), tokens_of(whole))
    assert count_valid_tokens(parts) == count_valid_tokens(whole)
    assert batch_hash(parts) == batch_hash(whole)


def work_of(batches):
    """The cost of the rows of batches: the squares of their spans, row padding left out."""
    ids = torch.cat([batch.document_ids for batch in batches])
    rows = torch.where(ids < -1, -2 - ids, ids)  # what aligns a piece is in its span
    return sum(int((row == i).sum()) ** 2 for row in rows for i in range(int(row.max()) + 1))


@pytest.mark.parametrize("count", [1, 2, 4, 8])
@pytest.mark.parametrize("size", [1, 3])
def test_what_tokens_carry_does_not_depend_on_who_computes_them(count, size):
    batches_of = partial(global_batch, rows=24, noise_seed=1, packed=NAMED)
    whole = batches_of(1, rows_per_microbatch=24)
    parts = batches_of(count, rows_per_microbatch=size)
    for name in ("noise_key", "source"):
        pairs = [
            sorted(
                zip(
                    torch.cat([b.token_index.flatten() for b in batches]).tolist(),
                    torch.cat([b[name].flatten() for b in batches]).tolist(),
                    strict=True,
                )
            )
            for batches in (whole, parts)
        ]
        assert [pair for pair in pairs[0] if pair[0] >= 0] == [p for p in pairs[1] if p[0] >= 0]


def test_ranks_do_equal_work():
    parts = global_batch(4, rows=32, rows_per_microbatch=8)
    work = [work_of([part]) for part in parts]
    assert max(work) * len(work) / sum(work) - 1 < 0.02
    contiguous = row_costs(BINS)[rows_of(32, seed=3)(5)].reshape(4, 8).sum(1)
    assert contiguous.max() * 4 / contiguous.sum() - 1 > 0.05


def test_every_token_says_which_source_its_row_is_of():
    chosen = rows_of(6, seed=3)(5)
    parts = global_batch(2, rows=6, rows_per_microbatch=4, packed=NAMED)
    for part in parts:
        for row in range(4):
            index = int(part.token_index[row, 0])
            want = NAMED.source_of(chosen[index // 32]) if index >= 0 else -1
            expected = torch.where(part.document_ids[row] < 0, -1, int(want))
            assert torch.equal(part["source"][row], expected)
    assert {int(x) for part in parts for x in part["source"].unique()} == {-1, 0, 2, 3}


@pytest.mark.parametrize("count", [1, 2, 3])
def test_rows_may_come_from_any_function_of_the_number_of_the_batch(count):
    parts = global_batch(count, rows=lambda batch: [batch, 7, batch + 1], rows_per_microbatch=1)
    got = tokens_of(parts)[:, 0].reshape(3, 32)
    want = collate_bins(CORPUS, BINS, [5, 7, 6]).input_ids
    assert torch.equal(got, want)


def test_microbatches_are_those_collated_one_by_one():
    chosen = rows_of(7, seed=3)(5)
    parts = global_batch(2, rows=7, rows_per_microbatch=2)
    costs = row_costs(BINS)[chosen]
    places = [
        where
        for rank in (0, 1)
        for where in assign_rows(7, Share(rank, 2), rows_per_microbatch=2, costs=costs)
    ]
    for part, where in zip(parts, places, strict=True):
        mine = np.where(where < 0, -1, chosen[where])
        alone = collate_bins(CORPUS, BINS, mine, row_positions=where)
        for name in TENSORS:
            assert torch.equal(part[name], alone[name]), name
        assert torch.equal(part.spans.cu_seqlens, alone.spans.cu_seqlens)
        assert part.spans.lengths.tolist() == alone.spans.lengths.tolist()


@pytest.mark.case("D4")
def test_a_file_that_was_cut_ends_the_run_with_an_error_instead_of_a_signal(tmp_path):
    path = tmp_path / "a.tokens"
    corpus = write_corpus(path, [np.arange(30_000) % 500], vocab_size=500)
    packed = PackedCorpus(corpus, pack_bins(corpus.lengths, 32))
    make_microbatches(packed, [3, 1], rows_per_microbatch=2)
    with path.open("r+b") as file:
        file.truncate(8192)
    for batches in (
        lambda: make_microbatches(packed, [3, 1], rows_per_microbatch=2),
        lambda: list(make_eval_batches(packed, rows_per_batch=4)),
    ):
        with pytest.raises(DataError, match=r"a.tokens: the file has 8192 bytes"):
            batches()


def test_a_step_looks_only_at_the_files_that_it_reads(tmp_path):
    paths = [tmp_path / f"{name}.tokens" for name in "abc"]
    documents = [np.arange(3000) % 500]
    parts = [write_corpus(path, documents, vocab_size=500) for path in paths]
    nothing = corpus_of([])
    corpus = concat_corpora([nothing, parts[0], nothing, parts[1], parts[2], nothing])
    bins = pack_bins(corpus.lengths, 32, fit=next_fit)
    source = np.array([bins[row][0][0] for row in range(len(bins))])
    rows = [int(np.flatnonzero(source == number)[5]) for number in range(3)]  # one of each file

    def step(*chosen):
        make_microbatches(PackedCorpus(corpus, bins), chosen, rows_per_microbatch=4)

    with paths[1].open("r+b") as file:
        file.truncate(4096)
    step(rows[0], rows[2])
    for chosen in ([rows[1]], rows, rows[::-1]):
        with pytest.raises(DataError, match=r"b.tokens: the file has 4096 bytes"):
            step(*chosen)


def test_steps_walk_through_every_row_once_per_epoch_and_resume_anywhere():
    cursor, seen, hashes = Cursor(), [], []
    rows_at = rows_of(7, seed=1)
    for step in range(len(BINS)):
        chosen = rows_at(step)
        batch = make_step_batch(PACKED, rows_at, cursor, rows_per_microbatch=7)
        first_tokens = batch.microbatches[0].input_ids[:, 0].tolist()
        want = [
            int(CORPUS.tokens[CORPUS.offsets[document] + start])
            for document, start, _ in (BINS[row][0] for row in chosen.tolist())
        ]
        assert first_tokens == want
        seen += chosen.tolist()
        hashes.append(int(batch_hash(batch.microbatches)))
        cursor = batch.cursor
    assert sorted(seen) == sorted(list(range(len(BINS))) * 7)
    assert len(set(hashes)) == len(hashes)
    again = make_step_batch(PACKED, rows_at, Cursor(batch=4), rows_per_microbatch=7)
    assert int(batch_hash(again.microbatches)) == hashes[4]


def test_the_cursor_keeps_what_else_it_holds():
    cursor = Cursor(batch=2, stream=(1, 9))
    batch = make_step_batch(PACKED, rows_of(2), cursor, rows_per_microbatch=1)
    assert batch.cursor == attrs.evolve(cursor, batch=3)


def test_a_microbatch_far_beyond_the_rows_pads_to_the_rows():
    for count in (1, 3):
        parts = global_batch(count, rows=4, rows_per_microbatch=10**12)
        assert {part.input_ids.shape for part in parts} == {(4, 32)}
        assert batch_hash(parts) == batch_hash(global_batch(1, rows=4, rows_per_microbatch=4))
        data_shard = DataShard(Share(0, count))
        (found,) = make_eval_batches(PACKED, data_shard=data_shard, rows_per_batch=10**12)
        assert found.input_ids.shape == (len(BINS), 32)


@given(packed(), st.integers(1, 9), st.integers(1, 4))
def test_an_evaluation_sees_every_row_once_over_all_ranks(case, count, size):
    case, bins = PackedCorpus(*case), case[1]
    ranks = [
        list(make_eval_batches(case, data_shard=DataShard(Share(rank, count)), rows_per_batch=size))
        for rank in range(count)
    ]
    batches = [batch for rank in ranks for batch in rank]
    width = min(size, len(bins))
    assert {batch.input_ids.shape for batch in batches} == {(width, bins.capacity)}
    whole = list(make_eval_batches(case, rows_per_batch=len(bins)))
    assert torch.equal(tokens_of(batches), tokens_of(whole))
    assert len(tokens_of(whole)) == len(bins) * bins.capacity


@pytest.mark.parametrize("count", [1, 3])
def test_every_token_of_an_evaluation_says_which_source_its_row_is_of(count):
    for rank in range(count):
        data_shard = DataShard(Share(rank, count))
        for part in make_eval_batches(NAMED, data_shard=data_shard, rows_per_batch=4):
            sources = torch.from_numpy(NAMED.source_of(np.arange(len(BINS))))
            rows = sources[part.token_index.clamp(min=0) // 32]
            assert torch.equal(part["source"], torch.where(part.document_ids < 0, -1, rows))
    (plain, *_) = make_eval_batches(PACKED, rows_per_batch=4)
    assert plain.extra == {}


@given(shares())
def test_microbatches_live_where_they_are_asked_to(share):
    data_shard = DataShard(share)
    batch = make_step_batch(
        NAMED, rows_of(8), Cursor(), data_shard=data_shard, rows_per_microbatch=2, device="meta"
    )
    assert {b.input_ids.device.type for b in batch.microbatches} == {"meta"}
    batches = make_eval_batches(NAMED, data_shard=data_shard, rows_per_batch=8, device="meta")
    assert {b[name].device.type for b in batches for name in ("labels", "source")} <= {"meta"}


def test_padding_has_the_id_that_was_asked_for():
    corpus = corpus_of([5, 5, 5])
    packed = PackedCorpus(corpus, pack_bins(corpus.lengths, 8))
    _, batch = make_microbatches(packed, [0, 2, 1], rows_per_microbatch=2, pad_id=7)
    assert batch.input_ids[0, 5:].tolist() == [7] * 3
    assert batch.input_ids[1].tolist() == [7] * 8


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (range(len(BINS) + 1), f"takes {len(BINS) + 1} rows, the corpus has {len(BINS)}"),
        ([], "integers in one dimension"),
        ([[1]], r"integers in one dimension, got int64 \(1, 1\)"),
        ([0.5], "integers in one dimension, got float64"),
        ([-1], f"from 0 to {len(BINS) - 1}, got -1 to -1"),
        ([len(BINS)], "from 0 to"),
    ],
)
def test_rows_that_cannot_be_are_refused(rows, message):
    with pytest.raises(ValueError, match=message):
        make_microbatches(PACKED, rows, rows_per_microbatch=1)


def test_microbatches_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match=r"more ranks than rows: 3 ranks .* 2 rows"):
        make_microbatches(PACKED, [1, 2], data_shard=DataShard(Share(0, 3)), rows_per_microbatch=1)
    with pytest.raises(ValueError, match="rows_per_microbatch must be at least 1"):
        make_microbatches(PACKED, [1, 2], rows_per_microbatch=0)


def test_evaluations_that_cannot_be_are_refused_at_once():
    with pytest.raises(ValueError, match="rows_per_batch must be at least 1, got 0"):
        make_eval_batches(PACKED, rows_per_batch=0)
    with pytest.raises(ValueError, match="no part 2 of 2"):
        make_eval_batches(PACKED, data_shard=DataShard(Share(2, 2)), rows_per_batch=1)


def test_a_rank_without_rows_evaluates_a_blank_batch_that_says_its_source():
    data_shard = DataShard(Share(len(BINS), len(BINS) + 1))
    (batch,) = make_eval_batches(NAMED, data_shard=data_shard, rows_per_batch=2)
    assert (batch["source"] == -1).all()
    assert (batch.labels == -100).all()


# ---------------------------------------------------------------- a dataset that is read in strides


class Read(torch.utils.data.Dataset):
    """Items of a length of their own, one of them empty; writes down which were read."""

    def __init__(self, count=21):
        self.items = [np.full(n % 9, n + 1) for n in range(count)]
        self.read = []

    def __len__(self):
        return len(self.items)

    def __getitem__(self, number):
        self.read.append(number)
        return torch.from_numpy(self.items[number])


def strided(count, *, rows_per_microbatch, rows=8, step=2, dataset=None, **more):
    """The microbatches of a global batch on every rank, and the items that each has read."""
    batches, read = [], []
    for rank in range(count):
        dataset_ = dataset or Read()
        batch = make_dataset_batch(
            dataset_,
            shuffle_epochs(len(dataset_), rows_per_step=rows, seed=3),
            Cursor(step),
            capacity=12,
            data_shard=DataShard(Share(rank, count)),
            rows_per_microbatch=rows_per_microbatch,
            **more,
        )
        assert batch.cursor == Cursor(step + 1)
        batches.append(batch.microbatches)
        read.append(getattr(dataset_, "read", None))
    assert len({len(own) for own in batches}) == 1
    return [batch for own in batches for batch in own], read


@pytest.mark.parametrize("rows", [8, 13])
@pytest.mark.parametrize("count", [1, 2, 3, 8])
@pytest.mark.parametrize("size", [1, 3])
def test_ranks_read_strides_of_a_dataset_and_one_global_batch(rows, count, size):
    for step in range(5):  # one straddles two epochs
        of_step = partial(strided, rows=rows, step=step, noise_seed=1)
        whole, [every] = of_step(1, rows_per_microbatch=rows)
        parts, read = of_step(count, rows_per_microbatch=size)
        assert read == [every[rank::count] for rank in range(count)]
        assert {batch.input_ids.shape for batch in parts} == {(size, 12)}
        assert torch.equal(tokens_of(parts), tokens_of(whole))
        assert count_valid_tokens(parts) == count_valid_tokens(whole)
        assert batch_hash(parts) == batch_hash(whole)
        for batch in parts:
            keys = make_token_keys(batch.token_index, seed=1, step=step)
            assert torch.equal(batch["noise_key"], keys)


def test_an_item_is_a_row_whose_place_in_the_step_is_that_of_the_item():
    items = shuffle_epochs(21, rows_per_step=8, seed=3)(2)
    [batch], _ = strided(1, rows_per_microbatch=8)
    for place, (number, row) in enumerate(zip(items.tolist(), batch.input_ids, strict=True)):
        length = number % 9
        assert row.tolist() == [number + 1] * length + [0] * (12 - length)
        if length:
            assert batch.token_index[place, 0] == 12 * place
            assert batch.labels[place].tolist() == [number + 1] * (length - 1) + [-100] * (
                13 - length
            )
        else:
            assert (batch.document_ids[place] == -1).all()


def test_a_strided_run_goes_on_at_a_cursor_bit_for_bit_on_other_ranks():
    def run(cursors, count):
        return [batch_hash(strided(count, rows_per_microbatch=2, step=step)[0]) for step in cursors]

    assert run(range(6), 1) == run(range(3), 2) + run(range(3, 6), 4)


def test_a_dataset_of_nothing_but_empty_items_is_blank_rows():
    batches, _ = strided(2, rows_per_microbatch=2, rows=4, step=0, dataset=[[]] * 4)
    assert all(batch.input_ids.shape == (2, 12) for batch in batches)
    assert count_valid_tokens(batches) == 0
    assert all((batch.token_index == -1).all() for batch in batches)


def test_items_are_encoded_weighed_and_cut():
    dataset = [{"ids": [1, 2, 3], "w": [0.0, 0.5, 0.25]}] * 3 + [{"ids": [5] * 20, "w": [1.0] * 20}]

    def encode(item):
        ids = np.array(item["ids"])
        return Sample(ids, ids > 2, {"w": item["w"]})

    [batch], _ = strided(
        1,
        rows_per_microbatch=4,
        rows=4,
        step=0,
        dataset=dataset,
        encode=encode,
        columns={"w": Column("float32")},
        overlong="truncate",
    )
    short = batch.input_ids[:, 0] == 1
    assert batch.labels[short][0].tolist()[:3] == [-100, 3, -100]
    assert batch["w"][short][0].tolist()[:3] == [0.5, 0.25, 0.0]
    assert batch.input_ids[~short].tolist() == [[5] * 12]


one_row = partial(strided, 2, rows_per_microbatch=1, rows=4, step=0)


@pytest.mark.parametrize(
    ("read", "error", "message"),
    [
        (
            partial(one_row, dataset=[[1] * 13] * 4),
            DataError,
            "item [0-3] has 13 tokens; the capacity is 12",
        ),
        (
            partial(one_row, dataset=[[0.5]] * 4),
            DataError,
            "item [0-3] must be integers in one dimension",
        ),
        (
            partial(one_row, dataset=[[7]] * 4, vocab_size=7),
            DataError,
            r"item [0-3] has token 7 at 0, outside \[0, 7\)",
        ),
        (
            partial(one_row, dataset=[[1]] * 4, overlong="split"),
            ValueError,
            'overlong must be "error" or "truncate"',
        ),
        (
            partial(one_row, dataset=[[1]] * 4, rows=1),
            ValueError,
            "2 ranks read different items, and .* has 1;",
        ),
        (
            partial(one_row, dataset=[[1]] * 4, rows_per_microbatch=0),
            ValueError,
            "rows_per_microbatch",
        ),
    ],
)
def test_a_dataset_that_cannot_be_read_is_refused_by_the_item(read, error, message):
    with pytest.raises(error, match=message):
        read()


def test_what_a_dataset_raises_says_which_item_and_items_that_are_none_are_refused():
    with pytest.raises(KeyError) as caught:
        strided(1, rows_per_microbatch=1, dataset=[{}] * 9, encode=lambda item: item["ids"])
    assert any("while reading item" in note for note in caught.value.__notes__)
    with pytest.raises(ValueError, match=r"indices must lie in \[0, 4\), got 0 to 4"):
        make_dataset_batch([[1]] * 4, lambda _: [0, 4], Cursor(), capacity=4, rows_per_microbatch=1)
