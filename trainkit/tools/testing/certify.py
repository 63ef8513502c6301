"""The certificate: any layout gives the numbers of one process, shown for a model of your own.

A model is trained for a few steps on one process, as a plain module, and then in each layout, from
the same weights on the same tokens. What comes out is compared: the loss and the gradient norm of
every step, and every parameter, buffer and number of the optimizer after the last.
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
    alone: tuple[Callable[[], nn.Module], Weights] | None = None,
    device: str = "cpu",
) -> Certificate:
    """Train a model for some steps in each layout, and compare it with one process.

    Every function given is sent to other processes by name, so it stands at the top level of a
    module (or is a `functools.partial` of such a function), and a script guards what it starts with
    `if __name__ == "__main__"`. For that reason `plan` is a function, not a list: transforms are
    closures, which cannot be sent.

    The certificate deals the rows of a step to the ranks, cuts microbatches, and shards sequences,
    as `make_step_batch` does for a recipe. Layouts of the same number of ranks share one start of
    processes; one that fails or hangs is a red row and the others go on in a new start.

    Args:
        make_model: Makes the whole model; called under the meta device, and twice for real, for
            what layouts are compared with. What a plan would change of a model belongs in here.
        make_batches: From a step, 0 to `steps` - 1, to the `Batch` of the whole global batch
            `[R, S]`, always the same. For ring degree N every document must divide by 2N (pack with
            `multiple_of`).
        cases: What to compare; see `make_default_cases`.
        plan: The transforms of a layout, as a recipe lists them.
        loss: A `Loss` that says its `terms`, or a function of the `ParallelState` that gives one,
            for a loss that communicates.
        call: How a batch enters the model.
        weights: The initial values, but for adapters that `make_model` adds by `lora(...)`, which
            bring their own; its `values=` gives them others.
        optimizer: From the stages and the pipeline's axis to an optimizer; by default
            `certificate_optimizer`, and `integer_steps` in the tier "exact".
        split: How the model is cut into pipeline stages, as for `build_stages`.
        steps: How many optimizer steps to take.
        tier: "fp64", "fp32", "bf16" or "exact"; see `TIERS`. The model is cast to its dtype; one
            that is made in several dtypes keeps them, of which the lowest must be that of the tier:
            "bf16" for a model in bf16 with norms in fp32. For "exact" the model must keep
            integers integers, and the number of valid tokens of a step must be a power of two.
        lr: The learning rate: 0.01 by default. `integer_steps` wants the number of valid tokens.
        max_norm: What gradients are clipped to; never in the tier "exact".
        title: What the certificate calls the model; the name of `make_model` by default.
        timeout: Seconds a layout may take before it counts as hung.
        log: Called with a line after every layout: how it went, and the time left.
        alone: What makes the model of the one process, and its weights, where matrices in few bits
            are compared with plain ones of the same values; see `adapters.frozen.round_weights`.
        device: "cpu", or "cuda" for one rank on each GPU, with NCCL between them. The bounds of the
            tiers were measured on CPUs.

    Returns:
        The certificate, its rows in the order of `cases`, and before them that of `check_packing`,
        on the batch of the first step: a model that computes one packed document from another makes
        the certificate red.

    Raises:
        ValueError: An argument is wrong, two cases have one name, a function cannot be sent, or
            the numbers of one process alone are not finite.
        ConfigError: A case has more ranks than this machine has GPUs, on "cuda".
        RankError: One process alone cannot train the model.

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
        max_norm=None if is_exact else max_norm,
        alone=alone,
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

    What a process does when it first trains in a layout, it does once for all models: that takes
    less time than one `certify` after the other.

    Args:
        subjects: What is trained, and the cases to compare.
        timeout: As for `certify`; the models on one process have as much each, together.
        log: As for `certify`; those of fewer ranks come first.
        device: As for `certify`.

    Raises:
        ValueError: As for `certify`.
        ConfigError: As for `certify`.
        RankError: One process alone cannot train one of the models.

    Effects:
        Those of `certify`.
    """
    for training, cases in subjects:
        _check(training, cases)
        check_devices("certify", max(case.world for case in cases), device)
    trainings = [training for training, _ in subjects]
    (alone,) = run_ranks(
        _train_alone, 1, *trainings, timeout=timeout * len(subjects), device=device
    )
    every: list[_Job] = []
    for (training, cases), (wanted, _) in zip(subjects, alone, strict=True):
        if wanted is not None:
            _check_finite(wanted, training.title)
            every += [_Job(training, case, wanted) for case in cases]
    found: dict[int, CertificateRow] = {}
    report = partial(_report_progress, log, every, found, begin=time.monotonic())
    for world in sorted({job.case.world for job in every}):
        jobs = {index: job for index, job in enumerate(every) if job.case.world == world}
        while jobs:  # a layout that fails ends its start; those after it go on in the next
            found |= _run_jobs(jobs, timeout, report, device)
            jobs = {index: job for index, job in jobs.items() if index not in found}
    rows = iter(found[index] for index in range(len(every)))
    untrained = "not trained, because the model computes a packed document from others"
    return [
        Certificate(
            training.title,
            training.tier,
            training.steps,
            tuple(CertificateRow(case.name, case.world, error=untrained) for case in cases)
            if wanted is None
            else (*islice(rows, len(cases)),),
            packing=packing,
        )
        for (training, cases), (wanted, packing) in zip(subjects, alone, strict=True)
    ]


def _check(training: Training, cases: Sequence[LayoutCase]) -> None:
    if training.steps < 1:
        raise ValueError(f"certify: steps must be at least 1, got {training.steps}")
    names = [case.name for case in cases]
    loss = training.loss
    if not names:
        raise ValueError("certify: there must be at least one case, got none")
    duplicates = sorted({name for name in names if names.count(name) > 1})
    if duplicates:
        raise ValueError(
            f"certify: names of cases must differ, but two are called {duplicates[0]!r}; "
            "distinguish them by `note`"
        )
    if not hasattr(loss, "terms") and len(inspect.signature(loss).parameters) != 1:
        raise ValueError(
            f"certify: {loss} is neither a Loss that says its terms nor a function of the "
            "ParallelState; decorate it with losses.declare_terms(...)"
        )


def _check_finite(alone: Outcome, title: str) -> None:
    """Raise ValueError for numbers that are not finite: NaN would equal NaN."""
    for name, values in {**alone.terms, "gradient norm": alone.norms}.items():
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
    """One layout of one model, and what it is compared with."""

    training: Training
    case: LayoutCase
    wanted: Outcome


def _train_alone(*trainings: Training) -> list[tuple[Outcome | None, CertificateRow | None]]:
    """Compare packed documents, and train what does not mix them up; a leaking model is None."""
    found: list[tuple[Outcome | None, CertificateRow | None]] = []
    for training in trainings:
        packing = _make_packing_row(training)
        leaks = packing is not None and packing.error
        found.append((None if leaks else train_plain(training), packing))
    return found


def _make_packing_row(training: Training) -> CertificateRow | None:
    """Compare the packed documents of the first step with each document alone.

    None where a model returns nothing of each token, a loss for one.
    """
    begin = time.monotonic()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = plain_model(training).to(device)
    batch = to_device(training.make_batches(0), torch.device(device))
    with torch.no_grad():
        if not tensors_of(training.call(model, batch), batch.input_ids.shape):
            return None
    row = CertificateRow("packed documents", 1, batches=True)
    try:
        found = check_packing(model, training.call, batch=batch)
    except PackingError as error:
        return attrs.evolve(row, error=str(error), seconds=time.monotonic() - begin)
    return attrs.evolve(
        row,
        loss=found.output,
        grad_norm=0.0,
        parameters=found.gradient,
        state=0.0,
        worst=found.worst,
        seconds=time.monotonic() - begin,
    )


def _run_jobs(
    jobs: Mapping[int, _Job],
    timeout: float,
    report: Callable[[dict[int, CertificateRow]], None],
    device: str,
) -> dict[int, CertificateRow]:
    """Run layouts of one number of ranks until all are done or one fails: its row and those before.

    What ranks find goes into files, so that it survives the rank that fails after it.
    """
    world = next(iter(jobs.values())).case.world
    with tempfile.TemporaryDirectory(prefix="trainkit_certify_") as folder:
        known: dict[int, CertificateRow] = {}

        def meanwhile() -> bool:
            fresh = _read_rows(jobs, Path(folder), skip=known)
            known.update(fresh)
            if fresh:
                report(known)
            return bool(fresh)

        # Beside the jobs what they train: `run_ranks` looks there for functions of a script.
        given = (folder, jobs, *{id(job.training): job.training for job in jobs.values()}.values())
        try:
            run_ranks(
                _compare_all, world, *given, timeout=timeout, device=device, meanwhile=meanwhile
            )
        except RankError as error:
            meanwhile()
            failed = next((index for index in jobs if index not in known), None)
            if failed is None:
                raise
            what, _, traceback = str(error).partition("\n")
            what, name = what.removeprefix("run_ranks: "), jobs[failed].case.name
            known[failed] = CertificateRow(name, world, error=what, traceback=traceback)
            report(known)
        else:
            meanwhile()
        return known


def _compare_all(folder: str, jobs: Mapping[int, _Job], *_: Training) -> None:
    for index, job in jobs.items():
        dist.barrier()  # so that all have written what they found before one can fail in the next
        found = compare_layout(job.training, job.case, job.wanted)
        path = Path(folder) / f"{index}_{dist.get_rank()}"
        path.with_suffix(".part").write_text(json.dumps(attrs.asdict(found)))
        path.with_suffix(".part").rename(path)


def _read_rows(
    jobs: Mapping[int, _Job], folder: Path, *, skip: Mapping[int, CertificateRow]
) -> dict[int, CertificateRow]:
    """Return the rows of the layouts that every rank has finished."""
    rows: dict[int, CertificateRow] = {}
    for index, job in jobs.items():
        paths = [folder / f"{index}_{rank}" for rank in range(job.case.world)]
        if index not in skip and all(path.exists() for path in paths):
            ranks = [Differences(**json.loads(path.read_text())) for path in paths]
            rows[index] = _make_row(job.case, job.wanted, ranks)
    return rows


def _make_row(case: LayoutCase, wanted: Outcome, ranks: Sequence[Differences]) -> CertificateRow:
    parameters = _find_largest_differences(
        wanted.parameters, ranks, [rank.parameters for rank in ranks]
    )
    state = _find_largest_differences(wanted.state, ranks, [rank.state for rank in ranks])
    far = parameters | state
    return CertificateRow(
        case.name,
        case.world,
        loss=max(far for rank in ranks for far in rank.terms.values()),
        grad_norm=max(rank.norm for rank in ranks),
        parameters=max(parameters.values()),
        state=max(state.values(), default=0.0),
        worst=max(far, key=lambda name: far[name]),
        batches=all(rank.batches for rank in ranks),
        seconds=max(rank.seconds for rank in ranks),
        error=_describe_other_parameters(wanted, ranks),
    )


def _find_largest_differences(
    wanted: Mapping[str, Held],
    ranks: Sequence[Differences],
    found: Sequence[Mapping[str, float]],
) -> dict[str, float]:
    """Return the largest difference over ranks by name; infinity if the shards have gaps."""
    far = {name: 0.0 if _is_covered(name, x, ranks) else math.inf for name, x in wanted.items()}
    for rank in found:
        far |= {name: max(distance, far.get(name, 0.0)) for name, distance in rank.items()}
    return far


def _describe_other_parameters(wanted: Outcome, ranks: Sequence[Differences]) -> str:
    """Describe a parameter that only the ranks or only one process has, and its ties."""
    problems = {
        name: f"the ranks do not hold all of {name!r}"
        for name, whole in wanted.parameters.items()
        if not _is_covered(name, whole, ranks)
    }
    held = sorted({name for rank in ranks for name in rank.parameters})
    problems |= {
        name: f"one process does not hold {name!r}"
        for name in held
        if name not in wanted.parameters
    }
    if not problems:
        return ""
    name, problem = next(iter(problems.items()))
    ties = {"one process": wanted.ties, "the ranks": [tie for x in ranks for tie in x.ties]}
    notes = [
        f"; on {where} {' and '.join(map(repr, tie))} are one tensor"
        for where, found in ties.items()
        for tie in dict.fromkeys(map(tuple, found))
        if name in tie
    ]
    return problem + "".join(notes)


def _is_covered(name: str, whole: Held, ranks: Sequence[Differences]) -> bool:
    """Return whether the shards of all ranks cover a tensor."""
    covered = np.zeros(whole.values.shape, bool)
    for offset, shape in (rank.held[name] for rank in ranks if name in rank.held):
        sizes = zip(offset, shape, strict=True)
        covered[tuple(slice(start, start + size) for start, size in sizes)] = True
    return bool(covered.all())


def _report_progress(
    log: Log | None,
    jobs: Sequence[_Job],
    found: Mapping[int, CertificateRow],
    fresh: Mapping[int, CertificateRow],
    *,
    begin: float,
) -> None:
    """Log the result of the newest layout, and the time left, estimated by numbers of ranks."""
    if log is None:
        return
    done = {**found, **fresh}
    newest = list(fresh)[-1]
    job = jobs[newest]
    ranks = sum(jobs[index].case.world for index in done)
    left = (time.monotonic() - begin) * (sum(job.case.world for job in jobs) / ranks - 1)
    verdict = "ok" if is_within(done[newest], job.training.tier) else "RED"
    log(
        f"{verdict} {job.training.title}: {job.case.name} ({len(done)} of {len(jobs)}, about "
        f"{left:.0f} s left)"
    )
