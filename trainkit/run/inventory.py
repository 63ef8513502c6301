"""What a run runs on: hosts, devices, drivers, versions, and the memory of every rank."""

from __future__ import annotations

import os
import platform
import re
import socket
import time
from pathlib import Path
from typing import Any

import attrs
import torch

from trainkit.collectives import all_gather, all_gather_objects, get_comm_device
from trainkit.metrics import read_memory_stats
from trainkit.types import Axis


def describe_rank(rank: int, device: torch.device) -> dict[str, Any]:
    """Return the host, the device and the versions of a rank, as plain values.

    Args:
        rank: The rank.
        device: Its device, `ps.device`.

    Examples:
        >>> facts = describe_rank(0, torch.device("cpu"))
        >>> facts["rank"], facts["torch"] == torch.__version__
        (0, True)
    """
    facts: dict[str, Any] = {
        "rank": rank,
        "host": socket.gethostname(),
        "device": _name_processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "memory": _read_host_memory(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts |= {
            "processor": facts["device"],
            "device": properties.name,
            "device_index": device.index,
            "device_memory": properties.total_memory,
            "driver": read_driver_version(),
            "cuda": torch.version.cuda,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        }
    return facts


def read_driver_version(path: Path = Path("/proc/driver/nvidia/version")) -> str | None:
    """Return the version of NVIDIA's driver on this host, None without one.

    Args:
        path: The driver's file, another one in tests.

    Examples:
        >>> read_driver_version(Path("/does/not/exist")) is None
        True
    """
    try:
        found = re.search(r"Module\s+(?:for \S+\s+)?(\d+[\d.]*)", path.read_text())
    except OSError:
        return None
    return found[1] if found else None


def gather_inventory(device: torch.device, axis: Axis) -> list[dict[str, Any]]:
    """Return what each host runs on, with its ranks; those with equal facts are one entry.

    Args:
        device: The device of this rank.
        axis: All ranks, `ps.world`.

    Effects:
        Communicates: `all_gather_objects` on `axis`.

    Examples:
        >>> from trainkit.mesh import solo_parallel
        >>> [entry] = gather_inventory(torch.device("cpu"), solo_parallel().world)
        >>> entry["ranks"]
        [0]
    """
    entries: dict[str, dict[str, Any]] = {}
    for facts in all_gather_objects(describe_rank(axis.index, device), axis):
        rank = facts.pop("rank")
        index = facts.pop("device_index", None)
        entry = entries.setdefault(repr(facts), {**facts, "ranks": [], "device_indices": []})
        entry["ranks"].append(rank)
        if index is not None:
            entry["device_indices"].append(index)
    return list(entries.values())


def measure_startup() -> float | None:
    """Return the seconds since this process started, mostly spent on imports; None if unknown.

    Examples:
        >>> measure_startup() is None or measure_startup() > 0
        True
    """
    try:
        # Fields are counted after the name, which may contain spaces; the 22nd is the start.
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started
    except (OSError, AttributeError, ValueError):
        return None


@attrs.define(eq=False)
class RankReadings:
    """The memory and the health of all ranks, as they were when they gathered them last."""

    device: torch.device
    axis: Axis
    _highest: int = 0
    _by_rank: torch.Tensor | None = None
    _rows: list[list[int]] = attrs.field(factory=list)  # the same on the host, when it is read
    _memory: dict[str, int] = attrs.field(factory=dict)  # of the worst of them

    def gather(self, signs: int = 0) -> None:
        """Gather the memory of all ranks and their signs; what reads them then waits for it.

        Args:
            signs: What is wrong with the device or the host of this rank (`device_health.Sign`).

        Effects:
            Communicates: an all-gather of four numbers on `axis`, through the host where it can.
            Resets an accelerator's peak.
        """
        stats = read_memory_stats(self.device)
        peak = stats["memory_peak"]
        if self.device.type == "cpu":  # the peak of the whole process never falls
            peak = self._highest = max(self._highest, peak)
        own = [stats["memory"], peak, stats.get("memory_reserved", 0), int(signs)]
        numbers = torch.tensor([own], device=get_comm_device(self.axis))
        self._by_rank = all_gather(numbers, self.axis, dim=0)
        self._rows = []
        self._memory = {}

    def read_memory(self) -> dict[str, int]:
        """Return the memory of the rank with the highest peak, in bytes, and its number.

        Returns:
            "memory" and "memory_peak" as `read_memory_stats` has them, "memory_reserved" where the
            device has a caching allocator, and "memory_rank"; {} before the first `gather`.

        Examples:
            >>> from trainkit.mesh import solo_parallel
            >>> readings = RankReadings(torch.device("cpu"), solo_parallel().world)
            >>> readings.gather()
            >>> sorted(readings.read_memory())
            ['memory', 'memory_peak', 'memory_rank']
        """
        rows = self._read_rows()
        if rows and not self._memory:  # every line has it, and there may be many ranks
            worst = max(range(len(rows)), key=lambda rank: rows[rank][1])
            memory, peak, reserved, _ = rows[worst]
            reserves = {"memory_reserved": reserved} if reserved else {}
            self._memory = {"memory": memory, "memory_peak": peak, **reserves, "memory_rank": worst}
        return self._memory

    def read_peaks(self) -> list[int]:
        """Return the peak of every rank, in bytes; [] before the first `gather`."""
        return [row[1] for row in self._read_rows()]

    def read_signs(self) -> list[int]:
        """Return the signs of every rank; [] before the first `gather`."""
        return [row[3] for row in self._read_rows()]

    def _read_rows(self) -> list[list[int]]:
        """Return the numbers of each rank, which come to the host once and stand on every line."""
        if not self._rows and self._by_rank is not None:
            self._rows = self._by_rank.tolist()
        return self._rows


def _name_processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = list[str]()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def _read_host_memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError, AttributeError):
        return None
