"""What a run has done in all, in a few lines for its end: time, tokens, corpora and memory."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from trainkit.run.log import COLUMNS
from trainkit.run.sinks.console import escape_control_characters, format_thousands

_COUNTS = ("tokens", "tokens_processed", "documents")


def describe_totals(metrics: Iterable[Mapping[str, Any]], *, columns: int = COLUMNS) -> list[str]:
    r"""Return lines about all steps of a run: time by phase, tokens, corpora, and memory.

    Args:
        metrics: The lines of metrics.jsonl. What they do not have is left out.
        columns: How long a line may be. Phases and corpora that have no room are counted.

    Examples:
        >>> line = {"step": 1, "tokens": 6, "tokens_processed": 8, "documents": 2, "padding": 0.2}
        >>> line |= {"seconds/forward": 1.0, "seconds/backward": 3.0, "tokens/web": 8}
        >>> print("\n".join(describe_totals([line | {"memory_peak": 2**29, "memory_rank": 3}])))
        time by phase: backward 75.0%, forward 25.0%
        8 tokens, 6 of them in the loss, of 2 documents; padding 20.0%
        tokens by corpus: web 100.0%
        memory: at most 0.50 GiB, on rank 3
    """
    steps = {line["step"]: line for line in metrics if type(line.get("step")) is int}.values()
    totals: Counter[str] = Counter()
    positions = 0.0
    peak, rank = 0, 0
    for line in steps:
        numbers = {name: x for name, x in line.items() if type(x) in (int, float)}
        totals.update({name: x for name, x in numbers.items() if name in _COUNTS or "/" in name})
        is_text = 1.0 - numbers.get("padding", 0.0)
        positions += numbers.get("tokens_processed", 0) / is_text if is_text else 0.0
        peak, rank = max((peak, rank), (numbers.get("memory_peak", 0), line.get("memory_rank", 0)))
    lines = [_describe_shares("time by phase", _select(totals, "seconds/"), columns)]
    if positions:
        processed, trained, documents = (
            format_thousands(totals[name]) for name in ("tokens_processed", "tokens", "documents")
        )
        lines.append(
            f"{processed} tokens, {trained} of them in the loss, of {documents} documents; padding "
            f"{max(0.0, 1 - totals['tokens_processed'] / positions):.1%}"
        )
    lines.append(_describe_shares("tokens by corpus", _select(totals, "tokens/"), columns))
    if peak:
        lines.append(f"memory: at most {peak / 2**30:.2f} GiB, on rank {rank}")
    return [line for line in lines if line]


def _select(totals: Mapping[str, float], kind: str) -> dict[str, float]:
    return {name.removeprefix(kind): x for name, x in totals.items() if name.startswith(kind)}


def _describe_shares(label: str, amounts: Mapping[str, float], columns: int) -> str:
    """Return the shares of a total, the largest first, in one line; "" without any."""
    total = math.fsum(amounts.values())
    if total <= 0:
        return ""
    names = sorted(amounts, key=lambda name: (-amounts[name], name))
    text = ""
    for count in range(len(names), -1, -1):  # as many as there is room for
        parts = [f"{name} {amounts[name] / total:.1%}" for name in names[:count]]
        if rest := names[count:]:
            share = math.fsum(amounts[name] for name in rest) / total
            parts.append(f"{len(rest)} more {share:.1%}")
        text = escape_control_characters(f"{label}: {', '.join(parts)}")
        if len(text) <= columns:
            break
    return text
