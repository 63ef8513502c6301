"""Requests to a run that trains: all ranks carry them out after one step, or none does."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import attrs
import orjson
import pytest
import torch
from recipe_runs import SMALL, events, lines, start

from trainkit.__main__ import main
from trainkit.run import Timeouts, open_run
from trainkit.run import control as module
from trainkit.run.control import REQUESTS, Mailbox, Request, check_request, control_run
from trainkit.run.sinks import LoggingOptions
from trainkit.run.steering import open_steering
from trainkit.tools.testing import run_ranks
from trainkit.types import ConfigError, Cursor, DiskError, PeerError, StepBatch
from trainkit.weights.checkpoint import CheckpointOptions, list_checkpoints

HOST = socket.gethostname()
BEAT = {"session": "a", "count": 9, "phase": "step 413", "elapsed": 48.0, "allow": 600.0}
BEAT |= {"doing": "", "busy": 0.5, "waits": False, "still": 0.0, "state": "running"}
SAVES = CheckpointOptions(save_every=10**6, background_saves=False)


def train(
    out, *, steps=10**6, log_every=1, evaluates=True, samples=True, profiler=None, pause=0.002
):
    """Take steps that change nothing until somebody stops the run; return what this rank did."""
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    found, stop = {"evaluated": [], "profiled": []}, None
    with open_run(out, timeouts=Timeouts(start_timeout=60.0)) as run:
        state = run.resume([model], optimizer)
        with run.loop(
            state,
            [model],
            optimizer,
            steps=steps,
            replay=None,
            checkpoints=SAVES,
            logging=LoggingOptions(log_every=log_every),
        ) as loop:
            if profiler:
                loop.on_request("profile", partial(profile, found["profiled"]))
            while state.step < steps and not stop:
                state = attrs.evolve(state, step=state.step + 1)
                metrics = {"loss": 2.0, "grad_norm": 1.0, "tokens": 1}
                state = loop.record(state, metrics, StepBatch([{}], Cursor(state.step)))
                if evaluates and loop.is_due(state, 0):
                    found["evaluated"].append(state.step)
                    state = loop.evaluate(state, lambda: {"loss": 1.5, "tokens": 1})
                    if samples:
                        loop.show_sample(state, "once upon")
                stop = loop.checkpoint(state)
                time.sleep(pause)
        code = run.finish(state, [model], optimizer, stop=stop) if stop else 0
    return found | {"step": state.step, "stop": stop, "code": code}


def profile(found, argument, step):
    found.append((argument, step))
    return f"{argument} steps are profiled"


def send(out, script, answers):
    """Make some requests as soon as the run takes them, each when the one before is done."""
    while not (out / "metrics.jsonl").exists() or not (out / "metrics.jsonl").stat().st_size:
        time.sleep(0.01)
    for name, *argument in script:
        try:
            _, answer = control_run(out, name, *argument)
            answers.append((name, answer.verdict, answer.step, answer.text))
        except (ConfigError, PeerError, DiskError) as error:
            answers.append((name, type(error).__name__, None, str(error)))


@pytest.fixture
def quick(monkeypatch):
    """Let runs in this process look for requests at every step."""
    monkeypatch.setattr(module, "_POLL", 0.0)


def steer(out, script, run):
    """Return what a run returns while a thread makes requests, and the answers to them."""
    answers = []
    out.mkdir(exist_ok=True)
    thread = threading.Thread(target=send, args=(out, [*script], answers))
    thread.start()
    try:
        return run(), answers
    finally:
        thread.join(60)


# ------------------------------------------------------------------------------------ one process


@pytest.mark.usefixtures("quick")
def test_each_request_is_carried_out_answered_and_recorded(tmp_path):
    script = [("save",), ("evaluate",), ("sample",), ("log-every", 3), ("profile", 9), ("stop",)]
    found, answers = steer(tmp_path / "run", script, partial(train, tmp_path / "run"))
    by_name = {name: (verdict, step, text) for name, verdict, step, text in answers}
    assert [*by_name] == [name for name, *_ in script]
    saved = list_checkpoints(tmp_path / "run/checkpoints")
    assert by_name["save"] == ("done", int(saved[-1].name[5:]), f"saved in {saved[-1]}")
    assert [by_name[name][1] for name in ("evaluate", "sample")] == found["evaluated"]
    assert by_name["evaluate"][2] == "held-out loss 1.5000"
    assert by_name["sample"][2] == "the sample is in events.jsonl and in the output of the run"
    assert by_name["sample"][1] in [x["step"] for x in events(tmp_path / "run", "sample")]
    first = by_name["log-every"][1] + 1
    assert by_name["log-every"][2] == f"--log-every is 3 from step {first} on"
    begin = by_name["profile"][1] + 1
    assert by_name["profile"][2].startswith(f"the profile of steps {begin} to {begin + 8} will be ")
    (profiled,) = events(tmp_path / "run", "profile")
    assert (profiled["first"], Path(profiled["path"]).is_dir()) == (begin, True)
    assert by_name["profile"][2].endswith(f"will be in {profiled['path']}")
    assert by_name["stop"] == ("done", found["step"], "saved; the same command resumes from there")
    assert (found["stop"], found["code"]) == (f"stop by {module._get_user()}@{HOST}", 75)
    assert saved[0].name == f"step_{found['step']:08}"
    recorded = events(tmp_path / "run", "control")
    assert [x["request"] for x in recorded] == [name for name, *_ in script]
    for event in recorded:
        assert event["ranks"] == 1
        assert event["by"] == f"{module._get_user()}@{HOST}"
        assert 0 <= event["done"] - event["asked"] < 60
    assert list((tmp_path / "run/control").iterdir()) == []
    assert [x["step"] for x in lines(tmp_path / "run")] == [*range(1, found["step"] + 1)]


@pytest.mark.usefixtures("quick")
def test_an_abort_saves_nothing_and_a_second_stop_is_refused(tmp_path):
    out = tmp_path / "run"
    found, answers = steer(out, [("save",), ("abort",)], partial(train, out))
    assert found["code"] == 76
    assert answers[1][1] == "done"
    assert answers[1][3].startswith("aborted without a save; the same command resumes from the")
    (only,) = list_checkpoints(out / "checkpoints")
    assert only.name == f"step_{answers[0][2]:08}"
    assert found["step"] > answers[0][2]
    again = train(out, steps=answers[0][2] + 1)
    assert (again["step"], again["code"]) == (answers[0][2] + 1, 0)


@pytest.mark.usefixtures("quick")
def test_a_run_without_an_evaluation_says_so(tmp_path):
    script = [("evaluate",), ("sample",), ("stop",)]
    _, answers = steer(tmp_path, script, partial(train, tmp_path, evaluates=False))
    assert [x[1] for x in answers] == ["ConfigError", "ConfigError", "done"]
    assert "this run evaluates nothing: its recipe does not, or" in answers[0][3]
    assert "this run writes no samples" in answers[1][3]


@pytest.mark.usefixtures("quick")
def test_a_run_that_evaluates_may_write_no_samples(tmp_path):
    script = [("sample",), ("evaluate",), ("stop",)]
    found, answers = steer(tmp_path, script, partial(train, tmp_path, samples=False))
    assert [x[1] for x in answers] == ["ConfigError", "done", "done"]
    assert "this run writes no samples" in answers[0][3]
    assert len(found["evaluated"]) == 2


@pytest.mark.usefixtures("quick")
def test_a_second_profile_is_refused_until_the_first_has_ended(tmp_path):
    script = [("profile", 10**6), ("profile", 1), ("stop",)]
    _, answers = steer(tmp_path, script, partial(train, tmp_path))
    assert [x[1] for x in answers] == ["done", "ConfigError", "done"]
    assert "profile was refused: the profile of steps " in answers[1][3]


def test_what_nothing_carries_out_is_refused(tmp_path):
    write_lock(tmp_path)
    written = []
    box = Mailbox(tmp_path)
    with open_steering(
        box,
        write_event=lambda _, **facts: written.append(facts),
        log=str,
        ranks=1,
        is_first=True,
        handlers={},
    ) as steering:
        name = write(tmp_path, "log-every", argument=3)
        steering.carry_out(box.take(), 7)
    answer = json.loads((tmp_path / "control" / f"{name}.done.json").read_text())
    assert (answer["verdict"], answer["step"]) == ("refused", 7)
    assert answer["text"] == "nothing in this run carries out log-every"
    assert [x["verdict"] for x in written] == ["refused"]


@pytest.mark.usefixtures("quick")
def test_a_handler_of_the_recipes_own_carries_out_a_request(tmp_path):
    run = partial(train, tmp_path, profiler=True, log_every=50)
    found, answers = steer(tmp_path, [("profile", 3), ("save",), ("stop",)], run)
    assert answers[0][1:] == ("done", found["profiled"][0][1], "3 steps are profiled")
    assert found["profiled"][0][0] == 3
    assert answers[1][1] == "done"  # with its metrics, in between two times that they are read
    assert [x["step"] for x in lines(tmp_path)] == [*range(1, found["step"] + 1)]


def test_requests_at_once_are_carried_out_after_the_same_step_in_their_order(tmp_path, monkeypatch):
    open_box = Mailbox.open

    def open_and_write(box):
        open_box(box)
        for number, name in enumerate(("log-every", "log-every", "stop", "abort", "save")):
            write(tmp_path, name, number, argument=7 if name == "log-every" else None)

    monkeypatch.setattr(Mailbox, "open", open_and_write)
    found = train(tmp_path)
    made = events(tmp_path, "control")
    assert [(x["request"], x["verdict"]) for x in made] == [
        ("log-every", "done"),
        ("log-every", "done"),
        ("abort", "refused"),
        ("save", "refused"),
        ("stop", "done"),
    ]
    assert {x["step"] for x in made} == {found["step"]}
    assert made[2]["text"] == "the run stops already: stop by ann@gpu07"
    assert found["code"] == 75


# ------------------------------------------------------------------------------------ two ranks


def train_on_ranks(out, *, log_every=1):
    """Train on several ranks, the first of which looks for requests at every step."""
    module._POLL = 0.0
    return train(out, log_every=log_every, profiler=True)


def test_all_ranks_carry_out_a_request_after_the_same_step(tmp_path):
    script = [("evaluate",), ("save",), ("log-every", 2), ("profile", 1), ("evaluate",), ("stop",)]
    run = partial(run_ranks, partial(train_on_ranks, log_every=4), 2, tmp_path)
    ranks, answers = steer(tmp_path, script, run)
    assert ranks[0] == ranks[1]
    assert [x[:2] for x in answers] == [(name, "done") for name, *_ in script]
    assert [answers[0][2], answers[4][2]] == ranks[0]["evaluated"]
    assert (1, answers[3][2]) in ranks[0]["profiled"]
    assert ranks[0]["code"] == 75
    assert {x["ranks"] for x in events(tmp_path, "control")} == {2}
    saved = [int(path.name[5:]) for path in list_checkpoints(tmp_path / "checkpoints")]
    assert saved == [ranks[0]["step"], answers[1][2]]


def test_an_abort_ends_all_ranks_after_the_same_step_without_a_save(tmp_path):
    run = partial(run_ranks, train_on_ranks, 2, tmp_path)
    ranks, answers = steer(tmp_path, [("abort",)], run)
    assert ranks[0] == ranks[1]
    assert (ranks[0]["code"], answers[0][1]) == (76, "done")
    assert list_checkpoints(tmp_path / "checkpoints") == []


def test_a_recipe_under_torchrun_is_steered_by_the_command(tmp_path, capsys):
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(f'{{"text": "{"word " * (9 + n % 7)}{n}"}}\n' for n in range(400)))
    flags = f"{SMALL} --steps 1000000 --save-every 1h --eval-every 0 --log-every 1000 --sample 4"
    out = tmp_path / "run"
    process = start("pretrain", "--data", corpus, "--out", out, *flags.split(), ranks=2)
    try:
        deadline = time.monotonic() + 120
        while not (out / "metrics.jsonl").exists() or not lines(out):
            assert time.monotonic() < deadline
            assert process.poll() is None, process.communicate()
            time.sleep(0.05)
        for words in ("evaluate", "sample", "log-every 1", "save", "stop"):
            assert main(["control", str(out), *words.split()]) == 0
        reports = capsys.readouterr().out
    finally:
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
    assert '"text": "held-out loss ' in reports
    steps = {x["request"]: x["step"] for x in events(out, "control")}
    assert [*steps] == ["evaluate", "sample", "log-every", "save", "stop"]
    saved = [int(path.name[5:]) for path in list_checkpoints(out / "checkpoints")]
    assert saved == [steps["stop"], steps["save"]]
    evaluated = [steps["evaluate"], steps["sample"]]
    assert [x["step"] for x in events(out, "evaluation")] == evaluated
    assert [x["step"] for x in events(out, "sample")] == evaluated
    assert [x["step"] for x in lines(out)] == [*range(1, steps["stop"] + 1)]
    assert main(["control", str(out), "save"]) == 64
    assert "has stopped: stop by" in capsys.readouterr().out, err


# ------------------------------------------------------------------------------------ no run


def write_lock(folder, *, pid=None, host=HOST, token="here", silent=0.0):
    """Write what a run that trains leaves in its directory: a lock, and a beat of each rank."""
    (folder / "ranks").mkdir(parents=True, exist_ok=True)
    holder = {"host": host, "pid": pid or os.getpid(), "job": None, "since": "now", "token": token}
    (folder / "lock").write_text(json.dumps(holder))
    for rank in range(2):
        path = folder / "ranks" / f"rank_{rank:05d}.json"
        path.write_text(json.dumps(BEAT | {"rank": rank}))
        os.utime(path, (time.time() - silent - 9 * (rank == 0),) * 2)
    os.utime(folder / "lock", (time.time() - silent,) * 2)
    return folder


def write(folder, name, number=0, *, argument=None, run=None):
    """Write a request as the command does; return its id."""
    run = run or json.loads((folder / "lock").read_text())["token"]
    request = Request(f"{number}_x", name, argument, "ann@gpu07", 412, 1.5, run)
    (folder / "control").mkdir(exist_ok=True)
    path = folder / "control" / f"{request.id}.new.json"
    path.with_suffix(".part").write_bytes(orjson.dumps(attrs.asdict(request)))
    path.with_suffix(".part").rename(path)
    return request.id


@pytest.mark.parametrize(
    ("name", "argument", "message"),
    [
        ("sve", None, "there is no request 'sve'; there are save, stop, abort, evaluate, sample, "),
        ("save", 3, "save takes no number, got 3; write python -m trainkit control RUN save"),
        *(
            (
                name,
                argument,
                f"{name} needs a whole number of steps, from 1 to 2147483647, got {given}; write",
            )
            for name in ("profile", "log-every")
            for argument, given in (
                (None, "no number"),
                (0, "0"),
                (-3, "-3"),
                ("x", "'x'"),
                (1.5, "'1.5'"),
                (1 << 40, "1099511627776"),
            )
        ),
    ],
)
def test_a_request_that_is_none_is_refused_before_anything_is_written(
    name, argument, message, tmp_path, capsys
):
    write_lock(tmp_path)
    words = ["control", str(tmp_path), name, *([] if argument is None else [str(argument)])]
    assert main(words) == 64
    assert message in json.loads(capsys.readouterr().out)["error"]
    assert not (tmp_path / "control").exists()


def test_all_requests_are_known_to_the_command_and_its_help(capsys):
    with pytest.raises(SystemExit):
        main(["control", "--help"])
    shown = capsys.readouterr().out
    for name in REQUESTS:
        check_request(name, 1 if name in module._WITH_COUNT else None)
        assert f"runs/mine {name} " in shown


START = '{"time":1,"event":"start","step":0,"ranks":1,"last":9}\n'
END = '{"time":2,"event":"end","step":9,"failure":null}\n'
STOP = '{"time":2,"event":"stop","step":9,"why":"SIGTERM on rank 0"}\n'


@pytest.mark.parametrize(
    ("events_", "message"),
    [
        (START + END, "has ended"),
        (START + STOP + END, "has stopped: SIGTERM on rank 0"),
        (START + END.replace("null", '"OSError"'), "has died: OSError"),
        (START, 'has died: it was killed: it has left no event "end"'),
        ("", "cannot be reached: it has no events"),
    ],
)
def test_a_run_that_does_not_train_says_how_it_ended(events_, message, tmp_path):
    (tmp_path / "events.jsonl").write_text(events_)
    with pytest.raises(ConfigError, match=f"the run in {tmp_path} {message}"):
        control_run(tmp_path, "save")
    with pytest.raises(ConfigError, match="does not exist"):
        control_run(tmp_path / "no", "save")
    assert not (tmp_path / "control").exists()


def test_a_killed_run_is_known_by_its_process(tmp_path):
    write_lock(tmp_path, pid=2**22 + 1)
    with pytest.raises(ConfigError, match=f"has died: .*process {2**22 + 1} on {HOST} is gone"):
        control_run(tmp_path, "stop")


# ------------------------------------------------------------------------------------ no answer


@pytest.mark.parametrize("host", [HOST, "gpu07"])
def test_what_no_rank_carries_out_is_taken_back_and_the_last_sign_is_named(host, tmp_path):
    write_lock(tmp_path, host=host)
    with pytest.raises(PeerError) as caught:
        control_run(tmp_path, "save", patience=0.2)
    text = str(caught.value)
    assert "no rank carried out save within 0.2 s; it was taken back" in text
    assert "rank 1 was seen 0s ago, in phase 'step 413' for 48 s; rank 0 was seen 9s ago" in text
    assert list((tmp_path / "control").iterdir()) == []
    box = Mailbox(tmp_path)
    box.open()
    assert box.take() == []


def test_the_rank_that_has_been_silent_for_longest_is_named(tmp_path):
    (tmp_path / "ranks").mkdir()
    for rank, age in {0: 20, 1: 10, 2: 70, 3: 30}.items():
        path = tmp_path / "ranks" / f"rank_{rank:05d}.json"
        path.write_text(json.dumps(BEAT | {"phase": f"step {rank}"}))
        os.utime(path, (time.time() - age,) * 2)
    text = module.describe_last_signs(tmp_path)
    assert text.startswith("Last of all rank 1 was seen 10s ago, in phase 'step 1' for 48 s; ")
    assert "; rank 0 was seen 20s ago, in phase 'step 0' for 48 s; " in text
    assert text.endswith("; rank 2 was seen 70s ago, in phase 'step 2' for 48 s")


def test_a_run_on_another_host_answers_through_the_disk(tmp_path):
    write_lock(tmp_path, host="gpu07")
    box = Mailbox(tmp_path)

    def run_afar():
        box.open()
        box._next_look = 0.0
        while not (found := box.take()):
            box._next_look = 0.0
        request = module.read_request(found[0])
        box.answer(request, module.Answer("done", "saved", 413, time.time()))

    thread = threading.Thread(target=run_afar)
    thread.start()
    request, answer = control_run(tmp_path, "save")
    thread.join()
    assert (answer.verdict, answer.step, request.by) == (
        "done",
        413,
        f"{module._get_user()}@{HOST}",
    )


def test_a_run_that_ends_meanwhile_is_named_at_once(tmp_path, monkeypatch):
    write_lock(tmp_path)
    (tmp_path / "events.jsonl").write_text(START + STOP + END)
    monkeypatch.setattr(module, "_POLL", 0.05)
    timer = threading.Timer(0.2, (tmp_path / "lock").unlink)
    timer.start()
    with pytest.raises(ConfigError, match=r"ended before it could save \(SIGTERM on rank 0\)"):
        control_run(tmp_path, "save")
    timer.join()
    assert list((tmp_path / "control").iterdir()) == []


def test_a_taken_request_is_waited_for_while_the_run_lives(tmp_path, monkeypatch):
    write_lock(tmp_path)
    monkeypatch.setattr(module, "_POLL", 0.05)
    box = Mailbox(tmp_path)
    box.open()

    def take_and_answer_late():
        while not (found := box.take()):
            time.sleep(0.01)
        time.sleep(0.5)  # longer than the patience
        request = module.read_request(found[0])
        box.answer(request, module.Answer("failed", "the disk is full", 3, time.time()))

    thread = threading.Thread(target=take_and_answer_late)
    thread.start()
    with pytest.raises(DiskError, match="save failed: the disk is full"):
        control_run(tmp_path, "save", patience=0.1)
    thread.join()


def test_an_interrupted_command_takes_its_request_back(tmp_path, monkeypatch):
    write_lock(tmp_path)

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "_read_answer", interrupt)
    with pytest.raises(KeyboardInterrupt):
        control_run(tmp_path, "save")
    assert list((tmp_path / "control").iterdir()) == []


def test_a_directory_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    write_lock(tmp_path)

    def refuse(path, **_):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(DiskError, match=f"@{HOST} cannot write .*control: Permission denied"):
        control_run(tmp_path, "save")
    monkeypatch.undo()
    (tmp_path / "control").write_text("no folder")
    with pytest.raises(DiskError, match=r"cannot write .*Not a directory"):
        control_run(tmp_path, "save")


@pytest.mark.skipif(os.getuid() != 0, reason="only an administrator gives folders away")
def test_the_owner_of_the_run_can_take_what_an_administrator_requests(tmp_path):
    write_lock(tmp_path)
    tmp_path.chmod(0o770)
    os.chown(tmp_path, 12345, 54321)
    before = os.umask(0o077)
    try:
        with pytest.raises(PeerError):
            control_run(tmp_path, "save", patience=0.0)
    finally:
        os.umask(before)
    info = (tmp_path / "control").stat()
    assert (info.st_uid, info.st_gid, info.st_mode & 0o7777) == (12345, 54321, 0o770)


# ------------------------------------------------------------------------------------ the mailbox


def test_what_a_killed_run_left_is_not_carried_out_by_the_next(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_POLL", 0.0)
    write_lock(tmp_path, token="killed")
    old = [write(tmp_path, "stop", 1), write(tmp_path, "abort", 2)]
    path = tmp_path / "control" / f"{old[1]}.new.json"
    path.rename(path.with_name(f"{old[1]}.taken.json"))  # it was killed after it had taken it
    found = train(tmp_path, steps=5)
    assert (found["step"], found["stop"]) == (5, None)
    for name in old:
        answer = json.loads((tmp_path / "control" / f"{name}.done.json").read_text())
        assert answer["verdict"] == "refused"
        assert "has ended, and this one does not carry it out" in answer["text"]
    assert events(tmp_path, "control") == []
    train(tmp_path, steps=6)  # nobody waits for these answers any more
    assert list((tmp_path / "control").iterdir()) == []


def test_what_comes_too_late_is_refused_when_the_run_ends(tmp_path):
    write_lock(tmp_path)
    box = Mailbox(tmp_path)
    box.open()
    first = write(tmp_path, "save", 1)
    assert [x["id"] for x in box.take()] == [first]
    late = write(tmp_path, "stop", 2)
    assert box.take() == []  # not twice in a second
    left = box.close("the run ended first")
    assert [x.id for x in left] == [first, late]
    for name in (first, late):
        answer = json.loads((tmp_path / "control" / f"{name}.done.json").read_text())
        assert (answer["verdict"], answer["text"]) == ("refused", "the run ended first")
    write(tmp_path, "stop", 3)
    box._next_look = 0.0
    assert box.take() == []  # it is closed


@pytest.mark.parametrize(
    "change",
    [
        {"name": "rm"},
        {"name": ["save"]},
        {"argument": 2.5, "name": "log-every"},
        {"argument": True, "name": "log-every"},
        {"argument": 10**30, "name": "log-every"},
        {"by": "\x1b[31mann"},
        {"id": "../../x"},
        {"time": "now"},
        {"run": None},
    ],
)
def test_a_file_that_is_no_request_is_removed_and_harms_nothing(change, tmp_path):
    write_lock(tmp_path)
    name = write(tmp_path, "save")
    path = tmp_path / "control" / f"{name}.new.json"
    values = json.loads(path.read_text()) | change
    path.write_text(json.dumps(values))
    for number, text in enumerate((b"", b"{", b"[1]", b"\xff" * 10**6)):
        (tmp_path / "control" / f"{number}.new.json").write_bytes(text)
    os.mkfifo(tmp_path / "control" / "pipe.new.json")
    messages = []
    box = Mailbox(tmp_path, messages.append)
    box.open()
    assert box.take() == []
    assert len(messages) == 6
    assert all("is no request, and was removed" in x for x in messages)
    assert list((tmp_path / "control").iterdir()) == []


def test_a_request_that_cannot_be_taken_is_left_with_one_warning(tmp_path, monkeypatch):
    write_lock(tmp_path)
    write(tmp_path, "save", 1)
    write(tmp_path, "save", 2)
    monkeypatch.setattr(module, "_POLL", 0.0)

    def refuse(path, target):
        raise PermissionError(13, "Permission denied", str(path), None, str(target))

    monkeypatch.setattr(Path, "rename", refuse)
    messages = []
    box = Mailbox(tmp_path, messages.append)
    box.open()
    assert box.take() == box.take() == []
    assert len(messages) == 1
    assert "cannot be taken, and is left: Permission denied" in messages[0]


def test_a_run_looks_at_one_directory_once_a_second_and_other_steps_at_a_clock(
    tmp_path, monkeypatch
):
    write_lock(tmp_path)
    box = Mailbox(tmp_path)
    looks, now = [], [100.0]
    monkeypatch.setattr(module.os, "listdir", lambda path: looks.append(path) or [])
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    assert box.take() == []
    assert looks == []  # it is not open
    box.open()
    for _ in range(100):
        box.take()
        now[0] += 0.1
    assert 10 <= len(looks) <= 11
    assert {*looks} == {tmp_path / "control"}


def test_the_command_prints_what_was_done_and_loads_no_torch(tmp_path):
    write_lock(tmp_path)
    box = Mailbox(tmp_path)
    box.open()

    def answer():
        while not (found := box.take()):
            box._next_look = 0.0
            time.sleep(0.01)
        box.answer(module.read_request(found[0]), module.Answer("done", "saved", 7, time.time()))

    thread = threading.Thread(target=answer)
    thread.start()
    code = "import sys; from trainkit.__main__ import main; main(sys.argv[1:])"
    code += "; assert 'torch' not in sys.modules"
    command = [sys.executable, "-c", code, "control", str(tmp_path), "save"]
    done = subprocess.run(command, capture_output=True, check=True)
    thread.join()
    report = json.loads(done.stdout)
    assert (report["request"], report["step"], report["text"]) == ("save", 7, "saved")
    assert report["seconds"] >= 0
