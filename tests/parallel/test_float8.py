"""Float8: torchao's numbers in one process, one process's numbers in every layout."""

import dataclasses
import functools

import attrs
import pytest
import torch
from torch import nn
from whole_step import CAPACITY, CONFIG, Layout, corpus, input_of

import trainkit as tk
from trainkit.adapters import Lora, lora
from trainkit.losses import next_token_linear
from trainkit.models import Decoder, Experts, call_routed, decoder_config, init_weights
from trainkit.parallel import compiled, expert, float8, fsdp, precision, recompute, sequence, tensor
from trainkit.parallel.float8 import _rounded, scaled_product
from trainkit.parallel.linears import told_of
from trainkit.testing import run_ranks
from trainkit.types import ConfigError, Cursor

SCALINGS = ["tensorwise", "rowwise", "rowwise_with_gw_hp"]
SOLO = tk.solo_parallel()
MODEL = attrs.evolve(CONFIG, vocab_size=32, width=64, mlp_width=64)  # 16 divides sides on 2 ranks


def gradients(degrees, scaling, *, rows=1, plan=(), dtype=torch.float64, schedule="1f1b"):
    """Return the loss and every gradient of a step of four rows, some layers in float8."""
    text = corpus()
    bins = tk.pack_bins(text.lengths, CAPACITY, multiple_of=4)
    layout = Layout(rows_per_microbatch=rows, multiple_of=4)
    with tk.parallel_session(**degrees) as ps:
        stages = tk.build_stages(
            lambda: Decoder(MODEL, head="hidden").to(dtype),
            ps,
            [*([float8(scaling)] if scaling else []), tensor(), sequence(), *plan, fsdp()],
            weights=init_weights(MODEL, seed=0),
            schedule=schedule,
        )
        batch = input_of(Cursor(), ps, layout, text=text, bins=bins)
        tokens = tk.all_sum(tk.count_valid_tokens(batch.microbatches), ps.loss)
        run = tk.bind_forward_backward(stages, next_token_linear, axis=ps.pp, schedule=schedule)
        sums = run(batch.microbatches, denominator=tokens)
        tk.sync_sp_grads(tk.parameters_of(stages), ps.sp_unfolded)
        loss = float(tk.reduce_metrics(sums, ps.loss)["loss"] / tokens)
        named = tk.named_parameters_of(stages)
        whole = {
            name: getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for name, p in named.items()
        }
        return loss, {name: grad.clone() for name, grad in whole.items()}


def farthest(found, wanted):
    assert found
    return max(float((g - wanted[n]).abs().max() / wanted[n].abs().max()) for n, g in found.items())


@functools.cache
def alone(scaling, rows=1):
    return gradients({}, scaling, rows=rows)


def every_layout(cases):
    return [gradients(degrees, **how) for degrees, how in cases]


def hold(cases, world, bound=1e-12):
    wanted = [alone(how["scaling"], how.get("rows", 1)) for _, how in cases]
    for found in run_ranks(every_layout, world, cases):
        for (loss, grads), (want, all_grads), case in zip(found, wanted, cases, strict=True):
            assert loss == pytest.approx(want, rel=bound), case
            assert farthest(grads, all_grads) < bound, case


TWO = [{"dp_shard": 2}, {"tp": 2}, {"pp": 2}, {"ring": 2}, {"ulysses": 2}]


def test_layouts_round_to_the_same_bits():
    of = dict(zip(map(str, TWO), [SCALINGS] * 5, strict=True))
    hold([(x, {"scaling": scaling}) for x in TWO for scaling in of[str(x)]], 2)
