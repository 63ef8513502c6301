"""The recipes as a user starts them, on one process and on two, with good input and with bad."""

import json
import os
import re
import resource
import shutil
import signal
import threading
import time
import tomllib

import pytest
import recipe_runs
from recipe_runs import (
    assert_equal_runs,
    column,
    error_of,
    events,
    here,
    lines,
    load,
    refusal,
    run,
    several,
)

from trainkit import config, schedules, sinks
from trainkit.packing import next_fit, pack_bins
from trainkit.post.generation import Completion
from trainkit.tools.testing import run_ranks
from trainkit.weights.checkpoint import verify_checkpoint

SMALL = [*recipe_runs.SMALL.split(), "--save-every", 3, "--sample", 1]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Return a directory with a little text in it."""
    folder = tmp_path_factory.mktemp("text")
    for i in range(60):
        words = [f"word{(i * j) % 17} = {j}" for j in range(3 + i % 7)]
        (folder / f"{i}.txt").write_text("\n".join(words))
    return folder


def flags_of(out, text, steps, *flags):
    return ["--out", out, "--data", text, "--steps", steps, *SMALL, *flags]


@pytest.fixture(scope="module")
def whole(text, tmp_path_factory):
    """Return the directory of a run of 8 steps, and what it printed."""
    out = tmp_path_factory.mktemp("whole") / "run"
    code, printed = here(flags_of(out, text, 8, "--eval-every", 4, "--prompt", "def "), drawn=True)
    assert code == 0, printed
    return out, printed


def test_a_run_starts_from_the_configuration_of_another(whole, tmp_path):
    begun, again = whole[0] / "config.toml", tmp_path / "run"
    code, said = here(["--config", begun, "--out", again, "--steps", 2])
    assert code == 0, said
    assert column(again, "loss_hex") == column(whole[0], "loss_hex")[:2]
    first, second = (tomllib.loads((x / "config.toml").read_text()) for x in (whole[0], again))
    assert second == first | {"out": str(again), "steps": 2}
    code, said = here(["--config", again / "config.toml", "--steps", 3])
    assert (code, len(lines(again))) == (0, 3), said


def test_a_run_leaves_what_the_design_says(whole):
    out, printed = whole
    files = ("config.toml", "metrics.jsonl", "events.jsonl", "final.json", "loss.png", "run.json")
    assert {path.name for path in out.iterdir()} == {*files, "checkpoints", "ranks"}
    assert tomllib.loads((out / "config.toml").read_text())["row_length"] == 32
    assert column(out, "step") == list(range(1, 9))
    wanted = "step loss loss_hex grad_norm grad_norm_hex lr lr_hex tokens tokens_total batch_hash"
    wanted += " seconds tokens_per_second memory memory_peak memory_rank time documents padding"
    wanted += " documents_per_second trained_tokens_per_second"
    wanted += " seconds/data seconds/forward seconds/backward seconds/step seconds/log"
    assert {*wanted.split()} <= lines(out)[-1].keys()
    for line in lines(out):
        by_corpus = [line[name] for name in line if name.startswith("tokens/")]
        assert sum(by_corpus) == line["tokens_processed"]
        assert all(float.fromhex(line[f"{x}_hex"]) == line[x] for x in ("loss", "grad_norm", "lr"))
    assert lines(out)[-1]["tokens_total"] == sum(column(out, "tokens"))
    final = json.loads((out / "final.json").read_text())
    assert (final["step"], final["tokens_total"]) == (8, sum(column(out, "tokens")))
    assert re.fullmatch("[0-9a-f]{16}", final["state_hash"])
    names = sorted(path.name for path in (out / "checkpoints").iterdir())
    assert names == ["latest", "step_00000003", "step_00000006", "step_00000008"]
    assert [event["step"] for event in events(out, "evaluation")] == [4, 8]
    joined = sinks.read_metrics(out)
    assert [line["step"] for line in joined if "eval/loss" in line] == [4, 8]
    assert all(joined[i].items() >= line.items() for i, line in enumerate(lines(out)))
    counters = {"split_documents", "empty_documents", "eval/loss"}
    assert not counters & lines(out)[-1].keys()  # what never moves is no curve
    assert counters & events(out, "packing")[0].keys() == counters - {"eval/loss"}
    assert [event["step"] for event in events(out, "save")] == [3, 6, 8]
    samples = events(out, "sample")
    assert [event["step"] for event in samples] == [4, 8]
    assert all(event["text"] in printed for event in samples)
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert "step 8/8" in printed
    assert "def " in printed
    assert str(out) in printed


def kinds_of(text):
    """Return the lines that a run prints before its first step, without numbers and names."""
    head = text.replace("\n  ", " ").partition("step 1/")[0].splitlines()
    return {re.sub(r"[\d,.]+|(?<=reading ).*", "#", line) for line in head}


def test_the_tutorial_shows_every_line_that_a_run_begins_with(whole):
    page = (recipe_runs.RECIPES.parent / "docs/tutorial/first-run.md").read_text()
    sample = page.partition("$ python recipes/pretrain.py --steps 20")[2]
    assert kinds_of(whole[1]) - kinds_of(sample) == set()


def default_rate(step):
    """Return the rate of a step in all of these runs."""
    peak = load("pretrain").Config().optim.lr
    return schedules.warmup_stable_decay(peak, warmup=2, total=8, decay=0.4)(step)


def test_step_n_has_the_nth_rate_of_the_schedule(whole):
    assert column(whole[0], "lr") == [default_rate(step) for step in range(8)]


def test_one_text_file_and_a_field_of_json_lines_are_corpora_and_are_evaluated_on(tmp_path):
    (tmp_path / "input.txt").write_text("First Citizen: speak.\n\nAll: speak, speak.\n\n" * 60)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "b.jsonl").write_text('{"body": "a b c d e f g h i j k l m n o p"}\n' * 40)
    (tmp_path / "b" / "c.jsonl.gz").write_bytes(b"")
    data = ["--data", tmp_path / "input.txt", tmp_path / "b", "--field", "body"]
    out = tmp_path / "run"
    flags = ["--out", out, *data, "--steps", 2, *SMALL]
    code, said = here(flags)
    assert code == 0, said
    assert "b: 1 file of another kind is left out, such as c.jsonl.gz" in said
    (found,) = events(out, "evaluation")
    assert 30 < found["eval/tokens"] < 600
    counts = [event["held_out_documents"] for event in events(out, "packing")]
    assert min(counts) >= 1
    assert max(counts) <= 10


def test_the_loss_falls(whole):
    losses = column(whole[0], "loss")
    assert losses[-1] < losses[0] - 0.5


def test_run_again_it_is_complete_and_with_more_steps_it_goes_on(whole, text, tmp_path):
    out = tmp_path / "run"
    here(flags_of(out, text, 5))
    before = (out / "metrics.jsonl").read_text()
    assert "complete at step 5" in here(flags_of(out, text, 5))[1]
    assert (out / "metrics.jsonl").read_text() == before
    assert "resuming from" in here(flags_of(out, text, 8))[1]
    assert column(out, "loss_hex") == column(whole[0], "loss_hex")
    assert column(out, "batch_hash") == column(whole[0], "batch_hash")
    assert (out / "final.json").read_text() == (whole[0] / "final.json").read_text()


@pytest.mark.only_all  # torchrun: runtime/test_torchrun.py; what ranks print: test_layouts.py
def test_torchrun_on_two_ranks_prints_the_same_losses_once(text, tmp_path):
    for out, ranks in ((tmp_path / "alone", 1), (tmp_path / "both", 2)):
        printed = run("pretrain", *flags_of(out, text, 3), ranks=ranks)
        assert printed.count("step 3/3") == 1
    assert_equal_runs(tmp_path / "both", tmp_path / "alone")


def test_replicas_and_other_ranks_after_a_stop_give_the_same_losses(whole, text, tmp_path):
    replicas, more, fewer = (tmp_path / name for name in ("replicas", "more", "fewer"))
    here(flags_of(more, text, 1))
    runs = [
        flags_of(replicas, text, 2, "--dp-replicate", 2),
        flags_of(more, text, 2),
        flags_of(fewer, text, 1),
    ]
    for code, said in run_ranks(several, 2, runs, timeout=170)[0]:
        assert code == 0, said
    here(flags_of(fewer, text, 2))
    for out in (replicas, more, fewer):
        assert_equal_runs(out, whole[0], steps=2, about=out.name)


def test_generate_writes_text_from_the_last_checkpoint(whole):
    flags = ["--run", whole[0], "--prompt", "word3", "--tokens", 20]
    code, printed = here(flags, "generate")
    assert (code, printed.startswith("word3")) == (0, True), printed
    assert len(printed) > len("word3\n")


def test_no_token_is_drawn_that_only_rounds_the_vocabulary_up(whole, text, tmp_path, monkeypatch):
    seen = []

    def generate(*_, vocab_size, **__):
        seen.append(vocab_size)
        return [Completion([], "", "length")]

    monkeypatch.setattr("trainkit.post.generation.completions.generate", generate)
    monkeypatch.setattr("trainkit.post.generation.generate", generate)
    here(flags_of(tmp_path / "one", text, 1))
    here(["--run", whole[0]], "generate")
    facts = json.loads(next((whole[0] / "checkpoints").glob("*/state.json")).read_text())["facts"]
    assert facts["model"]["vocab_size"] == 272
    assert seen == [271, 271]


def interrupted(flags, until):
    """Run a recipe in a process that gets an interrupt when a file is there."""

    def interrupt():
        while not until.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    return here(flags)


def test_an_interrupt_saves_and_ends_with_75(text, tmp_path):
    first = tmp_path / "checkpoints/step_00000003"
    ((code, out),) = run_ranks(interrupted, 1, flags_of(tmp_path, text, 5000), first)
    assert code == 75, out
    last = column(tmp_path, "step")[-1]
    assert f"stopped after step {last} (SIGINT on rank 0)" in out
    assert verify_checkpoint(tmp_path / "checkpoints" / f"step_{last:08d}") == []


# ---------------------------------------------------------------- bad input


def binary(folder):
    (folder / "a.txt").write_bytes(b"\x00\x01\xff")


def truncated(folder):
    import trainkit as tk

    tk.write_corpus(folder / "c.tokens", [[1, 2, 3]] * 1000, vocab_size=259)
    data = (folder / "c.tokens").read_bytes()
    (folder / "c.tokens").write_bytes(data[:-100])


def bad_json(folder):
    (folder / "c.jsonl").write_text('{"text": "fine"}\n{"text": 3}\n')


def nothing(folder):
    del folder


BAD_DATA = {
    "missing": (nothing, "nowhere", "nowhere"),
    "empty": (nothing, "", "no documents"),
    "binary": (binary, "", "a.txt"),
    "truncated": (truncated, "c.tokens", "c.tokens"),
    "json": (bad_json, "c.jsonl", "2"),
}


@pytest.mark.parametrize("name", BAD_DATA)
def test_bad_data_is_refused_by_name_before_the_first_step(name, tmp_path):
    make, path, named = BAD_DATA[name]
    folder = tmp_path / "data"
    folder.mkdir()
    make(folder)
    code, what = refusal("pretrain", "--out", tmp_path / "run", "--data", folder / path)
    assert (code, named in what) == (65, True), what
    assert not (tmp_path / "run/metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("flags", "code", "named"),
    [
        (["--row-length", "0"], 64, "row"),
        (["--steps", "-1"], 64, "steps"),
        (["--lr", "nan"], 64, "lr"),
        (["--stesp", "3"], 64, "--steps"),
        (["--size", "tiney"], 64, "'tiny'"),
        (["--rows", "100000"], 64, "100000 rows"),
        (["--tp", "2"], 64, "multiply to 2"),
        (["--pp", "0"], 64, "pp"),
        (["--config", "nowhere.toml"], 64, "nowhere.toml"),
        (["--resume", "nowhere"], 66, "nowhere"),
    ],
    ids=str,
)
def test_bad_flags_are_refused_in_one_line(flags, code, named, text, tmp_path):
    found, what = refusal("pretrain", "--out", tmp_path / "run", "--data", text, *flags)
    assert (found, named in what) == (code, True), what
    metrics = tmp_path / "run/metrics.jsonl"
    assert not metrics.exists() or metrics.read_bytes() == b""


def test_an_output_directory_that_is_a_file_or_cannot_be_made_is_refused(text, tmp_path):
    (tmp_path / "file").write_text("")
    assert refusal("pretrain", "--out", tmp_path / "file", "--data", text)[0] == 64
    code, what = refusal("pretrain", "--out", "/proc/nowhere/run", "--data", text)
    assert (code, "/proc/nowhere" in what) == (74, True)


def test_a_changed_configuration_does_not_go_on_silently(text, tmp_path):
    here(flags_of(tmp_path, text, 3))
    code, what = refusal("pretrain", *flags_of(tmp_path, text, 5, "--lr", 0.5, "--seed", 7))
    assert code == 66
    assert "its config.lr is 0.004, the run's is 0.5" in what
    assert "its config.seed is 0, the run's is 7" in what


def test_data_that_changed_does_not_go_on_silently(text, tmp_path):
    folder = tmp_path / "text"
    shutil.copytree(text, folder)
    out = tmp_path / "run"
    here(flags_of(out, folder, 3))
    (folder / "7.txt").write_text("something else")
    code, what = refusal("pretrain", *flags_of(out, folder, 5))
    assert code == 66
    assert "files: 7.txt was changed" in what
    assert "fingerprint of text" in what


def test_a_corpus_may_move_and_a_plan_of_rows_may_not_change(text, tmp_path, monkeypatch):
    here(flags_of(tmp_path / "run", text, 2))
    moved = shutil.copytree(text, tmp_path / "elsewhere" / text.name)
    here(flags_of(tmp_path / "run", moved, 4))
    assert column(tmp_path / "run", "step") == [1, 2, 3, 4]

    def other_rows(_, lengths, capacity, **__):
        return pack_bins(lengths, capacity, fit=next_fit)

    monkeypatch.setattr("trainkit.data.packed.load_or_pack_bins", other_rows)
    code, what = refusal("pretrain", *flags_of(tmp_path / "run", text, 5))
    assert (code, "its rows is " in what) == (66, True), what


def test_a_run_begun_afresh_never_goes_back(text, tmp_path):
    here(flags_of(tmp_path, text, 3))
    here(flags_of(tmp_path, text, 1, "--lr", 0.1, "--resume", "never"))
    here(flags_of(tmp_path, text, 2, "--lr", 0.1))
    assert column(tmp_path, "step") == [1, 2]
    assert json.loads((tmp_path / "final.json").read_text())["step"] == 2


def test_when_no_checkpoint_verifies_it_does_not_start_afresh(text, tmp_path):
    here(flags_of(tmp_path, text, 3))
    (tmp_path / "checkpoints/step_00000003/state.json").write_text("{}")
    code, what = refusal("pretrain", *flags_of(tmp_path, text, 5))
    assert (code, "none of the 1 checkpoints" in what) == (66, True)


@pytest.mark.case("G4")
def test_more_ranks_than_rows_are_refused(text, tmp_path):
    for code, err in run_ranks(here, 2, flags_of(tmp_path, text, 2, "--rows", 1)):
        assert code == 64
        assert re.search(r"1 rows?.* 2 ranks|2 ranks.* 1 row", error_of(err)["what"])


def on_a_small_disk(flags):
    """Run a recipe in a process that may write no file beyond 300,000 bytes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))
    return here(flags)


def test_a_disk_that_takes_no_more_ends_with_its_code_and_leaves_no_half(text, tmp_path):
    ((code, err),) = run_ranks(on_a_small_disk, 1, flags_of(tmp_path, text, 8))
    assert (code, "cannot write" in error_of(err)["what"]) == (74, True), err
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_generate_refuses_a_way_to_choose_before_it_looks_for_a_model(tmp_path):
    code, what = refusal("generate", "--run", tmp_path, "--top-p", 1.5)
    assert (code, "top_p must be above 0" in what) == (64, True), what


def test_generate_without_a_run_says_so(tmp_path):
    code, what = refusal("generate", "--run", tmp_path)
    assert (code, "no checkpoint" in what) == (66, True)


def test_help_explains_every_field(capsys):
    others = ("long_context", "moe", "evaluate", "generate", "mixture", "reinforce")
    for name in ("pretrain", "finetune", "preference", "distill", *others):
        module = load(name)
        with pytest.raises(SystemExit) as end:
            module.main(["--help"])
        assert not end.value.code
        said = capsys.readouterr().out
        for field in config.config_to_dict(module.Config()):
            assert f"--{field.replace('_', '-')}" in said


def test_a_corpus_that_is_named_twice_is_refused(text, tmp_path):
    code, what = refusal("pretrain", "--out", tmp_path, "--data", text, text, *SMALL)
    assert (code, "names a corpus twice" in what) == (64, True), what
