"""From a function that makes a model to this rank's part of it, filled.

The model is made on the meta device, where it has shapes but no memory; a *plan*, a list of
transforms, is applied in order; then each shard is allocated and filled on its own. No rank ever
holds what it does not own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from trainkit.models.call import call_model
from trainkit.models.decoder import Decoder, decoder_stage
from trainkit.parallel.check_layout import problems, refuse
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
    """Cut a decoder into pipeline stages, by cost; the first and the last have fewer layers.

    This is the split that `build_stages` takes by default. For another model, write a function of
    the same signature: from the whole model, on the meta device, to one module for each stage,
    whose parameters keep the names that they have in the whole model. A stage after the first is
    called with the hidden state in place of `input_ids`. A weight that two stages share, as tied
    embeddings do, is a parameter of the same name in both; the second must be a copy.

    Args:
        model: A `Decoder`, which is used up: its blocks become those of the stages.
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
    """Return this rank's part of a model, transformed by a plan and filled with its weights.

    Args:
        make_model: Makes the whole model; called under the meta device, so it costs no memory.
        ps: The layout.
        plan: Transforms in the order of `transforms.ORDER`; applied to each stage by itself, but
            for those of `transforms.OF_THE_WHOLE`.
        weights: The initial values, a function of a parameter's name and of the box asked for.
        split: Cuts the whole model, on the meta device, into stages; see `split_layers`.
        schedule: The pipeline schedule, which says which rank holds which stages; see
            `parallel.split.SCHEDULES`. Without pipeline parallelism it changes nothing.
        stages_per_rank: How many stages a rank holds; by default as many as the schedule needs.
        call: How a batch enters a stage; a mixture of experts needs `call_routed`.

    Returns:
        The stages of this rank, and the axes that they are spread over.

    Raises:
        ConfigError: The plan's order is wrong, an axis of size above 1 has nobody to take care of
            it, the model cannot be split into so many stages, a weight that modules share would
            come apart, or a module is one that a transform would compute wrongly.
        CheckpointError: `weights` says what it holds, and that is not this model.
        ValueError: See `materialize_`.

    Effects:
        Allocates parameters on `ps.device`. Transforms may open no groups: all are in `ps`.

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
        for step in filter(_is_of_the_whole, plan):
            model = step(model, ps)
    plan = [step for step in plan if not _is_of_the_whole(step)]
    known = isinstance(model, Decoder) and split is split_layers and stages_per_rank is None
    layout = Layout(pp=ps.pp.count, schedule=schedule)  # the other axes are the plan's
    config, device = model.config if known else None, ps.device.type
    refuse(problems(layout, config, world=layout.world, device=device))
    check_fit(model, weights)
    buffers = compute_buffers(make_model) if list_buffers(model) else {}
    if ps.pp.count == 1:
        model = _built(model, ps, plan, weights, buffers)
        return attach_axes([model], ps, schedule=schedule, call=call)
    ranks = assign_stages(schedule, ps.pp.count, per_rank=stages_per_rank)
    names = {canonical_name(name) for name, _ in model.named_parameters()}
    ties = find_ties(model)
    with torch.device("meta"):
        stages = list(split(model, len(ranks)))
    tied = _check_split(names, ties, stages, len(ranks))
    for stage in stages:  # the copy in another stage would not be rescaled
        refuse_max_norm(stage, by="build_stages", weights=tied)
    own = [index for index, rank in enumerate(ranks) if rank == ps.pp.index]
    modules = [
        place_stage_(_built(stages[i], ps, plan, weights, buffers), StagePlace(i, ranks), tied)
        for i in own
    ]
    return attach_axes(modules, ps, schedule=schedule, call=call)


def _is_of_the_whole(step: ModelTransform) -> bool:
    return isinstance(step, Transform) and step.kind in OF_THE_WHOLE


def _built(
    module: nn.Module,
    ps: ParallelState,
    plan: Sequence[ModelTransform],
    weights: Weights,
    buffers: Mapping[str, Tensor],
) -> nn.Module:
    for step in plan:
        transform = step if isinstance(step, Transform) else Transform(step, kind="build_stages")
        module = transform(module, ps)
    wanted = [step.device for step in plan if isinstance(step, Transform) and step.device]
    materialize_(module, weights, wanted[-1] if wanted else ps.device, buffers=buffers)
    widen_gradients_(module)
    for part in module.modules():  # offloaded or not, what is computed with them is on the device
        for name, buffer in part.named_buffers(recurse=False):
            setattr(part, name, buffer.to(ps.device))
    return module


def _check_split(
    names: set[str], ties: Sequence[tuple[str, ...]], stages: Sequence[nn.Module], wanted: int
) -> dict[str, tuple[int, int]]:
    """Refuse stages that are not the model; return which two stages share a parameter, by name."""
    if len(stages) != wanted:
        raise ConfigError(
            f"build_stages: split gave {len(stages)} stages, where {wanted} were asked for",
            where="split",
            got=len(stages),
            want=wanted,
        )
    owners: dict[str, list[int]] = {}
    for index, stage in enumerate(stages):
        for name in get_named_parameters([stage]):
            owners.setdefault(name, []).append(index)
    told = {
        name: f", but tied to {first!r}; what stages share goes by one name, and is a copy in one"
        for first, *others in ties
        for name in others
    }
    problems = [
        f"{name!r} of stage {where[0]} is no parameter of the whole model{told.get(name, '')}"
        for name, where in owners.items()
        if name not in names
    ]
    problems += [f"{name!r} is in no stage" for name in sorted(names - owners.keys())]
    problems += [f"{name!r} is in {len(x)} stages" for name, x in owners.items() if len(x) > 2]
    if problems:
        raise ConfigError(f"build_stages: in the split, {problems[0]}", where="split")
    return {name: (where[0], where[1]) for name, where in owners.items() if len(where) == 2}
