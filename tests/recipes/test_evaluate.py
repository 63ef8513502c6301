"""recipes/evaluate.py: lines of what is asked, in any layout; bad input ends it before a model."""

import json

import pytest
from recipe_runs import here, load, refusal, several
from weights.hub.test_export_command import saved_run

from trainkit.models import Experts, make_decoder_config
from trainkit.post.evaluation import read_results
from trainkit.tools.testing import run_ranks
from trainkit.weights.hub import open_model

CONFIG = make_decoder_config("tiny", layers=2)
TEXTS = ["def f(x):\n    return x\n", "word by word " * 30, ""]
QUESTION = {"context": "1 + 1 =", "choices": [" 2", " 11", " two"], "answer": 0}


def jsonl(path, *records):
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return path


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Return a folder with a run and files of what may be asked."""
    home = tmp_path_factory.mktemp("home")
    saved_run(home / "run", CONFIG)
    jsonl(home / "texts.jsonl", *({"text": text} for text in TEXTS))
    jsonl(home / "questions.jsonl", *(QUESTION | {"answer": i % 3} for i in range(5)))
    pairs = ({"context": text[:9], "continuation": text[9:30]} for text in TEXTS[:2])
    jsonl(home / "pairs.jsonl", *pairs, {"text": "as a whole"})
    return home


def flags_of(home, out, *more):
    given = ["--run", home / "run", "--out", out, "--perplexity", home / "texts.jsonl"]
    given += ["--choices", home / "questions.jsonl", "--score", home / "pairs.jsonl"]
    return [*given, "--batch", "256", *more]


@pytest.fixture(scope="module")
def whole(home):
    code, printed = here(flags_of(home, home / "whole"), "evaluate", folded=True)
    assert code == 0, printed
    return home / "whole", printed


def test_it_writes_a_line_for_each_and_what_they_come_to(whole):
    out, printed = whole
    counts = {kind: len(read_results(out / f"{kind}.jsonl")) for kind in KINDS}
    assert counts == {"perplexity": 3, "choices": 5, "score": 3}
    found = json.loads((out / "results.json").read_text())
    assert found == json.loads(printed[printed.index("{") :])
    # At most 80 columns, except for a path that alone has more.
    assert all(len(line) <= 80 or " " not in line.strip() for line in printed.splitlines())
    assert 270 < found["perplexity"]["token_perplexity"] < 3000  # 272 words, and it knows none
    assert found["perplexity"]["bytes"] == sum(map(len, TEXTS))
    assert found["choices"]["questions"] == 5


KINDS = ("perplexity", "choices", "score")


def test_a_mixture_of_experts_is_evaluated_too(home):
    experts = Experts(count=4, top_k=2, width=16)
    saved_run(
        home / "mixed",
        make_decoder_config(
            "tiny", layers=2, experts=experts, width=32, heads=2, kv_heads=2, mlp_width=48
        ),
    )
    flags = ["--run", home / "mixed", "--out", home / "out", "--score", home / "pairs.jsonl"]
    code, printed = here(flags, "evaluate")
    assert (code, len(read_results(home / "out" / "score.jsonl"))) == (0, 3), printed


TWO = [["--tp", "2"], ["--pp", "2"], ["--ring", "2"], []]


def test_two_ranks_write_the_same_numbers(whole, home):
    runs = [flags_of(home, home / f"two{i}", *degrees) for i, degrees in enumerate(TWO)]
    for codes in run_ranks(several, 2, runs, "evaluate"):
        assert [code for code, _ in codes] == [0] * len(TWO), codes
    for i, _ in enumerate(TWO):
        for kind in KINDS:
            found, want = (read_results(x / f"{kind}.jsonl") for x in (home / f"two{i}", whole[0]))
            for mine, theirs in zip(found, want, strict=True):
                name = "logprobs" if kind == "choices" else "logprob"
                assert mine[name] == pytest.approx(theirs[name], rel=1e-5)


def test_the_same_command_goes_on_with_half_a_file(whole, home):
    out, _ = whole
    path = out / "choices.jsonl"
    text, results = path.read_bytes(), (out / "results.json").stat().st_ino
    path.write_bytes(text[: len(text) // 2])
    code, printed = here(flags_of(home, out), "evaluate")
    assert (code, path.read_bytes()) == (0, text)
    assert (out / "results.json").stat().st_ino != results  # another file took its place
    assert "choices: 5 lines are in" in printed
    assert "2 were there" in printed


def test_results_of_another_model_or_of_other_texts_are_not_mixed(whole, home, tmp_path):
    saved_run(tmp_path / "run", make_decoder_config("tiny", layers=1))
    flags = flags_of(home, whole[0])
    code, said = refusal("evaluate", *flags, "--run", tmp_path / "run")
    assert code == 65
    assert "perplexity.jsonl holds results of another model" in said
    other = jsonl(tmp_path / "texts.jsonl", {"text": "other"})
    code, said = refusal("evaluate", *flags, "--perplexity", other)
    assert (code, "results of another data" in said) == (65, True)


REFUSED = [
    (["--choices", "one.jsonl"], 65, "one.jsonl: line 2: there must be two choices or more"),
    (["--score", "empty.jsonl"], 65, "empty.jsonl: line 1: the continuation is empty"),
    (["--perplexity", "none.jsonl"], 65, "none.jsonl: No such file"),
    (["--tokenizer", "other.json"], 66, "was trained with another tokenizer than"),
    (["--run", "nowhere"], 66, "there is no folder nowhere"),
    (["--tasks", "mine", "--include", "nowhere"], 64, "there is no folder"),
    (["--tp", "3"], 64, "the degrees multiply to 3"),
]


@pytest.mark.parametrize(("flags", "code", "words"), REFUSED)
def test_bad_input_ends_it_before_a_model_is_loaded(flags, code, words, home, monkeypatch):
    from trainkit.text.tokenizers import save_tokenizer, train_bpe

    jsonl(home / "one.jsonl", QUESTION, QUESTION | {"choices": [" 2"]})
    jsonl(home / "empty.jsonl", {"context": "a", "continuation": ""})
    save_tokenizer(train_bpe(["one"], vocab_size=260), home / "other.json")
    monkeypatch.chdir(home)
    monkeypatch.setattr("trainkit.parallel.build_stages", None)
    found = refusal("evaluate", "--run", "run", *flags)
    assert found[0] == code, found
    assert words in found[1]


def test_without_flags_it_takes_text_that_pretrain_holds_out(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for i in range(200):  # in place of Python's library, which takes some seconds
        (tmp_path / f"{i}.py").write_text(
            "".join(f"def f{n}(x): return x + {i}\n" for n in range(50))
        )
    for room in ("open", "python_library"):
        monkeypatch.setattr(f"trainkit.text.corpora.{room}.standard_library", lambda: tmp_path)
    saved_run(tmp_path / "runs" / "pretrain", CONFIG)
    recipe = load("evaluate")
    assert recipe.main([]) is None
    (out,) = (tmp_path / "runs" / "evaluate").iterdir()
    found = json.loads((out / "results.json").read_text())
    assert 10 < found["choices"]["questions"] <= 200
    assert found["perplexity"]["documents"] == found["choices"]["questions"]
    short = open_model(tmp_path / "runs" / "pretrain", context=40)  # whose endings fit, too
    asked = recipe.library(short, short.adds_bos)
    assert 10 < len(asked["choices"][0]) <= 200
