"""Accuracy, confusions and the AUROC: the cases of d9d's own tests, ties, and what is no number."""

import math
from functools import partial

import pytest
import torch

from trainkit import metrics

NAN = math.nan
STATISTICS = {
    "accuracy": metrics.decision_accuracy,
    "precision": metrics.precision,
    "recall": metrics.recall,
    "f1": metrics.f_beta,
    "f2": partial(metrics.f_beta, beta=2.0),
}


def seen(metric, *updates):
    state = metric.init()
    for scores, labels in updates:
        state = metric.update(state, torch.tensor(scores), torch.tensor(labels))
    return metric.compute(state)


def one_hot(predictions, classes):
    """Return scores whose largest is that of each prediction."""
    return torch.eye(classes)[predictions].tolist()


def binary(name, *updates):
    return seen(metrics.make_binary_confusion(1, {name: STATISTICS[name]}), *updates)[name].item()


def multiclass(name, average, classes, *updates):
    statistics = {name: partial(STATISTICS[name], average=average)}
    return seen(metrics.make_multiclass_confusion(classes, statistics), *updates)[name].tolist()


# ------------------------------------------------------------------------------------ confusions


def test_decisions_of_a_binary_classifier_add_up_over_updates():
    first = ([0.9, 0.1, 0.4, 0.8, 0.9], [1, 0, 1, 0, 1])
    second = ([0.9, 0.1, 0.1], [1, 1, 0])
    assert math.isnan(binary("accuracy"))
    assert binary("accuracy", first) == 3 / 5
    assert binary("accuracy", first, second) == 5 / 8
    updates = ([0.9, 0.8, 0.1, 0.7, 0.2, 0.3], [1, 0, 1, 1, 0, 0])
    assert binary("f2", updates) == pytest.approx(5 * 2 / (10 + 4 * 1 + 1))
    # A positive is above the threshold, and not at it.
    assert binary("precision", ([0.5, 0.75], [1, 1])) == 1
    assert binary("recall", ([0.5, 0.75], [1, 1])) == 0.5


def test_nothing_predicted_has_no_precision_and_nothing_to_find_no_recall():
    assert math.isnan(binary("precision", ([0.1, 0.2], [1, 0])))
    assert math.isnan(binary("recall", ([0.9, 0.2], [0, 0])))
    assert math.isnan(binary("f1", ([0.1, 0.2], [0, 0])))
    assert binary("f1", ([0.9, 0.2], [0, 0])) == 0


def test_the_counts_themselves():
    counts = seen(metrics.make_binary_confusion(), ([0.9, 0.8, 0.1, 0.2, NAN], [1, 0, 1, 0, 1]))
    assert {name: x.tolist() for name, x in counts.items()} == {
        "true_positives": [1],
        "false_positives": [1],
        "false_negatives": [2],  # a NaN is a no
        "true_negatives": [1],
    }


def test_f1_of_each_class_and_its_mean():
    update = (one_hot([1, 1, 0, 2, 2, 1], 3), [0, 1, 2, 2, 2, 1])
    assert multiclass("f1", "none", 3, update) == pytest.approx([0, 0.8, 0.8])
    assert multiclass("f1", "macro", 3, update) == pytest.approx(1.6 / 3)
    assert math.isnan(multiclass("f1", "macro", 3))


def test_recall_weighted_by_examples():
    update = (one_hot([0, 1, 0, 1, 2, 2], 3), [0, 1, 2, 1, 1, 2])
    expected = (1.0 * 1 + (2 / 3) * 3 + 0.5 * 2) / 6
    assert multiclass("recall", "weighted", 3, update) == pytest.approx(expected)
    assert multiclass("recall", "micro", 3, update) == pytest.approx(4 / 6)
    # A class without an example has no recall, and no weight: it is left out.
    update = (one_hot([0, 1, 0, 1, 2, 2], 4), update[1])
    assert multiclass("recall", "weighted", 4, update) == pytest.approx(expected)


def test_classes_that_occur_nowhere_are_no_part_of_the_mean():
    few, many = ((one_hot([0, 1, 1], classes), [0, 1, 0]) for classes in (2, 5))
    assert multiclass("f1", "macro", 5, many) == multiclass("f1", "macro", 2, few)
    # One that occurs, and of which the statistic is 0 / 0, is not hidden.
    never_predicted = (one_hot([0, 0], 2), [0, 1])
    assert multiclass("precision", "none", 2, never_predicted) == pytest.approx(
        [0.5, NAN], nan_ok=True
    )
    assert math.isnan(multiclass("precision", "macro", 2, never_predicted))
    assert math.isnan(multiclass("precision", "weighted", 2, never_predicted))


def test_accuracies_of_decisions_per_class():
    update = ([[0.1, 0.8, 0.1], [0.2, 0.7, 0.1], [0.9, 0.05, 0.05]], [1, 2, 0])
    assert multiclass("accuracy", "none", 3, update) == pytest.approx([1, 2 / 3, 2 / 3])
    update = (one_hot([1, 2, 1, 2], 3), [1, 2, 0, 2])
    assert multiclass("accuracy", "none", 3, update) == [0.75, 0.75, 1.0]
    assert multiclass("accuracy", "none", 3) == pytest.approx([NAN] * 3, nan_ok=True)


def test_a_decision_is_right_more_often_than_a_prediction():
    scores = [[[0.9, 0.1, 0.0], [0.0, 0.9, 0.1]], [[0.1, 0.1, 0.8], [0.1, 0.8, 0.1]]]
    update = (scores, [[0, 1], [2, 0]])
    assert multiclass("accuracy", "micro", 3, update) == pytest.approx(10 / 12)
    assert seen(metrics.make_accuracy(), update) == 3 / 4


def test_several_labels_at_once():
    update = (
        [[0.8, 0.2, 0.3], [0.4, 0.9, 0.1], [0.3, 0.8, 0.7]],
        [[1, 0, 1], [1, 1, 0], [0, 1, 1]],
    )
    micro = partial(metrics.decision_accuracy, average="micro")
    metric = metrics.make_binary_confusion(3, {"micro": micro, "macro": STATISTICS["accuracy"]})
    assert seen(metric, update)["micro"].item() == pytest.approx(7 / 9)
    assert seen(metric, update)["macro"].item() == pytest.approx(7 / 9)
    ignored = (update[0], [[1, 0, -100], [1, 1, 0], [0, 1, 1]])
    assert seen(metric, ignored)["micro"].item() == pytest.approx(7 / 8)


def test_a_statistic_of_ones_own():
    metric = metrics.make_multiclass_confusion(3, {"hits": lambda counts: counts["true_positives"]})
    assert seen(metric, (one_hot([0, 0, 2], 3), [0, 0, 2]))["hits"].tolist() == [2, 0, 1]


def test_a_class_predicted_by_nan_is_none():
    counts = seen(
        metrics.make_multiclass_confusion(2), ([[NAN, 0.1], [0.2, NAN], [0.1, 0.9]], [0, -100, 1])
    )
    assert {name: x.tolist() for name, x in counts.items()} == {
        "true_positives": [0, 1],
        "false_positives": [0, 0],
        "false_negatives": [1, 0],
        "true_negatives": [1, 1],
    }


# -------------------------------------------------------------------------------------- accuracy


def test_accuracy_among_the_first_k():
    scores = [
        [0.2, 0.1, 0.5, 0.1, 0.1],
        [0.1, 0.3, 0.1, 0.1, 0.4],
        [0.3, 0.4, 0.1, 0.1, 0.1],
        [0.1, 0.1, 0.3, 0.1, 0.4],
        [0.1, 0.3, 0.1, 0.4, 0.1],
    ]
    update = (scores, [2, 4, 1, 3, 0])
    assert seen(metrics.make_accuracy(top_k=2), update) == 3 / 5
    assert seen(metrics.make_accuracy(top_k=5), update) == 1
    assert seen(metrics.make_accuracy(top_k=9), update) == 1
    assert seen(metrics.make_accuracy(), update) == 3 / 5
    assert math.isnan(seen(metrics.make_accuracy()))


def test_of_equal_scores_the_first_class_is_predicted():
    ties = [[0.5, 0.5, 0.0]] * 3
    assert seen(metrics.make_accuracy(), (ties, [0, 1, 2])) == 1 / 3
    assert seen(metrics.make_accuracy(top_k=2), (ties, [0, 1, 2])) == 2 / 3
    for k in range(1, 5):  # however many are equal, k of them are right
        assert seen(metrics.make_accuracy(top_k=k), ([[1.0] * 4] * 4, [0, 1, 2, 3])) == k / 4


def test_ignored_labels_do_not_count_and_nan_is_wrong():
    scores = [[0.0, 1.0], [1.0, 0.0], [NAN, 1.0], [0.0, NAN], [NAN, NAN]]
    assert seen(metrics.make_accuracy(), (scores, [1, -100, 1, 1, -100])) == 1 / 3
    metric = metrics.make_accuracy()
    state = metric.update(metric.init(), torch.zeros(0, 2), torch.zeros(0, dtype=torch.long))
    assert metric.compute(state).isnan()


# ---------------------------------------------------------------------------------------- AUROC


def true_auroc(scores, labels):
    """Return the share of ordered pairs, where equal scores are half a pair."""
    positives = scores[labels == 1].double()[:, None]
    negatives = scores[labels == 0].double()
    if not (positives.numel() and negatives.numel()):
        return 0.5
    ordered = (positives > negatives).double() + (positives == negatives).double() / 2
    return float(ordered.mean())


@pytest.mark.parametrize(
    ("updates", "expected"),
    [
        ([([0.1, 0.2], [0, 0]), ([0.8, 0.9], [1, 1])], [0.5, 0.5, 1]),
        ([([0.1, 0.2], [1, 1]), ([0.8, 0.9], [0, 0])], [0.5, 0.5, 0]),
        ([([0.1, 0.2], [0, 0]), ([0.8, 0.9], [0, 0])], [0.5, 0.5, 0.5]),
        ([([0.1, 0.2], [1, 1]), ([0.8, 0.9], [1, 1])], [0.5, 0.5, 0.5]),
        # Equal scores are half right, and the largest score is in the last bin.
        ([([0.3, 0.3, 0.3, 0.3], [0, 1, 1, 0])], [0.5, 0.5]),
        ([([1.0, 1.0, 0.0], [1, 0, 0])], [0.5, 0.75]),
        ([([], [])], [0.5, 0.5]),
        ([([NAN, 0.5, 0.2], [-100, 1, 0])], [0.5, 1]),
    ],
)
def test_auroc_with_one_class_with_both_and_with_ties(updates, expected):
    found = [seen(metrics.make_auroc(), *updates[:n]).item() for n in range(len(updates) + 1)]
    assert found == expected


@pytest.mark.parametrize("size", [1, 10, 100, 1000])
@pytest.mark.parametrize("bins", [10**4, 10**5])
def test_auroc_is_that_of_all_pairs(size, bins):
    draw = torch.Generator().manual_seed(42)
    scores = torch.rand(size, generator=draw)
    labels = (scores + torch.rand(size, generator=draw) * 0.8).round().clamp(0, 1).long()
    metric = metrics.make_auroc(bins)
    found = metric.compute(metric.update(metric.init(), scores, labels)).item()
    assert found == pytest.approx(true_auroc(scores, labels), abs=1 / bins)


def test_few_bins_are_off_by_no_more_than_half_the_pairs_within_them():
    scores = torch.tensor([0.1, 0.2, 0.3, 0.4])
    labels = torch.tensor([1, 0, 1, 0])
    metric = metrics.make_auroc(1)
    found = metric.compute(metric.update(metric.init(), scores, labels)).item()
    assert found == 0.5
    assert abs(found - true_auroc(scores, labels)) <= 0.5


def test_a_score_that_is_nan_has_no_auroc():
    assert seen(metrics.make_auroc(), ([NAN, 0.5, 0.2], [1, 1, 0])).isnan()


# ------------------------------------------------------------------------------ what is refused

BAD = [
    (metrics.make_multiclass_confusion(3), torch.rand(2, 4), torch.tensor([0, 1]), "3 classes are"),
    (metrics.make_multiclass_confusion(3), torch.rand(2, 3), torch.eye(3)[:2], "labels.argmax"),
    (metrics.make_multiclass_confusion(3), torch.rand(2, 3), torch.tensor([0, 3]), "below the 3"),
    (metrics.make_accuracy(), torch.rand(2, 3), torch.tensor([[0], [1]]), "labels.argmax"),
    (metrics.make_accuracy(), torch.rand(2, 3), torch.tensor([-1, 0]), "1 of 2 are not"),
    (metrics.make_accuracy(), torch.tensor(1.0), torch.tensor(0), "one for each row of the scores"),
    (metrics.make_binary_confusion(), torch.rand(4), torch.rand(5), "of one shape"),
    (metrics.make_binary_confusion(3), torch.rand(4), torch.rand(4), "a last dimension of 3"),
    (metrics.make_binary_confusion(), torch.rand(2), torch.tensor([2, 0]), "must be 0, 1 or -100"),
    (metrics.make_auroc(), torch.rand(2), torch.zeros(3), "a label for each score"),
    (metrics.make_auroc(), torch.tensor([3.0]), torch.tensor([1]), "pass logits.sigmoid"),
    (metrics.make_auroc(), torch.tensor([0.5]), torch.tensor([7]), "must be 0, 1 or -100"),
]


@pytest.mark.parametrize(("metric", "scores", "labels", "message"), BAD)
def test_bad_inputs_are_refused_in_words(metric, scores, labels, message):
    with pytest.raises(ValueError, match=message):
        metric.update(metric.init(), scores, labels)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (partial(metrics.make_accuracy, top_k=0), "make_accuracy: top_k must be"),
        (partial(metrics.make_auroc, 0), "make_auroc: bins must be"),
        (partial(metrics.make_multiclass_confusion, 0), "make_multiclass_confusion: classes must"),
        (partial(metrics.make_binary_confusion, 0), "make_binary_confusion: classes must"),
        (partial(metrics.f_beta, {}, beta=-1.0), "f_beta: beta must be"),
        (partial(metrics.recall, {}, average="mean"), 'recall: average must be "macro" or'),
    ],
)
def test_bad_options_are_refused_in_words(make, message):
    with pytest.raises(ValueError, match=message):
        make()
