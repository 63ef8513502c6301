"""Mixins in front of the class of a module that exists already."""

import ast
import copy
from pathlib import Path

import pytest
import torch
from torch import nn

import trainkit
from trainkit.models.mixins import mix_in_, mixed_class, take_out_, wrap_forward_


class Doubled(nn.Module):
    def forward(self, x):
        return 2 * super().forward(x)


class Shifted(nn.Module):
    def forward(self, x):
        return super().forward(x) + self.shift


def layer_of(*mixins):
    layer = nn.Linear(1, 1)
    nn.init.ones_(layer.weight)
    nn.init.zeros_(layer.bias)
    for mixin in mixins:
        mix_in_(layer, mixin, shift=1)
    return layer


ONE = torch.ones(1)


@pytest.mark.parametrize(
    ("mixins", "want"), [([], 1), ([Doubled], 2), ([Doubled, Shifted], 3), ([Shifted, Doubled], 4)]
)
def test_the_last_mixin_is_the_outermost(mixins, want):
    assert layer_of(*mixins)(ONE).item() == want


def test_a_mixed_module_is_what_it_was_in_every_other_way():
    layer, plain = layer_of(Doubled, Shifted), nn.Linear(1, 1)
    assert isinstance(layer, nn.Linear)
    assert layer.state_dict().keys() == plain.state_dict().keys()
    assert repr(layer) == repr(plain).replace("Linear", "ShiftedDoubledLinear")
    calls = []
    layer.register_forward_hook(lambda *_: calls.append(1))
    twin = copy.deepcopy(layer)
    nn.init.zeros_(twin.weight)
    assert (layer(ONE).item(), twin(ONE).item(), calls) == (3, 1, [1, 1])


def test_modules_of_a_kind_share_a_class_and_super_compiles_into_one_graph():
    first, second = layer_of(Doubled), layer_of(Doubled)
    assert type(first) is type(second) is mixed_class(Doubled, nn.Linear)
    for layer in (first, second):
        layer.compile(backend="eager", fullgraph=True)
        assert layer(ONE).item() == 2


@pytest.mark.parametrize("tensor", [torch.ones(1), nn.Parameter(torch.ones(1))], ids=type)
def test_a_tensor_takes_a_mixin_and_gives_it_back(tensor):
    class Marked:
        pass

    kind = type(tensor)
    mix_in_(tensor, Marked)
    assert isinstance(tensor, kind)
    assert isinstance(tensor, Marked)
    take_out_(tensor, Marked)
    assert type(tensor) is kind


@pytest.mark.parametrize(
    ("mixins", "want"), [([Doubled], 1), ([Doubled, Shifted], 2), ([Shifted, Doubled], 2)]
)
def test_a_mixin_that_is_taken_out_leaves_the_others(mixins, want):
    layer = layer_of(*mixins)
    take_out_(layer, Doubled)
    assert layer(ONE).item() == want
    assert type(layer) is type(layer_of(*(x for x in mixins if x is not Doubled)))


def test_a_mixin_that_is_not_there_cannot_be_taken_out():
    with pytest.raises(TypeError, match="ShiftedLinear does not have the mixin Doubled"):
        take_out_(layer_of(Shifted), Doubled)


def test_a_wrapped_forward_belongs_to_the_copy_of_a_module_too():
    layer = layer_of()
    wrap_forward_(layer, lambda forward: lambda self, x: 10 * forward(self, x))
    twin = copy.deepcopy(layer)
    nn.init.zeros_(twin.weight)
    assert (layer(ONE).item(), twin(ONE).item()) == (10, 0)


def changes_of_classes(text):
    """Return the lines that assign `__class__`, or make a class by `type(name, bases, {})`."""
    found = []
    for node in ast.walk(ast.parse(text)):
        targets = node.targets if isinstance(node, ast.Assign) else []
        if any(isinstance(x, ast.Attribute) and x.attr == "__class__" for x in targets):
            found.append(node.lineno)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "type" and len(node.args) > 1:
            found.append(node.lineno)
    return found


def test_no_other_file_changes_the_class_of_an_object_or_makes_one():
    assert changes_of_classes("x.__class__ = A\ny = type('B', (A,), {})\nz = type(x)") == [1, 2]
    package = Path(trainkit.__file__).parent
    found = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if changes_of_classes(path.read_text())
    }
    assert found == {"models/mixins.py"}
