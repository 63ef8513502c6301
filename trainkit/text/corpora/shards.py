"""Files of tokens below a path: find them, and open each one as a corpus."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from trainkit.text.corpora.foreign import FOREIGN_SUFFIXES
from trainkit.text.corpora.foreign_layouts import Sidecar, read_sidecar
from trainkit.text.corpora.formats import RECORD_FORMATS, TOKEN_FORMATS
from trainkit.text.corpora.text_files import (
    TEXT_SUFFIXES,
    check_readable,
    list_files,
    list_linked_folders,
)
from trainkit.text.corpora.token_file import SAMPLED
from trainkit.types import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from trainkit.data.corpus import TokenCorpus

_MAX_CHUNKS = 256
"""Chunks that opening a directory of token files checks in all of them together: 1 GiB."""


def find_token_files(
    path: Path,
    *,
    suffixes: Sequence[str] = TEXT_SUFFIXES,
    keep: Callable[[str], bool] | None = None,
) -> list[str]:
    """Find the files of tokens at a path; an empty list if it holds text or records.

    Args:
        path: A file, whose name is returned, or a directory that is searched.
        suffixes: The suffixes of text files.
        keep: Selects files of a directory that also holds text.

    Raises:
        DataError: The file is of an unknown format; or the directory holds neither tokens nor
            text, or both.
    """
    if not path.is_dir():
        known = (*RECORD_FORMATS, *TOKEN_FORMATS, *suffixes)
        if not path.name.endswith(known):
            raise DataError(
                f"{path}: neither a directory, nor a file of a known kind: {', '.join(known)}",
                where=path,
            )
        return [path.name] if path.suffix in TOKEN_FORMATS else []
    names = list_files(path)
    texts = [name for name in names if name.endswith(tuple(suffixes))]
    # Records count as text: next to token files they may be the source of these.
    texts = texts or [name for name in names if name.endswith(tuple(RECORD_FORMATS))]
    # Without text all token files count: their documents have no names to select by.
    if texts and keep is not None:
        names = [name for name in names if keep(name)]
    shards = _select_shards(path, names, has_text=bool(texts))
    if texts and shards:
        raise DataError(
            f"{path}: both {texts[0]} and {shards[0]}, text and tokens: open one of them, from a "
            "directory of its own or with suffixes=() or `keep`",
            where=path,
        )
    if not texts and not shards:
        raise DataError(
            f"{path}: no documents: of its files ending in {', '.join(suffixes)} none was found, "
            "nor any file of records or tokens",
            where=path,
        )
    return shards


def _select_shards(root: Path, names: Sequence[str], *, has_text: bool) -> list[str]:
    """Select the files of tokens among all files of a directory; they must be of one format."""
    # Each file belongs to one format: .bin files are Megatron's or raw by their neighbours.
    by_format = []
    for suffix, row in TOKEN_FORMATS.items():
        if row.select is not None:
            selected = row.select(root, names, has_text=has_text)
        else:
            selected = [name for name in names if name.endswith(suffix)]
        if selected:
            by_format.append(selected)
    if len(by_format) > 1:
        raise DataError(
            f"{root}: files of tokens of two kinds, {by_format[0][0]} and {by_format[1][0]}; open "
            "them one by one, and give them to concat_corpora",
            where=root,
        )
    return by_format[0] if by_format else []


def describe_unread_files(path: Path, suffixes: Sequence[str] | None = None) -> str:
    """Describe the files of a directory that are not read; "" if there are none.

    Args:
        path: The directory; for a file the result is "".
        suffixes: The suffixes of the files that are read, or that belong to those; by default all
            that `open_corpus` reads.

    Examples:
        >>> import tempfile
        >>> from pathlib import Path
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for name in ("a.txt", "b.html"):
        ...         _ = (Path(folder) / name).write_text("hi")
        ...     describe_unread_files(Path(folder)).removeprefix(folder)
        ': 1 file of another kind is left out, such as b.html'
    """
    if not path.is_dir():
        return ""
    if suffixes is None:
        # Sidecars and tokenizers are read together with their files.
        companions = [suffix for row in TOKEN_FORMATS.values() for suffix in row.companions]
        suffixes = (*TEXT_SUFFIXES, *RECORD_FORMATS, *TOKEN_FORMATS, *companions)
    others = [name for name in list_files(path) if not name.endswith(tuple(suffixes))]
    messages = []
    for names, singular, plural in (
        (others, "file of another kind is", "files of other kinds are"),
        (list_linked_folders(path), "linked folder is", "linked folders are"),
    ):
        if names:
            subject = singular if len(names) == 1 else plural
            messages.append(f"{len(names)} {subject} left out, such as {names[0]}")
    return f"{path}: {'; '.join(messages)}" if messages else ""


def open_parts(
    root: Path,
    names: Sequence[str],
    *,
    vocab_size: int | None = None,
    eos_id: int | None = None,
    full: bool = False,
) -> list[TokenCorpus]:
    """Open files of tokens below a directory.

    Args:
        root: The directory.
        names: The files' relative paths, at least one; the suffix decides on the format.
        vocab_size: Exclusive upper bound of the ids, if a file does not store one.
        eos_id: The last token of a document, if a file does not store document offsets.
        full: Read all of each file; otherwise up to 1 GiB of them together.

    Raises:
        DataError: A file does not fit its format, or `eos_id` ends no document of any file. The
            message names it.
        ValueError: `eos_id` was given for a file that stores document offsets.
    """
    # By name, for the message of `_check_eos`.
    parts = {}
    for name in names:
        path = root / name
        check_readable(path)
        part = TOKEN_FORMATS[path.suffix].open(
            path,
            vocab_size=vocab_size,
            eos_id=eos_id,
            # Fewer chunks of each of many files, so that opening them takes no longer.
            max_chunks=None if full else max(1, min(SAMPLED, _MAX_CHUNKS // len(names))),
        )
        # Parts in different folders may have the same name.
        folder = name[: -len(path.name)]
        parts[name] = attrs.evolve(
            part,
            sources={folder + file: digest for file, digest in part.sources.items()},
            vocab_size=part.vocab_size or vocab_size,
        )
    _check_eos(root, parts, eos_id)
    return list(parts.values())


def _check_eos(root: Path, parts: Mapping[str, TokenCorpus], eos_id: int | None) -> None:
    """Raise DataError if the eos occurs in no file: each file would be one document."""
    # All files together: one of several may hold the middle of a document, and no eos.
    eos_ids: dict[str, int] = {}
    for name in parts:
        sidecar = read_sidecar(root / name) if name.endswith(FOREIGN_SUFFIXES) else Sidecar()
        eos = sidecar.eos_id if eos_id is None else eos_id
        # Only there do documents depend on the eos.
        if sidecar.offsets is None and eos is not None:
            eos_ids[name] = eos
    # An eos at the very end of a file ends its only document.
    if not eos_ids or any(
        len(parts[name].offsets) > 2 or parts[name].tokens[-1] == eos
        for name, eos in eos_ids.items()
    ):
        return
    eos = next(iter(eos_ids.values()))
    # A single file was named by the user, not its folder.
    place = root if len(parts) > 1 else root / next(iter(parts))
    raise DataError(
        f"{place}: eos_id {eos} is to end the documents, but is not among the "
        f"{sum(len(parts[name].tokens) for name in eos_ids)} tokens: look which token ends them, "
        "or leave it out if each file is one document",
        where=place,
        want=eos,
    )
