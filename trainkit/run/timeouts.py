"""Timeouts of a run, in a file of their own, since a configuration must not load torch."""

from __future__ import annotations

import attrs

from trainkit.types import satisfies

_seconds = satisfies(lambda value: 1 <= value <= 30 * 86400, "from 1 to 2592000 seconds (30 days)")


@attrs.frozen(kw_only=True)
class Timeouts:
    """Timeouts of the start, of a step and of a stop, in seconds."""

    step_timeout: float = attrs.field(default=600.0, validator=_seconds)
    """Seconds for a step, after which the run ends and the rank that hangs is named; with
    --log-every N, N times that for N steps."""

    start_timeout: float = attrs.field(default=1800.0, validator=_seconds)
    """Seconds for everything before the end of the first step."""

    grace: float | None = attrs.field(default=None, validator=attrs.validators.optional(_seconds))
    """Seconds for a stop, a few less than the launcher waits before it kills; by default 25, or the
    time of two steps and a save."""
