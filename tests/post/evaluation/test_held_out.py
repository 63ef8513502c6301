"""The loss on held-out rows: that of `evaluate`, with the current weights."""

from functools import partial

import attrs
import numpy as np
import pytest
import torch
from strategies import corpus_of
from whole_step import CONFIG

import trainkit as tk
from trainkit.data import PackedCorpus, make_eval_batches
from trainkit.losses import next_token, next_token_linear
from trainkit.metrics import adapt_metric, compose_metrics, make_accuracy, make_max
from trainkit.models import Decoder, build_decoder, init_weights
from trainkit.models.decoder import whole_logits
from trainkit.parallel import fsdp, tensor_parallel
from trainkit.post.evaluation import make_evaluator
from trainkit.tools.testing import run_ranks

LENGTHS = [5, 3, 8, 2, 7]
EVEN = attrs.evolve(CONFIG, vocab_size=32)  # which divides over two ranks


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


def read_logits(output, batch):
    """Return the inputs of a composition, from logits or from what a head="hidden" returns."""
    logits = whole_logits(output)
    largest = logits[batch["labels"] >= 0]
    return ({"accuracy": (logits, batch["labels"]), "largest": (largest,)},)


def make_metric():
    return adapt_metric(
        compose_metrics({"accuracy": make_accuracy(top_k=3), "largest": make_max()}), read_logits
    )


def measured(layout):
    """Return the loss and the metric of held-out rows in a layout."""
    corpus = corpus_of(LENGTHS)
    held = PackedCorpus(corpus, tk.pack_bins(corpus.lengths, 8))
    with tk.parallel_session(layout) as ps:
        stages = tk.build_stages(
            partial(Decoder, EVEN, head="hidden"),
            ps,
            [tensor_parallel(), fsdp(layout)],
            weights=init_weights(EVEN, seed=0),
        )
        evaluate = make_evaluator(
            stages, held, next_token_linear, rows_per_batch=2, metric=make_metric()
        )
        return evaluate()


@pytest.mark.parametrize(
    "layout", [tk.Layout(dp_shard=2), tk.Layout(tp=2), tk.Layout(pp=2)], ids=["dp", "tp", "pp"]
)
def test_a_metric_is_that_of_one_process_in_any_layout(layout):
    corpus, model = corpus_of(LENGTHS), build_decoder(EVEN, seed=0)
    held = PackedCorpus(corpus, tk.pack_bins(corpus.lengths, 8))
    (logits,) = (
        model(b["input_ids"], position_ids=b["position_ids"], spans=b["spans"]).detach()
        for b in make_eval_batches(held, rows_per_batch=4)
    )
    (batch,) = make_eval_batches(held, rows_per_batch=4)
    labels = batch["labels"]
    best = logits.topk(3).indices == labels[..., None]
    wanted = {
        "accuracy": float(best.any(-1)[labels >= 0].double().mean()),
        "largest": float(logits[labels >= 0].max()),
    }
    assert 0 < wanted["accuracy"] < 1
    for found in run_ranks(measured, 2, layout):
        assert found["accuracy"] == wanted["accuracy"]
        assert found["largest"] == pytest.approx(wanted["largest"], rel=1e-5)
        assert found["tokens"] == int((labels >= 0).sum())


def test_a_metric_without_names_or_with_those_of_the_loss_is_refused():
    model = build_decoder(CONFIG, seed=0)
    for metric, message in (
        (make_accuracy(), r"need names: compose_metrics\(\{name: metric\}\)"),
        (compose_metrics({"loss": make_max()}), r"both report \['loss'\]"),
        (compose_metrics({"tokens": make_max()}), r"both report \['tokens'\]"),
    ):
        with pytest.raises(ValueError, match=message):
            tk.evaluate(model, [], next_token, metric=metric)


def measured_unevenly():
    """Return the metric where the first rank has all batches and the other computes along."""
    corpus, model = corpus_of(LENGTHS), build_decoder(CONFIG, seed=0)
    held = PackedCorpus(corpus, tk.pack_bins(corpus.lengths, 8))
    batches = list(make_eval_batches(held, rows_per_batch=1))
    with tk.parallel_session() as ps:
        own = batches[:-1] if ps.world.index == 0 else batches[-1:]
        metric = make_metric()
        return tk.to_host(tk.evaluate(model, own, next_token, metric=metric, axis=ps.loss))


def test_a_batch_that_is_computed_along_is_not_measured_again():
    one, first, second = (*run_ranks(measured_alone, 1), *run_ranks(measured_unevenly, 2))
    assert first == second
    assert first == pytest.approx(one, rel=1e-12)


def measured_alone():
    corpus, model = corpus_of(LENGTHS), build_decoder(CONFIG, seed=0)
    held = PackedCorpus(corpus, tk.pack_bins(corpus.lengths, 8))
    batches = make_eval_batches(held, rows_per_batch=1)
    return tk.to_host(tk.evaluate(model, batches, next_token, metric=make_metric()))
