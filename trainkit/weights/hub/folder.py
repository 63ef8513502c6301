"""A Hugging Face folder: looked over as a whole before anything of it is read, then box by box.

Nothing outside of the folder is read, nothing in it is run, and no memory is taken by the word of a
file that could not hold what it says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeVar

import attrs
import torch
from torch import Tensor, nn

from trainkit.collectives import run_on_all_ranks
from trainkit.models.config import DecoderConfig, parameter_shapes
from trainkit.models.decoder_sizes import pad_vocab_size
from trainkit.parallel.materialize import listed
from trainkit.parallel.parameters import COPY_SUFFIX, get_local_box
from trainkit.types import SOLO, Axis, CheckpointError, ConfigError, Weights
from trainkit.weights.checkpoint.boxes import get_parameter_name, shorten
from trainkit.weights.checkpoint.manifest import MANIFEST
from trainkit.weights.checkpoint.reading import reader
from trainkit.weights.checkpoint.run_state import model_tensors
from trainkit.weights.checkpoint.safe_files import read_bounded, refusal
from trainkit.weights.checkpoint.sources import INDEX
from trainkit.weights.checkpoint.tensor_files import Stored, parse_untrusted_table, safetensors_file
from trainkit.weights.convert.foreign import describe_safetensors_folder
from trainkit.weights.hub.configs import family_named, read_decoder_config
from trainkit.weights.hub.families import FAMILIES, Family
from trainkit.weights.hub.links import HFTensor, Link, check_links, linked, make_links, their_shapes
from trainkit.weights.hub.quantized import SCALES, dequantized, scales_of
from trainkit.weights.hub.resize import resize_weights

CONFIG = "config.json"
_CONFIG_BYTES = 4 * 1024 * 1024
_FLOATS = ("float64", "float32", "float16", "bfloat16")
_ROWS = 4096
_BLOCK = "weight_block_size"


T = TypeVar("T")


@attrs.frozen(eq=False)
class HFFolder:
    """What a Hugging Face folder says of itself in its `config.json`.

    Attributes:
        path: The folder.
        family: The family that it is of.
        config: The decoder that it describes.
        values: All of its `config.json`.
        context: The most tokens that a row is meant to have.
        full_context: The most tokens that the model is for, whatever a row is to have here:
            `max_position_embeddings`.
    """

    path: Path
    family: Family
    config: DecoderConfig
    values: Mapping[str, Any]
    context: int
    full_context: int


def is_hf_folder(path: Path | str) -> bool:
    """Say whether a path is a folder with a `config.json`, as no run of ours has.

    Examples:
        >>> is_hf_folder("/does/not/exist")
        False
    """
    return (Path(path) / CONFIG).is_file()


def check_is_there(path: Path | str, *, function: str) -> None:
    """Refuse a model's path at which there is nothing, or no folder of a model.

    Args:
        path: A run, a checkpoint or a Hugging Face folder.
        function: What says so.

    Raises:
        CheckpointError: There is no such folder, which may be the name of a model on the hub; or
            the folder has no `config.json` and no checkpoint.

    Examples:
        >>> check_is_there("google/gemma-3-1b-it", function="open_folder")
        Traceback (most recent call last):
        ...
        trainkit.types.CheckpointError: open_folder: there is no folder google/gemma-3-1b-it; a ...
    """
    path = Path(path)
    if not path.exists():
        name = str(path) if len(path.parts) == 2 and not path.is_absolute() else "NAME"
        raise CheckpointError(
            f"{function}: there is no folder {path}; a model of the Hugging Face hub is downloaded "
            f"first, and its folder named: hf download {name} --local-dir DIR",
            where=path,
        )
    files = [path / CONFIG, path / MANIFEST, path / "checkpoints"]
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
    """Read the `config.json` of a Hugging Face folder; its tensors are not looked at.

    Args:
        path: The folder. The snapshots of a hub's cache hold links to files elsewhere, which are
            not followed: download into a folder of its own.
        families: Those that it may be of; one of your own for instance, see `Family`.
        context: The most tokens that a row will have; by default what `config.json` says. A model
            whose rotary positions have factors for short and for long texts (Phi 3 and 4) takes
            those for this length, whatever a text has; by default the short ones, and no more
            tokens than they are for (`models.LongRopeScaling`).

    Raises:
        ConfigError: The folder is none of a model that trainkit computes; all that is wrong with
            its `config.json` is named.
        CheckpointError: There is no folder, or its `config.json` is missing, no plain file, or no
            good JSON; or a file of the folder is a link.

    Examples:
        >>> open_folder("/does/not/exist")
        Traceback (most recent call last):
        ...
        trainkit.types.CheckpointError: open_folder: there is no folder /does/not/exist; a model...
    """
    check_is_there(path, function="open_folder")
    file = Path(path) / CONFIG
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
    values = parse_untrusted_table(read_bounded(file, _CONFIG_BYTES, shared=True), file)
    config = read_decoder_config(values, where=str(file), families=families, context=context)
    most = values.get("max_position_embeddings", config.reach or 2048)
    if type(most) is not int:
        raise ConfigError(f"{file}: max_position_embeddings is no number", where=str(file))
    family = family_named(values["model_type"], where=str(file), families=families)
    context = context or min(most, config.reach or most)
    return HFFolder(Path(path), family, config, values, context, full_context=most)


def read_init_config(
    path: Path | str,
    *,
    vocab_size: int,
    experts: bool = False,
    resize: bool = False,
    context: int | None = None,
) -> DecoderConfig:
    """Return the decoder of a Hugging Face folder that a run is to begin with.

    Args:
        path: The folder.
        vocab_size: The ids of the run's tokenizer: each must have a row of the embedding.
        experts: Whether the recipe trains experts.
        resize: Whether an embedding that is too small gets more rows, a multiple of 16, which
            `load_folder_weights(vocab_size=)` fills.
        context: As in `open_folder`.

    Raises:
        ConfigError: It is a run; the embedding is too small, and `resize` is false; there are
            experts and the recipe trains none, or the other way round; or as `open_folder`.
        CheckpointError: As `open_folder`; or its tensors have other shapes than its config.json
            says.

    Examples:
        >>> read_init_config("/does/not/exist", vocab_size=259)
        Traceback (most recent call last):
        ...
        trainkit.types.CheckpointError: open_folder: there is no folder /does/not/exist; a model...
    """
    if (Path(path) / "checkpoints").is_dir() and not is_hf_folder(path):
        hint = f"python -m trainkit export {path} FOLDER makes one of it"
        raise ConfigError(f"--init: {path} is a run, and no Hugging Face folder", hint=hint)
    folder = open_folder(path, context=context)
    _check_shapes(folder)
    config = folder.config
    if vocab_size > config.vocab_size and resize:
        config = attrs.evolve(config, vocab_size=pad_vocab_size(vocab_size))
    if vocab_size > config.vocab_size:
        raise ConfigError(
            f"--init: the tokenizer has {vocab_size} ids, and the embedding of {path} has "
            f"{config.vocab_size} rows",
            where="tokenizer",
            got=vocab_size,
            want=config.vocab_size,
            hint="take the folder's own, or with --tokenizer another whose ids it has; or give the "
            "embedding more rows: read_init_config(resize=True), load_weights(vocab_size=)",
        )
    if (config.experts is not None) != experts:
        has, trains = ("", "without") if config.experts else ("no ", "with")
        raise ConfigError(
            f"--init: {path} has {has}experts, and this recipe trains decoders {trains}",
            where="init",
            got=0 if config.experts is None else config.experts.count,
            hint="recipes/moe.py trains experts; docs/howto/train-experts.md has what they need",
        )
    return config


def _check_shapes(folder: HFFolder) -> None:
    """Refuse a config.json of other sizes than the tensors have, before a model is made of it."""
    try:
        held = of_whole_model(_described(folder.path), folder.family, folder.config)
    except CheckpointError:  # `load_folder_weights` says what is wrong with the files
        return
    wanted = their_shapes(links_of(folder.family, folder.config))
    problems = [
        f"{name} is {tuple(held[name].shape)}, and would be {shape}"
        for name, shape in wanted.items()
        if name in held and tuple(held[name].shape) != shape
    ]
    if problems:
        raise CheckpointError(
            f"read_init_config: {folder.path} has tensors whose sizes differ from config.json: "
            f"{shorten(problems)}",
            where=folder.path,
            got=problems,
        )


def our_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors that a folder has of a decoder: the routers' biases too.

    Examples:
        >>> config = DecoderConfig(
        ...     vocab_size=64, width=16, layers=1, heads=2, kv_heads=2, mlp_width=32
        ... )
        >>> our_shapes(config) == parameter_shapes(config)
        True
    """
    shapes, experts = parameter_shapes(config), config.experts
    if experts is not None and experts.biased:
        shapes |= {f"layers.{i}.mlp.router.bias": (experts.count,) for i in config.expert_layers}
    return shapes


def links_of(family: Family, config: DecoderConfig) -> list[Link]:
    """Return which elements of a decoder's tensors are which in a folder of a family.

    Raises:
        ConfigError: The family has no name for a tensor, or its links are no map both ways.

    Examples:
        >>> config = DecoderConfig(
        ...     vocab_size=64, width=16, layers=1, heads=2, kv_heads=2, mlp_width=32
        ... )
        >>> links = links_of(family_named("phi3"), config)
        >>> their_shapes(links)["model.layers.0.mlp.gate_up_proj.weight"]
        (64, 16)
    """
    table: dict[str, HFTensor] = {}
    shapes = our_shapes(config)
    for name, there in family.names(config).items():
        layers = range(config.layers) if "{i}" in name else range(1)
        for i in layers:
            theirs = there.name.replace("{i}", str(i))
            table[name.replace("{i}", str(i))] = attrs.evolve(there, name=theirs)
    heads = {name: getattr(config, name) for name in ("head_size", "rotary_size")}
    links = make_links(table, shapes, heads=heads, rotary=config.rotary_size)
    check_links(links, shapes)
    return links


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

    `build_stages(..., weights=open_folder_weights(open_folder(path), axis=ps.world))` fills every
    rank's part of a decoder from it, in any layout; a rank reads what it holds and no more. The
    folder must be whole, of the shapes that its `config.json` says, in floating point; of matrices
    in fp8 with a scale for each block, values are those that they stand for, in fp32.

    Args:
        folder: The folder.
        allow_missing: Patterns of their names that the folder may lack, in which `*` stands for any
            letters; what is made of them comes from `missing`.
        allow_extra: Patterns of their names that are left aside.
        missing: Gives the tensors of ours of which something is missing, `init_weights` say.
        dtype: Of the values; None leaves them as they are in the files, and what they are copied to
            has them in its own.
        axis: The ranks that call this together: if one cannot read it, all are told.

    Returns:
        A `Weights` function, which does not communicate.

    Raises:
        CheckpointError: A file is not a good one, or the folder's tensors are not those of the
            model: all that are missing, left over, of another shape or no floating point are named.

    Effects:
        Reads the headers of the files; communicates on `axis`.

    Examples:
        >>> import json, tempfile
        >>> from safetensors.torch import save_file
        >>> from trainkit.weights.hub.configs import match_family, write_decoder_config
        >>> config = DecoderConfig(
        ...     vocab_size=8, width=4, layers=1, heads=1, kv_heads=1, mlp_width=4
        ... )
        >>> shapes = their_shapes(links_of(match_family(config), config))
        >>> with tempfile.TemporaryDirectory() as home:
        ...     said = json.dumps(write_decoder_config(config, context=64))
        ...     _ = (Path(home) / "config.json").write_text(said)
        ...     ones = {name: torch.ones(shape) for name, shape in shapes.items()}
        ...     save_file(ones, f"{home}/model.safetensors")
        ...     open_folder_weights(open_folder(home))("norm.weight", (2,), (1,))
        tensor([1., 1.])
    """
    read, lacking = _looked_over(folder, allow_missing, allow_extra, axis)
    if lacking and missing is None:
        raise ConfigError(
            f"open_folder_weights: {folder.path} lacks tensors for {shorten(sorted(lacking))}; "
            "give missing=, init_weights for instance",
            where="missing",
        )

    def give(name: str, shape: Sequence[int], offset: Sequence[int]) -> Tensor:
        values = (
            missing(name, shape, offset)
            if missing is not None and name in lacking
            else read(name, shape, offset)
        )
        return values if dtype is None else values.to(dtype)

    return listed(give, our_shapes(folder.config))


def load_folder_weights(
    path: Path | str,
    stages: Sequence[nn.Module],
    *,
    vocab_size: int | None = None,
    allow_missing: Sequence[str] = (),
    allow_extra: Sequence[str] = (),
    axis: Axis = SOLO,
) -> None:
    """Read a Hugging Face folder into stages that are there, as `checkpoint.load_weights` does.

    Args:
        path: The folder.
        stages: This rank's stages of the decoder that it describes.
        vocab_size: The rows of their embedding, if it has more than the folder's: `resize_weights`
            makes the new ones.
        allow_missing: Patterns of their names that the folder may lack; they keep their values.
        allow_extra: Patterns of their names that are left aside.
        axis: The ranks that call this together, `ps.world`.

    Raises:
        ConfigError: As `open_folder`.
        CheckpointError: As `open_folder_weights`; or the stages have another decoder, or a larger
            vocabulary than `vocab_size` says.

    Effects:
        Writes the parameters of `stages` and the biases of their routers, after all of the folder
        has been looked over; communicates on `axis`.

    Examples:
        >>> load_folder_weights("/does/not/exist", [])
        Traceback (most recent call last):
        ...
        trainkit.types.CheckpointError: open_folder: there is no folder /does/not/exist; a model...
    """
    folder = open_folder(path)
    read, lacking = _looked_over(folder, allow_missing, allow_extra, axis)
    config = attrs.evolve(folder.config, vocab_size=vocab_size or folder.config.vocab_size)
    read = resize_weights(read, folder.config, vocab_size=config.vocab_size)
    shapes, found = our_shapes(config), list[tuple[str, Tensor]]()
    problems = []
    for name, tensor in model_tensors(stages).items():
        own = get_parameter_name(name).removesuffix(COPY_SUFFIX)
        if own.endswith(".router.load"):  # what a step has counted: no folder says it
            continue
        found.append((own, tensor))
        if tuple(tensor.shape) != shapes.get(own):
            problems.append(f"{own} of shape {tuple(tensor.shape)}, which is {shapes.get(own)}")
    if problems:
        raise CheckpointError(
            f"load_weights: {path} is of another decoder than the stages, which have "
            f"{shorten(problems)}",
            where=path,
            got=problems,
        )
    for own, tensor in found:
        box = get_local_box(tensor)
        if box.local.numel() and own not in lacking:
            box.local.copy_(read(own, tuple(box.local.shape), box.offset))


def _looked_over(
    folder: HFFolder, allow_missing: Sequence[str], allow_extra: Sequence[str], axis: Axis
) -> tuple[Weights, set[str]]:
    """Return what reads the tensors of ours, and the names of those that are not all there."""
    links, ours = links_of(folder.family, folder.config), our_shapes(folder.config)
    found, scales = dict[str, Stored](), dict[str, Stored]()

    def look_over() -> None:
        held = of_whole_model(_described(folder.path), folder.family, folder.config)
        both = _fitting(folder, links, held, missing=allow_missing, extra=allow_extra)
        for known, part in zip((found, scales), both, strict=True):
            known.update(part)
        ends = {*_ends(folder.family, folder.config)}
        if axis.index == 0 and folder.config.tied and ends <= held.keys():
            _check_tied(folder, held)  # which reads both of them, so that one rank does it for all

    run_on_all_ranks(look_over, axis)
    lacking = {link.ours.name for link in links if link.theirs.name not in found}
    read: Weights = reader(found | {name + SCALES: x for name, x in scales.items()})
    if scales:
        read = dequantized(read, [*scales], folder.values["quantization_config"][_BLOCK])
    return linked(read, links, ours), lacking


def _fitting(
    folder: HFFolder,
    links: Sequence[Link],
    found: Mapping[str, Stored],
    *,
    missing: Sequence[str],
    extra: Sequence[str],
) -> tuple[dict[str, Stored], dict[str, Stored]]:
    """Return those of a folder's tensors that are its model's, and the scales of those in fp8.

    What does not fit is refused; `missing` and `extra` are patterns of names that may be so.
    """
    wanted = their_shapes(links)
    quantized = folder.values.get("quantization_config")
    scales, problems = scales_of(found, [*wanted], quantized[_BLOCK]) if quantized else ({}, [])
    beside = [name + SCALES for name in scales]
    problems += tensor_problems(
        {name: x for name, x in found.items() if name not in beside},
        links,
        folder.family,
        folder.config,
        allow_missing=missing,
        allow_extra=extra,
        no_floats=[*scales],
    )
    said = folder.values.get("dtype") or folder.values.get("torch_dtype")
    problems += [  # as many bytes, and other numbers
        f"{name} is of {found[name].dtype}, and {CONFIG} says {said}"
        for name in wanted
        if name in found and {str(said), found[name].dtype} == {"float16", "bfloat16"}
    ]
    _refuse(folder, problems)
    return {name: found[name] for name in wanted if name in found}, scales


def tensor_problems(
    found: Mapping[str, Stored],
    links: Sequence[Link],
    family: Family,
    config: DecoderConfig,
    *,
    allow_missing: Sequence[str] = (),
    allow_extra: Sequence[str] = (),
    no_floats: Sequence[str] = (),
) -> list[str]:
    """Say which tensors of a family's model are missing, left over, of another shape or no floats.

    Args:
        found: The tensors that there are, by the names of a model with a head.
        links: Those of the family, as `links_of` gives them.
        family: The family.
        config: The decoder.
        allow_missing: Patterns of names that may be missing.
        allow_extra: Patterns of names that are left aside.
        no_floats: Names of tensors that may be of another dtype.

    Examples:
        >>> config = DecoderConfig(
        ...     vocab_size=64, width=16, layers=1, heads=2, kv_heads=2, mlp_width=32
        ... )
        >>> llama = family_named("llama")
        >>> tensor_problems({}, links_of(llama, config), llama, config)[0]
        'model.embed_tokens.weight of shape [64, 16] is missing'
    """
    wanted = their_shapes(links)
    problems = [
        f"{name} of shape {list(shape)} is missing"
        for name, shape in wanted.items()
        if name not in found and not _matches(name, allow_missing)
    ]
    problems += [
        f"{name} has the shape {list(found[name].shape)}, not {list(shape)}"
        for name, shape in wanted.items()
        if name in found and found[name].shape != shape
    ]
    problems += [
        f"{name} is of {found[name].dtype}, no floating point"
        for name in wanted
        if name in found and found[name].dtype not in _FLOATS and name not in no_floats
    ]
    aside = [pattern.format(layers=config.layers) for pattern in family.aside]
    aside += [*allow_extra, *(_ends(family, config)[1:] if config.tied else [])]
    problems += [
        f"{name} has no place in the model"
        for name in found
        if name not in wanted and not _matches(name, aside)
    ]
    return problems


def _refuse(folder: HFFolder, problems: list[str]) -> None:
    """Raise what is wrong with a folder's tensors, if anything is; another head is named first."""
    if not problems:
        return
    said = folder.values.get("architectures")
    kind = f"{CONFIG} says {str(said)[:99]}, and {folder.family.architecture} is what is read"
    problems = [*([] if said in (None, [folder.family.architecture]) else [kind]), *problems]
    raise CheckpointError(
        f"open_folder_weights: {folder.path} is no {folder.family.model_type} of its {CONFIG}: "
        f"{shorten(problems)}",
        where=folder.path,
        got=problems,
        hint="allow_missing= and allow_extra= take patterns of names that may be so",
    )


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _check_tied(folder: HFFolder, found: Mapping[str, Stored]) -> None:
    """Refuse a head that is not the embedding, looking at some rows of both at a time."""
    names = _ends(folder.family, folder.config)
    whole, head = (found[name] for name in names)
    alike = (head.shape, head.dtype) == (whole.shape, whole.dtype)
    read, (rows, width) = reader(found), whole.shape
    for first in range(0, rows, _ROWS):
        part = (min(_ROWS, rows - first), width), (first, 0)
        if not alike or not torch.equal(*(read(name, *part) for name in names)):
            raise CheckpointError(
                f"open_folder_weights: {folder.path}: {names[1]} is not {names[0]}, and "
                "tie_word_embeddings says so",
                where=folder.path,
            )


def _ends(family: Family, config: DecoderConfig) -> tuple[str, str]:
    """Return the names that the embedding and the head have in a family."""
    names = family.names(config)
    return names["embedding.weight"].name, names["head.weight"].name


def of_whole_model(found: Mapping[str, T], family: Family, config: DecoderConfig) -> dict[str, T]:
    """Return tensors by the names of a model with a head: a model without one leaves out a part.

    Examples:
        >>> from trainkit.models.decoder_sizes import make_decoder_config
        >>> of_whole_model({"norm.weight": 1}, family_named("llama"), make_decoder_config("tiny"))
        {'model.norm.weight': 1}
    """
    embedding, head = _ends(family, config)
    prefix = embedding.split(".")[0] + "."
    if any(name.startswith(prefix) for name in found):
        return dict(found)
    return {name if name == head else prefix + name: x for name, x in found.items()}


def _described(path: Path) -> dict[str, Stored]:
    """Describe the tensors of a folder by the headers of its files."""
    whole = path / "model.safetensors"
    if (path / INDEX).exists():
        if whole.exists():
            raise refusal(path, f"holds both {whole.name} and {INDEX}; which is it?")
        return describe_safetensors_folder(path)
    if whole.exists():
        return safetensors_file(whole)
    pickled = sorted(file.name for file in path.glob("pytorch_model*.bin"))
    if pickled:
        raise refusal(
            path,
            f"holds {pickled[0]}, a pickle, which is not read; `python -m trainkit checkpoint "
            "convert` makes safetensors of it",
        )
    raise refusal(path, f"holds neither model.safetensors nor {INDEX}")
