"""The loss of a model in any layout on held-out rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from trainkit.data.steps import make_eval_batches
from trainkit.metrics import Metric, to_host
from trainkit.parallel.stage_forward import compute_device
from trainkit.parallel.stage_ranks import as_stages
from trainkit.step import evaluate
from trainkit.types import SOLO, Axis, Call, Loss, Stages

if TYPE_CHECKING:
    from trainkit.data.packed import PackedCorpus


def make_evaluator(
    stages_or_model: Stages | nn.Module,
    rows: PackedCorpus,
    loss: Loss,
    *,
    rows_per_batch: int,
    metric: Metric | None = None,
    axis: Axis = SOLO,
    call: Call | None = None,
) -> Callable[[], dict[str, Any]]:
    """Make a function that evaluates a model on held-out rows, with its current weights.

    Args:
        stages_or_model: This rank's stages, or any module.
        rows: The rows, from `data.split_held_out`.
        loss: The loss; `losses.average_terms` documents the denominators of its terms.
        rows_per_batch: Rows per forward pass, on each rank.
        metric: A further metric of outputs and batches, with names; see `step.evaluate`.
        axis: For a plain module, the ranks that share the rows. A `Stages` has its own axes.
        call: How a batch enters the model, in place of the stages' own call, or of `call_model`.

    Returns:
        `evaluate() -> {name: number}`: the divided terms of the loss, "tokens" and the values of
        the metric, equal on all ranks, all of which must call it. It raises the errors of
        `step.evaluate` and `data.make_eval_batches`, has the effects of `step.evaluate`, and waits
        for the device.

    Effects:
        None here. The returned function communicates on the axes of the stages, and puts modules
        into evaluation mode for its duration.

    Examples:
        >>> from trainkit.data.corpus import make_corpus
        >>> from trainkit.data import PackedCorpus
        >>> from trainkit.losses import next_token
        >>> from trainkit.models import build_decoder, make_decoder_config
        >>> from trainkit.packing import pack_bins
        >>> rows = PackedCorpus(make_corpus([[1, 2, 3]]), pack_bins([3], 4))
        >>> model = build_decoder(make_decoder_config("tiny"), seed=0)
        >>> evaluate = make_evaluator(model, rows, next_token, rows_per_batch=1)
        >>> evaluate()["tokens"]
        2
    """
    # Whatever was given, `step.evaluate` gets stages with their axes.
    stages = as_stages(stages_or_model, "make_evaluator", axis=axis, call=call)
    device = compute_device(stages[0])

    def evaluate_held_out() -> dict[str, Any]:
        # Made anew each time, as an iterator: no batch stays on the device between evaluations.
        batches = make_eval_batches(
            rows, rows_per_batch=rows_per_batch, data_shard=stages.data_shard, device=device
        )
        return to_host(evaluate(stages, batches, loss, metric=metric))

    return evaluate_held_out
