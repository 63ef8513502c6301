"""The formats of corpora, by suffix: what reads a file of records, and what opens one of tokens.

A new format is one row, with a function of the signature `ReadRecords` or `OpenTokens`; then
`open_corpus`, `read_records`, `verify_corpus` and `prepare_corpus` take files and directories of
it. Text files have no row: their suffixes are an argument of these functions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import attrs

from trainkit.text.corpora.arrow import locate_row, read_rows, split_rows
from trainkit.text.corpora.foreign import open_foreign, select_megatron, select_npy, select_raw
from trainkit.text.corpora.jsonl import locate_json_line, read_json_lines, split_json_lines
from trainkit.text.corpora.text_files import measure_file, open_file
from trainkit.text.corpora.tokens import SUFFIX, open_part

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from trainkit.data.corpus import TokenCorpus


class ReadRecords(Protocol):
    """Read the records of a file, or of a range of it.

    `start` and `end` are in the unit of the format's `split`: bytes, row groups, or any other that
    the format can seek. `columns` may be ignored. A record is skipped if `keep(number)` is false.
    Returns an iterator over (number, record); numbers count from 1 at `start`.
    """

    def __call__(
        self,
        path: Path,
        start: int = 0,
        end: int | None = None,
        *,
        columns: Sequence[str] | None = None,
        keep: Callable[[int], bool] | None = None,
    ) -> Iterator[tuple[int, dict[str, Any]]]: ...


class OpenTokens(Protocol):
    """Open a file of tokens as a mapped corpus, and check up to `max_chunks` (None: all) of it."""

    def __call__(
        self,
        path: Path,
        *,
        vocab_size: int | None,
        eos_id: int | None,
        max_chunks: int | None,
    ) -> TokenCorpus: ...


def _split_nothing(path: Path, min_bytes: int) -> Iterator[tuple[int, int, int]]:
    # One range: a single process then reads the whole file.
    del min_bytes
    with open_file(path) as file:
        yield 0, 1, measure_file(file)


def _locate_in_whole_file(path: Path, start: int, index: int) -> int:
    # The only range begins with the first record.
    del path, start
    return index + 1


@attrs.frozen
class RecordFormat:
    """A format whose files hold records; one record is one document.

    Attributes:
        read: Reads the records of a range.
        record: The noun for a record in messages: "line", "row".
        range_unit: The noun for the unit of `start` and `end` in messages.
        split: (path, min_bytes) -> iterator over (start, end, bytes) of the ranges that worker
            processes read; by default the whole file is one range.
        locate: (path, start, index) -> the number, from 1 in the file, of record `index` of the
            range that begins at `start`.
    """

    read: ReadRecords
    record: str = "record"
    range_unit: str = "parts"
    split: Callable[[Path, int], Iterator[tuple[int, int, int]]] = _split_nothing
    locate: Callable[[Path, int, int], int] = _locate_in_whole_file


@attrs.frozen
class TokenFormat:
    """A format whose files hold tokens.

    Attributes:
        open: Opens a file.
        select: (root, names, has_text) -> those of a directory's files that are opened; by default
            all with the suffix.
        companions: Suffixes of the files that stand next to one of this format and belong to it.
    """

    open: OpenTokens
    select: Callable[..., list[str]] | None = None
    companions: tuple[str, ...] = ()


# The suffix alone decides on the format: nothing is guessed from the content.
RECORD_FORMATS: dict[str, RecordFormat] = {
    ".jsonl": RecordFormat(
        read_json_lines,
        record="line",
        range_unit="bytes",
        split=split_json_lines,
        locate=locate_json_line,
    ),
    ".parquet": RecordFormat(
        read_rows,
        record="row",
        range_unit="row groups",
        split=split_rows,
        locate=locate_row,
    ),
    ".arrow": RecordFormat(
        read_rows,
        record="row",
        range_unit="record batches",
        split=split_rows,
        locate=locate_row,
    ),
}

TOKEN_FORMATS: dict[str, TokenFormat] = {
    # `prepare` writes the tokenizer that it trained next to the token file.
    SUFFIX: TokenFormat(open_part, companions=(".tokenizer.json",)),
    # Offsets of documents are .npy files too; `select_npy` leaves them out.
    ".npy": TokenFormat(open_foreign, select=select_npy, companions=(".npy.json",)),
    # The two rows share .bin files: one with an index is Megatron's, the others are raw.
    ".idx": TokenFormat(open_foreign, select=select_megatron),
    ".bin": TokenFormat(open_foreign, select=select_raw, companions=(".bin.json",)),
}
