"""Text from a model: one token after the other, without a key-value cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trainkit.models.call import call_model
from trainkit.models.decoder import whole_logits
from trainkit.noise import counters
from trainkit.types import Call, Hidden, Spans, unrouted


def generate(
    model: nn.Module,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    context: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
    stop_id: int | None = None,
    vocab_size: int | None = None,
    call: Call = call_model,
) -> list[int]:
    """Return tokens that continue a prompt; each takes one run over the last `context` tokens.

    The noise of a draw is a function of the seed and the token's place in the text, so every rank
    of a sharded model draws the same token. Positions count from the start of the window: once the
    text is longer than `context`, every token moves down by one position per step.

    Args:
        model: Called as `call(model, batch)`; returns logits `[1, S, V]`, or a `Hidden`.
        prompt_ids: The token ids to continue, at least one.
        max_new_tokens: How many tokens to draw at most; 0 draws none.
        context: The longest window the model sees.
        temperature: What logits are divided by; 0 takes the likeliest token.
        top_k: Draw among that many likeliest tokens only.
        seed: The seed of the draws.
        stop_id: Stop when this id is drawn; it is not part of the result.
        vocab_size: Draw among the ids below it only: the tokenizer's size, where the model's own is
            rounded up. By default among all.
        call: How a batch (input_ids, position_ids, spans) enters the model.

    Returns:
        The new token ids, without the prompt.

    Raises:
        ValueError: The prompt is empty, or a number is out of its range.

    Effects:
        Runs the model in evaluation mode and sets every module's mode back. With a sharded model
        every rank must call it.

    Examples:
        >>> from trainkit.models.decoder import build_decoder
        >>> from trainkit.models.sizes import decoder_config
        >>> model = build_decoder(decoder_config("tiny"), seed=0)
        >>> len(generate(model, [1, 2, 3], max_new_tokens=4, context=8))
        4
    """
    _check(
        prompt_ids,
        temperature,
        max_new_tokens=max_new_tokens,
        context=context,
        top_k=top_k,
        vocab_size=vocab_size,
    )
    device = next(model.parameters()).device
    ids, end = list(prompt_ids), len(prompt_ids) + max_new_tokens
    # The text stays on the device: a token is written into it without an upload.
    text = torch.tensor([[*ids, *[0] * max_new_tokens]], device=device)
    with torch.no_grad(), _evaluation_mode(model):
        while len(ids) < end:
            output = call(model, _window(text[:, max(0, len(ids) - context) : len(ids)]))
            place = counters.uniform(seed, "generate", len(ids))
            logits = _last_logits(output)[:vocab_size]
            token = draw(logits, place, temperature=temperature, top_k=top_k)
            if token == stop_id:
                break
            text[0, len(ids)] = token
            ids.append(token)
    return ids[len(prompt_ids) :]


def draw(logits: Tensor, place: float, *, temperature: float, top_k: int | None = None) -> int:
    """Return the token at `place` in [0, 1) of the distribution's cumulative sum.

    Args:
        logits: `[V]`; the arithmetic is fp64.
        place: The noise of the draw.
        temperature: What logits are divided by; 0 takes the likeliest token.
        top_k: Draw among that many likeliest tokens only.

    Effects:
        Waits for the device: the token is needed on the host.

    Examples:
        >>> logits = torch.tensor([0.0, 1.0, 0.0])
        >>> draw(logits, 0.0, temperature=1.0), draw(logits, 0.99, temperature=1.0)
        (0, 2)
        >>> draw(logits, 0.99, temperature=0.0), draw(logits, 0.99, temperature=1.0, top_k=1)
        (1, 1)
    """
    if temperature == 0:
        return int(logits.argmax())
    kept, ids = logits.double().topk(min(top_k or len(logits), len(logits)))
    ids, order = ids.sort()
    cumulative = torch.softmax(kept[order] / temperature, dim=0).cumsum(0)
    index = int(torch.searchsorted(cumulative, place * cumulative[-1], right=True))
    return int(ids[index])


def _last_logits(output: Tensor | tuple[Any, ...]) -> Tensor:
    output = unrouted(output)
    if isinstance(output, tuple):
        hidden, *weight = output
        output = Hidden(hidden[:, -1:], *weight)
    return whole_logits(output)[0, -1]


def _window(ids: Tensor) -> dict[str, Any]:
    """Return one row with one document, as a model takes it."""
    length, device = ids.shape[1], ids.device
    spans = Spans(
        cu_seqlens=torch.arange(0, length + 1, length, dtype=torch.int32, device=device),
        lengths=np.array([length]),
        max_length=length,
    )
    return {
        "input_ids": ids,
        "position_ids": torch.arange(length, device=device)[None],
        "document_ids": torch.zeros_like(ids),
        "spans": spans,
    }


def _nothing() -> None:
    """Stand in for `reshard` where a module has none."""


@contextmanager
def _evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Switch to evaluation inside the block and restore every module's own mode after it."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
            # Without a backward pass, FSDP2 leaves the root's parameters gathered.
            getattr(module, "reshard", _nothing)()


def _check(prompt_ids: Sequence[int], temperature: float, **counts: int | None) -> None:
    if len(prompt_ids) == 0:
        raise ValueError("generate: the prompt is empty; give at least one token to continue")
    if not temperature >= 0:
        raise ValueError(f"generate: temperature must be at least 0, got {temperature}")
    for name, value in counts.items():
        least = 0 if name == "max_new_tokens" else 1
        if value is not None and value < least:
            raise ValueError(f"generate: {name} must be at least {least}, got {value}")
