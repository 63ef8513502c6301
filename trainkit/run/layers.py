"""Statistics of each parameter: its values, its gradient, and how much a step changes it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import attrs
import torch
from torch import Tensor, nn

from trainkit.collectives import all_gather, all_gather_objects, get_comm_device
from trainkit.parallel.parameters import COPY_SUFFIX, get_local_box, get_named_parameters
from trainkit.types import SOLO, Axis

_SQUARES, _LARGEST, _ZEROS, _NONFINITE, _COUNT = range(5)  # the columns of a table


@attrs.frozen
class LayerStatistics:
    """Statistics of named tensors, a value for each name; equal on all ranks.

    Attributes:
        names: Names in the whole model.
        rms: The root of the mean square of the finite values.
        largest: The largest finite absolute value.
        zeros: The share of zeros.
        nonfinite: The share of NaN and infinities.
    """

    names: list[str]
    rms: list[float]
    largest: list[float]
    zeros: list[float]
    nonfinite: list[float]


WriteLayers = Callable[[str, LayerStatistics], None]
"""`write(kind, statistics)`, of "weight", "gradient" or "update"."""


def measure_tensors(
    tensors: Mapping[str, Tensor],
    *,
    axis: Axis = SOLO,
    names: Sequence[str] | None = None,
) -> LayerStatistics:
    """Return statistics of tensors that are sharded in any layout, with one collective.

    The elements of a tensor count equally often, however many ranks hold copies, and in fp64, so
    that every layout gives the numbers of one process except for the rounding of their sum.

    Args:
        tensors: This rank's tensors by their names in the whole model, plain or DTensors.
        axis: All ranks, `ps.world`.
        names: All names, equal on all ranks; by default they are gathered, with two collectives
            more. See `gather_names`.

    Effects:
        Communicates on `axis`, and waits for the device.

    Examples:
        >>> x = torch.tensor([3.0, 0.0, -4.0, 0.0])
        >>> measure_tensors({"head": x})
        LayerStatistics(names=['head'], rms=[2.5], largest=[4.0], zeros=[0.5], nonfinite=[0.0])
    """
    names = gather_names(tensors, axis) if names is None else [*names]
    table = _merge_tables(_tabulate(tensors, names), axis)
    return _finish(names, table)


def gather_names(names: Iterable[str], axis: Axis) -> list[str]:
    """Return the names of all ranks, each once, in the order of the ranks.

    Effects:
        Communicates: `all_gather_objects` on `axis`.

    Examples:
        >>> gather_names(["head", "head (copy)"], SOLO)
        ['head']
    """
    by_rank = all_gather_objects([name for name in names if COPY_SUFFIX not in name], axis)
    return list(dict.fromkeys(name for names in by_rank for name in names))


@contextmanager
def watch_layers(
    stages: Iterable[nn.Module] | nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    is_due: Callable[[], bool],
    write: WriteLayers,
    axis: Axis = SOLO,
) -> Iterator[None]:
    """Measure parameters, gradients and updates at the optimizer steps of a block that are due.

    Gradients are those that the optimizer gets, after clipping. The rms of an update is its ratio
    to the rms of the parameter before the step, the update-to-weight ratio; its largest value is
    absolute. A step that is due takes a copy of the parameters meanwhile.

    Args:
        stages: This rank's stages, or any module.
        optimizer: The optimizer of their parameters.
        is_due: Called before each optimizer step; equal on all ranks.
        write: Called on every rank with the statistics of each kind.
        axis: All ranks, `ps.world`.

    Effects:
        Registers two hooks of the optimizer; a step that is due communicates on `axis` once,
        and waits for the device.

    Examples:
        >>> model = nn.Linear(1, 1, bias=False)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        >>> _ = model.weight.data.fill_(2.0)
        >>> def write(kind, found):
        ...     print(kind, found.rms)
        >>> with watch_layers(model, optimizer, is_due=lambda: True, write=write):
        ...     model.weight.grad = torch.ones(1, 1)
        ...     optimizer.step()
        weight [2.0]
        gradient [1.0]
        update [0.25]
    """
    params = {
        name: p
        for name, p in get_named_parameters(stages).items()
        if p.requires_grad and COPY_SUFFIX not in name
    }
    names = gather_names(params, axis)
    before: dict[str, Tensor] = {}
    tables: list[Tensor] = []

    def start(*_: object) -> None:
        tables.clear()
        before.clear()
        if not is_due():
            return
        with torch.no_grad():
            gradients = {name: p.grad for name, p in params.items() if p.grad is not None}
            tables.append(_tabulate(params, names))
            tables.append(_tabulate(gradients, names, device=tables[0].device))
            before.update({name: p.detach().clone() for name, p in params.items()})

    def finish(*_: object) -> None:
        if not tables:
            return
        with torch.no_grad():
            updates = {name: p.detach() - before[name] for name, p in params.items()}
            tables.append(_tabulate(updates, names))
        weight, gradient, update = (
            _finish(names, table) for table in _merge_tables(torch.cat(tables), axis).chunk(3)
        )
        ratios = [x / y if y else 0.0 for x, y in zip(update.rms, weight.rms, strict=True)]
        write("weight", weight)
        write("gradient", gradient)
        write("update", attrs.evolve(update, rms=ratios))
        tables.clear()
        before.clear()

    hooks = [
        optimizer.register_step_pre_hook(start),
        optimizer.register_step_post_hook(finish),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _tabulate(
    tensors: Mapping[str, Tensor],
    names: Sequence[str],
    *,
    device: torch.device | None = None,
) -> Tensor:
    """Return the sums of this rank's elements, fp64 `[N, 5]`; zeros for what it does not hold."""
    # Where no parameter has a gradient, the device is that of the parameters.
    device = next((x.device for x in tensors.values()), device)
    table = torch.zeros(len(names), 5, dtype=torch.float64, device=device)
    for row, name in enumerate(names):
        if name not in tensors:
            continue
        local = get_local_box(tensors[name]).local
        if not local.numel():
            continue
        is_finite = local.isfinite()
        values = torch.where(is_finite, local, 0).double()
        table[row, _SQUARES] = values.square().sum()
        table[row, _LARGEST] = values.abs().max()
        table[row, _ZEROS] = (local == 0).sum()
        table[row, _NONFINITE] = is_finite.logical_not().sum()
        table[row, _COUNT] = local.numel()
    return table


def _merge_tables(table: Tensor, axis: Axis) -> Tensor:
    """Return the table of all ranks: sums, and in one column the largest."""
    # Gathered and not reduced, as one all-reduce cannot take sums and maxima.
    device = get_comm_device(axis)
    by_rank = all_gather(table.to(device).unsqueeze(0), axis, dim=0)
    merged = by_rank.sum(0)
    merged[:, _LARGEST] = by_rank[:, :, _LARGEST].amax(0)
    return merged


def _finish(names: Sequence[str], table: Tensor) -> LayerStatistics:
    counts = table[:, _COUNT].clamp(min=1)
    finite = (counts - table[:, _NONFINITE]).clamp(min=1)
    return LayerStatistics(
        names=[*names],
        rms=(table[:, _SQUARES] / finite).sqrt().tolist(),
        largest=table[:, _LARGEST].tolist(),
        zeros=(table[:, _ZEROS] / counts).tolist(),
        nonfinite=(table[:, _NONFINITE] / counts).tolist(),
    )
