"""`build_stages`: build this rank's stages of a model and fill them with weights.

The model is made on the meta device, where it has shapes but no memory; a *plan*, a list of
transforms, is applied in order; then the local shards are allocated and filled. No rank ever
allocates more than its shards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from trainkit.models.call import call_model
from trainkit.models.decoder import Decoder, decoder_stage
from trainkit.parallel.check_layout import check_layout
from trainkit.parallel.check_modules import refuse_max_norm
from trainkit.parallel.materialize import (
    check_fit,
    compute_buffers,
    list_buffers,
    materialize_,
)
from trainkit.parallel.parameters import canonical_name, find_ties, get_named_parameters
from trainkit.parallel.precision import widen_gradients_
from trainkit.parallel.split import assign_stages, decoder_costs, split_layer_ranges
from trainkit.parallel.stage_ranks import StagePlace, attach_axes, place_stage_
from trainkit.parallel.transforms import OF_THE_WHOLE, Transform, check_plan
from trainkit.phases import as_phase
from trainkit.types import (
    Call,
    ConfigError,
    Layout,
    ModelTransform,
    ParallelState,
    Stages,
    Weights,
)


def split_layers(model: nn.Module, num_stages: int) -> list[nn.Module]:
    """Split a decoder into pipeline stages of equal cost; the first and last have fewer layers.

    This is the default of `build_stages`. For another model, write a function of the same
    signature: from the whole model, on the meta device, to one module for each stage, whose
    parameters keep their names in the whole model. A stage after the first is called with the
    hidden state in place of `input_ids`. A weight that two stages share, such as a tied embedding,
    is a parameter of the same name in both; the second must be a copy.

    Args:
        model: A `Decoder`, whose blocks become those of the stages.
        num_stages: The number of stages.

    Returns:
        All stages, in order.

    Raises:
        ConfigError: The model is not a `Decoder`, or has fewer layers than there are stages.

    Examples:
        >>> from trainkit.models.config import DecoderConfig
        >>> config = DecoderConfig(
        ...     vocab_size=259, width=64, layers=3, heads=4, kv_heads=2, mlp_width=128
        ... )
        >>> with torch.device("meta"):
        ...     stages = split_layers(Decoder(config), 2)
        >>> [list(stage.layers) for stage in stages]
        [['0', '1'], ['2']]
    """
    if not isinstance(model, Decoder):
        raise ConfigError(
            f"split_layers: it can split a Decoder, not a {type(model).__name__}; pass "
            "build_stages a split=, a function (model, num_stages) -> list of modules",
            where="split",
            got=type(model).__name__,
        )
    blocks, embedding, head = decoder_costs(model.config)
    ranges = split_layer_ranges(blocks, num_stages, first=embedding, last=head)
    return [
        decoder_stage(model, layers, first=i == 0, last=i == num_stages - 1)
        for i, layers in enumerate(ranges)
    ]


SplitModel = Callable[[nn.Module, int], Sequence[nn.Module]]
"""`split(model, num_stages)`: all stages of a whole model; see `split_layers`."""


@as_phase("model")
def build_stages(
    make_model: Callable[[], nn.Module],
    ps: ParallelState,
    plan: Sequence[ModelTransform],
    *,
    weights: Weights,
    split: SplitModel = split_layers,
    schedule: str = "1f1b",
    stages_per_rank: int | None = None,
    call: Call = call_model,
) -> Stages:
    """Return this rank's stages of a model, transformed by a plan and filled with weights.

    Args:
        make_model: Makes the whole model; called under the meta device, so it uses no memory.
        ps: The layout.
        plan: Transforms in the order of `transforms.ORDER`; applied to each stage separately,
            except those of `transforms.OF_THE_WHOLE`.
        weights: The initial values, a function of a parameter's name and of a box.
        split: Splits the whole model, on the meta device, into stages; see `split_layers`.
        schedule: The pipeline schedule, which determines the stages of a rank; see
            `parallel.split.SCHEDULES`. Without pipeline parallelism it has no effect.
        stages_per_rank: The number of stages per rank; by default that of the schedule.
        call: Calls a stage with a batch; a mixture of experts needs `call_routed`.

    Returns:
        The stages of this rank, with the axes of the layout.

    Raises:
        ConfigError: The plan's order is wrong, no transform handles an axis of size above 1, the
            model cannot be split into so many stages, tied weights would no longer be tied, or a
            transform does not support a module.
        CheckpointError: `weights` lists its tensors, and they are not those of the model.
        ValueError: See `materialize_`.

    Effects:
        Allocates parameters on `ps.device`. Transforms create no process groups: all are in `ps`.

    Examples:
        >>> from trainkit.mesh import solo_parallel
        >>> ones = lambda name, shape, offset: torch.ones(tuple(shape))
        >>> (model,) = build_stages(lambda: nn.Linear(2, 1), solo_parallel(), [], weights=ones)
        >>> model(torch.ones(1, 2)).item()
        3.0
    """
    check_plan(plan, ps)
    with torch.device("meta"):
        model = make_model()
        # Before the split: every layout then quantizes and adapts the same matrices.
        for step in filter(_is_of_the_whole, plan):
            model = step(model, ps)
    plan = [step for step in plan if not _is_of_the_whole(step)]
    # With a user's own split, the number of layers is no limit on the number of stages.
    is_default = isinstance(model, Decoder) and split is split_layers and stages_per_rank is None
    layout = Layout(pp=ps.pp.count, schedule=schedule)  # the plan checks the other axes
    config = model.config if is_default else None
    check_layout(layout, config, world=layout.world, device=ps.device.type)
    # The whole model, since a stage has some of the tensors only.
    check_fit(model, weights)
    # It makes the model once more, so only if there are buffers.
    buffers = compute_buffers(make_model) if list_buffers(model) else {}
    if ps.pp.count == 1:
        model = _build_stage(model, ps, plan, weights, buffers)
        return attach_axes([model], ps, schedule=schedule, call=call)
    ranks = assign_stages(schedule, ps.pp.count, per_rank=stages_per_rank)
    names = {canonical_name(name) for name, _ in model.named_parameters()}
    ties = find_ties(model)  # before the split, which may copy a tied weight
    with torch.device("meta"):
        stages = list(split(model, len(ranks)))
    tied = _check_split(names, ties, stages, len(ranks))
    for stage in stages:  # the copy in another stage would not be rescaled
        refuse_max_norm(stage, by="build_stages", weights=tied)
    modules = []
    for index, rank in enumerate(ranks):
        if rank == ps.pp.index:
            module = _build_stage(stages[index], ps, plan, weights, buffers)
            modules.append(place_stage_(module, StagePlace(index, ranks), tied))
    return attach_axes(modules, ps, schedule=schedule, call=call)


def _is_of_the_whole(step: ModelTransform) -> bool:
    return isinstance(step, Transform) and step.kind in OF_THE_WHOLE


def _build_stage(
    module: nn.Module,
    ps: ParallelState,
    plan: Sequence[ModelTransform],
    weights: Weights,
    buffers: Mapping[str, Tensor],
) -> nn.Module:
    for step in plan:
        # A plain function is checked for ties that it breaks as well.
        transform = step if isinstance(step, Transform) else Transform(step, kind="build_stages")
        module = transform(module, ps)
    # The last transform that asks for a device decides: `fsdp`, which ends a plan.
    devices = [step.device for step in plan if isinstance(step, Transform) and step.device]
    materialize_(module, weights, devices[-1] if devices else ps.device, buffers=buffers)
    widen_gradients_(module)  # of the new parameters that materialization makes
    # Buffers are on the device that computes, even if parameters are offloaded.
    for submodule in module.modules():
        for name, buffer in submodule.named_buffers(recurse=False):
            setattr(submodule, name, buffer.to(ps.device))
    return module


def _check_split(
    names: set[str], ties: Sequence[tuple[str, ...]], stages: Sequence[nn.Module], num_stages: int
) -> dict[str, tuple[int, int]]:
    """Check the parameters of stages; return the two stages of each shared parameter."""
    if len(stages) != num_stages:
        raise ConfigError(
            f"build_stages: split returned {len(stages)} stages, where {num_stages} were requested",
            where="split",
            got=len(stages),
            want=num_stages,
        )
    owners: dict[str, list[int]] = {}
    for index, stage in enumerate(stages):
        for name in get_named_parameters([stage]):
            owners.setdefault(name, []).append(index)
    tie_notes = {
        name: f", but tied to {first!r}; a shared parameter has one name, and one is a copy"
        for first, *others in ties
        for name in others
    }
    problems = [
        f"{name!r} of stage {indices[0]} is no parameter of the whole model"
        f"{tie_notes.get(name, '')}"
        for name, indices in owners.items()
        if name not in names
    ]
    problems += [f"{name!r} is in no stage" for name in sorted(names - owners.keys())]
    problems += [f"{name!r} is in {len(x)} stages" for name, x in owners.items() if len(x) > 2]
    if problems:
        raise ConfigError(f"build_stages: in the split, {problems[0]}", where="split")
    # A name in two stages is a tied parameter; the earlier stage owns it.
    shared = {name: indices for name, indices in owners.items() if len(indices) == 2}
    return {name: (owner, copy) for name, (owner, copy) in shared.items()}
