"""How the ranks of a run find each other, and what they are told when they do not.

torch waits for ranks without a word, and then fails with a word that names none of them (a missing
rank is "1/2 clients joined" after half an hour; of two processes with one rank, both wait). Here
ranks sit down at a table first: a store at the launcher's address, where each says who it is.
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
from trainkit.mesh.table import SLACK, clear_table, session_name, waiting_lines
from trainkit.types import ConfigError, PeerError, PreemptedError

T = TypeVar("T")

_STORE_GRACE = 3.0  # seconds in which a store answers that is one
_PORT_GRACE = 5.0  # seconds for which an address may still be in use by a run that is ending
_ASKED_PATIENCE = 20.0  # seconds to wait for others after being asked to stop: a launcher waits 30
_NOTHING_LOST = 75  # the exit code of a run that was told to stop and has lost nothing
_HINTS = {
    "gloo": "name the network interface with GLOO_SOCKET_IFNAME, or see whether a rank died",
    "nccl": "name the network interface with NCCL_SOCKET_IFNAME; NCCL_DEBUG=INFO says how far it "
    "came; every rank needs a GPU of its own",
}


def open_world(
    launch: Launch,
    backend: str,
    *,
    timeout: timedelta,
    start_timeout: timedelta,
    asked: Callable[[], str | None] = lambda: None,
) -> None:
    """Open torch's default process group, once all ranks have met.

    Args:
        launch: Which rank this is, and where all meet.
        backend: torch's name of what ranks talk through.
        timeout: How long a collective may wait for a peer.
        start_timeout: How long all of this may take.
        asked: Tells why this process shall stop, or None: then it does not wait for ranks that are
            missing for longer than 20 s more.

    Raises:
        PreemptedError: It was asked to stop, and ranks are still missing.
        ConfigError: Two processes have one rank, ranks disagree on how many there are, or rank 0
            cannot listen at the address.
        PeerError: Ranks are missing when the time is over (they are named), or cannot be reached.

    Effects:
        Opens a store (under torchrun uses the agent's) and the default process group. What has
        failed leaves no group behind.
    """
    deadline = time.monotonic() + start_timeout.total_seconds()
    found = _Found()
    patience = start_timeout.total_seconds() + SLACK + 1
    place = f"{launch.address}:{launch.port}"
    store = _bounded(
        lambda: _meet(launch, deadline, found),
        patience,
        asked,
        lambda: _refuse_another_program(launch, found),
    )
    if store is None:
        raise PeerError(
            f"parallel_session: rank {launch.rank} found somebody at {place} who did not answer "
            f"for {patience:.0f} s",
            where=place,
            want="rank 0",
            hint="another program may hold the port, or rank 0 may have been stopped",
        )
    left = timedelta(seconds=max(5.0, deadline - time.monotonic()))
    try:
        dist.init_process_group(
            backend,
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
    if launch.rank == 0:  # a later meeting at the same store finds an empty table
        clear_table(store[0])


def first_words(
    groups: Iterable[dist.ProcessGroup], device: torch.device, *, seconds: float
) -> None:
    """Let every group communicate once on every device that it will, and name what does not work.

    NCCL connects ranks in a group's first collective. A broken set-up would hang there: in the
    first step, and without a word.

    Args:
        groups: Groups of this rank; their members must all do this, in one order.
        device: The device of this rank; besides it groups may communicate on the CPU.
        seconds: How long a group may take.

    Raises:
        PeerError: A group failed, did not answer in time, or summed wrongly.

    Effects:
        Communicates: one all-reduce of 4 bytes for each group and device.
    """
    places = {device.type: device, "cpu": torch.device("cpu")}
    for group in groups:
        for kind, backend in get_backends(group).items():
            if kind not in places:
                continue
            try:
                total = _bounded(partial(_sum_of_ones, group, places[kind]), seconds)
            except RuntimeError as error:
                raise _unheard(group, backend, " ".join(str(error).split())) from error
            if total is None:
                raise _unheard(group, backend, f"no answer for {seconds:g} s")
            if total != group.size():
                raise _unheard(group, backend, f"their sum of ones is {total:g}")


def _sum_of_ones(group: dist.ProcessGroup, device: torch.device) -> float:
    one = torch.ones(1, device=device)
    dist.all_reduce(one, group=group)
    return one.item()


def _unheard(group: dist.ProcessGroup, backend: str, reason: str) -> PeerError:
    hint = _HINTS.get(backend, "see what the other ranks say")
    return PeerError(
        f"parallel_session: ranks {dist.get_process_group_ranks(group)} cannot communicate over "
        f"{backend}: {reason}",
        where=backend,
        want="an answer from each",
        hint=hint,
    )


# ---------------------------------------------------------------------------------------- the store


def _bounded(
    work: Callable[[], T],
    seconds: float,
    asked: Callable[[], str | None] = lambda: None,
    check: Callable[[], None] = lambda: None,
) -> T | None:
    """Return what `work` returns, or None after some seconds: torch's stores may wait for ever.

    A connection to a program that is no store is one such case (torch from 2.11 on). The thread is
    left where it hangs; it holds no lock that the end of the process needs.
    """
    results: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            results.put((work(), None))
        except BaseException as error:  # noqa: BLE001 (raised in the thread that asked)
            results.put((None, error))

    threading.Thread(target=run, daemon=True, name="trainkit meeting").start()
    deadline = time.monotonic() + seconds
    given_up = None
    while True:
        now = time.monotonic()
        reason = asked()
        given_up = now + _ASKED_PATIENCE if reason and given_up is None else given_up
        if reason and given_up is not None and now > given_up:
            raise _asked_to_stop(reason)
        try:
            result, error = results.get(timeout=min(0.2, max(0.0, deadline - now)))
        except queue.Empty:
            check()
            if now < deadline:
                continue
            return None
        if error is not None:
            raise error
        return result


def _asked_to_stop(reason: str) -> PreemptedError:
    error = PreemptedError(
        f"parallel_session: asked to stop ({reason}), and not all ranks have come in "
        f"{_ASKED_PATIENCE:g} s since; nothing has been trained",
        hint="run the same command again",
    )
    error.code = _NOTHING_LOST
    return error


@attrs.define(eq=False)
class _Found:
    """When somebody was found at the address who has not answered as a store yet, or None."""

    since: float | None = None
    asked: float = 0.0  # when that program was last asked who it is


def _meet(launch: Launch, deadline: float, found: _Found) -> tuple[dist.Store, str]:
    """Return the store and this session's name on it."""
    while True:
        store = _open_store(launch, deadline, found)
        try:
            return store, session_name(launch, store, deadline)
        except dist.DistNetworkError as error:  # it was the last session's, and has gone since
            if time.monotonic() > deadline:
                raise PeerError(
                    f"parallel_session: rank {launch.rank} lost rank 0 at {launch.address}:"
                    f"{launch.port} before all had come: {str(error).splitlines()[0]}",
                    where=f"{launch.address}:{launch.port}",
                    hint="rank 0's own report says why it went",
                ) from None
            time.sleep(0.1)


def _open_store(launch: Launch, deadline: float, found: _Found) -> dist.Store:
    assert launch.address is not None
    assert launch.port is not None
    # torchrun's agent keeps the store itself; then even rank 0 is a guest.
    hosts = launch.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    if not hosts:
        _reach(launch, deadline)
        found.since = time.monotonic()
    left = timedelta(seconds=max(1.0, deadline - time.monotonic()))
    until = min(deadline, time.monotonic() + _PORT_GRACE)
    while True:
        try:
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
                raise _cannot_listen(launch, str(error)) from None
            time.sleep(0.2)
        else:
            found.since = None
            return store


def _refuse_another_program(launch: Launch, found: _Found) -> None:
    """Refuse an address where a line of text is answered, to which a store is silent.

    It is tried when nobody has answered as a store for some seconds, and again after as many.
    """
    since, now = found.since, time.monotonic()
    if since is None or now - max(since, found.asked) < _STORE_GRACE:
        return
    found.asked = now
    answer = _answer_to_a_line(launch)
    if answer:
        place = f"{launch.address}:{launch.port}"
        raise ConfigError(
            f"parallel_session: rank {launch.rank} found another program at {place}, which answers "
            f"{answer!r}, and not rank 0",
            where=place,
            got=answer,
            want="rank 0, listening there",
            hint="mend MASTER_ADDR, or choose another MASTER_PORT for all ranks",
        )


def _answer_to_a_line(launch: Launch) -> str:
    """Return the beginning of what is said at the address after a line of HTTP; "" for nothing."""
    assert launch.port is not None
    with (
        contextlib.suppress(OSError),
        socket.create_connection((launch.address, launch.port), 2.0) as connection,
    ):
        connection.settimeout(2.0)
        connection.sendall(b"GET / HTTP/1.0\r\n\r\n")
        return connection.recv(64).decode(errors="replace").partition("\r\n")[0]
    return ""


def _cannot_listen(launch: Launch, error: str) -> ConfigError:
    place = f"{launch.address}:{launch.port}"
    text, hint = f"rank 0 cannot listen at {place}: {error.splitlines()[0]}", None
    if "EADDRINUSE" in error:
        answer = _answer_to_a_line(launch)
        text = f"rank 0 cannot listen at {place}: the port is taken"
        text += f" by another program, which answers {answer!r}" if answer else ""
        holder = "" if answer else "another job is there, or a second process with RANK 0; "
        hint = f"{holder}choose another MASTER_PORT"
    elif "EACCES" in error:
        text = f"rank 0 cannot listen at {place}: this user may not use port {launch.port}"
        hint = "choose a MASTER_PORT above 1024"
    elif "timed out" in error:
        text = f"rank 0 listens on port {launch.port}, but cannot reach itself at {place}"
        hint = "MASTER_ADDR must be the host that rank 0 runs on"
    return ConfigError(f"parallel_session: {text}", where=place, hint=hint)


def _reach(launch: Launch, deadline: float) -> None:
    """Wait until somebody listens; torch would fill stderr with what it sees meanwhile."""
    place, pause, begin = f"{launch.address}:{launch.port}", 0.01, time.monotonic()
    waits_for = waiting_lines(launch)
    while True:
        left = deadline - time.monotonic()
        try:
            socket.create_connection((launch.address, launch.port), max(0.1, min(left, 5))).close()
        except OSError as error:
            if left > 0:
                waits_for(f"rank 0 of {launch.world}")
                time.sleep(min(pause, left))
                pause = min(2 * pause, 0.5)
                continue
            reason = error.strerror or str(error)
            kind = ConfigError if isinstance(error, socket.gaierror) else PeerError
            raise kind(
                f"parallel_session: rank {launch.rank} of {launch.world} was waiting for rank 0 "
                f"for {time.monotonic() - begin:.0f} s, but could not connect to {place}: {reason}",
                where=place,
                got=reason,
                want="rank 0, listening there",
                hint="start rank 0, or mend MASTER_ADDR and MASTER_PORT: all ranks need the same",
            ) from None
        return
