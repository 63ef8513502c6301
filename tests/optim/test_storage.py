"""What optimizers keep in few bits: the same in a loop, in tensors, and however it is cut."""

import importlib
import sys
import types
from functools import partial

import attrs
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from trainkit.noise.jit import jit
from trainkit.optim import Lion, LowPrecisionAdamW, Momentum, ScheduleFree, SignSGD, elementwise
from trainkit.optim.storage import encode_moment, read_moment
from trainkit.optim.table import OPTIMIZERS
from trainkit.parallel import parameters as naming

SHAPES = ((5, 768), (3, 3001), (7,), (), (0, 4), (300, 1))


def make(kind, params, **options):
    group = {"params": params, "param_names": [f"p{i}" for i in range(len(params))]}
    return kind([group], lr=1e-2, weight_decay=0.1, cautious=True, **options)


def stepped(kind, params, steps=3, **options):
    """Return parameters and state after steps on gradients of many sizes."""
    optimizer, draw = make(kind, params, **options), torch.Generator().manual_seed(1)
    for _ in range(steps):
        for p in params:
            g = torch.randn(p.shape, generator=draw)
            sizes = torch.logspace(-6, 1, p.shape[-1]) if p.dim() else torch.ones(())
            p.grad = (g * sizes).to(p.dtype)
        optimizer.step()
    return [*params, *(x for p in params for x in optimizer.state[p].values())]


def params_of(dtype, shapes=SHAPES):
    draw = torch.Generator().manual_seed(0)
    drawn = [torch.randn(shape, generator=draw).to(dtype) for shape in shapes]
    return [nn.Parameter(x) for x in drawn] + [nn.Parameter(drawn[0].clone()[:, ::3].t())]


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        (partial(LowPrecisionAdamW, moments="8bit", rounding="stochastic"), torch.bfloat16),
        (partial(LowPrecisionAdamW, moments="bf16", rounding="kahan"), torch.bfloat16),
        (partial(ScheduleFree, moments="8bit"), torch.float32),
        (partial(Momentum, moments="8bit"), torch.float32),
        (SignSGD, torch.float32),
        (partial(Lion, moments="bf16"), torch.float16),
        (partial(Lion, moments="bf16", rounding="stochastic"), torch.bfloat16),
        (partial(ScheduleFree, moments="bf16"), torch.float32),
        (partial(LowPrecisionAdamW, moments="bf16"), torch.float32),
    ],
)
def test_a_loop_and_tensors_give_the_same_bits(monkeypatch, kind, dtype):
    looped = stepped(kind, params_of(dtype))
    kinds_of = elementwise._describe_dtypes
    on_tensors = lambda *x: attrs.evolve(kinds_of(*x), can_loop=False)  # noqa: E731
    monkeypatch.setattr(elementwise, "_describe_dtypes", on_tensors)
    exact = lambda x: torch.from_numpy(np.sqrt(x.numpy()))  # noqa: E731 (MKL's is off by a bit)
    monkeypatch.setattr(Tensor, "sqrt", exact)
    whole = stepped(kind, params_of(dtype))
    assert [x.shape for x in looped] == [x.shape for x in whole]
    for got, want in zip(looped, whole, strict=True):
        assert torch.equal(got, want)


def test_a_rule_sees_what_is_not_contiguous():
    (first, *_, last) = params_of(torch.float32)
    alike = nn.Parameter(last.detach().contiguous())
    assert not last.is_contiguous()
    for got, want in zip(stepped(Momentum, [last]), stepped(Momentum, [alike]), strict=True):
        assert torch.equal(got, want)
    assert not torch.equal(last, first.detach()[:, ::3].t())


STORED = [
    (torch.float32, partial(LowPrecisionAdamW, moments="bf16")),
    (torch.bfloat16, partial(LowPrecisionAdamW, moments="bf16", rounding="stochastic")),
    (torch.bfloat16, partial(LowPrecisionAdamW, moments="8bit", rounding="stochastic")),
    (torch.bfloat16, partial(LowPrecisionAdamW, moments="bf16", rounding="kahan")),
]


@pytest.mark.parametrize(("dtype", "kind"), STORED)
def test_any_cut_gives_the_same_bits(monkeypatch, dtype, kind):
    draw = torch.Generator().manual_seed(0)
    whole = torch.randn(7, 4096, generator=draw).to(dtype)
    gradients = [torch.randn(7, 4096, generator=draw).to(dtype) for _ in range(3)]

    def run(lines, columns):
        part = nn.Parameter(whole[lines, columns].clone())
        optimizer = make(kind, [part])
        offset = (lines.start, columns.start)
        box_of = naming.get_local_box
        with monkeypatch.context() as patch:
            patch.setattr(
                "trainkit.optim.rounding_keys.get_local_box",
                lambda p: attrs.evolve(box_of(p), offset=offset),
            )
            for g in gradients:
                part.grad = g[lines, columns]
                optimizer.step()
        return {"p": part.detach()} | {x: t for x, t in optimizer.state[part].items() if t.dim()}

    every = run(slice(0, 7), slice(0, 4096))
    for lines in (slice(0, 1), slice(1, 4), slice(4, 7)):
        for columns in (slice(0, 768), slice(768, 4096)):
            for name, got in run(lines, columns).items():
                scale = every["p"].shape[-1] // every[name].shape[-1]
                at = slice(columns.start // scale, columns.stop // scale)
                assert torch.equal(got, every[name][lines, at]), name


# ------------------------------------------------------------------------------- codes of 8 bits


def entries_of(name, values, step):
    parts = {name: torch.empty(values.numel(), dtype=torch.uint8)}
    parts[f"{name}_scale"] = torch.empty(values.numel() // 256)
    return encode_moment(name, values, parts, step)


@pytest.mark.parametrize(("name", "reach"), [("m", 2.0**-15), ("v_sq", 2.0**-31)])
def test_a_code_of_8_bits_is_near_and_stays(name, reach):
    values = torch.cat([torch.logspace(0, np.log10(reach * 1.2), 256) * s for s in (1e3, 1e-12)])
    values *= 1 if name == "v_sq" else (-1) ** torch.arange(512)
    for step in range(1, 20):
        entries = entries_of(name, values, step)
        found = read_moment(name, entries, torch.float32)
        assert ((found / values - 1).abs() <= 0.125).all()
        again = entries_of(name, found, step + 100)
        assert torch.equal(read_moment(name, again, torch.float32), found)


@pytest.mark.parametrize("most", [3e38, 1.0, 1e-30, 1e-44])
def test_second_moments_never_become_0_and_0_stays(most):
    values = torch.logspace(0, -45, 256, dtype=torch.float64).mul(most).float()
    values[7] = 0
    for step in range(9):
        found = read_moment("v_sq", entries_of("v_sq", values, step), torch.float32)
        assert torch.equal(found == 0, values == 0)
    zero = read_moment("v_sq", entries_of("v_sq", torch.zeros(256), 1), torch.float32)
    assert not zero.any()
    values[9] = torch.nan
    assert read_moment("v_sq", entries_of("v_sq", values, 1), torch.float32)[9].isnan()


def test_a_code_of_8_bits_is_right_on_average():
    values = torch.linspace(1.0, 2.0, 256)
    found = [read_moment("m", entries_of("m", values, step), torch.float32) for step in range(1000)]
    mean = torch.stack(found).mean(0)
    assert (mean - values).abs().max() < 1e-3


@pytest.mark.parametrize("growth", [0.0, 2.0])
def test_moments_of_8_bits_follow_gradients_that_hardly_change_them(growth):
    # In a step a second moment moves by a thousandth: rounded to nearest it would never move.
    p = nn.Parameter(torch.zeros(1, 512))
    optimizer = LowPrecisionAdamW([p], lr=0.0, betas=(0.9, 0.999), moments="8bit")
    for step in range(600):
        p.grad = torch.ones(1, 512) if step < 100 else torch.full((1, 512), growth)
        p.grad[0, ::100] = 10.0  # the largest of each block stays
        optimizer.step()
    state = optimizer.state[p]
    entries = {x: t.view(-1) for x, t in state.items()}
    found = read_moment("exp_avg_sq", entries, torch.float32)
    initial = 1 - 0.999**100
    want = initial * 0.999**500 + growth**2 * (1 - 0.999**500)
    alone = torch.ones(512, dtype=torch.bool)
    alone[::100] = False
    assert abs(float(found[alone].mean()) / want - 1) < 0.03


# ---------------------------------------------------------------------------------- bf16 moments


WITH_MOMENTS = {name: kind.make for name, kind in OPTIMIZERS.items() if kind.low_precision_moments}
KINDS = {"bf16": 0.01, "8bit": 0.25}  # how far a mean may be off: two codes of 8 bits


def after(name, gradients, *, moments, start=0.0, lr=0.0, **options):
    """Return 1,024 parameters, and their state as numbers, after steps on constant gradients."""
    p = nn.Parameter(torch.full((2, 512), start))
    group = {"params": [p], "param_names": ["p"]}
    optimizer = WITH_MOMENTS[name]([group], lr=lr, moments=moments, **options)
    for value, steps in gradients:
        p.grad = torch.full((2, 512), value)
        for _ in range(steps):
            optimizer.step()
    entries = {x: t.reshape(-1) for x, t in optimizer.state[p].items()}
    found = {x: read_moment(x, entries, torch.float64) for x in entries if x in NARROW_MOMENTS}
    return p.detach().double(), found


NARROW_MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")
SLOW = {  # runs in which moments move by a thousandth of themselves in a step, and the decay
    "adamw": (
        partial(after, "adamw", betas=(0.999, 0.999)),
        {"exp_avg": 0.999, "exp_avg_sq": 0.999},
    ),
    "lion": (partial(after, "lion", betas=(0.9, 0.999)), {"exp_avg": 0.999}),
    "momentum": (partial(after, "momentum", momentum=0.999), {"momentum_buffer": 0.999}),
    "schedule-free": (partial(after, "schedule-free", betas=(0.9, 0.999)), {"exp_avg_sq": 0.999}),
}


@pytest.mark.parametrize("moments", KINDS)
@pytest.mark.parametrize("name", WITH_MOMENTS)
def test_moments_in_few_bits_reach_constant_gradients(name, moments):
    run, decays = SLOW[name]
    _, found = run([(1.0, 3000)], moments=moments)
    assert {*found} == {*decays}
    for key, decay in decays.items():
        want = (1 - decay**3000) / (1 - decay if name == "momentum" else 1)
        assert abs(float(found[key].mean()) / want - 1) < KINDS[moments], key
        assert float((found[key] / want - 1).abs().max()) < (0.1 if moments == "bf16" else 0.3)


@pytest.mark.parametrize("moments", KINDS)
@pytest.mark.parametrize("name", WITH_MOMENTS)
def test_moments_in_few_bits_follow_falling_gradients(name, moments):
    run, decays = SLOW[name]
    _, found = run([(1.0, 1000), (0.1, 2000)], moments=moments)
    for key, decay in decays.items():
        first, second = (1.0, 0.01) if key.endswith("_sq") else (1.0, 0.1)
        want = first * (1 - decay**1000) * decay**2000 + second * (1 - decay**2000)
        want /= 1 - decay if name == "momentum" else 1
        assert abs(float(found[key].mean()) / want - 1) < KINDS[moments], key


@pytest.mark.parametrize("moments", KINDS)
@pytest.mark.parametrize("decay", [0.99, 0.999])
def test_adamw_goes_as_far_in_5000_steps_as_with_moments_in_fp32(decay, moments):
    gradients = [(1.0, 5000)]
    p, _ = after("adamw", gradients, moments=moments, lr=1e-3, betas=(0.9, decay))
    assert abs(float(p.mean()) / -5 - 1) < 0.005


def test_parameter_and_moments_are_rounded_independently():
    p = nn.Parameter(torch.ones(64, 512, dtype=torch.bfloat16))
    group = {"params": [p], "param_names": ["p"]}
    optimizer = LowPrecisionAdamW(
        [group], lr=2.0**-10, moments="bf16", rounding="stochastic", betas=(0.5, 0.5)
    )
    p.grad = torch.full_like(p, 1 + 2.0**-7)
    for _ in range(2):
        optimizer.step()
    state = optimizer.state[p]
    drawn = [p.detach(), state["exp_avg"], state["exp_avg_sq"]]
    drawn = [x.double().flatten() for x in drawn]
    assert all(x.std() > 0 for x in drawn)
    together = torch.corrcoef(torch.stack(drawn)) - torch.eye(3)
    assert together.abs().max() < 5 / p.numel() ** 0.5


def test_moments_in_bf16_go_on_from_where_they_stopped_bit_for_bit():
    whole, parts = (params_of(torch.float32, ((3, 40),)) for _ in range(2))
    want = stepped(Lion, whole, steps=6, moments="bf16")
    optimizer, draw = make(Lion, parts, moments="bf16"), torch.Generator().manual_seed(1)
    for _ in range(6):
        for p in parts:
            sizes = torch.logspace(-6, 1, p.shape[-1])
            p.grad = torch.randn(p.shape, generator=draw) * sizes
        optimizer.step()
        saved, optimizer = optimizer.state_dict(), make(Lion, parts, moments="bf16")
        optimizer.load_state_dict(saved)
    found = [*parts, *(x for p in parts for x in optimizer.state[p].values())]
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


# ------------------------------------------------------------------------------------- the cache


def test_a_rule_of_a_user_is_compiled_anew_after_an_edit(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    for factor in (2, 3):
        (tmp_path / "a_users_rule.py").write_text(
            f"def rule(p, g, c):\n    return p - {factor} * g\n"
        )
        sys.modules.pop("a_users_rule", None)
        importlib.invalidate_caches()
        rule = importlib.import_module("a_users_rule").rule
        kind = type("Users", (SignSGD,), {"rule": staticmethod(rule)})
        p = nn.Parameter(torch.ones(3))
        p.grad = torch.ones(3)
        kind([p], lr=1.0).step()
        assert p.tolist() == [1.0 - factor] * 3


def test_what_the_package_keeps_is_of_the_files_that_it_uses(tmp_path, monkeypatch):
    used = types.ModuleType("trainkit.used")
    used.__file__ = str(tmp_path / "used.py")
    monkeypatch.setitem(sys.modules, used.__name__, used)

    def other():
        pass

    other.__module__ = used.__name__
    names = set()
    for text in ("1", "2", "1"):
        (tmp_path / "used.py").write_text(text)
        names.add(jit(lambda x: x, uses=(other,)).py_func.__qualname__)
    assert len(names) == 2
