"""Sample the next token from logits: small functions of tensors, and one that chains them.

Meaning and order are those of `transformers` (5.23): first the penalty, then the temperature, then
the filters, which set logits to -inf.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs
import torch
from attrs.validators import optional
from torch import Tensor

from trainkit.losses.shaping import (  # noqa: F401 (exported with the others)
    Shaping,
    filter_logits,
    filter_min_p,
    filter_top_k,
    filter_top_p,
    scale_temperature,
)
from trainkit.noise import counters, make_key
from trainkit.types import fraction, non_negative, positive, satisfies


@attrs.frozen(kw_only=True)
class Sampling:
    """Parameters of sampling.

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
    """Divides the logits; 0 takes the most likely token."""

    top_k: int | None = attrs.field(default=None, validator=optional(positive))
    """Sample among the `top_k` most likely tokens."""

    top_p: float = attrs.field(
        default=1.0, validator=satisfies(lambda x: 0 < x <= 1, "above 0 and at most 1")
    )
    """Drop the least likely tokens whose probabilities sum to at most 1 - top_p."""

    min_p: float = attrs.field(default=0.0, validator=fraction)
    """Drop tokens with a probability below `min_p` times that of the most likely token."""

    repetition_penalty: float = attrs.field(
        default=1.0, validator=satisfies(lambda x: 0 < x < math.inf, "above 0 and finite")
    )
    """Divides logits of tokens that the text contains; negative ones are multiplied."""

    seed: int = 0


def next_tokens(
    logits: Tensor,
    noise: Tensor,
    sampling: Sampling,
    *,
    seen: Tensor | None = None,
) -> Tensor:
    """Sample the next token of each row.

    Args:
        logits: `[R, V]`.
        noise: fp64 `[R]` in [0, 1); see `make_noise`.
        sampling: Temperature, filters and penalty.
        seen: bool `[R, V]`, a mask of the tokens in each row's text, for the repetition penalty.

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
    logits = shape_logits(logits, sampling, seen=seen)
    if sampling.temperature > 0:
        return sample_from_cdf(logits, noise)
    largest, token = logits.max(-1)
    # max() returns NaN if there is one, which argmax() would not show.
    return token.masked_fill(largest.isnan(), -1)


def shape_logits(logits: Tensor, sampling: Sampling, *, seen: Tensor | None = None) -> Tensor:
    """Apply penalty, temperature and filters to logits, in fp32 or wider.

    Args:
        logits: `[R, V]`.
        sampling: At a temperature of 0 only the penalty applies: nothing else changes the argmax.
        seen: As in `next_tokens`.

    Examples:
        >>> shape_logits(
        ...     torch.tensor([[1.0, 3.0, 2.0]]), Sampling(temperature=0.5, top_k=2)
        ... ).tolist()
        [[-inf, 6.0, 4.0]]
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if sampling.repetition_penalty != 1 and seen is not None:
        logits = penalize_repetition(logits, seen, sampling.repetition_penalty)
    if sampling.temperature == 0:
        return logits
    # The trainer scores samples with the same functions, so both agree on what can be drawn.
    filters = Shaping(top_k=sampling.top_k, top_p=sampling.top_p, min_p=sampling.min_p)
    return filter_logits(scale_temperature(logits, sampling.temperature), filters)


def penalize_repetition(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Divide the logits of seen tokens by a penalty; multiply negative ones by it.

    Examples:
        >>> logits, seen = torch.tensor([[2.0, -2.0, 2.0]]), torch.tensor([[True, True, False]])
        >>> penalize_repetition(logits, seen, 2.0).tolist()
        [[1.0, -4.0, 2.0]]
    """
    # Either way the token becomes less likely, which dividing a negative logit would not do.
    penalized = torch.where(logits < 0, logits * penalty, logits / penalty)
    return torch.where(seen, penalized, logits)


def sample_from_cdf(logits: Tensor, noise: Tensor) -> Tensor:
    """Sample tokens by inverting the cumulative distribution.

    Args:
        logits: `[R, V]`; the arithmetic is fp64.
        noise: `[R]` in [0, 1).

    Returns:
        int64 `[R]`; -1 where a logit is NaN.

    Examples:
        >>> sample_from_cdf(torch.tensor([[0.0, 1.0, 0.0]] * 2), torch.tensor([0.0, 0.99])).tolist()
        [0, 2]
    """
    cumulative = logits.double().softmax(-1).cumsum(-1)
    # The sum is 1 but for rounding; scaled by it, no draw falls behind the last token.
    total = cumulative[:, -1:]
    thresholds = noise.double().unsqueeze(1) * total
    token = torch.searchsorted(cumulative, thresholds, right=True)
    return token.squeeze(1).masked_fill(total.squeeze(1).isnan(), -1)


def make_noise(
    row_ids: Sequence[int],
    starts: Sequence[int],
    count: int,
    *,
    seed: int,
    device: torch.device,
) -> Tensor:
    """Return uniform noise that is a function of seed, row id and token position.

    Args:
        row_ids: Ids of R rows.
        starts: Position of the first sampled token of each row.
        count: Number of sampled tokens per row.
        seed: The seed.
        device: Device of the result.

    Returns:
        fp64 `[R, count]` in [0, 1).

    Examples:
        >>> from functools import partial
        >>> noise = partial(make_noise, seed=0, device=torch.device("cpu"))
        >>> torch.equal(noise([3, 5], [0, 7], 2)[1:], noise([5], [6], 3)[:, 1:])
        True
    """
    keys = [counters.to_int64(make_key(seed, "generate", row)) for row in row_ids]
    bits = [
        counters.make_random_bits(torch.tensor(key), name="place", features=count, first=first)
        for key, first in zip(keys, starts, strict=True)
    ]
    # fp64 has 53 bits of mantissa, so every value is exact and below 1.
    return (torch.stack(bits).double() * 2.0**-53).to(device)
