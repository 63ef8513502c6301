"""Pairs: both halves have one prompt, are trained on their answers, and share a row."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainkit.batch import collate_bins
from trainkit.data.corpus import make_corpus
from trainkit.packing import best_fit, first_fit, next_fit
from trainkit.text.chat import QWEN3_SPECIAL, format_answers_warning, make_jinja_template, qwen3
from trainkit.text.chat.encode import encode_chat, split_by_mask
from trainkit.text.chat.preference import (
    encode_preference_pair,
    flatten_pairs,
    mismatch_answers,
    pack_pairs,
)
from trainkit.text.tokenizers.bytes import make_byte_tokenizer
from trainkit.types import IGNORED_LABEL, DataError, Sample

BYTES = make_byte_tokenizer(QWEN3_SPECIAL)


def user(text):
    return {"role": "user", "content": text}


def answer(text, **fields):
    return {"role": "assistant", "content": text, **fields}


def trained_texts(sample):
    return [text for trained, text in split_by_mask(sample, BYTES) if trained]


# ------------------------------------------------------------------------------------ encoding


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "Q", "chosen": "A", "rejected": "B"},
        {"prompt": [user("Q")], "chosen": [answer("A")], "rejected": "B"},
        {"prompt": "Q", "chosen": [user("Q"), answer("A")], "rejected": [user("Q"), answer("B")]},
        {"prompt": None, "chosen": [user("Q"), answer("A")], "rejected": [user("Q"), answer("B")]},
    ],
)
def test_a_pair_is_trained_on_its_answers_alone(record):
    chosen, rejected = encode_preference_pair(record, BYTES)
    assert trained_texts(chosen) == ["A<|im_end|>"]
    assert trained_texts(rejected) == ["B<|im_end|>"]
    first = int(chosen.loss_mask.argmax())
    assert first == int(rejected.loss_mask.argmax()) > 0
    assert chosen.tokens[:first].tolist() == rejected.tokens[:first].tolist()


def test_turns_of_the_prompt_are_not_trained_and_all_of_the_answer_are():
    prompt = [user("a"), answer("b"), user("c")]
    chosen, rejected = encode_preference_pair(
        {"prompt": prompt, "chosen": [answer("d"), user("e"), answer("f")], "rejected": "g"}, BYTES
    )
    assert trained_texts(chosen) == ["d<|im_end|>", "f<|im_end|>"]
    assert trained_texts(rejected) == ["g<|im_end|>"]
    late = {"chosen": [*prompt, answer("d")], "rejected": [*prompt, answer("g")]}
    assert [trained_texts(half) for half in encode_preference_pair(late, BYTES)] == [
        ["d<|im_end|>"],
        ["g<|im_end|>"],
    ]


def test_an_answer_that_begins_the_conversation_follows_the_prompt():
    prompt = [answer("How can I help?"), user("Sing.")]
    record = {"prompt": prompt, "chosen": [*prompt, answer("La")], "rejected": [answer("No")]}
    chosen, rejected = encode_preference_pair(record, BYTES)
    assert trained_texts(chosen) == ["La<|im_end|>"]
    assert trained_texts(rejected) == ["No<|im_end|>"]
    assert chosen.tokens[:20].tolist() == rejected.tokens[:20].tolist()


@pytest.mark.parametrize(
    ("record", "complaint"),
    [
        ({"prompt": "Q", "chosen": "A"}, "no 'rejected'; it has prompt, chosen"),
        ({"prompt": "Q", "chosen": "A", "rejected": "A"}, "both halves are the same"),
        (
            {"prompt": "Q", "chosen": [user("Q"), answer("A")], "rejected": "A"},
            "both halves are the same",
        ),
        ({"chosen": "A", "rejected": "B"}, "no 'prompt', and its halves differ from message 0 on"),
        (
            {"chosen": [user("Q"), answer("A")], "rejected": [user("P"), answer("B")]},
            "no 'prompt', and its halves differ from message 0 on",
        ),
        (
            {
                "chosen": [user("Q"), user("R"), answer("A")],
                "rejected": [user("Q"), user("P"), answer("B")],
            },
            r"chosen half's message 1 \(user\) is where the halves begin to differ",
        ),
        (
            {"prompt": "Q", "chosen": [user("P"), answer("A")], "rejected": "B"},
            "prompt of the chosen half differs from 'prompt' in message 0: .*'P'.*'Q'",
        ),
        ({"prompt": "Q", "chosen": "A", "rejected": [user("Q")]}, "rejected half has no answer"),
        (
            {"chosen": [user("Q"), answer("A"), user("R")], "rejected": [user("Q"), answer("A")]},
            "rejected half has no answer",
        ),
        ({"prompt": [{"role": "user"}], "chosen": "A", "rejected": "B"}, "prompt: message 0"),
        ({"prompt": "Q", "chosen": [], "rejected": "B"}, "chosen: a conversation is a list"),
    ],
)
def test_records_that_are_no_pair_are_refused(record, complaint):
    with pytest.raises(DataError, match=complaint):
        encode_preference_pair(record, BYTES)


def test_answers_that_a_template_renders_alike_are_refused():
    record = {"prompt": "Q", "chosen": "A", "rejected": [answer("A", reasoning_content="\n")]}
    with pytest.raises(DataError, match="both halves are the same"):
        encode_preference_pair(record, BYTES, template=qwen3)


def test_a_template_that_renders_one_prompt_in_two_ways_is_found():
    prompt = [
        user("a"),
        answer("b", reasoning_content="c"),
        user("<tool_response></tool_response>"),
    ]
    record = {"prompt": prompt, "chosen": "d", "rejected": [answer("d"), user("e"), answer("f")]}
    with pytest.raises(DataError, match=r"differently, from character \d+ on: '<think>.* and 'b<"):
        encode_preference_pair(record, BYTES, template=qwen3)


def test_the_tools_of_a_record_are_shown_in_both_halves():
    tools = [{"name": "f"}]
    record = {"prompt": "Q", "chosen": "A", "rejected": "B"}
    want = [
        encode_chat([user("Q"), answer(text)], BYTES, template=qwen3, tools=tools) for text in "AB"
    ]
    for value in (tools, '[{"name": "f"}]'):
        found = encode_preference_pair({**record, "tools": value}, BYTES, template=qwen3)
        assert [half.tokens.tolist() for half in found] == [half.tokens.tolist() for half in want]
    plain = encode_preference_pair({**record, "tools": None}, BYTES, template=qwen3)
    assert len(plain[0].tokens) < len(want[0].tokens)


def test_answers_that_a_template_hides_are_counted_in_both_halves():
    template = make_jinja_template(
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}",
        eos_token="<|im_end|>",
    )
    call = {"function": {"name": "add", "arguments": {}}}
    calls, counts = [{"role": "assistant", "content": "", "tool_calls": [call]}], Counter()
    encode_preference_pair(
        {"prompt": "1+1?", "chosen": calls, "rejected": "2"},
        BYTES,
        template=template,
        counts=counts,
    )
    assert (counts["answers"], counts["hidden_answers"]) == (2, 1)
    with pytest.raises(DataError, match="shows nothing of 1 of 2 answers"):
        format_answers_warning(counts)


def test_a_half_that_does_not_fit_is_named():
    record = {"prompt": "Q", "chosen": "A", "rejected": "B" * 50}
    with pytest.raises(DataError, match=r"the rejected half: .*none fits"):
        encode_preference_pair(record, BYTES, max_length=40)


def test_halves_become_documents_in_turn():
    pairs = [
        encode_preference_pair({"prompt": "Q", "chosen": f"A{i}", "rejected": f"B{i}"}, BYTES)
        for i in range(3)
    ]
    texts = [trained_texts(document)[0][:2] for document in flatten_pairs(iter(pairs))]
    assert texts == ["A0", "B0", "A1", "B1", "A2", "B2"]
    empty = Sample(np.array([], np.int64), np.array([], bool))
    with pytest.raises(DataError, match=r"pair 1 must have two halves with tokens, got \[\d+, 0\]"):
        list(flatten_pairs([pairs[0], (pairs[1][0], empty)]))


def test_each_prompt_is_given_the_answer_to_the_next_one():
    pairs = [
        encode_preference_pair({"prompt": f"Q{i}", "chosen": f"A{i}", "rejected": "B"}, BYTES)
        for i in range(3)
    ]
    found = list(mismatch_answers(chosen for chosen, _ in pairs))
    assert [trained_texts(sample)[0][:2] for sample in found] == ["A1", "A2", "A0"]
    prompts = [BYTES.decode(sample.tokens[~sample.loss_mask]) for sample in found]
    assert all(f"Q{i}" in text for i, text in enumerate(prompts))


# ------------------------------------------------------------------------------------- packing


@st.composite
def packings(draw):
    multiple_of = draw(st.sampled_from([1, 2, 4, 6]))
    capacity = multiple_of * draw(st.integers(2, 12))
    length = st.integers(1, capacity)
    lengths = draw(st.lists(length, max_size=20).map(lambda halves: halves[: len(halves) // 2 * 2]))
    fit = draw(st.sampled_from([best_fit, first_fit, next_fit]))
    return lengths, capacity, multiple_of, fit


@given(packings())
def test_both_halves_of_each_pair_that_fits_are_in_one_row_once(packing):
    lengths, capacity, multiple_of, fit = packing
    bins = pack_pairs(lengths, capacity, fit=fit, multiple_of=multiple_of, overlong="drop")
    aligned = [-(-length // multiple_of) * multiple_of for length in lengths]
    placed = []
    for row in range(len(bins)):
        pieces = bins[row]
        assert sum(aligned[document] for document, _, _ in pieces) <= capacity
        for (chosen, *first), (rejected, *second) in zip(pieces[::2], pieces[1::2], strict=True):
            assert (chosen % 2, rejected) == (0, chosen + 1)
            assert (first, second) == ([0, lengths[chosen]], [0, lengths[rejected]])
            placed.append(chosen // 2)
    fitting = [i for i in range(len(lengths) // 2) if sum(aligned[2 * i : 2 * i + 2]) <= capacity]
    assert sorted(placed) == fitting
    assert (bins.capacity, bins.multiple_of) == (capacity, multiple_of)


@given(st.lists(st.integers(1, 9), min_size=2, max_size=20))
def test_sequential_keeps_pairs_in_order(halves):
    lengths = halves[: len(halves) // 2 * 2]
    documents = pack_pairs(lengths, 18, fit=next_fit).documents.tolist()
    assert documents == list(range(len(lengths)))
    assert all(b == a + 1 for a, b in pairwise(documents))


def test_alignment_is_of_each_half_by_itself():
    assert len(pack_pairs([3, 3, 3, 3], 12)) == 1
    assert len(pack_pairs([3, 3, 3, 3], 12, multiple_of=4)) == 2
    with pytest.raises(DataError, match="pair 0, of 5 and 3 tokens, does not fit into 8"):
        pack_pairs([5, 3], 8, multiple_of=4)


def test_lengths_that_are_no_pairs_are_refused():
    with pytest.raises(ValueError, match=r"two for each pair; got int64 \(3,\)"):
        pack_pairs([1, 2, 3], 8)
    with pytest.raises(ValueError, match="got float64"):
        pack_pairs([1.0, 2.0], 8)
    with pytest.raises(ValueError, match="document 1 has 0 tokens; a pair needs both halves"):
        pack_pairs([1, 0], 8)
    with pytest.raises(DataError, match="pair 1, of 8 and 1 tokens, does not fit into 8"):
        pack_pairs([1, 2, 8, 1], 8)
    with pytest.raises(ValueError, match='must be "error" or "drop", got \'split\''):
        pack_pairs([1, 2], 8, overlong="split")
    with pytest.raises(ValueError, match="capacity 9 is no multiple of multiple_of=2"):
        pack_pairs([1, 2], 9, multiple_of=2)
    assert len(pack_pairs([], 8)) == 0


def test_a_pair_of_no_length_is_left_out():
    assert pack_pairs([0, 0, 1, 2, 0, 0], 8).documents.tolist() == [2, 3]


def test_documents_of_a_row_are_chosen_and_rejected_in_turn():
    records = [{"prompt": "Q", "chosen": "A" * i, "rejected": "B" * (9 - i)} for i in range(1, 9)]
    pairs = [encode_preference_pair(record, BYTES) for record in records]
    corpus = make_corpus(flatten_pairs(pairs), vocab_size=BYTES.vocab_size)
    bins = pack_pairs(corpus.lengths, 256, multiple_of=4)
    batch = collate_bins(corpus, bins, list(range(len(bins))))
    is_label = batch["labels"] != IGNORED_LABEL
    stop = BYTES.encode("<|im_end|>")[0]
    for labels, documents in zip(batch["labels"], batch["document_ids"], strict=True):
        words = (labels != IGNORED_LABEL) & (labels != stop)
        assert set(labels[words & (documents % 2 == 0)].tolist()) == {ord("A")}
        assert set(labels[words & (documents % 2 == 1)].tolist()) == {ord("B")}
    assert int(is_label.sum()) == len(pairs) * (9 + 2)
