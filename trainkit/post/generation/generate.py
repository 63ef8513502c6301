"""The loop that draws text: prompts of different lengths in one batch, each new token one step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Literal

import attrs
import numpy as np
import torch
from torch import Tensor, nn

from trainkit.collectives import all_gather_objects, any_rank
from trainkit.models.call import CachedCall, call_model, call_with_cache
from trainkit.models.decoder import Decoder, whole_logits
from trainkit.models.functional import bare
from trainkit.models.kv_cache import KVCache
from trainkit.parallel.generation_call import make_call
from trainkit.parallel.stage_forward import compute_device, use_eval_mode
from trainkit.post.generation.sampling import Sampling, next_tokens, places_of
from trainkit.post.generation.text import Reader, reader_of
from trainkit.types import (
    SOLO,
    Axis,
    Call,
    Hidden,
    NumericsError,
    Spans,
    Stages,
    Tokenizer,
    check_range,
    drop_routing,
)


@attrs.frozen
class Completion:
    """What a model has made of a prompt.

    Attributes:
        ids: The new tokens. The one that ended the text is not among them, nor those that a stop
            string begins in, or comes after.
        text: What they say, up to the stop string; None without a tokenizer.
        ended: By what: a token of `stop_ids`, a string of `stop`, or the number of tokens.
    """

    ids: list[int]
    text: str | None
    ended: Literal["stop_id", "stop", "length"]


def generate(
    stages_or_model: Stages | nn.Module,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    context: int,
    sampling: Sampling = Sampling(),  # noqa: B008 - frozen
    stop_ids: Sequence[int | None] = (),
    stop: Sequence[str] = (),
    tokenizer: Tokenizer | None = None,
    vocab_size: int | None = None,
    slide: bool = False,
    row_ids: Sequence[int] | None = None,
    stream: Callable[[int, str], None] | None = None,
    call: Call | None = None,
) -> list[Completion]:
    """Return texts that continue prompts, drawn together, one token of each at a time.

    A decoder keeps what it has computed of a text (`models.KVCache`), so a token costs one row of
    work. Any other module is run over its whole text again for each token, one row after the other.
    The noise of a draw is a function of the seed, the row's id and the token's position, so a
    row's text does not depend on the rows beside it (but for rounding, which a product of more rows
    may do otherwise; and but for experts with a capacity, whose choices depend on the batch). A row
    that has ended leaves the batch.

    Args:
        stages_or_model: This rank's stages, in any layout; a `Decoder`; or any module that `call`
            runs, giving logits `[1, S, V]`.
        prompts: For each row the token ids to continue, at least one.
        max_new_tokens: How many tokens to draw at most; 0 draws none.
        context: The longest text that the model sees.
        sampling: How a token is chosen.
        stop_ids: A row ends when one of these is drawn; None is one that a tokenizer lacks.
        stop: A row ends when one of these strings stands in its new text, wherever tokens begin.
        tokenizer: What makes text of tokens; needed for `stop` and `stream`.
        vocab_size: Draw among the ids below it only: the tokenizer's size, where the model's own is
            rounded up. By default among all.
        slide: Where a text outgrows the context, go on with the last `context` tokens of it, whose
            positions begin at 0 again. So every token then moves down by one position per step,
            nothing that was kept is right any more, and each step runs over the windows anew.
        row_ids: A number for each row, from which its noise follows; by default 0, 1, and so on.
        stream: Called as `stream(row, piece)` with new text as it comes, in whole characters, where
            `row` counts the prompts. What may begin a stop string waits.
        call: How a batch enters a module that is no decoder; or what `parallel.make_call` made of
            a `Stages`, which is done here if there is none.

    Returns:
        For each prompt what follows it.

    Raises:
        ValueError: A prompt is empty or has ids that there are not, a text could outgrow the
            context, strings are asked for without a tokenizer, or a number is out of its range;
            all before anything is computed.
        NumericsError: A logit is NaN.

    Effects:
        Runs the model in evaluation mode and sets every module's mode back. With a sharded model
        every rank must call it with the same arguments; it communicates on the axes of the stages.
        One host sync for each token.

    Examples:
        >>> from trainkit.models import build_decoder, make_decoder_config
        >>> model = build_decoder(make_decoder_config("tiny"), seed=0)
        >>> how = {"max_new_tokens": 4, "context": 16}
        >>> found = generate(model, [[1, 2, 3], [4]], **how)
        >>> [len(completion.ids) for completion in found]
        [4, 4]
        >>> alone = generate(model, [[4]], **how, row_ids=[1])
        >>> alone == found[1:]
        True
    """
    model, call = _split_stages(stages_or_model, call)
    stop = (stop,) if isinstance(stop, str) else tuple(stop)
    row_ids = range(len(prompts)) if row_ids is None else row_ids
    _check(prompts, model, context, vocab_size, new=max_new_tokens, slide=slide)
    _check_text(stop, tokenizer, stream)
    if len(row_ids) != len(prompts):
        raise ValueError(f"generate: {len(prompts)} prompts have {len(row_ids)} row_ids; give each")
    if call is None:
        call = CachedCall(call_with_cache) if isinstance(model, Decoder) else call_model
    readers = [None if tokenizer is None else reader_of(tokenizer, p, stop=stop) for p in prompts]
    rows = [_Row(i, {*stop_ids}, reader, stream) for i, reader in enumerate(readers)]
    if max_new_tokens and rows:
        begins, device = [*map(len, prompts)], compute_device(model)
        places = places_of(row_ids, begins, max_new_tokens, seed=sampling.seed, device=device)
        # Cheaper than no_grad, by a tenth of a small model's step; FSDP does not take it.
        alone = isinstance(call, CachedCall) and call.call is call_with_cache
        with use_eval_mode([model]), torch.inference_mode() if alone else nullcontext():
            model = bare(model) if alone else model
            logits_of = _cached(model, call) if isinstance(call, CachedCall) else _anew(model, call)
            _draw(
                rows,
                prompts,
                logits_of,
                places,
                sampling=sampling,
                context=context,
                vocab_size=vocab_size,
            )
    return [row.completion() for row in rows]


def _split_stages(
    stages_or_model: Stages | nn.Module, call: Call | None, *, sharded: bool = False
) -> tuple[nn.Module, Call | None]:
    """Return a module, and the call that runs a batch through it or through all stages."""
    if isinstance(stages_or_model, Stages):
        return stages_or_model[0], call or make_call(stages_or_model, sharded=sharded)
    return stages_or_model, call


def _draw(
    rows: Sequence[_Row],
    prompts: Sequence[Sequence[int]],
    logits_of: _LogitsOf,
    places: Tensor,
    *,
    sampling: Sampling,
    context: int,
    vocab_size: int | None,
) -> None:
    """Draw tokens until all rows have ended; the shapes of what is held on the way never grow."""
    text, device = _text_of(prompts, places), places.device
    live, kept, seen = [*rows], None, None
    for drawn in range(places.shape[1]):
        logits = logits_of(text, kept, context)[:, :vocab_size]
        if sampling.repetition_penalty != 1:
            seen = _seen(text, logits.shape[1]) if seen is None else seen
        tokens = next_tokens(logits, places[:, drawn], sampling, seen=seen)
        going = [i for i, token in enumerate(tokens.tolist()) if live[i].take(token)]
        if not going:
            return
        kept = None
        if len(going) < len(live):
            kept, live = torch.tensor(going, device=device), [live[i] for i in going]
            tokens, places = tokens[kept], places[kept]
            text, seen = text.of_rows(kept), None if seen is None else seen[kept]
        text = text.written(tokens)
        if seen is not None:
            seen.scatter_(1, tokens.unsqueeze(1), True)


def generate_dealt(
    stages_or_model: Stages | nn.Module,
    prompts: Sequence[Sequence[int]],
    *,
    call: Call | None = None,
    axis: Axis = SOLO,
    **how: Any,
) -> list[Completion]:
    """Return what `generate` does, each rank of an axis having drawn every so many of the texts.

    A text's noise goes by its number, so it is the same whoever draws it, but for rounding. Ranks
    run the model as often as the one whose texts last longest, since its parameters may be sharded
    over them.

    Args:
        stages_or_model: As for `generate`.
        prompts: All of them, the same on all ranks.
        call: As for `generate`; from `parallel.make_call` with `sharded=True`.
        axis: For a plain module, the ranks that share the prompts. Those of a `Stages` that read
            different rows do.
        how: What else `generate` takes, but for `stream`.

    Returns:
        What follows each prompt, on every rank.

    Raises:
        ValueError: As `generate`.

    Effects:
        Those of `generate`; communicates on `axis`, once for each token.

    Examples:
        >>> from trainkit.models import build_decoder, make_decoder_config
        >>> model = build_decoder(make_decoder_config("tiny"), seed=0)
        >>> found = generate_dealt(model, [[1, 2, 3], [4]], max_new_tokens=4, context=16)
        >>> found == generate(model, [[1, 2, 3], [4]], max_new_tokens=4, context=16)
        True
    """
    model, call = _split_stages(stages_or_model, call, sharded=True)
    axis = stages_or_model.dp if isinstance(stages_or_model, Stages) else axis
    if axis.count == 1 or not prompts:
        return generate(model, prompts, call=call, **how)
    sizes = how["context"], how.get("vocab_size")  # looked at here: others wait for who refuses
    _check(prompts, model, *sizes, new=how["max_new_tokens"], slide=how.get("slide", False))
    row_ids = how.pop("row_ids", None) or range(len(prompts))
    own = [*range(axis.index, len(prompts), axis.count)] or [0]  # who has none takes part
    newest: list[Mapping[str, Any]] = []
    own_call = call or (CachedCall(call_with_cache) if isinstance(model, Decoder) else call_model)

    def run(model: nn.Module, batch: Mapping[str, Any]) -> Any:
        newest[:] = [batch]
        any_rank(True, axis)
        return own_call(model, batch)

    counted = CachedCall(run) if isinstance(own_call, CachedCall) else run
    ids = [row_ids[number] for number in own]
    drawn = generate(model, [prompts[n] for n in own], call=counted, row_ids=ids, **how)
    while any_rank(False, axis):
        own_call(model, newest[0])
    told = [[n, attrs.asdict(x)] for n, x in zip(own, drawn, strict=True)]
    found = {n: x for part in all_gather_objects(told, axis)[::-1] for n, x in part}
    return [Completion(**found[number]) for number in range(len(prompts))]


# ----------------------------------------------------------------------------------------- the rows


@attrs.define(eq=False)
class _Row:
    """What has been drawn of one row."""

    number: int
    stop_ids: set[int | None]
    reader: Reader | None
    stream: Callable[[int, str], None] | None
    ids: list[int] = attrs.field(factory=list)
    ended: Literal["stop_id", "stop", "length"] = "length"

    def take(self, token: int) -> bool:
        """Take a token; say whether the row goes on."""
        if token < 0:
            raise NumericsError(
                f"generate: a logit of row {self.number} is NaN after {len(self.ids)} new tokens; "
                "look at the weights, or compute in a wider dtype"
            )
        if token in self.stop_ids:
            self.ended = "stop_id"
            return False
        self.ids.append(token)
        if self.reader is not None:
            self._show(self.reader.read(token))
            if self.reader.stopped:
                self.ended = "stop"
                self.ids = self.ids[: self.reader.whole_tokens()]
        return self.ended == "length"

    def _show(self, piece: str) -> None:
        if piece and self.stream is not None:
            self.stream(self.number, piece)

    def completion(self) -> Completion:
        """Return all of it, once it has ended."""
        if self.reader is not None:
            self._show(self.reader.end())
        return Completion(self.ids, None if self.reader is None else self.reader.text, self.ended)


@attrs.frozen(eq=False)
class _Text:
    """The tokens of the rows, int64 `[R, L]`, which all end at `end`, and begin where each does."""

    ids: Tensor
    begins: list[int]
    end: int
    first: Tensor

    def of_rows(self, kept: Tensor) -> _Text:
        begins = [self.begins[i] for i in kept.tolist()]
        return attrs.evolve(self, ids=self.ids[kept], begins=begins, first=self.first[kept])

    def written(self, tokens: Tensor) -> _Text:
        self.ids[:, self.end] = tokens
        return attrs.evolve(self, end=self.end + 1)


def _text_of(prompts: Sequence[Sequence[int]], places: Tensor) -> _Text:
    """Return prompts with room for what is drawn."""
    longest = max(map(len, prompts))
    begins = [longest - len(prompt) for prompt in prompts]
    filled = np.zeros((len(prompts), longest + places.shape[1]), np.int64)
    for row, begin, prompt in zip(filled, begins, prompts, strict=True):
        row[begin:longest] = prompt
    first = torch.tensor(begins, device=places.device)
    return _Text(torch.from_numpy(filled).to(places.device), begins, longest, first)


def _seen(text: _Text, words: int) -> Tensor:
    """Return which words stand in each row's text."""
    seen = torch.zeros(len(text.begins), words, dtype=torch.bool, device=text.ids.device)
    for row, ids, begin in zip(seen, text.ids, text.begins, strict=True):
        own = ids[begin : text.end]
        row[own[own < words]] = True
    return seen


# --------------------------------------------------------------------------------------- the logits

_LogitsOf = Callable[[_Text, "Tensor | None", int], Tensor]
"""`logits_of(text, kept, context) -> [R, V]`, for the next token of each row; `kept` are the rows
of the call before that are left, if some have ended.
"""


def _anew(model: nn.Module, call: Call) -> _LogitsOf:
    """Return what runs a module over each row's window by itself."""

    def logits_of(text: _Text, kept: Tensor | None, context: int) -> Tensor:
        del kept
        found = []
        for row, begin in zip(text.ids, text.begins, strict=True):
            ids = row[max(begin, text.end - context) : text.end]
            batch = _packed(ids, [len(ids)], torch.arange(len(ids), device=ids.device))
            output = drop_routing(call(model, batch))
            if isinstance(output, tuple):
                hidden, *weight = output
                output = Hidden(hidden[:, -1:], *weight)
            found.append(whole_logits(output)[0, -1])
        return torch.stack(found)

    return logits_of


def _cached(model: nn.Module, call: CachedCall) -> _LogitsOf:
    """Return what runs a decoder over the newest tokens, or over all windows where it has to."""
    batch: dict[str, Any] = {"cache": None}

    def logits_of(text: _Text, kept: Tensor | None, context: int) -> Tensor:
        nonlocal batch
        cache: KVCache | None = batch["cache"]
        if cache is not None and kept is not None:
            cache = cache.of_rows(kept)
        longest = text.end - min(text.begins)
        if cache is None or longest > context or not cache.end + 1 == text.end <= cache.length:
            batch = _windows(text, context, cache)
        elif kept is None and cache.slots is None:
            batch = _next(text, cache, batch)
        else:
            batch = _newest(text, cache)
        return whole_logits(call(model, batch))[0]

    return logits_of


def _windows(text: _Text, context: int, before: KVCache | None) -> dict[str, Any]:
    """Return the last tokens of each row, packed; what `before` holds is written over."""
    device = text.ids.device
    lengths = [text.end - max(begin, text.end - context) for begin in text.begins]
    rows = np.repeat(np.arange(len(lengths)), lengths)
    positions = np.concatenate([np.arange(length) for length in lengths])
    slots = max(lengths) - np.take(lengths, rows) + positions
    last = np.cumsum(lengths) - 1
    rows_, places, slots_, last_ = (
        torch.from_numpy(x).to(device) for x in (rows, positions, slots, last)
    )
    begins = max(lengths) - torch.tensor(lengths, device=device)
    length = min(text.ids.shape[1], context)
    room = torch.arange(length, device=device)
    cache = KVCache(
        length,
        end=max(lengths),
        rows=rows_,
        slots=slots_,
        last=last_,
        seen=(room >= begins.unsqueeze(1))[:, None, None] if len({*lengths}) > 1 else None,
        keys={} if before is None else before.keys,
        values={} if before is None else before.values,
    )
    ids = text.ids[rows_, text.end - max(lengths) + slots_]
    return _packed(ids, lengths, places) | {"cache": cache}


def _newest(text: _Text, before: KVCache) -> dict[str, Any]:
    """Return the last token of each row, as documents of one token."""
    cache = attrs.evolve(before, end=text.end, rows=None, slots=None, last=None)
    places = text.end - 1 - text.first
    return _packed(text.ids[:, text.end - 1], [1] * len(places), places) | {"cache": cache}


def _next(text: _Text, before: KVCache, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the same as `_newest` from the batch before, which had the same rows."""
    return {
        **batch,
        "input_ids": text.ids[:, text.end - 1].unsqueeze(0),
        "position_ids": batch["position_ids"] + 1,
        "cache": attrs.evolve(before, end=text.end),
    }


def _packed(ids: Tensor, lengths: Sequence[int], places: Tensor) -> dict[str, Any]:
    """Return one row of documents, as a model takes it."""
    spans = Spans(
        cu_seqlens=torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=ids.device),
        lengths=np.array(lengths),
        max_length=max(lengths),
    )
    return {
        "input_ids": ids.unsqueeze(0),
        "position_ids": places.unsqueeze(0),
        "document_ids": torch.zeros_like(ids).unsqueeze(0),
        "spans": spans,
    }


# ------------------------------------------------------------------------------------------- checks


def _check(
    prompts: Sequence[Sequence[int]],
    model: Any,
    context: int,
    vocab_size: int | None,
    *,
    new: int,
    slide: bool,
) -> None:
    check_range("generate", at_least=0, max_new_tokens=new)
    check_range("generate", at_least=1, context=context)
    check_range("generate", at_least=1, vocab_size=vocab_size)
    words = getattr(getattr(model, "config", None), "vocab_size", None)
    for number, prompt in enumerate(prompts):
        if not hasattr(prompt, "__len__") or isinstance(prompt, str):
            what = f"prompts must be rows of token ids, got {prompt!r} among them"
            mend = "put a single prompt's ids into a list of their own"
            raise ValueError(f"generate: {what}; {mend}")
        if len(prompt) == 0:
            what = f"prompt {number} is empty"
            raise ValueError(f"generate: {what}; give at least one token to continue")
        if min(prompt) < 0 or (isinstance(words, int) and max(prompt) >= words):
            what = f"prompt {number} has ids from {min(prompt)} to {max(prompt)}"
            raise ValueError(
                f"generate: {what}; the model's are in [0, {words or 'its vocabulary'})"
            )
        if not slide and new and len(prompt) + new > context:
            what = f"prompt {number} has {len(prompt)} tokens, which with {new} new ones outgrow"
            mend = "shorten it, draw fewer, or let the window slide, with slide=True"
            raise ValueError(f"generate: {what} the context of {context}; {mend}")


def _check_text(
    stop: Sequence[str], tokenizer: Tokenizer | None, stream: Mapping[str, Any] | Any
) -> None:
    if "" in stop:
        raise ValueError("generate: a stop string is empty, and would end every text")
    if tokenizer is None and (stop or stream):
        what = "stop" if stop else "stream"
        raise ValueError(f"generate: {what} is about text, and there is no tokenizer; give it one")
