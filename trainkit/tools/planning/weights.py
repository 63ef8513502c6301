"""Count the elements of a decoder's parameters on a rank, by part of the model."""

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
from trainkit.parallel.parameters import ParameterKind, get_named_parameters, get_parameter_kind
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
        short: Elements of the shard in vectors, or in rows that the blocks of 8-bit moments do not
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
            whole=self.whole + other.whole,
            gathered=self.gathered + other.gathered,
            shard=self.shard + other.shard,
            tensors=self.tensors + other.tensors,
            largest=max(self.largest, other.largest),
            short=self.short + other.short,
        )

    def __mul__(self, times: int) -> Sizes:
        return Sizes(
            whole=self.whole * times,
            gathered=self.gathered * times,
            shard=self.shard * times,
            tensors=self.tensors * times,
            # The largest of several equal tensors is as large as one.
            largest=self.largest if times else 0,
            short=self.short * times,
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
        """Return the bytes of this rank's shard, with `itemsize` bytes an element."""
        return (self.trained.shard + self.frozen.shard) * itemsize + self.packed.shard

    def gathered(self, itemsize: int) -> int:
        """Return the bytes after an all-gather, with `itemsize` bytes an element."""
        return (self.trained.gathered + self.frozen.gathered) * itemsize + self.packed.gathered


@attrs.frozen
class Layer:
    """The parameters of one block.

    Args:
        block: All but experts that are sharded over ep.
        sharded_experts: The experts of a rank of ep; empty without ep.
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
        layers: The distinct blocks.
        kinds: For each block the index of its kind in `layers`.
        embedding: The embedding.
        positions: Learned positions, or empty.
        norm: The last norm.
        head: The output layer; empty if it is tied to the embedding.
    """

    layers: tuple[Layer, ...]
    kinds: tuple[int, ...]
    embedding: Params
    positions: Params
    norm: Params
    head: Params

    @property
    def first_trained(self) -> int:
        """The index of the first block that a gradient reaches, or the number of blocks."""
        # The gradient of the embedding passes through all blocks.
        if (self.embedding + self.positions).trained.whole:
            return 0
        is_trained = [bool((x.block + x.sharded_experts).trained.whole) for x in self.layers]
        trained = (i for i, kind in enumerate(self.kinds) if is_trained[kind])
        return next(trained, len(self.kinds))

    def counts(self, numbers: Sequence[int]) -> list[tuple[Layer, int]]:
        """Return the distinct blocks among some, each with its count."""
        counts = Counter(self.kinds[number] for number in numbers)
        return [(self.layers[kind], count) for kind, count in counts.items()]

    def blocks(self, numbers: Sequence[int]) -> Params:
        """Return some blocks, without experts that are sharded over ep."""
        return sum((layer.block * count for layer, count in self.counts(numbers)), Params())

    def sharded_experts(self, numbers: Sequence[int]) -> Params:
        """Return the experts of some blocks that are sharded over ep."""
        counts = self.counts(numbers)
        return sum((layer.sharded_experts * count for layer, count in counts), Params())

    def whole(self, numbers: Sequence[int]) -> Params:
        """Return the parameters of some blocks that tensor parallelism replicates."""
        return sum((layer.whole * count for layer, count in self.counts(numbers)), Params())


# A parameter's name (within its block, if it has one), its full shape, and its kind.
_Parameter = tuple[str, tuple[int, ...], ParameterKind]
# What the parameters of a model depend on: hashable, for the caches below.
_ModelKey = tuple[DecoderConfig, tuple[ModelTransform, ...], frozenset[str]]


def compute_units(job: Job, layout: Layout) -> Units:
    """Return the sizes of a model's parts in a layout, exact to the element.

    Tensor parallelism divides the rows of wq, wk, wv, wkv, gate, up, embedding and head, and the
    columns of wo and down (Shoeybi et al., "Megatron-LM", 2019), and an adapter like its matrix:
    the rows of B, or the columns of A. It replicates expert layers and projections to latents.
    FSDP2 shards the results along their first dimension, with the larger shards first (ZeRO stage
    3: Rajbhandari et al., "ZeRO", 2020). Without ep experts are sharded with their block, by whole
    experts; with it those of a rank are sharded over expert_fsdp, as in `parallel.fsdp`.

    Examples:
        >>> from trainkit.models.decoder_sizes import make_decoder_config
        >>> job = Job(config=make_decoder_config("tiny", vocab_size=259), row_length=8, rows=8)
        >>> compute_units(job, Layout(dp_shard=2)).embedding.trained
        Sizes(whole=33152, gathered=33280, shard=16640, tensors=1, largest=33152, short=16640)
    """
    key = job.config, job.plan_prefix, job.frozen
    return _compute_units(key, layout.tp, layout.count("fsdp"), layout.ep)


@lru_cache(maxsize=16)  # making the model with its adapters is slow
def _list_parameters(
    config: DecoderConfig, plan_prefix: tuple[ModelTransform, ...], frozen: frozenset[str]
) -> tuple[_Parameter, ...]:
    """List all parameters of the full model: adapters too, and quantized ones as bytes."""
    # The shapes of a plain decoder follow from its configuration, without making it.
    if not plan_prefix:
        shapes = parameter_shapes(config)
        return tuple((x, shapes[x], "frozen" if x in frozen else "trained") for x in shapes)
    with torch.device("meta"):
        model: nn.Module = Decoder(config)
        for transform in plan_prefix:
            model = transform(model, solo_parallel())
    return tuple(
        # A detached parameter needs no gradient, and so counts as frozen.
        (name, tuple(p.shape), get_parameter_kind(p.detach() if name in frozen else p))
        for name, p in get_named_parameters([model]).items()
    )


@lru_cache(maxsize=256)
def _compute_units(key: _ModelKey, tp: int, fsdp: int, ep: int) -> Units:
    config = key[0]
    has_wide_norms = config.qk_norm == "wide"
    by_layer: dict[int, list[_Parameter]] = {i: [] for i in range(config.layers)}
    ends: dict[str, Params] = {}
    for name, shape, kind in _list_parameters(*key):
        if match := re.match(r"layers\.(\d+)\.(.+)", name):
            by_layer[int(match[1])].append((match[2], shape, kind))
        else:
            # The part is embedding, positions, norm or head.
            part = name.partition(".")[0]
            dim = _find_tp_dim(name, has_wide_norms)
            params = _make_params(_shard_shape(shape, dim, tp), kind, fsdp)
            ends[part] = ends.get(part, Params()) + params
    # Most layers are equal, so only distinct ones are computed.
    indices: dict[tuple[bool, tuple[_Parameter, ...]], int] = {}
    kinds = tuple(
        indices.setdefault((i in config.expert_layers, tuple(parameters)), len(indices))
        for i, parameters in by_layer.items()
    )
    layers = tuple(
        _make_layer(
            parameters,
            has_wide_norms=has_wide_norms,
            has_experts=has_experts,
            tp=tp,
            fsdp=fsdp,
            ep=ep,
        )
        for has_experts, parameters in indices
    )
    return Units(
        layers=layers,
        kinds=kinds,
        embedding=ends.get("embedding", Params()),
        positions=ends.get("positions", Params()),
        norm=ends.get("norm", Params()),
        head=ends.get("head", Params()),
    )


def _make_layer(
    parameters: Sequence[_Parameter],
    *,
    has_wide_norms: bool,
    has_experts: bool,
    tp: int,
    fsdp: int,
    ep: int,
) -> Layer:
    block, sharded_experts, replicated = Params(), Params(), Params()
    expert_shapes = [
        (shape[0] // ep, *shape[1:])
        for name, shape, _ in parameters
        if _is_sharded_expert(name, ep)
    ]
    # Sharded by whole experts if these divide, else within each expert if its rows divide.
    expert_fsdp = fsdp // ep
    even = (dim for dim in (0, 1) if all(x[dim] % expert_fsdp == 0 for x in expert_shapes))
    expert_dim = next(even, 0)
    for name, shape, kind in parameters:
        # Over tp an expert layer shards its tokens and replicates its matrices.
        is_expert_layer = has_experts and name.startswith("mlp.")
        dim = None if is_expert_layer else _find_tp_dim(name, has_wide_norms)
        if _is_sharded_expert(name, ep):
            local_shape = (shape[0] // ep, *shape[1:])
            params = _make_params(local_shape, kind, expert_fsdp, dim=expert_dim)
            sharded_experts += params
        else:
            params = _make_params(_shard_shape(shape, dim, tp), kind, fsdp)
            block += params
        if dim is None:
            replicated += params
    return Layer(block, sharded_experts, replicated)


def _is_sharded_expert(name: str, ep: int) -> bool:
    return ep > 1 and name.startswith("mlp.experts.")


def _find_tp_dim(name: str, has_wide_norms: bool) -> int | None:
    """Return the dimension that tensor parallelism shards a parameter along, or None."""
    matrix, _, adapter = name.partition(".lora.")
    if adapter:
        # B has the matrix's rows and A its columns; each is sharded where those are.
        dim = _find_tp_dim(f"{matrix}.weight", has_wide_norms)
        key = adapter.rpartition(".")[2]
        return dim if (dim, key) in ((0, "b"), (0, "magnitude"), (1, "a")) else None
    if name.endswith(SCALES):
        # Scales of blocks in a row: if columns are sharded, each rank keeps them all.
        dim = _find_tp_dim(name.removesuffix(SCALES), has_wide_norms)
        return dim if dim == 0 else None
    # These norms have a weight for each column of all heads, which tp divides.
    if has_wide_norms and name.endswith(("q_norm.weight", "k_norm.weight")):
        return 0
    replicated = "norm", "_latent", "k_rotary", "wo.bias", "down.bias", "positions"
    if any(part in name for part in replicated):
        return None
    # wo and down are row-parallel: they read columns that tp divides, and sum over ranks.
    return 1 if name.endswith(("wo.weight", "down.weight")) else 0


def _shard_shape(shape: tuple[int, ...], dim: int | None, parts: int) -> tuple[int, ...]:
    return tuple(size // parts if i == dim else size for i, size in enumerate(shape))


def _make_params(
    shape: tuple[int, ...], kind: ParameterKind, parts: int, *, dim: int = 0
) -> Params:
    whole = math.prod(shape)
    shard = math.ceil(shape[dim] / parts) * whole // shape[dim]  # the first shard is the largest
    sizes = Sizes(
        whole=whole,
        # FSDP2 pads every shard to the size of the first.
        gathered=shard * parts,
        shard=shard,
        tensors=1,
        largest=whole,
        short=shard if len(shape) < 2 or shape[-1] % BLOCK else 0,
    )
    return attrs.evolve(Params(), **{kind: sizes})
