"""Accuracy, counts of right and wrong decisions with what follows from them, and the AUROC.

A statistic that is 0 / 0 is NaN, not 0: the precision of a class that is never predicted, for
example. Labels of -100 are ignored, as in losses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import torch
from torch import Tensor

from trainkit.metrics.records import Metric, State, make_metric
from trainkit.types import IGNORED_LABEL, check_choice, check_range

Counts = Mapping[str, Tensor]
"""Numbers of decisions `[C]`, one for each example and class: `true_positives` and three others."""

Statistic = Callable[[Counts], Tensor]

Average = Literal["macro", "micro", "weighted", "none"]

_COUNTS = ("true_positives", "false_positives", "false_negatives", "true_negatives")


def make_accuracy(*, top_k: int = 1) -> Metric:
    """Make the share of labels among the k classes with the highest scores.

    `update(state, scores, labels)` takes scores `[..., C]`, logits or probabilities, and class
    indices `[...]`. Among equal scores the class with the smaller index is the higher, on every
    device. An example with a NaN among its scores is wrong. Without an example it is NaN.

    Args:
        top_k: k.

    Raises:
        ValueError: `top_k` is below 1; later, shapes do not fit, or a label is no class (elsewhere
            than on a CPU the accuracy is NaN then, because a check would need a host sync).

    Examples:
        >>> accuracy = make_accuracy()
        >>> scores = torch.tensor([[0.1, 0.9], [0.5, 0.5]])
        >>> accuracy.compute(accuracy.update(accuracy.init(), scores, torch.tensor([1, 1])))
        tensor(0.5000, dtype=torch.float64)
    """
    check_range("make_accuracy", at_least=1, top_k=top_k)

    def update(state: State, scores: Tensor, labels: Tensor) -> State:
        flat, index, invalid = _read_classes("make_accuracy", scores, labels)
        best, predicted = flat.max(-1)  # the first of equal ones, and NaN if there is one
        hits = predicted == index if top_k == 1 else _rank_labels(flat, index) < top_k
        is_valid = index != IGNORED_LABEL
        hits = hits & ~best.isnan() & is_valid
        return {
            "correct": state["correct"] + hits.sum() + invalid,
            "count": state["count"] + is_valid.sum(),
        }

    return make_metric(
        {"correct": "sum", "count": "sum"},
        update=update,
        compute=lambda state: state["correct"] / state["count"],
    )


def _rank_labels(scores: Tensor, index: Tensor) -> Tensor:
    """Return how many classes are before each label; torch.topk takes any of equal scores."""
    own = scores.gather(-1, index.clamp(min=0, max=scores.shape[-1] - 1).unsqueeze(-1))
    is_before = torch.arange(scores.shape[-1], device=scores.device) < index.unsqueeze(-1)
    return ((scores > own) | ((scores == own) & is_before)).sum(-1)


def make_multiclass_confusion(
    classes: int, statistics: Mapping[str, Statistic] | None = None
) -> Metric:
    """Make the counts of decisions for each of several classes, of which one is right.

    `update(state, scores, labels)` takes scores `[..., C]` and class indices `[...]`, as
    `make_accuracy` with one prediction. An example with a NaN predicts no class.

    Args:
        classes: C.
        statistics: What is computed from the counts, by name; by default the counts `[C]`.

    Raises:
        ValueError: `classes` is below 1; later as `make_accuracy`.

    Examples:
        >>> from functools import partial
        >>> metric = make_multiclass_confusion(2, {"recall": partial(recall, average="none")})
        >>> scores = torch.tensor([[0.1, 0.9], [0.2, 0.8], [0.3, 0.7]])
        >>> metric.compute(metric.update(metric.init(), scores, torch.tensor([0, 1, 1])))
        {'recall': tensor([0., 1.], dtype=torch.float64)}
    """

    def update(state: State, scores: Tensor, labels: Tensor) -> State:
        flat, index, invalid = _read_classes("make_multiclass_confusion", scores, labels)
        if flat.shape[-1] != classes:
            raise ValueError(
                f"make_multiclass_confusion: scores of {classes} classes are needed, got shape "
                f"{tuple(scores.shape)}; the last dimension is that of classes"
            )
        every = torch.arange(classes, device=flat.device)
        best, first = flat.max(-1, keepdim=True)
        predicted = (first == every) & ~best.isnan()
        is_valid = (index != IGNORED_LABEL).unsqueeze(-1)
        return _count(state, predicted, index.unsqueeze(-1) == every, is_valid, invalid)

    return _make_confusion("make_multiclass_confusion", classes, update, statistics)


def make_binary_confusion(
    labels: int = 1,
    statistics: Mapping[str, Statistic] | None = None,
    *,
    threshold: float = 0.5,
) -> Metric:
    """Make the counts of yes-or-no decisions, for one label or for several independent ones.

    `update(state, scores, targets)` takes scores `[..., C]`, or `[...]` for one label, and targets
    of the same shape: 1, 0, or -100 for one that is ignored. The decision is yes if the score is
    above the threshold, and no if it is NaN.

    Args:
        labels: C.
        statistics: What is computed from the counts, by name; by default the counts `[C]`.
        threshold: 0.5 for probabilities; 0 for logits.

    Raises:
        ValueError: `labels` is below 1; later, shapes do not fit, or a target is another number
            (elsewhere than on a CPU the counts are NaN then).

    Examples:
        >>> metric = make_binary_confusion(statistics={"f1": f_beta})
        >>> scores, targets = torch.tensor([0.9, 0.8, 0.1]), torch.tensor([1, 0, 1])
        >>> metric.compute(metric.update(metric.init(), scores, targets))
        {'f1': tensor(0.5000, dtype=torch.float64)}
    """

    def update(state: State, scores: Tensor, targets: Tensor) -> State:
        by = "make_binary_confusion"
        if scores.shape != targets.shape or (labels > 1 and scores.shape[-1:] != (labels,)):
            raise ValueError(
                f"{by}: scores and targets of one shape are needed, with a last dimension of "
                f"{labels} for {labels} labels, got {tuple(scores.shape)} and "
                f"{tuple(targets.shape)}"
            )
        flat = targets.reshape(-1, labels)
        invalid = _refuse_values(
            f"{by}: targets must be 0, 1 or {IGNORED_LABEL}",
            (flat != 0) & (flat != 1) & (flat != IGNORED_LABEL),
        )
        predicted = scores.reshape(-1, labels) > threshold
        return _count(state, predicted, flat == 1, flat != IGNORED_LABEL, invalid)

    return _make_confusion("make_binary_confusion", labels, update, statistics)


def _read_classes(by: str, scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return scores `[N, C]`, labels `[N]`, and NaN instead of 0 if one of them is no class."""
    if labels.shape != scores.shape[:-1] or not scores.ndim:
        raise ValueError(
            f"{by}: labels must be class indices, one for each row of the scores "
            f"{tuple(scores.shape)}, got shape {tuple(labels.shape)}; for one-hot labels pass "
            "labels.argmax(-1)"
        )
    flat, index = scores.reshape(-1, scores.shape[-1]), labels.reshape(-1)
    classes = flat.shape[-1]
    invalid = ((index < 0) | (index >= classes)) & (index != IGNORED_LABEL)
    message = f"{by}: labels must be below the {classes} classes and not negative, or -100"
    return flat, index, _refuse_values(message, invalid)


def _refuse_values(message: str, invalid: Tensor) -> Tensor:
    """Raise on a CPU if any value is invalid; on other devices return NaN then, otherwise 0."""
    if invalid.device.type == "cpu" and invalid.any():
        raise ValueError(f"{message}; {int(invalid.sum())} of {invalid.numel()} are not")
    return torch.where(invalid.any(), torch.nan, 0.0)


def _count(
    state: State, predicted: Tensor, actual: Tensor, is_valid: Tensor, invalid: Tensor
) -> State:
    """Add the decisions of examples and classes `[N, C]` to the counts."""
    decisions = (predicted & actual, predicted & ~actual, ~predicted & actual, ~predicted & ~actual)
    return {
        name: state[name] + (decision & is_valid).sum(0) + invalid
        for name, decision in zip(_COUNTS, decisions, strict=True)
    }


def _make_confusion(
    by: str,
    size: int,
    update: Callable[..., State],
    statistics: Mapping[str, Statistic] | None,
) -> Metric:
    check_range(by, at_least=1, classes=size)

    def compute(counts: Counts) -> dict[str, Tensor]:
        if statistics is None:
            return dict(counts)
        return {name: statistic(counts) for name, statistic in statistics.items()}

    return make_metric(
        dict.fromkeys(_COUNTS, "sum"),
        update=update,
        compute=compute,
        shapes=dict.fromkeys(_COUNTS, (size,)),
    )


def precision(counts: Counts, *, average: Average = "macro") -> Tensor:
    """Return the share of predictions that are right; `average` as in `f_beta`.

    Examples:
        >>> counts = {"true_positives": 3, "false_positives": 1, "false_negatives": 0}
        >>> counts = {name: torch.tensor([float(n)]) for name, n in counts.items()}
        >>> precision(counts)
        tensor(0.7500)
    """

    def compute(counts: Counts) -> Tensor:
        return counts["true_positives"] / (counts["true_positives"] + counts["false_positives"])

    return _average("precision", counts, compute, average)


def recall(counts: Counts, *, average: Average = "macro") -> Tensor:
    """Return the share of examples of a class that are found; `average` as in `f_beta`.

    Examples:
        >>> counts = {"true_positives": 3, "false_positives": 0, "false_negatives": 1}
        >>> counts = {name: torch.tensor([float(n)]) for name, n in counts.items()}
        >>> recall(counts)
        tensor(0.7500)
    """

    def compute(counts: Counts) -> Tensor:
        return counts["true_positives"] / (counts["true_positives"] + counts["false_negatives"])

    return _average("recall", counts, compute, average)


def f_beta(counts: Counts, *, beta: float = 1.0, average: Average = "macro") -> Tensor:
    """Return the weighted harmonic mean of precision and recall.

    Args:
        counts: As `make_multiclass_confusion` and `make_binary_confusion` compute them.
        beta: How many times as important recall is; 1 for F1.
        average: "macro", the mean over the classes that occur among labels or predictions;
            "weighted", by the number of their examples; "micro", of the summed counts; or "none",
            for each class, `[C]`.

    Returns:
        0-d, or `[C]`. It is NaN where it is 0 / 0, and a mean with such a class is NaN.

    Raises:
        ValueError: `beta` is negative, or `average` unknown.

    Examples:
        >>> counts = {"true_positives": 2, "false_positives": 1, "false_negatives": 1}
        >>> counts = {name: torch.tensor([float(n)]) for name, n in counts.items()}
        >>> f_beta(counts, beta=2.0)  # 5 * 2 / (5 * 2 + 4 * 1 + 1)
        tensor(0.6667)
    """
    check_range("f_beta", at_least=0, beta=beta)

    def compute(counts: Counts) -> Tensor:
        found = (1 + beta**2) * counts["true_positives"]
        return found / (found + beta**2 * counts["false_negatives"] + counts["false_positives"])

    return _average("f_beta", counts, compute, average)


def decision_accuracy(counts: Counts, *, average: Average = "macro") -> Tensor:
    """Return the share of right decisions, "no" included; `average` as in `f_beta`.

    With several classes it is not the accuracy of predictions (`make_accuracy`): an example of
    class 0 that is taken for class 1 is a right "no" for all other classes.

    Examples:
        >>> metric = make_binary_confusion(statistics={"accuracy": decision_accuracy})
        >>> state = metric.update(metric.init(), torch.tensor([0.9, 0.1]), torch.tensor([1, 1]))
        >>> metric.compute(state)
        {'accuracy': tensor(0.5000, dtype=torch.float64)}
    """

    def compute(counts: Counts) -> Tensor:
        right = counts["true_positives"] + counts["true_negatives"]
        return right / (right + counts["false_positives"] + counts["false_negatives"])

    return _average("decision_accuracy", counts, compute, average)


def _average(by: str, counts: Counts, statistic: Statistic, average: Average) -> Tensor:
    check_choice(("macro", "micro", "weighted", "none"), by, average=average)
    if average == "micro":
        return statistic({name: count.sum() for name, count in counts.items()})
    values = statistic(counts)
    if average == "none":
        return values
    weights = counts["true_positives"] + counts["false_negatives"]
    if average == "macro":
        weights = ((weights + counts["false_positives"]) != 0).to(values.dtype)
    # What does not count is left out, because 0 * NaN is NaN.
    return torch.where(weights == 0, 0, values * weights).sum() / weights.sum()


def make_auroc(bins: int = 10_000) -> Metric:
    """Make the area under the ROC curve of yes-or-no labels, from histograms of the scores.

    It is the probability that a positive has a higher score than a negative, where equal scores,
    those of one bin, count half. `update(state, scores, labels)` takes probabilities in [0, 1] and
    labels 1, 0, or -100 for one that is ignored, of the same shape. Without a positive or without a
    negative it is 0.5.

    The error is at most half the share of pairs of a positive and a negative that are in one bin.

    Args:
        bins: The number of equal bins of each of both histograms.

    Raises:
        ValueError: `bins` is below 1; later, shapes differ, a score is outside [0, 1] or a label is
            another number (elsewhere than on a CPU the result is NaN then, as for a score of NaN).

    References:
        Albakour et al., "Fast and memory efficient AUC-ROC approximation for stream learning"
        (2021).

    Examples:
        >>> auroc = make_auroc()
        >>> scores, labels = torch.tensor([0.1, 0.4, 0.35, 0.8]), torch.tensor([0, 0, 1, 1])
        >>> auroc.compute(auroc.update(auroc.init(), scores, labels))
        tensor(0.7500, dtype=torch.float64)
    """
    check_range("make_auroc", at_least=1, bins=bins)

    def update(state: State, scores: Tensor, labels: Tensor) -> State:
        if scores.shape != labels.shape:
            raise ValueError(
                "make_auroc: a label for each score is needed, got shapes "
                f"{tuple(labels.shape)} and {tuple(scores.shape)}"
            )
        y = labels.flatten()
        x = scores.flatten().double().masked_fill(y == IGNORED_LABEL, 0)
        invalid = _refuse_values(
            "make_auroc: scores must be probabilities in [0, 1]; pass logits.sigmoid()",
            (x < 0) | (x > 1),
        ) + _refuse_values(
            f"make_auroc: labels must be 0, 1 or {IGNORED_LABEL}",
            (y != 0) & (y != 1) & (y != IGNORED_LABEL),
        )
        # A NaN belongs to no bin: it makes the result NaN.
        invalid = invalid + torch.where(x.isnan().any(), torch.nan, 0.0)
        # A score of 1 is in the last bin.
        index = (x.nan_to_num() * bins).long().clamp(0, bins - 1)
        return {
            name: state[name].index_add(0, index, (y == label).double()) + invalid
            for name, label in (("positives", 1), ("negatives", 0))
        }

    def compute(state: Mapping[str, Tensor]) -> Tensor:
        positives, negatives = state["positives"], state["negatives"]
        pairs = positives.sum() * negatives.sum()
        above = positives.sum() - positives.cumsum(0)
        ordered = (negatives * (above + positives / 2)).sum()
        return torch.where(pairs == 0, 0.5, ordered / pairs)

    return make_metric(
        {"positives": "sum", "negatives": "sum"},
        update=update,
        compute=compute,
        shapes={"positives": (bins,), "negatives": (bins,)},
    )
