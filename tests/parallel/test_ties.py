"""What modules share stays one tensor, in every layout, or is refused by name."""

import functools

import attrs
import pytest
import torch
from torch import nn

import trainkit as tk
from trainkit.parallel import Transform, compile_blocks, fsdp, recompute, tensor_parallel
from trainkit.parallel.materialize import attach_shapes
from trainkit.parallel.parameters import find_ties
from trainkit.tools.testing import run_ranks
from trainkit.tools.testing.train import certificate_weights as weights
from trainkit.types import CheckpointError, ConfigError


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 4)

    def forward(self, x):
        return x + self.up(x)


class Shared(nn.Module):
    """An embedding, two blocks and a head that is the embedding; two blocks share a matrix."""

    def __init__(self, *, blocks=False):
        super().__init__()
        self.wte = nn.Embedding(8, 4)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.norms = nn.ModuleList([nn.BatchNorm1d(4), nn.BatchNorm1d(4)])
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.wte.weight
        self.norms[1].running_mean = self.norms[0].running_mean
        if blocks:
            self.layers[1].up.weight = self.layers[0].up.weight

    def forward(self, ids):
        x = self.wte(ids)
        for block in self.layers:
            x = block(x)
        return self.head(x)


HEAD = {"wte": "vocabulary", "head": "column_gathered"}
PLANS = {
    "none": [],
    "recompute, compiled": [recompute(), compile_blocks(backend="aot_eager")],
    "fsdp": [fsdp()],
    "tensor": [tensor_parallel(HEAD)],
    "tensor, fsdp": [tensor_parallel(HEAD), fsdp()],
}


def built(plan, ps, *, make_model=Shared, filled=weights, **more):
    return tk.build_stages(make_model, ps, PLANS[plan], weights=filled, **more)


def facts(plan, layout=None):
    """Return the names of parameters, the ties, and whether the head is the embedding's values."""
    with tk.parallel_session(layout) as ps:
        (model,) = built(plan, ps)
        same = model.head.weight is model.wte.weight
        names = list(tk.get_named_parameters([model]))
        return names, find_ties(model), same, len(tk.get_parameters([model]))


NAMES = [name for name, _ in Shared().named_parameters()]
TIES = [
    ("wte.weight", "head.weight"),
    ("norms.0.running_mean", "norms.1.running_mean"),
]


@pytest.mark.parametrize("plan", ["none", "recompute, compiled", "fsdp", "tensor, fsdp"])
def test_on_one_process_a_shared_weight_is_one_parameter(plan):
    assert facts(plan) == (NAMES, TIES, True, len(NAMES))


def all_facts():
    tp = tk.Layout(tp=2)
    return [
        facts("fsdp"),
        facts("tensor", tp),
        facts("tensor, fsdp", tp),
        between_units(),
    ]


def between_units():
    """Return how a weight is refused that two FSDP units share."""
    with tk.parallel_session() as ps, pytest.raises(ConfigError) as caught:
        built("fsdp", ps, make_model=functools.partial(Shared, blocks=True))
    return str(caught.value)


def test_on_two_ranks_it_is_one_too_and_between_two_units_of_fsdp_it_is_refused():
    for *found, refused in run_ranks(all_facts, 2):
        for names, ties, _, count in found:
            assert (names, ties, count) == (NAMES, TIES, len(NAMES))
        assert "fsdp: 'layers.0.up.weight' and 'layers.1.up.weight' are one tensor" in refused


def untied(module, _ps):
    module.head.weight = nn.Parameter(torch.empty_like(module.head.weight))
    return module


@pytest.mark.parametrize("transform", [untied, Transform(untied, kind="expert")])
def test_a_transform_that_makes_two_weights_of_one_is_refused(transform):
    with pytest.raises(ConfigError, match=r"'wte.weight' and 'head.weight' are one tensor"):
        tk.build_stages(Shared, tk.solo_parallel(), [transform], weights=weights)


# -------------------------------------------------------------------------------------- pipelines


def split(model, num_stages):
    assert num_stages == 2
    first = nn.ModuleDict({"wte": model.wte, "layers": nn.ModuleDict({"0": model.layers[0]})})
    last = nn.ModuleDict({"layers": nn.ModuleDict({"1": model.layers[1]}), "head": model.head})
    return [first, last]


def test_a_weight_that_two_stages_share_is_refused_by_both_names():
    layout = attrs.evolve(tk.solo_parallel(), pp=tk.Axis("pp", tk.Share(1, 2)))
    with pytest.raises(ConfigError, match=r"'head.weight' of stage 1 .* tied to 'wte.weight'"):
        built("none", layout, split=split)


# ---------------------------------------------------------------------------------------- weights


def folder_of(tensors):
    """Return weights that hold some tensors, as those of a folder do."""

    def read(name, shape, offset):
        part = tuple(slice(o, o + s) for o, s in zip(offset, shape, strict=True))
        return tensors[name][part]

    return attach_shapes(read, {name: x.shape for name, x in tensors.items()})


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.head = nn.Embedding(3, 2), nn.Linear(2, 3, bias=False)
        self.head.weight = self.wte.weight


VALUES = torch.arange(6.0).reshape(3, 2)


@pytest.mark.parametrize("names", [["wte.weight"], ["head.weight"], ["wte.weight", "head.weight"]])
def test_weights_may_hold_a_shared_parameter_under_any_of_its_names(names):
    held = folder_of(dict.fromkeys(names, VALUES))
    (model,) = tk.build_stages(Tied, tk.solo_parallel(), [], weights=held)
    assert torch.equal(model.head.weight, VALUES)
    assert model.head.weight is model.wte.weight


def test_weights_that_hold_two_values_for_one_parameter_are_refused():
    held = folder_of({"wte.weight": VALUES, "head.weight": VALUES + 1})
    with pytest.raises(CheckpointError, match=r"'wte.weight' and 'head.weight' are one parameter"):
        tk.build_stages(Tied, tk.solo_parallel(), [], weights=held)
