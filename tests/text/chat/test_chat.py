"""Conversations become tokens, and the mask covers the assistant's words and its stop tokens."""

import json
import pickle
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainkit.batch import collate_bins
from trainkit.data.corpus import make_corpus
from trainkit.packing import pack_bins
from trainkit.text.chat.encode import (
    check_mask,
    encode_chat,
    find_stop_ids,
    format_mask,
    make_chat_encoder,
    messages_from_sharegpt,
    split_by_mask,
)
from trainkit.text.chat.jinja import make_jinja_template
from trainkit.text.chat.templates import Segment, chatml, llama3, qwen3
from trainkit.text.corpora.open import open_corpus
from trainkit.text.tokenizers.bytes import make_byte_tokenizer
from trainkit.text.tokenizers.hf import open_hf_tokenizer
from trainkit.text.tokenizers.special import CHATML_SPECIAL, LLAMA3_SPECIAL, QWEN3_SPECIAL
from trainkit.types import IGNORED_LABEL, DataError, Sample

BYTES = make_byte_tokenizer((*QWEN3_SPECIAL, *LLAMA3_SPECIAL))
TEMPLATES = {"chatml": chatml, "llama3": llama3, "qwen3": qwen3}
GOLDEN = {
    name: json.loads((Path(__file__).parent / f"golden/{name}.json").read_text())
    for name in TEMPLATES
}


def talk(*texts, first="user"):
    """A conversation in turns, of user and assistant."""
    roles = ["user", "assistant"] if first == "user" else ["assistant", "user"]
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]


def trained_texts(sample, tokenizer=BYTES):
    return [text for trained, text in split_by_mask(sample, tokenizer) if trained]


@pytest.fixture(scope="module")
def bpe():
    """A small tokenizer that merges across words, and that trims blanks off its offsets."""
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = tokenizers.processors.ByteLevel(trim_offsets=True)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=500,
        show_progress=False,
        special_tokens=[*QWEN3_SPECIAL, *LLAMA3_SPECIAL],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    texts = [row["text"] for rows in GOLDEN.values() for row in rows]
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


class Runs:
    """A tokenizer whose tokens are runs of the given sizes, whatever the text is."""

    def __init__(self, sizes, trim=False):
        self.sizes, self.trim = sizes, trim

    def encode_with_offsets(self, text):
        offsets, begin = [], 0
        while begin < len(text):
            end = min(begin + self.sizes[len(offsets) % len(self.sizes)], len(text))
            part = text[begin:end]
            cut = len(part) - len(part.lstrip()) if self.trim else 0
            offsets.append((begin + cut, end))
            begin = end
        return list(range(len(offsets))), offsets


def in_parts(messages, **_):
    """Render each message as three bodies, with something between the first two."""
    parts = [
        [
            Segment("<|im_start|>", i),
            Segment(message["content"][:1], i, body=True),
            Segment("|", i),
            Segment(message["content"][1:], i, body=True),
            Segment("<|im_end|>", i, body=True),
            Segment("\n", i),
        ]
        for i, message in enumerate(messages)
    ]
    return [segment for part in parts for segment in part]


class Plain:
    """A tokenizer without offsets."""

    def __init__(self, tokenizer):
        self.encode, self.decode = tokenizer.encode, tokenizer.decode


# ------------------------------------------------------------------------------------- the mask


def test_the_mask_covers_the_words_and_the_stop_token_and_nothing_else():
    messages = [{"role": "system", "content": "S"}, *talk("Q", "A\n", "R", "B")]
    sample = encode_chat(messages, BYTES)
    assert sample.tokens.dtype == np.int64
    assert sample.loss_mask.dtype == bool
    assert format_mask(sample, BYTES, colour=False) == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nQ<|im_end|>\n"
        "<|im_start|>assistant\n[[A\n<|im_end|>]]\n<|im_start|>user\nR<|im_end|>\n"
        "<|im_start|>assistant\n[[B<|im_end|>]]\n"
    )


def test_calls_are_trained_and_what_tools_answer_is_not():
    call = {"function": {"name": "f", "arguments": {"x": 1}}}
    messages = [*talk("Q", "See:"), {"role": "tool", "content": "T"}, *talk("A", first="assistant")]
    messages[1]["tool_calls"] = [call]
    written = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
    assert trained_texts(encode_chat(messages, BYTES, template=qwen3)) == [
        f"See:\n{written}<|im_end|>",
        "A<|im_end|>",
    ]
    assert trained_texts(encode_chat(messages, BYTES, template=llama3)) == [
        '{"name": "f", "parameters": {"x": 1}}<|eot_id|>',
        "A<|eot_id|>",
    ]


@pytest.mark.parametrize(
    ("train", "expected"),
    [
        ("assistant", ["A", "B"]),
        ("last", ["B"]),
        ([1], ["A"]),
        ((0, 3), ["Q", "B"]),
        ([], []),
        (np.array([3]), ["B"]),
        (lambda i, message: message["role"] == "user" or i == 1, ["Q", "A", "R"]),
    ],
)
def test_the_chosen_turns_are_trained(train, expected):
    sample = encode_chat(talk("Q", "A", "R", "B"), BYTES, train=train)
    assert trained_texts(sample) == [f"{text}<|im_end|>" for text in expected]


def test_a_weight_of_0_leaves_a_turn_out():
    messages = talk("Q", "A", "R", "B")
    messages[1]["weight"], messages[3]["weight"] = 0, 1
    assert trained_texts(encode_chat(messages, BYTES)) == ["B<|im_end|>"]
    assert trained_texts(encode_chat(messages, BYTES, train=[1, 3])) == ["B<|im_end|>"]
    messages[1]["weight"] = 0.5
    with pytest.raises(DataError, match=r"message 1 \(assistant\) has the weight 0.5"):
        encode_chat(messages, BYTES)


def test_arguments_out_of_range_are_refused():
    encode = partial(encode_chat, talk("Q", "A"), BYTES)
    with pytest.raises(ValueError, match=r"train has the messages \[1, 2\]; there are 2"):
        encode(train=[1, 2])
    with pytest.raises(ValueError, match="numbers of messages, or a function, got 'user'"):
        encode(train="user")
    with pytest.raises(ValueError, match="max_length must be at least 1, got 0"):
        encode(max_length=0)
    with pytest.raises(ValueError, match="got 'split'"):
        encode(overlong="split")


def test_all_bodies_of_a_message_are_trained_and_what_is_between_is_not():
    messages = talk("QR", "ABC", "ST", "DEF")
    whole = encode_chat(messages, BYTES, template=in_parts)
    assert trained_texts(whole) == ["A", "BC<|im_end|>", "D", "EF<|im_end|>"]
    assert find_stop_ids(BYTES, in_parts) == (260,)
    ends = np.flatnonzero(whole.tokens == 260) + 1
    for length in range(ends[1], ends[3]):  # the last turn fits only with its last body
        cut = encode_chat(messages, BYTES, template=in_parts, max_length=int(length))
        assert trained_texts(cut) == ["A", "BC<|im_end|>"]
        assert len(cut.tokens) == ends[1]


def test_a_turn_that_a_template_does_not_show_cannot_be_trained():
    template = make_jinja_template(
        "{% for m in messages %}{{ m.content | upper }}${% endfor %}", eos_token="$"
    )
    with pytest.raises(DataError, match=r"message 1 \(assistant\) is not to be found"):
        encode_chat(talk("q", "a"), BYTES, template=template)
    assert len(encode_chat(talk("q", "a"), BYTES, template=template, train=[]).tokens) == 4


# ----------------------------------------------------------------------------------- the tokens


@pytest.mark.parametrize("name", TEMPLATES)
def test_tokens_are_those_of_the_whole_text(name, bpe):
    for row in GOLDEN[name]:
        if row.get("add_generation_prompt"):
            continue
        template = partial(TEMPLATES[name], **row.get("arguments", {}))
        sample = encode_chat(
            row["messages"], open_hf_tokenizer(bpe), template=template, tools=row.get("tools")
        )
        assert sample.tokens.tolist() == bpe.encode(row["text"], add_special_tokens=False).ids
        bodies = [
            segment.text
            for segment in template(row["messages"], tools=row.get("tools"))
            if segment.body and row["messages"][segment.message]["role"] == "assistant"
        ]
        assert "".join(trained_texts(sample, open_hf_tokenizer(bpe))) == "".join(bodies)


def test_tokens_are_those_that_transformers_gives(bpe):
    transformers = pytest.importorskip("transformers")
    source = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>\n{% endfor %}"
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|im_end|>", chat_template=source
    )
    messages = talk("How are you?", "  Fine,\n\n thank you. ", "é\U0001f44b", "ok")
    sample = encode_chat(messages, open_hf_tokenizer(bpe), template=make_jinja_template(fast))
    assert sample.tokens.tolist() == fast.apply_chat_template(messages, return_dict=False)
    # Nothing asks for the answer before its blank, which is one token with what follows.
    assert trained_texts(sample, open_hf_tokenizer(bpe)) == [
        "   Fine,\n\n thank you. <|im_end|>",
        " ok<|im_end|>",
    ]


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=5),
    st.booleans(),
    st.sampled_from([chatml, in_parts]),
)
def test_a_token_is_trained_when_all_of_it_was_said(sizes, trim, template):
    messages = talk("Hello", "\n\nwell \n said", "?", " \n")
    sample = encode_chat(messages, Runs(sizes, trim), template=template)
    characters = [
        segment.body and segment.message in (1, 3)
        for segment in template(messages)
        for _ in segment.text
    ]
    begin, expected = 0, []
    for k in range(len(sample.tokens)):
        end = begin + sizes[k % len(sizes)]
        expected.append(all(characters[begin:end]))
        begin = end
    assert sample.loss_mask.tolist() == expected


def test_blanks_that_a_tokenizer_trims_off_its_offsets_are_trained(bpe):
    sample = encode_chat(talk("Q", "a\n\n  b\n"), open_hf_tokenizer(bpe))
    assert "".join(trained_texts(sample, open_hf_tokenizer(bpe))) == "a\n\n  b\n<|im_end|>"
    assert len(trained_texts(sample, open_hf_tokenizer(bpe))) == 1


class Marked:
    """A tokenizer with a token of no characters before each character."""

    def encode_with_offsets(self, text):
        places = [(i, i + width) for i in range(len(text)) for width in (0, 1)]
        return list(range(len(places))), places


def test_a_token_of_no_characters_is_never_trained():
    sample = encode_chat(talk("Q", "AB"), Marked())
    segments = chatml(talk("Q", "AB"))
    characters = [
        segment.body and segment.message == 1 for segment in segments for _ in segment.text
    ]
    assert not sample.loss_mask[::2].any()
    assert sample.loss_mask[1::2].tolist() == characters


@pytest.mark.parametrize("name", TEMPLATES)
def test_without_offsets_each_piece_is_encoded_by_itself(name):
    for row in GOLDEN[name]:
        encode = partial(
            encode_chat, row["messages"], template=TEMPLATES[name], tools=row.get("tools")
        )
        whole = encode(BYTES)
        parts = encode(Plain(BYTES))
        assert parts.tokens.tolist() == whole.tokens.tolist()
        assert parts.loss_mask.tolist() == whole.loss_mask.tolist()


# ------------------------------------------------------------------------------------ truncation


@given(
    st.lists(st.text("ab\n", max_size=6), min_size=2, max_size=7),
    st.integers(1, 200),
    st.sampled_from(["assistant", "last", (1,)]),
)
def test_truncation_keeps_whole_turns_and_as_many_as_fit(texts, max_length, train):
    messages = talk(*texts)
    whole = encode_chat(messages, BYTES, train=train)
    counts = Counter()
    sample = encode_chat(
        messages, BYTES, train=train, max_length=max_length, overlong="drop", counts=counts
    )
    stop = find_stop_ids(BYTES)[0]
    ends = np.flatnonzero(whole.loss_mask & (whole.tokens == stop)) + 1
    fits = len(whole.tokens) <= max_length
    keep = len(whole.tokens) if fits else int(ends[ends <= max_length].max(initial=0))
    assert sample.tokens.tolist() == whole.tokens[:keep].tolist()
    assert sample.loss_mask.tolist() == whole.loss_mask[:keep].tolist()
    assert +counts == +Counter(
        conversations=1,
        truncated=int(0 < keep < len(whole.tokens)),
        dropped=int(keep == 0),
        turns_lost=int((ends > keep).sum()),
        answers=len(ends),
    )


def test_a_turn_that_is_cut_by_one_token_is_gone_and_counted():
    messages = talk("Q", "A", "R", "B")
    whole = encode_chat(messages, BYTES)
    counts = Counter()
    encode = partial(encode_chat, messages, BYTES, counts=counts)
    assert len(encode(max_length=len(whole.tokens)).tokens) == len(whole.tokens)
    cut = encode(max_length=len(whole.tokens) - 1)  # the newline after the last stop token
    assert trained_texts(cut) == ["A<|im_end|>", "B<|im_end|>"]
    assert trained_texts(encode(max_length=len(whole.tokens) - 2)) == ["A<|im_end|>"]
    assert +counts == {"conversations": 3, "truncated": 2, "turns_lost": 1, "answers": 6}


def test_a_conversation_of_which_no_turn_fits_is_an_error_or_dropped():
    messages, counts = talk("a long question", "A"), Counter()
    with pytest.raises(DataError, match=r"of 1 turns .* ends after 36 tokens, max_length is 35"):
        encode_chat(messages, BYTES, max_length=35)
    sample = encode_chat(messages, BYTES, max_length=35, overlong="drop", counts=counts)
    assert len(sample.tokens) == len(sample.loss_mask) == 0
    assert counts["dropped"] == 1
    assert len(encode_chat(messages, BYTES, max_length=36).tokens) == 36


# -------------------------------------------------------------------------- checking and showing


def sample_of(tokens, trained):
    return Sample(np.array(tokens), np.array(trained, bool))


def test_a_mask_that_is_empty_or_full_or_never_stops_is_refused():
    check_mask(sample_of([5, 6, 9], [0, 1, 1]), stop_ids=[9])
    with pytest.raises(DataError, match="of 3 tokens none is trained on"):
        check_mask(sample_of([5, 6, 9], [0, 0, 0]), stop_ids=[9])
    with pytest.raises(DataError, match="of 0 tokens none is trained on"):
        check_mask(sample_of([], []), stop_ids=[9])
    with pytest.raises(DataError, match="all 3 tokens are trained on"):
        check_mask(sample_of([5, 6, 9], [1, 1, 1]), stop_ids=[9])
    with pytest.raises(DataError, match=r"of 1 trained tokens none is a stop token \(\[9\]\); 1"):
        check_mask(sample_of([5, 6, 9], [0, 1, 0]), stop_ids=[9])
    with pytest.raises(DataError, match="2 tokens have a mask of 1"):
        check_mask(sample_of([5, 6], [1]), stop_ids=[9])


def test_the_stop_token_is_found_in_any_template():
    assert find_stop_ids(BYTES, chatml) == find_stop_ids(BYTES, qwen3) == (260,)
    assert find_stop_ids(BYTES, llama3) == tuple(BYTES.encode("<|eot_id|>"))
    other = make_jinja_template("{% for m in messages %}{{ m.content }}$ {% endfor %}", stop="$")
    assert find_stop_ids(BYTES, other) == (ord("$"),)
    with pytest.raises(ValueError, match=r"<\|im_end\|>, for which the tokenizer has 10 tokens"):
        find_stop_ids(make_byte_tokenizer(), chatml)
    with pytest.raises(ValueError, match="without a stop token"):
        find_stop_ids(BYTES, lambda _: [])


def test_the_trained_part_is_coloured_and_special_tokens_are_seen():
    sample = encode_chat(talk("é", "ü"), BYTES)
    shown = format_mask(sample, BYTES)
    assert shown.endswith("<|im_start|>assistant\n\x1b[32mü<|im_end|>\x1b[0m\n")
    plain = shown.replace("\x1b[32m", "").replace("\x1b[0m", "")
    assert plain == "".join(segment.text for segment in chatml(talk("é", "ü")))
    assert format_mask(sample_of([97, 260], [0, 1]), Plain(BYTES), colour=False) == "a[[<260>]]"


# --------------------------------------------------------------------------------------- records


def test_records_become_samples_in_other_processes_too():
    encode = pickle.loads(pickle.dumps(make_chat_encoder(BYTES, template=qwen3)))
    assert encode.vocab_size == BYTES.vocab_size
    tools = [{"name": "f"}]
    with_tools = encode_chat(talk("Q", "A"), BYTES, template=qwen3, tools=tools)
    for value in (tools, json.dumps(tools)):
        sample = encode({"messages": talk("Q", "A"), "tools": value})
        assert sample.tokens.tolist() == with_tools.tokens.tolist()
    plain = encode({"messages": talk("Q", "A"), "tools": None})
    assert len(plain.tokens) < len(with_tools.tokens)


def test_the_labels_of_a_packed_batch_ask_for_what_is_trained_and_nothing_else():
    encode = make_chat_encoder(BYTES)
    samples = [encode({"messages": talk("Q" * i, "A" * i, "R", "B")}) for i in range(1, 6)]
    corpus = make_corpus(samples, vocab_size=BYTES.vocab_size)
    bins = pack_bins(corpus.lengths, capacity=160)
    labels = collate_bins(corpus, bins, list(range(len(bins))))["labels"]
    labels_in_loss = labels[labels != IGNORED_LABEL].tolist()
    order = [document for row in range(len(bins)) for document, _, _ in bins[row]]
    assert labels_in_loss == [
        t for i in order for t in samples[i].tokens[samples[i].loss_mask].tolist()
    ]


def test_records_that_are_wrong_are_refused():
    encode = make_chat_encoder(BYTES)
    with pytest.raises(DataError, match="no field 'messages'; it has text"):
        encode({"text": "a"})
    with pytest.raises(DataError, match="it has conversations; take field=messages_from_sharegpt"):
        encode({"conversations": []})
    with pytest.raises(DataError, match="none is trained on"):
        encode({"messages": talk("Q")})
    with pytest.raises(DataError, match=r"message 1 .*has no content"):
        encode({"messages": [*talk("Q"), {"role": "assistant"}]})
    with pytest.raises(DataError, match="'tools' is no JSON"):
        encode({"messages": talk("Q", "A"), "tools": "{"})
    with pytest.raises(DataError, match=r"'tools' must be a list of JSON schemas, got \[1\]"):
        encode({"messages": talk("Q", "A"), "tools": "[1]"})
    with pytest.raises(ValueError, match="10 tokens, where one is needed"):
        make_chat_encoder(make_byte_tokenizer())
    with pytest.raises(ValueError, match="make_chat_encoder: max_length must be at least 1, got 0"):
        make_chat_encoder(BYTES, max_length=0)
    with pytest.raises(ValueError, match="make_chat_encoder: overlong must be"):
        make_chat_encoder(BYTES, overlong="split")


def test_dropped_conversations_pass_the_check_and_are_counted(tmp_path):
    counts = Counter()
    encode = make_chat_encoder(BYTES, max_length=30, overlong="drop", counts=counts)
    assert len(encode({"messages": talk("a very long question", "A")}).tokens) == 0
    assert len(encode({"messages": talk("Q", "A")}).tokens) > 0
    assert +counts == {"conversations": 2, "turns_lost": 1, "dropped": 1, "answers": 2}
    assert encode.counts is counts
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"messages": talk("a very long question", "A")}))
    with pytest.raises(DataError, match="none has a token: 1 were dropped, as too long"):
        open_corpus(path, encode=make_chat_encoder(BYTES, max_length=30, overlong="drop"))
    own = pickle.loads(pickle.dumps(make_chat_encoder(BYTES)))
    own({"messages": talk("Q", "A")})
    assert own.counts["conversations"] == 1


def test_sharegpt_is_read_where_it_is_asked_for():
    turns = [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]
    record = {"conversations": turns, "system": "S"}
    assert messages_from_sharegpt(record) == [{"role": "system", "content": "S"}, *talk("Q", "A")]
    sample = make_chat_encoder(BYTES, field=messages_from_sharegpt)(record)
    assert trained_texts(sample) == ["A<|im_end|>"]
    with pytest.raises(DataError, match="no list `conversations`; it has messages"):
        messages_from_sharegpt({"messages": []})
    for turn in ({"from": "bot", "value": "x"}, {"from": "gpt"}, {"value": "x"}, "x"):
        with pytest.raises(DataError, match="turn 1 must have a `value`"):
            messages_from_sharegpt({"conversations": [turns[0], turn]})


def test_the_special_tokens_of_chatml_are_enough_for_it():
    tokenizer = make_byte_tokenizer(CHATML_SPECIAL)
    sample = encode_chat(talk("Q", "A"), tokenizer)
    check_mask(sample, stop_ids=find_stop_ids(tokenizer))
    assert sample.tokens[0] == 259
