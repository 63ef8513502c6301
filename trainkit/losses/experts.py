"""The loss of a decoder with experts, with balance and z terms of its routers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from trainkit.losses.logits import read_field
from trainkit.losses.terms import declare_terms
from trainkit.types import RoutedOutput, check_range

if TYPE_CHECKING:
    from trainkit.losses.terms import NamedLoss, NamedTerms


def add_router_losses(loss: NamedLoss, *, balance: float = 0.0, router_z: float = 0.0) -> NamedLoss:
    """Return a loss for the output of a decoder with experts, with terms of its routers.

    It adds "balance", which is 1 per token where all experts are chosen equally often, and
    "router_z", the squared log-sum-exp of a router's logits. Both are means over the expert layers
    and sums over all tokens, in the loss or not, because tokens outside the loss mask have experts
    too. So they have their own denominators: each reports its "/count", by which `average_terms`
    divides, and `forward_backward` takes one for each term with a gradient, `{"loss": trained,
    "balance": tokens, "router_z": tokens}`, with `batch.count_tokens`.

    Two more terms are counts: "load", int64 `[L, E]`, how often each expert of each layer was
    chosen, for `models.update_routers_` and `metrics.make_expert_load_metrics`; and "dropped"
    `[L]`, the number of these choices that exceeded an expert's capacity (`Experts.capacity`).

    Args:
        loss: The loss of the decoder's output.
        balance: The weight of the balance term in the gradient; 0.01 is usual.
        router_z: The weight of the z term; 0.001 is usual.

    Returns:
        A loss that returns a sum for each term with a weight.

    Raises:
        ValueError: A weight is below 0 or not finite; later, the output does not come from a
            decoder with experts.

    References:
        Fedus et al., "Switch transformers" (2021); Zoph et al., "ST-MoE" (2022), for the z-loss.

    Examples:
        >>> from trainkit.losses import next_token
        >>> output = RoutedOutput(torch.zeros(1, 2, 4), torch.tensor([[2.0, 4.0, 0.0, 1.0, 1.0]]))
        >>> batch = {"labels": torch.tensor([[1, 2]]), "document_ids": torch.zeros(1, 2)}
        >>> total, terms = add_router_losses(next_token, balance=0.5)(output, batch)
        >>> {name: float(x) for name, x in total.items()}, terms["load"].tolist()
        ({'loss': 2.77..., 'balance': 1.0}, [[1, 1]])
    """
    check_range("add_router_losses", at_least=0, balance=balance, router_z=router_z)
    weights = {"balance": balance, "router_z": router_z}
    names = [f"{name}{end}" for name in weights for end in ("", "/count")]

    @declare_terms(*loss.terms, *names, "dropped", "load")
    def routed_loss(output: Any, batch: Mapping[str, Any]) -> NamedTerms:
        if not isinstance(output, RoutedOutput):
            raise ValueError(  # noqa: TRY004 (as for all bad arguments)
                "add_router_losses: a RoutedOutput of a decoder with experts was expected, got a "
                f"{type(output).__name__}; use the loss without add_router_losses() for others"
            )
        total, terms = loss(output.output, batch)
        num_tokens = (read_field("add_router_losses", batch, "document_ids") >= 0).sum()
        # A mean over layers, so that the weights do not depend on the depth.
        layer_means = output.sums[:, :2].mean(0).unbind()
        router_sums = dict(zip(weights, layer_means, strict=True))
        # Sums by name, as each is divided by its own denominator: the loss by its tokens, the
        # router terms by all tokens.
        totals = {**total} if isinstance(total, Mapping) else {loss.terms[0]: total}
        terms = dict(terms)
        for name, x in router_sums.items():
            if weights[name]:
                totals[name] = weights[name] * x
            terms |= {name: x.detach(), f"{name}/count": num_tokens}
        counts = output.sums[:, 2:].detach().to(torch.int64)
        return totals, terms | {"dropped": counts[:, 0], "load": counts[:, 1:]}

    return routed_loss
