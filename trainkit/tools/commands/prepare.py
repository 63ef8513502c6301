"""`python -m trainkit prepare SOURCE --out FILE.tokens`: text into a token file, in parallel.

Text is tokenised once, as `trainkit.text.prepare.prepare_corpus` does it, and opened in no time by
any run.

A source is a directory of text files (each one document), a file of .jsonl, .parquet or .arrow
(each line or row one), or a directory of such files. Nothing is skipped: a document that cannot be
read or encoded ends the command, and is named by file and line.

Text to bytes, in parallel, then train on it:

  python -m trainkit prepare books/ --out books.tokens
  python recipes/pretrain.py --data books.tokens

With a tokenizer from a folder, the text in the field "content" of parquet files:

  python -m trainkit prepare shards/*.parquet --out web.tokens --tokenizer llama/ --field content

With a BPE of 32,000 tokens trained on the corpus itself, which is written to web.tokenizer.json:

  python -m trainkit prepare web.jsonl --out web.tokens --tokenizer bpe:32000

Conversations, trained on what the assistant says, written by the tokenizer's own chat template, or
by another:

  python -m trainkit prepare chats.jsonl --out chats.tokens --messages --tokenizer model/
  python -m trainkit prepare chats.jsonl --out chats.tokens --messages --template qwen3

The same for rows of 4096 tokens: longer conversations end with the last answer that fits whole, and
the report counts those that were truncated, or dropped because not even the first one fits:

  python -m trainkit prepare chats.jsonl --out chats.tokens --messages --max-length 4096

Records of token ids, in the field "tokens", with a weight for each that is a label, and the two
experts that each token chose where it entered (models take choices as int64 alone):

  python -m trainkit prepare ids.jsonl --out a.tokens --columns w:float32 choices:int64:2:token

A command that was stopped goes on when it is given again: finished parts lie in OUT.parts until the
corpus is written.
"""

from __future__ import annotations

import argparse
import sys
import time
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from trainkit.files import say_on_stderr
from trainkit.types import Column, ConfigError, DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from trainkit.text.prepare.prepare import PrepareProgress, PrepareResult
    from trainkit.types import Tokenizer

_SAMPLE = 256 << 20  # characters of text that a BPE is trained on at most
_INTERRUPTED = 76


HELP = "turn text into a token file, in parallel"


def add(parser: argparse.ArgumentParser) -> None:
    """Describe the command's flags to its parser."""
    parser.add_argument("source", type=Path, nargs="+", help="directories or files, in order")
    parser.add_argument("--out", type=Path, required=True, help="the file to make: NAME.tokens")
    parser.add_argument(
        "--tokenizer",
        default="bytes",
        help="bytes (default); a tokenizer.json, or a folder that holds one; or bpe:N, which "
        "trains a byte-level BPE of N tokens on the first 256 million characters of the corpus "
        "and writes it beside OUT",
    )
    parser.add_argument(
        "--field", help="the field with the text (default text), or with the messages (messages)"
    )
    _add_records(parser)
    parser.add_argument(
        "--suffix",
        nargs="+",
        metavar=".TXT",
        help="how names of a directory's text files end (default .md .py .rst .txt)",
    )
    parser.add_argument(
        "--exclude",
        nargs="+",
        default=[],
        metavar="PATTERN",
        help="leave out a directory's files whose relative path matches, such as 'test/*'",
    )
    parser.add_argument("--json", action="store_true", help="print JSON on a terminal too")
    parser.add_argument("--workers", type=int, help="processes (default: one for each core)")


def _add_records(parser: argparse.ArgumentParser) -> None:
    """Describe the flags that say what a record holds besides text."""
    parser.add_argument(
        "--messages",
        action="store_true",
        help="records are conversations: only what the assistant says is trained on",
    )
    parser.add_argument(
        "--template",
        metavar="NAME",
        help="with --messages: chatml, llama3, qwen3, or a folder that has one (default: that of "
        "the tokenizer's folder, or else chatml)",
    )
    parser.add_argument(
        "--train-on",
        choices=("assistant", "last"),
        help="with --messages: all answers of the assistant (default), or the last one",
    )
    parser.add_argument(
        "--max-length",
        type=int,
        metavar="N",
        help="with --messages: the most tokens of a conversation; whole turns are kept, and one of "
        "which no answer fits is dropped (default: no limit)",
    )
    parser.add_argument(
        "--columns",
        nargs="+",
        metavar="NAME:DTYPE[:K][:token]",
        help="records hold token ids, in --field (tokens), and in the field NAME a value for each, "
        "or K of them, which belongs to it as a label, or as a token that enters",
    )
    parser.add_argument(
        "--trained",
        metavar="FIELD",
        help="with --columns: the field that says which tokens are trained on (default: all are)",
    )


def run(options: argparse.Namespace) -> tuple[Any, int]:
    """Return what to print, and the exit code.

    Effects:
        Writes the token file, and for `bpe:N` a tokenizer; progress goes to stderr.
    """
    try:
        return _prepared(options), 0
    except KeyboardInterrupt:
        say_on_stderr("")
        return {"error": _interrupted(options.out)}, _INTERRUPTED


def _prepared(options: argparse.Namespace) -> dict[str, Any]:
    from trainkit.text.chat import template_hash  # noqa: PLC0415
    from trainkit.text.corpora.text_files import TEXT_SUFFIXES  # noqa: PLC0415
    from trainkit.text.prepare.prepare import check_output, prepare_corpus  # noqa: PLC0415

    check_output(options.out)
    _check_options(options)
    keep = partial(_is_kept, options.exclude) if options.exclude else None
    files = {"suffixes": options.suffix or list(TEXT_SUFFIXES), "keep": keep}
    begun = time.monotonic()
    tokenizer, facts = _tokenizer(options, files)
    template = _template(options, tokenizer) if options.messages else None
    facts |= {} if template is None else {"template": template}
    made_with = {key: facts[key] for key in ("tokenizer", "template") if key in facts}
    done = prepare_corpus(
        options.source,
        options.out,
        tokenizer=tokenizer,
        make_encode=_make_encode(options, template),
        template_hash=None if template is None else template_hash(template),
        made_with=made_with,
        field=options.field or "text",
        workers=options.workers,
        log=say_on_stderr,
        progress=_progress_printer(),
        **files,
    )
    return _report(done, facts, time.monotonic() - begun)


def _interrupted(out: Path) -> str:
    parts = out.with_name(f"{out.name}.parts")
    if parts.is_dir():
        return (
            f"interrupted; finished parts lie in {parts}: give the same command again to go on "
            "from there"
        )
    return "interrupted before a part was finished: the same command begins anew"


def _report(done: PrepareResult, facts: dict[str, Any], seconds: float) -> dict[str, Any]:
    report = attrs.asdict(done) | {"path": str(done.path), "seconds": round(seconds, 3)}
    return report | {"tokens_per_second": round(done.tokens_per_second)} | facts


def _is_kept(patterns: list[str], name: str) -> bool:
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
    if options.trained is not None and not options.columns:
        raise ConfigError("prepare: --trained is for records of token ids: give --columns too")
    if options.columns and options.messages:
        raise ConfigError("prepare: --columns is for records of token ids, --messages for others")
    if options.max_length is not None and options.max_length < 1:
        raise ConfigError(f"prepare: --max-length must be at least 1, got {options.max_length}")


def _column(told: str) -> tuple[str, Column]:
    """Return the name of a column, and what it is, from NAME:DTYPE[:K][:token].

    Examples:
        >>> _column("choices:int64:2:token")
        ('choices', Column(dtype='int64', inner=(2,), of='token'))
    """
    name, *rest = told.split(":")
    of = "token" if rest[1:] and rest[-1] == "token" else "label"
    dtype, *inner = rest[: len(rest) - (of == "token")] or [""]
    if not (name and dtype) or len(inner) > 1 or not all(size.isdecimal() for size in inner):
        must = "NAME:DTYPE[:K][:token], such as weights:float32 or choices:int64:2:token"
        raise ConfigError(f"prepare: --columns must be {must}, got {told!r}")
    return name, Column(dtype, tuple(map(int, inner)), of)


def _template(options: argparse.Namespace, tokenizer: Tokenizer) -> str:
    """Return the name of the template: that given, or that of the tokenizer's folder, or chatml."""
    from trainkit.text.chat import choose_template_name, locate_template  # noqa: PLC0415

    own = locate_template(options.tokenizer)
    return choose_template_name(options.template, tokenizer, own=own, where=options.tokenizer)


def encode_conversations(tokenizer: Tokenizer, *, template: str, **options: Any) -> Any:
    """Return a chat encoder for a template by its name, which each process loads for itself."""
    from trainkit.text.chat import load_template, make_chat_encoder  # noqa: PLC0415

    return make_chat_encoder(tokenizer, template=load_template(template), **options)


def _make_encode(
    options: argparse.Namespace, template: str | None
) -> Callable[[Tokenizer], Any] | None:
    if options.columns:
        from trainkit.text.tokenizers import make_sample_encoder  # noqa: PLC0415

        how = {"tokens": options.field or "tokens", "trained": options.trained}
        return partial(make_sample_encoder, columns=dict(map(_column, options.columns)), **how)
    if template is None:
        return None
    return partial(
        encode_conversations,
        template=template,
        field=options.field or "messages",
        train=options.train_on or "assistant",
        max_length=options.max_length,
        overlong="error" if options.max_length is None else "drop",
    )


def _tokenizer(
    options: argparse.Namespace, files: dict[str, Any]
) -> tuple[Tokenizer, dict[str, Any]]:
    """Return the tokenizer, and what the report says of it; `files` says which are the corpus's."""
    from trainkit.text.tokenizers import open_tokenizer  # noqa: PLC0415

    kind, _, size = options.tokenizer.partition(":")
    if kind == "bpe" and not Path(options.tokenizer).exists():
        if not size.isdecimal():
            raise ConfigError(f"prepare: --tokenizer bpe:N wants a number, got {size!r}")
        return _trained(options, files, int(size))
    return open_tokenizer(options.tokenizer), {"tokenizer": options.tokenizer}


def _trained(
    options: argparse.Namespace, files: dict[str, Any], size: int
) -> tuple[Tokenizer, dict[str, Any]]:
    """Train a BPE on the beginning of the corpus and write it beside the corpus."""
    from trainkit.text.tokenizers import CHAT_SPECIAL, save_tokenizer, train_bpe  # noqa: PLC0415
    from trainkit.text.tokenizers.special import BOS, EOS, PAD  # noqa: PLC0415

    if options.messages or options.columns:
        what = "conversations" if options.messages else "token ids"
        raise ConfigError(f"prepare: bpe:N is trained on text; give {what} a tokenizer.json")
    seen = [0, 0]
    say_on_stderr(f"training a BPE of {size} tokens")
    texts = _texts(options, files, seen)
    tokenizer = train_bpe(texts, vocab_size=size, special=(BOS, EOS, PAD, *CHAT_SPECIAL))
    path = options.out.with_suffix(".tokenizer.json")
    save_tokenizer(tokenizer, path)
    say_on_stderr(f"wrote {path}: {tokenizer.vocab_size} tokens, from {seen[0]} documents")
    facts = {"tokenizer": str(path), "bpe_documents": seen[0], "bpe_characters": seen[1]}
    return tokenizer, facts


def _texts(options: argparse.Namespace, files: dict[str, Any], seen: list[int]) -> Iterator[str]:
    """Yield the first texts of the corpus, and count them."""
    from trainkit.text.prepare.chunks import describe_document, read_chunk  # noqa: PLC0415
    from trainkit.text.prepare.prepare import split_sources  # noqa: PLC0415
    from trainkit.text.tokenizers.documents import get_text  # noqa: PLC0415

    field = options.field or "text"
    for chunk in split_sources(options.source, **files):
        for index, record in enumerate(read_chunk(chunk, columns=[field])):
            try:
                text = get_text(record, field)
            except DataError as error:
                raise DataError(f"{describe_document(chunk, index)}: {error}") from error
            seen[0] += 1
            seen[1] += len(text)
            yield text
            if seen[1] >= _SAMPLE:
                return


# ---------------------------------------------------------------------------------------- progress


def _progress_printer() -> Callable[[PrepareProgress], None]:
    """Return what prints progress: in place on a terminal, in a log every 10 s."""
    terminal = sys.stderr.isatty()
    last = [time.monotonic() - (10.0 if terminal else 0.0)]

    def show(progress: PrepareProgress) -> None:
        now, complete = time.monotonic(), progress.bytes == progress.total_bytes
        if now - last[0] < (0.2 if terminal else 10.0) and not complete:
            return
        last[0] = now
        line = progress_line(progress)
        sys.stderr.write(
            f"\r\x1b[K{line}{chr(10) if complete else ''}" if terminal else f"{line}\n"
        )
        sys.stderr.flush()

    return show


def progress_line(progress: PrepareProgress) -> str:
    """Return one line about how far it is.

    Examples:
        >>> from trainkit.text.prepare.prepare import PrepareProgress
        >>> progress_line(PrepareProgress(1200, 3_400_000, 50_000_000, 200_000_000, 0, 10.0))
        ' 25 %  1,200 documents  3,400,000 tokens  5.0 MB/s  0:00:30 left'
    """
    speed = (progress.bytes - progress.reused_bytes) / max(progress.seconds, 1e-9)
    left = (progress.total_bytes - progress.bytes) / speed if speed else 0.0
    minutes, seconds = divmod(round(left), 60)
    time_left = f"{minutes // 60}:{minutes % 60:02}:{seconds:02} left" if speed else "starting"
    return (
        f"{progress.bytes / max(progress.total_bytes, 1):4.0%}".replace("%", " %")
        + f"  {progress.documents:,} documents  {progress.tokens:,} tokens"
        f"  {speed / 1e6:.1f} MB/s  {time_left}"
    )
