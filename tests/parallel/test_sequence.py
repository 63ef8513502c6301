"""Sequence parallelism: a step of a model whose tokens are spread over ring and Ulysses."""

import functools

import attrs
import every_pair
import numpy as np
import pytest
import torch
import whole_step
from torch import nn
from whole_step import CAPACITY, Layout, corpus, difference, joined, run_steps, unequal

import trainkit as tk
from trainkit.attention import sdpa
from trainkit.attention.sdpa import sdpa as plain
from trainkit.batch.shards import shard_sequence
from trainkit.data import PackedCorpus, make_eval_batches, make_microbatches, make_step_batch
from trainkit.mesh import parallel_session, solo_parallel
from trainkit.parallel.fsdp import fsdp
from trainkit.parallel.sequence_parallel import sequence_parallel
from trainkit.parallel.stages import check_plan
from trainkit.sampling import shuffle_epochs
from trainkit.text.streams import make_document_opener, pack_stream
from trainkit.tools.testing import run_ranks
from trainkit.types import ConfigError, Cursor, DataShard, Share

ALIGNMENT = 8  # of documents, in rows of 24 tokens: enough for a ring of 4
WHOLE = Share(0, 1)


reference = functools.cache(run_steps)
layout = functools.partial(Layout, multiple_of=ALIGNMENT)


def several(layouts):
    """Return what each layout gives, one after the other in the same processes."""
    return [run_steps(each) for each in layouts]


LAYOUTS = {
    "ring": layout(2, ring=2),
    "ring, parameters on all ranks": layout(2, ring=2, fold_sp="none"),
    "ring, two rows at once": layout(2, ring=2, rows_per_microbatch=2),
    "ring, tied, dropout": layout(2, ring=2, fold_sp="none", tied=True, dropout=0.3),
    "ring, full recomputation": layout(2, ring=2, recompute="full", dropout=0.3),
    "ring, selective recomputation": layout(2, ring=2, recompute="selective"),
    "ulysses": layout(2, ulysses=2),
    "ulysses, parameters on all ranks": layout(2, ulysses=2, fold_sp="ring", dropout=0.3),
    "ulysses, tied, recomputation": layout(2, ulysses=2, tied=True, recompute="full"),
    **{
        f"ring 2 x ulysses 2, fold_sp={fold_sp}": layout(4, ring=2, ulysses=2, fold_sp=fold_sp)
        for fold_sp in ("all", "ring", "ulysses", "none")
    },
    "ring 4": layout(4, ring=4),
    "ring 4, blank row": layout(4, ring=4, fold_sp="none", rows_per_microbatch=3),
    "ulysses 4, fewer key heads": layout(4, ulysses=4),
    "dp 2 x ring 2, dropout": layout(4, ring=2, dropout=0.3),
    "replicas x ring 2": layout(4, dp_replicate=2, ring=2, reduce="each"),
    "replicas x ring 2, unfolded": layout(4, dp_replicate=2, ring=2, fold_sp="none"),
    "tp 2 x ulysses 2, one key head each": layout(4, tp=2, ulysses=2, vocab_size=32),
    "pp 2 x ring 2": layout(4, pp=2, ring=2, vocab_size=32),
}


@functools.cache
def found_on(world):
    """Return what the layouts of a world give, by name, each of them as one rank would have it."""
    running = every_pair.running(LAYOUTS).items()
    here = {name: each for name, each in running if each.world == world}
    found = run_ranks(several, world, list(here.values()), timeout=180)
    # Equal on all ranks, but for stages.
    return dict(zip(here, map(joined, zip(*found, strict=True)), strict=True))


@pytest.mark.parametrize("name", every_pair.named(LAYOUTS))
def test_it_gives_the_numbers_of_one_process(name):
    each = LAYOUTS[name]
    solo = layout(tied=each.tied, dropout=each.dropout, vocab_size=each.vocab_size)
    want = reference(solo)
    whole = found_on(each.world)[name]
    assert difference(whole, want) < 1e-12
    assert whole["hashes"] == want["hashes"]
    assert whole["tokens"] == want["tokens"]


# ----------------------------------------------------------------------------------- the transform


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(1, 1)
        self.inner.attend = sdpa

    def attend(self):
        """No attribute of the instance: a model's own method is left alone."""


def on_two(*, ring):
    state = solo_parallel()
    axis = attrs.evolve(state.ring, share=Share(0, 2))
    return attrs.evolve(state, ring=axis) if ring else attrs.evolve(state, ulysses=axis)


def test_every_attend_is_replaced_and_nothing_else():
    for ring in (True, False):
        model = Attending()
        names = list(model.state_dict())
        assert sequence_parallel()(model, on_two(ring=ring)) is model
        assert model.inner.attend is not plain
        assert "attend" not in vars(model)
        assert list(model.state_dict()) == names


def test_without_ring_and_ulysses_the_model_is_left_alone():
    model = Attending()
    assert sequence_parallel()(model, solo_parallel()).inner.attend is sdpa
    assert sequence_parallel()(nn.Linear(1, 1), solo_parallel()) is not None


def test_a_model_without_attend_is_refused():
    with pytest.raises(ConfigError, match=r"ring = 2 and ulysses = 1, but no submodule of Linear"):
        sequence_parallel()(nn.Linear(1, 1), on_two(ring=True))


def test_a_plan_without_it_is_refused():
    check_plan(
        [sequence_parallel()], on_two(ring=True)
    )  # as with fold_sp="none": sync_sp_grads sums
    with pytest.raises(ConfigError, match="ring = 2, but no transform"):
        check_plan([], on_two(ring=True))


def test_a_plan_that_leaves_the_folded_ranks_to_nobody_is_refused():
    state = on_two(ring=True)
    folded = attrs.evolve(state, fsdp=attrs.evolve(state.fsdp, share=Share(0, 2)))
    check_plan([sequence_parallel(), fsdp()], folded)
    with pytest.raises(ConfigError, match=r"gradients of 2 sequence-parallel ranks to fsdp\(\)"):
        check_plan([sequence_parallel()], folded)


# ---------------------------------------------------------------------------------------- the batch

SHARDS = [
    DataShard(ring=Share(ring, rings), ulysses=Share(slice_, slices))
    for rings, slices in [(1, 1), (2, 1), (1, 3), (2, 3), (4, 1), (2, 2)]
    for ring in range(rings)
    for slice_ in range(slices)
]


def steps_of(data_shard):
    text = corpus()
    bins = tk.pack_bins(text.lengths, CAPACITY, multiple_of=ALIGNMENT)
    packed = PackedCorpus(text, bins, dict.fromkeys(range(len(bins)), 1))
    return make_step_batch(
        packed,
        shuffle_epochs(len(bins), rows_per_step=5, seed=0),
        Cursor(3),
        data_shard=data_shard,
        rows_per_microbatch=2,
        noise_seed=0,
    )


@pytest.mark.parametrize("counts", [(1, 1), (2, 1), (4, 1), (1, 3), (2, 3), (2, 2)], ids=str)
def test_the_shares_of_a_step_add_up_to_it(counts):
    whole = steps_of(DataShard()).microbatches
    parts = [
        steps_of(shard).microbatches
        for shard in SHARDS
        if (shard.ring.count, shard.ulysses.count) == counts
    ]
    assert {len(part) for part in parts} == {len(whole)} == {3}
    total = sum(int(tk.batch_hash(part)) for part in parts)
    assert (total - int(tk.batch_hash(whole))) % 2**64 == 0
    tokens = sum(int(tk.count_valid_tokens(part)) for part in parts)
    assert tokens == int(tk.count_valid_tokens(whole))
    for place, batch in enumerate(whole):
        for part in parts:
            assert part[place].spans.lengths.sum() * counts[0] == batch.input_ids.numel()
        for name in ("token_index", "noise_key", "source", "document_ids"):
            found = torch.cat([part[place][name] for part in parts], 1).sort(1).values
            assert torch.equal(found, batch[name].sort(1).values), name


def test_a_microbatch_is_the_share_of_its_microbatch():
    whole = steps_of(DataShard()).microbatches
    for shard in SHARDS:
        for part, batch in zip(steps_of(shard).microbatches, whole, strict=True):
            want = shard_sequence(batch, ring=shard.ring, ulysses=shard.ulysses)
            for name, value in want.items():
                if name != "spans":
                    assert torch.equal(part[name], value)
                    assert part[name].is_contiguous()
            assert part.spans.lengths.tolist() == want.spans.lengths.tolist()
            assert part.spans.cu_seqlens.tolist() == want.spans.cu_seqlens.tolist()
            assert part.spans.max_length == want.spans.max_length


def test_a_step_of_a_stream_is_sharded_too():
    documents = make_document_opener(lambda: iter([np.arange(n) for n in (5, 30, 9, 12)]))
    (step, *_) = pack_stream(documents, Cursor(), capacity=24, rows=2, seed=0, multiple_of=4)
    whole = make_microbatches(step.packed, range(2), rows_per_microbatch=1)
    for shard in SHARDS:
        if shard.ring.count < 4:
            parts = make_microbatches(
                step.packed, range(2), data_shard=shard, rows_per_microbatch=1
            )
            for part, batch in zip(parts, whole, strict=True):
                want = shard_sequence(batch, ring=shard.ring, ulysses=shard.ulysses)
                assert torch.equal(part.token_index, want.token_index)


def evaluations(share, *, ring=WHOLE, ulysses=WHOLE):
    text = corpus()
    bins = tk.pack_bins(text.lengths[:2], CAPACITY, multiple_of=ALIGNMENT)
    assert len(bins) == 4
    data_shard = DataShard(share, ring, ulysses)
    return list(
        make_eval_batches(PackedCorpus(text, bins), data_shard=data_shard, rows_per_batch=2)
    )


def test_an_evaluation_is_sharded_and_no_rank_is_left_without_a_batch():
    whole = [batch for rank in range(6) for batch in evaluations(Share(rank, 6))]
    (blank,) = evaluations(Share(5, 6))
    assert (blank.document_ids < 0).all()
    parts = [
        evaluations(Share(rank, 6), ring=Share(ring, 2), ulysses=Share(slice_, 2))
        for rank in range(6)
        for ring in range(2)
        for slice_ in range(2)
    ]
    assert {len(part) for part in parts} == {1}
    shapes = {tuple(batch.input_ids.shape) for part in parts for batch in part}
    assert shapes == {(2, CAPACITY // 4)}
    flat = [batch for part in parts for batch in part]
    assert (int(tk.batch_hash(flat)) - int(tk.batch_hash(whole))) % 2**64 == 0


def test_lengths_that_do_not_divide_are_refused_with_the_remedy():
    fifth = Share(0, 5)
    with pytest.raises(ConfigError, match=r"24 tokens .* ring = 5 x 2 .* multiple of 10"):
        steps_of(DataShard(ring=fifth))
    with pytest.raises(ConfigError, match=r"ring = 2 x 2 .* ulysses = 8; .* multiple of 16"):
        steps_of(DataShard(ring=Share(0, 2), ulysses=Share(0, 8)))
    with pytest.raises(ConfigError, match=r"ulysses = 5; .* multiple of 5"):
        evaluations(Share(0, 1), ulysses=fifth)
    text = corpus()
    bins = tk.pack_bins(text.lengths, CAPACITY, multiple_of=2)
    with pytest.raises(ValueError, match=r"document \d+ has \d+ tokens.* pack with multiple_of=8"):
        list(
            make_eval_batches(
                PackedCorpus(text, bins), data_shard=DataShard(ring=Share(0, 4)), rows_per_batch=4
            )
        )


# ------------------------------------------------------------------------------- planted mistakes


def restarted(batch):
    """Positions counted anew on every rank."""
    return attrs.evolve(
        batch, position_ids=torch.arange(batch.input_ids.shape[1]).expand_as(batch.input_ids)
    )


def shifted_after(batch):
    """Labels taken from the next token of the shard."""
    labels = torch.full_like(batch.labels, -100)
    labels[:, :-1] = torch.where(batch.labels[:, :-1] < 0, -100, batch.input_ids[:, 1:])
    return attrs.evolve(batch, labels=labels)


def one_document(batch):
    """The boundaries of documents forgotten."""
    rows, length = batch.input_ids.shape
    bounds = torch.arange(0, rows * length + 1, length, dtype=torch.int32)
    return attrs.evolve(batch, spans=tk.types.Spans(bounds, np.full(rows, length), length))


def nothing_summed(params, axis):
    del params, axis


def with_mistake(name):
    """Return a run on a ring of 2 with one thing done wrong."""
    of_batch = {"positions": restarted, "labels": shifted_after, "boundary": one_document}
    right = unequal, tk.sync_sp_grads
    if name in of_batch:
        whole_step.unequal = lambda batch: of_batch[name](right[0](batch))
    if name == "sync":
        tk.sync_sp_grads = nothing_summed
    found = run_steps(layout(2, ring=2, fold_sp="none"), steps=1)
    whole_step.unequal, tk.sync_sp_grads = right
    return found


def mistakes(names):
    return [with_mistake(name) for name in names]


def test_planted_mistakes_are_seen():
    names = ["positions", "labels", "boundary", "sync", "none"]
    found = run_ranks(mistakes, 2, names)[0]
    want = run_steps(layout(), steps=1)
    seen = {name: difference(run, want) for name, run in zip(names, found, strict=True)}
    assert seen.pop("none") < 1e-12
    assert min(seen.values()) > 1e-4, seen


def test_the_session_is_that_of_the_layout():
    """What the comparisons above rest on: the axes are really there."""
    for ring, ulysses, unfolded in run_ranks(axis_sizes, 4):
        assert (ring, ulysses, unfolded) == (2, 2, 2)


def axis_sizes():
    with parallel_session(ring=2, ulysses=2, fold_sp="ring") as ps:
        return ps.ring.count, ps.ulysses.count, ps.sp_unfolded.count
