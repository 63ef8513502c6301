"""Add rows to the vocabulary: to the embedding and the head of a folder, box by box."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from trainkit.models.config import DecoderConfig, parameter_shapes
from trainkit.parallel.materialize import attach_shapes, shapes_of
from trainkit.types import ConfigError, Weights

_ROWS_PER_READ = 4096


def resize_weights(
    weights: Weights, config: DecoderConfig, *, vocab_size: int, new: Weights | None = None
) -> Weights:
    """Return the weights of a decoder whose vocabulary has more rows.

    A new row of the embedding, and of a head that is not tied to it, is the mean of the old rows,
    so that an untrained token is as likely as others are on average (Hewitt, "Initializing new word
    embeddings for pretrained language models", 2021). The mean is summed in float64 in an order
    that depends on the old rows only: any box has the bits of the full tensor.

    Args:
        weights: The weights of the decoder, such as `open_folder_weights(folder)`.
        config: The decoder.
        vocab_size: The new number of rows, such as `pad_vocab_size(tokenizer.vocab_size)`.
        new: Reads the new rows instead, by the names and boxes of the larger decoder:
            `init_weights(attrs.evolve(config, vocab_size=vocab_size), seed=0)`.

    Returns:
        A `Weights` function. New rows have the dtype of the old ones; a box with rows of `new` only
        has the dtype of `new`. A mean reads all old rows of its columns, 4096 at a time.

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
    old_size = config.vocab_size
    if vocab_size < old_size:
        raise ConfigError(
            f"resize_weights: {vocab_size} rows are fewer than the {old_size} of the decoder: "
            "tokens would be lost",
            where="vocab_size",
            got=vocab_size,
            want=old_size,
        )
    larger = parameter_shapes(attrs.evolve(config, vocab_size=vocab_size))
    # The embedding, and the head unless it is tied: compared by shape, in whatever model it is.
    resized = {name for name, shape in parameter_shapes(config).items() if larger[name] != shape}

    def read(name: str, shape: Sequence[int], offset: Sequence[int]) -> Tensor:
        # A box may lie in the old rows, in the new ones, or across both.
        num_new = 0
        if name in resized:
            num_new = min(shape[0], max(0, offset[0] + shape[0] - old_size))
        if not num_new:
            return weights(name, shape, offset)
        num_old = shape[0] - num_new
        row_shape = tuple(shape[1:])
        row_offset = tuple(offset[1:])
        if new is None:
            mean = _compute_mean_row(weights, name, old_size, row_shape, row_offset)
            new_rows = mean.expand(num_new, *row_shape)
        else:
            new_rows = new(name, (num_new, *row_shape), (offset[0] + num_old, *row_offset))
        if not num_old:
            return new_rows
        old_rows = weights(name, (num_old, *row_shape), offset)
        return torch.cat([old_rows, new_rows.to(old_rows.dtype)])

    # With the new shapes, which `build_stages` compares with those of the model.
    new_shapes = {name: larger[name] for name in resized}
    return attach_shapes(read, {**shapes_of(weights), **new_shapes})


def _compute_mean_row(
    weights: Weights, name: str, rows: int, shape: Sequence[int], offset: Sequence[int]
) -> Tensor:
    """Return the mean of the rows of a matrix.

    Sums are elementwise, so the bits of a column do not depend on the other columns of the box.
    """
    total = torch.zeros(tuple(shape), dtype=torch.float64)
    dtype = torch.float32
    # Always the same groups, from row 0 on: the order of a sum decides its last bits.
    for first in range(0, rows, _ROWS_PER_READ):
        count = min(_ROWS_PER_READ, rows - first)
        part = weights(name, (count, *shape), (first, *offset))
        dtype = part.dtype
        part = part.double()
        # Pairwise, in an order that is the same for every box; `sum` may choose another by shape.
        while len(part) > 1:
            half = len(part) // 2
            odd = part[2 * half :]
            part = torch.cat([part[:half] + part[half : 2 * half], odd])
        total = total + part[0]
    return (total / rows).to(dtype)
