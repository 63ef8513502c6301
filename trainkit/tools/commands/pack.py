"""`python -m trainkit pack CORPUS --capacity N`: pack a corpus and report the padding.

Nothing is trained. Prints `packing.report_packing`; `--out` draws the rows.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit.types import DataError

if TYPE_CHECKING:
    import argparse


HELP = "pack a corpus into rows and report the padding"


def add(pack: argparse.ArgumentParser) -> None:
    """Add the command's flags to its parser."""
    pack.add_argument("corpus", type=Path, help="a token file, a .jsonl file, a directory of text")
    pack.add_argument("--capacity", type=int, required=True, help="tokens per row")
    fits = ("best_fit", "first_fit", "sequential")
    which = pack.add_mutually_exclusive_group()
    which.add_argument("--fit", choices=fits, default="best_fit", help="which row takes a document")
    which.add_argument(
        "--balanced",
        type=int,
        metavar="ROWS",
        help="fill a multiple of ROWS rows about equally",
    )
    pack.add_argument(
        "--group-size", type=int, default=100_000, help="pieces packed together; 0 means all"
    )
    policies = ("split", "truncate", "drop", "error")
    pack.add_argument(
        "--overlong", choices=policies, default="split", help="documents above the capacity"
    )
    pack.add_argument("--multiple-of", type=int, default=1, help="align every piece to this")
    pack.add_argument("--max-documents", type=int, help="maximum number of pieces in a row")
    pack.add_argument("--seed", type=int, help="shuffle the documents into groups")
    pack.add_argument("--json", action="store_true", help="print JSON on a terminal too")
    pack.add_argument("--out", type=Path, help="draw the packing into this .png, .svg or .pdf")


def run(options: argparse.Namespace) -> tuple[Any, int]:
    """Pack the corpus and return the report and the exit code.

    Raises:
        DataError: The policies leave no row.

    Effects:
        Writes a picture to `--out`.
    """
    from trainkit import packing  # noqa: PLC0415 -- slow to import
    from trainkit.text.corpora import open_corpus  # noqa: PLC0415 -- slow to import

    # Before the work, which can take minutes.
    if options.out is not None:
        from trainkit.run.plots.drawing import check_picture  # noqa: PLC0415 -- an extra

        check_picture("pack: --out", options.out)
    # `make_balanced_fit` needs a number of rows; the other fits are functions already.
    balanced = options.balanced is not None
    fit = packing.make_balanced_fit(options.balanced) if balanced else getattr(packing, options.fit)
    lengths = open_corpus(options.corpus).lengths
    bins = packing.pack_bins(
        lengths,
        options.capacity,
        fit=fit,
        group_size=options.group_size,
        overlong=options.overlong,
        multiple_of=options.multiple_of,
        max_documents=options.max_documents,
        seed=options.seed,
    )
    report = packing.report_packing(bins, lengths)
    if not report["rows"] and not report["dropped_documents"]:
        raise DataError(
            f"pack: {options.corpus} has no tokens: all {report['documents']} documents are empty",
            where=options.corpus,
            got=0,
            want="at least one row",
        )
    if not report["rows"]:
        raise DataError(
            f"pack: {options.corpus}: no row is left of its {report['documents']} documents: "
            f"{report['empty_documents']} are empty, and {report['dropped_documents']} are longer "
            f"than --capacity {options.capacity} and were dropped; raise it, or use --overlong "
            "split or truncate",
            where=options.corpus,
            got=0,
            want="at least one row",
        )
    if options.out is not None:
        from trainkit.tools.pictures.packing import plot_packing  # noqa: PLC0415 -- an extra

        plot_packing(bins, options.out, lengths=lengths)
    return report, 0
