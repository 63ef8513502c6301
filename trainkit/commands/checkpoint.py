"""`python -m trainkit checkpoint ls|verify|prune DIR`: look after checkpoints without loading them.

`verify` takes one checkpoint and exits with 0 or 66. Nothing here imports torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit.checkpoint.manifest import list_checkpoints, prune_checkpoints, verify_checkpoint
from trainkit.types import CheckpointError

if TYPE_CHECKING:
    import argparse


def add(commands: Any) -> None:
    """Describe the command's flags to the subparsers of `python -m trainkit`."""
    checkpoint = commands.add_parser("checkpoint", help="list, verify and delete checkpoints")
    actions = checkpoint.add_subparsers(dest="action", required=True)
    listing = actions.add_parser("ls", help="list the checkpoints of a run, newest first")
    listing.add_argument("directory", type=Path, help="a run directory or its checkpoints/")
    verify = actions.add_parser("verify", help="check every byte of one checkpoint")
    verify.add_argument("directory", type=Path, help="one checkpoint, step_00000012")
    prune = actions.add_parser("prune", help="delete all but the newest checkpoints that verify")
    prune.add_argument("directory", type=Path, help="a run directory or its checkpoints/")
    prune.add_argument("--keep", type=int, default=2, help="how many stay (default 2)")
    prune.add_argument("--dry-run", action="store_true", help="only say what would go")


def run(options: argparse.Namespace) -> tuple[Any, int]:
    """Return what to print, and the exit code.

    Effects:
        `prune` deletes directories.
    """
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


def _home(directory: Path) -> Path:
    """Return the checkpoints/ of a run directory, or the directory itself."""
    if not directory.is_dir():
        raise CheckpointError(f"checkpoint: {directory} is not a directory", where=directory)
    inside = directory / "checkpoints"
    return inside if inside.is_dir() else directory
