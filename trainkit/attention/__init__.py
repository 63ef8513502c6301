"""Causal attention inside each document of a packed batch: choose one and pass it to the model.

Every function here is an `Attend` of `trainkit.types`, or makes one: `sdpa` runs anywhere, `varlen`
uses torch's kernel for packed documents on CUDA and `sdpa` elsewhere; `ring` and `ulysses` attend
over rows of which each rank holds a part.
"""

from __future__ import annotations

from trainkit.attention.blocks import BlockKernel, BlockSpans, kernel_for, merge_lse
from trainkit.attention.ring import ring
from trainkit.attention.sdpa import sdpa
from trainkit.attention.ulysses import ulysses
from trainkit.attention.varlen import varlen

__all__ = [
    "BlockKernel",
    "BlockSpans",
    "kernel_for",
    "merge_lse",
    "ring",
    "sdpa",
    "ulysses",
    "varlen",
]
