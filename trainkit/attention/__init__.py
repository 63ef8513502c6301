"""Attention functions: causal, inside each document of a packed batch.

Choose one and pass it to the model. Each is an `Attend` of `trainkit.types`, or makes one: `sdpa`
runs anywhere; `varlen` uses torch's kernel for packed documents on CUDA and `sdpa` elsewhere;
`flex` is one kernel for windows and soft caps too; `choose_kernel` returns the first of a list that
fits; `ring` and `ulysses` are for rows that are sharded over ranks.

`gated_delta` is a recurrence in place of attention, and `causal_conv` what comes before it; both
have a form for a ring. `attend_delta` is both together, as a layer of a decoder calls them.
"""

from __future__ import annotations

from trainkit.attention.attend_delta import attend_delta, ulysses_delta
from trainkit.attention.causal_conv import causal_conv
from trainkit.attention.choose import choose_kernel
from trainkit.attention.flex import flex
from trainkit.attention.gated_delta import gated_delta, step_gated_delta
from trainkit.attention.ring import ring
from trainkit.attention.ring_delta import ring_causal_conv, ring_gated_delta
from trainkit.attention.sdpa import sdpa
from trainkit.attention.sinks import add_sink
from trainkit.attention.ulysses import ulysses
from trainkit.attention.varlen import varlen

__all__ = [
    "add_sink",
    "attend_delta",
    "causal_conv",
    "choose_kernel",
    "flex",
    "gated_delta",
    "ring",
    "ring_causal_conv",
    "ring_gated_delta",
    "sdpa",
    "step_gated_delta",
    "ulysses",
    "ulysses_delta",
    "varlen",
]
