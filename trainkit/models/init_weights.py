"""Initial values of a decoder: a function of the seed, a name and an element's index."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trainkit.models.config import DecoderConfig, parameter_shapes
from trainkit.noise import counters
from trainkit.noise.hashing import make_key
from trainkit.types import Weights


def init_weights(config: DecoderConfig, *, seed: int) -> Weights:
    """Return the initial values of a decoder as a function of name and box.

    Norms are 1 (those of kind "offset" 0, the same scale), biases and sinks 0. Matrices, embeddings
    and the head are normal with variance 1 / (size of their last dimension), so that a normalized
    input keeps its scale; `wo` and `down`, which write into the residual stream, are divided by
    sqrt(2 * layers) (Radford et al., "Language models are unsupervised multitask learners", 2019).
    A fixed 0.02 for the embedding trains a small model worse: "tiny" on bytes of source text
    reached 2.17 nats on held-out text after 150 steps, in place of 1.79. The decay of delta layers
    begins as in Yang et al., "Gated Delta Networks" (2024): between almost all and a fifth of the
    state stays.

    Returns:
        A `Weights` function: fp32 on the CPU. An element is a function of the seed, the parameter's
        name and the element's index in the full parameter, so any box equals that part of the full
        parameter bit for bit. It raises a ValueError for a name that is no parameter of the
        decoder, and for a box outside the parameter.

    Examples:
        >>> config = DecoderConfig(
        ...     vocab_size=259, width=64, layers=2, heads=4, kv_heads=2, mlp_width=128
        ... )
        >>> weights = init_weights(config, seed=0)
        >>> full = weights("layers.1.mlp.up.weight", (128, 64), (0, 0))
        >>> torch.equal(full[32:, :16], weights("layers.1.mlp.up.weight", (96, 16), (32, 0)))
        True
    """
    shapes = parameter_shapes(config)

    def weights(name: str, shape: Sequence[int], offset: Sequence[int]) -> Tensor:
        if name not in shapes:
            raise ValueError(f"init_weights: {name!r} is no parameter of this decoder")
        # A box past the end would silently draw values that no full parameter has.
        full_shape = shapes[name]
        is_inside = len(shape) == len(offset) == len(full_shape) and all(
            start >= 0 and start + size <= full
            for size, start, full in zip(shape, offset, full_shape, strict=True)
        )
        if not is_inside:
            raise ValueError(
                f"init_weights: the box of shape {tuple(shape)} at {tuple(offset)} is not inside "
                f"{name}, which has shape {full_shape}"
            )
        if name.endswith("wa.log_rate"):  # rates uniform in (0, 16)
            return (8 + 8 * _uniform(name, shape, offset, seed)).log()
        if name.endswith("wa.bias"):  # their factors log-uniform from 0.001 to 0.1
            times = 10.0 ** (_uniform(name, shape, offset, seed) - 2)
            return times.expm1().log()  # of which softplus is the inverse
        if name.endswith("gated_norm.weight"):
            return torch.ones(tuple(shape))
        if name.endswith("norm.weight"):
            return torch.full(tuple(shape), 0.0 if config.norm_config.kind == "offset" else 1.0)
        if name.endswith(("bias", ".sinks")):
            return torch.zeros(tuple(shape))
        # Each layer adds two branches to the stream, whose variance would grow with the depth.
        is_residual = name.endswith((".wo.weight", ".down.weight", ".experts.down"))
        std = (full_shape[-1] * (2 * config.layers if is_residual else 1)) ** -0.5
        # A counter-based generator: an element's noise is a function of its index alone.
        return counters.normal(make_key(seed, name), shape, offset).mul_(std)

    return weights


def _uniform(name: str, shape: Sequence[int], offset: Sequence[int], seed: int) -> Tensor:
    """Return numbers inside (-1, 1)."""
    numbers = counters.uniform_symmetric(make_key(seed, name), shape, offset)
    return numbers.clamp(min=-0.999)
