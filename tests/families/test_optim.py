"""AdamW's options, and parameter groups; what all optimizers promise is in tests/optim."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from trainkit.grads import clip_and_step
from trainkit.optim import Lion, ScheduleFree, adamw, combine_optimizers, decay_groups
from trainkit.tools.testing import run_ranks


def plain_adamw(params, gradients, moments, step, *, lr, betas, eps, weight_decay):
    """Step `step` (from 1) of AdamW as the paper has it."""
    for p, g, state in zip(params, gradients, moments, strict=True):
        state[0] = betas[0] * state[0] + (1 - betas[0]) * g
        state[1] = betas[1] * state[1] + (1 - betas[1]) * g * g
        first = state[0] / (1 - betas[0] ** step)
        second = state[1] / (1 - betas[1] ** step)
        p.sub_(lr * weight_decay * p + lr * first / (second.sqrt() + eps))


OPTIMIZERS = {  # each with the formula of its step
    "adamw": (
        partial(adamw, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0),
        partial(plain_adamw, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0),
    ),
    "adamw, decay": (
        partial(adamw, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.3),
        partial(plain_adamw, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.3),
    ),
    "adamw, not fused": (
        partial(adamw, fused=False, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1),
        partial(plain_adamw, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1),
    ),
}
each = pytest.mark.parametrize(("make", "plain"), OPTIMIZERS.values(), ids=OPTIMIZERS.keys())


def make_params(dtype=torch.float64):
    draw = torch.Generator().manual_seed(0)
    shapes = [(4, 3), (5,), ()]
    return [nn.Parameter(torch.randn(shape, generator=draw, dtype=dtype)) for shape in shapes]


def bowl(params):
    """A quadratic whose curvature differs from tensor to tensor; its minimum is at 1."""
    return sum((i + 1) * (p - 1).square().sum() for i, p in enumerate(params))


def step(params, optimizer):
    optimizer.zero_grad()
    loss = bowl(params)
    loss.backward()
    optimizer.step()
    return loss.item()


@each
def test_is_the_formula(make, plain):
    params, copies = make_params(), [p.detach().clone() for p in make_params()]
    moments = [[torch.zeros_like(p), torch.zeros_like(p)] for p in copies]
    optimizer = make(params, lr=0.01)
    for count in range(1, 6):
        optimizer.param_groups[0]["lr"] = lr = 0.01 / count
        gradients = torch.autograd.grad(bowl(params), params)
        step(params, optimizer)
        plain(copies, gradients, moments, count, lr=lr)
        for p, want in zip(params, copies, strict=True):
            assert (p - want).abs().max() <= 1e-12 * want.abs().max()


def test_adamw_takes_a_generator_and_groups():
    model = nn.Linear(3, 2)
    assert len(adamw(model.parameters(), lr=0.1).param_groups[0]["params"]) == 2
    optimizer = adamw(decay_groups(model.named_parameters(), weight_decay=0.2), lr=0.1)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.2, 0.0]
    assert all(group["fused"] and group["betas"] == (0.9, 0.95) for group in optimizer.param_groups)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda params: adamw(params[:0], lr=0.1), "at least one parameter"),
        (lambda params: adamw(params, lr=-1.0), "lr must be .* got -1.0"),
        (lambda params: adamw(params, lr=float("nan")), "lr must be .* got nan"),
        (lambda params: adamw(params, lr=0.1, eps=-1e-8), "eps must be"),
        (lambda params: adamw(params, lr=0.1, weight_decay=float("inf")), "weight_decay must be"),
        (
            lambda params: adamw(params, lr=0.1, betas=(0.9, 1.0)),
            r"betas\[1\] must be .* got 1.0",
        ),
        (lambda params: adamw(params, lr=0.1, betas=(0.9,)), "betas must be two"),
    ],
)
def test_adamw_refuses_bad_values_by_name(make, message):
    with pytest.raises(ValueError, match=f"^adamw: {message}"):
        make(make_params())


# ---------------------------------------------------------------------------------------- groups


def make_model():
    model = nn.Sequential(nn.Embedding(7, 4), nn.LayerNorm(4), nn.Linear(4, 4), nn.Linear(4, 7))
    model[3].weight = model[0].weight  # tied
    model[2].bias.requires_grad_(requires_grad=False)
    return model


@pytest.mark.parametrize("kind", [dict, list, iter])
def test_every_trainable_parameter_is_in_exactly_one_group(kind):
    model = make_model()
    named = list(model.named_parameters(remove_duplicate=False))
    decayed, others = decay_groups(kind(named), weight_decay=0.1)
    assert [id(p) for p in decayed["params"]] == [id(model[0].weight), id(model[2].weight)]
    norm = model[1]
    assert [id(p) for p in others["params"]] == [id(norm.weight), id(norm.bias), id(model[3].bias)]
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)


def test_every_stage_has_both_groups_and_one_with_nothing_to_train_has_an_optimizer():
    matrix, vector = nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(2))
    frozen = nn.Parameter(torch.zeros(2), requires_grad=False)
    for named, sizes in (({"m": matrix}, [1, 0]), ({"v": vector}, [0, 1]), ({"f": frozen}, [0, 0])):
        groups = decay_groups(named, weight_decay=0.1)
        assert [len(group["params"]) for group in groups] == sizes
        assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
        adamw(groups, lr=0.1).step()


def test_groups_refuse_bad_input_by_name():
    with pytest.raises(ValueError, match=r"^decay_groups: at least one parameter"):
        decay_groups({}, weight_decay=0.1)
    for bad in (-0.1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"^decay_groups: weight_decay must be .* got {bad}"):
            decay_groups({"p": nn.Parameter(torch.zeros(2))}, weight_decay=bad)


def step_of_parts():
    """Step a whole parameter whose gradient is the sum of what two ranks have."""
    mesh = init_device_mesh("cpu", (2,))
    p = nn.Parameter(DTensor.from_local(torch.ones(3), mesh, [Replicate()]))
    own = torch.full((3,), 1.0 + mesh.get_local_rank())
    p.grad = DTensor.from_local(own, mesh, [Partial()])
    adamw([p], lr=0.5, eps=1.0).step()
    return p.to_local().tolist()


def test_a_gradient_that_is_still_in_parts_is_summed():
    plain = nn.Parameter(torch.ones(3))
    plain.grad = torch.full((3,), 3.0)
    adamw([plain], lr=0.5, eps=1.0).step()
    assert run_ranks(step_of_parts, 2) == [plain.tolist()] * 2


def test_a_rule_refuses_options_that_it_does_not_have_and_betas_out_of_range():
    with pytest.raises(TypeError, match=r"^Lion: there is no option eps; there are \['betas'\]"):
        Lion(make_params(), lr=0.1, eps=1e-8)
    for betas in ((0.9, 1.0), (-0.1, 0.9)):
        with pytest.raises(ValueError, match=r"^Lion: betas\[\d\] must be at least 0 and below 1"):
            Lion(make_params(), lr=0.1, betas=betas)
    with pytest.raises(ValueError, match=r"^ScheduleFree: betas\[0\] must be above 0"):
        ScheduleFree(make_params(), lr=0.1, betas=(0.0, 0.9))


def test_several_with_a_fused_sgd_skip_on_the_host_as_it_does_alone():
    params = make_params()
    sgd = torch.optim.SGD(params[:1], lr=0.1, momentum=0.9, fused=True)
    optimizer = combine_optimizers([sgd, adamw(params[1:], lr=0.1)])
    for first in (torch.nan, 1.0):
        for p in params:
            p.grad = torch.full_like(p, first)
        clip_and_step(params, optimizer, lr=0.1, max_norm=None)
    assert torch.equal(optimizer.state[params[0]]["momentum_buffer"], torch.ones_like(params[0]))
