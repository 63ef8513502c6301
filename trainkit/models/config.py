"""The architecture of a decoder as one record, and the parameters that follow from it."""

from __future__ import annotations

import math
from typing import Literal

import attrs
from attrs.validators import optional

from trainkit.types import ConfigError, at_least, non_negative, one_of, positive, rule


@attrs.frozen
class Llama3Scaling:
    """How Llama 3.1 and later stretch rotary wavelengths for a longer context.

    Wavelengths above `original_length / low_freq_factor` tokens are multiplied by `factor`, those
    below `original_length / high_freq_factor` stay, and frequencies in between are blended ("The
    Llama 3 Herd of Models", 2024, section 3.4).

    Examples:
        >>> Llama3Scaling(factor=8.0).original_length
        8192
    """

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_length: int = 8192

    def __attrs_post_init__(self) -> None:
        ok = self.factor >= 1 and self.original_length >= 1
        if not ok or not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                "Llama3Scaling: want factor >= 1, 0 < low_freq_factor < high_freq_factor and "
                f"original_length >= 1, got {self}"
            )


@attrs.frozen
class YarnScaling:
    """How DeepSeek-V2 and later stretch rotary wavelengths for a longer context.

    A rotary pair that turns more than `beta_fast` times in `original_length` tokens stays, one that
    turns fewer than `beta_slow` times is slowed by `factor`, and those in between are blended, by
    their number. All scores are multiplied by (0.1 * mscale * ln(factor) + 1) ** 2 (Peng et al.,
    "YaRN", 2023, section 3; of DeepSeek's two factors, mscale and mscale_all_dim, equal ones).

    Examples:
        >>> round(YarnScaling(factor=40.0, original_length=4096).sharpening, 4)
        1.8739
    """

    factor: float
    original_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0

    def __attrs_post_init__(self) -> None:
        ok = self.factor >= 1 and self.original_length >= 1 and self.mscale >= 0
        if not ok or not 0 < self.beta_slow < self.beta_fast:
            raise ValueError(
                "YarnScaling: want factor >= 1, original_length >= 1, mscale >= 0 and 0 < "
                f"beta_slow < beta_fast, got {self}"
            )

    @property
    def sharpening(self) -> float:
        """What scores are multiplied by."""
        return (0.1 * self.mscale * math.log(self.factor) + 1) ** 2


@attrs.frozen(kw_only=True)
class Latents:
    """The narrow latents that queries, keys and values of all heads are made of.

    That is multi-head latent attention (DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1). A head of
    queries or keys has a part without positions beside one with rotary positions; the latter part
    of the keys is one for all heads.

    Raises:
        ConfigError: A value breaks its rule.

    Examples:
        >>> Latents(kv_rank=512, plain=128, rotary=64, values=128).query_rank
        >>> Latents(kv_rank=512, plain=128, rotary=63, values=128)
        Traceback (most recent call last):
        ...
        trainkit.types.ConfigError: rotary must be even and at least 2, got 63
    """

    query_rank: int | None = attrs.field(default=None, validator=optional(positive))
    """The size of the latent of queries; None makes queries of the residual stream."""

    kv_rank: int = attrs.field(validator=positive)
    """The size of the latent of keys and values."""

    plain: int = attrs.field(validator=positive)
    """The size of the part of a head of queries and keys that has no positions."""

    rotary: int = attrs.field(
        validator=rule(lambda x: x >= 2 and x % 2 == 0, "even and at least 2")
    )
    """The size of the part that has."""

    values: int = attrs.field(validator=positive)
    """The size of a head of values."""


@attrs.frozen(kw_only=True)
class Experts:
    """The experts that take the place of an MLP.

    Raises:
        ConfigError: A value breaks its rule, or the choices do not fit the experts.

    Examples:
        >>> Experts(count=8, chosen=2, width=128).scores
        'softmax'
        >>> Experts(count=8, chosen=9, width=128)
        Traceback (most recent call last):
        ...
        trainkit.types.ConfigError: Experts: 9 of 8 experts cannot be chosen from 1 of 1 equal...
    """

    count: int = attrs.field(validator=positive)
    """How many there are in a layer, E."""

    chosen: int = attrs.field(validator=positive)
    """How many a token goes to, k."""

    width: int = attrs.field(validator=positive)
    """The inner size of one."""

    shared: int = attrs.field(default=0, validator=non_negative)
    """The inner size of the MLP that every token goes through beside them; 0 for none."""

    first: int = attrs.field(default=0, validator=non_negative)
    """The first layer that may have experts; those before it have an MLP."""

    every: int = attrs.field(default=1, validator=positive)
    """Only every so many layers have experts: layers every - 1, 2 * every - 1, and so on."""

    scores: Literal["softmax", "sigmoid"] = attrs.field(
        default="softmax", validator=one_of("softmax", "sigmoid")
    )
    """How logits become scores; see `softmax_topk` and `sigmoid_topk`."""

    renormalise: bool = True
    """Whether a token's weights are divided by their sum."""

    biased: bool = False
    """Whether a bias, which `advance_routers_` moves, is added to the scores for the choice."""

    groups: int = 1
    """Into how many groups the experts are divided."""

    groups_chosen: int = 1
    """Of how many groups a token may choose experts."""

    scale: float = attrs.field(default=1.0, validator=positive)
    """What weights are multiplied by, after all."""

    capacity: float = attrs.field(
        default=0.0, validator=rule(lambda value: 0 <= value < math.inf, "at least 0 and finite")
    )
    """How many times its even part of the choices an expert may take; what is above is dropped. 0
    drops nothing. Each rank limits those of its own microbatch, so by its nature what is dropped
    depends on the layout; see `limited`."""

    jitter: float = attrs.field(
        default=0.0, validator=rule(lambda value: 0 <= value < 1, "in [0, 1)")
    )
    """By how much at most, as a part of it, noise moves what a router sees, while training; see
    `jittered`."""

    def __attrs_post_init__(self) -> None:
        try:
            check_groups("Experts", self.count, self.chosen, self.groups, self.groups_chosen)
        except ValueError as error:
            raise ConfigError(str(error), where="experts", got=attrs.asdict(self)) from None
        own = self.biased, self.groups > 1, self.scale != 1
        if self.scores == "softmax" and any(own):
            what = "a bias, groups and a scale are for scores='sigmoid'"
            raise ConfigError(f"Experts: {what}", where="experts", got=attrs.asdict(self))
        if self.chosen == 1 and self.renormalise and self.scores == "softmax":
            what = "chosen=1 with renormalise=True weighs every choice 1, and trains no router"
            raise ConfigError(f"Experts: {what}; set renormalise=False", where="renormalise")

    def layers(self, layers: int) -> list[int]:
        """Return the numbers of the layers that have experts, of so many layers.

        Examples:
            >>> Experts(count=8, chosen=2, width=128, first=1, every=2).layers(6)
            [1, 3, 5]
        """
        return [i for i in range(layers) if i >= self.first and (i + 1) % self.every == 0]


def check_groups(where: str, experts: int, chosen: int, groups: int, groups_chosen: int) -> None:
    """Refuse groups that do not divide the experts, or of which too few experts may be chosen.

    Raises:
        ValueError: They are such.
    """
    at_least(1, where, groups=groups, groups_chosen=groups_chosen)
    if experts % groups or groups_chosen > groups or chosen > groups_chosen * (experts // groups):
        raise ValueError(
            f"{where}: {chosen} of {experts} experts cannot be chosen from {groups_chosen} of "
            f"{groups} equal groups"
        )


@attrs.frozen
class DecoderConfig:
    """The architecture of a decoder.

    Args:
        vocab_size: Number of token ids, V.
        width: Size of the residual stream, D.
        layers: Number of blocks.
        heads: Number of query heads, H.
        kv_heads: Number of key and value heads, K; divides H, and with latents is H.
        mlp_width: Inner size of the SwiGLU.
        head_dim: Size of one head, even; width // heads when None.
        norm_eps: Added to the mean square in every RMSNorm.
        rope_theta: Base of the rotary wavelengths.
        rope_scaling: How they are stretched, if they are.
        qk_norm: Whether queries and keys are normalised per head (Qwen3).
        qkv_bias: Whether the query, key and value projections have a bias (Qwen2).
        tied: Whether the embedding is also the output weight.
        dropout: Probability on the embedding and on both branches of every block, while training.
        experts: What takes the place of the MLP in some layers or all.
        latents: What queries, keys and values are made of, if not of the residual stream.

    Raises:
        ValueError: A value breaks the rule that the message names.

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
    rope_scaling: Llama3Scaling | YarnScaling | None = None
    qk_norm: bool = False
    qkv_bias: bool = False
    tied: bool = False
    dropout: float = 0.0
    experts: Experts | None = None
    latents: Latents | None = None

    def __attrs_post_init__(self) -> None:
        for field in ("vocab_size", "width", "layers", "heads", "kv_heads", "mlp_width"):
            self._require(field, "at least 1", ok=getattr(self, field) >= 1)
        self._require("kv_heads", f"a divisor of heads = {self.heads}", ok=self._divides_heads())
        if self.latents is not None:
            self._require("kv_heads", "heads, with latents", ok=self.kv_heads == self.heads)
            for field in ("head_dim", "qk_norm", "qkv_bias"):
                self._require(field, "left out, with latents", ok=not getattr(self, field))
        ok = self.latents is not None or self.head_dim is not None or self.width % self.heads == 0
        self._require("width", f"a multiple of heads = {self.heads}, or head_dim given", ok=ok)
        ok = self.rotary_size >= 2 and self.rotary_size % 2 == 0
        self._require("head_size", "even and at least 2, for the rotary pairs", ok=ok)
        self._require("norm_eps", "positive", ok=self.norm_eps > 0)
        self._require("rope_theta", "above 1", ok=self.rope_theta > 1)
        self._require("dropout", "in [0, 1)", ok=0 <= self.dropout < 1)
        ok = self.experts is None or bool(self.expert_layers)
        self._require("experts", f"in some of the {self.layers} layers", ok=ok)

    def _divides_heads(self) -> bool:
        return self.heads % self.kv_heads == 0

    def _require(self, field: str, rule: str, *, ok: bool) -> None:
        if not ok:
            raise ValueError(f"DecoderConfig: {field} must be {rule}, got {getattr(self, field)}")

    @property
    def head_size(self) -> int:
        """The size of one head of queries and keys: `head_dim`, width // heads, or by latents."""
        if self.latents is not None:
            return self.latents.plain + self.latents.rotary
        return self.width // self.heads if self.head_dim is None else self.head_dim

    @property
    def value_size(self) -> int:
        """The size of one head of values: `head_size` but with latents."""
        return self.head_size if self.latents is None else self.latents.values

    @property
    def rotary_size(self) -> int:
        """The size of the part of a head that has rotary positions: all but with latents."""
        return self.head_size if self.latents is None else self.latents.rotary

    @property
    def score_scale(self) -> float | None:
        """What attention multiplies scores by; None for 1 / sqrt(head_size)."""
        if not isinstance(self.rope_scaling, YarnScaling):
            return None
        return self.head_size**-0.5 * self.rope_scaling.sharpening

    @property
    def expert_layers(self) -> list[int]:
        """The numbers of the layers that have experts."""
        return [] if self.experts is None else self.experts.layers(self.layers)


def parameter_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of every parameter of a decoder, without building it.

    Examples:
        >>> config = DecoderConfig(
        ...     vocab_size=259, width=64, layers=2, heads=4, kv_heads=2, mlp_width=128
        ... )
        >>> parameter_shapes(config)["layers.1.attention.wk.weight"]
        (32, 64)
    """
    width = config.width
    attention = _attention_shapes(config)
    block = {"attention_norm.weight": (width,), "mlp_norm.weight": (width,)}
    block |= {f"attention.{name}": shape for name, shape in attention.items()}
    shapes: dict[str, tuple[int, ...]] = {"embedding.weight": (config.vocab_size, width)}
    mlp, experts = _mlp_shapes("mlp", width, config.mlp_width), _expert_shapes(config)
    for i in range(config.layers):
        whole = block | (experts if i in config.expert_layers else mlp)
        shapes |= {f"layers.{i}.{name}": shape for name, shape in whole.items()}
    shapes["norm.weight"] = (width,)
    if not config.tied:
        shapes["head.weight"] = (config.vocab_size, width)
    return shapes


def _attention_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    width, size, latents = config.width, config.head_size, config.latents
    if latents is not None:
        return _latent_shapes(width, config.heads, size, latents)
    q_width, kv_width = config.heads * size, config.kv_heads * size
    shapes: dict[str, tuple[int, ...]] = {
        "wq.weight": (q_width, width),
        "wk.weight": (kv_width, width),
        "wv.weight": (kv_width, width),
        "wo.weight": (width, q_width),
    }
    if config.qkv_bias:
        shapes |= {f"w{x}.bias": shapes[f"w{x}.weight"][:1] for x in "qkv"}
    if config.qk_norm:
        shapes |= {f"{x}_norm.weight": (size,) for x in "qk"}
    return shapes


def _latent_shapes(
    width: int, heads: int, size: int, latents: Latents
) -> dict[str, tuple[int, ...]]:
    rank, kv_rank = latents.query_rank, latents.kv_rank
    shapes: dict[str, tuple[int, ...]] = {
        "wq.weight": (heads * size, rank or width),
        "kv_latent.weight": (kv_rank, width),
        "kv_latent_norm.weight": (kv_rank,),
        "k_rotary.weight": (latents.rotary, width),
        "wkv.weight": (heads * (latents.plain + latents.values), kv_rank),
        "wo.weight": (width, heads * latents.values),
    }
    if rank is not None:
        shapes |= {"q_latent.weight": (rank, width), "q_latent_norm.weight": (rank,)}
    return shapes


def _mlp_shapes(name: str, width: int, inner: int) -> dict[str, tuple[int, ...]]:
    shapes = {"gate": (inner, width), "up": (inner, width), "down": (width, inner)}
    return {f"{name}.{own}.weight": shape for own, shape in shapes.items()}


def _expert_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    width, experts = config.width, config.experts
    if experts is None:
        return {}
    wide = (experts.count, experts.width, width)
    shapes = {
        "mlp.router.weight": (experts.count, width),
        "mlp.experts.gate": wide,
        "mlp.experts.up": wide,
        "mlp.experts.down": (experts.count, width, experts.width),
    }
    return shapes | (_mlp_shapes("mlp.shared", width, experts.shared) if experts.shared else {})


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
    """Return the number of parameters that a token meets: all but experts that it does not choose.

    Examples:
        >>> config = DecoderConfig(
        ...     vocab_size=10, width=4, layers=1, heads=1, kv_heads=1, mlp_width=8
        ... )
        >>> sparse = attrs.evolve(config, experts=Experts(count=8, chosen=2, width=4))
        >>> count_active_parameters(config), count_active_parameters(sparse)
        (252, 284)
    """
    return count_parameters(config) - len(config.expert_layers) * idle_parameters(config)


def idle_parameters(config: DecoderConfig) -> int:
    """Return the parameters of an expert layer that a token does not meet; 0 without experts.

    Examples:
        >>> sparse = Experts(count=8, chosen=2, width=4)
        >>> idle_parameters(
        ...     DecoderConfig(
        ...         vocab_size=10,
        ...         width=4,
        ...         layers=1,
        ...         heads=1,
        ...         kv_heads=1,
        ...         mlp_width=8,
        ...         experts=sparse,
        ...     )
        ... )
        288
    """
    experts = config.experts
    if experts is None:
        return 0
    return (experts.count - experts.chosen) * 3 * config.width * experts.width
