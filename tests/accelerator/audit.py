"""What trainkit does with an accelerator, on a machine that has none: run by .ci/accelerator."""

import contextlib
import functools
import importlib.util
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import attrs
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes

import trainkit as tk
from trainkit import attention, config, losses, mesh, models, packing, sampling
from trainkit.batch import count_tokens, count_valid_tokens, to_device
from trainkit.data import TokenCorpus
from trainkit.losses import average_terms, next_token_linear
from trainkit.parallel import grad_reduction, stage_forward
from trainkit.tools.testing import LayoutCase, builtin, ranks, train
from trainkit.types import SOLO, ConfigError, Share, Spans
from trainkit.weights.checkpoint.initial_weights import InitialWeights

sys.path.insert(0, str(Path(__file__).parent))
from device import fake_device

VARLEN = "_varlen_attn"  # the operator that torch.nn.attention.varlen_attn calls
RECIPES = Path(__file__).parents[2] / "recipes"
LAYERS, ROWS, MICROBATCH, LENGTH = 2, 8, 2, 128
MODEL = models.DecoderConfig(
    vocab_size=256, width=64, layers=LAYERS, heads=4, kv_heads=2, mlp_width=128
)


@functools.cache
def recipe_of(name):
    spec = importlib.util.spec_from_file_location(f"recipe_{name}", RECIPES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def rows_of(shortest, longest):
    """Return a corpus of documents of such lengths, and its rows."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(shortest, longest + 1, 400)
    corpus = TokenCorpus(rng.integers(0, 250, int(lengths.sum())), np.append(0, np.cumsum(lengths)))
    return corpus, packing.pack_bins(corpus.lengths, LENGTH, multiple_of=8)


ALONE, SHARDED = tk.Layout(), tk.Layout(dp_shard=2)
UNFOLDED = tk.Layout(ring=2, fold_sp="none")


@contextlib.contextmanager
def session(rank, layout):
    """Open a layout of ranks that are not there, as one of them."""
    world = layout.world
    if world == 1:
        yield mesh.solo_parallel("cuda:0")
        return
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    alike = mock.patch.object(stage_forward, "all_gather_objects", lambda x, axis: [x] * axis.count)
    unheard = mock.patch("trainkit.mesh.session.check_groups")  # nobody would answer
    # A fake all-reduce sums nothing, so that the order of this rank seems to be no other rank's.
    unordered = mock.patch.object(grad_reduction._Order, "_raise_difference")
    try:
        with unheard, unordered, mesh.parallel_session(layout) as ps, alike:
            yield ps
    finally:
        dist.destroy_process_group()


def step_of(name, *flags, documents=(8, 40), rank=0, model=MODEL, layout=ALONE):
    """Take two steps of a recipe; return the ledger of the second, and its microbatches."""
    recipe, (corpus, bins) = recipe_of(name), rows_of(*documents)
    cfg = config.load_config(recipe.Config, ["--compute", "bf16", *flags])
    with session(rank, layout) as ps, fake_device() as ledger:
        first = [InitialWeights(None)] if name == "pretrain" else []  # new weights
        stages, optimizer = recipe.build(cfg, ps, model, *first)
        run = tk.make_forward_backward(stages, next_token_linear, reduce=cfg.layout.reduce)
        train_step = recipe.make_train_step(cfg, ps, stages, optimizer, run)
        state = tk.TrainState()
        for _ in range(2):
            batch = batch_of(corpus, bins, state.cursor, ps)
            ledger.clear()
            state, _ = train_step(state, batch)
    return ledger, len(batch.microbatches)


def batch_of(corpus, bins, cursor, ps):
    with _disable_current_modes():
        batch = tk.make_step_batch(
            tk.PackedCorpus(corpus, bins),
            sampling.shuffle_epochs(len(bins), rows_per_step=ROWS, seed=0),
            cursor,
            data_shard=ps.data_shard,
            rows_per_microbatch=MICROBATCH,
        )
    parts = [to_device(part, torch.device("cuda:0")) for part in batch.microbatches]
    return attrs.evolve(batch, microbatches=parts)


# ------------------------------------------------------------------------------------ whole steps

LAYOUTS = [
    ("pretrain", 0, ALONE),
    ("pretrain", 0, SHARDED),
    ("pretrain", 0, tk.Layout(dp_replicate=2, dp_shard=2)),
    ("pretrain", 0, tk.Layout(tp=2)),
    ("pretrain", 0, tk.Layout(ulysses=2)),
    ("pretrain", 0, UNFOLDED),
    ("pretrain", 1, tk.Layout(pp=2)),
    ("long_context", 0, tk.Layout(ring=2, ulysses=2)),
]
MAY_WAIT: set[str] = set()
"""Where a step may make the host wait for the device, as "what in file:function"."""

NCCL = {torch.uint8, torch.int8, torch.int32, torch.int64}
NCCL |= {torch.float16, torch.bfloat16, torch.float32, torch.float64}


@functools.cache
def audited(number):
    name, rank, layout = LAYOUTS[number]
    return step_of(name, rank=rank, layout=layout)[0]


each_layout = pytest.mark.parametrize(
    "number", range(len(LAYOUTS)), ids=[f"{name} {layout}" for name, _, layout in LAYOUTS]
)


@each_layout
def test_a_step_waits_for_the_device_nowhere_but_where_it_may(number):
    assert set(audited(number).syncs) <= MAY_WAIT, audited(number).syncs


@each_layout
def test_what_enters_a_collective_is_on_the_device_and_of_a_dtype_that_nccl_has(number):
    sent = audited(number).collectives
    assert sent or LAYOUTS[number][-1] == ALONE
    assert {dtype for _, (_, dtype), _ in sent} <= NCCL
    assert [where for where in sent if where[1][0] != "cuda"] == []


MODES = [
    "--compute fp16",
    "--storage bf16 --moments 8bit",
    "--optimizer muon",
    "--optimizer schedule-free --moments bf16",
    "--linears float8_rowwise",
    "--linears float8_tensorwise",
    "--recompute attention+products/2",
    "--recompute 0.4",
    "--offload-activations 0",
]


@pytest.mark.parametrize("layout", [ALONE, SHARDED], ids=["alone", "sharded"])
@pytest.mark.parametrize("flags", MODES)
def test_no_trick_makes_a_step_wait(flags, layout):
    ledger, _ = step_of("pretrain", *flags.split(), layout=layout)
    assert not ledger.syncs, ledger.syncs


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_documents_are_attended_to_in_one_call_for_each_layer_and_microbatch(recompute):
    ledger, microbatches = step_of("pretrain", "--recompute", recompute)
    forwards = 2 if recompute == "full" else 1
    assert ledger.operators[VARLEN] == forwards * LAYERS * microbatches
    assert not [name for name in ledger.operators if "scaled_dot_product" in name]


def test_launches_do_not_grow_with_the_number_of_documents():
    few, _ = step_of("pretrain", documents=(LENGTH, LENGTH))
    many, _ = step_of("pretrain", documents=(8, 40))
    assert few.operators == many.operators


# ------------------------------------------------------------------------------------------ experts

EXPERTS = attrs.evolve(
    MODEL,
    experts=models.Experts(
        count=8, top_k=2, width=64, shared=32, scores="sigmoid", biased=True, groups=4
    ),
)


def step_with_experts(balance):
    """Take a step of a decoder with experts in bf16; return its ledger."""
    loss = losses.add_router_losses(losses.next_token, balance=0.01, router_z=0.001)
    corpus, bins = rows_of(8, 40)
    with session(0, ALONE) as ps, fake_device() as ledger:
        torch.set_default_dtype(torch.bfloat16)
        try:
            with torch.device("cuda:0"):
                model = models.Decoder(EXPERTS, balance=balance)
        finally:
            torch.set_default_dtype(torch.float32)
        batches = batch_of(corpus, bins, tk.TrainState().cursor, ps).microbatches
        ledger.clear()
        seen = count_tokens(batches)
        per = {"loss": count_valid_tokens(batches), "balance": seen, "router_z": seen}
        sums = tk.forward_backward(model, batches, loss, denominator=per, call=models.call_routed)
        means = average_terms(tk.reduce_metrics(sums, ps.loss), per)
        applied = torch.ones((), dtype=torch.bool, device="cuda:0")
        models.update_routers_([model], means["load"], rate=0.001, applied=applied)
    return ledger, len(batches)


@pytest.mark.parametrize("balance", ["batch", "microbatch", "document"])
def test_experts_in_bf16_make_the_host_wait_nowhere_and_are_multiplied_at_once(balance):
    ledger, microbatches = step_with_experts(balance)
    assert not ledger.syncs
    assert ledger.operators["_grouped_mm"] == 9 * LAYERS * microbatches  # 3, and 2 for each back


# --------------------------------------------------------------------------------- single functions


CERTIFIED = {"alone": ALONE, "sharded": SHARDED, "tensor parallel": tk.Layout(tp=2)}


@pytest.mark.parametrize("tier", ["fp32", "bf16"])
@pytest.mark.parametrize("layout", CERTIFIED.values(), ids=CERTIFIED)
def test_the_certificate_of_a_device_trains_on_it(tier, layout):
    case = LayoutCase(layout)
    ((training, _),) = builtin.builtin_subjects(
        tier, pick=lambda rows: [row for row in rows if row[0] == "decoder"][:1], steps=2
    )
    found = []

    def get_shard(tensor):  # a fake tensor has no values to compare
        found.append(tensor.device.type)
        return train.Held(np.zeros(1), (0,))

    with (
        session(0, layout) as ps,
        mock.patch.object(train, "parallel_session", return_value=contextlib.nullcontext(ps)),
        mock.patch.object(train, "_get_shard", get_shard),
        mock.patch.object(
            train, "batch_hash", side_effect=lambda _: torch.zeros(1, device="cuda:0")
        ),
        fake_device() as ledger,
    ):
        outcome = train.train_layout(training, case)
    assert found
    assert {*found} == {"cuda"}
    assert len(outcome.norms) == 2
    sent = {(device, dtype) for _, (device, dtype), _ in ledger.collectives}
    assert bool(sent) == (layout != ALONE)
    assert {device for device, _ in sent} <= {"cuda"}
    assert {dtype for _, dtype in sent} <= NCCL


def test_a_rank_of_the_certificate_of_a_device_opens_nccl(monkeypatch, tmp_path):
    opened = {}
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **_: opened.update(to=backend))
    monkeypatch.setattr(dist, "barrier", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: opened.update(device=index))
    monkeypatch.setattr(os, "environ", dict(os.environ))
    work = SimpleNamespace(
        world=1,
        environ=dict(os.environ),
        threads=1,
        device="cuda",
        folder=tmp_path,
        timeout=1.0,
        sources=(),
    )
    ranks._set_up(0, work)
    assert opened == {"device": 0, "to": "cpu:gloo,cuda:nccl"}
    assert "CUDA_VISIBLE_DEVICES" not in os.environ
    ranks.check_devices("certify", 1, "cuda")
    with pytest.raises(ConfigError, match="finds 1"):
        ranks.check_devices("certify", 2, "cuda")


def axis_of_two(devices):
    """Return an axis of two ranks whose group notes on which device it is given tensors."""
    return attrs.evolve(SOLO, share=Share(0, 2), group=SimpleNamespace(config=devices))


@pytest.mark.parametrize("devices", ["cpu:gloo,cuda:nccl", "cuda:nccl"])
def test_ranks_whose_values_lie_on_different_devices_send_them_over_one_backend(
    monkeypatch, devices
):
    sent = []
    monkeypatch.setattr(dist, "get_backend_config", lambda group: group.config)
    monkeypatch.setattr(dist, "all_reduce", lambda x, **_: sent.append(x.device.type))
    with fake_device():
        value = {"loss": torch.ones((), device="cuda:0")}
        for sums in (value, {"loss": torch.zeros(())}):
            with contextlib.suppress(DataDependentOutputException):  # it may look at the result
                tk.reduce_metrics(sums, axis_of_two(devices))
    assert len(set(sent)) == 1, sent


@pytest.mark.parametrize(
    ("size", "architecture", "taken"),
    [(64, 90, True), (20, 90, False), (264, 90, False), (64, 75, False)],
)
def test_what_the_kernel_does_not_take_goes_another_way(monkeypatch, size, architecture, taken):
    found = SimpleNamespace(major=architecture // 10, minor=architecture % 10)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: found)
    with fake_device() as ledger:
        ends = torch.zeros(3, dtype=torch.int32, device="cuda:0")
        spans = Spans(ends, np.array([5, 11]), 11)
        q, k, v = torch.randn(3, 1, 16, 4, size, device="cuda:0", dtype=torch.bfloat16)
        attention.varlen(q, k, v, spans=spans)
    assert bool(ledger.operators[VARLEN]) == taken


@pytest.mark.parametrize(
    ("name", "dtype", "taken"),
    [
        ("sdpa", torch.float32, "_scaled_dot_product_efficient_attention"),
        ("efficient", torch.bfloat16, "_scaled_dot_product_efficient_attention"),
        ("cudnn", torch.bfloat16, "_scaled_dot_product_cudnn_attention"),
        ("flash", torch.bfloat16, VARLEN),
    ],
)
def test_a_window_is_a_kernel_of_torchs_and_nothing_waits(name, dtype, taken):
    attend = attention.choose_kernel(
        [name], device="cuda:0", dtype=dtype, head_size=64, window=20
    ).attend
    with fake_device() as ledger:
        lengths = [150, 1, 29, 120]
        ends = torch.zeros(5, dtype=torch.int32, device="cuda:0")
        qkv = [
            torch.randn(2, 150, h, 64, device="cuda:0", dtype=dtype, requires_grad=True)
            for h in (4, 2, 2)
        ]
        ledger.clear()
        out = attend(*qkv, spans=Spans(ends, np.array(lengths), 150), window=20)
        torch.autograd.grad(out.sum(), qkv)
    assert not ledger.syncs
    found = {x for x in ledger.operators if "attention" in x or "attn" in x or "mm" in x}
    one_token = {"_scaled_dot_product_efficient_attention"} if name == "cudnn" else set()
    assert {x for x in found if "backward" not in x} == {taken} | one_token
    assert ledger.operators[taken] == ledger.operators[f"{taken}_backward"] > 0
