"""Generation in any layout: a `call` that runs a window of text through all stages and shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trainkit.batch.shards import shard_sequence, zigzag_unshard
from trainkit.collectives import all_gather_json, broadcast, gather_replicated
from trainkit.models.call import call_model
from trainkit.models.decoder import whole_logits
from trainkit.parallel.places import places_of
from trainkit.parallel.stage_forward import compute_device, evaluating, forward_stages
from trainkit.types import IGNORED_LABEL, Batch, Call, ParallelState, Spans


def bind_call(stages: Sequence[nn.Module], ps: ParallelState, *, call: Call = call_model) -> Call:
    """Return a call for `models.generate` that gives whole logits on every rank of any layout.

    The window is lengthened to what the ranks can share equally. Attention is causal, so what
    stands behind the text changes nothing in it, and is cut off again.

    Args:
        stages: This rank's stages, from `build_stages`.
        ps: The layout.
        call: How a batch enters a stage.

    Returns:
        `call(model, batch) -> logits [1, S, V]`, for a batch of one row with one document. The
        model it is given is not used: `stages` are.

    Effects:
        None here. The returned function puts the stages into evaluation mode and back, and
        communicates on every axis that they are spread over: all ranks must call it.

    Examples:
        >>> from trainkit.mesh import solo_parallel
        >>> from trainkit.models.decoder import build_decoder
        >>> from trainkit.models.generate import generate
        >>> from trainkit.models.sizes import decoder_config
        >>> model = build_decoder(decoder_config("tiny"), seed=0)
        >>> call = bind_call([model], solo_parallel())
        >>> len(generate(model, [1, 2, 3], max_new_tokens=4, context=8, call=call))
        4
    """
    last = places_of(stages, ps.pp)[0].ranks[-1]

    def run(_: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        whole = _lengthened(batch, ps, compute_device(stages[0]))
        part = shard_sequence(whole, ring=ps.ring.share, ulysses=ps.ulysses.share)
        with evaluating(stages):
            output = forward_stages(stages, part, axis=ps.pp, call=call)
            logits = None
            if ps.pp.index == last:
                text = _in_order(_whole(output, stages[-1]), ps)
                logits = text[:, : batch["input_ids"].shape[1]].contiguous()
            return _on_all_stages(logits, ps, source=last, device=whole.input_ids.device)

    return run


def _lengthened(batch: Mapping[str, Any], ps: ParallelState, device: torch.device) -> Batch:
    """Return a batch of one document, made long enough for every rank to have an equal part."""
    ids, lengths = batch["input_ids"].to(device), batch["spans"].lengths
    if ids.shape[0] != 1 or len(lengths) != 1:
        raise ValueError(
            f"bind_call: a batch of {ids.shape[0]} rows with {len(lengths)} documents was given; "
            "its call takes one row with one document"
        )
    multiple = ps.tp.count * ps.ulysses.count * (2 * ps.ring.count if ps.ring.count > 1 else 1)
    length = -(-ids.shape[1] // multiple) * multiple
    zeros = torch.zeros((1, length), dtype=torch.int64, device=device)
    places = torch.arange(length, device=device)[None]
    return Batch(
        input_ids=nn.functional.pad(ids, (0, length - ids.shape[1])),
        labels=zeros + IGNORED_LABEL,
        position_ids=batch["position_ids"][:, :1].to(device) + places,
        document_ids=zeros,
        token_index=places,
        spans=Spans(
            torch.arange(0, length + 1, length, dtype=torch.int32, device=device),
            np.array([length]),
            length,
        ),
    )


def _whole(output: Any, stage: nn.Module) -> Tensor:
    """Return the logits of this rank's tokens: `[1, S, V]`; refuse a part of the vocabulary."""
    logits = whole_logits(output)
    size = getattr(getattr(stage, "config", None), "vocab_size", logits.shape[-1])
    if logits.shape[-1] < size:
        raise ValueError(
            f"bind_call: the model gives logits of {logits.shape[-1]} words of {size}; give the "
            'style "column_gathered" to its last matrix'
        )
    return logits


def _in_order(logits: Tensor, ps: ParallelState) -> Tensor:
    """Put the tokens of all ranks of the sequence back into the order of the text."""
    ring_part = gather_replicated(logits, ps.ulysses, dim=1)
    return zigzag_unshard(gather_replicated(ring_part, ps.ring, dim=1), ps.ring.count)


def _on_all_stages(
    logits: Tensor | None, ps: ParallelState, *, source: int, device: torch.device
) -> Tensor:
    """Return the logits that rank `source` of the pipeline has, on all its ranks."""
    own = None if logits is None else [list(logits.shape), str(logits.dtype)]
    shape, dtype = all_gather_json(own, ps.pp)[source]
    if logits is None:
        logits = torch.empty(shape, dtype=getattr(torch, dtype[6:]), device=device)
    return broadcast(logits, ps.pp, source=source)
