"""Float8: torchao's numbers in one process, and one process's numbers in every layout."""

import copy
import dataclasses
from unittest import mock

import attrs
import pytest
import torch
from rounded_layouts import MODEL, alone, farthest, hold
from torch import nn

import trainkit as tk
from trainkit.models import Decoder, init_weights, make_decoder_config
from trainkit.parallel import fsdp, tensor_parallel
from trainkit.parallel.linear_layers import describe_linears
from trainkit.parallel.recompute import groups_of
from trainkit.parallel.transforms import check_plan
from trainkit.post.adapters import Lora, float8, lora
from trainkit.post.adapters.fake import quietly
from trainkit.post.adapters.float8 import _round, scaled_product
from trainkit.tools.testing import run_ranks
from trainkit.types import ConfigError

SCALINGS = ["tensorwise", "rowwise", "rowwise_with_gw_hp"]
SOLO = tk.solo_parallel()
BF16 = torch.bfloat16


# ------------------------------------------------------------------------------------ one process


def with_gradients(model, x):
    x = x.clone().requires_grad_()
    y = model(x)
    y.backward(torch.linspace(-3, 5, y.numel()).view_as(y).sin().to(y.dtype))
    return y.detach(), x.grad, *(p.grad for p in model.parameters())


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_numbers_are_those_of_torchao(scaling, dtype):
    with quietly():
        pytest.importorskip("torchao")
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    random = torch.Generator().manual_seed(0)
    plain = nn.Sequential(nn.Linear(64, 96)).to(dtype)
    for p in plain.parameters():
        p.data = torch.randn(p.shape, generator=random).to(dtype)
    how = dataclasses.replace(Float8LinearConfig.from_recipe_name(scaling), emulate=True)
    theirs = convert_to_float8_training(copy.deepcopy(plain), config=how)
    ours = float8(scaling)(copy.deepcopy(plain), SOLO)
    x = torch.randn(2, 40, 64, generator=random).to(dtype)
    wanted, exact = with_gradients(theirs, x), with_gradients(plain, x)
    for i, (a, b, c) in enumerate(zip(with_gradients(ours, x), wanted, exact, strict=True)):
        if scaling != "tensorwise":  # whose scales are no powers of two: their order shows
            assert torch.equal(a, b)
        assert (a - b).abs().max() <= (2**-8 if dtype == BF16 else 1e-6) * b.abs().max()
        is_float8 = i < 2 or (i == 2 and scaling != "rowwise_with_gw_hp")
        assert torch.equal(a, c) != is_float8
        assert (a - c).abs().max() < 0.2 * c.abs().max()


OF_ROWS = pytest.mark.skipif(torch.__version__ < "2.13", reason="a CPU scales whole matrices alone")


@pytest.mark.parametrize("one", [True, pytest.param(False, marks=OF_ROWS)])
def test_the_kernel_for_gpus_multiplies_what_is_multiplied_here(one):
    random = torch.Generator().manual_seed(0)
    a, b = torch.randn(24, 40, generator=random), torch.randn(40, 32, generator=random)
    dtype = torch.float8_e5m2 if one else torch.float8_e4m3fn
    a8, a_scale = _round(a, 1, dtype, not one, one=one, inner=SOLO.tp, outer=SOLO.tp)
    b8, b_scale = _round(b, 0, torch.float8_e4m3fn, not one, one=one, inner=SOLO.tp, outer=SOLO.tp)
    wanted = (a8.float() @ b8.float()) * a_scale * b_scale
    with mock.patch.object(torch, "_scaled_mm", wraps=torch._scaled_mm) as called:
        found = scaled_product(a8, b8, a_scale, b_scale)
    a, b, *scales = called.call_args.args  # as cuBLAS wants it, which a CPU does not ask
    assert a.shape[1] == b.shape[0] == 48
    assert (a.stride(1), b.stride(0)) == (1, 1)
    assert [tuple(x.shape) for x in scales] == ([(1, 1)] * 2 if one else [(24, 1), (1, 32)])
    assert all(x.is_contiguous() and x.dtype == torch.float32 for x in scales)
    assert (found - wanted).abs().max() < 2**-8 * wanted.abs().max()
    assert torch.ops.aten._scaled_mm.default in groups_of(torch.device("cpu"))


@pytest.mark.only_all
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # dynamo's
@pytest.mark.parametrize("scaling", SCALINGS)
def test_it_is_compiled_whole(scaling):
    model = float8(scaling)(nn.Sequential(nn.Linear(64, 32)), SOLO)
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    wanted = with_gradients(model, x)
    model.zero_grad()
    found = with_gradients(torch.compile(model, backend="aot_eager", fullgraph=True), x)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_not_hidden(scaling, bad):
    model = float8(scaling)(nn.Sequential(nn.Linear(16, 16)), SOLO)
    x = torch.ones(16, 16)
    x[3, 2] = bad
    assert bool(model(x)[3].isnan().all())
    zeros = with_gradients(model, 0 * torch.ones(16, 16))
    assert all(bool(part.isfinite().all()) for part in zeros)


def test_names_and_values_stay_and_what_is_left_out_is_reported():
    config = make_decoder_config("tiny")
    config = attrs.evolve(config, tied=False)
    plan = [float8("rowwise")]
    with torch.device("meta"):
        names = [name for name, _ in Decoder(config).named_parameters()]
    weights = init_weights(config, seed=0)
    (model,) = tk.build_stages(lambda: Decoder(config), SOLO, plan, weights=weights)
    assert [name for name, _ in model.named_parameters()] == names
    up = model.layers["0"].mlp.up
    assert torch.equal(up.weight, weights("layers.0.mlp.up.weight", up.weight.shape, (0, 0)))
    count = 7 * config.layers
    assert describe_linears([model]) == f"float8 (rowwise) in {count} linear layers, not in head"
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.layers["0"].mlp.up.weight.zero_()
    x = torch.ones(1, config.width)
    assert twin.layers["0"].mlp.up(x).abs().max() == 0 != up(x).abs().max()


def test_a_base_with_adapters_multiplies_in_float8_and_is_frozen():
    model = nn.ModuleDict({"up": nn.Linear(16, 32, bias=False)})
    plain = nn.functional.linear(torch.ones(2, 16), model.up.weight)
    float8("rowwise", modules="up")(model, SOLO)
    lora(Lora("up", rank=2))(model, SOLO)
    y = model.up(torch.ones(2, 16))
    assert 0 < (y - plain).abs().max() < 0.1
    y.sum().backward()
    assert model.up.weight.grad is None
    assert model.up.lora.default.b.grad.abs().max() > 0


def test_what_cannot_be_is_refused():
    model = nn.ModuleDict(
        {"up": nn.Linear(16, 24), "wide": nn.Linear(16, 16), "head": nn.Linear(16, 16)}
    )
    for pattern, message in (
        ("up", "is 24 x 16, which 16 does not"),
        ("x", "matches the name of no"),
    ):
        with pytest.raises(ConfigError, match=message):
            float8(modules=pattern)(model, SOLO)
    float8()(model, SOLO)
    assert (
        describe_linears([model])
        == "float8 (rowwise_with_gw_hp) in 1 linear layer, not in up, head"
    )
    with pytest.raises(ConfigError, match=r"'wide' has a forward pass of its own \(Float8Linear\)"):
        float8(modules="wide")(model, SOLO)
    with pytest.raises(ConfigError, match=r"float8: no linear layer can: 'up' is 24 x 16"):
        float8()(nn.ModuleDict({"up": nn.Linear(16, 24)}), SOLO)
    with pytest.raises(ConfigError, match=r"can: '0' is .*; '1' is .*; '2' is [^;]*; and 2 more"):
        float8()(nn.Sequential(*(nn.Linear(16, 24) for _ in range(5))), SOLO)
    with pytest.raises(ConfigError, match="rounded must come before tensor"):
        check_plan([tensor_parallel(), float8()], SOLO)
    with pytest.raises(ValueError, match='"tensorwise" or "rowwise" or'):
        float8("blockwise")


def test_a_gpu_without_float8_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 6))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "an A10")
    ps = attrs.evolve(SOLO, device=torch.device("cuda"))
    with pytest.raises(ConfigError, match=r"float8: an A10 cannot multiply it"):
        float8()(nn.Sequential(nn.Linear(16, 16)), ps)


# ------------------------------------------------------------------------------------- in layouts


SINGLE, ROWS, HP = (f"float8_{scaling}" for scaling in SCALINGS)
EACH = {"dp_shard": 2}, {"tp": 2}, {"pp": 2}, {"ring": 2}, {"ulysses": 2}


def test_layouts_round_to_the_same_bits():
    dp, tp, pp, ring, _ = EACH
    rest = (dp, HP, {"rows": 2}), (dp, SINGLE, {"plan": "bf16"})
    hold(2, (tp, SINGLE), (tp, HP), (dp, SINGLE), (ring, SINGLE), (pp, ROWS), *rest)


@pytest.mark.only_all
def test_so_do_all_others_on_two_ranks():
    names = SINGLE, ROWS, HP
    cases = [(degrees, name) for degrees in EACH for name in names]
    cases += [(EACH[0], name, {"plan": "bf16"}) for name in names]
    hold(2, *cases, (EACH[1], SINGLE, {"plan": "selective"}))


@pytest.mark.only_all
def test_so_do_products_of_layouts():
    tp_ring, names = {"tp": 2, "ring": 2}, (SINGLE, ROWS, HP)
    hold(
        4,
        *((tp_ring, name) for name in names),
        *(({"dp_shard": 2, "tp": 2}, name) for name in names),
        ({"pp": 2, "ulysses": 2}, ROWS),
        ({"dp_replicate": 2, "dp_shard": 2}, SINGLE),
        (tp_ring, SINGLE, {"plan": "compiled"}),
        ({"pp": 2, "tp": 2}, ROWS, {"schedule": "interleaved_zero_bubble"}),
    )


def test_what_shares_a_scale_over_tokens_is_a_microbatch():
    assert farthest(alone(HP, rows=2)[1], alone(HP)[1]) < 1e-12
    for name in (SINGLE, ROWS):  # of powers of two only what is below the least shows
        assert farthest(alone(name, rows=2)[1], alone(name)[1]) > 1e-9


def too_narrow():
    narrow = attrs.evolve(MODEL, width=32)
    with tk.parallel_session(tp=2) as ps, pytest.raises(ConfigError) as error:
        tk.build_stages(
            lambda: Decoder(narrow),
            ps,
            [float8(), tensor_parallel(), fsdp()],
            weights=init_weights(narrow, seed=0),
        )
    return str(error.value)


def test_tp_that_leaves_a_side_too_narrow_is_refused():
    assert "tp = 2 leaves 'layers.0.attention.wk' a side of 8" in run_ranks(too_narrow, 2)[0]
