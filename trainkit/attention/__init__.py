"""Causal attention inside each document of a packed batch: choose one and pass it to the model.

Every function here is an `Attend` of `trainkit.types`, or makes one: `sdpa` runs anywhere, `varlen`
uses torch's kernel for packed documents on CUDA and `sdpa` elsewhere; `flex` is one kernel for
windows and soft caps too; `choose_kernel` takes the first of a list that fits, and says why; `ring`
and `ulysses` attend over rows of which each rank holds a part.
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
