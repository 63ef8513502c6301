"""Several metrics as one, and metrics of something that other code computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from trainkit.metrics.records import Metric, State, make_metric


def compose_metrics(metrics: Mapping[str, Metric]) -> Metric:
    """Combine metrics by name into one: one state, one merge, one dict of values.

    `update(state, {name: inputs})` takes the inputs of some of them, each a tuple, and leaves the
    others as they are. Values are `{name: value}`, and `{name/part: value}` for a metric that has
    several. Compositions can be composed.

    Args:
        metrics: Metrics by name.

    Raises:
        ValueError: There is none, or one is called as what is in another, as "a/b" and "a"; later,
            an update of an unknown name.

    Examples:
        >>> import torch
        >>> from trainkit.metrics import make_max, make_weighted_mean
        >>> metric = compose_metrics({"loss": make_weighted_mean(), "longest": make_max()})
        >>> lengths = torch.tensor([3, 5])
        >>> inputs = {"loss": (torch.tensor([0.5, 1.0]), lengths), "longest": (lengths,)}
        >>> metric.compute(metric.update(metric.init(), inputs))
        {'loss': tensor(0.8125, dtype=torch.float64), 'longest': tensor(5., dtype=torch.float64)}
    """
    if not metrics:
        raise ValueError("compose_metrics: at least one metric is needed, got none")
    if nested := sorted(a for a in metrics for b in metrics if a.startswith(f"{b}/")):
        raise ValueError(
            f"compose_metrics: {nested} would be among the values of a metric whose name ends at "
            f"its slash; the names are {sorted(metrics)}"
        )
    parts = {
        f"{name}/{inner}": (name, inner)
        for name, metric in metrics.items()
        for inner in metric.merge
    }

    def select(state: Mapping[str, Tensor], name: str) -> State:
        return {inner: state[full] for full, (owner, inner) in parts.items() if owner == name}

    def update(state: State, inputs: Mapping[str, tuple[Any, ...]]) -> State:
        if unknown := sorted(set(inputs) - set(metrics)):
            raise ValueError(
                f"compose_metrics: there is no metric {unknown}; there are {sorted(metrics)}"
            )
        changed = dict(state)
        for name, arguments in inputs.items():
            after = metrics[name].update(select(state, name), *arguments)
            changed |= {f"{name}/{inner}": x for inner, x in after.items()}
        return changed

    def compute(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        values: dict[str, Tensor] = {}
        for name, metric in metrics.items():
            value = metric.compute(select(state, name))
            if isinstance(value, Tensor):
                values[name] = value
            else:
                values |= {f"{name}/{part}": x for part, x in value.items()}
        return values

    shapes = {
        f"{name}/{inner}": tuple(x.shape)
        for name, metric in metrics.items()
        for inner, x in metric.init("meta").items()
    }
    merge = {full: metrics[name].merge[inner] for full, (name, inner) in parts.items()}
    return make_metric(merge, update=update, compute=compute, shapes=shapes)


def adapt_metric(metric: Metric, read: Callable[..., tuple[Any, ...]]) -> Metric:
    """Return a metric that takes other inputs: `update(state, *inputs)` reads its own from them.

    Args:
        metric: The metric.
        read: `read(*inputs)` returns the inputs of `metric`, a tuple.

    Raises:
        ValueError: Later, if `read` does not return a tuple.

    Examples:
        >>> import torch
        >>> from trainkit.metrics import make_accuracy
        >>> metric = adapt_metric(make_accuracy(), lambda scores, batch: (scores, batch["labels"]))
        >>> batch = {"labels": torch.tensor([[1, -100]])}
        >>> scores = torch.tensor([[[0.0, 1.0], [1.0, 0.0]]])
        >>> metric.compute(metric.update(metric.init(), scores, batch))
        tensor(1., dtype=torch.float64)
    """

    def update(state: State, *inputs: Any) -> State:
        found = read(*inputs)
        if not isinstance(found, tuple):
            raise ValueError(  # noqa: TRY004 (as for all bad arguments)
                f"adapt_metric: read must return a tuple of inputs, got a {type(found).__name__}; "
                "return (x,) for a single one"
            )
        return metric.update(state, *found)

    return Metric(metric.init, update, metric.merge, metric.compute)
