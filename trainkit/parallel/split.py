"""Which layers and which stages a pipeline rank holds: pure arithmetic.

A *stage* is a run of layers. Ranks hold one stage each, or several: in a loop (rank r of P holds r,
P + r, ...), or in a V (r and 2P - 1 - r), so that the first rank also ends the pipeline.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Literal

import attrs

from trainkit.models.config import DecoderConfig, idle_parameters, parameter_shapes
from trainkit.types import ConfigError


@attrs.frozen
class Kind:
    """What sets one pipeline schedule apart from another.

    `torch_name` is its class in torch.distributed.pipelining. `splits_backward` says that gradients
    of inputs and of weights are computed at different times.
    """

    torch_name: str
    placement: Literal["one", "loop", "v"]
    splits_backward: bool = False


SCHEDULES = {
    "gpipe": Kind("ScheduleGPipe", "one"),
    "1f1b": Kind("Schedule1F1B", "one"),
    "interleaved_1f1b": Kind("ScheduleInterleaved1F1B", "loop"),
    "looped_bfs": Kind("ScheduleLoopedBFS", "loop"),
    "interleaved_zero_bubble": Kind("ScheduleInterleavedZeroBubble", "loop", splits_backward=True),
    "zero_bubble_v": Kind("ScheduleZBVZeroBubble", "v", splits_backward=True),
    "dual_pipe_v": Kind("ScheduleDualPipeV", "v", splits_backward=True),
}
"""The pipeline schedules by name.

GPipe (Huang et al., 2019); 1F1B (Narayanan et al., "PipeDream", 2019) and its interleaved form (the
same, "Efficient large-scale language model training on GPU clusters", 2021); breadth-first looping
(Lamy-Poirier, 2023); zero bubble and its V (Qi et al., 2024); DualPipeV (DeepSeek-V3, 2024).
"""


def schedule_kind(schedule: str) -> Kind:
    """Return what a schedule's name stands for.

    Raises:
        ConfigError: There is no such schedule.

    Examples:
        >>> schedule_kind("zero_bubble_v").placement
        'v'
    """
    if schedule not in SCHEDULES:
        raise ConfigError(
            f"there is no pipeline schedule {schedule!r}; there are {', '.join(SCHEDULES)}",
            where="schedule",
            got=schedule,
            want=list(SCHEDULES),
        )
    return SCHEDULES[schedule]


def assign_stages(schedule: str, ranks: int, *, per_rank: int | None = None) -> tuple[int, ...]:
    """Return the rank that holds each stage, first stage first.

    Args:
        schedule: A name of `SCHEDULES`.
        ranks: The size of the pipeline axis.
        per_rank: Stages on each rank; by default as many as the schedule needs, 1 or 2.

    Raises:
        ConfigError: The schedule is unknown, or cannot have that many stages on a rank.

    Examples:
        >>> assign_stages("1f1b", 4)
        (0, 1, 2, 3)
        >>> assign_stages("interleaved_1f1b", 2)
        (0, 1, 0, 1)
        >>> assign_stages("dual_pipe_v", 2)
        (0, 1, 1, 0)
    """
    placement = schedule_kind(schedule).placement
    least, most = {"one": (1, 1), "loop": (1, math.inf), "v": (2, 2)}[placement]
    wanted = {"one": 1, "loop": 2, "v": 2}[placement] if per_rank is None else per_rank
    if not least <= wanted <= most:
        fit = [
            x
            for x, kind in SCHEDULES.items()
            if kind.placement == ("one" if wanted == 1 else "loop")
        ]
        raise ConfigError(
            f"the schedule {schedule} has {least} stage(s) on each rank, got {wanted}; those with "
            f"{wanted} are {', '.join(fit)}",
            where="stages_per_rank",
            got=wanted,
            want=least,
        )
    if placement == "v":
        return (*range(ranks), *reversed(range(ranks)))
    return tuple(stage % ranks for stage in range(ranks * wanted))


def microbatches_wanted(schedule: str, ranks: int, stages: int, count: int) -> str | None:
    """Say how many microbatches a schedule needs where it cannot run `count` of them, or None.

    Args:
        schedule: A name of `SCHEDULES`.
        ranks: The size of the pipeline axis.
        stages: The number of stages, of all ranks.
        count: The number of microbatches in a step.

    Examples:
        >>> microbatches_wanted("1f1b", 4, 4, 4)
        >>> microbatches_wanted("1f1b", 4, 4, 2)
        'at least 4 for 4 stages'
    """
    least = stages if schedule in ("1f1b", "dual_pipe_v") else 1
    if count < least:
        return f"at least {least} for {stages} stages"
    rounds = max(1, count // ranks)
    if schedule in ("interleaved_1f1b", "interleaved_zero_bubble") and count % rounds:
        return f"a multiple of {rounds}, for rounds of at least {ranks} (such as {rounds * ranks})"
    return None


# ------------------------------------------------------------------------------------------- split


def split_layer_ranges(
    costs: Sequence[float], num_stages: int, *, first: float = 0.0, last: float = 0.0
) -> list[range]:
    """Cut layers into runs such that the dearest stage is as cheap as can be.

    Among the cuts that reach this, the one with the least sum of squares is taken, so that the
    other stages are even too, and among those the one that gives what does not divide to the first
    stages (the last has the head). Every stage has a layer.

    Args:
        costs: What each layer costs, in any unit.
        num_stages: The number of stages.
        first: What the first stage costs besides its layers: the embedding.
        last: What the last stage costs besides its layers: the head and the loss.

    Returns:
        The numbers of each stage's layers.

    Raises:
        ConfigError: There are fewer layers than stages.

    Examples:
        >>> split_layer_ranges([1.0] * 8, 4, first=1.0, last=1.0)
        [range(0, 2), range(2, 5), range(5, 7), range(7, 8)]
        >>> split_layer_ranges([1.0] * 10, 4, first=1.0, last=1.0)
        [range(0, 2), range(2, 5), range(5, 8), range(8, 10)]
    """
    count = len(costs)
    if not 1 <= num_stages <= count:
        raise ConfigError(
            f"split_layer_ranges: {count} layers cannot fill {num_stages} stages, each of which "
            f"needs one; use at most {count} stages",
            where="pp",
            got=num_stages,
            want=f"<= {count}",
        )
    sums = list(accumulate(costs, initial=0.0))

    def cost(stage: int, start: int, stop: int) -> float:
        extra = first * (stage == 0) + last * (stage == num_stages - 1)
        return sums[stop] - sums[start] + extra

    def best(limit: float, power: int) -> tuple[float, list[int]]:
        # least[j]: for the first j layers in the stages so far, the total and where stages begin
        least: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}
        for stage in range(num_stages):
            ends = range(stage + 1, count - num_stages + stage + 2)
            following: dict[int, tuple[float, list[int]]] = {}
            for end in ends:
                for start, (total, starts) in least.items():
                    if start >= end or (own := cost(stage, start, end)) > limit:
                        continue
                    found = max(total, own) if power == 0 else total + own**power
                    # Of equals the later start, up to rounding: fewer layers in this stage.
                    if end not in following or found <= following[end][0] * (1 + 1e-12):
                        following[end] = found, [*starts, start]
            least = following
        return least[count]

    dearest, _ = best(math.inf, 0)
    _, starts = best(dearest * (1 + 1e-9), 2)
    return [range(a, b) for a, b in zip(starts, [*starts[1:], count], strict=True)]


def decoder_costs(config: DecoderConfig) -> tuple[list[float], float, float]:
    """Return what each block, the embedding and the head of a decoder cost a pipeline stage.

    A cost is the mean of compute and memory, both counted in parameters: a matrix that is
    multiplied counts whole, the embedding, which is looked up but has a gradient and an optimizer
    state like any other, counts half. Of experts those count that a token meets: stages wait for
    each other's arithmetic, and what the others need of memory is sharded.

    Examples:
        >>> config = DecoderConfig(
        ...     vocab_size=256, width=64, layers=2, heads=4, kv_heads=2, mlp_width=128
        ... )
        >>> decoder_costs(config)
        ([36992.0, 36992.0], 8192.0, 16384.0)
    """
    blocks = [0.0] * config.layers
    for name, shape in parameter_shapes(config).items():
        first, _, rest = name.partition(".")
        if first == "layers":
            blocks[int(rest.partition(".")[0])] += math.prod(shape)
    for layer in config.expert_layers:
        blocks[layer] -= idle_parameters(config)
    vocabulary = config.vocab_size * config.width
    return blocks, vocabulary / 2, float(vocabulary)
