"""recipes/mixture.py: proportions of corpora, and annealing."""

import json

import pytest
import recipe_runs
from recipe_runs import column, here, lines, load, refusal

from trainkit import schedules
from trainkit.tools.testing import run_ranks

SMALL = [*recipe_runs.SMALL.split(), "--save-every", 3, "--sample", 1]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Return a directory with a little text in it."""
    folder = tmp_path_factory.mktemp("text")
    for i in range(60):
        words = [f"word{(i * j) % 17} = {j}" for j in range(3 + i % 7)]
        (folder / f"{i}.txt").write_text("\n".join(words))
    return folder


def default_rate(step):
    """Return the rate of a step in all of these runs, before it is annealed."""
    peak = load("mixture").Config().optim.lr
    return schedules.warmup_stable_decay(peak, warmup=2, total=8, decay=0.4)(step)


@pytest.fixture(scope="module")
def lists(tmp_path_factory):
    """Return a corpus of another kind: lines of numbers."""
    path = tmp_path_factory.mktemp("lists") / "lists.jsonl"
    texts = [" ".join(str(i * j) for j in range(20)) for i in range(40)]
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    return path


def mixed(out, text, lists, steps, *flags):
    mixture = ["--data", text, lists, "--weights", 3, 1, "--anneal-step", 2]
    mixture += ["--anneal-weights", 1, 3, "--anneal-lr", 0.5]
    return ["--out", out, "--steps", steps, *SMALL, *mixture, *flags]


@pytest.fixture(scope="module")
def mixture(text, lists, tmp_path_factory):
    """Return the directory of a run of 4 steps on two corpora, which anneals after two of them."""
    out = tmp_path_factory.mktemp("mixture") / "run"
    code, said = here(mixed(out, text, lists, 4), "mixture")
    assert code == 0, said
    return out


def test_a_mixture_reports_each_corpus_and_anneals(mixture, text, lists):
    for row in lines(mixture):
        parts = [row[f"loss/{corpus.stem}"] for corpus in (text, lists)]
        assert min(parts) < row["loss"] < max(parts)
    rates = [default_rate(step) for step in range(4)]
    assert column(mixture, "lr") == [*rates[:2], rates[2] / 2, rates[3] / 2]


def test_a_mixture_is_the_same_on_two_ranks_and_after_a_stop(mixture, text, lists, tmp_path):
    run_ranks(here, 2, mixed(tmp_path, text, lists, 2), "mixture")
    here(mixed(tmp_path, text, lists, 4), "mixture")
    assert column(tmp_path, "batch_hash") == column(mixture, "batch_hash")
    losses = column(mixture, "loss/lists")
    assert column(tmp_path, "loss/lists") == pytest.approx(losses, rel=1e-5)


def test_a_phase_to_come_may_change_and_one_that_has_begun_may_not(text, lists, tmp_path):
    here(mixed(tmp_path, text, lists, 2, "--anneal-step", 100), "mixture")
    here(mixed(tmp_path, text, lists, 3, "--anneal-step", 2), "mixture")
    assert column(tmp_path, "step") == [1, 2, 3]
    code, what = refusal("mixture", *mixed(tmp_path, text, lists, 4, "--anneal-lr", 0.1))
    assert (code, "phases: 2 was changed" in what) == (66, True), what


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--anneal-step", 0], "do nothing without anneal_step"),
        (["--weights", 1], "weights has 1 numbers for 2 corpora"),
        (["--weights", 1, -1], "the weight of 'lists' must be finite, 0 or more: -1.0"),
        (["--weights", 0, 0], "at least one weight must be above 0"),
        (["--anneal-weights", 1, 2, 3], "anneal_weights has 3 numbers for 2 corpora"),
    ],
    ids=str,
)
def test_weights_that_do_not_fit_are_refused(flags, named, text, lists, tmp_path):
    code, what = refusal("mixture", *mixed(tmp_path, text, lists, 4, *flags))
    assert (code, named in what) == (64, True), what
