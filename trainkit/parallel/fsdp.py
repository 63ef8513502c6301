"""Fully sharded, replicated and hybrid data parallelism by FSDP2, with summed gradients."""

from __future__ import annotations

import torch
from torch import nn

from trainkit.parallel.naming import blocks_of
from trainkit.parallel.reduction import sum_gradients_
from trainkit.parallel.stages import Transform
from trainkit.types import ParallelState


def fsdp(
    *,
    blocks: str = "layers.*",
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = torch.float32,
    reshard_after_forward: bool = True,
) -> Transform:
    """Return the transform that shards over `ps.fsdp` and replicates over `ps.dp_replicate`.

    Each block is a unit that is gathered for its own forward and backward; what is left of the
    model is one more unit, which stays gathered between forward and backward. Where both axes have
    size 1 the model is left as it is.

    Args:
        blocks: The name pattern of the blocks.
        param_dtype: The dtype to gather parameters in and to compute with; None keeps theirs.
        reduce_dtype: The dtype to sum gradients in when `param_dtype` is given.
        reshard_after_forward: Free a block's gathered parameters between forward and backward.

    Returns:
        A transform for `build_stages`. Gradients are summed, in the dtype of the parameters.

    Raises:
        ValueError: When applied: `blocks` matches nothing, or `param_dtype` is asked for on one
            process.

    Examples:
        >>> from trainkit.mesh import solo_parallel
        >>> model = nn.Linear(1, 1)
        >>> fsdp()(model, solo_parallel()) is model
        True
    """

    def apply(module: nn.Module, ps: ParallelState) -> nn.Module:
        if ps.fsdp.count == 1 and ps.dp_replicate.count == 1:
            if param_dtype is not None:
                raise ValueError(
                    f"fsdp: param_dtype={param_dtype} was asked for on one process, where FSDP2 "
                    "does not run; pass a `call` that enters torch.autocast instead"
                )
            return module
        from torch.distributed.fsdp import (  # noqa: PLC0415 (a second of import time)
            MixedPrecisionPolicy,
            fully_shard,
        )

        units = blocks_of(module, blocks)
        if not units:
            raise ValueError(f"fsdp: no submodule's name matches blocks={blocks!r}")
        assert ps.mesh is not None
        hybrid = ps.dp_replicate.count > 1
        policy = MixedPrecisionPolicy(param_dtype, reduce_dtype if param_dtype else None)
        mesh = ps.mesh["dp_replicate", "fsdp"] if hybrid else ps.mesh["fsdp"]
        for unit in units:
            fully_shard(
                unit,
                mesh=mesh,
                mp_policy=policy,
                reshard_after_forward=reshard_after_forward,
            )
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        sum_gradients_(module)
        return module

    return Transform(apply, kind="fsdp", axes=("dp_replicate", "dp_shard"))
