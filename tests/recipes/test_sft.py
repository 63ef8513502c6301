"""recipes/sft.py: it learns the assistant's words, resumes, and begins with a pretrained model."""

import json
import shutil
import time

import pytest
import recipe_runs
from recipe_runs import assert_equal_runs, column, events, here, lines, load, refusal, several

from trainkit import metrics, schedules
from trainkit.__main__ import main
from trainkit.corpora import write_corpus
from trainkit.testing import run_ranks
from trainkit.tokenizers import save_tokenizer, train_bpe

SMALL = [*recipe_runs.SMALL.split(), "--save-every", 2, "--ask", "def is_open(self)"]


DEVICE = 0.05  # seconds for which the device still works on a step that Python is done with


def conversation(number):
    question, answer = f"{number} + 1?", f"{number + 1}, as you know."
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    """Return a file of 60 short conversations and a long one."""
    path = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    records = [conversation(number) for number in range(60)]
    records.append([*conversation(7), *[m for i in range(30) for m in conversation(i)]])
    path.write_text("\n".join(json.dumps({"messages": messages}) for messages in records))
    return path


def flags_of(out, chats, steps, *flags):
    given = ["--out", out, "--data", chats, "--steps", steps, *SMALL, "--row-length", 64]
    return [*given, *flags]


@pytest.fixture(scope="module")
def whole(chats, tmp_path_factory):
    """Return the directory of a run of 4 steps on a slow device, and what it printed."""
    out = tmp_path_factory.mktemp("whole") / "run"
    fetch = metrics.to_host

    def when_done(values):
        time.sleep(DEVICE)
        return fetch(values)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metrics, "to_host", when_done)
        code, printed = here(flags_of(out, chats, 4), "sft")
    assert code == 0, printed
    return out, printed


def test_only_what_the_assistant_says_is_trained_on(whole):
    # "7 + 1?" is answered by "8, as you know." and <|im_end|>: 16 tokens, 17 with two digits.
    (report,) = events(whole[0], "packing")
    for row in lines(whole[0]):
        assert 0 < row["tokens"] < report["tokens"] / report["rows"] * 4
        assert row["tokens"] <= 17 * 2 * 4


def test_the_speed_is_that_of_all_tokens_and_of_the_device(whole):
    for row in lines(whole[0]):
        assert row["tokens"] < row["tokens_processed"] <= 4 * 64
        assert row["seconds"] >= DEVICE
        assert row["tokens_per_second"] == row["tokens_processed"] / row["seconds"]


def test_step_n_has_the_nth_rate_of_the_schedule(whole):
    rate = schedules.cosine(load("sft").Config().optim.lr, warmup=2, total=8)
    assert column(whole[0], "lr") == [rate(step) for step in range(4)]


def test_what_was_cut_is_counted(whole):
    (report,) = events(whole[0], "packing")
    assert report["conversations"] == 61
    assert (report["truncated"], report["turns_lost"] > 0, report["dropped"]) == (1, True, 0)
    told = "warning: 1 of 61 conversations are longer than 64 tokens: 2 % (1 cut, 0 dropped)\n"
    assert told in whole[1]
    assert "truncated" not in lines(whole[0])[-1]


def test_it_answers_at_the_end(whole):
    assert "def is_open(self)" in whole[1]


def test_generate_asks_it_and_shows_the_answer_alone(whole):
    code, printed = here(["--run", whole[0], "--prompt", "3 + 1?", "--tokens", 8], "generate")
    assert code == 0, printed
    assert "3 + 1?" not in printed
    assert "assistant" not in printed


def test_stopped_it_goes_on_to_the_same_bits(whole, chats, tmp_path):
    here(flags_of(tmp_path, chats, 2), "sft")
    here(flags_of(tmp_path, chats, 4), "sft")
    assert column(tmp_path, "loss_hex") == column(whole[0], "loss_hex")
    assert (tmp_path / "final.json").read_text() == (whole[0] / "final.json").read_text()


@pytest.mark.parametrize(
    ("world", "layouts"),
    [
        (2, ["", "--pp 2", "--ring 2 --fold-sp none"]),
        pytest.param(4, ["--ring 2 --tp 2 --fold-sp none"], marks=pytest.mark.only_all),
    ],
)
def test_every_layout_prints_the_same_losses(world, layouts, whole, chats, tmp_path):
    outs = [tmp_path / str(number) for number in range(len(layouts))]
    runs = [
        flags_of(out, chats, 4, *layout.split()) for out, layout in zip(outs, layouts, strict=True)
    ]
    for (code, printed), out in zip(run_ranks(several, world, runs, "sft")[0], outs, strict=True):
        assert code == 0, printed
        assert_equal_runs(out, whole[0])


def test_it_begins_with_the_weights_of_a_pretrained_model(chats, tmp_path):
    (tmp_path / "text").mkdir()
    for number in range(20):
        text = "\n".join(f"{i} + 1 is {i + 1}, as you know." for i in range(number, number + 9))
        (tmp_path / f"text/{number}.txt").write_text(text)
    pretrained = tmp_path / "pretrained"
    flags = ["--out", pretrained, "--data", tmp_path / "text", "--steps", 8]
    here([*flags, *recipe_runs.SMALL.split()])
    here(flags_of(tmp_path / "warm", chats, 1, "--init", pretrained), "sft")
    here(flags_of(tmp_path / "cold", chats, 1), "sft")
    assert column(tmp_path / "warm", "batch_hash") == column(tmp_path / "cold", "batch_hash")
    assert column(tmp_path / "warm", "loss")[0] < column(tmp_path / "cold", "loss")[0] - 1
    pretrained.rename(tmp_path / "moved")
    here(flags_of(tmp_path / "warm", chats, 2, "--init", pretrained), "sft")
    assert column(tmp_path / "warm", "step") == [1, 2]


@pytest.mark.parametrize(
    ("record", "named"),
    [
        ({"text": "hi"}, "messages"),
        ({"messages": [{"role": "user", "content": "hi"}]}, "line 2"),
        ({"messages": [{"role": "oracle", "content": "hi"}]}, "oracle"),
        ({"messages": "hi"}, "line 2"),
    ],
    ids=str,
)
def test_conversations_that_are_none_are_named(record, named, tmp_path):
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join(json.dumps(x) for x in ({"messages": conversation(1)}, record)))
    code, what = refusal("sft", *flags_of(tmp_path / "run", path, 2))
    assert (code, named in what, "chats.jsonl" in what) == (65, True, True), what


def test_a_template_that_the_tokenizer_does_not_know_is_refused(chats, tmp_path):
    path = tmp_path / "tokenizer.json"
    save_tokenizer(train_bpe(["2 + 1? 3, as you know."], vocab_size=260), path)
    code, what = refusal("sft", *flags_of(tmp_path / "run", chats, 2, "--tokenizer", path))
    assert (code, "<|im_end|>" in what) == (64, True), what


def test_tokens_that_do_not_say_who_said_them_are_refused(tmp_path):
    write_corpus(tmp_path / "c.tokens", [[1, 2, 3]] * 50, vocab_size=259)
    code, what = refusal("sft", *flags_of(tmp_path / "run", tmp_path / "c.tokens", 2))
    assert (code, "c.tokens" in what, "prepare --messages" in what) == (65, True, True), what


def test_weights_of_nowhere_are_refused(chats, tmp_path):
    flags = flags_of(tmp_path / "run", chats, 2, "--init", tmp_path / "nowhere")
    code, what = refusal("sft", *flags)
    assert (code, "nowhere" in what) == (66, True), what


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a pretrained run and a Hugging Face folder of it."""
    home = tmp_path_factory.mktemp("folder")
    (home / "text").mkdir()
    for number in range(20):
        text = "\n".join(f"{i} + 1 is {i + 1}, as you know." for i in range(number, number + 9))
        (home / f"text/{number}.txt").write_text(text)
    flags = ["--out", home / "run", "--data", home / "text", "--steps", 8]
    code, said = here([*flags, *recipe_runs.SMALL.split()])
    assert code == 0, said
    assert main(["export", str(home / "run"), str(home / "model"), "--shard-bytes", "1000000"]) == 0
    return home


def test_it_begins_with_a_hugging_face_folder_and_its_tokenizer(folder, chats, tmp_path):
    own = shutil.copytree(folder / "model", tmp_path / "own")
    for name, init in (("run", folder / "run"), ("model", own)):
        code, said = here(flags_of(tmp_path / name, chats, 2, "--init", init), "sft")
        assert code == 0, said
    assert f"beginning with the weights of {own}" in said
    for name in ("loss_hex", "batch_hash"):
        assert column(tmp_path / "model", name) == column(tmp_path / "run", name)
    for file in own.glob("*.safetensors*"):  # what goes on reads no weights of it
        file.unlink()
    code, said = here(flags_of(tmp_path / "model", chats, 3, "--init", own), "sft")
    assert (code, column(tmp_path / "model", "step")) == (0, [1, 2, 3]), said


@pytest.mark.parametrize("layout", ["", "--tp 2", "--pp 2"])
def test_pretraining_goes_on_from_a_hugging_face_folder_in_any_layout(folder, tmp_path, layout):
    flags = ["--out", tmp_path, "--data", folder / "text", "--steps", 1, "--init", folder / "model"]
    run = [*flags, *recipe_runs.SMALL.split(), *layout.split()]
    for code, said in run_ranks(several, 2, [run])[0]:
        assert code == 0, said
    assert column(tmp_path, "loss")[0] < column(folder / "run", "loss")[0] - 1


@pytest.mark.parametrize("recipe", ["sft", "pretrain"])
def test_a_folder_that_cannot_be_trained_is_refused_before_anything_is_opened(
    folder, chats, tmp_path, recipe
):
    own = shutil.copytree(folder / "model", tmp_path / "own")
    values = json.loads((own / "config.json").read_text())
    (own / "config.json").write_text(json.dumps(values | {"auto_map": {"AutoModel": "x.Y"}}))
    flags = flags_of(tmp_path / "run", chats, 2, "--init", own)
    flags = [flag for flag in flags if recipe == "sft" or flag not in SMALL[-2:]]
    code, what = refusal(recipe, *flags)
    assert (code, "auto_map" in what, (tmp_path / "run").exists()) == (64, True, False), what
    (own / "config.json").write_text(json.dumps(values | {"vocab_size": 260}))
    code, what = refusal(recipe, *flags)
    assert (code, "the tokenizer has 271 ids" in what) == (64, True), what
