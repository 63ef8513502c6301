"""recipes/finetune.py: it goes on from a run or a folder, on the assistant's words, and resumes."""

import functools
import json
import shutil
import time

import pytest
import recipe_runs
import torch
from recipe_runs import assert_equal_runs, column, events, here, lines, refusal, several
from transformers import AutoTokenizer
from weights.hub.test_export_command import saved_run

from trainkit import adapters, chat, hub, schedules
from trainkit.__main__ import main
from trainkit.batch import batch_from_rows
from trainkit.mesh import solo_parallel
from trainkit.metrics import steps as step_metrics
from trainkit.models import Decoder, Experts, make_decoder_config
from trainkit.post.adapters.frozen import can_shard_bytes
from trainkit.text.corpora import write_corpus
from trainkit.text.tokenizers import open_tokenizer, save_tokenizer, train_bpe
from trainkit.tools.testing import run_ranks
from trainkit.weights.checkpoint import find_checkpoint

SMALL = [*recipe_runs.SMALL.split(), "--save-every", 2, "--ask", "def is_open(self)"]
LR = 5e-4  # at a high rate Adam's first steps make much of the last bit of a gradient


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


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Return a folder with a pretrained run, and a Hugging Face folder of it."""
    home = tmp_path_factory.mktemp("base")
    (home / "text").mkdir()
    for number in range(20):
        text = "\n".join(f"{i} + 1 is {i + 1}, as you know." for i in range(number, number + 9))
        (home / f"text/{number}.txt").write_text(text)
    flags = ["--out", home / "run", "--data", home / "text", "--steps", 8]
    code, said = here([*flags, *recipe_runs.SMALL.split(), "--sample", 1])
    assert code == 0, said
    assert main(["export", str(home / "run"), str(home / "model"), "--shard-bytes", "1000000"]) == 0
    return home


@pytest.fixture(scope="module")
def flags_of(base, chats):
    """Return `flags(out, steps, *more)`, of a short run; of a flag given twice the last counts."""

    def flags(out, steps, *more):
        given = ["--init", base / "run", "--data", chats, "--out", out, "--steps", steps]
        return [*given, *SMALL, "--row-length", 64, "--lr", LR, *more]

    return flags


@pytest.fixture(scope="module")
def whole(flags_of, tmp_path_factory):
    """Return the directory of a run of 4 steps on a slow device, and what it printed."""
    out = tmp_path_factory.mktemp("whole") / "run"
    fetch = step_metrics._read_values

    def when_done(values):
        time.sleep(DEVICE)
        return fetch(values)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_metrics, "_read_values", when_done)
        code, printed = here(flags_of(out, 4), "finetune")
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
    rate = schedules.cosine(LR, warmup=2, total=8)
    assert column(whole[0], "lr") == [rate(step) for step in range(4)]


def test_what_was_cut_is_counted(whole):
    (report,) = events(whole[0], "packing")
    assert report["conversations"] == 61
    assert (report["truncated"], report["turns_lost"] > 0, report["dropped"]) == (1, True, 0)
    told = "warning: 1 of 61 conversations are longer than 64 tokens: 2 % (1 cut, 0 dropped)\n"
    assert told in whole[1]
    assert "truncated" not in lines(whole[0])[-1]


def test_it_answers_at_the_end_and_says_what_it_has_learned(whole):
    assert "def is_open(self)" in whole[1]
    (result,) = events(whole[0], "result")
    found = [event["eval/loss"] for event in events(whole[0], "evaluation")]
    assert result["metric"] == "eval/loss"
    assert (result["before"], result["after"]) == (found[0], found[-1])
    assert result["after"] < result["before"]


def test_generate_asks_it_and_shows_the_answer_alone(whole):
    code, printed = here(["--run", whole[0], "--prompt", "3 + 1?", "--tokens", 8], "generate")
    assert code == 0, printed
    assert "3 + 1?" not in printed
    assert "assistant" not in printed


def test_an_exported_run_is_asked_in_its_template_here_and_in_transformers(whole, tmp_path):
    folder, asked = tmp_path / "model", [{"role": "user", "content": "def is_open(self)"}]
    assert main(["export", str(whole[0]), str(folder)]) == 0
    theirs = AutoTokenizer.from_pretrained(folder)
    ids = theirs.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
    ours = chat.encode_prompt(asked, open_tokenizer("bytes"), template=chat.chatml)
    assert list(ids) == list(ours)
    flags = ["--prompt", "def is_open(self)", "3 + 1?", "--tokens", 20, "--temperature", 0]
    said = [here(["--run", run, *flags, "--stop", "z"], "generate") for run in (whole[0], folder)]
    assert said[0] == said[1]
    streamed = here(["--run", folder, *flags[:2], *flags[3:]], "generate")[1]
    assert streamed.strip()
    assert said[1][1].startswith(streamed.strip())
    code, what = refusal("generate", "--run", folder, "--stop", "")
    assert (code, "stop" in what) == (64, True), what


def test_stopped_it_goes_on_to_the_same_bits_wherever_its_base_has_gone(
    whole, base, flags_of, tmp_path
):
    moved = shutil.copytree(base / "run", tmp_path / "base")
    here(flags_of(tmp_path / "run", 2, "--init", moved), "finetune")
    shutil.rmtree(moved)
    here(flags_of(tmp_path / "run", 4, "--init", moved), "finetune")
    assert column(tmp_path / "run", "loss_hex") == column(whole[0], "loss_hex")
    assert (tmp_path / "run/final.json").read_text() == (whole[0] / "final.json").read_text()
    assert len(events(tmp_path / "run", "result")) == 2  # of the first two steps, and of all
    assert events(tmp_path / "run", "result")[1] == pytest.approx(events(whole[0], "result")[0])


@pytest.mark.parametrize(
    ("world", "layouts"),
    [
        (2, ["--pp 2", "--ring 2 --fold-sp none --eval-every 0"]),
        pytest.param(2, ["--eval-every 0"], marks=pytest.mark.only_all),
        pytest.param(4, ["--ring 2 --tp 2 --fold-sp none"], marks=pytest.mark.only_all),
    ],
)
def test_every_layout_prints_the_same_losses(world, layouts, whole, flags_of, tmp_path):
    outs = [tmp_path / str(number) for number in range(len(layouts))]
    runs = [flags_of(out, 2, *layout.split()) for out, layout in zip(outs, layouts, strict=True)]
    ended = run_ranks(several, world, runs, "finetune")[0]
    for (code, printed), out in zip(ended, outs, strict=True):
        assert code == 0, printed
        assert_equal_runs(out, whole[0], steps=2)


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
def test_conversations_that_are_none_are_named(record, named, flags_of, tmp_path):
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join(json.dumps(x) for x in ({"messages": conversation(1)}, record)))
    code, what = refusal("finetune", *flags_of(tmp_path / "run", 2, "--data", path))
    assert (code, named in what, "chats.jsonl" in what) == (65, True, True), what


def test_another_tokenizer_than_that_of_the_base_is_refused(flags_of, tmp_path):
    path = tmp_path / "tokenizer.json"
    save_tokenizer(train_bpe(["2 + 1? 3, as you know."], vocab_size=260), path)
    flags = flags_of(tmp_path / "run", 2, "--tokenizer", path)
    code, what = refusal("finetune", *flags)
    assert (code, "another tokenizer" in what, (tmp_path / "run").exists()) == (66, True, False)


def test_a_template_that_there_is_not_is_refused(flags_of, tmp_path):
    code, what = refusal("finetune", *flags_of(tmp_path / "run", 2, "--template", "chatmal"))
    assert (code, "chatmal" in what, (tmp_path / "run").exists()) == (64, True, False), what


def test_tokens_that_do_not_say_who_said_them_are_refused(flags_of, tmp_path):
    write_corpus(tmp_path / "c.tokens", [[1, 2, 3]] * 50, vocab_size=259)
    flags = flags_of(tmp_path / "run", 2, "--data", tmp_path / "c.tokens")
    code, what = refusal("finetune", *flags)
    assert (code, "c.tokens" in what, "prepare --messages" in what) == (65, True, True), what


def test_tokens_of_another_template_are_refused(base, chats, flags_of, tmp_path):
    tokens = tmp_path / "c.tokens"
    said = ["prepare", chats, "--out", tokens, "--messages", "--template", "qwen3"]
    assert main([str(word) for word in said]) == 0
    code, what = refusal("finetune", *flags_of(tmp_path / "run", 2, "--data", tokens))
    assert (code, "the template qwen3" in what, "model's is chatml" in what) == (65, True, True)
    own = shutil.copytree(base / "model", tmp_path / "own")
    (own / "chat_template.jinja").write_text(chat.JINJA_SOURCES["llama3"])
    flags = flags_of(tmp_path / "other", 2, "--data", tokens, "--init", own)
    for recipe, less in (("finetune", ()), ("pretrain", SMALL[-2:])):
        code, what = refusal(recipe, *(flag for flag in flags if flag not in less))
        assert (code, f"model's is {own}" in what) == (65, True), what


def test_a_folder_without_a_template_is_told_that_chatml_was_assumed(base, flags_of, tmp_path):
    own = shutil.copytree(base / "model", tmp_path / "own")
    save_tokenizer(train_bpe(["2 + 1? 3, as you know."], vocab_size=260), own / "tokenizer.json")
    code, what = refusal("finetune", *flags_of(tmp_path / "run", 2, "--init", own))
    assert (code, f"{own} brings no chat template, so ChatML was assumed" in what) == (64, True)
    code, what = refusal("finetune", *flags_of(tmp_path / "run", 2, "--init", "google/gemma"))
    assert (code, "hf download google/gemma --local-dir DIR" in what) == (66, True), what


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--rank", 4], "full has no adapters"),
        (["--method", "lora", "--adapted", "q_proj"], "'q_proj' matches the name of no matrix"),
    ],
    ids=str,
)
def test_adapters_that_would_do_nothing_are_refused(flags, named, flags_of, tmp_path):
    code, what = refusal("finetune", *flags_of(tmp_path / "run", 2, *flags))
    assert (code, named in what, (tmp_path / "run").exists()) == (64, True, False), what


def test_weights_of_nowhere_and_layouts_that_do_not_fit_are_refused(flags_of, tmp_path):
    nowhere = flags_of(tmp_path / "run", 2, "--init", tmp_path / "nowhere")
    code, what = refusal("finetune", *nowhere)
    assert (code, "nowhere" in what) == (66, True), what
    code, what = refusal("finetune", *flags_of(tmp_path / "run", 2, "--tp", 3))
    assert (code, "tp" in what, (tmp_path / "run").exists()) == (64, True, False), what


def logits_of(run):
    """Return what a trained model makes of some tokens."""
    found = hub.open_model(run)
    make_model = functools.partial(Decoder, found.config)
    (model,) = adapters.build_trained_stages(found.path, make_model, solo_parallel(), [])
    batch = batch_from_rows(torch.arange(60)[None])
    with torch.no_grad():
        return model.eval()(batch.input_ids, position_ids=batch.position_ids, spans=batch.spans)


@pytest.mark.parametrize(
    "method", [pytest.param("lora", marks=pytest.mark.only_all), "qlora --dora"]
)
def test_of_adapters_a_run_keeps_these_alone_and_goes_on_with_its_base(
    method, base, whole, flags_of, tmp_path
):
    more = ["--method", *method.split(), "--rank", 2, "--adapter-dropout", 0.1, "--lr", 5e-3]
    for out, steps in (("twice", (2, 4)), ("whole", (4,))):
        for last in steps:
            quiet = ["--eval-every", 0] if out == "twice" else []  # asked anything, it takes long
            code, said = here(flags_of(tmp_path / out, last, *more, *quiet), "finetune")
            assert code == 0, said
    assert column(tmp_path / "twice", "loss_hex") == column(tmp_path / "whole", "loss_hex")
    (result,) = events(tmp_path / "whole", "result")
    assert result["after"] < result["before"]
    saved = json.loads((find_checkpoint(tmp_path / "whole") / "index.json").read_text())["tensors"]
    assert {".lora." in name for name in saved} == {True}
    asked = ["--run", tmp_path / "whole", "--prompt", "def is_open(self)", "--tokens", 100]
    code, text = here([*asked, "--temperature", 0, "--no-stream"], "generate")
    assert (code, text.strip() in said) == (0, True), (text, said)
    moved = shutil.copytree(base / "run", tmp_path / "moved")
    again = flags_of(tmp_path / "twice", 5, *more, "--eval-every", 0, "--init", moved)
    code, said = here(again, "finetune")
    assert code == 0, said
    assert main(["export", str(tmp_path / "whole"), str(tmp_path / "merged"), "--merge"]) == 0
    ours, merged = logits_of(tmp_path / "whole"), logits_of(tmp_path / "merged")
    assert (ours - merged).abs().max() < 1e-5 * ours.abs().max()
    again = flags_of(tmp_path / "twice", 6, *more, "--init", whole[0])
    code, what = refusal("finetune", *again)
    assert (code, "base" in what) == (66, True), what
    code, what = refusal("finetune", *flags_of(tmp_path / "new", 2, "--init", tmp_path / "whole"))
    assert (code, "--merge" in what, (tmp_path / "new").exists()) == (64, True, False), what


def test_it_begins_with_a_hugging_face_folder_and_its_tokenizer(base, flags_of, tmp_path):
    own = shutil.copytree(base / "model", tmp_path / "own")
    values = json.loads((own / "config.json").read_text())
    (own / "config.json").write_text(json.dumps(values | {"max_position_embeddings": 4096}))
    for name, init in (("run", base / "run"), ("model", own)):
        flags = flags_of(tmp_path / name, 1, "--init", init)
        code, said = here(flags, "finetune")
        assert code == 0, said
    assert f"the weights of {own}, before" in said
    for name in ("loss_hex", "batch_hash"):
        assert column(tmp_path / "model", name) == column(tmp_path / "run", name)
    for file in own.glob("*.safetensors*"):  # what goes on reads no weights of it
        file.unlink()
    code, said = here(flags_of(tmp_path / "model", 2, "--init", own), "finetune")
    assert (code, column(tmp_path / "model", "step")) == (0, [1, 2]), said
    for name, context in (("run", 64), ("model", 4096)):
        assert main(["export", str(tmp_path / name), str(tmp_path / f"{name} out")]) == 0
        assert hub.open_folder(tmp_path / f"{name} out").full_context == context


@pytest.mark.skipif(not can_shard_bytes(), reason="FSDP of this torch shards no bytes")
def test_a_mixture_is_fine_tuned_with_adapters_of_its_experts(flags_of, tmp_path):
    experts = Experts(count=4, top_k=2, width=16)
    mixture = make_decoder_config("tiny", layers=1, width=512, vocab_size=272, experts=experts)
    saved_run(tmp_path / "run", mixture)
    folder = str(tmp_path / "mixture")
    assert main(["export", str(tmp_path / "run"), folder]) == 0
    flags = ["--init", folder, "--method", "qlora", "--dora", "--rank", 2, "--lr", 3e-3]
    flags += ["--adapted", "layers.*.{attention,mlp.experts}.*", "--eval-every", 0]
    flags += ["--adapter-dropout", 0.1]
    alone = here(flags_of(tmp_path / "one", 2, *flags), "finetune")
    dealt = flags_of(tmp_path / "two", 2, *flags, "--dp-shard", 2, "--ep", 2)
    for code, said in (alone, *run_ranks(several, 2, [dealt], "finetune")[0]):
        assert code == 0, said
    assert "warning: --lr 3e-3 suits small models" in alone[1]  # as wide as this one is
    assert_equal_runs(tmp_path / "two", tmp_path / "one")
    named = json.loads((find_checkpoint(tmp_path / "two") / "index.json").read_text())["tensors"]
    assert "model/layers.0.mlp.experts.lora.up.default.magnitude" in named
    assert main(["export", str(tmp_path / "two"), str(tmp_path / "merged"), "--merge"]) == 0
    assert hub.open_folder(tmp_path / "merged").family.model_type == "mixtral"


def test_pretraining_goes_on_from_a_hugging_face_folder_in_any_layout(base, tmp_path):
    own = shutil.copytree(base / "model", tmp_path / "own")
    values = json.loads((own / "config.json").read_text())
    (own / "config.json").write_text(json.dumps(values | {"max_position_embeddings": 4096}))
    flags = ["--data", base / "text", "--steps", 1, "--init", own, "--sample", 1]
    flags += recipe_runs.SMALL.split()
    layouts = {"data": [], "tp": ["--tp", 2], "pp": ["--pp", 2]}
    runs = [[*flags, "--out", tmp_path / name, *layout] for name, layout in layouts.items()]
    for code, said in run_ranks(several, 2, runs)[0]:
        assert code == 0, said
    for name in layouts:
        assert column(tmp_path / name, "loss")[0] < column(base / "run", "loss")[0] - 1, name
    assert hub.open_model(tmp_path / "data").full_context == 4096


@pytest.mark.parametrize("recipe", ["finetune", "pretrain"])
def test_a_folder_that_cannot_be_trained_is_refused_before_anything_is_opened(
    base, flags_of, tmp_path, recipe
):
    own = shutil.copytree(base / "model", tmp_path / "own")
    values = json.loads((own / "config.json").read_text())
    (own / "config.json").write_text(json.dumps(values | {"auto_map": {"AutoModel": "x.Y"}}))
    flags = flags_of(tmp_path / "run", 2, "--init", own)
    flags = [flag for flag in flags if recipe == "finetune" or flag not in SMALL[-2:]]
    code, what = refusal(recipe, *flags)
    assert (code, "auto_map" in what, (tmp_path / "run").exists()) == (64, True, False), what
    (own / "config.json").write_text(json.dumps(values | {"vocab_size": 260}))
    code, what = refusal(recipe, *flags)
    says = {"finetune": "the tokenizer has 271 ids", "pretrain": "and would be (260, 128)"}
    assert (code, says[recipe] in what) == ({"finetune": 64, "pretrain": 66}[recipe], True), what
