"""Expert parallelism: experts sharded over `ps.ep`, and tokens dispatched to them.

The gradient of an expert needs no sum over ep: dispatch sends the tokens of all ranks of ep to the
one that holds the expert. Over all other axes (expert_fsdp, replicas, sequence and tensor
parallelism) it is summed as for any other parameter.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from trainkit.models.decoder import Decoder
from trainkit.models.dispatch import ep_combine, ep_dispatch, ep_dispatch_keys
from trainkit.models.experts import ExpertMlp
from trainkit.parallel.styles import STYLES, shard_
from trainkit.parallel.transforms import Transform
from trainkit.types import ConfigError, ParallelState


def expert_parallel(
    *,
    dispatch: Any = ep_dispatch,
    combine: Any = ep_combine,
    dispatch_keys: Any = ep_dispatch_keys,
    wire_dtype: torch.dtype | None = None,
) -> Transform:
    """Return the transform that shards the experts of each layer over `ps.ep`.

    Rank r holds the experts from r * E / ep on; the rows of each token are sent to them and back.
    With groups of experts (`Experts.groups`) a group is on neighboring ranks, so that a token
    reaches few nodes. Use `fsdp()` in the plan too: the experts of a rank become a unit of their
    own, sharded over expert_fsdp by whole experts if they divide, else along dimension 1.

    Args:
        dispatch: A function with the arguments of `ep_dispatch`, for example a faster
            kernel; its route is passed on to `combine` unchanged. It need not take `wire_dtype` if
            none is given.
        combine: A function with the arguments of `ep_combine`, given if and only if
            `dispatch` is.
        dispatch_keys: A function with the arguments of `ep_dispatch_keys`, for adapters of
            experts with dropout.
        wire_dtype: The dtype in which rows are sent; by default their own.

    Returns:
        A transform for `build_stages`. It changes nothing if `ps.ep` has size 1: your own functions
        are not called then.

    Raises:
        ConfigError: One of `dispatch` and `combine` is given without the other, or `wire_dtype` is
            not a floating-point dtype. When applied: there are no experts, or they do not divide by
            ep.

    References:
        Lepikhin et al., "GShard" (2020); DeepSeek-AI, "DeepSeek-V3 technical report" (2024), for
        groups of experts on nodes.

    Examples:
        >>> from trainkit.mesh import solo_parallel
        >>> model = nn.Linear(1, 1)
        >>> expert_parallel()(model, solo_parallel()) is model
        True
    """
    if (dispatch is ep_dispatch) != (combine is ep_combine):
        raise ConfigError(
            "expert_parallel: dispatch and combine are one pair, and one of them was given alone; "
            "give both",
            where="dispatch, combine",
        )
    if wire_dtype not in (None, torch.bfloat16, torch.float16, torch.float32, torch.float64):
        raise ConfigError(
            f"expert_parallel: rows cannot travel in {wire_dtype}; take bf16, or leave wire_dtype "
            "out",
            where="wire_dtype",
            got=wire_dtype,
        )

    def apply(module: nn.Module, ps: ParallelState) -> nn.Module:
        if ps.ep.count == 1:
            return module
        layers = [x for x in module.modules() if isinstance(x, ExpertMlp)]
        is_dense = isinstance(module, Decoder) and module.config.experts is None
        if is_dense or (not layers and ps.pp.count == 1):  # a pipeline stage may have none
            raise ConfigError(
                f"expert_parallel: ep = {ps.ep.count}, and {type(module).__name__} has no layer of "
                "experts; set ep to 1",
                where="ep",
                got=ps.ep.count,
                want=1,
            )
        for layer in layers:
            _shard_experts_(layer, ps)
            layer.dispatch = partial(dispatch, axis=ps.ep)
            layer.combine = partial(combine, axis=ps.ep)
            if wire_dtype is not None:  # a user's kernel need not take it
                layer.dispatch = partial(layer.dispatch, wire_dtype=wire_dtype)
                layer.combine = partial(layer.combine, wire_dtype=wire_dtype)
            layer.dispatch_keys = partial(dispatch_keys, axis=ps.ep)
        return module

    return Transform(apply, kind="expert", axes=("ep",))


def layers_over_ep(module: nn.Module) -> list[ExpertMlp]:
    """Return the layers in a module whose experts are sharded over ep.

    Examples:
        >>> layers_over_ep(nn.Linear(1, 1))
        []
    """
    layers = [x for x in module.modules() if isinstance(x, ExpertMlp)]
    # All weights of a layer's experts have the mesh of this one.
    meshes: list[Any] = [getattr(x.experts.up, "device_mesh", None) for x in layers]
    return [
        layer
        for layer, mesh in zip(layers, meshes, strict=True)
        if "ep" in getattr(mesh, "mesh_dim_names", ())
    ]


def _shard_experts_(layer: ExpertMlp, ps: ParallelState) -> None:
    """Make the parameters of a layer's experts DTensors over ep, with this rank's experts."""
    from torch.distributed.tensor import DTensor, Replicate, Shard  # noqa: PLC0415 (a second)

    count = len(layer.router.load)
    if count % ps.ep.count:
        raise ConfigError(
            f"expert_parallel: {count} experts of {layer.name} do not divide by ep = {ps.ep.count}",
            where="ep",
            got=ps.ep.count,
            want=f"a divisor of {count}",
        )
    assert ps.expert_mesh is not None
    for part in layer.experts.modules():  # adapters too
        own: dict[str, Any] = dict(part.named_parameters(recurse=False))
        # After `tensor_parallel` they are replicated DTensors over tp.
        over_tp = any(isinstance(p, DTensor) for p in own.values())
        if own and not over_tp:
            shard_(part, tuple(own), STYLES["replicated"], ps.ep)
        for name, p in own.items():
            full = (p.to_local() if over_tp else p).detach()
            dtensor = DTensor.from_local(
                # A copy: a view would keep the memory of all experts.
                full.chunk(ps.ep.count)[ps.ep.index].clone(),
                ps.expert_mesh["ep", "tp"] if over_tp else ps.expert_mesh["ep"],
                # Dimension 0 counts experts; every rank of tp holds the same ones.
                [Shard(0), Replicate()] if over_tp else [Shard(0)],
                run_check=False,
                shape=full.shape,
                stride=full.stride(),
            )
            setattr(part, name, nn.Parameter(dtensor, requires_grad=p.requires_grad))
