"""Preference pairs, from a file or from Python's standard library."""

from __future__ import annotations

from collections import Counter
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from trainkit.buckets.files import mount_files
from trainkit.data.corpus import TokenCorpus, make_corpus
from trainkit.text.chat import encode_preference_pair, format_answers_warning, load_template
from trainkit.text.corpora.open import encode_record
from trainkit.text.corpora.python_library import docstring_conversations
from trainkit.text.corpora.records import describe_record, read_records
from trainkit.types import DataError, Log, log_info

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from trainkit.types import Sample

    EncodePair = Callable[[Mapping[str, Any]], tuple[Sample, Sample]]


def open_pairs(path: Path | None, encode: EncodePair, *, vocab_size: int) -> TokenCorpus:
    """Open preference pairs as a corpus: documents 2i and 2i + 1 are chosen and rejected.

    Both have the name of their record, so that `held_out_documents` keeps pairs together, and
    `chat.pack_pairs` packs them.

    Args:
        path: A .jsonl, .parquet or .arrow file with fields `prompt`, `chosen` and `rejected`; None
            for `prolong_answers` of every third of `docstring_conversations`.
        encode: Converts a record to the chosen and the rejected `Sample`:
            `chat.encode_preference_pair` with a tokenizer.
        vocab_size: Exclusive upper bound of the ids.

    Raises:
        DataError: As `read_records`; or a record is no pair, or there is none. The message names
            the line or row.

    Examples:
        >>> import tempfile
        >>> from functools import partial
        >>> from trainkit.text.chat import CHATML_SPECIAL, encode_preference_pair
        >>> from trainkit.text.tokenizers import make_byte_tokenizer
        >>> tokenizer = make_byte_tokenizer(CHATML_SPECIAL)
        >>> encode = partial(encode_preference_pair, tokenizer=tokenizer)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = Path(folder) / "pairs.jsonl"
        ...     _ = file.write_text('{"prompt": "1+1?", "chosen": "2", "rejected": "11"}')
        ...     corpus = open_pairs(file, encode, vocab_size=tokenizer.vocab_size)
        >>> corpus.lengths, corpus.names
        (array([26, 27]), ['1', '1'])
    """
    # Filled by the generator while `make_corpus` runs it.
    names: list[str] = []
    sources: dict[str, str] = {}

    def encode_pairs() -> Iterator[Sample]:
        if path is None:
            records = prolong_answers(islice(docstring_conversations(), None, None, 3))
        else:
            # Adds the hash of the file to `sources`.
            records = read_records(path, sources=sources)
        for name, record in records:
            # One name for both halves: they are held out together.
            names.extend([name, name])
            origin = name if path is None else describe_record(path, name)
            yield from encode_record(encode, record, origin)

    corpus = make_corpus(encode_pairs(), vocab_size=vocab_size)
    if path is not None and not names:
        raise DataError(f"{path}: no pairs: it has no lines or rows", where=path)
    return attrs.evolve(corpus, names=names, sources=sources)


def open_preferences(
    path: Path | None,
    *,
    tokenizer: Any,
    template: str,
    log: Log = log_info,
) -> TokenCorpus:
    """Open preference pairs as tokens, written by a chat template.

    `open_pairs` with `chat.encode_preference_pair`.

    Args:
        path: As in `open_pairs`.
        tokenizer: As in `chat.encode_preference_pair`.
        template: The name of the template, as in `chat.load_template`.
        log: Called with the name of the source, and with a warning if the template hides answers.

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
    path = None if path is None else mount_files(path, log=log)
    log(f"reading {path or 'pairs of docstrings from the standard library'}")
    counts: Counter[str] = Counter()
    encode = partial(
        encode_preference_pair, tokenizer=tokenizer, template=load_template(template), counts=counts
    )
    pairs = open_pairs(path, encode, vocab_size=tokenizer.vocab_size)
    # Only now: `counts` is complete when all pairs are encoded.
    if warning := format_answers_warning(counts):
        log(warning)
    return pairs


def prolong_answers(
    conversations: Iterable[tuple[str, Mapping[str, Any]]],
) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield preference pairs in which the rejected answer runs on into the answer that follows.

    The rejected answer begins as the chosen one and is as well written, but does not stop. The
    last one runs on into the first.

    Args:
        conversations: (name, conversation) with a question and an answer, the form of
            `docstring_conversations`.

    Returns:
        An iterator of (name, {"prompt": ..., "chosen": ..., "rejected": ...}).

    Examples:
        >>> talks = [("1", "f(x)", "Return x."), ("2", "g()", "Do nothing.")]
        >>> turns = [(name, {"messages": [{"content": q}, {"content": a}]}) for name, q, a in talks]
        >>> next(prolong_answers(turns))
        ('1', {'prompt': 'f(x)', 'chosen': 'Return x.', 'rejected': 'Return x. Do nothing.'})
    """
    # (name, question, answer)
    turns = [
        (name, *(message["content"] for message in conversation["messages"]))
        for name, conversation in conversations
    ]
    # The next function's docstring, mostly of the same file: the same style and subject.
    shifted = [*turns[1:], *turns[:1]]
    for (name, prompt, chosen), (_, _, next_answer) in zip(turns, shifted, strict=True):
        yield (
            name,
            {
                "prompt": prompt,
                "chosen": chosen,
                "rejected": f"{chosen} {next_answer}",
            },
        )
