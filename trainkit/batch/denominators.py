"""What a step's sums are divided by: counts of the global batch, one for all terms or one each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trainkit.types import Denominator


def make_divisors(denominator: Denominator) -> Denominator:
    """Return what sums are divided by: each denominator, or 1 where it is 0. Once a step will do.

    Examples:
        >>> import torch
        >>> make_divisors(torch.tensor(0)), make_divisors({"loss": torch.tensor(0.3)})
        (tensor(1), {'loss': tensor(0.3000)})
    """
    if not isinstance(denominator, Tensor) and isinstance(denominator, Mapping):
        return {name: _never_0(own) for name, own in denominator.items()}
    return _never_0(denominator)


def _never_0(denominator: Tensor) -> Tensor:
    own = denominator if isinstance(denominator, Tensor) else torch.as_tensor(denominator)
    if on_host(own) and not own.ndim and own.item() != 0:
        return own
    return torch.where(own == 0, 1, own)


def scale_denominator(denominator: Denominator, scale: Tensor | float | None) -> Denominator:
    """Return the denominator that makes all gradients come out times a scale; None leaves it.

    That is how a loss scale enters: nothing else of a step has to know, but who takes it out again,
    `clip_and_step`.

    Examples:
        >>> import torch
        >>> scale_denominator(torch.tensor(3), 2.0), scale_denominator(torch.tensor(3), None)
        (tensor(1.5000), tensor(3))
    """
    if scale is None:
        return denominator
    if isinstance(denominator, Mapping):
        return {name: own / scale for name, own in denominator.items()}
    return denominator / scale


def check_terms(returned: Any, *, by: str) -> Any:
    """Return what a loss returned, or refuse it where that is no sum with its terms.

    Args:
        returned: What `loss(output, batch)` gave.
        by: The function that called it, for the message.

    Raises:
        ValueError: It is not (sum, {name: sum}).

    Examples:
        >>> import torch
        >>> check_terms((torch.tensor(2.0), {"loss": torch.tensor(2.0)}), by="forward_backward")
        (tensor(2.), {'loss': tensor(2.)})
    """
    # The types that nearly all losses return come first: an abstract class is slow to ask.
    if type(returned) is tuple and len(returned) == 2 and type(returned[1]) is dict:
        return returned
    if isinstance(returned, Sequence) and len(returned) == 2 and isinstance(returned[1], Mapping):
        return returned
    raise ValueError(
        f"{by}: a loss returns (sum, terms): the sum over the valid tokens, which is "
        f"differentiated, and a dict of the sums to report; this one returned {_shown(returned)}. "
        'With one term: `return total, {"loss": total.detach()}`'
    )


def _shown(returned: Any) -> str:
    if isinstance(returned, Tensor):
        return f"a tensor of shape {tuple(returned.shape)}"
    if isinstance(returned, Sequence) and not isinstance(returned, str):
        return f"({', '.join(map(_shown, returned[:4]))}{', ...' if len(returned) > 4 else ''})"
    return f"a `{type(returned).__name__}`"


def divide_terms(total: Tensor | Mapping[str, Tensor], divisors: Denominator) -> Tensor:
    """Return what a step differentiates: the sum of each term over its divisor.

    Args:
        total: What a loss returns first: one sum, or a sum for each term that has a gradient.
        divisors: What it is divided by, or each of them, from `make_divisors`.

    Raises:
        ValueError: There are divisors for several terms and one sum, a term has none, or the sum is
            no single number.

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
        got = f"{len(divisors)} denominators ({', '.join(divisors)})"
        raise ValueError(f"forward_backward: {got}, but the loss returns one sum for all its terms")
    if not isinstance(total, Tensor) or total.numel() != 1:
        raise ValueError(
            "forward_backward: the first value that a loss returns is the sum over the valid "
            f"tokens, one number; got {_shown(total)}"
        )
    (name,) = divisors if isinstance(divisors, Mapping) else ("",)
    return total / get_divisor(name, divisors)


def get_divisor(name: str, divisors: Denominator) -> Tensor:
    """Return what the sum of a term is divided by: the one divisor that there is, or its own.

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
        known = ", ".join(divisors)
        raise ValueError(f"there is no denominator for the term {name!r} (there are {known})")
    return divisors[name]


def on_host(x: Tensor) -> bool:
    """Say whether looking at the values of a tensor costs no sync, and can be done here.

    Fake tensors have none, and a branch on values would break a compiled graph.

    Examples:
        >>> on_host(torch.zeros(1)), on_host(torch.zeros(1, device="meta"))
        (True, False)
    """
    return type(x) is Tensor and x.is_cpu and not torch.compiler.is_compiling()
