"""A model to use: a run, a checkpoint or a Hugging Face folder, known before weights are read."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import attrs

from trainkit.files import say_on_stderr
from trainkit.mesh import get_world_size
from trainkit.models.config import DecoderConfig
from trainkit.models.decoder_sizes import config_from_facts
from trainkit.text.chat import locate_template
from trainkit.text.tokenizers import ByteTokenizer, HFTokenizer, open_tokenizer, tokenizer_hash
from trainkit.text.tokenizers.special import BOS
from trainkit.types import CheckpointError, ConfigError, Log, log_warning
from trainkit.weights.checkpoint import load as checkpoints
from trainkit.weights.checkpoint.manifest import find_checkpoint, list_checkpoints
from trainkit.weights.hub.folder import check_is_there, is_hf_folder, open_folder

_BASES = {"pretrain": ("base", "150", "a small base"), "finetune": ("answers", "100", "answers")}
"""For each recipe that trains a base: its folder, its steps, and what it is called."""


@attrs.frozen(eq=False)
class ModelInfo:
    """What a run or a folder says of its model.

    Attributes:
        path: The checkpoint, or the Hugging Face folder.
        config: The decoder.
        name: The name of its tokenizer, for `open_tokenizer`.
        tokenizer: Its tokenizer.
        context: The most tokens that it is meant to be given.
        full_context: The most tokens that it is for, whatever it is to be given here: of a folder
            its `max_position_embeddings`; of a run what its base was for, or the length of its
            rows, if that is more.
        adds_bos: Whether texts begin with BOS: those of a run as `learned_bos` says, those of a
            folder where its tokenizer says so.
        template: The name of its chat template, for `chat.load_template`; None where it has learned
            no conversations.
        facts: The facts of the checkpoint; of a folder none.
    """

    path: Path
    config: DecoderConfig
    name: str
    tokenizer: ByteTokenizer | HFTokenizer
    context: int
    full_context: int
    adds_bos: bool
    template: str | None = None
    facts: Mapping[str, Any] = attrs.field(factory=dict)


def open_model(
    path: Path | str,
    *,
    tokenizer: str | None = None,
    context: int | None = None,
    log: Log = log_warning,
) -> ModelInfo:
    """Look over a model that is to be used; its weights are not read.

    Args:
        path: A run, for its newest checkpoint that verifies; a checkpoint; or a Hugging Face
            folder.
        tokenizer: What `open_tokenizer` takes; by default the run's, or the folder's own.
        context: The most tokens that it will be given; by default a run's `full_context`, and what
            `open_folder` says of a folder, whose `context` this is.
        log: Called with one sentence about each checkpoint passed over.

    Raises:
        CheckpointError: There is no checkpoint, none verifies, or it is not of a decoder; or the
            run was trained with another tokenizer.
        ConfigError: It is a folder of adapters alone; the tokenizer has more ids than the embedding
            rows; positions do not reach so far as `context`; or as `open_folder`.
        DataError: There is no tokenizer.

    Examples:
        >>> open_model("/does/not/exist")
        Traceback (most recent call last):
        ...
        trainkit.types.CheckpointError: open_model: there is no folder /does/not/exist; a model...
    """
    path = Path(path)
    of_folder = is_hf_folder(path)
    if not of_folder and (path / "adapter_config.json").is_file():
        raise ConfigError(
            f"open_model: {path} holds adapters, without the model that they belong to",
            where=str(path),
            want="a run, one of its checkpoints, or a whole model",
            hint="name the run that trained them, or export that with --merge",
        )
    check_is_there(path, function="open_model")
    found = _folder(path, tokenizer, context) if of_folder else _run(path, tokenizer, log)
    found = found if context is None else attrs.evolve(found, context=context)
    reach = found.config.reach
    if reach is not None and found.context > reach:
        raise ConfigError(
            f"open_model: {found.context} tokens are asked for, and positions of {path} reach "
            f"{reach}",
            where="context",
            got=found.context,
            want=f"<= {reach}",
        )
    ids, rows = found.tokenizer.vocab_size, found.config.vocab_size
    if ids > rows:
        raise ConfigError(
            f"open_model: the tokenizer has {ids} ids, and the embedding of {path} {rows} rows",
            where="tokenizer",
            got=ids,
            want=rows,
            hint="name the model's own tokenizer",
        )
    return found


def read_model_info(path: Path | str, *, context: int | None = None) -> DecoderConfig:
    """Return the model of a Hugging Face folder, a run or a checkpoint, without a tokenizer.

    Args:
        path: The folder, the run (its newest checkpoint that verifies) or the checkpoint.
        context: The most tokens that it will be given, as for `open_folder`.

    Raises:
        CheckpointError: There is nothing of the kind, or it is not of a decoder.
        ConfigError: As `open_folder`.

    Examples:
        >>> read_model_info("/does/not/exist")
        Traceback (most recent call last):
        ...
        trainkit.types.CheckpointError: read_model_info: there is no folder /does/not/exist; a
        model...
    """
    path = Path(path)
    check_is_there(path, function="read_model_info")
    if is_hf_folder(path):
        return open_folder(path, context=context).config
    facts = checkpoints.read_facts(find_checkpoint(path), needs=("model",))
    return config_from_facts(facts["model"])


def _folder(path: Path, name: str | None, context: int | None) -> ModelInfo:
    folder, tokenizer = open_folder(path, context=context), open_tokenizer(name or path)
    adds_bos = isinstance(tokenizer, HFTokenizer) and tokenizer.adds_bos
    known = folder.context, folder.full_context, adds_bos, locate_template(path)
    return ModelInfo(path, folder.config, name or str(path), tokenizer, *known)


def _run(path: Path, name: str | None, log: Log) -> ModelInfo:
    path = find_checkpoint(path, log=log)
    needs = ("model", "config.tokenizer", "config.row_length")
    facts = checkpoints.read_facts(path, needs=needs)
    name = name or facts["config.tokenizer"]
    tokenizer = open_tokenizer(name)
    got, want = tokenizer_hash(tokenizer), facts.get("tokenizer")
    if want not in (None, got):
        raise CheckpointError(
            f"open_model: {path} was trained with another tokenizer than {name}",
            where="tokenizer",
            got=got,
            want=want,
            hint="name the run's own",
        )
    config, adds_bos = config_from_facts(facts["model"]), learned_bos(tokenizer, facts)
    full = facts.get("context", facts["config.row_length"])
    known = min(full, config.reach or full), full, adds_bos, facts.get("config.template"), facts
    return ModelInfo(path, config, name, tokenizer, *known)


def learned_bos(tokenizer: ByteTokenizer | HFTokenizer, facts: Mapping[str, Any]) -> bool:
    """Say whether a run has learned texts that begin with BOS, as its export then says too.

    Documents begin with it, if the tokenizer names one (`encode_document`). Conversations have what
    their template writes; beside those a text begins as the tokenizer has it elsewhere.

    Args:
        tokenizer: The run's.
        facts: The facts of its checkpoints.

    Examples:
        >>> from trainkit.text.tokenizers import make_byte_tokenizer
        >>> learned_bos(make_byte_tokenizer(), {})
        True
    """
    if tokenizer.bos_id is None or facts.get("config.template") is None:
        return tokenizer.bos_id is not None
    foreign = (
        isinstance(tokenizer, HFTokenizer) and tokenizer.special_ids.get(BOS) != tokenizer.bos_id
    )
    return not foreign or tokenizer.adds_bos


def ensure_base_run(
    recipes: Path,
    *,
    recipe: Literal["pretrain", "finetune"] = "pretrain",
    runs: Path = Path("runs"),
) -> Path:
    """Return a run to begin with: `runs/pretrain`, or `runs/base`, which is trained now if need be.

    This is what a recipe does whose user names nothing to begin with. The small base takes a minute
    on two cores; a second call finds it there, or goes on with it where it was stopped. What shall
    know how to answer begins with `runs/finetune`, or `runs/answers`, alike.

    Args:
        recipes: The folder in which `pretrain.py` and `finetune.py` are.
        recipe: Which of them trains it.
        runs: Where runs are.

    Raises:
        ConfigError: There is neither, and this is one process of several: training is started by
            one process alone.
        SystemExit: Training ended early, with its exit code; it has said why.

    Effects:
        May run the recipe in a process of its own, which prints on this one's stderr.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as name:
        ...     place = Path(name)
        ...     (place / "pretrain/checkpoints/step_00000001").mkdir(parents=True)
        ...     ensure_base_run(Path("recipes"), runs=place) == place / "pretrain"
        True
    """
    folder, steps, what = _BASES[recipe]
    trained, base = runs / recipe, runs / folder
    if list_checkpoints(trained / "checkpoints"):
        return trained
    if (base / "final.json").is_file():
        return base
    if get_world_size() > 1:
        raise ConfigError(
            f"ensure_base_run: there is nothing to begin with: no run in {trained} or {base}",
            hint=f"python recipes/{recipe}.py trains one; or name a run or a Hugging Face folder",
        )
    say_on_stderr(f"training {what} first, into {base}: about a minute")
    flags = ("--steps", steps, "--schedule-steps", steps, "--eval-every", "0")
    command = [sys.executable, str(recipes / f"{recipe}.py"), "--out", str(base), *flags]
    ended = subprocess.run(command, stdout=2, check=False)  # noqa: S603 -- ours
    if ended.returncode:
        raise SystemExit(ended.returncode)
    return base
