"""What the certificate must catch: every mistake is planted in a layout, whose row turns red.

A mistake's name is the layout's note. It is planted by the plan, inside the ranks, before the step
is bound, and taken out by the next layout's plan; the library knows nothing of it.
"""

import contextlib
import os
import sys
from functools import partial

import attrs
import numpy as np
import pytest
import torch
from every_pair import ONLY_ALL, WITH_ALL

import trainkit.grads
import trainkit.models.call
import trainkit.parallel.grad_reduction
import trainkit.parallel.pipeline
import trainkit.parallel.tied_embeddings
import trainkit.step
from trainkit.batch import shift_labels
from trainkit.batch.shards import spans_of_runs
from trainkit.grads import get_parameters
from trainkit.losses import declare_terms, next_token_linear
from trainkit.models import RoutingTape, call_routed, call_with_noise, experts
from trainkit.noise import counters
from trainkit.parallel.grad_reduction import Reduction
from trainkit.post.adapters import lowrank
from trainkit.tools.testing import distribute_batch, train
from trainkit.tools.testing.builtin import (
    CAPACITY,
    CONFIG,
    ROWS,
    decoder_batch,
    decoder_of,
    decoder_plan,
    expert_loss,
    with_adapters,
    with_experts,
)
from trainkit.tools.testing.cases import LayoutCase
from trainkit.tools.testing.certificate import TIERS, format_text
from trainkit.tools.testing.certify import certify_together
from trainkit.tools.testing.train import Training
from trainkit.types import Layout

PATCH = pytest.MonkeyPatch()


def nothing(*_args, **_options):
    """Stand in for what a mistake leaves out."""


# ------------------------------------------------------------------------------------ tokens


def dropped_token_count(_ps):
    count = train.count_valid_tokens
    PATCH.setattr(train, "count_valid_tokens", lambda batches: count(batches[:-1]))


def mean_of_means(_ps):
    def averaged(loss):
        @declare_terms(*loss.terms)
        def mean(output, batch):
            total, terms = loss(output, batch)
            tokens = (batch["labels"] >= 0).sum().clamp(min=1)
            return total / tokens, {name: term / tokens for name, term in terms.items()}

        return mean

    wrap_loss(averaged)
    PATCH.setattr(train, "count_valid_tokens", lambda batches: torch.tensor(len(batches)))


def wrap_loss(wrapper):
    bind = train.make_forward_backward
    PATCH.setattr(
        train,
        "make_forward_backward",
        lambda stages, loss, **options: bind(stages, wrapper(loss), **options),
    )


def wrap_shard(change):
    shard = distribute_batch.shard_sequence
    PATCH.setattr(
        distribute_batch, "shard_sequence", lambda batch, **parts: change(shard(batch, **parts))
    )


def labels_shifted_after_sharding(_ps):
    def shift(batch):
        late = shift_labels(batch.input_ids, batch.document_ids)
        return attrs.evolve(batch, labels=torch.where(batch.labels >= 0, late, -100))

    wrap_shard(shift)


def positions_restarted_per_shard(_ps):
    def restart(batch):
        counts = [np.arange(n) for n in batch.spans.lengths]
        positions = torch.from_numpy(np.concatenate(counts)).view_as(batch.input_ids)
        return attrs.evolve(batch, position_ids=positions)

    wrap_shard(restart)


def documents_boundary_ignored(_ps):
    def ignore(batch):
        whole = spans_of_runs(np.zeros(batch.input_ids.shape, int))
        return attrs.evolve(batch, spans=whole)

    wrap_shard(ignore)


def last_microbatch_only(_ps):
    def of_the_last(loss):
        @declare_terms(*loss.terms)
        def last(output, batch):
            total, terms = loss(output, batch)
            return total * bool(batch["token_index"].max() >= CAPACITY * (ROWS - 1)), terms

        return last

    wrap_loss(of_the_last)


# ------------------------------------------------------------------------------------ gradients


def replicas_not_summed(_ps):
    run = Reduction._run_post_backward
    PATCH.setattr(
        Reduction, "_run_post_backward", lambda *args, now, **_: run(*args, now=now, last=False)
    )


def sequence_not_summed(_ps):
    PATCH.setattr(train, "sync_sp_grads", nothing)


def partial_not_summed(_ps):
    PATCH.setattr(trainkit.parallel.grad_reduction, "sum_partial_", nothing)


def tied_ends_not_summed(_ps):
    PATCH.setattr(trainkit.parallel.tied_embeddings, "_exchange_tied", nothing)


def averaged_instead_of_summed(_ps):
    from torch.distributed.fsdp import FSDPModule

    PATCH.setattr(FSDPModule, "set_gradient_divide_factor", nothing)
    PATCH.setattr(FSDPModule, "set_force_sum_reduction_for_comms", nothing)
    PATCH.setattr(trainkit.step, "check_sums", nothing)
    PATCH.setattr(trainkit.grads, "check_not_averaging", nothing)


def wrong_factor(axis, ps):
    step = train.clip_and_step

    def scaled(stages, optimizer, **options):
        for p in get_parameters(stages):
            if p.grad is not None:
                p.grad.mul_(getattr(ps, axis).count)
        return step(stages, optimizer, **options)

    PATCH.setattr(train, "clip_and_step", scaled)


def norm_counted_twice(ps):
    step = train.clip_and_step
    PATCH.setattr(trainkit.grads, "_refuse_sharded_axis", nothing)
    PATCH.setattr(
        train,
        "clip_and_step",
        lambda stages, optimizer, **options: step(
            attrs.evolve(stages, pp=ps.dp), optimizer, **options
        ),
    )


def replicas_counted_in_the_norm(_ps):
    def every_dimension(grad):
        return grad.device_mesh, tuple(range(grad.device_mesh.ndim))

    PATCH.setattr(trainkit.grads, "_find_mesh_dims", every_dimension)


# ------------------------------------------------------------------------- what a sum does not show


def moments_forgotten(_ps):
    """Leave parameters as they are, and halve a moment, after the last step."""
    step, calls = train.clip_and_step, []

    def forgetful(params, optimizer, **options):
        update = step(params, optimizer, **options)
        calls.append(update)
        if len(calls) == STEPS:
            for remembered in optimizer.state.values():
                remembered["exp_avg_sq"].div_(2)
        return update

    PATCH.setattr(train, "clip_and_step", forgetful)


def half_a_parameter(ps):
    """Lose the half of what a rank has of the largest parameters, when training is over."""
    part = train._get_shard

    def half(tensor):
        whole = part(tensor)
        few = ps.world.index == 0 and whole.values.ndim > 1
        return attrs.evolve(whole, values=whole.values[: len(whole.values) // 2]) if few else whole

    PATCH.setattr(train, "_get_shard", half)


def terms_lacking(_ps):
    PATCH.setattr(train, "average_terms", lambda *_: {})


def one_term_lacking(_ps):
    """Report all terms of the loss but one."""
    mean = train.average_terms

    def some(*sums):
        terms = mean(*sums)
        del terms["router_z"]
        return terms

    PATCH.setattr(train, "average_terms", some)


# ------------------------------------------------------------------------------------ experts


def experts_summed(times, _ps):
    """Sum the gradients of experts' weights, the only ones of three dimensions, so many times."""
    sync = train.sync_sp_grads

    def some(stages, axis):
        params = get_parameters(stages)
        sync([p for p in params if p.ndim < 3], axis)
        for _ in range(times):
            sync([p for p in params if p.ndim == 3], axis)

    PATCH.setattr(train, "sync_sp_grads", some)


def padding_counted(_ps):
    route = experts.biased_topk

    def route_all(logits, chosen, **how):
        return route(logits, chosen, **how | {"is_token": None})

    PATCH.setattr(experts, "biased_topk", route_all)


class OneOff(dict):
    """The choices of a tape, of which each layer finds those of the layer before."""

    def get(self, name):
        layers, number, mlp = name.split(".")
        return super().get(f"{layers}.{int(number) - 1}.{mlp}")


def tape_read_one_layer_off(_ps):
    PATCH.setattr(trainkit.models.call, "RoutingTape", lambda: RoutingTape(OneOff()))


def routers_counted_per_tp_rank(_ps):
    module = sys.modules["trainkit.parallel.tensor_parallel"]
    add = module.sum_forward
    PATCH.setattr(module, "sum_forward", lambda x, axis: add(x, axis) * axis.count)


# ------------------------------------------------------------------------------------ adapters


def adapters_not_summed(_ps):
    derive = lowrank.LowRank.derive_style
    without_sum = lambda style: attrs.evolve(derive(style), partial_grads=False)  # noqa: E731
    PATCH.setattr(lowrank.LowRank, "derive_style", staticmethod(without_sum))


def partial_summed_twice(_ps):
    add = trainkit.parallel.grad_reduction.sum_partial_

    def twice(model):
        add(model)
        add(model)

    PATCH.setattr(trainkit.parallel.grad_reduction, "sum_partial_", twice)


def parts_dropped_alike(_ps):
    drop = counters.dropout

    def alike(x, keys, *, offset, **how):
        return drop(x, keys, **how, offset=None if offset is None else 0)

    PATCH.setattr(lowrank.counters, "dropout", alike)


def length_of_a_part(_ps):
    PATCH.setattr(lowrank, "sum_forward", lambda x, _: x)


STEPS = 1
PLAIN = {
    "dp": LayoutCase(Layout(dp_shard=2)),
    "replica": LayoutCase(Layout(dp_replicate=2)),
    "tp": LayoutCase(Layout(tp=2)),
    "ring": LayoutCase(Layout(ring=2, fold_sp="none")),
    "ulysses": LayoutCase(Layout(ulysses=2, fold_sp="none")),
    "pp": LayoutCase(Layout(pp=2)),
}
MISTAKES = {
    "dropped token count": (dropped_token_count, "dp"),
    "mean of means": (mean_of_means, "dp"),
    "labels shifted after sharding": (labels_shifted_after_sharding, "ring"),
    "labels shifted after slicing": (labels_shifted_after_sharding, "ulysses"),
    "positions restarted per shard": (positions_restarted_per_shard, "ring"),
    "documents' boundary ignored": (documents_boundary_ignored, "ring"),
    "last microbatch only": (last_microbatch_only, "pp"),
    "replicas not summed": (replicas_not_summed, "replica"),
    "sequence not summed": (sequence_not_summed, "ring"),
    "partial gradients not summed": (partial_not_summed, "tp"),
    "tied ends not summed": (tied_ends_not_summed, "pp"),
    "averaged instead of summed": (averaged_instead_of_summed, "dp"),
    "norm counted twice": (norm_counted_twice, "dp"),
    "replicas counted in the norm": (replicas_counted_in_the_norm, "replica"),
    "whole parameters counted per tp rank": (replicas_counted_in_the_norm, "tp"),
    "moments forgotten": (moments_forgotten, "dp"),
    "terms lacking": (terms_lacking, "replica"),
    **{
        f"wrong factor on {axis}": (partial(wrong_factor, field), axis)
        for axis, field in {
            "dp": "dp_shard",
            "replica": "dp_replicate",
            "tp": "tp",
            "ring": "ring",
            "ulysses": "ulysses",
            "pp": "pp",
        }.items()
    },
}


OF_EXPERTS = {
    "experts not summed": (partial(experts_summed, 0), "ring"),
    "experts summed twice": (partial(experts_summed, 2), "ring"),
    "padding counted": (padding_counted, "dp"),
    "tape read one layer off": (tape_read_one_layer_off, "dp"),
    "routers counted per tp rank": (routers_counted_per_tp_rank, "tp"),
    "one term lacking": (one_term_lacking, "dp"),
}
OF_ADAPTERS = {
    "adapters not summed": (adapters_not_summed, "tp"),
    "partial gradients summed twice": (partial_summed_twice, "tp"),
    "parts dropped alike": (parts_dropped_alike, "tp"),
    "length of a part": (length_of_a_part, "tp"),
}
LACKING = {"half a parameter": (half_a_parameter, "dp")}
# A factor on one axis of data and on one of the model is seen as on any; and so is a shift.
BESIDE = {f"wrong factor on {axis}" for axis in ("replica", "ring", "ulysses", "pp")}
BESIDE |= {"labels shifted after slicing"}


def running(mistakes):
    """Return those of {name: mistake} that are planted here."""
    every = os.environ.get(WITH_ALL)
    return {note: planted for note, planted in mistakes.items() if every or note not in BESIDE}


def planting_plan(ps, case):
    PATCH.undo()
    with contextlib.suppress(KeyError):
        (MISTAKES | OF_EXPERTS | OF_ADAPTERS | LACKING)[case.note][0](ps)
    return decoder_plan(ps, case)


def subject(model, make_model, mistakes, *, plain, loss=next_token_linear, call=call_with_noise):
    """Return how a model is trained, and its cases: first those without a mistake."""
    mistakes = running(mistakes).items()
    planted = [attrs.evolve(PLAIN[axis], note=note) for note, (_, axis) in mistakes]
    training = Training(
        title=model,
        make_model=make_model,
        make_batches=decoder_batch,
        plan=planting_plan,
        steps=STEPS,
        loss=loss,
        call=call,
        tier=TIERS["fp64"],
    )
    return training, [*plain, *planted]


@pytest.fixture(scope="module")
def certificates():
    """Certify three models in one start of ranks, and return the certificates by name."""
    config = attrs.evolve(CONFIG, layers=2)
    tied, deeper = attrs.evolve(config, tied=True), attrs.evolve(config, layers=3)
    axes = {axis: PLAIN[axis] for _, axis in OF_EXPERTS.values()}
    found = certify_together(
        [
            subject("tied", partial(decoder_of, tied), MISTAKES | LACKING, plain=PLAIN.values()),
            subject("adapters", partial(with_adapters, config), OF_ADAPTERS, plain=[PLAIN["tp"]]),
            subject(
                "experts",
                partial(with_experts, deeper),
                OF_EXPERTS,
                plain=axes.values(),
                loss=expert_loss,
                call=call_routed,
            ),
        ],
        timeout=60.0,
    )
    return {certificate.title: certificate for certificate in found}


CAUGHT = [("tied", MISTAKES), ("adapters", OF_ADAPTERS), ("experts", OF_EXPERTS)]


@pytest.mark.parametrize(
    ("model", "note"),
    [
        pytest.param(model, note, marks=ONLY_ALL if note in BESIDE else ())
        for model, notes in CAUGHT
        for note in notes
    ],
)
def test_the_certificate_turns_red_for(certificates, model, note):
    certificate = certificates[model]
    (row,) = (row for row in certificate.rows if row.layout.endswith(f", {note}"))
    assert not row.error
    assert max(row.loss, row.grad_norm, row.parameters, row.state) > 1e6 * TIERS["fp64"].bound
    assert row in certificate.red


def test_ranks_that_do_not_hold_all_of_a_parameter_are_red(certificates):
    row = certificates["tied"].rows[-1]
    assert row.error == "the ranks do not hold all of 'embedding.weight'"
    assert row in certificates["tied"].red


@pytest.mark.parametrize("model", ["tied", "adapters", "experts"])
def test_it_is_green_without_a_mistake(certificates, model):
    certificate = certificates[model]
    sound = {row for row in certificate.rows if row.layout in {x.name for x in PLAIN.values()}}
    assert sound
    assert not sound & set(certificate.red), format_text(certificate)
