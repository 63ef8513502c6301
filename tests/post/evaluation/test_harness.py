"""lm-eval gives our model the results of the same weights in `transformers`."""

import json

import attrs
import pytest
import torch

import trainkit as tk
from trainkit import evaluation, hub
from trainkit.models import build_decoder, make_decoder_config
from trainkit.post.generation import Sampling, generate
from trainkit.text.tokenizers import open_tokenizer
from trainkit.types import ConfigError, TrainState

Instance = pytest.importorskip("lm_eval.api.instance").Instance
transformers = pytest.importorskip("transformers")

CONTEXT = 48
CONFIG = make_decoder_config("tiny", layers=2)
BYTES = open_tokenizer("bytes")
TEXTS = ["one two three", "a much longer text, of several windows: " + "word by word " * 9, "x\ny"]
COMMON = {
    "dataset_path": "json",
    "validation_split": "validation",
    "test_split": "validation",
    "metadata": {"version": 1.0},
}
CHOICES = {
    "task": "mine_choices",
    "output_type": "multiple_choice",
    "doc_to_text": "{{question}}",
    "doc_to_choice": "choices",
    "doc_to_target": "answer",
    "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}, {"metric": "acc_bytes"}],
}
ROLLING = {
    "task": "mine_rolling",
    "output_type": "loglikelihood_rolling",
    "doc_to_text": "",
    "doc_to_target": "{{text}}",
    "metric_list": [
        {"metric": name} for name in ("word_perplexity", "byte_perplexity", "bits_per_byte")
    ],
}
WRITING = {
    "task": "mine_writing",
    "output_type": "generate_until",
    "doc_to_text": "{{text[:20]}}",
    "doc_to_target": "{{text}}",
    "generation_kwargs": {"until": ["\n", "e"], "max_gen_toks": 12, "do_sample": False},
    "metric_list": [{"metric": "exact_match"}, {"metric": "bleu"}],
}


def folder_of_tasks(home):
    """Write three tasks, each a YAML file and a JSON lines file."""
    questions = [
        {
            "question": f"{text} and {i} more",
            "choices": ["yes", "no way", text[:5]],
            "answer": i % 3,
        }
        for i, text in enumerate(TEXTS * 4)
    ]
    texts = [{"text": text} for text in TEXTS]
    for task, records in ((CHOICES, questions), (ROLLING, texts), (WRITING, texts)):
        data = home / f"{task['task']}.jsonl"
        data.write_text("".join(f"{json.dumps(record)}\n" for record in records))
        files = {"dataset_kwargs": {"data_files": {"validation": str(data)}}}
        (home / f"{task['task']}.yaml").write_text(json.dumps({**COMMON, **task, **files}))
    return home


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Return a model whose words differ much, and the folder that it is exported to."""
    home = tmp_path_factory.mktemp("made")
    model = build_decoder(CONFIG, seed=1)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(3)
    rest = [model], torch.optim.SGD(model.parameters()), tk.solo_parallel()
    facts = {"model": attrs.asdict(CONFIG)}
    path = tk.save_checkpoint(home / "run", TrainState(), *rest, facts=facts)
    files = hub.make_tokenizer_files("bytes")
    hub.export_folder(path, home / "there", context=CONTEXT, files=files)
    return model, home / "there"


def continued(model):
    """Return a `Generate` of the model alone."""

    def write(prompts, *, max_new_tokens, temperature, stop):
        completions = generate(
            model,
            prompts,
            max_new_tokens=max_new_tokens,
            context=CONTEXT,
            sampling=Sampling(temperature=temperature),
            stop=stop,
            stop_ids=[BYTES.eos_id],
            tokenizer=BYTES,
        )
        return [completion.ids for completion in completions]

    return write


@pytest.fixture(scope="module")
def found(made, tmp_path_factory):
    """Return what the harness finds of both on the three tasks."""
    huggingface = pytest.importorskip("lm_eval.models.huggingface")
    home = tmp_path_factory.mktemp("tasks")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_DATASETS_OFFLINE", "1")
        patch.setenv("HF_HOME", str(home))
        model, folder = made
        score = evaluation.make_scorer(model)
        ours = evaluation.make_harness_model(
            score, BYTES, context=CONTEXT, add_bos=True, generate=continued(model)
        )
        theirs = huggingface.HFLM(pretrained=str(folder), device="cpu", batch_size=4)
        names = [task["task"] for task in (CHOICES, ROLLING, WRITING)]
        manager = evaluation.open_tasks(names, include=folder_of_tasks(home))
        return [evaluation.evaluate_tasks(each, names, manager) for each in (ours, theirs)]


def numbers(results, task):
    return {k: v for k, v in results[task].items() if isinstance(v, float) and "stderr" not in k}


@pytest.mark.parametrize("task", ["mine_choices", "mine_rolling", "mine_writing"])
def test_the_harness_gives_both_the_same_numbers(task, found):
    ours, theirs = (numbers(results, task) for results in found)
    assert len(ours) >= 2
    assert ours == pytest.approx(theirs, rel=1e-5)


def test_the_harness_is_not_asked_for_what_it_does_not_do(made):
    model, _ = made
    score = evaluation.make_scorer(model)
    ask = lambda **wish: [Instance("generate_until", {}, ("one", wish), 0)]  # noqa: E731
    mute = evaluation.make_harness_model(score, BYTES, context=CONTEXT)
    with pytest.raises(ConfigError, match="needs generated texts"):
        mute.generate_until(ask(until=["x"]))
    writes = evaluation.make_harness_model(score, BYTES, context=CONTEXT, generate=continued(model))
    with pytest.raises(ConfigError, match="needs 48 tokens, but the model's context is 48"):
        writes.generate_until(ask(max_gen_toks=48))
    with pytest.raises(ConfigError, match="a task needs num_beams, top_p, which"):
        writes.generate_until(ask(top_p=0.9, num_beams=2))


def test_texts_of_different_wishes_come_back_in_the_order_of_the_prompts():
    seen = []

    def write(prompts, **wish):
        seen.append((prompts, wish))
        return [BYTES.encode("yes, no. maybe") for _ in prompts]

    model = evaluation.make_harness_model(list, BYTES, context=16, generate=write, rows=2)
    wishes = [{"until": ".", "max_gen_toks": 9}, {"until": [","], "temperature": 0.5}] * 2
    wishes[1]["max_new_tokens"] = wishes[3]["max_new_tokens"] = 4
    requests = [
        Instance("generate_until", {}, (f"a long prompt {i}", wish), 0)
        for i, wish in enumerate(wishes)
    ]
    assert model.generate_until(requests) == ["yes, no", "yes", "yes, no", "yes"]
    (first, one), (second, two) = seen
    assert [bytes(ids) for ids in first] == [b"rompt 0", b"rompt 2"]
    assert [bytes(ids) for ids in second] == [b"ong prompt 1", b"ong prompt 3"]
    assert (one["temperature"], one["max_new_tokens"]) == (0.0, 9)
    assert (two["temperature"], two["max_new_tokens"]) == (0.5, 4)


def test_prompts_are_written_on_in_batches_the_longest_first():
    seen = []

    def write(prompts, **_):
        seen.append([*map(len, prompts)])
        return [prompt[-1:] for prompt in prompts]

    model = evaluation.make_harness_model(list, BYTES, context=300, generate=write, rows=2)
    texts = ["a", "bbb", "cc", "eeeee", "dddd"]
    requests = [Instance("generate_until", {}, (text, {"max_gen_toks": 1}), 0) for text in texts]
    assert model.generate_until(requests) == ["a", "b", "c", "e", "d"]
    assert seen == [[5, 4], [3, 2], [1]]


def test_a_task_that_is_not_there_is_named_with_the_nearest(tmp_path, monkeypatch):
    lm_eval_tasks = pytest.importorskip("lm_eval.tasks")
    folder_of_tasks(tmp_path)
    manager = lm_eval_tasks.TaskManager
    monkeypatch.setattr(  # lm-eval's own thousands take half a minute
        lm_eval_tasks,
        "TaskManager",
        lambda include_path, **_: manager(include_path=include_path, include_defaults=False),
    )
    with pytest.raises(ConfigError, match=r"has no task mine_choice: similar names") as raised:
        evaluation.open_tasks(["mine_rolling", "mine_choice"], include=tmp_path)
    assert "mine_choices" in raised.value.hint
