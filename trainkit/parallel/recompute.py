"""Activation recomputation: save fewer results in forward, and compute the others again."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import (
    _get_current_dispatch_mode,
    _pop_mode_temporarily,
)
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from trainkit.attention.choose import list_operators
from trainkit.models.mixins import Forward, wrap_forward_
from trainkit.parallel.notes import Note
from trainkit.parallel.parameters import find_blocks
from trainkit.parallel.recompute_budget import Keeps, Priced, choose
from trainkit.parallel.transforms import Transform
from trainkit.types import ConfigError, ParallelState

_MODE = Note("recompute", default="none")
_CHOICE = Note[Keeps | None]("saved_by_cost", default=None)

# Newer torch only; see `_recompute`.
_OF_HOOKS = inspect.signature(checkpoint).parameters.keys() & {"respect_saved_tensors_hooks"}
# The dispatch modes of the first pass, of the second one and of the trial.
_SELECTIVE = (*map(type, create_selective_checkpoint_contexts([])), Priced)

# Not bmm: those are the scores of attention written in plain operators, which are large.
_PRODUCTS = ("mm", "addmm", "_grouped_mm", "_scaled_mm")
_PART = r"(?:exchanges|attention|products(?:/[1-9][0-9]?)?)"


def groups_of(device: torch.device) -> dict[Any, str]:
    """Return the expensive operators, whose results can be saved, and their groups.

    These are matrix products, attention by every kernel of `trainkit.attention` that is one
    operator, and exchanges of tokens between ranks. Attention in plain operators, as for soft caps,
    is always recomputed: its scores take many times the memory of its inputs. So is `flex`, which
    is compiled and therefore not seen as an operator. A name that torch does not know is an error:
    otherwise its results would silently never be saved.

    Args:
        device: The device of the model; the kernel for packed documents exists only on CUDA.

    Raises:
        AttributeError: This torch has no such operator.

    Examples:
        >>> groups_of(torch.device("cpu"))[torch.ops.aten.mm.default]
        'products'
    """
    packets = {getattr(torch.ops.aten, name): "products" for name in _PRODUCTS}
    packets |= dict.fromkeys(list_operators(device), "attention")
    packets[torch.ops.aten._flash_attention_forward] = "attention"  # noqa: SLF001 (the ring's)
    if dist.is_available():
        sent = torch.ops._c10d_functional  # noqa: SLF001 (what all_to_all_rows calls)
        packets[sent.all_to_all_single] = "exchanges"
    return {
        getattr(packet, name): group
        for packet, group in packets.items()
        for name in packet.overloads()
    }


@attrs.frozen
class RecomputeMode:
    """The results that a mode of `recompute` saves: every n-th of each group.

    With a `budget`, a fraction of the bytes, as many of them as fit.
    """

    every: Mapping[str, int] = attrs.field(factory=dict)
    budget: float | None = None

    def __call__(self, group: str, number: int) -> bool:
        return group in self.every and number % self.every[group] == 0


def read_mode(mode: str) -> RecomputeMode | None:
    """Parse a mode of `recompute`; None if nothing is recomputed.

    Raises:
        ConfigError: It is no mode.

    Examples:
        >>> read_mode("attention+products/2").every
        {'attention': 1, 'products': 2}
    """
    every = {"exchanges": 1, "attention": 1, "products": 1}
    known = {"none": None, "full": RecomputeMode(), "selective": RecomputeMode(every)}
    if mode in known:
        return known[mode]
    if re.fullmatch(r"0\.\d*[1-9]\d*", mode):
        return RecomputeMode(every, budget=float(mode))
    if not re.fullmatch(rf"{_PART}(\+{_PART})*", mode):
        raise ConfigError(
            'recompute must be "none", "selective" or "full"; or the results to save, '
            f'{", ".join(every)} with + between, "products/2" for every second product; or the '
            f'fraction of the bytes to save, such as "0.4"; got {mode!r}',
            where="recompute",
            got=mode,
        )
    parts = (part.partition("/") for part in mode.split("+"))
    return RecomputeMode({name: int(count or 1) for name, _, count in parts})


class _Policy:
    """Number the operators of each group in a forward pass, and choose the results to save."""

    def __init__(self, groups: Mapping[Any, str], keeps: Keeps) -> None:
        self.groups, self.keeps = groups, keeps
        self.seen: Counter[tuple[bool, str]] = Counter()

    def __call__(self, context: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        group = self.groups.get(op)
        if group is None:
            return CheckpointPolicy.PREFER_RECOMPUTE
        at = (context.is_recompute, group)  # torch 2.11 calls it in both passes, 2.13 in one
        self.seen[at] += 1
        is_saved = self.keeps(group, self.seen[at] - 1)
        return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE


def _make_contexts(groups: Mapping[Any, str], keeps: Keeps) -> Any:
    # A new policy for each call: it counts the operators of one forward pass.
    return create_selective_checkpoint_contexts(_Policy(groups, keeps))


def recompute(
    mode: str = "full", *, blocks: str = "layers.*", preserve_rng_state: bool = True
) -> Transform:
    """Return the transform that recomputes the activations of each block in the backward pass.

    Args:
        mode: "none" changes nothing. "full" saves only the input of each block. Names joined by +
            save results too: "attention", "exchanges" with experts on other ranks, "products" with
            matrices, "products/2" every second product of a block. "selective" is all three. A
            fraction such as "0.4" saves in each block as many of these as fit into that fraction of
            the bytes of "none". Results with the most operations per byte come first: exchanges,
            attention, then products by their inner width. The choice needs a trial, so that the
            first forward pass of a block runs twice. It follows from shapes: ranks whose blocks
            have the same shapes choose the same.
        blocks: The name pattern of the blocks.
        preserve_rng_state: Whether to restore torch's generators for the second forward pass, as
            torch's own dropout needs. False is faster, and right for models whose randomness is a
            function of a counter, such as `Decoder`.

    Returns:
        A transform for `build_stages`. It replaces `forward` of each block; names stay.

    Raises:
        ConfigError: The mode is unknown.
        ValueError: When applied: `blocks` matches nothing.

    References:
        Chen et al., "Training deep nets with sublinear memory cost" (2016); Korthikanti et al.,
        "Reducing activation recomputation in large transformer models" (2022).

    Examples:
        >>> recompute("selective").kind
        'recompute'
    """
    saved = read_mode(mode)

    def apply(module: nn.Module, ps: ParallelState) -> nn.Module:
        if saved is None:
            return module
        wrap = partial(
            _recompute,
            saved=saved,
            groups=groups_of(ps.device) if saved.every else {},
            preserve_rng_state=preserve_rng_state,
        )
        for unit in find_blocks(module, blocks, needed_by="recompute"):
            # Submodules whose result is only added to others.
            for name in getattr(unit, "only_added", ()) if saved.every else ():
                part = unit.get_submodule(name)
                if not [*part.children()]:  # with adapters it computes more than one result
                    wrap_forward_(part, _hide_from_recomputation)
            wrap_forward_(unit, wrap)
            _MODE.write_(unit, mode)
        return module

    return Transform(apply, kind="recompute")


def _recompute(
    forward: Forward,
    *,
    saved: RecomputeMode,
    groups: Mapping[Any, str],
    preserve_rng_state: bool,
) -> Forward:
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(self, *args, **kwargs)
        keeps: Keeps = saved
        if saved.budget is not None:
            keeps = _CHOICE.read(self) or choose(
                forward, self, (args, kwargs), groups=groups, budget=saved.budget
            )
            _CHOICE.write_(self, keeps)
        # From torch 2.14 on saved results would go through the hooks of `offload_activations`.
        options: dict[str, Any] = dict.fromkeys(_OF_HOOKS, False)
        if saved.every:
            # torch.compile takes a partial here, but no nested function.
            options["context_fn"] = partial(_make_contexts, groups, keeps)
        return checkpoint(
            forward,
            self,
            *args,
            use_reentrant=False,
            preserve_rng_state=preserve_rng_state,
            **options,
            **kwargs,
        )

    return call


def _hide_from_recomputation(forward: Forward) -> Forward:
    """Return a forward pass whose result is never saved, as it is only added to others.

    The backward pass of a sum needs none of its terms.
    """

    def call(self: nn.Module, *args: Any) -> Any:
        if torch.compiler.is_compiling():  # the compiler knows what backward needs
            return forward(self, *args)
        return _unseen(partial(forward, self), *args)

    return call


def get_recompute_mode(modules: Iterable[nn.Module]) -> str:
    """Return the mode that `recompute` gave to blocks of a model, "none" if it gave none.

    Examples:
        >>> get_recompute_mode([nn.Linear(1, 1)])
        'none'
    """
    modes = (mode for module in modules for mode in _MODE.read_all(module))
    return next(modes, "none")


def refuse_by_cost(module: nn.Module, *, by: str) -> None:
    """Raise ConfigError if blocks choose by cost what they save, which needs an eager pass.

    Raises:
        ConfigError: There is one; the message starts with `by`.

    Examples:
        >>> refuse_by_cost(nn.Linear(1, 1), by="compile_blocks")
    """
    for part in module.modules():
        mode = _MODE.read(part)
        if (saved := read_mode(mode)) is not None and saved.budget is not None:
            raise ConfigError(
                f"{by}: recompute({mode!r}) chooses by cost in a pass that is not compiled; name "
                'the results to save, as in recompute("attention+products/2")',
                where="recompute",
                got=mode,
            )


def recomputes_selectively(module: nn.Module) -> bool:
    """Return whether any part of a module saves some results and recomputes the others.

    Examples:
        >>> recomputes_selectively(nn.Linear(1, 1))
        False
    """
    modes = {_MODE.read(part) for part in module.modules()}
    return bool(modes - {"none", "full"})


def hide_hooks_(module: nn.Module) -> None:
    """Hide the operators of a module's hooks from selective recomputation around it.

    FSDP gathers parameters in hooks, with other operators in the second forward pass than in the
    first.

    Args:
        module: A part of a block, with hooks.

    Effects:
        Replaces its present forward hooks and pre-hooks.

    Examples:
        >>> hide_hooks_(nn.Linear(1, 1))
    """
    for hooks in (module._forward_pre_hooks, module._forward_hooks):  # noqa: SLF001 (no public way)
        hooks.update({key: partial(_unseen, hook) for key, hook in hooks.items()})


def _unseen(hook: Callable[..., Any], *args: Any) -> Any:
    with unseen():
        return hook(*args)


@contextmanager
def unseen() -> Iterator[None]:
    """Hide the operators of a `with` block from selective recomputation, so that it saves none.

    Examples:
        >>> with unseen():
        ...     (torch.ones(1, 2) @ torch.ones(2, 1)).item()
        2.0
    """
    with ExitStack() as stack:
        # Several may be nested: a trial inside of a recomputed block.
        while isinstance(_get_current_dispatch_mode(), _SELECTIVE):
            stack.enter_context(_pop_mode_temporarily())
        yield


def is_trial() -> bool:
    """Return whether a forward pass is a trial of `recompute`, whose results are not used.

    Examples:
        >>> is_trial()
        False
    """
    return isinstance(_get_current_dispatch_mode(), Priced)
