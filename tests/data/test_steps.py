"""The rows of a step: a function of seed, step and corpus, never of who computes them."""

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import corpus_of, packed, shares

from trainkit.batch import batch_hash, count_valid_tokens
from trainkit.data import eval_batches, step_batch
from trainkit.packing import pack_bins
from trainkit.sampling import rows_of_step
from trainkit.types import Cursor, Share

TENSORS = ("input_ids", "labels", "position_ids", "document_ids", "token_index")
CORPUS = corpus_of(np.random.default_rng(0).integers(1, 30, 200))
BINS = pack_bins(CORPUS.lengths, 32, multiple_of=4)


def tokens_of(batches):
    """All tokens of rows that are not blank, sorted by their index in the step: `[T, 5]`."""
    columns = torch.stack([torch.cat([b[name].flatten() for b in batches]) for name in TENSORS], 1)
    columns = columns[columns[:, -1] >= 0]
    return columns[columns[:, -1].argsort()]


def global_batch(count, *, rows, rows_per_microbatch, step=5, seed=3):
    ranks = [
        step_batch(
            CORPUS,
            BINS,
            Cursor(step),
            rows=rows,
            seed=seed,
            share=Share(rank, count),
            rows_per_microbatch=rows_per_microbatch,
        )
        for rank in range(count)
    ]
    assert {rank.cursor for rank in ranks} == {Cursor(step + 1)}
    assert len({len(rank.microbatches) for rank in ranks}) == 1
    return [batch for rank in ranks for batch in rank.microbatches]


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


def test_steps_walk_through_every_row_once_per_epoch_and_resume_anywhere():
    cursor, seen, hashes = Cursor(), [], []
    arguments = {"rows": 7, "seed": 1, "share": Share(0, 1), "rows_per_microbatch": 7}
    for step in range(len(BINS)):
        chosen = rows_of_step(step, rows_per_step=7, num_rows=len(BINS), seed=1)
        batch = step_batch(CORPUS, BINS, cursor, **arguments)
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
    again = step_batch(CORPUS, BINS, Cursor(batch=4), **arguments)
    assert int(batch_hash(again.microbatches)) == hashes[4]


def test_the_cursor_keeps_what_else_it_holds():
    cursor = Cursor(batch=2, stream=(1, 9))
    batch = step_batch(
        CORPUS, BINS, cursor, rows=2, seed=0, share=Share(0, 1), rows_per_microbatch=1
    )
    assert batch.cursor == attrs.evolve(cursor, batch=3)


@given(packed(), st.integers(1, 9), st.integers(1, 4))
def test_an_evaluation_sees_every_row_once_over_all_ranks(case, count, size):
    corpus, bins = case
    ranks = [
        list(eval_batches(corpus, bins, Share(rank, count), rows_per_batch=size))
        for rank in range(count)
    ]
    batches = [batch for rank in ranks for batch in rank]
    assert {batch.input_ids.shape for batch in batches} == {(size, bins.capacity)}
    whole = list(eval_batches(corpus, bins, Share(0, 1), rows_per_batch=len(bins)))
    assert torch.equal(tokens_of(batches), tokens_of(whole))
    assert len(tokens_of(whole)) == len(bins) * bins.capacity


@given(shares())
def test_microbatches_live_where_they_are_asked_to(share):
    arguments = {"rows": 8, "seed": 0, "share": share, "rows_per_microbatch": 2}
    batch = step_batch(CORPUS, BINS, Cursor(), **arguments, device="meta")
    assert {b.input_ids.device.type for b in batch.microbatches} == {"meta"}
    batches = eval_batches(CORPUS, BINS, share, rows_per_batch=8, device="meta")
    assert {b.input_ids.device.type for b in batches} <= {"meta"}


def test_padding_has_the_id_that_was_asked_for():
    corpus = corpus_of([3])
    bins = pack_bins(corpus.lengths, 8)
    arguments = {"rows": 1, "seed": 0, "share": Share(0, 1), "rows_per_microbatch": 2}
    (batch,) = step_batch(corpus, bins, Cursor(), **arguments, pad_id=7).microbatches
    assert batch.input_ids[0, 3:].tolist() == [7] * 5
    assert batch.input_ids[1].tolist() == [7] * 8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rows": len(BINS) + 1}, f"takes {len(BINS) + 1} rows, the corpus has {len(BINS)}"),
        ({"rows": 2, "share": Share(0, 3)}, "more ranks than rows: 3 ranks .* 2 rows"),
        ({"rows": 2, "rows_per_microbatch": 0}, "rows_per_microbatch must be at least 1"),
        ({"rows": 0}, "rows_per_step=0"),
    ],
)
def test_steps_that_cannot_be_are_refused(arguments, message):
    arguments = {"seed": 0, "share": Share(0, 1), "rows_per_microbatch": 1} | arguments
    with pytest.raises(ValueError, match=message):
        step_batch(CORPUS, BINS, Cursor(), **arguments)


def test_evaluations_that_cannot_be_are_refused_at_once():
    with pytest.raises(ValueError, match="got 0 and part 0 of 1"):
        eval_batches(CORPUS, BINS, Share(0, 1), rows_per_batch=0)
    with pytest.raises(ValueError, match="got 1 and part 2 of 2"):
        eval_batches(CORPUS, BINS, Share(2, 2), rows_per_batch=1)
