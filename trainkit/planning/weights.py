"""How many elements and bytes of parameters the parts of a decoder have on a rank."""

from __future__ import annotations

import math
from functools import lru_cache

import attrs

from trainkit.models.config import DecoderConfig, parameter_shapes
from trainkit.types import Layout

FP32 = 4
"""Bytes of a number in fp32."""


@attrs.frozen
class Sizes:
    """Some parameters as one rank has them: how many elements, of which it owns a shard.

    Args:
        whole: Elements after tensor parallelism, gathered over FSDP.
        shard: Elements that the first rank of FSDP owns, which has the most.
        tensors: Number of parameters.
        largest: Elements of the largest one.
    """

    whole: int = 0
    shard: int = 0
    tensors: int = 0
    largest: int = 0

    def __add__(self, other: Sizes) -> Sizes:
        return Sizes(
            self.whole + other.whole,
            self.shard + other.shard,
            self.tensors + other.tensors,
            max(self.largest, other.largest),
        )

    def __mul__(self, times: int) -> Sizes:
        largest = self.largest if times else 0
        return Sizes(self.whole * times, self.shard * times, self.tensors * times, largest)


@attrs.frozen
class Units:
    """The parameters of one block, of the embedding, of the last norm, and of the output layer."""

    block: Sizes
    embedding: Sizes
    norm: Sizes
    head: Sizes


def units_of(config: DecoderConfig, layout: Layout) -> Units:
    """Return the sizes of a model's parts in a layout, exact to the element.

    Tensor parallelism divides the rows of wq, wk, wv, gate, up, embedding and head, and the columns
    of wo and down (Shoeybi et al., "Megatron-LM", 2019); FSDP2 cuts what is left along its first
    dimension, in parts of which the first are the larger ones (ZeRO stage 3: Rajbhandari et al.,
    "ZeRO", 2020).

    Examples:
        >>> from trainkit.models.sizes import decoder_config
        >>> units = units_of(decoder_config("tiny", vocab_size=259), Layout(dp_shard=2))
        >>> units.embedding
        Sizes(whole=33152, shard=16640, tensors=1, largest=33152)
    """
    return _units(config, layout.tp, layout.count("fsdp"))


@lru_cache(maxsize=256)
def _units(config: DecoderConfig, tp: int, fsdp: int) -> Units:
    shapes = parameter_shapes(attrs.evolve(config, layers=1))

    def total(prefix: str) -> Sizes:
        found = (
            _local(_tensor_parallel_shape(name, shape, tp), fsdp)
            for name, shape in shapes.items()
            if name.startswith(prefix)
        )
        return sum(found, Sizes())

    return Units(total("layers."), total("embedding."), total("norm."), total("head."))


def _tensor_parallel_shape(name: str, shape: tuple[int, ...], tp: int) -> tuple[int, ...]:
    if "norm" in name:
        return shape
    if name.endswith(("wo.weight", "down.weight")):
        return (shape[0], shape[1] // tp)
    return (shape[0] // tp, *shape[1:])


def _local(shape: tuple[int, ...], parts: int) -> Sizes:
    whole = math.prod(shape)
    rows = math.ceil(shape[0] / parts)
    return Sizes(whole, rows * math.prod(shape[1:]), 1, whole)
