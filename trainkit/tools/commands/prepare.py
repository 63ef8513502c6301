"""`python -m trainkit prepare SOURCE --out FILE.tokens`: tokenize text into a token file.

Text is tokenized once, in parallel, by `trainkit.text.prepare.prepare_corpus`; runs map the file
into memory.

A source is a directory of text files (one document each), a file of .jsonl, .parquet or .arrow (one
document per line or row), or a directory of such files. Nothing is skipped: a document that cannot
be read or encoded ends the command with an error that names its file and line.

Encode text as bytes, then train on it:

  python -m trainkit prepare books/ --out books.tokens
  python train.py --data books.tokens

Use a tokenizer from a folder, and text in the field "content" of parquet files:

  python -m trainkit prepare shards/*.parquet --out web.tokens --tokenizer llama/ --field content

Train a BPE of 32,000 tokens on the corpus first, and write it to web.tokenizer.json:

  python -m trainkit prepare web.jsonl --out web.tokens --tokenizer bpe:32000

Conversations, with assistant turns in the loss, formatted by the tokenizer's chat template or by
another:

  python -m trainkit prepare chats.jsonl --out chats.tokens --messages --tokenizer model/
  python -m trainkit prepare chats.jsonl --out chats.tokens --messages --template qwen3

The same for rows of 4096 tokens: a longer conversation ends after the last assistant turn that
fits. The report counts those that were truncated, and those that were dropped because not even the
first one fits:

  python -m trainkit prepare chats.jsonl --out chats.tokens --messages --max-length 4096

Records of token ids, in the field "tokens", with a weight for each label, and two routed experts
for each input token (models take choices as int64 alone):

  python -m trainkit prepare ids.jsonl --out a.tokens --columns w:float32 choices:int64:2:token

Give the same command again to resume after an interruption: finished parts stay in OUT.parts until
the corpus is written.
"""

from __future__ import annotations

import argparse
import collections
import sys
import time
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from trainkit.files import print_to_stderr
from trainkit.types import Column, ConfigError, DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from trainkit.text.prepare.prepare import PrepareProgress
    from trainkit.types import Tokenizer

_MAX_CHARACTERS = 256 << 20  # of the text that a BPE is trained on
_INTERRUPTED = 76


HELP = "turn text into a token file, in parallel"


def add(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags to its parser."""
    parser.add_argument("source", type=Path, nargs="+", help="directories or files, in order")
    parser.add_argument("--out", type=Path, required=True, help="the file to write: NAME.tokens")
    parser.add_argument(
        "--tokenizer",
        default="bytes",
        help="bytes (default); a tokenizer.json, or a folder that holds one; or bpe:N, which "
        "trains a byte-level BPE of N tokens on the first 256 million characters of the corpus "
        "and writes it next to OUT",
    )
    parser.add_argument(
        "--field", help="the field with the text (default text), or with the messages (messages)"
    )
    _add_records(parser)
    parser.add_argument(
        "--suffix",
        nargs="+",
        metavar=".TXT",
        help="suffixes of a directory's text files (default .md .py .rst .txt)",
    )
    parser.add_argument(
        "--exclude",
        nargs="+",
        default=[],
        metavar="PATTERN",
        help="skip files of a directory whose relative path matches, such as 'test/*'",
    )
    parser.add_argument("--json", action="store_true", help="print JSON on a terminal too")
    parser.add_argument("--workers", type=int, help="processes (default: one for each core)")


def _add_records(parser: argparse.ArgumentParser) -> None:
    """Add the flags for conversations and for records of token ids."""
    parser.add_argument(
        "--messages",
        action="store_true",
        help="records are conversations: only assistant turns are in the loss",
    )
    parser.add_argument(
        "--template",
        metavar="NAME",
        help="with --messages: chatml, llama3, qwen3, or a folder that has one (default: the "
        "template in the tokenizer's folder, or else chatml)",
    )
    parser.add_argument(
        "--train-on",
        choices=("assistant", "last"),
        help="with --messages: all assistant turns (default), or only the last one",
    )
    parser.add_argument(
        "--max-length",
        type=int,
        metavar="N",
        help="with --messages: maximum tokens of a conversation; it is truncated after a complete "
        "turn, or dropped if no assistant turn fits (default: no limit)",
    )
    parser.add_argument(
        "--columns",
        nargs="+",
        metavar="NAME:DTYPE[:K][:token]",
        help="records hold token ids, in --field (tokens), and in the field NAME one value, or K, "
        "for each label, or with :token for each input token",
    )
    parser.add_argument(
        "--loss-mask",
        metavar="FIELD",
        help="with --columns: the field with the loss mask (default: all tokens are in the loss)",
    )


def run(options: argparse.Namespace) -> tuple[Any, int]:
    """Tokenize the sources and return a report and the exit code.

    Effects:
        Writes the token file, and for `bpe:N` a tokenizer; progress goes to stderr.
    """
    try:
        return _prepare(options), 0
    except KeyboardInterrupt:
        # On a terminal the line of progress has no end yet.
        print_to_stderr("")
        parts = options.out.with_name(f"{options.out.name}.parts")
        if parts.is_dir():
            return {
                "error": f"interrupted; finished parts are in {parts}: give the same command again "
                "to resume from there"
            }, _INTERRUPTED
        return {
            "error": "interrupted before a part was finished: the same command starts from scratch"
        }, _INTERRUPTED


def _prepare(options: argparse.Namespace) -> dict[str, Any]:
    from trainkit.text.chat import (  # noqa: PLC0415
        choose_template_name,
        locate_template,
        template_hash,
    )
    from trainkit.text.corpora.text_files import TEXT_SUFFIXES  # noqa: PLC0415
    from trainkit.text.prepare.prepare import check_output, prepare_corpus  # noqa: PLC0415

    check_output(options.out)
    _check_options(options)
    # Functions are pickled for the worker processes, so partials and no closures.
    keep = partial(_is_included, options.exclude) if options.exclude else None
    suffixes = options.suffix or list(TEXT_SUFFIXES)
    start = time.monotonic()
    tokenizer, facts = _make_tokenizer(options, suffixes, keep)
    template = None
    if options.messages:
        template = choose_template_name(
            options.template,
            tokenizer,
            own=locate_template(options.tokenizer),
            where=options.tokenizer,
        )
        facts["template"] = template
    result = prepare_corpus(
        options.source,
        options.out,
        tokenizer=tokenizer,
        make_encode=_make_encode(options, template),
        template_hash=None if template is None else template_hash(template),
        # The file stores these two names; the report may also have the counts of a BPE.
        made_with={key: facts[key] for key in ("tokenizer", "template") if key in facts},
        field=options.field or "text",
        workers=options.workers,
        log=print_to_stderr,
        progress=_make_progress_printer(),
        suffixes=suffixes,
        keep=keep,
    )
    return {
        **attrs.asdict(result),
        "path": str(result.path),
        "seconds": round(time.monotonic() - start, 3),
        "tokens_per_second": round(result.tokens_per_second),
        **facts,
    }


def _is_included(patterns: list[str], name: str) -> bool:
    return not any(fnmatchcase(name, pattern) for pattern in patterns)


# ---------------------------------------------------------------------------------------- encoding


def _check_options(options: argparse.Namespace) -> None:
    for flag, value in (
        ("--train-on", options.train_on),
        ("--max-length", options.max_length),
        ("--template", options.template),
    ):
        if value is not None and not options.messages:
            raise ConfigError(f"prepare: {flag} is for conversations: give --messages too")
    if options.loss_mask is not None and not options.columns:
        raise ConfigError("prepare: --loss-mask is for records of token ids: give --columns too")
    if options.columns and options.messages:
        raise ConfigError(
            "prepare: --columns is for records of token ids, --messages for conversations; give one"
        )
    if options.max_length is not None and options.max_length < 1:
        raise ConfigError(f"prepare: --max-length must be at least 1, got {options.max_length}")


def _parse_column(text: str) -> tuple[str, Column]:
    """Parse NAME:DTYPE[:K][:token] into a name and a Column.

    Examples:
        >>> _parse_column("choices:int64:2:token")
        ('choices', Column(dtype='int64', inner=(2,), of='token'))
    """
    name, *rest = text.split(":")
    of = "token" if rest[1:] and rest[-1] == "token" else "label"
    dtype, *inner = rest[: len(rest) - (of == "token")] or [""]
    if not (name and dtype) or len(inner) > 1 or not all(size.isdecimal() for size in inner):
        raise ConfigError(
            "prepare: --columns must be NAME:DTYPE[:K][:token], such as weights:float32 or "
            f"choices:int64:2:token, got {text!r}"
        )
    return name, Column(dtype, tuple(map(int, inner)), of)


def encode_conversations(tokenizer: Tokenizer, *, template: str, **options: Any) -> Any:
    """Return a chat encoder for a template's name; every worker process loads the template."""
    from trainkit.text.chat import load_template, make_chat_encoder  # noqa: PLC0415

    # A template that is loaded cannot be pickled.
    return make_chat_encoder(tokenizer, template=load_template(template), **options)


def _make_encode(
    options: argparse.Namespace, template: str | None
) -> Callable[[Tokenizer], Any] | None:
    if options.columns:
        from trainkit.text.tokenizers import make_sample_encoder  # noqa: PLC0415

        return partial(
            make_sample_encoder,
            columns=dict(map(_parse_column, options.columns)),
            tokens=options.field or "tokens",
            loss_mask=options.loss_mask,
        )
    if template is None:
        return None
    return partial(
        encode_conversations,
        template=template,
        field=options.field or "messages",
        train=options.train_on or "assistant",
        max_length=options.max_length,
        # Without a limit no conversation is too long.
        overlong="error" if options.max_length is None else "drop",
    )


def _make_tokenizer(
    options: argparse.Namespace, suffixes: list[str], keep: Callable[[str], bool] | None
) -> tuple[Tokenizer, dict[str, Any]]:
    """Open the tokenizer, or train and write it; return it with its entries of the report."""
    from trainkit.text.tokenizers import open_tokenizer, save_tokenizer, train_bpe  # noqa: PLC0415
    from trainkit.text.tokenizers.special import BOS, CHAT_SPECIAL, EOS, PAD  # noqa: PLC0415

    kind, _, size = options.tokenizer.partition(":")
    # A file may have such a name.
    if kind != "bpe" or Path(options.tokenizer).exists():
        return open_tokenizer(options.tokenizer), {"tokenizer": options.tokenizer}
    if not size.isdecimal():
        raise ConfigError(f"prepare: --tokenizer bpe:N wants a number, got {size!r}")
    if options.messages:
        raise ConfigError("prepare: bpe:N is trained on text; give conversations a tokenizer.json")
    if options.columns:
        raise ConfigError("prepare: bpe:N is trained on text; give token ids a tokenizer.json")
    counts = collections.Counter()
    print_to_stderr(f"training a BPE of {int(size)} tokens")
    tokenizer = train_bpe(
        _read_sample(options, suffixes, keep, counts),
        vocab_size=int(size),
        # Those of chats too, so that the tokenizer serves a later fine-tuning.
        special=(BOS, EOS, PAD, *CHAT_SPECIAL),
    )
    path = options.out.with_suffix(".tokenizer.json")
    save_tokenizer(tokenizer, path)
    print_to_stderr(
        f"wrote {path}: {tokenizer.vocab_size} tokens, from {counts['documents']} documents"
    )
    return tokenizer, {
        "tokenizer": str(path),
        "bpe_documents": counts["documents"],
        "bpe_characters": counts["characters"],
    }


def _read_sample(
    options: argparse.Namespace,
    suffixes: list[str],
    keep: Callable[[str], bool] | None,
    counts: collections.Counter[str],
) -> Iterator[str]:
    """Yield the first texts of the corpus, and count documents and characters in `counts`."""
    from trainkit.text.prepare.chunks import describe_document, read_chunk  # noqa: PLC0415
    from trainkit.text.prepare.prepare import split_sources  # noqa: PLC0415
    from trainkit.text.tokenizers.documents import get_text  # noqa: PLC0415

    field = options.field or "text"
    for chunk in split_sources(options.source, suffixes=suffixes, keep=keep):
        for index, record in enumerate(read_chunk(chunk, columns=[field])):
            try:
                text = get_text(record, field)
            except DataError as error:
                raise DataError(f"{describe_document(chunk, index)}: {error}") from error
            counts["documents"] += 1
            counts["characters"] += len(text)
            yield text
            if counts["characters"] >= _MAX_CHARACTERS:
                return


# ---------------------------------------------------------------------------------------- progress


def _make_progress_printer() -> Callable[[PrepareProgress], None]:
    """Return a printer of progress: in place on a terminal, one line every 10 s in a log."""
    terminal = sys.stderr.isatty()
    # On a terminal the first progress is shown at once, in a log after 10 s.
    last = [time.monotonic() - (10.0 if terminal else 0.0)]

    def show(progress: PrepareProgress) -> None:
        now = time.monotonic()
        complete = progress.bytes == progress.total_bytes
        if now - last[0] < (0.2 if terminal else 10.0) and not complete:
            return
        last[0] = now
        line = progress_line(progress)
        # Back to the start of the line, and clear what a longer text has left there.
        sys.stderr.write(
            f"\r\x1b[K{line}{chr(10) if complete else ''}" if terminal else f"{line}\n"
        )
        sys.stderr.flush()

    return show


def progress_line(progress: PrepareProgress) -> str:
    """Format progress as one line.

    Examples:
        >>> from trainkit.text.prepare.prepare import PrepareProgress
        >>> progress_line(PrepareProgress(1200, 3_400_000, 50_000_000, 200_000_000, 0, 10.0))
        ' 25 %  1,200 documents  3,400,000 tokens  5.0 MB/s  0:00:30 left'
    """
    # Parts of an earlier start took no time in this one.
    speed = (progress.bytes - progress.reused_bytes) / max(progress.seconds, 1e-9)
    left = (progress.total_bytes - progress.bytes) / speed if speed else 0.0
    minutes, seconds = divmod(round(left), 60)
    time_left = f"{minutes // 60}:{minutes % 60:02}:{seconds:02} left" if speed else "starting"
    return (
        f"{progress.bytes / max(progress.total_bytes, 1):4.0%}".replace("%", " %")
        + f"  {progress.documents:,} documents  {progress.tokens:,} tokens"
        f"  {speed / 1e6:.1f} MB/s  {time_left}"
    )
