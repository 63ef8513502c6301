"""Mixtures of corpora, in phases: how many rows of which one, at every step, by no chance."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from trainkit.noise.jit import jit
from trainkit.sampling.permutation import check_batch, draws
from trainkit.types import ConfigError, check_range

if TYPE_CHECKING:
    from trainkit.types import IntArray, RowsAt

LONGEST_PERIOD = 1 << 20  # a table of as many bytes, made in 0.1 s for 8 corpora
BLOCK = 1024


@attrs.frozen
class MixturePhase:
    """From global batch `start` on: how much of each corpus, and a factor of the learning rate.

    Both follow the number of the global batch, `Cursor.batch`, and not the step of the run: a
    roll-back goes back in steps, never in batches, and rows and rate shall change together.

    In a later phase `weights` may name only what changes: `make_mixture_phases` fills in the rest.
    """

    start: int
    weights: Mapping[str, float]
    lr_scale: float = 1.0


def make_mixture_phases(*phases: MixturePhase) -> tuple[MixturePhase, ...]:
    """Return phases whose weights are complete: what one does not name is as in the first.

    Args:
        phases: The first starts at 0 and names every corpus, with weight 0 those that only come
            later. Each further one starts later than the one before. Its weights replace the
            first's, not those of the phase before.

    Returns:
        As many phases, for `find_mixture_phase` and `sample_mixture`.

    Raises:
        ValueError: A start, a name, a weight or an `lr_scale` is out of its range; the message
            names the phase.

    Examples:
        >>> phases = make_mixture_phases(
        ...     MixturePhase(0, {"web": 3, "code": 1}), MixturePhase(90, {"code": 9}, 0.5)
        ... )
        >>> phases[1].weights
        {'web': 3, 'code': 9}
    """
    starts = [phase.start for phase in phases]
    if starts[:1] != [0] or any(after <= before for before, after in pairwise(starts)):
        must = "phases must start at 0 and each later than the one before"
        raise ValueError(f"make_phases: {must}, got {starts}")
    merged = []
    for phase in phases:
        where = f"make_phases: the phase from batch {phase.start}"
        unknown = [name for name in phase.weights if name not in phases[0].weights]
        if unknown:
            mend = "which the first does not; name them there, with weight 0"
            raise ValueError(f"{where} names {unknown}, {mend}")
        if not (math.isfinite(phase.lr_scale) and phase.lr_scale >= 0):
            raise ValueError(f"{where} has lr_scale {phase.lr_scale}; it must be finite, 0 or more")
        whole = attrs.evolve(phase, weights={**phases[0].weights, **phase.weights})
        _check_weights(where, whole.weights)
        merged.append(whole)
    return tuple(merged)


def anneal_phases(
    num_rows: Mapping[str, int],
    *,
    weights: Sequence[float] = (),
    anneal_step: int = 0,
    anneal_weights: Sequence[float] = (),
    anneal_lr: float = 1.0,
) -> tuple[MixturePhase, ...]:
    """Return the phases of a mixture: from the start, and from the step on that it is annealed.

    Args:
        num_rows: Rows of each corpus; what it is drawn by where there are no weights.
        weights: Of each corpus, in their order.
        anneal_step: The global batch with which the last phase begins; 0 for no such phase.
        anneal_weights: Those of the last phase; by default as before.
        anneal_lr: What the learning rate is multiplied by in the last phase.

    Raises:
        ConfigError: There are not as many weights as corpora, or annealing without a step.
        ValueError: As `make_mixture_phases`.

    Examples:
        >>> phases = anneal_phases({"web": 6, "code": 2}, anneal_step=90, anneal_weights=(1, 1))
        >>> [(phase.start, phase.weights) for phase in phases]
        [(0, {'web': 6, 'code': 2}), (90, {'web': 1, 'code': 1})]
    """
    for name, given in (("weights", weights), ("anneal_weights", anneal_weights)):
        if len(given) not in (0, len(num_rows)):
            raise ConfigError(
                f"anneal_phases: {name} has {len(given)} numbers for {len(num_rows)} corpora; give "
                "each corpus one",
                where=name,
                got=len(given),
                want=len(num_rows),
            )
    if not anneal_step and (anneal_weights or anneal_lr != 1):
        raise ConfigError(
            "anneal_phases: anneal_weights and anneal_lr do nothing without anneal_step",
            where="anneal_step",
        )
    first = MixturePhase(0, dict(zip(num_rows, weights, strict=False)) or num_rows)
    if not anneal_step:
        return make_mixture_phases(first)
    last = dict(zip(num_rows, anneal_weights, strict=False))
    return make_mixture_phases(first, MixturePhase(anneal_step, last, anneal_lr))


def find_mixture_phase(batch: int, phases: Sequence[MixturePhase]) -> MixturePhase:
    """Return the phase of a global batch: the last that has started.

    Args:
        batch: The number of the global batch, `state.cursor.batch`.
        phases: What `make_mixture_phases` returns.

    Raises:
        ValueError: `batch` is below 0.

    Examples:
        >>> phases = make_mixture_phases(
        ...     MixturePhase(0, {"web": 1}), MixturePhase(90, {}, lr_scale=0.5)
        ... )
        >>> [find_mixture_phase(batch, phases).lr_scale for batch in (0, 89, 90)]
        [1.0, 1.0, 0.5]
    """
    check_batch(batch)
    return next(phase for phase in reversed(phases) if phase.start <= batch)


def mixture_weights(weights: Mapping[str, float], *, temperature: float = 1.0) -> dict[str, float]:
    """Return the probability of each corpus, in proportion to its weight to the power of 1 / T.

    A temperature above 1 moves the mixture towards equal parts; a weight of 0 stays 0 at every
    temperature.

    Args:
        weights: Numbers of at least 0, for instance tokens of each corpus; their sum is not 0.
        temperature: T, above 0.

    Returns:
        Probabilities by name, in the same order; they add up to 1.

    Raises:
        ValueError: There is no weight above 0, or a weight or the temperature is out of its range.

    Examples:
        >>> mixture_weights({"web": 9, "code": 1, "old": 0})
        {'web': 0.9, 'code': 0.1, 'old': 0.0}
        >>> mixture_weights({"web": 9, "code": 1, "old": 0}, temperature=2)
        {'web': 0.75, 'code': 0.25, 'old': 0.0}
    """
    _check_weights("mixture_weights", weights)
    powers = _powers(tuple(weights.values()), temperature)
    total = math.fsum(powers)
    return {name: power / total for name, power in zip(weights, powers, strict=True)}


def add_phase_facts(
    facts: Mapping[str, Any], phases: Sequence[MixturePhase]
) -> Callable[[int], dict[str, Any]]:
    """Return facts_at(batches): facts of a run, and the phases that have begun by then.

    What a run must be continued with are the phases that it has drawn from; those to come may
    change. See `checkpoint.Facts`.

    Examples:
        >>> phases = make_mixture_phases(
        ...     MixturePhase(0, {"web": 1, "code": 1}), MixturePhase(5, {"web": 3})
        ... )
        >>> facts_at = add_phase_facts({"seed": 0}, phases)
        >>> [list(facts_at(batches)["phases"]) for batches in (0, 5, 6)]
        [['0'], ['0'], ['0', '5']]
    """

    def facts_at(batches: int) -> dict[str, Any]:
        begun = [phase for phase in phases if phase.start < max(batches, 1)]
        return {**facts, "phases": {str(phase.start): attrs.asdict(phase) for phase in begun}}

    return facts_at


def sample_mixture(
    num_rows: Mapping[str, int],
    phases: Sequence[MixturePhase] | None = None,
    *,
    rows_per_step: int,
    seed: int,
    temperature: float = 1.0,
) -> RowsAt:
    """Return rows_at(batch), which draws from several corpora in given proportions.

    Over every prefix of a run with one phase each corpus has been drawn within one row of its part:
    n rows times its probability. A further phase takes over what those before it owe, as nearly as
    its period can, so that debts do not add up: over any number of phases two corpora stay within
    one row of what was asked, eight within two. Nothing is left to chance. The draws of one
    corpus, counted over all phases, walk through all its rows once per epoch, each epoch in an
    order of its own.

    The probabilities are fractions of one denominator of at most 2^20: exactly the weights' if they
    have such (0.7 and 0.3 do), else rounded to it, off by less than a row in a million.

    Args:
        num_rows: Rows of each corpus, in the order in which `concat_packed` joins them.
        phases: As for `make_mixture_phases`; by default one, in which each corpus is drawn as often
            as it has rows. A phase to come changes nothing before it.
        rows_per_step: Rows in the global batch, over all ranks and microbatches.
        seed: The run's seed; an epoch's order is made from it, the corpus' name and the epoch's
            number.
        temperature: See `mixture_weights`.

    Returns:
        A function from the number of a global batch, from 0, to its rows: int64
        `[rows_per_step]`, rows of the joined table.

    Raises:
        ValueError: `rows_per_step` is below 1, the phases do not weigh exactly the corpora of
            `num_rows`, a corpus that has weight has no rows, or a weight comes to less than a row
            in a million; from rows_at, a number of a batch below 0.

    Examples:
        >>> num_rows = {"web": 6, "code": 2}
        >>> phases = make_mixture_phases(
        ...     MixturePhase(0, {"web": 3, "code": 1}), MixturePhase(2, {"web": 1})
        ... )
        >>> rows_at = sample_mixture(num_rows, phases, rows_per_step=4, seed=0)
        >>> [rows_at(batch).tolist() for batch in range(4)]
        [[0, 5, 6, 4], [2, 1, 7, 3], [3, 6, 0, 7], [1, 6, 4, 7]]

    The guarantee is Tijdeman's, "The chairman assignment problem" (1980).
    """
    check_range("sample_mixture", at_least=1, rows_per_step=rows_per_step)
    phases = make_mixture_phases(*(phases or [MixturePhase(0, num_rows)]))
    _check_sources(num_rows, phases)
    quotas = [_quotas(phase.weights, tuple(num_rows), temperature) for phase in phases]
    spans = _spans([phase.start for phase in phases], quotas, rows_per_step)
    num_rows = dict(num_rows)
    ends = np.cumsum(list(num_rows.values()))

    def rows_at(batch: int) -> IntArray:
        check_batch(batch)
        span = next(span for span in reversed(spans) if span.start <= batch)
        place = span.begin + (batch - span.start) * rows_per_step
        drawn = span.drawn + _drawn(span.quotas, place)
        order, _ = _cycle(span.quotas)
        chosen = order[(place + np.arange(rows_per_step)) % order.size]
        rows = np.empty(rows_per_step, np.int64)
        for source, (name, count) in enumerate(num_rows.items()):
            own = np.flatnonzero(chosen == source)
            if own.size:
                number = draws(int(drawn[source]), own.size, count, seed, "mixture", name)
                rows[own] = ends[source] - count + number
        return rows

    return rows_at


@attrs.frozen(eq=False)
class _Span:
    """A phase as rows are drawn in it.

    `begin` is where in its period it begins; `drawn` is how often each source was drawn before the
    phase, less how often it comes in the period before `begin`.
    """

    start: int
    quotas: tuple[int, ...]
    begin: int
    drawn: IntArray


def _spans(
    starts: Sequence[int], quotas: Sequence[tuple[int, ...]], rows_per_step: int
) -> list[_Span]:
    """Let each phase begin where its period owes each source about what those before it still do.

    Beginning anew each time, many short phases could owe one source a row each.
    """
    found: list[_Span] = []
    drawn, owed = np.zeros(len(quotas[0]), np.int64), [Fraction(0)] * len(quotas[0])
    for start, end, quota in zip(starts, [*starts[1:], None], quotas, strict=True):
        begin = 0
        if any(owed):
            order, _ = _cycle(quota)
            begin = _nearest(order, np.array(quota), np.array([float(debt) for debt in owed]))
        found.append(_Span(start, quota, begin, drawn - _drawn(quota, begin)))
        if end is not None:
            rows = (end - start) * rows_per_step
            drawn = found[-1].drawn + _drawn(quota, begin + rows)
            here = drawn - found[-1].drawn - _drawn(quota, begin)
            for source, part in enumerate(quota):
                owed[source] += Fraction(rows * part, sum(quota)) - int(here[source])
    return found


def _check_weights(where: str, weights: Mapping[str, float]) -> None:
    for name, weight in weights.items():
        if not (math.isfinite(weight) and weight >= 0):
            raise ValueError(f"{where}: the weight of {name!r} must be finite, 0 or more: {weight}")
    if not any(weights.values()):
        raise ValueError(f"{where}: at least one weight must be above 0, got {dict(weights)}")


def _check_sources(num_rows: Mapping[str, int], phases: Sequence[MixturePhase]) -> None:
    if phases[0].weights.keys() != num_rows.keys():
        what = f"the phases weigh {sorted(phases[0].weights)}, the corpora are {sorted(num_rows)}"
        mend = "name them all in the first (weight 0 leaves one out)"
        raise ValueError(f"sample_mixture: {what}; {mend}")
    for phase in phases:
        empty = [name for name, weight in phase.weights.items() if weight and num_rows[name] < 1]
        if empty:
            what = f"gives weight to {empty}, which have no rows"
            raise ValueError(f"sample_mixture: the phase from batch {phase.start} {what}")


def _powers(weights: Sequence[float], temperature: float) -> tuple[float, ...]:
    """Raise weights to 1 / temperature, up to a factor; zeros stay."""
    if not (math.isfinite(temperature) and temperature > 0):
        raise ValueError(f"mixture_weights: temperature must be above 0, got {temperature}")
    if temperature == 1:
        return tuple(float(weight) for weight in weights)
    largest = max(weights)
    return tuple((weight / largest) ** (1 / temperature) if weight else 0.0 for weight in weights)


def _quotas(
    weights: Mapping[str, float], names: tuple[str, ...], temperature: float
) -> tuple[int, ...]:
    """Return how many of a period's rows each corpus gets; their sum is the period."""
    powers = _powers([weights[name] for name in names], temperature)
    # The text of a float is the shortest decimal fraction that is it: 0.1 is meant as 1/10.
    parts = [Fraction(str(power)) for power in powers]
    shares = [part / sum(parts) for part in parts]
    period = min(LONGEST_PERIOD, math.lcm(*(share.denominator for share in shares)))
    quotas = [math.floor(share * period) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda i: quotas[i] - shares[i] * period)
    for source in by_remainder[: period - sum(quotas)]:
        quotas[source] += 1
    lost = [name for name, share, quota in zip(names, shares, quotas, strict=True) if share > quota]
    if lost:
        what = f"the weights of {lost} come to less than one row in {period}"
        raise ValueError(f"sample_mixture: {what}; make them larger, or 0")
    return tuple(quotas)


@functools.lru_cache(maxsize=8)
def _cycle(quotas: tuple[int, ...]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return a period: the source of each row `[D]`, and how often each came before each block."""
    period, used = sum(quotas), np.flatnonzero(quotas)
    order = used[_interleave(np.array(quotas)[used], period)]
    blocks = np.arange(period) // BLOCK * len(quotas) + order
    counts = np.bincount(blocks, minlength=-(-period // BLOCK) * len(quotas))
    before = np.zeros((-(-period // BLOCK) + 1, len(quotas)), np.int64)
    before[1:] = np.cumsum(counts.reshape(-1, len(quotas)), axis=0)
    return order.astype(np.min_scalar_type(len(quotas) - 1)), before


def _drawn(quotas: tuple[int, ...], rows: int) -> IntArray:
    """Return how often each source comes among the first `rows` rows of a phase."""
    order, before = _cycle(quotas)
    periods, rest = divmod(rows, order.size)
    block = rest // BLOCK
    last = np.bincount(order[block * BLOCK : rest], minlength=len(quotas))
    return periods * np.array(quotas) + before[block] + last


@jit
def _nearest(order: Any, quotas: Any, owed: Any) -> Any:
    """Return after how many rows of a period it owes the sources most nearly what is given."""
    debt, best, least = np.zeros(quotas.size), 0, np.inf
    for row in range(order.size):
        far = 0.0
        for source in range(quotas.size):
            if quotas[source] > 0:
                far = max(far, abs(debt[source] - owed[source]))
        if far < least - 1e-9:
            best, least = row, far
        for source in range(quotas.size):
            debt[source] += quotas[source] / order.size
        debt[order[row]] -= 1
    return best


@jit
def _interleave(quotas: Any, period: int) -> Any:
    """Return which source each row of a period comes from; each comes `quotas[source]` times.

    A source may be drawn from row `release` on and must be by row `deadline`, counted from 1: then
    it is off by at most 1 - 1 / slack of a row. Of those that may, the one that must first is.
    """
    slack = max(2 * quotas.size - 2, 2)
    order = np.empty(period, np.int64)
    drawn, release, deadline = np.zeros((3, quotas.size), np.int64)
    for source in range(quotas.size):
        release[source] = (period - 1) // (slack * quotas[source]) + 1
        deadline[source] = (slack - 1) * period // (slack * quotas[source])
    for row in range(period):
        best = -1
        for source in range(quotas.size):
            if release[source] <= row + 1 and (best < 0 or deadline[source] < deadline[best]):
                best = source
        order[row] = best
        drawn[best] += 1
        begun = slack * drawn[best] * period
        release[best] = (begun + period - 1) // (slack * quotas[best]) + 1
        deadline[best] = (begun + (slack - 1) * period) // (slack * quotas[best])
    return order
