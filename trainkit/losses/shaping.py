"""What a sampler does to logits before it draws, so that a trainer can score what was drawn.

Their meaning and their order are those of `transformers` (5.23): temperature first, then what is
left out, which gets the logit -inf. Each value is a number, or a tensor with one for each row.
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
    """How logits are shaped, as by `generation.Sampling`; as it stands here, not at all.

    Each is a number or a tensor per token, for rows of which some were drawn otherwise: then 1, V,
    1 and 0 are what changes nothing. Where the label is -100 a tensor may hold anything, as a
    column of a batch does: those tokens are not shaped.
    """

    temperature: Each = 1.0
    top_k: int | Tensor | None = None
    top_p: Each = 1.0
    min_p: Each = 0.0

    @property
    def filters(self) -> bool:
        """Whether any word may be left out."""
        all_left = self.top_k is None and _is(self.top_p, 1.0) and _is(self.min_p, 0.0)
        return not all_left

    def flat(self, where: str, labels: Tensor) -> Shaping:
        """Return the shaping of flattened tokens, which is the identity where a label is -100.

        Raises:
            ValueError: A tensor has another shape than the labels, `top_k` holds no integers, or a
                number is out of its range; on a CPU, also one in a tensor beside a trained label.
        """
        settings = zip(_RANGES, self, strict=True)
        return Shaping(*(_flat(where, name, x, labels) for name, x in settings))

    def of(self, rows: slice) -> Shaping:
        """Return the shaping of some of the tokens, which are flattened."""
        parts: Any = (x[rows] if isinstance(x, Tensor) else x for x in self)
        return Shaping(*parts)

    def known(self, d_losses: Tensor, losses: Tensor) -> Tensor:
        """Return derivatives of losses without those of labels that are left out."""
        return d_losses.masked_fill(losses == torch.inf, 0) if self.filters else d_losses


UNSHAPED = Shaping()


# Which values a setting may have, in words too, and the one that changes nothing.
_RANGES: dict[str, tuple[Callable[[Any], Any], str, float]] = {
    "temperature": (
        lambda x: (x > 0) & (x < math.inf),
        "above 0 and finite (at 0 nothing is drawn)",
        1.0,
    ),
    "top_k": (
        lambda x: (x >= 1) & (x < math.inf),
        "at least 1, or None",
        torch.iinfo(torch.int64).max,
    ),
    "top_p": (lambda x: (x > 0) & (x <= 1), "above 0 and at most 1", 1.0),
    "min_p": (lambda x: (x >= 0) & (x <= 1), "between 0 and 1", 0.0),
}


def _flat(where: str, name: str, x: Any, labels: Tensor) -> Any:
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
    x = x.expand(labels.shape).masked_fill(labels == IGNORED_LABEL, identity).flatten()
    if can_read_values(x) and not (valid := is_valid(x)).all():
        place = int((~valid).nonzero()[0])
        raise ValueError(
            f"{where}: {name} must be {valid_range}, got {x[place].item():g} at index {place} of "
            "the flattened labels"
        )
    return x


def shaped_(logits: Tensor, how: Shaping, axis: Axis) -> Tensor:
    """Shape logits `[T, V_r]`, of which each rank has those of its words.

    Effects:
        Overwrites `logits` and returns them. Where words are left out, the logits are gathered on
        `axis`.

    Examples:
        >>> from trainkit.types import SOLO
        >>> shaped_(torch.tensor([[1.0, 3.0, 2.0]]), Shaping(0.5, top_k=2), SOLO).tolist()
        [[-inf, 6.0, 4.0]]
    """
    if not _is(how.temperature, 1.0):
        logits.div_(_column(how.temperature))
    if not how.filters:
        return logits
    left = words_of_rank(filtered(gather_words(logits, axis), how), axis)
    return logits.masked_fill_(left == -torch.inf, -torch.inf)


def unshaped_slopes_(slopes: Tensor, how: Shaping) -> Tensor:
    """Turn the gradient of shaped logits `[T, V_r]` into that of the logits.

    Effects:
        Overwrites `slopes` and returns them.

    Examples:
        >>> unshaped_slopes_(torch.ones(1, 2), Shaping(temperature=0.5))
        tensor([[2., 2.]])
    """
    return slopes if _is(how.temperature, 1.0) else slopes.div_(_column(how.temperature))


def reshaped(logits: Tensor, how: Shaping) -> Tensor:
    """Return shaped logits `[R, V]`, differentiable.

    Examples:
        >>> reshaped(torch.tensor([[1.0, 3.0, 2.0]]), Shaping(0.5, top_k=2)).tolist()
        [[-inf, 6.0, 4.0]]
    """
    return filtered(
        logits if _is(how.temperature, 1.0) else scale_temperature(logits, how.temperature), how
    )


def filtered(logits: Tensor, how: Shaping) -> Tensor:
    """Leave words out of logits `[R, V]` that a temperature has been applied to, in order.

    Examples:
        >>> filtered(torch.tensor([[1.0, 3.0, 2.0]]), Shaping(top_k=2)).tolist()
        [[-inf, 3.0, 2.0]]
    """
    if how.top_k is not None:
        logits = filter_top_k(logits, how.top_k)
    if not _is(how.top_p, 1.0):
        logits = filter_top_p(logits, how.top_p)
    return logits if _is(how.min_p, 0.0) else filter_min_p(logits, how.min_p)


def scale_temperature(logits: Tensor, value: Each) -> Tensor:
    """Divide logits by a temperature above 0: below 1 likely tokens become likelier.

    Examples:
        >>> scale_temperature(torch.tensor([[1.0, 2.0]]), 0.5).tolist()
        [[2.0, 4.0]]
    """
    return logits / _column(value)


def filter_top_k(logits: Tensor, k: int | Tensor) -> Tensor:
    """Leave out tokens that are less likely than the k-th; of equals there may be more than k.

    Examples:
        >>> filter_top_k(torch.tensor([[1.0, 3.0, 2.0]]), 2).tolist()
        [[-inf, 3.0, 2.0]]
        >>> filter_top_k(torch.tensor([[1.0, 3.0, 2.0]] * 2), torch.tensor([1, 3])).tolist()
        [[-inf, 3.0, -inf], [1.0, 3.0, 2.0]]
    """
    words = logits.shape[-1]
    if isinstance(k, Tensor):  # the largest k is not known without waiting for the device
        places = k.clamp(1, words).unsqueeze(-1) - 1
        least = logits.sort(descending=True).values.gather(-1, places)
    else:
        least = logits.topk(min(k, words)).values[:, -1:]
    return logits.masked_fill(logits < least, -torch.inf)


def filter_top_p(logits: Tensor, p: Each) -> Tensor:
    """Leave out the least likely tokens, as long as they have at most 1 - p together.

    Examples:
        >>> filter_top_p(torch.tensor([[0.6, 0.3, 0.1]]).log(), 0.8).exp().tolist()[0][2]
        0.0
    """
    rising, order = logits.sort()
    p = _column(p)
    out = (rising.softmax(-1).cumsum(-1) <= 1 - p) & (torch.as_tensor(p) < 1)
    out[:, -1] = False
    return logits.masked_fill(out.scatter(1, order, out), -torch.inf)


def filter_min_p(logits: Tensor, p: Each) -> Tensor:
    """Leave out tokens that are less likely than the likeliest times p.

    Examples:
        >>> filter_min_p(torch.tensor([[0.6, 0.3, 0.1]]).log(), 0.4).exp().tolist()[0][2]
        0.0
    """
    chances = logits.softmax(-1)
    least = _column(p) * chances.amax(-1, keepdim=True)
    return logits.masked_fill(chances < least, -torch.inf)


def _column(x: Each) -> Each:
    return x.unsqueeze(-1) if isinstance(x, Tensor) else x


def _is(x: Each, value: float) -> bool:
    return not isinstance(x, Tensor) and x == value
