"""Ring and Ulysses attention, alone and composed, equal plain attention over the whole rows."""

import importlib
from functools import partial
from itertools import groupby

import attrs
import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from trainkit.attention import blocks, sdpa
from trainkit.attention.blocks import BlockKernel, cpu_flash
from trainkit.attention.ring import ring
from trainkit.attention.ulysses import ulysses
from trainkit.attention.varlen import varlen
from trainkit.batch import collate_bins
from trainkit.batch.shards import shard_sequence, zigzag_shard
from trainkit.data import TokenCorpus
from trainkit.mesh import parallel_session
from trainkit.packing import pack_bins
from trainkit.tools.testing import run_ranks
from trainkit.types import Axis, Share, Spans

ring_room = importlib.import_module("trainkit.attention.ring")  # `ring` is also a function


def spans_of(lengths):
    bounds = torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32)
    return Spans(bounds, np.array(lengths), max(lengths))


# ----------------------------------------------------------------------------- equality, on ranks


@attrs.frozen
class Case:
    """One comparison: what is attended to, and in which precision."""

    seed: int = 0
    lengths: tuple[int, int] = (1, 40)  # of documents, before they are padded to 2N
    rows: int = 1
    heads: int = 4
    kv_heads: int = 2
    values: int = 8  # the size of a head of values; keys have 8
    scale: float | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    causal: bool = True
    dtype: torch.dtype = torch.float64
    strided: bool = False  # a last dimension that does not lie in order


CASES = {
    "random documents": Case(),
    "several rows": Case(seed=1, rows=3, scale=0.7),
    "documents shorter than the ring": Case(seed=2, lengths=(1, 6), rows=2),
    "one document in each row": Case(seed=3, lengths=(96, 97), rows=2, kv_heads=4),
    "one long document": Case(seed=3, lengths=(96, 97), kv_heads=1),
    "one key head, odd head count": Case(seed=4, heads=3, kv_heads=1),
    "narrow values": Case(seed=5, rows=2, kv_heads=4, values=5, scale=0.3),
    "wide values": Case(seed=5, values=12),
    "a window of three tokens": Case(seed=1, rows=2, window=3),
    "a window of some chunks": Case(seed=3, lengths=(96, 97), window=29),
    "a window and a soft cap": Case(seed=5, values=5, window=11, softcap=0.5),
    "a soft cap": Case(seed=2, rows=2, scale=0.7, softcap=2.0),
    "a window as long as all": Case(seed=2, window=96),
    "sinks": Case(seed=1, rows=2, sinks=True),
    "sinks, a window, one key head": Case(
        seed=3, lengths=(9, 50), kv_heads=1, window=29, sinks=True
    ),
    "sinks, bf16": Case(seed=5, rows=2, sinks=True, dtype=torch.bfloat16),
    "both sides": Case(seed=1, rows=3, scale=0.7, causal=False),
    "both sides of one document, one key head": Case(
        seed=3, lengths=(96, 97), rows=2, kv_heads=1, causal=False
    ),
    "both sides, a soft cap and sinks": Case(
        seed=2, lengths=(1, 50), values=5, softcap=2.0, sinks=True, causal=False
    ),
    "fp32": Case(seed=5, rows=2, dtype=torch.float32),
    "strided": Case(seed=5, strided=True, values=6),
    "fp32, strided": Case(seed=5, dtype=torch.float32, strided=True),
    "bf16, strided": Case(seed=5, dtype=torch.bfloat16, strided=True),
    "fp16, strided": Case(seed=5, dtype=torch.float16, strided=True),
}
ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 4e-2, torch.float16: 5e-3}
ULYSSES = {
    "random documents": Case(seed=6, heads=8, kv_heads=4),
    "fewer key heads than ranks": Case(seed=7, heads=8, kv_heads=1, rows=2),
    "key heads shared by two ranks": Case(seed=8, heads=4, kv_heads=2, scale=0.4),
    "narrow values": Case(seed=8, kv_heads=4, values=5),
    "a window and a soft cap": Case(seed=8, heads=8, window=11, softcap=0.5),
    "narrow values, fewer key heads than ranks": Case(seed=8, kv_heads=1, values=5),
    "sinks": Case(seed=6, heads=8, kv_heads=4, rows=2, sinks=True),
    "sinks and a window": Case(seed=8, kv_heads=1, window=11, sinks=True),
    "both sides": Case(seed=6, heads=8, kv_heads=4, rows=2, sinks=True, causal=False),
    "fp32": Case(seed=9, dtype=torch.float32),
    "strided": Case(seed=9, strided=True),
}


def batch_of(case, multiple_of):
    """Return rows of 96 tokens of random documents, padded to a multiple as for a ring."""
    random = np.random.default_rng(case.seed)
    sizes = random.integers(*case.lengths, size=200)
    corpus = TokenCorpus(np.zeros(sizes.sum(), np.int64), np.cumsum([0, *sizes]))
    bins = pack_bins(sizes, 96, multiple_of=multiple_of)
    return collate_bins(corpus, bins, range(case.rows))


def results(attend, batch, case):
    """Return out, dq, dk, dv and those of sinks for the q, k, v and d_out in a batch's extra."""
    tensors = [batch[name].detach().requires_grad_() for name in ("q", "k", "v")]
    options = {"scale": case.scale, "window": case.window, "softcap": case.softcap}
    if case.sinks:
        sinks = torch.linspace(-2, 4, case.heads, dtype=case.dtype, requires_grad=True)
        tensors.append(sinks)
        options["sinks"] = sinks
    if not case.causal:
        options["causal"] = False
    out = attend(*tensors[:3], spans=batch.spans, **options)
    return [out.detach(), *torch.autograd.grad(out, tensors, batch["d_out"])]


def inputs(case, multiple_of):
    batch = batch_of(case, multiple_of)
    make = torch.Generator().manual_seed(case.seed)
    heads = {"q": case.heads, "k": case.kv_heads, "v": case.kv_heads, "d_out": case.heads}
    extra = {
        name: torch.randn(
            *batch.input_ids.shape,
            count,
            8 if name in "qk" else case.values,
            generator=make,
            dtype=torch.float64,
        )
        for name, count in heads.items()
    }
    return attrs.evolve(batch, extra={name: x.to(case.dtype) for name, x in extra.items()})


def compared(ps, case, attend):
    """Return the largest difference from `sdpa` over the whole rows, per tensor, on this rank."""
    whole = inputs(case, multiple_of=2 * ps.ring.count)
    shard = partial(shard_sequence, ring=ps.ring.share, ulysses=ps.ulysses.share)
    part = shard(whole)
    if case.strided:  # as from `qkv.unbind(-1)`
        strided = {name: torch.stack([x, x], -1)[..., 0] for name, x in part.extra.items()}
        part = attrs.evolve(part, extra=strided)
    found, want = results(attend, part, case), results(sdpa, whole, case)
    carried = attrs.evolve(whole, extra=dict(enumerate(want[:4])))
    parts = shard(carried).extra
    if case.sinks:  # a parameter, whose gradient is the sum over the ranks
        dist.all_reduce(found[4])
        parts[4] = want[4]
    assert all(a.dtype == b.dtype for a, b in zip(found, want, strict=True))
    return max(float((a - parts[i]).abs().max() / want[i].abs().max()) for i, a in enumerate(found))


# (ranks of the ring, ranks of Ulysses), by the number of ranks: a start of ranks serves them all.
LAYOUTS = {2: [(2, 1), (1, 2)], 3: [(3, 1)], 4: [(1, 4), (2, 2)], 8: [(8, 1)]}


def differences(layouts):
    """Return the largest difference of each case in each layout."""
    found = {}
    for rings, slices in layouts:
        with parallel_session(ring=rings, ulysses=slices) as ps:
            attend = ulysses(ring(ps.ring), ps.ulysses)
            for name, case in (CASES if slices == 1 else ULYSSES).items():
                found[rings, slices, name] = compared(ps, case, attend)
    return found


@pytest.mark.parametrize("world", [2, 3, 4, pytest.param(8, marks=pytest.mark.only_all)])
def test_ring_and_ulysses_equal_plain_attention(world):
    for found in run_ranks(differences, world, LAYOUTS[world]):
        for (_, slices, name), difference in found.items():
            case = (CASES if slices == 1 else ULYSSES)[name]
            assert difference < ROUNDING[case.dtype], found


def test_on_one_rank_each_is_the_attention_inside():
    solo = Axis("solo", Share(0, 1))
    assert ring(solo) is varlen
    assert ulysses(sdpa, solo) is sdpa


# ----------------------------------------------------------------------- what is computed, and when


@st.composite
def rings(draw):
    """(N, lengths of documents that divide by 2N)."""
    count = draw(st.integers(2, 8))
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    return count, [2 * count * size for size in sizes]


def pairs_computed(rank, count, lengths):
    """Return every (query, key) pair of places in the row that a rank computes, step by step."""
    bounds = np.cumsum([0, *lengths])
    places = [
        zigzag_shard(torch.arange(sum(lengths)), Share(r, count), dim=0, cu_seqlens=bounds)
        for r in range(count)
    ]
    views = ring_room._make_views(
        spans_of([n // count for n in lengths]), Axis("ring", Share(rank, count)), scale=1.0
    )
    pairs = []
    for step, view in enumerate(views):
        queries = places[rank][view.queries].split(view.block.queries.lengths.tolist())
        keys = places[(rank - step) % count][view.keys].split(view.block.keys.lengths.tolist())
        for q, k in zip(queries, keys, strict=True):
            seen = (q[:, None] >= k[None, :]) | torch.tensor(not view.block.causal)
            pairs += torch.stack(torch.meshgrid(q, k, indexing="ij"), -1)[seen].tolist()
    return pairs


@given(rings())
def test_each_rank_computes_what_can_be_seen_once_and_as_much_as_any_other(case):
    count, lengths = case
    by_rank = [pairs_computed(rank, count, lengths) for rank in range(count)]
    assert max(map(len, by_rank)) <= 1.05 * min(map(len, by_rank))
    document = np.repeat(np.arange(len(lengths)), lengths)
    visible = np.tril(document[:, None] == document[None, :])
    computed = [tuple(pair) for pairs in by_rank for pair in pairs]
    assert len(computed) == len(set(computed))
    assert set(computed) == set(zip(*map(np.ndarray.tolist, np.nonzero(visible)), strict=True))


@pytest.mark.parametrize("window", [1, 5, 16, 40])
def test_what_no_window_reaches_is_passed_over(window):
    """Scores are few more than are seen: of a rank whose keys nobody sees none."""
    q = k = torch.zeros(64, 1, 1)
    for rank in range(4):
        axis = Axis("ring", Share(rank, 4))
        for view in ring_room._make_views(spans_of([64]), axis, scale=1.0, window=window):
            block, queries, keys = view.block, q[view.queries], k[view.keys]
            places = [
                torch.cat([torch.arange(32 * x, 32 * x + 32) for x in chunks])
                for chunks in block.chunks
            ]
            before = places[0][:, None] - places[1][None]
            seen = int(((before >= 0) & (before < window)).sum())
            made = [(x.queries, x.keys) for x in blocks._split_queries(queries, keys, block)]
            scores = sum((a.stop - a.start) * max(b.stop - b.start, 0) for a, b in made)
            assert scores <= (32 + window) / window * seen + 32 * window
            assert bool(scores) == bool(seen)


class Arguments(TorchDispatchMode):
    """The devices of all that operators are given."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tensors = [x for x in tree_iter((args, kwargs)) if isinstance(x, torch.Tensor)]
        self.seen |= {x.device.type for x in tensors}
        return func(*args, **(kwargs or {}))


def test_what_is_seen_is_found_out_on_the_device():
    """Each layer asks anew: nothing may be copied there each time."""
    spans = spans_of([4, 8, 2])
    spans = attrs.evolve(spans, cu_seqlens=spans.cu_seqlens.to("meta"))
    with Arguments() as arguments:
        views = ring_room._make_views(spans, Axis("ring", Share(1, 3)), scale=1.0)
    assert {view.keys.device.type for view in views[1:2]} == arguments.seen == {"meta"}


def logged(log, name, function):
    def call(*args, **kwargs):
        log.append(name)
        return function(*args, **kwargs)

    return call


def order_of_events():
    """Return what a rank does in forward and backward, in order, and how much it sends."""
    log, sent = [], []
    real = torch.distributed.batch_isend_irecv

    def counting(ops):
        log.append("send")
        sent.append([(op.op.__name__, op.tensor.numel()) for op in ops])
        return real(ops)

    torch.distributed.batch_isend_irecv = counting
    ring_room._finish_exchange = logged(log, "wait", ring_room._finish_exchange)
    kernel = BlockKernel(
        logged(log, "compute", cpu_flash.forward), logged(log, "compute", cpu_flash.backward)
    )
    with parallel_session(ring=3) as ps:
        whole = inputs(Case(kv_heads=1, values=5), multiple_of=6)
        part = shard_sequence(whole, ring=ps.ring.share, ulysses=Share(0, 1))
        results(ring(ps.ring, kernel=kernel), part, Case())
    return log, sent


def test_keys_travel_while_blocks_are_computed_and_are_never_repeated():
    for log, sent in run_ranks(order_of_events, 3):
        forward, backward = log[:7], log[7:]
        assert forward == ["send", "compute", "wait", "send", "compute", "wait", "compute"]
        # keys on their way, compute; then gradients on their way through the next computation
        assert backward[:4] == ["send", "compute", "send", "wait"]
        assert backward[4:9] == ["send", "compute", "wait", "send", "wait"]
        assert backward[9:] == ["compute", "wait", "send", "wait"]
        one_key_head = (96 // 3) * 1 * (8 + 5)  # k, and v that is narrower
        assert sent == [[("isend", one_key_head), ("irecv", one_key_head)]] * 7


# ------------------------------------------------------------------------- inside other machinery


def compiled_and_autocast():
    with parallel_session(ring=1, ulysses=2) as ps:
        flat = ulysses(sdpa, ps.ulysses)
        uly = _compiled_difference(flat, ps, ulysses_share=ps.ulysses.share)
    with parallel_session(ring=2) as ps:
        attend = ring(ps.ring)
        ringed = _compiled_difference(attend, ps, ulysses_share=Share(0, 1))
        whole = inputs(Case(dtype=torch.float32), multiple_of=4)
        part = shard_sequence(whole, ring=ps.ring.share, ulysses=Share(0, 1))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            mixed = attend(part["q"], part["k"], part["v"].bfloat16(), spans=part.spans)
            want = sdpa(whole["q"], whole["k"], whole["v"].bfloat16(), spans=whole.spans)
        carried = attrs.evolve(whole, extra={"out": want})
        want = shard_sequence(carried, ring=ps.ring.share, ulysses=Share(0, 1))["out"]
        return uly, ringed, mixed.dtype, float((mixed - want).abs().max() / want.abs().max())


def _compiled_difference(attend, ps, *, ulysses_share):
    import warnings

    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor")  # dynamo's own

    def block(q, k, v, *, spans, scale, window, softcap):
        return 2 * attend(q + 1, k, v, spans=spans, scale=scale, window=window, softcap=softcap)

    part = shard_sequence(inputs(Case(), multiple_of=4), ring=ps.ring.share, ulysses=ulysses_share)
    found = results(torch.compile(block, backend="eager"), part, Case(scale=0.3))
    want = results(block, part, Case(scale=0.3))
    return max(float((a - b).abs().max()) for a, b in zip(found, want, strict=True))


def test_compile_leaves_both_alone_and_autocast_reaches_them():
    for uly, ringed, dtype, rounding in run_ranks(compiled_and_autocast, 2):
        assert uly == ringed == 0
        assert dtype == torch.bfloat16
        assert rounding < 2e-2


# --------------------------------------------------------------------------------------- refusals

# Axes without a process group: communication would fail with another message.
NOBODY = Axis("nobody", Share(0, 4))


def qkv_of(tokens, heads, kv_heads, *, rows=1):
    return [torch.ones(rows, tokens, count, 8) for count in (heads, kv_heads, kv_heads)]


@pytest.mark.parametrize(
    ("attend", "qkv", "lengths", "message"),
    [
        (ring(NOBODY), qkv_of(8, 2, 2), [4, 3, 1], "documents of 12, 4 tokens.*multiple_of=8"),
        (ring(NOBODY), qkv_of(8, 2, 2), [4, 2], "6 tokens, .* 1 x 8"),
        (ring(NOBODY), qkv_of(8, 3, 2), [8], "K a divisor of H"),
        (ring(NOBODY), [*qkv_of(8, 2, 2)[:2], torch.ones(1, 4, 2, 8)], [8], r"v \[B, S, K, E\]"),
        (
            ring(NOBODY),
            [*qkv_of(8, 2, 2)[:2], torch.ones(1, 8, 2, 8).half()],
            [8],
            "one floating-point dtype",
        ),
        (ulysses(sdpa, NOBODY), qkv_of(8, 6, 2), [32], "6 query heads .* 4 ranks"),
        (ulysses(sdpa, NOBODY), qkv_of(8, 12, 3), [32], "3 key heads and 4 ranks"),
        (ulysses(sdpa, NOBODY), qkv_of(8, 12, 6), [32], "6 key heads and 4 ranks"),
        (ulysses(sdpa, NOBODY), qkv_of(8, 4, 4), [8], "8 tokens, .* 1 x 32"),
        (ulysses(sdpa, NOBODY), qkv_of(8, 4, 3), [32], "K a divisor of H"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_sent(attend, qkv, lengths, message):
    with pytest.raises(ValueError, match=message):
        attend(*qkv, spans=spans_of(lengths))


# -------------------------------------------------------------------------------- planted mistakes


def planted(mistake):
    """Return the largest difference of a ring of 2 with a mistake in it."""
    case = Case(seed=1, rows=2)
    with parallel_session(ring=2) as ps:
        if mistake == "boundary":  # all documents of a row as one

            def attend(q, k, v, *, spans, scale, **seen):
                del spans, seen
                rows = spans_of([q.shape[1]] * q.shape[0])
                return ring(ps.ring)(q, k, v, spans=rows, scale=scale)

        elif mistake == "local lse":  # backward with each block's own log-sum-exp
            own = BlockKernel(
                cpu_flash.forward,
                lambda d_out, qkv, _, block: cpu_flash.backward(
                    d_out, qkv, cpu_flash.forward(qkv, block), block
                ),
            )
            attend = ring(ps.ring, kernel=own)
        else:  # contiguous shards where the ring expects zigzag ones
            zigzag = shard_sequence(inputs(case, 4), ring=ps.ring.share, ulysses=Share(0, 1))
            whole = inputs(case, 4)
            half = whole["q"].shape[1] // 2
            cut = slice(ps.ring.index * half, (ps.ring.index + 1) * half)
            qkv = [whole[name][:, cut] for name in ("q", "k", "v")]
            out = ring(ps.ring)(*qkv, spans=zigzag.spans)
            return float(
                (out - sdpa(*(whole[n] for n in "qkv"), spans=whole.spans)[:, cut]).abs().max()
            )
        return compared(ps, case, attend)


MISTAKES = ("boundary", "local lse", "contiguous")


def all_planted():
    return [planted(mistake) for mistake in MISTAKES]


def test_planted_mistakes_are_seen():
    for mistake, *seen in zip(MISTAKES, *run_ranks(all_planted, 2), strict=True):
        assert max(seen) > 1e-2, mistake


def test_runs_of_a_shard_are_its_spans():
    """What the ring reads as documents are the runs of pieces of the shard, with their padding."""
    whole = batch_of(Case(lengths=(1, 6)), multiple_of=8)
    part = shard_sequence(whole, ring=Share(1, 4), ulysses=Share(0, 1))
    pieces = [-2 - n if n < -1 else n for n in part.document_ids[0].tolist()]
    runs = [len(list(run)) for _, run in groupby(pieces)]
    assert part.spans.lengths.tolist() == runs
