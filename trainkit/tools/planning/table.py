"""Plans as a table for a terminal: the best first, and in one line each what does not fit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from trainkit.tools.planning.plans import LayoutEstimate

_HEADER = (
    *("layout", "recompute", "reduce", "peak GiB", "params", "grads", "optim", "activ.", "logits"),
    *("gathered", "sent GB", "step s", "tokens/s", "util."),
)


def format_estimates(plans: Sequence[LayoutEstimate], *, limit: int | None = 10) -> str:
    """Return plans as a table: those that fit, then those that do not and why.

    Memory is of the rank that needs most, in GiB; the columns are the largest of each kind, the
    peak is less than their sum. Where something is offloaded a column shows what the host holds.
    Sent is what one rank sends in a step, in GB.

    Args:
        plans: From `rank_layouts`, best first.
        limit: How many to show of those that fit, of those that do not, and of the reasons why the
            rest is impossible; None for all.

    Examples:
        >>> from trainkit.models.decoder_sizes import make_decoder_config
        >>> from trainkit.tools.planning import Job, get_hardware, list_layouts, rank_layouts
        >>> job = Job(config=make_decoder_config("tiny"), row_length=256, rows=8)
        >>> found = rank_layouts(job, list_layouts(1), get_hardware("cpu"))
        >>> print(format_estimates(found, limit=1))
        layout  recompute  ...
    """
    fitting = [one for one in plans if one.fits]
    large = [one for one in plans if not one.fits and one.memory is not None]
    impossible = Counter(one.why_not for one in plans if one.memory is None)
    lines = _columns(_rows(fitting[:limit])) if fitting else ["nothing fits"]
    lines += _more(len(fitting), limit, "that fit")
    if large:
        lines += ["", "does not fit:"]
        lines += _columns([(*_choices(one), one.why_not) for one in large[:limit]])
        lines += _more(len(large), limit, "that do not fit")
    if impossible:
        lines += ["", "not possible:"]
        lines += [f"  {count} x  {why}" for why, count in impossible.most_common(limit)]
        lines += _more(len(impossible), limit, "reasons")
    return "\n".join(line.rstrip() for line in lines)


def _more(count: int, limit: int | None, what: str) -> list[str]:
    return [] if limit is None or count <= limit else [f"  ... and {count - limit} more {what}"]


def _rows(plans: Sequence[LayoutEstimate]) -> list[tuple[str, ...]]:
    rows = [_HEADER, *map(_row, plans)]
    host = [one.memory.host for one in plans if one.memory is not None]
    if not any(host):
        return rows
    column = ["host", *(_figure(size / 2**30) for size in host)]
    return [(*row[:4], cell, *row[4:]) for row, cell in zip(rows, column, strict=True)]


def _choices(one: LayoutEstimate) -> tuple[str, str, str]:
    """Return the flags of a recipe for this plan: degrees, --recompute and --reduce."""
    return str(one.layout), one.recompute, one.layout.reduce


def _row(one: LayoutEstimate) -> tuple[str, ...]:
    assert one.memory is not None
    assert one.seconds is not None
    memory = one.memory
    sizes = (
        *(memory.peak, memory.parameters, memory.gradients, memory.optimizer),
        *(memory.activations, memory.logits, memory.gathered),
    )
    sent = sum(transfer.sent for transfer in one.traffic)
    return (
        *_choices(one),
        *(_figure(size / 2**30) for size in sizes),
        _figure(sent / 1e9),
        _figure(one.seconds.step),
        f"{one.tokens_per_second:,.0f}",
        f"{one.utilization:.0%}".replace("%", " %"),
    )


def _figure(x: float) -> str:
    """Three digits at least, and no exponent: 0.0123, 1.23, 123."""
    if x == 0 or x >= 100:
        return f"{x:.0f}"
    return f"{x:.1f}" if x >= 10 else f"{x:.3g}"


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Align texts to the left and figures to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if i < 3 or len(row) == 4 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
