"""Division of a step's sums by their denominator, one for all terms or one for each.

`batches.py` counts the denominators, over the global batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trainkit.types import Denominator


def make_divisors(denominator: Denominator) -> Denominator:
    """Return the denominators of a step with 1 in place of 0; call it once per step.

    Examples:
        >>> import torch
        >>> make_divisors(torch.tensor(0)), make_divisors({"loss": torch.tensor(0.3)})
        (tensor(1), {'loss': tensor(0.3000)})
    """
    if not isinstance(denominator, Tensor) and isinstance(denominator, Mapping):
        return {name: _replace_zero(x) for name, x in denominator.items()}
    return _replace_zero(denominator)


def _replace_zero(denominator: Tensor) -> Tensor:
    # A test or a notebook may give a plain number.
    x = denominator if isinstance(denominator, Tensor) else torch.as_tensor(denominator)
    # On a CPU looking at the value is cheaper than a kernel.
    if can_read_values(x) and not x.ndim and x.item() != 0:
        return x
    # On a device without a host sync.
    return torch.where(x == 0, 1, x)


def scale_denominator(denominator: Denominator, scale: Tensor | float | None) -> Denominator:
    """Return the denominator that multiplies all gradients by `scale`; None changes nothing.

    A loss scale enters a step here and leaves it in `clip_and_step`. Nothing between them has to
    know of it.

    Examples:
        >>> import torch
        >>> scale_denominator(torch.tensor(3), 2.0), scale_denominator(torch.tensor(3), None)
        (tensor(1.5000), tensor(3))
    """
    if scale is None:
        return denominator
    if isinstance(denominator, Mapping):
        return {name: x / scale for name, x in denominator.items()}
    return denominator / scale


def check_terms(returned: Any, *, by: str) -> Any:
    """Return the result of a loss; raise ValueError unless it is a sum with its terms.

    Args:
        returned: The result of `loss(output, batch)`.
        by: The function that called the loss, for the message.

    Raises:
        ValueError: It is not (sum, {name: sum}).

    Examples:
        >>> import torch
        >>> check_terms((torch.tensor(2.0), {"loss": torch.tensor(2.0)}), by="forward_backward")
        (tensor(2.), {'loss': tensor(2.)})
    """
    # The concrete types come first: isinstance with an abstract class is slow, and this runs once
    # per microbatch.
    if type(returned) is tuple and len(returned) == 2 and type(returned[1]) is dict:
        return returned
    if isinstance(returned, Sequence) and len(returned) == 2 and isinstance(returned[1], Mapping):
        return returned
    raise ValueError(
        f"{by}: a loss returns (sum, terms): the sum over the valid tokens, which is "
        "differentiated, and a dict of the sums to report; this one returned "
        f'{_describe(returned)}. With one term: `return total, {{"loss": total.detach()}}`'
    )


def _describe(returned: Any) -> str:
    if isinstance(returned, Tensor):
        return f"a tensor of shape {tuple(returned.shape)}"
    if isinstance(returned, Sequence) and not isinstance(returned, str):
        return f"({', '.join(map(_describe, returned[:4]))}{', ...' if len(returned) > 4 else ''})"
    return f"a `{type(returned).__name__}`"


def divide_terms(total: Tensor | Mapping[str, Tensor], divisors: Denominator) -> Tensor:
    """Return the scalar that a step differentiates: the sum of each term over its divisor.

    Args:
        total: The first value of a loss: one sum, or a sum for each term that has a gradient.
        divisors: One divisor, or one for each term, from `make_divisors`.

    Raises:
        ValueError: There are divisors for several terms and one sum, a term has none, or the sum is
            not a single number.

    Examples:
        >>> import torch
        >>> parts = {"loss": torch.tensor(6.0), "balance": torch.tensor(8.0)}
        >>> divide_terms(
        ...     parts, make_divisors({"loss": torch.tensor(2), "balance": torch.tensor(0)})
        ... )
        tensor(11.)
    """
    if isinstance(total, Tensor) and isinstance(divisors, Tensor) and total.numel() == 1:
        return total / divisors
    if isinstance(total, Mapping):
        first, *rest = (x / get_divisor(name, divisors) for name, x in total.items())
        return sum(rest, first)
    if isinstance(divisors, Mapping) and len(divisors) != 1:
        raise ValueError(
            f"forward_backward: there are {len(divisors)} denominators ({', '.join(divisors)}), "
            "but the loss returns one sum for all its terms"
        )
    if not isinstance(total, Tensor) or total.numel() != 1:
        raise ValueError(
            "forward_backward: the first value that a loss returns is the sum over the valid "
            f"tokens, one number; got {_describe(total)}"
        )
    # One divisor by name serves a loss with one sum, whatever its terms are called.
    (name,) = divisors if isinstance(divisors, Mapping) else ("",)
    return total / get_divisor(name, divisors)


def get_divisor(name: str, divisors: Denominator) -> Tensor:
    """Return the divisor of a term's sum: the only one, or the term's.

    Raises:
        ValueError: There are several divisors, and none for this term.

    Examples:
        >>> import torch
        >>> get_divisor("loss", torch.tensor(2)), get_divisor("loss", {"loss": torch.tensor(0.3)})
        (tensor(2), tensor(0.3000))
    """
    if not isinstance(divisors, Mapping):
        return divisors
    if name not in divisors:
        raise ValueError(
            f"there is no denominator for the term {name!r} (there are {', '.join(divisors)})"
        )
    return divisors[name]


def can_read_values(x: Tensor) -> bool:
    """Return whether reading the values of a tensor is possible and costs no host sync.

    Fake tensors have no values, and a branch on values breaks a compiled graph.

    Examples:
        >>> can_read_values(torch.zeros(1)), can_read_values(torch.zeros(1, device="meta"))
        (True, False)
    """
    return type(x) is Tensor and x.is_cpu and not torch.compiler.is_compiling()
