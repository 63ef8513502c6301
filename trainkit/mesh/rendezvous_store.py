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

from trainkit.files import print_to_stderr
from trainkit.mesh.launch import Launch
from trainkit.types import ConfigError, PeerError

_READ_GRACE = 3.0  # seconds that rank 0 waits until the others have read an error
_REMINDER = 10.0  # seconds between two messages about missing ranks
_ATTEMPT = "trainkit/attempt"  # the key of the newest attempt's name
SLACK = 2.0
"""Seconds that the other ranks wait longer than rank 0, for its decision."""


@attrs.frozen
class Registration:
    """The entry of a rank in the store."""

    rank: int
    world: int
    host: str
    pid: int


def find_trouble(registrations: Sequence[Registration], world: int) -> str | None:
    """Return the reason that these ranks cannot form a run, or None; missing ranks are no reason.

    Args:
        registrations: The registrations so far, in order.
        world: The world size of rank 0.

    Examples:
        >>> zero = Registration(0, 2, "a", 10)
        >>> find_trouble([zero, Registration(1, 2, "a", 11)], 2)
        >>> find_trouble([zero, Registration(0, 2, "b", 12)], 2)
        'rank 0 has come twice: process 10 on a and process 12 on b'
        >>> find_trouble([zero, Registration(1, 3, "a", 11)], 2)
        'rank 1 says that there are 3 processes, rank 0 says 2'
    """
    first: dict[int, Registration] = {}
    for entry in registrations:
        if entry.world != world:
            return (
                f"rank {entry.rank} says that there are {entry.world} processes, rank 0 says "
                f"{world}"
            )
        other = first.setdefault(entry.rank, entry)
        if other != entry:
            return (
                f"rank {entry.rank} has come twice: process {other.pid} on {other.host} and "
                f"process {entry.pid} on {entry.host}"
            )
    return None


def missing_ranks(registrations: Sequence[Registration], world: int) -> list[int]:
    """Return the ranks that have not registered.

    Examples:
        >>> missing_ranks([Registration(1, 3, "a", 11)], 3)
        [0, 2]
    """
    return sorted(set(range(world)) - {entry.rank for entry in registrations})


def make_wait_reporter(launch: Launch) -> Callable[[str], None]:
    """Return waits_for(ranks), which reports every ten seconds what this rank is waiting for.

    Effects:
        From what is returned: writes to stderr.

    Examples:
        >>> make_wait_reporter(Launch(0, 2, 0))("rank 1 of 2")  # silent in the first seconds
    """
    start = last = time.monotonic()

    def waits_for(ranks: str) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= _REMINDER:
            last = now
            print_to_stderr(
                f"parallel_session: rank {launch.rank} has been waiting for {ranks} for "
                f"{now - start:.0f} s, at {launch.address}:{launch.port}"
            )

    return waits_for


def _format_ranks(missing: Sequence[int], world: int) -> str:
    shown = ", ".join(map(str, missing[:16])) + ", ..." * (len(missing) > 16)
    return f"rank{'s' if len(missing) > 1 else ''} {shown} of {world}"


def _open_entries(store: dist.Store, attempt: str) -> dist.Store:
    return dist.PrefixStore(f"trainkit/rendezvous/{attempt}", store)


def _register(entries: dist.Store, launch: Launch) -> int:
    """Write the entry of this rank, and return its number, from 1."""
    own = Registration(launch.rank, launch.world, socket.gethostname(), os.getpid())
    # An atomic counter: two processes of one rank get an entry each.
    index = entries.add("count", 1)
    entries.set(f"rank/{index}", orjson.dumps(attrs.asdict(own)).decode())
    return index


def session_name(launch: Launch, store: dist.Store, deadline: float) -> str:
    """Register this rank, and return the name that rank 0 gives the session.

    A store may have entries of earlier attempts: that of an elastic agent outlives its workers, and
    agents that joined at different times do not agree on a number of the attempt. So rank 0
    publishes a name for each attempt, and the others register under the newest.

    Raises:
        ConfigError: Two processes have the same rank, or ranks disagree on the world size.
        PeerError: Ranks are missing after the timeout.

    Effects:
        Writes to the store, and waits for all ranks.
    """
    if launch.rank == 0:
        attempt = secrets.token_hex(8)
        entries = _open_entries(store, attempt)
        _register(entries, launch)
        store.set(_ATTEMPT, attempt)
        verdict = _wait_for_ranks(entries, launch, deadline)
        entries.set("verdict", orjson.dumps(verdict).decode())
    else:
        verdict = _wait_for_verdict(store, launch, deadline + SLACK)
    if "name" in verdict:
        return verdict["name"]
    if launch.rank == 0:
        _wait_for_readers(store, verdict["registered"] - 1)
        # An agent's store does not end, and the agent may start all ranks again.
        clear_registrations(store)
    # There will be no session, and all ranks raise the same error.
    place = f"{launch.address}:{launch.port}"
    if "trouble" in verdict:
        raise ConfigError(
            f"parallel_session: {verdict['trouble']}",
            where="RANK" if "twice" in verdict["trouble"] else "WORLD_SIZE",
            want="ranks 0 to WORLD_SIZE - 1, each once, at one MASTER_ADDR:MASTER_PORT",
            hint=f"check how each process was started; all of them joined at {place}",
        )
    raise PeerError(
        "parallel_session: still waiting for "
        f"{_format_ranks(verdict['missing'], launch.world)}, who did not come to {place} in time",
        where=place,
        got=f"{launch.world - len(verdict['missing'])} ranks",
        want=f"{launch.world} ranks",
        hint="check that they were started, with the same MASTER_ADDR and MASTER_PORT",
    )


def _wait_for_ranks(entries: dist.Store, launch: Launch, deadline: float) -> Mapping[str, Any]:
    registrations: list[Registration] = []
    waits_for = make_wait_reporter(launch)
    while True:
        _read_registrations(entries, registrations)
        trouble = find_trouble(registrations, launch.world)
        if trouble is not None:
            return {"trouble": trouble, "registered": len(registrations)}
        missing = missing_ranks(registrations, launch.world)
        if not missing:
            # A prefix in the store of each session's own.
            return {"name": secrets.token_hex(8), "registered": len(registrations)}
        if time.monotonic() > deadline:
            return {"missing": missing, "registered": len(registrations)}
        waits_for(_format_ranks(missing, launch.world))
        time.sleep(0.005)


def _wait_for_readers(store: dist.Store, readers: int) -> None:
    """Wait until others have read the verdict: a store of rank 0's own ends with its process."""
    entries = _open_entries(store, _read_attempt(store))
    deadline = time.monotonic() + _READ_GRACE
    while entries.add("read", 0) < readers and time.monotonic() < deadline:
        time.sleep(0.02)


def _read_registrations(entries: dist.Store, registrations: list[Registration]) -> None:
    """Append new registrations to a list."""
    # Adding 0 reads a counter, also one that nobody has written yet, for which `get` would wait.
    count = entries.add("count", 0)
    # A rank counts itself before it writes its entry, so that the last one may not be there yet.
    while len(registrations) < count and entries.check([f"rank/{len(registrations) + 1}"]):
        text = entries.get(f"rank/{len(registrations) + 1}")
        registrations.append(Registration(**orjson.loads(text)))


def _wait_for_verdict(store: dist.Store, launch: Launch, deadline: float) -> Mapping[str, Any]:
    """Register under the newest attempt, and return what rank 0 has decided."""
    pause = 0.002
    waits_for = make_wait_reporter(launch)
    attempt = None
    entries = None
    index = 0
    while True:
        newest = _read_attempt(store)
        if newest and newest != attempt:
            attempt = newest
            entries = _open_entries(store, attempt)
            index = _register(entries, launch)
        if entries is not None and entries.check(["verdict"]):
            verdict = orjson.loads(entries.get("verdict"))
            # A session without this rank is one of an earlier attempt.
            if "name" not in verdict or index <= verdict["registered"]:
                entries.add("read", 1)
                return verdict
        # Rank 0 has not decided, so that this rank reports what it sees itself.
        if time.monotonic() > deadline:
            registrations: list[Registration] = []
            if entries is not None:
                _read_registrations(entries, registrations)
            missing = missing_ranks(registrations, launch.world) if registrations else [0]
            return {"missing": missing, "registered": len(registrations)}
        if entries is None:  # with an agent's store; otherwise rank 0 reports missing ranks
            waits_for(_format_ranks([0], launch.world))
        time.sleep(pause)
        pause = min(1.5 * pause, 0.1)


def _read_attempt(store: dist.Store) -> str:
    # Without the check, `get` would wait for a key that is not there.
    return store.get(_ATTEMPT).decode() if store.check([_ATTEMPT]) else ""


def clear_registrations(store: dist.Store) -> None:
    """Remove all registrations, for a later session at the same store.

    Effects:
        Deletes keys of the store.
    """
    attempt = _read_attempt(store)
    if not attempt:
        return
    # Emptied, not deleted, as the verdict stays: another rank may be about to read them.
    store.set(_ATTEMPT, "")
    entries = _open_entries(store, attempt)
    for index in range(1, entries.add("count", 0) + 1):
        entries.delete_key(f"rank/{index}")
    for key in ("count", "read"):
        entries.delete_key(key)
