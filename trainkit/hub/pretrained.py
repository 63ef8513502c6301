"""What has been trained before, by a run of ours or by others, opened by one word."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import attrs
from torch import nn

from trainkit.checkpoint import load
from trainkit.checkpoint.manifest import find_checkpoint, list_checkpoints
from trainkit.files import say_on_stderr
from trainkit.hub import folder
from trainkit.mesh import world_size
from trainkit.models.config import DecoderConfig
from trainkit.models.sizes import config_from_facts
from trainkit.types import SOLO, Axis, ConfigError

_NEEDS = ("model", "config.tokenizer", "config.row_length")
_STEPS = ("--steps", "250", "--schedule-steps", "250", "--eval-every", "0")


@attrs.frozen(eq=False)
class Pretrained:
    """A decoder that has been trained: all that is known of it but its weights.

    Attributes:
        path: A checkpoint of a run that verifies, or a Hugging Face folder.
        config: The decoder.
        tokenizer: The name of its tokenizer, for `open_tokenizer`.
        context: The most tokens of a row that it has been trained on.
        template: The name of its chat template; None where it has learned no conversations.
    """

    path: Path
    config: DecoderConfig
    tokenizer: str
    context: int
    template: str | None = None


def open_pretrained(path: Path | str, *, tell: Callable[[str], None] = say_on_stderr) -> Pretrained:
    """Return what a run, a checkpoint or a Hugging Face folder holds; no weights are read.

    Args:
        path: A run, for its newest checkpoint that verifies; a checkpoint; or a folder.
        tell: Called with one sentence about each checkpoint passed over.

    Raises:
        CheckpointError: There is none, or its facts lack a tokenizer, a model or a row length.
        ConfigError: As `open_folder`.

    Examples:
        >>> open_pretrained("/does/not/exist")
        Traceback (most recent call last):
        ...
        trainkit.types.CheckpointError: find_checkpoint: there is no checkpoint in /does/not/exist
    """
    path = Path(path)
    if folder.is_folder(path):
        there = folder.open_folder(path)
        return Pretrained(path, there.config, str(path), there.context)
    path = find_checkpoint(path, tell=tell)
    facts = load.read_facts(path, needs=_NEEDS)
    model, tokenizer, context = (facts[name] for name in _NEEDS)
    template = facts.get("config.template")
    return Pretrained(path, config_from_facts(model), tokenizer, context, template)


def load_pretrained(found: Pretrained, stages: Sequence[nn.Module], *, axis: Axis = SOLO) -> None:
    """Read the weights of what `open_pretrained` has found into stages, in any layout.

    Args:
        found: What to read.
        stages: This rank's stages of a decoder of `found.config`.
        axis: The ranks that call this together, `ps.world`.

    Raises:
        CheckpointError: As `hub.load_weights` or `checkpoint.load_weights`.

    Effects:
        Writes the parameters of `stages`; communicates on `axis`.
    """
    room = folder if folder.is_folder(found.path) else load
    room.load_weights(found.path, stages, axis=axis)


def base_run(recipes: Path, *, runs: Path = Path("runs")) -> Path:
    """Return a run to begin with: `runs/pretrain`, or `runs/base`, which is trained now if need be.

    This is what a recipe does whose user names nothing to begin with. The small base takes a minute
    on two cores; a second call finds it there, or goes on with it where it was stopped.

    Args:
        recipes: The folder in which `pretrain.py` is.
        runs: Where runs are.

    Raises:
        ConfigError: There is neither, and this is one process of several: training is started by
            one process alone.
        SystemExit: Training ended early, with its exit code; it has said why.

    Effects:
        May run `pretrain.py` in a process of its own, which prints on this one's stderr.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as name:
        ...     place = Path(name)
        ...     (place / "pretrain/checkpoints/step_00000001").mkdir(parents=True)
        ...     base_run(Path("recipes"), runs=place) == place / "pretrain"
        True
    """
    pretrain, base = runs / "pretrain", runs / "base"
    if list_checkpoints(pretrain / "checkpoints"):
        return pretrain
    if (base / "final.json").is_file():
        return base
    if world_size() > 1:
        raise ConfigError(
            f"base_run: there is nothing to begin with: no run in {pretrain} or {base}",
            hint="python recipes/pretrain.py trains one; or name a run or a Hugging Face folder",
        )
    say_on_stderr(f"training a small base first, into {base}: about a minute")
    command = [sys.executable, str(recipes / "pretrain.py"), "--out", str(base), *_STEPS]
    ended = subprocess.run(command, stdout=2, check=False)  # noqa: S603 -- ours
    if ended.returncode:
        raise SystemExit(ended.returncode)
    return base
