"""Chat templates from Jinja sources, as models bring them along."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs

from trainkit.text.chat.messages import REASONING, Message, checked_messages, wrong_message
from trainkit.text.chat.sandbox import SPAN, compiled, rendered
from trainkit.text.chat.templates import Segment
from trainkit.types import DataError

if TYPE_CHECKING:
    from trainkit.text.chat.templates import Template

    Render = Callable[..., str]

MARKER = "\ue000trainkit\ue001"
"""What stands for somebody's words, to see where a template puts them."""


def make_jinja_template(
    source: Any,
    *,
    bos_token: str | None = None,
    eos_token: str | None = None,
    stop: str | Sequence[str] | None = None,
    variables: Mapping[str, Any] | None = None,
) -> Template:
    """Return the template that a Jinja source describes, as models bring it along.

    Where the source marks what is generated, by `{% generation %}`, an answer is what is marked
    where it is rendered, in one piece or several. It is refused where it cannot be known to which
    answer a piece belongs.

    Elsewhere whose text is whose is found by rendering again with one message's words, or the name
    of what it calls, replaced by a marker: what stays the same is scaffold. Where more changes than
    the words, the turn begins after the generation prompt. A blank between the header and the words
    is an answer's own: it is part of the first word's token. A message that cannot be told apart so
    has no body, and `encode_chat` refuses to train on it. Reasoning is given under the name that
    the source reads, the first of `reasoning_content`, `thinking` and `reasoning`; where it reads
    none of them, the template refuses messages with reasoning.

    A source is rendered without files or Python's insides, and refused where it spends more letters
    and turns of loops than a conversation needs (`trainkit.text.chat.sandbox`).

    Args:
        source: The Jinja text, or a tokenizer with the attribute `chat_template`.
        bos_token: What the source's `bos_token` stands for; the tokenizer's by default.
        eos_token: The same for `eos_token`.
        stop: What ends an assistant's turn, one text or several; `eos_token` by default.
        variables: Further names that the source reads, such as `enable_thinking`.

    Returns:
        The template. It renders once or twice per message, so a native template is faster.

    Raises:
        ConfigError: jinja2 is missing.
        ValueError: There is no source, it is no Jinja or asks for files or Python's insides, or it
            is not known what ends a turn.

    Examples:
        >>> source = "{% for m in messages %}{{ m.role }}: {{ m.content }}</s>{% endfor %}"
        >>> template = make_jinja_template(source, eos_token="</s>")
        >>> [segment.text for segment in template([{"role": "user", "content": "hi"}])]
        ['user: ', 'hi</s>']
    """
    text = source if isinstance(source, str) else getattr(source, "chat_template", None)
    text = text.get("default") if isinstance(text, Mapping) else text
    if text is None:
        must = "source must be a Jinja text, or a tokenizer with a chat_template"
        raise ValueError(f"make_jinja_template: {must}, got a {type(source).__name__} without one")
    found = {"bos_token": bos_token, "eos_token": eos_token}
    tokens = {name: value or getattr(source, name, None) or "" for name, value in found.items()}
    stops = stop or tokens["eos_token"]
    if not stops:
        raise ValueError("make_jinja_template: say what ends a turn, by eos_token= or stop=")
    stops = (stops,) if isinstance(stops, str) else tuple(sorted(stops, key=len, reverse=True))
    compiled(text)
    return partial(
        _jinja_segments, source=text, stops=stops, variables={**tokens, **(variables or {})}
    )


def _jinja_segments(
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = False,
    source: str,
    stops: Sequence[str],
    variables: Mapping[str, Any],
) -> list[Segment]:
    checked = _with_reasoning(checked_messages(messages), compiled(source)[1])
    render = partial(_rendered, source, tools=tools, variables=variables)
    whole, prompted = render(checked), render(checked, add_generation_prompt=True)
    prompt = prompted[len(whole) :] if prompted.startswith(whole) else ""
    if add_generation_prompt and prompted != whole + prompt:
        raise DataError("make_jinja_template: the generation prompt changes what comes before it")
    if re.search(r"{%[-+]?\s*generation\s", source):
        spans = _marked_spans(whole, checked, render)
    else:
        asked = prompt or _prompt_before(checked, render)
        spans = _Shown(whole, checked, render, asked, stops).spans()
    segments, end = list[Segment](), 0
    for i, (begin, last) in spans:
        segments += [Segment(whole[end:begin], i), Segment(whole[begin:last], i, body=True)]
        end = last
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


# ------------------------------------------------------------------------------------------- spans

Spans = list[tuple[int, tuple[int, int]]]


@attrs.frozen
class _Piece:
    """What a template marks as generated, and the messages that it can be of by its variables."""

    first: int
    last: int
    text: str
    owners: frozenset[int]


def _marked_spans(whole: str, messages: list[dict[str, Any]], render: Render) -> Spans:
    """Return which characters [first, last) the template marks as generated, and of which answer.

    A piece is of the answer that the variables in its scope hold (`sandbox.compiled`). Where they
    hold several, or where a second rendering shows that the words in a piece are another answer's,
    it is of the one answer whose words are in it, if there are as many pieces then.
    """
    text, pieces = _marked_pieces(render(messages, spans=True))
    if text != whole:
        raise DataError("make_jinja_template: what the template marks by generation, it changes")
    try:
        named = [_name_words(i, message) for i, message in enumerate(messages)]
        _, shown = _marked_pieces(render(named, spans=True))
    except DataError:  # it takes no other words than these
        shown = list[_Piece]()
    said = [frozenset(map(int, re.findall(f"{MARKER}(\\d+);", piece.text))) for piece in shown]
    answers = frozenset(i for i, m in enumerate(messages) if m["role"] == "assistant")
    scoped = [_scoped(piece, answers) for piece in shown]
    trusted = all(words <= own for own, words in zip(scoped, said, strict=True) if len(own) == 1)
    spans = Spans()
    for j, piece in enumerate(pieces):
        owners = _scoped(piece, answers) if trusted else frozenset[int]()
        if len(owners) != 1 and len(said) == len(pieces):
            owners = said[j]
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


def _scoped(piece: _Piece, answers: frozenset[int]) -> frozenset[int]:
    """Return the answers that a piece can be of: where no message is in scope, any."""
    return piece.owners & answers if piece.owners else answers


def _marked_pieces(marked: str) -> tuple[str, list[_Piece]]:
    """Return a text without its marks, and the pieces that they enclose; not marks around marks."""
    begin, middle, end = SPAN
    pattern = f"{begin}([\\d,]*){middle}([^{begin}{middle}{end}]*){end}"
    pieces, text, at = list[_Piece](), "", 0
    for found in re.finditer(pattern, marked):
        text += marked[at : found.start()]
        owners = frozenset(map(int, filter(None, found[1].split(","))))
        pieces.append(_Piece(len(text), len(text) + len(found[2]), found[2], owners))
        text, at = text + found[2], found.end()
    return text + marked[at:], pieces


def _name_words(i: int, message: dict[str, Any]) -> dict[str, Any]:
    """Return a message of which each word of an answer, and each call, says whose it is.

    Blanks and tags stay, by which a template may cut the words in parts.
    """
    if message["role"] != "assistant":
        return message
    sign = f"{MARKER}{i};"
    texts = {
        name: re.sub(r"(?<=\s)(?=\S)", sign, sign + text + sign)
        for name, text in message.items()
        if name in ("content", *REASONING) and text.strip()
    }
    calls = [
        {**call, "function": {**call["function"], "name": call["function"]["name"] + sign}}
        for call in message.get("tool_calls", ())
    ]
    return message | texts | ({"tool_calls": calls} if calls else {})


@attrs.frozen
class _Shown:
    """A conversation as a template shows it."""

    whole: str
    messages: list[dict[str, Any]]
    render: Render
    prompt: str
    stops: Sequence[str]

    def spans(self) -> Spans:
        """Return where each message that can be told apart speaks: [first, last) characters."""
        spans, end, known = Spans(), 0, True
        for i, message in enumerate(self.messages):
            if message["role"] == "assistant":
                span = self.answer(i, end, self.prompt if known else None)
            else:
                span = self.other(i)
            known = span is not None
            if span is None:
                continue
            if span[0] < end and self.messages[spans[-1][0]]["role"] in ("system", "developer"):
                spans.pop()  # it is shown in a later turn
            elif span[0] < end:
                raise DataError(
                    f"make_jinja_template: message {i} is shown before the one before it"
                )
            spans.append((i, span))
            end = span[1]
        return spans

    def other(self, i: int) -> tuple[int, int] | None:
        """Find where a message speaks that is no answer, with a stop token that follows."""
        whole, halves = self.whole, self.halves(i, _saying_marker(self.messages[i]))
        if halves is None:
            return None
        before, after = halves
        first, last = len(before), len(whole) - len(after)
        if not (whole.startswith(before) and whole.endswith(after) and first <= last):
            return None
        rest = _after_stop(after, self.stops)
        return first, last if rest is None else len(whole) - len(rest)

    def answer(self, i: int, begin: int, prompt: str | None) -> tuple[int, int] | None:
        """Find where an answer speaks, up to and with a stop token; None if it cannot be told.

        The message before ended at `begin`. `prompt` is the generation prompt, or None where the
        end of the message before is not known, so that a prompt found could be an earlier one's.
        """
        whole, message = self.whole, self.messages[i]
        halves = self.halves(i, _saying_marker(message))
        rest = None if halves is None else _after_stop(halves[1], self.stops)
        if message.get("tool_calls") and (rest is None or not whole.endswith(rest)):
            if halves is None:  # where users and assistants alternate, words in place of a call
                # would not do: what follows, up to the next question, goes too
                later = (j for j, m in enumerate(self.messages) if j > i and m["role"] == "user")
                until = next(later, len(self.messages))
                halves = self.halves(i, _saying_marker(message), until=until)
            named = self.halves(i, _calling_marker(message))
            found = () if named is None else (named[1].find(stop) for stop in self.stops)
            ends = min((at for at in found if at >= 0), default=None)
            rest = None if named is None or ends is None else named[1][ends:]
            rest = None if rest is None else _after_stop(rest, self.stops)
        if halves is None or rest is None or not whole.endswith(rest):
            return None
        first, last = _begin_of_answer(whole, halves[0], prompt, begin), len(whole) - len(rest)
        if first is None or first >= last or not whole[first:last].endswith(tuple(self.stops)):
            return None
        return first, last

    def halves(
        self, i: int, probe: dict[str, Any], until: int | None = None
    ) -> tuple[str, str] | None:
        """Return what is shown before and after the marker of a probe in place of message `i`."""
        try:
            marked = self.render([*self.messages[:i], probe, *self.messages[until or i + 1 :]])
        except DataError:  # a template may want calls before answers, and so on
            return None
        before, _, after = marked.partition(MARKER)
        return (before, after) if marked.count(MARKER) == 1 else None


def _begin_of_answer(whole: str, header: str, prompt: str | None, begin: int) -> int | None:
    """Return where an answer begins, of which a probe has another header perhaps.

    A template without a generation prompt has the model go on right after the question: a blank
    before the words is the model's then.
    """
    common = _common(whole, header)
    asked = None
    if prompt:
        found = whole.rfind(prompt, begin, common)
        asked = found + len(prompt) if found >= 0 else None
    elif prompt is not None and len(header.rstrip(" ")) <= common:
        asked = max(len(header.rstrip(" ")), min(begin, len(header)))
    if common < len(header):
        return asked
    return common if asked is None or whole[asked:common].strip(" ") else asked


def _prompt_before(messages: list[dict[str, Any]], render: Render) -> str:
    """Return the generation prompt after the last message that is no answer.

    A template may end with one only there.
    """
    asked = max((i for i, m in enumerate(messages) if m["role"] != "assistant"), default=-1) + 1
    if asked == len(messages):
        return ""
    try:
        plain = render(messages[:asked])
        prompted = render(messages[:asked], add_generation_prompt=True)
    except DataError:
        return ""
    return prompted[len(plain) :] if prompted.startswith(plain) else ""


def _saying_marker(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message that says the marker alone."""
    others = {"content", "tool_calls", *REASONING}
    return {key: value for key, value in message.items() if key not in others} | {"content": MARKER}


def _calling_marker(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message of which the last call is one of the marker, with no arguments."""
    *calls, last = message["tool_calls"]
    none: Any = "{}" if isinstance(last["function"]["arguments"], str) else {}
    function = {**last["function"], "name": MARKER, "arguments": none}
    return {**message, "tool_calls": [*calls, {**last, "function": function}]}


def _after_stop(after: str, stops: Sequence[str]) -> str | None:
    """Return what comes after the stop token that a text begins with, or None where it does not."""
    text = after.lstrip()
    return next((text[len(stop) :] for stop in stops if text.startswith(stop)), None)


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
    spans: bool = False,
) -> str:
    import jinja2  # noqa: PLC0415  (an extra)

    values = {"tools": tools, "documents": None, "add_generation_prompt": add_generation_prompt}
    template, _ = compiled(source, spans=spans)
    try:
        return rendered(template, messages=messages, **values, **variables)
    except (jinja2.TemplateError, TypeError, ValueError, LookupError) as error:
        roles = ", ".join(str(message["role"]) for message in messages)
        what = f"the template refuses these messages ({roles}): {error}"
        raise DataError(f"make_jinja_template: {what}") from error
