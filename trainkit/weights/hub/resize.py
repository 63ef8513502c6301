"""A vocabulary with more rows: the embedding and the head of a folder, box by box."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from trainkit.models.config import DecoderConfig, parameter_shapes
from trainkit.parallel.materialize import listed, shapes_of
from trainkit.types import ConfigError, Weights

_ROWS = 4096


def resize_weights(
    weights: Weights, config: DecoderConfig, *, vocab_size: int, new: Weights | None = None
) -> Weights:
    """Return the weights of a decoder whose vocabulary has more rows.

    A new row of the embedding, and of a head that is not tied to it, is the mean of the old ones,
    so that a new token is as likely as others are on average before it has been trained (Hewitt,
    "Initializing new word embeddings for pretrained language models", 2021). The mean is summed in
    float64 in an order that depends on the old rows alone: any box has the bits of the whole.

    Args:
        weights: Those of the decoder as it is, `open_folder_weights(folder)` for instance.
        config: That decoder.
        vocab_size: The rows that it shall have, `pad_vocab_size(tokenizer.vocab_size)` say.
        new: Gives the new rows instead, by the names and boxes of the larger decoder:
            `init_weights(attrs.evolve(config, vocab_size=vocab_size), seed=0)`.

    Returns:
        A `Weights` function. New rows are of the old ones' dtype; those of `new` alone of its own.
        A mean reads all old rows of its columns, 4096 at a time.

    Raises:
        ConfigError: `vocab_size` is below that of `config`: tokens would be lost.

    Examples:
        >>> config = DecoderConfig(
        ...     vocab_size=4, width=2, layers=1, heads=1, kv_heads=1, mlp_width=4
        ... )
        >>> old = torch.arange(8.0).view(4, 2)
        >>> read = lambda name, shape, offset: old[offset[0] : offset[0] + shape[0]]
        >>> more = resize_weights(read, config, vocab_size=6)
        >>> more("embedding.weight", (3, 2), (3, 0))
        tensor([[6., 7.],
                [3., 4.],
                [3., 4.]])
    """
    had = config.vocab_size
    if vocab_size < had:
        raise ConfigError(
            f"resize_weights: {vocab_size} rows are asked for, and there are {had}: tokens would "
            "be lost",
            where="vocab_size",
            got=vocab_size,
            want=had,
        )
    larger = parameter_shapes(attrs.evolve(config, vocab_size=vocab_size))
    changed = {name for name, shape in parameter_shapes(config).items() if larger[name] != shape}

    def give(name: str, shape: Sequence[int], offset: Sequence[int]) -> Tensor:
        rows, first = (shape[0], offset[0]) if name in changed else (0, 0)
        beyond = min(rows, max(0, first + rows - had))
        if not beyond:
            return weights(name, shape, offset)
        rest, start = tuple(shape[1:]), tuple(offset[1:])
        box = (beyond, *rest), (first + rows - beyond, *start)
        if new is None:
            more = _mean(weights, name, had, rest, start).expand(beyond, *rest)
        else:
            more = new(name, *box)
        if beyond == rows:
            return more
        old = weights(name, (rows - beyond, *rest), offset)
        return torch.cat([old, more.to(old.dtype)])

    return listed(give, {**shapes_of(weights), **{name: larger[name] for name in changed}})


def _mean(
    weights: Weights, name: str, rows: int, rest: Sequence[int], start: Sequence[int]
) -> Tensor:
    """Return the mean of the rows of a matrix: elementwise sums, so that no column sees another."""
    total, dtype = torch.zeros(tuple(rest), dtype=torch.float64), torch.float32
    for first in range(0, rows, _ROWS):
        part = weights(name, (min(_ROWS, rows - first), *rest), (first, *start))
        dtype, part = part.dtype, part.double()
        while len(part) > 1:
            half = len(part) // 2
            odd = part[2 * half :]
            part = torch.cat([part[:half] + part[half : 2 * half], odd])
        total = total + part[0]
    return (total / rows).to(dtype)
