"""Quantization-aware training: rounded values in forward, unchanged gradients in backward."""

import copy
from typing import get_args

import attrs
import numpy as np
import pytest
import torch
from rounded_layouts import MODEL, hold
from torch import nn
from weights.hub import tiny

import trainkit as tk
from trainkit.batch.shards import spans_of_lengths
from trainkit.models import Decoder, Experts, init_weights
from trainkit.models.experts import ExpertWeights, Router
from trainkit.parallel import fsdp, tensor_parallel
from trainkit.parallel.linear_layers import describe_linears
from trainkit.post.adapters import (
    fake_quantize,
    make_linear_transforms,
    quantize_dequantize,
    quantize_model_,
)
from trainkit.post.adapters.fake import LINEARS, quietly
from trainkit.run.config import LinearOptions
from trainkit.tools.testing import run_ranks
from trainkit.types import ConfigError

SOLO = tk.solo_parallel()
FORMATS = ["nf4", "int8", "fp8", "int4", "nvfp4", "fp8_row"]


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def linear(rows, columns, **how):
    layer = nn.Linear(columns, rows, **how)
    layer.weight.data = normal(rows, columns)
    return layer


@pytest.mark.parametrize("form", FORMATS)
def test_forward_is_rounded_and_gradients_are_those_of_what_it_computed(form):
    layer = linear(40, 64)
    rounded = quantize_dequantize(layer.weight, form)
    fake_quantize(form, modules="0")(nn.Sequential(layer), SOLO)
    x = normal(3, 5, 64, seed=1).requires_grad_()
    y = layer(x)
    assert torch.equal(y, nn.functional.linear(x, rounded, layer.bias))
    assert not torch.equal(rounded, layer.weight)
    g = normal(3, 5, 40, seed=2)
    y.backward(g)
    torch.testing.assert_close(x.grad, g @ rounded)
    torch.testing.assert_close(layer.weight.grad, g.flatten(0, 1).T @ x.detach().flatten(0, 1))
    with torch.no_grad():
        layer.weight[2, 3] = torch.nan
    assert bool(layer(x)[..., 2].isnan().all())  # and nothing is hidden


@pytest.mark.parametrize("kind", ["normal", "zeros", "positive", "one feature", "tiny"])
def test_activations_in_int8_are_off_by_half_a_step_of_their_token(kind):
    x = {
        "normal": lambda: normal(7, 32),
        "zeros": lambda: torch.zeros(7, 32),
        "positive": lambda: normal(7, 32).abs() + 5,
        "one feature": lambda: normal(7, 1),
        "tiny": lambda: normal(7, 32) * 1e-30,
    }[kind]()
    layer = linear(4, x.shape[-1])
    fake_quantize("int8", "int8", modules="0")(nn.Sequential(layer), SOLO)
    found = layer.fake.round_activation(x)
    low, high = x.amin(-1, keepdim=True).clamp(max=0), x.amax(-1, keepdim=True).clamp(min=0)
    # A half for the feature, a half for the zero, and the roundings of fp32.
    assert bool(((found - x).abs() <= (high - low) / 255 * 1.0001).all())
    assert bool((found[x == 0] == 0).all())
    assert bool(layer.fake.round_activation(torch.full((1, 8), torch.inf)).isnan().all())


def test_experts_round_what_they_multiply():
    experts = ExpertWeights(3, 32, 64)
    for i, p in enumerate(experts.parameters()):
        p.data = normal(*p.shape, seed=i) * 0.2
    plain = copy.deepcopy(experts)
    with torch.no_grad():
        for p in plain.parameters():
            p.copy_(quantize_dequantize(p, "nvfp4"))
    model = nn.ModuleDict(
        {"router": Router(32, Experts(count=3, top_k=2, width=64)), "experts": experts}
    )
    fake_quantize("nvfp4", modules="experts")(model, SOLO)
    rows, counts = normal(7, 32), torch.tensor([2, 0, 5])
    assert torch.equal(experts(rows, counts), plain(rows, counts))
    assert describe_linears([model]) == "fake nvfp4 in 1 linear layer, not in router"
    with pytest.raises(ConfigError, match="fake_quantize: 'router' is a router"):
        fake_quantize(modules="router")(model, SOLO)


# ------------------------------------------------------------------------------------- in layouts

TP = {"tp": 2}


def test_layouts_round_to_the_same_bits():
    hold(2, *((TP, name) for name in ("qat_int8_int4", "qat_fp8", "qat_nvfp4")))


@pytest.mark.only_all
def test_so_do_others():
    names = [name for name in LINEARS if name.startswith("qat")]
    two = {"dp_shard": 2}, {"pp": 2}, {"ring": 2}
    hold(2, *((x, name) for x in two for name in names), (TP, "qat_int4"))
    hold(4, ({"dp_shard": 2, "tp": 2}, "qat_nvfp4"), (TP | {"ring": 2}, "qat_fp8"))
    hold(2, (TP, "qat_fp8", {"plan": "compiled"}))


def cut_blocks():
    with tk.parallel_session(tp=2) as ps, pytest.raises(ConfigError) as error:
        tk.build_stages(
            lambda: Decoder(attrs.evolve(MODEL, width=64, mlp_width=96)),
            ps,
            [fake_quantize(), tensor_parallel(), fsdp()],
            weights=init_weights(MODEL, seed=0),
        )
    return str(error.value)


def test_tp_that_cuts_a_block_is_refused():
    message = run_ranks(cut_blocks, 2)[0]
    assert "leaves 'layers.0.mlp.down' a side of 48, and int4 has blocks of 32" in message


# ----------------------------------------------------------------------------------------- convert


@pytest.mark.parametrize("linears", ["qat_int4", "qat_int8_int4"])
def test_a_model_that_was_trained_for_it_loses_nothing_when_it_is_quantised(linears):
    with quietly():
        pytest.importorskip("torchao")
    formats = LINEARS[linears].args
    weights = init_weights(MODEL, seed=0)
    prepared, plain = (
        tk.build_stages(lambda: Decoder(MODEL), SOLO, plan, weights=weights)[0]
        for plan in (make_linear_transforms(linears), [])
    )
    ids = torch.arange(48).view(2, 24) % 32
    spans = spans_of_lengths(np.array([24, 24]))

    def loss(model):
        logits = model(ids, position_ids=torch.arange(24).expand(2, 24), spans=spans)[:, :-1]
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

    optimizer = torch.optim.SGD(prepared.parameters(), lr=0.5)
    before = loss(prepared).item()
    for _ in range(5):
        optimizer.zero_grad()
        loss(prepared).backward()
        optimizer.step()
    after = loss(prepared).item()
    assert after < before - 0.1
    plain.load_state_dict(prepared.state_dict())  # names are the same, and so is what is exported
    assert abs(loss(plain).item() - after) > 1e-5
    for model in (plain, prepared):
        converted = quantize_model_(model, *formats)
        assert loss(converted).item() == pytest.approx(after, rel=1e-6)
        assert "Intx" in type(converted.layers["0"].mlp.up.weight).__name__


@pytest.mark.only_all
def test_an_exported_folder_that_others_quantise_computes_what_was_trained(tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = tiny.SIZES | tiny.PLAIN | {"hidden_size": 64, "intermediate_size": 96}
    config = transformers.LlamaConfig.from_dict(sizes)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    folder = tk.hub.open_folder(tmp_path)
    plan = make_linear_transforms("qat_int8_int4")
    (ours,) = tk.build_stages(
        lambda: Decoder(folder.config), SOLO, plan, weights=tk.hub.open_folder_weights(folder)
    )
    ids = torch.arange(48).view(2, 24) % 32
    spans = spans_of_lengths(np.array([24, 24]))
    wanted = ours(ids, position_ids=torch.arange(24).expand(2, 24), spans=spans)
    assert (theirs(ids).logits - wanted).abs().max() > 1e-3 * wanted.abs().max()
    with quietly():
        found = quantize_model_(theirs, "int4", "int8")(ids).logits
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5 * wanted.abs().max().item())


def test_what_torchao_cannot_is_refused():
    model = nn.Sequential(nn.Linear(32, 16))
    with pytest.raises(ConfigError, match=r"on cpu to \('int4', None\), .* not to \('nvfp4', None"):
        quantize_model_(model, "nvfp4")
    with pytest.raises(ConfigError, match="no linear layer can: '0' has rows of 24"):
        quantize_model_(nn.Sequential(nn.Linear(24, 16)), "int4")


# ----------------------------------------------------------------------------------------- refusals


def test_names_of_a_recipe_are_those_of_the_table():
    known = attrs.fields(attrs.resolve_types(LinearOptions)).linears.type
    assert get_args(known) == tuple(LINEARS)
    assert [len(make_linear_transforms(name)) for name in LINEARS] == [0, *[1] * (len(LINEARS) - 1)]
    with pytest.raises(ConfigError, match="linear_modules"):
        make_linear_transforms("plain", "up")
    with pytest.raises(ValueError, match="\"qat_nvfp4\", got 'fp8'"):
        make_linear_transforms("fp8")
    with pytest.raises(ValueError, match="got 'int4'"):
        fake_quantize("int4", "int4")
    with pytest.raises(ConfigError, match="rows of 24, no whole blocks of 32"):
        fake_quantize(modules="0")(nn.Sequential(nn.Linear(24, 8)), SOLO)
