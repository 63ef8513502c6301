"""The decoder inside a multimodal model: its text tower.

A multimodal folder has the decoder's keys in a table of its `config.json`, and the decoder's
tensors next to those of a vision or audio tower, which trainkit neither loads nor changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import attrs

from trainkit.parallel.name_patterns import match_any
from trainkit.types import CheckpointError
from trainkit.weights.checkpoint.boxes import shorten

BODY = "model.language_model."
"""The start of a tower's names, except the head's, in `transformers` since 4.52."""

# Earlier releases, and classes without a head. The first that fits counts.
_STARTS = {
    BODY: BODY,
    "language_model.lm_head.": "lm_head.",
    "language_model.model.": BODY,
    "language_model.": BODY,
    "model.": BODY,
}

T = TypeVar("T")


@attrs.frozen(eq=False, kw_only=True)
class Tower:
    """How a multimodal model contains a decoder.

    Attributes:
        model_type: The decoder's `model_type`, in `text_config`.
        keys: The other keys of the `config.json`: they do not change what is computed for text.
        tensors: Patterns of the tensors that are not the decoder's.
    """

    model_type: str
    keys: frozenset[str]
    tensors: Sequence[str]


def rename_tower(tensors: Mapping[str, T], tower: Tower) -> dict[str, T]:
    """Return the tensors of a multimodal model by the names of `transformers` since 4.52.

    Args:
        tensors: The tensors, by the names of any release.
        tower: How the model contains the decoder.

    Raises:
        CheckpointError: Two tensors would have one name.

    Examples:
        >>> tower = Tower(model_type="qwen3", keys=frozenset(), tensors=("visual.**",))
        >>> rename_tower({"language_model.model.norm.weight": 1, "visual.norm.weight": 2}, tower)
        {'model.language_model.norm.weight': 1, 'visual.norm.weight': 2}
    """
    renamed: dict[str, T] = {}
    twice = []
    for name, x in tensors.items():
        new = name
        if not match_any(name, tower.tensors):
            start = next((start for start in _STARTS if name.startswith(start)), "")
            new = _STARTS.get(start, "") + name[len(start) :]
        if new in renamed:
            twice.append(new)
        renamed[new] = x
    if twice:
        raise CheckpointError(
            f"rename_tower: {shorten(twice)} are there twice, under an older name too", got=twice
        )
    return renamed
