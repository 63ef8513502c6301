"""Convert a `config.json` to a `DecoderConfig` and back, without `transformers`.

Every key is accounted for: it is a field, or it does not change what a decoder computes, or it is
an error. `ropes` reads the entries about rotary positions.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping, Sequence
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
from trainkit.weights.hub.families import DELTA, FAMILIES, KINDS, Family, Key, list_who
from trainkit.weights.hub.quantized import find_quantization_problem
from trainkit.weights.hub.ropes import (
    equal_json,
    read_local_rope,
    read_rope,
    short_repr,
    write_rope,
)

_IGNORED = frozenset(
    # Metadata, defaults for sampling and for other trainers: a decoder computes none of it.
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
        # `_read_sliding` and `ropes` read these; a family without windows has its own message.
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
TEXT = "text_config"
"""The key of the decoder in the `config.json` of a multimodal model."""

# Keys of a multimodal model that count before those of its text tower: the head and the files are
# the whole model's.
_WHOLE = ("tie_word_embeddings", "quantization_config", "auto_map", "trust_remote_code")
# Null means that the option is off, or that the value follows from others.
_NULLABLE = frozenset(
    {"head_dim", "kv_heads", "latents.query_rank", "score_softcap", "logit_softcap"}
)
_BOOLEANS = frozenset({"tied", "experts.renormalize", "qkv_bias", "qk_norm", "feed_forward.bias"})
_FLOATS = frozenset(
    {
        "norm_eps",
        "experts.scale",
        "experts.clamp",
        "experts.sigmoid_scale",
        "query_scalar",
        "score_softcap",
        "logit_softcap",
        "embedding_scale",
        "residual_scale",
        "logit_divisor",
    }
)
# A config.json is not trusted: links are made for every layer and every expert before any tensor
# is read, and a large number must not fill the memory.
_MAX_VALUES = {"layers": 4096, "experts.count": 65536}
_MAX_VALUE = 1 << 31  # of other fields


def read_decoder_config(
    values: Mapping[str, Any],
    *,
    where: str = "config.json",
    families: Sequence[Family] = FAMILIES,
    context: int | None = None,
) -> DecoderConfig:
    """Return the decoder that a `config.json` describes.

    Args:
        values: The content of the file.
        where: The name of the file in messages.
        families: The families to consider.
        context: The maximum number of tokens of a document, by which `LongRopeScaling` chooses its
            factors; by default the length of its short factors.

    Raises:
        ConfigError: The family is unknown, a value is not supported, a key is missing or unknown;
            the message has all problems.

    Examples:
        >>> config = DecoderConfig(
        ...     vocab_size=64, width=16, layers=1, heads=2, kv_heads=2, mlp_width=32, head_dim=8
        ... )
        >>> read_decoder_config(write_decoder_config(config, context=128)) == config
        True
        >>> read_decoder_config({"model_type": "mamba"})
        Traceback (most recent call last):
        ...
        trainkit.types.ConfigError: config.json: unknown model_type 'mamba'; the nearest known ...
    """
    family = get_family(values.get("model_type"), where=where, families=families, values=values)
    problems: list[str] = []
    values = get_text_values(values, family, problems)
    # `transformers` reads a key under several names (`attribute_map`), and files have either.
    for alias, key in family.aliases.items():
        if alias in values:
            value = values.pop(alias)
            if not equal_json(values.setdefault(key, value), value):
                problems.append(f"{key} and {alias} differ")
    complete = {**family.defaults, **values}  # with the defaults of missing keys
    problems += _find_key_problems(family, values, complete)
    fields: dict[str, Any] = {}
    for key, field in family.keys.items():
        if key in complete:
            new_fields, new_problems = _read_key(key, field, complete)
            fields |= new_fields
            problems += new_problems
    # Learned positions (GPT-2) come without rotary entries and without windows.
    if family.ropes:
        key = family.local_rope
        local_theta = None if key is None else read_local_rope(complete, problems, key=key)
        fields |= read_rope(complete, family, problems)
        if problem := _find_layer_type_problem(complete.get("layer_types"), family):
            problems.append(problem)
        else:
            read_layers = _read_delta_layers if family.has_delta else _read_sliding
            fields |= read_layers(complete, family, local_theta, problems)
    if not problems:
        fixed = {k: x(complete) if callable(x) else x for k, x in family.fixed.items()}
        # `DecoderConfig` checks keys against each other: key heads divide the heads, for instance.
        try:
            config = _make_config(fixed | fields)
            return config if context is None else set_context(config, context)
        except ValueError as error:
            problems.append(str(error))
    raise ConfigError(
        f"{where}: {shorten(problems)}",
        where=where,
        got=problems,
        hint=f"trainkit's decoder computes {family.model_type} without these options",
    )


def get_text_values(
    values: Mapping[str, Any], family: Family, problems: list[str]
) -> dict[str, Any]:
    """Return the keys about the decoder: all, or those of the text tower of a multimodal model.

    Args:
        values: The content of a `config.json`.
        family: Its family.
        problems: A list that problems with the other keys are appended to.

    Examples:
        >>> get_text_values({"model_type": "qwen3"}, get_family("qwen3"), [])
        {'model_type': 'qwen3'}
    """
    tower = family.tower
    if tower is None:
        return dict(values)
    text = values.get(TEXT)
    if not isinstance(text, dict):
        problems.append(f"{TEXT} is no table")
        return {}
    if text.get("model_type", tower.model_type) != tower.model_type:
        found = short_repr(text["model_type"])
        problems.append(f"{TEXT}: model_type is {found}, not {tower.model_type!r}")
    known_keys = {*tower.keys, *_IGNORED, *_WHOLE, TEXT}
    problems += _find_unknown_keys(values, known_keys, family)
    return text | {key: values[key] for key in _WHOLE if values.get(key) is not None}


def set_context(config: DecoderConfig, context: int) -> DecoderConfig:
    """Return a decoder for documents of at most `context` tokens, which `LongRopeScaling` needs.

    Examples:
        >>> from trainkit.models.decoder_sizes import make_decoder_config
        >>> set_context(make_decoder_config("tiny"), 4096) == make_decoder_config("tiny")
        True
    """
    scaling = config.rope_scaling
    if not isinstance(scaling, LongRopeScaling):
        return config
    # The short factors hold up to this length, so a smaller context changes nothing.
    context = max(context, scaling.original_length)
    return attrs.evolve(config, rope_scaling=attrs.evolve(scaling, context=context))


def get_family(
    model_type: Any,
    *,
    where: str = "config.json",
    families: Sequence[Family] = FAMILIES,
    values: Mapping[str, Any] | None = None,
) -> Family:
    """Return the family of a `model_type`.

    Args:
        model_type: Its name.
        where: The name of the file in messages.
        families: The families to consider.
        values: The content of the file, by which the message finds the nearest known family.

    Raises:
        ConfigError: There is none; the message has the nearest one and lists the known ones.

    Examples:
        >>> get_family("qwen3").architecture
        'Qwen3ForCausalLM'
    """
    by_type = {family.model_type: family for family in families}
    if not isinstance(model_type, str) or model_type not in by_type:
        nearest = _describe_nearest(str(model_type), values or {}, families)
        raise ConfigError(
            f"{where}: unknown model_type {short_repr(model_type)}; {nearest}; the known ones are "
            f"{', '.join(by_type)}",
            where=where,
            got=short_repr(model_type),
            hint='how to add one: the page "Add a model family" of the documentation',
        )
    return by_type[model_type]


def _describe_nearest(
    model_type: str, values: Mapping[str, Any], families: Sequence[Family]
) -> str:
    """Return a clause that names the nearest family, and what of the file it does not have."""
    text = values.get(TEXT)
    values = {**(text if isinstance(text, dict) else {}), **values}
    present = values.keys() - _IGNORED

    def similarity(family: Family) -> float:
        # Alike names, squared because any two share some letters, and shared keys among those of
        # both: each from 0 to 1.
        known = family.known_keys | (family.tower.keys | {TEXT} if family.tower else set())
        known -= _IGNORED
        shared = len(present & known) / max(len(present | known), 1)
        alike = difflib.SequenceMatcher(None, model_type, family.model_type).ratio()
        return alike**2 + shared

    nearest = max(families, key=similarity)
    models = f" ({nearest.models})" if nearest.models else ""
    off = {key for key, x in values.items() if x is None or x is False}
    unknown = sorted(present - nearest.known_keys - off)
    unknown = [f"{key[:100]} = {short_repr(values[key])[:40]}" for key in unknown]
    lacks = f", which has no {shorten(unknown, 5)}" if unknown else ""
    return f"the nearest known family is {nearest.model_type}{models}{lacks}"


def _find_key_problems(
    family: Family, values: Mapping[str, Any], complete: Mapping[str, Any]
) -> list[str]:
    """Return the problems with keys: unsupported values, missing keys and unknown ones.

    An unknown key that is null or false counts as an option that is off.
    """
    problems = [
        f"{key} asks for code of the folder's own, which is never run"
        for key in ("auto_map", "trust_remote_code")
        if values.get(key) and not (key == "auto_map" and _is_own_code(values[key], family))
    ]
    if values.get("quantization_config") is not None:
        problem = find_quantization_problem(values["quantization_config"])
        problems += [problem] if problem else []
    problems += [
        f"{key} is {short_repr(complete[key])}, not {' or '.join(map(short_repr, allowed))}"
        for key, allowed in family.only.items()
        if complete.get(key) is not None and not any(equal_json(complete[key], x) for x in allowed)
    ]
    problems += [f"{key} is missing" for key in family.keys if key not in complete]
    known_keys = family.known_keys | _IGNORED
    known_keys |= {"auto_map", "trust_remote_code", "quantization_config"}
    problems += _find_unknown_keys(values, known_keys, family)
    return problems


def _find_unknown_keys(
    values: Mapping[str, Any], known_keys: Collection[str], family: Family
) -> Iterator[str]:
    """Yield a problem for each unknown key: with its value, and the families that have it."""
    for key in sorted(values.keys() - known_keys):
        if values[key] is None or values[key] is False:
            continue
        clue = list_who(lambda other, key=key: key in other.known_keys)
        alike = difflib.get_close_matches(key, known_keys, n=1, cutoff=0.85)
        if alike and not clue:
            clue = f", whose nearest is {alike[0]}"
        found = f"{key[:100]} is {short_repr(values[key])}"
        yield f"{found}, an unknown key of {family.model_type}{clue}"


def _is_own_code(auto_map: Any, family: Family) -> bool:
    """Return whether the code of a folder is the family's own, from before `transformers` had it.

    Such a folder is read like any other, and its code is ignored, as `transformers` does.
    """
    prefix = family.architecture.removesuffix("ForCausalLM")
    own_classes = {f"{prefix}Config", f"{prefix}Model", family.architecture}
    if not auto_map or not isinstance(auto_map, dict):
        return False
    # Values are like "modeling_phi3.Phi3Model". A tokenizer is read from tokenizer.json anyway.
    classes = [str(x).rpartition(".")[2] for key, x in auto_map.items() if key != "AutoTokenizer"]
    return own_classes.issuperset(classes)


def _read_key(
    key: str, field: str | Key | Sequence[str], values: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Return the fields of a key, and the problems with its value."""
    value = values[key]
    if isinstance(field, Key):
        try:
            return {field.field: field.read(value, values)}, []
        except (ValueError, TypeError, KeyError) as error:
            return {}, [f"{key} is {short_repr(value)}: {error}"]
    names = [field] if isinstance(field, str) else [*field]
    problem = _find_value_problem(key, value, names[0])
    if problem:
        return {}, [problem]
    # From before grouped queries: as many heads of keys as of queries.
    if names[0] == "kv_heads" and value is None:
        value = values.get("num_attention_heads")
    return dict.fromkeys(names, value), []


def _find_value_problem(key: str, value: Any, field: str) -> str | None:
    if value is None and field in _NULLABLE:
        return None
    if field in _BOOLEANS:
        is_bool = isinstance(value, bool)
        return None if is_bool else f"{key} is {short_repr(value)}, not true or false"
    types = (int, float) if field in _FLOATS else (int,)
    # bool is a subclass of int.
    if isinstance(value, bool) or not isinstance(value, types):
        return f"{key} is {short_repr(value)}, no number"
    max_value = _MAX_VALUES.get(field, _MAX_VALUE)
    if not 0 <= value <= max_value:
        return f"{key} is {short_repr(value)}, not from 0 to {max_value}"
    return None


def _make_config(fields: Mapping[str, Any]) -> DecoderConfig:
    """Return the configuration of fields; those of its records have names like "experts.count"."""
    records: dict[str, dict[str, Any]] = {name: {} for name in PARTS}
    arguments: dict[str, Any] = {}
    for name, value in fields.items():
        record, _, field = name.partition(".")
        if field:
            records[record][field] = value
        else:
            arguments[name] = value
    arguments |= {name: PARTS[name](**values) for name, values in records.items() if values}
    config = DecoderConfig(**arguments)
    # One form for each decoder: a record of defaults is None.
    plain: dict[str, Any] = dict.fromkeys(
        name for name in ("norms", "feed_forward") if getattr(config, name) == PARTS[name]()
    )
    return attrs.evolve(config, **plain)


# ----------------------------------------------------------------------------------------- windows


def _read_sliding(
    values: Mapping[str, Any], family: Family, local_theta: float | None, problems: list[str]
) -> dict[str, Any]:
    """Return the fields about layers with a sliding window; append problems to `problems`."""
    window = None if values.get("use_sliding_window") is False else values.get("sliding_window")
    problem = None if window is None else _find_value_problem("sliding_window", window, "window")
    if problem is None and family.windows is None:
        problem = _find_needed_window(values, family, window)
    problems += [problem] if problem else []
    layers = values.get("num_hidden_layers")
    if problem or family.windows is None or _find_value_problem("", layers, "layers"):
        return {}
    # The pattern of a file without `layer_types`.
    default = {k: values[x] if isinstance(x, str) else x for k, x in family.windows.items()}
    for key, value in default.items():
        if problem := _find_value_problem(key, value, "layers"):
            problems.append(problem)
            return {}
    pattern = _read_layer_types(values, family, default)
    if pattern is None:
        problems.append("layer_types follow no pattern that is supported")
    elif pattern and window is None and values.get("layer_types") is not None:
        problems.append("layer_types has sliding layers, but no sliding_window is in use")
    # {} means no sliding layers; None has been reported as a problem.
    if not pattern or window is None:
        return {}
    return {
        **{f"sliding.{k}": x for k, x in pattern.items()},
        "sliding.window": window,
        "sliding.rope_theta": local_theta,
    }


def _find_layer_type_problem(types: Any, family: Family) -> str | None:
    """Return the problem with the first layer of a type that the family lacks, or None."""
    entries = types if isinstance(types, list) else [] if types is None else [types]
    for i, entry in enumerate(entries):
        if entry not in family.layer_types:
            return (
                f"layer_types has {short_repr(entry)} in layer {i}, not "
                f"{' or '.join(family.layer_types)} of {family.model_type}"
                f"{list_who(lambda other, entry=entry: entry in other.layer_types)}"
            )
    return None


def _find_needed_window(
    values: Mapping[str, Any], family: Family, window: int | None
) -> str | None:
    """Return the problem if a file needs a sliding window and its family has none, or None."""
    context = values.get("max_position_embeddings")
    # A window that is as long as the longest text hides nothing.
    if window is None or (isinstance(context, int) and window >= context):
        return None
    return (
        f"sliding_window is {window}, below max_position_embeddings {short_repr(context)}: "
        f"{family.model_type} has no windows"
    )


def _read_layer_types(
    values: Mapping[str, Any], family: Family, default: Mapping[str, Any]
) -> dict[str, int] | None:
    """Return the fields of a `Sliding` for its layers, {} for none, None for an unknown pattern."""
    layers = values["num_hidden_layers"]
    types = values.get("layer_types")
    sliding = Sliding(window=1, **default).layers(layers)
    if types is not None:
        if not isinstance(types, list) or len(types) != layers:
            return None
        # The list may differ from the family's default, but must be a pattern that `Sliding` has.
        listed = [i for i, layer_type in enumerate(types) if layer_type == KINDS[1]]
        if listed and listed != sliding:
            return _find_pattern(listed, layers) if family.windows else None
        sliding = listed
    return {"first": 0, "full_every": 0, **default} if sliding else {}


def _read_delta_layers(
    values: Mapping[str, Any], _family: Family, _theta: float | None, problems: list[str]
) -> dict[str, int]:
    """Return the field about layers with the delta rule, if the file lists the layers' types."""
    types = values.get("layer_types")
    if types is None:
        return {}
    full = [i for i, layer_type in enumerate(types) if layer_type == KINDS[0]]
    every = full[0] + 1 if full else len(types) + 1
    if len(types) != values.get("num_hidden_layers") or full != [
        *range(every - 1, len(types), every)
    ]:
        problems.append("layer_types follow no pattern that is supported")
    return {"delta.full_every": every}


def _find_pattern(sliding: Sequence[int], layers: int) -> dict[str, int] | None:
    """Return the fields of a `Sliding` with exactly these sliding layers, or None."""
    # Of every `full_every` layers the last is full: one more than the index of the first full layer
    # behind a sliding one is a multiple of it.
    slides = {*sliding}
    full = next((i for i in range(sliding[0], layers) if i not in slides), None)
    periods = [0]
    if full is not None:
        periods = [n for n in range(1, full + 2) if (full + 1) % n == 0]
    for every in periods:
        # The first sliding layer is `first`, or follows it where that one is full.
        for first in (max(sliding[0] - 1, 0), sliding[0]):
            if Sliding(window=1, first=first, full_every=every).layers(layers) == [*sliding]:
                return {"first": first, "full_every": every}
    return None


# ----------------------------------------------------------------------------------------- writing


def match_family(config: DecoderConfig) -> Family:
    """Return the first family of Hugging Face models that computes the same as a decoder.

    Dropout and jitter, which only training has, do not matter.

    Raises:
        ConfigError: There is none; the message has the reason for each family.

    Examples:
        >>> from trainkit.models.decoder_sizes import make_decoder_config
        >>> [match_family(make_decoder_config(name)).model_type for name in ("tiny", "qwen3-8b")]
        ['llama', 'qwen3']
    """
    reasons = []
    # A text tower alone is no multimodal model.
    for family in (each for each in FAMILIES if each.tower is None):
        reason = _find_mismatch(config, family)
        if reason is None:
            return family
        reasons.append(f"{family.model_type}: {reason}")
    raise ConfigError(
        f"match_family: no known family computes this decoder: {shorten(reasons)}",
        where="model",
        got=reasons,
        hint="`python -m trainkit checkpoint export` writes its weights under trainkit's names",
    )


def _find_mismatch(config: DecoderConfig, family: Family) -> str | None:
    """Return why a family does not compute a decoder, or None if it does."""
    context = getattr(config.rope_scaling, "context", None)
    try:
        # Written and read back: what a family cannot express raises here, or differs below. Any
        # context will do: what is derived from it elsewhere is written out.
        values = _write_values(config, family, context=2)
        read = read_decoder_config(values, families=[family], context=context)
    except ValueError as error:
        return str(error)
    different = find_differences(config, read)
    return f"its {', '.join(f'{k} is {x}' for k, x in different.items())}" if different else None


def find_differences(config: DecoderConfig, other: DecoderConfig) -> dict[str, Any]:
    """Return the fields of `other` by which it computes something else than `config`.

    Examples:
        >>> from trainkit.models.decoder_sizes import make_decoder_config
        >>> find_differences(*(make_decoder_config("tiny", layers=i) for i in (1, 2)))
        {'layers': 2}
    """
    want = _flatten(_normalize(config))
    got = _flatten(_normalize(other))
    return {name: got[name] for name in sorted(want) if want[name] != got[name]}


def _flatten(config: DecoderConfig) -> dict[str, Any]:
    """Return all fields by name, those of its records as "experts.count"."""
    flat: dict[str, Any] = {
        f"{name}.{field}": None
        for name, record_type in PARTS.items()
        for field in attrs.fields_dict(record_type)
    }
    explicit = attrs.evolve(
        config, norms=config.norm_config, feed_forward=config.feed_forward_config
    )
    for name, value in attrs.asdict(explicit, recurse=False).items():
        if name in PARTS and value is not None:
            flat |= {f"{name}.{k}": x for k, x in attrs.asdict(value).items()}
            flat[name] = type(value).__name__
        else:
            flat[name] = value
    return flat


def _normalize(config: DecoderConfig) -> DecoderConfig:
    """Return one and the same configuration for all that describe the same arithmetic."""
    experts = config.experts
    changes: dict[str, Any] = {"dropout": 0.0}
    if config.latents is None:
        changes["head_dim"] = config.head_size
    else:
        eps = config.latents.norm_eps or config.norm_eps
        changes["latents"] = attrs.evolve(config.latents, norm_eps=eps)
    if experts is not None:
        changes["experts"] = attrs.evolve(experts, jitter=0.0)
        # Without a dense layer the width of dense layers has no effect.
        if len(config.expert_layers) == config.layers:
            changes["mlp_width"] = experts.width
    if config.sliding is not None:
        layers = config.sliding_layers  # none if the first one is beyond the last layer
        pattern = _find_pattern(layers, config.layers) if layers else None
        sliding = attrs.evolve(config.sliding, **pattern) if pattern else None
        if sliding is not None and config.rope_scaling is None and sliding.rope_theta is None:
            sliding = attrs.evolve(sliding, rope_theta=config.rope_theta)
        changes["sliding"] = sliding
    # A factor of 1 is none.
    for factor in ("embedding_scale", "residual_scale", "logit_divisor"):
        if getattr(config, factor) == 1:
            changes[factor] = None
    # Scores are divided by the root of the head size by default.
    if config.query_scalar == config.head_size:
        changes["query_scalar"] = None
    if isinstance(config.rope_scaling, YarnScaling):  # the file has its square root, rounded
        scaling = config.rope_scaling
        changes["rope_scaling"] = attrs.evolve(scaling, mscale=round(scaling.mscale, 9))
    return attrs.evolve(config, **changes)


def write_decoder_config(
    config: DecoderConfig, *, context: int, family: Family | None = None
) -> dict[str, Any]:
    """Return the `config.json` of a decoder, for `transformers`.

    Args:
        config: The decoder.
        context: The maximum number of tokens in a row.
        family: The family; by default `match_family(config)`.

    Raises:
        ConfigError: The family does not compute what the decoder does.

    Examples:
        >>> from trainkit.models.decoder_sizes import make_decoder_config
        >>> write_decoder_config(make_decoder_config("tiny"), context=512)["architectures"]
        ['LlamaForCausalLM']
    """
    family = family or match_family(config)
    if family.tower is not None:
        raise ConfigError(
            f"write_decoder_config: {family.model_type} is a multimodal model, of which the "
            f"decoder is a part: {family.tower.model_type}",
            where="family",
            got=family.model_type,
            hint="export_folder(base=) takes the rest from the folder that the decoder came from",
        )
    reason = _find_mismatch(config, family)
    if reason is not None:
        raise ConfigError(
            f"write_decoder_config: {family.model_type} does not compute this decoder: {reason}",
            where="family",
            got=family.model_type,
        )
    return _write_values(config, family, context=context)


def _write_values(config: DecoderConfig, family: Family, *, context: int) -> dict[str, Any]:
    # These are written even where they follow from others: families differ in their defaults.
    fields = _flatten(config) | {
        "head_dim": config.head_size,
        "query_scalar": config.query_scalar or config.head_size,
    }
    for factor in ("embedding_scale", "residual_scale", "logit_divisor"):
        fields[factor] = fields[factor] or 1.0
    values: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        # A table of learned positions has a limit of its own.
        "max_position_embeddings": config.positions or context,
        **{key: allowed[0] for key, allowed in family.only.items()},
    }
    for key, field in family.keys.items():
        if isinstance(field, Key):
            # A record that the decoder lacks, such as experts, or a field of it.
            if field.field.partition(".")[0] in PARTS and fields[field.field] is None:
                raise ValueError(f"it has {key}")
            values[key] = field.write(fields[field.field], config)
        else:
            # A key that sets two fields is written from the last, which always has an effect.
            values[key] = fields[field if isinstance(field, str) else field[-1]]
    if not family.ropes:
        return values
    if family.has_delta:
        values["layer_types"] = [
            DELTA if i in config.delta_layers else KINDS[0] for i in range(config.layers)
        ]
    return values | _write_windows(config, family) | write_rope(config, family)


def _write_windows(config: DecoderConfig, family: Family) -> dict[str, Any]:
    if family.windows is None:
        return {}
    sliding = config.sliding
    values: dict[str, Any] = {"sliding_window": None if sliding is None else sliding.window}
    if "use_sliding_window" in family.defaults:
        values["use_sliding_window"] = sliding is not None
    elif sliding is None and family.windows:  # its code needs a number even without windows
        values["sliding_window"] = family.defaults["sliding_window"]
    if sliding is not None and "max_window_layers" in family.defaults:
        values["max_window_layers"] = sliding.first
    # A family with windows in every layer (Mistral) has no list of types.
    if family.windows:
        sliding_layers = config.sliding_layers
        values["layer_types"] = [KINDS[i in sliding_layers] for i in range(config.layers)]
    return values
