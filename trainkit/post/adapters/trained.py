"""A model as it was trained, whatever of it a run has kept: all of it, or adapters of a base."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainkit.parallel.parameters import get_local_box, get_named_parameters
from trainkit.parallel.stages import build_stages
from trainkit.parallel.transforms import Transform
from trainkit.post.adapters.base import exclude_frozen_, open_base_weights
from trainkit.post.adapters.frozen import quantized
from trainkit.post.adapters.lowrank import Lora
from trainkit.post.adapters.transform import lora
from trainkit.types import CheckpointError, ModelTransform, ParallelState, Stages
from trainkit.weights.checkpoint.load import load_weights, read_facts
from trainkit.weights.checkpoint.reading import reader
from trainkit.weights.checkpoint.sources import read_model_tensors
from trainkit.weights.hub.folder import is_hf_folder


def build_trained_stages(
    path: Path | str,
    make_model: Callable[[], nn.Module],
    ps: ParallelState,
    plan: Sequence[ModelTransform],
    *,
    base: Path | str | None = None,
    **how: Any,
) -> Stages:
    """Return this rank's stages of a trained model, with its weights in them.

    Of a run of adapters these are the base, in as few bits as it was held in, and the adapters
    beside it, so the model computes what it did when it was trained.

    Args:
        path: A checkpoint of a run, or a Hugging Face folder, as `hub.open_model` finds it.
        make_model: Makes the whole model; see `build_stages`.
        ps: The layout.
        plan: The transforms but for `quantized` and `lora`, which the run itself says.
        base: Where the base of adapters is; by default where it was.
        how: What `build_stages` takes else.

    Raises:
        CheckpointError: The weights are not there, or the base is no longer that of the run.

    Effects:
        Reads files; communicates on `ps.world`.

    Examples:
        >>> from trainkit.mesh import solo_parallel
        >>> build_trained_stages("/does/not/exist", lambda: nn.Linear(1, 1), solo_parallel(), [])
        Traceback (most recent call last):
        trainkit.types.CheckpointError: find_checkpoint: there is no checkpoint in ...
    """
    facts: Mapping[str, Any] = {} if is_hf_folder(path) else _facts(path)
    source = base or facts["base_from"] if "base" in facts else path
    weights = open_base_weights(source, axis=ps.world)
    if "base" not in facts:
        return build_stages(make_model, ps, plan, weights=weights, **how)
    with torch.device("meta"):
        known = {name for name, _ in make_model().named_parameters()}
    own = _own_plan(path, facts, known)
    stages = build_stages(make_model, ps, [*own, *plan], weights=weights, **how)
    found = exclude_frozen_(stages, ps, source=source)["base"]
    if found != facts["base"]:
        raise CheckpointError(
            f"build_trained_stages: what is in {source} now is not the base of {path}",
            where=source,
            got=found,
            want=facts["base"],
            hint="put the base back; the run's config.toml says what it began with",
        )
    load_weights(path, stages, axis=ps.world)
    _take_means_(Path(path), stages)
    return stages


@torch.no_grad()
def _take_means_(path: Path, stages: Sequence[nn.Module]) -> None:
    """Put what was evaluated in the place of what was trained, where a checkpoint has a mean."""
    stored = read_model_tensors(path)
    read = reader(stored)
    for name, p in get_named_parameters(stages).items():
        if p.requires_grad and name in stored:
            box = get_local_box(p)
            box.local.copy_(read(name, box.local.shape, box.offset))


def _facts(path: Path | str) -> Mapping[str, Any]:
    return read_facts(path) if (Path(path) / "state.json").is_file() else {}


def _own_plan(path: Path | str, facts: Mapping[str, Any], known: Container[str]) -> list[Transform]:
    """Return what puts a run's adapters in a model, and what it has trained whole of `known`."""
    names = (name for name in read_model_tensors(Path(path)) if name in known)
    trained = "|".join(map(re.escape, names)) or None
    by_name: dict[str, list[Lora]] = {}
    for one in facts["adapters"]:
        by_name.setdefault(one["name"], []).append(Lora(**one))
    held = [
        quantized(form, modules="|".join(map(re.escape, names)))
        for form, names in facts["quantized"].items()
    ]
    return [*held, *(lora(*loras, trained=trained) for loras in by_name.values())]
