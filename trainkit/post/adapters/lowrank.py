"""What low-rank adapters compute: W x + scale * B A x for a frozen matrix W (Hu et al., 2021).

An adapted module keeps its name and its parameters, and gets a child `lora`, which holds its
adapters by name. So weights, checkpoints and plans of a model know the base by the same names as
without adapters.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import cache
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from trainkit.collectives import all_gather, sum_forward
from trainkit.models.experts import ExpertWeights, grouped_product
from trainkit.noise import counters
from trainkit.parallel.materialize import Fill
from trainkit.parallel.recompute import unseen
from trainkit.parallel.styles import SEQUENCE_DIM, ParallelStyle
from trainkit.post.adapters.frozen import dequantize_parameter, get_quantization
from trainkit.types import SOLO, Axis, ConfigError

CHILD = "lora"
"""The name of the child that holds a module's adapters."""

MERGE = "merge them into it: python -m trainkit export RUN FOLDER --merge"
"""The hint for a run of adapters that should become a base."""

_MAX_ELEMENTS = 1 << 22  # of W + scale * B A that exist at a time to compute DoRA's norms


def split_name(parameter_name: str) -> tuple[str, str, str]:
    """Return the matrix, the adapter's name and the key of a parameter of an adapter.

    Examples:
        >>> split_name("layers.0.mlp.experts.lora.up.default.a")
        ('layers.0.mlp.experts.up', 'default', 'a')
    """
    module, _, rest = parameter_name.rpartition(f".{CHILD}.")
    *expert_weight, name, key = rest.split(".")  # a linear layer has one weight, without a name
    return ".".join([module, *expert_weight]), name, key


@attrs.frozen
class Lora:
    r"""The matrices that get an adapter, and its kind.

    Attributes:
        modules: A pattern of names in the whole model (`parallel.name_patterns`): of linear layers
            ("layers.0.attention.wq"), and of the weights of experts ("layers.0.mlp.experts.up"),
            for which each expert gets its own pair.
        rank: r, of the matrices A `[r, in]` and B `[out, r]`.
        alpha: The numerator of the scale alpha / r.
        dropout: The dropout of the adapter's input in training. The mask is a function of the token
            and of the name of the matrix (`noise.dropout`), and of the index of an expert
            (`noise.split_keys`).
        rank_stabilised: Scale by alpha over the root of r (Kalajdzievski, "A rank stabilization
            scaling factor for fine-tuning with LoRA", 2023).
        dora: Learn the norm of each row of the sum separately from its direction (Liu et al.,
            "DoRA", 2024).
        name: The name of the adapter, where a model has several.

    Examples:
        >>> Lora("layers.*.attention.w[qv]", rank=8, alpha=32).scale
        4.0
    """

    modules: str
    rank: int = attrs.field(default=16, kw_only=True)
    alpha: float = attrs.field(default=16.0, kw_only=True)
    dropout: float = attrs.field(default=0.0, kw_only=True)
    rank_stabilised: bool = attrs.field(default=False, kw_only=True)
    dora: bool = attrs.field(default=False, kw_only=True)
    name: str = attrs.field(default="default", kw_only=True)

    def __attrs_post_init__(self) -> None:
        checks = {
            "rank": (type(self.rank) is int and self.rank > 0, "a positive number"),
            "alpha": (0 < self.alpha < math.inf, "positive and finite"),
            "dropout": (0 <= self.dropout < 1, "in [0, 1)"),
            "name": (self.name.isidentifier(), "a name without dots"),
        }
        for field, (is_valid, want) in checks.items():
            if not is_valid:
                got = getattr(self, field)
                raise ConfigError(
                    f"Lora: {field} must be {want}, got {got!r}", where=field, got=got, want=want
                )

    @property
    def scale(self) -> float:
        """The factor of the product B A."""
        return self.alpha / (self.rank**0.5 if self.rank_stabilised else self.rank)


class Adapters(nn.ModuleDict):
    """The adapters of one matrix by name; `active` is the name of the one in use, or None.

    `names` are those of all adapters of the model; this matrix need not have all of them.
    """

    active: str | None = None
    names: frozenset[str] = frozenset()

    def chosen(self) -> Any:
        """Return the active adapter, or None."""
        return None if self.active is None else self[self.active]


class Adapter(nn.Module):
    """The adapter of a matrix `[out, in]` or `[E, out, in]`; `fill` returns its initial values."""

    a: nn.Parameter
    b: nn.Parameter
    magnitude: nn.Parameter
    axis: Axis = SOLO
    shards_inputs = False
    keys: Keys | None = None

    def __init__(
        self,
        lora: Lora,
        whole_name: str,
        fill: Fill,
        *,
        sizes: Sequence[int],
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.spec = lora
        self.whole_name = whole_name
        *lead, outputs, self.inputs = sizes
        shapes: dict[str, tuple[int, ...]] = {
            "a": (*lead, lora.rank, self.inputs),
            "b": (*lead, outputs, lora.rank),
        }
        if lora.dora:
            shapes["magnitude"] = (*lead, outputs)
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape, dtype=dtype)))
        self.fills = dict.fromkeys(shapes, fill)

    @torch.no_grad()
    def squared_norms(self, module: nn.Module, key: str, dtype: torch.dtype) -> Tensor:
        """Return the squared norm of each row of W + scale * B A, `[..., out]`, in fp32 at least.

        DoRA treats it as a constant (section 4.3 of the paper).
        """
        dtype = torch.promote_types(dtype, torch.float32)
        a = self.a.to(dtype)
        b = self.b.to(dtype)
        num_rows = b.shape[-2]
        step = num_rows
        if b.ndim > 2 or get_quantization(module, key) is not None:
            # All experts, or a dequantized matrix, would take much memory at once.
            num_experts = b[..., 0, 0].numel()  # 1 for a linear layer
            step = max(1, _MAX_ELEMENTS // (num_experts * self.inputs))
        parts = []
        # Selective recomputation does not save these products: the backward pass has no use for
        # them. The compiler cannot trace this context.
        with nullcontext() if torch.compiler.is_compiling() else unseen():
            for first in range(0, num_rows, step):
                rows = slice(first, first + step)
                base = dequantize_parameter(module, key, dtype, rows=rows)
                total = base + self.spec.scale * (b[..., rows, :] @ a)
                parts.append(total.square().sum(-1))
        return torch.cat(parts, -1)

    def drops(self) -> bool:
        """Return whether the forward pass applies dropout, and so needs `keys`."""
        return self.training and self.spec.dropout > 0

    def _apply_dropout(self, x: Tensor) -> Tensor:
        if not self.drops():
            return x
        if self.keys is None:
            raise ValueError(
                f"Lora: dropout is {self.spec.dropout} and the model is training, but "
                f"{self.whole_name} gets no noise_key; put noise.make_token_keys() into the batch "
                "(call_with_noise and call_routed pass it), or call model.eval()"
            )
        if torch.compiler.is_compiling():  # hashing a name cannot be traced
            return torch.compiler.disable(self._drop)(x, self.keys)
        return self._drop(x, self.keys)

    def _drop(self, x: Tensor, keys: Keys) -> Tensor:
        return counters.dropout(
            x,
            keys.of(x, self.axis),
            p=self.spec.dropout,
            # The mask of a feature is a function of its index in the full input.
            offset=self.axis.index * x.shape[-1] if self.shards_inputs else None,
            name=self.whole_name,
            width=self.inputs,
        )


class LowRank(Adapter):
    """The adapter of a linear layer: scale * B A x, A `[r, in]` and B `[out, r]`.

    Tensor parallelism shards it like its matrix: B where the matrix is sharded along outputs, A
    where it is sharded along inputs. The other factor is replicated, and its gradient is summed
    over tp once a step.
    """

    @staticmethod
    @cache  # all layers of a style share one object
    def derive_style(style: ParallelStyle) -> ParallelStyle:
        """Return the adapter's own style for tensor parallelism, from the style of its matrix."""
        shard_dim = style.shard_dims.get("weight")
        if shard_dim is None:
            return ParallelStyle(
                partial_grads=style.partial_grads, sequence_sharded=style.sequence_sharded
            )
        # Dimension 0 of the weight is its outputs, which are the rows of B.
        shard_dims = {"b": 0, "magnitude": 0} if shard_dim == 0 else {"a": 1}
        return ParallelStyle(
            shard_dims=shard_dims, partial_grads=True, sequence_sharded=style.sequence_sharded
        )

    def shard_by_style_(self, style: ParallelStyle, axis: Axis) -> ParallelStyle:
        """Take part in tensor parallelism by a style of `derive_style`, which is returned.

        Effects:
            From here on the forward pass communicates on `axis` where inputs or tokens are sharded.
        """
        self.axis = axis
        self.shards_inputs = "a" in style.shard_dims
        return style

    def forward(self, x: Tensor, y: Tensor, module: nn.Module) -> Tensor:
        """Add the adapter's product to the output of a module: y + scale * B A x.

        Args:
            x: The module's input, `[..., in]`.
            y: Its output without the adapter, `[..., out]`.
            module: The module, within its forward pass.
        """
        # In the adapter's dtype, which is fp32 where the base computes in bf16.
        dropped = self._apply_dropout(x).to(self.a.dtype)
        low = nn.functional.linear(dropped, self.a)  # [..., r]
        low = nn.functional.linear(low, self.b) * self.spec.scale
        if not self.spec.dora:
            return y + low.to(y.dtype)
        # DoRA: m * (W x + scale * B A x) / |W + scale * B A|, row by row, and only then the bias.
        bias = getattr(module, "bias", None)
        squares = self.squared_norms(module, "weight", y.dtype)
        if self.shards_inputs:  # this rank has some columns of each row
            squares = sum_forward(squares, self.axis)
        factor = self.magnitude / squares.sqrt().to(self.magnitude.dtype)
        plain = y if bias is None else y - bias
        out = (factor * (plain + low)).to(y.dtype)
        return out if bias is None else out + bias


class ExpertLowRank(Adapter):
    """The adapters of one weight of all experts: A `[E, r, in]` and B `[E, out, r]`."""

    def forward(
        self, rows: Tensor, y: Tensor, counts: Tensor, module: nn.Module, key: str
    ) -> Tensor:
        """Add the adapters' products to `y` `[N, out]`, of rows `[N, in]` sorted by expert."""
        low = grouped_product(self._apply_dropout(rows), counts, self.a)  # [N, r]
        total = y + grouped_product(low, counts, self.b) * self.spec.scale
        if not self.spec.dora:
            return total
        # Experts are sharded whole, over ep: a row has all of its columns on this rank.
        norms = self.squared_norms(module, key, y.dtype).sqrt()
        factor = self.magnitude / norms.to(self.magnitude.dtype)
        # Given its size, repeat_interleave does not wait for the counts on the device.
        row_factors = factor.repeat_interleave(counts, 0, output_size=len(rows))
        return (row_factors * total).to(y.dtype)


# --------------------------------------------------------------------------------------- modules


class Adapted(nn.Module):
    """Mixin: a linear layer with adapters, by name."""

    lora: Adapters

    def forward(self, x: Tensor) -> Tensor:
        """Map `[..., in]` to `[..., out]`, with the active adapter if there is one."""
        y = super().forward(x)  # of a plain, quantized or float8 layer
        adapter = self.lora.chosen()
        return y if adapter is None else adapter(x, y, self)


class AdaptedExperts(ExpertWeights):
    """Mixin: experts with adapters, by the names of their weights."""

    lora: nn.ModuleDict

    def needs_keys(self) -> bool:
        """Return whether the forward pass takes a noise key for each row."""
        adapters = [self._active_adapter(name) for name in self.weight_names]
        return any(adapter is not None and adapter.drops() for adapter in adapters)

    def forward(self, rows: Tensor, counts: Tensor, keys: Tensor | None = None) -> Tensor:
        """Map rows `[N, D]` in the order of their experts to `[N, D]`."""
        adapters = set_keys_(self, ExpertLowRank, keys)
        try:
            return super().forward(rows, counts)
        finally:
            for adapter in adapters:
                adapter.keys = None

    def product(self, name: str, rows: Tensor, counts: Tensor) -> Tensor:
        """Multiply rows with the weights of their experts, and add the adapter's product."""
        y = super().product(name, rows, counts)
        adapter = self._active_adapter(name)
        return y if adapter is None else adapter(rows, y, counts, self, name)

    def _active_adapter(self, name: str) -> ExpertLowRank | None:
        adapters: Any = self.lora
        return adapters[name].chosen() if name in adapters else None


def adapters_of(stages: Iterable[nn.Module]) -> Iterator[tuple[nn.Module, str, Adapters]]:
    """Yield (module, name of the parameter, adapters) of every adapted matrix.

    Examples:
        >>> list(adapters_of([nn.Linear(1, 1)]))
        []
    """
    for stage in stages:
        for module in stage.modules():
            if isinstance(module, Adapted):
                yield module, "weight", module.lora
            elif isinstance(module, AdaptedExperts):
                for name, adapters in module.lora.items():
                    assert isinstance(adapters, Adapters)
                    yield module, name, adapters


def select_adapter_(stages: Iterable[nn.Module], name: str | None) -> None:
    """Activate one of several adapters by name; None uses the base alone.

    This does not change which adapter is trained.

    Args:
        stages: This rank's stages.
        name: The name of a `Lora`.

    Raises:
        ConfigError: There are adapters, and none of that name.

    Effects:
        Sets an attribute of every adapted module.

    Examples:
        >>> select_adapter_([nn.Linear(1, 1)], None)
    """
    adapted = [adapters for _, _, adapters in adapters_of(stages)]
    names = sorted({one for adapters in adapted for one in adapters.names})
    # A stage without any adapter passes, as it cannot know the names of the others.
    if adapted and name is not None and name not in names:
        raise ConfigError(
            f"select_adapter_: there is no adapter {name!r}, but {', '.join(names)}",
            where="name",
            got=name,
            want=names,
        )
    for adapters in adapted:
        adapters.active = name if name is not None and name in adapters else None


# ----------------------------------------------------------------------------------------- noise


class Keys:
    """The noise keys of a block's tokens, and of tokens gathered over tp."""

    def __init__(self, local: Tensor) -> None:
        self.local = local
        self.gathered: dict[int, Tensor] = {}

    def of(self, x: Tensor, axis: Axis) -> Tensor:
        """Return the keys of the tokens of `x` `[B, S, D]`.

        Effects:
            All-gathers the keys on `axis` if `x` has the tokens of all its ranks, once.
        """
        if self.local.shape == x.shape[:-1]:
            return self.local
        # With sequence parallelism, layers inside a block see the tokens of all its tp ranks.
        if axis.count not in self.gathered:
            self.gathered[axis.count] = all_gather(self.local, axis, dim=SEQUENCE_DIM)
        return self.gathered[axis.count]


class Keyed(nn.Module):
    """Mixin: a block that passes the noise keys it is given on to the adapters inside."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block while its adapters have `noise_key`."""
        adapters = set_keys_(self, LowRank, kwargs.get("noise_key"))
        try:
            return super().forward(*args, **kwargs)
        finally:
            for adapter in adapters:
                adapter.keys = None


def set_keys_(module: nn.Module, kind: type[Adapter], key: Tensor | None) -> list[Adapter]:
    """Set the noise keys of a module's adapters for one forward pass, and return the adapters.

    The caller resets the keys after the pass: recomputation runs it again, and a pipeline has
    several microbatches in flight.

    Effects:
        Sets `keys` of the adapters.

    Examples:
        >>> set_keys_(nn.Linear(1, 1), LowRank, None)
        []
    """
    adapters = [part for part in module.modules() if isinstance(part, kind)]
    keys = None if key is None else Keys(key)
    for adapter in adapters:
        adapter.keys = keys
    return adapters


def sizes_of(module: nn.Module) -> tuple[int, int] | None:
    """Return (out, in) of a linear layer, quantized or not, or None for other modules.

    Examples:
        >>> sizes_of(nn.Linear(2, 3)), sizes_of(nn.Embedding(2, 3))
        ((3, 2), None)
    """
    # Not of the weight, which is bytes where it is quantized.
    outputs = getattr(module, "out_features", None)
    inputs = getattr(module, "in_features", None)
    if not (isinstance(outputs, int) and isinstance(inputs, int)):
        return None
    return outputs, inputs


def expert_sizes(module: nn.Module) -> Mapping[str, tuple[int, int, int]]:
    """Return [E, out, in] of the weights of experts by name; empty for other modules.

    Examples:
        >>> expert_sizes(nn.Linear(2, 3))
        {}
    """
    if not isinstance(module, ExpertWeights):
        return {}
    shapes = {
        name: (get_quantization(module, name) or getattr(module, name)).shape
        for name in module.weight_names
    }
    return {name: (shape[0], shape[1], shape[2]) for name, shape in shapes.items()}
