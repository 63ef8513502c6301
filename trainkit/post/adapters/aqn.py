"""Adaptive quantisation noise: what a frozen model computes in training is moved a little.

Huang et al., "QeRL: Beyond efficiency, quantization-enhanced reinforcement learning for LLMs"
(2025). What rounding does to a model makes its choices more even, and so lets it explore; noise of
about that size, which falls as training goes on, does so on purpose.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.noise import make_key, normal_by_quantile, to_int64
from trainkit.parallel.grad_reduction import find_reducers, get_local, reshard_
from trainkit.parallel.parameters import canonical_name, get_local_box, get_named_parameters
from trainkit.post.adapters.frozen import Noise
from trainkit.types import ConfigError

_NORMS = re.compile(r"layers\.\d+\.(attention|mlp)_norm\.weight")


@contextmanager
def add_quantization_noise(
    stages: Sequence[nn.Module], *, seed: int, step: int, weights: float = 0.0, norms: float = 0.0
) -> Iterator[None]:
    """Add noise to what is frozen for a `with` block: around a step's passes, or what it samples.

    Each number is a function of the seed, the step, the name of the matrix or norm and the
    element's place in the whole of it. So every layout, a recomputed forward pass, the backward
    pass and a resumed run have the same; outside of the block there is none.

    Args:
        stages: This rank's stages, each of which has what gets noise.
        seed: The run's seed.
        step: The step, as the counter of the run has it.
        weights: The standard deviation of the noise on matrices in few bits, in half steps: of nf4
            half the smallest gap of its codes times the block's scale, of int8 half its scale, of
            fp8 an eighth of it.
        norms: That of the noise on the scales of the norms before attention and before the MLP,
            which moves all that reads a channel alike, and costs nothing: the paper's form.

    Raises:
        ConfigError: One of the two is negative; or there is nothing that it would move: no matrix
            in few bits, or no such norm that is frozen.

    Effects:
        Sets an attribute of modules in few bits, which their forward pass reads; writes the norms,
        and gives them their bits back in the end.

    Examples:
        The paper lets it fall from 0.01 to 0.0005. `clip_and_step` may stand in the block or
        behind it.

        >>> from trainkit.post.adapters.frozen import quantized
        >>> from trainkit.mesh import solo_parallel
        >>> from trainkit.schedules import piecewise
        >>> scale_at = piecewise(1e-2, [(0, 1.0), (100, 0.05, "exponential")])
        >>> model = quantized("int8", modules="0")(nn.Sequential(nn.Linear(2, 2)), solo_parallel())
        >>> before = model(torch.ones(1, 2))
        >>> with add_quantization_noise([model], seed=0, step=7, weights=scale_at(7)):
        ...     during = model(torch.ones(1, 2))
        >>> torch.equal(before, during), torch.equal(before, model(torch.ones(1, 2)))
        (False, True)
    """
    moved, noisy = _norms(stages, norms), _in_few_bits(stages, weights)
    for part, name, codes in noisy:
        noise = Noise(_key(seed, step, name, codes), _scalar(weights, codes), _begin(codes))
        part.noises = {**vars(part).get("noises", {}), name.rpartition(".")[2]: noise}
    held = [(p, get_local(p.data).clone()) for _, p in moved]
    _add_(stages, moved, seed=seed, step=step, scale=norms)
    try:
        yield
    finally:
        for part, _, _ in noisy:
            vars(part).pop("noises", None)
        for stage in stages if held else ():
            reshard_(find_reducers(stage))
        for p, bits in held:
            get_local(p.data).copy_(bits)


def _in_few_bits(stages: Sequence[nn.Module], scale: float) -> list[tuple[Any, str, nn.Parameter]]:
    """Return every module in few bits with a matrix's name in the whole model, and its codes."""
    _check("weights", scale)
    found = [
        (part, canonical_name(f"{path}.{key}" if path else key), part.get_parameter(key))
        for stage in stages
        for path, part in stage.named_modules()
        for key in vars(part).get("packings", {})
    ]
    if scale and not found:
        raise _nothing("weights", scale, "no matrix is in few bits", "put quantized() in the plan")
    return found if scale else []


def _norms(stages: Sequence[nn.Module], scale: float) -> list[tuple[str, nn.Parameter]]:
    """Return the norms before attention and MLP, which must be frozen: a step would be undone."""
    _check("norms", scale)
    named = [(x, p) for x, p in get_named_parameters(stages).items() if _NORMS.fullmatch(x)]
    trained = [name for name, p in named if p.requires_grad]
    if scale and (trained or not named):
        what = f"{trained[0]} is trained" if trained else "no norm stands before attention or MLP"
        raise _nothing("norms", scale, what, "noise is for what is frozen; set norms to 0")
    return named if scale else []


def _check(name: str, scale: float) -> None:
    if not 0 <= scale < math.inf:
        what = f"{name} must be at least 0 and finite, got {scale}"
        raise ConfigError(f"add_quantization_noise: {what}", where=name, got=scale)


def _nothing(name: str, scale: float, what: str, mend: str) -> ConfigError:
    told = f"add_quantization_noise: {name} is {scale}, and {what} on this rank; {mend}"
    return ConfigError(told, where=name, got=scale)


@torch.no_grad()
def _add_(
    stages: Sequence[nn.Module],
    moved: Sequence[tuple[str, nn.Parameter]],
    *,
    seed: int,
    step: int,
    scale: float,
) -> None:
    """Add noise to norms, those of FSDP in their shards."""
    for stage in stages if moved else ():
        reshard_(find_reducers(stage))
    for name, p in moved:
        box = get_local_box(p)
        if box.local.numel():
            key = _key(seed, step, name, p)
            box.local.add_(normal_by_quantile(key, box.local.shape, box.offset) * scale)


def _key(seed: int, step: int, name: str, like: Tensor) -> Tensor:
    key = to_int64(make_key(seed, "quantization noise", step, name))
    return torch.full((), key, dtype=torch.int64, device=like.device)


def _scalar(value: float, like: Tensor) -> Tensor:
    return torch.full((), value, dtype=torch.float32, device=like.device)


def _begin(codes: Any) -> tuple[int, ...]:
    """Return where the rows that a forward pass sees begin: what tp and ep leave of a matrix."""
    offset = [0] * codes.ndim
    mesh: Any = getattr(codes, "device_mesh", None)
    for axis in {"tp", "ep"}.intersection(getattr(mesh, "mesh_dim_names", None) or ()):
        placement = codes.placements[mesh.mesh_dim_names.index(axis)]
        if placement.is_shard():
            part = codes.shape[placement.dim] // mesh[axis].size()
            offset[placement.dim] = mesh.get_local_rank(axis) * part
    return tuple(offset[:-1])
