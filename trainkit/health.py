"""Is a step good, and what follows when it is not: pure functions of numbers that ranks share.

Loss and gradient norm of a step are sums over all ranks, so every rank reads the same numbers here
and decides alike, without asking another. What a decision remembers is in `TrainState.health`,
plain floats and lists of them, which a checkpoint holds exactly: a run that goes on from one
decides as the run that never stopped.

A step is *bad* when its loss or its gradient's norm is not finite. It is skipped, on the device:
parameters and moments keep every bit; the step's number, its data and its learning rate are spent
all the same. Some bad steps in a row, or one whose parameters or moments are damaged themselves,
call for a roll-back; too many of these end the run. A step whose loss or norm lies far above those
of the last good ones is a *spike*. A step without a trained token is *empty*, and skipped. Where
the loss is scaled, a norm that is not finite of a finite loss says that the scale is too large: the
step is an *overflow*, skipped, and the scale halved; at a scale of 1 or less it is bad.

    applies = health.make_finite_check(terms["loss"], state.health, policy, tokens=tokens)
    update = tk.clip_and_step(stages, optimizer, ..., should_apply=should_apply)
    metrics = {**terms, "grad_norm": update.norm, "skipped": ~update.applied, "tokens": tokens, ...}

and in the loop `action, state = health.judge_step(state, record, policy)`.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import attrs

from trainkit.types import NumericsError, Precision, TrainState, non_negative, one_of, positive

if TYPE_CHECKING:
    from torch import Tensor

HealthState: TypeAlias = "Mapping[str, float | Sequence[float] | Tensor]"
"""What is remembered between steps, as `TrainState.health` holds it.

`skips` bad steps in a row, the first of them `first_bad`; in the whole run `skipped`, `empty`,
`spikes`, `rollbacks`; the numbers of the last bad steps `bad_steps`, and of those before which the
run went back, `rolled_back`; loss and norm of the last good steps, `losses` and `norms`; the next
step's `get_loss_scale`, and how many steps it has held, `scale_held`.
"""

_LISTED = 32  # bad steps that are remembered by number
_SIGMA = 1.4826  # the standard deviation of a normal distribution over its median deviation
_LEAST_SPREAD = 0.02  # of the median: numbers that hardly move make no spike of a small change


@attrs.frozen(kw_only=True)
class Policy:
    """What is done about bad steps, spikes and a run that diverges."""

    max_skips: int = attrs.field(default=3, validator=positive)
    """So many bad steps in a row are a roll-back; those before are skipped."""
    max_rollbacks: int = attrs.field(default=3, validator=non_negative)
    """The run stops where it would roll back once more."""
    on_spike: Literal["apply", "skip"] = attrs.field(
        default="apply", validator=one_of("apply", "skip")
    )
    """Whether a step that is a spike is taken and told, or skipped as a bad one."""
    spike_sigmas: float = attrs.field(default=10.0, validator=positive)
    """A spike lies so many standard deviations above the median of the window."""
    spike_window: int = attrs.field(default=64, validator=positive)
    """How many good steps a spike is held against."""
    spike_after: int = attrs.field(default=16, validator=positive)
    """With fewer good steps than this there is no spike."""


@attrs.frozen
class StepStatus:
    """What a step was, and why."""

    kind: Literal["ok", "spike", "empty", "overflow", "bad", "damaged"]
    reason: str = ""


@attrs.frozen
class Action:
    """What follows from a step, and why.

    For a roll-back and a stop, `before` is the last step before trouble began: a checkpoint of it,
    or of an earlier one, is where to go back to.
    """

    kind: Literal["apply", "skip", "rollback", "stop"]
    reason: str = ""
    before: int = 0


# ------------------------------------------------------------------------------------------- a step


def spike_limits(memory: HealthState, policy: Policy) -> tuple[float, float]:
    """Return above which loss and above which norm a step is a spike; inf while nothing is known.

    The limit is the median of the window and so many times its spread, which is the median distance
    from the median: one wild value moves neither. Both limits are numbers of fp32, so that a device
    that computes in fp32 and the host compare with the same one.

    Examples:
        >>> memory = {"losses": [2.0, 2.1, 1.9, 2.0], "norms": [1.0] * 4}
        >>> spike_limits(memory, Policy(spike_after=4, spike_sigmas=5))
        (2.370650053024292, 1.100000023841858)
        >>> spike_limits(memory, Policy(spike_after=5))
        (inf, inf)
    """
    return _limit(_list(memory, "losses"), policy), _limit(_list(memory, "norms"), policy)


def classify_step(
    loss: float, norm: float, memory: HealthState, policy: Policy, *, tokens: float = 1
) -> StepStatus:
    """Return what a step was.

    Args:
        loss: The mean loss of the global batch.
        norm: The norm of the gradient before clipping.
        memory: The health that the step began with.
        policy: What makes a spike.
        tokens: How many tokens of the global batch are trained on.

    Examples:
        >>> classify_step(2.0, math.inf, {}, Policy())
        StepStatus(kind='bad', reason='the gradient norm is inf')
        >>> classify_step(9.0, 1.0, {"losses": [2.0] * 16, "norms": [1.0] * 16}, Policy())
        StepStatus(kind='spike', reason='the loss is 9, above 2.4')
    """
    named = (("loss", loss), ("gradient norm", norm))
    wrong = [f"the {name} is {value}" for name, value in named if not math.isfinite(value)]
    if wrong:
        return StepStatus("bad", " and ".join(wrong))
    if not tokens:
        return StepStatus("empty", "no token of the batch is trained on")
    limits = spike_limits(memory, policy)
    high = [
        f"the {name} is {value:.6g}, above {limit:.6g}"
        for (name, value), limit in zip(named, limits, strict=True)
        if value > limit
    ]
    return StepStatus("spike", " and ".join(high)) if high else StepStatus("ok")


def make_finite_check(
    loss: Tensor, memory: HealthState, policy: Policy, *, tokens: Tensor | None = None
) -> Callable[[Tensor], Tensor]:
    """Return `applies(norm)`: the same verdict on the device, without a host sync.

    A step applies when its loss and norm are finite, when it has a token to train on, and, if the
    policy skips spikes, when it is none.

    Args:
        loss: The mean loss of the global batch, 0-d.
        memory: The health that the step began with.
        policy: What makes a spike, and whether it is skipped.
        tokens: How many tokens of the global batch are trained on, 0-d; None asks for none.

    Returns:
        A function from the norm to a 0-d bool tensor, for `clip_and_step`.

    Examples:
        >>> import torch
        >>> applies = make_finite_check(torch.tensor(2.0), {}, Policy(), tokens=torch.tensor(5))
        >>> applies(torch.tensor(1.0)), applies(torch.tensor(math.nan))
        (tensor(True), tensor(False))
    """
    skips = policy.on_spike == "skip"
    limits = spike_limits(memory, policy) if skips else (math.inf, math.inf)

    def applies(norm: Tensor) -> Tensor:
        # x - x is 0 where x is finite and NaN elsewhere, and NaN equals nothing.
        verdict = ((loss - loss) + (norm - norm)).eq(0.0)
        for value, limit in zip((loss, norm), limits, strict=True):
            if math.isfinite(limit):
                # A number of fewer bits than fp32 would have the limit rounded to its own.
                verdict = verdict & (value.float() if value.itemsize < 4 else value).le(limit)
        return verdict if tokens is None else verdict & tokens.gt(0)

    return applies


# --------------------------------------------------------------------------------------- loss scale


def get_loss_scale(memory: HealthState, precision: Precision) -> Tensor | float | None:
    """Return what the gradients of a step shall be multiples of; None but where it is of fp16.

    Gradients of fp16 below 6e-8 are 0, and above 65,504 inf: times a scale most are neither. It is
    2^16 at first, and a power of 2 always, so that it rounds nothing.

        scale = tk.health.get_loss_scale(state.health, precision)
        sums = forward_backward(microbatches, denominator=tk.batch.scale_denominator(tokens, scale))
        update = tk.clip_and_step(params, optimizer, ..., scale=scale)
        return tk.advance(state, batch, {**terms, **update.metrics, ...}, axis=ps.loss)

    Args:
        memory: `state.health`, in which `advance` remembers the next one (`update_loss_scale`).
        precision: What the step computes in.

    References:
        Micikevicius et al., "Mixed precision training" (2018).

    Examples:
        >>> (
        ...     get_loss_scale({}, Precision(compute="fp16")),
        ...     get_loss_scale({}, Precision(compute="bf16")),
        ... )
        (65536.0, None)
    """
    if precision.compute != "fp16":
        return None
    scale: Any = memory.get("loss_scale", 2.0**16)
    return scale


def update_loss_scale(
    memory: HealthState, told: Mapping[str, Any], *, interval: int = 2000
) -> dict[str, Any]:
    """Return the memory with the next step's loss scale, on the device, without a host sync.

    Half of it after an overflow, twice after `interval` steps without one.

    Args:
        memory: The health that the step began with.
        told: What became of the step: its `get_loss_scale`, and whether it `overflowed`, a 0-d bool
            tensor that is equal on all ranks; see `Update.metrics`.
        interval: After how many steps without an overflow the scale grows.

    Examples:
        >>> import torch
        >>> told = {"loss_scale": 8.0, "overflowed": torch.tensor(True)}
        >>> update_loss_scale({"scale_held": 9.0}, told)
        {'scale_held': tensor(0.), 'loss_scale': tensor(4.)}
    """
    good = told["overflowed"].logical_not()
    before: Any = memory.get("scale_held", 0.0)
    held = (before + 1.0) * good
    grows = held.ge(interval)
    scale = told["loss_scale"] * (0.5 + 0.5 * good) * (1.0 + 1.0 * grows)
    return {**memory, "scale_held": held * grows.logical_not(), "loss_scale": scale}


def copy_loss_scale(newest: HealthState, memory: HealthState) -> dict[str, Any]:
    """Return a memory with the loss scale of a newer one, which nobody has judged yet.

    Examples:
        >>> copy_loss_scale({"skips": 0.0, "loss_scale": 4.0}, {"skips": 1.0, "loss_scale": 8.0})
        {'skips': 1.0, 'loss_scale': 4.0}
    """
    return {**memory, **{x: newest[x] for x in ("loss_scale", "scale_held") if x in newest}}


# ----------------------------------------------------------------------------------------- decision


def choose_action(found: StepStatus, memory: HealthState, policy: Policy) -> Action:
    """Return what follows from a step: apply it, skip it, roll back, or stop.

    Args:
        found: What the step was.
        memory: The health that the step began with.
        policy: How many bad steps and roll-backs are borne.

    Returns:
        The action, without the step to go back to.

    Examples:
        >>> bad = StepStatus("bad", "the loss is nan")
        >>> [choose_action(bad, {"skips": n}, Policy(max_skips=3)).kind for n in (0, 1, 2)]
        ['skip', 'skip', 'rollback']
        >>> choose_action(bad, {"skips": 2, "rollbacks": 3}, Policy()).kind
        'stop'
        >>> choose_action(StepStatus("damaged", "weight is not finite"), {}, Policy()).kind
        'rollback'
    """
    if found.kind in ("empty", "overflow"):
        return Action("skip", found.reason)
    if not _is_held_against(found, policy):
        return Action("apply", found.reason)
    row, rollbacks = int(_number(memory, "skips")) + 1, int(_number(memory, "rollbacks"))
    if found.kind != "damaged" and row < policy.max_skips:
        return Action("skip", found.reason)
    told = found.reason if row == 1 else f"{found.reason}; {row} bad steps in a row"
    if rollbacks < policy.max_rollbacks:
        return Action("rollback", told)
    return Action("stop", f"{told}; after {rollbacks} roll-backs")


def judge_step(
    state: TrainState,
    record: Mapping[str, Any],
    policy: Policy,
    *,
    seen: HealthState | None = None,
    damage: Callable[[], Sequence[str]] | None = None,
) -> tuple[Action, TrainState]:
    """Return what follows from the step that led to a state, and the state that remembers it.

    Whether the step was taken is read off the record, where `applies` of that step has told it; the
    numbers say why. One that was taken although it was bad has damaged the run.

    Args:
        state: The state after the step, whose health is as the step found it.
        record: The step's metrics as plain values: `loss`, `grad_norm`, and where they are there
            `tokens`, `skipped`, `get_loss_scale` and `overflowed`.
        policy: What is done.
        seen: The health that `make_finite_check` of this step was given, if that was an earlier
            one: a spike that is skipped is one by the limits that the device had.
        damage: Called after a bad step only, on all ranks; gives the names of parameters and
            moments that are not finite, as `checkpoint.find_nonfinite_state` does. No number of
            skips mends these.

    Returns:
        The action, and the state with what is to be remembered.

    Examples:
        >>> record = {"loss": math.nan, "grad_norm": 1.0, "tokens": 8, "skipped": 1}
        >>> action, state = judge_step(TrainState(step=5), record, Policy())
        >>> action.kind, action.reason, state.health["skips"]
        ('skip', 'the loss is nan', 1.0)
        >>> judge_step(TrainState(step=5), record, Policy(), damage=lambda: ["weight on rank 1"])[0]
        Action(kind='rollback', reason='the loss is nan; not finite: weight on rank 1', before=4)
    """
    memory, values = state.health, (float(record["loss"]), float(record["grad_norm"]))
    limits = memory if seen is None or not _skips(policy) else seen
    found = classify_step(*values, limits, policy, tokens=record.get("tokens", 1))
    default = found.kind in ("bad", "empty") or (found.kind == "spike" and _skips(policy))
    skipped = bool(record.get("skipped", default))
    found = _as_done(found, policy, skipped=skipped)
    if skipped and record.get("overflowed") and record["loss_scale"] > 1:
        found = StepStatus("overflow") if math.isfinite(values[0]) else found
    if found.kind == "bad" and damage is not None:
        names = list(damage())
        if names:
            found = StepStatus("damaged", f"{found.reason}; not finite: {', '.join(names)}")
    asked = policy if skipped else attrs.evolve(policy, on_spike="apply")
    action = choose_action(found, memory, asked)
    kept = _remembered(state.step, values, found, memory, asked)
    if action.kind in ("rollback", "stop"):
        action = attrs.evolve(action, before=int(_number(kept, "first_bad")) - 1)
    return action, attrs.evolve(state, health=kept)


def restore_health(saved: HealthState, live: HealthState) -> dict[str, Any]:
    """Return the memory of a run that has gone back: the window it had then, the counts of now.

    Args:
        saved: The health of the checkpoint that it went back to.
        live: The health with which it went back, from `judge_step`.

    Examples:
        >>> live = {"skips": 3.0, "skipped": 3.0, "first_bad": 10.0, "bad_steps": [10.0, 11.0]}
        >>> restore_health({"losses": [2.0], "norms": [1.0]}, live)["rollbacks"]
        1.0
    """
    counts = {name: live[name] for name in ("skipped", "empty", "spikes") if name in live}
    return {
        **{name: value for name, value in saved.items() if name not in ("skips", "first_bad")},
        **counts,
        "bad_steps": list(_list(live, "bad_steps")),
        "rollbacks": _number(live, "rollbacks") + 1.0,
        "rolled_back": [*_list(live, "rolled_back"), _number(live, "first_bad")][-_LISTED:],
    }


def make_stop_error(action: Action, memory: HealthState) -> NumericsError:
    """Return the error that ends a run, with the list of what has happened.

    Examples:
        >>> error = make_stop_error(Action("stop", "the loss is nan", 9), {"rolled_back": [4.0]})
        >>> error.code, error.what
        (67, 'training has no good step after step 9: the loss is nan; rolled back before step 4')
    """
    steps = [int(step) for step in _list(memory, "bad_steps")]
    went = [int(step) for step in _list(memory, "rolled_back")]
    told = [f"training has no good step after step {action.before}: {action.reason}"]
    told += [f"rolled back before step {', '.join(map(str, went))}"] if went else []
    told += [f"bad steps: {', '.join(map(str, steps))}"] if steps else []
    return NumericsError(
        "; ".join(told),
        where=f"step {action.before + 1}",
        hint="look at the data and the learning rate there; go on from an earlier checkpoint, or "
        "with more roll-backs allowed",
    )


# --------------------------------------------------------------------------------------- divergence


def check_divergence(
    loss: float,
    memory: HealthState,
    *,
    rise: float = 1.0,
    factor: float = math.inf,
    smoothing: float = 0.3,
    patience: int = 3,
    warmup: int = 10,
    name: str = "evaluation",
) -> tuple[str, dict[str, Any]]:
    """Return why a run diverges, or "", and the memory to go on with; for an evaluation's loss.

    The loss is smoothed, s = smoothing * loss + (1 - smoothing) * s, from the first value on. It is
    high where s lies `rise` or more above the least s so far, or is `factor` times that. High
    `patience` times in a row is a divergence; a loss that is not finite is one at once, and is not
    remembered.

    Args:
        loss: The new loss, the same on all ranks.
        memory: `state.health`.
        rise: How far above the best is high.
        factor: How many times the best is high, above 1; inf never. It is not asked of a best that
            is not positive.
        smoothing: The weight of the new loss.
        patience: How many high values in a row.
        warmup: The first values that are never high.
        name: What the four numbers are remembered under.

    Raises:
        ValueError: An argument is out of range.

    Examples:
        >>> memory, told = {}, []
        >>> for loss in [3.0] * 10 + [9.0] * 3:
        ...     reason, memory = check_divergence(loss, memory)
        ...     told.append(bool(reason))
        >>> told.index(True)
        12
        >>> bool(check_divergence(math.nan, {})[0])
        True
    """
    if not (rise > 0 and factor > 1 and 0 < smoothing <= 1 and patience >= 1 and warmup >= 0):
        raise ValueError(
            "divergence: rise must be positive, factor above 1, smoothing in (0, 1], patience at "
            f"least 1, warmup at least 0, got {rise}, {factor}, {smoothing}, {patience}, {warmup}"
        )
    if not math.isfinite(loss):
        return f"the {name} loss is {loss}", dict(memory)
    seen = _number(memory, f"{name}_seen") + 1.0
    last = _number(memory, f"{name}_smooth", loss)
    smooth = last + smoothing * (loss - last)
    best = min(smooth, _number(memory, f"{name}_best", smooth))
    high = smooth - best >= rise or (best > 0 and smooth / best >= factor)
    row = _number(memory, f"{name}_high") + 1.0 if high and seen > warmup else 0.0
    kept = {"smooth": smooth, "best": best, "seen": seen, "high": row}
    reason = (
        f"the smoothed {name} loss is {smooth:.6g}, its best was {best:.6g}"
        if row >= patience
        else ""
    )
    return reason, {**memory, **{f"{name}_{key}": value for key, value in kept.items()}}


def stop_if_diverged(state: TrainState, loss: float, **options: Any) -> TrainState:
    """Return a state that remembers an evaluation's loss, or end a run that has diverged.

    Args:
        state: The state.
        loss: The loss over held-out data, the same on all ranks.
        **options: Those of `check_divergence`.

    Raises:
        NumericsError: The loss is not finite, or has been high for too long.

    Examples:
        >>> stop_if_diverged(TrainState(step=5), 3.0).health["evaluation_best"]
        3.0
    """
    reason, memory = check_divergence(loss, state.health, **options)
    if reason:
        raise NumericsError(
            f"training has diverged by step {state.step}: {reason}",
            where=f"step {state.step}",
            got=loss,
            hint="look at the learning rate; --resume takes an earlier checkpoint",
        )
    return attrs.evolve(state, health=memory)


def is_among_best(score: float, memory: HealthState, *, most: int) -> tuple[bool, dict[str, Any]]:
    """Return whether a score is among the best so far, and the memory to go on with.

    Args:
        score: The new score, the lower the better, the same on all ranks. One that is not finite
            is never among the best.
        memory: `state.health`, which remembers the best scores as `evaluation_scores`.
        most: How many are the best.

    Examples:
        >>> memory, found = {}, []
        >>> for score in [3.0, 2.0, 2.5, 1.0]:
        ...     is_best, memory = is_among_best(score, memory, most=1)
        ...     found.append(is_best)
        >>> found, memory
        ([True, True, False, True], {'evaluation_scores': [1.0]})
    """
    if not math.isfinite(score):
        return False, dict(memory)
    scores = sorted([*_list(memory, "evaluation_scores"), float(score)])[:most]
    if score not in scores:
        return False, dict(memory)
    return True, {**memory, "evaluation_scores": scores}


# ------------------------------------------------------------------------------------------- memory


def _number(memory: HealthState, name: str, default: float = 0.0) -> float:
    value = memory.get(name, default)
    if isinstance(value, Sequence):
        raise TypeError(f"health: {name} must be a number, got {value!r}")
    return float(value)


def _list(memory: HealthState, name: str) -> Sequence[float]:
    value = memory.get(name, ())
    if not isinstance(value, Sequence):
        raise TypeError(f"health: {name} must be a list of numbers, got {value!r}")
    return value


def _median(ordered: Sequence[float]) -> float:
    middle = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[middle]
    return ordered[middle - 1] / 2 + ordered[middle] / 2


def _limit(values: Sequence[float], policy: Policy) -> float:
    recent = sorted(values[-policy.spike_window :])
    if len(recent) < policy.spike_after:
        return math.inf
    median = _median(recent)
    spread = _SIGMA * _median(sorted(abs(value - median) for value in recent))
    spread = max(spread, _LEAST_SPREAD * abs(median))
    return _as_fp32(median + policy.spike_sigmas * spread) if spread else math.inf


def _as_fp32(x: float) -> float:
    try:
        return struct.unpack("f", struct.pack("f", x))[0]
    except OverflowError:
        return math.inf


def _skips(policy: Policy) -> bool:
    return policy.on_spike == "skip"


def _is_held_against(found: StepStatus, policy: Policy) -> bool:
    """Say whether a step counts towards a roll-back."""
    return found.kind in ("bad", "damaged") or (found.kind == "spike" and _skips(policy))


def _as_done(found: StepStatus, policy: Policy, *, skipped: bool) -> StepStatus:
    """Return what a step was, in view of whether it was taken."""
    if found.kind == "bad" and not skipped:
        return StepStatus("damaged", f"{found.reason}; the step was taken all the same")
    if skipped and (found.kind == "ok" or (found.kind == "spike" and not _skips(policy))):
        return StepStatus("bad", "the step was refused, though its loss and norm are good here")
    if found.kind == "empty" and not skipped:
        return StepStatus("ok", found.reason)
    return found


def _remembered(
    step: int, values: tuple[float, float], found: StepStatus, memory: HealthState, policy: Policy
) -> dict[str, Any]:
    kept: dict[str, Any] = dict(memory)
    if found.kind in ("spike", "empty"):
        name = "spikes" if found.kind == "spike" else "empty"
        kept[name] = _number(memory, name) + 1.0
    if _is_held_against(found, policy):
        row = _number(memory, "skips")
        kept["first_bad"] = _number(memory, "first_bad") if row else float(step)
        kept |= {"skips": row + 1.0, "skipped": _number(memory, "skipped") + 1.0}
        kept["bad_steps"] = [*_list(memory, "bad_steps"), float(step)][-_LISTED:]
    elif found.kind not in ("empty", "overflow"):
        kept["skips"] = 0.0
        for name, value in zip(("losses", "norms"), values, strict=True):
            kept[name] = [*_list(memory, name), value][-policy.spike_window :]
    return kept
