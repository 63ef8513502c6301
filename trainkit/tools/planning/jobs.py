"""The job to plan for, the layouts of a world, and the reasons why some are impossible."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Literal

import attrs

from trainkit.models.config import DecoderConfig
from trainkit.parallel.check_layout import find_problems
from trainkit.parallel.recompute import read_mode
from trainkit.parallel.split import SCHEDULES, assign_stages
from trainkit.types import (
    BatchShape,
    Layout,
    ModelTransform,
    Precision,
    non_negative,
    one_of,
    positive,
    satisfies,
)

FP32 = 4
"""Bytes of a number in fp32."""
# Without "auto", which a job must resolve.
_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}


@attrs.frozen(kw_only=True)
class Job:
    """The model and its training: all inputs of an estimate but layout and hardware."""

    config: DecoderConfig
    """The model."""

    row_length: int = attrs.field(validator=positive)
    """Tokens of a row."""

    rows: int = attrs.field(validator=positive)
    """Rows of a step, over all ranks."""

    microbatch: int = attrs.field(default=1, validator=positive)
    """Rows of a microbatch."""

    # `read_mode` raises for a mode that it does not know.
    recompute: str = attrs.field(default="none", validator=lambda _, __, mode: read_mode(mode))
    """The mode of recomputation; see `parallel.recompute`."""

    offload_activations: int | None = attrs.field(
        default=None, validator=attrs.validators.optional(non_negative)
    )
    """Bytes of activations that stay on the device; see `parallel.offload_activations`."""

    precision: Precision = attrs.field(
        default=Precision(compute="bf16"),
        validator=satisfies(
            lambda precision: precision.compute != "auto", "of a compute other than auto"
        ),
    )
    """Dtypes of computation, parameters, reductions and moments."""

    loss: Literal["linear", "plain"] = attrs.field(
        default="linear", validator=one_of("linear", "plain")
    )
    """linear for `next_token_linear`, which computes logits in chunks; plain for `next_token`."""

    optimizer: str = "adamw"
    """A name of `optim.table.OPTIMIZERS`."""

    # Stored as pairs, which make a job comparable and hashable.
    optimizer_options: tuple[tuple[str, Any], ...] = attrs.field(
        default=(), converter=lambda options: tuple(dict(options).items())
    )
    """The optimizer's options, given as a mapping: {"moments": "bf16"}."""

    mean: bool = False
    """Whether the weights are averaged; see `optim.combine_optimizers`."""

    offload_optimizer: bool = False
    """Whether optimizer state is in host memory; see `optim.offload_optimizer_`."""

    documents: int = attrs.field(default=1, validator=positive)
    """Documents of a row, of equal lengths, which set the cost of attention."""

    plan_prefix: tuple[ModelTransform, ...] = attrs.field(default=(), converter=tuple)
    """The first transforms of the plan, `adapters.quantized` and `adapters.lora`, which set the
    trainable parameters and the storage of the frozen ones. Without them all are trainable."""

    frozen: frozenset[str] = frozenset()
    """The names of frozen parameters, from `adapters.select_frozen`."""

    @property
    def itemsize(self) -> int:
        """Bytes of an element in the dtype of computation."""
        return _BYTES[self.precision.compute]

    @property
    def stored(self) -> int:
        """Bytes of an element of a parameter."""
        return _BYTES[self.precision.storage]

    @property
    def summed(self) -> int:
        """Bytes of an element of a gradient that FSDP reduces."""
        return _BYTES[self.precision.reduction]


def stages_per_rank(layout: Layout) -> int:
    """Count the pipeline stages of a rank: 2 for schedules with several, else 1.

    Examples:
        >>> stages_per_rank(Layout(pp=2, schedule="dual_pipe_v")), stages_per_rank(Layout(pp=2))
        (2, 1)
    """
    return len(assign_stages(layout.schedule, layout.pp)) // layout.pp if layout.pp > 1 else 1


def num_microbatches(job: Job, layout: Layout) -> int:
    """Count the microbatches of a rank in a step; the last may have padding rows.

    Examples:
        >>> from trainkit.models.decoder_sizes import make_decoder_config
        >>> job = Job(config=make_decoder_config("tiny"), row_length=8, rows=12, microbatch=2)
        >>> num_microbatches(job, Layout(dp_shard=3))
        2
    """
    # Ranks with fewer rows than others have padding rows, so both quotients round up.
    return math.ceil(math.ceil(job.rows / layout.count("dp")) / job.microbatch)


def list_layouts(world: int, *, like: Layout | None = None, experts: int = 1) -> Iterator[Layout]:
    """Yield every layout of a world: all factorizations into the degrees.

    Args:
        world: The number of ranks.
        like: A layout with the options of all of them, besides the degrees.
        experts: Experts of a layer; ep takes every degree that divides them and the number of ranks
            of FSDP.

    Examples:
        >>> [str(layout) for layout in list_layouts(2)][:3]
        ['tp 2', 'ulysses 2', 'ring 2']
        >>> len(list(list_layouts(8)))
        56
        >>> [str(layout) for layout in list_layouts(2, experts=8)][1:3]
        ['ulysses 2', 'ulysses 2 x ep 2']
    """
    like = like or Layout()
    names = like.axes["world"]
    for degrees in _list_factorizations(world, len(names)):
        named: Any = dict(zip(names, degrees, strict=True))
        layout = attrs.evolve(like, **named, ep=1)
        # ep is a further factor of FSDP's ranks, and none of the world.
        common = math.gcd(experts, layout.count("fsdp"))  # ep divides both
        for ep in (n for n in range(1, common + 1) if common % n == 0):
            yield attrs.evolve(layout, ep=ep)


def _list_factorizations(number: int, parts: int) -> Iterator[tuple[int, ...]]:
    if parts == 1:
        yield (number,)
        return
    for first in range(1, number + 1):
        if number % first == 0:
            for rest in _list_factorizations(number // first, parts - 1):
                yield (first, *rest)


def explain_refusal(job: Job, layout: Layout) -> str | None:
    """Return the reason why a layout is impossible for a job, or None.

    The rules are those of `parallel.check_layout`, on GPUs, for rows packed in multiples of
    2 x ring.

    Examples:
        >>> from trainkit.models.decoder_sizes import make_decoder_config
        >>> job = Job(config=make_decoder_config("10m"), row_length=256, rows=8)
        >>> explain_refusal(job, Layout(tp=3))
        '4 heads do not divide by tp = 3; ...'
        >>> explain_refusal(job, Layout(dp_shard=8)) is None
        True
    """
    rows = BatchShape(
        row_length=job.row_length,
        rows=job.rows,
        microbatch=job.microbatch,
        multiple_of=2 * layout.ring,
    )
    # An estimate assumes what the schedule allows, so this option is no reason to refuse.
    layout = attrs.evolve(layout, reshard_after_forward=reshards(layout))
    # Planning is for GPUs, wherever it runs.
    problems = find_problems(layout, job.config, rows, world=layout.world, device="cuda")
    return problems[0].what if problems else None


def reshards(layout: Layout) -> bool:
    """Return whether FSDP may free a block's parameters after forward: not with a split backward.

    Examples:
        >>> split = Layout(pp=2, schedule="dual_pipe_v")
        >>> reshards(split), reshards(attrs.evolve(split, pp=1))
        (False, True)
    """
    return layout.pp == 1 or not SCHEDULES[layout.schedule].splits_backward
