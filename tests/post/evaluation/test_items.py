"""Texts, pairs and questions: how they are read, truncated and counted, and what is rejected."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainkit import evaluation
from trainkit.post.evaluation.examples import (
    encode_continuation,
    get_prefix_id,
    make_rolling_windows,
)
from trainkit.post.evaluation.score import ExampleScores
from trainkit.text.tokenizers import make_byte_tokenizer, train_bpe
from trainkit.types import DataError

BYTES = make_byte_tokenizer(["<|end|>"])
READ = {"text": evaluation.read_texts, "choices": evaluation.read_choices}
PAIR = {"context": "a", "continuation": " b"}
ASKED = {"context": "1 + 1 =", "choices": [" 2", " 11"], "answer": 0}


def written(path, *records):
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return path


@given(size=st.integers(0, 40), context=st.integers(1, 12))
def test_windows_are_those_of_lm_eval_and_count_every_token_once(size, context):
    utils = pytest.importorskip("lm_eval.utils")
    ids = list(range(1, size + 1))
    windows = utils.get_rolling_token_windows(ids, 0, context, 1)
    want = [utils.make_disjoint_window(pair) for pair in windows]
    found = make_rolling_windows(ids, prefix=0, context=context)
    pairs = [(x.ids[: -x.scored].tolist(), x.ids[-x.scored :].tolist()) for x in found]
    assert pairs == want
    assert [i for _, counted in pairs for i in counted] == ids
    assert all(len(x.ids) <= context + 1 for x in found)


TOKENIZERS = [BYTES, train_bpe(["one two three two one"] * 4, vocab_size=300)]


@pytest.mark.parametrize("tokenizer", TOKENIZERS, ids=["bytes", "bpe"])
@given(context=st.sampled_from(["", " ", "one two", "one ", "<|bos|>on", "on"]), more=st.text())
def test_pairs_are_cut_as_lm_eval_cuts_them(tokenizer, context, more):
    pytest.importorskip("lm_eval")
    model = evaluation.make_harness_model(list, tokenizer, context=64)
    continuation = f"e{more}"
    found = encode_continuation(tokenizer, context, continuation)
    if context.strip():
        assert found == model._encode_pair(context, continuation)
    else:
        assert found == (
            [get_prefix_id(tokenizer)],
            tokenizer.encode(context + continuation),
        )


def test_bos_is_put_before_a_context_that_has_none():
    pair = encode_continuation(BYTES, "a", "b", add_bos=True)
    assert pair == ([256, 97], [98])
    model = evaluation.make_harness_model(list, BYTES, context=8, add_bos=True)
    assert model._encode_pair("a", "b") == pair
    assert encode_continuation(BYTES, "", "b", add_bos=True) == ([256], [98])


def test_a_context_is_cut_on_its_left_and_that_is_counted(tmp_path):
    path = written(tmp_path / "a.jsonl", {"context": "abcdefgh", "continuation": "ij"})
    (item,) = evaluation.read_texts(path, BYTES, context=4)
    (example,) = item.examples
    assert bytes(example.ids.tolist()) == b"fghij"
    assert (example.scored, example.cut) == (2, 5)
    assert evaluation.make_text_record(item, [ExampleScores(np.zeros(2), True)])["cut"] == 5


NONE = "a continuation"
REFUSED = [
    ("text", {**PAIR, "continuation": ""}, "line 2: the continuation is empty"),
    (
        "text",
        {**PAIR, "continuation": "x" * 9},
        "line 2: the continuation has 9 tokens, .* context is 8",
    ),
    ("text", {**PAIR, "context": 3}, "line 2: field 'context' must be a string, got int"),
    ("text", {"continuation": "a"}, "line 2: there is no field 'context'"),
    ("text", {"txt": "a"}, "line 2: there is no field 'text'; found txt"),
    ("text", {**PAIR, "text": "a"}, "line 2: it has both 'text' and 'continuation'"),
    ("text", [1], r"line 2: must be a JSON object, got list"),
    ("choices", {**ASKED, "choices": [" 2"]}, "line 2: there must be two choices or more, got 1"),
    ("choices", {**ASKED, "choices": [" 2", ""]}, "line 2: 'choices' must be a list of texts"),
    ("choices", {**ASKED, "choices": "ab"}, "line 2: 'choices' must be a list of texts"),
    ("choices", {**ASKED, "answer": 2}, "line 2: 'answer' must be .* from 0 to 1, got 2"),
    ("choices", {**ASKED, "answer": True}, "line 2: 'answer' must be .* got True"),
    ("choices", {**ASKED, "context": None}, "line 2: field 'context' must be a string"),
    ("choices", {"text": "a"}, "line 2: there is no field 'context'"),
]


@pytest.mark.parametrize(("kind", "record", "words"), REFUSED)
def test_a_bad_record_is_refused_with_its_line(kind, record, words, tmp_path):
    good = {"text": PAIR, "choices": ASKED}[kind]
    path = written(tmp_path / "a.jsonl", good, record)
    with pytest.raises(DataError, match=words):
        READ[kind](path, BYTES, context=8)


@pytest.mark.parametrize(("name", "text"), [("a.jsonl", ""), ("b.jsonl", "{"), ("c.bin", "x")])
def test_a_file_that_is_not_what_it_should_be_is_refused(name, text, tmp_path):
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=name):
        evaluation.read_choices(tmp_path / name, BYTES, context=8)


def test_a_tokenizer_without_bos_and_eos_is_refused():
    bare = train_bpe(["one two"], vocab_size=256, special=())
    with pytest.raises(DataError, match="neither BOS nor EOS"):
        encode_continuation(bare, "", "one")


def test_texts_of_a_folder_are_documents_and_their_files_are_hashed(tmp_path):
    (tmp_path / "a.txt").write_text("one two\n")
    (tmp_path / "b.txt").write_text("")
    sources = {}
    one, none = evaluation.read_texts(tmp_path, BYTES, context=4, sources=sources)
    assert one.metadata == {"tokens": 8, "words": 3, "bytes": 8}
    assert (none.metadata["tokens"], none.examples) == (0, [])
    assert set(sources) == {"a.txt", "b.txt"}
    assert evaluation.make_text_record(none, [])["logprob"] == 0


def test_perplexities_are_over_all_texts_together_and_pairs_are_left_out():
    lines = [
        {"logprob": -6.0, "tokens": 3, "words": 2, "bytes": 6},
        {"logprob": -2.0, "tokens": 1, "words": 2, "bytes": 2},
        {"logprob": -9.0, "tokens": 1},
    ]
    found = evaluation.perplexity(lines)
    assert found["token_perplexity"] == math.exp(2)
    assert found["word_perplexity"] == math.exp(2)
    assert found["byte_perplexity"] == math.exp(1)
    assert found["bits_per_byte"] == pytest.approx(1 / math.log(2))
    assert evaluation.perplexity([{**lines[0], "logprob": -1e9}])["word_perplexity"] == math.inf
    for none in ([], lines[2:], [{"logprob": 0.0, "tokens": 0, "words": 1, "bytes": 0}]):
        with pytest.raises(DataError, match="no text with a token"):
            evaluation.perplexity(none)


def test_three_measures_choose_and_of_equals_the_first(tmp_path):
    path = written(
        tmp_path / "a.jsonl", {"context": "x", "choices": ["é", "abc", "ab"], "answer": 1}
    )
    (item,) = evaluation.read_choices(path, train_bpe(["é abc"] * 9, vocab_size=300), context=8)
    counts = [example.scored for example in item.examples]
    sums = [-2.0, -3.0, -2.0]
    found = [
        ExampleScores(np.full(n, total / n), False) for n, total in zip(counts, sums, strict=True)
    ]
    line = evaluation.make_choice_record(item, found)
    per_token = [total / n for n, total in zip(counts, sums, strict=True)]
    assert line["best"]["plain"] == 0
    assert line["best"]["per_token"] == int(np.argmax(per_token))
    assert line["best"]["per_byte"] == 0  # -1, -1, -1
    assert {"plain", "per_byte"} <= set(line["ties"])
    result = evaluation.accuracy([line, {**line, "answer": 0, "ties": []}])
    assert (result["accuracy"], result["questions"], result["ties"]) == (0.5, 2, 1)
    with pytest.raises(DataError, match="there is no question"):
        evaluation.accuracy([])
