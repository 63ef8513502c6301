"""The weights of a dense decoder as the beginning of one with experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import torch
from torch import Tensor

from trainkit.models.config import DecoderConfig, Experts, parameter_shapes
from trainkit.models.init_weights import init_weights
from trainkit.types import ConfigError, Weights, check_range


def upcycle_weights(
    weights: Weights, config: DecoderConfig, *, seed: int, noise: float = 0.0
) -> Weights:
    """Return the weights of a decoder with experts, each of which begins as the dense MLP.

    Routers are drawn as `init_weights` does, and all else is taken over. With experts as wide as
    the MLP and renormalized weights, the decoder begins as the dense one's equal. Narrower experts
    hold a slice of it each, one after the other, and it begins as the dense one where a token's
    experts hold all slices and weigh the same: `down` is multiplied by the number of slices, and
    divided by `Experts.scale`, for that.

    Args:
        weights: The values of the dense decoder, by `init_weights` or `checkpoint.open_weights` for
            instance.
        config: The decoder with experts; but for these it is the dense one.
        seed: The seed of the routers and of the noise.
        noise: How much of an initial value is added to each element of each expert, so that copies
            are not equal; 0.01 for instance.

    Returns:
        A `Weights` function. If `weights` says which tensors it holds, so does this one.

    Raises:
        ConfigError: There are no experts, their width or number does not fit the MLP, or there is a
            shared expert, for which the dense decoder has nothing.
        ValueError: `weights` says that an MLP is of another shape, or `noise` is below 0 or not
            finite.

    References:
        Komatsuzaki et al., "Sparse upcycling" (2022).

    Examples:
        >>> dense = DecoderConfig(
        ...     vocab_size=64, width=16, layers=1, heads=2, kv_heads=2, mlp_width=32
        ... )
        >>> sparse = attrs.evolve(dense, experts=Experts(count=4, chosen=2, width=32))
        >>> found = upcycle_weights(init_weights(dense, seed=0), sparse, seed=1)
        >>> first, third = (
        ...     found("layers.0.mlp.experts.up", (1, 32, 16), (e, 0, 0)) for e in (0, 2)
        ... )
        >>> torch.equal(first, third)
        True
    """
    check_range("upcycled", at_least=0, noise=noise)
    experts, slices = _slices(config)
    drawn, names = init_weights(config, seed=seed), set(parameter_shapes(config))

    def give(name: str, shape: Sequence[int], offset: Sequence[int]) -> Tensor:
        layer, is_expert, own = name.rpartition(".experts.")
        if name not in names or name.endswith(".mlp.router.weight"):
            return drawn(name, shape, offset)  # which refuses a name that is none
        if not is_expert:
            return weights(name, shape, offset)
        dense, how = f"{layer}.{own}.weight", {"width": experts.width, "slices": slices}
        values = _copies(weights, dense, shape, offset, **how)
        if own == "down":
            values = values * (slices / experts.scale)
        return values + noise * drawn(name, shape, offset) if noise else values

    held = getattr(weights, "shapes", None)
    if held is not None:
        setattr(give, "shapes", _shapes(held, config))  # noqa: B010 (a function has no such attribute)
    return give


def _slices(config: DecoderConfig) -> tuple[Experts, int]:
    """Return the experts, and into how many parts they cut the dense MLP."""
    experts = config.experts
    if experts is None:
        raise ConfigError("upcycled: the config has no experts; give that of the decoder to make")
    if experts.shared:
        what = f"a shared expert of {experts.shared} columns cannot be made of a dense MLP"
        raise ConfigError(f"upcycled: {what}; set shared to 0", where="shared", got=experts.shared)
    slices, rest = divmod(config.mlp_width, experts.width)
    if rest or experts.count % slices:
        raise ConfigError(
            f"upcycled: {experts.count} experts of {experts.width} columns are not copies of all "
            f"equal parts of an MLP of {config.mlp_width}; take a width that divides it, and a "
            "multiple of the number of parts",
            where="experts",
            got=(experts.count, experts.width),
        )
    return experts, slices


def _copies(
    weights: Weights,
    name: str,
    shape: Sequence[int],
    offset: Sequence[int],
    *,
    width: int,
    slices: int,
) -> Tensor:
    """Return a box of packed experts, of which number e is slice e mod `slices` of the MLP."""
    inner = 1 if name.endswith(".down.weight") else 0  # the dimension of the MLP's columns
    wanted = [expert % slices for expert in range(offset[0], offset[0] + shape[0])]
    found = {}
    for part in {*wanted} or {0}:
        begin = [*offset[1:]]
        begin[inner] += part * width
        found[part] = weights(name, shape[1:], begin)
    return torch.stack([found[part] for part in wanted]) if wanted else found[0].new_empty(shape)


def _shapes(held: Mapping[str, Sequence[int]], config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Return which tensors an upcycled decoder has, of those which a dense one holds."""
    dense = parameter_shapes(attrs.evolve(config, experts=None))
    whole = parameter_shapes(config)
    gone = dense.keys() - whole.keys()
    for name in sorted(gone & held.keys()):
        if tuple(held[name]) != dense[name]:
            got = tuple(held[name])
            raise ValueError(f"upcycled: {name!r} is {got} in the weights, and {dense[name]} here")
    kept = {name: tuple(shape) for name, shape in held.items() if name not in gone}
    return kept | {name: whole[name] for name in whole.keys() - dense.keys()}
