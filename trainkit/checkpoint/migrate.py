"""Old formats become the present one by pure functions, one for each version; no torch here.

A checkpoint is never rewritten: what was read of it is brought up to date before it is used. One of
every format ever written stays in `tests/checkpoint/fixtures`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from trainkit.checkpoint.manifest import VERSION

Description = tuple[dict[str, Any], dict[str, Any]]
"""What `manifest.json` and `state.json` hold."""


def migrate(manifest: Mapping[str, Any], state: Mapping[str, Any]) -> Description:
    """Return a manifest and a state as the present format has them.

    Args:
        manifest: What `manifest.json` of any version up to the present holds, its seal checked.
        state: What the `state.json` beside it holds.

    Raises:
        ValueError: There is no such version.

    Examples:
        >>> old = {"version": 1, "step": 3, "files": {}}
        >>> new, state = migrate(old, {"torch": "2.13.0"})
        >>> new["version"], new["run"], new["torch"], state
        (2, None, '2.13.0', {'machine': None})
    """
    pair: Description = (dict(manifest), dict(state))
    while pair[0]["version"] != VERSION:
        step = _STEPS.get(pair[0]["version"])
        if step is None:
            raise ValueError(f"migrate: there is no format version {pair[0]['version']!r}")
        pair = step(*pair)
    return pair


def _from_1(manifest: Mapping[str, Any], state: Mapping[str, Any]) -> Description:
    """Add what version 1 did not know: whose a checkpoint is, and what wrote it."""
    unknown = ("run", "parent", "state_hash", "score", "config", "trainkit")
    new = {**manifest, **dict.fromkeys(unknown), "version": 2, "torch": state.get("torch")}
    rest = {name: value for name, value in state.items() if name != "torch"}
    return new, {**rest, "machine": None}


_STEPS: Mapping[int, Callable[[Mapping[str, Any], Mapping[str, Any]], Description]] = {1: _from_1}
