"""Where the tokens lie in files that others made, and where their documents end.

None of these files says all that has to be known, and nothing is guessed. What a file does not say
stands beside it in a sidecar, `FILE.json`: {"dtype": "uint16", "offsets": "ends.npy", "eos_id": 0,
"vocab_size": 50257, "sha256": "..."}, all of it optional but a raw file's dtype.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import orjson

from trainkit.files import bad_file
from trainkit.text.corpora.text import check_readable, damaged, hash_of, opened, wrong_size

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainkit.types import IntArray

MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
MEGATRON_DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
DTYPES = ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64")


@attrs.frozen
class Sidecar:
    """What stands beside a file of tokens, as it was read."""

    dtype: str | None = None
    offsets: list[int] | str | None = None
    eos_id: int | None = None
    vocab_size: int | None = None
    sha256: str | None = None


@attrs.frozen(eq=False)
class FileLayout:
    """Where a file's tokens lie, and where documents end, if that is known."""

    path: Path
    dtype: np.dtype[Any]
    begin: int
    count: int
    offsets: IntArray | None
    sources: dict[str, str]


# ------------------------------------------------------------------------------------------ layouts


def raw_layout(path: Path, side: Sidecar) -> FileLayout:
    """Return the layout of raw numbers.

    Raises:
        DataError: The sidecar is missing or has no dtype, or the file's size does not fit.
    """
    if side.dtype is None:
        what = "a raw file of tokens does not say its dtype, and none is guessed"
        mend = f'write {{"dtype": "uint16"}}, or what it is, into {sidecar_of(path)}'
        hint = "offsets, eos_id, vocab_size and sha256 may stand there too"
        raise bad_file(path, f"{what}; {mend}", want="dtype", hint=hint)
    dtype, size = np.dtype(side.dtype), _size_of(path)
    if size % dtype.itemsize:
        what = f"{size} bytes are no whole number of {dtype}, the dtype of its sidecar"
        raise bad_file(path, what, got=size)
    count = size // dtype.itemsize
    return FileLayout(path, dtype, 0, count, *_sidecar_offsets(path, side, count))


def npy_layout(path: Path, side: Sidecar) -> FileLayout:
    """Return the layout of a file that `numpy.save` made, of integers in one dimension.

    Raises:
        DataError: It is none, or its size or its sidecar does not fit.
    """
    dtype, begin, count = _npy_header(path)
    if side.dtype not in {None, dtype.name}:
        what = f"its dtype is {dtype}, its sidecar says {side.dtype}"
        raise bad_file(path, what, got=dtype.name, want=side.dtype)
    return FileLayout(path, dtype, begin, count, *_sidecar_offsets(path, side, count))


def _npy_header(path: Path) -> tuple[np.dtype[Any], int, int]:
    """Return the dtype, where the numbers begin, and how many there are; nothing is unpickled."""
    size = _size_of(path)
    try:
        with opened(path) as file:
            version = np.lib.format.read_magic(file)
            read = {
                (1, 0): np.lib.format.read_array_header_1_0,
                (2, 0): np.lib.format.read_array_header_2_0,
            }[version]
            shape, _, dtype = read(file)
            begin = file.tell()
    except (KeyError, OSError, ValueError) as error:
        raise damaged(path, ".npy", error) from error
    if len(shape) != 1 or shape[0] < 0 or dtype.name not in DTYPES:
        what = f"tokens are integers in one dimension, got {dtype} {shape}"
        raise bad_file(path, what, got=str(dtype))
    if not dtype.isnative or begin % dtype.itemsize:
        what = "its numbers are big-endian, or lie at odd places"
        raise bad_file(path, f"{what}; save it again with numpy as little-endian")
    if size != begin + shape[0] * dtype.itemsize:
        raise wrong_size(path, size, begin + shape[0] * dtype.itemsize)
    return dtype, begin, int(shape[0])


def megatron_layout(path: Path) -> FileLayout:
    """Return the layout of Megatron's indexed dataset, of which `path` is one file of two.

    Raises:
        DataError: The index is no such file, or the two do not fit.
    """
    index, path = path.with_suffix(".idx"), path.with_suffix(".bin")
    for file in (index, path):
        check_readable(file)
    with opened(index) as file:
        data = file.read(34)
        code, sequences, documents = (
            int.from_bytes(data[a:b], "little") for a, b in ((17, 18), (18, 26), (26, 34))
        )
        version = int.from_bytes(data[9:17], "little")
        if len(data) < 34 or data[:9] != MEGATRON_MAGIC or version != 1:
            raise bad_file(index, "no Megatron index of version 1", got=data[:17])
        if code not in MEGATRON_DTYPES:
            raise bad_file(index, f"dtype code {code} is none of tokens", got=code)
        got, want = os.fstat(file.fileno()).st_size, 34 + 12 * sequences + 8 * documents
        if got != want:
            raise wrong_size(index, got, want)
        file.seek(0)
        data = file.read()
    dtype = np.dtype(MEGATRON_DTYPES[code])
    lengths = np.frombuffer(data, "<i4", sequences, 34)
    pointers = np.frombuffer(data, "<i8", sequences, 34 + 4 * sequences)
    ends = np.frombuffer(data, "<i8", documents, 34 + 12 * sequences)
    offsets = _megatron_offsets(index, lengths, pointers, ends, dtype.itemsize)
    sources = {index.name: hashlib.sha256(data).hexdigest()[:16]}
    return FileLayout(path, dtype, 0, int(offsets[-1]), offsets, sources)


def _megatron_offsets(
    index: Path,
    lengths: np.ndarray[Any, Any],
    pointers: np.ndarray[Any, Any],
    ends: np.ndarray[Any, Any],
    itemsize: int,
) -> IntArray:
    """Return where documents begin, in tokens: a document is a run of sequences."""
    if (lengths < 0).any():
        worst = int((lengths < 0).argmax())
        raise bad_file(index, f"sequence {worst} has {lengths[worst]} tokens")
    places = np.append(0, np.cumsum(lengths, dtype=np.int64))
    astray = pointers != places[:-1] * itemsize
    if astray.any():
        worst = int(astray.argmax())
        got, want = int(pointers[worst]), int(places[worst]) * itemsize
        what = f"sequence {worst} begins at byte {got} of the .bin file instead of {want}"
        raise bad_file(index, f"{what}, where the one before it ends", got=got, want=want)
    _check_rising(index, ends, len(lengths), "sequences")
    return places[ends]


def offsets_file(path: Path) -> Path | None:
    """Return the file of document ends that a file's sidecar names."""
    name = read_sidecar(path).offsets
    return path.with_name(name) if isinstance(name, str) else None


def sidecar_of(path: Path) -> Path:
    """Return where a file's sidecar is."""
    return path.with_name(f"{path.name}.json")


# ----------------------------------------------------------------------------------------- sidecars


def read_sidecar(path: Path) -> Sidecar:
    """Return what stands beside a file; nothing where nothing does.

    Raises:
        DataError: The sidecar is no JSON object of known keys.
    """
    side = sidecar_of(path)
    if not side.exists():
        return Sidecar()
    check_readable(side)
    try:
        with opened(side) as file:
            facts = orjson.loads(file.read())
    except orjson.JSONDecodeError as error:
        raise bad_file(side, f"bad JSON: {error}") from error
    rules: dict[str, Callable[[Any], bool]] = {
        "dtype": lambda x: x in DTYPES,
        "offsets": lambda x: (
            (type(x) is str and Path(x).name == x and "\0" not in x)
            or (type(x) is list and all(type(i) is int for i in x))
        ),
        "eos_id": lambda x: type(x) is int and x >= 0,
        "vocab_size": lambda x: type(x) is int and x >= 1,
        "sha256": lambda x: type(x) is str,
    }
    if not isinstance(facts, dict) or not facts.keys() <= rules.keys():
        got = ", ".join(facts) if isinstance(facts, dict) else type(facts).__name__
        raise bad_file(side, f"must be a JSON object of {', '.join(rules)}, got {got}")
    for name, value in facts.items():
        if not rules[name](value):
            what = f"one of {', '.join(DTYPES)}" if name == "dtype" else "what it must be"
            raise bad_file(side, f"{name} {value!r} is not {what}", got=value)
    return Sidecar(**facts)


def _sidecar_offsets(
    path: Path, side: Sidecar, count: int
) -> tuple[IntArray | None, dict[str, str]]:
    """Return the offsets that a sidecar gives, and hashes of the files that say them."""
    here = sidecar_of(path)
    if not here.exists():
        return None, {}
    sources = {here.name: _short_hash(here)}
    if side.offsets is None:
        return None, sources
    if isinstance(side.offsets, list):
        offsets = np.array(side.offsets, np.int64)
    else:
        here = path.with_name(side.offsets)
        check_readable(here)
        dtype, begin, size = _npy_header(here)
        with opened(here) as file:
            offsets = np.frombuffer(file.read(), dtype, size, begin).astype(np.int64)
        sources[here.name] = _short_hash(here)
    _check_rising(here, offsets, count, "tokens")
    return offsets, sources


def _check_rising(path: Path, offsets: np.ndarray[Any, Any], end: int, what: str) -> None:
    rises = len(offsets) > 1 and not (offsets[1:] < offsets[:-1]).any()
    if not rises or offsets[0] != 0 or offsets[-1] != end:
        found = f"{len(offsets)} numbers, {offsets[:3].tolist()} to {offsets[-1:].tolist()}"
        must = f"where documents begin and end must rise from 0 to {end}, the number of {what}"
        raise bad_file(path, f"{must}; got {found}")


def _short_hash(path: Path) -> str:
    with opened(path) as file:
        return hash_of(file, path)[:16]


def _size_of(path: Path) -> int:
    with opened(path) as file:
        return os.fstat(file.fileno()).st_size
