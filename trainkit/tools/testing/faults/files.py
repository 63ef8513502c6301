"""Faults of files: flipped bits, lost pages, and truncated, swapped, missing or extra files."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_PAGE = 4096


def flip_bit(path: str | Path, bit: int) -> None:
    """Flip one bit of a file.

    Args:
        path: The file.
        bit: The index of the bit, 0 to 8 x the file's size - 1.

    Effects:
        Changes the file in place.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "x")
        ...     _ = path.write_bytes(b"abc")
        ...     flip_bit(path, 9)
        ...     path.read_bytes()
        b'a`c'
    """
    with Path(path).open("r+b") as file:
        file.seek(bit // 8)
        value = file.read(1)
        # Reading has moved on by a byte.
        file.seek(bit // 8)
        file.write(bytes([value[0] ^ 1 << bit % 8]))


def truncate(path: str | Path, size: int) -> None:
    """Truncate a file to a number of bytes.

    Effects:
        Changes the file in place.

    Examples:
        >>> import tempfile
        >>> with tempfile.NamedTemporaryFile() as file:
        ...     _ = file.write(b"abc"), file.flush()
        ...     truncate(file.name, 1)
        ...     Path(file.name).read_bytes()
        b'a'
    """
    os.truncate(path, size)


def zero_page(path: str | Path, page: int) -> None:
    """Fill a page of a file with zeros, as a disk does that has lost it.

    Args:
        path: The file.
        page: The index of the 4 KiB page; the last may be shorter.

    Effects:
        Changes the file in place, and not its size.

    Examples:
        >>> import tempfile
        >>> with tempfile.NamedTemporaryFile() as file:
        ...     _ = file.write(b"abc"), file.flush()
        ...     zero_page(file.name, 0)
        ...     Path(file.name).read_bytes() == bytes(3)
        True
    """
    with Path(path).open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(page * _PAGE)
        file.write(bytes(max(0, min(_PAGE, size - page * _PAGE))))


def swap_files(first: str | Path, second: str | Path) -> None:
    """Swap the contents of two files, like two shards that were mixed up.

    Effects:
        Changes both files.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     a, b = Path(folder, "a"), Path(folder, "b")
        ...     _ = a.write_text("1"), b.write_text("2")
        ...     swap_files(a, b)
        ...     a.read_text(), b.read_text()
        ('2', '1')
    """
    first, second = Path(first), Path(second)
    # The contents, not the names: both files keep their inodes and modes.
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)


def remove_file(path: str | Path) -> None:
    """Remove a file, unless it is missing already.

    Effects:
        Removes the file.

    Examples:
        >>> remove_file("/does/not/exist")
    """
    with contextlib.suppress(FileNotFoundError):
        Path(path).unlink()


def add_file(path: str | Path, content: bytes = b"\0") -> None:
    """Add an unexpected file.

    Effects:
        Writes the file.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     add_file(f"{folder}/extra")
        ...     [path.name for path in Path(folder).iterdir()]
        ['extra']
    """
    Path(path).write_bytes(content)
