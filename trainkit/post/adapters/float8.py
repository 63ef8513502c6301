"""Linear layers that multiply in float8: three products, each with scales of its operands.

A number is scaled by the largest of those that it shares its scale with, rounded to 8 bits, and the
product is divided by both scales. What shares a scale is said of the whole matrix, and of all
tokens of a microbatch: where a layout cuts these, the largest is sought over its ranks. So every
layout rounds to the same bits, which scales of each rank's own part would not.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal, get_args

import attrs
import torch
from torch import Tensor, nn

from trainkit.collectives import all_max
from trainkit.models.mixins import mix_in_
from trainkit.parallel.linears import choose_layers, note_computation_, plain_problem
from trainkit.parallel.styles import ParallelStyle
from trainkit.parallel.transforms import Transform
from trainkit.types import SOLO, Axis, ConfigError, ParallelState, check_choice

Scaling = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"]
"""What shares a scale; see `float8`."""

_UNIT = 16  # the hardware multiplies sides of whole 16 bytes
_LEAST = 2.0**-110  # what is smaller than this is scaled as if it were it: fp32 has no larger scale
_E4M3, _E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@attrs.frozen
class _Recipe:
    """Whether x, the weight and the output's gradient have one scale, in the product of each.

    `gradient` is what that is rounded to, `powers` whether scales are powers of two. `products`
    says of y, of x's gradient and of the weight's whether both operands have one scale; None leaves
    a product as it is.
    """

    products: tuple[tuple[bool, bool], tuple[bool, bool], tuple[bool, bool] | None]
    gradient: torch.dtype = _E4M3
    powers: bool = True


_ONE, _ROWS = (True, True), (False, False)
_RECIPES: Mapping[Scaling, _Recipe] = MappingProxyType(
    {
        "tensorwise": _Recipe((_ONE, _ONE, _ONE), gradient=_E5M2, powers=False),
        "rowwise": _Recipe((_ROWS, _ROWS, _ROWS)),
        "rowwise_with_gw_hp": _Recipe((_ROWS, (False, True), None)),
    }
)


@attrs.frozen(eq=False)
class _How:
    """The name of a layer, its recipe, and the axes that shard its sides and its tokens."""

    name: str
    recipe: _Recipe
    inputs: Axis
    outputs: Axis
    tokens: Axis

    def __deepcopy__(self, memo: Any) -> _How:
        return self  # it holds process groups

    @property
    def communicates(self) -> bool:
        return max(axis.count for axis in (self.inputs, self.outputs, self.tokens)) > 1


def float8(scaling: Scaling = "rowwise_with_gw_hp", *, modules: str | None = None) -> Transform:
    r"""Return the transform that lets linear layers multiply in float8; it stands before `tensor`.

    Parameters stay what they are, in name, value and dtype, and so do checkpoints and exports: what
    is rounded is what each product is given. Under `precision`, as is usual, that is bf16 already.

    | scaling | output | gradient of the input | gradient of the weight |
    |---|---|---|---|
    | tensorwise | a scale a matrix | a scale a matrix; gradients in e5m2 | as before |
    | rowwise | a scale a row | a scale a row | a scale a row |
    | rowwise_with_gw_hp | a scale a row | gradients a scale a row, weights one | not in float8 |

    A "row" runs along what a product sums over, and scales of rows are powers of two. All else is
    e4m3. A token's scale is its own in the first two products. In the third, and tensorwise, it is
    shared by a microbatch of a data-parallel rank: so "tensorwise" and "rowwise" give the numbers
    of one process where microbatches hold the same rows (one row each, or the same number of
    data-parallel ranks), and "rowwise_with_gw_hp" does everywhere. With tp, ring and ulysses some
    scales are a maximum over ranks, a number a row or one for all.

    A GPU multiplies bf16 in float8 from compute capability 8.9 on. Elsewhere, and in other dtypes,
    the 8-bit numbers are multiplied in fp32 (fp64 in fp64): the same roundings, and no faster.

    Args:
        scaling: See above.
        modules: A regular expression of names in the whole model, as "layers.0.attention.wq", all
            of which must be linear layers with sides that 16 divides. None takes all such but
            the head; what is left out, as routers and experts, the start of a run says.

    Returns:
        A transform for `build_stages`; it may stand before adapters, whose base then multiplies so.

    Raises:
        ConfigError: When applied: see `modules`; tp leaves a side that 16 does not divide; or the
            GPU has no float8.
        ValueError: The scaling is unknown.

    References:
        Micikevicius et al., "FP8 formats for deep learning" (2022); the scalings are
        those of torchao.

    Examples:
        >>> from trainkit.mesh import solo_parallel
        >>> model = nn.ModuleDict({"up": nn.Linear(16, 32), "head": nn.Linear(32, 4)})
        >>> _ = float8("tensorwise")(model, solo_parallel())
        >>> type(model.up).__name__, type(model.head).__name__
        ('Float8Linear', 'Linear')
    """
    check_choice(get_args(Scaling), "float8", scaling=scaling)

    def apply(module: nn.Module, ps: ParallelState) -> nn.Module:
        _check_device(ps.device)
        layers, left_out = choose_layers(module, modules, by="float8", problem=_problem)

        for name, layer in layers.items():
            how = _How(name, _RECIPES[scaling], inputs=SOLO, outputs=SOLO, tokens=ps.sp)
            mix_in_(layer, Float8, float8=how)
        note_computation_(layers.values(), left_out, f"float8 ({scaling})")
        return module

    return Transform(apply, kind="rounded")


def _check_device(device: torch.device) -> None:
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        name = torch.cuda.get_device_name(device)
        raise ConfigError(
            f"float8: {name} cannot multiply it, which GPUs from compute capability 8.9 on do; "
            "compute in bf16",
            where="float8",
            got=name,
        )


def _problem(part: nn.Module) -> str | None:
    problem = plain_problem(part)
    if problem or not isinstance(part, nn.Linear):
        return problem
    sides = part.out_features, part.in_features
    uneven = any(side % _UNIT for side in sides)
    return f"is {sides[0]} x {sides[1]}, which {_UNIT} does not divide" if uneven else None


class Float8(nn.Module):
    """Mixin: a linear layer whose products are in float8."""

    float8: _How
    weight: Tensor
    bias: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        """Map `[..., I]` to `[..., O]`."""
        kind, weight = x.device.type, self.weight
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            x, weight = x.to(dtype), weight.to(dtype)
        multiply: Any = _Float8Product.apply
        if self.float8.communicates and torch.compiler.is_compiling():
            multiply = torch.compiler.disable(multiply)
        y = multiply(x.flatten(0, -2), weight, self.float8).view(*x.shape[:-1], -1)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def cut_(self, style: ParallelStyle, axis: Axis) -> ParallelStyle:
        """Record which side of the weight tensor parallelism shards.

        Effects:
            From here on scales of that side are a maximum over `axis`.

        Raises:
            ConfigError: 16 does not divide this rank's part of the side.
        """
        dim = style.cuts.get("weight")
        if dim is None:
            return style
        part = self.weight.shape[dim] // axis.count
        if part % _UNIT:
            raise ConfigError(
                f"float8: tp = {axis.count} leaves {self.float8.name!r} a side of {part}, which "
                f"{_UNIT} does not divide; lower tp, or let the pattern of modules leave it out",
                where="tp",
                got=axis.count,
            )
        if dim == 0:
            self.float8 = attrs.evolve(self.float8, outputs=axis)
        else:
            self.float8 = attrs.evolve(self.float8, inputs=axis)
        return style


class _Float8Product(torch.autograd.Function):
    """x `[T, I]` times a weight `[O, I]`; the operands are saved unrounded."""

    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]
        ctx: Any, x: Tensor, weight: Tensor, how: _How
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.how = how
        sides = how.inputs, (how.tokens, how.outputs)
        return _product((x, weight.t()), (_E4M3, _E4M3), how.recipe, 0, sides)

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> Any:  # pyrefly: ignore[bad-override]
        (x, weight), how, d_x, d_weight = ctx.saved_tensors, ctx.how, None, None
        to = how.recipe.gradient, _E4M3
        if ctx.needs_input_grad[0]:
            sides = how.outputs, (how.tokens, how.inputs)
            d_x = _product((d_y, weight), to, how.recipe, 1, sides)
        if ctx.needs_input_grad[1]:
            sides = how.tokens, (how.outputs, how.inputs)
            d_weight = _product((d_y.t(), x), to, how.recipe, 2, sides)
        return d_x, d_weight, None


def _product(
    matrices: tuple[Tensor, Tensor],
    to: tuple[torch.dtype, torch.dtype],
    recipe: _Recipe,
    number: int,
    sides: tuple[Axis, tuple[Axis, Axis]],
) -> Tensor:
    """Return `[M, K]` times `[K, N]`, both rounded; `sides` cut K, and M and N."""
    whole, (over, others) = recipe.products[number], sides
    a, b = matrices
    if whole is None:
        return a @ b
    (a8, a_scale), (b8, b_scale) = (
        _rounded(
            x, dim, dtype, over=[over, other] if one else [over], one=one, powers=recipe.powers
        )
        for x, dim, dtype, other, one in zip((a, b), (1, 0), to, others, whole, strict=True)
    )
    if a.is_cuda and a.dtype == torch.bfloat16:
        return scaled_product(a8, b8, a_scale, b_scale)
    wide = torch.promote_types(a.dtype, torch.float32)
    return ((a8.to(wide) @ b8.to(wide)) * a_scale * b_scale).to(a.dtype)


def _rounded(
    x: Tensor, dim: int, dtype: torch.dtype, *, over: list[Axis], one: bool, powers: bool
) -> tuple[Tensor, Tensor]:
    """Return a matrix in float8, and what to multiply it with, one or along a dimension."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    largest = wide.abs().amax((0, 1) if one else dim, keepdim=True)
    for axis in over:
        largest = all_max(largest, axis)
    top = torch.finfo(dtype).max
    scale = top / largest.clamp_min(_LEAST)  # not finite where that is not, and so the product
    if powers:
        scale = scale.log2().floor().exp2()
    return (wide * scale).clamp(-top, top).to(dtype), 1 / scale


def scaled_product(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor) -> Tensor:
    """Multiply float8 matrices by torch's kernel for GPUs, which CPUs have too, and slowly.

    Args:
        a: `[M, K]`.
        b: `[K, N]`; 16 divides N.
        a_scale: What `a` is multiplied with, fp32 `[M, 1]` or `[1, 1]`.
        b_scale: What `b` is, `[1, N]` or `[1, 1]`.

    Returns:
        bf16 `[M, N]`.

    Examples:
        >>> one = torch.ones(1, 1)
        >>> eight = torch.ones(16, 16).to(torch.float8_e4m3fn)
        >>> scaled_product(eight, eight, one, one)[0, :2]
        tensor([16., 16.], dtype=torch.bfloat16)
    """
    short = -a.shape[1] % _UNIT
    if short:  # of tokens; zeros add nothing, and bytes of zeros are zeros
        kinds, bytes_ = (a.dtype, b.dtype), (a.view(torch.uint8), b.view(torch.uint8))
        padded = (
            nn.functional.pad(bytes_[0], (0, short)),
            nn.functional.pad(bytes_[1], (0, 0, 0, short)),
        )
        a, b = (x.view(kind) for x, kind in zip(padded, kinds, strict=True))
    if a_scale.numel() != b_scale.numel() or a_scale.numel() > 1:
        a_scale, b_scale = a_scale.expand(len(a), 1), b_scale.expand(1, b.shape[1])
    a, b = a.contiguous(), b.t().contiguous().t()
    scales = a_scale.float().contiguous(), b_scale.float().contiguous()
    return torch._scaled_mm(a, b, *scales, out_dtype=torch.bfloat16)  # noqa: SLF001 (no public name)
