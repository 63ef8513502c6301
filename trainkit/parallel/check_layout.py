"""Whether a decoder, its rows and a layout fit together: asked before any process group is opened.

A head that does not divide, or a row, would show as a shape error in the middle of the first step,
on some ranks; unequal messages end the process under gloo. Here everything is compared at once, by
a pure function, and each thing that does not fit is told in one sentence, with both numbers and
what to change.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

import torch

from trainkit.mesh import get_world_size
from trainkit.models.config import DecoderConfig
from trainkit.parallel.split import SCHEDULES, assign_stages, microbatches_wanted
from trainkit.types import BatchShape, ConfigError, Layout


def problems(
    layout: Layout,
    model: DecoderConfig | None = None,
    rows: BatchShape | None = None,
    *,
    world: int,
    device: str | None = None,
) -> list[ConfigError]:
    """Return all that does not fit together, as errors that nobody has raised yet; see `refuse`.

    Args:
        layout: The layout.
        model: The decoder; None where the model is another, or not known yet.
        rows: What a step is fed; None where it is not known.
        world: The number of processes, for instance `mesh.get_world_size()`.
        device: The type of what it shall run on; by default a GPU where this machine has one.

    Examples:
        >>> from trainkit.models.decoder_sizes import make_decoder_config
        >>> tiny, rows = (
        ...     make_decoder_config("tiny"),
        ...     BatchShape(row_length=256, rows=8, multiple_of=8),
        ... )
        >>> problems(Layout(ring=2, tp=2), tiny, rows, world=4)
        []
        >>> print(*problems(Layout(tp=3), tiny, rows, world=3), sep=chr(10))
        4 heads do not divide by tp = 3; ...
        a row of 256 tokens does not divide over ...
    """
    try:
        layout = layout.over(world)
        assign_stages(layout.schedule, layout.pp)
    except ConfigError as error:
        return [error]
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    found: list[ConfigError] = []
    if model is not None:
        found += _of_model(layout, model)
    if rows is not None:
        found += _of_rows(layout, rows)
    if model is not None and rows is not None:
        found += _of_reach(model, rows)
    found += [*_of_experts(layout), *_of_offload(layout, device), *_of_reshards(layout)]
    found += _of_schedule(layout, device)
    if model is not None:
        found += _of_stages(layout, model)
    if rows is not None:
        found += _of_microbatches(layout, rows)
    return found


_NAMED = 8  # problems of a layout


def refuse(problems: Sequence[ConfigError]) -> None:
    """Raise some problems as one, in the order of their finding; of many the first eight are named.

    Raises:
        ConfigError: There is one.

    Examples:
        >>> refuse(problems(Layout(tp=2), world=2))
    """
    if problems:
        first, more = problems[0], len(problems) - _NAMED
        what = "; and ".join(problem.what for problem in problems[:_NAMED])
        what += f"; and {more} more" if more > 0 else ""
        raise ConfigError(what, where=first.where, got=first.got, want=first.want)


def check_layout(
    layout: Layout,
    model: DecoderConfig | None = None,
    rows: BatchShape | None = None,
    *,
    others: Iterable[ConfigError] = (),
) -> None:
    """Refuse a layout that does not fit a model and its rows on the processes that there are.

    Args:
        layout: The layout.
        model: The decoder; None where the model is another.
        rows: What a step is fed; None where it is not known.
        others: Problems that were found elsewhere, for one message with these.

    Raises:
        ConfigError: Something does not fit; the message names all of it.

    Examples:
        >>> check_layout(Layout(tp=1))
    """
    found = problems(layout, model, rows, world=get_world_size())
    refuse([*found, *others])


def _divisors(*numbers: int) -> str:
    """Return the common divisors of some numbers as text: "1, 2 or 4"."""
    common = math.gcd(*numbers)
    *first, last = [str(n) for n in range(1, common + 1) if common % n == 0]
    return f"{', '.join(first)} or {last}" if first else last


def _of_model(layout: Layout, model: DecoderConfig) -> Iterator[ConfigError]:
    experts = model.experts
    if layout.ep > 1 and (experts is None or experts.count % layout.ep):
        what = "this decoder has no experts to deal to"
        if experts is not None:
            what = f"{experts.count} experts do not divide by"
        ways = "1" if experts is None else _divisors(experts.count)
        yield ConfigError(
            f"{what} ep = {layout.ep}; set ep to {ways}",
            where="ep",
            got=layout.ep,
            want=f"a divisor of {experts.count if experts else 1}",
        )
    common = _divisors(model.heads, model.kv_heads, model.mlp_width, model.vocab_size)
    of_model = f"set tp to {common}, or take another size of model"
    of_words = f"round it up to a multiple with models.pad_vocab_size, or set tp to {common}"
    for size, what, way_out in (
        (model.heads, f"{model.heads} heads do", of_model),
        (model.kv_heads, f"{model.kv_heads} key and value heads do", of_model),
        (model.mlp_width, f"{model.mlp_width} columns of the MLP (mlp_width) do", of_model),
        (model.vocab_size, f"a vocabulary of {model.vocab_size} does", of_words),
    ):
        if size % layout.tp:
            yield ConfigError(
                f"{what} not divide by tp = {layout.tp}; {way_out}",
                where="tp",
                got=layout.tp,
                want=f"a divisor of {size}",
            )
            return
    yield from _of_heads(layout, model.heads // layout.tp, model.kv_heads // layout.tp)


def _of_heads(layout: Layout, heads: int, kv_heads: int) -> Iterator[ConfigError]:
    """Yield why Ulysses cannot share out the heads that a rank of tensor parallelism has."""
    ulysses = layout.ulysses
    of = "" if layout.tp == 1 else f" of each of tp = {layout.tp} ranks"
    if heads % ulysses:
        yield ConfigError(
            f"{heads} heads{of} do not divide by ulysses = {ulysses}; set ulysses to "
            f"{_divisors(heads)}, and split longer rows with ring",
            where="ulysses",
            got=ulysses,
            want=f"a divisor of {heads}",
        )
    elif kv_heads % ulysses and ulysses % kv_heads:
        yield ConfigError(
            f"{kv_heads} key and value heads{of} can neither be shared out nor repeated over "
            f"ulysses = {ulysses}; set ulysses to {_divisors(heads, kv_heads)}",
            where="ulysses",
            got=ulysses,
            want=f"a divisor or a multiple of {kv_heads}",
        )


def _of_rows(layout: Layout, rows: BatchShape) -> Iterator[ConfigError]:
    ring, chunks = layout.ring, 2 * layout.ring if layout.ring > 1 else 1
    if rows.multiple_of % chunks:
        yield ConfigError(
            f"ring = {ring} cuts every piece of a row into {chunks} equal parts, and multiple_of "
            f"= {rows.multiple_of} does not divide by that; set multiple_of to {chunks} (and begin "
            "a new run: other alignment means other rows), or lower ring",
            where="multiple_of",
            got=rows.multiple_of,
            want=f"a multiple of {chunks}",
        )
    unit = math.lcm(chunks, layout.count("sp") * layout.tp)
    if rows.row_length % unit:
        yield ConfigError(
            f"a row of {rows.row_length} tokens does not divide over ring = {ring}, ulysses = "
            f"{layout.ulysses} and tp = {layout.tp}, which need a multiple of {unit}; set "
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
    readers = layout.count("dp")
    if rows.rows < readers:
        yield ConfigError(
            f"a step has {rows.rows} rows for dp_replicate x dp_shard = {readers} ranks that each "
            f"read rows of their own; set rows to {readers} or more, or lower a degree",
            where="rows",
            got=rows.rows,
            want=f">= {readers}",
        )


def _of_reach(model: DecoderConfig, rows: BatchShape) -> Iterator[ConfigError]:
    """Yield why a document may be longer than positions reach."""
    if model.max_length is None or rows.row_length <= model.max_length:
        return
    learned = model.positions is not None
    has = f"{model.max_length} learned positions" if learned else f"a context of {model.max_length}"
    other = "take a model with rotary ones" if learned else "say that context (open_folder does)"
    yield ConfigError(
        f"a document may fill a row of {rows.row_length} tokens, and the model has {has}; set "
        f"row_length to {model.max_length}, or {other}",
        where="row_length",
        got=rows.row_length,
        want=f"<= {model.max_length}",
    )


def _of_experts(layout: Layout) -> Iterator[ConfigError]:
    if layout.ep == 1 and not layout.ep_adjacent:
        yield ConfigError(
            "ep_adjacent = False says where the ranks of ep are, and ep = 1; raise ep, or leave "
            "ep_adjacent out",
            where="ep_adjacent",
            got=False,
            want=True,
        )


def _of_offload(layout: Layout, device: str) -> Iterator[ConfigError]:
    """On a CPU there is nothing to offload, and nothing lost."""
    if layout.cpu_offload and layout.wrapped == 1 and device != "cpu":
        yield ConfigError(
            "cpu_offload is FSDP's, which does not run where parameters are sharded over 1 rank "
            "and there is 1 replica; raise dp_shard, or leave it out",
            where="cpu_offload",
            got=True,
            want=False,
        )


def _of_reshards(layout: Layout) -> Iterator[ConfigError]:
    over, shards = layout.reshard_over, layout.count("fsdp")
    if over and not layout.reshard_after_forward:
        yield ConfigError(
            f"reshard_over = {over} says where a block's parameters are after forward, and with "
            "reshard_after_forward = False they stay gathered; leave one of the two out",
            where="reshard_over",
            got=over,
            want=0,
        )
    elif over and (shards % over or not 1 < over < shards):
        fit = [str(n) for n in range(2, shards) if shards % n == 0]
        yield ConfigError(
            f"reshard_over = {over} is no part of the {shards} ranks that shard parameters; set it "
            f"to {' or '.join([*fit, '0 for all of them'])}",
            where="reshard_over",
            got=over,
            want=f"a divisor of {shards} above 1 and below it",
        )


# --------------------------------------------------------------------------------------- pipelines


def _of_schedule(layout: Layout, device: str) -> Iterator[ConfigError]:
    if layout.pp == 1:
        return
    kind, told = SCHEDULES[layout.schedule], f"schedule = {layout.schedule!r}"
    if kind.placement == "v" and device == "cpu" and not passes_to_itself():
        yield ConfigError(
            f"torch {torch.__version__} cannot run {told} on CPUs, where gloo has no connection "
            "from a rank to itself; take schedule = 'interleaved_1f1b', or torch 2.12 or later",
            where="schedule",
            got=layout.schedule,
            want="interleaved_1f1b",
        )
    if not kind.splits_backward or layout.wrapped == 1:
        return
    if layout.reshard_after_forward:
        yield ConfigError(
            f"{told} splits the backward pass, and its gradients come out wrong where FSDP frees "
            f"parameters after forward, as on these {layout.wrapped} ranks; set "
            "reshard_after_forward to False, or take schedule = 'interleaved_1f1b'",
            where="reshard_after_forward",
            got=True,
            want=False,
        )
    if layout.reduce != "last":
        yield ConfigError(
            f"{told} computes gradients of weights after FSDP's hooks, so they can only be reduced "
            f"once a step; set reduce to 'last', or take schedule = 'interleaved_1f1b'",
            where="reduce",
            got=layout.reduce,
            want="last",
        )


def passes_to_itself() -> bool:
    """Say whether this torch can have neighbouring stages on one rank under gloo: from 2.12 on."""
    return torch.__version__ >= "2.12"


def _of_stages(layout: Layout, model: DecoderConfig) -> Iterator[ConfigError]:
    stages = len(assign_stages(layout.schedule, layout.pp))
    per_rank = stages // layout.pp
    if layout.pp > 1 and stages > model.layers:
        yield ConfigError(
            f"{model.layers} layers are too few for {stages} stages (pp = {layout.pp}, with "
            f"{per_rank} of schedule = {layout.schedule!r} on each rank); lower pp, or take a "
            "schedule with one stage per rank or a deeper model",
            where="pp",
            got=layout.pp,
            want=f"<= {model.layers // per_rank}",
        )


def _of_microbatches(layout: Layout, rows: BatchShape) -> Iterator[ConfigError]:
    stages, at_once = len(assign_stages(layout.schedule, layout.pp)), layout.count("dp")
    at_once *= rows.microbatch
    count = -(-rows.rows // at_once)

    def wanted(count: int) -> str | None:
        return microbatches_wanted(layout.schedule, layout.pp, stages, count)

    if layout.pp > 1 and wanted(count):
        enough = next(more for more in itertools.count(count) if not wanted(more))
        yield ConfigError(
            f"rows = {rows.rows} in microbatches of {rows.microbatch} on {layout.count('dp')} "
            f"data-parallel ranks make {count} in a step, and schedule = {layout.schedule!r} needs "
            f"{wanted(count)}; set rows to {enough * at_once}, or lower microbatch",
            where="rows",
            got=count,
            want=wanted(count),
        )
