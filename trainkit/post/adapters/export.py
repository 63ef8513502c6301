"""A run's adapters for others: as a folder of PEFT, or added to their base."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import orjson
import torch
from torch import Tensor

from trainkit.mesh import solo_parallel
from trainkit.models.config import DecoderConfig, parameter_shapes
from trainkit.models.decoder import Decoder
from trainkit.models.decoder_sizes import config_from_facts
from trainkit.noise.hashing import MASK64
from trainkit.parallel.materialize import listed, narrow_to_box, shapes_of
from trainkit.post.adapters.base import open_base_weights
from trainkit.post.adapters.frozen import get_quantizations, round_weights
from trainkit.post.adapters.lowrank import CHILD, Lora, split_name
from trainkit.post.adapters.peft import CONFIG, LowRankFactors, to_peft
from trainkit.post.adapters.trained import build_trained_stages
from trainkit.types import CheckpointError, ConfigError, Weights
from trainkit.weights.checkpoint.export import describe_origin, split_into_row_boxes, write_weights
from trainkit.weights.checkpoint.load import read_facts
from trainkit.weights.checkpoint.manifest import find_checkpoint
from trainkit.weights.checkpoint.reading import reader
from trainkit.weights.checkpoint.run_state import hash_tensor_box
from trainkit.weights.checkpoint.sources import read_model_tensors
from trainkit.weights.checkpoint.tensor_files import Stored
from trainkit.weights.hub.configs import get_family, match_family
from trainkit.weights.hub.families import Family
from trainkit.weights.hub.folder import is_hf_folder, open_folder

_AT_ONCE = 1 << 22  # elements


@attrs.frozen(eq=False)
class SavedAdapters:
    """What a checkpoint of adapters holds.

    Attributes:
        facts: Those of the run.
        loras: The adapters' specifications.
        held: The adapters by the names of their matrices.
        whole: What is trained whole, by name.
    """

    facts: Mapping[str, Any]
    loras: tuple[Lora, ...]
    held: Mapping[str, LowRankFactors]
    whole: Mapping[str, Tensor]


def read_adapters(checkpoint: Path | str, *, name: str | None = None) -> SavedAdapters:
    """Read the adapters of a run into memory.

    Args:
        checkpoint: A checkpoint of a run whose base is kept elsewhere (`exclude_frozen_`); or the
            run, of which the newest that verifies is taken.
        name: The adapter, where several stand side by side and are saved.

    Raises:
        CheckpointError: It does not verify, or holds no adapters, or those of another name.

    Examples:
        >>> read_adapters("/does/not/exist")
        Traceback (most recent call last):
        trainkit.types.CheckpointError: find_checkpoint: there is no checkpoint in ...
    """
    path = find_checkpoint(checkpoint)
    facts = read_facts(path, needs=["adapters"])
    loras = tuple(Lora(**one) for one in facts["adapters"])
    stored = read_model_tensors(path)
    read = reader(stored)
    tensors = {own: read(own, x.shape, (0,) * len(x.shape)) for own, x in stored.items()}
    known = sorted({split_name(own)[1] for own in tensors if f".{CHILD}." in own})
    if len(known) != 1 and name not in known:
        raise CheckpointError(
            f"read_adapters: {path} holds the adapters {known or 'of none'}, and "
            f"{name or 'one'} was asked for",
            where=path,
            got=known,
            want=name,
        )
    chosen = name or known[0]
    loras = tuple(one for one in loras if one.name == chosen)
    parts: dict[str, dict[str, Tensor]] = {}
    for own, x in tensors.items():
        if f".{CHILD}." in own:
            matrix, which, key = split_name(own)
            if which == chosen:
                parts.setdefault(matrix, {})[key] = x
    held = {
        matrix: LowRankFactors(x["a"], x["b"], _spec_of(matrix, loras).scale, x.get("magnitude"))
        for matrix, x in parts.items()
    }
    whole = {own: x for own, x in tensors.items() if f".{CHILD}." not in own}
    return SavedAdapters(facts, loras, held, whole)


def _spec_of(matrix: str, loras: Sequence[Lora]) -> Lora:
    found = [one for one in loras if re.fullmatch(one.modules, matrix)]
    if len(found) != 1:
        raise CheckpointError(
            f"read_adapters: the facts of the run say {len(found)} times what the adapter of "
            f"{matrix} is",
            where=matrix,
        )
    return found[0]


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
        name: The adapter, where several stand side by side and are saved.
        family: The `model_type` of the base; by default that of its folder, or the first that
            computes the same.
        base: Where the base is, which the folder says; by default where it was.
        overwrite: Replace a folder that an earlier export wrote.

    Returns:
        {"folder", "files", "tensors", "bytes", "from"}.

    Raises:
        CheckpointError: As `read_adapters`.
        ConfigError: No family computes the decoder, PEFT has no place for an adapter (`to_peft`),
            or the folder is there already.

    Effects:
        Writes a folder.
    """
    path = find_checkpoint(checkpoint)
    saved = read_adapters(path, name=name)
    config = config_from_facts(read_facts(path, needs=["model"])["model"])
    base = base or saved.facts.get("base_from")
    known = _family(base, config, family)
    drops = {one.dropout for one in saved.loras}
    settings, tensors = to_peft(
        saved.held,
        _trained(saved.whole),
        known,
        config,
        base=base,
        rank_stabilised=all(one.rank_stabilised for one in saved.loras),
        dropout=drops.pop() if len(drops) == 1 else 0.0,
    )

    def read(own: str, shape: Sequence[int], offset: Sequence[int]) -> Tensor:
        return narrow_to_box(tensors[own], shape, offset)

    kinds = {own: str(x.dtype).removeprefix("torch.") for own, x in tensors.items()}
    stored = {own: Stored(kinds[own], tuple(x.shape), ()) for own, x in tensors.items()}
    beside = {CONFIG: orjson.dumps(settings, option=orjson.OPT_INDENT_2)}
    how: dict[str, Any] = {"shard_bytes": 1 << 62, "overwrite": overwrite, "stem": "adapter_model"}
    origin = describe_origin(path)
    return write_weights(stored, folder, read=read, extra_files=beside, origin=origin, **how)


def _family(source: str | None, config: DecoderConfig, name: str | None) -> Family:
    if name is not None:
        return get_family(name, where="family")
    return open_folder(source).family if source and is_hf_folder(source) else match_family(config)


def _trained(whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Leave out what steps have counted, and no optimizer trains."""
    return {
        own: x for own, x in whole.items() if not own.endswith((".router.load", ".router.bias"))
    }


def merge_run(checkpoint: Path | str, *, base: str | None = None) -> Weights:
    """Return `merge_weights` of a run, after its base has been found to be the one that it had.

    Of a base in few bits they are what these stand for, with the adapters added.

    Args:
        checkpoint: As for `read_adapters`.
        base: Where the base is; by default where it was.

    Raises:
        CheckpointError: As `read_adapters`; or the base is another one than the run's.
        ConfigError: Nobody says where the base is.

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
    shapes = parameter_shapes(config)
    frozen = {own: shape for own, shape in shapes.items() if own not in saved.whole}
    if saved.facts["quantized"]:  # its base is what the few bits stand for
        make_model = partial(Decoder, config)
        (model,) = build_trained_stages(path, make_model, solo_parallel(), [], base=source)
        return merge_weights(saved, round_weights(weights, get_quantizations(model)))
    want = saved.facts["base"]
    # the run has held it in fp32, or as it is
    if all(_hash_of(weights, frozen, kind) != want for kind in (torch.float32, None)):
        raise CheckpointError(
            f"merge_run: {source} is another base than the run's, whose hash is {want}",
            where=source,
            want=want,
            hint="name the one that the run began with: --base",
        )
    return merge_weights(saved, weights)


def _hash_of(
    weights: Weights, shapes: Mapping[str, Sequence[int]], dtype: torch.dtype | None
) -> str:
    """Return the hash of weights as `exclude_frozen_` knows a base, some rows at a time."""
    total = 0
    for own, whole in shapes.items():
        for shape, offset in split_into_row_boxes(tuple(whole), _AT_ONCE):
            values = weights(own, shape, offset)
            values = values if dtype is None else values.to(dtype)
            total += hash_tensor_box(f"model/{own}", values, shape=whole, offset=offset)
    return f"{total & MASK64:016x}"


def merge_weights(saved: SavedAdapters, base: Weights) -> Weights:
    """Return the weights of a base with what a run has learnt added, box by box.

    W + scale * B A, or what DoRA makes of its rows, in fp32 at least, rounded once to the base's
    dtype; for `build_stages`, or `hub.export_folder(read=...)`.

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

    def give(name: str, shape: Sequence[int], offset: Sequence[int]) -> Tensor:
        if name in saved.whole:
            return narrow_to_box(saved.whole[name], shape, offset)
        low = saved.held.get(name) or saved.held.get(name.removesuffix(".weight"))
        if low is None:
            return base(name, shape, offset)
        inputs = low.a.shape[-1]
        of_rows = (*shape[:-1], inputs), (*offset[:-1], 0)
        whole = base(name, *(of_rows if low.lengths is not None else (shape, offset)))
        wide = torch.promote_types(whole.dtype, torch.float32)
        *experts, rows, columns = map(slice, offset, map(sum, zip(offset, shape, strict=True)))
        a = low.a[(*experts, slice(None), slice(None) if low.lengths is not None else columns)]
        b = low.b[(*experts, rows)]
        total = whole.to(wide) + low.scale * (b.to(wide) @ a.to(wide))
        if low.lengths is not None:
            total *= (low.lengths[(*experts, rows)].to(wide) / total.norm(dim=-1)).unsqueeze(-1)
            total = total[..., columns]
        return total.to(whole.dtype)

    return listed(give, shapes_of(base)) if shapes_of(base) else give
