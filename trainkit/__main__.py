"""`python -m trainkit checkpoint ls|verify|prune DIR`: look after checkpoints without loading them.

Prints JSON. `verify` takes one checkpoint and exits with 0 or 66. Nothing here imports torch.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any, NoReturn

import orjson

from trainkit.checkpoint.manifest import list_checkpoints, prune_checkpoints, verify_checkpoint
from trainkit.types import CheckpointError, ConfigError


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are ours."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{self.prog}: {message}", hint=self.format_usage().strip())


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m trainkit", description=__doc__.splitlines()[0])
    rooms = parser.add_subparsers(dest="room", required=True)
    checkpoint = rooms.add_parser("checkpoint", help="list, verify and delete checkpoints")
    actions = checkpoint.add_subparsers(dest="action", required=True)
    listing = actions.add_parser("ls", help="list the checkpoints of a run, newest first")
    listing.add_argument("directory", type=Path, help="a run directory or its checkpoints/")
    verify = actions.add_parser("verify", help="check every byte of one checkpoint")
    verify.add_argument("directory", type=Path, help="one checkpoint, step_00000012")
    prune = actions.add_parser("prune", help="delete all but the newest checkpoints that verify")
    prune.add_argument("directory", type=Path, help="a run directory or its checkpoints/")
    prune.add_argument("--keep", type=int, default=2, help="how many stay (default 2)")
    prune.add_argument("--dry-run", action="store_true", help="only say what would go")
    return parser


def _home(directory: Path) -> Path:
    """Return the checkpoints/ of a run directory, or the directory itself."""
    if not directory.is_dir():
        raise CheckpointError(f"checkpoint: {directory} is not a directory", where=directory)
    inside = directory / "checkpoints"
    return inside if inside.is_dir() else directory


def _run(options: argparse.Namespace) -> tuple[Any, int]:
    """Return what to print, and the exit code."""
    if options.action == "verify":
        problems = verify_checkpoint(options.directory)
        report = {"checkpoint": str(options.directory), "ok": not problems, "problems": problems}
        return report, 66 if problems else 0
    home = _home(options.directory)
    if options.action == "prune":
        return prune_checkpoints(home, keep=options.keep, dry_run=options.dry_run), 0
    rows = []
    for path in list_checkpoints(home):
        problems = verify_checkpoint(path)
        size = sum(file.stat().st_size for file in path.iterdir()) if path.is_dir() else 0
        rows.append({"name": path.name, "ok": not problems, "problems": problems, "bytes": size})
    return rows, 0


def main(argv: list[str] | None = None) -> int:
    """Run one command; return its exit code.

    Effects:
        Prints JSON to stdout; `prune` deletes directories.
    """
    try:
        report, code = _run(_parser().parse_args(argv))
    except ValueError as error:
        report, code = {"error": str(error)}, getattr(error, "code", 64)
    sys.stdout.buffer.write(orjson.dumps(report, option=orjson.OPT_INDENT_2) + b"\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
