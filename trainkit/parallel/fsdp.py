"""Fully sharded, replicated and hybrid data parallelism by FSDP2, with summed gradients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import attrs
import torch
from torch import nn

from trainkit.collectives import get_backends, get_comm_device
from trainkit.mesh import solo_parallel
from trainkit.models.experts import ExpertMlp
from trainkit.parallel.check_layout import check_layout
from trainkit.parallel.check_modules import (
    refuse_container,
    refuse_empty_parameters,
    refuse_max_norm,
)
from trainkit.parallel.expert_parallel import layers_over_ep
from trainkit.parallel.grad_reduction import (
    get_local,
    keep_gathered_if_returned_,
    replicates,
    round_gradients_,
    sum_gradients_,
)
from trainkit.parallel.parameters import canonical_name, find_blocks
from trainkit.parallel.precision import compute_dtype
from trainkit.parallel.recompute import hide_hooks_
from trainkit.parallel.transforms import Transform
from trainkit.types import Axis, ConfigError, Layout, ParallelState


def fsdp(
    layout: Layout | None = None,
    *,
    blocks: str | None = "layers.*",
    reduce_dtype: torch.dtype | None = torch.float32,
    expert_wire_dtype: torch.dtype | None = None,
) -> Transform:
    """Return the transform that shards over `ps.fsdp` and replicates over `ps.dp_replicate`.

    Each block is a unit that is gathered for its own forward and backward; what is left of the
    model is one more unit, which stays gathered between forward and backward. Where both axes have
    size 1 the model is left as it is; after `ddp` in the plan it does not replicate. Parameters
    that `tensor` has made DTensors keep their placements, and are sharded once more. A frozen
    parameter is sharded, and gets no gradient. Inside a unit, modules whose parameters have another
    dtype, as fp32 norms in bf16 blocks, are gathered by themselves, each in its forward pass.

    All ranks must use all units in one order in every microbatch: a module that only some rows need
    (an expert, the tower of a further modality) is no block, and is gathered with what is around.

    Args:
        layout: Its `reshard_after_forward` says whether a block's gathered parameters are freed
            between forward and backward (a zero-bubble pipeline schedule needs False: with True its
            gradients come out wrong), and `reshard_over` that they are not quite: a few
            neighbouring ranks keep them between them (experts of ep are freed); `prefetch` how many
            blocks are gathered ahead of the one that computes; `separate_ends` makes two more units
            of what comes before the blocks and after them; `cpu_offload` keeps shards of
            parameters, gradients and optimizer state in host memory, where they are stepped; a
            block is then copied to the device for its forward and its backward.
        blocks: The name pattern of the blocks; None makes the whole module one unit.
        reduce_dtype: The dtype to sum gradients in where `precision` has lowered that of the
            computation.
        expert_wire_dtype: bf16 for gradients of experts that are dealt over ep to travel over
            expert_fsdp in, rounded at random, and still summed in fp32: half of the bytes, and
            other bits in another layout; see `collectives.reduce_scatter_bf16`. Batches must bring
            a "noise_key" (`data.add_noise_keys`), of which the rounding is a function. None
            sends them in the dtype that they are summed in. Without such experts, or with one rank
            in expert_fsdp, nothing is sent, and this changes nothing.

    Returns:
        A transform for `build_stages`. Gradients are summed, in the dtype of the parameters. It
        takes an `Axis` as well in place of a layout, for a module of one's own that holds its
        values, the same on every rank: `fsdp(blocks=None)(module, axis)` shards it over that axis.

    Raises:
        ConfigError: `expert_wire_dtype` is no bf16; when applied, with it, gradients of experts
            are not summed in fp32; an embedding has a `max_norm`; a trained parameter has no
            element; one module holds parameters of two dtypes itself; or a block is a container.
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
    how = layout or Layout()

    def apply(module: nn.Module, where: ParallelState | Axis) -> nn.Module:
        ps = _layout_over(where, module) if isinstance(where, Axis) else where
        hybrid = replicates(module, ps)
        if ps.fsdp.count == 1 and not hybrid:
            alone = Layout(cpu_offload=how.cpu_offload)
            check_layout(alone, world=1, device=ps.device.type)
            return module
        needed_by = "fsdp" if ps.pp.count == 1 else ""
        units = [] if blocks is None else find_blocks(module, blocks, needed_by=needed_by)
        names = {part: canonical_name(name) for name, part in module.named_modules()}
        _check(module, units, names)
        compute = compute_dtype(module)
        summed_in = reduce_dtype if compute else None
        shard = _sharder(ps, compute, summed_in, offloads=how.cpu_offload)
        for layer in layers_over_ep(module):  # their experts are units, inside of the blocks
            experts = layer.experts
            placed = _expert_shards(experts, ps, hybrid=hybrid)
            shard(experts, **placed, reshard_after_forward=how.reshard_after_forward)
            hide_hooks_(experts)
            if expert_wire_dtype is not None and ps.expert_fsdp.count > 1:
                _send_rounded_(layer, ps, summed_in)
        assert ps.mesh is not None
        mesh = ps.mesh["dp_replicate", "fsdp"] if hybrid else ps.mesh["fsdp"]
        keeps = how.reshard_after_forward and (how.reshard_over or True)
        first, last = _ends(module, units) if how.separate_ends else ([], [])
        # Backward begins with the head, and losses read its weight after its forward.
        every = [*((x, keeps) for x in (*units, first)), (last, False), (module, False)]
        for unit, reshard in every:
            for one in _units_of_one_dtype(unit, names):
                shard(one, mesh=mesh, reshard_after_forward=reshard)
                if one is not unit and isinstance(one, nn.Module):
                    hide_hooks_(one)
        for unit in units:
            keep_gathered_if_returned_(unit)
        _prefetch_([*units, *last[:1]], how.prefetch)
        sum_gradients_(module)
        return module

    device = "cpu" if how.cpu_offload else None  # FSDP2 wants offloaded shards there from the start
    return Transform(apply, kind="fsdp", axes=("dp_replicate", "dp_shard"), device=device)


def _check(module: nn.Module, units: Sequence[nn.Module], names: Mapping[nn.Module, str]) -> None:
    """Refuse what FSDP2 would compute wrongly, or not at all, by name."""
    refuse_max_norm(module, by="fsdp")
    refuse_empty_parameters(module, by="fsdp")
    for unit in (*units, module):
        refuse_container(unit, names[unit], by="fsdp")


def _layout_over(axis: Axis, module: nn.Module) -> ParallelState:
    """Return the layout in which an axis is what parameters are sharded over, and all there is."""
    from torch.distributed.device_mesh import DeviceMesh  # noqa: PLC0415 (a second of import time)

    held = next((p.device for p in module.parameters() if not p.is_meta), None)
    device = held or get_comm_device(axis)
    ps = solo_parallel(device)
    if axis.count == 1:
        return ps
    assert axis.group is not None
    mesh = DeviceMesh.from_group(axis.group, device.type, mesh_dim_names=("fsdp",))
    return attrs.evolve(ps, world=axis, dp=axis, dp_shard=axis, loss=axis, fsdp=axis, mesh=mesh)


def _sharder(
    ps: ParallelState,
    compute: torch.dtype | None,
    reduce_dtype: torch.dtype | None,
    *,
    offloads: bool,
) -> Any:
    """Return `fully_shard` in some dtypes, with parameters in host memory or not."""
    from torch.distributed.fsdp import (  # noqa: PLC0415 (a second of import time)
        CPUOffloadPolicy,
        MixedPrecisionPolicy,
        OffloadPolicy,
        fully_shard,
    )

    if offloads:
        _require_cpu_groups(ps)
    policy = MixedPrecisionPolicy(compute, reduce_dtype, cast_forward_inputs=False)
    # Pinned memory, torch's default, needs an accelerator: without one torch raises.
    pin = torch.cuda.is_available()
    offload = CPUOffloadPolicy(pin_memory=pin) if offloads else OffloadPolicy()
    return partial(fully_shard, mp_policy=policy, offload_policy=offload)


def _ends(
    module: nn.Module, blocks: Sequence[nn.Module]
) -> tuple[list[nn.Module], list[nn.Module]]:
    """Return what comes before a model's blocks and what comes after them, each to be a unit.

    Nothing where they share a matrix, or a norm is all that comes after: its model, or its stage of
    one, reads the embedding's weight for a head, outside of the embedding's forward.
    """
    if not blocks:
        return [], []
    order = {each: i for i, each in enumerate(module.modules())}
    around = [each for each in order if {*each.modules()} & {*blocks} and each not in blocks]
    beside = {x for each in around for x in each.children()} - {*around, *blocks}
    ends = sorted((x for x in beside if [*x.parameters()]), key=lambda x: order[x])
    first = [x for x in ends if order[x] < order[blocks[0]]]
    last = [x for x in ends if order[x] > order[blocks[0]]]
    own, others = ({p for x in part for p in x.parameters()} for part in (last, first))
    if own & others or (own and all(p.dim() < 2 for p in own)):
        return [], []
    return first, last


def _units_of_one_dtype(
    unit: nn.Module | Sequence[nn.Module], names: Mapping[nn.Module, str]
) -> list[Any]:
    """Return a unit, and before it those that it must be parted into, the innermost first.

    FSDP2 sums the gradients of a unit in one dtype: that of its module's own parameters, or of most
    of its elements. A module inside whose parameters have another, as fp32 norms in bf16 blocks
    have, is a unit of its own.
    """
    apart: list[nn.Module] = []

    def search(part: nn.Module, dtype: torch.dtype | None) -> None:
        for child in _children_left(part):
            own = _trained_dtype(child, names) or dtype
            if own != dtype and child not in apart:
                _check_called(child, names, dtype)
                apart.append(child)
            search(child, own)

    alike: dict[torch.dtype | None, list[nn.Module]] = {}
    for top in [unit] if isinstance(unit, nn.Module) else unit:
        dtype = _trained_dtype(top, names) or _commonest_dtype(top)
        alike.setdefault(dtype, []).append(top)
        search(top, dtype)
    return [*reversed(apart), *([unit] if isinstance(unit, nn.Module) else alike.values())]


def _children_left(module: nn.Module) -> list[nn.Module]:
    """Return a module's children but for those that are units already."""
    from torch.distributed.fsdp import FSDPModule  # noqa: PLC0415 (a second of import time)

    return [child for child in module.children() if not isinstance(child, FSDPModule)]


def _trained_dtype(module: nn.Module, names: Mapping[nn.Module, str]) -> torch.dtype | None:
    """Return the dtype of the parameters that a module itself holds and trains, None without."""
    own = module.named_parameters(recurse=False)
    trained = {name: p.dtype for name, p in own if p.requires_grad}
    found = {dtype: name for name, dtype in trained.items()}
    if len(found) > 1:
        (one, first), (other, second), *_ = found.items()
        raise ConfigError(
            f"fsdp: {names[module] or 'the model itself'!r} holds {first!r} in {one} and "
            f"{second!r} in {other}, and the gradients of a module are summed in one dtype; give "
            "one of the two a module of its own, cast it, or put precision(...) into the plan, "
            "which keeps all in one",
            where=names[module],
            got=[str(one), str(other)],
            want="one dtype",
        )
    return next(iter(found), None)


def _check_called(
    module: nn.Module, names: Mapping[nn.Module, str], around: torch.dtype | None
) -> None:
    """Refuse a container whose parameters would be gathered in its forward pass: it has none."""
    if type(module).forward is nn.Module.forward:
        raise ConfigError(
            f"fsdp: {names[module]!r} holds parameters in {_trained_dtype(module, names)} inside "
            f"a module in {around}, and as a {type(module).__name__} is never called, so that they "
            "could not be gathered by themselves; keep them in a module with a forward pass, cast "
            "them, or put precision(...) into the plan, which keeps all in one dtype",
            where=names[module],
            got=type(module).__name__,
            want=f"parameters in {around}",
        )


def _commonest_dtype(module: nn.Module) -> torch.dtype | None:
    """Return the dtype of most of the elements that are trained in a module and in no unit yet."""
    sizes, left = Counter[torch.dtype](), [module]
    while left:
        part = left.pop()
        left += _children_left(part)
        for p in part.parameters(recurse=False):
            if p.requires_grad:
                sizes[p.dtype] += p.numel()
    return sizes.most_common(1)[0][0] if sizes else None


def _prefetch_(units: Sequence[Any], ahead: int) -> None:
    """Let each unit, and what is a unit inside of it, be gathered while others compute."""
    if not ahead:
        return
    from torch.distributed.fsdp import FSDPModule  # noqa: PLC0415 (as above)

    for i, unit in enumerate(units):
        later, earlier = units[i + 1 : i + 1 + ahead], units[max(0, i - ahead) : i][::-1]
        for others, ask in (
            (later, unit.set_modules_to_forward_prefetch),
            (earlier, unit.set_modules_to_backward_prefetch),
        ):
            ask([x for other in others for x in other.modules() if isinstance(x, FSDPModule)])


def _expert_shards(experts: nn.Module, ps: ParallelState, *, hybrid: bool) -> dict[str, Any]:
    """Return how the experts of a rank of ep are sharded over expert_fsdp.

    By whole experts where their number divides, else along the first dimension of each.
    """
    from torch.distributed.tensor import Shard  # noqa: PLC0415 (a second of import time)

    assert ps.expert_mesh is not None
    names = ("dp_replicate", "expert_fsdp") if hybrid else ("expert_fsdp",)
    parts = ps.expert_fsdp.count
    sizes = [get_local(p).shape for p in experts.parameters()]
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
        if axis.group is not None and "cpu" not in get_backends(axis.group):
            backends = ", ".join(get_backends(axis.group).values())
            raise ValueError(
                f"fsdp: cpu_offload keeps gradients on the CPU, and the group of {axis.name!r} "
                f"communicates over {backends} alone, which cannot sum them; open it with "
                "'cpu:gloo,cuda:nccl', as parallel_session does, or leave cpu_offload out"
            )
