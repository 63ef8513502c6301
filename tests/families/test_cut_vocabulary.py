"""Cross entropy over a cut vocabulary is that of the whole one, without the whole logits."""

import math
from itertools import product

import pytest
import torch
from operators import OperatorMode

from trainkit import collectives, losses
from trainkit.collectives import sum_grad
from trainkit.losses import report_by_source, softmax
from trainkit.losses.softmax import scores_
from trainkit.mesh import axis_from_group
from trainkit.models.decoder import whole_logits
from trainkit.post.evaluation import score
from trainkit.post.objectives import teachers
from trainkit.tools.testing import run_ranks
from trainkit.types import SOLO, Axis, Hidden, Share, apply_softcap

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


# How many of the words each rank has; by default equal parts. torch's Shard(0) of 9 words gives
# two ranks 5 and 4; of 4 words three ranks 2, 2 and none.
UNEQUAL = {2: [(13, 11), (24, 0)], 3: [(8, 9, 7), (0, 20, 4)]}


def split(x, axis, dim, sizes=None):
    """Return this rank's part of a whole."""
    return x.split(sizes or (WORDS // axis.count,) * axis.count, dim)[axis.index]


def part(x, axis, dim, sizes=None):
    """Return this rank's part of a whole, as a leaf."""
    return split(x.detach(), axis, dim, sizes).clone().requires_grad_()


def difference(a, b):
    assert a.shape == b.shape
    assert a.dtype == b.dtype
    a, b = a.detach(), b.detach()
    if not b.numel():
        return 0.0
    scale = float(b.abs().max())
    return float((a - b).abs().max()) / (scale or 1.0)


def of_logits(axis, labels, loss, *, dtype=torch.float64, sizes=None):
    """Return the difference of a loss of logits and of their gradient from the whole one's."""
    whole = (5 * drawn(*TOKENS, WORDS, seed=0, dtype=dtype)).requires_grad_()
    whole.data[0, 0, : WORDS // axis.count] = -math.inf  # one rank's words are all ruled out
    labels = labels.clone()
    labels[0, 0] = WORDS - 1 if int(labels[0, 0]) >= 0 else -100
    own = part(whole, axis, -1, sizes)
    total, wanted = loss(own, labels, axis=axis), loss(whole, labels)
    (total * 3).backward()
    (wanted * 3).backward()
    grads = own.grad, split(whole.grad, axis, -1, sizes)
    return max(difference(total, wanted), difference(*grads))


def weighed(logits, labels, *, axis=SOLO):
    """Use each token's loss for a sum that is no plain sum."""
    each = losses.cross_entropy_per_token(logits, labels, axis=axis)
    return (each * torch.linspace(0.5, 2, 14).view(TOKENS)).square().sum()


def weighed_linear(hidden, weight, labels, **options):
    each = losses.token_logprobs(hidden, weight, labels, **options)
    return (each * torch.linspace(0.5, 2, 14).view(TOKENS)).square().sum()


def of_hidden(
    axis,
    labels,
    loss=losses.linear_cross_entropy,
    *,
    chunk=None,
    dtype=torch.float64,
    sizes=None,
):
    """Return the same of hidden states, a weight and a bias."""
    whole = drawn(*TOKENS, WIDTH, seed=1), drawn(WORDS, WIDTH, seed=2), drawn(WORDS, seed=4)
    hidden, weight, bias = (x.to(dtype).requires_grad_() for x in whole)
    again = hidden.detach().clone().requires_grad_()
    own, own_bias = part(weight, axis, 0, sizes), part(bias, axis, 0, sizes)
    total = loss(sum_grad(again, axis), own, labels, bias=own_bias, axis=axis, chunk=chunk)
    wanted = loss(hidden, weight, labels, bias=bias)
    (total * 3).backward()
    (wanted * 3).backward()
    pairs = [(total, wanted), (again.grad, hidden.grad)]
    for mine, x in ((own, weight), (own_bias, bias)):
        pairs.append((mine.grad, split(x.grad, axis, 0, sizes)))
    return max(difference(*pair) for pair in pairs)


def differences():
    axis, found = world_axis(), {}
    for name, mask in LABELS.items():
        labels = mask(drawn_labels())
        for loss in (losses.cross_entropy, losses.z_loss, weighed):
            found[name, loss.__name__] = of_logits(axis, labels, loss)
        for chunk in (1, 4, None):
            found[name, chunk] = of_hidden(axis, labels, chunk=chunk)
        found[name, "weighed"] = of_hidden(axis, labels, weighed_linear, chunk=4)
    labels = LABELS["some ignored"](drawn_labels())
    low = {
        "logits": of_logits(axis, labels, losses.cross_entropy, dtype=torch.bfloat16),
        "hidden": of_hidden(axis, labels, chunk=4, dtype=torch.bfloat16),
    }
    for sizes in UNEQUAL.get(axis.count, []):
        for loss in (losses.cross_entropy, losses.z_loss, weighed):
            found[sizes, loss.__name__] = of_logits(axis, labels, loss, sizes=sizes)
        for chunk in (4, None):
            found[sizes, chunk] = of_hidden(axis, labels, chunk=chunk, sizes=sizes)
        found[sizes, "weighed"] = of_hidden(axis, labels, weighed_linear, chunk=4, sizes=sizes)
    return found, low


@pytest.mark.parametrize("world", [2, 3, 4])
def test_values_and_gradients_are_those_of_the_whole_vocabulary(world):
    for found, low in run_ranks(differences, world):
        assert max(found.values()) < 1e-12, found
        assert max(low.values()) < 2e-2, low  # a unit of bf16 is 8e-3


class Sizes(OperatorMode):
    """The sizes of all tensors that are made as wide as a rank's vocabulary."""

    def __init__(self, words):
        super().__init__(self.watch)
        self.words, self.rows = words, []

    def watch(self, _, result):
        if isinstance(result, torch.Tensor) and result.shape[1:] == (self.words,):
            self.rows.append(len(result))


def cost():
    """Return how many numbers were sent, and how many rows of logits there were at a time."""
    axis, sent = world_axis(), []
    hidden = drawn(*TOKENS, 3, seed=1).requires_grad_()
    weight = part(drawn(WORDS, 3, seed=2), axis, 0)
    reduce = collectives.dist.all_reduce
    with pytest.MonkeyPatch.context() as patch, Sizes(WORDS // axis.count) as sizes:
        patch.setattr(
            collectives.dist,
            "all_reduce",
            lambda x, *, op, group: (sent.append(x.numel()), reduce(x, op=op, group=group)),
        )
        labels = drawn_labels()
        total = losses.linear_cross_entropy(hidden, weight, labels, axis=axis, chunk=4)
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
        losses.cross_entropy(logits, torch.tensor([1, 2, -100]), axis=axis).backward()
        rows.append(logits.grad.isnan().all(-1).tolist())
    return rows


def test_a_broken_logit_on_one_rank_breaks_its_row_on_all():
    for rows in run_ranks(broken, 2):
        assert rows == [[True, False, True]] * 2


def farthest(logits, batch):
    """A loss that is no function of cross entropy and log-sum-exp, and needs all words."""
    total = (logits.amax(-1) - logits.mean(-1)).masked_fill(batch["labels"] < 0, 0).square().sum()
    return total, {"far": total.detach()}


FARTHEST = losses.declare_terms("far")(farthest)
AS_LOSSES = {
    "by source": report_by_source(["web", "code"], losses.next_token_linear),
    "z": losses.z_term,
    "two terms": losses.add_terms((losses.next_token_linear, 0.7), (losses.z_term, -0.2)),
    "any term": losses.chunk_loss(FARTHEST, chunk=4),
    "three": losses.add_terms(
        (losses.next_token_linear, 0.7),
        (losses.chunk_loss(FARTHEST, chunk=4), 0.3),
        (losses.z_term, 0.1),
    ),
}
ON_LOGITS = {
    "by source": report_by_source(["web", "code"]),
    "z": losses.z_term,
    "two terms": losses.add_terms((losses.next_token, 0.7), (losses.z_term, -0.2)),
    "any term": FARTHEST,
    "three": losses.add_terms((losses.next_token, 0.7), (FARTHEST, 0.3), (losses.z_term, 0.1)),
}


def of_output(axis, sizes=None):
    """Return how far our losses of a `Hidden` are from those of whole logits, gradients too."""
    labels = LABELS["some ignored"](drawn_labels())
    batch = {"labels": labels, "source": torch.arange(14).view(TOKENS) % 2, "spans": None}
    found = {}
    for (name, loss), softcap in product(AS_LOSSES.items(), (None, 0.7)):
        hidden, weight = drawn(*TOKENS, WIDTH, seed=1), drawn(WORDS, WIDTH, seed=2)
        again, own = hidden.clone().requires_grad_(), part(weight, axis, 0, sizes)
        total, terms = loss(Hidden(sum_grad(again, axis), own, axis, softcap), batch)
        hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
        wanted, wanted_terms = ON_LOGITS[name](apply_softcap(hidden @ weight.T, softcap), batch)
        assert list(terms) == list(wanted_terms) == list(loss.terms)
        assert total.requires_grad
        assert not any(term.requires_grad for term in terms.values())
        (2 * total).backward()
        (2 * wanted).backward()
        pairs = [(terms[term].double(), wanted_terms[term].double()) for term in terms]
        pairs += [(total, wanted), (again.grad, hidden.grad)]
        pairs += [(own.grad, split(weight.grad, axis, 0, sizes))]
        found[name, softcap] = max(difference(*pair) for pair in pairs)
        with torch.no_grad():
            alone, _ = loss(Hidden(again, own, axis, softcap), batch)
        assert not alone.requires_grad
        assert torch.equal(alone, total)
    return found


def scored(axis, sizes):
    """Return whether scores and the likeliest words of a `Hidden` are those of whole logits."""
    hidden, weight = drawn(*TOKENS, WIDTH, seed=1), drawn(WORDS, WIDTH, seed=2)
    labels = drawn_labels()
    labels[0] = (hidden @ weight.T).argmax(-1)[0]
    output = Hidden(hidden, part(weight, axis, 0, sizes).detach(), axis)
    logprobs, best = score.token_scores(output, labels)
    wanted, wanted_best = score.token_scores(hidden @ weight.T, labels)
    many = WORDS - 1  # more than a rank has
    found = teachers.likeliest(split(hidden @ weight.T, axis, -1, sizes)[0], many, axis)
    top = (hidden @ weight.T)[0].topk(many)
    return (
        difference(logprobs, wanted) < 1e-12
        and torch.equal(best, wanted_best)
        and torch.equal(found[0], top.indices)
        and difference(whole_logits(output), hidden @ weight.T) < 1e-12
    )


def outputs():
    axis = world_axis()
    found = {None: of_output(axis)} | {x: of_output(axis, x) for x in UNEQUAL[axis.count]}
    assert all(scored(axis, sizes) for sizes in [None, *UNEQUAL[axis.count]])
    return {(sizes, *key): far for sizes, each in found.items() for key, far in each.items()}


def test_every_loss_of_hidden_states_is_that_of_whole_logits_in_terms_and_gradients():
    for found in (of_output(SOLO), *run_ranks(outputs, 2)):
        assert max(found.values()) < 1e-12, found


def two_vocabularies():
    """Return losses of vocabularies whose parts are equal on rank 0 alone, by turns."""
    axis, found, requests = world_axis(), [], []
    hidden = drawn(*TOKENS, WIDTH, seed=1)
    owns = [drawn(5 - axis.index * fewer, WIDTH, seed=axis.index) for fewer in (1, 0)]
    wholes = [torch.cat([drawn(5, WIDTH, seed=0), drawn(n, WIDTH, seed=1)]) for n in (4, 5)]
    gather = softmax.all_gather_replicated

    def counted(x, axis, *, dim):
        requests.append(x)
        return gather(x, axis, dim=dim)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(softmax, "all_gather_replicated", counted)
        for turn in (0, 1, 0, 1, 1):
            labels = drawn_labels() % len(wholes[turn])
            got = losses.linear_cross_entropy(hidden, owns[turn], labels, axis=axis)
            want = losses.linear_cross_entropy(hidden, wholes[turn], labels)
            found.append(difference(got, want))
        known = losses.make_vocabulary_axis(hidden @ owns[1].T, axis, dim=-1)
        losses.cross_entropy(hidden @ owns[1].T, drawn_labels() % 10, axis=known)
    return found, len(requests), len(softmax._GATHERED)


def test_ranks_ask_once_for_each_weight_and_agree_on_whether_to_ask():
    for found, requests, groups in run_ranks(two_vocabularies, 2):
        assert max(found) < 1e-12, found
        assert requests == 3, "once for each of two weights, and for one make_vocabulary_axis"
        assert groups == 1


# ---------------------------------------------------------------------------------- wrong labels


def refused():
    """Return what each label and loss raise; every rank must, or the others wait for it."""
    axis, messages = world_axis(), []
    hidden, weight = drawn(3, WIDTH, seed=1), drawn(4, WIDTH, seed=2)
    for label in (8, -1, -7, 2**40):
        labels = torch.tensor([7, -100, label])
        for loss in (
            lambda labels: losses.cross_entropy(hidden @ weight.T, labels, axis=axis),
            lambda labels: losses.z_loss(hidden @ weight.T, labels, axis=axis),
            lambda labels: losses.linear_cross_entropy(hidden, weight, labels, axis=axis),
        ):
            with pytest.raises(
                ValueError, match=rf"in \[0, 8\), .* got {label} at index 2"
            ) as caught:
                loss(labels)
            messages.append(str(caught.value))
    return messages


def test_labels_outside_of_the_vocabulary_are_refused_on_every_rank():
    one, two = run_ranks(refused, 2)
    assert one == two
    assert len(one) == 12


@pytest.mark.parametrize("label", [8, -1, -7, 2**40])
@pytest.mark.parametrize("rank", [0, 1])
def test_without_a_look_at_the_host_a_wrong_label_fails_where_an_index_is_checked(
    label, rank, monkeypatch
):
    """CUDA checks the index of a gather on the device: it must be a wrong one on every rank."""
    axis = Axis("tp", Share(rank, 2))
    monkeypatch.setattr("trainkit.losses.softmax.all_max", lambda x, _: x)
    with pytest.raises(RuntimeError, match=r"index .* is out of bounds"):
        scores_(torch.zeros(2, 4), torch.tensor([1, label]), axis)
