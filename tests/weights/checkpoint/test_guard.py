"""What a run does and reports after a step with bad numbers."""

import math

import attrs
import pytest
import torch
from weights.checkpoint.small import live, same, small_run

import trainkit as tk
from trainkit.health import Policy
from trainkit.types import Cursor, DiskError, NumericsError, StepBatch
from trainkit.weights.checkpoint import list_checkpoints, write
from trainkit.weights.checkpoint.guard import open_guarded_saver

GOOD = {"loss": 2.0, "grad_norm": 1.0, "tokens": 8, "skipped": 0}
BAD = GOOD | {"loss": math.nan, "skipped": 1}
BATCH = StepBatch([], Cursor())


def replay_nothing(microbatches, *, denominator):
    assert (microbatches, int(denominator)) == ([], 8)
    return {"loss": torch.tensor(math.nan)}


def run(out, records, *, save_at=(), seen=None):
    """Train steps with given records; return the state, the messages and the events."""
    state, stages, optimizer, ps = small_run(steps=0)
    messages, events = [], []

    def event(name, **facts):
        events.append((name, facts.get("step"), facts.get("reason", facts.get("error"))))

    with open_guarded_saver(
        out,
        stages,
        optimizer,
        ps,
        event=event,
        policy=Policy(max_skips=2),
        replay=replay_nothing,
        log=messages.append,
    ) as (save, guard):
        for cursor, record in enumerate(records, 1):
            if not record["skipped"]:
                for p in stages[0].parameters():
                    p.grad = torch.full_like(p, cursor)
                optimizer.step()
            step = state.step + 1
            state = attrs.evolve(state, step=step, tokens=8 * step, cursor=Cursor(cursor))
            state = guard(state, record, BATCH)
            if seen is not None:
                seen.append(live(stages, optimizer))
            if state.step in save_at:
                save(state)
    return state, messages, events


@pytest.mark.case("N1", "N5")
def test_a_bad_step_is_told_and_a_storm_goes_back_past_its_data(tmp_path):
    seen = []
    records = [GOOD, GOOD, BAD, GOOD, BAD, BAD, GOOD]
    state, messages, events = run(tmp_path, records, save_at=(2, 4), seen=seen)
    assert (state.step, state.cursor) == (5, Cursor(7))  # back from 6 to 4, and one step on
    assert state.health["rolled_back"] == [5.0]
    assert "step 3: the loss is nan; the loss on rank 0; it was skipped" in messages
    assert any(line.startswith("rolled back from step 6") for line in messages)
    kinds = [(name, step) for name, step, _ in events if name != "save"]
    assert kinds == [("skip", 3), ("skip", 5), ("rollback", 6), ("rolled back", 4)]
    assert same(seen[5], seen[3])  # what it has gone back to
    assert not same(seen[6], seen[5])


@pytest.mark.case("N5")
def test_what_a_roll_back_has_saved_is_not_saved_again(tmp_path):
    run(tmp_path, [GOOD, GOOD, BAD, BAD], save_at=(2,))
    names = [path.name for path in list_checkpoints(tmp_path / "checkpoints")]
    assert names == ["step_00000002-1", "step_00000002"]


@pytest.mark.case("N5")
@pytest.mark.parametrize("save_at", [(), (2,)])
def test_a_storm_that_does_not_end_is_67_with_the_list_and_a_checkpoint_or_none(tmp_path, save_at):
    with pytest.raises(NumericsError, match=r"bad steps: 3, 4") as caught:
        run(tmp_path, [GOOD, GOOD] + [BAD] * 9, save_at=save_at)
    assert caught.value.code == 67
    before = "before step 3, 3, 3" if save_at else "there is no checkpoint at or before step 2"
    assert before in str(caught.value)


@pytest.mark.case("N6")
def test_a_save_that_finds_its_state_damaged_leads_back(tmp_path):
    state, stages, optimizer, ps = small_run(steps=1)
    with open_guarded_saver(
        tmp_path,
        stages,
        optimizer,
        ps,
        background=False,
        log=lambda _: None,
        policy=Policy(),
        replay=replay_nothing,
        event=lambda *_, **__: None,
    ) as (save, guard):
        save(state)
        good = live(stages, optimizer)
        with torch.no_grad():
            stages[0].bias[0] = math.inf
        save(attrs.evolve(state, step=2))
        state = guard(attrs.evolve(state, step=3), GOOD, BATCH)
        assert state.step == 1
        assert same(live(stages, optimizer), good)


@pytest.mark.case("K7")
def test_a_save_that_failed_is_told_at_the_next_step(tmp_path, monkeypatch):
    full, reserve = [True], write._reserve

    def no_room(path, size):
        if full[0]:
            raise OSError(28, "No space left on device", str(path))
        reserve(path, size)

    monkeypatch.setattr(write, "_reserve", no_room)
    state, stages, optimizer, ps = small_run(steps=1)
    messages = []
    with open_guarded_saver(
        tmp_path,
        stages,
        optimizer,
        ps,
        background=False,
        log=messages.append,
        policy=Policy(),
        replay=replay_nothing,
        event=lambda *_, **__: None,
    ) as (save, guard):
        save(state)
        guard(attrs.evolve(state, step=2), GOOD, BATCH)
        (line,) = messages
        assert line.startswith("warning: step 1 was not saved: ")
        assert "ENOSPC" in line
        full[0] = False
        save(attrs.evolve(state, step=2))
    assert len(messages) == 1
    full[0] = True
    with (
        pytest.raises(DiskError),
        open_guarded_saver(
            tmp_path,
            stages,
            optimizer,
            ps,
            log=messages.append,
            policy=Policy(),
            replay=replay_nothing,
            event=lambda *_, **__: None,
        ) as (
            save,
            _,
        ),
    ):
        save(attrs.evolve(state, step=3))


@pytest.mark.case("N1", "N5")
def test_without_the_guard_a_damaged_state_is_trained_on(tmp_path):
    """The negative control: nothing is skipped or rolled back."""
    _, stages, optimizer, _ = small_run(steps=1)
    del tmp_path
    for p in stages[0].parameters():
        p.grad = torch.full_like(p, math.nan)
    optimizer.step()
    assert not any(p.isfinite().all() for p in tk.get_parameters(stages))
