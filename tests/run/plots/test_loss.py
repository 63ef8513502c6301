"""The picture of a run: drawn from what a killed run left, and from nothing else."""

import json
import math
import sys

import pytest

from trainkit import plots, sinks
from trainkit.run.plots.loss import smooth
from trainkit.types import ConfigError, DataError


@pytest.mark.parametrize("steps", [1, 2, 300])
def test_a_picture_is_drawn_from_what_a_killed_run_left(tmp_path, monkeypatch, steps):
    monkeypatch.delitem(sys.modules, "matplotlib.pyplot", raising=False)  # torchmetrics imports it
    with sinks.open_jsonl(tmp_path / "metrics.jsonl") as sink:
        for step in range(1, steps + 1):
            sink(step, {"loss": math.nan if step == 2 else 5 / step, "lr": 1e-3})
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 99, "lo')
    with sinks.open_events(tmp_path / "events.jsonl") as event:
        event("evaluation", step=1, **{"eval/loss": 5.0})
    with (tmp_path / "events.jsonl").open("ab") as file:
        file.write(b'{"event":"evaluation","step":1,"eval/lo')
    picture = plots.plot_loss(tmp_path / "metrics.jsonl", tmp_path / "loss.png")
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "matplotlib.pyplot" not in sys.modules


@pytest.mark.parametrize(
    ("count", "unit"),
    [("pairs", "per pair"), ("answers", "per answer"), ("tokens", "nats per token")],
)
def test_the_unit_of_a_loss_is_what_it_is_divided_by(count, unit, tmp_path):
    line = {"step": 1, "loss": 0.5, "tokens": 9, count: 4}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line))
    picture = plots.plot_loss(tmp_path / "metrics.jsonl", tmp_path / "loss.svg")
    assert f"loss ({unit})" in picture.read_text()


def test_a_smoothed_loss_neither_lags_behind_nor_runs_ahead():
    line = [3.0 * x for x in range(20)]
    for window in (1, 3, 7):
        half = window // 2
        found = smooth(line, window)
        assert found[: 20 - half] == pytest.approx(line[: 20 - half])  # the end has no later ones
        assert found[-1] == pytest.approx(sum(line[19 - half :]) / (half + 1))


def test_a_picture_of_nothing_is_refused(tmp_path):
    with pytest.raises(DataError, match="no step"):
        plots.plot_loss(tmp_path / "missing.jsonl", tmp_path / "loss.png")


def test_a_missing_extra_says_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.5}\n')
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r'pip install "trainkit-lm\[recipes\]"'):
        plots.plot_loss(tmp_path / "metrics.jsonl", tmp_path / "loss.png")
