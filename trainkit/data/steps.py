"""From a cursor to the microbatches of one step on one rank, and the batches of an evaluation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import numpy as np

from trainkit.batch import collate_bins, to_device
from trainkit.noise import token_keys
from trainkit.sampling import rows_of_step, share_of_rows
from trainkit.types import StepBatch

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from trainkit.types import Batch, Bins, Corpus, Cursor, IntArray, Share


def step_batch(
    corpus: Corpus,
    bins: Bins,
    cursor: Cursor,
    *,
    rows: int,
    seed: int,
    share: Share,
    rows_per_microbatch: int,
    pad_id: int = 0,
    device: torch.device | str | None = None,
    noise_seed: int | None = None,
) -> StepBatch:
    """Return one rank's microbatches of the global batch at a cursor, and the cursor after it.

    Which rows make up the batch is a function of the seed, the cursor and the bins alone; ranks
    only share them out.

    Args:
        corpus: Where the tokens are.
        bins: The rows, the same on all ranks.
        cursor: `cursor.batch` is the number of the global batch.
        rows: Rows in the global batch.
        seed: The run's seed.
        share: Which of the ranks that read different rows this is (`ps.dp.share`).
        rows_per_microbatch: Rows in each microbatch; blank rows fill what does not divide.
        pad_id: The token id of padding.
        device: Where the microbatches shall be; the host by default.
        noise_seed: For dropout: each microbatch then carries one `noise_key` per token, a function
            of this seed, of the number of the global batch and of the token's index.

    Returns:
        The `StepBatch`, with the same number of microbatches on every rank.

    Raises:
        ValueError: The corpus has fewer rows than a step asks for, or a step fewer rows than there
            are ranks.

    Examples:
        >>> from trainkit.data import TokenCorpus
        >>> from trainkit.packing import pack_bins
        >>> from trainkit.types import Cursor, Share
        >>> corpus = TokenCorpus(np.arange(40), np.arange(0, 41, 4))
        >>> batch = step_batch(
        ...     corpus,
        ...     pack_bins(corpus.lengths, 8),
        ...     Cursor(),
        ...     rows=3,
        ...     seed=0,
        ...     share=Share(0, 2),
        ...     rows_per_microbatch=1,
        ... )
        >>> len(batch.microbatches), batch.cursor.batch
        (2, 1)
    """
    if rows > len(bins):
        raise ValueError(
            f"step_batch: a step takes {rows} rows, the corpus has {len(bins)} of {bins.capacity} "
            "tokens; ask for fewer or shorter rows, or bring more text"
        )
    chosen = rows_of_step(cursor.batch, rows_per_step=rows, num_rows=len(bins), seed=seed)
    microbatches = [
        _collate(
            corpus,
            bins,
            np.where(places < 0, -1, chosen[places]),
            places,
            pad_id=pad_id,
            device=device,
        )
        for places in share_of_rows(rows, share, rows_per_microbatch=rows_per_microbatch)
    ]
    if noise_seed is not None:
        microbatches = [
            _with_noise_keys(batch, seed=noise_seed, step=cursor.batch) for batch in microbatches
        ]
    return StepBatch(microbatches, attrs.evolve(cursor, batch=cursor.batch + 1))


def _with_noise_keys(batch: Batch, *, seed: int, step: int) -> Batch:
    keys = token_keys(batch.token_index, seed=seed, step=step)
    return attrs.evolve(batch, extra={**batch.extra, "noise_key": keys})


def eval_batches(
    corpus: Corpus,
    bins: Bins,
    share: Share,
    *,
    rows_per_batch: int,
    pad_id: int = 0,
    device: torch.device | str | None = None,
) -> Iterator[Batch]:
    """Return one rank's batches of an evaluation: over all ranks every row comes exactly once.

    Ranks may get different numbers of batches, also none. All batches have one shape: blank rows
    fill the last.

    Args:
        corpus: Where the tokens are.
        bins: The rows, the same on all ranks.
        share: Which of the ranks that read different rows this is.
        rows_per_batch: Rows in each batch.
        pad_id: The token id of padding.
        device: Where the batches shall be; the host by default.

    Returns:
        An iterator that makes each batch when it is asked for; `token_index` counts over the whole
        evaluation.

    Raises:
        ValueError: `rows_per_batch` is below 1, or there is no such share.

    Examples:
        >>> from trainkit.data import TokenCorpus
        >>> from trainkit.packing import pack_bins
        >>> from trainkit.types import Share
        >>> corpus = TokenCorpus(np.arange(40), np.arange(0, 41, 8))
        >>> bins = pack_bins(corpus.lengths, 8)
        >>> [len(list(eval_batches(corpus, bins, Share(r, 2), rows_per_batch=2))) for r in (0, 1)]
        [2, 1]
    """
    if rows_per_batch < 1 or not 0 <= share.index < share.count:
        raise ValueError(
            "eval_batches: rows_per_batch must be at least 1 and the share exist, got "
            f"{rows_per_batch} and part {share.index} of {share.count}"
        )
    rows = np.array_split(np.arange(len(bins)), share.count)[share.index]
    rows = np.append(rows, np.full(-len(rows) % rows_per_batch, -1))
    batches = rows.reshape(-1, rows_per_batch)
    return (
        _collate(corpus, bins, chosen, chosen, pad_id=pad_id, device=device) for chosen in batches
    )


def _collate(
    corpus: Corpus,
    bins: Bins,
    rows: IntArray,
    places: IntArray,
    *,
    pad_id: int,
    device: torch.device | str | None,
) -> Batch:
    batch = collate_bins(corpus, bins, rows, pad_id=pad_id, row_positions=places)
    return batch if device is None else to_device(batch, device)
