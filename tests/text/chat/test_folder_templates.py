"""The chat template of a folder: ids as `transformers` has them, masks of the answers alone.

The templates are written for these tests, each in the way of a family: how it marks turns, where it
puts tools, what it demands of a conversation.
"""

import json
import re
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainkit.text.chat import (
    encode_chat,
    encode_prompt,
    find_stop_ids,
    read_stop_ids,
    read_template,
)
from trainkit.text.chat import sandbox as sandbox_module
from trainkit.text.chat.jinja import make_jinja_template
from trainkit.text.tokenizers import (
    make_byte_tokenizer,
    open_hf_tokenizer,
    save_tokenizer,
    train_bpe,
)
from trainkit.types import DataError

transformers = pytest.importorskip("transformers")

SPECIAL = (
    *("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|end_of_text|>"),
    *("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>"),
    *("[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
    *("[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "<bos>", "<start_of_turn>", "<end_of_turn>"),
    *("<|User|>", "<|Assistant|>", "<|end_of_sentence|>", "<|call|>", "<|call_end|>"),
)


def read(name):
    return (Path(__file__).parent / "templates" / f"{name}.jinja").read_text()


CHATML, THINKING, LLAMA3, MISTRAL, LLAMA2, GEMMA, DEEPSEEK, VICUNA, GENERATION, PIECES = map(
    read,
    (
        "chatml",
        "thinking",
        "llama3",
        "mistral",
        "llama2",
        "gemma",
        "deepseek",
        "vicuna",
        "generation",
        "pieces",
    ),
)


def user(text):
    return {"role": "user", "content": text}


def answer(text, **fields):
    return {"role": "assistant", "content": text, **fields}


def call(name, arguments):
    function = {"name": name, "arguments": arguments}
    return {"type": "function", "id": "abcdefghi", "function": function}


def result(text):
    return {"role": "tool", "content": text, "tool_call_id": "abcdefghi", "name": "add"}


SYSTEM = {"role": "system", "content": "Be short."}
TALK = [user("Hi <|im_end|> there?"), answer("Hello."), user("Hello."), answer("Hello.")]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"a": "number"}}}]
CALLS = {"role": "assistant", "tool_calls": [call("add", {"a": 1})]}
TEXT_CALLS = {"role": "assistant", "content": None, "tool_calls": [call("add", '{"a": 1}')]}
CALLED = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>'
WORKS = [user("1+1?"), CALLS, result("2"), answer("Two.")]
THOUGHT = [user("a"), answer("b", reasoning_content="hm"), user("c"), answer("d")]
NESTED = '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}, "id": "abcdefghi"}]</s>'

ROWS = {
    "chatml": (CHATML, [SYSTEM, *TALK], None, ["Hello.<|im_end|>", "Hello.<|im_end|>"]),
    "chatml tools": (CHATML, WORKS, TOOLS, [CALLED, "Two.<|im_end|>"]),
    "chatml words and calls": (
        CHATML,
        [user("?"), {**CALLS, "content": "So"}, result("2"), result("3"), answer("Two.")],
        TOOLS,
        ["So\n" + CALLED, "Two.<|im_end|>"],
    ),
    "qwen3": (THINKING, THOUGHT, None, ["b<|im_end|>", "d<|im_end|>"]),
    "qwen3 thinks": (
        THINKING,
        [SYSTEM, *THOUGHT, user("e"), answer("f", reasoning_content="so")],
        None,
        ["b<|im_end|>", "d<|im_end|>", "<think>\nso\n</think>\n\nf<|im_end|>"],
    ),
    "qwen3 thinks in its words": (
        THINKING,
        [user("a"), answer("<think>\nx\n</think>\n\nb"), user("c"), answer("<think>y</think>d")],
        None,
        ["b<|im_end|>", "<think>\ny\n</think>\n\nd<|im_end|>"],
    ),
    "qwen3 tools": (
        THINKING,
        [*WORKS[:1], {**CALLS, "reasoning_content": "I add"}, *WORKS[2:]],
        None,
        ["<think>\nI add\n</think>\n\n" + CALLED, "Two.<|im_end|>"],
    ),
    "llama3": (LLAMA3, [SYSTEM, *TALK], None, ["Hello.<|eot_id|>"] * 2),
    "llama3 tools": (
        LLAMA3,
        WORKS,
        TOOLS,
        ['{"name": "add", "parameters": {"a": 1}}<|eot_id|>', "Two.<|eot_id|>"],
    ),
    "llama3 code": (
        LLAMA3,
        [
            WORKS[0],
            {"role": "assistant", "tool_calls": [call("python", {"code": "1+1"})]},
            *WORKS[2:],
        ],
        TOOLS,
        ["<|python_tag|>1+1<|eom_id|>", "Two.<|eot_id|>"],
    ),
    "mistral": (MISTRAL, [SYSTEM, *TALK], None, [" Hello.</s>"] * 2),
    "mistral tools": (MISTRAL, WORKS, TOOLS, [NESTED, " Two.</s>"]),
    "mistral tools, earlier": (
        MISTRAL,
        [*WORKS, user("And?"), answer(" No. ")],
        TOOLS,
        [NESTED, " Two.</s>", " No.</s>"],
    ),
    "mistral calls last": (MISTRAL, WORKS[:2], TOOLS, [NESTED]),
    "llama2": (LLAMA2, [SYSTEM, *TALK], None, [" Hello. </s>"] * 2),
    "gemma": (GEMMA, TALK, None, ["Hello.<end_of_turn>"] * 2),
    "deepseek": (DEEPSEEK, TALK, None, ["Hello.<|end_of_sentence|>"] * 2),
    "deepseek thinks and calls": (
        DEEPSEEK,
        [user("a"), answer("x</think>b"), WORKS[0], TEXT_CALLS, *WORKS[2:]],
        None,
        [
            "b<|end_of_sentence|>",
            '<|call|>add\n{"a": 1}<|call_end|><|end_of_sentence|>',
            "Two.<|end_of_sentence|>",
        ],
    ),
    "vicuna": (VICUNA, [SYSTEM, *TALK], None, [" Hello.</s>"] * 2),
    "marked": (GENERATION, [SYSTEM, *TALK], None, ["Hello.<|im_end|>"] * 2),
    "marked in pieces": (
        PIECES,
        [SYSTEM, *TALK, user("e"), answer("f", reasoning_content="so")],
        None,
        ["Hello.<|im_end|>", "Hello.<|im_end|>", "<think>\nso\n</think>", "f<|im_end|>"],
    ),
    "marked in pieces, tools": (
        PIECES,
        [*WORKS[:1], {**CALLS, "reasoning_content": "I add"}, *WORKS[2:]],
        None,
        ["<think>\nI add\n</think>", CALLED, "Two.<|im_end|>"],
    ),
}
ENDS = {CHATML: "<|im_end|>", THINKING: "<|im_end|>", LLAMA3: "<|eot_id|>"}
ENDS |= {GEMMA: "<end_of_turn>", DEEPSEEK: "<|end_of_sentence|>", GENERATION: "<|im_end|>"}
ENDS |= {PIECES: "<|im_end|>"}
BEGINS = {LLAMA3: "<|begin_of_text|>", GEMMA: "<bos>"}


@pytest.fixture(scope="module")
def base():
    return train_bpe(
        ["Hello. there Two. tool_call name arguments " * 3], vocab_size=400, special=SPECIAL
    )


def write_folder(home, base, source, settings=None):
    """Write the files of a tokenizer with a template, as a model folder has them."""
    save_tokenizer(base, home / "tokenizer.json")
    flags = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False)
    eos = {"__type": "AddedToken", "content": "</s>", **flags}
    config = {"bos_token": BEGINS.get(source, "<s>"), "eos_token": eos, "add_bos_token": True}
    config |= settings or {}
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    (home / "tokenizer_config.json").write_text(json.dumps(config))
    if isinstance(source, str):
        (home / "chat_template.jinja").write_text(source)
    return home


@pytest.fixture
def folder(tmp_path, base):
    return partial(write_folder, tmp_path, base)


def answers_of(sample, tokenizer):
    """Return the texts of the runs of trained tokens."""
    texts, last = [], False
    for i, trained in zip(sample.tokens.tolist(), sample.loss_mask.tolist(), strict=True):
        if trained and not last:
            texts.append([])
        if trained:
            texts[-1].append(i)
        last = trained
    return [tokenizer.backend.decode(ids, skip_special_tokens=False) for ids in texts]


@pytest.mark.parametrize("name", ROWS)
def test_ids_are_those_of_transformers_and_the_mask_is_the_answers(name, folder):
    source, messages, tools, want = ROWS[name]
    home = folder(source)
    (home / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [open_hf_tokenizer(home).special_ids["<|eom_id|>"]]})
    )
    template, tokenizer = read_template(home), open_hf_tokenizer(home)
    theirs = transformers.AutoTokenizer.from_pretrained(home)
    sample = encode_chat(messages, tokenizer, template=template, tools=tools)
    assert sample.tokens.tolist() == theirs.apply_chat_template(
        messages, tools=tools, return_dict=False
    )
    assert answers_of(sample, tokenizer) == want
    stop = tokenizer.special_ids[ENDS.get(source, "</s>")]
    assert find_stop_ids(tokenizer, template) == (stop,)
    if source in (GENERATION, PIECES):
        marked = theirs.apply_chat_template(
            messages, return_dict=True, return_assistant_tokens_mask=True
        )
        assert sample.loss_mask.tolist() == [bool(x) for x in marked["assistant_masks"]]
    if tools is None:
        assert encode_prompt(messages[:-1], tokenizer, template=template) == (
            theirs.apply_chat_template(messages[:-1], add_generation_prompt=True, return_dict=False)
        )


def test_an_answers_prompt_and_its_trained_tokens_are_the_conversation(folder):
    """The prompt of an answer, and the answer, follow each other without a gap."""
    for source in (CHATML, LLAMA3, MISTRAL, GEMMA, VICUNA, LLAMA2):
        home = folder(source)
        template, tokenizer = read_template(home), open_hf_tokenizer(home)
        sample = encode_chat(TALK, tokenizer, template=template, train="last")
        prompt = encode_prompt(TALK[:-1], tokenizer, template=template)
        assert sample.tokens[: len(prompt)].tolist() == prompt
        assert int(sample.loss_mask.argmax()) == len(prompt), source


WORDS = st.lists(
    st.sampled_from(["a", " b", "\n", "</s>", "<|im_end|>", "[/INST]", "[INST] ", "[TOOL_CALLS]"])
    | st.sampled_from(["<|im_start|>assistant\n", "<start_of_turn>model\n", "<end_of_turn>", "{{"]),
    max_size=4,
).map("".join)
SAYS = {
    "chatml": (CHATML, lambda text: text + "<|im_end|>"),
    "gemma": (GEMMA, lambda text: text.strip() + "<end_of_turn>"),
    "mistral": (MISTRAL, lambda text: " " + text.strip() + "</s>"),
    "llama3": (LLAMA3, lambda text: text.strip() + "<|eot_id|>"),
}


@pytest.mark.parametrize("name", SAYS)
@given(turns=st.lists(st.tuples(WORDS, WORDS.filter(bool)), min_size=1, max_size=3))
def test_answers_are_found_whatever_is_said(name, turns):
    source, shown = SAYS[name]
    stops = ["</s>", shown("").strip()]
    talk = [m for question, words in turns for m in (user(question), answer(words))]
    template = make_jinja_template(source, bos_token="<s>", eos_token="</s>", stop=stops)
    segments = template(talk)
    found = [(s.message, s.text) for s in segments if s.body and s.message % 2]
    assert found == [(2 * i + 1, shown(words)) for i, (_, words) in enumerate(turns)]


# ----------------------------------------------------------------- whose is what a template marks

IN_LOOP = "{% for m in messages %}{% if m.role == 'assistant' %}BODY{% else %}Q{{ m.content }}$"
IN_LOOP += "{% endif %}{% endfor %}"
MARKED = "{% generation %}WORDS${% endgeneration %}"
THINKS = "{% if m.reasoning_content %}" + MARKED.replace("WORDS", "<{{ m.reasoning_content }}>")
THINKS += "{% endif %}"
LAST = "{% if loop.last %}" + THINKS + MARKED.replace("WORDS", "{{ m.content }}") + "{% else %}"
LAST += "{{ m.content }}${% endif %}"
ANSWER = MARKED.replace("WORDS", "{{ m.content }}")
MACRO = "{% macro show(m) %}" + THINKS + ANSWER + "{% endmacro %}"
BY_NUMBER = IN_LOOP.replace("for m in messages", "for i in range(messages | length)")
BY_NUMBER = BY_NUMBER.replace("m.", "messages[i].")
BEFORE = "{% set before = messages[loop.index0 - 2] %}"
PLAIN = [user("a"), answer("b"), user("c"), answer("d")]
REASONED = [*PLAIN[:3], answer("d", reasoning_content="e")]


@pytest.mark.parametrize(
    ("source", "want"),
    [
        (IN_LOOP.replace("BODY", THINKS + ANSWER), {1: ["b$"], 3: ["<e>$", "d$"]}),
        # Two answers and two pieces, and both pieces are of the last.
        (IN_LOOP.replace("BODY", LAST), {3: ["<e>$", "d$"]}),
        (MACRO + IN_LOOP.replace("BODY", "{{ show(m) }}"), {1: ["b$"], 3: ["<e>$", "d$"]}),
        (
            "{% set last = messages[-1] %}" + IN_LOOP.replace("BODY", ANSWER),
            {1: ["b$"], 3: ["d$"]},
        ),
        (IN_LOOP.replace("BODY", BEFORE + ANSWER), {1: ["b$"], 3: ["d$"]}),
        (
            BY_NUMBER.replace("BODY", ANSWER.replace("m.", "messages[i].")),
            {1: ["b$"], 3: ["d$"]},
        ),
        (
            # The variable in scope is another answer than the one that is shown.
            "{% set m = messages[3] %}"
            + BY_NUMBER.replace("BODY", ANSWER.replace("m.", "messages[i].")),
            {1: ["b$"], 3: ["d$"]},
        ),
        (
            IN_LOOP.replace("BODY", "{% set m = dict(m, content=m.content | trim) %}" + ANSWER),
            {1: ["b$"], 3: ["d$"]},
        ),
    ],
    ids=["loop", "last", "macro", "named", "before", "number", "other", "copy"],
)
def test_a_marked_piece_is_of_the_message_it_is_rendered_from(source, want):
    messages = REASONED if "reasoning_content" in source else PLAIN
    segments = make_jinja_template(source, eos_token="$")(messages)
    found = {}
    for segment in segments:
        if segment.body:
            found.setdefault(segment.message, []).append(segment.text)
    assert found == want
    unmarked = re.sub("{% (end)?generation %}", "", source)
    text = "".join(segment.text for segment in segments)
    assert text == "".join(s.text for s in make_jinja_template(unmarked, eos_token="$")(messages))


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        (
            IN_LOOP.replace("BODY", "{{ m.content }}$") + MARKED.replace("WORDS", "."),
            r"marks '.\$' by generation, and it cannot be known which answer",
        ),
        (
            IN_LOOP.replace("BODY", "{{ m.content }}$").replace("Q{{ m.content }}$", ANSWER),
            r"marks 'a\$' by generation, and it cannot be known which answer",
        ),
        (
            IN_LOOP.replace("BODY", MARKED.replace("WORDS", "{{ messages[1].content }}")),
            r"message 3 \(assistant\) is not to be found",
        ),
        (
            IN_LOOP.replace(
                "BODY", MARKED.replace("WORDS", "{{ messages[1].content }}{{ m.content }}")
            ),
            "cannot be known which answer",
        ),
        (
            IN_LOOP.replace("in messages", "in messages[::-1]").replace("BODY", ANSWER),
            "shows message 1 after message 3",
        ),
    ],
    ids=["after", "user's", "of another", "of two", "backwards"],
)
def test_a_piece_of_which_it_cannot_be_known_is_refused(source, complaint):
    with pytest.raises(DataError, match=complaint):
        encode_chat(
            PLAIN, make_byte_tokenizer(), template=make_jinja_template(source, eos_token="$")
        )


# ------------------------------------------------------------------------------------- the folder


def test_of_several_templates_the_one_for_tools_is_taken_where_there_are_tools(folder):
    home = folder(
        None,
        {
            "chat_template": [
                {"name": "default", "template": GEMMA.replace("<bos>", "")},
                {"name": "tool_use", "template": CHATML},
            ]
        },
    )
    theirs = transformers.AutoTokenizer.from_pretrained(home)
    for tools, talk in ((None, TALK), (TOOLS, WORKS)):
        text = "".join(s.text for s in read_template(home)(talk, tools=tools))
        assert text == theirs.apply_chat_template(talk, tools=tools, tokenize=False)
    text = "".join(s.text for s in read_template(home, name="tool_use")(TALK))
    assert text == theirs.apply_chat_template(TALK, chat_template="tool_use", tokenize=False)
    with pytest.raises(DataError, match="no chat template 'rag'; it has default, tool_use"):
        read_template(home, name="rag")


def test_every_place_of_a_template_is_read_and_files_of_its_own_go_first(folder):
    home = folder(None)
    with pytest.raises(DataError, match="has no chat template; it has none"):
        read_template(home)
    shown = "".join
    (home / "chat_template.json").write_text(json.dumps({"chat_template": VICUNA}))
    assert shown(s.text for s in read_template(home)(TALK[:1])).startswith("USER")
    folder(None, {"chat_template": CHATML})
    assert shown(s.text for s in read_template(home)(TALK[:1])).startswith("<|im_start|>")
    folder(GEMMA, {"chat_template": CHATML})
    assert shown(s.text for s in read_template(home)(TALK[:1])).startswith("<bos>")
    (home / "additional_chat_templates").mkdir()
    (home / "additional_chat_templates" / "tool_use.jinja").write_text(LLAMA3)
    text = shown(s.text for s in read_template(home)(WORKS[:1], tools=TOOLS))
    assert "Environment" in text
    theirs = transformers.AutoTokenizer.from_pretrained(home)
    assert text == theirs.apply_chat_template(WORKS[:1], tools=TOOLS, tokenize=False)


def test_names_that_a_template_reads_are_given(folder):
    template = read_template(folder(THINKING), variables={"enable_thinking": False})
    text = "".join(s.text for s in template(TALK[:1], add_generation_prompt=True))
    assert text.endswith("<think>\n\n</think>\n\n")


def test_the_ids_that_generation_stops_at_are_the_folders(folder):
    home = folder(CHATML)
    assert read_stop_ids(home) == ()
    (home / "config.json").write_text('{"eos_token_id": 5}')
    assert read_stop_ids(home) == (5,)
    (home / "generation_config.json").write_text('{"eos_token_id": [3, 5]}')
    assert read_stop_ids(home) == (3, 5)
    (home / "generation_config.json").write_text('{"eos_token_id": "x"}')
    with pytest.raises(DataError, match="eos_token_id is 'x', no id"):
        read_stop_ids(home)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"chat_template": 3}, "chat_template must be a text"),
        ({"chat_template": ["x"]}, "chat_template must be a text"),
        ({"chat_template": [{"name": "default"}]}, "chat_template must be a text"),
        ({"chat_template": "{% for %}"}, "is no Jinja"),
        ({"chat_template": "{{ messages[0].content }}", "eos_token": None}, "with no token of"),
    ],
)
def test_a_template_that_is_none_is_refused_by_name(settings, complaint, folder):
    with pytest.raises(ValueError, match=complaint):
        read_template(folder(None, settings))


# ---------------------------------------------------------------------------- what is ambiguous


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        (
            GENERATION.replace("{%- generation %}", "{%- if 1 %}")
            .replace("{% endgeneration %}", "{% endif %}{% generation %}{% endgeneration %}")
            .replace(
                "message.role == 'assistant' %}", "message.role == 'assistant' and loop.last %}", 1
            ),
            r"message 1 \(assistant\) is not to be found",
        ),
        (
            CHATML.replace("'\\n' + message.content }}", "'\\n' + message.content | upper }}"),
            r"message 1 \(assistant\) is not to be found",
        ),
        (
            CHATML.replace("'\\n' + message.content }}", "'\\n' + message.content[::-1] }}"),
            r"message 1 \(assistant\) is not to be found",
        ),
        (CHATML + "{{ messages[1].content }}", r"message 1 \(assistant\) is not to be found"),
    ],
)
def test_a_conversation_whose_answers_cannot_be_told_is_refused(source, complaint, folder):
    home = folder(source)
    with pytest.raises(DataError, match=complaint):
        encode_chat(TALK, open_hf_tokenizer(home), template=read_template(home))


def test_marks_that_the_template_changes_are_refused(folder):
    source = GENERATION.replace(
        "{%- generation %}", "{%- set x %}{% generation %}{{ '  ' }}"
    ).replace("{% endgeneration %}", "{% endgeneration %}{% endset %}{{ x | trim }}")
    home = folder(source)
    with pytest.raises(DataError, match="marks by generation, it changes"):
        encode_chat(TALK, open_hf_tokenizer(home), template=read_template(home))


# ---------------------------------------------------------------------------------------- hostile


GROWN = (
    "{% set n = namespace(s=BEGIN) %}{% for i in range(60) %}STEP{% set n.s = NEXT %}{% endfor %}"
)
GROWTHS = [
    ("'aa'", "", "n.s ~ n.s"),
    ("'aa'", "", "n.s + n.s"),
    ("[1]", "", "n.s + n.s"),
    ("'aa'", "{% set t %}{{ n.s }}{{ n.s }}{% endset %}", "t"),
    ("'aa'", "", "n.s.replace('a', n.s)"),
    ("'aa'", "", "n.s | replace('a', n.s)"),
]


@pytest.mark.parametrize(
    "source",
    [
        *(GROWN.replace("BEGIN", a).replace("STEP", b).replace("NEXT", c) for a, b, c in GROWTHS),
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) %}{% for b in range(99999) if b < 0 %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{{ f(n) }}{{ f(n) }}{% endmacro %}{{ f(1) }}",
        "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(99) }}",
        "{{ 'a' * 9999999999 }}",
        "{{ [1] * 9999999999 }}",
        "{{ 9 ** 9 ** 9 ** 9 }}",
        "{{ range(99999) | join('a' * 9999) }}",
        "{{ ('a' * 9999).join(range(99999) | map('string')) }}",
        "{{ '%999999999d' % 1 }}",
        "{{ '{:999999999}'.format(1) }}",
        "{{ '%999999999d' | format(1) }}",
        "{{ 'a'.center(999999999) }}",
        "{{ 'a' | center(999999999) }}",
        "{{ 'a\\nb' | indent(999999999) }}",
        "{{ ('\\t' * 99999).expandtabs(99999) }}",
        "{{ [[1]] | tojson(indent=999999999) }}",
        "{{ 'aaa'.translate({97: 'b' * 99999}) }}",
        "{% for i in range(99999) %}{{ 'a' * 9999 }}{% endfor %}",
        "{{ lipsum(9999) }}",
        "{% for i in range(99999) %}{% generation %}{% endgeneration %}{% endfor %}",
        "{{ ''['__cla' ~ 'ss__'].mro() }}",
        "{{ (messages | attr('__cla' ~ 'ss__')).mro() }}",
        "{{ cycler.next.x.y }}",
        "{{ messages.clear() }}",
        "{{ raise_exception('no') }}",
    ],
)
def test_a_template_that_would_never_end_or_fill_the_memory_is_refused(source, monkeypatch):
    monkeypatch.setattr(sandbox_module, "_MAX_COST", 1 << 21)
    with pytest.raises(DataError, match=r"the template refuses these messages \(user\)"):
        make_jinja_template(source, eos_token="$")([user("a")])


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("{% include '/etc/passwd' %}", "line 1 asks for another file"),
        ("{% import 'os' as os %}", "line 1 asks for another file"),
        ("{% from 'os' import path %}", "line 1 asks for another file"),
        ("{% extends 'base' %}", "line 1 asks for another file"),
        ("{{ messages.__class__ }}", "__class__, of Python's insides"),
        ("{{ ''['__class__'] }}", "__class__, of Python's insides"),
    ],
)
def test_a_template_that_asks_for_files_or_pythons_insides_is_refused_at_once(source, complaint):
    with pytest.raises(ValueError, match=complaint):
        make_jinja_template(source, eos_token="$")


def test_a_long_conversation_is_no_hostile_one(folder):
    home = folder(CHATML)
    talk = [user("a" * 20_000), answer("b" * 20_000)] * 20
    text = "".join(s.text for s in read_template(home)(talk))
    assert len(text) > 800_000
