"""What docs/howto/launch.md says of the environment is what the code reads."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import attrs
import pytest
import torch
from rank_processes import free_port
from recipe_runs import error_of
from test_docs import blocks_of, problems_of_command

import trainkit as tk
from trainkit.mesh import launch, read_launch
from trainkit.mesh.launch import (
    Launch,
    check_torch_version,
    describe_launch,
    launch_from_slurm,
    launch_from_torchrun,
)
from trainkit.run import call_recipe
from trainkit.tools.testing import run_ranks
from trainkit.types import ConfigError

PAGE = (Path(__file__).parents[1] / "docs" / "howto" / "launch.md").read_text()
TORCHRUN = {
    "RANK": "9",
    "WORLD_SIZE": "16",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}
SLURM = {
    "SLURM_PROCID": "9",
    "SLURM_NTASKS": "16",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_JOB_NODELIST": "gpu[05-08]",
    "SLURM_JOB_ID": "123456",
    "MASTER_PORT": "29501",
}


class Watched(dict):
    """An environment that remembers which variables it was asked for."""

    def __init__(self, env):
        super().__init__(env)
        self.names = set()

    def __contains__(self, name):
        self.names.add(name)
        return super().__contains__(name)

    def __getitem__(self, name):
        self.names.add(name)
        return super().__getitem__(name)

    def get(self, name, default=None):
        self.names.add(name)
        return super().get(name, default)


def section(title):
    return re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)[1]


def named_in(title):
    """Return the variables in the first column of a section's table."""
    rows = re.findall(r"^\| (`.*?) \|", section(title), re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`(\w+)`", row)}


@pytest.mark.parametrize(
    ("title", "read", "env"),
    [
        ("Several machines", launch_from_torchrun, TORCHRUN),
        ("SLURM", launch_from_slurm, SLURM),
    ],
)
def test_the_page_names_the_variables_that_are_read_and_no_others(title, read, env):
    seen = [Watched(env), Watched({**env, "SLURM_STEP_NODELIST": ""})]
    seen.append(Watched({name: value for name, value in env.items() if name != "MASTER_PORT"}))
    for found in seen:
        if "SLURM_PROCID" in env or dict.__contains__(found, "MASTER_PORT"):
            read(found)
    assert set().union(*(found.names for found in seen)) == named_in(title) == set(env)


USUAL = Launch(rank=9, world=16, local_rank=1, address="gpu07", port=29501)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("SLURM_PROCID", "3", attrs.evolve(USUAL, rank=3)),
        ("SLURM_NTASKS", "32", attrs.evolve(USUAL, world=32)),
        ("SLURM_LOCALID", "3", attrs.evolve(USUAL, local_rank=3)),
        ("SLURM_STEP_NODELIST", "a1,b2", attrs.evolve(USUAL, address="a1")),
        ("SLURM_STEP_NODELIST", "c1-r[2-3]-n[04-05],d7", attrs.evolve(USUAL, address="c1-r2-n04")),
        ("SLURM_STEP_NODELIST", "r[2,4]n[08]x,d[1-2]", attrs.evolve(USUAL, address="r2n08x")),
        ("SLURM_STEP_NODELIST", None, attrs.evolve(USUAL, address="gpu05")),
        ("SLURM_JOB_NODELIST", "elsewhere", USUAL),
        ("SLURM_JOB_ID", "7", USUAL),
        ("MASTER_PORT", "1234", attrs.evolve(USUAL, port=1234)),
        ("MASTER_PORT", None, attrs.evolve(USUAL, port=15000 + 123456 % 20000)),
    ],
)
def test_each_variable_of_slurm_does_what_the_page_says(name, value, expected):
    env = {key: text for key, text in {**SLURM, name: value}.items() if text is not None}
    assert read_launch(env) == expected


@pytest.mark.parametrize("name", ["SLURM_NTASKS", "SLURM_LOCALID"])
def test_a_variable_of_slurm_that_is_missing_or_wrong_is_named(name):
    for env in ({k: v for k, v in SLURM.items() if k != name}, {**SLURM, name: "two"}):
        with pytest.raises(ConfigError, match=name):
            read_launch(env)
    with pytest.raises(ConfigError, match="SLURM_JOB_NODELIST names no host"):
        read_launch({**SLURM, "SLURM_STEP_NODELIST": "", "SLURM_JOB_NODELIST": ""})


def test_one_process_inside_an_allocation_is_one_process():
    assert read_launch({**SLURM, "RANK": "0", "WORLD_SIZE": "1"}) == Launch(0, 1, 0)


@pytest.mark.case("L1", "L2")
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("RANK", None),
        ("RANK", "abc"),
        ("RANK", ""),
        ("RANK", "1.0"),
        ("RANK", "-1"),
        ("RANK", "16"),
        ("RANK", "99"),
        ("WORLD_SIZE", None),
        ("WORLD_SIZE", "0"),
        ("WORLD_SIZE", "two"),
        ("WORLD_SIZE", "9"),
        ("LOCAL_RANK", "-1"),
        ("MASTER_ADDR", None),
        ("MASTER_ADDR", ""),
        ("MASTER_PORT", None),
        ("MASTER_PORT", "65536"),
        ("MASTER_PORT", "http"),
    ],
)
def test_a_variable_of_torchrun_that_is_missing_or_wrong_is_named(name, value, monkeypatch):
    env = {key: text for key, text in {**TORCHRUN, name: value}.items() if text is not None}
    monkeypatch.setattr(socket, "socket", lambda *_: pytest.fail("a socket was opened"))
    with pytest.raises(ConfigError) as refused:
        read_launch(env)
    named = "RANK" if (name, value) == ("WORLD_SIZE", "9") else name
    assert named in str(refused.value)
    assert refused.value.where == named
    assert repr(value) in str(refused.value) or named != name or not value


@pytest.mark.case("L8")
def test_torchrun_wins_over_slurm_and_says_so():
    both = {**SLURM, **TORCHRUN, "RANK": "3", "MASTER_PORT": "29502"}
    assert read_launch(both) == Launch(3, 16, 1, "node0", 29502)
    without = {name: text for name, text in both.items() if name != "LOCAL_RANK"}
    assert read_launch(without).local_rank == 3  # not SLURM_LOCALID
    (note,) = describe_launch(both)
    assert note.startswith("RANK=3 of WORLD_SIZE=16 counts; SLURM_PROCID=9 of SLURM_NTASKS=16")
    assert describe_launch({**SLURM, **TORCHRUN}) == []
    with pytest.raises(ConfigError, match="RANK"):  # a mix would be SLURM's rank
        read_launch({name: text for name, text in both.items() if name != "RANK"})


@pytest.mark.case("L9", "E8")
def test_a_job_that_slurm_has_started_again_is_told_of():
    assert "SLURM_RESTART_COUNT=1" in describe_launch({**SLURM, "SLURM_RESTART_COUNT": "1"})[0]
    for env in (SLURM, {**SLURM, "SLURM_RESTART_COUNT": "0"}, {}):
        assert describe_launch(env) == []


@pytest.mark.case("L10")
def test_a_torchrun_in_a_job_that_would_die_of_sigusr1_is_told_of():
    env = {"SLURM_JOB_ID": "7", "TORCHELASTIC_RUN_ID": "none"}
    usual = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
    (note,) = describe_launch(env | {"TORCHELASTIC_SIGNALS_TO_HANDLE": usual})
    assert f"--signals-to-handle={usual},SIGUSR1" in note
    assert describe_launch(env | {"TORCHELASTIC_SIGNALS_TO_HANDLE": f"{usual},SIGUSR1"}) == []
    assert describe_launch({"TORCHELASTIC_RUN_ID": "none"}) == []


@pytest.mark.case("L15")
@pytest.mark.parametrize("found", ["2.10.1", "2.9", "1.13.1+cu117", "nightly"])
def test_an_old_torch_is_refused(found, monkeypatch):
    monkeypatch.setattr(launch, "_version", {"torch": found}.get)
    with pytest.raises(ConfigError, match=r"2\.11"):
        check_torch_version()


@pytest.mark.case("L15")
def test_the_torch_that_is_here_is_recent_enough(monkeypatch):
    check_torch_version()
    for found in ("2.11.0", "2.13.0+cpu", "3.0.0a0+git12"):
        monkeypatch.setattr(launch, "_version", {"torch": found}.get)
        check_torch_version()


def as_slurm_would(port):
    """Open a session from SLURM's variables alone, on this rank of a group that is closed first."""
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    for name in TORCHRUN:
        os.environ.pop(name, None)
    os.environ.update(SLURM_PROCID=str(rank), SLURM_NTASKS=str(world), SLURM_LOCALID=str(rank))
    os.environ.update(SLURM_JOB_NODELIST="localhost", SLURM_JOB_ID="1", MASTER_PORT=str(port))
    with tk.parallel_session(dp_replicate=2) as ps:
        return ps.world.index, int(tk.all_sum(torch.tensor(rank + 1), ps.dp_replicate))


def test_two_processes_with_slurm_s_variables_meet():
    assert run_ranks(as_slurm_would, 2, free_port()) == [(0, 3), (1, 3)]


# ------------------------------------------------------------------------------------ snippets


def blocks(title):
    return {language: code for language, code, *_ in blocks_of(section(title))}


def test_the_script_for_sbatch_is_a_script_and_its_flags_exist():
    script = blocks("SLURM")["bash"]
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=True).returncode == 0
    (line,) = [line for line in script.splitlines() if line.startswith("srun ")]
    assert problems_of_command(line.removeprefix("srun ")) == []


LAUNCHER = Path(__file__).parents[1] / "docs" / "launch" / "ray_train.py"


def test_the_page_shows_ray_s_launcher_and_a_command_that_exists():
    assert blocks("Ray")["python"] == LAUNCHER.read_text()
    recipe = blocks("Ray")["sh"].split(" 16 ")[1]
    assert problems_of_command(f"python {recipe}") == []


@pytest.fixture
def call(monkeypatch, tmp_path):
    """Return `call_recipe` of a recipe that ends so, in a run directory with two steps."""
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.delitem(sys.modules, "recipe_of_ray", raising=False)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    recipe = tmp_path / "recipe_of_ray.py"

    def run(end, flag=f"--out={tmp_path}"):
        recipe.write_text(
            "from trainkit.types import *\nfrom trainkit.run.config import RunConfig as Config\n"
            f"def main(argv):\n  assert argv == [{flag!r}]\n  {end}\n"
        )
        return call_recipe(recipe, [flag])

    yield run
    sys.modules.pop("recipe_of_ray", None)


@pytest.mark.parametrize(("end", "code"), [("return 0", 0), ("return None", 0), ("return 75", 75)])
def test_a_supervisor_gets_the_exit_code_and_the_last_metrics_of_a_recipe(end, code, call):
    assert call(end) == (code, {"step": 2})


def test_a_recipe_without_a_run_directory_has_no_metrics(call):
    assert call("return 0", "--out=no/such/run") == (0, {})


@pytest.mark.parametrize(
    ("error", "code"),
    [
        ("ValueError", 64),
        ("DataError", 65),
        ("CheckpointError", 66),
        ("NumericsError", 67),
        ("PreemptedError", 76),
    ],
)
def test_an_error_that_a_next_start_would_meet_again_is_reported_and_not_raised(
    error, code, call, capfd
):
    assert call(f"raise {error}('no')") == (code, {})
    assert error_of(capfd.readouterr().err)["code"] == code


@pytest.mark.parametrize("error", ["PeerError", "DiskError", "ZeroDivisionError"])
def test_an_error_that_a_next_start_may_not_meet_is_raised(error, call):
    with pytest.raises(Exception, match="no"):
        call(f"raise {error}('no')")


# ------------------------------------------------------------------------------------ torch


def release(text):
    return tuple(map(int, re.match(r"(\d+)\.(\d+)", text).groups()))


def test_the_torch_that_is_allowed_is_the_torch_that_was_tested():
    """The bounds of pyproject.toml, of `check_torch_version`, .ci's pin, and the page's table."""
    root = Path(__file__).parents[1]
    bounds = re.search(r'"torch>=([\d.]+),<([\d.]+)"', (root / "pyproject.toml").read_text())
    least, below = map(release, bounds.groups())
    pinned = re.search(r"torch==([\d.]+)", (root / ".ci/constraints.txt").read_text())
    page = (root / "docs" / "torch-versions.md").read_text().splitlines()
    whole = [release(line[2:]) for line in page if line.startswith("| 2.") and "all tests" in line]
    assert least == launch._OLDEST_TORCH
    assert release(pinned[1]) in whole
    assert max(whole) == (below[0], below[1] - 1)
