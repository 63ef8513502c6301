"""A description of a run, for its log: the model, the layout, the data and the steps."""

from __future__ import annotations

import torch
from torch import nn

from trainkit.collectives import all_gather_objects
from trainkit.packing.report import report_packing
from trainkit.parallel.attention import describe_attention
from trainkit.parallel.linear_layers import describe_linears
from trainkit.parallel.parameters import get_named_parameters, get_parameter_kind, is_tied_copy
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
    """Describe what is trained, where and on how much, in a few lines.

    Further lines name the linear layers that compute in float8 or are fake-quantized, and the
    attention kernels that were chosen.

    Parameters are counted in the whole model: a shard counts as its full parameter, and a
    pipeline's copy of a tied embedding does not count. Quantized matrices count in bytes.

    Args:
        stages_or_model: This rank's stages, or any module.
        rows: The rows of an epoch, from `pack_bins`.
        rows_per_step: Rows of a step, over all ranks.
        precision: The dtypes of the run.

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
    own = [p for p in get_named_parameters(stages).values() if not is_tied_copy(p)]
    # In full size: `numel` of a DTensor counts the elements of all shards.
    counts = [
        sum(p.numel() for p in own if get_parameter_kind(p) == kind)
        for kind in ("trained", "frozen", "packed")
    ]
    # Over pp only: ranks of other axes have shards of the same parameters.
    by_rank = all_gather_objects(counts, stages.pp)
    trained, frozen, packed = map(sum, zip(*by_rank, strict=True))
    share = f"{trained:,} of them trained" if frozen else "all trained"
    share += f", and {packed:,} bytes of quantized matrices" if packed else ""
    device = compute_device(stages[0])
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    world = stages.world.count
    ranks = f"{world} ranks: {stages.layout}" if world > 1 else "1 rank"
    # The changed layers may be on other stages only; all of them give the same text.
    linears = next(filter(None, all_gather_objects(describe_linears(stages), stages.pp)), "")
    efficiency = report_packing(rows)["efficiency"]
    steps = len(rows) / rows_per_step
    return (
        f"{trained + frozen:,} parameters, {share}, in {precision} on {name}, {ranks}\n"
        f"{len(rows):,} rows of {rows.capacity:,} tokens, {100 * efficiency:.1f} % full; "
        f"{rows_per_step:,} rows a step ({rows_per_step * rows.capacity:,} tokens): "
        f"{f'{steps:,.0f}' if steps >= 100 else f'{steps:.3g}'} steps an epoch"
        + "".join(f"\n{line}" for line in (linears, describe_attention(stages)) if line)
    )
