"""Read a checkpoint into any layout: verify, compare, read all, and only then change the run."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainkit.collectives import run_on_all_ranks
from trainkit.parallel.names import modules_of
from trainkit.types import SOLO, Axis, CheckpointError, Log, ParallelState, TrainState, log_warning
from trainkit.weights.checkpoint.compare import Leeway
from trainkit.weights.checkpoint.directory import fork_run, get_run_id, saved_before
from trainkit.weights.checkpoint.facts import (
    Facts,
    ResumeRules,
    agree_on_facts,
    allowed_names,
    check_allowed,
    compare_facts,
    facts_at,
    may_change_optimizer,
)
from trainkit.weights.checkpoint.manifest import (
    clear_directory,
    damaged,
    list_checkpoints,
    none_verifies,
    outline,
    step_of,
)
from trainkit.weights.checkpoint.safe_files import owner_problems, read_json
from trainkit.weights.checkpoint.snapshot import machine_of
from trainkit.weights.checkpoint.staging import Check, install_, stage_checkpoint, summed_up

_NO_CHANGES = ResumeRules()


def resume(
    run_dir: Path | str,
    state: TrainState,
    stages: Sequence[nn.Module] | nn.Module,
    optimizer: torch.optim.Optimizer,
    ps: ParallelState,
    *,
    request: str | Path = "auto",
    facts: Facts | None = None,
    changes: ResumeRules = _NO_CHANGES,
    strict_owner: bool = False,
    log: Log = log_warning,
) -> TrainState:
    """Go on from a checkpoint of a run, written by any layout.

    Another run's checkpoint is never taken by mistake. One that is asked for by its path makes this
    run a fork: it gets an identity of its own, and what it was forked from stays as it is.
    Checkpoints of the run that are not on the branch that it goes on with (all of them after
    "never", later ones after a path) are set aside in `checkpoints/abandoned-1`, so that "auto"
    never goes back to them; nothing is deleted but what a killed save left half done.

    Args:
        run_dir: The run directory.
        state: The counters of a fresh run, returned when there is nothing to go on from.
        stages: This rank's stages, filled with anything.
        optimizer: The optimizer of their parameters.
        ps: The layout.
        request: "auto" takes the newest checkpoint that verifies, and begins afresh only where
            nothing tells that the run has saved; "never" takes none, a path takes that one; where
            the run was forked from it before and has saved since, it is "auto".
        facts: What must be as it was saved, for instance the fingerprint of the data, or a function
            from a number of global batches to that, for what only those can have changed; the same
            on all ranks.
        changes: Which facts may have changed, and which the user allows to. Where "optimizer",
            "moments", "mean", or what begins with "optimizer_", may change, another optimizer than
            the one that was saved takes over what it can, which is told; see `changed.taken_over`.
        strict_owner: Refuse a checkpoint that others own or can write; without it they are told of.
        log: Called on rank 0 with what was passed over, taken, changed and set aside.

    Returns:
        The counters to go on with.

    Raises:
        CheckpointError: Nothing verifies where there is something, or there is nothing where the
            run has saved; it is another run's, or it does not fit the run.
        ConfigError: The ranks do not agree on `facts`, or what is allowed to change cannot.

    Effects:
        Writes parameters and optimizer state, on all ranks or on none, after everything has been
        verified, compared and read; moves directories; communicates on `ps.world`.
    """
    stages = modules_of(stages)
    check_allowed(changes)
    run_dir, is_first = Path(run_dir), ps.world.index == 0
    directory = run_dir / "checkpoints"
    say = log if is_first else (lambda _: None)
    agree_on_facts(facts_at(facts, sys.maxsize), ps.world)
    request = run_on_all_ranks(lambda: _looked_over(run_dir, request, say), ps.world)[0]
    passed_over: list[str] = []
    candidates = _candidates(run_dir, request, passed_over, say) if is_first else iter(())
    while True:
        chosen = run_on_all_ranks(lambda: next(candidates, None), ps.world)[0]
        if chosen is None:
            run_on_all_ranks(
                lambda: _begin_afresh(run_dir, request, log) if is_first else None, ps.world
            )
            return state
        path, manifest = Path(chosen[0]), chosen[1]
        told: list[str] = []
        check = _fact_check(facts, changes, told)
        leeway = Leeway(optimizer=may_change_optimizer(changes), options=allowed_names(changes))
        staged = stage_checkpoint(
            path, manifest, stages, optimizer, axis=ps.world, check=check, leeway=leeway
        )
        if not staged.problems:
            break
        _pass_over(path, staged.problems, request, passed_over, say)

    def accept() -> None:
        if not is_first:
            return
        notes = [*_owner_notes(path, strict=strict_owner), *told, *summed_up(staged.changes)]
        newest = list_checkpoints(directory)[0] if passed_over else path
        lost = step_of(newest) - manifest["step"] if passed_over else 0
        log(f"going on from {path}" + f", {lost} steps before {newest.name}" * bool(lost))
        for note in (*notes, *_machine_notes(staged.saved["machine"], ps)):
            log(note)
        clear_directory(directory, path, request, log=log)
        if _is_fork(run_dir, path, manifest, request):
            log(_forked(run_dir, path, manifest))

    run_on_all_ranks(accept, ps.world)
    return install_(staged, stages, optimizer)


def _forked(run_dir: Path, path: Path, manifest: Mapping[str, Any]) -> str:
    """Make a run a fork of another, and say so."""
    parent = {"run": manifest.get("run"), "step": manifest["step"], "path": str(path)}
    return f"this is run {fork_run(run_dir, parent)['run']}, forked from {parent['run']}"


def load_checkpoint(
    path: Path | str,
    stages: Sequence[nn.Module] | nn.Module,
    optimizer: torch.optim.Optimizer | None,
    *,
    facts: Facts | None = None,
    changes: ResumeRules = _NO_CHANGES,
    allow_missing: Sequence[str] = (),
    allow_extra: Sequence[str] = (),
    cast: Sequence[str] = (),
    axis: Axis = SOLO,
    log: Log = log_warning,
) -> TrainState:
    """Verify one checkpoint and read it into stages and their optimizer.

    What may be missing or different is said by patterns of parameter names, in which `*` stands for
    any letters.

    Args:
        path: The checkpoint's directory.
        stages: This rank's stages.
        optimizer: The optimizer of their parameters; None leaves what it remembered aside.
        facts: What must be as it was saved; see `resume`.
        changes: Which facts may have changed; see `resume`.
        allow_missing: Parameters that the checkpoint may lack, or may have without moments: they
            keep their values, and begin with no moments.
        allow_extra: Parameters of the checkpoint that the run may lack or not train.
        cast: Parameters that may be stored in another floating dtype.
        axis: All ranks that read it, `ps.world`: if one cannot, none changes anything.
        log: Called on the first rank with each fact that has changed as `changes` allows.

    Returns:
        The counters it holds.

    Raises:
        CheckpointError: It is damaged; or it names every tensor that is missing, left over, or of
            another shape or dtype, and every fact that differs.

    Effects:
        Writes parameters and optimizer state, after everything has been verified, compared and
        read; communicates on `axis`.
    """
    stages = modules_of(stages)
    check_allowed(changes)
    path = Path(path)
    manifest = run_on_all_ranks(lambda: _whole_manifest(path) if axis.index == 0 else None, axis)[0]
    may_change = may_change_optimizer(changes), allowed_names(changes)
    leeway = Leeway(allow_missing, allow_extra, cast, *may_change)
    told: list[str] = []
    check = _fact_check(facts, changes, told)
    staged = stage_checkpoint(
        path, manifest, stages, optimizer, axis=axis, check=check, leeway=leeway
    )
    if staged.problems:
        raise damaged(path, staged.problems)
    for note in (*told, *summed_up(staged.changes)) if axis.index == 0 else ():
        log(note)
    return install_(staged, stages, optimizer)


def load_weights(
    path: Path | str,
    stages: Sequence[nn.Module] | nn.Module,
    *,
    allow_missing: Sequence[str] = (),
    allow_extra: Sequence[str] = (),
    cast: Sequence[str] = (),
    axis: Axis = SOLO,
) -> TrainState:
    """Verify one checkpoint, read its parameters, and leave the optimizer state aside.

    Args:
        path: The checkpoint's directory.
        stages: This rank's stages.
        allow_missing: Patterns of parameters that the checkpoint may lack, new adapters say.
        allow_extra: Patterns of parameters of the checkpoint that the stages may lack.
        cast: Patterns of parameters that may be stored in another floating dtype.
        axis: The ranks that hold the other stages, `ps.pp` or `ps.world`.

    Returns:
        The counters it holds.

    Raises:
        CheckpointError: It is damaged; or it names every parameter that is missing, left over, or
            of another shape or dtype.

    Effects:
        Writes the parameters and persistent buffers of `stages`; communicates on `axis`.
    """
    stages = modules_of(stages)
    may = {"allow_missing": allow_missing, "allow_extra": allow_extra, "cast": cast}
    return load_checkpoint(path, stages, None, axis=axis, **may)


def read_facts(path: Path | str, *, needs: Sequence[str] = ()) -> dict[str, Any]:
    """Return the facts that were saved with a checkpoint, which has been verified.

    Args:
        path: The checkpoint's directory.
        needs: Facts that must be among them.

    Raises:
        CheckpointError: Some are not: the run that saved it was of another recipe.
    """
    facts = read_json(Path(path) / "state.json")["facts"]
    missing = [name for name in needs if name not in facts]
    if missing:
        raise CheckpointError(
            f"read_facts: {path} does not say its {', '.join(missing)}: it was saved by a recipe "
            "of another kind",
            where=path,
            got=sorted(facts),
            want=list(needs),
            hint="name a run of a recipe that saves them with its facts",
        )
    return facts


def _whole_manifest(path: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint that was named, whose files have the right sizes."""
    problems, manifest = outline(path)
    if problems:
        raise damaged(path, problems)
    return manifest


def _fact_check(facts: Facts | None, changes: ResumeRules, told: list[str]) -> Check:
    """Return a check of the saved facts against the run's, which also writes what is only told."""

    def check(saved: Mapping[str, Any]) -> list[str]:
        live = facts_at(facts, saved["state"]["cursor"]["batch"])
        refused, changed = compare_facts(saved["facts"], live, changes)
        told[:] = changed
        return refused

    return check


# ----------------------------------------------------------------------------------------- choosing

_Candidate = tuple[str, dict[str, Any]]


def _candidates(
    run_dir: Path, request: str | Path, passed_over: list[str], log: Log
) -> Iterator[_Candidate]:
    """Go through the checkpoints that may be gone on from, the best first, with their manifests.

    Their tensors have not been looked at. Who finds one damaged after all adds it to `passed_over`.
    """
    if request == "never":
        return
    directory = run_dir / "checkpoints"
    known = list_checkpoints(directory) if request == "auto" else []
    if request == "auto" and not known:
        _refuse_lost(run_dir)
    named = _identity(run_dir)[1] if request == "auto" else str(Path(request).absolute())
    if named is not None and not known:
        yield named, _whole_manifest(Path(named))
        return
    for path in known:
        problems, manifest = outline(path)
        if problems:
            _pass_over(path, problems, request, passed_over, log)
            continue
        _refuse_another_run(run_dir, path, manifest)
        yield str(path.absolute()), manifest
    if passed_over:
        raise none_verifies(directory, passed_over)


def _pass_over(
    path: Path,
    problems: Sequence[str],
    request: str | Path,
    passed_over: list[str],
    log: Log,
) -> None:
    if request != "auto":
        raise damaged(path, problems)
    passed_over.append(f"{path.name}: {problems[0]}")
    log(f"passed over {path}: {problems[0]}")


def _refuse_another_run(run_dir: Path, path: Path, manifest: Mapping[str, Any]) -> None:
    own, other = _identity(run_dir)[0], manifest.get("run")
    if own is not None and other is not None and own != other:
        raise CheckpointError(
            f"resume: {path} has the run_id {other}, this run has {own}: it was copied from another"
            " run",
            where=path,
            got=other,
            want=own,
            hint=f"--resume {path} makes this run a fork of that one; or take it out of here",
        )


def _identity(run_dir: Path) -> tuple[str | None, str | None]:
    """Return which run this is, if the directory has been told, and the path it was forked from.

    A fork goes on from there until it has saved itself.
    """
    if not (run_dir / "run.json").exists():
        return None, None
    known = get_run_id(run_dir)
    return known["run"], (known["parent"] or {}).get("path")


def _looked_over(run_dir: Path, request: str | Path, log: Log) -> str:
    """Return what to go on from: "auto" where the run was forked from `request` before."""
    directory = run_dir / "checkpoints"
    if os.path.lexists(directory) and not directory.is_dir():
        link = f"a link to {directory.readlink()}, which is" if directory.is_symlink() else ""
        raise CheckpointError(
            f"resume: {directory} is {link or 'a file and'} no directory",
            where=directory,
            want="a directory",
            hint="mount or put back what it leads to, or choose another --out",
        )
    parent = None if request in ("auto", "never") else _identity(run_dir)[1]
    if parent is None or Path(parent).resolve() != Path(request).resolve():
        return str(request)
    # Taken at its word, the command of a requeued job would begin at the fork each time.
    if not list_checkpoints(directory):
        _refuse_lost(run_dir)
        return str(request)
    log(f"this run was forked from {request} before, and goes on with its own checkpoints")
    return "auto"


def _refuse_lost(run_dir: Path) -> None:
    """Refuse to begin afresh, or at a fork again, where the run has saved what is not there."""
    told = saved_before(run_dir)
    if told is not None:
        raise CheckpointError(
            f"resume: {run_dir / told} tells that this run has saved, but there is no checkpoint "
            f"in {run_dir / 'checkpoints'}",
            where=run_dir / "checkpoints",
            want="the checkpoints of this run",
            hint="mount or put back what is missing; to begin afresh all the same say --resume "
            "never, or choose another --out",
        )


def _begin_afresh(run_dir: Path, request: str | Path, log: Log) -> None:
    clear_directory(run_dir / "checkpoints", None, request, log=log)
    if request == "never" and (run_dir / "run.json").exists():
        fork_run(run_dir, None)  # another run, whose parent is none


def _is_fork(run_dir: Path, path: Path, manifest: Mapping[str, Any], request: str | Path) -> bool:
    """Say whether going on from `path`, which was asked for, begins another run."""
    if request == "auto":
        return False
    own, _ = _identity(run_dir)
    is_inside = path.resolve().parent == (run_dir / "checkpoints").resolve()
    if own is None or manifest.get("run") is None:
        return not is_inside
    return own != manifest["run"]


def _owner_notes(path: Path, *, strict: bool) -> list[str]:
    problems = owner_problems(path)
    if problems and strict:
        raise CheckpointError(
            f"resume: {problems[0]}",
            where=path,
            got=problems,
            want="a checkpoint that only this user can write",
            hint="chown or chmod it once you trust it",
        )
    return [f"note that {problem}" for problem in problems]


def _machine_notes(saved: Mapping[str, Any] | None, ps: ParallelState) -> list[str]:
    """Say whether sums may come out in another order than where the checkpoint was written."""
    then = saved or {}
    differing = [
        f"{name} {then[name]}, now {value}"
        for name, value in machine_of(ps.device).items()
        if name in then and then[name] != value
    ]
    told = f"it was written with {'; '.join(differing)}: the last bits may differ from here on"
    return [told] if differing else []
