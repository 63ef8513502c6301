"""Cross entropy over a cut vocabulary is that of the whole one, without the whole logits."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trainkit import collectives, losses
from trainkit.collectives import sum_grad
from trainkit.losses import by_source
from trainkit.mesh import axis_from_group, solo_parallel
from trainkit.parallel import vocabulary
from trainkit.parallel.vocabulary import (
    vocabulary_cross_entropy,
    vocabulary_linear_cross_entropy,
    vocabulary_z_loss,
)
from trainkit.testing import run_ranks

TOKENS, WIDTH, WORDS = (2, 7), 8, 24
LABELS = {
    "some ignored": lambda labels: labels.masked_fill(labels % 5 == 0, -100),
    "all ignored": lambda labels: torch.full_like(labels, -100),
    "none ignored": lambda labels: labels,
}


def drawn(*shape, seed, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator).to(dtype)


def drawn_labels():
    return torch.randint(WORDS, TOKENS, generator=torch.Generator().manual_seed(3))


def world_axis():
    assert torch.distributed.group.WORLD is not None
    return axis_from_group(torch.distributed.group.WORLD, name="tp")


def part(x, axis, dim):
    """Return this rank's part of a whole, as a leaf."""
    return x.detach().chunk(axis.count, dim)[axis.index].clone().requires_grad_()


def difference(a, b):
    assert a.shape == b.shape
    assert a.dtype == b.dtype
    scale = b.abs().max().item()
    return (a - b).abs().max().item() / (scale or 1.0)


def of_logits(axis, labels, ours, theirs, *, dtype=torch.float64):
    """Return the difference of a loss of logits and of their gradient from the whole one's."""
    whole = (5 * drawn(*TOKENS, WORDS, seed=0, dtype=dtype)).requires_grad_()
    whole.data[0, 0, : WORDS // axis.count] = -math.inf  # one rank's words are all ruled out
    labels = labels.clone()
    labels[0, 0] = WORDS - 1 if int(labels[0, 0]) >= 0 else -100
    own = part(whole, axis, -1)
    total, wanted = ours(own, labels, axis), theirs(whole, labels)
    (total * 3).backward()
    (wanted * 3).backward()
    grads = own.grad, whole.grad.chunk(axis.count, -1)[axis.index]
    return max(difference(total, wanted), difference(*grads))


def of_hidden(axis, labels, chunk, *, dtype=torch.float64):
    """Return the same of hidden states and a weight."""
    hidden = drawn(*TOKENS, WIDTH, seed=1, dtype=dtype).requires_grad_()
    weight = drawn(WORDS, WIDTH, seed=2, dtype=dtype).requires_grad_()
    again, own = hidden.detach().clone().requires_grad_(), part(weight, axis, 0)
    total = vocabulary_linear_cross_entropy(sum_grad(again, axis), own, labels, axis, chunk=chunk)
    wanted = losses.linear_cross_entropy(hidden, weight, labels)
    (total * 3).backward()
    (wanted * 3).backward()
    grads = own.grad, weight.grad.chunk(axis.count, 0)[axis.index]
    pairs = (total, wanted), grads, (again.grad, hidden.grad)
    return max(difference(*pair) for pair in pairs)


def differences():
    axis, found = world_axis(), {}
    for name, mask in LABELS.items():
        labels = mask(drawn_labels())
        found[name, "logits"] = of_logits(
            axis, labels, vocabulary_cross_entropy, losses.cross_entropy
        )
        found[name, "z"] = of_logits(axis, labels, vocabulary_z_loss, losses.z_loss)
        for chunk in (1, 4, None):
            found[name, chunk] = of_hidden(axis, labels, chunk)
    labels = LABELS["some ignored"](drawn_labels())
    low = {
        "logits": of_logits(
            axis, labels, vocabulary_cross_entropy, losses.cross_entropy, dtype=torch.bfloat16
        ),
        "hidden": of_hidden(axis, labels, 4, dtype=torch.bfloat16),
    }
    return found, low


@pytest.mark.parametrize("world", [2, 3, 4])
def test_values_and_gradients_are_those_of_the_whole_vocabulary(world):
    for found, low in run_ranks(differences, world):
        assert max(found.values()) < 1e-12, found
        assert max(low.values()) < 2e-2, low  # a unit of bf16 is 8e-3


class Sizes(TorchDispatchMode):
    """The sizes of all tensors that are made as wide as a rank's vocabulary."""

    def __init__(self, words):
        super().__init__()
        self.words, self.rows = words, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.shape[1:] == (self.words,):
            self.rows.append(len(out))
        return out


def cost():
    """Return how many numbers were sent, and how many rows of logits there were at a time."""
    axis, sent = world_axis(), []
    hidden = drawn(*TOKENS, 3, seed=1).requires_grad_()
    weight = part(drawn(WORDS, 3, seed=2), axis, 0)
    reduce = collectives.dist.all_reduce
    with pytest.MonkeyPatch.context() as patch, Sizes(WORDS // axis.count) as sizes:
        patch.setattr(
            collectives.dist, "all_reduce", lambda x, **k: (sent.append(x.numel()), reduce(x, **k))
        )
        total = vocabulary_linear_cross_entropy(hidden, weight, drawn_labels(), axis, chunk=4)
        total.backward()
    return sum(sent), len(sent), max(sizes.rows)


def test_what_is_sent_does_not_grow_with_the_vocabulary_and_logits_exist_a_chunk_at_a_time():
    chunks = -(-math.prod(TOKENS) // 4)
    for numbers, calls, rows in run_ranks(cost, 2):
        assert numbers == 3 * math.prod(TOKENS)
        assert calls == 2 * chunks
        assert rows == 4


def broken():
    """Return which gradients are NaN when one rank's logits are, and at an ignored token too."""
    axis, rows = world_axis(), []
    for value in (math.nan, math.inf):
        logits = torch.zeros(3, 4, dtype=torch.float64)
        if axis.index == 1:
            logits[0, 2] = logits[2, 1] = value
        logits.requires_grad_()
        vocabulary_cross_entropy(logits, torch.tensor([1, 2, -100]), axis).backward()
        rows.append(logits.grad.isnan().all(-1).tolist())
    return rows


def test_a_broken_logit_on_one_rank_breaks_its_row_on_all():
    for rows in run_ranks(broken, 2):
        assert rows == [[True, False, True]] * 2


def as_losses():
    """Return the terms of our losses by source, and those of one process."""
    axis = world_axis()
    hidden, weight = drawn(*TOKENS, WIDTH, seed=1), drawn(WORDS, WIDTH, seed=2)
    labels = LABELS["some ignored"](drawn_labels())
    batch = {"labels": labels, "source": torch.arange(14).view(TOKENS) % 2}
    names = ["web", "code"]
    own = weight.chunk(axis.count)[axis.index].requires_grad_()
    with torch.no_grad():
        found = by_source(names, vocabulary.next_token(axis))(hidden @ own.T, batch)
    assert not found[0].requires_grad
    linear = by_source(names, vocabulary.next_token_linear(axis))((hidden, own), batch)
    assert linear[0].requires_grad
    assert not any(term.requires_grad for term in linear[1].values())
    z = vocabulary.z_term(axis)(hidden @ own.T, batch)
    wanted = by_source(names)(hidden @ weight.T, batch)
    whole = losses.z_term(hidden @ weight.T, batch)
    return [
        difference(a[1][name].double(), b[1][name].double())
        for a, b in ((found, wanted), (linear, wanted), (z, whole))
        for name in b[1]
    ]


def test_as_losses_they_report_the_same_terms_by_source_too():
    for found in run_ranks(as_losses, 2):
        assert len(found) == 11
        assert max(found) < 1e-12


def test_at_size_one_they_are_the_plain_losses():
    axis = solo_parallel().tp
    assert vocabulary.next_token(axis) is losses.next_token
    assert vocabulary.next_token_linear(axis) is losses.next_token_linear
    assert vocabulary.z_term(axis) is losses.z_term


def test_what_does_not_fit_is_refused():
    axis, hidden = solo_parallel().tp, torch.zeros(3, 4)
    labels = torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ValueError, match="labels must have shape"):
        vocabulary_cross_entropy(hidden, labels[:2], axis)
    with pytest.raises(ValueError, match="labels must be int64"):
        vocabulary_z_loss(hidden, labels.int(), axis)
    with pytest.raises(ValueError, match="weight must have shape"):
        vocabulary_linear_cross_entropy(hidden, torch.zeros(2, 3), labels, axis)
    with pytest.raises(ValueError, match="one dtype"):
        vocabulary_linear_cross_entropy(hidden, torch.zeros(2, 4).double(), labels, axis)
    with pytest.raises(ValueError, match="chunk must be at least 1"):
        vocabulary_linear_cross_entropy(hidden, torch.zeros(2, 4), labels, axis, chunk=0)
