"""`python -m trainkit COMMAND`: tools around a run, which print JSON or a table.

Errors are JSON, and have exit codes.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any, NoReturn

import orjson

from trainkit.commands import certify, checkpoint, data, pack, plan, prepare
from trainkit.runtime.errors import error_code
from trainkit.types import ConfigError

COMMANDS = {
    "certify": certify,
    "checkpoint": checkpoint,
    "data": data,
    "pack": pack,
    "plan": plan,
    "prepare": prepare,
}


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are ours."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{self.prog}: {message}", hint=self.format_usage().strip())


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m trainkit", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for command in COMMANDS.values():
        command.add(commands)
    return parser


def _json(report: Any) -> bytes:
    return orjson.dumps(report, option=orjson.OPT_INDENT_2)


def main(argv: list[str] | None = None) -> int:
    """Run one command; return its exit code.

    Effects:
        Prints what the command returns, text as it is and all else as JSON, and does what the
        command does.
    """
    try:
        options = _parser().parse_args(argv)
        report, code = COMMANDS[options.command].run(options)
    except (ValueError, OSError) as error:
        hint = getattr(error, "hint", None)
        report = {"error": str(error)} | ({"hint": hint} if hint else {})
        code = error_code(error)
    text = report.encode() if isinstance(report, str) else _json(report)
    sys.stdout.buffer.write(text + b"\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
