"""Attention that `torch.compile` does not trace: it communicates, or reads host integers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from trainkit.types import Attend, Spans


def untraced(attend: Attend, *, recursive: bool = True) -> Attend:
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

    def run(q: Tensor, k: Tensor, v: Tensor, *, spans: Spans, **options: Any) -> Tensor:
        if torch.compiler.is_compiling():
            # Applied here and not as a decorator: it imports torch._dynamo, 1.1 s (torch 2.13).
            return torch.compiler.disable(attend, recursive=recursive)(
                q, k, v, spans=spans, **options
            )
        return attend(q, k, v, spans=spans, **options)

    return run
