"""Processes that are ranks of a run of their own, from multiprocessing's warm server."""

import multiprocessing
import os
import runpy
import socket
import sys
import time
from pathlib import Path

import attrs

from trainkit.__main__ import main

SCRIPT = Path(__file__).parent / "run" / "watched.py"


@attrs.frozen
class Ended:
    """How a rank ended: its exit code (negative: a signal), when, and what it said."""

    code: int | None
    seconds: float
    said: str

    @property
    def error(self):
        return next((x for x in self.said.splitlines() if x.startswith("error: ")), "")


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def warm_server():
    """Return what starts processes that have loaded torch already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["trainkit.tools.testing.preload", "pytest", "hypothesis"])
    return context


def start_command(words, log, environ):
    """Start `python -m trainkit WORDS`, whose output goes to a file; return the process."""
    process = warm_server().Process(target=_run_command, args=(words, log, environ))
    process.start()
    return process


def _run_command(words, log, environ):
    os.environ.clear()  # the server's is as old as its start
    os.environ.update(environ)
    with log.open("ab", buffering=0) as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    sys.exit(main([str(word) for word in words]))


def start(folder, fault, ranks, *, worlds=None, port=None, start_timeout=60):
    """Start a process for each of `ranks`, and return them."""
    context = warm_server()
    folder.mkdir(exist_ok=True)
    port = port or free_port()
    processes = []
    for rank, world in zip(ranks, worlds or [len(ranks)] * len(ranks), strict=True):
        given = {"rank": rank, "world": world, "port": port, "folder": str(folder)}
        given |= {"fault": fault, "start_timeout": start_timeout}
        call = {"init_globals": {"given": given}, "run_name": "__main__"}
        process = context.Process(target=runpy.run_path, args=(str(SCRIPT),), kwargs=call)
        process.start()
        processes.append((rank, process))
    return folder, time.monotonic(), processes


def wait(started, *, seconds=90):
    """Return how each process ended; those that are still there are killed, and have code None."""
    folder, begin, processes = started
    ended = {}
    while len(ended) < len(processes) and time.monotonic() < begin + seconds:
        for number, (_, process) in enumerate(processes):
            if number not in ended and process.exitcode is not None:
                ended[number] = time.monotonic() - begin
        time.sleep(0.05)
    found = []
    for number, (rank, process) in enumerate(processes):
        if number not in ended:
            process.kill()
        process.join()
        said = Path(f"{folder}/said_{rank}_{process.pid}")
        text = said.read_text() if said.exists() else ""
        code = process.exitcode if number in ended else None
        found.append(Ended(code, ended.get(number, seconds), text))
    return found
