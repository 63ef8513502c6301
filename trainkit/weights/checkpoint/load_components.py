"""Load components: compare a checkpoint's with the run's, read their tensors, install them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.collectives import run_on_all_ranks
from trainkit.parallel.parameters import get_local_box
from trainkit.types import Axis, CheckpointError
from trainkit.weights.checkpoint.component_trees import Tree, decode_tree
from trainkit.weights.checkpoint.components import (
    Components,
    get_components,
    is_sharded,
    read_components,
)
from trainkit.weights.checkpoint.reading import Target


def compare_components(
    saved: Mapping[str, Any],
    components: Components | None,
    *,
    ranks: int,
    may_change: bool,
) -> tuple[list[str], list[str]]:
    """Return where the components of a checkpoint and of the run differ: errors, and messages.

    Args:
        saved: The "components" of its `state.json`.
        components: The run's.
        ranks: How many ranks the run has.
        may_change: The user allows components that only one of them has.

    Examples:
        >>> compare_components({}, {"layer": nn.Linear(1, 1)}, ranks=1, may_change=True)
        ([], ['the checkpoint has no component layer: it stays as it is'])
    """
    errors: list[str] = []
    messages: list[str] = []
    allow = "(--allow-change components resumes without it)"
    live = get_components(components, by="resume")
    for name, component in live.items():
        if name not in saved:
            if may_change or not component.required:
                messages.append(f"the checkpoint has no component {name}: it stays as it is")
            else:
                errors.append(f"the component {name} is missing in the checkpoint {allow}")
        elif (was := _name_kind(saved[name]["per_rank"], saved[name].get("groups"))) != (
            now := _name_kind(component.per_rank, component.ranks)
        ):
            errors.append(f"the component {name} was saved as {was}, the run has it as {now}")
        elif component.ranks is not None and (
            (group := sorted({*component.ranks})) not in saved[name]["groups"]
            or sum(map(len, saved[name]["groups"])) != ranks
        ):
            errors.append(
                f"the component {name} was saved by the groups {saved[name]['groups']}, the run "
                f"has {group} of {ranks} ranks: resume with the same groups"
            )
        elif component.per_rank and len(saved[name]["states"]) != ranks:
            errors.append(
                f"the component {name} was saved by each of {len(saved[name]['states'])} ranks, "
                f"the run has {ranks}: resume with as many ranks"
            )
    for name in sorted(saved.keys() - live.keys()):
        if may_change:
            messages.append(f"the component {name} of the checkpoint is left out")
        else:
            errors.append(f"the component {name} is left over {allow}")
    return errors, messages


def _name_kind(per_rank: bool, groups: object) -> str:
    if per_rank:
        return "of each rank"
    return "equal on all ranks" if groups is None else "equal in groups of ranks"


# ------------------------------------------------------------------------------------------ loading


def _select_tree(saved: Mapping[str, Any], rank: int) -> Tree | None:
    """Return the state of a component on a rank; None if it was saved on fewer ranks."""
    if "groups" in saved:
        numbers = {x: i for i, ranks in enumerate(saved["groups"]) for x in ranks}
        return saved["states"][numbers[rank]] if rank in numbers else None
    number = rank if saved["per_rank"] else 0
    return saved["states"][number] if number < len(saved["states"]) else None


def make_component_targets(
    saved: Mapping[str, Any],
    index: Mapping[str, Any],
    components: Components | None,
    *,
    rank: int,
) -> dict[str, Target]:
    """Allocate the tensors of components that a rank loads, in host memory.

    Where the run's own component has a DTensor of the same name, one like it is loaded.

    Args:
        saved: The "components" of a `state.json`, which have been checked.
        index: The checked entries of the checkpoint's index.
        components: The run's.
        rank: This rank.
    """
    targets: dict[str, Target] = {}
    live = read_components(components, rank=rank, by="resume").sharded

    def allocate(described: Mapping[str, Any]) -> None:
        name = described["$tensor"]
        if name not in targets:  # shared ones are read once
            entry = index[name]
            dtype = getattr(torch, entry["dtype"])
            if name in live and list(live[name].shape) == entry["shape"]:
                x = torch.empty_like(live[name], dtype=dtype)  # with the placements of the run
            else:
                x = torch.empty(entry["shape"], dtype=dtype)
            box = get_local_box(x)
            # Read in host memory, wherever the shard is.
            out = (
                box.local
                if box.local.device.type == "cpu"
                else torch.empty_like(box.local, device="cpu")
            )
            targets[name] = Target(name, x, box, out)

    for name in components or {}:
        # Another number of ranks is an error that `compare_components` reports.
        if name in saved and (tree := _select_tree(saved[name], rank)) is not None:
            decode_tree(tree, allocate)
    return targets


def install_components_(
    saved: Mapping[str, Any],
    targets: Mapping[str, Target],
    components: Components | None,
    *,
    device: torch.device,
    axis: Axis,
) -> None:
    """Load the saved states into the components.

    Args:
        saved: The "components" of a `state.json`.
        targets: The tensors that were read.
        components: The run's.
        device: Where tensors go that were not in host memory when they were saved.
        axis: The ranks that load.

    Raises:
        CheckpointError: A component does not take its state.

    Effects:
        Calls `load_state_dict` of each component; communicates on `axis`, if there are components.
    """
    moved: dict[str, Tensor] = {}

    def get_tensor(described: Mapping[str, Any]) -> Tensor:
        name = described["$tensor"]
        if name not in moved:
            target = targets[name]
            if target.out is not target.box.local:
                target.box.local.copy_(target.out)
            is_elsewhere = described["on"] == "device" and not is_sharded(target.tensor)
            moved[name] = target.tensor.to(device) if is_elsewhere else target.tensor
        return moved[name]

    def install() -> None:
        for name, component in get_components(components, by="resume").items():
            if name not in saved:
                continue
            state = decode_tree(_select_tree(saved[name], axis.index), get_tensor)
            try:
                component.state.load_state_dict(state)
            except Exception as error:
                raise CheckpointError(
                    f"resume: the component {name} does not take its saved state: "
                    f"{type(error).__name__}: {error}",
                    where=f"components.{name}",
                    hint="load_state_dict must take what state_dict returned when it was saved",
                ) from error

    if components:
        run_on_all_ranks(install, axis)


def get_device(stages: Sequence[nn.Module]) -> torch.device:
    """Return the device of the first parameter of some stages; the CPU if there is none."""
    parameters = (p for stage in stages for p in stage.parameters())
    first = next(parameters, None)
    return torch.device("cpu") if first is None else first.device
