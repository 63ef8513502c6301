"""Open the process groups of a layout for a `with` block, as a `ParallelState`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import attrs
import torch
import torch.distributed as dist

from trainkit.collectives import any_rank
from trainkit.mesh import axes
from trainkit.mesh.launch import Launch, check_torch_version, read_launch
from trainkit.mesh.rendezvous import check_groups, open_world
from trainkit.types import ConfigError, Layout, ParallelState


def get_world_size() -> int:
    """Return the number of processes of the run, from a process group or the launcher's variables.

    It is the world size of `parallel_session`, so that a layout can be checked before.

    Raises:
        ConfigError: The environment is wrong.

    Examples:
        >>> get_world_size()
        1
    """
    return _find_launch().world


def _find_launch() -> Launch:
    """Return this process's rank, from a process group or the launcher's variables."""
    if not (dist.is_available() and dist.is_initialized()):
        return read_launch(os.environ)
    current = torch.cuda.current_device() if torch.cuda.is_available() else 0
    local = int(os.environ.get("LOCAL_RANK", current))
    return Launch(dist.get_rank(), dist.get_world_size(), local)


def _get_local_device(launch: Launch) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if launch.local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"parallel_session: this process is number {launch.local_rank} on its host, which has "
            f"{torch.cuda.device_count()} GPUs; start one process per GPU",
            where="LOCAL_RANK",
            got=launch.local_rank,
            want=f"< {torch.cuda.device_count()}",
        )
    device = torch.device("cuda", launch.local_rank)
    # "cuda" without an index, and NCCL, mean the current device.
    torch.cuda.set_device(device)
    return device


@contextmanager
def parallel_session(
    layout: Layout | None = None,
    *,
    timeout: timedelta = timedelta(minutes=10),
    start_timeout: timedelta = timedelta(minutes=10),
    stop_reason: Callable[[], str | None] = lambda: None,
    **fields: Any,
) -> Iterator[ParallelState]:
    """Open the process groups of a layout for the length of a `with` block.

    The world is an existing process group, or else the variables of torchrun or SLURM, or else this
    process alone, without a process group. The environment and the degrees are checked before a
    socket is opened.

    Args:
        layout: The degrees, `ep_adjacent` and `fold_sp`; the other fields are not used here, but by
            `fsdp`, `build_stages` and others that take a layout or its fields.
        timeout: The timeout of collectives. With `run.watch_ranks` it may be long: the watch ends a
            hang earlier, and names the hung ranks.
        start_timeout: The timeout of the rendezvous.
        stop_reason: Returns the reason to stop this process, or None, as `run.trap_signals` yields
            it. After a stop request it waits for missing ranks for at most 20 s.
        **fields: Fields of `Layout` that are used here, which replace those of `layout`:
            `parallel_session(dp_shard=4, tp=2)`.

    Yields:
        The `ParallelState` of this rank.

    Raises:
        ConfigError: A field is not used here, the environment is wrong, the degrees do not multiply
            to the world, two processes have the same rank, or they disagree on the world size.
        PeerError: Ranks are missing (they are named), or cannot be reached.
        PreemptedError: A stop was requested, and ranks are still missing.

    Effects:
        Opens process groups, and closes those that it opened. An existing default group is used and
        stays open. After an exception it does not wait for pending collectives.

    Examples:
        >>> with parallel_session() as ps:
        ...     ps.world.count
        1
    """
    _check_fields(fields)
    existing = dist.is_available() and dist.is_initialized()
    check_torch_version()
    launch = _find_launch()
    layout = attrs.evolve(layout or Layout(), **fields).over(launch.world)
    device = _get_local_device(launch)
    opened = not existing and launch.world > 1
    if opened:
        # gloo as well: ranks exchange control messages and JSON on the CPU.
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        open_world(
            launch,
            backend,
            timeout=timeout,
            start_timeout=start_timeout,
            stop_reason=stop_reason,
        )
    partitions = axes.partitions_of(layout)
    groups: dict[axes.Partition, dist.ProcessGroup] = {}
    try:
        groups = axes.make_groups(partitions, launch.rank, timeout)
        state = axes.make_state(layout, partitions, groups, rank=launch.rank, device=device)
        check_groups(groups.values(), device, seconds=start_timeout.total_seconds())
        any_rank(False, state.world)  # no rank leaves before all have connected
        yield state
    except BaseException:
        axes.free_groups_later([*groups.values(), *([axes.default_group()] if opened else [])])
        abort = dist.distributed_c10d._abort_process_group  # noqa: SLF001 (no public name)
        _close(groups.values(), opened=opened, end=abort)
        raise
    else:
        _close(groups.values(), opened=opened, end=dist.destroy_process_group)
    finally:
        # DTensor's caches have meshes in their keys (torch from 2.11 on). A later mesh of the same
        # shape equals one whose groups are closed, and torch would use these: "could not resolve
        # the process group".
        if "torch.distributed.tensor" in sys.modules:
            from torch.distributed.tensor import debug  # noqa: PLC0415 (a second of import time)

            clear = debug._clear_python_sharding_prop_cache  # noqa: SLF001 (no public name)
            getattr(debug, "_clear_sharding_prop_cache", clear)()


def _check_fields(names: Iterable[str]) -> None:
    """Raise ConfigError for a field of a layout that changes no process group."""
    used = [*Layout().degrees, "ep_adjacent", "fold_sp"]
    for name in names:
        if name in attrs.fields_dict(Layout) and name not in used:
            raise ConfigError(
                f"parallel_session: {name!r} changes nothing here, as a session only opens the "
                f"process groups of {', '.join(used)}; pass it to what uses it, as in "
                "fsdp(Layout(cpu_offload=True)), build_stages(schedule=...) or "
                "make_forward_backward(reduce=...)",
                where=name,
                want=used,
            )


def _close(
    groups: Iterable[dist.ProcessGroup],
    *,
    opened: bool,
    end: Callable[[dist.ProcessGroup | None], None],
) -> None:
    """End the groups of a session: all groups, or those that it made next to an existing one.

    Destroying an NCCL group waits for its work, which after an exception may wait for peers that
    have exited; aborting it does not.
    """
    if opened:
        end(None)
        return
    for group in groups:
        if group is not dist.group.WORLD:
            end(group)
