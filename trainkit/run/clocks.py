"""How long the phases and saves of a run take, measured by the thread that watches over it."""

from __future__ import annotations

from collections import deque

import attrs

START = "start"
"""The phase before the first that is announced."""

_STEPS = 8  # steps of which the longest counts
_SAMPLES = 150  # of the busy share: half a minute
_FEWEST = 25  # samples below which there is no busy share yet


@attrs.frozen(eq=False)
class Phase:
    """What the main thread does from now on, and how many seconds it may take."""

    name: str
    allow: float


@attrs.define(eq=False)
class PhaseClock:
    """How long the phase has lasted, how long steps took, and how much of the time was waiting.

    Only seconds in which the process could run count.
    """

    phase: Phase | None = None
    elapsed: float = 0.0
    steps: deque[float] = attrs.field(factory=lambda: deque(maxlen=_STEPS))
    busy: deque[bool] = attrs.field(factory=lambda: deque(maxlen=_SAMPLES))

    def advance(self, phase: Phase, seconds: float) -> None:
        """Count some seconds for the phase that the main thread is in now.

        Examples:
            >>> clock = PhaseClock()
            >>> step, prune = Phase("step 1", 60.0), Phase("prune", 60.0)
            >>> for phase in (step, step, prune):
            ...     clock.advance(phase, 1.5)
            >>> clock.elapsed, clock.longest_step
            (1.5, 3.0)
        """
        # By identity: a phase that is announced twice has the same name.
        if phase is not self.phase:
            if self.phase is not None and self.phase.name.startswith("step "):
                self.steps.append(self.elapsed)
            self.phase = phase
            self.elapsed = 0.0
        self.elapsed += seconds

    def sample(self, *, waits: bool) -> None:
        """Record whether the main thread waits in a collective; the start of a run is left out."""
        if self.phase is not None and self.phase.name != START:
            self.busy.append(not waits)

    @property
    def longest_step(self) -> float:
        """Seconds that the longest of the last steps took, 0 before the first."""
        return max(self.steps, default=0.0)

    @property
    def busy_share(self) -> float:
        """The share of samples outside of collectives, -1 while there are few."""
        return sum(self.busy) / len(self.busy) if len(self.busy) >= _FEWEST else -1.0


@attrs.define(eq=False)
class SaveClock:
    """How long saves take in their thread, and how long they pause between two parts of a file.

    Attributes:
        longest: Seconds of the longest save that has ended.
        current: Seconds for which a save has been under way, 0 if none is.
        still: Seconds since a part of a save was last written.
        pause: The longest such time in a save that then went on.
        parts: The number of parts that were written by then; None where nobody counts them.
    """

    longest: float = 0.0
    current: float = 0.0
    still: float = 0.0
    pause: float = 0.0
    parts: int | None = None

    def advance(
        self, seconds: float, *, is_saving: bool, parts: int | None, is_stopping: bool
    ) -> None:
        """Count some seconds in which a save was under way, or none.

        While a run stops, `longest` and `pause` stay: a save that hangs must not become the measure
        of how long one may take.

        Examples:
            >>> clock = SaveClock()
            >>> for parts, is_saving in ((0, True), (0, True), (1, True), (1, False)):
            ...     clock.advance(1.0, is_saving=is_saving, parts=parts, is_stopping=False)
            >>> clock.longest, clock.pause, clock.still
            (3.0, 1.0, 1.0)
        """
        if not is_saving and not is_stopping:
            self.longest = max(self.longest, self.current)
        if parts != self.parts and not is_stopping:
            self.pause = max(self.pause, min(self.still, self.current))
        self.current = self.current + seconds if is_saving else 0.0
        self.still = 0.0 if parts is None or parts != self.parts else self.still + seconds
        self.parts = parts
