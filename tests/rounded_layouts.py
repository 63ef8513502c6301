"""The gradients of one step of a small decoder whose linear layers round, in any layout."""

import functools

import attrs
import pytest
import torch
from whole_step import CAPACITY, CONFIG, Layout, corpus, input_of

import trainkit as tk
from trainkit.losses import next_token_linear
from trainkit.models import Decoder, init_weights
from trainkit.parallel import (
    compile_blocks,
    fsdp,
    mixed_precision,
    recompute,
    sequence_parallel,
    tensor_parallel,
)
from trainkit.post.adapters import make_linear_transforms
from trainkit.tools.testing import run_ranks
from trainkit.types import Cursor

# 16 divides sides on 2 ranks, and 32 the rows of matrices that are cut.
MODEL = attrs.evolve(CONFIG, vocab_size=32, width=64, mlp_width=64)


def gradients(degrees, linears, *, rows=1, plan="", schedule="1f1b"):
    """Return the loss and every gradient of a step of four rows."""
    more = {
        "": [],
        "bf16": [mixed_precision(torch.bfloat16)],
        "selective": [recompute("selective")],
        "compiled": [recompute("full"), compile_blocks(backend="aot_eager")],
    }[plan]
    splits = schedule != "1f1b"
    model = attrs.evolve(MODEL, layers=4 if splits else 2)
    text, dtype = corpus(), torch.float32 if plan == "bf16" else torch.float64
    bins = tk.pack_bins(text.lengths, CAPACITY, multiple_of=4)
    layout = Layout(rows_per_microbatch=rows, multiple_of=4)
    with tk.parallel_session(**degrees) as ps:
        reshard = tk.Layout(reshard_after_forward=not splits)
        stages = tk.build_stages(
            lambda: Decoder(model, head="hidden").to(dtype),
            ps,
            [
                *make_linear_transforms(linears),
                tensor_parallel(),
                sequence_parallel(),
                *more,
                fsdp(reshard),
            ],
            weights=init_weights(model, seed=0),
            schedule=schedule,
        )
        batch = input_of(Cursor(), ps, layout, text=text, bins=bins)
        tokens = tk.all_sum(tk.count_valid_tokens(batch.microbatches), ps.loss)
        run = tk.make_forward_backward(stages, next_token_linear)
        sums = run(batch.microbatches, denominator=tokens)
        tk.sync_sp_grads(tk.get_parameters(stages), ps.sp_unfolded)
        loss = float(tk.reduce_metrics(sums, ps.loss)["loss"] / tokens)
        grads = {name: p.grad for name, p in tk.get_named_parameters(stages).items()}
        return loss, {
            name: (grad.full_tensor() if hasattr(grad, "full_tensor") else grad).clone()
            for name, grad in grads.items()
        }


def farthest(found, wanted):
    """Return how far the farthest gradient is."""
    assert found
    return max(float((g - wanted[n]).abs().max() / wanted[n].abs().max()) for n, g in found.items())


@functools.cache
def alone(linears, rows=1, plan="", schedule="1f1b"):
    """Return what one process has."""
    plan = plan if plan == "bf16" else ""
    return gradients({}, linears, rows=rows, plan=plan, schedule=schedule)


def every_layout(cases):
    """Return what each case (degrees, linears, more) has on this rank."""
    return [gradients(degrees, linears, **how) for degrees, linears, how in cases]


def hold(world, *cases):
    """Compare each case with one process, in fp64 to 1e-12: one code that differs is 1e-3."""
    cases = [(*case, {}) if len(case) == 2 else case for case in cases]
    wanted = [alone(linears, **how) for _, linears, how in cases]
    for ranks in run_ranks(every_layout, world, cases):
        for (loss, found), (want, grads), case in zip(ranks, wanted, cases, strict=True):
            bound = 1e-6 if case[2].get("plan") == "bf16" else 1e-12
            assert loss == pytest.approx(want, rel=bound), case
            assert farthest(found, grads) < bound, case
