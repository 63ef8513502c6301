"""Adapters in PEFT's format, both ways: `adapter_config.json` and `adapter_model.safetensors`.

What a family's folder joins, the adapter of one matrix there is that of several here. Theirs comes
to ours as the rows of B that belong to each, beside the same A; ours goes to theirs as blocks: the
rows of A one after another, and B zeros where a part does not see them.
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
from trainkit.parallel.materialize import Fill, listed, narrow_to_box, shapes_of
from trainkit.post.adapters.lowrank import EXPERT_WEIGHTS, Lora, split_name
from trainkit.types import CheckpointError, ConfigError, Weights
from trainkit.weights.checkpoint.boxes import shorten
from trainkit.weights.checkpoint.reading import reader
from trainkit.weights.checkpoint.safe_files import read_bounded
from trainkit.weights.checkpoint.tensor_files import parse_untrusted_table, safetensors_file
from trainkit.weights.hub.families import Family
from trainkit.weights.hub.folder import make_family_links
from trainkit.weights.hub.links import Link

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_BYTES = 4 * 1024 * 1024
_BEFORE = "base_model.model."
_PARTS = {"lora_A.weight": "a", "lora_B.weight": "b", "lora_magnitude_vector": "magnitude"}
_INSIDE = "model.layers.{i}.mlp.experts"
_READ = {
    *("peft_type", "r", "lora_alpha", "lora_dropout", "rank_pattern", "alpha_pattern"),
    *("use_rslora", "use_dora", "modules_to_save", "fan_in_fan_out"),
    "ensure_weight_tying",
}
_TOLD_BY_TENSORS = {
    *("target_modules", "target_parameters", "exclude_modules", "layers_to_transform"),
    *("layers_pattern", "base_model_name_or_path", "inference_mode", "task_type", "revision"),
    *("peft_version", "auto_mapping", "megatron_core", "qalora_group_size"),
}
_TYING = "ensure_weight_tying"
_MUST_BE = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian"),
}


@attrs.frozen(eq=False)
class PeftAdapter:
    """An adapter's folder, as `lora` takes it.

    `lora(*found.loras, trained=found.trained, values=found.values)` in a plan, and
    `weights=found.weights(base)` for the model: what the folder holds whole is taken from there.

    Attributes:
        loras: Which matrices have an adapter.
        trained: A pattern of the parameters that are whole in the folder, or None.
        values: Gives the values of the adapters.
        whole: The parameters that are whole in the folder, by our names.
    """

    loras: tuple[Lora, ...]
    trained: str | None
    values: Fill
    whole: Mapping[str, Tensor]

    def weights(self, base: Weights) -> Weights:
        """Return the weights of the base with what is whole in the folder in its place."""

        def give(name: str, shape: Sequence[int], offset: Sequence[int]) -> Tensor:
            if name in self.whole:
                return narrow_to_box(self.whole[name], shape, offset)
            return base(name, shape, offset)

        held = shapes_of(base)
        return listed(give, held) if held else give


@attrs.frozen(eq=False)
class LowRankFactors:
    """The adapter of one matrix: A `[..., r, in]`, B `[..., out, r]`, what they are scaled by.

    `lengths` are those of the rows, with DoRA.
    """

    a: Tensor
    b: Tensor
    scale: float
    lengths: Tensor | None = None


# ------------------------------------------------------------------------------------------ places


@attrs.frozen
class _Rows:
    """Rows of one of our matrices that are outputs of a module of theirs, which has `inputs`."""

    ours: str
    inputs: int
    first: int
    step: int
    theirs: int
    their_step: int
    count: int


def _modules(family: Family, config: DecoderConfig) -> dict[str, list[_Rows]]:
    """Return by module of theirs, as PEFT names it, which rows of ours its outputs are."""
    found: dict[str, list[_Rows]] = {}
    experts = {f"layers.{i}.mlp.experts.{x}" for i in config.expert_layers for x in EXPERT_WEIGHTS}
    for link in make_family_links(family, config):
        if len(link.shape) == 2 and link.ours.name not in experts:
            module = _in_memory(link.theirs.name).removesuffix(".weight")
            found.setdefault(module, []).append(_rows(link))
    if config.experts is not None:  # in memory `transformers` holds them packed
        width = config.experts.width
        for i in config.expert_layers:
            ours, theirs = f"layers.{i}.mlp.experts", _INSIDE.format(i=i)
            found[f"{theirs}.gate_up_proj"] = [
                _Rows(f"{ours}.{x}", config.width, 0, 1, at, 1, width)
                for x, at in (("gate", 0), ("up", width))
            ]
            down = _Rows(f"{ours}.down", width, 0, 1, 0, 1, config.width)
            found[f"{theirs}.down_proj"] = [down]
    return found


def _in_memory(name: str) -> str:
    """Return what `transformers` calls a tensor of a folder in memory, which is PEFT's name."""
    return name.replace(".block_sparse_moe.", ".mlp.")


def _rows(link: Link) -> _Rows:
    ours, theirs = link.ours, link.theirs
    out = theirs.dims[ours.dims.index(0)]
    return _Rows(
        ours.name.removesuffix(".weight"),
        link.shape[ours.dims.index(1)],
        ours.offset[0],
        ours.steps[0],
        theirs.offset[out],
        theirs.steps[ours.dims.index(0)],
        link.shape[ours.dims.index(0)],
    )


def _places(rows: _Rows) -> tuple[slice, slice]:
    """Return which rows they are, here and there."""
    here = slice(rows.first, rows.first + (rows.count - 1) * rows.step + 1, rows.step)
    last = rows.theirs + (rows.count - 1) * rows.their_step
    return here, slice(rows.theirs, last + 1, rows.their_step)


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
        held: Adapters by the names of our matrices.
        whole: What is trained whole, by our names; each must be all that its module there has.
        family: The family of the base.
        config: The decoder.
        base: Where the base is, for `base_model_name_or_path`.
        rank_stabilised: Whether their scales are over the root of the rank.
        dropout: What the configuration says.

    Raises:
        ConfigError: PEFT has no place for an adapter: some have DoRA and others not, parts of a
            joined matrix lack it, or a module there is trained in part.
    """
    doras = {one.lengths is not None for one in held.values()}
    if len(doras) > 1:
        raise ConfigError(
            "to_peft: PEFT has DoRA in all of an adapter or in none, and here some matrices have "
            "it; give all of them dora=True, or export with --merge",
            where="dora",
        )
    experts = sorted(name for name, one in held.items() if one.a.ndim == 3)
    if experts and True in doras:
        raise ConfigError(
            f"to_peft: PEFT has no DoRA for experts, and {shorten(experts)} have; export with "
            "--merge",
            where="dora",
        )
    places = _modules(family, config)
    tensors: dict[str, Tensor] = {}
    known: dict[str, tuple[int, float]] = {}
    for module, parts in places.items():
        if any(rows.ours in held for rows in parts):
            joined = _joined(module, parts, held)
            rank = joined.a.shape[-2]
            known[module] = rank, joined.scale * (rank**0.5 if rank_stabilised else rank)
            tensors |= _named(module, joined)
    saved, own = _whole_modules(whole, family, config)
    settings = _settings(known, rank_stabilised=rank_stabilised, dora=True in doras)
    settings |= {"modules_to_save": saved or None, "base_model_name_or_path": base}
    settings |= {"lora_dropout": 0.0 if experts else dropout}  # PEFT has none for experts
    turned = [
        x
        for x in make_family_links(family, config)
        if len(x.shape) == 2 and x.theirs.dims == (1, 0)
    ]
    settings["fan_in_fan_out"] = bool(turned)
    return settings, tensors | own


def _joined(
    module: str, parts: Sequence[_Rows], held: Mapping[str, LowRankFactors]
) -> LowRankFactors:
    """Return the one adapter of a module there that computes what those of its parts do."""
    names = list(dict.fromkeys(rows.ours for rows in parts if rows.ours in held))
    ranks = [held[name].a.shape[-2] for name in names]
    first = held[names[0]]
    outputs = max(rows.theirs + (rows.count - 1) * rows.their_step + 1 for rows in parts)
    b = first.b.new_zeros(*first.b.shape[:-2], outputs, sum(ranks))
    lengths = None if first.lengths is None else first.lengths.new_zeros(outputs)
    lacking = {rows.ours for rows in parts} - held.keys()
    if lengths is not None and lacking:
        raise ConfigError(
            f"to_peft: {module} is one matrix there, and {shorten(sorted(lacking))} of it has no "
            "DoRA here; give all of its parts dora=True, or export with --merge",
            where="dora",
        )
    for rows in parts:
        if rows.ours not in held:
            continue
        one, number = held[rows.ours], names.index(rows.ours)
        begin, (here, there) = sum(ranks[:number]), _places(rows)
        factor = one.scale / first.scale
        b[..., there, begin : begin + ranks[number]] = one.b[..., here, :] * factor
        if lengths is not None and one.lengths is not None:
            lengths[there] = one.lengths[here]
    return LowRankFactors(torch.cat([held[name].a for name in names], -2), b, first.scale, lengths)


def _named(module: str, one: LowRankFactors) -> dict[str, Tensor]:
    """Return the tensors of a module's adapter by PEFT's names."""
    path = f"{_BEFORE}{module}"
    if one.a.ndim == 3:  # experts: those of `down_proj` wrap those of `gate_up_proj`
        path, _, which = path.rpartition(".")
        path += ".base_layer" * (which == "gate_up_proj")
        a, b = one.a.flatten(0, 1), one.b.permute(1, 2, 0).flatten(1)
    else:
        a, b = one.a, one.b
    found = {f"{path}.lora_A.weight": a, f"{path}.lora_B.weight": b}
    return found | ({} if one.lengths is None else {f"{path}.lora_magnitude_vector": one.lengths})


def _settings(
    known: Mapping[str, tuple[int, float]], *, rank_stabilised: bool, dora: bool
) -> dict[str, Any]:
    """Return what an `adapter_config.json` says of modules of these ranks and alphas."""
    ranks = {module: rank for module, (rank, _) in known.items()}
    alphas = {module: alpha for module, (_, alpha) in known.items()}
    rank, alpha = (Counter(x.values()).most_common(1)[0][0] for x in (ranks, alphas))
    experts = [module for module in known if ".experts." in module]
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "inference_mode": True,
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": {re.escape(k): v for k, v in ranks.items() if v != rank},
        "alpha_pattern": {re.escape(k): v for k, v in alphas.items() if v != alpha},
        "target_modules": sorted(known.keys() - {*experts}),
        "target_parameters": experts or None,
        "use_rslora": rank_stabilised,
        "use_dora": dora,
        "bias": "none",
    }


def _whole_modules(
    whole: Mapping[str, Tensor], family: Family, config: DecoderConfig
) -> tuple[list[str], dict[str, Tensor]]:
    """Return the modules there that are trained whole, and their tensors."""
    parts: dict[str, list[Link]] = {}
    for link in make_family_links(family, config):
        parts.setdefault(link.theirs.name, []).append(link)
    trained = {name for name, links in parts.items() if any(x.ours.name in whole for x in links)}
    modules = {name.rpartition(".")[0] for name in trained}
    found: dict[str, Tensor] = {}
    for name, links in parts.items():
        module = name.rpartition(".")[0]
        if module not in modules:
            continue
        lacking = [link.ours.name for link in links if link.ours.name not in whole]
        if lacking or not all(_is_plain(link, whole[link.ours.name]) for link in links):
            raise ConfigError(
                f"to_peft: PEFT saves {module} whole, and here it is trained in part "
                f"({shorten(lacking) or 'in other pieces'}); export with --merge",
                where=module,
            )
        rows = [whole[link.ours.name] for link in links]
        found[f"{_BEFORE}{_in_memory(name)}"] = torch.cat(rows)
    embedding = f"{_BEFORE}model.embed_tokens.weight"
    if config.tied and embedding in found:  # the head too, which PEFT would otherwise leave
        found[f"{_BEFORE}lm_head.weight"] = found[embedding].clone()
        modules.add("lm_head")
    return sorted(map(_in_memory, modules)), found


def _is_plain(link: Link, whole: Tensor) -> bool:
    """Say whether a link is all of a tensor of ours, in the order of theirs."""
    order, steps = tuple(range(len(link.shape))), (1,) * len(link.shape)
    plain = (link.ours.dims, link.theirs.dims) == (order, order)
    return plain and link.theirs.steps == steps and link.shape == tuple(whole.shape)


# --------------------------------------------------------------------------------------------- in


def read_peft(folder: Path | str, family: Family, config: DecoderConfig) -> PeftAdapter:
    """Read an adapter's folder that PEFT has written, or `export` has.

    Args:
        folder: The folder.
        family: The family of its base, `hub.open_folder(base).family`.
        config: The decoder.

    Raises:
        ConfigError: It is no LoRA, or has options that change what is computed and are not known
            here: all are named.
        CheckpointError: A file is missing or no good one; tensors have no place in the model, are
            of another shape, or lack their other half: all are named.

    Effects:
        Reads the folder.

    Examples:
        >>> from trainkit.weights.hub import match_family
        >>> from trainkit.models import make_decoder_config
        >>> tiny = make_decoder_config("tiny")
        >>> read_peft("/does/not/exist", match_family(tiny), tiny)
        Traceback (most recent call last):
        trainkit.types.CheckpointError: checkpoint: /does/not/exist/adapter_config.json cannot ...
    """
    folder = Path(folder)
    told = parse_untrusted_table(
        read_bounded(folder / CONFIG, _BYTES, shared=True), folder / CONFIG
    )
    _check_settings(told, folder / CONFIG)
    stored = safetensors_file(folder / TENSORS)
    read = reader(stored)
    tensors = {name: read(name, x.shape, (0,) * len(x.shape)) for name, x in stored.items()}
    places = _modules(family, config)
    found, problems = _split_names(tensors, places, config)
    halves = [module for module, parts in found.items() if not {"a", "b"} <= parts.keys()]
    problems += [f"{module} has one of lora_A and lora_B alone" for module in halves]
    ours: dict[str, LowRankFactors] = {}
    for module, parts in found.items():
        if module not in halves:
            ours |= _apart(module, parts, places[module], told, problems)
    whole = _whole_tensors(tensors, told, family, config, problems)
    if problems or not ours:
        raise CheckpointError(
            f"read_peft: {folder} is no adapter of this {family.model_type}: "
            f"{shorten(problems) or 'it holds none'}",
            where=folder,
            got=problems,
        )
    loras = tuple(_loras_of(ours, told))
    trained = "|".join(map(re.escape, whole)) or None
    return PeftAdapter(loras, trained, _values_of(ours), whole)


def _is_number(x: Any) -> bool:
    return type(x) in (int, float)


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


def _check_settings(told: Mapping[str, Any], where: Path) -> None:
    """Refuse options that change what is computed, and are not known here."""
    problems = [
        f"{key} is {told[key]!r}, not {' or '.join(map(repr, may))}"
        for key, may in _MUST_BE.items()
        if told.get(key, may[0]) not in may
    ]
    problems += [
        f"{key} is {told[key]!r}, not {want}"
        for key, (want, is_one) in _KINDS.items()
        if key in told and not is_one(told[key])
    ]
    known = _READ | _TOLD_BY_TENSORS | _MUST_BE.keys()
    problems += [
        f"{key} is {value!r}, which is not known here"
        for key, value in told.items()
        if key not in known and value not in (None, False, {}, [])
    ]
    if problems:
        raise ConfigError(
            f"read_peft: {where}: {shorten(problems)}", where=str(where), got=problems
        )


def _split_names(
    tensors: Mapping[str, Tensor], places: Mapping[str, Any], config: DecoderConfig
) -> tuple[dict[str, dict[str, Tensor]], list[str]]:
    """Return the parts of each module's adapter, and what has no place."""
    found: dict[str, dict[str, Tensor]] = {}
    problems: list[str] = []
    for name, x in tensors.items():
        plain = name.removesuffix(".weight") if "magnitude" in name else name
        end = next((end for end in _PARTS if plain.endswith(f".{end}")), None)
        if end is None:
            if "lora_" in name:
                problems.append(f"{name} is of a kind that is not known here")
            continue
        module, key = plain.removeprefix(_BEFORE).removesuffix(f".{end}"), _PARTS[end]
        own = x
        if module.endswith((".experts", ".experts.base_layer")) and config.experts is not None:
            first = _is_first(f"{_BEFORE}{module}", tensors, config)
            module, own = _of_experts(module, key, x, config.experts.count)
            if not module.endswith("_proj"):
                module += ".gate_up_proj" if first else ".down_proj"
        if module not in places or not x.is_floating_point():
            problems.append(f"{name} of the shape {list(x.shape)} has no place in the model")
            continue
        found.setdefault(module, {})[key] = own
    return found, problems


def _of_experts(module: str, key: str, x: Tensor, count: int) -> tuple[str, Tensor]:
    """Return an adapter of experts with a dimension for them, and the weight, as far as known."""
    module = module.replace(".base_layer", ".gate_up_proj")
    if x.ndim != 2 or x.shape[key == "b"] % count:
        return f"{module}.of_other_experts_proj", x
    if key == "a":
        return module, x.unflatten(0, (count, -1))
    return module, x.unflatten(1, (-1, count)).permute(2, 0, 1)


def _is_first(path: str, tensors: Mapping[str, Tensor], config: DecoderConfig) -> bool:
    """Say whether the adapter of experts at a path is that of `gate_up_proj`: alone, by its sizes.

    Beside another one it is that of `down_proj`, which wraps it.
    """
    assert config.experts is not None
    a, b = (tensors.get(f"{path}.{half}.weight") for half in ("lora_A", "lora_B"))
    if f"{path}.base_layer.lora_A.weight" in tensors or a is None or b is None:
        return False
    return (a.shape[-1], b.shape[0]) == (config.width, 2 * config.experts.width)


def _apart(
    module: str,
    parts: Mapping[str, Tensor],
    rows: Sequence[_Rows],
    told: Mapping[str, Any],
    problems: list[str],
) -> dict[str, LowRankFactors]:
    """Return the adapters of our matrices that a module's there is."""
    a, b, lengths = parts["a"], parts["b"], parts.get("magnitude")
    outputs = max(x.theirs + (x.count - 1) * x.their_step + 1 for x in rows)
    fits = a.ndim == b.ndim and b.shape[-2] == outputs and a.shape[-2] == b.shape[-1]
    fits = fits and {a.shape[-1]} == {x.inputs for x in rows}
    fits = fits and (lengths is not None) == bool(told.get("use_dora"))
    if not fits or (lengths is not None and tuple(lengths.shape) != (outputs,)):
        shapes = {name: list(x.shape) for name, x in parts.items()}
        sizes = f"{outputs} outputs and {rows[0].inputs} inputs"
        problems.append(f"{module} has {shapes}, which are no adapter of {sizes}")
        return {}
    rank, asked = a.shape[-2], _by_pattern(told, "rank_pattern", module, told.get("r", 8))
    if rank != asked:
        problems.append(f"{module} has the rank {rank}, and {CONFIG} says {asked}")
        return {}
    alpha = _by_pattern(told, "alpha_pattern", module, told.get("lora_alpha", 8))
    scale = alpha / (rank**0.5 if told.get("use_rslora") else rank)
    found: dict[str, LowRankFactors] = {}
    for name in dict.fromkeys(x.ours for x in rows):
        own = [x for x in rows if x.ours == name]
        size = sum(x.count for x in own)
        own_lengths = None if lengths is None else lengths[:size].clone()
        part = LowRankFactors(a, b.new_zeros(*b.shape[:-2], size, rank), scale, own_lengths)
        for x in own:
            here, there = _places(x)
            part.b[..., here, :] = b[..., there, :]
            if lengths is not None and part.lengths is not None:
                part.lengths[here] = lengths[there]
        found[name] = part
    return found


def _by_pattern(told: Mapping[str, Any], table: str, module: str, default: float) -> float:
    """Return what a table of patterns says of a module, as PEFT reads it."""
    for pattern, value in (told.get(table) or {}).items():
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


def _whole_tensors(
    tensors: Mapping[str, Tensor],
    told: Mapping[str, Any],
    family: Family,
    config: DecoderConfig,
    problems: list[str],
) -> dict[str, Tensor]:
    """Return what is whole in a folder by our names."""
    whole = {name.removeprefix(_BEFORE): x for name, x in tensors.items() if "lora_" not in name}
    if config.tied and "lm_head.weight" in whole:
        head = whole.pop("lm_head.weight")
        if not torch.equal(head, whole.get("model.embed_tokens.weight", head[:0])):
            problems.append("lm_head.weight is tied to the embedding, which is not the same there")
    elif config.tied and "model.embed_tokens.weight" in whole and not told.get(_TYING):
        problems.append(
            "embed_tokens is trained and the head is not, to which it is tied here: PEFT keeps the "
            f"base's head beside it, unless {_TYING} is true; train it with {_TYING}=True, or with "
            'modules_to_save=["embed_tokens", "lm_head"] and equal values in both'
        )
    found: dict[str, Tensor] = {}
    used: set[str] = set()
    for link in make_family_links(family, config):
        name = _in_memory(link.theirs.name)
        if name not in whole:
            continue
        used.add(name)
        begin, x = link.theirs.offset[0], whole[name]
        rows = x[begin : begin + link.shape[0]]
        if tuple(rows.shape) != link.shape or not _is_plain(link, rows):
            problems.append(f"{name} has the shape {list(x.shape)}, which cannot be taken whole")
        found[link.ours.name] = rows
    problems += [f"{name} has no place in the model" for name in whole.keys() - used]
    return found


def _loras_of(ours: Mapping[str, LowRankFactors], told: Mapping[str, Any]) -> Iterable[Lora]:
    """Yield the specifications of adapters: one for all that are of one rank and scale."""
    groups: dict[tuple[int, float, bool], list[str]] = {}
    for name, one in ours.items():
        groups.setdefault((one.a.shape[-2], one.scale, one.a.ndim == 3), []).append(name)
    stable = bool(told.get("use_rslora"))
    for (rank, scale, of_experts), names in groups.items():
        yield Lora(
            "|".join(map(re.escape, names)),
            rank=rank,
            alpha=scale * (rank**0.5 if stable else rank),
            dropout=0.0 if of_experts else float(told.get("lora_dropout", 0.0)),
            rank_stabilised=stable,
            dora=bool(told.get("use_dora")),
        )


def _values_of(ours: Mapping[str, LowRankFactors]) -> Fill:
    """Return what fills the adapters."""

    def fill(base: Weights, name: str, shape: Sequence[int], offset: Sequence[int]) -> Tensor:
        del base
        matrix, _, key = split_name(name)
        one = ours[matrix]
        whole = {"a": one.a, "b": one.b, "magnitude": one.lengths}[key]
        assert whole is not None
        return narrow_to_box(whole, shape, offset)

    return fill
