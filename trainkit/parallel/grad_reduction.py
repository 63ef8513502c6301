"""Gradient reduction by FSDP2, DDP and over tp: sums, not averages; per step, not per microbatch.

A gradient is divided once, by the number of valid tokens in the global batch. Dividing it by the
number of ranks as well would be wrong, so averaging is switched off, and a module that still
averages raises an error.

Under tensor parallelism some parameters are replicated, but each rank applies them to a part of the
sequence or of the heads, as norms are. Their gradients are *partial sums*, and so are those of
replicas (`ddp`); `sum_partial_` sums them in a few buffers at the end of a step.
"""

# No `from __future__ import annotations` here: DDP compares a hook's annotation with the class.

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Literal

import attrs
import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainkit.collectives import all_gather_objects, reduce_scatter_bf16
from trainkit.noise import make_key, to_int64
from trainkit.parallel.notes import Note
from trainkit.types import Axis, ConfigError, ParallelState, Share

Reduce = Literal["last", "each"]
# A step has failed in this module of FSDP2 or DDP, and some of its gradients are reduced already.
_BROKEN_OFF = Note("broken_off", default=False)
# The reduce-scatter that rounds the gradients of this module.
_ROUNDED: Note["_RoundedScatter | None"] = Note("rounded_scatter", default=None)
# The parameters whose gradients are partial sums, by name, and the axes to sum them over.
_PARTIAL: Note[tuple[tuple[tuple[str, ...], Axis], ...]] = Note("partial_gradients", default=())
# Another transform than `fsdp` sums over the replicas of this model.
_REPLICATED = Note("replicated", default=False)
# The order of the last step, on the outermost FSDP2 module, until it is compared over ranks.
_UNREAD: Note["_Order | None"] = Note("unread_order", default=None)
# 64 MiB in fp32, the memory that a reduction takes besides the gradients.
_BUCKET_ELEMENTS = 16 * 1024 * 1024


@attrs.frozen(eq=False)
class Reducers:
    """The modules inside a model that reduce gradients, with their names.

    Attributes:
        fsdp: The modules of FSDP2.
        ddp: The modules of DDP.
        foreign: The modules of FSDP1 and composable `replicate`, which always average: an error.
        partial: The modules with parameters whose gradients `sum_partial_` sums.
    """

    fsdp: Sequence[tuple[str, Any]] = ()
    ddp: Sequence[tuple[str, Any]] = ()
    foreign: Sequence[tuple[str, Any]] = ()
    partial: Sequence[tuple[str, Any]] = ()

    def __bool__(self) -> bool:
        return bool(self.fsdp or self.ddp or self.foreign or self.partial)


_NO_REDUCERS = Reducers()


def find_reducers(model: nn.Module) -> Reducers:
    """Find the modules of a model that reduce gradients; none without a process group.

    Examples:
        >>> bool(find_reducers(nn.Linear(1, 1)))
        False
    """
    if not (dist.is_available() and dist.is_initialized()):
        return _NO_REDUCERS
    # Imported here: a second of import time.
    from torch.distributed._composable.contract import _get_registry  # noqa: PLC0415
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel  # noqa: PLC0415
    from torch.nn.parallel import DistributedDataParallel  # noqa: PLC0415

    def is_foreign(module: nn.Module) -> bool:
        return isinstance(module, FullyShardedDataParallel) or (
            not isinstance(module, FSDPModule) and "replicate" in (_get_registry(module) or ())
        )

    modules = list(model.named_modules())
    return Reducers(
        [(name, module) for name, module in modules if isinstance(module, FSDPModule)],
        [(name, module) for name, module in modules if isinstance(module, DistributedDataParallel)],
        [(name, module) for name, module in modules if is_foreign(module)],
        [(name, module) for name, module in modules if _PARTIAL.is_on(module)],
    )


def fsdp_groups(module: Any) -> list[Any]:
    """Return the parameter groups of an FSDP2 module."""
    state = module._get_fsdp_state()  # noqa: SLF001 (no public way to read the divide factor)
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # torch 2.11 has one group; from 2.13 on it is a list
        groups = [state._fsdp_param_group]  # noqa: SLF001
    return [group for group in groups if group is not None]


def sum_in_grad_dtype_(model: nn.Module) -> None:
    """Let FSDP2 reduce gradients into the `grad_dtype` of the parameters.

    Args:
        model: A model whose parameters have a `grad_dtype`; without FSDP2 modules nothing is done.

    Effects:
        Replaces the method by which FSDP2's groups find their dtypes.
    """

    # FSDP2 reads dtypes when the model is called for the first time, so this takes effect then.
    def set_dtype(unit: Any) -> None:
        type(unit)._init_mp_dtypes(unit)  # noqa: SLF001
        if params := _list_trainable(unit):
            unit._orig_dtype = params[0].sharded_param.grad_dtype  # noqa: SLF001

    for _, module in find_reducers(model).fsdp:
        for unit in fsdp_groups(module):
            unit._init_mp_dtypes = partial(set_dtype, unit)  # noqa: SLF001


def keep_gathered_if_returned_(module: Any) -> None:
    """Keep an FSDP2 module gathered until its backward if it returns one of its own parameters.

    Resharding after forward would free the memory of the returned tensor; reading it then ends the
    process, or raises an error that names nothing. The first forward pass shows whether a module
    returns a parameter.

    Args:
        module: An FSDP2 module.

    Effects:
        Replaces a method of its groups until the first forward pass.
    """

    def check_output(unit: Any, inner: nn.Module, args: Any, output: Any) -> Any:
        # The first pass is enough: the method of the class is in force again.
        del unit.post_forward
        own = {get_storage_id(p._unsharded_param) for p in unit.fsdp_params}  # noqa: SLF001 (see _was_gathered)
        if any(get_storage_id(x) in own for x in _iterate_tensors(output)):
            module.set_reshard_after_forward(False, recurse=False)
        return unit.post_forward(inner, args, output)

    for unit in fsdp_groups(module):
        unit.post_forward = partial(check_output, unit)


def _iterate_tensors(output: Any) -> Iterator[Tensor]:
    """Yield the tensors in an output: a tensor, or those in tuples, lists and mappings."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, (Mapping, tuple, list)):
        for part in output.values() if isinstance(output, Mapping) else output:
            yield from _iterate_tensors(part)


def reshards_after_forward(module: Any) -> bool:
    """Return whether an FSDP2 module frees its gathered parameters after its forward pass."""
    return any(group.post_forward_mesh_info is not None for group in fsdp_groups(module))


def _sum_bucket(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Sum a DDP bucket over the group without dividing."""
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    assert work is not None

    # DDP wants the future of one tensor; that of an all-reduce has a list.
    def get_tensor(future: Any) -> Tensor:
        return future.value()[0]

    return work.get_future().then(get_tensor)


def _is_summing(module: Any) -> bool:
    """Return whether a DDP module sums: its only communication hook is `_sum_bucket`."""
    return [hook for hook, _ in module._comm_hooks] == [_sum_bucket]  # noqa: SLF001 (no public list)


def sum_gradients_(model: nn.Module) -> None:
    """Make FSDP2 and DDP modules sum gradients over ranks instead of averaging them.

    Args:
        model: Any module; FSDP2 and DDP modules inside it are found.

    Effects:
        Sets the reduction of those modules; a second call does nothing. Gradients are not changed.

    Examples:
        >>> sum_gradients_(nn.Linear(1, 1))
    """
    reducers = find_reducers(model)
    for _, module in reducers.fsdp:
        # Both are needed: with a divide factor alone FSDP2 uses a reduction that gloo lacks.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    for _, module in reducers.ddp:
        if not module._comm_hooks:  # noqa: SLF001 (see _is_summing)
            module.register_comm_hook(module.process_group, _sum_bucket)


def check_sums(reducers: Reducers) -> None:
    """Check that all modules sum gradients, and that none has unreduced ones of an earlier step.

    Raises:
        ValueError: A module averages gradients, or an earlier step failed; it names the first one.
    """
    for name, module in (*reducers.fsdp, *reducers.ddp):
        if _BROKEN_OFF.read(module):
            raise ValueError(
                f"forward_backward: an earlier call failed in {name or 'the model'!r}, which still "
                "has a part of that step's gradient; build the model anew"
            )
        if getattr(module, "static_graph", False):
            raise ValueError(
                f"forward_backward: the DDP module {name or '(the model itself)'!r} has "
                "static_graph=True, with which it cannot wait for the last microbatch; leave it out"
            )
    check_not_averaging("forward_backward", reducers)


def check_not_averaging(function: str, reducers: Reducers) -> None:
    """Check that no module averages gradients; `function` is the caller's name, for the message.

    Raises:
        ValueError: A module averages; it names the first one.
    """
    averaging = [
        name
        for name, module in reducers.fsdp
        if any(group.gradient_divide_factor != 1.0 for group in fsdp_groups(module))
    ]
    averaging += [name for name, module in reducers.ddp if not _is_summing(module)]
    averaging += [name for name, _ in reducers.foreign]
    if averaging:
        raise ValueError(
            f"{function}: the module {averaging[0] or '(the model itself)'!r} averages "
            "gradients over ranks, which would divide them twice; wrap it with FSDP2 or DDP, and "
            "call sum_gradients_(model) once, without a communication hook of your own"
        )


class Reduction:
    """The reduction of one step's gradients by the FSDP2 and DDP modules of a model.

    FSDP2 reduces only the parameters that a rank has used, and nothing that the last backward pass
    does not reach; DDP waits for every parameter in its last one. If the rows of two ranks took
    different paths through a model, FSDP2 and DDP would add gradients of different parameters,
    hang, or leave gradients unreduced. Here every FSDP2 group reduces all of its trainable
    parameters, zeros where there is no gradient, when FSDP2 would. Groups with replicas are reduced
    in one order; a group whose turn has not come waits, and `finish` reduces the rest.

    All-gathers cannot be ordered like that. If ranks gather different groups at the same time, they
    exchange shards of different parameters, without an error where the sizes are equal. So the
    order in which a rank has gathered and reduced is compared over ranks at the end of a step.
    """

    def __init__(self, reducers: Reducers, *, reduce: Reduce) -> None:
        units = [group for _, module in reducers.fsdp for group in fsdp_groups(module)]
        self.reducers = reducers
        self.reduce = reduce
        # The order of most backward passes: in another, units with replicas wait for `finish`.
        self.units = [unit for unit in reversed(dict.fromkeys(units)) if _list_trainable(unit)]
        self.remaining = list(self.units)
        names = [(unit, name) for name, module in reducers.fsdp for unit in fsdp_groups(module)]
        self.order = _Order(dict(reversed(names)))
        params = [p.sharded_param for unit in self.units for p in _list_trainable(unit)]
        # By the id of a sharded parameter: whether a microbatch of this rank has used it, and
        # whether an earlier call has left a gradient, which `_drop_unused` must keep.
        self.used = {id(p): False for p in params}
        self.had_grad = {id(p) for p in params if p.grad is not None}

    @contextmanager
    def microbatch(self, *, last: bool, holds: bool = False) -> Iterator[None]:
        """Run the forward and backward passes of a microbatch, with gradients reduced now or later.

        With reduce="last", nothing is reduced before the last microbatch; with `holds`, nothing
        before `finish`. With "each", FSDP2 reduce-scatters every microbatch, and only the
        all-reduce over replicas waits for the last. DDP always waits for `finish`: it reduces the
        accumulated gradient, so reducing twice would count the first microbatches once per rank.

        Effects:
            Replaces methods of FSDP2's groups for the length of the block.
        """
        now = not holds and (last or self.reduce == "each")
        for unit in self.units:
            unit.post_backward = partial(self._after_backward, unit, now=now, last=last)
        for unit in self.order.names:
            unit.unshard = partial(self.order.gather, unit)
        try:
            with ExitStack() as stack:
                for _, module in self.reducers.ddp:
                    stack.enter_context(module.no_sync())
                yield
        finally:
            for unit in self.units:
                del unit.post_backward
            for unit in self.order.names:
                del unit.unshard

    def _after_backward(self, unit: Any, *_: Any, now: bool, last: bool) -> None:
        if not _was_gathered(unit):  # a unit that no microbatch has used, in no step
            return
        if now and last and unit in self.remaining:
            # All-reduces over replicas must match: such units take turns in one order.
            with_replicas = (x for x in self.remaining if _get_replica_group(x) is not None)
            if _get_replica_group(unit) is not None and unit is not next(with_replicas):
                now = False
            else:
                self.remaining.remove(unit)
        self._run_post_backward(unit, now=now, last=last)

    def _run_post_backward(self, unit: Any, *, now: bool, last: bool) -> None:
        """Run FSDP2's own method (torch 2.11 to 2.14), with gradients of all parameters."""
        if now:
            self._fill_grads(unit)
            self.order.add(unit, "reduced")
        unit.reduce_grads = now
        unit.all_reduce_grads = last
        try:
            # By the class: the attribute of the instance is `_after_backward`.
            type(unit).post_backward(unit)
        finally:
            unit.reduce_grads = unit.all_reduce_grads = True

    @torch.no_grad()
    def _fill_grads(self, unit: Any) -> None:
        """Give every trainable parameter of a unit a gradient, all in one dtype."""
        params = _list_trainable(unit)
        has_accumulated = any(p.unsharded_accumulated_grad is not None for p in params)
        for p in params:
            if p.unsharded_accumulated_grad is not None or p.unsharded_param.grad is not None:
                self.used[id(p.sharded_param)] = True
            else:
                p.unsharded_param.grad = torch.zeros_like(p.unsharded_param)
            # Earlier microbatches may have left gradients of the unit in a wider dtype.
            if has_accumulated and p.unsharded_accumulated_grad is None:
                p.to_accumulated_grad_if_needed()

    def reduce_left(self) -> None:
        """Reduce the units that no backward pass has reduced.

        Effects:
            Adds to the `.grad` of their shards, and frees gathered parameters; communicates over
            their shard and replica groups.
        """
        # Ranks that shard a unit gather it together, so without replicas no rank has used it.
        units = [
            unit
            for unit in self.remaining
            if _was_gathered(unit) or _get_replica_group(unit) is not None
        ]
        self.remaining.clear()
        if not units:
            return
        for _, module in self.reducers.fsdp:  # outermost first: the first one becomes the root
            if any(unit in units and not _was_gathered(unit) for unit in fsdp_groups(module)):
                module._get_fsdp_state()._lazy_init()  # noqa: SLF001 (as before a forward pass)
                module.unshard()
                module.reshard()
        for unit in units:
            self._run_post_backward(unit, now=True, last=True)
        for _, module in self.reducers.fsdp:
            state = module._get_fsdp_state()  # noqa: SLF001 (no public way)
            if state._is_root:  # noqa: SLF001 (as above)
                state._root_post_backward_final_callback()  # noqa: SLF001 (as above)

    def finish(self) -> None:
        """Reduce the remaining units after the last backward pass, and DDP's gradients.

        A parameter that no rank has used has no gradient afterwards.

        Effects:
            Adds to `.grad`; communicates. A rank that has used every parameter does not wait.
        """
        self.reduce_left()
        self._drop_unused()
        self.order.compare(self.reducers)
        for _, module in self.reducers.ddp:
            all_reduce_gradients_(_list_ddp_parameters(module), module.process_group)
            # As after DDP's own reduction: the next forward pass broadcasts its buffers.
            module.require_forward_param_sync = True

    def _drop_unused(self) -> None:
        """Remove the zero gradients of parameters that no rank has used: no step may use them."""
        meshes: dict[Any, list[Any]] = {}
        for unit in self.units:
            shard_group = getattr(unit.mesh_info, "shard_process_group", None)
            key = (unit.device, shard_group, _get_replica_group(unit))
            meshes.setdefault(key, []).extend(_list_trainable(unit))
        for (device, shard_group, replica_group), members in meshes.items():
            params = [p.sharded_param for p in members]
            used = [self.used[id(p)] for p in params]
            counts = make_flags(used, torch.empty(0, dtype=torch.float64, device=device))
            if shard_group is not None and shard_group.size() > 1:
                counts = self.order.sum_with(counts, shard_group)
            if replica_group is not None and replica_group.size() > 1:
                dist.all_reduce(counts, group=replica_group)
            if all(used):  # only a rank that lacks a gradient has to wait for the counts
                continue
            for p, count in zip(params, counts.tolist(), strict=True):
                if not count and id(p) not in self.had_grad:
                    p.grad = None


class _Order:
    """The order in which a rank gathers FSDP2's units in a step and reduces their gradients.

    Ranks compare a hash h of it: on n ranks all are equal if n * sum(h^2) = sum(h)^2. The two sums
    are all-reduced together with the counts at the end of a step, and are exact in fp64 for 2^12
    ranks.
    """

    def __init__(self, names: Mapping[Any, str]) -> None:
        self.names = names
        # A unit's index in the model is equal on all ranks, so it stands for the unit in the hash.
        self.numbers = {unit: number for number, unit in enumerate(names)}
        self.events: dict[Any, list[tuple[str, int]]] = {}
        self.sums: list[tuple[Any, Tensor]] = []

    def gather(self, unit: Any, *args: Any, **kwargs: Any) -> Any:
        """Gather a unit by FSDP2's own method, and record it if anything was sent."""
        before = unit._all_gather_result  # noqa: SLF001 (no public way to see a gather)
        result = type(unit).unshard(unit, *args, **kwargs)
        if before is None and unit._all_gather_result is not None:  # noqa: SLF001 (as above)
            self.add(unit, "gathered")
        return result

    def add(self, unit: Any, event: str) -> None:
        """Record an event of a unit, "gathered" or "reduced"."""
        group = getattr(unit.mesh_info, "shard_process_group", None)
        self.events.setdefault(group, []).append((event, self.numbers[unit]))

    def sum_with(self, counts: Tensor, group: Any) -> Tensor:
        """Sum counts over a group, and in the same all-reduce the order's hash and its square."""
        events = self.events.get(group, ())
        # The hash of integers is the same in every process, unlike that of strings.
        order = hash(tuple((number, event == "reduced") for event, number in events)) % 2**20
        hashes = [counts.new_full((1,), order), counts.new_full((1,), order * order)]
        counts = torch.cat([counts, *hashes])
        dist.all_reduce(counts, group=group)
        self.sums.append((group, counts[-2:]))
        return counts[:-2]

    def compare(self, reducers: Reducers) -> None:
        """Check that all ranks had the same order in a step.

        The check is immediate in the first step of a model, and on CPUs. Otherwise it is deferred
        to the next step, when it need not wait for the device.

        Raises:
            ConfigError: The orders differ; it names the units, on all ranks.
        """
        if not reducers.fsdp:
            return
        root = reducers.fsdp[0][1]
        is_deferred = _UNREAD.is_on(root) and any(x.device.type != "cpu" for _, x in self.sums)
        _UNREAD.write_(root, self if is_deferred else None)
        if not is_deferred:
            self.check()

    def check(self) -> None:
        """Read the sums and raise ConfigError if the orders differ; see `compare`."""
        for group, sums in self.sums:
            total, squares = map(int, sums.tolist())
            if group.size() * squares != total * total:
                self._raise_difference(group)

    def _raise_difference(self, group: Any) -> None:
        names = [name or "the model itself" for name in self.names.values()]
        events = [(event, names[number]) for event, number in self.events.get(group, ())]
        axis = Axis("group", Share(group.rank(), group.size()), group)
        by_rank = all_gather_objects(events, axis)
        # One order may be the start of another: then the end is where they differ.
        orders = [[*map(tuple, events), ("ended the step", "")] for events in by_rank]
        other = next(order for order in orders if order != orders[0])
        pairs = zip(orders[0], other, strict=False)
        different = next((a, b) for a, b in pairs if a != b)
        one, two = (f"{event} {name!r}" if name else event for event, name in different)
        raise ConfigError(
            f"forward_backward: rank 0 of the ranks that shard the model {one} where rank "
            f"{orders.index(other)} {two}: parameters of different modules were put together, and "
            "the numbers of that step are wrong. Every rank must use all units of fsdp() in one "
            "order, in every microbatch; leave modules that only some rows need (experts, the "
            "tower of a further modality) out of `blocks`, so that they are gathered with the "
            "unit around them, or call them on every rank, without rows where there are none",
            where="blocks",
            got=[one, two],
        )


def _list_trainable(unit: Any) -> list[Any]:
    return [p for p in unit.fsdp_params if p.sharded_param.requires_grad]


def _was_gathered(unit: Any) -> bool:
    return all(hasattr(p, "_unsharded_param") for p in unit.fsdp_params)


def _get_replica_group(unit: Any) -> Any:
    """Return the process group of a unit's replicas, or None."""
    return getattr(unit.mesh_info, "replicate_process_group", None)


def _list_ddp_parameters(module: Any) -> list[nn.Parameter]:
    named = module.module.named_parameters()
    return [p for name, p in named if name not in module.parameters_to_ignore]


class _RoundedScatter:
    """A reduce-scatter for FSDP2 in bf16 with stochastic rounding: `reduce_scatter_bf16`.

    The noise is a function of the key of the step, the name of the unit, and the number of earlier
    reductions in the step.
    """

    def __init__(self, axis: Axis, name: str) -> None:
        self.axis, self.name = axis, name
        self.key: Tensor | None = None
        self.sums = 0

    @contextmanager
    def step(self, key: Tensor) -> Iterator[None]:
        """Use a key for the length of a step."""
        self.key = key
        self.sums = 0
        try:
            yield
        finally:
            self.key = None

    # `allocate` and `__call__` are the protocol of FSDP2's custom reduce-scatter.
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, **_: Any) -> None:
        if self.key is None:
            raise RuntimeError(
                "fsdp: gradients are rounded by the key of a step; call forward_backward, or leave "
                "expert_wire_dtype out"
            )
        key = self.key ^ to_int64(make_key(self.name, self.sums))
        self.sums += 1
        output_tensor.copy_(reduce_scatter_bf16(input_tensor, self.axis, key=key))


def round_gradients_(module: Any, axis: Axis, *, name: str) -> None:
    """Let an FSDP2 module sum its gradients by `collectives.reduce_scatter_bf16`.

    Args:
        module: A module with one group of parameters, whose gradients are summed in fp32.
        axis: The axis that it is sharded over.
        name: A name of the module and this rank, unique among those with the same key.

    Effects:
        Replaces the module's reduce-scatter, which then works only inside `use_reduction`.
    """
    scatter = _RoundedScatter(axis, name)
    module.set_custom_reduce_scatter(scatter)
    _ROUNDED.write_(module, scatter)


@contextmanager
def use_reduction(
    model: nn.Module,
    reducers: Reducers,
    microbatches: Sequence[Mapping[str, Any]],
    *,
    reduce: Reduce,
) -> Iterator[Reduction]:
    """Run the microbatches of a step, each within `microbatch`, and reduce the rest afterwards.

    Raises:
        ValueError: Gradients are rounded stochastically, and the first microbatch has no key.

    Effects:
        Those of `Reduction` and `sum_partial_`; gradients of earlier calls are not reduced again.
    """
    scatters = [x for _, module in reducers.fsdp if (x := _ROUNDED.read(module)) is not None]
    if scatters and "noise_key" not in microbatches[0]:
        raise ValueError(
            'forward_backward: expert_wire_dtype rounds gradients by the batch\'s "noise_key", '
            "which is missing; add it by data.add_noise_keys, or noise_seed of make_step_batch"
        )
    reduction = Reduction(reducers, reduce=reduce)
    unread = _UNREAD.read(reducers.fsdp[0][1]) if reducers.fsdp else None
    if unread is not None:
        unread.check()
    try:
        with ExitStack() as stack, set_aside_reduced(reducers):
            for scatter in scatters:
                stack.enter_context(scatter.step(microbatches[0]["noise_key"].flatten()[0]))
            yield reduction
            reduction.finish()
            sum_partial_(model)
    except BaseException:
        for _, module in (*reducers.fsdp, *reducers.ddp):
            # Some gradients are reduced and others are not: no later step may add to them.
            _BROKEN_OFF.write_(module, True)
        raise


@contextmanager
def set_aside_reduced(reducers: Reducers) -> Iterator[None]:
    """Remove gradients that are reduced already for the length of a block, and add them afterwards.

    DDP and `sum_partial_` reduce `.grad`, so gradients that an earlier call left there would be
    summed over ranks again.

    Effects:
        Replaces the `.grad` of those parameters.
    """
    reduced: list[tuple[nn.Parameter, Tensor]] = []
    for parameter in list_summed_at_end(reducers):
        if parameter.grad is not None:
            reduced.append((parameter, parameter.grad.clone()))
            parameter.grad = None
    try:
        yield
    finally:
        for parameter, grad in reduced:
            parameter.grad = grad if parameter.grad is None else parameter.grad.add_(grad)


def list_summed_at_end(reducers: Reducers) -> list[nn.Parameter]:
    """Return the parameters whose gradients are summed over ranks after the last backward pass."""
    of_ddp = [p for _, module in reducers.ddp for p in _list_ddp_parameters(module)]
    partial = _list_partial(module for _, module in reducers.partial)
    return [*of_ddp, *(parameter for parameter, _ in partial)]


def mark_partial_(module: nn.Module, names: Sequence[str], axis: Axis) -> None:
    """Mark parameters of a module whose gradients are partial sums over an axis.

    Args:
        module: The module that owns the parameters.
        names: The names of the parameters in that module.
        axis: The axis to sum their gradients over, `ps.tp` or `ps.dp_replicate`. A second call adds
            an axis.

    Effects:
        Sets an attribute of the module; nothing at size 1.

    Examples:
        >>> from trainkit.mesh import solo_parallel
        >>> mark_partial_(nn.RMSNorm(2), ["weight"], solo_parallel().tp)
    """
    if axis.count > 1:
        _PARTIAL.write_(module, (*_PARTIAL.read(module), (tuple(names), axis)))


def _list_partial(modules: Iterable[nn.Module]) -> list[tuple[Any, Axis]]:
    """Return the trainable parameters whose gradients are partial sums, once for each axis."""
    marked: dict[tuple[int, str], tuple[Any, Axis]] = {}
    for module in modules:
        for names, axis in _PARTIAL.read(module) if _PARTIAL.is_on(module) else ():
            for name in names:
                parameter = module._parameters[name]  # noqa: SLF001 (not what hides it, see styles.py)
                if parameter is not None and parameter.requires_grad:
                    marked[id(parameter), axis.name] = parameter, axis
    return list(marked.values())


def mark_replicated_(module: nn.Module) -> None:
    """Mark a model whose replicas another transform reduces, so that `fsdp` leaves them alone.

    Effects:
        Sets an attribute of the module.
    """
    _REPLICATED.write_(module, True)


def replicates(module: nn.Module, ps: ParallelState) -> bool:
    """Return whether `fsdp` replicates a model over dp_replicate.

    Examples:
        >>> from trainkit.mesh import solo_parallel
        >>> replicates(nn.Linear(1, 1), solo_parallel())
        False
    """
    return ps.dp_replicate.count > 1 and not _REPLICATED.read(module)


@torch.no_grad()
def sum_partial_(model: nn.Module) -> None:
    """Sum the gradients that are partial sums, over tp or replicas, in flat buffers.

    Call it after the backward passes of a step and FSDP's reductions, inside `set_aside_reduced`. A
    parameter without a gradient on this rank counts as zeros; one without a gradient on any rank
    has none afterwards.

    Args:
        model: Any module; modules that `mark_partial_` has marked are found.

    Effects:
        Replaces the values of `.grad`; communicates over the marked axes, as
        `all_reduce_gradients_`. Nothing if no parameter is marked.

    Examples:
        >>> sum_partial_(nn.Linear(1, 1))
    """
    groups: dict[Any, list[Any]] = {}
    for parameter, axis in _list_partial(model.modules()):
        groups.setdefault(axis.group, []).append(parameter)
    for group, parameters in groups.items():
        all_reduce_gradients_(parameters, group)


@torch.no_grad()
def all_reduce_gradients_(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Sum the gradients of parameters over a process group, in a few flat buffers.

    A parameter without a gradient on this rank counts as zeros, so all ranks send buffers of equal
    sizes; one without a gradient on any rank has none afterwards. A buffer also has flags of the
    gradients that exist.

    Args:
        parameters: The same parameters on every rank of the group; frozen ones are skipped.
        group: The process group to sum over.

    Raises:
        ValueError: A gradient is sparse.

    Effects:
        Replaces the values of `.grad`; communicates: one all-reduce per dtype and 16 million
        elements. Only a rank that lacks a gradient waits for the device.
    """
    for bucket in make_buckets([p for p in parameters if p.requires_grad]):
        check_dense(bucket)
        has_grad = [p.grad is not None for p in bucket]
        grads = list_gradients(bucket)
        shards = [get_local(grad) for grad in grads]
        # The sum of the flags is the number of ranks that have each gradient.
        flags = make_flags(has_grad, shards[0])
        flat = torch.cat([flags, *(shard.reshape(-1) for shard in shards)])
        dist.all_reduce(flat, group=group)
        sizes = [shard.numel() for shard in shards]
        counts, *sums = flat.split([len(flags), *sizes])
        for shard, total in zip(shards, sums, strict=True):
            shard.copy_(total.view_as(shard))
        for p, grad, is_used in zip(bucket, grads, find_used(has_grad, counts), strict=True):
            p.grad = grad if is_used else None


def list_gradients(params: Sequence[nn.Parameter]) -> list[Tensor]:
    """Return the gradients of parameters, with zeros where there is none."""
    return [torch.zeros_like(p, dtype=p.grad_dtype) if p.grad is None else p.grad for p in params]


def find_used(has_grad: Sequence[bool], counts: Tensor) -> Sequence[bool]:
    """Return whether each parameter has a gradient on any rank, given the number of such ranks."""
    # Only a rank that lacks a gradient waits for the device.
    return has_grad if all(has_grad) else counts.bool().tolist()


def make_flags(flags: Sequence[bool], like: Tensor) -> Tensor:
    """Return flags as a tensor of ones and zeros, with the dtype and device of another."""
    if all(flags):  # the usual case, without a copy from the host
        return like.new_ones(len(flags))
    return torch.tensor(flags).to(like, non_blocking=True)


_PLAIN = (Tensor, nn.Parameter)


def get_local(tensor: Any) -> Tensor:
    """Return the local shard of a DTensor, which shares its memory; other tensors as they are.

    Examples:
        >>> get_local(torch.ones(1))
        tensor([1.])
    """
    if type(tensor) in _PLAIN:
        return tensor
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def get_storage_id(tensor: Any) -> int:
    """Return a number that identifies the storage of a tensor's local shard while it exists.

    Examples:
        >>> x = torch.ones(2)
        >>> get_storage_id(x) == get_storage_id(x[1:])
        True
    """
    # Not data_ptr(): it is 0 for every freed storage, and a FakeTensor has none.
    return get_local(tensor).untyped_storage()._cdata  # noqa: SLF001 (as torch.multiprocessing does)


def check_dense(
    parameters: Iterable[nn.Parameter], groups: Iterable[Mapping[str, Any]] = ()
) -> None:
    """Check that gradients are dense, as reductions, norms and optimizers here require.

    Args:
        parameters: The parameters whose gradients are checked.
        groups: Parameter groups of an optimizer, for the names in the message ("param_names").

    Raises:
        ValueError: A gradient is sparse; it names the first one, or its shape.

    Examples:
        >>> check_dense([nn.Parameter(torch.ones(1))])
    """
    for p in parameters:
        grad = p.grad
        if grad is not None and grad.layout != torch.strided:
            names = {
                id(q): name
                for group in groups
                for q, name in zip(group["params"], group.get("param_names", ()), strict=False)
            }
            name = names.get(id(p))
            raise ValueError(
                f"the gradient of {f'{name!r}' if name else 'a parameter'} of shape "
                f"{tuple(p.shape)} is sparse ({grad.layout}), and gradients must be dense to be "
                "summed, clipped and stepped by; build its module with sparse=False "
                "(nn.Embedding, nn.EmbeddingBag)"
            )


def make_buckets(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Group parameters into buckets of bounded size, with one dtype, gradient dtype and device."""
    open_buckets: dict[Any, list[nn.Parameter]] = {}
    sizes: dict[Any, int] = {}
    full: list[list[nn.Parameter]] = []
    for p in parameters:
        kind = (p.dtype, p.grad_dtype, p.device)
        size = get_local(p).numel()
        if kind in open_buckets and sizes[kind] + size > _BUCKET_ELEMENTS:
            full.append(open_buckets.pop(kind))
            sizes[kind] = 0
        open_buckets.setdefault(kind, []).append(p)
        sizes[kind] = sizes.get(kind, 0) + size
    return [*full, *open_buckets.values()]


def reshard_(reducers: Reducers) -> None:
    """Free the gathered parameters of FSDP2 modules.

    FSDP2 leaves the root's parameters gathered after a forward pass without backward.

    Effects:
        The model's parameters are shards again.
    """
    for _, module in reducers.fsdp:
        module.reshard()
