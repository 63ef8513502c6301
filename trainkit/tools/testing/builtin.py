"""The certificate of what trainkit brings: a small decoder, tied, with dropout, and exact.

And of a model that has nothing of trainkit in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from typing import Any

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
from trainkit.optim import OPTIMIZERS, make_optimizer
from trainkit.packing import pack_bins
from trainkit.parallel.compile import compile_blocks
from trainkit.parallel.expert_parallel import expert_parallel
from trainkit.parallel.fsdp import fsdp
from trainkit.parallel.recompute import recompute
from trainkit.parallel.sequence_parallel import sequence_parallel
from trainkit.parallel.tensor_parallel import tensor_parallel
from trainkit.parallel.transforms import Transform
from trainkit.post import objectives
from trainkit.post.adapters import (
    Lora,
    QuantizationFormat,
    QuantizationSpec,
    can_shard_bytes,
    get_quantizations,
    lora,
    quantized,
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
from trainkit.types import Axis, Batch, Hidden, Layout, Log, Weights

CONFIG = models.DecoderConfig(
    vocab_size=64, width=32, layers=4, heads=8, kv_heads=4, mlp_width=48, qk_norm=True
)
# What is in no case of four stages has two layers: a row of it takes half the time.
SHALLOW = attrs.evolve(CONFIG, layers=2)
ROWS = 4
CAPACITY = 64
TIMEOUT = 180.0  # compiling takes some seconds a rank, and more where other work wants the cores


def decoder_of(config: models.DecoderConfig) -> nn.Module:
    """Return a decoder for the fused loss, as a recipe makes it.

    Examples:
        >>> with torch.device("meta"):
        ...     model = decoder_of(CONFIG)
        >>> model.output
        'hidden'
    """
    return models.Decoder(config, head="hidden")


def half_frozen(config: models.DecoderConfig) -> nn.Module:
    """Return a decoder that trains the upper half of its blocks alone: fine-tuning.

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


EXPERTS = models.Experts(
    count=8,
    chosen=2,
    width=16,
    shared=16,
    first=1,
    scores="sigmoid",
    biased=True,
    groups=4,
    groups_chosen=2,
    jitter=0.05,
)


def with_experts(config: models.DecoderConfig) -> nn.Module:
    """Return a decoder with experts whose routers have loads and biases, as after some steps.

    Examples:
        >>> with_experts(CONFIG).layers["1"].mlp.router.bias[0].item()
        0.10000000149011612
    """
    model: Any = decoder_of(attrs.evolve(config, experts=EXPERTS))
    for i in model.config.expert_layers:
        router = model.layers[str(i)].mlp.router
        router.load.copy_(torch.linspace(0.02, 0.23, EXPERTS.count))
        router.bias.copy_(torch.linspace(0.1, -0.1, EXPERTS.count))
    return model


_ATTENTION = r"layers\.\d+\.attention\.(w[qkvo]|wkv)"
_MLP = r"layers\.\d+\.mlp\.(gate|up|down)"
_OF_EXPERTS_OWN = r"layers\.\d+\.mlp\.experts\.(gate|up|down)"


def with_adapters(
    config: models.DecoderConfig, *, form: QuantizationFormat | None = None
) -> nn.Module:
    """Return a decoder that trains adapters of both kinds, with dropout, and its embedding.

    With experts theirs too, with dropout as well, and the head in place of the embedding. With a
    format its matrices are held in few bits.

    Examples:
        >>> with torch.device("meta"):
        ...     model = with_adapters(CONFIG)
        >>> model.layers["0"].mlp.up.lora["default"].b.shape
        torch.Size([48, 4])
    """
    experts = config.experts is not None
    model = with_experts(config) if experts else decoder_of(config)
    if form is not None:
        model = quantized(form)(model, solo_parallel())
    # A larger alpha amplifies rounding, no more: at 32 tp2 is 4.6e-13 from one rank, and one rank
    # that adds up each product in two halves 1.8e-12; in fp32 they are 4.4e-4 and 4.7e-4.
    loras = [Lora(_ATTENTION, rank=3, alpha=1.0, dropout=0.3)]
    inner, rank, dropout = (_OF_EXPERTS_OWN, 2, 0.2) if experts else (_MLP, 4, 0.0)
    loras.append(Lora(inner, rank=rank, alpha=1.0, dora=True, dropout=dropout))
    add = lora(*loras, trained="head" if experts else "embedding", values=_match_ranks)
    return add(model, solo_parallel())


def _match_ranks(
    _: Weights, name: str, shape: Sequence[int], offset: Sequence[int]
) -> torch.Tensor:
    return certificate_weights(name, shape, offset)


def as_held(
    config: models.DecoderConfig,
    form: QuantizationFormat,
    name: str,
    shape: Sequence[int],
    offset: Sequence[int],
) -> torch.Tensor:
    """Return the weights of a certificate as a decoder with adapters holds them in few bits.

    Examples:
        >>> as_held(CONFIG, "int8", "norm.weight", (1,), (0,)).shape
        torch.Size([1])
    """
    return round_weights(certificate_weights, _make_packings(config, form))(name, shape, offset)


@cache
def _make_packings(
    config: models.DecoderConfig, form: QuantizationFormat
) -> dict[str, QuantizationSpec]:
    with torch.device("meta"):
        return get_quantizations(with_adapters(config, form=form))


_EPS = {"adamw": {"eps": 1e-4}, "schedule-free": {"eps": 1e-4}}  # see `certificate_optimizer`


def stepped_by(name: str, stages: Sequence[nn.Module], axis: Axis) -> torch.optim.Optimizer:
    """Return the optimizer of a certificate of that name in `OPTIMIZERS`.

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
    """Return every optimizer that steps elements alone, as one, with a mean of the parameters.

    Effects:
        Communicates on `axis`.

    Examples:
        >>> from trainkit.mesh import solo_parallel
        >>> optimizer = several_optimizers([with_experts(SHALLOW)], solo_parallel().pp)
        >>> sorted({group["optimizer"] for group in optimizer.param_groups if group["params"]})
        ['Lion', 'LowPrecisionAdamW', 'Momentum', 'ScheduleFree', 'SignSGD']
    """
    steppers = {
        "embedding.*": "signsgd",
        r".*\.attention\..*": "schedule-free",
        r".*\.experts\..*": "lion",
        ".*router.*": "momentum",
    }
    groups = {
        pattern: {"optimizer": name, "cautious": True, **_EPS.get(name, {})}
        for pattern, name in steppers.items()
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


LATENT = attrs.evolve(
    SHALLOW,
    kv_heads=8,
    qk_norm=False,
    latents=models.Latents(query_rank=20, kv_rank=12, plain=10, rotary=8, values=6),
)
NO_QUERY_RANK = attrs.evolve(LATENT, latents=attrs.evolve(LATENT.latents, query_rank=None))

# What Gemma, OLMo 2 and GPT-2 do otherwise, as much of it as goes together.
GEMMA_LIKE = attrs.evolve(
    SHALLOW,
    tied=True,
    norms=models.Norms(kind="offset", place="around"),
    feed_forward=models.FeedForward(activation="gelu_tanh"),
    sliding=models.Sliding(window=9, full_every=2, rope_theta=500.0),
    rope_scaling=models.LinearScaling(4.0),
    query_scalar=6.0,
    score_softcap=2.0,
    logit_softcap=3.0,
    embedding_scale=32**0.5,
)
OLMO_LIKE = attrs.evolve(
    SHALLOW,
    norms=models.Norms(place="after"),
    qk_norm="wide",
    rotary_dim=2,
    sliding=models.Sliding(window=20),
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
"""Models whose frozen matrices are in few bits, by name; they are compared with plain ones."""

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
    "decoder with experts and latents": partial(with_experts, LATENT),
    "decoder with latents, none of queries": partial(decoder_of, NO_QUERY_RANK),
    "decoder like Gemma's": partial(decoder_of, GEMMA_LIKE),
    "decoder like OLMo 2's": partial(decoder_of, OLMO_LIKE),
    "decoder like GPT-2's": partial(decoder_of, GPT_LIKE),
    "decoder and losses of tokens": partial(decoder_of, SHALLOW),
    "decoder and losses of answers": partial(decoder_of, SHALLOW),
    "foreign model": ForeignModel,
    "foreign model, a part for some": partial(ForeignModel, sometimes=True),
    "exact model": exact.ExactModel,
}
"""What makes the models of the built-in certificate, by name; the last is for its own tier."""


def decoder_batch(step: int, *, rows: int = ROWS) -> Batch:
    """Return the global batch of a step: packed documents, and labels masked unequally by row.

    Documents have 1 to 60 tokens, aligned to 16. Of every 4 rows one has no label, two have few.

    Examples:
        >>> batch = decoder_batch(0)
        >>> batch.input_ids.shape, sorted(batch.extra)
        (torch.Size([4, 64]), ['noise_key'])
    """
    random = np.random.default_rng(0)
    lengths = random.integers(1, 60, size=80)
    tokens = random.integers(0, CONFIG.vocab_size, size=lengths.sum())
    corpus = TokenCorpus(tokens, np.append(0, lengths.cumsum()))
    bins = pack_bins(corpus.lengths, CAPACITY, multiple_of=16)
    rows_at = shuffle_epochs(len(bins), rows_per_step=rows, seed=0)
    batch = collate_bins(corpus, bins, rows_at(step))
    lengths = torch.tensor([CAPACITY, 0, 5, CAPACITY // 2]).repeat(rows // 4).unsqueeze(1)
    labels = torch.where(torch.arange(CAPACITY) < lengths, batch.labels, -100)
    keys = make_token_keys(batch.token_index, seed=0, step=step)
    return attrs.evolve(batch, labels=labels, extra={"noise_key": keys})


_KNOWN, _TEACHER_WIDTH = 3, 8


def answers_batch(step: int, *, rows: int = ROWS) -> Batch:
    """Return the global batch of a step: pairs of answers, and a column for every loss of them.

    Examples:
        >>> batch = answers_batch(0)
        >>> batch.input_ids.shape, batch.extra["teacher_ids"].shape
        (torch.Size([4, 64]), torch.Size([4, 64, 3]))
    """
    random = np.random.default_rng(1)
    lengths = random.integers(2, 20, size=80)
    tokens = random.integers(0, CONFIG.vocab_size, size=lengths.sum())
    corpus = TokenCorpus(tokens, np.append(0, lengths.cumsum()))
    bins = pack_pairs(corpus.lengths, CAPACITY, multiple_of=16)
    batch = collate_bins(corpus, bins, shuffle_epochs(len(bins), rows_per_step=rows, seed=0)(step))
    at = batch.token_index.double() + 1000 * step

    def waves(phase: int, *sizes: int) -> torch.Tensor:
        count = int(np.prod(sizes, dtype=np.int64))
        last = (at.unsqueeze(-1) * (1.3 + torch.arange(count)) + phase).sin()
        return last.view(*at.shape, *sizes)

    ids = (batch.token_index.unsqueeze(-1) * 7 + 5 * torch.arange(_KNOWN)) % CONFIG.vocab_size
    extra = {
        "noise_key": make_token_keys(batch.token_index, seed=0, step=step),
        "desirable": (batch.document_ids % 2 == 0).double(),
        "kl": torch.full_like(at, 0.2),
        "weights": 1.5 + waves(0),
        "advantages": waves(1),
        "old_logprobs": waves(2) - 4,
        "reference_logprobs": waves(3) - 4,
        "teacher_hidden": waves(4, _TEACHER_WIDTH),
        "teacher_ids": ids,
        "teacher_logprobs": waves(5, _KNOWN) - 3,
    }
    return attrs.evolve(batch, extra=extra)


def loss_of_tokens(ps: Any) -> NamedLoss:
    """Return weighted cross entropy, a policy gradient of tokens and a distillation, as one.

    Effects:
        None here; the loss communicates on `ps.tp`.
    """
    whole = torch.arange(CONFIG.vocab_size * _TEACHER_WIDTH).double().sin()
    words = whole.view(CONFIG.vocab_size, -1).chunk(ps.tp.count)[ps.tp.index].to(ps.device)
    policy = objectives.policy_gradient(objectives.ppo_clip(), entropy_weight=0.1)
    teacher = objectives.distillation(Hidden(torch.empty(0), words, ps.tp), beta=0.5)
    return losses.add_terms((losses.weighted_next_token, 1.0), (policy, 0.5), (teacher, 0.7))


def loss_of_answers(ps: Any) -> NamedLoss:
    """Return every loss of pairs, a policy gradient of answers, and stored words, as one.

    Effects:
        None here; the loss communicates on `ps.sp` and `ps.tp`.
    """
    policy = objectives.sequence_policy_gradient(objectives.ppo_clip(), axis=ps.sp)
    scaled = [
        _rename_terms(make, 0.5, axis=ps.sp)
        for make in (objectives.dpo, objectives.ipo, objectives.kto)
    ]
    others = [_rename_terms(make, axis=ps.sp) for make in (objectives.simpo, objectives.orpo)]
    pairs = [(loss, 1.0) for loss in scaled + others]
    return losses.add_terms(*pairs, (policy, 0.5), (objectives.stored_distillation(), 0.01))


def _rename_terms(make: Callable[..., NamedLoss], *beta: float, axis: Axis) -> NamedLoss:
    """Return a loss whose terms have its name as prefix, since losses share names of terms."""
    name, loss = make.__name__, make(*beta, axis=axis)

    @losses.declare_terms(*(f"{name}_{term}" for term in loss.terms))
    def named(output: Any, batch: Mapping[str, Any]) -> Any:
        total, terms = loss(output, batch)
        return total, {f"{name}_{term}": value for term, value in terms.items()}

    return named


_OF_EXPERTS = losses.add_router_losses(losses.next_token_linear, balance=0.5, router_z=0.1)


@losses.declare_terms(*_OF_EXPERTS.terms)
def expert_loss(output: Any, batch: Mapping[str, Any]) -> Any:
    """Return the loss of a decoder with experts, with all terms of its routers."""
    return _OF_EXPERTS(output, batch)


def decoder_plan(ps: Any, case: LayoutCase) -> list[Transform]:
    """Return the plan of a recipe: every transform, each of which does nothing where it need not.

    Examples:
        >>> from trainkit.mesh import solo_parallel
        >>> [step.kind for step in decoder_plan(solo_parallel(), LayoutCase())]
        ['tensor', 'sequence', 'expert', 'recompute', 'fsdp']
    """
    del ps
    blocks = [compile_blocks(backend="aot_eager")] if case.compiled else []
    apart = [tensor_parallel(), sequence_parallel(), expert_parallel()]
    return [*apart, recompute(case.recompute), *blocks, fsdp(case.layout)]


def exact_plan(ps: Any, case: LayoutCase) -> list[Transform]:
    """Return the plan of the exact model: its blocks hold a column- and a row-parallel matrix.

    Examples:
        >>> from trainkit.mesh import solo_parallel
        >>> [step.kind for step in exact_plan(solo_parallel(), LayoutCase())]
        ['tensor', 'sequence', 'recompute', 'fsdp']
    """
    del ps
    cut = tensor_parallel({"layers.*.up": "column", "layers.*.down": "row"})
    # No token sees another.
    apart = Transform(lambda module, _: module, kind="sequence", axes=("ring", "ulysses"))
    return [cut, apart, recompute(case.recompute), fsdp(case.layout)]


def cases_of_model(name: str) -> list[LayoutCase]:
    """Return the cases in which one of `MODELS` is trained: the decoder in all, others in some.

    Examples:
        >>> LayoutCase(Layout(pp=2)) in cases_of_model("tied decoder")
        True
    """
    return (
        exact_cases()
        if name == "exact model"
        else [*(_CASES.get(name) or _CASES[_strip_optimizer(name)])]
    )


def _strip_optimizer(name: str) -> str:
    """Return a model's name without that of its optimizer."""
    return name.partition(", by ")[0]


def expert_cases() -> list[LayoutCase]:
    """Return the cases of expert parallelism: alone, and with everything else.

    Examples:
        >>> {case.layout.ep for case in expert_cases()}, {case.world for case in expert_cases()}
        ({8, 2, 4}, {8, 2, 4})
    """
    return [
        LayoutCase(Layout(dp_shard=2, ep=2)),
        LayoutCase(Layout(dp_shard=2, ep=2), recompute="full"),
        LayoutCase(Layout(dp_shard=2, ep=2), recompute="0.5"),
        LayoutCase(Layout(dp_shard=2, ep=2), recompute="selective", compiled=True),
        LayoutCase(Layout(ring=2, ep=2)),
        LayoutCase(Layout(ulysses=2, ep=2)),
        LayoutCase(Layout(dp_shard=4, ep=2, reduce="each"), recompute="full"),
        LayoutCase(Layout(dp_shard=4, ep=4)),
        LayoutCase(Layout(dp_shard=4, ep=2, ep_adjacent=False)),
        LayoutCase(Layout(dp_replicate=2, dp_shard=2, ep=2), recompute="selective"),
        LayoutCase(Layout(dp_replicate=2, dp_shard=2, ep=2, reduce="each")),
        LayoutCase(Layout(dp_shard=2, tp=2, ep=2)),
        LayoutCase(Layout(pp=2, dp_shard=2, ep=2), recompute="full"),
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


_ZERO_BUBBLE: dict[str, Any] = {"schedule": "zero_bubble_v", "reshard_after_forward": False}
_PIPELINES = [LayoutCase(Layout(pp=2)), LayoutCase(Layout(pp=2, dp_shard=2))]
_ENDS = [LayoutCase(Layout(dp_shard=2)), LayoutCase(Layout(tp=2)), LayoutCase(Layout(pp=2, tp=2))]
_CASES: dict[str, list[LayoutCase]] = {
    "decoder": make_default_cases(),
    "tied decoder": [*_ENDS, *_PIPELINES, LayoutCase(Layout(pp=2, schedule="zero_bubble_v"))],
    "decoder with dropout": [
        *_ENDS,
        *_PIPELINES,
        LayoutCase(recompute="full"),
        LayoutCase(Layout(ring=2, fold_sp="none")),
        LayoutCase(Layout(ulysses=2)),
        LayoutCase(Layout(dp_replicate=2, dp_shard=2)),
    ],
    # Ranks with nothing to train; and a rank with a frozen stage and another.
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
        LayoutCase(Layout(dp_replicate=2, dp_shard=2, ep=2)),
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
    "decoder with experts in four stages": [
        LayoutCase(Layout(pp=2, dp_shard=2, **_ZERO_BUBBLE)),
        LayoutCase(Layout(pp=2, dp_shard=2, ep=2, **_ZERO_BUBBLE)),
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
    "decoder with latents, none of queries": [*_ENDS[1:2], LayoutCase(Layout(ulysses=2, tp=2))],
    "decoder like Gemma's": [
        LayoutCase(Layout(ring=2, fold_sp="none"), recompute="selective"),
        LayoutCase(Layout(dp_shard=2)),
        LayoutCase(Layout(tp=2), recompute="full"),
        LayoutCase(Layout(dp_shard=2, tp=2), recompute="full"),
        LayoutCase(Layout(pp=2)),
    ],
    "decoder like OLMo 2's": [LayoutCase(Layout(ring=2, tp=2))],
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
    "foreign model": [
        *_ENDS[:2],
        LayoutCase(Layout(dp_shard=2, tp=2)),
        LayoutCase(Layout(pp=2, dp_shard=2)),
    ],
    "foreign model, a part for some": [
        *(
            LayoutCase(),
            LayoutCase(Layout(tp=2)),
            LayoutCase(Layout(pp=2)),
            LayoutCase(Layout(dp_shard=2)),
        ),
        LayoutCase(Layout(dp_shard=2, reduce="each")),
        LayoutCase(Layout(dp_replicate=2, dp_shard=2, reduce="each")),
    ],
}


def exact_cases() -> list[LayoutCase]:
    """Return the cases of the exact model: those in which its arithmetic is spread over ranks.

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
    """Return which of `MODELS` a tier is about; the first is trained in most cases.

    In bf16 none has experts, as rounding to 8 bits turns the choices of a router, and none has the
    losses that subtract log-probabilities, of which rounding is all that is left.

    Args:
        tier: See `certify`.
        optimizers: Also one that each of `OPTIMIZERS` trains.

    Examples:
        >>> models_of_tier("exact"), models_of_tier("fp64")[0]
        (['exact model'], 'decoder')
    """
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

    That is the exact model in the tier "exact", else the decoder in all default layouts, and in
    some each other one of `MODELS`.

    Args:
        tier: See `certify`.
        chosen: Which of the cases to run.
        optimizers: Also a decoder with experts by each of `OPTIMIZERS`.
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
    """Return how the built-in models are trained in one tier, and their cases, if they have some.

    Args:
        tier: See `certify`.
        chosen: Which of the cases to run.
        pick: Takes some of the chosen (name of a model, case); all by default.
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
    rows = [
        (name, case)
        for name in names
        for case in cases_of_model(name)
        if chosen(case)
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


_DECODER = {"plan": decoder_plan, "loss": losses.next_token_linear, "call": models.call_with_noise}
_EXPERTS = {"plan": decoder_plan, "loss": expert_loss, "call": models.call_routed}
_ANSWERS = {
    "decoder and losses of tokens": {"loss": loss_of_tokens},
    "decoder and losses of answers": {"loss": loss_of_answers},
}
_FOREIGN = {
    "plan": foreign_plan,
    "loss": losses.next_token,
    "call": call_foreign,
    "split": split_foreign,
}
_EXACT = {
    "plan": exact_plan,
    "loss": exact.squares,
    "call": exact.call_exact,
    "weights": exact.exact_weights,
    "split": exact.split_exact,
    "optimizer": exact.integer_steps,
    "lr": 64.0,  # the number of valid tokens: gradients become integers
    "max_norm": None,
}


def _make_training(name: str, cases: Sequence[LayoutCase], *, tier: str, steps: int) -> Training:
    """Return how one of `MODELS` is trained: on 4 rows a step, or 8 on more ranks than 4."""
    kind = name.partition(" ")[0]
    how: Any = {"exact": _EXACT, "foreign": _FOREIGN}.get(kind, _DECODER)
    if name.startswith("decoder with experts"):
        how = _EXPERTS
    if by := name.partition(", by ")[2]:
        several = by == "several optimizers"
        how = how | {"optimizer": several_optimizers if several else partial(stepped_by, by)}
    if name in IN_FEW_BITS:
        config, form = IN_FEW_BITS[name]
        plain = partial(with_adapters, config)
        how = how | {"alone": (plain, partial(as_held, config, form))}
    rows = ROWS if all(case.world <= ROWS for case in cases) else 2 * ROWS
    make = answers_batch if name in _ANSWERS else decoder_batch
    batches = exact.exact_batch if kind == "exact" else partial(make, rows=rows)
    how = how | _ANSWERS.get(name, {}) | {"make_batches": batches}
    model = MODELS[_strip_optimizer(name)]
    return Training(title=name, make_model=model, tier=tier_called(tier), steps=steps, **how)
