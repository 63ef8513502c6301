"""Check before the first step that all ranks have the same configuration, code and data."""

from __future__ import annotations

import functools
import hashlib
import platform
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import orjson
import torch

import trainkit
from trainkit.collectives import all_gather_objects
from trainkit.files import flatten_table, read_version
from trainkit.types import Axis, ConfigError


def make_code_facts(config: Any = None) -> dict[str, str]:
    """Return versions, and hashes of the source of trainkit and of the recipe.

    Args:
        config: The record of the run's flags: the recipe is the file that defines its class, also
            where another process has imported it. Without one, or with a class of trainkit's own,
            it is the script that Python was started with.

    Effects:
        Reads the source files (2 MB, 30 ms), trainkit's at the first call.

    Examples:
        >>> sorted(make_code_facts())
        ['python', 'recipe source', 'torch', 'trainkit', 'trainkit source']
    """
    module = type(config).__module__ if attrs.has(type(config)) else "__main__"
    if module.startswith("trainkit."):
        module = "__main__"
    script = getattr(sys.modules.get(module), "__file__", None)  # None in a notebook
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "trainkit": read_version(),
        "trainkit source": _hash_library(),
        "recipe source": _hash_files(None, [Path(script)] if script else []),
    }


@functools.cache
def _hash_library() -> str:
    package = Path(trainkit.__file__).parent
    return _hash_files(package, sorted(package.rglob("*.py")))


def _hash_files(root: Path | None, files: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        # Names end in a null byte and hashes have a fixed length, so that no two lists of files
        # give the same bytes.
        digest.update(f"{file.relative_to(root) if root else ''}\0".encode())
        digest.update(hashlib.sha256(file.read_bytes()).digest() if file.is_file() else b"")
    return digest.hexdigest()[:16]


def check_ranks_agree(axis: Axis, facts: Mapping[str, Any]) -> None:
    """Raise ConfigError on all ranks if they differ in configuration, code or data.

    A rank with another seed or another copy of the source would train without an error, and the
    result would be undefined. As long as all are equal, only hashes are exchanged.

    Args:
        axis: All ranks of the run.
        facts: Values that must be equal: the configuration, `make_code_facts()`, fingerprints of
            the data. Any values of JSON, or with a text; mappings may be nested.

    Raises:
        ConfigError: Ranks differ; the message has the first field that does, with its values.

    Effects:
        Communicates on `axis`.

    Examples:
        >>> from trainkit.mesh import solo_parallel
        >>> check_ranks_agree(solo_parallel().world, {"seed": 1} | make_code_facts())
    """
    # As values of JSON: paths and records become texts, which compare equal on all ranks.
    flat = {
        name: orjson.loads(orjson.dumps(value, default=str)) for name, value in flatten_table(facts)
    }
    text = orjson.dumps(flat, option=orjson.OPT_SORT_KEYS)
    hashes = all_gather_objects(hashlib.sha256(text).hexdigest(), axis)
    if len(set(hashes)) == 1:
        return
    # The ranks differ, so all values are sent to say in what.
    difference = find_difference(all_gather_objects(flat, axis))
    assert difference is not None
    field, message = difference
    raise ConfigError(
        f"check_ranks_agree: {message}",
        where=field,
        want="the same on all ranks",
        hint="start all ranks with one command, from one copy of the code, on the same data",
    )


def find_difference(facts: Sequence[Mapping[str, Any]]) -> tuple[str, str] | None:
    """Return the first field in which ranks differ and a message with its values, or None.

    Args:
        facts: The facts of each rank, in rank order.

    Examples:
        >>> find_difference([{"seed": 0}, {"seed": 7}, {"seed": 0}])
        ('seed', 'ranks differ in seed: rank 1 has 7, the others have 0')
    """
    names = list(dict.fromkeys(name for rank in facts for name in rank))
    different = [name for name in names if len({_format_fact(rank, name) for rank in facts}) > 1]
    if not different:
        return None
    first, *more = different
    texts = [_format_fact(rank, first) for rank in facts]
    # The most frequent value; with two ranks, that of rank 0.
    counts = Counter(texts)
    usual = max(counts, key=lambda text: (counts[text], text == texts[0]))
    odd_ranks = [rank for rank, text in enumerate(texts) if text != usual]
    shown = ", ".join(f"rank {rank} has {texts[rank]}" for rank in odd_ranks[:8])
    if len(odd_ranks) > 8:
        shown += f" (and {len(odd_ranks) - 8} more)"
    message = f"ranks differ in {first}: {shown}, the others have {usual}"
    if more:
        message += f"; they differ in {', '.join(more[:16])} too"
    return first, message


def _format_fact(facts: Mapping[str, Any], name: str) -> str:
    if name not in facts:
        return "none"
    text = orjson.dumps(facts[name]).decode()
    return text if len(text) <= 200 else f"{text[:200]}..."
