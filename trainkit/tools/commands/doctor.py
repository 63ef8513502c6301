"""`python -m trainkit doctor`: what this machine has, and what of it will hurt.

For a report of a bug, and before a first run:

  python -m trainkit doctor
  python -m trainkit doctor --json > doctor.json

It prints versions, cores and their load in the last minute, devices with their health,
communication backends, memory, /dev/shm, limits of the shell and of the container, the attention
kernels that a model would get, and at the end each problem in a sentence. It names neither host nor
user; variables of NCCL and torch, which it shows, may hold paths.

Exit code 0, also where there are problems.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import re
import resource
import shutil
import sys
import textwrap
from importlib import metadata
from pathlib import Path
from typing import Any

from trainkit.files import find_recipes, read_version
from trainkit.types import ConfigError

HELP = "what a bug report needs: versions, devices, limits, and what will hurt"

_WIDTH = 80  # columns
_GIB = 2**30
_CGROUP = Path("/sys/fs/cgroup")
_PACKAGE = Path(__file__).parents[2]
_DEVELOPMENT = {"test", "dev", "docs", "peers"}  # extras that no run needs
_LIMITS = {"open_files": "NOFILE", "processes": "NPROC", "memlock": "MEMLOCK"}
# Variables that change what is computed, or how ranks meet. Others may hold secrets.
_VARIABLES = re.compile(r"(CUDA_VISIBLE_DEVICES|OMP_NUM_THREADS|(NCCL|GLOO|TORCH|PYTORCH)_\w+)")


def add(doctor: argparse.ArgumentParser) -> None:
    """Add the command's flag to its parser."""
    doctor.add_argument("--json", action="store_true", help="print JSON on a terminal too")


def run(options: argparse.Namespace) -> tuple[Any, int]:
    """Return text for a terminal, a record elsewhere, and the exit code 0."""
    facts = gather_facts()
    problems = find_problems(facts)
    if options.json or not sys.stdout.isatty():
        return facts | {"problems": problems}, 0
    return format_report(facts, problems), 0


def gather_facts() -> dict[str, Any]:
    """Return what a bug report needs, as plain values; sizes are in GiB.

    Effects:
        Opens a context on every GPU.
    """
    import torch  # noqa: PLC0415 -- slow

    from trainkit.run.inventory import (  # noqa: PLC0415 -- torch
        describe_rank,
        read_driver_version,
    )

    devices = _describe_devices()
    # A GPU that has failed has no memory here, and would fail again.
    sound = [name for name, device in devices.items() if device["memory_gib"] is not None]
    where = torch.device(next(iter(sound), "cpu"))
    host = describe_rank(0, where)
    processor = host.get("processor", host["device"])
    shm = shutil.disk_usage("/dev/shm") if Path("/dev/shm").is_dir() else None  # noqa: S108
    return {
        "trainkit": read_version(),
        # Not the path, which may name a person.
        "installed": "from a checkout" if find_recipes().parent != _PACKAGE else "as a wheel",
        "python": host["python"],
        "torch": host["torch"],
        **{name: host[name] for name in ("cuda", "nccl") if name in host},
        "driver": read_driver_version(),
        "system": platform.platform(),
        "packages": _list_packages(),
        "missing": _list_missing(),
        "processor": processor,
        "cores": host["cores"],
        "load": round(os.getloadavg()[0], 1),
        "devices": devices,
        "backends": _list_backends(),
        "attention": _describe_attention(where),
        "compiler": next(filter(shutil.which, ("c++", "g++", "clang++")), None),
        "gib": {
            "memory": _to_gib(host["memory"]),
            "memory_free": _read_free_memory(),
            "shm": None if shm is None else _to_gib(shm.total),
            "shm_free": None if shm is None else _to_gib(shm.free),
            "disk_free": _to_gib(shutil.disk_usage(".").free),
        },
        "container": read_cgroup(),
        "limits": {name: read_limit(kind) for name, kind in _LIMITS.items()},
        "infiniband": Path("/sys/class/infiniband").is_dir(),
        "environment": {
            name: value for name, value in sorted(os.environ.items()) if _VARIABLES.fullmatch(name)
        },
    }


def find_problems(facts: dict[str, Any]) -> list[str]:
    """Return a sentence for each fact that will stop a run, slow it down or make it fail later.

    Args:
        facts: As `gather_facts` returns them.
    """
    return [
        *_find_missing_software(facts),
        *_find_device_problems(facts),
        *_find_low_limits(facts),
    ]


def _find_missing_software(facts: dict[str, Any]) -> list[str]:
    from trainkit.mesh.launch import check_torch_version  # noqa: PLC0415 -- torch

    found = list[str]()
    try:
        check_torch_version()
    except ConfigError as error:
        found.append(error.what)
    if "recipes" in facts["missing"]:
        names = ", ".join(facts["missing"]["recipes"])
        found.append(f'no recipe runs without {names}: pip install "trainkit-lm[recipes]"')
    if "gloo" not in facts["backends"]:
        found.append("this torch has no gloo: several ranks cannot work together on CPUs")
    if facts["compiler"] is None:
        found.append("there is no C++ compiler: --compile fails on CPUs (apt install g++)")
    return found


def _find_device_problems(facts: dict[str, Any]) -> list[str]:
    found = list[str]()
    devices: dict[str, Any] = facts["devices"]
    if not devices and facts["driver"] is not None:
        build = "is built for CPUs" if "+cpu" in facts["torch"] else "finds no GPU"
        found.append(
            f"there is an NVIDIA driver, but torch {facts['torch']} {build}: runs use the CPU; "
            "compare the driver with the CUDA version of torch, and look at CUDA_VISIBLE_DEVICES"
        )
    if devices and "nccl" not in facts["backends"]:
        found.append("this torch has no NCCL: several GPUs cannot work together")
    if devices and "nvidia-ml-py" not in facts["packages"]:
        found.append(
            "the health of GPUs is not watched without nvidia-ml-py: "
            'pip install "trainkit-lm[nvml]"'
        )
    found += [f"{name}: {sign}" for name, device in devices.items() for sign in device["signs"]]
    return found


def _find_low_limits(facts: dict[str, Any]) -> list[str]:
    found = list[str]()
    gib, limits, container = facts["gib"], facts["limits"], facts["container"]
    # 64 MiB is what containers get that ask for nothing else.
    if gib["shm"] is not None and gib["shm"] < 1:
        found.append(
            f"there are {gib['shm']:.2g} GiB in /dev/shm: NCCL passes data between the GPUs "
            "of a host through it; mount more (docker run --shm-size=8g)"
        )
    if _is_below(limits["open_files"], 4096):
        found.append(
            f"a process may open {limits['open_files']} files: prepare and many ranks need more "
            "(ulimit -n 65536)"
        )
    if _is_below(limits["processes"], 4096):
        found.append(
            f"the user may start {limits['processes']} processes and threads, and each rank starts "
            "dozens (ulimit -u)"
        )
    if facts["infiniband"] and _is_below(limits["memlock"], _GIB):
        found.append(
            "there is InfiniBand, whose buffers must be locked in memory, and the limit is "
            f"{limits['memlock']} bytes (ulimit -l unlimited)"
        )
    cores = container["cores"]
    if cores is not None and facts["cores"] is not None and cores < facts["cores"]:
        found.append(
            f"the container has {cores:g} of {facts['cores']} cores: more threads than that wait "
            f"for one another (OMP_NUM_THREADS={max(1, int(cores))})"
        )
    if facts["cores"] is not None and facts["load"] > facts["cores"] / 2:
        found.append(
            f"the load of the last minute is {facts['load']:g} on {facts['cores']} cores: other "
            "processes share them, so that steps take longer and times vary"
        )
    limit = container["memory_gib"]
    if limit is not None and gib["memory"] is not None and limit < gib["memory"]:
        found.append(
            f"the container has {limit:.3g} of {gib['memory']:.3g} GiB of memory: beyond it, ranks "
            "are killed without a message"
        )
    for name, what in (("memory_free", "memory"), ("disk_free", "disk here")):
        if gib[name] is not None and gib[name] < 2:
            found.append(f"only {gib[name]:.2g} GiB of {what} are free")
    return found


def format_report(facts: dict[str, Any], problems: list[str]) -> str:
    """Return facts and problems as text of at most 80 columns."""
    from trainkit.tools.commands.text import as_text  # noqa: PLC0415 -- slow

    shown = {name: value for name, value in facts.items() if value not in (None, {}, [])}
    lines = as_text(shown).splitlines()
    # Names are padded to one width, and two spaces follow.
    margin = max(len(line.partition("  ")[0]) for line in lines) + 2
    report = [textwrap.fill(line, _WIDTH, subsequent_indent=" " * margin) for line in lines]
    report += ["", "what will hurt:" if problems else "nothing found that will hurt"]
    report += [
        textwrap.fill(problem, _WIDTH, initial_indent="- ", subsequent_indent="  ")
        for problem in problems
    ]
    return "\n".join(report)


def read_limit(kind: str) -> int | None:
    """Return a soft limit of this process, None where it is unlimited.

    Args:
        kind: Its name in `resource`, without RLIMIT_.

    Examples:
        >>> read_limit("NOFILE") != 0
        True
    """
    soft, _ = resource.getrlimit(getattr(resource, f"RLIMIT_{kind}"))
    return None if soft == resource.RLIM_INFINITY else soft


def read_cgroup(
    root: Path = _CGROUP, own: Path = Path("/proc/self/cgroup")
) -> dict[str, float | None]:
    """Return the cores and the memory (GiB) that control groups (version 2) leave this process.

    Args:
        root: Where they are mounted, another folder in tests.
        own: The file that names the group of this process.

    Examples:
        >>> read_cgroup(Path("/does/not/exist"))
        {'cores': None, 'memory_gib': None}
    """
    cores, memory = list[float](), list[float]()
    name = ""
    with contextlib.suppress(OSError):
        found = re.search(r"^0::/(.*)$", own.read_text(), re.MULTILINE)
        name = found[1] if found else ""
    group = root / name
    # A group has the limits of those that it lies in, too.
    for folder in (group, *group.parents):
        with contextlib.suppress(OSError, ValueError):
            quota, period = (folder / "cpu.max").read_text().split()
            cores.append(int(quota) / int(period))  # ValueError: "max"
        with contextlib.suppress(OSError, ValueError):
            memory.append(int((folder / "memory.max").read_text()) / _GIB)
        if folder == root:
            break
    return {"cores": min(cores, default=None), "memory_gib": min(memory, default=None)}


def _is_below(limit: int | None, enough: int) -> bool:
    return limit is not None and limit < enough


def _to_gib(size: int | None) -> float | None:
    return None if size is None else round(size / _GIB, 3)


def _read_free_memory() -> float | None:
    with contextlib.suppress(OSError):
        found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
        return _to_gib(int(found[1]) * 1024) if found else None
    return None


def _list_requirements() -> list[tuple[str, str | None]]:
    """Return (package, its extra) of what runs may need; [] if trainkit is not installed."""
    try:
        lines = metadata.requires("trainkit-lm") or []
    except metadata.PackageNotFoundError:
        return []
    found = []
    for line in lines:
        name = re.match(r"[\w.-]+", line)
        extra = re.search(r"""extra == ["']([\w-]+)["']""", line)
        if name is not None and (extra is None or extra[1] not in _DEVELOPMENT):
            found.append((name[0], extra[1] if extra else None))
    return found


def _list_packages() -> dict[str, str]:
    """Return the versions of the packages that trainkit can use, as far as they are installed."""
    names = {"numba": None, "numpy": None, "triton": None, **dict(_list_requirements())}
    found = dict[str, str]()
    for name in names:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    found.pop("torch", None)
    return found


def _list_missing() -> dict[str, list[str]]:
    """Return {extra: its packages that are not installed}."""
    installed = _list_packages()
    missing = dict[str, list[str]]()
    for name, extra in _list_requirements():
        if extra is not None and name not in installed:
            missing.setdefault(extra, []).append(name)
    return missing


def _list_backends() -> list[str]:
    from torch import distributed  # noqa: PLC0415 -- slow

    if not distributed.is_available():
        return []
    available = {
        "gloo": distributed.is_gloo_available(),
        "nccl": distributed.is_nccl_available(),
        "mpi": distributed.is_mpi_available(),
    }
    return [name for name, is_available in available.items() if is_available]


def _describe_devices() -> dict[str, dict[str, Any]]:
    """Return name, memory and health of every GPU; a GPU that fails has its error as a sign."""
    import torch  # noqa: PLC0415 -- slow

    from trainkit.run.device_health import (  # noqa: PLC0415 -- torch
        describe_signs,
        open_device,
        read_device_signs,
    )

    found = dict[str, dict[str, Any]]()
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for index in range(count):
        device = torch.device("cuda", index)
        facts: dict[str, Any] = {"name": None, "memory_gib": None, "free_gib": None, "signs": []}
        found[f"cuda:{index}"] = facts
        try:
            facts["name"] = torch.cuda.get_device_name(device)
            free, total = torch.cuda.mem_get_info(device)
            facts |= {"memory_gib": _to_gib(total), "free_gib": _to_gib(free)}
            opened = open_device(device)
            if opened is not None:
                facts["signs"] = describe_signs(read_device_signs(*opened))
        except RuntimeError as error:
            facts["signs"] = [str(error).partition("\n")[0]]
    return found


def _describe_attention(device: Any) -> dict[str, str]:
    """Return the kernels of layers without and with a window, and with a soft cap."""
    import torch  # noqa: PLC0415 -- slow

    from trainkit.attention import choose_kernel  # noqa: PLC0415 -- torch

    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    kinds = {"plain": (None, None), "window": (1024, None), "softcap": (None, 50.0)}
    return {
        kind: str(
            choose_kernel(
                ("varlen", "sdpa"),
                device=device,
                dtype=dtype,
                head_size=128,
                window=window,
                softcap=softcap,
            )
        )
        for kind, (window, softcap) in kinds.items()
    }
