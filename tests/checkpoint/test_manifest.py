"""Every byte of a checkpoint is checked; the command line says so without torch."""

import json
import random
import subprocess
import sys

import orjson
import pytest
import torch
from torch import nn

import trainkit as tk
from trainkit.__main__ import main
from trainkit.checkpoint import list_checkpoints, prune_checkpoints, verify_checkpoint
from trainkit.checkpoint.manifest import make_manifest
from trainkit.types import DiskError


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


def test_every_flipped_bit_is_seen(checkpoint):
    chance = random.Random(0)
    for file in checkpoint.iterdir():
        good = file.read_bytes()
        for _ in range(40):
            place = chance.randrange(len(good) * 8)
            bad = bytearray(good)
            bad[place // 8] ^= 1 << place % 8
            file.write_bytes(bad)
            # White space inside the manifest's JSON may change without changing what it says.
            same = file.name == "manifest.json" and _says(bad) == orjson.loads(good)
            assert same or verify_checkpoint(checkpoint), (file.name, place)
        file.write_bytes(good)
    assert verify_checkpoint(checkpoint) == []


def _says(data):
    try:
        return orjson.loads(bytes(data))
    except orjson.JSONDecodeError:
        return None


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


def test_a_manifest_that_names_a_path_is_refused(checkpoint):
    (checkpoint / "manifest.json").write_bytes(
        make_manifest(3, {"../x": {"size": 0, "sha256": ""}})
    )
    assert "no plain file name" in verify_checkpoint(checkpoint)[0]


def test_a_link_in_place_of_a_file_is_refused(checkpoint, tmp_path):
    state = checkpoint / "state.json"
    state.rename(tmp_path / "outside.json")
    state.symlink_to(tmp_path / "outside.json")
    assert verify_checkpoint(checkpoint) == ["state.json is no regular file"]


def test_pruning_keeps_the_newest_that_verify(run_dir):
    home = run_dir / "checkpoints"
    (home / "step_00000003/state.json").write_text("{}")
    would = prune_checkpoints(home, keep=1, dry_run=True)
    assert would == {"kept": ["step_00000002"], "deleted": ["step_00000003", "step_00000001"]}
    assert len(list_checkpoints(home)) == 3
    assert prune_checkpoints(home, keep=1) == would
    assert [path.name for path in list_checkpoints(home)] == ["step_00000002"]


def test_pruning_deletes_nothing_when_nothing_verifies(run_dir):
    for path in list_checkpoints(run_dir / "checkpoints"):
        (path / "state.json").write_text("{}")
    assert prune_checkpoints(run_dir / "checkpoints", keep=1)["deleted"] == []


def test_pruning_to_nothing_is_refused(run_dir):
    with pytest.raises(ValueError, match="keep must be at least 1"):
        prune_checkpoints(run_dir / "checkpoints", keep=0)


def test_a_save_that_cannot_write_leaves_nothing_and_says_so(tmp_path):
    (tmp_path / "checkpoints").write_text("in the way")
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(DiskError, match="could not be written"):
        tk.save_checkpoint(tmp_path, tk.TrainState(), [model], optimizer, tk.solo_parallel())


def test_the_command_line_lists_verifies_and_prunes(run_dir, checkpoint, capsysbinary):
    def said(*argv):
        code = main(["checkpoint", *map(str, argv)])
        return code, json.loads(capsysbinary.readouterr().out)

    code, rows = said("ls", run_dir)
    assert (code, [row["name"] for row in rows]) == (0, [f"step_0000000{i}" for i in (3, 2, 1)])
    assert said("verify", checkpoint)[0] == 0
    (checkpoint / "state.json").unlink()
    code, report = said("verify", checkpoint)
    assert (code, report["problems"]) == (66, ["state.json is missing"])
    assert said("prune", run_dir, "--keep", 1)[1]["kept"] == ["step_00000002"]
    assert said("ls", run_dir / "nowhere")[0] == 66
    assert said("prune", run_dir, "--keep", "some")[0] == 64


def test_verifying_imports_no_torch(checkpoint):
    code = f"""
import sys
from trainkit.__main__ import main
code = main(["checkpoint", "verify", {str(checkpoint)!r}])
assert "torch" not in sys.modules
sys.exit(code)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
