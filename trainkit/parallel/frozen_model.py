"""A second, frozen model in the same layout: a teacher, or a reference model.

It runs forward on the microbatches of a step, and its outputs are added to them as columns for the
loss of the trained model. In a pipeline its last stage adds them, on the ranks that compute the
loss.
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
"""`select_columns(output, batch)`: columns of the batch by name, `[B, S, ...]` each."""


def add_columns(
    stages_or_model: Stages | nn.Module,
    microbatches: Sequence[Batch],
    select_columns: ColumnsOf,
    *,
    call: Call | None = None,
) -> list[Batch]:
    """Return microbatches with outputs of a frozen model as further columns, in `extra`.

    All microbatches are run first, in evaluation mode and without gradients, so the columns of a
    whole step are in memory at once: the hidden states of a teacher, or one number per token of a
    reference model.

    Args:
        stages_or_model: This rank's stages of the frozen model, in the layout and with the schedule
            of the trained model; or any module.
        microbatches: The microbatches of this rank; their number is equal on all ranks.
        select_columns: Returns the columns to keep of an output, `[B, S, ...]` like the labels.
        call: Calls a stage with a batch; by default the call of the stages, or `call_model`.

    Returns:
        The microbatches with their columns on the ranks of the last stage, unchanged on others.

    Effects:
        Puts the stages into evaluation mode and back. Sharded stages and pipelines communicate:
        every rank must call it.

    Examples:
        >>> from trainkit.batch import make_padding_batch
        >>> call = lambda model, batch: model(batch["labels"].float().unsqueeze(-1))
        >>> keep = lambda output, batch: {"squares": output.square()}
        >>> [batch] = add_columns(nn.Linear(1, 3), [make_padding_batch(1, 2)], keep, call=call)
        >>> batch["squares"].shape, batch["squares"].requires_grad
        (torch.Size([1, 2, 3]), False)

    Such columns are the log-probabilities of the reference model in Rafailov et al., "Direct
    preference optimization" (2023), and hidden states of a teacher for distillation (Hinton et al.,
    2015).
    """
    stages = as_stages(stages_or_model, "add_columns", call=call)

    def add_to(batch: Batch) -> Batch:
        output = forward_stages(stages, batch)
        if output is None:
            return batch
        return attrs.evolve(batch, extra={**batch.extra, **select_columns(output, batch)})

    with use_eval_mode(stages):
        # In one block, at whose end FSDP frees what it has gathered.
        return [add_to(batch) for batch in microbatches]


def make_output_head(
    stages_or_model: Stages | nn.Module,
    batch: Mapping[str, Any],
    *,
    call: Call | None = None,
) -> Hidden:
    """Return the output head of a frozen model, for `objectives.distillation`.

    A sharded model has its full output weight only during a forward pass: this copies it out of
    one. Once is enough, since the weight does not change.

    Args:
        stages_or_model: As in `add_columns`, of a model that returns a `Hidden`.
        batch: Any microbatch of this layout, on every rank.
        call: Calls a stage with a batch; by default the call of the stages, or `call_model`.

    Returns:
        A `Hidden` without hidden states: the output weight `[V, E]` or this rank's rows of it, the
        axis over which it is sharded, and the soft cap. On ranks without the last stage it is
        empty.

    Effects:
        As `add_columns`. Keeps a copy of the weight on every rank of the last stage.

    Examples:
        >>> call = lambda model, batch: Hidden(batch["x"], model.weight, softcap=30.0)
        >>> head = make_output_head(nn.Linear(4, 8), {"x": torch.ones(1, 2, 4)}, call=call)
        >>> head.hidden.shape, head.weight.shape, head.softcap
        (torch.Size([0]), torch.Size([8, 4]), 30.0)
    """
    stages = as_stages(stages_or_model, "make_output_head", call=call)
    empty = torch.empty(0)
    with use_eval_mode(stages):  # at its end FSDP frees the weight of a `Hidden`
        output = drop_routing(forward_stages(stages, batch))
        if output is None:
            return Hidden(empty, empty)
        # A copy: FSDP will free the memory of the gathered weight.
        return output._replace(hidden=empty, weight=output.weight.detach().clone())
