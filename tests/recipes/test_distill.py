"""recipes/distill.py: a student of a teacher, and a twin on hard labels, of the same batches."""

import functools
import types

import pytest
import recipe_runs
import torch
from recipe_runs import assert_equal_runs, column, events, here, load, refusal, several
from weights.hub.test_export_command import saved_run

from trainkit import config, models, sampling
from trainkit.batch import count_valid_tokens
from trainkit.data import make_step_batch
from trainkit.mesh import solo_parallel
from trainkit.models import build_decoder, make_decoder_config
from trainkit.text.tokenizers import open_tokenizer
from trainkit.tools.testing import run_ranks
from trainkit.types import Cursor

TEACHER = make_decoder_config("tiny", layers=2, width=48, heads=2, kv_heads=2, mlp_width=64)
SIZE = {"layers": 2, "width": 32, "heads": 2, "mlp_width": 48}
FLAGS = ["--loss", "js", "--temperature", 2, "--hard", 0.25, "--save-every", 2, "--lr", 5e-4]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Return a folder with text, and with a teacher whose words are far from equally likely."""
    home = tmp_path_factory.mktemp("home")
    (home / "text").mkdir()
    for number in range(20):
        text = "\n".join(f"{i} + 1 is {i + 1}, as you know." for i in range(number, number + 9))
        (home / f"text/{number}.txt").write_text(text)
    saved_run(home / "teacher", TEACHER)
    return home


@pytest.fixture(scope="module")
def flags_of(home):
    """Return `flags(out, steps, *more)`, of a short run; of a flag given twice the last counts."""

    def flags(out, steps, *more):
        given = ["--teacher", home / "teacher", "--data", home / "text", "--out", out]
        size = [x for name, value in SIZE.items() for x in (f"--{name.replace('_', '-')}", value)]
        small = recipe_runs.SMALL.split()
        return [*given, "--steps", steps, *small, "--eval-every", 2, *size, *FLAGS, *more]

    return flags


@pytest.fixture(scope="module")
def whole(flags_of, tmp_path_factory):
    """Return the directory of a run of 4 steps with its twin."""
    out = tmp_path_factory.mktemp("whole") / "run"
    code, said = here(flags_of(out, 4), "distill")
    assert code == 0, said
    return out


def test_the_twin_has_the_same_batches_rates_and_initial_values(whole):
    for name in ("batch_hash", "lr_hex", "tokens_total"):
        assert column(whole, name) == column(whole / "hard", name), name
    assert column(whole, "loss")[0] == pytest.approx(column(whole / "hard", "loss")[0], rel=1e-6)
    assert column(whole, "loss")[-1] != column(whole / "hard", "loss")[-1]
    assert "distillation" not in recipe_runs.lines(whole / "hard")[0]


def test_the_result_compares_both_on_what_is_held_out(whole):
    (result,) = events(whole, "result")
    before, after = (events(x, "evaluation")[-1]["eval/loss"] for x in (whole / "hard", whole))
    assert result["metric"] == "eval/loss"
    assert (result["before"], result["after"]) == (before, after)
    assert events(whole / "hard", "result") == []


def test_a_step_is_taken_by_the_divergence_and_the_hard_labels(whole, flags_of):
    recipe = load("distill")
    cfg = config.load_config(recipe.Config, [str(flag) for flag in flags_of(whole, 4)])
    run = types.SimpleNamespace(log=str, ps=solo_parallel())
    rows, _ = recipe.open_rows(cfg, run, open_tokenizer("bytes"))
    rows_at = sampling.shuffle_epochs(len(rows), rows_per_step=4, seed=cfg.seed)
    parts = make_step_batch(rows, rows_at, Cursor(), rows_per_microbatch=2).microbatches
    student = build_decoder(recipe.choose_student(cfg, TEACHER.vocab_size), seed=cfg.seed)
    teacher, call = build_decoder(TEACHER, seed=1), models.call_model
    tokens, divergence = count_valid_tokens(parts), 0.0
    for batch in parts:
        kept = batch.labels != -100
        logits, wanted = call(student, batch)[kept], call(teacher, batch)[kept].detach()
        q, p = ((x / 2).log_softmax(-1) for x in (logits, wanted))
        mixed = ((q.exp() + p.exp()) / 2).log()
        far = sum((x.exp() * (x - mixed)).sum() / 2 for x in (q, p))
        hard = torch.nn.functional.cross_entropy(logits, batch.labels[kept], reduction="sum")
        ((0.25 * hard + 0.75 * 4 * far) / tokens).backward()
        divergence += float(far.detach() / tokens)
    norm = torch.nn.utils.get_total_norm([p.grad for p in student.parameters()])
    assert divergence > 1e-3
    assert column(whole, "distillation")[0] == pytest.approx(divergence, rel=1e-4)
    assert column(whole, "grad_norm")[0] == pytest.approx(float(norm), rel=1e-4)


def test_stopped_it_goes_on_to_the_same_bits_with_its_twin(whole, flags_of, tmp_path):
    for steps in (2, 4):
        code, said = here(flags_of(tmp_path, steps), "distill")
        assert code == 0, said
    for name in ("loss_hex", "grad_norm_hex"):
        assert column(tmp_path, name) == column(whole, name)
    for name in ("final.json", "hard/final.json"):
        assert (tmp_path / name).read_text() == (whole / name).read_text()
    assert events(tmp_path, "result")[-1] == pytest.approx(events(whole, "result")[0])


@pytest.mark.parametrize(
    ("world", "layouts"),
    [
        (2, ["--compare", "--no-compare --tp 2 --eval-every 0"]),
        # Both of its losses are cut along a sequence, and into stages, in the certificate.
        pytest.param(
            2, ["--no-compare --ring 2", "--no-compare --pp 2"], marks=pytest.mark.only_all
        ),
        pytest.param(4, ["--pp 2 --tp 2", "--ulysses 2 --pp 2"], marks=pytest.mark.only_all),
    ],
)
def test_every_layout_learns_the_same_from_its_teacher(world, layouts, whole, flags_of, tmp_path):
    outs = [tmp_path / str(number) for number in range(len(layouts))]
    runs = [flags_of(out, 2, *layout.split()) for out, layout in zip(outs, layouts, strict=True)]
    for (code, said), out in zip(run_ranks(several, world, runs, "distill")[0], outs, strict=True):
        assert code == 0, said
        assert_equal_runs(out, whole, steps=2)
        terms = column(out, "distillation")
        assert terms == pytest.approx(column(whole, "distillation")[:2], rel=1e-5)
    if "--compare" in layouts:
        assert_equal_runs(outs[0] / "hard", whole / "hard", steps=2)


def test_another_teacher_is_refused_and_one_that_is_nowhere_and_a_layout(
    whole, flags_of, home, tmp_path
):
    saved_run(home / "other", make_decoder_config("tiny", layers=2, width=32))
    again = functools.partial(refusal, "distill")
    code, what = again(*flags_of(whole, 4, "--teacher", home / "other"))
    assert (code, "weights of the teacher" in what) == (66, True), what
    for run in (whole, whole / "hard"):
        assert str(home / "other") not in (run / "config.toml").read_text()
    code, what = again(*flags_of(tmp_path / "run", 2, "--teacher", tmp_path / "nowhere"))
    assert (code, "nowhere" in what, (tmp_path / "run").exists()) == (66, True, False), what
    code, what = again(*flags_of(tmp_path / "run", 2, "--tp", 3))
    assert (code, "tp" in what, (tmp_path / "run").exists()) == (64, True, False), what
