"""Fully sharded, replicated and hybrid data parallelism by FSDP2, with summed gradients."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from trainkit.collectives import backends_of
from trainkit.models.experts import ExpertMlp
from trainkit.parallel.expert import dealt_layers
from trainkit.parallel.fitting import problems, refuse
from trainkit.parallel.naming import blocks_of
from trainkit.parallel.precision import compute_dtype
from trainkit.parallel.recompute import hide_hooks_
from trainkit.parallel.reduction import (
    local_of,
    replicates,
    round_gradients_,
    sum_gradients_,
)
from trainkit.parallel.transforms import Transform
from trainkit.types import ConfigError, Layout, ParallelState


def fsdp(
    layout: Layout | None = None,
    *,
    blocks: str = "layers.*",
    reduce_dtype: torch.dtype | None = torch.float32,
    expert_wire_dtype: torch.dtype | None = None,
) -> Transform:
    """Return the transform that shards over `ps.fsdp` and replicates over `ps.dp_replicate`.

    Each block is a unit that is gathered for its own forward and backward; what is left of the
    model is one more unit, which stays gathered between forward and backward. Where both axes have
    size 1 the model is left as it is; after `ddp` in the plan it does not replicate. Parameters
    that `tensor` has made DTensors keep their placements, and are sharded once more. A frozen
    parameter is sharded, and gets no gradient.

    Args:
        layout: Its `reshard_after_forward` says whether a block's gathered parameters are freed
            between forward and backward (a zero-bubble pipeline schedule needs False: with True its
            gradients come out wrong); its `cpu_offload` whether shards of parameters, gradients and
            optimizer state stay in host memory, where they are stepped; a block is then copied to
            the device for its forward and its backward.
        blocks: The name pattern of the blocks.
        reduce_dtype: The dtype to sum gradients in where `precision` has lowered that of the
            computation.
        expert_wire_dtype: bf16 for gradients of experts that are dealt over ep to travel over
            expert_fsdp in, rounded at random, and still summed in fp32: half of the bytes, and
            other bits in another layout; see `collectives.reduce_scatter_bf16`. Batches must bring
            a "noise_key" (`data.with_noise_keys`), of which the rounding is a function. None
            sends them in the dtype that they are summed in. Without such experts, or with one rank
            in expert_fsdp, nothing is sent, and this changes nothing.

    Returns:
        A transform for `build_stages`. Gradients are summed, in the dtype of the parameters.

    Raises:
        ConfigError: `expert_wire_dtype` is no bf16; when applied, with it, gradients of experts
            are not summed in fp32.
        ValueError: When applied: `blocks` matches nothing (a pipeline stage may be without a
            block), or `cpu_offload` is asked for on one process, where it would do nothing, or
            where a group has no backend for the CPU.

    References:
        Zhao et al., "PyTorch FSDP" (2023); Rajbhandari et al., "ZeRO" (2020).

    Examples:
        >>> from trainkit.mesh import solo_parallel
        >>> model = nn.Linear(1, 1)
        >>> fsdp()(model, solo_parallel()) is model
        True
    """
    if expert_wire_dtype not in (None, torch.bfloat16):
        what = f"gradients cannot travel in {expert_wire_dtype}; take bf16, or leave it out"
        raise ConfigError(f"fsdp: {what}", where="expert_wire_dtype", got=expert_wire_dtype)
    layout = layout or Layout()
    cpu_offload, reshard_after_forward = layout.cpu_offload, layout.reshard_after_forward

    def apply(module: nn.Module, ps: ParallelState) -> nn.Module:
        hybrid = replicates(module, ps)
        if ps.fsdp.count == 1 and not hybrid:
            alone = Layout(cpu_offload=cpu_offload)
            refuse(problems(alone, world=1, device=ps.device.type))
            return module
        from torch.distributed.fsdp import (  # noqa: PLC0415 (a second of import time)
            CPUOffloadPolicy,
            MixedPrecisionPolicy,
            OffloadPolicy,
            fully_shard,
        )

        units = blocks_of(module, blocks, needed_by="fsdp" if ps.pp.count == 1 else "")
        if cpu_offload:
            _require_cpu_groups(ps)
        assert ps.mesh is not None
        mesh = ps.mesh["dp_replicate", "fsdp"] if hybrid else ps.mesh["fsdp"]
        compute = compute_dtype(module)
        policy = MixedPrecisionPolicy(
            compute, reduce_dtype if compute else None, cast_forward_inputs=False
        )
        # Pinned memory, torch's default, needs an accelerator: without one torch raises.
        pin = torch.cuda.is_available()
        offload = CPUOffloadPolicy(pin_memory=pin) if cpu_offload else OffloadPolicy()
        shard = partial(fully_shard, mp_policy=policy, offload_policy=offload)
        for layer in dealt_layers(module):  # their experts are units, inside of the blocks
            experts = layer.experts
            shard(
                experts,
                **_expert_shards(experts, ps, hybrid=hybrid),
                reshard_after_forward=reshard_after_forward,
            )
            hide_hooks_(experts)
            if expert_wire_dtype is not None and ps.expert_fsdp.count > 1:
                _send_rounded_(layer, ps, policy.reduce_dtype)
        for unit, reshard in (*((u, reshard_after_forward) for u in units), (module, False)):
            shard(unit, mesh=mesh, reshard_after_forward=reshard)
        sum_gradients_(module)
        return module

    device = "cpu" if cpu_offload else None  # FSDP2 wants offloaded shards there from the start
    return Transform(apply, kind="fsdp", axes=("dp_replicate", "dp_shard"), device=device)


def _expert_shards(experts: nn.Module, ps: ParallelState, *, hybrid: bool) -> dict[str, Any]:
    """Return how the experts of a rank of ep are sharded over expert_fsdp.

    By whole experts where their number divides, else along the first dimension of each.
    """
    from torch.distributed.tensor import Shard  # noqa: PLC0415 (a second of import time)

    assert ps.expert_mesh is not None
    names = ("dp_replicate", "expert_fsdp") if hybrid else ("expert_fsdp",)
    parts = ps.expert_fsdp.count
    sizes = [local_of(p).shape for p in experts.parameters()]
    even = [dim for dim in (0, 1) if all(size[dim] % parts == 0 for size in sizes)]
    dim = even[0] if even else 0
    return {"mesh": ps.expert_mesh[names], "shard_placement_fn": lambda _: Shard(dim)}


def _send_rounded_(layer: ExpertMlp, ps: ParallelState, reduce_dtype: torch.dtype | None) -> None:
    """Let FSDP2 sum the gradients of a layer's experts by `reduce_scatter_bf16`."""
    summed_in = reduce_dtype or layer.experts.gate.dtype
    if summed_in != torch.float32:
        raise ConfigError(
            f"fsdp: expert_wire_dtype=torch.bfloat16 rounds what is summed in fp32, and gradients "
            f"of {layer.name} are summed in {summed_in}; leave it out",
            where="expert_wire_dtype",
            got=summed_in,
            want=torch.float32,
        )
    round_gradients_(layer.experts, ps.expert_fsdp, name=f"{layer.name} on rank {ps.world.index}")


def _require_cpu_groups(ps: ParallelState) -> None:
    """Refuse groups that cannot sum on the CPU: the norm of offloaded gradients is."""
    for axis in (ps.fsdp, ps.expert_fsdp, ps.ep, ps.dp_replicate, ps.pp, ps.tp):
        if axis.group is not None and "cpu" not in backends_of(axis.group):
            backends = ", ".join(backends_of(axis.group).values())
            raise ValueError(
                f"fsdp: cpu_offload keeps gradients on the CPU, and the group of {axis.name!r} "
                f"communicates over {backends} alone, which cannot sum them; open it with "
                "'cpu:gloo,cuda:nccl', as parallel_session does, or leave cpu_offload out"
            )
