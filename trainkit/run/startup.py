"""Whether the ranks of a run are of one mind, before the first step is taken."""

from __future__ import annotations

import functools
import hashlib
import platform
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import orjson
import torch

import trainkit
from trainkit.collectives import all_gather_objects
from trainkit.types import Axis, ConfigError


def make_code_facts() -> dict[str, str]:
    """Return what this rank runs: versions, and hashes of the source of trainkit and of the recipe.

    The recipe is the script that Python was started with.

    Effects:
        Reads the source files (2 MB, 30 ms), trainkit's at the first call.

    Examples:
        >>> sorted(make_code_facts())
        ['python', 'recipe source', 'torch', 'trainkit', 'trainkit source']
    """
    script = getattr(sys.modules["__main__"], "__file__", None)
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "trainkit": _version(),
        "trainkit source": _own_source_hash(),
        "recipe source": _source_hash(None, [Path(script)] if script else []),
    }


def _version() -> str:
    try:
        return version("trainkit-lm")
    except PackageNotFoundError:  # run from a source tree
        return "source"


@functools.cache
def _own_source_hash() -> str:
    package = Path(trainkit.__file__).parent
    return _source_hash(package, sorted(package.rglob("*.py")))


def _source_hash(root: Path | None, files: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.relative_to(root) if root else ''}\0".encode())
        digest.update(hashlib.sha256(file.read_bytes()).digest() if file.is_file() else b"")
    return digest.hexdigest()[:16]


def check_ranks_agree(axis: Axis, facts: Mapping[str, Any]) -> None:
    """Refuse to begin if ranks differ in what they are to do: configuration, code or data.

    One rank with another seed or another copy of the source trains without any error, and nobody
    can say what came out. Only hashes travel as long as all are equal.

    Args:
        axis: All ranks of the run.
        facts: What must be equal: the configuration, `make_code_facts()`, fingerprints of the data.
            Values are anything that JSON holds, or has a text; mappings may be nested.

    Raises:
        ConfigError: Ranks differ, on all ranks: the first field that does, and who has what.

    Effects:
        Communicates on `axis`.

    Examples:
        >>> from trainkit.mesh import solo_parallel
        >>> check_ranks_agree(solo_parallel().world, {"seed": 1} | make_code_facts())
    """
    flat = _flat(facts)
    text = orjson.dumps(flat, option=orjson.OPT_SORT_KEYS)
    hashes = all_gather_objects(hashlib.sha256(text).hexdigest(), axis)
    if len(set(hashes)) == 1:
        return
    found = find_difference(all_gather_objects(flat, axis))
    assert found is not None
    field, message = found
    raise ConfigError(
        f"check_ranks_agree: {message}",
        where=field,
        want="the same on all ranks",
        hint="start all ranks with one command, from one copy of the code, on the same data",
    )


def find_difference(facts: Sequence[Mapping[str, Any]]) -> tuple[str, str] | None:
    """Return the first field in which ranks differ and how they do, or None.

    Args:
        facts: The facts of each rank, in rank order.

    Examples:
        >>> find_difference([{"seed": 0}, {"seed": 7}, {"seed": 0}])
        ('seed', 'ranks differ in seed: rank 1 has 7, the others have 0')
    """
    names = list(dict.fromkeys(name for rank in facts for name in rank))
    different = [name for name in names if len({_text(rank, name) for rank in facts}) > 1]
    if not different:
        return None
    first, *more = different
    texts = [_text(rank, first) for rank in facts]
    # The usual value; of two ranks, rank 0's.
    usual = max(Counter(texts).items(), key=lambda item: (item[1], item[0] == texts[0]))[0]
    odd = [rank for rank, text in enumerate(texts) if text != usual]
    shown = ", ".join(f"rank {rank} has {texts[rank]}" for rank in odd[:8])
    shown += f" (and {len(odd) - 8} more)" if len(odd) > 8 else ""
    further = f"; they differ in {', '.join(more[:16])} too" if more else ""
    return first, f"ranks differ in {first}: {shown}, the others have {usual}{further}"


def _flat(facts: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested facts under dotted names, each value one that JSON holds."""
    found: dict[str, Any] = {}
    for name, value in facts.items():
        if isinstance(value, Mapping) and value:
            found |= _flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = orjson.loads(orjson.dumps(value, default=str))
    return found


def _text(facts: Mapping[str, Any], name: str) -> str:
    if name not in facts:
        return "none"
    text = orjson.dumps(facts[name]).decode()
    return text if len(text) <= 200 else f"{text[:200]}..."
