"""Transforms of a module, each for some axes of a layout; a plan is a list of them."""

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
"""The order of the kinds of transforms in a plan: each changes the module that the earlier ones
made. Adapters come before the transforms that shard their matrices.
"""

OF_THE_WHOLE = ("quantized", "rounded", "adapter")
"""The kinds that apply to the whole model, before it is split into pipeline stages."""

# `build_stages` itself takes care of pp.
_AXES = [name for name in Layout().degrees if name != "pp"]


@attrs.frozen(eq=False)
class Transform:
    """A `ModelTransform` with its kind, for the order of a plan, and the axes that it handles.

    `device` is the device on which it needs parameters to be made, if not the rank's. Tied tensors
    must stay tied: two copies of a weight would diverge in training.
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
        # By name: the transform may replace every parameter.
        ties = find_ties(module)
        transformed = self.apply(module, cast("ParallelState", ps))
        _check_ties(transformed, ties, self.kind)
        return transformed


def _check_ties(module: nn.Module, ties: Sequence[tuple[str, ...]], kind: str) -> None:
    """Raise ConfigError if a transform has untied one of the names of a tensor."""
    now = [set(names) for names in find_ties(module)]
    for names in ties:
        # Parameters may have been renamed: one old name in a tie of as many names is enough.
        if any(len(names) <= len(tie) and tie & {*names} for tie in now):
            continue
        raise ConfigError(
            f"{kind}: {' and '.join(map(repr, names))} are one tensor, which modules share; it "
            "would come apart and no longer be trained as one. Let one block hold all that share "
            "it (see `blocks`), or none of them",
            where=names[0],
            got=names,
        )


def check_plan(plan: Sequence[ModelTransform], ps: ParallelState) -> None:
    """Raise ConfigError for a plan in a wrong order, or without a transform for an axis.

    Args:
        plan: Transforms. A plain function has no kind: it may have any position, and handles no
            axis.
        ps: The layout; `build_stages` itself handles pp.

    Raises:
        ConfigError: It names the two transforms, or the axis.

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
        # A user's own kind may have any position.
        if first not in ORDER or second not in ORDER or ORDER.index(first) <= ORDER.index(second):
            continue
        raise ConfigError(
            f"build_stages: in the plan, {second} must come before {first} (the order is "
            f"{', '.join(ORDER)})",
            where="plan",
            got=kinds,
        )
    # An axis that nobody handles would train another model on each of its ranks.
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
    if ps.fsdp.count > 1 and "dp_shard" not in covered:  # dp_shard is 1: fold_sp adds the ranks
        raise ConfigError(
            f"build_stages: fold_sp leaves the gradients of {ps.fsdp.count} sequence-parallel "
            f"ranks to fsdp(), which is not in the plan ({', '.join(kinds) or 'empty'}); add "
            "fsdp(), or set fold_sp to 'none' and call sync_sp_grads",
            where="fold_sp",
            got=ps.fsdp.count,
            want="fsdp() in the plan, or fold_sp = 'none'",
        )
