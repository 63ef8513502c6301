"""`open_corpus`: a file or directory of any format as documents of tokens."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import attrs
import numpy as np

from trainkit.buckets.files import mount_files
from trainkit.data.concat import ConcatCorpus, combine_digests, concat_corpora, fingerprint
from trainkit.data.corpus import TokenCorpus, collect_documents, make_corpus
from trainkit.data.documents import check_columns
from trainkit.noise.hashing import GOLDEN, make_key, mix_bits
from trainkit.noise.jit import jit
from trainkit.text.corpora.python_library import (
    docstring_conversations,
    is_library_source,
    standard_library,
)
from trainkit.text.corpora.records import describe_record, list_document_files, read_records
from trainkit.text.corpora.shards import find_token_files, open_parts
from trainkit.text.corpora.text_files import TEXT_SUFFIXES, check_readable
from trainkit.text.tokenizers import make_byte_tokenizer
from trainkit.text.tokenizers.documents import encode_documents, make_text_encoder
from trainkit.text.tokenizers.open import list_compatible_hashes
from trainkit.types import Corpus, DataError, check_range

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import ArrayLike

    from trainkit.types import Sample, Tokenizer

    Encode = Callable[[Mapping[str, Any]], ArrayLike | Sample]

T = TypeVar("T")
C = TypeVar("C", bound=Corpus)


def open_corpus(
    path: str | os.PathLike[str],
    *,
    tokenizer: Tokenizer | None = None,
    field: str = "text",
    suffixes: Sequence[str] = TEXT_SUFFIXES,
    keep: Callable[[str], bool] | None = None,
    encode: Encode | None = None,
    eos_id: int | None = None,
    template: str | None = None,
) -> TokenCorpus | ConcatCorpus:
    """Open a file or a directory as a corpus; the suffix alone decides on the format.

    - A text file, which is one document; or a directory of them, sorted by relative path.
    - A `.jsonl`, `.parquet` or `.arrow` file (the last two with the extra `data`): each line or row
      is a document. Or a directory of such files, all of one format.
    - A `.tokens` file, from `write_corpus`.
    - A `.npy` file of integers; a `.bin` file of raw integers with a sidecar `FILE.json` that has
      at least {"dtype": "uint16"}; Megatron's `.idx` with its `.bin`.
    - A directory of token files, all of one format, sorted by name.

    Text is tokenized here into memory; write it into a token file to tokenize it once for many
    runs. Files of tokens are mapped, and a part of them is read to check that they are intact. The
    corpus' `sources` has a hash of each file.

    Args:
        path: The directory or file; or its URL in a bucket, which is read by ranges
            (`mount_files`).
        tokenizer: For text; bytes by default. It must cover the vocabulary of files of tokens, and
            be the tokenizer that made them, if they store which (see `list_compatible_hashes`).
        field: The field of each line or row that holds the text.
        suffixes: The suffixes of text files.
        keep: Whether to take a document, by its relative path or its line number (from 1, in
            decimal).
        encode: Converts a record to token ids or a `Sample`, in place of `tokenizer` and `field`.
            Its attribute `columns`, if it has one, declares the `Column`s of its samples.
        eos_id: The last token of a document, in files of tokens without document offsets. Without
            it such a file is one document.
        template: The name of the model's chat template, as `chat.load_template` takes it. A token
            file of conversations with another template is rejected.

    Returns:
        The corpus; a `ConcatCorpus` for a directory of token files.

    Raises:
        DataError: The path is missing, unreadable, empty, damaged, binary, of an unknown format or
            of two; or a token is outside the vocabulary; or the tokenizer or the template is
            another one. The message names the position.
        DiskError: The disk fails.
        ConfigError: A parquet or arrow file, and pyarrow is missing; or there is no such template.
        ValueError: An argument that does not apply to the format.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = (Path(folder) / "a.txt").write_text("hi")
        ...     corpus = open_corpus(folder)
        >>> corpus.read(0, 0, 4)
        array([256, 104, 105, 257], dtype=uint16)
    """
    path = mount_files(os.fspath(path))
    check_readable(path)
    names = find_token_files(path, suffixes=suffixes, keep=keep)
    if names:
        if keep is not None or encode is not None:
            raise ValueError(
                f"open_corpus: {path}: documents of a token file have no names for `keep`, and no "
                "records for `encode`; choose and encode when you write it"
            )
        parts = open_parts(
            path if path.is_dir() else path.parent,
            names,
            vocab_size=getattr(tokenizer, "vocab_size", None),
            eos_id=eos_id,
        )
        _check_templates(path, parts, template)
        _check_tokenizer(path, parts, tokenizer)
        return concat_corpora(parts) if path.is_dir() else parts[0]
    if eos_id is not None:
        raise ValueError(f"open_corpus: {path}: eos_id is for files of tokens")
    if encode is not None:
        # An encoder of `make_chat_encoder` has the size of its tokenizer's vocabulary.
        vocab_size = getattr(tokenizer or encode, "vocab_size", None)
        return _encode_files(path, encode, vocab_size, suffixes, keep)
    tokenizer = tokenizer or make_byte_tokenizer()
    # Of records `field` holds the text; a text file is read as a record with `text`.
    first = list_document_files(path, suffixes=suffixes, keep=keep)[0]
    encode = make_text_encoder(
        tokenizer, field="text" if first.endswith(tuple(suffixes)) else field
    )
    corpus = _encode_files(path, encode, getattr(tokenizer, "vocab_size", None), suffixes, keep)
    # A document of BOS and EOS alone has no text.
    num_separators = len(encode_documents(tokenizer, [""])[0])
    # Better now than a run that trains on separators.
    if (corpus.lengths <= num_separators).all():
        raise DataError(
            f"open_corpus: {path}: there is no text: all documents ({len(corpus.lengths)}) are "
            "empty",
            where=path,
            hint="check the path that --data names, and the field that --field names",
        )
    return corpus


def open_library_corpus(tokenizer: Tokenizer | None = None) -> TokenCorpus | ConcatCorpus:
    """Open the source code of Python's standard library, which every machine has, as a corpus.

    Args:
        tokenizer: Bytes by default.

    Raises:
        DataError: As `open_corpus`: this Python is installed without its source.
    """
    return open_corpus(standard_library(), tokenizer=tokenizer, keep=is_library_source)


def _check_tokenizer(path: Path, parts: Sequence[TokenCorpus], tokenizer: Tokenizer | None) -> None:
    """Raise DataError if tokens are outside the tokenizer's vocabulary, or from another one."""
    vocab_size = getattr(tokenizer, "vocab_size", None)
    covered = () if tokenizer is None else list_compatible_hashes(tokenizer)
    for part in parts:
        # As the user gave it to `prepare`, so that it can be given again.
        name = part.made_with.get("tokenizer")
        if part.vocab_size is not None and vocab_size is not None and part.vocab_size > vocab_size:
            advice = "" if name is None else f"; give --tokenizer {name}, which made it"
            raise DataError(
                f"{path}: its vocabulary of {part.vocab_size} is larger than the tokenizer's, "
                f"{vocab_size}{advice}",
                where=path,
                got=part.vocab_size,
                want=vocab_size,
            )
        if covered and part.tokenizer_hash is not None and part.tokenizer_hash not in covered:
            file = path if part.file is None else part.file.path
            its_name = (
                "the one that made it, or make it again"
                if name is None
                else f"{name}, which made it"
            )
            raise DataError(
                f"{file}: its tokens were made by the tokenizer {part.tokenizer_hash}, and this "
                f"one is {covered[-1]}; the same ids mean other text: give --tokenizer {its_name}",
                where=file,
                got=part.tokenizer_hash,
                want=covered[-1],
                hint="the hashes are those of tokenizer_hash",
            )


def _check_templates(path: Path, parts: Sequence[TokenCorpus], template: str | None) -> None:
    """Raise DataError if conversations were written with another chat template."""
    # Only files of conversations store a template.
    with_template = [part for part in parts if part.template_hash is not None]
    if template is None or not with_template:
        return
    from trainkit.text.chat import template_hash  # noqa: PLC0415 (few corpora need it)

    expected = template_hash(template)
    for part in with_template:
        if part.template_hash != expected:
            file = path if part.file is None else part.file.path
            raise DataError(
                f"{file}: its conversations were written with the template "
                f"{part.made_with.get('template', 'another')} ({part.template_hash}), and the "
                f"model's is {template} ({expected}); take that one by --template, or make the "
                f"file again: python -m trainkit prepare --messages --template {template}",
                where=file,
                got=part.template_hash,
                want=expected,
            )


# ----------------------------------------------------------------------------- held-out documents


def is_held_out(name: str, *, one_in: int = 20) -> bool:
    """Return whether a document is held out from training, by a hash of its name.

    About one in `one_in` is. The result does not depend on the other documents, or on the machine.

    Examples:
        >>> sum(is_held_out(f"{i}.py") for i in range(1000))
        57
    """
    check_range("is_held_out", at_least=1, one_in=one_in)
    # Not Python's `hash`, which differs between processes; file names may hold surrogates.
    digest = hashlib.sha256(name.encode(errors="surrogateescape")).digest()
    return int.from_bytes(digest[:8], "little") % one_in == 0


def held_out_documents(
    corpus: TokenCorpus | ConcatCorpus, *, one_in: int = 20
) -> np.ndarray[Any, Any]:
    """Return a mask of the held-out documents of a corpus: bool `[N]`, by their names.

    In a corpus without names, such as a token file, the mask is a hash of the document's index: it
    stays the same when documents are appended, not when some are inserted before. Set the lengths
    to 0 where the mask is true to pack rows for training, and where it is false for evaluation.

    Args:
        corpus: The corpus.
        one_in: About one document in `one_in` is held out.

    Raises:
        ValueError: `one_in` is below 1.

    Examples:
        >>> corpus = TokenCorpus(np.arange(100), np.arange(101))
        >>> np.flatnonzero(held_out_documents(corpus))
        array([12, 22, 34, 49])
    """
    check_range("held_out_documents", at_least=1, one_in=one_in)
    names = corpus.names
    if names is not None:
        return np.array([is_held_out(name, one_in=one_in) for name in names], dtype=bool)
    mask = np.empty(len(corpus.offsets) - 1, dtype=bool)
    _fill_held_out(np.uint64(make_key("held out")), np.uint64(one_in), mask)
    return mask


@jit
def _fill_held_out(key: np.uint64, one_in: np.uint64, mask: Any) -> None:
    for document in range(mask.size):
        mask[document] = mix_bits(key + np.uint64(document) * np.uint64(GOLDEN)) % one_in == 0


def open_conversations(
    path: Path | None, encode: Encode, *, tokenizer: Any, template: str | None = None
) -> TokenCorpus | ConcatCorpus:
    """Open conversations as a corpus with a loss mask.

    Args:
        path: A .jsonl, .parquet or .arrow file with a field `messages`, or a .tokens file that was
            made from one; None for `docstring_conversations`.
        encode: Converts a record to a `Sample`: a function from `chat.make_chat_encoder`.
        tokenizer: The tokenizer of `encode`, with a `vocab_size`; for a .tokens file the one that
            made it.
        template: The name of the chat template of `encode`, which must be that of a .tokens file;
            None skips the check.

    Raises:
        DataError: As `open_corpus`; or a .tokens file has no loss mask.

    Examples:
        >>> import tempfile
        >>> from trainkit.text.chat import CHATML_SPECIAL, make_chat_encoder
        >>> from trainkit.text.chat.templates import TEMPLATES
        >>> tokenizer = make_byte_tokenizer(CHATML_SPECIAL)
        >>> encode = make_chat_encoder(tokenizer, template=TEMPLATES["chatml"])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = Path(folder) / "a.jsonl"
        ...     turns = '{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}'
        ...     _ = file.write_text('{"messages": [' + turns + "]}")
        ...     corpus = open_conversations(file, encode, tokenizer=tokenizer)
        >>> int(corpus.loss_mask.sum())
        2
    """
    if path is None:
        names, records = zip(*docstring_conversations(), strict=True)
        return make_corpus(map(encode, records), vocab_size=tokenizer.vocab_size, names=names)
    if path.suffix != ".tokens":
        return open_corpus(path, encode=encode)
    corpus = open_corpus(path, tokenizer=tokenizer, template=template)
    if isinstance(corpus, TokenCorpus) and corpus.loss_mask is None:
        raise DataError(
            f"{path}: it has no loss mask, so nothing marks the assistant's tokens; write it with "
            "python -m trainkit prepare --messages",
            where=path,
        )
    return corpus


def hold_out(
    corpus: TokenCorpus | ConcatCorpus, *, piece: int, one_in: int = 20
) -> tuple[TokenCorpus | ConcatCorpus, np.ndarray[Any, Any]]:
    """Return a corpus and the mask of its held-out documents, which are chunks if there are few.

    Whole documents are held out, as by `held_out_documents`, if they have at most a quarter of the
    tokens, and at least one. In a corpus of few documents they may have more, or none. Then
    documents are first split into chunks of `piece` tokens, and chunks are held out in the same
    way, at least the last one.

    Args:
        corpus: The corpus.
        piece: Tokens of a chunk, for instance a row's.
        one_in: About one document, or chunk, in `one_in` is held out.

    Returns:
        The corpus, or a view of it with a document for each chunk; bool `[N]`.

    Raises:
        ValueError: `piece` or `one_in` is below 1.

    Examples:
        >>> corpus, chosen = hold_out(TokenCorpus(np.arange(10), np.array([0, 10])), piece=4)
        >>> corpus.lengths, chosen
        (array([4, 4, 2]), array([False, False,  True]))
    """
    check_range("hold_out", at_least=1, piece=piece)
    mask = held_out_documents(corpus, one_in=one_in)
    lengths = corpus.lengths
    # Evaluation needs some tokens, and training most of them.
    if 0 < lengths[mask].sum() * 4 <= lengths.sum():
        return corpus, mask
    # By part, as the parts stay mapped files: nothing is copied.
    if isinstance(corpus, ConcatCorpus):
        corpus = concat_corpora(_split_documents(part, piece) for part in corpus.parts)
    else:
        corpus = _split_documents(corpus, piece)
    mask = held_out_documents(corpus, one_in=one_in)
    # By chance the hash may select no chunk; evaluation needs one, and training the others.
    if not mask.any() and len(mask) > 1:
        mask[-1] = True
    return corpus, mask


def _split_documents(corpus: TokenCorpus, chunk_length: int) -> TokenCorpus:
    """Return a view of a corpus whose documents are split after every `chunk_length` tokens."""
    chunks_per_document = -(-corpus.lengths // chunk_length)
    first_chunk = np.cumsum(chunks_per_document) - chunks_per_document
    # The index of each chunk within its document.
    index = np.arange(chunks_per_document.sum()) - np.repeat(first_chunk, chunks_per_document)
    starts = np.repeat(corpus.offsets[:-1], chunks_per_document) + index * chunk_length
    # Other documents are another corpus, so its digest is another one too.
    digest = corpus.digest
    return attrs.evolve(
        corpus,
        offsets=np.append(starts, corpus.offsets[-1]),
        # Chunks are held out by their indices: names of documents would keep them together.
        names=None,
        digest=None if digest is None else combine_digests([digest, str(chunk_length)]),
    )


def count_document_labels(corpus: TokenCorpus | ConcatCorpus) -> np.ndarray[Any, Any]:
    """Count the labels of each document: int64 `[N]`.

    A document without labels uses room in a row and contributes nothing to the loss. Set the
    lengths to 0 where the count is 0 to leave it out of the packed rows; the packing report counts
    it as empty.

    Args:
        corpus: The corpus. The first token of a document is never a label.

    Examples:
        >>> from trainkit.data.corpus import make_corpus
        >>> from trainkit.types import Sample
        >>> chosen = ([True, False, True], [True, False])
        >>> corpus = make_corpus(Sample(np.arange(len(x)), np.array(x)) for x in chosen)
        >>> count_document_labels(corpus)
        array([1, 0])
    """
    # By part: the documents of a `ConcatCorpus` have no common array.
    counts = []
    for part in getattr(corpus, "parts", [corpus]):
        # Without a mask every token but the first of its document is a label.
        part_counts = np.maximum(part.lengths - 1, 0)
        if part.loss_mask is not None:
            _count_labels(np.asarray(part.loss_mask), part.offsets, part_counts)
        counts.append(part_counts)
    return np.concatenate(counts)


@jit
def _count_labels(loss_mask: Any, offsets: Any, counts: Any) -> None:
    for document in range(counts.size):
        counts[document] = 0
        for position in range(offsets[document] + 1, offsets[document + 1]):
            counts[document] += loss_mask[position]


def match_recorded_names(corpora: Mapping[str, C], facts: Mapping[str, Any]) -> dict[str, C]:
    """Rename corpora to the names that a run recorded for them, matched by fingerprint.

    A mixture orders the rows of a corpus by its name, and reports its loss under that name. So a
    corpus whose folder was renamed keeps the name that it had.

    Args:
        corpora: The corpora by their present names.
        facts: The facts of the run's checkpoint: "fingerprint of NAME" for each corpus.

    Returns:
        The same corpora in the same order. One whose name is not in the facts gets the recorded
        name of the same fingerprint, if no other corpus has that name; else it keeps its own.

    Examples:
        >>> corpora = {"new": TokenCorpus(np.arange(4), np.array([0, 4]))}
        >>> facts = {"fingerprint of old": fingerprint(corpora["new"])}
        >>> list(match_recorded_names(corpora, facts))
        ['old']
    """
    prefix = "fingerprint of "
    unmatched = {
        name.removeprefix(prefix): value
        for name, value in facts.items()
        if name.startswith(prefix) and name.removeprefix(prefix) not in corpora
    }
    renamed: dict[str, C] = {}
    for name, corpus in corpora.items():
        recorded = name
        # The fingerprint of a corpus in memory takes a pass over it: only where it may matter.
        if unmatched and f"{prefix}{name}" not in facts:
            own = fingerprint(corpus)
            recorded = next((old for old, value in unmatched.items() if value == own), name)
        # A recorded name is taken once: the next corpus with the same content keeps its own.
        unmatched.pop(recorded, None)
        renamed[recorded] = corpus
    return renamed


# ----------------------------------------------------------------------------------------- encoding


def _encode_files(
    path: Path,
    encode: Encode,
    vocab_size: int | None,
    suffixes: Sequence[str],
    keep: Callable[[str], bool] | None,
) -> TokenCorpus:
    """Encode the records at a path into a corpus in memory."""
    names: list[str] = []
    sources: dict[str, str] = {}

    def iterate_documents() -> Iterator[tuple[str, ArrayLike | Sample]]:
        for name, record in read_records(path, suffixes=suffixes, keep=keep, sources=sources):
            names.append(name)
            origin = describe_record(path, name)
            yield origin, encode_record(encode, record, origin)

    corpus = collect_documents(
        iterate_documents(),
        vocab_size=vocab_size,
        columns=check_columns("open_corpus", getattr(encode, "columns", None)),
    )
    if not len(corpus.tokens):
        kinds = f"files ending in {', '.join(suffixes)}" if path.is_dir() else "lines or rows"
        if not names:
            raise DataError(f"{path}: no documents: of its {kinds}, none is selected", where=path)
        # A chat encoder returns no tokens for a conversation that it drops.
        dropped = getattr(encode, "counts", {}).get("dropped", 0)
        raise DataError(
            f"{path}: no documents: of its {kinds}, none has a token"
            f"{f': {dropped} were dropped, as too long' if dropped else ''}",
            where=path,
        )
    return attrs.evolve(corpus, names=names, sources=sources)


def encode_record(encode: Callable[[Any], T], record: Mapping[str, Any], origin: str) -> T:
    """Call `encode` on a record; its errors become a DataError that names the record.

    Raises:
        DataError: `encode` raises anything.

    Examples:
        >>> encode_record(len, {"a": 1}, "x.jsonl: line 1")
        1
    """
    # An encoder is anybody's code: whatever it raises, the record is named.
    try:
        return encode(record)
    except Exception as error:
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise DataError(f"{origin}: {kind}{error}", where=origin) from error
