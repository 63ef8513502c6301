"""The certificate of a model: every layout gives the numbers of one process.

A model is trained for a few steps on one process, as a plain module, and then in each layout, from
the same weights on the same tokens. The results are compared: the loss and the gradient norm of
every step, and every parameter, buffer and optimizer state after the last.
"""

from __future__ import annotations

import inspect
import json
import math
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path

import attrs
import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from trainkit.batch import to_device
from trainkit.models import call_model
from trainkit.parallel.packing_leaks import tensors_of
from trainkit.parallel.stages import SplitModel, split_layers
from trainkit.tools.testing.cases import LayoutCase
from trainkit.tools.testing.certificate import Certificate, CertificateRow, is_within, tier_called
from trainkit.tools.testing.exact import integer_steps
from trainkit.tools.testing.packing import PackingError, check_packing
from trainkit.tools.testing.ranks import RankError, check_devices, run_ranks
from trainkit.tools.testing.train import (
    Differences,
    Held,
    MakeLoss,
    MakePlan,
    Optimizers,
    Outcome,
    Training,
    certificate_optimizer,
    certificate_weights,
    compare_layout,
    plain_model,
    train_plain,
)
from trainkit.types import Batch, Call, Log, Loss, Weights


def certify(
    make_model: Callable[[], nn.Module],
    make_batches: Callable[[int], Batch],
    cases: Sequence[LayoutCase],
    *,
    plan: MakePlan,
    loss: Loss | MakeLoss,
    call: Call = call_model,
    weights: Weights = certificate_weights,
    optimizer: Optimizers | None = None,
    split: SplitModel = split_layers,
    steps: int = 3,
    tier: str = "fp64",
    lr: float = 1e-2,
    max_norm: float | None = 0.5,
    title: str | None = None,
    timeout: float = 60.0,
    log: Log | None = None,
    device: str = "cpu",
) -> Certificate:
    """Train a model for some steps in each layout, and compare it with one process.

    All functions are sent to other processes by name, so each must be a function at the top level
    of a module, or a `functools.partial` of one, and a script must guard its code by
    `if __name__ == "__main__"`. This is why `plan` is a function, not a list: transforms are
    closures, which cannot be sent.

    Rows are assigned to ranks, and microbatches and sequence shards made, as by `make_step_batch`.
    Layouts with the same number of ranks share one start of processes. A layout that fails or hangs
    gives a red row, and the remaining ones run in a new start.

    Args:
        make_model: Makes the whole model; called on the meta device, and twice on a real one, for
            the reference.
        make_batches: `make_batches(step)` returns the global batch `[R, S]` of a step, 0 to
            `steps` - 1, always the same. For ring degree N every document must divide by 2N (pack
            with `multiple_of`).
        cases: The layouts to compare; see `make_default_cases`.
        plan: The transforms of a layout, as a recipe lists them.
        loss: A `Loss` with `terms`, or, for a loss that communicates, a function from the
            `ParallelState` to one.
        call: How a batch enters the model.
        weights: The initial values. Adapters that `make_model` adds by `lora(...)` have their own,
            which its `values=` replaces.
        optimizer: From the stages and the pipeline's axis to an optimizer; by default
            `certificate_optimizer`, and `integer_steps` in the tier "exact".
        split: How to split the model into pipeline stages, as for `build_stages`.
        steps: The number of optimizer steps.
        tier: "fp64", "fp32", "bf16" or "exact"; see `TIERS`. The model is cast to its dtype, unless
            it is made in several: then the lowest precision must be that of the tier, as "bf16" for
            a model in bf16 with norms in fp32. For "exact" the model must map integers to integers,
            and the number of valid tokens of a step must be a power of two.
        lr: The learning rate. `integer_steps` needs the number of valid tokens.
        max_norm: Clip gradients to this norm; unused in the tier "exact".
        title: Name of the model in the certificate; that of `make_model` by default.
        timeout: Seconds after which a layout counts as hung.
        log: Called with a line after every layout: its result, and the time left.
        device: "cpu", or "cuda" for one rank on each GPU, with NCCL. The bounds of the tiers were
            measured on CPUs.

    Returns:
        The certificate, with rows in the order of `cases`, and with the result of `check_packing`
        on the batch of the first step: a model that computes one packed document from another makes
        the certificate red.

    Raises:
        ValueError: An argument is wrong, two cases have one name, a function cannot be sent, or
            the reference is not finite.
        ConfigError: On "cuda", a case has more ranks than this machine has GPUs.
        RankError: The model cannot be trained on one process.

    Effects:
        Starts processes, which have ended when it returns; see `run_ranks`.

    Examples:
        >>> from trainkit.tools.testing.builtin import exact_plan
        >>> from trainkit.tools.testing.exact import ExactModel, call_exact, exact_batch, squares
        >>> from trainkit.types import Layout
        >>> found = certify(
        ...     ExactModel,
        ...     exact_batch,
        ...     [LayoutCase(Layout(dp_shard=2))],
        ...     plan=exact_plan,
        ...     loss=squares,
        ...     call=call_exact,
        ...     steps=1,
        ... )
        >>> found.ok, found.rows[0].layout
        (True, 'dp2')
    """
    chosen = tier_called(tier)
    is_exact = chosen.name == "exact"
    training = Training(
        # A partial has no name, so that its type has to do.
        title=title or getattr(make_model, "__name__", type(make_model).__name__),
        tier=chosen,
        make_model=make_model,
        make_batches=make_batches,
        plan=plan,
        loss=loss,
        call=call,
        steps=steps,
        weights=weights,
        optimizer=optimizer or (integer_steps if is_exact else certificate_optimizer),
        split=split,
        lr=lr,
        # The factor of clipping is no integer.
        max_norm=None if is_exact else max_norm,
    )
    return certify_together([(training, cases)], timeout=timeout, log=log, device=device)[0]


def certify_together(
    subjects: Sequence[tuple[Training, Sequence[LayoutCase]]],
    *,
    timeout: float,
    log: Log | None = None,
    device: str = "cpu",
) -> list[Certificate]:
    """Return the certificates of several models, whose layouts share the starts of processes.

    That is faster than calling `certify` for each, because a process warms up once for all models.

    Args:
        subjects: The trainings, each with its cases.
        timeout: As for `certify`; the references have this much each, together.
        log: As for `certify`; layouts with fewer ranks come first.
        device: As for `certify`.

    Raises:
        ValueError: As for `certify`.
        ConfigError: As for `certify`.
        RankError: One of the models cannot be trained on one process.

    Effects:
        Those of `certify`.
    """
    for training, cases in subjects:
        _check_training(training, cases)
        check_devices("certify", max(case.world for case in cases), device)
    trainings = [training for training, _ in subjects]
    # One rank returns one result, which has an entry for each model.
    (references,) = run_ranks(
        _train_references, 1, *trainings, timeout=timeout * len(subjects), device=device
    )
    jobs: list[_Job] = []
    for (training, cases), (reference, _) in zip(subjects, references, strict=True):
        if reference is not None:
            _check_finite(reference, training.title)
            jobs += [_Job(training, case, reference) for case in cases]
    found: dict[int, CertificateRow] = {}
    report = partial(_report_progress, log, jobs, found, start=time.monotonic())
    for world in sorted({job.case.world for job in jobs}):
        # Layouts with equal numbers of ranks share a start, whose processes warm up once.
        remaining = {index: job for index, job in enumerate(jobs) if job.case.world == world}
        while remaining:  # a layout that fails ends its start; those after it run in the next
            found |= _run_jobs(remaining, timeout, report, device)
            remaining = {index: job for index, job in remaining.items() if index not in found}
    # In the order of the jobs; a model that leaks has none, and rows of its own below.
    rows = iter(found[index] for index in range(len(jobs)))
    untrained = "not trained, because the model computes a packed document from others"
    return [
        Certificate(
            training.title,
            training.tier,
            training.steps,
            tuple(CertificateRow(case.name, case.world, error=untrained) for case in cases)
            if reference is None
            else (*islice(rows, len(cases)),),
            packing=packing,
        )
        for (training, cases), (reference, packing) in zip(subjects, references, strict=True)
    ]


def _check_training(training: Training, cases: Sequence[LayoutCase]) -> None:
    if training.steps < 1:
        raise ValueError(f"certify: steps must be at least 1, got {training.steps}")
    if not cases:
        raise ValueError("certify: there must be at least one case, got none")
    # A row of the certificate has nothing but its name to say which case it is.
    names = [case.name for case in cases]
    duplicates = sorted({name for name in names if names.count(name) > 1})
    if duplicates:
        raise ValueError(
            f"certify: names of cases must differ, but two are called {duplicates[0]!r}; "
            "distinguish them by `note`"
        )
    loss = training.loss
    # A `Loss` takes an output and a batch, and a `MakeLoss` the `ParallelState` alone.
    if not hasattr(loss, "terms") and len(inspect.signature(loss).parameters) != 1:
        raise ValueError(
            f"certify: {loss} is neither a Loss with its terms nor a function of the "
            "ParallelState; decorate it with losses.declare_terms(...)"
        )


def _check_finite(reference: Outcome, title: str) -> None:
    """Raise ValueError for numbers that are not finite: NaN would equal NaN."""
    for name, values in {**reference.terms, "gradient norm": reference.norms}.items():
        for step, value in enumerate(values):
            if not math.isfinite(value):
                raise ValueError(
                    f"certify: {title} on one process alone has a {name} of {value} in step "
                    f"{step}, with which nothing can be compared; choose other weights or a "
                    "lower lr"
                )


# ------------------------------------------------------------------------------- a start of ranks


@attrs.frozen(eq=False)
class _Job:
    """One layout of one model, with the outcome on one process."""

    training: Training
    case: LayoutCase
    reference: Outcome


def _train_references(*trainings: Training) -> list[tuple[Outcome | None, CertificateRow | None]]:
    """Return each model's outcome on one process, or None if it leaks, and its row of packing."""
    results: list[tuple[Outcome | None, CertificateRow | None]] = []
    for training in trainings:
        packing = _make_packing_row(training)
        leaks = packing is not None and packing.error
        results.append((None if leaks else train_plain(training), packing))
    return results


def _make_packing_row(training: Training) -> CertificateRow | None:
    """Compare the packed documents of the first step with each document alone.

    Returns None for a model without an output per token, such as one that returns its loss.
    """
    start = time.monotonic()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = plain_model(training).to(device)
    batch = to_device(training.make_batches(0), torch.device(device))
    with torch.no_grad():
        if not tensors_of(training.call(model, batch), batch.input_ids.shape):
            return None
    # One process has the tokens of its batch, by definition.
    row = CertificateRow("packed documents", 1, batches=True)
    try:
        found = check_packing(model, training.call, batch=batch)
    except PackingError as error:
        return attrs.evolve(row, error=str(error), seconds=time.monotonic() - start)
    return attrs.evolve(
        row,
        loss=found.output,
        # This row has no training, so its columns for that are 0.
        grad_norm=0.0,
        parameters=found.gradient,
        state=0.0,
        worst=found.worst,
        seconds=time.monotonic() - start,
    )


def _run_jobs(
    jobs: Mapping[int, _Job],
    timeout: float,
    report: Callable[[dict[int, CertificateRow]], None],
    device: str,
) -> dict[int, CertificateRow]:
    """Run layouts of one number of ranks until all are done or one fails, and return their rows.

    Ranks write their results to files, which survive the failure of a later layout.
    """
    world = next(iter(jobs.values())).case.world  # the same for all of them
    with tempfile.TemporaryDirectory(prefix="trainkit_certify_") as folder:
        rows: dict[int, CertificateRow] = {}

        # `run_ranks` calls this while it waits; True starts its timeout anew.
        def update_rows() -> bool:
            new_rows = _read_rows(jobs, Path(folder), skip=rows)
            rows.update(new_rows)
            if new_rows:
                report(rows)
            return bool(new_rows)

        # `run_ranks` looks for functions of a script in its arguments, but not inside jobs, so the
        # trainings are arguments too.
        trainings = {id(job.training): job.training for job in jobs.values()}.values()
        try:
            run_ranks(
                _compare_layouts,
                world,
                folder,
                jobs,
                *trainings,
                timeout=timeout,
                device=device,
                meanwhile=update_rows,
            )
        except RankError as error:
            update_rows()
            # Ranks take the layouts in order, so the first without a result is the one that failed.
            failed = next((index for index in jobs if index not in rows), None)
            if failed is None:
                raise
            # The first line says what happened; the traceback of the rank is below it.
            message, _, traceback = str(error).partition("\n")
            message = message.removeprefix("run_ranks: ")
            name = jobs[failed].case.name
            rows[failed] = CertificateRow(name, world, error=message, traceback=traceback)
            report(rows)
        else:
            update_rows()
        return rows


def _compare_layouts(folder: str, jobs: Mapping[int, _Job], *_: Training) -> None:
    for index, job in jobs.items():
        dist.barrier()  # so that all ranks have written a result before one can fail in the next
        result = compare_layout(job.training, job.case, job.reference)
        path = Path(folder) / f"{index}_{dist.get_rank()}"
        # Renamed when it is complete, because the parent reads whatever exists.
        path.with_suffix(".part").write_text(json.dumps(attrs.asdict(result)))
        path.with_suffix(".part").rename(path)


def _read_rows(
    jobs: Mapping[int, _Job], folder: Path, *, skip: Mapping[int, CertificateRow]
) -> dict[int, CertificateRow]:
    """Return the rows of the layouts that every rank has finished."""
    rows: dict[int, CertificateRow] = {}
    for index, job in jobs.items():
        paths = [folder / f"{index}_{rank}" for rank in range(job.case.world)]
        if index in skip or not all(path.exists() for path in paths):
            continue
        # JSON has no tuples: offsets and shapes come back as lists.
        ranks = [Differences(**json.loads(path.read_text())) for path in paths]
        reference = job.reference
        parameters = _find_largest_differences(
            reference.parameters, ranks, [rank.parameters for rank in ranks]
        )
        state = _find_largest_differences(reference.state, ranks, [rank.state for rank in ranks])
        differences = parameters | state
        # Each column shows the worst rank.
        rows[index] = CertificateRow(
            job.case.name,
            job.case.world,
            loss=max(difference for rank in ranks for difference in rank.terms.values()),
            grad_norm=max(rank.norm for rank in ranks),
            parameters=max(parameters.values()),
            state=max(state.values(), default=0.0),
            worst=max(differences, key=lambda name: differences[name]),
            batches=all(rank.batches for rank in ranks),
            seconds=max(rank.seconds for rank in ranks),
            error=_describe_other_parameters(reference, ranks),
        )
    return rows


def _find_largest_differences(
    wanted: Mapping[str, Held],
    ranks: Sequence[Differences],
    by_rank: Sequence[Mapping[str, float]],
) -> dict[str, float]:
    """Return the largest difference over ranks by name; infinity if the shards have gaps."""
    # Each rank compares its own shards, which would not show elements that no rank has.
    result = {name: 0.0 if _is_covered(name, x, ranks) else math.inf for name, x in wanted.items()}
    for differences in by_rank:
        for name, difference in differences.items():
            result[name] = max(difference, result.get(name, 0.0))
    return result


def _describe_other_parameters(reference: Outcome, ranks: Sequence[Differences]) -> str:
    """Describe a parameter that only the ranks or only one process has, and its ties."""
    problems = {
        name: f"the ranks do not hold all of {name!r}"
        for name, full in reference.parameters.items()
        if not _is_covered(name, full, ranks)
    }
    held = sorted({name for rank in ranks for name in rank.parameters})
    problems |= {
        name: f"one process does not hold {name!r}"
        for name in held
        if name not in reference.parameters
    }
    if not problems:
        return ""
    name, problem = next(iter(problems.items()))
    ties = {"one process": reference.ties, "the ranks": [tie for x in ranks for tie in x.ties]}
    # JSON has made the ranks' ties lists, which cannot be keys.
    notes = [
        f"; on {where} {' and '.join(map(repr, tie))} are one tensor"
        for where, found in ties.items()
        for tie in dict.fromkeys(map(tuple, found))
        if name in tie
    ]
    return problem + "".join(notes)


def _is_covered(name: str, full: Held, ranks: Sequence[Differences]) -> bool:
    """Return whether the shards of all ranks cover a tensor."""
    # A mask, not a sum of sizes: replicas have the same elements several times.
    covered = np.zeros(full.values.shape, bool)
    for offset, shape in (rank.held[name] for rank in ranks if name in rank.held):
        sizes = zip(offset, shape, strict=True)
        covered[tuple(slice(start, start + size) for start, size in sizes)] = True
    return bool(covered.all())


def _report_progress(
    log: Log | None,
    jobs: Sequence[_Job],
    found: Mapping[int, CertificateRow],
    new_rows: Mapping[int, CertificateRow],
    *,
    start: float,
) -> None:
    """Log the result of the newest layout, and the time left, estimated by numbers of ranks."""
    if log is None:
        return
    done = {**found, **new_rows}
    newest = list(new_rows)[-1]
    job = jobs[newest]
    # Ranks share the cores, so the time of a layout is about proportional to its ranks.
    ranks = sum(jobs[index].case.world for index in done)
    all_ranks = sum(job.case.world for job in jobs)
    left = (time.monotonic() - start) * (all_ranks / ranks - 1)
    verdict = "ok" if is_within(done[newest], job.training.tier) else "RED"
    log(
        f"{verdict} {job.training.title}: {job.case.name} ({len(done)} of {len(jobs)}, about "
        f"{left:.0f} s left)"
    )
