"""The weights that a run begins with, found again by their hash where the run goes on."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
from torch import nn

from trainkit.types import CheckpointError, ConfigError, ParallelState
from trainkit.weights.checkpoint.manifest import MANIFEST, list_checkpoints, outline
from trainkit.weights.checkpoint.safe_files import read_json
from trainkit.weights.checkpoint.tensors import weights_hash

_FACT = "first weights"


@attrs.frozen
class InitialWeights:
    """Where the weights are that a run begins with, or began with.

    Attributes:
        source: A run, a checkpoint or a Hugging Face folder; None for new weights.
        own: The run or checkpoint that a run goes on from, where `source` is not to be read again:
            its weights replace whatever the stages are filled with.
        facts: What the run has saved of its first weights, where `source` is not read.
    """

    source: Path | None
    own: Path | None = None
    facts: Mapping[str, Any] = attrs.field(factory=dict)

    @property
    def path(self) -> Path | None:
        """What to fill the stages with."""
        return self.own or self.source

    def resolved(self, path: Path) -> InitialWeights:
        """Return the same, with the checkpoint that `open_model` has found at `path`."""
        return attrs.evolve(self, own=path) if self.own else attrs.evolve(self, source=path)


def find_initial_weights(
    init: Path | str | None, *, run_dir: Path | str, request: str | Path = "auto"
) -> InitialWeights:
    """Find the weights that a run begins with, or those that it began with.

    A run that goes on needs its first weights only to compare them with those that are asked for,
    and, where it trains adapters, as their base. They may have been moved since: their hash counts,
    see `hash_initial_weights`. Without `init` they are those that the run has recorded.

    Args:
        init: A run, a checkpoint or a Hugging Face folder that was asked for; None for none.
        run_dir: The run directory.
        request: What the run goes on from, as for `checkpoint.resume`.

    Raises:
        ConfigError: The run goes on, and `init` is not there.

    Examples:
        >>> find_initial_weights("runs/pretrain", run_dir="/does/not/exist").source
        PosixPath('runs/pretrain')
    """
    saved, facts = _checkpoint_to_resume(Path(run_dir), request)
    if saved is None:
        return InitialWeights(None if init is None else Path(init))
    recorded = facts.get("base_from") or facts.get("config.init")
    recorded = None if recorded is None else Path(recorded)
    known = {name: value for name, value in facts.items() if name == _FACT}
    is_whole = "base" not in facts  # adapters need their base, of which no checkpoint holds a copy
    own = (Path(run_dir) if request == "auto" else saved) if is_whole else None
    if init is None:
        return InitialWeights(recorded, own, known)
    if recorded is not None and not _has_weights(recorded) and _names(Path(init), recorded):
        return InitialWeights(recorded, own, known)  # a base that was deleted leaves its run alone
    if not Path(init).exists():
        raise ConfigError(
            f"--init: there is no {init}, and the run in {run_dir} began with {recorded}",
            where="init",
            got=str(init),
            want=str(recorded),
            hint="name where those weights are now, or leave --init out: the run goes on with its "
            "own; with other weights begin another run: --out",
        )
    if is_whole and _FACT not in facts:  # saved before there was such a fact
        return InitialWeights(Path(init), own)
    return InitialWeights(_same_checkpoint(Path(init), recorded))


def hash_initial_weights(
    first: InitialWeights, stages: Sequence[nn.Module] | nn.Module, ps: ParallelState
) -> dict[str, Any]:
    """Return the fact by which `resume` refuses other first weights than those of the run.

    For when the stages are built and filled with `first.source`, or, where that is not read again,
    with anything.

    Returns:
        {"first weights": their hash, the same in every layout, or None for new weights}; or what
        the run has saved of it.

    Effects:
        Hashes the parameters; communicates on `ps.world`, and waits.

    Examples:
        >>> from trainkit.mesh import solo_parallel
        >>> hash_initial_weights(InitialWeights(None), [nn.Linear(1, 1)], solo_parallel())
        {'first weights': None}
    """
    if first.own is not None:
        return dict(first.facts)
    return {_FACT: None if first.source is None else weights_hash(stages, ps)}


def read_resume_facts(run_dir: Path | str, request: str | Path = "auto") -> Mapping[str, Any]:
    """Return the facts of the checkpoint that a run will go on from; none where it begins.

    Its tensors are not looked at. Of a checkpoint that turns out to be damaged there, `resume`
    takes an older one of the run, with the same facts but for what has happened since.

    Args:
        run_dir: The run directory.
        request: As for `resume`.

    Examples:
        >>> read_resume_facts("/does/not/exist")
        {}
    """
    return _checkpoint_to_resume(Path(run_dir), request)[1]


def _checkpoint_to_resume(
    run_dir: Path, request: str | Path
) -> tuple[Path | None, Mapping[str, Any]]:
    """Return the checkpoint that will be gone on from and its facts; of a damaged one neither."""
    if request == "never":
        return None, {}
    for path in list_checkpoints(run_dir / "checkpoints") if request == "auto" else [Path(request)]:
        problems, manifest = outline(path)
        if problems:
            continue
        with contextlib.suppress(CheckpointError, KeyError, TypeError):
            want = manifest["files"]["state.json"]
            return path, read_json(path / "state.json", want=want)["facts"]
    return None, {}


def _has_weights(path: Path) -> bool:
    is_filled = next(path.glob("*.safetensors"), None) is not None
    return is_filled or bool(list_checkpoints(path / "checkpoints"))


def _names(init: Path, recorded: Path) -> bool:
    """Say whether it is the path that was recorded, or the run whose checkpoint that was."""
    return init.resolve() in (recorded.resolve(), recorded.resolve().parent.parent)


def _same_checkpoint(init: Path, recorded: Path | None) -> Path:
    """Return of a run, which may have gone on since, the checkpoint of the recorded name."""
    if recorded is None or not (init / "checkpoints" / recorded.name / MANIFEST).exists():
        return init
    return init / "checkpoints" / recorded.name
