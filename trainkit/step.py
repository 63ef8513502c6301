"""Forward and backward over a step's microbatches: losses are sums, one number divides them.

`make_forward_backward` makes the executor of a layout, so that a recipe calls the same function
with and without pipeline stages.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from trainkit.batch import (
    check_terms,
    count_valid_tokens,
    divide_terms,
    make_divisors,
    make_padding_batch,
    to_device,
)
from trainkit.collectives import all_gather_objects, all_max, all_sum, get_comm_device
from trainkit.losses import average_terms
from trainkit.models.call import call_model
from trainkit.parallel.grad_reduction import (
    Reduce,
    check_sums,
    find_reducers,
    reducing,
)
from trainkit.parallel.packing_leaks import refuse_leaks
from trainkit.parallel.pipeline import make_pipeline
from trainkit.parallel.split import schedule_kind
from trainkit.parallel.stage_forward import (
    agree_on_kinds,
    compute_device,
    evaluating,
    forward_stages,
    share_terms,
    terms_of,
)
from trainkit.parallel.stage_ranks import as_stages, places_of
from trainkit.types import (
    BATCH_TENSORS,
    SOLO,
    Axis,
    Batch,
    Call,
    Denominator,
    ForwardBackward,
    Loss,
    Stages,
    check_choice,
)


def _add(sums: dict[str, Tensor], terms: Mapping[str, Tensor]) -> None:
    for name, term in terms.items():
        sums[name] = sums[name] + term if name in sums else term


def _add_long(sums: dict[str, Tensor], terms: Mapping[str, Tensor]) -> None:
    """Add terms of which there may be many in fp64: fp32 is 2e-5 off after 10^9 tokens."""
    wide = {name: x.double() if x.is_floating_point() else x for name, x in terms.items()}
    _add(sums, wide)


def forward_backward(
    model: nn.Module,
    microbatches: Sequence[Mapping[str, Any]],
    loss: Loss,
    *,
    denominator: Denominator,
    call: Call = call_model,
    reduce: Reduce = "last",
) -> dict[str, Tensor]:
    """Add the gradients of a step's microbatches to `.grad`; return the loss's sums.

    Each microbatch contributes the gradient of (its sum of losses) / denominator, so microbatches,
    ranks and shards combine by `+`, however the tokens are spread over them.

    Args:
        model: Any module: bare, FSDP2 or DDP, or with such modules inside.
        microbatches: What this rank computes in this step, at least one.
        loss: `loss(output, batch) -> (sum, {name: sum})`.
        denominator: The number of valid tokens in the whole global batch, 0-d; or, for a loss that
            returns a sum for each of its terms, a number for each: {term: tensor}. 0 divides by 1.
        call: How a batch enters the model.
        reduce: "last" reduces gradients once, after the last microbatch; "each" reduce-scatters
            every microbatch and leaves only the all-reduce over replicas for the last, which needs
            less memory.

    Returns:
        The terms of the loss summed over the microbatches of this rank, detached, not divided.

    Raises:
        ValueError: There is no microbatch, `reduce` is unknown, a module averages gradients, or the
            loss returns something else than (sum, {name: sum}).
        ConfigError: A row has several documents, and the model computes one from another, as those
            do that keep a state over the row; see `testing.check_packing`.

    Effects:
        Runs a model of others three times without gradients, the first time that it comes.
        Adds to the `.grad` of the parameters of `model`; communicates over the axes that its
        modules reduce over.

    Examples:
        >>> model = nn.Linear(1, 1, bias=False)
        >>> call = lambda model, batch: model(batch["x"])
        >>> loss = lambda y, batch: (y.sum(), {"loss": y.detach().sum()})
        >>> batches = [{"x": torch.full((2, 1), 3.0)}, {"x": torch.full((1, 1), 6.0)}]
        >>> sums = forward_backward(model, batches, loss, denominator=torch.tensor(3), call=call)
        >>> model.weight.grad.item()
        4.0
    """
    _check_microbatches(microbatches)
    if reduce not in {"last", "each"}:
        check_choice(("last", "each"), "forward_backward", reduce=reduce)
    refuse_leaks("forward_backward", model, microbatches, call)
    reducers, divisors = find_reducers(model), make_divisors(denominator)
    sums: dict[str, Tensor] = {}
    if not reducers:
        for batch in microbatches:
            total, terms = check_terms(loss(call(model, batch), batch), by="forward_backward")
            divide_terms(total, divisors).backward()
            _add(sums, terms)
        return sums
    check_sums(reducers)
    with reducing(model, reducers, microbatches, reduce=reduce) as reduction:
        for index, batch in enumerate(microbatches):
            with reduction.microbatch(last=index == len(microbatches) - 1):
                total, terms = check_terms(loss(call(model, batch), batch), by="forward_backward")
                divide_terms(total, divisors).backward()
            _add(sums, terms)
    return sums


def _check_microbatches(microbatches: Sequence[Mapping[str, Any]]) -> None:
    if not microbatches or (type(microbatches) is not list and isinstance(microbatches, Mapping)):
        found = "one batch" if microbatches else "no microbatch"
        raise ValueError(f"forward_backward: microbatches must be a sequence of some, got {found}")


def make_forward_backward(
    stages_or_model: Stages | nn.Module,
    loss: Loss,
    *,
    reduce: Reduce = "last",
    call: Call | None = None,
) -> ForwardBackward:
    """Make the executor of a layout: `forward_backward(microbatches, denominator=...)`.

    Args:
        stages_or_model: This rank's stages, or any module.
        loss: The loss; a pipeline needs its `terms`.
        reduce: When gradients are reduced; see `forward_backward`.
        call: How a batch enters the model, in place of the stages' own call, or of `call_model`.

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
    check_choice(("last", "each"), "forward_backward", reduce=reduce)
    schedule_kind(stages.layout.schedule)
    if stages.pp.count == 1:
        if len(stages) != 1:
            raise ValueError(f"make_forward_backward: one stage is needed, got {len(stages)}")
        return partial(forward_backward, stages[0], loss=loss, call=stages.call, reduce=reduce)
    through = make_pipeline(stages, loss, reduce=reduce)

    def run(
        microbatches: Sequence[Mapping[str, Any]], *, denominator: Denominator
    ) -> dict[str, Tensor]:
        _check_microbatches(microbatches)
        return through(microbatches, denominator=denominator)

    return run


def evaluate(
    stages_or_model: Stages | nn.Module,
    batches: Iterable[Mapping[str, Any]],
    loss: Loss,
    *,
    axis: Axis = SOLO,
    call: Call | None = None,
) -> dict[str, Tensor]:
    """Return the loss over held-out data: the sum of losses over the sum of tokens, on all ranks.

    Ranks may have different numbers of batches, or none: one that has run out computes along, on
    its last batch or on a blank one, with zeros for the columns that the others' have, and adds 0,
    until all are done, because a sharded model needs every rank for every forward pass. (Under
    Ulysses every rank must have one: a blank one of whole rows cannot be made here;
        `make_eval_batches`
    makes it.) Through a pipeline batches go one after the other, forward only, whatever the
    schedule of the training steps.

    Args:
        stages_or_model: This rank's stages, or any module.
        batches: This rank's part of the held-out data; all ranks of a pipeline read the same.
        loss: The loss; see `losses.average_terms` for what its terms are divided by.
        axis: For a plain module, the ranks that hold distinct tokens. A `Stages` has its own axes.
        call: How a batch enters the model, in place of the stages' own call, or of `call_model`.

    Returns:
        The divided terms, summed and divided in fp64, and "tokens", the number of valid tokens
        (int64); equal on all ranks.

    Raises:
        ValueError: There is no batch on any rank.

    Effects:
        Communicates on `axis`, or on the axes of the stages, with one host sync per batch. Puts
        the modules into evaluation mode, and each back into the mode it had; no gradient, no
        generator and no parameter changes.

    Examples:
        >>> loss = lambda y, batch: (y.sum(), {"loss": y.detach().sum()})
        >>> call = lambda model, batch: model(batch["x"])
        >>> batch = {"x": torch.full((1, 2), 3.0), "labels": torch.ones(1, 2)}
        >>> evaluate(nn.Identity(), [batch], loss, call=call)["loss"]
        tensor(3., dtype=torch.float64)
    """
    stages = as_stages(stages_or_model, "evaluate", axis=axis, call=call)
    axis, pp = stages.loss, stages.pp
    sums: dict[str, Tensor] = {}
    device = compute_device(stages[0])
    count = torch.zeros((), dtype=torch.int64, device=device)
    source = iter(batches)
    last: Mapping[str, Any] | None = None
    with evaluating(stages):
        while (batch := _next_on_any(source, (axis, pp, stages.tp))) is not _ALL_DONE:
            if last is None:
                last = _first_of(batch, stages[0], axis)
            if batch is None:  # others have one: compute along, on the last one or a blank one
                found = _terms_through(stages, last, loss)
                _add_long(sums, {name: torch.zeros_like(term) for name, term in found.items()})
                continue
            last = batch
            if axis.count == pp.count == 1:  # else some ranks may have no batch to try it with
                refuse_leaks("evaluate", stages[0], [batch], stages.call)
            count = count + count_valid_tokens([batch])
            _add_long(sums, _terms_through(stages, batch, loss))
    sums = _shared(sums, loss, stages=stages, device=device)
    if not sums:
        raise ValueError("evaluate: there is no batch to evaluate on any rank")
    sums = {name: all_sum(sums[name], axis) for name in sorted(sums)}
    tokens = all_sum(count, axis)
    return average_terms(sums, tokens) | {"tokens": tokens}


def _terms_through(stages: Stages, batch: Mapping[str, Any], loss: Loss) -> dict[str, Tensor]:
    """Return the loss's terms where the last stage is, nothing elsewhere."""
    if stages.pp.count == 1:
        return check_terms(loss(stages.call(stages[0], batch), batch), by="evaluate")[1]
    output = forward_stages(stages, batch)
    is_last = places_of(stages, stages.pp)[-1].last
    return check_terms(loss(output, batch), by="evaluate")[1] if is_last else {}


def _shared(
    sums: dict[str, Tensor],
    loss: Loss,
    *,
    stages: Stages,
    device: torch.device,
) -> dict[str, Tensor]:
    pp = stages.pp
    if pp.count == 1:
        return sums
    source = places_of(stages, pp)[0].ranks[-1]
    if not any(all_gather_objects(len(sums), pp)):
        return {}
    kinds = agree_on_kinds(sums, terms_of(loss), axis=pp, source=source)
    return share_terms(sums, kinds, axis=pp, source=source, device=device)


def _first_of(batch: Mapping[str, Any] | None, model: nn.Module, axis: Axis) -> Mapping[str, Any]:
    """Return this rank's first batch, or a blank one with the columns that another rank's has."""
    kinds = all_gather_objects({} if batch is None else _columns(batch), axis)
    if batch is not None:
        return batch
    merged = {name: kind for own in kinds for name, kind in own.items()}
    return to_device(_blank(model, merged), compute_device(model))


def _columns(batch: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return the dtype and the inner sizes of what a batch has of each token besides."""
    shape = batch["labels"].shape
    tensors = {name: x for name, x in batch.items() if isinstance(x, Tensor)}
    return {
        name: [str(x.dtype).removeprefix("torch."), *x.shape[2:]]
        for name, x in tensors.items()
        if name not in BATCH_TENSORS and x.shape[:2] == shape
    }


def _blank(model: nn.Module, kinds: Mapping[str, Sequence[Any]]) -> Batch:
    """Return a blank batch that every part of a sequence-parallel model can take a share of."""
    blank = make_padding_batch(1, 2 * getattr(model, "sequence_parts", 1))
    size = blank.labels.shape
    columns = {
        name: torch.zeros(*size, *inner, dtype=getattr(torch, kind))
        for name, (kind, *inner) in kinds.items()
    }
    return attrs.evolve(blank, extra=columns)


_ALL_DONE = object()


def _next_on_any(source: Iterator[Mapping[str, Any]], axes: Sequence[Axis]) -> Any:
    """Return the next batch, None if only others have one, or `_ALL_DONE`; fail on all if one does.

    A rank that raised alone would leave the others waiting in a collective.
    """
    failure: Exception | None = None
    batch: Mapping[str, Any] | None = None
    try:
        batch = next(source, None)
    except Exception as error:  # noqa: BLE001 (told to the others, then raised)
        failure = error
    state = torch.tensor(2 if failure is not None else int(batch is not None))
    for axis in axes:
        state = all_max(state.to(get_comm_device(axis)), axis)
    most = int(state)
    if failure is not None:
        raise failure
    if most == 2:
        raise RuntimeError("evaluate: another rank could not read its next batch")
    return batch if most else _ALL_DONE
