"""Modules that a transform would compute wrongly, refused by name before anything is sharded."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from trainkit.parallel.naming import canonical_name
from trainkit.types import ConfigError


def refuse_max_norm(module: nn.Module, *, by: str, weights: Collection[str] | None = None) -> None:
    """Refuse an embedding that renormalises its rows: its forward pass writes to its weight.

    What is written to a gathered or a cast copy is lost, and ranks with other tokens write other
    rows.

    Args:
        module: A model or a stage of one.
        by: The transform, for the message.
        weights: Look only at embeddings whose weight has one of these names; by default at all.

    Raises:
        ConfigError: Names the first such embedding.

    Examples:
        >>> refuse_max_norm(nn.ModuleDict({"words": nn.Embedding(4, 2, max_norm=1.0)}), by="fsdp")
        Traceback (most recent call last):
        trainkit.types.ConfigError: fsdp: 'words' is an Embedding with max_norm = 1.0, which ...
    """
    for name, part in module.named_modules():
        if not isinstance(part, nn.Embedding | nn.EmbeddingBag) or part.max_norm is None:
            continue
        if weights is None or canonical_name(f"{name}.weight") in weights:
            raise ConfigError(
                f"{by}: {canonical_name(name) or 'the model itself'!r} is an "
                f"{type(part).__name__} with max_norm = {part.max_norm}, which rescales rows of "
                "its weight in the forward pass; here it would rescale a copy, or other rows on "
                "each rank, and train another model. Build it with max_norm=None (rows that the "
                "model reads can be rescaled in its forward pass, out of place), or train on one "
                "rank in the dtype of the parameters",
                where=canonical_name(name),
                got=part.max_norm,
                want=None,
            )
