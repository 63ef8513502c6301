"""Collectives on an axis: every rank of the axis must call them, in the same order.

On an axis of size 1 each is the identity and needs no process group, so callers have no branch on
parallelism. Reductions are sums, maxima or minima, never means. Values that are not tensors are
sent as JSON, never as pickles.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import orjson
import torch
import torch.distributed as dist
from torch import Tensor

from trainkit.noise import make_key, mix_bits_tensor, round_bf16_stochastic, to_int64
from trainkit.phases import measure_wait
from trainkit.types import Axis, PeerError, TrainkitError, format_error


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
    return _all_reduce(x, axis, dist.ReduceOp.SUM)


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
    return _all_reduce(x, axis, dist.ReduceOp.MAX)


def all_min(x: Tensor, axis: Axis) -> Tensor:
    """Return the elementwise minimum of `x` over the ranks of an axis, as `all_max` the maximum.

    Effects:
        Communicates: one all-reduce on `axis`.

    Examples:
        >>> from trainkit.mesh import solo_parallel
        >>> all_min(torch.tensor(3), solo_parallel().dp)
        tensor(3)
    """
    return _all_reduce(x, axis, dist.ReduceOp.MIN)


def _all_reduce(x: Tensor, axis: Axis, op: Any) -> Tensor:
    if axis.count == 1:
        return x
    out = x.detach().clone(memory_format=torch.contiguous_format)
    with _measure_wait():
        dist.all_reduce(out, op=op, group=axis.group)
    return out


def _measure_wait() -> AbstractContextManager[None]:
    # Compiled code cannot read a clock.
    return nullcontext() if torch.compiler.is_compiling() else measure_wait()


def start_all_sum(x: Tensor, axis: Axis) -> Callable[[], Tensor]:
    """Start an `all_sum`, and return a function that waits for it and returns the sum.

    Meanwhile the device may compute something else, and the host may prepare it. With NCCL the wait
    is one of the device: later kernels wait, and the host does not.

    Args:
        x: Any tensor, of the same shape and dtype on every rank. It may be changed afterwards.
        axis: The axis to sum over.

    Returns:
        A function that returns a new tensor, equal on all ranks, each time the same one; `x` itself
        when the axis has size 1.

    Effects:
        Communicates: one all-reduce on `axis`.

    Examples:
        >>> from trainkit.mesh import solo_parallel
        >>> wait = start_all_sum(torch.tensor(3), solo_parallel().loss)
        >>> wait()
        tensor(3)
    """
    if axis.count == 1:
        return lambda: x
    out = x.detach().clone(memory_format=torch.contiguous_format)
    work = dist.all_reduce(out, group=axis.group, async_op=True)

    def wait() -> Tensor:
        if work is not None:  # None on a rank outside the group
            with measure_wait():
                work.wait()
        return out

    return wait


def check_communication(axis: Axis, *, timeout: float = 10.0) -> float:
    """All-reduce known numbers, and return the seconds that it took; raise if it fails.

    A network that is down, a rank that does not answer and a link that changes what it carries are
    found at once, and not after the timeout of a collective of the step.

    Args:
        axis: The ranks to check.
        timeout: The seconds that it may take.

    Raises:
        PeerError: It took longer, or the sum is wrong.

    Effects:
        Communicates: one all-reduce on `axis`, and waits for it. After an error the axis is of no
        use any more.

    Examples:
        >>> from trainkit.mesh import solo_parallel
        >>> check_communication(solo_parallel().world) < 10.0
        True
    """
    begin = time.perf_counter()
    if axis.count == 1:
        return 0.0
    own = float(axis.index + 1)
    sent = torch.tensor([own, own * own], dtype=torch.float64, device=get_compute_device(axis))
    work = dist.all_reduce(sent, group=axis.group, async_op=True)
    # Polled, as `wait` with a timeout means something else for each backend.
    while work is not None and not work.is_completed():
        if time.perf_counter() - begin > timeout:
            raise PeerError(
                f"check_communication: the ranks of {axis.name!r} did not answer each other within "
                f"{timeout:g} s",
                where=axis.name,
                want=f"an all-reduce within {timeout:g} s",
                hint="look at the network and at the processes of the other ranks",
            )
        time.sleep(1e-3)
    if work is not None:
        work.wait()
    n = axis.count
    expected = [n * (n + 1) / 2, n * (n + 1) * (2 * n + 1) / 6]
    if sent.tolist() != expected:
        raise PeerError(
            f"check_communication: the sum over the ranks of {axis.name!r} is {sent.tolist()}, not "
            f"{expected}",
            where=axis.name,
            got=sent.tolist(),
            want=expected,
            hint="a link or a device changes what it carries: test the hosts one by one",
        )
    return time.perf_counter() - begin


def broadcast(x: Tensor, axis: Axis, *, source: int = 0) -> Tensor:
    """Broadcast `x` from rank `source` of the axis.

    Args:
        x: A tensor of the same shape and dtype on every rank; only the values on `source` are used.
        axis: The axis.
        source: The index of the sender on the axis.

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
    with measure_wait():
        dist.broadcast(out, group=axis.group, group_src=source)
    return out


@torch.no_grad()
def reduce_scatter_bf16(x: Tensor, axis: Axis, *, key: Tensor) -> Tensor:
    """Reduce-scatter `x`, sent in bf16 and summed in fp32.

    It sends half of the bytes of a reduce-scatter in fp32. A rank rounds what it sends
    stochastically (`noise.round_bf16_stochastic`), so that the mean of the sum over keys is the sum
    in fp32; its own addend is not rounded. An element is off by less than 2^-7 of the sum of the
    absolute values of the others. The bits depend on the number of ranks and on the rank that sums.

    Args:
        x: This rank's addend, fp32, of the same shape on every rank; the first dimension is split
            into equal shards, in rank order. It has no gradient.
        axis: The axis to sum over.
        key: int64, 0-d, on the device of `x`, different for each sum. Ranks may have the same one,
            because the index of a rank is mixed in.

    Returns:
        A shard of the sum, fp32, contiguous; `x` itself when the axis has size 1.

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
    """Return whether `flag` is True on any rank of the axis, on all ranks.

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
    """All-gather values as JSON, in rank order; for set-up and checkpoints, not for a step.

    Args:
        value: Any JSON value.
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
    with measure_wait():
        dist.all_gather(sizes, torch.tensor([len(text)], device=device), group=axis.group)
    longest = max(int(size) for size in sizes)
    padded = torch.frombuffer(bytearray(text.ljust(longest)), dtype=torch.uint8).to(device)
    texts = [torch.empty_like(padded) for _ in range(axis.count)]
    dist.all_gather(texts, padded, group=axis.group)
    return [orjson.loads(received.cpu().numpy().tobytes()) for received in texts]


def run_on_all_ranks(work: Callable[[], Any], axis: Axis) -> list[Any]:
    """Call `work()` on every rank; return the results in rank order, or raise on all ranks.

    A rank that raised alone would leave the others waiting in the next collective.

    Args:
        work: Called once on this rank; returns any JSON value. It must not communicate.
        axis: The axis.

    Raises:
        Exception: On the rank that failed, its error. On the others, the first error with its rank,
            of the same class if it is a ValueError or one of trainkit's errors.

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
    except Exception as error:  # noqa: BLE001 (sent to the others, then raised)
        failure = error
        report = {"error": _serialize_error(error)}
    reports = all_gather_objects(report, axis)
    if failure is not None:
        raise failure
    for rank, other in enumerate(reports):
        if "error" in other:
            raise _deserialize_error(other["error"], rank)
    return [other["value"] for other in reports]


def _serialize_error(error: Exception) -> dict[str, str | None]:
    fields: dict[str, str | None] = {
        "kind": type(error).__name__,
        "what": format_error(error, hint=False),
    }
    for name in ("where", "got", "want", "hint"):
        value = getattr(error, name, None)
        fields[name] = None if value is None else str(value)
    return fields


def _deserialize_error(fields: dict[str, Any], rank: int) -> Exception:
    classes = {"ValueError": TrainkitError}
    classes |= {subclass.__name__: subclass for subclass in TrainkitError.__subclasses__()}
    if fields["kind"] not in classes:
        return RuntimeError(f"rank {rank} failed: {fields['kind']}: {fields['what']}")
    return classes[fields["kind"]](
        f"rank {rank}: {fields['what']}",
        where=fields["where"],
        got=fields["got"],
        want=fields["want"],
        hint=fields["hint"],
    )


def get_comm_device(axis: Axis) -> torch.device:
    """Return a device on which the ranks of an axis can communicate: the CPU when it can be.

    Effects:
        None; it does not communicate.

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
    """Return the backends of a group by device type."""
    return dict(x.split(":", 1) for x in dist.get_backend_config(group).split(","))


def get_compute_device(axis: Axis) -> torch.device:
    """Return the device that the ranks of an axis compute on, equal on all of them.

    Use it for values that all ranks send, even ranks that have no tensor to take the device from.
    For an axis from a plain process group it is the accelerator, if the group supports one.

    Effects:
        None; it does not communicate.

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
# Each is linear, and backward is its transpose: the gradient of an input is summed over the ranks
# that received it. `sum_forward` and `sum_grad` are a pair for replicated results: all ranks
# compute the same with them, so each has the full gradient already.


def all_gather(x: Tensor, axis: Axis, *, dim: int) -> Tensor:
    """All-gather equal shards along `dim`; backward is a reduce-scatter.

    Ranks may use the result differently: the gradient of a shard is the sum over all ranks.

    Args:
        x: This rank's shard, of the same shape and dtype on every rank.
        axis: The axis, with shards in rank order.
        dim: The dimension to concatenate along.

    Returns:
        The full tensor, contiguous; `x` itself when the axis has size 1.

    Effects:
        Communicates: one all-gather on `axis`, and in backward one reduce-scatter.

    Examples:
        >>> from trainkit.mesh import solo_parallel
        >>> all_gather(torch.ones(2), solo_parallel().tp, dim=0)
        tensor([1., 1.])
    """
    return x if axis.count == 1 else _apply(_GatherDim, x, axis, dim)


def all_gather_replicated(x: Tensor, axis: Axis, *, dim: int) -> Tensor:
    """All-gather equal shards along `dim`; backward takes this rank's shard of the gradient.

    Use it where all ranks compute the same with the result; see `sum_forward`.

    Args:
        x: This rank's shard, of the same shape and dtype on every rank.
        axis: The axis, with shards in rank order.
        dim: The dimension to concatenate along.

    Returns:
        The full tensor, contiguous, equal on all ranks; `x` itself when the axis has size 1.

    Effects:
        Communicates: one all-gather on `axis`.

    Examples:
        >>> from trainkit.mesh import solo_parallel
        >>> all_gather_replicated(torch.ones(2), solo_parallel().tp, dim=0)
        tensor([1., 1.])
    """
    return x if axis.count == 1 else _apply(_GatherReplicated, x, axis, dim)


def reduce_scatter(x: Tensor, axis: Axis, *, dim: int) -> Tensor:
    """Sum over all ranks and return this rank's shard of `dim`; backward is an all-gather.

    Args:
        x: This rank's addend, of the same shape and dtype on every rank.
        axis: The axis to sum over.
        dim: The dimension to split into equal contiguous shards, in rank order.

    Returns:
        A shard of the sum, contiguous; `x` itself when the axis has size 1.

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
    return _apply(_ScatterSum, x, axis, dim)


def all_to_all(x: Tensor, axis: Axis, *, split_dim: int, gather_dim: int) -> Tensor:
    """Exchange the sharded dimension: split along `split_dim`, concatenate along `gather_dim`.

    A tensor that is sharded along `gather_dim` becomes sharded along `split_dim`; backward is the
    inverse exchange.

    Args:
        x: This rank's tensor, of the same shape and dtype on every rank.
        axis: The axis.
        split_dim: The dimension to split into equal contiguous parts, one for each rank in order.
        gather_dim: The dimension along which received parts are concatenated, in rank order.

    Returns:
        A tensor of equally many elements, contiguous; `x` itself when the axis has size 1.

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
    _check_divides("all_to_all", x, axis, split_dim)
    return _apply(_Exchange, x, axis, split_dim, gather_dim)


def all_to_all_rows(
    x: Tensor, axis: Axis, *, sent: Sequence[int], received: Sequence[int], length: int
) -> Tensor:
    """Send each rank a number of rows, and receive the rows for this one, in rank order.

    Backward is the inverse exchange: rows that were not sent get a gradient of zeros.

    Args:
        x: Rows `[N, ...]`, those for rank 0 first; N may exceed the number of rows that are sent.
        axis: The axis.
        sent: The number of rows for each rank of the axis; any may be 0.
        received: The number of rows from each rank; every rank must know what the others send.
        length: The number of rows of the result: received rows, then zeros.

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
    return _apply(_ExchangeRows, x, axis, (list(sent), list(received), length))


def sum_grad(x: Tensor, axis: Axis) -> Tensor:
    """Return `x`; backward sums its gradient over all ranks.

    Use it for a tensor that is equal on all ranks, if each computes a part of the result with it.

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
    return x if axis.count == 1 else _apply(_SumGrad, x, axis)


def sum_forward(x: Tensor, axis: Axis) -> Tensor:
    """Return the sum of `x` over all ranks; backward returns the gradient unchanged.

    Use it if all ranks compute the same with the sum: each has the full gradient, and adding these
    up would count it once per rank.

    Args:
        x: This rank's addend, of the same shape and dtype on every rank.
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
    return x if axis.count == 1 else _apply(_SumForward, x, axis)


# From 2.13 on torch warns about the names of 2.11.
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _apply(function: type[torch.autograd.Function], *args: Any) -> Tensor:
    if torch.compiler.is_compiling():  # one graph break; the collective is not traced
        return torch.compiler.disable(function.apply)(*args)
    return function.apply(*args)


def _check_divides(where: str, x: Tensor, axis: Axis, dim: int) -> None:
    if x.shape[dim] % axis.count:
        raise ValueError(
            f"{where}: dimension {dim} of a tensor of shape {tuple(x.shape)} has size "
            f"{x.shape[dim]}, which does not divide into {axis.count} equal parts, one for each "
            f"rank of {axis.name!r}; pad it to a multiple of {axis.count}"
        )


def _stack_parts(x: Tensor, count: int, dim: int) -> Tensor:
    """Concatenate the parts of `dim` along dimension 0, the layout that process groups need."""
    return x.contiguous() if dim in (0, -x.ndim) else torch.cat(x.chunk(count, dim))


def _gather(x: Tensor, axis: Axis, dim: int) -> Tensor:
    out = x.new_empty((axis.count * len(x), *x.shape[1:]))
    _ALL_GATHER(out, x.contiguous(), group=axis.group)
    return out if dim in (0, -x.ndim) else torch.cat(out.chunk(axis.count), dim)


class _GatherDim(torch.autograd.Function):
    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]
        ctx: Any, x: Tensor, axis: Axis, dim: int
    ) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return _gather(x, axis, dim)

    @staticmethod
    def backward(  # pyrefly: ignore[bad-override]
        ctx: Any, d_full: Tensor
    ) -> tuple[Tensor, None, None]:
        return reduce_scatter(d_full, ctx.axis, dim=ctx.dim), None, None


class _GatherReplicated(torch.autograd.Function):
    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]
        ctx: Any, x: Tensor, axis: Axis, dim: int
    ) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return _gather(x, axis, dim)

    @staticmethod
    def backward(  # pyrefly: ignore[bad-override]
        ctx: Any, d_full: Tensor
    ) -> tuple[Tensor, None, None]:
        part = d_full.chunk(ctx.axis.count, ctx.dim)[ctx.axis.index]
        return part.contiguous(), None, None


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]
        ctx: Any, x: Tensor, axis: Axis, dim: int
    ) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        parts = _stack_parts(x, axis.count, dim)
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
        sent = _stack_parts(x, axis.count, split_dim)
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
        ctx.inverse = axis, (received, sent, len(x))
        rows = x[: sum(sent)].contiguous()
        if axis.group is not None:
            # The functional collective, whose result selective recomputation can save.
            exchange = torch.ops._c10d_functional  # noqa: SLF001 (no public way)
            pending = exchange.all_to_all_single(rows, received, sent, axis.group.group_name)
            rows = exchange.wait_tensor(pending)
        if len(rows) == length:
            return rows
        padding = rows.new_zeros((length - len(rows), *rows.shape[1:]))
        return torch.cat([rows, padding])

    @staticmethod
    def backward(  # pyrefly: ignore[bad-override]
        ctx: Any, d_out: Tensor
    ) -> tuple[Tensor, None, None]:
        return _ExchangeRows.apply(d_out, *ctx.inverse), None, None


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
