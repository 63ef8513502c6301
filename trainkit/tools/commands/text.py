"""Records as text for people: one as names and values, several as a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

_MOST = 12  # numbers of a list that are shown


def as_text(report: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> str:
    """Return a record, or a table of several, by the names that they have as JSON.

    Examples:
        >>> print(as_text({"rows": 1200, "documents": {"split": 3, "empty": 0}, "problems": []}))
        rows             1,200
        documents.split  3
        documents.empty  0
        problems         -
        >>> print(as_text([{"name": "step_2", "score": None}, {"name": "step_1", "score": None}]))
        name
        step_2
        step_1
    """
    from trainkit.run.sinks.console import escape_control_characters  # noqa: PLC0415 -- slow

    return escape_control_characters(
        _pairs(report) if isinstance(report, Mapping) else _table(report)
    )


def _pairs(record: Mapping[str, Any]) -> str:
    pairs = list(_flat("", record))
    width = max((len(name) for name, _ in pairs), default=0)
    return "\n".join(f"{name:{width}}  {cell}".rstrip() for name, cell in pairs)


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Align columns, numbers to the right; a column that says nothing anywhere is left out."""
    empty: tuple[Any, ...] = (None, "", [], {})
    names = [x for x in (rows[0] if rows else ()) if any(row[x] not in empty for row in rows)]
    if not names:
        return "none"
    columns = []
    for name in names:
        cells = [name, *(_cell(row[name], name) for row in rows)]
        width, is_number = max(map(len, cells)), type(rows[0][name]) in (int, float)
        columns.append([x.rjust(width) if is_number else x.ljust(width) for x in cells])
    return "\n".join("  ".join(line).rstrip() for line in zip(*columns, strict=True))


def _flat(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield names and cells: of a mapping all that is in it, of a list of texts one each."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _flat(f"{name}.{key}" if name else str(key), inner)
    elif isinstance(value, list) and value and all(isinstance(part, str) for part in value):
        yield from zip([name, *[""] * (len(value) - 1)], value, strict=True)
    else:
        yield name, _cell(value, name)


def _cell(value: Any, name: str = "") -> str:
    match value:
        case bool():
            text = "yes" if value else "no"
        case int() if name == "saved":
            text = datetime.fromtimestamp(value).astimezone().strftime("%Y-%m-%d %H:%M:%S")
        case int():
            text = f"{value:,}"
        case float():
            text = f"{value:.4g}"
        case list():
            cells = [f"[{_cell(x)}]" if isinstance(x, list) else _cell(x) for x in value[:_MOST]]
            more = [f"... {len(value)} in all"] if len(value) > _MOST else []
            text = ", ".join([*cells, *more])
        case None | {}:
            text = ""
        case _:
            text = str(value)
    return text or "-"
