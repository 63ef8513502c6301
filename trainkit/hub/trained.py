"""A model to use: a run, a checkpoint or a Hugging Face folder, known before weights are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
from torch import nn

from trainkit.checkpoint import load as checkpoints
from trainkit.checkpoint.manifest import find_checkpoint
from trainkit.hub.folder import is_folder, load_weights, open_folder
from trainkit.models.config import DecoderConfig
from trainkit.models.sizes import config_from_facts
from trainkit.tokenizers import ByteTokenizer, HFTokenizer, open_tokenizer, tokenizer_hash
from trainkit.types import SOLO, Axis, CheckpointError, ConfigError


@attrs.frozen(eq=False)
class Trained:
    """What a run or a folder says of its model.

    Attributes:
        path: The checkpoint, or the Hugging Face folder.
        config: The decoder.
        tokenizer: Its tokenizer.
        context: The most tokens that it is meant to be given.
        adds_bos: Whether texts begin with BOS: those of a run do, if its tokenizer has one, those
            of a folder where its tokenizer says so.
        facts: The facts of the checkpoint; of a folder none.
    """

    path: Path
    config: DecoderConfig
    tokenizer: ByteTokenizer | HFTokenizer
    context: int
    adds_bos: bool
    facts: Mapping[str, Any] = attrs.field(factory=dict)


def open_trained(
    path: Path | str, *, tokenizer: str | None = None, tell: Callable[[str], None] = print
) -> Trained:
    """Look over a model that is to be used; its weights are not read.

    Args:
        path: A run, for its newest checkpoint that verifies; a checkpoint; or a Hugging Face
            folder.
        tokenizer: What `open_tokenizer` takes; by default the run's, or the folder's own.
        tell: Called with one sentence about each checkpoint passed over.

    Raises:
        CheckpointError: There is no checkpoint, none verifies, or it is not of a decoder; or the
            run was trained with another tokenizer.
        ConfigError: The tokenizer has more ids than the embedding rows; or as `open_folder`.
        DataError: There is no tokenizer.

    Examples:
        >>> open_trained("/does/not/exist")
        Traceback (most recent call last):
        ...
        trainkit.types.CheckpointError: find_checkpoint: there is no checkpoint in /does/not/exist
    """
    path = Path(path)
    found = _folder(path, tokenizer) if is_folder(path) else _run(path, tokenizer, tell)
    ids, rows = found.tokenizer.vocab_size, found.config.vocab_size
    if ids > rows:
        raise ConfigError(
            f"open_trained: the tokenizer has {ids} ids, and the embedding of {path} {rows} rows",
            where="tokenizer",
            got=ids,
            want=rows,
            hint="name the model's own tokenizer",
        )
    return found


def _folder(path: Path, name: str | None) -> Trained:
    folder, tokenizer = open_folder(path), open_tokenizer(name or path)
    adds_bos = isinstance(tokenizer, HFTokenizer) and tokenizer.backend.encode("a").ids[:1] == [
        tokenizer.bos_id
    ]
    return Trained(path, folder.config, tokenizer, folder.context, adds_bos)


def _run(path: Path, name: str | None, tell: Callable[[str], None]) -> Trained:
    path = find_checkpoint(path, tell=tell)
    needs = ("model", "config.tokenizer", "config.row_length")
    facts = checkpoints.read_facts(path, needs=needs)
    name = name or facts["config.tokenizer"]
    tokenizer = open_tokenizer(name)
    got, want = tokenizer_hash(tokenizer), facts.get("tokenizer")
    if want not in (None, got):
        raise CheckpointError(
            f"open_trained: {path} was trained with another tokenizer than {name}",
            where="tokenizer",
            got=got,
            want=want,
            hint="name the run's own",
        )
    config, has_bos = config_from_facts(facts["model"]), tokenizer.bos_id is not None
    return Trained(path, config, tokenizer, facts["config.row_length"], has_bos, facts)


def load_trained(trained: Trained, stages: Sequence[nn.Module], *, axis: Axis = SOLO) -> None:
    """Read the weights of a model into stages of its decoder, in any layout.

    Args:
        trained: The model, from `open_trained`.
        stages: This rank's stages.
        axis: The ranks that call this together, `ps.world`.

    Raises:
        CheckpointError: As `checkpoint.load_weights` and `hub.load_weights`.

    Effects:
        Writes the parameters of `stages`; communicates on `axis`.

    Examples:
        >>> from trainkit.models import DecoderConfig, build_decoder
        >>> from trainkit.tokenizers import byte_tokenizer
        >>> config = DecoderConfig(
        ...     vocab_size=259, width=4, layers=1, heads=1, kv_heads=1, mlp_width=4
        ... )
        >>> nothing = Trained(Path("/does/not/exist"), config, byte_tokenizer(), 64, True)
        >>> load_trained(nothing, [build_decoder(config, seed=0)])
        Traceback (most recent call last):
        ...
        trainkit.types.CheckpointError: resume: /does/not/exist was asked for, but ... is not there
    """
    load = load_weights if is_folder(trained.path) else checkpoints.load_weights
    load(trained.path, stages, axis=axis)
