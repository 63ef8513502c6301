"""Facts: what a run must be continued with as it was begun, saved with each checkpoint."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import orjson

from trainkit.collectives import all_gather_objects, run_on_all_ranks
from trainkit.types import Axis, ConfigError

Facts = Mapping[str, Any] | Callable[[int], Mapping[str, Any]]
"""Values that JSON holds by name; or a function to them from the number of global batches that have
been read, for what has happened by then: the phases of a mixture that have begun, say, while those
to come may still change. A roll-back takes no batch back.
"""

_TOLD = 5  # places where tables differ; more would hide the others


def facts_at(facts: Facts | None, batches: int) -> Mapping[str, Any]:
    """Return the facts that hold after a number of global batches."""
    return facts(batches) if callable(facts) else facts or {}


def agree_on_facts(facts: Mapping[str, Any], axis: Axis) -> None:
    """Refuse ranks that do not have the same facts.

    Raises:
        ConfigError: On all ranks; names the first fact that differs.

    Effects:
        Communicates on `axis`.
    """
    # Facts may name a hundred thousand files: all of them travel only to say where ranks differ.
    if len(set(run_on_all_ranks(lambda: _hash_of(facts), axis))) == 1:
        return
    told = all_gather_objects(dict(facts), axis)
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


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


@attrs.frozen
class ResumeRules:
    """Which facts a run may be continued with another value of.

    A fact is named as it is, or, where it is a field of the configuration ("config.lr"), as its
    flag is ("lr", "schedule-steps"). "config.tokenizer" is that field alone, "tokenizer" also a
    fact of that name. What is in neither list must be as it was.

    `free` facts change nothing that is computed, or nothing that has been computed so far: a change
    is told. `flagged` ones change the run, which may be what its user wants: a change is refused
    but for those that `allow` names, which are told.
    """

    free: Sequence[str] = ()
    flagged: Sequence[str] = ()
    allow: Sequence[str] = ()


def check_allowed(changes: ResumeRules) -> None:
    """Refuse to allow what no run can be continued with.

    Raises:
        ConfigError: `allow` names a fact that is neither free nor flagged.

    Examples:
        >>> check_allowed(ResumeRules(flagged=("lr",), allow=("lr",)))
    """
    may = {_plain_name(name) for name in (*changes.free, *changes.flagged)}
    for name in changes.allow:
        if _plain_name(name) not in may:
            flagged = ", ".join(sorted(map(_plain_name, changes.flagged))) or "nothing"
            raise ConfigError(
                f"resume: {name} cannot change in a run; what can be allowed to is {flagged}",
                where=name,
                hint="begin another run with it: --out",
            )


def _plain_name(name: str) -> str:
    return name.removeprefix("config.").replace("-", "_")


def allowed_names(changes: ResumeRules) -> set[str]:
    """Return the names of the facts that a user allows to change, as attributes are written.

    Examples:
        >>> allowed_names(ResumeRules(flagged=["max_norm"], allow=["max-norm"]))
        {'max_norm'}
    """
    return {_plain_name(name) for name in changes.allow}


def may_change_optimizer(changes: ResumeRules) -> bool:
    """Say whether a run may be continued with another optimizer, or with other options of it.

    Examples:
        >>> may_change_optimizer(ResumeRules(flagged=["optimizer"]))
        False
        >>> may_change_optimizer(ResumeRules(flagged=["optimizer"], allow=["optimizer"]))
        True
    """
    known = ("optimizer", "moments", "mean")
    names = {*map(_plain_name, changes.free), *allowed_names(changes)}
    return any(name in known or name.startswith("optimizer_") for name in names)


def compare_facts(
    saved: Mapping[str, Any], facts: Mapping[str, Any], changes: ResumeRules
) -> tuple[list[str], list[str]]:
    """Say which facts are not what they were.

    Args:
        saved: The facts of a checkpoint.
        facts: The run's.
        changes: Which may differ.

    Returns:
        Two lists of sentences: what must not be, and what is only told. Where anything must not be,
        it is followed by where the tables differ that may: which of the files, where the
        fingerprint of them all does.

    Examples:
        >>> changes = ResumeRules(free=["microbatch"], flagged=["lr"])
        >>> saved = {"config.lr": 0.1, "config.microbatch": 2, "config.seed": 0}
        >>> live = {"config.lr": 0.2, "config.microbatch": 4, "config.seed": 0}
        >>> refused, told = compare_facts(saved, live, changes)
        >>> print(*refused)
        its config.lr is 0.1, the run's is 0.2 (--allow-change lr goes on with that)
        >>> print(*told)
        its config.microbatch is 2, the run's is 4
    """
    free, flagged, allow = (
        {_plain_name(name) for name in names}
        for names in (changes.free, changes.flagged, changes.allow)
    )
    fields = {name for name in changes.free if name.startswith("config.")}
    others = {_plain_name(name) for name in changes.free if name not in fields}
    refused: list[str] = []
    told: list[str] = []
    tables: list[str] = []
    for name, value in orjson.loads(orjson.dumps(dict(facts))).items():
        plain = _plain_name(name)
        if plain in free | flagged and name not in saved:  # it was not recorded then
            continue
        problems = _fact_problems(name, saved.get(name), value)
        if name in fields or plain in others or plain in flagged & allow:
            told += ["; ".join(problems)] if problems else []
            tables += problems if isinstance(value, dict) else []
        elif plain in flagged:
            flag = plain.replace("_", "-")
            refused += [f"{p} (--allow-change {flag} goes on with that)" for p in problems]
        else:
            refused += problems
    return [*refused, *tables] if refused else [], told


def _fact_problems(name: str, old: Any, new: Any) -> list[str]:
    if isinstance(new, dict) and isinstance(old, dict):
        return _table_problems(name, old, new)
    return [] if old == new else [f"its {name} is {_short(old)}, the run's is {_short(new)}"]


def _table_problems(name: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Say where a fact that is a table differs, in a few places."""
    # What was not known then, and is off now, is no change: an option that came later.
    later = {key for key in new.keys() - old.keys() if new[key] is False}
    keys = sorted((old.keys() | new.keys()) - later)
    changed = [key for key in keys if old.get(key) != new.get(key)]
    problems = [
        f"{name}: {key} was added"
        if key not in old
        else f"{name}: {key} was removed"
        if key not in new
        else f"{name}: {key} was changed from {_short(old[key])} to {_short(new[key])}"
        for key in changed[:_TOLD]
    ]
    more = len(changed) - _TOLD
    return problems if more <= 0 else [*problems, f"and {more} more places in {name}"]
