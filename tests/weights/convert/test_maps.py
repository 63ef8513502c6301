"""Maps of tensors in memory: forth and back, composed, and what has no meaning."""

import pytest
import torch
from weights.hub import tiny

from trainkit import hub
from trainkit.types import ConfigError
from trainkit.weights.convert import chain, join, rename, split, stack, transpose


def tensors(**shapes):
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def check_inverse(made, given):
    """Check that the inverse gives back the same tensors, bit for bit; return what it takes."""
    there = made.apply(given)
    back = made.inverse().apply(there)
    assert back.keys() == given.keys()
    assert all(torch.equal(back[name], x) for name, x in given.items())
    assert {*made.outputs} <= there.keys()
    assert not {*made.inputs} - {*made.outputs} & there.keys()
    return there


def test_a_layer_is_mapped_there_and_back_one_after_the_other_and_side_by_side():
    """A fused transposed matrix to three, and a matrix for each expert to one."""
    experts = [f"e{i}.up" for i in range(3)]
    attention = chain(
        transpose("c_attn"),
        split("c_attn", {"q": 4, "k": 2, "v": 2}),
        rename({"q": "wq", "k": "wk", "v": "wv"}),
    )
    made = join(attention, stack(experts, "up", dim=1))
    given = tensors(c_attn=(5, 8), norm=(5,), **dict.fromkeys(experts, (7, 5)))
    there = check_inverse(made, given)
    assert there["norm"] is given["norm"]
    assert torch.equal(there["wk"], given["c_attn"][:, 4:6].T)
    assert torch.equal(there["up"][:, 1], given["e1.up"])
    assert made.inputs == ("c_attn", *experts)
    assert made.outputs == ("wq", "wk", "wv", "up")


def test_a_map_takes_from_outside_what_the_one_before_does_not_give():
    made = chain(rename({"a": "b"}), stack(["b", "c"], "d"), rename({"x": "a"}))
    assert (made.inputs, made.outputs) == (("a", "c", "x"), ("d", "a"))
    check_inverse(made, tensors(a=(2,), c=(2,), x=(3,), other=(1,)))


def test_the_inverse_of_a_split_concatenates_and_swapped_names_are_no_collision():
    joined = split("all", {"a": 1, "b": 2}, dim=1).inverse()
    given = tensors(a=(3, 1), b=(3, 2))
    assert torch.equal(check_inverse(joined, given)["all"], torch.cat([*given.values()], 1))
    swapped = rename({"a": "b", "b": "a"}).apply(given)
    assert swapped["a"] is given["b"]


def test_the_experts_of_a_folder_become_those_of_transformers_in_memory():
    """As `transformers` fuses them: what `import_tensors` takes, from a `state_dict()`."""
    theirs = tiny.make_theirs("qwen3_moe")
    state = theirs.state_dict()
    names = [name for name in state if name.endswith("experts.gate_up_proj")]
    width = theirs.config.moe_intermediate_size
    parts = []
    for fused in names:
        layer = fused.removesuffix(".gate_up_proj")
        count = len(state[fused])

        def each(kind, layer=layer, count=count):
            return [f"{layer}.{e}.{kind}_proj.weight" for e in range(count)]

        halves = split(fused, {f"{layer}.g": width, f"{layer}.u": width}, dim=1)
        parts += [
            chain(halves, *(stack(each(k), f"{layer}.{k[0]}").inverse() for k in ("gate", "up"))),
            stack(each("down"), f"{layer}.down_proj").inverse(),
        ]
    unfused = check_inverse(join(*parts), state)
    ours = hub.import_tensors(unfused, theirs.config.to_dict())
    e, x = 1, state[names[0]]
    assert torch.equal(ours["layers.0.mlp.experts.up"][e], x[e, width:])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: rename({"a": "c", "b": "c"}), "rename: the output c comes more than once"),
        (lambda: stack(["a", "a"], "b"), "stack: the input a comes more than once"),
        (lambda: split("a", {}), "split: it needs at least one output"),
        (chain, "chain: it needs at least one map"),
        (join, "join: it needs at least one input"),
        (lambda: join(transpose("a"), rename({"a": "b"})), "join: the input a comes more"),
        (lambda: chain(rename({"a": "b"}), rename({"a": "c"})), "chain: the input a comes more"),
        (lambda: chain(rename({"a": "b"}), rename({"c": "b"})), "chain: the output b comes more"),
        # The x that comes from outside is there while the first map makes another x.
        (
            lambda: chain(rename({"a": "x"}), rename({"x": "y"}), rename({"x": "z"})),
            "chain: the output x comes more",
        ),
        (lambda: rename({"a": "b"}).apply({"b": 0}), "TensorMap: a of its inputs are missing"),
        (lambda: rename({"a": "b"}).apply({"a": 0, "b": 0}), "TensorMap: the tensor b comes more"),
        (
            lambda: split("a", {"b": 1, "c": 1}).apply(tensors(a=(3, 1))),
            r"split: a has 3 elements along dimension 0, and the parts have 1\+1",
        ),
    ],
)
def test_names_that_collide_or_are_missing_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
