"""recipes/preference.py: chosen answers gain on rejected ones, in any layout, stopped or not."""

import contextlib
import json
import shutil

import attrs
import numpy as np
import pytest
import torch
from recipe_runs import (
    assert_equal_runs,
    column,
    events,
    here,
    lines,
    nano_config,
    refusal,
    several,
)

from trainkit import models, optim
from trainkit.batch import batch_from_rows
from trainkit.mesh import solo_parallel
from trainkit.text.corpora import open_tokens
from trainkit.text.tokenizers import open_tokenizer
from trainkit.tools.testing import run_ranks
from trainkit.types import TrainState
from trainkit.weights.checkpoint import find_checkpoint, save_checkpoint

FLAGS = "--row-length 192 --rows 4 --microbatch 2 --warmup 1 --schedule-steps 8 --lr 1e-3"
SIZE = models.pad_vocab_size(open_tokenizer("bytes").vocab_size)
CONFIG = nano_config("tiny", layers=2, vocab_size=SIZE)


def pair(number):
    chosen, rejected = f"{number + 1}, as you know.", "I will not say that."
    return {"prompt": f"{number} + 1?", "chosen": chosen, "rejected": rejected}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Return a folder with 60 pairs and one that is too long, and the weights to begin with."""
    home = tmp_path_factory.mktemp("preference")
    records = [*map(pair, range(60)), pair(7) | {"chosen": "7 + 1 is 8. " * 20}]
    (home / "pairs.jsonl").write_text("\n".join(map(json.dumps, records)))
    model = models.build_decoder(CONFIG, seed=5)
    facts = {"model": attrs.asdict(CONFIG), "config.tokenizer": "bytes", "config.row_length": 192}
    optimizer = optim.adamw(model.parameters(), lr=1.0)
    save_checkpoint(home / "base", TrainState(), [model], optimizer, solo_parallel(), facts=facts)
    return home


@pytest.fixture(scope="module")
def flags_of(home):
    """Return `flags(out, steps, *more)`, of a short run; of a flag given twice the last counts."""

    def flags(out, steps, *more):
        given = ["--init", home / "base", "--data", home / "pairs.jsonl", "--out", out]
        return [*given, "--steps", steps, "--save-every", 2, *FLAGS.split(), *more]

    return flags


@pytest.fixture(scope="module")
def half(flags_of, tmp_path_factory):
    """Return the directory of a run of 2 steps."""
    out = tmp_path_factory.mktemp("half") / "run"
    code, said = here(flags_of(out, 2, "--eval-every", 0), "preference")
    assert code == 0, said
    return out


@pytest.fixture(scope="module")
def whole(flags_of, tmp_path_factory):
    """Return the directory of a run of 4 steps, and what it printed."""
    out = tmp_path_factory.mktemp("whole") / "run"
    code, said = here(flags_of(out, 4), "preference")
    assert code == 0, said
    return out, said


def test_chosen_answers_gain_on_rejected_ones_from_the_start_on(whole):
    first, *_, last = lines(whole[0])
    assert first["loss"] == pytest.approx(np.log(2), abs=1e-5)  # the model is its own reference
    assert abs(first["margin"]) < 1e-4 < last["margin"]
    assert last["loss"] < first["loss"]
    results = {event["metric"]: event for event in events(whole[0], "result")}
    assert results.keys() == {"eval/loss", "eval/margin"}
    assert results["eval/margin"]["after"] > results["eval/margin"]["before"]
    assert first["pairs"] > 0
    assert "1 of 61 pairs are longer than 192 tokens" in whole[1]


def test_held_out_pairs_are_measured_by_the_loss_that_is_trained_and_its_reference(whole):
    before, after = events(whole[0], "evaluation")
    assert before["eval/loss"] == pytest.approx(np.log(2), abs=1e-5)
    for name in ("margin", "chosen_reward", "rejected_reward"):
        assert abs(before[f"eval/{name}"]) < 1e-4, name
    assert after["eval/loss"] < before["eval/loss"]
    margin = after["eval/chosen_reward"] - after["eval/rejected_reward"]
    assert after["eval/margin"] == pytest.approx(margin, abs=1e-6)
    assert f"held out: {after['eval/loss']:.4f} per pair, {after['eval/pairs']} pairs" in whole[1]


def test_the_reference_is_what_the_first_weights_say_of_each_answer(whole):
    corpus, model = open_tokens(whole[0] / "reference.tokens"), models.build_decoder(CONFIG, seed=5)
    begin, end = corpus.offsets[6:8]
    ids = torch.from_numpy(corpus.tokens[begin:end].astype(np.int64))
    with torch.no_grad():
        batch = batch_from_rows(ids[None])
        logits = model(batch.input_ids, position_ids=batch.position_ids, spans=batch.spans)
    wanted = logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0].numpy()
    found = corpus.values["reference_logprobs"][begin + 1 : end]
    assert np.count_nonzero(wanted) > 10
    assert found == pytest.approx(wanted, rel=1e-4)


def test_stopped_it_goes_on_to_the_same_bits_by_the_reference_that_it_began_with(
    whole, half, home, flags_of, tmp_path
):
    out = shutil.copytree(half, tmp_path / "run")
    moved = shutil.copytree(home / "base", tmp_path / "moved")
    code, said = here(flags_of(out, 4, "--init", moved), "preference")
    assert code == 0, said
    for name in ("loss_hex", "batch_hash"):
        assert column(out, name) == column(whole[0], name)
    (out / "reference.tokens").unlink()
    code, what = refusal("preference", *flags_of(out, 5))
    assert (code, "reference.tokens" in what) == (65, True), what
    again = here(flags_of(out, 1, "--resume", "never", "--eval-every", 0), "preference")
    assert again[0] == 0, again[1]
    assert column(out, "loss_hex") == column(whole[0], "loss_hex")[:1]


def assert_goes_on_in(layouts, whole, half, flags_of, folder, *, fresh):
    """Go on with half a run in each layout beside fresh ones, and compare it with a whole one."""
    outs = [shutil.copytree(half, folder / name) for name in layouts]
    runs = [
        flags_of(out, 4, *layout.split())
        for out, layout in zip(outs, layouts.values(), strict=True)
    ]
    for code, said in run_ranks(several, 2, [*runs, *fresh], "preference")[0]:
        assert code == 0, said
    for out in outs:
        assert_equal_runs(out, whole[0], about=out.name)
        found, wanted = (events(run, "evaluation")[-1] for run in (out, whole[0]))
        assert found["eval/margin"] == pytest.approx(wanted["eval/margin"], rel=1e-4), out.name


@pytest.mark.only_all  # a ring is that of KTO below
def test_it_goes_on_over_a_ring_and_over_data(whole, half, flags_of, tmp_path):
    layouts = {"ring": "--ring 2 --fold-sp none", "data": ""}
    assert_goes_on_in(layouts, whole, half, flags_of, tmp_path, fresh=[])


def test_every_layout_prints_the_same_losses(whole, half, flags_of, tmp_path):
    short = ["--eval-every", 0]
    fresh = [
        flags_of(tmp_path / "tp", 2, "--tp", 2, *short),
        flags_of(tmp_path / "kto ring", 2, "--loss", "kto", "--ring", 2, "--fold-sp", "none"),
    ]
    assert_goes_on_in({"pp": "--pp 2"}, whole, half, flags_of, tmp_path, fresh=fresh)
    for steps, more in ((1, short), (2, [])):  # stopped in between, and begun without eval
        code, said = here(flags_of(tmp_path / "kto", steps, "--loss", "kto", *more), "preference")
        assert code == 0, said
    (before, ring), (solo,) = (events(tmp_path / x, "evaluation") for x in ("kto ring", "kto"))
    assert before["eval/loss"] == pytest.approx(0.5, abs=1e-5)
    assert ring["eval/answers"] == 2 * events(whole[0], "evaluation")[0]["eval/pairs"]
    for name in ("loss", "answers", "desirable_reward", "undesirable_reward"):
        assert ring[f"eval/{name}"] == pytest.approx(solo[f"eval/{name}"], rel=1e-4), name
    # A reference of another layout differs by the last bits, and so do the hashes of batches.
    for run, wanted in (("tp", whole[0]), ("kto ring", tmp_path / "kto")):
        for name in ("loss", "grad_norm"):
            found = column(tmp_path / run, name)
            assert found == pytest.approx(column(wanted, name)[:2], rel=1e-4), (run, name)


@pytest.mark.parametrize(
    ("loss", "first"),
    [
        ("ipo", 25.0),
        pytest.param("simpo", None, marks=pytest.mark.only_all),  # without a reference as ORPO
        ("orpo", None),
        pytest.param("kto", 0.5, marks=pytest.mark.only_all),  # it is run in a layout above
    ],
)
def test_other_losses_begin_as_they_must(loss, first, flags_of, tmp_path):
    flags = flags_of(tmp_path, 1, "--loss", loss)
    code, said = here(flags, "preference")
    assert code == 0, said
    (line,), (before, _) = lines(tmp_path), events(tmp_path, "evaluation")
    for found in (line["loss"], before["eval/loss"]):
        assert first is None or found == pytest.approx(first, rel=1e-4)
    # Means over other pairs, of the same quantity.
    assert before["eval/loss"] == pytest.approx(line["loss"], rel=0.5)
    assert (tmp_path / "reference.tokens").exists() == (loss in ("ipo", "kto"))
    assert find_checkpoint(tmp_path)
    code, what = refusal("preference", *flags, "--steps", 2, "--beta", 0.5)
    assert (code, "beta" in what) == (66, True), what


@pytest.mark.parametrize(
    ("record", "named"),
    [
        ({"prompt": "hi", "chosen": "a"}, "rejected"),
        (pair(1) | {"rejected": pair(1)["chosen"]}, "same"),
    ],
    ids=str,
)
def test_records_that_are_no_pairs_are_named(record, named, flags_of, tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(map(json.dumps, (pair(1), record))))
    code, what = refusal("preference", *flags_of(tmp_path / "run", 2, "--data", path))
    assert (code, named in what, "pairs.jsonl: line 2" in what) == (65, True, True), what


@pytest.mark.parametrize(
    ("flags", "wanted", "named"),
    [
        (["--data", "long.jsonl"], 64, "there is no row to train on; use more documents, or"),
        (["--row-length", 30], 64, "set row_length to 32"),
        (["--init", "nowhere"], 66, "there is no folder nowhere"),
        (["--template", "chatmal"], 64, "take chatml, "),
    ],
    ids=str,
)
def test_a_mistake_is_told_with_what_to_do(flags, wanted, named, flags_of, tmp_path):
    (tmp_path / "long.jsonl").write_text(json.dumps(pair(1) | {"chosen": "2, " * 99}))
    with contextlib.chdir(tmp_path):
        code, what = refusal("preference", *flags_of(tmp_path / "run", 2, *flags))
    assert (code, named in what) == (wanted, True), what


def test_lines_without_text_are_refused_as_long_documents(tmp_path):
    (tmp_path / "pairs.jsonl").write_text(json.dumps(pair(1)))
    flags = ["--data", tmp_path / "pairs.jsonl", "--out", tmp_path / "run", "--steps", 1]
    code, what = refusal("long_context", *flags)
    assert (code, "there is no field 'text'; found prompt, chosen" in what) == (65, True), what
