"""A decoder's delta layers equal the layer written out, packed and not, and so does generation."""

from functools import partial
from itertools import pairwise

import attrs
import pytest
import torch

from trainkit.attention.attend_delta import attend_delta, ulysses_delta
from trainkit.batch import batch_from_rows
from trainkit.mesh import parallel_session
from trainkit.models import (
    Delta,
    Latents,
    Sliding,
    build_decoder,
    call_model,
    count_parameters,
    init_weights,
)
from trainkit.models.config import parameter_shapes
from trainkit.optim.muon import hidden_matrices
from trainkit.post.generation import Sampling, generate
from trainkit.tools.testing import run_ranks
from trainkit.tools.testing.builtin import WITH_DELTA, decoder_batch, delta_weights
from trainkit.types import Axis, ConfigError, Share

CONFIG = WITH_DELTA


def make_model(config=CONFIG, dtype=torch.float64):
    model = build_decoder(config, seed=0).to(dtype)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(delta_weights(name, p.shape, (0,) * p.ndim))
    return model


def written_out(layer, x):
    """The layer of Qwen3-Next for one document `[S, D]`, token by token and head by head."""
    delta = CONFIG.delta
    state = torch.zeros(delta.value_heads, delta.key_size, delta.value_size, dtype=x.dtype)
    inputs = torch.cat([layer.wq(x), layer.wk(x), layer.wv(x)], dim=1)
    kernels = torch.cat([layer.q_conv.weight, layer.k_conv.weight, layer.v_conv.weight])
    padded = torch.cat([inputs.new_zeros(delta.conv - 1, inputs.shape[1]), inputs])
    outputs = []
    for t in range(len(x)):
        mixed = torch.nn.functional.silu((padded[t : t + delta.conv] * kernels.T).sum(0))
        keys = delta.key_heads * delta.key_size
        q, k, v = mixed.split([keys, keys, len(mixed) - 2 * keys])
        q, k = (y.view(delta.key_heads, -1) for y in (q, k))
        q, k = (y / (y.square().sum(1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
        times = torch.nn.functional.softplus(layer.wa.weight @ x[t] + layer.wa.bias)
        decay = (-layer.wa.log_rate.exp() * times).exp()
        beta = torch.sigmoid(layer.wb.weight @ x[t])
        out = []
        for head, value in enumerate(v.view(delta.value_heads, -1)):
            shared = head * delta.key_heads // delta.value_heads
            kept = decay[head] * state[head]
            state = state.clone()
            state[head] = kept + beta[head] * k[shared].outer(value - k[shared] @ kept)
            read = (q[shared] * delta.key_size**-0.5) @ state[head]
            rms = (read.square().mean() + CONFIG.norm_eps).sqrt()
            out.append(layer.gated_norm.weight * read / rms)
        gate = torch.nn.functional.silu(layer.wg(x[t]))
        outputs.append(layer.wo(torch.cat(out) * gate))
    return torch.stack(outputs)


def test_a_layer_is_the_one_written_out_token_by_token():
    layer = make_model().layers["0"].attention
    x = torch.randn(1, 9, CONFIG.width, generator=torch.Generator().manual_seed(0)).double()
    spans = batch_from_rows(torch.zeros(1, 9, dtype=torch.int64)).spans
    out, wanted = layer(x, spans=spans)[0], written_out(layer, x[0])
    assert torch.allclose(out, wanted, rtol=0, atol=1e-13)


def test_its_parameters_are_those_of_its_configuration():
    model = build_decoder(CONFIG, seed=0)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert shapes == parameter_shapes(CONFIG)
    assert sum(p.numel() for p in model.parameters()) == count_parameters(CONFIG)


def test_packed_documents_give_what_each_gives_alone():
    model, batch = make_model(), decoder_batch(0)
    packed = call_model(model, batch).flatten(0, 1)
    ids = batch.input_ids.flatten()
    starts = batch.spans.cu_seqlens.tolist()
    for start, end in pairwise(starts):
        if end > start:
            alone = call_model(model, batch_from_rows(ids[None, start:end]))[0]
            assert torch.allclose(packed[start:end], alone, rtol=0, atol=1e-12)


def test_generation_with_states_draws_the_tokens_of_generation_without():
    prompts = [[1, 2, 3], [5], [7, 8, 9, 10, 11, 12]]
    sample = partial(
        generate,
        make_model(),
        prompts,
        max_new_tokens=20,
        context=16,  # so that the window moves, and states begin anew
        slide=True,
        sampling=Sampling(temperature=1.0),
    )
    assert sample() == sample(call=call_model)
    # Rows that end make way for the others, with their states.
    assert sample(stop_ids=range(0, 64, 5)) == sample(stop_ids=range(0, 64, 5), call=call_model)


def test_the_initial_decay_is_between_almost_all_and_a_fifth():
    weights = init_weights(
        attrs.evolve(CONFIG, delta=attrs.evolve(CONFIG.delta, value_heads=512)), seed=0
    )
    rate, bias = (weights(f"layers.0.attention.wa.{x}", (512,), (0,)) for x in ("log_rate", "bias"))
    decay = (-rate.exp() * torch.nn.functional.softplus(bias)).exp()
    assert 0.2 < decay.min() < 0.4
    assert 0.99 < decay.max() < 1


def test_muon_steps_its_projections_and_neither_convolutions_nor_gates():
    names = [x for x in hidden_matrices([make_model()]) if x.startswith("layers.0.attention")]
    assert [x.split(".")[3] for x in names] == ["wq", "wk", "wv", "wg", "wb", "wo"]


# --------------------------------------------------------------------------------------- ulysses

HEADS = {"keys on each rank": (2, 4), "one key head for two ranks": (1, 2)}


def make_inputs(keys, values):
    make = torch.Generator().manual_seed(values)

    def normal(*shape):
        return torch.randn(*shape, generator=make, dtype=torch.float64).requires_grad_()

    tokens = decoder_batch(0).input_ids.shape
    heads = [(keys, 6), (keys, 6), (values, 5)]
    gates = [normal(*tokens, values) for _ in range(2)]
    return [normal(*tokens, *x) for x in heads], gates, [normal(*x, 4) for x in heads]


def run_heads(attend, heads, gates, kernels, weight):
    """Return the output, and the gradients of its sum with some weights."""
    decay, beta = (gate.sigmoid() for gate in gates)
    out = attend(
        *heads,
        convolutions=tuple(kernels),
        log_decay=decay.log(),
        beta=beta,
        spans=decoder_batch(0).spans,
    )
    grads = torch.autograd.grad((out * weight).sum(), [*heads, *gates, *kernels])
    return out.detach(), grads


def compare_with_ulysses(ranks):
    found = {}
    with parallel_session(ulysses=ranks) as ps:
        axis = ps.ulysses
        for name, (keys, values) in HEADS.items():
            whole, gates, kernels = make_inputs(keys, values)
            weight = torch.randn_like(whole[2])
            torch.distributed.broadcast(weight, 0)
            wanted, full_grads = run_heads(attend_delta, whole, gates, kernels, weight)

            def own(x):
                return x.detach().chunk(ranks, dim=1)[axis.index].requires_grad_()

            parts = [own(x) for x in whole], [own(x) for x in gates]
            attend = ulysses_delta(attend_delta, axis)
            out, own_grads = run_heads(attend, *parts, kernels, own(weight))
            pairs = [(out, own(wanted).detach())]
            pairs += [
                (a, own(b).detach()) for a, b in zip(own_grads[:5], full_grads[:5], strict=True)
            ]
            for mine, full in zip(own_grads[5:], full_grads[5:], strict=True):
                torch.distributed.all_reduce(mine, group=axis.group)
                pairs.append((mine, full))
            found[name] = max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)
    return found


def test_with_ulysses_it_is_that_of_one_process():
    for found in run_ranks(compare_with_ulysses, 2, 2):
        assert max(found.values()) < 1e-12, found


def test_heads_that_ranks_do_not_divide_are_refused_before_anything_is_sent():
    heads, gates, kernels = make_inputs(3, 3)
    attend = ulysses_delta(attend_delta, Axis("ulysses", Share(0, 2)))
    with pytest.raises(ValueError, match="3 query heads do not divide over 2 ranks"):
        run_heads(attend, heads, gates, kernels, 1.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sliding": Sliding(window=4)}, "sliding must be left out, with delta layers"),
        (
            {
                "kv_heads": 8,
                "qk_norm": False,
                "latents": Latents(kv_rank=4, plain=4, rotary=4, values=4),
            },
            "latents must be left out, with delta layers",
        ),
        ({"layers": 1, "delta": attrs.evolve(CONFIG.delta, full_every=1)}, "in some of the 1"),
    ],
)
def test_what_does_not_go_together_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        attrs.evolve(CONFIG, **options)


def test_key_heads_that_do_not_divide_the_value_heads_are_refused():
    with pytest.raises(ConfigError, match="3 key heads do not divide 8 value heads"):
        Delta(key_heads=3, value_heads=8, key_size=4, value_size=4)
