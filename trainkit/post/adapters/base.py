"""The base of adapters: no checkpoint holds it; it is known by its hash, and by where it was."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import orjson
from torch import nn

from trainkit.collectives import all_gather_objects, run_on_all_ranks
from trainkit.parallel.materialize import listed
from trainkit.parallel.parameters import get_named_parameters, mark_base_, modules_of
from trainkit.post.adapters.frozen import get_quantizations
from trainkit.post.adapters.lowrank import MERGE, adapters_of
from trainkit.types import SOLO, Axis, CheckpointError, ParallelState, Weights
from trainkit.weights.checkpoint.load import read_facts
from trainkit.weights.checkpoint.manifest import WEIGHTS, find_checkpoint, read_format
from trainkit.weights.checkpoint.reading import reader
from trainkit.weights.checkpoint.run_state import hash_base
from trainkit.weights.checkpoint.sources import open_weights, read_model_tensors
from trainkit.weights.hub.folder import is_hf_folder, open_folder, open_folder_weights


def exclude_frozen_(
    stages: Sequence[nn.Module] | nn.Module, ps: ParallelState, *, source: Path | str | None
) -> dict[str, Any]:
    """Leave what is frozen out of checkpoints, and return facts by which it is known again.

    For when the stages are built and filled. Checkpoints of the run then hold what is trained
    alone, and `resume` refuses another base, by the fact "base". To go on, build the stages with
    `open_base_weights(source)` again, and call this again.

    Args:
        stages: This rank's stages.
        ps: The layout.
        source: Where the base is, a Hugging Face folder or a run: a fact too, "base_from", which a
            run may be continued with another value of (`Changes(free=["base_from"])`).

    Returns:
        {"base": the hash of what is frozen, the same in every layout, "base_from": source,
        "adapters": the fields of each `Lora`, "quantized": names of modules by their format}.

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
    named = get_named_parameters(stages)
    for p in named.values():
        mark_base_(p, is_base=not p.requires_grad)
    facts = adapter_facts(stages, axis=ps.world)
    return {"base": hash_base(stages, ps), "base_from": source and str(source), **facts}


def adapter_facts(stages: Sequence[nn.Module] | nn.Module, *, axis: Axis) -> dict[str, Any]:
    """Return what adapters a model has, and what of it is in few bits.

    For a run that keeps its base in its own checkpoints too (ReLoRA).

    Effects:
        Communicates on `axis`, which has all stages.

    Examples:
        >>> adapter_facts([nn.Linear(1, 1)], axis=SOLO)
        {'adapters': [], 'quantized': {}}
    """
    stages = modules_of(stages)
    own = [
        attrs.asdict(adapter.spec)
        for _, _, beside in adapters_of(stages)
        for adapter in beside.values()
    ]
    held = {name: x.form for stage in stages for name, x in get_quantizations(stage).items()}
    told: dict[bytes, Any] = {}
    forms: dict[str, set[str]] = {}
    for specs, packed in all_gather_objects([own, held], axis):
        told |= {orjson.dumps(one): one for one in specs}
        for name, form in packed.items():
            forms.setdefault(form, set()).add(name.rpartition(".")[0])
    names = {form: sorted(forms[form]) for form in sorted(forms)}
    return {"adapters": [told[key] for key in sorted(told)], "quantized": names}


def open_base_weights(path: Path | str, *, axis: Axis = SOLO) -> Weights:
    """Return the weights of a Hugging Face folder, of a run or of an exported folder.

    Args:
        path: The folder; a checkpoint; or a run, of which the newest checkpoint that verifies is
            taken.
        axis: The ranks that call this together.

    Returns:
        A `Weights` function for `build_stages`, which reads box by box.

    Raises:
        CheckpointError: It is not there, does not verify, or holds adapters alone, whose base is
            elsewhere.
        ConfigError: The folder is of a family that trainkit does not compute.

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
    said = run_on_all_ranks(lambda: str(find_checkpoint(path)) if axis.index == 0 else "", axis)[0]
    facts = read_facts(said)
    if "base" in facts:
        raise CheckpointError(
            f"open_base_weights: {said} holds only adapters, of a base at {facts.get('base_from')}",
            where=said,
            hint=MERGE,
        )
    held = read_model_tensors(Path(said))
    return listed(reader(held), {name: stored.shape for name, stored in held.items()})
