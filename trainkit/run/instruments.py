"""What measures single steps of a run: profiles, captures, statistics by layer, the first NaN.

Nothing here is on by default. `LoggingOptions` asks for each of them, and a request may ask for a
profile while the run goes on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from logging import Logger
from pathlib import Path

import attrs
import torch

from trainkit.collectives import all_gather_objects
from trainkit.run.capture import Capture, capture, write_capture
from trainkit.run.find_nan import find_first_nan
from trainkit.run.layers import FinishStep, LayerStatistics, watch_layers
from trainkit.run.profiling import ProfileSummary, profile
from trainkit.run.sinks.jsonl import WriteEvent, open_events
from trainkit.run.sinks.named import LoggingOptions, ProfileSteps
from trainkit.schedules import is_due
from trainkit.types import SOLO, Axis, ConfigError, DiskError, Log, Stages, StepBatch


@attrs.define(eq=False, kw_only=True)
class Instruments:
    """The instruments of a loop, which follow its steps. Made by `open_instruments`."""

    run_dir: Path
    stages: Stages
    device: torch.device
    options: LoggingOptions
    write_event: WriteEvent
    log: Log
    warn: Log
    axis: Axis
    """The ranks that end a profile or a capture together, and then say what was not written."""
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
        """Start and stop what begins and ends between the step before and this one.

        Effects:
            Communicates where a profile ends.
        """
        self.step = step
        steps = self._steps
        if steps is not None and self._is_profiling and step > steps.last:
            self.close()
            self._steps = None
        elif steps is not None and not self._is_profiling and steps.first <= step <= steps.last:
            # From this one, if the run resumes within them.
            steps = ProfileSteps(step, steps.last)
            self._profiling.enter_context(self._profile(steps))
            self._is_profiling = True
        # Once: a roll-back may take the step again.
        if self.options.capture and step == self.options.capture_at and not self._has_captured:
            self._captured = self._capturing.enter_context(
                capture(self.stages, self.options.capture)
            )

    def end_step(self, batch: StepBatch) -> None:
        """Write what the step has measured and captured, before anything else calls the model.

        Effects:
            Communicates where there is something to write.
        """
        if self.finish_layers is not None:
            self.finish_layers(batch.microbatches)
        captured = self._captured
        if captured is None:
            return
        self._capturing.close()
        self._captured = None
        self._has_captured = True
        pattern = self.options.capture
        folder = self.run_dir / "captures" / f"step_{self.step:08d}"
        what = f"capture of {pattern} in step {self.step}"
        if self._write(what, lambda: write_capture(captured, folder, batch.microbatches)):
            self.write_event("capture", step=self.step, pattern=pattern, path=str(folder))
            self.log(f"{what}: {folder}")

    def request_profile(self, steps: int | None, step: int) -> str:
        """Profile some steps after a step, and say so: the handler of the request "profile".

        Raises:
            ConfigError: There is another profile first.
        """
        assert steps is not None  # `check_request` has seen to it
        planned = self._steps
        if planned is not None and (self._is_profiling or planned.first > step):
            raise ConfigError(f"the profile of {planned} comes first")
        self._steps = ProfileSteps(step + 1, step + steps)
        return f"the profile of {self._steps} will be in {self._get_profile_dir(step + 1)}"

    def close(self) -> None:
        """Write the profile that is under way, if there is one, and remove the hooks."""
        self._profiling.close()
        self._is_profiling = False
        self._capturing.close()

    @contextlib.contextmanager
    def _profile(self, steps: ProfileSteps) -> Iterator[None]:
        """Profile some steps, and say what the profile shows."""
        first = steps.first
        folder = self._get_profile_dir(first)
        found: list[ProfileSummary] = []
        with contextlib.ExitStack() as stack:
            stack.enter_context(
                profile(
                    folder,
                    rank=self.stages.world.index,
                    device=self.device,
                    report=found.append,
                )
            )
            yield
            last = max(first, self.step - 1)  # earlier than requested, if the run ends
            what = f"profile of {ProfileSteps(first, last)}"
            is_written = self._write(what, stack.close)
        for summary in found:
            self.log(f"{what}: {summary}")
            if is_written:
                self.log(f"  a trace of each rank is in {folder}: open one in ui.perfetto.dev")
            self.write_event(
                "profile",
                step=last,
                first=first,
                path=str(folder) if is_written else None,
                seconds=summary.seconds,
                idle=summary.idle,
                operations=[attrs.asdict(one) for one in summary.operations],
            )

    def _get_profile_dir(self, first: int) -> Path:
        return self.run_dir / "profiles" / f"step_{first:08d}"

    def _write(self, what: str, write: Callable[[], object]) -> bool:
        """Write a file on each rank; return whether all could. Training goes on if one could not.

        Effects:
            Communicates on `axis`.
        """
        problem = None
        try:
            write()
        except DiskError as error:
            problem = f"rank {self.stages.world.index}: {error}"
        problems = [x for x in all_gather_objects(problem, self.axis) if x is not None]
        if problems and self.axis.index == 0:
            self.warn(
                f"{what}: {len(problems)} of {self.axis.count} ranks could not write it, and "
                f"training goes on; {problems[0]}"
            )
        return not problems


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
        logger: Prints what came of them. A file that cannot be written is a warning, which the run
            has as an event, and training goes on.

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
        warn=logger.warning,
        axis=stages.world,
        steps=steps,
    )
    with contextlib.ExitStack() as stack:
        if options.layers_every:
            instruments.finish_layers = stack.enter_context(
                _write_layers(instruments, optimizer, last_step, logger.warning)
            )
        if options.anomaly:
            stack.enter_context(find_first_nan(lambda: instruments.step))
        try:
            yield instruments
        except BaseException:
            instruments.axis = SOLO  # other ranks may be gone
            raise
        finally:
            instruments.close()


@contextlib.contextmanager
def _write_layers(
    instruments: Instruments, optimizer: torch.optim.Optimizer, last_step: int, warn: Log
) -> Iterator[FinishStep]:
    """Write statistics by layer of the steps that are due, on the first rank."""
    world = instruments.stages.world
    with contextlib.ExitStack() as stack:
        append: WriteEvent | None = None
        if world.index == 0:
            try:
                append = stack.enter_context(
                    open_events(instruments.run_dir / "layers.jsonl", log=warn)
                )
            except DiskError as error:
                warn(f"the statistics by layer are not written; {error}")

        def write(kind: str, found: LayerStatistics) -> None:
            if append is not None:
                append(
                    "layers", step=instruments.step, kind=kind, **attrs.asdict(found, recurse=False)
                )

        every = instruments.options.layers_every
        yield stack.enter_context(
            watch_layers(
                instruments.stages,
                optimizer,
                is_due=lambda: is_due(instruments.step, every, last=last_step),
                write=write,
                axis=world,
            )
        )
