"""A bit that flips in one replica is found within 100 steps and named, in every layout."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from whole_step import Layout, build, corpus, input_of, step_function

import trainkit as tk
from trainkit.parallel.parameters import get_local_box
from trainkit.tools.testing import run_ranks
from trainkit.types import SOLO, NumericsError
from trainkit.weights.checkpoint import replica_check
from trainkit.weights.checkpoint.replica_check import find_nonfinite_state, make_replica_check

ROUND = range(110, 210, 10)  # the ten looks in which each tensor is due once


def flip(tensor, bit):
    """Flip one bit of the last element that this rank holds of a tensor."""
    local = get_local_box(tensor).local
    local.view(torch.int64 if local.element_size() == 8 else torch.int32).reshape(-1)[-1] ^= (
        1 << bit
    )


def trained(layout, ps, steps):
    """Return stages and optimizer after some steps, and the problems that the check found."""
    text = corpus()
    bins = tk.pack_bins(text.lengths, 24, multiple_of=layout.multiple_of)
    stages, optimizer = build(layout, ps)
    step, state = step_function(layout, ps, stages, optimizer), tk.TrainState()
    look, problems = make_replica_check(stages, optimizer, ps, interval=1, within=3), []
    while state.step < steps:
        state, _ = step(state, input_of(state.cursor, ps, layout, text=text, bins=bins))
        problems += look(state.step)
    return stages, optimizer, problems


def drifts(layout, session, names, guilty):
    """Flip bits of named tensors on one rank in turn; return the problems by tensor, and when."""
    with session() as ps:
        stages, optimizer, problems = trained(layout, ps, 3)
        look, found = make_replica_check(stages, optimizer, ps), {"while training": problems}
        found["before"] = [text for step in range(1, 111) for text in look(step)]
        tensors = replica_check._get_tensors(stages, optimizer)
        for name in names:
            if ps.world.index == guilty:
                flip(tensors[name], 20)
            found[name] = [(step, text) for step in ROUND for text in look(step)]
            if ps.world.index == guilty:
                flip(tensors[name], 20)
        return found


WEIGHT, MOMENT = "model/layers.1.mlp.down.weight", "optimizer/exp_avg/layers.1.mlp.down.weight"
TWO = {
    "copies": (
        partial(tk.parallel_session, dp_replicate=2),
        Layout(),
        [WEIGHT, MOMENT, "optimizer/step/norm.weight"],
    ),
    "tensor": (
        partial(tk.parallel_session, tp=2),
        Layout(tp=2, vocab_size=32),
        ["model/norm.weight"],
    ),
    "ring": (
        partial(tk.parallel_session, dp_shard=1, ring=2, fold_sp="none"),
        Layout(ring=2, fold_sp="none", multiple_of=4),
        [WEIGHT],
    ),
    "tied": (
        partial(tk.parallel_session, pp=2),
        Layout(pp=2, tied=True),
        ["model/embedding.weight"],
    ),
}
FOUR = {
    "hybrid": (
        partial(tk.parallel_session, dp_replicate=2, dp_shard=2),
        Layout(),
        [WEIGHT, MOMENT],
    ),
    "tensor": (
        partial(tk.parallel_session, tp=2, dp_replicate=2),
        Layout(tp=2, vocab_size=32),
        [WEIGHT, "model/norm.weight"],
    ),
}


def all_drifts(cases, guilty):
    """Return the problems of every case."""
    return {
        name: drifts(layout, session, names, guilty)
        for name, (session, layout, names) in cases.items()
    }


def and_blind(cases, guilty):
    """Return the problems of every case, and of the first one with hashes that are all zero."""
    found = all_drifts(cases, guilty)
    session, _, names = next(iter(cases.values()))
    replica_check._hash_bits = lambda *_: torch.zeros((), dtype=torch.int64)
    return found | {"blind": drifts(Layout(), session, names, guilty)}


def check_found(found, name, tensor, text):
    """Check that a difference was found once, within 100 steps, with the expected message."""
    assert found[name]["while training"] == found[name]["before"] == [], name
    ((step, problem),) = found[name][tensor]
    assert step - ROUND.start < 100
    assert text in problem, problem


@pytest.mark.case("N9")
def test_a_flipped_bit_is_found_on_two_ranks():
    every = run_ranks(and_blind, 2, TWO, 1)
    assert every[0] == every[1]
    for name, (_, _, tensors) in TWO.items():
        for tensor in tensors:
            text = f"rank 0 and rank 1 hold different values of {tensor} in the box at"
            check_found(every[0], name, tensor, text)
    assert not any(every[0]["blind"].values())  # the control: without the hash nothing is found


@pytest.mark.case("N9")
@pytest.mark.only_all  # copies of two ranks are above, and copies of shards below
def test_a_flipped_bit_of_a_shard_is_found_on_four_ranks():
    every = run_ranks(all_drifts, 4, {"hybrid": FOUR["hybrid"]}, 1)
    assert all(found == every[0] for found in every)
    for tensor in (WEIGHT, MOMENT):
        text = f"rank 1 and rank 3 hold different values of {tensor} in the box at (8, 0)"
        check_found(every[0], "hybrid", tensor, text)


@pytest.mark.case("N9")
def test_a_flipped_bit_is_found_on_four_ranks_and_a_majority_says_whose_it_is():
    every = run_ranks(all_drifts, 4, {"tensor": FOUR["tensor"]}, 1)
    assert all(found == every[0] for found in every)
    text = "rank 1 holds other values of model/norm.weight in the box at (0,) than ranks 0, 2 and 3"
    check_found(every[0], "tensor", "model/norm.weight", text)
    check_found(every[0], "tensor", WEIGHT, f"rank 1 and rank 3 hold different values of {WEIGHT}")


@pytest.mark.case("N9")
def test_a_drift_ends_the_run_with_all_that_was_found():
    replica_check.refuse_drift([])
    with pytest.raises(NumericsError, match="rank 1 holds other a; rank 2 holds other b") as caught:
        replica_check.refuse_drift(["rank 1 holds other a", "rank 2 holds other b"])
    assert caught.value.code == 67


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.uint8])
def test_every_bit_moves_the_hash_and_so_does_the_order(dtype):
    bits = torch.arange(5).to(dtype)
    weights = torch.arange(1, 10, 2)
    before = replica_check._hash_bits(bits, weights)
    for bit in range(8 * bits.element_size()):
        other = bits.clone()
        other.view(torch.uint8)[-bits.element_size() + bit // 8] ^= 1 << bit % 8
        assert replica_check._hash_bits(other, weights) != before
    assert replica_check._hash_bits(bits.flip(0), weights) != before


def test_a_long_box_is_hashed_in_parts(monkeypatch):
    monkeypatch.setattr(replica_check, "_CHUNK", 3)
    bits = torch.tensor([5, 6, 7, 5, 6, 7])
    weights = torch.arange(1, 6, 2)
    assert replica_check._hash_bits(bits, weights) != replica_check._hash_bits(
        bits.roll(3) + 1, weights
    )
    swapped = torch.tensor([5, 6, 8, 5, 6, 7]), torch.tensor([5, 6, 7, 5, 6, 8])
    assert replica_check._hash_bits(swapped[0], weights) != replica_check._hash_bits(
        swapped[1], weights
    )


def test_one_process_has_nothing_to_compare():
    model = nn.Linear(2, 2)
    look = make_replica_check([model], torch.optim.SGD(model.parameters()), tk.solo_parallel())
    assert [look(step) for step in range(20)] == [[]] * 20


@pytest.mark.parametrize(("every", "within"), [(-1, 100), (10, 9), (0, 0)])
def test_a_period_that_cannot_be_kept_is_refused(every, within):
    model = nn.Linear(2, 2)
    sgd = torch.optim.SGD(model.parameters())
    with pytest.raises(ValueError, match="interval must be"):
        make_replica_check([model], sgd, tk.solo_parallel(), interval=every, within=within)


def damaged_state():
    """Put a NaN into a moment on rank 1; return the non-finite tensors before and after."""
    with tk.parallel_session() as ps:
        stages, optimizer, _ = trained(Layout(), ps, 1)
        before = find_nonfinite_state(stages, optimizer, ps.world)
        if ps.world.index == 1:
            get_local_box(replica_check._get_tensors(stages, optimizer)[MOMENT]).local.fill_(
                torch.nan
            )
        return before, find_nonfinite_state(stages, optimizer, ps.world)


@pytest.mark.case("N4")
def test_a_moment_that_is_not_finite_is_named_with_its_rank():
    assert run_ranks(damaged_state, 2) == [([], [f"{MOMENT} on rank 1"])] * 2


class Reads(TorchDispatchMode):
    """Counts the numbers that are read from a device one by one."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


@pytest.mark.case("N4")
def test_few_of_many_damaged_tensors_are_named():
    model = nn.Sequential(*[nn.Linear(1, 1) for _ in range(3)])
    for p in model.parameters():
        nn.init.constant_(p, torch.inf)
    with Reads() as reads:
        problems = find_nonfinite_state([model], torch.optim.SGD(model.parameters()), SOLO)
    assert reads.count <= 1  # the host waits for the device once, not for each tensor
    named = [f"model/{name} on rank 0" for name in ("0.weight", "0.bias", "1.weight")]
    assert problems == [*named, "and 3 more"]
