"""Chat templates from the Jinja sources of models."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs

from trainkit.text.chat.messages import REASONING, Message, normalize_messages, wrong_message
from trainkit.text.chat.sandbox import SPAN, compile_template, render_template
from trainkit.text.chat.templates import Segment
from trainkit.types import DataError

if TYPE_CHECKING:
    from trainkit.text.chat.templates import Template

    Render = Callable[..., str]

MARKER = "\ue000trainkit\ue001"
"""Replaces a message's content, to find where a template puts it."""


def make_jinja_template(
    source: Any,
    *,
    bos_token: str | None = None,
    eos_token: str | None = None,
    stop: str | Sequence[str] | None = None,
    variables: Mapping[str, Any] | None = None,
) -> Template:
    """Make a template from a Jinja source.

    If the source marks generated text by `{% generation %}`, the body of an answer is the marked
    text, in one piece or several. A template is rejected if it is ambiguous to which answer a piece
    belongs.

    Otherwise bodies are found by rendering again with one message's content, or the name of the
    tool it calls, replaced by a marker: what stays the same is not the body. If more changes than
    the content, the body begins after the generation prompt. A blank between the header and the
    content belongs to an answer, since it is part of the first word's token. A message that cannot
    be located has no body, and `encode_chat` refuses to train on it. Reasoning is passed under the
    name that the source reads, the first of `reasoning_content`, `thinking` and `reasoning`; if it
    reads none of them, the template rejects messages with reasoning.

    Templates run without access to files or to Python's internals, with a limit on characters and
    loop iterations (`trainkit.text.chat.sandbox`).

    Args:
        source: The Jinja text, or a tokenizer with the attribute `chat_template`.
        bos_token: The value of the source's `bos_token`; the tokenizer's by default.
        eos_token: The same for `eos_token`.
        stop: The end of an assistant's turn, one text or several; `eos_token` by default.
        variables: Values of further names that the source reads, such as `enable_thinking`.

    Returns:
        The template. It renders once or twice per message, so a native template is faster.

    Raises:
        ConfigError: jinja2 is missing.
        ValueError: There is no source, it is no Jinja or accesses files or Python's internals, or
            nothing ends a turn.

    Examples:
        >>> source = "{% for m in messages %}{{ m.role }}: {{ m.content }}</s>{% endfor %}"
        >>> template = make_jinja_template(source, eos_token="</s>")
        >>> [segment.text for segment in template([{"role": "user", "content": "hi"}])]
        ['user: ', 'hi</s>']
    """
    text = source if isinstance(source, str) else getattr(source, "chat_template", None)
    # Some tokenizers have several templates by name.
    text = text.get("default") if isinstance(text, Mapping) else text
    if text is None:
        raise ValueError(
            "make_jinja_template: source must be a Jinja text, or a tokenizer with a "
            f"chat_template, got a {type(source).__name__} without one"
        )
    bos_token = bos_token or getattr(source, "bos_token", None) or ""
    eos_token = eos_token or getattr(source, "eos_token", None) or ""
    stops = stop or eos_token
    if not stops:
        raise ValueError("make_jinja_template: give what ends a turn, by eos_token= or stop=")
    # The longest first: a stop token may begin with another one.
    stops = [stops] if isinstance(stops, str) else sorted(stops, key=len, reverse=True)
    # Errors in the source are raised now, not at the first conversation.
    compile_template(text)
    return partial(
        _render_segments,
        source=text,
        stops=tuple(stops),
        # The caller's variables last: they may replace the special tokens.
        variables={"bos_token": bos_token, "eos_token": eos_token, **(variables or {})},
    )


def _render_segments(
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = False,
    source: str,
    stops: Sequence[str],
    variables: Mapping[str, Any],
) -> list[Segment]:
    _, reasoning_name = compile_template(source)
    normalized = _rename_reasoning(normalize_messages(messages), reasoning_name)
    render = partial(_render, source, tools=tools, variables=variables)
    text = render(normalized)
    # The generation prompt is what the flag adds at the end.
    prompted = render(normalized, add_generation_prompt=True)
    # A template may ignore the flag, or change the text before the prompt.
    prompt = prompted[len(text) :] if prompted.startswith(text) else ""
    if add_generation_prompt and prompted != text + prompt:
        raise DataError("make_jinja_template: the generation prompt changes what comes before it")
    if re.search(r"{%[-+]?\s*generation\s", source):
        spans = _find_marked_spans(text, normalized, render)
    else:
        answer_prompt = prompt or _render_prompt(normalized, render)
        spans = _SpanFinder(text, normalized, render, answer_prompt, stops).find_spans()
    segments: list[Segment] = []
    end = 0
    for i, (first, last) in spans:
        segments += [Segment(text[end:first], i), Segment(text[first:last], i, body=True)]
        end = last
    segments += [Segment(text[end:]), Segment(prompt if add_generation_prompt else "")]
    return [segment for segment in segments if segment.text or segment.body]


def _render(
    source: str,
    messages: Sequence[Message],
    *,
    tools: Any,
    variables: Mapping[str, Any],
    add_generation_prompt: bool = False,
    spans: bool = False,
) -> str:
    import jinja2  # noqa: PLC0415  (an extra)

    template, _ = compile_template(source, spans=spans)
    try:
        return render_template(
            template,
            messages=messages,
            tools=tools,
            # `transformers` always passes it, and a template may read it without asking.
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **variables,
        )
    # A template fails with any of these on messages that it did not expect.
    except (jinja2.TemplateError, TypeError, ValueError, LookupError) as error:
        roles = ", ".join(str(message["role"]) for message in messages)
        raise DataError(
            f"make_jinja_template: the template refuses these messages ({roles}): {error}"
        ) from error


def _rename_reasoning(messages: list[dict[str, Any]], name: str | None) -> list[dict[str, Any]]:
    """Return the messages with their reasoning under the name that the template reads."""
    renamed = []
    for i, message in enumerate(messages):
        reasoning = message.get(REASONING[0])
        if name is None and reasoning and reasoning.strip():
            raise wrong_message(
                i,
                message,
                "has reasoning, of which the template shows nothing: it reads no "
                f"{REASONING[0]}; take the field out, or another template",
            )
        fields = {key: value for key, value in message.items() if key not in REASONING}
        if name is not None and reasoning is not None:
            fields[name] = reasoning
        renamed.append(fields)
    return renamed


# ------------------------------------------------------------------------------------------- spans

Spans = list[tuple[int, tuple[int, int]]]


@attrs.frozen
class _Piece:
    """A text that a template marks as generated, and the messages among the variables there."""

    first: int
    last: int
    text: str
    owners: frozenset[int]


def _find_marked_spans(text: str, messages: list[dict[str, Any]], render: Render) -> Spans:
    """Return the characters [first, last) that the template marks as generated, by answer.

    A piece belongs to the answer that the variables in its scope hold (see `compile_template`). If
    they hold several, or if a second rendering shows that the words in a piece are another
    answer's, it belongs to the one answer whose words are in it, if that has as many pieces.
    """
    marked_text, pieces = _parse_marks(render(messages, spans=True))
    if marked_text != text:
        raise DataError("make_jinja_template: what the template marks by generation, it changes")
    try:
        labeled = [_label_words(i, message) for i, message in enumerate(messages)]
        _, labeled_pieces = _parse_marks(render(labeled, spans=True))
    except DataError:  # the template accepts only these words
        labeled_pieces = list[_Piece]()
    answers = frozenset(i for i, m in enumerate(messages) if m["role"] == "assistant")
    # The answers whose words each piece shows.
    shown = [
        frozenset(map(int, re.findall(f"{MARKER}(\\d+);", piece.text))) for piece in labeled_pieces
    ]
    scoped = [_filter_owners(piece, answers) for piece in labeled_pieces]
    # A scope is wrong if it holds a single answer, and the piece shows words of another.
    is_scope_right = all(
        words <= owners for owners, words in zip(scoped, shown, strict=True) if len(owners) == 1
    )
    spans = Spans()
    for j, piece in enumerate(pieces):
        owners = _filter_owners(piece, answers) if is_scope_right else frozenset[int]()
        # Labeled words name the answer, unless the labels have changed the number of pieces.
        if len(owners) != 1 and len(shown) == len(pieces):
            owners = shown[j]
        if len(owners) != 1:
            raise DataError(
                f"make_jinja_template: the template marks {piece.text!r:.80} by generation, and it "
                "cannot be known which answer that belongs to; mark it in the loop over messages"
            )
        (owner,) = owners
        if spans and owner < spans[-1][0]:
            raise DataError(
                f"make_jinja_template: it shows message {owner} after message {spans[-1][0]}"
            )
        spans.append((owner, (piece.first, piece.last)))
    return spans


def _filter_owners(piece: _Piece, answers: frozenset[int]) -> frozenset[int]:
    """Return the answers that a piece can belong to: any, if no message is in scope."""
    return piece.owners & answers if piece.owners else answers


def _parse_marks(marked: str) -> tuple[str, list[_Piece]]:
    """Return a text without its marks, and the pieces in them; outer marks of nested ones stay."""
    start, middle, end = SPAN
    pattern = f"{start}([\\d,]*){middle}([^{start}{middle}{end}]*){end}"
    pieces: list[_Piece] = []
    text = ""
    position = 0
    # Of nested marks the outer ones do not match: they stay in the text, and the caller rejects it.
    for match in re.finditer(pattern, marked):
        text += marked[position : match.start()]
        owners = frozenset(map(int, filter(None, match[1].split(","))))
        generated = match[2]
        pieces.append(_Piece(len(text), len(text) + len(generated), generated, owners))
        text += generated
        position = match.end()
    return text + marked[position:], pieces


def _label_words(i: int, message: dict[str, Any]) -> dict[str, Any]:
    """Add the index of an answer to each of its words and calls.

    Blanks and tags stay as they are: a template may split the content at them.
    """
    if message["role"] != "assistant":
        return message
    label = f"{MARKER}{i};"
    texts = {
        # At the beginning of each word, and at both ends of the text.
        name: re.sub(r"(?<=\s)(?=\S)", label, label + text + label)
        for name, text in message.items()
        if name in ("content", *REASONING) and text.strip()
    }
    calls = [
        {**call, "function": {**call["function"], "name": call["function"]["name"] + label}}
        for call in message.get("tool_calls", ())
    ]
    return message | texts | ({"tool_calls": calls} if calls else {})


@attrs.frozen
class _SpanFinder:
    """Finds the bodies of messages in a rendered conversation, by rendering it with markers."""

    text: str
    messages: list[dict[str, Any]]
    render: Render
    prompt: str
    stops: Sequence[str]

    def find_spans(self) -> Spans:
        """Return the characters [first, last) of each message that can be located."""
        spans = Spans()
        end = 0
        is_end_known = True
        for i, message in enumerate(self.messages):
            if message["role"] == "assistant":
                span = self.find_answer(i, end, self.prompt if is_end_known else None)
            else:
                span = self.find_other(i)
            # After a message that is not located, a prompt that is found may be an earlier one's.
            is_end_known = span is not None
            if span is None:
                continue
            if span[0] < end:
                role_before = self.messages[spans[-1][0]]["role"]
                if role_before not in ("system", "developer"):
                    raise DataError(
                        f"make_jinja_template: message {i} is shown before the one before it"
                    )
                spans.pop()  # the template shows it in a later turn, as Llama 2 does
            spans.append((i, span))
            end = span[1]
        return spans

    def find_other(self, i: int) -> tuple[int, int] | None:
        """Find the content of a message that is no answer, and a stop token after it."""
        halves = self.split_at_probe(i, _replace_content(self.messages[i]))
        if halves is None:
            return None
        before, after = halves
        first = len(before)
        last = len(self.text) - len(after)
        # Both may match in a text that repeats itself, and overlap.
        if not (self.text.startswith(before) and self.text.endswith(after) and first <= last):
            return None
        # A user's turn may end with the same token as an answer; it belongs to the turn.
        rest = _strip_stop(after, self.stops)
        return first, last if rest is None else len(self.text) - len(rest)

    def find_answer(self, i: int, start: int, prompt: str | None) -> tuple[int, int] | None:
        """Find an answer, its stop token included; None if it cannot be located.

        Args:
            i: The index of the message.
            start: The end of the message before.
            prompt: The generation prompt; None if the end of the message before is unknown, so that
                a prompt that is found could be an earlier one.
        """
        message = self.messages[i]
        halves = self.split_at_probe(i, _replace_content(message))
        rest = None if halves is None else _strip_stop(halves[1], self.stops)
        if message.get("tool_calls") and (rest is None or not self.text.endswith(rest)):
            if halves is None:
                # Where users and assistants must alternate, content cannot replace a call: leave
                # out everything up to the next question too.
                later = (j for j, m in enumerate(self.messages) if j > i and m["role"] == "user")
                until = next(later, len(self.messages))
                halves = self.split_at_probe(i, _replace_content(message), until=until)
            rest = self.find_rest_after_call(i)
        if halves is None or rest is None or not self.text.endswith(rest):
            return None
        first = _find_answer_start(self.text, halves[0], prompt, start)
        last = len(self.text) - len(rest)
        if first is None or first >= last or not self.text[first:last].endswith(tuple(self.stops)):
            return None
        return first, last

    def find_rest_after_call(self, i: int) -> str | None:
        """Return the text after the stop token of an answer that ends with a call."""
        *calls, last = self.messages[i]["tool_calls"]
        # The last call is of the marker, without arguments, in their type.
        no_arguments: Any = "{}" if isinstance(last["function"]["arguments"], str) else {}
        function = {**last["function"], "name": MARKER, "arguments": no_arguments}
        probe = {**self.messages[i], "tool_calls": [*calls, {**last, "function": function}]}
        halves = self.split_at_probe(i, probe)
        if halves is None:
            return None
        # The first stop token after the call ends the answer.
        ends = [end for stop in self.stops if (end := halves[1].find(stop)) >= 0]
        return _strip_stop(halves[1][min(ends) :], self.stops) if ends else None

    def split_at_probe(
        self, i: int, probe: dict[str, Any], until: int | None = None
    ) -> tuple[str, str] | None:
        """Return the text before and after the marker of a probe in place of message `i`."""
        try:
            marked = self.render([*self.messages[:i], probe, *self.messages[until or i + 1 :]])
        except DataError:  # a template may require calls before answers, for instance
            return None
        before, _, after = marked.partition(MARKER)
        # With several markers the content is shown more than once, and none of the places is the
        # body.
        return (before, after) if marked.count(MARKER) == 1 else None


def _find_answer_start(text: str, header: str, prompt: str | None, start: int) -> int | None:
    """Return the first character of an answer, whose probe may have another header.

    In a template without a generation prompt the model goes on right after the question: then a
    blank before the content is the model's.
    """
    # Of characters, not of path components.
    common = len(os.path.commonprefix([text, header]))  # noqa: RUF071
    after_prompt = None
    if prompt:
        position = text.rfind(prompt, start, common)
        after_prompt = position + len(prompt) if position >= 0 else None
    elif prompt is not None and len(header.rstrip(" ")) <= common:
        after_prompt = max(len(header.rstrip(" ")), min(start, len(header)))
    # The header of the probe is another one: only the prompt shows where the answer begins.
    if common < len(header):
        return after_prompt
    # Between prompt and content blanks are the model's; anything else is a part of the header.
    return common if after_prompt is None or text[after_prompt:common].strip(" ") else after_prompt


def _render_prompt(messages: list[dict[str, Any]], render: Render) -> str:
    """Return the generation prompt after the last message that is no answer."""
    # A template may render a prompt only there, not after an answer.
    others = [i for i, message in enumerate(messages) if message["role"] != "assistant"]
    count = max(others, default=-1) + 1
    if count == len(messages):
        return ""
    try:
        plain = render(messages[:count])
        prompted = render(messages[:count], add_generation_prompt=True)
    except DataError:
        return ""
    return prompted[len(plain) :] if prompted.startswith(plain) else ""


def _replace_content(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose content is the marker, without calls or reasoning."""
    removed = {"content", "tool_calls", *REASONING}
    fields = {key: value for key, value in message.items() if key not in removed}
    return fields | {"content": MARKER}


def _strip_stop(text: str, stops: Sequence[str]) -> str | None:
    """Return the text after the stop token that it begins with; None if it begins with none."""
    text = text.lstrip()
    return next((text[len(stop) :] for stop in stops if text.startswith(stop)), None)
