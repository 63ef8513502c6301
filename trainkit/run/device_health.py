"""Signs that a device or a host is sick: memory errors, and clocks that heat or power hold down.

A GPU's are read through NVML, with the optional package `nvidia-ml-py`; a host's from the files of
Linux. Where the platform says nothing, there are no signs. No real device has been read so far: the
tests replace NVML by a module with recorded values.
"""

from __future__ import annotations

import contextlib
import enum
import importlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

_PERIOD = 60.0  # seconds between two looks
_SYS = Path("/sys/devices/system")

# Bits of nvmlClocksEventReason. That software caps the power (4) is no sign: a busy GPU runs at its
# limit all day.
_HARDWARE_SLOWDOWN = 0x08
_THERMAL_SLOWDOWN = 0x20 | 0x40
_POWER_BRAKE = 0x80


class Sign(enum.IntFlag):
    """What can be wrong with a device or its host; several at once are one number."""

    ECC_ERRORS = enum.auto()
    ROWS_TO_REMAP = enum.auto()
    ROWS_NOT_REMAPPED = enum.auto()
    HEAT = enum.auto()
    POWER_BRAKE = enum.auto()
    HARDWARE_SLOWDOWN = enum.auto()
    NO_ANSWER = enum.auto()
    HOST_MEMORY_ERRORS = enum.auto()
    HOST_HEAT = enum.auto()


_SENTENCES = {
    Sign.ECC_ERRORS: "its memory has had errors that ECC could not correct",
    Sign.ROWS_TO_REMAP: "its memory has rows to remap, which a reset of the device does",
    Sign.ROWS_NOT_REMAPPED: "its memory has bad rows that could not be remapped: replace it",
    Sign.HEAT: "heat holds its clocks down",
    Sign.POWER_BRAKE: "the power supply holds its clocks down (power brake)",
    Sign.HARDWARE_SLOWDOWN: "its hardware holds its clocks down",
    Sign.NO_ANSWER: "its driver does not answer any more",
    Sign.HOST_MEMORY_ERRORS: "its host's memory has had errors that could not be corrected",
    Sign.HOST_HEAT: "heat has held the clocks of its host's processors down",
}


def describe_signs(signs: int) -> list[str]:
    """Return a sentence for each sign.

    Examples:
        >>> describe_signs(Sign.HEAT | Sign.NO_ANSWER)
        ['heat holds its clocks down', 'its driver does not answer any more']
    """
    return [_SENTENCES[sign] for sign in Sign(signs)]


def read_device_signs(nvml: Any, handle: Any) -> Sign:
    """Return the signs of a GPU.

    Args:
        nvml: The module `pynvml`, initialized.
        handle: The device's handle of NVML.
    """
    signs = Sign(0)
    try:
        reasons = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
    except nvml.NVMLError:
        return Sign.NO_ANSWER
    if reasons & _THERMAL_SLOWDOWN:
        signs |= Sign.HEAT
    if reasons & _POWER_BRAKE:
        signs |= Sign.POWER_BRAKE
    # Heat and the power brake set this bit too.
    if reasons & _HARDWARE_SLOWDOWN and not signs:
        signs |= Sign.HARDWARE_SLOWDOWN
    # Not every GPU has ECC, or remaps rows.
    with contextlib.suppress(nvml.NVMLError):
        uncorrected = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
        if nvml.nvmlDeviceGetTotalEccErrors(handle, uncorrected, nvml.NVML_VOLATILE_ECC):
            signs |= Sign.ECC_ERRORS
    with contextlib.suppress(nvml.NVMLError):
        _, _, is_pending, has_failed = nvml.nvmlDeviceGetRemappedRows(handle)
        if is_pending:
            signs |= Sign.ROWS_TO_REMAP
        if has_failed:
            signs |= Sign.ROWS_NOT_REMAPPED
    return signs


def count_host_events(root: Path = _SYS) -> tuple[int, int]:
    """Return how many memory errors and thermal slowdowns a Linux host has counted.

    Args:
        root: The folder of the files, another one in tests.

    Examples:
        >>> count_host_events(Path("/does/not/exist"))
        (0, 0)
    """
    errors = sum(map(_read_count, root.glob("edac/mc/mc*/ue_count")))
    slowdowns = sum(map(_read_count, root.glob("cpu/cpu*/thermal_throttle/package_throttle_count")))
    return errors, slowdowns


def _read_count(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return 0


@contextlib.contextmanager
def watch_device(
    device: torch.device, *, period: float = _PERIOD, root: Path = _SYS
) -> Iterator[Callable[[], Sign]]:
    """Yield a function that returns the signs of this rank's device and host, seen so far.

    A thread looks at once and every `period` seconds, so that a driver that hangs holds nobody up.
    Memory errors and slowdowns of a host count from the start of the block, since a host may have
    counted some in the year before.

    Args:
        device: The device of this rank, `ps.device`.
        period: The seconds between two looks.
        root: The folder of the host's files.

    Effects:
        Runs a thread until the end of the block, where there is something to look at.

    Examples:
        >>> with watch_device(torch.device("cpu"), root=Path("/does/not/exist")) as read_signs:
        ...     read_signs()
        <Sign: 0>
    """
    found = [Sign(0)]
    closed = threading.Event()
    opened = open_device(device)
    has_files = any(root.glob("edac/mc/mc*/ue_count")) or any(
        root.glob("cpu/cpu*/thermal_throttle")
    )
    if opened is None and not has_files:
        yield lambda: found[0]
        return
    before = count_host_events(root)

    def look() -> None:
        while True:
            signs = Sign(0) if opened is None else read_device_signs(*opened)
            errors, slowdowns = count_host_events(root)
            if errors > before[0]:
                signs |= Sign.HOST_MEMORY_ERRORS
            if slowdowns > before[1]:
                signs |= Sign.HOST_HEAT
            found[0] |= signs
            if closed.wait(period):
                return

    # A daemon: a driver that hangs must not keep the process alive.
    thread = threading.Thread(target=look, name="trainkit-device-health", daemon=True)
    thread.start()
    try:
        yield lambda: found[0]
    finally:
        closed.set()
        thread.join(timeout=1.0)


def open_device(device: torch.device) -> tuple[Any, Any] | None:
    """Return NVML and the handle of a device; None without NVML, or without a GPU of NVIDIA."""
    if device.type != "cuda" or torch.version.cuda is None:
        return None
    try:
        nvml: Any = importlib.import_module("pynvml")  # an extra
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
        # By UUID: CUDA_VISIBLE_DEVICES renumbers devices for torch, and not for NVML.
        uuid = torch.cuda.get_device_properties(device).uuid
        return nvml, nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode())
    except nvml.NVMLError:
        return None
