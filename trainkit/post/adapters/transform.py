"""Low-rank adapters as a transform of a plan: they are chosen by name, and all else is frozen."""

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
from trainkit.noise import make_key, uniform_symmetric
from trainkit.parallel.materialize import Fill, weights_from_module
from trainkit.parallel.names import canonical_name, fitting_names
from trainkit.parallel.transforms import Transform
from trainkit.post.adapters.frozen import dequantized, held_as, packing_of, round_weights
from trainkit.post.adapters.lowrank import (
    BESIDE,
    MERGE,
    Adapter,
    Adapters,
    ExpertLowRank,
    Lora,
    LowRank,
    adapted,
    adapted_experts,
    adapters_of,
    expert_sizes,
    keyed,
    sizes_of,
    split_name,
)
from trainkit.types import Axis, ConfigError, Layout, ParallelState, Share, Weights

_ROWS = 4096


def lora(
    *loras: Lora, seed: int = 0, trained: str | None = None, values: Fill | None = None
) -> Transform:
    """Return the transform that puts low-rank adapters beside matrices, and freezes all else.

    It comes first in a plan: the whole model gets its adapters on the meta device, before it is cut
    into pipeline stages, so that patterns are of the whole model in every layout. What follows
    (`tensor`, `expert`, `precision`, `fsdp`) cuts an adapter as it cuts its matrix. The names of
    the base stay what they are, and `weights` of `build_stages` are those of the base; adapters
    bring their own: A uniform as by `kaiming_uniform_(a=sqrt(5))`, a function of the seed, the name
    and the element's index, B zeros, and for DoRA the lengths of the base's rows. So a model
    computes at first what its base does.

    Given several times, with other names, adapters stand side by side: those of the last name
    compute and are trained, and `select_adapter_` chooses another. Given again with the same name,
    for other matrices, it adds to them.

    Args:
        loras: Which matrices, and what kind of adapter; see `Lora`. A decoder's head is none.
        seed: Of the initial values.
        trained: A regular expression of the names of modules or parameters that are trained beside
            adapters, as they are: "embedding|head" where a vocabulary has grown.
        values: Gives the initial values in place of the above: those of an adapter's folder, or for
            a certificate ones that are not 0 (with B = 0 an A has no gradient in the first step):
            a function `(weights, name, shape, offset) -> certificate_weights(name, shape, offset)`.

    Returns:
        A transform for `build_stages`, or for any module: `lora(...)(model, solo_parallel())`; then
        adapters are filled at once.

    Raises:
        ConfigError: The names differ; when applied: a pattern is none or matches nothing, two match
            one matrix, or dropout cannot be had there.

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
        before = [beside for _, _, beside in adapters_of([module])]
        if not before:
            module.requires_grad_(requires_grad=False)
        for beside in before:
            beside.requires_grad_(requires_grad=False)
        on_meta = any(p.is_meta for p in module.parameters())
        base = None if on_meta else weights_from_module(module)
        for name, (place, one) in _matched(module, loras).items():
            _adapt_(place, name, one, values or _initial_values(seed, place, name), base)
        for _, _, beside in adapters_of([module]):
            beside.names = beside.names | names
            beside.active = own_name if own_name in beside else None
            if own_name in beside:
                beside[own_name].requires_grad_()
        _tell_keys_(module)
        if trained is not None:
            _train_(module, trained)
        return module

    return Transform(apply, kind="adapter")


def problems(
    plan: Sequence[Transform],
    model: DecoderConfig,
    *,
    layout: Layout = Layout(),  # noqa: B008 (frozen)
    base: Mapping[str, Any] = MappingProxyType({}),
) -> list[ConfigError]:
    r"""Return what does not fit of adapters and a decoder, as errors that nobody has raised yet.

    Args:
        plan: What a plan begins with: `quantized`, `float8` or `fake_quantize`, `lora`, or none.
        model: The decoder.
        layout: The layout that it is to be trained in.
        base: The facts of the checkpoint that is to be the base, which `open_base_weights` refuses
            if it holds adapters alone; of a folder none.

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
        what = f"it holds adapters alone, of a base at {base.get('base_from')}; {MERGE}"
        found.append(ConfigError(f"adapters: the base cannot be this run: {what}", where="base"))
    fsdp = Axis("fsdp", Share(0, layout.wrapped))  # as far as a transform asks
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
class _Place:
    """Where a matrix is: its module, its name there, its shape `[out, in]` or `[E, out, in]`."""

    module: nn.Module
    key: str
    sizes: tuple[int, ...]


def _places(module: nn.Module) -> dict[str, _Place]:
    """Return every matrix that may have an adapter by its name in the whole model."""
    found: dict[str, _Place] = {}
    for path, part in module.named_modules():
        name, sizes = canonical_name(path), sizes_of(part)
        if sizes is not None and not isinstance(part, Head):
            found[name] = _Place(part, "weight", sizes)
        for key, shape in expert_sizes(part).items():
            found[f"{name}.{key}"] = _Place(part, key, shape)
    return found


def _matched(module: nn.Module, loras: Sequence[Lora]) -> dict[str, tuple[_Place, Lora]]:
    """Return by name which matrices get which adapter."""
    places = _places(module)
    found: dict[str, tuple[_Place, Lora]] = {}
    for one in loras:
        for name in fitting_names(one.modules, places, by="lora", what="matrix"):
            place = places[name]
            if name in found or one.name in _beside(place):
                raise ConfigError(
                    f"lora: {name!r} is matched twice for the adapter {one.name!r}, the second "
                    f"time by {one.modules!r}; change a pattern, or name the adapters apart",
                    where=name,
                )
            _check_whole(name, place)
            found[name] = place, one
    return found


def _check_whole(name: str, place: _Place) -> None:
    weight = getattr(place.module, place.key, None)
    if hasattr(weight, "placements"):
        raise ConfigError(
            f"lora: {name!r} is sharded already; lora() comes first in a plan", where=name
        )


def _beside(place: _Place) -> Mapping[str, Any]:
    """Return the adapters that a matrix has already."""
    beside: Any = getattr(place.module, BESIDE, {})
    return beside if place.key == "weight" else dict(beside.items()).get(place.key, {})


# --------------------------------------------------------------------------------------- changing


def _adapt_(place: _Place, name: str, one: Lora, give: Fill, base: Weights | None) -> None:
    """Put an adapter beside a matrix, and fill it where the model has its values."""
    module: Any = place.module
    held = [getattr(module, place.key, None), *module.parameters(), *module.buffers()]
    like = next(x for x in held if isinstance(x, Tensor))
    packing = packing_of(module, place.key)
    dtype = like.dtype if packing is None else packing.dtype  # of what is held in few bits
    how: dict[str, Any] = {"dtype": torch.promote_types(dtype, torch.float32)}
    of_experts = place.key != "weight"
    path = f"{name.removesuffix(f'.{place.key}')}.{BESIDE}"
    path += f".{place.key}.{one.name}" if of_experts else f".{one.name}"
    with like.device:
        made = (ExpertLowRank if of_experts else LowRank)(one, path, give, sizes=place.sizes, **how)
    if not hasattr(module, BESIDE):
        module.__class__ = (adapted_experts if of_experts else adapted)(type(module))
        setattr(module, BESIDE, nn.ModuleDict() if of_experts else Adapters())
    beside = getattr(module, BESIDE)
    if of_experts:
        beside[place.key] = beside[place.key] if place.key in beside else Adapters()
        beside = beside[place.key]
    beside[one.name] = made
    if base is not None:
        base = base if packing is None else held_as(dequantized(module, place.key))
        with torch.no_grad():
            for key, p in made.named_parameters():
                p.copy_(give(base, f"{path}.{key}", tuple(p.shape), (0,) * p.ndim))


def _initial_values(seed: int, place: _Place, matrix: str) -> Fill:
    """Return what an adapter begins with, which adds nothing to its base."""
    own, inputs = matrix if place.key != "weight" else f"{matrix}.weight", place.sizes[-1]
    packing = packing_of(place.module, place.key)
    on_meta = all(p.is_meta for p in place.module.parameters())

    def fill(base: Weights, name: str, shape: Sequence[int], offset: Sequence[int]) -> Tensor:
        key = split_name(name)[2]
        if key == "b":
            return torch.zeros(tuple(shape))
        if key == "a":
            return uniform_symmetric(make_key(seed, name), shape, offset).mul_(inputs**-0.5)
        if packing is not None and on_meta:  # the base is what its codes stand for
            base = round_weights(base, {own: packing})
        whole = base(own, (*shape, inputs), (*offset, 0))
        return torch.cat([rows.double().norm(dim=-1) for rows in whole.split(_ROWS, -2)], -1)

    return fill


def _tell_keys_(module: nn.Module) -> None:
    """Let the blocks that are given noise keys tell them to adapters that drop something."""
    deaf = [
        (name, part)
        for name, part in module.named_modules()
        if isinstance(part, Adapter) and part.spec.dropout
    ]
    for name, block in module.named_modules():
        tells = getattr(block, "tells_keys", False)  # of adapters that stand there already
        asks = "noise_key" in inspect.signature(type(block).forward).parameters
        takes = name and (tells or asks)
        inside = [part for part in deaf if part[0].startswith(f"{name}.")]
        if takes and inside and not tells:
            block.__class__ = keyed(type(block))
        if takes:
            deaf = [part for part in deaf if part not in inside]
    if deaf:
        raise ConfigError(
            f"lora: dropout is a function of a token's noise key, and no module around "
            f"{deaf[0][1].whole_name!r} takes one (noise_key=); set dropout to 0",
            where="dropout",
            got=deaf[0][1].spec.dropout,
            want=0,
        )


def _train_(module: nn.Module, pattern: str) -> None:
    """Train what a pattern matches beside adapters."""
    named = {
        canonical_name(name): part
        for name, part in (*module.named_modules(), *module.named_parameters())
        if name and f".{BESIDE}." not in f".{name}."
    }
    for name in fitting_names(pattern, named, by="lora", what="module or parameter"):
        named[name].requires_grad_()
