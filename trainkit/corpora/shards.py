"""Which files of a directory hold tokens, and all of them as one corpus."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from trainkit.corpora.foreign import FOREIGN_SUFFIXES, open_foreign
from trainkit.corpora.joined import JoinedCorpus, join_corpora
from trainkit.corpora.layouts import offsets_file, read_sidecar, sidecar_of
from trainkit.corpora.records import RECORD_SUFFIXES
from trainkit.corpora.text import TEXT_SUFFIXES, bad_file, check_readable, file_names
from trainkit.corpora.token_file import SAMPLED
from trainkit.corpora.tokens import SUFFIX, TokenCorpus, open_part

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

TOKEN_SUFFIXES = (SUFFIX, *FOREIGN_SUFFIXES)
_SHARED = 256
"""Chunks that opening a directory of token files checks: 1 GiB."""


def tokens_at(
    path: Path,
    *,
    suffixes: Sequence[str] = TEXT_SUFFIXES,
    keep: Callable[[str], bool] | None = None,
) -> list[str]:
    """Return the names of the files of tokens at a path: none where there is text.

    Args:
        path: A file, whose name is returned, or a directory, below which they lie.
        suffixes: How the names of text files end.
        keep: Says which files of a directory with text count.

    Raises:
        DataError: The file is of no known kind; or the directory holds neither, or both.
    """
    if not path.is_dir():
        known = (*RECORD_SUFFIXES, *TOKEN_SUFFIXES, *suffixes)
        if not path.name.endswith(known):
            what = f"neither a directory, nor a file of a known kind: {', '.join(known)}"
            raise bad_file(path, what)
        return [path.name] if path.suffix in TOKEN_SUFFIXES else []
    names = file_names(path)
    texts = [name for name in names if name.endswith(tuple(suffixes))]
    texts = texts or [name for name in names if name.endswith(RECORD_SUFFIXES)]
    if texts and keep is not None:
        names = [name for name in names if keep(name)]
    shards = _shard_names(path, names, sure=bool(texts))
    if texts and shards:
        what = f"both {texts[0]} and {shards[0]}, text and tokens"
        mend = "open one kind, from a directory of its own or with suffixes=() or `keep`"
        raise bad_file(path, f"{what}: {mend}")
    if not texts and not shards:
        what = f"no documents: of its files ending in {', '.join(suffixes)} none was found"
        raise bad_file(path, f"{what}, nor any file of records or tokens")
    return shards


def open_shard(
    path: Path,
    *,
    vocab_size: int | None = None,
    eos_id: int | None = None,
    most: int | None = SAMPLED,
) -> TokenCorpus:
    """Open one file of tokens, of any kind.

    Args:
        path: The file; its suffix says what it is.
        vocab_size: No token may be this large or larger, where the file does not say.
        eos_id: Ends a document, where the file does not say where they end.
        most: How many chunks of a `.tokens` file are checked; None reads all of any file.

    Raises:
        DataError: The file is not what it says it is, or `eos_id` ends no document.
        ValueError: `eos_id` was given for a file that says where documents end.
    """
    corpus = _open_one(path, vocab_size=vocab_size, eos_id=eos_id, most=most)
    _check_eos(path, {path: corpus}, eos_id)
    return corpus


def _open_one(
    path: Path, *, vocab_size: int | None, eos_id: int | None, most: int | None
) -> TokenCorpus:
    if path.suffix != SUFFIX:
        corpus = open_foreign(path, vocab_size=vocab_size, eos_id=eos_id, full=most is None)
    elif eos_id is not None:
        raise ValueError(f"open_corpus: {path}: a token file says where documents end: no eos_id")
    else:
        corpus = open_part(path, most=most, vocab_size=vocab_size)
    return corpus if corpus.vocab_size else attrs.evolve(corpus, vocab_size=vocab_size)


def open_shards(
    root: Path,
    names: Sequence[str],
    *,
    vocab_size: int | None = None,
    eos_id: int | None = None,
    full: bool = False,
) -> JoinedCorpus:
    """Open a directory's files of tokens as one corpus, in the order of their names.

    Raises:
        DataError: A file is not what it says it is, or `eos_id` ends no document of any file. The
            message names it.
    """
    most = None if full else max(1, min(SAMPLED, _SHARED // len(names)))
    parts = []
    for name in names:
        check_readable(root / name)
        part = _open_one(root / name, vocab_size=vocab_size, eos_id=eos_id, most=most)
        folder = name[: -len(Path(name).name)]
        parts.append(attrs.evolve(part, sources={folder + k: v for k, v in part.sources.items()}))
    _check_eos(root, dict(zip([root / name for name in names], parts, strict=True)), eos_id)
    return join_corpora(parts)


def _check_eos(path: Path, parts: Mapping[Path, TokenCorpus], eos_id: int | None) -> None:
    """Refuse an eos that stands in no file: each would be one document.

    One of several files may hold the middle of a document, and no eos.
    """
    sides = {name: read_sidecar(name) for name in parts if name.suffix in FOREIGN_SUFFIXES}
    asked = {
        name: side.eos_id if eos_id is None else eos_id
        for name, side in sides.items()
        if side.offsets is None
    }
    asked = {name: eos for name, eos in asked.items() if eos is not None}
    if asked and not any(_ends_a_document(parts[name], eos) for name, eos in asked.items()):
        eos, count = next(iter(asked.values())), sum(len(parts[name].tokens) for name in asked)
        what = f"eos_id {eos} is to end the documents, but is not among the {count} tokens"
        mend = "look which token ends them, or leave it out if each file is one document"
        raise bad_file(path, f"{what}: {mend}", want=eos)


def _ends_a_document(part: TokenCorpus, eos_id: int) -> bool:
    return len(part.offsets) > 2 or part.tokens[-1] == eos_id


def _shard_names(root: Path, names: Sequence[str], *, sure: bool) -> list[str]:
    """Return which files of a directory hold tokens, in order; they must be of one kind.

    Args:
        root: The directory.
        names: The relative paths of all files in it.
        sure: Leave out a `.bin` file without a sidecar and an `.idx` file without its `.bin`, which
            beside text may be anything.

    Raises:
        DataError: They are of two kinds. The message names one of each.
    """
    have = set(names)
    ends = {
        offsets_file(root / name)
        for name in names
        if name.endswith((".npy", ".bin")) and sidecar_of(Path(name)).as_posix() in have
    }
    indices = {name.removesuffix(".idx") for name in names if name.endswith(".idx")}
    found = {
        SUFFIX: [name for name in names if name.endswith(SUFFIX)],
        ".npy": [name for name in names if name.endswith(".npy") and root / name not in ends],
        ".idx": [f"{name}.idx" for name in sorted(indices) if not sure or f"{name}.bin" in have],
        ".bin": [
            name
            for name in names
            if name.endswith(".bin")
            and name.removesuffix(".bin") not in indices
            and (not sure or f"{name}.json" in have)
        ],
    }
    kinds = [files for files in found.values() if files]
    if len(kinds) > 1:
        what = f"files of tokens of two kinds, {kinds[0][0]} and {kinds[1][0]}"
        raise bad_file(root, f"{what}; open them one by one, and give them to join_corpora")
    return kinds[0] if kinds else []
