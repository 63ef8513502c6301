"""Signs of sick devices and hosts, with NVML replaced by a module of recorded values.

No real device is read here.
"""

import sys
import time
from types import ModuleType, SimpleNamespace

import attrs
import pytest
import torch
from recipe_runs import events

from trainkit.mesh import parallel_session
from trainkit.run import Timeouts, open_run
from trainkit.run.device_health import Sign, describe_signs, read_device_signs, watch_device
from trainkit.run.inventory import RankReadings, read_driver_version
from trainkit.tools.testing import run_ranks
from trainkit.types import Cursor, StepBatch

CPU = torch.device("cpu")


@attrs.frozen
class Recorded:
    """What NVML answers; None stands for a call that fails. By default a healthy, busy GPU."""

    throttle: int | None = 0x4  # at its power limit, as on any day
    ecc: int | None = 0
    remapped: tuple[int, ...] | None = (3, 0, 0, 0)


class NVMLError(Exception):
    """What NVML raises."""


def make_nvml(recorded):
    """Return a module that answers as `pynvml` does."""
    nvml = ModuleType("pynvml")

    def answer(value):
        def call(*_):
            if value is None:
                raise NVMLError
            return value

        return call

    nvml.NVMLError = NVMLError
    nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC = 1, 0
    nvml.nvmlInit = lambda: None
    nvml.nvmlDeviceGetHandleByUUID = lambda uuid: uuid
    nvml.nvmlDeviceGetCurrentClocksThrottleReasons = answer(recorded.throttle)
    nvml.nvmlDeviceGetTotalEccErrors = answer(recorded.ecc)
    nvml.nvmlDeviceGetRemappedRows = answer(recorded.remapped)
    return nvml


@pytest.mark.parametrize(
    ("recorded", "signs"),
    [
        (Recorded(), Sign(0)),
        (Recorded(throttle=0x1), Sign(0)),  # idle
        (Recorded(throttle=0x20), Sign.HEAT),
        (Recorded(throttle=0x48), Sign.HEAT),  # which slows the hardware down
        (Recorded(throttle=0x88), Sign.POWER_BRAKE),
        (Recorded(throttle=0x8), Sign.HARDWARE_SLOWDOWN),
        (Recorded(ecc=2), Sign.ECC_ERRORS),
        (Recorded(remapped=(0, 1, 1, 0)), Sign.ROWS_TO_REMAP),
        (Recorded(remapped=(0, 1, 0, 1)), Sign.ROWS_NOT_REMAPPED),
        (Recorded(throttle=0x20, ecc=1), Sign.HEAT | Sign.ECC_ERRORS),
        (Recorded(ecc=None, remapped=None), Sign(0)),  # a GPU without ECC
        (Recorded(throttle=None), Sign.NO_ANSWER),
    ],
)
def test_a_gpu_is_read_through_nvml(recorded, signs):
    nvml = make_nvml(recorded)
    assert read_device_signs(nvml, "handle") == signs


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu Jan 16", "570.86.15"),
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  575.51.03  Release",
            "575.51.03",
        ),
        ("something else", None),
    ],
)
def test_the_driver_is_read_from_its_file(tmp_path, text, version):
    path = tmp_path / "version"
    path.write_text(text)
    assert read_driver_version(path) == version


def test_every_sign_has_a_sentence():
    every = Sign(0)
    for sign in Sign:
        every |= sign
    assert len(describe_signs(every)) == len(Sign)
    assert len(set(describe_signs(every))) == len(Sign)


def wait_for(read, wanted):
    """Return what is read once it is as wanted, or at last."""
    for _ in range(500):
        if read() == wanted:
            break
        time.sleep(0.01)
    return read()


def test_a_device_is_watched_while_the_block_lasts(monkeypatch):
    """The device is found by its UUID, since CUDA_VISIBLE_DEVICES renumbers torch's."""
    nvml = make_nvml(Recorded())
    asked = []
    nvml.nvmlDeviceGetHandleByUUID = lambda uuid: asked.append(uuid) or uuid
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    properties = SimpleNamespace(uuid="12-34")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    with watch_device(torch.device("cuda", 1), period=0.01) as read_signs:
        assert read_signs() == Sign(0)
        nvml.nvmlDeviceGetCurrentClocksThrottleReasons = lambda _: 0x40
        assert wait_for(read_signs, Sign.HEAT) == Sign.HEAT
        nvml.nvmlDeviceGetCurrentClocksThrottleReasons = lambda _: 0
        time.sleep(0.05)
        assert read_signs() == Sign.HEAT  # what was seen once stays
    assert asked == [b"GPU-12-34"]


def test_without_the_package_or_its_driver_there_are_no_signs(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with watch_device(torch.device("cuda", 0)) as read_signs:
        assert read_signs() == Sign(0)
    nvml = make_nvml(Recorded())

    def fail():
        raise NVMLError

    nvml.nvmlInit = fail
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    with watch_device(torch.device("cuda", 0)) as read_signs:
        assert read_signs() == Sign(0)


def test_a_host_is_judged_by_what_it_counts_from_now_on(tmp_path):
    errors = tmp_path / "edac" / "mc" / "mc0" / "ue_count"
    heat = tmp_path / "cpu" / "cpu0" / "thermal_throttle" / "package_throttle_count"
    for path, count in ((errors, "7"), (heat, "100")):
        path.parent.mkdir(parents=True)
        path.write_text(count)
    with watch_device(CPU, period=0.01, root=tmp_path) as read_signs:
        time.sleep(0.05)
        assert read_signs() == Sign(0)
        errors.write_text("8")
        assert wait_for(read_signs, Sign.HOST_MEMORY_ERRORS) == Sign.HOST_MEMORY_ERRORS
        heat.write_text("101")
        both = Sign.HOST_MEMORY_ERRORS | Sign.HOST_HEAT
        assert wait_for(read_signs, both) == both


def test_a_run_names_the_rank_once(tmp_path, capsys):
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    with open_run(tmp_path, timeouts=Timeouts(start_timeout=60.0)) as run:
        state = run.resume(model, optimizer)
        with run.loop(state, model, optimizer, steps=99, replay=None) as loop:
            loop._read_signs = lambda: int(Sign.ECC_ERRORS)
            for _ in range(25):
                state = attrs.evolve(state, step=state.step + 1)
                metrics = {"loss": 1.0, "grad_norm": 1.0, "lr": 0.1, "tokens": 1}
                state = loop.record(state, metrics, StepBatch([], Cursor(1)))
    [event] = events(tmp_path, "health")
    assert (event["step"], event["rank"]) == (1, 0)
    assert "ECC" in event["what"]
    assert capsys.readouterr().out.count("may be sick") == 1


def read_signs_of_all():
    """Gather the signs of the ranks, of which the second is sick."""
    with parallel_session() as ps:
        readings = RankReadings(CPU, ps.world)
        before = readings.read_signs(), readings.read_memory()
        readings.gather(signs=Sign.HEAT if ps.world.index else 0)
        return before, readings.read_signs(), readings.read_memory()["memory_rank"]


def test_all_ranks_know_the_signs_of_each():
    one, other = run_ranks(read_signs_of_all, 2)
    assert one == other
    assert one[:2] == (([], {}), [0, int(Sign.HEAT)])
    assert read_signs_of_all() == (([], {}), [0], 0)
