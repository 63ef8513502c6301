"""Make the microbatches of a step, and the batches of an evaluation, on one rank."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

import attrs
import numpy as np
import torch

from trainkit.batch import collate_bins, split_batch, to_device
from trainkit.batch.shards import shard_sequence
from trainkit.data.corpus import collect_documents
from trainkit.data.documents import check_columns
from trainkit.data.memory_map import check_unchanged
from trainkit.noise.counters import make_token_keys
from trainkit.packing import next_fit, pack_bins, row_costs
from trainkit.packing.bins import select_rows
from trainkit.sampling import assign_rows
from trainkit.sampling.integers import indices_below
from trainkit.types import ConfigError, DataError, DataShard, StepBatch, check_choice, check_range

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from numpy.typing import ArrayLike

    from trainkit.data.corpus import TokenCorpus
    from trainkit.data.packed import PackedCorpus
    from trainkit.types import Batch, Bins, Column, Cursor, IntArray, RowsAt, Sample

WHOLE = DataShard()


def make_step_batch(
    packed: PackedCorpus,
    rows_at: RowsAt,
    cursor: Cursor,
    *,
    data_shard: DataShard = WHOLE,
    rows_per_microbatch: int,
    pad_id: int = 0,
    device: torch.device | str | None = None,
    noise_seed: int | None = None,
) -> StepBatch:
    """Return one rank's microbatches of the global batch at a cursor, and the cursor after it.

    `rows_at` selects the rows of the batch, and `make_microbatches` shards them over ranks.

    Args:
        packed: The corpus and its rows.
        rows_at: The rows of a global batch as a function of its number, equal on all ranks:
            `sampling.shuffle_epochs`, `sampling.sample_mixture` and others make one.
        cursor: `cursor.batch` is the number of the global batch.
        data_shard: As in `make_microbatches`, like the next three.
        rows_per_microbatch: Rows in a microbatch.
        pad_id: The token id of padding.
        device: The device of the microbatches.
        noise_seed: For dropout: each microbatch gets the keys of `add_noise_keys`.

    Returns:
        The `StepBatch`, with the same number of microbatches on every rank.

    Raises:
        ValueError: As `make_microbatches`.
        ConfigError: As `make_microbatches`.
        DataError: As `make_microbatches`.

    Examples:
        >>> from trainkit.data import TokenCorpus
        >>> from trainkit.data import PackedCorpus
        >>> from trainkit.packing import pack_bins
        >>> from trainkit.sampling import shuffle_epochs
        >>> from trainkit.types import Cursor, Share
        >>> corpus = TokenCorpus(np.arange(40), np.arange(0, 41, 4))
        >>> packed = PackedCorpus(corpus, pack_bins(corpus.lengths, 8))
        >>> rows_at = shuffle_epochs(len(packed), rows_per_step=3, seed=0)
        >>> data_shard = DataShard(Share(0, 2))
        >>> batch = make_step_batch(
        ...     packed, rows_at, Cursor(), data_shard=data_shard, rows_per_microbatch=1
        ... )
        >>> len(batch.microbatches), batch.cursor.batch
        (2, 1)
    """
    rows = rows_at(cursor.batch)
    microbatches = make_microbatches(
        packed,
        rows,
        data_shard=data_shard,
        rows_per_microbatch=rows_per_microbatch,
        pad_id=pad_id,
        device=device,
    )
    counts = packed.count_by_source(rows)
    return attrs.evolve(_finish_step(microbatches, cursor, noise_seed), counts=counts)


def make_dataset_batch(
    dataset: Any,
    rows_at: RowsAt,
    cursor: Cursor,
    *,
    capacity: int,
    encode: Callable[[Any], ArrayLike | Sample] | None = None,
    data_shard: DataShard = WHOLE,
    rows_per_microbatch: int,
    overlong: Literal["error", "truncate"] = "error",
    multiple_of: int = 1,
    pad_id: int = 0,
    vocab_size: int | None = None,
    columns: Mapping[str, Column] | None = None,
    device: torch.device | str | None = None,
    noise_seed: int | None = None,
) -> StepBatch:
    """Return one rank's microbatches of the items of a dataset at a cursor, one item per row.

    Use it for a `torch.utils.data.Dataset` or a list whose items are expensive to read: of each
    global batch, rank r of n reads only items r, r + n, r + 2n, ... The global batch is the same
    for every n, and a run resumes from a cursor alone. Rows are not packed, because no rank knows
    the lengths of the items of others. Pack what fits in memory, with `data.make_corpus` and
    `make_step_batch`, and a stream without a length, with `pack_stream`.

    Args:
        dataset: An object with a length and items by index, equal on all ranks.
        rows_at: The items of a global batch as a function of its number, equal on all ranks:
            `sampling.shuffle_epochs(len(dataset), ...)` and others make one.
        cursor: `cursor.batch` is the number of the global batch.
        capacity: Tokens per row.
        encode: Converts an item to token ids or a `Sample`; by default items are such.
        data_shard: The shard of this rank, `ps.data_shard`; everything by default.
        rows_per_microbatch: Rows in a microbatch, at most those of a global batch. Padding rows
            fill up the last one.
        overlong: The policy for items longer than the capacity: "error" or "truncate".
        multiple_of: Items are padded to a multiple of this; 2 * ring for a ring.
        pad_id: The token id of padding.
        vocab_size: All tokens must be below this.
        columns: Further values of each token, by name; each `Sample` has its values.
        device: The device of the microbatches; the host by default.
        noise_seed: For dropout, as in `make_step_batch`.

    Returns:
        The `StepBatch`, with the same number of microbatches on every rank. An item without tokens
        is a padding row.

    Raises:
        ValueError: `rows_at` gives indices outside the dataset, or fewer than ranks; or an argument
            is out of range.
        ConfigError: Rows do not divide by ring and Ulysses.
        DataError: An item is not a sequence of valid ids, or is too long. The message gives its
            index.
        Exception: An error of the dataset or `encode`, with a note of the item's index.

    Examples:
        >>> from trainkit.sampling import shuffle_epochs
        >>> from trainkit.types import Cursor, Share
        >>> dataset = [{"ids": [n] * (n + 1)} for n in range(1, 5)]
        >>> rows_at = shuffle_epochs(len(dataset), rows_per_step=4, seed=0)
        >>> rows_at(0).tolist()
        [3, 0, 2, 1]
        >>> batch = make_dataset_batch(
        ...     dataset,
        ...     rows_at,
        ...     Cursor(),
        ...     capacity=6,
        ...     encode=lambda item: item["ids"],
        ...     data_shard=DataShard(Share(1, 2)),
        ...     rows_per_microbatch=2,
        ... )
        >>> batch.microbatches[0].input_ids.tolist()
        [[1, 1, 0, 0, 0, 0], [2, 2, 2, 0, 0, 0]]
    """
    check_range("make_dataset_batch", at_least=1, rows_per_microbatch=rows_per_microbatch)
    check_choice(("error", "truncate"), "make_dataset_batch", overlong=overlong)
    items = indices_below(len(dataset), "make_dataset_batch", rows_at(cursor.batch))
    share = data_shard.rows
    if share.count > len(items):
        raise ValueError(
            f"make_dataset_batch: {share.count} ranks read different items, and the batch has "
            f"{len(items)}; raise the rows per step, or lower the data-parallel degree"
        )
    corpus = _read_items(
        dataset,
        items[share.index :: share.count].tolist(),
        encode,
        vocab_size=vocab_size,
        columns=columns,
        max_length=capacity if overlong == "error" else None,
    )
    # `next_fit` with one document for each bin makes one row of each item, in the order of the
    # items.
    bins = pack_bins(
        corpus.lengths,
        capacity,
        fit=next_fit,
        overlong=overlong,
        multiple_of=multiple_of,
        max_documents=1,
    )
    _check_row_length("make_dataset_batch", bins, data_shard)
    # A batch of fewer rows is one microbatch, without padding rows up to the width.
    width = min(rows_per_microbatch, len(items))
    # Ranks may have one item more or less, but need equally many rows: those of the longest,
    # rounded up to full microbatches.
    rows = np.full(-(-len(items) // (share.count * width)) * width, -1)
    # An item without tokens has no row of bins, and stays a padding row in its place.
    rows[np.flatnonzero(corpus.lengths)] = np.arange(len(bins))
    # From rows of this rank to positions in the global batch, from which `token_index` follows.
    positions = share.index + share.count * np.arange(len(rows))
    row_positions = np.where(rows < 0, -1, positions)
    batch = collate_bins(corpus, bins, rows, pad_id=pad_id, row_positions=row_positions)
    microbatches = [_shard_sequence(part, data_shard, device) for part in split_batch(batch, width)]
    return _finish_step(microbatches, cursor, noise_seed)


def _finish_step(microbatches: list[Batch], cursor: Cursor, noise_seed: int | None) -> StepBatch:
    """Return the step at a cursor, with noise keys if there is a seed."""
    if noise_seed is not None:
        microbatches = add_noise_keys(microbatches, seed=noise_seed, batch=cursor.batch)
    return StepBatch(microbatches, attrs.evolve(cursor, batch=cursor.batch + 1))


def _read_items(
    dataset: Any,
    indices: list[int],
    encode: Callable[[Any], Any] | None,
    *,
    vocab_size: int | None,
    columns: Mapping[str, Column] | None,
    max_length: int | None,
) -> TokenCorpus:
    """Read and encode items; every error gives the index of its item."""

    def encode_items() -> Iterator[tuple[str, Any]]:
        for index in indices:
            try:
                item = dataset[index]
                document = item if encode is None else encode(item)
            except Exception as error:
                error.add_note(f"make_dataset_batch: while reading item {index}")
                raise
            yield f"make_dataset_batch: item {index}", document

    corpus = collect_documents(
        encode_items(),
        vocab_size=vocab_size,
        columns=check_columns("make_dataset_batch", columns),
    )
    # `pack_bins` would raise too, but name the document on this rank, not the item's index.
    if max_length is not None and (corpus.lengths > max_length).any():
        worst = int(corpus.lengths.argmax())
        raise DataError(
            f"make_dataset_batch: item {indices[worst]} has {corpus.lengths[worst]} tokens; the "
            f'capacity is {max_length}: raise it, or use overlong="truncate"',
            got=int(corpus.lengths[worst]),
            want=max_length,
        )
    return corpus


def make_microbatches(
    packed: PackedCorpus,
    rows: ArrayLike,
    *,
    data_shard: DataShard = WHOLE,
    rows_per_microbatch: int,
    pad_id: int = 0,
    device: torch.device | str | None = None,
) -> list[Batch]:
    """Return one rank's microbatches of the global batch of some rows.

    Ranks get rows of equal total cost, see `assign_rows`; the global batch does not depend on the
    number of ranks. All microbatches are collated at once, so without a ring they are views of one
    batch.

    Args:
        packed: The corpus and its rows.
        rows: The rows of the global batch, integers `[R]`, equal on all ranks.
        data_shard: The shard of this rank, `ps.data_shard`; everything by default. For a ring, rows
            must be packed with a `multiple_of` that 2 * ring divides.
        rows_per_microbatch: Rows in a microbatch, at most R. Padding rows fill up the last one.
        pad_id: The token id of padding.
        device: The device of the microbatches; the host by default.

    Returns:
        The microbatches, the same number on every rank, at least one. With `packed.num_rows` each
        has "source", int64 `[B, S]`, -1 for padding.

    Raises:
        ValueError: `rows` are not rows of `packed`, are more than it has, or fewer than ranks; or a
            document does not divide by 2 * ring.
        ConfigError: Rows do not divide by ring and Ulysses.
        DataError: A file of the corpus has changed since it was opened, or has a token outside its
            vocabulary.

    Examples:
        >>> from trainkit.data import TokenCorpus
        >>> from trainkit.data import PackedCorpus
        >>> from trainkit.packing import pack_bins
        >>> from trainkit.types import Share
        >>> corpus = TokenCorpus(np.arange(40), np.arange(0, 41, 4))
        >>> packed = PackedCorpus(corpus, pack_bins(corpus.lengths, 4))
        >>> [part] = make_microbatches(
        ...     packed, [7, 0], data_shard=DataShard(Share(1, 2)), rows_per_microbatch=1
        ... )
        >>> part.input_ids.tolist()
        [[0, 1, 2, 3]]
    """
    _check_row_length("make_microbatches", packed.bins, data_shard)
    rows = np.asarray(rows)
    if rows.ndim != 1 or rows.dtype.kind not in "iu":
        raise ValueError(
            "make_microbatches: the rows of a step must be integers in one dimension, got "
            f"{rows.dtype} {rows.shape}"
        )
    num_rows = len(packed)
    if len(rows) > num_rows:
        raise ValueError(
            f"make_microbatches: a step takes {len(rows)} rows, the corpus has {num_rows} of "
            f"{packed.bins.capacity} tokens; use fewer or shorter rows, or more text"
        )
    if len(rows) and not 0 <= rows.min() <= rows.max() < num_rows:
        raise ValueError(
            f"make_microbatches: the rows of a step must be from 0 to {num_rows - 1}, got "
            f"{rows.min()} to {rows.max()}"
        )
    # A table of this batch alone, so that a row's number is its position in the step.
    bins = select_rows(packed.bins, rows)
    sources = packed.source_of(rows)
    # `[microbatches, rows]`, of which -1 is a padding row.
    positions = assign_rows(
        len(bins), data_shard.rows, rows_per_microbatch=rows_per_microbatch, costs=row_costs(bins)
    )
    batch = _collate(packed.corpus, bins, positions.reshape(-1), sources, pad_id=pad_id)
    return [
        _shard_sequence(part, data_shard, device) for part in split_batch(batch, positions.shape[1])
    ]


def add_noise_keys(microbatches: Iterable[Batch], *, seed: int, batch: int) -> list[Batch]:
    """Add one "noise_key" per token to microbatches, for dropout.

    Args:
        microbatches: Microbatches of one global batch.
        seed: The run's seed.
        batch: The number of the global batch, `cursor.batch`.

    Examples:
        >>> from trainkit.batch import make_padding_batch
        >>> [part] = add_noise_keys([make_padding_batch(2, 8)], seed=0, batch=3)
        >>> part["noise_key"].shape
        torch.Size([2, 8])
    """
    result = []
    for microbatch in microbatches:
        # Keys follow from a token's index in the global step, so dropout is the same in every
        # layout.
        keys = make_token_keys(microbatch.token_index, seed=seed, step=batch)
        result.append(attrs.evolve(microbatch, extra={**microbatch.extra, "noise_key": keys}))
    return result


def make_eval_batches(
    packed: PackedCorpus,
    *,
    data_shard: DataShard = WHOLE,
    rows_per_batch: int,
    device: torch.device | str | None = None,
) -> Iterator[Batch]:
    """Return one rank's batches of an evaluation: over all ranks every row comes exactly once.

    Ranks may get different numbers of batches. All batches have one shape; padding rows fill up the
    last. A rank without rows gets a batch of padding rows, because a sharded model needs all ranks
    in a forward pass.

    Args:
        packed: The corpus and its rows.
        data_shard: As in `make_microbatches`.
        rows_per_batch: Rows in a batch, at most those of `packed`.
        device: The device of the batches; the host by default.

    Returns:
        An iterator that makes each batch on demand; `token_index` counts over the whole evaluation.

    Raises:
        ValueError: `rows_per_batch` is below 1.
        ConfigError: Rows do not divide by ring and Ulysses.

    Examples:
        >>> from trainkit.data import TokenCorpus
        >>> from trainkit.data import PackedCorpus
        >>> from trainkit.packing import pack_bins
        >>> from trainkit.types import Share
        >>> corpus = TokenCorpus(np.arange(40), np.arange(0, 41, 8))
        >>> packed = PackedCorpus(corpus, pack_bins(corpus.lengths, 8))
        >>> shards = [DataShard(Share(0, 2)), DataShard(Share(1, 2))]
        >>> [
        ...     len(list(make_eval_batches(packed, data_shard=shard, rows_per_batch=2)))
        ...     for shard in shards
        ... ]
        [2, 1]
    """
    share = data_shard.rows
    bins = packed.bins
    check_range("make_eval_batches", at_least=1, rows_per_batch=rows_per_batch)
    _check_row_length("make_eval_batches", bins, data_shard)
    sources = packed.source_of(np.arange(len(bins)))
    # Contiguous runs, in which a rank reads its file from front to back.
    rows = np.array_split(np.arange(len(bins)), share.count)[share.index]
    if len(bins) and not len(rows):
        rows = np.array([-1])
    rows_per_batch = min(rows_per_batch, max(1, len(bins)))
    # All batches have one shape, for a compiled model.
    rows = np.append(rows, np.full(-len(rows) % rows_per_batch, -1))
    return (
        _shard_sequence(_collate(packed.corpus, bins, batch, sources, pad_id=0), data_shard, device)
        for batch in rows.reshape(-1, rows_per_batch)
    )


def _check_row_length(function: str, bins: Bins, data_shard: DataShard) -> None:
    ring = data_shard.ring.count
    ulysses = data_shard.ulysses.count
    # A zigzag has two chunks for each rank of the ring, and Ulysses slices the shard of a ring's
    # rank once more.
    multiple = math.lcm(2 * ring if ring > 1 else 1, ring * ulysses)
    if bins.capacity % multiple:
        raise ConfigError(
            f"{function}: rows of {bins.capacity} tokens do not divide by ring = {ring} x 2 chunks "
            f"and ulysses = {ulysses}; choose a row length that is a multiple of {multiple}",
            where="ring, ulysses",
            got=bins.capacity,
            want=f"a multiple of {multiple}",
        )


def _collate(
    corpus: Any, bins: Bins, rows: IntArray, sources: IntArray | None, *, pad_id: int
) -> Batch:
    """Collate rows, whose numbers are their positions in the step; -1 is a padding row."""
    if getattr(corpus, "parts", None) is None:
        check_unchanged(corpus)
    else:
        # Only parts that rows have tokens of, because a stat of 10,000 files takes 27 ms.
        documents = select_rows(bins, rows[rows >= 0]).documents
        parts = np.searchsorted(corpus.first_documents, documents, side="right") - 1
        for part in np.unique(parts):
            if part < len(corpus.parts):  # `collate_bins` rejects documents beyond the corpus
                check_unchanged(corpus.parts[part])
    batch = collate_bins(corpus, bins, rows, pad_id=pad_id, row_positions=rows)
    if sources is None:
        return batch
    # Index -1, a padding row, reads the last source, which the next line covers.
    source = torch.from_numpy(sources[rows])[:, None]
    source = torch.where(batch.document_ids < 0, -1, source)
    return attrs.evolve(batch, extra={**batch.extra, "source": source})


def _shard_sequence(
    batch: Batch, data_shard: DataShard, device: torch.device | str | None
) -> Batch:
    """Return a rank's shard over ring and Ulysses of a batch, on its device."""
    batch = shard_sequence(batch, ring=data_shard.ring, ulysses=data_shard.ulysses)
    return batch if device is None else to_device(batch, device)
