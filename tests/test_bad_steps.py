"""A number that is not finite changes nothing on any rank, wherever it appears, and is named."""

import contextlib
import functools
import math
from unittest import mock

import attrs
import orjson
import pytest
import torch
from torch import nn
from whole_step import Layout, build, corpus, input_of

import trainkit as tk
from trainkit import grads, health, losses, schedules
from trainkit.grads import find_nonfinite
from trainkit.losses import next_token_linear
from trainkit.metrics import make_step_record
from trainkit.parallel.parameters import get_local_box
from trainkit.tools.testing import run_ranks
from trainkit.types import SOLO, Cursor, TrainState
from trainkit.weights.checkpoint.replica_check import find_nonfinite_state
from trainkit.weights.checkpoint.run_state import get_run_tensors, list_counters

NAN, INF = math.nan, math.inf
NORM, DOWN = "layers.0.attention_norm.weight", "layers.1.mlp.down.weight"


@attrs.frozen
class Site:
    """Where a number goes wrong on one rank: loss, report, backward pass, or summed gradient."""

    kind: str = "none"
    value: float = NAN
    name: str = ""


def spoiled(loss, site):
    """Return a loss with a fault in it; `site()` tells which."""

    @losses.declare_terms(*loss.terms)
    def wrapped(output, batch):
        total, terms = loss(output, batch)
        factor = site().value if site().kind in ("loss", "report") else 1.0
        if site().kind == "backward":  # its value is 0, and its gradient NaN
            total = total + (0 * output[0].sum()).sqrt()
        return total * (factor if site().kind == "loss" else 1.0), {
            name: value * factor for name, value in terms.items()
        }

    return wrapped


def spoil_gradient(stages, site):
    p = tk.get_named_parameters(stages).get(site.name)
    local = None if p is None else getattr(p.grad, "_local_tensor", p.grad)
    if local is not None and local.numel():
        local.view(-1)[0] = site.value


def step_function(ps, stages, optimizer, *, policy, guilty=0, protected=True, world=None):
    """Return train_step(state, batch, site), as a recipe writes it but for the fault.

    It returns beside state and metrics what takes the step's gradients again, fault and all.
    """
    params, now = tk.get_parameters(stages), {}
    loss = spoiled(next_token_linear, lambda: now["site"])
    run = tk.make_forward_backward(stages, loss)
    world = ps.world if world is None else world

    def train_step(state, batch, site=None):
        now["site"] = site if site is not None and ps.world.index == guilty else Site()
        tokens = tk.all_sum(tk.count_valid_tokens(batch.microbatches), ps.loss)

        def replay():
            sums = run(batch.microbatches, denominator=tokens)
            if now["site"].kind == "gradient":
                spoil_gradient(stages, now["site"])
            return sums

        sums = replay()
        terms = losses.average_terms(tk.reduce_metrics(sums, ps.loss), tokens)
        applies = health.make_finite_check(terms["loss"], state.health, policy, tokens=tokens)
        if not protected:  # the check has to be switched off in two places
            applies = functools.partial(torch.ones_like, dtype=torch.bool)
        with contextlib.nullcontext() if protected else nothing_nonfinite():
            update = tk.clip_and_step(
                params,
                optimizer,
                lr=1e-2,
                max_norm=0.5,
                axis=ps.pp,
                should_apply=applies,
                world=world,
            )
        metrics = {
            **terms,
            "grad_norm": update.norm,
            "skipped": ~update.applied,
            "tokens": tokens,
        }
        return (
            attrs.evolve(
                state, step=state.step + 1, tokens=state.tokens + tokens, cursor=batch.cursor
            ),
            metrics,
            replay,
        )

    return train_step


def nothing_nonfinite():
    """Take every norm for a finite one."""
    never = functools.partial(torch.zeros_like, dtype=torch.bool)
    return mock.patch.object(grads, "_is_nonfinite", never)


def bits_of(stages, optimizer):
    tensors = get_run_tensors(stages, optimizer)
    return {name: get_local_box(x).local.clone() for name, x in tensors.items()}


def changed(before, after):
    assert before.keys() == after.keys()
    return [name for name, x in before.items() if not torch.equal(x, after[name])]


@attrs.frozen(kw_only=True)
class Visit:
    """A run with faults at some sites of the rank `guilty`."""

    sites: list
    ranks: tk.Layout = attrs.field(factory=tk.Layout)
    model: Layout = attrs.field(factory=Layout)
    guilty: int = 1
    protected: bool = True
    alone: bool = False


def visit(case):
    """Take a good step, then one for each site; return what became of each."""
    layout, text = case.model, corpus()
    bins = tk.pack_bins(text.lengths, 24)
    policy = health.Policy(max_skips=2, max_rollbacks=99)
    with tk.parallel_session(case.ranks) as ps:
        stages, optimizer = build(layout, ps)
        step = step_function(
            ps,
            stages,
            optimizer,
            policy=policy,
            guilty=case.guilty,
            protected=case.protected,
            world=SOLO if case.alone else ps.world,
        )
        state = TrainState()
        batch = functools.partial(input_of, ps=ps, layout=layout, text=text, bins=bins)
        state, _, _ = step(state, batch(state.cursor))
        found, before = [], bits_of(stages, optimizer)
        for site in case.sites:
            after, metrics, replay = step(state, batch(state.cursor), site)
            record = make_step_record(metrics, begin=0.0)
            damage = functools.partial(find_nonfinite_state, stages, optimizer, ps.world)
            action, _ = health.judge_step(
                after, record, policy, damage=None if case.alone else damage
            )
            causes = find_nonfinite(replay, stages, ps.world)
            assert all(p.grad is None for p in tk.get_parameters(stages))
            now = bits_of(stages, optimizer)  # nor has blame moved anything
            found.append((action.kind, changed(before, now), causes, action.reason))
            before = now
        state, metrics, _ = step(state, batch(state.cursor))  # and on it goes
        return found, float(metrics["loss"]), bool(metrics["skipped"])


def visit_all(cases):
    return [visit(case) for case in cases]


VALUES = (NAN, INF, -INF)
SITES = [
    *[Site("loss", value) for value in VALUES],
    *[Site("report", value) for value in VALUES],
    *[Site("gradient", value, DOWN) for value in VALUES],
    Site("gradient", NAN, NORM),
    Site("gradient", INF, "embedding.weight"),
]


BACKWARD = Site("backward")
KINDS = [*SITES[::3], SITES[-1], BACKWARD]  # each once
FEW = [SITES[0], SITES[6], BACKWARD]  # of a loss, after the sum, before it
TENSOR = Layout(tp=2, vocab_size=32)


def check_nothing_moved(site, ranks, guilty, *, named="rank {}"):
    kinds, moved, causes, reasons = zip(*ranks, strict=True)
    assert set(kinds) == {"skip"}, (site, kinds, reasons)
    assert not any(moved), (site, moved)
    assert all(other == causes[0] for other in causes)
    if site.kind == "gradient":
        # It was spoiled after the sum: who holds it is all that there is to know.
        held = f"the summed gradient of {site.name}, held by rank {guilty}"
        assert causes[0] == [held, "computed again, each rank's own numbers are finite"], site
    if site.kind == "backward":
        assert causes[0][0] == f"the gradient of norm.weight on {named.format(guilty)}"


@pytest.mark.case("N1", "N2", "N3")
def test_no_fault_of_one_process_poisons_a_parameter():
    found, loss, skipped = visit(Visit(sites=[*SITES, BACKWARD], guilty=0))
    for site, outcome in zip([*SITES, BACKWARD], found, strict=True):
        check_nothing_moved(site, [outcome], 0)
    assert math.isfinite(loss)
    assert not skipped


@pytest.mark.case("N1", "N2", "N3")
def test_no_fault_of_two_ranks_poisons_a_parameter_and_ranks_part_if_they_do_not_agree():
    cases = [
        Visit(sites=KINDS),
        Visit(ranks=tk.Layout(pp=2), model=Layout(pp=2), sites=FEW),
        Visit(ranks=tk.Layout(dp_replicate=2), sites=FEW, guilty=0),
        Visit(sites=[SITES[0]], protected=False),
        Visit(ranks=tk.Layout(tp=2), model=TENSOR, sites=[Site("gradient", NAN, NORM)], alone=True),
        Visit(ranks=tk.Layout(tp=2), model=TENSOR, sites=FEW),
    ]
    every = run_ranks(visit_all, 2, cases)
    for index in (0, 1, 2, 5):
        case = cases[index]
        named = "ranks 0 and {}" if case.ranks.tp > 1 else "rank {}"  # who computes together
        for number, site in enumerate(case.sites):
            ranks = [rank[index][0][number] for rank in every]
            owns = case.ranks.pp == 1 or site.name not in (NORM, "embedding.weight")
            if owns:
                check_nothing_moved(site, ranks, case.guilty, named=named)
            if site.kind in ("loss", "report") and case.ranks.pp == case.ranks.tp == 1:
                assert ranks[0][2][0] == f"the loss on rank {case.guilty}"
        assert all(math.isfinite(rank[index][1]) and not rank[index][2] for rank in every)
    for rank in every:  # the control: applied all the same, parameters are no numbers any more
        found, loss, _ = rank[3]
        assert found[0][0] == "rollback"
        assert len(found[0][1]) > 10
        assert "applied anyway" in found[0][3]
        assert math.isnan(loss)
    # The control: every rank computes this gradient for itself, and without `world` only one sees.
    assert len({rank[4][0][0][0] for rank in every}) == 2
    assert len({bool(rank[4][0][0][1]) for rank in every}) == 2


@pytest.mark.case("N1", "N2", "N3")
@pytest.mark.only_all  # two ranks show replicas and tensor parallelism, each alone
def test_no_fault_of_four_ranks_poisons_a_parameter():
    case = Visit(ranks=tk.Layout(dp_replicate=2, tp=2), model=TENSOR, sites=FEW, guilty=2)
    every = run_ranks(visit, 4, case)
    for number, site in enumerate(FEW):
        ranks = [rank[0][number] for rank in every]  # tensor-parallel ranks compute together
        check_nothing_moved(site, ranks, 2, named="ranks {} and 3")


# ----------------------------------------------------------------------------------- one process


def solo(dtype=torch.float32, **options):
    """Return state, train_step, make_batch, stages and optimizer of one process."""
    layout, text, ps = Layout(dtype=dtype), corpus(), tk.solo_parallel()
    bins = tk.pack_bins(text.lengths, 24)
    stages, optimizer = build(layout, ps)
    policy = options.pop("policy", health.Policy())
    step = step_function(ps, stages, optimizer, policy=policy, **options)
    batch = functools.partial(input_of, ps=ps, layout=layout, text=text, bins=bins)
    return TrainState(), step, batch, stages, optimizer


def without_tokens(batch):
    blank = [
        attrs.evolve(each, labels=torch.full_like(each.labels, -100)) for each in batch.microbatches
    ]
    return attrs.evolve(batch, microbatches=blank)


@pytest.mark.case("S1")
@pytest.mark.parametrize("protected", [True, False])
def test_a_step_without_a_token_changes_nothing_at_all(protected):
    state, step, make_batch, stages, optimizer = solo(protected=protected)
    state, _, _ = step(state, make_batch(state.cursor))
    before = bits_of(stages, optimizer)
    state, metrics, _ = step(state, without_tokens(make_batch(state.cursor)))
    moved = changed(before, bits_of(stages, optimizer))
    values = [float(metrics[name]) for name in ("loss", "grad_norm", "tokens")]
    assert values == [0.0, 0.0, 0.0]
    # The control: momentum and decay would move what no token has asked to move.
    assert bool(metrics["skipped"]) == (not moved) == protected
    assert state.step == 2


@pytest.mark.case("S1")
def test_one_microbatch_without_a_token_adds_nothing():
    state, step, make_batch, _, _ = solo(dtype=torch.float64)
    batch = make_batch(state.cursor)
    more = attrs.evolve(
        batch, microbatches=[*batch.microbatches, *without_tokens(batch).microbatches]
    )
    _, metrics, _ = step(state, more)
    state, step, make_batch, _, _ = solo(dtype=torch.float64)
    _, wanted, _ = step(state, batch)
    for name in ("loss", "grad_norm", "tokens"):
        assert torch.equal(metrics[name], wanted[name])


@pytest.mark.case("N4")
@pytest.mark.parametrize("where", ["model", "optimizer/exp_avg", "optimizer/exp_avg_sq"])
def test_damage_in_the_state_is_found_at_the_next_bad_step(where):
    state, step, make_batch, stages, optimizer = solo()
    state, _, _ = step(state, make_batch(state.cursor))
    get_run_tensors(stages, optimizer)[f"{where}/{DOWN}"].view(-1)[3] = NAN
    for _ in range(2):  # a moment reaches the loss one step later
        state, metrics, _ = step(state, make_batch(state.cursor))
        record = make_step_record(metrics, begin=0.0)
        damage = functools.partial(find_nonfinite_state, stages, optimizer, SOLO)
        action, state = health.judge_step(state, record, health.Policy(), damage=damage)
        if action.kind != "apply":
            break
    assert action.kind == "rollback"
    assert f"{DOWN} on rank 0" in action.reason
    assert action.before == state.step - 1


@pytest.mark.case("O2")
def test_a_skipped_step_spends_its_number_its_data_and_its_rate():
    state, step, make_batch, _, optimizer = solo()
    batch = make_batch(state.cursor)
    after, metrics, _ = step(state, batch, Site("loss"))
    assert metrics["skipped"]
    assert (after.step, after.cursor) == (1, batch.cursor)
    assert after.cursor != state.cursor
    assert after.tokens == metrics["tokens"] > 0
    assert optimizer.param_groups[0]["lr"] == 1e-2


@pytest.mark.case("N10")
def test_a_half_precision_gradient_that_always_overflows_ends_the_run():
    # There is no loss scaler (bf16 needs none): an overflow is a bad step like any other.
    model = nn.Linear(4, 1, bias=False).half()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    before = model.weight.detach().clone()
    policy, state, kinds = health.Policy(max_skips=3, max_rollbacks=2), TrainState(), []
    while "stop" not in kinds:
        output = model(torch.full((1, 4), 6e4).half()).float().sum()
        (16 * output).backward()
        loss = output.detach().clamp(-1e4, 1e4)
        applies = health.make_finite_check(loss, state.health, policy)
        found = tk.clip_and_step(
            [model.weight], optimizer, lr=0.1, max_norm=1.0, should_apply=applies
        )
        record = {"loss": float(loss), "grad_norm": float(found.norm), "skipped": not found.applied}
        state = attrs.evolve(state, step=state.step + 1)
        action, state = health.judge_step(state, record, policy)
        kinds.append(action.kind)
        if action.kind == "rollback":
            state = attrs.evolve(state, step=0, health=health.restore_health({}, state.health))
    assert kinds == ["skip", "skip", "rollback"] * 2 + ["skip", "skip", "stop"]
    assert torch.equal(model.weight, before)
    assert health.make_stop_error(action, state.health).code == 67


# ------------------------------------------------------------------------------- stopping anywhere


def uninterrupted(steps):
    state, step, make_batch, stages, optimizer = solo()
    history = []
    while state.step < steps:
        state, metrics, _ = step(state, make_batch(state.cursor))
        history.append(float(metrics["loss"]).hex())
    return history, tk.state_hash(state, stages, optimizer, tk.solo_parallel())


class KilledError(Exception):
    """Ends a step where a test wants it to end."""


def killed_at(place, tmp_path):
    """Train 4 steps, die in the third, go on from the second; return losses and hash."""
    ps, history = tk.solo_parallel(), []
    state, step, make_batch, stages, optimizer = solo()
    while state.step < 2:
        state, metrics, _ = step(state, make_batch(state.cursor))
        history.append(float(metrics["loss"]).hex())
    tk.save_checkpoint(tmp_path, state, stages, optimizer, ps)

    def die(*_, **__):
        raise KilledError

    seen = []

    def die_in_the_third(*_):
        seen.append(1)
        if len(seen) == 3:
            raise KilledError

    if place == "after the step":
        optimizer.register_step_post_hook(die)
    else:
        stages[0].register_forward_pre_hook(die_in_the_third)
    with pytest.raises(KilledError):
        step(state, make_batch(state.cursor))
    state, step, make_batch, stages, optimizer = solo()
    state = tk.resume(tmp_path, state, stages, optimizer, ps, log=lambda _: None)
    while state.step < 4:
        state, metrics, _ = step(state, make_batch(state.cursor))
        history.append(float(metrics["loss"]).hex())
    return history, tk.state_hash(state, stages, optimizer, ps)


@pytest.mark.parametrize(
    "place",
    [
        pytest.param("after the step", marks=pytest.mark.case("O3")),
        pytest.param("in the third microbatch", marks=pytest.mark.case("O4")),
    ],
)
def test_a_step_that_was_cut_short_is_taken_once(place, tmp_path):
    assert killed_at(place, tmp_path) == uninterrupted(4)


@pytest.mark.case("O3", "O4")
def test_the_control_a_step_taken_twice_shows():
    state, step, make_batch, _, _ = solo()
    history = []
    for again in (0, 0, 1, 0):  # the third step's update is there already when it is taken
        if again:
            step(state, make_batch(state.cursor))
        state, metrics, _ = step(state, make_batch(state.cursor))
        history.append(float(metrics["loss"]).hex())
    wanted, _ = uninterrupted(4)
    assert history[:2] == wanted[:2]
    assert history[2:] != wanted[2:]


SCHEDULES = {
    "constant": schedules.constant(1.0, warmup=5),
    "cosine": schedules.cosine(1.0, warmup=5, total=20, final=0.1),
    "wsd": schedules.warmup_stable_decay(1.0, warmup=5, total=20, decay=0.4),
    "piecewise": schedules.piecewise(1.0, [(0, 0.0), (4, 1.0), (9, 0.1, "cosine"), (15, 0.0)]),
}


@pytest.mark.case("O1")
@pytest.mark.parametrize("name", SCHEDULES)
def test_the_rate_is_a_function_of_the_step(name):
    rates = [SCHEDULES[name](step).hex() for step in range(25)]
    for edge in range(25):  # resumed at every step, phase edges among them; in any order
        assert [SCHEDULES[name](step).hex() for step in range(edge, 25)] == rates[edge:]
    # The control: a rate that is multiplied on from what it was is lost with the process.
    decays = [0.9**step for step in range(25)]
    assert [0.9**step for step in range(25 - 7)] != decays[7:]


# ----------------------------------------------------------------------------------------- counters


@pytest.mark.case("N11")
@pytest.mark.parametrize("start", [2**31 - 3, 2**53 - 3, 10**9])
def test_counters_are_exact_far_out(start, tmp_path):
    state, step, make_batch, stages, optimizer = solo()
    state = TrainState(step=10**9, tokens=start, cursor=Cursor(start))
    state, metrics, _ = step(state, make_batch(state.cursor))
    tokens = int(metrics["tokens"])
    assert state.cursor.batch == start + 1
    assert list_counters(state)["tokens"] == start + tokens
    record = make_step_record({**metrics, "tokens_total": state.tokens}, begin=0.0)
    assert orjson.loads(orjson.dumps(record))["tokens_total"] == start + tokens
    ps = tk.solo_parallel()
    path = tk.save_checkpoint(tmp_path, state, stages, optimizer, ps)
    resumed = tk.resume(tmp_path, TrainState(), stages, optimizer, ps, log=lambda _: None)
    assert path.name == "step_1000000001"
    assert (resumed.step, resumed.tokens) == (10**9 + 1, start + tokens)
    assert resumed.cursor == state.cursor


@pytest.mark.case("N11")
@pytest.mark.parametrize("name", SCHEDULES)
def test_rates_are_finite_far_out(name):
    for step in (10**9, 2**31 + 1, 2**53 + 1):
        assert 0 <= SCHEDULES[name](step) <= 1


def test_tokens_are_counted_in_64_bits_over_ranks():
    total = torch.tensor(2**53 + 1) + torch.tensor(1)
    assert int(total) == 2**53 + 2
    assert tk.to_host({"tokens": total})["tokens"] == 2**53 + 2


def test_the_modules_of_a_step_may_be_plain():
    model = nn.Linear(2, 2)

    def replay():
        model(torch.full((1, 2), NAN)).sum().backward()
        return {"loss": torch.tensor(1.0)}

    assert find_nonfinite(replay, [model], SOLO) == ["the gradient of weight on rank 0"]
    assert all(p.grad is None for p in model.parameters())
