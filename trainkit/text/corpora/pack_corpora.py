"""Pack corpora into rows: training and held-out rows of corpora, of examples, or of pairs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

# The package, which loads its modules when they are used: `data.packed` imports torch, and the
# processes of `prepare` import this module without needing that.
from trainkit import data
from trainkit.data.corpus import iterate_documents, make_corpus
from trainkit.packing import pack_bins, report_packing
from trainkit.packing.report import format_overlong_warning
from trainkit.phases import as_phase
from trainkit.text.chat import mismatch_answers, pack_pairs
from trainkit.text.corpora.open import held_out_documents, hold_out
from trainkit.types import SOLO, Log, Sample, log_info

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from trainkit.data.concat import ConcatCorpus
    from trainkit.data.corpus import TokenCorpus
    from trainkit.data.packed import PackedCorpus
    from trainkit.types import Axis


@as_phase("data")
def pack_corpora(
    corpora: Mapping[str, TokenCorpus | ConcatCorpus],
    capacity: int,
    *,
    one_in: int,
    cache_dir: Path | str | None = None,
    axis: Axis = SOLO,
    log: Log = log_info,
    multiple_of: int = 1,
    seed: int | None = None,
) -> tuple[PackedCorpus, PackedCorpus, dict[str, dict[str, Any]]]:
    """Split each corpus into training and held-out rows, and concatenate the rows of all corpora.

    Each corpus is split by `corpora.hold_out` and packed by `split_held_out`; `concat_packed`
    concatenates the rows.

    Args:
        corpora: The corpora by name.
        capacity: Tokens per row.
        one_in: About one document in `one_in` is held out.
        cache_dir: As in `load_or_pack_bins`, and so the next four.
        axis: The ranks that call this together.
        log: Called with messages.
        multiple_of: The alignment of each piece.
        seed: The seed of the packing.

    Returns:
        The training rows; the held-out rows; and for each corpus a report of its training rows,
        with the numbers of empty and of held-out documents.

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
    rows: dict[str, PackedCorpus] = {}
    held_out: dict[str, PackedCorpus] = {}
    reports: dict[str, dict[str, Any]] = {}
    for name, given in corpora.items():
        corpus, mask = hold_out(given, one_in=one_in, piece=capacity)
        rows[name], held_out[name] = data.split_held_out(
            corpus,
            mask,
            capacity,
            cache_dir=cache_dir,
            axis=axis,
            log=log,
            multiple_of=multiple_of,
            seed=seed,
        )
        reports[name] = {
            # With length 0 held-out documents count as empty, not as dropped.
            **report_packing(rows[name].bins, corpus.lengths * ~mask),
            "empty_documents": int((corpus.lengths == 0).sum()),
            "held_out_documents": int(mask.sum()),
        }
    return data.concat_packed(rows), data.concat_packed(held_out), reports


def pack_examples(
    examples: Iterable[tuple[str, str]],
    capacity: int,
    *,
    tokenizer: Any,
    multiple_of: int = 1,
    seed: int | None = None,
) -> PackedCorpus:
    """Pack questions and answers into rows; only the answers are in the loss.

    Args:
        examples: Pairs of a question and an answer.
        capacity: Tokens per row; a longer example is an error.
        tokenizer: Its BOS, if it has one, begins a question, and its EOS ends an answer.
        multiple_of: As in `pack_bins`.
        seed: As in `pack_bins`.

    Raises:
        DataError: As `pack_bins`.

    Examples:
        >>> from trainkit.text.tokenizers import make_byte_tokenizer
        >>> rows = pack_examples([("1+1=", "2")], 8, tokenizer=make_byte_tokenizer())
        >>> rows.corpus.loss_mask.tolist()
        [0, 0, 0, 0, 0, 1, 1]
    """
    # As `encode_document` begins a document: a pretrained model knows it so.
    bos = [] if tokenizer.bos_id is None else [tokenizer.bos_id]

    def encode(question: str, answer: str) -> Sample:
        prompt = [*bos, *tokenizer.encode(question)]
        completion = [*tokenizer.encode(answer), tokenizer.eos_id]
        # Encoded separately, so that generation, which sees the prompt alone, has the same tokens.
        tokens = np.array([*prompt, *completion])
        return Sample(tokens, np.arange(len(tokens)) >= len(prompt))

    corpus = make_corpus(encode(*example) for example in examples)
    bins = pack_bins(corpus.lengths, capacity, multiple_of=multiple_of, overlong="error", seed=seed)
    return data.PackedCorpus(corpus, bins)


def split_pairs(
    corpus: Any,
    capacity: int,
    *,
    multiple_of: int = 1,
    log: Log = log_info,
) -> tuple[PackedCorpus, PackedCorpus]:
    """Pack preference pairs into training and held-out rows; no pair is in both.

    Args:
        corpus: The pairs, from `open_pairs`.
        capacity: Tokens per row; longer pairs are dropped.
        multiple_of: As in `chat.pack_pairs`.
        log: Called with a warning if pairs are dropped.

    Returns:
        The training rows, and the held-out rows.

    Examples:
        >>> from trainkit.data import make_corpus
        >>> corpus = make_corpus([[1, 2], [3], [4], [5, 6]], names=["a", "a", "b", "b"])
        >>> rows, held_out = split_pairs(corpus, 8)
        >>> len(rows.bins.documents) + len(held_out.bins.documents)
        4
    """
    # Both halves of a pair have one name, so they are on the same side.
    mask = held_out_documents(corpus)
    rows, held_out = (
        data.PackedCorpus(
            corpus,
            pack_pairs(
                np.where(excluded, 0, corpus.lengths),
                capacity,
                multiple_of=multiple_of,
                overlong="drop",
            ),
        )
        # A length of 0 leaves a pair out of the rows.
        for excluded in (mask, ~mask)
    )
    num_pairs = len(corpus.lengths) // 2
    num_packed = (len(rows.bins.documents) + len(held_out.bins.documents)) // 2
    warning = format_overlong_warning(
        num_pairs, capacity=capacity, dropped=num_pairs - num_packed, what="pairs"
    )
    if warning:
        log(warning)
    return rows, held_out


def pack_mismatched_answers(rows: PackedCorpus) -> PackedCorpus:
    """Pack the chosen answers of pairs, each after the prompt of another pair; for KTO.

    Args:
        rows: Rows of pairs, from `split_pairs`.

    Returns:
        Rows of the same capacity; see `chat.mismatch_answers`.

    Examples:
        >>> from trainkit.data import PackedCorpus, make_corpus
        >>> from trainkit.text.chat import pack_pairs
        >>> halves = [Sample(np.array([i, i + 5]), np.array([False, True])) for i in range(4)]
        >>> corpus = make_corpus(halves)
        >>> others = pack_mismatched_answers(PackedCorpus(corpus, pack_pairs(corpus.lengths, 8)))
        >>> others.corpus.tokens.tolist()
        [0, 7, 2, 5]
    """
    # Only pairs that are in a row, neither dropped nor held out.
    corpus: Any = rows.corpus
    # Every row has whole pairs, chosen first, so the even places are the chosen halves.
    chosen = set(rows.bins.documents[::2].tolist())
    halves: Iterator[Any] = (
        half for document, half in enumerate(iterate_documents(corpus)) if document in chosen
    )
    others = make_corpus(mismatch_answers(halves), vocab_size=corpus.vocab_size)
    # A prompt with another pair's answer may be longer than a row.
    bins = pack_bins(
        others.lengths, rows.bins.capacity, multiple_of=rows.bins.multiple_of, overlong="drop"
    )
    return data.PackedCorpus(others, bins)
