"""A frozen second model beside the one that is trained, in the same layout: a teacher, a reference.

It takes the microbatches of a step forward, and what it makes of them goes beside them, for the
loss of the model that is trained. In a pipeline only its last stage makes anything, on the ranks
that compute the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from trainkit.parallel.stage_forward import forward_stages, use_eval_mode
from trainkit.parallel.stage_ranks import as_stages
from trainkit.types import Batch, Call, Hidden, Stages, drop_routing

ColumnsOf = Callable[[Any, Mapping[str, Any]], Mapping[str, Tensor]]
"""From a model's output and its batch to columns of that batch by name, `[B, S, ...]` each."""


def add_columns(
    stages_or_model: Stages | nn.Module,
    microbatches: Sequence[Batch],
    select_columns: ColumnsOf,
    *,
    call: Call | None = None,
) -> list[Batch]:
    """Return microbatches that carry what a frozen model makes of them, in `extra`.

    All of them go through the model first, in evaluation mode and without gradients, so that the
    columns of a whole step exist at a time: for a teacher its hidden states, for a reference a
    number per token.

    Args:
        stages_or_model: This rank's stages of the frozen model, in the layout and with the schedule
            of the model that is trained; or any module.
        microbatches: Those of this rank, as many as the ranks have that its shards reach.
        select_columns: What is kept of an output, `[B, S, ...]` as the labels.
        call: How a batch enters the model, in place of the stages' own call, or of `call_model`.

    Returns:
        The microbatches with their columns on the ranks of the last stage; as they were elsewhere.

    Effects:
        Puts the stages into evaluation mode and back. Sharded stages communicate, and those of a
        pipeline: every rank must call it.

    Examples:
        >>> from trainkit.batch import make_padding_batch
        >>> call = lambda model, batch: model(batch["labels"].float().unsqueeze(-1))
        >>> keep = lambda output, batch: {"squares": output.square()}
        >>> [batch] = add_columns(nn.Linear(1, 3), [make_padding_batch(1, 2)], keep, call=call)
        >>> batch["squares"].shape, batch["squares"].requires_grad
        (torch.Size([1, 2, 3]), False)

    Log-probabilities of a reference are such columns in Rafailov et al., "Direct preference
    optimization" (2023), hidden states of a teacher in Hinton et al. (2015) by way of its head.
    """
    stages = as_stages(stages_or_model, "with_columns", call=call)

    def add_columns(batch: Batch) -> Batch:
        output = forward_stages(stages, batch)
        if output is None:
            return batch
        return attrs.evolve(batch, extra={**batch.extra, **select_columns(output, batch)})

    with use_eval_mode(stages):
        return [add_columns(batch) for batch in microbatches]


def make_output_head(
    stages_or_model: Stages | nn.Module,
    batch: Mapping[str, Any],
    *,
    call: Call | None = None,
) -> Hidden:
    """Return what a frozen model makes logits of hidden states with, for `objectives.distillation`.

    A sharded model has its output weight in a forward pass alone: this copies it out of one, once,
    since it never changes.

    Args:
        stages_or_model: As in `add_columns`, of a model that returns a `Hidden`.
        batch: Any microbatch of this layout, for all ranks that its shards reach.
        call: How a batch enters the model, in place of the stages' own call, or of `call_model`.

    Returns:
        A `Hidden` without hidden states: the output weight `[V, E]` or this rank's rows of it, the
        axis over which they are cut, and the soft cap. Without rows where the last stage is not.

    Effects:
        As `add_columns`. Keeps a copy of the weight on every rank of the last stage.

    Examples:
        >>> call = lambda model, batch: Hidden(batch["x"], model.weight, softcap=30.0)
        >>> head = make_output_head(nn.Linear(4, 8), {"x": torch.ones(1, 2, 4)}, call=call)
        >>> head.hidden.shape, head.weight.shape, head.softcap
        (torch.Size([0]), torch.Size([8, 4]), 30.0)
    """
    stages = as_stages(stages_or_model, "make_output_head", call=call)
    nothing = torch.empty(0)
    with use_eval_mode(stages):  # at its end FSDP lets go of the weight of a `Hidden`
        output = drop_routing(forward_stages(stages, batch))
        if output is None:
            return Hidden(nothing, nothing)
        return output._replace(hidden=nothing, weight=output.weight.detach().clone())
