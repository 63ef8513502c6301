"""The table at which ranks sit down: who has come, who is missing, and rank 0's verdict for all."""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import orjson
import torch.distributed as dist

from trainkit.files import say_on_stderr
from trainkit.mesh.launch import Launch
from trainkit.types import ConfigError, PeerError

_READ_GRACE = 3.0  # seconds for which rank 0 waits until the others have read a bad verdict
_REMINDER = 10.0  # seconds between two lines that say who is missing
SLACK = 2.0
"""Seconds between rank 0's patience and that of the others, who wait for its verdict."""


@attrs.frozen
class Seat:
    """What a rank says of itself when the ranks meet."""

    rank: int
    world: int
    host: str
    pid: int


def find_trouble(seats: Sequence[Seat], world: int) -> str | None:
    """Return why these ranks cannot be one run, or None; that some are missing is no reason.

    Args:
        seats: Those who have come so far, in the order of their coming.
        world: How many ranks there are according to rank 0.

    Examples:
        >>> find_trouble([Seat(0, 2, "a", 10), Seat(1, 2, "a", 11)], 2)
        >>> find_trouble([Seat(0, 3, "a", 10), Seat(1, 3, "a", 11), Seat(1, 3, "b", 12)], 3)
        'rank 1 has come twice: process 11 on a and process 12 on b'
        >>> find_trouble([Seat(0, 2, "a", 10), Seat(1, 3, "a", 11)], 2)
        'rank 1 says that there are 3 processes, rank 0 says 2'
    """
    first: dict[int, Seat] = {}
    for seat in seats:
        if seat.world != world:
            return (
                f"rank {seat.rank} says that there are {seat.world} processes, rank 0 says {world}"
            )
        other = first.setdefault(seat.rank, seat)
        if other != seat:
            return (
                f"rank {seat.rank} has come twice: process {other.pid} on {other.host} and process "
                f"{seat.pid} on {seat.host}"
            )
    return None


def missing_ranks(seats: Sequence[Seat], world: int) -> list[int]:
    """Return the ranks that have not come.

    Examples:
        >>> missing_ranks([Seat(1, 3, "a", 11)], 3)
        [0, 2]
    """
    return sorted(set(range(world)) - {seat.rank for seat in seats})


def waiting_lines(launch: Launch) -> Callable[[str], None]:
    """Return `waits_for(whom)`, which says every ten seconds for whom this rank has been waiting.

    Effects:
        From what is returned: writes to stderr.

    Examples:
        >>> waiting_lines(Launch(0, 2, 0))("rank 1 of 2")  # nothing is said in the first seconds
    """
    begin = last = time.monotonic()

    def waits_for(whom: str) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= _REMINDER:
            last = now
            say_on_stderr(
                f"parallel_session: rank {launch.rank} has been waiting for {whom} for "
                f"{now - begin:.0f} s, at {launch.address}:{launch.port}"
            )

    return waits_for


def _named(missing: Sequence[int], world: int) -> str:
    shown = ", ".join(map(str, missing[:16])) + ", ..." * (len(missing) > 16)
    return f"rank{'s' if len(missing) > 1 else ''} {shown} of {world}"


def _table(store: dist.Store) -> dist.Store:
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"trainkit/meeting/{attempt}", store)


def session_name(launch: Launch, store: dist.Store, deadline: float) -> str:
    """Sit down, and return the name that rank 0 gives the session; raise what is wrong with it.

    Raises:
        ConfigError: Two processes have one rank, or ranks disagree on how many there are.
        PeerError: Ranks are missing when the time is over.

    Effects:
        Writes to the store, and waits for all ranks.
    """
    table = _table(store)
    seat = Seat(launch.rank, launch.world, socket.gethostname(), os.getpid())
    number = table.add("seats", 1)
    table.set(f"seat/{number}", orjson.dumps(attrs.asdict(seat)).decode())
    if launch.rank == 0:
        verdict = _judge(table, launch, deadline)
        table.set("verdict", orjson.dumps(verdict).decode())
    else:
        verdict = _verdict_of_rank_0(table, launch, deadline + SLACK)
        table.add("read", 1)
    if "name" not in verdict:
        if launch.rank == 0:
            _wait_for_readers(table, verdict["seats"] - 1)
        raise _as_error(verdict, launch)
    return verdict["name"]


def _judge(table: dist.Store, launch: Launch, deadline: float) -> Mapping[str, Any]:
    seats: list[Seat] = []
    waits_for = waiting_lines(launch)
    while True:
        _read_seats(table, seats)
        trouble = find_trouble(seats, launch.world)
        if trouble is not None:
            return {"trouble": trouble, "seats": len(seats)}
        missing = missing_ranks(seats, launch.world)
        if not missing:
            return {"name": secrets.token_hex(8)}
        if time.monotonic() > deadline:
            return {"missing": missing, "seats": len(seats)}
        waits_for(_named(missing, launch.world))
        time.sleep(0.005)


def _read_seats(table: dist.Store, seats: list[Seat]) -> None:
    """Add those who have sat down since, to `seats`."""
    count = table.add("seats", 0)
    while len(seats) < count and table.check([f"seat/{len(seats) + 1}"]):
        seats.append(Seat(**orjson.loads(table.get(f"seat/{len(seats) + 1}"))))


def _verdict_of_rank_0(table: dist.Store, launch: Launch, deadline: float) -> Mapping[str, Any]:
    pause, waits_for, seats = 0.002, waiting_lines(launch), list[Seat]()
    while not table.check(["verdict"]):
        _read_seats(table, seats)
        missing = missing_ranks(seats, launch.world)
        if time.monotonic() > deadline:
            return {"missing": missing, "seats": len(seats)}
        if 0 in missing:  # under an agent's store; else rank 0 says who is missing
            waits_for(_named(missing, launch.world))
        time.sleep(pause)
        pause = min(1.5 * pause, 0.1)
    return orjson.loads(table.get("verdict"))


def _wait_for_readers(table: dist.Store, readers: int) -> None:
    """Keep the store open until the others have read what is wrong."""
    deadline = time.monotonic() + _READ_GRACE
    while table.add("read", 0) < readers and time.monotonic() < deadline:
        time.sleep(0.02)


def _as_error(verdict: Mapping[str, Any], launch: Launch) -> ConfigError | PeerError:
    place = f"{launch.address}:{launch.port}"
    if "trouble" in verdict:
        return ConfigError(
            f"parallel_session: {verdict['trouble']}",
            where="RANK" if "twice" in verdict["trouble"] else "WORLD_SIZE",
            want="ranks 0 to WORLD_SIZE - 1, each once, at one MASTER_ADDR:MASTER_PORT",
            hint=f"see what each process was started with; all of them came to {place}",
        )
    return PeerError(
        f"parallel_session: still waiting for {_named(verdict['missing'], launch.world)}, who did "
        f"not come to {place} in time",
        where=place,
        got=f"{launch.world - len(verdict['missing'])} ranks",
        want=f"{launch.world} ranks",
        hint="see whether they were started, and with the same MASTER_ADDR and MASTER_PORT",
    )


def clear_table(store: dist.Store) -> None:
    """Take everything off the table, so that a later meeting at the same store finds it empty.

    Effects:
        Deletes keys of the store.
    """
    table = _table(store)
    for number in range(1, table.add("seats", 0) + 1):
        table.delete_key(f"seat/{number}")
    for key in ("seats", "verdict", "read"):
        table.delete_key(key)
