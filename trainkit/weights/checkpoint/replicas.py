"""A run's state looked at while it runs: are replicas still equal, is every number finite?

A bit that flips in the memory of one replica makes no NaN and no error; the replicas part, and the
checkpoint holds the one that writes. The canary compares hashes of them, some at a time: after some
steps every bit of every parameter and moment has been looked at.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import attrs
import torch
from torch import Tensor, nn

from trainkit.collectives import all_gather_objects
from trainkit.grads import format_ranks
from trainkit.metrics import to_host
from trainkit.noise.hashing import GOLDEN, MASK64, make_key
from trainkit.parallel.names import COPY_SUFFIX, get_local_box
from trainkit.types import Axis, NumericsError, ParallelState
from trainkit.weights.checkpoint.tensors import INTEGERS, run_tensors

_AT_ONCE = 1 << 20  # elements that are hashed at once, in 8 MiB of working memory


def _tensors_of(stages: Iterable[nn.Module], optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return every tensor of the run by the name a checkpoint has for it, tied copies too.

    A copy has its owner's name, unless this rank holds both.
    """
    found = run_tensors(stages, optimizer, copies=True)
    copies = {name: x for name, x in found.items() if name.endswith(COPY_SUFFIX)}
    owners = {name: x for name, x in found.items() if name not in copies}
    return {name.removesuffix(COPY_SUFFIX): x for name, x in copies.items()} | owners


# --------------------------------------------------------------------------------------- not finite


def find_nonfinite_state(
    stages: Iterable[nn.Module],
    optimizer: torch.optim.Optimizer,
    axis: Axis,
    *,
    most: int = 3,
) -> list[str]:
    """Return which parameters and moments hold a number that is not finite, and on which ranks.

    It reads all of them: call it after a bad step, to know whether skipping it was enough.

    Args:
        stages: This rank's stages.
        optimizer: The optimizer of their parameters.
        axis: All ranks, `ps.world`.
        most: How many are named; the others are counted.

    Returns:
        The same on all ranks: "model/NAME on rank 1", "optimizer/KEY/NAME on ranks 0 and 1".

    Effects:
        Communicates on `axis`, and waits for the device once.

    Examples:
        >>> from trainkit.types import SOLO
        >>> model = nn.Linear(1, 1)
        >>> _ = nn.init.constant_(model.bias, torch.inf)
        >>> find_nonfinite_state([model], torch.optim.SGD(model.parameters()), SOLO)
        ['model/bias on rank 0']
    """
    tensors = _tensors_of(stages, optimizer)
    checks = {
        name: torch.isfinite(_widened(get_local_box(x).local)).all()
        for name, x in tensors.items()
        if x.is_floating_point() or x.is_complex()
    }
    own = [name for name, is_finite in to_host(checks).items() if not is_finite]
    ranks: dict[str, list[int]] = {}
    for rank, names in enumerate(all_gather_objects(own, axis)):
        for name in names:
            ranks.setdefault(name, []).append(rank)
    told = [f"{name} on {format_ranks(which)}" for name, which in ranks.items()]
    return told if len(told) <= most else [*told[:most], f"and {len(told) - most} more"]


def _widened(x: Tensor) -> Tensor:
    """Return numbers of 8 bits, of which torch does not say whether they are finite, in 16."""
    return x.to(torch.bfloat16) if x.dtype.itemsize == 1 else x


# ------------------------------------------------------------------------------------------- canary


@attrs.frozen(eq=False)
class _Replica:
    """A box of a tensor that several ranks hold: the integers of its bits.

    `key` is the same on all ranks that hold it, `holders` is a name for the set of them.
    """

    key: int
    name: str
    holders: str
    bits: Tensor


def make_replica_check(
    stages: Sequence[nn.Module],
    optimizer: torch.optim.Optimizer,
    ps: ParallelState,
    *,
    every: int = 10,
    within: int = 100,
) -> Callable[[int], list[str]]:
    """Return `look(step)`, which says where replicas have come to differ.

    What several ranks hold is found by name and place, in any layout: copies over dp_replicate,
    norms over tp, everything over the part of sp that FSDP does not shard. Every `every` steps some
    of it is hashed, and a number for each set of equal ranks travels; names only when hashes
    differ. The hash is a sum over the bits, each element times an odd number of its place,
    modulo 2^64: one changed element always changes it. What a single rank holds alone cannot be
    compared. After a load or a roll-back make a new one: this one knows the moments that were.

    Args:
        stages: This rank's stages.
        optimizer: The optimizer of their parameters.
        ps: The layout.
        every: How many steps lie between two looks; 0 never looks.
        within: After so many steps all of the state has been looked at, at least one look.

    Returns:
        A function of the step, the same on all ranks, for after a step. It gives one sentence for
        each tensor that differs, the same on all ranks: the ranks that differ from most, or all of
        them where no majority says who is right.

    Raises:
        ValueError: `every` is negative, or `within` below it.

    Effects:
        The returned function communicates on `ps.world` in every `every`th step and waits for the
        device; it changes nothing.

    Examples:
        >>> from trainkit.mesh import solo_parallel
        >>> model = nn.Linear(1, 1)
        >>> look = make_replica_check([model], torch.optim.SGD(model.parameters()), solo_parallel())
        >>> look(10)
        []
    """
    if every < 0 or within < max(every, 1):
        raise ValueError(
            f"canary: every must be at least 0 and within at least that, got {every} and {within}"
        )
    looks = within // every if every else 0  # until all has been looked at
    known: list[_Replica] = []  # found at the first look, and once a round, as moments appear

    def look(step: int) -> list[str]:
        if ps.world.count == 1 or not every or step % every:
            return []
        turn = step // every % looks
        if turn == 0 or not known:
            known[:] = _replicas(_tensors_of(stages, optimizer), ps.world)
        due = [replica for replica in known if replica.key % looks == turn]
        return _differences(due, ps.world)

    return look


def refuse_drift(problems: Sequence[str]) -> None:
    """End a run whose replicas differ.

    Args:
        problems: What `make_replica_check` found.

    Raises:
        NumericsError: There is a problem; all of them are in the message.

    Examples:
        >>> refuse_drift([])
        >>> refuse_drift(["rank 0 and rank 1 hold different values of model/weight"])
        Traceback (most recent call last):
        trainkit.types.NumericsError: rank 0 and rank 1 hold different values of model/weight
    """
    if problems:
        raise NumericsError(
            "; ".join(problems),
            where=problems[0],
            got="replicas that differ",
            want="the same bits on every rank",
            hint="the memory or the device of a rank is at fault: take it out, and go on from an "
            "earlier checkpoint; a checkpoint holds what the lowest of these ranks has",
        )


def _replicas(tensors: Mapping[str, Tensor], axis: Axis) -> list[_Replica]:
    """Return what this rank holds that others hold too."""
    boxes = {
        make_key(name, str(box.local.dtype), *box.local.shape, *box.offset): (name, box)
        for name, box in ((name, get_local_box(tensor)) for name, tensor in tensors.items())
        if box.local.numel()
    }
    holders: dict[int, list[int]] = {}
    for rank, keys in enumerate(all_gather_objects(list(boxes), axis)):
        for key in keys:
            holders.setdefault(key, []).append(rank)
    return [
        _Replica(
            key,
            f"{name} in the box at {box.offset}",
            str(make_key(*holders[key])),
            box.local.view(INTEGERS[box.local.element_size()]),
        )
        for key, (name, box) in boxes.items()
        if len(holders[key]) > 1
    ]


def _digests(replicas: Sequence[_Replica]) -> list[int]:
    """Return the hash of each replica; the host waits once for each device."""
    longest = max((min(replica.bits.numel(), _AT_ONCE) for replica in replicas), default=0)
    golden = GOLDEN - (1 << 64)  # as int64 holds it; products wrap
    weights = {
        device: torch.arange(1, 2 * longest, 2, device=device) * golden
        for device in {replica.bits.device for replica in replicas}
    }
    sums = {
        replica.name: _digest(replica.bits, weights[replica.bits.device]) for replica in replicas
    }
    return [int(digest) for digest in to_host(sums).values()]


def _digest(bits: Tensor, weights: Tensor) -> Tensor:
    """Return a sum of bits times odd numbers, modulo 2^64: a change of one element changes it."""
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for part in bits.reshape(-1).split(_AT_ONCE):
        total = total * 3 + (part * weights[: part.numel()]).sum()
    return total


def _differences(replicas: Sequence[_Replica], axis: Axis) -> list[str]:
    """Compare one hash for each set of ranks, and more only where these differ."""
    digests = _digests(replicas)
    own: dict[str, int] = {}
    for replica, digest in zip(replicas, digests, strict=True):
        total = own.get(replica.holders, 0) + digest * (replica.key | 1)
        own[replica.holders] = total & MASK64
    told = all_gather_objects(own, axis)
    sets = {holders for each in told for holders in each}
    parted = {held for held in sets if len({each[held] for each in told if held in each}) > 1}
    if not parted:
        return []
    boxes = {
        replica.name: digest
        for replica, digest in zip(replicas, digests, strict=True)
        if replica.holders in parted
    }
    values: dict[str, dict[int, int]] = {}
    for rank, each in enumerate(all_gather_objects(boxes, axis)):
        for name, digest in each.items():
            values.setdefault(name, {})[rank] = digest
    return [_sentence(name, by) for name, by in values.items() if len(set(by.values())) > 1]


def _sentence(name: str, digests: Mapping[int, int]) -> str:
    usual, count = Counter(digests.values()).most_common(1)[0]
    if 2 * count <= len(digests):
        ranks = " and ".join(f"rank {rank}" for rank in digests)
        return f"{ranks} hold different values of {name}"
    odd = [rank for rank, digest in digests.items() if digest != usual]
    others = format_ranks([rank for rank, digest in digests.items() if digest == usual])
    verb = "holds" if len(odd) == 1 else "hold"
    return f"{format_ranks(odd)} {verb} other values of {name} than {others}"
