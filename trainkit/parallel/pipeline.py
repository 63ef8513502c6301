"""The executor of a pipeline: all microbatches of a step through all stages, one denominator.

Each rank of the pipeline axis has some of the stages. Ranks send hidden states forward and their
gradients back, in the order of one of torch's schedules. Every rank has all other inputs of a
microbatch and looks them up by its index, so they cost no communication and no host sync.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from trainkit.batch.denominators import check_terms, divide_terms, make_divisors
from trainkit.parallel import grad_reduction, stage_forward
from trainkit.parallel.check_layout import check_layout
from trainkit.parallel.recompute import recomputes_selectively
from trainkit.parallel.split import (
    SCHEDULES,
    assign_stages,
    get_needed_microbatches,
)
from trainkit.parallel.stage_ranks import StagePlace, get_stage_places
from trainkit.parallel.tied_embeddings import set_aside_tied
from trainkit.types import (
    Axis,
    Call,
    ConfigError,
    Denominator,
    ForwardBackward,
    Layout,
    Loss,
    Stages,
)

# Schedules that are cached: each has receive buffers for all microbatches of a step.
_CACHED_SCHEDULES = 4


class _Received(torch.autograd.Function):
    """The identity on received tensors; their gradients are contiguous, as sends require."""

    @staticmethod
    def forward(_: Any, *edge: Tensor) -> tuple[Tensor, ...]:  # pyrefly: ignore[bad-override]
        return tuple(x.detach() for x in edge)

    @staticmethod
    def backward(_: Any, *d_edge: Tensor) -> tuple[Tensor, ...]:  # pyrefly: ignore[bad-override]
        return tuple(d_x.contiguous() for d_x in d_edge)


@attrs.define(eq=False)
class _Step:
    """The inputs that stages look up while a schedule runs, and the terms of the last stage."""

    stages: Sequence[nn.Module]
    places: Sequence[StagePlace]
    loss: Loss
    call: Call
    batches: Sequence[Mapping[str, Any]] = ()
    divisors: Denominator | None = None
    reductions: Sequence[grad_reduction.Reduction] = ()
    terms: dict[int, dict[str, Tensor]] = attrs.field(factory=dict)  # by microbatch

    def run(self, stage: nn.Module, index: int, edge: tuple[Tensor, ...]) -> Any:
        """Run a stage's forward pass on a microbatch; return its output, or the loss."""
        batch = self.batches[index]
        place = self.places[[*self.stages].index(stage)]
        # The first stage receives nothing: it reads input_ids.
        received = _Received.apply(*edge) if edge else ()
        output = stage_forward.run_stage(stage, place, batch, received, call=self.call)
        if not place.last:
            boundary = stage_forward.stage_boundary(stage, batch)
            return stage_forward.check_edge(output, boundary, place)
        assert self.divisors is not None
        # torch's schedules know the loss alone, so the terms are collected here.
        total, self.terms[index] = check_terms(self.loss(output, batch), by="forward_backward")
        return divide_terms(total, self.divisors).double()  # fp64, as `Stage` has announced

    def get_reduction(self, stage: nn.Module) -> grad_reduction.Reduction:
        """Return the reduction of a stage's gradients in this step."""
        return self.reductions[[*self.stages].index(stage)]

    def clear(self) -> None:
        """Release the microbatches and the terms."""
        self.batches = ()
        self.divisors = None
        self.reductions = ()
        self.terms.clear()


def make_pipeline(
    stages: Stages,
    loss: Loss,
    *,
    reduce: grad_reduction.Reduce = "last",
) -> ForwardBackward:
    """Make the executor of a pipeline: `forward_backward(microbatches, denominator=...)`.

    It returns the sums, and adds the gradients, of `forward_backward` on the whole model.

    Args:
        stages: This rank's stages, on a pipeline axis of a size above 1.
        loss: The loss, with its `terms`.
        reduce: "last" reduces the gradients of FSDP's units once a step, "each" after every
            microbatch, which needs less memory. Schedules that split the backward pass need "last".

    Raises:
        ConfigError: The stages are not those of the schedule, the loss has no `terms`, or the
            combination would give wrong gradients. The returned function raises it for too few
            microbatches, and a ValueError for microbatches of different shapes.

    Effects:
        None here. The returned function adds to `.grad`, and communicates on the pipeline axis and
        the axes that the stages reduce over. Every rank must pass the same number of microbatches.
    """
    axis = stages.pp
    schedule = stages.layout.schedule
    places = get_stage_places(stages, axis)
    terms = stage_forward.get_term_names(loss)
    _check_stages(stages, places, schedule=schedule, reduce=reduce, axis=axis)
    step = _Step(stages, places, loss, stages.call)
    schedules: dict[Any, Any] = {}
    kinds: dict[str, stage_forward.TermKind] = {}
    last = places[0].ranks[-1]  # the rank that computes the loss

    def get_schedule(edge: tuple[Tensor, ...], microbatches: int) -> Any:
        # torch's stages are made for one shape and one number of microbatches.
        key = (*((tuple(x.shape), x.dtype) for x in edge), microbatches)
        if key not in schedules:
            _check_microbatches(schedule, microbatches, places, axis)
            schedules[key] = _make_schedule(schedule, step, edge, microbatches, axis=axis)
            while len(schedules) > _CACHED_SCHEDULES:
                schedules.pop(next(iter(schedules)))  # the oldest
        return schedules[key]

    def run(
        microbatches: Sequence[Mapping[str, Any]], *, denominator: Denominator
    ) -> dict[str, Tensor]:
        # torch's stages allocate receive buffers of one shape for all microbatches of a schedule.
        edge = _find_common_edge(stages[0], microbatches)
        reducers = [grad_reduction.find_reducers(stage) for stage in stages]
        for stage_reducers in reducers:
            grad_reduction.check_sums(stage_reducers)
        torch_schedule = get_schedule(edge, len(microbatches))
        step.batches = microbatches
        step.divisors = make_divisors(denominator)
        try:
            with set_aside_tied(stages, places, axis):
                _run_schedule(torch_schedule, step, reducers, schedule=schedule, reduce=reduce)
            sums = _sum_terms(step.terms)
        except BaseException:
            schedules.clear()  # a schedule that failed has the state of half a step
            raise
        finally:
            step.clear()
        # The terms' shapes and dtypes are agreed on once: ranks without the loss see no term.
        kinds.update(kinds or stage_forward.agree_on_kinds(sums, terms, axis=axis, source=last))
        device = stage_forward.compute_device(stages[0])
        return stage_forward.share_terms(sums, kinds, axis=axis, source=last, device=device)

    return run


def _run_schedule(
    torch_schedule: Any,
    step: _Step,
    reducers: Sequence[grad_reduction.Reducers],
    *,
    schedule: str,
    reduce: grad_reduction.Reduce,
) -> None:
    """Run a schedule, and reduce the gradients of its stages."""
    from trainkit.parallel.torch_pipeline import run_schedule  # noqa: PLC0415 (slow import)

    # A schedule interleaves the stages of a rank, so all of their reductions are open at once.
    with ExitStack() as stack:
        step.reductions = [
            stack.enter_context(
                grad_reduction.use_reduction(stage, stage_reducers, step.batches, reduce=reduce)
            )
            for stage, stage_reducers in zip(step.stages, reducers, strict=True)
        ]
        run_schedule(
            torch_schedule,
            len(step.batches),
            splits_backward=SCHEDULES[schedule].splits_backward,
        )


def _check_stages(
    stages: Sequence[nn.Module],
    places: Sequence[StagePlace],
    *,
    schedule: str,
    reduce: grad_reduction.Reduce,
    axis: Axis,
) -> None:
    """Raise ConfigError for what torch would run with wrong gradients, or not at all."""
    expected = assign_stages(schedule, axis.count, per_rank=len(places))
    if places[0].ranks != expected:
        raise ConfigError(
            f"make_forward_backward: the stages are on ranks {places[0].ranks}, but the schedule "
            f"{schedule} has them on {expected}; give build_stages the same schedule",
            where="schedule",
            got=schedule,
        )
    all_reducers = [grad_reduction.find_reducers(stage) for stage in stages]
    for place, reducers in zip(places, all_reducers, strict=True):
        if reducers.ddp:
            raise ConfigError(
                f"make_forward_backward: stage {place.index} is a DDP module, which reduces at the "
                "end of its first backward pass; use fsdp() with dp_replicate",
                where="plan",
            )
        grad_reduction.check_sums(reducers)
    if SCHEDULES[schedule].splits_backward and any(map(recomputes_selectively, stages)):
        raise ConfigError(
            f"make_forward_backward: the schedule {schedule} goes through a stage's graph "
            'twice, which selective recomputation does not allow; use recompute("full") or '
            '"none", or a schedule that does not split the backward pass, such as 1f1b',
            where="recompute",
            got="selective",
        )
    modules = [module for reducers in all_reducers for _, module in reducers.fsdp]
    groups = [group for module in modules for group in grad_reduction.fsdp_groups(module)]
    # With FSDP at least 2: its rules also hold on a mesh of one rank.
    dp_shard = max([2, *(group.mesh_info.mesh.size() for group in groups)]) if modules else 1
    # A layout with the properties of these stages: `check_layout` knows the rules of schedules.
    layout = Layout(
        pp=axis.count,
        dp_shard=dp_shard,
        schedule=schedule,
        reduce=reduce,
        reshard_after_forward=any(map(grad_reduction.reshards_after_forward, modules)),
    )
    device = stage_forward.compute_device(stages[0])
    check_layout(layout, world=layout.world, device=device.type)


def _check_microbatches(
    schedule: str, count: int, places: Sequence[StagePlace], axis: Axis
) -> None:
    required = get_needed_microbatches(schedule, axis.count, len(places[0].ranks), count)
    if required is not None:
        raise ConfigError(
            f"forward_backward: there are {count} microbatches in a step, the schedule {schedule} "
            f"needs {required}; use more rows in a step, or fewer in a microbatch",
            where="microbatches",
            got=count,
            want=required,
        )


def _sum_terms(terms: Mapping[int, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Add the terms of all microbatches in the order of the microbatches, not of the schedule."""
    sums: dict[str, Tensor] = {}
    for index in sorted(terms):
        for name, term in terms[index].items():
            sums[name] = sums[name] + term if name in sums else term
    return sums


def _find_common_edge(
    stage: nn.Module, microbatches: Sequence[Mapping[str, Any]]
) -> tuple[Tensor, ...]:
    """Return the meta tensors that stages exchange for each microbatch of a step."""
    edges = [stage_forward.stage_boundary(stage, batch) for batch in microbatches]
    expected = edges[0][0].shape
    for index, (hidden, *_) in enumerate(edges):
        if hidden.shape != expected:
            raise ValueError(
                f"forward_backward: microbatch {index} has hidden states of shape "
                f"{tuple(hidden.shape)}, microbatch 0 of {tuple(expected)}; in a pipeline all "
                "microbatches of a step must have one shape (those of the next step, another)"
            )
    return edges[0]


def _make_schedule(
    schedule: str, step: _Step, edge: tuple[Tensor, ...], microbatches: int, *, axis: Axis
) -> Any:
    from trainkit.parallel.torch_pipeline import Stage, make_schedule  # noqa: PLC0415 (slow import)

    kind = SCHEDULES[schedule]
    device = stage_forward.compute_device(step.stages[0])
    stages = [
        Stage(
            stage,
            place,
            edge,
            step.run,
            step.get_reduction,
            axis=axis,
            device=device,
            splits_backward=kind.splits_backward,
        )
        for stage, place in zip(step.stages, step.places, strict=True)
    ]
    return make_schedule(kind, stages, microbatches)
