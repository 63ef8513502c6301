"""Checks of a layout against a decoder and its rows, before any process group is opened.

A head or a row that does not divide would otherwise show as a shape error in the middle of the
first step, on some ranks only; under gloo, messages of unequal sizes end the process. The checks
here are pure functions of the configuration. They report everything at once, each problem in one
sentence with both numbers and what to change.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator

import torch

from trainkit.mesh import get_world_size
from trainkit.models.config import DecoderConfig
from trainkit.parallel.split import SCHEDULES, assign_stages, get_needed_microbatches
from trainkit.types import BatchShape, ConfigError, Layout

_MAX_PROBLEMS = 8  # in one message


def check_layout(
    layout: Layout,
    model: DecoderConfig | None = None,
    rows: BatchShape | None = None,
    *,
    world: int | None = None,
    device: str | None = None,
    others: Iterable[ConfigError] = (),
) -> None:
    """Raise ConfigError if a layout does not fit its processes, a decoder or the rows of a step.

    Args:
        layout: The layout.
        model: The decoder; None for any other model.
        rows: The rows of a step; None where they are not known.
        world: The number of processes; by default `mesh.get_world_size()`.
        device: The device type that the layout is for; by default a GPU if this machine has one.
        others: Problems found elsewhere, to report in the same message.

    Raises:
        ConfigError: Something does not fit. The message names everything, up to eight problems.

    Examples:
        >>> from trainkit.models.decoder_sizes import make_decoder_config
        >>> tiny, rows = make_decoder_config("tiny"), BatchShape(row_length=256, rows=8)
        >>> check_layout(Layout(ulysses=2, tp=2), tiny, rows, world=4)
        >>> check_layout(Layout(tp=3), tiny, rows, world=3)
        Traceback (most recent call last):
        trainkit.types.ConfigError: 4 heads do not divide by tp = 3; ... a row of 256 ...
    """
    world = get_world_size() if world is None else world
    problems = [*find_problems(layout, model, rows, world=world, device=device), *others]
    if problems:
        first = problems[0]
        more = len(problems) - _MAX_PROBLEMS
        # The fields are those of the first problem: an exit code has one place to name.
        text = "; and ".join(problem.what for problem in problems[:_MAX_PROBLEMS])
        text += f"; and {more} more" if more > 0 else ""
        raise ConfigError(text, where=first.where, got=first.got, want=first.want)


def find_problems(
    layout: Layout,
    model: DecoderConfig | None = None,
    rows: BatchShape | None = None,
    *,
    world: int,
    device: str | None = None,
) -> list[ConfigError]:
    """Return the errors that `check_layout` raises as one.

    Examples:
        >>> [problem.where for problem in find_problems(Layout(ep=2), world=1)]
        ['ep']
    """
    try:
        # Fills in dp_shard = -1, which all checks below need.
        layout = layout.over(world)
        assign_stages(layout.schedule, layout.pp)
    except ConfigError as error:
        return [error]  # nothing else can be computed from such a layout
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    return [
        *_find_expert_problems(layout, model),
        *_find_head_problems(layout, model),
        *_find_length_problems(layout, model, rows),
        *_find_fsdp_problems(layout, device),
        *_find_schedule_problems(layout, device),
        *_find_stage_problems(layout, model, rows),
    ]


def _divisors(*numbers: int) -> str:
    """Return the common divisors of some numbers as text: "1, 2 or 4"."""
    common = math.gcd(*numbers)
    *first, last = [str(n) for n in range(1, common + 1) if common % n == 0]
    return f"{', '.join(first)} or {last}" if first else last


def _find_expert_problems(layout: Layout, model: DecoderConfig | None) -> Iterator[ConfigError]:
    # A setting without effect is more likely a forgotten degree.
    if layout.ep == 1 and not layout.ep_adjacent:
        yield ConfigError(
            "ep_adjacent = False says where the ranks of ep are, and ep = 1; raise ep, or leave "
            "ep_adjacent out",
            where="ep_adjacent",
            got=False,
            want=True,
        )
    if model is None or layout.ep == 1:
        return
    # 1, so that the advice for a dense decoder is ep = 1.
    count = 1 if model.experts is None else model.experts.count
    if model.experts is None or count % layout.ep:
        text = f"{count} experts do not divide by"
        if model.experts is None:
            text = "this decoder has no experts to shard over"
        yield ConfigError(
            f"{text} ep = {layout.ep}; set ep to {_divisors(count)}",
            where="ep",
            got=layout.ep,
            want=f"a divisor of {count}",
        )


def _find_head_problems(layout: Layout, model: DecoderConfig | None) -> Iterator[ConfigError]:
    """Check the sizes that tp divides, then the heads of a tp rank, which Ulysses divides."""
    if model is None:
        return
    tp, ulysses = layout.tp, layout.ulysses
    # A tp that divides all sizes: the advice must not lead to the next message.
    delta_heads = 0 if model.delta is None else model.delta.key_heads
    full_heads = 0 if model.full_heads is None else model.full_heads.kv_heads
    common = _divisors(
        delta_heads, model.heads, model.kv_heads, full_heads, model.mlp_width, model.vocab_size
    )
    resize = f"set tp to {common}, or take another size of model"
    pad = f"round it up to a multiple with models.pad_vocab_size, or set tp to {common}"
    for size, subject, advice in (
        # They divide the value heads of these layers.
        (delta_heads, f"{delta_heads} key heads of delta layers do", resize),
        (model.heads, f"{model.heads} heads do", resize),
        (model.kv_heads, f"{model.kv_heads} key and value heads do", resize),
        (full_heads, f"{full_heads} key and value heads of full layers do", resize),
        (model.mlp_width, f"{model.mlp_width} columns of the MLP (mlp_width) do", resize),
        (model.vocab_size, f"a vocabulary of {model.vocab_size} does", pad),
    ):
        if size % tp:
            yield ConfigError(
                f"{subject} not divide by tp = {tp}; {advice}",
                where="tp",
                got=tp,
                want=f"a divisor of {size}",
            )
            return  # the advice covers the other sizes
    of_each = "" if tp == 1 else f" of each of tp = {tp} ranks"
    kinds = [("heads", model.heads // tp, "key and value heads", model.kv_heads // tp)]
    if full_heads:
        kinds.append(("heads", model.heads // tp, "key heads of full layers", full_heads // tp))
    if model.delta is not None:
        values, keys = model.delta.value_heads // tp, model.delta.key_heads // tp
        kinds += [("value heads of delta layers", values, "key heads of delta layers", keys)]
    for name, heads, key_name, key_heads in kinds:
        if heads % ulysses:
            yield ConfigError(
                f"{heads} {name}{of_each} do not divide by ulysses = {ulysses}; set ulysses to "
                f"{_divisors(heads)}, and split longer rows with ring",
                where="ulysses",
                got=ulysses,
                want=f"a divisor of {heads}",
            )
        # With fewer key heads than ranks, each is repeated on ulysses / key_heads of them.
        elif key_heads % ulysses and ulysses % key_heads:
            yield ConfigError(
                f"{key_heads} {key_name}{of_each} can neither be split nor repeated over ulysses = "
                f"{ulysses}; set ulysses to {_divisors(heads, key_heads)}",
                where="ulysses",
                got=ulysses,
                want=f"a divisor or a multiple of {key_heads}",
            )


def _find_length_problems(
    layout: Layout, model: DecoderConfig | None, rows: BatchShape | None
) -> Iterator[ConfigError]:
    if rows is None:
        return
    # Padding up to a multiple is in its document's span, where causal attention does not see it.
    if model is not None and model.bidirectional and (rows.multiple_of > 1 or layout.ring > 1):
        yield ConfigError(
            f"attention that is not causal would see the padding of documents, and multiple_of = "
            f"{rows.multiple_of} with ring = {layout.ring}; set both to 1, and split rows with "
            "ulysses",
            where="multiple_of",
            got=rows.multiple_of,
            want=1,
        )
    # Zigzag: rank r of the ring has the parts r and 2 * ring - 1 - r of every document.
    chunks = 2 * layout.ring if layout.ring > 1 else 1
    if rows.multiple_of % chunks:
        yield ConfigError(
            f"ring = {layout.ring} splits every piece of a row into {chunks} equal parts, and "
            f"multiple_of = {rows.multiple_of} does not divide by that; set multiple_of to "
            f"{chunks} (and start a new run: other alignment means other rows), or lower ring",
            where="multiple_of",
            got=rows.multiple_of,
            want=f"a multiple of {chunks}",
        )
    # Between blocks tp shards the sequence too, and all shards are equal.
    unit = math.lcm(chunks, layout.count("sp") * layout.tp)
    if rows.row_length % unit:
        yield ConfigError(
            f"a row of {rows.row_length} tokens does not divide over ring = {layout.ring}, ulysses "
            f"= {layout.ulysses} and tp = {layout.tp}, which need a multiple of {unit}; set "
            f"row_length to {-(-rows.row_length // unit) * unit}, or lower a degree",
            where="row_length",
            got=rows.row_length,
            want=f"a multiple of {unit}",
        )
    elif rows.row_length % rows.multiple_of:
        up = -(-rows.row_length // rows.multiple_of) * rows.multiple_of
        yield ConfigError(
            f"a row of {rows.row_length} tokens is no multiple of multiple_of = "
            f"{rows.multiple_of}, to which its pieces are rounded up; set row_length to {up}, or "
            "lower multiple_of",
            where="row_length",
            got=rows.row_length,
            want=f"a multiple of {rows.multiple_of}",
        )
    if model is not None and model.max_length is not None and rows.row_length > model.max_length:
        text = f"a context of {model.max_length}"
        advice = "set that context (open_folder takes it)"
        if model.positions is not None:
            text = f"{model.max_length} learned positions"
            advice = "take a model with rotary ones"
        yield ConfigError(
            f"a document may fill a row of {rows.row_length} tokens, and the model has {text}; set "
            f"row_length to {model.max_length}, or {advice}",
            where="row_length",
            got=rows.row_length,
            want=f"<= {model.max_length}",
        )


def _find_fsdp_problems(layout: Layout, device: str) -> Iterator[ConfigError]:
    # On a CPU there is nothing to offload, so that the option does no harm.
    if layout.cpu_offload and layout.wrapped == 1 and device != "cpu":
        yield ConfigError(
            "cpu_offload is FSDP's, which does not run where parameters are sharded over 1 rank "
            "and there is 1 replica; raise dp_shard, or leave it out",
            where="cpu_offload",
            got=True,
            want=False,
        )
    over = layout.reshard_over
    shards = layout.count("fsdp")
    if over and not layout.reshard_after_forward:
        yield ConfigError(
            f"reshard_over = {over} says where a block's parameters are after forward, and with "
            "reshard_after_forward = False they stay gathered; leave one of the two out",
            where="reshard_over",
            got=over,
            want=0,
        )
    # FSDP2 splits its mesh into shards / over groups of `over` ranks; neither may be 1.
    elif over and (shards % over or not 1 < over < shards):
        # All that FSDP2 could take, for the message.
        sizes = [str(n) for n in range(2, shards) if shards % n == 0]
        yield ConfigError(
            f"reshard_over = {over} is no part of the {shards} ranks that shard parameters; set it "
            f"to {' or '.join([*sizes, '0 for all of them'])}",
            where="reshard_over",
            got=over,
            want=f"a divisor of {shards} above 1 and below it",
        )


# --------------------------------------------------------------------------------------- pipelines


def passes_to_itself() -> bool:
    """Return whether neighboring stages can be on one rank under gloo: from torch 2.12 on."""
    return torch.__version__ >= "2.12"


def _find_schedule_problems(layout: Layout, device: str) -> Iterator[ConfigError]:
    if layout.pp == 1:
        return
    kind = SCHEDULES[layout.schedule]
    name = f"schedule = {layout.schedule!r}"
    # The two stages at the turn of a V are on one rank, which sends to itself.
    if kind.placement == "v" and device == "cpu" and not passes_to_itself():
        yield ConfigError(
            f"torch {torch.__version__} cannot run {name} on CPUs, where gloo has no connection "
            "from a rank to itself; take schedule = 'interleaved_1f1b', or torch 2.12 or later",
            where="schedule",
            got=layout.schedule,
            want="interleaved_1f1b",
        )
    # Without FSDP nothing is freed or reduced between the two halves of a backward pass.
    if not kind.splits_backward or layout.wrapped == 1:
        return
    if layout.reshard_after_forward:
        yield ConfigError(
            f"{name} splits the backward pass, and its gradients come out wrong where FSDP frees "
            f"parameters after forward, as on these {layout.wrapped} ranks; set "
            "reshard_after_forward to False, or take schedule = 'interleaved_1f1b'",
            where="reshard_after_forward",
            got=True,
            want=False,
        )
    if layout.reduce != "last":
        yield ConfigError(
            f"{name} computes gradients of weights after FSDP's hooks, so they can only be reduced "
            f"once a step; set reduce to 'last', or take schedule = 'interleaved_1f1b'",
            where="reduce",
            got=layout.reduce,
            want="last",
        )


def _find_stage_problems(
    layout: Layout, model: DecoderConfig | None, rows: BatchShape | None
) -> Iterator[ConfigError]:
    """Check that there are layers for all stages, and rows for all readers and microbatches."""
    # Over all ranks; schedules with a loop or a V have several stages on each.
    num_stages = len(assign_stages(layout.schedule, layout.pp))
    per_rank = num_stages // layout.pp
    if model is not None and layout.pp > 1 and num_stages > model.layers:
        yield ConfigError(
            f"{model.layers} layers are too few for {num_stages} stages (pp = {layout.pp}, with "
            f"{per_rank} of schedule = {layout.schedule!r} on each rank); lower pp, or take a "
            "schedule with one stage per rank or a deeper model",
            where="pp",
            got=layout.pp,
            want=f"<= {model.layers // per_rank}",
        )
    if rows is None:
        return
    # Ranks of ring, ulysses, tp and pp work on the rows of one reader together.
    readers = layout.count("dp")
    if rows.rows < readers:
        yield ConfigError(
            f"a step has {rows.rows} rows for dp_replicate x dp_shard = {readers} ranks that each "
            f"read rows of their own; set rows to {readers} or more, or lower a degree",
            where="rows",
            got=rows.rows,
            want=f">= {readers}",
        )

    def missing(count: int) -> str | None:
        return get_needed_microbatches(layout.schedule, layout.pp, num_stages, count)

    rows_at_once = readers * rows.microbatch
    # Rounded up: padding rows fill the last microbatch.
    count = -(-rows.rows // rows_at_once)
    if layout.pp > 1 and missing(count):
        # The next number of microbatches that the schedule can run.
        enough = next(n for n in itertools.count(count) if not missing(n))
        yield ConfigError(
            f"rows = {rows.rows} in microbatches of {rows.microbatch} on {readers} data-parallel "
            f"ranks make {count} in a step, and schedule = {layout.schedule!r} needs "
            f"{missing(count)}; set rows to {enough * rows_at_once}, or lower microbatch",
            where="rows",
            got=count,
            want=missing(count),
        )
