"""Mixture-of-experts feed-forward layers: each token goes to the k experts that its router chooses.

Tokens are sorted by expert (`dispatch`), so that one grouped matrix multiplication serves all
experts. Counts of a layer are outputs, not state.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from trainkit.batch.denominators import can_read_values
from trainkit.models.call import RoutingTape
from trainkit.models.config import Activation, Experts
from trainkit.models.dispatch import (
    Combine,
    Dispatch,
    DispatchKeys,
    ep_combine,
    ep_dispatch,
    ep_dispatch_keys,
)
from trainkit.models.layers import ACTIVATIONS, Linear, Mlp
from trainkit.models.routers import (
    Routing,
    add_jitter,
    apply_capacity,
    biased_topk,
    expert_capacity,
    scale_by_load,
    softmax_topk,
)
from trainkit.noise import counters
from trainkit.types import ConfigError, Spans, check_range

Balance = Literal["batch", "microbatch", "document"]
"""The tokens over which the balancing loss counts the load of experts: the global batch of the
last step, which does not depend on the layout; the microbatch of a rank, which does; or each
document."""


def preload_(tape: RoutingTape, layers: Sequence[str], choices: Tensor) -> None:
    """Write the expert choices that came with a batch to its tape.

    Args:
        tape: The tape of the batch.
        layers: The names of all expert layers of the model, in their order.
        choices: int64 `[B, S, L, k]`, those of an inference engine for instance; or `[B, S, L k]`,
            as a column of a corpus has them.

    Raises:
        ValueError: They are of another number of layers.

    Effects:
        Replaces the choices on the tape.

    References:
        Ma et al., "Stabilizing MoE reinforcement learning by aligning training and inference
        routers" (2025).

    Examples:
        >>> tape = RoutingTape()
        >>> preload_(tape, ["layers.0.mlp"], torch.zeros(2, 3, 1, 2, dtype=torch.int64))
        >>> tape.choices["layers.0.mlp"].shape
        torch.Size([6, 2])
    """
    if choices.ndim == 3 and choices.shape[2] % len(layers) == 0:
        choices = choices.unflatten(2, (len(layers), -1))
    if choices.ndim != 4 or choices.shape[2] != len(layers):
        raise ValueError(
            f"RoutingTape: choices must be [B, S, {len(layers)}, k], for {len(layers)} layers, got "
            f"{list(choices.shape)}"
        )
    tape.choices.update(zip(layers, choices.flatten(0, 1).unbind(1), strict=True))


def check_tape(
    tape: RoutingTape,
    layers: Sequence[str],
    experts: Experts,
    *,
    is_token: Tensor,
    own: Sequence[str] | None = None,
) -> None:
    """Check that the choices on a tape are those of a model's layers and of a batch's tokens.

    Args:
        tape: The tape; it may be empty.
        layers: The names of all expert layers of the model.
        experts: The number of experts, and of choices per token.
        is_token: bool, one for each token; the choices of padding are not checked.
        own: The layers that will read the tape, those of a pipeline stage; by default all.

    Raises:
        ValueError: A layer is missing or unknown, or a token's choices are not distinct experts. On
            a GPU the values of choices are checked by a kernel instead, before they are used.
        RuntimeError: That kernel found a wrong choice, after this function has returned; the
            process has to end.

    Effects:
        None on a CPU. On a GPU queues kernels and one assertion, without a host sync.

    Examples:
        >>> experts = Experts(count=4, top_k=2, width=8)
        >>> tape = RoutingTape({"0": torch.tensor([[0, 9]])})
        >>> check_tape(tape, ["0"], experts, is_token=torch.tensor([True]))
        Traceback (most recent call last):
        ...
        ValueError: RoutingTape: 0: choices must be int64 [1, 2], of each token distinct ...
    """
    names = {*tape.choices}
    required = {*(layers if own is None else own)}
    if names and (names - {*layers} or required - names):
        raise ValueError(
            f"RoutingTape: it has the choices of {', '.join(tape.choices)}; the model's expert "
            f"layers are {', '.join(layers)}"
        )
    shape = (is_token.numel(), experts.top_k)
    expected = f"int64 {list(shape)}, of each token distinct ones in [0, {experts.count})"
    unread: list[Tensor] = []
    for name, x in tape.choices.items():
        if x.dtype != torch.int64 or x.shape != shape:
            raise ValueError(
                f"RoutingTape: {name}: choices must be {expected}, got {x.dtype} {list(x.shape)}"
            )
        # Sorted, so that neighbors are compared instead of all pairs of a token's choices.
        ordered = x.sort().values
        exist = (ordered[:, 0] >= 0) & (ordered[:, -1] < experts.count)
        are_distinct = (ordered.diff() > 0).all(-1)
        is_valid = (exist & are_distinct | ~is_token.flatten()).all()
        if not can_read_values(x):
            unread.append(is_valid)
        elif not is_valid:
            chosen = x[is_token.flatten()]
            raise ValueError(
                f"RoutingTape: {name}: choices must be {expected}, got {x.dtype} {list(x.shape)} "
                f"from {int(chosen.min())} to {int(chosen.max())}"
            )
    if unread:
        torch._assert_async(torch.stack(unread).all(), f"RoutingTape: choices must be {expected}")  # noqa: SLF001 (no public name)


# ---------------------------------------------------------------------------------------- multiply


def grouped_linear(rows: Tensor, counts: Tensor, weight: Tensor) -> Tensor:
    """Multiply each row by the weight of its expert.

    It is one grouped multiplication if torch supports it for these tensors (`can_group`), otherwise
    one multiplication per expert.

    Args:
        rows: `[N, D]`, sorted by expert.
        counts: int64 `[E]`, the number of rows of each expert. Their sum is at most N, which cannot
            be checked without waiting for the device; rows beyond it belong to no expert.
        weight: `[E, F, D]`, for each expert a weight of `nn.Linear`; cast to the dtype of the rows.

    Returns:
        `[N, F]`. Rows of no expert are zeros, and their gradient is zero.

    Effects:
        None; a host sync for the counts if there is no grouped multiplication.

    Examples:
        >>> rows, weight = torch.tensor([[1.0], [1.0], [1.0]]), torch.tensor([[[2.0]], [[3.0]]])
        >>> grouped_linear(rows, torch.tensor([1, 1]), weight).flatten().tolist()
        [2.0, 3.0, 0.0]
    """
    # torch leaves rows past the last offset uninitialized, in the result and in the gradient.
    index = torch.arange(len(rows), device=rows.device)
    is_unused = (index >= counts.sum()).unsqueeze(-1)
    product = grouped_product(rows.masked_fill(is_unused, 0), counts, weight)
    return product.masked_fill(is_unused, 0)


def grouped_product(rows: Tensor, counts: Tensor, weight: Tensor) -> Tensor:
    """Compute `grouped_linear` where every row has an expert, which is not checked.

    Examples:
        >>> rows, weight = torch.tensor([[1.0], [1.0]]), torch.tensor([[[2.0]], [[3.0]]])
        >>> grouped_product(rows, torch.tensor([1, 1]), weight).flatten().tolist()
        [2.0, 3.0]
    """
    weight = weight.to(rows.dtype)  # under autocast they may differ
    # The rows past the counts are one more part, for which the result is zero.
    if not can_group(rows, weight):
        sizes = counts.tolist()
        *parts, rest = rows.split([*sizes, len(rows) - sum(sizes)])
        products = [nn.functional.linear(x, w) for x, w in zip(parts, weight, strict=True)]
        return torch.cat([*products, rest.new_zeros(len(rest), weight.shape[1])])
    ends = counts.cumsum(0).to(torch.int32)
    multiply: Any = nn.functional.grouped_mm
    if torch.compiler.is_compiling() and rows.dtype != torch.bfloat16:
        multiply = torch.compiler.disable(multiply)  # torch.compile supports it in bf16 only
    return _Contiguous.apply(multiply(rows, weight.transpose(-2, -1), offs=ends))


class _Contiguous(torch.autograd.Function):
    """The identity with a contiguous gradient, as the grouped multiplication requires."""

    # The output is not a view of the input: FSDP warns of a view at the end of a unit.

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:  # pyrefly: ignore[bad-override]
        return x.detach()

    @staticmethod
    def backward(_: Any, d_x: Tensor) -> Tensor:  # pyrefly: ignore[bad-override]
        return d_x.contiguous()


def can_group(rows: Tensor, weight: Tensor) -> bool:
    """Return whether torch has a grouped multiplication without host sync for these tensors.

    It has one on CPUs in fp32, fp16 and bf16, and on CUDA in bf16 from Hopper on; otherwise it
    reads the offsets on the host. The bytes of a row must be a multiple of 16.

    Examples:
        >>> can_group(torch.ones(2, 8), torch.ones(3, 4, 8))
        True
        >>> can_group(torch.ones(2, 8).double(), torch.ones(3, 4, 8).double())
        False
    """
    is_supported = rows.dtype in (torch.float32, torch.bfloat16, torch.float16)
    if rows.is_cuda:
        is_supported = rows.dtype == torch.bfloat16 and torch.cuda.get_device_capability() >= (9, 0)
    is_aligned = all(size * rows.element_size() % 16 == 0 for size in weight.shape[-2:])
    return is_supported and is_aligned and hasattr(nn.functional, "grouped_mm")


class ExpertWeights(nn.Module):
    """The weights of the MLPs of all experts: `gate` and `up` `[E, F, D]`, `down` `[E, D, F]`.

    By default an expert is a SwiGLU; one that is not gated has no `gate`. With biases there are
    `gate_bias` and `up_bias` `[E, F]`, and `down_bias` `[E, D]`. The weights are
    uninitialized until a `Weights` function fills them.
    """

    def __init__(
        self,
        experts: int,
        width: int,
        inner: int,
        *,
        gated: bool = True,
        activation: Activation = "silu",
        bias: bool = False,
        clamp: float | None = None,
        sigmoid_scale: float | None = None,
    ) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[activation]
        self.clamp = clamp
        self.sigmoid_scale = sigmoid_scale or 1.0
        self.weight_names = ("gate", "up", "down") if gated else ("up", "down")
        if gated:
            self.gate = nn.Parameter(torch.empty(experts, inner, width))
        self.up = nn.Parameter(torch.empty(experts, inner, width))
        self.down = nn.Parameter(torch.empty(experts, width, inner))
        for name in self.weight_names:
            values = torch.empty(getattr(self, name).shape[:2]) if bias else None
            self.register_parameter(
                f"{name}_bias", None if values is None else nn.Parameter(values)
            )

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Map rows `[N, D]`, sorted by expert, to `[N, D]`; every row must have an expert.

        Raises:
            ValueError: The counts are not one for each local expert; or, which is checked only on a
                CPU, do not sum to the number of rows.
        """
        covers_rows = not can_read_values(counts) or int(counts.sum()) == len(rows)
        if len(counts) != len(self.up) or not covers_rows:
            raise ValueError(
                f"ExpertWeights: counts must be those of the {len(self.up)} local experts, and "
                f"sum to the rows; dispatch returned {len(rows)} rows, and counts for "
                f"{len(counts)} experts, {counts.tolist()}"
            )
        device_type = rows.device.type
        if torch.is_autocast_enabled(device_type):
            rows = rows.to(torch.get_autocast_dtype(device_type))
        inner = self._open(self.weight_names[0], rows, counts)
        if "gate" in self.weight_names:
            inner = self._join(inner, self._open("up", rows, counts))
        else:
            inner = self.activation(inner)
        return self._open("down", inner, counts)

    def _join(self, gate: Tensor, up: Tensor) -> Tensor:
        if self.clamp is None:
            return self.activation(gate) * up
        gate = gate.clamp(max=self.clamp)
        up = up.clamp(-self.clamp, self.clamp)
        return (up + 1) * gate * torch.sigmoid(self.sigmoid_scale * gate)

    def _open(self, name: str, rows: Tensor, counts: Tensor) -> Tensor:
        """Return the product with a matrix of each row's expert, and its bias."""
        product = self.product(name, rows, counts)
        bias = getattr(self, f"{name}_bias")
        if bias is None:
            return product
        # In at least fp32, in which the gradients of an expert's rows are then summed.
        bias = bias.to(torch.promote_types(bias.dtype, torch.float32))
        # With the number of rows it does not wait for the device.
        return product + bias.repeat_interleave(counts, 0, output_size=len(rows)).to(product.dtype)

    def needs_keys(self) -> bool:
        """Return whether the forward pass takes a noise key for each row; plain weights do not."""
        return False

    def product(self, name: str, rows: Tensor, counts: Tensor) -> Tensor:
        """Multiply each row of `[N, D]` by the weight `name` of its expert."""
        return grouped_product(rows, counts, getattr(self, name))


# ------------------------------------------------------------------------------------------- layer


class Router(nn.Module):
    """The linear layer that scores experts for each token, and the choice by these scores.

    Two fp32 buffers, which `update_routers_` updates once a step, are saved with the model: `load`,
    each expert's fraction of the choices in the last global batch, and `bias`, which is added to
    its score when experts are chosen.
    """

    load: Tensor
    bias: Tensor | None

    def __init__(self, width: int, experts: Experts) -> None:
        super().__init__()
        self.experts = experts
        self.weight = nn.Parameter(torch.empty(experts.count, width))
        logit_bias = torch.empty(experts.count) if experts.bias else None
        self.logit_bias = None if logit_bias is None else nn.Parameter(logit_bias)
        even = torch.full((experts.count,), 1 / experts.count, dtype=torch.float32)
        self.register_buffer("load", even)
        zeros = torch.zeros(experts.count, dtype=torch.float32) if experts.biased else None
        self.register_buffer("bias", zeros)

    def forward(
        self,
        x: Tensor,
        is_token: Tensor | None,
        indices: Tensor | None,
    ) -> tuple[Routing, Tensor]:
        """Map tokens `[T, D]` to their routing, and to their logits `[T, E]`."""
        # fp32 even under autocast: in bf16 close scores are equal, and ties decide the choice.
        dtype = torch.promote_types(x.dtype, torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            logit_bias = None if self.logit_bias is None else self.logit_bias.to(dtype)
            logits = nn.functional.linear(x.to(dtype), self.weight.to(dtype), logit_bias)
        config = self.experts
        if config.scores == "softmax":
            routing = softmax_topk(
                logits,
                config.top_k,
                renormalize=config.renormalize,
                is_token=is_token,
                indices=indices,
            )
        else:
            routing = biased_topk(
                logits,
                config.top_k,
                scores=config.scores,
                bias=self.bias,
                groups=config.groups,
                groups_chosen=config.groups_chosen,
                renormalize=config.renormalize,
                scale=config.scale,
                is_token=is_token,
                indices=indices,
            )
        return routing, logits


class ExpertMlp(nn.Module):
    """A mixture-of-experts feed-forward layer; `number` is its index among such layers."""

    def __init__(
        self,
        width: int,
        experts: Experts,
        *,
        name: str,
        number: int,
        balance: Balance,
    ) -> None:
        super().__init__()
        self.name = name
        self.number = number
        self.balance = balance
        self.router = Router(width, experts)
        self.experts = ExpertWeights(
            experts.count,
            width,
            experts.width,
            gated=experts.gated,
            activation=experts.activation,
            bias=experts.bias,
            clamp=experts.clamp,
            sigmoid_scale=experts.sigmoid_scale,
        )
        self.shared = Mlp(width, experts.shared, experts.shared_mlp) if experts.shared else None
        self.shared_gate = Linear(width, 1, bias=False) if experts.shared_gate else None
        # `parallel.expert_parallel` replaces these by functions with an axis.
        self.dispatch: Dispatch = ep_dispatch
        self.dispatch_keys: DispatchKeys = ep_dispatch_keys
        self.combine: Combine = ep_combine

    def forward(
        self,
        x: Tensor,
        *,
        spans: Spans,
        is_token: Tensor,
        tape: RoutingTape,
        noise_key: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Map `[B, S, D]` to `[B, S, D]`, and to its row `[3 + E]` of `RoutedOutput.sums`."""
        tokens = x.flatten(0, 1)
        config = self.router.experts
        router_input = tokens
        if noise_key is not None and config.jitter:
            keys = noise_key.flatten()
            router_input = add_jitter(tokens, keys, name=self.name, amount=config.jitter)
        mask = is_token.flatten()
        # Most batches have no padding; if the host can see that, a pass over all scores is saved.
        has_padding = not can_read_values(mask) or not bool(mask.all())
        replayed = tape.choices.get(self.name)
        routing, logits = self.router(router_input, mask if has_padding else None, replayed)
        # Before capacity: a recomputed pass drops the same choices again, since it counts the same.
        tape.choices[self.name] = routing.indices
        limited = routing
        if config.capacity:
            limited = apply_capacity(routing, expert_capacity(routing.counts, config.capacity))
        if config.load_limit:
            limited = scale_by_load(limited, self.router.load, factor=config.load_limit)
        # The tokens themselves: only the router sees the jitter.
        rows, counts, route = self.dispatch(tokens, limited.indices, limited.counts)
        noise: tuple[Tensor, ...] = ()
        if noise_key is not None and self.experts.needs_keys():
            # By token and expert: noise does not depend on which rank has the expert.
            keys = counters.split_keys(noise_key.flatten(), limited.indices)
            noise = (self.dispatch_keys(keys, route),)
        y = self.combine(self.experts(rows, counts, *noise), limited.weights, route).view_as(x)
        if self.shared is not None:
            shared = self.shared(x)
            if self.shared_gate is not None:
                shared = shared * self.shared_gate(x).sigmoid()
            y = y + shared
        # The losses use all choices, dropped ones too: else a full expert would look balanced.
        load = self._compute_load(routing, spans)
        balance = balance_loss_sum(routing, load, experts=config.count)
        if self.number < config.hash_layers:  # no score changes what a hash has chosen
            balance = torch.zeros_like(balance)
        z = (logits.logsumexp(-1).square() * mask).sum()  # ST-MoE's router z-loss, summed
        dropped = (routing.counts - limited.counts).sum().to(z.dtype)
        sums = torch.stack([balance, z, dropped])
        return y, torch.cat([sums, routing.counts.to(z.dtype)])

    def _compute_load(self, routing: Routing, spans: Spans) -> Tensor:
        """Return each expert's fraction of the choices over the tokens that `balance` names."""
        if self.balance == "batch":
            return self.router.load
        # [T, E], 1 where a token chose an expert.
        chosen = torch.zeros_like(routing.shares).detach()
        chosen = torch.cat([chosen, chosen[:, :1]], -1)  # the last one for padding
        chosen = chosen.scatter_(-1, routing.indices, 1)[:, :-1]
        if self.balance == "microbatch":
            counts = routing.counts.to(chosen.dtype)
            return counts / counts.sum().clamp(min=1)
        # One load per document, then repeated for each of its tokens.
        parts = torch.segment_reduce(chosen, "sum", offsets=spans.cu_seqlens.long())
        parts = parts / parts.sum(-1, keepdim=True).clamp(min=1)
        lengths = spans.cu_seqlens.diff()
        return parts.repeat_interleave(lengths, 0, output_size=len(chosen))


def balance_loss_sum(routing: Routing, load: Tensor, *, experts: int) -> Tensor:
    """Balancing loss: E * sum of load_e * share_e over tokens and experts; T for equal loads.

    Its gradient lowers the scores of experts with a high load. `load` has no gradient, so this is a
    sum over tokens, whose denominator is the number of tokens.

    Args:
        routing: The routing of the tokens.
        load: Each expert's fraction of the choices, `[E]`, or for each token `[T, E]`.
        experts: E.

    References:
        Fedus et al., "Switch transformers" (2021), for a microbatch; Qiu et al., "Demons in the
        detail" (2025), for a global batch; DeepSeek-V3 (2024), for a sequence.

    Examples:
        >>> routing = softmax_topk(torch.zeros(3, 4), 1)
        >>> balance_loss_sum(routing, torch.full((4,), 0.25), experts=4)
        tensor(3.)
    """
    check_range("balance_loss_sum", at_least=1, experts=experts)
    return experts * (routing.shares * load).sum()


def check_whole_documents(module: nn.Module, by: str) -> None:
    """Check that no experts are balanced per document, where documents are sharded over ranks.

    Raises:
        ConfigError: A layer of the module balances by "document".
    """
    layers = [x for x in module.modules() if isinstance(x, ExpertMlp) and x.balance == "document"]
    if layers:
        raise ConfigError(
            f'{by}: {layers[0].name} balances its experts by "document", but each rank would see '
            'only a part of one; use balance="batch", or do not shard sequences',
            where="balance",
            got="document",
        )


# ------------------------------------------------------------------------------------------ update


def update_expert_bias(bias: Tensor, counts: Tensor, *, rate: float | Tensor) -> Tensor:
    """Raise the biases of experts below the mean count by `rate`, and lower those above it.

    Args:
        bias: fp32 `[..., E]`.
        counts: The number of choices of each expert in the global batch, `[..., E]`.
        rate: The change of a bias, 0.001 for instance; at least 0.

    Raises:
        ValueError: `rate` is a number below 0, or not finite.

    References:
        Wang et al., "Auxiliary-loss-free load balancing" (2024).

    Examples:
        >>> update_expert_bias(torch.zeros(3), torch.tensor([4, 1, 1]), rate=0.5)
        tensor([-0.5000,  0.5000,  0.5000])
    """
    if not isinstance(rate, Tensor):
        check_range("update_expert_bias", at_least=0, rate=rate)
    counts = counts.to(torch.float64)
    # 1 for an expert that is chosen too rarely, -1 for one that is chosen too often.
    direction = (counts.mean(-1, keepdim=True) - counts).sign()
    return bias + rate * direction.to(bias.dtype)


@torch.no_grad()
def update_routers_(
    stages: Iterable[nn.Module],
    counts: Tensor,
    *,
    rate: float,
    applied: Tensor | bool = True,
) -> Tensor:
    """Update the loads and biases of a model's routers from the choices of a step, once a step.

    Args:
        stages: This rank's stages of the model.
        counts: `[L, E]`, for all expert layers of the whole model, summed over the microbatches and
            over all ranks that hold distinct tokens: the term "load" of `losses.add_router_losses`.
        rate: The change of biases; see `update_expert_bias`. 0 leaves them unchanged.
        applied: Whether the step was taken; otherwise nothing changes.

    Returns:
        The new biases, fp32 `[L, E]`: 0 for layers of other stages, so that a sum over the pipeline
        has all of them, and for routers without biases.

    Effects:
        Writes the buffers `load` and `bias` of every `Router` in the stages. No host sync.

    Raises:
        ValueError: `counts` has another shape, `rate` is below 0 or not finite, or the buffers are
            in 16 bits, where small changes would be lost.

    Examples:
        >>> experts = Experts(count=4, top_k=2, width=8, scores="sigmoid", biased=True)
        >>> layer = ExpertMlp(8, experts, name="layers.0.mlp", number=0, balance="batch")
        >>> update_routers_([layer], torch.tensor([[6, 0, 1, 1]]), rate=0.01)
        tensor([[-0.0100,  0.0100,  0.0100,  0.0100]])
        >>> layer.router.load
        tensor([0.7500, 0.0000, 0.1250, 0.1250])
    """
    check_range("update_routers_", at_least=0, rate=rate)
    biases = torch.zeros(counts.shape, dtype=torch.float32, device=counts.device)
    layers = [x for stage in stages for x in stage.modules() if isinstance(x, ExpertMlp)]
    for layer in layers:
        # A stage has some of the layers; `number` is the row in the counts of all of them.
        router = layer.router
        experts = len(router.load)
        if counts.ndim != 2 or layer.number >= len(counts) or counts.shape[1] != experts:
            raise ValueError(
                f"update_routers_: counts must be [L, {experts}] with L above {layer.number}, for "
                f"{layer.name}, got {tuple(counts.shape)}"
            )
        if router.load.itemsize < 4:
            raise ValueError(
                f"update_routers_: the routers' buffers are {router.load.dtype}, in which small "
                "changes are lost; use fp32"
            )
        layer_counts = counts[layer.number]
        if isinstance(applied, bool):
            applied = torch.full((), applied, device=layer_counts.device)
        # `where` and no `if`: `applied` may be on the device, and reading it would be a host sync.
        load = layer_counts / layer_counts.sum().clamp(min=1)
        load = load.to(router.load.dtype)
        router.load.copy_(torch.where(applied, load, router.load))
        if router.bias is not None:
            bias = update_expert_bias(router.bias, layer_counts, rate=rate)
            router.bias.copy_(torch.where(applied, bias, router.bias))
            biases[layer.number] = router.bias
    return biases
