"""The pipeline as an executor: all microbatches of a step through all stages, one denominator.

A rank holds some stages, its peers on the pipeline axis the others. Hidden states travel forward
and their gradients back, in the order of one of torch's schedules; everything else of a microbatch
is on every rank already and is looked up there by the microbatch's number. So side inputs cost no
communication, and no host sync.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainkit.collectives import all_gather_json, broadcast
from trainkit.parallel.naming import named_parameters_of
from trainkit.parallel.recompute import recomputes_selectively
from trainkit.parallel.reduction import (
    Reduce,
    check_sums,
    reducers_of,
    reshard_,
    setting_aside_reduced,
    sum_partial_,
)
from trainkit.parallel.split import Kind, Place, rank_of_stages, schedule_kind
from trainkit.parallel.stages import places_of, tied_of
from trainkit.types import Axis, Call, ConfigError, ForwardBackward, Loss

Boundary = Callable[[nn.Module, Mapping[str, Any]], Tensor]
"""From a stage and a microbatch to what crosses its edge: a tensor on the meta device."""

_KEPT_SHAPES = 4  # schedules to keep: each holds receive buffers for all microbatches of a step


def stage_boundary(stage: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """Return what crosses a stage's edge, as its method `boundary(batch)` says.

    Under FSDP's mixed precision it is in the dtype that the stage computes in.

    Raises:
        ConfigError: The stage has no such method.
    """
    own = getattr(stage, "boundary", None)
    if own is None:
        raise ConfigError(
            f"the pipeline stage {type(stage).__name__} has no method boundary(batch), which gives "
            "the shape and dtype of what it passes on as a tensor on the meta device; add it to "
            "the class, or pass boundary=",
            where="boundary",
        )
    meta = own(batch)
    from trainkit.parallel.torch_pipeline import gathered_dtype  # noqa: PLC0415 (slow import)

    dtypes = [gathered_dtype(m) for name, m in reducers_of(stage).fsdp if not name]
    return meta if not dtypes or dtypes[0] is None else meta.to(dtypes[0])


def compute_device(stage: nn.Module) -> torch.device:
    """Return the device a stage computes on: with offloaded parameters not the one they are on.

    Examples:
        >>> compute_device(nn.Linear(1, 1))
        device(type='cpu')
    """
    for _, module in reducers_of(stage).fsdp:
        return module._get_fsdp_state()._device  # noqa: SLF001 (no public way, 2.11 to 2.13)
    return next(chain(stage.parameters(), stage.buffers()), torch.empty(0)).device


# ----------------------------------------------------------------------------------------- forward


@contextmanager
def evaluating(stages: Sequence[nn.Module]) -> Iterator[None]:
    """Run a block in evaluation mode and without gradients.

    Effects:
        Puts the modules into evaluation mode for the length of the block, and then every module
        inside them back into the mode it had; frees what FSDP2 has gathered.

    Examples:
        >>> model = nn.Dropout().train()
        >>> with evaluating([model]):
        ...     model.training
        False
        >>> model.training
        True
    """
    modes = [(module, module.training) for stage in stages for module in stage.modules()]
    for stage in stages:
        stage.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training
        for stage in stages:
            reshard_(reducers_of(stage))


def run_stage(
    stage: nn.Module,
    place: Place,
    batch: Mapping[str, Any],
    hidden: Tensor | None,
    *,
    call: Call,
) -> Any:
    """Enter a microbatch into a stage; after the first, the hidden state replaces `input_ids`."""
    return call(stage, batch if place.index == 0 else {**batch, "input_ids": hidden})


def _check_edge(output: Any, boundary: Tensor, place: Place) -> Tensor:
    """Refuse an output that the next stage does not expect: unequal sizes end a gloo process."""
    found = (tuple(output.shape), output.dtype) if isinstance(output, Tensor) else type(output)
    if found != (tuple(boundary.shape), boundary.dtype):
        raise ValueError(
            f"pipeline stage {place.index} passes on {found}, but its boundary(batch) says "
            f"{tuple(boundary.shape)}, {boundary.dtype}"
        )
    return output.contiguous()


@torch.no_grad()
def forward_stages(
    stages: Sequence[nn.Module],
    batch: Mapping[str, Any],
    *,
    axis: Axis,
    call: Call,
    boundary: Boundary = stage_boundary,
) -> Any:
    """Run one batch through the whole pipeline, forward only.

    Args:
        stages: The stages of this rank.
        batch: The batch, the same on all ranks of the pipeline.
        axis: The pipeline axis.
        call: How a batch enters a stage.
        boundary: What crosses a stage's edge.

    Returns:
        The output of the last stage on the rank that holds it, None on the others.

    Effects:
        Communicates on `axis`: a hidden state is sent at each edge between ranks.
    """
    places = places_of(stages, axis)
    ranks, output = places[0].ranks, None
    for place, stage in zip(places, stages, strict=True):
        edge = boundary(stage, batch) if axis.count > 1 else None
        hidden = output
        if place.index and ranks[place.index - 1] != axis.index:
            assert edge is not None
            device = compute_device(stage)
            hidden = torch.empty(edge.shape, dtype=edge.dtype, device=device)
            dist.recv(hidden, group=axis.group, group_src=ranks[place.index - 1])
        output = run_stage(stage, place, batch, hidden, call=call)
        if not place.last:
            assert edge is not None
            output = _check_edge(output, edge, place)
            if ranks[place.index + 1] != axis.index:
                dist.send(output, group=axis.group, group_dst=ranks[place.index + 1])
    return output if places[-1].last else None


# ------------------------------------------------------------------------------------------- terms


def share_terms(
    sums: Mapping[str, Tensor],
    dtypes: Mapping[str, str],
    *,
    axis: Axis,
    source: int,
    device: torch.device,
) -> dict[str, Tensor]:
    """Give every rank of the pipeline the terms that the last stage's rank has.

    Args:
        sums: A scalar per term on rank `source`; not read elsewhere.
        dtypes: The terms and their dtypes, from `agree_on_dtypes`.
        axis: The pipeline axis.
        source: The rank of the last stage.
        device: Where the terms shall be.

    Effects:
        Communicates: one broadcast on `axis`, in fp64.
    """
    packed = torch.zeros(len(dtypes), dtype=torch.float64, device=device)
    if axis.index == source:
        packed = torch.stack([sums[name].detach().to(device).double() for name in dtypes])
    values = broadcast(packed, axis, source=source).unbind()
    return {
        name: value.to(getattr(torch, dtype))
        for (name, dtype), value in zip(dtypes.items(), values, strict=True)
    }


def agree_on_dtypes(
    sums: Mapping[str, Tensor], terms: Sequence[str], *, axis: Axis, source: int
) -> dict[str, str]:
    """Return the dtype of each term, which only the rank of the last stage knows.

    Raises:
        ValueError: The loss does not report the terms that it says it reports, or not as scalars.

    Effects:
        Communicates on `axis`, and waits.
    """
    own = {name: str(x.dtype).removeprefix("torch.") for name, x in sums.items() if x.ndim == 0}
    found = all_gather_json(own, axis)[source]
    if set(found) != set(terms):
        raise ValueError(
            f"the loss says that its terms are {sorted(terms)}, and reports the scalars "
            f"{sorted(found)}; correct its attribute `terms`"
        )
    return {name: found[name] for name in terms}


def terms_of(loss: Loss) -> tuple[str, ...]:
    """Return the names of a loss's terms.

    Raises:
        ConfigError: It does not say.
    """
    terms = getattr(loss, "terms", None)
    if terms is None:
        raise ConfigError(
            f"the loss {getattr(loss, '__name__', loss)} has no attribute `terms`, the names that "
            "it reports, which pipeline stages that see no loss need; decorate it with "
            "losses.with_terms",
            where="loss",
        )
    return tuple(terms)


# -------------------------------------------------------------------------------------------- tied


@contextmanager
def setting_aside_tied(
    stages: Sequence[nn.Module], places: Sequence[Place], axis: Axis
) -> Iterator[None]:
    """Sum the gradients of tied parameters over their two stages, those of this step alone.

    Both ranks add the owner's gradient and the copy's in that order, so that the optimizer keeps
    the two equal, bit for bit.

    Effects:
        Sets earlier gradients aside for the length of the block; replaces `.grad` after it.
        Communicates on `axis`: a gradient each way between the two ranks.
    """
    tied = _tied_parameters(stages, places)
    held = [(p, p.grad) for _, _, p in tied]
    for p, _ in held:
        p.grad = None
    try:
        yield
        _exchange_tied(tied, places[0].ranks, axis)
    finally:
        for p, grad in held:
            if grad is not None:
                p.grad = grad if p.grad is None else grad.add_(p.grad)


def _tied_parameters(
    stages: Sequence[nn.Module], places: Sequence[Place]
) -> list[tuple[int, int, nn.Parameter]]:
    """Return this rank's tied parameters: own stage, the other one's stage, parameter."""
    found = []
    for stage, place in zip(stages, places, strict=True):
        named = named_parameters_of([stage])
        for name, (owner, copy) in sorted(tied_of(stage).items()):
            if named[name].requires_grad:
                other = copy if place.index == owner else owner
                found.append((place.index, other, named[name]))
    return found


@torch.no_grad()
def _exchange_tied(
    tied: Sequence[tuple[int, int, nn.Parameter]], ranks: Sequence[int], axis: Axis
) -> None:
    gradients = [
        (own, other, p, _local(torch.zeros_like(p) if p.grad is None else p.grad))
        for own, other, p in tied
    ]
    received = []
    for own, other, _, local in gradients:
        if ranks[own] == ranks[other]:
            twins = [x for a, b, _, x in gradients if (a, b) == (other, own)]
            received.append(twins[0].clone())
            continue
        sent, buffer = local.contiguous(), torch.empty_like(local).contiguous()
        operations = [
            dist.P2POp(dist.isend, sent, group=axis.group, group_peer=ranks[other]),
            dist.P2POp(dist.irecv, buffer, group=axis.group, group_peer=ranks[other]),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        received.append(buffer)
    for (own, other, p, local), twin in zip(gradients, received, strict=True):
        local.copy_(local + twin if own < other else twin + local)
        if p.grad is None:
            p.grad = torch.zeros_like(p)
            _local(p.grad).copy_(local)


def _local(tensor: Any) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


# ---------------------------------------------------------------------------------------- executor


class _Entered(torch.autograd.Function):
    """A received hidden state, whose gradient is sent back: contiguous, as sending needs it."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:  # pyrefly: ignore[bad-override]
        return x.detach()

    @staticmethod
    def backward(_: Any, d_x: Tensor) -> Tensor:  # pyrefly: ignore[bad-override]
        return d_x.contiguous()


@attrs.define(eq=False)
class _Step:
    """What the stages look up while a schedule runs."""

    batches: Sequence[Mapping[str, Any]] = ()
    divisor: Tensor | None = None
    terms: dict[int, dict[str, Tensor]] = attrs.field(factory=dict)

    def forget(self) -> None:
        """Let go of the microbatches."""
        self.batches, self.divisor = (), None
        self.terms.clear()


def bind_pipeline(
    stages: Sequence[nn.Module],
    loss: Loss,
    *,
    axis: Axis,
    call: Call,
    schedule: str = "1f1b",
    reduce: Reduce = "last",
    boundary: Boundary = stage_boundary,
) -> ForwardBackward:
    """Return the executor of a pipeline: `forward_backward(microbatches, denominator=...)`.

    The same sums and gradients as `forward_backward` gives on the whole model, on every rank.

    Args:
        stages: This rank's stages, from `build_stages` with the same schedule.
        loss: The loss, with its `terms`.
        axis: The pipeline axis, `ps.pp`, of a size above 1.
        call: How a batch enters a stage. A stage after the first is called with the microbatch, in
            which the hidden state that it has received takes the place of "input_ids".
        schedule: A name of `parallel.split.SCHEDULES`.
        reduce: "last" reduces the gradients of FSDP's units once a step, "each" after every
            microbatch, which needs less memory; schedules that split the backward pass can only do
            the former.
        boundary: What crosses a stage's edge; by default the stage's method `boundary(batch)`.

    Raises:
        ConfigError: The stages are not those of the schedule, the loss has no `terms`, or the
            combination would give wrong gradients. The returned function raises it for too few
            microbatches, and a ValueError for microbatches of different shapes.

    Effects:
        None here. The returned function adds to `.grad` and communicates, on `axis` and on what
        the stages reduce over. Every rank must pass the same number of microbatches.
    """
    kind, places, terms = schedule_kind(schedule), places_of(stages, axis), terms_of(loss)
    _check_layout(stages, places, kind, schedule=schedule, reduce=reduce, axis=axis)
    step = _Step()
    schedules: dict[Any, Any] = {}
    dtypes: dict[str, str] = {}
    last = places[0].ranks[-1]

    def run_one(stage: nn.Module, index: int, hidden: Tensor | None) -> Tensor:
        batch, place = step.batches[index], places[[*stages].index(stage)]
        entered = None if hidden is None else _Entered.apply(hidden)
        output = run_stage(stage, place, batch, entered, call=call)
        if not place.last:
            return _check_edge(output, boundary(stage, batch), place)
        assert step.divisor is not None
        total, step.terms[index] = loss(output, batch)
        return (total / step.divisor).double()

    def run(microbatches: Sequence[Mapping[str, Any]], *, denominator: Tensor) -> dict[str, Tensor]:
        from trainkit.parallel.torch_pipeline import run_schedule  # noqa: PLC0415 (slow import)

        edge = _common_edge(stages[0], microbatches, boundary)
        reducers = [reducers_of(stage) for stage in stages]
        for found in reducers:
            check_sums(found)
        key = (tuple(edge.shape), edge.dtype, len(microbatches))
        if key not in schedules:
            made = _make_schedule(
                kind,
                stages,
                places,
                edge=edge,
                run=run_one,
                microbatches=len(microbatches),
                axis=axis,
                reduce=reduce,
            )
            schedules[key] = made
            while len(schedules) > _KEPT_SHAPES:
                schedules.pop(next(iter(schedules)))
        step.batches, step.divisor = microbatches, torch.as_tensor(denominator).clamp(min=1)
        step.terms = {}
        try:
            with ExitStack() as stack:
                for found in reducers:
                    stack.enter_context(setting_aside_reduced(found))
                stack.enter_context(setting_aside_tied(stages, places, axis))
                run_schedule(
                    schedules[key], len(microbatches), splits_backward=kind.splits_backward
                )
                for stage in stages:
                    sum_partial_(stage)
            sums = _summed(step.terms)
        except BaseException:
            schedules.clear()  # a schedule that broke off holds half a step
            raise
        finally:
            step.forget()
        dtypes.update(dtypes or agree_on_dtypes(sums, terms, axis=axis, source=last))
        device = compute_device(stages[0])
        return share_terms(sums, dtypes, axis=axis, source=last, device=device)

    return run


def _summed(terms: Mapping[int, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Add the terms of all microbatches, in their order and not in the schedule's."""
    sums: dict[str, Tensor] = {}
    for index in sorted(terms):
        for name, term in terms[index].items():
            sums[name] = sums[name] + term if name in sums else term
    return sums


def _common_edge(
    stage: nn.Module, microbatches: Sequence[Mapping[str, Any]], boundary: Boundary
) -> Tensor:
    """Return what crosses every edge, the same for all microbatches of a step."""
    edges = [boundary(stage, batch) for batch in microbatches]
    for index, edge in enumerate(edges):
        if edge.shape != edges[0].shape:
            raise ValueError(
                f"forward_backward: microbatch {index} has hidden states of shape "
                f"{tuple(edge.shape)}, microbatch 0 of {tuple(edges[0].shape)}; in a pipeline all "
                "microbatches of a step must have one shape (of the next step, another)"
            )
    return edges[0]


def _make_schedule(
    kind: Kind,
    stages: Sequence[nn.Module],
    places: Sequence[Place],
    *,
    edge: Tensor,
    run: Any,
    microbatches: int,
    axis: Axis,
    reduce: Reduce,
) -> Any:
    from trainkit.parallel.torch_pipeline import Stage, make_schedule  # noqa: PLC0415 (slow import)

    check_microbatches(kind, microbatches, ranks=axis.count, num_stages=len(places[0].ranks))
    device = compute_device(stages[0])
    made = [
        Stage(
            stage,
            place,
            edge,
            run,
            axis=axis,
            device=device,
            reduce=reduce,
            splits_backward=kind.splits_backward,
        )
        for stage, place in zip(stages, places, strict=True)
    ]
    return make_schedule(kind, made, microbatches)


# -------------------------------------------------------------------------------------------- edge


def check_microbatches(kind: Kind, count: int, *, ranks: int, num_stages: int) -> None:
    """Refuse a number of microbatches that a schedule cannot run.

    Raises:
        ConfigError: Names the number, and one that it can run.

    Examples:
        >>> from trainkit.parallel.split import SCHEDULES
        >>> check_microbatches(SCHEDULES["1f1b"], 4, ranks=4, num_stages=4)
        >>> check_microbatches(SCHEDULES["1f1b"], 2, ranks=4, num_stages=4)
        Traceback (most recent call last):
        trainkit.types.ConfigError: ... 2 microbatches in a step, Schedule1F1B needs at least 4 ...
    """
    least = num_stages if kind.torch_name in ("Schedule1F1B", "ScheduleDualPipeV") else 1
    if count < least:
        wanted = f"at least {least} for {num_stages} stages"
    elif kind.torch_name in ("ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble"):
        rounds = max(1, count // ranks)
        if count % rounds == 0:
            return
        wanted = (
            f"a multiple of {rounds}, for rounds of at least {ranks} (such as {rounds * ranks})"
        )
    else:
        return
    raise ConfigError(
        f"forward_backward: there are {count} microbatches in a step, {kind.torch_name} needs "
        f"{wanted}; use more rows in a step, or fewer in a microbatch",
        where="microbatches",
        got=count,
        want=wanted,
    )


def _check_layout(
    stages: Sequence[nn.Module],
    places: Sequence[Place],
    kind: Kind,
    *,
    schedule: str,
    reduce: Reduce,
    axis: Axis,
) -> None:
    """Refuse what torch would run with wrong gradients, or not at all."""
    _check_placement(places, schedule, axis)
    from trainkit.parallel.torch_pipeline import (  # noqa: PLC0415 (slow import)
        passes_to_itself,
        reshards_after_forward,
    )

    gloo = compute_device(stages[0]).type == "cpu"
    if kind.placement == "v" and gloo and not passes_to_itself():
        raise ConfigError(
            f"bind_forward_backward: this torch ({torch.__version__}) cannot run the schedule "
            f"{schedule} on the CPU: gloo has no connection from a rank to itself; use torch 2.13 "
            "or another schedule",
            where="schedule",
            got=schedule,
        )
    for stage, place in zip(stages, places, strict=True):
        found = reducers_of(stage)
        if found.ddp:
            raise ConfigError(
                f"bind_forward_backward: stage {place.index} is a DDP module, which reduces at the "
                "end of its first backward pass; use fsdp() with dp_replicate",
                where="plan",
            )
        check_sums(found)
        if kind.splits_backward and recomputes_selectively(stage):
            raise ConfigError(
                f"bind_forward_backward: the schedule {schedule} goes through a stage's graph "
                'twice, which selective recomputation does not allow; take recompute("full") or '
                '"none", or a schedule that does not split the backward pass, such as 1f1b',
                where="recompute",
                got="selective",
            )
        if not kind.splits_backward or not found.fsdp:
            continue
        if reduce != "last":
            raise ConfigError(
                f"bind_forward_backward: the schedule {schedule} computes gradients of weights "
                f"after FSDP's hooks, so they can only be reduced once a step; reduce={reduce!r} "
                "needs one that does not split the backward pass, such as 1f1b",
                where="reduce",
                got=reduce,
                want="last",
            )
        names = [n for n, m in found.fsdp if reshards_after_forward(m)]
        if names:
            raise ConfigError(
                f"bind_forward_backward: {names[0] or '(the stage itself)'} of stage "
                f"{place.index} reshards after forward, with which the schedule {schedule} gives "
                "wrong gradients; build it with fsdp(reshard_after_forward=False)",
                where="reshard_after_forward",
                got=True,
                want=False,
            )


def _check_placement(places: Sequence[Place], schedule: str, axis: Axis) -> None:
    wanted = rank_of_stages(schedule, axis.count, per_rank=len(places))
    if places[0].ranks != wanted:
        raise ConfigError(
            f"bind_forward_backward: the stages are on ranks {places[0].ranks}, the schedule "
            f"{schedule} has them on {wanted}; give build_stages the same schedule",
            where="schedule",
            got=schedule,
        )
