"""Format records for people: one as names and values, several as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from trainkit.files import flatten_table

_MAX_ITEMS = 12  # of a list; longer ones end with their length


def as_text(report: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> str:
    """Format a record as lines of names and values, or several records as a table.

    Nested names are joined with dots.

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

    # File names and facts of a foreign checkpoint may hold escape sequences of a terminal.
    if not isinstance(report, Mapping):
        return escape_control_characters(_format_table(report))
    pairs: list[tuple[str, str]] = []
    for name, value in flatten_table(report):
        texts = value if _is_list_of_texts(value) else [_format_cell(value, name)]
        pairs += zip([name, *[""] * (len(texts) - 1)], texts, strict=True)
    width = max((len(name) for name, _ in pairs), default=0)
    return escape_control_characters(
        "\n".join(f"{name:{width}}  {cell}".rstrip() for name, cell in pairs)
    )


def _format_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Align the columns, numbers to the right, and drop those that are empty in every row."""
    empty: tuple[Any, ...] = (None, "", [], {})
    candidates = rows[0] if rows else {}
    names = [x for x in candidates if any(row[x] not in empty for row in rows)]
    if not names:
        return "none"
    columns = []
    for name in names:
        cells = [name, *(_format_cell(row[name], name) for row in rows)]
        width = max(map(len, cells))
        # Not isinstance: a bool is shown as a word.
        is_number = type(rows[0][name]) in (int, float)
        columns.append([x.rjust(width) if is_number else x.ljust(width) for x in cells])
    return "\n".join("  ".join(line).rstrip() for line in zip(*columns, strict=True))


def _is_list_of_texts(value: Any) -> bool:
    return isinstance(value, list) and value != [] and all(isinstance(x, str) for x in value)


def _format_cell(value: Any, name: str = "") -> str:
    match value:
        # Before int, of which bool is a subclass.
        case bool():
            text = "yes" if value else "no"
        # Checkpoints store the time of a save in seconds since 1970.
        case int() if name == "saved":
            text = datetime.fromtimestamp(value).astimezone().strftime("%Y-%m-%d %H:%M:%S")
        case int():
            text = f"{value:,}"
        case float():
            text = f"{value:.4g}"
        case list():
            cells = [
                f"[{_format_cell(x)}]" if isinstance(x, list) else _format_cell(x)
                for x in value[:_MAX_ITEMS]
            ]
            if len(value) > _MAX_ITEMS:
                cells.append(f"... {len(value)} in all")
            text = ", ".join(cells)
        case None | {}:
            text = ""
        case _:
            text = str(value)
    return text or "-"
