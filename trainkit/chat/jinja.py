"""Chat templates from Jinja sources, as models bring them along."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from trainkit.chat.messages import REASONING, Message, checked_messages, wrong_message
from trainkit.chat.templates import Segment
from trainkit.types import DataError, needs_extra

if TYPE_CHECKING:
    from trainkit.chat.templates import Template

_MARKER = "\ue000trainkit\ue001"


def jinja_template(
    source: Any,
    *,
    bos_token: str | None = None,
    eos_token: str | None = None,
    stop: str | None = None,
    variables: Mapping[str, Any] | None = None,
) -> Template:
    """Return the template that a Jinja source describes, as models bring it along.

    Whose text is whose is found by rendering again with one message's words replaced by a marker:
    what stays the same is scaffold. Where reasoning is shown too, so that more changes than the
    words, the turn begins after the generation prompt. A message that cannot be told apart so has
    no body, and `encode_chat` refuses to train on it. Reasoning is given under the name that the
    source reads, the first of `reasoning_content`, `thinking` and `reasoning`; where it reads none
    of them, the template refuses messages with reasoning.

    Args:
        source: The Jinja text, or a tokenizer with the attribute `chat_template`.
        bos_token: What the source's `bos_token` stands for; the tokenizer's by default.
        eos_token: The same for `eos_token`.
        stop: What ends an assistant's turn; `eos_token` by default.
        variables: Further names that the source reads, such as `enable_thinking`.

    Returns:
        The template. It renders once per message, so a native template is faster.

    Raises:
        ConfigError: jinja2 is missing.
        ValueError: There is no source, it is no Jinja, or it is not known what ends a turn.

    Examples:
        >>> source = "{% for m in messages %}{{ m.role }}: {{ m.content }}</s>{% endfor %}"
        >>> template = jinja_template(source, eos_token="</s>")
        >>> [segment.text for segment in template([{"role": "user", "content": "hi"}])]
        ['user: ', 'hi</s>']
    """
    text = source if isinstance(source, str) else getattr(source, "chat_template", None)
    text = text.get("default") if isinstance(text, Mapping) else text
    if text is None:
        must = "source must be a Jinja text, or a tokenizer with a chat_template"
        raise ValueError(f"jinja_template: {must}, got a {type(source).__name__} without one")
    found = {"bos_token": bos_token, "eos_token": eos_token}
    tokens = {name: value or getattr(source, name, None) or "" for name, value in found.items()}
    stop = stop or tokens["eos_token"]
    if not stop:
        raise ValueError("jinja_template: say what ends a turn, by eos_token= or stop=")
    _compiled(text)
    return partial(
        _jinja_segments, source=text, stop=stop, variables={**tokens, **(variables or {})}
    )


def _jinja_segments(
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = False,
    source: str,
    stop: str,
    variables: Mapping[str, Any],
) -> list[Segment]:
    checked = _with_reasoning(checked_messages(messages), _compiled(source)[1])
    render = partial(_rendered, source, tools=tools, variables=variables)
    whole, prompted = render(checked), render(checked, add_generation_prompt=True)
    prompt = prompted[len(whole) :] if prompted.startswith(whole) else ""
    if add_generation_prompt and prompted != whole + prompt:
        raise DataError("jinja_template: the generation prompt changes what comes before it")
    segments: list[Segment] = []
    end, known = 0, True  # where the message before ended, and whether it was found
    for i in range(len(checked)):
        span = _body_span(
            whole,
            i,
            checked,
            render=render,
            prompt=prompt if known else "",
            begin=end,
            stop=stop,
        )
        known = span is not None
        if span is None:
            continue
        if span[0] < end:
            raise DataError(f"jinja_template: message {i} is shown before the one before it")
        segments += [Segment(whole[end : span[0]], i), Segment(whole[slice(*span)], i, body=True)]
        end = span[1]
    segments += [Segment(whole[end:]), Segment(prompt if add_generation_prompt else "")]
    return [segment for segment in segments if segment.text or segment.body]


def _with_reasoning(messages: list[dict[str, Any]], name: str | None) -> list[dict[str, Any]]:
    """Return the messages with their reasoning under the one name that the template reads."""
    named = []
    for i, message in enumerate(messages):
        thoughts = message.get(REASONING[0])
        if name is None and thoughts and thoughts.strip():
            what = f"has reasoning, of which the template shows nothing: it reads no {REASONING[0]}"
            raise wrong_message(i, message, f"{what}; take the field out, or another template")
        other = {key: value for key, value in message.items() if key not in REASONING}
        named.append(other if name is None or thoughts is None else {**other, name: thoughts})
    return named


def _body_span(
    whole: str,
    i: int,
    messages: list[dict[str, Any]],
    *,
    render: Any,
    prompt: str,
    begin: int,
    stop: str,
) -> tuple[int, int] | None:
    """Find where message `i` speaks: [first, last) characters, or None if that cannot be told.

    The message before ended at `begin`. `prompt` is the generation prompt, or "" where the end of
    the message before is not known, so that a prompt found could be an earlier message's.
    """
    others = {"content", "tool_calls", *REASONING}
    probe = {key: value for key, value in messages[i].items() if key not in others}
    probe["content"] = _MARKER
    try:
        marked = render([*messages[:i], probe, *messages[i + 1 :]])
    except DataError:  # a template may want calls before answers, and so on
        return None
    if marked.count(_MARKER) != 1:
        return None
    before, after = marked.split(_MARKER)
    if not whole.endswith(after):
        return None
    first, last = len(before), len(whole) - len(after)
    if not whole.startswith(before) or first > last:
        common = _common(whole, before)
        found = whole.rfind(prompt, begin, common) if prompt else -1
        if found < 0:
            return None
        first = found + len(prompt)
    space = len(after) - len(after.lstrip())
    if after.startswith(stop, space):
        return first, last + space + len(stop)
    # The turn of an assistant that does not end in the stop token must not be trained on.
    return None if messages[i]["role"] == "assistant" else (first, last)


def _common(a: str, b: str) -> int:
    """Return how many characters two texts begin with in common."""
    differ = (k for k, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
    return next(differ, min(len(a), len(b)))


def _rendered(
    source: str,
    messages: Sequence[Message],
    *,
    tools: Any,
    variables: Mapping[str, Any],
    add_generation_prompt: bool = False,
) -> str:
    import jinja2  # noqa: PLC0415  (an extra)

    values = {"tools": tools, "documents": None, "add_generation_prompt": add_generation_prompt}
    try:
        return _compiled(source)[0].render(messages=messages, **values, **variables)
    except (jinja2.TemplateError, TypeError) as error:
        roles = ", ".join(str(message["role"]) for message in messages)
        what = f"the template refuses these messages ({roles}): {error}"
        raise DataError(f"jinja_template: {what}") from error


@lru_cache(maxsize=8)
def _compiled(source: str) -> tuple[Any, str | None]:
    """Compile a source in the environment that transformers gives to chat templates.

    Returns:
        The compiled template, and under which name it reads reasoning, if it does.
    """
    with needs_extra("hf"):
        import jinja2  # noqa: PLC0415  (an extra)
        from jinja2 import nodes  # noqa: PLC0415  (an extra)
        from jinja2.sandbox import ImmutableSandboxedEnvironment  # noqa: PLC0415

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    def now(form: str) -> str:
        return datetime.now().strftime(form)  # noqa: DTZ005  (the day where the user is)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = to_json
    names: dict[str, Any] = environment.globals
    names.update(raise_exception=refuse, strftime_now=now)
    # The tags that mark answers for transformers' own masks are blocks without effect.
    source = re.sub(r"({%[-+]?\s*)generation(\s*[-+]?%})", r"\1if true\2", source)
    source = re.sub(r"({%[-+]?\s*)endgeneration(\s*[-+]?%})", r"\1endif\2", source)
    try:
        tree = environment.parse(source)
        read = {node.attr for node in tree.find_all(nodes.Getattr)}
        read |= {node.value for node in tree.find_all(nodes.Const)}  # as in m["x"] and "x" in m
        name = next((name for name in REASONING if name in read), None)
        return environment.from_string(tree), name
    except jinja2.TemplateSyntaxError as error:
        what = f"line {error.lineno} is no Jinja: {error.message}"
        raise ValueError(f"jinja_template: {what}") from error
