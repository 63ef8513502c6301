"""Normalize the messages of a conversation to the form that templates read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from trainkit.types import DataError

Message = Mapping[str, Any]
"""One message: `role` and `content`; optionally `tool_calls`, `reasoning_content`, `weight`."""

ROLES = ("system", "developer", "user", "assistant", "tool")
"""The roles that a message may have; some templates reject some of them."""

REASONING = ("reasoning_content", "thinking", "reasoning")
"""The names of the field with an assistant's reasoning; normalized messages have the first."""


def normalize_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Check messages, and convert them to the form that templates read.

    Content in parts becomes one text. Fields that are None are removed, since tables have a field
    for every field of any row. Reasoning under its other names (`thinking`, `reasoning`) is moved
    to `reasoning_content`.

    Raises:
        DataError: There is no message; or one has no role, an unknown one, no content, content that
            is no text, or incomplete calls; or calls do not belong to an assistant, or a tool
            answers nobody. The message says which.

    Examples:
        >>> normalize_messages([{"role": "user", "content": [{"type": "text", "text": "hi"}]}])
        [{'role': 'user', 'content': 'hi'}]
    """
    if isinstance(messages, str) or not isinstance(messages, Sequence) or not messages:
        raise DataError(
            f"a conversation is a list of at least one message, got {abbreviate(messages)}",
            got=messages,
        )
    normalized = [_normalize_message(i, message) for i, message in enumerate(messages)]
    # Several tools may answer one message, each in a message of its own.
    for i, message in enumerate(normalized):
        if message["role"] != "tool":
            continue
        if i == 0:
            raise wrong_message(i, message, "comes first; a tool answers an assistant")
        previous = normalized[i - 1]["role"]
        if previous not in ("assistant", "tool"):
            raise wrong_message(
                i, message, f"follows a {previous} message; a tool answers an assistant"
            )
    return normalized


def parse_tools(record: Mapping[str, Any]) -> Sequence[Mapping[str, Any]] | None:
    """Return the tools of a record: its field `tools`, a list of JSON schemas or JSON of one.

    Returns:
        The list; None if there is none, or an empty one.

    Raises:
        DataError: It is no JSON, or no list of mappings.

    Examples:
        >>> parse_tools({"tools": '[{"name": "f"}]'}), parse_tools({"tools": []}), parse_tools({})
        ([{'name': 'f'}], None, None)
    """
    tools = record.get("tools")
    # Tables hold schemas as JSON: those of different functions have no common columns.
    if isinstance(tools, str) and tools:
        try:
            tools = orjson.loads(tools)
        except orjson.JSONDecodeError as error:
            raise DataError(f"the field 'tools' is no JSON: {error}", where="tools") from error
    # Templates distinguish None from an empty list, and a table has a list in every row.
    if not tools:
        return None
    if not isinstance(tools, Sequence) or not all(isinstance(tool, Mapping) for tool in tools):
        raise DataError(
            f"the field 'tools' must be a list of JSON schemas, got {abbreviate(tools)}",
            where="tools",
            got=tools,
        )
    return tools


def _normalize_message(i: int, message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise wrong_message(i, message, f"must be a mapping, got {abbreviate(message)}")
    fields = {key: value for key, value in message.items() if value is not None}
    # A table has an empty list in each row without calls.
    if not fields.get("tool_calls", True):
        del fields["tool_calls"]
    role = fields.get("role")
    if role is None:
        names = ", ".join(map(str, message)) or "no field"
        raise wrong_message(i, message, f"has no role, it has {names}")
    if role not in ROLES:
        raise wrong_message(
            i, message, f"has the role {abbreviate(role)}; roles are {', '.join(ROLES)}"
        )
    if "tool_calls" in fields:
        fields["tool_calls"] = _normalize_calls(i, fields)
    # An answer may consist of calls alone.
    elif "content" not in fields:
        raise wrong_message(i, message, "has no content")
    if "content" in fields:
        fields["content"] = _join_content(i, message, fields["content"])
    # Under one name from here on; each template reads its own (`jinja.py`).
    reasoning = next((fields[name] for name in REASONING if name in fields), None)
    if reasoning is not None:
        if not isinstance(reasoning, str):
            raise wrong_message(
                i, message, f"has reasoning that is no text: {abbreviate(reasoning)}"
            )
        fields["reasoning_content"] = reasoning
    return fields


def _join_content(i: int, message: Message, content: Any) -> str:
    """Return content as one text; parts that are not text are rejected."""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise wrong_message(i, message, f"has content that is no text: {abbreviate(content)}")
    for part in content:
        if not (isinstance(part, Mapping) and isinstance(part.get("text"), str)):
            raise wrong_message(
                i, message, f"has a part of content that is no text: {abbreviate(part)}"
            )
    # Without anything between them: parts are pieces of one text.
    return "".join(part["text"] for part in content)


def _normalize_calls(i: int, message: Message) -> list[dict[str, Any]]:
    """Return calls as {"function": {"name", "arguments"}}, with their other fields unchanged."""
    if message["role"] != "assistant":
        raise wrong_message(i, message, "has tool_calls; only an assistant calls tools")
    calls = message["tool_calls"]
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise wrong_message(i, message, f"has tool_calls that are no list: {abbreviate(calls)}")
    normalized = []
    for n, call in enumerate(calls):
        # Some data sets have the function's fields in the call itself.
        function = call.get("function", call) if isinstance(call, Mapping) else None
        fields = function if isinstance(function, Mapping) else {}
        if not isinstance(fields.get("name"), str):
            raise wrong_message(i, message, f"has a call {n} without a name: {abbreviate(call)}")
        # OpenAI's form has arguments as JSON text, most data sets have an object.
        if not isinstance(fields.get("arguments"), (Mapping, str)):
            raise wrong_message(i, message, f"has a call {n} without arguments: {abbreviate(call)}")
        extra_fields = call if "function" in call else {}
        normalized.append({**extra_fields, "function": dict(fields)})
    return normalized


def wrong_message(i: int, message: Message, problem: str) -> DataError:
    """Return the error for message `i`, with its role.

    Examples:
        >>> str(wrong_message(2, {"role": "user"}, "has no content"))
        'message 2 (user) has no content'
    """
    role = message.get("role") if isinstance(message, Mapping) else None
    suffix = f" ({role})" if isinstance(role, str) else ""
    return DataError(f"message {i}{suffix} {problem}", where=i, got=message)


def abbreviate(value: Any) -> str:
    """Return the `repr` of a value, truncated for a message.

    Examples:
        >>> abbreviate("a" * 100)[-6:]
        'aaa...'
    """
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
