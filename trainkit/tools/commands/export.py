r"""`python -m trainkit export RUN FOLDER`: write a run as a Hugging Face folder.

The folder holds config.json, generation_config.json, safetensors files with their index, and the
files of the tokenizer. AutoModelForCausalLM.from_pretrained and AutoTokenizer.from_pretrained load
it. The model decides the family:

  python -m trainkit export runs/pretrain model/

In bfloat16, files of at most 2 GB, with the tokenizer of another folder:

  python -m trainkit export runs/finetune model/ --dtype bfloat16 --shard-bytes 2000000000 \
      --tokenizer base/

A run that trains adapters is exported as a PEFT folder, for PeftModel.from_pretrained; with --merge
as a whole model, whose base is read from where it was or from --base:

  python -m trainkit export runs/finetune adapter/
  python -m trainkit export runs/finetune model/ --merge

A run that started from a multimodal folder, whose text tower it has trained, is exported as such a
folder: all other tensors are copied from where the folder was, or from --base. The decoder alone:

  python -m trainkit export runs/finetune model/ --family gemma3_text

Exit codes: 0 success, 64 wrong use (a folder that exists, a model of no known family), 65 no
tokenizer or another than the run's, 66 a checkpoint that does not verify, 74 the disk is full.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from trainkit.files import print_to_stderr
from trainkit.types import ConfigError, DataError
from trainkit.weights.checkpoint.manifest import find_checkpoint

HELP = "write a run as a Hugging Face folder"


def add(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags to its parser."""
    parser.add_argument("source", type=Path, help="a checkpoint, or a run for its newest")
    parser.add_argument("folder", type=Path, help="the folder to write")
    parser.add_argument(
        "--dtype",
        choices=("float32", "float16", "bfloat16"),
        help="dtype of the parameters (default: unchanged)",
    )
    parser.add_argument("--shard-bytes", type=int, help="maximum size of a file (default: 4 GB)")
    parser.add_argument("--family", help="the model_type (default: the first that fits the model)")
    parser.add_argument(
        "--tokenizer", help="bytes, a tokenizer.json or its folder (default: the run's)"
    )
    parser.add_argument(
        "--context",
        type=int,
        help="the model's maximum context (default: that of the folder the run started from, "
        "or else the run's row length)",
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace a folder that this command wrote"
    )
    parser.add_argument(
        "--merge", action="store_true", help="add a run's adapters to their base model"
    )
    parser.add_argument(
        "--base",
        help="path of the adapters' base model, or of the multimodal folder whose text tower the "
        "run has trained (default: where it was)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON on a terminal too")


def run(options: argparse.Namespace) -> tuple[Any, int]:
    """Write the folder and return a report and the exit code.

    Effects:
        Writes a folder.
    """
    from trainkit.post.adapters.export import export_peft, merge_run  # noqa: PLC0415 - torch
    from trainkit.text.tokenizers import open_tokenizer  # noqa: PLC0415 - torch
    from trainkit.weights import hub  # noqa: PLC0415 - torch
    from trainkit.weights.checkpoint.initial_weights import TOWER  # noqa: PLC0415 - torch
    from trainkit.weights.checkpoint.load import read_facts  # noqa: PLC0415 - torch
    from trainkit.weights.hub.trained import has_learned_bos  # noqa: PLC0415 - torch

    path = find_checkpoint(options.source, log=print_to_stderr)
    facts = read_facts(path, needs=["model"])
    # A run that trains adapters stores the base model that they belong to.
    adapted = "base" in facts
    if options.merge and not adapted:
        raise ConfigError(f"export: --merge: {path} holds a whole model, with no adapters to merge")
    if options.base and not adapted and TOWER not in facts:
        raise ConfigError(
            f"export: --base: {path} holds a whole model, with neither adapters on a base nor the "
            "text tower of a multimodal one"
        )
    if adapted and not options.merge:
        _check_adapter_flags(options)
        report = export_peft(
            path,
            options.folder,
            family=options.family,
            base=options.base,
            overwrite=options.overwrite,
        )
        return report, 0
    context = options.context or facts.get("context") or facts.get("config.row_length")
    if context is None:
        raise ConfigError(
            f"export: {path} does not say how long the texts of its model may be",
            hint="give the number of tokens: --context",
        )
    name = _find_tokenizer(options.tokenizer, facts)
    template = facts.get("config.template")
    # A template named like the tokenizer is the one in its folder, which may have moved since.
    if template == facts.get("config.tokenizer"):
        template = name if template is not None else None
    report = hub.export_folder(
        path,
        options.folder,
        context=context,
        family=options.family,
        base=options.base if TOWER in facts else None,
        files=hub.make_tokenizer_files(
            name, template=template, adds_bos=has_learned_bos(open_tokenizer(name), facts)
        ),
        dtype=options.dtype,
        shard_bytes=4_000_000_000 if options.shard_bytes is None else options.shard_bytes,
        overwrite=options.overwrite,
        read=merge_run(path, base=options.base) if adapted else None,
    )
    return report, 0


def _check_adapter_flags(options: argparse.Namespace) -> None:
    """Raise ConfigError for flags that only affect the export of a whole model."""
    # All of them are None unless they are given.
    names = ("dtype", "shard_bytes", "tokenizer", "context")
    flags = [f"--{name.replace('_', '-')}" for name in names if getattr(options, name) is not None]
    if flags:
        raise ConfigError(
            f"export: adapters are written without conversion, so {', '.join(flags)} would change "
            "nothing",
            where=flags[0],
            hint="leave it out; or add the adapters to their base: --merge",
        )


def _find_tokenizer(name: str | None, facts: dict[str, Any]) -> str:
    """Return the name or path of the run's tokenizer, checked against the hash in its facts."""
    from trainkit.text.tokenizers import open_tokenizer, tokenizer_hash  # noqa: PLC0415 - torch
    from trainkit.weights.hub.trained import find_tokenizer_name  # noqa: PLC0415 - torch

    name = name or find_tokenizer_name(facts)
    if name is None:
        raise DataError(
            "export: the run does not name its tokenizer",
            hint="give it: --tokenizer bytes, a tokenizer.json, or the folder of one",
        )
    actual = tokenizer_hash(open_tokenizer(name))
    expected = facts.get("tokenizer")
    if expected not in (None, actual):
        raise DataError(
            f"export: {name} is another tokenizer than the run was trained with",
            where=name,
            got=actual,
            want=expected,
            hint="name the run's tokenizer with --tokenizer",
        )
    return name
