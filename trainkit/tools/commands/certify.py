"""`python -m trainkit certify`: show that every layout trains like one process.

Train a tiny decoder for three steps on one process, and again in each layout of 1 to 8 ranks, and
print the largest differences from one process: of the loss, of the gradient norm, and of every
parameter, buffer and optimizer state after the last step, each max|a - b| / max|b|. A decoder with
tied embeddings, one with dropout, one that is half frozen, and a model in plain torch follow in
fewer layouts. Ranks are processes on this machine's CPUs: no GPU and no launcher is needed. With
--device cuda each rank has a GPU, and NCCL connects them. For your own model call
trainkit.tools.testing.certify.

The first row of each table compares packed documents with each document alone, in fp64.

A layout's name lists its degrees and options:
  dp2           parameters sharded over 2 ranks        replica2    2 replicas of them
  tp2           tensor parallel                        pp2, gpipe  2 stages, scheduled by GPipe
  ring2         ring attention                         ulysses2    Ulysses attention
  dp2 x ring2 x tp2, fold none                         8 ranks; FSDP not over the ring

Examples:
  python -m trainkit certify                           all layouts in fp64, a few minutes
  python -m trainkit certify --all                     each optimizer in them too, some minutes more
  python -m trainkit certify --world 2                 layouts of two ranks
  python -m trainkit certify --layouts "dp2*" "*zero*" layouts whose name matches
  python -m trainkit certify --tier exact              integers: equal bit for bit
  python -m trainkit certify --device cuda --tier bf16 on this machine's GPUs, as far as they reach

A row is red when a number is outside the bound, when a step trained on other tokens, or when the
layout failed; the reason follows below the table, and the exit code is 67.
"""

from __future__ import annotations

import argparse
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from trainkit.files import print_to_stderr
from trainkit.types import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainkit.tools.testing.cases import LayoutCase

_PAGE = """
# The certificate

Any layout gives the numbers of one process. A tiny decoder is trained for three steps on one
process, and again in each of these layouts, from the same weights on the same tokens; the numbers
are the largest differences from the one process, max|a - b| / max|b| of each tensor: of the loss
and of the gradient norm over the steps, and of every parameter and of the state (buffers and
optimizer state) after the last.

`python -m trainkit certify` prints these tables on your machine; `trainkit.tools.testing.certify`
makes one for a model, a plan, a loss and a call of your own. In a name `dp` is the number of ranks
that parameters are sharded over, `replica` that of their replicas, and `fold` says which of ring
and Ulysses FSDP reduces over ("all" by default). This page is made by
`python -m trainkit certify --markdown`.
"""


HELP = "show that the layouts give the numbers of one process"


def add(certify: argparse.ArgumentParser) -> None:
    """Add the command's flags to its parser."""
    certify.add_argument(
        "--layouts",
        nargs="+",
        metavar="NAME",
        help="names, or patterns with *; by default all that this torch can run",
    )
    certify.add_argument("--all", action="store_true", help="also with each of the optimizers")
    certify.add_argument("--world", type=int, metavar="N", help="only layouts of N ranks")
    certify.add_argument(
        "--tier",
        default="fp64",
        choices=("fp64", "exact", "fp32", "bf16"),
        help="arithmetic, which sets the bound (default fp64: 1e-12)",
    )
    certify.add_argument(
        "--device",
        default="cpu",
        choices=("cpu", "cuda"),
        help="where ranks compute; cuda: one rank on each GPU (default cpu)",
    )
    certify.add_argument("--json", action="store_true", help="print the rows as JSON")
    certify.add_argument("--markdown", action="store_true", help="print a Markdown page")
    certify.add_argument("--quiet", action="store_true", help="no progress on stderr")


def run(options: argparse.Namespace) -> tuple[Any, int]:
    """Train in all layouts and return the certificates and the exit code: 0, or 67 when red.

    Effects:
        Starts processes; reports progress on stderr.
    """
    # Imported here: they import torch.
    import attrs  # noqa: PLC0415

    from trainkit.tools.testing.builtin import certify_builtin  # noqa: PLC0415
    from trainkit.tools.testing.certificate import format_markdown, format_text  # noqa: PLC0415

    chosen = _make_filter(options.layouts, options.world, options.tier, options.device)
    certificates = certify_builtin(
        options.tier,
        chosen=chosen,
        optimizers=options.all,
        log=None if options.quiet else print_to_stderr,
        device=options.device,
    )
    code = 0 if all(certificate.ok for certificate in certificates) else 67
    if options.json:
        return [attrs.asdict(c) | {"ok": c.ok} for c in certificates], code
    if options.markdown:
        sections = [f"## {c.title}, {c.tier.name}\n\n{format_markdown(c)}" for c in certificates]
        return "\n\n".join([_PAGE.strip(), *sections]), code
    return "\n\n".join(map(format_text, certificates)), code


def _make_filter(
    patterns: list[str] | None, world: int | None, tier: str, device: str
) -> Callable[[LayoutCase], bool]:
    """Return a function that selects layouts by the command's flags."""
    from trainkit.tools.testing.builtin import cases_of_model, models_of_tier  # noqa: PLC0415 (torch)
    from trainkit.tools.testing.cases import runs_here  # noqa: PLC0415 (imports torch)
    from trainkit.tools.testing.ranks import check_devices  # noqa: PLC0415 (imports torch)

    check_devices("certify", world or 1, device)
    # The first model has the most cases, so a pattern must match one of these.
    names = [case.name for case in cases_of_model(models_of_tier(tier)[0])]
    for pattern in patterns or ():
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(
                f"certify: no layout of the tier {tier} is called {pattern!r}",
                where="--layouts",
                got=pattern,
                hint=f"there are: {'; '.join(names)}",
            )

    def is_chosen(case: LayoutCase) -> bool:
        if world not in (None, case.world):
            return False
        if not patterns:
            return runs_here(case, device)
        return any(fnmatchcase(case.name, pattern) for pattern in patterns)

    return is_chosen
