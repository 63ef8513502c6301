"""Chat templates: from messages to the text that a model reads, in segments: who wrote which.

A template returns the text as segments, so that the mask of a conversation follows from whose
segment a token lies in, and never from tags inside a template. Those of ChatML, Llama 3 and Qwen 3
are written here and need no library; `make_jinja_template` takes any other from its Jinja source
(`trainkit.text.chat.jinja`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import attrs

from trainkit.text.chat.messages import Message, checked_messages, wrong_message
from trainkit.text.tokenizers.special import (  # noqa: F401 (the room's)
    CHATML_SPECIAL,
    LLAMA3_SPECIAL,
    QWEN3_SPECIAL,
)
from trainkit.types import DataError


@attrs.frozen
class Segment:
    """A stretch of a rendered conversation.

    Attributes:
        text: The characters; those of all segments, in order, are the conversation.
        message: The number of the message it belongs to; None for what belongs to no message.
        body: Whether the message's role said it: the words, the calls and the stop token, but not
            the header before them.
    """

    text: str
    message: int | None = None
    body: bool = False


class Template(Protocol):
    """From messages to segments; `add_generation_prompt` ends with the header of an answer.

    The segments of a message stand together, and messages come in their order. Of its segments any
    number may be its body, with others between them: all of the body is trained on, and what is
    between is not. A message without a body cannot be trained on. The stop token ends the last of
    an assistant's bodies.
    """

    def __call__(
        self,
        messages: Sequence[Message],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
    ) -> list[Segment]: ...


# ----------------------------------------------------------------------------------- ChatML, Qwen 3


def chatml(
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = False,
) -> list[Segment]:
    r"""Render ChatML: each message between `<|im_start|>role` and `<|im_end|>`.

    Args:
        messages: The conversation.
        tools: Must be empty: ChatML says nothing about tools.
        add_generation_prompt: Whether to end with the header of an answer.

    Returns:
        The segments.

    Raises:
        ValueError: There are tools, for which ChatML has no place.
        DataError: A message is wrong (see `checked_messages`), or calls tools.

    Examples:
        >>> [segment.text for segment in chatml([{"role": "user", "content": "hi"}])]
        ['<|im_start|>user\n', 'hi<|im_end|>', '\n']
    """
    if tools:
        raise ValueError(
            f"chatml: got {len(tools)} tools, for which ChatML has no place; take qwen3 or llama3"
        )
    segments: list[Segment] = []
    for i, message in enumerate(checked_messages(messages)):
        if "tool_calls" in message:
            what = "has tool_calls, for which ChatML has no place; take qwen3 or llama3"
            raise wrong_message(i, message, what)
        segments += _im_turn(i, message["role"], message["content"])
    return segments + [Segment("<|im_start|>assistant\n")] * add_generation_prompt


def qwen3(
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = False,
    enable_thinking: bool = True,
) -> list[Segment]:
    r"""Render as Qwen 3 does: ChatML, with tools in the system turn and reasoning in `<think>`.

    Reasoning (`reasoning_content`, or a `<think>` block in the content) is shown for the answers
    after the last question only; before it, it is dropped. The last answer always has a block: an
    empty one, where there is no reasoning, counts as part of the header, since the model did not
    say it.

    Args:
        messages: The conversation.
        tools: JSON schemas of the functions that may be called.
        add_generation_prompt: Whether to end with the header of an answer.
        enable_thinking: False ends the generation prompt with an empty block.

    Returns:
        The segments.

    Raises:
        DataError: A message is wrong (see `checked_messages`), or a developer's.

    Examples:
        >>> segments = qwen3(
        ...     [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "A"}]
        ... )
        >>> [segment.text for segment in segments if segment.message == 1]
        ['<|im_start|>assistant\n<think>\n\n</think>\n\n', 'A<|im_end|>', '\n']
    """
    checked = checked_messages(messages)
    segments = _qwen3_system(checked, tools)
    last_query = max((i for i, m in enumerate(checked) if _is_query(m)), default=len(checked) - 1)
    for i, message in enumerate(checked):
        role, last = message["role"], i == len(checked) - 1
        if role == "developer":
            raise wrong_message(i, message, "has a role that Qwen 3 does not know")
        if role == "assistant":
            segments += _qwen3_answer(i, message, may_think=i > last_query, last=last)
        elif role == "tool":
            begins = checked[i - 1]["role"] != "tool"
            ends = last or checked[i + 1]["role"] != "tool"
            header = "<|im_start|>user" * begins + "\n<tool_response>\n"
            footer = "\n</tool_response>" + "<|im_end|>\n" * ends
            segments += [
                Segment(header, i),
                Segment(message["content"], i, body=True),
                Segment(footer, i),
            ]
        elif role == "user" or i > 0:
            segments += _im_turn(i, role, message["content"])
    if add_generation_prompt:
        no_thoughts = "" if enable_thinking else "<think>\n\n</think>\n\n"
        segments.append(Segment("<|im_start|>assistant\n" + no_thoughts))
    return segments


def _im_turn(i: int, role: str, content: str, header: str = "") -> list[Segment]:
    return [
        Segment(f"<|im_start|>{role}\n{header}", i),
        Segment(f"{content}<|im_end|>", i, body=True),
        Segment("\n", i),
    ]


def _is_query(message: Message) -> bool:
    """Say whether a user asks: not where a tool's answer was put into a user's turn."""
    content = message.get("content")
    answer = (
        content and content.startswith("<tool_response>") and content.endswith("</tool_response>")
    )
    return message["role"] == "user" and not answer


QWEN3_BEFORE_TOOLS = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are "
    "provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
QWEN3_AFTER_TOOLS = (
    "\n</tools>\n\nFor each function call, return a json object with function "
    "name and arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n'
)


def _qwen3_system(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None
) -> list[Segment]:
    first = messages[0] if messages[0]["role"] == "system" else None
    if not tools:
        return [] if first is None else _im_turn(0, "system", first["content"])
    signatures = "".join("\n" + _json(tool) for tool in tools)
    rules = QWEN3_BEFORE_TOOLS + signatures + QWEN3_AFTER_TOOLS
    if first is None:
        return [Segment("<|im_start|>system\n" + rules)]
    own = Segment(first["content"], 0, body=True)
    return [Segment("<|im_start|>system\n", 0), own, Segment("\n\n" + rules, 0)]


def _qwen3_answer(i: int, message: Message, *, may_think: bool, last: bool) -> list[Segment]:
    content, reasoning = message.get("content") or "", message.get("reasoning_content")
    if reasoning is None and "</think>" in content:
        before, after = content.split("</think>")[0], content.split("</think>")[-1]
        reasoning = before.rstrip("\n").split("<think>")[-1].lstrip("\n")
        content = after.lstrip("\n")
    header, body = "", content
    if may_think and (last or reasoning):
        thoughts = (reasoning or "").strip("\n")
        block, body = f"<think>\n{thoughts}\n</think>\n\n", content.lstrip("\n")
        header, body = (block, body) if last and not thoughts else ("", block + body)
    for n, call in enumerate(message.get("tool_calls", ())):
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        written = arguments if isinstance(arguments, str) else _json(arguments)
        body += "\n" * bool(n or content)
        body += f'<tool_call>\n{{"name": "{name}", "arguments": {written}}}\n</tool_call>'
    return _im_turn(i, "assistant", body, header)


# ------------------------------------------------------------------------------------------ Llama 3


def llama3(
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = False,
    date: str = "26 Jul 2024",
    tools_in_user_message: bool = True,
) -> list[Segment]:
    r"""Render as Llama 3.1, 3.2 and 3.3 Instruct do, with a system turn that tells the date.

    An assistant's turn that calls a tool shows the call alone, as the official template does, and
    holds one call. Arguments should be mappings: a string is quoted once more.

    Args:
        messages: The conversation; contents lose the space at their edges.
        tools: JSON schemas of the functions that may be called.
        add_generation_prompt: Whether to end with the header of an answer.
        date: The day that the system turn says it is, as in "26 Jul 2024", which is what Llama 3.1
            and 3.3 take when nobody says; 3.2 takes the present day.
        tools_in_user_message: Whether tools stand in the first user's turn or in the system turn.

    Returns:
        The segments.

    Raises:
        DataError: A message is wrong (see `checked_messages`), an assistant calls several tools at
            once, or the first user's turn, which has to hold the tools, is missing.

    Examples:
        >>> segments = llama3([{"role": "user", "content": "hi"}])
        >>> "".join(segment.text for segment in segments[-2:])
        '<|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|>'
    """
    checked = checked_messages(messages)
    has_system = checked[0]["role"] == "system"
    inside = "" if tools is None else "".join(_json(tool, 4) + "\n\n" for tool in tools)
    in_system = "" if tools is None or tools_in_user_message else LLAMA3_TOOLS_IN_SYSTEM + inside
    dates = f"Cutting Knowledge Date: December 2023\nToday Date: {date}\n\n"
    environment = "Environment: ipython\n" * (tools is not None)
    owner = 0 if has_system else None
    said = checked[0]["content"].strip() if has_system else ""
    segments = [
        Segment("<|begin_of_text|>"),
        Segment(_llama3_header("system") + environment + dates + in_system, owner),
        Segment(said + "<|eot_id|>", owner, body=has_system),
    ]
    for i, message in enumerate(checked[has_system:], int(has_system)):
        first = i == has_system and tools is not None and tools_in_user_message
        if first and message["role"] != "user":
            what = "stands where the first user's turn has to hold the tools"
            raise wrong_message(i, message, what)
        header, body = _llama3_turn(i, message)
        header += (LLAMA3_TOOLS_IN_USER + inside) * first
        segments += [Segment(header, i), Segment(body + "<|eot_id|>", i, body=True)]
    if tools is not None and tools_in_user_message and len(checked) == has_system:
        raise DataError("llama3: the tools stand in the first user's turn, and there is none")
    return segments + [Segment(_llama3_header("assistant"))] * add_generation_prompt


_FORMAT = (
    'Respond in the format {"name": function name, "parameters": dictionary of argument name and '
    "its value}.Do not use variables.\n\n"
)
LLAMA3_TOOLS_IN_USER = (
    "Given the following functions, please respond with a JSON for a function call with its proper "
    f"arguments that best answers the given prompt.\n\n{_FORMAT}"
)
LLAMA3_TOOLS_IN_SYSTEM = (
    "You have access to the following functions. To call a function, please respond with JSON for "
    f"a function call.{_FORMAT}"
)


def _llama3_header(role: str) -> str:
    return f"<|start_header_id|>{role}<|end_header_id|>\n\n"


def _llama3_turn(i: int, message: Message) -> tuple[str, str]:
    """Return the header and the body of a message, without the stop token."""
    if message["role"] == "tool":
        return _llama3_header("ipython"), _json(message["content"])
    header, calls = _llama3_header(message["role"]), message.get("tool_calls")
    if calls is None:
        return header, message["content"].strip()
    if len(calls) != 1:
        raise wrong_message(i, message, f"has {len(calls)} tool_calls; Llama 3 makes one at a time")
    function = calls[0]["function"]
    written = _json(function["arguments"])
    return header, f'{{"name": "{function["name"]}", "parameters": {written}}}'


def _json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


TEMPLATES: Mapping[str, Template] = {"chatml": chatml, "llama3": llama3, "qwen3": qwen3}
"""The native templates by name, for command lines."""
