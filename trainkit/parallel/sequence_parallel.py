"""Sequence parallelism: each rank holds a shard of every document; only attention communicates.

Attention is the only part of a model that sees other tokens, so it is all that changes: `ring` and
`ulysses` of `trainkit.attention` replace its attention functions. `batch.shard_sequence` shards the
tokens. FSDP sums the gradients over the axes that `fold_sp` names, and `grads.sync_sp_grads` over
the others.
"""

from __future__ import annotations

from functools import partial

from torch import nn

from trainkit.attention.attend_delta import attend_delta, ulysses_delta
from trainkit.attention.ring import ring
from trainkit.attention.ring_delta import ring_causal_conv, ring_gated_delta
from trainkit.attention.ulysses import ulysses
from trainkit.attention.untraced import untraced
from trainkit.models.experts import check_whole_documents
from trainkit.parallel.check_modules import refuse_max_norm
from trainkit.parallel.transforms import Transform
from trainkit.types import ConfigError, ParallelState


def sequence_parallel() -> Transform:
    """Return the transform that distributes attention over `ps.ring` and `ps.ulysses`.

    Every submodule with an `Attend` in its attribute `attend`, such as the decoder's attention,
    gets one for the layout: Ulysses around the ring, or around its own function if the ring has
    size 1. So does one with an `AttendDelta` in its attribute `attend_delta`. The transform changes
    nothing if both axes have size 1.

    Returns:
        A transform for `build_stages`. Parameters keep their names.

    Raises:
        ConfigError: When applied, if an axis has a size above 1: no submodule has an `attend`, or
            an embedding has a `max_norm`.

    Examples:
        >>> from trainkit.mesh import solo_parallel
        >>> model = nn.Linear(1, 1)
        >>> sequence_parallel()(model, solo_parallel()) is model
        True
    """

    def apply(module: nn.Module, ps: ParallelState) -> nn.Module:
        if ps.ring.count == ps.ulysses.count == 1:
            return module
        check_whole_documents(module, "sequence_parallel")
        refuse_max_norm(module, by="sequence_parallel")
        # vars: an attribute of the instance, not a method or a submodule of that name
        units = [vars(unit) for unit in module.modules()]
        attending = [unit for unit in units if callable(unit.get("attend"))]
        recurrent = [unit for unit in units if callable(unit.get("attend_delta"))]
        if not attending and not recurrent:
            raise ConfigError(
                f"sequence_parallel: the layout has ring = {ps.ring.count} and ulysses = "
                f"{ps.ulysses.count}, but no submodule of {type(module).__name__} has an attribute "
                "'attend'; keep the model's attention function there, or set both to 1",
                where="ring, ulysses",
                got=0,
                want="a submodule with an attribute 'attend'",
            )
        for unit in attending:
            # The ring has kernels of its own; Ulysses takes that of the model.
            inner = unit["attend"] if ps.ring.count == 1 else ring(ps.ring)
            unit["attend"] = ulysses(inner, ps.ulysses)
        for unit in recurrent:
            parts = {"conv": ring_causal_conv(ps.ring), "delta": ring_gated_delta(ps.ring)}
            inner = unit["attend_delta"] if ps.ring.count == 1 else partial(attend_delta, **parts)
            unit["attend_delta"] = untraced(ulysses_delta(inner, ps.ulysses))
        return module

    return Transform(apply, kind="sequence", axes=("ring", "ulysses"))
