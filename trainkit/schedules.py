"""Learning rates as pure functions of the step; intervals decide when to log, save or evaluate.

All schedules but `piecewise` have the same phases. Step s, counted from 0, is the step about to be
taken. Warm-up is linear, lr * (s + 1) / warmup: the first step is not at rate zero, and step
warmup - 1 has the full rate. With `warmup_from` it begins at that fraction of lr, for example 0.0,
and step `warmup` is the first with the full rate. The decay goes from lr at step `warmup` (or
later) to lr * final at step `total`, which a run of `total` steps does not reach, so that its last
step is not at rate zero either. After `total` the last value holds.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any, Literal

import attrs

from trainkit.types import ConfigError, Schedule, Validator, check_range

__all__ = [
    "Counters",
    "Interval",
    "constant",
    "cosine",
    "cosine_restarts",
    "infinite",
    "inverse_sqrt",
    "is_due",
    "is_interval_due",
    "linear",
    "parse_interval",
    "piecewise",
    "power",
    "rex",
    "warmup_stable_decay",
]

DecayShape = Callable[[float], float]
"""From the fraction of the decay that is over, 0 to 1, to the remaining fraction, 1 to 0."""

Curve = (
    Literal["linear", "cosine", "exponential", "reciprocal"]
    | Callable[[float, float, float], float]
)
"""A curve between two points: a name, or a function (start, end, fraction) -> value."""

Point = tuple[int, float] | tuple[int, float, Curve]
"""A step, its fraction of the rate, and the curve that leads to it ("linear" by default)."""

_LOG_FLOOR = 1e-8  # an exponential or a reciprocal curve cannot start or end at 0


def constant(lr: float, *, warmup: int = 0, warmup_from: float | None = None) -> Schedule:
    """Return a schedule that stays at lr after warm-up.

    Args:
        lr: The rate.
        warmup: Steps of warm-up.
        warmup_from: The start of warm-up as a fraction of lr; None starts at 1 / warmup.

    Raises:
        ValueError: An argument is out of range.

    Examples:
        >>> [constant(1.0, warmup=4)(step) for step in range(6)]
        [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
        >>> [constant(1.0, warmup=4, warmup_from=0.0)(step) for step in range(6)]
        [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]
    """
    _check_arguments("constant", lr, warmup=warmup, warmup_from=warmup_from)
    return lambda step: lr * _warm_up(step, warmup, warmup_from)


def linear(
    lr: float,
    *,
    warmup: int,
    total: int,
    final: float = 0.0,
    warmup_from: float | None = None,
) -> Schedule:
    """Return a schedule that falls in a straight line after warm-up.

    Args:
        lr: The peak rate.
        warmup: Steps of warm-up.
        warmup_from: The start of warm-up as a fraction of lr; None starts at 1 / warmup.
        total: The step at which the decay ends.
        final: The final rate as a fraction of lr.

    Raises:
        ValueError: An argument is out of range.

    Examples:
        >>> [linear(1.0, warmup=2, total=6)(step) for step in range(8)]
        [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    """
    return _make_decay(
        "linear",
        _straight,
        lr,
        warmup=warmup,
        total=total,
        final=final,
        warmup_from=warmup_from,
    )


def cosine(
    lr: float,
    *,
    warmup: int,
    total: int,
    final: float = 0.0,
    warmup_from: float | None = None,
) -> Schedule:
    """Return a schedule that falls along half a cosine after warm-up (Loshchilov and Hutter 2017).

    Args:
        lr: The peak rate.
        warmup: Steps of warm-up.
        warmup_from: The start of warm-up as a fraction of lr; None starts at 1 / warmup.
        total: The step at which the decay ends.
        final: The final rate as a fraction of lr.

    Raises:
        ValueError: An argument is out of range.

    Examples:
        >>> [round(cosine(1.0, warmup=0, total=4, final=0.2)(step), 3) for step in range(5)]
        [1.0, 0.883, 0.6, 0.317, 0.2]
    """
    return _make_decay(
        "cosine",
        _half_cosine,
        lr,
        warmup=warmup,
        total=total,
        final=final,
        warmup_from=warmup_from,
    )


def cosine_restarts(
    lr: float,
    *,
    warmup: int,
    total: int,
    cycles: int = 2,
    growth: float = 1.0,
    final: float = 0.0,
    warmup_from: float | None = None,
) -> Schedule:
    """Return a schedule of several half cosines after warm-up, each from lr again: SGDR.

    With `growth=1` it is `cosine_with_restarts` of `transformers`. A model saved at the end of a
    cycle, where its rate is lowest, is a good one to evaluate.

    Args:
        lr: The peak rate, with which each cycle starts.
        warmup: Steps of warm-up.
        warmup_from: The start of warm-up as a fraction of lr; None starts at 1 / warmup.
        total: The step at which the last cycle ends.
        cycles: The number of cycles, at least 1.
        growth: The length of a cycle over that of the one before, above 0.
        final: The rate at the end of each cycle as a fraction of lr.

    Raises:
        ValueError: An argument is out of range.

    References:
        Loshchilov and Hutter, "SGDR: Stochastic gradient descent with warm restarts" (2017), whose
        T_mult is `growth`.

    Examples:
        >>> rates = cosine_restarts(1.0, warmup=0, total=6, cycles=2, growth=2.0)
        >>> [round(rates(step), 3) for step in range(7)]
        [1.0, 0.5, 1.0, 0.854, 0.5, 0.146, 0.0]
    """
    check_range("cosine_restarts", at_least=1, cycles=cycles)
    check_range("cosine_restarts", above=0, growth=growth)
    # Where each cycle starts, as a fraction of the decay; the last one is the end.
    lengths = [growth**i for i in range(cycles)]
    starts = [part / sum(lengths) for part in accumulate(lengths, initial=0.0)]

    def shape(over: float) -> float:
        # A restart must not come a step late because a quotient was rounded down.
        cycle = bisect_right(starts, over + 1e-12, hi=cycles) - 1
        length = starts[cycle + 1] - starts[cycle]
        return _half_cosine(max(0.0, over - starts[cycle]) / length)

    return _make_decay(
        "cosine_restarts",
        shape,
        lr,
        warmup=warmup,
        total=total,
        final=final,
        warmup_from=warmup_from,
    )


def rex(
    lr: float,
    *,
    warmup: int,
    total: int,
    final: float = 0.0,
    warmup_from: float | None = None,
) -> Schedule:
    """Return a schedule that falls slowly first and fast at the end: reflected exponential decay.

    With p the fraction of the decay that is over, (1 - p) / (1/2 + (1 - p)/2) of the way down is
    left, as in Chen et al. 2021 (REX: Revisiting Budgeted Training with an Improved Schedule). Some
    libraries call a power of 1 - p "rex": here that is `power`.

    Args:
        lr: The peak rate.
        warmup: Steps of warm-up.
        warmup_from: The start of warm-up as a fraction of lr; None starts at 1 / warmup.
        total: The step at which the decay ends.
        final: The final rate as a fraction of lr.

    Raises:
        ValueError: An argument is out of range.

    Examples:
        >>> [round(rex(1.0, warmup=0, total=4)(step), 3) for step in range(5)]
        [1.0, 0.857, 0.667, 0.4, 0.0]
    """

    def shape(over: float) -> float:
        return (1 - over) / (0.5 + (1 - over) / 2)

    return _make_decay(
        "rex",
        shape,
        lr,
        warmup=warmup,
        total=total,
        final=final,
        warmup_from=warmup_from,
    )


def power(
    lr: float,
    *,
    warmup: int,
    total: int,
    exponent: float = 1.0,
    final: float = 0.0,
    warmup_from: float | None = None,
) -> Schedule:
    """Return a schedule that falls as a power of what is left: lr * max(final, (1 - p)^exponent).

    p is the fraction of the decay that is over. The other schedules end at `final`; this one is cut
    off there, and stays. KempnerForge calls it "rex".

    Args:
        lr: The peak rate.
        warmup: Steps of warm-up.
        warmup_from: The start of warm-up as a fraction of lr; None starts at 1 / warmup.
        total: The step at which the decay ends.
        exponent: 1 is a straight line; above 1 the rate falls fast first, below 1 slowly.
        final: The minimum of the rate as a fraction of lr.

    Raises:
        ValueError: An argument is out of range.

    Examples:
        >>> [power(1.0, warmup=0, total=4, exponent=2, final=0.1)(step) for step in range(5)]
        [1.0, 0.5625, 0.25, 0.1, 0.1]
    """
    if not (math.isfinite(exponent) and exponent > 0):
        raise ValueError(f"power: exponent must be above 0, got {exponent}")
    # Checked here with `final`, since the decay below ends at 0.
    _check_arguments("power", lr, warmup=warmup, total=total, final=final)
    lr_at = _make_decay(
        "power",
        lambda over: (1 - over) ** exponent,
        lr,
        warmup=warmup,
        total=total,
        final=0.0,
        warmup_from=warmup_from,
    )
    # `final` cuts off the decay, not the warm-up, which may begin below it.
    return lambda step: lr_at(step) if step < warmup else max(lr_at(step), lr * final)


def inverse_sqrt(lr: float, *, warmup: int, warmup_from: float | None = None) -> Schedule:
    """Return a schedule that falls as 1 / sqrt(step) after warm-up, without an end.

    It is lr * sqrt(warmup / step), as in Vaswani et al. 2017 (Attention Is All You Need).

    Args:
        lr: The peak rate.
        warmup: Steps of warm-up, at least 1.
        warmup_from: The start of warm-up as a fraction of lr; None starts at 1 / warmup.

    Raises:
        ValueError: An argument is out of range.

    Examples:
        >>> [inverse_sqrt(1.0, warmup=4)(step) for step in (0, 3, 4, 16, 400)]
        [0.25, 1.0, 1.0, 0.5, 0.1]
    """
    _check_arguments("inverse_sqrt", lr, warmup=warmup, warmup_from=warmup_from)
    # Without warm-up sqrt(warmup / step) would be 0 at every step.
    check_range("inverse_sqrt", at_least=1, warmup=warmup)
    return lambda step: (
        lr * (math.sqrt(warmup / step) if step > warmup else _warm_up(step, warmup, warmup_from))
    )


def warmup_stable_decay(
    lr: float,
    *,
    warmup: int,
    total: int,
    decay: float = 0.2,
    shape: Literal["linear", "cosine", "sqrt", "sqrt_late"] = "linear",
    final: float = 0.0,
    warmup_from: float | None = None,
) -> Schedule:
    """Return a schedule that stays at lr between warm-up and a decay at the end.

    The long middle does not depend on `total`, so that a run can be prolonged from before its
    decay. "sqrt" falls fast first: 1 - sqrt(p) of the way down is left, the best cool-down of
    Haegele et al. 2024 (Scaling Laws and Compute-Optimal Training Beyond Fixed Training Durations).
    "sqrt_late" falls fast at the end: sqrt(1 - p) is left, which KempnerForge calls "sqrt".

    Args:
        lr: The peak rate.
        warmup: Steps of warm-up.
        warmup_from: The start of warm-up as a fraction of lr; None starts at 1 / warmup.
        total: The step at which the decay ends.
        decay: The length of the decay: a float is a fraction of `total`, an int a number of steps.
        shape: The shape of the decay: "linear", "cosine" (half a cosine), "sqrt" or "sqrt_late".
        final: The final rate as a fraction of lr.

    Raises:
        ValueError: An argument is out of range, or warm-up and decay are together longer than
            `total`.

    Examples:
        >>> lr_at = warmup_stable_decay(1.0, warmup=2, total=10, decay=0.4, shape="sqrt")
        >>> [round(lr_at(step), 3) for step in range(12)]
        [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.5, 0.293, 0.134, 0.0, 0.0]
    """
    name = "warmup_stable_decay"
    shapes: dict[str, DecayShape] = {
        "linear": _straight,
        "cosine": _half_cosine,
        "sqrt": lambda over: 1 - math.sqrt(over),
        "sqrt_late": lambda over: math.sqrt(1 - over),
    }
    if shape not in shapes:
        raise ValueError(f"{name}: shape must be one of {', '.join(shapes)}, got {shape!r}")
    _check_arguments(name, lr, warmup=warmup, total=total, final=final, warmup_from=warmup_from)
    # An int 1 is one step, a float 1.0 the whole schedule.
    if not 0 <= decay <= (total if isinstance(decay, int) else 1.0):
        raise ValueError(
            f"{name}: decay must be a fraction of total between 0.0 and 1.0, or a number of steps "
            f"between 0 and {total}, got {decay!r}"
        )
    steps = decay if isinstance(decay, int) else round(decay * total)
    if warmup + steps > total:
        raise ConfigError(
            f"{name}: warm-up and decay must fit into total = {total} steps, got {warmup} and "
            f"{steps}",
            hint="shorten the warm-up (--warmup), or lengthen the schedule (--schedule-steps)",
        )
    return _make_decay(
        name,
        shapes[shape],
        lr,
        warmup=warmup,
        # This step still has the full rate, because the decay's fraction is 0 there.
        first=total - steps,
        total=total,
        final=final,
        warmup_from=warmup_from,
    )


def piecewise(lr: float, points: Sequence[Point]) -> Schedule:
    """Return a schedule through given points: a curve leads to each from the one before.

    Before the first point its value holds, and after the last one the last value. There is no
    warm-up but what the points say. Curves are "linear", "cosine", "exponential" and "reciprocal"
    (straight lines of the logarithms and of 1 / value, where 0 counts as 1e-8), or any function
    (start, end, fraction of the way) -> value.

    Args:
        lr: The rate that the points are fractions of.
        points: (step, fraction) or (step, fraction, curve), by increasing step.

    Raises:
        ValueError: There is no point, steps do not increase, or a fraction is negative or not
            finite.

    Examples:
        >>> lr_at = piecewise(0.1, [(0, 0.0), (2, 1.0), (5, 0.1), (10, 0.01)])
        >>> [round(lr_at(step), 4) for step in range(12)]
        [0.0, 0.05, 0.1, 0.07, 0.04, 0.01, 0.0082, 0.0064, 0.0046, 0.0028, 0.001, 0.001]
        >>> def square(start, end, fraction):
        ...     return start + (end - start) * fraction**2
        >>> [piecewise(1.0, [(0, 0.0), (4, 1.0, square)])(step) for step in range(5)]
        [0.0, 0.0625, 0.25, 0.5625, 1.0]
    """
    _check_arguments("piecewise", lr)
    steps, fractions, curves = _check_points(points)

    def lr_at(step: int) -> float:
        # The first point that is not before the step.
        after = next((i for i, at in enumerate(steps) if at >= step), len(steps) - 1)
        # Before the first point, after the last, and exactly on a point no curve is needed.
        if after == 0 or step >= steps[after]:
            return lr * fractions[after]
        over = (step - steps[after - 1]) / (steps[after] - steps[after - 1])
        return lr * curves[after](fractions[after - 1], fractions[after], over)

    return lr_at


def infinite(
    lr: float,
    *,
    warmup: int,
    cooldown: int,
    stable: float,
    anneal_from: int | None = None,
    anneal: int = 0,
    final: float = 0.01,
    curve: Curve = "exponential",
    warmup_from: float | None = None,
) -> Schedule:
    """Return a schedule for a run of open length, which can be annealed from any step.

    After warm-up the rate falls along half a cosine to lr * stable, and stays. Only the annealing
    at the end depends on the length of the run: it can begin at any checkpoint, and the run can
    continue from before it. As in Ibrahim et al. 2024 (Simple and Scalable Strategies to
    Continually Pre-train Large Language Models) and Singh et al. 2025 (Beyond Cosine Decay).
    Without cool-down and with the curve "reciprocal" it is the schedule of Wen et al. 2024
    (Understanding Warmup-Stable-Decay Learning Rates).

    Args:
        lr: The peak rate.
        warmup: Steps of warm-up.
        cooldown: Steps from the peak to the stable rate; 0 if `stable` is 1.
        stable: The stable rate as a fraction of lr.
        anneal_from: The step at which annealing starts; None for not yet.
        anneal: Steps of annealing.
        final: The rate after annealing as a fraction of lr.
        curve: The curve of annealing, as for `piecewise`.
        warmup_from: The start of warm-up as a fraction of lr; None starts at 1 / warmup.

    Raises:
        ValueError: An argument is out of range.

    Examples:
        >>> endless = infinite(1.0, warmup=2, cooldown=2, stable=0.5)
        >>> [endless(step) for step in (0, 1, 2, 3, 4, 10**9)]
        [0.5, 1.0, 1.0, 0.75, 0.5, 0.5]
        >>> annealed = infinite(
        ...     1.0, warmup=2, cooldown=2, stable=0.5, anneal_from=6, anneal=2, final=0.02
        ... )
        >>> [round(annealed(step), 6) for step in (5, 6, 7, 8, 9)]
        [0.5, 0.5, 0.1, 0.02, 0.02]
    """
    name = "infinite"
    plateau = warmup + cooldown
    _check_arguments(name, lr, warmup=warmup, final=final, warmup_from=warmup_from)
    # A rate below the peak takes steps to reach, and the peak itself none.
    fits = 0 <= cooldown < math.inf and (stable < 1) == (cooldown > 0)
    if not (fits and 0 <= stable <= 1):
        raise ValueError(
            f"{name}: stable must be a fraction of lr below 1 and cooldown above 0, or 1 and 0 "
            f"steps, got {stable} and {cooldown}"
        )
    starts_on_plateau = anneal_from is None or plateau <= anneal_from < math.inf
    if not starts_on_plateau or (anneal_from is not None and not 1 <= anneal < math.inf):
        raise ValueError(
            f"{name}: annealing must begin at step {plateau} or later and take at least 1 step, "
            f"got anneal_from={anneal_from} and anneal={anneal}"
        )
    # By step, so that a cool-down or a plateau of no length leaves one point, the later one.
    points: dict[int, Point] = {warmup: (warmup, 1.0), plateau: (plateau, stable, "cosine")}
    if anneal_from is not None:
        points.setdefault(anneal_from, (anneal_from, stable))
        points[anneal_from + anneal] = (anneal_from + anneal, final, curve)
    # The warm-up is no piece between two points: its first step is above 0 by default.
    after = piecewise(lr, list(points.values()))
    return lambda step: after(step) if step >= warmup else lr * _warm_up(step, warmup, warmup_from)


def is_due(step: int, every: int, *, last: int | None = None, powers_of_two: bool = False) -> bool:
    """Return whether a periodic action is due after a step.

    Args:
        step: The number of steps taken.
        every: The period; 0 means never, not even at the last step.
        last: The last step of the run, which is always due.
        powers_of_two: Steps 1, 2, 4, 8 and so on are due too, even if `every` is 0: the checkpoints
            that `retention.Retention(powers_of_two=True)` retains.

    Raises:
        ValueError: `every` is negative.

    Examples:
        >>> [step for step in range(1, 8) if is_due(step, 3, last=7)]
        [3, 6, 7]
        >>> is_due(7, 0, last=7)
        False
        >>> [step for step in range(20) if is_due(step, 0, powers_of_two=True)]
        [1, 2, 4, 8, 16]
    """
    check_range("is_due", at_least=0, every=every)
    # A power of two has a single bit.
    is_power = powers_of_two and step > 0 and step.bit_count() == 1
    return is_power or (every > 0 and (step % every == 0 or step == last))


# ---------------------------------------------------------------------------------------- intervals

Unit = Literal["steps", "tokens", "seconds", "epochs"]
"""What an interval is counted in."""

_SCALES = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "B": 10**9, "T": 10**12}
_UNITS: dict[str, tuple[Unit, int]] = {
    "step": ("steps", 1),
    "token": ("tokens", 1),
    "epoch": ("epochs", 1),
    "s": ("seconds", 1),
    "sec": ("seconds", 1),
    "second": ("seconds", 1),
    "min": ("seconds", 60),
    "minute": ("seconds", 60),
    "h": ("seconds", 3600),
    "hour": ("seconds", 3600),
    "d": ("seconds", 86400),
    "day": ("seconds", 86400),
}
_INTERVAL = re.compile(rf"([0-9]+(?:\.[0-9]+)?)([kMGBT]?)[-_ ]?({'|'.join(_UNITS)})s?")


@attrs.frozen(repr=False)
class Interval:
    """How often something is done: every `value` steps, tokens, seconds or epochs; 0 is never.

    Examples:
        >>> Interval(200), Interval(1800, "seconds"), Interval(100_000_000, "tokens")
        (200, 30min, 100M-tokens)
        >>> bool(Interval(0)), parse_interval("30min") == Interval(1800, "seconds")
        (False, True)
    """

    value: float
    unit: Unit = "steps"

    def __bool__(self) -> bool:
        return self.value > 0

    def __str__(self) -> str:
        if self.unit == "steps":
            return f"{self.value:g}" if self.value < 10**6 else str(int(self.value))
        if self.unit == "epochs":
            return f"{self.value!r}epoch{'s' * (self.value != 1)}"
        if self.unit == "seconds":
            size, name = next(
                (
                    (n, x)
                    for n, x in ((86400, "d"), (3600, "h"), (60, "min"))
                    if self.value and self.value % n == 0
                ),
                (1, "s"),
            )
            value = self.value / size
            return f"{int(value) if value == int(value) else value!r}{name}"
        letter = next((x for x in "TBMk" if self.value and self.value % _SCALES[x] == 0), "")
        return f"{int(self.value) // _SCALES[letter]}{letter}-tokens"

    __repr__ = __str__


@attrs.frozen(kw_only=True)
class Counters:
    """How far a run has come, by each unit of an interval; `epochs` may be a fraction."""

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    epochs: float = 0.0


def parse_interval(text: str | int | Interval) -> Interval:
    """Return the interval of a text; a whole number without a unit is a number of steps.

    Numbers may have a letter (k, M, G or B, T). Units are s, min, h, d, tokens, steps and epochs.

    Raises:
        ConfigError: It is none, steps or tokens are not whole, or it is too large.

    Examples:
        >>> [parse_interval(x) for x in (200, "2k-steps", "90 minutes", "1.5B-tokens", "0.5epochs")]
        [200, 2000, 90min, 1500M-tokens, 0.5epochs]
        >>> parse_interval("30m")
        Traceback (most recent call last):
        ...
        trainkit.types.ConfigError: '30m' is no interval: 30min, or 30M-tokens for millions
    """
    if isinstance(text, Interval):
        return text
    match = _INTERVAL.fullmatch(str(text)) or re.fullmatch(r"(-?[0-9]+)()()", str(text))
    if match is None or isinstance(text, bool):
        minutes = re.fullmatch(r"([0-9]+)m", str(text))
        raise ConfigError(
            f"{str(text)[:100]!r} is no interval",
            got=text,
            hint=f"{minutes[1]}min, or {minutes[1]}M-tokens for millions"
            if minutes
            else "write 200, 30min, 100M-tokens or 2epochs",
        )
    unit, size = _UNITS[match[3] or "step"]
    number_of_units = float(match[1]) if "." in match[1] else int(match[1])
    value = number_of_units * _SCALES[match[2]] * size
    if unit in ("steps", "tokens") and value != int(value):
        raise ConfigError(f"{text!r} is no whole number of {unit}", got=text)
    if value >= 1 << 63:
        raise ConfigError(f"{text!r} must be below 2^63", got=text)
    return Interval(int(value) if value == int(value) else value, unit)


def check_interval(*, never: bool) -> Validator:
    """Return an attrs validator: an interval is above 0, or, if it may be `never`, 0.

    Examples:
        >>> @attrs.frozen
        ... class Config:
        ...     every: Interval = attrs.field(validator=check_interval(never=False))
        >>> Config(Interval(0))
        Traceback (most recent call last):
        ...
        trainkit.types.ConfigError: every must be above 0, got 0
    """

    def validate(_: Any, attribute: attrs.Attribute[Any], value: Interval) -> None:
        if value.value < 0 or not (value or never):
            least = "at least 0" if never else "above 0"
            raise ConfigError(
                f"{attribute.name} must be {least}, got {value}",
                where=attribute.name,
                got=str(value),
                want=least,
            )

    return validate


def is_interval_due(interval: Interval, before: Counters, after: Counters) -> bool:
    """Return whether a multiple of an interval lies between two moments of a run.

    It depends on the counters alone, not on the process: a run that was resumed does the same at
    the same steps. However many multiples a step passes, it is due once.

    Args:
        interval: The interval; 0 is never due.
        before: The counters when it was last considered.
        after: The counters now.

    Examples:
        >>> every = parse_interval("1k-tokens")
        >>> [is_interval_due(every, Counters(tokens=n), Counters(tokens=n + 400)) for n in (0, 800)]
        [False, True]
    """
    if not interval:
        return False

    def count(counters: Counters) -> int:
        # Fractions of epochs are rounded: 0.3 / 0.1 is just below 3.
        return math.floor(getattr(counters, interval.unit) / interval.value + 1e-9)

    return count(after) > count(before)


# ------------------------------------------------------------------------------------------- shapes


def _straight(over: float) -> float:
    return 1 - over


def _half_cosine(over: float) -> float:
    return (1 + math.cos(math.pi * over)) / 2


def _interpolate_linear(start: float, end: float, fraction: float) -> float:
    return start + (end - start) * fraction


def _interpolate_cosine(start: float, end: float, fraction: float) -> float:
    return end + (start - end) * _half_cosine(fraction)


def _interpolate_exponential(start: float, end: float, fraction: float) -> float:
    # A straight line of the logarithm: start^(1 - p) * end^p, with p the fraction.
    start, end = max(start, _LOG_FLOOR), max(end, _LOG_FLOOR)
    return start * (end / start) ** fraction


def _interpolate_reciprocal(start: float, end: float, fraction: float) -> float:
    # A straight line of 1 / value: 1 / ((1 - p) / start + p / end), with p the fraction.
    start, end = max(start, _LOG_FLOOR), max(end, _LOG_FLOOR)
    return 1 / ((1 - fraction) / start + fraction / end)


# ------------------------------------------------------------------------------------------- phases


def _warm_up(step: int, warmup: int, start: float | None) -> float:
    """Return the warm-up factor of a step, up to 1."""
    if start is None:
        return min(1.0, (step + 1) / warmup) if warmup else 1.0
    # Step 0 is at `start` itself, so the full rate comes one step later than without it.
    return start + (1 - start) * min(1.0, step / warmup) if warmup else 1.0


def _make_decay(
    name: str,
    shape: DecayShape,
    lr: float,
    *,
    warmup: int,
    first: int | None = None,
    total: int,
    final: float,
    warmup_from: float | None,
) -> Schedule:
    """Make a schedule of warm-up, a plateau up to step `first`, and a decay; no plateau if None."""
    _check_arguments(name, lr, warmup=warmup, total=total, final=final, warmup_from=warmup_from)
    # Without a plateau the decay begins where the warm-up ends.
    first = warmup if first is None else first

    def lr_at(step: int) -> float:
        if step < first:
            return lr * _warm_up(step, warmup, warmup_from)
        # First, because without a decay `first` is `total`, and the quotient would divide by 0.
        if step >= total:
            return lr * final
        # A shape falls from 1 to 0; here it falls from 1 to `final`.
        return lr * (final + (1 - final) * shape((step - first) / (total - first)))

    return lr_at


def _check_arguments(
    name: str,
    lr: float,
    *,
    warmup: int = 0,
    total: int | None = None,
    final: float = 0.0,
    warmup_from: float | None = None,
) -> None:
    """Raise ValueError if an argument is out of range; a default is for a phase left out."""
    # Every test asks for what is valid, because NaN fails all comparisons.
    if not (math.isfinite(lr) and lr >= 0):
        raise ValueError(f"{name}: lr must be finite and at least 0, got {lr}")
    if not 0 <= warmup < math.inf:
        raise ValueError(f"{name}: warmup must be at least 0 steps, got {warmup}")
    if total is not None and not max(warmup, 1) <= total < math.inf:
        raise ConfigError(
            f"{name}: total must be at least 1 step and at least warmup = {warmup}, got {total}",
            hint="shorten the warm-up (--warmup), or lengthen the schedule (--schedule-steps)",
        )
    if warmup_from is not None and not 0 <= warmup_from <= 1:
        raise ValueError(f"{name}: warmup_from must be between 0 and 1 of lr, got {warmup_from}")
    if not 0 <= final <= 1:
        raise ValueError(f"{name}: final must be a fraction of lr between 0 and 1, got {final}")


def _check_points(
    points: Sequence[Point],
) -> tuple[list[int], list[float], list[Callable[[float, float, float], float]]]:
    """Return steps, fractions and curves of the points of `piecewise`."""
    named = {
        "linear": _interpolate_linear,
        "cosine": _interpolate_cosine,
        "exponential": _interpolate_exponential,
        "reciprocal": _interpolate_reciprocal,
    }
    steps = [point[0] for point in points]
    fractions = [point[1] for point in points]
    curves = [point[2] if len(point) == 3 else "linear" for point in points]
    if not points or any(a >= b for a, b in pairwise(steps)):
        raise ValueError(f"piecewise: points must have increasing steps, got {steps}")
    if not all(math.isfinite(fraction) and fraction >= 0 for fraction in fractions):
        raise ValueError(
            f"piecewise: fractions of lr must be finite and at least 0, got {fractions}"
        )
    unknown = [curve for curve in curves if not callable(curve) and curve not in named]
    if unknown:
        raise ValueError(
            f"piecewise: a curve must be a function or one of {', '.join(named)}, "
            f"got {unknown[0]!r}"
        )
    functions = [curve if callable(curve) else named[curve] for curve in curves]
    return steps, fractions, functions
