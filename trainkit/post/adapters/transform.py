"""Add low-rank adapters to matrices by name, and freeze all other parameters."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from trainkit.mesh import solo_parallel
from trainkit.models.config import DecoderConfig
from trainkit.models.decoder import Decoder, Head
from trainkit.models.mixins import mix_in_
from trainkit.noise import make_key, uniform_symmetric
from trainkit.parallel.materialize import Fill, weights_from_module
from trainkit.parallel.name_patterns import match_names
from trainkit.parallel.parameters import canonical_name
from trainkit.parallel.transforms import Transform
from trainkit.post.adapters.frozen import (
    dequantize_parameter,
    get_quantization,
    round_weights,
    weights_of_tensor,
)
from trainkit.post.adapters.lowrank import (
    CHILD,
    MERGE,
    Adapted,
    AdaptedExperts,
    Adapter,
    Adapters,
    ExpertLowRank,
    Keyed,
    Lora,
    LowRank,
    adapters_of,
    expert_sizes,
    sizes_of,
    split_name,
)
from trainkit.types import Axis, ConfigError, Layout, ParallelState, Share, Weights

_MAX_ROWS = 4096  # of a matrix that exist in fp64 at a time, for DoRA's norms


def lora(
    *loras: Lora, seed: int = 0, trained: str | None = None, values: Fill | None = None
) -> Transform:
    """Return the transform that adds low-rank adapters to matrices, and freezes all else.

    It comes first in a plan: the whole model gets its adapters on the meta device, before it is
    split into pipeline stages, so patterns match names of the whole model in every layout. Later
    transforms shard an adapter as they shard its matrix. Parameters of the base keep their names,
    and `weights` of `build_stages` are those of the base. A starts uniform, as by
    `kaiming_uniform_(a=sqrt(5))`, a function of the seed, the name and the element's index; B
    starts at zero, and DoRA's magnitudes at the norms of the base's rows. So the model first
    computes the same as its base.

    A plan may have several. With different names, a model has several adapters: the last name is
    active and trained, and `select_adapter_` activates another. With the same name and other
    matrices, the adapter is extended.

    Args:
        loras: The matrices and the kind of adapter; see `Lora`. The output head cannot have one.
        seed: The seed of the initial values.
        trained: A pattern of names of modules or parameters to train in full, for
            example "{embedding,head}" after adding tokens to the vocabulary.
        values: A function `(weights, name, shape, offset)` that returns other initial values: those
            of an adapter's folder, or nonzero ones for a certificate (with B = 0, A has no gradient
            in the first step).

    Returns:
        A transform for `build_stages`, or for any module: `lora(...)(model, solo_parallel())`; then
        adapters are filled immediately.

    Raises:
        ConfigError: The names differ; when applied: a pattern is invalid or matches nothing, two
            match one matrix, or a module with dropout gets no noise keys.

    References:
        Hu et al., "LoRA" (2021).

    Examples:
        >>> from trainkit.mesh import solo_parallel
        >>> model = nn.ModuleDict({"up": nn.Linear(2, 4), "down": nn.Linear(4, 2)})
        >>> _ = lora(Lora("up", rank=1))(model, solo_parallel())
        >>> [name for name, p in model.named_parameters() if p.requires_grad]
        ['up.lora.default.a', 'up.lora.default.b']
    """
    names = {spec.name for spec in loras}
    if len(names) != 1:
        raise ConfigError(
            f"lora: it adds the adapters of one name, and was given {sorted(names) or 'none'}; "
            "give each name a lora() of its own",
            where="name",
            got=sorted(names),
        )
    (adapter_name,) = names

    def apply(module: nn.Module, ps: ParallelState) -> nn.Module:
        del ps
        earlier = [adapters for _, _, adapters in adapters_of([module])]
        if not earlier:
            module.requires_grad_(requires_grad=False)
        # An earlier lora() has frozen the base, but for what its `trained` names: that stays so.
        for adapters in earlier:
            adapters.requires_grad_(requires_grad=False)
        on_meta = any(p.is_meta for p in module.parameters())
        base = None if on_meta else weights_from_module(module)
        for name, (matrix, spec) in _match_matrices(module, loras).items():
            fill = values or _make_initial_values(seed, matrix, name)
            _add_adapter_(matrix, name, spec, fill, base)
        for _, _, adapters in adapters_of([module]):
            adapters.names = adapters.names | names
            adapters.active = adapter_name if adapter_name in adapters else None
            if adapter_name in adapters:
                adapters[adapter_name].requires_grad_()
        _provide_noise_keys_(module)
        if trained is not None:
            named = {  # without the adapters, whose names hold those of their matrices
                canonical_name(name): part
                for name, part in (*module.named_modules(), *module.named_parameters())
                if name and f".{CHILD}." not in f".{name}."
            }
            for name in match_names(trained, named, function="lora", kind="module or parameter"):
                named[name].requires_grad_()
        return module

    return Transform(apply, kind="adapter")


def find_problems(
    plan: Sequence[Transform],
    model: DecoderConfig,
    *,
    layout: Layout = Layout(),  # noqa: B008 (frozen)
    base: Mapping[str, Any] = MappingProxyType({}),
) -> list[ConfigError]:
    r"""Return the reasons why adapters do not fit a decoder, as errors that are not raised.

    Args:
        plan: The first transforms of a plan: `quantized`, `float8` or `fake_quantize`, `lora`.
        model: The decoder.
        layout: The layout that it will be trained in.
        base: The facts of the base's checkpoint; `open_base_weights` refuses one with adapters
            alone. Empty for a folder.

    Examples:
        >>> from trainkit.models import make_decoder_config
        >>> tiny = make_decoder_config("tiny")
        >>> find_problems([lora(Lora("layers.*.attention.wq"))], tiny)
        []
        >>> print(*find_problems([lora(Lora("q_proj"))], tiny))
        lora: 'q_proj' matches the name of no matrix; those there are: layers.0.attention.wq; ...
    """
    errors: list[ConfigError] = []
    if "base" in base:
        errors.append(
            ConfigError(
                "adapters: the base cannot be this run: it holds adapters alone, of a base at "
                f"{base.get('base_from')}; {MERGE}",
                where="base",
            )
        )
    # The first transforms of a plan are applied to the whole model, which costs nothing on meta.
    fsdp = Axis("fsdp", Share(0, layout.wrapped))  # transforms only read its size
    with torch.device("meta"):
        decoder: nn.Module = Decoder(model)
    try:
        for transform in plan:
            decoder = transform(decoder, attrs.evolve(solo_parallel(), fsdp=fsdp))
    except ConfigError as error:
        errors.append(error)
    return errors


# --------------------------------------------------------------------------------------- choosing


@attrs.frozen(eq=False)
class _Matrix:
    """A matrix: its module, its name in it, and its shape `[out, in]` or `[E, out, in]`."""

    module: nn.Module
    key: str
    sizes: tuple[int, ...]


def _match_matrices(module: nn.Module, loras: Sequence[Lora]) -> dict[str, tuple[_Matrix, Lora]]:
    """Return the matrices that get an adapter, by their names in the whole model."""
    matrices: dict[str, _Matrix] = {}
    for path, part in module.named_modules():
        name = canonical_name(path)
        sizes = sizes_of(part)
        # The head returns its weight in a `Hidden`, and the loss multiplies with it.
        if sizes is not None and not isinstance(part, Head):
            matrices[name] = _Matrix(part, "weight", sizes)
        for key, shape in expert_sizes(part).items():
            matrices[f"{name}.{key}"] = _Matrix(part, key, shape)
    matched: dict[str, tuple[_Matrix, Lora]] = {}
    for spec in loras:
        for name in match_names(spec.modules, matrices, function="lora", kind="matrix"):
            matrix = matrices[name]
            adapters: Any = getattr(matrix.module, CHILD, {})
            if matrix.key != "weight":  # experts have adapters by weight
                adapters = dict(adapters.items()).get(matrix.key, {})
            if name in matched or spec.name in adapters:
                raise ConfigError(
                    f"lora: {name!r} is matched twice for the adapter {spec.name!r}, the second "
                    f"time by {spec.modules!r}; change a pattern, or give the adapters two names",
                    where=name,
                )
            if hasattr(getattr(matrix.module, matrix.key, None), "placements"):
                raise ConfigError(
                    f"lora: {name!r} is sharded already; lora() comes first in a plan", where=name
                )
            matched[name] = matrix, spec
    return matched


# --------------------------------------------------------------------------------------- changing


def _add_adapter_(matrix: _Matrix, name: str, spec: Lora, fill: Fill, base: Weights | None) -> None:
    """Add an adapter to a matrix, and fill it if the model has its values, `base`."""
    module: Any = matrix.module
    tensors = [getattr(module, matrix.key, None), *module.parameters(), *module.buffers()]
    like = next(x for x in tensors if isinstance(x, Tensor))  # for the device and the dtype
    quantization = get_quantization(module, matrix.key)
    dtype = like.dtype if quantization is None else quantization.dtype  # codes are bytes
    is_expert = matrix.key != "weight"
    # "layers.0.attention.wq.lora.default", or "layers.0.mlp.experts.lora.up.default".
    path = f"{name.removesuffix(f'.{matrix.key}')}.{CHILD}"
    path += f".{matrix.key}.{spec.name}" if is_expert else f".{spec.name}"
    make_adapter = ExpertLowRank if is_expert else LowRank
    with like.device:
        # In fp32 even on a bf16 base: steps of an adapter are small against its values.
        adapter = make_adapter(
            spec,
            path,
            fill,
            sizes=matrix.sizes,
            dtype=torch.promote_types(dtype, torch.float32),
        )
    if not hasattr(module, CHILD):
        if is_expert:
            mix_in_(module, AdaptedExperts, lora=nn.ModuleDict())
        else:
            mix_in_(module, Adapted, lora=Adapters())
    adapters = module.lora
    if is_expert:
        if matrix.key not in adapters:
            adapters[matrix.key] = Adapters()
        adapters = adapters[matrix.key]
    adapters[spec.name] = adapter
    if base is not None:
        if quantization is not None:
            base = weights_of_tensor(dequantize_parameter(module, matrix.key))
        with torch.no_grad():
            for key, p in adapter.named_parameters():
                p.copy_(fill(base, f"{path}.{key}", tuple(p.shape), (0,) * p.ndim))


def _make_initial_values(seed: int, matrix: _Matrix, matrix_name: str) -> Fill:
    """Return the initial values of an adapter, with which a model computes what its base does."""
    weight_name = matrix_name if matrix.key != "weight" else f"{matrix_name}.weight"
    inputs = matrix.sizes[-1]
    quantization = get_quantization(matrix.module, matrix.key)
    on_meta = all(p.is_meta for p in matrix.module.parameters())

    def fill(base: Weights, name: str, shape: Sequence[int], offset: Sequence[int]) -> Tensor:
        key = split_name(name)[2]
        if key == "b":
            return torch.zeros(tuple(shape))
        if key == "a":
            # kaiming_uniform_(a=sqrt(5)) is uniform between +-1 / sqrt(inputs).
            return uniform_symmetric(make_key(seed, name), shape, offset).mul_(inputs**-0.5)
        # DoRA's magnitudes are the norms of the base's rows.
        if quantization is not None and on_meta:  # the model will compute with rounded weights
            base = round_weights(base, {weight_name: quantization})
        weight = base(weight_name, (*shape, inputs), (*offset, 0))
        norms = [rows.double().norm(dim=-1) for rows in weight.split(_MAX_ROWS, -2)]
        return torch.cat(norms, -1)

    return fill


def _provide_noise_keys_(module: nn.Module) -> None:
    """Make blocks that get noise keys pass them to the adapters with dropout inside."""
    without_keys = [
        (name, part)
        for name, part in module.named_modules()
        if isinstance(part, Adapter) and part.spec.dropout
    ]
    for name, block in module.named_modules():
        is_keyed = isinstance(block, Keyed)  # by an earlier lora()
        takes_keys = "noise_key" in inspect.signature(type(block).forward).parameters
        # Not the model itself: recomputation runs a block after the model's forward pass.
        if not name or not (is_keyed or takes_keys):
            continue
        inside = [part for part in without_keys if part[0].startswith(f"{name}.")]
        if inside and not is_keyed:
            mix_in_(block, Keyed)
        without_keys = [part for part in without_keys if part not in inside]
    if without_keys:
        _, adapter = without_keys[0]
        raise ConfigError(
            f"lora: dropout is a function of a token's noise key, and no module around "
            f"{adapter.whole_name!r} takes one (noise_key=); set dropout to 0",
            where="dropout",
            got=adapter.spec.dropout,
            want=0,
        )
