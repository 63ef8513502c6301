"""What a model of somebody else may hold: computed rightly, or refused by name with the cure."""

import attrs
import pytest
import torch
from torch import nn

import trainkit as tk
from trainkit.parallel import ddp, fsdp, precision, sequence, tensor, weights_of
from trainkit.types import ConfigError


def layout(**degrees):
    """Return a layout whose axes have sizes, and no process group: enough to be refused."""
    axes = {name: tk.Axis(name, tk.Share(0, count)) for name, count in degrees.items()}
    return attrs.evolve(tk.solo_parallel(), **axes)


# -------------------------------------------------------------------------------------- max_norm


def rescaling():
    """Return a model with an embedding that rescales the rows it looks up."""
    layers = nn.ModuleDict({"0": nn.Linear(2, 2)})
    return nn.ModuleDict({"words": nn.Embedding(4, 2, max_norm=0.5), "layers": layers})


@pytest.mark.parametrize(
    ("name", "transform", "degrees"),
    [
        ("fsdp", fsdp(), {"fsdp": 2}),
        ("fsdp", fsdp(), {"dp_replicate": 2}),
        ("ddp", ddp(), {"dp_replicate": 2}),
        ("tensor", tensor({"layers.*": "column"}), {"tp": 2}),
        ("sequence", sequence(), {"ring": 2}),
        ("sequence", sequence(), {"ulysses": 2}),
        ("precision", precision(torch.bfloat16), {}),
    ],
)
def test_an_embedding_that_rescales_its_rows_is_refused_where_the_change_would_be_lost(
    name, transform, degrees
):
    with pytest.raises(
        ConfigError, match=rf"{name}: 'words' is an Embedding with max_norm = 0.5, .*max_norm=None"
    ):
        transform(rescaling(), layout(**degrees))


def test_on_one_rank_such_an_embedding_is_taken_as_it_is():
    for transform in (fsdp(), ddp(), sequence(), precision(None)):
        model = rescaling()
        assert transform(model, tk.solo_parallel()) is model


def test_a_pipeline_takes_such_an_embedding_unless_another_stage_has_a_copy():
    def split(model, _):
        first, last = {"words": model["words"]}, {"layers": model["layers"]}
        if "head" in model:
            last["words"] = nn.Embedding(4, 2)
        return [nn.ModuleDict(first), nn.ModuleDict(last)]

    weights = weights_of(rescaling())
    ps = layout(pp=2)
    (first,) = tk.build_stages(rescaling, ps, [], weights=weights, split=split)
    assert first["words"].max_norm == 0.5

    def tied():
        model = rescaling()
        model["head"] = nn.Linear(2, 4, bias=False)
        model["head"].weight = model["words"].weight
        return model

    with pytest.raises(ConfigError, match="build_stages: 'words' is an Embedding with max_norm"):
        tk.build_stages(tied, ps, [], weights=weights, split=split)
