"""Check a running model: whether its replicas are equal, and whether its numbers are finite.

A bit that flips in the memory of one replica causes no NaN and no error. The replicas diverge, and
checkpoints store the one that writes. The check compares hashes of a part of the state at a time,
so that after some steps it has covered every bit of every parameter and moment.
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
from trainkit.parallel.parameters import COPY_SUFFIX, Box, get_local_box
from trainkit.types import Axis, NumericsError, ParallelState
from trainkit.weights.checkpoint.run_state import INTEGERS, get_run_tensors

_MAX_NAMES = 3  # of tensors that are not finite
_CHUNK = 1 << 20  # elements hashed at once, in 8 MiB of working memory


def _get_tensors(
    stages: Iterable[nn.Module], optimizer: torch.optim.Optimizer
) -> dict[str, Tensor]:
    """Return every tensor of the run by its name in a checkpoint, tied copies included.

    A copy has its owner's name, unless this rank has both.
    """
    tensors = get_run_tensors(stages, optimizer, copies=True)
    copies = {name: x for name, x in tensors.items() if name.endswith(COPY_SUFFIX)}
    owners = {name: x for name, x in tensors.items() if name not in copies}
    return {name.removesuffix(COPY_SUFFIX): x for name, x in copies.items()} | owners


# --------------------------------------------------------------------------------------- not finite


def find_nonfinite_state(
    stages: Iterable[nn.Module],
    optimizer: torch.optim.Optimizer,
    axis: Axis,
) -> list[str]:
    """Find the parameters and moments that contain NaN or infinity, and the ranks they are on.

    It reads all of them: call it after a bad step, to check that skipping the step was enough.

    Args:
        stages: This rank's stages.
        optimizer: The optimizer of their parameters.
        axis: All ranks, `ps.world`.

    Returns:
        Equal on all ranks: "model/NAME on rank 1", "optimizer/KEY/NAME on ranks 0 and 1". The first
        three are named, the others counted.

    Effects:
        Communicates on `axis`, and waits for the device once.

    Examples:
        >>> from trainkit.types import SOLO
        >>> model = nn.Linear(1, 1)
        >>> _ = nn.init.constant_(model.bias, torch.inf)
        >>> find_nonfinite_state([model], torch.optim.SGD(model.parameters()), SOLO)
        ['model/bias on rank 0']
    """
    are_finite: dict[str, Tensor] = {}
    for name, x in _get_tensors(stages, optimizer).items():
        if x.is_floating_point() or x.is_complex():
            local = get_local_box(x).local
            # torch.isfinite has no float8 kernel; bfloat16 holds every float8 value.
            local = local.to(torch.bfloat16) if local.dtype.itemsize == 1 else local
            are_finite[name] = torch.isfinite(local).all()
    bad_names = [name for name, is_finite in to_host(are_finite).items() if not is_finite]
    ranks: dict[str, list[int]] = {}
    for rank, names in enumerate(all_gather_objects(bad_names, axis)):
        for name in names:
            ranks.setdefault(name, []).append(rank)
    found = [f"{name} on {format_ranks(on)}" for name, on in ranks.items()]
    if len(found) > _MAX_NAMES:
        found[_MAX_NAMES:] = [f"and {len(found) - _MAX_NAMES} more"]
    return found


# ------------------------------------------------------------------------------------ replica check


@attrs.frozen(eq=False)
class _Replica:
    """A box of a tensor that several ranks have, as the integers of its bits.

    `key` is equal on all of these ranks, and `holders` identifies the set of them.
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
    interval: int = 10,
    within: int = 100,
) -> Callable[[int], list[str]]:
    """Return `check(step)`, which finds replicas that differ.

    Replicas are found by name and offset, in any layout: copies over dp_replicate, norms over tp,
    everything over the part of sp that FSDP does not shard. Every `interval` steps a part of them
    is hashed, and the ranks exchange one number for each set of ranks that share replicas, and
    names only if those differ. The hash is a sum of the elements' bits times odd numbers modulo
    2^64, so one changed element always changes it. Tensors that only one rank has cannot be
    compared. Make a new check after a load or a roll-back: this one refers to the moments from
    before.

    Args:
        stages: This rank's stages.
        optimizer: The optimizer of their parameters.
        ps: The layout.
        interval: Steps between two checks; 0 never checks.
        within: Steps after which all of the state has been checked.

    Returns:
        A function of the step, equal on all ranks, to call after a step. It returns one sentence
        for each tensor that differs, the same on all ranks: it names the ranks that differ from the
        majority, or all of them if there is none.

    Raises:
        ValueError: `interval` is negative, or `within` is below it.

    Effects:
        The returned function communicates on `ps.world` every `interval` steps and waits for the
        device. It writes nothing.

    Examples:
        >>> from trainkit.mesh import solo_parallel
        >>> model = nn.Linear(1, 1)
        >>> check = make_replica_check(
        ...     [model], torch.optim.SGD(model.parameters()), solo_parallel()
        ... )
        >>> check(10)
        []
    """
    if interval < 0 or within < max(interval, 1):
        raise ValueError(
            f"make_replica_check: interval must be at least 0 and within at least that, "
            f"got {interval} and {within}"
        )
    # Each check hashes one of so many parts, so a round of them takes `within` steps.
    num_parts = within // interval if interval else 0
    replicas: list[_Replica] = []

    def check(step: int) -> list[str]:
        if ps.world.count == 1 or not interval or step % interval:
            return []
        part = step // interval % num_parts
        if part == 0 or not replicas:  # once a round: an optimizer's first step adds its moments
            replicas[:] = _find_replicas(_get_tensors(stages, optimizer), ps.world)
        due = [replica for replica in replicas if replica.key % num_parts == part]
        return _compare_replicas(due, ps.world)

    return check


def refuse_drift(problems: Sequence[str]) -> None:
    """Raise NumericsError if replicas differ.

    Args:
        problems: The differences, from a `make_replica_check` check.

    Raises:
        NumericsError: There are differences; the message lists all of them.

    Examples:
        >>> refuse_drift([])
        >>> refuse_drift(["rank 0 and rank 1 hold different values of model/weight"])
        Traceback (most recent call last):
        trainkit.types.NumericsError: rank 0 and rank 1 hold different values of model/weight: ...
    """
    if problems:
        raise NumericsError(
            "; ".join(problems),
            where=problems[0],
            got="replicas that differ",
            want="the same bits on every rank",
            hint="the memory or the device of a rank is faulty: remove it, and resume from an "
            "earlier checkpoint; a checkpoint contains the values of the lowest of these ranks",
        )


def _find_replicas(tensors: Mapping[str, Tensor], axis: Axis) -> list[_Replica]:
    """Return the boxes of this rank that other ranks have too."""
    boxes: dict[int, tuple[str, Box]] = {}
    for name, tensor in tensors.items():
        box = get_local_box(tensor)
        if box.local.numel():
            # Equal keys on two ranks mean the same part of the same tensor, in any layout.
            key = make_key(name, str(box.local.dtype), *box.local.shape, *box.offset)
            boxes[key] = (name, box)
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


def _hash_bits(bits: Tensor, weights: Tensor) -> Tensor:
    """Return the sum of the elements times odd weights, modulo 2^64.

    Odd numbers are invertible modulo 2^64, so a change of one element always changes the sum.
    """
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for part in bits.reshape(-1).split(_CHUNK):
        # Times 3 from chunk to chunk, or exchanged chunks would have the same sum.
        total = total * 3 + (part * weights[: part.numel()]).sum()
    return total


def _compare_replicas(replicas: Sequence[_Replica], axis: Axis) -> list[str]:
    """Compare one hash per set of ranks, and the hash of each box only where that differs."""
    # The weights 1, 3, 5, ... of a chunk, times an odd constant that spreads them over 64 bits.
    longest = max((min(replica.bits.numel(), _CHUNK) for replica in replicas), default=0)
    golden = GOLDEN - (1 << 64)  # the int64 with the same bits; int64 products wrap in torch
    weights = {
        device: torch.arange(1, 2 * longest, 2, device=device) * golden
        for device in {replica.bits.device for replica in replicas}
    }
    # One host sync per device: all hashes are computed before the first is read.
    hashes = to_host({r.name: _hash_bits(r.bits, weights[r.bits.device]) for r in replicas})
    by_holders: dict[str, int] = {}
    for replica in replicas:
        # Times an odd number of the box: two boxes with exchanged contents must not cancel out.
        total = by_holders.get(replica.holders, 0) + hashes[replica.name] * (replica.key | 1)
        by_holders[replica.holders] = total & MASK64
    by_rank = all_gather_objects(by_holders, axis)
    differing = {
        holders
        for holders in {key for local in by_rank for key in local}
        if len({local[holders] for local in by_rank if holders in local}) > 1
    }
    if not differing:
        return []
    by_name = {r.name: hashes[r.name] for r in replicas if r.holders in differing}
    values: dict[str, dict[int, int]] = {}
    for rank, local in enumerate(all_gather_objects(by_name, axis)):
        for name, value in local.items():
            values.setdefault(name, {})[rank] = value
    return [
        _describe(name, hashes_by_rank)
        for name, hashes_by_rank in values.items()
        if len(set(hashes_by_rank.values())) > 1
    ]


def _describe(name: str, hashes: Mapping[int, int]) -> str:
    """Return a sentence that names the ranks whose hash is not the majority's."""
    majority, count = Counter(hashes.values()).most_common(1)[0]
    if 2 * count <= len(hashes):
        ranks = " and ".join(f"rank {rank}" for rank in hashes)
        return f"{ranks} hold different values of {name}"
    odd = [rank for rank, value in hashes.items() if value != majority]
    others = format_ranks([rank for rank, value in hashes.items() if value == majority])
    verb = "holds" if len(odd) == 1 else "hold"
    return f"{format_ranks(odd)} {verb} other values of {name} than {others}"
