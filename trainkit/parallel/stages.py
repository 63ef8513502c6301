"""From a function that makes a model to this rank's part of it, filled.

The model is made on the meta device, where it has shapes but no memory; a *plan*, a list of
transforms, is applied in order; then each shard is allocated and filled on its own. No rank ever
holds what it does not own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import attrs
import torch
from torch import nn

from trainkit.parallel.naming import box_of, named_parameters_of
from trainkit.types import ConfigError, ModelTransform, ParallelState, Weights

ORDER = ("tensor", "sequence", "expert", "precision", "adapter", "recompute", "compiled", "fsdp")
"""The order in which kinds of transforms must stand in a plan: each sees the module as the earlier
ones left it.
"""

_AXES = ("pp", "dp_replicate", "dp_shard", "ring", "ulysses", "tp")


@attrs.frozen(eq=False)
class Transform:
    """A `ModelTransform` that states its kind, for the order, and the axes it takes care of."""

    apply: ModelTransform
    kind: str = attrs.field(kw_only=True)
    axes: tuple[str, ...] = attrs.field(default=(), kw_only=True)

    def __call__(self, module: nn.Module, ps: ParallelState) -> nn.Module:
        return self.apply(module, ps)


def check_plan(plan: Sequence[ModelTransform], ps: ParallelState) -> None:
    """Refuse a plan in a wrong order, or one that leaves an axis of size above 1 to nobody.

    Args:
        plan: Transforms; a plain function has no kind and may stand anywhere, but takes care of no
            axis.
        ps: The layout.

    Raises:
        ConfigError: Names the two transforms, or the axis.

    Examples:
        >>> from trainkit.mesh import solo_parallel
        >>> from trainkit.parallel import compiled, fsdp
        >>> check_plan([compiled(), fsdp()], solo_parallel())
        >>> check_plan([fsdp(), compiled()], solo_parallel())
        Traceback (most recent call last):
        trainkit.types.ConfigError: build_stages: in the plan, compiled must come before fsdp ...
    """
    kinds = [step.kind for step in plan if isinstance(step, Transform)]
    for first, second in pairwise(kinds):
        if first not in ORDER or second not in ORDER or ORDER.index(first) <= ORDER.index(second):
            continue
        raise ConfigError(
            f"build_stages: in the plan, {second} must come before {first} (the order is "
            f"{', '.join(ORDER)})",
            where="plan",
            got=kinds,
        )
    covered = {axis for step in plan if isinstance(step, Transform) for axis in step.axes}
    for name in _AXES:
        count = getattr(ps, name).count
        if count > 1 and name not in covered:
            raise ConfigError(
                f"build_stages: the layout has {name} = {count}, but no transform of the plan "
                f"({', '.join(kinds) or 'empty'}) takes care of it; set {name} to 1",
                where=name,
                got=count,
                want=f"a Transform with {name!r} in its axes, or {name} = 1",
            )


def materialize_(module: nn.Module, weights: Weights, device: torch.device | str) -> None:
    """Allocate a module that is on the meta device, and fill this rank's part of every parameter.

    Args:
        module: A module whose parameters are all on the meta device, sharded or not, without
            buffers.
        weights: Gives the values of any box of any parameter, by its name in the whole model.
        device: Where the parameters go.

    Raises:
        ValueError: A parameter is not on the meta device, there is a buffer, or `weights` gives a
            wrong shape.

    Effects:
        Allocates and writes the parameters of `module`.

    Examples:
        >>> with torch.device("meta"):
        ...     model = nn.Linear(2, 2)
        >>> materialize_(model, lambda name, shape, offset: torch.ones(tuple(shape)), "cpu")
        >>> model.bias
        Parameter containing:
        tensor([1., 1.], requires_grad=True)
    """
    real = [name for name, p in named_parameters_of([module]).items() if not p.is_meta]
    buffers = [name for name, _ in module.named_buffers()]
    if real or buffers:
        name, found = (real[0], "not on the meta device") if real else (buffers[0], "a buffer")
        raise ValueError(
            f"build_stages: {name!r} is {found}; make_model must build every parameter under "
            "torch.device('meta') and compute other tensors in its forward pass"
        )
    module.to_empty(device=device)
    with torch.no_grad():
        for name, parameter in named_parameters_of([module]).items():
            box = box_of(parameter)
            if box.local.numel() == 0:
                continue
            values = weights(name, tuple(box.local.shape), box.offset)
            if values.shape != box.local.shape:
                raise ValueError(
                    f"build_stages: weights gave shape {tuple(values.shape)} for {name!r}, where "
                    f"{tuple(box.local.shape)} at offset {box.offset} was asked"
                )
            box.local.copy_(values)


def build_stages(
    make_model: Callable[[], nn.Module],
    ps: ParallelState,
    plan: Sequence[ModelTransform],
    *,
    weights: Weights,
) -> list[nn.Module]:
    """Return this rank's part of a model, transformed by a plan and filled with its weights.

    Args:
        make_model: Makes the whole model; called under the meta device, so it costs no memory.
        ps: The layout.
        plan: Transforms in the order of `ORDER`.
        weights: The initial values, a function of a parameter's name and of the box asked for.

    Returns:
        The stages of this rank, one module without pipeline parallelism.

    Raises:
        ConfigError: The plan's order is wrong, or an axis of size above 1 has nobody to take care
            of it.
        ValueError: See `materialize_`.

    Effects:
        Allocates parameters on `ps.device`. Transforms may open no groups: all are in `ps`.

    Examples:
        >>> from trainkit.mesh import solo_parallel
        >>> ones = lambda name, shape, offset: torch.ones(tuple(shape))
        >>> (model,) = build_stages(lambda: nn.Linear(2, 1), solo_parallel(), [], weights=ones)
        >>> model(torch.ones(1, 2)).item()
        3.0
    """
    check_plan(plan, ps)
    with torch.device("meta"):
        module = make_model()
    for transform in plan:
        module = transform(module, ps)
    materialize_(module, weights, ps.device)
    return [module]
