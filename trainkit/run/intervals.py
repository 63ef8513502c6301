"""When something that is done at an interval is due in a loop, equal on all ranks.

Steps, tokens and epochs are counted by the state of a run, so that a resumed run does the same
after the same steps. Seconds are those of rank 0, which travel with the vote after each step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
from torch import Tensor

from trainkit.collectives import all_gather_objects
from trainkit.run.sinks.jsonl import read_jsonl
from trainkit.schedules import Counters, Interval, is_interval_due
from trainkit.types import Axis, ConfigError, TrainState


@attrs.define(eq=False, kw_only=True)
class IntervalClock:
    """The counters of a loop since it last considered what is due, by each unit of an interval.

    Tokens may be counted on a device, and reading them there would wait for it. So they are known
    between two bounds, of which the upper one grows by the labels of each batch, and are read only
    where a multiple of an interval may lie between them.
    """

    run_dir: Path
    world: Axis
    batches_per_epoch: float | None
    state: TrainState
    """The state when it was last considered."""
    _tokens: tuple[float, float] | None = None  # bounds of those of `state`, once they are needed
    _labels: float = 0.0  # the most tokens that have been added since
    _exact: tuple[int, int] | None = None  # a step since then, and its tokens as they were read
    _is_bounded: bool | None = None  # whether tokens are labels; known once they were read
    _opened: float = attrs.field(init=False)
    _first_step: int = attrs.field(init=False)
    _clock: float | None = None  # of rank 0, by the last vote
    _offset: float | None = None  # seconds of training when the clock is 0, once it is needed
    _seconds: tuple[float, float] = (0.0, 0.0)  # by the vote before the last one, and by that

    def __attrs_post_init__(self) -> None:
        self._opened = time.monotonic()
        self._first_step = self.state.step

    def check(self, interval: Interval) -> None:
        """Raise ConfigError if this run cannot count an interval.

        Raises:
            ConfigError: Its unit is epochs, and the loop does not know how long one is.
        """
        if interval.unit == "epochs" and self.batches_per_epoch is None:
            raise ConfigError(
                f"run.loop: an interval of {interval} needs the length of an epoch, which this "
                "recipe does not give",
                got=str(interval),
                hint="give it in steps, tokens or minutes, or pass batches_per_epoch to run.loop",
            )

    def note_batch(self, microbatches: Sequence[Mapping[str, Any]], ranks: int) -> None:
        """Count the labels of a step's batch, of which no more than all can be tokens of a loss.

        Args:
            microbatches: Those of this rank.
            ranks: The number of ranks with different labels.
        """
        labels = [x.get("labels", x.get("input_ids")) for x in microbatches]
        sizes = [x.numel() if isinstance(x, Tensor) else math.inf for x in labels]
        self._labels += ranks * sum(sizes)

    def is_due(self, interval: Interval, state: TrainState) -> bool:
        """Return whether a multiple of an interval was passed since it was last considered.

        Args:
            interval: In tokens, seconds or epochs.
            state: The state after a step.

        Effects:
            The first time for an interval in seconds it communicates: all ranks must call it.
        """
        self.check(interval)
        if interval.unit == "tokens":
            return self._are_tokens_due(interval, state)
        if interval.unit == "seconds" and self._offset is None:
            self._start_seconds()
        return is_interval_due(
            interval,
            Counters(seconds=self._seconds[0], epochs=self._count_epochs(self.state)),
            Counters(seconds=self._seconds[1], epochs=self._count_epochs(state)),
        )

    def advance(self, state: TrainState, clock: float) -> None:
        """Go on from a state, at a time of rank 0's clock; everything due has been considered."""
        if self._exact is not None and self._exact[0] == state.step:
            self._tokens = (self._exact[1],) * 2
        elif state.step <= self.state.step or _is_on_host(state.tokens):  # rolled back, or cheap
            self._tokens = None
        elif self._tokens is not None:
            self._tokens = self._tokens[0], self._tokens[1] + self._labels
        self._labels = 0.0
        self._exact = None
        self.state = state
        self._clock = clock
        if self._offset is not None:
            # The first vote was posted before the loop was opened, and the time does not go back.
            now = max(self._seconds[1], clock + self._offset)
            self._seconds = self._seconds[1], now

    def _are_tokens_due(self, interval: Interval, state: TrainState) -> bool:
        if self._tokens is None:
            self._tokens = (int(self.state.tokens),) * 2
        before, most = self._tokens[0], self._tokens[1] + self._labels
        if not _is_on_host(state.tokens) and self._is_bounded and math.isfinite(most):
            bound = Counters(tokens=int(most))
            if not is_interval_due(interval, Counters(tokens=int(before)), bound):
                return False
        is_read = self._exact is not None and self._exact[0] == state.step
        tokens = self._exact[1] if self._exact and is_read else int(state.tokens)
        # A recipe of one's own may count what are no labels: then every step reads the tokens.
        self._is_bounded = self._is_bounded is not False and tokens <= most
        self._exact = state.step, tokens
        return is_interval_due(interval, Counters(tokens=int(before)), Counters(tokens=tokens))

    def _count_epochs(self, state: TrainState) -> float:
        return state.cursor.batch / (self.batches_per_epoch or math.inf)

    def _start_seconds(self) -> None:
        """Agree on the seconds of training so far: of the steps on record, and since the start."""
        past = last = 0.0
        if self.world.index == 0:
            seconds = [
                line.get("seconds") or 0.0
                for line in read_jsonl(self.run_dir / "metrics.jsonl")
                if type(line.get("step")) is int and line["step"] <= self._first_step
            ]
            past, last = math.fsum(seconds), sum(seconds[-1:])
        past, last, opened = all_gather_objects([past, last, self._opened], self.world)[0]
        self._offset = past - opened
        if self._clock is None:  # what has passed in the step that is resumed from is due now
            self._seconds = past - last, past
        else:
            self._seconds = (max(past, self._clock + self._offset),) * 2


def _is_on_host(tokens: int | Tensor) -> bool:
    return not isinstance(tokens, Tensor) or tokens.device.type == "cpu"
