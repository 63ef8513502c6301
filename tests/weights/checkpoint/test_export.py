"""Exported weights: equal bits for every reader, complete or absent, every byte verified."""

import functools
import json
import os
import random
import resource
import shutil
import signal
from contextlib import suppress
from pathlib import Path

import orjson
import pytest
import safetensors.torch
import torch
from threads import run_threads
from torch import nn
from whole_step import Layout, run_steps

import trainkit as tk
from trainkit import files
from trainkit.tools.testing import RankError, run_ranks
from trainkit.types import CheckpointError, ConfigError, DiskError, Share
from trainkit.weights.checkpoint import export, reading, sources
from trainkit.weights.checkpoint import safe_files as plain
from trainkit.weights.checkpoint.export import (
    export_checkpoint,
    plan_shards,
    save_tensors,
    write_weights,
)
from trainkit.weights.checkpoint.manifest import dump_json, make_manifest, seal
from trainkit.weights.checkpoint.safe_files import hash_file
from trainkit.weights.checkpoint.sources import open_weights, verify_weights
from trainkit.weights.checkpoint.tensor_files import (
    Extent,
    Stored,
    contiguous_stride,
    safetensors_file,
)

FIXTURE = Path(__file__).parent / "fixtures/v1/step_00000003"


@pytest.fixture
def source(tmp_path):
    """Return a copy of a checkpoint of the first format, and its parameters."""
    path = tmp_path / "run/checkpoints" / FIXTURE.name
    shutil.copytree(FIXTURE, path)
    held = safetensors.torch.load_file(path / "rank_00000.safetensors")
    return path, {
        name.removeprefix("model/"): x for name, x in held.items() if name.startswith("model/")
    }


def whole(weights, name, x):
    return weights(name, tuple(x.shape), (0,) * x.dim())


def same_bits(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and a.numpy().tobytes() == b.numpy().tobytes()


def tree(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()} if folder.exists() else None


def siblings(folder):
    return sorted(path.name for path in folder.parent.iterdir())


# -------------------------------------------------------------------------------------- round trip


@pytest.mark.case("M10")
def test_what_was_exported_is_read_back_bit_for_bit(source, tmp_path):
    path, wanted = source
    folder = tmp_path / "weights"
    report = export_checkpoint(path, folder, shard_bytes=120)
    assert report["tensors"] == len(wanted)
    weights = open_weights(folder)
    for name, x in wanted.items():
        assert same_bits(whole(weights, name, x), x)
    rows = wanted["out.weight"]
    assert same_bits(weights("out.weight", (2, 3), (4, 1)), rows[4:6, 1:4].contiguous())
    index = json.loads((folder / "model.safetensors.index.json").read_bytes())
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in wanted.values())
    assert set(index["weight_map"]) == set(wanted)
    by_others = {}
    for file in set(index["weight_map"].values()):
        assert file.startswith("model-0000")
        by_others |= safetensors.torch.load_file(folder / file)
    assert all(same_bits(by_others[name], x) for name, x in wanted.items())


@pytest.mark.case("M10")
def test_without_the_hashes_a_flipped_bit_would_be_other_weights(source, tmp_path, monkeypatch):
    path, wanted = source
    folder = tmp_path / "weights"
    export_checkpoint(path, folder)
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-3] ^= 1
    (folder / "model.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"model.safetensors does not match its sha256"):
        open_weights(folder)
    monkeypatch.setattr(sources, "verify_weights", lambda *_, **__: [])
    weights = open_weights(folder)
    assert not all(same_bits(whole(weights, name, x), x) for name, x in wanted.items())


def test_a_small_model_is_one_file_that_hubs_know(source, tmp_path):
    path, wanted = source
    report = export_checkpoint(path.parents[1], tmp_path / "weights")  # a run: its newest
    assert report["files"] == ["model.safetensors"]
    with safetensors.safe_open(tmp_path / "weights/model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert set(file.keys()) == set(wanted)


def test_a_dtype_is_changed_for_floats_alone(tmp_path):
    tensors = {"w": torch.linspace(0, 1, 7), "b": torch.arange(3), "s": torch.tensor(2.0)}
    safetensors.torch.save_file(tensors, tmp_path / "a.safetensors")
    write_weights(safetensors_file(tmp_path / "a.safetensors"), tmp_path / "w", dtype="bfloat16")
    weights = open_weights(tmp_path / "w")
    assert same_bits(
        whole(weights, "w", tensors["w"]).view(torch.int16),
        tensors["w"].bfloat16().view(torch.int16),
    )
    assert same_bits(whole(weights, "b", tensors["b"]), tensors["b"])
    assert whole(weights, "s", tensors["s"]).dtype == torch.bfloat16
    with pytest.raises(ConfigError, match="dtype must be one of"):
        write_weights(safetensors_file(tmp_path / "a.safetensors"), tmp_path / "x", dtype="int8")


@pytest.mark.case("M10")
def test_a_checkpoint_of_two_ranks_is_exported_whole_and_built_from(tmp_path):
    layout = Layout(2, tp=2, vocab_size=32, dtype=torch.float32)
    save = functools.partial(run_steps, layout, steps=1, save_to=tmp_path / "run")
    wanted = run_ranks(save, 2)[0]["parameters"]
    export_checkpoint(tmp_path / "run", tmp_path / "w", shard_bytes=3000)
    weights = open_weights(tmp_path / "w", allow_extra=["**"])
    for name, x in wanted.items():
        assert whole(weights, name, torch.from_numpy(x)).numpy().tobytes() == x.tobytes(), name

    def make():
        return nn.ModuleDict({"embedding": nn.Embedding(*wanted["embedding.weight"].shape)})

    (stage,) = tk.build_stages(make, tk.solo_parallel(), [], weights=weights)
    found = stage["embedding"].weight.detach().numpy()
    assert found.tobytes() == wanted["embedding.weight"].tobytes()


def test_a_large_tensor_is_read_and_written_in_parts(tmp_path, monkeypatch):
    x = torch.arange(3 * 5 * 7, dtype=torch.float64).view(3, 5, 7)
    safetensors.torch.save_file({"x": x, "e": torch.zeros(0, 4)}, tmp_path / "a.safetensors")
    boxes = []
    read = reading.read_box
    monkeypatch.setattr(reading, "read_box", lambda s, *box: boxes.append(box) or read(s, *box))
    for chunk, parts in ((8 * 7 * 5 * 3, 1), (8 * 7 * 5, 3), (8 * 7 * 2, 9), (8 * 3, 45), (1, 105)):
        boxes.clear()
        monkeypatch.setattr(export, "_CHUNK", chunk)
        folder = tmp_path / f"w{chunk}"
        write_weights(safetensors_file(tmp_path / "a.safetensors"), folder)
        assert len(boxes) == parts
        assert same_bits(whole(open_weights(folder), "x", x), x)


def test_tensors_in_memory_become_a_folder_that_is_read_back_bit_for_bit(tmp_path):
    kinds = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool)
    tensors = {f"x.{kind}": torch.arange(24).reshape(2, 3, 4).to(kind) for kind in kinds}
    tensors |= {"turned": torch.arange(6.0).reshape(2, 3).t(), "number": torch.tensor(3.0)}
    tensors |= {"none": torch.zeros(0, 4), "learns": torch.nn.Parameter(torch.ones(3))}
    report = save_tensors(
        tensors, tmp_path / "w", shard_bytes=60, extra_files={"config.json": b"{}"}
    )
    assert report["tensors"] == len(tensors)
    assert verify_weights(tmp_path / "w") == []
    read = open_weights(tmp_path / "w")
    for name, x in tensors.items():
        found = whole(read, name, x)
        assert (found.dtype, found.shape) == (x.dtype, x.shape), name
        assert torch.equal(found.double(), x.detach().double()), name
    assert {*safetensors.torch.load_file(tmp_path / "w" / report["files"][0])} <= {*tensors}
    file = tmp_path / "w" / report["files"][0]
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    with pytest.raises(CheckpointError, match="does not verify"):
        open_weights(tmp_path / "w")
    with pytest.raises(ConfigError, match="exists already"):
        save_tensors(tensors, tmp_path / "w")
    save_tensors({"a": torch.ones(2, dtype=torch.float64)}, tmp_path / "w2", dtype="bfloat16")
    assert open_weights(tmp_path / "w2")("a", (2,), (0,)).dtype == torch.bfloat16


@pytest.mark.parametrize(
    "x",
    [torch.ones(2).to_sparse(), torch.ones(2, device="meta"), torch.ones(2, dtype=torch.complex64)],
    ids=["sparse", "meta", "complex"],
)
def test_tensors_that_no_file_holds_are_named(x, tmp_path):
    with pytest.raises(ConfigError, match=r"save_tensors: odd of .* cannot be written"):
        save_tensors({"odd": x, "plain": torch.ones(1)}, tmp_path / "w")
    assert not (tmp_path / "w").exists()


def test_files_are_filled_in_the_order_of_names():
    plan = plan_shards({"c": 1, "a": 3, "b": 3, "d": 9, "e": 1}, shard_bytes=4)
    assert list(plan.values()) == [("a",), ("b", "c"), ("d",), ("e",)]
    assert next(iter(plan)) == "model-00001-of-00004.safetensors"
    with pytest.raises(ValueError, match="shard_bytes must be at least 1"):
        plan_shards({}, shard_bytes=0)


# ------------------------------------------------------------------------------------ whole or not


def killed_at(source, folder, place):
    """Export in this process, and kill it at a place."""
    kill = functools.partial(os.kill, os.getpid(), signal.SIGKILL)
    appended, renamed, synced = (iter(range(1000)) for _ in range(3))
    append, sync, replace = plain.write_all, files.fsync_folder, Path.rename
    if place[0] == "rename":  # as where the disk cannot exchange two folders
        files.swap_paths = lambda *_: False

    def appending(*arguments):
        append(*arguments)
        if place == ("append", next(appended)):
            kill()

    def syncing(path):
        if place == ("sync", next(synced)):
            kill()
        sync(path)

    def renaming(self, target):
        if place == ("rename", next(renamed)):
            kill()
        return replace(self, target)

    plain.write_all, files.fsync_folder = appending, syncing
    Path.rename = renaming
    export_checkpoint(source, folder, overwrite=True, shard_bytes=100)


@pytest.mark.case("M9")
@pytest.mark.parametrize(
    "place",
    [("append", 0), ("append", 5), ("sync", 0), ("sync", 1), ("rename", 0), ("rename", 1)],
)
def test_an_export_that_is_killed_leaves_no_half_folder(place, source, tmp_path):
    path, _ = source
    folder = tmp_path / "out/weights"
    export_checkpoint(path, folder)
    old = tree(folder)
    with pytest.raises(RankError):
        run_ranks(functools.partial(killed_at, path, folder, place), 1)
    left = tree(folder)
    assert (left is None) == (place == ("rename", 1))  # the old one is next to it then
    # The second sync is that of the folder above, after the two have changed places.
    assert left is None or (left == old) == (place != ("sync", 1))
    assert left is None or verify_weights(folder) == []
    with suppress(ConfigError):
        export_checkpoint(path, folder)
    # Where there was none it is back, and nothing of the killed one is left.
    assert tree(folder) == (left or old)
    assert siblings(folder) == ["weights"]
    export_checkpoint(path, folder, overwrite=True, shard_bytes=100)
    assert verify_weights(folder) == []
    assert tree(folder) != old
    assert siblings(folder) == ["weights"]


def test_a_folder_is_never_missing_while_another_takes_its_place(source, tmp_path, monkeypatch):
    path, folder = source[0], tmp_path / "out/weights"
    export_checkpoint(path, folder)
    old, seen, sync = tree(folder), [], files.fsync_folder

    def syncing(path):
        seen.append(tree(folder))
        if len(seen) == 2 and fails:
            raise OSError(5, "Input/output error")
        sync(path)

    monkeypatch.setattr(files, "fsync_folder", syncing)
    for fails in (True, False):
        seen.clear()
        if fails:  # what is reported as failed is not there
            with pytest.raises(DiskError, match="Input/output error"):
                export_checkpoint(path, folder, overwrite=True, shard_bytes=100)
        else:
            export_checkpoint(path, folder, overwrite=True, shard_bytes=100)
        assert None not in seen
        assert (tree(folder) == old) == fails
        assert siblings(folder) == ["weights"]
    assert verify_weights(folder) == []


def test_a_folder_whose_successor_cannot_take_its_name_comes_back(source, tmp_path, monkeypatch):
    path, folder = source[0], tmp_path / "out/weights"
    export_checkpoint(path, folder)
    old, commit = tree(folder), files.commit_folder

    def commit_fails(_, path):
        assert not path.exists()  # the old one has stepped aside
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(files, "swap_paths", lambda *_: False)  # as on NFS
    monkeypatch.setattr(files, "commit_folder", commit_fails)
    with pytest.raises(DiskError, match="Input/output error"):
        export_checkpoint(path, folder, overwrite=True, shard_bytes=100)
    assert tree(folder) == old
    assert siblings(folder) == ["weights"]
    monkeypatch.setattr(files, "commit_folder", commit)
    export_checkpoint(path, folder, overwrite=True, shard_bytes=100)
    assert tree(folder) != old
    assert siblings(folder) == ["weights"]


@pytest.mark.case("M9")
def test_a_disk_that_is_full_at_any_byte_leaves_nothing(source, tmp_path):
    path, _ = source
    folder = tmp_path / "out/weights"
    export_checkpoint(path, folder, shard_bytes=100)
    largest = max(file.stat().st_size for file in folder.iterdir())
    shutil.rmtree(folder)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    for quota in sorted(random.Random(0).sample(range(largest), 20)):
        resource.setrlimit(resource.RLIMIT_FSIZE, (quota, before[1]))
        try:
            with pytest.raises(DiskError, match=r"export: cannot write .*weights"):
                export_checkpoint(path, folder, shard_bytes=100)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert siblings(folder) == []


@pytest.mark.case("M9")
def test_no_room_is_told_before_anything_is_written(source, tmp_path, monkeypatch):
    path, _ = source
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=100))
    with pytest.raises(DiskError, match=r"needs about \d+ bytes and 100 are free"):
        export_checkpoint(path, tmp_path / "out/weights")
    assert siblings(tmp_path / "out/weights") == []


@pytest.mark.case("M9")
def test_what_is_there_is_never_overwritten_unasked(source, tmp_path):
    path, _ = source
    folder = tmp_path / "weights"
    export_checkpoint(path, folder)
    old = tree(folder)
    with pytest.raises(ConfigError, match="exists already"):
        export_checkpoint(path, folder, shard_bytes=100)
    (folder / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"also holds 'config.json', which would be lost"):
        export_checkpoint(path, folder, overwrite=True)
    assert tree(folder) == old | {"config.json": b"{}"}
    assert verify_weights(folder) == []  # what others put there is theirs
    for other in ("file", "directory"):
        target = tmp_path / other
        target.write_text("mine") if other == "file" else target.mkdir()
        with pytest.raises(ConfigError, match="not a folder that an export wrote"):
            export_checkpoint(path, target, overwrite=True)
        assert target.exists()
    assert not list(tmp_path.glob(".*"))


def test_an_export_that_still_runs_keeps_its_folder(source, tmp_path):
    path, _ = source
    folder = tmp_path / "weights"
    with files.atomic_folder(folder, by="export") as staging:
        (staging / "mine").write_text("")
        files.recover_folder(folder)
        assert (staging / "mine").exists()
        shutil.copy(path / "manifest.json", staging)
    assert sorted(tree(folder)) == ["manifest.json", "mine"]


# ---------------------------------------------------------------------------------------- refusing


def test_a_damaged_checkpoint_is_not_exported(source, tmp_path):
    path, _ = source
    data = bytearray((path / "rank_00000.safetensors").read_bytes())
    data[-1] ^= 1
    (path / "rank_00000.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"rank_00000.safetensors does not match its sha256"):
        export_checkpoint(path, tmp_path / "weights")
    assert not (tmp_path / "weights").exists()


@pytest.mark.case("K17", "K18")
@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"file": "../outside.safetensors"}, "names a file that the manifest does not"),
        ({"file": "/etc/passwd"}, "names a file that the manifest does not"),
        ({"shape": [2**50, 4]}, "is not inside it"),
        ({"offset": [3, 0]}, "is not inside it"),
        ({"shape": [6, 4]}, "hold 24 of its 28 elements"),
        ({"file": "state.json"}, "state.json claims a header"),
    ],
)
def test_an_index_that_lies_is_refused_though_every_hash_is_right(change, match, source, tmp_path):
    path, _ = source
    index = orjson.loads((path / "index.json").read_bytes())
    index["tensors"]["model/out.weight"]["boxes"][0] |= change
    (path / "index.json").write_bytes(orjson.dumps(index))
    files = {file.name: hash_file(file) for file in path.iterdir() if file.name != "manifest.json"}
    (path / "manifest.json").write_bytes(make_manifest(3, files))
    with pytest.raises(CheckpointError, match=match):
        export_checkpoint(path, tmp_path / "weights")
    assert not (tmp_path / "weights").exists()


@pytest.mark.case("K3", "K4")
def test_every_damage_to_an_exported_folder_is_seen(source, tmp_path):
    path, _ = source
    folder = tmp_path / "weights"
    export_checkpoint(path, folder, shard_bytes=100)
    chance = random.Random(0)
    for file in sorted(folder.iterdir()):
        good = file.read_bytes()
        for _ in range(15):
            bad = bytearray(good)
            place = chance.randrange(len(good) * 8)
            bad[place // 8] ^= 1 << place % 8
            file.write_bytes(bad)
            said_the_same = file.name == "manifest.json" and _says(bad) == orjson.loads(good)
            assert said_the_same or verify_weights(folder), (file.name, place)
        file.write_bytes(good[:-1])
        assert verify_weights(folder)
        file.unlink()
        assert verify_weights(folder)
        file.write_bytes(good)
    assert verify_weights(folder) == []
    shutil.copy(folder / "model-00001-of-00003.safetensors", folder / "more.safetensors")
    assert verify_weights(folder) == ["more.safetensors is not in the manifest"]


def _says(data):
    with suppress(orjson.JSONDecodeError):
        return orjson.loads(bytes(data))


def forged(folder, files=None, **changed):
    """Write a sealed manifest into a folder, of the files that are there or of `files`."""
    held = files or {
        path.name: hash_file(path) for path in folder.iterdir() if path.name != "manifest.json"
    }
    body = {"format": "trainkit-weights", "version": 1, "files": held, "from": {}} | changed
    (folder / "manifest.json").write_bytes(dump_json(seal(body)))


def header_file(path, header, data=b""):
    text = orjson.dumps(header) if isinstance(header, dict) else header
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def entry(shape, begin, end, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.case("K17", "K18")
@pytest.mark.parametrize(
    ("header", "data", "match"),
    [
        ({"../../etc/x": entry([1], 0, 4)}, bytes(4), "odd name"),
        ({"a\0b": entry([1], 0, 4)}, bytes(4), "odd name"),
        ({"/etc/passwd": entry([1], 0, 4)}, bytes(4), "odd name"),
        ({"a": entry([2**60], 0, 4)}, bytes(4), "no tensor has"),
        ({"a": entry([2**30, 2**29], 0, 4)}, bytes(4), "its shape needs"),
        ({"a": entry([2**59, 0], 0, 4)}, bytes(4), "its shape needs"),
        ({"a": entry([1], 0, 4), "b": entry([1], 0, 4)}, bytes(4), "no tensor, or to two"),
        ({"a": entry([1], 4, 8)}, bytes(8), "no tensor, or to two"),
        ({"a": entry([1], 0, 4)}, bytes(5), "end after"),
        ({"a": entry([-1], 0, 4)}, bytes(4), "no tensor has"),
        ({"a": entry([1.0], 0, 4)}, bytes(4), "no tensor has"),
        ({"a": entry([1], 0, 4, "I7")}, bytes(4), "unknown dtype"),
        ({"a": 3}, b"", "says nothing of a"),
        (b"[" * 200_000, b"", "no good JSON"),
        (b"[1]", b"", "no table"),
        (b"\x80\x04cos\nsystem\n.", b"", "no good JSON"),
    ],
)
def test_a_safetensors_file_that_lies_is_refused(header, data, match, tmp_path):
    folder = tmp_path / "weights"
    folder.mkdir()
    header_file(folder / "model.safetensors", header, data)
    forged(folder)
    with pytest.raises(CheckpointError, match=match):
        open_weights(folder)


@pytest.mark.case("K18")
def test_a_header_that_claims_more_than_there_is_is_refused(tmp_path):
    path = tmp_path / "a.safetensors"
    for claimed in (2**63, 2**40, 100):
        path.write_bytes(claimed.to_bytes(8, "little") + b"{}")
        with pytest.raises(CheckpointError, match=r"claims a header of \d+ bytes"):
            safetensors_file(path)
    path.write_bytes(b"12")
    with pytest.raises(CheckpointError, match="no safetensors file"):
        safetensors_file(path)
    text = b"[" + b"[]," * 700_000 + b"1]"
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(CheckpointError, match=r"holds \d+ values"):
        safetensors_file(path)


@pytest.mark.case("K17")
def test_a_manifest_never_leads_out_of_its_folder(source, tmp_path):
    path, _ = source
    folder = tmp_path / "weights"
    export_checkpoint(path, folder)
    outside = tmp_path / "outside.safetensors"
    shutil.copy(folder / "model.safetensors", outside)
    hashed = hash_file(outside)
    for name in ("../outside.safetensors", str(outside), "a\0b", "", ".", "..", "con/x"):
        forged(folder, {name: hashed})
        assert "no plain file name" in verify_weights(folder)[0]
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to(outside)
    forged(folder, {"model.safetensors": hashed})
    assert "no regular file" in verify_weights(folder)[0]
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")
    assert "no regular file" in verify_weights(folder)[0]
    forged(folder, {"model.safetensors": hashed}, version=2)
    assert "has version 2" in verify_weights(folder)[0]
    (tmp_path / "link").symlink_to(folder)
    assert "is not a directory" in verify_weights(tmp_path / "link")[0]


def test_an_index_that_lists_other_tensors_is_refused(source, tmp_path):
    path, wanted = source
    folder = tmp_path / "weights"
    export_checkpoint(path, folder, shard_bytes=100)
    index = folder / "model.safetensors.index.json"
    record = orjson.loads(index.read_bytes())
    del record["weight_map"][next(iter(wanted))]
    index.write_bytes(orjson.dumps(record))
    forged(folder)
    with pytest.raises(CheckpointError, match="does not list the tensors that are there"):
        open_weights(folder)
    shutil.copy(folder / "model-00001-of-00003.safetensors", folder / "twice.safetensors")
    forged(folder)
    with pytest.raises(CheckpointError, match="in two files"):
        open_weights(folder)


def test_each_rank_hashes_its_share_and_all_refuse_alike(source, tmp_path):
    path, wanted = source
    folder = tmp_path / "weights"
    export_checkpoint(path, folder, shard_bytes=100)
    held = list(json.loads((folder / "manifest.json").read_bytes())["files"])
    assert len(held) == 4

    def read(axis):
        try:
            weights = open_weights(folder, axis=axis)
        except CheckpointError as error:
            return error.what
        return all(same_bits(whole(weights, name, x), x) for name, x in wanted.items())

    assert run_threads(read, 3) == [True] * 3
    last = folder / held[-1]
    data = bytearray(last.read_bytes())
    data[-1] ^= 1
    last.write_bytes(data)
    problems = run_threads(read, 3)
    assert len(set(problems)) == 1
    assert f"{last.name} does not match its sha256" in problems[0]
    shares = [verify_weights(folder, share=Share(rank, 3)) for rank in range(3)]
    assert sorted(map(len, shares)) == [0, 0, 1]


def test_weights_of_another_name_or_shape_are_refused(source, tmp_path):
    path, _ = source
    export_checkpoint(path, tmp_path / "weights")
    weights = open_weights(tmp_path / "weights")
    with pytest.raises(CheckpointError, match=r"there is no nothing; there are embedding.weight"):
        weights("nothing", (1,), (0,))
    for shape, offset in (((7, 5), (0, 0)), ((7, 4), (1, 0)), ((7,), (0,))):
        with pytest.raises(CheckpointError, match=r"out.weight has the shape \[7, 4\]"):
            weights("out.weight", shape, offset)


def test_no_tensors_are_no_folder(tmp_path):
    with pytest.raises(CheckpointError, match="would hold no tensor"):
        write_weights({}, tmp_path / "weights")
    extent = Extent(tmp_path / "gone", 0, 4, (0,), (1,), contiguous_stride((1,)))
    with pytest.raises(CheckpointError, match="gone cannot be read"):
        write_weights({"a": Stored("float32", (1,), (extent,))}, tmp_path / "weights")
    assert list(tmp_path.iterdir()) == []
