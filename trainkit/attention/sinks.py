"""Attention sinks: one learned logit for each head in the denominator of its softmax.

A query that finds nothing among its keys then need not spread its weight over them (Xiao et al.,
"Efficient streaming language models with attention sinks", 2023; the form of gpt-oss, OpenAI,
2025). A sink is a key whose value is zero, so that it is added to finished attention: any kernel
that gives the log-sum-exp of its scores has sinks.
"""

from __future__ import annotations

import torch
from torch import Tensor


def add_sink(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Return attention with one more logit in the softmax: out * sigmoid(lse - sink).

    Args:
        out: `[..., E]`, attention without sinks.
        lse: `[...]`, the log-sum-exp of its scores, fp32 or fp64.
        sinks: The logits, which broadcast to `lse`.

    Returns:
        The output, in the wider dtype of `out` and `lse`, and the log-sum-exp with the sink.

    Examples:
        >>> add_sink(torch.ones(2, 1), torch.tensor([0.0, 3.0]), torch.tensor([0.0, -torch.inf]))
        (tensor([[0.5000],
                [1.0000]]), tensor([0.6931, 3.0000]))
    """
    sinks = sinks.to(lse.dtype)
    return out * torch.sigmoid(lse - sinks).unsqueeze(-1), torch.logaddexp(lse, sinks)


def sink_gradient(d_out: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Return the gradient of sinks from that of the output, and both results of `add_sink`.

    Examples:
        >>> sinks = torch.zeros(1, requires_grad=True)
        >>> out, lse = add_sink(torch.ones(2, 1), torch.zeros(2), sinks)
        >>> out.sum().backward()
        >>> sinks.grad, sink_gradient(torch.ones(2, 1), out.detach(), lse.detach(), sinks.detach())
        (tensor([-0.5000]), tensor([-0.5000]))
    """
    # The derivative of a logit with weight p is p (dp - d_out . out), and its value is zero.
    weight = torch.exp(sinks.to(lse.dtype) - lse)
    d_sinks = -weight * (d_out.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    return d_sinks.sum_to_size(sinks.shape).to(sinks.dtype)
