"""`python -m trainkit data verify|show PATH`: check every byte of a corpus, or describe it.

`verify` exits with 0 or 65.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import argparse


HELP = "look at a corpus, and check it"


def add(data: argparse.ArgumentParser) -> None:
    """Add the command's flags to its parser."""
    actions = data.add_subparsers(dest="action", required=True)
    verify = actions.add_parser("verify", help="check every byte and every token of a corpus")
    verify.add_argument("path", type=Path, help="any corpus that open_corpus opens")
    verify.add_argument(
        "--vocab-size",
        type=int,
        metavar="N",
        help="tokens must be below N, in files that do not store the size of their vocabulary",
    )
    show = actions.add_parser("show", help="describe a corpus; text is counted in bytes")
    show.add_argument("path", type=Path, help="any corpus that open_corpus opens")
    for parser in (verify, show):
        parser.add_argument("--json", action="store_true", help="print JSON on a terminal too")
    show.add_argument("--document", type=int, default=0, help="document to show (default 0)")


def run(options: argparse.Namespace) -> tuple[Any, int]:
    """Return a report and the exit code: 65 if `verify` finds a problem."""
    from trainkit.text.corpora.verify import describe_corpus, verify_corpus  # noqa: PLC0415 (loads numba)

    if options.action == "show":
        return describe_corpus(options.path, document=options.document), 0
    report = verify_corpus(options.path, vocab_size=options.vocab_size)
    return report, 0 if report["ok"] else 65
