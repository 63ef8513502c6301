"""The end of a process whose main thread is stuck: a traceback, an error line, and `os._exit`."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path
from typing import NoReturn

from trainkit.run.errors import last_words, report_errors
from trainkit.run.stacks import read_stack
from trainkit.types import TrainkitError

_WAIT = 5.0  # seconds for last words that go to a disk


def end_process(error: TrainkitError, *, run_dir: Path, rank: int) -> NoReturn:
    """End this process where it stands, after its last words (5 s at most, and 1 s without a disk).

    Effects:
        Writes the stacks of all threads to `errors` of the run directory, reports the error as
        `report_errors` does, and ends the process with the error's code.
    """
    with contextlib.suppress(Exception):  # no thread can be started any more, for instance
        words = threading.Thread(target=_report, args=(error, run_dir, rank), daemon=True)
        words.start()
        words.join(_WAIT)
        if words.is_alive():  # the disk does not take the traceback
            end_without_disk(error.code, str(error))
    os._exit(error.code)


def end_without_disk(code: int, text: str) -> NoReturn:
    """End this process after last words that touch no file (1 s at most: a pipe may be full).

    Effects:
        Writes to stderr, and ends the process.
    """
    words = last_words(code, text)
    writer = threading.Thread(target=os.write, args=(2, words), daemon=True)
    writer.start()
    writer.join(1.0)
    os._exit(code)


def _report(error: TrainkitError, run_dir: Path, rank: int) -> None:
    with contextlib.suppress(OSError):
        path = run_dir / "errors" / f"rank_{rank:05d}.txt"
        path.parent.mkdir(exist_ok=True)
        with path.open("a") as file:
            for thread in threading.enumerate():
                file.write(f"Thread {thread.name} (most recent call first):\n")
                for source, function, line in read_stack(thread.ident or 0):
                    file.write(f"  {source}:{line} in {function}\n")
    with contextlib.suppress(SystemExit), report_errors(run_dir):
        raise error
