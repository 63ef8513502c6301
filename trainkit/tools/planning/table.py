"""Format estimates as a table: those that fit, best first, then the others with their reasons."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from trainkit.tools.planning.plans import LayoutEstimate

# Three flags of a recipe, then GiB of memory, and then traffic, time and speed.
_HEADER = (
    "layout",
    "recompute",
    "reduce",
    "peak GiB",
    "params",
    "grads",
    "optim",
    "activ.",
    "logits",
    "gathered",
    "sent GB",
    "step s",
    "tokens/s",
    "util.",
)


def format_estimates(plans: Sequence[LayoutEstimate], *, limit: int | None = 10) -> str:
    """Format estimates as a table: those that fit, then those that do not, with reasons.

    Memory is that of the rank with the highest peak, in GiB. The columns are the maxima of each
    kind, so the peak is less than their sum. With offloading there is a column of host memory. Sent
    is what one rank sends in a step, in GB.

    Args:
        plans: From `rank_layouts`, best first.
        limit: The maximum number of estimates that fit, of those that do not, and of reasons why
            the rest is impossible; None for all.

    Examples:
        >>> from trainkit.models.decoder_sizes import make_decoder_config
        >>> from trainkit.tools.planning import Job, get_hardware, list_layouts, rank_layouts
        >>> job = Job(config=make_decoder_config("tiny"), row_length=256, rows=8)
        >>> found = rank_layouts(job, list_layouts(1), get_hardware("cpu"))
        >>> print(format_estimates(found, limit=1))
        layout  recompute  ...
    """
    fitting = [one for one in plans if one.fits]
    # A layout that the model does not allow has no estimate of memory.
    large = [one for one in plans if not one.fits and one.memory is not None]
    # One reason often excludes many layouts.
    impossible = Counter(one.refusal for one in plans if one.memory is None)
    lines = ["nothing fits"]
    if fitting:
        rows = [_HEADER, *map(_format_row, fitting[:limit])]
        host = [one.memory.host for one in fitting[:limit] if one.memory is not None]
        if any(host):
            # After the peak, which does not contain it.
            cells = ["host", *(_format_number(size / 2**30) for size in host)]
            rows = [(*row[:4], cell, *row[4:]) for row, cell in zip(rows, cells, strict=True)]
        lines = _align_columns(rows)
    lines += _count_hidden(len(fitting), limit, "that fit")
    if large:
        lines += ["", "does not fit:"]
        lines += _align_columns([(*_get_flags(one), one.refusal) for one in large[:limit]])
        lines += _count_hidden(len(large), limit, "that do not fit")
    if impossible:
        lines += ["", "not possible:"]
        lines += [f"  {count} x  {reason}" for reason, count in impossible.most_common(limit)]
        lines += _count_hidden(len(impossible), limit, "reasons")
    return "\n".join(line.rstrip() for line in lines)


def _count_hidden(count: int, limit: int | None, noun: str) -> list[str]:
    return [] if limit is None or count <= limit else [f"  ... and {count - limit} more {noun}"]


def _get_flags(one: LayoutEstimate) -> tuple[str, str, str]:
    """Return the flags of a recipe for an estimate: degrees, --recompute and --reduce."""
    return str(one.layout), one.recompute, one.layout.reduce


def _format_row(one: LayoutEstimate) -> tuple[str, ...]:
    memory = one.memory
    assert memory is not None
    assert one.seconds is not None
    return (
        *_get_flags(one),
        _format_number(memory.peak / 2**30),
        _format_number(memory.parameters / 2**30),
        _format_number(memory.gradients / 2**30),
        _format_number(memory.optimizer / 2**30),
        _format_number(memory.activations / 2**30),
        _format_number(memory.logits / 2**30),
        _format_number(memory.gathered / 2**30),
        _format_number(sum(transfer.sent for transfer in one.traffic) / 1e9),
        _format_number(one.seconds.step),
        f"{one.tokens_per_second:,.0f}",
        f"{one.utilization:.0%}".replace("%", " %"),
    )


def _format_number(x: float) -> str:
    """Format with three digits or more, without an exponent: 0.0123, 1.23, 123."""
    if x == 0 or x >= 100:
        return f"{x:.0f}"
    # "g" alone would write large numbers with an exponent.
    return f"{x:.1f}" if x >= 10 else f"{x:.3g}"


def _align_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Align the flags to the left, and so the reasons behind them; numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            # A row of a refused layout has three flags and a reason.
            cell.ljust(width) if i < 3 or len(row) == 4 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
