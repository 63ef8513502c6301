"""Feed-forward layers of experts: each token goes through the few that a router chooses for it.

Tokens are put in the order of their experts (`dispatch`), so that one grouped matrix multiplication
serves all experts at once. Everything a layer counts is an output.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from trainkit.batch.denominators import can_read_values
from trainkit.models.call import RoutingTape
from trainkit.models.config import Experts
from trainkit.models.dispatch import (
    Combine,
    Dispatch,
    DispatchKeys,
    ep_combine,
    ep_dispatch,
    ep_dispatch_keys,
)
from trainkit.models.layers import Mlp
from trainkit.models.routers import (
    Routing,
    add_jitter,
    apply_capacity,
    expert_capacity,
    sigmoid_topk,
    softmax_topk,
)
from trainkit.noise import counters
from trainkit.types import ConfigError, Spans, check_range

Balance = Literal["batch", "microbatch", "document"]
"""Over what `balance` compares how often experts are chosen with how much they are wanted: the last
step's global batch, which is the same in every layout; the microbatch of a rank, which by its
nature is not; or each document."""


def preload_(tape: RoutingTape, layers: Sequence[str], choices: Tensor) -> None:
    """Write choices that came with a batch to its tape.

    Args:
        tape: The tape of the batch.
        layers: The names of all expert layers of the model, in their order.
        choices: int64 `[B, S, L, k]`, those of an inference engine, say; or `[B, S, L k]`, as a
            column of a corpus has them.

    Raises:
        ValueError: They are of another number of layers.

    Effects:
        Writes to the tape, in place of what stands there.

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
        got, own = list(choices.shape), len(layers)
        raise ValueError(
            f"RoutingTape: choices must be [B, S, {own}, k], for {own} layers, got {got}"
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
    """Refuse a tape that was filled beforehand and is not one of these layers and tokens.

    Args:
        tape: The tape; an empty one is right.
        layers: The names of all expert layers of the model.
        experts: What may be chosen.
        is_token: bool, one for each token; what padding chose is not looked at.
        own: Those of the layers that will read the tape, a pipeline stage's; by default all.

    Raises:
        ValueError: A layer is missing or unknown, or a choice is none of the experts, or made
            twice. On a GPU, where the host would have to wait to tell which, a kernel looks at
            the choices, before any that uses them.
        RuntimeError: There, later: the kernel found a choice that is wrong, and the process has to
            end.

    Effects:
        None on a CPU. On a GPU queues kernels and one assertion, without a host sync.

    Examples:
        >>> how, tape = (
        ...     Experts(count=4, chosen=2, width=8),
        ...     RoutingTape({"0": torch.tensor([[0, 9]])}),
        ... )
        >>> check_tape(tape, ["0"], how, is_token=torch.tensor([True]))
        Traceback (most recent call last):
        ...
        ValueError: RoutingTape: 0: choices must be int64 [1, 2], of each token distinct ...
    """
    has, wanted = {*tape.choices}, {*(layers if own is None else own)}
    if has and (has - {*layers} or wanted - has):
        got, want = ", ".join(tape.choices), ", ".join(layers)
        raise ValueError(
            f"RoutingTape: it has the choices of {got}; the model's expert layers are {want}"
        )
    shape = is_token.numel(), experts.chosen
    want = f"int64 {list(shape)}, of each token distinct ones in [0, {experts.count})"
    unread: list[Tensor] = []
    for name, x in tape.choices.items():
        got = f"{x.dtype} {list(x.shape)}"
        if fits := x.dtype == torch.int64 and x.shape == shape:
            right = _are_distinct(x, is_token.flatten(), experts.count)
            if not can_read_values(x):
                unread.append(right)
            elif not right:
                fits, seen = False, x[is_token.flatten()]
                got = f"{got} from {int(seen.min())} to {int(seen.max())}"
        if not fits:
            raise ValueError(f"RoutingTape: {name}: choices must be {want}, got {got}")
    if unread:
        torch._assert_async(torch.stack(unread).all(), f"RoutingTape: choices must be {want}")  # noqa: SLF001 (no public name)


def _are_distinct(choices: Tensor, is_token: Tensor, experts: int) -> Tensor:
    """Return a bool: whether each token chose experts that there are, none of them twice."""
    chosen = choices.sort().values
    exist = (chosen[:, 0] >= 0) & (chosen[:, -1] < experts)
    return (exist & (chosen.diff() > 0).all(-1) | ~is_token).all()


# ---------------------------------------------------------------------------------------- multiply


def grouped_linear(rows: Tensor, counts: Tensor, weight: Tensor) -> Tensor:
    """Multiply rows with the weights of the experts that they go to.

    One grouped multiplication where torch has one for these tensors (`can_group`), else one
    multiplication per expert.

    Args:
        rows: `[N, D]`, those of the first expert first.
        counts: int64 `[E]`, how many rows each expert has, together at most N, which cannot be
            checked without waiting for the device. Rows beyond their sum are nobody's.
        weight: `[E, F, D]`, for each expert what `nn.Linear` has; taken in the dtype of the rows.

    Returns:
        `[N, F]`. Rows that are nobody's are zeros, and get a gradient of zero.

    Effects:
        None, but without the grouped multiplication a host sync for the counts.

    Examples:
        >>> rows, weight = torch.tensor([[1.0], [1.0], [1.0]]), torch.tensor([[[2.0]], [[3.0]]])
        >>> grouped_linear(rows, torch.tensor([1, 1]), weight).flatten().tolist()
        [2.0, 3.0, 0.0]
    """
    # torch leaves rows past the last offset uninitialised, in the result and in the gradient.
    is_nobodys = (torch.arange(len(rows), device=rows.device) >= counts.sum()).unsqueeze(-1)
    product = grouped_product(rows.masked_fill(is_nobodys, 0), counts, weight)
    return product.masked_fill(is_nobodys, 0)


def grouped_product(rows: Tensor, counts: Tensor, weight: Tensor) -> Tensor:
    """Return `grouped_linear` of rows that are all somebody's, which is not looked at.

    Examples:
        >>> rows, weight = torch.tensor([[1.0], [1.0]]), torch.tensor([[[2.0]], [[3.0]]])
        >>> grouped_product(rows, torch.tensor([1, 1]), weight).flatten().tolist()
        [2.0, 3.0]
    """
    weight = weight.to(rows.dtype)  # under autocast they may differ
    if not can_group(rows, weight):
        return _one_by_one(rows, counts, weight)
    ends = counts.cumsum(0).to(torch.int32)
    multiply: Any = nn.functional.grouped_mm
    if torch.compiler.is_compiling() and rows.dtype != torch.bfloat16:
        multiply = torch.compiler.disable(multiply)  # torch knows the shapes of bf16 alone
    return _Contiguous.apply(multiply(rows, weight.transpose(-2, -1), offs=ends))


class _Contiguous(torch.autograd.Function):
    """The identity, and no view, which FSDP warns of at the end of a unit.

    Its gradient is contiguous, which the grouped multiplication needs.
    """

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:  # pyrefly: ignore[bad-override]
        return x.detach()

    @staticmethod
    def backward(_: Any, d_x: Tensor) -> Tensor:  # pyrefly: ignore[bad-override]
        return d_x.contiguous()


def can_group(rows: Tensor, weight: Tensor) -> bool:
    """Say whether torch multiplies these rows and experts at once, without a host sync.

    On a CPU it does in fp32, fp16 and bf16, on CUDA in bf16 from Hopper on (in other dtypes, and on
    other devices, it reads the offsets on the host); rows must be of whole 16 bytes.

    Examples:
        >>> can_group(torch.ones(2, 8), torch.ones(3, 4, 8))
        True
        >>> can_group(torch.ones(2, 8).double(), torch.ones(3, 4, 8).double())
        False
    """
    grouped = rows.dtype in (torch.float32, torch.bfloat16, torch.float16)
    if rows.is_cuda:
        grouped = rows.dtype == torch.bfloat16 and torch.cuda.get_device_capability() >= (9, 0)
    sizes = weight.shape[-2:]
    whole = all(size * rows.element_size() % 16 == 0 for size in sizes)
    return grouped and whole and hasattr(nn.functional, "grouped_mm")


def _one_by_one(rows: Tensor, counts: Tensor, weight: Tensor) -> Tensor:
    sizes = counts.tolist()
    *parts, rest = rows.split([*sizes, len(rows) - sum(sizes)])
    products = [nn.functional.linear(x, w) for x, w in zip(parts, weight, strict=True)]
    return torch.cat([*products, rest.new_zeros(len(rest), weight.shape[1])])


class ExpertWeights(nn.Module):
    """The SwiGLUs of all experts, packed: `gate` and `up` `[E, F, D]`, `down` `[E, D, F]`.

    Their memory is uninitialised until a `Weights` function fills it.
    """

    def __init__(self, experts: int, width: int, inner: int) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.empty(experts, inner, width))
        self.up = nn.Parameter(torch.empty(experts, inner, width))
        self.down = nn.Parameter(torch.empty(experts, width, inner))

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Map rows `[N, D]` in the order of their experts to `[N, D]`; all must be somebody's.

        Raises:
            ValueError: Counts are not those of the experts held here; or, which is looked at on a
                CPU alone, do not sum to the rows.
        """
        of_all = not can_read_values(counts) or int(counts.sum()) == len(rows)
        if len(counts) != len(self.gate) or not of_all:
            got = f"{len(rows)} rows, and counts for {len(counts)} experts, {counts.tolist()}"
            want = f"of the {len(self.gate)} that are here, which sum to the rows"
            raise ValueError(f"ExpertWeights: counts must be those {want}; dispatch gave {got}")
        kind = rows.device.type
        if torch.is_autocast_enabled(kind):
            rows = rows.to(torch.get_autocast_dtype(kind))
        gate = nn.functional.silu(self.product("gate", rows, counts))
        return self.product("down", gate * self.product("up", rows, counts), counts)

    def needs_keys(self) -> bool:
        """Say whether the forward pass takes a noise key for each row; plain weights' does not."""
        return False

    def product(self, name: str, rows: Tensor, counts: Tensor) -> Tensor:
        """Multiply rows `[N, D]` with the weights of that name of the experts that they go to."""
        return grouped_product(rows, counts, getattr(self, name))


# ------------------------------------------------------------------------------------------- layer


class Router(nn.Module):
    """Scores experts for each token.

    `load` and `bias` are fp32 buffers, which `update_routers_` moves once a step, and which are
    saved with a model: what share of the choices each expert had in the last global batch, and what
    is added to its score when experts are chosen.
    """

    load: Tensor
    bias: Tensor | None

    def __init__(self, width: int, experts: Experts) -> None:
        super().__init__()
        self.experts = experts
        self.weight = nn.Parameter(torch.empty(experts.count, width))
        even = torch.full((experts.count,), 1 / experts.count, dtype=torch.float32)
        self.register_buffer("load", even)
        zeros = torch.zeros(experts.count, dtype=torch.float32) if experts.biased else None
        self.register_buffer("bias", zeros)

    def forward(
        self, x: Tensor, is_token: Tensor | None, indices: Tensor | None
    ) -> tuple[Routing, Tensor]:
        """Map tokens `[T, D]` to what is decided for them, and to their logits `[T, E]`."""
        wide = torch.promote_types(x.dtype, torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            logits = nn.functional.linear(x.to(wide), self.weight.to(wide))
        how = self.experts
        given: dict[str, Any] = {"is_token": is_token, "indices": indices}
        given["renormalise"] = how.renormalise
        if how.scores == "softmax":
            return softmax_topk(logits, how.chosen, **given), logits
        groups = {"groups": how.groups, "groups_chosen": how.groups_chosen}
        given |= {"bias": self.bias, "scale": how.scale, **groups}
        return sigmoid_topk(logits, how.chosen, **given), logits


class ExpertMlp(nn.Module):
    """A feed-forward layer of experts; `number` counts such layers in the whole model."""

    def __init__(
        self, width: int, experts: Experts, *, name: str, number: int, balance: Balance
    ) -> None:
        super().__init__()
        self.name, self.number, self.balance = name, number, balance
        self.router = Router(width, experts)
        self.experts = ExpertWeights(experts.count, width, experts.width)
        self.shared = Mlp(width, experts.shared) if experts.shared else None
        self.dispatch: Dispatch = ep_dispatch  # `parallel.expert_parallel` binds an axis
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
        """Map `[B, S, D]` to `[B, S, D]` and to the layer's row `[3 + E]` of `Routed.sums`."""
        tokens, how = x.flatten(0, 1), self.router.experts
        seen, known = tokens, tape.choices.get(self.name)
        if noise_key is not None and how.jitter:
            seen = add_jitter(tokens, noise_key.flatten(), name=self.name, amount=how.jitter)
        places = is_token.flatten()
        # Most batches have no padding, and a pass over all scores is saved where that can be seen.
        padded = not can_read_values(places) or not bool(places.all())
        routing, logits = self.router(seen, places if padded else None, known)
        tape.choices[self.name] = routing.indices
        kept = (
            apply_capacity(routing, expert_capacity(routing.counts, how.capacity))
            if how.capacity
            else routing
        )
        rows, counts, route = self.dispatch(tokens, kept.indices, kept.counts)
        noise: tuple[Tensor, ...] = ()
        if noise_key is not None and self.experts.needs_keys():
            keys = counters.split_keys(noise_key.flatten(), kept.indices)
            noise = (self.dispatch_keys(keys, route),)
        y = self.combine(self.experts(rows, counts, *noise), kept.weights, route).view_as(x)
        if self.shared is not None:
            y = y + self.shared(x)
        balance = balance_loss_sum(routing, self._load(routing, spans), experts=how.count)
        z = (logits.logsumexp(-1).square() * places).sum()
        dropped = (routing.counts - kept.counts).sum().to(z.dtype)
        return y, torch.cat([torch.stack([balance, z, dropped]), routing.counts.to(z.dtype)])

    def _load(self, routing: Routing, spans: Spans) -> Tensor:
        """Return which part of the choices each expert had where `balance` looks."""
        if self.balance == "batch":
            return self.router.load
        chosen = torch.zeros_like(routing.shares).detach()
        chosen = torch.cat([chosen, chosen[:, :1]], -1)  # the last one for padding
        chosen = chosen.scatter_(-1, routing.indices, 1)[:, :-1]
        if self.balance == "microbatch":
            counts = routing.counts.to(chosen.dtype)
            return counts / counts.sum().clamp(min=1)
        parts = torch.segment_reduce(chosen, "sum", offsets=spans.cu_seqlens.long())
        parts = parts / parts.sum(-1, keepdim=True).clamp(min=1)
        lengths = spans.cu_seqlens.diff()
        return parts.repeat_interleave(lengths, 0, output_size=len(chosen))


def balance_loss_sum(routing: Routing, load: Tensor, *, experts: int) -> Tensor:
    """Return E * sum of load_e * share_e over tokens and experts: T where all have the same load.

    Its gradient makes experts that are chosen often be wanted less. `load` has none, so this is a
    sum over tokens like a loss, whose denominator is the number of tokens.

    Args:
        routing: What a router decided.
        load: Which part of the choices each expert has, `[E]`, or for each token `[T, E]`.
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
    """Refuse to cut documents over ranks where experts are balanced within each.

    Raises:
        ConfigError: A layer of the module balances by "document".
    """
    found = [x for x in module.modules() if isinstance(x, ExpertMlp) and x.balance == "document"]
    if found:
        raise ConfigError(
            f'{by}: {found[0].name} balances its experts by "document", and ranks would each see a '
            'part of one; take balance="batch", or leave sequences whole',
            where="balance",
            got="document",
        )


# --------------------------------------------------------------------------------------- advancing


def update_expert_bias(bias: Tensor, counts: Tensor, *, rate: float | Tensor) -> Tensor:
    """Return biases that make experts be chosen more often if they were too little, and less if.

    Args:
        bias: fp32 `[..., E]`.
        counts: How often each expert was chosen in the whole global batch, `[..., E]`.
        rate: By how much a bias moves, 0.001 for instance; at least 0.

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
    return bias + rate * (counts.mean(-1, keepdim=True) - counts).sign().to(bias.dtype)


@torch.no_grad()
def update_routers_(
    stages: Iterable[nn.Module], counts: Tensor, *, rate: float, applied: Tensor | bool = True
) -> Tensor:
    """Tell the routers of a model how often their experts were chosen in a step, once a step.

    Args:
        stages: This rank's stages of the model.
        counts: `[L, E]`, for all expert layers of the whole model, summed over the microbatches and
            over all ranks that hold distinct tokens: the term "load" of `losses.add_router_losses`.
        rate: By how much biases move; see `update_expert_bias`. 0 leaves them.
        applied: Whether the step was taken; otherwise nothing moves.

    Returns:
        The biases from here on, fp32 `[L, E]`: 0 for layers of other stages, so that a sum over
        the pipeline has all of them, and for routers without.

    Effects:
        Writes the buffers `load` and `bias` of every `Router` in the stages. No host sync.

    Raises:
        ValueError: `counts` is not as above, `rate` is below 0 or not finite, or biases are in 16
            bits, where it would be lost.

    Examples:
        >>> experts = Experts(count=4, chosen=2, width=8, scores="sigmoid", biased=True)
        >>> layer = ExpertMlp(8, experts, name="layers.0.mlp", number=0, balance="batch")
        >>> update_routers_([layer], torch.tensor([[6, 0, 1, 1]]), rate=0.01)
        tensor([[-0.0100,  0.0100,  0.0100,  0.0100]])
        >>> layer.router.load
        tensor([0.7500, 0.0000, 0.1250, 0.1250])
    """
    check_range("update_routers_", at_least=0, rate=rate)
    biases = torch.zeros(counts.shape, dtype=torch.float32, device=counts.device)
    for layer in (x for stage in stages for x in stage.modules() if isinstance(x, ExpertMlp)):
        router, experts = layer.router, len(layer.router.load)
        if counts.ndim != 2 or layer.number >= len(counts) or counts.shape[1] != experts:
            want = f"[L, {experts}] with L above {layer.number}, for {layer.name}"
            got = tuple(counts.shape)
            raise ValueError(f"update_routers_: counts must be {want}, got {got}")
        if router.load.itemsize < 4:
            what = f"the routers' buffers are {router.load.dtype}, which loses small moves"
            raise ValueError(f"update_routers_: {what}; keep them in fp32")
        own = counts[layer.number]
        if isinstance(applied, bool):
            applied = torch.full((), applied, device=own.device)
        load = (own / own.sum().clamp(min=1)).to(router.load.dtype)
        router.load.copy_(torch.where(applied, load, router.load))
        if router.bias is not None:
            moved = update_expert_bias(router.bias, own, rate=rate)
            router.bias.copy_(torch.where(applied, moved, router.bias))
            biases[layer.number] = router.bias
    return biases
