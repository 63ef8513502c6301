"""Quantization noise: a function of seed, step, name and index, and of nothing else."""

from functools import partial

import attrs
import pytest
import torch
from torch import nn

from trainkit.grads import clip_and_step, get_named_parameters, get_parameters
from trainkit.losses import next_token_linear
from trainkit.mesh import parallel_session, solo_parallel
from trainkit.models import Decoder, call_routed, init_weights
from trainkit.noise import normal_by_quantile
from trainkit.optim import adamw
from trainkit.parallel import build_stages, expert_parallel, fsdp, tensor_parallel
from trainkit.parallel.materialize import narrow_to_box
from trainkit.parallel.parameters import get_local_box
from trainkit.post.adapters import (
    Lora,
    add_quantization_noise,
    dequantize,
    exclude_frozen_,
    lora,
    quantize,
    quantized,
)
from trainkit.post.adapters.formats import HALF_STEPS, largest_of
from trainkit.post.adapters.frozen import can_shard_bytes, dequantize_parameter
from trainkit.schedules import piecewise
from trainkit.step import evaluate, make_forward_backward
from trainkit.tools.testing import run_ranks
from trainkit.tools.testing.builtin import EXPERTS, SHALLOW, decoder_batch
from trainkit.types import ConfigError, Layout, TrainState
from trainkit.weights.checkpoint import resume, save_checkpoint

DENSE = attrs.evolve(SHALLOW, layers=1, mlp_width=52)  # cuts of 26 columns, within four of a hash
SPARSE = attrs.evolve(DENSE, layers=2, experts=attrs.evolve(EXPERTS, jitter=0.0))
NORM = "layers.0.mlp_norm.weight"
NOISE = 2.0  # on matrices; that on norms is a twentieth of it


WEIGHT = torch.randn(140, 300, generator=torch.Generator().manual_seed(0))
ONES = {"nf4": 255, "int8": 1, "fp8": 1.0, "int4": 0x11, "nvfp4": 0x22}


def layer(form):
    made = nn.ModuleDict({"up": nn.Linear(300, 140, bias=False)})
    made.up.weight.data.copy_(WEIGHT)
    return quantized(form, modules="up")(made, solo_parallel())


@pytest.mark.parametrize("form", HALF_STEPS)
def test_noise_has_the_size_of_half_a_step_and_goes_with_the_block(form):
    model = layer(form)
    clean = dequantize_parameter(model.up, dtype=torch.float64)
    with add_quantization_noise([model], seed=0, step=3, weights=0.5):
        noisy = dequantize_parameter(model.up, dtype=torch.float64)
        noise = (noisy - clean) / HALF_STEPS[form] / 0.5
        plain = dequantize_parameter(model.up)
        some_rows = dequantize_parameter(model.up, rows=slice(9, 20))  # as for DoRA
        assert torch.equal(some_rows, plain[9:20])
        x = torch.randn(2, 300, generator=torch.Generator().manual_seed(1)).requires_grad_()
        y = model.up(x)
    (d_x,) = torch.autograd.grad(y.square().sum(), x)  # the same noise, behind the block too
    assert torch.allclose(y, x @ plain.T, rtol=1e-4, atol=1e-3)
    assert torch.allclose(d_x, 2 * y @ plain, rtol=1e-4, atol=1e-2)
    assert torch.equal(dequantize_parameter(model.up, dtype=torch.float64), clean)
    largest = largest_of(WEIGHT, rows=True) if form == "nvfp4" else None
    codes = quantize(WEIGHT, form, largest=largest)
    scales = dequantize(attrs.evolve(codes, codes=torch.full_like(codes.codes, ONES[form])))
    unit = noise / scales
    assert float(unit.std()) == pytest.approx(1, abs=0.02)
    assert abs(unit.mean()) < 0.02


def test_each_step_seed_and_name_has_its_own():
    def drawn(seed=0, step=0, of="up"):
        model = nn.ModuleDict({of: layer("int8").up})
        with add_quantization_noise([model], seed=seed, step=step, weights=1.0):
            return dequantize_parameter(model[of])

    assert torch.equal(drawn(), drawn())
    others = [drawn(), drawn(seed=1), drawn(step=1), drawn(of="down")]
    assert len({float(x.double().sum()) for x in others}) == 4


def test_quantiles_are_normal_and_those_of_the_whole():
    whole = normal_by_quantile(torch.tensor(5), (3, 40, 513), (0, 0, 0))
    assert abs(whole.mean()) < 0.01
    assert float(whole.var()) == pytest.approx(1, abs=0.02)
    assert float((whole.abs() < 1).double().mean()) == pytest.approx(0.6827, abs=0.01)
    part = normal_by_quantile(torch.tensor(5), (2, 7, 6), (1, 30, 507))
    assert torch.equal(part, whole[1:3, 30:37, 507:])
    assert len({*whole.flatten()[:1000].tolist()}) > 950


# ------------------------------------------------------------------------------------- in training


def build(ps, config, form="nf4", layout=Layout()):  # noqa: B008 (frozen)
    held = quantized(form, modules="layers.*.{attention.*,mlp.{gate,up,down,experts}}")
    own = Lora("layers.*.{attention.w[kvo],mlp.**{gate,up,down}}", rank=2)
    loras = lora(own, Lora("**.wq", rank=2, dora=True))
    plan = [held, loras, tensor_parallel(), expert_parallel(), fsdp(layout)]
    make_model = lambda: Decoder(config, head="hidden").double()  # noqa: E731
    return build_stages(make_model, ps, plan, weights=init_weights(config, seed=0))


def add_noise(stages, *, step, noise=NOISE):
    return add_quantization_noise(stages, seed=1, step=step, weights=noise, norms=noise / 20)


def train(ps, stages, optimizer, steps, *, ranks=1, noise=NOISE):
    """Take some steps, each rank on the same rows."""
    params = get_parameters(stages)
    run = make_forward_backward(stages, next_token_linear, call=call_routed)
    for step in steps:
        scale = piecewise(1.0, [(0, 1.0), (3, 0.5, "exponential")])(step)
        with add_noise(stages, step=step, noise=scale * noise):
            run([decoder_batch(step)], denominator=torch.tensor(60.0 * ranks))
        clip_and_step(params, optimizer, lr=0.1, max_norm=1e9, axis=ps.pp)


def trained(ps, config, layout=Layout(), noise=NOISE):  # noqa: B008 (frozen)
    stages = build(ps, config, layout=layout)
    optimizer = torch.optim.SGD(get_parameters(stages))
    train(ps, stages, optimizer, [1], ranks=layout.wrapped, noise=noise)
    return {name: p.detach() for name, p in get_named_parameters(stages).items()}


def differences(cases):
    """Return how far a rank's parameters are from those of one process, at most, for each case."""
    found = []
    for layout, config, alone in cases:
        with parallel_session(layout) as ps:
            boxes = {name: get_local_box(p) for name, p in trained(ps, config, layout).items()}
        own = [
            (x.local, narrow_to_box(alone[name], x.local.shape, x.offset))
            for name, x in boxes.items()
        ]
        found.append(max(float((a - b).abs().max()) for a, b in own if a.numel()))
    return found


def test_every_layout_has_the_noise_of_one_process():
    alone, clean = (trained(solo_parallel(), DENSE, noise=x) for x in (NOISE, 0.0))
    assert max(float((alone[x] - clean[x]).abs().max()) for x in alone) > 1e-4
    cases = [(Layout(tp=2), DENSE, alone)]
    if can_shard_bytes():
        cases.append((Layout(dp_shard=2, ep=2), SPARSE, trained(solo_parallel(), SPARSE)))
    for found in run_ranks(differences, 2, cases):
        assert max(found) < 1e-12


def evaluated(ps, stages):
    return float(
        evaluate(stages, [decoder_batch(9)], next_token_linear, axis=ps.loss, call=call_routed)[
            "loss"
        ]
    )


def test_a_resumed_run_has_the_same_bits_and_evaluation_has_no_noise(tmp_path):
    ps = solo_parallel()

    def begin():
        stages = build(ps, DENSE)
        facts = exclude_frozen_(stages, ps, source="x")
        return stages, adamw(get_parameters(stages), lr=0.1), facts

    stages, optimizer, facts = begin()
    before = evaluated(ps, stages)
    with add_noise(stages, step=0):
        assert evaluated(ps, stages) != before  # samples get it inside of the block
    assert evaluated(ps, stages) == before
    norm = get_named_parameters(stages)[NORM].detach().clone()
    train(ps, stages, optimizer, range(2))
    assert torch.equal(get_named_parameters(stages)[NORM], norm)
    save_checkpoint(tmp_path, TrainState(step=2), stages, optimizer, ps, facts=facts)
    train(ps, stages, optimizer, range(2, 4))
    again, other, facts = begin()
    resume(tmp_path, TrainState(), again, other, ps, facts=facts, log=lambda _: None)
    train(ps, again, other, range(2, 4))
    for name, p in get_named_parameters(stages).items():
        assert torch.equal(p, get_named_parameters(again)[name]), name


def test_noise_on_nothing_is_refused():
    plain = nn.ModuleDict({"up": nn.Linear(2, 2)})
    enter = partial(add_quantization_noise, seed=0, step=0)
    for noise, message in (
        (enter([plain], weights=1.0), "weights is 1.0, and no matrix is quantized"),
        (enter([plain], norms=1.0), "norms is 1.0, and no norm stands before"),
        (enter([plain], weights=-1.0), "weights must be at least 0 and finite, got -1.0"),
    ):
        with pytest.raises(ConfigError, match=message), noise:
            pass
    trains = pytest.raises(ConfigError, match=r"attention_norm.weight is trained")
    with trains, enter([Decoder(DENSE)], norms=0.1):
        pass
    with enter([plain]):
        pass
