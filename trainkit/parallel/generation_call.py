"""Generation in any layout: a `call` that runs a batch through all stages and shards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor, nn

from trainkit.batch.shards import shard_sequence, zigzag_unshard
from trainkit.collectives import all_gather_objects, all_gather_replicated, broadcast
from trainkit.models.call import CachedCall, call_with_cache
from trainkit.models.decoder import Decoder, whole_logits
from trainkit.parallel.stage_forward import compute_device, forward_stages, use_eval_mode
from trainkit.parallel.stage_ranks import get_stage_places
from trainkit.types import IGNORED_LABEL, Batch, Call, Spans, Stages


def make_call(
    stages: Stages,
    *,
    call: Call | None = None,
    sharded: bool = False,
) -> Call:
    """Make the call with which `generation.generate` gets logits on every rank of any layout.

    `generate` makes it itself if it is given a `Stages`.

    For the stages of a `Decoder` it is a `CachedCall`: each rank caches the keys and values of its
    own layers and heads. Ranks of ring and Ulysses all compute the same, and so do ranks of dp,
    unless they have prompts of their own.

    For other stages, or with a `call`, the full text is computed each time, sharded over the ranks.
    It is padded to a length that divides, and the logits of the padding are cut off: attention is
    causal, so that padding after the text changes nothing in it.

    Args:
        stages: This rank's stages, from `build_stages`.
        call: Calls a stage with a batch, without a cache.
        sharded: Whether ranks of dp have batches of their own, as with
            `generation.generate_sharded`; all must call it the same number of times.

    Returns:
        `call(model, batch) -> logits`: `[1, R, V]` for a batch with a "cache", else `[1, S, V]` for
        a batch of one row with one document. All ranks of one batch get the same bits, so that they
        draw the same token. The model argument is not used: `stages` are.

    Effects:
        None here. The returned function puts the stages into evaluation mode and back, and
        communicates on every axis: all ranks must call it.

    Examples:
        >>> from trainkit.post.generation import generate
        >>> from trainkit.mesh import solo_parallel
        >>> from trainkit.models.decoder import build_decoder
        >>> from trainkit.models.decoder_sizes import make_decoder_config
        >>> from trainkit.parallel import make_stages
        >>> model = build_decoder(make_decoder_config("tiny"), seed=0)
        >>> stages = make_stages([model], solo_parallel())
        >>> (found,) = generate(stages, [[1, 2, 3]], max_new_tokens=4, context=8)
        >>> call = make_call(stages)
        >>> generate(model, [[1, 2, 3]], max_new_tokens=4, context=8, call=call) == [found]
        True
    """
    pp, tp, world = stages.pp, stages.tp, stages.world
    last = get_stage_places(stages, pp)[0].ranks[-1]
    source = last * (world.count // pp.count)  # pp is the outermost axis
    kind: list[Any] = []  # vocabulary size and dtype of logits, which only the last stage knows

    def run(batch: Mapping[str, Any], call: Call) -> Tensor | None:
        """Return the logits of this rank's tokens, `[1, S, V]`, on ranks of the last stage."""
        with use_eval_mode(stages):  # at its end FSDP frees the weight of a `Hidden`
            output = forward_stages(stages, batch, call=call)
            return None if output is None else _get_logits(output, stages[-1])

    def share(logits: Tensor | None, length: int) -> Tensor:
        """Broadcast logits to all ranks that have the same batch."""
        if not kind:
            own = None if logits is None else [logits.shape[-1], str(logits.dtype)]
            kind.extend(all_gather_objects(own, pp)[last])
        if logits is None:
            vocab_size, dtype_name = kind
            dtype = getattr(torch, dtype_name.removeprefix("torch."))
            device = compute_device(stages[0])
            logits = torch.empty((1, length, vocab_size), dtype=dtype, device=device)
        # Also where each rank has computed them: equal bits draw equal tokens.
        if not sharded:
            return broadcast(logits.contiguous(), world, source=source)
        logits = broadcast(logits.contiguous(), pp, source=last)
        # From the first rank of each axis in turn: then all ranks of a batch have its bits.
        for axis in (stages.ulysses, stages.ring, tp):
            logits = broadcast(logits, axis)
        return logits

    def run_cached(_: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        # The rows of logits that are wanted; None stands for those of all tokens.
        ends = batch["cache"].last
        rows = batch["input_ids"].shape[1] if ends is None else len(ends)
        return share(run(_pad_to_multiple(batch, tp.count), call_with_cache), rows)

    def run_full(_: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        padded = _pad_document(batch, stages)
        length = batch["input_ids"].shape[1]
        local = shard_sequence(padded, ring=stages.ring.share, ulysses=stages.ulysses.share)
        logits = run(local, call or stages.call)
        if logits is not None:
            logits = all_gather_replicated(logits, stages.ulysses, dim=1)
            logits = all_gather_replicated(logits, stages.ring, dim=1)
            logits = zigzag_unshard(logits, stages.ring.count)[:, :length]
        return share(logits, length)

    uses_cache = call is None and all(isinstance(stage, Decoder) for stage in stages)
    return CachedCall(run_cached) if uses_cache else run_full


def _get_logits(output: Any, stage: nn.Module) -> Tensor:
    """Return full logits `[1, S, V]`; raise ValueError for those of a part of the vocabulary."""
    logits = whole_logits(output)
    vocab_size = getattr(getattr(stage, "config", None), "vocab_size", logits.shape[-1])
    if logits.shape[-1] < vocab_size:
        raise ValueError(
            f"make_call: the model gives logits of {logits.shape[-1]} words of {vocab_size}; give "
            'the style "column_gathered" to its last matrix'
        )
    return logits


def _pad_to_multiple(batch: Mapping[str, Any], multiple: int) -> Mapping[str, Any]:
    """Return a batch of one row with row padding, so that ranks of tp have equal shards of it."""
    length = batch["input_ids"].shape[1]
    padding = -length % multiple
    if not padding:
        return batch
    # A document of its own, which no token of the text attends to.
    values = {"input_ids": 0, "position_ids": 0, "document_ids": -1}
    padded = {
        name: nn.functional.pad(batch[name], (0, padding), value=value)
        for name, value in values.items()
    }
    spans, cache = batch["spans"], batch["cache"]
    ends = nn.functional.pad(spans.cu_seqlens, (0, 1))
    ends[-1] = length + padding
    if cache.last is None:  # all tokens of the batch, but not its padding
        cache = attrs.evolve(cache, last=torch.arange(length, device=ends.device))
    spans = Spans(ends, np.append(spans.lengths, padding), max(spans.max_length, padding))
    return {**batch, **padded, "spans": spans, "cache": cache}


def _pad_document(batch: Mapping[str, Any], stages: Stages) -> Batch:
    """Return a batch of one document, padded so that every rank has an equal shard of it."""
    device = compute_device(stages[0])
    ids = batch["input_ids"].to(device)
    lengths = batch["spans"].lengths
    if ids.shape[0] != 1 or len(lengths) != 1:
        raise ValueError(
            f"make_call: a batch of {ids.shape[0]} rows with {len(lengths)} documents was given; "
            "its call takes one row with one document"
        )
    ring = stages.ring.count
    # The zigzag of a ring makes two chunks for each rank.
    multiple = stages.tp.count * stages.ulysses.count * (2 * ring if ring > 1 else 1)
    length = -(-ids.shape[1] // multiple) * multiple
    zeros = torch.zeros((1, length), dtype=torch.int64, device=device)
    index = torch.arange(length, device=device)[None]
    return Batch(
        input_ids=nn.functional.pad(ids, (0, length - ids.shape[1])),
        labels=zeros + IGNORED_LABEL,
        # The first position may not be 0.
        position_ids=batch["position_ids"][:, :1].to(device) + index,
        document_ids=zeros,
        token_index=index,
        spans=Spans(
            torch.arange(0, length + 1, length, dtype=torch.int32, device=device),
            np.array([length]),
            length,
        ),
    )
