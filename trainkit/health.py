"""Classify steps by loss and gradient norm, and decide what to do: skip, roll back or stop.

These are pure functions. Loss and gradient norm of a step are sums over all ranks, so that every
rank computes the same decision without communication. The state of the decisions is
`TrainState.health`, plain floats and lists of them, which checkpoints store exactly: a resumed run
decides like one that never stopped.

- A step is *bad* when its loss or its gradient norm is not finite. It is skipped on the device:
  parameters and moments do not change, but its number, its data and its learning rate are used up.
  Several bad steps in a row, or non-finite parameters or moments, cause a roll-back; too many
  roll-backs end the run.
- A step is a *spike* when its loss or norm is far above those of the last good steps.
- A step is *empty* when no token is in the loss; it is skipped.
- A step is an *overflow* when a scaled loss is finite and the norm is not: the loss scale is too
  large. It is skipped, and the scale is halved; at a scale of 1 or less the step is bad.

    should_apply = health.make_finite_check(terms["loss"], state.health, policy, tokens=tokens)
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

__all__ = [
    "Action",
    "HealthState",
    "Policy",
    "StepStatus",
    "check_divergence",
    "choose_action",
    "classify_step",
    "get_loss_scale",
    "judge_step",
    "make_finite_check",
    "restore_health",
    "stop_if_diverged",
    "update_loss_scale",
]

HealthState: TypeAlias = "Mapping[str, float | Sequence[float] | Tensor]"
"""The state between steps, `TrainState.health`.

`skips`: bad steps in a row, the first of them is `first_bad`. `skipped`, `empty`, `spikes`,
`rollbacks`: counts of the whole run. `bad_steps`: the numbers of the last bad steps. `rolled_back`:
the numbers of the steps before which the run was rolled back. `losses`, `norms`: those of the last
good steps. `loss_scale`: that of the next step, unchanged for `scale_held` steps.
"""

_MAX_LISTED = 32  # the number of bad steps that are listed
_SIGMA = 1.4826  # the standard deviation of a normal distribution over its median deviation
_MIN_SPREAD = 0.02  # of the median, so that a small change of steady numbers is not a spike


@attrs.frozen(kw_only=True)
class Policy:
    """The policy for bad steps and spikes."""

    max_skips: int = attrs.field(default=3, validator=positive)
    """The number of bad steps in a row that causes a roll-back; those before are skipped."""
    max_rollbacks: int = attrs.field(default=3, validator=non_negative)
    """The maximum number of roll-backs; instead of another one the run stops."""
    on_spike: Literal["apply", "skip"] = attrs.field(
        default="apply", validator=one_of("apply", "skip")
    )
    """Whether a spike is applied and reported, or skipped like a bad step."""
    spike_sigmas: float = attrs.field(default=10.0, validator=positive)
    """The number of standard deviations above the median of the window that makes a spike."""
    spike_window: int = attrs.field(default=64, validator=positive)
    """The number of good steps in the window."""
    spike_after: int = attrs.field(default=16, validator=positive)
    """The number of good steps before the first spike can be detected."""
    on_divergence: Literal["ignore", "save", "stop"] = attrs.field(
        default="ignore", validator=one_of("ignore", "save", "stop")
    )
    """What to do if the smoothed training loss stays above its minimum by a nat: nothing, save and
    stop, or stop without a save."""


@attrs.frozen
class StepStatus:
    """The class of a step, and the reason."""

    kind: Literal["ok", "spike", "empty", "overflow", "bad", "damaged"]
    reason: str = ""


@attrs.frozen
class Action:
    """The action after a step, and the reason.

    For a roll-back and a stop, `before` is the last step before the first bad one: the run goes
    back to a checkpoint of it, or of an earlier step.
    """

    kind: Literal["apply", "skip", "rollback", "stop"]
    reason: str = ""
    before: int = 0


# ------------------------------------------------------------------------------------------- a step


def spike_limits(memory: HealthState, policy: Policy) -> tuple[float, float]:
    """Return the loss and the norm above which a step is a spike; inf with too few steps.

    The limit is the median of the window plus `spike_sigmas` times its spread, the median absolute
    deviation: an outlier changes neither much. Limits are fp32 numbers, so that the host and a
    device that computes in fp32 compare with the same ones.

    Examples:
        >>> memory = {"losses": [2.0, 2.1, 1.9, 2.0], "norms": [1.0] * 4}
        >>> spike_limits(memory, Policy(spike_after=4, spike_sigmas=5))
        (2.370650053024292, 1.100000023841858)
        >>> spike_limits(memory, Policy(spike_after=5))
        (inf, inf)
    """
    losses = _get_list(memory, "losses")
    norms = _get_list(memory, "norms")
    return _compute_limit(losses, policy), _compute_limit(norms, policy)


def classify_step(
    loss: float, norm: float, memory: HealthState, policy: Policy, *, tokens: float = 1
) -> StepStatus:
    """Classify a step by its loss and its gradient norm.

    Args:
        loss: The mean loss of the global batch.
        norm: The norm of the gradient before clipping.
        memory: The health state before the step.
        policy: The policy that defines a spike.
        tokens: The number of tokens in the loss of the global batch.

    Examples:
        >>> classify_step(2.0, math.inf, {}, Policy())
        StepStatus(kind='bad', reason='the gradient norm is inf')
        >>> classify_step(9.0, 1.0, {"losses": [2.0] * 16, "norms": [1.0] * 16}, Policy())
        StepStatus(kind='spike', reason='the loss is 9, above 2.4')
    """
    values = (("loss", loss), ("gradient norm", norm))
    nonfinite = [f"the {name} is {value}" for name, value in values if not math.isfinite(value)]
    if nonfinite:
        return StepStatus("bad", " and ".join(nonfinite))
    if not tokens:
        return StepStatus("empty", "no token of the batch is trained on")
    limits = spike_limits(memory, policy)
    high = [
        f"the {name} is {value:.6g}, above {limit:.6g}"
        for (name, value), limit in zip(values, limits, strict=True)
        if value > limit
    ]
    return StepStatus("spike", " and ".join(high)) if high else StepStatus("ok")


def make_finite_check(
    loss: Tensor, memory: HealthState, policy: Policy, *, tokens: Tensor | None = None
) -> Callable[[Tensor], Tensor]:
    """Return should_apply(norm), the decision of `classify_step` on the device, without a sync.

    A step is applied when its loss and norm are finite, when a token is in the loss, and, if the
    policy skips spikes, when it is not a spike.

    Args:
        loss: The mean loss of the global batch, 0-d.
        memory: The health state before the step.
        policy: The policy that defines a spike, and whether it is skipped.
        tokens: The number of tokens in the loss of the global batch, 0-d; None does not check it.

    Returns:
        A function from the norm to a 0-d bool tensor, for `clip_and_step`.

    Examples:
        >>> import torch
        >>> tokens = torch.tensor(5)
        >>> should_apply = make_finite_check(torch.tensor(2.0), {}, Policy(), tokens=tokens)
        >>> should_apply(torch.tensor(1.0)), should_apply(torch.tensor(math.nan))
        (tensor(True), tensor(False))
    """
    skips = policy.on_spike == "skip"
    limits = spike_limits(memory, policy) if skips else (math.inf, math.inf)

    def should_apply(norm: Tensor) -> Tensor:
        # x - x is 0 where x is finite and NaN elsewhere, and NaN equals nothing.
        is_good = ((loss - loss) + (norm - norm)).eq(0.0)
        for value, limit in zip((loss, norm), limits, strict=True):
            if math.isfinite(limit):
                # torch would round the limit to the dtype of a bf16 value.
                is_good = is_good & (value.float() if value.itemsize < 4 else value).le(limit)
        return is_good if tokens is None else is_good & tokens.gt(0)

    return should_apply


# --------------------------------------------------------------------------------------- loss scale


def get_loss_scale(memory: HealthState, precision: Precision) -> Tensor | float | None:
    """Return the loss scale of a step for fp16, and None for other dtypes.

    Gradients of fp16 below 6e-8 are 0, and above 65,504 inf; with a scale most are neither. It is
    2^16 at first, and always a power of 2, so that scaling does not round.

        scale = tk.health.get_loss_scale(state.health, precision)
        sums = forward_backward(microbatches, denominator=tk.batch.scale_denominator(tokens, scale))
        update = tk.clip_and_step(params, optimizer, ..., scale=scale)
        return tk.advance(state, batch, {**terms, **update.metrics, ...}, axis=ps.loss)

    Args:
        memory: `state.health`, in which `advance` stores the next one (`update_loss_scale`).
        precision: The precision of the step.

    References:
        Micikevicius et al., "Mixed precision training" (2018).

    Examples:
        >>> [get_loss_scale({}, Precision(compute=x)) for x in ("fp16", "bf16")]
        [65536.0, None]
    """
    if precision.compute != "fp16":
        return None
    scale: Any = memory.get("loss_scale", 2.0**16)
    return scale


def update_loss_scale(
    memory: HealthState, metrics: Mapping[str, Any], *, interval: int = 2000
) -> dict[str, Any]:
    """Update the loss scale for the next step, on the device, without a host sync.

    The scale is halved after an overflow, and doubled after `interval` steps without one.

    Args:
        memory: The health state before the step.
        metrics: The step's `loss_scale`, and `overflowed`, a 0-d bool tensor that is equal on all
            ranks; see `Update.metrics`.
        interval: The number of steps without an overflow after which the scale grows.

    Examples:
        >>> import torch
        >>> metrics = {"loss_scale": 8.0, "overflowed": torch.tensor(True)}
        >>> update_loss_scale({"scale_held": 9.0}, metrics)
        {'scale_held': tensor(0.), 'loss_scale': tensor(4.)}
    """
    # Products with 0 and 1 in place of branches, which would wait for the device.
    is_good = metrics["overflowed"].logical_not()
    num_before: Any = memory.get("scale_held", 0.0)
    num_steps = (num_before + 1.0) * is_good
    grows = num_steps.ge(interval)
    scale = metrics["loss_scale"] * (0.5 + 0.5 * is_good) * (1.0 + 1.0 * grows)
    return {**memory, "scale_held": num_steps * grows.logical_not(), "loss_scale": scale}


def copy_loss_scale(newest: HealthState, memory: HealthState) -> dict[str, Any]:
    """Copy the loss scale of a newer health state, before the newer one is judged.

    Examples:
        >>> copy_loss_scale({"skips": 0.0, "loss_scale": 4.0}, {"skips": 1.0, "loss_scale": 8.0})
        {'skips': 1.0, 'loss_scale': 4.0}
    """
    scale = {name: newest[name] for name in ("loss_scale", "scale_held") if name in newest}
    return {**memory, **scale}


# ----------------------------------------------------------------------------------------- decision


def choose_action(status: StepStatus, memory: HealthState, policy: Policy) -> Action:
    """Return the action after a step: apply it, skip it, roll back, or stop.

    Args:
        status: The class of the step.
        memory: The health state before the step.
        policy: The limits of bad steps and roll-backs.

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
    if status.kind in ("empty", "overflow"):
        return Action("skip", status.reason)
    if not _counts_as_bad(status, policy):
        return Action("apply", status.reason)
    num_bad = int(_get_number(memory, "skips")) + 1
    rollbacks = int(_get_number(memory, "rollbacks"))
    # Skipping does not repair parameters or moments, so damage rolls back at once.
    if status.kind != "damaged" and num_bad < policy.max_skips:
        return Action("skip", status.reason)
    reason = status.reason if num_bad == 1 else f"{status.reason}; {num_bad} bad steps in a row"
    if rollbacks < policy.max_rollbacks:
        return Action("rollback", reason)
    return Action("stop", f"{reason}; after {rollbacks} roll-backs")


def judge_step(
    state: TrainState,
    record: Mapping[str, Any],
    policy: Policy,
    *,
    seen: HealthState | None = None,
    damage: Callable[[], Sequence[str]] | None = None,
) -> tuple[Action, TrainState]:
    """Return the action after a step, and the state with updated health.

    Whether the step was applied is in the record, as `should_apply` decided; loss and norm give the
    reason. A bad step that was applied has damaged the run.

    Args:
        state: The state after the step, with the health state before it.
        record: The step's metrics as plain values: `loss`, `grad_norm`, and if available `tokens`,
            `skipped`, `loss_scale` and `overflowed`.
        policy: The policy.
        seen: The health state that `make_finite_check` of this step got, if that was an earlier
            one: whether a spike is skipped depends on the limits of the device.
        damage: Called after bad steps only, on all ranks; returns the names of parameters and
            moments that are not finite, as `replica_check.find_nonfinite_state` does. Skipping
            steps does not repair these.

    Returns:
        The action, and the new state.

    Examples:
        >>> record = {"loss": math.nan, "grad_norm": 1.0, "tokens": 8, "skipped": 1}
        >>> action, state = judge_step(TrainState(step=5), record, Policy())
        >>> action.kind, action.reason, state.health["skips"]
        ('skip', 'the loss is nan', 1.0)
        >>> judge_step(TrainState(step=5), record, Policy(), damage=lambda: ["weight on rank 1"])[0]
        Action(kind='rollback', reason='the loss is nan; not finite: weight on rank 1', before=4)
    """
    memory = state.health
    loss = float(record["loss"])
    norm = float(record["grad_norm"])
    limits = memory if seen is None or policy.on_spike != "skip" else seen
    status = classify_step(loss, norm, limits, policy, tokens=record.get("tokens", 1))
    is_skipped_spike = status.kind == "spike" and policy.on_spike == "skip"
    # Loops that apply every step may leave `skipped` out of the record.
    skipped = bool(record.get("skipped", status.kind in ("bad", "empty") or is_skipped_spike))
    status = _reconcile(status, policy, skipped=skipped)
    # With a finite loss it was the loss scale that made the gradient overflow; a scale of 1 cannot.
    if skipped and record.get("overflowed") and record["loss_scale"] > 1:
        status = StepStatus("overflow") if math.isfinite(loss) else status
    # All ranks come here together, so `damage` may communicate.
    if status.kind == "bad" and damage is not None:
        names = list(damage())
        if names:
            status = StepStatus("damaged", f"{status.reason}; not finite: {', '.join(names)}")
    # A spike that was applied after all is reported, and does not count as bad.
    if status.kind == "spike" and not skipped:
        policy = attrs.evolve(policy, on_spike="apply")
    action = choose_action(status, memory, policy)
    health = _update_health(state.step, (loss, norm), status, memory, policy)
    if action.kind in ("rollback", "stop"):
        action = attrs.evolve(action, before=int(_get_number(health, "first_bad")) - 1)
    return action, attrs.evolve(state, health=health)


def restore_health(saved: HealthState, live: HealthState) -> dict[str, Any]:
    """Return the health state after a roll-back: the window of the checkpoint, current counts.

    Args:
        saved: The health state of the checkpoint.
        live: The health state before the roll-back, from `judge_step`.

    Examples:
        >>> live = {"skips": 3.0, "skipped": 3.0, "first_bad": 10.0, "bad_steps": [10.0, 11.0]}
        >>> restore_health({"losses": [2.0], "norms": [1.0]}, live)["rollbacks"]
        1.0
    """
    # The window is that of the checkpoint, so that no loss of a repeated step counts twice; counts
    # go on, so that roll-backs come to an end.
    counts = {name: live[name] for name in ("skipped", "empty", "spikes") if name in live}
    rolled_back = [*_get_list(live, "rolled_back"), _get_number(live, "first_bad")]
    return {
        **{name: value for name, value in saved.items() if name not in ("skips", "first_bad")},
        **counts,
        "bad_steps": list(_get_list(live, "bad_steps")),
        "rollbacks": _get_number(live, "rollbacks") + 1.0,
        "rolled_back": rolled_back[-_MAX_LISTED:],
    }


def make_stop_error(action: Action, memory: HealthState) -> NumericsError:
    """Return the error that ends a run, with its bad steps and roll-backs.

    Examples:
        >>> error = make_stop_error(Action("stop", "the loss is nan", 9), {"rolled_back": [4.0]})
        >>> error.code, error.what
        (67, 'training has no good step after step 9: the loss is nan; rolled back before step 4')
    """
    steps = [int(step) for step in _get_list(memory, "bad_steps")]
    rolled_back = [int(step) for step in _get_list(memory, "rolled_back")]
    parts = [f"training has no good step after step {action.before}: {action.reason}"]
    if rolled_back:
        parts.append(f"rolled back before step {', '.join(map(str, rolled_back))}")
    if steps:
        parts.append(f"bad steps: {', '.join(map(str, steps))}")
    return NumericsError(
        "; ".join(parts),
        where=f"step {action.before + 1}",
        hint="look at the data and the learning rate there; resume from an earlier checkpoint, or "
        "allow more roll-backs",
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
    """Detect divergence of a loss over a window; return the reason, or "", and the new health.

    The loss is smoothed, s = smoothing * loss + (1 - smoothing) * s, from the first value on. It is
    high if s is at least `rise` above the minimum of s so far, or `factor` times the minimum. The
    run diverges if it is high `patience` times in a row, or if the loss is not finite, which does
    not change the health state.

    Args:
        loss: The new loss, equal on all ranks.
        memory: `state.health`.
        rise: The distance from the minimum that is high.
        factor: The multiple of the minimum that is high, above 1; inf never is. It is only used for
            a positive minimum.
        smoothing: The weight of the new loss.
        patience: The number of high values in a row.
        warmup: The number of first values that are never high.
        name: The prefix of the four numbers in the health state.

    Raises:
        ValueError: An argument is out of range.

    Examples:
        >>> health, diverged = {}, []
        >>> for loss in [3.0] * 10 + [9.0] * 3:
        ...     reason, health = check_divergence(loss, health)
        ...     diverged.append(bool(reason))
        >>> diverged.index(True)
        12
        >>> bool(check_divergence(math.nan, {})[0])
        True
    """
    if not (rise > 0 and factor > 1 and 0 < smoothing <= 1 and patience >= 1 and warmup >= 0):
        raise ValueError(
            "check_divergence: rise must be positive, factor above 1, smoothing in (0, 1], "
            f"patience at least 1, warmup at least 0, got {rise}, {factor}, {smoothing}, "
            f"{patience}, {warmup}"
        )
    if not math.isfinite(loss):
        return f"the {name} loss is {loss}", dict(memory)
    seen = _get_number(memory, f"{name}_seen") + 1.0
    # The first value is its own average: it has no start to be corrected for.
    last = _get_number(memory, f"{name}_smooth", loss)
    smooth = last + smoothing * (loss - last)
    best = min(smooth, _get_number(memory, f"{name}_best", smooth))
    high = smooth - best >= rise or (best > 0 and smooth / best >= factor)
    num_high = _get_number(memory, f"{name}_high") + 1.0 if high and seen > warmup else 0.0
    reason = ""
    if num_high >= patience:
        reason = f"the smoothed {name} loss is {smooth:.6g}, its best was {best:.6g}"
    return reason, {
        **memory,
        f"{name}_smooth": smooth,
        f"{name}_best": best,
        f"{name}_seen": seen,
        f"{name}_high": num_high,
    }


def stop_if_diverged(state: TrainState, loss: float) -> TrainState:
    """Update the state with an evaluation's loss; raise NumericsError if the run diverges.

    Args:
        state: The state.
        loss: The loss over held-out data, equal on all ranks.

    Raises:
        NumericsError: The loss is not finite, or has been high for too long.

    Examples:
        >>> stop_if_diverged(TrainState(step=5), 3.0).health["evaluation_best"]
        3.0
    """
    reason, memory = check_divergence(loss, state.health)
    if reason:
        raise NumericsError(
            f"training has diverged by step {state.step}: {reason}",
            where=f"step {state.step}",
            got=loss,
            hint="look at the learning rate; --resume takes an earlier checkpoint",
        )
    return attrs.evolve(state, health=memory)


def is_among_best(score: float, memory: HealthState, *, most: int) -> tuple[bool, dict[str, Any]]:
    """Return whether a score is among the best so far, and the new health state.

    Args:
        score: The new score, lower is better, equal on all ranks. A score that is not finite is
            never among the best.
        memory: `state.health`, which has the best scores as `evaluation_scores`.
        most: The number of best scores.

    Examples:
        >>> health, results = {}, []
        >>> for score in [3.0, 2.0, 2.5, 1.0]:
        ...     is_best, health = is_among_best(score, health, most=1)
        ...     results.append(is_best)
        >>> results, health
        ([True, True, False, True], {'evaluation_scores': [1.0]})
    """
    if not math.isfinite(score):
        return False, dict(memory)
    # Lower is better; a score that ties with the last of the best is among them.
    scores = sorted([*_get_list(memory, "evaluation_scores"), float(score)])[:most]
    if score not in scores:
        return False, dict(memory)
    return True, {**memory, "evaluation_scores": scores}


# ------------------------------------------------------------------------------------ health state


def _get_number(memory: HealthState, name: str, default: float = 0.0) -> float:
    value = memory.get(name, default)
    if isinstance(value, Sequence):
        raise TypeError(f"health: {name} must be a number, got {value!r}")
    return float(value)


def _get_list(memory: HealthState, name: str) -> Sequence[float]:
    value = memory.get(name, ())
    if not isinstance(value, Sequence):
        raise TypeError(f"health: {name} must be a list of numbers, got {value!r}")
    return value


def _median(ordered: Sequence[float]) -> float:
    middle = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[middle]
    # Halves first, as the sum of two large numbers may be infinite.
    return ordered[middle - 1] / 2 + ordered[middle] / 2


def _compute_limit(values: Sequence[float], policy: Policy) -> float:
    recent = sorted(values[-policy.spike_window :])
    if len(recent) < policy.spike_after:
        return math.inf
    median = _median(recent)
    spread = _SIGMA * _median(sorted([abs(value - median) for value in recent]))
    spread = max(spread, _MIN_SPREAD * abs(median))
    if not spread:  # only around a median of 0: there is no scale to compare with
        return math.inf
    try:
        return struct.unpack("f", struct.pack("f", median + policy.spike_sigmas * spread))[0]
    # Beyond the range of fp32, so nothing finite is above the limit.
    except OverflowError:
        return math.inf


def _counts_as_bad(status: StepStatus, policy: Policy) -> bool:
    """Return whether a step counts towards a roll-back."""
    is_skipped_spike = status.kind == "spike" and policy.on_spike == "skip"
    return status.kind in ("bad", "damaged") or is_skipped_spike


def _reconcile(status: StepStatus, policy: Policy, *, skipped: bool) -> StepStatus:
    """Correct the class of a step by whether it was applied on the device."""
    if status.kind == "bad" and not skipped:
        return StepStatus("damaged", f"{status.reason}; the step was applied anyway")
    is_applied_spike = status.kind == "spike" and policy.on_spike != "skip"
    if skipped and (status.kind == "ok" or is_applied_spike):
        return StepStatus("bad", "the step was skipped, though its loss and norm are good here")
    if status.kind == "empty" and not skipped:
        return StepStatus("ok", status.reason)
    return status


def _update_health(
    step: int, values: tuple[float, float], status: StepStatus, memory: HealthState, policy: Policy
) -> dict[str, Any]:
    health: dict[str, Any] = dict(memory)
    if status.kind in ("spike", "empty"):
        name = "spikes" if status.kind == "spike" else "empty"
        health[name] = _get_number(memory, name) + 1.0
    if _counts_as_bad(status, policy):
        num_bad = _get_number(memory, "skips")
        health["first_bad"] = _get_number(memory, "first_bad") if num_bad else float(step)
        health["skips"] = num_bad + 1.0
        health["skipped"] = _get_number(memory, "skipped") + 1.0
        health["bad_steps"] = [*_get_list(memory, "bad_steps"), float(step)][-_MAX_LISTED:]
    # Steps of these two kinds neither go on nor end a row of bad ones.
    elif status.kind not in ("empty", "overflow"):
        health["skips"] = 0.0
        for name, value in zip(("losses", "norms"), values, strict=True):
            health[name] = [*_get_list(memory, name), value][-policy.spike_window :]
    return health
