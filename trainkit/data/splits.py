"""Corpora as packed rows to train on and rows that are held out: documents, or pairs of answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from trainkit.data.corpus import TokenCorpus, iterate_documents, make_corpus
from trainkit.data.joined import ConcatCorpus
from trainkit.data.packed import PackedCorpus, concat_packed, split_held_out
from trainkit.packing import format_overlong_warning, pack_bins, report_packing
from trainkit.text.chat.preference import mismatch_answers, pack_pairs
from trainkit.text.corpora.open import held_out_documents, hold_out
from trainkit.types import SOLO, Axis


def pack_corpora(
    corpora: Mapping[str, TokenCorpus | ConcatCorpus],
    capacity: int,
    *,
    one_in: int,
    cache_dir: Path | str | None = None,
    axis: Axis = SOLO,
    tell: Callable[[str], object] | None = None,
    multiple_of: int = 1,
    seed: int | None = None,
) -> tuple[PackedCorpus, PackedCorpus, dict[str, dict[str, Any]]]:
    """Hold out a part of each corpus, pack both parts into rows, and join the corpora.

    Each corpus is split by `corpora.hold_out`, packed by `split_held_out`, and joined by
    `concat_packed`.

    Args:
        corpora: The corpora by name.
        capacity: Tokens per row.
        one_in: About one document in so many is held out.
        cache_dir: As in `load_or_pack_bins`, and so all that follow.
        axis: The ranks that call this together.
        tell: Called with one sentence about each thing worth knowing.
        multiple_of: A piece takes the next multiple of this many tokens.
        seed: The seed of the packing.

    Returns:
        The rows to train on; those held out; and for each corpus a report of what was trained on,
        held out, and empty.

    Raises:
        ValueError: As `split_held_out` and `concat_packed`.

    Effects:
        Those of `split_held_out`, for each corpus.

    Examples:
        >>> from trainkit.data.corpus import make_corpus
        >>> corpora = {"a": make_corpus([[1, 2]] * 9), "b": make_corpus([[3]] * 9)}
        >>> rows, held_out, reports = pack_corpora(corpora, 4, one_in=3)
        >>> rows.num_rows.keys(), reports["a"]["empty_documents"]
        (dict_keys(['a', 'b']), 0)
    """
    rows, held_out, reports = (
        dict[str, PackedCorpus](),
        dict[str, PackedCorpus](),
        dict[str, dict[str, Any]](),
    )
    for name, whole in corpora.items():
        corpus, is_held = hold_out(whole, one_in=one_in, piece=capacity)
        rows[name], held_out[name] = split_held_out(
            corpus,
            is_held,
            capacity,
            cache_dir=cache_dir,
            axis=axis,
            tell=tell,
            multiple_of=multiple_of,
            seed=seed,
        )
        reports[name] = {
            **report_packing(rows[name].bins, corpus.lengths * ~is_held),
            "empty_documents": int((corpus.lengths == 0).sum()),
            "held_out_documents": int(is_held.sum()),
        }
    return concat_packed(rows), concat_packed(held_out), reports


def split_pairs(
    corpus: Any,
    capacity: int,
    *,
    multiple_of: int = 1,
    tell: Callable[[str], object] | None = None,
) -> tuple[PackedCorpus, PackedCorpus]:
    """Pack pairs into rows to train on and rows that are held out: no pair is in both.

    Args:
        corpus: The pairs, from `corpora.open_pairs`.
        capacity: Tokens per row; a longer pair is left out.
        multiple_of: As for `pack_pairs`.
        tell: Called with a warning of pairs that are left out.

    Returns:
        The rows to train on, and those held out.

    Examples:
        >>> from trainkit.data import make_corpus
        >>> corpus = make_corpus([[1, 2], [3], [4], [5, 6]], names=["a", "a", "b", "b"])
        >>> rows, held_out = split_pairs(corpus, 8)
        >>> len(rows.bins.documents) + len(held_out.bins.documents)
        4
    """
    is_held = held_out_documents(corpus)
    rows, held_out = (
        PackedCorpus(
            corpus,
            pack_pairs(
                np.where(is_left_out, 0, corpus.lengths),
                capacity,
                multiple_of=multiple_of,
                overlong="drop",
            ),
        )
        for is_left_out in (is_held, ~is_held)
    )
    pairs = len(corpus.lengths) // 2
    lost = pairs - (len(rows.bins.documents) + len(held_out.bins.documents)) // 2
    warning = format_overlong_warning(pairs, capacity=capacity, dropped=lost, what="pairs")
    if warning and tell is not None:
        tell(warning)
    return rows, held_out


def mismatch_answers(rows: PackedCorpus) -> PackedCorpus:
    """Return rows of the chosen answers of pairs, each to the prompt of another pair; for KTO.

    Args:
        rows: Rows of pairs, from `split_pairs`.

    Returns:
        Rows of as many tokens; see `mismatch_answers`.

    Examples:
        >>> from trainkit.data import make_corpus
        >>> from trainkit.types import Sample
        >>> halves = [Sample(np.array([i, i + 5]), np.array([False, True])) for i in range(4)]
        >>> corpus = make_corpus(halves)
        >>> others = mismatch_answers(PackedCorpus(corpus, pack_pairs(corpus.lengths, 8)))
        >>> others.corpus.tokens.tolist()
        [0, 7, 2, 5]
    """
    corpus: Any = rows.corpus
    chosen = set(rows.bins.documents[::2].tolist())
    halves: Iterator[Any] = (
        half for number, half in enumerate(iterate_documents(corpus)) if number in chosen
    )
    others = make_corpus(mismatch_answers(halves), vocab_size=corpus.vocab_size)
    bins = pack_bins(
        others.lengths, rows.bins.capacity, multiple_of=rows.bins.multiple_of, overlong="drop"
    )
    return PackedCorpus(others, bins)
