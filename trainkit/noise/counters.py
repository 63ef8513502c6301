"""Counter-based random numbers: functions of a seed, a name and an index.

There is no generator state to save, to seed per rank, or to advance in the right order. A number
depends on the seed, a name and an index, so that every layout and every resumed run gets the same
ones. The idea is that of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2,
3" (SC 2011).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainkit.noise.hashing import GOLDEN, MASK64, make_key, mix_bits
from trainkit.noise.jit import jit
from trainkit.types import Share


def to_int64(key: int) -> int:
    """Return the int64 with the bits of a 64-bit key, for torch, which computes with no uint64.

    Examples:
        >>> to_int64(2**64 - 1), to_int64(7)
        (-1, 7)
    """
    key &= MASK64
    return key - (1 << 64) if key >> 63 else key


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Shift int64 right with zeros from the left, as for unsigned numbers."""
    shifted = x >> bits
    shifted &= (1 << (64 - bits)) - 1  # in place: new memory costs a CPU more than the operation
    return shifted


def mix_bits_tensor(x: Tensor) -> Tensor:
    """Return `hashing.mix_bits` of every element of an int64 tensor, on its device.

    Examples:
        >>> int(mix_bits_tensor(torch.tensor([1]))[0]) == to_int64(int(mix_bits(np.uint64(1))))
        True
    """
    # Products and sums of int64 wrap around, as those of uint64 do, bit for bit.
    x = _shift_right(x, 30).bitwise_xor_(x).mul_(to_int64(0xBF58476D1CE4E5B9))
    x = _shift_right(x, 27).bitwise_xor_(x).mul_(to_int64(0x94D049BB133111EB))
    return _shift_right(x, 31).bitwise_xor_(x)


@jit
def _fill_normal(out: Any, row_keys: Any, first_column: int) -> None:
    """Fill out[row, column] from row_keys[row] and the column's index (Box and Muller, 1958).

    Scalar fp64 arithmetic, rounded to fp32 once: vectorized logarithms may differ in the last bit
    between the body of an array and its end, and then a shard would differ from the full tensor.
    """
    for row in range(out.shape[0]):
        for column in range(out.shape[1]):
            # The constant is `GOLDEN`.
            step = np.uint64(first_column + column) * np.uint64(0x9E3779B97F4A7C15)
            bits = mix_bits(row_keys[row] + step)
            more = mix_bits(bits + np.uint64(0x9E3779B97F4A7C15))
            # Box and Muller: sqrt(-2 ln u) cos(2 pi v) of two uniform numbers. The half keeps u
            # above 0.
            u = (float(bits >> np.uint64(11)) + 0.5) * 2.0**-53
            radius = math.sqrt(-2.0 * math.log(u))
            angle = 2.0 * math.pi * float(more >> np.uint64(11)) * 2.0**-53
            out[row, column] = radius * math.cos(angle)


@jit
def _fill_symmetric(out: Any, row_keys: Any, first_column: int) -> None:
    for row in range(out.shape[0]):
        for column in range(out.shape[1]):
            step = np.uint64(first_column + column) * np.uint64(0x9E3779B97F4A7C15)
            bits = mix_bits(row_keys[row] + step)
            # The upper 53 bits, which fp64 holds exactly, in steps of 2^-52 from -1.
            out[row, column] = float(bits >> np.uint64(11)) * 2.0**-52 - 1.0


def row_keys(key: int, shape: Sequence[int], offset: Sequence[int]) -> np.ndarray[Any, Any]:
    """Return one key for each index of all dimensions but the last, flattened, in uint64."""
    keys = np.array([key & MASK64], np.uint64)
    for size, start in zip(shape[:-1], offset[:-1], strict=True):
        # From 1, so that index 0 changes the key too.
        index = np.arange(start + 1, start + 1 + size, dtype=np.uint64) * np.uint64(GOLDEN)
        keys = _mix_array((keys[:, None] ^ index[None, :]).reshape(-1))
    return keys


@jit
def _mix_array(x: Any) -> Any:
    out = np.empty_like(x)
    for i in range(x.size):
        out[i] = mix_bits(x[i])
    return out


def normal(key: int, shape: Sequence[int], offset: Sequence[int] | None = None) -> Tensor:
    """Return standard normal numbers for one box of a tensor.

    An element is a function of the key and of its position in the full tensor, so that every box
    holds exactly the bits of the full tensor, in any layout.

    Args:
        key: The tensor's 64-bit key, for instance `make_key(seed, name)`.
        shape: The shape of the box; a scalar's is `()`.
        offset: The offset of the box in the full tensor; zeros by default.

    Returns:
        An fp32 tensor of `shape` on the CPU.

    Examples:
        >>> whole = normal(make_key(0, "w"), (4, 6))
        >>> torch.equal(normal(make_key(0, "w"), (2, 3), (1, 2)), whole[1:3, 2:5])
        True
    """
    return _fill_box(_fill_normal, key, shape, offset)


def uniform_symmetric(
    key: int, shape: Sequence[int], offset: Sequence[int] | None = None
) -> Tensor:
    """Return numbers that are uniform in [-1, 1) for one box of a tensor, as `normal` does.

    Examples:
        >>> whole = uniform_symmetric(make_key(0, "w"), (4, 6))
        >>> torch.equal(uniform_symmetric(make_key(0, "w"), (2, 3), (1, 2)), whole[1:3, 2:5])
        True
        >>> bool((whole.abs() <= 1).all())
        True
    """
    return _fill_box(_fill_symmetric, key, shape, offset)


def _fill_box(
    fill: Any,
    key: int,
    shape: Sequence[int],
    offset: Sequence[int] | None,
) -> Tensor:
    # A scalar is a row of one element.
    shape_ = tuple(shape) or (1,)
    offset_ = tuple(offset or (0,) * max(len(shape), 1))
    if len(shape_) != len(offset_):
        raise ValueError(f"noise: shape {shape_} and offset {offset_} differ in length")
    keys = row_keys(key, shape_, offset_)
    out = np.empty((keys.size, shape_[-1]), np.float32)
    fill(out, keys, offset_[-1])
    return torch.from_numpy(out).reshape(tuple(shape))


def make_token_keys(token_index: Tensor, *, seed: int, step: int) -> Tensor:
    """Return one 64-bit key per token of the global step: "noise_key" in a batch's `extra`.

    Args:
        token_index: int64 `[B, S]`, as in `Batch`.
        seed: The run's seed.
        step: The step the tokens belong to.

    Returns:
        int64 `[B, S]`.

    Examples:
        >>> keys = make_token_keys(torch.arange(6).reshape(2, 3), seed=0, step=4)
        >>> torch.equal(keys[1:], make_token_keys(torch.tensor([[3, 4, 5]]), seed=0, step=4))
        True
    """
    # One hash for each token: the step's key is computed once, on the host.
    step_key = to_int64(make_key(seed, "token", step))
    return mix_bits_tensor(token_index * to_int64(GOLDEN) + step_key)


def split_keys(keys: Tensor, numbers: Tensor) -> Tensor:
    """Return the keys of tokens at numbered modules that share a name, such as experts.

    The keys of a token differ between numbers, and so does all noise from them.

    Args:
        keys: int64 `[...]`, from `make_token_keys`.
        numbers: int64 `[..., k]`, the numbers of k modules for each token.

    Returns:
        int64 `[..., k]`.

    Examples:
        >>> keys = make_token_keys(torch.tensor([7, 8]), seed=0, step=0)
        >>> chosen = torch.tensor([[0, 3], [3, 1]])
        >>> own = split_keys(keys, chosen)
        >>> torch.equal(own[1].flip(0), split_keys(keys[1], torch.tensor([1, 3])))
        True
    """
    steps = (numbers + 1) * to_int64(GOLDEN)
    return mix_bits_tensor(keys.unsqueeze(-1) + steps)


def make_random_bits(keys: Tensor, *, name: str, features: int, first: int = 0) -> Tensor:
    """Return 53 random bits for each feature of each token in a module.

    Args:
        keys: int64 `[...]`, from `make_token_keys`.
        name: The name of the module in the whole model.
        features: The number of features, all or a shard.
        first: The index of the first of them among all features.

    Returns:
        int64 `[..., features]`, below 2^53.

    Examples:
        >>> keys = make_token_keys(torch.tensor([7, 8]), seed=0, step=0)
        >>> bits = make_random_bits(keys, name="mlp", features=6)
        >>> torch.equal(bits[1:, 4:], make_random_bits(keys[1:], name="mlp", features=2, first=4))
        True
    """
    feature = torch.arange(first, first + features, device=keys.device) * to_int64(GOLDEN)
    # Mixed between token and feature, so that two modules do not have shifted copies of one mask.
    site = mix_bits_tensor(keys ^ to_int64(make_key(name)))
    return _shift_right(mix_bits_tensor(site.unsqueeze(-1) + feature), 11)


def dropout(
    x: Tensor,
    keys: Tensor,
    *,
    name: str,
    p: float,
    width: int,
    offset: int | None = None,
) -> Tensor:
    """Set elements to zero with probability `p` and scale the rest by 1 / (1 - p).

    Whether an element is dropped is a function of its token's key, the name of the module and the
    index of the feature. So recomputation, and every split into rows, microbatches and shards of
    the sequence or of the features, drops the same elements.

    Args:
        x: `[..., D]`, floating point; or a part of the features, `[..., D / N]`.
        keys: int64 `[...]`, from `make_token_keys`, or those of experts' rows, from `split_keys`.
        name: The place in the whole model, for instance "layers.3.attention".
        p: The probability, in [0, 1).
        width: D, the number of features in the whole model: not that of `x` inside a region that
            tensor parallelism cuts.
        offset: The index of the first feature of `x` among them, where it holds a part:
            `ps.tp.index * x.shape[-1]`.

    Returns:
        A tensor like `x`; `x` itself when `p` is 0.

    Raises:
        ValueError: `p` is not in [0, 1), the shapes do not fit, or `x` holds a part of the features
            and `offset` is not given.

    Examples:
        >>> x, keys = torch.ones(1, 2, 8), make_token_keys(torch.tensor([[0, 1]]), seed=0, step=0)
        >>> dropped = dropout(x, keys, name="mlp", p=0.5, width=8)
        >>> sorted(set(dropped.flatten().tolist()))
        [0.0, 2.0]
        >>> part = dropout(x[..., 4:], keys, name="mlp", p=0.5, width=8, offset=4)
        >>> torch.equal(part, dropped[..., 4:])
        True
    """
    if not 0 <= p < 1:
        raise ValueError(f"dropout: p must be in [0, 1), got {p}")
    if keys.shape != x.shape[:-1]:
        raise ValueError(
            f"dropout: keys {tuple(keys.shape)} must have the shape of x "
            f"{tuple(x.shape)} without its last dimension"
        )
    features = x.shape[-1]
    first = offset or 0
    if (features != width and offset is None) or not 0 <= first <= width - features:
        raise ValueError(
            f"dropout: x has {features} of the {width} features at {name!r}; give the index of "
            f"its first as offset=, in [0, {width - features}] (got {offset}), or every shard "
            "drops the same"
        )
    if p == 0:
        return x
    # An element stays where its 53 random bits, as a fraction, are below 1 - p.
    bits = make_random_bits(keys, name=name, features=features, first=first)
    return torch.where(bits < int((1 - p) * 2**53), x / (1 - p), 0.0)


@contextmanager
def seed_generators(
    seed: int,
    *,
    step: int,
    share: Share,
    stage: int = 0,
    device: torch.device | str = "cpu",
) -> Iterator[None]:
    """Seed torch's generators for a step, for models with torch's own dropout.

    `nn.Dropout`, and with it most models, draws from one generator per device, which is in no
    checkpoint. Around the forward and backward passes of a step, this context makes its masks a
    function of the seed, the step and the rank: ranks with different rows draw different masks,
    ranks with the same rows (tp) draw the same ones, and a resumed run repeats them. Microbatches
    draw one after another. A recomputed forward pass repeats its masks as long as it preserves
    torch's generators, which `parallel.recompute` does by default.

    The masks still depend on the layout: another split into ranks, microbatches or stages draws
    others, which are as good. `dropout` has no such limit; use it in your own models.

    Args:
        seed: The run's seed.
        step: The step of the run.
        share: The rank's share of the axis that holds distinct tokens, `ps.loss.share`.
        stage: The pipeline stage, `ps.pp.index`.
        device: The rank's device, `ps.device`; its generator is seeded together with the CPU's.

    Effects:
        Seeds torch's generators, and restores their state at the end, also after an error.

    Examples:
        >>> def drawn(step):
        ...     with seed_generators(0, step=step, share=Share(0, 1)):
        ...         return torch.rand(2)
        >>> torch.equal(drawn(3), drawn(3)), torch.equal(drawn(3), drawn(4))
        (True, False)
    """
    key = make_key(seed, "generators", step, share.index, stage)
    kind = torch.device(device).type
    module = torch.get_device_module(kind)
    # `fork_rng` restores the generators of the devices that it is given, and the CPU's always.
    devices: list[int] = [] if kind == "cpu" else [module.current_device()]
    with torch.random.fork_rng(devices, device_type=kind):
        torch.default_generator.manual_seed(key)
        if devices:
            module.manual_seed(key)
        yield
