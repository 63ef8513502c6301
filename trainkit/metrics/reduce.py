"""One all-reduce for all values of a step, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from trainkit.collectives import get_compute_device, start_all_sum
from trainkit.noise.hashing import make_key
from trainkit.types import Axis


def reduce_metrics(sums: Mapping[str, Tensor], axis: Axis) -> dict[str, Tensor]:
    """All-reduce sums by name, with one collective for all of them.

    The values are sent as one fp64 tensor, in the order of their sorted names, and are returned in
    their dtype. So integers are exact up to 2^53. Nothing is divided, and there is no host sync.

    Every rank must pass the same names, with a 0 where it has no value. If up to 255 names differ,
    all ranks raise ValueError on a CPU, without a deadlock. On other devices all values are NaN,
    because a check would need a host sync.

    Args:
        sums: A tensor per name.
        axis: The ranks to sum over.

    Returns:
        A new dict, on the device that the ranks of the axis compute on. On an axis of size 1 its
        values are the detached inputs.

    Raises:
        ValueError: On all ranks, if ranks passed different names, or values of different shapes.

    Effects:
        Communicates: one all-reduce on `axis`; none if its size is 1.

    Examples:
        >>> import torch
        >>> from trainkit.mesh import solo_parallel
        >>> reduce_metrics({"loss": torch.tensor(6.0)}, solo_parallel().loss)
        {'loss': tensor(6.)}
    """
    sums = {name: x.detach() if x.requires_grad else x for name, x in sums.items()}
    if axis.count == 1:
        return sums
    # All ranks must send from the same device.
    sums = {name: x.to(get_compute_device(axis)) for name, x in sums.items()}
    totals = start_packed_sum("reduce_metrics", sums, axis)()
    return {name: totals[name].to(x.dtype) for name, x in sums.items()}


def start_packed_sum(
    by: str, sums: Mapping[str, Tensor], axis: Axis
) -> Callable[[], dict[str, Tensor]]:
    """Start one all-reduce of tensors by name, and return a function that waits for the totals.

    Args:
        by: The function to name in errors.
        sums: A tensor per name, on the device that the ranks compute on.
        axis: The ranks to sum over.

    Returns:
        A function that returns the fp64 totals by name. If names or shapes differ between ranks, it
        raises ValueError on all of them on a CPU, and returns NaN on other devices.

    Effects:
        Communicates: one all-reduce on `axis`.

    Examples:
        >>> import torch
        >>> from trainkit.types import SOLO
        >>> start_packed_sum("mine", {"loss": torch.tensor(6.0)}, SOLO)()
        {'loss': tensor(6., dtype=torch.float64)}
    """
    names = sorted(sums)
    shapes = [str(tuple(sums[name].shape)) for name in names]
    sizes = [sums[name].numel() for name in names]
    device = get_compute_device(axis)
    # Gloo aborts the process when sizes differ, so the buffer is padded to a multiple of 256.
    packed = torch.zeros(-(-(1 + sum(sizes)) // 256) * 256, dtype=torch.float64, device=device)
    key = make_key(*names, *shapes) >> 32  # 32 bits: the sum over 2^21 ranks is exact
    packed[0].fill_(key)  # packed[0] = key would be a copy from the host, with a sync
    if names:
        flat = torch.cat([sums[name].double().flatten() for name in names])
        packed[1 : 1 + len(flat)] = flat
    wait = start_all_sum(packed, axis)

    def finish() -> dict[str, Tensor]:
        total = wait()
        # Keys are hashes: others add up to the same sum with a chance of about 2^-32.
        agreed = total[0] == key * axis.count
        if device.type == "cpu" and not agreed:
            raise ValueError(
                f"{by}: the ranks of {axis.name!r} passed different names, here {names}; "
                "pass the same names on all of them, with a 0 where a rank has no value"
            )
        values = torch.where(agreed, total, torch.nan)[1 : 1 + sum(sizes)].split(sizes)
        return {name: x.view(sums[name].shape) for name, x in zip(names, values, strict=True)}

    return finish
