"""Registration of ranks in a store: missing and duplicate ranks, and rank 0's decision for all."""

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

_READ_GRACE = 3.0  # seconds that rank 0 waits until the others have read an error
_REMINDER = 10.0  # seconds between two messages about missing ranks
SLACK = 2.0
"""Seconds that the other ranks wait longer than rank 0, for its decision."""


@attrs.frozen
class Seat:
    """The registration of a rank."""

    rank: int
    world: int
    host: str
    pid: int


def find_trouble(seats: Sequence[Seat], world: int) -> str | None:
    """Return why these ranks cannot form a run, or None; missing ranks are not a reason.

    Args:
        seats: The registrations so far, in order.
        world: The world size of rank 0.

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
    """Return the ranks that have not registered.

    Examples:
        >>> missing_ranks([Seat(1, 3, "a", 11)], 3)
        [0, 2]
    """
    return sorted(set(range(world)) - {seat.rank for seat in seats})


def waiting_lines(launch: Launch) -> Callable[[str], None]:
    """Return waits_for(ranks), which reports every ten seconds what this rank is waiting for.

    Effects:
        From what is returned: writes to stderr.

    Examples:
        >>> waiting_lines(Launch(0, 2, 0))("rank 1 of 2")  # silent in the first seconds
    """
    start = last = time.monotonic()

    def waits_for(ranks: str) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= _REMINDER:
            last = now
            say_on_stderr(
                f"parallel_session: rank {launch.rank} has been waiting for {ranks} for "
                f"{now - start:.0f} s, at {launch.address}:{launch.port}"
            )

    return waits_for


def _format_ranks(missing: Sequence[int], world: int) -> str:
    shown = ", ".join(map(str, missing[:16])) + ", ..." * (len(missing) > 16)
    return f"rank{'s' if len(missing) > 1 else ''} {shown} of {world}"


def _open_table(store: dist.Store) -> dist.Store:
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"trainkit/meeting/{attempt}", store)


def session_name(launch: Launch, store: dist.Store, deadline: float) -> str:
    """Register this rank, and return the name that rank 0 gives the session.

    Raises:
        ConfigError: Two processes have the same rank, or ranks disagree on the world size.
        PeerError: Ranks are missing after the timeout.

    Effects:
        Writes to the store, and waits for all ranks.
    """
    table = _open_table(store)
    seat = Seat(launch.rank, launch.world, socket.gethostname(), os.getpid())
    number = table.add("seats", 1)
    table.set(f"seat/{number}", orjson.dumps(attrs.asdict(seat)).decode())
    if launch.rank == 0:
        verdict = _wait_for_ranks(table, launch, deadline)
        table.set("verdict", orjson.dumps(verdict).decode())
    else:
        verdict = _wait_for_verdict(table, launch, deadline + SLACK)
        table.add("read", 1)
    if "name" not in verdict:
        if launch.rank == 0:
            _wait_for_readers(table, verdict["seats"] - 1)
        raise _make_error(verdict, launch)
    return verdict["name"]


def _wait_for_ranks(table: dist.Store, launch: Launch, deadline: float) -> Mapping[str, Any]:
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
        waits_for(_format_ranks(missing, launch.world))
        time.sleep(0.005)


def _read_seats(table: dist.Store, seats: list[Seat]) -> None:
    """Append new registrations to `seats`."""
    count = table.add("seats", 0)
    while len(seats) < count and table.check([f"seat/{len(seats) + 1}"]):
        seats.append(Seat(**orjson.loads(table.get(f"seat/{len(seats) + 1}"))))


def _wait_for_verdict(table: dist.Store, launch: Launch, deadline: float) -> Mapping[str, Any]:
    pause = 0.002
    waits_for = waiting_lines(launch)
    seats: list[Seat] = []
    while not table.check(["verdict"]):
        _read_seats(table, seats)
        missing = missing_ranks(seats, launch.world)
        if time.monotonic() > deadline:
            return {"missing": missing, "seats": len(seats)}
        if 0 in missing:  # with an agent's store; otherwise rank 0 reports missing ranks
            waits_for(_format_ranks(missing, launch.world))
        time.sleep(pause)
        pause = min(1.5 * pause, 0.1)
    return orjson.loads(table.get("verdict"))


def _wait_for_readers(table: dist.Store, readers: int) -> None:
    """Keep the store open until the others have read the error."""
    deadline = time.monotonic() + _READ_GRACE
    while table.add("read", 0) < readers and time.monotonic() < deadline:
        time.sleep(0.02)


def _make_error(verdict: Mapping[str, Any], launch: Launch) -> ConfigError | PeerError:
    place = f"{launch.address}:{launch.port}"
    if "trouble" in verdict:
        return ConfigError(
            f"parallel_session: {verdict['trouble']}",
            where="RANK" if "twice" in verdict["trouble"] else "WORLD_SIZE",
            want="ranks 0 to WORLD_SIZE - 1, each once, at one MASTER_ADDR:MASTER_PORT",
            hint=f"check how each process was started; all of them joined at {place}",
        )
    return PeerError(
        "parallel_session: still waiting for "
        f"{_format_ranks(verdict['missing'], launch.world)}, who did not come to {place} in time",
        where=place,
        got=f"{launch.world - len(verdict['missing'])} ranks",
        want=f"{launch.world} ranks",
        hint="check that they were started, with the same MASTER_ADDR and MASTER_PORT",
    )


def clear_table(store: dist.Store) -> None:
    """Remove all registrations, for a later session at the same store.

    Effects:
        Deletes keys of the store.
    """
    table = _open_table(store)
    for number in range(1, table.add("seats", 0) + 1):
        table.delete_key(f"seat/{number}")
    for key in ("seats", "verdict", "read"):
        table.delete_key(key)
