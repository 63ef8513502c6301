"""What runs around a training process, and around its steps.

`open_run` yields a `Run`; `run.loop` yields a `Loop`. Neither has a step, and no function of the
library takes one of them. Each method combines a few functions that its docstring names; a script
that needs another order calls those.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from logging import Logger
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import Tensor

from trainkit import health
from trainkit.buckets.store import Store, check_store, open_store
from trainkit.buckets.urls import find_url
from trainkit.collectives import all_gather_objects, run_on_all_ranks
from trainkit.data.concat import fingerprint
from trainkit.data.packed import make_data_facts
from trainkit.files import atomic_write, format_toml, print_to_stderr
from trainkit.mesh import parallel_session
from trainkit.mesh.launch import describe_launch
from trainkit.metrics import (
    decoder_flops,
    loss_to_perplexity,
    make_step_records,
    model_flops_utilization,
    peak_flops,
    recomputed_flops,
)
from trainkit.metrics.steps import is_loss_per_token
from trainkit.models.config import DecoderConfig
from trainkit.optim.combine import use_averaged_parameters
from trainkit.parallel.describe_run import describe_run
from trainkit.parallel.parameters import get_named_parameters, is_tied_copy, modules_of
from trainkit.parallel.recompute import get_recompute_mode
from trainkit.parallel.stage_ranks import attach_axes
from trainkit.phases import PhaseTimes, as_phase, measure_phase, record_phases
from trainkit.run.capture import match_modules
from trainkit.run.config import config_to_dict, make_config_facts, make_resume_rules
from trainkit.run.control import Mailbox
from trainkit.run.device_health import describe_signs, watch_device
from trainkit.run.directory import make_run_dir
from trainkit.run.errors import EXIT_SAVED, owns_process, record_errors, report_errors
from trainkit.run.garbage import Collect, collect_manually
from trainkit.run.instruments import Instruments, open_instruments
from trainkit.run.intervals import IntervalClock
from trainkit.run.inventory import RankReadings, gather_inventory, measure_startup
from trainkit.run.lock import lock_run
from trainkit.run.log import make_logger, print_warning
from trainkit.run.peers import Straggler
from trainkit.run.plots.load import plot_expert_load
from trainkit.run.plots.loss import plot_loss
from trainkit.run.reproducible import use_numerics
from trainkit.run.signals import StopReason, Vote, open_step_vote, trap_signals
from trainkit.run.sinks.console import escape_control_characters
from trainkit.run.sinks.jsonl import (
    WriteEvent,
    compare_evaluations,
    fsync_jsonl,
    read_jsonl,
)
from trainkit.run.sinks.named import LoggingOptions, named_sinks
from trainkit.run.sinks.open_run_sinks import open_run_sinks, summarize_run
from trainkit.run.startup import check_ranks_agree, make_code_facts
from trainkit.run.steering import Handler, Steering, open_steering
from trainkit.run.timeouts import Timeouts
from trainkit.run.watchdog import Announce, is_echo, watch_ranks
from trainkit.schedules import Interval, is_due, parse_interval
from trainkit.text.chat import template_hash
from trainkit.text.tokenizers import tokenizer_hash
from trainkit.types import (
    Axis,
    Bins,
    ForwardBackward,
    Layout,
    Numerics,
    NumericsError,
    OpenSink,
    ParallelState,
    PeerError,
    Precision,
    PreemptedError,
    Sink,
    Stages,
    StepBatch,
    TrainState,
)
from trainkit.weights import checkpoint
from trainkit.weights.checkpoint.bucket_runs import fetch_request, fetch_run, find_run_folder
from trainkit.weights.checkpoint.components import Components, copy_components
from trainkit.weights.checkpoint.emergency_save import UnsavedState
from trainkit.weights.checkpoint.facts import Facts
from trainkit.weights.checkpoint.guard import Guard
from trainkit.weights.checkpoint.initial_weights import (
    TOWER,
    InitialWeights,
    hash_initial_weights,
)
from trainkit.weights.checkpoint.manifest import parse_step
from trainkit.weights.checkpoint.mirror import Mirror, open_mirror
from trainkit.weights.checkpoint.save import Save, write_final
from trainkit.weights.checkpoint.snapshot import check_savable
from trainkit.weights.checkpoint.write import SaveProgress
from trainkit.weights.hub.folder import is_hf_folder, open_folder
from trainkit.weights.hub.trained import make_tower_facts

if TYPE_CHECKING:
    from torch import nn

    from trainkit.data.packed import PackedCorpus

_SOFTWARE = "software"  # a fact that may change, as people edit their recipes; it is logged
# Paths and names: they may change on resume, since hashes compare the contents.
_NAMES_ONLY = ("files", "context", "base_from", TOWER)
_GRACE = 25.0  # seconds for a stop, where none are given
_LOG_EVERY = 10  # steps between two reads of the metrics, where the host waits for a device
_READ_EVERY = 10  # steps between two looks at the memory and the health of all ranks

Evaluate = Callable[[], Mapping[str, float]]
"""`Evaluate() -> {name: value}`: one evaluation, with a `loss` and the number of its `tokens`,
`pairs` or `answers`. A `score`, lower is better, ranks checkpoints in place of the loss.
"""


@contextlib.contextmanager
def open_run(
    run_dir: str | Path,
    *,
    layout: Layout | None = None,
    timeouts: Timeouts | None = None,
    numerics: Numerics | None = None,
    config: Any = None,
    stop_reason: StopReason | None = None,
) -> Iterator[Run]:
    """Open the process groups, with signals trapped, the directory locked and the ranks watched.

    From the outside in:

    - `report_errors` reports every error and gives it its exit code.
    - `trap_signals` receives a signal while ranks still wait for each other.
    - `parallel_session` connects the ranks.
    - `check_store` tries the bucket of a directory that is a URL, on the first rank.
    - `make_run_dir` tries the directory on all ranks: one that alone cannot write there would leave
      the others waiting.
    - `lock_run` raises if another job trains in the directory, or if not all ranks share it.
    - `report_errors` again, since tracebacks now have a directory.
    - `open_mirror` copies the folder into its bucket, on the first rank, once `resume` is done.
    - `watch_ranks` ends all ranks when one is lost or hangs.
    - `open_step_vote` lets all ranks stop, or carry out a request, after the same step.
    - `check_ranks_agree` compares the configuration and the code of the ranks.

    A script that needs fewer of them opens those, down to `parallel_session` alone.

    Signals, exit codes and ends of the process are for a process of its own, in which `run_main`
    runs the recipe. In any other (`owns_process`) no signal is trapped, errors are raised as they
    are, and the watch ends nothing: its verdict is raised when the next phase begins. A run is
    stopped there by a request (`control_run`), by `stop_reason`, or by a KeyboardInterrupt.

    Args:
        run_dir: The run directory, created if it does not exist; or its URL, `s3://bucket/run`: the
            run works in a folder of the cache (`find_run_folder`).
        layout: The degrees and how work is done; by default all processes shard parameters.
        timeouts: How long ranks may wait. The timeout of collectives is longer, so that the watch
            ends a hung step first, and can name the rank.
        numerics: The precision of arithmetic inside the block (`use_numerics`), which is logged; by
            default torch's settings stay.
        config: The resolved configuration: a record of flags, or plain values by name; equal on all
            ranks except for `out`. `resume` writes it, checkpoints store it, and sinks show it.
        stop_reason: Returns why this process has to stop, or None. By default signals are reasons
            in a process of its own (`trap_signals`), and there are none in any other.

    Yields:
        A `Run`.

    Raises:
        SystemExit: In a process of its own, in place of any exception, with the exit code of
            `get_exit_code`.

    Effects:
        Opens process groups, starts threads, writes the lock and the heartbeats of this rank under
        `run_dir`, and undoes it at the end. In a process of its own it also sets signal handlers.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder, open_run(folder) as run:
        ...     run.ps.world.count, run.stopping()
        (1, None)
    """
    timeouts = timeouts or Timeouts()
    software = make_code_facts(config)
    config = config_to_dict(config) if attrs.has(type(config)) else config
    folder = find_run_folder(run_dir)
    # The saves count what they have written here, and the watch reads it.
    progress = SaveProgress()
    mailbox = Mailbox(folder)
    notices: deque[tuple[str, Mapping[str, Any]]] = deque()

    def warn(message: str) -> None:
        # On the thread of the watch, which must not wait for a disk: the loop makes the events.
        print_to_stderr(message)
        notices.append(("warning", {"what": message}))

    def warn_of_straggler(found: Straggler) -> None:
        print_to_stderr(found.what)
        notices.append(("straggler", attrs.asdict(found)))

    started = measure_startup()
    is_own = owns_process()
    with (
        record_phases() as times,
        report_errors() if is_own else contextlib.nullcontext(),
        # Before the process group and CUDA, as `use_deterministic` demands.
        use_numerics(numerics),
        _find_stop_reason(stop_reason, is_own=is_own) as why_stop,
        parallel_session(
            layout or Layout(),
            timeout=timedelta(seconds=max(timeouts.start_timeout, 10 * timeouts.step_timeout)),
            start_timeout=timedelta(seconds=timeouts.start_timeout),
            stop_reason=why_stop,
        ) as ps,
    ):
        connected = times.read()
        store = _open_bucket(run_dir, ps.world)
        run_on_all_ranks(lambda: str(make_run_dir(folder)), ps.world)
        stop_times: list[float] = []

        def note_stop() -> str | None:
            reason = why_stop()
            if reason is not None and not stop_times:
                stop_times.append(time.monotonic())
            return reason

        def get_patience() -> float:
            note_stop()  # the watch, which asks during the run, is over
            if not stop_times and sys.exc_info()[0] is None:
                return timeouts.start_timeout
            # Of a stop what the save has left, since launchers kill: the checkpoint is on the disk.
            used = time.monotonic() - stop_times[0] if stop_times else 0.0
            return max((timeouts.grace or _GRACE) - used, 1.0)

        with (
            lock_run(folder, ps.world) as renew_lock,
            report_errors(folder) if is_own else record_errors(folder),
            # Outside of the watch, which would end a stop that is over but for this.
            open_mirror(
                folder,
                store,
                get_patience=get_patience,
                log=warn,
                event=lambda name, facts: notices.append((name, facts)),
            ) as mirror,
            watch_ranks(
                folder,
                ps.world,
                stop_reason=note_stop,
                allow=timeouts.start_timeout,
                grace=timeouts.grace,
                renew_lock=renew_lock,
                count_written=lambda: progress.parts,
                log=warn,
                report_straggler=warn_of_straggler,
                owns_process=is_own,
            ) as phase,
            open_step_vote(why_stop, ps.world, take_requests=mailbox.take) as vote,
        ):
            run = Run(
                dir=folder,
                ps=ps,
                phase=phase,
                vote=vote,
                mailbox=mailbox,
                timeouts=timeouts,
                config=config,
                software=software,
                progress=progress,
                notices=notices,
                times=times,
                startup={
                    **({} if started is None else {"imports": started}),
                    "connect": sum(connected.values()),
                },
                url=find_url(run_dir),
                mirror=mirror,
            )
            if run.url is not None:
                run.log(f"the run works in {folder}, which is copied to {run.url}")
            _check_start(run, numerics)
            yield run


def _find_stop_reason(
    given: StopReason | None, *, is_own: bool
) -> AbstractContextManager[StopReason]:
    """Return a context with the reason to stop: the caller's, or signals, or none."""
    if given is None and is_own:
        return trap_signals()
    return contextlib.nullcontext(given or (lambda: None))


def _open_bucket(run_dir: str | Path, axis: Axis) -> Store | None:
    """Return the store of a directory that is a URL, on the first rank, after trying it."""
    stores: list[Store] = []

    def check() -> None:
        if axis.index == 0 and find_url(run_dir) is not None:
            stores.append(open_store(run_dir))
            check_store(stores[0])

    run_on_all_ranks(check, axis)
    return stores[0] if stores else None


def _check_start(run: Run, numerics: Numerics | None) -> None:
    """Check that ranks agree on configuration and code, and log how they were launched."""
    # Ranks may name the directory by different paths; `lock_run` has compared what is there.
    config = {f"config.{key}": x for key, x in (run.config or {}).items() if key != "out"}
    check_ranks_agree(run.ps.world, config | dict(run.software))
    for note in describe_launch(os.environ):
        run.log(note)
    if numerics is not None:
        run.log(str(numerics))


@attrs.define(eq=False, kw_only=True)
class Run:
    """What runs around a training process, from `open_run`."""

    dir: Path
    """The run directory."""

    ps: ParallelState
    """The layout, as this rank sees it."""

    phase: Announce
    """`phase(name, allow=seconds)`: what comes next, and how long it may take (`watch_ranks`)."""

    vote: Callable[[], Vote]
    """What all ranks do after the same step (`open_step_vote`); `loop` calls it once a step."""

    mailbox: Mailbox
    """Where requests to the run arrive (`control.control_run`), while a loop is open."""

    timeouts: Timeouts
    """How long ranks may wait."""

    config: Mapping[str, Any] | None
    """The resolved configuration: plain values by name."""

    progress: SaveProgress
    """How many parts of checkpoints this rank has written, for the watch."""

    logger: Logger = attrs.Factory(lambda run: make_logger(run.ps.world.share), takes_self=True)
    """Prints on the first rank, and warnings on all (`make_logger`)."""

    # Read once: a recipe may be edited while it runs.
    software: Mapping[str, str] = attrs.field(factory=make_code_facts)
    """Versions and hashes of the code at the start (`make_code_facts`)."""

    facts: Facts | None = None
    """What checkpoints store, and what a resumed run has to agree with; `resume` sets it."""

    components: Components | None = None
    """Objects of the user's own whose state is saved with the run; `resume` sets it."""

    resume_messages: list[str] = attrs.field(factory=list)
    """What `resume` logged."""

    flops_per_token: float | None = None
    """The model's, a mean over the rows, for the metric `mfu`; `resume` sets it where model and
    rows are known."""

    hardware_flops_per_token: float | None = None
    """The same with the operations that recomputation repeats, for the metric `hfu`."""

    notices: deque[tuple[str, Mapping[str, Any]]] = attrs.field(factory=deque)
    """Events that the watch has seen, as a slow rank, and that are not written yet: the name and
    the facts of each."""

    times: PhaseTimes = attrs.field(factory=PhaseTimes)
    """Seconds by phase, since they were read last."""

    startup: Mapping[str, float] = attrs.field(factory=dict)
    """Seconds of the phases of the start that are over when `open_run` yields."""

    url: str | None = None
    """The URL of the run directory, if it is in a bucket."""

    mirror: Mirror | None = None
    """What copies the directory into its bucket, if it has one, on the first rank."""

    stop_code: int = EXIT_SAVED
    """The exit code of a run that is stopped."""

    def stopping(self) -> str | None:
        """Return why the run has to stop, or None, equal on all ranks; in a loop of your own.

        Effects:
            Communicates (`open_step_vote`): every rank must call it once per step.
        """
        return self.vote().stop

    def log(self, message: str) -> None:
        """Print a message on the first rank."""
        self.logger.info(message)

    def describe(
        self,
        stages: Stages | nn.Module,
        rows: Bins,
        *,
        rows_per_step: int,
        precision: Precision,
    ) -> None:
        """Log what is trained, where, and on how much data (`parallel.describe_run`).

        Effects:
            Communicates: all ranks of the pipeline must call it.
        """
        self.log(describe_run(stages, rows, rows_per_step=rows_per_step, precision=precision))

    @as_phase("resume")
    def resume(
        self,
        stages: Iterable[nn.Module] | nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        request: str | Path = "auto",
        config: Any = None,
        model: Any = None,
        tokenizer: Any = None,
        rows: PackedCorpus | None = None,
        corpora: Mapping[str, Any] | None = None,
        first: InitialWeights | None = None,
        context: int | None = None,
        template: str | None = None,
        facts: Facts | None = None,
        rules: checkpoint.ResumeRules | None = None,
        components: Components | None = None,
    ) -> TrainState:
        """Resume from the last checkpoint, or start from scratch, and return the counters.

        It checks that the disk has room for two checkpoints (`checkpoint.check_disk_space`),
        resumes (`checkpoint.resume`), logs from what, and writes config.toml.

        A run resumes only with the facts that it started with: all that is given here, see
        `gather_facts`. Checkpoints also store the versions and hashes of the code
        (`make_code_facts`): other code resumes too, and a message says so.

        Args:
            stages: This rank's stages.
            optimizer: The optimizer of their parameters.
            request: "auto", "never", or a checkpoint; see `checkpoint.resume`.
            config: The record of the run's flags; see `gather_facts` for this and the next eight.
            model: The configuration of the model.
            tokenizer: The tokenizer.
            rows: The rows of the training data.
            corpora: The corpora by name, if each is a part of a mixture.
            first: Where the initial weights are from.
            context: The longest text that the model is trained on.
            template: The name of the chat template.
            facts: Other facts by name, or a function that returns them.
            rules: Which facts may change; by default those of the fields of `config`.
            components: Objects of your own that belong to the run, by name: anything with
                `state_dict` and `load_state_dict`, or a `checkpoint.Component`. They are loaded
                here and by a roll-back, saved by the loop, and part of the hash in final.json.

        Raises:
            ConfigError: A component holds what no checkpoint can.

        Effects:
            Writes parameters, optimizer state and the run directory; communicates on all axes.
        """
        stages = modules_of(stages)
        gathered = gather_facts(
            config=config,
            model=model,
            tokenizer=tokenizer,
            rows=rows,
            corpora=corpora,
            first=first,
            context=context,
            template=template,
            facts=facts,
        )
        self.facts = self._add_start(gathered, first, stages)
        self.components = components
        if rules is None and config is not None:
            rules = make_resume_rules(config, allow=_NAMES_ONLY)
        rules = rules or checkpoint.ResumeRules()
        # Before the first step, not at the first save, hours later.
        checkpoint.check_disk_space(self.dir, stages, axis=self.ps.world, log=self.log)
        request = self._fetch(request)
        state = checkpoint.resume(
            self.dir,
            TrainState(),
            stages,
            optimizer,
            self.ps,
            request=request,
            facts=self.facts,
            rules=attrs.evolve(
                rules, allow=(*rules.allow, _SOFTWARE), ask=(*rules.ask, "components")
            ),
            # Collected, because the event "resume" has the messages too.
            log=self.resume_messages.append,
            components=components,
        )
        self.log("\n".join(self.resume_messages) or "starting from scratch")
        self._write_config()
        if self.mirror is not None:
            self.mirror.begin(sets_aside=request != "auto")
        self.flops_per_token, self.hardware_flops_per_token = _count_flops_per_token(
            model, rows, stages, pp=self.ps.pp
        )
        return state

    def _fetch(self, request: str | Path) -> str | Path:
        """Fetch what the run resumes from, if it is in a bucket; return its path."""

        def fetch() -> str | None:
            if self.ps.world.index != 0:  # the ranks share the folder
                return None
            if self.url is not None:
                fetch_run(self.url, request, log=self.log)
            return str(fetch_request(request, log=self.log))

        return run_on_all_ranks(fetch, self.ps.world)[0]

    def _write_config(self) -> None:
        if self.ps.world.index == 0 and self.config is not None:
            with atomic_write(self.dir / "config.toml", by="open_run") as file:
                file.write(format_toml(self.config).encode())

    def _add_start(
        self, facts: Facts, first: InitialWeights | None, stages: Sequence[nn.Module]
    ) -> Facts:
        """Return facts with those of the start: the code and the initial weights."""
        start: dict[str, Any] = {_SOFTWARE: self.software}
        if first is not None:
            # A run that resumes has saved them: the folder may be gone.
            if first.source is not None and first.resume_from is None:
                start |= make_tower_facts(first.source)
            start |= hash_initial_weights(first, stages, self.ps)
        if callable(facts):
            # Some facts are functions of the number of global batches so far.
            return lambda batches: {**facts(batches), **start}
        return {**facts, **start}

    def loop(
        self,
        state: TrainState,
        stages: Iterable[nn.Module] | nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        steps: int,
        replay: ForwardBackward,
        checkpoints: checkpoint.CheckpointOptions | None = None,
        logging: LoggingOptions | None = None,
        extra_sinks: Mapping[str, OpenSink] | None = None,
        policy: health.Policy | None = None,
        batches_per_epoch: float | None = None,
    ) -> AbstractContextManager[Loop]:
        """Open what runs around the steps: `with run.loop(...) as loop`.

        It opens the sinks (`open_run_sinks`), the saves and the guard against bad numbers
        (`open_guarded_saver`), and collects garbage only between steps (`collect_manually`).
        Leaving the block waits for the last save.

        Args:
            state: The counters that `resume` returned.
            stages: This rank's stages.
            optimizer: The optimizer of their parameters.
            steps: The step after which training stops.
            replay: The `forward_backward` of the run, which computes the gradients of a bad step
                again; see `make_guard`.
            checkpoints: When to save, and what to keep.
            logging: How often metrics are read, and where they go.
            extra_sinks: Sinks of your own by name, each opened with `step=`; see `open_run_sinks`.
            policy: What to do about bad numbers.
            batches_per_epoch: The length of an epoch, for intervals such as 2epochs.

        Raises:
            ConfigError: Checkpoints are saved by epochs, and there is no `batches_per_epoch`.

        Effects:
            Writes to the run directory. The guard may restore parameters and optimizer state.
        """
        logging = logging or LoggingOptions()
        device = self.ps.device
        default_interval = 1 if device.type == "cpu" else _LOG_EVERY
        # No processor's peak is known, so mfu needs it from the user there.
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "this processor"
        peak = logging.peak_flops or peak_flops(name)
        if peak is None and self.flops_per_token is not None:
            self.log(f"no mfu: the peak of {name} is not known; --peak-flops gives it")
        if logging.sync_phases and device.type != "cpu":
            self.times.wait = partial(torch.accelerator.synchronize, device)
        if state.step >= steps:
            self.log(
                f"the run in {self.dir} is complete at step {state.step}; --steps takes it further"
            )
        intervals = IntervalClock(
            run_dir=self.dir,
            world=self.ps.world,
            batches_per_epoch=batches_per_epoch,
            state=state,
        )
        checkpoints = checkpoints or checkpoint.CheckpointOptions()
        intervals.check(checkpoints.save_every)
        if self.mirror is not None:
            self.mirror.retention = checkpoints.retention
        return Loop(
            run=self,
            stages=modules_of(stages),
            optimizer=optimizer,
            steps=steps,
            checkpoints=checkpoints,
            intervals=intervals,
            log_every=logging.log_every or default_interval,
            policy=policy or health.Policy(),
            peak_flops=peak,
            readings=RankReadings(device, self.ps.world),
            logging=logging,
            current=state,
            first_step=state.step,
        ).open(
            replay,
            {
                **named_sinks(logging.sinks, self.dir, config=self.config),
                # A sink of your own may take the name of one above.
                **(extra_sinks or {}),
            },
        )

    def finish(
        self,
        state: TrainState,
        stages: Iterable[nn.Module] | nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        stop: str | None = None,
    ) -> int:
        """Finish a run, and return the exit code: 0, or another if there is a reason to stop.

        That is `EXIT_SAVED`, or 76 if a request has aborted the run.

        Without a reason it writes final.json (`write_final`), plots the loss, and the load of
        experts if there are any, and logs how the time was spent. With one it does nothing:
        the same command resumes the run.

        Args:
            state: The counters at the end.
            stages: This rank's stages.
            optimizer: The optimizer of their parameters.
            stop: What `loop.checkpoint` returned last.

        Effects:
            Writes to the run directory; communicates on all axes.
        """
        if stop:
            return self.stop_code
        self.phase("the end", allow=self.timeouts.start_timeout)
        # All ranks take part in this; the files below are those of the first.
        write_final(
            self.dir, state, modules_of(stages), optimizer, self.ps, components=self.components
        )
        if self.ps.world.index == 0:
            metrics = self.dir / "metrics.jsonl"
            picture = self.dir / "loss.png"
            plot_loss(metrics, picture)
            if any("load" in line for line in read_jsonl(metrics)):
                plot_expert_load(metrics, self.dir / "load.png")
            self.log(f"the run is in {self.dir}; its loss is plotted in {picture}")
            self.log(summarize_run(self.dir))
        return 0


@attrs.define(eq=False, kw_only=True)
class Loop:
    """What runs around the steps of a run, from `run.loop`."""

    _run: Run
    _stages: Sequence[nn.Module]
    _optimizer: torch.optim.Optimizer
    _steps: int
    _checkpoints: checkpoint.CheckpointOptions
    _intervals: IntervalClock
    _log_every: int
    _policy: health.Policy
    _peak_flops: float | None  # FLOP/s of one device, None if unknown
    _readings: RankReadings
    _logging: LoggingOptions
    # The state of the stages and the optimizer, as far as the loop knows it. It is consistent until
    # the next optimizer step starts, which writes parameters and moments one by one and is followed
    # by the counters: see `_find_unsaved`.
    _current: TrainState | None
    _first_step: int
    # Set by `open`.
    _write_metrics: Sink = attrs.field(init=False)
    _write_event: WriteEvent = attrs.field(init=False)
    _save: Save = attrs.field(init=False)
    _guard: Guard = attrs.field(init=False)
    _collect: Collect = attrs.field(init=False)
    _steering: Steering = attrs.field(init=False)
    # Further requests that a run can carry out, by name; see `on_request`.
    _handlers: dict[str, Handler] = attrs.field(factory=dict)
    _read_signs: Callable[[], int] = attrs.field(init=False)
    _instruments: Instruments = attrs.field(init=False)
    _step_start: float = attrs.field(factory=time.perf_counter)
    # Steps whose metrics have not been read yet, and the batch of the last of them.
    _pending: list[tuple[TrainState, Mapping[str, Tensor | float]]] = attrs.field(factory=list)
    _batch: StepBatch | None = None
    _has_recorded: bool = False
    _score: tuple[int, float] | None = None  # of the last evaluation, with its step
    _best_step: int | None = None  # the step of the last evaluation, if it is one of the best
    _last_saved: int | None = None  # the step of the save that was started last
    _stop_reason: str | None = None
    _divergence: str = ""  # why the training loss has diverged
    _last_step: int = attrs.Factory(lambda self: self._first_step, takes_self=True)
    _optimizer_steps: int = 0
    _optimizer_steps_of_current: int = 0
    # Of step `_last_step`, after which the components themselves may move on at any time.
    _component_copies: Components | None = None
    _can_copy_components: bool = True  # until they are too large
    _read_step: int | None = None  # at which the readings of all ranks were gathered last
    _reported: set[tuple[int, str]] = attrs.field(factory=set)  # ranks and what is wrong with them

    @contextlib.contextmanager
    def open(self, replay: ForwardBackward, sinks: Mapping[str, OpenSink]) -> Iterator[Loop]:
        """Open the sinks, the saves and the guard for the steps of a block; `Run.loop` calls it.

        Args:
            replay: Computes the gradients of a bad step again; see `make_guard`.
            sinks: Further sinks by name; see `open_run_sinks`.

        Effects:
            Those of `open_run_sinks`, `open_guarded_saver` and `collect_manually`.
        """
        run = self._run
        stages = attach_axes(self._stages, run.ps)
        if self._logging.capture is not None:
            match_modules(stages, self._logging.capture)

        # A hook before the step: the count has to change before any parameter does.
        def count(*_: Any) -> None:
            self._optimizer_steps += 1

        with (
            open_run_sinks(
                run.dir,
                run.ps.world.share,
                step=self._first_step,
                last=self._steps,
                extra=sinks,
                logger=run.logger,
            ) as (self._write_metrics, self._write_event),
            open_steering(
                run.mailbox,
                write_event=self._write_event,
                log=run.log,
                ranks=run.ps.world.count,
                is_first=run.ps.world.index == 0,
                handlers=self._handlers,
            ) as self._steering,
            self._open_saver(replay) as (self._save, self._guard),
            # Ranks collect at any time in a process whose other threads make garbage too.
            collect_manually()
            if owns_process()
            else contextlib.nullcontext(_leave) as self._collect,
            watch_device(run.ps.device) as self._read_signs,
            open_instruments(
                run.dir,
                stages,
                self._optimizer,
                self._logging,
                device=run.ps.device,
                last_step=self._steps,
                write_event=self._write_event,
                logger=run.logger,
            ) as self._instruments,
        ):
            self.on_request("log-every", self._set_log_every)
            self.on_request("profile", self._instruments.request_profile)
            self._write_event(
                "resume",
                step=self._first_step,
                messages=run.resume_messages,
                software=run.software,
            )
            self._write_event("startup", phases={**run.startup, **run.times.read()})
            self._write_event(
                "host",
                hosts=gather_inventory(run.ps.device, run.ps.world),
                layout=run.ps.degrees,
            )
            counting = self._optimizer.register_step_pre_hook(count)
            try:
                self._instruments.begin_step(self._first_step + 1)
                yield self
            finally:
                counting.remove()
                self._write_notices(self._last_step)
            # Without an exception, so the steps since the last read are good ones.
            if self._pending:
                self._read_pending(self._pending[-1][0])
            if self._stop_reason:
                self._write_event("stop", step=self._last_step, why=self._stop_reason)
        if self._divergence:
            raise self._make_divergence_error(self._last_step)
        if self._stop_reason:
            is_abort = self._steering.is_abort
            run.log(
                f"stopped after step {self._last_step} ({self._stop_reason})"
                f"{', without a save' if is_abort else ''}; the same command resumes from "
                f"{'the last checkpoint' if is_abort else 'there'}"
            )
            run.log(summarize_run(run.dir))

    def _open_saver(self, replay: ForwardBackward) -> AbstractContextManager[tuple[Save, Guard]]:
        run = self._run
        return checkpoint.open_guarded_saver(
            run.dir,
            self._stages,
            self._optimizer,
            run.ps,
            policy=self._policy,
            replay=replay,
            event=self._write_saver_event,
            facts=run.facts,
            config=run.config,
            retention=self._checkpoints.retention,
            background=self._checkpoints.background_saves,
            # At least as long as this `watch_ranks` waits by default.
            grace=run.timeouts.grace or _GRACE,
            # No power cut then loses lines of steps that no restart repeats.
            before_commit=partial(fsync_jsonl, run.dir),
            log=run.log,
            get_unsaved=self._find_unsaved,
            progress=run.progress,
            components=run.components,
        )

    def _write_saver_event(self, name: str, **facts: Any) -> None:
        self._write_event(name, **facts)
        if name == "save":
            self._steering.note_saved(facts["step"], path=facts["path"], error=facts["error"])

    def on_request(self, name: str, handler: Handler) -> None:
        """Let `handler(argument, step)` carry out a request of `python -m trainkit control`.

        Args:
            name: The request, one of `control.REQUESTS`.
            handler: Called on all ranks after the same step, with the number that was given, or
                None; it returns what it has done in words, or refuses by a ConfigError.

        Examples:
            >>> def set_up(loop, profiler):
            ...     loop.on_request("profile", lambda steps, step: profiler(step, steps))
        """
        self._handlers[name] = handler

    def _set_log_every(self, steps: int | None, step: int) -> str:
        assert steps is not None  # `check_request` has seen to it
        self._log_every = steps
        return f"--log-every is {steps} from step {step + 1} on"

    @as_phase("log")
    def record(
        self, state: TrainState, metrics: Mapping[str, Tensor | float], batch: StepBatch
    ) -> TrainState:
        """Write the metrics of a step, check them, and return the state to continue with.

        It waits for the metrics (`make_step_records`), adds what the step cost: seconds by phase
        (`PhaseTimes`), `mfu` and `hfu` (`model_flops_utilization`), and the memory of the rank that
        has the highest peak (`RankReadings`, gathered every 10 steps). It writes them
        (`open_run_sinks`), and skips, rolls back or ends as the policy says (`make_guard`). So it
        may return an earlier state. After the first step an event "memory" has every rank's peak.

        With `LoggingOptions.log_every` above 1 it does so for that many steps at once, after the
        first step, and before anything else happens between two steps. Other steps do not wait for
        the device.

        Args:
            state: The counters after the step.
            metrics: The metrics of the step, as `metrics.advance` returns them.
            batch: The batch of this rank, for the guard.
        """
        self._batch = batch
        self._instruments.end_step(batch)
        self._intervals.note_batch(batch.microbatches, self._run.ps.loss.count)
        is_first = not self._has_recorded
        if not (is_first or is_due(state.step, self._log_every) or self._is_save_due(state)):
            # Copies, since the step may write into its tensors again before they are read.
            copies = {
                name: x.detach().clone() if isinstance(x, Tensor) else x
                for name, x in metrics.items()
            }
            self._pending.append((state, copies))
            return self._set_current(state)
        run = self._run
        if is_first:  # a save that cannot succeed is refused here, not many steps later
            check_savable(state, self._stages, self._optimizer, run.ps, run.components)
        self._pending.append((state, metrics))
        # Also after a roll-back, to an earlier step.
        is_read = self._read_step is None or not 0 <= state.step - self._read_step < _READ_EVERY
        if is_read:
            self._readings.gather(self._read_signs())
            self._read_step = state.step
        # The time of the next steps starts here: these are queued on the device already.
        run.phase(f"step {state.step + 1}", allow=self._log_every * run.timeouts.step_timeout)
        self._has_recorded = True
        state = self._read_pending(state)
        if is_read:  # not before: where ranks talk through the device, reading waits for it
            self._report_signs(state.step)
        self._write_notices(state.step)
        if is_first:
            peaks = self._readings.read_peaks()
            self._write_event("memory", step=state.step, memory_peak=peaks)
            if len(peaks) > 1:
                peak = max(peaks)
                run.log(
                    f"memory: at most {peak / 2**30:.2f} GiB on a rank so far, on rank "
                    f"{peaks.index(peak)}"
                )
        return state

    def evaluate(self, state: TrainState, evaluator: Evaluate) -> TrainState:
        """Evaluate, record the results, and return the state to continue with.

        It announces an evaluation to the watch, runs it (on averaged parameters where there are
        some, `optim.use_averaged_parameters`), sends the results and the perplexity to every sink
        as eval/NAME, and ends a run that has diverged (`stop_if_diverged`). The `score`, or else
        the loss, becomes the score of this step's checkpoint.

        Args:
            state: The counters of the last step.
            evaluator: Returns the results by name; `make_evaluator` makes one.
        """
        checked = self._read_pending(state)
        if checked.step < state.step:
            return checked  # the state to evaluate was rolled back
        state = checked
        self._run.phase("evaluation", allow=self._run.timeouts.start_timeout)
        with measure_phase("evaluate"), use_averaged_parameters(self._optimizer):
            results = evaluator()
        # Before what follows from them, so that an evaluation that ends the run is on record too.
        self._record_evaluation(state.step, results)
        state = health.stop_if_diverged(state, results["loss"])
        self._steering.note_evaluation(results["loss"])
        score = results.get("score", results["loss"])
        if state.step > 0:  # the initial weights are no checkpoint of the run
            is_best, memory = health.is_among_best(
                score, state.health, most=self._checkpoints.keep_best
            )
            state = attrs.evolve(state, health=memory)
            self._best_step = state.step if is_best else None
        self._set_current(state)
        self._score = state.step, score
        # The seconds of the next step do not contain the evaluation.
        self._step_start = time.perf_counter()
        return state

    def _record_evaluation(self, step: int, results: Mapping[str, float]) -> None:
        """Send the results of an evaluation to every sink, and print them."""
        if is_loss_per_token(results):
            results = {**results, "perplexity": loss_to_perplexity(results["loss"])}
        self._write_event("evaluation", step=step, **results)
        unit = next((x for x in ("pair", "answer") if f"{x}s" in results), "token")
        nats = "nats " if unit == "token" else ""
        self._run.log(
            f"held out: {results['loss']:.4f} {nats}per {unit}, {results[f'{unit}s']} {unit}s"
        )

    def checkpoint(self, state: TrainState) -> str | None:
        """Save if it is time, carry out requests, and return why the run has to stop, or None.

        Call it after every step. The ranks vote on whether to stop (`open_step_vote`). A save is
        due every `CheckpointOptions.save_every` steps, when the run stops, when the step's
        evaluation is among the `keep_best` best (`open_saver`), and when somebody requests it
        (`control.control_run`). Then garbage is collected (`collect_manually`).

        Raises:
            NumericsError: The training loss has diverged, with `Policy.on_divergence`: here, or
                when the block of the loop ends, after the save.
        """
        if self._divergence and self._policy.on_divergence == "stop":
            raise self._make_divergence_error(state.step)
        is_save_due = self._is_save_due(state) or self._best_step == state.step
        vote = self._run.vote()
        self._steering.settle_checks(state.step)
        # Before a signal requests are not carried out: the run may have seconds to save.
        self._steering.carry_out(() if vote.stop else vote.requests, state.step)
        # With "save", the error is raised when the save has ended.
        self._stop_reason = vote.stop or self._steering.stop or self._divergence or None
        if self._steering.is_abort:
            self._run.stop_code = PreemptedError.code
        is_saved = not self._steering.is_abort and bool(self._stop_reason or is_save_due)
        if is_saved:
            state = self._read_pending(state)
            # Before the save, which may fail: `_is_saved` looks at the disk as well.
            self._last_saved = state.step
            self._steering.note_save(state.step)
            with measure_phase("save"):
                self._save(state, self._get_score(state.step))
        # A save has interrupted the steps anyway.
        self._collect(idle=is_saved)
        if self._run.components and self._can_copy_components:
            # Once a step, as late as possible: until here the objects have the state of this step.
            self._component_copies = copy_components(self._run.components)
            self._can_copy_components = self._component_copies is not None
        self._last_step = state.step
        self._intervals.advance(state, vote.clock)
        self._instruments.begin_step(state.step + 1)
        # Pending steps share the time since the first of them began.
        if not self._pending:
            self._step_start = time.perf_counter()
        return self._stop_reason

    def is_due(self, state: TrainState, every: int | Interval, *, since: int = 0) -> bool:
        """Return whether something is due that is done at an interval, and after the last step.

        Tokens and epochs are those of the state. Seconds are those of rank 0, which other ranks
        know a step later; they count while a process trains, and go on after a resume. Something is
        also due after the next step when somebody requests an evaluation or a sample
        (`control.control_run`).

        Args:
            state: The counters after a step.
            every: A number of steps, or another interval; 0 for never.
            since: The step from which steps are counted.

        Raises:
            ConfigError: The interval is in epochs, and `run.loop` has no `batches_per_epoch`.

        Effects:
            The first time for an interval in seconds it communicates: all ranks must call it.
        """
        is_requested = self._steering.wants_check
        return self._has_passed(parse_interval(every), state, since=since) or is_requested

    def _has_passed(self, interval: Interval, state: TrainState, *, since: int = 0) -> bool:
        if interval.unit == "steps":
            return is_due(state.step - since, int(interval.value), last=self._steps - since)
        if not interval:
            return False
        return self._intervals.is_due(interval, state) or state.step == self._steps

    def event(
        self, name: str, *, facts: Mapping[str, Any] | None = None, step: int | None = None
    ) -> None:
        """Add a line to events.jsonl with a name, the step if it is given, and these facts."""
        values = dict(facts or {})
        self._write_event(name, **(values if step is None else {"step": step} | values))

    def show_sample(self, state: TrainState, text: str) -> None:
        """Print what the model has written after a step, and add an event "sample" with it."""
        # An untrained model writes any byte, and some would garble a terminal.
        self._run.log(escape_control_characters(text))
        self._write_event("sample", step=state.step, text=text)
        self._steering.note_sample()

    def result(self, metric: str) -> None:
        """Add an event "result": the first and the last value of an evaluation, as "eval/loss".

        See `sinks.compare_evaluations`.
        """
        self._write_event("result", **compare_evaluations(self._run.dir, metric))

    def _is_save_due(self, state: TrainState) -> bool:
        return self._has_passed(self._checkpoints.save_every, state) or self._steering.wants_save

    def _get_score(self, step: int) -> float | None:
        scored_step, score = self._score or (None, None)
        return score if scored_step == step else None

    def _set_current(self, state: TrainState) -> TrainState:
        """Note that the stages and the optimizer have this state, and return it."""
        self._current = state
        self._optimizer_steps_of_current = self._optimizer_steps
        return state

    def _read_pending(self, state: TrainState, guard: Guard | None = None) -> TrainState:
        """Write the metrics of the pending steps and check them, one by one.

        A roll-back from one of them discards those after it, as if they had not been taken.
        """
        guard = guard or self._guard
        steps = self._pending
        self._pending = []
        self._current = None  # a roll-back writes parameters: until it is over, nothing is whole
        newest_health = steps[0][0].health if steps else state.health
        records = make_step_records([metrics for _, metrics in steps], begin=self._step_start)
        costs = self._measure_costs(len(steps))
        for (at_step, _), record in zip(steps, records, strict=True):
            record.update(costs | self._measure_utilization(record))
            self._write_metrics(at_step.step, record)
            # Counts of bad steps come from the steps checked before this one; the loss scale, which
            # moves on the device in every step, from the step itself.
            checked = guard(
                attrs.evolve(at_step, health=health.copy_loss_scale(at_step.health, newest_health)),
                record,
                # Only the newest batch is at hand, to compute a bad step again.
                self._batch if at_step is steps[-1][0] else None,
                seen=at_step.health,
            )
            self._step_start = time.perf_counter()
            if checked.step < at_step.step:
                # The run is at a checkpoint again, which has all of its state.
                self._last_saved = checked.step
                return self._set_current(checked)
            checked = self._watch_divergence(checked, record)
            newest_health = checked.health
        scaled = health.copy_loss_scale(state.health, newest_health)
        return self._set_current(attrs.evolve(state, health=scaled))

    def _measure_costs(self, steps: int) -> dict[str, float]:
        """Return what each of some steps cost: the time, seconds by phase, and memory."""
        if not steps:
            return {}
        # What follows a step, as an evaluation does, counts for the next line: over all lines the
        # phases add up to the time of the run.
        seconds = self._run.times.read().items()
        phases = {f"seconds/{phase}": value / steps for phase, value in seconds}
        return {"time": time.time(), **phases, **self._readings.read_memory()}

    def _measure_utilization(self, record: Mapping[str, Any]) -> dict[str, float]:
        """Return `mfu` and `hfu` of a step, where the operations and the peak are known."""
        known = {"mfu": self._run.flops_per_token, "hfu": self._run.hardware_flops_per_token}
        tokens = record.get("tokens_processed")
        if tokens is None or self._peak_flops is None:
            return {}
        return {
            name: model_flops_utilization(
                flops_per_token * tokens,
                record["seconds"],
                peak=self._peak_flops,
                devices=self._run.ps.world.count,
            )
            for name, flops_per_token in known.items()
            if flops_per_token is not None
        }

    def _write_notices(self, step: int) -> None:
        """Write the events of other threads, as that of a slow rank."""
        while self._run.notices:
            name, facts = self._run.notices.popleft()
            self._write_event(name, step=step, **facts)

    def _report_signs(self, step: int) -> None:
        """Warn of each rank whose device or host is sick, once for each sign."""
        for rank, signs in enumerate(self._readings.read_signs()):
            for what in describe_signs(signs):
                if (rank, what) not in self._reported:
                    self._reported.add((rank, what))
                    self._write_event("health", step=step, rank=rank, what=what)
                    self._run.log(f"warning: the device of rank {rank} may be sick: {what}")

    def _watch_divergence(self, state: TrainState, record: Mapping[str, Any]) -> TrainState:
        """Look at the training loss over a window of steps, if the policy asks for it."""
        if self._policy.on_divergence == "ignore" or record.get("skipped"):
            return state
        reason, memory = health.check_divergence(record["loss"], state.health, name="training")
        if reason and not self._divergence:
            self._divergence = reason
            self._write_event("divergence", step=state.step, why=reason)
        return attrs.evolve(state, health=memory)

    def _make_divergence_error(self, step: int) -> NumericsError:
        return NumericsError(
            f"training has diverged by step {step}: {self._divergence}",
            where=f"step {step}",
            hint="look at the learning rate; --resume takes an earlier checkpoint",
        )

    def _find_unsaved(self, error: BaseException) -> UnsavedState | None:
        """Return the state to save when an error ends the run; None if it is saved or torn.

        Nothing here communicates. After a `NumericsError` an earlier state is the right one.
        """
        state = self._current
        if state is None or isinstance(error, NumericsError) or self._is_saved(state.step):
            return None
        # From `record` to `checkpoint` the objects have the state of this step: None reads them.
        copies = self._component_copies if state.step == self._last_step else None
        is_recorded = state.step == self._last_step + 1
        if self._run.components and copies is None and not is_recorded:
            print_warning(
                f"step {state.step} is not saved after the error: the components "
                f"{', '.join(self._run.components)} may already have the state of a later step, "
                "and are too large to be copied after each one, or hold what no checkpoint can"
            )
            return None
        after_peer_error = is_echo(error) or isinstance(error, PeerError)
        if self._optimizer_steps != self._optimizer_steps_of_current:
            if not after_peer_error:
                print_warning(
                    f"step {state.step} cannot be saved: the error came within step "
                    f"{state.step + 1}, after its optimizer step had started"
                )
            return None
        try:
            # The guard would communicate, and other ranks may be dead.
            state = self._read_pending(state, self._check_alone)
        except NumericsError:  # all ranks decide together about what follows from it
            return None
        return UnsavedState(
            state, print_to_stderr, self._get_score(state.step), after_peer_error, copies
        )

    def _is_saved(self, step: int) -> bool:
        # A save that was started may have failed: the disk has the last word.
        newest = checkpoint.list_checkpoints(self._run.dir / "checkpoints")[:1]
        was_started = step == self._last_saved and [parse_step(path) for path in newest] == [step]
        return step == self._first_step or was_started

    def _check_alone(
        self,
        state: TrainState,
        record: Mapping[str, Any],
        batch: StepBatch | None,
        *,
        seen: health.HealthState | None = None,
    ) -> TrainState:
        """Check a step as `make_guard` does, without communication."""
        del batch
        action, state = health.judge_step(state, record, self._policy, seen=seen)
        if action.reason:
            raise NumericsError(action.reason)
        return state


def _leave(*, idle: bool = False) -> None:
    """Leave the collection of garbage to Python."""
    del idle


def _count_flops_per_token(
    model: Any, rows: PackedCorpus | None, stages: Sequence[nn.Module], *, pp: Axis
) -> tuple[float | None, float | None]:
    """Return the model's operations for a token and the hardware's, None where unknown."""
    if rows is None or not isinstance(model, DecoderConfig):
        return None, None
    parameters = get_named_parameters(stages).items()
    own = [[x, [*p.shape]] for x, p in parameters if p.requires_grad and not is_tied_copy(p)]
    trained = {name: shape for part in all_gather_objects(own, pp) for name, shape in part}
    lengths = rows.bins.lengths
    tokens = max(int(lengths.sum()), 1)
    flops = decoder_flops(model, lengths, trained=trained)
    repeated = recomputed_flops(model, lengths, get_recompute_mode(stages), trained=trained)
    return flops / tokens, None if repeated is None else (flops + repeated) / tokens


def gather_facts(
    *,
    config: Any = None,
    model: Any = None,
    tokenizer: Any = None,
    rows: PackedCorpus | None = None,
    corpora: Mapping[str, Any] | None = None,
    first: InitialWeights | None = None,
    context: int | None = None,
    template: str | None = None,
    facts: Facts | None = None,
) -> Facts:
    """Return the facts that checkpoints of a run store, and that a resumed run must share.

    Args:
        config: The record of the run's flags; which of them count, see `config.option`.
        model: The configuration of the model, an attrs record.
        tokenizer: The tokenizer; checkpoints store its hash.
        rows: The rows of the training data; checkpoints store hashes of corpus and packing.
        corpora: The corpora by name, if each is a part of a mixture under its name.
        first: Where the initial weights are from, for the context.
        context: The longest text that the model is trained on, or that of the Hugging Face folder
            in `first`, if it is longer.
        template: The name of the chat template; checkpoints store its hash.
        facts: Others by name, or a function that returns them from the number of global batches.

    Returns:
        {name: value}; a function, if `facts` is one.

    Examples:
        >>> from trainkit.models import make_decoder_config
        >>> model = make_decoder_config("tiny")
        >>> facts = gather_facts(model=model, facts={"seed": 0})
        >>> facts["model"]["width"], facts["seed"]
        (128, 0)
    """
    known: dict[str, Any] = {}
    if config is not None:
        known |= make_config_facts(config)
    if model is not None:
        known["model"] = attrs.asdict(model)
    if tokenizer is not None:
        known["tokenizer"] = tokenizer_hash(tokenizer)
    if rows is not None:
        known |= make_data_facts(rows)
    known |= {f"fingerprint of {name}": fingerprint(x) for name, x in (corpora or {}).items()}
    if context is not None:
        source = None if first is None else first.source
        # A pretrained model does not lose a longer context by training on shorter rows.
        is_known = source is not None and is_hf_folder(source)
        known["context"] = max(context, open_folder(source).full_context if is_known else 0)
    if template is not None:
        known["template"] = template_hash(template)
    if callable(facts):
        return lambda batches: {**known, **facts(batches)}
    return {**known, **(facts or {})}
