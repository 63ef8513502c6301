"""Statistics by layer: parameters, their gradients and updates, and what blocks return."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from trainkit.collectives import all_gather, all_gather_objects, get_comm_device
from trainkit.parallel.parameters import COPY_SUFFIX, get_local_box, get_named_parameters
from trainkit.parallel.stage_ranks import as_stages
from trainkit.run.activations import watch_activations
from trainkit.run.element_sums import (
    COUNT,
    LARGEST,
    NONFINITE,
    SQUARES,
    ZEROS,
    merge_sums,
    sum_elements,
)
from trainkit.types import SOLO, Axis, Stages


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
"""`write(kind, statistics)`, of "weight", "gradient", "update" or "activation"."""

FinishStep = Callable[[Sequence[Mapping[str, Any]]], None]
"""`finish(microbatches)`, called after each step with this rank's microbatches."""


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
    device = next((x.device for x in tensors.values()), get_comm_device(axis))
    table = _merge_tables(_tabulate(tensors, names, device), axis)
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
    stages_or_model: Stages | nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    is_due: Callable[[], bool],
    write: WriteLayers,
    blocks: str = "layers.*",
    axis: Axis = SOLO,
) -> Iterator[FinishStep]:
    """Measure parameters, gradients, updates and activations in the steps of a block that are due.

    Gradients are those that the optimizer gets, after clipping. The rms of an update is its ratio
    to the rms of the parameter before the step, the update-to-weight ratio; its largest value is
    absolute. A step that is due takes a copy of the parameters meanwhile.

    Activations are what blocks return in training passes, over the tokens of all ranks and
    microbatches; padding is left out, and evaluation and recomputation too. Only a step without an
    optimizer step, such as one that is skipped for its NaN, has activations alone.

    Args:
        stages_or_model: This rank's stages, or any module.
        optimizer: The optimizer of their parameters.
        is_due: Called before each pass, before each optimizer step and after each step; equal on
            all ranks.
        write: Called on every rank with the statistics of each kind.
        blocks: The name pattern of the blocks, as that of `fsdp`. If no name matches on any rank,
            there are no activations.
        axis: All ranks, `ps.world`.

    Yields:
        A function to call after each step, on every rank, with this rank's microbatches, which
        say what is padding (`Activations.tabulate`). A block without any token counted has zeros.

    Effects:
        Hooks the optimizer, the stages and the blocks; a step that is due communicates on `axis`
        once, and waits for the device.

    Examples:
        >>> model = nn.Linear(1, 1, bias=False)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        >>> _ = model.weight.data.fill_(2.0)
        >>> def write(kind, found):
        ...     print(kind, found.rms)
        >>> with watch_layers(model, optimizer, is_due=lambda: True, write=write) as finish:
        ...     model.weight.grad = torch.ones(1, 1)
        ...     optimizer.step()
        ...     finish([])
        weight [2.0]
        gradient [1.0]
        update [0.25]
    """
    stages = as_stages(stages_or_model, "watch_layers")
    params = {
        name: p
        for name, p in get_named_parameters(stages).items()
        if p.requires_grad and COPY_SUFFIX not in name
    }
    names = gather_names(params, axis)
    device = next((p.device for p in params.values()), get_comm_device(axis))
    before: dict[str, Tensor] = {}
    tables: dict[str, Tensor] = {}

    def start(*_: object) -> None:
        tables.clear()
        before.clear()
        if not is_due():
            return
        with torch.no_grad():
            gradients = {name: p.grad for name, p in params.items() if p.grad is not None}
            tables["weight"] = _tabulate(params, names, device)
            tables["gradient"] = _tabulate(gradients, names, device)
            before.update({name: p.detach().clone() for name, p in params.items()})

    def end(*_: object) -> None:
        if not tables:
            return
        with torch.no_grad():
            updates = {name: p.detach() - before[name] for name, p in params.items()}
            tables["update"] = _tabulate(updates, names, device)
        before.clear()

    with watch_activations(stages, blocks, is_due=is_due) as activations, ExitStack() as stack:
        block_names = gather_names(activations.names, axis)

        def finish(microbatches: Sequence[Mapping[str, Any]]) -> None:
            if block_names and is_due():
                sums = activations.tabulate(microbatches)
                zeros = torch.zeros(5, dtype=torch.float64, device=device)
                rows = [sums.get(name, zeros).to(device) for name in block_names]
                tables["activation"] = torch.stack(rows)
            if tables:
                _write_tables(tables, names, block_names, write, axis)
            tables.clear()
            activations.clear()

        stack.callback(optimizer.register_step_pre_hook(start).remove)
        stack.callback(optimizer.register_step_post_hook(end).remove)
        yield finish


def _write_tables(
    tables: Mapping[str, Tensor],
    names: Sequence[str],
    block_names: Sequence[str],
    write: WriteLayers,
    axis: Axis,
) -> None:
    """Merge the tables of all ranks in one collective, and write the statistics of each."""
    merged = _merge_tables(torch.cat([*tables.values()]), axis)
    parts = merged.split([len(table) for table in tables.values()])
    found = {
        kind: _finish(block_names if kind == "activation" else names, part)
        for kind, part in zip(tables, parts, strict=True)
    }
    if "update" in found:
        pairs = zip(found["update"].rms, found["weight"].rms, strict=True)
        found["update"] = attrs.evolve(found["update"], rms=[x / y if y else 0.0 for x, y in pairs])
    for kind, statistics in found.items():
        write(kind, statistics)


def _tabulate(tensors: Mapping[str, Tensor], names: Sequence[str], device: torch.device) -> Tensor:
    """Return the sums of this rank's elements, fp64 `[N, 5]`; zeros for what it does not hold."""
    table = torch.zeros(len(names), 5, dtype=torch.float64, device=device)
    for row, name in enumerate(names):
        local = get_local_box(tensors[name]).local if name in tensors else None
        if local is not None and local.numel():
            table[row] = sum_elements(local.reshape(-1))
    return table


def _merge_tables(table: Tensor, axis: Axis) -> Tensor:
    """Return the table of all ranks: sums, and in one column the largest."""
    # Gathered and not reduced, as one all-reduce cannot take sums and maxima.
    device = get_comm_device(axis)
    return merge_sums(all_gather(table.to(device).unsqueeze(0), axis, dim=0))


def _finish(names: Sequence[str], table: Tensor) -> LayerStatistics:
    counts = table[:, COUNT].clamp(min=1)
    finite = (counts - table[:, NONFINITE]).clamp(min=1)
    return LayerStatistics(
        names=[*names],
        rms=(table[:, SQUARES] / finite).sqrt().tolist(),
        largest=table[:, LARGEST].tolist(),
        zeros=(table[:, ZEROS] / counts).tolist(),
        nonfinite=(table[:, NONFINITE] / counts).tolist(),
    )
