"""The members of a zip archive that torch.save wrote, found without unpacking anything."""

from __future__ import annotations

import struct
from pathlib import Path

import attrs

from trainkit.checkpoint.stored import read_exactly, refusal
from trainkit.convert.pickles import shown

_MOST_DIRECTORY = 16 * 1024 * 1024  # of about 150,000 members
_END, _END64, _LOCATOR64 = b"PK\5\6", b"PK\6\6", b"PK\6\7"
_FULL = 0xFFFFFFFF


@attrs.frozen
class Member:
    """One file of an archive: where its bytes lie in the file around it, and their CRC-32."""

    start: int
    size: int
    crc: int


def zip_members(handle: int, path: Path, start: int, size: int) -> dict[str, Member]:
    """Return the members of a zip archive that lies in a part of a file.

    Only what torch writes is read: members stored as they are, each once, none encrypted, all of
    them together no larger than the archive. So nothing can be larger than the file it is in.

    Args:
        handle: The file, open for reading.
        path: Its name, for messages.
        start: Where the archive begins, in bytes.
        size: Its size in bytes.

    Returns:
        For each name without the archive's own folder, `data.pkl` for instance, its place.

    Raises:
        CheckpointError: It is no such archive.
    """
    directory, place = _directory(handle, path, start, size)
    members: dict[str, Member] = {}
    at = 0
    while at < len(directory):
        name, member, at = _entry(directory, at, path)
        if name in members:
            raise refusal(path, f"holds {shown(name)!r} twice")
        members[name] = member
    if sum(member.size for member in members.values()) > size:
        raise refusal(path, "holds more bytes than it has: its members overlap")
    return {
        name: attrs.evolve(member, start=_data_start(handle, path, start, place, member))
        for name, member in members.items()
    }


def _directory(handle: int, path: Path, start: int, size: int) -> tuple[bytes, int]:
    """Return the central directory and its place in the archive."""
    if size < 22:
        raise refusal(path, f"holds {size} bytes where a zip archive was expected")
    end = bytes(read_exactly(handle, start + size - 22, 22, path))
    if end[:4] != _END or end[20:] != b"\0\0":
        raise refusal(path, "is no zip archive as torch.save writes them; older ones are not read")
    length, place = struct.unpack("<II", end[12:20])
    if size >= 98:
        locator = bytes(read_exactly(handle, start + size - 42, 20, path))
        if locator[:4] == _LOCATOR64:
            (at,) = struct.unpack("<Q", locator[8:16])
            if at + 56 > size:
                raise refusal(path, "is a damaged zip archive")
            wide = bytes(read_exactly(handle, start + at, 56, path))
            if wide[:4] != _END64:
                raise refusal(path, "is a damaged zip archive")
            length, place = struct.unpack("<QQ", wide[40:56])
    if length > _MOST_DIRECTORY or place + length > size:
        raise refusal(path, f"is a zip archive with a directory of {length} bytes")
    return bytes(read_exactly(handle, start + place, length, path)), place


def _entry(directory: bytes, at: int, path: Path) -> tuple[str, Member, int]:
    """Read one entry of a central directory; return its name, its sizes and the next place."""
    if directory[at : at + 4] != b"PK\1\2" or at + 46 > len(directory):
        raise refusal(path, "is a damaged zip archive")
    flags, method = struct.unpack_from("<HH", directory, at + 8)
    crc, packed, size, name_length, extra, comment = struct.unpack_from(
        "<IIIHHH", directory, at + 16
    )
    (place,) = struct.unpack_from("<I", directory, at + 42)
    raw = directory[at + 46 : at + 46 + name_length]
    name = raw.decode("utf-8", "replace")
    fields = directory[at + 46 + name_length : at + 46 + name_length + extra]
    size, packed, place = _wide(fields, size, packed, place)
    if method or size != packed or flags & 1:
        raise refusal(path, f"holds {shown(name)!r} compressed or encrypted; torch.save does not")
    next_at = at + 46 + name_length + extra + comment
    return name.partition("/")[2] or name, Member(place, size, crc), next_at


def _wide(fields: bytes, size: int, packed: int, place: int) -> tuple[int, int, int]:
    """Replace the sizes that do not fit into 32 bits by those of the zip64 field."""
    values = [size, packed, place]
    at = 0
    while at + 4 <= len(fields):
        kind, length = struct.unpack_from("<HH", fields, at)
        if kind == 1:
            wide = list(
                struct.unpack(f"<{length // 8}Q", fields[at + 4 : at + 4 + length // 8 * 8])
            )
            values = [wide.pop(0) if v == _FULL and wide else v for v in values]
        at += 4 + length
    return values[0], values[1], values[2]


def _data_start(handle: int, path: Path, start: int, end: int, member: Member) -> int:
    """Return where the bytes of a member lie in the file around the archive."""
    if member.start + 30 > end:
        raise refusal(path, "is a damaged zip archive")
    local = bytes(read_exactly(handle, start + member.start, 30, path))
    name_length, extra = struct.unpack("<HH", local[26:30])
    begin = member.start + 30 + name_length + extra
    if local[:4] != b"PK\3\4" or begin + member.size > end:
        raise refusal(path, "is a damaged zip archive")
    return start + begin
