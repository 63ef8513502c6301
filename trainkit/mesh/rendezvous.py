"""Rendezvous of the ranks of a run, with errors that name missing and duplicate ranks.

torch waits for ranks silently, and its errors name none of them (a missing rank is "1/2 clients
joined" after half an hour; two processes with one rank both wait). So ranks register first, in a
store at the launcher's address.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import partial
from typing import TypeVar

import attrs
import torch
import torch.distributed as dist

from trainkit.collectives import get_backends
from trainkit.mesh.launch import Launch
from trainkit.mesh.rendezvous_store import (
    SLACK,
    clear_registrations,
    make_wait_reporter,
    session_name,
)
from trainkit.types import ConfigError, PeerError, PreemptedError

T = TypeVar("T")

_STORE_GRACE = 3.0  # seconds in which a real store answers
_PORT_GRACE = 5.0  # seconds for which an address may still be in use by a run that is ending
_STOP_PATIENCE = 20.0  # seconds to wait for others after a stop request; launchers kill after 30
_NOTHING_LOST = 75  # the exit code of a run that was stopped and has lost nothing
_HINTS = {
    "gloo": "name the network interface with GLOO_SOCKET_IFNAME, or see whether a rank died",
    "nccl": "name the network interface with NCCL_SOCKET_IFNAME; NCCL_DEBUG=INFO shows its "
    "progress; every rank needs its own GPU",
}


def open_world(
    launch: Launch,
    backend: str,
    *,
    timeout: timedelta,
    start_timeout: timedelta,
    stop_reason: Callable[[], str | None] = lambda: None,
) -> None:
    """Open torch's default process group, after all ranks have registered.

    Args:
        launch: The rank, and the address of the rendezvous.
        backend: torch's backend name.
        timeout: The timeout of collectives.
        start_timeout: The timeout of this function.
        stop_reason: Returns the reason to stop this process, or None. After a stop request this
            waits for missing ranks for at most 20 s.

    Raises:
        PreemptedError: A stop was requested, and ranks are still missing.
        ConfigError: Two processes have the same rank, ranks disagree on the world size, or rank 0
            cannot listen at the address.
        PeerError: Ranks are missing after the timeout (they are named), or cannot be reached.

    Effects:
        Opens a store (under torchrun it uses the agent's) and the default process group; after an
        error there is no group.
    """
    deadline = time.monotonic() + start_timeout.total_seconds()
    contact = _Contact()
    # Longer than the deadline inside `_join`: it ends a wait for a store that never answers.
    patience = start_timeout.total_seconds() + SLACK + 1
    place = f"{launch.address}:{launch.port}"
    store = _run_with_timeout(
        lambda: _join(launch, deadline, contact),
        patience,
        stop_reason,
        lambda: _check_program(launch, contact),
    )
    if store is None:
        raise PeerError(
            f"parallel_session: rank {launch.rank} connected to {place}, which did not answer "
            f"for {patience:.0f} s",
            where=place,
            want="rank 0",
            hint="another program may hold the port, or rank 0 may have been stopped",
        )
    # torch has one timeout for opening the group and for its collectives: first the one, then the
    # other.
    left = timedelta(seconds=max(5.0, deadline - time.monotonic()))
    try:
        dist.init_process_group(
            backend,
            # A store may serve several sessions, whose keys must not meet.
            store=dist.PrefixStore(f"trainkit/{store[1]}", store[0]),
            rank=launch.rank,
            world_size=launch.world,
            timeout=left,
        )
        assert dist.group.WORLD is not None
        dist.group.WORLD.set_timeout(timeout)
    except RuntimeError as error:
        raise PeerError(
            f"parallel_session: rank {launch.rank}: all {launch.world} ranks have met at {place}, "
            f"but could not connect to each other: {error}",
            where=place,
            hint=_HINTS["gloo"],
        ) from error
    if launch.rank == 0:  # a later session may use the same store
        clear_registrations(store[0])


def check_groups(
    groups: Iterable[dist.ProcessGroup], device: torch.device, *, seconds: float
) -> None:
    """All-reduce once in every group and on every device, and report groups that do not work.

    NCCL connects ranks in a group's first collective. A broken set-up would hang there silently, in
    the first step.

    Args:
        groups: Groups of this rank; all their members must call this, in one order.
        device: The device of this rank; groups may communicate on the CPU too.
        seconds: The timeout of a group.

    Raises:
        PeerError: A group failed, did not answer in time, or returned a wrong sum.

    Effects:
        Communicates: one all-reduce of 4 bytes for each group and device.
    """
    devices = {device.type: device, "cpu": torch.device("cpu")}
    for group in groups:
        for kind, backend in get_backends(group).items():
            if kind not in devices:
                continue
            try:
                total = _run_with_timeout(partial(_sum_ones, group, devices[kind]), seconds)
            except RuntimeError as error:
                # torch's errors have several lines.
                raise _make_group_error(group, backend, " ".join(str(error).split())) from error
            if total is None:
                raise _make_group_error(group, backend, f"no answer for {seconds:g} s")
            if total != group.size():
                raise _make_group_error(group, backend, f"their sum of ones is {total:g}")


def _sum_ones(group: dist.ProcessGroup, device: torch.device) -> float:
    one = torch.ones(1, device=device)
    dist.all_reduce(one, group=group)
    return one.item()


def _make_group_error(group: dist.ProcessGroup, backend: str, reason: str) -> PeerError:
    return PeerError(
        f"parallel_session: ranks {dist.get_process_group_ranks(group)} cannot communicate over "
        f"{backend}: {reason}",
        where=backend,
        want="an answer from each",
        hint=_HINTS.get(backend, "see the messages of the other ranks"),
    )


# ---------------------------------------------------------------------------------------- the store


def _run_with_timeout(
    work: Callable[[], T],
    seconds: float,
    stop_reason: Callable[[], str | None] = lambda: None,
    check: Callable[[], None] = lambda: None,
) -> T | None:
    """Call `work` in a thread; return its result, or None after a timeout.

    torch's stores may wait forever, for example for a program that is not a store (torch from 2.11
    on). The thread then keeps hanging; it holds no lock that the exit of the process needs.
    """
    results: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            results.put((work(), None))
        except BaseException as error:  # noqa: BLE001 (raised in the calling thread)
            results.put((None, error))

    threading.Thread(target=run, daemon=True, name="trainkit rendezvous").start()
    deadline = time.monotonic() + seconds
    stop_deadline = None
    while True:
        now = time.monotonic()
        reason = stop_reason()
        if reason and stop_deadline is None:
            stop_deadline = now + _STOP_PATIENCE
        if reason and stop_deadline is not None and now > stop_deadline:
            stop_error = PreemptedError(
                f"parallel_session: asked to stop ({reason}), and not all ranks have joined in "
                f"{_STOP_PATIENCE:g} s since; nothing has been trained",
                hint="run the same command again",
            )
            stop_error.code = _NOTHING_LOST
            raise stop_error
        try:
            # Short waits, so that a stop request is noticed.
            result, error = results.get(timeout=min(0.2, max(0.0, deadline - now)))
        except queue.Empty:
            check()
            if now < deadline:
                continue
            return None
        if error is not None:
            raise error
        return result


@attrs.define(eq=False)
class _Contact:
    """The state of a connection to a program that has not answered as a store yet."""

    since: float | None = None  # the time of the connection
    last_check: float = 0.0  # the time of the last `_check_program`


def _join(launch: Launch, deadline: float, contact: _Contact) -> tuple[dist.Store, str]:
    """Return the store and this session's name on it."""
    while True:
        store = _open_store(launch, deadline, contact)
        try:
            return store, session_name(launch, store, deadline)
        except dist.DistNetworkError as error:  # the store of the previous session, now closed
            if time.monotonic() > deadline:
                raise PeerError(
                    f"parallel_session: rank {launch.rank} lost rank 0 at {launch.address}:"
                    f"{launch.port} before all had joined: {str(error).splitlines()[0]}",
                    where=f"{launch.address}:{launch.port}",
                    hint="rank 0's own report says why it ended",
                ) from None
            time.sleep(0.1)


def _open_store(launch: Launch, deadline: float, contact: _Contact) -> dist.Store:
    assert launch.address is not None
    assert launch.port is not None
    # torchrun's agent hosts the store itself; then even rank 0 is a client.
    hosts = launch.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    if not hosts:
        _wait_for_listener(launch, deadline)
        contact.since = time.monotonic()
    left = timedelta(seconds=max(1.0, deadline - time.monotonic()))
    until = min(deadline, time.monotonic() + _PORT_GRACE)
    while True:
        try:
            # `wait_for_workers` would wait silently; ranks register instead. With `multi_tenant`
            # a later session of this process uses the server that is there.
            store = dist.TCPStore(
                launch.address,
                launch.port,
                None,
                hosts,
                left,
                wait_for_workers=False,
                multi_tenant=True,
            )
        except dist.DistNetworkError as error:
            if not hosts:
                raise
            if "EADDRINUSE" not in str(error) or time.monotonic() > until:
                raise _make_listen_error(launch, str(error)) from None
            time.sleep(0.2)
        else:
            contact.since = None
            return store


def _check_program(launch: Launch, contact: _Contact) -> None:
    """Raise ConfigError if another program listens: it answers HTTP, which a store does not.

    The check runs when the store has not answered for some seconds, and then repeatedly.
    """
    now = time.monotonic()
    if contact.since is None or now - max(contact.since, contact.last_check) < _STORE_GRACE:
        return
    contact.last_check = now
    answer = _request_line(launch)
    if answer:
        place = f"{launch.address}:{launch.port}"
        raise ConfigError(
            f"parallel_session: rank {launch.rank} found another program at {place}, which answers "
            f"{answer!r}, and not rank 0",
            where=place,
            got=answer,
            want="rank 0, listening there",
            hint="correct MASTER_ADDR, or choose another MASTER_PORT for all ranks",
        )


def _request_line(launch: Launch) -> str:
    """Send an HTTP request to the address; return the first line of the answer, or ""."""
    assert launch.port is not None
    with (
        contextlib.suppress(OSError),
        socket.create_connection((launch.address, launch.port), 2.0) as connection,
    ):
        connection.settimeout(2.0)
        # A store closes the connection, or says nothing: this is no message of its protocol.
        connection.sendall(b"GET / HTTP/1.0\r\n\r\n")
        return connection.recv(64).decode(errors="replace").partition("\r\n")[0]
    return ""


def _make_listen_error(launch: Launch, error: str) -> ConfigError:
    place = f"{launch.address}:{launch.port}"
    if "EADDRINUSE" in error:
        if answer := _request_line(launch):
            return ConfigError(
                f"parallel_session: rank 0 cannot listen at {place}: the port is taken by another "
                f"program, which answers {answer!r}",
                where=place,
                hint="choose another MASTER_PORT",
            )
        return ConfigError(
            f"parallel_session: rank 0 cannot listen at {place}: the port is taken",
            where=place,
            hint="another job is there, or a second process with RANK 0; "
            "choose another MASTER_PORT",
        )
    if "EACCES" in error:
        return ConfigError(
            f"parallel_session: rank 0 cannot listen at {place}: this user may not use port "
            f"{launch.port}",
            where=place,
            hint="choose a MASTER_PORT above 1024",
        )
    # Rank 0 is also a client of its store, and connects by MASTER_ADDR.
    if "timed out" in error:
        return ConfigError(
            f"parallel_session: rank 0 listens on port {launch.port}, but cannot reach itself at "
            f"{place}",
            where=place,
            hint="MASTER_ADDR must be the host that rank 0 runs on",
        )
    return ConfigError(
        f"parallel_session: rank 0 cannot listen at {place}: {error.splitlines()[0]}", where=place
    )


def _wait_for_listener(launch: Launch, deadline: float) -> None:
    """Wait until the address accepts connections; torch would fill stderr with warnings."""
    place = f"{launch.address}:{launch.port}"
    pause = 0.01
    start = time.monotonic()
    waits_for = make_wait_reporter(launch)
    while True:
        left = deadline - time.monotonic()
        try:
            socket.create_connection((launch.address, launch.port), max(0.1, min(left, 5))).close()
        except OSError as error:
            if left > 0:
                waits_for(f"rank 0 of {launch.world}")
                time.sleep(min(pause, left))
                # Short at first: mostly rank 0 starts at the same time.
                pause = min(2 * pause, 0.5)
                continue
            reason = error.strerror or str(error)
            # A name that does not resolve is a wrong setting; anything else can be rank 0's
            # failure.
            kind = ConfigError if isinstance(error, socket.gaierror) else PeerError
            raise kind(
                f"parallel_session: rank {launch.rank} of {launch.world} was waiting for rank 0 "
                f"for {time.monotonic() - start:.0f} s, but could not connect to {place}: {reason}",
                where=place,
                got=reason,
                want="rank 0, listening there",
                hint="start rank 0, or correct MASTER_ADDR and MASTER_PORT, equal on all ranks",
            ) from None
        return
