"""`python -m trainkit checkpoint ls|verify|diff|prune|export|convert`: look after checkpoints.

Each prints a table on a terminal, JSON elsewhere. What does not verify ends with 66. Only `export`,
`convert` and `diff --values` import torch.

What is there, newest first, without reading it all; and with every byte hashed:

  python -m trainkit checkpoint ls runs/mine
  python -m trainkit checkpoint ls runs/mine --verify

Is this one as it was written? Exit code 0 or 66. A run directory means all of its checkpoints:

  python -m trainkit checkpoint verify runs/mine/checkpoints/step_00001000

What differs between two: tensors, counters, facts, configuration; then by how much:

  python -m trainkit checkpoint diff A/step_00001000 B/step_00001000 --values

Which would go if three were kept, and every thousandth step:

  python -m trainkit checkpoint prune runs/mine --keep 3 --every 1000 --dry-run

Weights for others, in bfloat16, as safetensors files of at most 4 GB:

  python -m trainkit checkpoint export runs/mine weights/ --dtype bfloat16

Others' weights for trainkit. Nothing of the source is ever executed:

  python -m trainkit checkpoint convert pytorch_model.bin weights/
  python -m trainkit checkpoint convert dcp/step-1000 weights/ --prefix model.

Exit codes: 0 fine, 1 two checkpoints differ, 64 wrong use (a target that exists, say), 66 something
does not verify or is refused, 74 the disk is full or cannot be written.
"""

from __future__ import annotations

import argparse
import functools
from pathlib import Path
from typing import Any

from trainkit.files import say_on_stderr
from trainkit.types import CheckpointError
from trainkit.weights.checkpoint.describe import describe_checkpoint
from trainkit.weights.checkpoint.manifest import find_checkpoint, list_checkpoints
from trainkit.weights.checkpoint.retention import Retention, apply_retention
from trainkit.weights.checkpoint.safe_files import find_owner_problems

_DAMAGED = 66


HELP = "list, verify, compare, delete, export and convert checkpoints"


def add(checkpoint: argparse.ArgumentParser) -> None:
    """Describe the command's flags to its parser."""
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
    parsers["verify"].add_argument("directory", type=Path, help="one of them, or a run directory")
    _add_diff(parsers["diff"])
    _add_prune(parsers["prune"])
    for name in ("export", "convert"):
        _add_target(parsers[name], foreign=name == "convert")
    for parser in parsers.values():
        parser.add_argument("--json", action="store_true", help="print JSON on a terminal too")
        parser.add_argument(
            "--strict-owner",
            action="store_true",
            help="refuse what other users own or may write (by default a warning on stderr)",
        )


def _add_diff(diff: argparse.ArgumentParser) -> None:
    diff.add_argument("a", type=Path, help="a checkpoint, or a run for its newest")
    diff.add_argument("b", type=Path, help="another")
    diff.add_argument(
        "--values",
        action="store_true",
        help="read both and tell max|a-b|, max|b|, their ratio and how many elements differ, for "
        "each tensor",
    )


def _add_prune(prune: argparse.ArgumentParser) -> None:
    prune.add_argument(
        "--keep", type=int, default=3, help="the newest that stay, at least 2 (default 3)"
    )
    prune.add_argument(
        "--every", type=int, default=0, metavar="N", help="and the steps that N divides"
    )
    prune.add_argument(
        "--best", type=int, default=0, metavar="N", help="and the N with the lowest score"
    )
    prune.add_argument("--dry-run", action="store_true", help="only say what would go")


def _add_target(parser: argparse.ArgumentParser, *, foreign: bool) -> None:
    if foreign:
        parser.add_argument(
            "source",
            type=Path,
            help="a directory with .metadata, a .pt, .pth or .bin file, or safetensors",
        )
    else:
        parser.add_argument("source", type=Path, help="a checkpoint, or a run for its newest")
    parser.add_argument("folder", type=Path, help="the folder to make")
    parser.add_argument(
        "--dtype",
        choices=("float64", "float32", "float16", "bfloat16"),
        help="of floating-point tensors (default: as they are)",
    )
    parser.add_argument(
        "--shard-bytes", type=int, default=4_000_000_000, help="most of a file (default 4 GB)"
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace a folder that this command wrote"
    )
    if foreign:
        parser.add_argument(
            "--prefix",
            default="",
            help="only tensors whose names begin so; it is taken off their names",
        )


def run(options: argparse.Namespace) -> tuple[Any, int]:
    """Return what to print, and the exit code.

    Effects:
        `prune` deletes directories, `export` and `convert` write one; warns on stderr of what other
        users could have written.
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


def _heed_owners(path: Path, *, strict: bool) -> None:
    """Warn of what others own or may write, or refuse it."""
    folder = path if path.is_dir() else path.parent
    problems = find_owner_problems(folder) if folder.is_dir() else []
    if problems and strict:
        raise CheckpointError(
            f"checkpoint: {problems[0]}; --strict-owner refuses that",
            where=path,
            got=problems,
            hint="chmod go-w, chown, or copy it to a place of your own",
        )
    for problem in problems:
        say_on_stderr(f"warning: {problem}; its numbers may be somebody else's")


def _home(directory: Path) -> Path:
    """Return the checkpoints/ of a run directory, or the directory itself."""
    if not directory.is_dir():
        raise CheckpointError(f"checkpoint: {directory} is not a directory", where=directory)
    inside = directory / "checkpoints"
    return inside if inside.is_dir() else directory


def _verified(path: Path) -> tuple[bool | None, list[str]]:
    """Return whether a checkpoint is whole, None if somebody deletes it meanwhile, and problems."""
    from trainkit.weights.checkpoint.sources import verify_any  # noqa: PLC0415 - `ls` does without it

    problems = verify_any(path)
    if problems and not path.exists():
        return None, [f"{path} was deleted after it was listed, by retention or by somebody"]
    return not problems, problems


def _ls(options: argparse.Namespace) -> tuple[Any, int]:
    home = _home(options.directory)
    _heed_owners(home, strict=options.strict_owner)
    rows = []
    for path in list_checkpoints(home):
        row = describe_checkpoint(path)
        if options.verify:
            ok, problems = _verified(path)
            row |= {"ok": ok, "problems": problems}
        rows.append(row)
    return rows, _DAMAGED if any(row.get("ok") is False for row in rows) else 0


def _verify(options: argparse.Namespace) -> tuple[Any, int]:
    directory = options.directory
    _heed_owners(directory, strict=options.strict_owner)
    was_there = directory.exists()
    many = list_checkpoints(directory / "checkpoints") or list_checkpoints(directory)
    reports = [
        {"checkpoint": str(path), "ok": ok, "problems": problems}
        for path in many or [directory]
        for ok, problems in [_verified(path)]
    ]
    if many:
        return reports, _DAMAGED if any(report["ok"] is False for report in reports) else 0
    if not was_there:
        reports[0] |= {"ok": False, "problems": [f"{directory} is not there"]}
    return reports[0], 0 if reports[0]["ok"] else _DAMAGED


def _one(path: Path, *, strict: bool) -> Path:
    """Return the checkpoint that a path names, every byte of it verified."""
    found = find_checkpoint(path, log=say_on_stderr)
    _heed_owners(found, strict=strict)
    return found


def _diff(options: argparse.Namespace) -> tuple[Any, int]:
    from trainkit.weights.checkpoint.diff import diff_checkpoints  # noqa: PLC0415 - `ls` does without it

    a, b = (_one(path, strict=options.strict_owner) for path in (options.a, options.b))
    report = diff_checkpoints(a, b, values=options.values)
    return report, 0 if report["same"] else 1


def _prune(options: argparse.Namespace) -> tuple[Any, int]:
    home = _home(options.directory)
    _heed_owners(home, strict=options.strict_owner)
    policy = Retention(last=options.keep, every=options.every, best=options.best)
    report = apply_retention(home, policy, log=say_on_stderr, dry_run=options.dry_run)
    return report, _DAMAGED if report["kept"] and not report["verified"] else 0


def _export(options: argparse.Namespace) -> tuple[Any, int]:
    from trainkit.weights.checkpoint.export import export_checkpoint  # noqa: PLC0415 - `ls` does without it

    source = _one(options.source, strict=options.strict_owner)
    return _written(functools.partial(export_checkpoint, source), options)


def _convert(options: argparse.Namespace) -> tuple[Any, int]:
    from trainkit.weights.convert.weights import convert_weights  # noqa: PLC0415 - as above

    _heed_owners(options.source, strict=options.strict_owner)
    convert = functools.partial(convert_weights, options.source, prefix=options.prefix)
    return _written(convert, options)


def _written(write: Any, options: argparse.Namespace) -> tuple[Any, int]:
    report = write(
        folder=options.folder,
        dtype=options.dtype,
        shard_bytes=options.shard_bytes,
        overwrite=options.overwrite,
    )
    return report, 0
