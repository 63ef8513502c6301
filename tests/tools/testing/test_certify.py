"""The certificate of a user's model: refusals, failures that hide no other, tables."""

import contextlib
import os
import sys
import time
from functools import partial

import attrs
import pytest
import torch
from torch import nn

from trainkit.batch import make_padding_batch
from trainkit.losses import next_token
from trainkit.mesh import solo_parallel
from trainkit.parallel import transforms
from trainkit.parallel.fsdp import fsdp
from trainkit.post.adapters import Lora, lora
from trainkit.tools.testing import run_ranks, train
from trainkit.tools.testing.builtin import decoder_batch, exact_plan
from trainkit.tools.testing.cases import LayoutCase
from trainkit.tools.testing.certificate import (
    TIERS,
    Certificate,
    CertificateRow,
    format_markdown,
    format_text,
    is_within,
    summary,
)
from trainkit.tools.testing.certify import certify
from trainkit.tools.testing.distribute_batch import distribute_batch
from trainkit.tools.testing.exact import ExactModel, call_exact, exact_batch, exact_weights, squares
from trainkit.tools.testing.train import certificate_weights, relative
from trainkit.types import ConfigError, DataShard, Layout, Share

# ------------------------------------------------------------------------------------ a user's own


class Bigrams(nn.Module):
    """A user's model: the next token from this one alone."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Embedding(8, 8)])

    def forward(self, ids):
        return self.layers[0](ids)


def own_plan(_ps, _case):
    return [fsdp()]


def own_call(model, batch):
    return model(batch["input_ids"])


def make_loss(ps):
    assert ps.tp.count == 1
    return next_token


class Pair(nn.Module):
    """A user's model with a matrix that gets an adapter."""

    def __init__(self):
        super().__init__()
        self.embedding, self.up = nn.Embedding(64, 8), nn.Linear(8, 64, bias=False)

    def forward(self, ids):
        return self.up(self.embedding(ids))


def with_adapters(values=None):
    return lora(Lora("up", rank=2), values=values)(Pair(), solo_parallel())


def certified_value(_weights, name, shape, offset):
    return certificate_weights(name, shape, offset)


def embedding_plan(_ps, _case):
    return [fsdp(blocks="embedding")]


@pytest.mark.parametrize("values", [None, certified_value])
def test_a_model_that_is_made_with_adapters_has_the_same_ones_in_every_layout(values):
    found = certify(
        partial(with_adapters, values),
        decoder_batch,
        [LayoutCase(), LayoutCase(Layout(dp_shard=2))],
        plan=embedding_plan,
        loss=next_token,
        call=own_call,
        steps=2,
    )
    assert found.ok, str(found.red)


def test_a_users_model_plan_loss_and_call_are_certified():
    messages = []
    cases = [LayoutCase(), LayoutCase(Layout(dp_shard=2)), LayoutCase(Layout(dp_replicate=2))]
    found = certify(
        Bigrams,
        exact_batch,
        cases,
        plan=own_plan,
        loss=make_loss,
        call=own_call,
        steps=2,
        log=messages.append,
    )
    assert found.ok, format_text(found)
    assert [(row.layout, row.world) for row in found.rows] == [
        ("one rank", 1),
        ("dp2", 2),
        ("replica2", 2),
    ]
    assert found.title == "Bigrams"
    assert {row.worst.partition("/")[0] for row in found.rows} == {"layers.0.weight"}
    assert "(3 of 3, about 0 s left)" in messages[-1]
    assert messages[0].startswith("ok Bigrams: one rank")


# ------------------------------------------------------------------------------------ ties


class TiedBigrams(nn.Module):
    """A head tied to the embedding, and a buffer that counts the calls if `counts` is set."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Embedding(8, 8)])
        self.head = nn.Linear(8, 8, bias=False)
        self.head.weight = self.layers[0].weight
        self.register_buffer("calls", torch.zeros(()))
        self.counts = False

    def forward(self, ids):
        self.calls += self.counts
        return self.head(self.layers[0](ids))


def untying(module, _ps):
    module.head.weight = nn.Parameter(module.head.weight.detach().clone())
    return module


def counting(module, _ps):
    module.counts = True
    return module


def tied_plan(_ps, case):
    if case.note == "untied":  # build_stages would refuse it
        pytest.MonkeyPatch().setattr(transforms, "_check_ties", lambda *_: None)
        return [untying]
    return [fsdp(blocks="head"), *([counting] if case.note == "counts" else [])]


def test_what_a_layout_unties_is_named_and_so_is_a_buffer_that_differs():
    found = certify(
        TiedBigrams,
        exact_batch,
        [LayoutCase(), LayoutCase(note="counts"), LayoutCase(note="untied")],
        plan=tied_plan,
        loss=next_token,
        call=own_call,
        steps=1,
    )
    tied, counted, untied = found.rows
    assert tied not in found.red, format_text(found)
    assert (counted in found.red, counted.worst, counted.parameters < 1e-12) == (True, "calls", 1)
    assert untied.error == (
        "one process does not hold 'head.weight'; on one process 'layers.0.weight' and "
        "'head.weight' are one tensor"
    )


class Untied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Embedding(8, 8), nn.Linear(8, 8, bias=False)

    def forward(self, ids):
        return self.b(self.a(ids))


def tying(module, _ps):
    module.b.weight = module.a.weight
    return module


def tying_plan(_ps, _case):
    return [tying]


def test_what_a_layout_ties_is_named():
    found = certify(
        Untied,
        exact_batch,
        [LayoutCase()],
        plan=tying_plan,
        loss=next_token,
        call=own_call,
        steps=1,
    )
    assert found.rows[0].error == (
        "the ranks do not hold all of 'b.weight'; on the ranks 'a.weight' and 'b.weight' are one "
        "tensor"
    )


# ------------------------------------------------------------------------------------ failures


def failing_plan(ps, case):
    if case.note == "raises" and ps.world.index == 1:
        raise RuntimeError("the plan failed")
    if case.note == "dies" and ps.world.index == 1:
        os.abort()
    if case.note == "hangs" and ps.world.index == 1:
        time.sleep(60)
    return exact_plan(ps, case)


def impatient(fn, world, first, *rest, timeout, **options):
    """Run ranks, with a short timeout for the case that hangs."""
    jobs = rest[0] if isinstance(first, str) else {}  # a folder comes before jobs
    hangs = next((job.case.note == "hangs" for job in jobs.values()), False)
    return run_ranks(fn, world, first, *rest, timeout=2.0 if hangs else timeout, **options)


def test_a_layout_that_fails_is_red_and_hides_no_other(monkeypatch):
    monkeypatch.setattr(sys.modules["trainkit.tools.testing.certify"], "run_ranks", impatient)
    notes = ["", "raises", "after it", "dies", "hangs", "at last"]
    cases = [LayoutCase(Layout(dp_shard=2), note=note) for note in notes]
    found = certify(
        ExactModel,
        exact_batch,
        cases,
        plan=failing_plan,
        loss=squares,
        call=call_exact,
        weights=exact_weights,
        tier="exact",
        steps=1,
        lr=64.0,
    )
    assert [row.layout for row in found.red] == ["dp2, raises", "dp2, dies", "dp2, hangs"]
    raised, died, hung = (row.error for row in found.red)
    assert raised == "rank 1 of 2: RuntimeError: the plan failed"
    assert died.startswith("rank 1 of 2: was ended by SIGABRT")
    assert "still running: rank" in hung or "Timed out" in hung
    assert "failing_plan" in found.red[0].traceback
    assert "RED: dp2, raises: rank 1 of 2: RuntimeError: the plan failed" in format_text(found)


certify_cases = partial(certify, ExactModel, exact_batch, plan=exact_plan, loss=squares)
certify_one = partial(certify_cases, [LayoutCase()])
BAD = [
    (partial(certify_cases, []), "none"),
    (partial(certify_cases, [LayoutCase(), LayoutCase()]), "two are called 'one rank'"),
    (partial(certify_one, tier="fp8"), "tier must be one of"),
    (partial(certify_one, steps=0), "steps must be at least 1"),
    (partial(certify_one, loss=lambda output, _: output), "decorate it with losses.declare_terms"),
    (partial(certify_one, plan=lambda *_: []), "top level of a module"),
]


@pytest.mark.parametrize(("run", "message"), BAD)
def test_a_bad_argument_is_refused(run, message):
    with pytest.raises(ValueError, match=message):
        run()


def one_nan(_name, shape, _offset):
    return torch.full(tuple(shape), torch.nan)


def test_a_model_whose_numbers_are_not_finite_is_refused_and_not_called_equal():
    with pytest.raises(ValueError, match="Bigrams on one process alone has a loss of nan"):
        certify(
            Bigrams,
            exact_batch,
            [LayoutCase(Layout(dp_shard=2))],
            plan=own_plan,
            loss=make_loss,
            call=own_call,
            weights=one_nan,
        )


def test_a_sequence_that_does_not_divide_is_a_row_with_both_numbers():
    found = certify(
        ExactModel,
        exact_batch,
        [LayoutCase(Layout(ring=3))],
        plan=exact_plan,
        loss=squares,
        call=call_exact,
        steps=1,
    )
    (row,) = found.red
    assert "16" in row.error
    assert "6" in row.error


# ------------------------------------------------------------------------------------ parts


def test_distributed_rows_are_those_of_the_batch_and_padding_rows():
    batch = exact_batch(0)
    batch = attrs.evolve(batch, extra={"weight": torch.rand(8, 16)})
    shares = [Share(rank, 3) for rank in range(3)]
    by_rank = [distribute_batch(batch, DataShard(share), rows_per_microbatch=1) for share in shares]
    assert [len(microbatches) for microbatches in by_rank] == [3, 3, 3]
    rows = [row for microbatches in by_rank for row in microbatches]
    padding = [row for row in rows if (row.token_index < 0).all()]
    assert len(padding) == 1
    expected = make_padding_batch(1, 16)
    for name in ("input_ids", "labels", "position_ids", "document_ids", "token_index"):
        assert torch.equal(padding[0][name], expected[name])
        filled = torch.cat([row[name] for row in rows if row is not padding[0]])
        assert torch.equal(filled, batch[name])
    assert padding[0]["weight"].sum() == 0
    assert padding[0].spans.lengths.tolist() == [16]


def test_a_difference_is_relative_to_the_largest_and_nan_is_infinite():
    nan = float("nan")
    assert relative([1.0, 3.0], [1.0, 4.0]) == 0.25
    assert relative([nan, 1.0], [nan, 1.0]) == 0
    assert relative([nan, 1.0], [0.0, 1.0]) == float("inf")
    assert relative([1.0], [0.0]) == float("inf")


def test_a_row_is_within_a_tier_only_if_everything_is():
    good = CertificateRow(
        "dp2", 2, loss=1e-13, grad_norm=1e-13, parameters=1e-13, state=0.0, batches=True
    )
    nan = float("nan")
    bad = [
        {"loss": 1e-11},
        {"grad_norm": 1e-11},
        {"parameters": nan},
        {"state": 1e-11},
        {"batches": False},
    ]
    bad += [{"loss": nan}, {"grad_norm": nan}, {"error": "it hung"}]
    assert is_within(good, TIERS["fp64"])
    assert not any(is_within(attrs.evolve(good, **change), TIERS["fp64"]) for change in bad)
    assert not is_within(CertificateRow("dp2", 2), TIERS["bf16"])
    assert not Certificate("m", TIERS["fp64"], 1, ()).ok


def test_a_table_says_which_rows_are_red_and_why():
    good = CertificateRow("dp2", 2, 0.0, 0.0, 0.0, 0.0, worst="w", batches=True)
    rows = (good, attrs.evolve(good, layout="tp2", loss=1.0), attrs.evolve(good, batches=False))
    found = Certificate("m", TIERS["fp64"], 3, rows)
    text, page = format_text(found).splitlines(), format_markdown(found).splitlines()
    assert [line.endswith("RED") for line in text[:4]] == [False, False, True, True]
    assert "RED: tp2: its numbers differ" in text
    assert "RED: dp2: it trained on other tokens" in page
    assert summary(found) == text[-1] == page[-1]
    assert "1 of 3 layouts" in summary(found)


def test_a_layout_has_a_readable_name():
    case = LayoutCase(
        Layout(pp=2, dp_replicate=2, ring=2, fold_sp="none", cpu_offload=True), note="mine"
    )
    assert case.name == "pp2 x replica2 x ring2, 1f1b, fold none, cpu offload, mine"
    assert case.world == 8
    assert LayoutCase(rows_per_microbatch=None).name == "one rank, all rows at once"


# ------------------------------------------------------------------------------------ devices


class SeenError(Exception):
    """Ends a training where its first step would begin."""


def test_model_and_batches_are_moved_to_the_device_of_the_rank(monkeypatch):
    """On a device without values: there the first step has all that it is given, and ends."""
    given = []

    @contextlib.contextmanager
    def on_meta(_layout):
        yield attrs.evolve(solo_parallel(), device=torch.device("meta"))

    def bind(stages, *_args, **_options):
        given.extend(p.device.type for stage in stages for p in stage.parameters())

        def run(batches, **_):
            given.extend(x.device.type for x in batches[0].values() if torch.is_tensor(x))
            raise SeenError

        return run

    monkeypatch.setattr(train, "parallel_session", on_meta)
    monkeypatch.setattr(train, "make_forward_backward", bind)
    training = train.Training(
        title="m",
        tier=TIERS["fp32"],
        make_model=Bigrams,
        make_batches=exact_batch,
        plan=own_plan,
        loss=next_token,
        call=own_call,
        steps=1,
    )
    with pytest.raises(SeenError):
        train.train_plain(training)
    assert set(given) == {"meta"}


def test_a_certificate_on_gpus_that_are_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    run = partial(certify, Bigrams, exact_batch, plan=own_plan, loss=next_token, call=own_call)
    with pytest.raises(ConfigError, match=r"certify: .*2 ranks, .*finds 1 on this machine"):
        run([LayoutCase(Layout(dp_shard=2))], device="cuda")
    with pytest.raises(ValueError, match="device must be"):
        run([LayoutCase()], device="tpu")
