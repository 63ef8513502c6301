"""torch.compile, block by block: equal blocks share code, and collectives stay outside."""

from __future__ import annotations

from torch import nn

from trainkit.parallel.parameters import find_blocks
from trainkit.parallel.recompute import refuse_by_cost
from trainkit.parallel.transforms import Transform
from trainkit.types import ParallelState


def compile_blocks(*, blocks: str = "layers.*", backend: str = "inductor") -> Transform:
    """Return the transform that compiles each block in place; parameters keep their names.

    Args:
        blocks: The name pattern of the blocks.
        backend: A backend of torch.compile; "aot_eager" needs no C++ compiler.

    Returns:
        A transform for `build_stages`. Compilation happens at the first call.

    Raises:
        ValueError: When applied: `blocks` matches nothing.
        ConfigError: When applied: `recompute` chooses by cost what it saves.

    Examples:
        >>> compile_blocks(backend="aot_eager").kind
        'compiled'
    """

    def apply(module: nn.Module, ps: ParallelState) -> nn.Module:
        del ps
        refuse_by_cost(module, by="compile_blocks")
        for unit in find_blocks(module, blocks, needed_by="compile_blocks"):
            unit.compile(backend=backend)
        return module

    return Transform(apply, kind="compiled")
