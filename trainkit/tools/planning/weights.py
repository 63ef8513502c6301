"""Elements and bytes of a decoder's parameters on a rank, by parts of the model."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

import attrs
import torch
from torch import nn

from trainkit.mesh import solo_parallel
from trainkit.models.config import DecoderConfig, parameter_shapes
from trainkit.models.decoder import Decoder
from trainkit.optim.storage import BLOCK
from trainkit.parallel.parameters import Kind, get_kind, get_named_parameters
from trainkit.post.adapters.frozen import SCALES
from trainkit.tools.planning.jobs import Job
from trainkit.types import Layout, ModelTransform


@attrs.frozen
class Sizes:
    """Numbers of elements of some parameters on one rank.

    Args:
        whole: Elements after tensor parallelism and ep, gathered over FSDP.
        gathered: The same with FSDP2's padding of shards of unequal sizes.
        shard: Elements of the first rank of FSDP, which has the largest shard.
        tensors: Number of parameters.
        largest: Elements of the largest one.
        short: Elements of the shard in vectors, or in rows that blocks of moments in 8 bits do not
            divide.
    """

    whole: int = 0
    gathered: int = 0
    shard: int = 0
    tensors: int = 0
    largest: int = 0
    short: int = 0

    def __add__(self, other: Sizes) -> Sizes:
        return Sizes(
            self.whole + other.whole,
            self.gathered + other.gathered,
            self.shard + other.shard,
            self.tensors + other.tensors,
            max(self.largest, other.largest),
            self.short + other.short,
        )

    def __mul__(self, times: int) -> Sizes:
        return Sizes(
            self.whole * times,
            self.gathered * times,
            self.shard * times,
            self.tensors * times,
            self.largest if times else 0,
            self.short * times,
        )


@attrs.frozen
class Params:
    """Sizes of some parameters on one rank, by kind.

    Args:
        trained: Trainable parameters, with gradients and optimizer state.
        frozen: Frozen parameters.
        packed: Bytes of quantized matrices.
    """

    trained: Sizes = Sizes()
    frozen: Sizes = Sizes()
    packed: Sizes = Sizes()

    def __add__(self, other: Params) -> Params:
        return Params(
            self.trained + other.trained,
            self.frozen + other.frozen,
            self.packed + other.packed,
        )

    def __mul__(self, times: int) -> Params:
        return Params(self.trained * times, self.frozen * times, self.packed * times)

    def nbytes(self, itemsize: int) -> int:
        """Return the bytes of this rank's shard where a number takes `itemsize` of them."""
        return (self.trained.shard + self.frozen.shard) * itemsize + self.packed.shard

    def gathered(self, itemsize: int) -> int:
        """Return the bytes of all of it where a number takes `itemsize` of them."""
        return (self.trained.gathered + self.frozen.gathered) * itemsize + self.packed.gathered


@attrs.frozen
class Layer:
    """The parameters of one block.

    Args:
        block: All but experts that are sharded over ep.
        sharded_experts: The experts of a rank of ep; nothing without ep.
        whole: Parameters that tensor parallelism replicates, and whose gradients it all-reduces:
            norms, a bias of the output, projections to latents, one of an adapter's two matrices,
            experts.
    """

    block: Params
    sharded_experts: Params
    whole: Params


@attrs.frozen
class Units:
    """The parameters of a model's parts.

    Args:
        layers: The kinds of blocks that there are.
        kinds: Of which kind each block is.
        embedding: The embedding.
        positions: Learned positions; nothing if there are none.
        norm: The last norm.
        head: The output layer; nothing if it is the embedding.
    """

    layers: tuple[Layer, ...]
    kinds: tuple[int, ...]
    embedding: Params
    positions: Params
    norm: Params
    head: Params

    @property
    def first_trained(self) -> int:
        """The number of the first block that a gradient reaches; how many there are, if none."""
        if (self.embedding + self.positions).trained.whole:
            return 0
        trained = [bool((x.block + x.sharded_experts).trained.whole) for x in self.layers]
        return next((i for i, kind in enumerate(self.kinds) if trained[kind]), len(self.kinds))

    def counts(self, numbers: Sequence[int]) -> list[tuple[Layer, int]]:
        """Return the kinds of some blocks, each with its number."""
        found = Counter(self.kinds[number] for number in numbers)
        return [(self.layers[kind], many) for kind, many in found.items()]

    def blocks(self, numbers: Sequence[int]) -> Params:
        """Return some blocks, without experts that are sharded over ep."""
        return sum((layer.block * many for layer, many in self.counts(numbers)), Params())

    def sharded_experts(self, numbers: Sequence[int]) -> Params:
        """Return the experts of some blocks that are sharded over ep."""
        return sum((layer.sharded_experts * many for layer, many in self.counts(numbers)), Params())

    def whole(self, numbers: Sequence[int]) -> Params:
        """Return the parameters of some blocks that tensor parallelism replicates."""
        return sum((layer.whole * many for layer, many in self.counts(numbers)), Params())


_Parameter = tuple[str, tuple[int, ...], Kind]
_OfJob = tuple[DecoderConfig, tuple[ModelTransform, ...], frozenset[str]]


def compute_units(job: Job, layout: Layout) -> Units:
    """Return the sizes of a model's parts in a layout, exact to the element.

    Tensor parallelism divides the rows of wq, wk, wv, wkv, gate, up, embedding and head, and the
    columns of wo and down (Shoeybi et al., "Megatron-LM", 2019), and an adapter as its matrix: of B
    the rows, or of A the columns. FSDP2 cuts what is left along its first dimension, in parts of
    which the first are the larger ones (ZeRO stage 3: Rajbhandari et al., "ZeRO", 2020). Expert
    layers, and what makes latents, are whole for tensor parallelism. Without ep their experts are
    cut with the rest of the block, a whole expert at least; with it those of a rank are cut over
    expert_fsdp, as `parallel.fsdp` says.

    Examples:
        >>> from trainkit.models.decoder_sizes import make_decoder_config
        >>> job = Job(config=make_decoder_config("tiny", vocab_size=259), row_length=8, rows=8)
        >>> compute_units(job, Layout(dp_shard=2)).embedding.trained
        Sizes(whole=33152, gathered=33280, shard=16640, tensors=1, largest=33152, short=16640)
    """
    of_job = job.config, job.begins, job.frozen
    return _compute_units(of_job, layout.tp, layout.count("fsdp"), layout.ep)


@lru_cache(maxsize=16)
def _list_parameters(
    config: DecoderConfig, begins: tuple[ModelTransform, ...], frozen: frozenset[str]
) -> tuple[_Parameter, ...]:
    """Return all parameters of the whole model: of adapters too, and of codes the bytes."""
    if not begins:
        shapes = parameter_shapes(config)
        return tuple((x, shapes[x], "frozen" if x in frozen else "trained") for x in shapes)
    with torch.device("meta"):
        model: nn.Module = Decoder(config)
        for transform in begins:
            model = transform(model, solo_parallel())
    return tuple(
        (name, tuple(p.shape), get_kind(p.detach() if name in frozen else p))
        for name, p in get_named_parameters([model]).items()
    )


@lru_cache(maxsize=256)
def _compute_units(of_job: _OfJob, tp: int, fsdp: int, ep: int) -> Units:
    config = of_job[0]
    wide = config.qk_norm == "wide"
    of_layers: dict[int, list[_Parameter]] = {i: [] for i in range(config.layers)}
    ends: dict[str, Params] = {}
    for name, shape, kind in _list_parameters(*of_job):
        if found := re.match(r"layers\.(\d+)\.(.+)", name):
            of_layers[int(found[1])].append((found[2], shape, kind))
        else:
            part, cut = name.partition(".")[0], _find_tp_dim(name, wide)
            own = _make_sizes(_shard_shape(shape, cut, tp), kind, fsdp)
            ends[part] = ends.get(part, Params()) + own
    distinct: dict[tuple[bool, tuple[_Parameter, ...]], int] = {}
    kinds = tuple(
        distinct.setdefault((i in config.expert_layers, tuple(own)), len(distinct))
        for i, own in of_layers.items()
    )
    layers = (
        _make_layer(own, wide=wide, routed=routed, tp=tp, fsdp=fsdp, ep=ep)
        for routed, own in distinct
    )
    parts = (ends.get(part, Params()) for part in ("embedding", "positions", "norm", "head"))
    return Units(tuple(layers), kinds, *parts)


def _make_layer(
    parameters: Sequence[_Parameter], *, wide: bool, routed: bool, tp: int, fsdp: int, ep: int
) -> Layer:
    block, sharded, whole = Params(), Params(), Params()
    of_rank = [
        (shape[0] // ep, *shape[1:])
        for name, shape, _ in parameters
        if _is_sharded_expert(name, ep)
    ]
    even = (dim for dim in (0, 1) if all(shape[dim] % (fsdp // ep) == 0 for shape in of_rank))
    dim = next(even, 0)  # by whole experts, or each, if that divides them
    for name, shape, kind in parameters:
        cut = None if routed and name.startswith("mlp.") else _find_tp_dim(name, wide)
        if _is_sharded_expert(name, ep):
            own = _make_sizes((shape[0] // ep, *shape[1:]), kind, fsdp // ep, dim=dim)
            sharded += own
        else:
            own = _make_sizes(_shard_shape(shape, cut, tp), kind, fsdp)
            block += own
        whole += own if cut is None else Params()
    return Layer(block, sharded, whole)


def _is_sharded_expert(name: str, ep: int) -> bool:
    return ep > 1 and name.startswith("mlp.experts.")


def _find_tp_dim(name: str, wide: bool) -> int | None:
    """Return the dimension along which tensor parallelism cuts a parameter, None for whole ones."""
    matrix, _, adapter = name.partition(".lora.")
    if adapter:
        dim, key = _find_tp_dim(f"{matrix}.weight", wide), adapter.rpartition(".")[2]
        return dim if (dim, key) in ((0, "b"), (0, "magnitude"), (1, "a")) else None
    if name.endswith(SCALES):
        dim = _find_tp_dim(name.removesuffix(SCALES), wide)
        return dim if dim == 0 else None
    if wide and name.endswith(("q_norm.weight", "k_norm.weight")):
        return 0
    parts = "norm", "_latent", "k_rotary", "wo.bias", "down.bias", "positions"
    if any(part in name for part in parts):
        return None
    return 1 if name.endswith(("wo.weight", "down.weight")) else 0


def _shard_shape(shape: tuple[int, ...], dim: int | None, parts: int) -> tuple[int, ...]:
    return tuple(size // parts if i == dim else size for i, size in enumerate(shape))


def _make_sizes(shape: tuple[int, ...], kind: Kind, parts: int, *, dim: int = 0) -> Params:
    whole = math.prod(shape)
    shard = math.ceil(shape[dim] / parts) * whole // shape[dim]
    short = shard if len(shape) < 2 or shape[-1] % BLOCK else 0
    return Params(**{kind: Sizes(whole, shard * parts, shard, 1, whole, short)})
