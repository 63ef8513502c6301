"""Build a trained model from a checkpoint of all its weights, or of adapters and their base."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainkit.parallel.name_patterns import join_names
from trainkit.parallel.parameters import get_local_box, get_named_parameters
from trainkit.parallel.stages import build_stages
from trainkit.parallel.transforms import Transform
from trainkit.post.adapters.base import exclude_frozen_, open_base_weights
from trainkit.post.adapters.frozen import quantized
from trainkit.post.adapters.lowrank import Lora
from trainkit.post.adapters.transform import lora
from trainkit.types import CheckpointError, ModelTransform, ParallelState, Stages
from trainkit.weights.checkpoint.load import load_weights, read_facts
from trainkit.weights.checkpoint.reading import make_weights_reader
from trainkit.weights.checkpoint.sources import read_model_tensors
from trainkit.weights.hub.folder import is_hf_folder


def build_trained_stages(
    path: Path | str,
    make_model: Callable[[], nn.Module],
    ps: ParallelState,
    plan: Sequence[ModelTransform],
    *,
    base: Path | str | None = None,
    **options: Any,
) -> Stages:
    """Return this rank's stages of a trained model, with its weights in them.

    For a run of adapters, the base is quantized as in training and the adapters are added, so the
    model computes what it computed in training.

    Args:
        path: A checkpoint of a run, or a Hugging Face folder, as `hub.open_model` finds it.
        make_model: Makes the whole model; see `build_stages`.
        ps: The layout.
        plan: The transforms of the model, without `quantized` and `lora`: those come from the
            facts of the run.
        base: The path of the adapters' base; by default the run's.
        options: Further arguments of `build_stages`.

    Raises:
        CheckpointError: The weights are missing, or the base is not that of the run.

    Effects:
        Reads files; communicates on `ps.world`.

    Examples:
        >>> from trainkit.mesh import solo_parallel
        >>> build_trained_stages("/does/not/exist", lambda: nn.Linear(1, 1), solo_parallel(), [])
        Traceback (most recent call last):
        trainkit.types.CheckpointError: find_checkpoint: there is no checkpoint in ...
    """
    # Exported folders and those of Hugging Face have no facts, and are whole models.
    has_facts = not is_hf_folder(path) and (Path(path) / "state.json").is_file()
    facts: Mapping[str, Any] = read_facts(path) if has_facts else {}
    source = (base or facts["base_from"]) if "base" in facts else path
    weights = open_base_weights(source, axis=ps.world)
    if "base" not in facts:
        return build_stages(make_model, ps, plan, weights=weights, **options)
    adapters = _make_adapter_plan(path, facts, make_model)
    stages = build_stages(make_model, ps, [*adapters, *plan], weights=weights, **options)
    # Codes and scales depend on the values alone, so a quantized base has the run's hash again.
    base_hash = exclude_frozen_(stages, ps, source=source)["base"]
    if base_hash != facts["base"]:
        raise CheckpointError(
            f"build_trained_stages: the weights in {source} are not the base of {path}",
            where=source,
            got=base_hash,
            want=facts["base"],
            hint="restore the base; the run's config.toml names the one it was started with",
        )
    load_weights(path, stages, axis=ps.world)
    # A run that averages parameters evaluated the averages, which `read_model_tensors` prefers, but
    # `load_weights` has restored the parameters themselves.
    stored = read_model_tensors(Path(path))
    read = make_weights_reader(stored)
    with torch.no_grad():
        for name, p in get_named_parameters(stages).items():
            if p.requires_grad and name in stored:
                box = get_local_box(p)
                box.local.copy_(read(name, box.local.shape, box.offset))
    return stages


def _make_adapter_plan(
    path: Path | str, facts: Mapping[str, Any], make_model: Callable[[], nn.Module]
) -> list[Transform]:
    """Return the transforms that quantize a base and add a run's adapters."""
    with torch.device("meta"):
        base_names = {name for name, _ in make_model().named_parameters()}
    # A checkpoint of adapters has a parameter of the model only if the run trained it in full.
    full = [name for name in read_model_tensors(Path(path)) if name in base_names]
    trained = join_names(full) if full else None
    by_name: dict[str, list[Lora]] = {}
    for one in facts["adapters"]:
        by_name.setdefault(one["name"], []).append(Lora(**one))
    quantizations = [
        quantized(form, modules=join_names(names)) for form, names in facts["quantized"].items()
    ]
    # `quantized` takes plain layers alone, so it comes before adapters.
    return [*quantizations, *(lora(*loras, trained=trained) for loras in by_name.values())]
