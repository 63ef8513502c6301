"""The models that trainkit certifies: decoders, an exact model of integers, and a foreign one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from typing import Any, get_args

import attrs
import numpy as np
import torch
from torch import nn

from trainkit import losses, models
from trainkit.batch import collate_bins
from trainkit.data.corpus import TokenCorpus
from trainkit.losses.terms import NamedLoss
from trainkit.mesh import solo_parallel
from trainkit.noise.counters import make_token_keys
from trainkit.optim import make_optimizer
from trainkit.optim.table import OPTIMIZERS
from trainkit.packing import pack_bins
from trainkit.parallel.compile import compile_blocks
from trainkit.parallel.expert_parallel import expert_parallel
from trainkit.parallel.fsdp import fsdp
from trainkit.parallel.recompute import recompute
from trainkit.parallel.sequence_parallel import sequence_parallel
from trainkit.parallel.tensor_parallel import tensor_parallel
from trainkit.parallel.transforms import Transform
from trainkit.post import objectives
from trainkit.post.adapters import Lora, lora, quantized
from trainkit.post.adapters.formats import QuantizationFormat
from trainkit.post.adapters.frozen import (
    QuantizationSpec,
    can_shard_bytes,
    get_quantizations,
    round_weights,
)
from trainkit.sampling import shuffle_epochs
from trainkit.text.chat import pack_pairs
from trainkit.tools.testing import exact
from trainkit.tools.testing.cases import LayoutCase, make_default_cases
from trainkit.tools.testing.certificate import Certificate, tier_called
from trainkit.tools.testing.certify import certify_together
from trainkit.tools.testing.foreign import ForeignModel, call_foreign, foreign_plan, split_foreign
from trainkit.tools.testing.train import Training, certificate_weights
from trainkit.types import Axis, Batch, Hidden, Layout, Log

# 8 ranks of Ulysses divide the heads, and 4 of tp the key heads; 4 layers make 4 stages.
CONFIG = models.DecoderConfig(
    vocab_size=64, width=32, layers=4, heads=8, kv_heads=4, mlp_width=48, qk_norm=True
)
# A model that no case splits into four stages has two layers: its rows take half the time.
SHALLOW = attrs.evolve(CONFIG, layers=2)
ROWS = 4
"""Rows of a global batch, and most ranks that they serve; above, a batch has twice as many."""
CAPACITY = 64
TIMEOUT = 180.0  # compiling takes some seconds a rank, and more where other work wants the cores


def decoder_of(config: models.DecoderConfig) -> nn.Module:
    """Return a decoder for the fused loss, as in a recipe.

    Examples:
        >>> with torch.device("meta"):
        ...     model = decoder_of(CONFIG)
        >>> model.output
        'hidden'
    """
    return models.Decoder(config, head="hidden")


def half_frozen(config: models.DecoderConfig) -> nn.Module:
    """Return a decoder whose lower half is frozen, embedding included, as for fine-tuning.

    Examples:
        >>> with torch.device("meta"):
        ...     model = half_frozen(CONFIG)
        >>> model.layers["1"].mlp.up.weight.requires_grad, model.head.weight.requires_grad
        (False, True)
    """
    model: Any = decoder_of(config)
    lower = [block for index, block in model.layers.items() if int(index) < config.layers // 2]
    for module in (model.embedding, *lower):
        module.requires_grad_(False)
    return model


# All features of a router at once, and a dense first layer (`first=1`).
EXPERTS = models.Experts(
    count=8,
    top_k=2,
    width=16,
    shared=16,
    shared_gate=True,
    first=1,
    scores="sigmoid",
    biased=True,
    groups=4,
    groups_chosen=2,
    jitter=0.05,
)


# What those lack: other scores, a layer that hashes token ids, experts without a gate, and outputs
# that are scaled down by load.
HASHED_EXPERTS = attrs.evolve(
    EXPERTS,
    first=0,
    hash_layers=1,
    scores="sqrtsoftplus",
    gated=False,
    activation="relu2",
    load_limit=0.9,
)


def with_experts(config: models.DecoderConfig, *, experts: models.Experts = EXPERTS) -> nn.Module:
    """Return a decoder with experts whose routers have loads and biases, as after a few steps.

    Examples:
        >>> with_experts(CONFIG).layers["1"].mlp.router.bias[0].item()
        0.10000000149011612
    """
    model: Any = decoder_of(attrs.evolve(config, experts=experts))
    # Zero biases would hide a router that forgets them, or shards them wrongly.
    for i in model.config.expert_layers:
        router = model.layers[str(i)].mlp.router
        router.load.copy_(torch.linspace(0.02, 0.23, EXPERTS.count))
        router.bias.copy_(torch.linspace(0.1, -0.1, EXPERTS.count))
    return model


_ATTENTION = "layers.*.attention.{w[qkvgo],wkv}"
_MLP = "layers.*.mlp.{gate,up,down}"
_EXPERT_MATRICES = "layers.*.mlp.experts.{gate,up,down}"


def with_adapters(
    config: models.DecoderConfig, *, form: QuantizationFormat | None = None
) -> nn.Module:
    """Return a decoder that trains LoRA and DoRA adapters, with dropout, and its embedding.

    If the configuration has experts, these have adapters too, and the head is trained in place of
    the embedding. With a format, the frozen matrices are quantized.

    Examples:
        >>> with torch.device("meta"):
        ...     model = with_adapters(CONFIG)
        >>> model.layers["0"].mlp.up.lora["default"].b.shape
        torch.Size([48, 4])
    """
    has_experts = config.experts is not None
    model = with_experts(config) if has_experts else decoder_of(config)
    if form is not None:
        model = quantized(form)(model, solo_parallel())
    # A larger alpha amplifies rounding, no more: at 32 tp2 is 4.6e-13 from one rank, and one rank
    # that adds up each product in two halves 1.8e-12; in fp32 they are 4.4e-4 and 4.7e-4.
    if has_experts:
        inner = Lora(_EXPERT_MATRICES, rank=2, alpha=1.0, dora=True, dropout=0.2)
    else:
        inner = Lora(_MLP, rank=4, alpha=1.0, dora=True)
    add = lora(
        Lora(_ATTENTION, rank=3, alpha=1.0, dropout=0.3),
        inner,
        trained="head" if has_experts else "embedding",
        # LoRA's own B is zero, so that A would have no gradient in the first step.
        values=lambda _, name, shape, offset: certificate_weights(name, shape, offset),
    )
    return add(model, solo_parallel())


def as_held(
    config: models.DecoderConfig,
    form: QuantizationFormat,
    name: str,
    shape: Sequence[int],
    offset: Sequence[int],
) -> torch.Tensor:
    """Return `certificate_weights`, with those of a decoder's frozen matrices quantized.

    Examples:
        >>> as_held(CONFIG, "int8", "norm.weight", (1,), (0,)).shape
        torch.Size([1])
    """
    return round_weights(certificate_weights, _get_quantizations(config, form))(name, shape, offset)


@cache  # one model serves for the weights of all its parameters
def _get_quantizations(
    config: models.DecoderConfig, form: QuantizationFormat
) -> dict[str, QuantizationSpec]:
    with torch.device("meta"):
        return get_quantizations(with_adapters(config, form=form))


_EPS = {"adamw": {"eps": 1e-4}, "schedule-free": {"eps": 1e-4}}  # see `certificate_optimizer`


def stepped_by(name: str, stages: Sequence[nn.Module], axis: Axis) -> torch.optim.Optimizer:
    """Return one of `OPTIMIZERS` by name, with the hyperparameters of a certificate.

    Effects:
        Communicates on `axis`.

    Examples:
        >>> from trainkit.mesh import solo_parallel
        >>> type(stepped_by("lion", [nn.Linear(2, 2)], solo_parallel().pp)).__name__
        'Lion'
    """
    return make_optimizer(
        stages,
        lr=1e-2,
        weight_decay=0.1,
        optimizer=name,
        options=_EPS.get(name, {}),
        axis=axis,
    )


def several_optimizers(stages: Sequence[nn.Module], axis: Axis) -> torch.optim.Optimizer:
    """Return all elementwise optimizers combined, each with some parameters, and their average.

    Effects:
        Communicates on `axis`.

    Examples:
        >>> from trainkit.mesh import solo_parallel
        >>> optimizer = several_optimizers([with_experts(SHALLOW)], solo_parallel().pp)
        >>> sorted({group["optimizer"] for group in optimizer.param_groups if group["params"]})
        ['Lion', 'LowPrecisionAdamW', 'Momentum', 'ScheduleFree', 'SignSGD']
    """
    schedule_free = {"optimizer": "schedule-free", "cautious": True, **_EPS["schedule-free"]}
    groups = {
        "embedding.*": {"optimizer": "signsgd", "cautious": True},
        "**.attention.**": schedule_free,
        "**.experts.**": {"optimizer": "lion", "cautious": True},
        "**router**": {"optimizer": "momentum", "cautious": True},
    }
    return make_optimizer(
        stages,
        lr=1e-2,
        weight_decay=0.1,
        options={"cautious": True, **_EPS["adamw"]},
        groups=groups,
        mean=0.5,
        axis=axis,
    )


# All sizes of latents and of the parts of heads differ, so that confusing two of them shows.
LATENT = attrs.evolve(
    SHALLOW,
    kv_heads=8,
    qk_norm=False,
    latents=models.Latents(query_rank=20, kv_rank=12, plain=10, rotary=8, values=6),
)
# Queries without a latent, as in DeepSeek-V2-Lite.
NO_QUERY_RANK = attrs.evolve(LATENT, latents=attrs.evolve(LATENT.latents, query_rank=None))

# One layer with the gated delta rule to one of attention, with other heads. They are larger, since
# normalizing a short key amplifies rounding: with 6 and 5 for 16 and 12 tp2 was 3e-12 apart.
WITH_DELTA = attrs.evolve(
    CONFIG,
    delta=models.Delta(key_heads=4, value_heads=8, key_size=16, value_size=12, full_every=2),
)


def delta_weights(name: str, shape: Sequence[int], offset: Sequence[int]) -> torch.Tensor:
    """Return `certificate_weights`, with a decay of about 0.85 in delta layers.

    So what a part of a document leaves to the next parts counts.

    Examples:
        >>> delta_weights("layers.0.attention.wa.log_rate", (1,), (0,)).item() < -1
        True
    """
    values = certificate_weights(name, shape, offset)
    return values.sub_(3) if name.endswith("log_rate") else values


# Attention to both sides, and a head whose rows tp shards.
ENCODER = attrs.evolve(SHALLOW, bidirectional=True, classes=4)

# Features of Gemma, OLMo 2 and GPT-2 that the other models lack, as many as can be combined.
GEMMA_LIKE = attrs.evolve(
    SHALLOW,
    tied=True,
    norms=models.Norms(kind="offset", place="around"),
    feed_forward=models.FeedForward(activation="gelu_tanh"),
    # Shorter than most documents, so that the window hides something from most queries.
    sliding=models.Sliding(window=9, full_every=2, rope_theta=500.0),
    rope_scaling=models.LinearScaling(4.0),
    query_scalar=6.0,
    score_softcap=2.0,
    logit_softcap=3.0,
    # Gemma scales embeddings by the root of the width.
    embedding_scale=32**0.5,
)
OLMO_LIKE = attrs.evolve(
    SHALLOW,
    norms=models.Norms(place="after"),
    qk_norm="wide",
    attention_gate=True,
    # Half of a head's 4 dimensions are rotated (partial rotary embeddings).
    rotary_dim=2,
    sliding=models.Sliding(window=20),
    # The multipliers of Granite, and a layer without positions, as in SmolLM3.
    no_rope_every=2,
    residual_scale=0.4,
    logit_divisor=1.5,
)
# Sinks, windows by turns, and experts whose router and matrices have biases.
GPT_OSS_LIKE = attrs.evolve(
    SHALLOW,
    qk_norm=False,
    qkv_bias=True,
    out_bias=True,
    attention_sinks=True,
    sliding=models.Sliding(window=9, full_every=2),
    rope_scaling=models.YarnScaling(factor=4.0, original_length=16, beta_fast=4.0, fractional=True),
    # A clamp that some of the inner values reach.
    experts=models.Experts(count=8, top_k=2, width=16, bias=True, clamp=1.0, sigmoid_scale=1.7),
)
GPT_LIKE = attrs.evolve(
    SHALLOW,
    qk_norm=False,
    tied=True,
    dropout=0.3,
    qkv_bias=True,
    out_bias=True,
    norms=models.Norms(kind="layer"),
    feed_forward=models.FeedForward(gated=False, activation="gelu_tanh", bias=True),
    positions=CAPACITY,
)


IN_FEW_BITS: dict[str, tuple[models.DecoderConfig, QuantizationFormat]] = {
    "decoder with adapters, in nf4": (SHALLOW, "nf4"),
    "decoder with adapters and latents, in int8": (NO_QUERY_RANK, "int8"),
    "decoder with experts and adapters, in fp8": (attrs.evolve(SHALLOW, experts=EXPERTS), "fp8"),
}
"""Models whose frozen matrices are quantized; each is compared with a plain one of equal values."""

MODELS: dict[str, Callable[[], nn.Module]] = {
    "decoder": partial(decoder_of, CONFIG),
    "tied decoder": partial(decoder_of, attrs.evolve(CONFIG, tied=True)),
    "decoder with dropout": partial(decoder_of, attrs.evolve(SHALLOW, dropout=0.3)),
    "decoder with frozen blocks": partial(half_frozen, CONFIG),
    "decoder with adapters": partial(with_adapters, SHALLOW),
    **{
        name: partial(with_adapters, config, form=form)
        for name, (config, form) in IN_FEW_BITS.items()
    },
    "decoder with experts": partial(with_experts, SHALLOW),
    "decoder with experts in four stages": partial(with_experts, CONFIG),
    "decoder with experts and adapters": partial(
        with_adapters, attrs.evolve(SHALLOW, experts=EXPERTS)
    ),
    "decoder with experts, by several optimizers": partial(with_experts, SHALLOW),
    "decoder with experts and latents": partial(with_experts, LATENT, experts=HASHED_EXPERTS),
    "decoder with experts and sinks": partial(decoder_of, GPT_OSS_LIKE),
    "decoder with latents, none of queries": partial(decoder_of, NO_QUERY_RANK),
    "decoder with delta layers": partial(decoder_of, WITH_DELTA),
    "decoder with adapters and delta layers": partial(
        with_adapters, attrs.evolve(WITH_DELTA, layers=2)
    ),
    "decoder with experts and delta layers": partial(with_experts, WITH_DELTA),
    "decoder like Gemma's": partial(decoder_of, GEMMA_LIKE),
    "decoder like OLMo 2's": partial(decoder_of, OLMO_LIKE),
    "decoder like GPT-2's": partial(decoder_of, GPT_LIKE),
    "decoder and losses of tokens": partial(decoder_of, SHALLOW),
    "decoder and losses of answers": partial(decoder_of, SHALLOW),
    "encoder and losses of classes": partial(decoder_of, ENCODER),
    "foreign model": ForeignModel,
    "foreign model, a part for some": partial(ForeignModel, sometimes=True),
    "exact model": exact.ExactModel,
}
"""The models of the built-in certificate, by name; the last is for the tier "exact" alone."""


def decoder_batch(step: int, *, rows: int = ROWS) -> Batch:
    """Return the global batch of a step: packed documents, with unequal numbers of labels per row.

    Documents have 1 to 60 tokens, aligned to 16. Of 4 rows one has no label, and two have few: a
    mean per rank or per microbatch in place of one denominator would show.

    Examples:
        >>> batch = decoder_batch(0)
        >>> batch.input_ids.shape, sorted(batch.extra)
        (torch.Size([4, 64]), ['noise_key'])
    """
    random = np.random.default_rng(0)  # one corpus for all steps, which read other rows of it
    lengths = random.integers(1, 60, size=80)
    tokens = random.integers(0, CONFIG.vocab_size, size=lengths.sum())
    corpus = TokenCorpus(tokens, np.append(0, lengths.cumsum()))
    bins = pack_bins(corpus.lengths, CAPACITY, multiple_of=16)
    rows_at = shuffle_epochs(len(bins), rows_per_step=rows, seed=0)
    batch = collate_bins(corpus, bins, rows_at(step))
    # Only so many first tokens of each row keep their label.
    num_labels = torch.tensor([CAPACITY, 0, 5, CAPACITY // 2]).repeat(rows // 4)
    is_labeled = torch.arange(CAPACITY) < num_labels.unsqueeze(1)
    labels = torch.where(is_labeled, batch.labels, -100)
    keys = make_token_keys(batch.token_index, seed=0, step=step)
    return attrs.evolve(batch, labels=labels, extra={"noise_key": keys})


_TEACHER_TOP_K = 3
_TEACHER_WIDTH = 8


def answers_batch(step: int, *, rows: int = ROWS, multiple_of: int = 16) -> Batch:
    """Return the global batch of a step: pairs of answers, with the columns that objectives read.

    Examples:
        >>> batch = answers_batch(0)
        >>> batch.input_ids.shape, batch.extra["teacher_ids"].shape
        (torch.Size([4, 64]), torch.Size([4, 64, 3]))
    """
    random = np.random.default_rng(1)
    lengths = random.integers(2, 20, size=80)
    tokens = random.integers(0, CONFIG.vocab_size, size=lengths.sum())
    corpus = TokenCorpus(tokens, np.append(0, lengths.cumsum()))
    bins = pack_pairs(corpus.lengths, CAPACITY, multiple_of=multiple_of)
    rows_at = shuffle_epochs(len(bins), rows_per_step=rows, seed=0)
    batch = collate_bins(corpus, bins, rows_at(step))
    # A step has at most 512 tokens (8 rows of 64), so no two steps share a value of `at`.
    at = batch.token_index.double() + 1000 * step

    # Smooth functions of the token's index in the step: equal values in every layout.
    def waves(phase: int, *sizes: int) -> torch.Tensor:
        count = int(np.prod(sizes, dtype=np.int64))
        frequencies = 1.3 + torch.arange(count)
        last = (at.unsqueeze(-1) * frequencies + phase).sin()
        return last.view(*at.shape, *sizes)

    # Steps of 5 keep the k ids of a token distinct modulo the vocabulary.
    ids = batch.token_index.unsqueeze(-1) * 7 + 5 * torch.arange(_TEACHER_TOP_K)
    extra = {
        "noise_key": make_token_keys(batch.token_index, seed=0, step=step),
        "classes": batch.document_ids % 4,
        "desirable": (batch.document_ids % 2 == 0).double(),
        "kl": torch.full_like(at, 0.2),
        "weights": 1.5 + waves(0),
        "advantages": waves(1),
        # An untrained model gives each of 64 tokens a log-probability of about -4.2.
        "old_logprobs": waves(2) - 4,
        "reference_logprobs": waves(3) - 4,
        "teacher_hidden": waves(4, _TEACHER_WIDTH),
        "teacher_ids": ids % CONFIG.vocab_size,
        # Three probabilities of at most e^-2 each stay below 1 in sum.
        "teacher_logprobs": waves(5, _TEACHER_TOP_K) - 3,
    }
    return attrs.evolve(batch, extra=extra)


def loss_of_tokens(ps: Any) -> NamedLoss:
    """Return the sum of weighted cross entropy, a policy gradient and a distillation.

    Effects:
        None here; the loss communicates on `ps.tp`.
    """
    # The output weight of the teacher `[V, 8]`, of which a rank of tp has its rows.
    full = torch.arange(CONFIG.vocab_size * _TEACHER_WIDTH).double().sin()
    shards = full.view(CONFIG.vocab_size, -1).chunk(ps.tp.count)
    shard = shards[ps.tp.index].to(ps.device)
    policy = objectives.policy_gradient(objectives.ppo_clip(), entropy_weight=0.1)
    # The teacher's hidden states are a column of the batch, so its head has none of its own.
    teacher = objectives.distillation(Hidden(torch.empty(0), shard, ps.tp), beta=0.5)
    return losses.add_terms((losses.weighted_next_token, 1.0), (policy, 0.5), (teacher, 0.7))


def loss_of_answers(ps: Any) -> NamedLoss:
    """Return the sum of all losses of pairs, a sequence policy gradient, and a distillation.

    Effects:
        None here; the loss communicates on `ps.sp` and `ps.tp`.
    """
    policy = objectives.sequence_policy_gradient(objectives.ppo_clip(), axis=ps.sp)
    return losses.add_terms(
        (_rename_terms("dpo", objectives.dpo(0.5, axis=ps.sp)), 1.0),
        (_rename_terms("ipo", objectives.ipo(0.5, axis=ps.sp)), 1.0),
        (_rename_terms("kto", objectives.kto(0.5, axis=ps.sp)), 1.0),
        (_rename_terms("simpo", objectives.simpo(axis=ps.sp)), 1.0),
        (_rename_terms("orpo", objectives.orpo(axis=ps.sp)), 1.0),
        (policy, 0.5),
        (objectives.stored_distillation(), 0.01),
    )


def loss_of_classes(ps: Any) -> NamedLoss:
    """Return the sum of the losses of the classes of documents, for each way to pool their tokens.

    Effects:
        None here; the loss communicates on `ps.sp`.
    """
    return losses.add_terms(
        *(
            (_rename_terms(pool, objectives.classify(pool=pool, axis=ps.sp)), 1.0)
            for pool in get_args(objectives.Pool)
        )
    )


def _rename_terms(name: str, loss: NamedLoss) -> NamedLoss:
    """Prefix a loss's terms with its name, since several losses share names of terms."""

    @losses.declare_terms(*(f"{name}_{term}" for term in loss.terms))
    def named(output: Any, batch: Mapping[str, Any]) -> Any:
        total, terms = loss(output, batch)
        return total, {f"{name}_{term}": value for term, value in terms.items()}

    return named


_ROUTED_LOSS = losses.add_router_losses(losses.next_token_linear, balance=0.5, router_z=0.1)


@losses.declare_terms(*_ROUTED_LOSS.terms)
def expert_loss(output: Any, batch: Mapping[str, Any]) -> Any:
    """Return the loss of a decoder with experts, with all terms of its routers."""
    # A function at the top level, because `_ROUTED_LOSS` is a closure and cannot be sent to a rank.
    return _ROUTED_LOSS(output, batch)


def decoder_plan(ps: Any, case: LayoutCase) -> list[Transform]:
    """Return the plan of a recipe: all transforms, which do nothing on axes of size 1.

    Examples:
        >>> from trainkit.mesh import solo_parallel
        >>> [step.kind for step in decoder_plan(solo_parallel(), LayoutCase())]
        ['tensor', 'sequence', 'expert', 'recompute', 'fsdp']
    """
    del ps
    # "aot_eager" traces forward and backward as "inductor" does, but generates no code.
    blocks = [compile_blocks(backend="aot_eager")] if case.compiled else []
    return [
        tensor_parallel(),
        sequence_parallel(),
        expert_parallel(),
        recompute(case.recompute),
        *blocks,
        fsdp(case.layout),
    ]


def exact_plan(ps: Any, case: LayoutCase) -> list[Transform]:
    """Return the plan of the exact model, whose blocks are a column- and a row-parallel matrix.

    Examples:
        >>> from trainkit.mesh import solo_parallel
        >>> [step.kind for step in exact_plan(solo_parallel(), LayoutCase())]
        ['tensor', 'sequence', 'recompute', 'fsdp']
    """
    del ps
    return [
        tensor_parallel({"layers.*.up": "column", "layers.*.down": "row"}),
        # No token sees another, so a sharded sequence needs no communication.
        Transform(lambda module, _: module, kind="sequence", axes=("ring", "ulysses")),
        recompute(case.recompute),
        fsdp(case.layout),
    ]


def cases_of_model(name: str) -> list[LayoutCase]:
    """Return the cases of one of `MODELS`: all for the decoder, some for the others.

    Examples:
        >>> LayoutCase(Layout(pp=2)) in cases_of_model("tied decoder")
        True
    """
    if name == "exact model":
        return exact_cases()
    return [*(_CASES.get(name) or _CASES[name.partition(", by ")[0]])]


def expert_cases() -> list[LayoutCase]:
    """Return the cases of expert parallelism: alone, and combined with every other axis.

    Examples:
        >>> {case.layout.ep for case in expert_cases()}, {case.world for case in expert_cases()}
        ({8, 2, 4}, {8, 2, 4})
    """
    return [
        # Two ranks. Experts are sharded over ranks of dp_shard, or of a sequence axis that FSDP
        # folds.
        LayoutCase(Layout(dp_shard=2, ep=2)),
        LayoutCase(Layout(dp_shard=2, ep=2), recompute="full"),
        LayoutCase(Layout(dp_shard=2, ep=2), recompute="0.5"),
        LayoutCase(Layout(dp_shard=2, ep=2), recompute="selective", compiled=True),
        LayoutCase(Layout(ring=2, ep=2)),
        LayoutCase(Layout(ulysses=2, ep=2)),
        # Four ranks. Where ep is smaller than fsdp, the experts of a rank are sharded further, over
        # expert_fsdp.
        LayoutCase(Layout(dp_shard=4, ep=2, reduce="each"), recompute="full"),
        LayoutCase(Layout(dp_shard=4, ep=4)),
        LayoutCase(Layout(dp_shard=4, ep=2, ep_adjacent=False)),
        LayoutCase(Layout(dp_replicate=2, dp_shard=2, ep=2), recompute="selective"),
        LayoutCase(Layout(dp_replicate=2, dp_shard=2, ep=2, reduce="each")),
        LayoutCase(Layout(dp_shard=2, tp=2, ep=2)),
        LayoutCase(Layout(pp=2, dp_shard=2, ep=2), recompute="full"),
        # Eight ranks: ep within every other axis, adjacent and strided.
        LayoutCase(Layout(dp_shard=8, ep=8)),
        LayoutCase(Layout(dp_shard=4, tp=2, ep=2)),
        LayoutCase(Layout(dp_replicate=2, dp_shard=4, ep=2)),
        LayoutCase(Layout(dp_replicate=2, dp_shard=4, ep=2, ep_adjacent=False)),
        LayoutCase(Layout(dp_shard=4, tp=2, ep=2, ep_adjacent=False)),
        LayoutCase(Layout(dp_replicate=2, dp_shard=2, ring=2, ep=4, reduce="each")),
        LayoutCase(Layout(pp=2, dp_shard=2, tp=2, ep=2)),
        LayoutCase(Layout(pp=2, dp_shard=2, ulysses=2, fold_sp="none", ep=2)),
        LayoutCase(Layout(dp_shard=2, ring=2, tp=2, ep=4)),
    ]


_ZERO_BUBBLE = Layout(pp=2, dp_shard=2, schedule="zero_bubble_v", reshard_after_forward=False)
_PIPELINES = [LayoutCase(Layout(pp=2)), LayoutCase(Layout(pp=2, dp_shard=2))]
# FSDP, tensor parallelism, and both ends of a model on different ranks of a pipeline.
_ENDS = [LayoutCase(Layout(dp_shard=2)), LayoutCase(Layout(tp=2)), LayoutCase(Layout(pp=2, tp=2))]
_CASES: dict[str, list[LayoutCase]] = {
    "decoder": make_default_cases(),
    # First and last stage each have a copy of the embedding; in a V schedule one rank has both
    # stages.
    "tied decoder": [*_ENDS, *_PIPELINES, LayoutCase(Layout(pp=2, schedule="zero_bubble_v"))],
    "decoder with dropout": [
        *_ENDS,
        *_PIPELINES,
        LayoutCase(recompute="full"),
        LayoutCase(Layout(ring=2, fold_sp="none")),
        LayoutCase(Layout(ulysses=2)),
        LayoutCase(Layout(dp_replicate=2, dp_shard=2)),
    ],
    # Some ranks have nothing to train; interleaved, a rank has a frozen and a trained stage.
    "decoder with frozen blocks": [
        *_PIPELINES,
        LayoutCase(Layout(pp=2, schedule="interleaved_zero_bubble")),
        LayoutCase(Layout(pp=4)),
    ],
    "decoder with adapters": [
        *_ENDS,
        *_PIPELINES,
        LayoutCase(recompute="full"),
        LayoutCase(Layout(dp_shard=2), compiled=True),
        LayoutCase(Layout(ring=2, fold_sp="none")),
        LayoutCase(Layout(ulysses=2)),
        LayoutCase(Layout(tp=2), recompute="selective"),
        LayoutCase(Layout(dp_shard=2, tp=2), recompute="selective"),
        LayoutCase(Layout(dp_replicate=2, dp_shard=2)),
    ],
    "decoder with adapters, in nf4": [
        *_ENDS,
        LayoutCase(Layout(pp=2, dp_shard=2), recompute="full"),
        LayoutCase(Layout(tp=2), recompute="selective"),
        LayoutCase(Layout(dp_shard=2, tp=2), recompute="selective"),
        LayoutCase(Layout(pp=2, dp_shard=2, tp=2), compiled=True),
    ],
    "decoder with adapters and latents, in int8": _ENDS[:2],
    "decoder with experts and adapters, in fp8": [
        *_ENDS[1:],
        LayoutCase(Layout(pp=2, dp_shard=2, ep=2), recompute="full"),
        LayoutCase(Layout(dp_shard=4, tp=2, ep=2)),
    ],
    "decoder with experts and adapters": [
        *_ENDS,
        LayoutCase(Layout(pp=2, dp_shard=2), recompute="full"),
        LayoutCase(Layout(dp_shard=2, ep=2), recompute="selective"),
        LayoutCase(Layout(ring=2, ep=2), recompute="full"),
        LayoutCase(Layout(dp_replicate=2, dp_shard=2, ep=2, reduce="each")),
        LayoutCase(Layout(dp_shard=2, tp=2, ep=2)),
    ],
    "decoder with experts": [
        *_ENDS,
        *_PIPELINES,
        LayoutCase(rows_per_microbatch=3),
        LayoutCase(recompute="full"),
        LayoutCase(compiled=True),
        LayoutCase(Layout(ring=2, fold_sp="none")),
        LayoutCase(Layout(ulysses=2)),
        LayoutCase(Layout(dp_replicate=2, dp_shard=2), recompute="full"),
        LayoutCase(Layout(dp_shard=2, tp=2), recompute="selective"),
        LayoutCase(Layout(dp_shard=2, ring=2, tp=2)),
        *expert_cases(),
    ],
    "decoder with experts, by several optimizers": [
        *_ENDS,
        LayoutCase(Layout(pp=2, dp_shard=2)),
        LayoutCase(Layout(dp_shard=2, ep=2)),
        LayoutCase(Layout(dp_replicate=2, dp_shard=2)),
        LayoutCase(Layout(ring=2, ulysses=2)),
    ],
    # V schedules have two stages on each rank, so two ranks need four layers.
    "decoder with experts in four stages": [
        LayoutCase(_ZERO_BUBBLE),
        LayoutCase(attrs.evolve(_ZERO_BUBBLE, ep=2)),
    ],
    "decoder with experts and latents": [
        *_ENDS,
        LayoutCase(Layout(ring=2, fold_sp="none")),
        LayoutCase(Layout(ulysses=2)),
        LayoutCase(Layout(pp=2, dp_shard=2), recompute="full"),
        LayoutCase(Layout(tp=2), recompute="selective"),
        LayoutCase(Layout(dp_shard=2, tp=2), recompute="selective"),
        LayoutCase(Layout(dp_shard=4, tp=2), compiled=True),
    ],
    "decoder with experts and sinks": [
        *_ENDS,
        LayoutCase(Layout(ring=2, fold_sp="none"), recompute="selective"),
        LayoutCase(Layout(ulysses=2)),
        LayoutCase(Layout(dp_shard=2, ep=2), recompute="full"),
        LayoutCase(Layout(dp_shard=2, tp=2, ep=2), compiled=True),
        LayoutCase(Layout(ring=2, tp=2), recompute="full"),
    ],
    "decoder with latents, none of queries": [*_ENDS[1:2], LayoutCase(Layout(ulysses=2, tp=2))],
    "decoder with delta layers": make_default_cases(),
    "decoder with adapters and delta layers": [
        LayoutCase(Layout(dp_shard=2, tp=2)),
        LayoutCase(Layout(ring=2), recompute="full"),
        LayoutCase(Layout(pp=2, ulysses=2)),
    ],
    "decoder with experts and delta layers": [
        *_ENDS,
        LayoutCase(compiled=True),
        LayoutCase(Layout(ring=2, fold_sp="none")),
        LayoutCase(Layout(ulysses=2)),
        LayoutCase(Layout(pp=2, dp_shard=2), recompute="full"),
        LayoutCase(Layout(dp_shard=2, ring=2, tp=2)),
        LayoutCase(Layout(ring=2, ulysses=2, ep=2)),
        LayoutCase(Layout(dp_shard=2, tp=2, ep=2), recompute="selective"),
    ],
    "decoder like Gemma's": [
        LayoutCase(Layout(ring=2, fold_sp="none"), recompute="selective"),
        LayoutCase(Layout(dp_shard=2)),
        LayoutCase(Layout(tp=2), recompute="full"),
        LayoutCase(Layout(dp_shard=2, tp=2), recompute="full"),
        LayoutCase(Layout(pp=2)),
    ],
    "decoder like OLMo 2's": [
        LayoutCase(Layout(ring=2, tp=2)),
        LayoutCase(Layout(pp=2, dp_shard=2), recompute="selective"),
    ],
    "decoder like GPT-2's": [
        LayoutCase(Layout(dp_shard=2, tp=2), recompute="selective"),
        LayoutCase(Layout(pp=2, tp=2)),
        LayoutCase(Layout(pp=2)),
        LayoutCase(Layout(ulysses=2)),
    ],
    "decoder and losses of tokens": [
        LayoutCase(Layout(pp=2, tp=2)),
        LayoutCase(Layout(dp_shard=2, ring=2)),
    ],
    "decoder and losses of answers": [
        LayoutCase(Layout(pp=2, tp=2)),
        LayoutCase(Layout(dp_shard=2, ring=2)),
        LayoutCase(Layout(ulysses=2, tp=2)),
    ],
    "encoder and losses of classes": [
        LayoutCase(Layout(pp=2, tp=2)),
        LayoutCase(Layout(dp_shard=2, ulysses=2), recompute="selective"),
    ],
    "foreign model": [
        *_ENDS[:2],
        LayoutCase(Layout(dp_shard=2, tp=2)),
        LayoutCase(Layout(pp=2, dp_shard=2)),
    ],
    "foreign model, a part for some": [
        LayoutCase(),
        LayoutCase(Layout(tp=2)),
        LayoutCase(Layout(pp=2)),
        LayoutCase(Layout(dp_shard=2)),
        LayoutCase(Layout(dp_shard=2, reduce="each")),
        LayoutCase(Layout(dp_replicate=2, dp_shard=2, reduce="each")),
    ],
}


def exact_cases() -> list[LayoutCase]:
    """Return the cases of the exact model: those that change the order of its sums.

    Examples:
        >>> LayoutCase(Layout(dp_shard=2, tp=2)) in exact_cases()
        True
    """
    return [
        LayoutCase(),
        LayoutCase(recompute="full"),
        LayoutCase(Layout(dp_shard=2)),
        LayoutCase(Layout(dp_shard=2, reduce="each")),
        LayoutCase(Layout(dp_replicate=2)),
        LayoutCase(Layout(tp=2)),
        LayoutCase(Layout(ring=2)),
        LayoutCase(Layout(ulysses=2, fold_sp="none")),
        LayoutCase(Layout(pp=2)),
        LayoutCase(Layout(pp=2, schedule="interleaved_zero_bubble")),
        # Three ranks do not divide the rows, nor any dimension of a parameter.
        LayoutCase(Layout(dp_shard=3)),
        LayoutCase(Layout(dp_replicate=2, dp_shard=2)),
        LayoutCase(Layout(dp_replicate=2, dp_shard=2, reduce="each")),
        LayoutCase(Layout(dp_shard=2, tp=2)),
        LayoutCase(Layout(ring=2, ulysses=2, fold_sp="ring")),
        LayoutCase(Layout(pp=2, dp_shard=2)),
        LayoutCase(Layout(dp_replicate=2, dp_shard=2, ring=2)),
        LayoutCase(Layout(pp=2, dp_shard=2, tp=2)),
    ]


def models_of_tier(tier: str, *, optimizers: bool = False) -> list[str]:
    """Return the names of the models that a tier trains; the first has the most cases.

    In bf16 none has experts, because rounding to 8 bits changes a router's choices, and none has a
    loss of differences of log-probabilities, which are smaller than their rounding.

    Args:
        tier: See `certify`.
        optimizers: Whether to add one model for each of `OPTIMIZERS`.

    Examples:
        >>> models_of_tier("exact"), models_of_tier("fp64")[0]
        (['exact model'], 'decoder')
    """
    # adamw is the optimizer of every other model.
    stepped = [f"decoder with experts, by {name}" for name in OPTIMIZERS if name != "adamw"]
    others = [*list(MODELS)[:-1], *(stepped if optimizers else [])]
    if tier == "bf16":
        return [name for name in others if "experts" not in name and "losses" not in name]
    return ["exact model"] if tier == "exact" else others


def certify_builtin(
    tier: str = "fp64",
    *,
    chosen: Callable[[LayoutCase], bool] = lambda _: True,
    optimizers: bool = False,
    log: Log | None = None,
    device: str = "cpu",
) -> list[Certificate]:
    """Return the certificates of the built-in models in one tier.

    That is the exact model in the tier "exact". In the others it is the decoder in all default
    cases, and every other one of `MODELS` in some.

    Args:
        tier: See `certify`.
        chosen: Whether to run a case.
        optimizers: See `models_of_tier`.
        log: Called with a line after every layout.
        device: "cpu" or "cuda"; see `certify`.

    Raises:
        ValueError: The tier is unknown, or no layout is chosen.
        ConfigError: As for `certify`.

    Effects:
        Starts processes; see `certify`.
    """
    subjects = builtin_subjects(tier, chosen=chosen, optimizers=optimizers)
    return certify_together(subjects, timeout=TIMEOUT, log=log, device=device)


def builtin_subjects(
    tier: str,
    *,
    chosen: Callable[[LayoutCase], bool] = lambda _: True,
    pick: Callable[[list[tuple[str, LayoutCase]]], Iterable[tuple[str, LayoutCase]]] = list,
    optimizers: bool = False,
    steps: int = 3,
) -> list[tuple[Training, list[LayoutCase]]]:
    """Return the trainings of the built-in models in one tier, each with its cases.

    Args:
        tier: See `certify`.
        chosen: Whether to run a case.
        pick: Selects some of the chosen (name of a model, case); all by default.
        optimizers: See `models_of_tier`.
        steps: How many optimizer steps to take.

    Raises:
        ValueError: The tier is unknown, or no layout is chosen.

    Examples:
        >>> ((training, cases),) = builtin_subjects("exact", chosen=lambda case: case.world == 3)
        >>> training.title, [case.name for case in cases]
        ('exact model', ['dp3'])
    """
    names = models_of_tier(tier, optimizers=optimizers)
    # One list over all models, of which `pick` may take enough to have each pair of options once.
    rows = [
        (name, case)
        for name in names
        for case in cases_of_model(name)
        if chosen(case)
        # Not every version of torch can shard the bytes of quantized matrices.
        and (name not in IN_FEW_BITS or case.layout.wrapped == 1 or can_shard_bytes())
    ]
    picked: dict[str, list[LayoutCase]] = {name: [] for name in names}
    for model, case in pick(rows):
        picked[model].append(case)
    if not any(picked.values()):
        raise ValueError("certify: none of the layouts is chosen")
    return [
        (_make_training(name, cases, tier=tier, steps=steps), cases)
        for name, cases in picked.items()
        if cases
    ]


def _make_training(name: str, cases: Sequence[LayoutCase], *, tier: str, steps: int) -> Training:
    """Return the training of one of `MODELS`, with at least as many rows as a case has ranks."""
    # "decoder with experts, by lion" is the model before the comma, trained by that optimizer.
    model_name, _, optimizer = name.partition(", by ")
    make_training = partial(
        Training, title=name, make_model=MODELS[model_name], tier=tier_called(tier), steps=steps
    )
    rows = ROWS if all(case.world <= ROWS for case in cases) else 2 * ROWS
    if name == "exact model":
        return make_training(
            make_batches=exact.exact_batch,
            plan=exact_plan,
            loss=exact.squares,
            call=exact.call_exact,
            weights=exact.exact_weights,
            split=exact.split_exact,
            optimizer=exact.integer_steps,
            lr=64.0,  # the number of valid tokens: gradients become integers
            # The factor of clipping is no integer.
            max_norm=None,
        )
    if name.startswith("foreign"):
        return make_training(
            make_batches=partial(decoder_batch, rows=rows),
            plan=foreign_plan,
            loss=losses.next_token,
            call=call_foreign,
            split=split_foreign,
        )
    has_experts = name.startswith("decoder with experts")
    is_encoder = name.startswith("encoder")
    loss: Any = expert_loss if has_experts else losses.next_token_linear
    objective = {
        "decoder and losses of tokens": loss_of_tokens,
        "decoder and losses of answers": loss_of_answers,
        "encoder and losses of classes": loss_of_classes,
    }.get(name)
    training = make_training(
        # Attention to both sides would see the padding of documents.
        make_batches=partial(answers_batch, rows=rows, multiple_of=1 if is_encoder else 16)
        if objective
        else partial(decoder_batch, rows=rows),
        plan=decoder_plan,
        loss=objective or loss,
        call=models.call_routed if has_experts else models.call_with_noise,
    )
    if "delta" in name:
        training = attrs.evolve(training, weights=delta_weights)
    if optimizer:
        several = optimizer == "several optimizers"
        make = several_optimizers if several else partial(stepped_by, optimizer)
        training = attrs.evolve(training, optimizer=make)
    if name in IN_FEW_BITS:
        config, form = IN_FEW_BITS[name]
        # The reference has plain matrices with the values that quantized ones stand for.
        plain = partial(with_adapters, config), partial(as_held, config, form)
        training = attrs.evolve(training, alone=plain)
    return training
