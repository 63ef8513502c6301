"""The job to plan for, all layouts of a world, and the reasons why some are impossible."""

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
_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}


def _make_items(options: Any) -> tuple[tuple[str, Any], ...]:
    """Return a mapping as pairs, by which a job can be compared and hashed."""
    return tuple(dict(options).items())


@attrs.frozen(kw_only=True)
class Job:
    """The model and its training: all inputs of a plan except layout and machine."""

    config: DecoderConfig
    """The model."""

    row_length: int = attrs.field(validator=positive)
    """Tokens of a row."""

    rows: int = attrs.field(validator=positive)
    """Rows of a step, over all ranks."""

    microbatch: int = attrs.field(default=1, validator=positive)
    """Rows that go through the model at once."""

    recompute: str = attrs.field(default="none", validator=lambda _, __, mode: read_mode(mode))
    """What is computed again in backward; see `parallel.recompute`."""

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
    """Dtypes of computation and saved activations, of parameters, reductions and moments."""

    loss: Literal["linear", "plain"] = attrs.field(
        default="linear", validator=one_of("linear", "plain")
    )
    """linear for `next_token_linear`, whose logits exist chunk by chunk; plain for `next_token`."""

    optimizer: str = "adamw"
    """What steps, a name of `optim.table.OPTIMIZERS`: what it remembers."""

    optimizer_options: tuple[tuple[str, Any], ...] = attrs.field(default=(), converter=_make_items)
    """Its options, given as a mapping: {"moments": "bf16"}."""

    mean: bool = False
    """Whether it keeps a mean of the weights; see `optim.combine_optimizers`."""

    offload_optimizer: bool = False
    """Whether its state is in host memory; see `optim.offload_optimizer_`."""

    documents: int = attrs.field(default=1, validator=positive)
    """Documents of a row, of equal lengths, for what attention costs."""

    begins: tuple[ModelTransform, ...] = attrs.field(default=(), converter=tuple)
    """What the plan begins with, `adapters.quantized` and `adapters.lora`: they say what is trained
    and in how many bits the rest is held. Without them all is trained."""

    frozen: frozenset[str] = frozenset()
    """The names of parameters that are not trained, from `adapters.select_frozen`."""

    @property
    def itemsize(self) -> int:
        """Bytes of a number in the dtype that is computed in."""
        return _BYTES[self.precision.compute]

    @property
    def stored(self) -> int:
        """Bytes of a parameter."""
        return _BYTES[self.precision.storage]

    @property
    def summed(self) -> int:
        """Bytes of a gradient as FSDP sends it, and adds it up before."""
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
    return math.ceil(math.ceil(job.rows / layout.count("dp")) / job.microbatch)


def list_layouts(world: int, *, like: Layout | None = None, experts: int = 1) -> Iterator[Layout]:
    """Yield every layout of a world: all factorizations into the degrees.

    Args:
        world: The number of ranks.
        like: A layout with the options that all of them share, besides the degrees.
        experts: Experts of a layer; ep takes every degree that divides them and the number of ranks
            that parameters are sharded over.

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
        common = math.gcd(experts, layout.count("fsdp"))
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
    layout = attrs.evolve(layout, reshard_after_forward=reshards(layout))
    problems = find_problems(layout, job.config, rows, world=layout.world, device="cuda")
    return problems[0].what if problems else None


def reshards(layout: Layout) -> bool:
    """Return whether FSDP may free a block's parameters after forward: not if backward is split.

    Examples:
        >>> split = Layout(pp=2, schedule="dual_pipe_v")
        >>> reshards(split), reshards(attrs.evolve(split, pp=1))
        (False, True)
    """
    return layout.pp == 1 or not SCHEDULES[layout.schedule].splits_backward
