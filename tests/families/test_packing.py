"""Every `Fit` through one battery: a new one is a row of FITS."""

import resource
import subprocess
import sys
import tracemalloc
from functools import partial
from unittest import mock

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.colors import to_rgba
from strategies import packings

from trainkit.packing import (
    best_fit,
    first_fit,
    make_balanced_fit,
    next_fit,
    pack_bins,
    report_packing,
    row_costs,
)
from trainkit.packing.fits import read_only, with_version
from trainkit.packing.pieces import survey, write_pieces
from trainkit.sampling import assign_rows, buffer_sorted_order, permute, shuffle_blocks
from trainkit.tools.pictures.packing import _THIN, plot_packing
from trainkit.types import Share

FITS = [best_fit, first_fit, next_fit, make_balanced_fit(1), make_balanced_fit(4)]


def aligned(lengths, multiple_of):
    return -(-np.asarray(lengths) // multiple_of) * multiple_of


def pieces_of(bins):
    return [piece for row in range(len(bins)) for piece in bins[row]]


@pytest.mark.case("P7")
@given(packings())
def test_every_token_is_packed_exactly_once(packing):
    lengths, capacity = packing.lengths, packing.capacity
    expected = {
        "split": lengths,
        "truncate": [min(n, capacity) for n in lengths],
        "drop": [n if n <= capacity else 0 for n in lengths],
    }[packing.overlong]
    bins = packing.pack()
    seen = sorted((d, t) for d, start, n in pieces_of(bins) for t in range(start, start + n))
    assert seen == [(d, t) for d, n in enumerate(expected) for t in range(n)]


@pytest.mark.case("P7")
@given(packings())
def test_no_row_is_over_capacity_or_empty(packing):
    bins = packing.pack()
    most = packing.max_documents or len(bins.lengths)
    for row in range(len(bins)):
        taken = aligned([n for _, _, n in bins[row]], packing.multiple_of)
        assert 0 < taken.sum() <= packing.capacity
        assert len(taken) <= most
    assert (bins.lengths > 0).all()


@given(packings())
def test_rows_keep_corpus_order_and_groups_stay_apart(packing):
    bins = packing.pack()
    assert all(bins[row] == sorted(bins[row]) for row in range(len(bins)))
    if packing.seed is not None:
        return  # what a group is then, the tests of the seed say
    numbers = {piece: number for number, piece in enumerate(sorted(pieces_of(bins)))}
    groups = [
        {numbers[piece] // (packing.group_size or len(numbers)) for piece in bins[row]}
        for row in range(len(bins))
    ]
    assert all(len(group) == 1 for group in groups)
    assert [min(group) for group in groups] == sorted(min(group) for group in groups)


@given(packings())
def test_packing_twice_gives_the_same_bins(packing):
    array = np.array(packing.lengths, np.int64)
    one, two = packing.pack(), attrs.evolve(packing, lengths=array).pack()
    for name in ("offsets", "documents", "starts", "lengths"):
        assert getattr(one, name).dtype == np.int64
        assert np.array_equal(getattr(one, name), getattr(two, name))


@pytest.mark.parametrize("fit", FITS)
def test_a_fit_numbers_its_bins_from_zero_without_gaps(fit):
    lengths = np.random.default_rng(0).integers(1, 33, 500)
    assert np.unique(fit(lengths, 32, max_documents=None)).tolist() == list(
        range(fit(lengths, 32, max_documents=None).max() + 1)
    )


def cases(max_capacity=30):
    """(capacity, lengths that fit, limit of pieces)."""
    return st.integers(1, max_capacity).flatmap(
        lambda capacity: st.tuples(
            st.just(capacity),
            st.lists(
                st.integers(1, capacity) | st.sampled_from([1, capacity // 2 + 1]), max_size=30
            ),
            st.sampled_from([None, None, 1, 2, 3, 5]),
        )
    )


def textbook(lengths, capacity, limit, choose):
    """Longest first, ties in arrival order, each into the bin that `choose` takes of those with
    room: the bin of each piece.
    """
    fills, counts, bin_of = [], [], [0] * len(lengths)
    for piece in sorted(range(len(lengths)), key=lambda piece: -lengths[piece]):
        rooms = [
            (capacity - fill, number)
            for number, fill in enumerate(fills)
            if fill + lengths[piece] <= capacity and counts[number] < (limit or len(lengths))
        ]
        if rooms:
            bin_of[piece] = choose(rooms)[1]
        else:
            bin_of[piece] = len(fills)
            fills.append(0)
            counts.append(0)
        fills[bin_of[piece]] += lengths[piece]
        counts[bin_of[piece]] += 1
    return bin_of, fills


@given(cases())
def test_best_fit_makes_the_bins_of_the_textbook(case):
    capacity, lengths, _ = case
    mine = np.bincount(best_fit(lengths, capacity, max_documents=None), lengths)
    assert sorted(mine) == sorted(textbook(lengths, capacity, None, choose=min)[1])


@given(cases())
def test_first_fit_is_the_textbook_bin_for_bin(case):
    capacity, lengths, limit = case
    expected, _ = textbook(lengths, capacity, limit, choose=lambda rooms: min(rooms, key=number_of))
    assert first_fit(lengths, capacity, max_documents=limit).tolist() == expected


def number_of(room_and_number):
    return room_and_number[1]


def test_first_fit_is_the_textbook_on_many_documents():
    lengths = np.random.default_rng(0).lognormal(3, 1.5, 2000).astype(int).clip(1, 100).tolist()
    for limit in (None, 3):
        expected, _ = textbook(lengths, 100, limit, choose=lambda rooms: min(rooms, key=number_of))
        assert first_fit(lengths, 100, max_documents=limit).tolist() == expected


def test_sequential_opens_a_row_only_when_the_next_piece_does_not_fit():
    bins = pack_bins([5, 3, 1, 8, 2, 2], 8, fit=next_fit)
    assert [[d for d, _, _ in bins[row]] for row in range(len(bins))] == [[0, 1], [2], [3], [4, 5]]


@given(cases())
def test_sequential_is_the_textbook_bin_for_bin(case):
    capacity, lengths, limit = case
    bins = [[]]
    for piece, length in enumerate(lengths):
        if sum(lengths[p] for p in bins[-1]) + length > capacity or len(bins[-1]) == limit:
            bins.append([])
        bins[-1].append(piece)
    expected = [number for number, pieces in enumerate(bins) for _ in pieces]
    assert next_fit(lengths, capacity, max_documents=limit).tolist() == expected


def test_best_fit_comes_close_to_the_lower_bound():
    lengths = np.random.default_rng(0).lognormal(6, 1, 20_000).astype(int).clip(1, 4096)
    assert len(pack_bins(lengths, 4096)) <= 1.001 * lengths.sum() / 4096 + 1


def test_overlong_documents_follow_the_policy():
    cut = {policy: pieces_of(pack_bins([9], 4, overlong=policy)) for policy in ("truncate", "drop")}
    assert cut == {"truncate": [(0, 0, 4)], "drop": []}
    assert sorted(pieces_of(pack_bins([9], 4))) == [(0, 0, 4), (0, 4, 4), (0, 8, 1)]
    with pytest.raises(
        ValueError, match=r"document 1 has 9 tokens; the capacity is 4: .*--row-length"
    ):
        pack_bins([4, 9], 4, overlong="error")


def test_alignment_counts_before_a_piece_is_placed():
    assert len(pack_bins([3, 3, 2], 8, multiple_of=4, group_size=0)) == 2
    assert len(pack_bins([3, 3, 2], 8, group_size=0)) == 1


def emptiest_first(lengths, num_bins, capacity, limit):
    """Longest first into the emptiest bin; None if one goes over the capacity."""
    fills, counts, bin_of = [0] * num_bins, [0] * num_bins, [0] * len(lengths)
    for piece in sorted(range(len(lengths)), key=lambda piece: -lengths[piece]):
        allowed = [b for b in range(num_bins) if counts[b] < (limit or len(lengths))]
        chosen = min(allowed, key=lambda b: (fills[b], b), default=None)
        if chosen is None or fills[chosen] + lengths[piece] > capacity:
            return None
        bin_of[piece] = chosen
        fills[chosen] += lengths[piece]
        counts[chosen] += 1
    return bin_of


@given(cases(), st.integers(1, 4))
def test_balanced_takes_the_fewest_multiples_of_its_rows(case, rows):
    capacity, lengths, limit = case
    tried = (
        emptiest_first(lengths, k * rows, capacity, limit)
        for k in range(1, len(lengths) // rows + 1)
    )
    expected = next((bins for bins in tried if bins is not None), None)
    if expected is None:
        with pytest.raises(ValueError, match=r"balanced: .* pieces .*take group_size=0"):
            make_balanced_fit(rows)(lengths, capacity, max_documents=limit)
    else:
        assert make_balanced_fit(rows)(lengths, capacity, max_documents=limit).tolist() == expected


def test_balanced_passes_over_the_emptiest_bin_when_it_holds_its_limit():
    found = make_balanced_fit(2)(np.array([9, 1, 1, 1, 1]), 12, max_documents=3)
    assert found.tolist() == [0, 1, 1, 1, 0]


def test_balanced_finds_its_bins_far_from_the_lower_bound():
    # Seven twelfths of a row each: the bound says 7 rows of 12, and every row holds one.
    assert len(pack_bins([7] * 3000, 12, fit=make_balanced_fit(8), group_size=0)) == 3000
    assert len(pack_bins([5] * 2999, 12, fit=make_balanced_fit(10), group_size=0)) == 1500


def test_balanced_rows_are_near_equal():
    lengths = np.random.default_rng(0).lognormal(4, 1, 5000).astype(int).clip(1, 1000)
    bins = pack_bins(lengths, 4096, fit=make_balanced_fit(16), group_size=0)
    tokens = np.add.reduceat(bins.lengths, bins.offsets[:-1])
    assert len(bins) % 16 == 0
    assert tokens.max() - tokens.min() <= 0.01 * tokens.mean()


def test_balanced_refuses_rows_that_are_no_number_of_rows():
    for rows in (0, -1, 2.0, True):
        with pytest.raises(ValueError, match="rows must be an integer of at least 1"):
            make_balanced_fit(rows)


def test_fits_have_names_and_versions_that_tell_them_apart():
    assert len({fit.__name__ for fit in FITS}) == len(FITS)
    assert {fit.version for fit in FITS} == {1}
    assert with_version(7)(lambda *_, **__: None).version == 7


@pytest.mark.parametrize("fit", FITS)
def test_a_fit_refuses_lengths_that_no_bin_takes(fit):
    for lengths in ([3, 9], [0, 3], [-1]):
        with pytest.raises(ValueError, match=r"lengths must lie between 1 and the capacity, 8"):
            fit(np.array(lengths), 8, max_documents=None)


NO_INTEGERS = [[1.7], [True], ["1"], [2**70], np.array([2**63], np.uint64), [[1], [1, 2]]]
TAKES_INTEGERS = {
    **{fit.__name__: partial(fit, capacity=8, max_documents=None) for fit in FITS[:-1]},
    "pack_bins": partial(pack_bins, capacity=8),
    "report_packing": partial(report_packing, pack_bins([1], 8)),
    "permute": partial(permute, count=8, key=0),
    "buffer_sorted_order": partial(
        buffer_sorted_order, keys=np.arange(8), buffer_size=4, pack_size=2, seed=0
    ),
    "shuffle_blocks": lambda x: shuffle_blocks(x, block=1, rows_per_step=1, seed=0),
    "assign_rows": lambda x: assign_rows(1, Share(0, 1), rows_per_microbatch=1, costs=x),
}


@pytest.mark.parametrize("name", TAKES_INTEGERS)
def test_what_is_no_integer_is_refused_and_not_cut_off(name):
    TAKES_INTEGERS[name](np.array([1], np.uint64))
    for values in NO_INTEGERS:
        with pytest.raises(ValueError, match=r"integers|below 2\^63|has \d+ tokens"):
            TAKES_INTEGERS[name](values)


@pytest.mark.parametrize("fit", FITS)
def test_a_fit_refuses_a_limit_of_pieces_that_is_none(fit):
    for limit in (0, 1.5, True):
        with pytest.raises(ValueError, match="max_documents must be an integer of at least 1"):
            fit([1], 8, max_documents=limit)
    with pytest.raises(ValueError, match="one dimension"):
        fit([[1]], 8, max_documents=None)


@given(cases(), st.integers(0, 2**20 - 1))
def test_few_and_long_pieces_get_the_same_bins_as_short_ones(case, rest):
    """Lengths and capacity times 2^20: tables by length would be longer than all else."""
    capacity, lengths, limit = case
    if not lengths:
        return
    longer = np.array(lengths) << 20, (capacity << 20) + rest
    for fit in FITS[:-1]:
        found, want = fit(*longer, max_documents=limit), fit(lengths, capacity, max_documents=limit)
        assert found.tolist() == want.tolist()


@pytest.mark.parametrize("fit", FITS[:-1])
def test_memory_goes_by_the_documents_and_not_by_their_length(fit):
    fit([3 << 20], 1 << 30, max_documents=None)  # compiled now
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert fit([1, 1 << 28, 7], 1 << 30, max_documents=None).tolist() == [0, 0, 0]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB


# FAULTS.md, P7: 0, 1, the capacity, one more, all equal, one huge.
EXTREMES = [[0], [1], [8], [9], [0, 1, 8, 9], [7] * 20, [1] * 20, [5, 8000, 3], [8, 0, 16, 0, 1]]


@pytest.mark.parametrize("fit", [best_fit, first_fit, next_fit, make_balanced_fit(1)])
@pytest.mark.parametrize("lengths", EXTREMES, ids=str)
def test_extreme_lengths_are_packed_whole(fit, lengths):
    for dtype in (np.int64, np.int32, np.uint16):
        bins = pack_bins(np.array(lengths, dtype), 8, fit=fit)
        pieces = sorted(pieces_of(bins))
        assert [d for d, n in enumerate(lengths) for _ in range(0, n, 8)] == [d for d, *_ in pieces]
        assert np.bincount(bins.documents, bins.lengths, len(lengths)).tolist() == lengths
        assert np.add.reduceat(bins.lengths, bins.offsets[:-1]).max(initial=0) <= 8


MOST = (1 << 31) - 1


def peak_of(call):
    """The most bytes of arrays that a call holds at a time."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_lengths_beyond_32_bits_are_packed():
    bins = pack_bins([MOST, 2, MOST - 2], MOST, fit=next_fit)
    assert [bins[row] for row in range(2)] == [[(0, 0, MOST)], [(1, 0, 2), (2, 0, MOST - 2)]]
    assert row_costs(bins).tolist() == [MOST**2, 4 + (MOST - 2) ** 2]
    for fit in (best_fit, first_fit, next_fit, make_balanced_fit(1)):
        bins = pack_bins([1 << 34, 5, 9], 1 << 20, fit=fit)
        assert bins.starts.max() == (1 << 34) - (1 << 20)
    assert pack_bins([1 << 40, 5], 8, overlong="truncate").lengths.tolist() == [8, 5]
    assert pack_bins([1 << 40, 5], 8, overlong="drop").documents.tolist() == [1]


@pytest.mark.parametrize("fit", [best_fit, first_fit, next_fit, make_balanced_fit(1)])
def test_no_table_is_as_long_as_the_capacity(fit):
    def pack():
        bins = pack_bins([5, 1, 7], MOST, fit=fit)
        assert len(bins) == 1
        assert row_costs(bins).tolist() == [75]

    pack()  # what is compiled first is no table
    assert peak_of(pack) < 1 << 20


@pytest.mark.parametrize("lengths", [[3, 1 << 40], [3, 1 << 34] + [1 << 30] * 3, [1 << 39] * 9])
def test_too_many_pieces_are_refused_before_memory_is_asked_for(lengths):
    longest = lengths.index(max(lengths))
    named = f"more than 2\\^31 - 1 pieces of capacity 8; .*document {longest}, has {max(lengths)}"

    def pack():
        with pytest.raises(ValueError, match=named):
            pack_bins(lengths, 8)

    if max(lengths) == 1 << 34:  # exactly the most, and more by what follows
        assert survey(read_only(np.array(lengths)), 1, 1 << 40)[2] == MOST + 1
        assert survey(read_only(np.array([8, (MOST - 1) * 8])), 8, 1 << 40)[2] == MOST
        assert survey(read_only(np.array([9, (MOST - 1) * 8])), 8, 1 << 40)[2] == MOST + 1
    assert peak_of(pack) < 1 << 22


@pytest.mark.parametrize("length", [(1 << 40) + 1, (1 << 63) - 1, (1 << 63) + 1, 1 << 70])
@pytest.mark.parametrize("overlong", ["split", "truncate", "drop", "error"])
def test_a_document_that_no_corpus_has_is_named_with_its_length(length, overlong):
    with pytest.raises(ValueError, match=f"pack_bins: document 1 has {length} tokens; the most"):
        pack_bins([3, length], 8, overlong=overlong)


@pytest.mark.parametrize("capacity", [0, -1, MOST + 1, 1 << 63, 1 << 70, 8.0, True, "8"])
@pytest.mark.parametrize("fit", FITS)
def test_a_capacity_beyond_int32_is_refused_by_name(fit, capacity):
    bound = f"most {MOST}" if type(capacity) is int and capacity > 1 else "least 1"
    named = f"capacity must be an integer of at {bound}, got {capacity!r}"
    with pytest.raises(ValueError, match=f"pack_bins: {named}"):
        pack_bins([3], capacity, fit=fit)
    with pytest.raises(ValueError, match=rf"{fit.__name__.split('(')[0]}: {named}"):
        fit(np.array([3]), capacity, max_documents=None)


@pytest.mark.parametrize("fit", [best_fit, first_fit, next_fit, make_balanced_fit(1)])
def test_other_arguments_may_be_beyond_64_bits(fit):
    pack = partial(pack_bins, [5, 1, 2], 8, fit=fit)
    for bins in (pack(max_documents=1 << 70), pack(group_size=1 << 70), pack(seed=1 << 70)):
        assert len(bins) == 1


@pytest.mark.parametrize(
    ("fit", "function"),
    [
        ("best_fit", "packing.best_fit"),
        ("first_fit", "packing.first_fit"),
        ("balanced", r"packing.make_balanced_fit\(rows\)"),
        ("bestfit", "packing.best_fit"),
        (None, "packing.best_fit"),
    ],
)
def test_a_name_in_the_place_of_a_fit_is_refused(fit, function):
    with pytest.raises(ValueError, match=f"fit must be a function, got {fit!r}: give .*{function}"):
        pack_bins([3], 8, fit=fit)


# --------------------------------------------------------------------------------------- the seed


def test_a_seed_mixes_documents_from_all_over_the_corpus():
    lengths = np.full(10_000, 10)
    near, far = (pack_bins(lengths, 100, group_size=500, seed=seed) for seed in (None, 0))
    spread = [
        bins.documents[bins.offsets[1:] - 1] - bins.documents[bins.offsets[:-1]]
        for bins in (near, far)
    ]
    assert spread[0].max() < 500
    assert np.median(spread[1]) > 7_000
    assert sorted(far.documents) == list(range(10_000))


def test_each_seed_has_bins_of_its_own():
    lengths = np.random.default_rng(0).integers(1, 50, 1000)
    one, same, other = (pack_bins(lengths, 64, group_size=100, seed=seed) for seed in (3, 3, 4))
    assert np.array_equal(one.documents, same.documents)
    assert not np.array_equal(one.documents, other.documents)


def test_a_seed_deals_whole_documents_to_groups_of_about_the_same_size():
    lengths, seen = np.random.default_rng(0).integers(0, 40, 3000), []

    def fit(lengths, capacity, *, max_documents):
        seen.append(len(lengths))
        return best_fit(lengths, capacity, max_documents=max_documents)

    bins = pack_bins(lengths, 16, fit=fit, group_size=500, seed=0)
    groups = np.split(bins.documents, np.cumsum(seen)[:-1])
    assert len(seen) == -(-len(bins.lengths) // 500)
    assert max(seen) - min(seen) < 100
    assert sum(len(set(group.tolist())) for group in groups) == (lengths > 0).sum()


def test_a_seed_shuffles_a_single_group_too():
    bins = pack_bins([1] * 1000, 10, fit=next_fit, group_size=0, seed=0)
    rows = bins.documents.reshape(100, 10)
    assert (np.diff(rows) > 0).all()
    assert np.median(rows[:, -1] - rows[:, 0]) > 700


# ------------------------------------------------------------------------------------- the report


@given(packings())
def test_the_report_adds_up(packing):
    bins = packing.pack()
    report = report_packing(bins)
    places = report["tokens"] + report["alignment_padding"] + report["row_padding"]
    assert places == report["rows"] * packing.capacity
    assert report["pieces"] == len(pieces_of(bins))
    assert 0 <= report["alignment_padding"] < packing.multiple_of * max(report["pieces"], 1)
    assert report["efficiency"] == (report["tokens"] / places if places else 1.0)


@given(packings())
def test_the_report_counts_what_became_of_the_documents(packing):
    lengths, capacity, policy = packing.lengths, packing.capacity, packing.overlong
    overlong = [n for n in lengths if n > capacity]
    lost = {"split": 0, "truncate": capacity, "drop": 0}
    report = report_packing(packing.pack(), lengths)
    assert {name: report[name] for name in report if name.endswith(("documents", "ed_tokens"))} == {
        "documents": len(lengths),
        "empty_documents": lengths.count(0),
        "split_documents": len(overlong) if policy == "split" else 0,
        "truncated_documents": len(overlong) if policy == "truncate" else 0,
        "dropped_documents": len(overlong) if policy == "drop" else 0,
        "dropped_tokens": 0 if policy == "split" else sum(n - lost[policy] for n in overlong),
    }
    assert report["tokens"] + report["dropped_tokens"] == sum(lengths)


def test_the_report_refuses_other_lengths():
    bins = pack_bins([5, 3], 8)
    with pytest.raises(ValueError, match="hold document 1, and there are 1"):
        report_packing(bins, [5])
    with pytest.raises(ValueError, match="hold 3 tokens of document 1, which has 2"):
        report_packing(bins, [5, 2])


@given(packings())
def test_the_cost_of_a_row_is_the_sum_of_its_squares(packing):
    bins = packing.pack()
    rows = [[n for _, _, n in bins[row]] for row in range(len(bins))]
    costs = row_costs(bins)
    assert costs.dtype == np.int64
    assert costs.tolist() == [(aligned(row, packing.multiple_of) ** 2).sum() for row in rows]


def test_no_documents_make_no_rows():
    assert [len(pack_bins(lengths, 8)) for lengths in ([], [0, 0], np.array([], int))] == [0, 0, 0]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: pack_bins([1], 0), "capacity must be an integer of at least 1, got 0"),
        (lambda: pack_bins([1], 8.0), "capacity must be an integer"),
        (lambda: pack_bins([1], 10, multiple_of=4), "take 8 or 12"),
        (lambda: pack_bins([1], 2, multiple_of=4), "take 4"),
        (lambda: pack_bins([1], MOST, multiple_of=2), "; take 2147483646$"),
        (lambda: pack_bins([1], 8, multiple_of=0), "multiple_of must be"),
        (lambda: pack_bins([1], 8, multiple_of=1 << 70), "multiple_of must be"),
        (lambda: pack_bins([1], 8, group_size=-1), "group_size must be"),
        (lambda: pack_bins([1], 8, max_documents=0), "max_documents must be"),
        (lambda: pack_bins([1], 8, overlong="wrap"), "overlong must be .*'wrap'"),
        (lambda: pack_bins([1], 8, seed=1.5), "seed must be an integer, got 1.5"),
        (lambda: pack_bins([1, -2], 8), "document 1 has length -2"),
        (lambda: pack_bins([1.5], 8), "must be integers, got float64"),
        (lambda: pack_bins([True], 8), "must be integers, got bool"),
        (lambda: pack_bins([[1]], 8), r"one dimension, got shape \(1, 1\)"),
        (lambda: pack_bins([[1], [1, 2]], 8), "ragged"),
    ],
)
def test_bad_arguments_are_refused_by_name(call, message):
    with pytest.raises(ValueError, match=f"pack_bins: .*{message}"):
        call()


def test_packing_and_sampling_start_without_torch():
    code = "import sys, trainkit.packing, trainkit.sampling; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("answer", "named"),
    [
        ([0, 0], "put 6 tokens or 2 pieces into one bin of capacity 4"),
        ([-1, 0], "must number its bins from 0 without gaps"),
        ([0, 2], "must number its bins from 0 without gaps"),
        ([1, 1], "must number its bins from 0 without gaps"),
        ([-1, -1], "must number its bins from 0 without gaps"),
        ([0, -1], "must number its bins from 0 without gaps"),
        ([1, -1], "must number its bins from 0 without gaps"),
        ([0, 1 << 62], "must number its bins from 0 without gaps"),
        ([1 << 62, 0], "must number its bins from 0 without gaps"),
        ([0], "for 2 pieces it gave"),
        ([0.0, 1.0], "must return one integer per piece"),
    ],
)
def test_a_fit_s_answer_is_checked(answer, named):
    def mine(*_, **__):
        return np.array(answer)

    with pytest.raises(ValueError, match=f"mine {named}|mine .*{named}"):
        pack_bins([3, 3], 4, fit=mine)


@given(cases(), st.data())
def test_any_answer_is_taken_if_it_is_right_and_refused_if_it_is_not(case, data):
    capacity, lengths, limit = case
    answer = data.draw(st.lists(st.integers(-1, 4), min_size=len(lengths), max_size=len(lengths)))

    def mine(*_, **__):
        return np.array(answer)

    fills, counts = {}, {}
    for bin_, length in zip(answer, lengths, strict=True):
        fills[bin_], counts[bin_] = fills.get(bin_, 0) + length, counts.get(bin_, 0) + 1
    right = (
        sorted(fills) == list(range(len(fills)))
        and max(fills.values(), default=0) <= capacity
        and max(counts.values(), default=0) <= (limit or len(lengths))
    )
    if right:
        bins = pack_bins(lengths, capacity, fit=mine, max_documents=limit)
        rows = [[d for d, _, _ in bins[row]] for row in range(len(bins))]
        assert rows == [
            [d for d in range(len(lengths)) if answer[d] == row] for row in range(len(fills))
        ]
    else:
        with pytest.raises(ValueError, match="pack_bins: mine"):
            pack_bins(lengths, capacity, fit=mine, max_documents=limit)


@pytest.mark.parametrize("answer", [[0, 0, 0, 1], [1, 0, 1, 1]])
def test_an_answer_with_more_pieces_than_the_limit_is_refused(answer):
    def mine(*_, **__):
        return np.array(answer)

    with pytest.raises(
        ValueError, match="mine put 3 tokens or 3 pieces into one bin of capacity 8"
    ):
        pack_bins([1, 1, 1, 1], 8, fit=mine, max_documents=2)
    assert len(pack_bins([1, 1, 1, 1], 8, fit=mine, max_documents=3)) == 2


def test_a_fit_cannot_change_the_lengths():
    def mine(lengths, *_, **__):
        lengths[0] = 1

    with pytest.raises(ValueError, match="read-only"):
        pack_bins([3, 3], 4, fit=mine)


def test_every_kind_of_array_runs_the_same_compiled_code(tmp_path):
    lengths = np.array([5, 3, 9, 2] * 5)
    np.save(tmp_path / "lengths.npy", lengths)
    expected, loops = pack_bins(lengths.tolist(), 8).documents, (write_pieces, survey)
    before = [len(loop.signatures) for loop in loops]
    frozen = lengths.copy()
    frozen.flags.writeable = False
    mapped = np.load(tmp_path / "lengths.npy", mmap_mode="r")
    for kind in (frozen, mapped, lengths.astype(np.uint8), np.repeat(lengths, 2)[::2]):
        found = pack_bins(kind, np.int32(8), multiple_of=np.int64(1))
        assert np.array_equal(found.documents, expected)
        assert type(found.capacity) is int
    assert [len(loop.signatures) for loop in loops] == before == [1, 1]


# ---------------------------------------------------------------------- the picture and the command


def bars_of(axes):
    """Return (left, width) of each bar, by row, in data coordinates."""
    bars = {}
    for collection in axes.collections:
        for path in collection.get_paths():
            (left, top), (right, _) = path.vertices.min(0), path.vertices.max(0)
            bars.setdefault(int(top), []).append((round(left), round(right - left)))
    return bars


def figure_of(bins, lengths=None):
    """Return the figure that `plot_packing` saves."""
    with mock.patch("trainkit.tools.pictures.packing.save_picture") as save:
        plot_packing(bins, "packing.png", lengths=lengths)
    return save.call_args.args[1]


def test_the_picture_shows_every_piece_and_all_padding():
    lengths = [5, 0, 3, 11, 7]
    bins = pack_bins(lengths, 8, multiple_of=2)
    figure = figure_of(bins, np.array(lengths))
    top, bottom = figure.axes
    assert figure.get_suptitle() == "efficiency 81.25%: 4 rows of 8 tokens"
    assert top.get_title(loc="left") == (
        "6 tokens of padding: 2 at the ends of rows, 4 to align pieces\n"
        "of 5 documents: 1 empty, 1 split\n\n"
        "documents per bar, by length in tokens (the highest bar: 1)"
    )
    assert [bars_of(bottom)[row] for row in range(4)] == [
        [(0, 8), *zip(begins_of(bins, row), (n for _, _, n in bins[row]), strict=True)]
        for row in range(4)
    ]


def begins_of(bins, row):
    sizes = aligned([n for _, _, n in bins[row]], bins.multiple_of)
    return (np.cumsum(sizes) - sizes).tolist()


def test_a_full_picture_is_never_claimed_of_rows_with_padding():
    bins = pack_bins([4096] * 999 + [4095], 4096)
    assert figure_of(bins).get_suptitle().startswith("efficiency 99.99%: 1,000 rows")


def test_the_histogram_counts_every_document():
    lengths = np.random.default_rng(0).integers(0, 500, 1000)
    axes = figure_of(pack_bins(lengths, 64), lengths).axes[0]
    for bar in axes.patches:
        begin, end = bar.get_x(), bar.get_x() + bar.get_width()
        assert bar.get_height() == ((lengths > begin) & (lengths < end)).sum()
    assert sum(bar.get_height() for bar in axes.patches) == (lengths > 0).sum()


def test_two_documents_have_bars_of_the_same_height():
    axes = figure_of(pack_bins([3, 900], 1024)).axes[0]
    assert sorted(bar.get_height() for bar in axes.patches)[-3:] == [0, 1, 1]


def test_thin_neighbours_are_drawn_as_one_pale_piece():
    lengths = [300, *[2] * 100, 400, 2]
    bins = pack_bins(lengths, 4096, fit=next_fit, multiple_of=4)
    bottom = figure_of(bins).axes[1]
    assert bars_of(bottom)[0] == [(0, 4096), (0, 300), (300, 200), (700, 400), (1100, 2)]
    colours = [tuple(colour) for colour in bottom.collections[1].get_facecolor()]
    assert colours.count(to_rgba(_THIN)) == 1
    assert bottom.get_title(loc="left").endswith("many thin pieces pale")


def test_a_picture_is_as_high_as_its_rows_need():
    heights = [figure_of(pack_bins([8] * n, 8)).get_figheight() for n in (1, 5, 24, 30)]
    assert np.allclose(np.diff(heights), [4 * 0.165, 19 * 0.165, 0])


def test_a_picture_of_no_rows_says_so():
    figure = figure_of(pack_bins([11], 8, overlong="drop"))
    assert figure.get_suptitle() == "no rows"
    assert figure.axes[0].get_title(loc="left").endswith("no pieces")
    assert not figure.axes[1].get_visible()


@pytest.mark.parametrize(
    ("lengths", "capacity", "kind"),
    [([], 8, ".png"), ([1], 1, ".svg"), ([8] * 100, 8, ".pdf"), ([1], 8, ".PNG")],
)
def test_a_picture_is_written(tmp_path, lengths, capacity, kind):
    path = plot_packing(pack_bins(lengths, capacity), tmp_path / f"plan{kind}", lengths=lengths)
    begins = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}
    assert path.read_bytes().startswith(begins[kind.lower()])


@pytest.mark.parametrize("name", ["plan", "plan.xyz", ".png", ".", "plan.png.gz"])
def test_a_picture_in_no_format_is_refused_before_anything_is_packed(tmp_path, name):
    named = r"a picture ends in \.png, \.svg, \.pdf, got "
    with pytest.raises(ValueError, match=f"plot_packing: {named}"):
        plot_packing(pack_bins([1], 8), tmp_path / name)
    assert list(tmp_path.iterdir()) == []
