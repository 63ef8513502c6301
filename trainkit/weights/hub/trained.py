"""A model to use: a run, a checkpoint or a Hugging Face folder, known before weights are read."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import attrs

from trainkit.files import find_recipes, print_to_stderr
from trainkit.mesh import get_world_size
from trainkit.models.config import DecoderConfig
from trainkit.models.decoder_sizes import config_from_facts
from trainkit.text.chat import locate_template
from trainkit.text.tokenizers import open_tokenizer, tokenizer_hash
from trainkit.text.tokenizers.bytes import ByteTokenizer
from trainkit.text.tokenizers.hf import HFTokenizer
from trainkit.text.tokenizers.special import BOS
from trainkit.types import CheckpointError, ConfigError, DataError, Log, log_warning
from trainkit.weights.checkpoint import load as checkpoints
from trainkit.weights.checkpoint.bucket_runs import fetch_model
from trainkit.weights.checkpoint.initial_weights import TOWER, read_resume_facts
from trainkit.weights.checkpoint.manifest import find_checkpoint, list_checkpoints
from trainkit.weights.hub.folder import check_model_path, is_hf_folder, open_folder

_BASES = {"pretrain": ("base", "150", "a small base"), "finetune": ("answers", "100", "answers")}
"""For each recipe that trains a base: the folder of its run, its steps, and a description."""


@attrs.frozen(eq=False)
class ModelInfo:
    """The model of a run or of a Hugging Face folder, without its weights.

    Attributes:
        path: The checkpoint, or the Hugging Face folder.
        config: The decoder.
        name: The name of its tokenizer, for `open_tokenizer`.
        tokenizer: Its tokenizer.
        context: The maximum number of tokens of its inputs here.
        full_context: The maximum number of tokens of the model: `max_position_embeddings` of a
            folder; for a run that of its base, or the length of its rows if that is more.
        adds_bos: Whether texts start with BOS: for a run see `has_learned_bos`, for a folder its
            tokenizer decides.
        template: The name of its chat template, for `chat.load_template`; None if it was not
            trained on conversations.
        facts: The facts of the checkpoint; empty for a folder.
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
    """Read and check the configuration and the tokenizer of a model, but not its weights.

    Args:
        path: A run, for its newest checkpoint that verifies; a checkpoint; or a Hugging Face
            folder. Or its URL in a bucket, which is fetched (`fetch_model`).
        tokenizer: A name for `open_tokenizer`; by default the tokenizer of the run or the folder.
        context: The maximum number of tokens of its inputs; by default a run's `full_context`, and
            for a folder the default of `open_folder`.
        log: Called for each checkpoint that is passed over.

    Raises:
        CheckpointError: There is no checkpoint, none verifies, or it is not of a decoder; or the
            run was trained with another tokenizer.
        ConfigError: It is a folder of adapters only; the tokenizer has more ids than the embedding
            has rows; `context` is beyond the model's positions, or neither it nor the run says how
            long a text may be; or as `open_folder`.
        DataError: There is no tokenizer, or a run does not name it.

    Examples:
        >>> open_model("/does/not/exist")
        Traceback (most recent call last):
        ...
        trainkit.types.CheckpointError: open_model: there is no folder /does/not/exist; a model...
    """
    path = fetch_model(path)
    # First: a folder of adapters has no config.json, and would be reported as no model at all.
    is_folder = is_hf_folder(path)
    if not is_folder and (path / "adapter_config.json").is_file():
        raise ConfigError(
            f"open_model: {path} has adapters without their base model",
            where=str(path),
            want="a run, one of its checkpoints, or a complete model",
            hint="name the run that trained them, or export that with --merge",
        )
    check_model_path(path, function="open_model")
    read = _read_folder if is_folder else functools.partial(_read_run, log=log)
    info = read(path, tokenizer, context)
    if context is not None:
        info = attrs.evolve(info, context=context)
    # Set by a table of learned positions, or by the factors of LongRoPE.
    reach = info.config.max_length
    if reach is not None and info.context > reach:
        raise ConfigError(
            f"open_model: a context of {info.context} tokens was requested, but {path} has "
            f"positions for {reach}",
            where="context",
            got=info.context,
            want=f"<= {reach}",
        )
    # An id without a row would read outside of the embedding, which a GPU reports late and badly.
    num_ids = info.tokenizer.vocab_size
    rows = info.config.vocab_size
    if num_ids > rows:
        raise ConfigError(
            f"open_model: the tokenizer has {num_ids} ids, and the embedding of {path} {rows} rows",
            where="tokenizer",
            got=num_ids,
            want=rows,
            hint="name the model's own tokenizer",
        )
    return info


def read_model_info(path: Path | str, *, context: int | None = None) -> DecoderConfig:
    """Return the decoder of a Hugging Face folder, a run or a checkpoint, without a tokenizer.

    Args:
        path: The folder, the run (its newest checkpoint that verifies) or the checkpoint.
        context: The maximum number of tokens of its inputs, as for `open_folder`.

    Raises:
        CheckpointError: There is no model, or it is not a decoder.
        ConfigError: As `open_folder`.

    Examples:
        >>> read_model_info("/does/not/exist")
        Traceback (most recent call last):
        ...
        trainkit.types.CheckpointError: read_model_info: there is no folder /does/not/exist; a
        model...
    """
    path = fetch_model(path)
    check_model_path(path, function="read_model_info")
    if is_hf_folder(path):
        return open_folder(path, context=context).config
    facts = checkpoints.read_facts(find_checkpoint(path), needs=("model",))
    return config_from_facts(facts["model"])


def make_tower_facts(source: Path | str) -> dict[str, Any]:
    """Return the fact by which `export_folder` finds the rest of a multimodal model.

    Args:
        source: What the run starts from: a Hugging Face folder, or a run or checkpoint, whose own
            fact is returned.

    Returns:
        {"tower": the path of the multimodal folder}, or {} if the decoder came from none.

    Examples:
        >>> make_tower_facts("/does/not/exist")
        {}
    """
    source = Path(source)
    if is_hf_folder(source):
        try:
            has_tower = open_folder(source).family.tower is not None
        except ConfigError:  # of a model that is no decoder, which the caller has read
            has_tower = False
        return {TOWER: str(source.resolve())} if has_tower else {}
    is_checkpoint = (source / "state.json").is_file()
    facts = checkpoints.read_facts(source) if is_checkpoint else read_resume_facts(source)
    return {name: facts[name] for name in (TOWER,) if name in facts}


def _read_folder(path: Path, name: str | None, context: int | None) -> ModelInfo:
    folder = open_folder(path, context=context)
    tokenizer = open_tokenizer(name or path)
    return ModelInfo(
        path=path,
        config=folder.config,
        name=name or str(path),
        tokenizer=tokenizer,
        context=folder.context,
        full_context=folder.full_context,
        adds_bos=isinstance(tokenizer, HFTokenizer) and tokenizer.adds_bos,
        template=locate_template(path),
    )


def _read_run(path: Path, name: str | None, context: int | None, *, log: Log) -> ModelInfo:
    path = find_checkpoint(path, log=log)
    facts = checkpoints.read_facts(path, needs=("model",))
    name = name or find_tokenizer_name(facts)
    if name is None:
        raise DataError(
            f"open_model: {path} does not name its tokenizer",
            where=path,
            hint="give it: open_model(tokenizer=), or --tokenizer of export and evaluate",
        )
    tokenizer = open_tokenizer(name)
    # By the hash of what it computes: its files may have been moved, or lie under an old path.
    got = tokenizer_hash(tokenizer)
    want = facts.get("tokenizer")
    if want not in (None, got):
        raise CheckpointError(
            f"open_model: {path} was trained with another tokenizer than {name}",
            where="tokenizer",
            got=got,
            want=want,
            hint="name the run's own",
        )
    config = config_from_facts(facts["model"])
    # A recipe's run from scratch has no context: its model has seen no rows longer than its own.
    full_context = facts.get("context") or facts.get("config.row_length") or context
    if full_context is None:
        raise ConfigError(
            f"open_model: {path} does not say how long the texts of its model may be",
            where="context",
            hint="give a number: open_model(context=), or --context of export and evaluate",
        )
    return ModelInfo(
        path=path,
        config=config,
        name=name,
        tokenizer=tokenizer,
        context=min(full_context, config.max_length or full_context),
        full_context=full_context,
        adds_bos=has_learned_bos(tokenizer, facts),
        template=facts.get("config.template"),
        facts=facts,
    )


def find_tokenizer_name(facts: Mapping[str, Any]) -> str | None:
    """Return the name of a run's tokenizer for `open_tokenizer`, None if its facts have none.

    A script without flags records no name, but a hash, by which the tokenizer of bytes is known.

    Args:
        facts: The facts of a checkpoint.

    Examples:
        >>> find_tokenizer_name({"config.tokenizer": "llama/"})
        'llama/'
        >>> find_tokenizer_name({"tokenizer": tokenizer_hash(open_tokenizer("bytes"))})
        'bytes'
    """
    is_bytes = facts.get("tokenizer") == tokenizer_hash(open_tokenizer("bytes"))
    return facts.get("config.tokenizer") or ("bytes" if is_bytes else None)


def has_learned_bos(tokenizer: ByteTokenizer | HFTokenizer, facts: Mapping[str, Any]) -> bool:
    """Return whether a run was trained on texts that start with BOS.

    Documents start with it if the tokenizer has one (`encode_document`). Conversations are what
    their template writes; with a template, other texts start as the tokenizer does it elsewhere.

    Args:
        tokenizer: The tokenizer of the run.
        facts: The facts of its checkpoints.

    Examples:
        >>> from trainkit.text.tokenizers import make_byte_tokenizer
        >>> has_learned_bos(make_byte_tokenizer(), {})
        True
    """
    # Without a template the run was trained on documents.
    if tokenizer.bos_id is None or facts.get("config.template") is None:
        return tokenizer.bos_id is not None
    # Our own tokenizers call it `<|bos|>`, and put it in front of every text.
    is_foreign = (
        isinstance(tokenizer, HFTokenizer) and tokenizer.special_ids.get(BOS) != tokenizer.bos_id
    )
    return not is_foreign or tokenizer.adds_bos


def ensure_base_run(
    recipe: Literal["pretrain", "finetune"] = "pretrain", *, runs: Path = Path("runs")
) -> Path:
    """Return a run to start from: `runs/pretrain`, or else `runs/base`, trained if necessary.

    The default of recipes without a model to start from. Training the small base takes a minute on
    two cores; a second call finds it, or resumes it. For a model that answers, these are
    `runs/finetune` and `runs/answers`.

    Args:
        recipe: The recipe that trains it, as trainkit has it.
        runs: The folder of runs.

    Raises:
        ConfigError: There is neither, and this is one process of several: only a single process
            starts the training.
        SystemExit: The training has failed, with its exit code, after its own error report.

    Effects:
        May run the recipe in another process, which prints on this one's stderr.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as name:
        ...     runs = Path(name)
        ...     (runs / "pretrain/checkpoints/step_00000001").mkdir(parents=True)
        ...     ensure_base_run(runs=runs) == runs / "pretrain"
        True
    """
    folder, steps, description = _BASES[recipe]
    run = runs / recipe
    base = runs / folder
    # A run of the user's own comes first, finished or not; the small base only when it is finished.
    if list_checkpoints(run / "checkpoints"):
        return run
    if (base / "final.json").is_file():
        return base
    # Here every process of the launcher would start a training.
    if get_world_size() > 1:
        raise ConfigError(
            f"ensure_base_run: there is no run to start from, neither {run} nor {base}",
            hint=f"the recipe {recipe} trains one; or name a run or a Hugging Face folder",
        )
    print_to_stderr(f"training {description} first, into {base}: about a minute")
    # The schedule ends with the run, and no time goes into evaluations.
    flags = ("--steps", steps, "--schedule-steps", steps, "--eval-every", "0")
    command = [sys.executable, str(find_recipes() / f"{recipe}.py"), "--out", str(base), *flags]
    # In another process: a recipe sets numerics, signals and process groups of its own. Its output
    # goes to stderr, since this process may print results on stdout.
    done = subprocess.run(command, stdout=2, check=False)  # noqa: S603 -- our own recipe
    if done.returncode:
        raise SystemExit(done.returncode)
    return base
