"""One layout of a certificate: train a model for some steps, and compare the results.

The reference, `train_plain`, makes and fills the model without `build_stages`: a plain module with
plain parameters, so that the code under test is not compared with itself.
"""

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

from trainkit.batch import batch_hash, count_valid_tokens, to_device
from trainkit.collectives import all_sum
from trainkit.grads import clip_and_step, get_named_parameters, sync_sp_grads
from trainkit.losses import average_terms
from trainkit.mesh import parallel_session
from trainkit.metrics import reduce_metrics
from trainkit.noise import counters
from trainkit.noise.hashing import make_key
from trainkit.optim import make_optimizer
from trainkit.parallel.materialize import fills_of, list_buffers
from trainkit.parallel.parameters import COPY_SUFFIX, find_ties, get_local_box
from trainkit.parallel.stage_ranks import attach_axes
from trainkit.parallel.stages import SplitModel, build_stages, split_layers
from trainkit.post.adapters.frozen import SCALES, dequantize_rows, get_quantizations
from trainkit.step import make_forward_backward
from trainkit.tools.testing.cases import LayoutCase
from trainkit.tools.testing.certificate import Tier
from trainkit.tools.testing.distribute_batch import distribute_batch
from trainkit.types import (
    Axis,
    Batch,
    Call,
    ConfigError,
    Loss,
    ModelTransform,
    ParallelState,
    Stages,
    Weights,
)

MakePlan = Callable[[ParallelState, LayoutCase], Sequence[ModelTransform]]
"""`MakePlan(ps, case) -> transforms`: the plan of `build_stages` in a case."""

MakeLoss = Callable[[ParallelState], Loss]
"""`MakeLoss(ps) -> Loss`: for a loss that communicates."""

MakeStages = Callable[[ParallelState], Stages]
"""`MakeStages(ps) -> stages`: by `build_stages`, or of a plain module for the reference."""

Optimizers = Callable[[Sequence[nn.Module], Axis], torch.optim.Optimizer]
"""`Optimizers(stages, pp) -> optimizer` of a rank's stages, with the pipeline's axis."""


@attrs.frozen(eq=False)
class Held:
    """A rank's box of a tensor: its values in fp64, and its offset in the full tensor."""

    values: np.ndarray[Any, Any]
    offset: tuple[int, ...]


@attrs.frozen(eq=False)
class Outcome:
    """The results of a training: terms and norms of every step, and all tensors after the last.

    `state` holds buffers by name, and optimizer state as "PARAMETER/KEY". `ties` are the names of
    shared tensors. `hashes` are those of each step's global batch. `norm_dtype` is fp32 on a
    pipeline stage of an fp64 model without trainable parameters; see `grad_norm`.
    """

    terms: dict[str, list[float]]
    norms: list[float]
    hashes: list[int]
    parameters: dict[str, Held]
    state: dict[str, Held]
    ties: list[tuple[str, ...]]
    norm_dtype: str


@attrs.frozen
class Differences:
    """The differences of two outcomes: max|a - b| / max|b| of each tensor, term and norm.

    `parameters` and `state` are those of this rank; `held` has the (offset, shape) of their boxes.
    The difference is infinite where the other outcome lacks a tensor.
    """

    terms: dict[str, float]
    norm: float
    parameters: dict[str, float]
    state: dict[str, float]
    ties: list[tuple[str, ...]]
    held: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]
    batches: bool
    seconds: float


def certificate_weights(name: str, shape: Sequence[int], offset: Sequence[int]) -> Tensor:
    """Return initial values for any model: 0.2 x normal, and 1 + 0.2 x normal for vectors.

    The scale suits matrices of some dozens of columns, and the weights of norms. In every layout an
    element is a function of the parameter's name and its index in the full tensor.

    Examples:
        >>> whole = certificate_weights("w", (4, 8), (0, 0))
        >>> torch.equal(whole[2:], certificate_weights("w", (2, 8), (2, 0)))
        True
    """
    values = counters.normal(make_key(0, name), shape, offset).mul_(0.2)
    return values.add_(1) if len(shape) < 2 else values


def certificate_optimizer(stages: Sequence[nn.Module], axis: Axis) -> torch.optim.Optimizer:
    """Return AdamW with weight decay on matrices.

    Epsilon is 1e-4. Adam divides by the gradient's own size, so with a small epsilon a wrong factor
    on all gradients would not change the parameters.

    Effects:
        Communicates on `axis`.

    Examples:
        >>> from trainkit.mesh import solo_parallel
        >>> optimizer = certificate_optimizer([nn.Linear(2, 2)], solo_parallel().pp)
        >>> optimizer.param_groups[0]["weight_decay"]
        0.1
    """
    return make_optimizer(stages, lr=1e-2, weight_decay=0.1, options={"eps": 1e-4}, axis=axis)


@attrs.frozen(eq=False, kw_only=True)
class Training:
    """The arguments of `certify` that are equal in every layout.

    `alone` are `make_model` and `weights` of the reference, where quantized matrices are compared
    with plain ones of the same values; see `adapters.frozen.round_weights`.
    """

    title: str
    tier: Tier
    make_model: Callable[[], nn.Module]
    make_batches: Callable[[int], Batch]
    plan: MakePlan
    loss: Loss | MakeLoss
    call: Call
    steps: int
    weights: Weights = certificate_weights
    optimizer: Optimizers = certificate_optimizer
    split: SplitModel = split_layers
    lr: float = 1e-2
    max_norm: float | None = 0.5
    alone: tuple[Callable[[], nn.Module], Weights] | None = None


def train_plain(training: Training) -> Outcome:
    """Train a plain module on one process, with all rows of a step in one microbatch.

    The plan is not applied, because a plan must not change a number.

    Effects:
        Opens the process group of one rank and closes it.
    """
    model = plain_model(training)
    # With all rows in one microbatch no gradients accumulate: the plainest form of a step.
    return _train(
        training,
        LayoutCase(rows_per_microbatch=None),
        # Every axis has one rank, so nothing communicates.
        lambda ps: attach_axes([model.to(ps.device)], ps),
    )


def plain_model(training: Training) -> nn.Module:
    """Return the full model as a plain module, with its weights."""
    make_model, weights = training.alone or (training.make_model, training.weights)
    model = _make_typed_model(make_model, training.tier)
    fills = fills_of(model)  # adapters bring initial values of their own
    with torch.no_grad():
        for name, p in model.named_parameters():
            fill = partial(fills[name], weights) if name in fills else weights
            # The box of the whole tensor begins at the origin.
            p.copy_(fill(name, tuple(p.shape), (0,) * p.ndim))
    return model


def train_layout(training: Training, case: LayoutCase) -> Outcome:
    """Train in one layout, on every rank of the default process group.

    Effects:
        Opens the layout's process groups and closes them.
    """
    return _train(
        training,
        case,
        lambda ps: build_stages(
            partial(_make_typed_model, training.make_model, training.tier),
            ps,
            training.plan(ps, case),
            weights=training.weights,
            split=training.split,
            schedule=case.layout.schedule,
        ),
    )


def _train(training: Training, case: LayoutCase, make_stages: MakeStages) -> Outcome:
    with parallel_session(case.layout) as ps:
        stages = make_stages(ps)
        named = get_named_parameters(stages)
        ties = [tie for stage in stages for tie in find_ties(stage)]
        optimizer = training.optimizer(stages, ps.pp)
        loss: Any = training.loss
        forward_backward = make_forward_backward(
            stages,
            # A `Loss` has terms; a `MakeLoss` makes one for this layout.
            loss if hasattr(loss, "terms") else loss(ps),
            call=training.call,
            reduce=case.layout.reduce,
        )
        terms: dict[str, list[float]] = {}
        norms: list[Tensor] = []
        hashes: list[int] = []
        for step in range(training.steps):
            # A recipe's step, in its order; only the batch comes without a corpus.
            microbatches = distribute_batch(
                training.make_batches(step),
                ps.data_shard,
                rows_per_microbatch=case.rows_per_microbatch,
            )
            # Hashes add up modulo 2^64, so their sum over ranks is that of the global batch.
            hashes.append(int(all_sum(batch_hash(microbatches), ps.loss)))
            microbatches = [to_device(batch, ps.device) for batch in microbatches]
            tokens = all_sum(count_valid_tokens(microbatches), ps.loss)
            sums = forward_backward(microbatches, denominator=tokens)
            sync_sp_grads(stages, ps.sp_unfolded)
            update = clip_and_step(stages, optimizer, lr=training.lr, max_norm=training.max_norm)
            norms.append(update.norm)
            for name, value in average_terms(reduce_metrics(sums, ps.loss), tokens).items():
                terms.setdefault(name, []).extend(value.flatten().tolist())
        return Outcome(
            terms,
            [float(norm) for norm in norms],
            hashes,
            _get_parameters(stages, named),
            {name: _get_shard(x) for name, x in _get_state(stages, named, optimizer).items()},
            ties,
            str(norms[-1].dtype).removeprefix("torch."),
        )


def _get_parameters(
    stages: Sequence[nn.Module], named: Mapping[str, nn.Parameter]
) -> dict[str, Held]:
    """Return the parameters by name, with quantized matrices dequantized."""
    shards = {name: _get_shard(p) for name, p in named.items()}
    for stage in stages:
        for name, spec in get_quantizations(stage).items():
            codes, scales = get_local_box(named[name]), get_local_box(named[name + SCALES])
            values = dequantize_rows(codes.local, scales.local, spec, torch.float64).cpu().numpy()
            # Codes may hold two columns a byte, so the spec knows this shard's first column.
            shards[name] = Held(values, (*codes.offset[:-1], spec.first))
            del shards[name + SCALES]
    return shards


def _get_state(
    stages: Sequence[nn.Module],
    named: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
) -> dict[str, Tensor]:
    """Return buffers by name, and all optimizer state as "PARAMETER/KEY"."""
    state = {name: x for stage in stages for name, x in list_buffers(stage).items()}
    for name, p in named.items():
        owner = name.removesuffix(COPY_SUFFIX)  # of a tied embedding, which the last stage copies
        for key, value in optimizer.state.get(p, {}).items():
            # Some optimizers count steps in Python numbers, which must agree as well.
            if isinstance(value, Tensor | int | float):
                copy = name.removeprefix(owner)
                state[f"{owner}/{key}{copy}"] = torch.as_tensor(value)
    return state


def compare_layout(training: Training, case: LayoutCase, wanted: Outcome) -> Differences:
    """Train in one layout and compare the outcome with another.

    Effects:
        Those of `train_layout`.
    """
    start = time.monotonic()
    found = train_layout(training, case)
    if case.compiled:  # after 8 compilations of one function dynamo falls back to eager code
        torch.compiler.reset()
    # A gradient that is 0 but for rounding (of a bias of keys, which cancels in the softmax) has
    # moments that are rounding alone: a moment's maximum counts as at least 1e-2 of its kind's.
    largest: dict[str, float] = {}
    for name, part in wanted.state.items():
        kind = name.partition("/")[2]  # "" of a buffer, which has no such floor
        size = _find_largest(part.values) if kind else 0.0
        largest[kind] = max(largest.get(kind, 0.0), size)
    boxes = found.parameters | found.state
    return Differences(
        {
            name: relative(found.terms.get(name, []), wanted.terms.get(name, []))
            for name in found.terms | wanted.terms
        },
        # A stage with nothing to train has its norms in fp32, to which those of the reference are
        # rounded.
        relative(found.norms, np.asarray(wanted.norms, found.norm_dtype)),
        _compute_distances(found.parameters, wanted.parameters, floors={}),
        _compute_distances(
            found.state,
            wanted.state,
            floors={name: 1e-2 * largest[name.partition("/")[2]] for name in wanted.state},
        ),
        found.ties,
        {name: (part.offset, part.values.shape) for name, part in boxes.items()},
        found.hashes == wanted.hashes,
        time.monotonic() - start,
    )


def _compute_distances(
    found: Mapping[str, Held], wanted: Mapping[str, Held], *, floors: Mapping[str, float]
) -> dict[str, float]:
    """Return the differences of this rank's shards, by name in the whole model."""
    distances: dict[str, float] = {}
    for name, part in found.items():
        # A rank that holds both ends of a pipeline has a tied parameter twice.
        owner = name.removesuffix(COPY_SUFFIX)
        distance = math.inf
        if owner in wanted:
            distance = _compute_distance(part, wanted[owner].values, floor=floors.get(owner, 0.0))
        distances[owner] = max(distance, distances.get(owner, 0.0))
    return distances


def relative(found: Any, wanted: Any) -> float:
    """Return max|a - b| / max|b|; infinity if shapes differ, or where only one side is finite.

    Examples:
        >>> relative([1.0, 2.0], [1.0, 4.0]), relative([1.0], [1.0, 2.0])
        (0.5, inf)
    """
    a, b = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
    if a.shape != b.shape:
        return math.inf
    return _compute_distance(Held(a, (0,) * a.ndim), b)


def _find_largest(values: np.ndarray[Any, Any]) -> float:
    # Elements that are not finite count as 0: `_compute_distance` compares where these are.
    finite = np.isfinite(values)
    return float(np.abs(values, where=finite, out=np.zeros_like(values)).max(initial=0.0))


def _compute_distance(part: Held, full: np.ndarray[Any, Any], *, floor: float = 0.0) -> float:
    a = part.values
    sizes = zip(part.offset, part.values.shape, strict=True)
    # A shard beyond the end of the tensor would give a shorter slice, not an error.
    b = full[tuple(slice(start, start + size) for start, size in sizes)]
    if a.shape != b.shape or not np.array_equal(np.isfinite(a), np.isfinite(b)):
        return math.inf
    gaps = np.abs(a - b, where=np.isfinite(b), out=np.zeros_like(b))
    distance = float(gaps.max(initial=0.0))
    if distance == 0:
        return 0.0
    largest = max(_find_largest(full), floor)
    return distance / largest if largest else math.inf


def _make_typed_model(make_model: Callable[[], nn.Module], tier: Tier) -> nn.Module:
    """Make a model and cast it to the dtype of a tier, unless it is made in several dtypes."""
    model = make_model()
    # `reversed`, so that the message names the first parameter of each dtype.
    first = {p.dtype: name for name, p in reversed([*model.named_parameters()])}
    # By precision: fp64 has the smallest epsilon, bf16 the largest.
    dtypes = sorted((x for x in first if x.is_floating_point), key=lambda x: torch.finfo(x).eps)
    if len(dtypes) < 2:
        return model.to(getattr(torch, tier.dtype))
    if dtypes[-1] != getattr(torch, tier.dtype):
        raise ConfigError(
            f"certify: the model is made in {dtypes[0]} ({first[dtypes[0]]!r}) and {dtypes[-1]} "
            f"({first[dtypes[-1]]!r}), which it keeps, and tier {tier.name!r} compares what is "
            f"computed in {tier.dtype}; choose the tier of {dtypes[-1]}, or let make_model make it "
            "in one dtype",
            where="tier",
            got=tier.name,
            want=f"the tier of {dtypes[-1]}",
        )
    return model


def _get_shard(tensor: Tensor) -> Held:
    box = get_local_box(tensor)
    # In fp64 on a CPU all steps before `copy` return the memory of the tensor itself.
    values = box.local.detach().to(torch.float64).cpu().numpy()
    return Held(values.copy(), box.offset)
