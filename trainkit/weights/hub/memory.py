"""Convert the tensors of a Hugging Face model in memory to those of a decoder, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trainkit.parallel.materialize import narrow_to_box
from trainkit.types import CheckpointError
from trainkit.weights.checkpoint.boxes import get_dtype_name, shorten
from trainkit.weights.checkpoint.tensor_files import Stored
from trainkit.weights.hub.configs import get_family, read_decoder_config
from trainkit.weights.hub.export import make_export_links
from trainkit.weights.hub.families import FAMILIES, Family
from trainkit.weights.hub.folder import (
    add_model_prefix,
    find_folder_problems,
    get_decoder_shapes,
    make_family_links,
)
from trainkit.weights.hub.links import map_weights

if TYPE_CHECKING:
    from trainkit.models.config import DecoderConfig
    from trainkit.types import Weights


def import_tensors(
    tensors: Mapping[str, Tensor],
    values: Mapping[str, Any],
    *,
    families: Sequence[Family] = FAMILIES,
    context: int | None = None,
) -> dict[str, Tensor]:
    """Return the tensors of a Hugging Face model in memory by the names of our decoder.

    The decoder is `read_decoder_config(values)`, and takes them by `load_state_dict`.
    `open_folder_weights` does the same for a folder, in any layout.

    Args:
        tensors: The model's `state_dict()`, of a class with a head or without one, unsharded.
            The experts of a layer are one tensor, as `transformers` 5 has them in memory, or one
            for each as `save_pretrained` writes them; those of Mixtral have other names there.
        values: Its `config.to_dict()`.
        families: The families to consider.
        context: As in `read_decoder_config`.

    Returns:
        Tensors with the dtypes and devices of theirs: views of them, or copies where one of ours is
        made of several.

    Raises:
        ConfigError: trainkit does not support the model (`read_decoder_config`).
        CheckpointError: The tensors are not those of the model: all that are missing, extra, of
            another shape or not in floating point are named; or the head of a tied model differs
            from its embedding.

    Examples:
        >>> from trainkit.weights.hub import write_decoder_config
        >>> from trainkit.models import build_decoder, make_decoder_config
        >>> model = build_decoder(make_decoder_config("tiny", layers=1), seed=0)
        >>> theirs = export_tensors(model.state_dict(), model.config)
        >>> ours = import_tensors(theirs, write_decoder_config(model.config, context=256))
        >>> all(torch.equal(x, ours[name]) for name, x in model.state_dict().items())
        True
    """
    config = read_decoder_config(values, where="values", families=families, context=context)
    family = get_family(values["model_type"], where="values", families=families)
    prefixed = add_model_prefix(tensors, family, config)
    links = make_family_links(family, config, present=prefixed)
    # As if they were in files, so that folders and models in memory have the same checks.
    described = {
        name: Stored(get_dtype_name(x.dtype), tuple(x.shape), ()) for name, x in prefixed.items()
    }
    problems = find_folder_problems(described, links, family, config)
    embedding, head = (family.names(config)[f"{x}.weight"].name for x in ("embedding", "head"))
    # A model of `transformers` lists a tied head as a tensor of its own.
    both = config.tied and not problems and head in prefixed
    if both and not torch.equal(prefixed[embedding], prefixed[head]):
        problems = [f"{head} differs from {embedding}, although tie_word_embeddings is true"]
    if problems:
        raise CheckpointError(
            f"import_tensors: the tensors are not those of the {family.model_type} that values "
            f"describes: {shorten(problems)}",
            got=problems,
            hint="leave out tensors that the decoder does not have"
            if config.experts is None
            else "transformers fuses the experts of a layer in memory; save_pretrained writes one "
            "tensor for each",
        )
    return _read_all(
        map_weights(_make_reader(prefixed), links, get_decoder_shapes(config)),
        get_decoder_shapes(config),
    )


def export_tensors(
    tensors: Mapping[str, Tensor], config: DecoderConfig, *, family: Family | str | None = None
) -> dict[str, Tensor]:
    """Return the tensors of a decoder in memory by the names of a Hugging Face model.

    A model of `transformers` loads them by `load_state_dict(..., strict=False)`, which does not
    touch the head of a tied model; `checkpoint.save_tensors` writes them. `stream_weights` does the
    same for a sharded model, and `export_folder` for a checkpoint.

    Args:
        tensors: The `state_dict()` of a `Decoder`, unsharded.
        config: Its configuration.
        family: The family for the names, or its `model_type`; by default `match_family(config)`.

    Returns:
        Tensors with the dtypes and devices of ours: views of them, or copies where one of theirs is
        made of several.

    Raises:
        ConfigError: No family computes the decoder.
        CheckpointError: The tensors are not those of the decoder: all that are missing, extra or of
            another shape are named.

    Examples:
        >>> from trainkit.models import build_decoder, make_decoder_config
        >>> model = build_decoder(make_decoder_config("tiny", layers=1), seed=0)
        >>> export_tensors(model.state_dict(), model.config)["model.embed_tokens.weight"].shape
        torch.Size([272, 128])
    """
    links, shapes = make_export_links(family, config)
    ours = get_decoder_shapes(config)
    problems = [
        f"{name} of shape {list(shape)} is missing"
        for name, shape in ours.items()
        if name not in tensors
    ]
    problems += [
        f"{name} has the shape {list(x.shape)}, not {list(ours[name])}"
        for name, x in tensors.items()
        if name in ours and tuple(x.shape) != ours[name]
    ]
    problems += [
        f"{name} has no place in the decoder"
        for name in tensors
        if name not in ours and not name.endswith(".router.load")  # a count of the last steps
    ]
    if problems:
        raise CheckpointError(
            f"export_tensors: the tensors are not those of the decoder: {shorten(problems)}",
            got=problems,
        )
    return _read_all(map_weights(_make_reader(tensors), links, shapes), shapes)


# Models in memory go through the same maps as folders, so both directions have one code.
def _make_reader(tensors: Mapping[str, Tensor]) -> Weights:
    def read(name: str, shape: Sequence[int], offset: Sequence[int]) -> Tensor:
        return narrow_to_box(tensors[name].detach(), shape, offset)

    return read


def _read_all(read: Weights, shapes: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
    # One box for all of a tensor, which `narrow_to_box` returns as a view.
    return {name: read(name, tuple(x), (0,) * len(x)) for name, x in shapes.items()}
