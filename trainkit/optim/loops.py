"""The compiled loop of a rule: one pass over parameter, gradient and moments, as they are kept.

It goes through BLOCK elements at a time and calls words for each, in whose place numba puts what
fits what is kept: None, nothing at all; an array, of fp32 or fp64, of bf16 as uint16, or of codes
of 8 bits as uint8. All that is passed is arrays and numbers, and casts keep numbers in 32 bits: a
tuple of arrays, a row of a matrix or a number of 64 bits, and numba makes no vectors of the loop.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numba.extending import overload, register_jitable

from trainkit.noise.jit import jit
from trainkit.noise.rounding import fill_noise
from trainkit.optim.storage import BLOCK, NAN, SHIFT, SIGNED, SIZE, UNSIGNED


def part(kept: Any, begin: int) -> Any:
    """Return the block of what is kept that begins at an element: a slice, or None."""


def base_of(scales: Any, begin: int, most: Any) -> Any:
    """Return what codes of a block count from, if it has a scale; `most` is the largest code."""


def read(block: Any, i: int, base: Any, most: Any) -> Any:
    """Return a number of a block, 0 of none; the last two are of 8 bits."""


def keep(block: Any, i: int, x: Any, scratch: Any) -> None:
    """Keep a number of a block, to nearest; what 8 bits keep waits in scratch for `close`."""


def height(block: Any, x: Any) -> Any:
    """Return the bits of a number's size where a block needs the largest, else 0."""


def close(  # noqa: PLR0917 (all of a block)
    block: Any, scales: Any, begin: int, most: Any, top: Any, up: Any, bits: Any
) -> None:
    """Keep the numbers of a block in 8 bits, rounded as `up_of` says, and its scale."""


def keep_parameter(block: Any, i: int, x: Any, rest: Any, noise: Any) -> None:
    """Keep a number of a parameter: at random with noise, else to nearest, what is left in rest."""


def draw(keys: Any, at: Any, begin: int, out: Any) -> None:
    """Fill a block's noise from keys of rows, and a row's length and its first column's index."""


# ------------------------------------------------------------------ what numba puts in their place


def _kind(kept: Any) -> str:
    if not isinstance(kept, numba.types.Array):
        return "none"
    return {"uint8": "bits", "uint16": "bf16"}.get(str(kept.dtype), "wide")


def _nothing(*_: Any) -> None:
    pass


def _zero(*_: Any) -> Any:
    return np.int32(0)


def _becomes(word: Any, *, other: Callable[..., Any], **kinds: Callable[..., Any]) -> None:
    """Put a function in a word's place for each kind of its first argument."""

    def chosen(*args: Any) -> Any:
        return kinds.get(_kind(args[0]), other)

    overload(word, strict=False)(chosen)


@register_jitable
def _nearest(x: Any) -> Any:
    """Return the bits of a number's bf16, to nearest and even."""
    bits = np.float32(x).view(np.uint32)
    odd = np.uint32(np.uint32(bits >> np.uint32(16)) & np.uint32(1))
    is_nan = np.uint32(bits & np.uint32(SIZE)) > np.uint32(0x7F800000)
    added = np.uint32(0) if is_nan else np.uint32(odd + np.uint32(0x7FFF))
    return np.uint16(np.uint32(bits + added) >> np.uint32(16))


@register_jitable
def _widened(x: Any) -> Any:
    return np.uint32(np.uint32(x) << np.uint32(16)).view(np.float32)


def _slice(kept: Any, begin: int) -> Any:
    return kept[begin : begin + BLOCK]


def _base(scales: Any, begin: int, most: Any) -> Any:
    return np.int32(np.int32(scales[begin // BLOCK] >> np.int32(SHIFT)) - most)


def _read_nothing(block: Any, i: int, base: Any, most: Any) -> Any:  # noqa: ARG001
    return np.float32(0)


def _read_bits(block: Any, i: int, base: Any, most: Any) -> Any:
    code = np.int32(block[i])
    size = np.int32(code & most)
    at = np.int32(np.int32(size + base) << np.int32(SHIFT))
    sign = np.int32(np.int32(code & np.int32(np.int32(255) - most)) << np.int32(24))
    return np.int32((at if size != np.int32(0) else np.int32(0)) | sign).view(np.float32)


def _read_bf16(block: Any, i: int, base: Any, most: Any) -> Any:  # noqa: ARG001
    return _widened(block[i])


def _read_wide(block: Any, i: int, base: Any, most: Any) -> Any:  # noqa: ARG001
    return block[i]


def _keep_later(block: Any, i: int, x: Any, scratch: Any) -> None:  # noqa: ARG001
    scratch[i] = x


def _keep_nearest(block: Any, i: int, x: Any, *_: Any) -> None:
    block[i] = _nearest(x)


def _keep_wide(block: Any, i: int, x: Any, *_: Any) -> None:
    block[i] = x


def _size(block: Any, x: Any) -> Any:  # noqa: ARG001
    return np.int32(np.float32(x).view(np.int32) & np.int32(SIZE))


def _encode(  # noqa: PLR0917 (all of a block)
    block: Any, scales: Any, begin: int, most: Any, top: Any, up: Any, bits: Any
) -> None:
    least = np.int32(most >> np.int32(7))
    top = np.int32(min(top, np.int32(NAN)) + np.int32((1 << SHIFT) - 1))
    base = max(np.int32(np.int32(top >> np.int32(SHIFT)) - most), np.int32(0))
    scales[begin // BLOCK] = np.int32(np.int32(base + most) << np.int32(SHIFT))
    for i in range(BLOCK):
        size = np.int32(bits[i] & np.int32(SIZE))
        code = np.int32(np.int32(np.int32(size + up[i]) >> np.int32(SHIFT)) - base)
        sign = np.int32(np.int32(bits[i] >> np.int32(24)) & np.int32(0x80))
        block[i] = np.uint8(np.int32(max(code, min(size, least)) | sign))


def _keep_at_random(block: Any, i: int, x: Any, rest: Any, noise: Any) -> None:  # noqa: ARG001
    bits = np.float32(x).view(np.uint32)
    is_finite = np.uint32(bits & np.uint32(0x7F800000)) != np.uint32(0x7F800000)
    added = noise[i] if is_finite else np.uint32(0)
    block[i] = np.uint16(np.uint32(bits + added) >> np.uint32(16))


def _keep_with_rest(block: Any, i: int, x: Any, rest: Any, noise: Any) -> None:  # noqa: ARG001
    block[i] = _nearest(x)
    rest[i] = _nearest(x - _widened(block[i]))


def _fill(keys: Any, at: Any, begin: int, out: Any) -> None:
    fill_noise(keys, at[0], at[1], begin, out)


_becomes(part, none=_nothing, other=_slice)
_becomes(base_of, none=_zero, other=_base)
_becomes(read, none=_read_nothing, bits=_read_bits, bf16=_read_bf16, other=_read_wide)
_becomes(keep, none=_nothing, bits=_keep_later, bf16=_keep_nearest, other=_keep_wide)
_becomes(height, bits=_size, other=_zero)
_becomes(close, bits=_encode, other=_nothing)
_becomes(draw, none=_nothing, other=_fill)


@overload(keep_parameter, strict=False)
def _keep_parameter(block: Any, _i: Any, _x: Any, rest: Any, noise: Any) -> Any:
    if _kind(block) == "wide":
        return _keep_wide
    if _kind(rest) != "none":
        return _keep_with_rest
    return _keep_nearest if _kind(noise) == "none" else _keep_at_random


# ----------------------------------------------------------------------------------------- the loop


def _of_two(rule: Callable[..., Any], moments: int) -> Callable[..., Any]:
    """Return a rule of two moments, which leaves alone those that the given one does not have."""
    apply = register_jitable(rule)

    def none(p: Any, g: Any, m: Any, v: Any, c: Any) -> Any:
        return apply(p, g, c), m, v

    def one(p: Any, g: Any, m: Any, v: Any, c: Any) -> Any:
        p, m = apply(p, g, m, c)
        return p, m, v

    return register_jitable((none, one, rule)[moments])


@functools.cache
def rule_loop(rule: Callable[..., Any], moments: int) -> Callable[..., None]:
    """Return the loop of a rule over what is kept, flat, compiled at its first call.

    Args:
        rule: `rule(p, g, *moments, numbers) -> (p, *moments)`, pure.
        moments: How many it has: at most two.

    Returns:
        `loop(p, g, rest, m, v, scales, keys, at, up, work, bits, noise, numbers)`: parameter,
        gradient, what is left of a parameter, and the moments; int32 scales of both moments; keys
        of rows, and (a row's length, its first column's index); int32 `up_of`; two scratch blocks
        and the same as int32; a scratch block for noise. What is not there is None.

    Examples:
        >>> loop, block = rule_loop(lambda p, g, c: p - c[0] * g, 0), np.empty(BLOCK, np.float32)
        >>> p, nones = np.array([3.0], np.float32), (None, None)
        >>> up, two = np.empty(0, np.int32), (block, block)
        >>> at, told = (0, 0), (np.float32(0.5),)
        >>> loop(p, p, None, None, None, nones, None, at, up, two, two, None, told)
        >>> p
        array([1.5], dtype=float32)
    """
    apply = _of_two(rule, moments)

    def loop(  # noqa: PLR0917 (all that a step reads and writes)
        p: Any, g: Any, rest: Any, m: Any, v: Any, scales: Any, keys: Any, at: Any, up: Any,
        work: Any, bits: Any, noise: Any, numbers: Any,
    ) -> None:  # fmt: skip
        (m_scales, v_scales), (one, two), (one_bits, two_bits) = scales, work, bits
        for begin in range(0, p.size, BLOCK):
            p_, g_, rest_ = part(p, begin), part(g, begin), part(rest, begin)
            m_, m_base = part(m, begin), base_of(m_scales, begin, SIGNED)
            v_, v_base = part(v, begin), base_of(v_scales, begin, UNSIGNED)
            draw(keys, at, begin, noise)
            m_top = v_top = np.int32(0)
            for i in range(g_.size):
                x = read(p_, i, 0, 0) + read(rest_, i, 0, 0)
                y, z = read(m_, i, m_base, SIGNED), read(v_, i, v_base, UNSIGNED)
                x, y, z = apply(x, read(g_, i, 0, 0), y, z, numbers)
                keep_parameter(p_, i, x, rest_, noise)
                keep(m_, i, y, one)
                keep(v_, i, z, two)
                m_top, v_top = max(m_top, height(m_, y)), max(v_top, height(v_, z))
            close(m_, m_scales, begin, SIGNED, m_top, up, one_bits)
            close(v_, v_scales, begin, UNSIGNED, v_top, up, two_bits)

    return jit(loop, divides=True, uses=(rule, part, fill_noise))
