"""The initial weights of a run, which a resumed run recognizes by their hash."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
from torch import nn

from trainkit.types import CheckpointError, ConfigError, ParallelState, TrainkitError
from trainkit.weights.checkpoint.bucket_runs import fetch_model, fetch_request, fetch_run
from trainkit.weights.checkpoint.manifest import MANIFEST, inspect_files, list_checkpoints
from trainkit.weights.checkpoint.run_state import hash_weights
from trainkit.weights.checkpoint.safe_files import read_json

_FACT = "first weights"
TOWER = "tower"
"""The fact with the multimodal folder whose text tower a run trains, for its export."""


@attrs.frozen
class InitialWeights:
    """Where the initial weights of a run are.

    Attributes:
        source: A run, a checkpoint or a Hugging Face folder; None for random initial weights.
        resume_from: The run or checkpoint to resume from, where `source` need not be read again:
            its weights replace whatever the stages are filled with.
        facts: What the run has saved about its initial weights, for when `source` is not read.
    """

    source: Path | None
    resume_from: Path | None = None
    facts: Mapping[str, Any] = attrs.field(factory=dict)

    @property
    def path(self) -> Path | None:
        """The weights to fill the stages with."""
        return self.resume_from or self.source

    def resolved(self, path: Path) -> InitialWeights:
        """Return a copy with the checkpoint that `open_model` found at `path`."""
        return (
            attrs.evolve(self, resume_from=path)
            if self.resume_from
            else attrs.evolve(self, source=path)
        )


def find_initial_weights(
    init: Path | str | None,
    *,
    run_dir: Path | str,
    request: str | Path = "auto",
) -> InitialWeights:
    """Find the initial weights of a run, whether it starts or resumes.

    A resumed run needs its initial weights only to compare them with the requested ones, and, if it
    trains adapters, as their base. They may have been moved since: only their hash counts, see
    `hash_initial_weights`. Without `init` they are the ones that the run has recorded.

    Args:
        init: The requested run, checkpoint or Hugging Face folder, if any; or its URL.
        run_dir: The run directory; of a URL the newest checkpoint is fetched (`fetch_run`).
        request: What the run resumes from, as for `checkpoint.resume`.

    Raises:
        ConfigError: The run resumes, and `init` does not exist.

    Examples:
        >>> find_initial_weights("runs/pretrain", run_dir="/does/not/exist").source
        PosixPath('runs/pretrain')
    """
    run_dir, request = fetch_run(run_dir, request), fetch_request(request)
    init = None if init is None else fetch_model(init)
    checkpoint, facts = _find_checkpoint_to_resume(run_dir, request)
    if checkpoint is None:
        return InitialWeights(None if init is None else Path(init))
    # Runs of adapters record their base, other runs the source of their initial weights. Either may
    # have been deleted since.
    recorded = facts.get("base_from") or facts.get("config.init")
    if recorded is not None:
        try:
            recorded = fetch_model(recorded)
        except TrainkitError:  # as a path that is gone
            recorded = Path(recorded)
    saved_facts = {name: value for name, value in facts.items() if name in (_FACT, TOWER)}
    # Checkpoints of adapters do not contain their base, so it must be read again.
    is_full_model = "base" not in facts
    resume_from = (run_dir if request == "auto" else checkpoint) if is_full_model else None
    if init is None:
        return InitialWeights(recorded, resume_from, saved_facts)
    if recorded is not None:
        has_weights = any(recorded.glob("*.safetensors"))
        has_weights = has_weights or bool(list_checkpoints(recorded / "checkpoints"))
        # `init` may also name the run of the recorded checkpoint.
        same = (recorded.resolve(), recorded.resolve().parent.parent)
        # A run survives the deletion of its initial weights: its checkpoints replace them.
        if not has_weights and Path(init).resolve() in same:
            return InitialWeights(recorded, resume_from, saved_facts)
    if not Path(init).exists():
        raise ConfigError(
            f"--init: there is no {init}, and the run in {run_dir} began with {recorded}",
            where="init",
            got=str(init),
            want=str(recorded),
            hint="name where those weights are now, or leave --init out: the run resumes with its "
            "own; to train other weights, start another run: --out",
        )
    if is_full_model and _FACT not in facts:  # an older checkpoint, without that fact
        return InitialWeights(Path(init), resume_from)
    source = Path(init)
    if recorded is not None and (source / "checkpoints" / recorded.name / MANIFEST).exists():
        # `init` is a run that may have trained on since: take the checkpoint of that time.
        source = source / "checkpoints" / recorded.name
    return InitialWeights(source)


def hash_initial_weights(
    first: InitialWeights,
    stages: Sequence[nn.Module] | nn.Module,
    ps: ParallelState,
) -> dict[str, Any]:
    """Return the fact by which `resume` detects other initial weights than those of the run.

    Call it once the stages are built and filled with `first.source`; where that is not read again,
    they may hold anything.

    Returns:
        {"first weights": their hash, equal in every layout, or None for random weights}; or what
        the run has saved about them.

    Effects:
        Hashes the parameters; communicates on `ps.world`, and waits.

    Examples:
        >>> from trainkit.mesh import solo_parallel
        >>> hash_initial_weights(InitialWeights(None), [nn.Linear(1, 1)], solo_parallel())
        {'first weights': None}
    """
    if first.resume_from is not None:  # the stages were not filled with the initial weights
        return dict(first.facts)
    return {_FACT: None if first.source is None else hash_weights(stages, ps)}


def read_resume_facts(run_dir: Path | str, request: str | Path = "auto") -> Mapping[str, Any]:
    """Return the facts of the checkpoint that a run will resume from; none if it starts.

    Its tensors are not verified. If they turn out to be damaged, `resume` takes an older checkpoint
    of the run, whose facts differ only by what has happened since.

    Args:
        run_dir: The run directory; of a URL the newest checkpoint is fetched (`fetch_run`).
        request: As for `resume`.

    Examples:
        >>> read_resume_facts("/does/not/exist")
        {}
    """
    return _find_checkpoint_to_resume(fetch_run(run_dir, request), fetch_request(request))[1]


def _find_checkpoint_to_resume(
    run_dir: Path, request: str | Path
) -> tuple[Path | None, Mapping[str, Any]]:
    """Return the first checkpoint with a valid manifest, and its facts; None and {} if none has."""
    if request == "never":
        return None, {}
    # Only manifests are checked here. Hashing tensors takes minutes, and `resume` does it anyway.
    for path in list_checkpoints(run_dir / "checkpoints") if request == "auto" else [Path(request)]:
        problems, manifest = inspect_files(path)
        if problems:
            continue
        with contextlib.suppress(CheckpointError, KeyError, TypeError):
            want = manifest["files"]["state.json"]
            return path, read_json(path / "state.json", want=want)["facts"]
    return None, {}
