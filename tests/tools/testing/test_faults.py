"""Fault injectors: each does its one thing, at its step and on its rank, and nothing else."""

import math
import os
import signal
import time

import attrs
import numpy as np
import pytest
import torch
import whole_step
from whole_step import Layout

import trainkit as tk
from trainkit.mesh import solo_parallel
from trainkit.models import Decoder, Experts, make_decoder_config
from trainkit.tools.testing import RankError, faults, run_ranks
from trainkit.tools.testing.builtin import decoder_batch
from trainkit.types import SOLO, Cursor, TrainState, Update


def count(state, batch):
    return attrs.evolve(state, step=state.step + 1), {"batch": batch}


def walk(step, steps=4):
    """Take steps; return the numbers of those that were taken."""
    state, taken = TrainState(), []
    for i in range(steps):
        state, metrics = step(state, i)
        assert metrics == {"batch": i}
        taken.append(state.step)
    return taken


# -------------------------------------------------------------------------------------- when, where


@pytest.mark.parametrize("at", [2, {2}, [2, 9], lambda state: state.step == 1])
def test_a_fault_comes_at_its_step_and_at_no_other(at):
    seen = []
    step = faults.act_at(at, lambda state: seen.append(state.step))(count)
    assert walk(step) == [1, 2, 3, 4]
    assert seen == [1]


def test_a_fault_after_a_step_sees_the_state_that_the_step_returns():
    seen = []
    walk(faults.act_after(2, lambda state: seen.append(state.step))(count))
    assert seen == [2]


@pytest.mark.parametrize(("ranks", "comes"), [(None, 1), (0, 1), (1, 0), ({0, 3}, 1), ([3], 0)])
def test_without_a_process_group_this_is_rank_0(ranks, comes):
    seen = []
    walk(faults.act_at(2, seen.append, rank=ranks)(count))
    assert len(seen) == comes


def test_injectors_are_put_around_one_another():
    seen = []
    step = faults.act_at(1, lambda _: seen.append("first"))(count)
    step = faults.act_at({1, 2}, lambda _: seen.append("second"))(step)
    walk(step)
    assert seen == ["second", "first", "second"]


# ------------------------------------------------------------------------------------------ a rank


@pytest.mark.parametrize(
    ("injector", "error"),
    [
        (faults.fail_at(3), RuntimeError),
        (faults.fail_at(3, error=MemoryError("all of it")), MemoryError),
        (faults.exit_at(3), SystemExit),
        (faults.exit_at(3, code=5), SystemExit),
    ],
)
def test_a_rank_fails_instead_of_its_step(injector, error):
    assert walk(injector(count), steps=2) == [1, 2]
    with pytest.raises(error):
        walk(injector(count))


def test_signals_are_sent_several_times():
    seen = []
    before = signal.signal(signal.SIGUSR1, lambda *_: seen.append(1))
    try:
        walk(faults.signal_at(2, signum=signal.SIGUSR1, times=3)(count))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert seen


def test_a_slow_step_takes_its_time():
    begin = time.monotonic()
    walk(faults.slow_at(2, seconds=0.05)(count))
    assert time.monotonic() - begin > 0.05


def killed_on_rank_1():
    torch.distributed.barrier()
    walk(faults.kill_at(2, rank=1)(count))
    return torch.distributed.get_rank()


def hung_on_rank_1(kind):
    walk(getattr(faults, kind)(2, rank=1)(count))


def test_a_rank_is_killed_and_its_peers_are_not():
    with pytest.raises(RankError, match=r"rank 1 of 2: was ended by SIGKILL"):
        run_ranks(killed_on_rank_1, 2)


@pytest.mark.parametrize("kind", ["hang_at", "stop_at"])
def test_a_rank_that_hangs_or_is_stopped_does_not_come_back(kind):
    with pytest.raises(RankError, match=r"still running: rank 1 of 2"):
        run_ranks(hung_on_rank_1, 2, kind, timeout=1)


# ----------------------------------------------------------------------------------------- numbers


SITES = {
    "loss": lambda stages, _: faults.nan_loss_at(2, stages, rank=0),
    "infinite loss": lambda stages, _: faults.nan_loss_at(2, stages, rank=0, value=math.inf),
    "gradient": lambda stages, _: faults.nan_gradient_at(2, stages, rank=0),
    "infinite gradient": lambda stages, _: faults.nan_gradient_at(
        2, stages, rank=0, name="layers.1.attention.wo.weight", element=3, value=-math.inf
    ),
}


def poisoned_steps(layout, site, steps=3):
    """Take steps, the second with a fault; return norms, and after which step parameters moved."""
    text = whole_step.corpus()
    bins = tk.pack_bins(text.lengths, whole_step.CAPACITY)
    with tk.parallel_session(dp_replicate=layout.dp_replicate) as ps:
        stages, optimizer = whole_step.build(layout, ps)
        plain = whole_step.step_function(layout, ps, stages, optimizer)
        step = SITES[site](stages, optimizer)(plain)
        state, norms, moved = TrainState(cursor=Cursor()), [], []
        before, hooks = parameters(stages), hooks_of(stages)
        for _ in range(steps):
            batch = whole_step.input_of(state.cursor, ps, layout, text=text, bins=bins)
            state, metrics = step(state, batch)
            norms.append(float(metrics["grad_norm"]))
            after = parameters(stages)
            moved.append(any(not np.array_equal(after[name], before[name]) for name in after))
            before = after
        return norms, moved, hooks_of(stages) - hooks


def hooks_of(stages):
    every = [module for stage in stages for module in stage.modules()]
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in every)


def parameters(stages):
    return {name: whole_step.full(p) for name, p in tk.get_named_parameters(stages).items()}


def all_sites(layout):
    return {site: poisoned_steps(layout, site) for site in SITES}


@pytest.mark.case("N1", "N2", "N3")
@pytest.mark.parametrize(
    "layout",
    [
        Layout(rows_per_microbatch=2),
        Layout(world=2, rows_per_microbatch=2),
        pytest.param(Layout(world=2, dp_replicate=2), marks=pytest.mark.only_all),
    ],
)
def test_a_number_that_is_not_finite_spoils_one_step_and_moves_nothing(layout):
    for found in run_ranks(all_sites, layout.world, layout):
        for site, (norms, moved, hooks_left) in found.items():
            assert list(map(math.isfinite, norms)) == [True, False, True], site
            assert moved == [True, False, True], site
            assert not hooks_left, site


@pytest.mark.parametrize("fault", ["nan_loss_at", "nan_gradient_at"])
def test_a_fault_reaches_routed_outputs_and_parameters_that_are_shown_cast(fault):
    experts = Experts(count=4, top_k=2, width=8, first=1)
    model = make_decoder_config("tiny", layers=2, width=16, heads=2, kv_heads=2, experts=experts)
    model = tk.parallel.mixed_precision(torch.bfloat16)(
        Decoder(model, head="hidden"), tk.solo_parallel()
    )
    for p in model.parameters():
        torch.nn.init.constant_(p, 0.1)
    batch = decoder_batch(0)

    def step(state, _):
        model.zero_grad()
        hidden, weight, *_ = tk.models.call_routed(model, batch).output
        (hidden @ weight.T).sum().backward()
        return state, math.isfinite(tk.grad_norm(tk.get_parameters([model]), axis=SOLO))

    faulty = getattr(faults, fault)(2, [model])(step)
    found = [faulty(TrainState(step=done), None)[1] for done in range(3)]
    assert found == [True, False, True]


@pytest.mark.case("N1", "N2", "N3")
def test_without_the_skip_such_a_number_does_harm(monkeypatch):
    def clip_and_step(params, optimizer, *, axis, **_):
        norm = tk.grad_norm(params, axis=axis)
        optimizer.step()
        optimizer.zero_grad()
        return Update(norm, torch.ones((), dtype=torch.bool))

    monkeypatch.setattr(tk, "clip_and_step", clip_and_step, raising=False)
    for site in SITES:
        norms, moved, _ = poisoned_steps(Layout(), site)
        assert moved[1], site
        assert not math.isfinite(norms[2]), site


def trained():
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 4, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_one_element_of_a_parameter_or_a_moment_is_overwritten():
    model, optimizer = trained()
    walk(faults.nan_parameter_at(2, [model], name="weight", element=5, value=math.inf)(count))
    walk(
        faults.nan_moment_at(
            2, [model], optimizer, moment="exp_avg_sq", name="weight", element=5, value=math.inf
        )(count)
    )
    for tensor in (model.weight, optimizer.state[model.weight]["exp_avg_sq"]):
        assert torch.isinf(tensor).nonzero().tolist() == [[1, 2]]


@pytest.mark.parametrize("bit", [0, 7, 22, 31])
def test_exactly_one_bit_of_a_parameter_flips(bit):
    model, _ = trained()
    before = model.weight.detach().clone().view(torch.int32)
    walk(faults.flip_bit_at(2, [model], element=7, bit=bit)(count))
    changed = model.weight.detach().view(torch.int32) ^ before
    assert changed.flatten().tolist() == [0] * 7 + [1 << bit if bit < 31 else -(1 << 31)] + [0] * 4


@pytest.mark.parametrize("rule", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("name", ["0.weight", None])
def test_a_large_update_is_that_of_a_higher_rate(rule, name):
    def train(rates, factor):
        """Take two steps; the second has the fault, if there is one."""
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 1))
        named = dict(model.named_parameters())
        optimizer = rule([{"params": [p], "lr": 0.25, "weight_decay": 0.5} for p in named.values()])

        def step(state, batch):
            model(torch.ones(2, 3)).sum().backward()
            for key, group in zip(named, optimizer.param_groups, strict=True):
                group["lr"] = 0.25 * rates.get(key, 1.0) if state.step == 1 else 0.25
            optimizer.step()
            optimizer.zero_grad()
            return count(state, batch)

        if factor:
            step = faults.large_update_at(2, [model], optimizer, factor=factor, name=name)(step)
        walk(step, 2)
        return named

    chosen = ["0.weight"] if name else ["0.weight", "0.bias", "1.weight", "1.bias"]
    wanted, found = train(dict.fromkeys(chosen, 8.0), None), train({}, 8.0)
    for key, p in wanted.items():
        torch.testing.assert_close(found[key], p, rtol=1e-5, atol=1e-5)
    plain = train({}, None)
    changed = [key for key in plain if not torch.allclose(plain[key], found[key], atol=1e-3)]
    assert changed == chosen


def test_batches_are_slow_from_one_on_and_the_same(monkeypatch):
    naps = []
    monkeypatch.setattr(time, "sleep", naps.append)
    made = [faults.slow_batches(3, seconds=0.5)(lambda c: c.batch)(Cursor(n)) for n in range(5)]
    assert (made, naps) == ([0, 1, 2, 3, 4], [0.5] * 3)
    faults.slow_batches(1, seconds=0.5, rank=1)(lambda c: c)(Cursor())  # this is rank 0
    assert naps == [0.5] * 3


def test_a_parameter_that_is_not_there_is_named():
    model, _ = trained()
    with pytest.raises(ValueError, match="no parameter is called 'wieght'; there are weight"):
        walk(faults.nan_parameter_at(1, [model], name="wieght")(count))
    with pytest.raises(ValueError, match="this rank has 12 elements, none is 12"):
        walk(faults.nan_parameter_at(1, [model], element=12)(count))


def test_a_part_that_is_not_contiguous_is_written_too():
    model, _ = trained()
    model.weight = torch.nn.Parameter(torch.zeros(3, 4).t())
    walk(faults.nan_parameter_at(1, [model], element=5)(count))
    assert torch.isnan(model.weight).nonzero().tolist() == [[1, 2]]
    assert solo_parallel().world.count == 1


# ------------------------------------------------------------------------------------------- files


def test_files_are_damaged(tmp_path):
    path, other = tmp_path / "a", tmp_path / "b"
    content = os.urandom(10_000)
    path.write_bytes(content)
    faults.flip_bit(path, 8 * 9_999 + 7)
    assert path.read_bytes() == content[:-1] + bytes([content[-1] ^ 128])
    faults.flip_bit(path, 8 * 9_999 + 7)
    faults.zero_page(path, 1)
    assert path.read_bytes() == content[:4096] + bytes(4096) + content[8192:]
    faults.zero_page(path, 2)
    assert path.read_bytes() == content[:4096] + bytes(10_000 - 4096)
    faults.truncate(path, 17)
    other.write_bytes(b"other")
    faults.swap_files(path, other)
    assert (path.read_bytes(), other.read_bytes()) == (b"other", content[:17])
    faults.remove_file(path)
    faults.add_file(tmp_path / "c")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["b", "c"]
