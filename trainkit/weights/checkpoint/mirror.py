"""Copy a run directory into a bucket while the run goes on: one thread, on its first rank."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event, Thread
from typing import Any

import attrs

from trainkit.buckets.store import (
    Store,
    clean_uploads,
    delete_files,
    get_bytes,
    list_files,
    lower_priority,
    put_bytes,
    put_file,
)
from trainkit.types import CheckpointError, Log, TrainkitError, log_warning
from trainkit.weights.checkpoint.bucket_runs import list_remote
from trainkit.weights.checkpoint.manifest import (
    MANIFEST,
    get_score,
    list_checkpoints,
    parse_checkpoint_name,
    parse_manifest,
    verify_checkpoint,
)
from trainkit.weights.checkpoint.retention import PIN, Listed, Retention, plan_retention

_LOOK_EVERY = 1.0  # seconds between two looks at the folder
_LONGEST_WAIT = 60.0  # seconds between two attempts, and between two warnings
# Of this machine and this process: the lock, heartbeats and requests.
_LOCAL = ("lock", "ranks", "checkpoints")
ASIDE = "manifest.aside.json"
"""The name of the manifest of a checkpoint that a run has set aside in its bucket."""


@attrs.define(eq=False, kw_only=True)
class Mirror:
    """A thread that copies a run directory into a bucket, from `open_mirror`."""

    folder: Path
    store: Store
    log: Log
    event: Callable[[str, dict[str, Any]], object] | None
    retention: Retention | None = None
    """Which checkpoints to retain in the bucket; None deletes none. May be set at any time."""

    _sent: dict[str, tuple[int, int]] = attrs.field(factory=dict)  # key -> size and time
    # Names of checkpoints and what `_stamp` returned: after a roll-back a name may come again.
    _mirrored: dict[str, int | None] = attrs.field(factory=dict)
    _listed: dict[str, Listed] = attrs.field(factory=dict)
    _sets_aside: bool = False
    _closing: Event = attrs.field(factory=Event)
    _thread: Thread | None = None
    _is_clean: bool = False
    _failures: int = 0
    _failing_since: float = 0.0
    _warned: float | None = None

    def begin(self, *, sets_aside: bool = False) -> None:
        """Start to copy: not before the folder has what the bucket had.

        Args:
            sets_aside: Whether checkpoints in the bucket that are newer than all local ones are of
                a branch that the run has left: they are kept under a manifest of another name.

        Effects:
            Starts a thread, a daemon: a server that never answers must not keep the process alive.
        """
        self._sets_aside = sets_aside
        self._thread = Thread(target=self._run, name="trainkit-mirror", daemon=True)
        self._thread.start()

    def close(self, get_patience: Callable[[], float]) -> list[str]:
        """Copy what is left, for at most some seconds, and return the names of what is missing."""
        if self._thread is None:
            return []
        self._closing.set()
        end = time.monotonic() + get_patience()
        while self._thread.is_alive() and time.monotonic() < end:
            self._thread.join(0.1)
            end = min(end, time.monotonic() + get_patience())  # a stop may come meanwhile
        return self.find_missing()

    def _run(self) -> None:
        lower_priority()
        while True:
            is_last = self._closing.is_set()
            try:
                if self._has_work() or is_last:
                    self._copy_all()
                    self._report_recovery()
            # All else too: a thread that dies silently would leave the run without a mirror.
            except Exception as error:  # noqa: BLE001
                self._report_failure(error)
                wait = min(2.0 ** min(self._failures - 1, 10), _LONGEST_WAIT)
                if not is_last:
                    self._closing.wait(wait)  # ends early when the mirror is closed
                elif time.monotonic() - self._failing_since > _LONGEST_WAIT:
                    return  # the run is over: `open_mirror` says what is missing
                else:
                    time.sleep(min(wait, 2.0))
                continue
            if is_last:
                return
            self._closing.wait(_LOOK_EVERY)

    def find_missing(self) -> list[str]:
        """Return the names of the checkpoints and files that the bucket lacks."""
        return [*self._find_new(), *(key for key, _ in self._find_changed())]

    def _find_new(self) -> list[str]:
        """Return the names of the local checkpoints that were not copied, newest first."""
        paths = list_checkpoints(self.folder / "checkpoints")
        return [x.name for x in paths if self._mirrored.get(x.name, -1) != _stamp(x)]

    def _has_work(self) -> bool:
        # A roll-back moves the checkpoints of the steps that it takes back, see `clear_directory`.
        newest = max(map(_order, self._list_local()), default=(-1, 0))
        left = [name for name in self._mirrored if _order(name) > newest]
        if any(any(self.folder.glob(f"checkpoints/abandoned-*/{name}")) for name in left):
            self._sets_aside = True
        # Files that have only grown wait for the next checkpoint.
        return bool(self._find_new()) or self._sets_aside or not self._is_clean

    def _list_local(self) -> list[str]:
        return [path.name for path in list_checkpoints(self.folder / "checkpoints")]

    def _copy_all(self) -> None:
        if not self._is_clean:
            with contextlib.suppress(TrainkitError):  # not every account may list uploads
                clean_uploads(self.store)
        if self._sets_aside:
            self._set_aside(list_remote(list_files(self.store)))
            self._sets_aside = False
        sizes = list_files(self.store)
        # Lines before the checkpoint of their step: a run that is resumed has all of them.
        for key, path in self._find_changed():
            info = path.stat()
            with contextlib.suppress(FileNotFoundError):  # deleted since it was listed
                put_file(self.store, key, path)
                self._sent[key] = info.st_size, info.st_mtime_ns
        self._is_clean = True
        # One by one, as a newer one may be saved meanwhile: it is what a new machine needs.
        while new := self._find_new():
            try:
                self._copy_checkpoint(new[0], sizes)
            except FileNotFoundError:  # retention has deleted it
                if (self.folder / "checkpoints" / new[0]).exists():
                    raise
        # On another machine they must retain what they do here.
        for pin in sorted(self.folder.glob(f"checkpoints/step_*{PIN}")):
            if f"checkpoints/{pin.name}" not in sizes:
                put_file(self.store, f"checkpoints/{pin.name}", pin)
        self._apply_retention()

    def _find_changed(self) -> list[tuple[str, Path]]:
        changed = []
        # Folders come and go meanwhile, which `walk` passes over.
        for folder, folders, files in os.walk(self.folder):
            folders[:] = [x for x in folders if x not in _LOCAL and not x.startswith(".")]
            for name in files:
                path = Path(folder, name)
                if name in _LOCAL or name.startswith(".") or path.is_symlink():
                    continue
                with contextlib.suppress(FileNotFoundError):
                    info = path.stat()
                    key = path.relative_to(self.folder).as_posix()
                    if self._sent.get(key) != (info.st_size, info.st_mtime_ns) and path.is_file():
                        changed.append((key, path))
        return sorted(changed)

    def _copy_checkpoint(self, name: str, sizes: dict[str, int]) -> None:
        path = self.folder / "checkpoints" / name
        key = f"checkpoints/{name}/"
        stamp, manifest = _stamp(path), (path / MANIFEST).read_bytes()
        if key + MANIFEST in sizes:
            if get_bytes(self.store, key + MANIFEST) == manifest:
                self._mirrored[name] = stamp
                return
            # Of another branch. Without it the files there are no checkpoint while they change.
            delete_files(self.store, [key + MANIFEST])
        began = time.monotonic()
        problems = verify_checkpoint(path)
        if problems:
            if path.exists():
                self.log(f"warning: mirror: {path} is damaged and is not copied: {problems[0]}")
                self._mirrored[name] = stamp
            return
        files = sorted(set(parse_manifest(path, manifest)["files"]))
        for file in files:
            put_file(self.store, key + file, path / file)
        put_bytes(self.store, key + MANIFEST, manifest)
        self._mirrored[name] = stamp
        self._listed.pop(name, None)  # of another branch
        if self.event is not None:
            self.event("mirror", {"checkpoint": name, "seconds": time.monotonic() - began})

    def _set_aside(self, remote: list[str]) -> None:
        """Take the manifest of each checkpoint that is newer than all local ones away."""
        newest = max(map(_order, self._list_local()), default=(-1, 0))
        for name in remote:
            if _order(name) > newest:
                key = f"checkpoints/{name}/"
                put_bytes(self.store, key + ASIDE, get_bytes(self.store, key + MANIFEST))
                delete_files(self.store, [key + MANIFEST])
                self.log(f"set {self.store.url}/{key[:-1]} aside: its manifest is now {ASIDE}")
        self._mirrored = {x: y for x, y in self._mirrored.items() if _order(x) <= newest}

    def _apply_retention(self) -> None:
        policy = self.retention
        if policy is None:
            return
        sizes = list_files(self.store, "checkpoints")
        names = list_remote(sizes)
        directory = self.folder / "checkpoints"
        # Those without a manifest are of a copy or a deletion that was broken off.
        parts = {key.split("/")[1] for key in sizes if key.count("/") == 2}
        aside = {key.split("/")[1] for key in sizes if key.endswith(f"/{ASIDE}")}
        pinned = {
            name
            for name in parts
            if f"checkpoints/{name}{PIN}" in sizes or (directory / f"{name}{PIN}").exists()
        }
        listing = [self._read_listed(name, sizes) for name in names]
        broken = parts - {*names, *aside, *pinned, *self._list_local()}
        doomed = [name for name in sorted(broken) if parse_checkpoint_name(name) is not None]
        for name in [*plan_retention(listing, policy, pinned=pinned), *doomed]:
            key = f"checkpoints/{name}/"
            others = [other for other in sizes if other.startswith(key)]
            # The manifest first: an interrupted deletion leaves no checkpoint.
            delete_files(self.store, sorted(others, key=lambda other: other != key + MANIFEST))
            self._listed.pop(name, None)

    def _read_listed(self, name: str, sizes: dict[str, int]) -> Listed:
        """Return what retention needs to know of a checkpoint in the bucket."""
        if name not in self._listed:
            key = f"checkpoints/{name}/"
            step, _ = _order(name)
            try:
                manifest = parse_manifest(Path(key), get_bytes(self.store, key + MANIFEST))
            except CheckpointError:  # of a later version, or damaged: it stays
                self._listed[name] = Listed(name, step, verified=None)
            else:
                is_whole = all(
                    sizes.get(key + file) == entry["size"]
                    for file, entry in manifest["files"].items()
                )
                self._listed[name] = Listed(
                    name, step, verified=is_whole, score=get_score(manifest)
                )
        return self._listed[name]

    def _report_failure(self, error: Exception) -> None:
        now = time.monotonic()
        self._failing_since = now if self._failures == 0 else self._failing_since
        self._failures += 1
        if self._warned is not None and now - self._warned < _LONGEST_WAIT:
            return
        self._warned = now
        missing = ", ".join(self._find_new()) or "all files"
        self.log(
            f"warning: mirror: {self.store.url} does not have {missing} "
            f"yet: {error}; training goes on, and it is tried again"
        )

    def _report_recovery(self) -> None:
        if self._failures:
            self.log(f"mirror: {self.store.url} has everything again")
        self._failures, self._warned = 0, None


def _order(name: str) -> tuple[int, int]:
    return parse_checkpoint_name(name) or (0, 0)


def _stamp(path: Path) -> int | None:
    """Return when a checkpoint's manifest was written; None without one."""
    try:
        return (path / MANIFEST).stat().st_mtime_ns
    except OSError:
        return None


@contextlib.contextmanager
def open_mirror(
    folder: Path,
    store: Store | None,
    *,
    get_patience: Callable[[], float],
    log: Log = log_warning,
    event: Callable[[str, dict[str, Any]], object] | None = None,
) -> Iterator[Mirror | None]:
    """Copy a run directory into a bucket for a `with` block, on a thread.

    A checkpoint is copied after it has been verified on the local disk, its manifest last, so that
    one that is half there is never taken. The other files are copied before each checkpoint, and at
    the end. While the bucket does not answer, training goes on: it is tried again after 1, 2, 4 and
    at most 60 seconds, with a warning once a minute. `Retention` is applied to the bucket as to the
    disk.

    Args:
        folder: The local run directory.
        store: The folder of the bucket, that of this run alone; None does nothing, as on all ranks
            but one.
        get_patience: Returns for how many seconds from now on leaving the block may wait for what
            is missing; called again while it waits.
        log: Called with warnings, on the thread.
        event: Called with "mirror" and {"checkpoint", "seconds"} of each, on the thread.

    Yields:
        The `Mirror`, None without a store; it copies nothing before its `begin` is called.

    Effects:
        Writes and deletes objects, on a thread, which has ended if everything is copied.

    Examples:
        >>> def follow(folder, store):
        ...     with open_mirror(folder, store, get_patience=lambda: 25.0):
        ...         ...  # train
    """
    if store is None:
        yield None
        return
    mirror = Mirror(folder=folder, store=store, log=log, event=event)
    try:
        yield mirror
    finally:
        missing = mirror.close(get_patience)
        if missing:
            log(
                f"warning: mirror: {store.url} does not have {', '.join(missing)}; they are in "
                f"{folder}, and the next start of the run copies them"
            )
