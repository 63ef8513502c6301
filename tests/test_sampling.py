"""Which rows make up a step: once per epoch, and the same whoever asks."""

from collections import Counter
from functools import partial
from math import factorial
from types import MappingProxyType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainkit.noise.hashing import make_key
from trainkit.sampling import (
    MixturePhase,
    assign_rows,
    buffer_sorted_order,
    count_epochs,
    count_steps,
    find_mixture_phase,
    make_mixture_phases,
    mixture_weights,
    permute,
    sample_mixture,
    shuffle_blocks,
    shuffle_epochs,
)
from trainkit.types import Share


@given(st.integers(1, 300), st.integers(0, 2**64 - 1))
def test_permute_is_a_permutation(count, key):
    assert sorted(permute(np.arange(count), count, key).tolist()) == list(range(count))


def test_permute_asks_for_one_index_at_a_time_as_for_all():
    whole = permute(np.arange(50), 50, 7)
    assert [int(permute(i, 50, 7)[0]) for i in range(50)] == whole.tolist()


def test_every_permutation_of_a_few_is_as_likely_as_every_other():
    for count in (2, 3, 4):
        seen = Counter(tuple(permute(np.arange(count), count, make_key(s))) for s in range(2400))
        expected = 2400 / factorial(count)
        assert len(seen) == factorial(count)
        assert all(abs(n - expected) < 5 * expected**0.5 for n in seen.values())


def test_neighbours_are_scattered():
    order = permute(np.arange(20_000), 20_000, make_key(0, "epoch", 0)).astype(float)
    assert abs(np.corrcoef(order[1:], order[:-1])[0, 1]) < 0.03
    assert abs(np.corrcoef(order, np.arange(20_000))[0, 1]) < 0.03


def test_indices_beyond_two_to_the_31_stay_right():
    far = np.arange(2**40 - 1000, 2**40)
    image = permute(far, 2**40, 3)
    assert len(set(image.tolist())) == 1000
    assert image.min() >= 0
    assert 2**38 < image.max() < 2**40
    rows = shuffle_epochs(2**35, rows_per_step=3, seed=0)(2**40)
    epoch, first = divmod(3 * 2**40, 2**35)
    assert (
        rows.tolist() == permute(first + np.arange(3), 2**35, make_key(0, "epoch", epoch)).tolist()
    )


@given(st.integers(1, 40), st.integers(1, 17), st.integers(0, 5))
def test_every_row_comes_once_per_epoch(num_rows, rows_per_step, seed):
    steps = -(-3 * num_rows // rows_per_step)
    rows_at = shuffle_epochs(num_rows, rows_per_step=rows_per_step, seed=seed)
    stream = np.concatenate([rows_at(step) for step in range(steps)])
    for epoch in range(3):
        part = stream[epoch * num_rows : (epoch + 1) * num_rows]
        assert sorted(part.tolist()) == list(range(num_rows))


def test_epochs_and_seeds_have_orders_of_their_own():
    def epoch(number, seed):
        return shuffle_epochs(100, rows_per_step=100, seed=seed)(number).tolist()

    orders = [epoch(0, 0), epoch(1, 0), epoch(0, 1)]
    assert orders[0] != orders[1] != orders[2] != orders[0]
    assert epoch(0, 0) == orders[0]


@given(st.integers(1, 40), st.integers(1, 17), st.integers(1, 9), st.integers(0, 5))
def test_every_row_comes_once_per_epoch_in_blocks_too(num_rows, rows_per_step, block, seed):
    steps = -(-3 * num_rows // rows_per_step)
    order = np.arange(num_rows)[::-1] + 100
    rows_at = shuffle_blocks(order, block=block, rows_per_step=rows_per_step, seed=seed)
    stream = np.concatenate([rows_at(step) for step in range(steps)])
    for epoch in range(3):
        part = stream[epoch * num_rows : (epoch + 1) * num_rows]
        assert sorted(part.tolist()) == sorted(order.tolist())
    few = num_rows % block + block  # those that fill no block of an epoch, of either end
    for begin in range(0, len(stream) - block + 1, block):
        part = np.sort(num_rows + 99 - stream[begin : begin + block])
        assert (np.diff(part) == 1).all() or part.max() < few


@pytest.mark.parametrize("rows", [1, 4])
def test_blocks_of_like_rows_give_ranks_the_same_work_though_they_have_few(rows):
    ranks, costs = 8, (np.random.default_rng(1).lognormal(0, 1, 4001) * 1000).astype(np.int64)

    def dearest(chosen):
        mine = [
            assign_rows(len(chosen), Share(r, ranks), rows_per_microbatch=rows, costs=costs[chosen])
            for r in range(ranks)
        ]
        work = np.array([costs[chosen[table.ravel()]].sum() for table in mine])
        return work.max() / work.mean() - 1

    steps, bound = range(4001 // (ranks * rows)), 0.02
    in_blocks = shuffle_blocks(np.argsort(costs), block=ranks, rows_per_step=ranks * rows, seed=0)
    in_epochs = shuffle_epochs(4001, rows_per_step=ranks * rows, seed=0)
    mean = np.mean([dearest(in_blocks(step)) for step in steps])
    plain = np.mean([dearest(in_epochs(step)) for step in steps])
    assert mean < bound < 2 * bound < plain


def test_a_microbatch_has_no_more_rows_than_the_step():
    assert assign_rows(4, Share(0, 1), rows_per_microbatch=10**9).tolist() == [[0, 1, 2, 3]]
    shares = [assign_rows(3, Share(r, 2), rows_per_microbatch=10**9) for r in (0, 1)]
    assert [share.tolist() for share in shares] == [[[0, 1, -1]], [[2, -1, -1]]]


@given(st.integers(1, 40), st.integers(1, 5), st.sampled_from([1, 2, 3, 4, 6, 8]))
def test_ranks_share_every_row_once_in_equally_many_microbatches(num_rows, size, count):
    if count > num_rows:
        with pytest.raises(ValueError, match=f"more ranks than rows: {count} ranks.* {num_rows} r"):
            assign_rows(num_rows, Share(0, count), rows_per_microbatch=size)
        return
    shares = [
        assign_rows(num_rows, Share(r, count), rows_per_microbatch=size) for r in range(count)
    ]
    width = min(size, num_rows)
    assert {share.shape for share in shares} == {(-(-num_rows // (count * width)), width)}
    balanced = np.concatenate(shares).reshape(-1)
    assert balanced[balanced >= 0].tolist() == list(range(num_rows))
    assert all((share >= 0).any() for share in shares)


def costed_deals():
    """(costs, rows per microbatch, ranks): a few costs far apart, equal ones and zeros too."""
    one = st.one_of(st.integers(0, 5), st.integers(0, 10_000), st.integers(0, 2**40))
    counts = st.integers(1, 8)
    return counts.flatmap(
        lambda count: st.tuples(
            st.lists(one, min_size=count, max_size=60), st.integers(1, 5), st.just(count)
        )
    )


def deal(costs, size, count):
    """Positions by rank, microbatch and row, with and without costs."""
    num_rows = len(costs)
    return tuple(
        np.stack(
            [
                assign_rows(num_rows, Share(r, count), rows_per_microbatch=size, costs=row_costs)
                for r in range(count)
            ]
        )
        for row_costs in (costs, None)
    )


def costs_of(table, costs):
    return np.where(table < 0, 0, np.array(costs)[table])


@given(costed_deals())
def test_dealing_by_cost_keeps_the_rows_and_never_costs_more(case):
    costs, size, count = case
    balanced, contiguous = deal(costs, size, count)
    assert balanced.shape == contiguous.shape
    assert sorted(balanced[balanced >= 0].tolist()) == list(range(len(costs)))
    assert ((balanced < 0) == (contiguous < 0)).all()
    most = [costs_of(table, costs).sum((1, 2)).max() for table in (balanced, contiguous)]
    assert most[0] <= most[1]


@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 2, 4, 16]))
def test_ranks_and_their_microbatches_cost_about_the_same(seed, size):
    """128 rows with the spread of packed rows (log-normal documents, capacity 4,096), 8 ranks."""
    costs = np.random.default_rng(seed).gamma(2, 3_700_000, 128).clip(700_000, 4096**2).astype(int)
    balanced, contiguous = deal(costs, size, 8)
    work, plain = costs_of(balanced, costs).sum(2), costs_of(contiguous, costs).sum(2)
    assert work.sum(1).max() * 8 <= (1.01 if size == 1 else 1.001) * work.sum()
    assert plain.sum(1).max() * 8 >= 1.05 * plain.sum()
    assert work.max(0).sum() * 8 <= 1.12 * work.sum()  # the time of ranks that wait for each other
    microbatches = costs[balanced].transpose(1, 0, 2).reshape(len(costs) // (8 * size), -1)
    assert (microbatches[:-1].min(1) >= microbatches[1:].max(1)).all()


def test_a_deal_by_cost_is_the_same_whoever_asks_and_however_often():
    costs = np.random.default_rng(0).integers(0, 1000, 37)
    first, again = (deal(costs, 2, 5)[0] for _ in range(2))
    assert (first == again).all()
    assert (deal(costs.astype(np.int32), 2, 5)[0] == first).all()
    assert (deal((costs * 1000).tolist(), 2, 5)[0] == first).all()


def test_equal_costs_are_dealt_in_contiguous_runs():
    balanced, contiguous = deal([3] * 16, 2, 4)
    assert (balanced == contiguous).all()


def test_three_rows_on_two_ranks():
    parts = [assign_rows(3, Share(rank, 2), rows_per_microbatch=1).tolist() for rank in (0, 1)]
    assert parts == [[[0], [1]], [[2], [-1]]]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: permute([0], 0, 1), "permute: count must be at least 1, got 0"),
        (lambda: permute([3], 3, 1), r"permute: indices must lie in \[0, 3\)"),
        (lambda: permute([-1], 3, 1), r"permute: indices must lie in \[0, 3\)"),
        (lambda: shuffle_epochs(0, rows_per_step=1, seed=0), "there is no row to train on"),
        (lambda: shuffle_epochs(1, rows_per_step=0, seed=0), "rows_per_step .* got 1 and 0"),
        (lambda: shuffle_epochs(1, rows_per_step=1, seed=0)(-1), "from 0, got -1"),
        (lambda: shuffle_blocks([0], block=0, rows_per_step=1, seed=0), "block .* got 1 and 0"),
        (lambda: shuffle_blocks([], block=1, rows_per_step=1, seed=0), "at least one"),
        (lambda: shuffle_blocks([0.5], block=1, rows_per_step=1, seed=0), "float64"),
        (lambda: assign_rows(4, Share(0, 2), rows_per_microbatch=0), "rows_per_microbatch"),
        (lambda: assign_rows(4, Share(2, 2), rows_per_microbatch=1), "no part 2 of 2"),
        (lambda: deal([1, -2], 1, 1), r"costs must be \[2\] integers .* \(2,\) from -2 on"),
        (lambda: deal([1.5, 2], 1, 1), "costs must be .* float64"),
        (
            lambda: assign_rows(3, Share(0, 1), rows_per_microbatch=1, costs=[1]),
            r"costs must be \[3\] integers .* got int64 \(1,\)",
        ),
    ],
)
def test_bad_arguments_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_numpy_numbers_are_the_same_numbers():
    rows = shuffle_epochs(50, rows_per_step=3, seed=0)(3)
    for step, seed in ((np.int64(3), 0), (3, np.int64(0))):
        again = shuffle_epochs(50, rows_per_step=3, seed=seed)(step)
        assert again.tolist() == rows.tolist()


# ---------------------------------------------------------------------------------------- mixtures

WEIGHTS = st.lists(st.integers(0, 1000), min_size=1, max_size=8).filter(any)


def mixed(steps, rows_per_step, weights, *, num_rows=7, later=(), seed=0, temperature=1.0):
    """Sources and rows inside them, `[steps * rows_per_step]`, of sources named 0, 1, ..."""
    names = [str(i) for i in range(len(weights))]
    sizes = {name: num_rows + i for i, name in enumerate(names)}
    first = MixturePhase(0, dict(zip(names, weights, strict=True)))
    phases = make_mixture_phases(first, *later)
    rows_at = sample_mixture(
        sizes, phases, rows_per_step=rows_per_step, seed=seed, temperature=temperature
    )
    rows = np.concatenate([rows_at(step) for step in steps])
    begins = np.cumsum([0, *sizes.values()])
    sources = np.searchsorted(begins, rows, side="right") - 1
    return sources, rows - begins[sources]


def deviations(sources, shares):
    """How far each source's count is from its part over every prefix: `[N, K]`."""
    counts = np.cumsum(sources[:, None] == np.arange(len(shares)), axis=0)
    return np.abs(counts - np.arange(1, len(sources) + 1)[:, None] * np.asarray(shares))


@given(WEIGHTS, st.integers(1, 3000))
def test_every_prefix_of_a_mixture_is_within_one_row_of_its_proportions(weights, size):
    sources, _ = mixed([0], size, weights)
    total, used = sum(weights), sum(weight > 0 for weight in weights)
    counts = np.cumsum(sources[:, None] == np.arange(len(weights)), axis=0)
    off = np.abs(counts * total - np.arange(1, size + 1)[:, None] * np.array(weights))
    assert off.max() <= total * (1 - 1 / max(2 * used - 2, 2))  # Tijdeman's bound, in integers


@settings(max_examples=6)
@given(st.lists(st.floats(0.01, 1), min_size=2, max_size=8), st.floats(0.5, 4))
def test_weights_of_any_size_are_kept_to_one_row_in_a_million(weights, temperature):
    shares = mixture_weights(dict(enumerate(weights)), temperature=temperature)
    sources, _ = mixed([0], 5000, weights, temperature=temperature)
    assert deviations(sources, list(shares.values())).max() <= 1


def test_a_million_rows_stay_within_one_of_weights_that_are_decimal_fractions():
    shares = [0.55, 0.3, 0.1, 0.05]
    sources, _ = mixed([0], 1_000_000, shares, num_rows=10**6)
    assert deviations(sources, shares).max() <= 1


@pytest.mark.parametrize(("num_corpora", "most"), [(2, 1.0), (3, 1.5), (8, 2.0)])
def test_what_is_owed_does_not_add_up_over_many_phases(num_corpora, most):
    draw = np.random.default_rng(num_corpora)
    names = [f"corpus {i}" for i in range(num_corpora)]
    starts = np.cumsum([0, *draw.integers(1, 4, 60)])
    phases = make_mixture_phases(
        *(
            MixturePhase(int(start), {n: int(draw.integers(1, 50)) for n in names})
            for start in starts
        )
    )
    expected, drawn = np.zeros(num_corpora), np.zeros(num_corpora)
    rows_at = sample_mixture(dict.fromkeys(names, 20), phases, rows_per_step=3, seed=0)
    for step in range(int(starts[-1]) + 3):
        rows = rows_at(step)
        parts = np.array(list(mixture_weights(find_mixture_phase(step, phases).weights).values()))
        for source in rows // 20:
            expected += parts
            drawn[source] += 1
            assert np.abs(expected - drawn).max() <= most


def test_the_draws_of_a_corpus_go_on_over_phases():
    later = [MixturePhase(300, {"0": 1, "1": 7}), MixturePhase(470, {"1": 0})]
    sources, inside = mixed(range(700), 5, [3, 1, 2], later=later)
    assert deviations(sources[:1500], np.array([3, 1, 2]) / 6).max() <= 1
    for source, size in enumerate([7, 8, 9]):
        drawn = inside[sources == source]
        epochs = drawn[: len(drawn) // size * size].reshape(-1, size)
        assert (np.sort(epochs, 1) == np.arange(size)).all()
        assert len(np.unique(epochs, axis=0)) > len(epochs) // 2  # each pass is shuffled anew


@given(WEIGHTS, st.integers(1, 9), st.integers(0, 15), st.integers(1, 15))
def test_any_step_of_a_mixture_is_found_without_those_before_it(weights, size, first, start):
    later = [MixturePhase(start, {"0": 5}), MixturePhase(start + 9, {})]
    whole = mixed(range(25), size, weights, later=later)
    for mine, all_ in zip(
        mixed([first, first + 9], size, weights, later=later), whole, strict=True
    ):
        want = [all_[step * size : (step + 1) * size] for step in (first, first + 9)]
        assert mine.tolist() == np.concatenate(want).tolist()


def test_a_step_beyond_many_periods_and_epochs_is_where_it_should_be():
    weights, far = [3, 1, 2], 6 * 10**9
    sources, inside = mixed([far], 600, weights, num_rows=600)
    near, _ = mixed([0], 600, weights, num_rows=600)
    assert sources.tolist() == near.tolist()  # the period is 6
    drawn = far * 600 // 6 * 3
    epoch, place = divmod(drawn, 600)
    want = permute(np.arange(place, place + 300), 600, make_key(0, "mixture", "0", epoch))
    assert inside[sources == 0].tolist() == want.tolist()


@settings(max_examples=10)
@given(WEIGHTS, st.sampled_from([0.3, 1.0, 20.0]))
def test_a_corpus_without_weight_is_never_drawn_and_changes_nothing(weights, temperature):
    sources, inside = mixed(range(3), 50, weights, temperature=temperature)
    assert all(weights[source] for source in np.unique(sources))
    more = mixed(range(3), 50, [*weights, 0], temperature=temperature)
    assert more[0].tolist() == sources.tolist()
    assert more[1].tolist() == inside.tolist()


@given(WEIGHTS, st.integers(1, 20))
def test_a_phase_to_come_changes_nothing_before_it(weights, start):
    before = mixed(range(start), 6, weights)
    after = mixed(range(start), 6, weights, later=[MixturePhase(start, {"0": 3}, lr_scale=0.1)])
    assert [x.tolist() for x in before] == [x.tolist() for x in after]


def test_a_seed_changes_the_rows_and_not_the_sources():
    one, two = mixed([0], 60, [2, 1]), mixed([0], 60, [2, 1], seed=1)
    assert one[0].tolist() == two[0].tolist()
    assert one[1].tolist() != two[1].tolist()


def test_later_phases_are_merged_onto_the_first():
    base = {"web": 3, "code": 1, "new": 0}
    phases = make_mixture_phases(
        MixturePhase(0, base),
        MixturePhase(5, {"new": 2}),
        MixturePhase(9, {"web": 0}, lr_scale=0.5),
    )
    assert [phase.weights for phase in phases] == [base, base | {"new": 2}, base | {"web": 0}]
    assert [find_mixture_phase(step, phases).start for step in (0, 4, 5, 8, 9, 10**6)] == [
        0,
        0,
        5,
        5,
        9,
        9,
    ]
    assert [phase.lr_scale for phase in phases] == [1.0, 1.0, 0.5]


def test_temperature_moves_a_mixture_towards_equal_parts_and_keeps_zeros():
    weights = {"a": 16.0, "b": 1.0, "c": 0.0}
    assert mixture_weights(weights, temperature=4) == {"a": 2 / 3, "b": 1 / 3, "c": 0.0}
    assert mixture_weights(weights, temperature=0.5)["a"] == 256 / 257
    assert mixture_weights(weights, temperature=1e9) == pytest.approx({"a": 0.5, "b": 0.5, "c": 0})
    assert mixture_weights({"a": 1e300, "b": 1e300}, temperature=0.1)["a"] == 0.5


EQUAL_PARTS = (MixturePhase(0, {"a": 1, "b": 1}),)


def one_step(
    *,
    step=0,
    rows_per_step=4,
    num_rows=MappingProxyType({"a": 3, "b": 3}),
    phases=EQUAL_PARTS,
):
    return sample_mixture(num_rows, phases, rows_per_step=rows_per_step, seed=0)(step)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: mixture_weights({}), "at least one weight must be above 0"),
        (lambda: mixture_weights({"a": 0.0}), "at least one weight must be above 0"),
        (lambda: mixture_weights({"a": 1, "b": -1}), "weight of 'b' must be finite, 0 or more: -1"),
        (lambda: mixture_weights({"a": float("nan")}), "weight of 'a' must be finite"),
        (lambda: mixture_weights({"a": float("inf")}), "weight of 'a' must be finite"),
        (lambda: mixture_weights({"a": 1}, temperature=0), "temperature must be above 0, got 0"),
        (make_mixture_phases, r"start at 0 and .* got \[\]"),
        (lambda: make_mixture_phases(MixturePhase(1, {"a": 1})), r"start at 0 and .* got \[1\]"),
        (
            lambda: make_mixture_phases(MixturePhase(0, {"a": 1}), MixturePhase(0, {})),
            r"later than .* got \[0, 0\]",
        ),
        (
            lambda: make_mixture_phases(MixturePhase(0, {"a": 1}), MixturePhase(4, {"b": 1})),
            r"batch 4 names \['b'\]",
        ),
        (
            lambda: make_mixture_phases(MixturePhase(0, {"a": 1}), MixturePhase(4, {"a": 0})),
            "batch 4: at least one",
        ),
        (lambda: make_mixture_phases(MixturePhase(0, {"a": 1}, lr_scale=-1)), "lr_scale -1"),
        (
            lambda: find_mixture_phase(-1, make_mixture_phases(MixturePhase(0, {"a": 1}))),
            "numbered from 0, got -1",
        ),
        (lambda: one_step(step=-1), "numbered from 0, got -1"),
        (lambda: one_step(rows_per_step=0), "rows_per_step must be .* got 0"),
        (lambda: one_step(num_rows={"a": 3, "b": 0}), r"batch 0 gives weight to \['b'\], which"),
        (lambda: one_step(num_rows={"a": 3}), r"weigh \['a', 'b'\], the corpora are \['a'\]"),
        (lambda: one_step(phases=[MixturePhase(0, {"a": 1})]), "name them all in the first"),
        (
            lambda: one_step(phases=[MixturePhase(0, {"a": 1, "b": 1e-9})]),
            r"\['b'\] come to less than",
        ),
    ],
)
def test_mixtures_that_cannot_be_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# ----------------------------------------------------------------------------- sorted in buffers


# keys with many ties, the size of a buffer, that of a pack, and a seed
in_buffers = given(
    st.lists(st.integers(0, 6), min_size=1, max_size=40).map(np.array),
    st.integers(1, 12),
    st.integers(1, 12),
    st.integers(0, 3),
)


@in_buffers
def test_a_buffer_is_sorted_into_packs_and_every_item_comes_once(keys, buffer, pack, seed):
    order = buffer_sorted_order(
        np.arange(keys.size), keys, buffer_size=buffer, pack_size=pack, seed=seed
    )
    for first in range(0, keys.size, buffer):
        items = order[first : first + buffer]
        assert sorted(items.tolist()) == list(range(first, min(first + buffer, keys.size)))
        found = [sorted(keys[items[i : i + pack]].tolist()) for i in range(0, items.size, pack)]
        ranked = np.sort(keys[items]).tolist()
        packs = [ranked[i : i + pack] for i in range(0, items.size, pack)]
        assert sorted(found) == sorted(packs)
        assert len(found[-1]) == len(packs[-1])  # a short one is the last


@in_buffers
def test_an_order_in_buffers_is_the_same_for_any_positions(keys, buffer, pack, seed):
    order_of = partial(buffer_sorted_order, buffer_size=buffer, pack_size=pack, seed=seed)
    whole = order_of(np.arange(keys.size), keys)
    places = np.random.default_rng(seed).integers(0, keys.size, 10)
    assert order_of(places, keys).tolist() == whole[places].tolist()
    others = keys.copy()  # the keys of other buffers do not matter
    others[buffer:] = -others[buffer:]
    first = np.arange(min(buffer, keys.size))
    assert (order_of(first, others) == whole[: first.size]).all()


def test_packs_their_items_and_ties_are_shuffled_by_the_seed():
    places, keys = np.arange(60), np.arange(60) // 2 % 15  # two buffers, each key twice in each
    seeds = range(400)
    orders = np.stack(
        [buffer_sorted_order(places, keys, buffer_size=30, pack_size=3, seed=s) for s in seeds]
    )
    assert len({tuple(order[:30]) for order in orders}) == 400
    assert (orders[:, :30] != orders[:, 30:] - 30).any(1).all()  # buffers differ from each other
    lowest = np.isin(orders[:, :30], [0, 1]).reshape(400, 10, 3)  # in one pack, at any place
    assert (lowest.sum(2).max(1) == 2).all()
    assert (abs(lowest.any(2).sum(0) - 40) < 5 * 40**0.5).all()
    assert (abs(lowest.sum((0, 1)) - 800 / 3) < 5 * (800 / 3) ** 0.5).all()
    # The third of their pack is item 2 or item 3, whose keys are equal: either as often, and at
    # any place, since what breaks ties has nothing to do with what shuffles.
    pack = orders[:, :30].reshape(400, 10, 3)[lowest.any(2)]
    for item in (2, 3):
        assert (abs((pack == item).sum(0) - 200 / 3) < 3.5 * (200 / 3) ** 0.5).all()


def test_only_the_buffers_that_are_asked_for_are_read():
    keys = np.array([3.0, 1.0, np.nan, 2.0])
    assert sorted(
        buffer_sorted_order([0, 1], keys, buffer_size=2, pack_size=1, seed=0).tolist()
    ) == [0, 1]
    with pytest.raises(ValueError, match="the key of item 2 is NaN"):
        buffer_sorted_order([3], keys, buffer_size=2, pack_size=1, seed=0)


# ------------------------------------------------------------------------------ steps and epochs


@given(st.integers(1, 60), st.integers(1, 17), st.integers(0, 200))
def test_the_epoch_of_a_step_is_where_the_stream_of_rows_stands(num_rows, rows_per_step, step):
    epoch = count_epochs(step, num_rows=num_rows, rows_per_step=rows_per_step)
    number, first = divmod(step * rows_per_step, num_rows)
    assert int(epoch) == number
    assert epoch == pytest.approx(number + first / num_rows)
    row = shuffle_epochs(num_rows, rows_per_step=rows_per_step, seed=1)(step)[0]
    assert row == permute(first, num_rows, make_key(1, "epoch", number))[0]


@given(st.integers(1, 60), st.integers(1, 17), st.integers(1, 4))
def test_a_plan_takes_every_step_that_fits_and_no_row_too_often(num_rows, rows_per_step, epochs):
    if epochs * num_rows < rows_per_step:
        with pytest.raises(ValueError, match="hold no step of"):
            count_steps(num_rows=num_rows, rows_per_step=rows_per_step, epochs=epochs)
        return
    steps = count_steps(num_rows=num_rows, rows_per_step=rows_per_step, epochs=epochs)
    assert (
        count_epochs(steps, num_rows=num_rows, rows_per_step=rows_per_step)
        <= epochs
        < count_epochs(steps + 1, num_rows=num_rows, rows_per_step=rows_per_step)
    )
    rows_at = shuffle_epochs(num_rows=num_rows, rows_per_step=rows_per_step, seed=0)
    rows = np.concatenate([rows_at(step) for step in range(steps)])
    counts = np.bincount(rows, minlength=num_rows)
    assert counts.max() <= epochs
    assert (epochs - counts).sum() < rows_per_step


def test_steps_are_the_fewest_of_what_limits_them():
    assert count_steps(num_rows=100, rows_per_step=10, epochs=3, max_steps=7) == 7
    assert count_steps(num_rows=100, rows_per_step=10, epochs=3, max_steps=70) == 30
    assert count_steps(num_rows=100, rows_per_step=10, max_steps=70) == 70
    assert count_steps(num_rows=None, rows_per_step=10, max_steps=70) == 70
    assert count_steps(num_rows=100, rows_per_step=1, epochs=0.29) == 29  # 0.29 * 100 < 29


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: count_steps(num_rows=9, rows_per_step=1), "count_steps: nothing ends the run"),
        (lambda: count_steps(num_rows=9, rows_per_step=1, max_steps=0), "max_steps .* got 0"),
        (lambda: count_steps(num_rows=9, rows_per_step=1, epochs=-1), "epochs must be .* got -1"),
        (lambda: count_steps(num_rows=9, rows_per_step=1, epochs=float("inf")), "got inf"),
        (lambda: count_steps(num_rows=None, rows_per_step=1, epochs=1), "of unknown length"),
        (
            lambda: count_steps(num_rows=0, rows_per_step=1, epochs=1),
            "count_steps: num_rows .* got 0 and 1",
        ),
        (lambda: count_epochs(0, num_rows=1, rows_per_step=0), "count_epochs: .* got 1 and 0"),
        (lambda: count_epochs(-1, num_rows=1, rows_per_step=1), "step must be at least 0, got -1"),
        (lambda: sort_one(buffer_size=0), "at least 1, got 0 and 1"),
        (lambda: sort_one(pack_size=0), "at least 1, got 1 and 0"),
        (lambda: sort_one(index=[3]), r"\[0, 3\), got 3 to 3"),
        (lambda: sort_one(index=[-1]), "got -1 to -1"),
        (lambda: sort_one(keys=[[1]]), r"one dimension, got int64 \(1, 1\)"),
        (lambda: sort_one(keys=["a"]), "must be numbers"),
    ],
)
def test_steps_and_orders_that_cannot_be_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def sort_one(*, index=(0,), keys=(1, 2, 3), buffer_size=1, pack_size=1):
    return buffer_sorted_order(
        index, np.array(keys), buffer_size=buffer_size, pack_size=pack_size, seed=0
    )
