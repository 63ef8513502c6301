"""A hand on the wheel: requests to a run that trains, by files in its directory.

A request is a file in RUN/control. Rank 0 looks there at most once a second and takes what it finds
by a rename, so that a request is either carried out or taken back by who made it, never both. From
there it travels with the vote of `signals.open_step_vote`: all ranks carry it out after the same
step. What came of it is written into the same folder, and into events.jsonl.

Every user who may write to the run directory may steer the run. Without torch.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import attrs
import orjson

from trainkit.files import atomic_write, read_limited
from trainkit.run.peers import describe_beat, read_beat
from trainkit.run.status import OVER, describe_status, format_age, read_run_status
from trainkit.types import ConfigError, DiskError, Log, PeerError, TrainkitError, log_warning

REQUESTS: Mapping[str, str] = {
    "save": "save after the next step",
    "stop": "save and stop, as a signal does; the same command resumes the run",
    "abort": "stop without a save; the same command resumes from the last checkpoint",
    "evaluate": "evaluate after the next step",
    "sample": "write a sample after the next step, as recipes do when they evaluate",
    "profile": "profile that many steps",
    "log-every": "read the metrics of that many steps at once from now on",
}
"""The requests by name, and what a run does about each."""

_WITH_COUNT = ("profile", "log-every")
_FOLDER = "control"
_MAX_BYTES = 1 << 14  # of a request
_MAX_COUNT = 1 << 31
_POLL = 1.0  # seconds between two looks of a run into the folder
_LOOK = 0.1  # seconds between two looks of the command

Verdict = Literal["done", "refused", "failed"]


@attrs.frozen
class Request:
    """A request to a run: its name and argument, who made it, when, and to which process.

    `run` is the token in the lock of that process, `time` in seconds since 1970.
    """

    id: str
    name: str
    argument: int | None
    by: str
    pid: int
    time: float
    run: str


@attrs.frozen
class Answer:
    """What came of a request: `text` says it, `step` is after which step, `done` when."""

    verdict: Verdict
    text: str
    step: int | None
    done: float


# ------------------------------------------------------------------------------------ a request


def check_request(name: str, argument: object) -> None:
    """Raise ConfigError unless there is such a request, and it has the argument that it needs.

    Examples:
        >>> check_request("log-every", 10)
        >>> check_request("sve", None)
        Traceback (most recent call last):
        ...
        trainkit.types.ConfigError: control: there is no request 'sve'; there are save, stop, ...
    """
    if name not in REQUESTS:
        raise ConfigError(
            f"control: there is no request {name!r}; there are {', '.join(REQUESTS)}",
            where="request",
            got=name,
            want=list(REQUESTS),
        )
    if name not in _WITH_COUNT and argument is not None:
        raise ConfigError(
            f"control: {name} takes no number, got {argument!r}; write python -m trainkit control "
            f"RUN {name}",
            where="argument",
        )
    is_count = type(argument) is int and 0 < argument < _MAX_COUNT
    if name in _WITH_COUNT and not is_count:
        raise ConfigError(
            f"control: {name} needs a whole number of steps, from 1 to {_MAX_COUNT - 1}, got "
            f"{'no number' if argument is None else repr(argument)}; write python -m trainkit "
            f"control RUN {name} 3",
            where="argument",
            got=argument,
        )


def control_run(
    run_dir: str | Path, name: str, argument: int | None = None, *, patience: float = 60.0
) -> tuple[Request, Answer]:
    """Ask a run that trains to do something, wait until all its ranks have, and return the answer.

    Args:
        run_dir: The run directory, on this host or on a shared disk.
        name: One of `REQUESTS`.
        argument: The number of steps, for those that take one.
        patience: Seconds after which a request that the run has not taken is taken back.

    Raises:
        ConfigError: There is no such request, no run trains there, or the run refuses the request.
        PeerError: No rank carried it out; the message names the rank that was seen last.
        DiskError: The request cannot be written, or what was requested could not be.

    Effects:
        Writes a file into `run_dir`/control, and removes it and the answer at the end.

    Examples:
        >>> control_run("no/such/run", "save")
        Traceback (most recent call last):
        ...
        trainkit.types.ConfigError: control: the run in no/such/run does not exist: ...
    """
    check_request(name, argument)
    run_dir = Path(run_dir)
    request = Request(
        id=f"{time.time_ns()}_{secrets.token_hex(4)}",
        name=name,
        argument=argument,
        by=f"{_get_user()}@{socket.gethostname()}",
        pid=os.getpid(),
        time=time.time(),
        run=_find_process(run_dir),
    )
    folder = run_dir / _FOLDER
    try:
        _make_folder(folder)
        with atomic_write(_path(folder, request.id, "new"), by="control") as file:
            os.fchmod(file.fileno(), 0o644)  # under another umask the run could not read it
            file.write(orjson.dumps(attrs.asdict(request)))
    except (OSError, DiskError) as error:
        raise DiskError(
            f"control: {request.by} cannot write {folder}: {getattr(error, 'strerror', error)}",
            where=str(folder),
            hint="who may write to the run directory can steer the run; a signal does not need it",
        ) from error
    try:
        answer = _wait(run_dir, request, patience)
    except KeyboardInterrupt:
        _path(folder, request.id, "new").unlink(missing_ok=True)
        raise
    if answer.verdict == "refused":
        raise ConfigError(f"control: {name} was refused: {answer.text}", where=str(run_dir))
    if answer.verdict == "failed":
        raise DiskError(f"control: {name} failed: {answer.text}", where=str(run_dir))
    return request, answer


def _make_folder(folder: Path) -> None:
    """Create the folder of requests so that who owns the run can remove files in it."""
    with contextlib.suppress(FileExistsError):
        folder.mkdir()
        info = folder.parent.stat()
        folder.chmod(info.st_mode & 0o7777)
        if info.st_uid != folder.stat().st_uid:
            with contextlib.suppress(PermissionError):  # an administrator may
                os.chown(folder, info.st_uid, info.st_gid)


def _get_user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container may have no name for the user
        return f"user {os.getuid()}"


def _find_process(run_dir: Path) -> str:
    """Return the token of the process that trains in a directory, or raise ConfigError."""
    status = read_run_status(run_dir)
    token = _read(run_dir / "lock").get("token")
    if status.state in ("running", "stale") and isinstance(token, str):
        return token
    if not run_dir.is_dir():
        end = "is no directory" if run_dir.exists() else "does not exist"
    else:
        end = (
            f"{'was' if status.state == 'refused' else 'has'} {describe_status(status)}"
            if status.state in OVER
            else f"cannot be reached: {status.why or 'its lock names no process'}"
        )
    raise ConfigError(
        f"control: the run in {run_dir} {end}",
        where=str(run_dir),
        hint="python -m trainkit runs lists those that train",
    )


def _wait(run_dir: Path, request: Request, patience: float) -> Answer:
    """Wait for the answer; take the request back if the run has not taken it in time."""
    folder = run_dir / _FOLDER
    deadline = time.monotonic() + patience
    next_check = time.monotonic() + _POLL
    while True:
        answer = _read_answer(folder, request)
        if answer is not None:
            return answer
        now = time.monotonic()
        is_over = now > next_check and _is_over(run_dir, request)
        next_check = now + _POLL if now > next_check else next_check
        if is_over or now > deadline:
            try:  # once the file is removed the run will never see it
                _path(folder, request.id, "new").unlink()
            except FileNotFoundError:
                is_taken = _path(folder, request.id, "taken").exists()
                if is_taken and not is_over:  # it waits for the end of the step, or of the save
                    deadline = now + patience
                    continue
            answer = _read_answer(folder, request)
            if answer is not None:
                return answer
            raise _make_silence_error(run_dir, request, is_over=is_over, patience=patience)
        time.sleep(_LOOK)


def _read_answer(folder: Path, request: Request) -> Answer | None:
    """Return the answer to a request, and remove its file."""
    path = _path(folder, request.id, "done")
    values = _read(path)
    with contextlib.suppress(KeyError):
        answer = Answer(*(values[field.name] for field in attrs.fields(Answer)))
        with contextlib.suppress(OSError):
            path.unlink()
        return answer
    return None


def _is_over(run_dir: Path, request: Request) -> bool:
    """Return whether the process that a request is for trains there no more."""
    token = _read(run_dir / "lock").get("token")
    return token != request.run or read_run_status(run_dir).state == "died"


def _make_silence_error(
    run_dir: Path, request: Request, *, is_over: bool, patience: float
) -> TrainkitError:
    if is_over:
        status = read_run_status(run_dir)
        return ConfigError(
            f"control: the run in {run_dir} ended before it could {request.name}"
            f"{'' if status.why is None else f' ({status.why})'}",
            where=str(run_dir),
        )
    return PeerError(
        f"control: no rank carried out {request.name} within {patience:g} s; it was taken back. "
        f"{describe_last_signs(run_dir)}",
        where=str(run_dir),
        hint='see the page "When a rank dies or hangs" of the documentation',
    )


def describe_last_signs(run_dir: str | Path) -> str:
    """Return in words which rank of a run was seen last, and what rank 0 and the silent one do.

    Examples:
        >>> describe_last_signs("no/such/run")
        'No rank has left a sign of life'
    """
    folder = Path(run_dir) / "ranks"
    ages: dict[int, float] = {}
    for path in folder.glob("rank_*.json"):
        with contextlib.suppress(OSError, ValueError):
            ages[int(path.stem.removeprefix("rank_"))] = time.time() - path.stat().st_mtime
    if not ages:
        return "No rank has left a sign of life"
    by_age = sorted(ages, key=lambda rank: ages[rank])
    texts = []
    # A rank whose process was stopped is the one that has been silent for longest.
    for rank in dict.fromkeys((by_age[0], 0, by_age[-1])):
        session = _read(folder / f"rank_{rank:05d}.json").get("session")
        what = describe_beat(read_beat(folder, rank, str(session)))
        texts.append(f"rank {rank} was seen {format_age(ages.get(rank))} ago, {what}")
    return f"Last of all {'; '.join(texts)}"


# ------------------------------------------------------------------------------------ the run


@attrs.define(eq=False)
class Mailbox:
    """The requests to this process, on rank 0; it finds none until it is opened, or elsewhere."""

    _run_dir: Path
    _log: Log = log_warning
    _token: str | None = None
    _next_look: float = 0.0
    _taken: dict[str, Request] = attrs.field(factory=dict)
    _has_warned: bool = False

    def open(self) -> None:
        """Begin to look for requests, and answer those to a process that has ended.

        Effects:
            Reads the lock of the run, which this process holds; writes answers.
        """
        self._token = str(_read(self._run_dir / "lock").get("token"))
        folder = self._run_dir / _FOLDER
        for path in sorted(folder.glob("*.done.json")):  # nobody waits for these any more
            with contextlib.suppress(OSError):
                path.unlink()
        for path in sorted(folder.glob("*.taken.json")):
            self._answer_stale(path)

    def take(self) -> list[dict[str, Any]]:
        """Return the new requests in the order in which they were made, once a second at most.

        Effects:
            Takes them, by renaming their files; answers those that cannot be carried out.
        """
        now = time.monotonic()
        if self._token is None or now < self._next_look:
            return []
        self._next_look = now + _POLL
        folder = self._run_dir / _FOLDER
        try:
            names = sorted(name for name in os.listdir(folder) if name.endswith(".new.json"))  # noqa: PTH208 -- a third of the cost
        except OSError:  # nobody has made a request
            return []
        found = []
        for name in names:
            request = self._take_one(folder / name)
            if request is not None:
                self._taken[request.id] = request
                found.append(attrs.asdict(request))
        return found

    def _take_one(self, path: Path) -> Request | None:
        taken = _path(path.parent, path.name.partition(".")[0], "taken")
        try:
            path.rename(taken)
        except FileNotFoundError:  # it was taken back
            return None
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                self._log(f"control: {path} cannot be taken, and is left: {error.strerror}")
            return None
        request = _parse_request(_read(taken))
        if request is None or request.id != taken.name.partition(".")[0]:
            self._log(f"control: {path.name} is no request, and was removed")
            with contextlib.suppress(OSError):
                taken.unlink()
            return None
        if request.run != self._token:
            self._answer_stale(taken)
            return None
        return request

    def _answer_stale(self, path: Path) -> None:
        """Answer a request that a process has left which ended before it could carry it out."""
        text = "the process that it was for has ended, and this one does not carry it out"
        answer = Answer("refused", text, None, time.time())
        with contextlib.suppress(OSError, DiskError):
            _write_answer(path.parent, path.name.partition(".")[0], answer)
            path.unlink()

    def answer(self, request: Request, answer: Answer) -> None:
        """Write down what came of a request, where it was taken; elsewhere do nothing.

        Effects:
            Replaces the request's file by that of the answer, if the disk allows it.
        """
        if self._taken.pop(request.id, None) is None:
            return
        folder = self._run_dir / _FOLDER
        try:
            _write_answer(folder, request.id, answer)
            _path(folder, request.id, "taken").unlink()
        except (OSError, DiskError) as error:
            self._log(f"control: the answer to {request.by} is lost: {error}")

    def close(self, text: str) -> Sequence[Request]:
        """Refuse the requests that are left, those not taken yet too, and look no more.

        Args:
            text: Why.

        Returns:
            Those that had been taken.
        """
        self._next_look = 0.0
        self.take()
        left = [*self._taken.values()]
        for request in left:
            self.answer(request, Answer("refused", text, None, time.time()))
        self._token = None
        return left


def read_request(values: Mapping[str, Any]) -> Request:
    """Return a request from the values that `Mailbox.take` returns.

    Examples:
        >>> request = Request("1", "save", None, "ann@a", 7, 1.5, "ff")
        >>> read_request(attrs.asdict(request)) == request
        True
    """
    return Request(*(values[field.name] for field in attrs.fields(Request)))


# ------------------------------------------------------------------------------------ files


def _path(folder: Path, id_: str, kind: Literal["new", "taken", "done"]) -> Path:
    return folder / f"{id_}.{kind}.json"


def _read(path: Path) -> dict[str, Any]:
    """Return a small file's object, empty if it cannot be read."""
    with contextlib.suppress(OSError, ValueError):
        value = orjson.loads(read_limited(path, max_bytes=_MAX_BYTES))
        if isinstance(value, dict):
            return value
    return {}


def _parse_request(values: Mapping[str, Any]) -> Request | None:
    """Return a request if values of a file are one: anybody may have written it."""
    kinds = {"id": str, "name": str, "by": str, "pid": int, "time": float, "run": str}
    if any(type(values.get(name)) is not kind for name, kind in kinds.items()):
        return None
    if not values["by"].isprintable():
        return None
    try:
        check_request(values["name"], values.get("argument"))
    except ConfigError:
        return None
    return read_request({"argument": None, **values})


def _write_answer(folder: Path, id_: str, answer: Answer) -> None:
    with atomic_write(_path(folder, id_, "done"), by="control") as file:
        file.write(orjson.dumps(attrs.asdict(answer)))
