"""The loss of a model in any layout on rows that are held out, as a run asks for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from trainkit.data.steps import make_eval_batches
from trainkit.metrics import to_host
from trainkit.models.call import call_model
from trainkit.parallel.stage_forward import compute_device
from trainkit.step import evaluate
from trainkit.types import SOLO, Axis, Call, DataShard, Loss

if TYPE_CHECKING:
    from trainkit.data.packed import PackedCorpus


def bind_loss(
    stages: Sequence[nn.Module],
    held: PackedCorpus,
    loss: Loss,
    *,
    rows_per_batch: int,
    place: DataShard = DataShard(),  # noqa: B008 (frozen)
    axis: Axis = SOLO,
    pp: Axis = SOLO,
    tp: Axis = SOLO,
    call: Call = call_model,
) -> Callable[[], dict[str, Any]]:
    """Return the function that evaluates a model on rows that are held out, as it is by then.

    Args:
        stages: This rank's stages, from `build_stages`; or one model.
        held: The rows, from `data.split_held_out`.
        loss: The loss; see `losses.average_terms` for what its terms are divided by.
        rows_per_batch: Rows that go through the model at once, on each rank.
        place: Which part of a batch this rank holds, `ps.place`.
        axis: The ranks that hold distinct tokens, `ps.loss`.
        pp: The pipeline axis, `ps.pp`.
        tp: The tensor-parallel axis, `ps.tp`.
        call: How a batch enters the model.

    Returns:
        `evaluate() -> {name: number}`: the divided terms of the loss and "tokens", equal on all
        ranks, all of which must call it. It raises what `step.evaluate` and
        `data.make_eval_batches` do.

    Effects:
        None here; those of the returned function are those of `step.evaluate`, and it waits for the
        device.

    Examples:
        >>> from trainkit.data.corpus import make_corpus
        >>> from trainkit.data import PackedCorpus
        >>> from trainkit.losses import next_token
        >>> from trainkit.models import build_decoder, make_decoder_config
        >>> from trainkit.packing import pack_bins
        >>> held = PackedCorpus(make_corpus([[1, 2, 3]]), pack_bins([3], 4))
        >>> model = build_decoder(make_decoder_config("tiny"), seed=0)
        >>> evaluate = bind_loss([model], held, next_token, rows_per_batch=1)
        >>> evaluate()["tokens"]
        2
    """
    device = compute_device(stages[0])

    def evaluate_held_out() -> dict[str, Any]:
        size = {"rows_per_batch": rows_per_batch, "device": device}
        batches = make_eval_batches(held, place=place, **size)
        return to_host(evaluate(stages, batches, loss, axis=axis, pp=pp, tp=tp, call=call))

    return evaluate_held_out
