"""The entries of a `config.json` about rotary positions, in the old form and the new.

The old one is `rope_theta` and `rope_scaling`; the new one is `rope_parameters`, which may be a
table for each type of layer.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

from trainkit.models.config import (
    DecoderConfig,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    RopeScaling,
    YarnScaling,
)
from trainkit.weights.hub.families import KINDS, Family, list_who

_YARN_KEYS = frozenset(
    {"beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "truncate"}
)
_LONGROPE_KEYS = frozenset({"short_factor", "long_factor", "attention_factor"})
# The options of each type, besides its factor and the original length.
_OPTIONS = {
    "linear": frozenset[str](),
    "llama3": frozenset({"low_freq_factor", "high_freq_factor"}),
    "yarn": _YARN_KEYS,
    "longrope": _LONGROPE_KEYS,
}


def equal_json(a: Any, b: Any) -> bool:
    """Return whether two values of JSON are equal; true does not equal 1.

    Examples:
        >>> equal_json(1, 1.0), equal_json(1, True)
        (True, False)
    """
    return a == b and isinstance(a, bool) == isinstance(b, bool)


def short_repr(value: Any) -> str:
    """Return the repr of a value, at most 100 characters of it.

    Examples:
        >>> short_repr("a")
        "'a'"
    """
    return repr(value)[:100]


def is_number(value: Any) -> bool:
    """Return whether a value is a finite number, and no bool.

    Examples:
        >>> is_number(1), is_number(True), is_number(math.inf)
        (True, False, False)
    """
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool)


def read_local_rope(values: dict[str, Any], problems: list[str], *, key: str) -> float | None:
    """Return the theta of sliding layers; leave in `values` the table of full layers.

    Args:
        values: The content of a `config.json`, with the defaults of its family.
        problems: Where to append problems.
        key: The key of the theta in files without a table for each type of layer.

    Examples:
        >>> read_local_rope({"rope_local_base_freq": 1e4}, [], key="rope_local_base_freq")
        10000.0
    """
    theta = values[key]
    tables = values.get("rope_parameters")
    # `transformers` 5 writes a table for each type of layer.
    if isinstance(tables, dict) and {*tables} & {*KINDS}:
        values["rope_parameters"] = tables.get(KINDS[0])
        local = tables.get(KINDS[1]) or {}
        if not isinstance(local, dict):
            problems.append(f"rope_parameters of sliding layers are {short_repr(local)}, no table")
            return None
        local = dict(local)
        theta = local.pop("rope_theta", theta)
        # Sliding layers are never scaled: any type but the default is an error.
        extra = [k for k, x in local.items() if (k, x) != ("rope_type", "default")]
        extra += [key for key in tables if key not in KINDS]
        problems += [f"rope_parameters of sliding layers: {key} is not supported" for key in extra]
    if not is_number(theta) or not 1 < theta < 1e12:
        problems.append(f"{key} is {short_repr(theta)} in sliding layers")
        return None
    return float(theta)


def read_rope(values: Mapping[str, Any], family: Family, problems: list[str]) -> dict[str, Any]:
    """Return the fields about rotary positions; append problems to `problems`.

    Examples:
        >>> from trainkit.weights.hub.configs import get_family
        >>> values = {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2}}
        >>> read_rope(values, get_family("llama"), [])["rope_scaling"]
        LinearScaling(factor=2.0)
    """
    # A file may have the old form, the new one, or both with equal entries.
    forms = [values.get(key) for key in ("rope_scaling", "rope_parameters")]
    tables = [form for form in forms if form is not None]
    if family.needs_rope and not tables:
        problems.append(
            "rope_parameters are missing: without them transformers scales rotary positions by a "
            "default of its own"
        )
    if not all(isinstance(table, dict) for table in tables):
        problems.append("rope_scaling or rope_parameters is no table")
        return {}
    problems += [
        "rope: type and rope_type differ"
        for table in tables
        if {"type", "rope_type"} <= table.keys() and table["type"] != table["rope_type"]
    ]
    tables = [{"rope_type" if k == "type" else k: v for k, v in t.items()} for t in tables]
    rope = {key: value for table in tables for key, value in table.items()}
    for key, value in rope.items():
        if any(key in table and not equal_json(table[key], value) for table in tables):
            problems.append(f"rope_scaling and rope_parameters differ in {key}")
    # What is left in `rope` after the entries that every type has are the options of its type.
    rope_type = rope.pop("rope_type", None) or "default"
    if "longrope" in family.ropes and rope_type in ("su", "yarn"):  # its older names
        rope_type = "longrope"
    theta = rope.pop("rope_theta", values["rope_theta"])
    # Wavelengths are powers of theta: at 1 they are all the same.
    if not is_number(theta) or not 1 < theta < 1e12:
        problems.append(f"rope_theta is {short_repr(theta)}")
        theta = 10_000.0
    factor = rope.pop("partial_rotary_factor", values.get("partial_rotary_factor"))
    if rope_type == "proportional" and rope_type in family.ropes:
        scaling = _read_proportional(1.0 if factor is None else factor, rope, problems)
        return {"rope_theta": float(theta), "rope_scaling": scaling, "rotary_dim": None}
    rotary_dim = None if factor in (None, 1) else _read_rotary_dim(factor, values, family, problems)
    if "mrope" in family.ropes:  # positions of images, which text has the same in all dimensions
        rope = {key: x for key, x in rope.items() if not key.startswith("mrope_")}
    scaling = _read_scaling(str(rope_type), rope, values, family, problems)
    return {"rope_theta": float(theta), "rope_scaling": scaling, "rotary_dim": rotary_dim}


def _read_proportional(
    part: Any, rope: Mapping[str, Any], problems: list[str]
) -> ProportionalScaling | None:
    if not is_number(part) or not 0 < part <= 1:
        problems.append(f"partial_rotary_factor is {short_repr(part)}, not above 0 and at most 1")
        return None
    problems += [
        f"rope: {key} is {short_repr(x)}" for key, x in rope.items() if (key, x) != ("factor", 1)
    ]
    return ProportionalScaling(float(part))


def _read_rotary_dim(
    factor: Any, values: Mapping[str, Any], family: Family, problems: list[str]
) -> int | None:
    """Return the number of rotary dimensions of a head."""
    if "partial" not in family.ropes:
        problems.append(
            f"partial_rotary_factor is {short_repr(factor)}: all of a head has positions"
        )
    elif not is_number(factor) or not 0 < factor <= 1:
        problems.append(f"partial_rotary_factor is {short_repr(factor)}, not above 0 and at most 1")
    else:
        try:
            size = values["head_dim"] or values["hidden_size"] // values["num_attention_heads"]
            return int(size * factor)
        except (KeyError, TypeError, ValueError, ArithmeticError):
            pass  # a size that is no number is reported with its own key
    return None


def _read_scaling(
    rope_type: str,
    rope: dict[str, Any],
    values: Mapping[str, Any],
    family: Family,
    problems: list[str],
) -> RopeScaling | None:
    if rope_type == "default":
        problems += [
            f"rope: {key[:100]} is {short_repr(x)}, without a rope_type" for key, x in rope.items()
        ]
        return None
    # Among what a family supports these two are no types.
    known_types = [each for each in family.ropes if each not in ("partial", "mrope")]
    if rope_type not in known_types:
        is_type = rope_type not in ("partial", "mrope")
        problems.append(
            f"rope_type is {short_repr(rope_type)}, not {' or '.join(known_types)} of "
            f"{family.model_type}{list_who(lambda other: is_type and rope_type in other.ropes)}"
        )
        return None
    full_length = values.get("max_position_embeddings")
    length = rope.pop("original_max_position_embeddings", full_length)
    # The value outside of the table takes precedence.
    length = values.get("original_max_position_embeddings", length)
    options = {"factor": rope.pop("factor", None)}
    if rope_type != "linear":
        options["original_max_position_embeddings"] = length
    options |= {key: rope.pop(key) for key in _OPTIONS[rope_type] & rope.keys()}
    wrong = [
        f"rope: {key[:100]} is {short_repr(x)}, an unknown key of {rope_type}"
        for key, x in rope.items()
    ]
    # Phi's files give both lengths in place of their quotient.
    if rope_type == "longrope" and options["factor"] is None:
        is_known = is_number(full_length) and is_number(length) and length > 0
        options["factor"] = full_length / length if is_known else 1.0
    wrong += filter(None, itertools.starmap(_find_option_problem, options.items()))
    problems += wrong
    if wrong:
        return None
    try:
        return _make_scaling(rope_type, options, has_latents="kv_lora_rank" in family.keys)
    except KeyError as error:
        problems.append(f"rope: {error.args[0]} is missing")
    except (ValueError, TypeError, ArithmeticError) as error:
        problems.append(f"rope: {error}")
    return None


def _find_option_problem(key: str, value: Any) -> str | None:
    if key in ("short_factor", "long_factor"):
        is_list = isinstance(value, list) and all(map(is_number, value))
        return None if is_list else f"rope: {key} is {short_repr(value)}, no list of numbers"
    if key == "truncate":
        is_bool = isinstance(value, bool)
        return None if is_bool else f"rope: truncate is {short_repr(value)}, not true or false"
    if is_number(value) or (value is None and key in _YARN_KEYS):
        return None
    return f"rope: {key} is {short_repr(value)}, no number"


def _make_scaling(rope_type: str, options: Mapping[str, Any], *, has_latents: bool) -> RopeScaling:
    if rope_type == "linear":
        return LinearScaling(float(options["factor"]))
    if rope_type == "llama3":
        # `Llama3Scaling` has fields of the same names.
        factors = {key: x for key, x in options.items() if key.endswith("factor")}
        length = int(options["original_max_position_embeddings"])
        return Llama3Scaling(**factors, original_length=length)
    if rope_type == "yarn":
        return _make_yarn(options, has_latents=has_latents)
    factor = options["factor"]
    length = int(options["original_max_position_embeddings"])
    attention_factor = options.get("attention_factor")
    if attention_factor is None:  # Ding et al., section 3.3
        is_longer = factor > 1
        attention_factor = math.sqrt(1 + math.log(factor) / math.log(length)) if is_longer else 1.0
    return LongRopeScaling(
        options["short_factor"],
        options["long_factor"],
        original_length=length,
        context=length,  # for documents of the length of the short factors; see `set_context`
        attention_factor=attention_factor,
    )


def _make_yarn(options: Mapping[str, Any], *, has_latents: bool) -> YarnScaling:
    """Return YaRN as `transformers` computes it.

    Cosines and sines are multiplied by an attention factor, and so scores by its square. With
    latents, where only a part of a head has positions, this factor must be 1, and scores have a
    factor of their own.
    """
    factor = float(options["factor"])
    # Peng et al., "YaRN" (2023): cosines and sines are multiplied by sqrt(1/t) = 0.1 ln(s) + 1 for
    # the factor s. DeepSeek has 0.1 m ln(s) + 1 twice, with m = `mscale` and m = `mscale_all_dim`:
    # cosines and sines get the quotient of both, and scores the square of the second.
    log_factor = 0.1 * math.log(factor) if factor > 1 else 0.0
    mscale = options.get("mscale")
    mscale_all_dim = options.get("mscale_all_dim")
    attention_factor = options.get("attention_factor")
    if attention_factor is None and mscale and mscale_all_dim:
        attention_factor = (log_factor * mscale + 1) / (log_factor * mscale_all_dim + 1)
    if attention_factor is None:
        attention_factor = log_factor + 1
    if has_latents:
        if attention_factor != 1:
            raise ValueError(f"mscale {mscale} and mscale_all_dim {mscale_all_dim} must be equal")
        mscale = float(mscale_all_dim or 0)
    else:
        if attention_factor < 1 or (attention_factor > 1 and not log_factor):
            raise ValueError(
                f"attention_factor is {attention_factor} with factor {factor}: it must be at least "
                "1, and 1 for a factor of at most 1"
            )
        # The m of which this is the attention factor; rounded, since the file has rounded it too.
        mscale = round((attention_factor - 1) / log_factor, 12) if log_factor else 0.0
    return YarnScaling(
        factor,
        int(options["original_max_position_embeddings"]),
        beta_fast=float(options.get("beta_fast") or 32),  # the defaults of the paper
        beta_slow=float(options.get("beta_slow") or 1),
        mscale=mscale,
        fractional=not options.get("truncate", True),
    )


def _write_scaling(config: DecoderConfig) -> dict[str, Any]:
    match config.rope_scaling:
        case None:
            return {"rope_type": "default"}
        case LongRopeScaling() as scaling:
            return {
                "rope_type": "longrope",
                "short_factor": [*scaling.short],
                "long_factor": [*scaling.long],
                "original_max_position_embeddings": scaling.original_length,
                "attention_factor": scaling.attention_factor,
            }
        case LinearScaling() as scaling:
            return {"rope_type": "linear", "factor": scaling.factor}
        case ProportionalScaling() as scaling:
            return {"rope_type": "proportional", "partial_rotary_factor": scaling.part}
        case Llama3Scaling() as scaling:
            return {
                "rope_type": "llama3",
                "factor": scaling.factor,
                "original_max_position_embeddings": scaling.original_length,
                "low_freq_factor": scaling.low_freq_factor,
                "high_freq_factor": scaling.high_freq_factor,
            }
        case YarnScaling() as scaling:
            values = {
                "rope_type": "yarn",
                "factor": scaling.factor,
                "original_max_position_embeddings": scaling.original_length,
                "beta_fast": scaling.beta_fast,
                "beta_slow": scaling.beta_slow,
                "truncate": not scaling.fractional,
            }
            # Without latents, cosines and sines have the root of what scores are multiplied by.
            factors = {"attention_factor": scaling.sharpening**0.5}
            if config.latents is not None:
                factors = {"mscale": scaling.mscale, "mscale_all_dim": scaling.mscale}
            return {**values, **factors}


def write_rope(config: DecoderConfig, family: Family) -> dict[str, Any]:
    """Return the entries about rotary positions, in the old form and in the new.

    Examples:
        >>> from trainkit.weights.hub.configs import match_family
        >>> from trainkit.models.decoder_sizes import make_decoder_config
        >>> config = make_decoder_config("tiny")
        >>> write_rope(config, match_family(config))["rope_parameters"]
        {'rope_type': 'default', 'rope_theta': 10000.0}
    """
    rope = _write_scaling(config)
    theta = {"rope_theta": config.rope_theta}
    if config.rotary_dim is not None or "partial_rotary_factor" in family.defaults:
        theta["partial_rotary_factor"] = config.rotary_size / config.head_size
    # In both forms: versions of `transformers` before 5 read the old one only.
    values = {**theta, "rope_scaling": None if rope["rope_type"] == "default" else rope}
    if isinstance(config.rope_scaling, LongRopeScaling):
        values["original_max_position_embeddings"] = config.rope_scaling.original_length
    if family.local_rope is None:
        return {**values, "rope_parameters": {**rope, **theta}}
    sliding = config.sliding
    # Without sliding layers any value will do: this is the family's default.
    local_theta = 10_000.0 if sliding is None else sliding.rope_theta or config.rope_theta
    local = {"rope_type": "default", "rope_theta": local_theta}
    return {
        family.local_rope: local_theta,
        **values,
        "rope_parameters": {KINDS[0]: {**rope, **theta}, KINDS[1]: local},
    }
