"""State in host memory: the same bits, and on the device one parameter's at a time."""

import pytest
import torch
from optim.rows import ROWS, give_gradients_, made, rate
from torch import nn

import trainkit as tk
from trainkit.grads import make_step_in_backward
from trainkit.types import SOLO

NAMES = ["adamw", "muon", "schedule-free, 8-bit moments", "two, mean"]


def large_state(optimizer):
    """Return the tensors that are moved, by parameter and name."""
    return {
        (p, name): x
        for p, held in optimizer.state.items()
        for name, x in held.items()
        if torch.is_tensor(x) and x.dim()
    }


def trained(row, *, offload, refused=()):
    """Take three steps; return parameters, state, and how many parameters had device state."""
    named, most = made(row.dtype), []
    optimizer = row.make(named, offload=offload)
    on_host = {}

    def look(*_):
        now = large_state(optimizer)
        most.append(len({p for p, name in now if now[p, name] is not on_host.get((p, name))}))

    optimizer.register_step_pre_hook(look)
    for step in range(3):
        give_gradients_(named, step)
        on_host = large_state(optimizer) or on_host
        applies = None if step not in refused else (lambda norm: norm < 0)
        tk.clip_and_step(
            named.values(), optimizer, lr=rate(step), max_norm=None, should_apply=applies
        )
        if step:  # state in host memory is overwritten, not allocated again
            now = large_state(optimizer)
            assert all(now[key] is x for key, x in on_host.items())
    return named, {(x, n): y for x, p in named.items() for n, y in optimizer.state[p].items()}, most


@pytest.mark.parametrize("name", NAMES)
def test_no_bit_changes_and_one_parameter_s_state_is_on_the_device(name):
    for refused in ((), (1,)):
        named, state, most = trained(ROWS[name], offload=True, refused=refused)
        wanted, remembered, _ = trained(ROWS[name], offload=False, refused=refused)
        assert all(torch.equal(p, wanted[x]) for x, p in named.items())
        assert state.keys() == remembered.keys()
        assert all(torch.equal(x, remembered[key]) for key, x in state.items())
        assert max(most[len(named) :]) == 1


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("optimizer", ["adamw", "lion"])
def test_a_step_in_backward_steps_each_alone_by_its_name(optimizer, offload):
    """Groups have the names of their parameters, which are then those of the one that is there."""
    torch.manual_seed(0)
    first = {name: p.clone() for name, p in chain().state_dict().items()}
    found = []
    for in_backward in (False, True):
        model = chain()
        model.load_state_dict(first)
        made = tk.optim.make_optimizer([model], lr=0.1, optimizer=optimizer, offload=offload)
        names = [group["param_names"] for group in made.param_groups]
        if in_backward:
            step = make_step_in_backward([model], made, axis=SOLO, sp=SOLO, log=str)
            with step(lr=0.1) as updated:
                model(torch.ones(2, 4)).square().sum().backward()
            assert updated().applied
        else:
            model(torch.ones(2, 4)).square().sum().backward()
            tk.clip_and_step(model.parameters(), made, lr=0.1, max_norm=None)
        assert [group["param_names"] for group in made.param_groups] == names
        found.append(model.state_dict())
    assert all(torch.equal(x, found[0][name]) for name, x in found[1].items())


def chain():
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
