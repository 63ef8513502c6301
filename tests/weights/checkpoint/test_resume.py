"""A stopped run resumes to the same bits. For other layouts see test_elastic.py."""

import functools
import json
import os
import shutil

import attrs
import pytest
import torch
from torch import nn
from whole_step import Layout, run_steps

import trainkit as tk
from trainkit.models import Experts, make_decoder_config
from trainkit.run.sinks import open_run_sinks
from trainkit.tools.testing import run_ranks
from trainkit.types import CheckpointError, Cursor, DiskError, Share
from trainkit.weights.checkpoint import (
    check_disk_space,
    list_checkpoints,
    load_weights,
    open_saver,
    verify_checkpoint,
)
from trainkit.weights.checkpoint.facts import ResumeRules, compare_facts

STEPS = 4


def on_ranks(layout, **options):
    call = functools.partial(run_steps, layout, steps=STEPS, **options)
    return run_ranks(call, layout.world)[0] if layout.world > 1 else call()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return {world: (run directory with a checkpoint after every step, result of the run)}."""
    runs = {}
    for world in (1, 2):
        run_dir = tmp_path_factory.mktemp(f"run{world}")
        runs[world] = run_dir, on_ranks(Layout(world), save_to=run_dir)
    return runs


def stopped_after(step, run_dir, tmp_path):
    """Copy a run directory as it was after a step."""
    source = run_dir / "checkpoints" / f"step_{step:08d}"
    shutil.copytree(source, tmp_path / "checkpoints" / source.name)
    return tmp_path


@pytest.mark.case("X1")
@pytest.mark.parametrize("step", range(1, STEPS))
@pytest.mark.parametrize("world", [1, 2])
def test_a_run_stopped_after_any_step_goes_on_bit_for_bit(world, step, saved, tmp_path):
    run_dir, whole = saved[world]
    found = on_ranks(Layout(world), resume_from=stopped_after(step, run_dir, tmp_path))
    assert found["losses"] == whole["losses"][step:]
    assert found["norms"] == whole["norms"][step:]
    assert found["state_hash"] == whole["state_hash"]


def test_each_rank_writes_its_own_part_once(saved):
    run_dir, _ = saved[2]
    newest = list_checkpoints(run_dir / "checkpoints")[0]
    names = sorted(path.name for path in newest.iterdir())
    assert names == [
        "index.json",
        "manifest.json",
        "rank_00000.safetensors",
        "rank_00001.safetensors",
        "state.json",
    ]
    sizes = [(newest / f"rank_0000{rank}.safetensors").stat().st_size for rank in (0, 1)]
    assert max(sizes) < 1.6 * min(sizes)


# ---------------------------------------------------------------- one process, small model


def small_run(*, width=3, steps=1):
    """Return the arguments of a checkpoint: counters, stages, optimizer, layout."""
    torch.manual_seed(0)
    model = nn.Linear(width, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.randn(4, width)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    state = tk.TrainState(step=steps, tokens=torch.tensor(7), cursor=Cursor(steps, (1, 2)))
    return state, [model], optimizer, tk.solo_parallel()


def snapshot(stages, optimizer):
    tensors = [p.detach().clone() for p in stages[0].parameters()]
    return tensors + [v.clone() for s in optimizer.state.values() for v in s.values()]


def unchanged(before, stages, optimizer):
    after = snapshot(stages, optimizer)
    return len(before) == len(after) and all(map(torch.equal, before, after))


def test_counters_and_cursor_come_back(tmp_path):
    run = small_run(steps=3)
    tk.save_checkpoint(tmp_path, *run)
    state = tk.resume(tmp_path, tk.TrainState(), *small_run()[1:], log=lambda _: None)
    assert (state.step, state.tokens, state.cursor) == (3, 7, Cursor(3, (1, 2)))


def test_a_second_save_of_a_step_gets_a_new_directory(tmp_path):
    run = small_run()
    names = [tk.save_checkpoint(tmp_path, *run).name for _ in range(3)]
    assert names == ["step_00000001", "step_00000001-1", "step_00000001-2"]
    newest = list_checkpoints(tmp_path / "checkpoints")[0]
    assert newest.name == names[-1]
    assert not list((tmp_path / "checkpoints").glob(".staging*"))


def test_an_empty_run_directory_is_a_fresh_start(tmp_path):
    state = tk.TrainState(step=0)
    assert tk.resume(tmp_path, state, *small_run()[1:]) is state


LOST = {
    "both marks": lambda _: None,
    "run.json alone": lambda run: (run / "events.jsonl").unlink(),
    "events.jsonl alone": lambda run: (run / "run.json").unlink(),
}


@pytest.mark.case("L9")
@pytest.mark.parametrize("directory", ["empty", "missing"])
@pytest.mark.parametrize("left", LOST.values(), ids=LOST)
def test_a_run_that_has_saved_and_lost_it_does_not_begin_afresh(left, directory, tmp_path):
    with (
        open_run_sinks(tmp_path, Share(0, 1), step=0, last=9) as (log, event),
        open_saver(tmp_path, *small_run()[1:], event=event) as (save, saved),
    ):
        log(1, {"loss": 1.0})
        save(tk.TrainState(step=1))
        saved(wait=True)
    shutil.rmtree(tmp_path / "checkpoints")
    if directory == "empty":
        (tmp_path / "checkpoints").mkdir()
    left(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    with pytest.raises(CheckpointError, match=r"has saved, but there is no checkpoint in") as error:
        tk.resume(tmp_path, tk.TrainState(), *small_run()[1:])
    assert "--resume never" in error.value.hint
    assert before == {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    assert tk.resume(tmp_path, tk.TrainState(), *small_run()[1:], request="never").step == 0
    with open_run_sinks(tmp_path, Share(0, 1), step=0, last=9):
        pass
    assert tk.resume(tmp_path, tk.TrainState(), *small_run()[1:]).step == 0  # it has not saved


@pytest.mark.case("L9")
def test_a_run_that_never_saved_begins_afresh(tmp_path):
    with open_run_sinks(tmp_path, Share(0, 1), step=0, last=9) as (log, event):
        log(1, {"loss": 1.0})
        event("save", step=1, path=None, error="no room")
    assert tk.resume(tmp_path, tk.TrainState(), *small_run()[1:]).step == 0


def test_a_fork_that_has_lost_what_it_saved_does_not_begin_at_the_fork_again(tmp_path):
    origin = tk.save_checkpoint(tmp_path / "origin", *small_run())
    run_dir, rest = tmp_path / "fork", small_run()[1:]
    run_dir.mkdir()
    for _ in range(2):  # a requeued job that has not saved yet
        state = tk.resume(run_dir, tk.TrainState(), *rest, request=origin, log=lambda _: None)
    shutil.rmtree(tk.save_checkpoint(run_dir, attrs.evolve(state, step=2), *rest))
    for request in (origin, "auto"):
        with pytest.raises(CheckpointError, match="has saved"):
            tk.resume(run_dir, tk.TrainState(), *rest, request=request, log=lambda _: None)


ODD = {
    "a dangling link": lambda path: path.symlink_to("unmounted"),
    "a file": lambda path: path.write_text(""),
    "a pipe": os.mkfifo,
}


@pytest.mark.parametrize("request_", ["auto", "never"])
@pytest.mark.parametrize("make", ODD.values(), ids=ODD)
def test_checkpoints_that_are_no_directory_are_told(make, request_, tmp_path):
    make(tmp_path / "checkpoints")
    with pytest.raises(CheckpointError, match=r"checkpoints is .* no directory"):
        tk.resume(tmp_path, tk.TrainState(), *small_run()[1:], request=request_)


def test_never_takes_nothing(tmp_path):
    tk.save_checkpoint(tmp_path, *small_run())
    assert tk.resume(tmp_path, tk.TrainState(), *small_run()[1:], request="never").step == 0


def test_a_path_that_is_not_there_is_an_error_and_no_fresh_start(tmp_path):
    with pytest.raises(CheckpointError, match="nowhere is not there"):
        tk.resume(tmp_path, tk.TrainState(), *small_run()[1:], request=tmp_path / "nowhere")


def test_the_newest_that_verifies_is_taken_and_the_others_are_named(tmp_path):
    for steps in (1, 2):
        tk.save_checkpoint(tmp_path, *small_run(steps=steps))
    damaged = tmp_path / "checkpoints/step_00000002/rank_00000.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    messages = []
    state = tk.resume(tmp_path, tk.TrainState(), *small_run()[1:], log=messages.append)
    assert state.step == 1
    assert "step_00000002" in messages[0]
    assert "step_00000001" in messages[1]


def test_when_none_verifies_it_is_an_error_and_nothing_changes(tmp_path):
    tk.save_checkpoint(tmp_path, *small_run())
    (tmp_path / "checkpoints/step_00000001/state.json").write_text("{}")
    _, stages, optimizer, ps = small_run()
    before = snapshot(stages, optimizer)
    with pytest.raises(CheckpointError, match="none of the 1 checkpoints"):
        tk.resume(tmp_path, tk.TrainState(), stages, optimizer, ps, log=lambda _: None)
    assert unchanged(before, stages, optimizer)


def test_a_checkpoint_of_another_shape_is_refused_with_all_differences(tmp_path):
    tk.save_checkpoint(tmp_path, *small_run(width=3))
    _, stages, optimizer, ps = small_run(width=5)
    before = snapshot(stages, optimizer)
    with pytest.raises(CheckpointError, match=r"model/weight is float32\[2, 3\]") as caught:
        tk.resume(tmp_path, tk.TrainState(), stages, optimizer, ps, log=lambda _: None)
    assert "float32[2, 5]" in str(caught.value)
    assert unchanged(before, stages, optimizer)


def test_moments_never_begin_afresh_unseen(tmp_path):
    state, stages, optimizer, ps = small_run()
    (model,) = stages
    plain = torch.optim.SGD(model.parameters())
    tk.save_checkpoint(tmp_path / "plain", state, stages, plain, ps)
    with pytest.raises(CheckpointError, match="its optimizer is SGD, the run has AdamW"):
        tk.resume(tmp_path / "plain", state, stages, optimizer, ps, log=lambda _: None)
    partial = torch.optim.AdamW([model.weight])
    tk.save_checkpoint(tmp_path / "partial", state, stages, partial, ps)
    with pytest.raises(CheckpointError, match="bias was not trained when it was saved"):
        tk.resume(tmp_path / "partial", state, stages, optimizer, ps, log=lambda _: None)


def test_weights_alone_can_be_read(tmp_path):
    _, (model,), *_ = run = small_run()
    path = tk.save_checkpoint(tmp_path, *run)
    fresh = nn.Linear(3, 2)
    assert load_weights(path, [fresh]).step == 1
    assert torch.equal(fresh.weight, model.weight)


def test_buffers_are_saved_and_come_back(tmp_path):
    model = nn.BatchNorm1d(2)
    model(torch.randn(8, 2))
    optimizer, solo = torch.optim.SGD(model.parameters()), tk.solo_parallel()
    tk.save_checkpoint(tmp_path, tk.TrainState(step=1), [model], optimizer, solo)
    fresh = nn.BatchNorm1d(2)
    optimizer = torch.optim.SGD(fresh.parameters())
    tk.resume(tmp_path, tk.TrainState(), [fresh], optimizer, solo, log=lambda _: None)
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), fresh.buffers(), strict=True))


def test_no_pickle_is_written(tmp_path):
    path = tk.save_checkpoint(tmp_path, *small_run())
    assert {file.suffix for file in path.iterdir()} == {".json", ".safetensors"}
    assert verify_checkpoint(path) == []


# ---------------------------------------------------------------- what must be refused


def test_after_never_nothing_goes_back_to_the_abandoned_branch(tmp_path):
    for steps in (1, 3):
        tk.save_checkpoint(tmp_path, *small_run(steps=steps))
    rest, messages = small_run()[1:], []
    assert (
        tk.resume(tmp_path, tk.TrainState(), *rest, request="never", log=messages.append).step == 0
    )
    assert "set 2 checkpoints of another branch aside" in messages[-1]
    assert tk.resume(tmp_path, tk.TrainState(), *rest, log=messages.append).step == 0
    tk.save_checkpoint(tmp_path, *small_run(steps=2))
    assert tk.resume(tmp_path, tk.TrainState(), *rest, log=messages.append).step == 2
    assert len(list((tmp_path / "checkpoints/abandoned-1").iterdir())) == 2


def test_after_an_older_one_nothing_goes_back_to_the_newer(tmp_path):
    paths = [tk.save_checkpoint(tmp_path, *small_run(steps=steps)) for steps in (1, 2, 3)]
    rest = small_run()[1:]
    assert (
        tk.resume(tmp_path, tk.TrainState(), *rest, request=paths[1], log=lambda _: None).step == 2
    )
    assert tk.resume(tmp_path, tk.TrainState(), *rest, log=lambda _: None).step == 2


def test_what_a_killed_save_left_is_removed(tmp_path):
    tk.save_checkpoint(tmp_path, *small_run())
    (tmp_path / "checkpoints/.staging-0").mkdir()
    tk.resume(tmp_path, tk.TrainState(), *small_run()[1:], log=lambda _: None)
    assert not (tmp_path / "checkpoints/.staging-0").exists()


def test_facts_must_be_what_they_were(tmp_path):
    run = small_run()
    tk.save_checkpoint(tmp_path, *run, facts={"corpus": "a", "more": [1, 2]})
    state = tk.TrainState()
    assert (
        tk.resume(tmp_path, state, *run[1:], facts={"more": (1, 2)}, log=lambda _: None).step == 1
    )
    with pytest.raises(CheckpointError, match="its corpus is a, the run's is b"):
        tk.resume(tmp_path, state, *run[1:], facts={"corpus": "b"}, log=lambda _: None)


def disagreeing_facts(run_dir):
    _, stages, optimizer, _ = small_run()
    with tk.parallel_session() as ps:
        facts = {"seed": ps.world.index}
        tk.resume(run_dir, tk.TrainState(), stages, optimizer, ps, facts=facts)


def test_ranks_must_agree_on_facts(tmp_path):
    with pytest.raises(RuntimeError, match="ranks 0 and 1 do not have the same seed"):
        run_ranks(disagreeing_facts, 2, tmp_path)


def test_another_kind_of_memory_is_refused(tmp_path):
    state, stages, _, ps = small_run()
    plain = torch.optim.SGD(stages[0].parameters())
    tk.save_checkpoint(tmp_path, state, stages, plain, ps)
    heavy = torch.optim.SGD(stages[0].parameters(), momentum=0.9)
    with pytest.raises(CheckpointError, match=r"has momentum = 0, the run's has 0\.9"):
        tk.resume(tmp_path, state, stages, heavy, ps, log=lambda _: None)


def test_a_parameter_outside_the_stages_is_refused(tmp_path):
    state, stages, _, ps = small_run()
    stray = nn.Parameter(torch.ones(7))
    optimizer = torch.optim.SGD([*stages[0].parameters(), stray])
    with pytest.raises(ValueError, match=r"shape \(7,\) that is in none of the stages"):
        tk.save_checkpoint(tmp_path, state, stages, optimizer, ps)
    assert list((tmp_path / "checkpoints").glob("*")) == []


def test_an_empty_parameter_comes_back(tmp_path):
    state, _, _, ps = small_run()
    model = nn.ParameterDict({"full": torch.ones(2), "empty": torch.empty(0, 4)})
    optimizer = torch.optim.SGD(model.parameters())
    tk.save_checkpoint(tmp_path, state, [model], optimizer, ps)
    assert tk.resume(tmp_path, state, [model], optimizer, ps, log=lambda _: None).step == 1


def save_with_one_rank_failing(run_dir):
    _, stages, optimizer, _ = small_run()
    with tk.parallel_session() as ps:
        facts = {"bad": object()} if ps.world.index == 0 else {}
        try:
            tk.save_checkpoint(run_dir, tk.TrainState(), stages, optimizer, ps, facts=facts)
        except Exception as error:  # noqa: BLE001 ((any kind is returned))
            return str(error)


def test_a_save_that_fails_on_one_rank_fails_on_all_and_leaves_nothing(tmp_path):
    first, second = run_ranks(save_with_one_rank_failing, 2, tmp_path, timeout=20.0)
    assert "serializable" in first
    assert "rank 0 failed" in second
    assert list((tmp_path / "checkpoints").iterdir()) == []


def save_what_is_awkward(run_dir, kind):
    """Save and load with gathered parameters, or with a mesh that is a part of the world."""
    from whole_step import Layout, build

    session = tk.parallel_session
    if kind == "part":
        session = functools.partial(session, dp_shard=2, ring=2, fold_sp="none")
    with session() as ps:
        if kind == "gathered":
            stages, optimizer = build(Layout(), ps)
            batch = tk.batch.make_padding_batch(1, 4)
            with torch.no_grad():
                stages[0](batch.input_ids, position_ids=batch.position_ids, spans=batch.spans)
        else:
            lonely = attrs.evolve(ps, ring=tk.solo_parallel().ring)
            stages, optimizer = build(Layout(), lonely)
        state = tk.TrainState(tokens=1)
        found = tk.state_hash(state, stages, optimizer, ps)
        tk.save_checkpoint(run_dir, state, stages, optimizer, ps)
        tk.resume(run_dir, tk.TrainState(), stages, optimizer, ps, log=lambda _: None)
        return found, tk.state_hash(state, stages, optimizer, ps)


@pytest.mark.parametrize(("kind", "world"), [("gathered", 2), ("part", 4)])
def test_gathered_parameters_and_partial_meshes_are_saved_whole_and_once(kind, world, tmp_path):
    from whole_step import Layout, build

    stages, optimizer = build(Layout(), tk.solo_parallel())
    whole = tk.state_hash(tk.TrainState(tokens=1), stages, optimizer, tk.solo_parallel())
    for found in run_ranks(save_what_is_awkward, world, tmp_path, kind):
        assert found == (whole, whole)


def local_moments(run_dir):
    from whole_step import Layout, build

    with tk.parallel_session() as ps:
        stages, optimizer = build(Layout(), ps)
        p = tk.get_parameters(stages)[0]
        optimizer.state[p]["mine"] = torch.zeros_like(p.to_local())
        tk.save_checkpoint(run_dir, tk.TrainState(), stages, optimizer, ps)


def test_local_state_of_a_sharded_parameter_is_refused(tmp_path):
    with pytest.raises(RuntimeError, match=r"keeps 'mine' of embedding\.weight as a local tensor"):
        run_ranks(local_moments, 2, tmp_path)


def test_a_disk_without_room_is_refused_before_the_first_step(tmp_path):
    with pytest.raises(DiskError, match="needs about"):
        check_disk_space(tmp_path, [nn.Linear(3, 2)], copies=1 << 50)


def test_another_dtype_is_refused_and_not_cast(tmp_path):
    state, stages, optimizer, ps = small_run()
    tk.save_checkpoint(tmp_path, state, stages, optimizer, ps)
    half = [nn.Linear(3, 2).bfloat16()]
    other = torch.optim.AdamW(half[0].parameters(), lr=0.1)
    with pytest.raises(
        CheckpointError, match=r"model/weight is float32\[2, 3\], the run has bfloat16"
    ):
        tk.resume(tmp_path, state, half, other, ps, log=lambda _: None)


def test_a_table_of_facts_tells_which_entries_changed(tmp_path):
    run = small_run()
    before = {f"{i}.txt": "a" for i in range(9)}
    tk.save_checkpoint(tmp_path, *run, facts={"data": before})
    live = {**before, "0.txt": "b", "new.txt": "c"}
    del live["1.txt"]

    def resume(data):
        tk.resume(tmp_path, tk.TrainState(), *run[1:], facts={"data": data}, log=lambda _: None)

    with pytest.raises(CheckpointError) as error:
        resume(live)
    for message in (
        "data: 0.txt was changed from a to b",
        "data: 1.txt was removed",
        "data: new.txt was added",
    ):
        assert message in str(error.value)
    later = {**before, "an option": False, "another": None}  # that came after the checkpoint
    resume(later)
    with pytest.raises(CheckpointError, match="data: an option was added"):
        resume(later | {"an option": True})
    with pytest.raises(CheckpointError, match="and 4 more places in data"):
        resume({})


def test_an_option_that_a_record_of_the_model_got_later_is_no_change():
    experts = Experts(count=8, top_k=2, width=16)
    live = {"model": attrs.asdict(make_decoder_config("tiny", experts=experts))}
    saved = json.loads(json.dumps(live))
    for name in ("bias", "activation"):
        del saved["model"]["experts"][name]
    assert compare_facts(saved, live, ResumeRules()) == ([], [])
    live["model"]["experts"]["bias"] = True
    (error,), _ = compare_facts(saved, live, ResumeRules())
    assert error.startswith("model: experts was changed")
