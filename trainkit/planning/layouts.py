"""Every way to cut a world into degrees, and which of them a model and its rows allow."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

import attrs

from trainkit.mesh import FoldSP, folded_axes
from trainkit.models.config import DecoderConfig
from trainkit.parallel.check import check_layout
from trainkit.parallel.split import SCHEDULES, rank_of_stages
from trainkit.types import ConfigError

Recompute = Literal["none", "selective", "full"]
DEGREES = ("pp", "dp_replicate", "dp_shard", "ring", "ulysses", "tp")


@attrs.frozen
class Layout:
    """The six degrees whose product is the world, outermost first, and what FSDP shards over.

    Parameters, gradients and optimizer state are sharded over `fsdp`: dp_shard, and those of ring
    and ulysses that `fold_sp` names, as in `parallel_session`; `sync_sp_grads` sums over the rest.

    Raises:
        ValueError: A degree is below 1.
        ConfigError: `fold_sp` is unknown.

    Examples:
        >>> layout = Layout(dp_shard=4, tp=2)
        >>> print(layout, layout.world)
        dp_shard 4 x tp 2 8
        >>> layout = Layout(dp_shard=2, ring=4, fold_sp="none")
        >>> print(layout, layout.fsdp, layout.unfolded)
        dp_shard 2 x ring 4, fold none 2 4
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    ring: int = 1
    ulysses: int = 1
    tp: int = 1
    fold_sp: FoldSP = "all"

    def __attrs_post_init__(self) -> None:
        if min(self.degrees) < 1:
            raise ValueError(f"Layout: every degree must be at least 1, got {self.degrees}")
        folded_axes(self.fold_sp)

    def __str__(self) -> str:
        pairs = zip(DEGREES, self.degrees, strict=True)
        text = " x ".join(f"{name} {degree}" for name, degree in pairs if degree > 1) or "solo"
        return f"{text}, fold {self.fold_sp}" if self.unfolded > 1 else text

    @property
    def degrees(self) -> tuple[int, ...]:
        """The six degrees, outermost first."""
        return (self.pp, self.dp_replicate, self.dp_shard, self.ring, self.ulysses, self.tp)

    @property
    def world(self) -> int:
        """The number of ranks."""
        return math.prod(self.degrees)

    @property
    def dp(self) -> int:
        """How many ranks hold different rows."""
        return self.dp_replicate * self.dp_shard

    @property
    def sp(self) -> int:
        """How many ranks share the tokens of a row."""
        return self.ring * self.ulysses

    @property
    def fsdp(self) -> int:
        """How many ranks share one copy of the parameters and of the optimizer's state."""
        return self.dp_shard * self.sp // self.unfolded

    @property
    def unfolded(self) -> int:
        """How many ranks of the sequence hold the same parameters, and sum their gradients."""
        folded = folded_axes(self.fold_sp)
        return math.prod(getattr(self, x) for x in ("ring", "ulysses") if x not in folded)

    @property
    def is_wrapped(self) -> bool:
        """Whether FSDP runs: with one rank to shard over, and no replica, it leaves a model be."""
        return self.fsdp * self.dp_replicate > 1


@attrs.frozen(kw_only=True)
class Job:
    """What is trained, and how: everything that a plan needs to know except layout and machine.

    Args:
        config: The model.
        row_length: Tokens of a row.
        rows: Rows of a step, over all ranks.
        microbatch: Rows that go through the model at once.
        recompute: What is computed again in backward; see `parallel.recompute`.
        dtype: What is computed and kept for backward in; parameters, gradients and optimizer state
            are fp32.
        loss: "linear" for `next_token_linear`, whose logits exist chunk by chunk; "plain" for
            `next_token`.
        optimizer: "adamw" holds two numbers per parameter, "momentum" one, "sgd" none.
        schedule: How pipeline stages take turns.
        reduce: When gradients are reduced; see `forward_backward`.
        documents: Documents of a row, of equal lengths, for what attention costs.
        cpu_offload: Whether FSDP keeps parameters, gradients and optimizer state in host memory.

    Raises:
        ValueError: A number is below 1, or a name is unknown.
    """

    config: DecoderConfig
    row_length: int
    rows: int
    microbatch: int = 1
    recompute: Recompute = "none"
    dtype: Literal["bf16", "fp32"] = "bf16"
    loss: Literal["linear", "plain"] = "linear"
    optimizer: Literal["adamw", "momentum", "sgd"] = "adamw"
    schedule: str = "1f1b"
    reduce: Literal["last", "each"] = "last"
    documents: int = 1
    cpu_offload: bool = False

    def __attrs_post_init__(self) -> None:
        for field in ("row_length", "rows", "microbatch", "documents"):
            if getattr(self, field) < 1:
                raise ValueError(f"plan: {field} must be at least 1, got {getattr(self, field)}")
        choices = {
            "recompute": ("none", "selective", "full"),
            "dtype": ("bf16", "fp32"),
            "loss": ("linear", "plain"),
            "optimizer": ("adamw", "momentum", "sgd"),
            "schedule": tuple(SCHEDULES),
            "reduce": ("last", "each"),
        }
        for field, known in choices.items():
            if getattr(self, field) not in known:
                got = getattr(self, field)
                raise ValueError(f"plan: {field} must be one of {', '.join(known)}, got {got!r}")

    @property
    def itemsize(self) -> int:
        """Bytes of a number in the dtype that is computed in."""
        return {"bf16": 2, "fp32": 4}[self.dtype]


def stages_per_rank(job: Job, layout: Layout) -> int:
    """Return how many pipeline stages a rank holds: 2 where a schedule wants several, else 1.

    Examples:
        >>> from trainkit.models.sizes import decoder_config
        >>> job = Job(config=decoder_config("tiny"), row_length=8, rows=8, schedule="dual_pipe_v")
        >>> stages_per_rank(job, Layout(pp=2)), stages_per_rank(job, Layout(tp=2))
        (2, 1)
    """
    return len(rank_of_stages(job.schedule, layout.pp)) // layout.pp if layout.pp > 1 else 1


def num_microbatches(job: Job, layout: Layout) -> int:
    """Return how many microbatches a rank computes in a step; the last may hold blank rows.

    Examples:
        >>> from trainkit.models.sizes import decoder_config
        >>> job = Job(config=decoder_config("tiny"), row_length=8, rows=12, microbatch=2)
        >>> num_microbatches(job, Layout(dp_shard=3))
        2
    """
    return math.ceil(math.ceil(job.rows / layout.dp) / job.microbatch)


def layouts_of(world: int, *, fold_sp: FoldSP = "all") -> Iterator[Layout]:
    """Yield every layout of a world: all ways to write it as a product of six degrees.

    Raises:
        ConfigError: `fold_sp` is unknown.

    Examples:
        >>> [str(layout) for layout in layouts_of(2)][:3]
        ['tp 2', 'ulysses 2', 'ring 2']
        >>> len(list(layouts_of(8)))
        56
    """
    for degrees in _factorisations(world, len(DEGREES)):
        yield Layout(*degrees, fold_sp=fold_sp)


def _factorisations(number: int, parts: int) -> Iterator[tuple[int, ...]]:
    if parts == 1:
        yield (number,)
        return
    for first in range(1, number + 1):
        if number % first == 0:
            for rest in _factorisations(number // first, parts - 1):
                yield (first, *rest)


def refusal(job: Job, layout: Layout) -> str | None:
    """Say in one sentence why a layout is impossible for a job, or return None.

    The rules are `parallel.check_layout`'s, for rows that are packed in the multiples that the ring
    asks for.

    Examples:
        >>> from trainkit.models.sizes import decoder_config
        >>> job = Job(config=decoder_config("10m"), row_length=256, rows=8)
        >>> refusal(job, Layout(tp=3))
        '4 heads do not divide by tp = 3; ...'
        >>> refusal(job, Layout(dp_shard=8)) is None
        True
    """
    if job.cpu_offload and not layout.is_wrapped:
        return (
            "cpu_offload is FSDP's, which does not run where parameters are sharded over 1 rank "
            "and there is 1 replica; raise dp_shard"
        )
    try:
        check_layout(
            job.config,
            world=layout.world,
            degrees=dict(zip(DEGREES, layout.degrees, strict=True)),
            fold_sp=layout.fold_sp,
            row_length=job.row_length,
            rows=job.rows,
            microbatch=job.microbatch,
            multiple_of=2 * layout.ring,
            schedule=job.schedule,
            reshard_after_forward=reshards(job, layout),
            here=False,
        )
    except ConfigError as error:
        return str(error).partition(": ")[2]
    return None


def reshards(job: Job, layout: Layout) -> bool:
    """Say whether FSDP may free a block's parameters after forward: not where backward is split.

    Examples:
        >>> from trainkit.models.sizes import decoder_config
        >>> job = Job(config=decoder_config("10m"), row_length=8, rows=8, schedule="dual_pipe_v")
        >>> reshards(job, Layout(pp=2)), reshards(job, Layout(dp_shard=2))
        (False, True)
    """
    return layout.pp == 1 or not SCHEDULES[job.schedule].splits_backward
