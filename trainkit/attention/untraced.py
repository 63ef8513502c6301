"""Attention that torch.compile leaves alone: it communicates, or reads host integers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from trainkit.types import Attend, Spans


def untraced(attend: Attend) -> Attend:
    """Return the same attention, which `torch.compile` runs as it is (one graph break).

    Examples:
        >>> from trainkit.attention import sdpa
        >>> from trainkit.batch import spans_from_rows
        >>> q, k, v = torch.randn(3, 1, 4, 2, 8)
        >>> spans = spans_from_rows(1, 4)
        >>> torch.equal(untraced(sdpa)(q, k, v, spans=spans), sdpa(q, k, v, spans=spans))
        True
    """

    def run(q: Tensor, k: Tensor, v: Tensor, *, spans: Spans, **how: Any) -> Tensor:
        if torch.compiler.is_compiling():
            # Applied here and not as a decorator: it imports torch._dynamo, 1.1 s (torch 2.13).
            return torch.compiler.disable(attend)(q, k, v, spans=spans, **how)
        return attend(q, k, v, spans=spans, **how)

    return run
