"""Elementwise optimizers by their update rules: AdamW, Lion, signSGD, momentum, schedule-free.

Besides their own options all have those of decay and of storage; see `ElementwiseOptimizer`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from torch import nn

from trainkit.optim.elementwise import Coefficients, ElementwiseOptimizer, decayed, root, sign

Params = Iterable[nn.Parameter] | Iterable[dict[str, Any]]


def _decays(group: Mapping[str, Any]) -> tuple[float, float, float]:
    """Return lr, the weight decay, and the decay where it opposes the update (0 if cautious)."""
    decay = group["weight_decay"]
    return group["lr"], decay, 0.0 if group["cautious"] else decay


def _one_more(counts: Mapping[str, Any]) -> dict[str, Any]:
    """Increment the counters; the rule reads none of them, but stochastic rounding may."""
    return {name: count + 1 for name, count in counts.items()}


def adamw_rule(p: Any, g: Any, m: Any, v: Any, c: Any) -> Any:
    """Return the parameter and both moments after a step."""
    # `scale` = 1 / (1 - beta1^t) and `scale_sq` = (1 - beta2^t)^-0.5 correct the bias. Constants
    # come in c: a literal such as 1.0 would make numba compute in 64 bits.
    lr, decay, against, new, new_sq, scale, scale_sq, eps = c
    m = m + (g - m) * new
    v = v + (g * g - v) * new_sq
    u = m * scale / (root(v) * scale_sq + eps)
    return p - lr * decayed(u, p, decay, against), m, v


class LowPrecisionAdamW(ElementwiseOptimizer):
    """AdamW (Loshchilov and Hutter, 2019) with low-precision moments or parameters.

    Examples:
        >>> import torch
        >>> weight = nn.Parameter(torch.tensor([1.0, -2.0]))
        >>> optimizer = LowPrecisionAdamW([weight], lr=0.1, moments="bf16")
        >>> weight.square().sum().backward()
        >>> optimizer.step()
        >>> weight.detach()
        tensor([ 0.9000, -1.9000])
    """

    rule = staticmethod(adamw_rule)
    moments = ("exp_avg", "exp_avg_sq")
    options: ClassVar = {"betas": (0.9, 0.95), "eps": 1e-8}

    @staticmethod
    def coefficients(group: Mapping[str, Any], counts: Mapping[str, Any]) -> Coefficients:
        """Return the rule's coefficients and the new counters."""
        step = counts["step"] + 1
        first, second = group["betas"]
        scale = 1 / (1 - first**step)
        scale_sq = (1 - second**step) ** -0.5
        rates = (1 - first, 1 - second, scale, scale_sq)
        return (*_decays(group), *rates, group["eps"]), {"step": step}


def lion_rule(p: Any, g: Any, m: Any, c: Any) -> Any:
    """Return the parameter and the moment after a step."""
    lr, decay, against, mixed, new = c
    # The sign of beta1 m + (1 - beta1) g, while the moment itself decays by beta2.
    u = sign(m + (g - m) * mixed)
    return p - lr * decayed(u, p, decay, against), m + (g - m) * new


class Lion(ElementwiseOptimizer):
    """Lion: the sign of an interpolation between the moment and the gradient.

    Start from a tenth of AdamW's learning rate and ten times its weight decay.

    References:
        Chen et al., "Symbolic discovery of optimization algorithms" (2023).

    Examples:
        >>> import torch
        >>> weight = nn.Parameter(torch.tensor([1.0, -2.0]))
        >>> optimizer = Lion([weight], lr=0.1)
        >>> weight.square().sum().backward()
        >>> optimizer.step()
        >>> weight.detach()
        tensor([ 0.9000, -1.9000])
    """

    rule = staticmethod(lion_rule)
    moments = ("exp_avg",)
    counts = ()
    options: ClassVar = {"betas": (0.9, 0.99)}

    @staticmethod
    def coefficients(group: Mapping[str, Any], counts: Mapping[str, Any]) -> Coefficients:
        """Return the rule's coefficients and the new counters."""
        first, second = group["betas"]
        return (*_decays(group), 1 - first, 1 - second), _one_more(counts)


def sign_rule(p: Any, g: Any, c: Any) -> Any:
    """Return the parameter after a step."""
    lr, decay, against = c
    return p - lr * decayed(sign(g), p, decay, against)


class SignSGD(ElementwiseOptimizer):
    """signSGD: the sign of the gradient, without optimizer state.

    References:
        Bernstein et al., "signSGD: compressed optimisation for non-convex problems" (2018).

    Examples:
        >>> import torch
        >>> weight = nn.Parameter(torch.tensor([1.0, -2.0]))
        >>> optimizer = SignSGD([weight], lr=0.1)
        >>> weight.square().sum().backward()
        >>> optimizer.step()
        >>> weight.detach()
        tensor([ 0.9000, -1.9000])
    """

    rule = staticmethod(sign_rule)
    counts = ()

    @staticmethod
    def coefficients(group: Mapping[str, Any], counts: Mapping[str, Any]) -> Coefficients:
        """Return the rule's coefficients and the new counters."""
        return _decays(group), _one_more(counts)


def momentum_rule(p: Any, g: Any, m: Any, c: Any) -> Any:
    """Return the parameter and the buffer after a step."""
    lr, decay, against, momentum = c
    m = m * momentum + g
    return p - lr * decayed(m, p, decay, against), m


class Momentum(ElementwiseOptimizer):
    """SGD with momentum, buffer = momentum * buffer + gradient, and decoupled weight decay.

    Examples:
        >>> import torch
        >>> weight = nn.Parameter(torch.tensor([1.0, -2.0]))
        >>> optimizer = Momentum([weight], lr=0.1)
        >>> weight.square().sum().backward()
        >>> optimizer.step()
        >>> weight.detach()
        tensor([ 0.8000, -1.6000])
    """

    rule = staticmethod(momentum_rule)
    moments = ("momentum_buffer",)
    counts = ()
    options: ClassVar = {"momentum": 0.9}

    @staticmethod
    def coefficients(group: Mapping[str, Any], counts: Mapping[str, Any]) -> Coefficients:
        """Return the rule's coefficients and the new counters."""
        return (*_decays(group), group["momentum"]), _one_more(counts)


def schedule_free_rule(p: Any, g: Any, x: Any, v: Any, c: Any) -> Any:
    """Return y, x and the second moment after a step."""
    lr, decay, against, new_sq, scale_sq, eps, beta, ahead, share = c
    v = v + (g * g - v) * new_sq
    u = decayed(g / (root(v) * scale_sq + eps), p, decay, against)
    # z is not stored: y = (1 - beta) z + beta x, so z = y + (y - x) beta / (1 - beta).
    z = p + (p - x) * ahead - lr * u
    x = x + (z - x) * share
    # The parameter is y, where the next gradient is taken.
    return z + (x - z) * beta, x, v


class ScheduleFree(ElementwiseOptimizer):
    """Schedule-free AdamW: a constant learning rate, evaluated at an average of the iterates.

    Gradients are taken at y, the parameters; steps are taken at z; and x is evaluated and exported,
    a mean of all z so far, weighted by the square of the largest learning rate so far. x is stored
    as "mean", which `use_averaged_parameters` evaluates; z follows from y = (1 - beta) z + beta x,
    which requires parameters in fp32. Use a constant learning rate after the warmup.

    References:
        Defazio et al., "The road less scheduled" (2024). Weight decay is applied at y.

    Examples:
        >>> import torch
        >>> weight = nn.Parameter(torch.tensor([1.0, -2.0]))
        >>> optimizer = ScheduleFree([weight], lr=0.1)
        >>> weight.square().sum().backward()
        >>> optimizer.step()
        >>> weight.detach()
        tensor([ 0.9000, -1.9000])
    """

    rule = staticmethod(schedule_free_rule)
    moments = ("mean", "exp_avg_sq")
    copies = ("mean",)
    counts = ("step", "rate", "weight")
    options: ClassVar = {"betas": (0.9, 0.95), "eps": 1e-8}

    def __init__(self, params: Params, **options: Any) -> None:
        """Set the options; see `ElementwiseOptimizer`.

        Raises:
            ValueError: Also if the first of the betas is 0, or a parameter is in low precision.
        """
        super().__init__(params, **options)
        if not all(group["betas"][0] > 0 for group in self.param_groups):
            raise ValueError("ScheduleFree: betas[0] must be above 0")
        # z is recovered from y; the error of a rounded y would grow by beta / (1 - beta).
        if any(p.dtype.itemsize < 4 for group in self.param_groups for p in group["params"]):
            raise ValueError("ScheduleFree: parameters must be in fp32, got lower precision")

    @staticmethod
    def coefficients(group: Mapping[str, Any], counts: Mapping[str, Any]) -> Coefficients:
        """Return the rule's coefficients and the new counters: step, largest lr, sum of weights."""
        step = counts["step"] + 1
        beta, second = group["betas"]
        rate = counts["rate"]  # a tensor on a device
        rate = rate.clamp(min=group["lr"]) if hasattr(rate, "clamp") else max(rate, group["lr"])
        weight = counts["weight"] + rate**2
        # 0 / 1 instead of 0 / 0 as long as a warmup has a rate of 0.
        share = rate**2 / (weight + (weight == 0))
        adaptive = (1 - second, (1 - second**step) ** -0.5, group["eps"])
        averaging = (beta, beta / (1 - beta), share)
        new_counts = {"step": step, "rate": rate, "weight": weight}
        return (*_decays(group), *adaptive, *averaging), new_counts
