"""Retention of checkpoints: plan which to delete, from values alone, and delete them."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

import attrs

from trainkit.files import fsync_folder
from trainkit.schedules import Interval, check_interval, is_due, parse_interval
from trainkit.types import (
    Log,
    log_warning,
    non_negative,
    satisfies,
)
from trainkit.weights.checkpoint.manifest import (
    FORMAT,
    MANIFEST,
    get_score,
    inspect_files,
    list_checkpoints,
    parse_step,
    read_format,
    verify_checkpoint,
)

PIN = ".pin"
"""The suffix of a file whose existence pins the checkpoint of its name: step_00000012.pin."""


@attrs.frozen
class Retention:
    """Which checkpoints to retain: those that at least one rule selects.

    `last` selects the newest that verify, `every` the multiples of a step, and `best` those with
    the lowest scores. `powers_of_two` selects steps 1, 2, 4, 8 and so on, which
    `schedules.is_due(step, every, powers_of_two=True)` saves, and `milestones` the listed steps. A
    checkpoint with a pin file, its name and ".pin", is always retained.
    """

    last: int = attrs.field(
        default=3,
        validator=satisfies(
            lambda value: value >= 2, "at least 2, as the newest may turn out damaged"
        ),
    )
    every: int = attrs.field(default=0, validator=non_negative)
    best: int = attrs.field(default=0, validator=non_negative)
    powers_of_two: bool = False
    milestones: Sequence[int] = attrs.field(default=(), converter=tuple)


@attrs.frozen(kw_only=True)
class CheckpointOptions:
    """When a run saves, and which checkpoints it retains."""

    save_every: Interval = attrs.field(
        default=Interval(200), converter=parse_interval, validator=check_interval(never=False)
    )
    """Steps between checkpoints, or 30min, 100M-tokens, 2epochs; the last step is saved too."""

    keep: int = attrs.field(
        default=0,
        validator=satisfies(
            lambda value: value == 0 or value >= 2,
            "0 for all, or at least 2, as the newest may turn out damaged",
        ),
    )
    """How many of the newest checkpoints to retain, at least 2; 0 retains all."""

    keep_every: int = attrs.field(default=0, validator=non_negative)
    """With --keep: also retain every checkpoint whose step is a multiple of this; 0 for none."""

    keep_best: int = attrs.field(default=0, validator=non_negative)
    """Save after each of this many best evaluations, and with --keep retain them; 0 for none."""

    background_saves: bool = True
    """Copy the state to host memory and write it while training goes on."""

    @property
    def retention(self) -> Retention | None:
        """Which checkpoints to retain; None retains all."""
        return Retention(self.keep, self.keep_every, self.keep_best) if self.keep else None


@attrs.frozen
class Listed:
    """What `plan_retention` needs to know about a checkpoint.

    `verified` is None for a directory that is never touched: a checkpoint of a later format, a
    link, or a directory without a manifest of trainkit, which no commit leaves behind.
    """

    name: str
    step: int
    verified: bool | None = True
    score: float | None = None


def plan_retention(
    listing: Sequence[Listed],
    policy: Retention,
    *,
    pinned: Collection[str] = (),
) -> list[str]:
    """Return the names of the checkpoints to delete.

    No rule selects a damaged checkpoint. It is deleted if a newer one verifies; otherwise it may be
    all that is left of the newest steps. The newest two that verify are never deleted, nor pinned
    ones, nor those that are not touched (see `Listed`).

    Args:
        listing: The checkpoints, newest first.
        policy: Which to retain.
        pinned: Names to retain whatever the policy is.

    Examples:
        >>> listing = [Listed(f"step_{step:08d}", step) for step in (50, 40, 30, 20, 10)]
        >>> plan_retention(listing, Retention(last=2, every=20))
        ['step_00000030', 'step_00000010']
    """
    good = [entry for entry in listing if entry.verified]
    scored = [entry for entry in good if entry.score is not None]
    scored.sort(key=lambda entry: entry.score or 0.0)  # stable: of equal scores the newest first
    by_step = [
        entry
        for entry in good
        if (policy.every and entry.step % policy.every == 0)
        # With an interval of 0, so that only the powers are due.
        or (policy.powers_of_two and is_due(entry.step, 0, powers_of_two=True))
        or entry.step in policy.milestones
    ]
    selected = (*good[: policy.last], *scored[: policy.best], *by_step)
    retained = {entry.name for entry in selected} | {*pinned}
    # In front of it are damaged ones of later steps, which stay.
    newest = next((i for i, entry in enumerate(listing) if entry.verified), len(listing))
    return [
        entry.name
        for entry in listing[newest:]
        if entry.verified is not None and entry.name not in retained
    ]


def apply_retention(
    directory: Path | str,
    policy: Retention,
    *,
    known_good: Iterable[str] = (),
    log: Log = log_warning,
    dry_run: bool = False,
) -> dict[str, list[str]]:
    """Delete the checkpoints of a directory that a policy does not retain.

    A retained checkpoint is first verified byte by byte. If one is damaged, the plan is made again
    without it.

    Args:
        directory: A `checkpoints/` directory.
        policy: Which to retain.
        known_good: Names that this process has written or verified itself.
        log: Called with a message about each that is damaged or could not be deleted.
        dry_run: Only return what would be deleted.

    Returns:
        {"kept": names, "verified": those of them that are intact, "deleted": names}, newest first.

    Effects:
        Reads checkpoints; deletes directories, each after a rename, so that an interrupted deletion
        leaves no incomplete checkpoint under that name.
    """
    directory = Path(directory)
    paths = list_checkpoints(directory)
    listing = [_read_listed(path) for path in paths]
    # Read at each save: a file that somebody creates now pins a checkpoint of a running run.
    pinned = [path.name for path in paths if (directory / f"{path.name}{PIN}").exists()]
    good = set(known_good)
    # Hashing is expensive: what this run has written is not read again, nor what will be deleted.
    while True:
        doomed = plan_retention(listing, policy, pinned=pinned)
        unread = [e.name for e in listing if e.verified and e.name not in good.union(doomed)]
        problems = {name: verify_checkpoint(directory / name) for name in unread}
        damaged = {name: found[0] for name, found in problems.items() if found}
        for name, problem in damaged.items():
            log(f"{directory / name} is damaged and counts for nothing: {problem}")
        # Damaged ones as well: from now on they are not listed as verified, so nothing reads them.
        good.update(unread)
        if not damaged:  # else older ones move up, and they have not been verified yet
            break
        listing = [attrs.evolve(e, verified=False) if e.name in damaged else e for e in listing]
    if not dry_run:
        for name in doomed:
            try:
                remove_checkpoint(directory / name)
            except OSError as error:  # the run goes on; the next save tries again
                log(f"{directory / name} could not be deleted: {error.strerror}")
        doomed = [name for name in doomed if not (directory / name).exists()]
    retained = [entry for entry in listing if entry.name not in doomed]
    return {
        "kept": [entry.name for entry in retained],
        "verified": [entry.name for entry in retained if entry.verified],
        "deleted": doomed,
    }


def remove_checkpoint(path: Path) -> None:
    """Delete a checkpoint: rename it first, in one step, then delete its manifest, then its data.

    Raises:
        OSError: It could not be deleted, or is not a directory. Either the rename has happened or
            nothing has.

    Effects:
        Deletes a directory, but never the target of a link.
    """
    if path.is_symlink():
        raise NotADirectoryError(errno.ENOTDIR, "it is a link, which is left alone", str(path))
    # A name that no list of checkpoints has.
    doomed = path.with_name(f".deleting-{path.name}")
    shutil.rmtree(doomed, ignore_errors=True)  # of an interrupted deletion
    path.rename(doomed)
    fsync_folder(path.parent)  # or after a crash the name is back, with half of the files
    (doomed / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(doomed)


def _read_listed(path: Path) -> Listed:
    if path.is_symlink() or not path.is_dir():  # its target may be the only copy of something
        return Listed(path.name, parse_step(path), verified=None)
    problems, manifest = inspect_files(path)
    if not problems:
        return Listed(path.name, parse_step(path), score=get_score(manifest))
    # Only by its message does the problem of a later version differ from damage.
    is_later = len(problems) == 1 and "upgrade trainkit" in problems[0]
    is_foreign = is_later or read_format(path) != FORMAT
    return Listed(path.name, parse_step(path), verified=None if is_foreign else False)
