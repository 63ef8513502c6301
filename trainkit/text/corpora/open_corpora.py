"""Open the corpora of a run: several by name, or conversations with a loss mask."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from trainkit.buckets.files import mount_files
from trainkit.packing.report import format_overlong_warning
from trainkit.phases import as_phase
from trainkit.text.chat import (
    format_answers_warning,
    load_template,
    locate_template,
    make_chat_encoder,
)
from trainkit.text.corpora.open import (
    match_recorded_names,
    open_conversations,
    open_corpus,
    open_library_corpus,
)
from trainkit.text.corpora.shards import describe_unread_files
from trainkit.types import ConfigError, Log, log_info

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trainkit.data.concat import ConcatCorpus
    from trainkit.data.corpus import TokenCorpus
    from trainkit.types import Tokenizer


@as_phase("data")
def open_corpora(
    paths: Sequence[Path],
    *,
    tokenizer: Tokenizer | None = None,
    field: str = "text",
    init: Path | None = None,
    template: str | None = None,
    recorded: Mapping[str, Any] | None = None,
    log: Log = log_info,
) -> dict[str, TokenCorpus | ConcatCorpus]:
    """Open several corpora by name; without paths the source of Python's standard library.

    A corpus has the name of its file or folder without the suffix, or its whole path if two of
    those are equal.

    Args:
        paths: As in `open_corpus`, each.
        tokenizer: As in `open_corpus`.
        field: As in `open_corpus`.
        init: The folder of the initial model. A token file of conversations with another chat
            template is rejected.
        template: The name of the chat template, in place of that of `init`.
        recorded: The facts of the run that is resumed; see `match_recorded_names`.
        log: Called with the names of the files that are read, and of those that are not.

    Raises:
        ConfigError: A path is named twice; or as `open_corpus`.
        DataError: As `open_corpus`.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = (Path(folder) / "web.txt").write_text("hi")
        ...     corpora = open_corpora([Path(folder) / "web.txt"])
        >>> list(corpora)
        ['web']
    """
    log(f"reading {', '.join(map(str, paths)) or 'the source of the standard library'}")
    files = [mount_files(path, log=log) for path in paths]
    # Before any is opened, as that may take minutes.
    for path in files:
        if ignored := describe_unread_files(path):
            log(ignored)
    if not paths:
        return match_recorded_names({"library": open_library_corpus(tokenizer)}, recorded or {})
    # Its documents would be in the mixture twice, and two corpora would have one name.
    if len(set(paths)) < len(paths):
        raise ConfigError(f"--data names a corpus twice: {', '.join(map(str, paths))}")
    # A model folder without a template leaves the files unchecked.
    template = template or locate_template(init)
    are_unique = len({path.stem for path in paths}) == len(paths)
    corpora = {
        path.stem if are_unique else str(path): open_corpus(
            file, tokenizer=tokenizer, field=field, template=template
        )
        for path, file in zip(paths, files, strict=True)
    }
    return match_recorded_names(corpora, recorded or {})


def open_chats(
    path: Path | None,
    *,
    tokenizer: Any,
    template: str,
    train: Literal["assistant", "last"] = "assistant",
    max_length: int,
    log: Log = log_info,
) -> tuple[TokenCorpus | ConcatCorpus, Counter[str]]:
    """Open conversations as tokens with a loss mask, written by a chat template.

    `open_conversations` with a `chat.make_chat_encoder`; conversations of which no turn fits into
    `max_length` are dropped.

    Args:
        path: As in `open_conversations`.
        tokenizer: As in `chat.make_chat_encoder`.
        template: The name of the template, as in `chat.load_template`.
        train: As in `chat.encode_chat`: all turns of the assistant, or the last.
        max_length: The maximum number of tokens of a conversation.
        log: Called with the name of the source, and with warnings of conversations that are
            dropped and of answers that the template hides.

    Returns:
        The corpus, and counts of conversations and answers.

    Raises:
        DataError: As `open_conversations` and `chat.format_answers_warning`.

    Examples:
        >>> import tempfile
        >>> from trainkit.text.chat import CHATML_SPECIAL
        >>> from trainkit.text.tokenizers import make_byte_tokenizer
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = Path(folder) / "a.jsonl"
        ...     turns = '{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}'
        ...     _ = file.write_text('{"messages": [' + turns + "]}")
        ...     corpus, counts = open_chats(
        ...         file,
        ...         tokenizer=make_byte_tokenizer(CHATML_SPECIAL),
        ...         template="chatml",
        ...         max_length=64,
        ...     )
        >>> int(corpus.loss_mask.sum()), counts["conversations"]
        (2, 1)
    """
    path = None if path is None else mount_files(path, log=log)
    log(f"reading {path or 'signatures and docstrings of the standard library'}")
    # Filled while conversations are encoded; a .tokens file leaves it empty.
    counts: Counter[str] = Counter()
    encode = make_chat_encoder(
        tokenizer,
        template=load_template(template),
        train=train,
        counts=counts,
        max_length=max_length,
        overlong="drop",
    )
    corpus = open_conversations(path, encode, tokenizer=tokenizer, template=template)
    # Only now: `counts` is complete when all conversations are encoded.
    overlong = format_overlong_warning(
        counts["conversations"],
        capacity=max_length,
        truncated=counts["truncated"],
        dropped=counts["dropped"],
        what="conversations",
    )
    for warning in filter(None, (overlong, format_answers_warning(counts))):
        log(warning)
    return corpus, counts
