"""A user's own metric is saved with a run of a recipe, and goes on bit for bit."""

from unittest import mock

import pytest
import recipe_runs
from recipe_runs import column, several

from trainkit.tools.testing import run_ranks

# What docs/howto/measure-what-i-want.md tells a user to write.
METRIC = """
class Running:
    def __init__(self, metric):
        self.metric, self.state = metric, metric.init()

    def update(self, *inputs):
        self.state = self.metric.update(self.state, *inputs)

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


"""
MADE = """\
    ids = Running(
        tk.metrics.compose_metrics(
            {
                "mean": tk.metrics.make_weighted_mean(),
                "average": tk.metrics.make_ema(),
                "largest": tk.metrics.make_max(),
            }
        )
    )
"""
USED = """\
            for microbatch in batch.microbatches:
                x = microbatch.input_ids.log1p()
                ids.update({"mean": (x,), "average": (x.mean(),), "largest": (x,)})
            merged = tk.metrics.merge_over_ranks(ids.metric, ids.state, ps.loss)
            metrics |= {f"own/{name}": x for name, x in ids.metric.compute(merged).items()}
"""
RESUME = "    state = run.resume(\n"
STEP = "            state, metrics = train_step(state, batch)\n"
CONFIG = "        request=cfg.resume,\n        config=cfg,\n"
SAVED = "        components={'ids': tk.checkpoint.Component(ids, per_rank=True)},\n"


def write_recipe(folder):
    """Write the pretrain recipe with a metric of its own."""
    text = (recipe_runs.RECIPES / "pretrain.py").read_text()
    for line, more in (
        ("def choose_model", METRIC + "def choose_model"),
        (RESUME, MADE + RESUME),
        (CONFIG, CONFIG + SAVED),
        (STEP, STEP + USED),
    ):
        assert text.count(line) == 1
        text = text.replace(line, more)
    (folder / "own.py").write_text(text)


def run_own(folder, runs):
    with mock.patch.object(recipe_runs, "RECIPES", folder):
        return several(runs, "own")


@pytest.mark.usefixtures("own_process")
def test_a_metric_of_a_resumed_run_has_the_values_of_an_uninterrupted_one(tmp_path):
    write_recipe(tmp_path)
    (tmp_path / "text").mkdir()
    for i in range(40):
        (tmp_path / "text" / f"{i}.txt").write_text(f"word{i} = {i * i % 17}, " * (3 + i % 7))
    flags = ["--data", tmp_path / "text", *recipe_runs.SMALL.split(), "--sample", 1]
    runs = [
        ["--out", tmp_path / out, "--steps", steps, *flags]
        for out, steps in (("whole", 6), ("parts", 2), ("parts", 5), ("parts", 6))
    ]
    for code, said in run_ranks(run_own, 2, tmp_path, runs, timeout=170)[0]:
        assert code == 0, said
    for name in ("mean", "average", "largest"):
        values = column(tmp_path / "whole", f"own/{name}")
        assert column(tmp_path / "parts", f"own/{name}") == values
        assert len(values) == 6
    assert len(set(column(tmp_path / "whole", "own/average"))) == 6
