"""Corpora mixed row by row: one global batch for every number of ranks, and where it comes from."""

from functools import partial
from itertools import pairwise

import attrs
import numpy as np
import pytest
import torch
from strategies import corpus_of

from trainkit.batch import batch_hash, collate_bins, count_valid_tokens
from trainkit.data.packed import PackedCorpus, concat_packed, make_data_facts, split_held_out
from trainkit.data.steps import make_step_batch
from trainkit.packing import next_fit, pack_bins
from trainkit.packing.report import bins_hash
from trainkit.sampling import MixturePhase, make_mixture_phases, sample_mixture
from trainkit.types import Cursor, DataShard, Share

ROWS = 13
TENSORS = ("input_ids", "labels", "position_ids", "document_ids", "token_index", "source")


pack_32 = partial(pack_bins, capacity=32)


def corpora(pack=pack_32):
    """Three corpora whose tokens tell which is which, packed alike."""
    packed = {}
    for number, (name, count) in enumerate({"web": 200, "code": 60, "old": 40}.items()):
        corpus = corpus_of(np.random.default_rng(number).integers(1, 50, count))
        corpus = attrs.evolve(corpus, tokens=corpus.tokens % 300 + 300 * number)
        packed[name] = PackedCorpus(corpus, pack(corpus.lengths))
    return packed


MIX = concat_packed(corpora())
PHASES = make_mixture_phases(
    MixturePhase(0, {"web": 6, "code": 3, "old": 0}), MixturePhase(7, {"web": 1}, lr_scale=0.5)
)
ROWS_AT = sample_mixture(MIX.num_rows, PHASES, rows_per_step=ROWS, seed=3)


def global_batch(step, count, *, rows_per_microbatch):
    made = [
        make_step_batch(
            MIX,
            ROWS_AT,
            Cursor(step),
            data_shard=DataShard(Share(rank, count)),
            rows_per_microbatch=rows_per_microbatch,
        )
        for rank in range(count)
    ]
    assert {one.cursor for one in made} == {Cursor(step + 1)}
    return [batch for one in made for batch in one.microbatches]


def tokens_of(batches):
    """All tokens of rows that are not blank, in the order of the global step."""
    columns = torch.stack([torch.cat([b[name].flatten() for b in batches]) for name in TENSORS], 1)
    columns = columns[columns[:, 4] >= 0]
    return columns[columns[:, 4].argsort()]


def test_rows_apart_are_the_plans_that_each_part_packs_into_and_share_no_document(tmp_path):
    corpus = corpus_of(np.arange(1, 31))
    held_out = np.arange(30) % 7 == 2
    messages = []
    for _ in range(2):
        parts = split_held_out(
            corpus, held_out, 32, multiple_of=4, seed=5, cache_dir=tmp_path, log=messages.append
        )
        for part, out in zip(parts, (False, True), strict=True):
            assert set(part.bins.documents) == set(np.flatnonzero(held_out == out))
            lengths = np.where(held_out == out, corpus.lengths, 0)
            expected = pack_bins(lengths, 32, multiple_of=4, seed=5)
            assert bins_hash(part.bins) == bins_hash(expected)
    assert len(messages) == len(list(tmp_path.iterdir())) == 2  # the second time both are there


def test_facts_follow_from_the_files_the_tokens_and_the_rows():
    corpus = attrs.evolve(corpus_of([3, 5, 2]), sources={"a.txt": "c0ffee"})
    packed = PackedCorpus(corpus, pack_bins(corpus.lengths, 8))
    facts = make_data_facts(packed)
    assert facts["files"] == {"a.txt": "c0ffee"}
    other = attrs.evolve(corpus, tokens=corpus.tokens[::-1].copy())
    assert facts["fingerprint"] != make_data_facts(PackedCorpus(other, packed.bins))["fingerprint"]
    rows = pack_bins(corpus.lengths, 16)
    assert facts["rows"] != make_data_facts(PackedCorpus(corpus, rows))["rows"]


def test_joined_rows_hold_the_tokens_of_their_own_corpus():
    packed = corpora(partial(pack_32, multiple_of=4))
    mix = concat_packed(packed)
    row = 0
    for number, (name, part) in enumerate(packed.items()):
        assert mix.num_rows[name] == len(part)
        for own in range(len(part)):
            want = [part.corpus.read(*piece).tolist() for piece in part.bins[own]]
            assert [mix.corpus.read(*piece).tolist() for piece in mix.bins[row]] == want
            assert mix.source_of([row]) == [number]
            row += 1
    assert row == len(mix) == len(mix.bins)
    assert (mix.bins.capacity, mix.bins.multiple_of) == (32, 4)
    assert list(mix.num_rows) == ["web", "code", "old"]


def test_one_corpus_alone_keeps_its_own_tables():
    alone = corpora()["web"]
    corpus, bins = alone.corpus, alone.bins
    mix = concat_packed({"web": alone})
    for name in ("offsets", "documents", "starts", "lengths"):
        assert np.shares_memory(getattr(mix.bins, name), getattr(bins, name)), name
    assert np.shares_memory(mix.corpus.offsets, corpus.offsets)
    assert mix.corpus.parts == (corpus,)
    one, other = collate_bins(mix.corpus, mix.bins, [3, 0]), collate_bins(corpus, bins, [3, 0])
    assert batch_hash([one]) == batch_hash([other])
    assert concat_packed({"all": mix}).corpus is mix.corpus
    assert mix.num_rows == {"web": len(bins)}
    assert (mix.source_of(np.arange(len(bins))) == 0).all()
    with pytest.raises(ValueError, match="bins of 'old' hold document 199, its corpus has 40"):
        concat_packed({"old": PackedCorpus(corpora()["old"].corpus, bins)})


@pytest.mark.parametrize("step", [5, 6, 7])
def test_a_mixed_step_is_the_same_for_every_number_of_ranks_and_microbatches(step):
    whole = global_batch(step, 1, rows_per_microbatch=ROWS)
    for count in (1, 2, 3, 4, 6, 8):
        for size in (1, 2, 5):
            parts = global_batch(step, count, rows_per_microbatch=size)
            assert torch.equal(tokens_of(parts), tokens_of(whole))
            assert count_valid_tokens(parts) == count_valid_tokens(whole)
            assert batch_hash(parts) == batch_hash(whole)


def test_a_run_that_goes_on_with_another_number_of_ranks_sees_the_same_steps():
    straight = [int(batch_hash(global_batch(step, 1, rows_per_microbatch=4))) for step in range(12)]
    counts = [1] * 3 + [4] * 3 + [2] * 3 + [6] * 3  # stopped and resumed at 3, 6 and 9
    resumed = [
        int(batch_hash(global_batch(step, count, rows_per_microbatch=2)))
        for step, count in enumerate(counts)
    ]
    assert resumed == straight
    assert len(set(straight)) == 12


def test_the_source_of_each_token_is_the_corpus_that_it_was_read_from():
    for batch in global_batch(2, 2, rows_per_microbatch=3):
        is_token = batch.document_ids >= 0
        assert (batch["source"][~is_token] == -1).all()
        assert torch.equal(batch.input_ids[is_token] // 300, batch["source"][is_token])


def test_every_row_of_each_corpus_comes_once_per_epoch():
    drawn = np.concatenate([ROWS_AT(step) for step in range(120)])
    begins = np.cumsum([0, *MIX.num_rows.values()])
    for begin, end in pairwise(begins[:3].tolist()):
        own = drawn[(drawn >= begin) & (drawn < end)]
        epochs = own[: len(own) // (end - begin) * (end - begin)].reshape(-1, end - begin)
        assert len(epochs) > 1
        assert (np.sort(epochs, 1) == np.arange(begin, end)).all()
    assert drawn.max() < begins[2]  # "old" has no weight


@pytest.mark.parametrize(
    ("pack", "message"),
    [
        (partial(pack_bins, capacity=48), "one capacity: 'web' has 32, 'code' has 48"),
        (
            partial(pack_32, multiple_of=2),
            "one multiple_of: 'web' has 1, 'code' has 2",
        ),
        (partial(pack_32, fit=next_fit), None),
    ],
)
def test_bins_of_different_measures_are_refused_by_name(pack, message):
    packed = corpora() | {"code": corpora(pack)["code"]}
    if message is None:
        assert len(concat_packed(packed).bins) > 0
        return
    with pytest.raises(ValueError, match=message):
        concat_packed(packed)


def test_bins_of_another_corpus_are_refused():
    packed = corpora()
    packed["old"] = PackedCorpus(packed["old"].corpus, packed["web"].bins)
    with pytest.raises(ValueError, match="bins of 'old' hold document 199, its corpus has 40"):
        concat_packed(packed)
    with pytest.raises(ValueError, match="no corpus to join"):
        concat_packed({})


def test_rows_of_sources_that_do_not_add_up_are_refused():
    with pytest.raises(ValueError, match=f"add up to the {len(MIX)} rows of bins, got .*'web': 1"):
        PackedCorpus(MIX.corpus, MIX.bins, {"web": 1})
