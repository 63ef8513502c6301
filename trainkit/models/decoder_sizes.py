"""Decoder configs by name: small ones, and the published sizes of known families."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from functools import partial
from typing import Any, get_args

import attrs

from trainkit.models.config import (
    PARTS,
    DecoderConfig,
    Delta,
    Experts,
    Latents,
    Llama3Scaling,
    RopeScaling,
    Sliding,
    YarnScaling,
)
from trainkit.types import check_range


def list_decoder_sizes() -> dict[str, DecoderConfig]:
    """Return every named size, smallest first within its family.

    "tiny", "tiny-hybrid" (three delta layers to one of attention) and "10m" read bytes (256, and up
    to 16 special tokens); "60m" to "350m" have a
    vocabulary of 32,000, which counts in their name; both may be overridden. The heads, widths and
    vocabulary of all of them divide by 4.

    Examples:
        >>> list(list_decoder_sizes())[:5]
        ['tiny', 'tiny-hybrid', '10m', '60m', '125m']
    """
    # What the members of a family share; published models have the values of their configs.
    small = partial(_make_config, tied=True)
    llama = partial(_make_config, vocab_size=128_256, norm_eps=1e-5, rope_theta=500_000.0)
    llama_3_1 = partial(llama, rope_scaling=Llama3Scaling(8.0))
    llama_3_2 = partial(llama, rope_scaling=Llama3Scaling(32.0), tied=True)
    mixtral = partial(_make_config, vocab_size=32_000, rope_theta=1_000_000.0)
    # Heads of 128 at any width, so the projections are not square (width 1,024: 16 * 128).
    qwen3 = partial(
        _make_config,
        vocab_size=151_936,
        head_dim=128,
        norm_eps=1e-6,
        rope_theta=1_000_000.0,
        qk_norm=True,
    )
    # An expert of Mixtral is as wide as its dense MLP; of Qwen3, eight together are.
    of_8 = Experts(count=8, top_k=2, width=14_336)
    small_of_128 = Experts(count=128, top_k=8, width=768)
    large_of_128 = Experts(count=128, top_k=8, width=1_536)
    gpt_oss_experts = partial(
        Experts, top_k=4, width=2_880, bias=True, clamp=7.0, sigmoid_scale=1.702
    )
    gpt_oss = partial(
        _make_config,
        vocab_size=201_088,
        head_dim=64,
        rope_theta=150_000.0,
        rope_scaling=YarnScaling(factor=32.0, original_length=4_096, fractional=True),
        qkv_bias=True,
        out_bias=True,
        sliding=Sliding(window=128, full_every=2),
        attention_sinks=True,
    )
    return {
        # width, layers, heads, kv_heads, mlp_width
        "tiny": small(128, 4, 4, 4, 384, vocab_size=272),
        # As many parameters as "tiny": what the delta layers' gates need, their MLPs have less.
        "tiny-hybrid": small(128, 4, 4, 4, 344, vocab_size=272, delta=_TINY_DELTA),
        "10m": small(320, 8, 4, 4, 864, vocab_size=272),
        "60m": small(512, 14, 8, 8, 1_408, vocab_size=32_000),
        "125m": small(768, 14, 12, 12, 2_048, vocab_size=32_000),
        "350m": small(1_024, 25, 16, 16, 2_816, vocab_size=32_000),
        "llama-3.2-1b": llama_3_2(2_048, 16, 32, 8, 8_192),
        "llama-3.2-3b": llama_3_2(3_072, 28, 24, 8, 8_192),
        "llama-3.1-8b": llama_3_1(4_096, 32, 32, 8, 14_336),
        "llama-3.1-70b": llama_3_1(8_192, 80, 64, 8, 28_672),
        "qwen3-0.6b": qwen3(1_024, 28, 16, 8, 3_072, tied=True),
        "qwen3-1.7b": qwen3(2_048, 28, 16, 8, 6_144, tied=True),
        "qwen3-4b": qwen3(2_560, 36, 32, 8, 9_728, tied=True),
        "qwen3-8b": qwen3(4_096, 36, 32, 8, 12_288),
        "qwen3-14b": qwen3(5_120, 40, 40, 8, 17_408),
        "qwen3-32b": qwen3(5_120, 64, 64, 8, 25_600),
        "mixtral-8x7b": mixtral(4_096, 32, 32, 8, 14_336, experts=of_8),
        "qwen3-30b-a3b": qwen3(2_048, 48, 32, 4, 6_144, experts=small_of_128),
        "qwen3-235b-a22b": qwen3(4_096, 94, 64, 4, 12_288, experts=large_of_128),
        "deepseek-v3": _DEEPSEEK_V3,
        "gpt-oss-20b": gpt_oss(2_880, 24, 64, 8, 2_880, experts=gpt_oss_experts(count=32)),
        "gpt-oss-120b": gpt_oss(2_880, 36, 64, 8, 2_880, experts=gpt_oss_experts(count=128)),
    }


def _make_config(
    width: int, layers: int, heads: int, kv_heads: int, mlp_width: int, **options: Any
) -> DecoderConfig:
    return DecoderConfig(
        width=width,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        mlp_width=mlp_width,
        **options,
    )


# Three layers of four, with heads as those of attention.
_TINY_DELTA = Delta(key_heads=4, value_heads=4, key_size=32, value_size=32)

# Without the module that predicts a second token, for a context of 163,840 tokens.
_DEEPSEEK_V3 = DecoderConfig(
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
        top_k=8,
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


def make_decoder_config(
    name: str, *, num_ids: int | None = None, **overrides: Any
) -> DecoderConfig:
    """Return the named size, with some fields replaced.

    Args:
        name: The size.
        num_ids: The number of ids of a tokenizer: `vocab_size` becomes `pad_vocab_size` of it.
        overrides: Fields of `DecoderConfig`.

    Raises:
        ValueError: There is no such size, or the result is no valid `DecoderConfig`.

    Examples:
        >>> make_decoder_config("tiny", layers=2).layers
        2
        >>> make_decoder_config("tiny", num_ids=271).vocab_size
        272
    """
    sizes = list_decoder_sizes()
    if name not in sizes:
        # A cutoff of 0 finds a nearest name, however far.
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

    A tokenizer has any number of ids, 271 for instance, but a matrix that is sharded over ranks
    needs a divisible number of rows. The rows from `size` on are trained like those of a token that
    never occurs; sampling must exclude them. The result does not depend on the layout, so all
    layouts have the same model.

    Raises:
        ValueError: A number is below 1.

    Examples:
        >>> pad_vocab_size(271)
        272
        >>> pad_vocab_size(50_257, multiple_of=128)
        50304
    """
    check_range("pad_vocab_size", at_least=1, size=size, multiple_of=multiple_of)
    return -(-size // multiple_of) * multiple_of  # rounded up


def config_from_facts(facts: Mapping[str, Any]) -> DecoderConfig:
    """Return the config of a dictionary from `attrs.asdict`, as checkpoints store it.

    Raises:
        ValueError: A field is unknown or missing.

    Examples:
        >>> config = make_decoder_config("llama-3.1-8b")
        >>> config_from_facts(attrs.asdict(config)) == config
        True
    """
    values = dict(facts)
    # The four kinds of scaling have no tag in a dictionary; their fields differ. It is the smallest
    # that has those of the dictionary, which lacks the ones that were added later.
    scaling_fields = {*(values.get("rope_scaling") or ())}
    scaling_kinds = sorted(get_args(RopeScaling), key=lambda kind: len(attrs.fields(kind)))
    fitting = (x for x in scaling_kinds if scaling_fields <= {*attrs.fields_dict(x)})
    kinds: dict[str, Any] = {"rope_scaling": next(fitting, Llama3Scaling), **PARTS}
    try:
        for name, kind in kinds.items():
            # Absent or null: an option that did not exist yet, or one that is off.
            if values.get(name) is not None:
                values[name] = kind(**values[name])
        return DecoderConfig(**values)
    # attrs raises TypeError for a keyword that it does not know, or that it misses.
    except TypeError as error:
        raise ValueError(f"config_from_facts: these are not a decoder's: {error}") from error
