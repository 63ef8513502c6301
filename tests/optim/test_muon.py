"""Muon: the iteration, the step, and that no layout changes a bit of it."""

import copy
import math
import os
from functools import partial
from itertools import pairwise

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist
from every_pair import ONLY_ALL, WITH_ALL
from hypothesis import given
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

import trainkit as tk
from trainkit.losses import next_token_linear
from trainkit.mesh import axis_from_group
from trainkit.models import call_routed, call_with_noise
from trainkit.optim import make_optimizer, muon
from trainkit.optim.distributed_matrices import Grid, Matrix, assign_owners, plan_rounds
from trainkit.optim.groups import decay_groups
from trainkit.optim.muon import Muon, hidden_matrices, orthogonalize
from trainkit.tools.testing import run_ranks
from trainkit.tools.testing.builtin import (
    CONFIG,
    LATENT,
    MODELS,
    decoder_batch,
    decoder_plan,
    expert_loss,
)
from trainkit.tools.testing.cases import LayoutCase
from trainkit.tools.testing.certificate import format_text
from trainkit.tools.testing.certify import certify
from trainkit.types import Layout, TrainState
from trainkit.weights.checkpoint.load_targets import predict_state


def drawn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def iterated(values, steps=5):
    """What the iteration makes of singular values."""
    for _ in range(steps):
        values = 3.4445 * values - 4.775 * values**3 + 2.0315 * values**5
    return values


def by_svd(matrix, steps=5):
    """Return the orthogonalised matrix another way: by its singular values."""
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    return u * iterated(s / s.norm(), steps) @ v


def far(found, wanted):
    return float((found - wanted).abs().max() / wanted.abs().max())


# ------------------------------------------------------------------------------- orthogonalising


@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 99), st.floats(1e-3, 1e6))
def test_singular_values_come_near_to_1_whatever_the_shape_and_the_size(rows, columns, seed, size):
    matrix = size * drawn(rows, columns, seed=seed)
    found = orthogonalize(matrix)
    assert far(found, by_svd(matrix)) < 1e-9
    values = torch.linalg.svdvals(matrix)
    ends = torch.linalg.svdvals(found)[values >= 2e-3 * values.norm()]
    assert ends.min() > 0.68
    assert ends.max() < 1.21
    assert far(orthogonalize(matrix.mT), found.mT) < 1e-9


def test_a_batch_gives_the_numbers_of_each_alone_in_the_dtype_that_is_asked_for():
    for shape in ((3, 2, 8, 24), (5, 33, 7), (2, 64, 64)):
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            batch = drawn(*shape).to(dtype)
            found = orthogonalize(batch).flatten(0, -3)
            each = torch.stack([orthogonalize(x) for x in batch.flatten(0, -3)])
            torch.testing.assert_close(found, each)
            assert found.dtype == dtype
            if dtype == torch.float64:  # equal, but for the order of sums, which is the processor's
                assert far(found, each) < 1e-12
    wanted = by_svd(drawn(16, 64))
    for dtype, least, most in ((torch.float32, 1e-8, 1e-4), (torch.bfloat16, 1e-3, 1e-1)):
        assert least < far(orthogonalize(drawn(16, 64), dtype=dtype), wanted) < most
    assert far(orthogonalize(drawn(16, 64).float()).double(), wanted) < 1e-4


def test_zeros_stay_zeros_and_an_orthogonal_matrix_stays_itself_but_for_a_factor():
    assert not orthogonalize(torch.zeros(2, 3, 4)).any()
    q = torch.linalg.qr(drawn(6, 6)).Q
    assert far(orthogonalize(q), q * iterated(torch.tensor(6**-0.5, dtype=torch.float64))) < 1e-12
    assert orthogonalize(torch.full((2, 2), 1e-12)).abs().max() < 1e-2


# ------------------------------------------------------------------------------------- the step


SCALES = {
    "original": lambda r, c: max(1, r / c) ** 0.5,
    "match_rms": lambda r, c: 0.2 * max(r, c) ** 0.5,
}


def plain_step(p, g, memory, group):
    """One step as others write it: sums in place of means, and singular values."""
    momentum, lr = group["momentum"], group["lr"]
    memory.mul_(momentum).add_(g)
    mixed = g + momentum * memory if group["nesterov"] else memory
    update = SCALES[group["scale"]](*p.shape) * by_svd(mixed, group["steps"])
    decayed = (1 - lr * group["weight_decay"]) * p
    if group["cautious"]:
        decayed = torch.where(update * p >= 0, decayed, p)
    return decayed - lr * update


FORMS = {
    "usual": Muon,
    "no nesterov, other scale": partial(Muon, nesterov=False, scale="match_rms", momentum=0.8),
    "decay, three steps": partial(Muon, weight_decay=2.0, steps=3),
    "cautious decay": partial(Muon, weight_decay=2.0, cautious=True),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (3, 6, 4)])
def test_is_the_formula_in_either_convention_of_momentum(form, shape):
    p = nn.Parameter(drawn(*shape))
    optimizer = form([p], lr=1.0)
    copies = list(p.detach().clone().view(-1, *shape[-2:]))
    memories = [torch.zeros_like(x) for x in copies]
    for step in range(3):
        p.grad = drawn(*shape, seed=step + 1)
        (group,) = optimizer.param_groups
        group["lr"] = 0.1 / (step + 1)
        grads = p.grad.view(-1, *shape[-2:])
        copies = [plain_step(*x, group) for x in zip(copies, grads, memories, strict=True)]
        optimizer.step()
    assert far(p.detach(), torch.stack(copies).view(shape)) < 1e-10


PARTS = {
    "one below the other": ((4, 2), -2, [[0, 1, 2, 3], [4, 5]]),
    "in turns": ((1, 1), -2, [[0, 2, 4], [1, 3, 5]]),
    "of each head": ((2, 1), -2, [[0, 1, 3, 4], [2, 5]]),
    "columns": ((3, 1), -1, [[0, 1, 2], [3]]),
}


@pytest.mark.parametrize(("parts", "dim", "indices"), PARTS.values(), ids=PARTS)
def test_what_is_fused_is_orthogonalised_part_by_part(parts, dim, indices):
    p = nn.Parameter(drawn(6, 4))
    before = p.detach().clone()
    p.grad = drawn(6, 4, seed=1)
    Muon([p], lr=1.0, parts=parts, parts_dim=dim).step()
    for index in map(torch.tensor, indices):
        part = p.grad.index_select(dim, index)
        wanted = SCALES["original"](*part.shape) * by_svd(part)
        assert far((before - p.detach()).index_select(dim, index), wanted) < 1e-10


def test_descends_and_torchs_own_goes_the_same_way():
    target = drawn(8, 5)
    params = [nn.Parameter(torch.zeros(8, 5)) for _ in range(2)]
    ours = Muon(params[:1], lr=1.0, dtype="bfloat16", weight_decay=0.1)
    theirs = torch.optim.Muon(params[1:], lr=1.0, weight_decay=0.1)
    for step in range(60):
        for optimizer, p in zip((ours, theirs), params, strict=True):
            optimizer.param_groups[0]["lr"] = 0.3 * (1 - step / 60)
            p.grad = p.detach() - target.float()
            optimizer.step()
        if step == 0:
            assert far(*(p.detach() for p in params)) < 2e-2
    assert all(far(p.detach().double(), target) < 0.15 for p in params)


def test_a_step_that_is_refused_on_the_device_changes_no_bit(monkeypatch):
    monkeypatch.setattr("trainkit.grads.can_read_values", lambda _: False)
    p = nn.Parameter(drawn(4, 3))
    optimizer = Muon([p], lr=0.1)
    for step in range(3):
        before, memory = p.detach().clone(), optimizer.state[p].get("momentum_buffer")
        memory = torch.zeros(4, 3) if memory is None else memory.clone()
        p.grad = drawn(4, 3, seed=step + 1) * (math.nan if step < 2 else 1)
        update = tk.clip_and_step([p], optimizer, lr=0.1, max_norm=None)
        assert p.grad is None
        assert bool(update.applied) == (step == 2)
        assert torch.equal(p, before) == (step < 2)
        assert torch.equal(optimizer.state[p]["momentum_buffer"], memory.double()) == (step < 2)


def step_without_values(*, whole):
    """Step matrices that have no values on two ranks that are not there: no number can be read."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (2,))
        muon.list_boxes(spread(torch.ones(4, 2), mesh, [Shard(0)]))  # known: torch asks the host
        with FakeTensorMode():
            params = [nn.Parameter(spread(torch.ones(4, 2), mesh, [Shard(0)])) for _ in range(3)]
            optimizer = Muon([*params, nn.Parameter(torch.ones(2, 2))], lr=0.1)
            for p in optimizer.param_groups[0]["params"][: 4 if whole else 2]:
                p.grad = p.detach()
            tk.clip_and_step(params, optimizer, lr=0.1, max_norm=1.0)
    finally:
        dist.destroy_process_group()


def test_the_host_waits_for_no_number_unless_a_gradient_is_missing():
    step_without_values(whole=True)
    with pytest.raises(DataDependentOutputException):  # the control
        step_without_values(whole=False)


def test_a_gradient_scaler_of_torchs_is_undone():
    params = [nn.Parameter(drawn(4, 3, dtype=torch.float32)) for _ in range(2)]
    scaled, plain = (Muon([p], lr=0.1) for p in params)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
    for _ in range(3):
        scaler.scale((params[0] ** 3).sum()).backward()
        (params[1] ** 3).sum().backward()
        scaler.step(scaled)
        scaler.update()
        plain.step()
        for p in params:
            p.grad = None
    assert far(*(p.detach() for p in params)) < 1e-6


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: Muon([p], lr=-1.0), "lr must be .* got -1.0"),
        (lambda p: Muon([p], lr=0.1, weight_decay=math.inf), "weight_decay must be"),
        (lambda p: Muon([p], lr=0.1, momentum=1.0), "momentum must be"),
        (lambda p: Muon([p], lr=0.1, steps=0), "steps must be"),
        (lambda p: Muon([p], lr=0.1, scale="other"), 'scale must be "original" or "match_rms"'),
        (lambda p: Muon([p], lr=0.1, dtype="float16"), "dtype must be"),
        (lambda p: Muon([p], lr=0.1, parts_dim=0), "parts_dim must be"),
        (lambda p: Muon([p], lr=0.1, parts=(1, 0)), "parts must be"),
        (
            lambda p: Muon([p], lr=0.1, parts=(3, 2)),
            r"parts \(3, 2\) sum to 5, .* dimension -2 .* \(4, 2\)",
        ),
        (lambda p: Muon([p[0]], lr=0.1), r"parameters must be matrices.* shape \(2,\)"),
    ],
)
def test_refuses_bad_values_by_name(make, message):
    with pytest.raises(ValueError, match=f"^Muon: {message}"):
        make(torch.ones(4, 2))


# ----------------------------------------------------------------------------------- a checkpoint


def test_resumes_bit_for_bit_through_a_checkpoint(tmp_path):
    def made():
        model = nn.ModuleDict(
            {"fused": nn.Linear(4, 6, bias=False), "up": nn.Linear(4, 5, bias=False)}
        )
        with torch.no_grad():
            for i, p in enumerate(model.parameters()):
                p.copy_(drawn(*p.shape, seed=i))
        fused = {"params": [model["fused"].weight], "parts": (4, 2)}
        return model, Muon([fused, {"params": [model["up"].weight], "momentum": 0.8}], lr=0.1)

    def go_on(model, optimizer, steps):
        for step in steps:
            for i, p in enumerate(model.parameters()):
                p.grad = drawn(*p.shape, seed=10 * step + i).float()
            tk.clip_and_step([*model.parameters()], optimizer, lr=0.1 / (1 + step), max_norm=1.0)
            assert all(p.grad is None for p in model.parameters())

    with tk.parallel_session() as ps:
        model, optimizer = made()
        go_on(model, optimizer, range(2))
        tk.save_checkpoint(tmp_path, TrainState(step=2), [model], optimizer, ps)
        go_on(model, optimizer, range(2, 4))
        other, resumed = made()
        go_on(other, resumed, range(1))
        assert tk.resume(tmp_path, TrainState(), [other], resumed, ps).step == 2
        go_on(other, resumed, range(2, 3))
        resumed.load_state_dict(resumed.state_dict())  # makes new groups
        copy.deepcopy(resumed).step()
        go_on(other, resumed, range(3, 4))
        pairs = (model, optimizer), (other, resumed)
        hashes = [tk.state_hash(TrainState(), [m], o, ps) for m, o in pairs]
        assert hashes[0] == hashes[1]
        expected = predict_state([model], optimizer)
        assert [{*x} for x in expected.values()] == [{"momentum_buffer"}] * 2


# --------------------------------------------------------------------------------------- dealing


@given(st.lists(st.integers(1, 50), max_size=20), st.integers(1, 5))
def test_work_is_distributed_evenly(costs, ranks):
    owners = assign_owners(costs, ranks)
    loads = [sum(c for c, o in zip(costs, owners, strict=True) if o == r) for r in range(ranks)]
    best = max([sum(costs) / ranks, *costs], default=0)
    assert max(loads) <= 4 / 3 * best + max(costs, default=0) / 3
    assert sum(loads) == sum(costs)


def rows_on(ranks, *, rows=4):
    """Return a matrix whose rows are sharded over groups of ranks that hold copies."""
    each = rows // len(ranks)
    boxes = {r: (i * each, each, 0, 2) for i, holders in enumerate(ranks) for r in holders}
    return Matrix((rows, 2), boxes, 1, 8 * rows)


def hops_of(ranks, *, here=0):
    """Return along which mesh dimensions of 2 x 2 ranks a matrix travels, there and back."""
    (only,) = plan_rounds([rows_on(ranks)], Grid((2, 2), here, ("outer", "inner")), bucket_bytes=99)
    return [hop.group for hop in only.gather], [hop.group for hop in only.scatter]


def test_parts_travel_no_farther_than_they_must():
    assert hops_of([[0], [1], [2], [3]]) == (["inner", "outer"], ["outer", "inner"])
    for rank in range(4):  # copies along the outer dimension: one set of them sends
        there, back = hops_of([[2, 0], [3, 1]], here=rank)
        assert there == (["inner"] if rank < 2 else [])
        assert back == (["outer", "inner"] if rank in (0, 2) else ["inner"])
    whole = [rows_on([[0]]), rows_on([[3]])]
    for rank in (0, 3):
        (only,) = plan_rounds(whole, Grid((2, 2), rank, ("outer", "inner")), bucket_bytes=99)
        assert (only.owned, only.gather, only.scatter) == ([rank // 3], [], [])


@given(st.lists(st.integers(1, 9), min_size=1, max_size=9), st.integers(1, 200))
def test_a_rank_puts_no_more_together_than_it_may(rows, most):
    matrices = [rows_on([[0], [1]], rows=2 * n) for n in rows]
    plans = [plan_rounds(matrices, Grid((2,), rank, (None,)), bucket_bytes=most) for rank in (0, 1)]
    assert len(plans[0]) == len(plans[1])
    assert sorted(i for plan in plans for x in plan for i in x.owned) == [*range(len(rows))]
    for plan in plans:
        held = [[matrices[i].num_bytes for i in x.owned] for x in plan]
        assert all(sum(sizes) <= most or len(sizes) == 1 for sizes in held)
        assert all(sum((*a, *b)) > most for a, b in pairwise(held) if a and b) or len(held) < 2


MESHES = {
    "rows, unevenly": ((4,), (10, 6), [Shard(0)]),
    "rows, fewer than ranks": ((4,), (3, 6), [Shard(0)]),
    "columns": ((4,), (6, 8), [Shard(1)]),
    "experts": ((4,), (8, 6, 4), [Shard(0)]),
    "rows of experts": ((4,), (3, 8, 4), [Shard(1)]),
    "rows of rows": ((2, 2), (6, 4), [_StridedShard(0, split_factor=2), Shard(0)]),
    "rows and columns": ((2, 2), (5, 6), [Shard(0), Shard(1)]),
    "copies of rows": ((2, 2), (6, 4), [Replicate(), Shard(0)]),
    "experts and copies": ((2, 2), (4, 6, 4), [Shard(0), Replicate()]),
    "copies": ((2, 2), (6, 6), [Replicate(), Replicate()]),
    "plain copies": (None, (6, 6), []),
}


def own_part(whole, mesh, placements):
    """Cut as tensor() and fsdp() do: what they cut alike, the last mesh dimension first."""
    order = reversed([*enumerate(placements)])
    if not any(isinstance(x, _StridedShard) for x in placements):
        order = enumerate(placements)
    for dim, placement in order:
        if not placement.is_replicate():
            count, index = mesh.size(dim), mesh.get_local_rank(dim)
            parts = whole.chunk(count, placement.dim)
            whole = parts[index] if index < len(parts) else whole.narrow(placement.dim, 0, 0)
    return whole.contiguous()


def spread(whole, mesh, placements):
    if mesh is None:
        return whole
    local = own_part(whole, mesh, placements)
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def set_gradient(p, whole, mesh, placements, *, missing):
    """Set a gradient; where `missing` says so on rank 1 there is none, and zeros in the whole."""
    if not missing:
        p.grad = spread(whole, mesh, placements)
        return whole
    offset, shape = muon.list_boxes(p)[1]
    whole = whole.clone()
    whole[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))] = 0
    p.grad = None if dist.get_rank() == 1 else spread(whole, mesh, placements)
    return whole


def steps_apart(dtype, make):
    """Step parameters on all meshes, and full ones; return the names of those that differ."""
    meshes = {sizes: init_device_mesh("cpu", sizes) for sizes in ((4,), (2, 2))} | {None: None}
    known = [(name, meshes[s], shape, x) for name, (s, shape, x) in MESHES.items()]
    wholes = [nn.Parameter(drawn(*x[2], seed=i).to(dtype)) for i, x in enumerate(known)]
    parts = [
        nn.Parameter(spread(whole.detach().clone(), mesh, placements))
        for whole, (_, mesh, _, placements) in zip(wholes, known, strict=True)
    ]
    never = nn.Parameter(spread(torch.ones(4, 4), meshes[4,], [Shard(0)]))
    alone = make(wholes)
    distributed = make([*parts, never], axis=axis_from_group(dist.group.WORLD))
    for step in range(2):
        for i, (p, whole, x) in enumerate(zip(parts, wholes, known, strict=True)):
            missing = step == 1 and x[0] in ("rows, unevenly", "experts")
            gradient = drawn(*x[2], seed=99 + i + 20 * step).to(dtype)
            whole.grad = set_gradient(p, gradient, x[1], x[3], missing=missing)
        alone.step()
        distributed.step()
    assert (never.to_local() == 1).all()
    assert never not in distributed.state
    found = []
    for p, whole, (name, mesh, _, placements) in zip(parts, wholes, known, strict=True):
        own = p.to_local() if mesh else p
        memory = distributed.state[p]["momentum_buffer"]
        assert getattr(memory, "placements", None) == getattr(p, "placements", None)
        if not torch.equal(own, own_part(whole, mesh, placements)):
            found.append(name)
    return found


def costs_of(call):
    """Return what this rank has orthogonalised meanwhile."""
    costs, real = [], muon.orthogonalize

    def counted(x, **options):
        costs.append(
            x.shape[:-2].numel()
            * muon._count_multiplications(*x.shape[-2:], {"parts": None, "parts_dim": -2})
        )
        return real(x, **options)

    muon.orthogonalize = counted
    call()
    muon.orthogonalize = real
    return sum(costs)


def shares_of_work():
    """Return what each rank computes of equal matrices that all hold parts of, and of copies."""
    mesh = init_device_mesh("cpu", (4,))
    params = {"copies": [nn.Parameter(drawn(6, 6)) for _ in range(8)]}
    params["rows"] = [nn.Parameter(spread(drawn(8, 4), mesh, [Shard(0)])) for _ in range(8)]
    found = {}
    for name, members in params.items():
        for p in members:
            p.grad = torch.ones_like(p)
        optimizer = Muon(members, lr=0.1, axis=axis_from_group(dist.group.WORLD))
        found[name] = costs_of(optimizer.step)
    return found


COLUMNS = partial(Muon, lr=0.1, parts=(1, 1), parts_dim=-1, weight_decay=0.5, cautious=True)
OPTIONS = {
    "usual": (torch.float64, partial(Muon, lr=0.1)),
    "columns, small buckets": (torch.float32, partial(COLUMNS, bucket_bytes=400)),
    "bf16": (torch.float32, partial(Muon, lr=0.1, dtype="bfloat16", nesterov=False)),
}


def in_all_layouts():
    failed = {name: steps_apart(dtype, make) for name, (dtype, make) in OPTIONS.items()}
    return {name: meshes for name, meshes in failed.items() if meshes}, shares_of_work()


def test_no_layout_changes_a_bit_and_each_rank_does_its_share():
    """What torch.optim.Muon does not keep: on two shards its updates are 2e-2 off one process.

    It takes the norm and the products of the whole matrix, as it should, but in bf16 and with sums
    over halves, whose rounding five steps amplify: with its own iteration in fp64 the same two
    shards are 5e-15 off, and a norm or products of the shards alone would be 0.3 to 0.6 off.
    """
    results = run_ranks(in_all_layouts, 4)
    assert [failed for failed, _ in results] == [{}] * 4
    for name, whole in (("copies", 8 * (36 * 18)), ("rows", 8 * (16 * 20))):
        assert [shares[name] for _, shares in results] == [whole / 4] * 4, name


# ------------------------------------------------------------------------------- whole trainings


def by_muon(stages, axis):
    """Return Muon for hidden matrices and AdamW for the rest, as one."""
    return make_optimizer(
        stages,
        lr=1e-2,
        optimizer="muon",
        weight_decay=0.1,
        options={"bucket_bytes": 5000},
        axis=axis,
    )


TRAININGS = {
    "decoder with experts and latents": (
        expert_loss,
        call_routed,
        [
            LayoutCase(Layout(dp_shard=2, tp=2)),
            LayoutCase(Layout(dp_replicate=2, dp_shard=2, ep=2)),
            *([LayoutCase(Layout(dp_shard=4, ep=2))] if os.environ.get(WITH_ALL) else []),
        ],
    ),
    "tied decoder": (
        next_token_linear,
        call_with_noise,
        [LayoutCase(Layout(pp=2, dp_shard=2)), LayoutCase(Layout(dp_replicate=2, tp=2))],
    ),
}


@pytest.mark.parametrize(
    "model",
    ["decoder with experts and latents", pytest.param("tied decoder", marks=ONLY_ALL)],
)
def test_trains_to_the_numbers_of_one_process(model):
    loss, call, cases = TRAININGS[model]
    found = certify(
        MODELS[model],
        decoder_batch,
        cases,
        loss=loss,
        call=call,
        plan=decoder_plan,
        optimizer=by_muon,
        steps=2,
    )
    assert found.ok, "\n".join([format_text(found), *(row.traceback for row in found.red)])


# -------------------------------------------------------------------------------- which matrices


def test_the_hidden_matrices_of_a_decoder():
    for model, config in (("tied decoder", CONFIG), ("decoder with experts and latents", LATENT)):
        with torch.device("meta"):
            made = MODELS[model]()
        found = hidden_matrices([made])
        left = {name.rpartition(".")[0] for name, p in made.named_parameters() if name not in found}
        inside = {name.split(".", 2)[2] for name in left if name.startswith("layers")}
        assert {name for name in left if "norm" not in name} - {"head", "embedding"} <= {
            f"layers.{i}.mlp.{x}" for i in range(config.layers) for x in ("router", "shared_gate")
        }
        routing = {"mlp.router", "mlp.shared_gate"} if "experts" in model else set()
        assert {name for name in inside if "norm" not in name} == routing
        parts = {name.rpartition(".")[0][9:]: x for name, x in found.items() if x is not None}
        assert parts == ({"attention.wkv": (10, 6)} if "latents" in model else {})


def test_biases_of_experts_are_no_matrices_and_do_not_decay():
    with torch.device("meta"):
        model = MODELS["decoder with experts and sinks"]()
    biases = {name for name, _ in model.named_parameters() if name.endswith("bias")}
    assert "layers.0.mlp.experts.down_bias" in biases
    assert not biases & hidden_matrices([model]).keys()
    matrices, vectors = decay_groups(model.named_parameters(), weight_decay=0.1)
    assert not biases & {*matrices["param_names"]}
    assert biases <= {*vectors["param_names"]}


class Others(nn.Module):
    """What a model of others' may hold: a tied head, a router, a stack of experts."""

    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(10, 32)
        self.conv = nn.Conv1d(3, 4, 5)
        self.gate_proj = nn.Linear(32, 64)
        self.experts = nn.Parameter(torch.zeros(4, 8, 8))
        self.gate = nn.Linear(32, 3)
        self.norm = nn.LayerNorm(32)
        self.lora = nn.Linear(32, 2, bias=False).requires_grad_(requires_grad=False)
        self.reader = nn.Linear(32, 10)
        self.to_vocabulary = nn.Linear(32, 10)

    def get_output_embeddings(self):
        return self.to_vocabulary


def test_the_hidden_matrices_of_a_model_of_others():
    assert [*hidden_matrices([Others()])] == ["experts", "gate_proj.weight", "reader.weight"]
    tied = Others()
    tied.reader.weight = tied.wte.weight
    assert [*hidden_matrices([tied])] == ["experts", "gate_proj.weight"]
    headed = nn.ModuleDict(
        {"head": nn.Linear(2, 3), "block": nn.ModuleDict({"head": nn.Linear(2, 2)})}
    )
    assert [*hidden_matrices([headed])] == ["block.head.weight"]
