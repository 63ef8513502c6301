"""What a loop does about requests: which are under way, and what came of them.

Requests arrive on all ranks after the same step (`signals.open_step_vote`), and every rank goes
through the same states here; rank 0 alone writes answers. A save or an evaluation is requested for
the next step, whose metrics are then read before it, however many steps are read at once.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs

from trainkit.run.control import Answer, Mailbox, Request, Verdict, read_request
from trainkit.run.sinks.jsonl import WriteEvent
from trainkit.types import ConfigError, Log, TrainkitError

Handler = Callable[[int | None, int], str]
"""`Handler(argument, step) -> text`: carry out a request after a step, and say what was done.

It is called on all ranks. A ConfigError refuses the request, for the same reason on all of them.
"""

_CHECKS = ("evaluate", "sample")


@attrs.define(eq=False, kw_only=True)
class Steering:
    """The requests of a loop that are under way. Made by `open_steering`."""

    mailbox: Mailbox
    write_event: WriteEvent
    log: Log
    ranks: int
    handlers: Mapping[str, Handler]
    stop: str | None = None
    """Why a request stops the run, None if none does."""
    is_abort: bool = False
    """Whether the run stops without a save."""
    _stops: list[Request] = attrs.field(factory=list)
    _wanted: list[Request] = attrs.field(factory=list)  # saves that have not been started
    _started: list[tuple[int, Request]] = attrs.field(factory=list)  # with the step that is saved
    _checks: list[Request] = attrs.field(factory=list)
    _found: dict[str, str] = attrs.field(factory=dict)  # of those, since the last step
    _step: int = 0

    @property
    def wants_save(self) -> bool:
        """Whether a save is requested for the next step."""
        return bool(self._wanted)

    @property
    def wants_check(self) -> bool:
        """Whether an evaluation or a sample is requested for the next step."""
        return bool(self._checks)

    def carry_out(self, requests: Sequence[Mapping[str, Any]], step: int) -> None:
        """Carry out the requests that have arrived after a step, or note them for the next."""
        self._step = step
        for request in map(read_request, requests):
            if self.stop is not None:
                self._finish(request, "refused", f"the run stops already: {self.stop}")
            elif request.name in ("stop", "abort"):
                self.stop = f"{request.name} by {request.by}"
                self.is_abort = request.name == "abort"
                self._stops.append(request)
            elif request.name == "save":
                self._wanted.append(request)
            elif request.name in _CHECKS:
                self._checks.append(request)
            else:
                self._call_handler(request, step)

    def _call_handler(self, request: Request, step: int) -> None:
        if request.name not in self.handlers:
            self._finish(request, "refused", f"nothing in this run carries out {request.name}")
            return
        try:
            text = self.handlers[request.name](request.argument, step)
        except ConfigError as error:
            self._finish(request, "refused", str(error))
        else:
            self._finish(request, "done", text)

    def note_save(self, step: int) -> None:
        """Note that the save of a step was started."""
        self._started += [(step, request) for request in self._wanted]
        self._wanted.clear()

    def note_saved(self, step: int, *, path: str | None, error: str | None) -> None:
        """Answer the requests that a finished save is for."""
        answered = [request for at_step, request in self._started if at_step <= step]
        self._started = [(at_step, x) for at_step, x in self._started if at_step > step]
        for request in answered:
            text = f"saved in {path}" if error is None else error
            self._finish(request, "done" if error is None else "failed", text, step=step)

    def note_evaluation(self, loss: float) -> None:
        """Note that the run has evaluated after this step."""
        self._found["evaluate"] = f"held-out loss {loss:.4f}"

    def note_sample(self) -> None:
        """Note that the run has written a sample after this step."""
        self._found["sample"] = "the sample is in events.jsonl and in the output of the run"

    def settle_checks(self, step: int) -> None:
        """Answer the requests to evaluate or sample before this step; it could have done it."""
        self._step = step
        for request in self._checks:
            if request.name in self._found:
                self._finish(request, "done", self._found[request.name])
            else:
                what = "writes no samples" if request.name == "sample" else "evaluates nothing"
                why = "its recipe does not, or no document is held out"
                self._finish(request, "refused", f"this run {what}: {why}")
        self._checks.clear()
        self._found.clear()

    def close(self, failure: str | None) -> None:
        """Answer all that is left, after the last save was written.

        Args:
            failure: The kind of error that ended the run, if one did.
        """
        for request in self._stops:
            if failure is not None:
                self._finish(request, "failed", f"the run failed: {failure}")
            elif self.is_abort:
                text = "aborted without a save; the same command resumes from the last checkpoint"
                self._finish(request, "done", text)
            else:
                self._finish(request, "done", "saved; the same command resumes from there")
        why = "the run ended first" if failure is None else f"the run failed: {failure}"
        for request in self.mailbox.close(why):
            self._write(request, "refused", why, self._step)

    def _finish(
        self, request: Request, verdict: Verdict, text: str, *, step: int | None = None
    ) -> None:
        step = self._step if step is None else step
        self.mailbox.answer(request, Answer(verdict, text, step, time.time()))
        self._write(request, verdict, text, step)

    def _write(self, request: Request, verdict: Verdict, text: str, step: int) -> None:
        name = request.name if request.argument is None else f"{request.name} {request.argument}"
        self.log(f"control: {name} by {request.by}: {verdict}, {text}")
        self.write_event(
            "control",
            step=step,
            request=request.name,
            argument=request.argument,
            by=request.by,
            asked=request.time,
            done=time.time(),
            ranks=self.ranks,
            verdict=verdict,
            text=text,
        )


@contextlib.contextmanager
def open_steering(
    mailbox: Mailbox,
    *,
    write_event: WriteEvent,
    log: Log,
    ranks: int,
    is_first: bool,
    handlers: Mapping[str, Handler],
) -> Iterator[Steering]:
    """Let a run take requests inside the block, and answer those that are left at its end.

    Args:
        mailbox: Where requests arrive.
        write_event: Writes an event "control" for each request.
        log: Called with what came of each.
        ranks: How many ranks carry them out.
        is_first: Whether this is rank 0, which takes and answers.
        handlers: The requests that are carried out at once, by name.

    Effects:
        Reads and writes RUN/control on rank 0.

    Examples:
        >>> import tempfile
        >>> from pathlib import Path
        >>> with tempfile.TemporaryDirectory() as run:
        ...     box = Mailbox(Path(run))
        ...     with open_steering(
        ...         box, write_event=print, log=print, ranks=1, is_first=True, handlers={}
        ...     ) as steering:
        ...         steering.wants_save, steering.stop
        (False, None)
    """
    steering = Steering(
        mailbox=mailbox, write_event=write_event, log=log, ranks=ranks, handlers=handlers
    )
    if is_first:
        mailbox.open()
    try:
        yield steering
    except BaseException as error:
        steering.close(str(error) if isinstance(error, TrainkitError) else type(error).__name__)
        raise
    steering.close(None)
