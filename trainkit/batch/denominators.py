"""What a step's sums are divided by: counts of the global batch, one for all terms or one each."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from trainkit.types import Denominator


def divided(total: Tensor | Mapping[str, Tensor], denominator: Denominator) -> Tensor:
    """Return what a step differentiates: the sum of each term over its denominator.

    Args:
        total: What a loss returns first: one sum, or a sum for each term that has a gradient.
        denominator: What it is divided by, or each of them; 0 divides by 1, all else by itself.

    Raises:
        ValueError: There are denominators for several terms and one sum, or a term has none.

    Examples:
        >>> import torch
        >>> parts = {"loss": torch.tensor(6.0), "balance": torch.tensor(8.0)}
        >>> divided(parts, {"loss": torch.tensor(2), "balance": torch.tensor(0)})
        tensor(11.)
    """
    if isinstance(total, Mapping):
        first, *rest = (x / divisor_of(name, denominator) for name, x in total.items())
        return sum(rest, first)
    if isinstance(denominator, Mapping) and len(denominator) != 1:
        got = f"{len(denominator)} denominators ({', '.join(denominator)})"
        raise ValueError(f"forward_backward: {got}, but the loss returns one sum for all its terms")
    (name,) = denominator if isinstance(denominator, Mapping) else ("",)
    return total / divisor_of(name, denominator)


def divisor_of(name: str, denominator: Denominator) -> Tensor:
    """Return what the sum of a term is divided by: its denominator, or 1 where that is 0.

    Raises:
        ValueError: There are several denominators, and none for this term.

    Examples:
        >>> import torch
        >>> divisor_of("loss", torch.tensor(0)), divisor_of("loss", {"loss": torch.tensor(0.3)})
        (tensor(1), tensor(0.3000))
    """
    if isinstance(denominator, Mapping) and name not in denominator:
        known = ", ".join(denominator)
        raise ValueError(f"there is no denominator for the term {name!r} (there are {known})")
    own = torch.as_tensor(denominator[name] if isinstance(denominator, Mapping) else denominator)
    return torch.where(own == 0, 1, own)
