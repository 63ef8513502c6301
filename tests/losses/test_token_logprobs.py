"""Log-probabilities are those by which a sampler has drawn, and can be differentiated."""

from itertools import product

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from trainkit.batch import collate_bins
from trainkit.collectives import sum_grad
from trainkit.data import make_corpus
from trainkit.losses import logprobs, make_score_loss, token_logprobs
from trainkit.losses.linear import Factors
from trainkit.losses.logprobs import compute_logprobs
from trainkit.losses.shaping import Shaping
from trainkit.mesh import axis_from_group
from trainkit.packing import pack_bins
from trainkit.post.generation import Sampling, shape_logits
from trainkit.post.objectives import PolicyOptions, cispo, k3, policy_gradient, ppo_clip
from trainkit.tools.testing import run_ranks
from trainkit.types import Column, Hidden, Sample, apply_softcap

V, D, T = 24, 5, 14
SETTINGS = [
    Shaping(),
    Shaping(temperature=0.6),
    Shaping(top_k=7),
    Shaping(top_p=0.8),
    Shaping(min_p=0.1),
    Shaping(temperature=1.4, top_k=15, top_p=0.9, min_p=0.02),
]


def inputs(seed=0):
    draw = torch.Generator().manual_seed(seed)
    hidden = torch.randn(2, T // 2, D, generator=draw, dtype=torch.float64)
    weight = torch.randn(V, D, generator=draw, dtype=torch.float64)
    labels = (hidden @ weight.T).argmax(-1)  # the likeliest is never left out
    labels[0, 3] = labels[1, 0] = -100
    return hidden.requires_grad_(), weight.requires_grad_(), labels


def sampled(hidden, weight, labels, settings, softcap=None):
    """Return the log-probabilities and entropies of what a sampler draws from."""
    logits = apply_softcap(hidden @ weight.T, softcap).flatten(0, 1)
    temperature, top_k, top_p, min_p = settings
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    rows = shape_logits(logits, sampling).log_softmax(-1)
    chosen = rows.gather(-1, labels.flatten().clamp(min=0)[:, None])[:, 0]
    entropies = -(rows.exp() * rows.masked_fill(rows == -torch.inf, 0)).sum(-1)
    ignored = labels.flatten() == -100
    return tuple(x.masked_fill(ignored, 0).view(labels.shape) for x in (chosen, entropies))


def shaped_logprobs(shaping, hidden, weight, labels, **options):
    """Return `token_logprobs` with the settings of a `Shaping`."""
    return token_logprobs(
        hidden,
        weight,
        labels,
        temperature=shaping.temperature,
        top_k=shaping.top_k,
        top_p=shaping.top_p,
        min_p=shaping.min_p,
        **options,
    )


STEPS = torch.linspace(0.5, 2, T, dtype=torch.float64).view(2, -1)


def curve(logprobs, entropies, steps=STEPS):
    """Join both so that no derivative is like another."""
    return (steps * logprobs).square().sum() + (steps * entropies).sin().sum()


def in_one_pass(output, labels, settings):
    """Return `curve` of an output, as a loss of scores."""

    def each(scores, columns):
        steps = columns["steps"]
        return (steps * scores.losses).square() + (steps * scores.entropies).sin()

    loss = make_score_loss({"curve": (each, 1.0)}, shaping=settings)
    return loss(output, {"labels": labels, "steps": STEPS})[0]


@pytest.mark.parametrize("softcap", [None, 0.9])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_they_are_a_samplers_with_their_gradients(settings, softcap):
    hidden, weight, labels = inputs()
    want, entropies = sampled(hidden, weight, labels, settings, softcap)
    loss = in_one_pass(Hidden(hidden, weight, softcap=softcap), labels, settings)
    pairs = [(loss, curve(want, entropies))]
    for chunk in (1, 4, None):  # tiles of some tokens and words, of all tokens, and one for all
        found = shaped_logprobs(settings, hidden, weight, labels, softcap=softcap, chunk=chunk)
        torch.testing.assert_close(found, want)
        pairs.append(((STEPS * found).square().sum(), (STEPS * want).square().sum()))
    for pair in pairs:
        torch.testing.assert_close(*pair)
        grads = (torch.autograd.grad(x, (hidden, weight), retain_graph=True) for x in pair)
        torch.testing.assert_close(*grads)


def test_words_that_are_ruled_out_together_are_none_of_a_softmax():
    """A tile of them has no largest logit to speak of."""
    hidden, weight, _ = inputs()
    bias = torch.zeros(V, dtype=torch.float64)
    bias[: V // 2] = -torch.inf
    rows = (hidden @ weight.T + bias).log_softmax(-1)
    labels = rows.argmax(-1)
    want = rows.gather(-1, labels[..., None])[..., 0]
    found = token_logprobs(hidden, weight, labels, bias=bias, chunk=2)  # tiles of 3 words
    torch.testing.assert_close(found, want)
    wanted = torch.autograd.grad(want.square().sum(), hidden)
    torch.testing.assert_close(torch.autograd.grad(found.square().sum(), hidden), wanted)


@pytest.mark.parametrize("bias", [False, True])
def test_tiles_are_no_larger_than_a_chunk_and_a_bias_has_its_gradient(bias, monkeypatch):
    hidden, weight, labels = inputs()
    factors = Factors(hidden, weight, drawn_bias() if bias else None)
    sizes, real = [], logprobs.logits_of

    def logits(*args, **how):
        found = real(*args, **how)
        sizes.append(found[0].numel())
        return found

    monkeypatch.setattr(logprobs, "logits_of", logits)
    leaves = [x for x in factors[:3] if x is not None]
    found = [
        torch.autograd.grad(compute_logprobs(factors, labels, chunk=chunk).square().sum(), leaves)
        for chunk in (1, 3, T)
    ]
    for grads in found[:-1]:
        torch.testing.assert_close(grads, found[-1])
    assert max(sizes[:-2]) <= 3 * V < sizes[-1] == T * V


def drawn_bias():
    return torch.randn(V, generator=torch.Generator().manual_seed(1)).double().requires_grad_()


@pytest.mark.parametrize(
    ("p", "left"), [(0.45, 1), (0.55, 2), (0.75, 2), (0.85, 3), (0.94, 3), (0.96, 4), (1.0, 4)]
)
def test_top_p_leaves_the_fewest_words_that_have_p_together(p, left):
    chances = torch.tensor([0.15, 0.5, 0.05, 0.3], dtype=torch.float64)
    labels = torch.tensor([1, 3, 0, 2])  # the likeliest first
    rest = chances[labels[:left]]
    want = (rest / rest.sum()).log()
    hidden, weight = chances.log().expand(4, 4), torch.eye(4, dtype=torch.float64)
    for each in (p, torch.full((4,), p, dtype=torch.float64)):
        found = token_logprobs(hidden, weight, labels, top_p=each)
        torch.testing.assert_close(found[:left], want)
        assert (found[left:] == -torch.inf).all()


def test_top_p_of_words_that_are_equal_leaves_as_many_as_have_p_together():
    hidden, weight = torch.zeros(8, 1), torch.ones(8, 1)  # 1 / 8 each, to the last bit
    for count in range(1, 9):
        found = token_logprobs(hidden, weight, torch.arange(8), top_p=count / 8)
        assert int((found != -torch.inf).sum()) == count


PLAIN = Shaping(top_k=V)  # the settings that change nothing, in numbers


def collated():
    """Return a packed batch of answers, each drawn with its own settings, as columns of labels.

    Prompts and padding have no label; there the columns are 0, as of every corpus.
    """
    columns = {name: Column("int64" if name == "top_k" else "float32") for name in PLAIN._fields}

    def sample(number):
        settings, prompt = SETTINGS[number % len(SETTINGS)], 1 + number % 3
        settings = settings._replace(top_k=settings.top_k or V)
        ids = torch.randint(V, (5,), generator=torch.Generator().manual_seed(number)).numpy()
        trained = np.arange(5) >= prompt
        values = {name: np.where(trained, x, 0) for name, x in settings._asdict().items()}
        return Sample(ids, trained, values)

    corpus = make_corpus((sample(n) for n in range(2 * len(SETTINGS))), columns=columns)
    bins = pack_bins(corpus.lengths, 16, multiple_of=2)
    return collate_bins(corpus, bins, range(len(bins)))


def with_setting(name, value):
    """Return a `Shaping` of which one setting differs from the default."""
    return Shaping(*(value if field == name else x for field, x in Shaping()._asdict().items()))


def shaping_of(batch):
    """Return the settings of each token, from the columns of a batch."""
    return Shaping(*(batch[name] for name in Shaping._fields))


def test_each_token_may_have_been_drawn_otherwise():
    batch = collated()
    labels, each = batch["labels"], shaping_of(batch)
    assert float(each.temperature[labels == -100].max()) == 0
    _, weight, _ = inputs()
    drawn = torch.randn(*labels.shape, D, generator=torch.Generator().manual_seed(3)).double()
    hidden = drawn.requires_grad_()
    wants = []
    for index in (labels != -100).nonzero().tolist():
        i, j = index
        settings = Shaping(*(x[i, j].item() for x in each))
        row = hidden[i : i + 1, j : j + 1], weight, labels[i : i + 1, j : j + 1]
        wants.append(sampled(*row, settings)[0].flatten())
    want = torch.cat(wants)
    kept = want != -torch.inf  # a label that its sampler would not draw has no gradient
    assert 0.3 < float(kept.double().mean()) < 1
    leaves = (hidden, weight)
    wanted = torch.autograd.grad(want[kept].sum(), leaves)
    for chunk in (4, None):
        found = shaped_logprobs(each, hidden, weight, labels, chunk=chunk)
        torch.testing.assert_close(found[labels != -100], want)
        assert (found[labels == -100] == 0).all()
        torch.testing.assert_close(torch.autograd.grad(found.sum(), leaves), wanted)
    one_pass = make_score_loss(
        {"nll": (lambda scores, _: scores.losses.masked_fill(scores.losses == torch.inf, 0), 1.0)},
        shaping=shaping_of,
    )
    for output in (Hidden(hidden, weight), hidden @ weight.T):
        total, _ = one_pass(output, batch)
        torch.testing.assert_close(-total, want[kept].sum())
        torch.testing.assert_close(torch.autograd.grad(-total, leaves), wanted)


@pytest.mark.parametrize("nothing", [0.0, -1.0, torch.nan])
@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p"])
def test_a_setting_without_a_label_may_be_anything(name, nothing):
    hidden, weight, _ = inputs()
    hidden, labels = hidden[0, :2], torch.tensor([1, -100])
    column = torch.tensor([0.7, nothing])
    found = shaped_logprobs(with_setting(name, column), hidden, weight, labels)
    grads = torch.autograd.grad(found.sum(), weight)[0]
    alone = shaped_logprobs(with_setting(name, column[:1]), hidden[:1], weight, labels[:1])
    torch.testing.assert_close(found, torch.cat([alone, alone.new_zeros(1)]))
    torch.testing.assert_close(grads, torch.autograd.grad(alone.sum(), weight)[0])


@pytest.mark.parametrize(
    ("name", "bad", "message"),
    [
        ("temperature", 0.0, "temperature must be above 0 and finite .*, got 0 at index 1"),
        ("top_k", 0, "top_k must be at least 1, or None, got 0 at index 1"),
        ("top_p", torch.nan, "top_p must be above 0 and at most 1, got nan at index 1"),
        ("min_p", 1.5, "min_p must be between 0 and 1, got 1.5 at index 1"),
        ("top_k", 0.5, "top_k must hold integers, got torch.float32"),
    ],
)
def test_a_setting_of_a_trained_token_that_is_out_of_range_is_refused(name, bad, message):
    hidden, weight, labels = inputs()
    column = torch.full(labels.shape, type(bad)(getattr(PLAIN, name)))
    column.flatten()[1] = bad
    with pytest.raises(ValueError, match=f"token_logprobs: {message}"):
        shaped_logprobs(with_setting(name, column), hidden, weight, labels)


def test_a_label_that_no_sampler_draws_is_minus_infinity_without_a_gradient():
    hidden, weight, labels = inputs()
    lost = (hidden @ weight.T)[0, 1].argmin()
    labels[0, 1] = lost
    found = token_logprobs(hidden, weight, labels, top_k=3)
    assert found[0, 1] == -torch.inf
    d_hidden, d_weight = torch.autograd.grad(found.sum(), (hidden, weight))
    assert (d_hidden[0, 1] == 0).all()
    assert d_weight.isfinite().all()
    assert (d_hidden[0, 0] != 0).all()
    # Of logits nothing else: no loss pushes the words down that are left.
    nll = {"nll": (lambda scores, _: scores.losses, 1.0)}
    total, _ = make_score_loss(nll, shaping=Shaping(top_k=3))(hidden @ weight.T, {"labels": labels})
    torch.testing.assert_close(torch.autograd.grad(-total, (hidden, weight)), (d_hidden, d_weight))


@pytest.mark.parametrize("surrogate", [ppo_clip(), cispo()])
def test_a_word_that_is_left_out_by_now_breaks_no_policy_gradient(surrogate):
    hidden, weight, labels = inputs()
    labels[0, 1] = (hidden @ weight.T)[0, 1].argmin()
    old = torch.full(labels.shape, -1.0, dtype=torch.float64)
    batch = {"labels": labels, "advantages": -old, "old_logprobs": old, "reference_logprobs": old}
    added = PolicyOptions(kl=k3, kl_weight=0.1)
    loss = policy_gradient(surrogate, added=added, shaping=Shaping(top_k=3))
    for output in (Hidden(hidden, weight), hidden @ weight.T):
        total, terms = loss(output, batch)
        assert all(x.isfinite() for x in (total, *terms.values()))
        d_hidden, _ = torch.autograd.grad(total, (hidden, weight))
        assert d_hidden.isfinite().all()
        assert (d_hidden[0, 1] == 0).all()


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (Shaping(temperature=0.0), "temperature must be .* got 0.0"),
        (Shaping(top_k=0), "top_k must be .* got 0"),
        (Shaping(top_p=1.5), "top_p must be .* got 1.5"),
        (Shaping(min_p=-1), "min_p must be .* got -1"),
    ],
)
def test_a_setting_out_of_its_range_is_refused(bad, message):
    with pytest.raises(ValueError, match=f"token_logprobs: {message}"):
        shaped_logprobs(bad, *inputs())


def test_without_filters_nothing_is_sorted_and_it_costs_one_product_more(monkeypatch):
    hidden, weight, labels = inputs()
    calls = []

    def record(home, name):
        function = getattr(home, name)

        def recorded(*args, **kwargs):
            calls.append(name)
            return function(*args, **kwargs)

        monkeypatch.setattr(home, name, recorded)

    record(torch, "mm")
    record(logprobs, "add_product_")
    record(torch, "sort")
    found = token_logprobs(hidden, weight, labels, chunk=T)
    assert calls == ["mm"]
    found.sum().backward()
    assert calls == ["mm"] * 2 + ["add_product_"] * 2  # the logits again, two gradients


def test_a_setting_of_another_shape_is_refused():
    hidden, weight, labels = inputs()
    with pytest.raises(ValueError, match=r"token_logprobs: top_p must be a number .* got \(3,\)"):
        token_logprobs(hidden, weight, labels, top_p=torch.ones(3))


def difference(a, b):
    return float(((a - b).abs().max() / b.abs().max()).detach())


def over_a_cut_vocabulary():
    axis = axis_from_group(torch.distributed.group.WORLD, name="tp")
    hidden, weight, labels = inputs()
    far = {}
    for settings, sizes in product(SETTINGS, [(12, 12), (15, 9), (0, 24)]):
        want, entropies = sampled(hidden, weight, labels, settings)
        again = hidden.detach().requires_grad_()
        own = weight.detach().split(sizes)[axis.index].clone().requires_grad_()
        summed = sum_grad(again, axis)
        found = shaped_logprobs(settings, summed, own, labels, axis=axis, chunk=4)
        one_pass = in_one_pass(Hidden(summed, own, axis), labels, settings)
        pairs = [((STEPS * found).square().sum(), (STEPS * want).square().sum())]
        pairs.append((one_pass, curve(want, entropies)))
        gaps = [difference(found, want)]
        for mine, theirs in pairs:
            grads = torch.autograd.grad(mine, (again, own), retain_graph=True)
            wanted = torch.autograd.grad(theirs, (hidden, weight), retain_graph=True)
            part = wanted[1].split(sizes)[axis.index]
            gaps += [difference(mine, theirs), difference(grads[0], wanted[0])]
            gaps += [difference(grads[1], part)] if len(part) else []
        far[str(settings), sizes] = max(gaps)
    return far


def test_a_vocabulary_that_is_cut_changes_nothing():
    for far in run_ranks(over_a_cut_vocabulary, 2):
        assert max(far.values()) < 1e-12, far


def test_the_one_pass_of_entropies_has_their_gradient():
    hidden, weight, labels = inputs()
    loss = make_score_loss({"bonus": (lambda scores, _: scores.entropies * scores.losses, -0.7)})
    total, terms = loss(Hidden(hidden, weight), {"labels": labels})
    logits = hidden @ weight.T
    rows = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(2, -1)
    want = -0.7 * (rows * sampled(hidden, weight, labels, Shaping())[1]).sum()
    torch.testing.assert_close(total, want)
    torch.testing.assert_close(-0.7 * terms["bonus"], want.detach())
    grads = (torch.autograd.grad(x, (hidden, weight), retain_graph=True) for x in (total, want))
    torch.testing.assert_close(*grads)
