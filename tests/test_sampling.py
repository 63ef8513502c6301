"""Which rows make up a step: once per epoch, and the same whoever asks."""

from collections import Counter
from math import factorial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainkit.hashing import key_of
from trainkit.sampling import permute, rows_of_step, share_of_rows
from trainkit.types import Share


@given(st.integers(1, 300), st.integers(0, 2**64 - 1))
def test_permute_is_a_permutation(count, key):
    assert sorted(permute(np.arange(count), count, key).tolist()) == list(range(count))


def test_permute_asks_for_one_index_at_a_time_as_for_all():
    whole = permute(np.arange(50), 50, 7)
    assert [int(permute(i, 50, 7)[0]) for i in range(50)] == whole.tolist()


def test_every_permutation_of_a_few_is_as_likely_as_every_other():
    for count in (2, 3, 4):
        seen = Counter(tuple(permute(np.arange(count), count, key_of(s))) for s in range(2400))
        expected = 2400 / factorial(count)
        assert len(seen) == factorial(count)
        assert all(abs(n - expected) < 5 * expected**0.5 for n in seen.values())


def test_neighbours_are_scattered():
    order = permute(np.arange(20_000), 20_000, key_of(0, "epoch", 0)).astype(float)
    assert abs(np.corrcoef(order[1:], order[:-1])[0, 1]) < 0.03
    assert abs(np.corrcoef(order, np.arange(20_000))[0, 1]) < 0.03


def test_indices_beyond_two_to_the_31_stay_right():
    far = np.arange(2**40 - 1000, 2**40)
    image = permute(far, 2**40, 3)
    assert len(set(image.tolist())) == 1000
    assert image.min() >= 0
    assert 2**38 < image.max() < 2**40
    rows = rows_of_step(2**40, rows_per_step=3, num_rows=2**35, seed=0)
    epoch, first = divmod(3 * 2**40, 2**35)
    assert rows.tolist() == permute(first + np.arange(3), 2**35, key_of(0, "epoch", epoch)).tolist()


@given(st.integers(1, 40), st.integers(1, 17), st.integers(0, 5))
def test_every_row_comes_once_per_epoch(num_rows, rows_per_step, seed):
    steps = -(-3 * num_rows // rows_per_step)
    arguments = {"rows_per_step": rows_per_step, "num_rows": num_rows, "seed": seed}
    stream = np.concatenate([rows_of_step(step, **arguments) for step in range(steps)])
    for epoch in range(3):
        part = stream[epoch * num_rows : (epoch + 1) * num_rows]
        assert sorted(part.tolist()) == list(range(num_rows))


def test_epochs_and_seeds_have_orders_of_their_own():
    def epoch(number, seed):
        return rows_of_step(number, rows_per_step=100, num_rows=100, seed=seed).tolist()

    orders = [epoch(0, 0), epoch(1, 0), epoch(0, 1)]
    assert orders[0] != orders[1] != orders[2] != orders[0]
    assert epoch(0, 0) == orders[0]


@given(st.integers(1, 40), st.integers(1, 5), st.sampled_from([1, 2, 3, 4, 6, 8]))
def test_ranks_share_every_row_once_in_equally_many_microbatches(num_rows, size, count):
    if count > num_rows:
        with pytest.raises(ValueError, match=f"more ranks than rows: {count} ranks.* {num_rows} r"):
            share_of_rows(num_rows, Share(0, count), rows_per_microbatch=size)
        return
    shares = [
        share_of_rows(num_rows, Share(r, count), rows_per_microbatch=size) for r in range(count)
    ]
    assert {share.shape for share in shares} == {(-(-num_rows // (count * size)), size)}
    dealt = np.concatenate(shares).reshape(-1)
    assert dealt[dealt >= 0].tolist() == list(range(num_rows))
    assert all((share >= 0).any() for share in shares)


def test_three_rows_on_two_ranks():
    parts = [share_of_rows(3, Share(rank, 2), rows_per_microbatch=1).tolist() for rank in (0, 1)]
    assert parts == [[[0], [1]], [[2], [-1]]]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: permute([0], 0, 1), "permute: count must be at least 1, got 0"),
        (lambda: permute([3], 3, 1), r"permute: indices must lie in \[0, 3\)"),
        (lambda: permute([-1], 3, 1), r"permute: indices must lie in \[0, 3\)"),
        (lambda: rows_of_step(0, rows_per_step=1, num_rows=0, seed=0), "num_rows=0"),
        (lambda: rows_of_step(0, rows_per_step=0, num_rows=1, seed=0), "rows_per_step=0"),
        (lambda: rows_of_step(-1, rows_per_step=1, num_rows=1, seed=0), "step=-1"),
        (lambda: share_of_rows(4, Share(0, 2), rows_per_microbatch=0), "rows_per_microbatch"),
        (lambda: share_of_rows(4, Share(2, 2), rows_per_microbatch=1), "no part 2 of 2"),
    ],
)
def test_bad_arguments_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_numpy_numbers_are_the_same_numbers():
    rows = rows_of_step(3, rows_per_step=3, num_rows=50, seed=0)
    for step, seed in ((np.int64(3), 0), (3, np.int64(0))):
        again = rows_of_step(step, rows_per_step=3, num_rows=50, seed=seed)
        assert again.tolist() == rows.tolist()
