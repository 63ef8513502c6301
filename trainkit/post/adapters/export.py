"""Export a run's adapters: as a PEFT folder, or merged into their base."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import orjson
import torch
from torch import Tensor

from trainkit.mesh import solo_parallel
from trainkit.models.config import parameter_shapes
from trainkit.models.decoder import Decoder
from trainkit.models.decoder_sizes import config_from_facts
from trainkit.noise.hashing import MASK64
from trainkit.parallel.materialize import attach_shapes, narrow_to_box, shapes_of
from trainkit.parallel.name_patterns import name_matches
from trainkit.post.adapters.base import open_base_weights
from trainkit.post.adapters.frozen import get_quantizations, round_weights
from trainkit.post.adapters.lowrank import CHILD, Lora, split_name
from trainkit.post.adapters.peft import CONFIG, LowRankFactors, to_peft
from trainkit.post.adapters.trained import build_trained_stages
from trainkit.types import CheckpointError, ConfigError, Weights
from trainkit.weights.checkpoint.export import describe_origin, split_into_row_boxes, write_weights
from trainkit.weights.checkpoint.load import read_facts
from trainkit.weights.checkpoint.manifest import find_checkpoint
from trainkit.weights.checkpoint.reading import read_box
from trainkit.weights.checkpoint.run_state import hash_tensor_box
from trainkit.weights.checkpoint.sources import read_model_tensors
from trainkit.weights.checkpoint.tensor_files import Stored
from trainkit.weights.hub.configs import get_family, match_family
from trainkit.weights.hub.folder import is_hf_folder, open_folder

_MAX_ELEMENTS = 1 << 22  # of a base that are read and hashed at a time


@attrs.frozen(eq=False)
class SavedAdapters:
    """The contents of a checkpoint of adapters.

    Attributes:
        facts: The facts of the run.
        loras: The specifications of the adapters.
        held: The adapters by the names of their matrices.
        whole: The full parameters that were trained, by name.
    """

    facts: Mapping[str, Any]
    loras: tuple[Lora, ...]
    held: Mapping[str, LowRankFactors]
    whole: Mapping[str, Tensor]


def read_adapters(checkpoint: Path | str, *, name: str | None = None) -> SavedAdapters:
    """Read the adapters of a run into memory.

    Args:
        checkpoint: A checkpoint without its base (`exclude_frozen_`); or the run, whose newest
            checkpoint that verifies is read.
        name: The name of the adapter, for a checkpoint with several.

    Raises:
        CheckpointError: The checkpoint does not verify, or has no adapter of that name.

    Examples:
        >>> read_adapters("/does/not/exist")
        Traceback (most recent call last):
        trainkit.types.CheckpointError: find_checkpoint: there is no checkpoint in ...
    """
    path = find_checkpoint(checkpoint)
    facts = read_facts(path, needs=["adapters"])
    loras = tuple(Lora(**one) for one in facts["adapters"])
    # All in memory: a checkpoint without its base holds little.
    tensors = {
        key: read_box(x, x.shape, (0,) * len(x.shape))
        for key, x in read_model_tensors(path).items()
    }
    names = sorted({split_name(key)[1] for key in tensors if f".{CHILD}." in key})
    if len(names) != 1 and name not in names:  # a single one needs no name
        raise CheckpointError(
            f"read_adapters: {path} holds the adapters {names or 'of none'}, not "
            f"{name or 'a single one'}; name one of them",
            where=path,
            got=names,
            want=name,
        )
    selected = name or names[0]
    loras = tuple(spec for spec in loras if spec.name == selected)
    parts: dict[str, dict[str, Tensor]] = {}
    for full_key, x in tensors.items():
        if f".{CHILD}." in full_key:
            matrix, adapter_name, key = split_name(full_key)
            if adapter_name == selected:
                parts.setdefault(matrix, {})[key] = x
    factors: dict[str, LowRankFactors] = {}
    # The checkpoint has no scales: an adapter has that of the one specification that matches.
    for matrix, x in parts.items():
        matching = [spec for spec in loras if name_matches(matrix, spec.modules)]
        if len(matching) != 1:
            raise CheckpointError(
                f"read_adapters: {len(matching)} specifications in the facts of the run match "
                f"{matrix}, not one",
                where=matrix,
            )
        factors[matrix] = LowRankFactors(x["a"], x["b"], matching[0].scale, x.get("magnitude"))
    whole = {key: x for key, x in tensors.items() if f".{CHILD}." not in key}
    return SavedAdapters(facts, loras, factors, whole)


def export_peft(
    checkpoint: Path | str,
    folder: Path | str,
    *,
    name: str | None = None,
    family: str | None = None,
    base: str | None = None,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Write the adapters of a run as a folder that `peft.PeftModel.from_pretrained` loads.

    Args:
        checkpoint: As for `read_adapters`.
        folder: The new folder.
        name: As for `read_adapters`.
        family: The `model_type` of the base; by default that of its folder, or else the first
            family with the same computation.
        base: The path of the base for the folder's configuration; by default the run's.
        overwrite: Replace a folder that an earlier export wrote.

    Returns:
        {"folder", "files", "tensors", "bytes", "from"}.

    Raises:
        CheckpointError: As `read_adapters`.
        ConfigError: No family matches the decoder, PEFT has no place for an adapter (`to_peft`),
            or the folder exists.

    Effects:
        Writes a folder.
    """
    path = find_checkpoint(checkpoint)
    saved = read_adapters(path, name=name)
    config = config_from_facts(read_facts(path, needs=["model"])["model"])
    base = base or saved.facts.get("base_from")
    # Several families may compute what the decoder does; the base's folder names the right one.
    if family is not None:
        base_family = get_family(family, where="family")
    elif base and is_hf_folder(base):
        base_family = open_folder(base).family
    else:
        base_family = match_family(config)
    # Steps update these by counting; no optimizer trains them, and PEFT has no place for them.
    counters = (".router.load", ".router.bias")
    dropouts = {spec.dropout for spec in saved.loras}
    settings, tensors = to_peft(
        saved.held,
        {key: x for key, x in saved.whole.items() if not key.endswith(counters)},
        base_family,
        config,
        base=base,
        # If only some are, alphas over the rank: `to_peft` finds those that give each scale.
        rank_stabilised=all(spec.rank_stabilised for spec in saved.loras),
        dropout=dropouts.pop() if len(dropouts) == 1 else 0.0,  # PEFT has one for all matrices
    )

    def read(key: str, shape: Sequence[int], offset: Sequence[int]) -> Tensor:
        return narrow_to_box(tensors[key], shape, offset)

    return write_weights(
        {
            key: Stored(str(x.dtype).removeprefix("torch."), tuple(x.shape), ())
            for key, x in tensors.items()
        },
        folder,
        read=read,
        extra_files={CONFIG: orjson.dumps(settings, option=orjson.OPT_INDENT_2)},
        origin=describe_origin(path),
        shard_bytes=1 << 62,  # PEFT reads a single file
        overwrite=overwrite,
        stem="adapter_model",
    )


def merge_run(checkpoint: Path | str, *, base: str | None = None) -> Weights:
    """Return the merged weights of a run, after checking that its base is unchanged.

    A quantized base is dequantized, and the adapters are added to the result.

    Args:
        checkpoint: As for `read_adapters`.
        base: The path of the base; by default the run's.

    Raises:
        CheckpointError: As `read_adapters`; or the hash of the base is not the run's.
        ConfigError: Neither the run nor `base` has a path.

    Effects:
        Reads all of the base, and hashes it.
    """
    path = find_checkpoint(checkpoint)
    saved = read_adapters(path)
    source = base or saved.facts.get("base_from")
    if source is None:
        raise ConfigError("merge_run: the run does not say where its base is; name it: --base")
    weights = open_base_weights(source)
    config = config_from_facts(read_facts(path, needs=["model"])["model"])
    # The base as the run saw it: what it trained in full was in its checkpoints, and not hashed.
    shapes = parameter_shapes(config)
    frozen = {key: shape for key, shape in shapes.items() if key not in saved.whole}
    if saved.facts["quantized"]:
        # The hash in the facts is that of codes and scales, so the quantized model must be built.
        make_model = partial(Decoder, config)
        (model,) = build_trained_stages(path, make_model, solo_parallel(), [], base=source)
        return merge_weights(saved, round_weights(weights, get_quantizations(model)))
    expected = saved.facts["base"]
    # The run hashed the base as its model stored it: in fp32, or in the dtype of the files.
    if all(_hash_weights(weights, frozen, dtype) != expected for dtype in (torch.float32, None)):
        raise CheckpointError(
            f"merge_run: {source} is another base than the run's, whose hash is {expected}",
            where=source,
            want=expected,
            hint="name the base that the run was started with: --base",
        )
    return merge_weights(saved, weights)


def _hash_weights(
    weights: Weights, shapes: Mapping[str, Sequence[int]], dtype: torch.dtype | None
) -> str:
    """Return the hash of a base as `exclude_frozen_` computes it, from some rows at a time."""
    total = 0
    for name, full_shape in shapes.items():
        for shape, offset in split_into_row_boxes(tuple(full_shape), _MAX_ELEMENTS):
            values = weights(name, shape, offset)
            values = values if dtype is None else values.to(dtype)
            # A sum over elements, so that boxes can be hashed in any order.
            total += hash_tensor_box(f"model/{name}", values, shape=full_shape, offset=offset)
    return f"{total & MASK64:016x}"


def merge_weights(saved: SavedAdapters, base: Weights) -> Weights:
    """Return the weights of a base with a run's adapters merged, computed one box at a time.

    W + scale * B A, with rows rescaled for DoRA, in at least fp32 and rounded once to the base's
    dtype. Pass them to `build_stages` or `hub.export_folder(read=...)`.

    Args:
        saved: The adapters.
        base: The weights of their base: `open_base_weights(saved.facts["base_from"])`.

    Raises:
        ValueError: As `base`, when called.

    Examples:
        >>> low = LowRankFactors(torch.ones(1, 2), torch.ones(3, 1), 0.5)
        >>> saved = SavedAdapters({}, (), {"up": low}, {})
        >>> ones = lambda name, shape, offset: torch.ones(tuple(shape))
        >>> merge_weights(saved, ones)("up.weight", (1, 2), (2, 0))
        tensor([[1.5000, 1.5000]])
    """

    def read(name: str, shape: Sequence[int], offset: Sequence[int]) -> Tensor:
        if name in saved.whole:
            return narrow_to_box(saved.whole[name], shape, offset)
        # An adapter goes by its matrix: "layers.0.mlp.up", and of experts "...experts.up".
        factors = saved.held.get(name) or saved.held.get(name.removesuffix(".weight"))
        if factors is None:
            return base(name, shape, offset)
        # The box as slices of the full matrix: rows of it and of B, columns of it and of A.
        *experts, rows, columns = (
            slice(start, start + size) for start, size in zip(offset, shape, strict=True)
        )
        if factors.lengths is None:
            weight = base(name, shape, offset)
            a = factors.a[(*experts, slice(None), columns)]
        else:  # DoRA divides by the norm of a row, which needs all of its columns
            inputs = factors.a.shape[-1]
            weight = base(name, (*shape[:-1], inputs), (*offset[:-1], 0))
            a = factors.a[(*experts, slice(None), slice(None))]
        dtype = torch.promote_types(weight.dtype, torch.float32)
        b = factors.b[(*experts, rows)]
        product = b.to(dtype) @ a.to(dtype)
        total = weight.to(dtype) + factors.scale * product
        if factors.lengths is not None:
            lengths = factors.lengths[(*experts, rows)].to(dtype)
            total *= (lengths / total.norm(dim=-1)).unsqueeze(-1)
            total = total[..., columns]
        return total.to(weight.dtype)

    return attach_shapes(read, shapes_of(base)) if shapes_of(base) else read
