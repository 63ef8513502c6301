"""Attention that `torch.compile` does not trace: it communicates, or reads host integers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

AnyAttend = TypeVar("AnyAttend", bound=Callable[..., Any])
"""The type of attention, or of what stands in its place."""


def untraced(attend: AnyAttend, *, recursive: bool = True) -> AnyAttend:
    """Return the same attention, which `torch.compile` does not trace (one graph break).

    Args:
        attend: An attention function.
        recursive: Whether functions that it calls are not compiled either.

    Examples:
        >>> from trainkit.attention import sdpa
        >>> from trainkit.batch import spans_from_rows
        >>> q, k, v = torch.randn(3, 1, 4, 2, 8)
        >>> spans = spans_from_rows(1, 4)
        >>> torch.equal(untraced(sdpa)(q, k, v, spans=spans), sdpa(q, k, v, spans=spans))
        True
    """

    def run(*args: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling():
            # Applied here and not as a decorator: it imports torch._dynamo, 1.1 s (torch 2.13).
            return torch.compiler.disable(attend, recursive=recursive)(*args, **options)
        return attend(*args, **options)

    return cast("AnyAttend", run)
