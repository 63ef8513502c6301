"""The compiled loop of a rule: one pass over parameter, gradient and moments in their own formats.

It processes BLOCK elements at a time and calls the functions below for each. Numba replaces each of
them by the version for the type of its first argument, which is how a tensor is stored: None, no
such tensor; an array of fp32 or fp64; of bf16 as uint16; or of 8-bit codes as uint8. So one loop
serves all formats, and what a rule does not have costs nothing.

Everything that is passed is an array or a number, and casts keep numbers in 32 bits: with a tuple
of arrays, a row of a matrix or a number of 64 bits numba would not vectorize the loop.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec

import numba
import numpy as np
from numba.extending import intrinsic, overload, register_jitable

from trainkit.noise.jit import jit
from trainkit.noise.rounding import fill_noise
from trainkit.optim.storage import BLOCK, NAN, SHIFT, SIGNED, SIZE, UNSIGNED

P = ParamSpec("P")
_INF = 0x7F800000  # the bits of fp32 infinity; larger sizes are NaN


def get_block(stored: Any, start: int, /) -> Any:
    """Return the block of a tensor that starts at an element: a slice, or None."""


def get_base(scales: Any, start: int, largest: Any, /) -> Any:
    """Return what is added to the 8-bit codes of a block, 0 if it has no scale.

    `largest` is the largest code.
    """


def read(block: Any, i: int, base: Any, largest: Any, /) -> Any:
    """Return a number of a block, 0 if there is none; only 8-bit codes use the last two."""


def write(block: Any, i: int, x: Any, scratch: Any, noise: Any, /) -> None:
    """Write a number of a moment, to bf16 with stochastic rounding by `noise`, which is below 2^16.

    Of an 8-bit block the scale is not known yet: the number goes to scratch, for `encode_block`.
    """


def get_size_bits(block: Any, x: Any, /) -> Any:
    """Return the bits of a number's size if its block is in 8 bits, else 0."""


def encode_block(  # noqa: PLR0917 (all of a block)
    block: Any, scales: Any, start: int, largest: Any, top: Any, offsets: Any, bits: Any, /
) -> None:
    """Encode the numbers of a block in 8 bits, rounded by `make_offsets`, and write its scale."""


def write_parameter(block: Any, i: int, x: Any, rest: Any, noise: Any, /) -> None:
    """Write a number of a parameter, to bf16 in the rounding that there are arrays for.

    Stochastic rounding has `noise`, Kahan's a `rest`, rounding to nearest neither.
    """


def make_noise_block(keys: Any, /) -> Any:
    """Return an array for the random bits of a block, None if there are no keys."""


def draw_noise(keys: Any, position: Any, start: int, out: Any, /) -> None:
    """Fill a block's random bits.

    `position` is (step, length of a row, index of its first column).
    """


def upper_bits(noise: Any, i: int, /) -> Any:
    """Return the upper half of an element's random bits, 0 if there are none."""


def lower_bits(noise: Any, i: int, /) -> Any:
    """Return the lower half of an element's random bits, 0 if there are none."""


def array_at(like: Any, address: int, size: int, /) -> Any:
    """Return `size` elements of memory as an array of the dtype of `like`; None if that is None."""


# ------------------------------------------------------------------------- the versions by storage


def _get_storage(stored: Any) -> str:
    if not isinstance(stored, numba.types.Array):
        return "none"
    return {"uint8": "codes", "uint16": "bf16"}.get(str(stored.dtype), "float")


def _do_nothing(*_: Any) -> None:
    pass


def _return_zero(*_: Any) -> Any:
    return np.int32(0)


def _overload_by_storage(
    function: Callable[P, Any], *, other: Callable[P, Any], **versions: Callable[P, Any]
) -> None:
    """Give numba the versions of a function, by the storage of its first argument."""

    def choose(*args: Any) -> Any:
        return versions.get(_get_storage(args[0]), other)

    overload(function, strict=False)(choose)  # parameters may have other names


@register_jitable
def _to_bf16(x: Any) -> Any:
    """Return the bits of a number in bf16, rounded to nearest, ties to even."""
    bits = np.float32(x).view(np.uint32)
    odd = np.uint32(np.uint32(bits >> np.uint32(16)) & np.uint32(1))
    is_nan = np.uint32(bits & np.uint32(SIZE)) > np.uint32(_INF)
    added = np.uint32(0) if is_nan else np.uint32(odd + np.uint32(0x7FFF))
    return np.uint16(np.uint32(bits + added) >> np.uint32(16))


@register_jitable
def _to_fp32(bits: Any) -> Any:
    return np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)


@register_jitable
def _write_stochastically(block: Any, i: int, x: Any, _rest: Any, noise: Any) -> None:
    # Added below the last bit of bf16, noise carries into it with the probability that is right.
    bits = np.float32(x).view(np.uint32)
    is_finite = np.uint32(bits & np.uint32(_INF)) != np.uint32(_INF)
    added = noise if is_finite else np.uint32(0)
    block[i] = np.uint16(np.uint32(bits + added) >> np.uint32(16))


def _write_float(block: Any, i: int, x: Any, *_: Any) -> None:
    block[i] = x


def _write_scratch(_block: Any, i: int, x: Any, scratch: Any, _noise: Any) -> None:
    scratch[i] = x


def _decode(block: Any, i: int, base: Any, largest: Any) -> Any:
    """Decode an 8-bit code, as `storage.read_moment` does; code 0 is 0 whatever the base."""
    code = np.int32(block[i])
    size = np.int32(code & largest)
    bits = np.int32(np.int32(size + base) << np.int32(SHIFT))
    sign = np.int32(np.int32(code & np.int32(np.int32(255) - largest)) << np.int32(24))
    return np.int32((bits if size != np.int32(0) else np.int32(0)) | sign).view(np.float32)


def _encode(  # noqa: PLR0917 (all of a block)
    block: Any, scales: Any, start: int, largest: Any, top: Any, offsets: Any, bits: Any
) -> None:
    """Encode a block, as `storage.encode_moment` does; `top` are the bits of its largest number."""
    smallest = np.int32(largest >> np.int32(7))  # 1 for a second moment, which never becomes 0
    top = np.int32(min(top, np.int32(NAN)) + np.int32((1 << SHIFT) - 1))
    base = max(np.int32(np.int32(top >> np.int32(SHIFT)) - largest), np.int32(0))
    scales[start // BLOCK] = np.int32(np.int32(base + largest) << np.int32(SHIFT))
    for i in range(BLOCK):
        size = np.int32(bits[i] & np.int32(SIZE))
        code = np.int32(np.int32(np.int32(size + offsets[i]) >> np.int32(SHIFT)) - base)
        sign = np.int32(np.int32(bits[i] >> np.int32(24)) & np.int32(0x80))
        block[i] = np.uint8(np.int32(max(code, min(size, smallest)) | sign))


_overload_by_storage(
    get_block,
    none=_do_nothing,
    other=lambda stored, start: stored[start : start + BLOCK],
)
_overload_by_storage(
    get_base,
    none=_return_zero,
    other=lambda scales, start, largest: np.int32(
        np.int32(scales[start // BLOCK] >> np.int32(SHIFT)) - largest
    ),
)
_overload_by_storage(
    read,
    none=lambda *_: np.float32(0),
    codes=_decode,
    bf16=lambda block, i, *_: _to_fp32(block[i]),
    other=lambda block, i, *_: block[i],
)
_overload_by_storage(
    write,
    none=_do_nothing,
    codes=_write_scratch,
    bf16=_write_stochastically,
    other=_write_float,
)
_overload_by_storage(
    get_size_bits,
    codes=lambda _, x: np.int32(np.float32(x).view(np.int32) & np.int32(SIZE)),
    other=_return_zero,
)
_overload_by_storage(encode_block, codes=_encode, other=_do_nothing)
_overload_by_storage(
    make_noise_block,
    none=_do_nothing,
    other=lambda _: np.empty(BLOCK, np.uint32),
)
_overload_by_storage(
    draw_noise,
    none=_do_nothing,
    other=lambda keys, position, start, out: fill_noise(
        keys, position[0], position[1], position[2], start, out
    ),
)
_overload_by_storage(
    upper_bits,
    none=lambda *_: np.uint32(0),
    other=lambda noise, i: np.uint32(noise[i] >> np.uint32(16)),
)
_overload_by_storage(
    lower_bits,
    none=lambda *_: np.uint32(0),
    other=lambda noise, i: np.uint32(noise[i] & np.uint32(0xFFFF)),
)


@overload(write_parameter, strict=False)
def _choose_parameter_rounding(block: Any, _i: Any, _x: Any, rest: Any, noise: Any) -> Any:
    def write_nearest(block: Any, i: int, x: Any, *_: Any) -> None:
        block[i] = _to_bf16(x)

    def write_with_rest(block: Any, i: int, x: Any, rest: Any, _noise: Any) -> None:
        block[i] = _to_bf16(x)
        rest[i] = _to_bf16(x - _to_fp32(block[i]))

    def write_with_noise(block: Any, i: int, x: Any, rest: Any, noise: Any) -> None:
        _write_stochastically(block, i, x, rest, np.uint32(noise[i] >> np.uint32(16)))

    if _get_storage(block) == "float":
        return _write_float
    if _get_storage(rest) != "none":
        return write_with_rest
    return write_nearest if _get_storage(noise) == "none" else write_with_noise


@intrinsic
def _pointer(typing: Any, address: Any, like: Any) -> Any:  # noqa: ARG001
    """Return an address as a pointer to elements of the dtype of an array."""
    signature = numba.types.CPointer(like.dtype)(address, like)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return signature, generate


def _make_array(like: Any, address: int, size: int) -> Any:
    pointer: Any = _pointer  # which numba calls without the typing context
    return numba.carray(pointer(address, like), (size,))


_overload_by_storage(array_at, none=_do_nothing, other=_make_array)


# ----------------------------------------------------------------------------------------- the loop


@functools.cache
def make_rule_loop(rule: Callable[..., Any], moments: int) -> Callable[..., None]:
    """Return the loop of a rule over flat memory, compiled at its first call.

    Args:
        rule: `rule(p, g, *moments, coefficients) -> (p, *moments)`, pure.
        moments: The number of its moments, at most two.

    Returns:
        `loop(size, addresses, likes, keys, moment_keys, position, offsets, coefficients)`. Seven
        tensors, flat and contiguous, are given by their `addresses`, and by an array of the same
        dtype in `likes` (None where there is no such tensor): parameter, gradient, rest of the
        parameter, two moments, and the scales of both, as int32. `size` is the number of elements
        of the first. `keys` and `moment_keys` are uint32 `[rows]` from `rounding_keys`, or None;
        `position` is (step, length of a row, its first column's index); `offsets` int32 from
        `make_offsets`.

    Examples:
        >>> loop = make_rule_loop(lambda p, g, c: p - c[0] * g, 0)
        >>> p, none = np.array([3.0], np.float32), (None,) * 5
        >>> addresses, c = (p.ctypes.data, p.ctypes.data, 0, 0, 0, 0, 0), (np.float32(0.5),)
        >>> offsets = np.empty(0, np.int32)
        >>> loop(1, addresses, (p, p, *none), None, None, (1, 1, 0), offsets, c)
        >>> p
        array([1.5], dtype=float32)
    """
    apply = register_jitable(rule)

    # Moments that the rule does not have pass through; they are 0, and are not written.
    def without_moments(p: Any, g: Any, m: Any, v: Any, c: Any) -> Any:
        return apply(p, g, c), m, v

    def with_one_moment(p: Any, g: Any, m: Any, v: Any, c: Any) -> Any:
        p, m = apply(p, g, m, c)
        return p, m, v

    step = register_jitable((without_moments, with_one_moment, rule)[moments])

    @register_jitable
    def go_through(  # noqa: PLR0917 (all that a step reads and writes)
        p: Any,
        g: Any,
        rest: Any,
        m: Any,
        v: Any,
        m_scales: Any,
        v_scales: Any,
        keys: Any,
        moment_keys: Any,
        position: Any,
        offsets: Any,
        m_scratch: Any,
        v_scratch: Any,
        m_bits: Any,
        v_bits: Any,
        noise: Any,
        moment_noise: Any,
        coefficients: Any,
    ) -> None:
        for start in range(0, p.size, BLOCK):
            p_ = get_block(p, start)
            g_ = get_block(g, start)
            rest_ = get_block(rest, start)
            m_ = get_block(m, start)
            v_ = get_block(v, start)
            m_base = get_base(m_scales, start, SIGNED)
            v_base = get_base(v_scales, start, UNSIGNED)
            draw_noise(keys, position, start, noise)
            draw_noise(moment_keys, position, start, moment_noise)
            # The bits of the block's largest moments, which determine its scales.
            m_top = v_top = np.int32(0)
            # The last block may be shorter; moments are in 8 bits only where all blocks are full.
            for i in range(g_.size):
                x = read(p_, i, 0, 0) + read(rest_, i, 0, 0)
                y = read(m_, i, m_base, SIGNED)
                z = read(v_, i, v_base, UNSIGNED)
                x, y, z = step(x, read(g_, i, 0, 0), y, z, coefficients)
                write_parameter(p_, i, x, rest_, noise)
                # Both moments share one draw, and take half of its bits each.
                write(m_, i, y, m_scratch, upper_bits(moment_noise, i))
                write(v_, i, z, v_scratch, lower_bits(moment_noise, i))
                m_top = max(m_top, get_size_bits(m_, y))
                v_top = max(v_top, get_size_bits(v_, z))
            encode_block(m_, m_scales, start, SIGNED, m_top, offsets, m_bits)
            encode_block(v_, v_scales, start, UNSIGNED, v_top, offsets, v_bits)

    def loop(  # noqa: PLR0917 (see above)
        size: int,
        addresses: Any,
        likes: Any,
        keys: Any,
        moment_keys: Any,
        position: Any,
        offsets: Any,
        coefficients: Any,
    ) -> None:
        # Numbers of one block, written as fp32 and read as bits: 8-bit codes are made of these.
        m_scratch = np.empty(BLOCK, np.float32)
        v_scratch = np.empty(BLOCK, np.float32)
        go_through(
            array_at(likes[0], addresses[0], size),
            array_at(likes[1], addresses[1], size),
            array_at(likes[2], addresses[2], size),
            array_at(likes[3], addresses[3], size),
            array_at(likes[4], addresses[4], size),
            array_at(likes[5], addresses[5], size // BLOCK),
            array_at(likes[6], addresses[6], size // BLOCK),
            keys,
            moment_keys,
            position,
            offsets,
            m_scratch,
            v_scratch,
            m_scratch.view(np.int32),
            v_scratch.view(np.int32),
            make_noise_block(keys),
            make_noise_block(moment_keys),
            coefficients,
        )

    return jit(loop, divides=True, uses=(rule, get_block, fill_noise))
