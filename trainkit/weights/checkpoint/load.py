"""Load a checkpoint into any layout: verify, compare, read all of it, and only then write."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainkit.collectives import run_on_all_ranks
from trainkit.parallel.parameters import modules_of
from trainkit.types import (
    SOLO,
    Axis,
    CheckpointError,
    Log,
    ParallelState,
    TrainState,
    log_warning,
)
from trainkit.weights.checkpoint.compare import Tolerance
from trainkit.weights.checkpoint.components import Components, check_components
from trainkit.weights.checkpoint.facts import (
    Facts,
    ResumeRules,
    check_allowed,
    check_facts_agree,
    compare_facts,
    facts_at,
    list_allowed_names,
    may_change_optimizer,
)
from trainkit.weights.checkpoint.load_components import (
    compare_components,
    get_device,
    install_components_,
)
from trainkit.weights.checkpoint.manifest import (
    clear_directory,
    damage_error,
    inspect_files,
    list_checkpoints,
    no_checkpoint_error,
    parse_step,
)
from trainkit.weights.checkpoint.run_id import find_saved_mark, fork_run, get_run_id
from trainkit.weights.checkpoint.safe_files import find_owner_problems, read_json
from trainkit.weights.checkpoint.snapshot import describe_machine
from trainkit.weights.checkpoint.staging import (
    CheckFacts,
    Staged,
    count_messages,
    install_,
    stage_checkpoint,
)

_NO_RULES = ResumeRules()


def resume(
    run_dir: Path | str,
    state: TrainState,
    stages: Sequence[nn.Module] | nn.Module,
    optimizer: torch.optim.Optimizer,
    ps: ParallelState,
    *,
    request: str | Path = "auto",
    facts: Facts | None = None,
    rules: ResumeRules = _NO_RULES,
    strict_owner: bool = False,
    log: Log = log_warning,
    components: Components | None = None,
) -> TrainState:
    """Resume a run from one of its checkpoints, written in any layout.

    A checkpoint of another run is never taken by mistake. If one is requested by its path, this run
    becomes a fork with an id of its own, and the other run stays as it is. Checkpoints of this run
    that are not on the branch that it resumes from (all of them after "never", later ones after a
    path) are moved to `checkpoints/abandoned-1`, so that "auto" never returns to them. Nothing is
    deleted except the incomplete output of a killed save.

    Args:
        run_dir: The run directory.
        state: The counters of a new run, returned when there is nothing to resume from.
        stages: This rank's stages, with any values.
        optimizer: The optimizer of their parameters.
        ps: The layout.
        request: "auto" takes the newest checkpoint that verifies, and starts from scratch only if
            nothing shows that the run has saved; "never" takes none; a path takes that one, or acts
            as "auto" if the run was forked from it earlier and has saved since.
        facts: Values that must be as they were saved, for instance the fingerprint of the data; or
            a function of the number of global batches. Equal on all ranks.
        rules: Which facts may have changed, and which changes the user allows. If "optimizer",
            "moments", "mean", or a name that begins with "optimizer_" may change, another optimizer
            than the saved one carries over what it can, which is logged; see
            `optimizer_switch.select_carried_over`.
        strict_owner: Raise for a checkpoint that other users own or can write; by default that is
            only logged.
        log: Called on rank 0 with what was skipped, taken, changed and moved.
        components: Objects whose state is loaded too, by name: anything with `state_dict` and
            `load_state_dict`, or a `Component`. If "components" may change by `rules`, only those
            that the checkpoint has are loaded, and its others are left out.

    Returns:
        The counters of the checkpoint.

    Raises:
        CheckpointError: There are checkpoints and none verifies, or none is left of a run that has
            saved; the checkpoint is of another run, or does not fit this one.
        ConfigError: The ranks do not agree on `facts`, a fact that is allowed to change cannot, or
            a component has a state that no checkpoint can hold.

    Effects:
        Writes parameters and optimizer state, on all ranks or on none, after everything has been
        verified, compared and read; moves directories; communicates on `ps.world`.
    """
    stages = modules_of(stages)
    check_allowed(rules)
    # Before the first step, not at the first save, hours later.
    check_components(components, ps.world, by="resume")
    tolerance = Tolerance(optimizer=may_change_optimizer(rules), options=list_allowed_names(rules))
    run_dir = Path(run_dir)
    is_first = ps.world.index == 0
    log = log if is_first else (lambda _: None)
    # The facts after all batches: the ranks must also agree on phases that have not started.
    check_facts_agree(facts_at(facts, sys.maxsize), ps.world)
    # Every rank looks at the disk, and the answer of the first one counts.
    request = run_on_all_ranks(lambda: _check_request(run_dir, request, log), ps.world)[0]

    def run_on_first(work: Callable[[], Any]) -> Any:
        return run_on_all_ranks(lambda: work() if is_first else None, ps.world)[0]

    skipped: list[str] = []
    # Only the first rank lists the directory: on a network disk others may see another state.
    candidates = _find_candidates(run_dir, request, skipped, log)
    # Staging communicates: all ranks stage the same candidate, and go on to the next one together.
    while True:
        chosen = run_on_first(lambda: next(candidates, None))
        # No candidate means a new run: if all checkpoints were damaged, `next` would have raised.
        if chosen is None:
            run_on_first(lambda: _prepare_directory(run_dir, None, {}, request, log))
            return state
        path, manifest = Path(chosen[0]), chosen[1]
        # Of this candidate alone: changes in one that is skipped do not matter.
        messages: list[str] = []
        staged = stage_checkpoint(
            path,
            manifest,
            stages,
            optimizer,
            axis=ps.world,
            check=_make_check(facts, rules, messages, components, ranks=ps.world.count),
            tolerance=tolerance,
            components=components,
        )
        if not staged.problems:
            break
        _skip(path, staged.problems, request, skipped, log)

    # Their own code may fail: before anything else of the run is written.
    _install_components(staged, components, stages, ps.world)

    # The last step that may fail: everything has been read, and nothing of the run is written yet.
    def accept() -> None:
        notes = _check_owner(path, strict=strict_owner)
        notes += [*messages, *count_messages(staged.changes)]
        notes += _compare_machine(staged.saved["machine"], ps)
        newest = list_checkpoints(path.parent)[0] if skipped else path
        # Skipped checkpoints are newer: these steps must be trained again.
        lost = parse_step(newest) - manifest["step"] if skipped else 0
        log(f"resuming from {path}" + f", {lost} steps before {newest.name}" * bool(lost))
        for note in notes:
            log(note)
        _prepare_directory(run_dir, path, manifest, request, log)

    run_on_first(accept)
    # From here on nothing can fail on one rank alone.
    return install_(staged, stages, optimizer)


def load_checkpoint(
    path: Path | str,
    stages: Sequence[nn.Module] | nn.Module,
    optimizer: torch.optim.Optimizer | None,
    *,
    facts: Facts | None = None,
    rules: ResumeRules = _NO_RULES,
    allow_missing: Sequence[str] = (),
    allow_extra: Sequence[str] = (),
    cast: Sequence[str] = (),
    axis: Axis = SOLO,
    log: Log = log_warning,
    components: Components | None = None,
) -> TrainState:
    """Verify one checkpoint and load it into stages and their optimizer.

    Parameters that may be missing or different are given by patterns of names, in which `*` matches
    any letters.

    Args:
        path: The checkpoint's directory.
        stages: This rank's stages.
        optimizer: The optimizer of their parameters; None ignores the saved optimizer state.
        facts: Values that must be as they were saved; see `resume`.
        rules: Which facts may have changed; see `resume`.
        allow_missing: Parameters that the checkpoint may lack, or have without moments. They keep
            their values, and start without moments.
        allow_extra: Parameters of the checkpoint that the run may lack or not train.
        cast: Parameters that may be stored in another floating dtype.
        axis: All ranks that load it, `ps.world`: if one fails, none changes anything.
        log: Called on the first rank with each change that `rules` allow.
        components: Objects whose state is loaded too; see `resume`.

    Returns:
        The counters of the checkpoint.

    Raises:
        CheckpointError: It is damaged; or it does not fit, and the message lists every tensor that
            is missing, left over, or of another shape or dtype, and every fact that differs.

    Effects:
        Writes parameters and optimizer state, after everything has been verified, compared and
        read; communicates on `axis`.
    """
    stages = modules_of(stages)
    check_allowed(rules)
    path = Path(path)
    # One rank reads it, so that all ranks compare with the same manifest.
    manifest = run_on_all_ranks(lambda: _read_outline(path) if axis.index == 0 else None, axis)[0]
    messages: list[str] = []
    staged = stage_checkpoint(
        path,
        manifest,
        stages,
        optimizer,
        axis=axis,
        check=_make_check(
            facts,
            rules,
            messages,
            components,
            ranks=axis.count,
            # Without the optimizer the weights alone are wanted.
            needs_components=bool(optimizer is not None or components),
        ),
        components=components,
        tolerance=Tolerance(
            missing=allow_missing,
            extra=allow_extra,
            cast=cast,
            optimizer=may_change_optimizer(rules),
            options=list_allowed_names(rules),
        ),
    )
    # There is no other to fall back on: this one was requested by its path.
    if staged.problems:
        raise damage_error(path, staged.problems)
    _install_components(staged, components, stages, axis)
    if axis.index == 0:
        for message in (*messages, *count_messages(staged.changes)):
            log(message)
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
    """Verify one checkpoint and load its parameters, without the optimizer state.

    Args:
        path: The checkpoint's directory.
        stages: This rank's stages.
        allow_missing: Patterns of parameters that the checkpoint may lack, for instance adapters.
        allow_extra: Patterns of parameters of the checkpoint that the stages may lack.
        cast: Patterns of parameters that may be stored in another floating dtype.
        axis: The ranks that hold the other stages, `ps.pp` or `ps.world`.

    Returns:
        The counters of the checkpoint.

    Raises:
        CheckpointError: It is damaged; or it does not fit, and the message lists every parameter
            that is missing, left over, or of another shape or dtype.

    Effects:
        Writes the parameters and persistent buffers of `stages`; communicates on `axis`.
    """
    return load_checkpoint(
        path,
        stages,
        None,
        allow_missing=allow_missing,
        allow_extra=allow_extra,
        cast=cast,
        axis=axis,
    )


def read_facts(path: Path | str, *, needs: Sequence[str] = ()) -> dict[str, Any]:
    """Return the facts that were saved with a checkpoint, which has been verified.

    Args:
        path: The checkpoint's directory.
        needs: Facts that must be among them.

    Raises:
        CheckpointError: One is missing: another kind of recipe saved the checkpoint.
    """
    facts = read_json(Path(path) / "state.json")["facts"]
    missing = [name for name in needs if name not in facts]
    if missing:
        raise CheckpointError(
            f"read_facts: {path} does not say its {', '.join(missing)}: the script that saved it "
            "did not give them to the run",
            where=path,
            got=sorted(facts),
            want=list(needs),
            hint="a run that starts with run.resume(..., model=config, tokenizer=tokenizer, "
            "context=256) says what model it is; facts of your own are in its argument facts",
        )
    return facts


def _read_outline(path: Path) -> dict[str, Any]:
    """Return the manifest of a requested checkpoint whose files have the right sizes."""
    problems, manifest = inspect_files(path)
    if problems:
        raise damage_error(path, problems)
    return manifest


def _make_check(
    facts: Facts | None,
    rules: ResumeRules,
    messages: list[str],
    components: Components | None,
    *,
    ranks: int,
    needs_components: bool = True,
) -> CheckFacts:
    """Return a check of the saved facts and components; it puts allowed changes into `messages`."""
    may_change = "components" in {*rules.allow, *list_allowed_names(rules)}

    def check(saved: Mapping[str, Any]) -> list[str]:
        # Facts of later phases may have changed: those at the saved batch are compared.
        live = facts_at(facts, saved["state"]["cursor"]["batch"])
        errors, allowed = compare_facts(saved["facts"], live, rules)
        messages[:] = allowed
        if needs_components:
            found = compare_components(
                saved.get("components", {}), components, ranks=ranks, may_change=may_change
            )
            errors += found[0]
            messages.extend(found[1])
        return errors

    return check


def _install_components(
    staged: Staged,
    components: Components | None,
    stages: Sequence[nn.Module],
    axis: Axis,
) -> None:
    install_components_(
        staged.saved.get("components", {}),
        staged.components,
        components,
        device=get_device(stages),
        axis=axis,
    )


# ----------------------------------------------------------------------------------------- choosing


def _find_candidates(
    run_dir: Path,
    request: str | Path,
    skipped: list[str],
    log: Log,
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the checkpoints that the run may resume from, the best first, with their manifests.

    Their tensors are not verified yet. The caller adds a checkpoint that turns out to be damaged to
    `skipped`.
    """
    if request == "never":
        return
    directory = run_dir / "checkpoints"
    if request != "auto":
        path = Path(request).absolute()  # it may become the parent in `run.json`
        yield str(path), _read_outline(path)
        return
    checkpoints = list_checkpoints(directory)
    if not checkpoints:
        # An empty directory may also be a disk that is not mounted.
        _check_never_saved(run_dir)
        parent = _read_run_id(run_dir)[1]
        if parent is not None:  # a fork that has not saved yet starts again from its parent
            yield parent, _read_outline(Path(parent))
        return
    own, _ = _read_run_id(run_dir)
    # One by one: all ranks hash a candidate before the next is considered.
    for path in checkpoints:
        problems, manifest = inspect_files(path)
        if problems:
            _skip(path, problems, request, skipped, log)
            continue
        other = manifest.get("run")
        # None where `run.json` is lost, or the checkpoint has the first format.
        if own is not None and other is not None and own != other:
            raise CheckpointError(
                f"resume: {path} has the run_id {other}, this run has {own}: it was copied from "
                "another run",
                where=path,
                got=other,
                want=own,
                hint=f"--resume {path} makes this run a fork of that one; or move it elsewhere",
            )
        yield str(path.absolute()), manifest  # plain values, which travel to the other ranks
    # Here only if the caller has rejected every one.
    if skipped:
        raise no_checkpoint_error(directory, skipped)


def _skip(
    path: Path,
    problems: Sequence[str],
    request: str | Path,
    skipped: list[str],
    log: Log,
) -> None:
    """Log and record a damaged checkpoint, or raise if it was requested."""
    if request != "auto":
        raise damage_error(path, problems)
    skipped.append(f"{path.name}: {problems[0]}")
    log(f"skipped {path}: {problems[0]}")


def _read_run_id(run_dir: Path) -> tuple[str | None, str | None]:
    """Return the id of the run and the path that it was forked from, if the directory has them."""
    if not (run_dir / "run.json").exists():
        return None, None
    identity = get_run_id(run_dir)
    return identity["run"], (identity["parent"] or {}).get("path")


def _check_request(run_dir: Path, request: str | Path, log: Log) -> str:
    """Return what to resume from: "auto" if the run was forked from `request` earlier."""
    directory = run_dir / "checkpoints"
    # A dangling link: its volume is not mounted. A new directory in its place would hide that.
    if os.path.lexists(directory) and not directory.is_dir():
        link = f"a link to {directory.readlink()}, which is" if directory.is_symlink() else ""
        raise CheckpointError(
            f"resume: {directory} is {link or 'a file and'} no directory",
            where=directory,
            want="a directory",
            hint="mount or restore the folder that it points to, or choose another --out",
        )
    parent = None if request in ("auto", "never") else _read_run_id(run_dir)[1]
    if parent is None or Path(parent).resolve() != Path(request).resolve():
        return str(request)
    # A job that is requeued runs the same command again. It must not restart at the fork each time.
    if not list_checkpoints(directory):
        _check_never_saved(run_dir)
        return str(request)
    log(f"this run was forked from {request} earlier, and resumes from its own checkpoints")
    return "auto"


def _check_never_saved(run_dir: Path) -> None:
    """Raise if the run has saved checkpoints that no longer exist."""
    file = find_saved_mark(run_dir)
    if file is not None:
        raise CheckpointError(
            f"resume: {run_dir / file} shows that this run has saved, but there is no checkpoint "
            f"in {run_dir / 'checkpoints'}",
            where=run_dir / "checkpoints",
            want="the checkpoints of this run",
            hint="mount or restore what is missing; to start from scratch all the same, use "
            "--resume never or choose another --out",
        )


def _prepare_directory(
    run_dir: Path, path: Path | None, manifest: Mapping[str, Any], request: str | Path, log: Log
) -> None:
    """Move the checkpoints that are not on the run's branch, and give a new run or a fork an id.

    Without `path` the run starts from scratch.
    """
    clear_directory(run_dir / "checkpoints", path, request, log=log)
    if path is None:
        if request == "never" and (run_dir / "run.json").exists():
            fork_run(run_dir, None)  # a new run without a parent
    elif _is_fork(run_dir, path, manifest, request):
        parent = {"run": manifest.get("run"), "step": manifest["step"], "path": str(path)}
        run = fork_run(run_dir, parent)["run"]
        log(f"this is run {run}, forked from {parent['run']}")


def _is_fork(run_dir: Path, path: Path, manifest: Mapping[str, Any], request: str | Path) -> bool:
    """Return whether resuming from the requested checkpoint makes this another run."""
    if request == "auto":
        return False
    own, _ = _read_run_id(run_dir)
    if own is None or manifest.get("run") is None:  # the first format has no ids: go by the path
        return path.resolve().parent != (run_dir / "checkpoints").resolve()
    return own != manifest["run"]


def _check_owner(path: Path, *, strict: bool) -> list[str]:
    """Return messages about other users who can write a checkpoint; raise if `strict`."""
    problems = find_owner_problems(path)
    if problems and strict:
        raise CheckpointError(
            f"resume: {problems[0]}",
            where=path,
            got=problems,
            want="a checkpoint that only this user can write",
            hint="chown or chmod it once you trust it",
        )
    return [f"note that {problem}" for problem in problems]


def _compare_machine(saved: Mapping[str, Any] | None, ps: ParallelState) -> list[str]:
    """Return a message if sums may be taken in another order than where it was written."""
    then = saved or {}  # the first format does not store the machine
    changed = [
        f"{name} {then[name]}, now {value}"
        for name, value in describe_machine(ps.device).items()
        if name in then and then[name] != value
    ]
    if not changed:
        return []
    return [f"it was written with {'; '.join(changed)}: the last bits may differ from here on"]
