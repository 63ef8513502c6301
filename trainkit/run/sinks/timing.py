"""Goodput: the share of a run's time that made progress; and how often to save."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import attrs


@attrs.frozen
class Goodput:
    """How the time of a run was spent, over all its restarts.

    `productive` is the seconds of the steps that count in the end, `wall` the seconds in which a
    process of the run was alive, `share` their ratio (0 without any). `down` is the seconds between
    the end of one process and the start of the next; no other field contains it. `repeated` counts
    repeated steps, `starts` the processes, `saves` the checkpoints, `blocked` the seconds that
    training waited for them.
    """

    share: float
    productive: float
    wall: float
    down: float
    steps: int
    repeated: int
    starts: int
    saves: int
    blocked: float


def measure_goodput(
    metrics: Sequence[Mapping[str, Any]], events: Sequence[Mapping[str, Any]]
) -> Goodput:
    """Return the share of a run's time that went into steps that count (effective training time).

    Starting, loading, saving, evaluating and repeated steps lower it. Hours in which no process
    ran, because the run was stopped or waited in a queue, do not.

    Args:
        metrics: The lines of metrics.jsonl: `step`, `seconds`.
        events: The lines of events.jsonl: each `start` and `rewind` with `step` and `repeated`,
            each `save` with `blocked` (seconds) where known.

    Examples:
        >>> events = [
        ...     {"event": "start", "time": 0.0, "step": 0},
        ...     {"event": "save", "time": 9.0, "step": 2, "blocked": 0.5},
        ...     {"event": "start", "time": 60.0, "step": 2, "repeated": 1},  # killed after step 3
        ...     {"event": "end", "time": 68.0, "step": 3},
        ... ]
        >>> measure_goodput([{"step": n, "seconds": 4.0} for n in (1, 2, 3)], events)
        Goodput(share=0.6, productive=12.0, wall=20.0, down=48.0, steps=3, repeated=1, ...)
    """
    starts = [i for i, event in enumerate(events) if event.get("event") == "start"]
    saves = [event for event in events if event.get("event") == "save" and not event.get("error")]
    steps = [line for line in metrics if type(line.get("step")) is int]
    seconds = {line["step"]: line.get("seconds") or 0.0 for line in steps}
    productive = math.fsum(seconds.values())
    lives = []  # the start and the end of each process
    for first, following in pairwise([*starts, len(events)]):
        start = events[first]["time"]
        last_event = max(event["time"] for event in events[first:following])
        reached = next_start = math.inf
        if following < len(events):
            reached = events[following]["step"] + (events[following].get("repeated") or 0)
            next_start = events[following]["time"]
        # A process that was killed has written no end: the steps whose lines the next one found
        # give a lower bound. The event of a save follows its end, so the last event does as well.
        first_step = events[first]["step"]
        worked = math.fsum(x for step, x in seconds.items() if first_step < step <= reached)
        lives.append((start, min(next_start, max(last_event, start + worked))))
    wall = math.fsum(end - begin for begin, end in lives)
    return Goodput(
        # Steps are timed by another clock than events, so the ratio may be a little above 1.
        share=min(1.0, productive / wall) if wall > 0 else 0.0,
        productive=productive,
        wall=wall,
        down=math.fsum(after[0] - before[1] for before, after in pairwise(lives)),
        steps=len(seconds),
        repeated=sum(event.get("repeated") or 0 for event in events),
        starts=len(starts),
        saves=len(saves),
        blocked=math.fsum(save.get("blocked") or 0.0 for save in saves),
    )


def suggest_save_interval(*, stall: float, between_failures: float) -> float:
    """Return the seconds between two saves that maximize the expected goodput.

    Saving costs stall / interval; a failure loses half an interval and a restart (Young, "A first
    order approximation to the optimum checkpoint interval", 1974).

    Args:
        stall: How long training waits for a save, in seconds.
        between_failures: The mean time from one failure to the next, in seconds.

    Examples:
        >>> round(suggest_save_interval(stall=5, between_failures=10_800))
        329
    """
    return math.sqrt(2 * stall * between_failures)
