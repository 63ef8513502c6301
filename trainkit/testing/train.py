"""One layout of a certificate: train a model for some steps, and say what came out."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor, nn

from trainkit import noise
from trainkit.batch import batch_hash, count_valid_tokens
from trainkit.collectives import all_sum
from trainkit.grads import clip_and_step, named_parameters_of, parameters_of, sync_sp_grads
from trainkit.hashing import key_of
from trainkit.losses import mean_terms
from trainkit.mesh import parallel_session
from trainkit.metrics import reduce_metrics
from trainkit.optim import adamw, decay_groups
from trainkit.parallel.naming import COPY_SUFFIX, box_of
from trainkit.parallel.stages import Split, build_stages
from trainkit.step import bind_forward_backward
from trainkit.testing.deal import deal_batch
from trainkit.testing.layouts import Layout
from trainkit.types import (
    Batch,
    Call,
    Loss,
    ModelTransform,
    ParallelState,
    Weights,
)

Plan = Callable[[ParallelState, Layout], Sequence[ModelTransform]]
"""`Plan(ps, layout) -> transforms`: what `build_stages` shall do to the model in a layout."""

MakeLoss = Callable[[ParallelState], Loss]
"""`MakeLoss(ps) -> Loss`: for a loss that communicates."""

Optimizers = Callable[[Mapping[str, nn.Parameter]], torch.optim.Optimizer]
"""From a rank's parameters by their whole-model name to the optimizer that steps them."""


@attrs.frozen(eq=False)
class Training:
    """What is trained, and how: all that is the same in every layout."""

    make_model: Callable[[], nn.Module]
    make_batches: Callable[[int], Batch]
    plan: Plan
    loss: Loss | MakeLoss
    call: Call
    weights: Weights
    optimizer: Optimizers
    split: Split
    dtype: str
    steps: int
    lr: float
    max_norm: float | None


@attrs.frozen(eq=False)
class Part:
    """The part of a parameter that a rank holds, in fp64, and where it begins in the whole."""

    values: np.ndarray[Any, Any]
    offset: tuple[int, ...]


@attrs.frozen(eq=False)
class Outcome:
    """What a training came to: terms and norms of every step, and the parameters after the last.

    `hashes` are those of each step's global batch. `norm_dtype` is fp32 on a pipeline stage of an
    fp64 model that has nothing to train; see `grad_norm`.
    """

    terms: dict[str, list[float]]
    norms: list[float]
    hashes: list[int]
    parameters: dict[str, Part]
    norm_dtype: str = "float64"


@attrs.frozen
class Differences:
    """An outcome against another: max|a - b| / max|b| of each tensor, terms and norms over steps.

    `parameters` are those of this rank, of which it holds the boxes (offset, shape) of `held`.
    """

    terms: dict[str, float]
    norm: float
    parameters: dict[str, float]
    held: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]
    batches: bool
    seconds: float


def certificate_weights(name: str, shape: Sequence[int], offset: Sequence[int]) -> Tensor:
    """Return initial values for any model: 0.2 x normal, and 1 + 0.2 x normal for vectors.

    That serves matrices of some dozens of columns, and norms. An element is a function of the
    parameter's name and its index in the whole, in every layout.

    Examples:
        >>> whole = certificate_weights("w", (4, 8), (0, 0))
        >>> torch.equal(whole[2:], certificate_weights("w", (2, 8), (2, 0)))
        True
    """
    values = noise.normal(key_of(0, name), shape, offset).mul_(0.2)
    return values.add_(1) if len(shape) < 2 else values


def certificate_optimizer(parameters: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
    """Return AdamW with weight decay on matrices.

    Its epsilon is 1e-4: Adam divides by the gradient's own size, so with a small one a factor on
    all gradients would leave no trace in the parameters.

    Examples:
        >>> optimizer = certificate_optimizer({"weight": nn.Parameter(torch.ones(2, 2))})
        >>> optimizer.param_groups[0]["weight_decay"]
        0.1
    """
    return adamw(decay_groups(dict(parameters), weight_decay=0.1), lr=1e-2, eps=1e-4)


def train_layout(training: Training, layout: Layout) -> Outcome:
    """Train in one layout, on every rank of the default process group; see `certify`.

    Effects:
        Opens the layout's process groups and closes them.
    """
    with parallel_session(**layout.degrees) as ps:
        stages = build_stages(
            partial(_typed, training.make_model, training.dtype),
            ps,
            training.plan(ps, layout),
            weights=training.weights,
            split=training.split,
            schedule=layout.schedule,
        )
        named = named_parameters_of(stages)
        params, optimizer = parameters_of(stages), training.optimizer(named)
        loss: Any = training.loss
        run = bind_forward_backward(
            stages,
            loss if hasattr(loss, "terms") else loss(ps),
            axis=ps.pp,
            call=training.call,
            schedule=layout.schedule,
            reduce=layout.reduce,
        )
        outcome, norms = Outcome({}, [], [], {}), list[Tensor]()
        for step in range(training.steps):
            batches = deal_batch(
                training.make_batches(step),
                ps.dp.share,
                rows_per_microbatch=layout.rows_per_microbatch,
                ring=ps.ring.share,
                ulysses=ps.ulysses.share,
            )
            outcome.hashes.append(int(all_sum(batch_hash(batches), ps.loss)))
            tokens = all_sum(count_valid_tokens(batches), ps.loss)
            sums = run(batches, denominator=tokens)
            sync_sp_grads(params, ps.sp_unfolded)
            norm = clip_and_step(
                params, optimizer, lr=training.lr, max_norm=training.max_norm, axis=ps.pp
            )
            means = mean_terms(reduce_metrics(sums, ps.loss), tokens)
            norms.append(norm)
            for name, value in means.items():
                outcome.terms.setdefault(name, []).append(float(value))
        parts = {name: _part(p) for name, p in named.items()}
    return attrs.evolve(
        outcome,
        norms=[float(norm) for norm in norms],
        parameters=parts,
        norm_dtype=str(norms[-1].dtype).removeprefix("torch."),
    )


def compare_layout(training: Training, layout: Layout, wanted: Outcome) -> Differences:
    """Train in one layout and compare what comes out with another outcome.

    Effects:
        Those of `train_layout`.
    """
    begin = time.monotonic()
    found = train_layout(training, layout)
    if layout.compiled:  # after 8 compilations of one function dynamo falls back to eager code
        torch.compiler.reset()
    far: dict[str, float] = {}
    for name, part in found.parameters.items():
        # A rank that holds both ends of a pipeline has a tied parameter twice.
        whole = name.removesuffix(COPY_SUFFIX)
        distance = _of_part(part, wanted.parameters[whole].values)
        far[whole] = max(distance, far.get(whole, 0.0))
    return Differences(
        {name: relative(found.terms.get(name, []), b) for name, b in wanted.terms.items()},
        relative(found.norms, np.asarray(wanted.norms, found.norm_dtype)),
        far,
        {
            name: (found.parameters[name].offset, found.parameters[name].values.shape)
            for name in far
        },
        found.hashes == wanted.hashes,
        time.monotonic() - begin,
    )


def relative(found: Any, wanted: Any) -> float:
    """Return max|a - b| / max|b|; infinite where shapes differ, or NaN stands on one side only.

    Examples:
        >>> relative([1.0, 2.0], [1.0, 4.0]), relative([1.0], [1.0, 2.0])
        (0.5, inf)
    """
    a, b = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
    return _of_part(Part(a, (0,) * a.ndim), b) if a.shape == b.shape else math.inf


def _of_part(part: Part, whole: np.ndarray[Any, Any]) -> float:
    a, sizes = part.values, zip(part.offset, part.values.shape, strict=True)
    b = whole[tuple(slice(start, start + size) for start, size in sizes)]
    if a.shape != b.shape or not np.array_equal(np.isfinite(a), np.isfinite(b)):
        return math.inf
    far = float(np.abs(a - b, where=np.isfinite(b), out=np.zeros_like(b)).max(initial=0.0))
    top = float(np.abs(whole, where=np.isfinite(whole), out=np.zeros_like(whole)).max(initial=0.0))
    return 0.0 if far == 0 else far / top if top else math.inf


def _typed(make_model: Callable[[], nn.Module], dtype: str) -> nn.Module:
    return make_model().to(getattr(torch, dtype))


def _part(parameter: nn.Parameter) -> Part:
    box = box_of(parameter)
    return Part(box.local.detach().to(torch.float64).cpu().numpy().copy(), box.offset)
