"""Models with quantized matrices: the same numbers, the same bits in every layout."""

import ctypes
import functools
import os
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from weights.hub import tiny

from trainkit import hub
from trainkit.mesh import parallel_session, solo_parallel
from trainkit.models import Decoder, make_decoder_config
from trainkit.models.experts import ExpertWeights
from trainkit.parallel import build_stages, expert_parallel, fsdp, mixed_precision, tensor_parallel
from trainkit.post.adapters import dequantize, quantize, quantized
from trainkit.post.adapters.formats import largest_of
from trainkit.post.adapters.frozen import can_shard_bytes, dequantize_parameter
from trainkit.tools.testing import run_ranks
from trainkit.types import ConfigError, Layout, NumericsError, TrainState
from trainkit.weights.checkpoint import state_hash

FORMATS = ["nf4", "int8", "fp8", "int4", "nvfp4"]


def stored(x, form):
    """Return what a matrix stands for where its rows are stored: nvfp4 has a level for each."""
    largest = largest_of(x, rows=True) if form == "nvfp4" else None
    return dequantize(quantize(x, form, largest=largest))


def filled(module, seed=0):
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn(p.shape, generator=random) * p.shape[-1] ** -0.5)
    return module


def with_gradient(module, *inputs):
    x = inputs[0].clone().requires_grad_()
    y = module(x, *inputs[1:])
    (y.float() * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
    return y.detach(), x.grad


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_layer_computes_with_what_its_codes_stand_for(form, dtype, bias):
    plain, layer = (filled(nn.Linear(150, 70, bias=bias)) for _ in range(2))
    quantized(form, modules="0")(nn.Sequential(layer), solo_parallel())
    with torch.no_grad():
        plain.weight.copy_(stored(plain.weight, form))
    assert torch.equal(dequantize_parameter(layer), plain.weight)
    assert isinstance(layer, nn.Linear)
    assert not layer.weight.requires_grad
    assert layer.weight.dtype == layer.weight_scales.dtype == torch.uint8
    x = torch.randn(2, 5, 150, generator=torch.Generator().manual_seed(1)).to(dtype)
    if bias:
        layer.bias.data = layer.bias.data.to(dtype)
    got, want = with_gradient(layer, x), with_gradient(plain.to(dtype), x)
    wide = 1e-2 if dtype == torch.bfloat16 else 1e-6
    for a, b in zip(got, want, strict=True):
        assert a.dtype == dtype
        torch.testing.assert_close(a, b, rtol=wide, atol=wide)
    if bias:
        layer.bias.grad = None
        with_gradient(layer, x)
        torch.testing.assert_close(layer.bias.grad, plain.bias.grad, rtol=wide, atol=wide)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("grouped", [True, False])
def test_experts_compute_with_what_their_codes_stand_for(form, grouped):
    width = 72 if grouped else 70  # rows of whole 16 bytes are multiplied at once
    plain, experts = (filled(ExpertWeights(3, width, 132)) for _ in range(2))
    quantized(form, modules="0")(nn.Sequential(experts), solo_parallel())
    with torch.no_grad():
        for name, p in plain.named_parameters():
            p.copy_(stored(p, form))
            assert torch.equal(dequantize_parameter(experts, name), p)
    rows = torch.randn(7, width, generator=torch.Generator().manual_seed(1))
    counts = torch.tensor([2, 0, 5])
    for a, b in zip(
        with_gradient(experts, rows, counts), with_gradient(plain, rows, counts), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_backward_saves_bytes_alone():
    layer = filled(nn.Linear(128, 256, bias=False))
    quantized("nf4", modules="0")(nn.Sequential(layer), solo_parallel())
    saved = []
    x = torch.ones(2, 128, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        layer(x)
    assert sum(t.nbytes for t in saved) == layer.weight.nbytes + layer.weight_scales.nbytes


def test_under_autocast_it_computes_in_what_autocast_says():
    layer = filled(nn.Linear(64, 3))
    quantized("int8", modules="0")(nn.Sequential(layer), solo_parallel())
    x = torch.ones(2, 64, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert x.grad.dtype == torch.float32


# ------------------------------------------------------------------------------------- in layouts

FOLDERS = {
    "llama": {"hidden_size": 160, "intermediate_size": 208},  # blocks in the midst of which cuts go
    "deepseek_v3": {},
}
MATRICES = "layers.*.*.{shared.*,*}"
LAYOUTS = [
    ("llama", Layout(dp_shard=3)),
    ("llama", Layout(dp_shard=2, tp=2)),
    ("deepseek_v3", Layout(pp=2, dp_shard=2, ep=2)),
    *(
        pytest.param(row, layout, marks=pytest.mark.only_all)
        for row, layout in (
            ("llama", Layout(dp_shard=2)),
            ("llama", Layout(tp=2)),
            ("llama", Layout(pp=2, dp_replicate=2)),
            ("deepseek_v3", Layout(dp_shard=4, ep=2)),
            ("deepseek_v3", Layout(pp=2, tp=2)),
        )
    ),
]


def folder_of(home, row):
    transformers = pytest.importorskip("transformers")
    kind, changes = tiny.ROWS[row]
    sizes = tiny.SIZES | changes | FOLDERS[row]
    config = getattr(transformers, f"{kind}Config").from_dict(sizes)
    theirs = getattr(transformers, f"{kind}ForCausalLM")(config)
    filled(theirs).save_pretrained(home)


def hashes(ps, home, layout):
    """Return the hashes of a folder's model in all formats."""
    folder = hub.open_folder(home)
    found = []
    for form in FORMATS:
        plan = [
            quantized(form, modules=MATRICES),
            *(tensor_parallel(), expert_parallel(), mixed_precision(torch.bfloat16), fsdp(layout)),
        ]
        weights = hub.open_folder_weights(folder, axis=ps.world)
        stages = build_stages(lambda: Decoder(folder.config), ps, plan, weights=weights)
        optimizer = torch.optim.SGD([p for stage in stages for p in stage.parameters()])
        found.append(state_hash(TrainState(), stages, optimizer, ps))
    return found


def hashes_on_a_rank(home, layout):
    with parallel_session(layout) as ps:
        return hashes(ps, home, layout)


@pytest.mark.parametrize(("row", "layout"), LAYOUTS, ids=str)
def test_a_folder_becomes_the_same_bytes_in_every_layout(row, layout, tmp_path):
    if layout.wrapped > 1 and not can_shard_bytes():
        pytest.skip("this torch's FSDP shards no bytes")
    folder_of(tmp_path, row)
    alone = hashes(solo_parallel(), tmp_path, Layout())
    assert len(set(alone)) == len(FORMATS)
    found = run_ranks(hashes_on_a_rank, layout.world, str(tmp_path), layout)
    assert found == [alone] * layout.world


# --------------------------------------------------------------------------------------- refusals


def test_a_pattern_that_matches_no_matrix_is_refused():
    model = nn.ModuleDict({"norm": nn.RMSNorm(4), "head": nn.Linear(4, 4)})
    for pattern in ("nor.", "hea"):
        message = f"'{pattern}' matches the name of no linear layer or experts; .*: head$"
        with pytest.raises(ConfigError, match=message):
            quantized(modules=pattern)(model, solo_parallel())
    with pytest.raises(ValueError, match="got 'fp8_row'"):
        quantized("fp8_row")


def test_a_value_that_is_not_finite_is_refused_with_its_matrix():
    def weights(name, shape, offset):
        del offset
        return torch.full(tuple(shape), float("nan") if name == "layers.1.mlp.up.weight" else 1.0)

    config = make_decoder_config("tiny")
    with pytest.raises(NumericsError, match=r"layers\.1\.mlp\.up\.weight: .* not finite"):
        build_stages(lambda: Decoder(config), solo_parallel(), [quantized()], weights=weights)


def test_a_weight_that_modules_share_is_refused():
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    model["b"].weight = model["a"].weight
    with pytest.raises(ConfigError, match=r"'a\.weight' and 'b\.weight' are one tensor"):
        quantized(modules="a")(model, solo_parallel())


# ----------------------------------------------------------------------------------------- memory


def peak_of_this_process():
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+)", status)[1]) * 1024


def peaks_of_filling(folders):
    """Fill a model from each folder, the first to warm up; return the last's peak and its bytes.

    It is a rank of its own, whose peak nothing else has raised; what is freed goes back at once
    (else the heap that it was forked with decides).
    """
    ctypes.CDLL(None).mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD
    for home in folders:
        folder = hub.open_folder(home)
        weights = hub.open_folder_weights(folder)
        Path("/proc/self/clear_refs").write_text("5")
        before = peak_of_this_process()
        make_model = functools.partial(Decoder, folder.config)
        stages = build_stages(make_model, solo_parallel(), [quantized()], weights=weights)
        used = peak_of_this_process() - before
    return used, sum(p.nbytes for stage in stages for p in stage.parameters())


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs VmHWM reset")
def test_filling_takes_the_memory_of_one_file_and_the_bytes(tmp_path):
    transformers = pytest.importorskip("transformers")
    for home, layers in (("first", 1), ("measured", 5)):
        sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": layers}
        config = transformers.LlamaConfig.from_dict(tiny.SIZES | tiny.PLAIN | sizes)
        with torch.device("meta"):  # to draw values takes a second
            theirs = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
        theirs.to_empty(device="cpu")
        for p in theirs.parameters():
            nn.init.constant_(p, 0.1)
        theirs.save_pretrained(tmp_path / home, max_shard_size="3MB")
    files = [file.stat().st_size for file in (tmp_path / "measured").glob("*.safetensors")]
    ((used, local),) = run_ranks(
        peaks_of_filling, 1, [str(tmp_path / "first"), str(tmp_path / "measured")]
    )
    whole = 2 * sum(files)  # in fp32
    assert local < whole / 6
    assert used < local + max(files) + 8 * 2**20 < whole / 2
