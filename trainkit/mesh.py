"""From degrees and an environment to a `ParallelState`: all axes are made here, once.

world = pp x dp_replicate x dp_shard x ring x ulysses x tp, outermost first: neighbours on `tp` have
adjacent ranks. Axes that hold the same ranks share one process group.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from trainkit.collectives import agree
from trainkit.launch import Launch, read_launch, require_torch
from trainkit.meeting import first_words, open_world
from trainkit.types import Axis, ConfigError, ParallelState, Share

FoldSP = Literal["all", "ring", "ulysses", "none"]
_DEGREES = ("pp", "dp_replicate", "dp_shard", "ring", "ulysses", "tp")
_FOLDED: dict[str, tuple[str, ...]] = {
    "all": ("ring", "ulysses"),
    "ring": ("ring",),
    "ulysses": ("ulysses",),
    "none": (),
}


# ----------------------------------------------------------------------------------------- degrees


def check_degrees(
    degrees: Mapping[str, int], *, ep: int, fold_sp: FoldSP, world: int
) -> dict[str, int]:
    """Return the six degrees with dp_shard = -1 filled in, or say why they do not fit the world.

    Args:
        degrees: pp, dp_replicate, dp_shard, ring, ulysses and tp; only dp_shard may be -1, "the
            rest of the world".
        ep: The expert degree, which must divide the ranks that parameters are sharded over.
        fold_sp: Which sequence axes parameters are sharded over besides dp_shard.
        world: The number of processes.

    Raises:
        ConfigError: A degree is below 1, the product is not the world, or `ep` does not divide.

    Examples:
        >>> degrees = dict(pp=1, dp_replicate=2, dp_shard=-1, ring=1, ulysses=1, tp=1)
        >>> check_degrees(degrees, ep=1, fold_sp="all", world=8)["dp_shard"]
        4
    """
    filled = dict(degrees)
    for name, degree in {**degrees, "ep": ep}.items():
        if degree < 1 and not (name == "dp_shard" and degree == -1):
            raise ConfigError(
                f"parallel_session: {name} must be at least 1, got {degree}",
                where=name,
                got=degree,
                want=">= 1",
            )
    folded = folded_axes(fold_sp)
    fixed = int(np.prod([degree for degree in degrees.values() if degree != -1]))
    if filled["dp_shard"] == -1:
        filled["dp_shard"] = max(world // fixed, 1)
    product = int(np.prod(list(filled.values())))
    if product != world:
        text = " x ".join(f"{name} {degree}" for name, degree in filled.items())
        raise ConfigError(
            f"parallel_session: the degrees multiply to {product} ({text}), but there are {world} "
            f"processes; start {product} of them, or change a degree",
            where="degrees",
            got=product,
            want=world,
        )
    fsdp = int(np.prod([filled[name] for name in ("dp_shard", *folded)]))
    if fsdp % ep:
        raise ConfigError(
            f"parallel_session: ep {ep} does not divide the {fsdp} ranks that parameters are "
            f"sharded over (dp_shard, with fold_sp={fold_sp!r})",
            where="ep",
            got=ep,
            want=f"a divisor of {fsdp}",
        )
    return filled


def folded_axes(fold_sp: FoldSP) -> tuple[str, ...]:
    """Return the sequence axes that parameters are sharded over besides dp_shard.

    Raises:
        ConfigError: There is no such choice.

    Examples:
        >>> folded_axes("all"), folded_axes("ring")
        (('ring', 'ulysses'), ('ring',))
    """
    if fold_sp not in _FOLDED:
        raise ConfigError(
            f"parallel_session: fold_sp must be one of {', '.join(_FOLDED)}, got {fold_sp!r}",
            where="fold_sp",
            got=fold_sp,
        )
    return _FOLDED[fold_sp]


# -------------------------------------------------------------------------------------------- axes

Partition = tuple[tuple[int, ...], ...]


def _partitions(degrees: Mapping[str, int], *, ep: int, fold_sp: FoldSP) -> dict[str, Partition]:
    """Return, for each axis, the lists of ranks that it connects."""
    sizes = [degrees[name] for name in _DEGREES]
    world = np.arange(int(np.prod(sizes))).reshape(sizes)

    def along(*names: str) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
        inner = [_DEGREES.index(name) for name in names]
        outer = [dim for dim in range(len(_DEGREES)) if dim not in inner]
        size = int(np.prod([sizes[dim] for dim in inner]))
        return world.transpose(*outer, *inner).reshape(-1, size)

    folded = _FOLDED[fold_sp]
    unfolded = tuple(name for name in ("ring", "ulysses") if name not in folded)
    fsdp = along("dp_shard", *folded)
    tables = {
        "world": along(*_DEGREES),
        "dp": along("dp_replicate", "dp_shard"),
        "sp": along("ring", "ulysses"),
        "loss": along("dp_replicate", "dp_shard", "ring", "ulysses"),
        "fsdp": fsdp,
        "sp_unfolded": along(*unfolded),
        "ep": fsdp.reshape(-1, ep),
        "expert_fsdp": fsdp.reshape(len(fsdp), -1, ep)
        .transpose(0, 2, 1)
        .reshape(len(fsdp) * ep, -1),
        **{name: along(name) for name in _DEGREES},
    }
    return {name: tuple(map(tuple, table.tolist())) for name, table in tables.items()}


def _make_groups(
    partitions: Mapping[str, Partition], rank: int, timeout: timedelta
) -> dict[Partition, dist.ProcessGroup]:
    """Make one process group per distinct partition, on all ranks in the same order."""
    groups: dict[Partition, dist.ProcessGroup] = {}
    for partition in partitions.values():
        if partition in groups or len(partition[0]) == 1:
            continue
        if len(partition) == 1:
            groups[partition] = _default_group()
            continue
        for ranks in partition:
            group = dist.new_group(list(ranks), timeout=timeout)
            if rank in ranks:
                assert isinstance(group, dist.ProcessGroup)
                groups[partition] = group
    return groups


def _root_mesh(
    degrees: Mapping[str, int],
    partitions: Mapping[str, Partition],
    groups: dict[Partition, dist.ProcessGroup],
    *,
    fold_sp: FoldSP,
    device: torch.device,
) -> DeviceMesh | None:
    """Return the mesh (pp, dp_replicate, fsdp, sp_unfolded, tp) without its dimensions of size 1.

    Sharded and tensor-parallel parameters must live on slices of one mesh. FSDP2's hybrid mode
    wants a dimension to shard over beside the replicated one, if only of size 1.
    """
    folded = _FOLDED[fold_sp]
    unfolded = [name for name in ("ring", "ulysses") if name not in folded]
    order = ["pp", "dp_replicate", "dp_shard", *folded, *unfolded, "tp"]
    sizes = [degrees[name] for name in _DEGREES]
    ranks = np.arange(int(np.prod(sizes))).reshape(sizes)
    ranks = ranks.transpose([_DEGREES.index(name) for name in order])
    names = ("pp", "dp_replicate", "fsdp", "sp_unfolded", "tp")
    shape = [len(partitions[name][0]) for name in names]
    kept = [name for name, size in zip(names, shape, strict=True) if size > 1]
    if not kept:
        return None
    if "dp_replicate" in kept and "fsdp" not in kept:
        kept.insert(kept.index("dp_replicate") + 1, "fsdp")
        singles = [dist.new_group([rank]) for rank in range(ranks.size)]
        own = singles[dist.get_rank()]
        assert isinstance(own, dist.ProcessGroup)
        groups[partitions["fsdp"]] = own
    table = ranks.reshape([size for name, size in zip(names, shape, strict=True) if name in kept])
    if len(kept) == 1:
        return _mesh_of(groups[partitions[kept[0]]], kept[0], device)
    return DeviceMesh.from_group(
        [groups[partitions[name]] for name in kept],
        device.type,
        mesh=torch.from_numpy(table.copy()).to(torch.int),
        mesh_dim_names=tuple(kept),
    )


def _mesh_of(group: dist.ProcessGroup, name: str, device: torch.device) -> DeviceMesh:
    return DeviceMesh.from_group(group, device.type, mesh_dim_names=(name,))


def _make_state(
    degrees: Mapping[str, int],
    partitions: Mapping[str, Partition],
    groups: dict[Partition, dist.ProcessGroup],
    *,
    fold_sp: FoldSP,
    rank: int,
    device: torch.device,
) -> ParallelState:
    mesh = _root_mesh(degrees, partitions, groups, fold_sp=fold_sp, device=device)
    axes: dict[str, Axis] = {}
    for name, partition in partitions.items():
        ranks = next(ranks for ranks in partition if rank in ranks)
        share = Share(ranks.index(rank), len(ranks))
        if len(ranks) == 1:
            axes[name] = Axis(name, share)
            continue
        group = groups[partition]
        in_mesh = mesh is not None and name in (mesh.mesh_dim_names or ())
        axis_mesh = mesh[name] if mesh is not None and in_mesh else _mesh_of(group, name, device)
        axes[name] = Axis(name, share, group, axis_mesh)
    return ParallelState(**axes, mesh=mesh, device=device)


def solo_parallel(device: torch.device | str = "cpu") -> ParallelState:
    """Return the state of one process: every axis has size 1, and there is no process group.

    Examples:
        >>> ps = solo_parallel()
        >>> ps.loss.count, ps.loss.group
        (1, None)
    """
    ones = dict.fromkeys(_DEGREES, 1)
    partitions = _partitions(ones, ep=1, fold_sp="all")
    device = torch.device(device)
    return _make_state(ones, partitions, {}, fold_sp="all", rank=0, device=device)


def axis_from_group(group: dist.ProcessGroup, *, name: str = "group") -> Axis:
    """Return an axis over somebody else's process group, to use single functions elsewhere.

    Raises:
        ValueError: This process is not a member of the group.
    """
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError(f"axis_from_group: this process is not a member of the group {name!r}")
    share = Share(rank, dist.get_world_size(group))
    return Axis(name, share) if share.count == 1 else Axis(name, share, group)


@contextmanager
def twin_axis(
    axis: Axis, *, name: str = "control", timeout: timedelta = timedelta(minutes=30)
) -> Iterator[Axis]:
    """Open an axis over the same ranks that has a gloo group of its own, for a `with` block.

    What ranks agree on beside the training (stop now? has everybody written?) may then be under way
    while the training's collectives are: on one group the two would be taken for each other.

    Args:
        axis: An axis; every rank of it must call this. Its ranks need not be the whole world.
        name: The name of the axis that is yielded.
        timeout: How long a collective on it may wait for a peer.

    Yields:
        The twin, which communicates on the CPU whatever the device; `axis` itself at size 1.

    Effects:
        Opens a process group, and closes it. After an exception it does not wait for work that is
        under way, whose peers may be gone.

    Examples:
        >>> with twin_axis(solo_parallel().world) as control:
        ...     control.count
        1
    """
    if axis.count == 1:
        yield axis
        return
    assert axis.group is not None
    ranks = dist.get_process_group_ranks(axis.group)
    some = len(ranks) < dist.get_world_size()
    group = dist.new_group(ranks, timeout, backend="gloo", use_local_synchronization=some)
    assert isinstance(group, dist.ProcessGroup)
    try:
        yield Axis(name, axis.share, group)
    except BaseException:
        _let_go_later([group])
        raise
    finally:
        dist.destroy_process_group(group)


def _default_group() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def _let_go_later(groups: Sequence[dist.ProcessGroup]) -> None:
    """Leave it to a thread to let go of groups that may have work under way.

    A gloo group ends its work before it goes, and so whoever drops the last reference waits for
    peers that may be dead, or for the timeout (torch from 2.11 on; `abort` does not change it).
    """
    if groups:
        threading.Thread(target=_let_go, args=([*set(groups)],), daemon=True).start()


def _let_go(groups: list[dist.ProcessGroup]) -> None:
    while groups:
        while sys.getrefcount(groups[-1]) > 2:  # the list, the argument, and somebody else
            time.sleep(0.05)
        groups.pop()


# ----------------------------------------------------------------------------------------- session


def world_size() -> int:
    """Return the number of processes of the run: of an existing process group, else the launcher's.

    It is what `parallel_session` will find, so that a layout can be checked before it is opened.

    Raises:
        ConfigError: The environment is wrong.

    Examples:
        >>> world_size()
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
    *,
    pp: int = 1,
    dp_replicate: int = 1,
    dp_shard: int = -1,
    ring: int = 1,
    ulysses: int = 1,
    tp: int = 1,
    ep: int = 1,
    fold_sp: FoldSP = "all",
    timeout: timedelta = timedelta(minutes=10),
    start_timeout: timedelta = timedelta(minutes=10),
    asked: Callable[[], str | None] = lambda: None,
) -> Iterator[ParallelState]:
    """Open the process groups of a layout for the length of a `with` block.

    The world comes from a process group that exists already, else from torchrun's variables, else
    from SLURM's, else it is this process alone, and then there is no process group at all. The
    environment and the degrees are checked before a socket is opened.

    Args:
        pp: Pipeline stages.
        dp_replicate: Replicas of the parameters.
        dp_shard: Ranks that share one replica's parameters; -1 takes the rest of the world.
        ring: Ring attention ranks.
        ulysses: Ulysses attention ranks.
        tp: Tensor parallel ranks.
        ep: Expert parallel ranks, a factor of what parameters are sharded over, not of the world.
        fold_sp: Which sequence axes parameters are sharded over besides dp_shard; FSDP sums their
            gradients. Those of the rest are summed by `sync_sp_grads`, which a step must call.
        timeout: How long a collective may wait for a peer. Where `runtime.watch` stands guard it
            may be long: the watch ends a hang earlier, and says who is stuck.
        start_timeout: How long ranks may take to find each other.
        asked: Tells why this process shall stop, or None, as `runtime.trap_signals` yields it: who
            was asked does not wait for missing ranks for longer than 20 s more.

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
    wanted = dict(zip(_DEGREES, (pp, dp_replicate, dp_shard, ring, ulysses, tp), strict=True))
    degrees = check_degrees(wanted, ep=ep, fold_sp=fold_sp, world=launch.world)
    device = _own_device(launch)
    opened = not existing and launch.world > 1
    if opened:
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        open_world(launch, backend, timeout=timeout, start_timeout=start_timeout, asked=asked)
    partitions = _partitions(degrees, ep=ep, fold_sp=fold_sp)
    groups: dict[Partition, dist.ProcessGroup] = {}
    try:
        groups = _make_groups(partitions, launch.rank, timeout)
        state = _make_state(
            degrees, partitions, groups, fold_sp=fold_sp, rank=launch.rank, device=device
        )
        first_words(groups.values(), device, seconds=start_timeout.total_seconds())
        agree(False, state.world)  # all have connected before the first may leave
        yield state
    except BaseException:
        _let_go_later([*groups.values(), *([_default_group()] if opened else [])])
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
