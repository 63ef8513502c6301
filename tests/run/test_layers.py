"""Statistics by layer: every layout gives those of one process, and a run writes them."""

import attrs
import pytest
import torch
from recipe_runs import events
from torch import nn

import trainkit as tk
from trainkit.models import Decoder, make_decoder_config
from trainkit.run import Timeouts, open_run
from trainkit.run.layers import measure_tensors, watch_layers
from trainkit.run.sinks import LoggingOptions, read_jsonl
from trainkit.tools.testing import run_ranks
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
        ):
            for p in params:
                p.grad = (p * 2).detach()
            optimizer.step()
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
    ):
        optimizer.step()
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
