"""One readable decoder for the Llama, Qwen3, Gemma, OLMo 2, GPT-2 and DeepSeek-V3 families.

By default it has RMSNorms before each half of a block, rotary embeddings, grouped-query or latent
attention, or the gated delta rule in some layers, and SwiGLU or experts; the variations of families
are options of `DecoderConfig`. Names, shapes and the half-split rotary convention are those of
Hugging Face, so weights load without permuting (except DeepSeek's interleaved rotary pairs). The
only buffers are those of routers, so a model is built on the meta device and filled box by box. The
attention kernel is an argument.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn

from trainkit.attention.varlen import varlen
from trainkit.losses.softmax import gather_words, make_vocabulary_axis
from trainkit.models.call import RoutingTape
from trainkit.models.config import DecoderConfig
from trainkit.models.delta_attention import DeltaAttention
from trainkit.models.experts import Balance, ExpertMlp, check_tape, preload_
from trainkit.models.init_weights import init_weights
from trainkit.models.kv_cache import KVCache
from trainkit.models.latent_attention import LatentAttention
from trainkit.models.layers import Embedding, Joined, Linear, Mlp, WideNorm, make_norm
from trainkit.models.rotary import Table, rotary_frequencies, rotary_table, rotate_qk
from trainkit.models.routers import hash_experts
from trainkit.noise import counters
from trainkit.types import (
    Attend,
    ConfigError,
    Hidden,
    RoutedOutput,
    Spans,
    apply_softcap,
    check_choice,
    drop_routing,
)


class Head(Linear):
    """The output head: logits, or a `Hidden` for a fused linear cross entropy."""

    # A module also for `output="hidden"`: FSDP gathers the weight in the forward of its module.

    def __init__(
        self,
        width: int,
        vocab_size: int,
        *,
        output: Literal["logits", "hidden"],
        softcap: float | None,
    ) -> None:
        super().__init__(width, vocab_size, bias=False)
        self.output = output
        self.softcap = softcap

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
    if hasattr(weight, "to_local"):  # tensor parallel: this rank's shard of the vocabulary
        weight = weight.to_local()
    if output == "logits":
        return apply_softcap(nn.functional.linear(hidden, weight), softcap)
    return Hidden(hidden, _Identity.apply(weight), softcap=softcap)


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
    # The cap acts on each logit alone, so it is the same before and after the gather.
    own = apply_softcap(nn.functional.linear(hidden, weight), softcap)
    return gather_words(own, make_vocabulary_axis(weight, axis))


class _Identity(torch.autograd.Function):
    """The identity; its output is neither a leaf nor a view.

    FSDP2 (torch from 2.11 on) registers a backward hook on every tensor that a module returns. On a
    parameter itself hooks would accumulate, one per call, and for a view torch 2.13 warns.
    """

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:  # pyrefly: ignore[bad-override]
        return x.detach()

    @staticmethod
    def backward(_: Any, d_x: Tensor) -> Tensor:  # pyrefly: ignore[bad-override]
        return d_x


class Attention(nn.Module):
    """Grouped-query attention, with rotary embeddings if a table is passed.

    The number of heads follows from the shapes of the weights, so it also works on a shard of them.
    """

    def __init__(
        self, config: DecoderConfig, *, attend: Attend, window: int | None, scale: float | None
    ) -> None:
        super().__init__()
        size = config.head_size
        self.head_size = size
        self.attend = attend
        self.scale = scale  # None: the kernel's default, 1 / sqrt(head_size)
        self.causal = not config.bidirectional
        self.window = window
        self.softcap = config.score_softcap
        self.wq = Linear(config.width, config.heads * size, bias=config.qkv_bias)
        self.wk = Linear(config.width, config.kv_heads * size, bias=config.qkv_bias)
        self.projections = ["wq", "wk"]
        self.tied_values = config.full_heads is not None and config.full_heads.tied_values
        if not self.tied_values:
            self.wv = Linear(config.width, config.kv_heads * size, bias=config.qkv_bias)
            self.projections.append("wv")
        self.value_eps = config.norm_eps if config.value_norm else None
        self.wo = Linear(config.heads * size, config.width, bias=config.out_bias)
        if config.attention_gate:
            self.wg = Linear(config.width, config.heads * size, bias=False)
            self.projections.append("wg")
        # For `bare`, which fuses these products in generation.
        self.joined: Joined = {"projected": self.projections}
        sinks = torch.empty(config.heads) if config.attention_sinks else None
        self.sinks = None if sinks is None else nn.Parameter(sinks)
        self.qk_norm = config.qk_norm
        self.q_norm: nn.Module = nn.Identity()
        self.k_norm: nn.Module = nn.Identity()
        if config.qk_norm == "wide":
            self.q_norm = WideNorm(config.heads * size, config.norm_eps)
            self.k_norm = WideNorm(config.kv_heads * size, config.norm_eps)
        elif config.qk_norm:
            self.q_norm, self.k_norm = make_norm(config, size), make_norm(config, size)

    def forward(
        self,
        x: Tensor,
        *,
        rotary: Table | None,
        spans: Spans,
        attend: Attend | None = None,
    ) -> Tensor:
        """Map `[B, S, D]` to `[B, S, D]`; `attend`, that of a cache, replaces the module's own."""
        q, k, *rest = self.projected(x)
        v, *gate = [k, *rest] if self.tied_values else rest
        # A wide norm sees all heads together; the other kind sees one head at a time.
        if self.qk_norm == "wide":
            q, k = self.q_norm(q), self.k_norm(k)
        # To [B, S, heads, head_size], with this rank's number of heads.
        q, k, v = (part.unflatten(-1, (-1, self.head_size)) for part in (q, k, v))
        if self.qk_norm and self.qk_norm != "wide":
            q, k = self.q_norm(q), self.k_norm(k)
        if self.value_eps is not None:
            v = nn.functional.rms_norm(v, (self.head_size,), eps=self.value_eps)
        q, k = rotate_qk(q, k, rotary)
        attend = attend or self.attend
        if self.sinks is not None:
            attend = partial(attend, sinks=self.sinks)
        if not self.causal:
            attend = partial(attend, causal=False)
        out = attend(
            q,
            k,
            v,
            spans=spans,
            scale=self.scale,
            window=self.window,
            softcap=self.softcap,
        ).flatten(2)
        if gate:
            out = out * gate[0].sigmoid()
        return self.wo(out)

    def projected(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return queries `[B, S, H D]`, keys and values `[B, S, K D]`, and any gate, as queries."""
        return tuple(getattr(self, name)(x) for name in self.projections)


class Block(nn.Module):
    """One layer: attention and an MLP, each with a norm before it, after it or both (`Norms`).

    `name` is the layer's name in the whole model ("layers.17"), on which dropout depends; it is the
    same in a pipeline stage.
    """

    def __init__(self, config: DecoderConfig, *, attend: Attend, name: str, mlp: nn.Module) -> None:
        super().__init__()
        self.name = name
        self.dropout = config.dropout
        layer = int(name.rpartition(".")[2])
        slides = layer in config.sliding_layers
        window = config.sliding.window if config.sliding and slides else None
        # Which of the tables of rotary positions it uses; None for no positions.
        self.rotary = None if layer in config.no_rope_layers else int(slides)
        self.scale = 1.0 if config.residual_scale is None else config.residual_scale
        # Norms that this family lacks are identities, which have no parameters to load.
        norm = partial(make_norm, config, config.width)
        before = norm if config.norm_config.before else nn.Identity
        after = norm if config.norm_config.after else nn.Identity
        self.normed_after = config.norm_config.after
        self.attention_norm = before()
        attention = Attention if config.latents is None else LatentAttention
        self.attention: Attention | LatentAttention | DeltaAttention
        if layer in config.delta_layers:
            self.attention = DeltaAttention(config)
        else:
            self.attention = attention(
                config.for_layer(layer),
                attend=attend,
                window=window,
                scale=config.score_scale(layer),
            )
        self.attention_out_norm = after()
        self.mlp_norm = before()
        self.mlp = mlp
        self.mlp_out_norm = after()
        # A constant of the weights: no optimizer trains it.
        self.register_buffer("layer_scale", torch.ones(1) if config.layer_scales else None)
        # Modules whose output is only added to the stream, so that backward does not need it.
        is_added = isinstance(mlp, Mlp) and not (self.normed_after or self.dropout)
        self.only_added = ("mlp.down",) if is_added else ()

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
        """Map `[B, S, D]` to `[B, S, D]`; without a `noise_key` there is no dropout.

        `rotary` has the tables of layers with full attention and of layers with a sliding window.
        With experts the layer's row of `RoutedOutput.sums` is returned as well.
        """
        branch = self._attend(self.attention_norm(x), rotary=rotary, spans=spans, cache=cache)
        if self.normed_after:
            branch = self.attention_out_norm(branch)
        # Dropout is on the branch alone: the stream itself keeps every token.
        branch = _drop(branch, noise_key, of=self, name="attention", p=self.dropout)
        x = torch.add(x, branch, alpha=self.scale)
        normal = self.mlp_norm(x)
        if not isinstance(self.mlp, ExpertMlp):
            branch = self.mlp(normal)
            if self.normed_after:
                branch = self.mlp_out_norm(branch)
            branch = _drop(branch, noise_key, of=self, name="mlp", p=self.dropout)
            x = torch.add(x, branch, alpha=self.scale)
            return x if self.layer_scale is None else x * self.layer_scale.to(x.dtype)
        # The numbers of tokens per expert vary, which torch.compile cannot trace.
        call = torch.compiler.disable(_call) if torch.compiler.is_compiling() else _call
        branch, sums = call(
            self.mlp,
            normal,
            spans=spans,
            is_token=is_token,
            tape=tape,
            noise_key=noise_key,
        )
        branch = self.mlp_out_norm(branch)
        branch = _drop(branch, noise_key, of=self, name="mlp", p=self.dropout)
        return torch.add(x, branch, alpha=self.scale), sums

    def _attend(
        self,
        x: Tensor,
        *,
        rotary: tuple[Table | None, Table | None],
        spans: Spans,
        cache: KVCache | None,
    ) -> Tensor:
        if isinstance(self.attention, DeltaAttention):
            attend_delta = None if cache is None else cache.attend_delta(self.name)
            return self.attention(x, spans=spans, attend=attend_delta)
        attend = None if cache is None else cache.attend(self.name)
        table = None if self.rotary is None else rotary[self.rotary]
        return self.attention(x, rotary=table, spans=spans, attend=attend)


# A function: torch.compiler.disable would wrap a module in an OptimizedModule.
def _call(module: nn.Module, x: Tensor, **kwargs: Any) -> Any:
    return module(x, **kwargs)


def _drop(
    x: Tensor,
    noise_key: Tensor | None,
    *,
    of: Block | None,
    name: str,
    p: float,
) -> Tensor:
    """Apply dropout to the residual stream, whose features are all on every rank."""
    if noise_key is None or p == 0:
        return x
    if torch.compiler.is_compiling():
        # Hashing the name cannot be traced: torch 2.13 fails on the 64-bit key it would guard. And
        # a name that is formatted while tracing would be compiled anew for every layer.
        return torch.compiler.disable(_apply_dropout)(x, noise_key, of, name, p)
    return _apply_dropout(x, noise_key, of, name, p)


def _apply_dropout(
    x: Tensor,
    noise_key: Tensor,
    of: Block | None,
    name: str,
    p: float,
) -> Tensor:
    # The layer's name in the whole model, so that a pipeline stage draws the same noise.
    full_name = name if of is None else f"{of.name}.{name}"
    return counters.dropout(x, noise_key, name=full_name, p=p, width=x.shape[-1])


class Decoder(nn.Module):
    """A decoder-only language model.

    Its parameters are uninitialized until a `Weights` function fills them; `build_decoder` does
    both.

    Args:
        config: The architecture.
        attend: The attention kernel.
        head: "logits" to return logits over the full vocabulary; "hidden" to return a `Hidden`,
            which `losses.next_token_linear` takes in every layout.
        balance: The tokens over which experts are balanced; see `experts.Balance`.

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
        # Modules of other pipeline stages are None: the first stage embeds, the last projects.
        self.embeds = True
        self.sequence_parts = 1  # tensor parallelism sets it to the parts S is split into in blocks
        self.embedding: Embedding | None = Embedding(config.vocab_size, config.width)
        self.positions: Embedding | None = None
        if config.positions is not None:
            self.positions = Embedding(config.positions, config.width)
        # Keyed by the layer's index, so that the layers of a pipeline stage keep their names.
        self.layers = nn.ModuleDict(
            {
                str(i): Block(config, attend=attend, name=f"layers.{i}", mlp=mlp)
                for i, mlp in enumerate(_make_mlps(config, balance))
            }
        )
        self.norm: nn.Module | None = make_norm(config, config.width)
        # A tied model has no head: `_project` multiplies by the embedding's weight.
        self.head: Head | None = None
        if not config.tied:
            self.head = Head(
                config.width,
                config.outputs,
                output=head,
                softcap=config.logit_softcap,
            )

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
        token_ids: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Tensor | Hidden | RoutedOutput:
        """Return logits `[B, S, V]`, or a `Hidden` of hidden states `[B, S, D]` and a weight.

        With experts it is a `RoutedOutput` of one of these.

        Args:
            input_ids: int64 `[B, S]`; for a pipeline stage after the first, the output of the
                previous stage: hidden states `[B, S, D]`, or a `RoutedOutput` of them.
            position_ids: int64 `[B, S]`, the position of each token in its document.
            spans: The documents, over the flattened rows.
            noise_key: int64 `[B, S]`, from `noise.make_token_keys`; needed only for dropout, and
                for the jitter of routers, while training.
            is_token: bool `[B, S]`, False for padding, which goes to no expert; needed with
                experts.
            tape: The choices of the expert layers; by default a new one.
            choices: int64 `[B, S, L, k]`, choices that came with the batch, for all L expert layers
                of the model; they are written to the tape.
            token_ids: int64 `[B, S]`, the ids of the tokens that this rank's experts see, where
                tensor parallelism splits rows; by default `input_ids`.
            cache: The keys and values of earlier tokens; then the batch is one row, [1, S], and the
                logits `[1, R, V]` are those of the last token of each of the cache's rows.

        Raises:
            ValueError: Dropout or jitter is on, the model is training, and there is no `noise_key`;
                or there are experts and no `is_token`.
        """
        noise_key = self._check_noise_key(noise_key)
        # A stage after the first gets hidden states, with experts a `RoutedOutput` of them.
        x, *earlier_sums = input_ids if isinstance(input_ids, tuple) else (input_ids,)
        x = self._embed(x, position_ids, noise_key)
        rotary = self._make_rotary(position_ids, dtype=x.dtype)
        if self.config.experts is None:
            for block in self.layers.values():
                x = block(x, rotary=rotary, spans=spans, noise_key=noise_key, cache=cache)
            return self._project(x, cache)
        if is_token is None:
            raise ValueError(
                "Decoder: with experts it needs is_token, False for padding; models.call_routed "
                "passes it: call=tk.models.call_routed"
            )
        # One row for each expert layer of the whole model; earlier stages have filled theirs.
        dtype = torch.promote_types(x.dtype, torch.float32)
        sums = earlier_sums[0] if earlier_sums else x.new_zeros(self._sums_shape, dtype=dtype)
        rows = [*sums]
        # Choices that came with the batch cover all layers; this stage reads only its own.
        tape = tape or RoutingTape()
        names = [f"layers.{i}.mlp" for i in self.config.expert_layers]
        if choices is not None:
            preload_(tape, names, choices)
        own = [name for name in names if name.split(".")[1] in self.layers]
        check_tape(tape, names, self.config.experts, is_token=is_token, own=own)
        if self.embeds:  # later stages have no ids, and no layers that hash them
            ids = input_ids if token_ids is None else token_ids
            for name in names[: self.config.experts.hash_layers]:
                chosen = hash_experts(
                    ids.flatten(), self.config.experts.count, self.config.experts.top_k, name=name
                )
                tape.choices.setdefault(name, chosen)  # unless choices are replayed
        for block in self.layers.values():
            x = block(
                x,
                rotary=rotary,
                spans=spans,
                noise_key=noise_key,
                is_token=is_token,
                tape=tape,
                cache=cache,
            )
            if isinstance(x, tuple):
                number = cast("ExpertMlp", block.mlp).number
                x, rows[number] = x
        return RoutedOutput(self._project(x, cache), torch.stack(rows))

    def _project(self, x: Tensor, cache: KVCache | None) -> Tensor | Hidden:
        """Apply the final norm and the head; stages before the last return hidden states."""
        if self.norm is None:
            return x
        x = self.norm(x)
        if self.config.logit_divisor is not None:
            # Here and not in the head, so that a `Hidden` has it too.
            x = x / self.config.logit_divisor
        # Generation needs the last token of each prompt; logits are the largest tensor.
        if cache is not None and cache.last is not None:
            x = x.index_select(1, cache.last)
        if self.head is not None:
            return self.head(x)
        assert self.embedding is not None
        return project(
            x,
            self.embedding.weight,
            output=self.output,
            softcap=self.config.logit_softcap,
        )

    def boundary(self, batch: Mapping[str, Any]) -> Tensor | RoutedOutput:
        """Return the output of a pipeline stage on the meta device: hidden states `[B, S, D]`.

        With experts it is a `RoutedOutput` of them.

        Args:
            batch: A microbatch. Under sequence-parallel norms S is this rank's part of it.
        """
        rows, length = batch["position_ids"].shape
        shape = (rows, length // self.sequence_parts, self.config.width)
        dtype = next(self.parameters()).dtype
        hidden = torch.empty(shape, dtype=dtype, device="meta")
        if self.config.experts is None:
            return hidden
        sums_dtype = torch.promote_types(dtype, torch.float32)
        return RoutedOutput(hidden, torch.empty(self._sums_shape, dtype=sums_dtype, device="meta"))

    @property
    def _sums_shape(self) -> tuple[int, int]:
        """The shape of `RoutedOutput.sums`."""
        # Three sums (balance, z-loss, dropped choices), then a count for each expert.
        assert self.config.experts is not None
        return len(self.config.expert_layers), 3 + self.config.experts.count

    def _embed(self, input_ids: Tensor, position_ids: Tensor, noise_key: Tensor | None) -> Tensor:
        # The last stage of a tied model has an embedding too, as its output weight.
        if not self.embeds or self.embedding is None:
            return input_ids
        x = self.embedding(input_ids)
        if self.config.embedding_scale is not None:
            # Rounded to the dtype first, as Hugging Face does.
            scale = torch.tensor(self.config.embedding_scale, dtype=x.dtype, device="cpu")
            x = x * float(scale)
        if self.positions is not None:
            x = x + self.positions(position_ids)
        return _drop(x, noise_key, of=None, name="embedding", p=self.config.dropout)

    def _check_noise_key(self, noise_key: Tensor | None) -> Tensor | None:
        """Return the keys in training, else None; raise ValueError if needed ones are missing."""
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

    def _make_rotary(
        self, position_ids: Tensor, *, dtype: torch.dtype
    ) -> tuple[Table | None, Table | None]:
        """Return the tables of layers with full attention and with a window, in at least fp32."""
        if self.config.positions is not None:
            return None, None
        # bf16 has 8 bits of precision: positions above 256 would collide.
        table_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        frequencies, sliding = self.frequencies(table_dtype, position_ids.device)
        # Only LongRoPE has a factor. Layers with a base of their own are not scaled.
        factor = getattr(self.config.rope_scaling, "attention_factor", 1.0)
        table = rotary_table(position_ids, frequencies, factor=factor)
        return table, table if sliding is None else rotary_table(position_ids, sliding)

    def frequencies(self, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor | None]:
        """Return the rotary frequencies, and those of sliding layers if they have another base."""
        compute = partial(rotary_frequencies, dtype=dtype, device=device)
        size, full_heads = self.config.rotary_size, self.config.full_heads
        frequencies = compute(
            full_heads.size if full_heads else size,
            theta=self.config.rope_theta,
            scaling=self.config.rope_scaling,
        )
        sliding = self.config.sliding
        if sliding is None or sliding.rope_theta is None:
            return frequencies, None
        return frequencies, compute(size, theta=sliding.rope_theta)


def _make_mlps(config: DecoderConfig, balance: Balance) -> Iterator[nn.Module]:
    """Yield the feed-forward layer of each block."""
    # Expert layers are numbered among themselves: the rows of `RoutedOutput.sums`.
    numbers = {layer: number for number, layer in enumerate(config.expert_layers)}
    for i in range(config.layers):
        if config.experts is None or i not in numbers:
            yield Mlp(config.width, config.mlp_width, config.feed_forward)
        else:
            yield ExpertMlp(
                config.width,
                config.experts,
                name=f"layers.{i}.mlp",
                number=numbers[i],
                balance=balance,
            )


def decoder_stage(model: Decoder, layers: range, *, first: bool, last: bool) -> Decoder:
    """Return a pipeline stage of a whole decoder: the same class, without other stages' modules.

    Modules keep their names ("layers.17"). With tied embeddings the last stage has a copy of the
    embedding.

    Args:
        model: The whole model, which is not changed; blocks are shared with it.
        layers: The indices of the stage's layers.
        first: Whether the stage has the embedding.
        last: Whether it has the final norm and the head.

    Raises:
        ConfigError: A layer of a later stage chooses experts by a hash of the token ids.

    Examples:
        >>> config = DecoderConfig(
        ...     vocab_size=259, width=64, layers=4, heads=4, kv_heads=2, mlp_width=128
        ... )
        >>> with torch.device("meta"):
        ...     stage = decoder_stage(Decoder(config), range(2, 4), first=False, last=True)
        >>> [name for name, _ in stage.named_children()], list(stage.layers)
        (['layers', 'norm', 'head'], ['2', '3'])
    """
    experts = model.config.experts
    hashed = model.config.expert_layers[: experts.hash_layers] if experts else []
    if not first and any(i in layers for i in hashed):
        raise ConfigError(
            f"decoder_stage: layers {hashed} choose experts by a hash of the token ids, which only "
            f"the first pipeline stage has, but layers {[*layers]} are of a later one; use fewer "
            "stages, or fewer hash_layers",
            where="hash_layers",
            got=experts.hash_layers if experts else 0,
        )
    stage = _copy_without_children(model)
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


def _copy_without_children(model: Decoder) -> Decoder:
    """Return a module of the same class and attributes, without children, hooks or parameters."""
    # Not `Decoder.__init__`, which would allocate every layer of the model again.
    result = type(model).__new__(type(model))
    nn.Module.__init__(result)
    # What `nn.Module` set just now (children, hooks, parameters) stays empty.
    of_module = set(result.__dict__)
    attributes = {k: v for k, v in model.__dict__.items() if k not in of_module}
    result.__dict__.update(attributes)
    result.training = model.training
    return result


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
            # The box of the full parameter starts at index 0 of every dimension.
            parameter.copy_(weights(name, parameter.shape, (0,) * parameter.ndim))
    return model
