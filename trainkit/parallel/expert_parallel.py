"""Expert parallelism: the experts of each layer sharded over `ps.ep`, and tokens sent to them.

The gradient of an expert needs no sum over ep: dispatch brings the tokens of all its ranks to the
one that holds the expert. What remains, expert_fsdp, replicas, sequence and tensor parallelism, is
summed as for any other parameter.
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

    Rank r holds experts r * E / ep and the following; each token's rows travel to them and back.
    With groups of experts (`Experts.groups`) a group is on neighbouring ranks, so that a token
    reaches few nodes. Give `fsdp()` too: the experts of a rank become a unit of its own, sharded
    over expert_fsdp, by whole experts where they divide, else along each one's first dimension.

    Args:
        dispatch: A function with the arguments of `ep_dispatch`, a faster kernel for
            instance; its route is passed on to `combine` as it is. It need not take a `wire_dtype`
            that is not given.
        combine: One with those of `ep_combine`; it comes with `dispatch`, or not at all.
        dispatch_keys: One with those of `ep_dispatch_keys`, which comes with the pair where
            adapters of experts have dropout; nothing else calls it.
        wire_dtype: What rows travel in, if not in their own dtype.

    Returns:
        A transform for `build_stages`. At `ps.ep` of size 1 it changes nothing: a pair of your own
        is not called then.

    Raises:
        ConfigError: One of the pair is given alone, or rows cannot travel in `wire_dtype`; when
            applied, there are no experts, or they do not divide by ep.

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
            "expert: dispatch and combine are one pair, and one of them was given alone; give both",
            where="dispatch, combine",
        )
    if wire_dtype not in (None, torch.bfloat16, torch.float16, torch.float32, torch.float64):
        raise ConfigError(
            f"expert: rows cannot travel in {wire_dtype}; take bf16, or leave wire_dtype out",
            where="wire_dtype",
            got=wire_dtype,
        )

    def apply(module: nn.Module, ps: ParallelState) -> nn.Module:
        if ps.ep.count == 1:
            return module
        layers = [x for x in module.modules() if isinstance(x, ExpertMlp)]
        dense = isinstance(module, Decoder) and module.config.experts is None
        if dense or (not layers and ps.pp.count == 1):  # a stage may be without
            raise ConfigError(
                f"expert: ep = {ps.ep.count}, and {type(module).__name__} has no layer of "
                "experts; set ep to 1",
                where="ep",
                got=ps.ep.count,
                want=1,
            )
        for layer in layers:
            _shard_experts_(layer, ps)
            layer.dispatch = partial(dispatch, axis=ps.ep)
            layer.combine = partial(combine, axis=ps.ep)
            if wire_dtype is not None:  # a kernel of one's own need not take it
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
    found = [x for x in module.modules() if isinstance(x, ExpertMlp)]
    return [x for x in found if "ep" in getattr(_mesh_of(x.experts.gate), "mesh_dim_names", ())]


def _mesh_of(parameter: Any) -> Any:
    return getattr(parameter, "device_mesh", None)


def _shard_experts_(layer: ExpertMlp, ps: ParallelState) -> None:
    """Reduce a layer to the experts of this rank."""
    experts, count = layer.experts, len(layer.router.load)
    if count % ps.ep.count:
        raise ConfigError(
            f"expert: {count} experts of {layer.name} do not divide by ep = {ps.ep.count}",
            where="ep",
            got=ps.ep.count,
            want=f"a divisor of {count}",
        )
    for part in experts.modules():  # adapters too
        names = tuple(name for name, _ in part.named_parameters(recurse=False))
        if names and not hasattr(getattr(part, names[0]), "to_local"):  # no tensor_parallel before
            shard_(part, names, STYLES["replicated"], ps.ep)
        for name in names:
            setattr(part, name, _own_part(getattr(part, name), ps))


def _own_part(parameter: Any, ps: ParallelState) -> nn.Parameter:
    """Return this rank's experts as a DTensor over ep, and over tp if it was one there."""
    from torch.distributed.tensor import DTensor, Replicate, Shard  # noqa: PLC0415 (a second)

    assert ps.expert_mesh is not None
    over_tp = isinstance(parameter, DTensor)
    whole = parameter.to_local().detach() if over_tp else parameter.detach()
    made = DTensor.from_local(
        whole.chunk(ps.ep.count)[ps.ep.index].clone(),
        ps.expert_mesh["ep", "tp"] if over_tp else ps.expert_mesh["ep"],
        [Shard(0), Replicate()] if over_tp else [Shard(0)],
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )
    return nn.Parameter(made, requires_grad=parameter.requires_grad)
