"""A `config.json` as a `DecoderConfig`, and back, without `transformers`.

Every key is accounted for: it is a field, or changes nothing that a decoder computes, or is refused
by name. What is said of rotary positions is in `ropes`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from trainkit.models.config import (
    PARTS,
    DecoderConfig,
    LongRopeScaling,
    Sliding,
    YarnScaling,
)
from trainkit.types import ConfigError
from trainkit.weights.checkpoint.boxes import shorten
from trainkit.weights.hub.families import FAMILIES, Family, Key
from trainkit.weights.hub.quantized import quantization_problem
from trainkit.weights.hub.ropes import KINDS, local_rope, read_rope, same, told, write_rope

_IGNORED = frozenset(
    # What a file says of itself, how text is drawn, how others train: none of it is computed here.
    {
        "architectures",
        "model_type",
        "torch_dtype",
        "dtype",
        "transformers_version",
        "use_cache",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "sep_token_id",
        "decoder_start_token_id",
        "initializer_range",
        "max_position_embeddings",
        "_name_or_path",
        "name_or_path",
        "pretraining_tp",
        "attention_dropout",
        "router_aux_loss_coef",
        "output_router_logits",
        "do_sample",
        "temperature",
        "top_p",
        "top_k",
        "max_length",
        "min_length",
        "repetition_penalty",
        "num_beams",
        "return_dict",
        "output_attentions",
        "output_hidden_states",
        "is_decoder",
        "is_encoder_decoder",
        "add_cross_attention",
        "chunk_size_feed_forward",
        "torchscript",
        "tie_encoder_decoder",
        "pruned_heads",
        "problem_type",
        "id2label",
        "label2id",
        "task_specific_params",
        "tokenizer_class",
        "finetuning_task",
        "prefix",
        "is_llama_config",
        "transformers.js_config",
        "unsloth_version",
        "unsloth_fixed",
        "_attn_implementation",
        "attn_implementation",
        "sliding_window",
        "use_sliding_window",
        "max_window_layers",
        "layer_types",
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "partial_rotary_factor",
        "cross_attention_hidden_size",
        "use_bfloat16",
        "tf_legacy_loss",
        "neftune_noise_alpha",
    }
)
_NULLABLE = frozenset(
    {"head_dim", "kv_heads", "latents.query_rank", "score_softcap", "logit_softcap"}
)
_TRUTH = frozenset({"tied", "experts.renormalise", "qkv_bias", "qk_norm", "feed_forward.bias"})
_REAL = frozenset({"norm_eps", "experts.scale", "query_scalar", "score_softcap", "logit_softcap"})
_MOST = {"layers": 4096, "experts.count": 65536}
_MOST_SIZE = 1 << 31


def read_decoder_config(
    values: Mapping[str, Any],
    *,
    where: str = "config.json",
    families: Sequence[Family] = FAMILIES,
    context: int | None = None,
) -> DecoderConfig:
    """Return the decoder that a `config.json` describes.

    Args:
        values: What it holds.
        where: What it is called in messages.
        families: Those that it may be of.
        context: The most tokens that a document will have, by which `LongRopeScaling` chooses; by
            default as many as its short factors are for.

    Raises:
        ConfigError: It is of no known family, wants what a decoder does not compute, lacks a key or
            has one of an unknown meaning; everything that is wrong is named.

    Examples:
        >>> config = DecoderConfig(
        ...     vocab_size=64, width=16, layers=1, heads=2, kv_heads=2, mlp_width=32, head_dim=8
        ... )
        >>> read_decoder_config(write_decoder_config(config, context=128)) == config
        True
        >>> read_decoder_config({"model_type": "mamba"})
        Traceback (most recent call last):
        ...
        trainkit.types.ConfigError: config.json: model_type 'mamba' is no family that is known: ...
    """
    family = family_named(values.get("model_type"), where=where, families=families)
    values, problems = _renamed(values, family.aliases)
    said = {**family.defaults, **values}
    problems += _key_problems(family, values, said)
    fields: dict[str, Any] = {}
    for key, field in family.keys.items():
        if key in said:
            found, problem = _fields(key, field, said)
            fields |= found
            problems += problem
    if family.ropes:
        local = local_rope(said, problems) if family.local_rope else None
        fields |= read_rope(said, family, problems)
        fields |= _sliding(said, family, local, problems)
    if not problems:
        made = {k: x(said) if callable(x) else x for k, x in family.fixed.items()}
        try:
            config = _config(made | fields)
            return config if context is None else in_context(config, context)
        except ValueError as error:
            problems.append(str(error))
    raise ConfigError(
        f"{where}: {shorten(problems)}",
        where=where,
        got=problems,
        hint=f"trainkit's decoder computes {family.model_type} without these; nothing is guessed",
    )


def in_context(config: DecoderConfig, context: int) -> DecoderConfig:
    """Return a decoder for documents of at most so many tokens: `LongRopeScaling` chooses by it.

    Examples:
        >>> from trainkit.models.decoder_sizes import make_decoder_config
        >>> in_context(make_decoder_config("tiny"), 4096) == make_decoder_config("tiny")
        True
    """
    scaling = config.rope_scaling
    if not isinstance(scaling, LongRopeScaling):
        return config
    most = max(context, scaling.original_length)
    return attrs.evolve(config, rope_scaling=attrs.evolve(scaling, context=most))


def _renamed(
    values: Mapping[str, Any], aliases: Mapping[str, str]
) -> tuple[dict[str, Any], list[str]]:
    """Return what a file says by the names that keys have here, and which of them differ."""
    found, problems = dict(values), list[str]()
    for alias, key in aliases.items():
        if alias in found:
            value = found.pop(alias)
            if not same(found.setdefault(key, value), value):
                problems.append(f"{key} and {alias} differ")
    return found, problems


def family_named(
    model_type: Any, *, where: str = "config.json", families: Sequence[Family] = FAMILIES
) -> Family:
    """Return the family of a `model_type`.

    Raises:
        ConfigError: There is none, with the list of those that there are.

    Examples:
        >>> family_named("qwen3").architecture
        'Qwen3ForCausalLM'
    """
    known = {family.model_type: family for family in families}
    if not isinstance(model_type, str) or model_type not in known:
        got = repr(model_type)[:100]
        raise ConfigError(
            f"{where}: model_type {got} is no family that is known: {', '.join(known)}",
            where=where,
            got=got,
            hint="how to add one: docs/howto/add-a-model-family.md",
        )
    return known[model_type]


def _key_problems(family: Family, values: Mapping[str, Any], said: Mapping[str, Any]) -> list[str]:
    """Say which keys want what is not computed, are missing, or of an unknown meaning.

    An unknown key that is null or false is taken for something that is off.
    """
    code = [key for key in ("auto_map", "trust_remote_code") if values.get(key)]
    if _is_of_family(values.get("auto_map"), family):
        code.remove("auto_map")
    problems = [f"{key} asks for code of the folder's own, which is never run" for key in code]
    quantized = values.get("quantization_config")
    problem = None if quantized is None else quantization_problem(quantized)
    problems += [problem] if problem else []
    problems += [
        f"{key} is {told(values[key])}, not {' or '.join(map(told, allowed))}"
        for key, allowed in family.only.items()
        if values.get(key) is not None and not any(same(values[key], x) for x in allowed)
    ]
    problems += [f"{key} is missing" for key in family.keys if key not in said]
    known = {*family.keys, *family.only, *family.defaults, *family.ignored, *_IGNORED}
    known |= {"auto_map", "trust_remote_code", "quantization_config"}
    off = [key for key, value in values.items() if value is None or value is False]
    unknown = values.keys() - known - {*off}
    problems += [f"{key[:100]} is a key of an unknown meaning" for key in sorted(unknown)]
    return problems


def _is_of_family(auto_map: Any, family: Family) -> bool:
    """Say whether the code of a folder is that of the family, as it was before others had it.

    Such a folder is read as any other, and its code is not looked at, as `transformers` does.
    """
    kind = family.architecture.removesuffix("ForCausalLM")
    own = {f"{kind}Config", f"{kind}Model", family.architecture}
    if not auto_map or not isinstance(auto_map, dict):
        return False
    classes = [str(x).rpartition(".")[2] for key, x in auto_map.items() if key != "AutoTokenizer"]
    return own.issuperset(classes)


def _fields(
    key: str, field: str | Key | Sequence[str], said: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Return the fields that a key says, and what is wrong with its value."""
    value = said[key]
    if isinstance(field, Key):
        try:
            return {field.field: field.read(value, said)}, []
        except (ValueError, TypeError, KeyError) as error:
            return {}, [f"{key} is {told(value)}: {error}"]
    names = [field] if isinstance(field, str) else [*field]
    problem = _value_problem(key, value, names[0])
    if problem:
        return {}, [problem]
    if names[0] == "kv_heads" and value is None:
        value = said.get("num_attention_heads")
    return dict.fromkeys(names, value), []


def _value_problem(key: str, value: Any, field: str) -> str | None:
    if value is None and field in _NULLABLE:
        return None
    if field in _TRUTH:
        return None if isinstance(value, bool) else f"{key} is {told(value)}, not true or false"
    kinds = (int, float) if field in _REAL else (int,)
    if isinstance(value, bool) or not isinstance(value, kinds):
        return f"{key} is {told(value)}, no number"
    most = _MOST.get(field, _MOST_SIZE)
    if not 0 <= value <= most:
        return f"{key} is {told(value)}, not from 0 to {most}"
    return None


def _config(fields: Mapping[str, Any]) -> DecoderConfig:
    """Return the record of fields, those of a part by names such as "experts.count"."""
    parts: dict[str, dict[str, Any]] = {name: {} for name in PARTS}
    whole: dict[str, Any] = {}
    for name, value in fields.items():
        part, _, own = name.partition(".")
        if own:
            parts[part][own] = value
        else:
            whole[name] = value
    whole |= {name: PARTS[name](**own) for name, own in parts.items() if own}
    config = DecoderConfig(**whole)
    plain: dict[str, Any] = dict.fromkeys(
        name for name in ("norms", "feed_forward") if getattr(config, name) == PARTS[name]()
    )
    return attrs.evolve(config, **plain)


# ----------------------------------------------------------------------------------------- windows


def _sliding(
    said: Mapping[str, Any], family: Family, local: float | None, problems: list[str]
) -> dict[str, Any]:
    """Return the fields about layers that see a window alone; add what is wrong."""
    window = None if said.get("use_sliding_window") is False else said.get("sliding_window")
    wrong = _value_problem("sliding_window", window, "window") if window is not None else None
    if family.windows is None:
        context, none = said.get("max_position_embeddings"), f"{family.model_type} has no windows"
        kinds = said.get("layer_types")
        if kinds is not None and (not isinstance(kinds, list) or {*map(str, kinds)} != {KINDS[0]}):
            wrong = f"layer_types is {told(kinds)}: {none}"
        elif (
            not wrong
            and window is not None
            and not (isinstance(context, int) and window >= context)
        ):
            below = f"below max_position_embeddings {told(context)}"
            wrong = f"sliding_window is {told(window)}, {below}: {none}"
    problems += [wrong] if wrong else []
    layers = said.get("num_hidden_layers")
    if wrong or family.windows is None or _value_problem("", layers, "layers"):
        return {}
    usual = {k: said[x] if isinstance(x, str) else x for k, x in family.windows.items()}
    problem = next(filter(None, (_value_problem(k, x, "layers") for k, x in usual.items())), None)
    how = None if problem else _layers_that_slide(said, family, usual)
    if how is None:
        problems.append(problem or "layer_types follow no pattern that is computed")
    elif how and window is None and said.get("layer_types") is not None:
        problems.append("layer_types has layers that slide, and there is no sliding_window in use")
    if not how or window is None:
        return {}
    return {f"sliding.{k}": x for k, x in how.items()} | {
        "sliding.window": window,
        "sliding.rope_theta": local,
    }


def _layers_that_slide(
    said: Mapping[str, Any], family: Family, usual: Mapping[str, Any]
) -> dict[str, int] | None:
    """Return which layers slide as fields of a `Sliding`, {} for none; None where it is unknown."""
    layers, kinds = said["num_hidden_layers"], said.get("layer_types")
    slide = Sliding(window=1, **usual).layers(layers)
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != layers or {*map(str, kinds)} - {*KINDS}:
            return None
        listed = [i for i, kind in enumerate(kinds) if kind == KINDS[1]]
        if listed and listed != slide:
            return _pattern(listed, layers) if family.windows else None
        slide = listed
    return {"first": 0, "full_every": 0, **usual} if slide else {}


def _pattern(slide: Sequence[int], layers: int) -> dict[str, int] | None:
    """Return the fields of a `Sliding` by which these of so many layers slide, if there are any."""
    for every in (0, *range(1, layers + 1)):
        for first in (max(slide[0] - 1, 0), slide[0]):  # of two before it one would slide
            found = {"first": first, "full_every": every}
            if Sliding(window=1, **found).layers(layers) == [*slide]:
                return found
    return None


# ----------------------------------------------------------------------------------------- writing


def match_family(config: DecoderConfig) -> Family:
    """Return the family of Hugging Face models that computes what a decoder does.

    What only training has (dropout, jitter) is none of it.

    Raises:
        ConfigError: None does; why not is said of each.

    Examples:
        >>> from trainkit.models.decoder_sizes import make_decoder_config
        >>> [match_family(make_decoder_config(name)).model_type for name in ("tiny", "qwen3-8b")]
        ['llama', 'qwen3']
    """
    reasons = []
    for family in FAMILIES:
        reason = _not_of(config, family)
        if reason is None:
            return family
        reasons.append(f"{family.model_type}: {reason}")
    raise ConfigError(
        f"match_family: no known family computes this decoder: {shorten(reasons)}",
        where="model",
        got=reasons,
        hint="`python -m trainkit checkpoint export` writes its weights by trainkit's names",
    )


def _not_of(config: DecoderConfig, family: Family) -> str | None:
    """Say why a family does not compute a decoder, or return None."""
    context = getattr(config.rope_scaling, "context", None)
    try:
        said = _written(config, family, context=2)
        read = read_decoder_config(said, families=[family], context=context)
    except ValueError as error:
        return str(error)
    want, got = (_flat(_computed(each)) for each in (config, read))
    other = sorted(name for name in want if want[name] != got[name])
    return None if not other else f"its {', '.join(f'{x} is {got[x]}' for x in other)}"


def _flat(config: DecoderConfig) -> dict[str, Any]:
    """Return all fields by name, those of a part as "experts.count"."""
    found: dict[str, Any] = {
        f"{n}.{x}": None for n, k in PARTS.items() for x in attrs.fields_dict(k)
    }
    said = attrs.evolve(config, norms=config.how_normed, feed_forward=config.how_fed)
    for name, value in attrs.asdict(said, recurse=False).items():
        is_part = name in PARTS and value is not None
        found |= {f"{name}.{k}": x for k, x in attrs.asdict(value).items()} if is_part else {}
        found[name] = type(value).__name__ if is_part else value
    return found


def _computed(config: DecoderConfig) -> DecoderConfig:
    """Return a configuration of the same arithmetic, in one of the ways it can be said."""
    experts = config.experts
    changes: dict[str, Any] = {"dropout": 0.0}
    if config.latents is None:
        changes["head_dim"] = config.head_size
    if experts is not None:
        changes["experts"] = attrs.evolve(experts, jitter=0.0)
        if len(config.expert_layers) == config.layers:
            changes["mlp_width"] = experts.width
    if config.sliding is not None:
        pattern = _pattern(config.sliding_layers, config.layers)
        slides = bool(config.sliding_layers) and pattern is not None
        changes["sliding"] = attrs.evolve(config.sliding, **pattern) if slides else None
    if config.query_scalar == config.head_size:
        changes["query_scalar"] = None
    if isinstance(config.rope_scaling, YarnScaling):  # its square root is written
        scaling = config.rope_scaling
        changes["rope_scaling"] = attrs.evolve(scaling, mscale=round(scaling.mscale, 9))
    return attrs.evolve(config, **changes)


def write_decoder_config(
    config: DecoderConfig, *, context: int, family: Family | None = None
) -> dict[str, Any]:
    """Return the `config.json` of a decoder, which `transformers` reads.

    Args:
        config: The decoder.
        context: The most tokens that a row is meant to have.
        family: Which family to call it; by default `match_family(config)`.

    Raises:
        ConfigError: The family does not compute what the decoder does.

    Examples:
        >>> from trainkit.models.decoder_sizes import make_decoder_config
        >>> write_decoder_config(make_decoder_config("tiny"), context=512)["architectures"]
        ['LlamaForCausalLM']
    """
    family = family or match_family(config)
    reason = _not_of(config, family)
    if reason is not None:
        raise ConfigError(
            f"write_decoder_config: {family.model_type} does not compute this decoder: {reason}",
            where="family",
            got=family.model_type,
        )
    return _written(config, family, context=context)


def _written(config: DecoderConfig, family: Family, *, context: int) -> dict[str, Any]:
    fields = _flat(config) | {"head_dim": config.head_size}
    values: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "max_position_embeddings": config.positions or context,
        **{key: allowed[0] for key, allowed in family.only.items()},
    }
    for key, field in family.keys.items():
        if isinstance(field, Key):
            if fields[field.field] is None:
                raise ValueError(f"it has {key}")
            values[key] = field.write(fields[field.field], config)
        else:
            values[key] = fields[field if isinstance(field, str) else field[-1]]
    if "query_pre_attn_scalar" in values:
        values["query_pre_attn_scalar"] = config.query_scalar or config.head_size
    if not family.ropes:
        return values
    return values | _windows_written(config, family) | write_rope(config, family)


def _windows_written(config: DecoderConfig, family: Family) -> dict[str, Any]:
    if family.windows is None:
        return {}
    sliding, values = config.sliding, dict[str, Any]()
    values["sliding_window"] = None if sliding is None else sliding.window
    if "use_sliding_window" in family.defaults:
        values["use_sliding_window"] = sliding is not None
    elif sliding is None and family.windows:  # whose masks want a number, and are not used
        values["sliding_window"] = family.defaults["sliding_window"]
    if sliding is not None and "max_window_layers" in family.defaults:
        values["max_window_layers"] = sliding.first
    if family.windows:
        slide = config.sliding_layers
        values["layer_types"] = [KINDS[i in slide] for i in range(config.layers)]
    return values
