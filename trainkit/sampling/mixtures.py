"""Mixtures of corpora in phases: deterministic rows of each corpus at every step."""

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
from trainkit.sampling.permutation import check_batch, draw_rows
from trainkit.types import ConfigError, check_range

if TYPE_CHECKING:
    from trainkit.types import IntArray, RowsAt

LONGEST_PERIOD = 1 << 20  # a table of as many bytes, computed in 0.1 s for 8 corpora
BLOCK = 1024


@attrs.frozen
class MixturePhase:
    """The weight of each corpus and a factor of the learning rate, from global batch `start` on.

    Both depend on the number of the global batch, `Cursor.batch`, and not on the step of the run: a
    roll-back goes back in steps, never in batches, and rows and rate have to change together.

    A later phase may name only the weights that change; `make_mixture_phases` fills in the others.
    """

    start: int
    weights: Mapping[str, float]
    lr_scale: float = 1.0


def make_mixture_phases(*phases: MixturePhase) -> tuple[MixturePhase, ...]:
    """Fill in the weights that later phases do not name, from the first phase.

    Args:
        phases: The first phase starts at 0 and names every corpus, also those of weight 0 that come
            later. Each further one starts later than the one before. Its weights replace those of
            the first phase, not those of the phase before.

    Returns:
        The same number of phases, for `find_mixture_phase` and `sample_mixture`.

    Raises:
        ValueError: A start, a name, a weight or an `lr_scale` is out of range; the message names
            the phase.

    Examples:
        >>> phases = make_mixture_phases(
        ...     MixturePhase(0, {"web": 3, "code": 1}), MixturePhase(90, {"code": 9}, 0.5)
        ... )
        >>> phases[1].weights
        {'web': 3, 'code': 9}
    """
    starts = [phase.start for phase in phases]
    # The slice also rejects an empty sequence of phases.
    if starts[:1] != [0] or any(after <= before for before, after in pairwise(starts)):
        raise ValueError(
            "make_mixture_phases: phases must start at 0 and each later than the one before, got "
            f"{starts}"
        )
    complete = []
    for phase in phases:
        title = f"make_mixture_phases: the phase from batch {phase.start}"
        unknown = [name for name in phase.weights if name not in phases[0].weights]
        if unknown:
            raise ValueError(
                f"{title} names {unknown}, which the first does not; name them there, with weight 0"
            )
        if not (math.isfinite(phase.lr_scale) and phase.lr_scale >= 0):
            raise ValueError(f"{title} has lr_scale {phase.lr_scale}; it must be finite, 0 or more")
        weights = {**phases[0].weights, **phase.weights}
        _check_weights(title, weights)
        complete.append(attrs.evolve(phase, weights=weights))
    return tuple(complete)


def find_mixture_phase(batch: int, phases: Sequence[MixturePhase]) -> MixturePhase:
    """Return the phase of a global batch: the last one that has started.

    Args:
        batch: The number of the global batch, `state.cursor.batch`.
        phases: The phases, from `make_mixture_phases`.

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
    """Return the probability of each corpus, proportional to its weight to the power of 1 / T.

    A temperature above 1 moves the mixture towards equal probabilities; a weight of 0 stays 0.

    Args:
        weights: Numbers of at least 0, such as the tokens of each corpus; their sum is above 0.
        temperature: T, above 0.

    Returns:
        Probabilities by name, in the same order, with sum 1.

    Raises:
        ValueError: No weight is above 0, or a weight or the temperature is out of range.

    Examples:
        >>> mixture_weights({"web": 9, "code": 1, "old": 0})
        {'web': 0.9, 'code': 0.1, 'old': 0.0}
        >>> mixture_weights({"web": 9, "code": 1, "old": 0}, temperature=2)
        {'web': 0.75, 'code': 0.25, 'old': 0.0}
    """
    _check_weights("mixture_weights", weights)
    powers = _raise_weights(tuple(weights.values()), temperature)
    total = math.fsum(powers)
    return {name: power / total for name, power in zip(weights, powers, strict=True)}


def add_phase_facts(
    facts: Mapping[str, Any], phases: Sequence[MixturePhase]
) -> Callable[[int], dict[str, Any]]:
    """Return facts_at(batches): facts of a run, with the mixture phases that have started.

    A run must be resumed with the phases that it has drawn from; later ones may change. See
    `weights.checkpoint.facts.Facts`.

    Examples:
        >>> phases = make_mixture_phases(
        ...     MixturePhase(0, {"web": 1, "code": 1}), MixturePhase(5, {"web": 3})
        ... )
        >>> facts_at = add_phase_facts({"seed": 0}, phases)
        >>> [list(facts_at(batches)["phases"]) for batches in (0, 5, 6)]
        [['0'], ['0'], ['0', '5']]
    """

    def facts_at(batches: int) -> dict[str, Any]:
        # A phase counts from its first drawn batch on; a run without batches has the first phase.
        started = [phase for phase in phases if phase.start < max(batches, 1)]
        return {**facts, "phases": {str(phase.start): attrs.asdict(phase) for phase in started}}

    return facts_at


def anneal_phases(
    num_rows: Mapping[str, int],
    *,
    weights: Sequence[float] = (),
    anneal_step: int = 0,
    anneal_weights: Sequence[float] = (),
    anneal_lr: float = 1.0,
) -> tuple[MixturePhase, ...]:
    """Return the phases of a mixture: one from the start, and one for annealing, if any.

    Args:
        num_rows: Rows of each corpus by name.
        weights: The weight of each corpus, in the order of `num_rows`; by default its rows.
        anneal_step: The global batch at which the annealing phase starts; 0 for none.
        anneal_weights: The weights in the annealing phase; by default those before it.
        anneal_lr: The factor of the learning rate in the annealing phase.

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
    # Without weights a corpus is drawn in proportion to its rows.
    first = MixturePhase(0, dict(zip(num_rows, weights, strict=False)) or num_rows)
    if not anneal_step:
        return make_mixture_phases(first)
    last = dict(zip(num_rows, anneal_weights, strict=False))
    return make_mixture_phases(first, MixturePhase(anneal_step, last, anneal_lr))


def sample_mixture(
    num_rows: Mapping[str, int],
    phases: Sequence[MixturePhase] | None = None,
    *,
    rows_per_step: int,
    seed: int,
    temperature: float = 1.0,
) -> RowsAt:
    """Return rows_at(batch), which interleaves several corpora in given proportions.

    In a run with one phase, the count of each corpus is always within one row of its expected
    count, n rows times its probability. A further phase carries over the difference, as nearly as
    its period can, so that differences do not add up: over any number of phases two corpora stay
    within one row of the expected count, eight within two. The draws of a corpus, counted over all
    phases, visit all its rows once per epoch, in a new order each epoch.

    The probabilities are fractions with a common denominator of at most 2^20. They are exactly the
    weights where possible (0.7 and 0.3), and otherwise off by less than a row in a million.

    Args:
        num_rows: Rows of each corpus, in the order of `concat_packed`.
        phases: As for `make_mixture_phases`; by default one, which draws each corpus in proportion
            to its rows. A later phase changes nothing before it.
        rows_per_step: Rows in the global batch, over all ranks and microbatches.
        seed: The run's seed; the order of an epoch follows from it, the name of the corpus and the
            epoch's number.
        temperature: See `mixture_weights`.

    Returns:
        A function from the number of a global batch, from 0, to its rows: int64
        `[rows_per_step]`, rows of the concatenated table.

    Raises:
        ValueError: `rows_per_step` is below 1, the phases do not weigh exactly the corpora of
            `num_rows`, a corpus with a weight has no rows, or a weight comes to less than a row in
            a million; from rows_at, a batch number below 0.

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
    if phases[0].weights.keys() != num_rows.keys():
        raise ValueError(
            f"sample_mixture: the phases weigh {sorted(phases[0].weights)}, the corpora are "
            f"{sorted(num_rows)}; name them all in the first (weight 0 leaves one out)"
        )
    for phase in phases:
        empty = [name for name, weight in phase.weights.items() if weight and num_rows[name] < 1]
        if empty:
            raise ValueError(
                f"sample_mixture: the phase from batch {phase.start} gives weight to {empty}, "
                "which have no rows"
            )
    quotas = [_compute_quotas(phase.weights, tuple(num_rows), temperature) for phase in phases]
    spans = _make_spans([phase.start for phase in phases], quotas, rows_per_step)
    num_rows = dict(num_rows)
    ends = np.cumsum(list(num_rows.values()))

    def rows_at(batch: int) -> IntArray:
        check_batch(batch)
        span = next(span for span in reversed(spans) if span.start <= batch)
        position = span.first + (batch - span.start) * rows_per_step
        # The draws of each source before this batch, over all phases.
        draws = span.draws + _count_draws(span.quotas, position)
        order, _ = _make_period(span.quotas)
        # `order` is one period of sources, which repeats.
        source_of = order[(position + np.arange(rows_per_step)) % order.size]
        rows = np.empty(rows_per_step, np.int64)
        for source, (name, count) in enumerate(num_rows.items()):
            # Rows of one source are consecutive draws of its stream of epochs, wherever they
            # stand in the batch.
            columns = np.flatnonzero(source_of == source)
            # `ends - count` is the first row of each source in the concatenated table.
            if columns.size:
                row = draw_rows(int(draws[source]), columns.size, count, seed, "mixture", name)
                rows[columns] = ends[source] - count + row
        return rows

    return rows_at


@attrs.frozen(eq=False)
class _Span:
    """The rows of a phase.

    A phase begins at position `first` of its period. `draws` is the number of draws of each source
    before the phase, less its draws in the period before `first`.
    """

    start: int
    quotas: tuple[int, ...]
    first: int
    draws: IntArray


def _make_spans(
    starts: Sequence[int], quotas: Sequence[tuple[int, ...]], rows_per_step: int
) -> list[_Span]:
    """Choose the position in its period at which each phase begins.

    There the period lags behind for each source about as much as the phases before it do. If each
    phase began at 0, many short ones could miss a row each of the same source.
    """
    spans: list[_Span] = []
    draws = np.zeros(len(quotas[0]), np.int64)
    # Exact fractions: over many phases rounding errors would add up.
    lag = [Fraction(0)] * len(quotas[0])
    for start, end, quota in zip(starts, [*starts[1:], None], quotas, strict=True):
        first = 0
        if any(lag):
            order, _ = _make_period(quota)
            rounded_lag = np.array([float(x) for x in lag])
            first = _find_position(order, np.array(quota), rounded_lag)
        spans.append(_Span(start, quota, first, draws - _count_draws(quota, first)))
        if end is not None:
            num_rows = (end - start) * rows_per_step
            # Draws up to the end of this phase, and from them those of this phase alone.
            draws = spans[-1].draws + _count_draws(quota, first + num_rows)
            phase_draws = draws - spans[-1].draws - _count_draws(quota, first)
            for source, part in enumerate(quota):
                lag[source] += Fraction(num_rows * part, sum(quota)) - int(phase_draws[source])
    return spans


def _check_weights(title: str, weights: Mapping[str, float]) -> None:
    for name, weight in weights.items():
        if not (math.isfinite(weight) and weight >= 0):
            raise ValueError(f"{title}: the weight of {name!r} must be finite, 0 or more: {weight}")
    if not any(weights.values()):
        raise ValueError(f"{title}: at least one weight must be above 0, got {dict(weights)}")


def _raise_weights(weights: Sequence[float], temperature: float) -> tuple[float, ...]:
    """Raise weights to the power of 1 / temperature, up to a common factor."""
    if not (math.isfinite(temperature) and temperature > 0):
        raise ValueError(f"mixture_weights: temperature must be above 0, got {temperature}")
    if temperature == 1:
        return tuple(float(weight) for weight in weights)
    # The quotients are at most 1: 1e300 to the power of 10 would overflow.
    largest = max(weights)
    return tuple((weight / largest) ** (1 / temperature) if weight else 0.0 for weight in weights)


def _compute_quotas(
    weights: Mapping[str, float], names: tuple[str, ...], temperature: float
) -> tuple[int, ...]:
    """Return the number of rows of each corpus in a period; their sum is the period."""
    powers = _raise_weights([weights[name] for name in names], temperature)
    # str(0.1) is "0.1", so the fraction is 1/10, as meant, and not the nearest binary one.
    parts = [Fraction(str(power)) for power in powers]
    fractions = [part / sum(parts) for part in parts]
    # The period is the common denominator of the probabilities, where that is small enough.
    period = min(LONGEST_PERIOD, math.lcm(*(x.denominator for x in fractions)))
    quotas = [math.floor(x * period) for x in fractions]
    # The largest remainders get the rows that rounding down has left.
    by_remainder = sorted(range(len(fractions)), key=lambda i: quotas[i] - fractions[i] * period)
    for source in by_remainder[: period - sum(quotas)]:
        quotas[source] += 1
    # A probability is at most 1, so this is a weight that has been rounded to a quota of 0.
    lost = [name for name, x, quota in zip(names, fractions, quotas, strict=True) if x > quota]
    if lost:
        raise ValueError(
            f"sample_mixture: the weights of {lost} come to less than one row in {period}; make "
            "them larger, or 0"
        )
    return tuple(quotas)


@functools.lru_cache(maxsize=8)
def _make_period(quotas: tuple[int, ...]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return the source of each row of a period, and the count of each before each block."""
    period = sum(quotas)
    used = np.flatnonzero(quotas)
    order = used[_interleave(np.array(quotas)[used], period)]
    # Each (block, source) is one number, so that a single `bincount` counts them all.
    blocks = np.arange(period) // BLOCK * len(quotas) + order
    counts = np.bincount(blocks, minlength=-(-period // BLOCK) * len(quotas))
    before = np.zeros((-(-period // BLOCK) + 1, len(quotas)), np.int64)
    # Running counts at each block, so that `_count_draws` counts less than one block.
    before[1:] = np.cumsum(counts.reshape(-1, len(quotas)), axis=0)
    # A byte for each row, up to 256 sources.
    return order.astype(np.min_scalar_type(len(quotas) - 1)), before


def _count_draws(quotas: tuple[int, ...], num_rows: int) -> IntArray:
    """Count the draws of each source in the first rows of a phase."""
    order, before = _make_period(quotas)
    periods, remainder = divmod(num_rows, order.size)
    block = remainder // BLOCK
    last = np.bincount(order[block * BLOCK : remainder], minlength=len(quotas))
    return periods * np.array(quotas) + before[block] + last


@jit
def _find_position(order: Any, quotas: Any, lag: Any) -> Any:
    """Return the position in a period where its lag per source is nearest to a given one."""
    period_lag = np.zeros(quotas.size)
    best = 0
    smallest = np.inf
    for row in range(order.size):
        distance = 0.0
        for source in range(quotas.size):
            if quotas[source] > 0:
                distance = max(distance, abs(period_lag[source] - lag[source]))
        # Of positions that are equal but for rounding, the first one on any machine.
        if distance < smallest - 1e-9:
            best = row
            smallest = distance
        for source in range(quotas.size):
            period_lag[source] += quotas[source] / order.size
        period_lag[order[row]] -= 1
    return best


@jit
def _interleave(quotas: Any, period: int) -> Any:
    """Return the source of each row of a period; each source comes `quotas[source]` times.

    A source may be drawn from row `release` on and must be drawn by row `deadline`, counted from 1:
    then its count is off by at most 1 - 1 / slack of a row. The earliest deadline goes first.
    """
    # Tijdeman's bound for n sources is 1 - 1 / (2n - 2) of a row. In integers, times `slack`.
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
        # With k = `drawn`, draw k + 1 may come from row (k + 1 / slack) * period / quota on, and
        # must come by row (k + 1 - 1 / slack) * period / quota.
        due = slack * drawn[best] * period
        release[best] = (due + period - 1) // (slack * quotas[best]) + 1
        deadline[best] = (due + (slack - 1) * period) // (slack * quotas[best])
    return order
