"""The promises of every optimizer, row by row; in other layouts: test_sharded.py."""

import copy
import math
from functools import partial

import attrs
import pytest
import torch
from optim.rows import (
    BF16,
    FORMULAS,
    ROWS,
    Row,
    as_numbers,
    give_gradients_,
    made,
    rate,
    step_plainly,
)
from torch import nn

import trainkit as tk
from trainkit import optim
from trainkit.optim import make_optimizer, parse_groups, use_averaged_parameters
from trainkit.optim.table import OPTIMIZERS, check_options, list_precision_options, state_bytes
from trainkit.run.config import OptimizerOptions
from trainkit.types import CheckpointError, ConfigError, Precision, TrainState
from trainkit.weights.checkpoint import load_checkpoint
from trainkit.weights.checkpoint.facts import ResumeRules
from trainkit.weights.checkpoint.run_state import get_run_tensors

each = pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
PS = tk.solo_parallel()


class Named(nn.Module):
    """Parameters under names with dots."""

    def __init__(self, named):
        super().__init__()
        for name, p in named.items():
            *path, last = name.split(".")
            owner = self
            for part in path:
                owner.add_module(part, nn.Module())
                owner = getattr(owner, part)
            owner.register_parameter(last, p)


def started(row, steps=0, seed=0):
    """Return parameters by name and their optimizer after some steps."""
    named = made(row.dtype, seed)
    optimizer = row.make(named)
    for step in range(steps):
        step_once(named, optimizer, step)
    return named, optimizer


def step_once(named, optimizer, step, *, change=None):
    give_gradients_(named, step)
    if change is not None:
        change(named)
    return tk.clip_and_step(named.values(), optimizer, lr=rate(step), max_norm=None)


def held(named, optimizer):
    """Return copies of all parameters and all that is remembered of them."""
    tensors = get_run_tensors([Named(named)], optimizer)
    return {name: x.detach().clone() for name, x in tensors.items()}


def same(a, b):
    """Say whether two states have the same names and dtypes and the same bits."""
    return a.keys() == b.keys() and all(
        a[k].dtype == b[k].dtype
        and torch.equal(a[k].reshape(-1).view(torch.uint8), b[k].reshape(-1).view(torch.uint8))
        for k in a
    )


# --------------------------------------------------------------------------------------- stepping


@each
def test_descends_and_leaves_no_gradient(row):
    named, optimizer = started(row)
    losses = []
    for step in range(100):
        loss = sum((i + 1) * (p.float() - 1).square().sum() for i, p in enumerate(named.values()))
        loss.backward()
        losses.append(loss.item())
        lr = 0.2 * (1 - step / 100) * {"momentum": 0.1, "muon": 4}.get(row.optimizer, 1)
        tk.clip_and_step(named.values(), optimizer, lr=lr, max_norm=None)
        assert all(p.grad is None for p in named.values())
    assert losses[-1] < 0.05 * losses[0]


def ulp(x):
    """Return the distance of the bf16 numbers around fp64 ones."""
    return 2.0 ** (x.abs().log2().floor() - 7)


@each
def test_is_its_formula(row):
    named, optimizer = started(row)
    values, memory, errors = {k: p.detach().double().clone() for k, p in named.items()}, {}, []
    for step in range(6):
        give_gradients_(named, step)
        gradients = {name: p.grad.double() for name, p in named.items()}
        if "rounding=stochastic" in row.options:  # of every step by itself: another parameter
            values = {name: p.detach().double() for name, p in named.items()}
        step_once(named, optimizer, step)
        step_plainly(row, values, memory, step, gradients)
        for name, p in named.items():
            found, want = p.detach().double(), values[name]
            if "rounding=stochastic" in row.options:
                errors.append(((found - want) / ulp(want)).reshape(-1))
            elif "rounding=kahan" in row.options:
                whole = found + optimizer.state[p]["rest"].double()
                assert ((found - whole).abs() <= ulp(want)).all()
                assert ((whole - want).abs() <= 2.0**-14 * (want.abs() + rate(step))).all()
            else:
                assert (found - want).abs().max() <= 1e-12 * want.abs().max()
            if row.mean is not None:
                mean = optimizer.state[p]["mean"].double()
                assert (mean - memory[name]["mean"]).abs().max() <= 1e-12
    if errors:  # it goes to either neighbour, and not to the nearest, with no bias
        off = torch.cat(errors)
        assert off.abs().max() <= 1.001
        assert (off.abs() > 0.51).float().mean() > 0.1
        assert abs(off.mean()) < 4 * 0.5 / off.numel() ** 0.5


def test_schedule_free_evaluates_the_mean_of_its_way():
    row = ROWS["schedule-free"]
    named, optimizer = started(row)
    values, memory = {k: p.detach().double().clone() for k, p in named.items()}, {}
    for step in range(5):
        give_gradients_(named, step)
        gradients = {name: p.grad.double() for name, p in named.items()}
        step_once(named, optimizer, step)
        step_plainly(row, values, memory, step, gradients)
    before = held(named, optimizer)
    with use_averaged_parameters(optimizer):
        for name, p in named.items():
            assert (p - memory[name]["x"]).abs().max() <= 1e-11
    assert same(held(named, optimizer), before)


def test_every_optimizer_has_a_formula_and_rows():
    assert {*FORMULAS} == {*OPTIMIZERS} == {row.optimizer for row in ROWS.values()}


@each
@pytest.mark.usefixtures("verdict")
@pytest.mark.parametrize("steps", [0, 2])
def test_a_refused_step_changes_no_bit_and_no_count(row, steps):
    def spoil(named):
        named["up.weight"].grad[0, 0] = torch.nan

    named, optimizer = started(row, steps)
    before, twin = held(named, optimizer), started(row, steps)
    assert not step_once(named, optimizer, steps, change=spoil).applied
    after = held(named, optimizer)
    assert same({k: after[k] for k in before}, before)
    if steps == 0:  # nothing but what is remembered before the first step
        initial = {k: x for k, x in after.items() if "/mean/" not in k}
        assert all(not x.double().any() for k, x in initial.items() if k.startswith("optimizer/"))
    for run in ((named, optimizer), twin):
        assert step_once(*run, steps).applied
    assert same(held(named, optimizer), held(*twin))


LAYOUTS_IN_MEMORY = {
    "rows": lambda x: x.contiguous(),
    "columns": lambda x: x.mT.contiguous().mT,
    "with gaps": lambda x: torch.stack([x, x], -1)[..., 0],
    "one number": lambda x: x[..., :1].expand_as(x),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("of_gradient", LAYOUTS_IN_MEMORY)
@pytest.mark.parametrize("of_parameter", ["rows", "columns", "with gaps"])
def test_elements_are_paired_by_index_whatever_the_strides(name, of_parameter, of_gradient):
    # torch's fused AdamW pairs them by their order in memory.
    draw = torch.Generator().manual_seed(0)
    start, *gradients = (torch.randn(4, 6, generator=draw) for _ in range(4))
    change = LAYOUTS_IN_MEMORY[of_gradient]

    def run(of_parameter, lay_out):
        p = nn.Parameter(LAYOUTS_IN_MEMORY[of_parameter](start.clone()))
        optimizer = Row(name).make({"up.weight": p})
        for step, g in enumerate(gradients):
            p.grad = lay_out(change(g))
            if step == 1:  # with a clip, and with a state that was saved in rows
                saved = copy.deepcopy(optimizer.state_dict())
                for state in saved["state"].values():
                    state |= {key: x.contiguous() for key, x in state.items()}
                optimizer.load_state_dict(saved)
                p.grad = change(g).clone(memory_format=torch.preserve_format)
            tk.clip_and_step([p], optimizer, lr=0.1, max_norm=1.0 if step == 1 else None)
        return p.detach().clone(memory_format=torch.contiguous_format)

    found, want = run(of_parameter, lambda g: g), run("rows", lambda g: g.contiguous())
    torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-6)


# ----------------------------------------------------------------------------------------- memory


@each
def test_low_precision_is_used_only_where_it_is_requested(row):
    refused = {BF16} if row.optimizer == "schedule-free" else set()
    for dtype in {row.dtype, torch.float32, BF16} - refused:
        _, optimizer = started(attrs.evolve(row, dtype=dtype), 1)
        kinds = {
            (key, x.dtype)
            for values in optimizer.state.values()
            for key, x in values.items()
            if x.dtype.itemsize < 4
        }
        rest = {("rest", BF16)} if dtype == BF16 and "rounding=kahan" in row.options else set()
        assert (kinds - rest != set()) == row.asks_for_few_bits


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_bytes_of_state_are_those_of_state_bytes(name):
    for kind in ("fp32", "bf16", "8bit"):
        options = {"moments": kind} if "moments" in OPTIMIZERS[name].options else {}
        matrix = {"m": nn.Parameter(torch.ones(4, 512))}
        texts = tuple(f"{option}={value}" for option, value in options.items())
        optimizer = Row(name, texts).make(matrix)
        matrix["m"].grad = torch.ones(4, 512)
        optimizer.step()
        state = optimizer.state[matrix["m"]].values()
        num_bytes = sum(x.nbytes for x in state if x.dim())
        assert num_bytes / matrix["m"].numel() == state_bytes(name, options)


# --------------------------------------------------------------------------------------- resuming


@each
def test_goes_on_bit_for_bit_from_a_checkpoint_and_from_a_state_dict(row, tmp_path):
    named, optimizer = started(row, 3)
    stages = [Named(named)]
    tk.save_checkpoint(tmp_path, TrainState(step=3), stages, optimizer, PS)
    again = started(row, seed=1)
    tk.resume(tmp_path, TrainState(), [Named(again[0])], again[1], PS, log=lambda _: None)
    other = started(row, seed=1)
    other[1].load_state_dict(copy.deepcopy(optimizer.state_dict()))  # torch's shares memory
    for name, p in named.items():
        other[0][name].data.copy_(p.data)
    for run in (again, other):
        assert same(held(*run), held(named, optimizer))
        groups = [g for part in getattr(run[1], "parts", ()) for g in part.param_groups]
        assert all(a is b for a, b in zip(groups, run[1].param_groups, strict=bool(groups)))
    for step in (3, 4):
        for run in ((named, optimizer), again, other):
            step_once(*run, step)
        for run in (again, other):
            assert same(held(*run), held(named, optimizer))


IS_NOT = "parameter group . has "
FACTS = {
    "another rate of a group": ("adamw, groups", {"groups": ("head.* lr_scale=0.6",)}, "it has 6"),
    "a rate": ("adamw, groups", {"groups": ("head.* lr_scale=0.7", "norm.*")}, IS_NOT),
    "order of groups": ("adamw, groups", {"groups": ROWS["adamw, groups"].groups[::-1]}, IS_NOT),
    "an option": ("lion", {"options": ("betas=(0.9,0.98)",)}, IS_NOT + "betas"),
    "few bits": ("lion", {"options": ("moments=bf16",)}, IS_NOT + "moments"),
    "few bits of AdamW": ("adamw", {"options": ("moments=bf16",)}, "its optimizer is AdamW, the"),
    "an optimizer": ("adamw", {"optimizer": "lion"}, "its optimizer is AdamW, the run has Lion"),
    "an optimizer of a group": (
        "two",
        {"groups": (ROWS["two"].groups[0].replace("lion", "adamw"),)},
        IS_NOT,
    ),
    "the mean": ("adamw, mean", {"mean": 0.5}, IS_NOT + "mean"),
    "no mean": (
        "adamw, mean",
        {"mean": None},
        "its optimizer is CombinedOptimizer, the run has AdamW",
    ),
}


@pytest.mark.parametrize("fact", FACTS)
def test_another_optimizer_is_refused_by_name_before_anything_is_changed(fact, tmp_path):
    name, changes, message = FACTS[fact]
    row = ROWS[name]
    named, optimizer = started(row, 2)
    path = tk.save_checkpoint(tmp_path, TrainState(step=2), [Named(named)], optimizer, PS)
    other = made(row.dtype, seed=1)
    other = other, row.make(other, **changes)
    step_once(*other, 0)
    before = held(*other)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(path, [Named(other[0])], other[1])
    assert same(held(*other), before)


# -------------------------------------------------------------------------- with another optimizer

ASKED = ResumeRules(ask=("optimizer",), granted=("optimizer",))


def changed(before, after, tmp_path, steps=3, rules=None):
    """Save in one row, resume in another; return both, and the messages."""
    old = started(before, steps)
    stages = [Named(old[0])]
    tk.save_checkpoint(tmp_path, TrainState(step=steps), stages, old[1], PS)
    new, messages = started(after, seed=1), []
    step_once(*new, 7)  # of which nothing may be left
    tk.resume(
        tmp_path,
        TrainState(),
        [Named(new[0])],
        new[1],
        PS,
        rules=rules or ASKED,
        log=messages.append,
    )
    return old, new, messages


def test_lion_takes_over_the_moment_of_adamw(tmp_path):
    old, new, messages = changed(ROWS["adamw"], ROWS["lion"], tmp_path)
    assert (
        "the optimizer carries over exp_avg, drops step and exp_avg_sq (4 parameters)" in messages
    )
    for name, p in new[0].items():
        q = old[0][name]
        assert torch.equal(p, q)
        assert {*new[1].state[p]} == {"exp_avg"}
        assert torch.equal(new[1].state[p]["exp_avg"], old[1].state[q]["exp_avg"])
    step_once(*new, 3)


def test_lion_takes_over_the_step_of_adamw_where_its_moments_are_rounded_by_it(tmp_path):
    _, new, messages = changed(ROWS["adamw"], ROWS["lion, bf16 moments"], tmp_path)
    assert (
        "the optimizer carries over step and exp_avg, drops exp_avg_sq (4 parameters)" in messages
    )
    assert all(float(state["step"]) == 3 for state in new[1].state.values())
    step_once(*new, 3)
    assert all(float(state["step"]) == 4 for state in new[1].state.values())


@pytest.mark.parametrize("kind", ["bf16", "8bit"])
def test_a_count_begins_where_moments_that_needed_none_go_on_in_few_bits(kind, tmp_path):
    after = Row("lion", (f"moments={kind}",))
    _, new, messages = changed(ROWS["lion"], after, tmp_path)
    assert "the optimizer carries over exp_avg, initializes step (4 parameters)" in messages
    step_once(*new, 3)
    assert all(float(state["step"]) == 1 for state in new[1].state.values())
    _, back, messages = changed(after, ROWS["lion"], tmp_path / "back")
    assert "the optimizer carries over exp_avg, drops step (4 parameters)" in messages
    assert all(state.keys() == {"exp_avg"} for state in back[1].state.values())


def test_only_what_needs_a_count_of_steps_has_one():
    few = ("moments=bf16", "moments=8bit", "rounding=stochastic")
    for name, own in (("lion", {"exp_avg"}), ("momentum", {"momentum_buffer"}), ("signsgd", set())):
        _, optimizer = started(Row(name), 1)
        assert all(state.keys() == own for state in optimizer.state.values())
        for option in few:
            counts = own or option == "rounding=stochastic"
            _, optimizer = started(Row(name, (option,), dtype=torch.bfloat16), 2)
            for state in optimizer.state.values():
                assert ("step" in state) == bool(counts)
                assert not counts or float(state["step"]) == 2


def test_moments_that_a_count_corrects_are_not_taken_over_without_it(tmp_path):
    class Corrected(optim.Lion):
        counts = ("step",)

    old = started(ROWS["lion"], 3)
    tk.save_checkpoint(tmp_path, TrainState(step=3), [Named(old[0])], old[1], PS)
    new = made(torch.float64, seed=1)
    optimizer = Corrected(new.values(), lr=0.1)
    tk.resume(tmp_path, TrainState(), [Named(new)], optimizer, PS, rules=ASKED, log=print)
    assert not any(optimizer.state.values())


@pytest.mark.parametrize("kind", ["bf16", "8bit", "fp32"])
def test_moments_go_from_any_number_of_bits_to_any_other(kind, tmp_path):
    for start in ("adamw", "adamw, bf16 moments", "adamw, 8-bit moments"):
        after = Row(options=(f"moments={kind}", "cautious=True"))
        old, new, messages = changed(ROWS[start], after, tmp_path / start)
        assert (
            "the optimizer carries over step and exp_avg and exp_avg_sq (4 parameters)" in messages
        )
        as_new, as_old = fp64_moments(*new), fp64_moments(*old)
        fresh = fp64_moments(*started(after, 1))
        assert as_new.keys() == as_old.keys() == fresh.keys()
        bound = {"bf16": 2**-8, "8bit": 2**-3, "fp32": 0.0}[kind]
        for key, want in as_old.items():
            assert ((as_new[key] - want).abs() <= bound * want.abs().max()).all(), key
        assert {*state_kinds(new[1])} == {*state_kinds(started(after, 1)[1])}
        step_once(*new, 3)


def fp64_moments(named, optimizer):
    """Return moments by parameter and key as numbers."""
    found = {}
    for name, p in named.items():
        state = optimizer.state[p]
        for key in ("exp_avg", "exp_avg_sq"):
            found[name, key] = as_numbers(key, state)
    return found


def state_kinds(optimizer):
    return [
        (key, x.dtype, tuple(x.shape))
        for values in optimizer.state.values()
        for key, x in values.items()
    ]


def test_what_a_count_corrects_begins_afresh_where_a_part_of_it_is_missing(tmp_path):
    before = attrs.evolve(ROWS["lion"], mean=0.9)
    old, new, messages = changed(before, attrs.evolve(ROWS["adamw"], mean=0.9), tmp_path)
    assert any("carries over mean, initializes step and exp_avg" in line for line in messages)
    for name, p in new[0].items():
        assert new[1].state[p].keys() == {"mean"}
        assert torch.equal(new[1].state[p]["mean"], old[1].state[old[0][name]]["mean"])
    twin = made(torch.float64)
    for name, p in twin.items():
        p.data.copy_(new[0][name].data)
    fresh = twin, ROWS["adamw"].make(twin)
    for run in (new, fresh):
        step_once(*run, 3)
    assert all(torch.equal(new[0][name], p) for name, p in fresh[0].items())
    assert {*new[1].state[new[0]["scale"]]} == {"step", "exp_avg", "exp_avg_sq", "mean"}


@pytest.mark.parametrize(("before", "after"), [(0.9, None), (None, 0.9)])
def test_who_allows_another_mean_may_begin_or_end_one(before, after, tmp_path):
    rows = [attrs.evolve(ROWS["adamw"], mean=mean) for mean in (before, after)]
    rules = ResumeRules(ask=["mean"], granted=["mean"])
    _, new, messages = changed(*rows, tmp_path, rules=rules)
    assert any("carries over step and exp_avg and exp_avg_sq" in line for line in messages)
    step_once(*new, 3)
    assert all(("mean" in x) == bool(after) for x in new[1].state.values())


def test_copies_begin_at_the_parameters_beside_moments_that_are_taken_over(tmp_path):
    old, new, _ = changed(ROWS["adamw"], ROWS["schedule-free"], tmp_path)
    for name, p in new[0].items():
        state = new[1].state[p]
        assert torch.equal(state["mean"], p)
        assert torch.equal(state["exp_avg_sq"], old[1].state[old[0][name]]["exp_avg_sq"])
        assert [float(state[key]) for key in ("step", "rate", "weight")] == [3, 0, 0]


def test_the_same_optimizer_is_compared_in_full_where_another_is_allowed(tmp_path):
    named, optimizer = started(ROWS["adamw"], 2)
    for p in named.values():
        del optimizer.state[p]["exp_avg"]
    path = tk.save_checkpoint(tmp_path, TrainState(step=2), [Named(named)], optimizer, PS)
    other = started(ROWS["adamw"])
    with pytest.raises(CheckpointError, match=r"optimizer/exp_avg/.* is missing"):
        load_checkpoint(path, [Named(other[0])], other[1], rules=ASKED)


def test_a_roll_back_goes_behind_a_change_of_the_optimizer(tmp_path):
    _, new, _ = changed(ROWS["adamw"], ROWS["lion, bf16 moments"], tmp_path)
    step_once(*new, 3)
    state = TrainState(step=4)
    tk.checkpoint.roll_back(
        tmp_path, state, [Named(new[0])], new[1], PS, before=3, log=lambda _: None
    )
    assert float(new[1].state[new[0]["scale"]]["step"]) == 3


def test_a_precision_is_an_option_of_every_optimizer_and_moments_are_set_once():
    model = nn.ModuleDict({"up": nn.Linear(4, 4), "head": nn.Linear(4, 4)}).bfloat16()
    make = partial(
        make_optimizer, [model], lr=0.1, precision=Precision(storage="bf16", moments="8bit")
    )
    made = make(groups={"head.*": {"optimizer": "lion", "rounding": "kahan"}})
    found = {(x["optimizer"], x["moments"], x["rounding"]) for x in made.param_groups}
    assert found == {("Lion", "8bit", "kahan"), ("LowPrecisionAdamW", "8bit", "stochastic")}
    with pytest.raises(ConfigError, match="muon does not support moments in 8bit"):
        make(optimizer="muon")
    with pytest.raises(ConfigError, match="--moments"):
        OptimizerOptions(optimizer_options=("moments=bf16",))


def test_options_are_values_in_python_and_texts_at_a_command_line():
    model = nn.ModuleDict({"up": nn.Linear(4, 4), "head": nn.Linear(4, 4)})
    options = {"betas": (0.8, 0.9), "moments": "bf16", "cautious": True}
    groups = {"head.*": {"lr_scale": 0.5, "optimizer": "lion", "betas": (0.7, 0.6)}}
    texts = ["betas=(0.8, 0.9)", "moments=bf16", "cautious=True"]
    assert optim.parse_options(texts) == options
    of_groups = ["head.* lr_scale=0.5 optimizer=lion betas=(0.7,0.6)"]
    assert optim.parse_groups(of_groups) == groups
    made = make_optimizer([model], lr=0.1, options=options, groups=groups)
    head, _, up, _ = made.param_groups
    assert (head["optimizer"], head["lr_scale"], head["betas"]) == ("Lion", 0.5, (0.7, 0.6))
    assert (up["optimizer"], up["moments"], up["cautious"]) == ("LowPrecisionAdamW", "bf16", True)
    by_flags = OptimizerOptions(optimizer_options=("cautious=True",), optimizer_groups=of_groups)
    assert (by_flags.options, by_flags.groups) == ({"cautious": True}, groups)


@pytest.mark.parametrize("dtype", [None, "bfloat16", "float64"])
def test_an_option_without_a_default_takes_what_its_optimizer_takes(dtype):
    model = nn.ModuleDict({"up": nn.Linear(4, 4), "head": nn.Linear(4, 4)})
    options = optim.parse_options([f"dtype={dtype}"], optimizer="muon")
    assert options == {"dtype": dtype}
    made = make_optimizer(model, lr=0.1, optimizer="muon", options=options)
    assert {group["dtype"] for group in made.param_groups if "dtype" in group} == {dtype}
    with pytest.raises(ConfigError, match="dtype must be"):
        make_optimizer(model, lr=0.1, optimizer="muon", options={"dtype": 64})


make_bad = partial(make_optimizer, nn.Linear(2, 2), lr=0.1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            partial(make_bad, options=["moments=bf16"]),
            r"options must be a mapping .* optim.parse_options makes",
        ),
        (
            partial(make_bad, groups=["head.* lr_scale=1"]),
            r"groups must be a mapping .* optim.parse_groups makes",
        ),
        (
            partial(make_bad, options={"momentum": 0.9}),
            "adamw has no option 'momentum'; it has betas=",
        ),
        (
            partial(make_bad, options={"cautious": "yes"}),
            "adamw: cautious must be of the type of False, got 'yes'",
        ),
        (
            partial(make_bad, options={"betas": 0.9}),
            r"adamw: betas must be of the type of \(0.9, 0.95\), got 0.9",
        ),
        (
            partial(make_bad, groups={"**": {"lr_scale": "0.5"}}),
            "lr_scale must be a finite number",
        ),
        (
            partial(make_bad, groups={"**": {"optimizer": "lino"}}),
            "there is no optimizer 'lino'",
        ),
        (
            partial(make_bad, groups={"haed.*": {"lr_scale": 1.0}}),
            "'haed.*' matches the name of no parameter",
        ),
    ],
)
def test_what_is_no_option_is_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_a_pattern_that_is_given_twice_is_refused():
    with pytest.raises(ConfigError, match="'head' is given twice"):
        OptimizerOptions(optimizer_groups=("head lr_scale=1", "head lr_scale=2"))


def test_a_schedule_free_optimizer_says_that_it_needs_fp32():
    with pytest.raises(ConfigError, match="schedule-free does not support parameters in bf16"):
        list_precision_options("schedule-free", Precision(storage="bf16"))
    with pytest.raises(ConfigError, match="choose adamw, lion, momentum, signsgd"):
        list_precision_options("muon", Precision(storage="bf16"))


@pytest.mark.parametrize("number", ["lr_scale=nan", "lr_scale=-1", "weight_decay=inf"])
def test_a_group_that_would_spoil_every_number_is_refused(number):
    with pytest.raises(ConfigError, match="must be a finite number of at least 0"):
        check_options(groups=parse_groups([f"** {number}"]), lr=0.1, optimizer="adamw")


def test_a_decay_without_end_is_refused():
    with pytest.raises(ConfigError, match="weight_decay must be at least 0 and finite"):
        OptimizerOptions(weight_decay=math.inf)
