"""Log-probabilities of the tokens of a corpus, which may then be a column of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from trainkit.corpora.tokens import TokenCorpus
from trainkit.evaluation.examples import Example
from trainkit.evaluation.score import Score
from trainkit.types import at_least


def corpus_logprobs(
    score: Score,
    corpus: TokenCorpus,
    documents: Iterable[int] | None = None,
    *,
    group: int = 1024,
) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return the log-probability of each trained token of a corpus, given those before it.

    As the value of a `Column` of labels it is what a frozen model, a reference, says of what
    another one learns: `reference_logprobs` of `losses.dpo`.

    Args:
        score: What scores examples, from `bind_score`; on all ranks.
        corpus: Any in memory, or a token file.
        documents: The numbers of those to be scored; by default all.
        group: How many documents are scored together.

    Returns:
        fp32 `[T]`, 0 for tokens that are not trained, for a document's first, and for documents
        that are not to be scored; equal on all ranks.

    Raises:
        NumericsError: A log-probability is not finite.
        ValueError: `group` is below 1.

    Effects:
        Those of `score`.

    Examples:
        >>> from trainkit.corpora.tokens import memory_corpus
        >>> from trainkit.evaluation.score import Scored
        >>> from trainkit.types import Sample
        >>> half = lambda examples: [Scored(np.full(x.scored, -0.5), True) for x in examples]
        >>> asked = Sample(np.arange(4), np.array([False, False, True, False]))
        >>> corpus_logprobs(half, memory_corpus([asked]))
        array([ 0. ,  0. , -0.5,  0. ], dtype=float32)
    """
    at_least(1, "corpus_logprobs", group=group)
    count = len(corpus.tokens)
    asked = np.ones(count, bool) if corpus.trained is None else corpus.trained.astype(bool)
    chosen = range(len(corpus.offsets) - 1) if documents is None else documents
    bounds = [(int(corpus.offsets[i]), int(corpus.offsets[i + 1])) for i in chosen]
    ranges = [(b, e, np.flatnonzero(asked[b + 1 : e])) for b, e in bounds]
    ranges = [(b, e, b + 1 + int(places[0])) for b, e, places in ranges if len(places)]
    values = np.zeros(count, np.float32)
    for at in range(0, len(ranges), group):
        own = ranges[at : at + group]
        examples = [Example(corpus.tokens[b:e].astype(np.int64), e - first) for b, e, first in own]
        for (_, end, first), scored in zip(own, score(examples), strict=True):
            values[first:end] = np.where(asked[first:end], scored.logprobs, 0)
    return values
