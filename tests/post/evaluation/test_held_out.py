"""The loss on held-out rows: that of `evaluate`, with the current weights."""

import numpy as np
import pytest
import torch
from strategies import corpus_of
from whole_step import CONFIG

import trainkit as tk
from trainkit.data import PackedCorpus, make_eval_batches
from trainkit.losses import next_token
from trainkit.models import build_decoder
from trainkit.post.evaluation import make_evaluator
from trainkit.tools.testing import run_ranks

LENGTHS = [5, 3, 8, 2, 7]


def found_by(ranks_share, *, steps=1):
    """Return what the held-out rows cost before and after the weights are moved."""
    corpus = corpus_of(LENGTHS)
    held = PackedCorpus(corpus, tk.pack_bins(corpus.lengths, 8))
    model, found = build_decoder(CONFIG, seed=0), []
    with tk.parallel_session(tk.Layout(dp_replicate=ranks_share)) as ps:
        evaluate = make_evaluator(model, held, next_token, rows_per_batch=2, axis=ps.loss)
        for _ in range(steps + 1):
            found.append(evaluate())
            with torch.no_grad():
                model.embedding.weight.mul_(2)
    return found


def test_ranks_find_the_loss_of_all_rows_each_time_anew():
    corpus, model = corpus_of(LENGTHS), build_decoder(CONFIG, seed=0)
    held = PackedCorpus(corpus, tk.pack_bins(corpus.lengths, 8))
    batches = make_eval_batches(held, rows_per_batch=2)
    wanted = tk.to_host(tk.evaluate(model, batches, next_token, axis=tk.solo_parallel().loss))
    one, two = (run_ranks(found_by, world, world)[0] for world in (1, 2))
    assert one[0] == wanted
    assert one[1]["loss"] != one[0]["loss"]
    assert wanted["tokens"] == int(np.sum(LENGTHS)) - len(LENGTHS)
    for mine, theirs in zip(one, two, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-6)
