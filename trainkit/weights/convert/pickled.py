"""Describe the tensors in foreign pickles, in a process of bounded memory and time.

`python -m trainkit.weights.convert.pickled SOURCE` prints the description as JSON. Files of
torch.save are loaded by `torch.load(weights_only=True)` onto the meta device, which locates the
bytes of each tensor and reads none of them. That loader does not support the pickle protocol of
`.metadata`, which is read with a table of the few names that it may refer to. Whatever a pickle
does, it can only end this process, and the output is plain JSON.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import re
import resource
import struct
import sys
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import EnumType
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import attrs
import orjson
import torch
from torch import Tensor

from trainkit.types import CheckpointError
from trainkit.weights.checkpoint.boxes import DTYPES, get_dtype_name
from trainkit.weights.checkpoint.manifest import is_plain_file_name
from trainkit.weights.checkpoint.safe_files import get_file_size, open_plain, read_bounded, refusal
from trainkit.weights.checkpoint.tensor_files import (
    Extent,
    Stored,
    is_plain_tensor_name,
    parse_sizes,
)
from trainkit.weights.convert.foreign import Found, merge_found

_MEMORY = 256 * 1024 * 1024  # bytes for the description; 100,000 tensors take about 130 MB
_CPU_SECONDS = 600
_MAX_PICKLE = 64 * 1024 * 1024  # bytes
_MIN_METADATA = 1024 * 1024  # bytes of `.metadata` that are allowed however few tensors there are
_MAX_NAMES = 2_000_000
_MAX_DEPTH = 64


def main(source: Path) -> None:
    """Print the description of a checkpoint's pickles, or why they are rejected, as JSON.

    Effects:
        Limits this process; reads files; prints.
    """
    _limit_process()
    try:
        report = attrs.asdict(describe(source))
    except CheckpointError as error:
        report = {"refused": error.what}
    except MemoryError:
        report = {"refused": f"checkpoint: {source} takes over {_MEMORY} bytes to describe"}
    sys.stdout.buffer.write(orjson.dumps(report, default=os.fspath))


def _limit_process() -> None:
    """Limit the memory and the CPU time of this process, and disable core dumps."""
    # RLIMIT_AS limits the address space, of which importing torch has reserved gigabytes.
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    for kind, value in {
        resource.RLIMIT_AS: used + _MEMORY,
        resource.RLIMIT_CPU: _CPU_SECONDS,
        resource.RLIMIT_CORE: 0,
    }.items():
        # A limit that is lower already must stay: raising it needs privileges.
        hard = resource.getrlimit(kind)[1]
        limit = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (limit, limit))


def describe(source: Path) -> Found:
    """Describe the tensors of a file of torch.save, or of a folder with `.metadata` or such files.

    The caller must check that boxes cover their tensors and lie inside their files.

    Raises:
        CheckpointError: It is damaged or malicious.
    """
    if source.is_file():
        return _describe_torch_file(source)
    if (source / ".metadata").exists():
        return _describe_distributed_directory(source)
    files = sorted(source.glob("pytorch_model*.bin"))
    return merge_found([_describe_torch_file(path) for path in files], source)


def _make_printable(value: Any) -> str:
    """Make a text from a file printable: short and ASCII.

    Examples:
        >>> _make_printable("weight"), _make_printable([["deep"]])
        ('weight', 'a list')
    """
    if not isinstance(value, str):
        return f"a {type(value).__name__}"
    return value[:200].encode("ascii", "backslashreplace").decode()


@contextmanager
def _convert_errors(path: Path) -> Iterator[None]:
    """Convert every error of a hostile file to a CheckpointError."""
    try:
        yield
    except (CheckpointError, MemoryError):
        raise
    except zipfile.BadZipFile as error:
        raise refusal(
            path,
            "is no zip archive as torch.save writes them, or a damaged one; older ones are not "
            f"read ({_make_printable(str(error))})",
        ) from error
    except Exception as error:
        # Torch's reason alone: its message also advises to load the pickle all the same.
        text = str(error).partition("WeightsUnpickler error: ")[2] or str(error)
        name = re.search(r"GLOBAL (\S+)", text)
        if name is not None:
            raise refusal(
                path,
                f"is refused: it mentions {_make_printable(name[1])!r}, which no good file does; "
                "nothing of it was executed",
            ) from error
        line = _make_printable(text.strip().partition("\n")[0])
        raise refusal(
            path, f"is refused: {type(error).__name__}: {line}; nothing of it was executed"
        ) from error


# ------------------------------------------------------------------------------------ torch.save


class _Window(io.RawIOBase):
    """A part of an open file, as a separate file.

    zipfile and torch look for an archive's directory at the end of a file, and `.distcp` files
    contain many archives.
    """

    def __init__(self, handle: int, start: int, size: int) -> None:
        self._handle = handle
        self._start = start
        self._size = size
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        # SEEK_SET, SEEK_CUR and SEEK_END are 0, 1 and 2.
        self._position = offset + (0, self._position, self._size)[whence]
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")[: max(0, self._size - self._position)]
        count = os.preadv(self._handle, [view], self._start + self._position)
        self._position += count
        return count


@attrs.frozen(eq=False)
class _Archive:
    """A file of torch.save, or a part of a file in that format.

    The tensors of `value` are on the meta device. `members` are the members of the zip archive by
    the offset of their bytes.
    """

    path: Path
    start: int
    value: Any
    members: Mapping[int, zipfile.ZipInfo]


def _load_archive(path: Path, start: int, size: int) -> _Archive:
    with open_plain(path, shared=True) as handle, _convert_errors(path), warnings.catch_warnings():
        window = io.BufferedReader(_Window(handle, start, size))
        members = _read_members(window, path, size)
        window.seek(0)
        # torch warns about later pickle protocols, and raises for opcodes that it does not support.
        warnings.simplefilter("ignore")
        value = torch.load(window, map_location="meta", weights_only=True)
    return _Archive(path, start, value, members)


def _read_members(window: BinaryIO, path: Path, size: int) -> dict[int, zipfile.ZipInfo]:
    """Return the members of a zip archive by the offset of their bytes.

    Only what torch writes is accepted: members without compression or encryption, each once, all
    together no larger than the archive. So nothing can expand to more than the file.
    """
    with zipfile.ZipFile(window) as archive:
        by_name = {info.filename.partition("/")[2]: info for info in archive.infolist()}
        if len(by_name) < len(archive.infolist()):
            raise refusal(path, "holds a member twice")
        for name, info in by_name.items():
            if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
                raise refusal(path, f"holds {_make_printable(name)!r} compressed or encrypted")
        if sum(info.file_size for info in by_name.values()) > size:
            raise refusal(path, "holds more bytes than it has: its members overlap")
        if "data.pkl" not in by_name or by_name["data.pkl"].file_size > _MAX_PICKLE:
            raise refusal(path, "holds no data.pkl of a sane size")
        archive.read(by_name["data.pkl"])  # verifies its CRC-32, which torch.load does not
        if "byteorder" in by_name and archive.read(by_name["byteorder"]) != b"little":
            raise refusal(path, "has another byte order than this machine")
    members = {}
    for info in by_name.values():
        # A local header has 30 bytes, the last four of them the lengths of name and extra field.
        # These may differ from the lengths in the central directory, which zipfile returns.
        window.seek(info.header_offset + 26)
        name_length, extra_length = struct.unpack("<HH", window.read(4))
        members[info.header_offset + 30 + name_length + extra_length] = info
    return members


def _describe_torch_file(path: Path) -> Found:
    """Describe the tensors of a file of torch.save, by their path in its dicts and lists.

    A tensor in {"model": {"a": x}} is "model.a"; values that are not tensors are named in
    `skipped`.

    Raises:
        CheckpointError: It is not such a file, or refers to names that tensors do not need.
    """
    archive = _load_archive(path, 0, get_file_size(path))
    tensors: dict[str, Stored] = {}
    skipped: list[str] = []
    for name, leaf in _flatten(archive.value, path):
        if not isinstance(leaf, Tensor):
            skipped.append(_make_printable(name))
            continue
        if name in tensors:  # {"a": {"b": x}, "a.b": y} gives two tensors one name
            raise refusal(path, f"holds {_make_printable(name)!r} twice")
        tensors[name] = _locate(leaf, archive)
    if not tensors:
        raise refusal(path, "holds no tensor by a name")
    return Found("torch.save", tensors, tuple(skipped))


def _flatten(value: Any, path: Path) -> Iterator[tuple[str, Any]]:
    """Yield every value of nested dicts and lists with its path, names joined by dots."""
    pending: list[tuple[str, Any, int]] = [("", value, 0)]
    visited = 0
    while pending:
        name, value, depth = pending.pop()
        visited += 1
        # A pickle may contain the same list many times over, and so expand without end.
        if depth > _MAX_DEPTH or visited > _MAX_NAMES or len(name) > 1000:
            raise refusal(path, "is nested too deeply or holds too many values")
        if isinstance(value, Mapping):
            items = list(value.items())
        elif type(value) in (list, tuple):
            items = list(enumerate(value))
        else:
            yield name, value
            continue
        if len(pending) + len(items) > _MAX_NAMES:
            raise refusal(path, "holds too many values")
        for key, item in reversed(items):
            if not isinstance(key, str | int):
                raise refusal(path, "has a key that is neither a name nor a number")
            pending.append((f"{name}.{key}" if name else str(key), item, depth + 1))


def _locate(tensor: Tensor, archive: _Archive) -> Stored:
    """Return where the bytes of a tensor are that torch has loaded onto the meta device."""
    dtype = get_dtype_name(tensor.dtype)
    shape = tuple(tensor.shape)
    # A lazily negated view would be read without its sign.
    if dtype not in DTYPES or tensor.layout != torch.strided or tensor.is_neg():
        raise refusal(archive.path, "holds a tensor of a dtype or layout that is not read")
    if not math.prod(shape):
        return Stored(dtype, shape, ())
    start = getattr(tensor.untyped_storage(), "_checkpoint_offset", None)  # torch 2.11 to 2.14
    if start not in archive.members:
        raise refusal(archive.path, "has a tensor without bytes")
    member = archive.members[start]
    extent = Extent(
        path=archive.path,
        start=archive.start + start,
        size=member.file_size,
        offset=(0,) * len(shape),
        shape=shape,
        stride=tuple(tensor.stride()),
        skip=int(tensor.storage_offset()),
        crc=member.CRC,
    )
    return Stored(dtype, shape, (extent,))


# ----------------------------------------------------------------- torch.distributed.checkpoint


def _describe_distributed_directory(directory: Path) -> Found:
    """Describe the tensors of a directory of torch.distributed.checkpoint.

    Objects that are not tensors are named in `skipped`; their pickles are never opened.

    Raises:
        CheckpointError: Its `.metadata` is damaged or malicious, or names a file outside of the
            directory.
    """
    from torch.distributed.checkpoint import metadata as dcp  # noqa: PLC0415 - takes a second

    path = directory / ".metadata"
    with _convert_errors(path):
        metadata = _read_metadata(path)
        tensors: dict[str, Stored] = {}
        skipped: list[str] = []
        for name, entry in metadata.state_dict_metadata.items():
            if isinstance(entry, dcp.BytesStorageMetadata):
                skipped.append(_make_printable(name))
                continue
            if not is_plain_tensor_name(name):
                raise refusal(path, f"holds a tensor of the odd name {_make_printable(name)!r}")
            dtype = get_dtype_name(entry.properties.dtype)
            extents = [
                extent
                for chunk in entry.chunks
                for extent in _locate_chunk(name, dtype, chunk, metadata.storage_data, path)
            ]
            tensors[name] = Stored(dtype, parse_sizes([*entry.size], path), tuple(extents))
    return Found("torch.distributed.checkpoint", tensors, tuple(skipped))


def _read_metadata(path: Path) -> Any:
    """Unpickle `.metadata`; every global name is looked up in a table, and nowhere else."""
    allowed = _allowed_names()

    class Reader(pickle.Unpickler):
        # Unpickler calls this for every global, before anything in the pickle can be called.
        def find_class(self, module: str, name: str) -> Any:
            full = f"{module}.{name}"
            if full not in allowed:
                raise pickle.UnpicklingError(f"GLOBAL {full}")
            return allowed[full]

    # A tensor's entry has some 250 bytes, and its archive at least 1,000: more metadata than data
    # is an attack on the memory.
    data_bytes = sum(file.lstat().st_size for file in path.parent.glob("*.distcp"))
    data = read_bounded(path, min(_MAX_PICKLE, _MIN_METADATA + data_bytes), shared=True)
    return Reader(io.BytesIO(data)).load()


def _allowed_names() -> dict[str, Any]:
    """Return the globals in the `.metadata` of tensors: classes of plain fields, and dtypes."""
    from torch.distributed.checkpoint import filesystem  # noqa: PLC0415 - takes a second
    from torch.distributed.checkpoint import metadata as dcp  # noqa: PLC0415

    records = ("Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata")
    records += ("BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties")
    return {
        **{f"torch.{name}": getattr(torch, name) for name in DTYPES},
        **{
            f"{dcp.__name__}.{name}": getattr(dcp, name)
            for name in (*records, "_MEM_FORMAT_ENCODING")
        },
        f"{filesystem.__name__}._StorageInfo": filesystem._StorageInfo,  # noqa: SLF001 - files name it
        "torch.serialization._get_layout": torch.serialization._get_layout,  # noqa: SLF001 - likewise
        "torch.Size": torch.Size,
        "collections.OrderedDict": OrderedDict,
        "pathlib.PosixPath": PurePosixPath,
        "pathlib._local.PosixPath": PurePosixPath,
        "builtins.getattr": _get_enum_member,
    }


def _get_enum_member(kind: Any, name: Any) -> Any:
    """Return a member of an enum, which Python 3.11.2 pickles as `getattr(kind, name)`.

    Raises:
        UnpicklingError: It is any other `getattr`.
    """
    members: Any = getattr(kind, "__members__", {}) if isinstance(kind, EnumType) else {}
    if name not in members:
        raise pickle.UnpicklingError("GLOBAL builtins.getattr")
    return members[name]


def _locate_chunk(
    name: str,
    dtype: str,
    chunk: Any,
    storage: Mapping[Any, Any],
    path: Path,
) -> Iterator[Extent]:
    """Yield the extent of one box, which is in torch.save's format inside a `.distcp` file."""
    from torch.distributed.checkpoint.metadata import MetadataIndex  # noqa: PLC0415 - as above

    offset = parse_sizes([*chunk.offsets], path)
    shape = parse_sizes([*chunk.sizes], path)
    if not math.prod(shape):
        return
    info = storage.get(MetadataIndex(name, offset))
    if info is None:
        raise refusal(path, f"says not where {name} from {list(offset)} on is")
    if not is_plain_file_name(info.relative_path):
        raise refusal(
            path, f"names {_make_printable(info.relative_path)!r}, which is no plain file name"
        )
    if getattr(info, "transform_descriptors", None):
        raise refusal(path, f"says that {name} is compressed, which is not read")
    start, length = parse_sizes([info.offset, info.length], path)
    file = path.with_name(info.relative_path)
    if start + length > get_file_size(file):
        raise refusal(file, f"ends before {name}, which should be at {start}")
    archive = _load_archive(file, start, length)
    if not isinstance(archive.value, Tensor):
        raise refusal(file, f"holds no tensor at {start}, where {name} should be")
    found = _locate(archive.value, archive)
    if (found.dtype, found.shape) != (dtype, shape):
        raise refusal(
            file,
            f"holds {found.dtype}{list(found.shape)} where {name} should be {dtype}{list(shape)}",
        )
    yield attrs.evolve(found.extents[0], offset=offset)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
