"""A run that was killed goes on in the same run of each tracker, as its own library reads it back.

`.ci/trackers` runs these with the libraries themselves; tests/run/sinks has stand-ins for them.
"""

import contextlib
import os
import signal
import struct
import subprocess
import sys
import time
import urllib.request

import pytest
from rank_processes import free_port
from recipe_runs import RECIPES, SMALL, lines

from trainkit.run import control_run
from trainkit.weights.checkpoint.run_id import get_run_id

MORE = 20  # steps of the second start


def start(out, tracker, env, *flags):
    command = [sys.executable, RECIPES / "pretrain.py", *SMALL.split(), "--eval-every", 0]
    command += ["--save-every", 100_000, "--sinks", tracker, "--out", out, *flags]
    env = {name: x for name, x in os.environ.items() if name != "PYTHONWARNINGS"} | env
    with (out.parent / "output").open("a") as file:
        return subprocess.Popen([*map(str, command)], env=env, stdout=file, stderr=file)


def end_and_go_on(out, tracker, env, number=signal.SIGKILL, find_sent=None):
    """End a run by a signal some time after its first checkpoint, and start it again.

    `find_sent` returns the newest step that the tracker has: what waits to be sent is lost, and
    that of the checkpoint must not be.

    Return the step that it goes on from, and the losses of all steps.
    """
    process = start(out, tracker, env)
    with contextlib.ExitStack() as stack:
        stack.callback(process.wait)
        stack.callback(process.kill)
        wait_until(process, lambda: out.exists() and len(lines_of(out)) >= 10)
        control_run(out, "save")
        saved = len(lines_of(out)) + 1
        wait_until(process, lambda: list((out / "checkpoints").glob("step_*")))
        if find_sent is None:
            time.sleep(3)  # they write once a second or so
        else:
            wait_until(process, lambda: find_sent() >= find_saved(out))
        wait_until(process, lambda: len(lines_of(out)) > saved + 10)
        process.send_signal(number)
        code = process.wait()
    assert code == (75 if number == signal.SIGTERM else -number)
    step = find_saved(out)
    ended = len(lines_of(out))
    assert start(out, tracker, env, "--steps", ended + MORE).wait() == 0
    text = (out.parent / "output").read_text()
    assert text.count("resuming from") == 1, text
    assert "warning" not in text, text
    losses = {line["step"]: line["loss"] for line in lines_of(out)}
    assert list(losses) == list(range(1, ended + MORE + 1))
    name = signal.Signals(number).name
    print(f"{tracker}: {name} after step {ended}, gone on from step {step} to {len(losses)}")
    return step, losses


def find_saved(out):
    return max(int(x.name.removeprefix("step_")) for x in (out / "checkpoints").glob("step_*"))


def lines_of(out):
    with contextlib.suppress(FileNotFoundError, ValueError):  # a line is being written
        return lines(out)
    return []


def wait_until(process, holds):
    while not holds():
        assert process.poll() is None, process.returncode
        time.sleep(0.1)


def as_pairs(losses):
    return pytest.approx([x for pair in losses.items() for x in pair], rel=1e-6)


def flat(pairs):
    return [x for pair in pairs for x in pair]


def test_tensorboard_shows_one_curve(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    _, losses = end_and_go_on(tmp_path / "run", "tensorboard", {})
    files = list((tmp_path / "run/tensorboard").iterdir())
    assert len(files) == 2  # of two processes
    shown = EventAccumulator(str(tmp_path / "run/tensorboard"), size_guidance={"scalars": 0})
    scalars = shown.Reload().Scalars("train/loss")
    assert flat((x.step, x.value) for x in scalars) == as_pairs(losses)


def test_wandb_offline_has_two_parts_of_one_run(tmp_path):
    env = {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    # What is killed (-9) offline leaves nothing of its last 32 KiB: W&B writes blocks of so many.
    step, losses = end_and_go_on(tmp_path / "run", "wandb", env, signal.SIGTERM)
    identity = get_run_id(tmp_path / "run")["run"]
    parts = sorted((tmp_path / "run/wandb").glob(f"offline-run-*/run-{identity}.wandb"))
    assert len(parts) == 2
    first, second = map(read_wandb, parts)
    assert min(second) == max(first) + 1 == step + 1
    assert first | second == losses


def read_wandb(path):
    """Return the losses by step of a file of W&B: blocks of 32 KiB with parts of records."""
    import json

    from wandb.proto.wandb_internal_pb2 import Record

    data, at, record, losses = path.read_bytes(), 7, b"", {}
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:  # a header does not fit
            at += left
            continue
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind not in (1, 4):  # neither whole nor a last part
            continue
        history = Record.FromString(record).history
        record = b""
        for item in history.item:
            if (item.key or "/".join(item.nested_key)) == "train/loss":
                losses[history.step.num] = json.loads(item.value_json)
    return losses


def test_mlflow_has_one_run(tmp_path):
    from mlflow import MlflowClient

    url = f"http://127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "mlflow", "server", "--port", url.rpartition(":")[2]]
    command += ["--backend-store-uri", f"sqlite:///{tmp_path}/mlflow.db", "--workers", "1"]
    env = os.environ | {"MLFLOW_DISABLE_TELEMETRY": "true"}
    env.pop("PYTHONWARNINGS", None)
    with (tmp_path / "server").open("w") as log:
        server = subprocess.Popen(
            command, stdout=log, stderr=log, env=env, cwd=tmp_path, start_new_session=True
        )
    try:
        wait_until(server, lambda: answers(f"{url}/health"))
        given = {"MLFLOW_TRACKING_URI": url, "MLFLOW_DISABLE_TELEMETRY": "true"}
        client = MlflowClient(url)

        def find_sent():
            experiments = [x.experiment_id for x in client.search_experiments()]
            return max(
                (x.data.metrics.get("step", 0) for x in client.search_runs(experiments)), default=0
            )

        _, losses = end_and_go_on(tmp_path / "run", "mlflow", given, find_sent=find_sent)
        home = client.get_experiment_by_name("trainkit").experiment_id
        [run] = client.search_runs([home])
        assert run.data.tags["trainkit.run"] == get_run_id(tmp_path / "run")["run"]
        assert run.info.status == "FINISHED"
        assert run.data.params["rows"] == "4"
        history = client.get_metric_history(run.info.run_id, "train/loss")
        assert flat(sorted((x.step, x.value) for x in history)) == as_pairs(losses)
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait()


def answers(url):
    with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5):
        return True
    return False


def test_trackio_has_one_run(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    _, losses = end_and_go_on(tmp_path / "run", "trackio", {})
    from trackio.sqlite_storage import SQLiteStorage

    [run] = SQLiteStorage.get_runs("trainkit")
    assert run == f"run-{get_run_id(tmp_path / 'run')['run'][:8]}"
    rows = SQLiteStorage.get_logs("trainkit", run)
    assert flat(sorted((x["step"], x["train/loss"]) for x in rows)) == as_pairs(losses)


def test_the_libraries_are_these():
    from importlib.metadata import version

    names = ("tensorboard", "wandb", "mlflow", "trackio")
    print(", ".join(f"{name} {version(name)}" for name in names))
