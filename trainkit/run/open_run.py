"""What runs around a training process, and around its steps: two records of functions.

`open_run` yields a `Run`; `run.loop` yields a `Loop`. Neither has a step, and no function of the
library takes one of them: each field combines a few calls, which its description names, and a
script of another shape makes these calls itself.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from logging import Logger
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
from torch import Tensor

from trainkit import health
from trainkit.collectives import all_gather_objects, run_on_all_ranks
from trainkit.data.concat import fingerprint
from trainkit.data.packed import make_data_facts
from trainkit.files import atomic_write, format_toml, say_on_stderr
from trainkit.mesh import describe_launch, parallel_session
from trainkit.metrics import make_step_records, read_memory_stats
from trainkit.optim.combine import use_averaged_parameters
from trainkit.parallel.describe_run import describe_run
from trainkit.parallel.parameters import modules_of
from trainkit.run.config import config_to_dict, make_config_facts, make_resume_rules
from trainkit.run.directory import make_run_dir
from trainkit.run.errors import EXIT_SAVED, report_errors
from trainkit.run.garbage import Collect, collect_manually
from trainkit.run.lock import lock_run
from trainkit.run.log import make_logger, print_warning
from trainkit.run.plots.load import plot_expert_load
from trainkit.run.plots.loss import plot_loss
from trainkit.run.reproducible import set_numerics
from trainkit.run.signals import StopReason, open_stop_vote, trap_signals
from trainkit.run.sinks.jsonl import compare_evaluations, fsync_jsonl, read_jsonl
from trainkit.run.sinks.named import LoggingOptions, named_sinks
from trainkit.run.sinks.open_run_sinks import open_run_sinks, summarize_run
from trainkit.run.startup import check_ranks_agree, make_code_facts
from trainkit.run.timeouts import Timeouts
from trainkit.run.watchdog import Announce, is_echo, watch_ranks
from trainkit.schedules import is_due
from trainkit.text.chat import template_hash
from trainkit.text.tokenizers import tokenizer_hash
from trainkit.types import (
    Bins,
    ForwardBackward,
    Layout,
    Log,
    Numerics,
    NumericsError,
    ParallelState,
    PeerError,
    Precision,
    Sink,
    Stages,
    StepBatch,
    TrainState,
)
from trainkit.weights import checkpoint
from trainkit.weights.checkpoint.emergency_save import UnsavedState
from trainkit.weights.checkpoint.facts import Facts
from trainkit.weights.checkpoint.guard import Guard
from trainkit.weights.checkpoint.initial_weights import InitialWeights, hash_initial_weights
from trainkit.weights.checkpoint.manifest import parse_step
from trainkit.weights.checkpoint.save import Save, write_final
from trainkit.weights.checkpoint.snapshot import check_savable
from trainkit.weights.checkpoint.write import SaveProgress
from trainkit.weights.hub.folder import is_hf_folder, open_folder

if TYPE_CHECKING:
    import torch
    from torch import nn

    from trainkit.data.packed import PackedCorpus

_SOFTWARE = "software"  # a fact that may change, as people edit their recipes; it is logged
# Facts that only name what hashes of the corpus and the weights stand for.
_NAMES_ONLY = ("files", "context", "base_from")
_LOG_EVERY = 10  # steps between two reads of the metrics, where the host waits for a device

Evaluate = Callable[[], Mapping[str, float]]
"""`Evaluate() -> {name: value}`: one evaluation, with a `loss` and the number of its `tokens`,
`pairs` or `answers`. A `score`, lower is better, ranks checkpoints in place of the loss.
"""


@attrs.frozen(eq=False)
class Loop:
    """What runs around the steps of a run, from `run.loop`."""

    record: Callable[[TrainState, Mapping[str, Tensor | float], StepBatch], TrainState]
    """`state = record(state, metrics, batch)`: waits for the metrics of the step
    (`make_step_record`), writes them with the first rank's memory (`open_run_sinks`,
    `read_memory_stats`), and skips, rolls back or ends as the policy says (`make_guard`): it may
    return an earlier state. With `LoggingOptions.log_every` above 1 it does so for that many steps
    at once, after the first step, and before anything else happens between two steps; other steps
    do not wait for the device. After the first step an event "memory" has the peak of every
    rank."""

    evaluate: Callable[[TrainState, Evaluate], TrainState]
    """`state = evaluate(state, evaluator)`: announces an evaluation to the watch, runs it (on
    averaged parameters where there are some, `optim.use_averaged_parameters`), sends the results to
    every sink as eval/NAME, and ends a run that has diverged (`stop_if_diverged`). The `score`, or
    else the loss, becomes the score of this step's checkpoint."""

    checkpoint: Callable[[TrainState], str | None]
    """`stop_reason = checkpoint(state)`: lets the ranks vote on whether to stop (`open_stop_vote`),
    saves when a save is due, the run stops, or the step's evaluation is among the
    `CheckpointOptions.keep_best` best (`open_saver`), collects garbage (`collect_manually`), and
    returns why the run stops, or None."""

    is_due: Callable[..., bool]
    """`is_due(state, every, since=0)`: whether to do now what is done every so many steps, counted
    from step `since` on (never, if `every` is 0), and after the last step."""

    event: Callable[..., None]
    """`event(name, step=..., facts={...})` adds a line with these facts to events.jsonl."""

    result: Callable[[str], None]
    """`result("eval/loss")` adds a line with the first and the last value of an evaluation
    (`sinks.compare_evaluations`)."""


@attrs.frozen(eq=False)
class Run:
    """What runs around a training process, from `open_run`."""

    dir: Path
    """The run directory."""

    ps: ParallelState
    """The layout, as this rank sees it."""

    log: Log
    """Prints a message on the first rank (`make_logger`)."""

    describe: Callable[..., None]
    """`describe(stages, rows.bins, rows_per_step=..., precision=...)` logs what is trained, where,
    and on how much data (`parallel.describe_run`)."""

    phase: Announce
    """`phase(name, allow=seconds)`: what comes next, and how long it may take (`watch_ranks`)."""

    stopping: StopReason
    """Why the run has to stop, or None; all ranks get it after the same step (`open_stop_vote`)."""

    resume: Callable[..., TrainState]
    """`state = resume(stages, optimizer, request="auto", config=..., model=..., tokenizer=...,
    rows=..., corpora=..., first=..., context=..., template=..., facts={...})`: checks that the disk
    has room for two checkpoints (`checkpoint.check_disk_space`), resumes from the last one or
    starts from scratch (`checkpoint.resume`), logs which, and writes config.toml. A run resumes
    only with the facts that it began with: all that is given here, see `gather_facts`. Checkpoints
    also store the versions and hashes of the code (`make_code_facts`): other code resumes too, and
    a message says so."""

    loop: Callable[..., AbstractContextManager[Loop]]
    """`with loop(state, stages, optimizer, steps=..., replay=forward_backward, checkpoints=...,
    logging=..., policy=...) as loop:` opens the sinks (`open_run_sinks`), the saves and the guard
    against bad numbers (`open_guarded_saver`), and collects garbage only between steps
    (`collect_manually`). Leaving it waits for the last save."""

    finish: Callable[..., int]
    """`return finish(state, stages, optimizer, stop=stop)`: writes final.json
    (`write_final`), plots the loss, and the load of experts if there are any, logs how
    the time was spent, and returns the exit code 0. If there is a reason to stop it does none of
    this and returns `EXIT_SAVED`: the same command resumes the run."""


@contextlib.contextmanager
def open_run(
    run_dir: str | Path,
    *,
    layout: Layout | None = None,
    timeouts: Timeouts | None = None,
    numerics: Numerics | None = None,
    config: Any = None,
) -> Iterator[Run]:
    """Open the process groups, with signals trapped, the directory locked and the ranks watched.

    From the outside in, and why there: `report_errors` reports every error and gives it its exit
    code; `trap_signals` receives a signal while ranks still wait for each other; `parallel_session`
    connects them; `make_run_dir` tries the directory on all ranks, and all end if one of them
    cannot write there (alone it would leave the others waiting); `lock_run` raises if another job
    trains in the directory, or if not all ranks share it; `report_errors` again, since tracebacks
    now have a directory; `watch_ranks` ends all ranks when one is lost or hangs; `open_stop_vote`
    lets all stop after the same step; `check_ranks_agree` compares what the ranks were started
    with. A script that needs fewer of them opens those, down to `parallel_session` alone.

    Args:
        run_dir: The run directory, made if it does not exist.
        layout: The degrees and how work is done; by default all processes shard parameters.
        timeouts: How long ranks may wait. Collectives may wait longer: the watch ends a step in
            time, and knows which rank hangs.
        numerics: The precision of arithmetic, set (`set_numerics`) and logged; by default torch's
            settings stay.
        config: The resolved configuration: a record of flags, or plain values by name; equal on all
            ranks except for `out`. `resume` writes it, checkpoints store it, and sinks show it.

    Yields:
        A `Run`.

    Raises:
        SystemExit: In place of any exception, with the exit code of `get_exit_code`.

    Effects:
        Opens process groups, starts threads, sets signal handlers, writes the lock and the
        heartbeats of this rank under `run_dir`; undoes what it can at the end.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder, open_run(folder) as run:
        ...     run.ps.world.count, run.stopping()
        (1, None)
    """
    timeouts = timeouts or Timeouts()
    config = config_to_dict(config) if attrs.has(type(config)) else config
    folder = Path(run_dir)
    progress = SaveProgress()
    if numerics is not None:
        set_numerics(numerics)
    with (
        report_errors(),
        trap_signals() as stop_reason,
        parallel_session(
            layout or Layout(),
            timeout=timedelta(seconds=max(timeouts.start_timeout, 10 * timeouts.step_timeout)),
            start_timeout=timedelta(seconds=timeouts.start_timeout),
            asked=stop_reason,
        ) as ps,
    ):
        run_on_all_ranks(lambda: str(make_run_dir(folder)), ps.world)
        with (
            lock_run(folder, ps.world) as hold,
            report_errors(folder),
            watch_ranks(
                folder,
                ps.world,
                asked=stop_reason,
                allow=timeouts.start_timeout,
                grace=timeouts.grace,
                hold=hold,
                written=lambda: progress.parts,
            ) as phase,
            open_stop_vote(stop_reason, ps.world) as stopping,
        ):
            functions = _RunFunctions(
                dir=folder,
                ps=ps,
                phase=phase,
                stopping=stopping,
                timeouts=timeouts,
                config=config,
                progress=progress,
            )
            functions.check_start(numerics)
            yield functions.make_run()


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
    """Return what a run must be continued with, as facts for its checkpoints.

    Args:
        config: The record of the run's flags; which of them count, see `config.option`.
        model: The configuration of the model, an attrs record.
        tokenizer: The tokenizer, of which a hash is kept.
        rows: The rows that are trained on, of which the corpus and the packing are kept as hashes.
        corpora: The corpora by name, if each is a part of a mixture under its name.
        first: Where the first weights are from, for the context.
        context: The longest text that the model is trained on; where a folder that the run begins
            with says that its model is for longer ones, that counts.
        template: The name of the chat template, of which a hash is kept.
        facts: Others by name, or a function that returns them from the number of global batches.

    Returns:
        {name: value}; a function, as `facts` is, if that is one.

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
        is_known = source is not None and is_hf_folder(source)
        known["context"] = max(context, open_folder(source).full_context if is_known else 0)
    if template is not None:
        known["template"] = template_hash(template)
    if callable(facts):
        return lambda batches: {**known, **facts(batches)}
    return {**known, **(facts or {})}


def _add_facts(facts: Facts, more: Mapping[str, Any]) -> Facts:
    """Return the facts of a run and some that are the same in all of it."""

    def facts_at(batches: int) -> Mapping[str, Any]:
        return {**(facts(batches) if callable(facts) else facts), **more}

    return facts_at


@attrs.define(eq=False)
class _RunFunctions:
    """The functions of a `Run`, and what they share."""

    dir: Path
    ps: ParallelState
    phase: Announce
    stopping: StopReason
    timeouts: Timeouts
    config: Mapping[str, Any] | None
    progress: SaveProgress
    logger: Logger = attrs.field(init=False)
    # Read once: a recipe may be edited while it runs.
    software: Mapping[str, str] = attrs.field(init=False, factory=make_code_facts)
    facts: Facts | None = None
    resume_messages: list[str] = attrs.field(factory=list)

    def __attrs_post_init__(self) -> None:
        self.logger = make_logger(self.ps.world.share)

    @property
    def log(self) -> Log:
        return self.logger.info

    def make_run(self) -> Run:
        return Run(
            dir=self.dir,
            ps=self.ps,
            log=self.log,
            describe=self.describe,
            phase=self.phase,
            stopping=self.stopping,
            resume=self.resume,
            loop=self.loop,
            finish=self.finish,
        )

    def check_start(self, numerics: Numerics | None) -> None:
        """Check that ranks agree on configuration and code, and log how the run was launched."""
        config = {f"config.{key}": x for key, x in (self.config or {}).items() if key != "out"}
        check_ranks_agree(self.ps.world, config | dict(self.software))
        for note in describe_launch(os.environ):
            self.log(note)
        if numerics is not None:
            self.log(str(numerics))

    def describe(
        self,
        stages: Stages | nn.Module,
        rows: Bins,
        *,
        rows_per_step: int,
        precision: Precision,
    ) -> None:
        self.log(describe_run(stages, rows, rows_per_step=rows_per_step, precision=precision))

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
    ) -> TrainState:
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
        of_start: dict[str, Any] = {_SOFTWARE: self.software}
        if first is not None:
            of_start |= hash_initial_weights(first, stages, self.ps)
        self.facts = _add_facts(gathered, of_start)
        if rules is None and config is not None:
            rules = make_resume_rules(config, allow=_NAMES_ONLY)
        rules = rules or checkpoint.ResumeRules()
        checkpoint.check_disk_space(self.dir, stages, axis=self.ps.world, log=self.log)
        state = checkpoint.resume(
            self.dir,
            TrainState(),
            stages,
            optimizer,
            self.ps,
            request=request,
            facts=self.facts,
            rules=attrs.evolve(rules, allow=(*rules.allow, _SOFTWARE)),
            log=self.resume_messages.append,
        )
        self.log("\n".join(self.resume_messages) or "starting from scratch")
        if self.ps.world.index == 0 and self.config is not None:
            with atomic_write(self.dir / "config.toml", by="open_run") as file:
                file.write(format_toml(self.config).encode())
        return state

    @contextlib.contextmanager
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
        policy: health.Policy | None = None,
    ) -> Iterator[Loop]:
        logging = logging or LoggingOptions()
        default_interval = 1 if self.ps.device.type == "cpu" else _LOG_EVERY
        if state.step >= steps:
            self.log(
                f"the run in {self.dir} is complete at step {state.step}; --steps takes it further"
            )
        functions = _LoopFunctions(
            run=self,
            stages=modules_of(stages),
            optimizer=optimizer,
            steps=steps,
            checkpoints=checkpoints or checkpoint.CheckpointOptions(),
            log_every=logging.log_every or default_interval,
            policy=policy or health.Policy(),
            first_step=state.step,
        )
        functions.set_current(state)
        with (
            open_run_sinks(
                self.dir,
                self.ps.world.share,
                step=state.step,
                last=steps,
                extra=named_sinks(logging.sinks, self.dir, config=self.config),
                logger=self.logger,
            ) as (functions.write_metrics, functions.event),
            functions.open_saver(replay) as (functions.save, functions.guard),
            collect_manually() as functions.collect,
            functions.count_optimizer_steps(),
        ):
            functions.event(
                "resume", step=state.step, messages=self.resume_messages, software=self.software
            )
            yield functions.make_loop()
            functions.end()
        functions.log_stop()

    def finish(
        self,
        state: TrainState,
        stages: Iterable[nn.Module] | nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        stop: str | None = None,
    ) -> int:
        if stop:
            return EXIT_SAVED
        self.phase("the end", allow=self.timeouts.start_timeout)
        write_final(self.dir, state, modules_of(stages), optimizer, self.ps)
        if self.ps.world.index == 0:
            metrics = self.dir / "metrics.jsonl"
            picture = self.dir / "loss.png"
            plot_loss(metrics, picture)
            if any("load" in line for line in read_jsonl(metrics)):
                plot_expert_load(metrics, self.dir / "load.png")
            self.log(f"the run is in {self.dir}; its loss is plotted in {picture}")
            self.log(summarize_run(self.dir))
        return 0


@attrs.define(eq=False)
class _LoopFunctions:
    """The functions of a `Loop`, and what they share: pending steps, the last score, the vote.

    `current` is the state of the stages and the optimizer, as far as the loop knows it. It is
    consistent until the next optimizer step starts, which writes parameters and moments one by one
    and is followed by the counters: see `find_unsaved`.
    """

    run: _RunFunctions
    stages: Sequence[nn.Module]
    optimizer: torch.optim.Optimizer
    steps: int
    checkpoints: checkpoint.CheckpointOptions
    log_every: int
    policy: health.Policy
    first_step: int  # the step that the loop started from
    write_metrics: Sink = attrs.field(init=False)
    event: Callable[..., None] = attrs.field(init=False)
    save: Save = attrs.field(init=False)
    guard: Guard = attrs.field(init=False)
    collect: Collect = attrs.field(init=False)
    step_start: float = attrs.field(factory=time.perf_counter)
    score: tuple[int, float] | None = None  # of the last evaluation, with its step
    best_step: int | None = None  # the step of the last evaluation, if it is one of the best so far
    stop_reason: str | None = None
    last_step: int = 0
    pending: list[tuple[TrainState, Mapping[str, Tensor | float]]] = attrs.field(factory=list)
    batch: StepBatch | None = None  # of the last pending step
    has_recorded: bool = False
    current: TrainState | None = None
    optimizer_steps: int = 0
    optimizer_steps_of_current: int = 0
    last_saved: int | None = None  # the step of the save that was started last
    memory: dict[str, int] = attrs.field(factory=dict)  # of this rank, when measured last

    def make_loop(self) -> Loop:
        return Loop(
            record=self.record,
            evaluate=self.evaluate,
            checkpoint=self.checkpoint,
            is_due=self.is_due,
            event=self.write_event,
            result=self.write_result,
        )

    def open_saver(self, replay: ForwardBackward) -> AbstractContextManager[tuple[Save, Guard]]:
        """Open the saves and the guard against bad numbers; see `open_guarded_saver`."""
        run = self.run
        return checkpoint.open_guarded_saver(
            run.dir,
            self.stages,
            self.optimizer,
            run.ps,
            policy=self.policy,
            replay=replay,
            event=self.event,
            facts=run.facts,
            config=run.config,
            retention=self.checkpoints.retention,
            background=self.checkpoints.background_saves,
            grace=run.timeouts.grace or 25.0,
            # No power cut then loses lines of steps that no restart repeats.
            before_commit=partial(fsync_jsonl, run.dir),
            log=run.log,
            get_unsaved=self.find_unsaved,
            progress=run.progress,
        )

    @contextlib.contextmanager
    def count_optimizer_steps(self) -> Iterator[None]:
        def count(*_: Any) -> None:
            self.optimizer_steps += 1

        handle = self.optimizer.register_step_pre_hook(count)
        try:
            yield
        finally:
            handle.remove()

    def set_current(self, state: TrainState) -> TrainState:
        """Note that the stages and the optimizer have this state, and return it."""
        self.current = state
        self.optimizer_steps_of_current = self.optimizer_steps
        return state

    def find_unsaved(self, error: BaseException) -> UnsavedState | None:
        """Return the state to save when an error ends the run; None if it is saved or torn.

        Nothing here communicates. After a `NumericsError` an earlier state is the right one.
        """
        state = self.current
        after_peer_error = is_echo(error) or isinstance(error, PeerError)
        if state is None or isinstance(error, NumericsError) or self._is_saved(state.step):
            return None
        if self.optimizer_steps != self.optimizer_steps_of_current:
            if not after_peer_error:
                print_warning(
                    f"step {state.step} cannot be saved: the error came within step "
                    f"{state.step + 1}, after its optimizer step had started"
                )
            return None
        try:
            state = self.read_pending(state, self._check_alone)
        except NumericsError:  # all ranks decide together about what follows from it
            return None
        scored_step, score = self.score or (None, None)
        return UnsavedState(
            state,
            say_on_stderr,
            score if scored_step == state.step else None,
            after_peer_error,
        )

    def _is_saved(self, step: int) -> bool:
        newest = checkpoint.list_checkpoints(self.run.dir / "checkpoints")[:1]
        was_started = step == self.last_saved and [parse_step(path) for path in newest] == [step]
        return step == self.first_step or was_started

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
        action, state = health.judge_step(state, record, self.policy, seen=seen)
        if action.reason:
            raise NumericsError(action.reason)
        return state

    def record(
        self, state: TrainState, metrics: Mapping[str, Tensor | float], batch: StepBatch
    ) -> TrainState:
        self.batch = batch
        is_first = not self.has_recorded
        if not (is_first or is_due(state.step, self.log_every) or self._is_save_due(state)):
            # Copies, since the step may write into its tensors again before they are read.
            copies = {
                name: x.detach().clone() if isinstance(x, Tensor) else x
                for name, x in metrics.items()
            }
            self.pending.append((state, copies))
            return self.set_current(state)
        if is_first:  # a save that cannot succeed is refused here, not many steps later
            check_savable(state, self.stages, self.optimizer, self.run.ps)
        self.pending.append((state, metrics))
        # The time of the next steps starts here: these are queued on the device already.
        self.run.phase(
            f"step {state.step + 1}", allow=self.log_every * self.run.timeouts.step_timeout
        )
        self.has_recorded = True
        state = self.read_pending(state)
        if is_first:
            self._report_memory(state.step)
        return state

    def _report_memory(self, step: int) -> None:
        """Record the peak of every rank: the lines of steps have the first rank's alone."""
        peaks = all_gather_objects(self.memory["memory_peak"], self.run.ps.world)
        self.event("memory", step=step, memory_peak=peaks)
        if len(peaks) > 1:
            peak = max(peaks)
            self.run.log(
                f"memory: at most {peak / 2**30:.2f} GiB on a rank so far, on rank "
                f"{peaks.index(peak)}; metrics.jsonl has that of rank 0"
            )

    def read_pending(self, state: TrainState, guard: Guard | None = None) -> TrainState:
        """Write the metrics of the pending steps and check them, one by one.

        A roll-back from one of them discards those after it, as if they had not been taken.
        """
        guard = guard or self.guard
        steps = self.pending
        self.pending = []
        self.current = None  # a roll-back writes parameters
        newest_health = steps[0][0].health if steps else state.health
        records = make_step_records([metrics for _, metrics in steps], begin=self.step_start)
        if steps:
            self.memory = self._measure_memory()
        for (at_step, _), record in zip(steps, records, strict=True):
            record.update(self.memory)
            self.write_metrics(at_step.step, record)
            checked = guard(
                attrs.evolve(at_step, health=health.copy_loss_scale(at_step.health, newest_health)),
                record,
                self.batch if at_step is steps[-1][0] else None,
                seen=at_step.health,
            )
            self.step_start = time.perf_counter()
            if checked.step < at_step.step:
                self.last_saved = checked.step
                return self.set_current(checked)
            newest_health = checked.health
        scaled = health.copy_loss_scale(state.health, newest_health)
        return self.set_current(attrs.evolve(state, health=scaled))

    def _measure_memory(self) -> dict[str, int]:
        memory = read_memory_stats(self.run.ps.device)
        if self.run.ps.device.type == "cpu":  # the peak of the whole process never falls
            memory["memory_peak"] = max(self.memory.get("memory_peak", 0), memory["memory_peak"])
        return memory

    def is_due(self, state: TrainState, every: int, *, since: int = 0) -> bool:
        return is_due(state.step - since, every, last=self.steps - since)

    def write_event(
        self, name: str, *, facts: Mapping[str, Any] | None = None, **more: Any
    ) -> None:
        self.event(name, **more, **(facts or {}))

    def write_result(self, metric: str) -> None:
        self.event("result", **compare_evaluations(self.run.dir, metric))

    def end(self) -> None:
        if self.pending:
            self.read_pending(self.pending[-1][0])
        if self.stop_reason:
            self.event("stop", step=self.last_step, why=self.stop_reason)

    def log_stop(self) -> None:
        if self.stop_reason:
            self.run.log(
                f"stopped after step {self.last_step} ({self.stop_reason}); the same command "
                f"resumes from there"
            )
            self.run.log(summarize_run(self.run.dir))

    def _is_save_due(self, state: TrainState) -> bool:
        return is_due(state.step, self.checkpoints.save_every, last=self.steps)

    def evaluate(self, state: TrainState, evaluator: Evaluate) -> TrainState:
        checked = self.read_pending(state)
        if checked.step < state.step:
            return checked  # the state to evaluate was rolled back
        state = checked
        self.run.phase("evaluation", allow=self.run.timeouts.start_timeout)
        with use_averaged_parameters(self.optimizer):
            results = evaluator()
        state = health.stop_if_diverged(state, results["loss"])
        score = results.get("score", results["loss"])
        if state.step > 0:  # the initial weights are no checkpoint of the run
            is_best, memory = health.is_among_best(
                score, state.health, most=self.checkpoints.keep_best
            )
            state = attrs.evolve(state, health=memory)
            self.best_step = state.step if is_best else None
        self.set_current(state)
        self.event("evaluation", step=state.step, **results)
        unit = next((x for x in ("pair", "answer") if f"{x}s" in results), "token")
        nats = "nats " if unit == "token" else ""
        self.run.log(
            f"held out: {results['loss']:.4f} {nats}per {unit}, {results[f'{unit}s']} {unit}s"
        )
        self.score = state.step, score
        self.step_start = time.perf_counter()
        return state

    def checkpoint(self, state: TrainState) -> str | None:
        self.stop_reason = self.run.stopping()
        is_saved = bool(
            self.stop_reason or self._is_save_due(state) or self.best_step == state.step
        )
        if is_saved:
            state = self.read_pending(state)
            scored_step, score = self.score or (None, None)
            self.last_saved = state.step
            self.save(state, score if scored_step == state.step else None)
        self.collect(idle=is_saved)
        self.last_step = state.step
        if not self.pending:
            self.step_start = time.perf_counter()
        return self.stop_reason
