"""Objects of a user's own are saved with a run, verified, compared, and loaded again."""

import contextlib
import json
import os
from collections import OrderedDict

import attrs
import numpy as np
import pytest
import torch
from own_process import own_process
from recipe_runs import events
from torch import nn
from weights.checkpoint.small import live, quiet, rewrite, same, small_run

import trainkit as tk
from trainkit.health import Policy
from trainkit.run import Timeouts, open_run
from trainkit.run.sinks import LoggingOptions
from trainkit.tools.testing import run_ranks
from trainkit.types import CheckpointError, ConfigError, Cursor, StepBatch
from trainkit.weights.checkpoint import (
    CheckpointOptions,
    Component,
    ResumeRules,
    export_checkpoint,
    list_checkpoints,
    open_saver,
    resume,
    roll_back,
    save_checkpoint,
    state_hash,
    verify_checkpoint,
)
from trainkit.weights.checkpoint.component_trees import find_state_problems
from trainkit.weights.checkpoint.components import copy_components, find_ranks_of_node
from trainkit.weights.checkpoint.diff import diff_checkpoints
from trainkit.weights.checkpoint.load import load_checkpoint, load_weights
from trainkit.weights.checkpoint.snapshot import check_savable

pytestmark = pytest.mark.usefixtures("own_process")

TIMEOUTS = Timeouts(start_timeout=60.0)
LAST = 7


class Own:
    """The least that is a component."""

    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


class Average:
    """An average of the weights, in a dictionary of tensors."""

    def __init__(self, model):
        self.model, self.decay = model, 0.5
        self.weights = {name: x.detach().clone() for name, x in model.named_parameters()}

    def update(self):
        for name, x in self.model.named_parameters():
            self.weights[name].lerp_(x.detach(), 1 - self.decay)

    def state_dict(self):
        return {"decay": self.decay, "weights": self.weights}

    def load_state_dict(self, state):
        self.decay, self.weights = state["decay"], state["weights"]


class Draw:
    """A sampler with a generator of its own, and a curriculum of plain values."""

    def __init__(self, seed=0):
        self.random, self.seen = torch.Generator().manual_seed(seed), []

    def next(self):
        self.seen.append(float(torch.rand((), generator=self.random)))
        return self.seen[-1]

    def state_dict(self):
        return {"random": self.random.get_state(), "seen": list(self.seen)}

    def load_state_dict(self, state):
        self.random.set_state(state["random"])
        self.seen = state["seen"]


def again(run_dir, components, *, steps=1, **options):
    """Resume with objects of the same kind; return what was logged."""
    messages = []
    _, *rest = small_run(steps=steps)
    resume(run_dir, tk.TrainState(), *rest, components=components, log=messages.append, **options)
    return messages


# ------------------------------------------------------------------------------------- round trip


STATES = {
    "plain values": {"a": 1, "b": 0.1, "c": "é", "d": None, "e": True, "f": [], "g": {}},
    "numbers that JSON lacks": [2**100, -(2**70), float("inf"), float("-inf"), -0.0, 5e-324],
    "order and kinds of keys": {"b": 1, "a": {2: "two", "2": "text"}, "$tensor": 3, "": 4},
    "tuples in tuples": ((1, [2, (3,)]), ()),
    "a generator of numpy": np.random.default_rng(3).bit_generator.state,
    "an optimizer of torch": torch.optim.SGD([nn.Parameter(torch.ones(2))]).state_dict(),
}


@pytest.mark.parametrize("state", STATES.values(), ids=STATES)
def test_a_state_comes_back_as_it_was(tmp_path, state):
    save_checkpoint(tmp_path, *small_run(), components={"own": Own(state)})
    new = Own(None)
    again(tmp_path, {"own": new})
    # As text: True is not 1, -0.0 not 0.0, and the order of keys counts.
    assert repr(new.state) == repr(state)


def test_tensors_come_back_with_their_bits(tmp_path):
    bits = torch.tensor([0x7FC01234, -1, 0, 1], dtype=torch.int32).view(torch.float32)
    tensors = {
        "a/b": bits,  # with NaNs, which a parameter must not have
        "a": {"b": torch.arange(6, dtype=torch.uint8).reshape(2, 3).T},
        "../odd name\n": torch.tensor(True),
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(3, dtype=torch.int64),
        "half": torch.ones(2, dtype=torch.bfloat16),
        "list": [torch.ones(1), torch.zeros(1)],
        "trained": nn.Parameter(torch.ones(1)),
    }
    path = save_checkpoint(tmp_path, *small_run(), components={"own": Own(tensors)})
    assert verify_checkpoint(path) == []
    new = Own(None)
    again(tmp_path, {"own": new})
    assert [*new.state] == [*tensors]
    pairs = [(new.state[name], x) for name, x in tensors.items() if isinstance(x, torch.Tensor)]
    pairs += [
        (new.state["a"]["b"], tensors["a"]["b"]),
        *zip(new.state["list"], tensors["list"], strict=True),
    ]
    for x, wanted in pairs:
        assert (x.dtype, x.shape, x.requires_grad) == (wanted.dtype, wanted.shape, False)
        assert x.tolist() == wanted.tolist() or x.view(torch.int32).equal(wanted.view(torch.int32))


def test_a_module_of_torch_is_a_component(tmp_path):
    torch.manual_seed(1)
    module, new = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    module(torch.randn(4, 3))
    assert isinstance(module.state_dict(), OrderedDict)
    save_checkpoint(tmp_path, *small_run(), components={"norm": module})
    again(tmp_path, {"norm": new})
    assert same(module.state_dict(), new.state_dict())


def test_what_shares_a_tensor_shares_it_again(tmp_path):
    one = torch.arange(4.0)
    first = {"a": one, "b": [one], "view": one.view(4), "part": one[:2], "equal": one.clone()}
    components = {"first": Own(first), "second": Own({"x": one})}
    path = save_checkpoint(tmp_path, *small_run(), components=components)
    new = {name: Own(None) for name in components}
    again(tmp_path, new)
    state = new["first"].state
    assert state["a"] is state["b"][0] is state["view"] is new["second"].state["x"]
    assert state["part"].tolist() == [0, 1]
    state["a"].zero_()
    assert (state["part"].tolist(), state["equal"].tolist()) == ([0, 1], [0, 1, 2, 3])
    names = [x for x in json.loads((path / "index.json").read_text())["tensors"] if "comp" in x]
    assert sorted(names) == [f"components/first/{x}" for x in ("a", "equal", "part")]


def test_a_save_is_a_copy_and_the_next_one_may_be_larger(tmp_path):
    """Metrics grow; what a thread still writes must not change under it."""
    own, run = Own({"x": torch.zeros(3)}), small_run()
    with open_saver(tmp_path, *run[1:], components={"own": own}) as (save, collect):
        save(run[0])
        own.state["x"].fill_(1)
        collect(wait=True)
        own.state = {"x": torch.full((5,), 2.0), "y": torch.ones(1)}
        save(attrs.evolve(run[0], step=2))
    new = Own(None)
    for path, wanted in zip(
        list_checkpoints(tmp_path / "checkpoints"), ([2.0] * 5, [0.0] * 3), strict=True
    ):
        load_checkpoint(path, *small_run()[1:3], components={"own": new})
        assert new.state["x"].tolist() == wanted


def test_without_components_nothing_is_written(tmp_path):
    """The files and the hash are those of a run that never heard of components."""
    run = small_run()
    path = save_checkpoint(tmp_path, *run, components={})
    assert sorted(x.name for x in path.iterdir()) == [
        "index.json",
        "manifest.json",
        "rank_00000.safetensors",
        "state.json",
    ]
    assert "components" not in json.loads((path / "state.json").read_text())
    assert state_hash(*run, {}) == state_hash(*run)


# ------------------------------------------------------------------------- hashes, diff and export


@pytest.mark.parametrize(
    "other",
    [
        {"x": torch.ones(2), "n": 2},
        {"x": torch.tensor([1.0, 2.0]), "n": 1},
        {"x": torch.ones(2, 1), "n": 1},
        {"x": torch.ones(2), "n": 1, "more": None},
    ],
)
def test_state_hash_and_diff_cover_them(tmp_path, other):
    run = small_run()
    kinds = [{"own": Own({"x": torch.ones(2), "n": 1})}, {"own": Own(other)}]
    hashes = [state_hash(*run, components) for components in kinds]
    paths = [save_checkpoint(tmp_path, *run, components=components) for components in kinds]
    assert hashes[0] != hashes[1]
    saved = [json.loads((path / "manifest.json").read_text())["state_hash"] for path in paths]
    assert saved == hashes
    for values in (False, True):
        assert diff_checkpoints(*paths, values=values)["same"] is False
        assert diff_checkpoints(paths[0], paths[0], values=values)["same"] is True
    found = diff_checkpoints(*paths, values=True)
    names = found["components"].keys() | found["values"].keys()
    assert names & {"own/n", "own/more", "own/x", "components/own/x"}
    assert not any("model" in name for name in names)


def test_an_export_and_an_evaluation_leave_them_out(tmp_path, capsys):
    path = save_checkpoint(tmp_path / "run", *small_run(), components={"own": Own({"x": 1})})
    load_weights(path, small_run()[1])
    assert capsys.readouterr() == ("", "")
    plain = save_checkpoint(tmp_path / "plain", *small_run())
    for i, x in enumerate((path, plain)):
        export_checkpoint(x, tmp_path / f"out{i}")
    names = [sorted(x.name for x in (tmp_path / f"out{i}").iterdir()) for i in (0, 1)]
    assert names[0] == names[1]


# --------------------------------------------------------------------------------- what is refused


class Nested(list):
    """A list of another class, which would come back as a list."""


DEEP = [1]
for _ in range(60):
    DEEP = [DEEP]
LOOP = {}
LOOP["again"] = LOOP

BAD_STATES = {
    "an array": ({"a": [np.ones(2)]}, r"own/a/0 .* is a `numpy.ndarray`.*from_numpy"),
    "a number of numpy": ({"a": np.float64(1)}, r"own/a .*`numpy.float64`"),
    "an object": ({"a": {"b": object()}}, r"own/a/b .*`builtins.object`"),
    "a set": ({"a": {1}}, r"own/a .*`builtins.set`"),
    "bytes": (b"pickle", r"own of .*`builtins.bytes`"),
    "a subclass": ({"a": Nested()}, r"own/a .*Nested`"),
    "a key": ({"a": {(1, 2): 3}}, r"own/a .* has the key \(1, 2\), which is neither text nor int"),
    "a large key": ({2**70: 3}, "has the key 1180"),
    "half a surrogate": ({"a": "\ud800"}, r"own/a .*`builtins.str`"),
    "too deep": ({"a": DEEP}, r"nested more than 50 deep"),
    "itself": (LOOP, r"nested more than 50 deep"),
    "too many": ({"a": [0] * 100_001}, r"hold 100003 plain values.*tensors"),
    "complex": ({"a": torch.ones(1, dtype=torch.complex64)}, r"own/a .*the dtype complex64"),
    "meta": ({"a": torch.ones(1, device="meta")}, r"own/a .*tensor without values"),
    "sparse": ({"a": torch.ones(2, 2).to_sparse()}, r"own/a .*plain tensor"),
}


@pytest.mark.parametrize(("state", "what"), BAD_STATES.values(), ids=BAD_STATES)
def test_what_no_file_holds_is_refused_before_the_first_step(tmp_path, state, what):
    components = {"own": Own(state)}
    run = small_run()
    for function in (
        lambda: again(tmp_path, components),
        lambda: check_savable(*run, components),
        lambda: save_checkpoint(tmp_path, *run, components=components),
        lambda: state_hash(*run, components),
    ):
        with pytest.raises(ConfigError, match=what):
            function()
    assert not list_checkpoints(tmp_path / "checkpoints")


@pytest.mark.parametrize(
    ("components", "what"),
    [
        ({"own": 3}, "'own' is an `int` without state_dict"),
        ({"own": Own}, "without state_dict"),
        ({"own": Component({})}, "`dict` without state_dict"),
        ({"../own": Own({})}, "is named '../own'"),
        ({"": Own({})}, "is named ''"),
    ],
)
def test_what_is_no_component_is_refused(tmp_path, components, what):
    run = small_run()
    for function in (
        lambda: again(tmp_path, components),
        lambda: save_checkpoint(tmp_path, *run, components=components),
    ):
        with pytest.raises(ConfigError, match=what):
            function()


# --------------------------------------------------------------------------- missing and left over


def test_a_missing_one_is_an_error_and_an_optional_one_a_message(tmp_path):
    save_checkpoint(tmp_path, *small_run())
    new = Own("as it was")
    with pytest.raises(CheckpointError, match=r"component own is missing .*--allow-change compon"):
        again(tmp_path, {"own": new})
    wanted = "the checkpoint has no component own: it stays as it is"
    assert wanted in again(tmp_path, {"own": Component(new, required=False)})
    assert wanted in again(tmp_path, {"own": new}, rules=ResumeRules(allow=("components",)))
    assert new.state == "as it was"


def test_one_that_the_run_does_not_have_is_an_error(tmp_path):
    path = save_checkpoint(tmp_path, *small_run(), components={"own": Own({}), "b": Own({})})
    other = Own(None)
    for components in ({}, {"b": other}):
        with pytest.raises(CheckpointError, match="component own is left over"):
            again(tmp_path, components)
        with pytest.raises(CheckpointError, match="component own is left over"):
            load_checkpoint(path, *small_run()[1:3], components=components)
    assert other.state is None
    rules = ResumeRules(ask=("components",), granted=("components",))
    messages = again(tmp_path, {"b": other}, rules=rules)
    assert "the component own of the checkpoint is left out" in messages
    assert other.state == {}


def test_one_that_does_not_take_its_state_leaves_the_run_as_it_is(tmp_path):
    save_checkpoint(tmp_path, *small_run(), components={"own": Own({"x": 1})})
    _, *rest = small_run(steps=2)
    before = live(*rest[:2])
    module = nn.Linear(1, 1)
    with pytest.raises(CheckpointError, match=r"own does not take its saved state: RuntimeError"):
        resume(tmp_path, tk.TrainState(), *rest, components={"own": module}, log=quiet)
    assert same(before, live(*rest[:2]))


# ------------------------------------------------------------------------------------ damaged files


def test_a_damaged_file_is_noticed_and_the_one_before_taken(tmp_path):
    run = small_run()
    save_checkpoint(tmp_path, *run, components={"own": Own({"x": torch.zeros(3)})})
    later = attrs.evolve(run[0], step=2)
    path = save_checkpoint(tmp_path, later, *run[1:], components={"own": Own({"x": torch.ones(3)})})
    file = path / "components_00000.safetensors"
    data = file.read_bytes()
    for damaged in (data[:-1], data[:-1] + b"\1", data[:20] + b" " + data[21:], b""):
        file.write_bytes(damaged)
        assert verify_checkpoint(path)
        new = Own(None)
        messages = again(tmp_path, {"own": new})
        assert any("skipped" in message for message in messages)
        assert new.state["x"].tolist() == [0, 0, 0]
    file.unlink()
    assert verify_checkpoint(path)


HOSTILE = {
    "no table": lambda saved: saved.update(components=[1]),
    "no states": lambda saved: saved["components"]["own"].update(states=[]),
    "a text for states": lambda saved: saved["components"]["own"].update(states="ab"),
    "a tensor of the model": lambda saved: tensor_of(saved).update({"$tensor": "model/weight"}),
    "a tensor that is not there": lambda saved: tensor_of(saved).update(
        {"$tensor": "components/x"}
    ),
    "another shape": lambda saved: tensor_of(saved).update(shape=[10**9]),
    "a place that is none": lambda saved: tensor_of(saved).update(on="../x"),
    "an unknown kind": lambda saved: saved["components"]["own"].update(states=[{"$call": "os"}]),
    "a number that is none": lambda saved: saved["components"]["own"].update(
        states=[{"$int": "x"}]
    ),
    "a list as a key": lambda saved: saved["components"]["own"].update(
        states=[{"$dict": [[[], 1]]}]
    ),
    "deep nesting": lambda saved: saved["components"]["own"].update(states=[DEEP]),
}


def tensor_of(saved):
    return saved["components"]["own"]["states"][0]["x"]


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_state_is_damage_and_no_crash(tmp_path, change):
    path = save_checkpoint(tmp_path, *small_run(), components={"own": Own({"x": torch.ones(3)})})
    rewrite(path, "state.json", change)
    with pytest.raises(CheckpointError, match="component"):
        load_checkpoint(path, *small_run()[1:3], components={"own": Own(None)})


# ----------------------------------------------------------------------------------------- a run


def train(folder, *, seed=0, fail_at=None, bad_at=None, fail_between=None, extra=None, last=LAST):
    """Train 7 steps on draws of a component, save every 3, and return the components.

    At step `fail_at` the process ends with an error after its draw, at `fail_between` with one
    after the step; the loss of step `bad_at` is not finite.
    """
    torch.manual_seed(0)
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    average, draw = Average(model), Draw(seed)
    components = {"average": average, "draw": Component(draw, per_rank=bool(seed)), **(extra or {})}
    with open_run(folder, timeouts=TIMEOUTS) as run:
        state = run.resume(model, optimizer, facts={}, components=components)
        with run.loop(
            state,
            model,
            optimizer,
            steps=last,
            replay=lambda *_, **__: {},
            checkpoints=CheckpointOptions(save_every=3, background_saves=False),
            logging=LoggingOptions(log_every=1),
            policy=Policy(max_skips=1),
        ) as loop:
            while state.step < last:
                step = state.step + 1
                drawn = draw.next()
                if step == fail_at:
                    raise RuntimeError("the machine burns")
                # Equal on all ranks, whatever each of them draws.
                model(torch.tensor([[1.0, drawn if not seed else 1.0]])).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                average.update()
                bad, bad_at = step == bad_at, None if step == bad_at else bad_at
                loss = float("nan") if bad else 1.0
                metrics = {"loss": loss, "grad_norm": 1.0, "lr": 0.1, "tokens": 1, "skipped": bad}
                state = attrs.evolve(state, step=step, cursor=Cursor(step))
                state = loop.record(state, metrics, StepBatch([], state.cursor))
                if step == fail_between:
                    raise RuntimeError("the machine burns")
                loop.checkpoint(state)
        run.finish(state, model, optimizer)
    return average, draw


def final(folder):
    return json.loads((folder / "final.json").read_text())["state_hash"]


@pytest.mark.parametrize("fault", [{"fail_at": 6}, {"fail_between": 5}], ids=str)
def test_a_run_that_is_killed_goes_on_bit_for_bit(tmp_path, capsys, fault):
    average, draw = train(tmp_path / "whole")
    with pytest.raises(SystemExit):
        train(tmp_path / "killed", **fault)
    # The draw of step 6 may have been taken, and the save of step 5 does not have it.
    assert "step 5, the last one before the error, is saved" in capsys.readouterr().err
    newest = list_checkpoints(tmp_path / "killed/checkpoints")[0]
    assert newest.name == "step_00000005"
    average_again, draw_again = train(tmp_path / "killed")
    assert draw_again.seen == draw.seen
    assert average_again.weights["weight"].equal(average.weights["weight"])
    assert final(tmp_path / "killed") == final(tmp_path / "whole")


def test_a_step_copies_components_once(tmp_path):
    class Counted(Own):
        reads = 0

        def state_dict(self):
            self.reads += 1
            return super().state_dict()

    reads = []
    for last in (1, 2):  # none of these steps saves
        counted = Counted({"x": torch.ones(2)})
        train(tmp_path / f"{last}", extra={"counted": counted}, last=last)
        reads.append(counted.reads)
    assert reads[1] - reads[0] == 1


def test_copies_share_what_the_states_share_and_nothing_else():
    class Fresh(Own):
        def state_dict(self):
            # numpy gives the memory of an array that is gone to the next one of its size.
            return {"x": torch.from_numpy(np.full(3, self.state))}

    x, y = torch.ones(3), torch.zeros(3)
    shared = Own({"a": x, "b": x.view(3), "c": [x[:2], (y, 1, None)]})
    components = {f"fresh_{i}": Fresh(i) for i in range(4)}
    copies = copy_components({"shared": shared, **components})
    x.fill_(7)
    a, b, (c, (d, *plain)) = copies["shared"].state.state_dict().values()
    assert (a.tolist(), c.tolist(), d.tolist(), plain) == ([1] * 3, [1] * 2, [0] * 3, [1, None])
    assert a is b
    found = [copies[name].state.state_dict()["x"].tolist() for name in components]
    assert found == [[i] * 3 for i in range(4)]


def test_large_components_are_not_saved_after_an_error(tmp_path, capsys):
    large = {"large": Own({"x": torch.zeros((1 << 18) + 1)})}
    with pytest.raises(SystemExit):
        train(tmp_path / "large", fail_at=6, extra=large)
    assert (
        "average, draw, large may already have the state of a later step" in capsys.readouterr().err
    )
    assert list_checkpoints(tmp_path / "large/checkpoints")[0].name == "step_00000003"
    with pytest.raises(SystemExit):
        train(tmp_path / "long", fail_at=6, extra={"long": Own({"x": [0] * 101})})
    assert (
        "average, draw, long may already have the state of a later step" in capsys.readouterr().err
    )


def test_final_json_covers_components(tmp_path):
    hashes = []
    for value in (1, 2):
        train(tmp_path / f"{value}", extra={"own": Own({"value": value})}, last=1)
        hashes.append(final(tmp_path / f"{value}"))
    assert hashes[0] != hashes[1]


def test_a_roll_back_takes_them_along(tmp_path):
    _, draw = train(tmp_path, bad_at=5, last=6)
    assert events(tmp_path, "rolled back")[0]["step"] == 3
    # Three before the checkpoint, then again those of steps 4 to 6: the two between are undone.
    assert len(draw.seen) == 6
    newest = list_checkpoints(tmp_path / "checkpoints")[-1]
    assert newest.name == "step_00000003"


def test_roll_back_alone_takes_them_along(tmp_path):
    own = Own({"x": torch.zeros(2)})
    state, *rest = small_run()
    save_checkpoint(tmp_path, state, *rest, components={"own": own})
    own.state = {"x": torch.ones(2)}
    later = attrs.evolve(state, step=5)
    roll_back(tmp_path, later, *rest, before=3, log=quiet, components={"own": own})
    assert own.state["x"].tolist() == [0, 0]
    new = Own(None)
    again(tmp_path, {"own": new})  # from the checkpoint of the roll-back
    assert new.state["x"].tolist() == [0, 0]


def test_a_state_that_goes_bad_ends_the_run(tmp_path, capsys):
    """At the first save that fails, and not after a night of failing ones."""
    own = Own({"x": 1})

    class Turns(Own):
        def state_dict(self):
            return {"x": {1, 2} if list_checkpoints(tmp_path / "checkpoints") else 1}

    with pytest.raises(SystemExit):
        train(tmp_path, extra={"own": own, "turns": Turns({})}, last=20)
    assert "turns/x of the components is a `builtins.set`" in capsys.readouterr().err
    saves = events(tmp_path, "save")
    assert [(save["step"], save["path"] is None) for save in saves] == [(3, False), (6, True)]


# --------------------------------------------------------------------------------------- two ranks


def save_on_two(folder):
    """Save, and return what a difference of replicas is called by each function."""
    state, stages, optimizer, _ = small_run()
    with tk.parallel_session() as ps:
        rank = ps.world.index
        run = state, stages, optimizer, ps
        good = {
            "equal": Own({"x": torch.ones(2), "n": 1}),
            "each": Component(Own({"x": torch.full((2,), rank), "rank": rank}), per_rank=True),
        }
        path = save_checkpoint(folder, *run, components=good)
        new = {"equal": Own(None), "each": Component(Own(None), per_rank=True)}
        _, other_stages, other_optimizer, _ = small_run(steps=2)
        resume(folder, state, other_stages, other_optimizer, ps, components=new, log=quiet)
        loaded = [new["equal"].state["x"].tolist(), new["each"].state.state["rank"]]
        loaded += [new["each"].state.state["x"].tolist(), state_hash(*run, good)]
        texts = []
        for bad in (
            {"x": torch.ones(2), "n": rank},
            {"x": torch.ones(2) + rank, "n": 1},
            {"x": torch.ones(2, 1 + rank)[:, 0].clone()} if rank else {"x": torch.ones(2), "n": 1},
            {"x": (1,) if rank else [1]},
        ):
            components = good | {"equal": Own(bad)}
            for function in (
                lambda components=components: save_checkpoint(folder, *run, components=components),
                lambda components=components: state_hash(*run, components),
                lambda components=components: check_savable(*run, components),
            ):
                with pytest.raises(ConfigError) as error:
                    function()
                texts.append(str(error.value))
        one_more = good if rank else good | {"more": Own(1)}
        with pytest.raises(ConfigError, match=r"ranks 0 and 1 do not have the same components"):
            resume(folder, state, other_stages, other_optimizer, ps, components=one_more, log=quiet)
        return loaded, texts, str(path)


def test_replicas_are_compared_and_each_rank_has_its_own(tmp_path):
    (first, texts, path), (second, others, _) = run_ranks(save_on_two, 2, tmp_path)
    assert first[:3] == [[1, 1], 0, [0, 0]]
    assert second[:3] == [[1, 1], 1, [1, 1]]
    manifest = json.loads((tmp_path / path / "manifest.json").read_text())
    assert first[3] == second[3] == manifest["state_hash"]
    # One rank writes what is equal, and each what is its own.
    index = json.loads((tmp_path / path / "index.json").read_text())["tensors"]
    files = {name: x["boxes"][0]["file"] for name, x in index.items() if "components" in name}
    assert files == {
        "components/equal/x": "components_00000.safetensors",
        "components/each/rank_00000/x": "components_00000.safetensors",
        "components/each/rank_00001/x": "components_00001.safetensors",
    }
    paths = [key for key in ("equal/n", "equal/x", "equal/n", "equal") for _ in range(3)]
    for text, other, key in zip(texts, others, paths, strict=True):
        assert f"components differ from those of rank 0: {key} on rank 1" in text
        assert "per_rank=True" in text
        assert key in other
    assert len(list_checkpoints(tmp_path / "checkpoints")) == 1


def test_another_number_of_ranks_is_refused_for_what_each_has(tmp_path):
    run_ranks(save_on_two, 2, tmp_path)
    equal, each = Own(None), Own(None)
    components = {"equal": equal, "each": Component(each, per_rank=True)}
    with pytest.raises(CheckpointError, match="each was saved by each of 2 ranks, the run has 1"):
        again(tmp_path, components)
    with pytest.raises(CheckpointError, match="each was saved as of each rank, the run has it as"):
        again(tmp_path, components | {"each": each})
    rules = ResumeRules(allow=("components",))
    again(tmp_path, {"equal": equal}, rules=rules)
    assert equal.state["x"].tolist() == [1, 1]


def save_by_groups(folder):
    """Save and load components of groups and of nodes on three ranks; return what errors say."""
    state, stages, optimizer, _ = small_run()
    with tk.parallel_session(dp_replicate=3) as ps:
        rank = ps.world.index
        ranks = [2, 0, 0] if rank != 1 else [1]  # in any order, and a rank may stand twice
        node = find_ranks_of_node(ps.world)

        def make(value, n=0):
            x = torch.full((2,), value)
            pair = Component(Own({"x": x, "n": n}), ranks=ranks)
            # The same tensor in a component of its own rank: no name is shared.
            return {
                "each": Component(Own({"x": x}), per_rank=True),
                "pair": pair,
                "node": Component(Own({"x": torch.ones(3)}), ranks=node),
            }

        good = make(float(rank % 2), n=rank % 2)
        run = state, stages, optimizer, ps
        path = save_checkpoint(folder, *run, components=good)
        new = make(7.0)
        _, other_stages, other_optimizer, _ = small_run(steps=2)
        again = state, other_stages, other_optimizer, ps
        resume(folder, *again, components=new, log=quiet)
        loaded = new["pair"].state.state["x"].tolist(), new["pair"].state.state["n"]
        texts = []
        for bad in (
            make(float(rank)),
            make(0.0, n=rank),
            good | {"pair": Component(good["pair"].state, ranks=[0, 1] if rank < 2 else [0, 2])},
            good | {"pair": Component(good["pair"].state, ranks=[(rank + 1) % 3])},
        ):
            for function in (
                lambda bad=bad: save_checkpoint(folder, *run, components=bad),
                lambda bad=bad: state_hash(*run, bad),
            ):
                with pytest.raises(ConfigError) as error:
                    function()
                texts.append(str(error.value))
        # On rank 2 the group would fit.
        others = good | {"pair": Component(good["pair"].state, ranks=[rank])}
        with pytest.raises(
            CheckpointError, match=r"pair was saved by the groups \[\[0, 2\], \[1\]\]"
        ):
            resume(folder, *again, components=others, log=quiet)
        return loaded, state_hash(*run, good), texts, str(path)


def list_ranks_of_node():
    with tk.parallel_session(dp_replicate=3) as ps, pytest.MonkeyPatch.context() as patch:
        patch.setattr("socket.gethostname", lambda: f"node {ps.world.index % 2}")
        return find_ranks_of_node(ps.world)


def test_ranks_of_a_node_are_those_of_one_host():
    assert run_ranks(list_ranks_of_node, 3) == [[0, 2], [1], [0, 2]]


def test_one_rank_of_a_group_or_a_node_writes_for_all_of_it(tmp_path):
    by_rank = run_ranks(save_by_groups, 3, tmp_path)
    assert [loaded for loaded, *_ in by_rank] == [([0, 0], 0), ([1, 1], 1), ([0, 0], 0)]
    path = tmp_path / by_rank[0][-1]
    manifest = json.loads((path / "manifest.json").read_text())
    assert {found for _, found, *_ in by_rank} == {manifest["state_hash"]}
    index = json.loads((path / "index.json").read_text())["tensors"]
    files = {name: [box["file"] for box in x["boxes"]] for name, x in index.items()}
    assert {
        name: x for name, x in files.items() if "components/" in name and "each" not in name
    } == {
        "components/pair/ranks_00000/x": ["components_00000.safetensors"],
        "components/pair/ranks_00001/x": ["components_00001.safetensors"],
        "components/node/ranks_00000/x": ["components_00000.safetensors"],
    }
    differ = "components differ from those of the first rank of their group: pair/{} on rank 2"
    wanted = [differ.format(key) for key in "xxnn"]
    wanted += ["'pair' is of the ranks [0, 1] on rank 0", "'pair' is of the ranks [0, 2] on rank 2"]
    for _, _, texts, _ in by_rank:
        assert all(want in text for want, text in zip(wanted[:4], texts, strict=False)), texts
        assert all("component 'pair' is of the ranks" in text for text in texts[4:])
    # Fewer ranks, and a component that is no longer of groups.
    components = {"node": Own(None), "pair": Component(Own(None), ranks=[0])}
    with pytest.raises(
        CheckpointError, match="node was saved as equal in groups of ranks, the run"
    ):
        again(tmp_path, components)


def test_groups_of_a_damaged_file_are_refused():
    for groups in ([[0], [0]], [[0, 2]], [[1], [0, 2], []], [[0]], 3, [["a"], [1]], []):
        saved = {"per_rank": False, "groups": groups, "states": [{}, {}]}
        problems = find_state_problems({"x": saved}, {})
        assert problems == ["the component 'x' in state.json is damaged"], groups
    saved = {"per_rank": False, "groups": [[0, 2], [1]], "states": [{}, {}]}
    assert not find_state_problems({"x": saved}, {})


def sharded(folder, rows, is_sharded):
    """Save or load an average whose tensors are sharded; return its hash and its values."""
    from torch.distributed.tensor import Shard, distribute_tensor

    state, stages, optimizer, _ = small_run()
    with tk.parallel_session() as ps:
        mesh = is_sharded and torch.distributed.init_device_mesh("cpu", (ps.world.count,))

        def make(value):
            x = torch.arange(3.0 * rows).reshape(rows, 3) * value
            x = distribute_tensor(x, mesh, [Shard(0)]) if is_sharded else x
            return Own({"n": value, "x": x, "again": x})

        first = not list_checkpoints(folder / "checkpoints")
        own = make(1.0 if first else 0.0)
        if first:
            save_checkpoint(folder, state, stages, optimizer, ps, components={"own": own})
        else:
            resume(folder, state, stages, optimizer, ps, components={"own": own}, log=quiet)
        x = own.state["x"]
        assert own.state["again"] is x
        assert hasattr(x, "placements") == is_sharded
        if is_sharded:  # it belongs to all ranks
            with pytest.raises(ConfigError, match=r"own/x .*DTensor`; give .*to_local\(\)"):
                check_savable(state, stages, optimizer, ps, {"own": Component(own, per_rank=True)})
        values = (x.full_tensor() if is_sharded else x).tolist()
        return state_hash(state, stages, optimizer, ps, {"own": own}), own.state["n"], values


@pytest.mark.parametrize("rows", [5, 1])
@pytest.mark.parametrize("saved_on", [1, 2])
def test_a_sharded_tensor_is_loaded_in_any_layout(tmp_path, rows, saved_on):
    """With uneven shards, and with a rank that has none."""
    layouts = [(1, False), (2, True)] if saved_on == 1 else [(2, True), (1, False), (2, True)]
    found = [
        x for n, is_sharded in layouts for x in run_ranks(sharded, n, tmp_path, rows, is_sharded)
    ]
    assert all(x == found[0] for x in found)
    assert [*found[0][1:]] == [1.0, torch.arange(3.0 * rows).reshape(rows, 3).tolist()]
    path = list_checkpoints(tmp_path / "checkpoints")[0]
    assert json.loads((path / "manifest.json").read_text())["state_hash"] == found[0][0]
    index = json.loads((path / "index.json").read_text())["tensors"]
    assert len(index["components/own/x"]["boxes"]) == min(rows, saved_on)


def train_on_two(folder, fail_at):
    with own_process(), contextlib.suppress(SystemExit):
        return train(folder, seed=1 + int(os.environ["RANK"]), fail_at=fail_at)[1].seen


def test_two_ranks_go_on_bit_for_bit(tmp_path):
    whole = run_ranks(train_on_two, 2, tmp_path / "whole", None)
    assert whole[0] != whole[1]
    run_ranks(train_on_two, 2, tmp_path / "killed", 6)
    # Each rank's draws as they were after the last step before the error.
    assert list_checkpoints(tmp_path / "killed/checkpoints")[0].name == "step_00000005"
    assert run_ranks(train_on_two, 2, tmp_path / "killed", None) == whole
    assert final(tmp_path / "killed") == final(tmp_path / "whole")
