"""A run directory in a bucket: whole or not there, and what fails is said and tried again."""

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from bucket_server import AZURITE, KEY, SECRET, error_body, wait_until

from trainkit.__main__ import main
from trainkit.buckets import cache_folder, get_bytes, list_files, open_store, put_bytes
from trainkit.types import ConfigError
from trainkit.weights.checkpoint import find_initial_weights
from trainkit.weights.checkpoint import mirror as mirrors
from trainkit.weights.checkpoint.bucket_runs import (
    fetch_lines,
    fetch_model,
    fetch_request,
    fetch_run,
    list_remote,
)
from trainkit.weights.checkpoint.manifest import (
    MANIFEST,
    clear_directory,
    list_checkpoints,
    make_manifest,
    verify_checkpoint,
)
from trainkit.weights.checkpoint.mirror import ASIDE, open_mirror
from trainkit.weights.checkpoint.retention import Retention
from trainkit.weights.checkpoint.run_id import get_run_id
from trainkit.weights.checkpoint.safe_files import hash_file

PART = "comp=block&" if AZURITE else "partNumber=2"  # of an upload in parts


def save(folder, step, data=b"weights", score=None):
    """Write a checkpoint as a save commits it: by a rename."""
    staging = folder / "checkpoints" / f".staging-{step}"
    staging.mkdir(parents=True)
    for rank in range(2):
        (staging / f"rank_{rank:05d}.safetensors").write_bytes(data * 100 + bytes([step, rank]))
    files = {path.name: hash_file(path) for path in sorted(staging.iterdir())}
    (staging / MANIFEST).write_bytes(make_manifest(step, files, score=score))
    return staging.rename(folder / "checkpoints" / f"step_{step:08d}")


@pytest.fixture
def run(bucket, monkeypatch):
    """Yield (folder, store, proxy): a run with a file of metrics, in its folder of the cache."""
    monkeypatch.setattr(mirrors, "_LOOK_EVERY", 0.02)
    proxy, _, url = bucket
    folder = cache_folder("runs", url)
    folder.mkdir(parents=True)
    get_run_id(folder)
    (folder / "metrics.jsonl").write_text('{"step":1}\n')
    (folder / "lock").write_text("of this machine")
    return folder, open_store(url, timeout=2.0, patience=0.3), proxy


def mirror_of(run, messages, patience=20.0, sets_aside=False, retention=None):
    folder, store, _ = run
    context = open_mirror(folder, store, get_patience=lambda: patience, log=messages.append)

    class Begun:
        def __enter__(self):
            mirror = context.__enter__()
            mirror.retention = retention
            mirror.begin(sets_aside=sets_aside)
            return mirror

        def __exit__(self, *error):
            return context.__exit__(*error)

    return Begun()


def names(store):
    return list_remote(list_files(store))


def test_lines_come_before_a_checkpoint_and_its_manifest_comes_last(run):
    folder, store, proxy = run
    messages, events = [], []
    with mirror_of(run, messages) as mirror:
        mirror.event = lambda *event: events.append(event)
        save(folder, 1)
        wait_until(lambda: names(store) == ["step_00000001"])
        (folder / "metrics.jsonl").write_text('{"step":1}\n{"step":2}\n')
        del proxy.requests[:]
        save(folder, 2)
        wait_until(lambda: len(names(store)) == 2)
        assert get_bytes(store, "metrics.jsonl").endswith(b'{"step":2}\n')
        (folder / "final.json").write_text("{}")
    puts = [path.partition("/run/")[2] for method, path in proxy.requests if method == "PUT"]
    step = "checkpoints/step_00000002/"
    files = [step + f"rank_0000{rank}.safetensors" for rank in range(2)]
    assert puts == ["metrics.jsonl", *files, step + MANIFEST, "final.json"]
    assert "lock" not in list_files(store)
    assert [facts["checkpoint"] for _, facts in events] == ["step_00000001", "step_00000002"]
    assert messages == []
    assert not [thread for thread in threading.enumerate() if thread.name == "trainkit-mirror"]


def test_retention_holds_on_both_sides(run):
    folder, store, _ = run
    with mirror_of(run, [], retention=Retention(last=2, best=1)):
        save(folder, 1, score=0.5)
        wait_until(lambda: len(names(store)) == 1)
        for step in (2, 3, 4):
            save(folder, step, score=1.0 + step)
            wait_until(lambda step=step: f"step_0000000{step}" in names(store))
    assert names(store) == ["step_00000004", "step_00000003", "step_00000001"]
    assert not any("step_00000002" in key for key in list_files(store))
    (folder / "checkpoints" / "step_00000001.pin").touch()
    with mirror_of(run, [], retention=Retention(last=2)):
        pass
    shutil.rmtree(folder / "checkpoints")  # as on another machine
    save(folder, 4, score=5.0)
    with mirror_of(run, [], retention=Retention(last=2)):
        pass
    assert names(store) == ["step_00000004", "step_00000003", "step_00000001"]


def test_what_was_broken_off_in_the_bucket_is_deleted_by_retention(run):
    folder, store, _ = run
    for key in ("step_00000001/a", "step_00000002/a", f"step_00000003/{ASIDE}", "step_00000004/a"):
        put_bytes(store, f"checkpoints/{key}", b"part")
    put_bytes(store, "checkpoints/step_00000002.pin", b"")
    save(folder, 5)
    with mirror_of(run, []):  # which deletes nothing without a policy
        pass
    assert "checkpoints/step_00000001/a" in list_files(store)
    with mirror_of(run, [], retention=Retention(last=2)):
        pass
    left = {key.split("/")[1] for key in list_files(store, "checkpoints")}
    steps = ["step_00000002", "step_00000002.pin", "step_00000003", "step_00000005"]
    assert sorted(left) == steps


def test_a_roll_back_holds_in_the_bucket_too(run, bucket):
    folder, store, _ = run
    _, _, url = bucket
    messages = []
    checkpoints = folder / "checkpoints"
    with mirror_of(run, messages, retention=Retention(last=2, best=1)):
        for step in (1, 2, 3):
            save(folder, step, score=1.0 / step)
            (checkpoints / "step_00000001.pin").touch()
        wait_until(lambda: len(names(store)) == 3)
        paths = list_checkpoints(checkpoints)
        clear_directory(checkpoints, paths[-1], paths[-1], log=lambda _: None)
        wait_until(lambda: names(store) == ["step_00000001"])
        for step in (3, 4, 5):  # a name comes again, with another score
            save(folder, step, data=b"others", score=1.0 + step)
            wait_until(lambda step=step: f"step_0000000{step}" in names(store))
    assert names(store) == ["step_00000005", "step_00000004", "step_00000001"]
    assert len([x for x in messages if ASIDE in x]) == 2
    shutil.rmtree(folder)
    assert list_checkpoints(fetch_run(url) / "checkpoints")[0].name == "step_00000005"


def test_a_folder_that_goes_while_it_is_listed_is_no_failure(run, monkeypatch):
    folder, store, _ = run
    (folder / "profiles").mkdir()
    (folder / "checkpoints" / ".staging-9").mkdir(parents=True)
    scan = os.scandir

    def lose(path):
        if Path(path).name in ("profiles", ".staging-9"):
            raise FileNotFoundError(path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", lose)
    messages = []
    with mirror_of(run, messages):
        pass
    assert messages == []
    assert "metrics.jsonl" in list_files(store)


def test_a_stop_shortens_the_wait_at_the_end(run):
    folder, store, proxy = run
    save(folder, 1)
    proxy.fail = lambda _, path: "hang" if "rank_00001" in path else None
    waits, messages = iter([1000.0, 0.0]), []
    with open_mirror(folder, store, get_patience=lambda: next(waits), log=messages.append) as it:
        it.begin()
    assert [*waits] == []
    # A server that is slow may lack small files as well.
    assert re.search(f"{store.url} does not have step_00000001[^;]*; they are in", messages[-1])


def test_what_fails_is_said_once_and_tried_again_while_training_goes_on(run):
    folder, store, proxy = run
    messages = []
    proxy.fail = lambda method, _: (500, error_body("InternalError")) if method == "PUT" else None
    with mirror_of(run, messages):
        save(folder, 1)
        wait_until(lambda: messages)
        tries = len(proxy.requests)
        wait_until(lambda: len(proxy.requests) > tries + 2)
        assert len(messages) == 1
        proxy.fail = lambda *_: None
        wait_until(lambda: names(store) == ["step_00000001"])
    assert f"does not have step_00000001 yet: put_file: {store.url}" in messages[0]
    assert "training goes on, and it is tried again" in messages[0]
    assert messages[1:] == [f"mirror: {store.url} has everything again"]


def test_the_end_waits_for_some_seconds_and_says_what_is_missing(run):
    folder, store, proxy = run
    messages = []
    save(folder, 1)
    hung = threading.Event()
    proxy.fail = lambda _, path: (hung.set() or "hang") if "rank_00001" in path else None
    with mirror_of(run, messages, patience=0.2):
        assert hung.wait(30)
    assert f"{store.url} does not have step_00000001; they are in {folder}" in messages[-1]
    assert names(store) == []
    proxy.fail = lambda *_: None
    proxy.released.set()
    with mirror_of(run, messages):
        pass
    assert names(store) == ["step_00000001"]


KILLED = """
import sys
from pathlib import Path
from trainkit.buckets import open_store
from trainkit.weights.checkpoint.mirror import open_mirror
with open_mirror(Path(sys.argv[1]), open_store(sys.argv[2]), get_patience=lambda: 60.0) as mirror:
    mirror.begin()
"""


@pytest.mark.parametrize("hangs_at", ["rank_00001", MANIFEST, PART])
def test_kill_9_while_mirroring_leaves_no_half_checkpoint(run, bucket, hangs_at):
    folder, store, proxy = run
    _, client, url = bucket
    with mirror_of(run, []):
        save(folder, 1)
    # Large enough for an upload in parts.
    path = save(folder, 2, data=b"large" * (20_000 if hangs_at == PART else 1))
    hung = threading.Event()

    def hang(method, path):
        if method == "PUT" and hangs_at in path and "step_00000002" in path:
            hung.set()
            return "hang"
        return None

    proxy.fail = hang
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(folder), url])
    assert hung.wait(30)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert names(store) == ["step_00000001"]
    # A machine that has nothing takes the one before it.
    elsewhere = folder.rename(folder.with_name("elsewhere"))
    assert [x.name for x in list_checkpoints(fetch_run(url) / "checkpoints")] == ["step_00000001"]
    shutil.rmtree(folder)
    elsewhere.rename(folder)
    proxy.fail = lambda *_: None
    with mirror_of(run, []):
        pass
    assert names(store) == ["step_00000002", "step_00000001"]
    assert get_bytes(store, f"checkpoints/{path.name}/{MANIFEST}") == (path / MANIFEST).read_bytes()
    if client is not None:
        assert "Uploads" not in client.list_multipart_uploads(Bucket=url.split("/")[2])


def test_a_damaged_part_is_skipped_as_a_local_one_is(run, bucket):
    folder, store, proxy = run
    _, _, url = bucket
    with mirror_of(run, []):
        for step in (1, 2):
            save(folder, step)
    key = "checkpoints/step_00000002/rank_00001.safetensors"
    put_bytes(store, key, get_bytes(store, key)[:-1] + b"?")
    shutil.rmtree(folder)
    messages = []
    assert fetch_run(url, log=messages.append) == folder
    paths = list_checkpoints(folder / "checkpoints")
    assert [bool(verify_checkpoint(path)) for path in paths] == [True, False]
    damage = "step_00000002 is damaged: rank_00001.safetensors does not match its sha256"
    assert [x for x in messages if damage in x]
    # It is not fetched again, until the bucket has another.
    del proxy.requests[:]
    fetch_run(url, log=messages.append)
    assert not [path for _, path in proxy.requests if path.endswith(".safetensors")]
    assert messages[-1].endswith("step_00000002 is damaged, as when it was fetched before")
    put_bytes(store, key, get_bytes(store, key)[:-1] + b"\x01")
    fetch_run(url, log=messages.append)
    assert verify_checkpoint(list_checkpoints(folder / "checkpoints")[0]) == []


def test_one_that_is_damaged_here_is_replaced_by_that_of_the_bucket(run, bucket):
    folder, _, _ = run
    _, _, url = bucket
    path = save(folder, 1)
    with mirror_of(run, []):
        pass
    (path / "rank_00000.safetensors").write_bytes(b"?")
    fetch_run(url)
    assert verify_checkpoint(path) == []
    (path / MANIFEST).unlink()
    fetch_run(url)
    assert verify_checkpoint(path) == []


def test_one_that_is_damaged_here_is_not_copied(run):
    folder, store, _ = run
    (save(folder, 1) / "rank_00000.safetensors").write_bytes(b"?")
    messages = []
    with mirror_of(run, messages):
        pass
    assert names(store) == []
    assert "is damaged and is not copied: rank_00000.safetensors has 1 bytes" in messages[0]


def test_the_newest_is_fetched_with_the_lines_and_the_id_of_the_run(run, bucket):
    folder, _, proxy = run
    _, _, url = bucket
    identity = get_run_id(folder)
    with mirror_of(run, []):
        for step in (1, 2):
            save(folder, step)
    shutil.rmtree(folder)
    assert fetch_run(url, "never") == folder
    assert not folder.exists()
    fetch_run(url)
    assert [path.name for path in list_checkpoints(folder / "checkpoints")] == ["step_00000002"]
    assert get_run_id(folder) == identity
    assert (folder / "metrics.jsonl").read_text() == '{"step":1}\n'
    # What is newer here is not replaced, and nothing is copied twice.
    save(folder, 3)
    (folder / "metrics.jsonl").write_text('{"step":3}\n')
    del proxy.requests[:]
    fetch_run(url)
    assert not [path for method, path in proxy.requests if "safetensors" in path]
    assert (folder / "metrics.jsonl").read_text() == '{"step":3}\n'


def test_a_checkpoint_is_resumed_from_by_its_url(run, bucket):
    folder, _, _ = run
    _, _, url = bucket
    with mirror_of(run, []):
        save(folder, 1)
    shutil.rmtree(folder)
    path = fetch_request(f"{url}/checkpoints/step_00000001")
    assert verify_checkpoint(path) == []
    with pytest.raises(ConfigError, match=f"there is no whole {url}.*step_00000009"):
        fetch_request(f"{url}/checkpoints/step_00000009")
    with pytest.raises(ConfigError, match="is no checkpoint"):
        fetch_request(Path(url))


def test_the_branch_that_a_run_has_left_is_set_aside(run):
    folder, store, _ = run
    with mirror_of(run, []):
        for step in (1, 2):
            save(folder, step)
    shutil.rmtree(folder / "checkpoints" / "step_00000002")  # `resume` has moved it
    messages = []
    with mirror_of(run, messages, sets_aside=True):
        wait_until(lambda: messages)
        save(folder, 2, data=b"others")
    assert f"{ASIDE}" in messages[0]
    assert names(store) == ["step_00000002", "step_00000001"]
    manifest = (folder / "checkpoints" / "step_00000002" / MANIFEST).read_bytes()
    assert get_bytes(store, f"checkpoints/step_00000002/{MANIFEST}") == manifest


def test_a_folder_of_another_run_is_refused(run, bucket):
    folder, _, _ = run
    _, _, url = bucket
    with mirror_of(run, []):
        pass
    (folder / "run.json").unlink()
    get_run_id(folder)
    with pytest.raises(ConfigError, match=f"and its folder {folder} the run .*: remove "):
        fetch_run(url)


def test_no_credentials_are_written(run):
    folder, _, proxy = run
    messages = []
    save(folder, 1)
    proxy.fail = lambda *_: (403, error_body("InvalidAccessKeyId", KEY))
    with mirror_of(run, messages, patience=1.0):
        pass
    texts = [*messages, *(x.read_bytes().decode() for x in folder.rglob("*") if x.is_file())]
    assert messages
    assert not [text for text in texts if KEY in text or SECRET in text]
    assert SECRET in os.environ.values()


def test_a_model_and_the_lines_of_a_run_are_taken_by_their_urls(run, bucket, tmp_path, capfd):
    folder, _, proxy = run
    _, _, url = bucket
    identity = get_run_id(folder)
    with mirror_of(run, []):
        save(folder, 1)
    shutil.rmtree(folder)
    assert fetch_lines(url).joinpath("metrics.jsonl").read_text() == '{"step":1}\n'
    assert not folder.exists()
    assert fetch_model(f"{url}/checkpoints/step_00000001").name == "step_00000001"
    assert fetch_model(Path(url)) == folder
    assert get_run_id(folder) == identity
    store = open_store(f"{url}/model")
    for name in ("config.json", "sub/a.safetensors"):
        put_bytes(store, name, b"{}")
    model = fetch_model(f"{url}/model")
    assert sorted(x.name for x in model.rglob("*.*")) == ["a.safetensors", "config.json"]
    assert find_initial_weights(f"{url}/model", run_dir=tmp_path / "new").source == model
    del proxy.requests[:]
    assert fetch_model(f"{url}/model") == model
    assert {method for method, _ in proxy.requests} == {"GET"}  # a list
    with pytest.raises(ConfigError, match="there is no run and no Hugging Face folder at"):
        fetch_model(f"{url}/model/sub")
    with pytest.raises(ConfigError, match="there is no run at"):
        fetch_lines(f"{url}/model")
    main(["diff", url, url])
    assert '"common": 0' in capfd.readouterr().out
    assert main(["checkpoint", "ls", url]) == 64
    assert "takes paths of this machine" in "".join(capfd.readouterr())


def test_a_failure_waits_longer_each_time_and_is_said_once_a_minute(run, monkeypatch):
    """With a clock of its own: the bucket is gone in the middle of a run, for three minutes."""
    folder, store, proxy = run
    now, waits, warned = [0.0], [], []
    mirror = mirrors.Mirror(
        folder=folder, store=store, log=lambda text: warned.append((now[0], text)), event=None
    )
    save(folder, 1)

    def wait(seconds):
        waits.append(seconds)
        now[0] += seconds
        if now[0] > 180:
            proxy.fail = lambda *_: None
        if now[0] > 250:
            mirror._closing.set()

    monkeypatch.setattr(mirrors.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(mirror._closing, "wait", wait)
    proxy.fail = lambda *_: (404, error_body("NoSuchBucket"))
    mirror._run()
    assert waits[:8] == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    (*failures, (_, recovered)) = warned
    assert [when for when, _ in failures] == [0.0, 63.0, 123.0]
    assert all("there is no bucket test-" in text for _, text in failures)
    assert recovered.endswith("has everything again")
    assert names(store) == ["step_00000001"]
