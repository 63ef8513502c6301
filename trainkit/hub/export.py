"""A checkpoint of any layout as a Hugging Face folder, written by as many ranks as there are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
import torch

from trainkit.checkpoint.boxes import shortened
from trainkit.checkpoint.export import SHARD_BYTES, origin_of, write_weights
from trainkit.checkpoint.load import read_facts
from trainkit.checkpoint.manifest import find_checkpoint
from trainkit.checkpoint.reading import reader
from trainkit.checkpoint.sources import checkpoint_tensors
from trainkit.checkpoint.stored import Stored
from trainkit.collectives import together
from trainkit.hub.configs import family_named, family_of, write_config
from trainkit.hub.families import Family
from trainkit.hub.folder import CONFIG, links_of, our_shapes
from trainkit.hub.links import Link, linked, their_shapes
from trainkit.models.config import parameter_shapes
from trainkit.models.sizes import config_from_facts
from trainkit.types import SOLO, Axis, CheckpointError, Weights

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
            (`tokenizer_files`); the ids of `generation_config.json` go into `config.json` too.
        dtype: What parameters become, "bfloat16" for instance; None keeps them. The biases of
            routers stay what they are.
        shard_bytes: The most bytes of a file of tensors, unless a single one is larger.
        overwrite: Replace a folder that an earlier export wrote.
        read: Gives our tensors in place of the checkpoint, `adapters.merged_weights` for instance.
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
        >>> from trainkit.checkpoint import save_checkpoint
        >>> from trainkit.hub import open_folder
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
    said = together(lambda: str(find_checkpoint(checkpoint)) if axis.index == 0 else None, axis)[0]
    path = Path(said)
    config = config_from_facts(read_facts(path, needs=["model"])["model"])
    known = family_of(config) if family is None else family
    known = known if isinstance(known, Family) else family_named(known, where="family")
    values = write_config(config, context=context, family=known)
    links = [link.turned() for link in links_of(known, config)]
    ours = _saved(path, our_shapes(config)) if read is None else _given(read, our_shapes(config))
    cast = {name: dtype or ours[name].dtype for name in parameter_shapes(config)}
    kinds = _kinds(links, {name: x.dtype for name, x in ours.items()} | cast)
    shapes = their_shapes([link.turned() for link in links])
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
        origin=origin_of(path),
        read=linked(read or reader(ours), links, shapes),
        beside=beside,
        axis=axis,
    )


def _saved(path: Path, shapes: Mapping[str, Sequence[int]]) -> dict[str, Stored]:
    """Describe the tensors of a decoder that a checkpoint holds; refuse what it does not."""
    held = checkpoint_tensors(path)
    found = {name: held[f"model/{name}"] for name in shapes if f"model/{name}" in held}
    wrong = [
        f"{name} of shape {tuple(shape)}"
        for name, shape in shapes.items()
        if name not in found or found[name].shape != tuple(shape)
    ]
    if wrong:
        raise CheckpointError(
            f"export_folder: {path} is of the decoder that its facts describe, but does not hold "
            f"{shortened(wrong)}",
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
