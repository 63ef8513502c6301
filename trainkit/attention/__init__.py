"""Attention functions: causal, inside each document of a packed batch.

Choose one and pass it to the model. Each is an `Attend` of `trainkit.types`, or makes one: `sdpa`
runs anywhere; `varlen` uses torch's kernel for packed documents on CUDA and `sdpa` elsewhere;
`flex` is one kernel for windows and soft caps too; `choose_kernel` returns the first of a list that
fits; `ring` and `ulysses` are for rows that are sharded over ranks.
"""

from __future__ import annotations

from trainkit.attention.choose import choose_kernel
from trainkit.attention.flex import flex
from trainkit.attention.ring import ring
from trainkit.attention.sdpa import sdpa
from trainkit.attention.ulysses import ulysses
from trainkit.attention.varlen import varlen

__all__ = [
    "choose_kernel",
    "flex",
    "ring",
    "sdpa",
    "ulysses",
    "varlen",
]
