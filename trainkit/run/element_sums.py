"""Sums over the elements of tensors, from which statistics of any union of them follow."""

from __future__ import annotations

import torch
from torch import Tensor

SQUARES, LARGEST, ZEROS, NONFINITE, COUNT = range(5)
"""The columns of sums: those of finite elements, and the largest of these, then three counts."""


def sum_elements(x: Tensor) -> Tensor:
    """Return the sums over the last dimension of a tensor, fp64 `[..., 5]`; it is not empty.

    Examples:
        >>> sum_elements(torch.tensor([3.0, 0.0, -4.0, torch.inf])).tolist()
        [25.0, 4.0, 1.0, 1.0, 4.0]
    """
    is_finite = x.isfinite()
    values = torch.where(is_finite, x, 0).double()
    columns = {
        SQUARES: values.square().sum(-1),
        LARGEST: values.abs().amax(-1),
        ZEROS: (x == 0).sum(-1),
        NONFINITE: is_finite.logical_not().sum(-1),
        COUNT: torch.full(x.shape[:-1], x.shape[-1], device=x.device),
    }
    return torch.stack([columns[i].double() for i in range(len(columns))], -1)


def merge_sums(sums: Tensor) -> Tensor:
    """Return the sums of a union, from those of its parts `[N, ..., 5]`.

    Examples:
        >>> merge_sums(
        ...     torch.tensor([[1.0, 1.0, 0.0, 0.0, 1.0], [4.0, 2.0, 1.0, 0.0, 2.0]])
        ... ).tolist()
        [5.0, 2.0, 1.0, 0.0, 3.0]
    """
    merged = sums.sum(0)
    if len(sums):
        merged[..., LARGEST] = sums[..., LARGEST].amax(0)
    return merged
