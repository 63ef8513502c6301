"""What measures single steps of a run: profiles, captures, statistics by layer, the first NaN.

Nothing here is on by default. `LoggingOptions` asks for each of them, and a request may ask for a
profile while the run goes on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from logging import Logger
from pathlib import Path

import attrs
import torch

from trainkit.run.capture import Capture, capture, write_capture
from trainkit.run.find_nan import find_first_nan
from trainkit.run.layers import FinishStep, LayerStatistics, watch_layers
from trainkit.run.profiling import ProfileSummary, profile
from trainkit.run.sinks.jsonl import WriteEvent, open_events
from trainkit.run.sinks.named import LoggingOptions, ProfileSteps
from trainkit.schedules import is_due
from trainkit.types import ConfigError, Log, Stages, StepBatch


@attrs.define(eq=False, kw_only=True)
class Instruments:
    """The instruments of a loop, which follow its steps. Made by `open_instruments`."""

    run_dir: Path
    stages: Stages
    device: torch.device
    options: LoggingOptions
    write_event: WriteEvent
    log: Log
    finish_layers: FinishStep | None = None
    """Writes the statistics by layer of a step, if there are any."""
    step: int = 0
    """The step that is being taken, or comes next."""
    _steps: ProfileSteps | None = None  # to profile next, or now
    _profiling: contextlib.ExitStack = attrs.field(factory=contextlib.ExitStack)
    _is_profiling: bool = False
    _capturing: contextlib.ExitStack = attrs.field(factory=contextlib.ExitStack)
    _captured: Capture | None = None  # of the step that is being taken
    _has_captured: bool = False

    def begin_step(self, step: int) -> None:
        """Start and stop what begins and ends between the step before and this one."""
        self.step = step
        steps = self._steps
        if steps is not None and self._is_profiling and step > steps.last:
            self.close()
            self._steps = None
        elif steps is not None and not self._is_profiling and steps.first <= step <= steps.last:
            self._start_profile()
        # Once: a roll-back may take the step again.
        if self.options.capture and step == self.options.capture_at and not self._has_captured:
            self._captured = self._capturing.enter_context(
                capture(self.stages, self.options.capture)
            )

    def end_step(self, batch: StepBatch) -> None:
        """Write what the step has measured and captured, before anything else calls the model."""
        if self.finish_layers is not None:
            self.finish_layers(batch.microbatches)
        captured = self._captured
        if captured is None:
            return
        self._capturing.close()
        folder = self.run_dir / "captures" / f"step_{self.step:08d}"
        write_capture(captured, folder, batch.microbatches)
        pattern = self.options.capture
        self.write_event("capture", step=self.step, pattern=pattern, path=str(folder))
        self.log(f"captured {pattern} in step {self.step}: {folder}")
        self._captured = None
        self._has_captured = True

    def request_profile(self, steps: int | None, step: int) -> str:
        """Profile some steps after a step, and say so: the handler of the request "profile".

        Raises:
            ConfigError: Other steps are profiled first.
        """
        assert steps is not None  # `check_request` has seen to it
        if self._steps is not None and (self._is_profiling or self._steps.first > step):
            raise ConfigError(f"steps {self._steps.first} to {self._steps.last} are profiled first")
        self._steps = ProfileSteps(step + 1, step + steps)
        return (
            f"steps {step + 1} to {step + steps} are profiled; traces will be in "
            f"{self._get_profile_dir(step + 1)}"
        )

    def close(self) -> None:
        """Write the profile that is under way, if there is one, and remove the hooks."""
        self._profiling.close()
        self._is_profiling = False
        self._capturing.close()

    def _start_profile(self) -> None:
        first = self.step  # a later one than was asked for, if the run resumes within them
        folder = self._get_profile_dir(first)
        self._profiling.enter_context(
            profile(
                folder,
                rank=self.stages.world.index,
                device=self.device,
                report=partial(self._report_profile, first, folder),
            )
        )
        self._is_profiling = True

    def _get_profile_dir(self, first: int) -> Path:
        return self.run_dir / "profiles" / f"step_{first:08d}"

    def _report_profile(self, first: int, folder: Path, summary: ProfileSummary) -> None:
        last = max(first, self.step - 1)  # an earlier one than was asked for, if the run ends
        steps = f"step {first}" if first == last else f"steps {first} to {last}"
        self.log(f"profile of {steps}: {summary}")
        self.log(f"  a trace of each rank is in {folder}: open one in ui.perfetto.dev")
        self.write_event(
            "profile",
            step=last,
            first=first,
            path=str(folder),
            seconds=summary.seconds,
            idle=summary.idle,
            operations=[attrs.asdict(one) for one in summary.operations],
        )


@contextlib.contextmanager
def open_instruments(
    run_dir: Path,
    stages: Stages,
    optimizer: torch.optim.Optimizer,
    options: LoggingOptions,
    *,
    device: torch.device,
    last_step: int,
    write_event: WriteEvent,
    logger: Logger,
) -> Iterator[Instruments]:
    """Yield the instruments that the options ask for, for the steps of a block.

    `begin_step` is called before each step, and `end_step` after it.

    Args:
        run_dir: The run directory.
        stages: This rank's stages, with the axes of the layout.
        optimizer: The optimizer of their parameters.
        options: What is measured, and when.
        device: The device of this rank.
        last_step: The step after which training stops.
        write_event: Writes an event for each profile and each capture.
        logger: Prints what came of them.

    Raises:
        NumericsError: With `options.anomaly`, an operation makes a NaN.

    Effects:
        Writes to profiles, captures and layers.jsonl in the run directory. Registers hooks of the
        modules and the optimizer until the end of the block.
    """
    steps = ProfileSteps.parse(options.profile) if options.profile else None
    if steps is not None and steps.first > last_step:
        logger.info("no profile: the run ends at step %d, before step %d", last_step, steps.first)
    if options.capture is not None and options.capture_at > last_step:
        logger.info(
            "no capture: the run ends at step %d, before step %d", last_step, options.capture_at
        )
    instruments = Instruments(
        run_dir=run_dir,
        stages=stages,
        device=device,
        options=options,
        write_event=write_event,
        log=logger.info,
        steps=steps,
    )
    with contextlib.ExitStack() as stack:
        if options.layers_every:
            instruments.finish_layers = stack.enter_context(
                _write_layers(instruments, optimizer, last_step, logger.warning)
            )
        if options.anomaly:
            stack.enter_context(find_first_nan())
        stack.callback(instruments.close)
        yield instruments


@contextlib.contextmanager
def _write_layers(
    instruments: Instruments, optimizer: torch.optim.Optimizer, last_step: int, log: Log
) -> Iterator[FinishStep]:
    """Write statistics by layer of the steps that are due, on the first rank."""
    world = instruments.stages.world
    with contextlib.ExitStack() as stack:
        append: WriteEvent = lambda *_, **__: None  # noqa: E731 (on other ranks)
        if world.index == 0:
            path = instruments.run_dir / "layers.jsonl"
            append = stack.enter_context(open_events(path, log=log))

        def write(kind: str, found: LayerStatistics) -> None:
            append(
                "layers",
                step=instruments.step,
                kind=kind,
                names=found.names,
                rms=found.rms,
                largest=found.largest,
                zeros=found.zeros,
                nonfinite=found.nonfinite,
            )

        finish = stack.enter_context(
            watch_layers(
                instruments.stages,
                optimizer,
                is_due=lambda: is_due(
                    instruments.step, instruments.options.layers_every, last=last_step
                ),
                write=write,
                axis=world,
            )
        )
        yield finish
