"""The axes of a layout: their ranks, their process groups, and the device mesh.

world = pp x dp_replicate x dp_shard x ring x ulysses x tp, outermost first: neighbors on `tp` have
adjacent ranks. Axes of the same ranks share one process group.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from trainkit.types import Axis, Layout, ParallelState, Share

# All groups of ranks that an axis connects; every rank of the world is in one of them.
Partition = tuple[tuple[int, ...], ...]


def partitions_of(layout: Layout) -> dict[str, Partition]:
    """Return the lists of ranks that each axis of a layout connects.

    Examples:
        >>> partitions = partitions_of(Layout(dp_shard=2, tp=2))
        >>> partitions["tp"], partitions["dp_shard"]
        (((0, 1), (2, 3)), ((0, 2), (1, 3)))
    """
    tables = {name: _make_rank_table(layout, *names) for name, names in layout.axes.items()}
    fsdp = tables["fsdp"]
    (far, _), (near, count) = layout.expert_axes.items()
    # Of the two factors of fsdp, one has adjacent ranks of a row and the other strided ones.
    tables[near] = fsdp.reshape(-1, count)
    strided = fsdp.reshape(len(fsdp), -1, count).transpose(0, 2, 1)
    tables[far] = strided.reshape(len(fsdp) * count, -1)
    return {name: tuple(map(tuple, table.tolist())) for name, table in tables.items()}


def _make_rank_table(
    layout: Layout, *names: str
) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """Return the groups of ranks that differ only in some degrees, one group a row."""
    degrees = layout.axes["world"]
    world = np.arange(layout.world).reshape([layout.count(name) for name in degrees])
    # Ranks that differ only in `names` are adjacent once these dimensions come last.
    inner = [degrees.index(name) for name in names]
    outer = [dim for dim in range(len(degrees)) if dim not in inner]
    size = int(np.prod([world.shape[dim] for dim in inner]))
    return world.transpose(*outer, *inner).reshape(-1, size)


def make_groups(
    partitions: Mapping[str, Partition], rank: int, timeout: timedelta
) -> dict[Partition, dist.ProcessGroup]:
    """Make one process group per distinct partition, on all ranks in the same order.

    Effects:
        Opens process groups; all ranks must call it.
    """
    groups: dict[Partition, dist.ProcessGroup] = {}
    for partition in partitions.values():
        # Collectives on an axis of size 1 are the identity, and need no group.
        if partition in groups or len(partition[0]) == 1:
            continue
        if len(partition) == 1:  # all ranks: NCCL need not connect them twice
            groups[partition] = default_group()
            continue
        groups[partition] = _open_groups(partition, rank, timeout)
    return groups


def _open_groups(
    partition: Partition, rank: int, timeout: timedelta | None = None
) -> dist.ProcessGroup:
    """Open the groups of a partition, and return that of this rank."""
    if len(partition[0]) == 1:  # local synchronization, so that other ranks need not call it
        group = dist.new_group([rank], timeout=timeout, use_local_synchronization=True)
    else:
        # torch requires that every rank opens every group, in one order.
        groups = [dist.new_group(list(ranks), timeout=timeout) for ranks in partition]
        (group,) = [x for x, ranks in zip(groups, partition, strict=True) if rank in ranks]
    assert isinstance(group, dist.ProcessGroup)
    return group


def _make_root_mesh(
    layout: Layout,
    partitions: Mapping[str, Partition],
    groups: dict[Partition, dist.ProcessGroup],
    device: torch.device,
    *,
    shards: Sequence[str],
) -> DeviceMesh | None:
    """Return the mesh (pp, dp_replicate, `shards`, sp_unfolded, tp), without dimensions of size 1.

    Sharded and tensor-parallel parameters must be on slices of one mesh. FSDP2's hybrid mode needs
    a shard dimension next to the replicated one, and experts need one next to ep, even of size 1:
    the first of `shards`.
    """
    names = ("pp", "dp_replicate", *shards, "sp_unfolded", "tp")
    sizes = {name: len(partitions[name][0]) for name in names}
    dims = [name for name in names if sizes[name] > 1]
    if not dims:
        return None
    if shards[0] not in dims and ("dp_replicate" in dims or len(shards) > 1):
        dims = [name for name in names if name in (*dims, shards[0])]
        singles = partitions[shards[0]]
        # Only DeviceMesh needs this group of one rank.
        groups[singles] = groups.get(singles) or _open_groups(singles, dist.get_rank())
    if len(dims) == 1:
        return _make_flat_mesh(groups[partitions[dims[0]]], dims[0], device)
    axes = ("pp", "dp_replicate", "fsdp", "sp_unfolded", "tp")
    order = [degree for name in axes for degree in layout.axes[name]]
    # Ranks in their own order first, where the last of the expert axes has the neighbors.
    shard_order = layout.expert_axes if len(shards) > 1 else shards
    rank_dims = [name for name in (*names[:2], *shard_order, *names[-2:]) if name in dims]
    ranks = _make_rank_table(layout, *order).reshape([sizes[name] for name in rank_dims])
    ranks = ranks.transpose([rank_dims.index(name) for name in dims])
    return DeviceMesh.from_group(
        [groups[partitions[name]] for name in dims],
        device.type,
        mesh=torch.from_numpy(ranks.copy()).to(torch.int),
        mesh_dim_names=tuple(dims),
    )


def _make_flat_mesh(group: dist.ProcessGroup, name: str, device: torch.device) -> DeviceMesh:
    return DeviceMesh.from_group(group, device.type, mesh_dim_names=(name,))


def make_state(
    layout: Layout,
    partitions: Mapping[str, Partition],
    groups: dict[Partition, dist.ProcessGroup],
    *,
    rank: int,
    device: torch.device,
) -> ParallelState:
    """Return the axes of a layout for one rank.

    Effects:
        May open groups of one rank, which it adds to `groups`; all ranks must call it.
    """
    mesh = _make_root_mesh(layout, partitions, groups, device, shards=("fsdp",))
    # Without ep experts are sharded like everything else.
    experts = mesh
    if layout.ep > 1:
        experts = _make_root_mesh(layout, partitions, groups, device, shards=("expert_fsdp", "ep"))
    axes: dict[str, Axis] = {}
    for name, partition in partitions.items():
        ranks = next(ranks for ranks in partition if rank in ranks)
        share = Share(ranks.index(rank), len(ranks))
        if len(ranks) == 1:
            axes[name] = Axis(name, share)
            continue
        group = groups[partition]
        # Derived axes, such as dp and loss, are no dimensions of the root mesh.
        if mesh is not None and name in (mesh.mesh_dim_names or ()):
            axis_mesh = mesh[name]
        else:
            axis_mesh = _make_flat_mesh(group, name, device)
        axes[name] = Axis(name, share, group, axis_mesh)
    return ParallelState(**axes, mesh=mesh, expert_mesh=experts, device=device)


def solo_parallel(device: torch.device | str = "cpu") -> ParallelState:
    """Return the state of one process: every axis has size 1, and there is no process group.

    Examples:
        >>> ps = solo_parallel()
        >>> ps.loss.count, ps.loss.group
        (1, None)
    """
    layout = Layout()
    return make_state(layout, partitions_of(layout), {}, rank=0, device=torch.device(device))


def axis_from_group(group: dist.ProcessGroup, *, name: str = "group") -> Axis:
    """Return an axis over an existing process group, to use single functions in other code.

    Raises:
        ValueError: This process is not a member of the group.
    """
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError(f"axis_from_group: this process is not a member of the group {name!r}")
    share = Share(rank, dist.get_world_size(group))
    return Axis(name, share) if share.count == 1 else Axis(name, share, group)


@contextmanager
def open_gloo_axis(
    axis: Axis, *, name: str = "control", timeout: timedelta = timedelta(minutes=30)
) -> Iterator[Axis]:
    """Open an axis over the same ranks with a separate gloo group, for a `with` block.

    Ranks use it for control messages (stop now? is the checkpoint written?) at the same time as for
    the collectives of training; on one group the two would be mixed up.

    Args:
        axis: An axis; every rank of it must call this. Its ranks need not be the whole world.
        name: The name of the new axis.
        timeout: The timeout of its collectives.

    Yields:
        The new axis, which communicates on the CPU; `axis` itself at size 1.

    Effects:
        Opens a process group, and closes it. After an exception it does not wait for pending work,
        whose peers may have exited.

    Examples:
        >>> with open_gloo_axis(solo_parallel().world) as control:
        ...     control.count
        1
    """
    if axis.count == 1:
        yield axis
        return
    assert axis.group is not None
    ranks = dist.get_process_group_ranks(axis.group)
    # torch waits for all ranks to make a group, unless those in it are to agree by themselves.
    is_subset = len(ranks) < dist.get_world_size()
    group = dist.new_group(ranks, timeout, backend="gloo", use_local_synchronization=is_subset)
    assert isinstance(group, dist.ProcessGroup)
    try:
        yield Axis(name, axis.share, group)
    except BaseException:
        free_groups_later([group])
        raise
    finally:
        dist.destroy_process_group(group)


def default_group() -> dist.ProcessGroup:
    """Return the default process group, which must be open."""
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def free_groups_later(groups: Sequence[dist.ProcessGroup]) -> None:
    """Free groups that may have pending work in a thread.

    The destructor of a gloo group finishes its work, so the last owner of a reference waits for
    peers that may be dead, or for the timeout (torch from 2.11 on; `abort` does not change it).

    Effects:
        Starts a thread, which ends when nothing else refers to the groups.
    """
    if groups:
        threading.Thread(target=_free_groups, args=([*set(groups)],), daemon=True).start()


def _free_groups(groups: list[dist.ProcessGroup]) -> None:
    while groups:
        while sys.getrefcount(groups[-1]) > 2:  # the list and the argument
            time.sleep(0.05)
        groups.pop()
