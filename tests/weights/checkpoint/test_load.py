"""Nothing damaged, foreign or misfitting is loaded, and a load that fails changes nothing."""

import json
import os
import shutil
import time
from pathlib import Path

import attrs
import pytest
import torch
from torch import nn
from weights.checkpoint.damage import damage
from weights.checkpoint.small import live, quiet, reseal, rewrite, same, small_model, small_run

import trainkit as tk
from trainkit.run.config import RunConfig, make_resume_rules, option
from trainkit.tools.testing import run_ranks
from trainkit.types import CheckpointError, ConfigError
from trainkit.weights.checkpoint import (
    compare,
    list_checkpoints,
    load,
    reading,
    staging,
    verify_checkpoint,
)
from trainkit.weights.checkpoint.facts import ResumeRules, compare_facts
from trainkit.weights.checkpoint.load import load_checkpoint, load_weights
from trainkit.weights.checkpoint.safe_files import find_owner_problems


def save_twice(run_dir):
    """Write two checkpoints, of two ranks each; return their paths."""
    from whole_step import Layout, run_steps

    run_steps(Layout(2), steps=2, save_to=run_dir)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("two")
    run_ranks(save_twice, 2, run_dir)
    return run_dir


def loads_not(path):
    """Return whether loading rejects a checkpoint; check that it changes nothing then."""
    stages, optimizer = whole_run()
    before = live(stages, optimizer)
    try:
        load_checkpoint(path, stages, optimizer)
    except CheckpointError:
        assert same(before, live(stages, optimizer))
        return True
    return False


def whole_run():
    from whole_step import Layout, build

    return build(Layout(), tk.solo_parallel())


# ------------------------------------------------------------------------------- damaged bytes


@pytest.mark.case("K3", "K4")
@pytest.mark.parametrize(("detect", "times"), [(verify_checkpoint, 4), (loads_not, 1)])
def test_no_damage_to_any_file_goes_unseen(detect, times, two_ranks, tmp_path):
    seed = int(time.time())
    print(f"seed {seed}")
    copies = [
        shutil.copytree(p, tmp_path / p.name) for p in list_checkpoints(two_ranks / "checkpoints")
    ]
    result = damage(
        *copies,
        detect,
        flips=40 * times,
        truncations=15 * times,
        pages=15 * times,
        mixes=15 * times,
        seed=seed,
    )
    assert result.undetected == []


@pytest.mark.case("K3", "K4")
def test_without_hashes_damage_would_be_loaded(two_ranks, tmp_path, monkeypatch):
    """The negative control: what a checkpoint without hashes lets in."""
    copies = [
        shutil.copytree(p, tmp_path / p.name) for p in list_checkpoints(two_ranks / "checkpoints")
    ]
    monkeypatch.setattr(reading, "_check_sha256", lambda *_: None)
    assert damage(*copies, loads_not, flips=20, truncations=0, pages=10, mixes=0, seed=0).undetected


@pytest.mark.case("K13", "K1")
def test_the_newest_that_is_whole_is_taken_and_the_loss_is_told(tmp_path):
    for steps in (1, 2, 5):
        tk.save_checkpoint(tmp_path, *small_run(steps=steps))
    five, two, _ = list_checkpoints(tmp_path / "checkpoints")
    (five / "rank_00000.safetensors").write_bytes(b"torn")
    data = bytearray((two / "rank_00000.safetensors").read_bytes())
    data[-1] ^= 1
    (two / "rank_00000.safetensors").write_bytes(data)
    (tmp_path / "checkpoints/step_00000009").mkdir()  # as no save of ours leaves it
    (tmp_path / "checkpoints/.staging-0").mkdir()
    messages = []
    state = tk.resume(tmp_path, tk.TrainState(), *small_run(steps=0)[1:], log=messages.append)
    assert state.step == 1
    names = ("step_00000009", "step_00000005", "step_00000002")
    assert [line.split(":")[0][-13:] for line in messages[:3]] == list(names)
    assert messages[3].endswith("step_00000001, 8 steps before step_00000009")
    assert not (tmp_path / "checkpoints/.staging-0").exists()


def flip_last_byte(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.case("K13")
def test_without_verifying_the_newest_would_be_taken_damaged(tmp_path, monkeypatch):
    """The negative control."""
    for steps in (1, 2):
        path = tk.save_checkpoint(tmp_path, *small_run(steps=steps))
    flip_last_byte(path / "rank_00000.safetensors")
    monkeypatch.setattr(reading, "_check_sha256", lambda *_: None)
    _, stages, optimizer, ps = small_run(steps=0)
    assert tk.resume(tmp_path, tk.TrainState(), stages, optimizer, ps, log=quiet).step == 2
    assert not same(live(*small_run(steps=2)[1:3]), live(stages, optimizer))


@pytest.mark.case("K13", "G6", "M7")
@pytest.mark.parametrize("request_of", [lambda _: "auto", lambda path: path])
def test_when_nothing_is_whole_it_is_an_error_and_never_a_fresh_start(request_of, tmp_path):
    path = tk.save_checkpoint(tmp_path, *small_run())
    data = bytearray((path / "rank_00000.safetensors").read_bytes())
    data[-1] ^= 1
    (path / "rank_00000.safetensors").write_bytes(data)
    _, stages, optimizer, ps = small_run(steps=2)
    before = live(stages, optimizer)
    with pytest.raises(CheckpointError, match=r"rank_00000\.safetensors does not match its sha256"):
        tk.resume(
            tmp_path, tk.TrainState(), stages, optimizer, ps, request=request_of(path), log=quiet
        )
    assert same(before, live(stages, optimizer))


@pytest.mark.case("G6")
def test_a_path_that_is_not_there_is_an_error(tmp_path):
    path = tmp_path / "checkpoints/step_00000999"
    with pytest.raises(CheckpointError, match="step_00000999 is not there") as error:
        tk.resume(tmp_path, tk.TrainState(), *small_run()[1:], request=path, log=quiet)
    assert error.value.code == 66


@pytest.mark.case("G6")
def test_without_the_check_a_run_would_begin_afresh(tmp_path, monkeypatch):
    """The negative control: a missing path is read as "nothing to resume from"."""
    monkeypatch.setattr(load, "_find_candidates", lambda *_: iter(()))
    assert (
        tk.resume(
            tmp_path, tk.TrainState(), *small_run()[1:], request=tmp_path / "nowhere", log=quiet
        ).step
        == 0
    )


@pytest.mark.case("G7")
def test_an_empty_directory_is_a_fresh_start(tmp_path):
    fresh = tk.TrainState()
    assert tk.resume(tmp_path, fresh, *small_run()[1:], log=quiet) is fresh


@pytest.mark.case("K9")
@pytest.mark.parametrize("kind", ["missing", "dangling", "outside", "a directory", "a torn one"])
def test_the_pointer_for_people_is_never_read(kind, tmp_path):
    run_dir = tmp_path / "run"
    for steps in (1, 2):
        tk.save_checkpoint(run_dir, *small_run(steps=steps))
    other = tk.save_checkpoint(tmp_path / "other", *small_run(steps=7))
    pointer = run_dir / "checkpoints/latest"
    pointer.unlink(missing_ok=True)
    if kind == "a directory":
        pointer.mkdir()
    elif kind != "missing":
        target = {"dangling": "nowhere", "outside": other, "a torn one": "step_00000001"}[kind]
        pointer.symlink_to(target) if kind == "outside" else pointer.write_text(str(target))
    assert tk.resume(run_dir, tk.TrainState(), *small_run()[1:], log=quiet).step == 2


@pytest.mark.case("K9")
def test_a_pointer_that_was_trusted_would_lose_steps(tmp_path, monkeypatch):
    """The negative control: a pointer that a killed save left as it was."""
    for steps in (1, 2):
        tk.save_checkpoint(tmp_path, *small_run(steps=steps))
    (tmp_path / "checkpoints/latest").write_text("step_00000001")

    def trusting(directory):
        return [directory / (directory / "latest").read_text().strip()]

    monkeypatch.setattr(load, "list_checkpoints", trusting)
    assert tk.resume(tmp_path, tk.TrainState(), *small_run()[1:], log=quiet).step == 1


# ------------------------------------------------------------------------------- misfits


def refused(path, stages, optimizer, **options):
    """Return the problems that a load lists; check that it changes nothing."""
    before = live(stages, optimizer)
    with pytest.raises(CheckpointError) as error:
        load_checkpoint(path, stages, optimizer, **options)
    assert same(before, live(stages, optimizer))
    assert error.value.code == 66
    return error.value.got


class Two(nn.Module):
    """Two linear layers, optionally with one missing or one more."""

    def __init__(self, *names, width=3, dtype=torch.float32):
        super().__init__()
        for name in names:
            self.add_module(name, nn.Linear(width, 2, bias=False, dtype=dtype))


@pytest.fixture
def saved(tmp_path):
    """A checkpoint of the layers a and b."""
    return tk.save_checkpoint(tmp_path, *small_run(model=Two("a", "b")))


@pytest.mark.case("M1", "M7")
def test_another_dtype_is_refused_unless_the_caller_casts(saved):
    _, stages, optimizer, _ = small_run(model=Two("a", "b", dtype=torch.bfloat16))
    problems = refused(saved, stages, optimizer)
    assert "model/a.weight is float32[2, 3], the run has bfloat16[2, 3]" in problems
    load_checkpoint(saved, stages, optimizer, cast=["**"])
    wanted = small_run(model=Two("a", "b"))
    load_checkpoint(saved, *wanted[1:3])
    assert torch.equal(stages[0].a.weight, wanted[1][0].a.weight.bfloat16())
    memory = optimizer.state[stages[0].a.weight]
    assert memory["exp_avg"].dtype == torch.bfloat16
    assert memory["step"].dtype == torch.float32
    whole = small_run(model=Two("a", "b"), steps=0)[1]
    whole[0].a.weight = nn.Parameter(torch.zeros(2, 3, dtype=torch.int32), requires_grad=False)
    with pytest.raises(CheckpointError, match=r"the run has int32\[2, 3\]"):
        load_weights(saved, whole, cast=["**"])


@pytest.mark.case("M2", "M7")
def test_all_other_shapes_are_named(saved):
    _, stages, optimizer, _ = small_run(model=Two("a", "b", width=4))
    problems = refused(saved, stages, optimizer)
    assert {f"model/{n}.weight is float32[2, 3], the run has float32[2, 4]" for n in "ab"} <= set(
        problems
    )
    stages[0].a.weight.data = torch.zeros(3, 2)  # as many elements, the other way round
    assert "model/a.weight is float32[2, 3], the run has float32[3, 2]" in refused(
        saved, stages, optimizer
    )


@pytest.mark.case("M3", "M7")
def test_what_is_missing_and_what_is_left_over_are_told_together(saved):
    _, stages, optimizer, _ = small_run(model=Two("b", "c"), steps=2)
    problems = refused(saved, stages, optimizer)
    assert "model/c.weight is missing in the checkpoint" in problems
    assert "model/a.weight is left over" in problems
    assert "optimizer/exp_avg/a.weight is left over" in problems
    before = stages[0].c.weight.detach().clone()
    load_checkpoint(saved, stages, optimizer, allow_missing=["c.*"], allow_extra=["a.*"])
    assert torch.equal(stages[0].c.weight, before)
    assert not optimizer.state.get(stages[0].c.weight)
    assert set(optimizer.state[stages[0].b.weight]) == {"step", "exp_avg", "exp_avg_sq"}


@pytest.mark.case("M3")
def test_base_weights_go_under_new_adapters(saved):
    model = Two("a", "b", "lora")
    with pytest.raises(CheckpointError, match=r"model/lora\.weight is missing"):
        load_weights(saved, [model])
    assert load_weights(saved, [model], allow_missing=["lora.*"]).step == 1
    wanted = small_run(model=Two("a", "b"), steps=0)[1:3]
    load_checkpoint(saved, *wanted)
    assert torch.equal(model.a.weight, wanted[0][0].a.weight)


def without(*names):
    def change(index):
        for name in names:
            del index["tensors"][name]

    return change


def drop_tensors(path, *names):
    """Take tensors out of a checkpoint of one file, the index included, and seal it again."""
    from safetensors.torch import load_file, save_file

    file = path / "rank_00000.safetensors"
    save_file({k: v for k, v in load_file(file).items() if k not in names}, file)
    rewrite(path, "index.json", without(*names))


MOMENTS = [f"optimizer/{key}/a.weight" for key in ("exp_avg", "exp_avg_sq", "step")]


@pytest.mark.case("M4", "M7", "X9")
@pytest.mark.parametrize("dropped", [MOMENTS[:1], MOMENTS[2:], MOMENTS])
def test_moments_never_begin_afresh_unseen(dropped, saved):
    drop_tensors(saved, *dropped)
    rewrite(saved, "state.json", lambda state: state["optimizer"].update(untouched=[]))
    assert verify_checkpoint(saved) == []
    _, stages, optimizer, _ = small_run(model=Two("a", "b"), steps=0)
    problems = refused(saved, stages, optimizer)
    assert problems == [f"{name} is missing in the checkpoint" for name in dropped]


@pytest.mark.case("M4")
def test_without_the_check_moments_would_begin_afresh(saved, monkeypatch):
    """The negative control: the optimizer would step as if it had never stepped."""
    drop_tensors(saved, *MOMENTS)
    monkeypatch.setattr(compare, "find_optimizer_problems", lambda *_, **__: [])
    _, stages, optimizer, _ = small_run(model=Two("a", "b"), steps=0)
    load_checkpoint(saved, stages, optimizer)
    assert not optimizer.state.get(stages[0].a.weight)


@pytest.mark.case("M5", "M7")
def test_a_tied_head_is_no_untied_one_and_the_other_way_round(tmp_path):
    class Lm(nn.Module):
        def __init__(self, *, tied):
            super().__init__()
            self.embedding = nn.Embedding(5, 3)
            self.head = nn.Linear(3, 5, bias=False)
            if tied:
                self.head.weight = self.embedding.weight

    paths = {
        t: tk.save_checkpoint(tmp_path / str(t), *small_run(model=Lm(tied=t)))
        for t in (True, False)
    }
    for tied, path in paths.items():
        _, stages, optimizer, _ = small_run(model=Lm(tied=not tied))
        word = "is missing in the checkpoint" if tied else "is left over"
        assert f"model/head.weight {word}" in refused(path, stages, optimizer)
        _, stages, optimizer, _ = small_run(model=Lm(tied=tied))
        load_checkpoint(path, stages, optimizer)
        equal = torch.equal(stages[0].head.weight, stages[0].embedding.weight)
        assert equal == tied


@pytest.mark.case("M1", "M3", "M5")
def test_without_comparing_misfits_would_be_loaded_in_silence(saved, monkeypatch):
    """The negative control: numbers are rounded, and layers keep their initial values."""
    monkeypatch.setattr(compare, "find_tensor_problems", lambda *_, **__: [])
    rounded = Two("a", "b", dtype=torch.bfloat16)
    load_weights(saved, [rounded])
    wanted = Two("a", "b")
    load_weights(saved, [wanted])
    assert not torch.equal(rounded.a.weight.float(), wanted.a.weight)
    untied = Two("b", "head")
    initial = untied.head.weight.detach().clone()
    load_weights(saved, [untied])
    assert torch.equal(untied.head.weight, initial)


@pytest.mark.case("M6")
def test_a_change_of_what_is_frozen_is_named(saved):
    model = Two("a", "b")
    model.a.requires_grad_(requires_grad=False)
    _, stages, optimizer, _ = small_run(model=model)
    assert refused(saved, stages, optimizer) == [
        "a.weight was trained when it was saved and is frozen now"
    ]
    load_checkpoint(saved, stages, optimizer, allow_extra=["a.weight"])
    frozen = tk.save_checkpoint(saved.parents[1] / "frozen", *small_run(model=model))
    _, stages, optimizer, _ = small_run(model=Two("a", "b"))
    assert refused(frozen, stages, optimizer) == ["a.weight was not trained when it was saved"]
    load_checkpoint(frozen, stages, optimizer, allow_missing=["a.weight"])
    assert torch.equal(stages[0].a.weight, model.a.weight)


@pytest.mark.case("M7")
def test_without_staging_a_load_that_fails_would_leave_half_of_it(tmp_path, monkeypatch):
    """The negative control: only the order verify, stage, copy keeps a run unchanged."""
    path = tk.save_checkpoint(tmp_path, *small_run())
    data = bytearray((path / "rank_00000.safetensors").read_bytes())
    data[-1] ^= 1
    (path / "rank_00000.safetensors").write_bytes(data)
    _, stages, optimizer, _ = small_run(steps=2)
    before = live(stages, optimizer)
    refused(path, stages, optimizer)

    monkeypatch.setattr(staging, "allocate_buffers", lambda targets, _: targets)
    with pytest.raises(CheckpointError):
        load_checkpoint(path, stages, optimizer)
    assert not same(before, live(stages, optimizer))


def load_where_one_rank_cannot(path):
    _, stages, optimizer, _ = small_run(steps=2)
    before = live(stages, optimizer)
    with tk.parallel_session() as ps:
        if ps.world.index == 1:
            stages[0].weight.data = torch.zeros(2, 9)
            before = live(stages, optimizer)
        with pytest.raises(CheckpointError, match=r"the run has float32\[2, 9\]"):
            load_checkpoint(path, stages, optimizer, axis=ps.world)
        return same(before, live(stages, optimizer))


@pytest.mark.case("M7")
def test_if_one_rank_cannot_load_none_changes(tmp_path):
    path = tk.save_checkpoint(tmp_path, *small_run())
    assert run_ranks(load_where_one_rank_cannot, 2, path) == [True, True]


# ------------------------------------------------------------------------------- whose it is


def run_of(path):
    return json.loads((path / "manifest.json").read_text())["run"]


@pytest.mark.case("K21", "X13")
def test_a_checkpoint_of_another_run_is_refused_unless_it_is_asked_for(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    tk.save_checkpoint(one, *small_run())
    tk.save_checkpoint(two, *small_run(steps=3))
    (foreign,) = list_checkpoints(two / "checkpoints")
    copied = shutil.copytree(foreign, one / "checkpoints" / foreign.name)
    _, stages, optimizer, ps = small_run(steps=0)
    before = live(stages, optimizer)
    with pytest.raises(CheckpointError, match=f"run_id {run_of(foreign)}, this run has"):
        tk.resume(one, tk.TrainState(), stages, optimizer, ps, log=quiet)
    assert same(before, live(stages, optimizer))
    messages = []
    assert (
        tk.resume(
            one, tk.TrainState(), stages, optimizer, ps, request=copied, log=messages.append
        ).step
        == 3
    )
    assert f"forked from {run_of(foreign)}" in messages[-1]
    after = tk.save_checkpoint(one, tk.TrainState(step=4), stages, optimizer, ps)
    manifest = json.loads((after / "manifest.json").read_text())
    assert manifest["run"] not in (run_of(foreign), run_of(one / "checkpoints/step_00000001"))
    assert manifest["parent"]["run"] == run_of(foreign)


@pytest.mark.case("K21")
def test_without_the_check_another_run_would_be_taken(tmp_path, monkeypatch):
    """The negative control."""
    tk.save_checkpoint(tmp_path / "one", *small_run())
    foreign = tk.save_checkpoint(tmp_path / "two", *small_run(steps=3))
    shutil.copytree(foreign, tmp_path / "one/checkpoints" / foreign.name)
    monkeypatch.setattr(load, "_read_run_id", lambda _: (None, None))
    state = tk.resume(tmp_path / "one", tk.TrainState(), *small_run()[1:], log=quiet)
    assert state.step == 3


def tree(path):
    return {p.name: (p.read_bytes(), p.stat().st_mtime_ns) for p in path.rglob("*") if p.is_file()}


@pytest.mark.case("X13")
def test_a_fork_leaves_its_parent_as_it_was(tmp_path):
    for steps in (1, 2):
        path = tk.save_checkpoint(tmp_path / "parent", *small_run(steps=steps))
    before = tree(tmp_path / "parent")
    rest = small_run(steps=0)[1:]
    state = tk.resume(tmp_path / "child", tk.TrainState(), *rest, request=path, log=quiet)
    made = tk.save_checkpoint(tmp_path / "child", state, *rest)
    assert tree(tmp_path / "parent") == before
    assert run_of(made) != run_of(path)
    parent = json.loads((made / "manifest.json").read_text())["parent"]
    assert parent == {"run": run_of(path), "step": 2, "path": str(path)}
    assert tk.resume(tmp_path / "child", tk.TrainState(), *rest, log=quiet).step == 2


@pytest.mark.case("X13", "G7")
def test_a_fork_that_is_killed_before_it_saves_does_not_begin_from_scratch(tmp_path):
    path = tk.save_checkpoint(tmp_path / "parent", *small_run(steps=3))
    rest, child = small_run(steps=0)[1:], tmp_path / "child"
    tk.resume(child, tk.TrainState(), *rest, request=path, log=quiet)
    assert tk.resume(child, tk.TrainState(), *rest, log=quiet).step == 3
    assert tk.resume(child, tk.TrainState(), *rest, request="never", log=quiet).step == 0
    assert tk.resume(child, tk.TrainState(), *rest, log=quiet).step == 0
    tk.resume(child, tk.TrainState(), *rest, request=path, log=quiet)
    shutil.rmtree(path)
    with pytest.raises(CheckpointError, match="step_00000003 is not there"):
        tk.resume(child, tk.TrainState(), *rest, log=quiet)


@pytest.mark.case("X13")
def test_without_a_fork_nobody_would_know_the_parent(tmp_path, monkeypatch):
    """The negative control."""
    path = tk.save_checkpoint(tmp_path / "parent", *small_run())
    monkeypatch.setattr(load, "_is_fork", lambda *_: False)
    rest = small_run(steps=0)[1:]
    state = tk.resume(tmp_path / "child", tk.TrainState(), *rest, request=path, log=quiet)
    made = tk.save_checkpoint(tmp_path / "child", state, *rest)
    assert json.loads((made / "manifest.json").read_text())["parent"] is None


@pytest.mark.case("K19")
def test_who_else_may_write_a_checkpoint_is_told_or_refused(tmp_path):
    path = tk.save_checkpoint(tmp_path, *small_run())
    path.chmod(0o755)
    for file in path.iterdir():
        file.chmod(0o644)
    assert find_owner_problems(path) == []
    (path / "state.json").chmod(0o666)
    assert "can be written by everybody (mode 666)" in find_owner_problems(path)[0]
    if os.geteuid() == 0:
        os.chown(path / "index.json", 12345, -1)
        assert "belongs to user 12345" in find_owner_problems(path)[0]
    messages, rest = [], small_run()[1:]
    assert tk.resume(tmp_path, tk.TrainState(), *rest, log=messages.append).step == 1
    assert any("can be written by everybody" in line for line in messages)
    with pytest.raises(CheckpointError, match=r"resume: .*json"):
        tk.resume(tmp_path, tk.TrainState(), *rest, strict_owner=True, log=quiet)


# ------------------------------------------------------------------------------- what has changed

FACTS = {"config.seed": 0, "config.lr": 0.1, "config.microbatch": 2, "files of a": {"a.bin": "1"}}
RULES = ResumeRules(allow=["microbatch"], ask=["lr", "schedule-steps"])


def resume_with(run_dir, changes=(), rules=RULES):
    """Resume with changed facts; return the state and the messages."""
    messages, run = [], small_run(steps=0)[1:]
    facts = FACTS | dict(changes)
    state = tk.resume(run_dir, tk.TrainState(), *run, facts=facts, rules=rules, log=messages.append)
    return state, messages


@pytest.fixture
def with_facts(tmp_path):
    tk.save_checkpoint(tmp_path, *small_run(), facts=FACTS)
    return tmp_path


@pytest.mark.case("G5")
def test_a_change_is_told_or_wants_leave_or_is_refused(with_facts):
    state, messages = resume_with(with_facts, {"config.microbatch": 4})
    assert state.step == 1
    assert messages[-1] == "its config.microbatch is 2, the run's is 4"
    with pytest.raises(CheckpointError) as error:
        resume_with(with_facts, {"config.lr": 0.2, "config.seed": 1})
    assert "config.lr is 0.1, the run's is 0.2 (--allow-change lr" in str(error.value)
    assert "its config.seed is 0, the run's is 1" in str(error.value)
    allowed = attrs.evolve(RULES, granted=["lr"])
    state, messages = resume_with(with_facts, {"config.lr": 0.2}, allowed)
    assert messages[-1] == "its config.lr is 0.1, the run's is 0.2"
    with pytest.raises(
        ConfigError, match="seed cannot change in a run; what can be allowed to is lr"
    ):
        resume_with(with_facts, rules=ResumeRules(ask=["lr"], granted=["seed"]))


def test_a_checkpoint_that_is_loaded_by_its_path_tells_what_has_changed(with_facts, caplog):
    path, run = with_facts / "checkpoints" / "step_00000001", small_run(steps=0)[1:3]
    facts, messages = FACTS | {"config.microbatch": 4}, []
    load_checkpoint(path, *run, facts=facts, rules=RULES, log=messages.append)
    assert messages == ["its config.microbatch is 2, the run's is 4"]
    load_checkpoint(path, *run, facts=facts, rules=RULES)
    assert caplog.messages == messages
    load_checkpoint(path, *run, facts=FACTS, rules=RULES)
    assert caplog.messages == messages


def test_where_facts_differ_tensors_that_follow_from_them_are_counted(with_facts):
    path, other = with_facts / "checkpoints" / "step_00000001", small_model(width=5)
    run = [other], torch.optim.AdamW(other.parameters(), lr=0.1)
    with pytest.raises(CheckpointError) as error:
        load_checkpoint(path, *run, facts=FACTS | {"config.seed": 1})
    facts, tensors = error.value.got
    assert facts == "its config.seed is 0, the run's is 1"
    assert tensors == "tensors and options of its optimizer that differ too: 1"
    with pytest.raises(CheckpointError) as error:
        load_checkpoint(path, *run, facts=FACTS)
    assert error.value.got == ["model/weight is float32[2, 3], the run has float32[2, 5]"]


@pytest.mark.case("G5")
def test_without_facts_another_configuration_would_go_on(with_facts, monkeypatch):
    """The negative control."""
    monkeypatch.setattr(load, "compare_facts", lambda *_: ([], []))
    assert resume_with(with_facts, {"config.seed": 1})[0].step == 1


@pytest.mark.case("X11")
def test_another_machine_is_told(tmp_path):
    path = tk.save_checkpoint(tmp_path, *small_run())
    messages = []
    tk.resume(tmp_path, tk.TrainState(), *small_run()[1:], log=messages.append)
    assert len(messages) == 1
    rewrite(path, "state.json", lambda state: state["machine"].update(threads=77))
    tk.resume(tmp_path, tk.TrainState(), *small_run()[1:], log=messages.append)
    assert f"written with threads 77, now {torch.get_num_threads()}" in messages[-1]


@pytest.mark.case("D5", "D6")
def test_data_that_changed_is_shown(with_facts):
    for files, word in (
        ({"a.bin": "2"}, "files of a: a.bin was changed from 1 to 2"),
        ({"a.bin": "1", "aaa.bin": "3"}, "files of a: aaa.bin was added"),
        ({}, "files of a: a.bin was removed"),
    ):
        with pytest.raises(CheckpointError, match=word):
            resume_with(with_facts, {"files of a": files})


def test_a_fact_that_was_not_recorded_then_is_asked_for_only_where_it_must_not_change():
    refused, messages = compare_facts(
        {}, {"config.lr": 1, "config.microbatch": 1, "seed": 1}, RULES
    )
    assert (refused, messages) == (["its seed is None, the run's is 1"], [])


def test_a_table_that_may_change_is_told_in_one_line_and_explains_what_is_refused():
    rules = ResumeRules(allow=["files"])
    saved = {"files": {"a": "1", "b": "2"}, "fingerprint": "12"}
    moved = {"files": {"c": "1", "b": "2"}, "fingerprint": "12"}
    line = "files: a was removed; files: c was added"
    assert compare_facts(saved, moved, rules) == ([], [line])
    refused, _ = compare_facts(saved, moved | {"fingerprint": "13"}, rules)
    assert refused == ["its fingerprint is 12, the run's is 13", *line.split("; ")]


def test_a_free_field_frees_no_fact_of_its_name():
    """The path of a tokenizer and the name of a template may change; the hashes of both may not."""

    @attrs.frozen(kw_only=True)
    class Config(RunConfig):
        tokenizer: str = option("a", on_resume="allow")

    moved = {"config.tokenizer": "b", "tokenizer": "12"}
    config = Config(allow_change=("tokenizer",))  # which allows the path
    for rules in (make_resume_rules(Config()), make_resume_rules(config)):
        refused, messages = compare_facts(
            {"config.tokenizer": "a", "tokenizer": "12"}, moved, rules
        )
        assert (refused, messages) == ([], ["its config.tokenizer is a, the run's is b"])
        refused, _ = compare_facts({"config.tokenizer": "a", "tokenizer": "13"}, moved, rules)
        assert refused == ["its tokenizer is 13, the run's is 12"]


# ------------------------------------------------------------------------------- again and again


@pytest.mark.case("K25")
def test_what_is_loaded_and_saved_again_and_again_stays_the_same(tmp_path):
    path = tk.save_checkpoint(tmp_path, *small_run(steps=2))
    for _ in range(2):
        _, stages, optimizer, ps = small_run(steps=3)
        for _ in range(2):
            state = load_checkpoint(path, stages, optimizer)
        path = tk.save_checkpoint(tmp_path, state, stages, optimizer, ps)
    first, second, third = list_checkpoints(tmp_path / "checkpoints")
    manifests = [json.loads((p / "manifest.json").read_text()) for p in (first, second, third)]
    assert manifests[0]["files"] == manifests[1]["files"] == manifests[2]["files"]
    assert manifests[0]["state_hash"] == manifests[2]["state_hash"]


@pytest.mark.case("K25", "X9")
def test_a_part_that_was_lost_would_show_in_the_files(tmp_path, monkeypatch):
    """The negative control: moments that are not restored change the next checkpoint."""
    path = tk.save_checkpoint(tmp_path, *small_run(steps=2))
    monkeypatch.setattr(staging, "install_moments_", lambda *_: None)
    _, stages, optimizer, ps = small_run(steps=3)
    state = load_checkpoint(path, stages, optimizer)
    again = tk.save_checkpoint(tmp_path, state, stages, optimizer, ps)
    manifests = [json.loads((p / "manifest.json").read_text()) for p in (path, again)]
    assert manifests[0]["state_hash"] != manifests[1]["state_hash"]


@pytest.mark.case("X9")
def test_every_part_of_the_state_comes_back_and_a_lost_one_is_seen(tmp_path):
    state, stages, optimizer, ps = small_run(steps=2)
    health = {"skips": 1.0, "losses": [2.5, 2.25]}
    state = tk.TrainState(2, 30, tk.types.Cursor(5, (1, 2)), health)
    path = tk.save_checkpoint(tmp_path, state, stages, optimizer, ps)
    _, fresh, other, _ = small_run(steps=0, model=small_model())
    found = load_checkpoint(path, fresh, other)
    assert (found.step, found.tokens, found.cursor, found.health) == (2, 30, state.cursor, health)
    assert same(live(stages, optimizer), live(fresh, other))
    for part in ("step", "tokens", "cursor", "health"):
        rewrite(path, "state.json", lambda saved, part=part: saved["state"].pop(part))
        with pytest.raises(CheckpointError, match=r"state\.json is not the state of a run"):
            load_checkpoint(path, fresh, other)
        rewrite(
            path,
            "state.json",
            lambda saved, part=part: saved["state"].__setitem__(part, as_json(state, part)),
        )
    reseal(path)
    assert load_checkpoint(path, fresh, other).step == 2


def as_json(state, part):
    value = getattr(state, part)
    return {"batch": value.batch, "stream": list(value.stream)} if part == "cursor" else value


def test_a_checkpoint_is_read_once(tmp_path, monkeypatch):
    path = tk.save_checkpoint(tmp_path, *small_run())
    read = []
    pread = os.preadv

    def counted(file, into, at):
        read.append((Path(f"/proc/self/fd/{file}").readlink().name, len(into[0])))
        return pread(file, into, at)

    monkeypatch.setattr(os, "preadv", counted)
    load_checkpoint(path, *small_run()[1:3])
    tensors = [size for name, size in read if name == "rank_00000.safetensors"]
    size = (path / "rank_00000.safetensors").stat().st_size
    assert size <= sum(tensors) <= size + 8  # the header's length is read before the header


@pytest.mark.case("X13", "E8")
def test_a_fork_that_is_requeued_with_the_same_command_goes_on(tmp_path):
    path = tk.save_checkpoint(tmp_path / "parent", *small_run(steps=2))
    rest, child, messages = small_run(steps=0)[1:], tmp_path / "child", []
    tk.resume(child, tk.TrainState(), *rest, request=path, log=messages.append)
    tk.save_checkpoint(child, tk.TrainState(step=7), *rest)
    assert tk.resume(child, tk.TrainState(), *rest, request=path, log=messages.append).step == 7
    assert any("was forked from" in line for line in messages)
    assert [p.name for p in list_checkpoints(child / "checkpoints")] == ["step_00000007"]
