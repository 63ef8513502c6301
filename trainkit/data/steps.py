"""From the rows of a step to the microbatches of one rank, and the batches of an evaluation."""

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
from trainkit.data.mapped import check_unchanged
from trainkit.noise.counters import make_token_keys
from trainkit.packing import next_fit, pack_bins, row_costs, select_rows
from trainkit.sampling import assign_rows
from trainkit.sampling.integers import indices_below
from trainkit.types import ConfigError, DataError, DataShard, StepBatch, check_choice, check_range

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from numpy.typing import ArrayLike

    from trainkit.data.packed import PackedCorpus
    from trainkit.types import Batch, Bins, Column, Corpus, Cursor, IntArray, RowsAt, Sample

WHOLE = DataShard()


def make_step_batch(
    packed: PackedCorpus,
    rows_at: RowsAt,
    cursor: Cursor,
    *,
    place: DataShard = WHOLE,
    rows_per_microbatch: int,
    pad_id: int = 0,
    device: torch.device | str | None = None,
    noise_seed: int | None = None,
) -> StepBatch:
    """Return one rank's microbatches of the global batch at a cursor, and the cursor after it.

    Two things in one: `rows_at` says which rows make up the batch, `make_microbatches` gives each
        rank its
    part of them.

    Args:
        packed: What there is to read.
        rows_at: The rows of a global batch as a function of its number, the same on all ranks:
            `sampling.shuffle_epochs`, `sampling.sample_mixture` and others make one.
        cursor: `cursor.batch` is the number of the global batch.
        place: As in `make_microbatches`, and so the next three.
        rows_per_microbatch: Rows in each microbatch.
        pad_id: The token id of padding.
        device: Where the microbatches shall be.
        noise_seed: For dropout: each microbatch then carries the keys of `add_noise_keys`.

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
        >>> place = DataShard(Share(0, 2))
        >>> batch = make_step_batch(packed, rows_at, Cursor(), place=place, rows_per_microbatch=1)
        >>> len(batch.microbatches), batch.cursor.batch
        (2, 1)
    """
    microbatches = make_microbatches(
        packed,
        rows_at(cursor.batch),
        place=place,
        rows_per_microbatch=rows_per_microbatch,
        pad_id=pad_id,
        device=device,
    )
    return _finish_step(microbatches, cursor, noise_seed)


def make_dataset_batch(
    dataset: Any,
    rows_at: RowsAt,
    cursor: Cursor,
    *,
    capacity: int,
    encode: Callable[[Any], ArrayLike | Sample] | None = None,
    place: DataShard = WHOLE,
    rows_per_microbatch: int,
    overlong: Literal["error", "truncate"] = "error",
    multiple_of: int = 1,
    pad_id: int = 0,
    vocab_size: int | None = None,
    columns: Mapping[str, Column] | None = None,
    device: torch.device | str | None = None,
    noise_seed: int | None = None,
) -> StepBatch:
    """Return one rank's microbatches of the items of a dataset at a cursor, one item a row.

    For a `torch.utils.data.Dataset` or a list whose items are expensive to read: of each global
    batch, rank r of n reads items r, r + n, r + 2n, ... and no others. The global batch is the same
    for every n, and a cursor is all that a run needs to go on. Rows are not packed, since no rank
    knows the lengths of the others' items; what can be read as a whole is better packed, as a
    `data.make_corpus` by `make_step_batch`, and what has no length by `pack_stream`.

    Args:
        dataset: Has a length, and an item at each number below it, the same on all ranks.
        rows_at: The items of a global batch as a function of its number, the same on all ranks:
            `sampling.shuffle_epochs(len(dataset), ...)` and others make one.
        cursor: `cursor.batch` is the number of the global batch.
        capacity: Tokens per row.
        encode: From an item to token ids or a `Sample`; by default items are such.
        place: Which part this rank holds, `ps.place`; all by default.
        rows_per_microbatch: Rows in each microbatch, and no more than a global batch has; blank
            rows fill what does not divide.
        overlong: Whether an item longer than the capacity is cut there or an error.
        multiple_of: What each item is aligned to; 2 * ring for a ring.
        pad_id: The token id of padding.
        vocab_size: No token may be this large or larger.
        columns: What there is of each token besides, by name; each `Sample` has its values.
        device: Where the microbatches shall be; the host by default.
        noise_seed: For dropout, as in `make_step_batch`.

    Returns:
        The `StepBatch`, with the same number of microbatches on every rank. An item without tokens
        is a blank row.

    Raises:
        ValueError: `rows_at` gives no items of the dataset, or fewer than ranks; or a number is out
            of its range.
        ConfigError: Rows do not divide by ring and Ulysses.
        DataError: An item is no sequence of ids that fit, or too long. The message gives its
            number.
        Exception: What the dataset or `encode` raised, with a note of the item's number.

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
        ...     place=DataShard(Share(1, 2)),
        ...     rows_per_microbatch=2,
        ... )
        >>> batch.microbatches[0].input_ids.tolist()
        [[1, 1, 0, 0, 0, 0], [2, 2, 2, 0, 0, 0]]
    """
    check_range("make_dataset_batch", at_least=1, rows_per_microbatch=rows_per_microbatch)
    check_choice(("error", "truncate"), "make_dataset_batch", overlong=overlong)
    items = indices_below(len(dataset), "make_dataset_batch", rows_at(cursor.batch))
    share = place.rows
    if share.count > len(items):
        raise ValueError(
            f"make_dataset_batch: {share.count} ranks read different items, and the batch has "
            f"{len(items)}; raise the rows per step, or lower the data-parallel degree"
        )
    positions = np.arange(share.index, len(items), share.count)
    corpus = collect_documents(
        _encoded_items(dataset, items[positions].tolist(), encode),
        vocab_size=vocab_size,
        columns=check_columns("make_dataset_batch", columns),
    )
    if overlong == "error" and (corpus.lengths > capacity).any():
        worst = int(corpus.lengths.argmax())
        raise DataError(
            f"make_dataset_batch: item {items[positions[worst]]} has {corpus.lengths[worst]} "
            f"tokens; "
            f'the capacity is {capacity}: raise it, or ask for overlong="truncate"',
            got=int(corpus.lengths[worst]),
            want=capacity,
        )
    bins = pack_bins(
        corpus.lengths,
        capacity,
        fit=next_fit,
        overlong=overlong,
        multiple_of=multiple_of,
        max_documents=1,
    )
    _check_row_length(bins, place)
    width = min(rows_per_microbatch, len(items))
    rows = np.full(-(-len(items) // (share.count * width)) * width, -1)
    rows[np.flatnonzero(corpus.lengths)] = np.arange(len(bins))
    places = np.full(len(rows), -1)
    places[: len(positions)] = positions
    places[rows < 0] = -1
    batch = collate_bins(corpus, bins, rows, pad_id=pad_id, row_positions=places)
    microbatches = [_placed(part, place, device) for part in split_batch(batch, width)]
    return _finish_step(microbatches, cursor, noise_seed)


def _finish_step(microbatches: list[Batch], cursor: Cursor, noise_seed: int | None) -> StepBatch:
    """Return the step at a cursor, with noise keys if there is a seed for them."""
    if noise_seed is not None:
        microbatches = add_noise_keys(microbatches, seed=noise_seed, batch=cursor.batch)
    return StepBatch(microbatches, attrs.evolve(cursor, batch=cursor.batch + 1))


def _encoded_items(
    dataset: Any, numbers: Sequence[int], encode: Callable[[Any], Any] | None
) -> Iterator[tuple[str, Any]]:
    """Read items, each with what a message calls it."""
    for number in numbers:
        try:
            item = dataset[number]
            document = item if encode is None else encode(item)
        except Exception as error:
            error.add_note(f"make_dataset_batch: while reading item {number}")
            raise
        yield f"make_dataset_batch: item {number}", document


def make_microbatches(
    packed: PackedCorpus,
    rows: ArrayLike,
    *,
    place: DataShard = WHOLE,
    rows_per_microbatch: int,
    pad_id: int = 0,
    device: torch.device | str | None = None,
) -> list[Batch]:
    """Return one rank's microbatches of a global batch that consists of these rows.

    Ranks get rows of equal cost, see `assign_rows`, and what they get together does not depend on
    how many they are. All microbatches are collated at once, so they are views of one batch where
    no ring cuts them.

    Args:
        packed: What there is to read.
        rows: The rows of the global batch, integers `[R]`, the same on all ranks.
        place: Which part of them this rank holds, `ps.place`; all by default. On a ring rows are
            packed with a `multiple_of` that 2 * ring divides.
        rows_per_microbatch: Rows in each microbatch, and no more than there are; blank rows fill
            what does not divide.
        pad_id: The token id of padding.
        device: Where the microbatches shall be; the host by default.

    Returns:
        As many microbatches on every rank, at least one. With `packed.num_rows` each carries
        "source", int64 `[B, S]`, -1 for padding.

    Raises:
        ValueError: `rows` are not rows of `packed`, or more than it has, or fewer than ranks; or a
            document does not divide by 2 * ring.
        ConfigError: Rows do not divide by ring and Ulysses.
        DataError: A file of the corpus was changed since it was opened, or holds a token outside
            its vocabulary.

    Examples:
        >>> from trainkit.data import TokenCorpus
        >>> from trainkit.data import PackedCorpus
        >>> from trainkit.packing import pack_bins
        >>> from trainkit.types import Share
        >>> corpus = TokenCorpus(np.arange(40), np.arange(0, 41, 4))
        >>> packed = PackedCorpus(corpus, pack_bins(corpus.lengths, 4))
        >>> [part] = make_microbatches(
        ...     packed, [7, 0], place=DataShard(Share(1, 2)), rows_per_microbatch=1
        ... )
        >>> part.input_ids.tolist()
        [[0, 1, 2, 3]]
    """
    _check_row_length(packed.bins, place)
    chosen = _checked_rows(rows, packed.bins)
    bins, sources = select_rows(packed.bins, chosen), packed.source_of(chosen)
    positions = assign_rows(
        len(bins), place.rows, rows_per_microbatch=rows_per_microbatch, costs=row_costs(bins)
    )
    batch = _collate(packed.corpus, bins, positions.reshape(-1), sources, pad_id=pad_id)
    return [_placed(part, place, device) for part in split_batch(batch, positions.shape[1])]


def add_noise_keys(microbatches: Iterable[Batch], *, seed: int, batch: int) -> list[Batch]:
    """Return microbatches that carry one "noise_key" per token, which dropout needs.

    Args:
        microbatches: Those of one global batch.
        seed: The run's seed.
        batch: The number of the global batch, `cursor.batch`.

    Examples:
        >>> from trainkit.batch import make_padding_batch
        >>> [part] = add_noise_keys([make_padding_batch(2, 8)], seed=0, batch=3)
        >>> part["noise_key"].shape
        torch.Size([2, 8])
    """

    def with_keys(part: Batch) -> Batch:
        keys = make_token_keys(part.token_index, seed=seed, step=batch)
        return attrs.evolve(part, extra={**part.extra, "noise_key": keys})

    return [with_keys(part) for part in microbatches]


def make_eval_batches(
    packed: PackedCorpus,
    *,
    place: DataShard = WHOLE,
    rows_per_batch: int,
    device: torch.device | str | None = None,
) -> Iterator[Batch]:
    """Return one rank's batches of an evaluation: over all ranks every row comes exactly once.

    Ranks may get different numbers of batches. All batches have one shape: blank rows fill the
    last. A rank for which there are no rows gets a batch of blank rows, because a sharded model
    needs every rank for every forward pass.

    Args:
        packed: What there is to read.
        place: As in `make_microbatches`.
        rows_per_batch: Rows in each batch, and no more than `packed` has.
        device: Where the batches shall be; the host by default.

    Returns:
        An iterator that makes each batch when it is asked for; `token_index` counts over the whole
        evaluation.

    Raises:
        ValueError: `rows_per_batch` is below 1.
        ConfigError: Rows do not divide by ring and Ulysses.

    Examples:
        >>> from trainkit.data import TokenCorpus
        >>> from trainkit.data import PackedCorpus
        >>> from trainkit.packing import pack_bins
        >>> from trainkit.types import Share
        >>> corpus = TokenCorpus(np.arange(40), np.arange(0, 41, 8))
        >>> packed, places = (
        ...     PackedCorpus(corpus, pack_bins(corpus.lengths, 8)),
        ...     [Share(0, 2), Share(1, 2)],
        ... )
        >>> [
        ...     len(list(make_eval_batches(packed, place=DataShard(x), rows_per_batch=2)))
        ...     for x in places
        ... ]
        [2, 1]
    """
    share, bins = place.rows, packed.bins
    check_range("make_eval_batches", at_least=1, rows_per_batch=rows_per_batch)
    _check_row_length(bins, place)
    sources = packed.source_of(np.arange(len(bins)))
    rows = np.array_split(np.arange(len(bins)), share.count)[share.index]
    if len(bins) and not len(rows):
        rows = np.array([-1])
    rows_per_batch = min(rows_per_batch, max(1, len(bins)))
    rows = np.append(rows, np.full(-len(rows) % rows_per_batch, -1))
    return (
        _placed(_collate(packed.corpus, bins, chosen, sources, pad_id=0), place, device)
        for chosen in rows.reshape(-1, rows_per_batch)
    )


def _check_row_length(bins: Bins, place: DataShard) -> None:
    ring, ulysses = place.ring.count, place.ulysses.count
    multiple = math.lcm(2 * ring if ring > 1 else 1, ring * ulysses)
    if bins.capacity % multiple:
        degrees = f"ring = {ring} x 2 chunks and ulysses = {ulysses}"
        what = f"rows of {bins.capacity} tokens do not divide by {degrees}"
        mend, where = f"choose a row length that is a multiple of {multiple}", "ring, ulysses"
        facts = {"got": bins.capacity, "want": f"a multiple of {multiple}"}
        raise ConfigError(f"make_step_batch: {what}; {mend}", where=where, **facts)


def _checked_rows(rows: ArrayLike, bins: Bins) -> IntArray:
    chosen = np.asarray(rows)
    if chosen.ndim != 1 or chosen.dtype.kind not in "iu":
        must = "the rows of a step must be integers in one dimension"
        raise ValueError(f"make_microbatches: {must}, got {chosen.dtype} {chosen.shape}")
    if len(chosen) > len(bins):
        has = f"the corpus has {len(bins)} of {bins.capacity} tokens"
        mend = "ask for fewer or shorter rows, or bring more text"
        raise ValueError(f"make_microbatches: a step takes {len(chosen)} rows, {has}; {mend}")
    if len(chosen) and not 0 <= chosen.min() <= chosen.max() < len(bins):
        must = f"the rows of a step must be from 0 to {len(bins) - 1}"
        raise ValueError(f"make_microbatches: {must}, got {chosen.min()} to {chosen.max()}")
    return chosen


def _collate(
    corpus: Corpus, bins: Bins, rows: IntArray, sources: IntArray | None, *, pad_id: int
) -> Batch:
    """Return rows as a batch; their numbers are their positions in the step, -1 is a blank one."""
    for part in _parts_of(corpus, select_rows(bins, rows[rows >= 0])):
        check_unchanged(part)
    batch = collate_bins(corpus, bins, rows, pad_id=pad_id, row_positions=rows)
    if sources is None:
        return batch
    source = torch.from_numpy(sources[rows])[:, None]
    own = torch.where(batch.document_ids < 0, -1, source)
    return attrs.evolve(batch, extra={**batch.extra, "source": own})


def _parts_of(corpus: Any, bins: Bins) -> Sequence[Corpus]:
    """Return the parts of a corpus that rows have tokens of: a look at 10,000 files takes 27 ms."""
    if getattr(corpus, "parts", None) is None:
        return (corpus,)
    numbers = np.searchsorted(corpus.first_documents, bins.documents, side="right") - 1
    return [corpus.parts[number] for number in np.unique(numbers) if number < len(corpus.parts)]


def _placed(batch: Batch, place: DataShard, device: torch.device | str | None) -> Batch:
    """Return what a rank of ring and Ulysses holds of a batch, on its device."""
    batch = shard_sequence(batch, ring=place.ring, ulysses=place.ulysses)
    return batch if device is None else to_device(batch, device)
