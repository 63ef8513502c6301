"""The layers of each pipeline stage, and the stages of each rank: pure arithmetic.

A *stage* is a run of consecutive layers. A rank holds one stage, or several: in a loop (rank r of P
has the stages r, P + r, ...), or in a V (r and 2P - 1 - r), where the first rank also has the last
stage.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Literal

import attrs

from trainkit.models.config import DecoderConfig, idle_parameters, parameter_shapes
from trainkit.types import ConfigError


@attrs.frozen
class ScheduleKind:
    """The properties of a pipeline schedule.

    Attributes:
        torch_name: Its class in torch.distributed.pipelining.
        placement: The stages of a rank: one, a loop or a V.
        splits_backward: Whether it computes the gradients of inputs and of weights at different
            times.
    """

    torch_name: str
    placement: Literal["one", "loop", "v"]
    splits_backward: bool = False


SCHEDULES = {
    "gpipe": ScheduleKind("ScheduleGPipe", "one"),
    "1f1b": ScheduleKind("Schedule1F1B", "one"),
    "interleaved_1f1b": ScheduleKind("ScheduleInterleaved1F1B", "loop"),
    "looped_bfs": ScheduleKind("ScheduleLoopedBFS", "loop"),
    "interleaved_zero_bubble": ScheduleKind(
        "ScheduleInterleavedZeroBubble", "loop", splits_backward=True
    ),
    "zero_bubble_v": ScheduleKind("ScheduleZBVZeroBubble", "v", splits_backward=True),
    "dual_pipe_v": ScheduleKind("ScheduleDualPipeV", "v", splits_backward=True),
}
"""The pipeline schedules by name.

GPipe (Huang et al., 2019); 1F1B (Narayanan et al., "PipeDream", 2019) and its interleaved form (the
same, "Efficient large-scale language model training on GPU clusters", 2021); breadth-first looping
(Lamy-Poirier, 2023); zero bubble and its V (Qi et al., 2024); DualPipeV (DeepSeek-V3, 2024).
"""


# By placement: the fewest and the most stages that a rank can have, and the default.
_STAGES_PER_RANK = {
    "one": (1, 1, 1),
    "loop": (1, math.inf, 2),
    "v": (2, 2, 2),
}


def get_schedule_kind(schedule: str) -> ScheduleKind:
    """Return the properties of a schedule by its name.

    Raises:
        ConfigError: There is no such schedule.

    Examples:
        >>> get_schedule_kind("zero_bubble_v").placement
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
        per_rank: The number of stages on each rank; by default the least of the schedule, or 2 in a
            loop.

    Raises:
        ConfigError: The schedule is unknown, or cannot have this number of stages on a rank.

    Examples:
        >>> assign_stages("1f1b", 4)
        (0, 1, 2, 3)
        >>> assign_stages("interleaved_1f1b", 2)
        (0, 1, 0, 1)
        >>> assign_stages("dual_pipe_v", 2)
        (0, 1, 1, 0)
    """
    placement = get_schedule_kind(schedule).placement
    fewest, most, default = _STAGES_PER_RANK[placement]
    num_stages = default if per_rank is None else per_rank
    if not fewest <= num_stages <= most:
        fitting = "one" if num_stages == 1 else "loop"
        names = [name for name, kind in SCHEDULES.items() if kind.placement == fitting]
        raise ConfigError(
            f"the schedule {schedule} has {fewest} stage(s) on each rank, got {num_stages}; those "
            f"with {num_stages} are {', '.join(names)}",
            where="stages_per_rank",
            got=num_stages,
            want=fewest,
        )
    if placement == "v":
        return (*range(ranks), *reversed(range(ranks)))
    return tuple(stage % ranks for stage in range(ranks * num_stages))


def get_needed_microbatches(schedule: str, ranks: int, stages: int, count: int) -> str | None:
    """Return the number of microbatches that a schedule needs, as text; None if it can run `count`.

    Args:
        schedule: A name of `SCHEDULES`.
        ranks: The size of the pipeline axis.
        stages: The total number of stages.
        count: The number of microbatches in a step.

    Examples:
        >>> get_needed_microbatches("1f1b", 4, 4, 4)
        >>> get_needed_microbatches("1f1b", 4, 4, 2)
        'at least 4 for 4 stages'
    """
    fewest = stages if schedule in ("1f1b", "dual_pipe_v") else 1
    if count < fewest:
        return f"at least {fewest} for {stages} stages"
    rounds = max(1, count // ranks)  # as torch computes it: microbatches run in equal rounds
    if schedule in ("interleaved_1f1b", "interleaved_zero_bubble") and count % rounds:
        return f"a multiple of {rounds}, for rounds of at least {ranks} (such as {rounds * ranks})"
    return None


# ------------------------------------------------------------------------------------------- split


def split_layer_ranges(
    costs: Sequence[float], num_stages: int, *, first: float = 0.0, last: float = 0.0
) -> list[range]:
    """Split layers into consecutive stages that minimize the cost of the most expensive stage.

    Of all such splits it returns the one with the least sum of squared costs, so that the other
    stages are balanced too, and of those the one that gives a remainder to the first stages (the
    last one has the head). Every stage has at least one layer.

    Args:
        costs: The cost of each layer, in any unit.
        num_stages: The number of stages.
        first: The cost of the first stage besides its layers: the embedding.
        last: The cost of the last stage besides its layers: the head and the loss.

    Returns:
        The layer indices of each stage.

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

    def find_best(
        limit: float, combine: Callable[[float, float], float]
    ) -> tuple[float, list[int]]:
        # Dynamic programming over stages. best[j]: the total of the first j layers in the stages so
        # far, and the first layer of each stage.
        best: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}
        for stage in range(num_stages):
            extra = first * (stage == 0) + last * (stage == num_stages - 1)
            following: dict[int, tuple[float, list[int]]] = {}
            # Every earlier and every later stage has a layer, too.
            for end in range(stage + 1, count - num_stages + stage + 2):
                for start, (total, starts) in best.items():
                    cost = sums[end] - sums[start] + extra
                    if start >= end or cost > limit:
                        continue
                    combined = combine(total, cost)
                    # Of equal totals, up to rounding, the later start: fewer layers in this stage.
                    if end not in following or combined <= following[end][0] * (1 + 1e-12):
                        following[end] = combined, [*starts, start]
            best = following
        return best[count]

    # First the lowest maximum, then among the splits within it the lowest sum of squares.
    highest, _ = find_best(math.inf, max)
    _, starts = find_best(highest * (1 + 1e-9), lambda total, cost: total + cost**2)
    ends = [*starts[1:], count]
    return [range(start, end) for start, end in zip(starts, ends, strict=True)]


def decoder_costs(config: DecoderConfig) -> tuple[list[float], float, float]:
    """Return the cost of each block, of the embedding and of the head of a decoder.

    A cost is the mean of compute and memory, both in parameters. A matrix counts fully. The
    embedding counts half: it is looked up, but has a gradient and an optimizer state like any other
    matrix. Only the experts that a token uses count: stages wait for each other's arithmetic, and
    the memory of all experts is sharded.

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
