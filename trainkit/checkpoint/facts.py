"""Facts: what a run must be continued with as it was begun, saved with each checkpoint."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import orjson

from trainkit.collectives import all_gather_json, together
from trainkit.types import Axis, ConfigError

Facts = Mapping[str, Any] | Callable[[int], Mapping[str, Any]]
"""Values that JSON holds by name; or a function from a step to them, for what has happened by then:
the phases of a mixture that have begun, say, while those to come may still change.
"""

_TOLD = 5  # places where tables differ; more would hide the others


def facts_at(facts: Facts | None, step: int) -> Mapping[str, Any]:
    """Return the facts that hold after a number of steps."""
    return facts(step) if callable(facts) else facts or {}


def agree_on_facts(facts: Mapping[str, Any], axis: Axis) -> None:
    """Refuse ranks that do not have the same facts.

    Raises:
        ConfigError: On all ranks; names the first fact that differs.

    Effects:
        Communicates on `axis`.
    """
    # Facts may name a hundred thousand files: all of them travel only to say where ranks differ.
    if len(set(together(lambda: _hash_of(facts), axis))) == 1:
        return
    told = all_gather_json(dict(facts), axis)
    for rank, other in enumerate(told):
        names = sorted(name for name in told[0] | other if told[0].get(name) != other.get(name))
        if names:
            raise ConfigError(
                f"resume: ranks 0 and {rank} do not have the same {names[0]}: "
                f"{_short(told[0].get(names[0]))} and {_short(other.get(names[0]))}",
                where=names[0],
                hint="give every rank the same configuration, code and data",
            )


def _hash_of(facts: Mapping[str, Any]) -> str:
    return hashlib.sha256(orjson.dumps(dict(facts), option=orjson.OPT_SORT_KEYS)).hexdigest()


def _short(value: Any, most: int = 200) -> str:
    text = str(value)
    return text if len(text) <= most else f"{text[:most]}..."


def fact_problems(saved: Mapping[str, Any], facts: Mapping[str, Any]) -> list[str]:
    """Say which facts are not what they were."""
    live = orjson.loads(orjson.dumps(dict(facts)))
    problems: list[str] = []
    for name, value in live.items():
        old = saved.get(name)
        if isinstance(value, dict) and isinstance(old, dict):
            problems += _table_problems(name, old, value)
        elif old != value:
            problems.append(f"its {name} is {old}, the run's is {value}")
    return problems


def _table_problems(name: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Say where a fact that is a table differs, in a few places."""
    changed = [key for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key)]
    problems = [
        f"{name}: {key} was added"
        if key not in old
        else f"{name}: {key} was removed"
        if key not in new
        else f"{name}: {key} was changed from {old[key]} to {new[key]}"
        for key in changed[:_TOLD]
    ]
    more = len(changed) - _TOLD
    return problems if more <= 0 else [*problems, f"and {more} more places in {name}"]
