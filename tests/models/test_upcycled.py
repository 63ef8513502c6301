"""A dense decoder's weights as the beginning of one with experts."""

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainkit.mesh import parallel_session, solo_parallel
from trainkit.models import (
    Decoder,
    DecoderConfig,
    Experts,
    RoutingTape,
    call_model,
    call_routed,
    init_weights,
    upcycle_weights,
)
from trainkit.models.config import parameter_shapes
from trainkit.parallel import build_stages, fsdp, tensor_parallel
from trainkit.parallel.materialize import attach_shapes, shapes_of
from trainkit.tools.testing import run_ranks
from trainkit.tools.testing.builtin import decoder_batch
from trainkit.types import CheckpointError, ConfigError, Layout

DENSE = DecoderConfig(vocab_size=64, width=32, layers=3, heads=4, kv_heads=2, mlp_width=48)
COPIES = attrs.evolve(DENSE, experts=Experts(count=6, top_k=2, width=48, first=1))
SCALED = Experts(count=6, top_k=2, width=48, scores="sigmoid", biased=True, scale=2.0)
# 4 parts and a scale of 2: fp32 weights are multiplied by them without rounding.
SLICES = attrs.evolve(DENSE, experts=Experts(count=8, top_k=4, width=12, first=1))
WEIGHTS = init_weights(DENSE, seed=0)


def model_of(config, weights, ps=None, plan=()):
    ps = ps or solo_parallel()
    (model,) = build_stages(lambda: Decoder(config).double(), ps, [*plan], weights=weights)
    return model


def expected():
    batch = decoder_batch(0)
    return batch, call_model(model_of(DENSE, WEIGHTS), batch)


def difference(found, batch, want):
    is_token = batch.document_ids >= 0  # padding has no experts
    found, want = found.detach(), want.detach()
    return float((found - want)[is_token].abs().max() / want.abs().max())


@pytest.mark.parametrize("config", [COPIES, attrs.evolve(DENSE, experts=SCALED)])
def test_with_copies_the_logits_are_those_of_the_dense_decoder(config):
    batch, want = expected()
    output, sums = call_routed(model_of(config, upcycle_weights(WEIGHTS, config, seed=1)), batch)
    assert difference(output, batch, want) < 1e-13
    assert (sums[:, 2:] > 0).sum() > 2 * len(sums)  # they were routed to many
    other = call_routed(model_of(config, init_weights(config, seed=0)), batch).output
    assert difference(other, batch, want) > 1e-2


LAYOUTS = {"dp2 x tp2": Layout(dp_shard=2, tp=2), "dp4, 6 experts": Layout(dp_shard=4)}


def in_layouts():
    batch, dense = expected()
    sliced = upcycle_weights(WEIGHTS, SLICES, seed=1)
    wanted = {
        "copies": (COPIES, upcycle_weights(WEIGHTS, COPIES, seed=1), dense),
        "slices": (SLICES, sliced, call_routed(model_of(SLICES, sliced), batch).output),
    }
    found = {}
    for layout_name, layout in LAYOUTS.items():
        with parallel_session(layout) as ps:
            for name, (config, weights, want) in wanted.items():
                model = model_of(config, weights, ps, [tensor_parallel(), fsdp(layout)])
                output = call_routed(model, batch).output
                found[layout_name, name] = difference(output, batch, want)
    return found


def test_sharded_parameters_are_filled_with_their_own_part():
    for found in run_ranks(in_layouts, 4):
        assert max(found.values()) < 1e-13, found


def test_slices_of_which_a_token_gets_all_alike_are_the_dense_decoder():
    batch, want = expected()
    model = model_of(SLICES, upcycle_weights(WEIGHTS, SLICES, seed=1))
    with torch.no_grad():
        for i in SLICES.expert_layers:
            model.layers[str(i)].mlp.router.weight.zero_()  # all weigh the same
    every = torch.tensor([[0, 1, 2, 3], [7, 4, 2, 1]]).repeat(batch.input_ids.numel() // 2, 1)
    output, _ = model(
        batch.input_ids,
        position_ids=batch.position_ids,
        spans=batch.spans,
        is_token=batch.document_ids >= 0,
        tape=RoutingTape({f"layers.{i}.mlp": every for i in SLICES.expert_layers}),
    )
    assert difference(output, batch, want) < 1e-13


@pytest.mark.parametrize("noise", [0.0, 0.1])
@given(st.sampled_from(sorted(parameter_shapes(SLICES))), st.data())
def test_any_box_is_that_part_of_the_whole(noise, name, data):
    weights = upcycle_weights(WEIGHTS, SLICES, seed=5, noise=noise)
    whole_shape = parameter_shapes(SLICES)[name]
    whole = weights(name, whole_shape, (0,) * len(whole_shape))
    offset = [data.draw(st.integers(0, size)) for size in whole_shape]
    shape = [data.draw(st.integers(0, n - o)) for n, o in zip(whole_shape, offset, strict=True)]
    part = tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))
    assert torch.equal(weights(name, shape, offset), whole[part])


def test_experts_are_slices_in_turn_and_noise_makes_them_differ():
    name, shape = "layers.1.mlp.experts.up", (8, 12, 32)
    up = WEIGHTS("layers.1.mlp.up.weight", (48, 32), (0, 0)).unflatten(0, (4, 12))
    plain, noisy = (
        upcycle_weights(WEIGHTS, SLICES, seed=1, noise=noise)(name, shape, (0, 0, 0))
        for noise in (0.0, 0.01)
    )
    assert torch.equal(plain, torch.cat([up, up]))
    assert float((noisy - plain).std()) == pytest.approx(0.01 * 32**-0.5, rel=0.05)
    assert not torch.equal(noisy[0], noisy[4])
    router = "layers.1.mlp.router.weight"
    drawn = init_weights(SLICES, seed=1)(router, (8, 32), (0, 0))
    assert torch.equal(upcycle_weights(WEIGHTS, SLICES, seed=1)(router, (8, 32), (0, 0)), drawn)


# -------------------------------------------------------------------------------------- refusals


def held(**changes):
    """Return dense weights that say which tensors they hold, as those of a folder do."""
    config = attrs.evolve(DENSE, **changes)
    return attach_shapes(init_weights(config, seed=0), parameter_shapes(config))


def test_weights_that_say_what_they_hold_are_used_up():
    weights = upcycle_weights(held(), COPIES, seed=1)
    assert shapes_of(weights) == parameter_shapes(COPIES)
    batch, want = expected()
    output = call_routed(model_of(COPIES, weights), batch).output
    assert difference(output, batch, want) < 1e-13
    with pytest.raises(CheckpointError, match=r"layers\.3\.\S+', which the model does not have"):
        model_of(COPIES, upcycle_weights(held(layers=4), COPIES, seed=1))
    with pytest.raises(
        ValueError, match=r"upcycle_weights: 'layers.1.mlp.down.weight' is \(32, 96\) in"
    ):
        upcycle_weights(held(mlp_width=96), COPIES, seed=1)


@pytest.mark.parametrize(
    ("experts", "message"),
    [
        (None, "the config has no experts"),
        (Experts(count=4, top_k=2, width=48, shared=16), "shared expert of 16 columns"),
        (Experts(count=4, top_k=2, width=48, bias=True), "with biases or a clamp"),
        (Experts(count=4, top_k=2, width=48, clamp=7.0), "with biases or a clamp"),
        (Experts(count=4, top_k=2, width=32), "4 experts of 32 columns .* an MLP of 48"),
        (Experts(count=4, top_k=2, width=16), "4 experts of 16 columns .* multiple of the number"),
    ],
)
def test_experts_that_a_dense_mlp_does_not_make_are_refused(experts, message):
    with pytest.raises(ConfigError, match=f"upcycle_weights: .*{message}"):
        upcycle_weights(WEIGHTS, attrs.evolve(DENSE, experts=experts), seed=0)


def test_a_name_that_is_none_is_refused():
    with pytest.raises(ValueError, match=r"'layers\.1\.mlp\.gate\.weight' is no parameter"):
        upcycle_weights(WEIGHTS, COPIES, seed=0)("layers.1.mlp.gate.weight", (48, 32), (0, 0))
