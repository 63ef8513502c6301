"""Hostile checkpoints: nothing outside is read or written, and memory and time are bounded.

What the manifest's seal keeps out is no protection here:
anybody who can write a directory can seal it.
"""

import json
import os
import random
import time
from pathlib import Path

import attrs
import orjson
import pytest
import torch
from safetensors.torch import load_file, save_file
from weights.checkpoint.small import live, reseal, rewrite, same, small_run

import trainkit as tk
from trainkit.tools.testing import run_ranks
from trainkit.types import CheckpointError, Cursor
from trainkit.weights.checkpoint import reading, staging, verify_checkpoint
from trainkit.weights.checkpoint.boxes import find_index_problems, overlap
from trainkit.weights.checkpoint.load import load_checkpoint
from trainkit.weights.checkpoint.manifest import dump_json, seal

SHARD = "rank_00000.safetensors"
WEIGHT = "model/weight"


@pytest.fixture
def path(tmp_path):
    return tk.save_checkpoint(tmp_path, *small_run())


def refusal(path):
    """Return why a checkpoint is not loaded; the run must be as before."""
    _, stages, optimizer, _ = small_run(steps=2)
    before = live(stages, optimizer)
    with pytest.raises(CheckpointError) as error:
        load_checkpoint(path, stages, optimizer)
    assert same(before, live(stages, optimizer))
    return str(error.value)


# ------------------------------------------------------------------------------- traversal


def point_at(path, target):
    """Let the index and the manifest name a file by `target`."""

    def change(index):
        for entry in index["tensors"].values():
            for box in entry["boxes"]:
                box["file"] = target

    rewrite(path, "index.json", change)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"][target] = manifest["files"].pop(SHARD)
    del manifest["sha256"]
    (path / "manifest.json").write_bytes(dump_json(seal(manifest)))


TRAVERSALS = ["../outside", "/etc/passwd", "a/../../x", "..", "x\0y", ".hidden", "a\\..\\x", "~/x"]


@pytest.mark.case("K17")
@pytest.mark.parametrize("target", TRAVERSALS)
def test_a_name_that_leads_outside_is_refused_and_nothing_is_read_there(target, path):
    outside = path.parent / "outside"
    (path / SHARD).rename(outside)
    os.utime(outside, (1, 1))
    point_at_before = outside.stat()
    (path / SHARD).write_bytes(outside.read_bytes())
    os.utime(outside, (1, 1))
    point_at(path, target)
    (path / SHARD).unlink()
    assert "no plain file name" in refusal(path)
    assert outside.stat().st_atime == 1
    assert outside.stat().st_mtime == point_at_before.st_mtime


@pytest.mark.case("K17")
def test_an_index_may_name_only_files_of_the_manifest(path):
    def change(index):
        index["tensors"][WEIGHT]["boxes"][0]["file"] = "../outside"

    rewrite(path, "index.json", change)
    assert "names a file that the manifest does not" in refusal(path)


@pytest.mark.case("K17")
@pytest.mark.parametrize("kind", ["symlink", "hard link", "pipe", "device", "directory"])
@pytest.mark.parametrize("name", [SHARD, "index.json", "manifest.json"])
def test_what_is_no_plain_file_is_refused(kind, name, path):
    outside = path.parent / "outside"
    (path / name).rename(outside)
    if kind == "symlink":
        (path / name).symlink_to(outside)
    elif kind == "hard link":
        (path / name).hardlink_to(outside)
    elif kind == "pipe":
        os.mkfifo(path / name)
    elif kind == "device":
        (path / name).symlink_to("/dev/zero")
    else:
        (path / name).mkdir()
    began = time.monotonic()
    assert refusal(path)
    assert time.monotonic() - began < 10


@pytest.mark.case("K17")
def test_the_directory_may_be_no_link(path):
    (path.parent / "step_00000002").symlink_to(path)
    assert "is not a directory" in refusal(path.parent / "step_00000002")


@pytest.mark.case("K17")
def test_names_that_differ_by_case_alone_are_refused(path):
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"][SHARD.upper()] = manifest["files"][SHARD]
    (path / SHARD.upper()).write_bytes((path / SHARD).read_bytes())
    reseal(path)
    assert "upper and lower case" in refusal(path)


@pytest.mark.case("K17")
def test_without_the_check_of_names_the_outside_would_be_read(path, monkeypatch):
    """The negative control: only the check of names prevents reading outside."""
    outside = path.parent / "outside.safetensors"
    point_at(path, f"../{outside.name}")
    (path / SHARD).rename(outside)
    monkeypatch.setattr("trainkit.weights.checkpoint.manifest.is_plain_file_name", lambda _: True)
    _, stages, optimizer, _ = small_run(steps=2)
    assert load_checkpoint(path, stages, optimizer).step == 1


# ------------------------------------------------------------------------------- lies in the index


def tensors(**changes):
    box = {"file": "f", "offset": [0, 0], "shape": [2, 3]}
    return {"tensors": {"model/w": {"dtype": "float32", "shape": [2, 3], "boxes": [box]} | changes}}


def boxes(*parts):
    return [
        {"file": f"f{i}", "offset": list(offset), "shape": list(shape)}
        for i, (offset, shape) in enumerate(parts)
    ]


FILES = {"f": 1000, **{f"f{i}": 1000 for i in range(9)}}


@pytest.mark.case("K18", "X8")
@pytest.mark.parametrize(
    ("index", "word"),
    [
        ([], "is not an index"),
        ({"tensors": {"../../etc/x": {}}}, "is named"),
        ({"tensors": {"model/": {}}}, "is named"),
        (tensors(dtype="object"), "no checkpoint holds"),
        (tensors(shape=[2**60, 3]), "no valid shape"),
        (tensors(shape=[2**40, 2**40]), "no valid shape"),
        (tensors(shape=[-2, 3]), "no valid shape"),
        (tensors(shape=[2.0, 3]), "no valid shape"),
        (tensors(shape=[True, 3]), "no valid shape"),
        (tensors(boxes=[]), "hold 0 of its 6"),
        (tensors(boxes=boxes(((0, 0), (1, 3)))), "hold 3 of its 6"),
        (tensors(boxes=boxes(((0, 0), (2, 3)), ((0, 0), (2, 3)))), "overlap"),
        (tensors(boxes=boxes(((0, 0), (2, 2)), ((1, 1), (1, 2)))), "overlap"),
        (tensors(boxes=boxes(((1, 0), (2, 3)))), "not inside it"),
        (tensors(boxes=boxes(((0, 0), (0, 3)), ((0, 0), (2, 3)))), "not inside it"),
        (tensors(boxes=boxes(((0,), (2, 3)))), "not inside it"),
        (tensors(boxes=[None]), "not inside it"),
        (tensors(shape=[2**20, 2**20], boxes=boxes(((0, 0), (2**20, 2**20)))), "too few"),
    ],
)
def test_an_index_that_lies_is_refused(index, word):
    assert word in find_index_problems(index, FILES)[0]


@pytest.mark.case("X8")
def test_boxes_of_any_grid_are_the_whole():
    grid = [((r, c), (min(2, 5 - r), min(3, 7 - c))) for r in (0, 2, 4) for c in (0, 3, 6)]
    assert find_index_problems(tensors(shape=[5, 7], boxes=boxes(*grid)), FILES) == []
    assert find_index_problems(tensors(shape=[], boxes=boxes(((), ()))), FILES) == []
    assert find_index_problems(tensors(shape=[0, 4], boxes=[]), FILES) == []


@pytest.mark.case("X8")
def test_two_boxes_meet_where_they_share_elements():
    whole = torch.arange(30).reshape(5, 6)
    saved, wanted = whole[1:4, 2:6], torch.zeros(4, 3, dtype=torch.int64)  # at (1, 2), (0, 1)
    here, there = overlap((1, 2), (3, 4), (0, 1), (4, 3))
    wanted[there] = saved[here]
    assert torch.equal(wanted[1:, 1:], whole[1:4, 2:4])
    assert not wanted[0].any()


@pytest.mark.case("K18")
def test_many_irregular_boxes_are_refused_at_once():
    """No straight cut divides a pinwheel; comparing n of them in pairs takes n squared steps."""
    wheel = [
        ((0, 0), (1, 2)),
        ((0, 2), (2, 1)),
        ((2, 1), (1, 2)),
        ((1, 0), (2, 1)),
        ((1, 1), (1, 1)),
    ]
    began = time.monotonic()
    entry = tensors(shape=[3, 3], boxes=boxes(*wheel))
    assert "overlap" in find_index_problems(entry, FILES)[0]
    stairs = [((i, i), (1, 1)) for i in range(3000)]
    files = {f"f{i}": 9 for i in range(3000)}
    assert (
        "hold 3000 of"
        in find_index_problems(tensors(shape=[3000, 3000], boxes=boxes(*stairs)), files)[0]
    )
    assert time.monotonic() - began < 10


@pytest.mark.case("K18")
@pytest.mark.parametrize("part", ["state", "optimizer", "facts"])
@pytest.mark.parametrize("value", [None, 3, [], {"step": "x"}, {"step": -1}])
def test_a_state_of_another_form_is_refused(part, value, path):
    if part == "facts" and isinstance(value, dict):
        value = [value]  # any table may be a run's facts
    rewrite(path, "state.json", lambda state: state.__setitem__(part, value))
    assert "state.json is not the state of a run" in refusal(path)


@pytest.mark.case("K18")
def test_a_cursor_that_no_run_comes_to_is_refused(path):
    rewrite(path, "state.json", lambda state: state["state"]["cursor"].__setitem__("batch", 2**62))
    assert "state.json is not the state of a run" in refusal(path)


@pytest.mark.case("K18", "F9")
def test_a_stream_of_many_numbers_is_refused_at_once_and_never_saved(path, tmp_path):
    numbers = list(range(100_000))
    change = lambda state: state["state"]["cursor"].__setitem__("stream", numbers)  # noqa: E731
    rewrite(path, "state.json", change)
    began = time.monotonic()
    assert "state.json is not the state of a run" in refusal(path)
    state, *rest = small_run()
    with pytest.raises(ValueError, match="has 100000 numbers of a stream"):
        tk.save_checkpoint(tmp_path, attrs.evolve(state, cursor=Cursor(1, tuple(numbers))), *rest)
    assert time.monotonic() - began < 2


@pytest.mark.case("K18")
@pytest.mark.parametrize("value", ["1", None, -1, -0.5, True, [1], 3])
def test_a_scalar_that_the_optimizer_never_has_is_refused(value, path):
    def change(state):
        state["optimizer"]["scalars"]["weight"]["step"] = value

    rewrite(path, "state.json", change)
    assert "the optimizer's step of weight is" in refusal(path)


class Counting(torch.optim.SGD):
    """An optimizer with state that is not tensors: numbers and a text."""

    def step(self):
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                known = self.state[p]
                known |= {"count": known.get("count", 0) + 1, "trend": -0.5, "kind": "a"}


@pytest.mark.parametrize(
    ("name", "value"), [("count", "1"), ("count", -1), ("trend", None), ("kind", 3), ("new", "x")]
)
def test_other_scalars_are_what_the_optimizer_makes_of_them(name, value, tmp_path):
    model = small_run()[1][0]
    optimizer = Counting(model.parameters(), lr=0.1)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    run = [model], optimizer
    path = tk.save_checkpoint(tmp_path, tk.TrainState(1), *run, tk.solo_parallel())
    load_checkpoint(path, *run)
    assert optimizer.state[model.bias] == {"count": 1, "trend": -0.5, "kind": "a"}
    rewrite(path, "state.json", lambda s: s["optimizer"]["scalars"]["bias"].update({name: value}))
    with pytest.raises(CheckpointError, match=f"the optimizer's {name} of bias"):
        load_checkpoint(path, *run)


@pytest.mark.case("K4")
def test_a_state_of_another_step_is_refused(path):
    rewrite(path, "state.json", lambda state: state["state"].__setitem__("step", 7))
    assert "state.json is of step 7, manifest.json of 1" in refusal(path)


@pytest.mark.case("M1", "K18")
@pytest.mark.parametrize(
    "kind", ["relabelled", "header too long", "no header", "another shape", "lost"]
)
def test_a_shard_that_says_other_than_the_index_is_refused(kind, path):
    file = path / SHARD
    data = bytearray(file.read_bytes())
    if kind == "relabelled":
        data[:] = data.replace(b'"F32"', b'"I32"')
    elif kind == "header too long":
        data[:8] = (2**62).to_bytes(8, "little")
    elif kind == "no header":
        data[8:20] = bytes(12)
    elif kind == "another shape":
        data[:] = data.replace(b"[2,3]", b"[3,2]")
    if kind == "lost":
        held = load_file(file)
        del held[WEIGHT]
        save_file(held, file)
    else:
        file.write_bytes(data)
    reseal(path)
    assert SHARD in refusal(path)


@pytest.mark.case("K18")
def test_without_the_index_checked_a_lie_would_load(path, monkeypatch):
    """The negative control: without its boxes a tensor has the values that were in memory."""

    def change(index):
        index["tensors"][WEIGHT]["shape"] = [2, 3]
        index["tensors"][WEIGHT]["boxes"] = []

    rewrite(path, "index.json", change)
    monkeypatch.setattr(staging, "find_index_problems", lambda *_: [])
    _, stages, optimizer, _ = small_run(steps=2)
    assert load_checkpoint(path, stages, optimizer).step == 1  # with a weight that nobody wrote
    assert reading.read_tensors(path, {}, {}, [], tk.types.Share(0, 1)) == []


# ------------------------------------------------------------------------------- bombs


def bomb(path, kind):
    """Turn a checkpoint into one that needs more memory than the machine has."""
    many = 10_000_000
    if kind == "manifest of 1 GB":
        with (path / "manifest.json").open("r+b") as file:
            file.truncate(10**9)
    elif kind == "many values in the manifest":
        (path / "manifest.json").write_bytes(b"[" + b"[]," * (many // 10) + b"0]")
    elif kind in ("many values in the index", "many values in the state"):
        name = f"{kind.rsplit(' ', maxsplit=1)[-1]}.json"
        (path / name).write_bytes(b"[" + b"[]," * many + b"0]")
        reseal(path)
    elif kind == "deep nesting":
        (path / "state.json").write_bytes(b"[" * 100_000 + b"]" * 100_000)
        reseal(path)
    elif kind == "a tensor of 2**60":
        rewrite(path, "index.json", lambda i: i["tensors"][WEIGHT].update(shape=[2**60, 1]))
    elif kind == "a moment of 2**38":  # it is not of the model, so nothing in the run bounds it
        shape = [2**38]
        box = {"file": SHARD, "offset": [0], "shape": shape}
        entry = {"dtype": "float32", "shape": shape, "boxes": [box]}
        rewrite(path, "index.json", lambda i: i["tensors"].update({"optimizer/x/weight": entry}))
    else:
        with (path / SHARD).open("r+b") as file:
            file.truncate(2**40)  # sparse: hashing it would take ten minutes
        manifest = json.loads((path / "manifest.json").read_text())
        manifest["files"][SHARD]["size"] = 2**40
        del manifest["sha256"]
        (path / "manifest.json").write_bytes(dump_json(seal(manifest)))


BOMBS = [
    "manifest of 1 GB",
    "many values in the manifest",
    "many values in the index",
    "many values in the state",
    "deep nesting",
    "a tensor of 2**60",
    "a moment of 2**38",
    "a shard of 1 TB",
]


def most_memory():
    """Return the peak memory of this process in megabytes: ru_maxrss counts its parent's too."""
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) // 1024


def load_bombs(good, paths):
    """Return the CPU seconds and the error of each bomb, and the peak memory before and after."""
    load_checkpoint(good, *small_run()[1:3])
    before, found = most_memory(), []
    for path in paths:
        began = time.process_time()
        with pytest.raises(CheckpointError) as error:
            load_checkpoint(path, *small_run()[1:3])
        found.append((time.process_time() - began, str(error.value)))
    return found, before, most_memory()


@pytest.mark.case("K18")
def test_bombs_do_not_go_off(tmp_path):
    """All in one separate process, whose peak memory is read at the end."""
    paths = [tk.save_checkpoint(tmp_path / kind, *small_run()) for kind in BOMBS]
    for path, kind in zip(paths, BOMBS, strict=True):
        bomb(path, kind)
    good = tk.save_checkpoint(tmp_path / "good", *small_run())
    found, before, most = run_ranks(load_bombs, 1, good, paths)[0]
    print(found, before, most)
    assert all(seconds < 2 for seconds, _ in found), found
    assert most - before < 200  # MB; torch with CUDA takes more than 500 by itself
    assert most < max(500, before + 100)


@pytest.mark.case("K18")
def test_verifying_a_bomb_is_bounded_too(path):
    bomb(path, "many values in the manifest")
    began = time.process_time()
    assert verify_checkpoint(path)
    assert time.process_time() - began < 2


ODD = (None, -1, 2**63, "x", [], {}, [None], {"a": None}, [[1]])


def places(value, path=()):
    """Return the path to every value inside a JSON value."""
    inner = enumerate(value) if isinstance(value, list) else ()
    yield path
    for key, one in value.items() if isinstance(value, dict) else inner:
        yield from places(one, (*path, key))


def put(value, path, new):
    """Return a copy of a JSON value with another value at one path."""
    if not path:
        return new
    copy = value.copy()
    copy[path[0]] = put(value[path[0]], path[1:], new)
    return copy


def deep(levels):
    return [deep(levels - 1)] if levels else 1


@pytest.mark.case("K18", "K3")
@pytest.mark.parametrize("name", ["state.json", "index.json", "manifest.json"])
def test_whatever_the_json_says_it_is_refused_or_loaded_and_never_a_crash(name, path):
    """Sealed files with a wrong value at any one path: whatever is loaded can be saved again."""
    state, stages, optimizer, ps = small_run()
    files = {file.name: file.read_bytes() for file in path.iterdir()}
    record = json.loads(files[name])
    record.pop("sha256", None)
    chance = random.Random(1)
    hurts = [put(record, place, odd) for place in places(record) for odd in ODD if place]
    hurts = [*ODD, deep(100), {**record, "a": deep(300)}, *chance.sample(hurts, 60)]
    for hurt in hurts:
        for file, data in files.items():
            (path / file).write_bytes(data)
        if name == "manifest.json":
            shallow = isinstance(hurt, dict) and "a" not in hurt
            (path / name).write_bytes(
                dump_json(seal(hurt)) if shallow else json.dumps(hurt).encode()
            )
        else:
            (path / name).write_text(json.dumps(hurt))
            reseal(path)
        before = live(stages, optimizer)
        try:
            state = load_checkpoint(path, stages, optimizer)
        except CheckpointError:
            assert same(before, live(stages, optimizer))
        else:
            tk.state_hash(state, stages, optimizer, ps)
            orjson.dumps(attrs.asdict(state))
