"""Forward and backward over a step's microbatches: losses are sums, divided by one denominator.

`make_forward_backward` returns the executor of a layout, which a recipe calls in the same way with
and without pipeline stages.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from trainkit.batch import count_valid_tokens, make_padding_batch, to_device
from trainkit.batch.denominators import check_terms, divide_terms, make_divisors
from trainkit.collectives import all_gather_objects, all_max, all_sum, get_comm_device
from trainkit.losses import average_terms
from trainkit.metrics.merge import merge_over_ranks
from trainkit.metrics.records import Metric, State
from trainkit.models.call import call_model
from trainkit.parallel.grad_reduction import (
    Reduce,
    check_sums,
    find_reducers,
    use_reduction,
)
from trainkit.parallel.packing_leaks import refuse_leaks
from trainkit.parallel.pipeline import make_pipeline
from trainkit.parallel.split import get_schedule_kind
from trainkit.parallel.stage_forward import (
    agree_on_kinds,
    compute_device,
    forward_stages,
    get_term_names,
    share_terms,
    use_eval_mode,
)
from trainkit.parallel.stage_ranks import as_stages, get_stage_places
from trainkit.phases import measure_phase
from trainkit.types import (
    BATCH_TENSORS,
    SOLO,
    Axis,
    Call,
    ConfigError,
    Denominator,
    ForwardBackward,
    Loss,
    Stages,
    check_choice,
)


def _add(sums: dict[str, Tensor], terms: Mapping[str, Tensor]) -> None:
    # Not in place, which would change the loss's own tensor, the first term.
    for name, term in terms.items():
        sums[name] = sums[name] + term if name in sums else term


def _add_long(sums: dict[str, Tensor], terms: Mapping[str, Tensor]) -> None:
    """Add terms in fp64: over 10^9 tokens a sum in fp32 is off by 2e-5."""
    in_fp64 = {name: x.double() if x.is_floating_point() else x for name, x in terms.items()}
    _add(sums, in_fp64)


def forward_backward(
    model: nn.Module,
    microbatches: Sequence[Mapping[str, Any]],
    loss: Loss,
    *,
    denominator: Denominator,
    call: Call = call_model,
    reduce: Reduce = "last",
) -> dict[str, Tensor]:
    """Add the gradients of a step's microbatches to `.grad`, and return the sums of the loss.

    Each microbatch contributes the gradient of (its sum of losses) / denominator, so microbatches,
    ranks and shards add up, however the tokens are distributed over them.

    Args:
        model: Any module: plain, FSDP2 or DDP, or one that contains such modules.
        microbatches: The microbatches of this rank in this step, at least one.
        loss: `loss(output, batch) -> (sum, {name: sum})`.
        denominator: The number of valid tokens in the global batch, 0-d; or, for a loss that
            returns a sum for each of its terms, a number for each: {term: tensor}. 0 counts as 1.
        call: Calls the model with a batch.
        reduce: "last" reduces gradients once, after the last microbatch. "each" reduce-scatters
            every microbatch, and only the all-reduce over replicas waits for the last, which needs
            less memory.

    Returns:
        The terms of the loss, summed over the microbatches of this rank, detached, not divided.

    Raises:
        ValueError: There is no microbatch, `reduce` is unknown, a module averages gradients, or the
            loss does not return (sum, {name: sum}).
        ConfigError: `model` is no module; for a `Stages`, use `make_forward_backward`. Or a row has
            several documents and the model leaks between them, as models with a recurrent state do;
            see `testing.check_packing`.

    Effects:
        Adds to the `.grad` of the parameters of `model`; communicates over the axes that its
        modules reduce over. In the first call of a foreign model, runs it three times without
        gradients to find such leaks.

    Examples:
        >>> model = nn.Linear(1, 1, bias=False)
        >>> call = lambda model, batch: model(batch["x"])
        >>> loss = lambda y, batch: (y.sum(), {"loss": y.detach().sum()})
        >>> batches = [{"x": torch.full((2, 1), 3.0)}, {"x": torch.full((1, 1), 6.0)}]
        >>> sums = forward_backward(model, batches, loss, denominator=torch.tensor(3), call=call)
        >>> model.weight.grad.item()
        4.0
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"forward_backward: it takes a module, not a {type(model).__name__}",
            where="model",
            got=type(model).__name__,
            hint="make_forward_backward(stages, loss) returns this function for a Stages",
        )
    _check_microbatches(microbatches)
    # A lookup in a set takes less time than `check_choice`, and this runs in every step.
    if reduce not in {"last", "each"}:
        check_choice(("last", "each"), "forward_backward", reduce=reduce)
    refuse_leaks("forward_backward", model, microbatches, call)
    reducers = find_reducers(model)
    divisors = make_divisors(denominator)
    sums: dict[str, Tensor] = {}
    if not reducers:  # a plain module: gradients accumulate on this rank
        for batch in microbatches:
            with measure_phase("forward"):
                total, terms = check_terms(loss(call(model, batch), batch), by="forward_backward")
            # Only the gradients are divided: they have the size of a mean, while the sums that are
            # returned can still be added over ranks.
            with measure_phase("backward"):
                divide_terms(total, divisors).backward()
            _add(sums, terms)
        return sums
    # The denominator counts the tokens of all ranks, so gradients must be added, not averaged.
    check_sums(reducers)
    with use_reduction(model, reducers, microbatches, reduce=reduce) as reduction:
        for index, batch in enumerate(microbatches):
            with reduction.microbatch(last=index == len(microbatches) - 1):
                with measure_phase("forward"):
                    # Without a name, or the output would stay in memory during backward.
                    values = loss(call(model, batch), batch)
                    total, terms = check_terms(values, by="forward_backward")
                with measure_phase("backward"):
                    divide_terms(total, divisors).backward()
            _add(sums, terms)
    return sums


def _check_microbatches(microbatches: Sequence[Mapping[str, Any]]) -> None:
    if not microbatches or (type(microbatches) is not list and isinstance(microbatches, Mapping)):
        raise ValueError(
            "forward_backward: microbatches must be a sequence of batches, got "
            f"{'a single batch' if microbatches else 'no batch'}"
        )


def make_forward_backward(
    stages_or_model: Stages | nn.Module,
    loss: Loss,
    *,
    reduce: Reduce = "last",
    call: Call | None = None,
) -> ForwardBackward:
    """Return the executor of a layout: `forward_backward(microbatches, denominator=...)`.

    Args:
        stages_or_model: This rank's stages, or any module.
        loss: The loss; a pipeline needs its `terms`.
        reduce: When gradients are reduced; see `forward_backward`.
        call: Calls the model with a batch; by default the call of the stages, or `call_model`.

    Raises:
        ConfigError: The stages, their schedule, the loss and the layout do not go together; see
            `parallel.pipeline.make_pipeline`.
        ValueError: `reduce` is unknown.

    Effects:
        None here; the returned function has those of `forward_backward`, and communicates on the
        stages' pipeline axis.

    Examples:
        >>> model = nn.Linear(1, 1, bias=False)
        >>> loss = lambda y, batch: (y.sum(), {"loss": y.detach().sum()})
        >>> forward_backward = make_forward_backward(
        ...     model, loss, call=lambda model, batch: model(batch["x"])
        ... )
        >>> forward_backward([{"x": torch.ones(2, 1)}], denominator=torch.tensor(2)).keys()
        dict_keys(['loss'])
        >>> model.weight.grad
        tensor([[1.]])
    """
    stages = as_stages(stages_or_model, "make_forward_backward", call=call)
    check_choice(("last", "each"), "make_forward_backward", reduce=reduce)
    # For its error: an unknown schedule is rejected even where there is no pipeline.
    get_schedule_kind(stages.layout.schedule)
    if stages.pp.count == 1:
        if len(stages) != 1:
            raise ValueError(f"make_forward_backward: one stage is needed, got {len(stages)}")
        return partial(forward_backward, stages[0], loss=loss, call=stages.call, reduce=reduce)
    run_pipeline = make_pipeline(stages, loss, reduce=reduce)

    def run(
        microbatches: Sequence[Mapping[str, Any]], *, denominator: Denominator
    ) -> dict[str, Tensor]:
        _check_microbatches(microbatches)
        return run_pipeline(microbatches, denominator=denominator)

    return run


def evaluate(
    stages_or_model: Stages | nn.Module,
    batches: Iterable[Mapping[str, Any]],
    loss: Loss,
    *,
    metric: Metric | None = None,
    axis: Axis = SOLO,
    call: Call | None = None,
) -> dict[str, Tensor]:
    """Return the average loss over held-out data: sum of losses / sum of tokens over all ranks.

    Ranks may have different numbers of batches, or none. A sharded model needs every rank in every
    forward pass, so a rank without a batch runs the model on its last one, or on a padding batch
    with the columns of the other ranks' batches, and adds 0. Under Ulysses every rank needs at
    least one batch, since padding batches of full rows cannot be made here; `make_eval_batches`
    makes them. A pipeline runs batches one after another, forward only, whatever its schedule.

    Args:
        stages_or_model: This rank's stages, or any module.
        batches: This rank's batches of the held-out data; all ranks of a pipeline read the same.
        loss: The loss; see `losses.average_terms` for the denominators of its terms.
        metric: A further metric, whose `update(state, output, batch)` gets what the loss gets
            (`metrics.adapt_metric`), and which has names (`metrics.compose_metrics`).
        axis: For a plain module, the ranks that have distinct tokens. A `Stages` has its own axes.
        call: Calls the model with a batch; by default the call of the stages, or `call_model`.

    Returns:
        The divided terms, summed and divided in fp64, "tokens", the number of valid tokens (int64),
        and the values of the metric; equal on all ranks of the axes that were summed over. A
        sharded module without its `axis` gets the average of this rank's batches, and ranks then
        need equally many.

    Raises:
        ValueError: There is no batch on any rank; or the metric has no names, or one of a term.

    Effects:
        Communicates on `axis`, or on the axes of the stages, with one host sync per batch. The
        modules are in evaluation mode meanwhile. Gradients, generators and parameters are
        unchanged.

    Examples:
        >>> loss = lambda y, batch: (y.sum(), {"loss": y.detach().sum()})
        >>> call = lambda model, batch: model(batch["x"])
        >>> batch = {"x": torch.full((1, 2), 3.0), "labels": torch.ones(1, 2)}
        >>> evaluate(nn.Identity(), [batch], loss, call=call)["loss"]
        tensor(3., dtype=torch.float64)
    """
    stages = as_stages(stages_or_model, "evaluate", axis=axis, call=call)
    axis = stages.loss
    pp = stages.pp
    sums: dict[str, Tensor] = {}
    device = compute_device(stages[0])
    count = torch.zeros((), dtype=torch.int64, device=device)
    state: State = {} if metric is None else _init_metric(metric, loss, device)
    has_output = pp.count == 1 or get_stage_places(stages, pp)[-1].last
    source = iter(batches)
    last: Mapping[str, Any] | None = None
    with use_eval_mode(stages):
        while (batch := _read_next(source, (axis, pp, stages.tp))) is not _ALL_DONE:
            if last is None:
                last = _get_first_batch(batch, stages[0], axis)
            if batch is None:  # another rank has one
                terms = _compute_terms(stages, last, loss)[1]
                # Computed for its collectives alone: its terms count as zeros.
                _add_long(sums, {name: torch.zeros_like(term) for name, term in terms.items()})
                continue
            last = batch
            if axis.count == pp.count == 1:  # otherwise a rank may have no batch to check
                refuse_leaks("evaluate", stages[0], [batch], stages.call)
            count = count + count_valid_tokens([batch])
            output, terms = _compute_terms(stages, batch, loss)
            _add_long(sums, terms)
            if metric is not None and has_output:
                state = metric.update(state, output, batch)
    # So far only the rank of the last stage has sums; the all-reduce needs them on every rank.
    if pp.count > 1:
        sums = _broadcast_sums(sums, loss, stages=stages, device=device)
    if not sums:
        raise ValueError("evaluate: there is no batch to evaluate on any rank")
    # Sorted: every rank must all-reduce the terms in the same order.
    sums = {name: all_sum(sums[name], axis) for name in sorted(sums)}
    tokens = all_sum(count, axis)
    averages = average_terms(sums, tokens) | {"tokens": tokens}
    if metric is None:
        return averages
    # Ranks of other stages have seen nothing, and add nothing.
    state = dict(merge_over_ranks(metric, state, pp).tensors)
    values = metric.compute(merge_over_ranks(metric, state, axis))
    assert isinstance(values, dict), "_init_metric checks it"
    return averages | values


def _init_metric(metric: Metric, loss: Loss, device: torch.device) -> State:
    """Return the empty state; raise unless all values have names, which differ from the loss's."""
    state = metric.init(device)
    values = metric.compute(state)
    if not isinstance(values, dict):
        raise ValueError(  # noqa: TRY004 (as for all bad arguments)
            "evaluate: the values of the metric need names: compose_metrics({name: metric})"
        )
    if repeated := sorted({"tokens", *getattr(loss, "terms", ())} & values.keys()):
        raise ValueError(
            f"evaluate: the loss and the metric both report {repeated}; rename the metric's in "
            "compose_metrics"
        )
    return state


def _compute_terms(
    stages: Stages, batch: Mapping[str, Any], loss: Loss
) -> tuple[Any, dict[str, Tensor]]:
    """Return the output and the terms on the rank of the last stage, (None, {}) on others."""
    if stages.pp.count == 1:
        output = stages.call(stages[0], batch)
    else:
        output = forward_stages(stages, batch)
        if not get_stage_places(stages, stages.pp)[-1].last:
            return None, {}
    return output, check_terms(loss(output, batch), by="evaluate")[1]


def _broadcast_sums(
    sums: dict[str, Tensor],
    loss: Loss,
    *,
    stages: Stages,
    device: torch.device,
) -> dict[str, Tensor]:
    """Broadcast the sums from the rank of the last stage over the pipeline axis."""
    pp = stages.pp
    source = get_stage_places(stages, pp)[0].ranks[-1]
    # No rank of the pipeline had a batch, so there are no names to agree on.
    if not any(all_gather_objects(len(sums), pp)):
        return {}
    kinds = agree_on_kinds(sums, get_term_names(loss), axis=pp, source=source)
    return share_terms(sums, kinds, axis=pp, source=source, device=device)


def _get_first_batch(
    batch: Mapping[str, Any] | None, model: nn.Module, axis: Axis
) -> Mapping[str, Any]:
    """Return this rank's first batch, or a padding batch with the columns of the other ranks'."""
    columns: dict[str, list[Any]] = {}
    if batch is not None:
        for name, x in batch.items():
            # A column has a value for each token; other entries need no counterpart in padding.
            is_column = isinstance(x, Tensor) and x.shape[:2] == batch["labels"].shape
            if is_column and name not in BATCH_TENSORS:
                columns[name] = [str(x.dtype).removeprefix("torch."), *x.shape[2:]]
    by_rank = all_gather_objects(columns, axis)
    if batch is not None:
        return batch
    # Every rank of a sequence-parallel model needs a part of the row.
    padding = make_padding_batch(1, 2 * getattr(model, "sequence_parts", 1))
    extra = {
        name: torch.zeros(*padding.labels.shape, *inner, dtype=getattr(torch, dtype))
        for columns in by_rank
        for name, (dtype, *inner) in columns.items()
    }
    return to_device(attrs.evolve(padding, extra=extra), compute_device(model))


_ALL_DONE = object()


def _read_next(source: Iterator[Mapping[str, Any]], axes: Sequence[Axis]) -> Any:
    """Return the next batch; None if only other ranks have one, `_ALL_DONE` if none has."""
    # If one rank fails, all do: a rank that raised alone would leave the others in a collective.
    failure: Exception | None = None
    batch: Mapping[str, Any] | None = None
    try:
        batch = next(source, None)
    except Exception as error:  # noqa: BLE001 (raised below, after the collective)
        failure = error
    # 0 for no batch, 1 for one, 2 for a failure: the maximum over the axes is what all must know.
    state = torch.tensor(2 if failure is not None else int(batch is not None))
    for axis in axes:
        state = all_max(state.to(get_comm_device(axis)), axis)
    if failure is not None:
        raise failure
    if int(state) == 2:
        raise RuntimeError("evaluate: another rank could not read its next batch")
    return batch if int(state) else _ALL_DONE
