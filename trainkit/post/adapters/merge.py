"""What adapters have learnt, added to their base: for good, for a while, or again and again."""

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
    """Add the adapters that compute to their base, and let them add nothing from here on.

    W becomes W + scale * B A, or what DoRA makes of its rows; it is added in fp32 at least, and
    rounded once. Then B is zeros, so that the model computes what it did, but for that rounding.
    The base is another one from here on: a run that merges must save it (no `exclude_frozen_`).

    Args:
        stages: This rank's stages, all of them, in any layout.

    Raises:
        ConfigError: A base is held in few bits.

    Effects:
        Writes parameters; communicates over what adapters are sharded over.

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
    for weight, adapter in _computing(stages):
        get_local(weight.data).copy_(_merged(weight, adapter))
        get_local(adapter.b.data).zero_()


@contextmanager
def use_merged_adapters(stages: Sequence[nn.Module]) -> Iterator[None]:
    """Merge for a `with` block, to evaluate or to generate; then the base has its bits again.

    They are kept in host memory, since W + D - D need not be W.

    Args:
        stages: As for `merge_adapters_`.

    Effects:
        Those of `merge_adapters_`, undone in the end.
    """
    stages = list(stages)
    written = [p for weight, adapter in _computing(stages) for p in (weight, adapter.b)]
    held = [(p, get_local(p.data).cpu().clone()) for p in written]
    merge_adapters_(stages)
    try:
        yield
    finally:
        for stage in stages:
            reshard_(find_reducers(stage))
        with torch.no_grad():
            for p, bits in held:
                get_local(p.data).copy_(bits)


@torch.no_grad()
def restart_adapters_(
    stages: Iterable[nn.Module], optimizer: torch.optim.Optimizer, *, seed: int
) -> None:
    """Let the adapters that compute begin afresh: A drawn anew, B zeros, and nothing remembered.

    After `merge_adapters_` this is ReLoRA (Lialin et al., "ReLoRA: high-rank training through
    low-rank updates", 2023); in a recipe, `if due(state.step, 1000): merge_adapters_(stages);
    restart_adapters_(stages, optimizer, seed=cfg.seed + state.step)`.

    Args:
        stages: This rank's stages.
        optimizer: The optimizer of their parameters; what it remembers of others stays.
        seed: Of the new values, which must differ from those of the last time.

    Effects:
        Writes the adapters, and drops what the optimizer remembers of them.

    Examples:
        >>> restart_adapters_(
        ...     [nn.Linear(1, 1)], torch.optim.SGD([nn.Parameter(torch.ones(1))]), seed=1
        ... )
    """
    for _, adapter in _computing(stages):
        box = get_local_box(adapter.a)
        key = make_key(seed, f"{adapter.whole_name}.a")
        values = uniform_symmetric(key, tuple(box.local.shape), box.offset)
        box.local.copy_(values.mul_(adapter.inputs**-0.5))
        get_local(adapter.b.data).zero_()
        for p in adapter.parameters():
            optimizer.state.pop(p, None)


def _computing(stages: Iterable[nn.Module]) -> Iterator[tuple[nn.Parameter, Adapter]]:
    """Yield every matrix whose adapter computes, and the adapter, in the order of the model."""
    stages = list(stages)
    for stage in stages:
        reshard_(find_reducers(stage))
    for module, key, beside in adapters_of(stages):
        adapter = beside.chosen()
        if adapter is not None:
            if "packings" in vars(module):
                raise ConfigError(
                    f"merge_adapters_: the base of {adapter.whole_name} is held in few bits; "
                    "export with --merge, which reads the base that it was made of",
                    where=adapter.whole_name,
                )
            yield module.get_parameter(key), adapter


def _whole(p: Any) -> Tensor:
    """Return all of a parameter; communicates where it is sharded."""
    full = getattr(p.data, "full_tensor", None)
    return p.data if full is None else full()


def _merged(weight: nn.Parameter, adapter: Adapter) -> Tensor:
    """Return this rank's part of a matrix with its adapter, in its dtype."""
    a, b, box = _whole(adapter.a), _whole(adapter.b), get_local_box(weight)
    wide = torch.promote_types(weight.dtype, torch.float32)
    *experts, rows, columns = (
        slice(start, start + size) for start, size in zip(box.offset, box.local.shape, strict=True)
    )
    a, b = a[(*experts, slice(None), columns)], b[(*experts, rows)]
    total = box.local.to(wide) + adapter.spec.scale * (b.to(wide) @ a.to(wide))
    if adapter.spec.dora:
        lengths = _summed_over_columns(weight, total.square().sum(-1)).sqrt()
        magnitude = _whole(adapter.magnitude)[(*experts, rows)].to(wide)
        total *= (magnitude / lengths).unsqueeze(-1)
    return total.to(weight.dtype)


def _summed_over_columns(weight: Any, parts: Tensor) -> Tensor:
    """Sum parts of rows over the ranks that hold the other columns of the same rows."""
    for dim, placement in enumerate(getattr(weight.data, "placements", ())):
        if placement.is_shard(weight.ndim - 1):
            dist.all_reduce(parts, group=weight.data.device_mesh.get_group(dim))
    return parts
