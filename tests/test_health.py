"""Bad numbers are seen alike by all ranks, change nothing, and end in a roll-back or a stop."""

import itertools
import math
import random
import struct
from functools import partial

import attrs
import orjson
import pytest
import torch

from trainkit.health import (
    Action,
    Policy,
    StepStatus,
    check_divergence,
    choose_action,
    classify_step,
    judge_step,
    make_finite_check,
    make_stop_error,
    restore_health,
    spike_limits,
)
from trainkit.types import Cursor, NumericsError, TrainState

NAN, INF = math.nan, math.inf
GOOD = {"losses": [2.0] * 20, "norms": [1.0] * 20}


def record(loss=2.0, norm=1.0, **rest):
    return {"loss": loss, "grad_norm": norm, **rest}


def run(records, policy, health=None, damage=None):
    """Judge steps 1, 2, ...; return the actions and the last state."""
    state, actions = TrainState(health=health or {}), []
    for values in records:
        state = attrs.evolve(state, step=state.step + 1)
        action, state = judge_step(state, values, policy, damage=damage)
        actions.append(action)
    return actions, state


def kinds(actions):
    return [action.kind for action in actions]


# ------------------------------------------------------------------------------------------ a step


@pytest.mark.case("N1", "N2", "N3")
@pytest.mark.parametrize(
    ("loss", "norm", "reason"),
    [
        (NAN, 1.0, "the loss is nan"),
        (-INF, 1.0, "the loss is -inf"),
        (2.0, INF, "the gradient norm is inf"),
        (INF, NAN, "the loss is inf and the gradient norm is nan"),
    ],
)
def test_a_number_that_is_not_finite_makes_a_bad_step(loss, norm, reason):
    assert classify_step(loss, norm, GOOD, Policy()) == StepStatus("bad", reason)
    assert classify_step(loss, norm, {}, Policy(), tokens=0).kind == "bad"
    assert not make_finite_check(torch.tensor(loss), GOOD, Policy())(torch.tensor(norm))


@pytest.mark.case("N8")
@pytest.mark.parametrize(("loss", "norm"), [(20.0, 1.0), (2.0, 10.0), (20.0, 10.0)])
def test_ten_times_the_usual_is_a_spike(loss, norm):
    assert classify_step(loss, norm, GOOD, Policy()).kind == "spike"
    assert classify_step(2.1, 1.1, GOOD, Policy()).kind == "ok"
    assert classify_step(0.1, 0.0, GOOD, Policy()).kind == "ok"  # lower is no spike


@pytest.mark.case("N8")
def test_usual_noise_makes_no_spike_and_wild_values_do_not_move_the_limit():
    drawn = random.Random(0)
    losses = [11.0 * 0.99**step + drawn.gauss(0, 0.1) for step in range(400)]
    norms = [math.exp(drawn.gauss(0, 0.5)) for _ in range(400)]
    actions, state = run(map(record, losses, norms), Policy())
    assert {action.reason for action in actions} == {""}
    limits = spike_limits(state.health, Policy())
    wild = {name: [*state.health[name][8:], *[1e6] * 8] for name in ("losses", "norms")}
    assert all(
        b < 2 * a for a, b in zip(limits, spike_limits(wild, Policy(spike_window=64)), strict=True)
    )


def test_a_shorter_window_forgets_what_is_older():
    memory = {name: [100.0] * 40 + [1.0] * 8 for name in ("losses", "norms")}
    assert max(spike_limits(memory, Policy(spike_window=8, spike_after=8))) < 2
    assert min(spike_limits(memory, Policy())) > 100


def test_nothing_is_a_spike_of_a_window_that_is_short_or_all_zero():
    short = {"losses": [2.0] * 15, "norms": [1.0] * 15}
    assert spike_limits(short, Policy()) == (INF, INF)
    zero = {"losses": [0.0] * 20, "norms": [0.0] * 20}
    assert spike_limits(zero, Policy()) == (INF, INF)
    assert classify_step(1e30, 1e30, zero, Policy()).kind == "ok"
    huge = {"losses": [1e300] * 20, "norms": [3e38] * 20}
    assert spike_limits(huge, Policy()) == (INF, INF)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_device_and_host_draw_the_line_at_the_same_number(dtype):
    # Values around the limit, to the last bit of their dtype; and limits that fp32 rounds.
    drawn, policy = random.Random(1), Policy(on_spike="skip", spike_after=4)
    for _ in range(50):
        memory = {name: [drawn.uniform(0.5, 2) for _ in range(9)] for name in ("losses", "norms")}
        limits = spike_limits(memory, policy)
        assert all(struct.unpack("f", struct.pack("f", x))[0] == x for x in limits)
        near = torch.tensor(limits[0], dtype=torch.float64).to(dtype)
        for loss in (near, near.nextafter(near * 2), near.nextafter(near * 0)):
            found = classify_step(float(loss), 0.1, memory, policy)
            applies = make_finite_check(loss, memory, policy)
            assert bool(applies(torch.tensor(0.1))) == (found.kind == "ok"), (loss, limits)
        norm = torch.tensor(limits[1], dtype=torch.float32)
        applies = make_finite_check(torch.tensor(0.5), memory, policy)
        assert applies(norm)
        assert not applies(norm.nextafter(norm * 2))


def test_the_test_on_the_device_needs_no_number_on_the_host():
    meta = torch.device("meta")  # whoever reads a number of such a tensor raises
    loss, norm = torch.zeros((), device=meta), torch.zeros((), device=meta)
    applies = make_finite_check(
        loss, GOOD, Policy(on_spike="skip"), tokens=torch.zeros((), dtype=torch.int64, device=meta)
    )
    assert applies(norm).dtype == torch.bool


@pytest.mark.case("S1")
def test_a_step_without_tokens_is_skipped_and_held_against_nobody():
    found = classify_step(0.0, 0.0, GOOD, Policy(), tokens=0)
    assert found == StepStatus("empty", "no token of the batch is trained on")
    for tokens in (0, 1):
        applies = make_finite_check(torch.tensor(0.0), {}, Policy(), tokens=torch.tensor(tokens))
        assert bool(applies(torch.tensor(0.0))) == bool(tokens)
    empty = record(0.0, 0.0, tokens=0, skipped=1)
    actions, state = run([record(NAN), *[empty] * 50, record(), empty], Policy(), GOOD)
    assert kinds(actions) == ["skip", *["skip"] * 50, "apply", "skip"]
    assert state.health["empty"] == 51
    assert state.health["losses"] == [*GOOD["losses"], 2.0]


# ---------------------------------------------------------------------------------------- decisions


@pytest.mark.case("N5")
def test_bad_steps_in_a_row_lead_to_roll_backs_and_then_to_a_stop_with_the_list():
    policy = Policy(max_skips=3, max_rollbacks=2)
    state, actions = TrainState(step=9, health=GOOD), []
    while True:
        state = attrs.evolve(state, step=state.step + 1)
        action, state = judge_step(state, record(NAN), policy)
        actions.append((state.step, action.kind))
        if action.kind == "stop":
            break
        if action.kind == "rollback":
            assert action.before == 9
            state = TrainState(step=9, health=restore_health(GOOD, state.health))
    row = [(10, "skip"), (11, "skip")]
    assert actions == [*row, (12, "rollback"), *row, (12, "rollback"), *row, (12, "stop")]
    error = make_stop_error(action, state.health)
    assert isinstance(error, NumericsError)
    assert error.code == 67
    assert "no good step after step 9: the loss is nan; 3 bad steps in a row" in str(error)
    assert "rolled back before step 10, 10; bad steps: 10, 11, 12, 10, 11, 12" in str(error)


@pytest.mark.case("N5")
def test_without_the_count_bad_steps_are_skipped_for_ever():
    # The control: a run that forgets its health between steps never rolls back.
    policy = Policy(max_skips=3)
    forgotten = [judge_step(TrainState(step=s), record(NAN), policy)[0].kind for s in range(1, 50)]
    assert set(forgotten) == {"skip"}
    assert kinds(run([record(NAN)] * 3, policy)[0])[-1] == "rollback"


def test_a_good_step_ends_the_row():
    bad, good = record(NAN), record()
    actions, state = run([bad, bad, good] * 5 + [bad, bad, bad], Policy(max_skips=3))
    assert kinds(actions)[:-1] == ["skip", "skip", "apply"] * 5 + ["skip", "skip"]
    assert actions[-1] == Action("rollback", "the loss is nan; 3 bad steps in a row", 15)
    assert state.health["skipped"] == 13


@pytest.mark.case("N4")
def test_damaged_parameters_or_moments_are_rolled_back_at_once():
    calls = []

    def damage():
        calls.append(1)
        return ["optimizer/exp_avg/head.weight on rank 1"]

    actions, _ = run([record(), record(20.0), record(), record(NAN)], Policy(), GOOD, damage)
    assert kinds(actions) == ["apply", "apply", "apply", "rollback"]
    assert actions[-1].reason.endswith("not finite: optimizer/exp_avg/head.weight on rank 1")
    assert actions[-1].before == 3
    assert len(calls) == 1  # only for the bad step
    # The control: who does not look skips what no skip mends.
    assert kinds(run([record(NAN)], Policy(), GOOD, None)[0]) == ["skip"]
    assert kinds(run([record(NAN)], Policy(), GOOD, list)[0]) == ["skip"]


@pytest.mark.case("N1")
def test_a_bad_step_that_was_taken_is_damage():
    actions, _ = run([record(NAN, skipped=0)], Policy())
    assert kinds(actions) == ["rollback"]
    assert "applied anyway" in actions[0].reason


@pytest.mark.case("N1")
def test_a_step_that_another_rank_refused_is_bad_here_too():
    actions, state = run([record(2.0, 1.0, skipped=1)] * 3, Policy(), GOOD)
    assert kinds(actions) == ["skip", "skip", "rollback"]
    assert state.health["losses"] == GOOD["losses"]


@pytest.mark.case("N8")
def test_spikes_are_told_or_skipped_by_policy():
    spike, rest = record(20.0, skipped=0), [record(skipped=0)] * 3
    actions, state = run([*rest, spike, *rest], Policy(), GOOD)
    assert actions[3] == Action("apply", "the loss is 20, above 2.4")
    assert state.health["spikes"] == 1
    assert 20.0 in state.health["losses"]
    skip = Policy(on_spike="skip")
    actions, state = run([*rest, record(20.0, skipped=1), *rest], skip, GOOD)
    assert kinds(actions) == ["apply"] * 3 + ["skip"] + ["apply"] * 3
    assert 20.0 not in state.health["losses"]
    actions, state = run([*rest, spike], skip, GOOD)  # the step does not ask `make_finite_check`
    assert kinds(actions)[-1] == "apply"
    many = [record(20.0, skipped=1)] * 3
    assert kinds(run(many, skip, GOOD)[0]) == ["skip", "skip", "rollback"]


@pytest.mark.case("N8")
def test_the_window_is_bounded_and_excludes_bad_steps():
    records = [record(float(n)) if n % 3 else record(NAN) for n in range(200)]
    _, state = run(records, Policy(spike_window=8))
    assert state.health["losses"] == [float(n) for n in range(188, 200) if n % 3]
    assert len(state.health["bad_steps"]) == 32
    assert state.health["skipped"] == 67


@pytest.mark.case("X9", "N8")
def test_memory_survives_json_exactly_and_each_part_of_it_matters():
    drawn, policy = random.Random(2), Policy(on_spike="skip", max_rollbacks=1)
    values = [drawn.uniform(1, 3) * drawn.choice([1, 1, 1, 30]) for _ in range(300)]
    records = [record(v, drawn.uniform(0, 1) / 3) for v in values]
    whole, end = run(records, policy)
    state, actions = TrainState(), []
    for values in records:  # stopped and resumed after every step
        kept = orjson.loads(orjson.dumps(dict(state.health)))
        assert kept == state.health
        state = attrs.evolve(state, step=state.step + 1, health=kept)
        action, state = judge_step(state, values, policy)
        actions.append(action)
    assert actions == whole
    assert state == end or state.health == end.health

    def next_kinds(health):
        state = attrs.evolve(TrainState(step=99), health=health)
        found = [
            judge_step(state, record(*v), policy)[0] for v in ((9.0, 1.0), (2.0, 9.0), (NAN, 1.0))
        ]
        return [(action.kind, action.before) for action in found]

    full = {**GOOD, "skips": 2.0, "first_bad": 97.0, "rollbacks": 1.0}
    assert next_kinds(full) == [("stop", 96)] * 3
    for name in full:  # the control: without any one of them the decision is another
        assert next_kinds({k: v for k, v in full.items() if k != name}) != next_kinds(full), name


@pytest.mark.case("O2")
def test_a_skipped_step_spends_its_number_its_data_and_its_rate():
    state = TrainState(step=7, tokens=70, cursor=Cursor(7, (3,)))
    _, after = judge_step(state, record(NAN, skipped=1), Policy())
    assert (after.step, after.tokens, after.cursor) == (7, 70, Cursor(7, (3,)))


@pytest.mark.case("N1", "N5")
def test_decisions_are_a_function_of_numbers_that_all_ranks_share():
    drawn = random.Random(3)
    pool = (2.0, 2.1, 20.0, NAN, INF)
    for _ in range(200):
        policy = Policy(max_skips=drawn.randint(1, 4), on_spike=drawn.choice(["apply", "skip"]))
        records = [record(drawn.choice(pool), drawn.choice((1.0, 30.0, NAN))) for _ in range(40)]
        ranks = [run(records, policy, GOOD) for _ in range(2)]
        assert ranks[0][0] == ranks[1][0]
        row = 0
        for action, values in zip(ranks[0][0], records, strict=True):
            bad = not (math.isfinite(values["loss"]) and math.isfinite(values["grad_norm"]))
            row = row + 1 if bad or action.kind != "apply" else 0
            assert action.kind != "apply" or not bad
            assert (action.kind in ("rollback", "stop")) == (row >= policy.max_skips)


def test_after_a_roll_back_the_window_is_the_old_one_and_counts_go_on():
    saved = {"losses": [1.0], "norms": [2.0], "skips": 1.0, "first_bad": 3.0, "rollbacks": 0.0}
    live = {"losses": [5.0], "norms": [6.0], "skips": 3.0, "skipped": 4.0, "first_bad": 10.0}
    live |= {"rollbacks": 1.0, "rolled_back": [4.0], "bad_steps": [3.0, 10.0, 11.0, 12.0]}
    assert restore_health(saved, live) == {
        "losses": [1.0],
        "norms": [2.0],
        "skipped": 4.0,
        "rollbacks": 2.0,
        "rolled_back": [4.0, 10.0],
        "bad_steps": [3.0, 10.0, 11.0, 12.0],
    }


def test_memory_of_the_first_format_is_understood():
    action, state = judge_step(TrainState(step=4, health={"skips": 1.0}), record(NAN), Policy())
    assert action.kind == "skip"
    assert state.health["skips"] == 2


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: Policy(max_skips=0), "max_skips"),
        (lambda: Policy(max_rollbacks=-1), "max_rollbacks"),
        (lambda: Policy(on_spike="ignore"), "on_spike"),
        (lambda: Policy(spike_sigmas=0.0), "spike_sigmas"),
        (lambda: Policy(spike_window=0), "spike_window"),
        (lambda: Policy(spike_after=0), "spike_after"),
    ],
)
def test_a_policy_out_of_range_is_refused(make, named):
    with pytest.raises(ValueError, match=named):
        make()


@pytest.mark.parametrize("wrong", [{"norms": 1.0}, {"losses": 1.0}])
def test_memory_of_the_wrong_kind_is_named(wrong):
    with pytest.raises(TypeError, match=next(iter(wrong))):
        judge_step(TrainState(step=1, health=wrong), record(), Policy(max_skips=1))


def test_no_rollback_is_allowed_by_a_policy_of_none():
    none = Policy(max_skips=1, max_rollbacks=0)
    assert choose_action(StepStatus("bad", "x"), {}, none).kind == "stop"
    assert choose_action(StepStatus("damaged", "x"), {}, none).kind == "stop"


# --------------------------------------------------------------------------------------- divergence


def fires(losses, factor=INF):
    """Return whether each loss is a divergence, and the last health, which goes through JSON."""
    memory, diverged = {}, []
    for loss in losses:
        reason, memory = check_divergence(loss, orjson.loads(orjson.dumps(memory)), factor=factor)
        diverged.append(bool(reason))
    return diverged, memory


def test_a_loss_that_stays_up_is_a_divergence_at_the_third_value():
    alarms, memory = fires([3.0] * 12 + [7.0, 7.0, 7.0])
    assert alarms == [False] * 14 + [True]
    assert memory["evaluation_best"] == 3.0
    assert memory["evaluation_smooth"] == pytest.approx(3 + 4 * (1 - 0.7**3))
    assert fires([3.0] * 12 + [7.0, 7.0, 0.0, 7.0])[0] == [False] * 16  # two and two are no three


def test_the_first_values_are_never_high_and_one_that_is_no_number_always_is():
    assert not any(fires([3.0] + [50.0] * 11)[0])
    assert fires([3.0] + [50.0] * 12)[0].index(True) == 12
    alarms, memory = fires([3.0, NAN, 3.0, INF])
    assert alarms == [False, True, False, True]
    assert memory["evaluation_seen"] == 2


def test_a_factor_finds_what_a_rise_does_not():
    losses = [0.1] * 12 + [0.5] * 4
    assert not any(fires(losses)[0])
    assert any(fires(losses, factor=2.0)[0])
    assert not any(fires([-1.0] * 12 + [-0.5] * 4, factor=1.5)[0])


def test_two_losses_are_remembered_apart():
    _, memory = check_divergence(1.0, {"skips": 1.0}, name="held")
    _, memory = check_divergence(2.0, memory, name="other")
    assert (memory["held_best"], memory["other_best"], memory["skips"]) == (1.0, 2.0, 1.0)


@pytest.mark.parametrize(
    "check",
    [
        partial(check_divergence, rise=0.0),
        partial(check_divergence, factor=1.0),
        partial(check_divergence, smoothing=0.0),
        partial(check_divergence, patience=0),
        partial(check_divergence, warmup=-1),
    ],
)
def test_a_rule_out_of_range_is_refused(check):
    with pytest.raises(ValueError, match=f"divergence: .*{next(iter(check.keywords))}"):
        check(1.0, {})


# ----------------------------------------------------------------------------------------- counters


@pytest.mark.case("N11")
def test_steps_far_out_are_remembered_exactly():
    for step in (2**31 + 1, 10**9, 2**53 - 1):
        state = TrainState(step=step, tokens=2**60, health={})
        action, state = judge_step(state, record(NAN), Policy(max_skips=1))
        kept = orjson.loads(orjson.dumps(dict(state.health)))
        assert action.before == step - 1
        assert int(kept["first_bad"]) == int(kept["bad_steps"][0]) == step
        assert f"bad steps: {step}" in str(make_stop_error(action, kept))


def test_the_cases_of_a_table_are_all_decided():
    every = itertools.product(
        ["ok", "spike", "empty", "bad", "damaged"], ["apply", "skip"], [0.0, 2.0], [0.0, 3.0]
    )
    found = {
        choose_action(
            StepStatus(kind), {"skips": row, "rollbacks": back}, Policy(on_spike=spike)
        ).kind
        for kind, spike, row, back in every
    }
    assert found == {"apply", "skip", "rollback", "stop"}
