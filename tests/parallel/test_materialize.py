"""Weights fit the model that they fill, or are refused; a module's own values are weights too."""

import pytest
import torch
from torch import nn

import trainkit as tk
from trainkit.parallel import fsdp, weights_from_module
from trainkit.parallel.parameters import PlacedAlike
from trainkit.tools.testing import run_ranks
from trainkit.types import CheckpointError
from trainkit.weights.checkpoint import export_checkpoint, open_weights


class Stack(nn.Module):
    """Linear layers, with a norm that remembers and a head that is the first matrix."""

    def __init__(self, layers=2, width=4):
        super().__init__()
        self.first = nn.Linear(width, width, bias=False)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, width, bias=False)
        self.head.weight = self.first.weight

    def forward(self, x):
        return x


def filled(make_model, weights, plan=()):
    (model,) = tk.build_stages(make_model, tk.solo_parallel(), plan, weights=weights)
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder of the weights of 4 layers whose norm has seen something."""
    home = tmp_path_factory.mktemp("run")
    torch.manual_seed(0)
    model = Stack(4).double()
    model.norm.running_mean += 3
    optimizer = torch.optim.SGD(model.parameters())
    tk.save_checkpoint(home, tk.TrainState(), [model], optimizer, tk.solo_parallel())
    export_checkpoint(home, home / "weights")
    return home / "weights"


def test_a_folder_fills_the_model_that_it_is_of_with_its_buffers(folder):
    model = filled(lambda: Stack(4), open_weights(folder))
    assert model.norm.running_mean.tolist() == [3] * 4
    assert model.norm.running_var.tolist() == [1] * 4


def test_tensors_of_a_folder_that_the_model_does_not_have_are_refused_and_listed(folder):
    with pytest.raises(CheckpointError, match=r"hold 'layers.2.bias', which the model"):
        filled(lambda: Stack(2), open_weights(folder, allow_extra=["layers.3.*"]))
    with pytest.raises(CheckpointError, match=r"3 more such tensors") as caught:
        filled(lambda: Stack(2), open_weights(folder))
    assert [line.split("'")[1] for line in caught.value.got] == [
        f"layers.{layer}.{name}" for layer in (2, 3) for name in ("bias", "weight")
    ]
    model = filled(lambda: Stack(2), open_weights(folder, allow_extra=["layers.[23].*"]))
    assert len(model.layers) == 2


def test_a_folder_of_a_larger_model_does_not_fill_the_corner_of_a_smaller_one(folder):
    with pytest.raises(CheckpointError, match=r"of shape \(4,.*, where the model's has \(2,"):
        filled(lambda: Stack(4, width=2), open_weights(folder))


# -------------------------------------------------------------------------------- a module's own


def seeded(seed):
    torch.manual_seed(seed)
    return Stack()


def sharded(seeds):
    """Return whole parameters and buffers of a model that begins with a module's values."""
    with tk.parallel_session() as ps:
        weights = weights_from_module(seeded(seeds[ps.world.index]), axis=ps.world)
        (model,) = tk.build_stages(Stack, ps, [fsdp()], weights=weights)
        return {name: p.full_tensor() for name, p in model.named_parameters()}


def of_two_ranks():
    with pytest.raises(ValueError, match=r"rank 1 holds other values of 'first.weight'"):
        sharded([0, 1])
    return sharded([5, 5])


def test_a_module_of_one_s_own_begins_with_the_values_that_it_is_made_with():
    made = seeded(5)
    model = filled(Stack, weights_from_module(made))
    wanted = dict(made.named_parameters())
    assert {name: p.tolist() for name, p in model.named_parameters()} == {
        name: p.tolist() for name, p in wanted.items()
    }
    assert model.head.weight is model.first.weight
    for found in run_ranks(of_two_ranks, 2):
        assert all(torch.equal(found[name], p) for name, p in wanted.items())


def test_values_that_a_module_does_not_have_are_refused_by_name():
    with pytest.raises(CheckpointError, match=r"'layers.1.weight', which the model does not have"):
        filled(lambda: Stack(1), weights_from_module(Stack()))
    with pytest.raises(ValueError, match=r"has no tensor 'layers.2.weight'"):
        filled(lambda: Stack(3), weights_from_module(Stack()))
    with torch.device("meta"):
        hollow = Stack()
    with pytest.raises(ValueError, match=r"'first.weight' is on the meta device"):
        weights_from_module(hollow)


def zeros_of_parts():
    """Return the zeros like a sharded tensor, and whether DTensor made them."""
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    used_dtensor = []

    class Asked(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            used_dtensor.append(isinstance(args[0], DTensor))
            return func(*args, **(kwargs or {}))

    with tk.parallel_session(tp=2) as ps:
        whole = distribute_tensor(torch.ones(3, 2), ps.tp.mesh, [Shard(0)])
        with torch.no_grad(), PlacedAlike(), Asked():
            made = torch.zeros_like(whole)
        same = made.placements == whole.placements and made.stride() == whole.stride()
        return same, made.full_tensor().tolist(), any(used_dtensor)


def test_what_is_placed_alike_is_made_from_the_local_part():
    assert run_ranks(zeros_of_parts, 2) == [(True, [[0.0, 0.0]] * 3, False)] * 2
