"""Computing in bf16: fp32 parameters and gradients, and the same roundings in every layout."""

import copy
import functools

import attrs
import pytest
import torch
from torch import nn
from whole_step import CAPACITY, CONFIG, Layout, corpus, input_of

import trainkit as tk
from trainkit.losses import next_token_linear
from trainkit.models import Decoder, init_weights
from trainkit.parallel import (
    autocast_call,
    compile_blocks,
    fsdp,
    make_decoder_plan,
    mixed_precision,
    recompute,
    resolve_precision,
    tensor_parallel,
)
from trainkit.tools.testing import run_ranks
from trainkit.types import Cursor

BF16 = torch.bfloat16
SOLO = tk.solo_parallel()
KEPT = tk.Precision(compute="bf16", storage="bf16")


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def gradients(layout, *, dtype=BF16, plan=(), tied=False, call=tk.call_model, whole_plan=False):
    """Return the loss and every gradient of a step of four microbatches, and their dtypes."""
    # Torch warns of each norm that autocast gives bf16, as it does those of queries and keys.
    model = attrs.evolve(CONFIG, tied=tied, vocab_size=32, qk_norm=call is tk.call_model)
    text = corpus()
    bins = tk.pack_bins(text.lengths, CAPACITY)
    with tk.parallel_session(layout) as ps:
        stages = tk.build_stages(
            lambda: Decoder(model, head="hidden"),
            ps,
            plan if whole_plan else [tensor_parallel(), mixed_precision(dtype), *plan, fsdp()],
            weights=init_weights(model, seed=0),
        )
        batch = input_of(Cursor(), ps, Layout(), text=text, bins=bins)
        tokens = tk.all_sum(tk.count_valid_tokens(batch.microbatches), ps.loss)
        run = tk.make_forward_backward(stages, next_token_linear, call=call)
        sums = run(batch.microbatches, denominator=tokens)
        named = tk.get_named_parameters(stages)
        (kinds,) = {(p.dtype, p.grad.dtype) for p in named.values()}
        assert whole_plan or kinds == (torch.float32, torch.float32)
        loss = tk.reduce_metrics(sums, ps.loss)["loss"] / tokens
        found = {name: whole(p.grad).clone() for name, p in named.items()}
        if whole_plan and ps.pp.count == 1:  # a backward pass of one's own gives the same dtypes
            own = batch.microbatches[0]
            next_token_linear(call(stages[0], own), own)[0].backward()
            assert {(p.dtype, p.grad.dtype) for p in named.values()} == {kinds}
        return float(loss), found, kinds


def farthest(found, wanted):
    assert found
    return max(
        ((grad - wanted[name]).abs().max() / wanted[name].abs().max()).item()
        for name, grad in found.items()
    )


def every_layout(layouts, tied=False):
    return [gradients(layout, tied=tied) for layout in layouts]


@functools.cache
def alone(**options):
    return gradients(tk.Layout(), **options)


def test_one_process_rounds_to_bf16():
    loss, found, _ = alone()
    exact, wanted, _ = alone(dtype=None)
    assert 1e-5 < abs(loss - exact) / exact < 1e-2
    assert 1e-3 < farthest(found, wanted) < 2e-1


@pytest.mark.parametrize("tied", [False, True])
def test_layouts_differ_by_the_order_of_sums_alone(tied):
    loss, wanted, _ = alone(tied=tied)
    layouts = [tk.Layout(dp_shard=2), tk.Layout(dp_shard=1, dp_replicate=2)]
    if not tied:  # two stages add their gradients of a tied weight in fp32, one process in bf16
        layouts.append(tk.Layout(dp_shard=1, pp=2))
    for ranks in run_ranks(every_layout, 2, layouts, tied):
        for found, grads, _ in ranks:
            assert found == pytest.approx(loss, rel=1e-6)
            assert farthest(grads, wanted) < 1e-6


def test_tensor_parallel_ranks_compute_in_bf16_too():
    loss, wanted, _ = alone()
    tp = tk.Layout(dp_shard=1, tp=2)
    for found, grads, _ in (ranks[0] for ranks in run_ranks(every_layout, 2, [tp])):
        assert found == pytest.approx(loss, rel=1e-2)
        assert 1e-4 < farthest(grads, wanted) < 2e-1  # partial sums are rounded before they add up


def recomputed_and_compiled():
    plans = (recompute("full"),), (compile_blocks(backend="aot_eager"),)
    return [gradients(tk.Layout(), plan=plan)[1] for plan in plans]


def test_recomputation_and_compilation_round_at_the_same_places():
    _, wanted, _ = alone()
    for found in run_ranks(recomputed_and_compiled, 1)[0]:
        assert farthest(found, wanted) == 0


def in_the_four_dtypes():
    """Return dtypes, and what gradients become, where each of the four is bf16."""
    plan = functools.partial(make_decoder_plan, tk.Layout())
    found = {}
    for name, layout, precision in (
        ("sums", tk.Layout(dp_shard=2), tk.Precision(compute="fp32", reduction="bf16")),
        ("fp32", tk.Layout(dp_shard=2), tk.Precision(compute="fp32")),
        ("others", tk.Layout(dp_shard=1, tp=2), tk.Precision(compute="fp32", reduction="bf16")),
        ("kept, sharded", tk.Layout(dp_shard=2), KEPT),
        ("kept", tk.Layout(dp_shard=1, pp=2), KEPT),
        ("kept, split", tk.Layout(dp_shard=1, tp=2), KEPT),
    ):
        found[name] = gradients(layout, plan=plan(precision=precision), whole_plan=True)
    return found


def test_parameters_and_sums_are_in_what_they_are_asked_to_be():
    first, second = run_ranks(in_the_four_dtypes, 2)
    exact, kinds = first["fp32"][1], {name: found[2] for name, found in first.items()}
    assert kinds["sums"] == kinds["fp32"] == (torch.float32, torch.float32)
    kept_kinds = {kinds["kept, sharded"], kinds["kept"], kinds["kept, split"]}
    assert kept_kinds == {(BF16, torch.float32)}  # all sums are
    assert 1e-4 < farthest(first["sums"][1], exact) < 1e-2
    assert all(torch.equal(g, g.to(BF16).float()) for g in first["sums"][1].values())
    assert farthest(first["others"][1], exact) < 1e-5  # what is no sum of FSDP's is in fp32
    pipeline = first["kept"][1] | second["kept"][1]
    solo = gradients(
        tk.Layout(), plan=make_decoder_plan(tk.Layout(), precision=KEPT), whole_plan=True
    )[1]
    assert farthest(pipeline, solo) == 0
    assert farthest(first["kept, sharded"][1], solo) < 1e-6  # no sum is rounded


def under_autocast():
    run = functools.partial(gradients, dtype=None, call=autocast_call(tk.call_model))
    pipeline = run(tk.Layout(pp=2, dp_shard=1))
    return pipeline, run(tk.Layout(dp_shard=2), plan=[recompute("full")])


def test_autocast_is_a_call_in_any_layout():
    loss, wanted = gradients(tk.Layout(), dtype=None, call=autocast_call(tk.call_model))[:2]
    exact = gradients(tk.Layout(), dtype=None, call=functools.partial(tk.call_model))[1]
    assert 1e-3 < farthest(wanted, exact) < 2e-1
    for pipeline, sharded in run_ranks(under_autocast, 2):
        for found, grads, _ in (pipeline, sharded):
            assert found == pytest.approx(loss, rel=1e-5)
            assert farthest(grads, wanted) < 1e-5


class Odd(nn.Module):
    """A module with a parameter made in bf16, one in fp32, a tie, and fp32 input."""

    def __init__(self):
        super().__init__()
        self.into = nn.Linear(3, 3, bias=False, dtype=BF16)
        self.norm = nn.LayerNorm(3)
        self.out = nn.Linear(3, 3, bias=False)
        self.out.weight = self.into.weight

    def forward(self, x):
        self.seen = self.into.weight, self.out.weight
        return self.out(self.norm(self.into(x)))


def test_parameters_made_in_bf16_become_fp32_and_nothing_ends_in_mixed_dtypes():
    model = mixed_precision(BF16)(Odd(), SOLO)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model(torch.ones(2, 3)).dtype == BF16
    assert model.seen[0] is model.seen[1]  # a tied parameter is cast once
    assert model.seen[0].dtype == BF16
    assert model.into.weight is model.out.weight
    assert isinstance(model.into.weight, nn.Parameter)  # what was shown is gone again


def test_what_is_kept_and_computed_with_in_fp32_is_seen_as_it_is():
    model = mixed_precision(torch.float32)(Odd(), SOLO)
    model(torch.ones(2, 3))
    assert model.seen[0] is model.into.weight


def test_a_forward_pass_that_fails_leaves_the_parameters_to_be_seen():
    model = mixed_precision(BF16)(Odd(), SOLO)
    with pytest.raises(RuntimeError):
        model(torch.ones(2, 4))
    assert all(isinstance(part.weight, nn.Parameter) for part in (model.into, model.out))


def test_a_block_that_shows_its_parameters_cast_is_compiled_whole():
    model = torch.compile(
        mixed_precision(BF16)(nn.Linear(2, 1), SOLO),
        backend="eager",
        fullgraph=torch.__version__ >= "2.13",  # before it in parts
    )
    for _ in range(2):
        assert model(torch.ones(1, 2)).dtype == BF16
        assert model.weight.dtype == torch.float32


def test_a_copy_computes_with_its_own_weights():
    model = mixed_precision(BF16)(nn.Linear(2, 1, bias=False), SOLO)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.weight.zero_()
    assert twin(torch.ones(1, 2)).item() == 0
    assert model(torch.ones(1, 2)).item() != 0


def test_what_is_computed_in_where_nobody_says(monkeypatch):
    auto = tk.Precision()
    assert resolve_precision(auto) == resolve_precision(auto, "cpu") == tk.Precision(compute="fp32")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, name in (((7, 5), "fp32"), ((8, 0), "bf16"), ((9, 0), "bf16")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        chosen = resolve_precision(auto), resolve_precision(auto, "cuda:0")
        assert [one.compute for one in chosen] == [name, name]
    with pytest.raises(ValueError, match="auto, fp32, bf16 or fp16, got 'fp8'"):
        tk.Precision(compute="fp8")
