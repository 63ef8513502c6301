"""How evenly the experts of a layer are used."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def expert_load_ratio(load: Tensor) -> Tensor:
    """Return the load of the busiest expert over the mean load, without a host sync.

    Args:
        load: `[..., E]`, how often each expert of a layer was chosen in the global batch: the term
            "load" of `losses.add_router_losses`, after `reduce_metrics`.

    Returns:
        fp64 `[...]`: 1 for equal loads, E if one expert has all tokens; NaN without tokens.

    Examples:
        >>> expert_load_ratio(torch.tensor([[3, 1, 0, 0], [1, 1, 1, 1]])).tolist()
        [3.0, 1.0]
    """
    return load.amax(-1) / load.double().mean(-1)


def expert_load_entropy(load: Tensor) -> Tensor:
    """Return the normalized entropy of expert loads: -sum p ln p over ln E.

    It falls when many experts are rarely chosen, which `expert_load_ratio` does not show.

    Args:
        load: As in `expert_load_ratio`, of at least two experts.

    Returns:
        fp64 `[...]`: 1 for equal loads, 0 if one expert has all tokens; NaN without tokens.

    Examples:
        >>> expert_load_entropy(torch.tensor([[2, 2, 0, 0], [1, 1, 1, 1], [0, 9, 0, 0]])).tolist()
        [0.5, 1.0, 0.0]
    """
    shares = load / load.double().sum(-1, keepdim=True)
    return torch.special.entr(shares).sum(-1) / math.log(load.shape[-1])


def make_expert_load_metrics(
    load: Tensor, *, biases: Tensor | None = None, dropped: Tensor | None = None
) -> dict[str, Tensor]:
    """Return scalar metrics of the balance of experts in a step.

    Each metric has a value for each expert layer, `NAME/0`, `NAME/1` and so on in the order of
    `load`, and `NAME` is that of the worst layer. They are `load_over_mean` (`expert_load_ratio`),
    `load_entropy` (`expert_load_entropy`), `expert_bias` (the largest absolute value of a layer's
    biases) and `dropped_share` (of all choices).

    Args:
        load: As in `expert_load_ratio`, `[L, E]`.
        biases: `[L, E]`, from `models.update_routers_`, summed over the pipeline.
        dropped: `[L]`, the term of that name.

    Examples:
        >>> metrics = make_expert_load_metrics(torch.tensor([[3, 1], [2, 2]]))
        >>> {name: round(x.item(), 2) for name, x in metrics.items()}
        {'load_over_mean': 1.5, 'load_over_mean/0': 1.5, 'load_over_mean/1': 1.0,
         'load_entropy': 0.81, 'load_entropy/0': 0.81, 'load_entropy/1': 1.0}
    """
    by_layer = {
        "load_over_mean": expert_load_ratio(load),
        "load_entropy": expert_load_entropy(load),
    }
    if biases is not None:
        by_layer["expert_bias"] = biases.abs().amax(-1)
    if dropped is not None:
        by_layer["dropped_share"] = dropped / load.sum(-1)
    metrics: dict[str, Tensor] = {}
    for name, x in by_layer.items():
        metrics[name] = x.amin() if name == "load_entropy" else x.amax()  # of the worst layer
        metrics |= {f"{name}/{layer}": value for layer, value in enumerate(x)}
    return metrics
