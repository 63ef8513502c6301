"""Adaptive quantization noise: a frozen model computes with noisy weights during training.

Huang et al., "QeRL: Beyond efficiency, quantization-enhanced reinforcement learning for LLMs"
(2025). Rounding raises the entropy of a model's predictions, which helps exploration. Noise of
about that size has the same effect on purpose, and can decay during training.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.noise import make_key, normal_by_quantile, to_int64
from trainkit.parallel.grad_reduction import find_reducers, get_local, reshard_
from trainkit.parallel.name_patterns import name_matches
from trainkit.parallel.parameters import canonical_name, get_local_box, get_named_parameters
from trainkit.post.adapters.frozen import Noise
from trainkit.types import ConfigError

# The norms whose outputs matrices read: noise on their scales acts on the columns of those.
_NORMS = "layers.*.{attention,mlp}_norm.weight"


@contextmanager
def add_quantization_noise(
    stages: Sequence[nn.Module], *, seed: int, step: int, weights: float = 0.0, norms: float = 0.0
) -> Iterator[None]:
    """Add noise to frozen weights within a `with` block, around a step's passes or its sampling.

    The noise is a function of the seed, the step, the name of the matrix or norm and the element's
    index in the full tensor. So every layout, a recomputed forward pass, the backward pass and a
    resumed run see the same noise. There is none outside of the block.

    Args:
        stages: This rank's stages. Each must have what is to get noise.
        seed: The run's seed.
        step: The run's step.
        weights: The standard deviation of the noise on quantized matrices, in half steps of the
            format: for nf4 half the smallest gap of its codes times the block's scale, for int8
            half the scale, for fp8 an eighth of it.
        norms: The standard deviation of the noise on the scales of the norms before attention and
            before the MLP, as in the paper. It is free of cost, and equal for all matrices that
            read a channel.

    Raises:
        ConfigError: `weights` or `norms` is negative; or it is positive, and this rank has no
            quantized matrix or no such frozen norm.

    Effects:
        Sets an attribute of quantized modules, which their forward pass reads; writes the norms,
        and restores their bits at the end.

    Examples:
        The paper decays the noise from 0.01 to 0.0005. `clip_and_step` may be called inside the
        block or after it.

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
    for name, scale in (("weights", weights), ("norms", norms)):
        if not 0 <= scale < math.inf:
            raise ConfigError(
                f"add_quantization_noise: {name} must be at least 0 and finite, got {scale}",
                where=name,
                got=scale,
            )
    with ExitStack() as stack:
        if weights:
            stack.enter_context(_add_matrix_noise(stages, seed, step, weights))
        if norms:
            stack.enter_context(_add_norm_noise(stages, seed, step, norms))
        yield


@contextmanager
def _add_matrix_noise(
    stages: Sequence[nn.Module], seed: int, step: int, scale: float
) -> Iterator[None]:
    """Give the forward pass of quantized modules noise of a scale in half steps."""
    matrices: list[tuple[Any, str, nn.Parameter]] = [  # with the names in the whole model
        (module, canonical_name(f"{path}.{key}" if path else key), module.get_parameter(key))
        for stage in stages
        for path, module in stage.named_modules()
        for key in vars(module).get("quantizations", {})
    ]
    if not matrices:
        raise ConfigError(
            f"add_quantization_noise: weights is {scale}, and no matrix is quantized on this rank; "
            "put quantized() in the plan",
            where="weights",
            got=scale,
        )
    # The codes stay as they are: a forward pass adds noise to what it dequantizes from them.
    for module, name, codes in matrices:
        noise = Noise(
            _make_noise_key(seed, step, name, codes),
            torch.full((), scale, dtype=torch.float32, device=codes.device),
            _find_first_row(codes),
        )
        noises = vars(module).setdefault("noises", {})  # experts have three matrices
        noises[name.rpartition(".")[2]] = noise
    try:
        yield
    finally:
        for module, _, _ in matrices:
            # Experts stand in the list three times, hence the default.
            vars(module).pop("noises", None)


@contextmanager
def _add_norm_noise(
    stages: Sequence[nn.Module], seed: int, step: int, scale: float
) -> Iterator[None]:
    """Add noise to the scales of the norms before attention and MLP, which must be frozen."""
    # First: what FSDP has gathered hides the shards, which are written below.
    _reshard_(stages)
    named = [(x, p) for x, p in get_named_parameters(stages).items() if name_matches(x, _NORMS)]
    trained = [name for name, p in named if p.requires_grad]
    if trained:  # the end of the block would undo a step that trains it
        raise ConfigError(
            f"add_quantization_noise: norms is {scale}, and {trained[0]} is trained on this rank; "
            "noise is for what is frozen; set norms to 0",
            where="norms",
            got=scale,
        )
    if not named:
        raise ConfigError(
            f"add_quantization_noise: norms is {scale}, and no norm stands before attention or MLP "
            "on this rank; set norms to 0",
            where="norms",
            got=scale,
        )
    # A copy is restored, since x + n - n need not be x.
    before = [(p, get_local(p.data).clone()) for _, p in named]
    with torch.no_grad():
        for name, p in named:
            box = get_local_box(p)
            if box.local.numel():  # FSDP may leave a rank no part of a small tensor
                key = _make_noise_key(seed, step, name, p)
                box.local.add_(normal_by_quantile(key, box.local.shape, box.offset) * scale)
    try:
        yield
    finally:
        _reshard_(stages)  # the passes of the block may have left gathered copies
        for p, bits in before:
            get_local(p.data).copy_(bits)


def _reshard_(stages: Sequence[nn.Module]) -> None:
    """Free FSDP's gathered parameters, so that what is written to shards is gathered anew."""
    for stage in stages:
        reshard_(find_reducers(stage))


def _make_noise_key(seed: int, step: int, name: str, like: Tensor) -> Tensor:
    # Random keys are unsigned, and torch computes with no uint64.
    key = to_int64(make_key(seed, "quantization noise", step, name))
    return torch.full((), key, dtype=torch.int64, device=like.device)


def _find_first_row(codes: Any) -> tuple[int, ...]:
    """Return the offset of the rows that a forward pass sees, in the full matrix.

    FSDP has gathered its shards by then, so only tp and ep count.
    """
    offset = [0] * codes.ndim
    mesh: Any = getattr(codes, "device_mesh", None)
    for axis in {"tp", "ep"}.intersection(getattr(mesh, "mesh_dim_names", None) or ()):
        placement = codes.placements[mesh.mesh_dim_names.index(axis)]
        if placement.is_shard():
            local_size = codes.shape[placement.dim] // mesh[axis].size()
            offset[placement.dim] = mesh.get_local_rank(axis) * local_size
    return tuple(offset[:-1])
