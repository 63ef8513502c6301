"""Saves during training: true copies, one at a time, and no failure lost."""

import json
import os
import re
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from whole_step import Layout, build

import trainkit as tk
from trainkit.run.sinks import open_events
from trainkit.tools.testing import run_ranks
from trainkit.types import DiskError, NumericsError
from trainkit.weights.checkpoint import background_save as flight
from trainkit.weights.checkpoint import list_checkpoints, snapshot, verify_checkpoint, write
from trainkit.weights.checkpoint import save as save_module
from trainkit.weights.checkpoint.manifest import read_manifest
from trainkit.weights.checkpoint.retention import Retention
from trainkit.weights.checkpoint.save import open_saver

SOLO = tk.solo_parallel()


def small_run():
    model = nn.Linear(3, 2)
    return [model], torch.optim.SGD(model.parameters(), momentum=0.9), SOLO


def at(step):
    return tk.TrainState(step=step)


def until(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.005)
    assert condition()


def held_back(monkeypatch, first=lambda: None):
    """Let no save write before the returned event is set and `first` has been called."""
    gate, write_rank = threading.Event(), flight.write_rank

    def late(*arguments):
        assert gate.wait(30)
        first()
        write_rank(*arguments)

    monkeypatch.setattr(flight, "write_rank", late)
    return gate


def weight_in(path):
    return load_file(next(path.glob("*.safetensors")))["model/weight"]


def names_in(run_dir):
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


@pytest.mark.case("K22")
@pytest.mark.parametrize("protected", [True, False])
def test_what_happens_after_a_save_is_not_in_it(tmp_path, monkeypatch, protected):
    copies, copy = [], snapshot._copy
    gate = held_back(monkeypatch, lambda: [copy(*each) for each in copies])
    if not protected:  # the tensors are read when they are written
        monkeypatch.setattr(snapshot, "_copy", lambda *each: copies.append(each))
    stages, optimizer, ps = small_run()
    before = stages[0].weight.detach().clone()
    with open_saver(tmp_path, stages, optimizer, ps) as (save, saved):
        save(at(1))
        with torch.no_grad():
            stages[0].weight.fill_(7.0)
        gate.set()
        (outcome,) = saved(wait=True)
    assert torch.equal(weight_in(outcome.path), before) == protected


@pytest.mark.case("K22", "X4")
def test_a_save_beside_the_training_writes_what_one_at_once_writes(tmp_path):
    stages, optimizer, ps = small_run()
    found = []
    for background in (True, False):
        folder = tmp_path / f"{background}"
        with open_saver(
            folder, stages, optimizer, ps, background=background, facts={"a": 1}
        ) as both:
            save, saved = both
            save(at(1), score=0.5)
            (outcome,) = saved(wait=True)
        assert verify_checkpoint(outcome.path) == []
        found.append(read_manifest(outcome.path) | {"run": None, "sha256": None})
    assert found[0] == found[1]


@pytest.mark.case("K8")
def test_one_save_is_under_way_and_the_next_waits_for_it(tmp_path, monkeypatch):
    gate = held_back(monkeypatch)
    messages, steps = [], []
    with open_saver(tmp_path, *small_run(), log=messages.append) as (save, saved):
        save(at(1))
        assert saved() == saved() == []
        threading.Timer(0.3, gate.set).start()
        save(at(2))
        assert names_in(tmp_path)[-1] == "step_00000001"  # committed before the second began
        steps += [outcome.step for outcome in saved()]
    assert [path.name for path in list_checkpoints(tmp_path / "checkpoints")] == [
        "step_00000002",
        "step_00000001",
    ]
    assert steps[0] == 1
    assert "step 2 waited" in messages[0]


@pytest.mark.case("K8")
def test_control_without_the_wait_one_save_is_written_over_by_the_next(tmp_path, monkeypatch):
    gate = held_back(monkeypatch)
    land, set_aside = save_module._Saver.advance, []

    def without_waiting(outcomes, **options):
        if outcomes.pending and not set_aside:
            set_aside.append(outcomes.pending.pop())
        else:
            land(outcomes, **options)

    monkeypatch.setattr(save_module._Saver, "advance", without_waiting)
    stages, optimizer, ps = small_run()
    with open_saver(tmp_path, stages, optimizer, ps) as (save, _):
        save(at(1))
        with torch.no_grad():
            stages[0].weight.fill_(7.0)
        save(at(2))
        gate.set()
        first, ended = set_aside[0], []
        while not ended:
            try:
                first.send(True)
            except StopIteration as end:
                ended.append(end.value)
    assert ended[0].step == 1
    assert (weight_in(ended[0].path) == 7).all()


@pytest.mark.case("K8")
def test_leaving_waits_for_the_save(tmp_path, monkeypatch):
    gate = held_back(monkeypatch)
    threading.Timer(0.2, gate.set).start()
    with open_saver(tmp_path, *small_run()) as (save, _):
        save(at(1))
    assert names_in(tmp_path) == ["latest", "step_00000001"]


@pytest.mark.case("K7", "F6")
@pytest.mark.parametrize("background", [True, False])
def test_a_failure_is_told_once_and_the_next_save_is_as_good_as_any(
    tmp_path, monkeypatch, background
):
    full = OSError(28, "No space left on device")
    broken = [True]
    reserve = write._reserve

    def no_room(path, size):
        if broken[0]:
            raise full
        reserve(path, size)

    monkeypatch.setattr(write, "_reserve", no_room)
    with open_saver(tmp_path, *small_run(), background=background) as (save, saved):
        save(at(1))
        (failed,) = saved(wait=True)
        assert isinstance(failed.error, DiskError)
        assert (failed.step, failed.path, saved()) == (1, None, [])
        assert "ENOSPC" in str(failed.error)
        assert names_in(tmp_path) == []
        broken[0] = False
        save(at(2))
    assert names_in(tmp_path) == ["latest", "step_00000002"]


@pytest.mark.case("K7")
@pytest.mark.parametrize("collected", [True, False])
def test_leaving_fails_when_the_last_save_did(tmp_path, monkeypatch, collected):
    monkeypatch.setattr(write, "_check_finite", lambda _: 1 / 0)

    def leave():
        with open_saver(tmp_path, *small_run()) as (save, saved):
            save(at(1))
            if collected:
                assert len(saved(wait=True)) == 1

    with pytest.raises(ZeroDivisionError):
        leave()


@pytest.mark.case("K7")
def test_control_a_thread_that_nobody_asks_loses_its_failure(tmp_path, monkeypatch):
    monkeypatch.setattr(write, "_check_finite", lambda _: 1 / 0)
    monkeypatch.setattr(flight, "all_max", lambda flags, _: torch.zeros_like(flags))
    monkeypatch.setattr(flight, "_share_result", lambda *_: ({"path": "nowhere"}, None))
    with open_saver(tmp_path, *small_run()) as (save, saved):
        save(at(1))
        assert saved(wait=True)[0].error is None
    assert names_in(tmp_path) != ["latest", "step_00000001"]


@pytest.mark.case("N6")
def test_a_state_that_is_not_finite_is_told_and_training_may_go_on(tmp_path):
    stages, optimizer, ps = small_run()
    with open_saver(tmp_path, stages, optimizer, ps) as (save, saved):
        with torch.no_grad():
            stages[0].bias[1] = float("inf")
        save(at(1))
        (failed,) = saved(wait=True)
        assert isinstance(failed.error, NumericsError)
        assert failed.error.where == "model/bias"
        with torch.no_grad():
            stages[0].bias.zero_()
        save(at(2))
    assert names_in(tmp_path) == ["latest", "step_00000002"]


@pytest.mark.case("G9", "E5")
def test_a_save_that_takes_longer_than_a_run_has_to_stop_is_told(tmp_path):
    messages = []
    for grace in (60.0, 0.0):
        with open_saver(tmp_path, *small_run(), grace=grace, log=messages.append) as (save, _):
            save(at(1))
    (line,) = messages
    assert re.search(r"the save of step 1 took [\d.]+ s; .* has 0 s to save", line)


class HasToEndError(Exception):
    """Anything that ends a run."""


def test_an_exception_lets_a_rank_alone_finish_what_it_can(tmp_path, monkeypatch):
    gate = held_back(monkeypatch)

    def run():
        with open_saver(tmp_path, *small_run()) as (save, _):
            save(at(1))
            threading.Timer(0.1, gate.set).start()
            raise HasToEndError

    with pytest.raises(HasToEndError):
        run()
    assert names_in(tmp_path) == ["latest", "step_00000001"]


@pytest.mark.parametrize("fails", [False, True])
def test_the_line_of_a_save_has_the_time_of_the_save(tmp_path, monkeypatch, fails):
    def fail(*_):
        raise DiskError("the disk is full")

    if fails:
        monkeypatch.setattr(flight, "write_rank", fail)
    with (
        open_events(tmp_path / "events.jsonl") as event,
        suppress(DiskError),
        open_saver(tmp_path, *small_run(), event=event, log=lambda _: None) as (save, saved),
    ):
        began = time.time()
        save(at(1))
        until(lambda: not flight.list_save_threads())
        ended = time.time()
        time.sleep(0.05)
        saved(wait=True)
    (line,) = map(json.loads, (tmp_path / "events.jsonl").read_text().splitlines())
    assert began <= line["time"] <= ended
    assert (line["event"], line["error"] is not None) == ("save", fails)


def test_what_must_be_on_the_disk_before_a_commit_is_asked_for_before_it(tmp_path):
    seen = []
    with open_saver(
        tmp_path, *small_run(), before_commit=lambda: seen.append(names_in(tmp_path))
    ) as (save, _):
        save(at(1))
    assert len(seen) == 1
    assert not any(name.startswith("step_") for name in seen[0])


def open_files():
    return len([*Path("/proc/self/fd").iterdir()])


@pytest.mark.case("Z2")
def test_two_hundred_saves_in_a_row_leave_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda _: None)  # the disk's 2,000 waits show nothing here
    stages, optimizer, ps = small_run()
    most, steps = 0, []
    with open_saver(tmp_path, stages, optimizer, ps, retention=Retention(last=2)) as (save, saved):
        save(at(0))
        saved(wait=True)
        before = open_files()
        for step in range(1, 201):
            save(at(step))
            steps += [outcome.step for outcome in saved()]
            most = max(most, sum(t.name == "trainkit-save" for t in threading.enumerate()))
    assert [path.name for path in list_checkpoints(tmp_path / "checkpoints")] == [
        "step_00000200",
        "step_00000199",
    ]
    assert len(set(steps)) == len(steps) >= 199
    assert most <= 2  # to write, and to commit when that has been written
    until(lambda: not any(t.name == "trainkit-save" for t in threading.enumerate()))
    assert open_files() == before


def test_a_snapshot_is_taken_into_the_memory_of_the_one_before():
    stages, optimizer, ps = small_run()
    take = snapshot.make_snapshot_taker(stages, optimizer, ps)
    first, second = (take(at(step), {}) for step in (1, 2))
    assert first.files[0].data.ctypes.data == second.files[0].data.ctypes.data
    stages[0](torch.ones(1, 3)).sum().backward()
    optimizer.step()  # there are moments now
    assert len(take(at(3), {}).tensors) > len(second.tensors)


# ------------------------------------------------------------------------------------ on ranks


def save_beside(run_dir):
    """Save three times on two ranks, once with a failure; return the threads that communicated."""
    communicated = set()
    real = dist.all_reduce

    def traced(*arguments, **options):
        communicated.add(threading.current_thread().name)
        return real(*arguments, **options)

    dist.all_reduce = traced
    with tk.parallel_session() as ps:
        stages, optimizer = build(Layout(), ps)
        found = []
        with open_saver(run_dir, stages, optimizer, ps, log=lambda _: None) as (save, saved):
            for step in (1, 2, 3):
                reserve = write._reserve
                if step == 2 and ps.world.index == 1:
                    write._reserve = lambda *_: os.open("/nowhere/at/all", os.O_RDONLY)
                save(at(step))
                polls, ended = 0, []
                while not ended:
                    ended = saved()
                    polls += 1
                    time.sleep(0.01)
                write._reserve = reserve
                found += [(o.step, o.path and o.path.name, str(o.error)) for o in ended]
        return found, communicated


def leave_early(run_dir):
    """Leave by an exception on rank 1, while neither rank may write."""
    gate = threading.Event()
    write_rank = flight.write_rank
    flight.write_rank = lambda *arguments: (gate.wait(30), write_rank(*arguments))
    with tk.parallel_session() as ps:
        stages, optimizer = build(Layout(), ps)
        began = time.monotonic()
        with suppress(HasToEndError), open_saver(run_dir, stages, optimizer, ps) as (save, _):
            save(at(9))
            threading.Timer(0.2, gate.set).start()
            raise HasToEndError
        tk.all_sum(torch.ones(1), ps.world)
        return time.monotonic() - began, names_in(Path(run_dir))


@pytest.mark.case("K6", "K7", "K8", "X4")
def test_ranks_commit_together_or_not_at_all_and_threads_never_communicate(tmp_path):
    found = run_ranks(save_beside, 2, tmp_path)
    for outcomes, threads in found:
        assert [(step, path) for step, path, _ in outcomes] == [
            (1, "step_00000001"),
            (2, None),
            (3, "step_00000003"),
        ]
        assert "ENOENT" in outcomes[1][2]
        assert threads == {"MainThread", "trainkit rendezvous"}  # which opens the session
    assert "rank 1: save_checkpoint" in found[0][0][1][2]
    assert names_in(tmp_path) == ["latest", "step_00000001", "step_00000003"]
    assert all(not verify_checkpoint(path) for path in list_checkpoints(tmp_path / "checkpoints"))


@pytest.mark.case("K8")
def test_an_exception_on_ranks_gives_the_save_up_and_waits_for_nobody(tmp_path):
    for seconds, names in run_ranks(leave_early, 2, tmp_path):
        assert seconds < 15
        assert not any(name.startswith("step_") for name in names)
