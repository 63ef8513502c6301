"""From a layout and an environment to a `ParallelState`: all axes are opened here, once."""

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
from trainkit.mesh.launch import Launch, read_launch, require_torch
from trainkit.mesh.meeting import first_words, open_world
from trainkit.types import ConfigError, Layout, ParallelState


def get_world_size() -> int:
    """Return the number of processes of the run: of an existing process group, else the launcher's.

    It is what `parallel_session` will find, so that a layout can be checked before it is opened.

    Raises:
        ConfigError: The environment is wrong.

    Examples:
        >>> get_world_size()
        1
    """
    return _find_launch().world


def _find_launch() -> Launch:
    """Return this process's place: in an existing process group, else as the launcher says."""
    if not (dist.is_available() and dist.is_initialized()):
        return read_launch(os.environ)
    current = torch.cuda.current_device() if torch.cuda.is_available() else 0
    local = int(os.environ.get("LOCAL_RANK", current))
    return Launch(dist.get_rank(), dist.get_world_size(), local)


def _own_device(launch: Launch) -> torch.device:
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
    torch.cuda.set_device(device)
    return device


@contextmanager
def parallel_session(
    layout: Layout | None = None,
    *,
    timeout: timedelta = timedelta(minutes=10),
    start_timeout: timedelta = timedelta(minutes=10),
    asked: Callable[[], str | None] = lambda: None,
    **fields: Any,
) -> Iterator[ParallelState]:
    """Open the process groups of a layout for the length of a `with` block.

    The world comes from a process group that exists already, else from torchrun's variables, else
    from SLURM's, else it is this process alone, and then there is no process group at all. The
    environment and the degrees are checked before a socket is opened.

    Args:
        layout: The degrees, and `fold_sp`; the other fields change nothing here. It may be left
            out, and single fields given by name: `parallel_session(dp_shard=4, tp=2)`.
        timeout: How long a collective may wait for a peer. Where `run.watch_ranks` stands guard it
            may be long: the watch ends a hang earlier, and says who is stuck.
        start_timeout: How long ranks may take to find each other.
        asked: Tells why this process shall stop, or None, as `run.trap_signals` yields it: who
            was asked does not wait for missing ranks for longer than 20 s more.
        **fields: Fields of `Layout`, which take the place of those of `layout`.

    Yields:
        The `ParallelState` of this rank.

    Raises:
        ConfigError: The environment is wrong, the degrees do not multiply to the world, two
            processes have one rank, or they disagree on how many there are.
        PeerError: Ranks are missing (they are named), or cannot be reached.
        PreemptedError: This process was asked to stop, and ranks are still missing.

    Effects:
        Opens process groups, and closes what it opened. An existing default group is used as it is
        and left open. After an exception it does not wait for collectives that are under way.

    Examples:
        >>> with parallel_session() as ps:
        ...     ps.world.count
        1
    """
    existing = dist.is_available() and dist.is_initialized()
    require_torch()
    launch = _find_launch()
    layout = attrs.evolve(layout or Layout(), **fields).over(launch.world)
    device = _own_device(launch)
    opened = not existing and launch.world > 1
    if opened:
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        open_world(launch, backend, timeout=timeout, start_timeout=start_timeout, asked=asked)
    partitions = axes.partitions_of(layout)
    groups: dict[axes.Partition, dist.ProcessGroup] = {}
    try:
        groups = axes.make_groups(partitions, launch.rank, timeout)
        state = axes.make_state(layout, partitions, groups, rank=launch.rank, device=device)
        first_words(groups.values(), device, seconds=start_timeout.total_seconds())
        any_rank(False, state.world)  # all have connected before the first may leave
        yield state
    except BaseException:
        axes.let_go_later([*groups.values(), *([axes.default_group()] if opened else [])])
        abort = dist.distributed_c10d._abort_process_group  # noqa: SLF001 (no public name)
        _close(groups.values(), opened=opened, end=abort)
        raise
    else:
        _close(groups.values(), opened=opened, end=dist.destroy_process_group)
    finally:
        _forget_meshes()


def _close(
    groups: Iterable[dist.ProcessGroup],
    *,
    opened: bool,
    end: Callable[[dist.ProcessGroup | None], None],
) -> None:
    """End the groups of a session: all there are, or those that it made besides the default one.

    To destroy a group of NCCL is to wait for its work, which after an exception may be waiting for
    peers that are gone; to abort it is not.
    """
    if opened:
        end(None)
        return
    for group in groups:
        if group is not dist.group.WORLD:
            end(group)


def _forget_meshes() -> None:
    """Clear what DTensor remembers by mesh (torch from 2.11 on).

    A later mesh of the same shape is equal to one whose groups are gone, and torch would look for
    these: "could not resolve the process group".
    """
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor import debug  # noqa: PLC0415 (a second of import time)

        getattr(debug, "_clear_sharding_prop_cache", debug._clear_python_sharding_prop_cache)()  # noqa: SLF001 (no public name)
