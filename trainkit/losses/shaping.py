"""Sampling settings applied to logits, for samplers and for trainers that score samples.

Meaning and order are those of `transformers` (5.23): temperature first, then the filters, which set
the logits of excluded words to -inf. A setting is a number, or a tensor with one for each row.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainkit.batch.denominators import can_read_values
from trainkit.losses.softmax import gather_words, words_of_rank
from trainkit.types import IGNORED_LABEL, Axis

Each = float | Tensor
"""A number, or one for each row of logits: `[R]` for logits `[R, V]`."""


class Shaping(NamedTuple):
    """Sampling settings, as in `generation.Sampling`; the defaults change nothing.

    A setting is a number, or a tensor with one per token, where tokens were sampled differently;
    then 1, V, 1 and 0 change nothing. A tensor may hold anything where the label is -100; those
    tokens are not changed.
    """

    temperature: Each = 1.0
    top_k: int | Tensor | None = None
    top_p: Each = 1.0
    min_p: Each = 0.0

    @property
    def filters(self) -> bool:
        """Whether any word may be excluded."""
        return not (self.top_k is None and _is(self.top_p, 1.0) and _is(self.min_p, 0.0))

    def flat(self, where: str, labels: Tensor) -> Shaping:
        """Return the shaping of flattened tokens, which is the identity where a label is -100.

        Raises:
            ValueError: A tensor has another shape than the labels, `top_k` is not integers, or a
                number is out of range; on a CPU, also one in a tensor at a label that counts.
        """
        settings = zip(_RANGES, self, strict=True)
        return Shaping(*(_flatten_setting(where, name, x, labels) for name, x in settings))

    def of(self, rows: slice) -> Shaping:
        """Return the shaping of some of the flattened tokens."""
        parts: Any = (x[rows] if isinstance(x, Tensor) else x for x in self)
        return Shaping(*parts)

    def known(self, d_losses: Tensor, losses: Tensor) -> Tensor:
        """Return the derivatives of losses, with 0 for labels that are excluded."""
        return d_losses.masked_fill(losses == torch.inf, 0) if self.filters else d_losses


UNSHAPED = Shaping()


# The valid values of a setting, described too, and the value that changes nothing.
_RANGES: dict[str, tuple[Callable[[Any], Any], str, float]] = {
    "temperature": (
        lambda x: (x > 0) & (x < math.inf),
        "above 0 and finite (at 0 nothing is drawn)",
        1.0,
    ),
    "top_k": (
        lambda x: (x >= 1) & (x < math.inf),
        "at least 1, or None",
        torch.iinfo(torch.int64).max,  # `filter_top_k` clamps it to the vocabulary
    ),
    "top_p": (lambda x: (x > 0) & (x <= 1), "above 0 and at most 1", 1.0),
    "min_p": (lambda x: (x >= 0) & (x <= 1), "between 0 and 1", 0.0),
}


def _flatten_setting(where: str, name: str, x: Any, labels: Tensor) -> Any:
    """Return a setting of flattened tokens: a number, or a tensor with the identity at -100."""
    is_valid, valid_range, identity = _RANGES[name]
    if not isinstance(x, Tensor):
        if not (x is None and name == "top_k") and not is_valid(x):
            raise ValueError(f"{where}: {name} must be {valid_range}, got {x}")
        return x
    if x.shape not in (labels.shape, ()):
        raise ValueError(
            f"{where}: {name} must be a number or have the shape of labels {tuple(labels.shape)}, "
            f"got {tuple(x.shape)}"
        )
    if name == "top_k":
        if x.is_floating_point():
            raise ValueError(f"{where}: top_k must hold integers, got {x.dtype}")
        x = x.long()
    # The identity at -100: padding of a column is 0, which is out of range for most settings.
    x = x.expand(labels.shape).masked_fill(labels == IGNORED_LABEL, identity).flatten()
    if can_read_values(x) and not (valid := is_valid(x)).all():
        index = int((~valid).nonzero()[0])
        raise ValueError(
            f"{where}: {name} must be {valid_range}, got {x[index].item():g} at index {index} of "
            "the flattened labels"
        )
    return x


def apply_shaping_(logits: Tensor, shaping: Shaping, axis: Axis) -> Tensor:
    """Apply sampling settings to sharded logits `[T, V_r]`.

    Effects:
        Overwrites `logits` and returns them. If words may be excluded, all-gathers them on `axis`.

    Examples:
        >>> from trainkit.types import SOLO
        >>> apply_shaping_(torch.tensor([[1.0, 3.0, 2.0]]), Shaping(0.5, top_k=2), SOLO).tolist()
        [[-inf, 6.0, 4.0]]
    """
    if not _is(shaping.temperature, 1.0):
        logits.div_(_column(shaping.temperature))
    if not shaping.filters:
        return logits
    # Filters rank the words of the whole vocabulary, so that each rank needs all of them.
    local = words_of_rank(filter_logits(gather_words(logits, axis), shaping), axis)
    return logits.masked_fill_(local == -torch.inf, -torch.inf)


def undo_shaping_(slopes: Tensor, shaping: Shaping) -> Tensor:
    """Convert the gradient of shaped logits `[T, V_r]` to that of the logits.

    Effects:
        Overwrites `slopes` and returns them.

    Examples:
        >>> undo_shaping_(torch.ones(1, 2), Shaping(temperature=0.5))
        tensor([[2., 2.]])
    """
    if _is(shaping.temperature, 1.0):
        return slopes
    # Filters need no derivative: an excluded word has a probability, and so a slope, of 0.
    return slopes.div_(_column(shaping.temperature))


def apply_shaping(logits: Tensor, shaping: Shaping) -> Tensor:
    """Return shaped logits `[R, V]`, differentiable.

    Examples:
        >>> apply_shaping(torch.tensor([[1.0, 3.0, 2.0]]), Shaping(0.5, top_k=2)).tolist()
        [[-inf, 6.0, 4.0]]
    """
    if not _is(shaping.temperature, 1.0):
        logits = scale_temperature(logits, shaping.temperature)
    return filter_logits(logits, shaping)


def filter_logits(logits: Tensor, shaping: Shaping) -> Tensor:
    """Apply top_k, top_p and min_p, in this order, to logits `[R, V]` after the temperature.

    Examples:
        >>> filter_logits(torch.tensor([[1.0, 3.0, 2.0]]), Shaping(top_k=2)).tolist()
        [[-inf, 3.0, 2.0]]
    """
    if shaping.top_k is not None:
        logits = filter_top_k(logits, shaping.top_k)
    if not _is(shaping.top_p, 1.0):
        logits = filter_top_p(logits, shaping.top_p)
    return logits if _is(shaping.min_p, 0.0) else filter_min_p(logits, shaping.min_p)


def scale_temperature(logits: Tensor, value: Each) -> Tensor:
    """Divide logits by a temperature above 0; below 1 likely tokens become more likely.

    Examples:
        >>> scale_temperature(torch.tensor([[1.0, 2.0]]), 0.5).tolist()
        [[2.0, 4.0]]
    """
    return logits / _column(value)


def filter_top_k(logits: Tensor, k: int | Tensor) -> Tensor:
    """Exclude tokens that are less likely than the k-th; with ties more than k remain.

    Examples:
        >>> filter_top_k(torch.tensor([[1.0, 3.0, 2.0]]), 2).tolist()
        [[-inf, 3.0, 2.0]]
        >>> filter_top_k(torch.tensor([[1.0, 3.0, 2.0]] * 2), torch.tensor([1, 3])).tolist()
        [[-inf, 3.0, -inf], [1.0, 3.0, 2.0]]
    """
    words = logits.shape[-1]
    if isinstance(k, Tensor):  # a sort, because the largest k is not known without a host sync
        index = k.clamp(1, words).unsqueeze(-1) - 1
        least = logits.sort(descending=True).values.gather(-1, index)
    else:
        least = logits.topk(min(k, words)).values[:, -1:]
    return logits.masked_fill(logits < least, -torch.inf)


def filter_top_p(logits: Tensor, p: Each) -> Tensor:
    """Exclude the least likely tokens, up to a total probability of 1 - p.

    Examples:
        >>> filter_top_p(torch.tensor([[0.6, 0.3, 0.1]]).log(), 0.8).exp().tolist()[0][2]
        0.0
    """
    ascending, order = logits.sort()
    p = _column(p)
    # Ascending, so that the cumulative sum is the probability of a word and of all less likely
    # ones. At p = 1 rounding must exclude nothing.
    excluded = ascending.softmax(-1).cumsum(-1) <= 1 - p
    excluded = excluded & (torch.as_tensor(p) < 1)
    excluded[:, -1] = False  # the most likely token always remains
    # From the sorted order back to that of the words.
    excluded = excluded.scatter(1, order, excluded)
    return logits.masked_fill(excluded, -torch.inf)


def filter_min_p(logits: Tensor, p: Each) -> Tensor:
    """Exclude tokens whose probability is below p times that of the most likely token.

    Examples:
        >>> filter_min_p(torch.tensor([[0.6, 0.3, 0.1]]).log(), 0.4).exp().tolist()[0][2]
        0.0
    """
    probabilities = logits.softmax(-1)
    # In probabilities and not in logits, as transformers does.
    minimum = _column(p) * probabilities.amax(-1, keepdim=True)
    return logits.masked_fill(probabilities < minimum, -torch.inf)


def _column(x: Each) -> Each:
    return x.unsqueeze(-1) if isinstance(x, Tensor) else x


def _is(x: Each, value: float) -> bool:
    # A tensor counts as another value: comparing it would be a host sync.
    return not isinstance(x, Tensor) and x == value
