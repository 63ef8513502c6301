"""Muon: momentum whose matrices are orthogonalized before they are added to the parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any, cast

import attrs
import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainkit.optim.distributed_matrices import (
    Box,
    Grid,
    Matrix,
    Round,
    compute_on_owners,
    plan_rounds,
)
from trainkit.optim.storage import write_unless_skipped_
from trainkit.parallel.grad_reduction import check_dense, get_local
from trainkit.parallel.parameters import PlacedAlike, canonical_name, list_boxes, redistribute_like
from trainkit.types import SOLO, Axis, check_choice, check_range

_COEFFICIENTS = (3.4445, -4.775, 2.0315)  # Jordan et al. (2024)
_MIN_NORM = 1e-7  # of a matrix of zeros, which must not be divided by 0
_DTYPES = ("bfloat16", "float32", "float64")
_NOT_HIDDEN = (nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d)

# Of the rows and columns of one matrix, for an update whose singular values are near 1.
_SCALES: Mapping[str, Callable[[int, int], float]] = {
    "original": lambda rows, columns: math.sqrt(max(1, rows / columns)),
    "match_rms": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
}


# ---------------------------------------------------------------------------------- orthogonalizing


@torch.no_grad()
def orthogonalize(matrices: Tensor, *, steps: int = 5, dtype: torch.dtype | None = None) -> Tensor:
    """Return matrices with about the same singular vectors, and singular values near 1.

    Five steps of a Newton-Schulz iteration, x -> 3.4445 x - 4.775 x³ + 2.0315 x⁵ on the singular
    values, after division by the Frobenius norm. The coefficients have the steepest slope at 0, and
    do not converge: singular values above 2e-3 of the norm end between 0.68 and 1.21, smaller ones
    below, and 0 stays 0. A matrix with a norm below 1e-7 comes out smaller.

    Args:
        matrices: `[..., rows, columns]`.
        steps: The number of iterations.
        dtype: The dtype of the computation; None means fp64 for fp64, else fp32 on a CPU and bf16
            on other devices.

    Returns:
        A tensor of the shape and dtype of `matrices`.

    Raises:
        ValueError: `steps` is below 1.

    References:
        Jordan et al., "Muon: an optimizer for hidden layers in neural networks" (2024); Bernstein
        and Newhouse, "Old optimizer, new norm" (2024), for the orthogonal factor as steepest
        descent in the spectral norm.

    Examples:
        >>> x = torch.tensor([[3.0, 0.0, 0.0], [0.0, -0.5, 0.0]])
        >>> torch.linalg.svdvals(orthogonalize(x)).sub(1).abs().max() < 0.35
        tensor(True)
    """
    check_range("orthogonalize", at_least=1, steps=steps)
    a, b, c = _COEFFICIENTS
    x = matrices.to(dtype or get_orthogonalization_dtype(matrices)).contiguous()
    x = x.reshape(-1, *x.shape[-2:])  # [matrices, rows, columns], for the batched products
    is_tall = x.shape[-2] > x.shape[-1]
    # The square of a norm in bf16 would have 8 bits.
    norm_dtype = torch.promote_types(x.dtype, torch.float32)
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=norm_dtype)
    x = (x / norm.clamp(min=_MIN_NORM)).to(x.dtype)
    x = x.mT.contiguous() if is_tall else x  # the smaller side squared is the cheaper product
    # An odd polynomial a x + b x xᵀ x + c (x xᵀ)² x acts on the singular values alone.
    for _ in range(steps):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)  # b x xᵀ + c (x xᵀ)²
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return (x.mT if is_tall else x).reshape(matrices.shape).to(matrices.dtype)


def get_orthogonalization_dtype(x: Tensor) -> torch.dtype:
    """Return the default dtype in which a matrix is orthogonalized.

    Examples:
        >>> get_orthogonalization_dtype(torch.ones(1, dtype=torch.bfloat16))
        torch.float32
    """
    if x.dtype == torch.float64:
        return torch.float64
    return torch.float32 if x.device.type == "cpu" else torch.bfloat16


def map_parts(
    function: Callable[[Tensor], Tensor],
    matrices: Tensor,
    parts: Sequence[int] | None,
    *,
    dim: int,
) -> Tensor:
    """Apply a function to each of the matrices that are fused in one, and fuse the results.

    Args:
        function: From matrices to matrices of the same shape.
        matrices: `[..., rows, columns]`.
        parts: How many rows (columns, for `dim` -1) belong to each matrix, repeated to the end;
            None means one matrix. (4096, 1024, 1024) are queries, keys and values below each other,
            (1, 1) a gate and another matrix whose rows alternate, and (64, 64) repeats for each
            head: 64 rows of one matrix, 64 rows of the other.
        dim: -2 for rows, -1 for columns.

    Examples:
        >>> x = torch.arange(4.0).view(4, 1)
        >>> map_parts(lambda part: part.flip(-2), x, (1, 1), dim=-2).flatten()
        tensor([2., 3., 0., 1.])
    """
    if parts is None:
        return function(matrices)
    periods = matrices.unflatten(dim, (-1, sum(parts)))  # dim - 1 counts the periods
    count = periods.shape[dim - 1]
    results = [
        function(part.flatten(dim - 1, dim)).unflatten(dim, (count, -1))
        for part in periods.split([*parts], dim)
    ]
    return torch.cat(results, dim).flatten(dim - 1, dim)


# ------------------------------------------------------------------------------------ the optimizer


@attrs.frozen(eq=False)
class _LocalMatrix:
    """The shard of a matrix in this rank's shard of its parameter.

    `index` counts the matrices of a local stack, and is None if this rank has no part of the
    matrix; `offset` is the first row and column of the local shard in the full matrix.
    """

    parameter: nn.Parameter
    group: Mapping[str, Any]
    index: int | None
    offset: tuple[int, int]

    def view(self, local: Tensor, box: Box) -> Tensor:
        """Return a box of this matrix in the parameter's local shard, or in one placed alike."""
        assert self.index is not None
        # A box is in the coordinates of the full matrix.
        first_row, rows, first_column, columns = box
        row = first_row - self.offset[0]
        column = first_column - self.offset[1]
        matrix = local.view(-1, *local.shape[-2:])[self.index]
        return matrix[row : row + rows, column : column + columns]


@attrs.frozen(eq=False)
class _Plan:
    """The work of a step for the parameters of one mesh, compute dtype and device."""

    grid: Grid
    parameters: Sequence[nn.Parameter]
    matrices: Sequence[_LocalMatrix]
    rounds: Sequence[Round]
    like: Tensor


class Muon(torch.optim.Optimizer):
    """Momentum with orthogonalized matrices, equal in every layout (Jordan et al., 2024).

    m <- momentum m + (1 - momentum) g; u = m, or with `nesterov` momentum m + (1 - momentum) g;
    p <- p - lr weight_decay p - lr scale orthogonalize(u). Others write m <- momentum m + g and u =
    g + momentum m: that is our u divided by (1 - momentum), and orthogonalizing removes factors, so
    both agree while the momentum is constant. (g + momentum m with our m is neither.)

    Each matrix is assembled on one rank, which orthogonalizes it, and its shards are sent back. So
    no layout changes a bit of an update, given the same gradient. The matrices of a mesh are
    distributed over all its ranks by their cost (`assign_owners`); ranks that hold copies share the
    work too. A rank assembles at most `bucket_bytes` at a time, in the dtype of the computation,
    and needs as much again for what it sends. A stack of experts that is sharded over ep is
    computed where it is.

    Args:
        params: Parameters `[rows, columns]`, or stacks `[N, rows, columns]` of them, or groups.
            Rows are outputs, as in `nn.Linear`. Embeddings, heads and vectors need another
            optimizer; see `hidden_matrices`.
        lr: The initial learning rate; `clip_and_step` sets it in every step.
        momentum: The decay rate of the momentum.
        nesterov: Whether to use Nesterov momentum, in which the gradient counts once more.
        weight_decay: The parameter shrinks by lr * weight_decay per step (AdamW's way).
        cautious: Whether decay is skipped where it opposes the update (Chen et al., "Cautious
            weight decay", 2025).
        steps: The iterations of `orthogonalize`.
        scale: "original", sqrt(max(1, rows / columns)), or "match_rms", 0.2 sqrt(max(rows,
            columns)), which works with the learning rate and decay of AdamW (Liu et al., "Muon is
            scalable for LLM training", 2025).
        parts: The sizes of the matrices that are fused in each of these; see `map_parts`.
        parts_dim: -2 where `parts` are rows, -1 where they are columns.
        dtype: "bfloat16", "float32" or "float64" for computation and communication; None as in
            `orthogonalize`.
        axis: The ranks that hold equal copies of plain parameters, as under DDP, which then share
            the work. Without it every rank computes all of them.
        bucket_bytes: See above; no result depends on it.

    All but the last two can differ from group to group.

    Raises:
        ValueError: An option is out of range, or a parameter is no matrix, or `parts` do not divide
            it.

    Effects:
        A step writes parameters and "momentum_buffer", placed like the parameter, in fp32 at least.
        It communicates on the meshes of the parameters: which parameters have a gradient on any
        rank (the others do not change; a gradient that only this rank lacks is 0), and matrices. A
        step can be skipped on the device (`found_inf`); only a rank that lacks a gradient waits for
        the device.

    Examples:
        >>> weight = nn.Parameter(torch.zeros(2, 2))
        >>> optimizer = Muon([weight], lr=0.1)
        >>> weight.grad = torch.tensor([[4.0, 0.0], [0.0, 1.0]])
        >>> optimizer.step()
        >>> weight.detach().abs() > 0.05
        tensor([[ True, False],
                [False,  True]])
    """

    # torch's GradScaler and `clip_and_step` then set `found_inf`, by which a step skips on the
    # device.
    _step_supports_amp_scaling = True
    # Defaults for a copy, which torch makes without __init__.
    _axis, _bucket_bytes = SOLO, 128 * 2**20
    _cached_plans = cast("tuple[Any, list[_Plan]]", (None, []))

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.0,
        cautious: bool = False,
        steps: int = 5,
        scale: str = "original",
        parts: Sequence[int] | None = None,
        parts_dim: int = -2,
        dtype: str | None = None,
        axis: Axis = SOLO,
        bucket_bytes: int = 128 * 2**20,
    ) -> None:
        check_range("Muon", at_least=1, bucket_bytes=bucket_bytes)
        self._axis, self._bucket_bytes = axis, bucket_bytes
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "nesterov": nesterov,
            "weight_decay": weight_decay,
            "cautious": cautious,
            "steps": steps,
            "scale": scale,
            "parts": None if parts is None else tuple(parts),
            "parts_dim": parts_dim,
            "dtype": dtype,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters; options that it does not set have the defaults."""
        super().add_param_group(param_group)
        self._cached_plans = (None, [])
        group = self.param_groups[-1]
        check_choice(tuple(_SCALES), "Muon", scale=group["scale"])
        if group["dtype"] is not None:
            check_choice(_DTYPES, "Muon", dtype=group["dtype"])
        if group["parts_dim"] not in (-2, -1):
            raise ValueError(f"Muon: parts_dim must be -2 or -1, got {group['parts_dim']}")
        check_range("Muon", at_least=0, lr=group["lr"])
        check_range("Muon", at_least=0, weight_decay=group["weight_decay"])
        check_range("Muon", at_least=0, below=1, momentum=group["momentum"])
        check_range("Muon", at_least=1, steps=group["steps"])
        parts = group["parts"]
        if parts is not None and not (parts and min(parts) > 0):
            raise ValueError(f"Muon: parts must be sizes of at least 1, got {parts}")
        for p in group["params"]:
            shape = tuple(p.shape)
            if p.ndim not in (2, 3) or not p.is_floating_point():
                raise ValueError(
                    "Muon: parameters must be matrices, or stacks of them, of real numbers; got "
                    f"one of shape {shape} and dtype {p.dtype}; give others to AdamW "
                    "(`hidden_matrices` lists the matrices of a model)"
                )
            if parts is not None and shape[group["parts_dim"]] % sum(parts):
                raise ValueError(
                    f"Muon: parts {parts} sum to {sum(parts)}, which does not divide dimension "
                    f"{group['parts_dim']} of a parameter of shape {shape}"
                )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step; see the class."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        found_inf = getattr(self, "found_inf", None)
        for plan in self._get_plans():
            work = _Work(plan, self._update_momenta(plan, found_inf), found_inf)
            for planned in plan.rounds:
                compute_on_owners(
                    planned,
                    read=work.read,
                    compute=work.compute,
                    write=work.write,
                    like=plan.like,
                )
        return loss

    def _get_plans(self) -> list[_Plan]:
        """Return the plans of a step, which change only with the trainable parameters."""
        # One collective carries one mesh, dtype and device.
        members: dict[Any, list[tuple[nn.Parameter, dict[str, Any]]]] = {}
        key: list[Any] = []
        for group in self.param_groups:
            for p in group["params"]:
                if not p.requires_grad:
                    continue
                dtype = (
                    getattr(torch, group["dtype"])
                    if group["dtype"]
                    else get_orthogonalization_dtype(p)
                )
                kind = (_mesh_of(p), dtype, p.device)
                members.setdefault(kind, []).append((p, group))
                # What a plan depends on; all other options are read from the groups in each step.
                key.append((id(p), id(group), dtype, group["parts"], group["parts_dim"]))
        if self._cached_plans[0] != key:
            plans = [
                _make_plan(pairs, dtype, self._axis, self._bucket_bytes)
                for (_, dtype, _), pairs in members.items()
            ]
            self._cached_plans = key, plans
        return self._cached_plans[1]

    def _update_momenta(
        self, plan: _Plan, found_inf: Tensor | None
    ) -> dict[int, tuple[Tensor, Tensor]]:
        """Update the momenta of a plan; return the local (gradient, momentum) of each parameter."""
        check_dense(plan.parameters, self.param_groups)
        # Set by torch's GradScaler, which does not divide the gradients of such optimizers itself.
        grad_scale = getattr(self, "grad_scale", None)
        updated: dict[int, tuple[Tensor, Tensor]] = {}
        rates = {id(p): group["momentum"] for group in self.param_groups for p in group["params"]}
        for p, has_gradient in zip(plan.parameters, _have_gradients(plan), strict=True):
            if not has_gradient:
                continue
            if "momentum_buffer" not in self.state[p]:
                with PlacedAlike():
                    dtype = torch.promote_types(p.dtype, torch.float32)
                    self.state[p]["momentum_buffer"] = torch.zeros_like(p, dtype=dtype)
            buffer = get_local(self.state[p]["momentum_buffer"])
            if p.grad is None:  # another rank has one, so this shard of the gradient is 0
                grad = torch.zeros_like(buffer)
            else:
                grad = get_local(redistribute_like(p, p.grad)).to(buffer.dtype)
            if grad_scale is not None:
                grad = grad / grad_scale
            write_unless_skipped_(buffer, buffer.lerp(grad, 1 - rates[id(p)]), found_inf)
            updated[id(p)] = grad, buffer
        return updated


# ------------------------------------------------------------------------------------------- a step


def _have_gradients(plan: _Plan) -> list[bool]:
    """Return whether each parameter has a gradient on any rank of its grid; a collective."""
    has_local = [p.grad is not None for p in plan.parameters]
    if plan.grid.count == 1:
        return has_local
    # Made on the device: there is no upload if all gradients are there.
    flags = plan.like.new_ones(len(has_local))
    for i in (i for i, has in enumerate(has_local) if not has):
        flags[i].zero_()
    for size, group in zip(plan.grid.sizes, plan.grid.groups, strict=True):
        if size > 1:
            dist.all_reduce(flags, dist.ReduceOp.MAX, group=group)
    # A rank that has all gradients knows the result, and need not wait for the device.
    return has_local if all(has_local) else flags.bool().tolist()


@attrs.frozen(eq=False)
class _Work:
    """A step of a plan's matrices, as `compute_on_owners` calls it.

    `momenta` are (gradient, momentum) by the id of a parameter, without parameters that have no
    gradient on any rank.
    """

    plan: _Plan
    momenta: Mapping[int, tuple[Tensor, Tensor]]
    found_inf: Tensor | None

    def read(self, index: int, box: Box) -> Tensor:
        """Return a shard to orthogonalize: the momentum, mixed with the gradient for Nesterov."""
        matrix, like = self.plan.matrices[index], self.plan.like
        if id(matrix.parameter) not in self.momenta:
            return like.new_zeros(box[1], box[3])
        gradient, buffer = (matrix.view(x, box) for x in self.momenta[id(matrix.parameter)])
        if not matrix.group["nesterov"]:
            return buffer.to(like.dtype)
        # g + momentum (m - g), which is the class's u.
        return gradient.lerp(buffer, matrix.group["momentum"]).to(like.dtype)

    def compute(self, indices: Sequence[int], matrices: Sequence[Tensor]) -> list[Tensor]:
        """Return the scaled updates of full matrices."""

        def by_kind(pair: tuple[int, Tensor]) -> Any:
            return id(self.plan.matrices[pair[0]].group), tuple(pair[1].shape)

        updates: list[Tensor] = []
        # One batched product for all neighbors of one group and shape.
        for _, pairs in groupby(zip(indices, matrices, strict=True), key=by_kind):
            members = list(pairs)
            group = self.plan.matrices[members[0][0]].group
            stacked = torch.stack([x for _, x in members])
            updates += map_parts(
                partial(_compute_update, steps=group["steps"], scale=group["scale"]),
                stacked,
                group["parts"],
                dim=group["parts_dim"],
            ).unbind()
        return updates

    def write(self, index: int, box: Box, update: Tensor) -> None:
        """Apply a shard of an update to its parameter."""
        matrix = self.plan.matrices[index]
        if id(matrix.parameter) not in self.momenta:
            return
        value = matrix.view(get_local(matrix.parameter), box)
        group = matrix.group
        update = update.to(value.dtype)
        decayed = value * (1 - group["lr"] * group["weight_decay"])
        if group["cautious"]:
            decayed = torch.where(update * value >= 0, decayed, value)
        write_unless_skipped_(value, decayed.sub_(update, alpha=group["lr"]), self.found_inf)


def _compute_update(x: Tensor, *, steps: int, scale: str) -> Tensor:
    # Of a fused matrix each part has its own shape, hence its own scale.
    factor = _SCALES[scale](*x.shape[-2:])
    return orthogonalize(x, steps=steps, dtype=x.dtype) * factor


# ------------------------------------------------------------------------------------------- a plan


def _mesh_of(p: Any) -> Any:
    return getattr(p, "device_mesh", None)


def _make_grid(p: Any, axis: Axis) -> Grid:
    """Return the grid of a parameter's mesh; that of a plain parameter is an axis."""
    mesh = _mesh_of(p)
    if mesh is None:
        return Grid((axis.count,), axis.index, (axis.group,))
    # Row-major: the last mesh dimension runs fastest, as `Grid` counts ranks.
    sizes = tuple(mesh.shape)
    here = 0
    for size, coordinate in zip(sizes, mesh.get_coordinate(), strict=True):
        here = here * size + coordinate
    return Grid(sizes, here, tuple(mesh.get_group(dim) for dim in range(len(sizes))))


def _make_plan(
    members: Sequence[tuple[nn.Parameter, Mapping[str, Any]]],
    dtype: torch.dtype,
    axis: Axis,
    bucket_bytes: int,
) -> _Plan:
    """Plan a step of parameters that are all on one mesh, or all plain."""
    grid = _make_grid(members[0][0], axis)
    matrices: list[Matrix] = []
    local_matrices: list[_LocalMatrix] = []
    for p, group in members:
        *stack, rows, columns = p.shape
        # Plain parameters are copies: every rank of the axis has all of them.
        full = (0,) * p.ndim, tuple(p.shape)
        boxes = [full] * grid.count if _mesh_of(p) is None else list_boxes(p)
        cost = group["steps"] * _count_multiplications(rows, columns, group)
        start, _ = boxes[grid.here]
        for i in range(stack[0] if stack else 1):
            shards: dict[int, Box] = {}
            for rank, (offset, shape) in enumerate(boxes):
                is_here = not stack or offset[0] <= i < offset[0] + shape[0]
                # Of an uneven sharding some ranks have no rows.
                if is_here and shape[-2] * shape[-1]:
                    shards[rank] = offset[-2], shape[-2], offset[-1], shape[-1]
            index = None
            if grid.here in shards:
                # If dimension 0 of a stack is sharded, this rank's matrices start at start[0].
                index = i - start[0] if stack else 0
            matrices.append(
                Matrix((rows, columns), shards, cost, num_bytes=rows * columns * dtype.itemsize)
            )
            local_matrices.append(_LocalMatrix(p, group, index, (start[-2], start[-1])))
    return _Plan(
        grid=grid,
        parameters=[p for p, _ in members],
        matrices=local_matrices,
        rounds=plan_rounds(matrices, grid, bucket_bytes=bucket_bytes),
        like=get_local(members[0][0]).new_empty(0, dtype=dtype),
    )


def _count_multiplications(rows: int, columns: int, group: Mapping[str, Any]) -> int:
    """Return the multiplications of one iteration, over all parts of a fused matrix."""
    split, other = (rows, columns) if group["parts_dim"] == -2 else (columns, rows)
    parts = [split] if group["parts"] is None else group["parts"]
    total = 0
    for part in parts:
        size = part * (split // sum(parts))
        small, large = min(size, other), max(size, other)
        # x xᵀ takes small² large multiplications, its square small³, and the product with x small²
        # large.
        total += small**2 * (2 * large + small)
    return total


# --------------------------------------------------------------------------------- which parameters


def hidden_matrices(stages: Iterable[nn.Module]) -> dict[str, tuple[int, ...] | None]:
    """Return the names of the parameters that Muon should step, and the `parts` of each.

    Those are the trainable matrices, and stacks of them, of hidden layers. Embeddings, the output
    head, routers, convolutions, norms and biases are not. In models that trainkit did not build,
    the head is the result of `get_output_embeddings`, or is called `lm_head` or `embed_out`, or is
    a `head` or `output` next to the layers. A router is a module whose class or name ends with
    "router", or whose class ends with "gate", or a linear layer whose name ends with "gate" and
    which has less than 1/8 as many outputs as inputs. A parameter that is tied to one of these is
    excluded too.

    Args:
        stages: This rank's stages of a model.

    Returns:
        For each name in the whole model how many rows of the parameter belong to each of the
        matrices that are fused in it, for `Muon(parts=)`; None for one matrix. Only trainkit's own
        layers define it.

    Examples:
        >>> model = nn.ModuleDict({"embedding": nn.Embedding(3, 2), "up": nn.Linear(2, 4)})
        >>> hidden_matrices([model])
        {'up.weight': None}
    """
    parts_by_name: dict[str, tuple[int, ...] | None] = {}
    for stage in stages:
        head: Any = getattr(stage, "get_output_embeddings", lambda: None)()
        excluded = {
            id(p)
            for path, module in stage.named_modules()
            if not _is_hidden(path, module) or module is head
            for p in module.parameters(recurse=False)
        }
        for path, module in stage.named_modules():
            for name, p in module.named_parameters(path, recurse=False):
                # Experts have a bias each, in one tensor of two dimensions.
                is_matrix = p.ndim in (2, 3) and not name.endswith("bias")
                if p.requires_grad and is_matrix and id(p) not in excluded:
                    parts: Any = getattr(module, "parts", None)
                    parts = parts if isinstance(parts, tuple) else None
                    parts_by_name[canonical_name(name)] = parts
    return parts_by_name


def _is_hidden(path: str, module: nn.Module) -> bool:
    name = canonical_name(path)
    if name in ("head", "output") or name.rpartition(".")[2] in ("lm_head", "embed_out"):
        return False
    class_name = type(module).__name__.lower()
    name = path.lower()
    if isinstance(module, _NOT_HIDDEN) or "conv" in class_name:
        return False
    is_router = class_name.endswith(("router", "gate")) or name.endswith("router")
    if isinstance(module, nn.Linear) and name.endswith("gate"):
        # The gate of an MLP has about as many outputs as inputs, that of experts one per expert.
        is_router |= 8 * module.out_features < module.in_features
    return not is_router
