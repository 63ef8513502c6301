"""Pairs of answers, of which one is preferred: from a file, or from Python's standard library."""

from __future__ import annotations

from collections import Counter
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from trainkit.data.corpus import TokenCorpus, make_corpus
from trainkit.files import bad_file
from trainkit.text.corpora.library import docstring_conversations
from trainkit.text.corpora.open import encode_record
from trainkit.text.corpora.records import read_records, record_place

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
            for `prolong_answers` of every third of `docstring_conversations`.
        encode: From a record to the chosen and the rejected `Sample`: `chat.encode_preference_pair`
            with a tokenizer.
        vocab_size: No token may be this large or larger.

    Raises:
        DataError: As `read_records`; or a record is no pair, or there is none. The message names
            the line or row.

    Examples:
        >>> import tempfile
        >>> from functools import partial
        >>> from trainkit.text.chat import CHATML_SPECIAL, encode_preference_pair
        >>> from trainkit.text.tokenizers import make_byte_tokenizer
        >>> tokenizer = make_byte_tokenizer(CHATML_SPECIAL)
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
        own = prolong_answers(islice(docstring_conversations(), None, None, 3))
        records = own if path is None else read_records(path, sources=sources)
        for name, record in records:
            names.extend([name, name])
            where = name if path is None else record_place(path, name)
            yield from encode_record(encode, record, where)

    corpus = make_corpus(halves(), vocab_size=vocab_size)
    if path is not None and not names:
        raise bad_file(path, "no pairs: it has no lines or rows")
    return attrs.evolve(corpus, names=names, sources=sources)


def open_preferences(
    path: Path | None,
    *,
    tokenizer: Any,
    template: str,
    tell: Callable[[str], object] | None = None,
) -> TokenCorpus:
    """Open pairs of answers, and write them as tokens by a chat template.

    `open_pairs` with `chat.encode_preference_pair`.

    Args:
        path: As for `open_pairs`.
        tokenizer: As for `chat.encode_preference_pair`.
        template: The name of the template, as for `chat.load_template`.
        tell: Called with what is read, and with a warning of answers of which the template shows
            nothing.

    Raises:
        DataError: As `open_pairs` and `chat.format_answers_warning`.

    Examples:
        >>> import tempfile
        >>> from trainkit.text.chat import CHATML_SPECIAL
        >>> from trainkit.text.tokenizers import make_byte_tokenizer
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = Path(folder) / "pairs.jsonl"
        ...     _ = file.write_text('{"prompt": "1+1?", "chosen": "2", "rejected": "11"}')
        ...     corpus = open_preferences(
        ...         file, tokenizer=make_byte_tokenizer(CHATML_SPECIAL), template="chatml"
        ...     )
        >>> corpus.lengths
        array([26, 27])
    """
    from trainkit.text.chat import encode_preference_pair, format_answers_warning, load_template  # noqa: PLC0415

    tell = tell or str
    tell(f"reading {path or 'pairs of docstrings from the standard library'}")
    counts: Counter[str] = Counter()
    encode = partial(
        encode_preference_pair, tokenizer=tokenizer, template=load_template(template), counts=counts
    )
    pairs = open_pairs(path, encode, vocab_size=tokenizer.vocab_size)
    if warning := format_answers_warning(counts):
        tell(warning)
    return pairs


def prolong_answers(
    conversations: Iterable[tuple[str, Mapping[str, Any]]],
) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield pairs: the answer to a question, and the same answer that goes on with the next one's.

    What is rejected is as good a text as what is chosen, but says more than was asked. The last one
    goes on with the first one's answer.

    Args:
        conversations: Each with its name: a question and its answer, as `docstring_conversations`
            gives them.

    Returns:
        An iterator of (name, {"prompt": ..., "chosen": ..., "rejected": ...}).

    Examples:
        >>> talks = [("1", "f(x)", "Return x."), ("2", "g()", "Do nothing.")]
        >>> turns = [(name, {"messages": [{"content": q}, {"content": a}]}) for name, q, a in talks]
        >>> next(prolong_answers(turns))
        ('1', {'prompt': 'f(x)', 'chosen': 'Return x.', 'rejected': 'Return x. Do nothing.'})
    """
    turns = [(name, *(x["content"] for x in talk["messages"])) for name, talk in conversations]
    for (name, prompt, chosen), (*_, more) in zip(turns, [*turns[1:], *turns[:1]], strict=True):
        yield name, {"prompt": prompt, "chosen": chosen, "rejected": f"{chosen} {more}"}
