"""Weights are what a token counts as: in the sum, in the denominator, in means of means."""

import pytest
import torch
from torch import nn

from trainkit.batch import count_documents, count_weights, shard_batch
from trainkit.batch.denominators import divide_terms
from trainkit.losses import (
    add_router_losses,
    add_terms,
    average_terms,
    declare_terms,
    next_token,
    next_token_linear,
    report_by_source,
    weight_by_document,
    weight_by_microbatch,
    weighted_next_token,
    z_term,
)
from trainkit.mesh import axis_from_group
from trainkit.step import forward_backward
from trainkit.tools.testing import run_ranks
from trainkit.types import SOLO, Hidden, RoutedOutput, Share

V, D = 11, 6


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def make_batch(rows=3, tokens=8, seed=0):
    """Return rows of two documents each, of unequal numbers of trained tokens."""
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(V, (rows, tokens), generator=draw)
    labels = labels.masked_fill(torch.rand(rows, tokens, generator=draw) < 0.4, -100)
    ids = (torch.arange(tokens) >= 5).long().expand(rows, tokens)
    positions = (torch.arange(tokens) % 5).expand(rows, tokens)
    x = drawn(rows, tokens, D, seed=seed)
    weights = torch.rand(rows, tokens, generator=draw)
    return {
        "x": x,
        "labels": labels,
        "weights": weights,
        "document_ids": ids,
        "position_ids": positions,
        "source": ids,
    }


def call(model, batch):
    return Hidden(batch["x"], model.weight)


def model_of():
    model = nn.Linear(D, V, bias=False, dtype=torch.float64)
    model.weight.data.copy_(drawn(V, D, seed=9))
    return model


def gradient(batches, loss, denominator):
    model = model_of()
    sums = forward_backward(model, batches, loss, denominator=denominator, call=call)
    return model.weight.grad, sums


def rows_of(batch, *rows):
    return {name: x[list(rows)] for name, x in batch.items()}


def plain(batch, weights):
    """Return the gradient of sum(weights * loss), whatever was written about it elsewhere."""
    model = model_of()
    logits, labels = batch["x"] @ model.weight.T, batch["labels"]
    rows = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    (rows.view(labels.shape) * weights).sum().backward()
    return model.weight.grad


def test_a_weight_of_three_tenths_is_three_tenths():
    batch = make_batch()
    batch["weights"] = torch.full_like(batch["weights"], 0.3 / 12)
    kept = batch["labels"] != -100
    total = count_weights([batch])
    assert float(total) == pytest.approx(float(kept.sum()) * 0.3 / 12, rel=1e-7)
    assert total < 0.5
    even = plain(batch, kept.double() / kept.sum())
    found, sums = gradient([rows_of(batch, 0), rows_of(batch, 1, 2)], weighted_next_token, total)
    torch.testing.assert_close(found, even)
    mean = average_terms(sums, torch.tensor(1))["loss"]
    torch.testing.assert_close(
        mean, next_token_linear(call(model_of(), batch), batch)[0].detach() / kept.sum()
    )


def test_weights_stand_in_the_sum_and_in_the_denominator():
    batch = make_batch()
    kept = batch["labels"] != -100
    weights = batch["weights"].double() * kept
    found, sums = gradient([batch], weighted_next_token, count_weights([batch]))
    torch.testing.assert_close(found, plain(batch, weights / weights.sum()))
    torch.testing.assert_close(sums["loss/count"], weights.sum())


def test_sources_and_other_terms_go_with_weights():
    batch = make_batch()
    output = call(model_of(), batch)
    total, terms = report_by_source(["a", "b"], weighted_next_token)(output, batch)
    assert tuple(terms) == report_by_source(["a", "b"], weighted_next_token).terms
    for number, name in enumerate("ab"):
        own = {**batch, "labels": batch["labels"].masked_fill(batch["source"] != number, -100)}
        want, counted = weighted_next_token(output, own)[1].values()
        torch.testing.assert_close(terms[f"loss/{name}"], want)
        torch.testing.assert_close(terms[f"loss/{name}/count"], counted)
    assert torch.equal(total, weighted_next_token(output, batch)[0])
    both, terms = add_terms((weighted_next_token, 2.0), (z_term, 0.5))(output, batch)
    torch.testing.assert_close(both, 2 * total + 0.5 * z_term(output, batch)[0])
    assert tuple(terms) == ("loss", "loss/count", "z_loss")
    logits = output[0] @ output[1].T
    torch.testing.assert_close(weighted_next_token(logits, batch)[0], total)


@declare_terms("even", "odd")
def even_and_odd(output, batch):
    """Sum the losses of even and of odd labels, each with its own denominator."""
    sums = {}
    for remainder, name in enumerate(("even", "odd")):
        labels = batch["labels"].masked_fill(batch["labels"] % 2 != remainder, -100)
        sums[name] = next_token(output, {**batch, "labels": labels})[0]
    return sums, {name: x.detach() for name, x in sums.items()}


@pytest.mark.parametrize("linear", [False, True])
def test_losses_with_denominators_of_their_own_are_added_by_name(linear):
    batch = make_batch()
    hidden, weight = call(model_of(), batch)[:2]
    logits = hidden @ weight.T
    output = (hidden, weight) if linear else logits
    of_tokens, even_odd = next_token_linear if linear else next_token, even_and_odd
    if linear:
        even_odd = declare_terms("even", "odd")(lambda _, batch: even_and_odd(logits, batch))
    loss = add_terms((even_odd, 3.0), (of_tokens, 2.0), (z_term, 0.5))
    totals, terms = loss(output, batch)
    parts = even_and_odd(logits, batch)[0]
    plain = add_terms((of_tokens, 2.0), (z_term, 0.5))(output, batch)[0]
    wanted = {"loss": plain, "even": 3 * parts["even"], "odd": 3 * parts["odd"]}
    assert totals.keys() == wanted.keys()
    for name, x in wanted.items():
        torch.testing.assert_close(totals[name], x)
    assert tuple(terms) == loss.terms == ("even", "odd", "loss", "z_loss")
    torch.testing.assert_close(terms["even"], parts["even"])
    denominators = {"loss": torch.tensor(5), "even": torch.tensor(2), "odd": torch.tensor(3)}
    found = divide_terms(totals, denominators)
    torch.testing.assert_close(found, plain / 5 + 1.5 * parts["even"] + parts["odd"])


def test_router_losses_go_with_a_loss_that_has_denominators_of_its_own():
    output = RoutedOutput(torch.zeros(1, 2, 4), torch.tensor([[2.0, 4.0, 0.0, 1.0, 1.0]]))
    batch = {"labels": torch.tensor([[1, 2]]), "document_ids": torch.zeros(1, 2)}
    totals, _ = add_router_losses(even_and_odd, balance=0.5)(output, batch)
    assert {name: x.ndim for name, x in totals.items()} == {"even": 0, "odd": 0, "balance": 0}


def test_a_batch_without_weights_is_told_so():
    batch = {name: x for name, x in make_batch().items() if name != "weights"}
    with pytest.raises(ValueError, match='has no "weights" for each of its labels'):
        weighted_next_token(call(model_of(), batch), batch)
    with pytest.raises(ValueError, match='count_weights: a microbatch has no "weights"'):
        count_weights([batch])


def unweighted(batch):
    return {name: x for name, x in batch.items() if name != "weights"}


def mean_of_means(batches):
    """Return the gradient of the mean over microbatches of their means, empty ones left out."""
    parts = [(unweighted(b), (b["labels"] != -100).sum()) for b in batches]
    parts = [(b, count) for b, count in parts if count]
    return sum(gradient([b], next_token_linear, count)[0] for b, count in parts) / len(parts)


def test_the_mean_of_microbatch_means_is_that_of_other_systems():
    batch = unweighted(make_batch())
    batches = [rows_of(batch, 0), rows_of(batch, 1, 2), rows_of(batch, 0)]
    batches[2]["labels"] = torch.full_like(batches[2]["labels"], -100)
    own = weight_by_microbatch(batches, axis=SOLO)
    assert float(count_weights(own)) == pytest.approx(2)
    found, _ = gradient(own, weighted_next_token, count_weights(own))
    torch.testing.assert_close(found, mean_of_means(batches))
    all_tokens = sum((b["labels"] != -100).sum() for b in batches)
    assert not torch.allclose(found, gradient(batches, next_token_linear, all_tokens)[0])
    assert all("weights" not in b for b in batches)


def test_the_mean_of_documents_counts_each_once():
    batch = unweighted(make_batch())
    batch["labels"][1, 5:] = -100  # a document of which nothing is trained
    (own,) = weight_by_document([batch], axis=SOLO)
    assert int(count_documents([batch])) == 6
    assert int(count_documents([batch], halves=True)) == 3
    trained = batch["labels"] != -100
    parts = [
        (row, trained[row] & (batch["document_ids"][row] == i)) for row in range(3) for i in (0, 1)
    ]
    parts = [(row, here) for row, here in parts if here.any()]
    assert float(count_weights([own])) == pytest.approx(len(parts))
    assert 3 <= len(parts) < 6
    for row, here in parts:
        assert float(own["weights"][row][here].sum()) == pytest.approx(1)
        assert own["weights"][row][here].unique().numel() == 1


def cut(batch, share):
    """Give a rank every second token: all that lies along the row, as ring and Ulysses do."""
    return {name: x[:, share.index :: share.count] for name, x in batch.items()}


def dealt_means():
    axis = axis_from_group(torch.distributed.group.WORLD, name="sp")
    batch = unweighted(make_batch())
    found = []
    for mean in (weight_by_microbatch, weight_by_document):
        (whole,) = mean([batch], axis=SOLO)
        (part,) = mean([cut(batch, axis.share)], axis=axis)
        found.append(float((part["weights"] - cut(whole, axis.share)["weights"]).abs().max()))
    return found


def test_means_of_what_is_dealt_over_ranks_are_those_of_the_whole():
    for found in run_ranks(dealt_means, 2):
        assert max(found) < 1e-15
    assert count_documents([cut(make_batch(), Share(i, 2)) for i in range(2)]) == 6


def test_a_batch_keeps_its_kind():
    from trainkit.tools.testing.builtin import decoder_batch

    batch = decoder_batch(0)
    (own,) = weight_by_microbatch([batch], axis=SOLO)
    assert own.spans is batch.spans
    part = shard_batch(own, Share(1, 2))
    assert part["weights"].shape == part["labels"].shape
