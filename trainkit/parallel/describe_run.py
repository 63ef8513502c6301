"""What a run is, in lines at its start: the model and where it is, the data and its steps."""

from __future__ import annotations

import torch
from torch import nn

from trainkit.collectives import all_gather_objects
from trainkit.packing.report import report_packing
from trainkit.parallel.attention import attention_line
from trainkit.parallel.linear_layers import describe_linears
from trainkit.parallel.parameters import get_kind, get_named_parameters, is_tied_copy
from trainkit.parallel.stage_forward import compute_device
from trainkit.parallel.stage_ranks import as_stages
from trainkit.types import Bins, Precision, Stages


def describe_run(
    stages_or_model: Stages | nn.Module,
    rows: Bins,
    *,
    rows_per_step: int,
    precision: Precision,
) -> str:
    """Return lines that say what is trained, where, and on how much; and by which attention.

    A third says which linear layers compute in float8, or as if they were quantised, if any do.

    Parameters are the whole model's in every layout: a shard counts as what it is a part of, and a
    pipeline's copy of a tied embedding not at all. Matrices in few bits are told in bytes.

    Args:
        stages_or_model: This rank's stages, or any module.
        rows: What an epoch goes through, from `pack_bins`.
        rows_per_step: Rows of a step, over all ranks.
        precision: What is kept, computed, summed and remembered in.

    Effects:
        Communicates: all ranks of the pipeline must call it.

    Examples:
        >>> from trainkit.packing import pack_bins
        >>> rows = pack_bins([6, 8, 3, 8], 8)
        >>> print(
        ...     describe_run(
        ...         nn.Linear(9, 3),
        ...         rows,
        ...         rows_per_step=2,
        ...         precision=Precision(),
        ...     )
        ... )
        30 parameters, all trained, in fp32 on cpu, 1 rank
        4 rows of 8 tokens, 78.1 % full; 2 rows a step (16 tokens): 2 steps an epoch
    """
    stages = as_stages(stages_or_model, "describe_run")
    total, trained, few_bits = _parameters(stages)
    share = "all trained" if trained == total else f"{trained:,} of them trained"
    share += f", and {few_bits:,} bytes of matrices in few bits" if few_bits else ""
    device = compute_device(stages[0])
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    world = stages.world.count
    ranks = f"{world} ranks: {stages.layout}" if world > 1 else "1 rank"
    of_linears = next(filter(None, all_gather_objects(describe_linears(stages), stages.pp)), "")
    chosen = attention_line(stages)
    full, steps = report_packing(rows)["efficiency"], len(rows) / rows_per_step
    return (
        f"{total:,} parameters, {share}, in {precision} on {name}, {ranks}\n"
        f"{len(rows):,} rows of {rows.capacity:,} tokens, {100 * full:.1f} % full; "
        f"{rows_per_step:,} rows a step ({rows_per_step * rows.capacity:,} tokens): "
        f"{f'{steps:,.0f}' if steps >= 100 else f'{steps:.3g}'} steps an epoch"
        + "".join(f"\n{line}" for line in (of_linears, chosen) if line)
    )


def _parameters(stages: Stages) -> tuple[int, int, int]:
    """Return how many numbers the whole model has, how many are trained, how many bytes beside."""
    own = [p for p in get_named_parameters(stages).values() if not is_tied_copy(p)]
    trained, frozen, packed = (
        sum(p.numel() for p in own if get_kind(p) == kind)
        for kind in ("trained", "frozen", "packed")
    )
    counts = [trained + frozen, trained, packed]
    totals = map(sum, zip(*all_gather_objects(counts, stages.pp), strict=True))
    return next(totals), next(totals), next(totals)
