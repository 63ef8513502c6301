"""Which files of a directory hold tokens, and each of them as a corpus."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from trainkit.files import bad_file
from trainkit.text.corpora.foreign import FOREIGN_SUFFIXES, open_foreign
from trainkit.text.corpora.layouts import Sidecar, offsets_file, read_sidecar, sidecar_of
from trainkit.text.corpora.records import RECORD_SUFFIXES
from trainkit.text.corpora.text import TEXT_SUFFIXES, check_readable, file_names, linked_folders
from trainkit.text.corpora.token_file import SAMPLED
from trainkit.text.corpora.tokens import SUFFIX, open_part

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from trainkit.data.corpus import TokenCorpus

TOKEN_SUFFIXES = (SUFFIX, *FOREIGN_SUFFIXES)
_BESIDE = (".bin.json", ".npy.json", ".tokenizer.json")
_KINDS = (*TEXT_SUFFIXES, *RECORD_SUFFIXES, *TOKEN_SUFFIXES, *_BESIDE)
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


def describe_unread_files(path: Path, kinds: Sequence[str] = _KINDS) -> str:
    """Return a sentence about what of a directory is not read; "" where there is nothing.

    Args:
        path: The directory; of a file nothing is left out.
        kinds: How the names of files end that are read, or belong to those; by default of all that
            `open_corpus` reads.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for name in ("a.txt", "b.html"):
        ...         _ = (Path(folder) / name).write_text("hi")
        ...     describe_unread_files(Path(folder)).removeprefix(folder)
        ': 1 file of another kind is left out, such as b.html'
    """
    if not path.is_dir():
        return ""
    others = [name for name in file_names(path) if not name.endswith(tuple(kinds))]
    links = linked_folders(path)
    told = [
        f"{len(names)} {one if len(names) == 1 else many} left out, such as {names[0]}"
        for names, one, many in (
            (others, "file of another kind is", "files of other kinds are"),
            (links, "linked folder is", "linked folders are"),
        )
        if names
    ]
    return f"{path}: {'; '.join(told)}" if told else ""


def open_parts(
    root: Path,
    names: Sequence[str],
    *,
    vocab_size: int | None = None,
    eos_id: int | None = None,
    full: bool = False,
) -> list[TokenCorpus]:
    """Open files of tokens below a directory, each of any kind.

    Args:
        root: The directory.
        names: The files' relative paths, at least one; a suffix says what a file is.
        vocab_size: No token may be this large or larger, where a file does not say.
        eos_id: Ends a document, where a file does not say where they end.
        full: Read all of each file; otherwise up to 1 GiB of them together.

    Raises:
        DataError: A file is not what it says it is, or `eos_id` ends no document of any file. The
            message names it.
        ValueError: `eos_id` was given for a file that says where documents end.
    """
    most = None if full else max(1, min(SAMPLED, _SHARED // len(names)))
    parts = []
    for name in names:
        path = root / name
        check_readable(path)
        if path.suffix != SUFFIX:
            part = open_foreign(path, vocab_size=vocab_size, eos_id=eos_id, full=full)
        elif eos_id is not None:
            raise ValueError(
                f"open_corpus: {path}: a token file says where documents end: no eos_id"
            )
        else:
            part = open_part(path, most=most, vocab_size=vocab_size)
        folder = name[: -len(path.name)]
        sources = {folder + file: digest for file, digest in part.sources.items()}
        known = part.vocab_size or vocab_size
        parts.append(attrs.evolve(part, sources=sources, vocab_size=known))
    _check_eos(root, dict(zip(names, parts, strict=True)), eos_id)
    return parts


def _check_eos(root: Path, parts: Mapping[str, TokenCorpus], eos_id: int | None) -> None:
    """Refuse an eos that stands in no file: each would be one document.

    One of several files may hold the middle of a document, and no eos.
    """
    asked: dict[str, int] = {}
    for name in parts:
        side = read_sidecar(root / name) if name.endswith(FOREIGN_SUFFIXES) else Sidecar()
        eos = side.eos_id if eos_id is None else eos_id
        if side.offsets is None and eos is not None:
            asked[name] = eos
    own = [(parts[name], eos) for name, eos in asked.items()]
    if own and not any(len(part.offsets) > 2 or part.tokens[-1] == eos for part, eos in own):
        eos, count = next(iter(asked.values())), sum(len(parts[name].tokens) for name in asked)
        what = f"eos_id {eos} is to end the documents, but is not among the {count} tokens"
        mend = "look which token ends them, or leave it out if each file is one document"
        place = root if len(parts) > 1 else root / next(iter(parts))
        raise bad_file(place, f"{what}: {mend}", want=eos)


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
        raise bad_file(root, f"{what}; open them one by one, and give them to concat_corpora")
    return kinds[0] if kinds else []
