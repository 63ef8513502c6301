"""Merge adapters into their base: permanently, for a `with` block, or repeatedly (ReLoRA)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainkit.noise import make_key, uniform_symmetric
from trainkit.parallel.grad_reduction import find_reducers, get_local, reshard_
from trainkit.parallel.parameters import get_local_box
from trainkit.post.adapters.lowrank import Adapter, adapters_of
from trainkit.types import ConfigError


@torch.no_grad()
def merge_adapters_(stages: Iterable[nn.Module]) -> None:
    """Merge the active adapters into their base, and set their B to zero.

    W becomes W + scale * B A, with rows rescaled for DoRA, computed in at least fp32 and rounded
    once. Up to that rounding the model computes the same as before. A run that merges changes its
    base, and must save it (no `exclude_frozen_`).

    Args:
        stages: This rank's stages, all of them, in any layout.

    Raises:
        ConfigError: A base is quantized.

    Effects:
        Writes parameters; communicates on the mesh axes that shard adapters.

    Examples:
        >>> from trainkit.post.adapters import Lora, lora
        >>> from trainkit.mesh import solo_parallel
        >>> model = nn.ModuleDict({"up": nn.Linear(2, 2)})
        >>> _ = lora(Lora("up", rank=1))(model, solo_parallel())
        >>> _ = nn.init.ones_(model.up.lora["default"].b)
        >>> before = model.up(torch.ones(1, 2))
        >>> merge_adapters_([model])
        >>> torch.allclose(model.up(torch.ones(1, 2)), before, atol=1e-6)
        True
    """
    for weight, adapter in _find_active(stages):
        box = get_local_box(weight)
        dtype = torch.promote_types(weight.dtype, torch.float32)
        # This rank's box as slices of the full matrix: rows of it and of B, columns of it and of A.
        *experts, rows, columns = (
            slice(start, start + size)
            for start, size in zip(box.offset, box.local.shape, strict=True)
        )
        # FSDP shards A along r, and so not as it shards W. Both factors are small enough to gather.
        a = _gather_full(adapter.a)[(*experts, slice(None), columns)].to(dtype)
        b = _gather_full(adapter.b)[(*experts, rows)].to(dtype)
        total = box.local.to(dtype) + adapter.spec.scale * (b @ a)
        if adapter.spec.dora:
            squares = total.square().sum(-1)
            # Of rows whose columns are sharded, each rank has summed its own.
            for dim, placement in enumerate(getattr(weight.data, "placements", ())):
                if placement.is_shard(weight.ndim - 1):
                    mesh: Any = getattr(weight.data, "device_mesh")  # noqa: B009 (of a DTensor)
                    dist.all_reduce(squares, group=mesh.get_group(dim))
            lengths = squares.sqrt()
            magnitude = _gather_full(adapter.magnitude)[(*experts, rows)].to(dtype)
            total *= (magnitude / lengths).unsqueeze(-1)
        box.local.copy_(total)
        get_local(adapter.b.data).zero_()


@contextmanager
def use_merged_adapters(stages: Sequence[nn.Module]) -> Iterator[None]:
    """Merge adapters within a `with` block, for evaluation or generation, and undo it bit for bit.

    The base is saved in host memory, since W + D - D need not be W.

    Args:
        stages: As for `merge_adapters_`.

    Effects:
        As `merge_adapters_`, undone at the end.
    """
    stages = list(stages)
    written = [p for weight, adapter in _find_active(stages) for p in (weight, adapter.b)]
    before = [(p, get_local(p.data).cpu().clone()) for p in written]
    merge_adapters_(stages)
    try:
        yield
    finally:
        for stage in stages:
            reshard_(find_reducers(stage))  # FSDP may have gathered the merged weights
        with torch.no_grad():
            for p, bits in before:
                get_local(p.data).copy_(bits)


@torch.no_grad()
def restart_adapters_(
    stages: Iterable[nn.Module], optimizer: torch.optim.Optimizer, *, seed: int
) -> None:
    """Reinitialize the active adapters: A random, B zero, and their optimizer state dropped.

    After `merge_adapters_` this is ReLoRA (Lialin et al., "ReLoRA: high-rank training through
    low-rank updates", 2023); in a recipe, `if due(state.step, 1000): merge_adapters_(stages);
    restart_adapters_(stages, optimizer, seed=cfg.seed + state.step)`.

    Args:
        stages: This rank's stages.
        optimizer: The optimizer of their parameters; the state of other parameters stays.
        seed: The seed of the new values, another one each time.

    Effects:
        Writes the adapters, and drops their optimizer state.

    Examples:
        >>> restart_adapters_(
        ...     [nn.Linear(1, 1)], torch.optim.SGD([nn.Parameter(torch.ones(1))]), seed=1
        ... )
    """
    for _, adapter in _find_active(stages):
        box = get_local_box(adapter.a)
        # As lora() fills it: a function of the element's index, and so equal in every layout.
        key = make_key(seed, f"{adapter.whole_name}.a")
        values = uniform_symmetric(key, tuple(box.local.shape), box.offset)
        box.local.copy_(values.mul_(adapter.inputs**-0.5))
        get_local(adapter.b.data).zero_()
        for p in adapter.parameters():
            optimizer.state.pop(p, None)


def _find_active(stages: Iterable[nn.Module]) -> Iterator[tuple[nn.Parameter, Adapter]]:
    """Yield every matrix with an active adapter, and the adapter, in the order of the model."""
    stages = list(stages)
    for stage in stages:
        reshard_(find_reducers(stage))  # so that shards are read and written, not gathered copies
    for module, key, adapters in adapters_of(stages):
        adapter = adapters.chosen()
        if adapter is not None:
            if "quantizations" in vars(module):
                raise ConfigError(
                    f"merge_adapters_: the base of {adapter.whole_name} is quantized; export "
                    "with --merge, which reads the weights that it was quantized from",
                    where=adapter.whole_name,
                )
            yield module.get_parameter(key), adapter


def _gather_full(p: Any) -> Tensor:
    """All-gather a parameter if it is sharded."""
    full = getattr(p.data, "full_tensor", None)
    return p.data if full is None else full()
