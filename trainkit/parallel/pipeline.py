"""The pipeline as an executor: all microbatches of a step through all stages, one denominator.

A rank holds some stages, its peers on the pipeline axis the others. Hidden states travel forward
and their gradients back, in the order of one of torch's schedules; everything else of a microbatch
is on every rank already and is looked up there by the microbatch's number. So side inputs cost no
communication, and no host sync.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from trainkit.batch import check_terms, divide_terms, make_divisors
from trainkit.parallel import grad_reduction, stage_forward
from trainkit.parallel.check_layout import problems, refuse
from trainkit.parallel.recompute import recomputes_selectively
from trainkit.parallel.split import (
    SCHEDULES,
    assign_stages,
    microbatches_wanted,
)
from trainkit.parallel.stage_ranks import StagePlace, places_of
from trainkit.parallel.tied_embeddings import setting_aside_tied
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

_KEPT_SHAPES = 4  # schedules to keep: each holds receive buffers for all microbatches of a step


class _Entered(torch.autograd.Function):
    """What was received, whose gradients are sent back: all of them, contiguous."""

    @staticmethod
    def forward(_: Any, *edge: Tensor) -> tuple[Tensor, ...]:  # pyrefly: ignore[bad-override]
        return tuple(x.detach() for x in edge)

    @staticmethod
    def backward(_: Any, *d_edge: Tensor) -> tuple[Tensor, ...]:  # pyrefly: ignore[bad-override]
        return tuple(d_x.contiguous() for d_x in d_edge)


@attrs.define(eq=False)
class _Step:
    """What the stages look up while a schedule runs, and the terms that they leave."""

    stages: Sequence[nn.Module]
    places: Sequence[StagePlace]
    loss: Loss
    call: Call
    batches: Sequence[Mapping[str, Any]] = ()
    divisors: Denominator | None = None
    reductions: Sequence[grad_reduction.Reduction] = ()
    terms: dict[int, dict[str, Tensor]] = attrs.field(factory=dict)

    def run(self, stage: nn.Module, index: int, edge: tuple[Tensor, ...]) -> Any:
        """Take a microbatch forward through a stage: to what the next one gets, or to the loss."""
        batch, place = self.batches[index], self.places[[*self.stages].index(stage)]
        entered = _Entered.apply(*edge) if edge else ()
        output = stage_forward.run_stage(stage, place, batch, entered, call=self.call)
        if not place.last:
            return stage_forward.check_edge(
                output, stage_forward.stage_boundary(stage, batch), place
            )
        assert self.divisors is not None
        returned = self.loss(output, batch)
        total, self.terms[index] = check_terms(returned, by="forward_backward")
        return divide_terms(total, self.divisors).double()

    def reduction_of(self, stage: nn.Module) -> grad_reduction.Reduction:
        """Return how a stage's gradients are reduced in this step."""
        return self.reductions[[*self.stages].index(stage)]

    def forget(self) -> None:
        """Let go of the microbatches."""
        self.batches, self.divisors, self.reductions = (), None, ()
        self.terms.clear()


def make_pipeline(
    stages: Stages,
    loss: Loss,
    *,
    reduce: grad_reduction.Reduce = "last",
) -> ForwardBackward:
    """Make the executor of a pipeline: `forward_backward(microbatches, denominator=...)`.

    The same sums and gradients as `forward_backward` gives on the whole model, on every rank.

    Args:
        stages: This rank's stages, on a pipeline axis of a size above 1.
        loss: The loss, with its `terms`.
        reduce: "last" reduces the gradients of FSDP's units once a step, "each" after every
            microbatch, which needs less memory; schedules that split the backward pass can only do
            the former.

    Raises:
        ConfigError: The stages are not those of the schedule, the loss has no `terms`, or the
            combination would give wrong gradients. The returned function raises it for too few
            microbatches, and a ValueError for microbatches of different shapes.

    Effects:
        None here. The returned function adds to `.grad` and communicates, on the pipeline axis and
        on what the stages reduce over. Every rank must pass the same number of microbatches.
    """
    axis, schedule = stages.pp, stages.layout.schedule
    places, terms = places_of(stages, axis), stage_forward.terms_of(loss)
    _check(stages, places, schedule=schedule, reduce=reduce, axis=axis)
    step = _Step(stages, places, loss, stages.call)
    schedules: dict[Any, Any] = {}
    kinds: dict[str, stage_forward.Kind] = {}
    last = places[0].ranks[-1]

    def schedule_for(edge: tuple[Tensor, ...], microbatches: int) -> Any:
        key = (*((tuple(x.shape), x.dtype) for x in edge), microbatches)
        if key not in schedules:
            _check_microbatches(schedule, microbatches, places, axis)
            schedules[key] = _make_schedule(schedule, step, edge, microbatches, axis=axis)
            while len(schedules) > _KEPT_SHAPES:
                schedules.pop(next(iter(schedules)))
        return schedules[key]

    def run(
        microbatches: Sequence[Mapping[str, Any]], *, denominator: Denominator
    ) -> dict[str, Tensor]:
        edge = _common_edge(stages[0], microbatches)
        reducers = [grad_reduction.find_reducers(stage) for stage in stages]
        for found in reducers:
            grad_reduction.check_sums(found)
        made = schedule_for(edge, len(microbatches))
        step.batches, step.divisors = microbatches, make_divisors(denominator)
        try:
            with setting_aside_tied(stages, places, axis):
                _run_reducing(made, step, reducers, schedule=schedule, reduce=reduce)
            sums = _summed(step.terms)
        except BaseException:
            schedules.clear()  # a schedule that broke off holds half a step
            raise
        finally:
            step.forget()
        kinds.update(kinds or stage_forward.agree_on_kinds(sums, terms, axis=axis, source=last))
        device = stage_forward.compute_device(stages[0])
        return stage_forward.share_terms(sums, kinds, axis=axis, source=last, device=device)

    return run


def _run_reducing(
    made: Any,
    step: _Step,
    reducers: Sequence[grad_reduction.Reducers],
    *,
    schedule: str,
    reduce: grad_reduction.Reduce,
) -> None:
    """Run a schedule, and reduce the gradients of its stages."""
    from trainkit.parallel.torch_pipeline import run_schedule  # noqa: PLC0415 (slow import)

    splits = SCHEDULES[schedule].splits_backward
    with ExitStack() as stack:
        step.reductions = [
            stack.enter_context(grad_reduction.reducing(stage, found, step.batches, reduce=reduce))
            for stage, found in zip(step.stages, reducers, strict=True)
        ]
        run_schedule(made, len(step.batches), splits_backward=splits)


def _check(
    stages: Sequence[nn.Module],
    places: Sequence[StagePlace],
    *,
    schedule: str,
    reduce: grad_reduction.Reduce,
    axis: Axis,
) -> None:
    """Refuse what torch would run with wrong gradients, or not at all."""
    wanted = assign_stages(schedule, axis.count, per_rank=len(places))
    if places[0].ranks != wanted:
        raise ConfigError(
            f"make_forward_backward: the stages are on ranks {places[0].ranks}, the schedule "
            f"{schedule} has them on {wanted}; give build_stages the same schedule",
            where="schedule",
            got=schedule,
        )
    found = [grad_reduction.find_reducers(stage) for stage in stages]
    for place, reducers in zip(places, found, strict=True):
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
            'twice, which selective recomputation does not allow; take recompute("full") or '
            '"none", or a schedule that does not split the backward pass, such as 1f1b',
            where="recompute",
            got="selective",
        )
    wrapped = [module for reducers in found for _, module in reducers.fsdp]
    layout = Layout(
        pp=axis.count,
        dp_shard=max([2, *map(_ranks, wrapped)]) if wrapped else 1,
        schedule=schedule,
        reduce=reduce,
        reshard_after_forward=any(map(grad_reduction.reshards_after_forward, wrapped)),
    )
    refuse(
        problems(layout, world=layout.world, device=stage_forward.compute_device(stages[0]).type)
    )


def _ranks(module: Any) -> int:
    return max(
        (group.mesh_info.mesh.size() for group in grad_reduction.fsdp_groups(module)), default=1
    )


def _check_microbatches(
    schedule: str, count: int, places: Sequence[StagePlace], axis: Axis
) -> None:
    wanted = microbatches_wanted(schedule, axis.count, len(places[0].ranks), count)
    if wanted is not None:
        raise ConfigError(
            f"forward_backward: there are {count} microbatches in a step, the schedule {schedule} "
            f"needs {wanted}; use more rows in a step, or fewer in a microbatch",
            where="microbatches",
            got=count,
            want=wanted,
        )


def _summed(terms: Mapping[int, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Add the terms of all microbatches, in their order and not in the schedule's."""
    sums: dict[str, Tensor] = {}
    for index in sorted(terms):
        for name, term in terms[index].items():
            sums[name] = sums[name] + term if name in sums else term
    return sums


def _common_edge(stage: nn.Module, microbatches: Sequence[Mapping[str, Any]]) -> tuple[Tensor, ...]:
    """Return what crosses every edge, the same for all microbatches of a step."""
    edges = [stage_forward.stage_boundary(stage, batch) for batch in microbatches]
    for index, edge in enumerate(edges):
        got, want = (tuple(x[0].shape) for x in (edge, edges[0]))
        if got != want:
            raise ValueError(
                f"forward_backward: microbatch {index} has hidden states of shape {got}, "
                f"microbatch 0 of {want}; in a pipeline all "
                "microbatches of a step must have one shape (of the next step, another)"
            )
    return edges[0]


def _make_schedule(
    schedule: str, step: _Step, edge: tuple[Tensor, ...], microbatches: int, *, axis: Axis
) -> Any:
    from trainkit.parallel.torch_pipeline import Stage, make_schedule  # noqa: PLC0415 (slow import)

    kind, device = SCHEDULES[schedule], stage_forward.compute_device(step.stages[0])
    made = [
        Stage(
            stage,
            place,
            edge,
            step.run,
            step.reduction_of,
            axis=axis,
            device=device,
            splits_backward=kind.splits_backward,
        )
        for stage, place in zip(step.stages, step.places, strict=True)
    ]
    return make_schedule(kind, made, microbatches)
