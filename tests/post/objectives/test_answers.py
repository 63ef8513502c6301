"""Losses of answers, as a table: preferences, policy gradients, sequences."""

from functools import partial

import pytest
import torch
from packed_answers import cut, documents_of, drawn, make_answers, part_of, unpacked, weight_of

from trainkit.batch import count_documents
from trainkit.losses import average_terms, weight_by_document, weight_by_microbatch
from trainkit.losses.logits import get_column_hint
from trainkit.mesh import axis_from_group
from trainkit.post.objectives.policy import (
    PolicyOptions,
    cispo,
    k1,
    k2,
    k3,
    policy_gradient,
    ppo_clip,
    sequence_policy_gradient,
)
from trainkit.post.objectives.preference import (
    add_reference_point,
    dpo,
    ipo,
    kto,
    log_ratio,
    orpo,
    simpo,
)
from trainkit.step import evaluate, forward_backward
from trainkit.tools.testing import run_ranks
from trainkit.types import SOLO, ConfigError, Hidden

OFF = PolicyOptions(kl=k3, kl_weight=0.1, most_importance=1.05)


def make_losses(axis=SOLO):
    return {
        "dpo": dpo(0.7, axis=axis),
        "dpo, conservative": dpo(0.7, label_smoothing=0.1, axis=axis),
        "dpo, no reference": dpo(0.7, reference_free=True, axis=axis),
        "ipo": ipo(0.5, axis=axis),
        "simpo": simpo(2.0, gamma=0.5, axis=axis),
        "orpo": orpo(0.6, axis=axis),
        "kto": kto(0.5, desirable_weight=0.8, undesirable_weight=1.2, axis=axis),
        "log_ratio": log_ratio(axis=axis),
        "gspo": sequence_policy_gradient(ppo_clip(0.05, 0.07), added=OFF, axis=axis),
        "ppo": policy_gradient(ppo_clip(0.1, 0.2), added=OFF, entropy_weight=0.01),
        "grpo": policy_gradient(ppo_clip(0.1, 0.2), weighted=True),
        "cispo": policy_gradient(cispo(high=0.1), added=PolicyOptions(kl=k2, kl_weight=0.3)),
        "k1": policy_gradient(cispo(high=0.1), added=PolicyOptions(kl=k1)),
    }


LOSSES = make_losses()
each = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())


def found_of(loss, batch, *, by=None):
    """Return the total, the terms, and the gradients of hidden states and weight."""
    x, weight = batch["x"].clone().requires_grad_(), weight_of()
    total, terms = loss(Hidden(x, weight) if by is None else x @ weight.T, batch)
    return total.detach(), terms, *torch.autograd.grad(total, (x, weight))


def same(found, want):
    for a, b in zip(found, want, strict=True):
        if isinstance(a, dict):
            assert a.keys() == b.keys()
            for name, value in a.items():
                torch.testing.assert_close(value.double(), b[name].double(), msg=name)
        else:
            torch.testing.assert_close(a, b)


@each
def test_it_reports_detached_sums_under_the_names_it_announced(loss):
    total, terms, *gradients = found_of(loss, make_answers())
    assert tuple(terms) == loss.terms
    assert all(x.ndim == 0 and x.isfinite() and not x.requires_grad for x in terms.values())
    assert total.isfinite()
    assert all(g.isfinite().all() and (g != 0).any() for g in gradients)


@each
def test_it_is_additive_over_rows(loss):
    batch = make_answers()
    total, terms, d_x, d_weight = found_of(loss, batch)
    parts = [found_of(loss, part_of(batch, rows)) for rows in (slice(0, 1), slice(1, 3))]
    summed = {name: sum(part[1][name] for part in parts) for name in terms}
    d_rows = torch.cat([part[2] for part in parts])
    own = sum(p[0] for p in parts), summed, d_rows, sum(p[3] for p in parts)
    same(own, (total, terms, d_x, d_weight))


@each
def test_nothing_without_a_label_counts(loss):
    batch = make_answers()
    want = found_of(loss, batch)
    ignored = batch["labels"] == -100
    for other in (0.0, 1e3):
        changed = {
            name: x.masked_fill(ignored.view(*ignored.shape, *(1,) * (x.ndim - 2)), other)
            for name, x in batch.items()
            if x.is_floating_point()
        }
        found = found_of(loss, {**batch, **changed})
        same(found, want)
        assert (found[2][ignored] == 0).all()


@each
def test_packed_and_unpacked_answers_give_the_same(loss):
    batch = make_answers()
    total, terms, _, d_weight = found_of(loss, batch)
    alone, alone_terms, _, d_alone = found_of(loss, unpacked(batch))
    same((alone, alone_terms, d_alone), (total, terms, d_weight))


@each
def test_logits_and_hidden_states_give_the_same(loss):
    batch = make_answers()
    same(found_of(loss, batch, by="logits"), found_of(loss, batch))


# CISPO's weights are no part of what is differentiated; it is compared with TRL's.
@pytest.mark.parametrize("loss", [v for k, v in LOSSES.items() if k not in {"cispo", "k1"}])
def test_gradients_are_those_of_finite_differences(loss):
    batch = make_answers(((4, 3),), row=8)
    weight = weight_of()
    assert torch.autograd.gradcheck(
        lambda x, weight: 0.7 * loss(Hidden(x, weight), batch)[0],
        (batch["x"].requires_grad_(), weight),
    )


def over_ranks():
    axis = axis_from_group(torch.distributed.group.WORLD, name="sp")
    batch = make_answers()
    part = cut(batch, axis.share)
    found = {name: found_of(loss, part) for name, loss in make_losses(axis).items()}
    rows = [part_of(part, slice(0, 1)), part_of(part, slice(1, 3))]
    return found | {"reference point": reference_point(rows, axis)}


def far(batch):
    """Return a batch that is likelier to the model than to the reference."""
    return {**batch, "reference_logprobs": batch["reference_logprobs"] - 1}


def reference_point(microbatches, axis=SOLO):
    """Return KTO's column of a batch, by the answers of others that `far` makes of these."""
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(weight_of().detach())
    call = lambda model, batch: Hidden(batch["x"], model.weight)  # noqa: E731
    others = map(far, microbatches)
    kl = evaluate(model, others, log_ratio(axis=axis), axis=axis, call=call)["kl"]
    return add_reference_point([make_answers()], kl)[0]["kl"]


def test_answers_that_lie_on_two_ranks_are_counted_once_with_all_of_their_gradient():
    ranks = run_ranks(over_ranks, 2)
    batch = make_answers()
    for name, loss in LOSSES.items():
        total, terms, d_x, d_weight = found_of(loss, batch)
        parts = [found[name] for found in ranks]
        own = {term: sum(part[1][term] for part in parts) for term in terms}
        whole = torch.stack([part[2] for part in parts], dim=2).flatten(1, 2)
        same((parts[0][0] + parts[1][0], own, whole), (total, terms, d_x))
        torch.testing.assert_close(parts[0][3] + parts[1][3], d_weight, msg=name)
    point = reference_point([batch])
    terms = found_of(LOSSES["log_ratio"], far(batch))[1]
    want = (terms["kl"] / terms["kl/count"]).float()
    assert want > 0
    torch.testing.assert_close(point, want.expand(batch["labels"].shape))
    for found in ranks:
        torch.testing.assert_close(found["reference point"], point)


# ------------------------------------------------------------------------------------ one by one


def test_pairs_have_one_denominator_however_unevenly_they_are_dealt():
    """The mean over the answers of a rank, and then over ranks, is another number."""
    batch, weight = make_answers(), torch.nn.Parameter(weight_of().detach())
    parts = [part_of(batch, slice(0, 1)), part_of(batch, slice(1, 2))]  # two pairs, and one
    pairs = sum(count_documents([part], halves=True) for part in parts)
    assert int(pairs) == 3
    model = torch.nn.Module()
    model.weight = weight

    def step(microbatches, denominator):
        weight.grad = None
        call = lambda model, batch: Hidden(batch["x"], model.weight)  # noqa: E731
        sums = forward_backward(
            model, microbatches, LOSSES["dpo"], denominator=denominator, call=call
        )
        return weight.grad.clone(), average_terms(sums, denominator)

    together, means = step([part_of(batch, slice(0, 2))], pairs)
    apart, again = step(parts, pairs)
    torch.testing.assert_close(apart, together)
    same((means,), (again,))
    each = [step([part], count_documents([part], halves=True))[0] for part in parts]
    assert not torch.allclose(sum(each) / 2, together)


def test_figures_are_those_of_the_pairs():
    batch = make_answers()
    _, terms, *_ = found_of(LOSSES["dpo"], batch)
    rows = (batch["x"] @ weight_of().T).log_softmax(-1).detach()
    logprobs = rows.gather(-1, batch["labels"].clamp(min=0)[..., None])[..., 0]
    ratios = torch.where(batch["labels"] == -100, 0, logprobs - batch["reference_logprobs"])
    rewards = [0.7 * ratios[row, place].sum() for row, place in documents_of(batch)]
    chosen, rejected = torch.stack(rewards[::2]), torch.stack(rewards[1::2])
    assert int(terms["margin/count"]) == len(chosen) == 5
    torch.testing.assert_close(terms["margin"], (chosen - rejected).sum())
    torch.testing.assert_close(terms["accuracy"], (chosen > rejected).double().sum())
    torch.testing.assert_close(terms["chosen_reward"], chosen.sum())
    torch.testing.assert_close(terms["rejected_reward"], rejected.sum())


def test_half_a_pair_is_refused_and_where_nobody_looks_it_is_nan(monkeypatch):
    batch = make_answers(((4, 5), (5, 4, 6)), row=15)
    for name in ("dpo", "ipo", "simpo", "orpo"):
        with pytest.raises(ValueError, match=r"document 2 of row 1 is the last one, and no pair"):
            found_of(LOSSES[name], batch)
    monkeypatch.setattr("trainkit.post.objectives.preference.can_read_values", lambda _: False)
    for name in ("dpo", "simpo"):
        total, _, d_x, _ = found_of(LOSSES[name], batch)
        assert total.isnan()
        assert d_x[1, 9:].isnan().any()
        assert d_x[0].isfinite().all()


@pytest.mark.parametrize("name", ["simpo", "orpo"])
def test_an_answer_without_a_label_is_not_the_likeliest_of_all(name):
    batch = make_answers()
    empty = [
        (row, place)
        for pair in zip(documents_of(batch)[::2], documents_of(batch)[1::2], strict=True)
        if not all((batch["labels"][row, place] != -100).any() for row, place in pair)
        for row, place in pair
    ]
    assert len(empty) == 4
    without = {**batch, "labels": batch["labels"].clone()}
    for row, place in empty:
        without["labels"][row, place] = -100
    found = found_of(LOSSES[name], batch)
    same(found, found_of(LOSSES[name], without))
    assert found[1]["margin/count"] == 3


def test_a_reference_point_is_not_below_0_and_what_has_no_label_is_in_no_figure():
    batch = make_answers()
    below, at = ({**batch, "kl": torch.full_like(batch["kl"], value)} for value in (-3.0, 0.0))
    same(found_of(LOSSES["kto"], below), found_of(LOSSES["kto"], at))
    terms = found_of(LOSSES["kto"], batch)[1]
    point = add_reference_point([batch], torch.tensor(-0.1, requires_grad=True))[0]["kl"]
    assert (point == 0).all()
    assert not point.requires_grad
    flagged = terms["desirable_reward/count"] + terms["undesirable_reward/count"]
    answers = [(batch["labels"][row, place] != -100).any() for row, place in documents_of(batch)]
    assert flagged == sum(answers) < len(answers) == terms["preference/count"]


def test_a_long_answers_log_ratio_keeps_its_digits():
    batch = {
        name: x.float() if x.is_floating_point() else x
        for name, x in make_answers(((4096, 4096),), row=8192).items()
    }
    rows = (batch["x"].double() @ weight_of().T).log_softmax(-1).detach()
    logprobs = rows.gather(-1, batch["labels"].clamp(min=0)[..., None])[..., 0]
    batch["reference_logprobs"] = (logprobs + 1e-3 * drawn(1, 8192, seed=5)).float()
    ratios = torch.where(batch["labels"] == -100, 0, logprobs - batch["reference_logprobs"])
    loss, logits = log_ratio(), (batch["x"] @ weight_of().float().T).detach()
    assert abs(float(loss(logits, batch)[0] - ratios.sum())) < 1e-3


PLACES = {"labels", "document_ids", "position_ids"}
REFERENCE = {*PLACES, "reference_logprobs"}
POLICY = {"labels", "old_logprobs", "advantages"}
READ = {
    "dpo": REFERENCE,
    "dpo, conservative": REFERENCE,
    "dpo, no reference": PLACES,
    "ipo": REFERENCE,
    "simpo": PLACES,
    "orpo": PLACES,
    "kto": {*REFERENCE, "desirable", "kl"},
    "log_ratio": REFERENCE,
    "gspo": {*REFERENCE, *POLICY, "sampler_logprobs"},
    "ppo": {*POLICY, "reference_logprobs", "sampler_logprobs"},
    "grpo": {*POLICY, "weights"},
    "cispo": {*POLICY, "reference_logprobs"},
    "k1": {*POLICY, "reference_logprobs"},
}


@pytest.mark.parametrize(("name", "column"), [(x, y) for x in READ for y in sorted(READ[x])])
def test_a_missing_column_is_named_with_what_makes_it(name, column):
    batch = {k: v for k, v in make_answers().items() if k != column}
    with pytest.raises(ValueError, match=f'the batch has no "{column}"') as caught:
        found_of(LOSSES[name], batch)
    assert str(caught.value).endswith(f"; {get_column_hint(column)}")


def test_no_other_column_is_missed():
    assert {*READ} == {*LOSSES}
    for name, loss in LOSSES.items():
        found_of(loss, {k: v for k, v in make_answers().items() if k in READ[name] | {"x"}})


@pytest.mark.parametrize(
    ("function", "column"),
    [
        (weight_by_document, "document_ids"),
        (weight_by_document, "labels"),
        (weight_by_microbatch, "labels"),
    ],
)
def test_what_weighs_tokens_names_what_it_lacks(function, column):
    batch = {k: v for k, v in make_answers().items() if k != column}
    with pytest.raises(ValueError, match=f'{function.__name__}: the batch has no "{column}"'):
        function([batch], axis=SOLO)


def plain_ppo(batch, *, low, high):
    """Return the clipped objective of PPO (Schulman et al. 2017, equation 7), token by token."""
    weight, total = weight_of(), 0
    for row, label in (batch["labels"] != -100).nonzero().tolist():
        logits = batch["x"][row, label] @ weight.T
        logprob = logits[batch["labels"][row, label]] - logits.exp().sum().log()
        ratio = (logprob - batch["old_logprobs"][row, label]).exp()
        advantage = batch["advantages"][row, label]
        bounded = min(max(ratio, ratio.new_tensor(1 - low)), ratio.new_tensor(1 + high))
        total = total - min(ratio * advantage, bounded * advantage)
    return total.detach(), *torch.autograd.grad(total, weight)


def test_ppo_is_its_equation_token_by_token():
    """An advantage is at the index of its label, and not at that of the token before it."""
    batch = make_answers()
    own = torch.where(batch["labels"] == -100, torch.nan, drawn(*batch["labels"].shape, seed=3))
    batch["advantages"] = own  # a critic's: different at each token
    loss = policy_gradient(ppo_clip(0.1, 0.2))
    total, terms, _, d_weight = found_of(loss, batch)
    same((total, d_weight), plain_ppo(batch, low=0.1, high=0.2))
    assert 0 < terms["clipped"] < terms["clipped/count"]
    assert terms["clipped/count"] == (batch["labels"] != -100).sum()
    logprobs = (batch["x"] @ weight_of().T).log_softmax(-1).detach()
    logprobs = logprobs.gather(-1, batch["labels"].clamp(min=0)[..., None])[..., 0]
    drift = (logprobs - batch["old_logprobs"])[batch["labels"] != -100]
    torch.testing.assert_close(terms["old_kl"], (drift.exp() - 1 - drift).sum())
    shifted = {**batch, "advantages": own.roll(1, 1)}
    in_loss = torch.where(batch["labels"] == -100, torch.nan, shifted["advantages"].nan_to_num())
    assert not torch.allclose(found_of(loss, {**batch, "advantages": in_loss})[3], d_weight)


def plain_gspo(batch, *, low, high, most):
    """Return GSPO's objective (Zheng et al. 2025, equation 5), answer by answer.

    Importance is that of an answer: the product of its tokens' ratios, truncated.
    """
    weight, total, products = weight_of(), 0, []
    for row, places in documents_of(batch):
        own = batch["labels"][row, places] != -100
        if not own.any():
            continue
        part = {name: x[row, places][own] for name, x in batch.items()}
        rows = (part["x"] @ weight.T).log_softmax(-1)
        logprobs = rows.gather(-1, part["labels"][:, None])[:, 0]
        ratio = (logprobs - part["old_logprobs"]).mean().exp()
        advantage = part["advantages"].mean()
        cost = -torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)
        product = (part["old_logprobs"] - part["sampler_logprobs"]).exp().prod()
        total, products = total + cost * product.clamp(max=most), [*products, float(product)]
    return total, weight, products


def test_gspo_weighs_an_answer_by_the_product_of_its_tokens_importance():
    batch, most = make_answers(), 1.03
    want, weight, products = plain_gspo(batch, low=0.05, high=0.07, most=most)
    assert min(products) < 0.97 < most < max(products)  # and one is truncated
    added = PolicyOptions(most_importance=most)
    loss = sequence_policy_gradient(ppo_clip(0.05, 0.07), added=added)
    total, terms, _, found = found_of(loss, batch)
    torch.testing.assert_close(total, want.detach())
    torch.testing.assert_close(found, torch.autograd.grad(want, weight)[0])
    assert terms["truncated"] == sum(product > most for product in products)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (partial(PolicyOptions, kl_weight=0.1), "without a kl"),
        (partial(PolicyOptions, most_importance=0.0), "must be above 0"),
    ],
)
def test_what_would_be_added_to_no_effect_is_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_extremes_of_ratios_are_counted_above_thresholds():
    batch = make_answers()
    batch["old_logprobs"][0, 2] -= 1.5  # of ratios near 1
    batch["old_logprobs"][1, 1] += 4.0
    terms = found_of(LOSSES["ppo"], batch)[1]
    rows = (batch["x"] @ weight_of().T).log_softmax(-1).detach()
    logprobs = rows.gather(-1, batch["labels"].clamp(min=0)[..., None])[..., 0]
    far = (logprobs - batch["old_logprobs"])[batch["labels"] != -100].abs().exp()
    assert terms["ratio_beyond_2"] == (far > 2).sum() > 0
    assert terms["ratio_beyond_10"] == (far > 10).sum() > 0
    drift = (batch["old_logprobs"] - batch["sampler_logprobs"])[batch["labels"] != -100].exp()
    assert terms["truncated"] == (drift > 1.05).sum() > 0


def test_grpo_is_a_mean_over_answers_of_means_over_tokens():
    batch = make_answers()
    (weighed,) = weight_by_document([{k: v for k, v in batch.items() if k != "weights"}], axis=SOLO)
    total = found_of(LOSSES["grpo"], weighed)[0]
    alone = []
    plain = policy_gradient(ppo_clip(0.1, 0.2))
    for row, place in documents_of(batch):
        own = torch.full_like(batch["labels"], -100)
        own[row, place] = batch["labels"][row, place]
        if (own != -100).any():
            alone.append(found_of(plain, {**batch, "labels": own})[0] / (own != -100).sum())
    torch.testing.assert_close(total, torch.stack(alone).sum())
