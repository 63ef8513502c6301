"""`python -m trainkit COMMAND`: tools around a run.

On a terminal they print tables and sentences; elsewhere, and with --json, records are JSON, and so
is an error: {"error": ..., "hint": ...}. Either way errors have exit codes.

Training itself is a recipe: a script, which you copy and change. These commands stand around it:

  python -m trainkit recipes                   the recipes, with a sentence each
  python -m trainkit recipe pretrain > train.py
                                               a copy of one, to run or to change
  python -m trainkit plan --size llama-3.1-8b --world 8 --hardware h100 --row-length 8192
                                               which layouts fit, and how fast each would be
  python -m trainkit launch --nproc-per-node 8 train.py
                                               torchrun, with the exit code of its workers
  python -m trainkit prepare books/ --out books.tokens
                                               text into tokens, once, in parallel
  python -m trainkit data show books.tokens    what is in it; data verify reads every byte
  python -m trainkit pack books.tokens --capacity 4096
                                               what packing it into rows would come to
  python -m trainkit score runs/mine books.tokens --out scored.tokens
                                               a model's log-probabilities, stored as columns
  python -m trainkit checkpoint ls runs/mine   what a run has saved; also verify, diff, prune,
                                               export and convert
  python -m trainkit export runs/mine model/   a run as a Hugging Face folder
  python -m trainkit report runs/mine          a page about a run, or several, for a browser
  python -m trainkit certify --world 2         that two ranks compute what one computes
  python -m trainkit runs                      the runs in runs/: state, step, loss, age, layout
  python -m trainkit diff runs/one runs/two    from which step on two runs differ, and in what
  python -m trainkit control runs/mine save    save, stop, evaluate and more, while it trains
  python -m trainkit doctor                    what a bug report needs: versions, devices, limits,
                                               and what of it will hurt

Each explains itself, with examples: python -m trainkit COMMAND --help

Exit codes: 0 fine, 64 wrong use, 65 data, 66 a checkpoint, 67 numbers, 68 a run
that does not answer, 70 a bug, 74 the disk, 76 interrupted.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import NoReturn

import orjson

from trainkit.buckets.urls import find_url
from trainkit.files import print_to_stderr
from trainkit.run.config import check_argv
from trainkit.run.errors import get_exit_code, open_standard_streams
from trainkit.tools.commands import (
    certify,
    checkpoint,
    control,
    data,
    diff,
    doctor,
    export,
    launch,
    pack,
    plan,
    prepare,
    recipe,
    recipes,
    report,
    runs,
    score,
)
from trainkit.tools.commands.text import as_text
from trainkit.types import ConfigError
from trainkit.weights.checkpoint.bucket_runs import fetch_lines, fetch_model

COMMANDS = {
    "recipes": recipes,
    "recipe": recipe,
    "plan": plan,
    "launch": launch,
    "prepare": prepare,
    "data": data,
    "pack": pack,
    "score": score,
    "checkpoint": checkpoint,
    "export": export,
    "report": report,
    "certify": certify,
    "runs": runs,
    "diff": diff,
    "control": control,
    "doctor": doctor,
}


_INDENT = orjson.OPT_INDENT_2


class _Parser(argparse.ArgumentParser):
    """A parser that raises ConfigError in place of exiting."""

    def error(self, message: str) -> NoReturn:
        # argparse would print and exit with 2, which is none of the documented codes.
        raise ConfigError(f"{self.prog}: {message}", hint=self.format_usage().strip())


def _make_parser() -> argparse.ArgumentParser:
    # The descriptions are docstrings, whose lines must not be filled anew.
    form = argparse.RawDescriptionHelpFormatter
    parser = _Parser(prog="python -m trainkit", description=__doc__, formatter_class=form)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, command in COMMANDS.items():
        subparser = commands.add_parser(
            name, help=command.HELP, description=command.__doc__, formatter_class=form
        )
        command.add(subparser)
    return parser


def _fetch_urls(options: argparse.Namespace) -> None:
    """Replace URLs of buckets by local paths, in the arguments of commands that read a run.

    Raises:
        ConfigError: A URL stands where only a path of this machine can.
    """
    for name, value in vars(options).items():
        paths = value if isinstance(value, list) else [value]
        if not any(isinstance(path, Path) and find_url(path) for path in paths):
            continue
        argument = f"{options.command} {name}"
        if argument in _OPENED:  # what opens it takes URLs
            continue
        if argument not in _FETCHED:
            raise ConfigError(
                f"python -m trainkit {options.command}: {next(filter(find_url, paths))} is in a "
                f"bucket, and its argument {name} takes paths of this machine",
                where=name,
                hint="copy it with a tool of the bucket, or name a local folder",
            )
        fetched = [_FETCHED[argument](path, log=print_to_stderr) for path in paths]
        setattr(options, name, fetched if isinstance(value, list) else fetched[0])


# By command and argument. Of a run that is only looked at, its lines are enough.
_FETCHED = {
    "report run": fetch_lines,
    "diff a": fetch_lines,
    "diff b": fetch_lines,
    "export source": fetch_model,
    "score model": fetch_model,
}
_OPENED = (
    "data path",
    "pack corpus",
    "prepare source",
    "score corpus",
)


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code; without a command, print the help.

    Effects:
        Those of the command. Prints its result: text as it is, records as a table on a terminal and
        as JSON elsewhere.
    """
    words = sys.argv[1:] if argv is None else argv
    open_standard_streams()
    # Before the words are parsed, because a parsing error is reported in the same form.
    is_for_people = sys.stdout.isatty() and "--json" not in words
    if not words:
        _make_parser().print_help()
        return 0
    try:
        check_argv(words)
        options = _make_parser().parse_args(words)
        _fetch_urls(options)
        report, code = COMMANDS[options.command].run(options)
    # A TrainkitError is a ValueError; any other exception is a bug and keeps its traceback.
    except (ValueError, OSError, KeyboardInterrupt) as error:
        stopped = isinstance(error, KeyboardInterrupt)
        what = getattr(error, "what", str(error)) or (
            "interrupted" if stopped else type(error).__name__
        )
        hint = getattr(error, "hint", None)
        # JSON may go to a file while a person at the terminal waits for it.
        if is_for_people or (sys.stderr.isatty() and not sys.stdout.isatty()):
            sys.stderr.write(f"error: {what}\n" + (f"hint: {hint}\n" if hint else ""))
        report = {"error": what} | ({"hint": hint} if hint else {})
        code = get_exit_code(error)
        if is_for_people:
            return code
    if report is None:  # the command has printed all there is
        return code
    if is_for_people and not isinstance(report, str):
        report = as_text(report)
    # UTF-8 whatever the locale, as a program that reads JSON expects.
    text = report.encode() if isinstance(report, str) else orjson.dumps(report, option=_INDENT)
    sys.stdout.buffer.write(text + b"\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
