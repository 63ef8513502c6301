"""Calls of a model with a batch; a model of another signature needs another `Call`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
from torch import Tensor, nn

from trainkit.types import Call


@attrs.frozen(eq=False)
class RoutingTape:
    """The choices of a model's expert layers in one forward pass, by the layer's name.

    A layer uses the choice on the tape, or writes its own if there is none. So a recomputed forward
    pass repeats the choices of the first one, although noise or rounding may differ, and choices
    that come with the data (of an inference engine, for instance) replace the router's. Each
    microbatch needs a new tape.

    Examples:
        >>> RoutingTape().choices
        {}
    """

    choices: dict[str, Tensor] = attrs.field(factory=dict)


def call_model(model: nn.Module, batch: Mapping[str, Any]) -> Any:
    """Call a model with a batch: `model(input_ids, position_ids=..., spans=...)`.

    Examples:
        >>> seen = lambda ids, *, position_ids, spans: (ids, position_ids, spans)
        >>> call_model(seen, {"input_ids": 1, "position_ids": 2, "spans": 3})
        (1, 2, 3)
    """
    # Without labels, from which models of transformers would compute a loss of their own.
    return model(batch["input_ids"], position_ids=batch["position_ids"], spans=batch["spans"])


def call_routed(model: nn.Module, batch: Mapping[str, Any]) -> Any:
    """Call a decoder with experts with a batch and a new tape.

    Padding, whose document ids are below 0, goes to no expert and is in no sum. A batch may have a
    "noise_key" for dropout and jitter, and "choices" int64 `[B, S, L, k]`, the experts to use,
    which are sharded like tokens.

    Examples:
        >>> import torch
        >>> seen = lambda ids, *, position_ids, spans, is_token, **more: is_token
        >>> batch = {"input_ids": 1, "position_ids": 2, "spans": 3}
        >>> call_routed(seen, batch | {"document_ids": torch.tensor([[0, -2, -1]])})
        tensor([[ True, False, False]])
    """
    return model(
        batch["input_ids"],
        position_ids=batch["position_ids"],
        spans=batch["spans"],
        noise_key=batch.get("noise_key"),
        is_token=batch["document_ids"] >= 0,
        # A new one each time: an old tape would replay the choices of other tokens.
        tape=RoutingTape(),
        choices=batch.get("choices"),
    )


def call_with_noise(model: nn.Module, batch: Mapping[str, Any]) -> Any:
    """Call a model with dropout: `call_model` with the batch's `noise_key`.

    Examples:
        >>> seen = lambda ids, *, position_ids, spans, noise_key: noise_key
        >>> batch = {"input_ids": 1, "position_ids": 2, "spans": 3, "noise_key": 4}
        >>> call_with_noise(seen, batch)
        4
    """
    return model(
        batch["input_ids"],
        position_ids=batch["position_ids"],
        spans=batch["spans"],
        noise_key=batch["noise_key"],
    )


@attrs.frozen
class CachedCall:
    """A call for batches with a "cache"; other calls get the complete texts in every step.

    Such a batch is one row of prompts, or of the newest token of each text. The result is logits
    `[1, R, V]`, or a `Hidden`, for the last token of each of the cache's rows.

    Examples:
        >>> CachedCall(lambda model, batch: model(batch["cache"]))(str, {"cache": 7})
        '7'
    """

    # Generation sees from the type whether a call can use a cache.
    call: Call

    def __call__(self, model: nn.Module, batch: Mapping[str, Any]) -> Any:
        """Call a model with a batch."""
        return self.call(model, batch)


def call_with_cache(model: nn.Module, batch: Mapping[str, Any]) -> Any:
    """Call a decoder, with experts or without, with a batch and its "cache".

    Examples:
        >>> import torch
        >>> seen = lambda ids, *, cache, **more: (ids, cache)
        >>> batch = {"input_ids": 1, "position_ids": 2, "spans": 3, "cache": 4}
        >>> call_with_cache(seen, batch | {"document_ids": torch.tensor([[0]])})
        (1, 4)
    """
    return model(
        batch["input_ids"],
        position_ids=batch["position_ids"],
        spans=batch["spans"],
        # Dense decoders ignore it.
        is_token=batch["document_ids"] >= 0,
        cache=batch["cache"],
    )
