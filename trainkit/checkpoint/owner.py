"""Who else can change a checkpoint: a hash shows that bytes are whole, not who wrote them."""

from __future__ import annotations

import os
import stat
from pathlib import Path

_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def owner_problems(path: Path | str) -> list[str]:
    """Say whether others than this user can have written a checkpoint, or can change it.

    Nothing in a checkpoint is ever executed, so this is about numbers that somebody else chose.

    Args:
        path: A checkpoint directory.

    Returns:
        At most two sentences: whom it belongs to, and who may write it.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     owner_problems(folder)
        []
    """
    path = Path(path)
    facts = {entry: entry.lstat() for entry in (path, *sorted(path.iterdir()))}
    foreign = [entry for entry, fact in facts.items() if fact.st_uid not in (os.geteuid(), 0)]
    shared = [entry for entry, fact in facts.items() if fact.st_mode & _WRITABLE_BY_OTHERS]
    problems: list[str] = []
    if foreign:
        uid = facts[foreign[0]].st_uid
        problems.append(f"{foreign[0]} belongs to user {uid}, this is user {os.geteuid()}")
    if shared:
        mode = stat.S_IMODE(facts[shared[0]].st_mode)
        problems.append(f"{shared[0]} can be written by others than its owner (mode {mode:o})")
    return problems
