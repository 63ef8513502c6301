"""The promises of every loss, as a table, and those of each one alone."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from operators import OperatorMode

from trainkit.losses import (
    add_terms,
    cross_entropy,
    cross_entropy_per_token,
    declare_terms,
    linear,
    linear_cross_entropy,
    next_token,
    next_token_linear,
    token_logprobs,
    weighted_next_token,
    z_loss,
    z_term,
)
from trainkit.losses.linear import Factors, linear_sum_and_parts
from trainkit.losses.sources import report_by_source
from trainkit.post.objectives import (
    PolicyOptions,
    distillation,
    k3,
    policy_gradient,
    ppo_clip,
    sequence_policy_gradient,
    stored_distillation,
)
from trainkit.types import Hidden, apply_softcap

V, D = 11, 6


def make_logits(rows, tokens, seed=0, dtype=torch.float64):
    draw = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, tokens, V, generator=draw, dtype=dtype).requires_grad_(),)


def make_hidden(rows, tokens, seed=0, dtype=torch.float64):
    draw = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, tokens, D, generator=draw, dtype=dtype)
    weight = torch.randn(V, D, generator=draw, dtype=dtype)
    return hidden.requires_grad_(), weight.requires_grad_()


def linear_by_threes(output, batch):
    """Take chunks that do not divide the tokens, so that the seams are tested."""
    total = linear_cross_entropy(*output, batch["labels"], chunk=3)
    return total, {"loss": total.detach()}


def first(loss):
    """Give a loss over logits the one-tensor tuple that the table's makers return."""
    return declare_terms(*loss.terms)(lambda output, batch: loss(output[0], batch))


def linear_parts(output, batch):
    labels = batch["labels"]
    return *linear_sum_and_parts(Factors(*output), labels, chunk=3), (labels != -100).long()


linear_by_token = declare_terms("loss", per_token=linear_parts)(lambda *_: None)


def sourced(loss):
    """Give tokens a source that follows from their labels, so that every cut keeps it."""
    return declare_terms(*loss.terms)(
        lambda output, batch: loss(output, {**batch, "source": batch["labels"].clamp(min=0) % 3})
    )


def columned(loss):
    """Give tokens columns that follow from their labels; beside ignored ones stands what is none.

    So every cut keeps them, and whoever looks at a token that is ignored sees NaN.
    """

    def waves(labels, phase):
        return torch.sin(labels + phase).double().masked_fill(labels < 0, torch.nan)

    def columns(labels):
        return {
            "weights": 1.2 + waves(labels, 0),
            "advantages": -1.5 + waves(labels, 1),
            "old_logprobs": -2.4 + 0.1 * waves(labels, 2),
            "sampler_logprobs": -2.4 + 0.1 * waves(labels, 3),
            "reference_logprobs": -2.4 + waves(labels, 4),
            "teacher_hidden": torch.stack([waves(labels, i) for i in range(D)], dim=-1),
            "teacher_ids": torch.stack([(labels + i).abs() % V for i in (0, 3, 4)], dim=-1),
            "teacher_logprobs": torch.stack([waves(labels, i) - 3 for i in (5, 6, 7)], dim=-1),
        }

    return declare_terms(*loss.terms)(
        lambda output, batch: loss(output, {**columns(batch["labels"]), **batch})
    )


TEACHER = Hidden(torch.empty(0), torch.sin(torch.arange(V * D).double()).view(V, D))
ADDED = PolicyOptions(kl=k3, kl_weight=0.2, most_importance=1.1)
POLICY = policy_gradient(ppo_clip(0.9, 2.0), added=ADDED, entropy_weight=0.3)

FAMILY = {
    "distillation": (columned(distillation(TEACHER, temperature=0.8, chunk=3)), make_hidden),
    "reverse distillation": (
        columned(distillation(TEACHER, beta=1.0, temperature=0.8, chunk=3)),
        make_hidden,
    ),
    "mixed distillation": (
        columned(distillation(TEACHER, beta=0.3, temperature=0.8, chunk=3)),
        make_hidden,
    ),
    "distillation of 3": (
        columned(distillation(TEACHER, top_k=3, beta=0.3, temperature=0.8, chunk=3)),
        make_hidden,
    ),
    "stored distillation": (
        columned(stored_distillation(beta=0.3, temperature=0.8, chunk=3)),
        make_hidden,
    ),
    "stored, forward": (columned(stored_distillation(temperature=0.8, chunk=3)), make_hidden),
    "policy": (columned(POLICY), make_hidden),
    "policy, logits": (first(columned(POLICY)), make_logits),
    "weighted": (columned(weighted_next_token), make_hidden),
    "weighted, logits": (first(columned(weighted_next_token)), make_logits),
    "next_token": (first(next_token), make_logits),
    "next_token_linear": (next_token_linear, make_hidden),
    "linear in chunks of 3": (declare_terms("loss")(linear_by_threes), make_hidden),
    "z_term": (first(z_term), make_logits),
    "report_by_source": (first(sourced(report_by_source(["a", "b"]))), make_logits),
    "report_by_source, linear": (
        sourced(report_by_source(["a", "b"], next_token_linear)),
        make_hidden,
    ),
    "report_by_source, chunks of 3": (
        sourced(report_by_source(["a", "b"], linear_by_token)),
        make_hidden,
    ),
    "add_terms": (first(add_terms((next_token, 1.0), (z_term, 1e-2))), make_logits),
}
each = pytest.mark.parametrize(("loss", "make"), FAMILY.values(), ids=FAMILY.keys())


def make_labels(rows, tokens, seed=1, ignored=0.3):
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(V, (rows, tokens), generator=draw)
    return labels.masked_fill(torch.rand(rows, tokens, generator=draw) < ignored, -100)


def values_and_gradients(loss, output, labels):
    total, terms = loss(output, {"labels": labels})
    return total, terms, torch.autograd.grad(total, output)


def cut(output, rows, tokens):
    """Return part of an output: hidden states or logits are cut, a weight is not."""
    return (output[0][rows, tokens], *output[1:])


def close(a, b):
    return (a - b).abs().max() <= 1e-12 * b.abs().max()


@each
def test_reports_detached_sums_under_the_names_it_announced(loss, make):
    total, terms = loss(make(2, 5), {"labels": make_labels(2, 5)})
    assert tuple(terms) == loss.terms
    assert total.requires_grad
    assert all(value.ndim == 0 and not value.requires_grad for value in terms.values())


@each
@settings(max_examples=20)
@given(at=st.integers(0, 7), seed=st.integers(0, 99), ignored=st.sampled_from([0.0, 0.3, 0.9, 1.0]))
def test_is_additive_over_every_split_of_the_tokens(loss, make, at, seed, ignored):
    output, labels = make(2, 7, seed), make_labels(2, 7, seed, ignored)
    total, terms, gradients = values_and_gradients(loss, output, labels)
    parts = [(slice(None), slice(0, at)), (slice(None), slice(at, 7))]
    halves = [loss(cut(output, *part), {"labels": labels[part]}) for part in parts]
    summed = sum(half[0] for half in halves)
    assert close(summed, total)
    for name in loss.terms:
        assert close(sum(half[1][name] for half in halves), terms[name])
    for mine, whole in zip(torch.autograd.grad(summed, output), gradients, strict=True):
        assert close(mine, whole)


@each
def test_ignored_tokens_count_for_nothing(loss, make):
    output, labels = make(2, 6), make_labels(2, 6)
    total, _, gradients = values_and_gradients(loss, output, labels)
    for other in (0.0, 1e3, -1e30):
        filled = output[0].detach().masked_fill((labels == -100).unsqueeze(-1), other)
        changed = (filled.requires_grad_(), *output[1:])
        again, _, same = values_and_gradients(loss, changed, labels)
        assert torch.equal(again, total)
        assert all(torch.equal(a, b) for a, b in zip(same, gradients, strict=True))
    assert (gradients[0][labels == -100] == 0).all()
    assert (gradients[0][labels != -100] != 0).any(-1).all()


@each
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("hold", [0.5, -3e4])
def test_nothing_but_ignored_tokens_gives_attached_zeros(loss, make, dtype, hold):
    output = make(2, 4, dtype=dtype)
    output[0].data.fill_(hold)
    total, _, gradients = values_and_gradients(loss, output, torch.full((2, 4), -100))
    assert total.item() == 0
    assert all((g == 0).all() and g.dtype == dtype for g in gradients)


@each
def test_no_token_at_all_is_a_zero(loss, make):
    total, _, gradients = values_and_gradients(loss, make(0, 4), torch.zeros(0, 4).long())
    assert total.item() == 0
    assert all((g == 0).all() for g in gradients)


@each
def test_gradients_are_those_of_finite_differences(loss, make):
    labels = make_labels(2, 4)
    assert torch.autograd.gradcheck(
        lambda *output: 0.7 * loss(output, {"labels": labels})[0], make(2, 4)
    )


@each
def test_packed_and_unpacked_documents_give_the_same(loss, make):
    lengths = [3, 1, 5]
    output, labels = make(1, sum(lengths)), make_labels(1, sum(lengths))
    total, _, gradients = values_and_gradients(loss, output, labels)
    pieces = output[0].detach().split(lengths, dim=1)
    padded = torch.zeros(3, 5, output[0].shape[-1], dtype=torch.float64)
    padded_labels = torch.full((3, 5), -100)
    for row, (piece, label) in enumerate(zip(pieces, labels.split(lengths, 1), strict=True)):
        padded[row, : piece.shape[1]], padded_labels[row, : piece.shape[1]] = piece[0], label[0]
    unpacked = (padded.requires_grad_(), *output[1:])
    again, _, same = values_and_gradients(loss, unpacked, padded_labels)
    assert close(again, total)
    rows = torch.cat([same[0][row, :length] for row, length in enumerate(lengths)])
    assert close(rows, gradients[0][0])
    assert all(close(a, b) for a, b in zip(same[1:], gradients[1:], strict=True))


@each
def test_bf16_is_accumulated_in_fp32(loss, make):
    exact = make(2, 64)
    low = tuple(x.detach().bfloat16().requires_grad_() for x in exact)
    same = tuple(x.detach().double().requires_grad_() for x in low)
    labels = make_labels(2, 64)
    total, _, gradients = values_and_gradients(loss, low, labels)
    want, _, wanted = values_and_gradients(loss, same, labels)
    assert total.dtype == torch.float32
    assert abs(total - want) <= 1e-6 * want.abs()  # a bf16 sum is off by 2e-3
    for g, w in zip(gradients, wanted, strict=True):
        assert g.dtype == torch.bfloat16
        assert (g.double() - w).abs().max() <= 2**-8 * w.abs().max()


# --------------------------------------------------------------------------------- cross entropy


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_cross_entropy_is_torchs(dtype):
    logits, labels = make_logits(3, 5, dtype=dtype)[0], make_labels(3, 5)
    want = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), reduction="sum"
    )
    assert cross_entropy(logits, labels).dtype == dtype
    assert torch.equal(cross_entropy(logits, labels), want)


def test_a_word_that_is_ruled_out_is_no_nan():
    logits = torch.zeros(2, V, dtype=torch.float64)
    logits[:, 3] = float("-inf")
    (gradient,) = torch.autograd.grad(
        cross_entropy(logits.requires_grad_(), torch.tensor([1, 2])), logits
    )
    assert gradient.isfinite().all()


def test_z_loss_is_the_squared_normalizer():
    logits, labels = make_logits(2, 3)[0], make_labels(2, 3)
    want = sum(
        logits[row, token].exp().sum().log() ** 2
        for row, token in (labels != -100).nonzero().tolist()
    )
    assert close(z_loss(logits, labels), want)


# -------------------------------------------------------------------------- linear cross entropy


@pytest.mark.parametrize("chunk", [None, 1, 4, 10, 99])
def test_linear_is_cross_entropy_of_the_product_for_every_chunk(chunk):
    hidden, weight = make_hidden(2, 5)
    labels = make_labels(2, 5)
    want = cross_entropy(hidden @ weight.T, labels)
    have = linear_cross_entropy(hidden, weight, labels, chunk=chunk)
    assert close(have, want)
    for a, b in zip(
        torch.autograd.grad(3 * have, (hidden, weight)),
        torch.autograd.grad(3 * want, (hidden, weight)),
        strict=True,
    ):
        assert close(a, b)


def record_products(monkeypatch, products):
    """Add an entry to a list for each call of `torch.mm`."""
    multiply = torch.mm

    def mm(*args, **kwargs):
        products.append("mm")
        return multiply(*args, **kwargs)

    monkeypatch.setattr(torch, "mm", mm)


@pytest.mark.parametrize("frozen", ["hidden", "weight", "both"])
def test_linear_computes_only_the_gradients_that_are_needed(frozen, monkeypatch):
    hidden, weight = make_hidden(2, 5)
    labels = make_labels(2, 5)
    want = torch.autograd.grad(linear_cross_entropy(hidden, weight, labels), (hidden, weight))
    products = []
    record_products(monkeypatch, products)
    hidden.requires_grad_(frozen == "weight")
    weight.requires_grad_(frozen == "hidden")
    total = linear_cross_entropy(hidden, weight, labels, chunk=10)
    assert len(products) == (2 if frozen == "weight" else 1)
    assert total.requires_grad == (frozen != "both")
    if frozen != "both":
        total.backward()
    assert hidden.grad is None or close(hidden.grad, want[0])
    assert weight.grad is None or close(weight.grad, want[1])


@pytest.mark.parametrize("chunk", [None, 3])
def test_linear_without_gradients_is_the_same_number(chunk, monkeypatch):
    hidden, weight = make_hidden(2, 5)
    labels = make_labels(2, 5)
    want = linear_cross_entropy(hidden, weight, labels, chunk=chunk)
    monkeypatch.setattr(torch.Tensor, "addmm_", None)  # nothing adds to a weight's gradient
    with torch.no_grad():
        alone = linear_cross_entropy(hidden, weight, labels, chunk=chunk)
    assert not alone.requires_grad
    assert torch.equal(alone, want)


def test_linear_leaves_its_inputs_and_a_second_backward_alone():
    hidden, weight = make_hidden(2, 5)
    kept = hidden.detach().clone(), weight.detach().clone()
    total = linear_cross_entropy(hidden, weight, make_labels(2, 5), chunk=3)
    one, two = (torch.autograd.grad(total, weight, 2 * total, retain_graph=True) for _ in "ab")
    assert torch.equal(one[0], two[0])
    assert torch.equal(hidden, kept[0])
    assert torch.equal(weight, kept[1])


def test_linear_refuses_a_second_derivative():
    hidden, weight = make_hidden(1, 3)
    total = linear_cross_entropy(hidden, weight, make_labels(1, 3, ignored=0), chunk=2)
    (gradient,) = torch.autograd.grad(total.square(), weight, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_linear_follows_autocast_as_a_linear_layer_does():
    hidden, weight = make_hidden(2, 5, dtype=torch.float32)
    labels = make_labels(2, 5)
    with torch.autocast("cpu", torch.bfloat16):
        have = linear_cross_entropy(hidden.bfloat16(), weight, labels)
    want = linear_cross_entropy(hidden.bfloat16(), weight.bfloat16(), labels)
    assert torch.equal(have, want)
    assert torch.autograd.grad(have, weight)[0].dtype == torch.float32


# Dynamo (2.13) reads .grad of tensors that are no leaves; it hides the warning, but not an error.
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_linear_in_chunks_runs_untraced_inside_a_compiled_function():
    hidden, weight = make_hidden(2, 5)
    labels = make_labels(2, 5)

    def twice(hidden, weight):
        return 2 * linear_cross_entropy(1 * hidden, weight, labels, chunk=3)

    traced = []

    def backend(module, inputs):
        del inputs
        traced.extend(str(node.target) for node in module.graph.nodes)
        return module.forward

    have, want = torch.compile(twice, backend=backend)(hidden, weight), twice(hidden, weight)
    assert traced
    assert not any("autograd_function" in name for name in traced)
    assert torch.equal(have, want)
    for a, b in zip(*(torch.autograd.grad(x, (hidden, weight)) for x in (have, want)), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("grad", [True, False])
def test_linear_never_holds_more_than_a_chunk_of_logits(grad):
    hidden, weight = torch.randn(4096, 8), torch.randn(5000, 8, requires_grad=grad)
    labels = torch.zeros(4096, dtype=torch.int64)

    sizes = []

    def watch(_, result):
        if isinstance(result, torch.Tensor):
            sizes.append(result.untyped_storage().nbytes() // 4)

    with OperatorMode(watch):
        linear_cross_entropy(hidden, weight, labels)
    assert 5000 * 8 < max(sizes) <= 2**22
    sizes.clear()
    with OperatorMode(watch):
        linear_cross_entropy(hidden, weight, labels, chunk=16)
    assert max(sizes) == 16 * 5000


# ------------------------------------------------------------------------------------- add_terms


def test_add_terms_weighs_the_sum_and_reports_plain_terms():
    (logits,), batch = make_logits(2, 3), {"labels": make_labels(2, 3)}
    total, terms = add_terms((next_token, 2.0), (z_term, -0.5))(logits, batch)
    assert close(total, 2 * cross_entropy(logits, batch["labels"]) - 0.5 * terms["z_loss"])
    assert torch.equal(terms["loss"], cross_entropy(logits, batch["labels"]))


def test_add_terms_nests():
    (logits,), batch = make_logits(2, 3), {"labels": make_labels(2, 3)}
    nested = add_terms((add_terms((next_token, 3.0)), 2.0), (z_term, 1.0))
    assert nested.terms == ("loss", "z_loss")
    assert close(
        nested(logits, batch)[0], add_terms((next_token, 6.0), (z_term, 1.0))(logits, batch)[0]
    )


@pytest.mark.parametrize(
    ("weighted", "message"),
    [
        ([], "at least one"),
        ([(next_token, 1.0), (next_token, 2.0)], r"its own name, got \['loss'\]"),
        ([(next_token, float("nan"))], "finite, got nan"),
        ([(cross_entropy, 1.0)], "declare_terms"),
    ],
)
def test_add_terms_refuses_what_cannot_be_told_apart(weighted, message):
    with pytest.raises(ValueError, match=f"add_terms: .*{message}"):
        add_terms(*weighted)


# -------------------------------------------------------------------------------------
# report_by_source

BY_SOURCE = {
    "logits": (next_token, lambda: make_logits(3, 7)[0]),
    "hidden": (next_token_linear, lambda: make_hidden(3, 7)),
    "chunks": (linear_by_token, lambda: make_hidden(3, 7)),
}


@pytest.mark.parametrize(("loss", "make"), BY_SOURCE.values(), ids=BY_SOURCE.keys())
def test_each_source_has_the_loss_of_its_own_tokens(loss, make):
    output, labels = make(), make_labels(3, 7)
    names, source = ["web", "code", "chat"], torch.arange(21).view(3, 7) % 4 - 1
    total, terms = report_by_source(names, loss)(output, {"labels": labels, "source": source})
    for number, name in enumerate(names):
        own = labels.masked_fill(source != number, -100)
        want = loss.per_token(output, {"labels": own})[0]
        assert close(terms[f"loss/{name}"], want)
        assert int(terms[f"loss/{name}/count"]) == int((own != -100).sum())
    apart = labels.masked_fill(source != -1, -100)
    rest = loss.per_token(output, {"labels": apart})[0]
    assert close(sum(terms[f"loss/{name}"] for name in names) + rest, total)
    assert torch.equal(terms["loss"], total)


@pytest.mark.parametrize(
    ("loss", "make"), [(next_token, make_logits), (next_token_linear, make_hidden)]
)
@pytest.mark.parametrize("tokens", [7, 1500])  # the second is more than the plain path takes
def test_the_sum_by_source_is_the_plain_loss_to_the_last_bit(loss, make, tokens, monkeypatch):
    monkeypatch.setattr(linear, "_SMALL", 2**10)
    output, labels = make(1, tokens, dtype=torch.float32), make_labels(1, tokens)
    output = output if loss is next_token_linear else output[0]
    batch = {"labels": labels, "source": torch.zeros_like(labels)}
    one, _ = report_by_source(["all"], loss)(output, batch)
    two, _ = loss(output, batch)
    assert torch.equal(one, two)
    for a, b in zip(
        torch.autograd.grad(one, output), torch.autograd.grad(two, output), strict=True
    ):
        assert torch.equal(a, b)


def test_by_source_multiplies_no_more_than_the_plain_loss(monkeypatch):
    output, labels, products = make_hidden(2, 5), make_labels(2, 5), []
    record_products(monkeypatch, products)
    linear_by_threes(output, {"labels": labels})
    plain = len(products)
    report_by_source(["a"], linear_by_token)(output, {"labels": labels, "source": 0 * labels})
    assert len(products) == 2 * plain > 0


def test_by_source_joins_other_terms():
    (logits,), labels = make_logits(2, 3), make_labels(2, 3)
    batch = {"labels": labels, "source": torch.zeros_like(labels)}
    loss = add_terms((report_by_source(["a", "b"]), 1.0), (z_term, 0.5))
    total, terms = loss(logits, batch)
    assert close(total, next_token(logits, batch)[0] + 0.5 * z_loss(logits, labels))
    assert tuple(terms) == loss.terms
    assert terms["loss/b"] == terms["loss/b/count"] == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: report_by_source([]), "different names, at least one"),
        (lambda: report_by_source(["a", "a"]), "different names"),
        (lambda: report_by_source("web"), "different names"),
        (lambda: report_by_source(["a"], z_term), "z_term does not give the loss of each token"),
        (
            lambda: report_by_source(["a"], report_by_source(["b"])),
            "does not give the loss of each token",
        ),
        (
            lambda: report_by_source(["a"])(torch.zeros(1, 1, V), {"labels": LABELS[:1, :1]}),
            'no "source"; make_step_batch',
        ),
    ],
)
def test_by_source_refuses_what_it_cannot_tell_apart(call, message):
    with pytest.raises(ValueError, match=f"report_by_source: .*{message}"):
        call()


# ------------------------------------------------------------------------------- tokens and terms


@pytest.mark.parametrize("softcap", [None, 0.7])
def test_losses_of_tokens_and_a_bias_are_those_of_the_product_and_can_be_differentiated(softcap):
    hidden, weight = make_hidden(2, 5)
    labels, bias = make_labels(2, 5), torch.linspace(-1, 1, V, dtype=torch.float64).requires_grad_()
    weights = torch.linspace(-1, 2, 10, dtype=torch.float64).view(2, 5)
    inputs = hidden, weight, bias
    logits = apply_softcap(torch.nn.functional.linear(*inputs), softcap)
    rows = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), reduction="none"
    )
    want = rows.view(2, 5)
    each = -token_logprobs(hidden, weight, labels, bias=bias, softcap=softcap, chunk=3)
    for have in (each, cross_entropy_per_token(logits, labels)):
        assert close(have, want)
        grads = [
            torch.autograd.grad((weights * x).square().sum(), inputs, retain_graph=True)
            for x in (have, want)
        ]
        assert all(close(a, b) for a, b in zip(*grads, strict=True))
    for chunk in (3, None):
        total = linear_cross_entropy(
            hidden, weight, labels, bias=bias, softcap=softcap, chunk=chunk
        )
        assert close(total, want.sum())
        grads = [torch.autograd.grad(x, inputs, retain_graph=True) for x in (total, want.sum())]
        assert all(close(a, b) for a, b in zip(*grads, strict=True))
    with torch.no_grad():
        assert not token_logprobs(hidden, weight, labels).requires_grad


def test_a_second_term_costs_no_second_pass(monkeypatch):
    monkeypatch.setattr(linear, "_SMALL", 1)
    output, batch, products = make_hidden(2, 5), {"labels": make_labels(2, 5)}, []
    record_products(monkeypatch, products)
    costs = []
    for loss in (
        next_token_linear,
        add_terms((add_terms((next_token_linear, 1.0)), 1.0), (z_term, 1e-2)),
    ):
        products.clear()
        loss(output, batch)[0].backward()
        costs.append(len(products))
    assert costs[0] == costs[1] > 0


# ------------------------------------------------------------------------------------- bad input

LOGITS, LABELS = torch.zeros(2, 3, V), torch.zeros(2, 3, dtype=torch.int64)


@pytest.mark.parametrize("label", [V, -1, 2**40])
def test_a_label_outside_of_the_vocabulary_is_told_in_words(label):
    labels = LABELS.clone()
    labels[0, 1], labels[1, 1] = -100, label
    for loss in (cross_entropy, z_loss, cross_entropy_per_token):
        with pytest.raises(ValueError, match=rf"{loss.__name__}: .*\[0, 11\).* {label} at index 4"):
            loss(LOGITS, labels)
    for loss in (linear_cross_entropy, token_logprobs):
        with pytest.raises(ValueError, match=rf"{loss.__name__}: .*\[0, 11\).* {label} at index 4"):
            loss(torch.zeros(2, 3, D), torch.zeros(V, D), labels)


def test_fake_labels_are_not_looked_at():
    with torch._subclasses.FakeTensorMode():
        assert cross_entropy(torch.zeros(3, 4), torch.full((3,), 7)).shape == ()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: cross_entropy(LOGITS.long(), LABELS),
            "cross_entropy: .* floating, got torch.int64",
        ),
        (
            lambda: z_loss(LOGITS.to(torch.complex64), LABELS),
            "z_loss: .* floating, got torch.complex",
        ),
        (
            lambda: cross_entropy(LOGITS[..., :0], LABELS - 100),
            "must have a word, got one of size 0",
        ),
        (
            lambda: next_token(LOGITS, {"input_ids": LABELS}),
            'next_token: the batch has no "labels"',
        ),
        (lambda: z_term(LOGITS, {}), 'z_term: the batch has no "labels" \\(it has nothing\\)'),
        (
            lambda: next_token_linear(LOGITS, {"labels": LABELS}),
            "next_token_linear: a Hidden or a pair",
        ),
        (
            lambda: next_token((LOGITS, LOGITS), {"labels": LABELS}),
            "got a tuple; use next_token_linear",
        ),
        (
            lambda: report_by_source(["a"])(LOGITS, {"labels": LABELS, "source": LABELS[:1]}),
            r"report_by_source: source must have the shape of labels \(2, 3\).*got \(1, 3\)",
        ),
        (
            lambda: linear_cross_entropy(
                torch.zeros(2, 3, D), torch.zeros(V, D), LABELS, bias=torch.zeros(D)
            ),
            r"bias must have shape \(11,\).*got \(6,\)",
        ),
    ],
)
def test_what_is_no_loss_is_refused_in_words(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("loss", [cross_entropy, z_loss])
@pytest.mark.parametrize(
    ("logits", "labels"),
    [
        (LOGITS, LABELS[:1]),
        (LOGITS, LABELS.flatten()),
        (LOGITS[0, 0], LABELS),
        (LOGITS, LABELS.float()),
    ],
)
def test_labels_that_do_not_fit_are_refused_by_name(loss, logits, labels):
    with pytest.raises(ValueError, match=f"{loss.__name__}: labels must"):
        loss(logits, labels)


@pytest.mark.parametrize(
    ("hidden", "weight", "labels", "chunk", "message"),
    [
        (torch.zeros(2, 3, D), torch.zeros(V, D), LABELS[:1], None, "labels must have shape"),
        (
            torch.zeros(2, 3, D),
            torch.zeros(D, V),
            LABELS,
            None,
            r"\(vocabulary, 6\).*got \(6, 11\)",
        ),
        (torch.zeros(2, 3, D), torch.zeros(V, D).double(), LABELS, None, "one dtype"),
        (torch.zeros(2, 3, D), torch.zeros(V, D), LABELS, 0, "at least 1, got 0"),
        (torch.zeros(2, 3, D), torch.zeros(V, D), LABELS, -4, "at least 1, got -4"),
    ],
)
def test_linear_refuses_bad_input_by_name(hidden, weight, labels, chunk, message):
    with pytest.raises(ValueError, match=f"linear_cross_entropy: .*{message}"):
        linear_cross_entropy(hidden, weight, labels, chunk=chunk)


def test_the_fp16_weight_gradient_of_many_tokens_does_not_overflow():
    hidden = torch.full((4096, 2), 30.0, dtype=torch.float16)
    weight = torch.zeros(8, 2, dtype=torch.float16, requires_grad=True)
    labels = torch.zeros(4096, dtype=torch.int64)
    (linear_cross_entropy(hidden, weight, labels, chunk=64) / 4096).backward()
    assert weight.grad.isfinite().all()
    assert weight.grad[0, 0] == pytest.approx(-30 * 7 / 8, rel=1e-3)


@pytest.mark.parametrize("names", [[], ["a", "a"], "ab", ["web", "count"], ["web/count", "web"]])
def test_names_that_would_mix_up_sums_and_counts_are_refused(names):
    with pytest.raises(ValueError, match="report_by_source: "):
        report_by_source(names)


@pytest.mark.skipif(torch.__version__ < "2.13", reason="traces no dtype of a product")
def test_the_weight_gradient_of_bf16_factors_is_added_in_place():
    """On CUDA: no second fp32 matrix of the weight's size for each chunk."""
    seen = []

    total = torch.zeros(V, D, device="meta")
    slopes, inputs = (torch.zeros(5, n, dtype=torch.bfloat16, device="meta") for n in (V, D))
    with OperatorMode(lambda operator, _: seen.append(str(operator))):
        linear.add_product_(total, slopes.t(), inputs)
    assert [name for name in seen if name != "aten.t.default"] == ["aten.addmm.dtype_out"]


@pytest.mark.parametrize("of_hidden", [False, True])
def test_a_policy_loss_is_its_formula(of_hidden):
    """Entropy lowers the loss; what the trainer finds likelier than the sampler weighs more."""
    hidden, weight = make_hidden(2, 5)
    labels = torch.arange(10).view(2, 5) % V
    batch = {"labels": labels.masked_fill(labels == 3, -100)}
    for phase, name in enumerate(("old_logprobs", "sampler_logprobs", "advantages")):
        batch[name] = torch.sin(torch.arange(10).double().view(2, 5) + 2 * phase)
    logprobs = (hidden @ weight.T).log_softmax(-1)
    entropies = -(logprobs.exp() * logprobs).sum(-1)
    ratios = (logprobs.gather(-1, labels[..., None])[..., 0] - batch["old_logprobs"]).exp()
    plain, bounded = (x * batch["advantages"] for x in (ratios, ratios.clamp(0.8, 1.5)))
    importance = (batch["old_logprobs"] - batch["sampler_logprobs"]).exp().clamp(max=1.2)
    want = -torch.minimum(plain, bounded) * importance - 0.3 * entropies
    want = want[batch["labels"] >= 0].sum()
    added = PolicyOptions(most_importance=1.2)
    loss = policy_gradient(ppo_clip(0.2, 0.5), added=added, entropy_weight=0.3)
    found, _ = loss(Hidden(hidden, weight) if of_hidden else hidden @ weight.T, batch)
    torch.testing.assert_close(found, want)


def test_the_importance_of_an_answer_is_the_product_of_those_of_its_tokens():
    (logits,) = make_logits(1, 4)
    labels = torch.tensor([[1, 2, 3, -100]])
    places = torch.arange(4).view(1, 4)
    batch = {"labels": labels, "document_ids": torch.zeros_like(labels), "position_ids": places}
    old = logits.detach().log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    batch |= {"old_logprobs": old, "sampler_logprobs": old - 0.4}
    batch["advantages"] = torch.full_like(old, 2.0)
    loss = sequence_policy_gradient(ppo_clip(0.2, 0.2), added=PolicyOptions(most_importance=50.0))
    total, _ = loss(logits, batch)
    torch.testing.assert_close(total, -2.0 * torch.tensor(3 * 0.4).double().exp())
