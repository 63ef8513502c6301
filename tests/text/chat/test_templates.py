"""Templates say what `transformers` says, and whose words are whose.

The golden texts were rendered by `transformers` from the official templates, of which the
repository holds no copy.
"""

import json
import pickle
import re
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainkit.text.chat.encode import encode_chat, find_stop_ids
from trainkit.text.chat.jinja import make_jinja_template
from trainkit.text.chat.messages import normalize_messages
from trainkit.text.chat.templates import TEMPLATES, chatml, llama3, qwen3
from trainkit.text.tokenizers import make_byte_tokenizer, open_tokenizer
from trainkit.text.tokenizers.special import CHATML_SPECIAL, LLAMA3_SPECIAL, QWEN3_SPECIAL
from trainkit.types import ConfigError, DataError

NATIVE = {"chatml": chatml, "llama3": llama3, "qwen3": qwen3}
STOP = {"chatml": "<|im_end|>", "llama3": "<|eot_id|>", "qwen3": "<|im_end|>"}
GOLDEN = [
    pytest.param(name, row, id=f"{name}: {row['name']}")
    for name in NATIVE
    for row in json.loads((Path(__file__).parent / f"golden/{name}.json").read_text())
]

# Written for these tests: ChatML, and a template that shows reasoning in the last answer alone.
CHATML_JINJA = """\
{%- for m in messages %}
    {{- '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ eos_token ~ '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""
THINKING_JINJA = """\
{%- for m in messages %}
    {{- '[' ~ m.role ~ ']' }}
    {%- if loop.last and m.reasoning_content is defined %}
        {{- '(' ~ m.reasoning_content ~ ')' }}
    {%- elif loop.last and m.role == 'assistant' %}
        {{- '()' }}
    {%- endif %}
    {{- m.content.split(')')[-1] | trim }}
    {%- for call in m.tool_calls or [] %}
        {{- '!' ~ call.function.name ~ call.function.arguments | tojson }}
    {%- endfor %}
    {{- eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '[assistant]' }}{% endif %}
"""


def user(text):
    return {"role": "user", "content": text}


def answer(text, **fields):
    return {"role": "assistant", "content": text, **fields}


def calling(*names):
    return [{"function": {"name": name, "arguments": {"x": "é"}}} for name in names]


def text_of(segments):
    return "".join(segment.text for segment in segments)


def texts_by(segments, messages, roles=("assistant",)):
    """Return, character by character, the message that says it, or None."""
    return [
        segment.message if segment.body and messages[segment.message]["role"] in roles else None
        for segment in segments
        for _ in segment.text
    ]


def bodies(segments):
    return {segment.message: segment.text for segment in segments if segment.body}


@pytest.mark.parametrize(("name", "row"), GOLDEN)
def test_a_native_template_renders_what_transformers_renders(name, row):
    segments = NATIVE[name](
        row["messages"],
        tools=row.get("tools"),
        add_generation_prompt=row.get("add_generation_prompt", False),
        **row.get("arguments", {}),
    )
    assert text_of(segments) == row["text"]
    answers = {i for i, m in enumerate(row["messages"]) if m["role"] == "assistant"}
    assert answers <= set(bodies(segments))
    for segment in segments:
        if segment.message in answers:
            assert segment.body == segment.text.endswith(STOP[name])
            assert "assistant" not in segment.text or not segment.body


def test_there_are_a_dozen_golden_conversations_of_each_template():
    names = [param.values[0] for param in GOLDEN]
    assert all(names.count(name) >= 12 for name in NATIVE)


@pytest.mark.parametrize(
    ("template", "special"),
    [(chatml, CHATML_SPECIAL), (llama3, LLAMA3_SPECIAL), (qwen3, QWEN3_SPECIAL)],
)
def test_the_special_tokens_are_those_that_a_template_writes(template, special):
    messages = [user("a"), answer("b", reasoning_content="c")]
    if template is not chatml:
        tool = {"role": "tool", "content": "t"}
        messages[1:1] = [answer("", tool_calls=calling("f")), tool]
    text = text_of(template(messages))
    assert [token for token in special if token not in text] == []
    left = text
    for token in special:
        left = left.replace(token, "")
    assert "<|" not in left
    assert "<think" not in left


def test_the_block_that_qwen_adds_where_there_is_no_reasoning_is_no_words_of_the_model():
    last, before = qwen3([user("a"), answer("b")]), qwen3([user("a"), answer("b"), user("c")])
    assert [p.text for p in last if p.message == 1][:2] == [
        "<|im_start|>assistant\n<think>\n\n</think>\n\n",
        "b<|im_end|>",
    ]
    assert next(p.text for p in before if p.message == 1) == "<|im_start|>assistant\n"
    thought = qwen3([user("a"), answer("b", reasoning_content="hm")])
    assert bodies(thought)[1] == "<think>\nhm\n</think>\n\nb<|im_end|>"


@pytest.mark.parametrize(
    ("template", "messages", "complaint"),
    [
        (chatml, [], "list of at least one message"),
        (chatml, {"role": "user", "content": "x"}, "list of at least one message"),
        (chatml, "hi", "list of at least one message"),
        (chatml, [user("a"), "b"], "message 1 must be a mapping, got 'b'"),
        (chatml, [{"content": "a"}], "message 0 has no role, it has content"),
        (chatml, [{"role": "bot", "content": "a"}], r"message 0 \(bot\) has the role 'bot'"),
        (chatml, [user("a"), {"role": "assistant"}], r"message 1 \(assistant\) has no content"),
        (chatml, [user("a"), answer(None)], r"message 1 \(assistant\) has no content"),
        (chatml, [user(3)], r"message 0 \(user\) has content that is no text: 3"),
        (chatml, [user([{"type": "image"}])], r"message 0 .*part of content that is no text"),
        (chatml, [user("a"), answer("", tool_calls=calling("f"))], "message 1 .*no place"),
        (chatml, [{"role": "tool", "content": "a"}], r"message 0 \(tool\) comes first"),
        (chatml, [user("a"), {"role": "tool", "content": "a"}], "message 1 .*follows a user"),
        (qwen3, [user("a"), {"role": "developer", "content": "a"}], "message 1 .*does not know"),
        (qwen3, [{**user("a"), "tool_calls": calling("f")}], "message 0 .*only an assistant"),
        (qwen3, [user("a"), answer("", tool_calls="f")], "message 1 .*no list"),
        (qwen3, [user("a"), answer("", tool_calls=[{"name": "f"}])], "call 0 without arguments"),
        (qwen3, [user("a"), answer("", tool_calls=[{"arguments": {}}])], "call 0 without a name"),
        (qwen3, [user("a"), answer("b", reasoning=3)], "message 1 .*reasoning that is no text"),
        (llama3, [user("a"), answer("", tool_calls=calling("f", "g"))], "message 1 .*2 tool_calls"),
        (partial(llama3, tools=[{}]), [answer("a")], "message 0 .*must hold the tools"),
        (partial(llama3, tools=[{}]), [{"role": "system", "content": "a"}], "there is none"),
    ],
)
def test_wrong_messages_are_refused_by_number(template, messages, complaint):
    with pytest.raises(DataError, match=complaint):
        template(messages)


def test_chatml_refuses_tools_that_it_cannot_show():
    with pytest.raises(ValueError, match="1 tools, for which ChatML has no place"):
        chatml([user("a")], tools=[{}])


def test_parts_of_text_are_joined_and_missing_fields_of_a_table_are_dropped():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert normalize_messages([{"role": "user", "content": parts, "tool_calls": None}]) == [
        user("ab")
    ]
    assert "tool_calls" not in normalize_messages([user("a"), answer("b", tool_calls=[])])[1]
    other = normalize_messages([user("a"), answer("b", reasoning="c")])
    assert other[1]["reasoning_content"] == "c"
    flat = answer(None, tool_calls=[{"name": "f", "arguments": "{}"}])
    assert normalize_messages([user("a"), flat])[1]["tool_calls"] == [
        {"function": {"name": "f", "arguments": "{}"}}
    ]


# --------------------------------------------------------------------------------------- Jinja


@pytest.mark.parametrize(
    "row",
    [param.values[1] for param in GOLDEN if param.values[0] == "chatml"],
    ids=lambda r: r["name"],
)
def test_a_jinja_template_gives_the_pieces_of_the_native_one(row):
    messages, prompt = row["messages"], row.get("add_generation_prompt", False)
    template = make_jinja_template(CHATML_JINJA, eos_token="<|im_end|>")
    native = chatml(messages, add_generation_prompt=prompt)
    found = template(messages, add_generation_prompt=prompt)
    assert text_of(found) == row["text"]
    everyone = ("system", "user", "assistant")
    assert texts_by(found, messages, everyone) == texts_by(native, messages, everyone)


WORDS = st.lists(
    st.sampled_from(["", " ", "a", "b\n", "<|im_end|>", "<|im_start|>assistant\n", "{{", "é", ")"]),
    max_size=4,
).map("".join)


@given(st.lists(st.tuples(st.sampled_from(["system", "user", "assistant"]), WORDS), min_size=1))
def test_a_jinja_template_finds_every_word_whatever_is_said(turns):
    messages = [{"role": role, "content": content} for role, content in turns]
    found = make_jinja_template(CHATML_JINJA, eos_token="<|im_end|>")(messages)
    assert bodies(found) == {p.message: p.text for p in chatml(messages) if p.body}
    assert texts_by(found, messages) == texts_by(chatml(messages), messages)


@st.composite
def thinking_conversations(draw):
    messages = [user("q")]
    for _ in range(draw(st.integers(1, 4))):
        message = {"role": draw(st.sampled_from(["user", "assistant"])), "content": draw(WORDS)}
        if message["role"] == "assistant" and draw(st.booleans()):
            message["reasoning_content"] = draw(WORDS)
        if message["role"] == "assistant" and draw(st.booleans()):
            message["tool_calls"] = calling("f", "g")
        messages.append(message)
    return messages


@given(thinking_conversations())
def test_words_are_found_in_a_template_that_rewrites_what_came_before(messages):
    """The last answer shows its reasoning, or an empty one that is not its own; no other does."""
    found = make_jinja_template(THINKING_JINJA, eos_token="$")(messages)
    shown = bodies(found)
    for i, message in enumerate(messages):
        words = message["content"].split(")")[-1].strip()
        words += "".join(
            f'!{c["function"]["name"]}{{"x": "é"}}' for c in message.get("tool_calls", ())
        )
        thoughts = message.get("reasoning_content")
        if i == len(messages) - 1 and thoughts:
            words = f"({thoughts}){words}"
        assert shown[i] == words + "$"


READS = {
    "m.NAME": "{% if m.NAME is defined %}({{ m.NAME }}){% endif %}",
    "m['NAME']": "{% if 'NAME' in m %}({{ m['NAME'] }}){% endif %}",
    "m.get": "{% if m.get('NAME') %}({{ m.get('NAME') }}){% endif %}",
    "either": "{% for x in [m.NAME, m.reasoning] if x is defined %}({{ x }}){% endfor %}",
}
NAMES = ("reasoning_content", "thinking", "reasoning")


@pytest.mark.parametrize("way", READS)
def test_reasoning_reaches_the_name_that_a_template_reads(way):
    for read in NAMES[: 1 if way == "either" else 3]:
        shown = READS[way].replace("NAME", read)
        source = (
            f"{{% for m in messages %}}[{{{{ m.role }}}}]{shown}{{{{ m.content }}}}${{% endfor %}}"
        )
        template = make_jinja_template(source, eos_token="$")
        for name in NAMES:
            found = template([user("a"), answer("b") | {name: "hm"}])
            assert text_of(found) == "[user]a$[assistant](hm)b$", (read, name)


def test_reasoning_that_a_template_does_not_read_is_not_lost_without_a_word():
    source = (
        "{% set thinking = 1 %}{% for m in messages %}[{{ m.role }}]{{ m.content }}${% endfor %}"
    )
    template = make_jinja_template(source, eos_token="$")
    with pytest.raises(
        DataError, match=r"message 1 \(assistant\) has reasoning, of which the temp"
    ):
        template([user("a"), answer("b", reasoning_content="hm")])
    assert text_of(template([user("a"), answer("b", thinking="\n")])) == "[user]a$[assistant]b$"


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}[{{ m.role }}]{{ m.content | upper }}${% endfor %}",
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ m.content }}${% endfor %}",
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}|{% endfor %}",
        "{% for m in messages %}[{{ m.role }}]{{ m.content | length }}${% endfor %}",
        "{% for m in messages | reverse %}{{ m.content }}${{ messages[1].content }}{% endfor %}",
        "{% for m in messages %}{{ m.content }}${% endfor %}{{ messages[1].content | length }}",
    ],
)
def test_words_that_cannot_be_told_apart_have_no_body(source):
    segments = make_jinja_template(source, eos_token="$")([user("a"), answer("b")])
    assert 1 not in bodies(segments)


@pytest.mark.parametrize("earlier", ["m.content", "m.content | upper"])
def test_another_turns_header_is_not_taken_for_that_of_a_turn_without_one(earlier):
    source = (
        "{%- for m in messages %}{% if loop.last and m.role == 'assistant' %}"
        "[end]({{ m.reasoning_content }}){{ m.content }}$"
        "{% else %}[{{ m.role }}]{{ EARLIER }}${% endif %}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    template = make_jinja_template(source.replace("EARLIER", earlier), eos_token="$")
    messages = [user("a"), answer("b"), answer("c", reasoning_content="d")]
    assert 2 not in bodies(template(messages))
    assert bodies(template([*messages[:2], answer("c")]))[2] == "c$"


def test_messages_that_a_template_swaps_are_refused():
    source = "{% for m in messages | reverse %}{{ m.content }}${% endfor %}"
    with pytest.raises(DataError, match="message 1 is shown before"):
        make_jinja_template(source, eos_token="$")([user("a"), answer("b")])


def test_a_jinja_template_has_what_transformers_gives_it():
    source = """\
{%- generation -%} {{ bos_token }}{{ {'a': 'é<'} | tojson }}{{ mood }} {%- endgeneration %}
{{- strftime_now('%Y') | length }}
{%- for m in messages %}
    {% if loop.index0 == 1 %}
        {%- break %}
    {% endif %}
    {{- m.content }}$
{%- endfor %}"""
    template = make_jinja_template(source, bos_token="<s>", eos_token="$", variables={"mood": "!"})
    segments = template([user("a"), answer("b")])
    assert text_of(segments) == '<s>{"a": "é<"}!4a$'
    assert bodies(segments) == {1: '<s>{"a": "é<"}!'}
    assert pickle.loads(pickle.dumps(template))([user("a"), answer("b")]) == segments


def test_lines_of_blocks_alone_leave_nothing_behind():
    source = "  {% if messages %}\n  x\n  {% endif %}\n{{ messages[0].content }}$"
    assert text_of(make_jinja_template(source, eos_token="$")([user("a")])) == "  x\na$"


def test_a_tokenizer_brings_its_own_template():
    tokenizer = SimpleNamespace(
        chat_template={"default": CHATML_JINJA, "tool_use": ""},
        bos_token=None,
        eos_token="<|im_end|>",
    )
    assert bodies(make_jinja_template(tokenizer)([user("a")])) == {0: "a<|im_end|>"}
    with pytest.raises(ValueError, match="a SimpleNamespace without one"):
        make_jinja_template(SimpleNamespace(bos_token=None, eos_token="<|im_end|>"))


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].content + 1 }}",
        "{{ (messages | attr('_' ~ '_class_' ~ '_')).mro() }}",
    ],
)
def test_what_a_template_refuses_or_must_not_do_is_an_error(source):
    with pytest.raises(DataError, match=r"refuses these messages \(user\)"):
        make_jinja_template(source, eos_token="$")([user("a")])


def test_a_template_that_makes_much_more_than_a_conversation_holds_is_refused():
    source = "{{ 'x' * 4000000 }}{% for m in messages %}{{ m.content }}$\n{% endfor %}"
    large = make_jinja_template(source, eos_token="$", stop="$")
    messages = [user("a"), {"role": "assistant", "content": "b"}]
    with pytest.raises(DataError, match=r"renders 400.* characters from a conversation of"):
        encode_chat(messages, make_byte_tokenizer(("$",)), template=large)
    small = make_jinja_template(source.replace("4000000", "60000"), eos_token="$", stop="$")
    assert len(encode_chat(messages, make_byte_tokenizer(("$",)), template=small).tokens) > 60_000


def test_a_source_that_is_no_jinja_or_has_no_end_is_refused_at_once():
    with pytest.raises(ValueError, match="line 2 is no Jinja"):
        make_jinja_template("\n{% for %}", eos_token="$")
    with pytest.raises(ValueError, match="line 2: No filter named 'colour'"):
        make_jinja_template("\n{{ messages | colour }}", eos_token="$")
    with pytest.raises(ValueError, match="line 1: No test named 'blue'"):
        make_jinja_template("{{ messages is blue }}", eos_token="$")
    with pytest.raises(ValueError, match="give what ends a turn"):
        make_jinja_template("x")


def test_without_the_library_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ConfigError, match=r'pip install "trainkit-lm\[hf\]"'):
        make_jinja_template("no library", eos_token="$")


@pytest.mark.parametrize("template", list(TEMPLATES.values()), ids=list(TEMPLATES))
def test_the_tokenizer_named_bytes_knows_every_native_template(template):
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
    tokenizer = open_tokenizer("bytes")
    text = "".join(segment.text for segment in template(messages))
    special = set(re.findall(r"<\|?/?\w+\|?>", text))
    assert special
    assert special <= tokenizer.special_ids.keys()
    assert len(find_stop_ids(tokenizer, template)) == 1
