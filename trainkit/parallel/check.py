"""Whether a decoder, its rows and a layout fit together: asked before any process group is opened.

A head that does not divide, or a row, would show as a shape error in the middle of the first step,
on some ranks; unequal messages end the process under gloo. Here everything is compared at once, by
a pure function, and the first thing that does not fit is told in one sentence.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

import torch

from trainkit.mesh import FoldSP, check_degrees, folded_axes
from trainkit.models.config import DecoderConfig
from trainkit.parallel.pipeline_checks import check_microbatches
from trainkit.parallel.split import rank_of_stages, schedule_kind
from trainkit.types import ConfigError


def check_layout(
    model: DecoderConfig,
    *,
    world: int,
    degrees: Mapping[str, int],
    row_length: int,
    rows: int,
    microbatch: int,
    multiple_of: int = 1,
    fold_sp: FoldSP = "all",
    schedule: str = "1f1b",
    reshard_after_forward: bool = True,
    here: bool = True,
) -> None:
    """Refuse what does not fit, in one sentence with both numbers and what to change.

    Args:
        model: The decoder.
        world: The number of processes, for instance `mesh.world_size()`.
        degrees: pp, dp_replicate, dp_shard, ring, ulysses, tp and ep; absent ones are 1, and
            dp_shard may be -1, the rest of the world.
        row_length: Tokens in a row.
        rows: Rows in a step, over all ranks.
        microbatch: Rows in a microbatch on a rank.
        multiple_of: What the lengths of pieces in a row are rounded up to.
        fold_sp: Which sequence axes parameters are sharded over besides dp_shard.
        schedule: The pipeline schedule.
        reshard_after_forward: As given to `fsdp`.
        here: Whether it shall run with this torch on this machine, or elsewhere, as in a plan.

    Raises:
        ConfigError: The first thing that does not fit.

    Examples:
        >>> from trainkit.models.sizes import decoder_config
        >>> tiny = decoder_config("tiny")
        >>> rows = {"row_length": 256, "rows": 8, "microbatch": 4, "multiple_of": 8}
        >>> check_layout(tiny, world=4, degrees={"dp_shard": 1, "ring": 2, "tp": 2}, **rows)
        >>> check_layout(tiny, world=3, degrees={"dp_shard": 1, "tp": 3}, **rows)
        Traceback (most recent call last):
        ...
        trainkit.types.ConfigError: check_layout: 4 heads do not divide by tp = 3; ...
    """
    ones = dict.fromkeys(("pp", "dp_replicate", "dp_shard", "ring", "ulysses", "tp"), 1)
    ep = degrees.get("ep", 1)
    asked = ones | {name: degree for name, degree in degrees.items() if name != "ep"}
    filled = check_degrees(asked, ep=ep, fold_sp=fold_sp, world=world)
    _check_experts(ep)
    _check_tensor(model, tp=filled["tp"])
    _check_heads_of_ulysses(model, tp=filled["tp"], ulysses=filled["ulysses"])
    _check_rows(filled, row_length=row_length, rows=rows, multiple_of=multiple_of)
    names = ("dp_replicate", "dp_shard", *folded_axes(fold_sp))
    wrapped = math.prod(filled[name] for name in names)
    _check_schedule(schedule, pp=filled["pp"], wrapped=wrapped, reshard=reshard_after_forward)
    if here:
        _check_torch(schedule, pp=filled["pp"])
    dp = filled["dp_replicate"] * filled["dp_shard"]
    _check_stages(model, schedule, pp=filled["pp"])
    _check_microbatches(schedule, pp=filled["pp"], dp=dp, rows=rows, microbatch=microbatch)


def _refused(what: str, *, where: str, got: Any, want: Any) -> ConfigError:
    return ConfigError(f"check_layout: {what}", where=where, got=got, want=want)


def _divisors(*numbers: int) -> str:
    """Return the common divisors of some numbers as text: "1, 2 or 4"."""
    common = math.gcd(*numbers)
    *first, last = [str(n) for n in range(1, common + 1) if common % n == 0]
    return f"{', '.join(first)} or {last}" if first else last


def _check_experts(ep: int) -> None:
    if ep > 1:
        raise _refused(
            f"this decoder has no experts to split over ep = {ep} ranks; set ep to 1",
            where="ep",
            got=ep,
            want=1,
        )


def _check_tensor(model: DecoderConfig, *, tp: int) -> None:
    sizes = {
        "heads": model.heads,
        "key and value heads": model.kv_heads,
        "columns of the MLP (mlp_width)": model.mlp_width,
    }
    for name, size in sizes.items():
        if size % tp:
            raise _refused(
                f"{size} {name} do not divide by tp = {tp}; set tp to "
                f"{_divisors(*sizes.values(), model.vocab_size)}, or take another size of model",
                where="tp",
                got=tp,
                want=f"a divisor of {size}",
            )
    if model.vocab_size % tp:
        raise _refused(
            f"a vocabulary of {model.vocab_size} does not divide by tp = {tp}; round it up to a "
            f"multiple with models.round_up_vocabulary, or set tp to "
            f"{_divisors(*sizes.values(), model.vocab_size)}",
            where="tp",
            got=tp,
            want=f"a divisor of {model.vocab_size}",
        )


def _check_heads_of_ulysses(model: DecoderConfig, *, tp: int, ulysses: int) -> None:
    heads, kv_heads = model.heads // tp, model.kv_heads // tp
    of = "" if tp == 1 else f" of each of tp = {tp} ranks"
    if heads % ulysses:
        raise _refused(
            f"{heads} heads{of} do not divide by ulysses = {ulysses}; set ulysses to "
            f"{_divisors(heads)}, and split longer rows with ring",
            where="ulysses",
            got=ulysses,
            want=f"a divisor of {heads}",
        )
    if kv_heads % ulysses and ulysses % kv_heads:
        raise _refused(
            f"{kv_heads} key and value heads{of} can neither be shared out nor repeated over "
            f"ulysses = {ulysses}; set ulysses to {_divisors(heads, kv_heads)}",
            where="ulysses",
            got=ulysses,
            want=f"a divisor or a multiple of {kv_heads}",
        )


def _check_rows(
    degrees: Mapping[str, int], *, row_length: int, rows: int, multiple_of: int
) -> None:
    ring, ulysses, tp = (degrees[name] for name in ("ring", "ulysses", "tp"))
    if ring > 1 and multiple_of % (2 * ring):
        raise _refused(
            f"ring = {ring} cuts every piece of a row into {2 * ring} equal parts, and multiple_of "
            f"= {multiple_of} does not divide by that; set multiple_of to {2 * ring} (and begin a "
            f"new run: other alignment means other rows), or lower ring",
            where="multiple_of",
            got=multiple_of,
            want=f"a multiple of {2 * ring}",
        )
    unit = math.lcm(2 * ring if ring > 1 else 1, ring * ulysses * tp)
    if row_length % unit:
        raise _refused(
            f"a row of {row_length} tokens does not divide over ring = {ring}, ulysses = "
            f"{ulysses} and tp = {tp}, which need a multiple of {unit}; set row_length to "
            f"{-(-row_length // unit) * unit}, or lower a degree",
            where="row_length",
            got=row_length,
            want=f"a multiple of {unit}",
        )
    readers = degrees["dp_replicate"] * degrees["dp_shard"]
    if rows < readers:
        raise _refused(
            f"a step has {rows} rows for dp_replicate x dp_shard = {readers} ranks that each read "
            f"rows of their own; set rows to {readers} or more, or lower a degree",
            where="rows",
            got=rows,
            want=f">= {readers}",
        )


# --------------------------------------------------------------------------------------- pipelines


def _check_schedule(schedule: str, *, pp: int, wrapped: int, reshard: bool) -> None:
    kind = schedule_kind(schedule)
    if pp == 1:
        return
    if wrapped > 1 and reshard and kind.splits_backward:
        raise _refused(
            f"schedule = {schedule!r} splits the backward pass, and its gradients come out wrong "
            f"where FSDP frees parameters after forward, as on these {wrapped} ranks; set "
            "reshard_after_forward to False, or take schedule = 'interleaved_1f1b'",
            where="reshard_after_forward",
            got=True,
            want=False,
        )


def _check_torch(schedule: str, *, pp: int) -> None:
    if pp > 1 and schedule_kind(schedule).placement == "v" and not torch.cuda.is_available():
        from trainkit.parallel.torch_pipeline import passes_to_itself  # noqa: PLC0415 (slow)

        if not passes_to_itself():
            raise _refused(
                f"torch {torch.__version__} cannot run schedule = {schedule!r} on CPUs, where "
                "gloo has no connection from a rank to itself; take schedule = "
                "'interleaved_1f1b', or torch 2.13 or later",
                where="schedule",
                got=schedule,
                want="interleaved_1f1b",
            )


def _check_stages(model: DecoderConfig, schedule: str, *, pp: int) -> None:
    stages = len(rank_of_stages(schedule, pp))
    per_rank = stages // pp
    if pp > 1 and stages > model.layers:
        raise _refused(
            f"{model.layers} layers are too few for {stages} stages (pp = {pp}, with "
            f"{per_rank} of schedule = {schedule!r} on each rank); lower pp, or take a schedule "
            "with one stage per rank or a deeper model",
            where="pp",
            got=pp,
            want=f"<= {model.layers // per_rank}",
        )


def _check_microbatches(schedule: str, *, pp: int, dp: int, rows: int, microbatch: int) -> None:
    kind, stages = schedule_kind(schedule), len(rank_of_stages(schedule, pp))
    count = -(-rows // (dp * microbatch))

    def problem(count: int) -> ConfigError | None:
        try:
            check_microbatches(kind, count, ranks=pp, num_stages=stages)
        except ConfigError as error:
            return error
        return None

    found = problem(count) if pp > 1 else None
    if found is not None:
        enough = next(more for more in itertools.count(count) if problem(more) is None)
        raise _refused(
            f"rows = {rows} in microbatches of {microbatch} on {dp} data-parallel ranks make "
            f"{count} in a step, and schedule = {schedule!r} needs {found.want}; set rows to "
            f"{enough * dp * microbatch}, or lower microbatch",
            where="rows",
            got=count,
            want=found.want,
        )
