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
from trainkit.parallel.precision import get_compute_dtype
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

    Each block is an FSDP2 unit: its parameters are gathered for its own forward and backward pass.
    All other parameters form one more unit, which stays gathered from forward to backward. The
    transform changes nothing if both axes have size 1, and does not replicate after `ddp` in the
    plan. Parameters that `tensor_parallel` has made DTensors keep their placements and are sharded
    once more. Frozen parameters are sharded too, and get no gradient. Modules inside a unit whose
    parameters have another dtype, such as fp32 norms in bf16 blocks, become units of their own.

    All ranks must use all units in the same order in every microbatch. A module that only some rows
    need (an expert, the encoder of another modality) must therefore not be a block; it is gathered
    with the unit around it.

    Args:
        layout: The options of FSDP2. `reshard_after_forward` frees the gathered parameters of a
            block between forward and backward (zero-bubble pipeline schedules need False, or their
            gradients are wrong); with `reshard_over` they are sharded over that many neighboring
            ranks instead of all, for a cheaper all-gather in backward (not those of experts).
            `prefetch` is how many blocks are gathered ahead of the one that computes.
            `separate_ends` makes units of the modules before the blocks and of those after them.
            `cpu_offload` keeps the shards of parameters, gradients and optimizer state in host
            memory, where the optimizer steps; a block is copied to the device for its forward and
            its backward pass.
        blocks: The name pattern of the blocks; None makes the whole module one unit.
        reduce_dtype: The dtype in which gradients are summed if `mixed_precision` computes in a
            lower one.
        expert_wire_dtype: bf16 to send the gradients of sharded experts over expert_fsdp rounded
            stochastically to bf16 and still sum them in fp32: half of the bytes, and bits that
            depend on the layout; see `collectives.reduce_scatter_bf16`. Batches must have a
            "noise_key" (`data.add_noise_keys`), of which the rounding is a function. None sends
            them in the dtype that they are summed in. It has no effect without sharded experts, or
            with one rank in expert_fsdp.

    Returns:
        A transform for `build_stages`. Gradients are summed, in the dtype of the parameters. In
        place of a layout it also takes an `Axis`, for any module that holds the same values on
        every rank: `fsdp(blocks=None)(module, axis)` shards it over that axis.

    Raises:
        ConfigError: `expert_wire_dtype` is not bf16. When applied: with it, gradients of experts
            are not summed in fp32; an embedding has a `max_norm`; a trained parameter has no
            elements; one module holds parameters of two dtypes itself; or a block is a container.
        ValueError: When applied: `blocks` matches nothing, on one rank too (a pipeline stage may
            have no block), or `cpu_offload` is set on one process, where it would do nothing, or
            where a group has no backend for the CPU.

    References:
        Zhao et al., "PyTorch FSDP" (2023); Rajbhandari et al., "ZeRO" (2020).

    Examples:
        >>> from trainkit.mesh import solo_parallel
        >>> model = nn.Linear(1, 1)
        >>> fsdp(blocks=None)(model, solo_parallel()) is model
        True
    """
    if expert_wire_dtype not in (None, torch.bfloat16):
        raise ConfigError(
            f"fsdp: gradients cannot travel in {expert_wire_dtype}; take bf16, or leave it out",
            where="expert_wire_dtype",
            got=expert_wire_dtype,
        )
    options = layout or Layout()

    def apply(module: nn.Module, where: ParallelState | Axis) -> nn.Module:
        ps = _make_state(where, module) if isinstance(where, Axis) else where
        hybrid = replicates(module, ps)
        is_alone = ps.fsdp.count == 1 and not hybrid
        if is_alone:
            # With degrees of 1: FSDP does not run here, and cpu_offload would do nothing.
            check_layout(Layout(cpu_offload=options.cpu_offload), world=1, device=ps.device.type)
        # Also on one rank, so that a wrong name is found before a run on many.
        units = find_blocks(
            module,
            blocks,
            needed_by="fsdp" if ps.pp.count == 1 else "",
            otherwise=", or give blocks=None to make the whole module one unit",
        )
        if is_alone:
            return module
        names = {part: canonical_name(name) for name, part in module.named_modules()}
        _check_modules(module, units, names)
        compute = get_compute_dtype(module)
        # None stands for the dtype of the parameters.
        summed_in = reduce_dtype if compute else None
        shard = _make_sharder(ps, compute, summed_in, cpu_offload=options.cpu_offload)
        # The innermost modules first: FSDP2 leaves those that are units already to themselves.
        for layer in layers_over_ep(module):
            shard_experts = partial(shard, reshard_after_forward=options.reshard_after_forward)
            _shard_experts_(layer, ps, shard_experts, hybrid=hybrid)
            if expert_wire_dtype is not None:
                _round_expert_gradients_(layer, ps, summed_in)
        assert ps.mesh is not None
        mesh = ps.mesh["dp_replicate", "fsdp"] if hybrid else ps.mesh["fsdp"]
        reshard = options.reshard_after_forward and (options.reshard_over or True)
        first, last = _find_ends(module, units) if options.separate_ends else ([], [])
        for unit in (*units, first):
            _shard_unit_(unit, names, partial(shard, mesh=mesh, reshard_after_forward=reshard))
        # These stay gathered: backward starts with the head, and losses read its weight after its
        # forward pass.
        for unit in (last, module):
            _shard_unit_(unit, names, partial(shard, mesh=mesh, reshard_after_forward=False))
        for unit in units:
            keep_gathered_if_returned_(unit)
        _prefetch_([*units, *last[:1]], options.prefetch)
        sum_gradients_(module)
        return module

    # FSDP2 requires that offloaded shards are on the CPU from the start.
    device = "cpu" if options.cpu_offload else None
    return Transform(apply, kind="fsdp", axes=("dp_replicate", "dp_shard"), device=device)


def _check_modules(
    module: nn.Module, units: Sequence[nn.Module], names: Mapping[nn.Module, str]
) -> None:
    """Raise ConfigError for modules that FSDP2 would compute wrongly, or not at all."""
    refuse_max_norm(module, by="fsdp")
    refuse_empty_parameters(module, by="fsdp")
    for unit in (*units, module):
        refuse_container(unit, names[unit], by="fsdp")


def _make_state(axis: Axis, module: nn.Module) -> ParallelState:
    """Return the layout whose only axis is `axis`, over which parameters are sharded."""
    from torch.distributed.device_mesh import DeviceMesh  # noqa: PLC0415 (a second of import time)

    # A module on the meta device will be where its group communicates.
    devices = [p.device for p in module.parameters() if not p.is_meta]
    device = devices[0] if devices else get_comm_device(axis)
    ps = solo_parallel(device)
    if axis.count == 1:
        return ps
    assert axis.group is not None
    mesh = DeviceMesh.from_group(axis.group, device.type, mesh_dim_names=("fsdp",))
    return attrs.evolve(ps, world=axis, dp=axis, dp_shard=axis, loss=axis, fsdp=axis, mesh=mesh)


def _make_sharder(
    ps: ParallelState,
    compute: torch.dtype | None,
    reduce_dtype: torch.dtype | None,
    *,
    cpu_offload: bool,
) -> Any:
    """Return `fully_shard` with the dtypes and the offloading of all units."""
    from torch.distributed.fsdp import (  # noqa: PLC0415 (a second of import time)
        CPUOffloadPolicy,
        MixedPrecisionPolicy,
        OffloadPolicy,
        fully_shard,
    )

    offload_policy = OffloadPolicy()
    if cpu_offload:
        # The norm of the gradients is summed where they are, on the CPU.
        for axis in (ps.fsdp, ps.expert_fsdp, ps.ep, ps.dp_replicate, ps.pp, ps.tp):
            if axis.group is not None and "cpu" not in get_backends(axis.group):
                backends = ", ".join(get_backends(axis.group).values())
                raise ValueError(
                    f"fsdp: cpu_offload keeps gradients on the CPU, and the group of {axis.name!r} "
                    f"communicates over {backends} alone, which cannot sum them; open it with "
                    "'cpu:gloo,cuda:nccl', as parallel_session does, or leave cpu_offload out"
                )
        # Pinned memory, torch's default, needs an accelerator: without one torch raises.
        offload_policy = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
    # `mixed_precision` casts the inputs of the model; FSDP2 would cast those of every unit.
    mp_policy = MixedPrecisionPolicy(compute, reduce_dtype, cast_forward_inputs=False)
    return partial(fully_shard, mp_policy=mp_policy, offload_policy=offload_policy)


def _shard_experts_(layer: ExpertMlp, ps: ParallelState, shard: Any, *, hybrid: bool) -> None:
    """Shard the experts of one ep rank over expert_fsdp, on their own mesh.

    Dimension 0 of their parameters counts experts. Dimension 1 is sharded where it divides and the
    number of experts does not, so that all shards are equal.
    """
    from torch.distributed.tensor import Shard  # noqa: PLC0415 (a second of import time)

    assert ps.expert_mesh is not None
    sizes = [get_local(p).shape for p in layer.experts.parameters()]
    count = ps.expert_fsdp.count
    even = [dim for dim in (0, 1) if all(size[dim] % count == 0 for size in sizes)]
    placement = Shard(even[0] if even else 0)

    def place(_: nn.Parameter) -> Shard:
        return placement

    shard(
        layer.experts,
        mesh=ps.expert_mesh[("dp_replicate", "expert_fsdp") if hybrid else ("expert_fsdp",)],
        shard_placement_fn=place,
    )
    # They are gathered inside of a block, which recomputation may wrap.
    hide_hooks_(layer.experts)


def _round_expert_gradients_(
    layer: ExpertMlp, ps: ParallelState, reduce_dtype: torch.dtype | None
) -> None:
    """Let FSDP2 sum the gradients of a layer's experts by `reduce_scatter_bf16`."""
    if ps.expert_fsdp.count == 1:
        return  # nothing is sent
    summed_in = reduce_dtype or layer.experts.up.dtype
    if summed_in != torch.float32:
        raise ConfigError(
            f"fsdp: expert_wire_dtype=torch.bfloat16 rounds what is summed in fp32, and gradients "
            f"of {layer.name} are summed in {summed_in}; leave it out",
            where="expert_wire_dtype",
            got=summed_in,
            want=torch.float32,
        )
    round_gradients_(layer.experts, ps.expert_fsdp, name=f"{layer.name} on rank {ps.world.index}")


def _find_ends(
    module: nn.Module, blocks: Sequence[nn.Module]
) -> tuple[list[nn.Module], list[nn.Module]]:
    """Return the modules before a model's blocks and those after them, each list for one unit.

    Both are empty if they share a parameter, or if only norms follow the blocks: then a model, or
    its stage, reads the embedding's weight as its head, outside of the embedding's forward pass,
    where it would not be gathered.
    """
    if not blocks:
        return [], []
    order = {part: i for i, part in enumerate(module.modules())}
    # The model and its list of layers contain the blocks; the ends are their other children.
    around = [x for x in order if {*x.modules()} & {*blocks} and x not in blocks]
    outside = {x for parent in around for x in parent.children()} - {*around, *blocks}
    ends = sorted((x for x in outside if [*x.parameters()]), key=lambda x: order[x])
    first = [x for x in ends if order[x] < order[blocks[0]]]
    last = [x for x in ends if order[x] > order[blocks[0]]]
    first_params = {p for x in first for p in x.parameters()}
    last_params = {p for x in last for p in x.parameters()}
    only_norms = last_params and all(p.dim() < 2 for p in last_params)
    if first_params & last_params or only_norms:
        return [], []
    return first, last


def _shard_unit_(
    unit: nn.Module | Sequence[nn.Module], names: Mapping[nn.Module, str], shard: Any
) -> None:
    """Shard a unit, after the parts of it that must be units of their own.

    FSDP2 sums the gradients of a unit in one dtype: that of its module's own parameters, or else
    that of most of its elements. A module inside whose parameters have another one, such as the
    fp32 norms of bf16 blocks, becomes a unit of its own.
    """
    parts: list[nn.Module] = []

    def search(module: nn.Module, dtype: torch.dtype | None) -> None:
        for child in _children_without_unit(module):
            own = _find_trained_dtype(child, names) or dtype
            if own != dtype and child not in parts:
                if type(child).forward is nn.Module.forward:
                    raise ConfigError(
                        f"fsdp: {names[child]!r} holds parameters in {own} inside a module in "
                        f"{dtype}, and as a {type(child).__name__} is never called, so that they "
                        "could not be gathered by themselves; keep them in a module with a forward "
                        "pass, cast them, or put mixed_precision(...) into the plan, which keeps "
                        "all in one dtype",
                        where=names[child],
                        got=type(child).__name__,
                        want=f"parameters in {dtype}",
                    )
                parts.append(child)
            search(child, own)

    by_dtype: dict[torch.dtype | None, list[nn.Module]] = {}
    for top in [unit] if isinstance(unit, nn.Module) else unit:
        dtype = _find_trained_dtype(top, names) or _most_common_dtype(top)
        by_dtype.setdefault(dtype, []).append(top)
        search(top, dtype)
    for part in reversed(parts):  # the innermost first
        shard(part)
        hide_hooks_(part)
    # A unit of several modules can have several dtypes: then it becomes one unit for each.
    for group in [unit] if isinstance(unit, nn.Module) else by_dtype.values():
        shard(group)


def _children_without_unit(module: nn.Module) -> list[nn.Module]:
    """Return a module's children except those that are FSDP2 units already."""
    from torch.distributed.fsdp import FSDPModule  # noqa: PLC0415 (a second of import time)

    return [child for child in module.children() if not isinstance(child, FSDPModule)]


def _find_trained_dtype(module: nn.Module, names: Mapping[nn.Module, str]) -> torch.dtype | None:
    """Return the dtype of the trained parameters that a module holds directly; None without any."""
    own = module.named_parameters(recurse=False)
    by_dtype = {p.dtype: name for name, p in own if p.requires_grad}
    if len(by_dtype) > 1:
        (one, first), (other, second), *_ = by_dtype.items()
        raise ConfigError(
            f"fsdp: {names[module] or 'the model itself'!r} holds {first!r} in {one} and "
            f"{second!r} in {other}, and the gradients of a module are summed in one dtype; give "
            "one of the two a module of its own, cast it, or put mixed_precision(...) into the "
            "plan, which keeps all in one",
            where=names[module],
            got=[str(one), str(other)],
            want="one dtype",
        )
    return next(iter(by_dtype), None)


def _most_common_dtype(module: nn.Module) -> torch.dtype | None:
    """Return the dtype of most trained elements of a module that are in no unit yet."""
    sizes = Counter[torch.dtype]()
    remaining = [module]
    while remaining:
        part = remaining.pop()
        remaining += _children_without_unit(part)
        for p in part.parameters(recurse=False):
            if p.requires_grad:
                sizes[p.dtype] += p.numel()
    return sizes.most_common(1)[0][0] if sizes else None


def _prefetch_(units: Sequence[Any], ahead: int) -> None:
    """Let each unit gather the units that compute after it, and the units inside those."""
    if not ahead:
        return  # FSDP2 prefetches implicitly, in the order of the forward passes
    from torch.distributed.fsdp import FSDPModule  # noqa: PLC0415 (a second of import time)

    for i, unit in enumerate(units):
        # In the order of use: backward goes through the units in reverse.
        later = units[i + 1 : i + 1 + ahead]
        earlier = units[max(0, i - ahead) : i][::-1]
        for others, set_prefetch in (
            (later, unit.set_modules_to_forward_prefetch),
            (earlier, unit.set_modules_to_backward_prefetch),
        ):
            inside = (module for other in others for module in other.modules())
            set_prefetch([module for module in inside if isinstance(module, FSDPModule)])
