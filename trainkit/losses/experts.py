"""The loss of a decoder with experts: its own, and what keeps the experts balanced."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from trainkit.losses.logits import read_field
from trainkit.losses.terms import declare_terms
from trainkit.types import RoutedOutput, check_range

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trainkit.losses.terms import NamedLoss


def add_router_losses(loss: NamedLoss, *, balance: float = 0.0, router_z: float = 0.0) -> NamedLoss:
    """Return a loss of what a decoder with experts returns, with terms of its routers.

    Beside its own terms it reports "balance", which is 1 per token where all experts are chosen
    alike, and "router_z", the squared log-sum-exp of a router's logits, both of which are means
    over the expert layers and sums over all tokens, trained on or not. Tokens that are not trained
    on have experts too, so these have a denominator of their own: each reports its "/count", which
    `average_terms` divides by, and `forward_backward` takes one for each term that has a gradient,
    `{"loss": trained, "balance": tokens, "router_z": tokens}`, with `batch.count_tokens`. Two
    counts are divided by nothing: "load", int64 `[L, E]`, how often each expert of each layer was
    chosen, for `models.update_routers_` and `metrics.make_expert_load_metrics`; and "dropped"
    `[L]`, how many of these choices found an expert full (`Experts.capacity`).

    Args:
        loss: What is computed of the decoder's output.
        balance: The weight of the balance term in what is differentiated; 0.01 is usual.
        router_z: The weight of the other one; 0.001 is usual.

    Returns:
        A loss that returns a sum for each term with a weight.

    Raises:
        ValueError: A weight is below 0 or not finite; later, the output is not that of a decoder
            with experts.

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
    check_range("routed", at_least=0, balance=balance, router_z=router_z)
    weights = {"balance": balance, "router_z": router_z}
    named = [f"{name}{end}" for name in weights for end in ("", "/count")]

    @declare_terms(*loss.terms, *named, "dropped", "load")
    def routed_loss(output: Any, batch: Mapping[str, Any]) -> Any:
        if not isinstance(output, RoutedOutput):
            got = type(output).__name__
            mend = "of a decoder with experts; take the loss without routed() for others"
            raise ValueError(f"routed: a Routed was expected, {mend}; got a {got}")  # noqa: TRY004
        total, terms = loss(output.output, batch)
        own = dict(zip(weights, output.sums[:, :2].mean(0).unbind(), strict=True))
        tokens = (read_field("routed", batch, "document_ids") >= 0).sum()
        parts = {name: weight * own[name] for name, weight in weights.items() if weight}
        values = [value for x in own.values() for value in (x.detach(), tokens)]
        reported = dict(zip(named, values, strict=True))
        counts = output.sums[:, 2:].detach().to(torch.int64)
        reported |= {"dropped": counts[:, 0], "load": counts[:, 1:]}
        return {loss.terms[0]: total, **parts}, terms | reported

    return routed_loss
