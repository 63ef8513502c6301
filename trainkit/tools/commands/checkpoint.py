"""`python -m trainkit checkpoint ls|verify|diff|prune|export|convert`: manage checkpoints.

Each prints a table on a terminal, JSON elsewhere. Only `export`, `convert` and `diff --values`
import torch.

List checkpoints, newest first, from their metadata alone; with --verify every byte is hashed:

  python -m trainkit checkpoint ls runs/mine
  python -m trainkit checkpoint ls runs/mine --verify

Verify one checkpoint, or all of a run directory; the exit code is 0 or 66:

  python -m trainkit checkpoint verify runs/mine/checkpoints/step_00001000

Compare two: their tensors, counters, facts and configuration; --values measures the differences:

  python -m trainkit checkpoint diff A/step_00001000 B/step_00001000 --values

List what would be deleted if the last three and every thousandth step are retained:

  python -m trainkit checkpoint prune runs/mine --keep 3 --every 1000 --dry-run

Export weights in bfloat16, as safetensors files of at most 4 GB:

  python -m trainkit checkpoint export runs/mine weights/ --dtype bfloat16

Convert foreign weights. No code of the source is ever executed:

  python -m trainkit checkpoint convert pytorch_model.bin weights/
  python -m trainkit checkpoint convert dcp/step-1000 weights/ --prefix model.

Exit codes: 0 success, 1 two checkpoints differ, 64 wrong use (a target that exists, say), 66 a
checkpoint does not verify or is rejected, 74 the disk is full or cannot be written.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from trainkit.files import print_to_stderr
from trainkit.types import CheckpointError
from trainkit.weights.checkpoint.describe import describe_checkpoint
from trainkit.weights.checkpoint.manifest import find_checkpoint, list_checkpoints
from trainkit.weights.checkpoint.retention import Retention, apply_retention
from trainkit.weights.checkpoint.safe_files import find_owner_problems

_DAMAGED = 66


HELP = "list, verify, compare, delete, export and convert checkpoints"


def add(checkpoint: argparse.ArgumentParser) -> None:
    """Add the command's flags to its parser."""
    actions = checkpoint.add_subparsers(dest="action", required=True)
    parsers = {
        name: actions.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        for name, text in {
            "ls": "list the checkpoints of a run, newest first",
            "verify": "check every byte of a checkpoint, an exported folder, or all of a run",
            "diff": "compare two checkpoints",
            "prune": "delete old checkpoints; never the newest that verify, nor pinned ones",
            "export": "write the weights of a checkpoint as safetensors files",
            "convert": "turn torch.distributed.checkpoint, torch.save or safetensors into weights",
        }.items()
    }
    for name in ("ls", "prune"):
        parsers[name].add_argument("directory", type=Path, help="a run, or its checkpoints/")
    parsers["ls"].add_argument("--verify", action="store_true", help="hash every byte of each")
    parsers["verify"].add_argument("directory", type=Path, help="a checkpoint or a run directory")
    diff = parsers["diff"]
    diff.add_argument("a", type=Path, help="a checkpoint, or a run for its newest")
    diff.add_argument("b", type=Path, help="another")
    diff.add_argument(
        "--values",
        action="store_true",
        help="read both and report max|a-b|, max|b|, their ratio and the number of elements that "
        "differ, per tensor",
    )
    _add_prune(parsers["prune"])
    export, convert = parsers["export"], parsers["convert"]
    export.add_argument("source", type=Path, help="a checkpoint, or a run for its newest")
    convert.add_argument(
        "source",
        type=Path,
        help="a directory with .metadata, a .pt, .pth or .bin file, or safetensors",
    )
    _add_output(export)
    _add_output(convert)
    convert.add_argument(
        "--prefix", default="", help="select tensors whose names start with this, and strip it"
    )
    for parser in parsers.values():
        parser.add_argument("--json", action="store_true", help="print JSON on a terminal too")
        parser.add_argument(
            "--strict-owner",
            action="store_true",
            help="reject files that other users own or may write (default: warn on stderr)",
        )


def _add_prune(prune: argparse.ArgumentParser) -> None:
    prune.add_argument(
        "--keep", type=int, default=3, help="retain this many of the newest, at least 2 (default 3)"
    )
    prune.add_argument(
        "--every", type=int, default=0, metavar="N", help="also retain the steps that N divides"
    )
    prune.add_argument(
        "--best", type=int, default=0, metavar="N", help="also retain the N with the lowest score"
    )
    prune.add_argument("--dry-run", action="store_true", help="delete nothing, only report")


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="the folder to write")
    parser.add_argument(
        "--dtype",
        choices=("float64", "float32", "float16", "bfloat16"),
        help="dtype of floating-point tensors (default: unchanged)",
    )
    parser.add_argument(
        "--shard-bytes",
        type=int,
        default=4_000_000_000,
        help="maximum size of a file (default 4 GB)",
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace a folder that this command wrote"
    )


def run(options: argparse.Namespace) -> tuple[Any, int]:
    """Run the action and return its report and the exit code.

    Effects:
        `prune` deletes directories, `export` and `convert` write one. Warns on stderr about files
        that other users could have written.
    """
    actions = {
        "ls": _ls,
        "verify": _verify,
        "diff": _diff,
        "prune": _prune,
        "export": _export,
        "convert": _convert,
    }
    return actions[options.action](options)


def _check_owners(path: Path, *, strict: bool) -> None:
    """Warn about files that other users own or may write, or raise CheckpointError if strict."""
    # Whoever may write to the folder of a file can replace it.
    folder = path if path.is_dir() else path.parent
    problems = find_owner_problems(folder) if folder.is_dir() else []
    if problems and strict:
        raise CheckpointError(
            f"checkpoint: {problems[0]}; --strict-owner rejects that",
            where=path,
            got=problems,
            hint="chmod go-w, chown, or copy it to a directory that only you can write",
        )
    for problem in problems:
        print_to_stderr(f"warning: {problem}; another user may have changed its values")


def _find_home(directory: Path) -> Path:
    """Return the checkpoints/ of a run directory, or the directory itself."""
    if not directory.is_dir():
        raise CheckpointError(f"checkpoint: {directory} is not a directory", where=directory)
    inside = directory / "checkpoints"
    return inside if inside.is_dir() else directory


def _check_files(path: Path) -> tuple[bool | None, list[str]]:
    """Return (ok, problems) of a checkpoint; ok is None if it was deleted meanwhile."""
    from trainkit.weights.checkpoint.sources import verify_any  # noqa: PLC0415 - `ls` does without it

    problems = verify_any(path)
    # A run that is still training deletes old checkpoints while this command reads them.
    if problems and not path.exists():
        return None, [f"{path} was deleted after it was listed, by retention or by somebody"]
    return not problems, problems


def _ls(options: argparse.Namespace) -> tuple[Any, int]:
    home = _find_home(options.directory)
    _check_owners(home, strict=options.strict_owner)
    rows = []
    for path in list_checkpoints(home):
        row = describe_checkpoint(path)
        if options.verify:
            ok, problems = _check_files(path)
            row |= {"ok": ok, "problems": problems}
        rows.append(row)
    # None is a checkpoint that was deleted meanwhile, which is no damage.
    return rows, _DAMAGED if any(row.get("ok") is False for row in rows) else 0


def _verify(options: argparse.Namespace) -> tuple[Any, int]:
    directory = options.directory
    _check_owners(directory, strict=options.strict_owner)
    existed = directory.exists()  # before the check, during which retention may delete it
    # A run, its checkpoints/, or else a single checkpoint.
    of_run = list_checkpoints(directory / "checkpoints") or list_checkpoints(directory)
    reports = []
    for path in of_run or [directory]:
        ok, problems = _check_files(path)
        reports.append({"checkpoint": str(path), "ok": ok, "problems": problems})
    # A run gives a list, even of one checkpoint; a checkpoint gives one report.
    if of_run:
        return reports, _DAMAGED if any(report["ok"] is False for report in reports) else 0
    if not existed:
        reports[0] |= {"ok": False, "problems": [f"{directory} does not exist"]}
    return reports[0], 0 if reports[0]["ok"] else _DAMAGED


def _find_source(path: Path, *, strict: bool) -> Path:
    """Return a checkpoint, or the newest of a run, with every byte verified."""
    source = find_checkpoint(path, log=print_to_stderr)
    _check_owners(source, strict=strict)
    return source


def _diff(options: argparse.Namespace) -> tuple[Any, int]:
    from trainkit.weights.checkpoint.diff import diff_checkpoints  # noqa: PLC0415 - `ls` does without it

    a = _find_source(options.a, strict=options.strict_owner)
    b = _find_source(options.b, strict=options.strict_owner)
    report = diff_checkpoints(a, b, values=options.values)
    # As diff(1): a difference is no error.
    return report, 0 if report["same"] else 1


def _prune(options: argparse.Namespace) -> tuple[Any, int]:
    home = _find_home(options.directory)
    _check_owners(home, strict=options.strict_owner)
    policy = Retention(last=options.keep, every=options.every, best=options.best)
    # Messages go to stderr, because stdout may be read as JSON.
    report = apply_retention(home, policy, log=print_to_stderr, dry_run=options.dry_run)
    # Checkpoints are there, and none of them verifies: nothing was deleted.
    return report, _DAMAGED if report["kept"] and not report["verified"] else 0


def _export(options: argparse.Namespace) -> tuple[Any, int]:
    from trainkit.weights.checkpoint.export import export_checkpoint  # noqa: PLC0415 - `ls` does without it

    report = export_checkpoint(
        _find_source(options.source, strict=options.strict_owner),
        folder=options.folder,
        dtype=options.dtype,
        shard_bytes=options.shard_bytes,
        overwrite=options.overwrite,
    )
    return report, 0


def _convert(options: argparse.Namespace) -> tuple[Any, int]:
    from trainkit.weights.convert.weights import convert_weights  # noqa: PLC0415 - as above

    _check_owners(options.source, strict=options.strict_owner)
    report = convert_weights(
        options.source,
        prefix=options.prefix,
        folder=options.folder,
        dtype=options.dtype,
        shard_bytes=options.shard_bytes,
        overwrite=options.overwrite,
    )
    return report, 0
