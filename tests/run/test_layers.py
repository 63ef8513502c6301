"""Statistics by layer: every layout gives those of one process, and a run writes them."""

import functools
from collections import Counter

import attrs
import pytest
import torch
from own_process import own_process
from recipe_runs import events
from torch import nn
from whole_step import CAPACITY, CONFIG, Layout, corpus, input_of

import trainkit as tk
from trainkit.losses import next_token_linear
from trainkit.models import Decoder, init_weights, make_decoder_config
from trainkit.parallel import compile_blocks, fsdp, recompute, sequence_parallel, tensor_parallel
from trainkit.run import Timeouts, open_run
from trainkit.run.layers import measure_tensors, watch_layers
from trainkit.run.sinks import LoggingOptions, read_jsonl
from trainkit.tools.testing import run_ranks
from trainkit.tools.testing.ledger import count_collectives
from trainkit.types import Cursor, StepBatch

TIMEOUTS = Timeouts(start_timeout=60.0)


def take_step(layout):
    """Take a step whose gradients are a function of the weights; return what was written."""
    config = attrs.evolve(make_decoder_config("tiny"), layers=2)
    found = {}
    with tk.parallel_session(layout) as ps:
        plan = tk.parallel.make_decoder_plan(layout)
        weights = tk.models.init_weights(config, seed=0)
        stages = tk.build_stages(lambda: Decoder(config), ps, plan, weights=weights)
        params = [p for stage in stages for p in stage.parameters()]
        optimizer = torch.optim.SGD(params, lr=0.25)
        with watch_layers(
            stages,
            optimizer,
            is_due=lambda: True,
            write=lambda *x: found.update([x]),
            axis=ps.world,
        ) as finish:
            for p in params:
                p.grad = (p * 2).detach()
            optimizer.step()
            finish([])
    return {kind: attrs.asdict(statistics) for kind, statistics in found.items()}


@pytest.mark.parametrize("axis", ["dp_shard", "tp", "pp", "dp_replicate"])
def test_every_layout_gives_the_statistics_of_one_process(axis):
    alone = take_step(tk.Layout())
    by_rank = run_ranks(take_step, 2, attrs.evolve(tk.Layout(dp_shard=1), **{axis: 2}))
    assert by_rank[0] == by_rank[1]
    for kind in ("weight", "gradient", "update"):
        whole = {
            name: [alone[kind][x][i] for x in ("rms", "largest", "zeros", "nonfinite")]
            for i, name in enumerate(alone[kind]["names"])
        }
        assert sorted(by_rank[0][kind]["names"]) == sorted(whole)
        for i, name in enumerate(by_rank[0][kind]["names"]):
            found = [by_rank[0][kind][x][i] for x in ("rms", "largest", "zeros", "nonfinite")]
            assert found == pytest.approx(whole[name], rel=1e-12), (kind, name)
    assert alone["update"]["rms"] == pytest.approx([0.5] * len(alone["update"]["rms"]), rel=1e-6)


# ------------------------------------------------------------------------------------- activations


@torch.no_grad()
def scale_(params, factor):
    for p in params:
        p.mul_(factor)


def measure_activations(degrees=None, *, rows=1, plan=(), schedule="1f1b", layers=2):
    """Return the statistics of two steps' activations in fp64: with an update, and without."""
    text = corpus()
    model = attrs.evolve(CONFIG, vocab_size=32, width=32, mlp_width=32, layers=layers)
    bins = tk.pack_bins(text.lengths, CAPACITY, multiple_of=4)
    found = []
    with tk.parallel_session(**(degrees or {})) as ps:
        sharded = fsdp(tk.Layout(reshard_after_forward=schedule == "1f1b"))
        stages = tk.build_stages(
            lambda: Decoder(model, head="hidden").double(),
            ps,
            [tensor_parallel(), *plan, sharded],
            weights=init_weights(model, seed=0),
            schedule=schedule,
        )
        # Rows of one process are padded to another multiple than those of two.
        multiple = 4 if ps.world.count > 1 else 1
        layout = Layout(rows_per_microbatch=rows, multiple_of=multiple)
        batch = input_of(Cursor(), ps, layout, text=text, bins=bins)
        tokens = tk.all_sum(tk.count_valid_tokens(batch.microbatches), ps.loss)
        run = tk.make_forward_backward(stages, next_token_linear)
        params = [p for stage in stages for p in stage.parameters()]
        optimizer = torch.optim.SGD(params, lr=0.0)
        if any(step.kind == "compiled" for step in plan):
            run(batch.microbatches, denominator=tokens)  # compiles without hooks
        with watch_layers(
            stages,
            optimizer,
            is_due=lambda: True,
            write=lambda *x: found.append(x),
            axis=ps.world,
        ) as finish:
            run(batch.microbatches, denominator=tokens)
            optimizer.step()
            scale_(params, 2.0)
            # Afterwards, as of more calls than microbatches the last count.
            tk.step.evaluate(stages, batch.microbatches, next_token_linear)  # is not counted
            scale_(params, 0.5)
            finish(batch.microbatches)
            for factor in (2.0, 0.5):  # the step is taken again, and its update is skipped
                scale_(params, factor)
                run(batch.microbatches, denominator=tokens)
            finish(batch.microbatches)
        run(batch.microbatches, denominator=tokens)
    assert [kind for kind, _ in found] == ["weight", "gradient", "update", *["activation"] * 2]
    return [attrs.asdict(statistics) for kind, statistics in found if kind == "activation"]


LAYOUTS = {
    "dp": {"degrees": {"dp_shard": 2}},
    "tp": {"degrees": {"tp": 2}},
    "tp with slices": {"degrees": {"tp": 2}, "plan": (sequence_parallel(),)},
    "ring": {"degrees": {"ring": 2}, "plan": (sequence_parallel(),)},
    "pp": {"degrees": {"pp": 2}},
    "zero bubble": {"degrees": {"pp": 2}, "schedule": "zero_bubble_v", "layers": 4},
}


def count_collectives_of_step(*, is_due):
    """Return the number of collectives of a step that is measured or not, by axis and kind."""
    model, text = attrs.evolve(CONFIG, vocab_size=32), corpus()
    layout, found = Layout(rows_per_microbatch=1), []
    with tk.parallel_session(dp_shard=2) as ps:
        build = functools.partial(Decoder, model, head="hidden")
        weights = init_weights(model, seed=0)
        stages = tk.build_stages(build, ps, [fsdp()], weights=weights)
        optimizer = torch.optim.SGD(tk.get_parameters(stages), lr=0.0)
        bins = tk.pack_bins(text.lengths, CAPACITY, multiple_of=4)
        batch = input_of(Cursor(), ps, layout, text=text, bins=bins)
        run = tk.make_forward_backward(stages, next_token_linear)
        with watch_layers(
            stages,
            optimizer,
            is_due=lambda: is_due,
            write=lambda *x: found.append(x),
            axis=ps.world,
        ) as finish:

            def take():
                run(batch.microbatches, denominator=torch.tensor(1.0))
                tk.clip_and_step(stages, optimizer, lr=0.0, max_norm=1.0)
                finish(batch.microbatches)

            take()  # what is set up in a first step is not counted
            found.clear()
            ledger = count_collectives(take, ps)
        assert len(found) == (4 if is_due else 0)
        return Counter({(row.axis, row.kind): row.count for row in ledger.rows})


def measure_all():
    found = {name: measure_activations(**case) for name, case in LAYOUTS.items()}
    return found | {is_due: count_collectives_of_step(is_due=is_due) for is_due in (False, True)}


@pytest.fixture(scope="module")
def activations_alone():
    """Return what one process measures in one microbatch, by the number of layers."""
    with own_process():
        return {n: measure_activations(rows=4, layers=n) for n in (2, 4)}


@pytest.fixture(scope="module")
def activations_by_rank():
    return run_ranks(measure_all, 2)


def check_activations(found, alone):
    assert len(found) == 2
    for step in found:
        # Names have the order of the ranks, which is another one in a schedule shaped like a V.
        order = [step["names"].index(name) for name in alone[0]["names"]]
        for name in ("rms", "largest", "zeros", "nonfinite"):
            values = [step[name][i] for i in order]
            assert values == pytest.approx(alone[0][name], rel=1e-10), name
    assert min(found[0]["rms"]) > 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_activations_of_one_process(
    layout, activations_by_rank, activations_alone
):
    first, second = (found[layout] for found in activations_by_rank)
    assert first == second
    check_activations(first, activations_alone[LAYOUTS[layout].get("layers", 2)])


def test_all_statistics_of_a_step_take_one_collective(activations_by_rank):
    for found in activations_by_rank:  # the axis of all ranks is called by its only degree
        assert found[False]["dp_shard", "all_gather"] > 0
        assert found[True] - found[False] == Counter({("dp_shard", "all_gather"): 1})
        assert not found[False] - found[True]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize(
    "plan",
    [
        (recompute("full"),),
        (recompute("0.4"),),  # whose first pass has a trial
        (recompute("full"), compile_blocks(backend="aot_eager")),
    ],
    ids=lambda plan: "+".join(step.kind for step in plan),
)
@pytest.mark.usefixtures("own_process")
def test_recomputed_and_compiled_blocks_are_counted_once(plan, activations_alone):
    check_activations(measure_activations(plan=plan), activations_alone[2])


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_model_that_is_compiled_as_a_whole_keeps_what_was_compiled(wrapped):
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.ReLU()])})
    if wrapped:
        model = torch.compile(model, backend="eager")
    else:
        model.compile(backend="eager")
    with watch_layers(
        model, torch.optim.SGD([torch.zeros(1)]), is_due=lambda: True, write=print
    ) as finish:
        assert not any(x._forward_pre_hooks or x._forward_hooks for x in model.modules())
        finish([])


DOCUMENT_IDS = torch.tensor([[0, 0, -1]])


@pytest.mark.parametrize(
    ("batch", "rms", "nonfinite"),
    [
        ({"document_ids": DOCUMENT_IDS, "token_index": torch.arange(3)[None]}, 25 / 3, 1 / 4),
        ({"token_index": torch.tensor([[5, 6, -1]])}, 25 / 3, 1 / 4),
        ({"input_ids": torch.ones(1, 3)}, (25 + 2 * 81) / 5, 1 / 6),  # nothing says what is padding
    ],
    ids=["document_ids", "token_index", "neither"],
)
def test_the_zeros_and_nan_of_blocks_are_counted_and_padding_is_not(batch, rms, nonfinite):
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.ReLU()])})
    model.forward = lambda x: model["layers"][0](x)  # noqa: PLW0108 (a module: it has hooks)
    x = torch.tensor([[[3.0, -1.0], [torch.nan, 4.0], [9.0, 9.0]]])
    found = {}
    with watch_layers(
        model,
        torch.optim.SGD([torch.zeros(1)]),
        is_due=lambda: True,
        write=lambda *x: found.update([x]),
    ) as finish:
        model(x)
        model["layers"][0](2 * x)  # in no pass of the model, as a block that is recomputed
        finish([batch])
    assert not model["layers"][0]._forward_hooks
    assert list(found) == ["activation"]
    found = found["activation"]
    assert found.names == ["layers.0"]
    assert found.largest == [9.0 if "input_ids" in batch else 4.0]
    assert found.rms == pytest.approx([rms**0.5])
    assert found.zeros == found.nonfinite == [pytest.approx(nonfinite)]


# ------------------------------------------------------------------------------------- every tensor


def test_what_is_not_finite_is_counted_and_does_not_spoil_the_rest():
    x = torch.tensor([3.0, torch.nan, torch.inf, 0.0, -4.0])
    found = measure_tensors({"x": x})
    assert found.rms == pytest.approx([(25 / 3) ** 0.5])
    assert (found.largest, found.zeros, found.nonfinite) == ([4.0], [0.2], [0.4])


def test_a_parameter_without_a_gradient_and_an_empty_one_are_zeros():
    model = nn.ParameterDict({"a": nn.Parameter(torch.ones(2)), "b": nn.Parameter(torch.ones(0))})
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    found = {}
    with watch_layers(
        model,
        optimizer,
        is_due=lambda: True,
        write=lambda *x: found.update([x]),
    ) as finish:
        optimizer.step()
        finish([])
    assert found["weight"].rms == [1.0, 0.0]
    assert found["gradient"].rms == found["update"].rms == [0.0, 0.0]


def test_a_run_writes_the_steps_that_are_due(tmp_path):
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    metrics = {"loss": 1.0, "grad_norm": 1.0, "lr": 0.1, "tokens": 1}
    with open_run(tmp_path, timeouts=TIMEOUTS) as run:
        state = run.resume(model, optimizer)
        logging = LoggingOptions(layers_every=2, log_every=3)
        with run.loop(state, model, optimizer, steps=5, replay=None, logging=logging) as loop:
            for _ in range(5):
                model(torch.ones(1, 1)).sum().backward()
                optimizer.step()
                state = attrs.evolve(state, step=state.step + 1)
                state = loop.record(state, metrics, StepBatch([], Cursor(1)))
                loop.checkpoint(state)
    lines = read_jsonl(tmp_path / "layers.jsonl")
    assert [(line["step"], line["kind"]) for line in lines] == [
        (step, kind) for step in (2, 4, 5) for kind in ("weight", "gradient", "update")
    ]
    assert lines[0]["names"] == ["weight", "bias"]
    assert not events(tmp_path, "warning")


def test_without_the_flag_there_is_no_file_and_no_hook(tmp_path):
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with open_run(tmp_path, timeouts=TIMEOUTS) as run:
        state = run.resume(model, optimizer)
        with run.loop(state, model, optimizer, steps=5, replay=None):
            assert not optimizer._optimizer_step_post_hooks
    assert not (tmp_path / "layers.jsonl").exists()
