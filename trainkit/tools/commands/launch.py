"""`python -m trainkit launch ...`: torchrun, but it ends with the exit code of its workers.

  python -m trainkit launch --nproc-per-node 8 train.py --out runs/one

It takes the arguments of torchrun, written out in full, and starts the same agent. torchrun ends
with 1 whatever the code of its workers was; this ends with theirs, so that a scheduler sees 75
(saved: start me again), 76 (the same, but not saved), 64 (refused), or 128 + the number of the
signal that killed a worker.

Where workers differ, the one that failed first counts. Among those that failed within the same
second an error counts before what it did to others: 75 and 76 (stopped), 68 (a peer was lost), and
signals, which the agent sends to workers that are left.

SIGTERM, SIGINT, SIGUSR1 and SIGUSR2 are passed on to the workers (torchrun dies of the last two),
which save and end; with --max-restarts they are not started again. 128 + the signal's number if no
worker has ended in time (--shutdown-timeout).
"""

from __future__ import annotations

import argparse
import os
import signal
import traceback
from collections.abc import Mapping
from typing import Any

from trainkit.files import print_to_stderr
from trainkit.run.errors import EXIT_SAVED
from trainkit.types import ConfigError, PeerError, PreemptedError

HELP = "torchrun, with the exit code of the workers"

_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2"


def add(launch: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser: all words that follow, for torchrun's parser."""
    launch.prefix_chars = ""  # flags are words like any other, --help too
    launch.add_argument("arguments", nargs=argparse.REMAINDER)


def run(options: argparse.Namespace) -> tuple[Any, int]:
    """Run torchrun's agent until its workers have ended; return no report, and their exit code.

    Raises:
        PeerError: The agents did not meet, or lost one another.

    Effects:
        Those of torchrun. Writes the exit codes to stderr, if one is not 0.
    """
    # Only here: torch takes a second to load.
    from torch.distributed import DistError  # noqa: PLC0415
    from torch.distributed import run as torchrun  # noqa: PLC0415
    from torch.distributed.elastic.multiprocessing.api import SignalException  # noqa: PLC0415
    from torch.distributed.elastic.multiprocessing.errors import (  # noqa: PLC0415
        ChildFailedError,
        record,
    )
    from torch.distributed.elastic.rendezvous.api import RendezvousError  # noqa: PLC0415

    parser = torchrun.get_args_parser()
    parser.prog = "python -m trainkit launch"
    # torchrun takes --run of a recipe for an abbreviation of its own --run-path.
    parser.allow_abbrev = False
    parser.description = __doc__
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.set_defaults(signals_to_handle=_SIGNALS)
    try:
        arguments = parser.parse_args(options.arguments)
    except SystemExit as end:  # it has printed its usage, and what is wrong
        return None, ConfigError.code if end.code else 0
    if (
        arguments.rdzv_backend != "static"
        and torchrun.parse_min_max_nnodes(arguments.nnodes)[1] > 1
    ):
        # An agent that joins a later round would wait in vain for the address of the store that
        # the agents share: torch 2.13 writes it in the first round only.
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    try:
        record(torchrun.run)(arguments)
    except ChildFailedError as error:
        failures = error.failures
        codes = {rank: failures[rank].exitcode for rank in sorted(failures)}
        first = min(failure.timestamp for failure in failures.values())
        code = choose_exit_code({r: codes[r] for r in codes if failures[r].timestamp == first})
    except SignalException as error:
        codes = _read_exit_codes(error)
        code = choose_exit_code(codes) if any(codes.values()) else 128 + error.sigval
    except (RendezvousError, DistError) as error:
        raise PeerError(
            "launch: the agents did not meet, or have lost one another: "
            f"{type(error).__name__}: {error}",
            hint="check --rdzv-endpoint, and that each machine runs the same command",
        ) from error
    else:
        return None, 0
    listed = ", ".join(f"{codes[rank]} on rank {rank}" for rank in codes)
    print_to_stderr(f"launch: exit code {code}; the workers of this machine: {listed or 'none'}")
    return None, code


def choose_exit_code(codes: Mapping[int, int]) -> int:
    """Return the exit code of a launcher whose workers ended, at the same time, with these.

    Args:
        codes: Of each rank, as subprocess has them: negative for a signal.

    Examples:
        >>> choose_exit_code({0: 75, 1: 75})
        75
        >>> choose_exit_code({0: 68, 1: 70}), choose_exit_code({0: -15, 1: -9})
        (70, 137)
    """
    # All others come before these: they are an error's own.
    last = [PreemptedError.code, EXIT_SAVED, -signal.SIGKILL, PeerError.code, -signal.SIGTERM, 0]
    code = min(codes.values(), key=lambda x: last.index(x) if x in last else -1)
    return code if code >= 0 else 128 - code


def _read_exit_codes(error: BaseException) -> dict[int, int]:
    """Return the exit code of each worker that has ended, by rank, after the agent got a signal.

    The agent has waited for its workers, and keeps their codes to itself.
    """
    codes: dict[int, int] = {}
    for frame, _ in traceback.walk_tb(error.__traceback__):
        agent: Any = frame.f_locals.get("agent")
        handlers = getattr(getattr(agent, "_pcontext", None), "subprocess_handlers", {})
        for local_rank, handler in handlers.items():
            code = handler.proc.poll()
            if code is not None:
                codes[agent.get_worker_group().workers[local_rank].global_rank] = code
    return codes
