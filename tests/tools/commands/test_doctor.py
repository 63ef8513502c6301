"""`python -m trainkit doctor`: facts of this machine, and each problem in a sentence."""

import copy
import json
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch

from trainkit.__main__ import main
from trainkit.run import device_health
from trainkit.tools.commands import doctor

ROOT = Path(__file__).parents[3]
GOOD = {
    "torch": "2.13.0+cu130",
    "cores": 8,
    "load": 4.0,
    "packages": {"nvidia-ml-py": "13.6"},
    "missing": {},
    "devices": {"cuda:0": {"name": "H100", "signs": []}},
    "backends": ["gloo", "nccl"],
    "compiler": "c++",
    "gib": {"memory": 64.0, "memory_free": 50.0, "shm": 8.0, "shm_free": 8.0, "disk_free": 90.0},
    "container": {"cores": None, "memory_gib": None},
    "limits": {"open_files": 65536, "processes": None, "memlock": None},
    "infiniband": True,
    "driver": "580.65.06",
}
NO_DEVICES = {"devices": {}, "torch": "2.13.0+cpu"}


def test_it_has_what_a_bug_report_needs(capsys):
    assert main(["doctor"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["torch"] == torch.__version__
    assert facts["packages"]["numba"] == metadata.version("numba")
    assert "gloo" in facts["backends"]
    assert facts["attention"]["plain"].startswith(("sdpa", "varlen"))
    assert facts["limits"]["open_files"] != 0
    assert facts["load"] >= 0
    assert 0 < facts["gib"]["memory_free"] <= facts["gib"]["memory"]
    assert facts["problems"] == doctor.find_problems(facts)


def test_it_fits_80_columns_of_a_terminal(capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TORCH_LOGS", "some words " * 30)
    monkeypatch.setattr(doctor, "find_problems", lambda _: ["this is wrong " * 20])
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert "what will hurt:" in lines
    assert any(line.split() == ["torch", torch.__version__] for line in lines)


def test_secrets_are_not_shown(capsys, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "a secret")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "a secret" not in out
    assert json.loads(out)["environment"]["NCCL_DEBUG"] == "INFO"


def test_a_good_machine_has_no_problem():
    assert doctor.find_problems(GOOD) == []


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"missing": {"recipes": ["tyro", "rich"]}}, "no recipe runs without tyro, rich"),
        ({"backends": ["nccl"]}, "no gloo"),
        ({"backends": ["gloo"]}, "no NCCL"),
        ({"compiler": None}, "no C++ compiler"),
        (NO_DEVICES, "torch 2.13.0+cpu is built for CPUs"),
        ({"devices": {}}, "torch 2.13.0+cu130 finds no GPU"),
        ({"packages": {}}, "not watched without nvidia-ml-py"),
        ({"devices": {"cuda:3": {"signs": ["it is hot"]}}}, "cuda:3: it is hot"),
        ({"gib": GOOD["gib"] | {"shm": 0.0625}}, "0.062 GiB in /dev/shm"),
        ({"gib": GOOD["gib"] | {"memory_free": 1.5}}, "only 1.5 GiB of memory"),
        ({"gib": GOOD["gib"] | {"disk_free": 0.5}}, "only 0.5 GiB of disk here"),
        ({"limits": GOOD["limits"] | {"open_files": 1024}}, "1024 files"),
        ({"limits": GOOD["limits"] | {"processes": 200}}, "200 processes"),
        ({"limits": GOOD["limits"] | {"memlock": 65536}}, "InfiniBand"),
        ({"load": 4.1}, "load of the last minute is 4.1 on 8 cores"),
        ({"container": {"cores": 1.5, "memory_gib": None}}, "has 1.5 of 8 cores"),
        ({"container": {"cores": None, "memory_gib": 16.0}}, "16 of 64 GiB of memory"),
    ],
)
def test_a_problem_is_one_sentence(change, sentence):
    [problem] = doctor.find_problems(copy.deepcopy(GOOD) | change)
    assert sentence in problem


def test_the_page_shows_a_problem_as_it_is_printed():
    page = ROOT / "docs" / "howto" / "when-it-does-not-start.md"
    problems = doctor.find_problems(GOOD | {"gib": GOOD["gib"] | {"shm": 0.0625}})
    shown = doctor.format_report({"torch": "2.13.0"}, problems).partition("\n\n")[2]
    assert f"```text\n{shown}\n```" in page.read_text()


def test_a_torch_that_is_too_old_is_a_problem(monkeypatch):
    monkeypatch.setattr("trainkit.mesh.launch._version", lambda _: "2.4.0")
    [problem] = doctor.find_problems(GOOD)
    assert "torch 2.4.0 is too old" in problem


def test_a_container_has_the_smallest_limit_of_the_groups_it_lies_in(tmp_path):
    inner = tmp_path / "cgroup" / "pod" / "container"
    inner.mkdir(parents=True)
    (inner / "cpu.max").write_text("max 100000\n")
    (inner / "memory.max").write_text(f"{8 * 2**30}\n")
    (inner.parent / "cpu.max").write_text("150000 100000\n")
    (inner.parent / "memory.max").write_text("max\n")
    (tmp_path / "cpu.max").write_text("1 100000\n")  # above the mount: no group
    own = tmp_path / "own"
    own.write_text("1:cpu:/other\n0::/pod/container\n")
    found = doctor.read_cgroup(tmp_path / "cgroup", own)
    assert found == {"cores": 1.5, "memory_gib": 8.0}


def test_a_gpu_has_its_health_and_one_that_fails_its_error(monkeypatch):
    def name(device):
        if device.index == 1:
            raise RuntimeError("CUDA error: device lost\nmore")
        return "H100"

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", name)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (2**30, 2**32))
    monkeypatch.setattr(device_health, "open_device", lambda _: ("nvml", "handle"))
    heat = device_health.Sign.HEAT
    monkeypatch.setattr(device_health, "read_device_signs", lambda *_: heat)
    devices = doctor._describe_devices()
    assert devices == {
        "cuda:0": {
            "name": "H100",
            "memory_gib": 4.0,
            "free_gib": 1.0,
            "signs": ["heat holds its clocks down"],
        },
        "cuda:1": {
            "name": None,
            "memory_gib": None,
            "free_gib": None,
            "signs": ["CUDA error: device lost"],
        },
    }


def test_a_first_gpu_that_fails_is_a_problem_and_the_rest_is_told(monkeypatch):
    failed = {"name": "H100", "memory_gib": None, "free_gib": None, "signs": ["CUDA error: lost"]}
    monkeypatch.setattr(doctor, "_describe_devices", lambda: {"cuda:0": failed})
    facts = doctor.gather_facts()
    assert facts["torch"] == torch.__version__
    assert "cuda:0: CUDA error: lost" in doctor.find_problems(facts)


def test_a_source_that_is_not_installed_has_no_requirements(monkeypatch):
    def not_installed(_):
        raise metadata.PackageNotFoundError

    monkeypatch.setattr(metadata, "requires", not_installed)
    assert doctor._list_missing() == {}
