"""Decoders by name: small ones, and the public figures of known families, with experts too."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, get_args

import attrs

from trainkit.models.config import (
    PARTS,
    DecoderConfig,
    Experts,
    Latents,
    Llama3Scaling,
    RopeScaling,
    YarnScaling,
)
from trainkit.types import check_range


def list_decoder_sizes() -> dict[str, DecoderConfig]:
    """Return every named size, smallest first within its family.

    "tiny" and "10m" read bytes (256, and up to 16 special tokens); "60m" to "350m" have a
    vocabulary of 32,000, which counts in their name; both may be overridden. Heads, widths and
    vocabulary of all of them divide by 4.

    Examples:
        >>> list(list_decoder_sizes())[:5]
        ['tiny', '10m', '60m', '125m', '350m']
    """
    return {**_small(), **_llama(), **_qwen3(), **_mixtures()}


def make_decoder_config(
    name: str, *, num_ids: int | None = None, **overrides: Any
) -> DecoderConfig:
    """Return the named size, with some fields replaced.

    Args:
        name: The size.
        num_ids: The number of ids of a tokenizer: `vocab_size` becomes `pad_vocab_size` of it.
        overrides: Fields of `DecoderConfig`.

    Raises:
        ValueError: There is no such size, or the result breaks a rule of `DecoderConfig`.

    Examples:
        >>> make_decoder_config("tiny", layers=2).layers
        2
        >>> make_decoder_config("tiny", num_ids=271).vocab_size
        272
    """
    sizes = list_decoder_sizes()
    if name not in sizes:
        near = difflib.get_close_matches(name, sizes, n=1, cutoff=0.0)[0]
        raise ValueError(
            f"make_decoder_config: no size is named {name!r}, the nearest is {near!r}; "
            f"there are {', '.join(sizes)}"
        )
    if num_ids is not None:
        check_range("make_decoder_config", at_least=1, num_ids=num_ids)
        overrides["vocab_size"] = pad_vocab_size(num_ids)
    return attrs.evolve(sizes[name], **overrides)


def pad_vocab_size(size: int, *, multiple_of: int = 16) -> int:
    """Return the number of rows that an embedding for `size` token ids should have.

    A tokenizer has any number of ids, 271 for instance, and a matrix that is split over ranks needs
    one that divides. The rows beyond `size` are trained like those of a token that never comes. The
    result depends on no layout, so that all hold the same model. Whoever draws tokens leaves the
    ids from `size` on out.

    Raises:
        ValueError: A number is below 1.

    Examples:
        >>> pad_vocab_size(271)
        272
        >>> pad_vocab_size(50_257, multiple_of=128)
        50304
    """
    check_range("pad_vocab_size", at_least=1, size=size, multiple_of=multiple_of)
    return -(-size // multiple_of) * multiple_of


def config_from_facts(facts: Mapping[str, Any]) -> DecoderConfig:
    """Return the configuration that `attrs.asdict` made a dict of, for instance in a checkpoint.

    Raises:
        ValueError: A field is unknown or missing.

    Examples:
        >>> config = make_decoder_config("llama-3.1-8b")
        >>> config_from_facts(attrs.asdict(config)) == config
        True
    """
    values = dict(facts)
    try:
        scaling = {*(values.get("rope_scaling") or ())}
        kinds: dict[str, Any] = {
            "rope_scaling": next(
                (kind for kind in get_args(RopeScaling) if {*attrs.fields_dict(kind)} == scaling),
                Llama3Scaling,
            ),
            **PARTS,
        }
        for name, kind in kinds.items():
            if values.get(name) is not None:
                values[name] = kind(**values[name])
        return DecoderConfig(**values)
    except TypeError as error:
        raise ValueError(f"config_from_facts: these are not a decoder's: {error}") from error


def _sized(table: Mapping[str, tuple[Any, ...]], **same: Any) -> dict[str, DecoderConfig]:
    """Return sizes of a family by name, of their shapes and what all of them have."""
    shape = ("width", "layers", "heads", "kv_heads", "mlp_width")
    return {
        name: DecoderConfig(**dict(zip(shape, own, strict=True)), **same)
        for name, own in table.items()
    }


def _small() -> dict[str, DecoderConfig]:
    of_bytes = {"tiny": (128, 4, 4, 4, 384), "10m": (320, 8, 4, 4, 864)}
    of_words = {
        "60m": (512, 14, 8, 8, 1_408),
        "125m": (768, 14, 12, 12, 2_048),
        "350m": (1_024, 25, 16, 16, 2_816),
    }
    return {
        **_sized(of_bytes, vocab_size=272, tied=True),
        **_sized(of_words, vocab_size=32_000, tied=True),
    }


def _llama() -> dict[str, DecoderConfig]:
    v3_2 = {"llama-3.2-1b": (2_048, 16, 32, 8, 8_192), "llama-3.2-3b": (3_072, 28, 24, 8, 8_192)}
    v3_1 = {"llama-3.1-8b": (4_096, 32, 32, 8, 14_336), "llama-3.1-70b": (8_192, 80, 64, 8, 28_672)}
    same: dict[str, Any] = {"vocab_size": 128_256, "norm_eps": 1e-5, "rope_theta": 500_000.0}
    return {
        **_sized(v3_2, tied=True, rope_scaling=Llama3Scaling(32.0), **same),
        **_sized(v3_1, rope_scaling=Llama3Scaling(8.0), **same),
    }


_QWEN3: Mapping[str, Any] = MappingProxyType(
    {
        "vocab_size": 151_936,
        "head_dim": 128,
        "norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "qk_norm": True,
    }
)


def _qwen3() -> dict[str, DecoderConfig]:
    tied = {
        "qwen3-0.6b": (1_024, 28, 16, 8, 3_072),
        "qwen3-1.7b": (2_048, 28, 16, 8, 6_144),
        "qwen3-4b": (2_560, 36, 32, 8, 9_728),
    }
    apart = {
        "qwen3-8b": (4_096, 36, 32, 8, 12_288),
        "qwen3-14b": (5_120, 40, 40, 8, 17_408),
        "qwen3-32b": (5_120, 64, 64, 8, 25_600),
    }
    return {**_sized(tied, tied=True, **_QWEN3), **_sized(apart, **_QWEN3)}


def _mixtures() -> dict[str, DecoderConfig]:
    mixtral = {"mixtral-8x7b": (4_096, 32, 32, 8, 14_336)}
    of_eight = Experts(count=8, chosen=2, width=14_336)
    small, large = (Experts(count=128, chosen=8, width=width) for width in (768, 1_536))
    return {
        **_sized(mixtral, vocab_size=32_000, rope_theta=1_000_000.0, experts=of_eight),
        **_sized({"qwen3-30b-a3b": (2_048, 48, 32, 4, 6_144)}, experts=small, **_QWEN3),
        **_sized({"qwen3-235b-a22b": (4_096, 94, 64, 4, 12_288)}, experts=large, **_QWEN3),
        "deepseek-v3": _deepseek_v3(),
    }


def _deepseek_v3() -> DecoderConfig:
    """Return DeepSeek-V3 without what predicts a second token, for 163,840 tokens of context."""
    return DecoderConfig(
        vocab_size=129_280,
        width=7_168,
        layers=61,
        heads=128,
        kv_heads=128,
        mlp_width=18_432,
        norm_eps=1e-6,
        rope_scaling=YarnScaling(factor=40.0, original_length=4_096),
        experts=Experts(
            count=256,
            chosen=8,
            width=2_048,
            shared=2_048,
            first=3,
            scores="sigmoid",
            biased=True,
            groups=8,
            groups_chosen=4,
            scale=2.5,
        ),
        latents=Latents(query_rank=1_536, kv_rank=512, plain=128, rotary=64, values=128),
    )
