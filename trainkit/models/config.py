"""The architecture of a decoder as one record, and the shapes of its parameters.

What distinguishes a family of models is an option here, off by default, so that a config that was
saved before an option existed still means the same model.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import attrs
from attrs.validators import optional

from trainkit.types import ConfigError, check_range, non_negative, one_of, satisfies

# Ranges are written as comparisons with both bounds, because NaN fails each of them.
_POSITIVE = satisfies(lambda value: 0 < value < math.inf, "above 0 and finite")

Activation = Literal["silu", "gelu", "gelu_tanh", "relu2"]
"""The activations of an MLP or of experts."""


@attrs.frozen
class Llama3Scaling:
    """The rotary scaling of Llama 3.1 and later, for a longer context.

    Wavelengths above `original_length / low_freq_factor` tokens are multiplied by `factor`, those
    below `original_length / high_freq_factor` are unchanged, and frequencies in between are
    interpolated ("The Llama 3 Herd of Models", 2024, section 3.4).

    Examples:
        >>> Llama3Scaling(factor=8.0).original_length
        8192
    """

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_length: int = 8192

    def __attrs_post_init__(self) -> None:
        is_valid = 1 <= self.factor < math.inf and 1 <= self.original_length < math.inf
        if not is_valid or not 0 < self.low_freq_factor < self.high_freq_factor < math.inf:
            raise ValueError(
                "Llama3Scaling: needs factor >= 1, 0 < low_freq_factor < high_freq_factor and "
                f"original_length >= 1, got {self}"
            )


@attrs.frozen
class YarnScaling:
    """The rotary scaling of DeepSeek-V2 and later, for a longer context.

    A rotary pair that turns more than `beta_fast` times in `original_length` tokens is unchanged,
    one that turns fewer than `beta_slow` times has its frequency divided by `factor`, and those in
    between are interpolated by their index. All scores are multiplied by (0.1 * mscale * ln(factor)
    + 1) ** 2 (Peng et al., "YaRN", 2023, section 3). DeepSeek's configs have two factors, mscale
    and mscale_all_dim; here they are equal.

    Examples:
        >>> round(YarnScaling(factor=40.0, original_length=4096).sharpening, 4)
        1.8739
    """

    factor: float
    original_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    fractional: bool = False
    """Whether the ends of the ramp are not rounded to whole pairs (gpt-oss)."""

    def __attrs_post_init__(self) -> None:
        is_valid = 1 <= self.factor < math.inf and 1 <= self.original_length < math.inf
        is_valid = is_valid and 0 <= self.mscale < math.inf
        if not is_valid or not 0 < self.beta_slow < self.beta_fast < math.inf:
            raise ValueError(
                "YarnScaling: needs factor >= 1, original_length >= 1, mscale >= 0 and 0 < "
                f"beta_slow < beta_fast, got {self}"
            )

    @property
    def sharpening(self) -> float:
        """The factor of scores."""
        # The paper's sqrt(1 / t) multiplies queries and keys alike, hence the square.
        return (0.1 * self.mscale * math.log(self.factor) + 1) ** 2


@attrs.frozen
class LinearScaling:
    """Positions divided by a factor, for a longer context.

    References:
        Chen et al., "Extending context window of large language models via positional
        interpolation" (2023).

    Examples:
        >>> LinearScaling(factor=8.0).factor
        8.0
    """

    factor: float = attrs.field(validator=satisfies(lambda x: 1 <= x < math.inf, "at least 1"))


@attrs.frozen
class LongRopeScaling:
    """The rotary scaling of Phi 3 and 4: each wavelength has a factor of its own.

    There are two sets of factors, found by search: `short` for texts of at most `original_length`
    tokens, `long` for longer ones (Ding et al., "LongRoPE", 2024). A model uses one of them, chosen
    by `context`, so that no token's scores depend on what comes after it or on another row of the
    batch. `transformers` chooses by the longest document of each batch: the results agree if all
    documents have at most `original_length` tokens, or all have more.

    Examples:
        >>> scaling = LongRopeScaling((1.0, 1.0), (1.5, 4.0), original_length=4096, context=4096)
        >>> scaling.factors, attrs.evolve(scaling, context=8192).factors
        ((1.0, 1.0), (1.5, 4.0))
    """

    short: tuple[float, ...] = attrs.field(converter=tuple)
    """The factor of each wavelength, pair by pair, of short texts."""

    long: tuple[float, ...] = attrs.field(converter=tuple)
    """Those of long texts."""

    original_length: int
    """The context length before scaling."""

    context: int
    """The maximum length of a document."""

    attention_factor: float = 1.0
    """The factor of the rotary parts of queries and keys."""

    def __attrs_post_init__(self) -> None:
        factors = (*self.short, *self.long, self.attention_factor)
        lengths = (self.original_length, self.context)
        are_factors_valid = all(0 < x < math.inf for x in factors)
        are_lengths_valid = all(1 <= x < math.inf for x in lengths)
        is_valid = are_factors_valid and are_lengths_valid
        if not is_valid or len(self.short) != len(self.long):
            raise ValueError(
                "LongRopeScaling: needs as many short as long factors, all above 0, an "
                f"attention_factor above 0, original_length >= 1 and context >= 1, got {self}"
            )

    @property
    def factors(self) -> tuple[float, ...]:
        """The factors for documents of up to `context` tokens."""
        return self.long if self.context > self.original_length else self.short


@attrs.frozen
class ProportionalScaling:
    """Rotary positions of a part of each head, with the wavelengths of all of it (Gemma 4).

    The first pairs of a head turn as they would without it, and the others do not turn.

    Examples:
        >>> ProportionalScaling(part=0.25).part
        0.25
    """

    part: float = attrs.field(validator=satisfies(lambda x: 0 < x <= 1, "above 0 and at most 1"))


RopeScaling = Llama3Scaling | YarnScaling | LinearScaling | LongRopeScaling | ProportionalScaling
"""The scaling of rotary wavelengths for a longer context."""


@attrs.frozen(kw_only=True)
class Sliding:
    """Layers with sliding-window attention (Beltagy et al., "Longformer", 2020).

    These are all layers by default; `first` and `full_every` except some.

    Raises:
        ConfigError: A value is out of its range.

    Examples:
        >>> Sliding(window=4_096, full_every=2).layers(5)  # as Gemma 2
        [0, 2, 4]
    """

    window: int = attrs.field(validator=_POSITIVE)
    """The number of keys that a query attends to at most, including its own."""

    first: int = attrs.field(default=0, validator=non_negative)
    """The index of the first layer that may have a window."""

    full_every: int = attrs.field(default=0, validator=non_negative)
    """Layers full_every - 1, 2 * full_every - 1, and so on have full attention; 0 for none."""

    rope_theta: float | None = attrs.field(
        default=None, validator=optional(satisfies(lambda x: 1 < x < math.inf, "above 1"))
    )
    """The base of these layers' rotary wavelengths, which are then not scaled (Gemma 3); None for
    those of the other layers."""

    def layers(self, layers: int) -> list[int]:
        """Return the indices of the layers with a window, in a model of `layers` layers."""
        # Counted from layer 0, also if windows start at a later layer.
        full = self.full_every
        return [i for i in range(self.first, layers) if not full or (i + 1) % full]


@attrs.frozen(kw_only=True)
class FullHeads:
    """The heads of layers with full attention, where those of sliding layers differ (Gemma 4).

    Raises:
        ConfigError: A value is out of its range.

    Examples:
        >>> FullHeads(size=512, kv_heads=4, tied_values=True).size
        512
    """

    size: int = attrs.field(
        validator=satisfies(lambda value: value >= 2 and value % 2 == 0, "even and at least 2")
    )
    """The size of a head."""

    kv_heads: int = attrs.field(validator=_POSITIVE)
    """The number of key and value heads."""

    tied_values: bool = False
    """Whether values are the projections of the keys, before their norm and positions."""


@attrs.frozen(kw_only=True)
class Norms:
    """The norms of a decoder.

    Examples:
        >>> Norms(place="around").before, Norms(place="after").before
        (True, False)
    """

    kind: Literal["rms", "offset", "layer"] = attrs.field(
        default="rms", validator=one_of("rms", "offset", "layer")
    )
    """RMSNorm (Zhang and Sennrich, 2019), one whose scale is 1 + its weight (Gemma), or LayerNorm
    with a bias (Ba et al., 2016)."""

    place: Literal["before", "after", "around"] = attrs.field(
        default="before", validator=one_of("before", "after", "around")
    )
    """Whether the inputs of attention and the MLP are normalized, their outputs (OLMo 2), or both
    (Gemma 2)."""

    @property
    def before(self) -> bool:
        """Whether there are norms before attention and the MLP."""
        return self.place != "after"

    @property
    def after(self) -> bool:
        """Whether there are norms after them, before the residual addition."""
        return self.place != "before"


@attrs.frozen(kw_only=True)
class FeedForward:
    """The MLP of layers without experts.

    Examples:
        >>> FeedForward(gated=False, activation="gelu_tanh", bias=True).gated  # as GPT-2
        False
    """

    gated: bool = True
    """Whether the MLP is a gated linear unit (Shazeer, "GLU variants", 2020)."""

    activation: Activation = attrs.field(default="silu", validator=one_of(*get_args(Activation)))
    """gelu_tanh is GELU's approximation by tanh (Hendrycks and Gimpel, 2016); relu2 the square of
    ReLU (So et al., "Primer", 2021)."""

    bias: bool = False
    """Whether its linear layers have biases."""


@attrs.frozen(kw_only=True)
class Latents:
    """The sizes of multi-head latent attention (DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1).

    Queries, keys and values of all heads are projections of low-rank latents. A head of queries or
    keys has a part without positions and a part with rotary positions; the rotary part of the keys
    is shared by all heads.

    Raises:
        ConfigError: A value is out of its range.

    Examples:
        >>> Latents(kv_rank=512, plain=128, rotary=64, values=128).query_rank
        >>> Latents(kv_rank=512, plain=128, rotary=63, values=128)
        Traceback (most recent call last):
        ...
        trainkit.types.ConfigError: rotary must be even and at least 2, got 63
    """

    query_rank: int | None = attrs.field(default=None, validator=optional(_POSITIVE))
    """The size of the latent of queries; None projects queries from the residual stream."""

    kv_rank: int = attrs.field(validator=_POSITIVE)
    """The size of the latent of keys and values."""

    plain: int = attrs.field(validator=_POSITIVE)
    """The size of a head's part without positions (DeepSeek: qk_nope_head_dim)."""

    rotary: int = attrs.field(
        validator=satisfies(lambda x: x >= 2 and x % 2 == 0, "even and at least 2")
    )
    """The size of a head's part with rotary positions (DeepSeek: qk_rope_head_dim)."""

    values: int = attrs.field(validator=_POSITIVE)
    """The size of a head of values (DeepSeek: v_head_dim)."""

    norm_eps: float | None = attrs.field(default=None, validator=optional(_POSITIVE))
    """Added to the mean square in the norms of latents; that of the other norms when None."""


@attrs.frozen(kw_only=True)
class Delta:
    """Layers with the gated delta rule in place of attention (Yang et al., 2024), and their sizes.

    Raises:
        ConfigError: A value is out of its range, or the key heads do not divide the value heads.

    Examples:
        >>> delta = Delta(key_heads=16, value_heads=32, key_size=128, value_size=128)
        >>> delta.layers(8)  # three of four, as in Qwen3-Next
        [0, 1, 2, 4, 5, 6]
    """

    key_heads: int = attrs.field(validator=_POSITIVE)
    """The number of heads of queries and keys, K."""

    value_heads: int = attrs.field(validator=_POSITIVE)
    """The number of heads of values and of the state, H; K divides it."""

    key_size: int = attrs.field(validator=_POSITIVE)
    """The size of a head of queries or keys."""

    value_size: int = attrs.field(validator=_POSITIVE)
    """The size of a head of values."""

    conv: int = attrs.field(default=4, validator=_POSITIVE)
    """The number of tokens that the convolutions before the rule read."""

    full_every: int = attrs.field(default=4, validator=_POSITIVE)
    """Layers full_every - 1, 2 * full_every - 1, and so on have attention; all others have the
    rule."""

    def __attrs_post_init__(self) -> None:
        if self.value_heads % self.key_heads:
            raise ConfigError(
                f"Delta: {self.key_heads} key heads do not divide {self.value_heads} value heads",
                where="key_heads",
                got=self.key_heads,
                want=f"a divisor of {self.value_heads}",
            )

    def layers(self, layers: int) -> list[int]:
        """Return the indices of the layers with the rule, in a model of `layers` layers."""
        return [i for i in range(layers) if (i + 1) % self.full_every]


@attrs.frozen(kw_only=True)
class Experts:
    """The experts that replace the MLP in some layers.

    Raises:
        ConfigError: A value is out of its range, or the choices do not fit the experts.

    Examples:
        >>> Experts(count=8, top_k=2, width=128).scores
        'softmax'
        >>> Experts(count=8, top_k=9, width=128)
        Traceback (most recent call last):
        ...
        trainkit.types.ConfigError: Experts: 9 of 8 experts cannot be chosen from 1 of 1 equal...
    """

    count: int = attrs.field(validator=_POSITIVE)
    """The number of experts of a layer, E."""

    top_k: int = attrs.field(validator=_POSITIVE)
    """The number of experts of a token, k."""

    width: int = attrs.field(validator=_POSITIVE)
    """The inner size of an expert."""

    shared: int = attrs.field(default=0, validator=non_negative)
    """The inner size of the shared expert, an MLP for all tokens; 0 for none."""

    shared_gate: bool = False
    """Whether its output is multiplied by a sigmoid of a linear function of the token (Qwen2)."""

    first: int = attrs.field(default=0, validator=non_negative)
    """The index of the first layer that may have experts; earlier ones have an MLP."""

    every: int = attrs.field(default=1, validator=_POSITIVE)
    """The interval of layers with experts: layers every - 1, 2 * every - 1, and so on."""

    gated: bool = True
    """Whether an expert is a gated linear unit, as in `FeedForward`; the shared expert too."""

    activation: Activation = attrs.field(default="silu", validator=one_of(*get_args(Activation)))
    """The activation of the experts and of the shared expert."""

    scores: Literal["softmax", "sigmoid", "sqrtsoftplus"] = attrs.field(
        default="softmax", validator=one_of("softmax", "sigmoid", "sqrtsoftplus")
    )
    """The function from logits to scores; see `softmax_topk` and `biased_topk`."""

    hash_layers: int = attrs.field(default=0, validator=non_negative)
    """How many of the first layers with experts choose by a hash of the token (`hash_experts`);
    scores still weight their experts. They must be in the first pipeline stage."""

    renormalize: bool = True
    """Whether a token's weights are divided by their sum."""

    biased: bool = False
    """Whether a bias, which `update_routers_` updates, is added to the scores for the choice."""

    groups: int = 1
    """The number of equal groups of experts."""

    groups_chosen: int = 1
    """The number of groups from which a token may choose."""

    scale: float = attrs.field(default=1.0, validator=_POSITIVE)
    """The final factor of weights."""

    capacity: float = attrs.field(
        default=0.0,
        validator=satisfies(lambda value: 0 <= value < math.inf, "at least 0 and finite"),
    )
    """The capacity factor: an expert takes at most this multiple of an equal share of the choices,
    and drops the others. 0 drops none. Each rank limits its own microbatch, so the dropped choices
    depend on the layout; see `apply_capacity`."""

    load_limit: float = attrs.field(
        default=0.0,
        validator=satisfies(lambda value: 0 <= value < math.inf, "at least 0 and finite"),
    )
    """The multiple of an equal share of the load of the last global batch from which on an expert's
    outputs are scaled down; 0 scales none. See `scale_by_load`."""

    jitter: float = attrs.field(
        default=0.0, validator=satisfies(lambda value: 0 <= value < 1, "in [0, 1)")
    )
    """The largest relative noise on a router's input in training; see `add_jitter`."""

    bias: bool = False
    """Whether the router and the matrices of experts have biases (gpt-oss)."""

    clamp: float | None = attrs.field(default=None, validator=optional(_POSITIVE))
    """The bound c of the inner values of experts (gpt-oss): with g = min(gate, c) and u = up in
    [-c, c], their product is (u + 1) * g * sigmoid(sigmoid_scale * g). None for a SwiGLU."""

    sigmoid_scale: float | None = attrs.field(default=None, validator=optional(_POSITIVE))
    """The factor inside of the sigmoid where there is a `clamp`: 1.702 approximates GELU, and None
    is 1."""

    def __attrs_post_init__(self) -> None:
        try:
            # `biased_topk` raises the same as a ValueError; a config is the user's input.
            check_expert_groups("Experts", self.count, self.top_k, self.groups, self.groups_chosen)
        except ValueError as error:
            raise ConfigError(str(error), where="experts", got=attrs.asdict(self)) from None
        # `softmax_topk` has none of these, so they would be ignored without a word.
        if self.scores == "softmax" and (self.biased or self.groups > 1 or self.scale != 1):
            raise ConfigError(
                "Experts: a bias, groups and a scale are for scores='sigmoid' or 'sqrtsoftplus'",
                where="experts",
                got=attrs.asdict(self),
            )
        if self.clamp is not None and not (self.gated and self.activation == "silu"):
            raise ConfigError(
                "Experts: a clamp is for gated experts with silu",
                where="clamp",
                got=attrs.asdict(self),
            )
        if self.clamp is None and self.sigmoid_scale is not None:
            raise ConfigError(
                "Experts: sigmoid_scale is for experts with a clamp, got "
                f"{self.sigmoid_scale} without; set clamp, or leave sigmoid_scale out",
                where="sigmoid_scale",
                got=self.sigmoid_scale,
            )
        if self.shared_gate and not self.shared:
            raise ConfigError(
                "Experts: shared_gate=True needs a shared expert; set shared to its inner size",
                where="shared_gate",
            )
        if self.top_k == 1 and self.renormalize and self.scores == "softmax":
            raise ConfigError(
                "Experts: top_k=1 with renormalize=True gives weights of 1, and trains no router; "
                "set renormalize=False",
                where="renormalize",
            )

    @property
    def shared_mlp(self) -> FeedForward:
        """The MLP of the shared expert, of the same kind as the experts."""
        return FeedForward(gated=self.gated, activation=self.activation)

    def layers(self, layers: int) -> list[int]:
        """Return the indices of the layers with experts, in a model of `layers` layers.

        Examples:
            >>> Experts(count=8, top_k=2, width=128, first=1, every=2).layers(6)
            [1, 3, 5]
        """
        return [i for i in range(layers) if i >= self.first and (i + 1) % self.every == 0]


def check_expert_groups(
    where: str, experts: int, top_k: int, groups: int, groups_chosen: int
) -> None:
    """Raise ValueError unless a token can choose its experts from some of the equal groups.

    Raises:
        ValueError: The groups do not divide the experts, or those of a token have too few.
    """
    # The last condition: k experts must fit into the groups from which a token may choose.
    check_range(where, at_least=1, groups=groups, groups_chosen=groups_chosen)
    if experts % groups or groups_chosen > groups or top_k > groups_chosen * (experts // groups):
        raise ValueError(
            f"{where}: {top_k} of {experts} experts cannot be chosen from {groups_chosen} of "
            f"{groups} equal groups"
        )


@attrs.frozen
class DecoderConfig:
    """The architecture of a decoder.

    Args:
        vocab_size: The number of token ids, V.
        width: The size of the residual stream, D.
        layers: The number of blocks.
        heads: The number of query heads, H.
        kv_heads: The number of key and value heads, K; divides H, and equals H with latents.
        mlp_width: The inner size of the MLP.
        head_dim: The size of a head, even; width // heads when None.
        norm_eps: Added to the mean square, or the variance, in every norm.
        rope_theta: The base of the rotary wavelengths.
        rope_scaling: The scaling of the rotary wavelengths for a longer context.
        qk_norm: Whether queries and keys are normalized, per head (Qwen3), or "wide", over all
            heads together (OLMo 2).
        qkv_bias: Whether the query, key and value projections have a bias (Qwen2).
        tied: Whether the embedding is also the output weight.
        dropout: The probability on the embedding and on both branches of every block in training.
        experts: The experts that replace the MLP in some or all layers.
        latents: The latents of queries, keys and values (multi-head latent attention).
        out_bias: Whether the output projection of attention has a bias.
        attention_gate: Whether attention's output is multiplied by a sigmoid of a linear function
            of its input, element by element, before the output projection (Qwen3-Next).
        norms: The norms; None for an RMSNorm before attention and before the MLP.
        feed_forward: The MLP; None for a SwiGLU without biases.
        sliding: The layers with sliding-window attention.
        positions: The number of learned positions that are added to the embedding, in place of
            rotary ones (GPT-2). It is also the maximum length of a document.
        rotary_dim: The number of the first elements of a head that have rotary positions (Phi); all
            when None.
        query_scalar: Scores are divided by its square root; head_size when None (Gemma 2).
        score_softcap: c, where a score s becomes c * tanh(s / c) (Gemma 2).
        logit_softcap: The same for logits.
        embedding_scale: The factor of embeddings, rounded to their dtype (Gemma).
        full_heads: The heads of layers without a sliding window; None for those of all layers.
        value_norm: Whether values are normalized, per head and without a weight (Gemma 4).
        layer_scales: Whether the output of each layer has a constant factor, a buffer (Gemma 4).
        residual_scale: The factor of what attention and the MLP add to the stream (Granite).
        logit_divisor: What logits are divided by (Granite).
        no_rope_every: Layers no_rope_every - 1, 2 * no_rope_every - 1, and so on have no positions
            (SmolLM3); all have when None.
        delta: The layers with the gated delta rule in place of attention (Qwen3-Next).
        attention_sinks: Whether each head has a learned logit in the denominator of its softmax
            (gpt-oss); see `attention.add_sink`.
        bidirectional: Whether a token sees all of its document, as in encoders; by default it sees
            no token after itself.
        classes: The outputs of a head that classifies or rewards documents, in place of one output
            for each token id; None for the latter. See `objectives.classify`.

    Raises:
        ValueError: A value is out of its range; the message names it.

    Examples:
        >>> DecoderConfig(
        ...     vocab_size=259, width=64, layers=2, heads=4, kv_heads=2, mlp_width=128
        ... ).head_size
        16
    """

    vocab_size: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    mlp_width: int
    head_dim: int | None = None
    norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    qk_norm: bool | Literal["wide"] = False
    qkv_bias: bool = False
    tied: bool = False
    dropout: float = 0.0
    experts: Experts | None = None
    latents: Latents | None = None
    out_bias: bool = False
    attention_gate: bool = False
    norms: Norms | None = None
    feed_forward: FeedForward | None = None
    sliding: Sliding | None = None
    positions: int | None = None
    rotary_dim: int | None = None
    query_scalar: float | None = None
    score_softcap: float | None = None
    logit_softcap: float | None = None
    embedding_scale: float | None = None
    residual_scale: float | None = None
    logit_divisor: float | None = None
    no_rope_every: int | None = None
    delta: Delta | None = None
    attention_sinks: bool = False
    bidirectional: bool = False
    classes: int | None = None
    full_heads: FullHeads | None = None
    value_norm: bool = False
    layer_scales: bool = False

    def __attrs_post_init__(self) -> None:
        for field in ("vocab_size", "width", "layers", "heads", "kv_heads", "mlp_width"):
            self._require(field, "at least 1", ok=1 <= getattr(self, field) < math.inf)
        # Each key head serves the same number of query heads.
        is_divisor = self.heads % self.kv_heads == 0
        self._require("kv_heads", f"a divisor of heads = {self.heads}", ok=is_divisor)
        if self.latents is not None:
            # `wkv` projects a latent to the keys and values of every query head.
            self._require("kv_heads", "heads, with latents", ok=self.kv_heads == self.heads)
            # These describe heads that are projected directly from the residual stream.
            for field in (
                "head_dim",
                "qk_norm",
                "qkv_bias",
                "out_bias",
                "attention_gate",
                "rotary_dim",
                "positions",
                "no_rope_every",
                "attention_sinks",
                "value_norm",
            ):
                self._require(field, "left out, with latents", ok=not getattr(self, field))
        ok = self.head_dim is None or 1 <= self.head_dim < math.inf
        self._require("head_dim", "a finite number of at least 1", ok=ok)
        has_size = self.latents is not None or self.head_dim is not None
        ok = has_size or self.width % self.heads == 0
        self._require("width", f"a multiple of heads = {self.heads}, or head_dim given", ok=ok)
        # Rotary positions turn pairs of elements; with learned ones heads may have any size.
        is_even = self.rotary_size >= 2 and self.rotary_size % 2 == 0
        is_rotary_valid = is_even and self.rotary_size <= self.head_size
        ok = self.positions is not None or is_rotary_valid
        # The message names `rotary_dim` where the user set it, and else the size of a head.
        if self.rotary_dim is not None:
            self._require("rotary_dim", f"even, from 2 to head_size = {self.head_size}", ok=ok)
        self._require("head_size", "even and at least 2, for the rotary pairs", ok=ok)
        self._require("norm_eps", "positive", ok=0 < self.norm_eps < math.inf)
        self._require("rope_theta", "above 1", ok=1 < self.rope_theta < math.inf)
        self._require("dropout", "in [0, 1)", ok=0 <= self.dropout < 1)
        # With `first` or `every` beyond the depth the model would be dense.
        ok = self.experts is None or bool(self.expert_layers)
        self._require("experts", f"in some of the {self.layers} layers", ok=ok)
        # A window of all layers or of some would say nothing of those without attention.
        ok = self.delta is None or self.sliding is None
        self._require("sliding", "left out, with delta layers", ok=ok)
        ok = self.delta is None or self.latents is None
        self._require("latents", "left out, with delta layers", ok=ok)
        ok = self.delta is None or bool(self.delta_layers)
        self._require("delta", f"in some of the {self.layers} layers", ok=ok)
        self._check_options()

    def _check_options(self) -> None:
        if self.full_heads is not None:
            # Tables of rotary positions are made for sliding layers and for all others.
            has_theta = self.sliding is not None and self.sliding.rope_theta is not None
            ok = has_theta and not (self.latents or self.rotary_dim or self.qk_norm == "wide")
            rule = "with sliding layers that have a rope_theta, and without latents, rotary_dim, "
            self._require("full_heads", rule + "wide norms", ok=ok)
            ok = self.heads % self.full_heads.kv_heads == 0
            self._require("full_heads", f"of kv_heads that divide heads = {self.heads}", ok=ok)
        # Options that are valid alone, and that no layer implements together.
        self._require("qk_norm", "False, True or 'wide'", ok=self.qk_norm in (False, True, "wide"))
        # `WideNorm`, over the heads of all ranks, exists as an RMSNorm only.
        ok = self.qk_norm != "wide" or self.norm_config.kind == "rms"
        self._require("qk_norm", "per head, where norms are no RMSNorms", ok=ok)
        ok = self.experts is None or self.feed_forward in (None, FeedForward())
        self._require(
            "feed_forward", "left out, with experts, which have gated and activation", ok=ok
        )
        ok = not (self.layer_scales and self.experts)
        self._require("layer_scales", "False, with experts, whose layers have none", ok=ok)
        self._require("tied", "False, with a head of classes", ok=not (self.tied and self.classes))
        for field in ("latents", "sliding", "delta"):
            ok = not self.bidirectional or getattr(self, field) is None
            self._require(field, "left out, where attention is bidirectional", ok=ok)
        sliding_theta = self.sliding and self.sliding.rope_theta
        rotary = self.rope_scaling or self.rotary_dim or sliding_theta or self.no_rope_every
        ok = self.positions is None or not rotary
        self._require("positions", "left out, where rotary positions are configured", ok=ok)
        if isinstance(self.rope_scaling, LongRopeScaling):  # the others scale any number of pairs
            pairs = self.rotary_size // 2
            ok = len(self.rope_scaling.short) == pairs
            self._require("rope_scaling", f"of {pairs} factors", ok=ok)
        for field in (
            "positions",
            "query_scalar",
            "score_softcap",
            "logit_softcap",
            "embedding_scale",
            "residual_scale",
            "logit_divisor",
            "no_rope_every",
            "classes",
        ):
            value = getattr(self, field)
            self._require(field, "above 0", ok=value is None or 0 < value < math.inf)

    def _require(self, field: str, rule: str, *, ok: bool) -> None:
        if not ok:
            raise ValueError(f"DecoderConfig: {field} must be {rule}, got {getattr(self, field)}")

    def for_layer(self, layer: int) -> DecoderConfig:
        """Return the configuration with the heads of a layer; `full_heads` is None if it slides."""
        if self.full_heads is None:
            return self
        if layer in self.sliding_layers:
            return attrs.evolve(self, full_heads=None)
        return attrs.evolve(self, head_dim=self.full_heads.size, kv_heads=self.full_heads.kv_heads)

    @property
    def outputs(self) -> int:
        """The rows of the head: the number of token ids, or of classes."""
        return self.classes or self.vocab_size

    @property
    def head_size(self) -> int:
        """The size of one head of queries and keys: `head_dim`, width // heads, or by latents."""
        if self.latents is not None:
            return self.latents.plain + self.latents.rotary
        return self.width // self.heads if self.head_dim is None else self.head_dim

    @property
    def value_size(self) -> int:
        """The size of one head of values: `head_size`, or that of the latents."""
        return self.head_size if self.latents is None else self.latents.values

    @property
    def rotary_size(self) -> int:
        """The size of the part of a head that has rotary positions."""
        if self.latents is not None:
            return self.latents.rotary
        return self.head_size if self.rotary_dim is None else self.rotary_dim

    def score_scale(self, layer: int) -> float | None:
        """Return the factor of a layer's attention scores; None for 1 / sqrt(head_size)."""
        has_own_theta = self.sliding is not None and self.sliding.rope_theta is not None
        is_unscaled = has_own_theta and layer in self.sliding_layers
        # Only YaRN sharpens scores, and only those of positions that it scales.
        sharpening = getattr(self.rope_scaling, "sharpening", None)
        if is_unscaled or layer in self.no_rope_layers:
            sharpening = None
        if sharpening is None and self.query_scalar is None:
            return None
        return (self.query_scalar or self.head_size) ** -0.5 * (sharpening or 1.0)

    @property
    def max_length(self) -> int | None:
        """The maximum length of a document; None if the architecture sets none."""
        # A learned table ends there; LongRoPE has chosen its factors for `context`.
        return self.positions or getattr(self.rope_scaling, "context", None)

    @property
    def norm_config(self) -> Norms:
        """`norms`, or the default."""
        return self.norms or Norms()

    @property
    def feed_forward_config(self) -> FeedForward:
        """`feed_forward`, or the default."""
        return self.feed_forward or FeedForward()

    @property
    def sliding_layers(self) -> list[int]:
        """The indices of the layers with sliding-window attention."""
        return [] if self.sliding is None else self.sliding.layers(self.layers)

    @property
    def no_rope_layers(self) -> list[int]:
        """The indices of the layers without positions, where the others have rotary ones."""
        every = self.no_rope_every
        return [] if every is None else [*range(every - 1, self.layers, every)]

    @property
    def delta_layers(self) -> list[int]:
        """The indices of the layers with the gated delta rule in place of attention."""
        return [] if self.delta is None else self.delta.layers(self.layers)

    @property
    def expert_layers(self) -> list[int]:
        """The indices of the layers that have experts."""
        return [] if self.experts is None else self.experts.layers(self.layers)


PARTS = {
    "experts": Experts,
    "latents": Latents,
    "norms": Norms,
    "feed_forward": FeedForward,
    "sliding": Sliding,
    "full_heads": FullHeads,
    "delta": Delta,
}
"""The records inside a `DecoderConfig`, by the field's name."""


def parameter_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of every parameter of a decoder, without building it.

    Examples:
        >>> config = DecoderConfig(
        ...     vocab_size=259, width=64, layers=2, heads=4, kv_heads=2, mlp_width=128
        ... )
        >>> parameter_shapes(config)["layers.1.attention.wk.weight"]
        (32, 64)
    """
    # Names are those of `Decoder.named_parameters`, shapes those of torch: [out, in].
    width, norms, experts = config.width, config.norm_config, config.experts
    # What every block has; its MLP follows, which only some layers replace by experts.
    block: dict[str, tuple[int, ...]] = {}
    for name in ["norm"] * norms.before + ["out_norm"] * norms.after:
        for half in ("attention", "mlp"):
            block |= _norm_shapes(f"{half}_{name}", width, config)
    delta = dict[str, tuple[int, ...]]()
    if config.delta is not None:
        delta = _delta_shapes(width, config.delta)
    mlp = _mlp_shapes("mlp", width, config.mlp_width, config.feed_forward_config)
    expert_mlp = {} if experts is None else _expert_shapes(experts, width)
    shapes: dict[str, tuple[int, ...]] = {"embedding.weight": (config.vocab_size, width)}
    if config.positions is not None:
        shapes["positions.weight"] = (config.positions, width)
    # A sliding window and rotary positions have no parameters.
    for i in range(config.layers):
        mixer = delta if i in config.delta_layers else _attention_shapes(config.for_layer(i))
        layer = block | {f"attention.{name}": shape for name, shape in mixer.items()}
        layer |= expert_mlp if i in config.expert_layers else mlp
        shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    shapes |= _norm_shapes("norm", width, config)
    # A tied model has one matrix for both, under the embedding's name.
    if not config.tied:
        shapes["head.weight"] = (config.outputs, width)
    return shapes


def _expert_shapes(experts: Experts, width: int) -> dict[str, tuple[int, ...]]:
    # The matrices of all experts are one tensor each, which a grouped product needs.
    matrices: dict[str, tuple[int, ...]] = {
        "up": (experts.count, experts.width, width),
        "down": (experts.count, width, experts.width),
    }
    if experts.gated:
        matrices = {"gate": matrices["up"], **matrices}
    shapes: dict[str, tuple[int, ...]] = {"mlp.router.weight": (experts.count, width)}
    shapes |= {f"mlp.experts.{name}": shape for name, shape in matrices.items()}
    if experts.bias:
        shapes["mlp.router.logit_bias"] = (experts.count,)
        shapes |= {f"mlp.experts.{name}_bias": shape[:2] for name, shape in matrices.items()}
    if experts.shared:
        shapes |= _mlp_shapes("mlp.shared", width, experts.shared, experts.shared_mlp)
    if experts.shared_gate:
        shapes["mlp.shared_gate.weight"] = (1, width)
    return shapes


def _attention_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    width, size, latents = config.width, config.head_size, config.latents
    if latents is not None:
        return _latent_shapes(config, latents)
    # Heads need not fill the stream: with a `head_dim` of its own, q_width may differ from width.
    q_width, kv_width = config.heads * size, config.kv_heads * size
    shapes: dict[str, tuple[int, ...]] = {
        "wq.weight": (q_width, width),
        "wk.weight": (kv_width, width),
        "wv.weight": (kv_width, width),
        "wo.weight": (width, q_width),
    }
    if config.attention_gate:
        shapes["wg.weight"] = (q_width, width)
    if config.full_heads is not None and config.full_heads.tied_values:
        del shapes["wv.weight"]
    if config.qkv_bias:
        weights = {x: shapes[f"w{x}.weight"] for x in "qkv" if f"w{x}.weight" in shapes}
        shapes |= {f"w{x}.bias": shape[:1] for x, shape in weights.items()}
    if config.out_bias:
        shapes["wo.bias"] = (width,)
    if config.attention_sinks:
        shapes["sinks"] = (config.heads,)
    if config.qk_norm:
        # A norm per head has one weight for all heads, a wide one a weight for each element.
        is_wide = config.qk_norm == "wide"
        shapes |= _norm_shapes("q_norm", q_width if is_wide else size, config)
        shapes |= _norm_shapes("k_norm", kv_width if is_wide else size, config)
    return shapes


def _norm_shapes(name: str, size: int, config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    parameters = ("weight", "bias") if config.norm_config.kind == "layer" else ("weight",)
    return {f"{name}.{x}": (size,) for x in parameters}


def _latent_shapes(config: DecoderConfig, latents: Latents) -> dict[str, tuple[int, ...]]:
    width, heads = config.width, config.heads
    rank, kv_rank = latents.query_rank, latents.kv_rank
    shapes: dict[str, tuple[int, ...]] = {
        "wq.weight": (heads * config.head_size, rank or width),
        "kv_latent.weight": (kv_rank, width),
        **_norm_shapes("kv_latent_norm", kv_rank, config),
        # One rotary key, without a factor of heads: all heads share it.
        "k_rotary.weight": (latents.rotary, width),
        # Keys without positions and values, fused in one matrix, head by head.
        "wkv.weight": (heads * (latents.plain + latents.values), kv_rank),
        "wo.weight": (width, heads * latents.values),
    }
    if rank is not None:
        shapes["q_latent.weight"] = (rank, width)
        shapes |= _norm_shapes("q_latent_norm", rank, config)
    return shapes


def _delta_shapes(width: int, delta: Delta) -> dict[str, tuple[int, ...]]:
    keys, values = delta.key_heads * delta.key_size, delta.value_heads * delta.value_size
    gates = (delta.value_heads, width)
    return {
        "wq.weight": (keys, width),
        "wk.weight": (keys, width),
        "wv.weight": (values, width),
        "wg.weight": (values, width),
        "wb.weight": gates,
        "wa.weight": gates,
        "wa.bias": gates[:1],
        "wa.log_rate": gates[:1],
        "q_conv.weight": (keys, delta.conv),
        "k_conv.weight": (keys, delta.conv),
        "v_conv.weight": (values, delta.conv),
        # One weight for all heads, and never an offset: the norm is that of the rule.
        "gated_norm.weight": (delta.value_size,),
        "wo.weight": (width, values),
    }


def _mlp_shapes(
    name: str,
    width: int,
    inner: int,
    config: FeedForward,
) -> dict[str, tuple[int, ...]]:
    linears = {"gate": (inner, width)} if config.gated else {}
    linears |= {"up": (inner, width), "down": (width, inner)}
    shapes: dict[str, tuple[int, ...]] = {}
    for linear, shape in linears.items():
        shapes[f"{name}.{linear}.weight"] = shape
        if config.bias:
            shapes[f"{name}.{linear}.bias"] = shape[:1]
    return shapes


def count_parameters(config: DecoderConfig) -> int:
    """Return the number of parameters; a tied embedding counts once.

    Examples:
        >>> count_parameters(
        ...     DecoderConfig(vocab_size=10, width=4, layers=1, heads=1, kv_heads=1, mlp_width=8)
        ... )
        252
    """
    return sum(math.prod(shape) for shape in parameter_shapes(config).values())


def count_active_parameters(config: DecoderConfig) -> int:
    """Return the number of active parameters of a token: all but the experts it does not choose.

    Examples:
        >>> config = DecoderConfig(
        ...     vocab_size=10, width=4, layers=1, heads=1, kv_heads=1, mlp_width=8
        ... )
        >>> sparse = attrs.evolve(config, experts=Experts(count=8, top_k=2, width=4))
        >>> count_active_parameters(config), count_active_parameters(sparse)
        (252, 284)
    """
    return count_parameters(config) - len(config.expert_layers) * idle_parameters(config)


def idle_parameters(config: DecoderConfig) -> int:
    """Return the inactive parameters of an expert layer for a token; 0 without experts.

    Examples:
        >>> config = DecoderConfig(
        ...     vocab_size=10, width=4, layers=1, heads=1, kv_heads=1, mlp_width=8
        ... )
        >>> idle_parameters(attrs.evolve(config, experts=Experts(count=8, top_k=2, width=4)))
        288
    """
    experts = config.experts
    if experts is None:
        return 0
    matrices = (3 if experts.gated else 2) * config.width * experts.width  # gate, up and down
    biases = (1 + experts.gated) * experts.width + config.width if experts.bias else 0
    return (experts.count - experts.top_k) * (matrices + biases)
