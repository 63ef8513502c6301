"""What stands around a training process, and around its steps: two records of functions.

`open_run` yields a `Run`; `run.loop` yields a `Loop`. Neither has a step, and no function of the
library takes one of them: each field stands for two or three calls of other rooms, named beside it,
which a script of another shape makes itself.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
from torch import Tensor

from trainkit import health
from trainkit.collectives import all_gather_objects, run_on_all_ranks
from trainkit.data import fingerprint
from trainkit.data.packed import make_data_facts
from trainkit.files import atomic_write, format_toml, say_on_stderr
from trainkit.mesh import describe_launch, parallel_session
from trainkit.metrics import make_step_records, read_memory_stats
from trainkit.optim.combine import use_averaged_parameters
from trainkit.parallel.names import modules_of
from trainkit.parallel.start import describe_run
from trainkit.run.config import config_to_dict, make_config_facts, make_resume_rules
from trainkit.run.directory import make_run_dir
from trainkit.run.errors import EXIT_SAVED, report_errors
from trainkit.run.garbage import Collect, collect_manually
from trainkit.run.limits import Timeouts
from trainkit.run.lock import lock_run
from trainkit.run.plots.load import plot_expert_load
from trainkit.run.plots.loss import plot_loss
from trainkit.run.reproducible import set_numerics
from trainkit.run.signals import Asked, open_stop_vote, trap_signals
from trainkit.run.sinks.jsonl import compare_evaluations, fsync_jsonl, read_jsonl
from trainkit.run.sinks.named import named_sinks
from trainkit.run.sinks.open_run_sinks import open_run_sinks, printer, summarize_run
from trainkit.run.startup import check_ranks_agree, make_code_facts
from trainkit.run.watchdog import Announce, is_echo, watch_ranks
from trainkit.schedules import is_due
from trainkit.text.chat import template_hash
from trainkit.text.tokenizers import tokenizer_hash
from trainkit.types import (
    Axis,
    Bins,
    ForwardBackward,
    Layout,
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
from trainkit.weights.checkpoint.guard import Guard
from trainkit.weights.checkpoint.manifest import step_of
from trainkit.weights.checkpoint.save import Save
from trainkit.weights.hub.folder import is_hf_folder, open_folder

if TYPE_CHECKING:
    import torch
    from torch import nn

    from trainkit.data.packed import PackedCorpus

_SOFTWARE = "software"  # a fact that may change, as people mend their recipes: it is told
_MOVABLE = ("files", "context", "base_from")  # facts that only name what hashes stand for
_STEPS_AT_ONCE = 10  # that are looked at together, where the host would wait for a device

Evaluate = Callable[[], Mapping[str, float]]
"""Evaluates; what it finds has a `loss` and its number of `tokens`, or of the `pairs` it is of.

If it has a `score`, the lower the better, that says which checkpoints are best, and else the loss.
"""


@attrs.frozen(eq=False)
class Loop:
    """What stands around the steps of a run, from `run.loop`."""

    after: Callable[[TrainState, Mapping[str, Tensor | float], StepBatch], TrainState]
    """`state = after(state, metrics, batch)`: waits for the step's numbers (`make_step_record`),
    writes
    them as a line (`open_run_sinks`), with the first rank's memory (`read_memory_stats`), and
    skips, goes back or ends as the policy has it (`make_guard`): the state that it returns may be
        an earlier
    one. With `Keeping.log_every` above 1 it does so for so many steps at once, after the first step
    and before all that is done between steps, and nothing else waits for the device. After the
    first step an event "memory" has the peak of every rank."""

    evaluated: Callable[[TrainState, Evaluate], TrainState]
    """`state = evaluated(state, evaluate)`: announces an evaluation to the watch, takes it (of what
    `optim.use_averaged_parameters` puts in place), tells what it found to every sink as eval/NAME,
    and ends a run that has diverged (`stop_if_diverged`). Its `score`, or else its loss, is that of
    the checkpoint of this step."""

    keep: Callable[[TrainState], str | None]
    """`stop = keep(state)`: lets the ranks vote on whether to stop (`open_stop_vote`), saves when a
    save is due, the run stops, or the step's evaluation is among the `Keeping.keep_best` best
    (`saves`), collects garbage (`collect_manually`), and returns why it stops, or None."""

    is_due: Callable[..., bool]
    """`is_due(state, every, since=0)`: whether to do now what is done every so many steps, counted
    from step `since` on (never, if `every` is 0), and after the last one."""

    event: Callable[..., None]
    """`event(name, step=..., facts={...})` adds a line with these facts to events.jsonl."""

    result: Callable[[str], None]
    """`result("eval/loss")` adds a line with the first and the last value of an evaluation
    (`sinks.compare_evaluations`)."""


@attrs.frozen(eq=False)
class Run:
    """What stands around a training process, from `open_run`."""

    dir: Path
    """The run directory."""

    ps: ParallelState
    """The layout, as this rank sees it."""

    say: Callable[[str], None]
    """Prints a text on the first rank (`sinks.make_printer`)."""

    describe: Callable[..., None]
    """`describe(stages, rows.bins, rows_per_step=..., precision=...)` logs what is trained, where,
    and on how much (`parallel.describe_run`)."""

    phase: Announce
    """`phase(name, allow=seconds)`: what comes, and how long it may take (`runtime.watch`)."""

    stopping: Asked
    """Why the run shall stop, or None; all ranks are told after the same step (`open_stop_vote`)."""

    resume: Callable[..., TrainState]
    """`state = resume(stages, optimizer, request="auto", config=..., model=..., tokenizer=...,
    rows=..., corpora=..., first=..., context=..., template=..., facts={...})`: checks that there is
    room for two checkpoints (`checkpoint.check_disk_space`), continues from the last one or starts
    at step 0 (`checkpoint.resume`), logs which, and writes config.toml. A run can only be continued
    with the facts that it began with: all that is given here, see `gather_facts`. Checkpoints also
    hold the versions of the code (`make_code_facts`); a change of these is logged, and allowed."""

    loop: Callable[..., AbstractContextManager[Loop]]
    """`with loop(state, stages, optimizer, steps=..., replay=forward_backward, keeping=..., policy=
    ...) as loop:` opens where lines go (`open_run_sinks`) and what saves and guards the
    numbers (`open_guarded_saver`), and keeps Python from collecting garbage inside of steps
    (`collect_manually`). Leaving it waits for the last save."""

    finish: Callable[..., int]
    """`return finish(state, stages, optimizer, stop=stop)`: writes final.json
    (`checkpoint.write_final`), draws the loss, and the load of experts if there are any, logs how
    the time was spent, and returns the exit code 0; or does none of it and returns `EXIT_SAVED`, if
    there was a reason to stop: then the same command continues the run."""


@contextlib.contextmanager
def open_run(
    run_dir: str | Path,
    *,
    layout: Layout | None = None,
    limits: Timeouts | None = None,
    numerics: Numerics | None = None,
    config: Any = None,
) -> Iterator[Run]:
    """Open the process groups, with signals trapped, the directory locked and a watch over all.

    From the outside in, and why there: `report_errors` tells of every error and gives it its exit
    code; `trap_signals` hears a signal while ranks still look for each other; `parallel_session`
    brings them together; `make_run_dir` tries the directory on all ranks, and if one of them cannot
    write there, all end (on its own it would leave the others waiting for it); `lock_run` refuses a
    directory that another job trains in, or that not all ranks share; `report_errors` again, since
    from here on a traceback has a directory to lie in; `watch_ranks` ends all ranks when one is
    lost or stuck; `open_stop_vote` lets all stop after the same step; `check_ranks_agree` compares
    what the ranks were started with. A script that wants fewer of them opens those itself, down to
    `parallel_session` alone.

    Args:
        run_dir: The run directory; it is made.
        layout: The degrees and how work is done; by default what there are of processes shard.
        limits: How long ranks may wait. Collectives may wait longer: it is the watch that ends a
            step in time, and knows who is stuck.
        numerics: How exact its arithmetic is, which is set (`set_numerics`) and said; by default
            torch is left as it is.
        config: The resolved configuration: a record of flags, or plain values by name. All ranks
            must have the same, but for `out`; `resume` writes it, checkpoints hold it, and sinks
            show it.

    Yields:
        A `Run`.

    Raises:
        SystemExit: In place of any exception, with the exit code of `get_exit_code`.

    Effects:
        Opens process groups, starts threads, sets signal handlers and writes the lock and the beats
        of this rank under `run_dir`; closes, ends and puts back what it can at the end.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder, open_run(folder) as run:
        ...     run.ps.world.count, run.stopping()
        (1, None)
    """
    layout, limits = layout or Layout(), limits or Timeouts()
    config = config_to_dict(config) if attrs.has(type(config)) else config
    start = timedelta(seconds=limits.start_timeout)
    progress = checkpoint.SaveProgress()
    longest = max(start, timedelta(seconds=10 * limits.step_timeout))
    if numerics is not None:
        set_numerics(numerics)
    with (
        report_errors(),
        trap_signals() as asked,
        parallel_session(layout, timeout=longest, start_timeout=start, asked=asked) as ps,
        _made_on_all(run_dir, ps.world) as folder,
        lock_run(folder, ps.world) as hold,
        report_errors(folder),
        watch_ranks(
            folder,
            ps.world,
            asked=asked,
            allow=limits.start_timeout,
            grace=limits.grace,
            hold=hold,
            written=lambda: progress.parts,
        ) as phase,
        open_stop_vote(asked, ps.world) as stopping,
    ):
        same = {f"config.{name}": x for name, x in (config or {}).items() if name != "out"}
        software = make_code_facts()  # once: a recipe may be edited while it runs
        check_ranks_agree(ps.world, same | software)
        say = printer(ps.world.share)
        for note in describe_launch(os.environ):
            say(note)
        if numerics is not None:
            say(str(numerics))
        frame = _Frame(folder, ps, say, phase, stopping, limits, software, config, progress)
        yield Run(
            folder,
            ps,
            say,
            frame.describe,
            phase,
            stopping,
            frame.resume,
            frame.loop,
            frame.finish,
        )


@contextlib.contextmanager
def _made_on_all(run_dir: str | Path, axis: Axis) -> Iterator[Path]:
    run_on_all_ranks(lambda: str(make_run_dir(run_dir)), axis)
    yield Path(run_dir)


def gather_facts(
    *,
    config: Any = None,
    model: Any = None,
    tokenizer: Any = None,
    rows: PackedCorpus | None = None,
    corpora: Mapping[str, Any] | None = None,
    first: checkpoint.InitialWeights | None = None,
    context: int | None = None,
    template: str | None = None,
    facts: checkpoint.Facts | None = None,
) -> checkpoint.Facts:
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


def _add_facts(facts: checkpoint.Facts, more: Mapping[str, Any]) -> checkpoint.Facts:
    """Return the facts of a run with some more that hold for all of it."""

    def facts_at(batches: int) -> Mapping[str, Any]:
        known = facts(batches) if callable(facts) else facts
        return {**known, **more}

    return facts_at


@attrs.define(eq=False)
class _Frame:
    """What the functions of a `Run` share."""

    dir: Path
    ps: ParallelState
    say: Callable[[str], None]
    phase: Announce
    stopping: Asked
    limits: Timeouts
    software: Mapping[str, str]
    config: Mapping[str, Any] | None
    progress: checkpoint.SaveProgress
    facts: checkpoint.Facts | None = None
    told: list[str] = attrs.field(factory=list)  # how the run began

    def describe(
        self,
        stages: Stages | nn.Module,
        rows: Bins,
        *,
        rows_per_step: int,
        precision: Precision,
    ) -> None:
        self.say(describe_run(stages, rows, rows_per_step=rows_per_step, precision=precision))

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
        first: checkpoint.InitialWeights | None = None,
        context: int | None = None,
        template: str | None = None,
        facts: checkpoint.Facts | None = None,
        changes: checkpoint.ResumeRules | None = None,
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
        own: dict[str, Any] = {_SOFTWARE: self.software}
        if first is not None:
            own |= checkpoint.hash_initial_weights(first, stages, self.ps)
        self.facts = _add_facts(gathered, own)
        if changes is None:
            changes = (
                checkpoint.ResumeRules()
                if config is None
                else make_resume_rules(config, free=_MOVABLE)
            )
        checkpoint.check_disk_space(self.dir, stages, axis=self.ps.world, tell=self.say)
        state = checkpoint.resume(
            self.dir,
            TrainState(),
            stages,
            optimizer,
            self.ps,
            request=request,
            facts=self.facts,
            changes=attrs.evolve(changes, free=(*changes.free, _SOFTWARE)),
            tell=self.told.append,
        )
        self.say("\n".join(self.told) or "beginning afresh")
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
        keeping: checkpoint.Keeping | None = None,
        policy: health.Policy | None = None,
    ) -> Iterator[Loop]:
        keeping = keeping or checkpoint.Keeping()
        if state.step >= steps:
            self.say(
                f"the run in {self.dir} is complete at step {state.step}; --steps takes it further"
            )
        policy, stages = policy or health.Policy(), modules_of(stages)
        others = named_sinks(keeping.sinks, self.dir, config=self.config)
        opened = list[_Around]()

        def unsaved(error: BaseException) -> checkpoint.UnsavedState | None:
            return opened[0].unsaved(error) if opened else None

        with (
            open_run_sinks(
                self.dir, self.ps.world.share, step=state.step, last=steps, extra=others
            ) as (
                log,
                event,
            ),
            checkpoint.open_guarded_saver(
                self.dir,
                stages,
                optimizer,
                self.ps,
                policy=policy,
                replay=replay,
                event=event,
                facts=self.facts,
                config=self.config,
                retention=keeping.retention,
                background=keeping.background_saves,
                grace=self.limits.grace or 25.0,
                before_commit=partial(fsync_jsonl, self.dir),
                tell=self.say,
                unsaved=unsaved,
                progress=self.progress,
            ) as (save, guard),
            collect_manually() as collect,
        ):
            event("resume", step=state.step, told=self.told, software=self.software)
            around = _Around(
                self, stages, optimizer, steps, keeping, log, event, save, guard, collect, policy
            )
            around.first = around.hold(state).step
            opened.append(around)
            with around.optimizer_steps_counted():
                yield Loop(
                    around.after,
                    around.evaluated,
                    around.keep,
                    around.is_due,
                    around.write_event,
                    around.write_result,
                )
                around.end()
        if around.stop:
            why, again = f"({around.stop})", "the same command goes on from there"
            self.say(f"stopped after step {around.step} {why}; {again}")
            self.say(summarize_run(self.dir))

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
        self.phase("the end", allow=self.limits.start_timeout)
        checkpoint.write_final(self.dir, state, modules_of(stages), optimizer, self.ps)
        if self.ps.world.index == 0:
            metrics = self.dir / "metrics.jsonl"
            plot_loss(metrics, self.dir / "loss.png")
            if any("load" in line for line in read_jsonl(metrics)):
                plot_expert_load(metrics, self.dir / "load.png")
            self.say(f"the run is in {self.dir}; its loss is drawn in {self.dir / 'loss.png'}")
            self.say(summarize_run(self.dir))
        return 0


@attrs.define(eq=False)
class _Around:
    """What the functions of a `Loop` share: steps not looked at yet, the last score, the vote.

    `held` is the state that the stages and the optimizer hold, as far as the loop knows it. It is
    whole until the next optimizer step begins, which writes parameters and moments one by one and
    is followed by the counters: see `unsaved`.
    """

    frame: _Frame
    stages: Sequence[nn.Module]
    optimizer: torch.optim.Optimizer
    steps: int
    keeping: checkpoint.Keeping
    log: Sink
    event: Callable[..., None]
    save: Save
    guard: Guard
    collect: Collect
    policy: health.Policy
    begin: float = attrs.field(factory=time.perf_counter)
    score: tuple[int, float] | None = None
    best: int | None = None  # the step of the last evaluation, if that was one of the best so far
    stop: str | None = None
    step: int = 0
    pending: list[tuple[TrainState, Mapping[str, Tensor | float]]] = attrs.field(factory=list)
    batch: StepBatch | None = None  # of the last of them
    begun: bool = False
    held: TrainState | None = None
    optimizer_steps: int = 0
    steps_of_held: int = 0  # optimizer steps that `held` is the outcome of
    first: int = 0  # the step that the loop began with
    last_saved: int | None = None  # the step of which a save was begun last
    memory: dict[str, int] = attrs.field(factory=dict)  # of this rank, when last looked at

    @contextlib.contextmanager
    def optimizer_steps_counted(self) -> Iterator[None]:
        def count(*_: Any) -> None:
            self.optimizer_steps += 1

        handle = self.optimizer.register_step_pre_hook(count)
        try:
            yield
        finally:
            handle.remove()

    def hold(self, state: TrainState) -> TrainState:
        """Return a state, and know that it is what the stages and the optimizer hold."""
        self.held, self.steps_of_held = state, self.optimizer_steps
        return state

    def unsaved(self, error: BaseException) -> checkpoint.UnsavedState | None:
        """Return the state that is whole when an error ends the run, if it is not saved already.

        Nothing here communicates. After a `NumericsError` it is an earlier state that is wanted.
        """
        state, follows = self.held, is_echo(error) or isinstance(error, PeerError)
        if state is None or isinstance(error, NumericsError) or self._is_saved(state.step):
            return None
        if self.optimizer_steps != self.steps_of_held:
            if not follows:
                say_on_stderr(
                    f"warning: step {state.step} cannot be saved: the error came within step "
                    f"{state.step + 1}, after its optimizer step had begun"
                )
            return None
        try:
            state = self.look(state, self._judge_alone)
        except NumericsError:  # what follows from it, all ranks decide together
            return None
        scored, score = self.score or (None, None)
        return checkpoint.UnsavedState(
            state, say_on_stderr, score if scored == state.step else None, follows
        )

    def _is_saved(self, step: int) -> bool:
        newest = checkpoint.list_checkpoints(self.frame.dir / "checkpoints")[:1]
        was_begun = step == self.last_saved and [step_of(path) for path in newest] == [step]
        return step == self.first or was_begun

    def _judge_alone(
        self,
        state: TrainState,
        record: Mapping[str, Any],
        batch: StepBatch | None,
        *,
        seen: health.HealthState | None = None,
    ) -> TrainState:
        """Judge a step as `make_guard` does, without asking other ranks."""
        del batch
        action, state = health.judge_step(state, record, self.policy, seen=seen)
        if action.reason:
            raise NumericsError(action.reason)
        return state

    def after(
        self, state: TrainState, metrics: Mapping[str, Tensor | float], batch: StepBatch
    ) -> TrainState:
        self.batch, every = batch, self.keeping.log_every
        every = every or (1 if self.frame.ps.device.type == "cpu" else _STEPS_AT_ONCE)
        if self.begun and not (is_due(state.step, every) or self._saves(state)):
            # Copied, since who gave a tensor may write into it before anybody reads it.
            kept = {
                k: x.detach().clone() if isinstance(x, Tensor) else x for k, x in metrics.items()
            }
            self.pending.append((state, kept))
            return self.hold(state)
        if not self.begun:  # a save that cannot succeed is refused here, not many steps later
            checkpoint.check_savable(state, self.stages, self.optimizer, self.frame.ps)
        self.pending.append((state, metrics))
        # The next steps may take their time from here on: these have been handed to the device.
        self.frame.phase(f"step {state.step + 1}", allow=every * self.frame.limits.step_timeout)
        is_first, self.begun = not self.begun, True
        state = self.look(state)
        if is_first:
            self.report_memory(state.step)
        return state

    def report_memory(self, step: int) -> None:
        """Write the peak of every rank: the lines of the steps have the first rank's alone."""
        peaks = all_gather_objects(self.memory["memory_peak"], self.frame.ps.world)
        self.event("memory", step=step, memory_peak=peaks)
        if len(peaks) > 1:
            most = max(peaks)
            self.frame.say(
                f"memory: at most {most / 2**30:.2f} GiB on a rank so far, on rank "
                f"{peaks.index(most)}; metrics.jsonl has that of rank 0"
            )

    def look(self, state: TrainState, guard: Guard | None = None) -> TrainState:
        """Write the lines of the steps that nobody has looked at and judge them, one by one.

        A roll-back from one of them gives up those after it, as if they had not been taken.
        """
        guard, steps = guard or self.guard, self.pending
        self.held = None  # a roll-back writes parameters
        self.pending = []
        known = steps[0][0].health if steps else state.health
        records = make_step_records([metrics for _, metrics in steps], begin=self.begin)
        if steps:
            self.memory = self._memory()
        for (at, _), record in zip(steps, records, strict=True):
            record.update(self.memory)
            self.log(at.step, record)
            batch = self.batch if at is steps[-1][0] else None
            judged = attrs.evolve(at, health=health.copy_loss_scale(at.health, known))
            after = guard(judged, record, batch, seen=at.health)
            self.begin = time.perf_counter()
            if after.step < at.step:
                self.last_saved = after.step
                return self.hold(after)
            known = after.health
        scaled = health.copy_loss_scale(state.health, known)
        return self.hold(attrs.evolve(state, health=scaled))

    def _memory(self) -> dict[str, int]:
        device, before = self.frame.ps.device, self.memory.get("memory_peak", 0)
        found = read_memory_stats(device)
        if device.type == "cpu":  # whose peak is that of the whole process
            found["memory_peak"] = max(before, found["memory_peak"])
        return found

    def is_due(self, state: TrainState, every: int, *, since: int = 0) -> bool:
        return is_due(state.step - since, every, last=self.steps - since)

    def write_result(self, metric: str) -> None:
        self.event("result", **compare_evaluations(self.frame.dir, metric))

    def write_event(
        self, name: str, *, facts: Mapping[str, Any] | None = None, **more: Any
    ) -> None:
        self.event(name, **more, **(facts or {}))

    def end(self) -> None:
        if self.pending:
            self.look(self.pending[-1][0])
        if self.stop:
            self.event("stop", step=self.step, why=self.stop)

    def _saves(self, state: TrainState) -> bool:
        return is_due(state.step, self.keeping.save_every, last=self.steps)

    def evaluated(self, state: TrainState, evaluate: Evaluate) -> TrainState:
        if (looked := self.look(state)).step < state.step:
            return looked  # what was to be evaluated is gone
        state = looked
        self.frame.phase("evaluation", allow=self.frame.limits.start_timeout)
        with use_averaged_parameters(self.optimizer):
            found = evaluate()
        state = health.stop_if_diverged(state, found["loss"])
        score = found.get("score", found["loss"])
        if state.step > 0:  # the weights that a run begins with are no checkpoint of it
            is_best, memory = health.is_among_best(score, state.health, most=self.keeping.keep_best)
            state = attrs.evolve(state, health=memory)
            self.best = state.step if is_best else None
        self.hold(state)
        self.event("evaluation", step=state.step, **found)
        unit = next((x for x in ("pair", "answer") if f"{x}s" in found), "token")
        nats = "nats " if unit == "token" else ""
        told = f"{found['loss']:.4f} {nats}per {unit}, {found[f'{unit}s']} {unit}s"
        self.frame.say(f"held out: {told}")
        self.score = state.step, score
        self.begin = time.perf_counter()
        return state

    def keep(self, state: TrainState) -> str | None:
        self.stop = self.frame.stopping()
        saves = self.stop or self._saves(state) or self.best == state.step
        if saves:
            state = self.look(state)
            scored, score = self.score or (None, None)
            self.last_saved = state.step
            self.save(state, score if scored == state.step else None)
        self.collect(idle=bool(saves))
        self.step = state.step
        if not self.pending:
            self.begin = time.perf_counter()
        return self.stop
