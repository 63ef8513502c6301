"""Activation recomputation: keep less in forward, and compute it again in backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib import import_module
from types import MethodType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode_temporarily
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from trainkit.parallel.naming import blocks_of
from trainkit.parallel.transforms import Transform
from trainkit.types import ParallelState, among

_MODE = "_trainkit_recompute"
_SELECTIVE = tuple(map(type, create_selective_checkpoint_contexts([])))


_PRODUCTS = ("mm", "addmm", "_grouped_mm")  # not bmm: scores of attention that is written out
_ATTENTION = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
    "_flash_attention_forward",
)


def kept_operators(device: torch.device) -> frozenset[Any]:
    """Return the operators whose results selective recomputation keeps, since they cost most.

    They are products with matrices, attention by every kernel of `trainkit.attention` that is one
    operator, and exchanges of tokens between ranks. Attention that is written out (for windows and
    soft caps on a CPU, say) is computed again, and so is `flex`: the former's scores are many times
    what it is given. A name that torch does not know is an error: nobody would see that nothing is
    kept.

    Args:
        device: Where the model runs; the kernel for packed documents is on CUDA alone.

    Raises:
        AttributeError: This torch has no such operator.

    Examples:
        >>> torch.ops.aten.mm.default in kept_operators(torch.device("cpu"))
        True
    """
    packets = [getattr(torch.ops.aten, name) for name in (*_PRODUCTS, *_ATTENTION)]
    if dist.is_available():
        sent = torch.ops._c10d_functional  # noqa: SLF001 (what exchange_rows calls)
        packets += [sent.all_to_all_single]
    if device.type == "cuda":
        # Registers the operator; not imported above, for it imports torch._dynamo (1.1 s, 2.13).
        import_module("torch.nn.attention.varlen")
        packets.append(torch.ops.torch_attn._varlen_attn)  # noqa: SLF001 (what varlen_attn calls)
    return frozenset(getattr(packet, name) for packet in packets for name in packet.overloads())


def _keep(
    kept: frozenset[Any], _context: Any, op: Any, *_args: Any, **_kwargs: Any
) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in kept else CheckpointPolicy.PREFER_RECOMPUTE


def recompute(
    mode: Literal["none", "selective", "full"] = "full",
    *,
    blocks: str = "layers.*",
    preserve_rng_state: bool = True,
) -> Transform:
    """Return the transform that recomputes the activations of each block in the backward pass.

    Args:
        mode: "full" keeps the input of a block alone; "selective" keeps the results of products
            with matrices, of attention and of exchanges with experts too; "none" changes nothing.
        blocks: The name pattern of the blocks.
        preserve_rng_state: Restore torch's generators for the second forward pass. A foreign
            module's own dropout needs it. Models whose randomness is a function of a counter, as
            ours, should not pay for it: pass False.

    Returns:
        A transform for `build_stages`. It replaces `forward` on each block and renames nothing.

    Raises:
        ValueError: The mode is unknown, or (when applied) `blocks` matches nothing.

    References:
        Chen et al., "Training deep nets with sublinear memory cost" (2016); Korthikanti et al.,
        "Reducing activation recomputation in large transformer models" (2022).

    Examples:
        >>> recompute("selective").kind
        'recompute'
    """
    among(("none", "selective", "full"), "recompute", mode=mode)

    def apply(module: nn.Module, ps: ParallelState) -> nn.Module:
        if mode == "none":
            return module
        units = blocks_of(module, blocks, needed_by="recompute")
        options: dict[str, Any] = {}
        if mode == "selective":
            keep = partial(_keep, kept_operators(ps.device))
            options["context_fn"] = partial(create_selective_checkpoint_contexts, keep)
        for unit in units:
            # A bound method, which deepcopy binds to the copy; a closure would run the original.
            bound: Any = unit.forward
            forward = _recomputed(bound.__func__, preserve_rng_state, options)
            unit.forward = MethodType(forward, unit)
            setattr(unit, _MODE, mode)
        return module

    return Transform(apply, kind="recompute")


def recomputes_selectively(module: nn.Module) -> bool:
    """Say whether any part of a module keeps some results and computes others again.

    Examples:
        >>> recomputes_selectively(nn.Linear(1, 1))
        False
    """
    return any(getattr(part, _MODE, None) == "selective" for part in module.modules())


def hide_hooks_(module: nn.Module) -> None:
    """Hide what a module's hooks compute from selective recomputation around it.

    FSDP gathers in them, and does so otherwise in the second forward pass than in the first.

    Args:
        module: A part of a block, with hooks.

    Effects:
        Takes the place of the forward hooks and pre-hooks that it has now.

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
    """Hide what a `with` block computes from selective recomputation around it, which keeps none.

    Examples:
        >>> with unseen():
        ...     (torch.ones(1, 2) @ torch.ones(2, 1)).item()
        2.0
    """
    with ExitStack() as stack:
        while isinstance(_get_current_dispatch_mode(), _SELECTIVE):
            stack.enter_context(_pop_mode_temporarily())
        yield


def _recomputed(forward: Callable[..., Any], preserve: bool, options: dict[str, Any]) -> Any:
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(self, *args, **kwargs)
        return checkpoint(
            forward,
            self,
            *args,
            use_reentrant=False,
            preserve_rng_state=preserve,
            **options,
            **kwargs,
        )

    return call
