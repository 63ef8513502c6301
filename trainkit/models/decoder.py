"""One pre-norm decoder for the Llama and Qwen3 family, and its initial values.

RMSNorm, rotary embeddings, grouped-query attention, SwiGLU. Names, shapes and the half-split rotary
convention are such that Hugging Face weights load without permuting. A model holds parameters only,
no buffers, so it is built on the meta device and filled box by box; the kernel of its attention is
an argument.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import attrs
import torch
from torch import Tensor, nn

from trainkit import noise
from trainkit.attention.varlen import varlen
from trainkit.hashing import key_of
from trainkit.types import Attend, Spans, Weights

# ------------------------------------------------------------------------------------ configuration


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
class DecoderConfig:
    """The architecture of a decoder.

    Args:
        vocab_size: Number of token ids, V.
        width: Size of the residual stream, D.
        layers: Number of blocks.
        heads: Number of query heads, H.
        kv_heads: Number of key and value heads, K; divides H.
        mlp_width: Inner size of the SwiGLU.
        head_dim: Size of one head, even; width // heads when None.
        norm_eps: Added to the mean square in every RMSNorm.
        rope_theta: Base of the rotary wavelengths.
        rope_scaling: How they are stretched, if they are.
        qk_norm: Whether queries and keys are normalised per head (Qwen3).
        qkv_bias: Whether the query, key and value projections have a bias (Qwen2).
        tied: Whether the embedding is also the output weight.
        dropout: Probability on the embedding and on both branches of every block, while training.

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
    rope_scaling: Llama3Scaling | None = None
    qk_norm: bool = False
    qkv_bias: bool = False
    tied: bool = False
    dropout: float = 0.0

    def __attrs_post_init__(self) -> None:
        for field in ("vocab_size", "width", "layers", "heads", "kv_heads", "mlp_width"):
            self._require(field, "at least 1", ok=getattr(self, field) >= 1)
        self._require("kv_heads", f"a divisor of heads = {self.heads}", ok=self._divides_heads())
        ok = self.head_dim is not None or self.width % self.heads == 0
        self._require("width", f"a multiple of heads = {self.heads}, or head_dim given", ok=ok)
        ok = self.head_size >= 2 and self.head_size % 2 == 0
        self._require("head_size", "even and at least 2, for the rotary pairs", ok=ok)
        self._require("norm_eps", "positive", ok=self.norm_eps > 0)
        self._require("rope_theta", "above 1", ok=self.rope_theta > 1)
        self._require("dropout", "in [0, 1)", ok=0 <= self.dropout < 1)

    def _divides_heads(self) -> bool:
        return self.heads % self.kv_heads == 0

    def _require(self, field: str, rule: str, *, ok: bool) -> None:
        if not ok:
            raise ValueError(f"DecoderConfig: {field} must be {rule}, got {getattr(self, field)}")

    @property
    def head_size(self) -> int:
        """The size of one head: `head_dim`, or width // heads."""
        return self.width // self.heads if self.head_dim is None else self.head_dim


# -------------------------------------------------------------------------------- rotary embeddings


def rotary_frequencies(
    head_dim: int,
    *,
    theta: float,
    scaling: Llama3Scaling | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
) -> Tensor:
    """Return the angle per token, in radians, of each rotary pair: `[head_dim / 2]`.

    Su et al., "RoFormer" (2021).

    Examples:
        >>> rotary_frequencies(4, theta=100.0)
        tensor([1.0000, 0.1000])
    """
    exponents = torch.arange(0, head_dim, 2, dtype=dtype, device=device) / head_dim
    frequencies = 1.0 / theta**exponents
    if scaling is None:
        return frequencies
    turns = scaling.original_length / (2 * math.pi) * frequencies
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return torch.lerp(frequencies / scaling.factor, frequencies, kept)


def rotary_table(
    position_ids: Tensor, frequencies: Tensor, *, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of the angles at each position, both `[B, S, 1, head_dim / 2]`.

    Examples:
        >>> cos, sin = rotary_table(torch.tensor([[0, 1]]), torch.ones(1), dtype=torch.float32)
        >>> cos.shape, sin[0, 0].item()
        (torch.Size([1, 2, 1, 1]), 0.0)
    """
    angles = position_ids[:, :, None, None].to(frequencies.dtype) * frequencies
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (i, i + head_dim / 2) of `x` `[B, S, H, head_dim]` by its angle.

    Examples:
        >>> x = torch.tensor([1.0, 0.0]).reshape(1, 1, 1, 2)
        >>> rotate(x, torch.tensor(0.0), torch.tensor(1.0)).flatten()
        tensor([0., 1.])
    """
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


# ------------------------------------------------------------------------------------------ modules


class Linear(nn.Linear):
    """`nn.Linear` that stays empty until it is filled: drawing numbers nobody keeps takes time."""

    def reset_parameters(self) -> None:  # pyrefly: ignore[missing-override-decorator]
        """Leave the values as they are; a `Weights` function fills them."""


class Embedding(nn.Embedding):
    """`nn.Embedding` that stays empty until it is filled."""

    def reset_parameters(self) -> None:  # pyrefly: ignore[missing-override-decorator]
        """Leave the values as they are; a `Weights` function fills them."""


class Head(Linear):
    """The output projection: logits, or what a fused linear cross entropy needs in place of them.

    Even for `output="hidden"` the weight is read inside a forward of its own module, which is where
    FSDP gathers it.
    """

    def __init__(self, width: int, vocab_size: int, *, output: Literal["logits", "hidden"]) -> None:
        super().__init__(width, vocab_size, bias=False)
        self.output = output

    def forward(  # pyrefly: ignore[bad-override-param-name, missing-override-decorator]
        self, hidden: Tensor
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Map hidden states `[B, S, D]` to logits, or to the pair (hidden states, weight)."""
        return project(hidden, self.weight, output=self.output)


def project(
    hidden: Tensor, weight: Tensor, *, output: Literal["logits", "hidden"]
) -> Tensor | tuple[Tensor, Tensor]:
    """Return logits `[B, S, V]`, or the pair (hidden `[B, S, D]`, weight `[V, D]`).

    Examples:
        >>> hidden, weight = project(torch.ones(1, 2, 4), torch.ones(8, 4), output="hidden")
        >>> (hidden @ weight.T).shape
        torch.Size([1, 2, 8])
    """
    if output == "logits":
        return nn.functional.linear(hidden, weight)
    # A view, never the parameter itself: FSDP2 (torch 2.11 to 2.13) registers a backward hook on
    # every tensor a module returns, and hooks on a leaf would pile up, one per call.
    return hidden, weight.view_as(weight)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions.

    The number of heads follows from the rows of the weights, so it may hold a shard of them.
    """

    def __init__(self, config: DecoderConfig, *, attend: Attend) -> None:
        super().__init__()
        size, bias = config.head_size, config.qkv_bias
        self.head_size, self.attend = size, attend
        self.wq = Linear(config.width, config.heads * size, bias=bias)
        self.wk = Linear(config.width, config.kv_heads * size, bias=bias)
        self.wv = Linear(config.width, config.kv_heads * size, bias=bias)
        self.wo = Linear(config.heads * size, config.width, bias=False)
        self.q_norm = nn.RMSNorm(size, config.norm_eps) if config.qk_norm else None
        self.k_norm = nn.RMSNorm(size, config.norm_eps) if config.qk_norm else None

    def forward(  # pyrefly: ignore[missing-override-decorator]
        self, x: Tensor, *, rotary: tuple[Tensor, Tensor], spans: Spans
    ) -> Tensor:
        """Map `[B, S, D]` to `[B, S, D]`."""
        q, k, v = (w(x).unflatten(-1, (-1, self.head_size)) for w in (self.wq, self.wk, self.wv))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, *rotary), rotate(k, *rotary)
        return self.wo(self.attend(q, k, v, spans=spans).flatten(2))


class Mlp(nn.Module):
    """SwiGLU (Shazeer, "GLU variants improve transformer", 2020)."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate = Linear(config.width, config.mlp_width, bias=False)
        self.up = Linear(config.width, config.mlp_width, bias=False)
        self.down = Linear(config.mlp_width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # pyrefly: ignore[missing-override-decorator]
        """Map `[B, S, D]` to `[B, S, D]`."""
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """One layer: attention and an MLP, each on a normalised copy of the residual stream.

    `name` is the layer's name in the whole model ("layers.17"): dropout depends on it, so it stays
    when a pipeline stage holds only some of the layers.
    """

    def __init__(self, config: DecoderConfig, *, attend: Attend, name: str) -> None:
        super().__init__()
        self.name, self.dropout = name, config.dropout
        self.attention_norm = nn.RMSNorm(config.width, config.norm_eps)
        self.attention = Attention(config, attend=attend)
        self.mlp_norm = nn.RMSNorm(config.width, config.norm_eps)
        self.mlp = Mlp(config)

    def forward(  # pyrefly: ignore[missing-override-decorator]
        self,
        x: Tensor,
        *,
        rotary: tuple[Tensor, Tensor],
        spans: Spans,
        noise_key: Tensor | None = None,
    ) -> Tensor:
        """Map `[B, S, D]` to `[B, S, D]`; without a `noise_key` nothing is dropped."""
        branch = self.attention(self.attention_norm(x), rotary=rotary, spans=spans)
        x = x + _drop(branch, noise_key, name=f"{self.name}.attention", p=self.dropout)
        branch = self.mlp(self.mlp_norm(x))
        return x + _drop(branch, noise_key, name=f"{self.name}.mlp", p=self.dropout)


def _drop(x: Tensor, noise_key: Tensor | None, *, name: str, p: float) -> Tensor:
    if noise_key is None:
        return x
    if torch.compiler.is_compiling():
        # Hashing the name cannot be traced: torch 2.13 fails on the 64-bit key it would guard.
        return torch.compiler.disable(noise.dropout)(x, noise_key, name=name, p=p)
    return noise.dropout(x, noise_key, name=name, p=p)


class Decoder(nn.Module):
    """A decoder-only language model.

    Its values are uninitialised memory until a `Weights` function fills them: `build_decoder` does
    both.

    Args:
        config: The architecture.
        attend: The attention kernel.
        head: "logits" to return logits, "hidden" to return the pair (hidden, output weight), which
            a fused linear cross entropy takes; `hidden @ weight.T` are the logits.

    Examples:
        >>> config = DecoderConfig(
        ...     vocab_size=259, width=64, layers=2, heads=4, kv_heads=2, mlp_width=128
        ... )
        >>> with torch.device("meta"):
        ...     model = Decoder(config)
        >>> [name for name, _ in model.named_parameters()][:2]
        ['embedding.weight', 'layers.0.attention_norm.weight']
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        attend: Attend = varlen,
        head: Literal["logits", "hidden"] = "logits",
    ) -> None:
        super().__init__()
        if head not in ("logits", "hidden"):
            raise ValueError(f"Decoder: head must be 'logits' or 'hidden', got {head!r}")
        self.config = config
        self.output: Literal["logits", "hidden"] = head
        self.embedding = Embedding(config.vocab_size, config.width)
        # Keyed by the layer's number, so that a pipeline stage's layers keep their names.
        self.layers = nn.ModuleDict(
            {str(i): Block(config, attend=attend, name=f"layers.{i}") for i in range(config.layers)}
        )
        self.norm = nn.RMSNorm(config.width, config.norm_eps)
        self.head = None if config.tied else Head(config.width, config.vocab_size, output=head)

    def forward(  # pyrefly: ignore[missing-override-decorator]
        self,
        input_ids: Tensor,
        *,
        position_ids: Tensor,
        spans: Spans,
        noise_key: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return logits `[B, S, V]`, or the pair (hidden `[B, S, D]`, output weight `[V, D]`).

        Args:
            input_ids: int64 `[B, S]`.
            position_ids: int64 `[B, S]`, the position of each token in its document.
            spans: The documents, over the flattened rows.
            noise_key: int64 `[B, S]`, from `noise.token_keys`; needed only for dropout while
                training.

        Raises:
            ValueError: Dropout is on, the model is training, and there is no `noise_key`.
        """
        noise_key = self._noise_key_in_use(noise_key)
        x = self.embedding(input_ids)
        x = _drop(x, noise_key, name="embedding", p=self.config.dropout)
        rotary = self._rotary(position_ids, dtype=x.dtype)
        for block in self.layers.values():
            x = block(x, rotary=rotary, spans=spans, noise_key=noise_key)
        x = self.norm(x)
        if self.head is None:
            return project(x, self.embedding.weight, output=self.output)
        return self.head(x)

    def _noise_key_in_use(self, noise_key: Tensor | None) -> Tensor | None:
        """Return the keys if anything is to be dropped, else None."""
        if not self.training or self.config.dropout == 0:
            return None
        if noise_key is None:
            raise ValueError(
                f"Decoder: dropout is {self.config.dropout} and the model is training, but there "
                "is no noise_key; put noise.token_keys(...) into the batch, or call model.eval()"
            )
        return noise_key

    def _rotary(self, position_ids: Tensor, *, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the table all layers share, computed in fp32 (fp64 for an fp64 model)."""
        frequencies = rotary_frequencies(
            self.config.head_size,
            theta=self.config.rope_theta,
            scaling=self.config.rope_scaling,
            dtype=torch.float64 if dtype == torch.float64 else torch.float32,
            device=position_ids.device,
        )
        return rotary_table(position_ids, frequencies, dtype=dtype)


# ----------------------------------------------------------------------------------- initial values


def parameter_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of every parameter of a decoder, without building it.

    Examples:
        >>> config = DecoderConfig(
        ...     vocab_size=259, width=64, layers=2, heads=4, kv_heads=2, mlp_width=128
        ... )
        >>> parameter_shapes(config)["layers.1.attention.wk.weight"]
        (32, 64)
    """
    width, size = config.width, config.head_size
    q_width, kv_width = config.heads * size, config.kv_heads * size
    block = {
        "attention_norm.weight": (width,),
        "attention.wq.weight": (q_width, width),
        "attention.wk.weight": (kv_width, width),
        "attention.wv.weight": (kv_width, width),
        "attention.wo.weight": (width, q_width),
        "mlp_norm.weight": (width,),
        "mlp.gate.weight": (config.mlp_width, width),
        "mlp.up.weight": (config.mlp_width, width),
        "mlp.down.weight": (width, config.mlp_width),
    }
    if config.qkv_bias:
        block |= {f"attention.w{x}.bias": block[f"attention.w{x}.weight"][:1] for x in "qkv"}
    if config.qk_norm:
        block |= {f"attention.{x}_norm.weight": (size,) for x in "qk"}
    shapes: dict[str, tuple[int, ...]] = {"embedding.weight": (config.vocab_size, width)}
    for i in range(config.layers):
        shapes |= {f"layers.{i}.{name}": shape for name, shape in block.items()}
    shapes["norm.weight"] = (width,)
    if not config.tied:
        shapes["head.weight"] = (config.vocab_size, width)
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


def init_weights(config: DecoderConfig, *, seed: int) -> Weights:
    """Return the initial values of a decoder as a function of name and box.

    Norms are 1, biases 0. Matrices, the embedding and the head are normal with variance 1 / (size
    of their last dimension), so that a normalised input keeps its scale; `wo` and `down`, which
    write into the residual stream, are divided by sqrt(2 * layers) (Radford et al., "Language
    models are unsupervised multitask learners", 2019). A fixed 0.02 for the embedding trains a
    small model worse: "tiny" on bytes of source text reached 2.17 nats on held-out text after 150
    steps, and 1.79 like this.

    Returns:
        A `Weights` function: fp32 on the CPU. An element is a function of the seed, the parameter's
        name and the element's index in the whole parameter, so any box equals that part of the
        whole bit for bit. It raises a ValueError for a name that is no parameter of the decoder,
        and for a box outside the parameter.

    Examples:
        >>> config = DecoderConfig(
        ...     vocab_size=259, width=64, layers=2, heads=4, kv_heads=2, mlp_width=128
        ... )
        >>> weights = init_weights(config, seed=0)
        >>> whole = weights("layers.1.mlp.up.weight", (128, 64), (0, 0))
        >>> torch.equal(whole[32:, :16], weights("layers.1.mlp.up.weight", (96, 16), (32, 0)))
        True
    """
    shapes = parameter_shapes(config)

    def weights(name: str, shape: Sequence[int], offset: Sequence[int]) -> Tensor:
        _check_box(name, shape, offset, shapes)
        if name.endswith("norm.weight"):
            return torch.ones(tuple(shape))
        if name.endswith(".bias"):
            return torch.zeros(tuple(shape))
        std = _initial_std(name, fan_in=shapes[name][1], layers=config.layers)
        return noise.normal(key_of(seed, name), shape, offset).mul_(std)

    return weights


def _initial_std(name: str, *, fan_in: int, layers: int) -> float:
    residual = name.endswith((".wo.weight", ".down.weight"))
    return (fan_in * (2 * layers if residual else 1)) ** -0.5


def _check_box(
    name: str, shape: Sequence[int], offset: Sequence[int], shapes: dict[str, tuple[int, ...]]
) -> None:
    if name not in shapes:
        raise ValueError(f"init_weights: {name!r} is no parameter of this decoder")
    whole = shapes[name]
    inside = len(shape) == len(offset) == len(whole) and all(
        start >= 0 and start + size <= full
        for size, start, full in zip(shape, offset, whole, strict=True)
    )
    if not inside:
        raise ValueError(
            f"init_weights: the box of shape {tuple(shape)} at {tuple(offset)} is not inside "
            f"{name}, which has shape {whole}"
        )


def build_decoder(
    config: DecoderConfig,
    *,
    seed: int,
    attend: Attend = varlen,
    head: Literal["logits", "hidden"] = "logits",
) -> Decoder:
    """Return a whole decoder in this process, in fp32 on the CPU, filled with its initial values.

    Examples:
        >>> config = DecoderConfig(
        ...     vocab_size=259, width=64, layers=2, heads=4, kv_heads=2, mlp_width=128
        ... )
        >>> build_decoder(config, seed=0).norm.weight.sum().item()
        64.0
    """
    model, weights = Decoder(config, attend=attend, head=head), init_weights(config, seed=seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights(name, parameter.shape, (0,) * parameter.ndim))
    return model
