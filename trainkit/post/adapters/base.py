"""The base of adapters: checkpoints leave it out, and identify it by its hash and its path."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import orjson
from torch import nn

from trainkit.collectives import all_gather_objects, run_on_all_ranks
from trainkit.parallel.materialize import attach_shapes
from trainkit.parallel.parameters import get_named_parameters, mark_base_, modules_of
from trainkit.post.adapters.frozen import get_quantizations
from trainkit.post.adapters.lowrank import MERGE, adapters_of
from trainkit.types import SOLO, Axis, CheckpointError, ParallelState, Weights
from trainkit.weights.checkpoint.load import read_facts
from trainkit.weights.checkpoint.manifest import WEIGHTS, find_checkpoint, read_format
from trainkit.weights.checkpoint.reading import make_weights_reader
from trainkit.weights.checkpoint.run_state import hash_base
from trainkit.weights.checkpoint.sources import open_weights, read_model_tensors
from trainkit.weights.hub.folder import is_hf_folder, open_folder, open_folder_weights


def exclude_frozen_(
    stages: Sequence[nn.Module] | nn.Module, ps: ParallelState, *, source: Path | str | None
) -> dict[str, Any]:
    """Exclude frozen parameters from checkpoints, and return facts that identify them.

    Call this once the stages are built and filled. Checkpoints of the run then hold trained
    parameters alone, and `resume` refuses another base, by the fact "base". To resume, build the
    stages with `open_base_weights(source)` again, and call this again.

    Args:
        stages: This rank's stages.
        ps: The layout.
        source: The path of the base, a Hugging Face folder or a run: the fact "base_from", which a
            resumed run may change (`ResumeRules(allow=["base_from"])`).

    Returns:
        {"base": a hash of the frozen parameters, the same in every layout, "base_from": source,
        "adapters": the fields of each `Lora`, "quantized": the names of modules by format}.

    Effects:
        Marks the frozen parameters; hashes them; communicates on `ps.world`.

    Examples:
        >>> from trainkit.mesh import solo_parallel
        >>> model = nn.Linear(2, 2).requires_grad_(False)
        >>> facts = exclude_frozen_([model], solo_parallel(), source="runs/pretrain")
        >>> len(facts["base"]), facts["base_from"]
        (16, 'runs/pretrain')
    """
    stages = modules_of(stages)
    # Both ways: an earlier call may have marked a parameter that is trained now.
    for p in get_named_parameters(stages).values():
        mark_base_(p, is_base=not p.requires_grad)
    facts = adapter_facts(stages, axis=ps.world)
    return {"base": hash_base(stages, ps), "base_from": source and str(source), **facts}


def adapter_facts(stages: Sequence[nn.Module] | nn.Module, *, axis: Axis) -> dict[str, Any]:
    """Return facts about a model's adapters and its quantized modules.

    For a run whose own checkpoints include the base (ReLoRA).

    Effects:
        Communicates on `axis`, whose ranks must have all stages.

    Examples:
        >>> adapter_facts([nn.Linear(1, 1)], axis=SOLO)
        {'adapters': [], 'quantized': {}}
    """
    stages = modules_of(stages)
    local_loras = [
        attrs.asdict(adapter.spec)
        for _, _, adapters in adapters_of(stages)
        for adapter in adapters.values()
    ]
    local_formats = {
        name: spec.form for stage in stages for name, spec in get_quantizations(stage).items()
    }
    # Ranks with other pipeline stages have other modules.
    by_json: dict[bytes, Any] = {}  # the same specification may come from several ranks
    modules: dict[str, set[str]] = {}
    for loras, formats in all_gather_objects([local_loras, local_formats], axis):
        by_json |= {orjson.dumps(one): one for one in loras}
        for name, form in formats.items():
            modules.setdefault(form, set()).add(name.rpartition(".")[0])
    return {
        "adapters": [by_json[key] for key in sorted(by_json)],
        "quantized": {form: sorted(modules[form]) for form in sorted(modules)},
    }


def open_base_weights(path: Path | str, *, axis: Axis = SOLO) -> Weights:
    """Open the weights of a Hugging Face folder, a run or an exported folder.

    Args:
        path: The folder; a checkpoint; or a run, whose newest checkpoint that verifies is read.
        axis: The ranks that call this together.

    Returns:
        A `Weights` function for `build_stages` that reads one box at a time.

    Raises:
        CheckpointError: The weights are missing, do not verify, or are adapters without their base.
        ConfigError: trainkit has no model of the folder's family.

    Effects:
        Reads and hashes files; communicates on `axis`.

    Examples:
        >>> open_base_weights("/does/not/exist")
        Traceback (most recent call last):
        trainkit.types.CheckpointError: find_checkpoint: there is no checkpoint in ...
    """
    if is_hf_folder(path):
        return open_folder_weights(open_folder(path), axis=axis)
    if read_format(Path(path)) == WEIGHTS:
        return open_weights(path, axis=axis)
    # One rank searches: a checkpoint that appears meanwhile must not divide the ranks.
    checkpoint = run_on_all_ranks(
        lambda: str(find_checkpoint(path)) if axis.index == 0 else "", axis
    )[0]
    facts = read_facts(checkpoint)
    if "base" in facts:  # by exclude_frozen_: the base is not among the run's tensors
        raise CheckpointError(
            f"open_base_weights: {checkpoint} holds only adapters, of a base at "
            f"{facts.get('base_from')}",
            where=checkpoint,
            hint=MERGE,
        )
    stored = read_model_tensors(Path(checkpoint))
    # With their shapes `build_stages` checks that the model takes every tensor.
    return attach_shapes(make_weights_reader(stored), {name: x.shape for name, x in stored.items()})
