"""Losses of answers are those of TRL (1.16): its own functions, on the same log-probabilities.

Its trainers are not made: their loss functions get what they read, and a model that returns given
log-probabilities.
"""

import warnings
from collections import defaultdict
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
from packed_answers import documents_of, make_answers, weight_of

from trainkit.batch import count_documents, count_valid_tokens
from trainkit.losses import weight_by_document
from trainkit.post.objectives import (
    PolicyOptions,
    add_reference_point,
    cispo,
    distillation,
    dpo,
    ipo,
    k3,
    kto,
    log_ratio,
    orpo,
    policy_gradient,
    ppo_clip,
    sequence_policy_gradient,
    simpo,
)
from trainkit.types import SOLO, Hidden


def of_trl(name, home="trainer"):
    """Return a trainer of TRL; the one worker that runs these tests takes 4 s to import it."""
    pytest.importorskip("trl")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = import_module(f"trl.{home}.{name.lower()}_trainer")
    return getattr(module, f"{name}Trainer")


class Alone:
    """An accelerator of one process."""

    device, num_processes, sync_gradients = torch.device("cpu"), 1, True

    def gather(self, x):
        return x

    gather_for_metrics = gather

    def reduce(self, x, **_):
        return x


TRAINING = SimpleNamespace(training=True)


def metrics():
    return defaultdict(lambda: defaultdict(list))


def in_rows(batch):
    """Return each document in a row of its own, its columns, and its log-probabilities."""
    places = documents_of(batch)
    longest = max(place.stop - place.start for _, place in places)
    weight = weight_of()
    logprobs = (batch["x"] @ weight.T).log_softmax(-1)
    logprobs = logprobs.gather(-1, batch["labels"].clamp(min=0)[..., None])[..., 0]
    columns = {**batch, "logprobs": logprobs}
    rows = {}
    for name, x in columns.items():
        padded = x.new_zeros(len(places), longest, *x.shape[2:])
        for index, (row, place) in enumerate(places):
            padded[index, : place.stop - place.start] = x[row, place]
        rows[name] = padded
    kept = torch.zeros(len(places), longest, dtype=torch.bool)
    for index, (row, place) in enumerate(places):
        kept[index, : place.stop - place.start] = batch["labels"][row, place] != -100
    rows = {
        name: x.masked_fill(~kept, 0) if x.ndim == 2 and x.is_floating_point() else x
        for name, x in rows.items()
    }
    return rows, kept, weight


def ours(loss, batch, denominator):
    weight = weight_of()
    total = loss(Hidden(batch["x"], weight), batch)[0] / denominator
    return total.detach(), *torch.autograd.grad(total, weight)


def theirs(total, weight):
    return total.detach(), *torch.autograd.grad(total, weight)


def close(found, want):
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(a, b.double(), rtol=1e-6, atol=1e-7)


def model_of(logprobs):
    """Return what TRL calls as a model; a first column stands before the labels."""
    zeros = torch.zeros_like(logprobs)
    out = SimpleNamespace(
        log_probs=logprobs, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool(), aux_loss=None
    )

    class Model:
        training = True

        def __call__(self, **_):
            return out

    return Model()


def trl_dpo(kind, batch, *, beta, label_smoothing=0.0):
    rows, kept, weight = in_rows(batch)
    order = torch.cat([torch.arange(0, len(kept), 2), torch.arange(1, len(kept), 2)])
    mask = torch.cat([torch.zeros(len(kept), 1), kept[order]], dim=1)  # of input ids
    reference = rows["reference_logprobs"].sum(-1)
    inputs = {
        "input_ids": torch.zeros(mask.shape, dtype=torch.int64),
        "attention_mask": mask,
        "completion_mask": mask,
        "ref_chosen_logps": reference[0::2],
        "ref_rejected_logps": reference[1::2],
    }
    fake = SimpleNamespace(
        model=TRAINING,
        accelerator=Alone(),
        aux_loss_enabled=False,
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        loss_types=[kind],
        loss_weights=[1.0],
        beta=beta,
        label_smoothing=label_smoothing,
        use_weighting=False,
        _metrics=metrics(),
        _tp_size=1,
        _total_train_tokens=0,
    )
    model = model_of(rows["logprobs"][order])
    return theirs(of_trl("DPO")._compute_loss(fake, model, inputs, return_outputs=False), weight)


def test_dpo_and_ipo_are_trls():
    batch = make_answers()
    pairs = count_documents([batch], halves=True)
    close(ours(dpo(0.7), batch, pairs), trl_dpo("sigmoid", batch, beta=0.7))
    close(ours(ipo(0.5), batch, pairs), trl_dpo("ipo", batch, beta=0.5))


def test_conservative_dpo_is_trls_of_one_pair():
    """Its form for optimal transport smooths labels, and of one pair nothing is transported."""
    batch = make_answers(((5, 6),), row=11)
    found = ours(dpo(0.7, label_smoothing=0.2), batch, 1)
    close(found, trl_dpo("aot", batch, beta=0.7, label_smoothing=0.2))


@pytest.mark.parametrize("drift", [-1.0, 1.0])  # of one sign the reference point is 0
def test_kto_is_trls(drift):
    batch = make_answers(((5, 4, 6, 7), (4, 6)), row=22)  # flags stand beside labels
    others = make_answers(((3, 7, 5), (4, 6, 5)), row=15)
    others["reference_logprobs"] += drift
    answers_of_others, _, _ = in_rows(others)
    sums = log_ratio()(Hidden(others["x"], weight_of()), others)[1]
    (batch,) = add_reference_point([batch], sums["kl"] / sums["kl/count"])
    assert (drift < 0) == bool((batch["kl"] > 0).all())
    rows, kept, weight = in_rows(batch)
    mask = torch.cat([torch.zeros(len(kept), 1), kept], dim=1)
    good = torch.stack([(rows["desirable"][i][kept[i]] > 0).any() for i in range(len(kept))])
    ids = torch.zeros(mask.shape, dtype=torch.int64)
    inputs = {
        "input_ids": ids,
        "attention_mask": mask,
        "completion_mask": mask,
        "label": good,
        "ref_logps": rows["reference_logprobs"].sum(-1),
        "ref_KL_logps": answers_of_others["reference_logprobs"].sum(-1),
    }
    fake = SimpleNamespace(
        model=TRAINING,
        accelerator=Alone(),
        aux_loss_enabled=False,
        precompute_ref_logps=True,
        calculate_KL=True,
        loss_type="kto",
        beta=0.5,
        desirable_weight=0.8,
        undesirable_weight=1.2,
        _metrics=metrics(),
        _total_train_tokens=0,
        _tp_size=1,
        _compute_kl_logps=lambda *_: answers_of_others["logprobs"].sum(-1).detach(),
    )
    total = of_trl("KTO")._compute_loss(
        fake, model_of(rows["logprobs"]), inputs, return_outputs=False
    )
    loss = kto(0.5, desirable_weight=0.8, undesirable_weight=1.2)
    answers = count_documents([batch])
    assert 0 < int(good.sum()) < int(answers)
    found = ours(loss, batch, answers)
    close(found, theirs(total, weight))


def means_of(rows, kept):
    return rows["logprobs"].sum(-1) / kept.sum(-1).clamp(min=1)


def test_simpo_and_orpo_are_trls():
    batch = make_answers(((5, 4, 6, 7), (4, 6)), row=22)  # TRL divides by the tokens of each
    rows, kept, weight = in_rows(batch)
    assert kept.any(-1).all()
    chosen, rejected = means_of(rows, kept).view(-1, 2).unbind(-1)
    fake = SimpleNamespace(
        alpha=0.0,
        accelerator=Alone(),
        loss_type="simpo",
        simpo_gamma=0.5,
        beta=2.0,
        label_smoothing=0.0,
    )
    losses, *_ = of_trl("CPO", "experimental.cpo").cpo_loss(fake, chosen, rejected)
    pairs = count_documents([batch], halves=True)
    close(ours(simpo(2.0, gamma=0.5), batch, pairs), theirs(losses.mean(), weight))
    # TRL takes the mean of the chosen answers' tokens over the batch: a long answer counts more.
    # The paper's, and ours, is the mean over pairs of the means of their tokens.
    rows, kept, weight = in_rows(batch)
    chosen, rejected = means_of(rows, kept).view(-1, 2).unbind(-1)
    odds, *_ = of_trl("ORPO", "experimental.orpo").odds_ratio_loss(
        SimpleNamespace(beta=0.6, accelerator=Alone()), chosen, rejected
    )
    found = ours(orpo(0.6), batch, pairs)
    torch.testing.assert_close(found[0].float(), (-chosen - odds).mean().detach().float())
    of_tokens = rows["logprobs"][::2].sum() / kept[::2].sum()
    gap = (chosen.mean() - of_tokens).detach()
    assert gap.abs() > 1e-3
    total = -of_tokens - odds.mean()
    torch.testing.assert_close(found[0], (total - gap).detach().double(), rtol=1e-5, atol=1e-6)


def trl_grpo(batch, kind, *, level="token", high=0.2, beta=0.0, longest=16):
    rows, kept, weight = in_rows(batch)
    advantages = rows["advantages"].sum(-1) / kept.sum(-1).clamp(min=1)
    zeros = torch.zeros(len(kept), 0, dtype=torch.int64)
    inputs = {
        "prompt_ids": zeros,
        "prompt_mask": zeros,
        "completion_ids": rows["labels"],
        "completion_mask": kept.double(),
        "advantages": advantages,
        "old_per_token_logps": rows["old_logprobs"],
        "ref_per_token_logps": rows["reference_logprobs"],
        "num_items_in_batch": kept.sum(),
    }
    fake = SimpleNamespace(
        model=TRAINING,
        accelerator=Alone(),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level=level,
        beta=beta,
        args=SimpleNamespace(use_bias_correction_kl=False, delta=None, steps_per_generation=1),
        loss_type=kind,
        epsilon_low=0.1,
        epsilon_high=high,
        use_vllm=False,
        _metrics=metrics(),
        current_gradient_accumulation_steps=1,
        max_completion_length=longest,
        _entropy_bonus_enabled=False,
        _get_per_token_logps_and_entropies=lambda *_, **__: (
            rows["logprobs"],
            torch.zeros_like(rows["logprobs"]),
            None,
        ),
    )
    total = of_trl("GRPO")._compute_loss(fake, model_of(rows["logprobs"]), inputs)
    return theirs(total, weight), fake._metrics["train"]


def test_the_grpo_family_is_trls():
    batch = make_answers()
    answers, tokens = count_documents([batch]), count_valid_tokens([batch])
    (weighed,) = weight_by_document([{k: v for k, v in batch.items() if k != "weights"}], axis=SOLO)
    added = PolicyOptions(kl=k3, kl_weight=0.3)
    grpo = policy_gradient(ppo_clip(0.1, 0.2), added=added, weighted=True)
    close(ours(grpo, weighed, answers), trl_grpo(batch, "grpo", beta=0.3)[0])
    plain = policy_gradient(ppo_clip(0.1, 0.2), added=added)
    for kind, denominator in (("dr_grpo", answers * 16), ("dapo", tokens), ("bnpo", tokens)):
        close(ours(plain, batch, denominator), trl_grpo(batch, kind, beta=0.3)[0])
    # What TRL calls epsilon_high of CISPO is the bound itself.
    loss = policy_gradient(cispo(high=0.1))
    close(ours(loss, batch, tokens), trl_grpo(batch, "cispo", high=1.1)[0])
    gspo = sequence_policy_gradient(ppo_clip(0.1, 0.2), added=added)
    want, figures = trl_grpo(batch, "grpo", level="sequence", beta=0.3)
    close(ours(gspo, batch, answers), want)
    terms = gspo(Hidden(batch["x"], weight_of()), batch)[1]
    share = terms["clipped"] / terms["clipped/count"]
    assert float(share) == pytest.approx(figures["clip_ratio/region_mean"][0])


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_distillation_is_trls(beta):
    batch, weight = make_answers(), weight_of()
    batch["teacher_hidden"] = batch["x"].flip(-1)
    logits = [x @ weight.T for x in (batch["x"], batch["teacher_hidden"])]
    total = of_trl("GKD", "experimental.gkd").generalized_jsd_loss(
        logits[0],
        logits[1].detach(),
        labels=batch["labels"],
        beta=beta,
        temperature=1.7,
        reduction="sum",
    )
    loss = distillation(Hidden(torch.empty(0), weight_of()), beta=beta, temperature=1.7)
    close(ours(loss, batch, 1), theirs(total, weight))
