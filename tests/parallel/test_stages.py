"""Plans are checked, names stay the whole model's, and shards hold the same bits as the whole."""

import copy
import functools
import gc
import hashlib
import importlib

import attrs
import pytest
import torch
from measured_step import StorageCount
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from whole_step import CONFIG, Layout, build, full

import trainkit as tk
from trainkit import adapters
from trainkit.models import Decoder, init_weights
from trainkit.parallel import Transform, compile_blocks, fsdp, recompute
from trainkit.parallel.materialize import materialize_
from trainkit.parallel.parameters import canonical_name
from trainkit.parallel.transforms import check_plan
from trainkit.tools.testing import run_ranks
from trainkit.types import ConfigError

ALL = pytest.mark.only_all


def hashes(layout):
    """Return the hash of every whole parameter, by name."""
    with tk.parallel_session(dp_replicate=layout.dp_replicate) as ps:
        stages, _ = build(layout, ps)
        return {
            name: hashlib.sha256(full(p).tobytes()).hexdigest()
            for name, p in tk.get_named_parameters(stages).items()
        }


@pytest.mark.parametrize("world", [3, *(pytest.param(n, marks=ALL) for n in (2, 8))])
def test_any_number_of_shards_holds_the_same_model(world):
    found = run_ranks(functools.partial(hashes, Layout(world)), world)
    whole = hashes(Layout())
    assert all(each == whole for each in found)


def test_names_are_the_whole_model_s_under_every_transform():
    with torch.device("meta"):
        names = [name for name, _ in Decoder(CONFIG).named_parameters()]
    assert list(hashes(Layout(recompute="full", compiled=True))) == names


@pytest.mark.parametrize(
    "raw",
    ["module.a.b", "_orig_mod.a.b", "a._checkpoint_wrapped_module.b", "a._fsdp_wrapped_module.b"],
)
def test_prefixes_of_wrappers_are_stripped(raw):
    assert canonical_name(raw) == "a.b"


def test_a_plan_in_the_wrong_order_is_refused():
    with pytest.raises(ConfigError, match="recompute must come before compiled"):
        check_plan([compile_blocks(), recompute()], tk.solo_parallel())


def test_an_axis_that_nobody_takes_care_of_is_refused():
    check_plan([], tk.solo_parallel())
    axis = tk.Axis("tp", tk.Share(0, 2))
    check_plan([], attrs.evolve(tk.solo_parallel(), pp=axis))  # build_stages' own
    for name in ("tp", "ring", "ulysses", "dp_shard", "dp_replicate"):
        layout = attrs.evolve(tk.solo_parallel(), **{name: axis})
        with pytest.raises(ConfigError, match=f"{name} = 2, but no transform"):
            check_plan([recompute()], layout)
    layout = attrs.evolve(tk.solo_parallel(), dp_shard=axis, dp_replicate=axis)
    check_plan([fsdp()], layout)


def test_a_transform_of_one_s_own_can_take_care_of_an_axis():
    layout = attrs.evolve(tk.solo_parallel(), tp=tk.Axis("tp", tk.Share(0, 2)))
    check_plan([Transform(lambda module, _: module, kind="tensor", axes=("tp",))], layout)


def ones(_name, shape, _offset):
    return torch.ones(tuple(shape))


def test_buffers_have_the_values_that_they_are_made_with():
    (norm,) = tk.build_stages(lambda: nn.BatchNorm1d(2), tk.solo_parallel(), [], weights=ones)
    assert norm.running_var.tolist() == [1, 1]
    assert norm.weight.tolist() == [1, 1]
    assert not nn.Linear(1, 1).weight.is_meta


def test_a_buffer_without_a_value_or_a_real_parameter_is_refused_by_name():
    with torch.device("meta"):
        norm = nn.BatchNorm1d(2)
    with pytest.raises(ValueError, match="the buffer 'num_batches_tracked' has no value"):
        materialize_(norm, ones, "cpu")
    made = nn.Linear(1, 1)
    with pytest.raises(ValueError, match="'weight' is not on the meta device"):
        tk.build_stages(lambda: made, tk.solo_parallel(), [], weights=ones)


def test_weights_of_a_wrong_shape_are_refused():
    def wrong(*_):
        return torch.ones(1, 1)

    with pytest.raises(ValueError, match=r"weights gave shape \(1, 1\) for 'weight'"):
        tk.build_stages(lambda: nn.Linear(2, 3), tk.solo_parallel(), [], weights=wrong)


@pytest.mark.parametrize("transform", [recompute(blocks="h.*"), compile_blocks(blocks="h.*")])
def test_a_pattern_that_matches_nothing_is_refused(transform):
    with pytest.raises(ValueError, match=r"matches blocks='h\.\*'"):
        transform(Decoder(CONFIG), tk.solo_parallel())


def test_an_unknown_recomputation_is_refused():
    with pytest.raises(ValueError, match=r"such as \"0\.4\"; got 'some'"):
        recompute("some")


def forward_calls(mode):
    """Return how often the first block's MLP runs in one forward and backward pass."""
    config = CONFIG
    stages = tk.build_stages(
        lambda: Decoder(config),
        tk.solo_parallel(),
        [recompute(mode)],
        weights=init_weights(config, seed=0),
    )
    calls = []
    stages[0].layers["0"].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    batch = tk.batch.make_padding_batch(1, 4)
    stages[0](batch.input_ids, position_ids=batch.position_ids, spans=batch.spans).sum().backward()
    return len(calls)


def test_recomputation_runs_the_forward_pass_again():
    assert [forward_calls(mode) for mode in ("none", "full", "selective")] == [1, 2, 2]


class Calls(TorchDispatchMode):
    """The operators that run, each time."""

    def __init__(self):
        super().__init__()
        self.log = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.log.append(func)
        return func(*args, **(kwargs or {}))


def test_selective_recomputation_keeps_products_and_attention():
    """By identity: an operator with another name, as CUDA's `_varlen_attn`, is kept as well."""
    aten = torch.ops.aten
    forward = aten._scaled_dot_product_flash_attention_for_cpu.default
    counts = []
    for mode in ("none", "selective", "full"):
        (model,) = tk.build_stages(
            lambda: Decoder(CONFIG),
            tk.solo_parallel(),
            [recompute(mode, preserve_rng_state=False)],
            weights=init_weights(CONFIG, seed=0),
        )
        batch = tk.batch.make_padding_batch(1, 4)
        with Calls() as calls:
            tk.call_model(model, batch).sum().backward()
        counts.append((calls.log.count(forward), calls.log.count(aten.mm.default)))
    assert counts[0] == counts[1] < counts[2]


def kept_by(model, batch):
    """Return the bytes of each storage that a forward pass leaves, parameters among them."""
    with StorageCount() as counter:
        output = tk.call_model(model, batch)
    gc.collect()
    sizes = [*counter.sizes.values()]
    del output
    return sizes


def test_selective_recomputation_keeps_no_scores_of_attention_that_is_written_out():
    capped, batch = attrs.evolve(CONFIG, score_softcap=2.0), tk.batch.make_padding_batch(1, 52)
    saved = {}
    for mode in ("none", "selective"):
        plan, weights = [recompute(mode, preserve_rng_state=False)], init_weights(capped, seed=0)
        (model,) = tk.build_stages(
            lambda: Decoder(capped), tk.solo_parallel(), plan, weights=weights
        )
        saved[mode] = kept_by(model, batch)
    scores = capped.heads * 52 * 52 * 4
    assert scores not in saved["selective"]
    assert sum(saved["selective"]) < sum(saved["none"])


def test_selective_recomputation_keeps_no_sum_of_which_dora_takes_the_lengths():
    saved = []
    for dora in (False, True):
        add = adapters.lora(adapters.Lora("layers.0.mlp.up", dora=dora))
        plan, weights = [add, recompute("selective")], init_weights(CONFIG, seed=0)
        (model,) = tk.build_stages(
            lambda: Decoder(CONFIG), tk.solo_parallel(), plan, weights=weights
        )
        saved.append(sum(kept_by(model, tk.batch.make_padding_batch(1, 4))))
    assert saved[1] - saved[0] < model.layers["0"].mlp.up.weight.nbytes


def test_the_kernel_for_packed_documents_is_kept_on_cuda():
    from trainkit.parallel.recompute import groups_of

    on_cuda, on_cpu = (groups_of(torch.device(name)) for name in ("cuda", "cpu"))
    assert on_cuda.keys() - on_cpu.keys() == {torch.ops.torch_attn._varlen_attn.default}
    assert torch.ops.aten._flash_attention_forward.default in on_cpu


def test_an_operator_that_torch_has_renamed_is_no_secret(monkeypatch):
    """Else selective recomputation would keep nothing, and say nothing."""
    room = importlib.import_module("trainkit.parallel.recompute")
    monkeypatch.setattr(room, "_PRODUCTS", ("mm", "_mm_of_old"), raising=False)
    with pytest.raises(AttributeError, match="_mm_of_old"):
        recompute("selective")(Decoder(CONFIG), tk.solo_parallel())


def test_a_copy_of_a_recomputed_model_runs_its_own_weights():
    config = CONFIG
    (model,) = tk.build_stages(
        lambda: Decoder(config),
        tk.solo_parallel(),
        [recompute()],
        weights=init_weights(config, seed=0),
    )
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for p in twin.layers.parameters():
            p.zero_()
    batch = tk.batch.make_padding_batch(1, 4)
    assert not torch.equal(tk.call_model(twin, batch), tk.call_model(model, batch))
