"""Collectives on an axis: every rank of the axis must call them, in the same order.

On an axis of size 1 each is the identity and needs no process group, so callers have no branch on
parallelism. All reductions are sums or maxima, never means. Values that are not tensors travel as
JSON, never as pickles.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import orjson
import torch
import torch.distributed as dist
from torch import Tensor

from trainkit.noise import make_key, mix_bits_tensor, round_bf16_stochastic, to_int64
from trainkit.types import Axis, TrainkitError, format_error


def all_sum(x: Tensor, axis: Axis) -> Tensor:
    """Return the sum of `x` over the ranks of an axis.

    Args:
        x: Any tensor, of the same shape and dtype on every rank.
        axis: The axis to sum over.

    Returns:
        A new tensor, equal on all ranks; `x` itself when the axis has size 1.

    Effects:
        Communicates: one all-reduce on `axis`.

    Examples:
        >>> from trainkit.mesh import solo_parallel
        >>> all_sum(torch.tensor(3), solo_parallel().loss)
        tensor(3)
    """
    return _reduced(x, axis, dist.ReduceOp.SUM)


def all_max(x: Tensor, axis: Axis) -> Tensor:
    """Return the elementwise maximum of `x` over the ranks of an axis.

    Returns:
        A new tensor, equal on all ranks; `x` itself when the axis has size 1.

    Effects:
        Communicates: one all-reduce on `axis`.

    Examples:
        >>> from trainkit.mesh import solo_parallel
        >>> all_max(torch.tensor(3), solo_parallel().dp)
        tensor(3)
    """
    return _reduced(x, axis, dist.ReduceOp.MAX)


def all_min(x: Tensor, axis: Axis) -> Tensor:
    """Return the elementwise minimum of `x` over the ranks of an axis.

    Returns:
        A new tensor, equal on all ranks; `x` itself when the axis has size 1.

    Effects:
        Communicates: one all-reduce on `axis`.

    Examples:
        >>> from trainkit.mesh import solo_parallel
        >>> all_min(torch.tensor(3), solo_parallel().dp)
        tensor(3)
    """
    return _reduced(x, axis, dist.ReduceOp.MIN)


def _reduced(x: Tensor, axis: Axis, op: Any) -> Tensor:
    if axis.count == 1:
        return x
    out = x.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out, op=op, group=axis.group)
    return out


def broadcast(x: Tensor, axis: Axis, *, source: int = 0) -> Tensor:
    """Return what rank `source` of the axis holds in `x`.

    Args:
        x: A tensor of the same shape and dtype on every rank; its values matter on `source` alone.
        axis: The axis.
        source: The index on the axis of the rank whose values all get.

    Effects:
        Communicates: one broadcast on `axis`.

    Examples:
        >>> from trainkit.mesh import solo_parallel
        >>> broadcast(torch.tensor(3), solo_parallel().world)
        tensor(3)
    """
    if axis.count == 1:
        return x
    out = x.detach().clone(memory_format=torch.contiguous_format)
    dist.broadcast(out, group=axis.group, group_src=source)
    return out


@torch.no_grad()
def reduce_scatter_bf16(x: Tensor, axis: Axis, *, key: Tensor) -> Tensor:
    """Return this rank's part of the sum of `x` over the ranks, sent in bf16 and summed in fp32.

    Half of the bytes of a reduce-scatter in fp32. What a rank sends is rounded at random
    (`noise.round_bf16_stochastic`), so that the mean of the sum over keys is the sum in fp32; what
    a rank has of its own part stays as it is. An element is off by less than 2^-7 of the sum of the
    others' absolute values. The bits depend on how many ranks there are and on which of them sums.

    Args:
        x: This rank's summand, fp32, of the same shape on every rank; the first dimension is cut
            into equal parts, in rank order. It has no gradient.
        axis: The axis to sum over.
        key: int64, 0-d, on the device of `x`; another one for each sum. Ranks may have the same
            one: each rounds by its index too.

    Returns:
        A part of the sum, fp32, contiguous; `x` itself when the axis has size 1.

    Raises:
        ValueError: The first dimension does not divide by the number of ranks, or `x` is not fp32.

    Effects:
        Communicates: one all-to-all on `axis`.

    References:
        Gupta et al., "Deep learning with limited numerical precision" (2015), for the rounding.

    Examples:
        >>> from trainkit.mesh import solo_parallel
        >>> reduce_scatter_bf16(torch.ones(2), solo_parallel().fsdp, key=torch.tensor(0))
        tensor([1., 1.])
    """
    if axis.count == 1:
        return x
    _check_divides("reduce_scatter_bf16", x, axis, 0)
    sent = round_bf16_stochastic(x, mix_bits_tensor(key ^ to_int64(make_key("rank", axis.index))))
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=axis.group)
    received.chunk(axis.count)[axis.index].zero_()
    others = received.unflatten(0, (axis.count, -1)).sum(0, dtype=torch.float32)
    return others.add_(x.chunk(axis.count)[axis.index])


def any_rank(flag: bool, axis: Axis) -> bool:
    """Return whether any rank of the axis says yes: the same answer on all of them.

    Effects:
        Communicates: one all-reduce of one byte on `axis`, and waits for it.

    Examples:
        >>> from trainkit.mesh import solo_parallel
        >>> any_rank(True, solo_parallel().world)
        True
    """
    if axis.count == 1:
        return flag
    return bool(
        all_max(torch.tensor([flag], dtype=torch.uint8, device=get_comm_device(axis)), axis)
    )


def all_gather_objects(value: Any, axis: Axis) -> list[Any]:
    """Return the values of all ranks, in rank order; for set-up and checkpoints, not for a step.

    Args:
        value: Anything that JSON holds.
        axis: The axis.

    Effects:
        Communicates: two all-gathers on `axis`, and waits for them.

    Examples:
        >>> from trainkit.mesh import solo_parallel
        >>> all_gather_objects({"rank": 0}, solo_parallel().world)
        [{'rank': 0}]
    """
    text = orjson.dumps(value)
    if axis.count == 1:
        return [orjson.loads(text)]
    device = get_comm_device(axis)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(axis.count)]
    dist.all_gather(sizes, torch.tensor([len(text)], device=device), group=axis.group)
    longest = max(int(size) for size in sizes)
    padded = torch.frombuffer(bytearray(text.ljust(longest)), dtype=torch.uint8).to(device)
    texts = [torch.empty_like(padded) for _ in range(axis.count)]
    dist.all_gather(texts, padded, group=axis.group)
    return [orjson.loads(received.cpu().numpy().tobytes()) for received in texts]


def run_on_all_ranks(work: Callable[[], Any], axis: Axis) -> list[Any]:
    """Return what `work()` gives on every rank, in rank order; if it raises on one, raise on all.

    A rank that raised alone would leave the others waiting in the next collective.

    Args:
        work: Done once on this rank; gives anything that JSON holds. It must not communicate.
        axis: The axis.

    Raises:
        Exception: On the rank that failed, what it raised; on the others the first failure, told
            with its rank, of the same kind where it is a bad argument or one of trainkit's errors.

    Effects:
        Those of `work`; communicates as `all_gather_objects`.

    Examples:
        >>> from trainkit.mesh import solo_parallel
        >>> run_on_all_ranks(lambda: 3, solo_parallel().world)
        [3]
    """
    failure: Exception | None = None
    report: dict[str, Any] = {}
    try:
        report["value"] = orjson.loads(orjson.dumps(work()))
    except Exception as error:  # noqa: BLE001 (told to the others, then raised)
        failure, report = error, {"error": _told(error)}
    reports = all_gather_objects(report, axis)
    if failure is not None:
        raise failure
    for rank, other in enumerate(reports):
        if "error" in other:
            raise _as_raised(other["error"], rank)
    return [other["value"] for other in reports]


def _told(error: Exception) -> dict[str, str | None]:
    names = ("where", "got", "want", "hint")
    facts = {name: getattr(error, name, None) for name in names}
    plain = {name: None if value is None else str(value) for name, value in facts.items()}
    return plain | {"kind": type(error).__name__, "what": format_error(error, hint=False)}


def _as_raised(told: dict[str, Any], rank: int) -> Exception:
    kinds = {kind.__name__: kind for kind in TrainkitError.__subclasses__()}
    kind, what = told.pop("kind"), told.pop("what")
    if kind == "ValueError":
        return TrainkitError(f"rank {rank}: {what}", **told)
    if kind not in kinds:
        return RuntimeError(f"rank {rank} failed: {kind}: {what}")
    return kinds[kind](f"rank {rank}: {what}", **told)


def get_comm_device(axis: Axis) -> torch.device:
    """Return a device on which the ranks of an axis can communicate: the CPU when it can be.

    Effects:
        None; the group is only asked.

    Examples:
        >>> from trainkit.mesh import solo_parallel
        >>> get_comm_device(solo_parallel().world)
        device(type='cpu')
    """
    if axis.group is None:
        return torch.device("cpu")
    kinds = get_backends(axis.group)
    return torch.device("cpu" if "cpu" in kinds else next(iter(kinds)))


def get_backends(group: dist.ProcessGroup) -> dict[str, str]:
    """Return what a group communicates through, by the type of device that the tensors are on."""
    kinds = dist.get_backend_config(group).split(",")
    return dict(kind.split(":", 1) for kind in kinds)


def get_compute_device(axis: Axis) -> torch.device:
    """Return the device that the ranks of an axis compute on: the same on all of them.

    What every rank shall send, though some have no value that would say where, goes there. An axis
    of one's own group says nothing else: it means the accelerator where the group reaches one.

    Effects:
        None; the axis is only asked.

    Examples:
        >>> from trainkit.mesh import solo_parallel
        >>> get_compute_device(solo_parallel().world)
        device(type='cpu')
    """
    if axis.mesh is not None:
        return torch.device(axis.mesh.device_type)
    backends = "" if axis.group is None else dist.get_backend_config(axis.group)
    reaches = "cuda:" in backends and torch.cuda.is_available()  # such as "cpu:gloo,cuda:nccl"
    return torch.device("cuda" if reaches else "cpu")


# -------------------------------------------------------------------------------- differentiable
#
# Each is linear, and its gradient is its transpose: for the others, what one rank's output costs
# is summed over the ranks that the input went to. `sum_forward` and `sum_grad` are the pair for a
# result that all ranks hold and go on with alike, whose gradient is whole on each of them already.


def all_gather(x: Tensor, axis: Axis, *, dim: int) -> Tensor:
    """Concatenate the equal parts of all ranks along `dim`; backward sums and scatters.

    Every rank may do something different with the whole: the gradient of a part is the sum of what
    all ranks have for it.

    Args:
        x: This rank's part, of the same shape and dtype on every rank.
        axis: The axis whose ranks hold the parts, in rank order.
        dim: The dimension to concatenate along.

    Returns:
        The whole, contiguous; `x` itself when the axis has size 1.

    Effects:
        Communicates: one all-gather on `axis`, and in backward one reduce-scatter.

    Examples:
        >>> from trainkit.mesh import solo_parallel
        >>> all_gather(torch.ones(2), solo_parallel().tp, dim=0)
        tensor([1., 1.])
    """
    return x if axis.count == 1 else _applied(_GatherDim, x, axis, dim)


def all_gather_replicated(x: Tensor, axis: Axis, *, dim: int) -> Tensor:
    """Concatenate the equal parts of all ranks along `dim`; backward takes this rank's part.

    For a whole that all ranks hold and go on with alike; see `sum_forward`.

    Args:
        x: This rank's part, of the same shape and dtype on every rank.
        axis: The axis whose ranks hold the parts, in rank order.
        dim: The dimension to concatenate along.

    Returns:
        The whole, contiguous, equal on all ranks; `x` itself when the axis has size 1.

    Effects:
        Communicates: one all-gather on `axis`.

    Examples:
        >>> from trainkit.mesh import solo_parallel
        >>> all_gather_replicated(torch.ones(2), solo_parallel().tp, dim=0)
        tensor([1., 1.])
    """
    return x if axis.count == 1 else _applied(_GatherReplicated, x, axis, dim)


def reduce_scatter(x: Tensor, axis: Axis, *, dim: int) -> Tensor:
    """Sum over all ranks and return this rank's part of `dim`; backward gathers.

    Args:
        x: This rank's summand, of the same shape and dtype on every rank.
        axis: The axis to sum over.
        dim: The dimension to cut into equal contiguous parts, in rank order.

    Returns:
        A part of the sum, contiguous; `x` itself when the axis has size 1.

    Raises:
        ValueError: The size of `dim` does not divide by the number of ranks.

    Effects:
        Communicates: one reduce-scatter on `axis`, and in backward one all-gather.

    Examples:
        >>> from trainkit.mesh import solo_parallel
        >>> reduce_scatter(torch.ones(2), solo_parallel().tp, dim=0)
        tensor([1., 1.])
    """
    if axis.count == 1:
        return x
    _check_divides("reduce_scatter", x, axis, dim)
    return _applied(_ScatterSum, x, axis, dim)


def all_to_all(x: Tensor, axis: Axis, *, split_dim: int, gather_dim: int) -> Tensor:
    """Give each rank its part of `split_dim`, and get that part of all, put along `gather_dim`.

    What was whole along `split_dim` and in parts along `gather_dim` becomes whole along
    `gather_dim` and in parts along `split_dim`; backward is the inverse exchange.

    Args:
        x: This rank's tensor, of the same shape and dtype on every rank.
        axis: The axis.
        split_dim: The dimension to cut into equal contiguous parts, one for each rank in order.
        gather_dim: The dimension along which the parts received are concatenated, in rank order.

    Returns:
        A tensor of as many elements, contiguous; `x` itself when the axis has size 1.

    Raises:
        ValueError: The size of `split_dim` does not divide by the number of ranks.

    Effects:
        Communicates: one all-to-all on `axis`, and in backward another.

    Examples:
        >>> from trainkit.mesh import solo_parallel
        >>> all_to_all(torch.ones(2, 3), solo_parallel().ulysses, split_dim=0, gather_dim=1).shape
        torch.Size([2, 3])
    """
    if axis.count == 1:
        return x
    _check_divides("exchange", x, axis, split_dim)
    return _applied(_Exchange, x, axis, split_dim, gather_dim)


def all_to_all_rows(
    x: Tensor, axis: Axis, *, sent: Sequence[int], received: Sequence[int], length: int
) -> Tensor:
    """Give each rank its own number of rows, and get what each has for this one, in rank order.

    Backward is the inverse exchange: rows that were not sent get a gradient of zeros.

    Args:
        x: Rows `[N, ...]`, those for rank 0 first; N may exceed what is sent.
        axis: The axis.
        sent: How many rows go to each rank of the axis; any may be 0.
        received: How many come from each; every rank must know what the others send.
        length: The rows of the result: those received, and zeros.

    Returns:
        A tensor `[length, ...]`.

    Effects:
        Communicates: one all-to-all on `axis`, and in backward another.

    Examples:
        >>> from trainkit.mesh import solo_parallel
        >>> ep = solo_parallel().ep
        >>> all_to_all_rows(torch.ones(2), ep, sent=[2], received=[2], length=3)
        tensor([1., 1., 0.])
    """
    return _applied(_ExchangeRows, x, axis, (list(sent), list(received), length))


def sum_grad(x: Tensor, axis: Axis) -> Tensor:
    """Return `x`; backward sums its gradient over all ranks.

    For a tensor that is equal on all ranks, and that each uses for a part of the result.

    Args:
        x: Any tensor, equal on every rank.
        axis: The axis to sum over.

    Returns:
        A view of `x`; `x` itself when the axis has size 1.

    Effects:
        Communicates: in backward one all-reduce on `axis`.

    Examples:
        >>> from trainkit.mesh import solo_parallel
        >>> sum_grad(torch.ones(2), solo_parallel().tp)
        tensor([1., 1.])
    """
    return x if axis.count == 1 else _applied(_SumGrad, x, axis)


def sum_forward(x: Tensor, axis: Axis) -> Tensor:
    """Return the sum of `x` over all ranks; backward passes the gradient on as it is.

    For a sum that all ranks hold and go on with alike: its gradient is whole on each of them, and
    adding these up would count it once per rank.

    Args:
        x: This rank's summand, of the same shape and dtype on every rank.
        axis: The axis to sum over.

    Returns:
        A new tensor, equal on all ranks; `x` itself when the axis has size 1.

    Effects:
        Communicates: one all-reduce on `axis`.

    Examples:
        >>> from trainkit.mesh import solo_parallel
        >>> sum_forward(torch.ones(2), solo_parallel().tp)
        tensor([1., 1.])
    """
    return x if axis.count == 1 else _applied(_SumForward, x, axis)


# From 2.13 on torch warns of the names that 2.11 has.
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _applied(function: type[torch.autograd.Function], *args: Any) -> Tensor:
    if torch.compiler.is_compiling():  # one graph break: the collective runs as it is
        return torch.compiler.disable(function.apply)(*args)
    return function.apply(*args)


def _check_divides(where: str, x: Tensor, axis: Axis, dim: int) -> None:
    if x.shape[dim] % axis.count:
        raise ValueError(
            f"{where}: dimension {dim} of a tensor of shape {tuple(x.shape)} has size "
            f"{x.shape[dim]}, which does not divide into {axis.count} equal parts, one for each "
            f"rank of {axis.name!r}; pad it to a multiple of {axis.count}"
        )


def _parts_first(x: Tensor, count: int, dim: int) -> Tensor:
    """Put the parts of `dim` one after another along dimension 0, as process groups take them."""
    return x.contiguous() if dim in (0, -x.ndim) else torch.cat(x.chunk(count, dim))


def _gathered(x: Tensor, axis: Axis, dim: int) -> Tensor:
    whole = x.new_empty((axis.count * len(x), *x.shape[1:]))
    _ALL_GATHER(whole, x.contiguous(), group=axis.group)
    return whole if dim in (0, -x.ndim) else torch.cat(whole.chunk(axis.count), dim)


class _GatherDim(torch.autograd.Function):
    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]
        ctx: Any, x: Tensor, axis: Axis, dim: int
    ) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return _gathered(x, axis, dim)

    @staticmethod
    def backward(  # pyrefly: ignore[bad-override]
        ctx: Any, d_whole: Tensor
    ) -> tuple[Tensor, None, None]:
        return reduce_scatter(d_whole, ctx.axis, dim=ctx.dim), None, None


class _GatherReplicated(torch.autograd.Function):
    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]
        ctx: Any, x: Tensor, axis: Axis, dim: int
    ) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return _gathered(x, axis, dim)

    @staticmethod
    def backward(  # pyrefly: ignore[bad-override]
        ctx: Any, d_whole: Tensor
    ) -> tuple[Tensor, None, None]:
        part = d_whole.chunk(ctx.axis.count, ctx.dim)[ctx.axis.index]
        return part.contiguous(), None, None


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]
        ctx: Any, x: Tensor, axis: Axis, dim: int
    ) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        parts = _parts_first(x, axis.count, dim)
        part = parts.new_empty((len(parts) // axis.count, *parts.shape[1:]))
        _REDUCE_SCATTER(part, parts, group=axis.group)
        return part

    @staticmethod
    def backward(  # pyrefly: ignore[bad-override]
        ctx: Any, d_part: Tensor
    ) -> tuple[Tensor, None, None]:
        return all_gather(d_part, ctx.axis, dim=ctx.dim), None, None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]
        ctx: Any, x: Tensor, axis: Axis, split_dim: int, gather_dim: int
    ) -> Tensor:
        ctx.axis, ctx.dims = axis, (split_dim, gather_dim)
        sent = _parts_first(x, axis.count, split_dim)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=axis.group)
        return torch.cat(received.chunk(axis.count), gather_dim)

    @staticmethod
    def backward(  # pyrefly: ignore[bad-override]
        ctx: Any, d_out: Tensor
    ) -> tuple[Tensor, None, None, None]:
        split, gather = ctx.dims
        d_x = all_to_all(d_out, ctx.axis, split_dim=gather, gather_dim=split)
        return d_x, None, None, None


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]
        ctx: Any, x: Tensor, axis: Axis, sizes: tuple[list[int], list[int], int]
    ) -> Tensor:
        sent, received, length = sizes
        ctx.given = axis, (received, sent, len(x))
        own = x[: sum(sent)].contiguous()
        if axis.group is not None:
            # The functional one, whose result selective recomputation can keep.
            exchange = torch.ops._c10d_functional  # noqa: SLF001 (no public way)
            pending = exchange.all_to_all_single(own, received, sent, axis.group.group_name)
            own = exchange.wait_tensor(pending)
        rest = length - len(own)
        return torch.cat([own, own.new_zeros((rest, *own.shape[1:]))]) if rest else own

    @staticmethod
    def backward(  # pyrefly: ignore[bad-override]
        ctx: Any, d_out: Tensor
    ) -> tuple[Tensor, None, None]:
        return _ExchangeRows.apply(d_out, *ctx.given), None, None


class _SumGrad(torch.autograd.Function):
    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]
        ctx: Any, x: Tensor, axis: Axis
    ) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(  # pyrefly: ignore[bad-override]
        ctx: Any, d_x: Tensor
    ) -> tuple[Tensor, None]:
        return sum_forward(d_x, ctx.axis), None


class _SumForward(torch.autograd.Function):
    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]
        ctx: Any, x: Tensor, axis: Axis
    ) -> Tensor:
        ctx.axis = axis
        return all_sum(x, axis)

    @staticmethod
    def backward(  # pyrefly: ignore[bad-override]
        ctx: Any, d_sum: Tensor
    ) -> tuple[Tensor, None]:
        return sum_grad(d_sum, ctx.axis), None
