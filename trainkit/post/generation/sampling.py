"""From logits to the next token: small functions of tensors, and one that calls them in order.

Their meaning and their order are those of `transformers` (5.23): the penalty first, then
temperature, then what is left out. What is left out gets the logit -inf.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs
import torch
from attrs.validators import optional
from torch import Tensor

from trainkit.losses.shaping import (  # noqa: F401 (the room's)
    Shaping,
    filter_min_p,
    filter_top_k,
    filter_top_p,
    filtered,
    scale_temperature,
)
from trainkit.noise import counters, make_key
from trainkit.types import fraction, non_negative, positive, satisfies


@attrs.frozen(kw_only=True)
class Sampling:
    """How the next token is chosen.

    Raises:
        ConfigError: A number is out of its range.

    Examples:
        >>> Sampling(temperature=0.7, top_p=0.9).top_k
        >>> Sampling(top_p=1.5)
        Traceback (most recent call last):
        ...
        trainkit.types.ConfigError: top_p must be above 0 and at most 1, got 1.5
    """

    temperature: float = attrs.field(default=1.0, validator=non_negative)
    """What logits are divided by; 0 takes the likeliest token."""

    top_k: int | None = attrs.field(default=None, validator=optional(positive))
    """Leave all but so many likeliest tokens out."""

    top_p: float = attrs.field(
        default=1.0, validator=satisfies(lambda x: 0 < x <= 1, "above 0 and at most 1")
    )
    """Leave out the least likely tokens that together have no more than 1 - top_p."""

    min_p: float = attrs.field(default=0.0, validator=fraction)
    """Leave out tokens that are less likely than the likeliest times this."""

    repetition_penalty: float = attrs.field(
        default=1.0, validator=satisfies(lambda x: 0 < x < math.inf, "above 0 and finite")
    )
    """What the logits of tokens of the text so far are divided by, or multiplied by below 0."""

    seed: int = 0
    """The seed of the draws."""


def next_tokens(
    logits: Tensor, places: Tensor, how: Sampling, *, seen: Tensor | None = None
) -> Tensor:
    """Return the next token of each row.

    Args:
        logits: `[R, V]`.
        places: fp64 `[R]` in [0, 1), the noise of each draw; see `places_of`.
        how: How it is chosen.
        seen: bool `[R, V]`, the tokens of each row's text; needed for a repetition penalty.

    Returns:
        int64 `[R]`; -1 where a logit is NaN.

    References:
        Keskar et al., "CTRL" (2019), for the penalty; Fan et al., "Hierarchical neural story
        generation" (2018), for top-k; Holtzman et al., "The curious case of neural text
        degeneration" (2019), for top-p; Nguyen et al., "Min-p sampling" (2024).

    Examples:
        >>> logits = torch.tensor([[1.0, 3.0, 2.0]])
        >>> next_tokens(logits, torch.tensor([0.9]), Sampling(temperature=0)).item()
        1
        >>> next_tokens(logits, torch.tensor([0.9]), Sampling()).item()
        2
    """
    logits = shape_logits(logits, how, seen=seen)
    if how.temperature > 0:
        return sample_from_cdf(logits, places)
    largest, token = logits.max(-1)
    return token.masked_fill(largest.isnan(), -1)


def shape_logits(logits: Tensor, how: Sampling, *, seen: Tensor | None = None) -> Tensor:
    """Return the logits that the next token is drawn by, in fp32 or wider.

    Args:
        logits: `[R, V]`.
        how: What is done to them; at a temperature of 0 only the penalty, as nothing else changes
            which is the largest.
        seen: As in `next_tokens`.

    Examples:
        >>> shape_logits(
        ...     torch.tensor([[1.0, 3.0, 2.0]]), Sampling(temperature=0.5, top_k=2)
        ... ).tolist()
        [[-inf, 6.0, 4.0]]
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if how.repetition_penalty != 1 and seen is not None:
        logits = penalize_repetition(logits, seen, how.repetition_penalty)
    if how.temperature == 0:
        return logits
    left_out = Shaping(top_k=how.top_k, top_p=how.top_p, min_p=how.min_p)
    return filtered(scale_temperature(logits, how.temperature), left_out)


def penalize_repetition(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Divide the logits of tokens that were seen by a penalty, or multiply them where below 0.

    Examples:
        >>> logits, seen = torch.tensor([[2.0, -2.0, 2.0]]), torch.tensor([[True, True, False]])
        >>> penalize_repetition(logits, seen, 2.0).tolist()
        [[1.0, -4.0, 2.0]]
    """
    penalised = torch.where(logits < 0, logits * penalty, logits / penalty)
    return torch.where(seen, penalised, logits)


def sample_from_cdf(logits: Tensor, places: Tensor) -> Tensor:
    """Return the tokens at places of the distributions' cumulative sums.

    Args:
        logits: `[R, V]`; the arithmetic is fp64.
        places: `[R]` in [0, 1).

    Returns:
        int64 `[R]`; -1 where a logit is NaN.

    Examples:
        >>> sample_from_cdf(torch.tensor([[0.0, 1.0, 0.0]] * 2), torch.tensor([0.0, 0.99])).tolist()
        [0, 2]
    """
    cumulative = logits.double().softmax(-1).cumsum(-1)
    whole = cumulative[:, -1:]
    token = torch.searchsorted(cumulative, places.double().unsqueeze(1) * whole, right=True)
    return token.squeeze(1).masked_fill(whole.squeeze(1).isnan(), -1)


def places_of(
    rows: Sequence[int], begin: Sequence[int], count: int, *, seed: int, device: torch.device
) -> Tensor:
    """Return the noise of draws: a function of the seed, the row's number and the token's position.

    Args:
        rows: The numbers of R rows.
        begin: The position of the first token that is drawn, of each row.
        count: How many are drawn of each.
        seed: The seed.
        device: Where to.

    Returns:
        fp64 `[R, count]` in [0, 1).

    Examples:
        >>> from functools import partial
        >>> of = partial(places_of, seed=0, device=torch.device("cpu"))
        >>> torch.equal(of([3, 5], [0, 7], 2)[1:], of([5], [6], 3)[:, 1:])
        True
    """
    keys = [counters.to_int64(make_key(seed, "generate", row)) for row in rows]
    bits = [
        counters.make_random_bits(torch.tensor(key), name="place", features=count, first=first)
        for key, first in zip(keys, begin, strict=True)
    ]
    return (torch.stack(bits).double() * 2.0**-53).to(device)
