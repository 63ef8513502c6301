"""The weights of a dense decoder as the initial values of one with experts."""

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
    """Return the weights of a decoder with experts, each of which starts as the dense MLP.

    Routers are drawn as by `init_weights`; all other weights are those of the dense decoder. With
    experts as wide as the MLP and renormalized weights, the new decoder initially equals the dense
    one. Narrower experts have a slice of it each, in turn, and the decoders are equal where a
    token's experts have all slices and equal weights: for that, `down` is multiplied by the number
    of slices and divided by `Experts.scale`.

    Args:
        weights: The values of the dense decoder, from `init_weights` or `checkpoint.open_weights`
            for instance.
        config: The decoder with experts, otherwise equal to the dense one.
        seed: The seed of the routers and of the noise.
        noise: The fraction of an initial value that is added to each element of each expert, so
            that copies are not equal; 0.01 for instance.

    Returns:
        A `Weights` function. If `weights` has the shapes of its tensors, it has them too.

    Raises:
        ConfigError: There are no experts, their width or number does not fit the MLP, or there is a
            shared expert, a bias or a clamp, which the dense decoder does not have.
        ValueError: `weights` has an MLP of another shape, or `noise` is below 0 or not finite.

    References:
        Komatsuzaki et al., "Sparse upcycling" (2022).

    Examples:
        >>> dense = DecoderConfig(
        ...     vocab_size=64, width=16, layers=1, heads=2, kv_heads=2, mlp_width=32
        ... )
        >>> sparse = attrs.evolve(dense, experts=Experts(count=4, top_k=2, width=32))
        >>> upcycled = upcycle_weights(init_weights(dense, seed=0), sparse, seed=1)
        >>> first, third = (
        ...     upcycled("layers.0.mlp.experts.up", (1, 32, 16), (e, 0, 0)) for e in (0, 2)
        ... )
        >>> torch.equal(first, third)
        True
    """
    check_range("upcycle_weights", at_least=0, noise=noise)
    experts, slices = _count_slices(config)
    initial = init_weights(config, seed=seed)
    names = set(parameter_shapes(config))

    def give(name: str, shape: Sequence[int], offset: Sequence[int]) -> Tensor:
        layer, is_expert, matrix = name.rpartition(".experts.")
        if name not in names or name.endswith(".mlp.router.weight"):
            return initial(name, shape, offset)  # which raises for an unknown name
        if not is_expert:
            return weights(name, shape, offset)
        # Expert e is slice e mod `slices` of the MLP's columns, which are the rows of `up` and
        # `gate`. Each slice is read once, and one of them if the box is empty, for its dtype.
        dim = 1 if matrix == "down" else 0
        order = [expert % slices for expert in range(offset[0], offset[0] + shape[0])]
        values_of_slice: dict[int, Tensor] = {}
        for index in {*order} or {0}:
            # Without the dimension of experts: the box of one expert, at its slice of the MLP.
            start = [*offset[1:]]
            start[dim] += index * experts.width
            values_of_slice[index] = weights(f"{layer}.{matrix}.weight", shape[1:], start)
        if not order:
            return values_of_slice[0].new_empty(shape)
        values = torch.stack([values_of_slice[index] for index in order])
        # The MLP is the sum of its slices; experts are averaged, and multiplied by `scale`.
        if matrix == "down":
            values = values * (slices / experts.scale)
        if not noise:
            return values
        return values + noise * initial(name, shape, offset)

    shapes = getattr(weights, "shapes", None)
    if shapes is not None:
        setattr(give, "shapes", _convert_shapes(shapes, config))  # noqa: B010 (a function has no such attribute)
    return give


def _count_slices(config: DecoderConfig) -> tuple[Experts, int]:
    """Return the experts, and the number of slices of the dense MLP that they have."""
    experts = config.experts
    if experts is None:
        raise ConfigError(
            "upcycle_weights: the config has no experts; give that of the decoder to make"
        )
    if experts.shared:
        raise ConfigError(
            f"upcycle_weights: a shared expert of {experts.shared} columns cannot be made from a "
            "dense MLP; set shared to 0",
            where="shared",
            got=experts.shared,
        )
    if experts.bias or experts.clamp is not None:
        raise ConfigError(
            "upcycle_weights: experts with biases or a clamp cannot be made from a dense MLP, "
            "which has neither; set bias to False and clamp to None",
            where="experts",
            got=(experts.bias, experts.clamp),
        )
    # Each slice is in equally many experts, so that no part of the MLP counts more than another.
    slices, remainder = divmod(config.mlp_width, experts.width)
    if remainder or experts.count % slices:
        raise ConfigError(
            f"upcycle_weights: {experts.count} experts of {experts.width} columns are not copies "
            f"of all equal slices of an MLP of {config.mlp_width}; take a width that divides it, "
            "and a multiple of the number of slices",
            where="experts",
            got=(experts.count, experts.width),
        )
    return experts, slices


def _convert_shapes(
    shapes: Mapping[str, Sequence[int]], config: DecoderConfig
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of an upcycled decoder's tensors from those of a dense one."""
    dense = parameter_shapes(attrs.evolve(config, experts=None))
    sparse = parameter_shapes(config)
    replaced = dense.keys() - sparse.keys()
    for name in sorted(replaced & shapes.keys()):
        if tuple(shapes[name]) != dense[name]:
            raise ValueError(
                f"upcycle_weights: {name!r} is {tuple(shapes[name])} in the weights, and "
                f"{dense[name]} here"
            )
    unchanged = {name: tuple(shape) for name, shape in shapes.items() if name not in replaced}
    return unchanged | {name: sparse[name] for name in sparse.keys() - dense.keys()}
