"""Merging adapters: permanently, for a block, and repeatedly, in any layout."""

from functools import partial

import pytest
import torch

from trainkit.grads import get_named_parameters
from trainkit.losses import next_token_linear
from trainkit.mesh import parallel_session, solo_parallel
from trainkit.models import Decoder, init_weights
from trainkit.optim import adamw, decay_groups
from trainkit.parallel import build_stages, fsdp, tensor_parallel
from trainkit.parallel.materialize import narrow_to_box
from trainkit.parallel.parameters import get_local_box
from trainkit.post.adapters import (
    Lora,
    lora,
    merge_adapters_,
    restart_adapters_,
    use_merged_adapters,
)
from trainkit.post.adapters.export import SavedAdapters, merge_weights
from trainkit.post.adapters.peft import LowRankFactors
from trainkit.step import forward_backward
from trainkit.tools.testing import run_ranks
from trainkit.tools.testing.builtin import CONFIG, MODELS, decoder_batch
from trainkit.tools.testing.train import certificate_weights
from trainkit.types import Layout

LORAS = [Lora("**.{w[qo],up}", rank=3), Lora("**.down", rank=2, dora=True)]


def build(ps):
    plan = [lora(*LORAS, seed=3), tensor_parallel(), fsdp()]
    weights = init_weights(CONFIG, seed=0)
    make_model = lambda: Decoder(CONFIG, head="hidden").double()  # noqa: E731
    stages = build_stages(make_model, ps, plan, weights=weights)
    with torch.no_grad():
        for name, p in get_named_parameters(stages).items():
            if name.endswith("lora.default.b"):
                box = get_local_box(p)
                box.local.copy_(certificate_weights(name, box.local.shape, box.offset))
    return stages


def loss_of(model):
    run = partial(forward_backward, loss=next_token_linear, denominator=torch.tensor(9.0))
    return run(model, [decoder_batch(0)])["loss"].item()


def bits_of(stages):
    return {
        name: get_local_box(p).local.clone() for name, p in get_named_parameters(stages).items()
    }


def test_merging_changes_no_number_and_can_be_undone_bit_for_bit():
    stages = build(solo_parallel())
    before, bits = loss_of(stages[0]), bits_of(stages)
    with use_merged_adapters(stages):
        assert loss_of(stages[0]) == pytest.approx(before, rel=1e-12)
        assert not stages[0].layers["0"].mlp.up.lora["default"].b.any()
        assert not torch.equal(stages[0].layers["0"].mlp.up.weight, bits["layers.0.mlp.up.weight"])
    for name, x in bits_of(stages).items():
        assert torch.equal(x, bits[name]), name


def test_relora_merges_draws_anew_and_forgets_moments():
    stages = build(solo_parallel())
    named = get_named_parameters(stages)
    optimizer = adamw(decay_groups(named, weight_decay=0.0), lr=1e-2)
    loss_of(stages[0])
    optimizer.step()
    before, bits = loss_of(stages[0]), bits_of(stages)
    merge_adapters_(stages)
    restart_adapters_(stages, optimizer, seed=4)
    assert loss_of(stages[0]) == pytest.approx(before, rel=1e-12)
    own = "layers.0.mlp.up.lora.default"
    assert not torch.equal(named[f"{own}.a"], bits[f"{own}.a"])
    assert not optimizer.state
    assert named[f"{own}.a"].requires_grad


def merge_in(layout, wanted):
    with parallel_session(layout) as ps:
        stages = build(ps)
        bits = bits_of(stages)
        with use_merged_adapters(stages):
            for name, p in get_named_parameters(stages).items():
                box = get_local_box(p)
                whole = wanted[name]
                for dim, (start, size) in enumerate(zip(box.offset, box.local.shape, strict=True)):
                    whole = whole.narrow(dim, start, size)
                assert torch.allclose(box.local, whole, rtol=1e-12, atol=1e-12), name
        assert all(torch.equal(x, bits[name]) for name, x in bits_of(stages).items())


def test_every_layout_merges_the_same():
    stages = build(solo_parallel())
    merge_adapters_(stages)
    for layout in (Layout(tp=2), Layout(dp_shard=2)):
        run_ranks(merge_in, 2, layout, bits_of(stages))


def low_ranks(experts, key):
    own = experts.lora[key]["default"]
    parts = (x.detach().clone() for x in (own.a, own.b, own.magnitude))
    a, b, lengths = parts
    return LowRankFactors(a, b, own.spec.scale, lengths)


def test_experts_merge_too():
    model = MODELS["decoder with experts and adapters"]().eval()
    for name, p in model.named_parameters():
        p.data.copy_(certificate_weights(name, tuple(p.shape), (0,) * p.ndim))
        if name.endswith("magnitude"):  # lengths are positive
            p.data.abs_()
    experts = model.layers["1"].mlp.experts
    rows, counts = torch.randn(16, 32), torch.full((8,), 2)
    before = experts(rows, counts)
    saved = SavedAdapters({}, (), {"up": low_ranks(experts, "up")}, {})
    plain = experts.up.detach().clone()
    box = merge_weights(saved, lambda _, *place: narrow_to_box(plain, *place))(
        "up", (2, 3, 4), (3, 5, 6)
    )
    merge_adapters_([model])
    assert torch.allclose(box, experts.up[3:5, 5:8, 6:10], rtol=1e-4)
    assert not experts.lora["gate"]["default"].b.any()
    assert torch.allclose(experts(rows, counts), before, atol=1e-4)
