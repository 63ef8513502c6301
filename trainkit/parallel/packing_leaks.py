"""A check for models that leak from one document of a packed row into the next.

Recurrent and convolutional layers (Mamba, gated DeltaNet, short convolutions) carry a state along
the row. Attention separates the documents of a packed row by their positions; such layers do not,
unless their kernels take the bounds of the documents.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import attrs
import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter

from trainkit.batch.shards import spans_of_lengths
from trainkit.models.decoder import Decoder
from trainkit.parallel.stage_forward import use_eval_mode
from trainkit.types import Batch, Call, ConfigError, Hidden, drop_routing

# The call by which each model that was tried leaks, or None.
_TRIED: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()
_UNTRIED = object()


def refuse_leaks(
    function: str, model: nn.Module, batches: Sequence[Mapping[str, Any]], call: Call
) -> None:
    """Raise ConfigError for packed batches if a model leaks between the documents of a row.

    A trial decides, once per model (and again for another call of a model that leaks), with the
    first batch that has the bounds of documents: see `leaks`. trainkit's own decoders need no
    trial.

    Args:
        function: The name of the caller, for the message.
        model: The whole model, of any class.
        batches: Some batches.
        call: Calls the model with a batch.

    Raises:
        ConfigError: The model leaks, and a row has several documents.

    Effects:
        The first call for a model runs it three times without gradients, in evaluation mode. A
        sharded model communicates then, so all of its ranks must call this together. For a model
        that leaks, it waits for the document ids if a row has padding or several documents.

    Examples:
        >>> from trainkit.batch import make_padding_batch
        >>> call = lambda model, batch: model(batch["input_ids"])
        >>> refuse_leaks("f", nn.Embedding(2, 2), [make_padding_batch(1, 8)], call)
    """
    leaky_call = _TRIED.get(model, _UNTRIED)
    if leaky_call is None:
        return
    # Another call may give a model's kernels the bounds that this one lacks.
    if leaky_call is _UNTRIED or leaky_call != call:
        batch = next(filter(_has_bounds, batches), None)
        if batch is None and not isinstance(model, Decoder):
            return  # not tried yet: a later batch may have bounds
        leaky_call = call if batch is not None and leaks(model, batch, call) else None
        _TRIED[model] = leaky_call
        if leaky_call is None:
            return
    for batch in batches:
        # One span a row is known on the host; otherwise reading the ids waits for the device.
        has_one_each = _has_bounds(batch) and len(batch["spans"].lengths) == len(batch["input_ids"])
        if has_one_each or "document_ids" not in batch:
            continue
        if bool((batch["document_ids"] > 0).any()):
            raise ConfigError(
                f"{function}: {type(model).__name__} keeps a state over the row, so a packed "
                "document is computed from those before it: changing the first document of a row "
                "changed the outputs of the second. Pack one document a row "
                "(pack_bins(..., max_documents=1)), or let `call` give the bounds of documents "
                "(batch['spans'].cu_seqlens) to a model whose kernels take them",
                where="call",
                got=f"{int(batch['document_ids'].max()) + 1} documents in a row",
                want="1 document in a row",
                hint="testing.check_packing(model, call) shows by how much",
            )


@torch.no_grad()
def leaks(model: nn.Module, batch: Mapping[str, Any], call: Call) -> bool:
    """Return whether a model's outputs for a document depend on the document before it in the row.

    The batch is used as rows of two documents. The third quarter of a row, the start of the second
    document, is compared after a change of the first document, and after a change of the last
    quarter, which a causal model does not see there: that second difference is rounding (experts
    compute with other numbers of tokens). A leak is a difference of more than sixteen times it.

    Args:
        model: A causal model; the result for any other is False.
        batch: "input_ids", "position_ids", "document_ids" and "spans", of rows of 8 tokens or more;
            for any other batch the result is False.
        call: Calls the model with a batch. All floating-point tensors `[B, S, ...]` in its result
            are compared.

    Effects:
        Runs the model three times, in evaluation mode.

    Examples:
        >>> from trainkit.batch import make_padding_batch
        >>> leaky = lambda model, batch: model(batch["input_ids"]).cumsum(1)
        >>> leaks(nn.Embedding(2, 2), make_padding_batch(1, 8), leaky)
        True
    """
    if isinstance(model, Decoder) or not _has_bounds(batch):
        return False
    ids = batch["input_ids"]
    quarter = ids.shape[1] // 4
    half = 2 * quarter
    lowest, highest = ids.min(), ids.max()
    # If all ids are equal, the other id is one less, or 1 for 0: both are in the vocabulary.
    highest = torch.where(lowest == highest, (lowest - 1).abs(), highest)
    # Every token changes, to an id that the batch has already.
    other = torch.where(ids == lowest, highest, lowest)
    first = torch.arange(ids.shape[1], device=ids.device) < half
    last = torch.arange(ids.shape[1], device=ids.device) >= half + quarter
    variants = (ids, torch.where(first, other, ids), torch.where(last, other, ids))
    compared = slice(half, half + quarter)
    # Eager, as compiled code would be compiled once more for these spans.
    with use_eval_mode([model]), torch.compiler.set_stance("force_eager"):
        plain, after_first, after_last = (
            [
                x[:, compared].clone()
                for x in tensors_of(call(model, _pack_two(batch, tokens, half)), ids.shape)
            ]
            for tokens in variants
        )
    dtypes = {x.dtype for x in (*model.parameters(), *plain) if x.is_floating_point()}
    coarsest = max(torch.finfo(dtype).eps for dtype in dtypes) if dtypes else 0.0
    for same, changed, rounded in zip(plain, after_first, after_last, strict=True):
        rounding = float((rounded - same).abs().max())
        # Rounding of the dtype, for a model whose second difference happens to be 0.
        tolerance = max(1e-3, 2 * coarsest) * float(same.abs().max())
        if float((changed - same).abs().max()) > max(16 * rounding, tolerance):
            return True
    return False


def tensors_of(output: Any, shape: Sequence[int]) -> list[Tensor]:
    """Return the floating point tensors `[B, S, ...]` of a model's output.

    Examples:
        >>> output = {"logits": torch.zeros(1, 3, 5), "loss": torch.zeros(())}
        >>> [x.shape for x in tensors_of(output, (1, 3))]
        [torch.Size([1, 3, 5])]
    """
    output = drop_routing(output)
    output = output.hidden if isinstance(output, Hidden) else output
    tensors = [x for x in tree_iter(output) if isinstance(x, Tensor)]
    return [x for x in tensors if x.is_floating_point() and x.shape[:2] == tuple(shape)]


def _has_bounds(batch: Mapping[str, Any]) -> bool:
    """Return whether a batch has the bounds of its documents, in rows long enough for a trial."""
    names = ("input_ids", "position_ids", "document_ids", "spans")
    if not isinstance(batch, Mapping) or not all(name in batch for name in names):
        return False
    ids = batch["input_ids"]
    # If sequences are sharded over ranks, `spans` cover more tokens than this rank's.
    return ids.shape[1] >= 8 and int(batch["spans"].lengths.sum()) == ids.numel()


def _pack_two(batch: Mapping[str, Any], ids: Tensor, half: int) -> Mapping[str, Any]:
    """Return a batch with other ids and two documents in each row, the second one from `half`."""
    rows, length = ids.shape
    positions = torch.arange(length, device=ids.device)
    lengths = np.array([half, length - half] * rows)
    changes = {
        "input_ids": ids,
        "position_ids": torch.where(positions < half, positions, positions - half).expand(rows, -1),
        "document_ids": (positions >= half).long().expand(rows, -1),
        "spans": spans_of_lengths(lengths, device=ids.device),
    }
    return attrs.evolve(batch, **changes) if isinstance(batch, Batch) else {**batch, **changes}
