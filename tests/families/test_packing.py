"""Every `Fit` through one battery: a new one is a row of FITS."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import packings

from trainkit.packing import best_fit, pack_bins, packing_report, sequential

FITS = [best_fit, sequential]


def aligned(lengths, multiple_of):
    return -(-np.asarray(lengths) // multiple_of) * multiple_of


def pieces_of(bins):
    return [piece for row in range(len(bins)) for piece in bins[row]]


@given(packings())
def test_every_token_is_packed_exactly_once(packing):
    lengths, arguments = packing
    expected = {
        "split": lengths,
        "truncate": [min(n, arguments["capacity"]) for n in lengths],
        "drop": [n if n <= arguments["capacity"] else 0 for n in lengths],
    }[arguments["overlong"]]
    bins = pack_bins(lengths, **arguments)
    seen = sorted((d, t) for d, start, n in pieces_of(bins) for t in range(start, start + n))
    assert seen == [(d, t) for d, n in enumerate(expected) for t in range(n)]


@given(packings())
def test_no_row_is_over_capacity_or_empty(packing):
    lengths, arguments = packing
    bins = pack_bins(lengths, **arguments)
    most = arguments["max_documents"] or len(bins.lengths)
    for row in range(len(bins)):
        taken = aligned([n for _, _, n in bins[row]], arguments["multiple_of"])
        assert 0 < taken.sum() <= arguments["capacity"]
        assert len(taken) <= most
    assert (bins.lengths > 0).all()


@given(packings())
def test_rows_keep_corpus_order_and_groups_stay_apart(packing):
    lengths, arguments = packing
    bins = pack_bins(lengths, **arguments)
    assert all(bins[row] == sorted(bins[row]) for row in range(len(bins)))
    numbers = {piece: number for number, piece in enumerate(sorted(pieces_of(bins)))}
    groups = [
        {numbers[piece] // (arguments["group_size"] or len(numbers)) for piece in bins[row]}
        for row in range(len(bins))
    ]
    assert all(len(group) == 1 for group in groups)
    assert [min(group) for group in groups] == sorted(min(group) for group in groups)


@given(packings())
def test_packing_twice_gives_the_same_bins(packing):
    lengths, arguments = packing
    one, two = pack_bins(lengths, **arguments), pack_bins(np.array(lengths, np.int64), **arguments)
    for name in ("offsets", "documents", "starts", "lengths"):
        assert getattr(one, name).dtype == np.int64
        assert np.array_equal(getattr(one, name), getattr(two, name))


@pytest.mark.parametrize("fit", FITS)
def test_a_fit_numbers_its_bins_from_zero_without_gaps(fit):
    lengths = np.random.default_rng(0).integers(1, 33, 500)
    assert np.unique(fit(lengths, 32, max_documents=None)).tolist() == list(
        range(fit(lengths, 32, max_documents=None).max() + 1)
    )


def textbook_best_fit(lengths, capacity):
    bins = []
    for length in sorted(lengths, reverse=True):
        rooms = [capacity - sum(bin_) for bin_ in bins]
        fitting = [(room, number) for number, room in enumerate(rooms) if room >= length]
        if fitting:
            bins[min(fitting)[1]].append(length)
        else:
            bins.append([length])
    return bins


@given(st.integers(1, 30).flatmap(lambda c: st.tuples(st.just(c), st.lists(st.integers(1, c)))))
def test_best_fit_makes_the_bins_of_the_textbook(case):
    capacity, lengths = case
    bins = pack_bins(lengths, capacity, group_size=0)
    mine = sorted(sorted(n for _, _, n in bins[row]) for row in range(len(bins)))
    fills = sorted(sum(bin_) for bin_ in textbook_best_fit(lengths, capacity))
    assert sorted(map(sum, mine)) == fills


def test_sequential_opens_a_row_only_when_the_next_piece_does_not_fit():
    bins = pack_bins([5, 3, 1, 8, 2, 2], 8, fit=sequential)
    assert [[d for d, _, _ in bins[row]] for row in range(len(bins))] == [[0, 1], [2], [3], [4, 5]]


def test_best_fit_comes_close_to_the_lower_bound():
    lengths = np.random.default_rng(0).lognormal(6, 1, 20_000).astype(int).clip(1, 4096)
    assert len(pack_bins(lengths, 4096)) <= 1.001 * lengths.sum() / 4096 + 1


def test_overlong_documents_follow_the_policy():
    cut = {policy: pieces_of(pack_bins([9], 4, overlong=policy)) for policy in ("truncate", "drop")}
    assert cut == {"truncate": [(0, 0, 4)], "drop": []}
    assert sorted(pieces_of(pack_bins([9], 4))) == [(0, 0, 4), (0, 4, 4), (0, 8, 1)]
    with pytest.raises(ValueError, match=r"document 1 has 9 tokens; the capacity is 4"):
        pack_bins([4, 9], 4, overlong="error")


def test_alignment_counts_before_a_piece_is_placed():
    assert len(pack_bins([3, 3, 2], 8, multiple_of=4, group_size=0)) == 2
    assert len(pack_bins([3, 3, 2], 8, group_size=0)) == 1


@given(packings())
def test_the_report_adds_up(packing):
    lengths, arguments = packing
    bins = pack_bins(lengths, **arguments)
    report = packing_report(bins)
    places = report["tokens"] + report["alignment_padding"] + report["row_padding"]
    assert places == report["rows"] * arguments["capacity"]
    assert report["pieces"] == len(pieces_of(bins))
    assert 0 <= report["alignment_padding"] < arguments["multiple_of"] * max(report["pieces"], 1)
    assert report["efficiency"] == (report["tokens"] / places if places else 1.0)


def test_no_documents_make_no_rows():
    assert [len(pack_bins(lengths, 8)) for lengths in ([], [0, 0], np.array([], int))] == [0, 0, 0]


@pytest.mark.parametrize(
    ("lengths", "arguments", "message"),
    [
        ([1], {"capacity": 0}, "capacity must be an integer of at least 1, got 0"),
        ([1], {"capacity": 8.0}, "capacity must be an integer"),
        ([1], {"capacity": 10, "multiple_of": 4}, "take 8 or 12"),
        ([1], {"capacity": 2, "multiple_of": 4}, "take 4"),
        ([1], {"capacity": 8, "multiple_of": 0}, "multiple_of must be"),
        ([1], {"capacity": 8, "group_size": -1}, "group_size must be"),
        ([1], {"capacity": 8, "max_documents": 0}, "max_documents must be"),
        ([1], {"capacity": 8, "overlong": "wrap"}, "overlong must be .*'wrap'"),
        ([1, -2], {"capacity": 8}, "document 1 has length -2"),
        ([1.5], {"capacity": 8}, "must be integers, got float64"),
        ([True], {"capacity": 8}, "must be integers, got bool"),
        ([[1]], {"capacity": 8}, r"one dimension, got shape \(1, 1\)"),
        ([[1], [1, 2]], {"capacity": 8}, "ragged"),
    ],
)
def test_bad_arguments_are_refused_by_name(lengths, arguments, message):
    with pytest.raises(ValueError, match=f"pack_bins: .*{message}"):
        pack_bins(lengths, **arguments)


def test_packing_and_sampling_start_without_torch():
    code = "import sys, trainkit.packing, trainkit.sampling; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("answer", "named"),
    [
        ([0, 0], "put 6 tokens or 2 pieces into one bin of capacity 4"),
        ([-1, 0], "must number its bins from 0 without gaps"),
        ([0, 2], "must number its bins from 0 without gaps"),
        ([0], "for 2 pieces it gave"),
        ([0.0, 1.0], "must return one integer per piece"),
    ],
)
def test_a_fit_s_answer_is_checked(answer, named):
    def mine(*_, **__):
        return np.array(answer)

    with pytest.raises(ValueError, match=f"mine {named}|mine .*{named}"):
        pack_bins([3, 3], 4, fit=mine)
