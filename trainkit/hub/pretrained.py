"""What has been trained before, by a run of ours or by others, opened by one word."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import attrs

from trainkit.chat import has_template
from trainkit.checkpoint import load
from trainkit.checkpoint.manifest import find_checkpoint, list_checkpoints
from trainkit.files import say_on_stderr
from trainkit.hub.folder import is_folder, open_folder
from trainkit.mesh import world_size
from trainkit.models.config import DecoderConfig
from trainkit.models.sizes import config_from_facts
from trainkit.tokenizers import tokenizer_hash
from trainkit.types import ConfigError, Tokenizer

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
        template: The name of its chat template, for `chat.find_template`; None where it has learned
            no conversations.
        trained_with: The `tokenizer_hash` of the tokenizer that a run was trained with.
    """

    path: Path
    config: DecoderConfig
    tokenizer: str
    context: int
    template: str | None = None
    trained_with: str | None = None


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
    if is_folder(path):
        there = open_folder(path)
        template = str(path) if has_template(path) else None
        return Pretrained(path, there.config, str(path), there.context, template)
    path = find_checkpoint(path, tell=tell)
    facts = load.read_facts(path, needs=_NEEDS)
    model, tokenizer, context = (facts[name] for name in _NEEDS)
    known = facts.get("config.template"), facts.get("tokenizer")
    return Pretrained(path, config_from_facts(model), tokenizer, context, *known)


def check_tokenizer(found: Pretrained, tokenizer: Tokenizer) -> None:
    """Refuse a tokenizer whose ids are not those of a decoder.

    Args:
        found: The decoder.
        tokenizer: The tokenizer that it is to be used with.

    Raises:
        ConfigError: The embedding has fewer rows than the tokenizer has ids, or a run was trained
            with another tokenizer.

    Examples:
        >>> from trainkit.models import decoder_config
        >>> from trainkit.tokenizers import byte_tokenizer
        >>> tiny = Pretrained(Path("a"), decoder_config("tiny", vocab_size=8), "bytes", 32)
        >>> check_tokenizer(tiny, byte_tokenizer())
        Traceback (most recent call last):
        ...
        trainkit.types.ConfigError: the tokenizer has 258 ids, and the embedding of a has 8 rows
    """
    own, size, rows = tokenizer_hash(tokenizer), tokenizer.vocab_size, found.config.vocab_size
    hint = "take its own, which stands beside it, or is in the run's config.toml"
    if found.trained_with not in (None, own):
        what = f"{found.path} was trained with another tokenizer than this one"
        raise ConfigError(what, where="tokenizer", got=own, want=found.trained_with, hint=hint)
    if size > rows:
        what = f"the tokenizer has {size} ids, and the embedding of {found.path} has {rows} rows"
        raise ConfigError(what, where="tokenizer", got=size, want=rows, hint=hint)


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
