"""What a `config.json` says of rotary positions, in the old form and the new, and how it is said.

`rope_theta` with `rope_scaling`, or `rope_parameters`, which may be a table for each kind of layer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from trainkit.models.config import (
    DecoderConfig,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeScaling,
    YarnScaling,
)
from trainkit.weights.hub.families import Family

KINDS = ("full_attention", "sliding_attention")
"""What `layer_types` and tables of rotary positions call layers that see all, and others."""

_OF_YARN = frozenset(
    {"beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "truncate"}
)
_OF_LONG = frozenset({"short_factor", "long_factor", "attention_factor"})


def same(a: Any, b: Any) -> bool:
    """Say whether two values of JSON are equal, true being no 1.

    Examples:
        >>> same(1, 1.0), same(1, True)
        (True, False)
    """
    return a == b and isinstance(a, bool) == isinstance(b, bool)


def told(value: Any) -> str:
    """Return a value as a message shows it.

    Examples:
        >>> told("a")
        "'a'"
    """
    return repr(value)[:100]


def is_real(value: Any) -> bool:
    """Say whether a value is a number, and neither true nor false.

    Examples:
        >>> is_real(1), is_real(True)
        (True, False)
    """
    return isinstance(value, int | float) and not isinstance(value, bool)


def local_rope(said: dict[str, Any], problems: list[str]) -> float | None:
    """Return the base of wavelengths in layers that slide; leave in `said` those of the others.

    Examples:
        >>> local_rope({"rope_local_base_freq": 1e4}, [])
        10000.0
    """
    theta = said["rope_local_base_freq"]
    tables = said.get("rope_parameters")
    if isinstance(tables, dict) and {*tables} & {*KINDS}:
        said["rope_parameters"] = tables.get(KINDS[0])
        own = tables.get(KINDS[1]) or {}
        if not isinstance(own, dict):
            problems.append(f"rope_parameters of layers that slide are {told(own)}, no table")
            return None
        own = dict(own)
        theta = own.pop("rope_theta", theta)
        more = [k for k, x in own.items() if (k, x) != ("rope_type", "default")]
        more += [key for key in tables if key not in KINDS]
        problems += [f"rope_parameters of layers that slide: {key} is not computed" for key in more]
    if not is_real(theta) or not 1 < theta < 1e12:
        problems.append(f"rope_local_base_freq is {told(theta)}")
        return None
    return float(theta)


def read_rope(said: Mapping[str, Any], family: Family, problems: list[str]) -> dict[str, Any]:
    """Return the fields about rotary positions; add what is wrong.

    Examples:
        >>> from trainkit.weights.hub.configs import family_named
        >>> said = {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2}}
        >>> read_rope(said, family_named("llama"), [])["rope_scaling"]
        LinearScaling(factor=2.0)
    """
    forms = [said.get(key) for key in ("rope_scaling", "rope_parameters")]
    tables = [form for form in forms if form is not None]
    if not all(isinstance(table, dict) for table in tables):
        problems.append("rope_scaling or rope_parameters is no table")
        return {}
    both = [table for table in tables if {"type", "rope_type"} <= table.keys()]
    problems += ["rope: type and rope_type differ" for t in both if t["type"] != t["rope_type"]]
    tables = [{"rope_type" if k == "type" else k: v for k, v in t.items()} for t in tables]
    rope = {key: value for table in tables for key, value in table.items()}
    clash = [k for k in rope if any(k in t and not same(t[k], rope[k]) for t in tables)]
    problems += [f"rope_scaling and rope_parameters differ in {key}" for key in clash]
    kind = rope.pop("rope_type", None) or "default"
    if "longrope" in family.ropes and kind in ("su", "yarn"):  # its older names
        kind = "longrope"
    theta = rope.pop("rope_theta", said["rope_theta"])
    if not is_real(theta) or not 1 < theta < 1e12:
        problems.append(f"rope_theta is {told(theta)}")
        theta = 10_000.0
    partial = rope.pop("partial_rotary_factor", said.get("partial_rotary_factor"))
    size = None if partial in (None, 1) else _rotary_dim(partial, said, family, problems)
    before = len(problems)
    scaling = _scaling(str(kind), rope, said, family, problems)
    scaling = scaling if len(problems) == before else None
    return {"rope_theta": float(theta), "rope_scaling": scaling, "rotary_dim": size}


def _rotary_dim(
    part: Any, said: Mapping[str, Any], family: Family, problems: list[str]
) -> int | None:
    """Return how many elements of a head have positions."""
    if "partial" not in family.ropes:
        problems.append(f"partial_rotary_factor is {told(part)}: all of a head has positions")
    elif not is_real(part) or not 0 < part <= 1:
        problems.append(f"partial_rotary_factor is {told(part)}, not above 0 and at most 1")
    else:
        try:
            size = said["head_dim"] or said["hidden_size"] // said["num_attention_heads"]
            return int(size * part)
        except (KeyError, TypeError, ZeroDivisionError):
            pass  # a size that is no number is a problem of its own
    return None


def _scaling(
    kind: str, rope: dict[str, Any], said: Mapping[str, Any], family: Family, problems: list[str]
) -> RopeScaling | None:
    if kind == "default":
        problems += [f"rope: {key} without a rope_type" for key in rope]
        return None
    own = {
        "linear": frozenset[str](),
        "llama3": frozenset({"low_freq_factor", "high_freq_factor"}),
        "yarn": _OF_YARN,
        "longrope": _OF_LONG,
    }
    before = len(problems)
    if kind not in family.ropes:
        problems.append(f"rope_type is {told(kind)}, not {' or '.join(family.ropes)}")
        return None
    whole = said.get("max_position_embeddings")
    length = rope.pop("original_max_position_embeddings", whole)
    if "original_max_position_embeddings" in said:  # which goes before what the table says
        length = said["original_max_position_embeddings"]
    values = {"factor": rope.pop("factor", None)}
    values |= {"original_max_position_embeddings": length} if kind != "linear" else {}
    values |= {key: rope.pop(key) for key in own[kind] & rope.keys()}
    problems += [f"rope: {key} is a key of an unknown meaning" for key in rope]
    truncate = values.pop("truncate", True)
    if truncate is not True:
        problems.append(f"rope: truncate is {told(truncate)}, not true")
    if kind == "longrope" and values["factor"] is None:
        known = is_real(whole) and is_real(length) and length > 0
        values["factor"] = whole / length if known else 1.0
    lists = {key: values[key] for key in ("short_factor", "long_factor") if key in values}
    problems += [
        f"rope: {key} is {told(value)}, no number"
        for key, value in values.items()
        if key not in lists and not is_real(value) and not (value is None and key in _OF_YARN)
    ]
    problems += [
        f"rope: {key} is {told(value)}, no list of numbers"
        for key, value in lists.items()
        if not isinstance(value, list) or not all(map(is_real, value))
    ]
    try:
        found = len(problems) > before
        return None if found else _scaled(kind, values, latent="kv_lora_rank" in family.keys)
    except KeyError as error:
        problems.append(f"rope: {error.args[0]} is missing")
    except (ValueError, TypeError, ZeroDivisionError) as error:
        problems.append(f"rope: {error}")
    return None


def _scaled(kind: str, values: dict[str, Any], *, latent: bool) -> RopeScaling:
    if kind == "linear":
        return LinearScaling(float(values["factor"]))
    if kind == "llama3":
        length = int(values.pop("original_max_position_embeddings"))
        return Llama3Scaling(**values, original_length=length)
    return _long(values) if kind == "longrope" else _yarn(values, latent=latent)


def _long(values: Mapping[str, Any]) -> LongRopeScaling:
    """Return LongRoPE for texts of the length that its short factors are for."""
    factor, length = values["factor"], int(values["original_max_position_embeddings"])
    given = values.get("attention_factor")
    if given is None:  # Ding et al., section 3.3
        given = math.sqrt(1 + math.log(factor) / math.log(length)) if factor > 1 else 1.0
    sets = (values["short_factor"], values["long_factor"])
    return LongRopeScaling(*sets, original_length=length, context=length, attention_factor=given)


def _yarn(values: Mapping[str, Any], *, latent: bool) -> YarnScaling:
    """Return YaRN as it is computed by `transformers`.

    It multiplies cosines and sines by an attention factor, so that scores have its square; with
    latents, of which only a part has positions, this must be 1, and scores have another.
    """
    factor = float(values["factor"])
    log = 0.1 * math.log(factor) if factor > 1 else 0.0
    mscale, everywhere = values.get("mscale"), values.get("mscale_all_dim")
    given = values.get("attention_factor")
    if given is None and mscale and everywhere:
        given = (log * mscale + 1) / (log * everywhere + 1)
    given = log + 1 if given is None else given
    if latent:
        if given != 1:
            raise ValueError(f"mscale {mscale} and mscale_all_dim {everywhere} must be equal")
        mscale = float(everywhere or 0)
    else:
        if given < 1 or (given > 1 and not log):
            want = "want at least 1, and 1 where nothing is stretched"
            raise ValueError(f"attention_factor is {given} with factor {factor}: {want}")
        mscale = round((given - 1) / log, 12) if log else 0.0
    return YarnScaling(
        factor,
        int(values["original_max_position_embeddings"]),
        beta_fast=float(values.get("beta_fast") or 32),
        beta_slow=float(values.get("beta_slow") or 1),
        mscale=mscale,
    )


def _rope_written(config: DecoderConfig) -> dict[str, Any]:
    scaling = config.rope_scaling
    if scaling is None:
        return {"rope_type": "default"}
    if isinstance(scaling, LongRopeScaling):
        lists = {"short_factor": [*scaling.short], "long_factor": [*scaling.long]}
        length = {"original_max_position_embeddings": scaling.original_length}
        return {"rope_type": "longrope", **lists, **length} | {
            "attention_factor": scaling.attention_factor
        }
    said: dict[str, Any] = {"factor": scaling.factor}
    if isinstance(scaling, LinearScaling):
        return {"rope_type": "linear", **said}
    said["original_max_position_embeddings"] = scaling.original_length
    if isinstance(scaling, Llama3Scaling):
        own = {"low_freq_factor": scaling.low_freq_factor}
        return {"rope_type": "llama3", **said, **own, "high_freq_factor": scaling.high_freq_factor}
    said |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow}
    if config.latents is not None:
        return {"rope_type": "yarn", **said, "mscale": scaling.mscale} | {
            "mscale_all_dim": scaling.mscale
        }
    return {"rope_type": "yarn", **said, "attention_factor": scaling.sharpening**0.5}


def write_rope(config: DecoderConfig, family: Family) -> dict[str, Any]:
    """Return what is said of rotary positions, in the old form and in the new.

    Examples:
        >>> from trainkit.weights.hub.configs import match_family
        >>> from trainkit.models.decoder_sizes import make_decoder_config
        >>> config = make_decoder_config("tiny")
        >>> write_rope(config, match_family(config))["rope_parameters"]
        {'rope_type': 'default', 'rope_theta': 10000.0}
    """
    rope = _rope_written(config)
    scaling = None if rope["rope_type"] == "default" else rope
    theta = {"rope_theta": config.rope_theta}
    if config.rotary_dim is not None or "partial_rotary_factor" in family.defaults:
        theta["partial_rotary_factor"] = config.rotary_size / config.head_size
    said = {**theta, "rope_scaling": scaling}
    if isinstance(config.rope_scaling, LongRopeScaling):
        said["original_max_position_embeddings"] = config.rope_scaling.original_length
    if not family.local_rope:
        return {**said, "rope_parameters": {**rope, **theta}}
    sliding = config.sliding
    own = 10_000.0 if sliding is None else sliding.rope_theta or config.rope_theta
    local = {"rope_type": "default", "rope_theta": own}
    tables = dict(zip(KINDS, ({**rope, **theta}, local), strict=True))
    return {**said, "rope_local_base_freq": own, "rope_parameters": tables}
