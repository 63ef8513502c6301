"""Others' checkpoints as descriptions of tensors: their pickles are read as data, never executed.

Three formats: the directories of torch.distributed.checkpoint (`.metadata` and `.distcp` files),
the files of torch.save, and folders of safetensors files as the Hub has them. No torch here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeGuard

import attrs

from trainkit.checkpoint.boxes import DTYPES
from trainkit.checkpoint.manifest import plain_file_name
from trainkit.checkpoint.stored import (
    Piece,
    Stored,
    check_boxes,
    check_crc,
    contiguous_stride,
    opened,
    plain_tensor_name,
    read_exactly,
    refusal,
    regular_size,
    safetensors_file,
    sane_json,
    sizes_of,
)
from trainkit.convert.pickles import Made, Named, Pairs, read_pickle, shown
from trainkit.convert.zips import Member, zip_members

_METADATA = "torch.distributed.checkpoint.metadata."
_DCP_NAMES = {
    *(f"torch.{dtype}" for dtype in DTYPES),
    *(f"{_METADATA}{name}" for name in ("Metadata", "MetadataIndex", "StorageMeta")),
    *(f"{_METADATA}{name}" for name in ("TensorStorageMetadata", "BytesStorageMetadata")),
    *(f"{_METADATA}{name}" for name in ("ChunkStorageMetadata", "TensorProperties")),
    f"{_METADATA}_MEM_FORMAT_ENCODING",
    "torch.distributed.checkpoint.filesystem._StorageInfo",
    "torch.serialization._get_layout",
    "torch.Size",
    "collections.OrderedDict",
    "pathlib.PosixPath",
    "pathlib._local.PosixPath",
}
_STORAGES = {
    "torch.DoubleStorage": "float64",
    "torch.FloatStorage": "float32",
    "torch.HalfStorage": "float16",
    "torch.BFloat16Storage": "bfloat16",
    "torch.LongStorage": "int64",
    "torch.IntStorage": "int32",
    "torch.ShortStorage": "int16",
    "torch.CharStorage": "int8",
    "torch.ByteStorage": "uint8",
    "torch.BoolStorage": "bool",
}
_UNTYPED = ("torch.storage.UntypedStorage", "torch.UntypedStorage")
_REBUILD = ("torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3")
_PARAMETER = "torch._utils._rebuild_parameter"
_FILE_NAMES = {
    *(f"torch.{dtype}" for dtype in DTYPES),
    *_STORAGES,
    *_UNTYPED,
    *_REBUILD,
    _PARAMETER,
    "collections.OrderedDict",
    "torch.Size",
}
_MOST_NAMES = 2_000_000
_DEEPEST = 64
_MOST_PICKLE = 64 * 1024 * 1024


@attrs.frozen
class Found:
    """What a foreign checkpoint holds: its tensors, and the names of what is not read."""

    kind: str
    tensors: Mapping[str, Stored]
    skipped: tuple[str, ...] = ()


def foreign_tensors(source: Path) -> Found:
    """Describe the tensors of a foreign checkpoint, of whichever of the three formats it is.

    Args:
        source: A directory with `.metadata`, a file of torch.save (`.pt`, `.pth`, `.bin`), a
            safetensors file, or a folder of those.

    Raises:
        CheckpointError: It is none of them, or not a good one.

    Examples:
        >>> foreign_tensors(Path("/does/not/exist"))
        Traceback (most recent call last):
        ...
        trainkit.types.CheckpointError: checkpoint: /does/not/exist is not there
    """
    if not source.exists():
        raise refusal(source, "is not there")
    if source.is_file():
        if source.suffix == ".safetensors":
            return Found("safetensors", safetensors_file(source))
        return torch_file(source)
    if (source / ".metadata").exists():
        return distributed_directory(source)
    if any(source.glob("*.safetensors")):
        return Found("safetensors", safetensors_folder(source))
    files = sorted(source.glob("pytorch_model*.bin"))
    if files:
        return _joined([torch_file(path) for path in files], source)
    raise refusal(
        source, "is no checkpoint that can be converted: no .metadata, .safetensors or .bin in it"
    )


def _joined(parts: list[Found], source: Path) -> Found:
    tensors: dict[str, Stored] = {}
    for part in parts:
        for name, stored in part.tensors.items():
            if name in tensors:
                raise refusal(source, f"holds {name} in two of its files")
            tensors[name] = stored
    skipped = tuple(name for part in parts for name in part.skipped)
    return Found(parts[0].kind, tensors, skipped)


def safetensors_folder(folder: Path) -> dict[str, Stored]:
    """Describe the tensors of a folder of safetensors files.

    `model.safetensors.index.json` says which when it is there, else all are read.

    Raises:
        CheckpointError: A file is missing, holds a tensor twice or not the ones that the index
            says, or is not a good one.
    """
    listed = folder / "model.safetensors.index.json"
    if not listed.exists():
        files = sorted(folder.glob("*.safetensors"))
        return dict(_joined([Found("", safetensors_file(path)) for path in files], folder).tensors)
    size = regular_size(listed)
    if size > _MOST_PICKLE:
        raise refusal(listed, f"has {size} bytes, which no index has")
    with opened(listed) as handle:
        index = sane_json(read_exactly(handle, 0, size, listed), listed)
    where = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(where, dict) or not all(isinstance(name, str) for name in where.values()):
        raise refusal(listed, "holds no weight_map")
    for name in set(where.values()):
        if not plain_file_name(name):
            raise refusal(listed, f"names {name[:100]!r}, which is no plain file name")
    parts = {name: safetensors_file(folder / name) for name in sorted(set(where.values()))}
    for name, file in where.items():
        if name not in parts[file]:
            raise refusal(listed, f"says that {name[:100]} is in {file}, which it is not")
    return {name: parts[file][name] for name, file in where.items()}


# ----------------------------------------------------------------- torch.distributed.checkpoint


def distributed_directory(directory: Path) -> Found:
    """Describe the tensors of a directory that torch.distributed.checkpoint wrote.

    Objects that are no tensors are named in `skipped`; their pickles are never opened.

    Raises:
        CheckpointError: Its `.metadata` is not a good one, names a file outside of the directory,
            or its boxes do not cover a tensor exactly once.
    """
    path = directory / ".metadata"
    size = regular_size(path)
    if size > _MOST_PICKLE:
        raise refusal(path, f"has {size} bytes; {_MOST_PICKLE} are allowed")
    with opened(path) as handle:
        data = bytes(read_exactly(handle, 0, size, path))
    beside = sum(regular_size(file) for file in directory.glob("*.distcp") if file.is_file())
    value = read_pickle(data, allowed=_DCP_NAMES, where=path, beside=beside)
    state = _state(value, f"{_METADATA}Metadata", path)
    entries = _pairs(state.get("state_dict_metadata"), path)
    places = _places(state.get("storage_data"), directory, path)
    tensors: dict[str, Stored] = {}
    skipped: list[str] = []
    for name, entry in entries:
        if _is(entry, f"{_METADATA}BytesStorageMetadata"):
            skipped.append(shown(name))
            continue
        if not plain_tensor_name(name):
            raise refusal(path, f"holds a tensor of the odd name {shown(name)!r}")
        tensors[name] = _distributed_tensor(name, entry, places, path)
        check_boxes(name, tensors[name], path)
    return Found("torch.distributed.checkpoint", tensors, tuple(skipped))


def _is(value: Any, name: str) -> TypeGuard[Made]:
    return isinstance(value, Made) and value.name == name


def _pairs(value: Any, path: Path) -> list[tuple[Any, Any]]:
    if isinstance(value, Pairs) or _is(value, "collections.OrderedDict"):
        return value.pairs
    raise refusal(path, "is not what such a file says: a table is missing")


def _state(value: Any, name: str, path: Path) -> dict[str, Any]:
    """Return the fields of an object of a pickle."""
    if not _is(value, name):
        raise refusal(path, f"is not what such a file says: no {name.rpartition('.')[2]}")
    pairs = _pairs(value.state, path)
    return {key: item for key, item in pairs if isinstance(key, str)}


def _size(value: Any, path: Path) -> tuple[int, ...]:
    values = value.args[0] if _is(value, "torch.Size") and len(value.args) == 1 else value
    return sizes_of(values, path)


Place = tuple[Path, int, int]
"""A file, and where in it something begins and how long it is."""


def _places(value: Any, directory: Path, path: Path) -> dict[tuple[str, tuple[int, ...]], Place]:
    """Return where each box lies: {(tensor, offset): (file, start, length)}."""
    found: dict[tuple[str, tuple[int, ...]], Place] = {}
    storage = "torch.distributed.checkpoint.filesystem._StorageInfo"
    for key, info in _pairs(value, path):
        index, place = _state(key, f"{_METADATA}MetadataIndex", path), _state(info, storage, path)
        if index.get("offset") is None:  # of an object
            continue
        name, file = index.get("fqn"), place.get("relative_path")
        if not isinstance(name, str) or not isinstance(file, str) or not plain_file_name(file):
            raise refusal(path, f"names {shown(file)!r}, which is no plain file name")
        if place.get("transform_descriptors"):
            raise refusal(path, f"says that {shown(name)} is compressed, which is not read")
        start, length = sizes_of([place.get("offset"), place.get("length")], path)
        at = (name, _size(index["offset"], path))
        if at in found:
            raise refusal(path, f"says twice where {shown(name)} is")
        found[at] = (directory / file, start, length)
    return found


def _dtype(value: Any, path: Path) -> str:
    name = value.name.removeprefix("torch.") if isinstance(value, Named) else ""
    if name not in DTYPES:
        raise refusal(path, "holds a tensor without a dtype that is known")
    return name


def _distributed_tensor(
    name: str,
    entry: Any,
    places: Mapping[tuple[str, tuple[int, ...]], Place],
    path: Path,
) -> Stored:
    fields = _state(entry, f"{_METADATA}TensorStorageMetadata", path)
    properties = fields.get("properties")
    if not _is(properties, f"{_METADATA}TensorProperties"):
        raise refusal(path, f"says no dtype of {name}")
    first = properties.state[:1] if isinstance(properties.state, tuple) else ()
    dtype = _dtype(first[0] if first else None, path)
    shape = _size(fields.get("size"), path)
    if not isinstance(fields.get("chunks"), list):
        raise refusal(path, f"says not what {name} was cut into")
    pieces: list[Piece] = []
    for chunk in fields["chunks"]:
        box = _state(chunk, f"{_METADATA}ChunkStorageMetadata", path)
        offset, sizes = _size(box.get("offsets"), path), _size(box.get("sizes"), path)
        if (name, offset) not in places:
            if math.prod(sizes):
                raise refusal(path, f"says not where {name} from {list(offset)} on is")
            continue
        pieces += _item(name, dtype, sizes, offset, places[name, offset])
    return Stored(dtype, shape, tuple(pieces))


def _item(
    name: str, dtype: str, sizes: tuple[int, ...], offset: tuple[int, ...], place: Place
) -> Iterator[Piece]:
    """Describe one box, which is a file of torch.save inside of a `.distcp` file."""
    file, start, length = place
    if start + length > regular_size(file):
        raise refusal(file, f"ends before {name}, which should be at {start}")
    if not math.prod(sizes):
        return
    value, members = _archive(file, start, length)
    tensor = _tensor(value, members, file)
    if tensor is None:
        raise refusal(file, f"holds no tensor at {start}, where {name} should be")
    if (tensor.dtype, tensor.shape) != (dtype, sizes):
        found = f"{tensor.dtype}{list(tensor.shape)}"
        raise refusal(file, f"holds {found} where {name} should be {dtype}{list(sizes)}")
    yield attrs.evolve(tensor.pieces[0], offset=offset)


# ------------------------------------------------------------------------------------ torch.save


def torch_file(path: Path) -> Found:
    """Describe the tensors of a file that torch.save wrote, by their path in its dicts and lists.

    A tensor in {"model": {"a": x}} is "model.a"; values that are no tensors are named in `skipped`.

    Raises:
        CheckpointError: It is no such file, or mentions what tensors do not need.
    """
    value, members = _archive(path, 0, regular_size(path))
    tensors: dict[str, Stored] = {}
    skipped: list[str] = []
    for name, leaf in _leaves(value, path):
        stored = _tensor(leaf, members, path)
        if stored is None:
            skipped.append(shown(name))
            continue
        if name in tensors:
            raise refusal(path, f"holds {shown(name)!r} twice")
        tensors[name] = stored
        check_boxes(name, stored, path)
    if not tensors:
        raise refusal(path, "holds no tensor by a name")
    return Found("torch.save", tensors, tuple(skipped))


def _archive(path: Path, start: int, length: int) -> tuple[Any, Mapping[str, Member]]:
    """Read the pickle of an archive, as data; return it and where the storages lie."""
    with opened(path) as handle:
        members = zip_members(handle, path, start, length)
        order = members.get("byteorder")
        if order and read_exactly(handle, order.start, min(order.size, 16), path) != b"little":
            raise refusal(path, "has another byte order than this machine")
        program = members.get("data.pkl")
        if program is None or program.size > _MOST_PICKLE:
            raise refusal(path, "holds no data.pkl of a sane size")
        check = Piece(path, program.start, program.size, (), (), (), crc=program.crc)
        check_crc(check)
        data = bytes(read_exactly(handle, program.start, program.size, path))
    beside = length - program.size
    return read_pickle(data, allowed=_FILE_NAMES, where=path, beside=beside), members


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
    if type(value) in (list, tuple):
        return list(enumerate(value))
    table = isinstance(value, Pairs) or _is(value, "collections.OrderedDict")
    return value.pairs if table else None


def _tensor(value: Any, members: Mapping[str, Member], path: Path) -> Stored | None:
    """Return the tensor that a pickle asks to be rebuilt; None if it asks for something else."""
    if _is(value, _PARAMETER) and value.args:
        value = value.args[0]
    if not isinstance(value, Made) or value.name not in _REBUILD:
        return None
    if len(value.args) < 4 or not _is(value.args[0], "persistent"):
        raise refusal(path, "rebuilds a tensor from what is no storage")
    storage, skip, shape, stride = value.args[:4]
    pid = storage.args
    if not isinstance(pid, tuple) or len(pid) != 5 or pid[0] != "storage":
        raise refusal(path, "has a storage that is not described")
    kind, key = pid[1], pid[2]
    if value.name.endswith("v3"):
        dtype = _dtype(value.args[6] if len(value.args) > 6 else None, path)
    else:
        dtype = _STORAGES.get(kind.name if isinstance(kind, Named) else "", "")
    if dtype not in DTYPES or not isinstance(key, str) or f"data/{key}" not in members:
        raise refusal(path, "has a tensor without a dtype, or without bytes")
    member = members[f"data/{key}"]
    (start,) = sizes_of([skip], path)
    shape, stride = _size(shape, path), _size(stride, path)
    if not math.prod(shape):
        stride = contiguous_stride(shape)
    box = ((0,) * len(shape), shape, stride, start, member.crc)
    return Stored(dtype, shape, (Piece(path, member.start, member.size, *box),))
