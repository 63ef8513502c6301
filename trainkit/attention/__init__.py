"""Causal attention inside each document of a packed batch: choose one and pass it to the model.

Every function here is an `Attend` of `trainkit.types`: `sdpa` runs anywhere, `varlen` uses torch's
kernel for packed documents on CUDA and `sdpa` elsewhere.
"""

from __future__ import annotations

from trainkit.attention.sdpa import sdpa
from trainkit.attention.varlen import varlen

__all__ = ["sdpa", "varlen"]
