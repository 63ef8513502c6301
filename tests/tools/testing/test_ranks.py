"""`run_ranks`: results by rank, the first cause of a failure, bounded hangs, nothing left."""

import contextlib
import importlib.util
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import warnings
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from torch import tensor

from trainkit.tools.testing import RankError, ranks, run_ranks
from trainkit.types import ConfigError

OWN = "a name of this file"


def _sum_of_ranks(offset, values):
    total = tensor([float(dist.get_rank()) + offset])
    dist.all_reduce(total)
    return OWN, total, [value * dist.get_rank() for value in values]


def _fail_on(bad):
    if dist.get_rank() == bad:
        time.sleep(0.1)
        raise KeyError("the first cause")
    dist.barrier()


def _catch_echo_late(bad):
    """The failing rank breaks its connections a while before it reports the cause."""
    if dist.get_rank() == bad:
        try:
            raise KeyError("the first cause")
        finally:
            dist.destroy_process_group()
            time.sleep(0.3)
    dist.barrier()


def _die(how):
    if dist.get_rank() == 1:
        how()
    dist.barrier()


def _kill_myself():
    os.kill(os.getpid(), signal.SIGKILL)


def _warn_on_one():
    if dist.get_rank() == 1:
        warnings.warn("this will go away", FutureWarning, stacklevel=1)
    dist.barrier()


def _sleep_a_day():
    if dist.get_rank() == 1:
        time.sleep(86400)
    dist.barrier()


def _environment():
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TRAINKIT_PROBE")
    names += ("CUDA_VISIBLE_DEVICES",)
    return [os.environ.get(name) for name in names], torch.get_num_threads()


def _own_group():
    dist.destroy_process_group()
    return "left it early"


def _not_sendable():
    return lambda: None


def _linger():
    import threading

    threading.Thread(target=time.sleep, args=(86400,)).start()


def test_results_come_by_rank_and_tensors_travel_as_copies():
    results = run_ranks(_sum_of_ranks, 3, 0.5, [10, 20])
    assert results == [(OWN, tensor([4.5]), [10 * r, 20 * r]) for r in range(3)]


def test_ranks_look_for_no_script_that_came_through_a_pipe(monkeypatch):
    for name, value in {"__file__": "<stdin>", "__spec__": None}.items():
        monkeypatch.setitem(vars(sys.modules["__main__"]), name, value)
    assert run_ranks(dist.get_rank, 1) == [0]


def test_a_partial_works_and_a_world_of_one():
    assert run_ranks(partial(_sum_of_ranks, 1.0), 1, []) == [(OWN, tensor([1.0]), [])]


@pytest.mark.parametrize("fail", [_fail_on, _catch_echo_late])
@pytest.mark.parametrize("bad", [0, 2])
def test_the_first_cause_is_raised_with_rank_type_and_traceback(fail, bad):
    start = time.monotonic()
    with pytest.raises(RankError, match=f"rank {bad} of 3: KeyError: 'the first cause'") as caught:
        run_ranks(fail, 3, bad, timeout=30)
    assert caught.value.rank == bad
    assert fail.__name__ in caught.value.text
    assert time.monotonic() - start < 10


@pytest.mark.parametrize(
    ("how", "end"),
    [(_kill_myself, "was ended by SIGKILL"), (partial(os._exit, 3), "exited with code 3")],
)
def test_a_rank_that_dies_is_named(how, end):
    with pytest.raises(RankError, match=f"rank 1 of 2: {end} before it returned"):
        run_ranks(_die, 2, how, timeout=30)


def test_a_hang_ends_at_the_timeout_and_is_named_with_its_stacks():
    start = time.monotonic()
    with pytest.raises(RankError, match=r"after 1 s still running: rank 0, 1 of 2") as caught:
        run_ranks(_sleep_a_day, 2, timeout=1)
    assert time.monotonic() - start < 8
    assert "in _sleep_a_day" in caught.value.text


def _get_on(folder):
    for step in range(4):
        time.sleep(0.4)
        (Path(folder) / f"{dist.get_rank()}_{step}").touch()


def test_ranks_that_get_on_may_take_longer_than_the_timeout(tmp_path):
    seen = []

    def meanwhile():
        seen.append(len(list(tmp_path.iterdir())))
        return seen[-1] > max(seen[:-1], default=0)

    run_ranks(_get_on, 2, str(tmp_path), timeout=1.2, meanwhile=meanwhile)
    assert len(set(seen)) > 2
    with pytest.raises(RankError, match="after 1 s still running: rank 0, 1 of 2"):
        run_ranks(_sleep_a_day, 2, timeout=1, meanwhile=lambda: False)


def _call(function):
    return function(2)


def test_functions_among_the_arguments_may_be_of_files_too(tmp_path, monkeypatch):
    file = tmp_path / "own_functions.py"
    file.write_text("def twice(x):\n    return 2 * x\n")
    spec = importlib.util.spec_from_file_location("own_functions", file)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "own_functions", module)
    spec.loader.exec_module(module)
    assert run_ranks(_call, 2, module.twice) == [4, 4]


def test_a_rank_that_cannot_start_is_an_error_of_that_rank(monkeypatch):
    def broken(_):
        raise BrokenPipeError

    monkeypatch.setattr("multiprocessing.context.ForkServerProcess.start", broken)
    with pytest.raises(RankError, match="rank 0 of 2 could not start"):
        run_ranks(_environment, 2)


def test_a_rank_that_returns_but_stays_is_named(monkeypatch):
    monkeypatch.setattr("trainkit.tools.testing.ranks._EXIT_GRACE", 0.3)
    with pytest.raises(RankError, match="rank 0 returned, but did not exit"):
        run_ranks(_linger, 1)


def test_a_rank_sees_torchruns_variables_and_the_callers(monkeypatch):
    monkeypatch.setenv("TRAINKIT_PROBE", "set late")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")  # one GPU is no device for two ranks of gloo
    results = run_ranks(_environment, 2, threads=1)
    assert results == [([str(r), str(r), "2", "2", "set late", ""], 1) for r in (0, 1)]


def test_a_warning_on_a_rank_fails_as_it_does_here():
    with pytest.raises(RankError, match="rank 1 of 2: FutureWarning: this will go away"):
        run_ranks(_warn_on_one, 2)


def test_a_function_may_end_the_process_group_itself():
    assert run_ranks(_own_group, 2) == ["left it early"] * 2


def test_a_function_of_a_file_that_cannot_be_imported_by_name_runs(tmp_path, monkeypatch):
    name, file = "no_package.of_this.name", tmp_path / "file.py"
    for parent in ("no_package", "no_package.of_this"):  # as pytest does for a test's module
        monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
    file.write_text("class Own:\n    pass\ndef make(x):\n    return x, Own.__module__, make\n")
    spec = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    assert run_ranks(module.make, 1, 5) == [(5, name, module.make)]


def test_what_cannot_be_sent_is_refused():
    with pytest.raises(ValueError, match="top level of a module"):
        run_ranks(lambda: 0, 1)
    with pytest.raises(RankError, match="rank 0 of 1"):
        run_ranks(_not_sendable, 1)
    with pytest.raises(ValueError, match="world must be at least 1, got 0"):
        run_ranks(_environment, 0)


def test_no_file_and_no_process_is_left(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    run_ranks(_environment, 2)
    for fail in (partial(_fail_on, 0), partial(_die, _kill_myself)):
        with contextlib.suppress(RankError):
            run_ranks(fail, 2, timeout=30)
    # multiprocessing keeps one folder for its server's socket, for as long as this process lives
    assert [path for path in Path(tmp_path).iterdir() if not path.name.startswith("pymp-")] == []
    assert multiprocessing.active_children() == []


def test_ranks_on_gpus_are_spawned_and_meet_by_nccl(monkeypatch):
    """What a rank on a GPU does first, without one."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match=r"run_ranks: device='cuda' needs .* finds 1 on this"):
        run_ranks(dist.get_rank, 2, device="cuda")
    seen = []
    monkeypatch.setattr(torch.cuda, "set_device", seen.append)
    monkeypatch.setattr(dist, "init_process_group", lambda name, **_: seen.append(name))
    monkeypatch.setattr(dist, "barrier", lambda: None)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    environ = dict(os.environ)
    work = ranks._Work(b"", (), 2, Path(), 1.0, 1, "cuda", environ | {"CUDA_VISIBLE_DEVICES": "3"})
    try:
        ranks._set_up(0, work)
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "3"
    finally:
        os.environ.clear()
        os.environ.update(environ)
    assert seen == [0, "cpu:gloo,cuda:nccl"]
