"""Every byte of a checkpoint is verified, and the command line does so without torch."""

import os
import random
import subprocess
import sys

import orjson
import pytest
import torch
from torch import nn

import trainkit as tk
from trainkit.types import DiskError
from trainkit.weights.checkpoint import list_checkpoints, verify_checkpoint
from trainkit.weights.checkpoint.manifest import dump_json, inspect_files, make_manifest, seal


@pytest.fixture
def run_dir(tmp_path):
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters())
    for step in (1, 2, 3):
        tk.save_checkpoint(
            tmp_path, tk.TrainState(step=step), [model], optimizer, tk.solo_parallel()
        )
    return tmp_path


@pytest.fixture
def checkpoint(run_dir):
    return list_checkpoints(run_dir / "checkpoints")[0]


def test_an_untouched_checkpoint_verifies(checkpoint):
    assert verify_checkpoint(checkpoint) == []


@pytest.mark.case("K3")
def test_every_flipped_bit_is_seen(checkpoint):
    seed = random.randrange(1 << 32)
    print("seed", seed)
    chance = random.Random(seed)
    for file in checkpoint.iterdir():
        good = file.read_bytes()
        for _ in range(40):
            place = chance.randrange(len(good) * 8)
            bad = bytearray(good)
            bad[place // 8] ^= 1 << place % 8
            file.write_bytes(bad)
            assert verify_checkpoint(checkpoint), (file.name, place)
        file.write_bytes(good)
    assert verify_checkpoint(checkpoint) == []


@pytest.mark.case("K3")
def test_control_sizes_alone_show_no_flipped_bit(checkpoint):
    file = checkpoint / "rank_00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")
    assert inspect_files(checkpoint)[0] == []
    assert verify_checkpoint(checkpoint) == ["rank_00000.safetensors does not match its sha256"]


def test_a_manifest_that_says_the_same_in_other_bytes_is_refused(checkpoint):
    file = checkpoint / "manifest.json"
    file.write_bytes(orjson.dumps(orjson.loads(file.read_bytes())))
    assert verify_checkpoint(checkpoint) == ["manifest.json is not written as trainkit writes it"]


@pytest.mark.case("K15")
def test_a_later_format_says_what_wrote_it(checkpoint):
    file = checkpoint / "manifest.json"
    body = orjson.loads(file.read_bytes()) | {"version": 3, "trainkit": "9.9"}
    del body["sha256"]
    file.write_bytes(dump_json(seal(body)))
    (problem,) = verify_checkpoint(checkpoint)
    assert "version 3, written by trainkit 9.9; this trainkit reads 1 and 2" in problem


@pytest.mark.case("K4")
def test_every_cut_missing_or_added_file_is_seen(checkpoint):
    for file in sorted(checkpoint.iterdir()):
        good = file.read_bytes()
        for size in (0, len(good) // 2, len(good) - 1):
            file.write_bytes(good[:size])
            assert verify_checkpoint(checkpoint)
        file.unlink()
        assert verify_checkpoint(checkpoint)
        file.write_bytes(good)
    (checkpoint / "extra.json").write_text("{}")
    assert verify_checkpoint(checkpoint) == ["extra.json is not in the manifest"]


def test_a_checkpoint_under_another_step_s_name_is_refused(checkpoint):
    moved = checkpoint.rename(checkpoint.with_name("step_00000009"))
    assert verify_checkpoint(moved) == ["step_00000009 holds step 3"]


@pytest.mark.case("K17")
def test_a_manifest_that_names_a_path_is_refused(checkpoint):
    (checkpoint / "manifest.json").write_bytes(
        make_manifest(3, {"../x": {"size": 0, "sha256": ""}})
    )
    assert "no plain file name" in verify_checkpoint(checkpoint)[0]


@pytest.mark.case("K17")
@pytest.mark.parametrize("kind", ["link", "hard link", "pipe", "device", "directory"])
@pytest.mark.parametrize("name", ["state.json", "manifest.json", "rank_00000.safetensors"])
def test_anything_but_a_plain_file_is_refused_and_not_read(checkpoint, tmp_path, kind, name):
    file, outside = checkpoint / name, tmp_path / "outside"
    file.rename(outside)
    {
        "link": lambda: file.symlink_to(outside),
        "hard link": lambda: file.hardlink_to(outside),
        "pipe": lambda: os.mkfifo(file),
        "device": lambda: file.symlink_to("/dev/zero"),
        "directory": file.mkdir,
    }[kind]()
    (problem,) = verify_checkpoint(checkpoint)
    assert name in problem
    wanted = "hard links" if kind == "hard link" else "no regular file"
    assert wanted in problem


@pytest.mark.case("K17")
def test_names_that_differ_by_case_alone_are_refused(checkpoint):
    entry = {"size": 0, "sha256": ""}
    made = make_manifest(3, {"state.json": entry, "STATE.json": entry})
    (checkpoint / "manifest.json").write_bytes(made)
    assert "upper and lower case" in verify_checkpoint(checkpoint)[0]


def bombs(folder):
    """Write files that take little to write and much memory to parse; return their paths."""
    texts = {
        "deep": b"[" * 100_000 + b"]" * 100_000,
        "many": b"{" + b",".join(b'"%d":0' % i for i in range(1_000_000)) + b"}",
        "lists": b"[" + b"[]," * 2_600_000 + b"0]",
    }
    for name, text in texts.items():
        (folder / name).write_bytes(text)
    with (folder / "sparse").open("wb") as file:
        file.truncate(1 << 30)
    return [folder / name for name in (*texts, "sparse")]


@pytest.mark.case("K18")
def test_bombs_are_refused_before_they_are_parsed(checkpoint, tmp_path):
    code = """
import os, sys, time
from pathlib import Path
from trainkit.weights.checkpoint.manifest import verify_checkpoint
from trainkit.weights.checkpoint.safe_files import read_json
from trainkit.types import CheckpointError
checkpoint = Path(sys.argv[1])
for bomb in sys.argv[2:]:
    begin = time.monotonic()
    if not bomb.endswith("many"):  # as an index: no more values than one may have
        try:
            read_json(Path(bomb))
            raise SystemExit(f"{bomb} was read")
        except CheckpointError:
            pass
    os.replace(bomb, checkpoint / "manifest.json")
    assert verify_checkpoint(checkpoint)
    assert time.monotonic() - begin < 10, bomb
status = Path("/proc/self/status").read_text()  # ru_maxrss begins at what the parent had
most = int(status.split("VmHWM:")[1].split()[0]) / 1024
assert most < 500, most
"""
    arguments = [sys.executable, "-c", code, str(checkpoint), *map(str, bombs(tmp_path))]
    done = subprocess.run(arguments, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_save_that_cannot_write_leaves_nothing_and_says_so(tmp_path):
    (tmp_path / "checkpoints").write_text("in the way")
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(DiskError, match="cannot write"):
        tk.save_checkpoint(tmp_path, tk.TrainState(), [model], optimizer, tk.solo_parallel())


def test_verifying_imports_no_torch(checkpoint):
    code = f"""
import sys
from trainkit.__main__ import main
code = main(["checkpoint", "verify", {str(checkpoint)!r}])
assert "torch" not in sys.modules
sys.exit(code)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
