"""Gradient reduction by FSDP2, DDP and over tp: sums, not averages; per step, not per microbatch.

A gradient is divided once, by the number of valid tokens in the global batch. A library that also
divides by the number of ranks gives wrong numbers, so averaging is switched off, and a module that
still averages is refused.

Under tensor parallelism some parameters are whole on every rank and see only a part of the work: a
norm that each rank applies to its part of the sequence or to its heads. Their gradients are
*partial*, and so are those of replicas (`ddp`); `sum_partial_` sums them, all at once, at the end
of a step.
"""

# No `from __future__ import annotations` here: DDP compares a hook's annotation with the class.

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
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
_BROKEN_OFF = Note("broken_off", default=False)
_ROUNDED: Note["_RoundedScatter | None"] = Note("rounded_scatter", default=None)
_PARTIAL: Note[tuple[tuple[tuple[str, ...], Axis], ...]] = Note("partial_gradients", default=())
_REPLICATED = Note("replicated", default=False)
_UNREAD: Note["_Order | None"] = Note("unread_order", default=None)
_BUCKET_ELEMENTS = 16 * 1024 * 1024


@attrs.frozen(eq=False)
class Reducers:
    """The modules inside a model that reduce gradients, by name: FSDP2's, DDP's, and foreign ones.

    Foreign ones (FSDP1 and composable `replicate`) always average, and are known to be refused.
    `partial` are the modules that have parameters whose gradients `sum_partial_` sums.
    """

    fsdp: Sequence[tuple[str, Any]] = ()
    ddp: Sequence[tuple[str, Any]] = ()
    foreign: Sequence[tuple[str, Any]] = ()
    partial: Sequence[tuple[str, Any]] = ()

    def __bool__(self) -> bool:
        return bool(self.fsdp or self.ddp or self.foreign or self.partial)


_NONE, _AVAILABLE = Reducers(), dist.is_available()


def find_reducers(model: nn.Module) -> Reducers:
    """Find the modules that reduce gradients; none without a process group.

    Examples:
        >>> bool(find_reducers(nn.Linear(1, 1)))
        False
    """
    if not (_AVAILABLE and dist.is_initialized()):
        return _NONE
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
    """Return FSDP2's parameter groups of a module: one in torch 2.11, a list from 2.13 on."""
    state = module._get_fsdp_state()  # noqa: SLF001 (no public way to read the divide factor)
    many = getattr(state, "_fsdp_param_groups", None)
    groups = [state._fsdp_param_group] if many is None else many  # noqa: SLF001
    return [group for group in groups if group is not None]


def sum_in_grad_dtype_(model: nn.Module) -> None:
    """Let FSDP2 give sums in the dtype of parameters' gradients, which need not be their own.

    FSDP2 reads dtypes when the model is called for the first time, so this takes effect then.

    Args:
        model: One whose parameters have a `grad_dtype`; without units of FSDP2 nothing is done.

    Effects:
        Takes the place of what its units do to find dtypes.
    """

    def find(unit: Any) -> None:
        type(unit)._init_mp_dtypes(unit)  # noqa: SLF001
        if trained := _trainable(unit):
            unit._orig_dtype = trained[0].sharded_param.grad_dtype  # noqa: SLF001

    for _, module in find_reducers(model).fsdp:
        for unit in fsdp_groups(module):
            unit._init_mp_dtypes = partial(find, unit)  # noqa: SLF001


def keep_gathered_if_returned_(module: Any) -> None:
    """Let an FSDP2 module that returns a parameter of its own stay gathered until its backward.

    Freed after forward, what it returned would have no memory: reading it ends the process, or
    raises an error without names. Whether it returns one is seen in its first forward pass.

    Args:
        module: An FSDP2 module.

    Effects:
        Takes the place of what its units do after their first forward pass.
    """

    def look(unit: Any, inner: nn.Module, given: Any, output: Any) -> Any:
        del unit.post_forward
        own = {_memory_of(p._unsharded_param) for p in unit.fsdp_params}  # noqa: SLF001 (see _was_gathered)
        if any(_memory_of(x) in own for x in _tensors_in(output)):
            module.set_reshard_after_forward(False, recurse=False)
        return unit.post_forward(inner, given, output)

    for unit in fsdp_groups(module):
        unit.post_forward = partial(look, unit)


def _memory_of(tensor: Any) -> int:
    return get_local(tensor).untyped_storage().data_ptr()


def _tensors_in(output: Any) -> Iterator[Tensor]:
    """Yield the tensors of what a module returns: one, or those in tuples, lists and mappings."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, (Mapping, tuple, list)):
        for part in output.values() if isinstance(output, Mapping) else output:
            yield from _tensors_in(part)


def reshards_after_forward(module: Any) -> bool:
    """Say whether an FSDP2 module frees its gathered parameters after its forward pass."""
    return any(group.post_forward_mesh_info is not None for group in fsdp_groups(module))


def _sum_bucket(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Sum a DDP bucket over the group without dividing."""
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    assert work is not None

    def tensor_of(done: Any) -> Tensor:
        return done.value()[0]

    return work.get_future().then(tensor_of)


def _sums(module: Any) -> bool:
    """Say whether a DDP module sums: its only hook is ours (it has no public list of them)."""
    return [hook for hook, _ in module._comm_hooks] == [_sum_bucket]  # noqa: SLF001


def sum_gradients_(model: nn.Module) -> None:
    """Make FSDP2 and DDP modules sum gradients over ranks instead of averaging them.

    Args:
        model: Any module; FSDP2 and DDP modules inside it are found.

    Effects:
        Sets the reduction of those modules. Gradients are not touched. Does nothing the second
        time.

    Examples:
        >>> sum_gradients_(nn.Linear(1, 1))
    """
    reducers = find_reducers(model)
    for _, module in reducers.fsdp:
        # Both are needed: a divide factor alone asks gloo for a reduction it does not have.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    for _, module in reducers.ddp:
        if not module._comm_hooks:  # noqa: SLF001 (see _sums)
            module.register_comm_hook(module.process_group, _sum_bucket)


def check_sums(reducers: Reducers) -> None:
    """Refuse a module that averages gradients, or that holds half of an earlier step's.

    Raises:
        ValueError: Names the first one.
    """
    for name, module in (*reducers.fsdp, *reducers.ddp):
        if _BROKEN_OFF.read(module):
            raise ValueError(
                f"forward_backward: an earlier call broke off in {name or 'the model'!r}, which "
                "holds on to a part of that step's gradient; build the model anew"
            )
        if getattr(module, "static_graph", False):
            raise ValueError(
                f"forward_backward: the DDP module {name or '(the model itself)'!r} has "
                "static_graph=True, which cannot wait for the last microbatch; leave it out"
            )
    check_not_averaging("forward_backward", reducers)


def check_not_averaging(function: str, reducers: Reducers) -> None:
    """Refuse a module that averages gradients, in the name of a function.

    Raises:
        ValueError: Names the first one.
    """
    averaging = [
        name
        for name, module in reducers.fsdp
        if any(group.gradient_divide_factor != 1.0 for group in fsdp_groups(module))
    ]
    averaging += [name for name, module in reducers.ddp if not _sums(module)]
    averaging += [name for name, _ in reducers.foreign]
    if averaging:
        raise ValueError(
            f"{function}: the module {averaging[0] or '(the model itself)'!r} averages "
            "gradients over ranks, which would divide them twice; wrap it with FSDP2 or DDP, and "
            "call sum_gradients_(model) once, without a communication hook of your own"
        )


class Reduction:
    """The reduction of one step's gradients by the FSDP2 and DDP modules of a model.

    FSDP2 reduces the parameters that a rank has used, and nothing that the last backward pass does
    not reach; DDP waits for every parameter in its last one. So ranks whose rows take different
    ways through a model would add gradients of different parameters, wait for each other, or leave
    some unreduced. Here every unit reduces all of its trainable parameters, zeros where there is no
    gradient, at the moment that FSDP2 does it; units with replicas keep to one order, and one whose
    turn has not come waits; `finish` reduces what is left.

    Gathers are not looked after so: ranks that gather different units at one time put shards of
    different parameters together, without an error where these have equal sizes. So the order in
    which a rank has gathered and reduced is compared with that of the others at the end of a step.
    """

    def __init__(self, reducers: Reducers, *, reduce: Reduce) -> None:
        units = [group for _, module in reducers.fsdp for group in fsdp_groups(module)]
        self.reducers, self.reduce = reducers, reduce
        # The order of most backward passes: in another, units with replicas wait for `finish`.
        self.units = [unit for unit in reversed(dict.fromkeys(units)) if _trainable(unit)]
        self.left = list(self.units)
        names = [(unit, name) for name, module in reducers.fsdp for unit in fsdp_groups(module)]
        self.order = _Order(dict(reversed(names)))
        params = [p.sharded_param for unit in self.units for p in _trainable(unit)]
        self.used = {id(p): False for p in params}
        self.earlier = {id(p) for p in params if p.grad is not None}

    @contextmanager
    def microbatch(self, *, last: bool, holds: bool = False) -> Iterator[None]:
        """Run one microbatch's forward and backward with gradients reduced now or later.

        With reduce="last", nothing is reduced before the last microbatch, with `holds` nothing
        before `finish`. With "each", FSDP2 reduce-scatters every microbatch and leaves only the
        all-reduce over replicas for the last. DDP always waits for `finish`: it reduces the
        accumulated gradient, so a sum reduced twice would count the first microbatches once per
        rank.

        Effects:
            Takes the place of what FSDP2 does after a unit's backward pass, and gives it back.
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
        if now and last and unit in self.left:
            if _replicas(unit) is not None and unit is not self._next_with_replicas():
                now = False
            else:
                self.left.remove(unit)
        self._run(unit, now=now, last=last)

    def _next_with_replicas(self) -> Any:
        return next(unit for unit in self.left if _replicas(unit) is not None)

    def _run(self, unit: Any, *, now: bool, last: bool) -> None:
        """Do what FSDP2 does after a unit's backward (2.11 to 2.14), with all its parameters."""
        if now:
            self._fill(unit)
            self.order.add(unit, "reduced")
        unit.reduce_grads, unit.all_reduce_grads = now, last
        try:
            type(unit).post_backward(unit)
        finally:
            unit.reduce_grads = unit.all_reduce_grads = True

    @torch.no_grad()
    def _fill(self, unit: Any) -> None:
        """Give every trainable parameter of a unit a gradient, all in one dtype."""
        params = _trainable(unit)
        wider = any(p.unsharded_accumulated_grad is not None for p in params)
        for p in params:
            if p.unsharded_accumulated_grad is not None or p.unsharded_param.grad is not None:
                self.used[id(p.sharded_param)] = True
            else:
                p.unsharded_param.grad = torch.zeros_like(p.unsharded_param)
            if wider and p.unsharded_accumulated_grad is None:  # by earlier microbatches
                p.to_accumulated_grad_if_needed()

    def reduce_left(self) -> None:
        """Reduce the units that no backward pass has reduced.

        Effects:
            Adds to the `.grad` of their shards, and frees gathered parameters; communicates over
            what they are sharded over and their replicas.
        """
        # Ranks that shard a unit gather it together, so without replicas nobody has used it.
        left = [unit for unit in self.left if _was_gathered(unit) or _replicas(unit) is not None]
        self.left.clear()
        if not left:
            return
        for _, module in self.reducers.fsdp:  # outermost first: the first one becomes the root
            if any(unit in left and not _was_gathered(unit) for unit in fsdp_groups(module)):
                module._get_fsdp_state()._lazy_init()  # noqa: SLF001 (as before a forward pass)
                module.unshard()
                module.reshard()
        for unit in left:
            self._run(unit, now=True, last=True)
        for _, module in self.reducers.fsdp:
            state = module._get_fsdp_state()  # noqa: SLF001 (no public way)
            if state._is_root:  # noqa: SLF001 (as above)
                state._root_post_backward_final_callback()  # noqa: SLF001 (as above)

    def finish(self) -> None:
        """Reduce what is left after the last backward pass; drop gradients that nobody made.

        Effects:
            Adds to `.grad`; communicates. A rank that has used every parameter does not wait.
        """
        self.reduce_left()
        self._drop_unused()
        self.order.compare(self.reducers)
        for _, module in self.reducers.ddp:
            sum_grads_(_ddp_parameters(module), module.process_group)
            module.require_forward_param_sync = True  # its buffers, as after a reduction of its own

    def _drop_unused(self) -> None:
        """Take the zeros away where no rank has used a parameter: no optimizer may step it."""
        meshes: dict[Any, list[Any]] = {}
        for unit in self.units:
            groups = (getattr(unit.mesh_info, "shard_process_group", None), _replicas(unit))
            meshes.setdefault((unit.device, *groups), []).extend(_trainable(unit))
        for (device, *groups), found in meshes.items():
            params = [p.sharded_param for p in found]
            used = [self.used[id(p)] for p in params]
            counts = make_flags(used, torch.empty(0, dtype=torch.float64, device=device))
            shards, replicas = groups
            if shards is not None and shards.size() > 1:
                counts = self.order.sum_with(counts, shards)
            if replicas is not None and replicas.size() > 1:
                dist.all_reduce(counts, group=replicas)
            if all(used):  # only a rank that lacks a gradient waits to hear whether another has one
                continue
            for p, count in zip(params, counts.tolist(), strict=True):
                if not count and id(p) not in self.earlier:
                    p.grad = None


class _Order:
    """In which order a rank gathers FSDP2's units in a step and reduces their gradients.

    Ranks compare a hash, h: among n of them all are equal if n times the sum of h^2 is the square
    of the sum of h. The two sums travel with what is summed at the end of a step in any case, and
    are exact in fp64 for 2^12 ranks.
    """

    def __init__(self, names: Mapping[Any, str]) -> None:
        self.names = names
        self.numbers = {unit: number for number, unit in enumerate(names)}
        self.events: dict[Any, list[tuple[str, int]]] = {}
        self.sums: list[tuple[Any, Tensor]] = []

    def gather(self, unit: Any, *args: Any, **kwargs: Any) -> Any:
        """Gather a unit as FSDP2 does, and take note of it if that sends anything."""
        before = unit._all_gather_result  # noqa: SLF001 (no public way to see a gather)
        found = type(unit).unshard(unit, *args, **kwargs)
        if before is None and unit._all_gather_result is not None:  # noqa: SLF001 (as above)
            self.add(unit, "gathered")
        return found

    def add(self, unit: Any, what: str) -> None:
        """Take note of what happens to a unit."""
        group = getattr(unit.mesh_info, "shard_process_group", None)
        self.events.setdefault(group, []).append((what, self.numbers[unit]))

    def sum_with(self, counts: Tensor, group: Any) -> Tensor:
        """Sum counts over a group, and in the same collective this order's hash and its square."""
        own = tuple((number, what == "reduced") for what, number in self.events.get(group, ()))
        order = hash(own) % 2**20
        hashes = [counts.new_full((1,), order), counts.new_full((1,), order * order)]
        counts = torch.cat([counts, *hashes])
        dist.all_reduce(counts, group=group)
        self.sums.append((group, counts[-2:]))
        return counts[:-2]

    def compare(self, reducers: Reducers) -> None:
        """Refuse a step in which ranks had different orders.

        At once in the first step of a model, and on CPUs; else before the next step, when no device
        must be waited for.

        Raises:
            ConfigError: They had; it names the units, on all ranks.
        """
        if not reducers.fsdp:
            return
        root = reducers.fsdp[0][1]
        waits = _UNREAD.is_on(root) and any(sums.device.type != "cpu" for _, sums in self.sums)
        _UNREAD.write_(root, self if waits else None)
        if not waits:
            self.check()

    def check(self) -> None:
        """Read the sums, and refuse orders that differ; see `compare`."""
        for group, sums in self.sums:
            total, squares = map(int, sums.tolist())
            if group.size() * squares != total * total:
                self._refuse(group)

    def _refuse(self, group: Any) -> None:
        names = [name or "the model itself" for name in self.names.values()]
        own = [(what, names[number]) for what, number in self.events.get(group, ())]
        ranks = all_gather_objects(own, Axis("group", Share(group.rank(), group.size()), group))
        orders = [[*map(tuple, events), ("ended the step", "")] for events in ranks]
        first, other = orders[0], next(x for x in orders if x != orders[0])
        at = next(i for i, (a, b) in enumerate(zip(first, other, strict=False)) if a != b)
        one, two = (f"{what} {name!r}" if name else what for what, name in (first[at], other[at]))
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


def _trainable(unit: Any) -> list[Any]:
    return [p for p in unit.fsdp_params if p.sharded_param.requires_grad]


def _was_gathered(unit: Any) -> bool:
    return all(hasattr(p, "_unsharded_param") for p in unit.fsdp_params)


def _replicas(unit: Any) -> Any:
    """Return the group of a unit's replicas, None without."""
    return getattr(unit.mesh_info, "replicate_process_group", None)


def _ddp_parameters(module: Any) -> list[nn.Parameter]:
    named = module.module.named_parameters()
    return [p for name, p in named if name not in module.parameters_to_ignore]


class _RoundedScatter:
    """What FSDP2 sums gradients by, in place of its reduce-scatter: `reduce_scatter_bf16`.

    Its noise is a function of a step's key, the name of the unit, and how many sums the step has
    had before.
    """

    def __init__(self, axis: Axis, name: str) -> None:
        self.axis, self.name = axis, name
        self.key: Tensor | None = None
        self.sums = 0

    @contextmanager
    def step(self, key: Tensor) -> Iterator[None]:
        """Round by a key for the length of a step."""
        self.key, self.sums = key, 0
        try:
            yield
        finally:
            self.key = None

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
        axis: What it is sharded over.
        name: Names the module and this rank, among all that may have the same key.

    Effects:
        Replaces how the module communicates. Within `reducing` alone it can.
    """
    scatter = _RoundedScatter(axis, name)
    module.set_custom_reduce_scatter(scatter)
    _ROUNDED.write_(module, scatter)


def _rounding(
    reducers: Reducers, microbatches: Sequence[Mapping[str, Any]]
) -> list[AbstractContextManager[None]]:
    """Return what gives a step's key to the modules that round gradients.

    Raises:
        ValueError: There are such, and the first microbatch has no key.
    """
    noted = [_ROUNDED.read(module) for _, module in reducers.fsdp]
    scatters = [scatter for scatter in noted if scatter is not None]
    if scatters and "noise_key" not in microbatches[0]:
        raise ValueError(
            'forward_backward: expert_wire_dtype rounds gradients by the batch\'s "noise_key", '
            "which is not there; add it by data.add_noise_keys, or noise_seed of make_step_batch"
        )
    return [scatter.step(microbatches[0]["noise_key"].flatten()[0]) for scatter in scatters]


@contextmanager
def reducing(
    model: nn.Module,
    reducers: Reducers,
    microbatches: Sequence[Mapping[str, Any]],
    *,
    reduce: Reduce,
) -> Iterator[Reduction]:
    """Run a step's microbatches, each within `microbatch`, and reduce what is left afterwards.

    Effects:
        Those of `Reduction` and `sum_partial_`; keeps earlier gradients out of a second reduction.
    """
    rounding, reduction = _rounding(reducers, microbatches), Reduction(reducers, reduce=reduce)
    unread = _UNREAD.read(reducers.fsdp[0][1]) if reducers.fsdp else None
    if unread is not None:
        unread.check()
    try:
        with ExitStack() as stack, set_aside_reduced(reducers):
            for one in rounding:
                stack.enter_context(one)
            yield reduction
            reduction.finish()
            sum_partial_(model)
    except BaseException:
        for _, module in (*reducers.fsdp, *reducers.ddp):
            _BROKEN_OFF.write_(module, True)
        raise


@contextmanager
def set_aside_reduced(reducers: Reducers) -> Iterator[None]:
    """Keep gradients that are reduced already out of the next reduction; add them afterwards.

    These are what DDP and `sum_partial_` reduce: both take a parameter's whole gradient, and what
    an earlier call left there would be summed over ranks again.

    Effects:
        Sets the `.grad` of their parameters aside for the length of the block.
    """
    held: list[tuple[nn.Parameter, Tensor]] = []
    for parameter in list_summed_at_end(reducers):
        if parameter.grad is not None:
            held.append((parameter, parameter.grad.clone()))
            parameter.grad = None
    try:
        yield
    finally:
        for parameter, grad in held:
            parameter.grad = grad if parameter.grad is None else parameter.grad.add_(grad)


def list_summed_at_end(reducers: Reducers) -> list[nn.Parameter]:
    """Return the parameters whose gradients are summed over ranks after the last backward pass."""
    reduced = [p for _, module in reducers.ddp for p in _ddp_parameters(module)]
    partial = _partial_parameters(module for _, module in reducers.partial)
    return [*reduced, *(parameter for parameter, _ in partial)]


def mark_partial_(module: nn.Module, names: Sequence[str], axis: Axis) -> None:
    """Say that the gradients of some of a module's own parameters are partial over an axis.

    Args:
        module: The module that holds the parameters.
        names: The names of the parameters in that module.
        axis: The axis to sum their gradients over, `ps.tp` or `ps.dp_replicate`; a further one
            where they are marked already.

    Effects:
        Sets an attribute of the module; nothing at size 1.

    Examples:
        >>> from trainkit.mesh import solo_parallel
        >>> mark_partial_(nn.RMSNorm(2), ["weight"], solo_parallel().tp)
    """
    if axis.count > 1:
        _PARTIAL.write_(module, (*_PARTIAL.read(module), (tuple(names), axis)))


def _partial_parameters(modules: Iterable[nn.Module]) -> list[tuple[Any, Axis]]:
    """Return the trainable parameters whose gradients are partial, each once for each axis."""
    found: dict[tuple[int, str], tuple[Any, Axis]] = {}
    for module in modules:
        for names, axis in _PARTIAL.read(module) if _PARTIAL.is_on(module) else ():
            for name in names:
                parameter = module._parameters[name]  # noqa: SLF001 (not what hides it, see styles.py)
                if parameter is not None and parameter.requires_grad:
                    found[id(parameter), axis.name] = parameter, axis
    return list(found.values())


def mark_replicated_(module: nn.Module) -> None:
    """Say that a model's replicas are nothing to FSDP: another transform has taken care of them.

    Effects:
        Sets an attribute of the module.
    """
    _REPLICATED.write_(module, True)


def replicates(module: nn.Module, ps: ParallelState) -> bool:
    """Say whether `fsdp` is to replicate a model over dp_replicate.

    Examples:
        >>> from trainkit.mesh import solo_parallel
        >>> replicates(nn.Linear(1, 1), solo_parallel())
        False
    """
    return ps.dp_replicate.count > 1 and not _REPLICATED.read(module)


@torch.no_grad()
def sum_partial_(model: nn.Module) -> None:
    """Sum the gradients of which each rank has only a part, over tp or replicas, in flat buffers.

    For the end of a step's backward passes, after what FSDP reduces, and within
    `set_aside_reduced`. A parameter without a gradient on this rank counts as zeros; one that
    has none on any rank keeps none.

    Args:
        model: Any module; those that `mark_partial_` has marked are found.

    Effects:
        Replaces the values of `.grad`; communicates over the axes that they were marked with, as
        `sum_grads_`. Nothing where no parameter is partial.

    Examples:
        >>> sum_partial_(nn.Linear(1, 1))
    """
    groups: dict[Any, list[Any]] = {}
    for parameter, axis in _partial_parameters(model.modules()):
        groups.setdefault(axis.group, []).append(parameter)
    for group, parameters in groups.items():
        sum_grads_(parameters, group)


@torch.no_grad()
def sum_grads_(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Sum the gradients of parameters over a group, in a few flat buffers.

    A buffer also carries who has a gradient. A parameter that has none on this rank counts as
    zeros, so ranks cannot disagree on what is sent; one that has none on any rank keeps none.

    Args:
        parameters: The same ones on every rank of the group; frozen ones are left out.
        group: The ranks to sum over.

    Raises:
        ValueError: A gradient is sparse.

    Effects:
        Replaces the values of `.grad`; communicates: one all-reduce per dtype and 16 million
        elements. Only a rank that lacks a gradient waits for the device.
    """
    for bucket in make_buckets([p for p in parameters if p.requires_grad]):
        check_dense(bucket)
        has = [p.grad is not None for p in bucket]
        grads = list_gradients(bucket)
        parts = [get_local(grad) for grad in grads]
        flat = torch.cat([make_flags(has, parts[0]), *(part.reshape(-1) for part in parts)])
        dist.all_reduce(flat, group=group)
        counts, *sums = flat.split([len(parts), *(part.numel() for part in parts)])
        for part, total in zip(parts, sums, strict=True):
            part.copy_(total.view_as(part))
        used = find_used(has, counts)
        for parameter, grad, is_used in zip(bucket, grads, used, strict=True):
            parameter.grad = grad if is_used else None


def list_gradients(params: Sequence[nn.Parameter]) -> list[Tensor]:
    """Return the gradients of parameters, zeros for those that have none."""
    return [torch.zeros_like(p, dtype=p.grad_dtype) if p.grad is None else p.grad for p in params]


def find_used(has: Sequence[bool], counts: Tensor) -> Sequence[bool]:
    """Return which parameters have a gradient on any rank, from how many ranks have one.

    Only a rank that lacks a gradient waits to hear whether another has one.
    """
    return has if all(has) else counts.bool().tolist()


def make_flags(flags: Sequence[bool], like: Tensor) -> Tensor:
    """Return flags as numbers, made where they are needed if all are true."""
    if all(flags):
        return like.new_ones(len(flags))
    return torch.tensor(flags).to(like, non_blocking=True)


_PLAIN = (Tensor, nn.Parameter)


def get_local(tensor: Any) -> Tensor:
    """Return this rank's part of a tensor, sharing its memory.

    Examples:
        >>> get_local(torch.ones(1))
        tensor([1.])
    """
    if type(tensor) in _PLAIN:
        return tensor
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def check_dense(
    parameters: Iterable[nn.Parameter], groups: Iterable[Mapping[str, Any]] = ()
) -> None:
    """Refuse sparse gradients, which nothing here adds, measures, scales or steps by.

    Args:
        parameters: Those whose gradients are looked at.
        groups: Groups of an optimizer, whose "param_names" name a parameter in the message.

    Raises:
        ValueError: Names the first, by its shape where no group names it.

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
            name, shape = names.get(id(p)), tuple(p.shape)
            raise ValueError(
                f"the gradient of {f'{name!r}' if name else 'a parameter'} of shape {shape} is "
                f"sparse ({grad.layout}), and gradients must be dense to be summed, clipped and "
                "stepped by; build its module with sparse=False (nn.Embedding, nn.EmbeddingBag)"
            )


def make_buckets(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Group parameters by dtype, their gradients' too, and device, into lists of a bounded size."""
    open_buckets: dict[Any, list[nn.Parameter]] = {}
    sizes: dict[Any, int] = {}
    full: list[list[nn.Parameter]] = []
    for p in parameters:
        kind, size = (p.dtype, p.grad_dtype, p.device), get_local(p).numel()
        if kind in open_buckets and sizes[kind] + size > _BUCKET_ELEMENTS:
            full.append(open_buckets.pop(kind))
            sizes[kind] = 0
        open_buckets.setdefault(kind, []).append(p)
        sizes[kind] = sizes.get(kind, 0) + size
    return [*full, *open_buckets.values()]


def reshard_(reducers: Reducers) -> None:
    """Free the gathered parameters of FSDP2 modules, so that the model shows its shards again.

    Effects:
        After a forward pass without backward, FSDP2 leaves the root's parameters gathered; this
        undoes it.
    """
    for _, module in reducers.fsdp:
        module.reshard()
