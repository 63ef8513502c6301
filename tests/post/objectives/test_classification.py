"""Classes and rewards of documents: pooled outputs, their losses, and models that have them."""

import attrs
import pytest
import torch
from torch import nn

from trainkit import parallel
from trainkit.batch import collate_bins, count_documents
from trainkit.data import make_corpus
from trainkit.models import build_decoder, call_model, make_decoder_config
from trainkit.optim import make_optimizer
from trainkit.packing import pack_bins
from trainkit.post.generation import generate
from trainkit.post.objectives import bradley_terry, classify, pool_documents
from trainkit.step import forward_backward
from trainkit.tools.testing import check_packing
from trainkit.tools.testing.packing import PackingError
from trainkit.types import BatchShape, ConfigError, Layout

# Documents of 3, 1 and 4 tokens, the last with two of alignment padding; then row padding.
IDS = torch.tensor([[0, 0, 0, 1, 2, 2, 2, 2, -4, -4, -1, -1]])
POSITIONS = torch.tensor([[0, 1, 2, 0, 0, 1, 2, 3, 4, 5, 0, 1]])
SPANS = [(0, 3), (3, 4), (4, 8)]
BATCH = {"document_ids": IDS, "position_ids": POSITIONS}


def logits_of(classes, dtype=torch.float64):
    make = torch.Generator().manual_seed(0)
    return torch.randn(1, 12, classes, generator=make, dtype=dtype).requires_grad_()


POOLED = {"last": lambda x: x[-1], "first": lambda x: x[0], "mean": lambda x: x.mean(0)}


@pytest.mark.parametrize("pool", POOLED)
def test_documents_are_pooled_without_their_padding(pool):
    logits = logits_of(3)
    found = pool_documents(logits, BATCH, pool=pool)
    wanted = torch.stack([POOLED[pool](logits[0, a:b]) for a, b in SPANS])
    torch.testing.assert_close(found.outputs[0, :3], wanted)
    assert found.exists[0].tolist() == [True] * 3 + [False] * 9
    assert not found.outputs[0, 3:].any()
    half = pool_documents(logits.bfloat16(), BATCH, pool=pool)
    assert half.outputs.dtype == torch.float32
    with pytest.raises(ValueError, match="pool_documents: pool"):
        pool_documents(logits, BATCH, pool="max")


@pytest.mark.parametrize("pool", POOLED)
def test_classes_are_those_of_first_tokens_and_documents_without_one_are_left_out(pool):
    logits, classes = logits_of(5), torch.full((1, 12), 4)
    classes[0, [0, 3, 4]] = torch.tensor([2, -100, 1])
    total, terms = classify(pool=pool)(logits, BATCH | {"classes": classes})
    pooled = torch.stack([POOLED[pool](logits[0, a:b]) for a, b in (SPANS[0], SPANS[2])])
    wanted = nn.functional.cross_entropy(pooled, torch.tensor([2, 1]), reduction="sum")
    torch.testing.assert_close(total, wanted)
    assert int(terms["classification/count"]) == int(terms["accuracy/count"]) == 2
    assert float(terms["accuracy"]) == int((pooled.argmax(-1) == torch.tensor([2, 1])).sum())
    got, want = (torch.autograd.grad(x, logits)[0] for x in (total, wanted))
    torch.testing.assert_close(got, want)
    assert classify().terms == tuple(terms)


def test_the_reward_of_the_chosen_answer_shall_be_larger():
    logits = logits_of(1)
    batch = {"document_ids": torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1, -1, -1, -1, -1]])}
    batch["position_ids"] = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 0, 1, 2, 3]])
    total, terms = bradley_terry()(logits, batch)
    margin = logits[0, 4, 0] - logits[0, 7, 0]
    torch.testing.assert_close(total, -nn.functional.logsigmoid(margin))
    torch.testing.assert_close(terms["margin"], margin.detach())
    torch.testing.assert_close(terms["chosen_reward"], logits[0, 4, 0].detach())
    assert int(terms["preference/count"]) == int(count_documents([batch], halves=True)) == 1
    with pytest.raises(ValueError, match="document 2 of row 0 is the last one, and no pair"):
        bradley_terry()(logits, BATCH)
    with pytest.raises(ValueError, match=r"bradley_terry: a reward is the one output of .* got 2"):
        bradley_terry()(logits_of(2), batch)


# ------------------------------------------------------------------------------------------ models

ENCODER = make_decoder_config("tiny", layers=2, width=64, tied=False, bidirectional=True, classes=3)


def batch_of(multiple_of=1):
    random = torch.Generator().manual_seed(0)
    texts = [torch.randint(3, 200, (n,), generator=random).tolist() for n in (9, 20, 7, 15, 4, 30)]
    corpus = make_corpus(texts, vocab_size=272)
    bins = pack_bins(corpus.lengths, 64, multiple_of=multiple_of)
    batch = collate_bins(corpus, bins, range(len(bins)))
    return attrs.evolve(batch, extra={"classes": batch.input_ids % 3})


@pytest.mark.parametrize("head", ["logits", "hidden"])
def test_an_encoder_sees_all_of_a_document_and_nothing_of_others(head):
    model = build_decoder(ENCODER, seed=0, head=head)
    batch = batch_of()
    assert model.head.weight.shape == (3, 64)
    check_packing(model, batch=batch)
    pooled = pool_documents(call_model(model, batch), batch, pool="first").outputs
    ids = batch.input_ids.clone()
    ids[0, 8] = (ids[0, 8] + 1) % 200  # a later token of the first document
    assert batch.document_ids[0, 8] == 0
    assert batch.position_ids[0, 8] > 0
    changed = call_model(model, attrs.evolve(batch, input_ids=ids))
    moved = (pool_documents(changed, batch, pool="first").outputs - pooled).abs().amax(-1) > 0
    assert moved.nonzero().tolist() == [[0, 0]]


def test_padding_inside_of_documents_would_be_seen_and_its_layouts_are_refused():
    with pytest.raises(PackingError, match="check_packing: Decoder computes document"):
        check_packing(build_decoder(ENCODER, seed=0), batch=batch_of(multiple_of=8))
    for layout, multiple_of in ((Layout(), 8), (Layout(ring=2), 4)):
        shape = BatchShape(row_length=64, rows=2, multiple_of=multiple_of)
        with pytest.raises(ConfigError, match="not causal would see the padding of documents"):
            parallel.check_layout(layout, ENCODER, shape, world=layout.world)
    shape = BatchShape(row_length=64, rows=2)
    parallel.check_layout(Layout(ulysses=2), ENCODER, shape, world=2)


def test_an_encoder_learns_the_classes_of_documents():
    model, batch = build_decoder(ENCODER, seed=0), batch_of()
    optimizer = make_optimizer([model], lr=3e-3)
    losses = []
    for _ in range(30):
        denominator = count_documents([batch])
        sums = forward_backward(
            model, [batch], classify(pool="mean"), denominator=denominator, call=call_model
        )
        losses.append(float(sums["classification"] / sums["classification/count"]))
        optimizer.step()
        optimizer.zero_grad()
    assert losses[0] == pytest.approx(1.1, abs=0.5)  # near log 3
    assert losses[-1] < 0.1


def test_what_needs_causal_attention_or_a_head_of_words_is_refused():
    base = make_decoder_config("tiny", layers=1, bidirectional=True)
    for changes, message in (
        ({"tied": True, "classes": 3}, "tied must be False, with a head of classes"),
        ({"classes": 0.5}, "classes"),
    ):
        with pytest.raises(ValueError, match=message):
            attrs.evolve(base, **changes)
    model = build_decoder(base, seed=0)
    with pytest.raises(ValueError, match="KVCache: a token that is generated sees none after"):
        generate(model, [[1, 2, 3]], max_new_tokens=2, context=8)
