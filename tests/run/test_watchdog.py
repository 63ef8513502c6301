"""Whoever dies, hangs, fails or leaves is named on all ranks, and all end; nobody else is."""

import errno
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import attrs
import pytest
import rank_processes
from threads import run_threads

from trainkit.collectives import all_gather_objects
from trainkit.mesh import solo_parallel
from trainkit.run import errors, peers, stacks, watchdog
from trainkit.run.peers import (
    IN_UNIT,
    Beat,
    Failure,
    Sighting,
    find_culprits,
    find_stragglers,
    is_gone,
    kill_member,
    read_beat,
    read_failure,
    this_member,
    update_sighting,
    write_beat,
    write_failure,
)
from trainkit.run.watchdog import watch_ranks
from trainkit.types import ConfigError, PeerError, PreemptedError
from trainkit.weights.checkpoint import background_save as flight

WORLDS = {"kill": 3, "raise": 3, "alone": 1, "slow": 2} | dict.fromkeys(
    ["bare", "stop", "term", "hang", "raise0", "exit", "return", "memory", "mapped", "prune"], 2
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return how the ranks of each faulty run ended; the runs go on beside each other."""
    folder = tmp_path_factory.mktemp("runs")
    started = {
        fault: rank_processes.start(folder / fault, fault, range(world))
        for fault, world in WORLDS.items()
    }
    return {fault: rank_processes.wait(run) for fault, run in started.items()}


def codes(run):
    return [rank.code for rank in run]


@pytest.mark.case("R1", "R10")
def test_a_killed_rank_is_named_by_all_others(runs):
    run = runs["kill"]
    assert codes(run) == [68, -9, 68], run
    for rank in (run[0], run[2]):
        assert "watch: peer rank 1 (process" in rank.error
        assert "is gone; it was last in phase 'step" in rank.error
        assert "this rank was in phase 'step 3'" in rank.error
        assert rank.seconds < run[1].seconds + 10
        assert rank.said.count("TRAINKIT_ERROR") == 1


@pytest.mark.case("R1")
def test_without_the_watch_a_killed_rank_is_not_named(runs):
    assert codes(runs["bare"]) == [68, -9]
    assert "rank 1" not in runs["bare"][0].error


@pytest.mark.case("R2", "R10")
def test_a_stopped_rank_is_named_with_the_phase_of_each_and_ended(runs):
    run = runs["stop"]
    assert codes(run) == [68, -9], run
    assert "peer rank 1" in run[0].error
    assert "has stopped: no sign of life" in run[0].error
    assert "rank 0 was in phase 'step 3'" in run[0].error
    assert "all_sum (collectives.py" in run[0].error
    assert "most recent call first" in Path(run_folder(run), "errors/rank_00000.txt").read_text()


def run_folder(run):
    return next(x for x in run[0].said.splitlines() if x.startswith("traceback: "))[11:].rpartition(
        "/errors"
    )[0]


@pytest.mark.case("R2")
def test_of_ranks_that_are_all_late_the_one_that_does_not_wait_is_named(runs):
    run = runs["hang"]
    assert codes(run) == [68, 68], run
    assert "peer rank 1" in run[0].error
    assert "is stuck, in phase 'step 3'" in run[0].error
    assert "train (watched.py" in run[0].error
    assert "watch: rank 1" in run[1].error
    assert codes(runs["alone"]) == [68]
    assert "watch: rank 0" in runs["alone"][0].error


@pytest.mark.case("R3")
def test_the_cause_is_reported_and_not_its_echo(runs):
    run = runs["raise"]
    assert codes(run) == [68, 64, 68], run
    assert run[1].error == "error: bad sample 7"
    for rank in (run[0], run[2]):
        want = "peer rank 1 failed: ValueError: bad sample 7 (in phase 'step 3')"
        assert want in rank.error


@pytest.mark.case("R6")
def test_work_of_rank_0_alone_that_fails_ends_all(runs):
    run = runs["raise0"]
    assert codes(run) == [64, 68], run
    assert "peer rank 0 failed: ValueError: cannot prune" in run[1].error


@pytest.mark.case("R4")
def test_a_rank_that_leaves_early_is_a_failure(runs):
    run = runs["exit"]
    assert codes(run) == [68, 70], run
    assert "left with exit code 0 in phase 'step 3', before the end" in run[0].error
    run = runs["return"]
    assert codes(run)[0] == 68
    assert "peer rank 1" in run[0].error
    assert "has left the others alone, ended after phase 'step 3'" in run[0].error


@pytest.mark.case("R5")
def test_long_work_of_rank_0_that_has_time_ends_nobody(runs):
    assert codes(runs["prune"]) == [0, 0], runs["prune"]
    assert runs["prune"][0].seconds > 7


@pytest.mark.case("R7")
def test_a_rank_that_all_wait_for_is_named_and_nothing_fails(runs):
    assert codes(runs["slow"]) == [0, 0]
    assert "watch: rank 1 (process" in runs["slow"][0].said
    assert runs["slow"][0].said.count("is slower than the others") == 1
    assert "slower" not in "".join(rank.said for rank in runs["prune"])


@pytest.mark.case("R9")
def test_a_rank_without_memory_names_the_phase_and_the_bytes(runs):
    run = runs["memory"]
    assert codes(run)[0] == 68
    assert run[1].code not in (0, None)
    assert "rank 1 had no memory left for 4294967296 bytes more in phase 'step 3'" in run[1].error
    assert "RLIMIT_AS lets it have" in run[1].error
    assert '"got":"4294967296 bytes"' in run[1].said
    assert "python -m trainkit plan says what a layout needs" in run[1].said
    assert "peer rank 1 failed:" in run[0].error


@pytest.mark.case("D4")
def test_a_mapped_file_that_is_cut_off_shows_where_and_ends_all(runs):
    run = runs["mapped"]
    assert codes(run) == [68, -7], run
    assert "Bus error" in run[1].said
    assert "cut_off" in run[1].said
    assert "peer rank 1" in run[0].error
    assert run[0].seconds < run[1].seconds + 10


@pytest.mark.case("E7")
def test_a_stop_that_a_dead_peer_prevents_ends_with_76(runs):
    run = runs["term"]
    assert codes(run) == [76, -9], run
    want = "was asked to stop (SIGTERM), but not saved within 3 s: there is no checkpoint"
    assert want in run[0].error


# ------------------------------------------------------------------------------------ one process


def session_of(folder):
    text = (folder / "rank_00000.json").read_text()
    return text.split('"session":"')[1].split('"')[0]


def soon(condition):
    """Wait until a condition holds, on a busy machine for up to 30 s; return whether it does."""
    deadline = time.monotonic() + 30
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return bool(condition())


@pytest.mark.case("Z1")
def test_no_thread_and_no_file_is_left_open(tmp_path):
    threads, files = threading.active_count(), len([*Path("/proc/self/fd").iterdir()])
    for _ in range(3):
        with watch_ranks(tmp_path, solo_parallel().world) as phase:
            for step in range(10_000):
                phase(f"step {step}")
            time.sleep(0.3)
    assert threading.active_count() == threads
    assert len([*Path("/proc/self/fd").iterdir()]) == files
    folder = tmp_path / "ranks"
    assert read_beat(folder, 0, session_of(folder)).state == "ended"
    assert sorted(x.name for x in folder.iterdir()) == ["rank_00000.json"]


@pytest.mark.case("Z3")
def test_sixteen_ranks_watch_each_other(tmp_path):
    def train(axis):
        with watch_ranks(tmp_path, axis) as phase:
            phase("step 1", allow=60)
            return len(list((tmp_path / "ranks").glob("rank_*.json"))) > 0

    assert run_threads(train, 16) == [True] * 16


def test_files_of_an_earlier_run_are_not_believed(tmp_path):
    folder = tmp_path / "ranks"
    folder.mkdir()
    write_failure(folder, Failure("old", 1, "failed: old"))
    with watch_ranks(tmp_path, solo_parallel().world):
        assert not (folder / "failure.json").exists()
        write_failure(folder, Failure("old", 1, "failed: old"))
        assert read_failure(folder, session_of(folder)) is None


def test_an_error_of_one_process_is_raised_as_it_is(tmp_path):
    with pytest.raises(KeyError, match="x"), watch_ranks(tmp_path, solo_parallel().world):
        raise KeyError("x")
    with pytest.raises(ConnectionError), watch_ranks(tmp_path, solo_parallel().world):
        raise ConnectionResetError("a server of the recipe's own: connection reset")
    with pytest.raises(SystemExit), watch_ranks(tmp_path, solo_parallel().world):
        sys.exit(0)
    with (
        pytest.raises(PeerError, match="found before"),
        watch_ranks(tmp_path, solo_parallel().world),
    ):
        raise PeerError("found before")


def test_the_first_cause_stands(tmp_path):
    for folder in (tmp_path / str(number) for number in range(20)):
        folder.mkdir()
        told = run_threads(_tell_and_return, 8, folder)
        assert len(set(told)) == 1
        assert read_failure(folder, "a") == told[0]
        assert [path.name for path in folder.iterdir()] == ["failure.json"]


def _tell_and_return(axis, folder):
    return write_failure(folder, Failure("a", axis.index, f"failed {axis.index}"))


def move_away(folder):
    folder.rename(folder.with_name("there"))


def clear_away(folder):
    while folder.exists():  # the watch may write between two of its looks
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize("remove", [clear_away, move_away])
def test_a_directory_that_somebody_removes_is_told_once(remove, tmp_path, monkeypatch):
    monkeypatch.setattr(watchdog, "_TICK", 0.01)
    warned, folder = [], tmp_path / "run"
    with watch_ranks(folder, solo_parallel().world, log=warned.append):
        time.sleep(0.1)
        assert not warned
        remove(folder)
        folder.mkdir()  # as the next save does
        assert soon(lambda: warned)
        time.sleep(0.1)
    assert len(warned) == 1
    assert f"the run directory {folder} was removed or moved" in warned[0]


@pytest.mark.case("L12")
def test_a_run_whose_directory_is_another_runs_by_now_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(watchdog, "_TICK", 0.01)
    ended, calls = [], []
    monkeypatch.setattr(watchdog, "_end", lambda _, error: ended.append(error))

    def hold():
        calls.append(1)
        if len(calls) == 3:
            raise ConfigError("lock_run: run is in use by process 7 on a")

    with watch_ranks(tmp_path, solo_parallel().world, renew_lock=hold):
        assert soon(lambda: ended)
    assert (ended[0].code, "in use by process 7 on a" in str(ended[0])) == (74, True)


def watch_of(run_dir, **options):
    """Return the records of one rank whose thread has not been started."""
    team = watchdog._join(run_dir, solo_parallel().world)
    defaults = watchdog._Options(
        stop_reason=lambda: None,
        grace=None,
        renew_lock=lambda: None,
        count_written=None,
        log=lambda _: None,
        is_there=lambda: True,
        report_straggler=lambda _: None,
        owns_process=True,
    )
    return watchdog._make_watch(team, attrs.evolve(defaults, **options), allow=600.0)


def with_a_peer(rank, sighting):
    """Return the same with a second rank on this host."""
    peer = attrs.evolve(rank.team.own, rank=1)
    team = attrs.evolve(rank.team, members=[rank.team.own, peer])
    return attrs.evolve(rank, team=team, others=watchdog._Others({1: sighting}))


def test_ranks_at_different_places_are_a_fault_of_the_recipe(tmp_path):
    rank = with_a_peer(watch_of(tmp_path), Sighting(BEAT))
    for doing, hint in (("agree (x.py:7)", True), ("all_sum (x.py:1)", False)):
        rank.pulse.beat = attrs.evolve(rank.pulse.beat, waits=True, doing="all_sum (x.py:1)")
        beat = attrs.evolve(BEAT, session=rank.team.session, waits=True, doing=doing)
        write_beat(rank.team.folder, rank.team.members[1], beat)
        error = watchdog._make_error(rank, watchdog._accuse(rank, [0, 1]))
        (rank.team.folder / "failure.json").unlink()
        assert error.code == 68
        assert ("fault of the recipe" in (error.hint or "")) == hint
        assert "all_sum (x.py:1)" in str(error)


def test_ranks_that_wait_in_units_of_fsdp_are_told_what_that_means(tmp_path):
    rank = with_a_peer(watch_of(tmp_path), Sighting(BEAT))
    doing = f"forward (model.py:7) > {IN_UNIT} (unshard)"
    rank.pulse.beat = attrs.evolve(rank.pulse.beat, waits=True, doing=doing)
    beat = attrs.evolve(BEAT, session=rank.team.session, waits=True, doing=doing)
    write_beat(rank.team.folder, rank.team.members[1], beat)
    error = watchdog._make_error(rank, watchdog._accuse(rank, [0, 1]))
    assert "waits for parameters or gradients of another unit than others" in str(error)
    assert "out of its `blocks`" in error.hint


@pytest.mark.parametrize("place", [f"{IN_UNIT} (unshard)", "agree (x.py:7)"])
def test_where_a_stopped_rank_was_last_is_not_taken_for_where_it_waits(place, tmp_path):
    rank = watch_of(tmp_path)
    waiting = {"session": rank.team.session, "waits": True}
    beat = attrs.evolve(BEAT, doing=place, **waiting)
    rank = with_a_peer(rank, Sighting(beat, still=9.0))
    rank.pulse.beat = attrs.evolve(rank.pulse.beat, doing=f"{IN_UNIT} (unshard)", waits=True)
    write_beat(rank.team.folder, rank.team.members[1], beat)
    error = watchdog._make_error(rank, watchdog._accuse(rank, [1]))
    assert "has stopped: no sign of life for 9 s" in str(error)


def test_a_rank_in_a_unit_of_fsdp_says_so():
    place, leave, entered = {}, threading.Event(), threading.Event()
    text = "def unshard(enter, wait):\n    enter()\n    wait()\n"
    exec(compile(text, f"/x{stacks.FSDP_UNIT_FILE}", "exec"), place)
    thread = threading.Thread(target=lambda: place["unshard"](entered.set, leave.wait))
    thread.start()
    entered.wait(10)
    doing = stacks.describe_stack(thread.ident)
    leave.set()
    thread.join()
    assert doing.endswith(f"> {IN_UNIT} (unshard)")
    assert IN_UNIT not in stacks.describe_stack(threading.get_ident())


@pytest.fixture
def stopping(tmp_path, monkeypatch):
    """Return (a rank that is asked to stop, how it ends, what it warns of)."""
    ended, warned = [], []
    rank = watch_of(tmp_path, stop_reason=lambda: "SIGTERM", log=warned.append)
    monkeypatch.setattr(watchdog, "_end", lambda _, error: ended.append(error))

    def after(seconds, grace=None, sighting=None):
        rank.alarms.stopping = seconds
        here = rank if sighting is None else with_a_peer(rank, sighting)
        here = attrs.evolve(here, options=attrs.evolve(rank.options, grace=grace))
        watchdog._act(here, passed=1.0)
        return len(ended), len(warned)

    return rank, after, ended, warned


@pytest.mark.case("E5", "G9")
def test_a_stop_may_take_as_long_as_two_steps_and_a_save_have_taken(stopping):
    rank, after, ended, warned = stopping
    rank.clock.steps.extend([25.0, 3.0])
    rank.saves.longest = 10.0
    assert (after(24.0), after(64.0), after(66.0)) == ((0, 0), (0, 1), (1, 1))
    assert "not saved within 25 s" in warned[0]  # a launcher may kill before the end
    assert "not saved within 65 s" in str(ended[0])


@pytest.mark.case("E5")
def test_the_grace_that_is_given_holds_also_while_a_save_is_under_way(stopping, monkeypatch):
    rank, after, *_ = stopping
    monkeypatch.setattr(watchdog, "_may_finish_saving", lambda _: True)
    rank.clock.steps.append(25.0)
    assert (after(109.0, grace=110.0), after(111.0, grace=110.0)) == ((0, 0), (1, 0))


@pytest.mark.case("E5", "K6")
def test_a_save_that_hangs_is_told_in_time_and_ended(stopping, monkeypatch):
    rank, after, ended, warned = stopping
    monkeypatch.setattr(watchdog, "_may_finish_saving", lambda _: True)
    assert (after(26.0), after(599.0)) == ((0, 1), (0, 1))  # of the first one nothing is known
    rank.saves.longest = 0.1
    assert (after(40.0), after(51.0)) == ((0, 1), (1, 1))
    assert "not saved within 25 s: there is no checkpoint" in warned[0]
    assert ended[0].code == 76


def saving(rank, parts, seconds):
    """Let a rank be in a save for some seconds, of which so many parts get written."""
    is_stopping = rank.alarms.stopping > 0
    for _ in range(round(seconds)):
        rank.saves.advance(1.0, is_saving=True, parts=parts, is_stopping=is_stopping)


@pytest.mark.case("E5", "K6")
def test_a_stop_waits_for_a_save_only_as_long_as_it_goes_on_writing(stopping, monkeypatch):
    rank, after, ended, _ = stopping
    stack = [("/x/trainkit/weights/checkpoint/save.py", "land", 1)]
    monkeypatch.setattr(watchdog, "read_stack", lambda _: stack)
    saving(rank, 1, 9)
    assert after(26.0) == (0, 1)
    saving(rank, 1, 3)  # since nothing more is written, the disk hangs
    assert after(27.0) == (1, 1)
    assert ended.pop().code == 76
    (rank.team.folder / "failure.json").unlink()
    beat = attrs.evolve(BEAT, still=2.0)  # another rank writes a larger part
    assert after(28.0, sighting=Sighting(beat)) == (0, 1)
    rank.alarms.stopping = 0.0
    saving(rank, 2, 1)  # this pause of 12 s was none that does not end
    saving(rank, 2, 20)
    assert after(26.0) == (0, 1)
    saving(rank, 2, 5)
    assert after(26.0) == (1, 1)


@pytest.mark.case("E5")
def test_a_save_that_hangs_before_the_stop_is_no_measure_of_one(stopping):
    rank, after, *_ = stopping
    saving(rank, 1, 600)
    assert after(26.0) == (1, 0)


def test_the_time_of_steps_and_saves_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(watchdog, "_TICK", 0.01)
    found = []
    make = watchdog._make_watch
    monkeypatch.setattr(
        watchdog,
        "_make_watch",
        lambda *args, **kwargs: found.append(make(*args, **kwargs)) or found[0],
    )
    with watch_ranks(tmp_path, solo_parallel().world) as phase:
        for step in range(1, 4):
            phase(f"step {step}")
            save = threading.Thread(target=time.sleep, args=(0.2,), name=flight.SAVE_THREAD)
            save.start()
            save.join()
            time.sleep(0.05)
    assert 0.2 < max(found[0].clock.steps) < 2
    assert 0.1 < found[0].saves.longest < 2


@pytest.mark.case("E5", "K6")
def test_a_disk_that_hangs_the_watch_does_not_keep_last_words(tmp_path, monkeypatch, capfd):
    """Neither the files of the watch, nor that of the traceback, are ever written."""
    codes, hung = [], threading.Event()
    monkeypatch.setattr(watchdog.os, "_exit", codes.append)
    monkeypatch.setattr(watchdog, "_SECOND", 0.01)
    rank = watch_of(tmp_path, grace=0.5, stop_reason=lambda: "SIGTERM")
    stop = threading.Event()
    guard = (rank, stop)
    watching = threading.Thread(target=watchdog._guard_the_watch, args=guard)
    watching.start()
    assert soon(lambda: codes)
    stop.set()
    watching.join()
    assert codes[0] == 76
    assert "was asked to stop (SIGTERM), but the disk of" in capfd.readouterr().err
    monkeypatch.setattr(errors, "_write_last_words", lambda *_: hung.wait(30))
    monkeypatch.setattr(errors, "_WAIT_FOR_DISK", 0.1)
    codes.clear()
    watchdog._end(rank, PreemptedError("not saved within 25 s"))
    assert codes[0] == 76
    assert 'TRAINKIT_ERROR {"code":76' in capfd.readouterr().err
    hung.set()


BEAT = Beat("a", 1, "step 3", 1.0, 60.0, "")


def test_a_full_disk_is_no_error_and_an_end_is_told_all_the_same(tmp_path, monkeypatch):
    member = this_member(0)
    write_beat(tmp_path, member, BEAT)

    def full(self, _):
        raise OSError(errno.ENOSPC, "No space left on device", str(self))

    monkeypatch.setattr(Path, "write_bytes", full)
    write_beat(tmp_path, member, attrs.evolve(BEAT, count=2))
    assert read_beat(tmp_path, 0, "a").count == 2
    write_beat(tmp_path, member, attrs.evolve(BEAT, phase="p" * 99, state="ended"))
    assert read_beat(tmp_path, 0, "a") is None


def test_a_folder_that_somebody_has_removed_is_made_again(tmp_path):
    for count in (2, 3):
        write_beat(tmp_path / "ranks", this_member(0), attrs.evolve(BEAT, count=count))
    assert read_beat(tmp_path / "ranks", 0, "a").count == 3


LATE = attrs.evolve(BEAT, elapsed=61.0)


@pytest.mark.parametrize(
    ("own", "others", "guilty"),
    [
        (BEAT, {1: Sighting(LATE, still=9.0)}, []),  # nobody is late: it is told in another way
        (LATE, {1: Sighting(LATE, still=9.0), 2: Sighting(BEAT)}, [1]),
        (LATE, {1: Sighting(BEAT), 2: Sighting(LATE)}, []),  # rank 1 has time, and is there
        (LATE, {1: Sighting(attrs.evolve(LATE, waits=True))}, [0]),
        (attrs.evolve(LATE, waits=True), {1: Sighting(LATE)}, [1]),
        (attrs.evolve(LATE, waits=True), {1: Sighting(attrs.evolve(LATE, waits=True))}, [0, 1]),
        (LATE, {1: Sighting(attrs.evolve(BEAT, state="ended"))}, [1]),
        (attrs.evolve(LATE, waits=True), {1: Sighting()}, [1]),  # never heard of
        (LATE, {}, [0]),
    ],
)
@pytest.mark.case("R2", "R5")
def test_who_is_at_fault(own, others, guilty):
    assert find_culprits(0, own, others, dict.fromkeys(others, True)) == guilty


def test_another_host_may_be_silent_for_longer():
    found = {1: Sighting(LATE, still=30.0)}
    waiting = attrs.evolve(LATE, elapsed=61.0, waits=True)
    assert find_culprits(0, waiting, found, {1: True}) == [1]
    prunes = {1: Sighting(BEAT, still=30.0)}
    assert find_culprits(0, waiting, prunes, {1: False}) == []


def test_a_beat_that_moves_is_heard():
    seen = update_sighting(update_sighting(Sighting(), BEAT, 3.0), BEAT, 2.5)
    assert seen.still == 2.5
    assert update_sighting(seen, attrs.evolve(BEAT, count=9), 1.0).still == 0.0
    assert update_sighting(seen, None, 1.0).still == 3.5


def test_stragglers_are_those_that_the_others_wait_for():
    assert find_stragglers({0: 0.2, 1: 1.0}) == {1: 0.2}
    assert find_stragglers({0: 0.1, 1: 1.0, 2: 0.3, 3: 0.2, 4: 0.3}) == {1: 0.3}  # their median
    assert find_stragglers({0: 0.9, 1: 1.0, 2: 0.8}) == {}
    assert find_stragglers({0: 0.1, 1: 0.3, 2: 0.1}) == {}  # the network is slow, not a rank
    assert find_stragglers({}) == find_stragglers({0: 1.0}) == {}


@pytest.mark.case("F4", "R1")
def test_with_no_file_left_to_open_nobody_is_gone(monkeypatch):
    own, ended = this_member(0), subprocess.Popen(["sleep", "60"])
    dead = attrs.evolve(own, pid=ended.pid, started=peers._start_of(ended.pid))
    ended.kill()
    ended.wait()
    assert is_gone(dead, own.place)

    def no_more_files(self):
        raise OSError(errno.EMFILE, "Too many open files", str(self))

    monkeypatch.setattr(Path, "read_bytes", no_more_files)
    assert not is_gone(dead, own.place)
    assert not is_gone(own, own.place)


@pytest.mark.case("R10")
def test_an_error_in_the_watch_itself_ends_nothing_and_is_warned_of_once(tmp_path, monkeypatch):
    def broken(*_):
        raise KeyError("a bug of the watch")

    warned = []
    for name in ("_look_around", "_warn_of_stragglers"):
        monkeypatch.setattr(watchdog, name, broken)
    monkeypatch.setattr(watchdog, "_TICK", 0.01)
    with watch_ranks(
        tmp_path, solo_parallel().world, stop_reason=broken, log=warned.append
    ) as phase:
        phase("step 1")
        session = session_of(tmp_path / "ranks")
        assert soon(lambda: warned and read_beat(tmp_path / "ranks", 0, session).count > 9)
    assert len(warned) == 1
    assert "went wrong in the watch itself, which goes on: KeyError" in warned[0]
    monkeypatch.setattr(watchdog, "describe_stack", broken)
    # Not even a warning gets out.
    with watch_ranks(tmp_path, solo_parallel().world, stop_reason=broken, log=broken):
        session = session_of(tmp_path / "ranks")
        assert soon(lambda: read_beat(tmp_path / "ranks", 0, session).count > 9)
    assert read_beat(tmp_path / "ranks", 0, session).state == "ended"


def test_the_stack_of_a_thread_is_its_functions_innermost_first():
    def inner():
        return stacks.read_stack(threading.get_ident()), sys._getframe()

    def outer():
        return inner()

    stack, frame = outer()
    line = frame.f_code.co_firstlineno + 1
    assert stack[:3] == [
        (stacks.__file__, "read_stack", stack[0][2]),
        (__file__, "inner", line),
        (__file__, "outer", line + 3),
    ]
    ended = threading.Event()
    other = threading.Thread(target=ended.wait)
    other.start()
    read = [name for _, name, _ in stacks.read_stack(other.ident)]
    ended.set()
    other.join()
    assert (read[0], read[-1]) == ("wait", "_bootstrap")
    assert stacks.read_stack(1) == []  # there is no such thread


BESIDE_THREADS_OF_C = """
import ctypes, os, sys, threading, time
from trainkit.run import stacks

called = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(lambda _: 0)
pthread = ctypes.CDLL(None)

def begin_and_end():
    while True:
        thread = ctypes.c_ulong()
        pthread.pthread_create(ctypes.byref(thread), None, called, None)
        pthread.pthread_join(thread, None)

def read(thread):
    while True:
        assert stacks.read_stack(thread)
        time.sleep(0)

def deep(n):
    return n and deep(n - 1)

for work in (begin_and_end, begin_and_end, lambda: read(main)):
    main = threading.get_ident()
    threading.Thread(target=work, daemon=True).start()
sys.setswitchinterval(1e-5)
end = time.monotonic() + 1.5
while time.monotonic() < end:
    deep(40)
print("alive", flush=True)
os._exit(0)
"""


def test_a_stack_is_read_beside_threads_that_begin_and_end_without_python():
    """As autograd's do. Where they are looked at, too, a process lives for 0.3 s here."""
    command = [sys.executable, "-c", BESIDE_THREADS_OF_C]
    ended = subprocess.run(command, check=False, capture_output=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (0, b"alive\n"), ended.stderr.decode()


@pytest.mark.case("E1", "E7")
def test_all_ranks_end_with_the_code_of_the_one_that_was_asked_to_stop(tmp_path):
    def train(axis):
        with watch_ranks(tmp_path, axis) as phase:
            phase("step 1", allow=60)
            if axis.index == 0:
                session = session_of(tmp_path / "ranks")
                write_failure(tmp_path / "ranks", Failure(session, 0, "was asked to stop", code=76))
            all_gather_objects(0, axis)
            raise RuntimeError("gloo/transport: Connection closed by peer")

    with pytest.raises(PreemptedError, match="rank 0 was asked to stop") as caught:
        run_threads(train, 2)
    assert caught.value.code == 76


@pytest.mark.case("R10")
def test_a_process_ends_whatever_goes_wrong_on_the_way(monkeypatch, tmp_path):
    def broken(*_):
        raise RuntimeError("can't start new thread")

    codes = []
    monkeypatch.setattr(watchdog.os, "_exit", codes.append)
    monkeypatch.setattr(watchdog.threading.Thread, "start", broken)
    rank = watch_of(tmp_path)
    watchdog._end(rank, PeerError("rank 1 is gone"))
    assert codes == [68]


def test_a_pid_that_is_used_again_is_not_the_same_process():
    own = this_member(0)
    assert not is_gone(own, own.place)
    assert is_gone(attrs.evolve(own, started="1"), own.place)
    assert not is_gone(attrs.evolve(own, started="1", place="elsewhere"), own.place)
    kill_member(attrs.evolve(own, started="1"), own.place)  # and is not killed


def test_texts_without_proc(monkeypatch):
    monkeypatch.setattr(peers, "_start_of", lambda _: None)
    own = this_member(0)
    assert own.started == ""
    assert not is_gone(attrs.evolve(own, started="1"), own.place)  # nobody can tell
    assert not is_gone(own, own.place)
    assert is_gone(attrs.evolve(own, pid=2**22 - 1), own.place)
