"""`python -m trainkit COMMAND`: tools around a run. Each prints JSON; errors have exit codes."""

from __future__ import annotations

import argparse
import sys
from typing import NoReturn

import orjson

from trainkit.commands import checkpoint, data, plan, prepare
from trainkit.runtime import error_code
from trainkit.types import ConfigError

COMMANDS = {"checkpoint": checkpoint, "data": data, "plan": plan, "prepare": prepare}


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


def main(argv: list[str] | None = None) -> int:
    """Run one command; return its exit code.

    Effects:
        Prints JSON to stdout, and does what the command does.
    """
    try:
        options = _parser().parse_args(argv)
        report, code = COMMANDS[options.command].run(options)
    except (ValueError, OSError) as error:
        hint = getattr(error, "hint", None)
        report = {"error": str(error)} | ({"hint": hint} if hint else {})
        code = error_code(error)
    sys.stdout.buffer.write(orjson.dumps(report, option=orjson.OPT_INDENT_2) + b"\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
