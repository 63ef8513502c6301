"""The metrics of several ranks are those of one process, whatever each of them has seen."""

import math
from functools import partial

import pytest
import torch
from operators import OperatorMode
from safetensors.torch import load, save
from torch.utils._pytree import tree_map

import trainkit as tk
from trainkit import metrics
from trainkit.tools.testing import run_ranks
from trainkit.tools.testing.ledger import count_collectives
from trainkit.types import SOLO, CheckpointError, Share

NAN = math.nan


def make_everything():
    """Return one metric of every kind. Inputs below are multiples of 1/16: sums are exact."""
    f1 = partial(metrics.f_beta, average="none")
    return metrics.compose_metrics(
        {
            "total": metrics.make_sum(),
            "loss": metrics.compose_metrics(
                {"mean": metrics.make_weighted_mean(), "perplexity": metrics.make_perplexity()}
            ),
            "largest": metrics.make_max(),
            "smallest": metrics.make_min(),
            "accuracy": metrics.make_accuracy(),
            "top2": metrics.make_accuracy(top_k=2),
            "classes": metrics.make_multiclass_confusion(4, {"f1": f1}),
            "binary": metrics.make_binary_confusion(),
            "auroc": metrics.make_auroc(16),
        }
    )


def make_inputs(number):
    draw = torch.Generator().manual_seed(number)
    size = number % 5  # some are empty
    x = torch.randint(-16, 17, (size,), generator=draw) / 16
    weights = torch.randint(0, 3, (size,), generator=draw)
    scores = torch.randint(0, 5, (size, 4), generator=draw) / 4  # with many ties
    labels = torch.randint(0, 4, (size,), generator=draw)
    yes = torch.randint(0, 2, (size,), generator=draw)
    return {
        "total": (x,),
        "loss": ({"mean": (x, weights), "perplexity": (x,)},),
        "largest": (x,),
        "smallest": (x,),
        "accuracy": (scores, labels),
        "top2": (scores, labels),
        "classes": (scores, labels),
        "binary": (x, yes),
        "auroc": (x.abs(), yes),
    }


def seen(metric, numbers):
    state = metric.init()
    for number in numbers:
        state = metric.update(state, make_inputs(number))
    return state


def plain(value):
    return {name: x.tolist() for name, x in value.items()}


def exact(value):
    """Return values as texts, of which a NaN equals another."""
    return {name: str(x.tolist()) for name, x in value.items()}


def on_ranks():
    """Return what this rank gets from 8 batches, of which it sees every other."""
    with tk.parallel_session() as ps:
        axis, metric = ps.loss, make_everything()
        local = seen(metric, range(axis.index, 8, axis.count))
        merged = metrics.merge_over_ranks(metric, local, axis)
        found = {"merged": exact(metric.compute(merged))}
        found["again"] = exact(metric.compute(metrics.merge_over_ranks(metric, local, axis)))
        more = metric.update(local, make_inputs(8 + axis.index))
        found["more"] = exact(metric.compute(metrics.merge_over_ranks(metric, more, axis)))
        alone = seen(metric, range(3) if axis.index == 0 else ())
        found["alone"] = exact(metric.compute(metrics.merge_over_ranks(metric, alone, axis)))
        # Saved by the first rank, restored by all.
        saved = load(save(dict(merged.tensors)))
        restored = metrics.restore_state(metric, saved, axis.share)
        found["restored"] = exact(metric.compute(metrics.merge_over_ranks(metric, restored, axis)))
        return found


def test_ranks_merge_to_what_one_process_computes_exactly():
    metric = make_everything()
    expected = exact(metric.compute(seen(metric, range(8))))
    assert {"accuracy", "auroc", "loss/perplexity", "classes/f1"} < expected.keys()
    for found in run_ranks(on_ranks, 2):
        assert found["merged"] == found["again"] == found["restored"] == expected
        assert found["more"] == exact(metric.compute(seen(metric, range(10))))
        assert found["alone"] == exact(metric.compute(seen(metric, range(3))))


def test_states_of_one_process_merge_the_same():
    metric = make_everything()
    states = [seen(metric, [number]) for number in range(8)]
    merged = metrics.merge_states(metric, *states)
    assert exact(metric.compute(merged)) == exact(metric.compute(seen(metric, range(8))))
    assert exact(metrics.merge_states(metric)) == exact(metric.init())
    # An axis of size 1 needs no process group.
    solo = metrics.merge_over_ranks(metric, merged, SOLO)
    assert exact(metric.compute(solo)) == exact(metric.compute(merged))


# ----------------------------------------------------------------- cases of d9d, of eight ranks


def merged_value(metric, inputs):
    """Merge eight states, the first of which get these inputs."""
    states = [metric.update(metric.init(), *map(torch.tensor, x)) for x in inputs]
    return metric.compute(metrics.merge_states(metric, *states))


def test_means_and_sums_of_eight_ranks():
    mean, total = metrics.make_weighted_mean(), metrics.make_sum()
    assert merged_value(mean, [(1.0, 1.0)] * 4 + [(2.0, 1.0)] * 4) == 1.5
    assert merged_value(mean, [(10.0, 1.0)] * 4 + [(100.0, 0.0)] * 4) == 10
    assert merged_value(mean, [(0.0, 1.0)] * 8 + [(20.0, 1.0)] * 8) == 10
    assert merged_value(mean, [(float(i), 1.0) for i in range(8)]) == 3.5
    assert merged_value(total, [(10.0,)] * 8) == 80
    assert merged_value(total, [(float(i),) for i in range(8)]) == 28


def test_decisions_of_eight_ranks():
    metric = metrics.make_binary_confusion(1, {"precision": metrics.precision})
    first = [([0.9, 0.9, 0.9], [1, 1, 0]), ([0.9, 0.9, 0.1], [1, 1, 0])]
    first += [([0.1, 0.1, 0.1], [0, 0, 0])] * 6
    assert merged_value(metric, first)["precision"] == pytest.approx(0.8)
    second = [([0.9, 0.9, 0.9, 0.9], [1, 1, 1, 0]), *[([0.1], [0])] * 7]
    assert merged_value(metric, first + second)["precision"] == pytest.approx(7 / 9)
    labels = [2, 1, 1, 2, 2, 0, 0, 0]
    first_two = [([[0.1, 0.8, 0.9, 0.0]], [label]) for label in labels]
    assert merged_value(metrics.make_accuracy(top_k=2), first_two) == 0.625


# ------------------------------------------------------------------- a merged state counts once


def test_a_merged_state_is_no_state():
    metric = metrics.make_sum()
    merged = metrics.merge_over_ranks(metric, metric.init(), SOLO)
    assert metric.compute(merged) == 0
    for use in (
        lambda: metric.update(merged, torch.tensor(1.0)),
        lambda: metrics.merge_over_ranks(metric, merged, SOLO),
        lambda: metrics.merge_states(metric, metric.init(), merged),
        lambda: metrics.compose_metrics({"x": metric}).update(merged, {"x": (torch.ones(1),)}),
        lambda: metrics.adapt_metric(metric, lambda x: (x,)).update(merged, torch.ones(1)),
    ):
        with pytest.raises(ValueError, match="merged over ranks, and would count once for each"):
            use()


def test_a_saved_state_of_another_metric_is_refused():
    saved = dict(metrics.make_auroc(8).init())
    with pytest.raises(CheckpointError, match=r"restore_state: .* {'positives': \(8,\)"):
        metrics.restore_state(metrics.make_auroc(9), saved, Share(0, 1))
    with pytest.raises(CheckpointError, match=r"start with metric\.init"):
        metrics.restore_state(metrics.make_sum(), {}, Share(1, 2))
    with pytest.raises(ValueError, match=r"state has \['total'\], and the metric \['max'\]"):
        metrics.merge_over_ranks(metrics.make_max(), metrics.make_sum().init(), SOLO)


# -------------------------------------------------------------------------------- on the wire


def test_no_update_waits_for_the_device_or_computes_on_the_host():
    # The device "meta" stands for an accelerator: the host can read nothing on it.
    metric = make_everything()
    inputs = tree_map(lambda x: x.to("meta"), make_inputs(4))
    state, seen = metric.init("meta"), []
    with OperatorMode(lambda operator, made: seen.append((str(operator), made))):
        values = metric.compute(metric.update(state, inputs))
    assert {x.device.type for x in values.values()} == {"meta"}
    assert [name for name, x in seen if isinstance(x, torch.Tensor) and not x.is_meta] == []
    assert "aten._local_scalar_dense.default" not in dict(seen)


def counted():
    """Return the collectives of a merge of everything, and what an exchange in flight gives."""
    with tk.parallel_session() as ps:
        axis = ps.loss
        everything = {"others": make_everything(), "smooth": metrics.make_ema(0.5)}
        metric = metrics.compose_metrics(everything)
        ledger = count_collectives(
            lambda: metrics.merge_over_ranks(metric, metric.init(), axis), ps
        )
        calls = [(row.kind, row.count) for row in ledger.rows]

        metric = metrics.compose_metrics({"sum": metrics.make_sum(), "max": metrics.make_max()})
        x = torch.tensor([1.0, 2.0])[axis.index : axis.index + 1]
        state = metric.update(metric.init(), {"sum": (x,), "max": (x,)})
        finish = metrics.start_merge_over_ranks(metric, state, axis)
        state["sum/total"].fill_(99)  # in flight is a copy
        later = metric.update(metric.init(), {"sum": (x * 10,), "max": (x * 10,)})
        after = metrics.start_merge_over_ranks(metric, later, axis)
        values = [plain(metric.compute(f())) for f in (after, finish, finish)]  # in any order

        largest = metrics.make_max()
        extremes = []
        for pair in ((NAN, 3.0), (3.0, NAN), (-math.inf, 2.0)):
            own = largest.update(largest.init(), torch.tensor(pair[axis.index]))
            merged = metrics.merge_over_ranks(largest, own, axis)
            extremes.append(largest.compute(merged).item())
        smooth = metrics.make_ema(0.5)
        own = smooth.init()
        for value in (4.0, 8.0):
            own = smooth.update(own, torch.tensor(value * (1 + axis.index)))
        together = smooth.compute(metrics.merge_over_ranks(smooth, own, axis)).item()
        idle = own if axis.index else smooth.init()
        one = smooth.compute(metrics.merge_over_ranks(smooth, idle, axis)).item()
        return calls, values, extremes, (together, one)


def test_all_metrics_merge_in_one_packed_all_reduce_in_flight_and_with_nan():
    for calls, values, extremes, averages in run_ranks(counted, 2):
        assert calls == [("all_reduce", 1)]
        assert values == [{"sum": 30, "max": 20}, {"sum": 3, "max": 2}, {"sum": 3, "max": 2}]
        assert extremes == pytest.approx([NAN, NAN, 2], nan_ok=True)
        # 6 on one rank and 12 on the other; the average of 6 and 12 is 9.
        assert averages == (9, 12)


def refused():
    with tk.parallel_session() as ps:
        makers = (metrics.make_max, metrics.make_min, metrics.make_sum)
        found = []
        for first, second in ((0, 1), (0, 2)):
            metric = makers[second if ps.world.index else first]()
            try:
                metrics.merge_over_ranks(metric, metric.init(), ps.loss)
            except ValueError as error:
                found.append(str(error))
        return found


def test_ranks_with_different_metrics_are_refused_on_all():
    for messages in run_ranks(refused, 2):
        assert len(messages) == 2
        for message in messages:
            assert message.startswith("merge_over_ranks: the ranks of 'loss' passed different")


# ---------------------------------------------------------------------------------- composition


def test_a_composition_updates_some_and_names_all():
    metric = metrics.compose_metrics({"a": metrics.make_weighted_mean(), "b": metrics.make_sum()})
    state = metric.update(metric.init(), {"a": (torch.tensor([10.0]), torch.tensor([1.0]))})
    state = metric.update(state, {})
    assert plain(metric.compute(state)) == {"a": 10, "b": 0}
    assert sorted(state) == ["a/total", "a/weight", "b/total"]
    outer = metrics.compose_metrics({"eval": metric})
    state = outer.update(outer.init(), {"eval": ({"b": (torch.tensor(4),)},)})
    assert plain(outer.compute(state)) == pytest.approx({"eval/a": NAN, "eval/b": 4}, nan_ok=True)


def test_a_composition_that_cannot_be_named_is_refused():
    with pytest.raises(ValueError, match="compose_metrics: at least one metric is needed"):
        metrics.compose_metrics({})
    inner = metrics.make_binary_confusion(statistics={"b": metrics.recall})
    with pytest.raises(ValueError, match=r"\['a/b'\] would be among the values of a metric"):
        metrics.compose_metrics({"a": inner, "a/b": metrics.make_sum()})
    assert metrics.compose_metrics({"a/b": inner, "a/c": inner, "ab": inner})


def test_an_update_of_nobody_is_refused():
    metric = metrics.compose_metrics({"loss": metrics.make_sum()})
    with pytest.raises(ValueError, match=r"no metric \['los'\]; there are \['loss'\]"):
        metric.update(metric.init(), {"los": (torch.ones(1),)})
    adapted = metrics.adapt_metric(metric, lambda x: x)
    with pytest.raises(ValueError, match="return \\(x,\\) for a single one"):
        adapted.update(metric.init(), torch.ones(1))


def test_a_metric_of_ones_own_that_breaks_its_state_is_refused():
    def drop(state, x):
        return {"n": state["n"] + x}

    with pytest.raises(ValueError, match=r"must return the tensors \['m', 'n'\], got \['n'\]"):
        metrics.make_metric({"n": "sum", "m": "max"}, update=drop, compute=dict).update({"n": 0}, 1)
    with pytest.raises(ValueError, match='"sum", "max" or "min", got \'mean\'; a mean is two sums'):
        metrics.make_metric({"m": "mean"}, update=drop, compute=dict)
    with pytest.raises(ValueError, match="at least one tensor"):
        metrics.make_metric({}, update=drop, compute=dict)
    with pytest.raises(ValueError, match=r"shapes has \['x'\]"):
        metrics.make_metric({"n": "sum"}, update=drop, compute=dict, shapes={"x": (2,)})
