"""What the pickles of others say of their tensors, found in a process that holds nothing else.

`python -m trainkit.weights.convert.pickled SOURCE` prints it as JSON. Files of torch.save are read
by `torch.load(weights_only=True)` onto the meta device, which says where the bytes of each tensor
lie and reads none of them. `.metadata`, which that loader cannot read (it is of a later pickle
protocol), is read with a table of the few names that a good one mentions. Whatever a pickle is up
to, this process has a bounded memory and time, and its output is plain JSON.
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
from trainkit.weights.checkpoint.boxes import DTYPES
from trainkit.weights.checkpoint.manifest import plain_file_name
from trainkit.weights.checkpoint.safe_files import open_plain, read_bounded, refusal, size_of
from trainkit.weights.checkpoint.stored import Extent, Stored, plain_tensor_name, sizes_of
from trainkit.weights.convert.foreign import Found, joined

_ROOM = 256 * 1024 * 1024  # bytes for what is described: 100,000 tensors take about 130 MB
_SECONDS = 600  # of computing
_MOST_PICKLE = 64 * 1024 * 1024
_FREE = 1024 * 1024  # bytes of `.metadata` beside hardly any tensors
_MOST_NAMES = 2_000_000
_DEEPEST = 64


def main(source: Path) -> None:
    """Print what a checkpoint's pickles say, or why they are refused.

    Effects:
        Limits this process; reads files; prints.
    """
    _limit_process()
    try:
        told = attrs.asdict(describe(source))
    except CheckpointError as error:
        told = {"refused": error.what}
    except MemoryError:
        told = {"refused": f"checkpoint: {source} takes over {_ROOM} bytes to describe"}
    sys.stdout.buffer.write(orjson.dumps(told, default=os.fspath))


def _limit_process() -> None:
    """Let this process have little more memory than it has now, and end it when it takes long."""
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    for kind, most in {
        resource.RLIMIT_AS: now + _ROOM,
        resource.RLIMIT_CPU: _SECONDS,
        resource.RLIMIT_CORE: 0,
    }.items():
        hard = resource.getrlimit(kind)[1]
        limit = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (limit, limit))


def describe(source: Path) -> Found:
    """Describe the tensors of a file of torch.save, or of a folder with `.metadata` or such files.

    What it tells is checked by who asks: that boxes are the whole of a tensor, and in their files.

    Raises:
        CheckpointError: It is not a good one.
    """
    if source.is_file():
        return torch_file(source)
    if (source / ".metadata").exists():
        return distributed_directory(source)
    files = sorted(source.glob("pytorch_model*.bin"))
    return joined([torch_file(path) for path in files], source)


def shown(value: Any) -> str:
    """Return a text from a file as it may be printed: short, and ASCII alone.

    Examples:
        >>> shown("weight"), shown([["deep"]])
        ('weight', 'a list')
    """
    if not isinstance(value, str):
        return f"a {type(value).__name__}"
    return value[:200].encode("ascii", "backslashreplace").decode()


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turn whatever goes wrong with a hostile file into a refusal of it."""
    try:
        yield
    except (CheckpointError, MemoryError):
        raise
    except zipfile.BadZipFile as error:
        said = "is no zip archive as torch.save writes them, or a damaged one; older ones are not"
        raise refusal(path, f"{said} read ({shown(str(error))})") from error
    except Exception as error:
        raise refusal(path, f"is refused: {_words(error)}; nothing of it was executed") from error


def _words(error: Exception) -> str:
    """Return what torch says of a pickle, without its advice to load it all the same."""
    text = str(error).partition("WeightsUnpickler error: ")[2] or str(error)
    name = re.search(r"GLOBAL (\S+)", text)
    if name is not None:
        return f"it mentions {shown(name[1])!r}, which no good file does"
    return f"{type(error).__name__}: {shown(text.strip().partition(chr(10))[0])}"


# ------------------------------------------------------------------------------------ torch.save


class _Window(io.RawIOBase):
    """A part of an open file, as a file of its own."""

    def __init__(self, handle: int, start: int, size: int) -> None:
        self._handle, self._start, self._size, self._at = handle, start, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        room = memoryview(buffer).cast("B")[: max(0, self._size - self._at)]
        count = os.preadv(self._handle, [room], self._start + self._at)
        self._at += count
        return count


@attrs.frozen(eq=False)
class _Archive:
    """A file of torch.save, or a part of a file that is one: its value, and its members by place.

    The tensors of `value` are on the meta device.
    """

    path: Path
    start: int
    value: Any
    members: Mapping[int, zipfile.ZipInfo]


def _archive(path: Path, start: int, size: int) -> _Archive:
    with open_plain(path, shared=True) as handle, _reading(path), warnings.catch_warnings():
        window = io.BufferedReader(_Window(handle, start, size))
        members = _members(window, path, size)
        window.seek(0)
        warnings.simplefilter("ignore")  # of another pickle protocol; what it lacks is refused
        value = torch.load(window, map_location="meta", weights_only=True)
    return _Archive(path, start, value, members)


def _members(window: BinaryIO, path: Path, size: int) -> dict[int, zipfile.ZipInfo]:
    """Return the members of an archive by where their bytes begin.

    Only what torch writes is taken: members stored as they are, each once, none encrypted, all
    together no larger than the archive. So nothing can be larger than the file it is in.
    """
    with zipfile.ZipFile(window) as archive:
        found = {info.filename.partition("/")[2]: info for info in archive.infolist()}
        if len(found) < len(archive.infolist()):
            raise refusal(path, "holds a member twice")
        for name, info in found.items():
            if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
                raise refusal(path, f"holds {shown(name)!r} compressed or encrypted")
        if sum(info.file_size for info in found.values()) > size:
            raise refusal(path, "holds more bytes than it has: its members overlap")
        if "data.pkl" not in found or found["data.pkl"].file_size > _MOST_PICKLE:
            raise refusal(path, "holds no data.pkl of a sane size")
        archive.read(found["data.pkl"])  # compares its CRC-32, as torch does not
        if "byteorder" in found and archive.read(found["byteorder"]) != b"little":
            raise refusal(path, "has another byte order than this machine")
    places = {}
    for info in found.values():
        window.seek(info.header_offset + 26)
        name, extra = struct.unpack("<HH", window.read(4))
        places[info.header_offset + 30 + name + extra] = info
    return places


def torch_file(path: Path) -> Found:
    """Describe the tensors of a file that torch.save wrote, by their path in its dicts and lists.

    A tensor in {"model": {"a": x}} is "model.a"; values that are no tensors are named in `skipped`.

    Raises:
        CheckpointError: It is no such file, or mentions what tensors do not need.
    """
    archive = _archive(path, 0, size_of(path))
    tensors: dict[str, Stored] = {}
    skipped: list[str] = []
    for name, leaf in _leaves(archive.value, path):
        if not isinstance(leaf, Tensor):
            skipped.append(shown(name))
            continue
        if name in tensors:
            raise refusal(path, f"holds {shown(name)!r} twice")
        tensors[name] = _stored(leaf, archive)
    if not tensors:
        raise refusal(path, "holds no tensor by a name")
    return Found("torch.save", tensors, tuple(skipped))


def _leaves(value: Any, path: Path) -> Iterator[tuple[str, Any]]:
    """Walk dicts and lists; yield every other value with its path, names joined by dots."""
    todo: list[tuple[str, Any, int]] = [("", value, 0)]
    seen = 0
    while todo:
        name, value, depth = todo.pop()
        seen += 1
        if depth > _DEEPEST or seen > _MOST_NAMES or len(name) > 1000:
            raise refusal(path, "is nested too deeply or holds too many values")
        items = _items(value)
        if items is None:
            yield name, value
            continue
        if len(todo) + len(items) > _MOST_NAMES:
            raise refusal(path, "holds too many values")
        for key, item in reversed(items):
            if not isinstance(key, str | int):
                raise refusal(path, "has a key that is neither a name nor a number")
            todo.append((f"{name}.{key}" if name else str(key), item, depth + 1))


def _items(value: Any) -> list[tuple[Any, Any]] | None:
    """Return the keys and values of a dict or a list; None of anything else."""
    if isinstance(value, Mapping):
        return list(value.items())
    return list(enumerate(value)) if type(value) in (list, tuple) else None


def _stored(tensor: Tensor, archive: _Archive) -> Stored:
    """Say where the bytes of a tensor lie that torch has put onto the meta device."""
    dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
    if dtype not in DTYPES or tensor.layout != torch.strided or tensor.is_neg():
        raise refusal(archive.path, "holds a tensor of a dtype or layout that is not read")
    if not math.prod(shape):
        return Stored(dtype, shape, ())
    place = getattr(tensor.untyped_storage(), "_checkpoint_offset", None)  # torch 2.11 to 2.14
    if place not in archive.members:
        raise refusal(archive.path, "has a tensor without bytes")
    member = archive.members[place]
    box = ((0,) * len(shape), shape, tuple(tensor.stride()), int(tensor.storage_offset()))
    where = (archive.path, archive.start + place, member.file_size)
    return Stored(dtype, shape, (Extent(*where, *box, crc=member.CRC),))


# ----------------------------------------------------------------- torch.distributed.checkpoint


def distributed_directory(directory: Path) -> Found:
    """Describe the tensors of a directory that torch.distributed.checkpoint wrote.

    Objects that are no tensors are named in `skipped`; their pickles are never opened.

    Raises:
        CheckpointError: Its `.metadata` is not a good one, or names a file outside of the
            directory.
    """
    from torch.distributed.checkpoint import metadata as dcp  # noqa: PLC0415 - takes a second

    path = directory / ".metadata"
    with _reading(path):
        said = _read_metadata(path)
        tensors: dict[str, Stored] = {}
        skipped: list[str] = []
        for name, entry in said.state_dict_metadata.items():
            if isinstance(entry, dcp.BytesStorageMetadata):
                skipped.append(shown(name))
                continue
            if not plain_tensor_name(name):
                raise refusal(path, f"holds a tensor of the odd name {shown(name)!r}")
            dtype = str(entry.properties.dtype).removeprefix("torch.")
            extents = [
                extent
                for chunk in entry.chunks
                for extent in _chunk(name, dtype, chunk, said.storage_data, path)
            ]
            tensors[name] = Stored(dtype, sizes_of([*entry.size], path), tuple(extents))
    return Found("torch.distributed.checkpoint", tensors, tuple(skipped))


def _read_metadata(path: Path) -> Any:
    """Read a pickle of which every name is looked up in a table, and nowhere else."""
    allowed = _metadata_names()

    class Reader(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            full = f"{module}.{name}"
            if full not in allowed:
                raise pickle.UnpicklingError(f"GLOBAL {full}")
            return allowed[full]

    # A description has some 250 bytes, and what it describes is an archive of 1,000 and more.
    beside = sum(file.lstat().st_size for file in path.parent.glob("*.distcp"))
    data = read_bounded(path, min(_MOST_PICKLE, _FREE + beside), shared=True)
    return Reader(io.BytesIO(data)).load()


def _metadata_names() -> dict[str, Any]:
    """Return what the `.metadata` of tensors mentions: classes of plain fields, and dtypes."""
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
        f"{filesystem.__name__}._StorageInfo": filesystem._StorageInfo,  # noqa: SLF001 - it is what a file says
        "torch.serialization._get_layout": torch.serialization._get_layout,  # noqa: SLF001 - likewise
        "torch.Size": torch.Size,
        "collections.OrderedDict": OrderedDict,
        "pathlib.PosixPath": PurePosixPath,
        "pathlib._local.PosixPath": PurePosixPath,
        "builtins.getattr": _member,
    }


def _member(kind: Any, name: Any) -> Any:
    """Return a member of an enum, which Python 3.11.2 writes as `getattr(kind, name)`.

    Raises:
        UnpicklingError: It is any other `getattr`.
    """
    members: Any = getattr(kind, "__members__", {}) if isinstance(kind, EnumType) else {}
    if name not in members:
        raise pickle.UnpicklingError("GLOBAL builtins.getattr")
    return members[name]


def _chunk(
    name: str, dtype: str, chunk: Any, places: Mapping[Any, Any], path: Path
) -> Iterator[Extent]:
    """Describe one box, which is a file of torch.save inside of a `.distcp` file."""
    from torch.distributed.checkpoint.metadata import MetadataIndex  # noqa: PLC0415 - as above

    offset, shape = (sizes_of([*sizes], path) for sizes in (chunk.offsets, chunk.sizes))
    if not math.prod(shape):
        return
    place = places.get(MetadataIndex(name, offset))
    if place is None:
        raise refusal(path, f"says not where {name} from {list(offset)} on is")
    if not plain_file_name(place.relative_path):
        raise refusal(path, f"names {shown(place.relative_path)!r}, which is no plain file name")
    if getattr(place, "transform_descriptors", None):
        raise refusal(path, f"says that {name} is compressed, which is not read")
    start, length = sizes_of([place.offset, place.length], path)
    file = path.with_name(place.relative_path)
    if start + length > size_of(file):
        raise refusal(file, f"ends before {name}, which should be at {start}")
    archive = _archive(file, start, length)
    if not isinstance(archive.value, Tensor):
        raise refusal(file, f"holds no tensor at {start}, where {name} should be")
    found = _stored(archive.value, archive)
    if (found.dtype, found.shape) != (dtype, shape):
        said = f"{found.dtype}{list(found.shape)} where {name} should be {dtype}{list(shape)}"
        raise refusal(file, f"holds {said}")
    yield attrs.evolve(found.extents[0], offset=offset)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
