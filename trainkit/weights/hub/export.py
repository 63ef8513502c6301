"""A decoder of any layout for others: as a Hugging Face folder, or as a stream of tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
import torch
from torch import Tensor, nn

from trainkit.collectives import all_gather_objects, broadcast, run_on_all_ranks
from trainkit.models.config import DecoderConfig, parameter_shapes
from trainkit.models.decoder import Decoder
from trainkit.models.decoder_sizes import config_from_facts
from trainkit.parallel.stage_forward import compute_device
from trainkit.types import SOLO, Axis, CheckpointError, ConfigError, Weights
from trainkit.weights.checkpoint.boxes import get_parameter_name, shorten
from trainkit.weights.checkpoint.export import SHARD_BYTES, describe_origin, write_weights
from trainkit.weights.checkpoint.load import read_facts
from trainkit.weights.checkpoint.manifest import find_checkpoint
from trainkit.weights.checkpoint.reading import reader
from trainkit.weights.checkpoint.run_state import model_tensors
from trainkit.weights.checkpoint.sources import read_model_tensors
from trainkit.weights.checkpoint.tensor_files import Stored
from trainkit.weights.hub.configs import family_named, match_family, write_decoder_config
from trainkit.weights.hub.families import Family
from trainkit.weights.hub.folder import CONFIG, links_of, our_shapes
from trainkit.weights.hub.links import Link, linked, their_shapes

_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def export_folder(
    checkpoint: Path | str,
    folder: Path | str,
    *,
    context: int,
    family: Family | str | None = None,
    files: Mapping[str, bytes] | None = None,
    dtype: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    overwrite: bool = False,
    read: Weights | None = None,
    axis: Axis = SOLO,
) -> dict[str, Any]:
    """Write a checkpoint as a folder that `AutoModelForCausalLM.from_pretrained` loads.

    Args:
        checkpoint: A checkpoint of a decoder, written by any layout; or a run directory, of which
            the newest that verifies is taken.
        folder: The new folder; it appears by one rename when it is complete.
        context: The most tokens that a row is meant to have: `max_position_embeddings`.
        family: What to call it, or its `model_type`; by default the first that computes the same.
        files: What else is in the folder, the files of a tokenizer for instance
            (`make_tokenizer_files`); the ids of `generation_config.json` go into `config.json` too.
        dtype: What parameters become, "bfloat16" for instance; None keeps them. The biases of
            routers stay what they are.
        shard_bytes: The most bytes of a file of tensors, unless a single one is larger.
        overwrite: Replace a folder that an earlier export wrote.
        read: Gives our tensors in place of the checkpoint, `adapters.merge_weights` for instance.
        axis: The ranks that call this together, on one disk: each writes its share of the files.

    Returns:
        {"folder", "files", "tensors", "bytes", "from"}.

    Raises:
        CheckpointError: The checkpoint does not verify, or is not of a decoder.
        ConfigError: No family computes the decoder, or the folder is there already.
        DiskError: It cannot be written; then there is no folder, or the old one.

    Effects:
        Writes a folder; communicates on `axis`.

    Examples:
        >>> import attrs, tempfile
        >>> from trainkit.weights.checkpoint import save_checkpoint
        >>> from trainkit.weights.hub import open_folder
        >>> from trainkit.mesh import solo_parallel
        >>> from trainkit.models import DecoderConfig, build_decoder
        >>> from trainkit.types import TrainState
        >>> config = DecoderConfig(
        ...     vocab_size=8, width=4, layers=1, heads=1, kv_heads=1, mlp_width=4
        ... )
        >>> model = build_decoder(config, seed=0)
        >>> rest = [model], torch.optim.SGD(model.parameters()), solo_parallel()
        >>> with tempfile.TemporaryDirectory() as run:
        ...     facts = {"model": attrs.asdict(config)}
        ...     path = save_checkpoint(run, TrainState(), *rest, facts=facts)
        ...     export_folder(path, f"{run}/there", context=64)["files"]
        ...     open_folder(f"{run}/there").config.width
        ['model.safetensors', 'config.json']
        4
    """
    said = run_on_all_ranks(
        lambda: str(find_checkpoint(checkpoint)) if axis.index == 0 else None, axis
    )[0]
    path = Path(said)
    config = config_from_facts(read_facts(path, needs=["model"])["model"])
    known = _family(family, config)
    values = write_decoder_config(config, context=context, family=known)
    links, shapes = family_links(known, config)
    ours = _saved(path, our_shapes(config)) if read is None else _given(read, our_shapes(config))
    cast = {name: dtype or ours[name].dtype for name in parameter_shapes(config)}
    kinds = _kinds(links, {name: x.dtype for name, x in ours.items()} | cast)
    values["torch_dtype"] = kinds[known.names(config)["embedding.weight"].name]
    beside = dict(files or {})
    said_ids = orjson.loads(beside.get("generation_config.json", b"{}"))
    values |= {key: said_ids.get(key) for key in _IDS}  # a class has others by default
    beside[CONFIG] = orjson.dumps(values, option=orjson.OPT_INDENT_2)
    return write_weights(
        {name: Stored(kinds[name], shape, ()) for name, shape in shapes.items()},
        folder,
        shard_bytes=shard_bytes,
        overwrite=overwrite,
        origin=describe_origin(path),
        read=linked(read or reader(ours), links, shapes),
        extra_files=beside,
        axis=axis,
    )


def stream_weights(
    stages: Sequence[nn.Module],
    *,
    family: Family | str | None = None,
    dtype: torch.dtype | None = None,
    axis: Axis = SOLO,
) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of a decoder as they are now, whole, as `export_folder` would write them.

    For an inference engine that takes new weights while it runs. One tensor of ours is gathered at
    a time, so that this takes the memory of a few.

    Args:
        stages: This rank's stages of a `Decoder`, in any layout.
        family: Whose names to use, or its `model_type`; by default the first that computes the
            same.
        dtype: What parameters become, before they travel; None keeps them. The biases of routers
            stay what they are.
        axis: The pipeline axis, `ps.pp`.

    Yields:
        The name of a tensor in the folder, and its values, a copy, on every rank.

    Raises:
        ConfigError: The stages are of no decoder, or hold not all of it (adapters are to be merged
            first); or no family computes it.

    Effects:
        Communicates on `axis` and on all axes that parameters are split over: every rank has to
        take every tensor, and must not train in between.

    Examples:
        >>> from trainkit.models import build_decoder, make_decoder_config
        >>> model = build_decoder(make_decoder_config("tiny", layers=1), seed=0)
        >>> name, values = next(stream_weights([model], dtype=torch.bfloat16))
        >>> name, values.shape, values.dtype
        ('model.embed_tokens.weight', torch.Size([272, 128]), torch.bfloat16)
    """
    if not all(isinstance(stage, Decoder) for stage in stages):
        kinds = ", ".join(type(stage).__name__ for stage in stages)
        raise ConfigError(f"stream_weights: it takes the stages of a Decoder, got {kinds}")
    config: DecoderConfig = stages[0].config  # type: ignore[assignment]
    links, shapes = family_links(family, config)
    read = linked(_gathered(stages, config, dtype=dtype, axis=axis), links, shapes)
    for name, shape in shapes.items():
        yield name, read(name, shape, (0,) * len(shape)).clone()


def _gathered(
    stages: Sequence[nn.Module], config: DecoderConfig, *, dtype: torch.dtype | None, axis: Axis
) -> Weights:
    """Return what reads tensors of ours that the ranks gather; the last one is remembered."""
    own = {get_parameter_name(name): x for name, x in model_tensors(stages).items()}
    cast = dict.fromkeys(parameter_shapes(config), dtype)
    kinds = {name: cast.get(name) or x.dtype for name, x in own.items()}
    held = all_gather_objects(
        {name: str(kind).removeprefix("torch.") for name, kind in kinds.items()}, axis
    )
    shapes, device, kept = our_shapes(config), compute_device(stages[0]), dict[str, Tensor]()
    if lost := [name for name in shapes if not any(name in names for names in held)]:
        raise ConfigError(
            f"stream_weights: the stages do not hold {shorten(lost)}, which the decoder has; "
            "merge adapters into it first",
            where="stages",
            got=lost,
        )

    def gather(name: str) -> Tensor:
        source = next(rank for rank, names in enumerate(held) if name in names)
        if axis.index == source:
            x: Any = own[name].to(kinds[name])
            whole = x.full_tensor() if hasattr(x, "full_tensor") else x
        else:
            whole = torch.empty(
                shapes[name], dtype=getattr(torch, held[source][name]), device=device
            )
        return broadcast(whole.contiguous(), axis, source=source)

    def read(name: str, shape: Sequence[int], offset: Sequence[int]) -> Tensor:
        if name not in kept:
            kept.clear()
            kept[name] = gather(name)
        return kept[name][tuple(slice(a, a + n) for a, n in zip(offset, shape, strict=True))]

    return read


def _family(family: Family | str | None, config: DecoderConfig) -> Family:
    known = match_family(config) if family is None else family
    return known if isinstance(known, Family) else family_named(known, where="family")


def family_links(
    family: Family | str | None, config: DecoderConfig
) -> tuple[list[Link], dict[str, tuple[int, ...]]]:
    """Return the links from a family's tensors to ours, and the shapes of theirs.

    Args:
        family: The family, or its `model_type`; by default the first that computes the decoder.
        config: The decoder.

    Raises:
        ConfigError: No family computes it, or there is none of that name.

    Examples:
        >>> from trainkit.models.decoder_sizes import make_decoder_config
        >>> family_links("llama", make_decoder_config("tiny"))[1]["model.norm.weight"]
        (128,)
    """
    links = links_of(_family(family, config), config)
    return [link.turned() for link in links], their_shapes(links)


def _saved(path: Path, shapes: Mapping[str, Sequence[int]]) -> dict[str, Stored]:
    """Describe the tensors of a decoder that a checkpoint holds; refuse what it does not."""
    held = read_model_tensors(path)
    found = {name: held[name] for name in shapes if name in held}
    wrong = [
        f"{name} of shape {tuple(shape)}"
        for name, shape in shapes.items()
        if name not in found or found[name].shape != tuple(shape)
    ]
    if wrong:
        raise CheckpointError(
            f"export_folder: {path} is of the decoder that its facts describe, but does not hold "
            f"{shorten(wrong)}",
            where=path,
            got=wrong,
        )
    return found


def _given(read: Weights, shapes: Mapping[str, Sequence[int]]) -> dict[str, Stored]:
    """Describe tensors that a function gives."""
    kinds = {name: read(name, (1,) * len(x), (0,) * len(x)).dtype for name, x in shapes.items()}
    return {
        name: Stored(str(kind).removeprefix("torch."), tuple(shapes[name]), ())
        for name, kind in kinds.items()
    }


def _kinds(links: Sequence[Link], kinds: Mapping[str, str]) -> dict[str, str]:
    """Return the dtype of each tensor there: that of ours which it is made of."""
    found: dict[str, torch.dtype] = {}
    for link in links:
        own = getattr(torch, kinds[link.theirs.name])
        found[link.ours.name] = torch.promote_types(own, found.get(link.ours.name, own))
    return {name: str(kind).removeprefix("torch.") for name, kind in found.items()}
