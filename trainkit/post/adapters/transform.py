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
from trainkit.parallel.parameters import canonical_name, match_names
from trainkit.parallel.transforms import Transform
from trainkit.post.adapters.frozen import (
    dequantized,
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

_ROWS = 4096


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
        trained: A regular expression of names of modules or parameters to train in full, for
            example "embedding|head" after adding tokens to the vocabulary.
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
    names = {one.name for one in loras}
    if len(names) != 1:
        raise ConfigError(
            f"lora: it adds the adapters of one name, and was given {sorted(names) or 'none'}; "
            "give each name a lora() of its own",
            where="name",
            got=sorted(names),
        )
    (own_name,) = names

    def apply(module: nn.Module, ps: ParallelState) -> nn.Module:
        del ps
        before = [adapters for _, _, adapters in adapters_of([module])]
        if not before:
            module.requires_grad_(requires_grad=False)
        for adapters in before:
            adapters.requires_grad_(requires_grad=False)
        on_meta = any(p.is_meta for p in module.parameters())
        base = None if on_meta else weights_from_module(module)
        for name, (matrix, one) in _match_matrices(module, loras).items():
            _add_adapter_(
                matrix, name, one, values or _make_initial_values(seed, matrix, name), base
            )
        for _, _, adapters in adapters_of([module]):
            adapters.names = adapters.names | names
            adapters.active = own_name if own_name in adapters else None
            if own_name in adapters:
                adapters[own_name].requires_grad_()
        _provide_noise_keys_(module)
        if trained is not None:
            named = {
                canonical_name(name): part
                for name, part in (*module.named_modules(), *module.named_parameters())
                if name and f".{CHILD}." not in f".{name}."
            }
            for name in match_names(trained, named, function="lora", kind="module or parameter"):
                named[name].requires_grad_()
        return module

    return Transform(apply, kind="adapter")


def problems(
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
        >>> problems([lora(Lora(r"layers\.\d+\.attention\.wq"))], tiny)
        []
        >>> print(*problems([lora(Lora("q_proj"))], tiny))
        lora: 'q_proj' matches the name of no matrix; those there are: layers.0.attention.wq; ...
    """
    found: list[ConfigError] = []
    if "base" in base:
        found.append(
            ConfigError(
                "adapters: the base cannot be this run: it holds adapters alone, of a base at "
                f"{base.get('base_from')}; {MERGE}",
                where="base",
            )
        )
    fsdp = Axis("fsdp", Share(0, layout.wrapped))  # transforms only read its size
    with torch.device("meta"):
        whole: nn.Module = Decoder(model)
    try:
        for step in plan:
            whole = step(whole, attrs.evolve(solo_parallel(), fsdp=fsdp))
    except ConfigError as error:
        found.append(error)
    return found


# --------------------------------------------------------------------------------------- choosing


@attrs.frozen(eq=False)
class _Matrix:
    """A matrix: its module, its name in it, and its shape `[out, in]` or `[E, out, in]`."""

    module: nn.Module
    key: str
    sizes: tuple[int, ...]


def _find_matrices(module: nn.Module) -> dict[str, _Matrix]:
    """Return all matrices that can have an adapter, by their names in the whole model."""
    found: dict[str, _Matrix] = {}
    for path, part in module.named_modules():
        name, sizes = canonical_name(path), sizes_of(part)
        if sizes is not None and not isinstance(part, Head):
            found[name] = _Matrix(part, "weight", sizes)
        for key, shape in expert_sizes(part).items():
            found[f"{name}.{key}"] = _Matrix(part, key, shape)
    return found


def _match_matrices(module: nn.Module, loras: Sequence[Lora]) -> dict[str, tuple[_Matrix, Lora]]:
    """Return the matrices that get an adapter, by name."""
    matrices = _find_matrices(module)
    found: dict[str, tuple[_Matrix, Lora]] = {}
    for one in loras:
        for name in match_names(one.modules, matrices, function="lora", kind="matrix"):
            matrix = matrices[name]
            adapters: Any = getattr(matrix.module, CHILD, {})
            if matrix.key != "weight":
                adapters = dict(adapters.items()).get(matrix.key, {})
            if name in found or one.name in adapters:
                raise ConfigError(
                    f"lora: {name!r} is matched twice for the adapter {one.name!r}, the second "
                    f"time by {one.modules!r}; change a pattern, or name the adapters apart",
                    where=name,
                )
            if hasattr(getattr(matrix.module, matrix.key, None), "placements"):
                raise ConfigError(
                    f"lora: {name!r} is sharded already; lora() comes first in a plan", where=name
                )
            found[name] = matrix, one
    return found


# --------------------------------------------------------------------------------------- changing


def _add_adapter_(
    matrix: _Matrix, name: str, one: Lora, values: Fill, base: Weights | None
) -> None:
    """Add an adapter to a matrix, and fill it if the model has its values."""
    module: Any = matrix.module
    tensors = [getattr(module, matrix.key, None), *module.parameters(), *module.buffers()]
    like = next(x for x in tensors if isinstance(x, Tensor))
    packing = get_quantization(module, matrix.key)
    dtype = like.dtype if packing is None else packing.dtype  # codes are bytes
    is_expert = matrix.key != "weight"
    path = f"{name.removesuffix(f'.{matrix.key}')}.{CHILD}"
    path += f".{matrix.key}.{one.name}" if is_expert else f".{one.name}"
    with like.device:
        adapter = (ExpertLowRank if is_expert else LowRank)(
            one,
            path,
            values,
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
        adapters[matrix.key] = adapters[matrix.key] if matrix.key in adapters else Adapters()
        adapters = adapters[matrix.key]
    adapters[one.name] = adapter
    if base is not None:
        base = base if packing is None else weights_of_tensor(dequantized(module, matrix.key))
        with torch.no_grad():
            for key, p in adapter.named_parameters():
                p.copy_(values(base, f"{path}.{key}", tuple(p.shape), (0,) * p.ndim))


def _make_initial_values(seed: int, matrix: _Matrix, matrix_name: str) -> Fill:
    """Return the initial values of an adapter, for which it does not change its base."""
    weight_name = matrix_name if matrix.key != "weight" else f"{matrix_name}.weight"
    inputs = matrix.sizes[-1]
    packing = get_quantization(matrix.module, matrix.key)
    on_meta = all(p.is_meta for p in matrix.module.parameters())

    def fill(base: Weights, name: str, shape: Sequence[int], offset: Sequence[int]) -> Tensor:
        key = split_name(name)[2]
        if key == "b":
            return torch.zeros(tuple(shape))
        if key == "a":
            return uniform_symmetric(make_key(seed, name), shape, offset).mul_(inputs**-0.5)
        if packing is not None and on_meta:  # the model will compute with rounded weights
            base = round_weights(base, {weight_name: packing})
        whole = base(weight_name, (*shape, inputs), (*offset, 0))
        return torch.cat([rows.double().norm(dim=-1) for rows in whole.split(_ROWS, -2)], -1)

    return fill


def _provide_noise_keys_(module: nn.Module) -> None:
    """Make blocks that get noise keys pass them to the adapters with dropout inside."""
    waiting = [
        (name, part)
        for name, part in module.named_modules()
        if isinstance(part, Adapter) and part.spec.dropout
    ]
    for name, block in module.named_modules():
        is_keyed = isinstance(block, Keyed)  # by an earlier lora()
        takes_keys = "noise_key" in inspect.signature(type(block).forward).parameters
        if not name or not (is_keyed or takes_keys):
            continue
        inside = [part for part in waiting if part[0].startswith(f"{name}.")]
        if inside and not is_keyed:
            mix_in_(block, Keyed)
        waiting = [part for part in waiting if part not in inside]
    if waiting:
        _, adapter = waiting[0]
        raise ConfigError(
            f"lora: dropout is a function of a token's noise key, and no module around "
            f"{adapter.whole_name!r} takes one (noise_key=); set dropout to 0",
            where="dropout",
            got=adapter.spec.dropout,
            want=0,
        )
