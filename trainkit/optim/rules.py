"""Optimizers by their rules: AdamW, Lion, signSGD, momentum, schedule-free AdamW.

All take the options of decay and of storage beside their own: see `ElementwiseOptimizer`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from torch import nn

from trainkit.optim.elementwise import ElementwiseOptimizer, Numbers, decayed, root, sign

Params = Iterable[nn.Parameter] | Iterable[dict[str, Any]]


def _decays(group: Mapping[str, Any]) -> tuple[float, float, float]:
    """Return lr, the weight decay, and the decay where it opposes the update (0 if cautious)."""
    decay = group["weight_decay"]
    return group["lr"], decay, 0.0 if group["cautious"] else decay


def _one_more(counts: Mapping[str, Any]) -> dict[str, Any]:
    """Increment the counters: the rule reads none, stochastic rounding may."""
    return {name: count + 1 for name, count in counts.items()}


def adamw_rule(p: Any, g: Any, m: Any, v: Any, c: Any) -> Any:
    """Return the parameter and both moments after a step."""
    lr, decay, against, new, new_sq, scale, scale_sq, eps = c
    m = m + (g - m) * new
    v = v + (g * g - v) * new_sq
    u = m * scale / (root(v) * scale_sq + eps)
    return p - lr * decayed(u, p, decay, against), m, v


class LowPrecisionAdamW(ElementwiseOptimizer):
    """AdamW (Loshchilov and Hutter 2019), whose moments and parameters may be in few bits.

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
    def numbers(group: Mapping[str, Any], counts: Mapping[str, Any]) -> Numbers:
        """Return the rule's coefficients and the new counters."""
        step, (first, second) = counts["step"] + 1, group["betas"]
        rates = (1 - first, 1 - second, 1 / (1 - first**step), (1 - second**step) ** -0.5)
        return (*_decays(group), *rates, group["eps"]), {"step": step}


def lion_rule(p: Any, g: Any, m: Any, c: Any) -> Any:
    """Return the parameter and the moment after a step."""
    lr, decay, against, mixed, new = c
    u = sign(m + (g - m) * mixed)
    return p - lr * decayed(u, p, decay, against), m + (g - m) * new


class Lion(ElementwiseOptimizer):
    """Lion: the sign of a mixture of gradient and moment.

    References:
        Chen et al., "Symbolic discovery of optimization algorithms" (2023). Start from a
        tenth of AdamW's learning rate and ten times its weight decay.

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
    def numbers(group: Mapping[str, Any], counts: Mapping[str, Any]) -> Numbers:
        """Return the rule's coefficients and the new counters."""
        first, second = group["betas"]
        return (*_decays(group), 1 - first, 1 - second), _one_more(counts)


def sign_rule(p: Any, g: Any, c: Any) -> Any:
    """Return the parameter after a step."""
    lr, decay, against = c
    return p - lr * decayed(sign(g), p, decay, against)


class SignSGD(ElementwiseOptimizer):
    """The sign of the gradient, and nothing remembered.

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
    def numbers(group: Mapping[str, Any], counts: Mapping[str, Any]) -> Numbers:
        """Return the rule's coefficients and the new counters."""
        return _decays(group), _one_more(counts)


def momentum_rule(p: Any, g: Any, m: Any, c: Any) -> Any:
    """Return the parameter and the buffer after a step."""
    lr, decay, against, momentum = c
    m = m * momentum + g
    return p - lr * decayed(m, p, decay, against), m


class Momentum(ElementwiseOptimizer):
    """Gradient descent with momentum: buffer = momentum * buffer + gradient.

    As torch's SGD, but with decoupled weight decay.

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
    def numbers(group: Mapping[str, Any], counts: Mapping[str, Any]) -> Numbers:
        """Return the rule's coefficients and the new counters."""
        return (*_decays(group), group["momentum"]), _one_more(counts)


def schedule_free_rule(p: Any, g: Any, x: Any, v: Any, c: Any) -> Any:
    """Return y, x and the second moment after a step."""
    lr, decay, against, new_sq, scale_sq, eps, beta, ahead, share = c
    v = v + (g * g - v) * new_sq
    u = decayed(g / (root(v) * scale_sq + eps), p, decay, against)
    z = p + (p - x) * ahead - lr * u
    x = x + (z - x) * share
    return z + (x - z) * beta, x, v


class ScheduleFree(ElementwiseOptimizer):
    """Schedule-free AdamW: a constant learning rate, evaluated at an average of the iterates.

    Parameters hold y, where gradients are taken; z takes the steps; what is evaluated and exported
    is x, a mean of all z so far, with weights of the largest rate so far, squared. x is kept, as
    "mean", which `use_averaged_parameters` puts in place; z follows from y = (1 - beta) z + beta x,
    which asks for parameters in fp32. Give it a constant rate after warm-up.

    References:
        Defazio et al., "The road less scheduled" (2024). The decay is taken at y.

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
        """Take parameters and options; see `ElementwiseOptimizer`.

        Raises:
            ValueError: Also where the first of the betas is 0, or a parameter is in fewer bits than
                fp32.
        """
        super().__init__(params, **options)
        if not all(group["betas"][0] > 0 for group in self.param_groups):
            raise ValueError("ScheduleFree: betas[0] must be above 0")
        if any(p.dtype.itemsize < 4 for group in self.param_groups for p in group["params"]):
            raise ValueError("ScheduleFree: parameters must be in fp32, got fewer bits")

    @staticmethod
    def numbers(group: Mapping[str, Any], counts: Mapping[str, Any]) -> Numbers:
        """Return the rule's numbers; the steps, the largest rate and the sum of weights so far."""
        step, (beta, second) = counts["step"] + 1, group["betas"]
        rate = counts["rate"]
        rate = rate.clamp(min=group["lr"]) if hasattr(rate, "clamp") else max(rate, group["lr"])
        weight = counts["weight"] + rate**2
        share = rate**2 / (weight + (weight == 0))
        numbers = (1 - second, (1 - second**step) ** -0.5, group["eps"])
        numbers += (beta, beta / (1 - beta), share)
        return (*_decays(group), *numbers), {"step": step, "rate": rate, "weight": weight}
