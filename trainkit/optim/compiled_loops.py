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
from numba.extending import intrinsic, overload, register_jitable

from trainkit.noise.jit import jit
from trainkit.noise.rounding import fill_noise
from trainkit.optim.storage import BLOCK, NAN, SHIFT, SIGNED, SIZE, UNSIGNED


def part(kept: Any, begin: int) -> Any:
    """Return the block of what is kept that begins at an element: a slice, or None."""


def base_of(scales: Any, begin: int, most: Any) -> Any:
    """Return what codes of a block count from, if it has a scale; `most` is the largest code."""


def read(block: Any, i: int, base: Any, most: Any) -> Any:
    """Return a number of a block, 0 of none; the last two are of 8 bits."""


def keep(block: Any, i: int, x: Any, scratch: Any, noise: Any) -> None:
    """Keep a number of a block, in bf16 at random; what 8 bits keep waits in scratch for `close`.

    `noise` is below 2^16.
    """


def height(block: Any, x: Any) -> Any:
    """Return the bits of a number's size where a block needs the largest, else 0."""


def close(  # noqa: PLR0917 (all of a block)
    block: Any, scales: Any, begin: int, most: Any, top: Any, up: Any, bits: Any
) -> None:
    """Keep the numbers of a block in 8 bits, rounded as `make_offsets` says, and its scale."""


def keep_parameter(block: Any, i: int, x: Any, rest: Any, noise: Any) -> None:
    """Keep a number of a parameter: at random with noise, else to nearest, what is left in rest."""


def noise_of(keys: Any) -> Any:
    """Return a block for noise, if there are keys to draw it by."""


def draw(keys: Any, at: Any, begin: int, out: Any) -> None:
    """Fill a block's noise; `at` has the step, a row's length and its first column's index."""


def upper(noise: Any, i: int) -> Any:
    """Return the upper half of an element's random bits, 0 of none."""


def lower(noise: Any, i: int) -> Any:
    """Return the lower half of an element's random bits, 0 of none."""


def array_at(like: Any, address: int, size: int) -> Any:
    """Return so many elements of memory, of the dtype of `like`; None if that is None."""


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


def _keep_later(block: Any, i: int, x: Any, scratch: Any, noise: Any) -> None:  # noqa: ARG001
    scratch[i] = x


def _keep_nearest(block: Any, i: int, x: Any, *_: Any) -> None:
    block[i] = _nearest(x)


@register_jitable
def _keep_rounded(block: Any, i: int, x: Any, scratch: Any, noise: Any) -> None:  # noqa: ARG001
    bits = np.float32(x).view(np.uint32)
    is_finite = np.uint32(bits & np.uint32(0x7F800000)) != np.uint32(0x7F800000)
    added = noise if is_finite else np.uint32(0)
    block[i] = np.uint16(np.uint32(bits + added) >> np.uint32(16))


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


def _keep_at_random(block: Any, i: int, x: Any, rest: Any, noise: Any) -> None:
    _keep_rounded(block, i, x, rest, np.uint32(noise[i] >> np.uint32(16)))


def _keep_with_rest(block: Any, i: int, x: Any, rest: Any, noise: Any) -> None:  # noqa: ARG001
    block[i] = _nearest(x)
    rest[i] = _nearest(x - _widened(block[i]))


def _fill(keys: Any, at: Any, begin: int, out: Any) -> None:
    fill_noise(keys, at[0], at[1], at[2], begin, out)


def _no_noise(keys: Any) -> Any:  # noqa: ARG001
    return None


def _block_of_noise(keys: Any) -> Any:  # noqa: ARG001
    return np.empty(BLOCK, np.uint32)


def _no_bits(noise: Any, i: int) -> Any:  # noqa: ARG001
    return np.uint32(0)


def _upper(noise: Any, i: int) -> Any:
    return np.uint32(noise[i] >> np.uint32(16))


def _lower(noise: Any, i: int) -> Any:
    return np.uint32(noise[i] & np.uint32(0xFFFF))


@intrinsic
def _pointer(typing: Any, address: Any, like: Any) -> Any:  # noqa: ARG001
    """Return an address as a pointer to elements of the dtype of an array."""
    signature = numba.types.CPointer(like.dtype)(address, like)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return signature, generate


def _no_array(like: Any, address: int, size: int) -> Any:  # noqa: ARG001
    return None


def _array_at(like: Any, address: int, size: int) -> Any:
    pointer: Any = _pointer  # which numba calls without the typing context
    return numba.carray(pointer(address, like), (size,))


_becomes(part, none=_nothing, other=_slice)
_becomes(base_of, none=_zero, other=_base)
_becomes(read, none=_read_nothing, bits=_read_bits, bf16=_read_bf16, other=_read_wide)
_becomes(keep, none=_nothing, bits=_keep_later, bf16=_keep_rounded, other=_keep_wide)
_becomes(height, bits=_size, other=_zero)
_becomes(close, bits=_encode, other=_nothing)
_becomes(noise_of, none=_no_noise, other=_block_of_noise)
_becomes(draw, none=_nothing, other=_fill)
_becomes(upper, none=_no_bits, other=_upper)
_becomes(lower, none=_no_bits, other=_lower)
_becomes(array_at, none=_no_array, other=_array_at)


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
        `loop(size, addresses, kinds, keys, moment_keys, at, up, numbers)`. Seven tensors, each flat
        and contiguous, are given by their addresses and by an array of the same dtype (None where
        there is no such tensor): parameter, gradient, what is left of a parameter, two moments, and
        the scales of both, as int32. `size` is the number of elements of the first. `keys` and
        `moment_keys` are uint32 `[rows]` from `rounding_keys`, or None; `at` is (the count of
        steps, a row's length, its first column's index); `up` int32 from `make_offsets`.

    Examples:
        >>> loop = rule_loop(lambda p, g, c: p - c[0] * g, 0)
        >>> p, no = np.array([3.0], np.float32), (None,) * 5
        >>> addresses, told = (p.ctypes.data, p.ctypes.data, 0, 0, 0, 0, 0), (np.float32(0.5),)
        >>> loop(1, addresses, (p, p, *no), None, None, (1, 1, 0), np.empty(0, np.int32), told)
        >>> p
        array([1.5], dtype=float32)
    """
    apply = _of_two(rule, moments)

    @register_jitable
    def go_through(  # noqa: PLR0917 (all that a step reads and writes)
        p: Any, g: Any, rest: Any, m: Any, v: Any, m_scales: Any, v_scales: Any, keys: Any,
        moment_keys: Any, at: Any, up: Any, one: Any, two: Any, one_bits: Any, two_bits: Any,
        noise: Any, moment_noise: Any, numbers: Any,
    ) -> None:  # fmt: skip
        for begin in range(0, p.size, BLOCK):
            p_, g_, rest_ = part(p, begin), part(g, begin), part(rest, begin)
            m_, m_base = part(m, begin), base_of(m_scales, begin, SIGNED)
            v_, v_base = part(v, begin), base_of(v_scales, begin, UNSIGNED)
            draw(keys, at, begin, noise)
            draw(moment_keys, at, begin, moment_noise)
            m_top = v_top = np.int32(0)
            for i in range(g_.size):
                x = read(p_, i, 0, 0) + read(rest_, i, 0, 0)
                y, z = read(m_, i, m_base, SIGNED), read(v_, i, v_base, UNSIGNED)
                x, y, z = apply(x, read(g_, i, 0, 0), y, z, numbers)
                keep_parameter(p_, i, x, rest_, noise)
                keep(m_, i, y, one, upper(moment_noise, i))
                keep(v_, i, z, two, lower(moment_noise, i))
                m_top, v_top = max(m_top, height(m_, y)), max(v_top, height(v_, z))
            close(m_, m_scales, begin, SIGNED, m_top, up, one_bits)
            close(v_, v_scales, begin, UNSIGNED, v_top, up, two_bits)

    def loop(  # noqa: PLR0917 (see above)
        size: int, addresses: Any, kinds: Any, keys: Any, moment_keys: Any, at: Any, up: Any,
        numbers: Any,
    ) -> None:  # fmt: skip
        one, two = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32)
        go_through(
            array_at(kinds[0], addresses[0], size),
            array_at(kinds[1], addresses[1], size),
            array_at(kinds[2], addresses[2], size),
            array_at(kinds[3], addresses[3], size),
            array_at(kinds[4], addresses[4], size),
            array_at(kinds[5], addresses[5], size // BLOCK),
            array_at(kinds[6], addresses[6], size // BLOCK),
            keys,
            moment_keys,
            at,
            up,
            one,
            two,
            one.view(np.int32),
            two.view(np.int32),
            noise_of(keys),
            noise_of(moment_keys),
            numbers,
        )

    return jit(loop, divides=True, uses=(rule, part, fill_noise))
