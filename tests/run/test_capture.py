"""Captured activations and gradients: every layout gives those of one process."""

import attrs
import pytest
import torch
from recipe_runs import events
from torch import nn
from whole_step import CAPACITY, CONFIG, Layout, corpus, input_of

import trainkit as tk
from trainkit.losses import next_token_linear
from trainkit.models import Decoder, init_weights
from trainkit.parallel import compile_blocks, fsdp, recompute, sequence_parallel, tensor_parallel
from trainkit.run import Timeouts, open_run
from trainkit.run.capture import capture, join_captured, match_modules, write_capture
from trainkit.run.sinks import LoggingOptions
from trainkit.tools.testing import run_ranks
from trainkit.types import ConfigError, Cursor, DataError, StepBatch

pytestmark = pytest.mark.usefixtures("own_process")

TIMEOUTS = Timeouts(start_timeout=60.0)
PATTERN = "{embedding,norm,layers.*,layers.*.{mlp,attention_norm,attention.wq}}"
MODEL = attrs.evolve(CONFIG, vocab_size=32, width=32, mlp_width=32, layers=2)


def train_captured(folder, degrees=None, *, rows=1, plan=(), schedule="1f1b", layers=2):
    """Take the gradients of a step of four rows in fp64, capture them, and write them."""
    text = corpus()
    model = attrs.evolve(MODEL, layers=layers if schedule == "1f1b" else 4)
    bins = tk.pack_bins(text.lengths, CAPACITY, multiple_of=4)
    with tk.parallel_session(**(degrees or {})) as ps:
        stages = tk.build_stages(
            lambda: Decoder(model, head="hidden").double(),
            ps,
            [
                tensor_parallel(),
                sequence_parallel(),
                *plan,
                fsdp(tk.Layout(reshard_after_forward=schedule == "1f1b")),
            ],
            weights=init_weights(model, seed=0),
            schedule=schedule,
        )
        layout = Layout(rows_per_microbatch=rows, multiple_of=4)
        batch = input_of(Cursor(), ps, layout, text=text, bins=bins)
        tokens = tk.all_sum(tk.count_valid_tokens(batch.microbatches), ps.loss)
        run = tk.make_forward_backward(stages, next_token_linear)
        if any(step.kind == "compiled" for step in plan):
            run(batch.microbatches, denominator=tokens)  # compiles without hooks
        with capture(stages, PATTERN) as captured:
            tk.step.evaluate(stages, batch.microbatches, next_token_linear)  # nor is this
            run(batch.microbatches, denominator=tokens)
        run(batch.microbatches, denominator=tokens)  # nor this
        write_capture(captured, folder, batch.microbatches)
    return sorted(captured.tensors)


LAYOUTS = {
    "dp_shard": {"degrees": {"dp_shard": 2}},
    "dp_replicate": {"degrees": {"dp_replicate": 2}},
    "ring": {"degrees": {"ring": 2}},
    "ulysses": {"degrees": {"ulysses": 2}, "rows": 4},
    "tp": {"degrees": {"tp": 2}, "rows": 2},
    "tp, recomputed": {"degrees": {"tp": 2}, "plan": (recompute("full"),)},
    "pp": {"degrees": {"pp": 2}},
    "interleaved": {"degrees": {"pp": 2}, "schedule": "interleaved_1f1b"},
    "zero bubble": {"degrees": {"pp": 2}, "schedule": "zero_bubble_v"},
}


def train_all(folder):
    """Train in each layout on two ranks, one after another, each in a folder of its name."""
    for name, case in LAYOUTS.items():
        train_captured(folder / name, **case)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Return what one process captures in one microbatch, by the number of layers."""
    folder = tmp_path_factory.mktemp("alone")
    train_captured(folder / "2", rows=4)
    train_captured(folder / "4", rows=4, layers=4)
    return {layers: join_captured(folder / str(layers)) for layers in (2, 4)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return the folder of what two ranks capture in each layout."""
    folder = tmp_path_factory.mktemp("layouts")
    run_ranks(train_all, 2, folder)
    return folder


def check_equal(found, alone, names):
    assert torch.equal(found.tokens, alone.tokens)
    assert len(alone.tokens) > 2 * CAPACITY
    for name in names:
        x, y = found.joined[name], alone.joined[name]
        assert x.shape == y.shape == (len(alone.tokens), MODEL.width), name
        assert (x - y).abs().max() <= 1e-10 * y.abs().max(), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_activations_and_gradients_of_one_process(layout, folder, alone):
    found = join_captured(folder / layout)
    layers = 4 if "schedule" in LAYOUTS[layout] else 2
    assert not alone[layers].apart
    # Queries are a shard of the heads on each rank of tp.
    names = [name for name in alone[layers].joined if "tp" not in layout or ".wq/" not in name]
    assert len(names) == 2 * (2 + layers * (3 if "tp" in layout else 4))
    check_equal(found, alone[layers], names)
    assert [*found.joined] == names  # outputs in forward order, gradients in backward order
    assert bool(found.apart) == ("tp" in layout)


def test_a_shard_of_the_features_stays_apart_by_rank_and_says_so(folder):
    found = join_captured(folder / "tp")
    name = "layers.0.attention.wq/output"
    assert [*found.apart[name]] == [(0, 0), (0, 1), (1, 0), (1, 1)]  # (rank, microbatch)
    assert found.apart[name][1, 0].shape == (2, CAPACITY, MODEL.width // 2)
    assert found.why[name] == "each rank has a shard of the features"


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize(
    "plan",
    [
        (),
        (recompute("full"),),
        (recompute("selective"),),
        (recompute("0.4"),),  # whose first pass has a trial
        (recompute("full"), compile_blocks(backend="aot_eager")),
    ],
    ids=lambda plan: "+".join(step.kind for step in plan) or "plain",
)
def test_recomputed_and_compiled_blocks_are_captured_once(plan, alone, tmp_path):
    written = train_captured(tmp_path, plan=plan)
    # Outputs and gradients of two ends and two layers, in four microbatches.
    assert len(written) == 2 * (2 + 2 * 4) * 4
    found = join_captured(tmp_path)
    assert not found.apart
    check_equal(found, alone[2], alone[2].joined)


# -------------------------------------------------------------------------------- without a layout


def test_a_plain_module_needs_no_batch_and_keeps_no_hook():
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    with capture(model, "1", gradients=False) as captured:
        y = model(torch.ones(3, 2))
        with torch.no_grad():
            model(torch.ones(1, 2))
    y.sum().backward()
    assert [*captured.tensors] == ["1/output/microbatch_0"]
    assert torch.equal(captured.tensors["1/output/microbatch_0"], y.detach())
    assert not any(module._forward_hooks for module in model.modules())
    assert not model._forward_pre_hooks


class Parts(nn.Module):
    """Returns the tensors of a mapping, a sum over tokens and no tensor; its part is used twice."""

    def __init__(self):
        super().__init__()
        self.inner = Inner()

    def forward(self, x):
        return self.inner(self.inner(x)["hidden"])["hidden"]


class Inner(nn.Module):
    def forward(self, x):
        return {"hidden": x * 2, "more": (x.sum(), None)}


def test_parts_of_outputs_and_repeated_calls_have_names_of_their_own(tmp_path):
    model, index = Parts(), torch.tensor([[1, 0, -1]])
    with capture(model, "inner") as captured:
        x = torch.tensor([[1.0, 2.0, 3.0]], requires_grad=True)
        model(x).sum().backward()
    write_capture(captured, tmp_path, [{"token_index": index}])
    found = join_captured(tmp_path)
    assert found.tokens.tolist() == [0, 1]
    assert {name: rows.tolist() for name, rows in found.joined.items()} == {
        "inner/output.hidden": [4.0, 2.0],
        "inner/output.hidden/call_1": [8.0, 4.0],
        "inner/grad.hidden/call_1": [1.0, 1.0],
        "inner/grad.hidden": [2.0, 2.0],
    }
    assert found.why["inner/output.more.0"] == "it has no row for each token"


def test_padding_has_no_rows(tmp_path):
    model = nn.Sequential(nn.Tanh())
    with capture(model, "0") as captured:
        model(torch.zeros(1, 4))
    ids = torch.tensor([[0, 1, -3, -1]])  # a token, another document's, its padding, the row's
    batch = {"token_index": torch.arange(4).view(1, 4), "document_ids": ids}
    write_capture(captured, tmp_path, [batch])
    found = join_captured(tmp_path)
    assert (found.tokens.tolist(), found.joined["0/output"].tolist()) == ([0, 1], [0.0, 0.0])


def test_equal_copies_may_have_nan_and_unequal_ones_are_no_rows(tmp_path):
    model = nn.Sequential(nn.Tanh())
    batch = {"token_index": torch.tensor([[0, 1]])}
    for scale, expected in ((1.0, ["0/output"]), (2.0, [])):
        for rank in range(2):
            with capture(model, "0") as captured:
                model(torch.tensor([[torch.nan, scale**rank]]))
            one = attrs.evolve(captured, world=tk.types.Share(rank, 2))
            write_capture(one, tmp_path, [batch])
        assert [*join_captured(tmp_path).joined] == expected
    assert "as of a shard" in join_captured(tmp_path).why["0/output"]


def test_rows_may_be_flattened_and_slices_of_the_sequence(tmp_path):
    model = nn.Sequential(nn.Tanh())
    batch = {"token_index": torch.tensor([[0, 1], [2, 3]])}
    for rank in range(2):  # tensor-parallel ranks, each with half of every row
        with capture(model, "0") as captured:
            model(torch.tensor([[0.0, 2.0], [1.0, 3.0]])[rank])
        share = tk.types.Share(rank, 2)
        write_capture(attrs.evolve(captured, world=share, tp=share), tmp_path, [batch])
    rows = join_captured(tmp_path).joined["0/output"]
    assert torch.equal(rows, torch.tensor([0.0, 1.0, 2.0, 3.0]).tanh())


def test_copies_do_not_change_when_a_model_writes_in_place():
    class Doubled(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Identity()

        def forward(self, x):
            return self.first(x).mul_(2)

    model = Doubled()
    with capture(model, "first") as captured:
        model(torch.ones(1))
    assert captured.tensors["first/output/microbatch_0"].tolist() == [1.0]


def test_without_the_microbatches_tensors_stay_apart_with_the_reason(tmp_path):
    model = nn.Sequential(nn.Tanh())
    with capture(model, "0") as captured:
        model(torch.zeros(1, 2))
        model(torch.zeros(1, 2))
    write_capture(captured, tmp_path)
    assert "were not given" in join_captured(tmp_path).why["0/output"]
    write_capture(captured, tmp_path, [{"token_index": torch.tensor([[0, 1]])}])
    found = join_captured(tmp_path)
    assert found.why["0/output"] == "the model was called 2 times for 1 microbatches"
    assert [*found.apart["0/output"]] == [(0, 0), (0, 1)]


def test_a_pattern_that_matches_nothing_is_refused_with_the_names():
    model = nn.Sequential(nn.Linear(1, 1), nn.Tanh())
    with pytest.raises(ConfigError, match=r"capture: 'mlp' matches the name of no module.*: 0; 1$"):
        match_modules(model, "mlp")
    with pytest.raises(ConfigError, match="capture: 'mlp'"), capture(model, "mlp"):
        pass
    with pytest.raises(ConfigError, match="bracket without its other half"):
        match_modules(model, "{0")


def test_names_are_those_of_the_whole_model_inside_of_wrappers():
    model = torch.compile(nn.Sequential(nn.Linear(1, 1), nn.Tanh()), backend="aot_eager")
    assert match_modules(model, "*") == ["0", "1"]
    with capture(model, "*") as captured:
        model(torch.zeros(1, 1))
    assert [*captured.tensors] == ["0/output/microbatch_0", "1/output/microbatch_0"]


def test_missing_and_damaged_files_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"there is no rank_\*\.safetensors"):
        join_captured(tmp_path)
    model = nn.Sequential(nn.Tanh())
    with capture(model, "0") as captured:
        model(torch.zeros(1, 2))
    two = attrs.evolve(captured, world=tk.types.Share(1, 2))
    path = write_capture(two, tmp_path)
    with pytest.raises(DataError, match=r"files of the ranks \[1\], but they are of 2 ranks"):
        join_captured(tmp_path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"rank_00001\.safetensors is damaged"):
        join_captured(tmp_path)


# --------------------------------------------------------------------------------------- in a run


def train_a_run(folder, logging, *, steps=4):
    """Take steps of a run; return its model and how many hooks it had in each step."""
    model = nn.Sequential(nn.Linear(1, 1), nn.Tanh())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    metrics = {"loss": 1.0, "grad_norm": 1.0, "lr": 0.1, "tokens": 1}
    hooks = []
    with open_run(folder, timeouts=TIMEOUTS) as run:
        state = run.resume(model, optimizer)
        with run.loop(state, model, optimizer, steps=steps, replay=None, logging=logging) as loop:
            for step in range(steps):
                hooks.append(len(model[1]._forward_hooks))
                batch = {"token_index": torch.tensor([[step]])}
                model(torch.full((1, 1, 1), float(step))).sum().backward()
                optimizer.step()
                state = attrs.evolve(state, step=state.step + 1)
                state = loop.record(state, metrics, StepBatch([batch], Cursor(1)))
                with torch.no_grad():
                    model(torch.zeros(1, 1, 1))
                loop.checkpoint(state)
    return model, hooks


@pytest.mark.parametrize("log_every", [1, 4])
def test_a_run_captures_the_asked_step_alone(log_every, tmp_path):
    logging = LoggingOptions(capture="1", capture_at=3, log_every=log_every)
    model, hooks = train_a_run(tmp_path, logging)
    assert hooks == [0, 0, 1, 0]
    assert not model._forward_pre_hooks
    folder = tmp_path / "captures" / "step_00000003"
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    found = join_captured(folder)
    assert (found.tokens.tolist(), [*found.joined]) == ([2], ["1/output", "1/grad"])
    (event,) = events(tmp_path, "capture")
    assert (event["step"], event["pattern"], event["path"]) == (3, "1", str(folder))
    assert not events(tmp_path, "warning")


def test_a_run_refuses_a_bad_pattern_before_its_first_step(tmp_path, capsys):
    with pytest.raises(SystemExit, match="64"):
        train_a_run(tmp_path, LoggingOptions(capture="mlp", capture_at=100))
    assert "capture: 'mlp' matches the name of no module; those there are: 0; 1" in (
        capsys.readouterr().err
    )
    assert not (tmp_path / "metrics.jsonl").exists()


def test_a_capture_after_the_last_step_is_not_awaited_in_silence(tmp_path, capsys):
    train_a_run(tmp_path, LoggingOptions(capture="1", capture_at=100))
    assert "no capture: the run ends at step 4, before step 100" in capsys.readouterr().out


def fail_in_a_run(folder, model):
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    with open_run(folder, timeouts=TIMEOUTS) as run:
        state = run.resume(model, optimizer)
        logging = LoggingOptions(capture="0")
        with run.loop(state, model, optimizer, steps=1, replay=None, logging=logging):
            assert model[0]._forward_hooks
            raise RuntimeError("bad luck")


def test_a_step_that_fails_leaves_no_hook_and_no_file(tmp_path):
    model = nn.Sequential(nn.Tanh())
    with pytest.raises(SystemExit):
        fail_in_a_run(tmp_path, model)
    assert not model[0]._forward_hooks
    assert not model._forward_pre_hooks
    assert not (tmp_path / "captures").exists()
