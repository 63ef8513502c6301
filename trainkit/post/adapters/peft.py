"""Adapters in PEFT's format, both ways: `adapter_config.json` and `adapter_model.safetensors`.

Where a family's folder fuses matrices (qkv, gate_up), one adapter of PEFT is several of ours. To
read it, each of our matrices gets the same A and its own rows of B. To write it, A is the
concatenation of our A's, and B is block-structured, with zeros between the blocks.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from trainkit.models.config import DecoderConfig
from trainkit.parallel.materialize import Fill, attach_shapes, narrow_to_box, shapes_of
from trainkit.parallel.name_patterns import join_names
from trainkit.post.adapters.lowrank import Lora, split_name
from trainkit.types import CheckpointError, ConfigError, Weights
from trainkit.weights.checkpoint.boxes import shorten
from trainkit.weights.checkpoint.reading import read_box
from trainkit.weights.checkpoint.safe_files import read_bounded
from trainkit.weights.checkpoint.tensor_files import parse_untrusted_table, safetensors_file
from trainkit.weights.hub.families import Family
from trainkit.weights.hub.folder import make_family_links
from trainkit.weights.hub.links import Link

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_MAX_CONFIG_BYTES = 4 * 1024 * 1024
# PEFT wraps a model twice: a PeftModel has a `base_model`, whose `model` is the model itself.
_PREFIX = "base_model.model."
_PARTS = {"lora_A.weight": "a", "lora_B.weight": "b", "lora_magnitude_vector": "magnitude"}
_SETTINGS_READ = {
    *("peft_type", "r", "lora_alpha", "lora_dropout", "rank_pattern", "alpha_pattern"),
    *("use_rslora", "use_dora", "modules_to_save", "fan_in_fan_out"),
    "ensure_weight_tying",
}
# What these say is read from the names and shapes of the tensors instead.
_SETTINGS_IGNORED = {
    *("target_modules", "target_parameters", "exclude_modules", "layers_to_transform"),
    *("layers_pattern", "base_model_name_or_path", "inference_mode", "task_type", "revision"),
    *("peft_version", "auto_mapping", "megatron_core", "qalora_group_size"),
}
_TYING = "ensure_weight_tying"
# With another bias PEFT saves trained biases too, and other initial values, such as PiSSA's, change
# the base.
_MUST_BE = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian"),
}


@attrs.frozen(eq=False)
class PeftAdapter:
    """An adapter's folder, in the form that `lora` takes.

    Put `lora(*adapter.loras, trained=adapter.trained, values=adapter.values)` into the plan, and
    build the model with `weights=adapter.weights(base)`: the folder may hold full parameters
    (`modules_to_save`), which replace those of the base.

    Attributes:
        loras: The matrices with an adapter, and its kind.
        trained: A pattern of the full parameters in the folder, or None.
        values: A function that returns the adapters' values.
        whole: The full parameters in the folder, by our names.
    """

    loras: tuple[Lora, ...]
    trained: str | None
    values: Fill
    whole: Mapping[str, Tensor]

    def weights(self, base: Weights) -> Weights:
        """Return the weights of the base, with the folder's full parameters in their place."""

        def read(name: str, shape: Sequence[int], offset: Sequence[int]) -> Tensor:
            if name in self.whole:
                return narrow_to_box(self.whole[name], shape, offset)
            return base(name, shape, offset)

        shapes = shapes_of(base)
        return attach_shapes(read, shapes) if shapes else read


@attrs.frozen(eq=False)
class LowRankFactors:
    """The adapter of one matrix: A `[..., r, in]`, B `[..., out, r]` and the scale of B A.

    With DoRA, `lengths` are the norms of the rows.
    """

    a: Tensor
    b: Tensor
    scale: float
    lengths: Tensor | None = None


# ---------------------------------------------------------------------------------------- modules


@attrs.frozen(kw_only=True)
class _RowMap:
    """Rows of one of our matrices that are outputs of a module of PEFT.

    A fused module has several; steps other than 1 are of families that interleave rows.
    """

    name: str
    inputs: int
    start: int
    peft_start: int
    count: int
    step: int = 1
    peft_step: int = 1

    @property
    def rows(self) -> slice:
        """The rows of our matrix."""
        end = self.start + (self.count - 1) * self.step + 1
        return slice(self.start, end, self.step)

    @property
    def peft_rows(self) -> slice:
        """The outputs of the module of PEFT."""
        end = self.peft_start + (self.count - 1) * self.peft_step + 1
        return slice(self.peft_start, end, self.peft_step)


def _map_modules(family: Family, config: DecoderConfig) -> dict[str, list[_RowMap]]:
    """Return the rows of ours that are the outputs of each module of PEFT, by its name."""
    modules: dict[str, list[_RowMap]] = {}
    names = ("gate", "up", "down")
    experts = {f"layers.{i}.mlp.experts.{x}" for i in config.expert_layers for x in names}
    links = make_family_links(family, config)
    for link in links:
        # Norms, biases and convolutions have no adapters. Experts follow below, packed.
        is_matrix = len(link.shape) == len(link.theirs.offset) == 2
        is_bias = link.ours.name.endswith("bias")
        if not is_matrix or is_bias or link.ours.name in experts:
            continue
        # The dimension of the link that is our rows; the folder's matrix may be transposed.
        row_dim = link.ours.dims.index(0)
        row_map = _RowMap(
            name=link.ours.name.removesuffix(".weight"),
            inputs=link.shape[link.ours.dims.index(1)],
            start=link.ours.offset[0],
            step=link.ours.steps[0],
            peft_start=link.theirs.offset[link.theirs.dims[row_dim]],
            peft_step=link.theirs.steps[row_dim],
            count=link.shape[row_dim],
        )
        module = _rename_for_memory(link.theirs.name).removesuffix(".weight")
        modules.setdefault(module, []).append(row_map)
    # Where a folder packs them too (gpt-oss), gates and ups take turns, which is not supported.
    if config.experts is not None and all(len(link.shape) < 3 for link in links):
        # A folder has a matrix for each expert, but `transformers` packs them when it loads them,
        # and PEFT names what is in memory.
        width = config.experts.width
        for i in config.expert_layers:
            name = f"layers.{i}.mlp.experts"
            module = f"model.layers.{i}.mlp.experts"
            modules[f"{module}.gate_up_proj"] = [
                _RowMap(
                    name=f"{name}.{key}",
                    inputs=config.width,
                    start=0,
                    peft_start=peft_start,
                    count=width,
                )
                for key, peft_start in (("gate", 0), ("up", width))
            ]
            modules[f"{module}.down_proj"] = [
                _RowMap(
                    name=f"{name}.down", inputs=width, start=0, peft_start=0, count=config.width
                )
            ]
    return modules


def _rename_for_memory(name: str) -> str:
    """Return the name that `transformers` gives a folder's tensor in memory: PEFT's name."""
    # Mixtral's: its module has this name in files, and in memory that of the other families.
    return name.replace(".block_sparse_moe.", ".mlp.")


# -------------------------------------------------------------------------------------------- out


def to_peft(
    held: Mapping[str, LowRankFactors],
    whole: Mapping[str, Tensor],
    family: Family,
    config: DecoderConfig,
    *,
    base: str | None,
    rank_stabilised: bool = False,
    dropout: float = 0.0,
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the configuration and the tensors of an adapter's folder.

    Args:
        held: The adapters, by the names of our matrices.
        whole: The full parameters that are trained, by our names; each must be all of a module of
            PEFT.
        family: The family of the base.
        config: The decoder.
        base: The path or name of the base, for `base_model_name_or_path`.
        rank_stabilised: Whether scales are alpha over the root of the rank.
        dropout: The dropout that the configuration gives.

    Raises:
        ConfigError: PEFT has no place for an adapter: its matrix is in no module of PEFT, some have
            DoRA and others not, parts of a fused matrix lack it, or a module of PEFT is trained in
            part. Or there is no adapter.
    """
    experts = sorted(name for name, factors in held.items() if factors.a.ndim == 3)
    use_dora = _check_dora(held, experts)
    modules = _map_modules(family, config)
    _check_modules(held, modules, family)
    tensors: dict[str, Tensor] = {}
    ranks: dict[str, int] = {}
    alphas: dict[str, float] = {}
    for module, row_maps in modules.items():
        if any(x.name in held for x in row_maps):
            fused = _fuse_factors(module, row_maps, held)
            rank = fused.a.shape[-2]
            ranks[module] = rank
            # PEFT stores alpha, and divides it by the rank of the fused adapter.
            alphas[module] = fused.scale * (rank**0.5 if rank_stabilised else rank)
            tensors |= _name_tensors(module, fused)
    modules_to_save, full_tensors = _collect_full_modules(whole, family, config)
    # The most frequent values are the defaults, and the patterns name the modules with others.
    rank = Counter(ranks.values()).most_common(1)[0][0]
    alpha = Counter(alphas.values()).most_common(1)[0][0]
    packed = [module for module in ranks if ".experts." in module]
    # Other settings have PEFT's defaults, which change nothing that is computed.
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "inference_mode": True,
        "r": rank,
        "lora_alpha": alpha,
        # PEFT reads the keys of these two tables as regular expressions.
        "rank_pattern": {re.escape(k): v for k, v in ranks.items() if v != rank},
        "alpha_pattern": {re.escape(k): v for k, v in alphas.items() if v != alpha},
        "target_modules": sorted(ranks.keys() - {*packed}),
        "target_parameters": packed or None,  # packed experts are parameters, and not modules
        "use_rslora": rank_stabilised,
        "use_dora": use_dora,
        "bias": "none",
        "modules_to_save": modules_to_save or None,
        "base_model_name_or_path": base,
        "lora_dropout": 0.0 if experts else dropout,  # PEFT has none for experts
        # Where the family stores matrices as [in, out], as GPT-2 does, PEFT transposes B A.
        "fan_in_fan_out": any(
            len(link.shape) == 2 and link.theirs.dims == (1, 0)
            for link in make_family_links(family, config)
        ),
    }
    return settings, tensors | full_tensors


def _check_modules(
    held: Mapping[str, LowRankFactors],
    modules: Mapping[str, Sequence[_RowMap]],
    family: Family,
) -> None:
    """Raise ConfigError unless there are adapters, each of a matrix in a module of PEFT."""
    mapped = {x.name for row_maps in modules.values() for x in row_maps}
    # Without a module an adapter would be missing in the folder.
    without_module = sorted(held.keys() - mapped)
    if without_module:
        raise ConfigError(
            f"to_peft: a {family.model_type} of PEFT has no module for the adapters of "
            f"{shorten(without_module)}; export with --merge",
            where="adapters",
            got=without_module,
        )
    if not held:
        raise ConfigError(
            "to_peft: no matrix has an adapter, and PEFT's LoRA needs one; export with --merge",
            where="adapters",
        )


def _check_dora(held: Mapping[str, LowRankFactors], experts: Sequence[str]) -> bool:
    """Return whether the adapters have DoRA; raise ConfigError where PEFT has no place for it."""
    doras = {factors.lengths is not None for factors in held.values()}
    if len(doras) > 1:
        raise ConfigError(
            "to_peft: PEFT has DoRA in all of an adapter or in none, and here some matrices have "
            "it; give all of them dora=True, or export with --merge",
            where="dora",
        )
    if experts and True in doras:
        raise ConfigError(
            f"to_peft: PEFT has no DoRA for experts, and {shorten(experts)} have; export with "
            "--merge",
            where="dora",
        )
    return True in doras


def _fuse_factors(
    module: str, row_maps: Sequence[_RowMap], held: Mapping[str, LowRankFactors]
) -> LowRankFactors:
    """Return the adapter of a fused matrix that computes what the adapters of its parts do.

    Of parts 1 and 2: A = [A1; A2], and B = [B1 0; 0 B2], whose rank is the sum of both ranks. Rows
    of a part without an adapter are 0 in B.
    """
    names = list(dict.fromkeys(x.name for x in row_maps if x.name in held))
    first = held[names[0]]
    num_outputs = max(x.peft_rows.stop for x in row_maps)
    rank = sum(held[name].a.shape[-2] for name in names)
    b = first.b.new_zeros(*first.b.shape[:-2], num_outputs, rank)
    lengths = None if first.lengths is None else first.lengths.new_zeros(num_outputs)
    missing = {x.name for x in row_maps} - held.keys()
    if lengths is not None and missing:  # a length of 0 would make those rows 0
        raise ConfigError(
            f"to_peft: {module} is one matrix there, and {shorten(sorted(missing))} of it has no "
            "DoRA here; give all of its parts dora=True, or export with --merge",
            where="dora",
        )
    start = 0
    starts: dict[str, int] = {}
    for name in names:
        starts[name] = start
        start += held[name].a.shape[-2]
    for x in row_maps:
        if x.name not in held:
            continue
        part = held[x.name]
        columns = slice(starts[x.name], starts[x.name] + part.a.shape[-2])
        # The fused adapter has one scale, that of the first part; B makes up for the others.
        factor = part.scale / first.scale
        b[..., x.peft_rows, columns] = part.b[..., x.rows, :] * factor
        # A row of the fused matrix is a row of one part, and so has the length of that row.
        if lengths is not None and part.lengths is not None:
            lengths[x.peft_rows] = part.lengths[x.rows]
    a = torch.cat([held[name].a for name in names], -2)
    return LowRankFactors(a, b, first.scale, lengths)


def _name_tensors(module: str, factors: LowRankFactors) -> dict[str, Tensor]:
    """Return the tensors of a module's adapter by PEFT's names."""
    path = f"{_PREFIX}{module}"
    a = factors.a
    b = factors.b
    if a.ndim == 3:
        # PEFT adapts both weights of packed experts by nesting: the module of `down_proj` wraps
        # that of `gate_up_proj`, which is therefore its base layer.
        path, _, weight = path.rpartition(".")
        path += ".base_layer" * (weight == "gate_up_proj")
        a = a.flatten(0, 1)
        b = b.permute(1, 2, 0).flatten(1)  # [E, out, r] to [out, r E], the expert last
    tensors = {f"{path}.lora_A.weight": a, f"{path}.lora_B.weight": b}
    if factors.lengths is not None:
        tensors[f"{path}.lora_magnitude_vector"] = factors.lengths
    return tensors


def _collect_full_modules(
    whole: Mapping[str, Tensor], family: Family, config: DecoderConfig
) -> tuple[list[str], dict[str, Tensor]]:
    """Return the modules of PEFT that are trained in full, and their tensors."""
    links_by_name: dict[str, list[Link]] = {}
    for link in make_family_links(family, config):
        links_by_name.setdefault(link.theirs.name, []).append(link)
    modules = {
        name.rpartition(".")[0]
        for name, links in links_by_name.items()
        if any(link.ours.name in whole for link in links)
    }
    # PEFT saves a module with all of its parameters, so all must be trained, weight and bias.
    tensors: dict[str, Tensor] = {}
    for name, links in links_by_name.items():
        module = name.rpartition(".")[0]
        if module not in modules:
            continue
        missing = [link.ours.name for link in links if link.ours.name not in whole]
        if missing or not all(_is_plain(link, whole[link.ours.name]) for link in links):
            raise ConfigError(
                f"to_peft: PEFT saves {module} whole, and here it is trained in part "
                f"({shorten(missing) or 'in other pieces'}); export with --merge",
                where=module,
            )
        rows = [whole[link.ours.name] for link in links]  # fused parts, in their order
        tensors[f"{_PREFIX}{_rename_for_memory(name)}"] = torch.cat(rows)
    embedding = f"{_PREFIX}model.embed_tokens.weight"
    if config.tied and embedding in tensors:
        # PEFT does not tie what it saves: without a copy the head would stay that of the base.
        tensors[f"{_PREFIX}lm_head.weight"] = tensors[embedding].clone()
        modules.add("lm_head")
    return sorted(map(_rename_for_memory, modules)), tensors


def _is_plain(link: Link, full: Tensor) -> bool:
    """Return whether a link is all of our tensor, in the order of the folder's."""
    order = tuple(range(len(link.shape)))
    return (
        link.ours.dims == order
        and link.theirs.dims == order
        and link.theirs.steps == (1,) * len(order)
        and link.shape == tuple(full.shape)
    )


# --------------------------------------------------------------------------------------------- in


def read_peft(folder: Path | str, family: Family, config: DecoderConfig) -> PeftAdapter:
    """Read an adapter's folder, written by PEFT or by `export_peft`.

    Args:
        folder: The folder.
        family: The family of its base, `hub.open_folder(base).family`.
        config: The decoder.

    Raises:
        ConfigError: The adapter is no LoRA, or has unknown options that change what is computed;
            the message names all of them.
        CheckpointError: A file is missing or malformed; or tensors have no place in the model, a
            wrong shape, or no other half; the message names all of them.

    Effects:
        Reads the folder.

    Examples:
        >>> from trainkit.weights.hub.configs import match_family
        >>> from trainkit.models import make_decoder_config
        >>> tiny = make_decoder_config("tiny")
        >>> read_peft("/does/not/exist", match_family(tiny), tiny)
        Traceback (most recent call last):
        trainkit.types.CheckpointError: checkpoint: /does/not/exist/adapter_config.json cannot ...
    """
    folder = Path(folder)
    settings = parse_untrusted_table(
        read_bounded(folder / CONFIG, _MAX_CONFIG_BYTES, shared=True), folder / CONFIG
    )
    _check_settings(settings, folder / CONFIG)
    tensors = {
        name: read_box(x, x.shape, (0,) * len(x.shape))
        for name, x in safetensors_file(folder / TENSORS).items()
    }
    modules = _map_modules(family, config)
    parts_by_module, problems = _group_by_module(tensors, modules, config)
    factors: dict[str, LowRankFactors] = {}
    for module, parts in parts_by_module.items():
        if {"a", "b"} <= parts.keys():
            factors |= _split_factors(module, parts, modules[module], settings, problems)
        else:
            problems.append(f"{module} has one of lora_A and lora_B alone")
    full = _read_full_tensors(tensors, settings, family, config, problems)
    if problems or not factors:
        raise CheckpointError(
            f"read_peft: {folder} is no adapter of this {family.model_type}: "
            f"{shorten(problems) or 'it holds none'}",
            where=folder,
            got=problems,
        )

    def fill(base: Weights, name: str, shape: Sequence[int], offset: Sequence[int]) -> Tensor:
        # The folder has all values, DoRA's magnitudes too: nothing is computed from the base.
        del base
        matrix, _, key = split_name(name)
        adapter = factors[matrix]
        value = {"a": adapter.a, "b": adapter.b, "magnitude": adapter.lengths}[key]
        assert value is not None
        return narrow_to_box(value, shape, offset)

    loras = tuple(_make_loras(factors, settings))
    trained = join_names(full) if full else None
    return PeftAdapter(loras, trained, values=fill, whole=full)


def _is_number(x: Any) -> bool:
    return type(x) in (int, float)  # a bool is an int, too, and no number of JSON


def _is_table(x: Any) -> bool:
    return x is None or (
        isinstance(x, dict) and all(_is_number(value) and value > 0 for value in x.values())
    )


_NUMBER, _TABLE = "a number above 0", "a table of numbers above 0"
_KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "r": ("a whole number above 0", lambda x: type(x) is int and x > 0),
    "lora_alpha": (_NUMBER, lambda x: _is_number(x) and x > 0),
    "lora_dropout": ("a number in [0, 1)", lambda x: _is_number(x) and 0 <= x < 1),
    "rank_pattern": (_TABLE, _is_table),
    "alpha_pattern": (_TABLE, _is_table),
    "use_rslora": ("true or false", lambda x: type(x) is bool),
    "use_dora": ("true or false", lambda x: type(x) is bool),
    _TYING: ("true or false", lambda x: type(x) is bool),
}


def _check_settings(settings: Mapping[str, Any], where: Path) -> None:
    """Raise ConfigError for options that change what is computed and are not supported."""
    problems = [
        f"{key} is {settings[key]!r}, not {' or '.join(map(repr, choices))}"
        for key, choices in _MUST_BE.items()
        if settings.get(key, choices[0]) not in choices
    ]
    problems += [
        f"{key} is {settings[key]!r}, not {description}"
        for key, (description, is_valid) in _KINDS.items()
        if key in settings and not is_valid(settings[key])
    ]
    known = _SETTINGS_READ | _SETTINGS_IGNORED | _MUST_BE.keys()
    # PEFT writes all of its options, so an unknown one matters only where it is switched on.
    problems += [
        f"{key} is {value!r}, which is not known here"
        for key, value in settings.items()
        if key not in known and value not in (None, False, {}, [])
    ]
    if problems:
        raise ConfigError(
            f"read_peft: {where}: {shorten(problems)}", where=str(where), got=problems
        )


def _group_by_module(
    tensors: Mapping[str, Tensor], modules: Mapping[str, Any], config: DecoderConfig
) -> tuple[dict[str, dict[str, Tensor]], list[str]]:
    """Return the tensors of each module's adapter, and problems: tensors without a place."""
    parts_by_module: dict[str, dict[str, Tensor]] = {}
    problems: list[str] = []
    for name, x in tensors.items():
        # Some versions of PEFT write "lora_magnitude_vector.weight".
        plain = name.removesuffix(".weight") if "magnitude" in name else name
        suffix = next((suffix for suffix in _PARTS if plain.endswith(f".{suffix}")), None)
        if suffix is None:  # a full parameter, of `modules_to_save`
            if "lora_" in name:
                problems.append(f"{name} is of a kind that is not known here")
            continue
        key = _PARTS[suffix]
        value = x
        module = plain.removeprefix(_PREFIX).removesuffix(f".{suffix}")
        if module.endswith((".experts", ".experts.base_layer")) and config.experts is not None:
            module, value = _unflatten_experts(module, key, tensors, x, config)
        if module not in modules or not x.is_floating_point():
            problems.append(f"{name} of the shape {list(x.shape)} has no place in the model")
            continue
        parts_by_module.setdefault(module, {})[key] = value
    return parts_by_module, problems


def _unflatten_experts(
    module: str, key: str, tensors: Mapping[str, Tensor], x: Tensor, config: DecoderConfig
) -> tuple[str, Tensor]:
    """Return the module of a tensor of an adapter of packed experts, and A or B `[E, ...]`."""
    assert config.experts is not None
    count = config.experts.count
    path = f"{_PREFIX}{module}"
    a = tensors.get(f"{path}.lora_A.weight")
    b = tensors.get(f"{path}.lora_B.weight")
    # If both weights have adapters, the outer one is that of `down_proj`, and the inner one, at
    # "base_layer", that of `gate_up_proj`; a single one is recognized by its sizes.
    if module.endswith(".base_layer"):
        module = module.replace(".base_layer", ".gate_up_proj")
    elif f"{path}.base_layer.lora_A.weight" in tensors or a is None or b is None:
        module += ".down_proj"
    elif (a.shape[-1], b.shape[0]) == (config.width, 2 * config.experts.width):
        module += ".gate_up_proj"
    else:
        module += ".down_proj"
    if x.ndim != 2 or x.shape[key == "b"] % count:
        # No module has this name, so the caller reports the tensor.
        return f"{module}.of_other_experts", x
    # A is [E r, in], the expert first; B is [out, r E], the expert last.
    if key == "a":
        return module, x.unflatten(0, (count, -1))
    return module, x.unflatten(1, (-1, count)).permute(2, 0, 1)


def _split_factors(
    module: str,
    parts: Mapping[str, Tensor],
    row_maps: Sequence[_RowMap],
    settings: Mapping[str, Any],
    problems: list[str],
) -> dict[str, LowRankFactors]:
    """Split a module's adapter into the adapters of our matrices, or add to `problems`."""
    a = parts["a"]
    b = parts["b"]
    lengths = parts.get("magnitude")
    num_outputs = max(x.peft_rows.stop for x in row_maps)
    if not (
        a.ndim == b.ndim
        and b.shape[-2] == num_outputs
        and a.shape[-2] == b.shape[-1]
        and {a.shape[-1]} == {x.inputs for x in row_maps}
        and (lengths is not None) == bool(settings.get("use_dora"))
        and (lengths is None or tuple(lengths.shape) == (num_outputs,))
    ):
        shapes = {name: list(x.shape) for name, x in parts.items()}
        problems.append(
            f"{module} has {shapes}, which are no adapter of {num_outputs} outputs and "
            f"{row_maps[0].inputs} inputs"
        )
        return {}
    rank = a.shape[-2]
    # The scale depends on the rank, so a configuration of another rank is a mistake. Without
    # an entry both are 8, PEFT's default.
    expected_rank = _find_by_pattern(settings, "rank_pattern", module, settings.get("r", 8))
    if rank != expected_rank:
        problems.append(f"{module} has the rank {rank}, and {CONFIG} says {expected_rank}")
        return {}
    alpha = _find_by_pattern(settings, "alpha_pattern", module, settings.get("lora_alpha", 8))
    scale = alpha / (rank**0.5 if settings.get("use_rslora") else rank)
    factors: dict[str, LowRankFactors] = {}
    for name in dict.fromkeys(x.name for x in row_maps):
        # Of a fused matrix, the parts share A and have rows of B each.
        local_maps = [x for x in row_maps if x.name == name]
        num_rows = sum(x.count for x in local_maps)
        local_b = b.new_zeros(*b.shape[:-2], num_rows, rank)
        local_lengths = None if lengths is None else lengths.new_zeros(num_rows)
        for x in local_maps:
            local_b[..., x.rows, :] = b[..., x.peft_rows, :]
            if lengths is not None and local_lengths is not None:
                local_lengths[x.rows] = lengths[x.peft_rows]
        factors[name] = LowRankFactors(a, local_b, scale, local_lengths)
    return factors


def _find_by_pattern(settings: Mapping[str, Any], table: str, module: str, default: float) -> float:
    """Return the value of a module in a table of patterns, matched as PEFT matches them."""
    for pattern, value in (settings.get(table) or {}).items():  # the first match counts
        try:
            if re.match(rf"(.*\.)?({pattern})$", module):
                return value
        except re.error as error:
            raise ConfigError(
                f"read_peft: {table} has {pattern!r}, which is no regular expression",
                where=table,
                got=pattern,
            ) from error
    return default


def _read_full_tensors(
    tensors: Mapping[str, Tensor],
    settings: Mapping[str, Any],
    family: Family,
    config: DecoderConfig,
    problems: list[str],
) -> dict[str, Tensor]:
    """Return the full parameters of a folder by our names, and add to `problems`."""
    full = {name.removeprefix(_PREFIX): x for name, x in tensors.items() if "lora_" not in name}
    # Our tied decoder has one parameter for embedding and head: both must be equal in the folder.
    if config.tied and "lm_head.weight" in full:
        head = full.pop("lm_head.weight")
        # A missing embedding counts as one of no rows, which equals no head.
        if not torch.equal(head, full.get("model.embed_tokens.weight", head[:0])):
            problems.append("lm_head.weight is tied to the embedding, which is not the same there")
    elif config.tied and "model.embed_tokens.weight" in full and not settings.get(_TYING):
        problems.append(
            "embed_tokens is trained and the head is not, to which it is tied here: PEFT leaves "
            f"the base's head as it was, unless {_TYING} is true; train it with {_TYING}=True, or "
            'with modules_to_save=["embed_tokens", "lm_head"] and equal values in both'
        )
    parameters: dict[str, Tensor] = {}
    used: set[str] = set()
    for link in make_family_links(family, config):
        name = _rename_for_memory(link.theirs.name)
        if name not in full:
            continue
        used.add(name)
        x = full[name]
        start = link.theirs.offset[0]  # where our part of a fused matrix starts
        rows = x[start : start + link.shape[0]]
        if tuple(rows.shape) != link.shape or not _is_plain(link, rows):
            problems.append(f"{name} has the shape {list(x.shape)}, which cannot be taken whole")
        parameters[link.ours.name] = rows
    problems += [f"{name} has no place in the model" for name in full.keys() - used]
    return parameters


def _make_loras(
    factors: Mapping[str, LowRankFactors], settings: Mapping[str, Any]
) -> Iterable[Lora]:
    """Yield a specification for all adapters of the same rank and scale."""
    # PEFT has no dropout for experts, so these are groups of their own.
    groups: dict[tuple[int, float, bool], list[str]] = {}
    for name, x in factors.items():
        rank = x.a.shape[-2]
        is_expert = x.a.ndim == 3
        groups.setdefault((rank, x.scale, is_expert), []).append(name)
    is_rank_stabilised = bool(settings.get("use_rslora"))
    for (rank, scale, is_expert), names in groups.items():
        yield Lora(
            join_names(names),
            rank=rank,
            alpha=scale * (rank**0.5 if is_rank_stabilised else rank),
            dropout=0.0 if is_expert else float(settings.get("lora_dropout", 0.0)),
            rank_stabilised=is_rank_stabilised,
            dora=bool(settings.get("use_dora")),
        )
