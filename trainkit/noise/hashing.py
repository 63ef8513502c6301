"""Keys and hashes that do not depend on the layout.

A *key* is 64 bits made from a seed and names. A *hash* of a tensor is a sum modulo 2^64 over its
elements, so that hashes of disjoint boxes combine by `+`, in any order: every layout of the same
values has the same hash. `mix_bits` is the finaliser of SplitMix64 (Steele, Lea and Flood,
"Fast splittable pseudorandom number generators", 2014).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import partial
from operator import index
from typing import Any

import numpy as np

from trainkit.noise.jit import jit

MASK64 = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
"""2^64 over the golden ratio, odd: steps of it visit every 64-bit number once."""


@partial(jit, inline=True)
def mix_bits(x: np.uint64) -> np.uint64:
    """Permute the 64-bit numbers so that every input bit affects every output bit.

    Examples:
        >>> (
        ...     mix_bits(np.uint64(1)) == mix_bits(np.uint64(1)),
        ...     mix_bits(np.uint64(1)) == mix_bits(np.uint64(2)),
        ... )
        (True, False)
    """
    # The finalizer of MurmurHash3 in Stafford's variant 13, as in Vigna's splitmix64.
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def make_key(*parts: int | str) -> int:
    """Return the 64-bit key of a sequence of integers and names.

    Returns:
        An int in [0, 2^64). Different sequences give different keys: ("a", "bc") is not ("ab",
        "c").

    Examples:
        >>> make_key(0, "dropout") == make_key(0, "dropout"), make_key(0, "a") == make_key(1, "a")
        (True, False)
    """
    texts = [part if isinstance(part, str) else f"{index(part)}" for part in parts]
    kinds = ["str" if isinstance(part, str) else "int" for part in parts]
    pairs = zip(kinds, texts, strict=True)
    # The kind and the length stand before each part, so that no two sequences have one text.
    text = "".join(f"{kind}{len(text)}:{text}" for kind, text in pairs)
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


@jit
def _sum_hashes(
    key: np.uint64,
    bits: Any,
    first: Any,
    stride: Any,
    inner: int,
) -> np.uint64:
    """Sum mix(mix(key + index) + bits); `first` holds each row's index, `inner` its length."""
    total = np.uint64(0)
    for row in range(first.size):
        index = first[row]
        for column in range(inner):
            element_key = mix_bits(key + index * np.uint64(0x9E3779B97F4A7C15))
            total += mix_bits(element_key + np.uint64(bits[row * inner + column]))
            index += stride
    return total


def hash_box(
    name: str,
    box: np.ndarray[Any, Any],
    *,
    shape: Sequence[int],
    offset: Sequence[int],
) -> int:
    """Return the hash of one box of a named tensor.

    It is the sum over its elements of a hash of (name, index, bits).

    Args:
        name: The tensor's name in the whole model.
        box: The values, of any dtype of 1, 2, 4 or 8 bytes.
        shape: The shape of the full tensor, for the global index of an element.
        offset: The offset of the box in the full tensor.

    Returns:
        An int in [0, 2^64). The hashes of boxes that cover a tensor once add up (modulo 2^64) to
        the hash of the tensor.

    Examples:
        >>> x = np.arange(6.0).reshape(2, 3)
        >>> whole = hash_box("x", x, shape=(2, 3), offset=(0, 0))
        >>> parts = [hash_box("x", x[:, i : i + 1], shape=(2, 3), offset=(0, i)) for i in range(3)]
        >>> whole == sum(parts) % 2**64
        True
    """
    box = np.ascontiguousarray(box).reshape(box.shape or (1,))
    shape = tuple(shape) or (1,)
    offset = tuple(offset) or (0,)
    # Row-major: the product of the later dimensions of the full tensor.
    strides = [int(np.prod(shape[dim + 1 :], dtype=np.int64)) for dim in range(len(shape))]
    # The flat index, in the full tensor, of the first element of each row of the box.
    first = np.zeros(box.shape[:-1], np.uint64)
    for dim, (start, stride) in enumerate(zip(offset[:-1], strides[:-1], strict=True)):
        index = (start + np.arange(box.shape[dim], dtype=np.uint64)) * np.uint64(stride)
        along_dim = [-1 if d == dim else 1 for d in range(box.ndim - 1)]
        first += index.reshape(along_dim)
    first += np.uint64(offset[-1])
    # Bits and not values: 0.0 differs from -0.0, and NaN equals itself.
    bits = box.view(f"u{box.dtype.itemsize}").reshape(-1)
    bits.flags.writeable = False  # numba compiles a loop separately for writeable arrays
    key = np.uint64(make_key(name, *shape))
    total = _sum_hashes(
        key,
        bits,
        first.reshape(-1),
        np.uint64(1),  # elements of a row are adjacent in the full tensor, too
        box.shape[-1],
    )
    return int(total)


def hash_counters(counters: Mapping[str, int]) -> int:
    """Return the hash of named integers, a sum modulo 2^64 as that of `hash_box`.

    Examples:
        >>> hash_counters({"step": 3}) == hash_counters({"step": 3})
        True
    """
    values = ((name, np.array([value], np.int64)) for name, value in counters.items())
    hashes = (hash_box(name, value, shape=(1,), offset=(0,)) for name, value in values)
    return sum(hashes) & MASK64
