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
    """Make the call by which `generation.generate` gets logits on every rank of any layout.

    `generate` makes it itself when it is given a `Stages`.

    For the stages of a `Decoder` it is a `CachedCall`: a rank keeps the keys and values of its own
    layers and heads. Ranks that split sequences (ring, Ulysses) all compute the same, and so do
    those that split rows, unless each has prompts of its own.

    For other stages, or where a `call` is given, the whole text is computed each time, shared out
    over the ranks: it is lengthened to what they can share equally. Attention is causal, so what
    stands behind the text changes nothing in it, and is cut off again.

    Args:
        stages: This rank's stages, from `build_stages`.
        call: How a batch enters a stage, and then nothing is cached.
        sharded: Whether ranks of `dp` have batches of their own, as with
            `generation.generate.generate_sharded`; all must call it as often.

    Returns:
        `call(model, batch) -> logits`: `[1, R, V]` of a batch with a "cache", else `[1, S, V]` of a
        batch of one row with one document. All ranks, or all that have the same batch, get the bits
        of one, so that they draw the same token. The model it is given is not used: `stages` are.

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
    kinds: list[Any] = []  # of logits, which only the last stage knows

    def run(batch: Mapping[str, Any], call: Call) -> Tensor | None:
        with use_eval_mode(stages):  # at its end FSDP lets go of the weight of a `Hidden`
            output = forward_stages(stages, batch, call=call)
            return None if output is None else _whole(output, stages[-1])

    def shared(logits: Tensor | None, length: int) -> Tensor:
        if not kinds:
            own = None if logits is None else [logits.shape[-1], str(logits.dtype)]
            kinds.extend(all_gather_objects(own, pp)[last])
        if logits is None:
            shape, dtype = (1, length, kinds[0]), getattr(torch, kinds[1].removeprefix("torch."))
            logits = torch.empty(shape, dtype=dtype, device=compute_device(stages[0]))
        if not sharded:
            return broadcast(logits.contiguous(), world, source=source)
        logits = broadcast(logits.contiguous(), pp, source=last)
        for axis in (stages.ulysses, stages.ring, tp):
            logits = broadcast(logits, axis)
        return logits

    def run_cached(_: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        ends = batch["cache"].last
        rows = batch["input_ids"].shape[1] if ends is None else len(ends)
        return shared(run(_filled_up(batch, tp.count), call_with_cache), rows)

    def run_anew(_: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        whole = _lengthened(batch, stages)
        part = shard_sequence(whole, ring=stages.ring.share, ulysses=stages.ulysses.share)
        logits, length = run(part, call or stages.call), batch["input_ids"].shape[1]
        if logits is not None:
            logits = _in_order(logits, stages)[:, :length]
        return shared(logits, length)

    keeps = call is None and all(isinstance(stage, Decoder) for stage in stages)
    return CachedCall(run_cached) if keeps else run_anew


def _filled_up(batch: Mapping[str, Any], multiple: int) -> Mapping[str, Any]:
    """Return a batch of one row with padding, so that ranks of tp have equal parts of it."""
    more = -batch["input_ids"].shape[1] % multiple
    if not more:
        return batch
    fills = {"input_ids": 0, "position_ids": 0, "document_ids": -1}
    filled = {name: nn.functional.pad(batch[name], (0, more), value=x) for name, x in fills.items()}
    spans = batch["spans"]
    ends = nn.functional.pad(spans.cu_seqlens, (0, 1))
    ends[-1] = filled["input_ids"].shape[1]
    lengths = np.append(spans.lengths, more)
    cache = batch["cache"]
    if cache.last is None:
        cache = attrs.evolve(
            cache, last=torch.arange(batch["input_ids"].shape[1], device=ends.device)
        )
    spans = Spans(ends, lengths, max(spans.max_length, more))
    return {**batch, **filled, "spans": spans, "cache": cache}


def _lengthened(batch: Mapping[str, Any], stages: Stages) -> Batch:
    """Return a batch of one document, made long enough for every rank to have an equal part."""
    device = compute_device(stages[0])
    ids, lengths = batch["input_ids"].to(device), batch["spans"].lengths
    if ids.shape[0] != 1 or len(lengths) != 1:
        raise ValueError(
            f"make_call: a batch of {ids.shape[0]} rows with {len(lengths)} documents was given; "
            "its call takes one row with one document"
        )
    ring = stages.ring.count
    multiple = stages.tp.count * stages.ulysses.count * (2 * ring if ring > 1 else 1)
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
            f"make_call: the model gives logits of {logits.shape[-1]} words of {size}; give the "
            'style "column_gathered" to its last matrix'
        )
    return logits


def _in_order(logits: Tensor, stages: Stages) -> Tensor:
    """Put the tokens of all ranks of the sequence back into the order of the text."""
    ring_part = all_gather_replicated(logits, stages.ulysses, dim=1)
    whole = all_gather_replicated(ring_part, stages.ring, dim=1)
    return zigzag_unshard(whole, stages.ring.count)
