"""Muon: momentum whose matrices are orthogonalised before they are added to the parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any, cast

import attrs
import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainkit.optim.distributed_matrices import Box, Grid, Matrix, Round, compute_whole, rounds_of
from trainkit.parallel.grad_reduction import check_dense, get_local
from trainkit.parallel.parameters import PlacedAlike, canonical_name, list_boxes
from trainkit.types import SOLO, Axis, check_choice, check_range

_COEFFICIENTS = (3.4445, -4.775, 2.0315)
_LEAST_NORM = 1e-7
_DTYPES = ("bfloat16", "float32", "float64")
_NO_HIDDEN = (nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d)

_SCALES: Mapping[str, Callable[[int, int], float]] = {
    "original": lambda rows, columns: math.sqrt(max(1, rows / columns)),
    "match_rms": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
}


# ---------------------------------------------------------------------------------- orthogonalising


@torch.no_grad()
def orthogonalize(matrices: Tensor, *, steps: int = 5, dtype: torch.dtype | None = None) -> Tensor:
    """Return matrices with about the same singular vectors, and singular values near 1.

    Five steps of a Newton-Schulz iteration, x -> 3.4445 x - 4.775 x³ + 2.0315 x⁵ on the singular
    values, after division by the Frobenius norm. The coefficients are those with the steepest slope
    at 0, and do not converge: singular values above 2e-3 of the norm end between 0.68 and 1.21,
    smaller ones below, and 0 stays 0. A matrix of a norm below 1e-7 comes out smaller.

    Args:
        matrices: `[..., rows, columns]`, each one by itself.
        steps: How many iterations.
        dtype: What to compute in; None means fp64 for fp64, else fp32 on a CPU and bf16 elsewhere.

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
    check_range("orthogonalized", at_least=1, steps=steps)
    a, b, c = _COEFFICIENTS
    x = matrices.to(dtype or computing_dtype(matrices)).contiguous()
    x = x.reshape(-1, *x.shape[-2:])
    is_tall = x.shape[-2] > x.shape[-1]
    wide = torch.promote_types(x.dtype, torch.float32)
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=wide)
    x = (x / norm.clamp(min=_LEAST_NORM)).to(x.dtype)
    x = x.mT.contiguous() if is_tall else x  # the smaller side squared is the cheaper product
    for _ in range(steps):
        gram = x @ x.mT
        cubic = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, cubic, x, beta=a)
    return (x.mT if is_tall else x).reshape(matrices.shape).to(matrices.dtype)


def computing_dtype(x: Tensor) -> torch.dtype:
    """Return what a matrix is orthogonalised in by default.

    Examples:
        >>> computing_dtype(torch.ones(1, dtype=torch.bfloat16))
        torch.float32
    """
    if x.dtype == torch.float64:
        return torch.float64
    return torch.float32 if x.device.type == "cpu" else torch.bfloat16


def orthogonalized_parts(
    matrices: Tensor, parts: Sequence[int] | None, *, dim: int, each: Callable[[Tensor], Tensor]
) -> Tensor:
    """Apply a function to each of the matrices that stand in one, and put the results back.

    Args:
        matrices: `[..., rows, columns]`.
        parts: How many rows (columns, for `dim` -1) belong to each matrix, over and over; None is
            one matrix. (4096, 1024, 1024) are queries, keys and values one below the other, (1, 1)
            a gate and another matrix whose rows take turns, and (64, 64) is what repeats for each
            head: 64 rows of one, 64 rows of the other.
        dim: -2 for rows, -1 for columns.
        each: From matrices to matrices of the same shape.

    Examples:
        >>> x = torch.arange(4.0).view(4, 1)
        >>> orthogonalized_parts(x, (1, 1), dim=-2, each=lambda part: part.flip(-2)).flatten()
        tensor([2., 3., 0., 1.])
    """
    if parts is None:
        return each(matrices)
    if dim == -1:

        def turned(part: Tensor) -> Tensor:
            return each(part.mT).mT

        return orthogonalized_parts(matrices.mT, parts, dim=-2, each=turned).mT
    periods = matrices.unflatten(-2, (-1, sum(parts)))
    count = periods.shape[-3]
    done = [each(part.flatten(-3, -2)) for part in periods.split([*parts], -2)]
    return torch.cat([part.unflatten(-2, (count, -1)) for part in done], -2).flatten(-3, -2)


# ------------------------------------------------------------------------------------ the optimizer


@attrs.frozen(eq=False)
class _Held:
    """Where a matrix is in what this rank holds of its parameter; nowhere if `at` is None."""

    parameter: nn.Parameter
    group: Mapping[str, Any]
    at: int | None
    offset: tuple[int, int]

    def view(self, tensor: Tensor, box: Box) -> Tensor:
        """Return a box of this matrix in the local part of the parameter, or of one alike."""
        assert self.at is not None
        row, column = box[0] - self.offset[0], box[2] - self.offset[1]
        own = tensor.view(-1, *tensor.shape[-2:])[self.at]
        return own[row : row + box[1], column : column + box[3]]


@attrs.frozen(eq=False)
class _Plan:
    """What a step does with the parameters of one grid, dtype and device, once it is known."""

    grid: Grid
    parameters: Sequence[nn.Parameter]
    held: Sequence[_Held]
    rounds: Sequence[Round]
    like: Tensor


class Muon(torch.optim.Optimizer):
    """Momentum with orthogonalised matrices, in any layout the same (Jordan et al., 2024).

    m <- momentum m + (1 - momentum) g; u = m, or with `nesterov` momentum m + (1 - momentum) g;
    p <- p - lr weight_decay p - lr scale orthogonalized(u). Others write m <- momentum m + g and u
    = g + momentum m: that is our u divided by (1 - momentum), and orthogonalising removes factors,
    so that both are one for a momentum that stays. (g + momentum m with our m is neither.)

    Each matrix is put together on one rank, which orthogonalises it whole, and its parts are sent
    back, so that no layout changes a bit of an update, given the same gradient. The matrices of a
    mesh are dealt to all its ranks by their cost (`dealt`); ranks that hold copies share the work
    too. A rank puts together at most `bucket_bytes` at a time, in the dtype that is computed in,
    beside as much for what it sends; a stack of experts that ep deals is computed where it is.

    Args:
        params: Parameters `[rows, columns]`, or stacks `[N, rows, columns]` of them, or groups.
            Rows are outputs, as `nn.Linear` has them. Embeddings, heads and vectors are another
            optimizer's; see `hidden_matrices`.
        lr: The rate until somebody sets another, as `clip_and_step` does in every step.
        momentum: What remains of the momentum in a step.
        nesterov: Whether the gradient counts once more than in the momentum.
        weight_decay: The parameter shrinks by lr * weight_decay per step (AdamW's way).
        cautious: Shrink only elements that the update pulls towards 0 as well (Chen et al.,
            "Cautious weight decay", 2025).
        steps: Of `orthogonalize`.
        scale: "original", sqrt(max(1, rows / columns)), or "match_rms", 0.2 sqrt(max(rows,
            columns)), with which a rate and a decay of AdamW serve (Liu et al., "Muon is scalable
            for LLM training", 2025).
        parts: The sizes of the matrices that stand in each of these; see `orthogonalized_parts`.
        parts_dim: -2 where `parts` are rows, -1 where they are columns.
        dtype: "bfloat16", "float32" or "float64" to compute and send in; None as `orthogonalize`.
        axis: The ranks that hold equal copies of plain parameters, as under DDP, which then share
            the work. Without it every rank computes all of them.
        bucket_bytes: See above; no result depends on it.

    All but the last two can differ from group to group.

    Raises:
        ValueError: An option is out of range, or a parameter is no matrix, or not one that `parts`
            divide.

    Effects:
        A step writes parameters and "momentum_buffer", placed like the parameter, in fp32 at least.
        It communicates on the meshes of the parameters: which one has a gradient on any rank (the
        others are left alone; where this rank alone lacks it, zeros stand for it), and matrices. It
        skips on the device (`found_inf`); only a rank that lacks a gradient waits for the device.

    Examples:
        >>> weight = nn.Parameter(torch.zeros(2, 2))
        >>> optimizer = Muon([weight], lr=0.1)
        >>> weight.grad = torch.tensor([[4.0, 0.0], [0.0, 1.0]])
        >>> optimizer.step()
        >>> weight.detach().abs() > 0.05
        tensor([[ True, False],
                [False,  True]])
    """

    _step_supports_amp_scaling = True
    _axis, _bucket_bytes = SOLO, 128 * 2**20  # what a copy has, which torch makes without __init__
    _planned = cast("tuple[Any, list[_Plan]]", (None, []))

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
        options = {"lr": lr, "momentum": momentum, "nesterov": nesterov, "cautious": cautious}
        options |= {"weight_decay": weight_decay, "steps": steps, "scale": scale, "dtype": dtype}
        parts = None if parts is None else tuple(parts)
        super().__init__(params, options | {"parts": parts, "parts_dim": parts_dim})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, with what its options leave out as the others have it."""
        super().add_param_group(param_group)
        self._planned = (None, [])
        group = self.param_groups[-1]
        _check_options(group)
        for p in group["params"]:
            _check_matrix(p, group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step; see the class."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        refused = getattr(self, "found_inf", None)
        refused = None if refused is None else refused > 0
        for plan in self._plans():
            work = _Work(plan, self._with_momenta(plan, refused), refused)
            for planned in plan.rounds:
                compute_whole(
                    planned,
                    read=work.read,
                    compute=work.computed,
                    write=work.write,
                    like=plan.like,
                )
        return loss

    def _plans(self) -> list[_Plan]:
        """Return what to do, by what parameters are trained: as long as these stay, the same."""
        sets: dict[Any, list[tuple[nn.Parameter, dict[str, Any]]]] = {}
        options: list[Any] = []
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.requires_grad):
                dtype = _dtype_of(p, group)
                sets.setdefault((_mesh_of(p), dtype, p.device), []).append((p, group))
                options.append((id(p), id(group), dtype, group["parts"], group["parts_dim"]))
        if self._planned[0] != options:
            plans = [
                _plan(members, dtype, self._axis, self._bucket_bytes)
                for (_, dtype, _), members in sets.items()
            ]
            self._planned = options, plans
        return self._planned[1]

    def _with_momenta(
        self, plan: _Plan, refused: Tensor | None
    ) -> dict[int, tuple[Tensor, Tensor]]:
        """Move the momenta of a plan; return gradient and momentum of each parameter by its id."""
        check_dense(plan.parameters, self.param_groups)
        grad_scale = getattr(self, "grad_scale", None)
        found: dict[int, tuple[Tensor, Tensor]] = {}
        momenta = {id(p): group["momentum"] for group in self.param_groups for p in group["params"]}
        for p, moves in zip(plan.parameters, _have_gradients(plan), strict=True):
            if not moves:
                continue
            if "momentum_buffer" not in self.state[p]:
                with PlacedAlike():
                    dtype = torch.promote_types(p.dtype, torch.float32)
                    self.state[p]["momentum_buffer"] = torch.zeros_like(p, dtype=dtype)
            buffer = get_local(self.state[p]["momentum_buffer"])
            gradient = _local_gradient(p, buffer)
            if grad_scale is not None:
                gradient = gradient / grad_scale
            moved = buffer.lerp(gradient, 1 - momenta[id(p)])
            _put_(buffer, moved, refused)
            found[id(p)] = gradient, buffer
        return found


def _check_options(group: Mapping[str, Any]) -> None:
    check_choice(tuple(_SCALES), "Muon", scale=group["scale"])
    if group["dtype"] is not None:
        check_choice(_DTYPES, "Muon", dtype=group["dtype"])
    if group["parts_dim"] not in (-2, -1):
        raise ValueError(f"Muon: parts_dim must be -2 or -1, got {group['parts_dim']}")
    check_range("Muon", at_least=0, lr=group["lr"])
    check_range("Muon", at_least=0, weight_decay=group["weight_decay"])
    check_range("Muon", at_least=0, below=1, momentum=group["momentum"])
    check_range("Muon", at_least=1, steps=group["steps"])
    if group["parts"] is not None and not (group["parts"] and min(group["parts"]) > 0):
        raise ValueError(f"Muon: parts must be sizes of at least 1, got {group['parts']}")


def _check_matrix(p: Tensor, group: Mapping[str, Any]) -> None:
    shape, parts = tuple(p.shape), group["parts"]
    if p.ndim not in (2, 3) or not p.is_floating_point():
        raise ValueError(
            f"Muon: parameters must be matrices, or stacks of them, of real numbers; got one of "
            f"shape {shape} and dtype {p.dtype}; give others to AdamW (`hidden_matrices` says "
            "which of a model are matrices)"
        )
    if parts is not None and shape[group["parts_dim"]] % sum(parts):
        raise ValueError(
            f"Muon: parts {parts} sum to {sum(parts)}, which does not divide dimension "
            f"{group['parts_dim']} of a parameter of shape {shape}"
        )


# ------------------------------------------------------------------------------------------- a step


def _have_gradients(plan: _Plan) -> list[bool]:
    """Say which parameters have a gradient on any rank of their grid; all must ask."""
    own = [p.grad is not None for p in plan.parameters]
    if plan.grid.count == 1:
        return own
    flags = plan.like.new_ones(len(own))
    for i in (i for i, has in enumerate(own) if not has):
        flags[i].zero_()
    for size, group in zip(plan.grid.sizes, plan.grid.groups, strict=True):
        if size > 1:
            dist.all_reduce(flags, dist.ReduceOp.MAX, group=group)
    return own if all(own) else flags.bool().tolist()  # only who lacks one waits to hear


def _local_gradient(p: Any, like: Tensor) -> Tensor:
    grad: Any = p.grad
    if grad is None:
        return torch.zeros_like(like)
    if getattr(grad, "placements", None) != getattr(p, "placements", None):
        grad = grad.redistribute(placements=p.placements)  # a foreign module's may still be parts
    return get_local(grad).to(like.dtype)


@attrs.frozen(eq=False)
class _Work:
    """What a step does with the matrices of a plan; `momenta` are (gradient, momentum) by id."""

    plan: _Plan
    momenta: Mapping[int, tuple[Tensor, Tensor]]
    refused: Tensor | None

    def read(self, number: int, box: Box) -> Tensor:
        """Return what is to be orthogonalised: momentum, and with Nesterov's the gradient again."""
        held, like = self.plan.held[number], self.plan.like
        if id(held.parameter) not in self.momenta:
            return like.new_zeros(box[1], box[3])
        gradient, buffer = (held.view(x, box) for x in self.momenta[id(held.parameter)])
        mixed = gradient.lerp(buffer, held.group["momentum"]) if held.group["nesterov"] else buffer
        return mixed.to(like.dtype)

    def computed(self, numbers: Sequence[int], wholes: Sequence[Tensor]) -> list[Tensor]:
        """Return the scaled updates of whole matrices; those that are alike at once."""

        def kind(pair: tuple[int, Tensor]) -> Any:
            return id(self.plan.held[pair[0]].group), tuple(pair[1].shape)

        results: list[Tensor] = []
        for _, alike in groupby(zip(numbers, wholes, strict=True), key=kind):
            members = list(alike)
            group = self.plan.held[members[0][0]].group
            each = partial(_scaled, steps=group["steps"], scale=group["scale"])
            stacked = torch.stack([x for _, x in members])
            done = orthogonalized_parts(stacked, group["parts"], dim=group["parts_dim"], each=each)
            results += done.unbind()
        return results

    def write(self, number: int, box: Box, update: Tensor) -> None:
        """Move a part of a parameter."""
        held = self.plan.held[number]
        if id(held.parameter) not in self.momenta:
            return
        value, group = held.view(get_local(held.parameter), box), held.group
        update = update.to(value.dtype)
        shrunk = value * (1 - group["lr"] * group["weight_decay"])
        if group["cautious"]:
            shrunk = torch.where(update * value >= 0, shrunk, value)
        _put_(value, shrunk.sub_(update, alpha=group["lr"]), self.refused)


def _scaled(matrices: Tensor, *, steps: int, scale: str) -> Tensor:
    factor = _SCALES[scale](*matrices.shape[-2:])
    return orthogonalize(matrices, steps=steps, dtype=matrices.dtype) * factor


def _put_(old: Tensor, new: Tensor, refused: Tensor | None) -> None:
    """Write, or change nothing; never by a factor of 0, for 0 times NaN is NaN."""
    old.copy_(new if refused is None else torch.where(refused, old, new))


# ------------------------------------------------------------------------------------------- a plan


def _mesh_of(p: Any) -> Any:
    return getattr(p, "device_mesh", None)


def _dtype_of(p: Tensor, group: Mapping[str, Any]) -> torch.dtype:
    return getattr(torch, group["dtype"]) if group["dtype"] else computing_dtype(p)


def _plan(
    members: Sequence[tuple[nn.Parameter, Mapping[str, Any]]],
    dtype: torch.dtype,
    axis: Axis,
    bucket_bytes: int,
) -> _Plan:
    """Plan a step of parameters that are all on one mesh, or all plain."""
    grid = _grid_of(members[0][0], axis)
    matrices: list[Matrix] = []
    held: list[_Held] = []
    for p, group in members:
        for matrix, place in _matrices_of(p, group, grid, dtype):
            matrices.append(matrix)
            held.append(place)
    return _Plan(
        grid,
        [p for p, _ in members],
        held,
        rounds_of(matrices, grid, bucket_bytes=bucket_bytes),
        get_local(members[0][0]).new_empty(0, dtype=dtype),
    )


def _grid_of(p: Any, axis: Axis) -> Grid:
    mesh = _mesh_of(p)
    if mesh is None:
        return Grid((axis.count,), axis.index, (axis.group,))
    sizes, here = tuple(mesh.shape), 0
    for size, index in zip(sizes, mesh.get_coordinate(), strict=True):
        here = here * size + index
    return Grid(sizes, here, tuple(mesh.get_group(dim) for dim in range(len(sizes))))


def _matrices_of(
    p: Any, group: Mapping[str, Any], grid: Grid, dtype: torch.dtype
) -> Iterator[tuple[Matrix, _Held]]:
    """Yield each matrix of a parameter, and where this rank holds a part of it."""
    *stack, rows, columns = p.shape
    whole = (0,) * p.ndim, tuple(p.shape)
    boxes = [whole] * grid.count if _mesh_of(p) is None else list_boxes(p)
    cost = group["steps"] * _cost(rows, columns, group)
    for i in range(stack[0] if stack else 1):
        parts: dict[int, Box] = {}
        for rank, (offset, shape) in enumerate(boxes):
            is_here = not stack or offset[0] <= i < offset[0] + shape[0]
            if is_here and shape[-2] * shape[-1]:
                parts[rank] = offset[-2], shape[-2], offset[-1], shape[-1]
        begin = boxes[grid.here][0]
        at = (i - begin[0] if stack else 0) if grid.here in parts else None
        matrix = Matrix((rows, columns), parts, cost, rows * columns * dtype.itemsize)
        yield matrix, _Held(p, group, at, (begin[-2], begin[-1]))


def _cost(rows: int, columns: int, group: Mapping[str, Any]) -> int:
    """Return the multiplications of a step of the iteration, over all parts."""
    along = rows if group["parts_dim"] == -2 else columns
    sizes = [along] if group["parts"] is None else group["parts"]
    across = columns if group["parts_dim"] == -2 else rows
    total = 0
    for size in sizes:
        long = size * (along // sum(sizes))
        small, large = min(long, across), max(long, across)
        total += small**2 * (2 * large + small)
    return total


# --------------------------------------------------------------------------------- which parameters


def hidden_matrices(stages: Iterable[nn.Module]) -> dict[str, tuple[int, ...] | None]:
    """Return the names of the parameters that are Muon's, and the `parts` of each.

    Those are the trained matrices, and stacks of them, of hidden layers. Embeddings, the output
    head, routers, convolutions, norms and biases are not. In others' models the head is what
    `get_output_embeddings` returns, or is called `lm_head` or `embed_out`, or `head` or `output`
    beside the layers; a router's class or name ends with "router", or its class with "gate", or its
    name does and it gives less than 1/8 of the features that it takes. What shares its tensor with
    one of these is none either.

    Args:
        stages: This rank's stages of a model.

    Returns:
        By name in the whole model how many rows of a parameter belong to each of the matrices that
        stand in it, for `Muon(parts=)`, as trainkit's own layers say it; None for one matrix. What
        others' layers have fused is not known here.

    Examples:
        >>> model = nn.ModuleDict({"embedding": nn.Embedding(3, 2), "up": nn.Linear(2, 4)})
        >>> hidden_matrices([model])
        {'up.weight': None}
    """
    found: dict[str, tuple[int, ...] | None] = {}
    for stage in stages:
        others = {id(p) for m in _not_hidden(stage) for p in m.parameters(recurse=False)}
        for path, module in stage.named_modules():
            for name, p in module.named_parameters(path, recurse=False):
                if p.requires_grad and p.ndim in (2, 3) and id(p) not in others:
                    parts: Any = getattr(module, "parts", None)
                    parts = parts if isinstance(parts, tuple) else None
                    found[canonical_name(name)] = parts
    return found


def _not_hidden(stage: Any) -> Iterator[nn.Module]:
    head = getattr(stage, "get_output_embeddings", lambda: None)()
    if head is not None:
        yield head
    for path, module in stage.named_modules():
        if isinstance(module, _NO_HIDDEN) or _is_head(path) or _is_router(path, module):
            yield module


def _is_head(path: str) -> bool:
    whole = canonical_name(path)
    return whole in ("head", "output") or whole.rpartition(".")[2] in ("lm_head", "embed_out")


def _is_router(path: str, module: nn.Module) -> bool:
    kind, name = type(module).__name__.lower(), path.lower()
    if kind.endswith(("router", "gate")) or name.endswith("router"):
        return True
    is_linear = isinstance(module, nn.Linear) and name.endswith("gate")
    return is_linear and 8 * module.out_features < module.in_features
