"""Text from a model: one token after the other, for several prompts at once.

`sampling` makes a distribution of logits and draws from it, in functions of tensors; `text` turns
tokens into text while they come, and finds the strings that end it; `generate` is the loop. What a
decoder keeps of the tokens before is `models.Cache`.
"""

from __future__ import annotations

from trainkit.generation.generate import Completion, generate
from trainkit.generation.sampling import Sampling, draw, next_tokens, repetition_penalty, shaped
from trainkit.losses.shaping import min_p, temperature, top_k, top_p

__all__ = [
    "Completion",
    "Sampling",
    "draw",
    "generate",
    "min_p",
    "next_tokens",
    "repetition_penalty",
    "shaped",
    "temperature",
    "top_k",
    "top_p",
]
