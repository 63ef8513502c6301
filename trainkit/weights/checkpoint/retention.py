"""Which checkpoints stay: a plan made of values, and its execution."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

import attrs

from trainkit.files import fsync_folder
from trainkit.schedules import is_due
from trainkit.types import Log, log_warning, non_negative, positive, satisfies
from trainkit.weights.checkpoint.manifest import (
    FORMAT,
    MANIFEST,
    format_of,
    list_checkpoints,
    outline,
    score_of,
    step_of,
    verify_checkpoint,
)

PIN = ".pin"
"""What the name of a file beside a checkpoint ends with that keeps it: step_00000012.pin."""
_ALWAYS = 2  # of the newest that verify: one may turn out damaged when it is needed


_two = satisfies(
    lambda value: value >= _ALWAYS, f"at least {_ALWAYS}, as the newest may turn out damaged"
)


@attrs.frozen
class Retention:
    """Which checkpoints stay: those that any of the rules names.

    `last` counts the newest that verify. `every` keeps the steps that it divides. `best` counts
    those of the lowest score. `powers_of_two` keeps steps 1, 2, 4, 8 and so on, which
    `schedules.is_due(step, every, powers_of_two=True)` saves; `milestones` the
    steps it lists. A checkpoint with a file of its name and ".pin" beside it always stays.
    """

    last: int = attrs.field(default=3, validator=_two)
    every: int = attrs.field(default=0, validator=non_negative)
    best: int = attrs.field(default=0, validator=non_negative)
    powers_of_two: bool = False
    milestones: Sequence[int] = attrs.field(default=(), converter=tuple)


_all_or_two = satisfies(
    lambda value: value == 0 or value >= _ALWAYS,
    "0 for all, or at least 2, as the newest may turn out damaged",
)


@attrs.frozen(kw_only=True)
class CheckpointOptions:
    """When a run saves, and which checkpoints it retains."""

    save_every: int = attrs.field(default=200, validator=positive)
    """Steps between checkpoints; the last step is saved too."""

    keep: int = attrs.field(default=0, validator=_all_or_two)
    """How many of the newest checkpoints to retain, at least 2; 0 retains all."""

    keep_every: int = attrs.field(default=0, validator=non_negative)
    """With --keep: also retain every checkpoint whose step is a multiple of this; 0 for none."""

    keep_best: int = attrs.field(default=0, validator=non_negative)
    """Save after each of this many best evaluations, and with --keep retain them; 0 for none."""

    background_saves: bool = True
    """Copy the state to host memory and write it while training goes on."""

    @property
    def retention(self) -> Retention | None:
        """Which checkpoints stay; None deletes none."""
        return Retention(self.keep, self.keep_every, self.keep_best) if self.keep else None


@attrs.frozen
class Listed:
    """What retention knows of a checkpoint; `verified` is None for what is left alone.

    That is a checkpoint of a format to come, a link, and what has no manifest that says that it is
    trainkit's: a commit leaves no such thing behind.
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

    What does not verify counts for no rule, and goes once something newer that verifies stays:
    above that it may be all that is left of the newest steps. The newest two that verify are never
    in the plan, nor what is pinned, nor what is left alone (see `Listed`).

    Args:
        listing: The checkpoints, newest first.
        policy: What stays.
        pinned: Names that stay whatever the policy says.

    Examples:
        >>> listing = [Listed(f"step_{step:08d}", step) for step in (50, 40, 30, 20, 10)]
        >>> plan_retention(listing, Retention(last=2, every=20))
        ['step_00000030', 'step_00000010']
    """
    kept = set(_kept(listing, policy)) | {*pinned}
    newest = next((place for place, entry in enumerate(listing) if entry.verified), len(listing))
    below = listing[newest:]
    return [e.name for e in below if e.verified is not None and e.name not in kept]


def _kept(listing: Sequence[Listed], policy: Retention) -> list[str]:
    good = [entry for entry in listing if entry.verified]
    scored = [entry for entry in good if entry.score is not None]
    scored.sort(key=lambda entry: entry.score or 0.0)  # stable: of equal ones the newest first
    by_rule = [
        entry
        for entry in good
        if (policy.every and entry.step % policy.every == 0)
        or (policy.powers_of_two and is_due(entry.step, 0, powers_of_two=True))
        or entry.step in policy.milestones
    ]
    newest = good[: max(policy.last, _ALWAYS)]
    return [entry.name for entry in (*newest, *scored[: policy.best], *by_rule)]


def apply_retention(
    directory: Path | str,
    policy: Retention,
    *,
    known_good: Iterable[str] = (),
    log: Log = log_warning,
    dry_run: bool = False,
) -> dict[str, list[str]]:
    """Delete the checkpoints of a directory that a policy does not keep.

    A checkpoint counts as verified when every byte of it has been read and is right: what the plan
    would keep is read, and the plan made anew if one of these is damaged.

    Args:
        directory: A `checkpoints/` directory.
        policy: What stays.
        known_good: Names that this process has written or verified itself.
        log: Called with a sentence about each that is damaged or could not be deleted.
        dry_run: Only say what would go.

    Returns:
        {"kept": names, "verified": those of them that are known to be good, "deleted": names},
        newest first.

    Effects:
        Reads checkpoints; deletes directories, each by a rename first, so that a deletion cut short
        leaves no half a checkpoint by that name.
    """
    directory = Path(directory)
    paths = list_checkpoints(directory)
    listing = list(map(_listed, paths))
    pinned = [path.name for path in paths if (directory / f"{path.name}{PIN}").exists()]
    good = set(known_good)
    while True:
        doomed = plan_retention(listing, policy, pinned=pinned)
        unread = [e.name for e in listing if e.verified and e.name not in good.union(doomed)]
        damaged = _damaged(directory, unread, log)
        good.update(unread)
        if not damaged:
            break
        listing = [attrs.evolve(e, verified=False) if e.name in damaged else e for e in listing]
    deleted = doomed if dry_run else [name for name in doomed if _deleted(directory / name, log)]
    kept = [entry for entry in listing if entry.name not in deleted]
    return {
        "kept": [entry.name for entry in kept],
        "verified": [entry.name for entry in kept if entry.verified],
        "deleted": deleted,
    }


def remove_checkpoint(path: Path) -> None:
    """Delete a checkpoint: its name goes first, at once, then its manifest, then its data.

    Raises:
        OSError: It could not be deleted, or is no directory; by its name it is gone all the same,
            or untouched.

    Effects:
        Deletes a directory, and never what a link leads to.
    """
    if path.is_symlink():
        raise NotADirectoryError(errno.ENOTDIR, "it is a link, which is left alone", str(path))
    doomed = path.with_name(f".deleting-{path.name}")
    shutil.rmtree(doomed, ignore_errors=True)  # of a deletion that was cut short
    path.rename(doomed)
    fsync_folder(path.parent)
    (doomed / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(doomed)


def _listed(path: Path) -> Listed:
    if path.is_symlink() or not path.is_dir():  # not ours: what it leads to may be all there is
        return Listed(path.name, step_of(path), verified=None)
    problems, manifest = outline(path)
    if problems:
        later = len(problems) == 1 and "upgrade trainkit" in problems[0]
        return Listed(
            path.name, step_of(path), verified=None if later or format_of(path) != FORMAT else False
        )
    return Listed(path.name, step_of(path), score=score_of(manifest))


def _damaged(directory: Path, names: Sequence[str], log: Log) -> set[str]:
    found = {name: verify_checkpoint(directory / name) for name in names}
    for name, problems in found.items():
        if problems:
            log(f"{directory / name} is damaged and counts for nothing: {problems[0]}")
    return {name for name, problems in found.items() if problems}


def _deleted(path: Path, log: Log) -> bool:
    try:
        remove_checkpoint(path)
    except OSError as error:
        log(f"{path} could not be deleted: {error.strerror}")
    return not path.exists()
