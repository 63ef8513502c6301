"""Corpora packed into rows: split into training and held-out rows, or made of examples."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from trainkit.data.corpus import make_corpus
from trainkit.data.packed import PackedCorpus, concat_packed, split_held_out
from trainkit.packing import pack_bins, report_packing
from trainkit.text.corpora.open import hold_out
from trainkit.types import SOLO, Log, Sample, log_info

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from trainkit.data.concat import ConcatCorpus
    from trainkit.data.corpus import TokenCorpus
    from trainkit.types import Axis


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
    """Hold out a part of each corpus, pack both parts into rows, and join the corpora.

    Each corpus is split by `corpora.hold_out`, packed by `split_held_out`, and joined by
    `concat_packed`.

    Args:
        corpora: The corpora by name.
        capacity: Tokens per row.
        one_in: About one document in so many is held out.
        cache_dir: As in `load_or_pack_bins`, and so all that follow.
        axis: The ranks that call this together.
        log: Called with one sentence about each thing worth knowing.
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
            log=log,
            multiple_of=multiple_of,
            seed=seed,
        )
        reports[name] = {
            **report_packing(rows[name].bins, corpus.lengths * ~is_held),
            "empty_documents": int((corpus.lengths == 0).sum()),
            "held_out_documents": int(is_held.sum()),
        }
    return concat_packed(rows), concat_packed(held_out), reports


def pack_examples(
    examples: Iterable[tuple[str, str]],
    capacity: int,
    *,
    tokenizer: Any,
    multiple_of: int = 1,
    seed: int | None = None,
) -> PackedCorpus:
    """Pack questions with their answers into rows, of which the answers are trained on.

    Args:
        examples: Each a question and its answer.
        capacity: Tokens per row; a longer example is refused.
        tokenizer: Its BOS, if it has one, begins a question, and its EOS ends an answer.
        multiple_of: As for `pack_bins`.
        seed: As for `pack_bins`.

    Raises:
        DataError: As `pack_bins`.

    Examples:
        >>> from trainkit.text.tokenizers import make_byte_tokenizer
        >>> rows = pack_examples([("1+1=", "2")], 8, tokenizer=make_byte_tokenizer())
        >>> rows.corpus.trained.tolist()
        [0, 0, 0, 0, 0, 1, 1]
    """
    begin = [] if tokenizer.bos_id is None else [tokenizer.bos_id]

    def encode(question: str, answer: str) -> Sample:
        asked = [*begin, *tokenizer.encode(question)]
        answered = [*tokenizer.encode(answer), tokenizer.eos_id]
        return Sample(
            np.array([*asked, *answered]), np.arange(len(asked) + len(answered)) >= len(asked)
        )

    corpus = make_corpus(encode(*example) for example in examples)
    bins = pack_bins(corpus.lengths, capacity, multiple_of=multiple_of, overlong="error", seed=seed)
    return PackedCorpus(corpus, bins)
