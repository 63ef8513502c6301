"""The styles of tensor parallelism: which parameters of a module are sharded, and what is sent.

A sharded module runs its own forward pass on this rank's shards of its parameters, with a
collective before or after it. This is Megatron's scheme (Shoeybi et al., 2019); the styles that
shard the sequence between blocks are those of Korthikanti et al. (2022).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import attrs
from torch import Tensor, nn

from trainkit.batch.shards import contiguous_shard
from trainkit.collectives import (
    all_gather,
    all_gather_replicated,
    reduce_scatter,
    sum_forward,
    sum_grad,
)
from trainkit.models.layers import WideNorm
from trainkit.models.mixins import mix_in_
from trainkit.parallel.parameters import unhide_
from trainkit.types import Axis

Communicate = Callable[[Tensor, Axis], Tensor]
"""A differentiable collective on the input or the output of a module."""

SEQUENCE_DIM = 1
"""The dimension of tokens in a hidden state `[B, S, D]`."""


@attrs.frozen(eq=False)
class ParallelStyle:
    """The sharding of one module, and the collectives before and after it.

    Attributes:
        kind: The class that the module must have.
        shard_dims: The dimension along which each parameter is sharded, by name; all others are
            replicated.
        on_input: The collective on the first input.
        on_output: The collective on the output.
        partial_grads: Whether each rank uses the replicated parameters for a part of the tokens,
            heads or features only, so that their gradients must be summed over ranks.
        sequence_sharded: Whether an input or output is sharded along the sequence.
    """

    kind: type[nn.Module] = nn.Module
    shard_dims: Mapping[str, int] = MappingProxyType({})
    on_input: Communicate | None = None
    on_output: Communicate | None = None
    partial_grads: bool = False
    sequence_sharded: bool = False


# Megatron's columns are rows of `nn.Linear.weight` `[out, in]`, and its rows are columns.
_COLUMN = ParallelStyle(nn.Linear, {"weight": 0, "bias": 0}, on_input=sum_grad)
_ROW = ParallelStyle(nn.Linear, {"weight": 1}, on_output=sum_forward)
_VOCABULARY = ParallelStyle(nn.Embedding, {"weight": 0}, on_output=sum_forward)
_gather_sequence = partial(all_gather, dim=SEQUENCE_DIM)
_scatter_sequence = partial(reduce_scatter, dim=SEQUENCE_DIM)


def _own_tokens(x: Tensor, axis: Axis) -> Tensor:
    return contiguous_shard(x, axis.share, dim=SEQUENCE_DIM)


STYLES: Mapping[str, ParallelStyle] = MappingProxyType(
    {
        "replicated": ParallelStyle(),
        "partial": ParallelStyle(partial_grads=True),
        "column": _COLUMN,
        "column_gathered": attrs.evolve(_COLUMN, on_output=partial(all_gather_replicated, dim=-1)),
        "row": _ROW,
        "heads": ParallelStyle(shard_dims={"weight": 0, "bias": 0, "log_rate": 0}),
        "vocabulary": _VOCABULARY,
        "gather": ParallelStyle(on_input=_gather_sequence, sequence_sharded=True),
        "gather_heads": ParallelStyle(
            shard_dims={"sinks": 0}, on_input=_gather_sequence, sequence_sharded=True
        ),
        "column_inside": attrs.evolve(_COLUMN, on_input=None),
        "column_inside_gathered": attrs.evolve(
            _COLUMN, on_input=None, on_output=partial(all_gather_replicated, dim=-1)
        ),
        # Its bias is partial: each rank adds it to its own tokens.
        "row_scattered": attrs.evolve(
            _ROW, on_output=_scatter_sequence, partial_grads=True, sequence_sharded=True
        ),
        "vocabulary_scattered": attrs.evolve(
            _VOCABULARY, on_output=_scatter_sequence, sequence_sharded=True
        ),
        "partial_gathered": ParallelStyle(
            on_output=_gather_sequence, partial_grads=True, sequence_sharded=True
        ),
        "partial_sliced": ParallelStyle(
            on_input=_own_tokens, partial_grads=True, sequence_sharded=True
        ),
        "wide_norm": ParallelStyle(WideNorm, {"weight": 0}),
    }
)
"""The styles by name.

| style | parameters | what is sent |
|---|---|---|
| replicated | replicated; the default of a module without a style | nothing |
| partial | replicated, for a part of the tokens or heads | gradients, once per step |
| column | a Linear's output features are sharded | the input's gradient is summed |
| column_gathered | as column | the same, and the output is gathered along its last dimension |
| heads | one row or more for each head, as of a short convolution, is sharded | nothing |
| row | a Linear's input features are sharded, its bias is not | the output is summed |
| vocabulary | an Embedding's rows are sharded | the output is summed |
| wide_norm | a WideNorm's features are sharded | its sums of squares are summed |

With hidden states `[B, S / tp, D]` between blocks:

| style | parameters | what is sent |
|---|---|---|
| gather | replicated | the first input is gathered along the sequence |
| gather_heads | the sinks of heads are sharded | as gather |
| column_inside | as column, inside a module of style gather | nothing: that gather sums |
| column_inside_gathered | as column_inside | the output is gathered along its last dimension |
| row_scattered | as row, the bias partial | the output is summed and scattered |
| vocabulary_scattered | as vocabulary | the output is summed and scattered |
| partial_gathered | as partial | the output is gathered |
| partial_sliced | as partial; takes this rank's tokens of full ids or positions | gradients |
"""


# ----------------------------------------------------------------------------------------- classes


@attrs.frozen(eq=False)
class Sharding:
    """The names of a sharded module's own parameters, its style, and `ps.tp`."""

    names: tuple[str, ...]
    style: ParallelStyle
    axis: Axis

    def __deepcopy__(self, memo: Any) -> Sharding:
        return self  # the axis has a process group, which a copy of the model shares


class Sharded(nn.Module):
    """Mixin: computes with this rank's shards of the parameters, between its style's collectives.

    Parameters of a tensor-parallel module are DTensors, for the optimizer, FSDP2 and checkpoints.
    While its own forward pass runs, they read as plain local tensors.
    """

    sharding: Sharding
    added_after: tuple[str, ...] = ()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward pass between the two collectives of its style."""
        style, axis = self.sharding.style, self.sharding.axis
        if style.on_input is not None:
            x, *rest = args
            args = (style.on_input(x, axis), *rest)
        out = self.forward_on_parts(*args, **kwargs)
        return out if style.on_output is None else style.on_output(out, axis)

    def forward_on_parts(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward pass on the local shards of its own parameters."""
        # An attribute of an instance hides the parameter of the same name, and `mixed_precision`
        # may have set one already. The parameters stay registered, so that FSDP2 and the optimizer
        # never see a local tensor.
        names = self.sharding.names
        earlier = {name: vars(self).get(name) for name in names}
        for name in names:
            full: Any = getattr(self, name)
            # A linear layer without a bias, which `ShardedRow` adds after the sum.
            local = None if name in self.added_after else full.to_local()
            object.__setattr__(self, name, local)
        try:
            return super().forward(*args, **kwargs)
        finally:
            for name, attribute in earlier.items():
                unhide_(self, name)
                if attribute is not None:
                    object.__setattr__(self, name, attribute)


class ShardedRow(Sharded):
    """Mixin of a `Linear` with sharded input features: the bias is added once, after the sum."""

    added_after = ("bias",)

    def forward(self, x: Tensor) -> Tensor:  # pyrefly: ignore[bad-override]
        """Map this rank's features `[..., I / tp]` to `[..., O]`."""
        bias: Any = self.bias
        return super().forward(x) + bias.to_local()


class ShardedVocabulary(Sharded):
    """Mixin of an `Embedding` with sharded rows: ids of other ranks' rows give zeros."""

    num_embeddings: int

    def forward_on_parts(self, ids: Tensor) -> Tensor:  # pyrefly: ignore[bad-override]
        """Look up this rank's rows.

        An id outside the full vocabulary stays out of range on the first or last rank, which
        raises.
        """
        axis = self.sharding.axis
        rows = self.num_embeddings // axis.count
        local = ids - axis.index * rows
        below, above = local < 0, local >= rows
        is_first, is_last = axis.index == 0, axis.index == axis.count - 1
        is_elsewhere = above if is_first else below if is_last else below | above
        # Any row will do for ids of other ranks: what it gives is masked.
        out = super().forward_on_parts(local.masked_fill(is_elsewhere, 0))
        return out.masked_fill(is_elsewhere.unsqueeze(-1), 0)


class ShardedNorm(Sharded):
    """Mixin of a `WideNorm` with sharded features: every rank uses the sum of all squares."""

    def summed(self, squares: Tensor) -> Tensor:
        """Sum over ranks in forward and in backward: each rank's features use the sum."""
        axis = self.sharding.axis
        return sum_grad(sum_forward(squares, axis), axis)


def shard_(module: nn.Module, names: tuple[str, ...], style: ParallelStyle, axis: Axis) -> None:
    """Let a module compute with this rank's shards of its parameters; see `Sharded`.

    Args:
        module: A module of the class that `style` requires.
        names: The module's own parameters, DTensors over `axis`.
        style: The style.
        axis: `ps.tp`.

    Effects:
        Puts a mixin in front of the module's class. From then on its forward and backward passes
        communicate on `axis`.

    Examples:
        >>> from trainkit.mesh import solo_parallel
        >>> layer = nn.Linear(1, 1)
        >>> shard_(layer, ("weight", "bias"), STYLES["column"], solo_parallel().tp)
        >>> type(layer).__name__
        'ShardedLinear'
    """
    # Most modules need no more than their own forward pass on local shards.
    mixin = Sharded
    if style.shard_dims == _ROW.shard_dims and "bias" in names:
        mixin = ShardedRow
    elif issubclass(style.kind, nn.Embedding):
        mixin = ShardedVocabulary
    elif issubclass(style.kind, WideNorm):
        mixin = ShardedNorm
    mix_in_(module, mixin, sharding=Sharding(names, style, axis))


def local_padding(padding: int | None, rows: int, axis: Axis) -> int | None:
    """Return the index of an Embedding's `padding_idx` in this rank's rows, or None.

    Args:
        padding: The `padding_idx` of the full Embedding.
        rows: The number of rows on each rank.
        axis: `ps.tp`.

    Effects:
        None; it does not communicate.

    Examples:
        >>> from trainkit.mesh import solo_parallel
        >>> local_padding(3, 8, solo_parallel().tp)
        3
    """
    if padding is None:
        return None
    local = padding - axis.index * rows
    return local if 0 <= local < rows else None


def sums_problem(module: nn.Module, styles: Mapping[str, ParallelStyle]) -> str | None:
    """Return a sentence on a gradient that styles would sum twice or not at all, or None.

    Only what follows from the collectives of the styles is found: the order in which modules call
    one another is unknown.

    Args:
        module: A model or a stage of one.
        styles: The styles by module name.

    Examples:
        >>> model = nn.ModuleDict({"norm": nn.RMSNorm(2), "head": nn.Linear(2, 2)})
        >>> of = {"norm": STYLES["partial_gathered"], "head": STYLES["column"]}
        >>> print(sums_problem(model, of))
        'head' sums its input's gradient, which the gathering of the sequence sums already: ...
    """
    has_parts = any(style.sequence_sharded for style in styles.values())  # of the sequence
    # Where some blocks shard the sequence and others do not, both kinds of column can be right.
    has_full = any(style.on_output is sum_forward for style in styles.values())
    for name, style in styles.items():
        if has_parts and not has_full and style.on_input is sum_grad:
            return (
                f"{name!r} sums its input's gradient, which the gathering of the sequence sums "
                'already: give it "column_inside" or "column_inside_gathered"'
            )
        is_column = style.kind is nn.Linear and style.shard_dims == _COLUMN.shard_dims
        if is_column and not has_parts and not style.on_input:
            return (
                f"nothing sums the gradient of the input of {name!r}: its style is for a module of "
                'style "gather", or behind "partial_gathered"; give it "column"'
            )
    for name, child in module.named_modules():
        is_trained = any(p.requires_grad for p in child.parameters(recurse=False))
        # Between a column and a row each rank has a part of the features.
        inside = [
            style.shard_dims for own, style in styles.items() if own.rpartition(".")[0] == name
        ]
        sees_part = has_parts or (_COLUMN.shard_dims in inside and _ROW.shard_dims in inside)
        if is_trained and sees_part and name not in styles:
            return (
                f"{name or 'the model itself'!r} has parameters of its own and no style; say "
                '"partial" if each rank sees a part of the tokens, heads or features there, or '
                f'"replicated" if all of them, for the pattern {name!r}'
            )
    return None


def style_problem(module: nn.Module, style: ParallelStyle) -> str | None:
    """Return the reason that a style does not fit a module, or None.

    Examples:
        >>> style_problem(nn.RMSNorm(2), STYLES["row"])
        'it is a RMSNorm, and must be a Linear'
        >>> style_problem(nn.Linear(2, 2), STYLES["row"])
    """
    if not isinstance(module, style.kind):
        return f"it is a {type(module).__name__}, and must be a {style.kind.__name__}"
    for option in ("max_norm", "scale_grad_by_freq", "sparse"):
        if isinstance(module, nn.Embedding) and style.shard_dims and getattr(module, option):
            return f"an Embedding with {option} needs all rows at once"
    return None
