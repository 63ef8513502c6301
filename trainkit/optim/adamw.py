"""AdamW: torch's fused kernel, also for sharded parameters."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.optim.groups import check_numbers
from trainkit.optim.storage import Moments, Rounding
from trainkit.parallel.grad_reduction import check_dense, get_local
from trainkit.parallel.parameters import PlacedAlike, redistribute_like


class AdamW(torch.optim.AdamW):
    """Torch's AdamW, whose fused kernel runs on the local shards of sharded parameters.

    AdamW is elementwise, so the shards can be stepped without DTensor, whose dispatch takes a
    second for 200 parameters on a new mesh, and 8 ms in every later step. The state is sharded.

    Examples:
        >>> type(adamw([nn.Parameter(torch.ones(1))], lr=0.1)).__mro__[1] is torch.optim.AdamW
        True
    """

    def _init_group(self, group: Any, *lists: Any, **named: Any) -> Any:
        is_new = any(p.grad is not None and p not in self.state for p in group["params"])
        try:
            # DTensor would make the zeros of new state by its slow dispatch.
            with PlacedAlike() if is_new else nullcontext():
                has_complex = super()._init_group(group, *lists, **named)
        except RuntimeError:
            check_dense(group["params"], [group])  # torch's message names no parameter
            raise
        if group["fused"]:
            # torch passes these lists to its kernel afterwards, so they are changed in place.
            params, grads = lists[:2]
            grads[:] = [redistribute_like(p, grad) for p, grad in zip(params, grads, strict=True)]
            for tensors in (*lists, *named.values()):
                tensors[:] = [get_local(x) for x in tensors]
            # The kernel ignores strides: element i of each tensor is the i-th in memory.
            grads[:] = [match_strides(p, g) for p, g in zip(params, grads, strict=True)]
        return has_complex

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a `state_dict`, with the strides of the parameters.

        Effects:
            Replaces the state and the options of the groups.
        """
        super().load_state_dict(state_dict)
        for p, state in self.state.items():
            for name, x in state.items():
                if x.shape == p.shape and not hasattr(x, "placements"):
                    state[name] = match_strides(p, x)


def match_strides(p: Tensor, x: Tensor) -> Tensor:
    """Return a tensor with the strides of a parameter.

    Args:
        p: A parameter without gaps in its memory.
        x: A tensor of the same shape; copied unless its strides match already.

    Examples:
        >>> p = torch.ones(2, 3)
        >>> match_strides(p, torch.ones(3, 2).t()).stride()
        (3, 1)
    """
    if (p.is_contiguous() and x.is_contiguous()) or x.stride() == p.stride():
        return x
    return torch.empty_like(p, dtype=x.dtype, requires_grad=False).copy_(x)


def _is_dense(p: Tensor) -> bool:
    """Return whether a parameter's memory has no gaps."""
    # torch's fused kernel would write to the gaps.
    local = get_local(p)
    return (
        local.is_contiguous() or torch.empty_like(local, device="meta").stride() == local.stride()
    )


def adamw(
    params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    cautious: bool = False,
    moments: Moments = "fp32",
    rounding: Rounding = "nearest",
    seed: int = 0,
    fused: bool = True,
) -> torch.optim.Optimizer:
    """Return AdamW (Loshchilov and Hutter, 2019): torch's fused one where it supports the options.

    The fused step is one kernel for all parameters, on CPUs too (8 ms instead of 56 for 4 million
    parameters), plain or sharded (FSDP2). It can be skipped on the device (`found_inf`), without a
    host sync.

    Args:
        params: Parameters, or groups of them as `decay_groups` returns.
        lr: The initial learning rate; `clip_and_step` sets it in every step.
        betas: The decay rates of the two moments.
        eps: Added to the root of the second moment.
        weight_decay: The decay of groups that set none; a parameter shrinks by lr * weight_decay
            per step.
        cautious: Whether decay is skipped where it opposes the update (Chen et al., 2025).
        moments: The format of moments, "fp32", "bf16" or "8bit"; see `storage.Moments`. The
            default is fp32 for bf16 parameters as well.
        rounding: The rounding of bf16 parameters, "nearest", "stochastic" or "kahan"; see
            `storage.Rounding`.
        seed: The seed of stochastic rounding, which also depends on the parameter's name and the
            step.
        fused: Whether to use the fused kernel, otherwise torch's default. Groups with both plain
            and sharded parameters always use the default, since the kernel takes only one kind. So
            do parameters with gaps in their memory, such as slices of another tensor.

    Raises:
        ValueError: There is no parameter, or a number is out of range.

    Examples:
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
        >>> optimizer = adamw([weight], lr=0.1)
        >>> weight.square().sum().backward()
        >>> optimizer.step()
        >>> weight.detach()
        tensor([ 0.9000, -1.9000])
    """
    members: list[Any] = list(params)
    if not members:
        raise ValueError("adamw: at least one parameter is needed, got none")
    groups = []
    for group in members if isinstance(members[0], dict) else [{"params": members}]:
        check_numbers(
            "adamw", {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay} | group
        )
        # Like torch, a group may name a single tensor.
        is_single = isinstance(group["params"], torch.Tensor)
        groups.append(group | {"params": [group["params"]] if is_single else [*group["params"]]})
    is_low_precision = any(p.dtype.itemsize < 4 for group in groups for p in group["params"])
    if cautious or is_low_precision or moments != "fp32" or rounding != "nearest":
        from trainkit.optim.rules import LowPrecisionAdamW  # noqa: PLC0415 -- it needs numba

        return LowPrecisionAdamW(
            groups,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            cautious=cautious,
            moments=moments,
            rounding=rounding,
            seed=seed,
        )
    can_fuse = all(
        len({hasattr(p, "placements") for p in group["params"]}) < 2
        and all(_is_dense(p) for p in group["params"])
        for group in groups
    )
    return AdamW(
        groups, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=fused and can_fuse
    )
