"""`python -m trainkit checkpoint`: what it prints, how it exits, what it never imports."""

import json
import os
import pkgutil
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import attrs
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import trainkit as tk
from trainkit.__main__ import main
from trainkit.run.config import read_config
from trainkit.types import CheckpointError, ConfigError
from trainkit.weights.checkpoint import list_checkpoints, manifest
from trainkit.weights.checkpoint.describe import describe_checkpoint
from trainkit.weights.checkpoint.diff import diff_checkpoints
from trainkit.weights.checkpoint.manifest import make_manifest
from trainkit.weights.checkpoint.retention import remove_checkpoint
from trainkit.weights.checkpoint.safe_files import hash_file, write_durably
from trainkit.weights.checkpoint.sources import open_weights
from trainkit.weights.convert import foreign, pickled

DAMAGED = 66


def save(run_dir, steps, *, scale=1.0, lr=0.1):
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    with torch.no_grad():
        model.weight *= scale
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.9 + lr / 10))
    for step in steps:
        tk.save_checkpoint(
            run_dir,
            tk.TrainState(step=step, tokens=10 * step),
            [model],
            optimizer,
            tk.solo_parallel(),
            facts={"seed": lr},
        )
    return run_dir


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return save(tmp_path_factory.mktemp("run"), range(1, 6))


@pytest.fixture
def run_dir(saved, tmp_path):
    return Path(shutil.copytree(saved, tmp_path / "run"))


@pytest.fixture
def run(capsysbinary):
    def call(*argv):
        code = main(["checkpoint", *map(str, argv)])
        return code, json.loads(capsysbinary.readouterr().out)

    return call


def damage(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


# ---------------------------------------------------------------------------------------- looking


def test_a_listing_is_quick_or_thorough(run_dir, run):
    code, rows = run("ls", run_dir)
    assert code == 0
    assert [row["step"] for row in rows] == [5, 4, 3, 2, 1]
    assert all(row["complete"] and not row["problems"] and "ok" not in row for row in rows)
    assert rows[0]["bytes"] > 0
    assert abs(rows[0]["saved"] - time.time()) < 3600
    newest = run_dir / "checkpoints/step_00000005"
    damage(newest / "rank_00000.safetensors")
    (newest.with_name("step_00000004") / "state.json").unlink()
    code, rows = run("ls", run_dir / "checkpoints")
    assert [row["complete"] for row in rows] == [True, False, True, True, True]
    assert rows[1]["problems"] == ["state.json is missing"]
    code, rows = run("ls", run_dir, "--verify")
    assert (code, [row["ok"] for row in rows]) == (DAMAGED, [False, False, True, True, True])
    assert run("ls", run_dir / "nowhere")[0] == DAMAGED


def test_what_is_no_checkpoint_is_listed_as_such(tmp_path, run):
    home = tmp_path / "checkpoints"
    for name in ("step_00000001", "step_00000002", "step_00000003", "step_00000004"):
        (home / name).mkdir(parents=True)
    (home / "step_00000002/manifest.json").write_text("[" * 100_000)
    (home / "step_00000003/manifest.json").write_text('{"files": 3}')
    (home / "step_00000004/manifest.json").symlink_to("/dev/zero")
    _, rows = run("ls", tmp_path)
    assert [row["complete"] for row in rows] == [False] * 4
    assert all(row["problems"] for row in rows)


@pytest.mark.case("F9")
def test_two_thousand_checkpoints_are_listed_with_a_few_looks_at_each(tmp_path, asked_of_the_disk):
    home = tmp_path / "checkpoints"
    home.mkdir()
    whole = home / "step_00000000"
    whole.mkdir()
    for name in ("rank_00000.safetensors", "index.json", "state.json"):
        write_durably(whole / name, [b"{}"])
    files = {path.name: hash_file(path) for path in whole.iterdir()}
    write_durably(whole / "manifest.json", [make_manifest(0, files)])
    for step in range(1, 2_000):
        (home / f"step_{step:08d}").mkdir()
    asked_of_the_disk.clear()
    paths = list_checkpoints(home)
    assert len(paths) == 2_000
    assert asked_of_the_disk.total() <= 4  # by their names alone
    asked_of_the_disk.clear()
    assert describe_checkpoint(whole)["complete"]
    assert asked_of_the_disk.total() <= 20
    asked_of_the_disk.clear()
    assert not any(describe_checkpoint(path)["complete"] for path in paths[:100])
    assert asked_of_the_disk.total() <= 10 * 100


def test_verify_takes_one_or_all_of_a_run(run_dir, run):
    path = run_dir / "checkpoints/step_00000003"
    assert run("verify", path) == (0, {"checkpoint": str(path), "ok": True, "problems": []})
    code, reports = run("verify", run_dir)
    assert (code, len(reports)) == (0, 5)
    damage(path / "index.json")
    code, report = run("verify", path)
    assert (code, report["problems"]) == (DAMAGED, ["index.json does not match its sha256"])
    code, reports = run("verify", run_dir / "checkpoints")
    assert code == DAMAGED
    assert [report["ok"] for report in reports] == [True, True, False, True, True]
    assert run("verify", run_dir / "nowhere")[0] == DAMAGED


# ------------------------------------------------------------------------------------------- diff


def test_diff_reports_the_differences_of_two_checkpoints(run_dir, tmp_path, run):
    a = run_dir / "checkpoints/step_00000003"
    code, report = run("diff", a, a)
    assert (code, report["same"], report["bytes"]) == (0, True, True)
    code, report = run("diff", a, a.with_name("step_00000005"))
    assert (code, report["same"], report["bytes"]) == (1, False, True)
    assert report["state"] == {"step": [3, 5], "tokens": [30, 50]}
    other = save(tmp_path / "other", [3], scale=1.5, lr=0.2)
    code, report = run("diff", a, other)
    assert (code, report["same"], report["bytes"]) == (1, False, False)
    assert report["facts"] == {"seed": [0.1, 0.2]}
    assert report["optimizer"] == {"options": report["optimizer"]["options"]}
    assert report["tensors"] == {"only_a": [], "only_b": [], "dtype_or_shape": {}}
    code, report = run("diff", a, other, "--values")
    assert list(report["values"]) == ["model/weight"]
    difference = report["values"]["model/weight"]
    assert difference["relative"] == pytest.approx(1 / 3)
    assert difference["max_abs"] == pytest.approx(difference["max_b"] / 3)
    assert difference["unequal"] == 6


def test_diff_of_a_pruned_checkpoint_lists_the_existing_ones(run_dir, run):
    a = run_dir / "checkpoints/step_00000003"
    there = [path.name for path in list_checkpoints(a.parent) if path != a]
    shutil.rmtree(a)
    for pair in ((a, a.with_name(there[0])), (a.with_name(there[0]), a)):
        code, report = run("diff", *pair)
        assert code == 66
        assert f"there is no step_00000003 in {a.parent} (any more); there are" in report["error"]
        assert all(name in report["error"] for name in there)
        assert "step_00000003.pin" in report["hint"]
    with pytest.raises(CheckpointError, match="there is no step_00000003 in"):
        diff_checkpoints(a, a.with_name(there[0]))


def test_diff_names_tensors_of_one_side_and_of_other_shapes(tmp_path, run):
    for name, model in (("a", nn.Linear(3, 2)), ("b", nn.Linear(3, 4, bias=False))):
        optimizer = torch.optim.SGD(model.parameters())
        tk.save_checkpoint(tmp_path / name, tk.TrainState(), [model], optimizer, tk.solo_parallel())
    code, report = run("diff", tmp_path / "a", tmp_path / "b", "--values")
    assert code == 1
    assert report["tensors"] == {
        "only_a": ["model/bias"],
        "only_b": [],
        "dtype_or_shape": {"model/weight": [["float32", [2, 3]], ["float32", [4, 3]]]},
    }
    damage(next((tmp_path / "a").rglob("rank_*")))
    assert run("diff", tmp_path / "a", tmp_path / "b")[0] == DAMAGED


def test_numbers_that_are_not_finite_are_reported(tmp_path, run):
    for name, value in (("a", float("nan")), ("b", 1.0)):
        path = Path(shutil.copytree(save(tmp_path / name, [1]), tmp_path / f"{name}2"))
        path = path / "checkpoints/step_00000001"
        file = path / "rank_00000.safetensors"
        tensors = load_file(file)
        tensors["model/weight"][0, 0] = value
        save_file(tensors, file)
        reseal(path)
    code, report = run("diff", tmp_path / "a2", tmp_path / "b2", "--values")
    assert code == 1
    assert report["values"]["model/weight"]["max_abs"] is None
    assert report["values"]["model/weight"]["unequal"] == 1


def reseal(path):
    files = {file.name: hash_file(file) for file in path.iterdir() if file.name != "manifest.json"}
    (path / "manifest.json").write_bytes(make_manifest(1, files))


def test_what_retention_deletes_meanwhile_is_not_damaged(run_dir, run, monkeypatch):
    home, doomed = run_dir / "checkpoints", run_dir / "checkpoints/step_00000002"
    real = manifest.read_manifest

    def read_manifest(path, **form):
        found = real(path, **form)
        if Path(path) == doomed:
            remove_checkpoint(doomed)
        return found

    monkeypatch.setattr(manifest, "read_manifest", read_manifest)
    code, rows = run("verify", run_dir)
    assert (code, [row["ok"] for row in rows]) == (0, [True, True, True, None, True])
    assert "was deleted after it was listed" in rows[3]["problems"][0]
    doomed = home / "step_00000001"
    code, row = run("verify", doomed)
    assert (code, row["ok"]) == (66, None)
    assert "was deleted after" in row["problems"][0]
    code, row = run("verify", doomed)
    assert (code, row["problems"]) == (66, [f"{doomed} does not exist"])


# ------------------------------------------------------------------------------------------- prune


@pytest.mark.case("K11")
def test_prune_does_what_its_dry_run_lists(run_dir, run):
    home = run_dir / "checkpoints"
    damage(home / "step_00000003/rank_00000.safetensors")
    flags = ("--keep", 2, "--every", 2)
    code, would = run("prune", run_dir, *flags, "--dry-run")
    assert code == 0
    assert would["deleted"] == ["step_00000003", "step_00000001"]
    pin = home / "step_00000001.pin"
    pin.touch()
    assert [row["pinned"] for row in run("ls", run_dir)[1]] == [False] * 4 + [True]
    assert run("prune", run_dir, *flags, "--dry-run")[1]["deleted"] == ["step_00000003"]
    pin.unlink()
    assert len(list_checkpoints(home)) == 5
    assert run("prune", run_dir, *flags) == (code, would)
    names = [path.name for path in list_checkpoints(home)]
    assert names == would["kept"] == ["step_00000005", "step_00000004", "step_00000002"]
    code, report = run("prune", run_dir, "--keep", 1)
    assert code == 64
    assert "at least 2" in report["error"]
    for path in list_checkpoints(home):
        damage(path / "rank_00000.safetensors")
    code, report = run("prune", run_dir, "--keep", 2)
    assert (code, report["deleted"]) == (DAMAGED, [])
    assert run("prune", run_dir, "--keep", "some")[0] == 64


# ----------------------------------------------------------------------------- export and convert


def test_export_and_convert_report_what_they_wrote(run_dir, tmp_path, run, monkeypatch):
    # Pickles are read in this process: to start one takes seconds, and test_convert.py does it.
    monkeypatch.setattr(foreign, "_read_pickles", pickled.describe)
    code, report = run("export", run_dir, tmp_path / "w", "--dtype", "bfloat16")
    assert code == 0
    assert report["from"]["checkpoint"] == "step_00000005"
    assert open_weights(tmp_path / "w")("weight", (2, 3), (0, 0)).dtype == torch.bfloat16
    assert run("verify", tmp_path / "w")[0] == 0
    code, report = run("export", run_dir, tmp_path / "w")
    assert code == 64
    assert "--overwrite" in report["hint"]
    assert run("export", run_dir, tmp_path / "w", "--overwrite")[0] == 0
    damage(tmp_path / "w/model.safetensors")
    assert run("verify", tmp_path / "w")[0] == DAMAGED
    torch.save({"model": {"a": torch.ones(3)}, "epoch": 1}, tmp_path / "a.pt")
    code, report = run("convert", tmp_path / "a.pt", tmp_path / "c", "--prefix", "model.")
    assert (code, report["tensors"], report["skipped"]) == (0, 1, ["epoch"])
    (tmp_path / "a.pt").write_bytes(b"cos\nsystem\n.")
    code, report = run("convert", tmp_path / "a.pt", tmp_path / "d")
    assert code == DAMAGED
    assert "a.pt" in report["error"]


@pytest.mark.case("K19")
def test_what_others_may_write_is_warned_of_or_refused(run_dir, tmp_path, capsys):
    path = run_dir / "checkpoints/step_00000003"
    path.chmod(0o777)
    assert main(["checkpoint", "verify", str(path)]) == 0
    assert "can be written by everybody" in capsys.readouterr().err
    assert main(["checkpoint", "verify", str(path), "--strict-owner"]) == DAMAGED
    assert "--strict-owner rejects" in json.loads(capsys.readouterr().out)["error"]
    for action in ("export", "convert"):
        argv = ["checkpoint", action, str(path), str(tmp_path / "w"), "--strict-owner"]
        assert main(argv) == DAMAGED
    path.chmod(0o755)
    if os.geteuid() == 0:
        os.chown(path / "index.json", 12345, -1)
        capsys.readouterr()
        assert main(["checkpoint", "verify", str(path)]) == 0
        assert "belongs to user 12345" in capsys.readouterr().err


# --------------------------------------------------------------------------------- imports and help


def test_looking_comparing_and_deleting_import_no_torch(run_dir, tmp_path):
    code = f"""
import sys
from trainkit.__main__ import main
a, b = {str(run_dir)!r}, {str(run_dir / "checkpoints/step_00000003")!r}
for argv in (
    ["ls", a], ["ls", a, "--verify"], ["verify", b], ["diff", a, b],
    ["prune", a, "--keep", "3"], ["export", a, {str(run_dir)!r}],
    ["convert", {str(tmp_path / "nothing")!r}, {str(tmp_path / "out")!r}],
):
    main(["checkpoint", *argv])
    assert "torch" not in sys.modules, argv
"""
    ended = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr


def test_the_help_teaches(capsys):
    for argv in (["-h"], *([name, "-h"] for name in ("ls", "verify", "diff", "prune", "export"))):
        with pytest.raises(SystemExit) as end:
            main(["checkpoint", *argv])
        assert end.value.code == 0
        text = capsys.readouterr().out
        assert "%(" not in text
    with pytest.raises(SystemExit):
        main(["checkpoint", "--help"])
    text = capsys.readouterr().out
    for action in ("ls", "verify", "diff", "prune", "export", "convert"):
        assert f"python -m trainkit checkpoint {action}" in text
    assert "66" in text


# ---------------------------------------------------------------------------------- configuration


@attrs.frozen
class Small:
    steps: int = 1
    out: str = "out"


TARGET = '_target_ = "os.system"\nargs = ["touch MARKER"]'


@pytest.mark.case("G11")
@pytest.mark.parametrize(
    "text",
    [
        TARGET,
        f"[steps]\n{TARGET}",
        'steps = "!!python/object/apply:os.system [touch MARKER]"',
        "steps = !!python/object/apply:os.system [touch MARKER]",
        "steps = \"${eval:__import__('os').system('touch MARKER')}\"",
    ],
)
def test_a_configuration_runs_no_code(text, tmp_path):
    marker = tmp_path / "executed"
    path = tmp_path / "config.toml"
    path.write_text(text.replace("MARKER", str(marker)))
    with pytest.raises(ConfigError):
        read_config(Small, path)
    assert not marker.exists()


@pytest.mark.case("G11")
def test_a_value_is_what_it_says_and_is_never_looked_up(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text('out = "${oc.env:HOME}"')
    assert read_config(Small, path).out == "${oc.env:HOME}"
    # The control: a reader that imports what a file names, as others do, runs the first of them.
    marker = tmp_path / "executed"
    table = tomllib.loads(TARGET.replace("MARKER", str(marker)))
    pkgutil.resolve_name(table["_target_"])(*table["args"])
    assert marker.exists()
