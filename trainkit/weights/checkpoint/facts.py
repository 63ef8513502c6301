"""Facts: values that a checkpoint stores, and that a resumed run must agree with."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import orjson

from trainkit.collectives import all_gather_objects, run_on_all_ranks
from trainkit.models.decoder_sizes import config_from_facts
from trainkit.types import Axis, ConfigError

Facts = Mapping[str, Any] | Callable[[int], Mapping[str, Any]]
"""JSON values by name; or a function of the number of global batches read so far, for facts that
only become final over time: the phases of a mixture that have started, for instance, while later
ones may still change. A roll-back does not lower that number.
"""

_MAX_CHANGES = 5  # of one table that a message lists


def facts_at(facts: Facts | None, batches: int) -> Mapping[str, Any]:
    """Return the facts after a number of global batches."""
    return facts(batches) if callable(facts) else facts or {}


def check_facts_agree(facts: Mapping[str, Any], axis: Axis) -> None:
    """Raise ConfigError on all ranks unless their facts are equal.

    Raises:
        ConfigError: Names the first fact that differs.

    Effects:
        Communicates on `axis`.
    """

    # Inside `run_on_all_ranks`: facts that are not JSON raise here, and then on all ranks.
    def hash_facts() -> str:
        data = orjson.dumps(dict(facts), option=orjson.OPT_SORT_KEYS)
        return hashlib.sha256(data).hexdigest()

    # Facts may list a hundred thousand files, so only their hashes travel unless they differ.
    if len(set(run_on_all_ranks(hash_facts, axis))) == 1:
        return
    # Every rank has the same list now, and so raises for the same rank and name.
    by_rank = all_gather_objects(dict(facts), axis)
    first = by_rank[0]
    for rank, other in enumerate(by_rank):
        names = sorted(name for name in first | other if first.get(name) != other.get(name))
        if names:
            raise ConfigError(
                f"resume: ranks 0 and {rank} do not have the same {names[0]}: "
                f"{_truncate(first.get(names[0]))} and {_truncate(other.get(names[0]))}",
                where=names[0],
                hint="give every rank the same configuration, code and data",
            )


def _truncate(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


@attrs.frozen
class ResumeRules:
    """Which facts may change when a run is resumed.

    A fact is given by its own name, or, if it is a field of the configuration ("config.lr"), by its
    flag ("lr", "schedule-steps"). "config.tokenizer" is that field alone; "tokenizer" also matches
    a fact of that name. A fact in neither list must not change.

    Facts in `allow` do not affect any result, or none so far: a change is only logged. Facts in
    `ask` change the run, which may be intended: a change is an error unless the user has `granted`
    it, and is then logged.
    """

    allow: Sequence[str] = ()
    ask: Sequence[str] = ()
    granted: Sequence[str] = ()


def check_allowed(rules: ResumeRules) -> None:
    """Raise ConfigError if `granted` names a fact that can never change in a run.

    Raises:
        ConfigError: `granted` names a fact that is in neither `allow` nor `ask`.

    Examples:
        >>> check_allowed(ResumeRules(ask=("lr",), granted=("lr",)))
    """
    known = {_plain_name(name) for name in (*rules.allow, *rules.ask)}
    for name in rules.granted:
        if _plain_name(name) not in known:
            choices = ", ".join(sorted(map(_plain_name, rules.ask))) or "nothing"
            raise ConfigError(
                f"resume: {name} cannot change in a run; what can be allowed to is {choices}",
                where=name,
                hint="start another run with it: --out",
            )


def _plain_name(name: str) -> str:
    return name.removeprefix("config.").replace("-", "_")


def list_allowed_names(rules: ResumeRules) -> set[str]:
    """Return the facts that the user allows to change, spelled as Python attributes.

    Examples:
        >>> list_allowed_names(ResumeRules(ask=["max_norm"], granted=["max-norm"]))
        {'max_norm'}
    """
    return {_plain_name(name) for name in rules.granted}


def may_change_optimizer(rules: ResumeRules) -> bool:
    """Return whether the run may be resumed with another optimizer or other options of it.

    Examples:
        >>> may_change_optimizer(ResumeRules(ask=["optimizer"]))
        False
        >>> may_change_optimizer(ResumeRules(ask=["optimizer"], granted=["optimizer"]))
        True
    """
    names = {*map(_plain_name, rules.allow), *list_allowed_names(rules)}
    return any(
        name in ("optimizer", "moments", "mean") or name.startswith("optimizer_") for name in names
    )


def compare_facts(
    saved: Mapping[str, Any],
    facts: Mapping[str, Any],
    rules: ResumeRules,
) -> tuple[list[str], list[str]]:
    """Return the changes of facts that are errors, and those that are only logged.

    Args:
        saved: The facts of a checkpoint.
        facts: The run's facts.
        rules: Which may change.

    Returns:
        The sentences of the errors and the sentences to log. If there is an error, it is followed
        by the differences in tables that may change: the files that differ explain why the
        fingerprint of all files does.

    Examples:
        >>> rules = ResumeRules(allow=["microbatch"], ask=["lr"])
        >>> saved = {"config.lr": 0.1, "config.microbatch": 2, "config.seed": 0}
        >>> live = {"config.lr": 0.2, "config.microbatch": 4, "config.seed": 0}
        >>> errors, messages = compare_facts(saved, live, rules)
        >>> print(*errors)
        its config.lr is 0.1, the run's is 0.2 (--allow-change lr resumes with it)
        >>> print(*messages)
        its config.microbatch is 2, the run's is 4
    """
    allow, ask, granted = (
        {_plain_name(name) for name in names} for names in (rules.allow, rules.ask, rules.granted)
    )
    # "config.tokenizer" allows that field alone, a path; "tokenizer" is also the hash of its files.
    allowed_fields = {name for name in rules.allow if name.startswith("config.")}
    allowed_names = {_plain_name(name) for name in rules.allow if name not in allowed_fields}
    errors: list[str] = []
    messages: list[str] = []
    tables: list[str] = []
    # Through JSON, as the saved facts went: tuples become lists, and integer keys strings.
    # Facts that only the checkpoint has are ignored: the option behind them no longer exists.
    for name, value in orjson.loads(orjson.dumps(dict(facts))).items():
        plain = _plain_name(name)
        if plain in allow | ask and name not in saved:  # older checkpoints lack newer facts
            continue
        old = _complete_decoder(saved.get(name)) if name == "model" else saved.get(name)
        differences = _diff_fact(name, old, value)
        if name in allowed_fields or plain in allowed_names or plain in ask & granted:
            messages += ["; ".join(differences)] if differences else []
            tables += differences if isinstance(value, dict) else []
        elif plain in ask:
            flag = plain.replace("_", "-")
            errors += [f"{x} (--allow-change {flag} resumes with it)" for x in differences]
        else:
            errors += differences
    return [*errors, *tables] if errors else [], messages


def _complete_decoder(saved: Any) -> Any:
    """Return the table of a decoder with the options that its records did not have yet."""
    try:
        return orjson.loads(orjson.dumps(attrs.asdict(config_from_facts(saved))))
    except (ValueError, TypeError):  # of another model, or of a decoder that is refused today
        return saved


def _diff_fact(name: str, old: Any, new: Any) -> list[str]:
    """Return the differences of a fact; of a table the first few keys."""
    if not (isinstance(new, dict) and isinstance(old, dict)):
        if old == new:
            return []
        return [f"its {name} is {_truncate(old)}, the run's is {_truncate(new)}"]
    # An option that was added later and is off is not a change.
    added_and_off = {key for key in new.keys() - old.keys() if new[key] is False}
    keys = sorted((old.keys() | new.keys()) - added_and_off)
    changed = [key for key in keys if old.get(key) != new.get(key)]
    differences = [
        f"{name}: {key} was added"
        if key not in old
        else f"{name}: {key} was removed"
        if key not in new
        else f"{name}: {key} was changed from {_truncate(old[key])} to {_truncate(new[key])}"
        for key in changed[:_MAX_CHANGES]
    ]
    if len(changed) > _MAX_CHANGES:
        differences.append(f"and {len(changed) - _MAX_CHANGES} more places in {name}")
    return differences
