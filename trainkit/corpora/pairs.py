"""Pairs of answers, of which one is preferred: from a file, or from Python's standard library."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from trainkit.corpora.library import docstring_conversations
from trainkit.corpora.open import encode_record
from trainkit.corpora.records import read_records, record_place
from trainkit.corpora.text import bad_file
from trainkit.corpora.tokens import TokenCorpus, memory_corpus
from trainkit.noise.hashing import key_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from trainkit.types import Sample

    EncodePair = Callable[[Mapping[str, Any]], tuple[Sample, Sample]]


def open_pairs(path: Path | None, encode: EncodePair, *, vocab_size: int) -> TokenCorpus:
    """Open pairs of answers as a corpus: document 2i is the chosen one of pair i, 2i + 1 the other.

    Both have the name of their record, so that `held_out_documents` holds out pairs whole, and
    `chat.pack_pairs` packs them.

    Args:
        path: A .jsonl, .parquet or .arrow file with fields `prompt`, `chosen` and `rejected`; None
            for `disorder_answers` of `docstring_conversations`.
        encode: From a record to the chosen and the rejected `Sample`: `chat.encode_pair` with a
            tokenizer.
        vocab_size: No token may be this large or larger.

    Raises:
        DataError: As `read_records`; or a record is no pair, or there is none. The message names
            the line or row.

    Examples:
        >>> import tempfile
        >>> from functools import partial
        >>> from trainkit.chat import CHATML_SPECIAL, encode_pair
        >>> from trainkit.tokenizers import byte_tokenizer
        >>> tokenizer = byte_tokenizer(CHATML_SPECIAL)
        >>> encode = partial(encode_pair, tokenizer=tokenizer)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = Path(folder) / "pairs.jsonl"
        ...     _ = file.write_text('{"prompt": "1+1?", "chosen": "2", "rejected": "11"}')
        ...     corpus = open_pairs(file, encode, vocab_size=tokenizer.vocab_size)
        >>> corpus.lengths, corpus.names
        (array([26, 27]), ['1', '1'])
    """
    names: list[str] = []
    sources: dict[str, str] = {}

    def halves() -> Iterator[Sample]:
        own = disorder_answers(docstring_conversations())
        records = own if path is None else read_records(path, sources=sources)
        for name, record in records:
            names.extend([name, name])
            where = name if path is None else record_place(path, name)
            yield from encode_record(encode, record, where)

    corpus = memory_corpus(halves(), vocab_size=vocab_size)
    if path is not None and not names:
        raise bad_file(path, "no pairs: it has no lines or rows")
    return attrs.evolve(corpus, names=names, sources=sources)


def disorder_answers(
    conversations: Iterable[tuple[str, Mapping[str, Any]]],
) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield pairs: the answer to a question, and the same words in another order.

    So neither length nor words tell the two apart. The order follows from the answer alone. An
    answer of which every order is the same, such as one word, makes no pair.

    Args:
        conversations: Each with its name: a question and its answer, as `docstring_conversations`
            gives them.

    Returns:
        An iterator of (name, {"prompt": ..., "chosen": ..., "rejected": ...}).

    Examples:
        >>> talk = {"messages": [{"content": "def f(x)"}, {"content": "Return the sum of x."}]}
        >>> [(_, pair)] = disorder_answers([("a.py:1", talk)])
        >>> pair["rejected"] != pair["chosen"], sorted(pair["rejected"].split())
        (True, ['Return', 'of', 'sum', 'the', 'x.'])
    """
    for name, record in conversations:
        prompt, chosen = (message["content"] for message in record["messages"])
        words = chosen.split()
        order = sorted(range(len(words)), key=lambda i, answer=chosen: key_of(answer, i))
        rejected = " ".join(words[i] for i in order)
        if rejected == chosen:
            rejected = " ".join([*words[1:], *words[:1]])
        if rejected != chosen:
            yield name, {"prompt": prompt, "chosen": chosen, "rejected": rejected}
