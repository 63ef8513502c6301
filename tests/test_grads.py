"""The norm counts every element once; a bad gradient changes nothing, bit for bit."""

import functools
import math

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

import trainkit as tk
from trainkit import health, optim
from trainkit.grads import find_nonfinite
from trainkit.optim.table import OPTIMIZERS
from trainkit.parallel.parameters import mark_tied_copy_
from trainkit.parallel.precision import set_grad_dtype
from trainkit.tools.testing import count_collectives, run_ranks
from trainkit.types import SOLO, Axis, Share

PP = tk.solo_parallel().pp


def parameters(*grads):
    made = [nn.Parameter(torch.ones_like(grad)) for grad in grads]
    for p, grad in zip(made, grads, strict=True):
        p.grad = grad.clone()
    return made


def optimizers():
    return {
        "fused adamw": functools.partial(torch.optim.AdamW, fused=True),
        "adamw": functools.partial(torch.optim.AdamW, fused=False, foreach=False),
        "sgd": functools.partial(torch.optim.SGD, momentum=0.9),
        "fused sgd": functools.partial(torch.optim.SGD, momentum=0.9, fused=True),
        "adagrad": torch.optim.Adagrad,
    }


def test_the_norm_is_torch_s():
    torch.manual_seed(0)
    params = parameters(torch.randn(3, 4), torch.randn(5))
    wanted = nn.utils.get_total_norm([p.grad for p in params])
    assert torch.equal(tk.grad_norm(params, axis=PP), wanted)


NORMS = (1.0, 2.0, 3.5, math.inf)


@pytest.mark.parametrize("norm_type", NORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_norm_and_the_clip_of_every_kind_are_torch_s(norm_type, dtype):
    torch.manual_seed(0)
    grads = [torch.randn(shape, dtype=dtype) for shape in ((3, 4), (0,), (5,), (33, 7))]
    wanted, (ours, theirs) = grads[:1] + grads[2:], (parameters(*grads), parameters(*grads))
    assert torch.equal(
        tk.grad_norm(ours, norm_type=norm_type), nn.utils.get_total_norm(wanted, norm_type)
    )
    del theirs[1]  # torch's largest element of none is an error
    nn.utils.clip_grad_norm_(theirs, 0.5, norm_type)
    tk.clip_grads_(ours, max_norm=0.5, norm_type=norm_type)
    del ours[1]
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(ours, theirs, strict=True))
    spoiled = parameters(torch.tensor([1.0, math.nan]), torch.tensor([math.inf]))
    assert tk.grad_norm(spoiled, norm_type=norm_type).isnan()


@pytest.mark.parametrize("norm_type", [0.0, -1.0, -math.inf, math.nan])
def test_a_norm_that_is_none_is_refused(norm_type):
    with pytest.raises(ValueError, match=f"norm_type must be above 0, .* got {norm_type}"):
        tk.grad_norm(parameters(torch.ones(1)), norm_type=norm_type)


@pytest.mark.usefixtures("verdict")
@pytest.mark.parametrize("norm_type", NORMS)
def test_a_group_with_a_norm_of_its_own_is_clipped_by_itself(norm_type):
    torch.manual_seed(0)
    grads = [torch.randn(3, 4).double(), torch.randn(5).double(), torch.randn(6).double()]
    grads += [torch.randn(2).double()]
    ours, theirs = parameters(*grads), parameters(*grads)
    groups = [{"params": ours[:1], "max_norm": 0.1}, {"params": ours[1:3], "max_norm": None}]
    groups += [{"params": [*ours[3:], nn.Parameter(torch.ones(1))], "max_norm": math.inf}]
    update = tk.clip_and_step(
        ours, torch.optim.SGD(groups), lr=1.0, max_norm=0.5, norm_type=norm_type
    )
    assert torch.equal(update.norm, nn.utils.get_total_norm(grads, norm_type))
    for part, limit in ((theirs[:1], 0.1), (theirs[1:3], 0.5), (theirs[3:], math.inf)):
        nn.utils.clip_grad_norm_(part, limit, norm_type)
    for p, wanted in zip(ours, theirs, strict=True):
        assert torch.equal(p, torch.ones_like(p) - wanted.grad)


@pytest.mark.usefixtures("verdict")
def test_a_bad_part_leaves_every_part_as_it_is_and_a_bad_limit_is_refused():
    params = parameters(torch.tensor([4.0]), torch.tensor([math.nan]))
    tk.clip_grads_(params, max_norm=1.0, groups=[{"params": params[1:], "max_norm": 1.0}])
    assert params[0].grad == 4
    for groups in ([{"params": params, "max_norm": 0.0}], [{"params": [], "max_norm": -1.0}]):
        with pytest.raises(ValueError, match="max_norm must be positive"):
            tk.clip_grads_(params, max_norm=1.0, groups=groups)


def test_parameters_without_gradient_count_as_zero():
    params = [*parameters(torch.tensor([3.0, 4.0])), nn.Parameter(torch.ones(2))]
    assert tk.grad_norm(params, axis=PP) == 5
    assert tk.grad_norm([params[1]], axis=PP) == 0


def test_bf16_gradients_are_accumulated_in_fp32():
    params = parameters(torch.full((1 << 16,), 1.0, dtype=torch.bfloat16))
    assert tk.grad_norm(params, axis=PP) == 256
    assert tk.grad_norm(params, axis=PP).dtype == torch.float32


@pytest.mark.usefixtures("verdict")
@pytest.mark.parametrize("max_norm", [0.5, 100.0, math.inf])
def test_clipping_is_torch_s_and_the_norm_is_the_one_before(max_norm):
    torch.manual_seed(0)
    grads = torch.randn(3, 4).double(), torch.randn(5).double()
    ours, theirs = parameters(*grads), parameters(*grads)
    wanted = nn.utils.clip_grad_norm_(theirs, max_norm)
    torch.optim.SGD(theirs, lr=0.1).step()
    sgd = torch.optim.SGD(ours, lr=7.0)
    found = tk.clip_and_step(ours, sgd, lr=0.1, max_norm=max_norm, axis=PP)
    assert torch.equal(found.norm, wanted)
    assert all(torch.allclose(a, b, rtol=1e-15) for a, b in zip(ours, theirs, strict=True))
    assert all(p.grad is None for p in ours)


def test_clipping_alone_scales_each_parameter_once_and_steps_nothing():
    torch.manual_seed(0)
    values = torch.randn(3, 4).double(), torch.randn(5).double()
    ours, theirs = parameters(*values), parameters(*values)
    wanted = nn.utils.clip_grad_norm_(theirs, 0.5)
    assert torch.equal(tk.clip_grads_([*ours, *ours], max_norm=0.5), wanted)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(ours, theirs, strict=True))
    assert all(torch.equal(p, torch.ones_like(p)) for p in ours)
    assert tk.grad_norm([*ours, *ours]) == tk.grad_norm(ours)


@pytest.mark.usefixtures("verdict")
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_clipping_alone_leaves_a_gradient_that_is_not_finite_as_it_is(value):
    params = parameters(torch.tensor([value, 2.0]))
    assert not torch.isfinite(tk.clip_grads_(params, max_norm=1.0))
    assert params[0].grad.tolist() == pytest.approx([value, 2.0], nan_ok=True)


def test_a_gradient_that_no_group_would_step_is_refused():
    held, lost, frozen, unused = parameters(*[torch.ones(2, n) for n in (2, 3, 4, 5)])
    frozen.requires_grad_(False)
    unused.grad = None
    sgd = torch.optim.SGD([held])
    with pytest.raises(ValueError, match=r"1 of 4 parameters have .* \(shapes \(2, 3\)\)"):
        tk.clip_and_step([held, lost, frozen, unused], sgd, lr=1.0, max_norm=None)
    assert lost.grad is not None
    assert torch.equal(held, torch.ones(2, 2))
    tk.clip_and_step([held, frozen, unused], sgd, lr=1.0, max_norm=None)
    assert not held.any()


def test_sparse_gradients_are_refused_in_words():
    model = nn.Embedding(4, 2, sparse=True)
    model(torch.tensor([1])).sum().backward()
    for function in (
        lambda: tk.grad_norm(model.parameters()),
        lambda: tk.clip_and_step(
            model.parameters(), torch.optim.SGD(model.parameters()), lr=1.0, max_norm=None
        ),
    ):
        with pytest.raises(ValueError, match=r"a parameter of shape \(4, 2\) .* sparse=False"):
            function()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_sparse_gradient_is_refused_by_the_name_of_its_parameter(name):
    model = nn.ModuleDict({"words": nn.Embedding(4, 2, sparse=True), "up": nn.Linear(2, 2)})
    optimizer = optim.make_optimizer([model], lr=0.1, optimizer=name)
    model["up"](model["words"](torch.tensor([1]))).sum().backward()
    before = [p.detach().clone() for p in model.parameters()]
    for step in (
        lambda: tk.clip_and_step(model.parameters(), optimizer, lr=0.1, max_norm=1.0),
        optimizer.step,
    ):
        message = r"the gradient of 'words.weight' of shape \(4, 2\) is sparse .* sparse=False"
        with pytest.raises(ValueError, match=message):
            step()
    if name != "muon":  # the optimizer of whose other matrices has stepped before
        assert all(torch.equal(p, x) for p, x in zip(model.parameters(), before, strict=True))


def test_parameters_may_come_as_a_generator():
    model = nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    optimizer = torch.optim.SGD(model.parameters())
    tk.clip_and_step(model.parameters(), optimizer, lr=0.1, max_norm=1.0)
    assert all(p.grad is None for p in model.parameters())


def test_a_group_s_rate_is_scaled():
    params = parameters(torch.ones(1), torch.ones(1))
    groups = [{"params": params[:1]}, {"params": params[1:], "lr_scale": 0.5}]
    tk.clip_and_step(params, torch.optim.SGD(groups), lr=0.5, max_norm=None, axis=PP)
    assert [p.item() for p in params] == [0.5, 0.75]


def state_of(optimizer):
    return [v.clone() for s in optimizer.state.values() for v in s.values() if v is not None]


@pytest.mark.usefixtures("verdict")
@pytest.mark.case("N2", "N3")
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", optimizers())
def test_a_norm_that_is_not_finite_changes_nothing(name, value):
    params = parameters(torch.ones(3), torch.ones(2))
    optimizer = optimizers()[name](params, lr=0.1)
    tk.clip_and_step(params, optimizer, lr=0.1, max_norm=1.0, axis=PP)
    before = [p.detach().clone() for p in params]
    moments = state_of(optimizer)
    for p in params:
        p.grad = torch.ones_like(p)
    params[1].grad[0] = value
    update = tk.clip_and_step(params, optimizer, lr=0.1, max_norm=1.0, axis=PP)
    assert not torch.isfinite(update.norm)
    assert not update.applied
    assert all(map(torch.equal, before, params))
    assert all(map(torch.equal, moments, state_of(optimizer)))
    assert all(p.grad is None for p in params)


@pytest.mark.usefixtures("verdict")
@pytest.mark.case("N1")
@pytest.mark.parametrize("value", [1.0, math.nan])
@pytest.mark.parametrize("name", optimizers())
def test_a_step_that_does_not_apply_changes_nothing_whatever_the_gradient(name, value):
    params = parameters(torch.ones(3), torch.ones(2))
    optimizer = optimizers()[name](params, lr=0.1, weight_decay=0.1)
    seen = []
    for applies in (True, False):
        before, moments = [p.detach().clone() for p in params], state_of(optimizer)
        for p in params:
            p.grad = torch.full_like(p, 1.0 if applies else value)
        update = tk.clip_and_step(
            params,
            optimizer,
            lr=0.1,
            max_norm=1.0,
            should_apply=lambda norm, applied=applies: seen.append(norm) or torch.tensor(applied),
        )
        assert seen[-1] is update.norm
        assert bool(update.applied) == applies
        assert all(map(torch.equal, before, params)) != applies
    assert all(map(torch.equal, moments, state_of(optimizer)))


@pytest.mark.usefixtures("verdict")
@pytest.mark.case("N1")
@pytest.mark.parametrize("name", optimizers())
def test_a_first_step_that_is_skipped_leaves_the_second_as_a_first(name):
    # A fused SGD that skips on the device begins its momentum with whatever the memory held.
    results = []
    for skips in (0, 2):
        params = parameters(torch.ones(1000))
        optimizer = optimizers()[name](params, lr=0.1)
        for skip in [True] * skips + [False, False]:
            rubbish = torch.full((1000,), 7.0)
            del rubbish  # what the next tensor of this size is likely to find
            params[0].grad = torch.full((1000,), math.nan if skip else 0.5)
            tk.clip_and_step(params, optimizer, lr=0.1, max_norm=None)
        results.append([params[0].detach(), *state_of(optimizer)])
    assert all(map(torch.equal, *results))


def test_skipping_by_a_factor_of_zero_is_no_skip():
    # The control: 0 times NaN is NaN.
    assert (torch.ones(1) - 0.0 * torch.tensor([math.nan])).isnan()


@pytest.mark.case("O5")
@pytest.mark.parametrize("max_norm", [0.0, -1.0, math.nan])
def test_a_max_norm_that_is_not_positive_is_refused(max_norm):
    params = parameters(torch.ones(1))
    with pytest.raises(ValueError, match="max_norm must be positive"):
        tk.clip_and_step(params, torch.optim.SGD(params), lr=1.0, max_norm=max_norm, axis=PP)
    assert params[0].grad is not None


def mixed_norm():
    """Return the norm over parameters that are sharded, replicated and plain at once."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    with tk.parallel_session(dp_replicate=2) as ps:
        mesh = ps.mesh["dp_replicate", "fsdp"]
        torch.manual_seed(0)
        values = [torch.randn(5, 3).double(), torch.randn(4).double(), torch.randn(2).double()]
        placements = [[Replicate(), Shard(0)], [Replicate(), Replicate()], None]
        params = []
        for value, placement in zip(values, placements, strict=True):
            whole = value if placement is None else distribute_tensor(value, mesh, placement)
            params.append(nn.Parameter(whole))
            params[-1].grad = whole.clone()
        norms = float(tk.grad_norm(params, axis=ps.pp)), float(nn.utils.get_total_norm(values))
        plain = parameters(*values)
        for p, value in zip(plain, values, strict=True):
            p.data = value.clone()
        optimizer = optim.adamw(params, lr=0.1)
        tk.clip_and_step(params, optimizer, lr=0.1, max_norm=None, axis=ps.pp)
        tk.clip_and_step(plain, optim.adamw(plain, lr=0.1, fused=False), lr=0.1, max_norm=None)
        whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in params]
        return *norms, all(
            torch.allclose(a, b, rtol=1e-14) for a, b in zip(whole, plain, strict=True)
        )


def test_replicas_are_counted_once_over_different_placements():
    for found, wanted, stepped in run_ranks(mixed_norm, 4):
        assert found == pytest.approx(wanted, rel=1e-14)
        assert stepped  # by an optimizer whose fused kernel would take only one kind


def partial_norm():
    from torch.distributed.tensor import DTensor, Partial

    with tk.parallel_session() as ps:
        p = nn.Parameter(torch.ones(2))
        p.grad = None
        partial = DTensor.from_local(torch.ones(2), ps.mesh["fsdp"], [Partial()])
        holder = nn.Parameter(partial)
        holder.grad = partial
        tk.grad_norm([holder], axis=ps.pp)


def test_a_gradient_that_was_never_reduced_is_refused():
    with pytest.raises(RuntimeError, match="never reduced"):
        run_ranks(partial_norm, 2)


def summed_gradients(bucket):
    from trainkit.parallel import grad_reduction

    grad_reduction._BUCKET_ELEMENTS = bucket
    with tk.parallel_session(dp_shard=1, ring=2, fold_sp="none") as ps:
        scale = ps.sp_unfolded.index + 1
        values = [torch.full((3,), 1.0), torch.full((2, 2), 2.0), torch.full((4,), 3.0)]
        params = parameters(*[scale * value for value in values])
        params += [nn.Parameter(torch.ones(2).double())]
        if ps.sp_unfolded.index == 0:
            params[-1].grad = torch.ones(2).double()
        tk.sync_sp_grads(params, ps.sp_unfolded)
        return [p.grad.flatten()[0].item() for p in params], ps.fsdp.count


@pytest.mark.parametrize("bucket", [4, 1 << 20])
def test_sequence_parallel_gradients_are_summed_in_buckets(bucket):
    # The last parameter has a gradient on one rank alone.
    for found in run_ranks(functools.partial(summed_gradients, bucket), 2):
        assert found == ([3.0, 6.0, 9.0, 1.0], 1)


def test_summing_gradients_copies_nothing_from_the_host(monkeypatch):
    # The device "meta" stands for an accelerator.
    with torch.device("meta"):
        params = parameters(torch.ones(3), torch.ones(2))
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *_, **__: None)
    made = []
    tensor = torch.tensor
    monkeypatch.setattr(torch, "tensor", lambda *args, **_: made.append(1) or tensor(*args))
    tk.sync_sp_grads(params, Axis("sp", Share(0, 2), group=object()))
    assert not made


def test_frozen_parameters_are_left_out():
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    assert tk.get_parameters([model]) == [model.weight]
    assert list(tk.get_named_parameters([model])) == ["weight", "bias"]


def norm_with_missing_gradients():
    """Return the norm over two meshes when one rank has no gradient for a parameter."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    with tk.parallel_session(dp_replicate=2) as ps:
        hybrid, flat = ps.mesh["dp_replicate", "fsdp"], ps.mesh["fsdp"]
        ones = torch.ones(4).double()
        whole = distribute_tensor(ones, hybrid, [Replicate(), Shard(0)])
        other = distribute_tensor(ones, flat, [Shard(0)])
        first, second = nn.Parameter(whole), nn.Parameter(other)
        if ps.world.index:
            first.grad = whole.clone()
        second.grad = other.clone()
        return float(tk.grad_norm([first, second], axis=ps.pp))


def test_a_gradient_that_one_rank_lacks_hangs_nobody():
    found = run_ranks(norm_with_missing_gradients, 4, timeout=20.0)
    assert found[2] == found[3] == pytest.approx(math.sqrt(8))


def test_gradients_of_two_dtypes_have_one_norm():
    params = parameters(torch.tensor([3.0]), torch.tensor([4.0]).double())
    assert tk.grad_norm(params) == 5


@pytest.mark.case("O5")
@pytest.mark.parametrize("lr", [math.nan, math.inf, -0.1])
def test_a_rate_that_is_no_rate_is_refused(lr):
    params = parameters(torch.ones(1))
    with pytest.raises(ValueError, match=f"lr must be finite and at least 0, got {lr}"):
        tk.clip_and_step(params, torch.optim.SGD(params), lr=lr, max_norm=None)
    assert params[0] == 1
    assert params[0].grad == 1


@pytest.mark.case("O5")
def test_parameters_that_are_frozen_or_have_no_gradient_stay_as_they_are():
    frozen, unused = nn.Parameter(torch.ones(1), requires_grad=False), nn.Parameter(torch.ones(1))
    for params in ([], [frozen], [unused], [frozen, unused, *parameters(torch.ones(1))]):
        optimizer = torch.optim.AdamW([*params, nn.Parameter(torch.ones(1))], fused=True)
        update = tk.clip_and_step(params, optimizer, lr=0.5, max_norm=1.0)
        assert update.norm == float(len(params) == 3)
        assert frozen == unused == 1
        assert all(p.grad is None for p in params)
        assert [p in optimizer.state for p in params] == [False, False, True][: len(params)]


@pytest.mark.usefixtures("verdict")
def test_skipping_leaves_no_mark_on_the_optimizer():
    params = parameters(torch.ones(1))
    optimizer = torch.optim.AdamW(params, fused=True)
    tk.clip_and_step(params, optimizer, lr=0.1, max_norm=None)
    assert not hasattr(optimizer, "found_inf")


def unused_stays_unused():
    with tk.parallel_session(dp_shard=1, ring=2, fold_sp="none") as ps:
        unused = nn.Parameter(torch.ones(2))
        tk.sync_sp_grads([unused, *parameters(torch.ones(1))], ps.sp_unfolded)
        return unused.grad is None


def test_a_parameter_without_gradient_on_any_rank_keeps_none():
    assert run_ranks(unused_stays_unused, 2) == [True, True]


def parameters_of_stage(ps):
    """Return a stage's parameters, sharded, replicated and plain, and all stages' gradients."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    torch.manual_seed(0)
    values = [torch.randn(5, 3).double(), torch.randn(4).double(), torch.randn(2, 6).double()]
    values += [torch.randn(1).double()]  # one of two ranks has an empty shard
    placements = [[[Shard(0)], None, [Replicate()]], [[Replicate()], [Shard(0)], None]]
    params = []
    for value, placement in zip(values, [*placements[ps.pp.index], [Shard(0)]], strict=True):
        grad = value * (1 + ps.pp.index)
        here = grad if placement is None else distribute_tensor(grad, ps.mesh["fsdp"], placement)
        params.append(nn.Parameter(torch.zeros_like(here)))
        params[-1].grad = here.clone()
    return params, values


def norms_over_stages():
    """Return norms over stages, and what one process finds for the same gradients."""
    with tk.parallel_session(pp=2) as ps:
        params, values = parameters_of_stage(ps)
        every, found = [value * scale for value in values for scale in (1, 2)], {}
        for kind in NORMS:
            norm = float(tk.grad_norm(params, axis=ps.pp, norm_type=kind))
            found[f"mixed, {kind}"] = (norm, get_norm(every, kind))
        own = params if ps.pp.index == 0 else []
        found["nothing to train"] = (float(tk.grad_norm(own, axis=ps.pp)), get_norm(values))
        for p in params if ps.pp.index else ():
            p.grad = None
        found["no gradient"] = (float(tk.grad_norm(params, axis=ps.pp)), get_norm(values))
        low = [nn.Parameter(torch.zeros(2, dtype=torch.float64 if ps.pp.index else torch.float32))]
        low[0].grad = torch.ones_like(low[0])
        found["two dtypes"] = (float(tk.grad_norm(low, axis=ps.pp)), 2.0)
        return found


def get_norm(values, norm_type=2.0):
    return float(nn.utils.get_total_norm(values, norm_type))


def test_the_norm_over_stages_is_that_of_one_process():
    for found in run_ranks(norms_over_stages, 4):
        for name, (norm, wanted) in found.items():
            assert norm == pytest.approx(wanted, rel=1e-14 if "mixed" in name else 1e-7), name


def clipped_by_group():
    """Return what is left of gradients clipped by group, and how many all-reduces that took."""
    with tk.parallel_session(pp=2) as ps:
        found = []
        for kind in NORMS:
            counts = []
            for own in (None, 0.25):  # without a limit of its own, then with one
                params, values = parameters_of_stage(ps)
                groups = [{"params": params[:2]}, {"params": params[2:], "max_norm": own}]
                clip = functools.partial(
                    tk.clip_grads_,
                    params,
                    max_norm=1.0,
                    axis=ps.pp,
                    norm_type=kind,
                    groups=groups,
                )
                ledger = count_collectives(clip, ps)
                counts.append([(row.axis, row.kind, row.count) for row in ledger.rows])
            assert (
                counts[0] == counts[1] == [("dp_shard", "all_reduce", 1), ("pp", "all_reduce", 1)]
            )
            whole = [value * (1 + ps.pp.index) for value in values]
            for part, limit in ((slice(0, 2), 1.0), (slice(2, 4), 0.25)):
                norm = get_norm([scale * x for x in values[part] for scale in (1, 2)], kind)
                for p, grad in zip(params[part], whole[part], strict=True):
                    left = p.grad.full_tensor() if hasattr(p, "full_tensor") else p.grad
                    wanted = grad * min(1.0, limit / (norm + 1e-6))
                    found.append(float((left - wanted).abs().max()))
            spoiled = params[3].grad.to_local()
            spoiled.fill_(math.nan)  # on the one rank that holds the element, of one stage
            if ps.pp.index:
                spoiled.fill_(0.0)
            found.append(0.0 if tk.grad_norm(params, axis=ps.pp, norm_type=kind).isnan() else 1.0)
        return found


def test_groups_are_clipped_apart_in_every_layout_and_for_no_more_collectives():
    for found in run_ranks(clipped_by_group, 4):
        assert max(found) < 1e-14


def test_a_tied_copy_is_not_counted_but_clipped_and_stepped():
    params = parameters(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.0]))
    mark_tied_copy_(params[1])
    assert tk.grad_norm(params) == 5
    sgd = torch.optim.SGD(params)
    assert tk.clip_and_step(params, sgd, lr=1.0, max_norm=1.0).norm == 5
    assert torch.equal(params[0], params[1])
    assert params[1].grad is None


@pytest.mark.case("N2")
def test_the_first_gradient_on_the_way_back_is_blamed_first():
    model = nn.Sequential(*[nn.Linear(2, 2, bias=False) for _ in range(6)])

    def spoil(grad):
        return grad * math.inf

    def replay():
        model(torch.ones(1, 2)).sum().backward()
        return {"loss": torch.ones(())}

    model[4].register_full_backward_hook(lambda _, grads, __: (spoil(grads[0]),))
    causes = [f"the gradient of {layer}.weight on rank 0" for layer in (3, 2, 1)]
    assert find_nonfinite(replay, [model], SOLO) == [*causes, "and 1 more"]
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.case("N2")
def test_what_does_not_come_again_is_said_to_be_finite_now():
    model, spoiled = nn.Linear(2, 1, bias=False), [math.nan, 1.0]

    def replay():
        (model(torch.ones(1, 2)).sum() * spoiled.pop()).backward()
        return {"loss": torch.ones(())}

    reason = "computed again, each rank's own numbers are finite"
    assert find_nonfinite(replay, [model], SOLO) == [reason]
    assert find_nonfinite(replay, [model], SOLO) == ["the gradient of weight on rank 0"]


@pytest.mark.case("N1")
def test_a_term_that_is_not_finite_is_named_before_the_gradients_that_follow_from_it():
    model = nn.Linear(2, 1, bias=False)

    def replay():
        (model(torch.ones(1, 2)).sum() * math.nan).backward()
        return {"loss": torch.tensor(math.nan), "z": torch.ones(()), "load": torch.ones(3)}

    assert find_nonfinite(replay, [model], SOLO) == ["the loss on rank 0"]


@pytest.mark.case("N2")
def test_a_replay_says_no_more_than_it_has_seen():
    parameter = nn.Linear(1, 1, bias=False)

    def replay():  # as compiled code may: no hook sees the gradient
        parameter.weight.grad = torch.full((1, 1), math.inf)
        return {"loss": torch.ones(())}

    reason = "the summed gradient of weight, held by rank 0"
    assert find_nonfinite(replay, [parameter], SOLO) == [reason]


def refused_by_one():
    """Return norms and parameters when rank 1 alone refuses a step, and when nobody does."""
    with tk.parallel_session(dp_replicate=2) as ps:
        found = []
        for refuser in (1, None):
            params = parameters(torch.tensor([3.0, 4.0]))
            applies = torch.tensor(ps.world.index != refuser)
            update = tk.clip_and_step(
                params,
                torch.optim.SGD(params),
                lr=1.0,
                max_norm=None,
                should_apply=lambda _, applied=applies: applied,
                world=ps.world,
            )
            found.append((float(update.norm), bool(update.applied), params[0].tolist()))
        return found


@pytest.mark.case("N1")
def test_what_one_rank_refuses_is_refused_by_all():
    (refused, taken), (own, also_taken) = run_ranks(refused_by_one, 2)
    assert refused == own == (5.0, False, [1.0, 1.0])
    assert taken == also_taken == (5.0, True, [-2.0, -3.0])


@pytest.mark.case("N2", "N3")
def test_a_norm_that_is_not_finite_is_refused_whatever_applies_says():
    params = parameters(torch.tensor([math.inf]))
    sgd, always = torch.optim.SGD(params), functools.partial(torch.ones_like, dtype=torch.bool)
    assert not tk.clip_and_step(params, sgd, lr=1.0, max_norm=None, should_apply=always).applied
    assert params[0] == 1


def steps_without_values(*, fused):
    """Take two steps of tensors that have no values, so that reading one on the host raises."""
    with FakeTensorMode():
        params, memory = [nn.Parameter(torch.ones(3))], {"losses": [2.0] * 20, "norms": [1.0] * 20}
        optimizer = torch.optim.AdamW(params, fused=fused)
        for _ in range(2):
            params[0].grad = torch.ones(3)
            applies = health.make_finite_check(
                torch.ones(()), memory, health.Policy(on_spike="skip"), tokens=torch.ones(())
            )
            update = tk.clip_and_step(params, optimizer, lr=0.1, max_norm=1.0, should_apply=applies)
            _ = ~update.applied


def test_with_a_fused_optimizer_the_host_waits_for_no_number():
    steps_without_values(fused=True)
    with pytest.raises(DataDependentOutputException):  # the control
        steps_without_values(fused=False)


@pytest.mark.parametrize("fused", [True, False])
def test_bf16_parameters_can_add_their_gradients_up_in_fp32(fused):
    found = []
    for dtype in (torch.bfloat16, torch.float32):
        p = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
        set_grad_dtype([p], dtype)
        for scale in (1.0, *[1 / 512] * 256):
            (p * scale).sum().backward()
        assert p.grad.dtype == dtype
        optimizer = torch.optim.AdamW([p], fused=fused)
        update = tk.clip_and_step([p], optimizer, lr=0.1, max_norm=None)
        found.append((float(update.norm), p.grad, p.grad_dtype, p.dtype))
        (p * 1.0).sum().backward()
        assert p.grad.dtype == dtype  # as before the step
    stalled, whole = found  # in bf16 1 + 1/512 is 1
    assert stalled == (pytest.approx(2**0.5), None, torch.bfloat16, torch.bfloat16)
    assert whole == (pytest.approx(1.5 * 2**0.5), None, torch.float32, torch.bfloat16)


def summed_in_fp32():
    with tk.parallel_session(dp_shard=1, ring=2, fold_sp="none") as ps:
        low = [nn.Parameter(torch.ones(2, dtype=torch.bfloat16)) for _ in range(3)]
        set_grad_dtype(low[1:])
        for p in low[:2] if ps.sp_unfolded.index else low:  # one rank lacks the third
            p.grad = torch.full((2,), 1 + 2.0**-8 if p is not low[0] else 1.0, dtype=p.grad_dtype)
        tk.sync_sp_grads(low, ps.sp_unfolded)
        return [(p.grad.dtype, p.grad[0].item()) for p in low]


def test_sums_over_ranks_keep_the_dtype_of_each_gradient():
    fine = 1 + 2.0**-8  # no number of bf16
    wanted = [(torch.bfloat16, 2.0), (torch.float32, 2 * fine), (torch.float32, fine)]
    assert run_ranks(summed_in_fp32, 2) == [wanted] * 2
