"""Optimizer state outside of `state` is rejected by name, never lost."""

import pytest
import torch
from torch import nn
from weights.checkpoint.small import live, quiet, same

import trainkit as tk
from trainkit.types import Cursor
from trainkit.weights.checkpoint.load import load_checkpoint


class Both(torch.optim.Optimizer):
    """Several optimizers as one; `show` selects what its own `state` is."""

    def __init__(self, *parts, show):
        groups = [group for part in parts for group in part.param_groups]
        super().__init__([p for group in groups for p in group["params"]], {"lr": 0.1})
        self.parts, self.param_groups, self.show = list(parts), groups, show

    def __getattribute__(self, name):
        if name == "state" and "show" in vars(self) and self.show == "all":
            return View(self.parts)
        return super().__getattribute__(name)

    def step(self):
        for part in self.parts:
            part.step()
        if self.show == "copies":
            self.state = {p: values for part in self.parts for p, values in part.state.items()}


class View(dict):
    """The state of several optimizers, made anew at each access, and written through."""

    def __init__(self, parts):
        self.home = {
            p: part.state for part in parts for g in part.param_groups for p in g["params"]
        }
        super().__init__((p, state[p]) for p, state in self.home.items() if p in state)

    def __missing__(self, p):
        return self.home[p][p]

    def clear(self):
        for state in self.home.values():
            state.clear()


class Apart(torch.optim.Optimizer):
    """Momentum in an attribute of its own."""

    def __init__(self, params, *, stored):
        super().__init__(params, {"lr": 0.1})
        listed = self.param_groups[0]["params"]
        zeros = [torch.zeros_like(p) for p in listed]
        self.held = {
            "list": {"velocity": zeros},
            "table": dict(zip(listed, zeros, strict=True)),
            "flat": torch.zeros(sum(p.numel() for p in listed)),
            "constants": torch.tensor([3.4, -4.8, 2.0]),
        }[stored]

    def step(self):
        pass


def model_and_parts(rest=torch.optim.AdamW, **options):
    torch.manual_seed(0)
    model = nn.Linear(5, 2)
    parts = torch.optim.Muon([model.weight], lr=0.1), rest([model.bias], lr=0.1, **options)
    return model, parts


def stepped(model, optimizer, state, times=1):
    for _ in range(times):
        for p in model.parameters():
            p.grad = torch.ones_like(p) * (state.step + 1)
        optimizer.step()
    return tk.TrainState(step=state.step + times, cursor=Cursor(state.step + times))


def test_a_wrapper_that_does_not_show_what_its_parts_remember_is_refused_by_name(tmp_path):
    model, parts = model_and_parts()
    optimizer = Both(*parts, show="nothing")
    state = stepped(model, optimizer, tk.TrainState())
    with pytest.raises(ValueError, match=r"Both.*parts\[0\].*Muon.*momentum_buffer of weight"):
        tk.save_checkpoint(tmp_path, state, [model], optimizer, tk.solo_parallel())
    assert not tk.checkpoint.list_checkpoints(tmp_path / "checkpoints")


def test_a_wrapper_that_shows_all_goes_on_bit_for_bit(tmp_path):
    ends = []
    for _ in range(2):
        model, parts = model_and_parts()
        optimizer = Both(*parts, show="all")
        run = [model], optimizer, tk.solo_parallel()
        state = tk.resume(tmp_path, tk.TrainState(), *run, log=quiet)
        if state.step == 0:
            state = stepped(model, optimizer, state)
            tk.save_checkpoint(tmp_path, state, *run)
        stepped(model, optimizer, state, times=2)
        ends.append(live([model], optimizer))
    assert same(*ends)


def test_moments_that_a_load_gives_to_a_copy_are_not_lost_in_silence(tmp_path):
    model, parts = model_and_parts()
    optimizer = Both(*parts, show="copies")
    state = stepped(model, optimizer, tk.TrainState())
    path = tk.save_checkpoint(tmp_path, state, [model], optimizer, tk.solo_parallel())
    model, parts = model_and_parts()
    with pytest.raises(ValueError, match="AdamW in Both has not got exp_avg"):
        load_checkpoint(path, [model], Both(*parts, show="copies"))


@pytest.mark.parametrize("stored", ["list", "table", "flat"])
def test_a_tensor_for_each_parameter_outside_of_the_state_is_refused(stored, tmp_path):
    model = nn.Linear(5, 2)
    optimizer = Apart(model.parameters(), stored=stored)
    with pytest.raises(ValueError, match=r"Apart.*held"):
        tk.save_checkpoint(tmp_path, tk.TrainState(1), [model], optimizer, tk.solo_parallel())


def test_what_remembers_nothing_may_be_held(tmp_path):
    model, parts = model_and_parts(torch.optim.SGD)
    optimizer = Both(parts[1], show="nothing")
    state = stepped(model, optimizer, tk.TrainState())
    optimizer.found_inf = torch.zeros(1)  # as clip_and_step leaves it
    tk.save_checkpoint(tmp_path, state, [model], optimizer, tk.solo_parallel())
    constants = Apart(model.parameters(), stored="constants")
    tk.save_checkpoint(tmp_path, state, [model], constants, tk.solo_parallel())


def test_an_object_in_the_state_is_refused_by_name(tmp_path):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.state[model.weight]["preconditioner"] = object()
    message = "the optimizer keeps 'preconditioner' of weight as a `object`"
    with pytest.raises(ValueError, match=message):
        tk.checkpoint.save_checkpoint(
            tmp_path, tk.TrainState(), [model], optimizer, tk.mesh.solo_parallel()
        )
    assert not list(tmp_path.rglob("*.safetensors"))


class Counting(nn.Linear):
    """An optimizer whose state has an object, or is empty."""

    extra = None

    def get_extra_state(self):
        return self.extra


def test_a_module_with_an_extra_state_is_refused_before_the_first_step(tmp_path):
    model = nn.Sequential(Counting(2, 2))
    optimizer = torch.optim.SGD(model.parameters())
    run = tmp_path / "run"
    for nothing in (None, torch.empty(0), {}):
        model[0].extra = nothing
        with tk.checkpoint.open_saver(run, [model], optimizer, tk.solo_parallel()):
            pass
    model[0].extra = {"calls": 1}
    message = r"0 \(Counting\) has an extra state, a `dict`"
    opening = tk.checkpoint.open_saver(run, [model], optimizer, tk.solo_parallel())
    with pytest.raises(ValueError, match=message), opening:
        pytest.fail("it was let in")
