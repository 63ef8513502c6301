"""Chat templates: render messages as text, in segments that each belong to a message.

The loss mask of a conversation depends on the segment that a token lies in, not on tags inside a
template. The templates of ChatML, Llama 3 and Qwen 3 are written here and need no library;
`make_jinja_template` makes any other from its Jinja source (`trainkit.text.chat.jinja`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import attrs

from trainkit.text.chat.messages import Message, normalize_messages, wrong_message
from trainkit.text.tokenizers.special import (  # noqa: F401 (this package exports them)
    CHATML_SPECIAL,
    LLAMA3_SPECIAL,
    QWEN3_SPECIAL,
)
from trainkit.types import DataError


@attrs.frozen
class Segment:
    """A part of a rendered conversation.

    Attributes:
        text: The characters; all segments concatenated are the conversation.
        message: The index of the message it belongs to; None if it belongs to none.
        body: Whether the message's role produced it: the content, the calls and the stop token, but
            not the header.
    """

    text: str
    message: int | None = None
    body: bool = False


class Template(Protocol):
    """Renders messages as segments; `add_generation_prompt` appends the header of an answer.

    The segments of a message are adjacent, and messages are in order. Any number of a message's
    segments may be its body, with others between them; only the body can be in the loss. A message
    without a body cannot be trained on. The stop token is at the end of the last body segment of an
    assistant's message.
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
        tools: Must be empty: ChatML has no place for tools.
        add_generation_prompt: Whether to append the header of an answer.

    Returns:
        The segments.

    Raises:
        ValueError: There are tools, for which ChatML has no place.
        DataError: A message is wrong (see `normalize_messages`), or calls tools.

    Examples:
        >>> [segment.text for segment in chatml([{"role": "user", "content": "hi"}])]
        ['<|im_start|>user\n', 'hi<|im_end|>', '\n']
    """
    # A mistake of the caller, while calls in a message are one of the data.
    if tools:
        raise ValueError(
            f"chatml: got {len(tools)} tools, for which ChatML has no place; take qwen3 or llama3"
        )
    segments: list[Segment] = []
    for i, message in enumerate(normalize_messages(messages)):
        if "tool_calls" in message:
            raise wrong_message(
                i, message, "has tool_calls, for which ChatML has no place; take qwen3 or llama3"
            )
        segments += _render_im_turn(i, message["role"], message["content"])
    return segments + [Segment("<|im_start|>assistant\n")] * add_generation_prompt


def qwen3(
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = False,
    enable_thinking: bool = True,
) -> list[Segment]:
    r"""Render as Qwen 3 does: ChatML, with tools in the system turn and reasoning in `<think>`.

    Reasoning (`reasoning_content`, or a `<think>` block in the content) is shown only for the
    answers after the last question. The last answer always has a block: an empty one, if there is
    no reasoning, is part of the header, since the model did not generate it.

    Args:
        messages: The conversation.
        tools: JSON schemas of the functions that may be called.
        add_generation_prompt: Whether to append the header of an answer.
        enable_thinking: False ends the generation prompt with an empty block.

    Returns:
        The segments.

    Raises:
        DataError: A message is wrong (see `normalize_messages`), or a developer's.

    Examples:
        >>> segments = qwen3(
        ...     [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "A"}]
        ... )
        >>> [segment.text for segment in segments if segment.message == 1]
        ['<|im_start|>assistant\n<think>\n\n</think>\n\n', 'A<|im_end|>', '\n']
    """
    normalized = normalize_messages(messages)
    segments = _render_qwen3_system(normalized, tools)
    queries = [i for i, message in enumerate(normalized) if _is_query(message)]
    last_query = max(queries, default=len(normalized) - 1)
    for i, message in enumerate(normalized):
        role = message["role"]
        is_last = i == len(normalized) - 1
        if role == "developer":
            raise wrong_message(i, message, "has a role that Qwen 3 does not know")
        if role == "assistant":
            segments += _render_qwen3_answer(i, message, may_think=i > last_query, is_last=is_last)
        elif role == "tool":
            # Consecutive answers of tools share one turn of the user.
            starts_turn = normalized[i - 1]["role"] != "tool"
            ends_turn = is_last or normalized[i + 1]["role"] != "tool"
            header = "<|im_start|>user" * starts_turn + "\n<tool_response>\n"
            footer = "\n</tool_response>" + "<|im_end|>\n" * ends_turn
            segments += [
                Segment(header, i),
                Segment(message["content"], i, body=True),
                Segment(footer, i),
            ]
        # A system message at the beginning is rendered already.
        elif role == "user" or i > 0:
            segments += _render_im_turn(i, role, message["content"])
    if add_generation_prompt:
        no_thoughts = "" if enable_thinking else "<think>\n\n</think>\n\n"
        segments.append(Segment("<|im_start|>assistant\n" + no_thoughts))
    return segments


def _render_im_turn(i: int, role: str, content: str, header: str = "") -> list[Segment]:
    return [
        Segment(f"<|im_start|>{role}\n{header}", i),
        Segment(f"{content}<|im_end|>", i, body=True),
        Segment("\n", i),
    ]


def _is_query(message: Message) -> bool:
    """Return whether a message is a user's own, not a tool's answer in a user's turn."""
    content = message.get("content") or ""
    is_tool = content.startswith("<tool_response>") and content.endswith("</tool_response>")
    return message["role"] == "user" and not is_tool


QWEN3_BEFORE_TOOLS = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are "
    "provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
QWEN3_AFTER_TOOLS = (
    "\n</tools>\n\nFor each function call, return a json object with function "
    "name and arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n'
)


def _render_qwen3_system(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None
) -> list[Segment]:
    first = messages[0] if messages[0]["role"] == "system" else None
    if not tools:
        return [] if first is None else _render_im_turn(0, "system", first["content"])
    signatures = "".join("\n" + _to_json(tool) for tool in tools)
    # Rules follow the system message in its turn, and have one of their own without it.
    rules = QWEN3_BEFORE_TOOLS + signatures + QWEN3_AFTER_TOOLS
    if first is None:
        return [Segment("<|im_start|>system\n" + rules)]
    return [
        Segment("<|im_start|>system\n", 0),
        Segment(first["content"], 0, body=True),
        Segment("\n\n" + rules, 0),
    ]


def _render_qwen3_answer(
    i: int, message: Message, *, may_think: bool, is_last: bool
) -> list[Segment]:
    content = message.get("content") or ""
    reasoning = message.get("reasoning_content")
    if reasoning is None and "</think>" in content:
        # As the official template does: before the first tag, and after the last.
        parts = content.split("</think>")
        reasoning = parts[0].rstrip("\n").split("<think>")[-1].lstrip("\n")
        content = parts[-1].lstrip("\n")
    header = ""
    body = content
    if may_think and (is_last or reasoning):
        # The last answer has a block even without reasoning; then the model did not write it.
        thoughts = (reasoning or "").strip("\n")
        block = f"<think>\n{thoughts}\n</think>\n\n"
        body = content.lstrip("\n")
        if is_last and not thoughts:
            header = block
        else:
            body = block + body  # reasoning that the model wrote is in the loss
    for n, call in enumerate(message.get("tool_calls", ())):
        name = call["function"]["name"]
        arguments = call["function"]["arguments"]
        if not isinstance(arguments, str):
            # A string is JSON already.
            arguments = _to_json(arguments)
        # A call follows words or another call on a line of its own.
        body += "\n" * bool(n or content)
        body += f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
    return _render_im_turn(i, "assistant", body, header)


# ------------------------------------------------------------------------------------------ Llama 3


def llama3(
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = False,
    date: str = "26 Jul 2024",
    tools_in_user_message: bool = True,
) -> list[Segment]:
    r"""Render as Llama 3.1, 3.2 and 3.3 Instruct do, with a system turn that holds the date.

    An assistant's turn with a tool call shows only the call, as in the official template, and has
    one call. Arguments should be mappings: a string is quoted once more.

    Args:
        messages: The conversation; contents are stripped of spaces at both ends.
        tools: JSON schemas of the functions that may be called.
        add_generation_prompt: Whether to append the header of an answer.
        date: The date in the system turn. The default is that of Llama 3.1 and 3.3; 3.2 takes the
            present day.
        tools_in_user_message: Whether tools are in the first user's turn or in the system turn.

    Returns:
        The segments.

    Raises:
        DataError: A message is wrong (see `normalize_messages`), an assistant calls several tools
            at once, or the first user's turn, which must hold the tools, is missing.

    Examples:
        >>> segments = llama3([{"role": "user", "content": "hi"}])
        >>> "".join(segment.text for segment in segments[-2:])
        '<|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|>'
    """
    normalized = normalize_messages(messages)
    has_system = normalized[0]["role"] == "system"
    # No tools and an empty list are different: the latter has a prompt without schemas.
    schemas = "" if tools is None else "".join(_to_json(tool, 4) + "\n\n" for tool in tools)
    system = _llama3_header("system")
    system += "Environment: ipython\n" * (tools is not None)
    system += f"Cutting Knowledge Date: December 2023\nToday Date: {date}\n\n"
    if tools is not None and not tools_in_user_message:
        system += LLAMA3_TOOLS_IN_SYSTEM + schemas
    owner = 0 if has_system else None
    # The official template trims contents.
    content = normalized[0]["content"].strip() if has_system else ""
    segments = [
        Segment("<|begin_of_text|>"),
        Segment(system, owner),
        Segment(content + "<|eot_id|>", owner, body=has_system),
    ]
    # From index 0 or 1: the system turn is rendered already.
    for i, message in enumerate(normalized[has_system:], int(has_system)):
        holds_tools = i == has_system and tools is not None and tools_in_user_message
        if holds_tools and message["role"] != "user":
            raise wrong_message(i, message, "is where the first user's turn must hold the tools")
        header, body = _render_llama3_turn(i, message)
        header += (LLAMA3_TOOLS_IN_USER + schemas) * holds_tools
        segments += [Segment(header, i), Segment(body + "<|eot_id|>", i, body=True)]
    if tools is not None and tools_in_user_message and len(normalized) == has_system:
        raise DataError("llama3: the tools go into the first user's turn, but there is none")
    return segments + [Segment(_llama3_header("assistant"))] * add_generation_prompt


_FORMAT = (
    # Without a blank after the full stop, as the models were trained on it.
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


def _render_llama3_turn(i: int, message: Message) -> tuple[str, str]:
    """Return the header and the body of a message, without the stop token."""
    if message["role"] == "tool":
        return _llama3_header("ipython"), _to_json(message["content"])
    header = _llama3_header(message["role"])
    calls = message.get("tool_calls")
    if calls is None:
        return header, message["content"].strip()
    if len(calls) != 1:
        raise wrong_message(i, message, f"has {len(calls)} tool_calls; Llama 3 makes one at a time")
    function = calls[0]["function"]
    arguments = _to_json(function["arguments"])
    return header, f'{{"name": "{function["name"]}", "parameters": {arguments}}}'


def _to_json(value: Any, indent: int | None = None) -> str:
    # As the `tojson` of `transformers` does: letters are not escaped.
    return json.dumps(value, ensure_ascii=False, indent=indent)


TEMPLATES: Mapping[str, Template] = {"chatml": chatml, "llama3": llama3, "qwen3": qwen3}
"""The native templates by name, for command lines."""
