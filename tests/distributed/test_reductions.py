"""Metrics and hashes over real ranks."""

import pytest
import torch

import trainkit as tk
from trainkit.tools.testing import run_ranks


def reduced():
    with tk.parallel_session() as ps:
        rank = ps.world.index
        sums = {"loss": torch.tensor(0.1 * (rank + 1)), "tokens": torch.tensor(2**50 * rank + 1)}
        return {
            name: (v.item(), str(v.dtype)) for name, v in tk.reduce_metrics(sums, ps.loss).items()
        }


def test_metrics_are_summed_over_ranks_in_one_packed_reduction():
    for found in run_ranks(reduced, 3):
        assert found["tokens"] == (3 * 2**50 + 3, "torch.int64")
        assert found["loss"] == (pytest.approx(0.6, rel=1e-7), "torch.float32")


def batch_hash_of(rows_per_microbatch):
    from whole_step import CAPACITY, ROWS, corpus

    text = corpus()
    bins = tk.pack_bins(text.lengths, CAPACITY)
    with tk.parallel_session() as ps:
        made = tk.make_step_batch(
            tk.PackedCorpus(text, bins),
            tk.sampling.shuffle_epochs(len(bins), rows_per_step=ROWS, seed=0),
            tk.Cursor(),
            data_shard=ps.data_shard,
            rows_per_microbatch=rows_per_microbatch,
        )
        return int(tk.all_sum(tk.batch_hash(made.microbatches), ps.loss))


def test_the_batch_hash_is_the_same_for_every_cut_and_blank_rows_add_nothing():
    found = {batch_hash_of(rows) for rows in (1, 2, 3, 4)}
    found |= {h for world in (2, 3, 4) for h in run_ranks(batch_hash_of, world, 2)}
    assert len(found) == 1
