"""One readable decoder for the Llama, Qwen3, Gemma, OLMo 2, GPT-2 and DeepSeek-V3 families.

Plain it is RMSNorms before each half of a block, rotary embeddings, grouped-query or latent
attention, SwiGLU or experts; what a family does otherwise is an option of `DecoderConfig`. Names,
shapes and the half-split rotary convention are such that Hugging Face weights load without
permuting (but for DeepSeek's rotary pairs, which are neighbours). A model holds parameters, and no
buffers but its routers', so it is built on the meta device and filled box by box; the kernel of its
attention is an argument.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, ClassVar, Literal, cast, get_args

import torch
from torch import Tensor, nn

from trainkit.attention.varlen import varlen
from trainkit.losses.softmax import gather_words, make_vocabulary_axis
from trainkit.models.call import RoutingTape
from trainkit.models.config import DecoderConfig
from trainkit.models.experts import Balance, ExpertMlp, check_tape, preload_
from trainkit.models.init_weights import init_weights
from trainkit.models.kv_cache import KVCache
from trainkit.models.latent_attention import LatentAttention
from trainkit.models.layers import Embedding, Joined, Linear, Mlp, WideNorm, make_norm
from trainkit.models.rotary import Table, rotary_frequencies, rotary_table, rotated
from trainkit.noise import counters
from trainkit.types import (
    Attend,
    Hidden,
    RoutedOutput,
    Spans,
    apply_softcap,
    check_choice,
    drop_routing,
)


class Head(Linear):
    """The output projection: logits, or what a fused linear cross entropy needs in place of them.

    Even for `output="hidden"` the weight is read inside a forward of its own module, which is where
    FSDP gathers it.
    """

    def __init__(
        self,
        width: int,
        vocab_size: int,
        *,
        output: Literal["logits", "hidden"],
        softcap: float | None,
    ) -> None:
        super().__init__(width, vocab_size, bias=False)
        self.output, self.softcap = output, softcap

    def forward(  # pyrefly: ignore[bad-override-param-name]
        self, hidden: Tensor
    ) -> Tensor | Hidden:
        """Map hidden states `[B, S, D]` to logits, or to a `Hidden`."""
        return project(hidden, self.weight, output=self.output, softcap=self.softcap)


def project(
    hidden: Tensor,
    weight: Tensor,
    *,
    output: Literal["logits", "hidden"],
    softcap: float | None = None,
) -> Tensor | Hidden:
    """Return logits `[B, S, V]` of hidden states `[B, S, D]` and a weight `[V, D]`, or a `Hidden`.

    Examples:
        >>> project(torch.ones(1, 2, 4), torch.ones(8, 4), output="hidden").weight.shape
        torch.Size([8, 4])
    """
    if hasattr(weight, "to_local"):  # tensor parallel: this rank's part of the vocabulary
        weight = weight.to_local()
    if output == "logits":
        return apply_softcap(nn.functional.linear(hidden, weight), softcap)
    return Hidden(hidden, _PassedOn.apply(weight), softcap=softcap)


def whole_logits(output: Tensor | tuple[Any, ...]) -> Tensor:
    """Return logits `[B, S, V]` of logits, of a `Hidden`, or of a `RoutedOutput` of either.

    Examples:
        >>> whole_logits(Hidden(torch.ones(1, 2, 4), torch.ones(8, 4))).shape
        torch.Size([1, 2, 8])
    """
    output = drop_routing(output)
    if isinstance(output, Tensor):
        return output
    hidden, weight, axis, softcap = Hidden(*output)
    own = apply_softcap(nn.functional.linear(hidden, weight), softcap)
    return gather_words(own, make_vocabulary_axis(weight, axis))


class _PassedOn(torch.autograd.Function):
    """A tensor and its gradient, unchanged, as a tensor that is neither a leaf nor a view.

    FSDP2 (torch from 2.11 on) registers a backward hook on every tensor that a module returns: on a
    parameter itself hooks would pile up, one per call, and a view makes 2.13 warn.
    """

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:  # pyrefly: ignore[bad-override]
        return x.detach()

    @staticmethod
    def backward(_: Any, d_x: Tensor) -> Tensor:  # pyrefly: ignore[bad-override]
        return d_x


class Attention(nn.Module):
    """Grouped-query attention, with rotary positions if it is given their table.

    The number of heads follows from the rows of the weights, so it may hold a shard of them.
    """

    joined: ClassVar[Joined] = {"projected": ("wq", "wk", "wv")}

    def __init__(self, config: DecoderConfig, *, attend: Attend, window: int | None) -> None:
        super().__init__()
        size, bias = config.head_size, config.qkv_bias
        self.head_size, self.attend, self.scale = size, attend, config.score_scale
        self.window, self.softcap = window, config.score_softcap
        self.wq = Linear(config.width, config.heads * size, bias=bias)
        self.wk = Linear(config.width, config.kv_heads * size, bias=bias)
        self.wv = Linear(config.width, config.kv_heads * size, bias=bias)
        self.wo = Linear(config.heads * size, config.width, bias=config.out_bias)
        self.qk_norm = config.qk_norm
        self.q_norm, self.k_norm = _norms_of_heads(config)

    def forward(
        self,
        x: Tensor,
        *,
        rotary: Table | None,
        spans: Spans,
        attend: Attend | None = None,
    ) -> Tensor:
        """Map `[B, S, D]` to `[B, S, D]`; `attend`, a cache's, takes the place of its own."""
        q, k, v = self.projected(x)
        if self.qk_norm == "wide":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (part.unflatten(-1, (-1, self.head_size)) for part in (q, k, v))
        if self.qk_norm and self.qk_norm != "wide":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotated(q, k, rotary)
        how = {"scale": self.scale, "window": self.window, "softcap": self.softcap}
        return self.wo((attend or self.attend)(q, k, v, spans=spans, **how).flatten(2))

    def projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries `[B, S, H D]`, keys and values `[B, S, K D]`."""
        return self.wq(x), self.wk(x), self.wv(x)


def _norms_of_heads(config: DecoderConfig) -> tuple[nn.Module, nn.Module]:
    """Return what normalises queries and keys."""
    size = config.head_size
    if config.qk_norm == "wide":
        sizes = config.heads * size, config.kv_heads * size
        return WideNorm(sizes[0], config.norm_eps), WideNorm(sizes[1], config.norm_eps)
    if config.qk_norm:
        return make_norm(config, size), make_norm(config, size)
    return nn.Identity(), nn.Identity()


class Block(nn.Module):
    """One layer: attention and an MLP, each on a normalised copy of the residual stream.

    What comes out of each may be normalised too, or alone; `Norms` says. `name` is the layer's name
    in the whole model ("layers.17"): dropout depends on it, so it stays when a pipeline stage holds
    only some of the layers.
    """

    def __init__(self, config: DecoderConfig, *, attend: Attend, name: str, mlp: nn.Module) -> None:
        super().__init__()
        self.name, self.dropout = name, config.dropout
        self.slides = int(name.rpartition(".")[2]) in config.sliding_layers
        window = config.sliding.window if config.sliding and self.slides else None
        before, after = (
            partial(make_norm, config, config.width) if wanted else nn.Identity
            for wanted in (config.how_normed.before, config.how_normed.after)
        )
        self.normed_after = config.how_normed.after
        self.attention_norm = before()
        kind = Attention if config.latents is None else LatentAttention
        self.attention = kind(config, attend=attend, window=window)
        self.attention_out_norm = after()
        self.mlp_norm = before()
        self.mlp = mlp
        self.mlp_out_norm = after()
        # Whose results a sum alone takes, which asks for none of them in backward.
        plain = isinstance(mlp, Mlp) and not (self.normed_after or self.dropout)
        self.only_added = ("mlp.down",) if plain else ()

    def forward(
        self,
        x: Tensor,
        *,
        rotary: tuple[Table | None, Table | None],
        spans: Spans,
        noise_key: Tensor | None = None,
        is_token: Tensor | None = None,
        tape: RoutingTape | None = None,
        cache: KVCache | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Map `[B, S, D]` to `[B, S, D]`; without a `noise_key` nothing is dropped.

        `rotary` is the table of layers that see all, and that of layers that slide. With experts it
        also returns the layer's row of `Routed.sums`.
        """
        attend = None if cache is None else cache.attend(self.name)
        table = rotary[1] if self.slides else rotary[0]
        branch = self.attention(self.attention_norm(x), rotary=table, spans=spans, attend=attend)
        if self.normed_after:
            branch = self.attention_out_norm(branch)
        x = x + _drop(branch, noise_key, of=self, name="attention", p=self.dropout)
        normal = self.mlp_norm(x)
        if not isinstance(self.mlp, ExpertMlp):
            branch = self.mlp(normal)
            if self.normed_after:
                branch = self.mlp_out_norm(branch)
            return x + _drop(branch, noise_key, of=self, name="mlp", p=self.dropout)
        # Tokens go to experts in numbers that no compiler knows.
        apart = torch.compiler.is_compiling()
        through = torch.compiler.disable(_through_experts) if apart else _through_experts
        known = {"spans": spans, "is_token": is_token, "tape": tape, "noise_key": noise_key}
        branch, sums = through(self.mlp, normal, known)
        branch = self.mlp_out_norm(branch)
        return x + _drop(branch, noise_key, of=self, name="mlp", p=self.dropout), sums


def _through_experts(mlp: ExpertMlp, x: Tensor, known: dict[str, Any]) -> tuple[Tensor, Tensor]:
    return mlp(x, **known)


def _drop(x: Tensor, noise_key: Tensor | None, *, of: Block | None, name: str, p: float) -> Tensor:
    """Drop features of the residual stream, of which every rank has all."""
    if noise_key is None or p == 0:
        return x
    if torch.compiler.is_compiling():
        # Hashing the name cannot be traced: torch 2.13 fails on the 64-bit key it would guard. And
        # a name that is put together while tracing is compiled anew for every layer.
        return torch.compiler.disable(_dropped)(x, noise_key, of, name, p)
    return _dropped(x, noise_key, of, name, p)


def _dropped(x: Tensor, noise_key: Tensor, of: Block | None, name: str, p: float) -> Tensor:
    whole = name if of is None else f"{of.name}.{name}"
    return counters.dropout(x, noise_key, name=whole, p=p, width=x.shape[-1])


class Decoder(nn.Module):
    """A decoder-only language model.

    Its values are uninitialised memory until a `Weights` function fills them: `build_decoder` does
    both.

    Args:
        config: The architecture.
        attend: The attention kernel.
        head: "logits" to return logits, whole in every layout; "hidden" to return a `Hidden`, which
            `losses.next_token_linear` takes in every layout.
        balance: Over what experts are balanced; see `experts.Balance`.

    Examples:
        >>> config = DecoderConfig(
        ...     vocab_size=259, width=64, layers=2, heads=4, kv_heads=2, mlp_width=128
        ... )
        >>> with torch.device("meta"):
        ...     model = Decoder(config)
        >>> [name for name, _ in model.named_parameters()][:2]
        ['embedding.weight', 'layers.0.attention_norm.weight']
    """

    constant = ("frequencies",)  # see `bare`

    def __init__(
        self,
        config: DecoderConfig,
        *,
        attend: Attend = varlen,
        head: Literal["logits", "hidden"] = "logits",
        balance: Balance = "batch",
    ) -> None:
        super().__init__()
        check_choice(("logits", "hidden"), "Decoder", head=head)
        check_choice(get_args(Balance), "Decoder", balance=balance)
        self.config = config
        self.output: Literal["logits", "hidden"] = head
        # What a pipeline stage does not own is None: only the first embeds, only the last projects.
        self.embeds = True
        self.sequence_parts = 1  # tensor parallelism sets it to the parts S is cut into in blocks
        self.embedding: Embedding | None = Embedding(config.vocab_size, config.width)
        learned = config.positions
        self.positions = None if learned is None else Embedding(learned, config.width)
        # Keyed by the layer's number, so that a pipeline stage's layers keep their names.
        self.layers = nn.ModuleDict(
            {
                str(i): Block(config, attend=attend, name=f"layers.{i}", mlp=mlp)
                for i, mlp in enumerate(_mlps(config, balance))
            }
        )
        self.norm: nn.Module | None = make_norm(config, config.width)
        how: dict[str, Any] = {"output": head, "softcap": config.logit_softcap}
        self.head = None if config.tied else Head(config.width, config.vocab_size, **how)

    def forward(
        self,
        input_ids: Tensor,
        *,
        position_ids: Tensor,
        spans: Spans,
        noise_key: Tensor | None = None,
        is_token: Tensor | None = None,
        tape: RoutingTape | None = None,
        choices: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Tensor | Hidden | RoutedOutput:
        """Return logits `[B, S, V]`, or a `Hidden` of hidden states `[B, S, D]` and a weight.

        With experts it is a `RoutedOutput` of one of these.

        Args:
            input_ids: int64 `[B, S]`; for a pipeline stage after the first, the hidden states `[B,
                S, D]` that it receives, or a `RoutedOutput` of them. A stage before the last
                returns such.
            position_ids: int64 `[B, S]`, the position of each token in its document.
            spans: The documents, over the flattened rows.
            noise_key: int64 `[B, S]`, from `noise.make_token_keys`; needed only for dropout, and
                for the jitter of routers, while training.
            is_token: bool `[B, S]`, False for padding, which goes to no expert; needed with
                experts.
            tape: The choices of the expert layers; by default a new one.
            choices: int64 `[B, S, L, k]`, choices that came with the batch, for all L expert layers
                of the model; they are written to the tape.
            cache: The keys and values of the tokens before; then the batch is one row, [1, S], and
                there are logits `[1, R, V]` for the last token of each of the cache's rows.

        Raises:
            ValueError: Dropout or jitter is on, the model is training, and there is no `noise_key`;
                or there are experts and no `is_token`.
        """
        noise_key = self._noise_key_in_use(noise_key)
        x, *before = input_ids if isinstance(input_ids, tuple) else (input_ids,)
        x = self._embedded(x, position_ids, noise_key)
        known: dict[str, Any] = {"spans": spans, "noise_key": noise_key, "cache": cache}
        known["rotary"] = self._rotary(position_ids, dtype=x.dtype)
        if self.config.experts is None:
            for block in self.layers.values():
                x = block(x, **known)
            return self._projected(x, cache)
        if is_token is None:
            mend = "models.call_routed passes it: call=tk.models.call_routed"
            raise ValueError(f"Decoder: with experts it needs is_token, False for padding; {mend}")
        nothing = x.new_zeros(self._sums_shape, dtype=torch.promote_types(x.dtype, torch.float32))
        tape, rows = tape or RoutingTape(), [*(before[0] if before else nothing)]
        names = [f"layers.{i}.mlp" for i in self.config.expert_layers]
        if choices is not None:
            preload_(tape, names, choices)
        own = [name for name in names if name.split(".")[1] in self.layers]
        check_tape(tape, names, self.config.experts, is_token=is_token, own=own)
        for block in self.layers.values():
            x = block(x, **known, is_token=is_token, tape=tape)
            if isinstance(x, tuple):
                number = cast("ExpertMlp", block.mlp).number
                x, rows[number] = x
        return RoutedOutput(self._projected(x, cache), torch.stack(rows))

    def _projected(self, x: Tensor, cache: KVCache | None) -> Tensor | Hidden:
        """Return what leaves this stage: hidden states, or what the head makes of them."""
        if self.norm is None:
            return x
        x = self.norm(x)
        if cache is not None and cache.last is not None:
            x = x.index_select(1, cache.last)
        if self.head is not None:
            return self.head(x)
        assert self.embedding is not None
        how: dict[str, Any] = {"output": self.output, "softcap": self.config.logit_softcap}
        return project(x, self.embedding.weight, **how)

    def boundary(self, batch: Mapping[str, Any]) -> Tensor | RoutedOutput:
        """Return what crosses from one pipeline stage to the next: `[B, S, D]`, on the meta device.

        With experts it is a `RoutedOutput` of that.

        Args:
            batch: A microbatch. Under sequence-parallel norms S is this rank's part of it.
        """
        rows, length = batch["position_ids"].shape
        shape = rows, length // self.sequence_parts, self.config.width
        dtype = next(self.parameters()).dtype
        hidden = torch.empty(shape, dtype=dtype, device="meta")
        if self.config.experts is None:
            return hidden
        wide = torch.promote_types(dtype, torch.float32)
        return RoutedOutput(hidden, torch.empty(self._sums_shape, dtype=wide, device="meta"))

    @property
    def _sums_shape(self) -> tuple[int, int]:
        """The shape of `Routed.sums`."""
        assert self.config.experts is not None
        return len(self.config.expert_layers), 3 + self.config.experts.count

    def _embedded(
        self, input_ids: Tensor, position_ids: Tensor, noise_key: Tensor | None
    ) -> Tensor:
        if not self.embeds or self.embedding is None:
            return input_ids
        x = self.embedding(input_ids)
        if self.config.embedding_scale is not None:
            x = x * _rounded(self.config.embedding_scale, x.dtype)
        if self.positions is not None:
            x = x + self.positions(position_ids)
        return _drop(x, noise_key, of=None, name="embedding", p=self.config.dropout)

    def _noise_key_in_use(self, noise_key: Tensor | None) -> Tensor | None:
        """Return the keys in training, where they are needed if anything is dropped or moved."""
        if not self.training:
            return None
        experts = self.config.experts
        amounts = {"dropout": self.config.dropout, "jitter": experts.jitter if experts else 0.0}
        used = [f"{name} is {amount}" for name, amount in amounts.items() if amount]
        if noise_key is None and used:
            raise ValueError(
                f"Decoder: {' and '.join(used)} and the model is training, but there is no "
                "noise_key; put noise.make_token_keys(...) into the batch, or call model.eval()"
            )
        return noise_key

    def _rotary(
        self, position_ids: Tensor, *, dtype: torch.dtype
    ) -> tuple[Table | None, Table | None]:
        """Return the tables of layers that see all and of those that slide: fp32, for fp64 fp64."""
        if self.config.positions is not None:
            return None, None
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        frequencies, sliding = self.frequencies(wide, position_ids.device)
        factor = getattr(self.config.rope_scaling, "attention_factor", 1.0)
        table = rotary_table(position_ids, frequencies, factor=factor)
        return table, table if sliding is None else rotary_table(position_ids, sliding)

    def frequencies(self, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor | None]:
        """Return the rotary frequencies, and those of layers that slide where they have others."""
        made = partial(rotary_frequencies, self.config.rotary_size, dtype=dtype, device=device)
        sliding = self.config.sliding
        other = None if sliding is None else sliding.rope_theta
        return (
            made(theta=self.config.rope_theta, scaling=self.config.rope_scaling),
            None if other is None else made(theta=other),
        )


def _rounded(value: float, dtype: torch.dtype) -> float:
    """Return the number of a dtype that is nearest."""
    return float(torch.tensor(value, dtype=dtype, device="cpu"))


def _mlps(config: DecoderConfig, balance: Balance) -> Iterator[nn.Module]:
    """Yield what follows attention in each layer."""
    numbers = {layer: number for number, layer in enumerate(config.expert_layers)}
    for i in range(config.layers):
        if config.experts is None or i not in numbers:
            yield Mlp(config.width, config.mlp_width, config.feed_forward)
        else:
            where: Any = {"name": f"layers.{i}.mlp", "number": numbers[i], "balance": balance}
            yield ExpertMlp(config.width, config.experts, **where)


def decoder_stage(model: Decoder, layers: range, *, first: bool, last: bool) -> Decoder:
    """Return one pipeline stage of a whole decoder: the same class, without what others own.

    Modules keep their names ("layers.17"). With tied embeddings the last stage has an embedding of
    its own, for its weight.

    Args:
        model: The whole model, which is not changed; blocks are shared with it.
        layers: The numbers of the stage's layers.
        first: Whether the stage embeds.
        last: Whether it has the final norm and the head.

    Examples:
        >>> config = DecoderConfig(
        ...     vocab_size=259, width=64, layers=4, heads=4, kv_heads=2, mlp_width=128
        ... )
        >>> with torch.device("meta"):
        ...     stage = decoder_stage(Decoder(config), range(2, 4), first=False, last=True)
        >>> [name for name, _ in stage.named_children()], list(stage.layers)
        (['layers', 'norm', 'head'], ['2', '3'])
    """
    stage = _shell(model)
    stage.embeds = first
    if first:
        stage.embedding = model.embedding
    elif last and model.head is None:
        stage.embedding = copy.deepcopy(model.embedding)  # one rank may hold both
    else:
        stage.embedding = None
    stage.positions = model.positions if first else None
    stage.layers = nn.ModuleDict({str(i): model.layers[str(i)] for i in layers})
    stage.norm = model.norm if last else None
    stage.head = model.head if last else None
    return stage


def _shell(model: Decoder) -> Decoder:
    """Return a module of the same class and attributes, without children, hooks or parameters."""
    shell = type(model).__new__(type(model))
    nn.Module.__init__(shell)
    own = set(shell.__dict__)
    shell.__dict__.update({k: v for k, v in model.__dict__.items() if k not in own})
    shell.training = model.training
    return shell


def build_decoder(
    config: DecoderConfig,
    *,
    seed: int,
    attend: Attend = varlen,
    head: Literal["logits", "hidden"] = "logits",
    balance: Balance = "batch",
) -> Decoder:
    """Return a whole decoder in this process, in fp32 on the CPU, filled with its initial values.

    Examples:
        >>> config = DecoderConfig(
        ...     vocab_size=259, width=64, layers=2, heads=4, kv_heads=2, mlp_width=128
        ... )
        >>> build_decoder(config, seed=0).norm.weight.sum().item()
        64.0
    """
    model = Decoder(config, attend=attend, head=head, balance=balance)
    weights = init_weights(config, seed=seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights(name, parameter.shape, (0,) * parameter.ndim))
    return model
