"""Sample text: prompts of different lengths in one batch, one new token of each per step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Literal

import attrs
import numpy as np
import torch
from torch import Tensor, nn

from trainkit.collectives import all_gather_objects
from trainkit.models.call import CachedCall, call_model, call_with_cache
from trainkit.models.decoder import Decoder, whole_logits
from trainkit.models.functional import bare
from trainkit.models.kv_cache import KVCache
from trainkit.parallel.generation_call import make_call
from trainkit.parallel.stage_forward import compute_device, use_eval_mode
from trainkit.phases import as_phase
from trainkit.post.generation.call_together import call_together, is_sharded_model
from trainkit.post.generation.sampling import Sampling, make_noise, next_tokens
from trainkit.post.generation.text import Reader, make_reader
from trainkit.text.chat import encode_prompt, find_stop_ids, load_template
from trainkit.text.tokenizers.bytes import ByteTokenizer
from trainkit.text.tokenizers.hf import HFTokenizer
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

AnyTokenizer = ByteTokenizer | HFTokenizer


@attrs.frozen
class Completion:
    """The text that a model generated for a prompt.

    Attributes:
        ids: The new tokens, without the stop token, and without tokens from the start of a stop
            string on.
        text: The decoded tokens, up to the stop string; None without a tokenizer.
        ended: The reason: a token of `stop_ids`, a string of `stop`, or the maximum length.
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
    """Generate completions of prompts as one batch, one token of each row per step.

    A decoder caches keys and values (`models.KVCache`), so a step computes one token per row. Any
    other module is run over the whole text again for each token, one row at a time. The noise of a
    draw is a function of the seed, the row's id and the token's position, so a row's text does not
    depend on the other rows of its batch. Two exceptions: rounding, since a matrix product of more
    rows may round differently, and experts with a capacity, whose routing depends on the batch.
    Finished rows leave the batch.

    Args:
        stages_or_model: This rank's stages, in any layout; a `Decoder`; or any module that `call`
            runs, returning logits `[1, S, V]`.
        prompts: Token ids of each row, at least one.
        max_new_tokens: Maximum number of new tokens per row; 0 generates none.
        context: Maximum number of tokens in the model's input.
        sampling: Temperature, filters and seed.
        stop_ids: A row ends when one of these is sampled; None (no such token) is ignored.
        stop: A row ends when its new text contains one of these strings, across token boundaries.
        tokenizer: Decodes tokens; required for `stop` and `stream`.
        vocab_size: Sample ids below this only: the tokenizer's size, where the model's is rounded
            up. Default: all ids.
        slide: Continue a text longer than the context with its last `context` tokens, whose
            positions start at 0 again. This invalidates the cache, so each such step runs the
            whole window.
        row_ids: Ids of the rows, which determine their noise; default 0, 1, ...
        stream: Called as `stream(row, piece)` with new text in complete characters, where `row`
            is the index of the prompt. A possible start of a stop string is held back.
        call: How a batch enters a module that is not a decoder; or the result of
            `parallel.make_call` for a `Stages` (default: made here).

    Returns:
        A completion for each prompt.

    Raises:
        ValueError: A prompt is empty or has ids outside of the vocabulary, a text could exceed the
            context, `stop` or `stream` come without a tokenizer, or a number is out of its range;
            all before anything is computed.
        NumericsError: A logit is NaN.
        Exception: With a `Stages`, an error on one rank, as from `stream`, on all (see
            `call_together`).

    Effects:
        Runs the model in evaluation mode and restores every module's mode. With a `Stages` every
        rank must call it, with the same arguments but for `stream`; it communicates on the axes of
        the stages, and once per token on all ranks. One host sync per token.

    Examples:
        >>> from trainkit.models import build_decoder, make_decoder_config
        >>> model = build_decoder(make_decoder_config("tiny"), seed=0)
        >>> completions = generate(model, [[1, 2, 3], [4]], max_new_tokens=4, context=16)
        >>> [len(completion.ids) for completion in completions]
        [4, 4]
        >>> second = generate(model, [[4]], max_new_tokens=4, context=16, row_ids=[1])
        >>> second == completions[1:]
        True
    """
    model, call = _split_stages(stages_or_model, call)
    world = stages_or_model.world if isinstance(stages_or_model, Stages) else SOLO
    stop = (stop,) if isinstance(stop, str) else tuple(stop)
    row_ids = range(len(prompts)) if row_ids is None else row_ids
    # Everything is checked before the model runs.
    _check_rows(
        prompts, row_ids, model, context, vocab_size, max_new_tokens=max_new_tokens, slide=slide
    )
    if "" in stop:
        raise ValueError("generate: a stop string is empty, and would end every text")
    if tokenizer is None and (stop or stream):
        raise ValueError(f"generate: {'stop' if stop else 'stream'}= needs a tokenizer; give one")
    if call is None:
        call = _choose_call(model)

    def generate_rows(call: Call) -> list[Completion]:
        rows = []
        for index, prompt in enumerate(prompts):
            reader = None if tokenizer is None else make_reader(tokenizer, prompt, stop=stop)
            rows.append(_Row(index, {*stop_ids}, reader, stream))
        if max_new_tokens and rows:
            device = compute_device(model)
            # inference_mode saves a tenth of a small model's step over no_grad; FSDP does not take
            # it.
            is_plain = isinstance(call, CachedCall) and call.call is call_with_cache
            with use_eval_mode([model]), torch.inference_mode() if is_plain else nullcontext():
                _sample(
                    rows,
                    prompts,
                    _make_compute_logits(bare(model) if is_plain else model, call),
                    row_ids=row_ids,
                    max_new_tokens=max_new_tokens,
                    sampling=sampling,
                    context=context,
                    vocab_size=vocab_size,
                    device=device,
                )
        return [row.finish() for row in rows]

    # In each token, because one rank may fail alone: the only one that streams, or lacks memory.
    return call_together(generate_rows, call, axis=world, communicates=True)


def _split_stages(
    stages_or_model: Stages | nn.Module, call: Call | None, *, sharded: bool = False
) -> tuple[nn.Module, Call | None]:
    """Return the first module, and a call that runs a batch through it or through all stages."""
    if isinstance(stages_or_model, Stages):
        # The first stage stands for the device and the modes of all; the call runs each of them.
        return stages_or_model[0], call or make_call(stages_or_model, sharded=sharded)
    return stages_or_model, call


def _choose_call(model: nn.Module) -> Call:
    return CachedCall(call_with_cache) if isinstance(model, Decoder) else call_model


def _sample(
    rows: Sequence[_Row],
    prompts: Sequence[Sequence[int]],
    compute_logits: _ComputeLogits,
    *,
    row_ids: Sequence[int],
    max_new_tokens: int,
    sampling: Sampling,
    context: int,
    vocab_size: int | None,
    device: torch.device,
) -> None:
    """Sample tokens until all rows have ended; no tensor that stays between steps grows."""
    # Noise by position in each row's own text, not by column: a batch does not change it.
    starts = [*map(len, prompts)]
    noise = make_noise(row_ids, starts, max_new_tokens, seed=sampling.seed, device=device)
    text = _make_text(prompts, noise)
    active = [*rows]
    selected = None
    seen = None  # bool [R, V], the tokens that occur in each row's text
    for step in range(max_new_tokens):
        # Ids from vocab_size on, which round the model's vocabulary up, are never sampled.
        logits = compute_logits(text, selected, context)[:, :vocab_size]
        if sampling.repetition_penalty != 1 and seen is None:
            seen = torch.zeros_like(logits, dtype=torch.bool)
            for row_mask, ids, start in zip(seen, text.ids, text.starts, strict=True):
                prompt = ids[start : text.end]
                row_mask[prompt[prompt < len(row_mask)]] = True
        tokens = next_tokens(logits, noise[:, step], sampling, seen=seen)
        # The host sync of the step: the rows decide here which of them continue.
        remaining = [i for i, token in enumerate(tokens.tolist()) if active[i].add(token)]
        if not remaining:
            return
        # Finished rows leave every tensor, so that they cost nothing more.
        selected = None
        if len(remaining) < len(active):
            selected = torch.tensor(remaining, device=noise.device)
            active = [active[i] for i in remaining]
            tokens = tokens[selected]
            noise = noise[selected]
            text = text.select_rows(selected)
            seen = None if seen is None else seen[selected]
        text = text.add_tokens(tokens)
        if seen is not None:
            seen.scatter_(1, tokens.unsqueeze(1), True)


@as_phase("sample")
def sample_text(
    stages_or_model: Stages | nn.Module,
    prompt: str | Sequence[int],
    *,
    tokenizer: AnyTokenizer,
    max_new_tokens: int,
    context: int,
    temperature: float = 0.7,
    seed: int = 0,
    call: Call | None = None,
) -> str:
    """Return a prompt with a sampled continuation as text, for a person to read.

    Args:
        stages_or_model: As for `generate`.
        prompt: A text, which gets a BOS if the tokenizer has one; or token ids.
        tokenizer: Encodes the prompt and decodes the result; its EOS ends the text.
        max_new_tokens: Maximum number of new tokens.
        context: Maximum number of tokens in the model's input; a longer text is truncated on its
            left.
        temperature: As for `Sampling`.
        seed: As for `Sampling`.
        call: As for `generate`.

    Effects:
        Those of `generate`.

    Examples:
        >>> from trainkit.models import build_decoder, make_decoder_config
        >>> from trainkit.text.tokenizers import make_byte_tokenizer
        >>> model = build_decoder(make_decoder_config("tiny", vocab_size=272), seed=0)
        >>> text = sample_text(
        ...     model, "def ", tokenizer=make_byte_tokenizer(), max_new_tokens=4, context=16
        ... )
        >>> text.startswith("def ")
        True
    """
    if isinstance(prompt, str):
        bos = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
        prompt = [*bos, *tokenizer.encode(prompt)]
    # For people: a text that outgrows the context goes on, and needs no check beforehand.
    (completion,) = generate(
        stages_or_model,
        [prompt],
        max_new_tokens=max_new_tokens,
        context=context,
        slide=True,
        sampling=Sampling(temperature=temperature, seed=seed),
        stop_ids=[tokenizer.eos_id],
        vocab_size=tokenizer.vocab_size,  # the model's may be rounded up
        call=call,
    )
    return tokenizer.decode([*prompt, *completion.ids])


@as_phase("sample")
def answer_questions(
    stages_or_model: Stages | nn.Module,
    questions: Sequence[str],
    *,
    tokenizer: AnyTokenizer,
    template: str,
    max_new_tokens: int,
    context: int,
    temperature: float = 0.0,
    seed: int = 0,
    call: Call | None = None,
) -> list[str]:
    """Return a model's answers to questions, each in a separate conversation.

    Args:
        stages_or_model: As for `generate`.
        questions: The user's turns.
        tokenizer: As for `chat.encode_chat`.
        template: Name of the chat template, as for `chat.load_template`.
        max_new_tokens: Maximum number of tokens of an answer.
        context: Maximum number of tokens in the model's input; a longer text is truncated on its
            left.
        temperature: As for `Sampling`; by default the most likely tokens.
        seed: As for `Sampling`.
        call: As for `generate`.

    Effects:
        Those of `generate`.

    Examples:
        >>> from trainkit.text.chat import CHATML_SPECIAL
        >>> from trainkit.models import build_decoder, make_decoder_config
        >>> from trainkit.text.tokenizers import make_byte_tokenizer
        >>> tokenizer = make_byte_tokenizer(CHATML_SPECIAL)
        >>> model = build_decoder(
        ...     make_decoder_config("tiny", vocab_size=tokenizer.vocab_size), seed=0
        ... )
        >>> answers = answer_questions(
        ...     model,
        ...     ["1+1?", "2+2?"],
        ...     tokenizer=tokenizer,
        ...     template="chatml",
        ...     max_new_tokens=4,
        ...     context=64,
        ... )
        >>> len(answers)
        2
    """
    chat_template = load_template(template)
    prompts = [
        encode_prompt([{"role": "user", "content": question}], tokenizer, template=chat_template)
        for question in questions
    ]
    completions = generate(
        stages_or_model,
        prompts,
        max_new_tokens=max_new_tokens,
        context=context,
        slide=True,
        sampling=Sampling(temperature=temperature, seed=seed),
        stop_ids=find_stop_ids(tokenizer, chat_template),
        tokenizer=tokenizer,
        vocab_size=tokenizer.vocab_size,
        call=call,
    )
    return [completion.text or "" for completion in completions]


def generate_sharded(
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
    call: Call | None = None,
    axis: Axis = SOLO,
) -> list[Completion]:
    """Generate as `generate`, with the prompts sharded over the ranks of an axis.

    Noise depends on the row's id and not on the rank, so the completions are those of one process,
    but for rounding. All ranks run the model as often as the rank with the longest completions,
    since its parameters may be sharded over them.

    Args:
        stages_or_model: As for `generate`.
        prompts: All prompts, equal on all ranks.
        max_new_tokens: As for `generate`, like the following ones.
        context: See `generate`.
        sampling: See `generate`.
        stop_ids: See `generate`.
        stop: See `generate`.
        tokenizer: See `generate`.
        vocab_size: See `generate`.
        slide: See `generate`.
        row_ids: Ids of all prompts.
        call: As for `generate`; from `parallel.make_call` with `sharded=True`.
        axis: For a plain module, the ranks that share the prompts. A `Stages` has its own: its
            data-parallel ranks.

    Returns:
        A completion for each prompt, on every rank.

    Raises:
        ValueError: As `generate`, on all ranks.
        NumericsError: A logit of any rank is NaN; on all ranks.
        Exception: Another error on one rank, on all (see `call_together`).

    Effects:
        Those of `generate`; communicates once per token, on `axis` or all ranks of the stages.

    Examples:
        >>> from trainkit.models import build_decoder, make_decoder_config
        >>> model = build_decoder(make_decoder_config("tiny"), seed=0)
        >>> completions = generate_sharded(model, [[1, 2, 3], [4]], max_new_tokens=4, context=16)
        >>> completions == generate(model, [[1, 2, 3], [4]], max_new_tokens=4, context=16)
        True
    """
    model, call = _split_stages(stages_or_model, call, sharded=True)
    is_stages = isinstance(stages_or_model, Stages)
    axis = stages_or_model.dp if is_stages else axis
    world = stages_or_model.world if is_stages else axis
    if call is None:
        call = _choose_call(model)
    # Ids of all prompts, before they are sharded: noise must not depend on the rank.
    row_ids = range(len(prompts)) if row_ids is None else row_ids
    # All ranks check all prompts: a rank that raised alone would leave the others waiting.
    _check_rows(
        prompts, row_ids, model, context, vocab_size, max_new_tokens=max_new_tokens, slide=slide
    )
    # A rank without a prompt of its own runs the first one, to take part in the collectives.
    indices = range(axis.index, len(prompts), axis.count) or [0][: len(prompts)]

    def generate_rows(call: Call) -> list[Completion]:
        return generate(
            model,
            [prompts[i] for i in indices],
            max_new_tokens=max_new_tokens,
            context=context,
            sampling=sampling,
            stop_ids=stop_ids,
            stop=stop,
            tokenizer=tokenizer,
            vocab_size=vocab_size,
            slide=slide,
            row_ids=[row_ids[i] for i in indices],
            call=call,
        )

    is_sharded = world.count > 1 and is_sharded_model(stages_or_model)
    completions = call_together(generate_rows, call, axis=world, communicates=is_sharded)
    if axis.count == 1:
        return completions
    # In reverse, so that the first rank that has a completion wins: later ones may repeat prompt 0.
    values = [[i, attrs.asdict(x)] for i, x in zip(indices, completions, strict=True)]
    by_index = {i: x for part in all_gather_objects(values, axis)[::-1] for i, x in part}
    return [Completion(**by_index[i]) for i in range(len(prompts))]


# ----------------------------------------------------------------------------------------- the rows


@attrs.define(eq=False)
class _Row:
    """The state of one row: its new tokens and their text."""

    index: int
    stop_ids: set[int | None]
    reader: Reader | None
    stream: Callable[[int, str], None] | None
    ids: list[int] = attrs.field(factory=list)
    ended: Literal["stop_id", "stop", "length"] = "length"

    def add(self, token: int) -> bool:
        """Add a token and return whether the row continues."""
        if token < 0:  # next_tokens marks NaN, so that the check costs no further host sync
            raise NumericsError(
                f"generate: a logit of row {self.index} is NaN after {len(self.ids)} new tokens; "
                "check the weights, or compute in a wider dtype"
            )
        if token in self.stop_ids:
            self.ended = "stop_id"
            return False
        self.ids.append(token)  # the stop token is no part of the completion
        if self.reader is not None:
            self._stream(self.reader.read(token))
            if self.reader.stopped:
                self.ended = "stop"
                # A stop string may start inside of a token, which is then dropped.
                self.ids = self.ids[: self.reader.count_complete_tokens()]
        return self.ended == "length"

    def _stream(self, piece: str) -> None:
        if piece and self.stream is not None:
            self.stream(self.index, piece)

    def finish(self) -> Completion:
        """Return the completion of a row that has ended."""
        if self.reader is not None:
            self._stream(self.reader.end())
        text = None if self.reader is None else self.reader.text
        return Completion(self.ids, text, self.ended)


@attrs.frozen(eq=False)
class _Text:
    """Tokens of the rows, int64 `[R, L]`, aligned to the right: all rows end at `end`.

    `starts` are the first positions of the rows, on the host; `starts_tensor` on the device.
    """

    ids: Tensor
    starts: list[int]
    end: int
    starts_tensor: Tensor

    def select_rows(self, indices: Tensor) -> _Text:
        return _Text(
            self.ids[indices],
            [self.starts[i] for i in indices.tolist()],
            self.end,
            self.starts_tensor[indices],
        )

    def add_tokens(self, tokens: Tensor) -> _Text:
        self.ids[:, self.end] = tokens  # in place: earlier texts of these rows are not used again
        return attrs.evolve(self, end=self.end + 1)


def _make_text(prompts: Sequence[Sequence[int]], noise: Tensor) -> _Text:
    """Allocate the text for prompts and all tokens that may be sampled."""
    longest = max(map(len, prompts))
    # Prompts end in the same column, so that each step writes one column of new tokens.
    starts = [longest - len(prompt) for prompt in prompts]
    ids = np.zeros((len(prompts), longest + noise.shape[1]), np.int64)
    for row, start, prompt in zip(ids, starts, prompts, strict=True):
        row[start:longest] = prompt
    return _Text(
        torch.from_numpy(ids).to(noise.device),
        starts,
        longest,
        torch.tensor(starts, device=noise.device),
    )


# --------------------------------------------------------------------------------------- the logits

_ComputeLogits = Callable[[_Text, "Tensor | None", int], Tensor]
"""`compute_logits(text, selected, context) -> [R, V]`, for the next token of each row. `selected`
are the indices of the previous call's rows that remain, or None if all do.
"""


def _make_compute_logits(model: nn.Module, call: Call) -> _ComputeLogits:
    batch: dict[str, Any] = {"cache": None}

    def compute_cached(text: _Text, selected: Tensor | None, context: int) -> Tensor:
        """Run a decoder over the newest tokens, or over whole windows if needed."""
        nonlocal batch
        cache: KVCache | None = batch["cache"]
        if cache is not None and selected is not None:
            cache = cache.select_rows(selected)
        # The cache must be one token behind. It is not in the first step; and in a sliding window
        # the position of every token changes, so all keys are computed again.
        longest = text.end - min(text.starts)
        if cache is None or longest > context or not cache.end + 1 == text.end <= cache.length:
            batch = _make_window_batch(text, context, cache)
        elif selected is None and cache.slots is None:
            # The most frequent case reuses the Spans, whose making would copy to the device.
            batch = {
                **batch,
                "input_ids": text.ids[:, text.end - 1].unsqueeze(0),
                "position_ids": batch["position_ids"] + 1,
                "cache": attrs.evolve(cache, end=text.end),
            }
        else:  # the last token of each row, as documents of one token
            positions = text.end - 1 - text.starts_tensor
            batch = _make_batch(text.ids[:, text.end - 1], [1] * len(positions), positions)
            batch["cache"] = attrs.evolve(cache, end=text.end, rows=None, slots=None, last=None)
        return whole_logits(call(model, batch))[0]

    def compute_uncached(text: _Text, selected: Tensor | None, context: int) -> Tensor:
        """Run any module over each row's window separately."""
        del selected
        logits = []
        for row, start in zip(text.ids, text.starts, strict=True):
            ids = row[max(start, text.end - context) : text.end]
            window = _make_batch(ids, [len(ids)], torch.arange(len(ids), device=ids.device))
            output = drop_routing(call(model, window))
            if isinstance(output, tuple):  # a `Hidden`: only the last token's logits are needed
                hidden, *weight = output
                output = Hidden(hidden[:, -1:], *weight)
            logits.append(whole_logits(output)[0, -1])
        return torch.stack(logits)

    return compute_cached if isinstance(call, CachedCall) else compute_uncached


def _make_window_batch(text: _Text, context: int, previous: KVCache | None) -> dict[str, Any]:
    """Pack the last `context` tokens of each row; their cache reuses the tensors of `previous`."""
    device = text.ids.device
    lengths = [text.end - max(start, text.end - context) for start in text.starts]
    # All rows end in the same slot of the cache, so shorter ones start in a later slot.
    row_indices = np.repeat(np.arange(len(lengths)), lengths)
    positions = np.concatenate([np.arange(length) for length in lengths])
    slot_indices = max(lengths) - np.take(lengths, row_indices) + positions
    rows = torch.from_numpy(row_indices).to(device)
    slots = torch.from_numpy(slot_indices).to(device)
    starts = max(lengths) - torch.tensor(lengths, device=device)
    length = min(text.ids.shape[1], context)
    all_slots = torch.arange(length, device=device)
    seen = None  # bool [R, 1, 1, slots]; rows of equal length fill all slots, and need no mask
    if len({*lengths}) > 1:
        seen = (all_slots >= starts.unsqueeze(1))[:, None, None]
    cache = KVCache(
        length,
        end=max(lengths),
        rows=rows,
        slots=slots,
        last=torch.from_numpy(np.cumsum(lengths) - 1).to(device),
        seen=seen,
        # States of delta layers are computed anew; they need no slots.
        keys={} if previous is None else previous.keys,
        values={} if previous is None else previous.values,
    )
    # [T], row after row: prompts of different lengths are packed, and not padded.
    ids = text.ids[rows, text.end - max(lengths) + slots]
    batch = _make_batch(ids, lengths, torch.from_numpy(positions).to(device))
    return batch | {"cache": cache}


def _make_batch(ids: Tensor, lengths: Sequence[int], positions: Tensor) -> dict[str, Any]:
    """Return a batch of one row with several documents."""
    # One row of all documents, each of which attends only to itself. It is `spans` that separate
    # them: of document ids `call_with_cache` reads only that none is below 0, which is padding.
    spans = Spans(
        cu_seqlens=torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=ids.device),
        lengths=np.array(lengths),
        max_length=max(lengths),
    )
    return {
        "input_ids": ids.unsqueeze(0),
        "position_ids": positions.unsqueeze(0),
        "document_ids": torch.zeros_like(ids).unsqueeze(0),
        "spans": spans,
    }


# ------------------------------------------------------------------------------------------- checks


def _check_rows(
    prompts: Sequence[Sequence[int]],
    row_ids: Sequence[int],
    model: Any,
    context: int,
    vocab_size: int | None,
    *,
    max_new_tokens: int,
    slide: bool,
) -> None:
    check_range("generate", at_least=0, max_new_tokens=max_new_tokens)
    check_range("generate", at_least=1, context=context)
    check_range("generate", at_least=1, vocab_size=vocab_size)
    # Of a plain module the vocabulary is not known; its embedding then raises.
    num_tokens = getattr(getattr(model, "config", None), "vocab_size", None)
    for index, prompt in enumerate(prompts):
        if not hasattr(prompt, "__len__") or isinstance(prompt, str):
            raise ValueError(
                f"generate: prompts must be rows of token ids, got {prompt!r} among them; put the "
                "ids of a single prompt into a list"
            )
        if len(prompt) == 0:
            raise ValueError(f"generate: prompt {index} is empty; give at least one token")
        if min(prompt) < 0 or (isinstance(num_tokens, int) and max(prompt) >= num_tokens):
            raise ValueError(
                f"generate: prompt {index} has ids from {min(prompt)} to {max(prompt)}; the "
                f"model's are in [0, {num_tokens or 'its vocabulary'})"
            )
        if not slide and max_new_tokens and len(prompt) + max_new_tokens > context:
            raise ValueError(
                f"generate: prompt {index} has {len(prompt)} tokens, which with {max_new_tokens} "
                f"new ones exceed the context of {context}; shorten it, generate fewer, or use a "
                "sliding window, with slide=True"
            )
    if len(row_ids) != len(prompts):
        raise ValueError(
            f"generate: got {len(prompts)} prompts but {len(row_ids)} row_ids; give one per prompt"
        )
