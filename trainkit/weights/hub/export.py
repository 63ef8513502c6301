"""Export a decoder of any layout, as a Hugging Face folder or as a stream of tensors."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
import torch
from torch import Tensor, nn

from trainkit.collectives import all_gather_objects, broadcast, run_on_all_ranks
from trainkit.models.config import DecoderConfig, parameter_shapes
from trainkit.models.decoder import Decoder
from trainkit.models.decoder_sizes import config_from_facts
from trainkit.parallel.materialize import narrow_to_box
from trainkit.parallel.stage_forward import compute_device
from trainkit.types import SOLO, Axis, CheckpointError, ConfigError, Weights
from trainkit.weights.checkpoint.boxes import get_dtype_name, get_parameter_name, shorten
from trainkit.weights.checkpoint.export import SHARD_BYTES, describe_origin, write_weights
from trainkit.weights.checkpoint.initial_weights import TOWER
from trainkit.weights.checkpoint.load import read_facts
from trainkit.weights.checkpoint.manifest import find_checkpoint
from trainkit.weights.checkpoint.reading import make_weights_reader
from trainkit.weights.checkpoint.run_state import model_tensors
from trainkit.weights.checkpoint.safe_files import read_bounded
from trainkit.weights.checkpoint.sources import read_model_tensors
from trainkit.weights.checkpoint.tensor_files import Stored
from trainkit.weights.hub.configs import (
    TEXT,
    find_differences,
    get_family,
    match_family,
    write_decoder_config,
)
from trainkit.weights.hub.families import Family
from trainkit.weights.hub.folder import (
    CONFIG,
    HFFolder,
    find_outside_tensors,
    get_decoder_shapes,
    is_hf_folder,
    list_names,
    make_family_links,
    open_folder,
)
from trainkit.weights.hub.links import Link, get_foreign_shapes, map_weights

_MAX_BYTES = 1 << 27  # of a file with settings
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def export_folder(
    checkpoint: Path | str,
    folder: Path | str,
    *,
    context: int,
    family: Family | str | None = None,
    base: Path | str | None = None,
    files: Mapping[str, bytes] | None = None,
    dtype: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    overwrite: bool = False,
    read: Weights | None = None,
    axis: Axis = SOLO,
) -> dict[str, Any]:
    """Write a checkpoint as a folder that `AutoModelForCausalLM.from_pretrained` loads.

    Args:
        checkpoint: A checkpoint of a decoder, written by any layout; or a run directory, for the
            newest one that verifies.
        folder: The new folder; it appears by one rename when it is complete.
        context: The maximum number of tokens in a row: `max_position_embeddings`.
        family: The family or its `model_type`; by default the first that computes the same. For a
            decoder that came from a multimodal folder, its own family writes the decoder alone.
        base: The multimodal folder whose text tower the decoder is. Its other tensors are copied
            bit for bit, and so are the settings of its processors. By default the one that the run
            started from (`trained.make_tower_facts`).
        files: Further files of the folder, such as those of a tokenizer (`make_tokenizer_files`);
            the ids of `generation_config.json` are also written to `config.json`.
        dtype: The dtype of parameters, such as "bfloat16"; None does not change it. The biases of
            routers are never converted.
        shard_bytes: The maximum size of a file of tensors, unless a single tensor is larger.
        overwrite: Replace a folder that an earlier export wrote.
        read: Reads our tensors in place of the checkpoint, such as `adapters.export.merge_weights`.
        axis: The ranks that call this together, on one disk: each writes some of the files.

    Returns:
        {"folder", "files", "tensors", "bytes", "from"}.

    Raises:
        CheckpointError: The checkpoint does not verify, or is not of a decoder.
        ConfigError: No family computes the decoder, the folder exists already, or the multimodal
            folder is gone, quantized, or of another decoder.
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
    # One rank verifies for all: hashing a checkpoint takes minutes.
    paths = run_on_all_ranks(
        lambda: str(find_checkpoint(checkpoint)) if axis.index == 0 else None, axis
    )
    path = Path(paths[0])
    facts = read_facts(path, needs=["model"])
    config = config_from_facts(facts["model"])
    whole = _open_whole(base or facts.get(TOWER), family, config, path)
    family = whole.family if whole else _choose_family(family, config)
    # As in the multimodal folder: with a matrix of each expert, or all experts in one tensor.
    links, shapes = make_export_links(family, config, present=list_names(whole) if whole else ())
    our_shapes = get_decoder_shapes(config)
    if read is None:
        stored = _find_stored(path, our_shapes)
        read = make_weights_reader(stored)
        dtypes = {name: tensor.dtype for name, tensor in stored.items()}
    else:
        # A `Weights` function does not show its dtypes, so one element of each tensor is read.
        dtypes = {}
        for name, shape in our_shapes.items():
            element = read(name, (1,) * len(shape), (0,) * len(shape))
            dtypes[name] = get_dtype_name(element.dtype)
    if dtype is not None:  # not for the biases of routers, which are no parameters
        dtypes |= dict.fromkeys(parameter_shapes(config), dtype)
    their_dtypes = _find_dtypes(links, dtypes)
    # `from_pretrained` makes the model in this dtype.
    model_dtype = their_dtypes[family.names(config)["embedding.weight"].name]
    extra_files = dict(files or {})
    # Without them, a class of transformers would use defaults of its own.
    ids = orjson.loads(extra_files.get("generation_config.json", b"{}"))
    tensors = {name: Stored(their_dtypes[name], shape, ()) for name, shape in shapes.items()}
    read_theirs = map_weights(read, links, shapes)
    if whole:
        values = _update_config(whole, config, context=context, dtype=model_dtype)
        values |= {key: ids[key] for key in _IDS if key in values and ids.get(key) is not None}
        tensors, read_theirs = _add_outside_tensors(whole, tensors, read_theirs)
        # What `transformers` reads about images and sound.
        for file in sorted(whole.path.glob("*processor*.json")):
            extra_files.setdefault(file.name, bytes(read_bounded(file, _MAX_BYTES, shared=True)))
    else:
        values = write_decoder_config(config, context=context, family=family)
        values["torch_dtype"] = model_dtype
        values |= {key: ids.get(key) for key in _IDS}
    extra_files[CONFIG] = orjson.dumps(values, option=orjson.OPT_INDENT_2)
    return write_weights(
        tensors,
        folder,
        shard_bytes=shard_bytes,
        overwrite=overwrite,
        origin=describe_origin(path),
        read=read_theirs,
        extra_files=extra_files,
        axis=axis,
    )


def _open_whole(
    base: Path | str | None, family: Family | str | None, config: DecoderConfig, run: Path
) -> HFFolder | None:
    """Return the multimodal folder to write the decoder into; None to write the decoder alone."""
    if family is not None and _choose_family(family, config).tower is None:
        return None
    if base is None:
        return None
    alone = "or write the decoder alone: --family and its model_type, such as gemma3_text"
    if not is_hf_folder(base):
        raise ConfigError(
            f"export_folder: the decoder of {run} is the text tower of a multimodal model, whose "
            f"other tensors are copied from {base}, which is gone",
            where="base",
            got=str(base),
            hint=f"name where the folder is now: --base; {alone}",
        )
    whole = open_folder(base)
    if whole.family.tower is None:
        raise ConfigError(
            f"export_folder: base is {base}, of a {whole.family.model_type}, and no multimodal "
            "model",
            where="base",
            got=whole.family.model_type,
            hint="leave it out",
        )
    different = find_differences(config, whole.config)
    # A vocabulary may have got more rows (`resize_weights`).
    different.pop("vocab_size", None)
    different.pop("dropout", None)
    if different:
        raise ConfigError(
            f"export_folder: the text tower of {base} is another decoder than that of {run}: its "
            f"{', '.join(f'{k} is {x}' for k, x in different.items())}",
            where="base",
            got=different,
            hint=f"name the folder that the run started from: --base; {alone}",
        )
    if whole.values.get("quantization_config") is not None:
        raise ConfigError(
            f"export_folder: {base} is quantized, and the trained tower is not: they cannot be in "
            "one folder",
            where="base",
            hint=f"name the folder of the same model that is not quantized: --base; {alone}",
        )
    return whole


def _update_config(
    whole: HFFolder, config: DecoderConfig, *, context: int, dtype: str
) -> dict[str, Any]:
    """Return the config.json of a multimodal folder, with what has changed of its text tower."""
    text = dict(whole.values[TEXT])
    if config.vocab_size != whole.config.vocab_size:
        text["vocab_size"] = config.vocab_size
    if context != whole.full_context:
        text["max_position_embeddings"] = context
    values = {**whole.values, TEXT: text}
    for table in (values, text):
        table |= {key: dtype for key in ("dtype", "torch_dtype") if key in table}
    return values if "dtype" in values else values | {"torch_dtype": dtype}


def _add_outside_tensors(
    whole: HFFolder, tensors: Mapping[str, Stored], read: Weights
) -> tuple[dict[str, Stored], Weights]:
    """Return the tensors of a multimodal folder by its names, and a function that reads them."""
    shapes = {name: stored.shape for name, stored in tensors.items()}
    names, outside = find_outside_tensors(whole, shapes)
    read_outside = make_weights_reader(outside)
    families_name = {theirs: name for name, theirs in names.items()}

    def read_any(name: str, shape: Sequence[int], offset: Sequence[int]) -> Tensor:
        if name in outside:
            return read_outside(name, shape, offset)
        return read(families_name[name], shape, offset)

    return {**{names[name]: x for name, x in tensors.items()}, **outside}, read_any


def stream_weights(
    stages: Sequence[nn.Module],
    *,
    family: Family | str | None = None,
    dtype: torch.dtype | None = None,
    axis: Axis = SOLO,
) -> Iterator[tuple[str, Tensor]]:
    """Yield the current full tensors of a decoder, as `export_folder` would write them.

    For an inference engine that takes new weights while it runs. One of our tensors is gathered at
    a time, so this needs the memory of a few tensors.

    Args:
        stages: This rank's stages of a `Decoder`, in any layout.
        family: The family for the names, or its `model_type`; by default the first that computes
            the same.
        dtype: The dtype of parameters, converted before they are sent; None does not change it.
            The biases of routers are never converted.
        axis: The pipeline axis, `ps.pp`.

    Yields:
        The name of a tensor in the folder, and a copy of its values, on every rank.

    Raises:
        ConfigError: The stages are of no decoder, or lack some of its parameters (merge adapters
            first); or no family computes it.

    Effects:
        Communicates on `axis` and on all axes that parameters are sharded over: every rank must
        iterate over all tensors, and must not train meanwhile.

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
    links, shapes = make_export_links(family, config)
    gather = _make_gather(stages, config, dtype=dtype, axis=axis)
    read = map_weights(gather, links, shapes)
    # A copy of each, as `read` returns views of what it has gathered.
    for name, shape in shapes.items():
        yield name, read(name, shape, (0,) * len(shape)).clone()


def _make_gather(
    stages: Sequence[nn.Module], config: DecoderConfig, *, dtype: torch.dtype | None, axis: Axis
) -> Weights:
    """Return a collective `Weights` function of our tensors; it caches the last full tensor."""
    local = {get_parameter_name(name): x for name, x in model_tensors(stages).items()}
    dtypes = {name: x.dtype for name, x in local.items()}
    if dtype is not None:
        # Without the biases of routers, which are buffers.
        dtypes |= {name: dtype for name in parameter_shapes(config) if name in local}
    by_rank = all_gather_objects(
        {name: get_dtype_name(dtype) for name, dtype in dtypes.items()}, axis
    )
    shapes = get_decoder_shapes(config)
    device = compute_device(stages[0])
    if missing := [name for name in shapes if not any(name in names for names in by_rank)]:
        raise ConfigError(
            f"stream_weights: the stages lack {shorten(missing)} of the decoder; merge adapters "
            "into it first",
            where="stages",
            got=missing,
        )

    def gather(name: str) -> Tensor:
        # A tied embedding is on the first and on the last stage: every rank must choose the same.
        source = next(rank for rank, names in enumerate(by_rank) if name in names)
        if axis.index == source:
            # Cast first: half the bytes travel where a float32 shard is sent as bfloat16.
            x: Any = local[name].to(dtypes[name])
            full = x.full_tensor() if hasattr(x, "full_tensor") else x
        else:
            full = torch.empty(
                shapes[name], dtype=getattr(torch, by_rank[source][name]), device=device
            )
        return broadcast(full.contiguous(), axis, source=source)

    # A tensor may be read as many boxes in a row, one for each expert for instance. Gathering is
    # collective: all ranks read the same boxes in the same order, and so miss the cache together.
    cache: dict[str, Tensor] = {}

    def read(name: str, shape: Sequence[int], offset: Sequence[int]) -> Tensor:
        if name not in cache:
            cache.clear()
            cache[name] = gather(name)
        return narrow_to_box(cache[name], shape, offset)

    return read


def _choose_family(family: Family | str | None, config: DecoderConfig) -> Family:
    if family is None:
        return match_family(config)
    return family if isinstance(family, Family) else get_family(family, where="family")


def make_export_links(
    family: Family | str | None, config: DecoderConfig, *, present: Collection[str] = ()
) -> tuple[list[Link], dict[str, tuple[int, ...]]]:
    """Return the links from a family's tensors to ours, and the shapes of a family's tensors.

    Args:
        family: The family, or its `model_type`; by default the first that computes the decoder.
        config: The decoder.
        present: As in `make_family_links`.

    Raises:
        ConfigError: No family computes it, or there is no such family.

    Examples:
        >>> from trainkit.models.decoder_sizes import make_decoder_config
        >>> make_export_links("llama", make_decoder_config("tiny"))[1]["model.norm.weight"]
        (128,)
    """
    links = make_family_links(_choose_family(family, config), config, present=present)
    # Swapped, because `map_weights` reads the left side of links by means of the right one.
    return [link.swap_sides() for link in links], get_foreign_shapes(links)


def _find_stored(path: Path, shapes: Mapping[str, Sequence[int]]) -> dict[str, Stored]:
    """Return the tensors of a decoder in a checkpoint; raise CheckpointError if any is missing."""
    stored = read_model_tensors(path)
    problems = [
        f"{name} of shape {tuple(shape)}"
        for name, shape in shapes.items()
        if name not in stored or stored[name].shape != tuple(shape)
    ]
    if problems:
        raise CheckpointError(
            f"export_folder: {path} lacks {shorten(problems)} of the decoder that its facts "
            "describe",
            where=path,
            got=problems,
        )
    return {name: stored[name] for name in shapes}


def _find_dtypes(links: Sequence[Link], dtypes: Mapping[str, str]) -> dict[str, str]:
    """Return the dtype of each of their tensors, promoted over ours that it is made of."""
    promoted: dict[str, torch.dtype] = {}
    for link in links:
        name = link.ours.name
        dtype = getattr(torch, dtypes[link.theirs.name])
        promoted[name] = torch.promote_types(dtype, promoted.get(name, dtype))
    return {name: get_dtype_name(dtype) for name, dtype in promoted.items()}
