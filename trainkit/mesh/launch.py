"""Read the variables of a launcher: the rank, the world size and the rendezvous address.

Nothing is opened here: a wrong environment is named before any socket is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from importlib.metadata import version

import attrs

from trainkit.types import ConfigError


@attrs.frozen
class Launch:
    """The variables of a launcher: rank, world size, local rank and rendezvous address."""

    rank: int
    world: int
    local_rank: int
    address: str | None = None
    port: int | None = None


def _whole_number(env: Mapping[str, str], name: str, *, low: int, high: int | None = None) -> int:
    """Return an integer variable; raise ConfigError if it is missing or wrong."""
    text = env.get(name)
    rule = f"a whole number of at least {low}" + ("" if high is None else f" and below {high}")
    if text is None:
        raise ConfigError(
            f"parallel_session: {name} is not set, but other variables of the launcher are; it "
            f"must be {rule}",
            where=name,
            want=rule,
            hint="start with torchrun or srun, or unset RANK and WORLD_SIZE for one process",
        )
    # Not only int(), which takes "1_000" and digits of other scripts.
    if not re.fullmatch(r"[+-]?[0-9]+", text.strip()) or not low <= int(text) < (
        high or int(text) + 1
    ):
        raise ConfigError(
            f"parallel_session: {name} must be {rule}, got {text!r}",
            where=name,
            got=text,
            want=rule,
        )
    return int(text)


def launch_from_torchrun(env: Mapping[str, str]) -> Launch:
    """Read torchrun's variables: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT.

    Raises:
        ConfigError: One is missing, no number, or out of range; before any socket is opened.

    Examples:
        >>> launch_from_torchrun({"RANK": "0", "WORLD_SIZE": "1"})
        Launch(rank=0, world=1, local_rank=0, address=None, port=None)
    """
    world = _whole_number(env, "WORLD_SIZE", low=1)
    rank = _whole_number(env, "RANK", low=0, high=world)
    # Launchers other than torchrun may leave it out, mostly for a single host.
    local = _whole_number(env, "LOCAL_RANK", low=0) if "LOCAL_RANK" in env else rank
    if world == 1:
        return Launch(rank, world, local)
    if not env.get("MASTER_ADDR"):
        raise ConfigError("parallel_session: MASTER_ADDR is not set", where="MASTER_ADDR")
    port = _whole_number(env, "MASTER_PORT", low=1, high=65536)
    return Launch(rank, world, local, env["MASTER_ADDR"], port)


def launch_from_slurm(env: Mapping[str, str]) -> Launch:
    """Read SLURM's variables; the rendezvous is at the first host of the node list.

    The port follows from the job id (MASTER_PORT overrides it), so that all ranks compute the same
    one without communication, and two jobs on one host differ.

    Examples:
        >>> env = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1"}
        >>> env |= {"SLURM_JOB_NODELIST": "gpu[07-08,11]", "SLURM_JOB_ID": "41"}
        >>> launch_from_slurm(env)
        Launch(rank=5, world=8, local_rank=1, address='gpu07', port=15041)
    """
    world = _whole_number(env, "SLURM_NTASKS", low=1)
    rank = _whole_number(env, "SLURM_PROCID", low=0, high=world)
    local = _whole_number(env, "SLURM_LOCALID", low=0)
    if world == 1:
        return Launch(rank, world, local)
    # A step may run on fewer hosts than its job has.
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or ""
    # Up to the first comma outside of brackets: "gpu[07-08,11],cpu1" starts with "gpu[07-08,11]".
    first = re.match(r"(?:[^,\[\]]|\[[0-9]+[^\]]*\])+", nodes)
    if first is None:
        raise ConfigError(
            f"parallel_session: SLURM_JOB_NODELIST names no host, got {nodes!r}",
            where="SLURM_JOB_NODELIST",
            got=nodes,
        )
    if "MASTER_PORT" in env:
        port = _whole_number(env, "MASTER_PORT", low=1, high=65536)
    else:
        port = 15000 + _whole_number(env, "SLURM_JOB_ID", low=0) % 20000
    return Launch(rank, world, local, re.sub(r"\[([0-9]+)[^\]]*\]", r"\1", first[0]), port)


def read_launch(env: Mapping[str, str]) -> Launch:
    """Read torchrun's variables, or else SLURM's, or else return a single process.

    Examples:
        >>> read_launch({})
        Launch(rank=0, world=1, local_rank=0, address=None, port=None)
    """
    # torchrun first: under `srun torchrun` a task of SLURM is an agent, not a rank.
    if "RANK" in env or "WORLD_SIZE" in env:
        return launch_from_torchrun(env)
    if "SLURM_PROCID" in env:
        return launch_from_slurm(env)
    return Launch(0, 1, 0)


def describe_launch(env: Mapping[str, str]) -> list[str]:
    """Return notes about how this process was started, one sentence each.

    Torchrun's variables take precedence over SLURM's, and the two are never mixed. If they
    disagree, which is usual under `srun torchrun`, a note says which count.

    Examples:
        >>> describe_launch({"SLURM_PROCID": "0", "SLURM_RESTART_COUNT": "2"})
        ['SLURM has started this job again (SLURM_RESTART_COUNT=2)']
        >>> both = {"RANK": "3", "WORLD_SIZE": "8", "SLURM_PROCID": "1", "SLURM_NTASKS": "2"}
        >>> describe_launch(both)[0]
        'RANK=3 of WORLD_SIZE=8 counts; SLURM_PROCID=1 of SLURM_NTASKS=2 does not'
    """
    notes = []
    pairs = (("RANK", "SLURM_PROCID"), ("WORLD_SIZE", "SLURM_NTASKS"))
    if any(a in env and b in env and env[a].strip() != env[b].strip() for a, b in pairs):
        one, other = (
            f"{rank}={env.get(rank)} of {world}={env.get(world)}"
            for rank, world in zip(*pairs, strict=True)
        )
        notes.append(f"{one} counts; {other} does not")
    if env.get("SLURM_RESTART_COUNT", "0") != "0":
        count = env["SLURM_RESTART_COUNT"]
        notes.append(f"SLURM has started this job again (SLURM_RESTART_COUNT={count})")
    # torchrun passes on the signals of this list, and dies of others.
    handled = env.get("TORCHELASTIC_SIGNALS_TO_HANDLE", "").split(",")
    if "SLURM_JOB_ID" in env and "TORCHELASTIC_RUN_ID" in env and "SIGUSR1" not in handled:
        notes.append(
            "torchrun would die of a SIGUSR1 from SLURM and not pass it on; its processes would "
            "notice, save and end; to have it passed on, start torchrun with "
            "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
        )
    return notes


_version = cache(version)  # 10 ms for every session
_OLDEST_TORCH = (2, 11)  # the oldest release that trainkit is tested with


def check_torch_version() -> None:
    """Check that the installed torch is recent enough, before anything of it is used.

    Raises:
        ConfigError: It is older than the oldest release that trainkit is tested with.

    Examples:
        >>> check_torch_version()
    """
    found = _version("torch")
    # Of versions such as "2.13.0a0+cu130" only the first two numbers count.
    numbers = re.match(r"([0-9]+)\.([0-9]+)", found)
    if numbers is None or (int(numbers[1]), int(numbers[2])) < _OLDEST_TORCH:
        oldest = ".".join(map(str, _OLDEST_TORCH))
        raise ConfigError(
            f"check_torch_version: torch {found} is too old; trainkit needs {oldest} or newer, the "
            "oldest that its numbers are tested with",
            where="torch",
            got=found,
            want=f">= {oldest}",
            hint=f'pip install "torch>={oldest}"',
        )
