"""A signal sets a flag, all ranks stop at one step, and nothing of it stays behind."""

import contextlib
import faulthandler
import importlib.util
import io
import json
import os
import signal
import sys
import threading
import time
import warnings
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given
from hypothesis import strategies as st

from trainkit.collectives import all_gather_objects
from trainkit.mesh import axis_from_group, solo_parallel
from trainkit.run import signals
from trainkit.run.errors import get_exit_code
from trainkit.run.signals import STOP_SIGNALS, open_stop_vote, trap_signals
from trainkit.tools.testing import run_ranks
from trainkit.tools.testing.ranks import RankError
from trainkit.types import (
    CheckpointError,
    ConfigError,
    DataError,
    DiskError,
    NumericsError,
    PeerError,
    PreemptedError,
)

SCRIPT = Path(__file__).with_name("stoppable.py")


def load_script():
    """Import the recipe under its own name, so that ranks find it too."""
    spec = importlib.util.spec_from_file_location("stoppable", SCRIPT)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def handlers():
    numbers = (*STOP_SIGNALS, signal.SIGHUP, signal.SIGPIPE, signal.SIGTSTP, signal.SIGCONT)
    return [signal.getsignal(number) for number in numbers]


def open_files():
    return len(list(Path("/proc/self/fd").iterdir()))


def fail_after_a_signal(error, *, agreed=True):
    with trap_signals() as asked, open_stop_vote(asked, solo_parallel().world) as stopping:
        signal.raise_signal(signal.SIGTERM)
        if agreed:
            assert stopping() == "SIGTERM on rank 0"
        raise error


# ------------------------------------------------------------------------------------ one process


@pytest.mark.case("E1", "E2", "E6")
@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_sets_a_flag_and_everything_is_put_back(number):
    before = handlers(), sys.stdout.write, open_files()
    with trap_signals() as asked:
        assert asked() is None
        signal.raise_signal(number)
        assert asked() == signal.Signals(number).name
        signal.raise_signal(signal.SIGTERM)
        assert asked() == signal.Signals(number).name
    assert asked() == signal.Signals(number).name
    assert (handlers(), sys.stdout.write, open_files()) == before
    assert signal.set_wakeup_fd(-1) == -1


@pytest.mark.case("E3")
def test_of_fifty_signals_the_first_counts():
    with trap_signals() as asked:
        for k in range(50):
            os.kill(os.getpid(), STOP_SIGNALS[k % 4] if k % 4 != 1 else signal.SIGUSR1)
        assert asked() == "SIGTERM"


def test_a_handler_of_faulthandler_is_put_back(tmp_path):
    told = tmp_path / "stacks"
    with told.open("w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks)
        try:
            with trap_signals() as asked:
                signal.raise_signal(signal.SIGUSR1)
                assert asked() == "SIGUSR1"
            assert told.read_text() == ""
            signal.raise_signal(signal.SIGUSR1)
            assert "test_a_handler_of_faulthandler" in told.read_text()
        finally:
            faulthandler.unregister(signal.SIGUSR1)


def test_a_trap_in_a_trap_takes_over_and_gives_back():
    with trap_signals() as outer:
        with trap_signals() as inner:
            signal.raise_signal(signal.SIGTERM)
            assert (inner(), outer()) == ("SIGTERM", None)
        signal.raise_signal(signal.SIGUSR1)
        assert (inner(), outer()) == ("SIGTERM", "SIGUSR1")


@pytest.mark.case("E6")
def test_in_another_thread_there_are_no_handlers_and_no_crash():
    def work():
        before = handlers()
        with trap_signals() as asked:
            found.append((asked(), handlers() == before))

    found = []
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [(None, True)]


@pytest.mark.case("L10")
def test_workers_of_a_torchrun_that_has_died_are_orphaned(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    with trap_signals() as asked:
        assert asked() is None
        torchrun = os.getppid()
        monkeypatch.setattr(os, "getppid", lambda: 1)
        told = asked()
        assert told.startswith(f"torchrun (process {torchrun} on ")
        assert told.endswith("has died: orphaned")
        signal.raise_signal(signal.SIGTERM)
        assert asked() == told


def test_a_shell_may_end_before_what_it_started(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    with trap_signals() as asked:
        monkeypatch.setattr(os, "getppid", lambda: 1)
        assert asked() is None


@pytest.mark.case("E9")
def test_hangups_and_pauses_are_survived():
    with trap_signals() as asked:
        for number in (signal.SIGHUP, signal.SIGPIPE, signal.SIGCONT, signal.SIGCHLD):
            signal.raise_signal(number)
        assert asked() is None


@pytest.mark.case("E9")
def test_a_torchrun_that_has_lost_its_terminal_will_kill_its_workers(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    terminal = [True]
    monkeypatch.setattr(signals, "_has_terminal", lambda _: terminal[0])
    with trap_signals() as asked:
        assert asked() is None
        signal.raise_signal(signal.SIGHUP)
        assert asked() is None
        terminal[0] = False
        assert asked() == "SIGHUP"


def test_a_terminal_is_looked_for_in_the_process_table():
    assert not signals._has_terminal(2**22 + 1)
    assert signals._has_terminal(os.getpid()) in {True, False}


@pytest.mark.case("E9")
@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_output_that_nobody_reads_ends_nothing(name, monkeypatch):
    for guarded in (True, False):  # without the guard, the print raises
        reader, writer = os.pipe()
        with io.TextIOWrapper(io.FileIO(writer, "w"), write_through=True) as stream:
            monkeypatch.setattr(sys, name, stream)
            os.close(reader)
            ends = contextlib.nullcontext() if guarded else pytest.raises(BrokenPipeError)
            with ends, trap_signals() if guarded else contextlib.nullcontext():
                for _ in range(3):
                    print("x" * 100_000, file=getattr(sys, name), flush=True)
            monkeypatch.undo()
            signals.redirect_to_devnull(stream)


@pytest.mark.case("E9")
@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_a_full_pipe_that_nobody_reads_holds_nothing_up(name, monkeypatch):
    monkeypatch.setattr(signals, "_PATIENCE", 0.1)
    reader, writer = os.pipe()
    with open(writer, "w") as stream:  # noqa: PTH123 (a number)
        monkeypatch.setattr(sys, name, stream)
        begin = time.monotonic()
        with trap_signals():
            for text in ("x" * 300_000, *"abc"):
                print(text, file=getattr(sys, name), flush=True)
            assert time.monotonic() - begin < 5
            os.read(reader, 1 << 20)
            print("read again", file=getattr(sys, name))
        assert os.read(reader, 1 << 20).endswith(b"read again\n")
        monkeypatch.undo()
    os.close(reader)


@pytest.mark.case("E9")
def test_output_to_a_full_disk_ends_nothing(monkeypatch):
    with Path("/dev/full").open("w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        with trap_signals():
            print("lost", flush=True)
            print("lost, too", flush=True)
        monkeypatch.undo()
        signals.redirect_to_devnull(stream)


@pytest.mark.case("E1")
@pytest.mark.parametrize(
    ("error", "code"),
    [
        (DiskError("cannot write state.json", where="state.json"), 76),
        (ConfigError("lr must be above 0"), 64),
        (ValueError("lr must be above 0"), 64),
        (DataError("a token outside of the vocabulary"), 65),
        (CheckpointError("no checkpoint verifies"), 66),
        (NumericsError("rolled back as often as it may"), 67),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), 76),
        (PreemptedError("stuck"), 76),
        (PeerError("rank 1 is gone"), 68),
        (RuntimeError("Connection closed by peer [::1]:4"), 68),
    ],
)
def test_what_keeps_a_save_from_being_made_is_told_apart_from_what_stays_wrong(error, code):
    with pytest.raises(type(error)) as caught:
        fail_after_a_signal(error, agreed=False)  # other ranks do not know of the signal
    assert caught.value is error
    with pytest.raises(Exception, match=str(error.args[0][:20])) as caught:
        fail_after_a_signal(error)
    assert get_exit_code(caught.value) == code
    if isinstance(error, DiskError):
        assert caught.value.where == "state.json"
        assert "SIGTERM" in str(caught.value)


def test_an_exit_passes_a_trap():
    with pytest.raises(SystemExit):
        fail_after_a_signal(SystemExit(3))


# ------------------------------------------------------------------------------------ votes


@given(st.lists(st.sampled_from([None, "SIGTERM", "orphaned"]), max_size=8))
@example([None, "SIGTERM", "orphaned", "SIGTERM"])
def test_a_run_stops_if_anybody_asks_and_names_all_who_do(flags):
    who = signals._format_reasons(flags)
    assert (who is None) == (not any(flags))
    for rank, flag in enumerate(flags):
        assert flag is None or (flag in who and str(rank) in who)


def test_one_process_is_told_at_once():
    with trap_signals() as asked, open_stop_vote(asked, solo_parallel().world) as stopping:
        assert stopping() is None
        signal.raise_signal(signal.SIGINT)
        assert stopping() == stopping() == "SIGINT on rank 0"


# ------------------------------------------------------------------------------------ processes


def meet_a_signal_in_a_collective(wire):
    """Return what another thread hears of a signal while this one waits in a collective."""
    if not wire:
        signals._wakeup = lambda _: contextlib.nullcontext()
    world, heard = axis_from_group(dist.group.WORLD), []

    def kill_and_ask():
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGTERM)
        deadline = time.monotonic() + (5 if wire else 0.3)
        while asked() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        heard.append(asked())
        told.set()

    told = threading.Event()
    with trap_signals() as asked:
        if world.index == 1:
            all_gather_objects(all_gather_json_when_told(world), world)
            return None
        thread = threading.Thread(target=kill_and_ask)
        threading.Thread(target=release_when_told, args=(told,), daemon=True).start()
        thread.start()
        all_gather_objects(0, world)  # rank 1 comes when the other thread has asked
        all_gather_objects(0, world)
        thread.join()
        return heard[0], asked()


def release_when_told(told):
    told.wait()
    dist.distributed_c10d._get_default_store().set("told", "yes")


def all_gather_json_when_told(world):
    dist.distributed_c10d._get_default_store().wait(["told"])
    return all_gather_objects(1, world)


@pytest.mark.case("E7")
def test_a_signal_is_heard_while_the_main_thread_is_stuck():
    assert run_ranks(meet_a_signal_in_a_collective, 2, True)[0] == ("SIGTERM", "SIGTERM")
    # Without the socket only the handler would tell, and it does not run.
    assert run_ranks(meet_a_signal_in_a_collective, 2, False)[0] == (None, "SIGTERM")


def interrupt_twice(words, stuck):
    """Send two SIGINTs to this process; `stuck` is a main thread that runs no Python."""
    with Path(words).open("w") as file, trap_signals() as asked:
        os.dup2(file.fileno(), 2)
        signal.raise_signal(signal.SIGINT)
        assert asked() == "SIGINT"
        if not stuck:
            signal.raise_signal(signal.SIGINT)
            return asked()
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        store = dist.distributed_c10d._get_default_store()
        store.wait(["never"])
        return None


@pytest.mark.case("E3")
@pytest.mark.parametrize("stuck", [False, True])
def test_a_second_interrupt_leaves_at_once(stuck, tmp_path):
    words = tmp_path / "words"
    with pytest.raises(RankError, match="exited with code 76"):
        run_ranks(interrupt_twice, 1, str(words), stuck)
    first, *_, last = words.read_text().splitlines()
    assert words.read_text().count("TRAINKIT_ERROR") == 1
    assert first == "error: left at once, at a second SIGINT; the last checkpoint stands"
    assert last.startswith('TRAINKIT_ERROR {"code":76,')


def end_children():
    """Return how forked children end by a signal, and what this process heard of it."""
    ends, (begun, ready) = [], os.pipe()
    with trap_signals() as asked:
        for number in (signal.SIGTERM, signal.SIGUSR1):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # forking beside threads: this child only sleeps
                child = os.fork()
            if child == 0:
                try:
                    os.write(ready, b"!")
                    for _ in range(400):  # a signal just before one long sleep would wait for it
                        time.sleep(0.05)
                finally:
                    os._exit(0)
            os.read(begun, 1)
            os.kill(child, signal.SIGINT)  # a keyboard's goes to all: this one is the parent's
            os.kill(child, number)
            ends.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        return ends, asked()


def test_what_is_sent_to_a_forked_child_is_not_sent_to_us():
    assert run_ranks(end_children, 1) == [([-signal.SIGTERM, -signal.SIGUSR1], None)]


# ------------------------------------------------------------------------------------ all ranks

# What is sent: to which rank, at which place of the recipe, in which step, and how often.
CASES = {
    "one rank": [(1, "step", 3, signal.SIGTERM, 1)],
    "all ranks": [(rank, "step", 3, signal.SIGTERM, 1) for rank in range(3)],
    "a step apart": [(2, "step", 4, signal.SIGUSR1, 1), (0, "step", 3, signal.SIGUSR1, 1)],
    "a step apart, the other way": [(0, "step", 4, signal.SIGTERM, 1), (2, "step", 3, 15, 1)],
    "before step 1": [(2, "load", 0, signal.SIGUSR1, 1)],
    "during a save": [(0, "save", 4, signal.SIGTERM, 1)],
    "fifty": [(1, "step", 3, signal.SIGUSR1, 50), (2, "step", 3, signal.SIGTERM, 50)],
    "in the last step": [(1, "step", 9, signal.SIGTERM, 1)],
    "nobody": [],
}


@contextlib.contextmanager
def local_flags(asked, axis):
    """Let each rank stop when it is asked itself: what `open_stop_vote` protects from."""
    del axis
    yield asked


def stop_by_cases(folder, cases):
    """Run the recipe once for each case, on these ranks; return [(code, step, who)]."""
    script, found = load_script(), []
    for number, sent in enumerate(cases):
        out = Path(folder) / str(number)

        def at(place, step, sent=sent):
            for rank, where, when, which, times in sent:
                if (rank, where, when) == (dist.get_rank(), place, step):
                    for _ in range(times):
                        os.kill(os.getpid(), which)

        found.append(script.train(out, save_every=4, at=at))
        if found[-1][0]:
            found[-1] = (*found[-1], script.train(out, save_every=4))
    return found


@pytest.mark.case("E1", "E2", "E3")
def test_all_ranks_stop_at_the_same_step_and_go_on_from_it(tmp_path):
    for number in range(len(CASES)):
        (tmp_path / str(number)).mkdir()
    ranks = run_ranks(stop_by_cases, 3, str(tmp_path), list(CASES.values()))
    assert ranks[0] == ranks[1] == ranks[2]
    found = dict(zip(CASES, ranks[0], strict=True))
    assert found.pop("nobody") == (0, 10, None)
    assert found.pop("in the last step") == (0, 10, None)
    whole = (0, 10, None)
    assert found == {
        "one rank": (75, 5, "SIGTERM on rank 1", whole),
        "all ranks": (75, 5, "SIGTERM on ranks 0, 1, 2", whole),
        "a step apart": (75, 5, "SIGUSR1 on ranks 0, 2", whole),
        "a step apart, the other way": (75, 5, "SIGTERM on ranks 0, 2", whole),
        "before step 1": (75, 2, "SIGUSR1 on rank 2", whole),
        "during a save": (75, 6, "SIGTERM on rank 0", whole),
        "fifty": (75, 5, "SIGUSR1 on rank 1; SIGTERM on rank 2", whole),
    }
    for metrics in tmp_path.rglob("metrics_*.jsonl"):
        assert [json.loads(line)["step"] for line in metrics.read_text().splitlines()] == [
            *range(1, 11)
        ]


def disagree():
    """Return the step after which this rank stops by its own flag, or where it waits in vain."""
    group = dist.new_group(timeout=timedelta(seconds=3))
    with trap_signals() as asked, local_flags(asked, None) as stopping:
        for step in range(1, 10):
            try:
                dist.all_reduce(torch.ones(1), group=group)
            except RuntimeError as error:
                return step, get_exit_code(error)
            if step == 3 and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            if stopping():
                return step, None
        return step, None


@pytest.mark.case("E1", "E2")
def test_without_votes_ranks_part_and_wait_for_each_other():
    """The negative control: rank 1 leaves the loop, and rank 0 waits for it in a collective."""
    assert run_ranks(disagree, 2) == [(4, 68), (3, None)]
