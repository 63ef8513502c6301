"""Schedules: goldens, what holds at the joints, bounds, and what is refused."""

import math
from functools import partial
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainkit.schedules import (
    constant,
    cosine,
    cosine_restarts,
    infinite,
    inverse_sqrt,
    is_due,
    linear,
    piecewise,
    power,
    rex,
    warmup_stable_decay,
)
from trainkit.types import ConfigError

DECAYING = {
    "linear": linear,
    "cosine": cosine,
    "rex": rex,
    "wsd": warmup_stable_decay,
}
each = pytest.mark.parametrize("make", DECAYING.values(), ids=DECAYING.keys())


def values(schedule, steps):
    return [schedule(step) for step in range(steps)]


@pytest.mark.parametrize(
    ("schedule", "golden"),
    [
        (constant(2.0), [2.0, 2.0, 2.0]),
        (constant(2.0, warmup=4), [0.5, 1.0, 1.5, 2.0, 2.0]),
        (linear(4.0, warmup=2, total=6), [2.0, 4.0, 4.0, 3.0, 2.0, 1.0, 0.0, 0.0]),
        (linear(4.0, warmup=0, total=4, final=0.5), [4.0, 3.5, 3.0, 2.5, 2.0, 2.0]),
        (cosine(2.0, warmup=0, total=3), [2.0, 1.5, 0.5, 0.0]),
        (cosine(2.0, warmup=1, total=4, final=0.5), [2.0, 2.0, 1.75, 1.25, 1.0, 1.0]),
        (cosine_restarts(2.0, warmup=1, total=5, final=0.5), [2, 2, 1.5, 2, 1.5, 1, 1]),
        (  # cycles of 2, 4 and 8 steps
            cosine_restarts(1.0, warmup=0, total=14, cycles=3, growth=2.0),
            [
                *(1, 0.5, 1, 0.5 + 0.5**1.5, 0.5, 0.5 - 0.5**1.5),
                *((1 + math.cos(math.pi * i / 8)) / 2 for i in range(9)),
            ],
        ),
        (rex(1.0, warmup=0, total=3), [1.0, 0.8, 0.5, 0.0]),
        (rex(1.0, warmup=0, total=3, final=0.5), [1.0, 0.9, 0.75, 0.5]),
        (warmup_stable_decay(8.0, warmup=2, total=6, decay=2), [4.0, 8.0, 8.0, 8.0, 8.0, 4.0, 0.0]),
        (warmup_stable_decay(8.0, warmup=2, total=8, decay=0.5), [4, 8, 8, 8, 8, 6, 4, 2, 0, 0]),
        (
            warmup_stable_decay(1.0, warmup=0, total=5, decay=4, shape="sqrt"),
            [1.0, 1.0, 0.5, 1 - math.sqrt(0.5), 1 - math.sqrt(0.75), 0.0],
        ),
        (
            warmup_stable_decay(1.0, warmup=0, total=3, decay=2, shape="cosine", final=0.2),
            [1.0, 1.0, 0.6, 0.2],
        ),
        (  # two steps up, down to a tenth by half of the run, to a hundredth by its end
            piecewise(0.1, [(0, 0.0), (2, 1.0), (5, 0.1), (10, 0.01)]),
            [0, 0.05, 0.1, 0.07, 0.04, 0.01, 0.0082, 0.0064, 0.0046, 0.0028, 0.001, 0.001],
        ),
        (piecewise(2.0, [(3, 0.5)]), [1.0, 1.0, 1.0, 1.0, 1.0]),
        (piecewise(2.0, [(1, 1.0), (3, 0.0, "cosine")]), [2.0, 2.0, 1.0, 0.0, 0.0]),
        (piecewise(1.0, [(0, 1.0), (2, 0.01, "exponential")]), [1.0, 0.1, 0.01]),
        (piecewise(1.0, [(0, 0.0), (2, 1.0, "exponential")]), [0.0, 1e-4, 1.0]),
        (piecewise(1.0, [(0, 1.0), (2, 0.2, "reciprocal")]), [1.0, 1 / 3, 0.2]),
        (inverse_sqrt(2.0, warmup=1), [2.0, 2.0, 2**0.5, 2 / 3**0.5, 1.0]),
        (inverse_sqrt(1.0, warmup=2, warmup_from=0.0), [0.0, 0.5, 1.0, (2 / 3) ** 0.5, 0.5**0.5]),
        (  # warm-up of 0.4 of ten steps, from zero, then constant; and one that ends at a floor
            constant(1.0, warmup=4, warmup_from=0.0),
            [0.0, 0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0],
        ),
        (
            linear(1.0, warmup=2, total=8, final=0.1, warmup_from=0.0),
            [0.0, 0.5, 1.0, 0.85, 0.7, 0.55, 0.4, 0.25, 0.1, 0.1],
        ),
        (piecewise(1.0, [(0, 0.0), (2, 1.0, lambda a, b, p: a + (b - a) * p**3)]), [0, 0.125, 1]),
    ],
)
def test_golden_values(schedule, golden):
    assert values(schedule, len(golden)) == pytest.approx(golden, rel=1e-14, abs=1e-16)


@each
@pytest.mark.parametrize("final", [0.0, 0.1, 1.0])
def test_joints_are_exact(make, final):
    lr, warmup, total = 3e-4, 7, 50
    lr_at = make(lr, warmup=warmup, total=total, final=final)
    assert lr_at(0) == lr * (1 / 7)
    assert lr_at(warmup - 1) == lr_at(warmup) == lr
    assert lr_at(total - 1) > lr * final or final == 1
    assert lr_at(total) == lr_at(total + 1) == lr_at(10**9) == lr * final
    for begin in (0.0, 0.25):
        rates = values(make(lr, warmup=warmup, total=total, final=final, warmup_from=begin), 51)
        assert rates[:8] == pytest.approx([lr * (begin + (1 - begin) * s / 7) for s in range(8)])
        assert rates[7:] == values(lr_at, 51)[7:]


@each
@given(
    lr=st.floats(0, 10),
    warmup=st.integers(0, 30),
    rest=st.integers(0, 60),
    final=st.floats(0, 1),
)
def test_rates_stay_between_zero_and_the_peak_and_fall_after_warmup(make, lr, warmup, rest, final):
    total = max(1, warmup + rest)
    if make is warmup_stable_decay:
        make = partial(make, decay=rest)
    rates = values(make(lr, warmup=warmup, total=total, final=final), total + 3)
    slack = 1 + 1e-12
    assert all(0 <= rate <= lr * slack for rate in rates)
    assert all(a <= b * slack for a, b in pairwise(rates[:warmup]))
    after = rates[warmup:]
    assert all(b <= a * slack for a, b in pairwise(after))
    assert all(rate >= lr * final / slack for rate in after)


@given(shape=st.sampled_from(["linear", "cosine", "sqrt", "sqrt_late"]), decay=st.integers(0, 40))
def test_the_plateau_does_not_depend_on_the_length_of_the_run(shape, decay):
    short = warmup_stable_decay(1.0, warmup=5, total=50, decay=decay, shape=shape)
    long = warmup_stable_decay(1.0, warmup=5, total=90, decay=decay, shape=shape)
    assert values(short, 50 - decay) == values(long, 50 - decay)
    assert values(short, 60)[50 - decay :] == values(long, 100)[90 - decay :]


@given(
    st.lists(st.tuples(st.integers(0, 99), st.floats(0, 2)), min_size=1, unique_by=lambda p: p[0]),
    st.sampled_from(["linear", "cosine", "exponential"]),
)
def test_piecewise_meets_its_points_and_stays_between_them(points, curve):
    points = sorted(points)
    lr_at = piecewise(3.0, [(step, fraction, curve) for step, fraction in points])
    assert [lr_at(step) for step, _ in points] == [3.0 * fraction for _, fraction in points]
    for (start, here), (end, there) in pairwise(points):
        low, high = 3 * min(here, there), 3 * max(here, there, 1e-8)
        between = [lr_at(step) for step in range(start, end)]
        assert all(low * (1 - 1e-12) - 1e-300 <= rate <= high * (1 + 1e-12) for rate in between)


NAN, INFINITY = float("nan"), float("inf")


@each
@pytest.mark.parametrize(
    ("lr", "warmup", "total", "final", "message"),
    [
        (-1.0, 2, 10, 0.0, "lr must be .* got -1.0"),
        (NAN, 2, 10, 0.0, "lr must be .* got nan"),
        (INFINITY, 2, 10, 0.0, "lr must be .* got inf"),
        (1.0, -1, 10, 0.0, "warmup must be at least 0 steps, got -1"),
        (1.0, 11, 10, 0.0, "total must be .* warmup = 11, got 10"),
        (1.0, 0, 0, 0.0, "total must be at least 1 step"),
        (1.0, 2, 10, -0.1, "final must be .* got -0.1"),
        (1.0, 2, 10, 1.1, "final must be .* got 1.1"),
        (1.0, 2, 10, NAN, "final must be .* got nan"),
    ],
)
def test_bad_values_are_refused_by_name(make, lr, warmup, *, total, final, message):
    with pytest.raises(ValueError, match=f"^{make.__name__}: {message}"):
        make(lr, warmup=warmup, total=total, final=final)


@pytest.mark.parametrize(
    ("decay", "shape", "message"),
    [
        (1.5, "linear", "decay must be a fraction .* got 1.5"),
        (-0.1, "linear", "decay must be a fraction .* got -0.1"),
        (NAN, "linear", "decay must be a fraction .* got nan"),
        (11, "linear", "decay must be .* between 0 and 10, got 11"),
        (-1, "linear", "decay must be .* got -1"),
        (9, "linear", "must fit into total = 10 steps, got 2 and 9"),
        (0.9, "linear", "must fit into total = 10 steps, got 2 and 9"),
        (0.2, "cubic", "shape must be one of linear, cosine, sqrt, sqrt_late, got"),
    ],
)
def test_a_decay_that_does_not_fit_is_refused(decay, shape, message):
    with pytest.raises(ValueError, match=f"^warmup_stable_decay: .*{message}"):
        warmup_stable_decay(1.0, warmup=2, total=10, decay=decay, shape=shape)


@pytest.mark.parametrize("make", [linear, cosine, partial(warmup_stable_decay, decay=0.4)])
def test_a_warm_up_that_does_not_fit_is_refused_with_both_flags(make):
    with pytest.raises(ConfigError) as error:
        make(1.0, warmup=30, total=29)
    assert "--warmup" in error.value.hint
    assert "--schedule-steps" in error.value.hint


@pytest.mark.parametrize(
    ("lr", "points", "message"),
    [
        (NAN, [(0, 1.0)], "lr must be"),
        (1.0, [], r"increasing steps, got \[\]"),
        (1.0, [(3, 1.0), (3, 0.5)], r"increasing steps, got \[3, 3\]"),
        (1.0, [(3, 1.0), (1, 0.5)], r"increasing steps, got \[3, 1\]"),
        (1.0, [(0, -0.5)], r"at least 0, got \[-0.5\]"),
        (1.0, [(0, NAN)], r"at least 0, got \[nan\]"),
        (
            1.0,
            [(0, 1.0), (1, 0.5, "cubic")],
            "linear, cosine, exponential, reciprocal, got 'cubic'",
        ),
    ],
)
def test_points_that_make_no_curve_are_refused(lr, points, message):
    with pytest.raises(ValueError, match=f"^piecewise: .*{message}"):
        piecewise(lr, points)


def test_constant_and_inverse_sqrt_refuse_bad_values():
    with pytest.raises(ValueError, match=r"^constant: warmup"):
        constant(1.0, warmup=-1)
    with pytest.raises(ValueError, match=r"^inverse_sqrt: warmup"):
        inverse_sqrt(1.0, warmup=0)
    with pytest.raises(ValueError, match=r"^constant: lr"):
        constant(INFINITY)


@pytest.mark.parametrize(
    ("every", "last", "fires"),
    [
        (0, None, []),
        (0, 6, []),
        (1, None, [0, 1, 2, 3, 4, 5, 6]),
        (2, None, [0, 2, 4, 6]),
        (4, 5, [0, 4, 5]),
        (3, 6, [0, 3, 6]),
        (100, 6, [0, 6]),
    ],
)
def test_due_fires_at_multiples_and_at_the_last_step(every, last, fires):
    assert [step for step in range(7) if is_due(step, every, last=last)] == fires


def test_due_refuses_a_negative_period():
    with pytest.raises(ValueError, match=r"^is_due: every must be .* got -1"):
        is_due(1, -1)


def kempner_s(decays_by, *, warmup, begin, decay, floor):
    """Return KempnerForge's factors: up from zero, 1 until `begin`, then a decay to a floor."""

    def factor(step):
        if step < warmup:
            return step / warmup
        return decays_by(min(1.0, max(0, step - begin) / decay), floor)

    return factor


KEMPNER_S = {
    "linear": lambda p, m: 1 - (1 - m) * p,
    "cosine": lambda p, m: m + (1 - m) * (1 + math.cos(math.pi * p)) / 2,
    "sqrt_late": lambda p, m: m + (1 - m) * math.sqrt(1 - p),
    "power": lambda p, m: max(m, (1 - p) ** 3.0),
}


@pytest.mark.parametrize("warmup", [0, 3])
@pytest.mark.parametrize("name", KEMPNER_S)
def test_the_factors_of_kempnerforge_are_ours_with_warmup_from_zero(name, warmup):
    own = {"linear": linear, "cosine": cosine}.get(name)
    found = []
    if own or name == "power":
        ours = (
            own(2.0, total=13, warmup=warmup, warmup_from=0.0, final=0.1)
            if own
            else power(2.0, total=13, exponent=3.0, warmup=warmup, warmup_from=0.0, final=0.1)
        )
        found.append((ours, warmup, 13 - warmup))
    if name != "power":  # its plateau, and then the same decays
        found.append(
            (
                warmup_stable_decay(
                    2.0, total=13, decay=5, shape=name, warmup=warmup, warmup_from=0.0, final=0.1
                ),
                8,
                5,
            )
        )
    for ours, begin, decay in found:
        theirs = kempner_s(KEMPNER_S[name], warmup=warmup, begin=begin, decay=decay, floor=0.1)
        assert values(ours, 16) == pytest.approx([2 * theirs(t) for t in range(16)], rel=1e-14)


def test_power_refuses_bad_values():
    with pytest.raises(ValueError, match="power: exponent must be"):
        power(1.0, warmup=0, total=10, exponent=0.0)
    for warmup_from in (1.5, NAN):
        with pytest.raises(ValueError, match="power: warmup_from must be"):
            power(1.0, warmup=0, total=10, warmup_from=warmup_from)


def test_the_infinite_rate_is_the_paper_s():
    peak, stable, least, warmup, cooldown, begin, length = 4e-4, 1e-4, 1e-6, 5, 7, 20, 30

    def paper_s(step):  # equation 1 of Singh et al. 2025, with t_a + N_d as the length
        if step < warmup:
            return peak * step / warmup
        if step < warmup + cooldown:
            way = math.cos(math.pi * (step - warmup) / cooldown)
            return stable + (peak - stable) / 2 * (1 + way)
        over = max(0, step - begin) / length
        return stable * (least / stable) ** over

    make_endless = partial(
        infinite, peak, warmup=warmup, cooldown=cooldown, stable=stable / peak, warmup_from=0.0
    )
    make_annealed = partial(make_endless, anneal=length, final=least / peak)
    annealed = make_annealed(anneal_from=begin)
    assert values(annealed, 50) == pytest.approx([paper_s(step) for step in range(50)], rel=1e-12)
    endless = make_endless()
    assert values(endless, begin) == values(annealed, begin)
    assert endless(10**9) == peak * (stable / peak)
    at_once = make_annealed(anneal_from=warmup + cooldown)
    assert at_once(warmup + cooldown + length) == pytest.approx(least)


def test_a_stable_rate_that_decays_by_its_reciprocal_is_that_of_wsd_s():
    lr_at = infinite(
        1.0,
        warmup=0,
        cooldown=0,
        stable=1.0,
        anneal_from=2,
        anneal=4,
        final=0.1,
        curve="reciprocal",
    )
    shares = (0, 0, 0, 0.25, 0.5, 0.75, 1, 1)
    assert values(lr_at, 8) == pytest.approx([1 / (p / 0.1 + 1 - p) for p in shares], rel=1e-14)


SMALL = partial(infinite, 1.0, warmup=2, cooldown=2, stable=0.5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (partial(SMALL, stable=1.5), "stable must be .* got 1.5 and 2"),
        (partial(SMALL, stable=NAN), "stable must be .* got nan and 2"),
        (partial(SMALL, cooldown=0), "stable must be .* got 0.5 and 0"),
        (partial(SMALL, cooldown=-1), "stable must be .* got 0.5 and -1"),
        (partial(SMALL, stable=1.0), "stable must be .* got 1.0 and 2"),
        (
            partial(SMALL, anneal_from=3, anneal=5),
            "annealing .* at step 4 or later .* got anneal_from=3",
        ),
        (partial(SMALL, anneal_from=4), "annealing .* 1 step, got anneal_from=4 and anneal=0"),
        (partial(SMALL, warmup=-1), "warmup must be"),
        (partial(SMALL, final=2.0), "final must be"),
    ],
)
def test_an_infinite_rate_that_cannot_be_is_refused(make, message):
    with pytest.raises(ValueError, match=f"^infinite: {message}"):
        make()


@pytest.mark.parametrize(("warmup", "total", "cycles"), [(0, 30, 3), (4, 25, 7), (3, 100, 1)])
def test_restarts_are_those_of_transformers(warmup, total, cycles):
    """Whose warm-up starts at zero; every cycle starts on its step, whatever is rounded."""
    transformers = pytest.importorskip("transformers")
    parameter = torch.nn.Parameter(torch.zeros(()))
    theirs = transformers.get_cosine_with_hard_restarts_schedule_with_warmup(
        torch.optim.SGD([parameter], lr=2.0), warmup, total, num_cycles=cycles
    ).lr_lambdas[0]
    ours = cosine_restarts(2.0, warmup=warmup, total=total, cycles=cycles, warmup_from=0.0)
    assert values(ours, total + 3) == pytest.approx(
        [2 * theirs(step) for step in range(total + 3)], rel=1e-12, abs=1e-12
    )


def test_restarts_come_on_their_steps_and_bad_ones_are_refused():
    for cycles in range(1, 50):
        ours = cosine_restarts(1.0, warmup=7, total=7 + 9 * cycles, cycles=cycles)
        assert [ours(7 + 9 * i) for i in range(cycles)] == [1.0] * cycles
    for wrong in ({"cycles": 0}, {"growth": 0.0}, {"growth": NAN}):
        with pytest.raises(ValueError, match=rf"cosine_restarts: {next(iter(wrong))} must be"):
            cosine_restarts(1.0, warmup=0, total=8, **wrong)
