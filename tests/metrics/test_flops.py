"""Model FLOPs of models with frozen, adapted and quantized parts, as torch counts them."""

import attrs
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import trainkit as tk
from trainkit.batch import make_padding_batch
from trainkit.metrics import decoder_flops, recomputed_flops
from trainkit.models import build_decoder, call_model
from trainkit.models.config import DecoderConfig, Delta, Latents, Sliding
from trainkit.parallel.parameters import get_named_parameters
from trainkit.post.adapters import Lora, lora, quantized

TOKENS = 24
CONFIG = DecoderConfig(
    vocab_size=48, width=32, layers=3, heads=4, kv_heads=4, mlp_width=64, qk_norm=True
)
LATENTS = attrs.evolve(
    CONFIG,
    qk_norm=False,
    latents=Latents(query_rank=8, kv_rank=8, plain=4, rotary=4, values=8),
)


def attend(q, k, v, **_):
    """Full attention by two products that torch counts; the mask changes no count."""
    scores = torch.einsum("bshd,bkhd->bhsk", q, k)
    return torch.einsum("bhsk,bkhe->bshe", scores.softmax(-1), v)


def make_model(config, plan=(), trained=None):
    """Return a small decoder with a plan, of which parameters whose names have a part are trained.

    A bare `trained` of None leaves what the plan has decided.
    """
    model = build_decoder(config, seed=0, attend=attend)
    for transform in plan:
        model = transform(model, tk.solo_parallel())
    if trained is not None:
        for name, p in model.named_parameters():
            p.requires_grad_(any(part in name for part in trained))
    return model


def count_as_torch(model):
    batch = make_padding_batch(1, TOKENS)
    with FlopCounterMode(display=False) as counter:
        loss = call_model(model, batch).float().sum()
        if loss.requires_grad:
            loss.backward()
    return counter.get_total_flops()


def list_trained(model):
    return {x: p.shape for x, p in get_named_parameters(model).items() if p.requires_grad}


def count_unseen(config, found_layers):
    """Return the operations on pairs that a causal model does not look at, in some passes."""
    pairs = TOKENS * (TOKENS - 1) // 2
    sizes = config.heads * (config.head_size + config.value_size)
    return 2 * sizes * pairs * found_layers


MLP = Lora("layers.*.mlp.*", rank=2)
ALL = Lora("layers.*.*.{w?,w??,gate,up,down}", rank=2)
# Which plan, which parameters are trained, and the passes of all attention layers: 1 for forward
# and 2 for backward.
CASES = {
    "all": ((), None, 9),
    "none": ((), [], 3),
    "embedding": ((), ["embedding"], 9),
    "head": ((), ["head"], 3),
    "last layer": ((), ["layers.2."], 5),
    "last norm": ((), ["layers.2.mlp_norm"], 3),
    "one matrix": ((), ["layers.1.attention.wo"], 5),
    "lora": ([lora(MLP)], None, 7),
    "lora of all": ([lora(ALL)], None, 9),
    "lora and head": ([lora(MLP, trained="head")], None, 7),
}


@pytest.mark.parametrize(
    ("case", "tied"),
    # The head of a tied model is its embedding.
    [(case, tied) for case in CASES for tied in (False, True) if not (tied and "head" in case)],
)
def test_operations_with_frozen_parts_are_those_that_torch_counts(case, tied):
    config = attrs.evolve(CONFIG, tied=tied)
    plan, names, passes = CASES[case]
    model = make_model(config, plan, names)
    wanted = count_as_torch(model) - count_unseen(config, passes)
    assert decoder_flops(config, [TOKENS], trained=list_trained(model)) == wanted


@pytest.mark.parametrize(
    ("names", "passes"),
    [
        (None, 9),
        (["layers.1.attention.q_latent.", "layers.1.attention.kv_latent."], 7),
        (["layers.2.attention.wkv", "layers.2.attention.wq"], 5),
        (["layers.2.mlp"], 3),
    ],
)
def test_operations_of_latent_attention_are_those_that_torch_counts(names, passes):
    model = make_model(LATENTS, (), names)
    wanted = count_as_torch(model) - count_unseen(LATENTS, passes)
    assert decoder_flops(LATENTS, [TOKENS], trained=list_trained(model)) == wanted


def test_a_quantized_matrix_counts_as_the_matrix_that_it_stores():
    plain, packed = (make_model(CONFIG, [*first, lora(MLP)]) for first in ((), [quantized("nf4")]))
    counts = [decoder_flops(CONFIG, [TOKENS], trained=list_trained(x)) for x in (plain, packed)]
    assert counts[0] == counts[1]
    # Torch sees the products of the dequantized matrices.
    assert count_as_torch(packed) == count_as_torch(plain)


def test_blocks_before_the_first_trained_parameter_are_not_recomputed():
    last = {"layers.2.mlp_norm.weight": (32,)}
    repeated = [
        recomputed_flops(CONFIG, [TOKENS], "full", trained=trained)
        for trained in (None, last, {"head.weight": (48, 32)}, {})
    ]
    assert repeated[1] == repeated[0] / 3 > 0
    assert repeated[2:] == [0, 0]


def test_sliding_layers_are_counted_by_their_place():
    config = attrs.evolve(CONFIG, sliding=Sliding(window=4, full_every=3))
    assert [*config.sliding_layers] == [0, 1]
    head, last = ({f"{name}.weight": (1,)} for name in ("norm", "layers.1.attention_norm"))
    # Backward of layer 1, which slides, and of layer 2, which does not.
    pairs = 4 * (2 * TOKENS - 4 + 1) / 2 + TOKENS * (TOKENS + 1) / 2
    matrices = 4 * 32 * 32 + 3 * 32 * 64
    backward = 2 * 2 * 2 * 32 * pairs + 2 * TOKENS * (2 * matrices)
    found = [decoder_flops(config, [TOKENS], trained=trained) for trained in (head, last)]
    assert found[1] - found[0] == backward


HYBRID = attrs.evolve(
    CONFIG, delta=Delta(key_heads=2, value_heads=4, key_size=8, value_size=6, full_every=3)
)
CHANNELS = 2 * 2 * 8 + 4 * 6


def attend_delta(q, k, v, *, log_decay, beta, **_):
    """The three products of the recurrence, which torch counts; there is no convolution."""
    q, k = (x.repeat_interleave(2, dim=2) for x in (q, k))
    state = (log_decay + beta)[..., None, None].expand(*k.shape, v.shape[3])
    error = v - torch.einsum("bshde,bshd->bshe", state, k)
    state = k.unsqueeze(4) @ error.unsqueeze(3)
    return torch.einsum("bshde,bshd->bshe", state, q)


@pytest.mark.parametrize(
    ("names", "convolved"),  # passes of all convolutions: 1 for forward, and 2 for backward
    [
        (None, 6),
        (["layers.1.attention.gated_norm"], 2),
        (["layers.1.attention_norm"], 3),
    ],
)
def test_operations_of_delta_layers_are_those_of_the_recurrence(names, convolved):
    model = make_model(HYBRID, (), names)
    for layer in HYBRID.delta_layers:
        model.layers[str(layer)].attention.attend_delta = attend_delta
    wanted = count_as_torch(model) - count_unseen(HYBRID, 3)
    wanted += 2 * TOKENS * 4 * CHANNELS * convolved
    assert decoder_flops(HYBRID, [TOKENS], trained=list_trained(model)) == wanted


def test_the_rule_is_always_recomputed():
    rule = 2 * 3 * (2 * TOKENS * 4 * 8 * 6)
    assert recomputed_flops(HYBRID, [TOKENS], "selective") == rule
