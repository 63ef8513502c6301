"""Seconds by phase: they do not overlap, they add up, and without a recorder nothing happens."""

import itertools
import threading
import time

import pytest
import torch
from torch import nn

from trainkit import clip_and_step, forward_backward, sync_sp_grads
from trainkit.mesh import solo_parallel
from trainkit.phases import PhaseTimes, as_phase, measure_phase, measure_wait, record_phases


@pytest.fixture(name="clock")
def _clock(monkeypatch):
    """Let each look at the clock be one second later than the one before."""
    seconds = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(seconds)))


def test_an_inner_phase_does_not_count_for_the_outer_one(clock):
    del clock
    with record_phases() as times:
        with measure_phase("log"):
            with measure_phase("forward"):
                pass
            with measure_phase("forward"):
                pass
        assert times.read() == {"other": 2.0, "log": 3.0, "forward": 2.0}
        assert times.read() == {"other": 1.0}  # since the last time


def test_a_wait_counts_between_phases_and_on_the_measured_thread_alone():
    def wait():
        with measure_wait():
            pass

    with record_phases() as times:
        with measure_phase("reduce"):
            wait()
        other = threading.Thread(target=wait)
        other.start()
        other.join()
        assert sorted(times.read()) == ["other", "reduce"]
        wait()
        assert sorted(times.read()) == ["other", "wait"]


def test_an_error_leaves_its_phases(clock):
    del clock
    with record_phases() as times:
        with pytest.raises(KeyError), measure_phase("step"):
            raise KeyError
        times.read()
        assert times.read() == {"other": 1.0}


def test_without_a_recorder_nothing_is_counted(clock):
    del clock
    times = PhaseTimes()
    with measure_phase("forward"):
        pass
    assert times.read() == {"other": 1.0}


def test_the_recorder_before_goes_on_after_an_inner_one():
    with record_phases() as outer:
        with record_phases() as inner, measure_phase("forward"):
            pass
        with measure_phase("step"):
            pass
    assert "forward" in inner.read()
    assert sorted(outer.read()) == ["other", "step"]


def test_the_device_is_waited_for_at_the_end_of_each_phase_if_asked():
    waits = []
    with record_phases(lambda: waits.append(1)) as times:
        with measure_phase("forward"), measure_phase("inner"):
            pass
        times.wait = None
        with measure_phase("forward"):
            pass
    assert len(waits) == 2


def test_a_decorated_function_keeps_its_name_and_is_looked_up_when_it_is_called():
    @as_phase("reduce")
    def add(a, *, b):
        """Add."""
        return a + b

    assert (add.__name__, add.__doc__) == ("add", "Add.")
    with record_phases() as times:
        assert add(1, b=2) == 3
    assert "reduce" in times.read()


def test_a_step_has_the_phases_of_its_functions():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ps = solo_parallel()
    with record_phases() as times:
        forward_backward(
            model,
            [{"x": torch.ones(3, 2)}] * 2,
            lambda y, _: (y.sum(), {"loss": y.detach().sum()}),
            denominator=torch.tensor(6),
            call=lambda model, batch: model(batch["x"]),
        )
        sync_sp_grads(model.parameters(), ps.sp_unfolded)
        clip_and_step(model.parameters(), optimizer, lr=0.1, max_norm=None)
    assert sorted(times.read()) == ["backward", "forward", "other", "reduce", "step"]
