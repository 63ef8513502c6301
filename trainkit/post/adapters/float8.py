"""Linear layers that multiply in float8: three products, each with scales of its operands.

Numbers that share a scale are divided by the largest of them and rounded to 8 bits, and the product
is multiplied by both scales. Scales are those of the whole matrix, and of all tokens of a
microbatch: where a layout shards these, the largest is a maximum over ranks. So every layout rounds
to the same bits.
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
from trainkit.parallel.linear_layers import choose_layers, note_computation_, plain_problem
from trainkit.parallel.styles import ParallelStyle
from trainkit.parallel.transforms import Transform
from trainkit.types import SOLO, Axis, ConfigError, ParallelState, check_choice

Scaling = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"]
"""Which numbers share a scale; see `float8`."""

_MULTIPLE = 16  # the hardware needs sides that are multiples of 16 bytes
_MIN_LARGEST = 2.0**-110  # the scale of a smaller maximum would overflow in fp32
_E4M3 = torch.float8_e4m3fn  # a longer mantissa, for values
_E5M2 = torch.float8_e5m2  # a wider range, for gradients


@attrs.frozen
class _Recipe:
    """How the operands of the three products are rounded.

    Attributes:
        output: For y = x W^T: whether x has one scale, or one per row, and whether W has.
        d_input: The same for the product of y's gradient and W.
        d_weight: The same for the product of y's gradient and x; None leaves it unrounded.
        gradient: The dtype of y's gradient.
        powers: Whether scales are powers of two.
    """

    output: tuple[bool, bool]
    d_input: tuple[bool, bool]
    d_weight: tuple[bool, bool] | None
    gradient: torch.dtype = _E4M3
    powers: bool = True


_ONE = (True, True)
_ROWS = (False, False)
# torchao's recipes of these names. "gw_hp" is "gradient of the weight in high precision".
_RECIPES: Mapping[Scaling, _Recipe] = MappingProxyType(
    {
        "tensorwise": _Recipe(_ONE, _ONE, _ONE, gradient=_E5M2, powers=False),
        "rowwise": _Recipe(_ROWS, _ROWS, _ROWS),
        "rowwise_with_gw_hp": _Recipe(_ROWS, (False, True), None),
    }
)


@attrs.frozen(eq=False)
class _LayerSettings:
    """The name of a layer, its recipe, and the axes that shard its sides and its tokens."""

    name: str
    recipe: _Recipe
    inputs: Axis
    outputs: Axis
    tokens: Axis

    def __deepcopy__(self, memo: Any) -> _LayerSettings:
        return self  # it holds process groups

    @property
    def communicates(self) -> bool:
        return max(axis.count for axis in (self.inputs, self.outputs, self.tokens)) > 1


def float8(scaling: Scaling = "rowwise_with_gw_hp", *, modules: str | None = None) -> Transform:
    r"""Return the transform that lets linear layers multiply in float8; it comes before `tensor`.

    Parameters keep their names, values and dtypes, and so do checkpoints and exports: only the
    operands of products are rounded. With `precision`, as is usual, these are bf16 already.

    | scaling | output | gradient of the input | gradient of the weight |
    |---|---|---|---|
    | tensorwise | a scale a matrix | a scale a matrix; gradients in e5m2 | as before |
    | rowwise | a scale a row | a scale a row | a scale a row |
    | rowwise_with_gw_hp | a scale a row | gradients a scale a row, weights one | not in float8 |

    A "row" runs along the dimension that a product sums over, and scales of rows are powers of two.
    All else is e4m3. In the first two products each token has a scale of its own. In the third, and
    tensorwise, the tokens of a microbatch of a data-parallel rank share it. So "tensorwise" and
    "rowwise" give the numbers of one process where microbatches have the same rows (one row each,
    or the same number of data-parallel ranks), and "rowwise_with_gw_hp" does in every layout. With
    tp, ring and ulysses some scales are a maximum over ranks, a number a row or one for all.

    GPUs multiply bf16 in float8 from compute capability 8.9 on. Elsewhere, and in other dtypes, the
    8-bit numbers are multiplied in fp32 (fp64 in fp64), with the same roundings and no faster.

    Args:
        scaling: See above.
        modules: A pattern of names in the whole model (`parallel.name_patterns`), as
            "layers.*.attention.wq", of linear layers with sides that 16 divides. None chooses all
            such layers but the head. The log at the start of a run lists the layers left out.

    Returns:
        A transform for `build_stages`. It may come before adapters, whose base is then in float8.

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
        is_cuda = ps.device.type == "cuda"
        if is_cuda and torch.cuda.get_device_capability(ps.device) < (8, 9):
            name = torch.cuda.get_device_name(ps.device)
            raise ConfigError(
                f"float8: {name} cannot multiply it, which GPUs from compute capability 8.9 on do; "
                "compute in bf16",
                where="float8",
                got=name,
            )
        layers, left_out = choose_layers(module, modules, by="float8", problem=_find_problem)
        for name, layer in layers.items():
            # `tensor`, which comes later, records the axes of the sides: `shard_by_style_`.
            settings = _LayerSettings(
                name, _RECIPES[scaling], inputs=SOLO, outputs=SOLO, tokens=ps.sp
            )
            mix_in_(layer, Float8, float8=settings)
        note_computation_(layers.values(), left_out, f"float8 ({scaling})")
        return module

    return Transform(apply, kind="rounded")


def _find_problem(part: nn.Module) -> str | None:
    """Return why a layer cannot be in float8, or None."""
    problem = plain_problem(part)
    if problem or not isinstance(part, nn.Linear):
        return problem
    if part.out_features % _MULTIPLE or part.in_features % _MULTIPLE:
        return f"is {part.out_features} x {part.in_features}, which {_MULTIPLE} does not divide"
    return None


class Float8(nn.Module):
    """Mixin: a linear layer whose products are in float8."""

    float8: _LayerSettings
    weight: Tensor
    bias: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        """Map `[..., I]` to `[..., O]`."""
        device_type = x.device.type
        weight = self.weight
        if torch.is_autocast_enabled(device_type):  # it knows `linear`, and not this product
            dtype = torch.get_autocast_dtype(device_type)
            x = x.to(dtype)
            weight = weight.to(dtype)
        multiply: Any = _Float8Product.apply
        if self.float8.communicates and torch.compiler.is_compiling():
            # The compiler traces the product, but not a collective on one of our groups.
            multiply = torch.compiler.disable(multiply)
        rows = x.flatten(0, -2)  # [T, I], a row for each token
        y = multiply(rows, weight, self.float8).view(*x.shape[:-1], -1)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def shard_by_style_(self, style: ParallelStyle, axis: Axis) -> ParallelStyle:
        """Record which side of the weight tensor parallelism shards.

        Effects:
            From here on scales of that side are a maximum over `axis`.

        Raises:
            ConfigError: 16 does not divide this rank's part of the side.
        """
        dim = style.shard_dims.get("weight")
        if dim is None:
            return style
        local_size = self.weight.shape[dim] // axis.count
        if local_size % _MULTIPLE:
            raise ConfigError(
                f"float8: tp = {axis.count} leaves {self.float8.name!r} a side of {local_size}, "
                f"which {_MULTIPLE} does not divide; lower tp, or let the pattern of modules leave "
                "it out",
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
        ctx: Any, x: Tensor, weight: Tensor, settings: _LayerSettings
    ) -> Tensor:
        # Backward sums over other dimensions, so its operands have other scales than these.
        ctx.save_for_backward(x, weight)
        ctx.settings = settings
        one_x, one_w = settings.recipe.output
        powers = settings.recipe.powers
        tokens = settings.tokens
        inputs = settings.inputs
        outputs = settings.outputs
        return _multiply(
            _round(x, 1, _E4M3, powers, one=one_x, inner=inputs, outer=tokens),
            _round(weight.t(), 0, _E4M3, powers, one=one_w, inner=inputs, outer=outputs),
            x,
        )

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> Any:  # pyrefly: ignore[bad-override]
        x, weight = ctx.saved_tensors
        settings: _LayerSettings = ctx.settings
        dtype = settings.recipe.gradient
        powers = settings.recipe.powers
        tokens = settings.tokens
        inputs = settings.inputs
        outputs = settings.outputs
        d_x = d_weight = None
        if ctx.needs_input_grad[0]:
            one_d_y, one_w = settings.recipe.d_input
            d_x = _multiply(
                _round(d_y, 1, dtype, powers, one=one_d_y, inner=outputs, outer=tokens),
                _round(weight, 0, _E4M3, powers, one=one_w, inner=outputs, outer=inputs),
                d_y,
            )
        scalings = settings.recipe.d_weight
        if ctx.needs_input_grad[1] and scalings is None:
            d_weight = d_y.t() @ x
        elif ctx.needs_input_grad[1] and scalings is not None:
            one_d_y, one_x = scalings
            d_weight = _multiply(
                _round(d_y.t(), 1, dtype, powers, one=one_d_y, inner=tokens, outer=outputs),
                _round(x, 0, _E4M3, powers, one=one_x, inner=tokens, outer=inputs),
                d_y,
            )
        return d_x, d_weight, None


def _round(
    x: Tensor,
    dim: int,
    dtype: torch.dtype,
    powers: bool,
    *,
    one: bool,
    inner: Axis,
    outer: Axis,
) -> tuple[Tensor, Tensor]:
    """Return a matrix in float8, and the scale of the whole matrix or along a dimension.

    Args:
        x: A matrix.
        dim: The dimension that the product sums over.
        dtype: The dtype to round to.
        powers: Whether scales are powers of two.
        one: Whether the matrix has one scale.
        inner: The axis that shards that dimension.
        outer: The axis that shards the other one.
    """
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    dims = (0, 1) if one else dim
    largest = all_max(x.abs().amax(dims, keepdim=True), inner)
    if one:
        largest = all_max(largest, outer)
    top = torch.finfo(dtype).max
    # If `largest` is not finite, the product is not either: an overflow stays visible.
    scale = top / largest.clamp_min(_MIN_LARGEST)
    if powers:
        scale = scale.log2().floor().exp2()
    return (x * scale).clamp(-top, top).to(dtype), 1 / scale


def _multiply(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], like: Tensor) -> Tensor:
    """Return `[M, K]` times `[K, N]`, both rounded, in the dtype of a tensor."""
    a8, a_scale = a
    b8, b_scale = b
    if like.is_cuda and like.dtype == torch.bfloat16:
        return scaled_product(a8, b8, a_scale, b_scale)
    dtype = torch.promote_types(like.dtype, torch.float32)
    product = a8.to(dtype) @ b8.to(dtype)
    return (product * a_scale * b_scale).to(like.dtype)


def scaled_product(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor) -> Tensor:
    """Multiply float8 matrices by torch's kernel for GPUs; on a CPU it is slow.

    Args:
        a: `[M, K]`.
        b: `[K, N]`; 16 divides N.
        a_scale: The factor of `a`, fp32 `[M, 1]` or `[1, 1]`.
        b_scale: The factor of `b`, fp32 `[1, N]` or `[1, 1]`.

    Returns:
        bf16 `[M, N]`.

    Examples:
        >>> one = torch.ones(1, 1)
        >>> eight = torch.ones(16, 16).to(torch.float8_e4m3fn)
        >>> scaled_product(eight, eight, one, one)[0, :2]
        tensor([16., 16.], dtype=torch.bfloat16)
    """
    num_missing = -a.shape[1] % _MULTIPLE
    if num_missing:  # a sum over tokens: zeros add nothing; `pad` takes bytes, and not float8
        a = nn.functional.pad(a.view(torch.uint8), (0, num_missing)).view(a.dtype)
        b = nn.functional.pad(b.view(torch.uint8), (0, 0, 0, num_missing)).view(b.dtype)
    # The kernel takes one scale of both, or one per row of a and per column of b.
    if a_scale.numel() != b_scale.numel() or a_scale.numel() > 1:
        a_scale = a_scale.expand(len(a), 1)
        b_scale = b_scale.expand(1, b.shape[1])
    return torch._scaled_mm(  # noqa: SLF001 (no public name)
        a.contiguous(),
        b.t().contiguous().t(),  # cuBLASLt takes the second operand in column-major order
        a_scale.float().contiguous(),
        b_scale.float().contiguous(),
        out_dtype=torch.bfloat16,
    )
