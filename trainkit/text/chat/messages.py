"""The messages of a conversation, in the one form that templates read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from trainkit.types import DataError

Message = Mapping[str, Any]
"""One message: `role` and `content`, and where there are some `tool_calls`, `reasoning_content`,
`weight`.
"""

ROLES = ("system", "developer", "user", "assistant", "tool")
"""The roles that a message may have; some templates refuse some of them."""

REASONING = ("reasoning_content", "thinking", "reasoning")
"""The fields that hold an assistant's reasoning; the first is the one that templates read."""


def checked_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages in the one form that templates read, or refuse the first that is wrong.

    Content in parts becomes one text. Fields that are None go, since tables have one for every
    field of any row. Reasoning under its other names (`thinking`, `reasoning`) is found under
    `reasoning_content`.

    Raises:
        DataError: There is no message; or one has no role, one that is not in `ROLES`, no content,
            content that is no text, calls that are incomplete or not an assistant's, or is a tool's
            answer to nobody. The message says which.

    Examples:
        >>> checked_messages([{"role": "user", "content": [{"type": "text", "text": "hi"}]}])
        [{'role': 'user', 'content': 'hi'}]
    """
    if isinstance(messages, str) or not isinstance(messages, Sequence) or not messages:
        what = f"a conversation is a list of at least one message, got {short(messages)}"
        raise DataError(what, got=messages)
    checked = [_checked_message(i, message) for i, message in enumerate(messages)]
    for i, message in enumerate(checked):
        if message["role"] == "tool" and (
            i == 0 or checked[i - 1]["role"] not in ("assistant", "tool")
        ):
            before = f"follows a {checked[i - 1]['role']} message" if i else "comes first"
            raise wrong_message(i, message, f"{before}; a tool answers an assistant")
    return checked


def tools_of(record: Mapping[str, Any]) -> Sequence[Mapping[str, Any]] | None:
    """Return the tools of a record: its field `tools`, a list of JSON schemas or JSON of one.

    Returns:
        The list; None where there is none, or an empty one.

    Raises:
        DataError: It is no JSON, or no list of mappings.

    Examples:
        >>> tools_of({"tools": '[{"name": "f"}]'}), tools_of({"tools": []}), tools_of({})
        ([{'name': 'f'}], None, None)
    """
    tools = record.get("tools")
    if isinstance(tools, str) and tools:
        try:
            tools = orjson.loads(tools)
        except orjson.JSONDecodeError as error:
            raise DataError(f"the field 'tools' is no JSON: {error}", where="tools") from error
    if not tools:
        return None
    if not isinstance(tools, Sequence) or not all(isinstance(tool, Mapping) for tool in tools):
        what = f"the field 'tools' must be a list of JSON schemas, got {short(tools)}"
        raise DataError(what, where="tools", got=tools)
    return tools


def _checked_message(i: int, message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise wrong_message(i, message, f"must be a mapping, got {short(message)}")
    found = {key: value for key, value in message.items() if value is not None}
    if not found.get(
        "tool_calls", True
    ):  # an empty list is a table's way to say that there is none
        del found["tool_calls"]
    role = found.get("role")
    if role not in ROLES:
        what = f"has the role {short(role)}; roles are {', '.join(ROLES)}"
        if role is None:
            what = f"has no role, it has {', '.join(map(str, message)) or 'no field'}"
        raise wrong_message(i, message, what)
    if "tool_calls" in found:
        found["tool_calls"] = _checked_calls(i, found)
    elif "content" not in found:
        raise wrong_message(i, message, "has no content")
    if "content" in found:
        found["content"] = _joined(i, message, found["content"])
    reasoning = next((found[name] for name in REASONING if name in found), None)
    if reasoning is not None:
        if not isinstance(reasoning, str):
            raise wrong_message(i, message, f"has reasoning that is no text: {short(reasoning)}")
        found["reasoning_content"] = reasoning
    return found


def _joined(i: int, message: Message, content: Any) -> str:
    """Return content as one text; parts of another type than text are refused."""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise wrong_message(i, message, f"has content that is no text: {short(content)}")
    for part in content:
        if not (isinstance(part, Mapping) and isinstance(part.get("text"), str)):
            raise wrong_message(i, message, f"has a part of content that is no text: {short(part)}")
    return "".join(part["text"] for part in content)


def _checked_calls(i: int, message: Message) -> list[dict[str, Any]]:
    """Return calls, each as {"function": {"name", "arguments"}} with its other fields kept."""
    if message["role"] != "assistant":
        raise wrong_message(i, message, "has tool_calls; only an assistant calls tools")
    calls = message["tool_calls"]
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise wrong_message(i, message, f"has tool_calls that are no list: {short(calls)}")
    checked = []
    for n, call in enumerate(calls):
        function = call.get("function", call) if isinstance(call, Mapping) else None
        fields = function if isinstance(function, Mapping) else {}
        missing = "" if isinstance(fields.get("arguments"), (Mapping, str)) else "arguments"
        missing = missing if isinstance(fields.get("name"), str) else "a name"
        if missing:
            raise wrong_message(i, message, f"has a call {n} without {missing}: {short(call)}")
        checked.append({**(call if "function" in call else {}), "function": dict(fields)})
    return checked


def wrong_message(i: int, message: Message, what: str) -> DataError:
    """Return the error that says what is wrong with message `i`.

    Examples:
        >>> str(wrong_message(2, {"role": "user"}, "has no content"))
        'message 2 (user) has no content'
    """
    role = message.get("role") if isinstance(message, Mapping) else None
    shown = f" ({role})" if isinstance(role, str) else ""
    return DataError(f"message {i}{shown} {what}", where=i, got=message)


def short(value: Any) -> str:
    """Return a value as code, shortened for a message.

    Examples:
        >>> short("a" * 100)[-6:]
        'aaa...'
    """
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
