"""Model FLOPs, and their share of what devices can do.

They follow from the lengths of documents, because a packed row costs less attention than one
document of its length.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Literal

import attrs
import numpy as np

from trainkit.models.config import DecoderConfig, parameter_shapes
from trainkit.parallel.recompute import read_mode
from trainkit.types import IntArray


def model_flops(
    *,
    linear_parameters: int,
    layers: float,
    heads: int,
    head_dim: float,
    lengths: Sequence[int] | IntArray,
    attention: Literal["causal", "full"] = "causal",
    window: int | None = None,
) -> float:
    """Return the floating-point operations of forward and backward over documents of these lengths.

    A multiplication and an addition are two operations, and backward takes twice what forward does:
    6 for each token and parameter of a matrix it is multiplied with, and in each layer and head 12
    * head_dim for each pair of a query and a key. Recomputation is not counted: these are the
    model's operations, not the hardware's.

    Two conventions count the pairs of a document of s tokens. "causal" counts those that a causal
    model looks at, s (s + 1) / 2. "full" counts all s^2, as the PaLM paper and many tables do
    (Chowdhery et al. 2022, appendix B); it shows a higher utilisation for the same speed. Say which
    one you print.

    Args:
        linear_parameters: Parameters of the matrices that each token is multiplied with: the output
            head counts, the embedding lookup does not, and of experts only those of a token.
        layers: The number of attention layers.
        heads: Query heads of a layer.
        head_dim: The width of a head, the mean of keys and values.
        lengths: Tokens of each document.
        attention: The convention.
        window: The maximum number of keys of a query; "full" counts that many for each.

    Raises:
        ValueError: `attention` is neither.

    Examples:
        >>> from functools import partial
        >>> flops = partial(model_flops, linear_parameters=1000, layers=2, heads=4, head_dim=8)
        >>> flops(lengths=[10, 20])
        383520.0
        >>> flops(lengths=[10, 20], attention="full")
        564000.0
        >>> flops(lengths=[30], attention="full")  # one document costs more than two
        871200.0
        >>> flops(lengths=[10, 20], window=1)  # each query attends to itself only
        203040.0
    """
    if attention not in ("causal", "full"):
        raise ValueError(f'model_flops: attention must be "causal" or "full", got {attention!r}')
    tokens = np.asarray(lengths, dtype=np.float64)
    keys = tokens if window is None else np.minimum(tokens, window)
    # With a window w query i sees min(i, w) keys: w (2 s - w + 1) / 2 pairs of s tokens.
    pairs = tokens * keys if attention == "full" else keys * (2 * tokens - keys + 1) / 2
    linear = 6.0 * linear_parameters * float(tokens.sum())
    return linear + 12.0 * layers * heads * head_dim * float(pairs.sum())


def decoder_flops(
    config: DecoderConfig,
    lengths: Sequence[int] | IntArray,
    *,
    trained: Mapping[str, Sequence[int]] | None = None,
) -> float:
    """Return the floating-point operations of forward and backward of a decoder over documents.

    As `model_flops` with the "causal" convention: of experts only those of a token count, and
    layers with a sliding window have fewer pairs. Delta layers count as in `delta_flops`, and their
    convolutions as matrices. Shapes are those of the architecture, so a matrix
    that is stored quantized counts as a whole one.

    A frozen matrix has no gradient of its own: 4 operations for each token and parameter. Before
    the first parameter that is trained there is no backward pass: 2.

    Args:
        config: The architecture.
        lengths: Tokens of each document.
        trained: The shapes of the parameters that are trained, by their names in the whole model;
            those that `config` does not have are the adapters'. By default all of the model's.

    Examples:
        >>> from trainkit.models import make_decoder_config
        >>> tiny = make_decoder_config("tiny")
        >>> decoder_flops(tiny, [256]) / 256
        6110208.0
        >>> decoder_flops(tiny, [256], trained={"norm.weight": (128,)}) / 256
        2106368.0
        >>> lora = {"a": (8, 128), "b": (128, 8)}
        >>> shapes = {f"layers.3.attention.wo.lora.default.{key}": x for key, x in lora.items()}
        >>> decoder_flops(tiny, [256], trained=shapes) / 256
        2411520.0
    """
    matrices = _list_matrices(config, trained)
    first = _find_first(config, trained)
    total = 0.0
    for matrix in matrices:
        products = 1 + (matrix.takes_gradient or first < matrix.place) + matrix.is_trained
        total += 2.0 * matrix.parameters * products * float(np.sum(lengths))
    layers = [1 + 2 * (first < (layer, _ATTENTION)) for layer in range(config.layers)]
    total += _recurrent_flops(config, lengths, passes=layers)
    return total + _attention_flops(config, lengths, passes=layers)


def delta_flops(config: DecoderConfig, tokens: int, *, layers: float) -> float:
    """Return the floating-point operations of forward and backward of the gated delta rule.

    They are those of the recurrence (Yang et al., "Gated Delta Networks", 2024, equation 10), as
    for attention those of the model and not of its kernels: a token reads the state twice, under
    its key and its query, and writes it once, each with D E multiplications and as many additions
    in every value head. Backward takes twice that. The decay and the chunked form, which does more
    in larger products, do not count.

    Args:
        config: The architecture.
        tokens: The number of tokens; documents do not matter.
        layers: The number of delta layers.

    Examples:
        >>> from trainkit.models import Delta, make_decoder_config
        >>> delta = Delta(key_heads=2, value_heads=4, key_size=16, value_size=8)
        >>> delta_flops(make_decoder_config("tiny", delta=delta), 10, layers=3)
        276480.0
    """
    delta = config.delta
    if delta is None:
        return 0.0
    return 18.0 * layers * delta.value_heads * delta.key_size * delta.value_size * tokens


def recomputed_flops(
    config: DecoderConfig,
    lengths: Sequence[int] | IntArray,
    mode: str,
    *,
    trained: Mapping[str, Sequence[int]] | None = None,
) -> float | None:
    """Return the operations of a decoder's forward pass that a mode of recomputation repeats.

    Added to `decoder_flops`, they give the operations of the hardware, for the hardware FLOPs
    utilization (HFU). A block before the first trained parameter has no backward pass, and is not
    computed again.

    Args:
        config: The architecture.
        lengths: Tokens of each document.
        mode: The mode of `parallel.recompute`.
        trained: As for `decoder_flops`.

    Returns:
        The operations; None for a fraction such as "0.4", whose choice depends on the device.

    Examples:
        >>> from trainkit.models import make_decoder_config
        >>> tiny = make_decoder_config("tiny")
        >>> recomputed_flops(tiny, [256], "none"), recomputed_flops(tiny, [256], "selective")
        (0.0, 0.0)
        >>> recomputed_flops(tiny, [256], "full") / decoder_flops(tiny, [256])
        0.32...
    """
    saved = read_mode(mode)
    if saved is None:
        return 0.0
    if saved.budget is not None:
        return None
    first, _ = _find_first(config, trained)
    repeated_layers = range(max(first, 0), config.layers)
    products = sum(
        2.0 * matrix.parameters * float(np.sum(lengths))
        for matrix in _list_matrices(config, trained)
        if matrix.place[0] in repeated_layers
    )
    passes = [int(layer in repeated_layers) for layer in range(config.layers)]
    attention = _attention_flops(config, lengths, passes=passes)
    # "products/2" saves every second product of a block: about half of the operations.
    every = saved.every.get("products")
    repeated = products * (1.0 if every is None else 1 - 1 / every)
    repeated += _recurrent_flops(config, lengths, passes=passes)
    return repeated + attention * ("attention" not in saved.every)


def _recurrent_flops(
    config: DecoderConfig, lengths: Sequence[int] | IntArray, *, passes: Sequence[int]
) -> float:
    layers = sum(passes[i] for i in config.delta_layers)
    return delta_flops(config, int(np.sum(lengths)), layers=layers) / 3  # it has three passes


def _attention_flops(
    config: DecoderConfig, lengths: Sequence[int] | IntArray, *, passes: Sequence[int]
) -> float:
    """Return the operations of attention, where backward counts as two passes of a layer."""
    flops = 0.0
    delta_layers = {*config.delta_layers}
    for is_sliding in (False, True):
        if is_sliding and config.sliding is None:
            continue
        kind = [
            n
            for i, n in enumerate(passes)
            if (i in config.sliding_layers) == is_sliding and i not in delta_layers
        ]
        full_heads = None if is_sliding else config.full_heads
        flops += model_flops(
            linear_parameters=0,
            layers=sum(kind),
            heads=config.heads,
            head_dim=full_heads.size if full_heads else (config.head_size + config.value_size) / 2,
            lengths=lengths,
            window=config.sliding.window if is_sliding and config.sliding else None,
        )
    return flops / 3  # `model_flops` has three passes


# The order in which a block uses its parameters, by the beginnings of their names; parameters with
# one number have the same input.
_ORDER = {
    "attention_norm": 0,
    "attention.q_latent_norm": 2,
    "attention.kv_latent_norm": 2,
    "attention.q_latent": 1,
    "attention.kv_latent": 1,
    "attention.k_rotary": 1,
    "attention.wkv": 3,
    "attention.q_conv": 4,
    "attention.k_conv": 4,
    "attention.v_conv": 4,
    "attention.q_norm": 4,
    "attention.k_norm": 4,
    "attention.gated_norm": 5,
    "attention.wo": 6,
    "attention_out_norm": 7,
    "mlp_norm": 8,
    "mlp_out_norm": 11,
}
_ATTENTION = 5


def _find_place(name: str, config: DecoderConfig) -> tuple[int, int]:
    """Return the layer of a parameter, and its place in it; the embedding is before layer 0."""
    top, _, rest = name.partition(".")
    if top in ("embedding", "positions"):
        return -1, 0
    if top != "layers":
        return config.layers, int(top != "norm")
    layer, _, rest = rest.partition(".")
    for start, order in _ORDER.items():
        if rest.startswith(f"{start}."):
            return int(layer), order
    if rest.startswith("mlp."):
        return int(layer), 10 if "down" in rest.split(".") else 9
    is_latent = config.latents is not None and config.latents.query_rank is not None
    return int(layer), 3 if is_latent else 1  # wq, and without latents wk and wv


def _find_first(
    config: DecoderConfig, trained: Mapping[str, Sequence[int]] | None
) -> tuple[int, int]:
    """Return the place of the first parameter that is trained; past the last one if there is none.

    What comes after it needs a gradient of its input.
    """
    if trained is None:
        return (-1, 0)
    return min((_find_place(name, config) for name in trained), default=(config.layers, 2))


@attrs.frozen
class _Matrix:
    """A matrix that each token is multiplied with."""

    parameters: float  # of experts only those of a token
    place: tuple[int, int]
    is_trained: bool
    takes_gradient: bool = False  # whatever comes before it


def _list_matrices(
    config: DecoderConfig, trained: Mapping[str, Sequence[int]] | None
) -> list[_Matrix]:
    shapes = parameter_shapes(config)
    active = 1.0 if config.experts is None else config.experts.top_k / config.experts.count
    found = []
    for name, shape in {**shapes, **(trained or {})}.items():
        # A lookup is no product.
        if len(shape) < 2 or name in ("embedding.weight", "positions.weight"):
            continue
        found.append(
            _Matrix(
                parameters=math.prod(shape) * (active if len(shape) == 3 else 1),
                place=_find_place(name, config),
                is_trained=trained is None or name in trained,
                # B of an adapter B A, whose input comes from A, which is trained.
                takes_gradient=name not in shapes and name.endswith(".b"),
            )
        )
    if config.tied:
        is_trained = trained is None or "embedding.weight" in trained
        head = (config.layers, 1)
        found.append(_Matrix(math.prod(shapes["embedding.weight"]), head, is_trained))
    return found


def model_flops_utilization(
    flops: float, seconds: float, *, peak: float, devices: int = 1
) -> float:
    """Return the model FLOPs utilization: the fraction of the devices' peak.

    Args:
        flops: Operations on all devices, from `model_flops`, in the same convention.
        seconds: The time in seconds.
        peak: Operations per second of one device, as from `peak_flops`.
        devices: The number of devices.

    Raises:
        ValueError: Seconds, peak or devices are not positive.

    Examples:
        >>> model_flops_utilization(4e14, 2.0, peak=1e15, devices=1)
        0.2
    """
    capacity = seconds * peak * devices
    if not (math.isfinite(capacity) and seconds > 0 and peak > 0 and devices > 0):
        raise ValueError(
            "model_flops_utilization: seconds, peak and devices must be positive and finite, got "
            f"{seconds}, {peak} and {devices}"
        )
    return flops / capacity


def peak_flops(device_name: str) -> float | None:
    """Return the dense bf16 operations per second, with fp32 accumulation, of a known device.

    Numbers are from the vendors' data sheets, without structured sparsity, at full power. The most
    specific name counts: an "H100 PCIe" is not an "H100". MIG slices and laptop GPUs are unknown.

    Args:
        device_name: The name from `torch.cuda.get_device_name()`.

    Returns:
        Operations per second of one device, or None for an unknown one.

    Examples:
        >>> peak_flops("NVIDIA H100 PCIe")
        756000000000000.0
        >>> peak_flops("NVIDIA H100 80GB HBM3")
        989000000000000.0
        >>> peak_flops("abacus") is None
        True
    """
    table = {
        "A10": 125e12,
        "A100": 312e12,
        "A800": 312e12,
        "L4": 121e12,
        "L40": 181e12,
        "L40S": 362e12,
        "H20": 148e12,
        "H100": 989e12,
        "H100 NVL": 835e12,
        "H100 PCIe": 756e12,
        "H800": 989e12,
        "H200": 989e12,
        "H200 NVL": 835e12,
        "GH200": 989e12,
        "B200": 2250e12,
        "GB200": 2500e12,
        "RTX 3090": 71e12,
        "RTX 4090": 165e12,
        "MI300X": 1307e12,
        "MI325X": 1307e12,
    }
    matches = [key for key in table if re.search(rf"\b{key}\b", device_name)]
    if not matches or re.search(r"\bMIG\b|Laptop", device_name):
        return None
    # "H100 PCIe" matches "H100" as well: the longer name is the more specific one.
    return table[max(matches, key=len)]
