"""AdamW with this library's defaults."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.optim.groups import check_numbers
from trainkit.optim.storage import Moments, Rounding
from trainkit.parallel.grad_reduction import check_dense, local_of
from trainkit.parallel.parameters import PlacedAlike, placed_as


class AdamW(torch.optim.AdamW):
    """Torch's AdamW, whose fused kernel is given what this rank holds of sharded parameters.

    Every element is stepped alone, so that DTensor has nothing to add. To find that out takes it a
    second for 200 parameters on a new mesh, and 8 ms in every later step. The state stays sharded.

    Examples:
        >>> type(adamw([nn.Parameter(torch.ones(1))], lr=0.1)).__mro__[1] is torch.optim.AdamW
        True
    """

    def _init_group(self, group: Any, *lists: Any, **named: Any) -> Any:
        is_new = any(p.grad is not None and p not in self.state for p in group["params"])
        try:
            with PlacedAlike() if is_new else nullcontext():
                has_complex = super()._init_group(group, *lists, **named)
        except RuntimeError:
            check_dense(group["params"], [group])  # torch's words name no parameter
            raise
        if group["fused"]:
            params, grads = lists[:2]
            grads[:] = [placed_as(p, grad) for p, grad in zip(params, grads, strict=True)]
            for tensors in (*lists, *named.values()):
                tensors[:] = [local_of(x) for x in tensors]
            # The kernel goes through the memory of all of them at once, whatever their strides.
            grads[:] = [in_memory_order_of(p, g) for p, g in zip(params, grads, strict=True)]
        return has_complex

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave, laid out in memory as the parameters are.

        Effects:
            Replaces the state and the options of the groups.
        """
        super().load_state_dict(state_dict)
        for p, state in self.state.items():
            for name, x in state.items():
                if x.shape == p.shape and not hasattr(x, "placements"):
                    state[name] = in_memory_order_of(p, x)


def in_memory_order_of(p: Tensor, x: Tensor) -> Tensor:
    """Return a tensor whose elements follow each other in memory as a parameter's do.

    Args:
        p: A parameter without gaps in its memory.
        x: A tensor of its shape: returned as it is where its strides will do, else copied.

    Examples:
        >>> p = torch.ones(2, 3)
        >>> in_memory_order_of(p, torch.ones(3, 2).t()).stride()
        (3, 1)
    """
    if (p.is_contiguous() and x.is_contiguous()) or x.stride() == p.stride():
        return x
    return torch.empty_like(p, dtype=x.dtype, requires_grad=False).copy_(x)


def _is_dense(p: Tensor) -> bool:
    """Say whether a parameter's memory has no gaps, which torch's fused kernel would write to."""
    local = local_of(p)
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
    """Return AdamW (Loshchilov and Hutter 2019): torch's, fused, where it can do what is asked.

    Fused means one kernel for all parameters, on CPU too (8 ms instead of 56 for 4 million
    parameters), plain or sharded (FSDP2), and a step that can be skipped on the device, without
    asking the host (`found_inf`).

    Args:
        params: parameters, or groups of them as `decay_groups` returns.
        lr: the rate until somebody sets another, as `clip_and_step` does in every step.
        betas: decay rates of the two moments.
        eps: added to the root of the second moment.
        weight_decay: for groups that do not say; the parameter shrinks by lr * weight_decay per
            step.
        cautious: decay only where it does not work against the update (Chen et al. 2025).
        moments: how they are kept: "fp32", "bf16", or "8bit"; see `storage.Moments`. Those of
            parameters in bf16 too are in fp32 unless somebody asks for less.
        rounding: what becomes of small steps of parameters in bf16: "nearest", "stochastic" or
            "kahan"; see `storage.Rounding`.
        seed: what stochastic rounding follows from, beside the parameter's name and the step.
        fused: one kernel, or torch's default. A group of plain and sharded parameters takes the
            default in any case: torch's kernel takes only one kind. So does a parameter with gaps
            in its memory, as a slice of another tensor has.

    Raises:
        ValueError: if there is no parameter or a number is out of range.

    Examples:
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
        >>> optimizer = adamw([weight], lr=0.1)
        >>> weight.square().sum().backward()
        >>> optimizer.step()
        >>> weight.detach()
        tensor([ 0.9000, -1.9000])
    """
    listed: list[Any] = list(params)
    if not listed:
        raise ValueError("adamw: at least one parameter is needed, got none")
    groups = listed if isinstance(listed[0], dict) else [{"params": listed}]
    numbers = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
    for group in groups:
        check_numbers("adamw", numbers | group)
    groups = [{**group, "params": _listed(group["params"])} for group in groups]
    narrow = any(p.dtype.itemsize < 4 for group in groups for p in group["params"])
    if cautious or narrow or moments != "fp32" or rounding != "nearest":
        from trainkit.optim.rules import LowPrecisionAdamW  # noqa: PLC0415 -- it needs numba

        how = {"cautious": cautious, "moments": moments, "rounding": rounding, "seed": seed}
        return LowPrecisionAdamW(
            groups, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, **how
        )
    one_kind = all(len({hasattr(p, "placements") for p in g["params"]}) < 2 for g in groups)
    can_fuse = one_kind and all(_is_dense(p) for group in groups for p in group["params"])
    return AdamW(
        groups, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=fused and can_fuse
    )


def _listed(params: Any) -> list[Any]:
    return [params] if isinstance(params, torch.Tensor) else list(params)
