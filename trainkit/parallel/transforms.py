"""Transforms: what becomes of a module, and which axes that takes care of; a plan is a list."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import cast

import attrs
from torch import nn

from trainkit.parallel.parameters import find_ties
from trainkit.types import Axis, ConfigError, Layout, ModelTransform, ParallelState

ORDER = (
    *("quantized", "rounded", "adapter", "tensor", "attention", "sequence", "expert", "ddp"),
    *("precision", "recompute", "offload", "compiled", "fsdp"),
)
"""The order in which kinds of transforms must stand in a plan: each sees the module as the earlier
ones left it. What cuts a matrix cuts its adapter with it.
"""

OF_THE_WHOLE = ("quantized", "rounded", "adapter")
"""The kinds that see the whole model, before it is cut into pipeline stages."""

_AXES = [name for name in Layout().degrees if name != "pp"]


@attrs.frozen(eq=False)
class Transform:
    """A `ModelTransform` that states its kind, for the order, and the axes it takes care of.

    `device` is where it wants parameters to be made, if not on the rank's device. What modules
    share stays shared, or the transform is refused: a weight made two of would train apart.
    """

    apply: ModelTransform
    kind: str = attrs.field(kw_only=True)
    axes: tuple[str, ...] = attrs.field(default=(), kw_only=True)
    device: str | None = attrs.field(default=None, kw_only=True)

    def __call__(self, module: nn.Module, ps: ParallelState | Axis) -> nn.Module:
        if isinstance(ps, Axis) and self.kind != "fsdp":
            raise ConfigError(
                f"{self.kind}: it was given the axis {ps.name!r}, and takes a ParallelState, as "
                "tk.parallel_session yields it; of the transforms fsdp() alone takes an Axis",
                where="ps",
                got=ps.name,
                want="a ParallelState",
            )
        ties = find_ties(module)
        made = self.apply(module, cast("ParallelState", ps))
        _check_ties(made, ties, self.kind)
        return made


def _check_ties(module: nn.Module, ties: Sequence[tuple[str, ...]], kind: str) -> None:
    """Refuse what a transform has made of a module if a tie has lost one of its names."""
    now = [set(names) for names in find_ties(module)]
    for names in ties:
        if any(len(names) <= len(tie) and tie & {*names} for tie in now):
            continue
        listed = " and ".join(map(repr, names))
        raise ConfigError(
            f"{kind}: {listed} are one tensor, which modules share; it would come apart "
            "and no longer be trained as one. Let one block hold all that share it (see `blocks`), "
            "or none of them",
            where=names[0],
            got=names,
        )


def check_plan(plan: Sequence[ModelTransform], ps: ParallelState) -> None:
    """Refuse a plan in a wrong order, or one that leaves an axis of size above 1 to nobody.

    Args:
        plan: Transforms; a plain function has no kind and may stand anywhere, but takes care of no
            axis.
        ps: The layout; of its axes `build_stages` itself takes care of pp.

    Raises:
        ConfigError: Names the two transforms, or the axis.

    Examples:
        >>> from trainkit.mesh import solo_parallel
        >>> from trainkit.parallel import compile_blocks, fsdp
        >>> check_plan([compile_blocks(), fsdp()], solo_parallel())
        >>> check_plan([fsdp(), compile_blocks()], solo_parallel())
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
    if ps.fsdp.count > 1 and "dp_shard" not in covered:  # only by fold_sp: dp_shard itself is 1
        raise ConfigError(
            f"build_stages: fold_sp leaves the gradients of {ps.fsdp.count} sequence-parallel "
            f"ranks to fsdp(), which is not in the plan ({', '.join(kinds) or 'empty'}); add "
            "fsdp(), or set fold_sp to 'none' and call sync_sp_grads",
            where="fold_sp",
            got=ps.fsdp.count,
            want="fsdp() in the plan, or fold_sp = 'none'",
        )
