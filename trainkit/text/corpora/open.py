"""`open_corpus`: whatever lies at a path, as documents of tokens."""

from __future__ import annotations

import hashlib
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import attrs
import numpy as np

from trainkit.data.corpus import TokenCorpus, gathered, make_corpus
from trainkit.data.documents import checked_columns
from trainkit.data.joined import ConcatCorpus, concat_corpora, joint_digest
from trainkit.files import bad_file
from trainkit.noise.hashing import GOLDEN, make_key, mix_bits
from trainkit.noise.jit import jit
from trainkit.packing.report import format_overlong_warning
from trainkit.text.corpora.library import (
    docstring_conversations,
    is_library_source,
    standard_library,
)
from trainkit.text.corpora.records import document_files, read_records, record_place
from trainkit.text.corpora.shards import describe_unread_files, open_parts, tokens_at
from trainkit.text.corpora.text import TEXT_SUFFIXES, check_readable
from trainkit.text.tokenizers import list_compatible_hashes, make_byte_tokenizer, make_text_encoder
from trainkit.text.tokenizers.documents import encode_documents
from trainkit.types import ConfigError, Corpus, DataError, check_range

if TYPE_CHECKING:
    import os
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
    """Open a corpus, whatever lies at a path; its name says what it is, never its content.

    - A text file, which is one document; or a directory of them, in the order of relative paths.
    - A `.jsonl`, `.parquet` or `.arrow` file (the last two with the extra `data`): each line or row
      is a document. Or a directory of such files, all of one kind.
    - A `.tokens` file, which `write_corpus` makes.
    - A `.npy` file of integers; a `.bin` file of raw integers with a sidecar `FILE.json` that says
      at least {"dtype": "uint16"}; Megatron's `.idx` with its `.bin`.
    - A directory of token files, all of one kind, in the order of their names.

    Text is tokenised here, once, into memory; write it into a token file to do so only once for
    many runs. Files of tokens are mapped, and read in part to see that they are intact. The corpus'
    `sources` has a hash of each file.

    Args:
        path: The directory or file.
        tokenizer: For text; bytes by default. Files of tokens it has to cover: their vocabulary,
            and where a file says which tokenizer made it, that one (see `list_compatible_hashes`).
        field: The field of each line or row that holds the text.
        suffixes: How the names of a directory's text files end.
        keep: Which documents to take, by relative path or by line number (from 1, in decimal).
        encode: Makes a record's token ids, or its `Sample`, in place of `tokenizer` and `field`. An
            attribute `columns`, if it has one, says by name what `Column`s its samples have.
        eos_id: In files of tokens that do not say where documents end, one ends after each of
            these; otherwise such a file is one document.
        template: The name of the chat template of the model, as `chat.load_template` takes it: a
            token file of conversations that were written with another is refused.

    Returns:
        The corpus; a `ConcatCorpus` of a directory of token files.

    Raises:
        DataError: The path is missing, unreadable, empty, damaged, binary, of no known kind or of
            two; or a token lies outside the vocabulary, or is another tokenizer's, or another
            template's. The message names the place.
        DiskError: The disk fails.
        ConfigError: A parquet or arrow file, and pyarrow is missing; or there is no such template.
        ValueError: An argument that makes no sense for what lies at the path.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = (Path(folder) / "a.txt").write_text("hi")
        ...     corpus = open_corpus(folder)
        >>> corpus.read(0, 0, 4)
        array([256, 104, 105, 257], dtype=uint16)
    """
    path = Path(path)
    check_readable(path)
    names = tokens_at(path, suffixes=suffixes, keep=keep)
    if names:
        if keep is not None or encode is not None:
            what = "documents of a token file have no names for `keep`, and no records for `encode`"
            raise ValueError(f"open_corpus: {path}: {what}; choose and encode when you write it")
        known = getattr(tokenizer, "vocab_size", None)
        root = path if path.is_dir() else path.parent
        parts = open_parts(root, names, vocab_size=known, eos_id=eos_id)
        _check_templates(path, parts, template)
        return _covered(path, concat_corpora(parts) if path.is_dir() else parts[0], tokenizer)
    if eos_id is not None:
        raise ValueError(f"open_corpus: {path}: eos_id is for files of tokens")
    if encode is None:
        tokenizer = tokenizer or make_byte_tokenizer()
        is_text = document_files(path, suffixes=suffixes, keep=keep)[0].endswith(tuple(suffixes))
        field = "text" if is_text else field
        encode = make_text_encoder(tokenizer, field=field)
        corpus = _encoded(path, encode, getattr(tokenizer, "vocab_size", None), suffixes, keep)
        separators = len(encode_documents(tokenizer, [""])[0])
        if (corpus.lengths <= separators).all():
            raise DataError(
                f"open_corpus: {path}: there is no text: all documents ({len(corpus.lengths)}) are "
                "empty",
                where=path,
                hint="see what --data and --field name",
            )
        return corpus
    return _encoded(path, encode, getattr(tokenizer or encode, "vocab_size", None), suffixes, keep)


def open_corpora(
    paths: Sequence[Path],
    *,
    tokenizer: Tokenizer | None = None,
    field: str = "text",
    init: Path | None = None,
    template: str | None = None,
    recorded: Mapping[str, Any] | None = None,
    tell: Callable[[str], object] | None = None,
) -> dict[str, TokenCorpus | ConcatCorpus]:
    """Open several corpora by name, or the source of Python's standard library if there are none.

    A corpus is called as its file or folder without suffix; by its whole path where two are alike.

    Args:
        paths: As for `open_corpus`, each.
        tokenizer: As for `open_corpus`.
        field: As for `open_corpus`.
        init: The folder of the model that a run begins with: a token file of conversations that
            were written with another chat template than it has is refused.
        template: The name of the chat template, in place of that of `init`.
        recorded: The facts of the run that is continued; see `match_recorded_names`.
        tell: Called with sentences about what is read, and what is not.

    Raises:
        ConfigError: A path is named twice; or as `open_corpus`.
        DataError: As `open_corpus`.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = (Path(folder) / "web.txt").write_text("hi")
        ...     corpora = open_corpora([Path(folder) / "web.txt"], tell=lambda text: None)
        >>> list(corpora)
        ['web']
    """
    tell = tell or str
    tell(f"reading {', '.join(map(str, paths)) or 'the source of the standard library'}")
    for path in paths:
        if ignored := describe_unread_files(path):
            tell(ignored)
    if not paths:
        return match_recorded_names({"library": open_library_corpus(tokenizer)}, recorded or {})
    if len(set(paths)) < len(paths):
        raise ConfigError(f"--data names a corpus twice: {', '.join(map(str, paths))}")
    from trainkit.text.chat import locate_template  # noqa: PLC0415 (few corpora need it)

    template = template or locate_template(init)
    are_unique = len({path.stem for path in paths}) == len(paths)
    corpora = {
        path.stem if are_unique else str(path): open_corpus(
            path, tokenizer=tokenizer, field=field, template=template
        )
        for path in paths
    }
    return match_recorded_names(corpora, recorded or {})


def open_library_corpus(tokenizer: Tokenizer | None = None) -> TokenCorpus | ConcatCorpus:
    """Open the source of Python's standard library, which every machine has, as a corpus.

    Args:
        tokenizer: Bytes by default.

    Raises:
        DataError: As `open_corpus`: there is no source beside this Python.
    """
    return open_corpus(standard_library(), tokenizer=tokenizer, keep=is_library_source)


def _covered(
    path: Path, corpus: TokenCorpus | ConcatCorpus, tokenizer: Tokenizer | None
) -> TokenCorpus | ConcatCorpus:
    """Return the corpus if all its tokens are the tokenizer's."""
    known = getattr(tokenizer, "vocab_size", None)
    covered = () if tokenizer is None else list_compatible_hashes(tokenizer)
    for part in getattr(corpus, "parts", [corpus]):
        made_by, name = part.tokenizer_hash, part.made_with.get("tokenizer")
        if part.vocab_size is not None and known is not None and part.vocab_size > known:
            what = f"its vocabulary of {part.vocab_size} is larger than the tokenizer's, {known}"
            what += "" if name is None else f"; give --tokenizer {name}, which made it"
            raise bad_file(path, what, got=part.vocab_size, want=known)
        if covered and made_by is not None and made_by not in covered:
            place = path if part.file is None else part.file.path
            what = f"its tokens were made by the tokenizer {made_by}, and this one is {covered[-1]}"
            mend = "the same ids mean other text: open it with that tokenizer, or make it anew"
            hint = "the hashes are those of tokenizer_hash"
            if name is not None:
                mend = f"the same ids mean other text: give --tokenizer {name}, which made it"
            raise bad_file(place, f"{what}; {mend}", got=made_by, want=covered[-1], hint=hint)
    return corpus


def _check_templates(path: Path, parts: Sequence[TokenCorpus], template: str | None) -> None:
    """Refuse token files of conversations that were not written with a template."""
    written = [part for part in parts if part.template_hash is not None]
    if template is None or not written:
        return
    from trainkit.text.chat import template_hash  # noqa: PLC0415 (few corpora need it)

    want = template_hash(template)
    for part in written:
        if part.template_hash != want:
            place = path if part.file is None else part.file.path
            name = part.made_with.get("template", "another")
            raise bad_file(
                place,
                f"its conversations were written with the template {name} "
                f"({part.template_hash}), and the model's is {template} ({want}); take that one by "
                "--template, or make the file anew: python -m trainkit prepare --messages "
                f"--template {template}",
                got=part.template_hash,
                want=want,
            )


def is_held_out(name: str, *, one_in: int = 20) -> bool:
    """Say whether a document is held out from training, by a hash of its name alone.

    About one in `one_in` is. A document stays on its side when others come or go, everywhere.

    Examples:
        >>> sum(is_held_out(f"{i}.py") for i in range(1000))
        57
    """
    check_range("held_out", at_least=1, one_in=one_in)
    digest = hashlib.sha256(name.encode(errors="surrogateescape")).digest()
    return int.from_bytes(digest[:8], "little") % one_in == 0


def held_out_documents(
    corpus: TokenCorpus | ConcatCorpus, *, one_in: int = 20
) -> np.ndarray[Any, Any]:
    """Return which documents of a corpus are held out: bool `[N]`, by their names.

    Documents without names, as in a token file, go by a hash of their numbers: they keep their
    sides when others follow them, not when some come before. Lengths that are set to 0 where this
    is true pack into rows for training, and the other way round for evaluation.

    Args:
        corpus: The corpus.
        one_in: About one document in so many is held out.

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
    chosen = np.empty(len(corpus.offsets) - 1, dtype=bool)
    _hold_out(np.uint64(make_key("held out")), np.uint64(one_in), chosen)
    return chosen


@jit
def _hold_out(key: np.uint64, one_in: np.uint64, chosen: Any) -> None:
    for number in range(chosen.size):
        place = key + np.uint64(number) * np.uint64(GOLDEN)
        chosen[number] = mix_bits(place) % one_in == 0


def open_conversations(
    path: Path | None, encode: Encode, *, tokenizer: Any, template: str | None = None
) -> TokenCorpus | ConcatCorpus:
    """Open conversations as a corpus that says which of its tokens are trained on.

    Args:
        path: A .jsonl, .parquet or .arrow file with a field `messages`, or a .tokens file that was
            made of such; None for those of `docstring_conversations`.
        encode: From a record to a `Sample`, from `chat.make_chat_encoder`.
        tokenizer: What `encode` takes, with its `vocab_size`; or what made the .tokens file.
        template: The name of the chat template of `encode`, with which a .tokens file must have
            been written; None does not look.

    Raises:
        DataError: As `open_corpus`; or a .tokens file does not say which tokens are trained on.

    Examples:
        >>> import tempfile
        >>> from trainkit.text.chat import CHATML_SPECIAL, TEMPLATES, make_chat_encoder
        >>> tokenizer = make_byte_tokenizer(CHATML_SPECIAL)
        >>> encode = make_chat_encoder(tokenizer, template=TEMPLATES["chatml"])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = Path(folder) / "a.jsonl"
        ...     turns = '{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}'
        ...     _ = file.write_text('{"messages": [' + turns + "]}")
        ...     corpus = open_conversations(file, encode, tokenizer=tokenizer)
        >>> int(corpus.trained.sum())
        2
    """
    if path is None:
        names, records = zip(*docstring_conversations(), strict=True)
        samples, vocab_size = map(encode, records), tokenizer.vocab_size
        return make_corpus(samples, vocab_size=vocab_size, names=names)
    if path.suffix != ".tokens":
        return open_corpus(path, encode=encode)
    corpus = open_corpus(path, tokenizer=tokenizer, template=template)
    if isinstance(corpus, TokenCorpus) and corpus.trained is None:
        what = "nothing says which of its tokens the assistant said"
        raise bad_file(path, f"{what}; write it with python -m trainkit prepare --messages")
    return corpus


def open_chats(
    path: Path | None,
    *,
    tokenizer: Any,
    template: str,
    train: Literal["assistant", "last"] = "assistant",
    max_length: int,
    tell: Callable[[str], object] | None = None,
) -> tuple[TokenCorpus | ConcatCorpus, Counter[str]]:
    """Open conversations, and write them as tokens by a chat template.

    `open_conversations` with a `chat.make_chat_encoder`; conversations longer than `max_length` are
    left out.

    Args:
        path: As for `open_conversations`.
        tokenizer: As for `chat.make_chat_encoder`.
        template: The name of the template, as for `chat.load_template`.
        train: As for `chat.encode_chat`: all turns of the assistant, or the last.
        max_length: The most tokens of a conversation.
        tell: Called with what is read, and with warnings of conversations that are left out and of
            answers of which the template shows nothing.

    Returns:
        The corpus, and counts of conversations and answers.

    Raises:
        DataError: As `open_conversations` and `chat.format_answers_warning`.

    Examples:
        >>> import tempfile
        >>> from trainkit.text.chat import CHATML_SPECIAL
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = Path(folder) / "a.jsonl"
        ...     turns = '{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}'
        ...     _ = file.write_text('{"messages": [' + turns + "]}")
        ...     corpus, counts = open_chats(
        ...         file,
        ...         tokenizer=make_byte_tokenizer(CHATML_SPECIAL),
        ...         template="chatml",
        ...         max_length=64,
        ...     )
        >>> int(corpus.trained.sum()), counts["conversations"]
        (2, 1)
    """
    from trainkit.text.chat import format_answers_warning, load_template, make_chat_encoder  # noqa: PLC0415

    tell = tell or str
    tell(f"reading {path or 'signatures and docstrings of the standard library'}")
    counts: Counter[str] = Counter()
    encode = make_chat_encoder(
        tokenizer,
        template=load_template(template),
        train=train,
        counts=counts,
        max_length=max_length,
        overlong="drop",
    )
    corpus = open_conversations(path, encode, tokenizer=tokenizer, template=template)
    overlong = format_overlong_warning(
        counts["conversations"],
        capacity=max_length,
        truncated=counts["truncated"],
        dropped=counts["dropped"],
        what="conversations",
    )
    for warning in filter(None, (overlong, format_answers_warning(counts))):
        tell(warning)
    return corpus, counts


def hold_out(
    corpus: TokenCorpus | ConcatCorpus, *, piece: int, one_in: int = 20
) -> tuple[TokenCorpus | ConcatCorpus, np.ndarray[Any, Any]]:
    """Return a corpus and which of its documents are held out: pieces, where documents are few.

    Documents are held out whole, as `held_out_documents` says, where that takes some of the tokens
    and no more than a quarter of them. It does not where there are few: then they are first cut
    into pieces of `piece` tokens, which are held out in the same way; at least the last is.

    Args:
        corpus: The corpus.
        piece: Tokens of a piece, for instance a row's.
        one_in: About one document, or piece, in so many is held out.

    Returns:
        The corpus, or a view of its tokens with a document for each piece; bool `[N]`.

    Raises:
        ValueError: `piece` or `one_in` is below 1.

    Examples:
        >>> corpus, chosen = hold_out(TokenCorpus(np.arange(10), np.array([0, 10])), piece=4)
        >>> corpus.lengths, chosen
        (array([4, 4, 2]), array([False, False,  True]))
    """
    check_range("hold_out", at_least=1, piece=piece)
    chosen = held_out_documents(corpus, one_in=one_in)
    lengths = corpus.lengths
    if 0 < lengths[chosen].sum() * 4 <= lengths.sum():
        return corpus, chosen
    if isinstance(corpus, ConcatCorpus):
        corpus = concat_corpora(_in_pieces(part, piece) for part in corpus.parts)
    else:
        corpus = _in_pieces(corpus, piece)
    chosen = held_out_documents(corpus, one_in=one_in)
    if not chosen.any() and len(chosen) > 1:
        chosen[-1] = True
    return corpus, chosen


def _in_pieces(corpus: TokenCorpus, piece: int) -> TokenCorpus:
    """Return a view of a corpus, whose documents end after `piece` tokens too."""
    counts = -(-corpus.lengths // piece)
    firsts = np.repeat(np.cumsum(counts) - counts, counts)
    begins = np.repeat(corpus.offsets[:-1], counts) + (np.arange(len(firsts)) - firsts) * piece
    return attrs.evolve(
        corpus,
        offsets=np.append(begins, corpus.offsets[-1]),
        names=None,
        digest=None if corpus.digest is None else joint_digest([corpus.digest, str(piece)]),
    )


def count_document_labels(corpus: TokenCorpus | ConcatCorpus) -> np.ndarray[Any, Any]:
    """Return how many labels each document has: int64 `[N]`.

    A document without any takes room in a row and teaches nothing. Lengths that are set to 0 where
    this is 0 pack into rows without it, and the report of the packing counts it as empty.

    Args:
        corpus: The corpus. A document's first token is nobody's label.

    Examples:
        >>> from trainkit.data.corpus import make_corpus
        >>> from trainkit.types import Sample
        >>> chosen = ([True, False, True], [True, False])
        >>> corpus = make_corpus(Sample(np.arange(len(x)), np.array(x)) for x in chosen)
        >>> count_document_labels(corpus)
        array([1, 0])
    """
    counts = []
    for part in getattr(corpus, "parts", [corpus]):
        count = np.maximum(part.lengths - 1, 0)
        if part.trained is not None:
            _count_labels(part.trained, part.offsets, count)
        counts.append(count)
    return np.concatenate(counts)


@jit
def _count_labels(trained: Any, offsets: Any, count: Any) -> None:
    for document in range(count.size):
        count[document] = 0
        for place in range(offsets[document] + 1, offsets[document + 1]):
            count[document] += trained[place]


def match_recorded_names(corpora: Mapping[str, C], facts: Mapping[str, Any]) -> dict[str, C]:
    """Return corpora by the names that a run has for them, which may be those of old folders.

    A mixture draws the rows of a corpus in an order that its name decides, and reports its loss by
    that name, so a corpus that was renamed keeps the one that it had.

    Args:
        corpora: By the names that they have now.
        facts: Of the run's checkpoint: "fingerprint of NAME" for each.

    Returns:
        The same corpora in the same order. One whose name the facts do not know has that of the
        fingerprint which is its own and no other corpus' name; else it keeps its name.

    Examples:
        >>> corpora = {"new": TokenCorpus(np.arange(4), np.array([0, 4]))}
        >>> facts = {"fingerprint of old": fingerprint(corpora["new"])}
        >>> list(match_recorded_names(corpora, facts))
        ['old']
    """
    begin = "fingerprint of "
    free = {
        name.removeprefix(begin): value
        for name, value in facts.items()
        if name.startswith(begin) and name.removeprefix(begin) not in corpora
    }
    found: dict[str, C] = {}
    for name, corpus in corpora.items():
        own = None if not free or f"{begin}{name}" in facts else fingerprint(corpus)
        was = next((old for old, value in free.items() if value == own), name)
        free.pop(was, None)
        found[was] = corpus
    return found


def _encoded(
    path: Path,
    encode: Encode,
    vocab_size: int | None,
    suffixes: Sequence[str],
    keep: Callable[[str], bool] | None,
) -> TokenCorpus:
    """Encode records one after the other into memory."""
    names: list[str] = []
    sources: dict[str, str] = {}

    def documents() -> Iterator[tuple[str, ArrayLike | Sample]]:
        for name, record in read_records(path, suffixes=suffixes, keep=keep, sources=sources):
            names.append(name)
            where = record_place(path, name)
            yield where, encode_record(encode, record, where)

    columns = checked_columns("open_corpus", getattr(encode, "columns", None))
    corpus = gathered(documents(), vocab_size=vocab_size, columns=columns)
    if not len(corpus.tokens):
        dropped = getattr(encode, "counts", {}).get("dropped", 0)
        found = "none has a token" if names else "none was kept"
        found += f": {dropped} were dropped, as too long" if dropped else ""
        kinds = f"files ending in {', '.join(suffixes)}" if path.is_dir() else "lines or rows"
        raise bad_file(path, f"no documents: of its {kinds}, {found}")
    return attrs.evolve(corpus, names=names, sources=sources)


def encode_record(encode: Callable[[Any], T], record: Mapping[str, Any], where: str) -> T:
    """Return what `encode` makes of a record; what it raises names the place.

    Raises:
        DataError: `encode` raises anything.

    Examples:
        >>> encode_record(len, {"a": 1}, "x.jsonl: line 1")
        1
    """
    try:
        return encode(record)
    except Exception as error:
        what = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise bad_file(where, what) from error
