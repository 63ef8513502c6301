"""lm-eval gives a model of ours the numbers that it gives the same weights in `transformers`."""

import json

import attrs
import pytest
import torch

import trainkit as tk
from trainkit import evaluation, hub
from trainkit.models import build_decoder, decoder_config, generate
from trainkit.tokenizers import open_tokenizer
from trainkit.types import TrainState

huggingface = pytest.importorskip("lm_eval.models.huggingface")
transformers = pytest.importorskip("transformers")

CONTEXT = 48
CONFIG = decoder_config("tiny", layers=2)
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
    """Write three tasks, each a YAML file and lines of JSON beside it."""
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
    files = hub.tokenizer_files("bytes")
    hub.export_folder(path, home / "there", context=CONTEXT, files=files)
    return model, home / "there"


def continued(model):
    """Return a `Generate` of today's generate, a prompt at a time."""

    def write(prompts, *, max_new_tokens, temperature, stop):
        del stop
        how = {"max_new_tokens": max_new_tokens, "temperature": temperature, "context": CONTEXT}
        ids = {"stop_id": BYTES.eos_id}
        return [generate(model, prompt, **how, **ids) for prompt in prompts]

    return write


@pytest.fixture(scope="module")
def found(made, tmp_path_factory):
    """Return what the harness finds of both on the three tasks."""
    home = tmp_path_factory.mktemp("tasks")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_DATASETS_OFFLINE", "1")
        patch.setenv("HF_HOME", str(home))
        model, folder = made
        score = evaluation.bind_score([model])
        ours = evaluation.harness_model(score, BYTES, context=CONTEXT, generate=continued(model))
        theirs = huggingface.HFLM(pretrained=str(folder), device="cpu", batch_size=4)
        how = {"include": folder_of_tasks(home)}
        names = [task["task"] for task in (CHOICES, ROLLING, WRITING)]
        return [evaluation.evaluate_tasks(each, names, **how) for each in (ours, theirs)]


def numbers(results, task):
    return {k: v for k, v in results[task].items() if isinstance(v, float) and "stderr" not in k}


@pytest.mark.parametrize("task", ["mine_choices", "mine_rolling", "mine_writing"])
def test_the_harness_gives_both_the_same_numbers(task, found):
    ours, theirs = (numbers(results, task) for results in found)
    assert len(ours) >= 2
    assert ours == pytest.approx(theirs, rel=1e-5)
