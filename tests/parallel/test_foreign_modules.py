"""What a model of somebody else may hold: computed rightly, or refused by name with the cure."""

import re
import warnings
from collections import OrderedDict
from functools import partial
from types import SimpleNamespace

import attrs
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from whole_step import full

import trainkit as tk
from trainkit.losses import next_token
from trainkit.parallel import (
    ddp,
    fsdp,
    grad_reduction,
    mixed_precision,
    recompute,
    sequence_parallel,
    tensor_parallel,
    weights_from_module,
)
from trainkit.parallel.check_layout import passes_to_itself
from trainkit.tools.testing import LayoutCase, RankError, certify, run_ranks
from trainkit.tools.testing.builtin import decoder_batch
from trainkit.tools.testing.train import certificate_weights
from trainkit.types import SOLO, ConfigError


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
        ("tensor_parallel", tensor_parallel({"layers.*": "column"}), {"tp": 2}),
        ("sequence_parallel", sequence_parallel(), {"ring": 2}),
        ("sequence_parallel", sequence_parallel(), {"ulysses": 2}),
        ("mixed_precision", mixed_precision(torch.bfloat16), {}),
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
    for transform in (fsdp(), ddp(), sequence_parallel(), mixed_precision(None)):
        model = rescaling()
        assert transform(model, tk.solo_parallel()) is model


def test_a_pipeline_takes_such_an_embedding_unless_another_stage_has_a_copy():
    def split(model, _):
        first, last = {"words": model["words"]}, {"layers": model["layers"]}
        if "head" in model:
            last["words"] = nn.Embedding(4, 2)
        return [nn.ModuleDict(first), nn.ModuleDict(last)]

    weights = weights_from_module(rescaling())
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


# ---------------------------------------------------------------------------------------- dtypes


class Block(nn.Module):
    """A norm in one dtype before a matrix in another."""

    def __init__(self, dtype, norms):
        super().__init__()
        self.dtype, self.norms = dtype, norms
        self.norm, self.linear = nn.RMSNorm(8, dtype=norms), nn.Linear(8, 8, dtype=dtype)

    def forward(self, x):
        """Map `[B, S, 8]` to the same shape."""
        return x + torch.tanh(self.linear(self.norm(x.to(self.norms)).to(self.dtype)))


class TwoDtypes(nn.Module):
    """A model of which all norms are in another dtype than the rest."""

    def __init__(self, dtype=torch.float64, norms=torch.float32):
        super().__init__()
        self.dtype, self.norms = dtype, norms
        self.embedding = nn.Embedding(64, 8, dtype=dtype)
        self.layers = nn.ModuleList(Block(dtype, norms) for _ in range(2))
        self.norm = nn.RMSNorm(8, dtype=norms)
        self.head = nn.Linear(8, 64, bias=False, dtype=dtype)

    def forward(self, ids):
        """Map ids `[B, S]` to logits `[B, S, 64]`."""
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x.to(self.norms)).to(self.dtype))


def fsdp_plan(_, case):
    return [recompute(case.recompute), fsdp(case.layout)]


def call_with_ids(model, batch):
    return model(batch["input_ids"])


SHARDED = [
    LayoutCase(tk.Layout(dp_shard=2)),
    LayoutCase(tk.Layout(dp_shard=2, reduce="each", prefetch=1), recompute="selective"),
    LayoutCase(tk.Layout(dp_shard=2, separate_ends=True), recompute="full"),
    LayoutCase(tk.Layout(dp_replicate=2)),
]


def test_fsdp_shards_a_model_in_two_dtypes_with_the_numbers_of_one_process():
    found = certify(
        TwoDtypes,
        decoder_batch,
        SHARDED,
        plan=fsdp_plan,
        loss=next_token,
        call=call_with_ids,
        tier="fp32",
        steps=2,
    )
    assert found.ok, str(found.red)


def test_a_certificate_of_a_bf16_model_with_norms_in_fp32():
    found = certify(
        partial(TwoDtypes, torch.bfloat16),
        decoder_batch,
        SHARDED[:1],
        plan=fsdp_plan,
        loss=next_token,
        call=call_with_ids,
        tier="bf16",
        steps=2,
    )
    assert found.ok, str(found.red)
    assert found.packing.error == ""


@pytest.mark.parametrize("tier", ["fp64", "exact"])
def test_a_certificate_compares_a_model_in_two_dtypes_in_the_tier_of_the_lower(tier):
    make_model = partial(TwoDtypes, torch.bfloat16)
    with pytest.raises(RankError, match=rf"tier '{tier}' compares .*choose the tier of torch.bfl"):
        certify(
            make_model,
            decoder_batch,
            SHARDED,
            plan=fsdp_plan,
            loss=next_token,
            call=call_with_ids,
            tier=tier,
            steps=1,
            timeout=30,
        )


# --------------------------------------------------------------------- what a unit may not hold


def in_blocks(block):
    """Return a model with a block."""
    layers = nn.ModuleDict({"0": block})
    return nn.Sequential(OrderedDict(layers=layers, head=nn.Linear(4, 4)))


def own_in_two_dtypes():
    model = nn.Linear(4, 4).to(torch.bfloat16)
    model.gain = nn.Parameter(torch.ones(2))
    return in_blocks(nn.Sequential(model))


def listed_in_another_dtype():
    block = nn.Sequential(nn.Linear(4, 4).to(torch.bfloat16))
    block.gains = nn.ParameterList([nn.Parameter(torch.ones(2))])
    return in_blocks(block)


def without_elements():
    block = nn.Linear(4, 4)
    block.gate = nn.Parameter(torch.empty(0, 4))
    return in_blocks(block)


UNITS = {
    own_in_two_dtypes: "'layers.0.0' holds 'bias' in torch.bfloat16 and 'gain' in torch.float32, "
    "and the gradients of a module .* put mixed_precision",
    listed_in_another_dtype: "'layers.0.gains' holds parameters in torch.float32 inside a module "
    "in torch.bfloat16, .* is never called, .* put mixed_precision",
    without_elements: r"'layers.0.gate' has the shape \[0, 4\], .* or freeze it",
    partial(in_blocks, nn.ModuleList([nn.Linear(4, 4)])): "'layers.0' is a ModuleList, which has "
    r"no forward pass .*'layers.0.\*'",
}


def refusals_of_two_ranks():
    """Return what fsdp says to each of some models, on the meta device."""
    found = []
    with tk.parallel_session() as ps, torch.device("meta"):
        for make_model in UNITS:
            with pytest.raises(ConfigError) as raised:
                fsdp()(make_model(), ps)
            found.append(str(raised.value))
        frozen = without_elements()
        frozen.layers["0"].gate.requires_grad_(requires_grad=False)
        fsdp()(frozen, ps)
    return found


def test_what_no_unit_can_hold_is_refused_by_name():
    for error, wanted in zip(run_ranks(refusals_of_two_ranks, 2)[0], UNITS.values(), strict=True):
        assert re.search(f"fsdp: {wanted}", error), error


class Weight(nn.Module):
    """A block that returns a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(8, 8))

    def forward(self):
        """Return the weight `[8, 8]`."""
        return self.weight


class Returning(nn.Module):
    """A model that multiplies by what its block returns."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(64, 8), nn.Linear(8, 64, bias=False)
        self.layers = nn.ModuleList([Weight()])

    def forward(self, ids):
        """Map ids `[B, S]` to logits."""
        x = self.embedding(ids)
        return self.head(x + torch.tanh(x @ self.layers[0]()))


def test_a_block_that_returns_its_own_parameter_stays_gathered_until_its_backward():
    found = certify(
        Returning,
        decoder_batch,
        [LayoutCase(tk.Layout(dp_shard=2)), LayoutCase(tk.Layout(dp_shard=2, reduce="each"))],
        plan=fsdp_plan,
        loss=next_token,
        call=call_with_ids,
        steps=2,
    )
    assert found.ok, str(found.red)


def train_over_an_axis():
    """Train a module as one unit over a process group; return its loss and what it has then."""
    torch.manual_seed(0)
    made = Returning().double()
    nn.init.normal_(made.layers[0].weight)
    with tk.parallel_session() as ps:  # for the group alone, as another library might open it
        axis = tk.axis_from_group(dist.group.WORLD)
        model = fsdp(blocks=None)(made, axis)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ids = torch.arange(16).view(4, 4)[axis.index :: axis.count]
        for _ in range(2):
            tk.forward_backward(
                model,
                [{"input_ids": ids, "labels": ids}],
                next_token,
                denominator=torch.tensor(16),
                call=call_with_ids,
            )
            tk.clip_and_step(model.parameters(), optimizer, lr=0.1, max_norm=1.0)
        assert ps.world.count == 1 or all(hasattr(p, "placements") for p in model.parameters())
        return {name: full(p) for name, p in model.named_parameters()}


def test_fsdp_takes_an_axis_for_a_module_as_one_unit():
    (alone,), (sharded, _) = (run_ranks(train_over_an_axis, world) for world in (1, 2))
    for name, values in alone.items():
        assert abs(sharded[name] - values).max() < 1e-12 * abs(values).max()
    with pytest.raises(ConfigError, match=r"ddp: it was given the axis 'solo', .* fsdp.. alone"):
        ddp()(nn.Linear(1, 1), SOLO)


# ----------------------------------------------------------------------------------------- units


class Choosing(nn.Module):
    """A model of which the first token of a batch chooses one of two modules."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
        self.experts = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(2))

    def forward(self, ids):
        """Map ids `[B, S]` to logits."""
        x = self.embedding(ids)
        return self.head(x + torch.tanh(self.experts[int(ids[0, 0]) % 2](x)))


def choose_apart(blocks):
    """Take a step in which rank r chooses module r; return the message, or the gradients."""
    torch.manual_seed(0)
    made = Choosing().double()
    with tk.parallel_session() as ps:
        (model,) = tk.build_stages(
            lambda: Choosing().double(),
            ps,
            [fsdp(blocks=blocks)],
            weights=weights_from_module(made),
        )
        ids = torch.tensor([[ps.loss.index, 2, 3]])
        batch = {"input_ids": ids, "labels": ids}
        count = torch.tensor(3 * ps.loss.count)
        try:
            tk.forward_backward(model, [batch], next_token, denominator=count, call=call_with_ids)
        except ConfigError as error:
            return str(error)
        return {name: p.grad.full_tensor() for name, p in model.named_parameters()}


def test_ranks_that_use_units_at_different_times_are_told_which_before_the_second_step():
    for error in run_ranks(choose_apart, 2, "experts.*"):
        assert "rank 0 of the ranks that shard the model gathered 'experts.0' where" in error
        assert "rank 1 gathered 'experts.1'" in error
        assert "out of `blocks`" in error


def test_on_a_device_orders_are_read_when_no_step_waits_for_them(monkeypatch):
    refused, model = [], nn.Linear(1, 1)
    monkeypatch.setattr(
        grad_reduction._Order, "_raise_difference", lambda _, group: refused.append(group)
    )
    group = SimpleNamespace(size=lambda: 2)
    alike, apart = ([6.0, 18.0], [3.0, 5.0])  # h = 3 and 3, or 1 and 2: their sum, that of squares
    reducers = grad_reduction.Reducers(fsdp=[("", model)])
    for step, sums in enumerate((alike, apart, apart)):
        order = grad_reduction._Order({})
        on_gpu = SimpleNamespace(device=torch.device("cuda"), tolist=lambda sums=sums: sums)
        order.sums.append((group, on_gpu))
        order.compare(reducers)
        assert (grad_reduction._UNREAD.read(model) is order) == (step > 0)
    assert refused == []
    grad_reduction._UNREAD.read(model).check()
    assert refused == [group]


def test_modules_that_ranks_choose_are_right_inside_of_one_unit():
    found = run_ranks(choose_apart, 2, "head")[0]
    torch.manual_seed(0)
    alone = Choosing().double()
    for first in (0, 1):
        ids = torch.tensor([[first, 2, 3]])
        (next_token(alone(ids), {"labels": ids})[0] / 6).backward()
    for name, p in alone.named_parameters():
        torch.testing.assert_close(found[name], p.grad, rtol=1e-12, atol=1e-15)


# ------------------------------------------------------------------------------ tensor parallelism


class Scaled(nn.Module):
    """A block, and a parameter that the model itself holds."""

    def __init__(self, block):
        super().__init__()
        self.embedding, self.layers = nn.Embedding(64, 8), nn.ModuleList([block])
        self.head, self.scale = nn.Linear(8, 64, bias=False), nn.Parameter(torch.ones(8))

    def forward(self, ids):
        """Map ids `[B, S]` to logits."""
        return self.head(self.layers[0](self.embedding(ids) * self.scale))


class Called(nn.Module):
    """Two matrices, called."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)

    def forward(self, x):
        """Map `[B, S, 8]` to the same shape."""
        return x + self.down(torch.tanh(self.up(x)))


class Read(Called):
    """The same, of which the block reads a weight."""

    def forward(self, x):
        """Map `[B, S, 8]` to the same shape."""
        return x + self.down(torch.tanh(nn.functional.linear(x, self.up.weight)))


CUT = {"layers.*.up": "column", "layers.*.down": "row", "head": "column_gathered"}
SCATTERED = {
    "embedding": "vocabulary_scattered",
    "layers.*": "gather",
    "layers.*.up": "column_inside",
    "layers.*.down": "row_scattered",
    "head": "column_inside_gathered",
}


def called():
    return Scaled(Called())


def tensor_plan(_, case):
    return [tensor_parallel(CUT | {"": "replicated"} if case.note else CUT)]


def test_a_parameter_of_the_model_itself_gets_its_style_by_the_empty_pattern():
    with pytest.raises(ConfigError, match=r"the model itself' has .* for the pattern ''"):
        tensor_parallel(SCATTERED)(called(), layout(tp=2))
    found = certify(
        called,
        decoder_batch,
        [LayoutCase(tk.Layout(tp=2)), LayoutCase(tk.Layout(tp=2), note="styled")],
        plan=tensor_plan,
        loss=next_token,
        call=call_with_ids,
        steps=2,
    )
    assert found.ok, str(found.red)


def read_a_weight():
    """Return what the first forward pass of a block says that reads its child's weight."""
    with tk.parallel_session(tp=2) as ps:
        made = Scaled(Read())
        model = tensor_parallel(CUT)(made, ps)
        with pytest.raises(ConfigError) as raised:
            model(torch.zeros(1, 4, dtype=torch.int64))
        return str(raised.value)


def test_a_block_that_reads_its_child_s_weight_is_named_with_the_line():
    error = run_ranks(read_a_weight, 2)[0]
    pattern = r"'layers.0' computes with .* \(test_foreign_modules.py:\d+\), .*call that module"
    assert re.search(pattern, error), error


@pytest.mark.parametrize("new", [True, False])
def test_a_style_for_what_weight_norm_computes_is_refused(new):
    norm = nn.utils.parametrizations.weight_norm if new else nn.utils.weight_norm
    block = Called()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        norm(block.up)
    parts = "parametrizations.weight.original0, param" if new else "weight_g, weight_v"
    with pytest.raises(ConfigError, match=f"'layers.0.up.weight' is no parameter, .* from {parts}"):
        tensor_parallel(CUT)(Scaled(block), layout(tp=2))


def spectral():
    return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)))


def test_a_buffer_that_is_computed_from_a_parameter_is_named():
    weights = weights_from_module(spectral())
    with pytest.raises(ConfigError, match=r"buffer '0.parametrizations.weight.0._u' is computed"):
        tk.build_stages(spectral, tk.solo_parallel(), [], weights=weights)


# ----------------------------------------------------------------------------------------- stages


class Cut(nn.Module):
    """A pipeline stage as somebody has cut it, or all of the model in one."""

    def __init__(self, blocks, *, first=False, last=False):
        super().__init__()
        self.embedding = nn.Embedding(8, 4) if first or last else None
        self.blocks = nn.ModuleDict({str(i): nn.Linear(4, 4) for i in blocks})
        self.first, self.last = first, last

    def forward(self, x):
        """Map ids, or the hidden state of the stage before, to a hidden state or to logits."""
        x = self.embedding(x) if self.first else x
        for block in self.blocks.values():
            x = x + torch.tanh(block(x))
        return x @ self.embedding.weight.T if self.last else x

    def boundary(self, batch):
        """Return what this stage passes on."""
        return torch.empty(*batch["labels"].shape, 4, dtype=torch.float64, device="meta")


def filled(module):
    """Fill a module by the names of its parameters."""
    with torch.no_grad():
        for name, p in module.named_parameters():
            p.copy_(certificate_weights(name, tuple(p.shape), (0,) * p.ndim))
    return module


def train_cut(schedule):
    """Train own stages for two steps, two of them on each of two ranks, or a whole model alone."""
    with tk.parallel_session(pp=dist.get_world_size()) as ps:
        stages = filled(Cut(range(4), first=True, last=True).double())
        if ps.pp.count > 1:
            second = 3 - ps.pp.index if schedule == "zero_bubble_v" else 2 + ps.pp.index
            own = (ps.pp.index, second)
            made = [filled(Cut([i], first=i == 0, last=i == 3).double()) for i in own]
            stages = tk.parallel.make_stages(made, ps, schedule=schedule, tied=["embedding.weight"])
        run = tk.make_forward_backward(stages, next_token, call=call_with_ids)
        optimizer = torch.optim.SGD(tk.get_parameters(stages), lr=0.1)
        found = {"losses": []}
        for step in range(2):
            ids = (torch.arange(16).view(4, 4) * (step + 3)) % 8
            batches = [{"input_ids": x, "labels": (x * 5 + 1) % 8} for x in ids.split(1)]
            sums = run(batches, denominator=torch.tensor(16))
            found["losses"].append(float(sums["loss"]))
            tk.clip_and_step(stages, optimizer, lr=0.1, max_norm=0.5)
        named = tk.get_named_parameters(stages)
        return found | {name: full(p) for name, p in named.items()}


def train_and_refuse():
    """Train own stages by two schedules, and return the messages for stages that are none."""
    schedules = ["interleaved_1f1b", *(["zero_bubble_v"] if passes_to_itself() else [])]
    found = [train_cut(name) for name in schedules]
    messages = []
    with tk.parallel_session(pp=2) as ps:
        place = partial(tk.parallel.make_stages, ps=ps, schedule="interleaved_1f1b")
        first, second = Cut([0]), Cut([ps.pp.index + 1])
        unequal = Cut([10 + ps.pp.index], first=True)
        nn.init.constant_(unequal.embedding.weight, ps.pp.index)
        tied = ["embedding.weight"]
        for place_wrongly in (
            partial(place, [first], schedule="1f1b"),
            partial(place, [second, Cut([ps.pp.index + 4])], tied=tied),
            partial(place, [unequal], schedule="1f1b", tied=tied),
            partial(place, [second, Cut([ps.pp.index + 4])], schedule="1f1b"),
        ):
            with pytest.raises(ConfigError) as raised:
                place_wrongly()
            messages.append(str(raised.value))
    return found, messages


def test_stages_that_somebody_has_cut_train_as_the_whole_model():
    found, (messages, _) = zip(*run_ranks(train_and_refuse, 2), strict=True)
    (alone,) = run_ranks(train_cut, 1, "1f1b")
    for ranks in zip(*found, strict=True):
        held = {name: values for rank in ranks for name, values in rank.items()}
        assert {name.removesuffix(" (copy)") for name in held} == alone.keys()
        for name, values in held.items():
            whole = np.asarray(alone[name.removesuffix(" (copy)")])
            assert abs(np.asarray(values) - whole).max() < 1e-12 * abs(whole).max(), name
    for error, words in zip(
        messages,
        (
            r"stages 0 and 1 both have a parameter 'blocks.0.weight'; .* list it in `tied`",
            "'embedding.weight' is in `tied`, .* it is in none",
            "stages 0 and 1 have different values of 'embedding.weight'",
            "1f1b has 1 stage.s. on each rank, got 2; those with 2 are interleaved_1f1b, looped",
        ),
        strict=True,
    ):
        assert re.search(words, error), error


# ------------------------------------------------------------------------------------------ batch


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (torch.ones(4), r"a tensor of shape \[4\]"),
        (torch.tensor(1.0), r"a tensor of shape \[\]"),
        (torch.ones(4, 63), r"a tensor of shape \[4, 63\]"),
        (None, "NoneType"),
    ],
)
def test_a_column_of_another_shape_than_the_tokens_is_refused(value, found):
    batch = decoder_batch(0)
    with pytest.raises(
        ConfigError, match=rf"extra\['image'\] is {found}, .* must be \[4, 64\]; rep"
    ):
        attrs.evolve(batch, extra={"image": value})
    assert attrs.evolve(batch, extra={"image": torch.ones(4, 64, 3)})["image"].ndim == 3
