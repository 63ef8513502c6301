"""Distillation: the divergences are those of the full distributions."""

from functools import partial
from itertools import product

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trainkit.collectives import sum_grad
from trainkit.losses import report_by_source
from trainkit.mesh import axis_from_group
from trainkit.post.objectives import distillation, stored_distillation
from trainkit.tools.testing import run_ranks
from trainkit.types import SOLO, Hidden

V, D, E, T = 24, 5, 7, 14
KINDS = [(beta, k) for beta in (0.0, 0.3, 1.0) for k in (None, 4, V)]


def drawn(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def inputs():
    labels = torch.zeros(2, T // 2, dtype=torch.int64)
    labels[0, 3] = labels[1, 1] = -100
    batch = {"labels": labels, "teacher_hidden": drawn(2, T // 2, E, seed=1)}
    student = drawn(2, T // 2, D, seed=2).requires_grad_(), drawn(V, D, seed=3).requires_grad_()
    return student, drawn(V, E, seed=4), batch


def plain(student, teacher_weight, batch, *, beta, temperature, k):
    """Return the divergence of whole distributions; all words but k count as one."""
    p = (batch["teacher_hidden"] @ teacher_weight.T / temperature).softmax(-1)
    q = (student[0] @ student[1].T / temperature).softmax(-1)
    if k not in (None, V):
        ids = p.topk(k).indices
        p, q = (
            torch.cat([x.gather(-1, ids), 1 - x.gather(-1, ids).sum(-1, True)], -1) for x in (p, q)
        )
    mixed = beta * p + (1 - beta) * q
    if beta in (0.0, 1.0):
        a, b = (p, q) if beta == 0 else (q, p)
        found = (a * (a / b).log()).sum(-1)
    else:
        found = (beta * p * (p / mixed).log() + (1 - beta) * q * (q / mixed).log()).sum(-1)
    return found[batch["labels"] != -100].sum()


def far(found, want):
    return max(
        float(((a - b).abs().max() / b.abs().max()).detach())
        for a, b in zip(found, want, strict=True)
        if b.numel()
    )


def losses_of(beta, k, own, teacher_weight, *, batch, axis):
    """Return the loss of a teacher, and where its likeliest words are known of these alone."""
    losses = [
        (
            distillation(
                Hidden(torch.empty(0), own, axis), top_k=k, beta=beta, temperature=1.3, chunk=4
            ),
            batch,
        )
    ]
    if k is not None:
        rows = (batch["teacher_hidden"] @ teacher_weight.T / 1.3).log_softmax(-1)
        logprobs, ids = rows.topk(k)
        stored = {"labels": batch["labels"], "teacher_ids": ids.int(), "teacher_logprobs": logprobs}
        losses.append((stored_distillation(beta=beta, temperature=1.3, chunk=4), stored))
    return losses


def differences(axis=None):
    axis = axis or axis_from_group(torch.distributed.group.WORLD, name="tp")
    found = {}
    unequal = [(V - 3, 3), (V, 0)] if axis.count == 2 else []
    for (beta, k), sizes in product(KINDS, [(V // axis.count,) * axis.count, *unequal]):
        student, teacher_weight, batch = inputs()
        want = plain(student, teacher_weight, batch, beta=beta, temperature=1.3, k=k)
        d_hidden, d_weight = torch.autograd.grad(want, student)
        part = d_weight.split(sizes)[axis.index]
        teacher_own = teacher_weight.split(sizes)[axis.index]
        each = losses_of(beta, k, teacher_own, teacher_weight, batch=batch, axis=axis)
        for number, (loss, own) in enumerate(each):
            hidden = student[0].detach().requires_grad_()
            weight = student[1].detach().split(sizes)[axis.index].clone().requires_grad_()
            total, terms = loss(Hidden(sum_grad(hidden, axis), weight, axis), own)
            grads = torch.autograd.grad(2 * total, (hidden, weight))
            pairs = [total, terms["distillation"], *grads], [want, want, 2 * d_hidden, 2 * part]
            found[beta, k, sizes, number] = far(*pairs)
    return found


def test_divergences_are_those_of_whole_distributions_whole_and_cut():
    for found in (differences(SOLO), *run_ranks(differences, 2)):
        assert max(found.values()) < 1e-12, found


@pytest.mark.parametrize(("beta", "k"), KINDS)
def test_each_token_has_a_value_and_may_have_a_weight(beta, k):
    student, teacher_weight, batch = inputs()
    has_label = batch["labels"] != -100
    one_label = torch.where(torch.eye(T, dtype=torch.bool), 0, -100).view(T, *has_label.shape)
    alone = [
        plain(student, teacher_weight, batch | {"labels": x}, beta=beta, temperature=1.3, k=k)
        for x in one_label
    ]
    values = torch.stack(alone).view_as(has_label).masked_fill(~has_label, 0)
    weights = drawn(*has_label.shape, seed=5).abs().masked_fill(~has_label, torch.nan)
    want = (weights * values)[has_label].sum()
    grads = torch.autograd.grad(want, student)
    output = Hidden(*student)
    for number, (loss, own) in enumerate(
        losses_of(beta, k, teacher_weight, teacher_weight, batch=batch, axis=SOLO)
    ):
        total, found, counted = loss.per_token(output, own)
        torch.testing.assert_close(found, values.detach())
        torch.testing.assert_close(total, values.sum())
        assert torch.equal(counted, has_label.long())
        make = stored_distillation
        if number == 0:
            make = partial(distillation, Hidden(torch.empty(0), teacher_weight), top_k=k)
        weighed = make(beta=beta, temperature=1.3, weighted=True, chunk=4)
        total, terms = weighed(output, own | {"weights": weights})
        torch.testing.assert_close(total, want)
        torch.testing.assert_close(torch.autograd.grad(total, student), grads)
        torch.testing.assert_close(terms["distillation"], want.detach())
        torch.testing.assert_close(terms["distillation/count"], weights[has_label].sum())
    with pytest.raises(ValueError, match='the batch has no "weights" for each of its labels'):
        weighed(output, own)


def test_the_divergence_of_each_corpus_is_known():
    student, teacher_weight, batch = inputs()
    source = torch.arange(T).view(2, -1) % 2
    loss = report_by_source(["a", "b"], distillation(Hidden(torch.empty(0), teacher_weight)))
    total, terms = loss(Hidden(*student), batch | {"source": source})
    torch.testing.assert_close(terms["distillation/a"] + terms["distillation/b"], total.detach())
    for number, name in enumerate("ab"):
        labels = batch["labels"].masked_fill(source != number, -100)
        one_corpus = batch | {"labels": labels}
        want = plain(student, teacher_weight, one_corpus, beta=0.0, temperature=1.0, k=None)
        torch.testing.assert_close(terms[f"distillation/{name}"], want.detach())
        assert terms[f"distillation/{name}/count"] == (labels != -100).sum()


class Largest(TorchDispatchMode):
    """The most elements of a tensor that is made."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = function(*args, **kwargs)
        if isinstance(out, torch.Tensor):
            self.elements = max(self.elements, out.untyped_storage().nbytes() // out.element_size())
        return out


@pytest.mark.parametrize("k", [None, 4])
def test_neither_ones_whole_logits_exist(k):
    hidden, weight = torch.randn(1, 512, 4, requires_grad=True), torch.randn(900, 4)
    batch = {"labels": torch.zeros(1, 512, dtype=torch.int64), "teacher_hidden": hidden.detach()}
    with Largest() as largest:
        loss = distillation(Hidden(torch.empty(0), weight), top_k=k, beta=0.5, chunk=16)
        loss(Hidden(hidden, weight), batch)[0].backward()
    assert largest.elements == 16 * 900


def test_a_teacher_that_is_the_student_is_no_loss():
    student, _, batch = inputs()
    batch["teacher_hidden"] = student[0].detach()
    for beta in (0.0, 0.5, 1.0):
        loss = distillation(Hidden(torch.empty(0), student[1]), beta=beta)
        total, _ = loss(Hidden(*student), batch)
        assert abs(float(total.detach())) < 1e-12
        assert all(g.abs().max() < 1e-12 for g in torch.autograd.grad(total, student))


def test_numbers_out_of_range_are_refused():
    with pytest.raises(ValueError, match="stored_distillation: beta must be"):
        stored_distillation(beta=1.5)
    with pytest.raises(ValueError, match="stored_distillation: temperature must be"):
        stored_distillation(temperature=0.0)


def test_a_teacher_of_another_vocabulary_is_refused():
    student, teacher_weight, batch = inputs()
    loss = distillation(Hidden(torch.empty(0), teacher_weight[:-1]))
    with pytest.raises(ValueError, match=r"must have shape \(24, 7\), a row .* got \(23, 7\)"):
        loss(Hidden(*student), batch)
