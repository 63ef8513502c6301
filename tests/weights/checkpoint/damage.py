"""Damage of every kind to every file of a checkpoint, and whether it is detected.

`python tests/faults/soak.py` does it a thousand times; test_load.py some dozens of times.
"""

import random
import shutil
from pathlib import Path

import attrs

PAGE = 4096
KINDS = ("flip", "truncation", "page", "mix")


@attrs.frozen
class Damage:
    """How often each kind was tried, {kind: number}, and a sentence for each undetected damage."""

    tried: dict[str, int]
    undetected: list[str]


def damage(path, other, detect, *, flips, truncations, pages, mixes, seed):
    """Damage a checkpoint repeatedly and restore it each time; count the undetected damage.

    `path` is a checkpoint of at least two tensor files, `other` one of the same run and layout at
    another step. `detect(path)` returns whether something is wrong. Every file, the manifest too,
    is hit as often as any other; every damage changes at least one byte.
    """
    chance = random.Random(seed)
    counts = dict(zip(KINDS, (flips, truncations, pages, mixes), strict=True))
    path, other = Path(path), Path(other)
    assert not detect(path), "the checkpoint was damaged before"
    undetected = []
    for kind, count in counts.items():
        names = sorted(file.name for file in path.iterdir())
        for number in range(count):
            before = {file.name: file.read_bytes() for file in path.iterdir()}
            description = _HURT[kind](path, names[number % len(names)], other, chance)
            if not detect(path):
                undetected.append(description)
            _restore(path, before)
    assert not detect(path), "the checkpoint was not restored"
    return Damage(counts, undetected)


def _restore(path, before):
    for entry in path.iterdir():
        if entry.name not in before:
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    for name, data in before.items():
        if not (path / name).is_file() or (path / name).read_bytes() != data:
            (path / name).unlink(missing_ok=True)
            (path / name).write_bytes(data)


def _flip(path, name, _, chance):
    data = bytearray((path / name).read_bytes())
    bit = chance.randrange(8 * len(data))
    data[bit // 8] ^= 1 << bit % 8
    (path / name).write_bytes(data)
    return f"bit {bit} of {name} flipped"


def _truncate(path, name, _, chance):
    data = (path / name).read_bytes()
    size = chance.randrange(len(data))
    (path / name).write_bytes(data[:size])
    return f"{name} cut to {size} of {len(data)} bytes"


def _zero(path, name, _, chance):
    data = bytearray((path / name).read_bytes())
    pages = range(-(-len(data) // PAGE))
    full = [page for page in pages if any(data[page * PAGE : (page + 1) * PAGE])]
    page = chance.choice(full)
    end = min((page + 1) * PAGE, len(data))
    data[page * PAGE : end] = bytes(end - page * PAGE)
    (path / name).write_bytes(data)
    return f"page {page} of {name} lost"


def _mix(path, name, other, chance):
    """Change whole files: swap two, take one of another step, delete, or add one."""
    data = (path / name).read_bytes()
    shards = sorted(file.name for file in path.glob("*.safetensors"))
    what = chance.choice(["swap", "another step's", "deleted", "added", "doubled"])
    if what == "swap":
        first, second = chance.sample(shards, 2)
        one, two = ((path / shard).read_bytes() for shard in (first, second))
        assert one != two
        (path / first).write_bytes(two)
        (path / second).write_bytes(one)
        return f"{first} and {second} swapped"
    if what == "another step's" and (other / name).read_bytes() != data:
        (path / name).write_bytes((other / name).read_bytes())
    elif what == "deleted":
        (path / name).unlink()
    elif what == "doubled":
        (path / name).write_bytes(data + data)
    else:
        (path / f"rank_{chance.randrange(100):05d}-9.safetensors").write_bytes(data)
    return f"{name}: {what}"


_HURT = dict(zip(KINDS, (_flip, _truncate, _zero, _mix), strict=True))
