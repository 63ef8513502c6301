"""The picture of the load of experts: of a run that was killed, of few steps, of many layers."""

import json

import numpy as np
import pytest

from trainkit import plots
from trainkit.run.plots.load import load_over_steps
from trainkit.types import DataError


def write(path, steps, load_at, torn=b""):
    lines = [{"step": step, "loss": 1.0, **load_at(step)} for step in steps]
    path.write_bytes("".join(json.dumps(line) + "\n" for line in lines).encode() + torn)
    return path


def test_columns_are_sums_of_their_steps_and_empty_ones_are_no_number():
    lines = [{"step": 5, "load": [[4, 0]]}, {"step": 6, "load": [[4, 8]]}]
    lines.append({"step": 14, "load": [[1, 1]]})
    found = load_over_steps(lines, columns=5)  # 5 and 6, 7 and 8, ..., 13 and 14
    np.testing.assert_array_equal(found[[0, 4], 0], [[1.0, 1.0], [1.0, 1.0]])
    assert np.isnan(found[1:4]).all()
    single = load_over_steps(lines, columns=100)
    assert single.shape == (10, 1, 2)
    np.testing.assert_array_equal(single[[0, 1, 9], 0], [[2, 0], [2 / 3, 4 / 3], [1, 1]])


@pytest.mark.parametrize(
    ("steps", "layers", "experts"), [([1], 1, 1), ([3, 4], 3, 8), (range(1, 900), 20, 64)]
)
def test_a_picture_is_drawn_from_what_a_killed_run_left(tmp_path, steps, layers, experts):
    def load_at(step):
        return {} if step % 3 == 2 else {"load": [[step + e for e in range(experts)]] * layers}

    metrics = write(tmp_path / "metrics.jsonl", steps, load_at, torn=b'{"step": 999, "lo')
    picture = plots.plot_expert_load(metrics, tmp_path / "load.svg").read_text()
    labels = [layer for layer in range(layers) if f">expert layer {layer}<" in picture]
    assert (labels[0], labels[-1]) == (0, layers - 1)
    assert len(labels) == min(layers, 8)
    assert ("; 8 of 20 layers" in picture) == (layers > 8)
    assert "1  balanced" in picture


def test_the_title_tells_the_last_step_alone(tmp_path):
    steps = [*range(1, 800), 800]  # four share a column
    metrics = write(tmp_path / "m.jsonl", steps, lambda step: {"load": [[step // 800, 1]]})
    assert (
        "largest load 1.00 times" in plots.plot_expert_load(metrics, tmp_path / "a.svg").read_text()
    )


def test_a_picture_of_no_experts_is_refused(tmp_path):
    metrics = write(tmp_path / "metrics.jsonl", [1, 2], lambda _: {})
    with pytest.raises(DataError, match="no step with a load"):
        plots.plot_expert_load(metrics, tmp_path / "load.png")
    with pytest.raises(ValueError, match="plot_expert_load: a picture ends in"):
        plots.plot_expert_load(metrics, tmp_path / "load")
