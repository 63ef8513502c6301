"""How many elements and bytes of parameters the parts of a decoder have on a rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
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
        whole: Elements after tensor parallelism and ep, gathered over FSDP.
        gathered: The same with what FSDP2 pads shards of unequal sizes with.
        shard: Elements that the first rank of FSDP owns, which has the most.
        tensors: Number of parameters.
        largest: Elements of the largest one.
    """

    whole: int = 0
    gathered: int = 0
    shard: int = 0
    tensors: int = 0
    largest: int = 0

    def __add__(self, other: Sizes) -> Sizes:
        return Sizes(
            self.whole + other.whole,
            self.gathered + other.gathered,
            self.shard + other.shard,
            self.tensors + other.tensors,
            max(self.largest, other.largest),
        )

    def __mul__(self, times: int) -> Sizes:
        return Sizes(
            self.whole * times,
            self.gathered * times,
            self.shard * times,
            self.tensors * times,
            self.largest if times else 0,
        )


@attrs.frozen
class Units:
    """The parameters of a model's parts.

    Args:
        attention: Attention and all norms of one block.
        partial: What of these tensor parallelism leaves whole: norms, a bias of the output, and
            what makes latents.
        mlp: The MLP of a block without experts; nothing if there is none.
        mlp_partial: What of it tensor parallelism leaves whole: a bias of the output.
        experts: What is in its place in one with experts, but what is dealt; nothing if there is
            none.
        dealt: The experts of one block that a rank of ep holds; nothing without ep.
        embedding: The embedding.
        positions: Learned positions; nothing if there are none.
        norm: The last norm.
        head: The output layer.
    """

    attention: Sizes
    partial: Sizes
    mlp: Sizes
    mlp_partial: Sizes
    experts: Sizes
    dealt: Sizes
    embedding: Sizes
    positions: Sizes
    norm: Sizes
    head: Sizes

    def blocks(self, layers: int, experts: int) -> Sizes:
        """Return so many blocks, some of which have experts, without what is dealt."""
        mlps = self.mlp * (layers - experts) + self.experts * experts
        return self.attention * layers + mlps


def units_of(config: DecoderConfig, layout: Layout) -> Units:
    """Return the sizes of a model's parts in a layout, exact to the element.

    Tensor parallelism divides the rows of wq, wk, wv, wkv, gate, up, embedding and head, and the
    columns of wo and down (Shoeybi et al., "Megatron-LM", 2019); FSDP2 cuts what is left along its
    first dimension, in parts of which the first are the larger ones (ZeRO stage 3: Rajbhandari et
    al., "ZeRO", 2020). Expert layers, and what makes latents, are whole for tensor parallelism.
    Without ep their experts are cut with the rest of the block, a whole expert at least; with it
    those of a rank are cut over expert_fsdp, as `parallel.fsdp` says.

    Examples:
        >>> from trainkit.models.sizes import decoder_config
        >>> units = units_of(decoder_config("tiny", vocab_size=259), Layout(dp_shard=2))
        >>> units.embedding
        Sizes(whole=33152, gathered=33280, shard=16640, tensors=1, largest=33152)
    """
    return _units(config, layout.tp, layout.count("fsdp"), layout.ep)


@lru_cache(maxsize=256)
def _units(config: DecoderConfig, tp: int, fsdp: int, ep: int) -> Units:
    shapes = parameter_shapes(config)
    with_experts = config.expert_layers
    dense = next((i for i in range(config.layers) if i not in with_experts), None)
    routed = next(iter(with_experts), None)

    wide = config.qk_norm == "wide"

    def total(*prefixes: str, cut: int = 1, whole: bool = False) -> Sizes:
        parts = [(name, shape) for name, shape in shapes.items() if name.startswith(prefixes)]
        parts = [(name, shape) for name, shape in parts if not whole or _is_whole(name, wide)]
        shards = (_tensor_parallel_shape(name, shape, cut, wide) for name, shape in parts)
        return sum((_local(shard, fsdp) for shard in shards), Sizes())

    experts, dealt = total(f"layers.{routed}.mlp."), Sizes()
    if ep > 1:
        names = [f"layers.{routed}.mlp.experts.{name}" for name in ("gate", "up", "down")]
        own = [(shapes[name][0] // ep, *shapes[name][1:]) for name in names]
        dealt = _dealt(own, fsdp // ep)
        experts = total(f"layers.{routed}.mlp.router.") + total(f"layers.{routed}.mlp.shared.")
    attention = "layers.0.attention", "layers.0.mlp_norm.", "layers.0.mlp_out_norm."
    return Units(
        attention=total(*attention, cut=tp),
        partial=total(*attention, whole=True),
        mlp=total(f"layers.{dense}.mlp.", cut=tp),
        mlp_partial=total(f"layers.{dense}.mlp.", whole=True),
        experts=experts,
        dealt=dealt,
        embedding=total("embedding.", cut=tp),
        positions=total("positions."),
        norm=total("norm."),
        head=total("head.", cut=tp),
    )


def _dealt(shapes: Sequence[tuple[int, ...]], parts: int) -> Sizes:
    """Return the experts of a rank of ep, cut by whole experts, or each, if that divides them."""
    even = (dim for dim in (0, 1) if all(shape[dim] % parts == 0 for shape in shapes))
    dim = next(even, 0)
    return sum((_local(shape, parts, dim=dim) for shape in shapes), Sizes())


def _is_whole(name: str, wide: bool) -> bool:
    """Say whether tensor parallelism leaves a parameter of a block whole."""
    if wide and name.endswith(("q_norm.weight", "k_norm.weight")):
        return False
    parts = "norm", "_latent", "k_rotary", "wo.bias", "down.bias", "positions"
    return any(part in name for part in parts)


def _tensor_parallel_shape(
    name: str, shape: tuple[int, ...], tp: int, wide: bool
) -> tuple[int, ...]:
    if _is_whole(name, wide):
        return shape
    if name.endswith(("wo.weight", "down.weight")):
        return (shape[0], shape[1] // tp)
    return (shape[0] // tp, *shape[1:])


def _local(shape: tuple[int, ...], parts: int, *, dim: int = 0) -> Sizes:
    whole = math.prod(shape)
    shard = math.ceil(shape[dim] / parts) * whole // shape[dim]
    return Sizes(whole, shard * parts, shard, 1, whole)
