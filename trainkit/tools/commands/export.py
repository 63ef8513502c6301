r"""`python -m trainkit export RUN FOLDER`: a run as a Hugging Face folder.

The folder holds config.json, generation_config.json, safetensors files with their index, and the
files of the tokenizer: AutoModelForCausalLM.from_pretrained and AutoTokenizer.from_pretrained load
it. Which family it is of follows from the model:

  python -m trainkit export runs/pretrain model/

In bfloat16, files of at most 2 GB, with the tokenizer of another folder:

  python -m trainkit export runs/finetune model/ --dtype bfloat16 --shard-bytes 2000000000 \
      --tokenizer base/

Of a run that trains adapters it is a folder of PEFT, for PeftModel.from_pretrained; or, with their
base where it was, or where --base says, a whole model:

  python -m trainkit export runs/finetune adapter/
  python -m trainkit export runs/finetune model/ --merge

Exit codes: 0 fine, 64 wrong use (a folder that exists, a model of no known family), 65 no tokenizer
or another than the run's, 66 a checkpoint that does not verify, 74 the disk is full.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from trainkit.files import say_on_stderr
from trainkit.types import ConfigError, DataError
from trainkit.weights.checkpoint.manifest import find_checkpoint

HELP = "write a run as a Hugging Face folder"


def add(parser: argparse.ArgumentParser) -> None:
    """Describe the command's flags to its parser."""
    parser.add_argument("source", type=Path, help="a run, for its newest checkpoint, or one")
    parser.add_argument("folder", type=Path, help="the folder to make")
    parser.add_argument(
        "--dtype",
        choices=("float32", "float16", "bfloat16"),
        help="of parameters (default: as they are)",
    )
    parser.add_argument("--shard-bytes", type=int, help="most of a file (default: 4 GB)")
    parser.add_argument("--family", help="the model_type (default: the first that computes it)")
    parser.add_argument(
        "--tokenizer", help="bytes, a tokenizer.json or its folder (default: the run's)"
    )
    parser.add_argument(
        "--context",
        type=int,
        help="the most tokens that the model is for (default: as the folder that the run began "
        "with, or else the run's row length)",
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace a folder that this command wrote"
    )
    parser.add_argument(
        "--merge", action="store_true", help="of a run of adapters: add them to their base"
    )
    parser.add_argument("--base", help="where the base of adapters is (default: where it was)")
    parser.add_argument("--json", action="store_true", help="print JSON on a terminal too")


def run(options: argparse.Namespace) -> tuple[Any, int]:
    """Return what has been written, and the exit code.

    Effects:
        Writes a folder.
    """
    from trainkit.post import adapters  # noqa: PLC0415 - torch
    from trainkit.weights import hub  # noqa: PLC0415 - torch
    from trainkit.weights.checkpoint.load import read_facts  # noqa: PLC0415 - torch

    path = find_checkpoint(options.source, log=say_on_stderr)
    facts = read_facts(path, needs=["model"])
    adapted = "base" in facts
    if options.merge and not adapted:
        raise ConfigError(f"export: {path} holds a whole model, with no adapters to merge")
    if options.base and not adapted:
        raise ConfigError(f"export: {path} holds a whole model, and --base is about adapters")
    if adapted and not options.merge:
        _refuse_of_whole(options)
        how = {"family": options.family, "base": options.base, "overwrite": options.overwrite}
        return adapters.export_peft(path, options.folder, **how), 0
    context = options.context or facts.get("context") or facts.get("config.row_length")
    if context is None:
        raise ConfigError("export: the run does not say its row length; give --context")
    name, template = _tokenizer(options.tokenizer, facts), facts.get("config.template")
    if template == facts.get("config.tokenizer"):  # its folder's own, wherever that is now
        template = name if template is not None else None
    report = hub.export_folder(
        path,
        options.folder,
        context=context,
        family=options.family,
        files=hub.make_tokenizer_files(name, template=template, adds_bos=_learned_bos(name, facts)),
        dtype=options.dtype,
        shard_bytes=4_000_000_000 if options.shard_bytes is None else options.shard_bytes,
        overwrite=options.overwrite,
        read=adapters.merge_run(path, base=options.base) if adapted else None,
    )
    return report, 0


def _refuse_of_whole(options: argparse.Namespace) -> None:
    """Refuse flags about a whole model: a folder of PEFT has adapters alone, as they are."""
    names = ("dtype", "shard_bytes", "tokenizer", "context")
    given = [f"--{name.replace('_', '-')}" for name in names if getattr(options, name) is not None]
    if given:
        raise ConfigError(
            f"export: adapters are written as they are; {', '.join(given)} would change nothing",
            where=given[0],
            hint="leave it out; or add the adapters to their base: --merge",
        )


def _learned_bos(name: str, facts: dict[str, Any]) -> bool:
    from trainkit.text.tokenizers import open_tokenizer  # noqa: PLC0415 - torch
    from trainkit.weights.hub.trained import has_learned_bos  # noqa: PLC0415 - torch

    return has_learned_bos(open_tokenizer(name), facts)


def _tokenizer(name: str | None, facts: dict[str, Any]) -> str:
    """Return the name of the tokenizer that a run was trained with."""
    from trainkit.text.tokenizers import open_tokenizer, tokenizer_hash  # noqa: PLC0415 - torch

    name = name or facts.get("config.tokenizer")
    if name is None:
        raise DataError("export: the run does not say its tokenizer; give --tokenizer")
    found, want = tokenizer_hash(open_tokenizer(name)), facts.get("tokenizer")
    if want not in (None, found):
        raise DataError(
            f"export: {name} is another tokenizer than the run was trained with",
            where=name,
            got=found,
            want=want,
            hint="name the run's own with --tokenizer",
        )
    return name
