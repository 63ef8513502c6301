"""Read a Hugging Face folder: checked completely before any tensor is read, then box by box.

Nothing outside of the folder is read, nothing in it is run, and no memory is allocated for sizes
that a file states but could not contain.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import attrs
import torch
from torch import Tensor, nn

from trainkit.collectives import run_on_all_ranks
from trainkit.models.config import DecoderConfig, parameter_shapes
from trainkit.models.decoder_sizes import pad_vocab_size
from trainkit.parallel.materialize import attach_shapes
from trainkit.parallel.name_patterns import match_any
from trainkit.parallel.parameters import COPY_SUFFIX, get_local_box
from trainkit.types import SOLO, Axis, CheckpointError, ConfigError, Weights, log_warning
from trainkit.weights.checkpoint.boxes import FLOATS, get_parameter_name, shorten
from trainkit.weights.checkpoint.bucket_runs import fetch_model
from trainkit.weights.checkpoint.manifest import MANIFEST
from trainkit.weights.checkpoint.reading import make_weights_reader
from trainkit.weights.checkpoint.run_state import model_tensors
from trainkit.weights.checkpoint.safe_files import read_bounded, refusal
from trainkit.weights.checkpoint.sources import INDEX
from trainkit.weights.checkpoint.tensor_files import Stored, parse_untrusted_table, safetensors_file
from trainkit.weights.convert.foreign import describe_safetensors_folder
from trainkit.weights.hub.configs import get_family, get_text_values, read_decoder_config
from trainkit.weights.hub.families import FAMILIES, Family
from trainkit.weights.hub.links import (
    HFTensor,
    Link,
    check_links,
    get_foreign_shapes,
    make_links,
    map_weights,
)
from trainkit.weights.hub.quantized import QuantizedTensor, dequantize_weights, find_quantized
from trainkit.weights.hub.resize import resize_weights
from trainkit.weights.hub.towers import rename_tower

CONFIG = "config.json"
_MAX_CONFIG_BYTES = 4 * 1024 * 1024  # some files list thousands of labels
_ROWS_PER_READ = 4096


T = TypeVar("T")


@attrs.frozen(eq=False)
class HFFolder:
    """The `config.json` of a Hugging Face folder.

    Attributes:
        path: The folder.
        family: Its family.
        config: The decoder that it describes.
        values: The content of its `config.json`.
        context: The maximum number of tokens in a row here.
        full_context: The maximum number of tokens of the model: `max_position_embeddings`.
    """

    path: Path
    family: Family
    config: DecoderConfig
    values: Mapping[str, Any]
    context: int
    full_context: int


def is_hf_folder(path: Path | str) -> bool:
    """Return whether a path is a folder with a `config.json`, which no run has.

    Examples:
        >>> is_hf_folder("/does/not/exist")
        False
    """
    return (Path(path) / CONFIG).is_file()


def check_model_path(path: Path | str, *, function: str) -> None:
    """Raise CheckpointError if there is no model at a path.

    Args:
        path: A run, a checkpoint or a Hugging Face folder.
        function: The name of the caller, for the message.

    Raises:
        CheckpointError: There is no such folder (the path may be the name of a model on the hub),
            or it has neither a `config.json` nor a checkpoint.

    Examples:
        >>> check_model_path("google/gemma-3-1b-it", function="open_folder")
        Traceback (most recent call last):
        ...
        trainkit.types.CheckpointError: open_folder: there is no folder google/gemma-3-1b-it; a ...
    """
    path = Path(path)
    if not path.exists():
        # "google/gemma-3-1b-it" looks like a path, and is what other libraries accept.
        name = str(path) if len(path.parts) == 2 and not path.is_absolute() else "NAME"
        raise CheckpointError(
            f"{function}: there is no folder {path}; a model of the Hugging Face hub is downloaded "
            f"first, and its folder named: hf download {name} --local-dir DIR",
            where=path,
        )
    files = [path / CONFIG, path / MANIFEST, path / "checkpoints"]
    # A dangling link counts as there: what reads it says why it cannot be used.
    if not any(file.exists() or file.is_symlink() for file in files):
        raise CheckpointError(
            f"{function}: {path} has no config.json, as a Hugging Face folder has, and no "
            "checkpoints, as a run has",
            where=path,
            hint="name a run that has saved, one of its checkpoints, or a folder that was "
            "downloaded whole: hf download NAME --local-dir DIR",
        )


def open_folder(
    path: Path | str, *, families: Sequence[Family] = FAMILIES, context: int | None = None
) -> HFFolder:
    """Read the `config.json` of a Hugging Face folder; its tensors are not read.

    Args:
        path: The folder. The snapshots of a hub's cache contain links to files elsewhere, which are
            not followed: download into a separate folder.
        families: The families to consider, for example one of your own; see `Family`.
        context: The maximum number of tokens in a row; by default that of `config.json`. A model
            with rotary factors for short and for long texts (Phi 3 and 4) uses those for this
            length, whatever the length of a text; by default the short ones, and at most their
            length (`models.LongRopeScaling`).

    Raises:
        ConfigError: trainkit does not support the model; all problems of its `config.json` are
            named.
        CheckpointError: There is no folder; its `config.json` is missing, no plain file or no valid
            JSON; or a file of the folder is a link.

    Examples:
        >>> open_folder("/does/not/exist")
        Traceback (most recent call last):
        ...
        trainkit.types.CheckpointError: open_folder: there is no folder /does/not/exist; a model...
    """
    check_model_path(path, function="open_folder")
    file = Path(path) / CONFIG
    # Before anything is read: a link may lead out of the folder, and its target may be exchanged.
    links = [
        each.name
        for each in (*file.parent.glob("*.json"), *file.parent.glob("*.safetensors"))
        if each.is_symlink()
    ]
    if links:
        raise CheckpointError(
            f"open_folder: {path}: {shorten(sorted(links))} are links, which are not followed",
            where=path,
            got=links,
            hint="a hub's cache is made of links: download with --local-dir, or copy with cp -rL",
        )
    values = parse_untrusted_table(read_bounded(file, _MAX_CONFIG_BYTES, shared=True), file)
    config = read_decoder_config(values, where=str(file), families=families, context=context)
    family = get_family(values["model_type"], where=str(file), families=families)
    # Without the key: the default of `transformers` for the family, or for Llama.
    full_context = get_text_values(values, family, []).get(
        "max_position_embeddings",
        family.defaults.get("max_position_embeddings", config.max_length or 2048),
    )
    if type(full_context) is not int:
        raise ConfigError(f"{file}: max_position_embeddings is no number", where=str(file))
    return HFFolder(
        path=Path(path),
        family=family,
        config=config,
        values=values,
        # The short factors of LongRoPE hold for texts up to their length, `reach`.
        context=context or min(full_context, config.max_length or full_context),
        full_context=full_context,
    )


def read_init_config(
    path: Path | str,
    *,
    vocab_size: int,
    experts: bool = False,
    resize: bool = False,
    context: int | None = None,
) -> DecoderConfig:
    """Return the decoder of a Hugging Face folder that a run starts from.

    Args:
        path: The folder.
        vocab_size: The number of ids of the run's tokenizer; each needs a row of the embedding.
        experts: Whether the recipe trains experts.
        resize: Whether an embedding that is too small gets more rows, a multiple of 16, which
            `load_folder_weights(vocab_size=)` fills.
        context: As in `open_folder`.

    Raises:
        ConfigError: It is a run; the embedding is too small, and `resize` is false; it has experts
            and the recipe trains none, or the reverse; or as `open_folder`.
        CheckpointError: As `open_folder`; or the shapes of its tensors differ from its config.json.

    Examples:
        >>> read_init_config("/does/not/exist", vocab_size=259)
        Traceback (most recent call last):
        ...
        trainkit.types.CheckpointError: open_folder: there is no folder /does/not/exist; a model...
    """
    path = fetch_model(path)
    if (path / "checkpoints").is_dir() and not is_hf_folder(path):
        raise ConfigError(
            f"--init: {path} is a run, not a Hugging Face folder",
            hint=f"python -m trainkit export {path} FOLDER makes one of it",
        )
    folder = open_folder(path, context=context)
    _check_shapes(folder)
    config = folder.config
    # The other way round is usual: many embeddings have more rows than their tokenizer has ids.
    if vocab_size > config.vocab_size and resize:
        config = attrs.evolve(config, vocab_size=pad_vocab_size(vocab_size))
    if vocab_size > config.vocab_size:
        raise ConfigError(
            f"--init: the tokenizer has {vocab_size} ids, and the embedding of {path} has "
            f"{config.vocab_size} rows",
            where="tokenizer",
            got=vocab_size,
            want=config.vocab_size,
            hint="take the folder's own tokenizer, or another with no more ids; or give the "
            "embedding more rows: read_init_config(resize=True), load_folder_weights(vocab_size=)",
        )
    if (config.experts is not None) != experts:
        raise ConfigError(
            f"--init: {path} has experts, and this recipe trains decoders without"
            if config.experts
            else f"--init: {path} has no experts, and this recipe trains decoders with",
            where="init",
            got=0 if config.experts is None else config.experts.count,
            hint='the recipe moe trains experts; the page "Train experts" has what they need',
        )
    return config


def _check_shapes(folder: HFFolder) -> None:
    """Raise if sizes of the config.json differ from those of the tensors, before a model is made.

    A model of the sizes of a wrong config.json might not fit into memory.
    """
    try:
        stored = add_model_prefix(_describe_files(folder.path), folder.family, folder.config)
    except CheckpointError:  # `load_folder_weights` reports problems with the files
        return
    links = make_family_links(folder.family, folder.config, present=stored)
    expected = get_foreign_shapes(links)
    _, tensors, _ = find_quantized(stored, expected, folder.values.get("quantization_config"))
    problems = [
        f"{name} is {tuple(tensors[name].shape)}, and would be {shape}"
        for name, shape in expected.items()
        if name in tensors and tuple(tensors[name].shape) != shape
    ]
    if problems:
        raise CheckpointError(
            f"read_init_config: {folder.path} has tensors whose sizes differ from config.json: "
            f"{shorten(problems)}",
            where=folder.path,
            got=problems,
        )


def get_decoder_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors of a decoder in a folder: parameters and buffers.

    Examples:
        >>> config = DecoderConfig(
        ...     vocab_size=64, width=16, layers=1, heads=2, kv_heads=2, mlp_width=32
        ... )
        >>> get_decoder_shapes(config) == parameter_shapes(config)
        True
    """
    shapes = parameter_shapes(config)
    experts = config.experts
    # A buffer and no parameter: it is adjusted by the load of the experts, not by a gradient.
    if experts is not None and experts.biased:
        shapes |= {f"layers.{i}.mlp.router.bias": (experts.count,) for i in config.expert_layers}
    if config.layer_scales:
        shapes |= {f"layers.{i}.layer_scale": (1,) for i in range(config.layers)}
    return shapes


def make_family_links(
    family: Family, config: DecoderConfig, *, present: Collection[str] = ()
) -> list[Link]:
    """Return the links between a decoder's tensors and those of a family's folder.

    Args:
        family: The family.
        config: The decoder.
        present: The names of the tensors that there are. A folder has a matrix of each expert, or
            as `transformers` in memory one tensor of all experts of a layer, with `gate` above
            `up`; without names it is taken to have the first.

    Raises:
        ConfigError: The family has no name for a tensor, or its links do not cover all elements.

    Examples:
        >>> config = DecoderConfig(
        ...     vocab_size=64, width=16, layers=1, heads=2, kv_heads=2, mlp_width=32
        ... )
        >>> links = make_family_links(get_family("phi3"), config)
        >>> get_foreign_shapes(links)["model.layers.0.mlp.gate_up_proj.weight"]
        (64, 16)
    """
    table: dict[str, HFTensor] = {}
    shapes = get_decoder_shapes(config)
    for name, there in family.names(config).items():
        # For every layer, whether it has the tensor or not: links follow from `shapes`.
        layers = range(config.layers) if "{i}" in name else range(1)
        for i in layers:
            theirs = attrs.evolve(there, name=there.name.replace("{i}", str(i)))
            packed = _pack_experts(theirs)
            table[name.replace("{i}", str(i))] = packed if packed.name in present else theirs
    # By the names that `HFTensor.interleaved` may have.
    heads = {name: getattr(config, name) for name in ("head_size", "rotary_size")}
    links = make_links(table, shapes, heads=heads, rotary=config.rotary_size)
    check_links(links, shapes)
    return links


def _pack_experts(there: HFTensor) -> HFTensor:
    """Return the place of a matrix of each expert where those of all experts are one tensor."""
    layer, _, matrix = there.name.partition(".{e}.")
    packed = {"gate": "gate_up", "up": "gate_up", "down": "down"}.get(matrix.partition("_")[0], "")
    return attrs.evolve(there, name=f"{layer}.{packed}_proj", fused=True, rows=1)


# ----------------------------------------------------------------------------------------- weights


def open_folder_weights(
    folder: HFFolder,
    *,
    allow_missing: Sequence[str] = (),
    allow_extra: Sequence[str] = (),
    missing: Weights | None = None,
    dtype: torch.dtype | None = None,
    axis: Axis = SOLO,
) -> Weights:
    """Return the weights of a Hugging Face folder as a function of our names and boxes.

    `build_stages(..., weights=open_folder_weights(open_folder(path), axis=ps.world))` fills the
    shards of every rank from it, in any layout; a rank reads only its own shards. The folder must
    be complete, with the shapes of its `config.json`, in floating point. Matrices that are
    quantized, by one of `quantized.METHODS`, are dequantized to fp32.

    Args:
        folder: The folder.
        allow_missing: Patterns of their names that the folder may lack, with `*` for any
            characters; the tensors made of them come from `missing`.
        allow_extra: Patterns of their names to ignore.
        missing: A function for our tensors that the folder lacks, such as `init_weights`.
        dtype: The dtype of the values; None keeps that of the files.
        axis: The ranks that call this together: if one cannot read the folder, all raise.

    Returns:
        A `Weights` function, which does not communicate.

    Raises:
        CheckpointError: A file is invalid, or the tensors are not those of the model: all that are
            missing, extra, of another shape or not in floating point are named.

    Effects:
        Reads the headers of the files; communicates on `axis`; one rank warns that what was
        quantized is stored dequantized (`log_warning`).

    Examples:
        >>> import json, tempfile
        >>> from safetensors.torch import save_file
        >>> from trainkit.weights.hub.configs import match_family, write_decoder_config
        >>> config = DecoderConfig(
        ...     vocab_size=8, width=4, layers=1, heads=1, kv_heads=1, mlp_width=4
        ... )
        >>> shapes = get_foreign_shapes(make_family_links(match_family(config), config))
        >>> with tempfile.TemporaryDirectory() as home:
        ...     text = json.dumps(write_decoder_config(config, context=64))
        ...     _ = (Path(home) / "config.json").write_text(text)
        ...     ones = {name: torch.ones(shape) for name, shape in shapes.items()}
        ...     save_file(ones, f"{home}/model.safetensors")
        ...     open_folder_weights(open_folder(home))("norm.weight", (2,), (1,))
        tensor([1., 1.])
    """
    read, absent = _check_folder(folder, allow_missing, allow_extra, axis)
    if absent and missing is None:
        raise ConfigError(
            f"open_folder_weights: {folder.path} lacks tensors for {shorten(sorted(absent))}; "
            "give missing=, for example init_weights",
            where="missing",
        )

    def read_or_fill(name: str, shape: Sequence[int], offset: Sequence[int]) -> Tensor:
        source = missing if missing is not None and name in absent else read
        values = source(name, shape, offset)
        return values if dtype is None else values.to(dtype)

    # With their shapes `build_stages` checks that the model takes every tensor of the folder.
    return attach_shapes(read_or_fill, get_decoder_shapes(folder.config))


def load_folder_weights(
    path: Path | str,
    stages: Sequence[nn.Module],
    *,
    vocab_size: int | None = None,
    allow_missing: Sequence[str] = (),
    allow_extra: Sequence[str] = (),
    axis: Axis = SOLO,
) -> None:
    """Read a Hugging Face folder into existing stages, as `checkpoint.load_weights` does.

    Args:
        path: The folder.
        stages: This rank's stages of the decoder that it describes.
        vocab_size: The rows of their embedding, if it has more than the folder's: `resize_weights`
            makes the new ones.
        allow_missing: Patterns of their names that the folder may lack; our tensors made of them
            do not change.
        allow_extra: Patterns of their names to ignore.
        axis: The ranks that call this together, `ps.world`.

    Raises:
        ConfigError: As `open_folder`.
        CheckpointError: As `open_folder_weights`; or the stages have another decoder, or a
            vocabulary other than `vocab_size`.

    Effects:
        Writes the parameters of `stages` and the biases of their routers, after the whole folder
        has been checked; communicates on `axis`.

    Examples:
        >>> load_folder_weights("/does/not/exist", [])
        Traceback (most recent call last):
        ...
        trainkit.types.CheckpointError: open_folder: there is no folder /does/not/exist; a model...
    """
    folder = open_folder(path)
    read, absent = _check_folder(folder, allow_missing, allow_extra, axis)
    config = attrs.evolve(folder.config, vocab_size=vocab_size or folder.config.vocab_size)
    read = resize_weights(read, folder.config, vocab_size=config.vocab_size)
    shapes = get_decoder_shapes(config)
    tensors: list[tuple[str, Tensor]] = []
    problems = []
    # All stages are compared before the first tensor is written.
    for full_name, tensor in model_tensors(stages).items():
        name = get_parameter_name(full_name).removesuffix(COPY_SUFFIX)
        if name.endswith(".router.load"):  # a count of the last steps, in no folder
            continue
        tensors.append((name, tensor))
        if tuple(tensor.shape) != shapes.get(name):
            problems.append(f"{name} of shape {tuple(tensor.shape)}, which is {shapes.get(name)}")
    if problems:
        raise CheckpointError(
            f"load_folder_weights: {path} is of another decoder than the stages, which have "
            f"{shorten(problems)}",
            where=path,
            got=problems,
        )
    for name, tensor in tensors:
        box = get_local_box(tensor)
        # A rank has an empty shard where there are more ranks than rows.
        if box.local.numel() and name not in absent:
            box.local.copy_(read(name, tuple(box.local.shape), box.offset))


def _check_folder(
    folder: HFFolder, allow_missing: Sequence[str], allow_extra: Sequence[str], axis: Axis
) -> tuple[Weights, set[str]]:
    """Return a function that reads our tensors, and the names of those that are incomplete."""
    # Filled by `check`, which returns nothing: what it returned would travel to the other ranks.
    links: list[Link] = []
    stored: dict[str, Stored] = {}
    quantized: dict[str, QuantizedTensor] = {}

    def check() -> None:
        all_tensors = add_model_prefix(_describe_files(folder.path), folder.family, folder.config)
        stored.update(all_tensors)
        links.extend(make_family_links(folder.family, folder.config, present=all_tensors))
        quantized.update(
            _find_quantized(
                folder, links, all_tensors, allow_missing=allow_missing, allow_extra=allow_extra
            )
        )
        # A tied model may come with a head all the same; the embedding is used.
        names = {*_get_end_names(folder.family, folder.config)}
        # Reads the embedding and the head completely, so one rank does it for all.
        if axis.index == 0 and folder.config.tied and names <= all_tensors.keys():
            _check_tied(folder, all_tensors)
        if axis.index == 0 and quantized:
            log_warning(
                f"{folder.path}: {len(quantized)} quantized tensors are read dequantized, and a "
                "model that starts from them is stored unquantized; "
                "`python -m trainkit export RUN FOLDER --dtype bfloat16` writes it in bf16"
            )

    run_on_all_ranks(check, axis)
    # One of ours may be made of several of theirs: it is incomplete without any of them.
    names = stored.keys() | quantized.keys()
    absent = {link.ours.name for link in links if link.theirs.name not in names}
    # Their tensors, dequantized, then the map to ours: each wraps the one before, box by box.
    read = dequantize_weights(make_weights_reader(stored), quantized)
    return map_weights(read, links, get_decoder_shapes(folder.config)), absent


def _find_quantized(
    folder: HFFolder,
    links: Sequence[Link],
    tensors: Mapping[str, Stored],
    *,
    allow_missing: Sequence[str],
    allow_extra: Sequence[str],
) -> dict[str, QuantizedTensor]:
    """Return the quantized tensors of a folder; raise if its tensors are not those of its model."""
    expected = get_foreign_shapes(links)
    table = folder.values.get("quantization_config")
    quantized, plain, problems = find_quantized(tensors, expected, table)
    problems += find_folder_problems(
        plain,
        links,
        folder.family,
        folder.config,
        allow_missing=allow_missing,
        allow_extra=allow_extra,
    )
    # float16 and bfloat16 have equally many bytes: a wrong label gives wrong numbers.
    dtype = folder.values.get("dtype") or folder.values.get("torch_dtype")
    problems += [
        f"{name} is of {tensors[name].dtype}, and {CONFIG} says {dtype}"
        for name in expected
        if name in tensors and {str(dtype), tensors[name].dtype} == {"float16", "bfloat16"}
    ]
    if problems:
        # Another head, of a classifier for instance, explains what is missing or extra.
        architectures = folder.values.get("architectures")
        if architectures not in (None, [folder.family.architecture]):
            problems.insert(
                0,
                f"{CONFIG} says {str(architectures)[:99]}, but {folder.family.architecture} is "
                "supported",
            )
        raise CheckpointError(
            f"open_folder_weights: {folder.path} is no {folder.family.model_type} of its {CONFIG}: "
            f"{shorten(problems)}",
            where=folder.path,
            got=problems,
            hint="allow_missing= and allow_extra= take patterns of names to ignore",
        )
    return quantized


def find_folder_problems(
    tensors: Mapping[str, Stored],
    links: Sequence[Link],
    family: Family,
    config: DecoderConfig,
    *,
    allow_missing: Sequence[str] = (),
    allow_extra: Sequence[str] = (),
) -> list[str]:
    """Return the problems of tensors: missing, extra, of another shape, not in floating point.

    Args:
        tensors: The existing tensors, by the names of a model with a head.
        links: The links of the family, from `make_family_links`.
        family: The family.
        config: The decoder.
        allow_missing: Patterns of names that may be missing.
        allow_extra: Patterns of names to ignore.

    Examples:
        >>> config = DecoderConfig(
        ...     vocab_size=64, width=16, layers=1, heads=2, kv_heads=2, mlp_width=32
        ... )
        >>> llama = get_family("llama")
        >>> find_folder_problems({}, make_family_links(llama, config), llama, config)[0]
        'model.embed_tokens.weight of shape [64, 16] is missing'
    """
    expected = get_foreign_shapes(links)
    problems = [
        f"{name} of shape {list(shape)} is missing"
        for name, shape in expected.items()
        if name not in tensors and not match_any(name, allow_missing)
    ]
    problems += [
        f"{name} has the shape {list(tensors[name].shape)}, not {list(shape)}"
        for name, shape in expected.items()
        if name in tensors and tensors[name].shape != shape
    ]
    problems += [
        f"{name} is of {tensors[name].dtype}, no floating point"
        for name in expected
        if name in tensors and tensors[name].dtype not in FLOATS
    ]
    # Buffers that old versions of `transformers` saved, and layers that only training has.
    ignored = [pattern.format(layers=config.layers) for pattern in family.ignored_tensors]
    ignored += allow_extra
    if config.tied:
        # A tied head may be stored all the same: callers compare it with the embedding.
        ignored.append(_get_end_names(family, config)[1])
    problems += [
        f"{name} has no place in the model"
        for name in tensors
        if name not in expected and not match_any(name, ignored)
    ]
    return problems


def _check_tied(folder: HFFolder, tensors: Mapping[str, Stored]) -> None:
    """Raise if the head of a tied model differs from its embedding."""
    embedding_name, head_name = _get_end_names(folder.family, folder.config)
    embedding = tensors[embedding_name]
    head = tensors[head_name]
    read = make_weights_reader(tensors)
    # In groups of rows: the embedding of a large model takes gigabytes, and there would be two.
    rows, width = embedding.shape
    is_equal = (head.shape, head.dtype) == (embedding.shape, embedding.dtype)
    for first in range(0, rows if is_equal else 0, _ROWS_PER_READ):
        shape = (min(_ROWS_PER_READ, rows - first), width)
        offset = (first, 0)
        is_equal = torch.equal(read(embedding_name, shape, offset), read(head_name, shape, offset))
        if not is_equal:
            break
    if not is_equal:
        raise CheckpointError(
            f"open_folder_weights: {folder.path}: {head_name} differs from {embedding_name}, "
            "although tie_word_embeddings is true",
            where=folder.path,
        )


def _get_end_names(family: Family, config: DecoderConfig) -> tuple[str, str]:
    """Return the names of the embedding and of the head in a family."""
    # A tied decoder has no head, but the table names one all the same.
    names = family.names(config)
    return names["embedding.weight"].name, names["head.weight"].name


def add_model_prefix(
    tensors: Mapping[str, T], family: Family, config: DecoderConfig
) -> dict[str, T]:
    """Return tensors by the names of a model with a head; those of one without lack a prefix.

    Examples:
        >>> from trainkit.models.decoder_sizes import make_decoder_config
        >>> add_model_prefix({"norm.weight": 1}, get_family("llama"), make_decoder_config("tiny"))
        {'model.norm.weight': 1}
    """
    if family.tower is not None:
        return rename_tower(tensors, family.tower)
    # A class without a head (`LlamaModel`) has "layers.0..." where the one with a head has
    # "model.layers.0...".
    embedding, head = _get_end_names(family, config)
    prefix = embedding.split(".")[0] + "."
    if any(name.startswith(prefix) for name in tensors):
        return dict(tensors)
    return {name if name == head else prefix + name: x for name, x in tensors.items()}


def list_names(folder: HFFolder) -> Collection[str]:
    """Return the names of a folder's tensors, by those of a model with a head.

    Effects:
        Reads the headers of the files.
    """
    return add_model_prefix(_describe_files(folder.path), folder.family, folder.config)


def find_outside_tensors(
    folder: HFFolder, shapes: Mapping[str, Sequence[int]]
) -> tuple[dict[str, str], dict[str, Stored]]:
    """Return what a multimodal folder has besides its text tower, and how it names the tower.

    Args:
        folder: The folder, of a family with a `tower`.
        shapes: The shapes of the tower's tensors, by the names of the family.

    Returns:
        The name in the folder of each of these tensors; and all other tensors, by their names.

    Raises:
        CheckpointError: A file is invalid, or the folder lacks a tensor of the tower.

    Effects:
        Reads the headers of the files.
    """
    stored = _describe_files(folder.path)
    names = add_model_prefix({name: name for name in stored}, folder.family, folder.config)
    if missing := [name for name in shapes if name not in names]:
        raise CheckpointError(
            f"find_outside_tensors: {folder.path} lacks {shorten(missing)} of its text tower",
            where=folder.path,
            got=missing,
        )
    used = {*shapes}
    if folder.config.tied:  # a copy of the embedding, which would not be the trained one
        used.add(_get_end_names(folder.family, folder.config)[1])
    outside = {name: stored[name] for new, name in names.items() if new not in used}
    return {name: names[name] for name in shapes}, outside


def _describe_files(path: Path) -> dict[str, Stored]:
    """Return the tensors of a folder, from the headers of its files."""
    single = path / "model.safetensors"
    if (path / INDEX).exists():
        if single.exists():  # of a save over an older one; which of them is the model is unknown
            raise refusal(path, f"has both {single.name} and {INDEX}; remove one of them")
        return describe_safetensors_folder(path)
    if single.exists():
        return safetensors_file(single)
    pickled = sorted(file.name for file in path.glob("pytorch_model*.bin"))
    if pickled:
        raise refusal(
            path,
            f"has {pickled[0]}, a pickle, which is not read; `python -m trainkit checkpoint "
            "convert` makes safetensors of it",
        )
    raise refusal(path, f"has neither model.safetensors nor {INDEX}")
