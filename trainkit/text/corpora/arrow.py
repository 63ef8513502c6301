"""Parquet and Arrow files as records: one per row. Needs pyarrow."""

from __future__ import annotations

from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any

from trainkit.buckets.files import find_object
from trainkit.text.corpora.text_files import make_damaged_error, open_file, split_runs
from trainkit.types import needs_extra

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

_ROWS = 256
"""Rows that are converted to Python objects at a time."""


def read_rows(
    path: Path,
    start: int = 0,
    end: int | None = None,
    *,
    columns: Sequence[str] | None = None,
    keep: Callable[[int], bool] | None = None,
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Return an iterator over (row number, record); nested values are lists and dicts.

    Args:
        path: A `.parquet` or `.arrow` file.
        start: The first row group (parquet) or record batch (arrow).
        end: One after the last; None for all.
        columns: The columns to read if the file has all of them; otherwise all are read.
        keep: Whether to take a row, by its number; all by default.

    Returns:
        An iterator. Numbers count rows from 1 at `start`.

    Raises:
        DataError: The file is damaged. The message names it.
        ConfigError: pyarrow is missing.
    """
    _import_pyarrow()  # here, not in the generator: a missing library is reported at once

    def iterate() -> Iterator[dict[str, Any]]:
        with _name_file(path):
            for batch in _read_batches(path, start, end, columns):
                batch.validate(full=True)  # the offsets of a damaged file may point anywhere
                # A batch of an .arrow file may be the whole file, and rows as Python objects take
                # several times the memory of its columns.
                for first in range(0, batch.num_rows, _ROWS):
                    yield from batch.slice(first, _ROWS).to_pylist()

    rows = enumerate(iterate(), start=1)
    return ((number, record) for number, record in rows if keep is None or keep(number))


def split_rows(path: Path, min_bytes: int) -> Iterator[tuple[int, int, int]]:
    """Split a file into runs of row groups of at least `min_bytes`: (start, end, bytes) of each."""
    return split_runs([num_bytes for num_bytes, _ in _measure_groups(path)], min_bytes)


def locate_row(path: Path, start: int, index: int) -> int:
    """Return the row number, from 1, of record `index` of the range that begins at `start`."""
    return sum(rows for _, rows in _measure_groups(path)[:start]) + index + 1


def _measure_groups(path: Path) -> list[tuple[int, int]]:
    """Return (bytes, rows) of each row group or record batch."""
    with _name_file(path):
        if path.suffix == ".arrow":
            return [(batch.nbytes, batch.num_rows) for batch in _read_arrow_batches(path)]
        with _open_parquet(path) as file:
            groups = map(file.metadata.row_group, range(file.num_row_groups))
            return [(group.total_byte_size, group.num_rows) for group in groups]


def _read_batches(
    path: Path, start: int, end: int | None, columns: Sequence[str] | None
) -> Iterator[Any]:
    """Yield record batches, with only `columns` if the file has all of them."""
    if path.suffix == ".arrow":
        for batch in islice(_read_arrow_batches(path), start, end):
            has_all = columns is not None and {*columns} <= {*batch.schema.names}
            yield batch.select(columns) if has_all else batch
        return
    # A column that is missing is an error of the record, which names what it has.
    with _open_parquet(path) as file:
        has_all = columns is not None and {*columns} <= {*file.schema_arrow.names}
        yield from file.iter_batches(
            _ROWS,
            row_groups=range(file.num_row_groups)[start:end],
            columns=columns if has_all else None,
            use_threads=False,  # `prepare` has a process for each core
        )


def _open_parquet(path: Path) -> Any:
    import pyarrow.parquet  # noqa: PLC0415 (optional; _import_pyarrow has reported it if missing)

    return pyarrow.parquet.ParquetFile(_open_ranges(path) or path)


def _open_ranges(path: Path) -> Any:
    """Open a file that is read by ranges; None for one of this machine."""
    if find_object(path) is None:
        return None
    return _import_pyarrow().PythonFile(open_file(path), mode="r")


def _read_arrow_batches(path: Path) -> Iterator[Any]:
    """Yield the record batches of an IPC file or stream, as views of the mapped file."""
    pa = _import_pyarrow()
    with _open_ranges(path) or pa.memory_map(str(path)) as file:
        # The file format has this magic at both ends, and an index of its batches.
        if file.read(6) == b"ARROW1":
            reader = pa.ipc.open_file(file)
            yield from map(reader.get_batch, range(reader.num_record_batches))
            return
        file.seek(0)  # the stream format, in which Hugging Face's datasets are stored
        yield from pa.ipc.open_stream(file)


@contextmanager
def _name_file(path: Path) -> Iterator[None]:
    """Add the file's name to the errors of pyarrow."""
    pa = _import_pyarrow()
    try:
        yield
    except (OSError, ValueError, pa.ArrowException) as error:
        raise make_damaged_error(path, path.suffix, error) from error


def _import_pyarrow() -> Any:
    with needs_extra("data"):
        import pyarrow as pa  # noqa: PLC0415 (optional)
        import pyarrow.ipc  # noqa: PLC0415 (optional)
    return pa
