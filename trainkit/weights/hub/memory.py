"""The tensors of a Hugging Face model in memory as those of a decoder, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trainkit.types import CheckpointError
from trainkit.weights.checkpoint.boxes import shorten
from trainkit.weights.checkpoint.tensor_files import Stored
from trainkit.weights.hub.configs import family_named, read_decoder_config
from trainkit.weights.hub.export import family_links
from trainkit.weights.hub.families import FAMILIES, Family
from trainkit.weights.hub.folder import links_of, of_whole_model, our_shapes, tensor_problems
from trainkit.weights.hub.links import linked

if TYPE_CHECKING:
    from trainkit.models.config import DecoderConfig
    from trainkit.types import Weights


def import_tensors(
    tensors: Mapping[str, Tensor],
    values: Mapping[str, Any],
    *,
    families: Sequence[Family] = FAMILIES,
    context: int | None = None,
    allow_extra: Sequence[str] = (),
) -> dict[str, Tensor]:
    """Return the tensors of a Hugging Face model in memory by the names of our decoder.

    The decoder is `read_decoder_config(values)`, and takes them by `load_state_dict`.
    `open_folder_weights` does the same for a folder, in any layout.

    Args:
        tensors: The model's `state_dict()`, of a class with a head or without one, whole on this
            process. Models with experts have these joined in memory in `transformers` 5 and later:
            give what `save_pretrained` would write.
        values: Its `config.to_dict()`.
        families: Those that it may be of.
        context: As in `read_decoder_config`.
        allow_extra: Patterns of their names that are left aside.

    Returns:
        Tensors of the dtypes and on the devices of theirs: views of them, or copies where ours are
        made of several.

    Raises:
        ConfigError: It is of no family that trainkit computes (`read_decoder_config`).
        CheckpointError: The tensors are not those of the model: all that are missing, left over, of
            another shape or no floating point are named; or the head of a tied model is not its
            embedding.

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
    family = family_named(values["model_type"], where="values", families=families)
    links = links_of(family, config)
    held = of_whole_model(tensors, family, config)
    problems = tensor_problems(_described(held), links, family, config, allow_extra=allow_extra)
    embedding, head = (family.names(config)[f"{x}.weight"].name for x in ("embedding", "head"))
    both = config.tied and not problems and head in held
    if both and not torch.equal(held[embedding], held[head]):
        problems = [f"{head} is not {embedding}, and tie_word_embeddings says so"]
    if problems:
        raise CheckpointError(
            f"import_tensors: the tensors are not those of the {family.model_type} that values "
            f"describes: {shorten(problems)}",
            got=problems,
            hint="allow_extra= takes patterns of names that may be left aside"
            if config.experts is None
            else "transformers joins the experts of a layer in memory: save_pretrained writes them "
            "apart, under the names that are wanted",
        )
    return _whole(linked(_boxes_of(held), links, our_shapes(config)), our_shapes(config))


def export_tensors(
    tensors: Mapping[str, Tensor], config: DecoderConfig, *, family: Family | str | None = None
) -> dict[str, Tensor]:
    """Return the tensors of a decoder in memory by the names of a Hugging Face model.

    A model of `transformers` takes them by `load_state_dict(..., strict=False)`, which leaves the
    head of a tied model as it is; `checkpoint.save_tensors` writes them. `stream_weights` does the
    same for a model whose parameters are split over ranks, and `export_folder` for a checkpoint.

    Args:
        tensors: The `state_dict()` of a `Decoder`, whole on this process.
        config: The decoder's.
        family: Whose names to use, or its `model_type`; by default the first that computes the
            same, which `match_family(config)` is.

    Returns:
        Tensors of the dtypes and on the devices of ours: views of them, or copies where theirs are
        made of several.

    Raises:
        ConfigError: No family computes the decoder.
        CheckpointError: The tensors are not those of the decoder: all that are missing, left over
            or of another shape are named.

    Examples:
        >>> from trainkit.models import build_decoder, make_decoder_config
        >>> model = build_decoder(make_decoder_config("tiny", layers=1), seed=0)
        >>> export_tensors(model.state_dict(), model.config)["model.embed_tokens.weight"].shape
        torch.Size([272, 128])
    """
    links, shapes = family_links(family, config)
    ours = our_shapes(config)
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
        if name not in ours and not name.endswith(".router.load")  # what a step has counted
    ]
    if problems:
        raise CheckpointError(
            f"export_tensors: the tensors are not those of the decoder: {shorten(problems)}",
            got=problems,
        )
    return _whole(linked(_boxes_of(tensors), links, shapes), shapes)


def _described(tensors: Mapping[str, Tensor]) -> dict[str, Stored]:
    return {
        name: Stored(str(x.dtype).removeprefix("torch."), tuple(x.shape), ())
        for name, x in tensors.items()
    }


def _boxes_of(tensors: Mapping[str, Tensor]) -> Weights:
    def read(name: str, shape: Sequence[int], offset: Sequence[int]) -> Tensor:
        box = tuple(slice(a, a + n) for a, n in zip(offset, shape, strict=True))
        return tensors[name].detach()[box]

    return read


def _whole(read: Weights, shapes: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
    return {name: read(name, tuple(x), (0,) * len(x)) for name, x in shapes.items()}
