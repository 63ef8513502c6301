"""How long ranks may wait: plain numbers, since a configuration needs no torch."""

from __future__ import annotations

import attrs

from trainkit.types import satisfies

_waited = satisfies(lambda value: 1 <= value <= 30 * 86400, "from 1 to 2592000 seconds (30 days)")


@attrs.frozen(kw_only=True)
class Timeouts:
    """How long a step, what comes before it, and a stop may take, in seconds."""

    step_timeout: float = attrs.field(default=600.0, validator=_waited)
    """Seconds that a step may take before the run ends and the rank that is stuck is named; with
    --log-every N, that N steps may take N times."""

    start_timeout: float = attrs.field(default=1800.0, validator=_waited)
    """Seconds that everything before the first step's end may take."""

    grace: float | None = attrs.field(default=None, validator=attrs.validators.optional(_waited))
    """Seconds from a signal to stop until the launcher kills, less a few; by default 25, or what
    two steps and a save have taken."""
