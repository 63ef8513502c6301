"""Where the Jinja of a folder runs: without files, without Python's insides, for a bounded time.

Jinja's sandbox keeps a template from Python's insides. Here every turn of a loop, every call and
every letter that is made costs something, out of what a rendering may spend; so a template that
would never end, or fill the memory, is refused as one that is wrong.
"""

from __future__ import annotations

import functools
import json
import re
import threading
from collections.abc import Callable, Sequence, Sized
from datetime import datetime
from typing import Any

from trainkit.text.chat.messages import REASONING
from trainkit.types import needs_extra

_MOST = 1 << 26
"""What a rendering may spend: letters, or `_STEP` for a turn of a loop or a call."""
_STEP = 16
_NO_FILTERS = ("random", "wordwrap")
_OTHER_FILES = ("Import", "FromImport", "Include", "Extends")

SPAN = ("\ue002", "\ue004", "\ue003")
"""What stands around what a template marks as generated: before the numbers of the messages that it
can be of, between these and the text, and after the text.
"""


class _Budget(threading.local):
    """What the rendering of this thread has spent."""

    spent = 0

    def spend(self, cost: int) -> None:
        import jinja2  # noqa: PLC0415  (an extra)

        self.spent += cost
        if self.spent > _MOST:
            raise jinja2.TemplateError(f"it makes more than {_MOST} letters, or never ends")

    def made(self, value: Any) -> Any:
        """Return a value; its letters or items are spent."""
        self.spend(_STEP + (len(value) if isinstance(value, Sized) else 0))
        return value

    def asked(self, name: str, values: Sequence[Any]) -> None:
        """Spend what a call could make of its values, before it is made."""
        numbers = sum(abs(x) for x in values if type(x) is int)
        texts = [x for x in values if isinstance(x, str)]
        widest = max(map(len, texts), default=1)
        if name.endswith("format") and texts and re.search(r"\d{5}|\*", texts[0]):
            _refuse("it asks for a field of more than 9999 letters")
        if name.endswith("replace") and len(texts) > 2:
            numbers += (texts[0].count(texts[1]) + 1) * len(texts[2])
        elif name.endswith("join"):
            numbers += max(len(x) for x in (*values, "") if isinstance(x, Sized)) * widest
        else:
            numbers *= max(1, widest)
        self.spend(_STEP + numbers)


BUDGET = _Budget()


@functools.lru_cache(maxsize=8)
def compiled(source: str, *, spans: bool = False) -> tuple[Any, str | None]:
    """Compile a source in an environment such as `transformers` gives to chat templates.

    Args:
        source: The Jinja text.
        spans: Whether `SPAN` stands around what `{% generation %}` encloses, with the numbers of
            the messages that variables of the source hold there: the answers of the innermost loop
            or macro that has one, else all.

    Returns:
        The compiled template, of which `rendered` makes a text; and under which name it reads
        reasoning, if it does.

    Raises:
        ConfigError: jinja2 is missing.
        ValueError: The source is no Jinja, or asks for another file or Python's insides.

    Examples:
        >>> compiled("{% include 'other' %}")
        Traceback (most recent call last):
        ...
        ValueError: make_jinja_template: line 1 asks for another file (Include), which is never read
    """
    with needs_extra("hf"):
        import jinja2  # noqa: PLC0415  (an extra)
        from jinja2 import nodes  # noqa: PLC0415  (an extra)
    environment = _environment(spans=spans)
    # The tags that mark answers are those of a block whose text goes through a filter.
    source = re.sub(r"({%[-+]?\s*)generation(\s*[-+]?%})", r"\1filter _span\2", source)
    source = re.sub(r"({%[-+]?\s*)endgeneration(\s*[-+]?%})", r"\1endfilter\2", source)
    try:
        tree = environment.parse(source)
    except jinja2.TemplateSyntaxError as error:
        what = f"line {error.lineno} is no Jinja: {error.message}"
        raise ValueError(f"make_jinja_template: {what}") from error
    for kind in _OTHER_FILES:
        for node in tree.find_all(getattr(nodes, kind)):
            what = f"line {node.lineno} asks for another file ({kind}), which is never read"
            raise ValueError(f"make_jinja_template: {what}")
    read = {node.attr for node in tree.find_all(nodes.Getattr)}
    read |= {node.value for node in tree.find_all(nodes.Const)}  # as in m["x"] and "x" in m
    inside = sorted(x for x in read if isinstance(x, str) and re.fullmatch("__\\w+__", x))
    if inside:
        raise ValueError(f"make_jinja_template: it asks for {inside[0]}, of Python's insides")
    name = next((name for name in REASONING if name in read), None)
    _pass_variables(tree, nodes, [[]])
    try:
        return environment.from_string(_counted(tree, nodes)), name
    except jinja2.TemplateSyntaxError as error:  # a filter or a test that Jinja does not know
        raise ValueError(f"make_jinja_template: line {error.lineno}: {error.message}") from error


def rendered(template: Any, **values: Any) -> str:
    """Return what a compiled template makes of some values.

    Raises:
        jinja2.TemplateError: It refuses them, or has spent too much.

    Examples:
        >>> rendered(compiled("{{ a ~ 1 }}")[0], a="b")
        'b1'
    """
    import jinja2  # noqa: PLC0415  (an extra)

    BUDGET.spent = 0
    try:
        return template.render(**values)
    except (MemoryError, RecursionError, OverflowError) as error:
        raise jinja2.TemplateError(f"{type(error).__name__}: {error}") from error


def _environment(*, spans: bool) -> Any:
    import jinja2  # noqa: PLC0415  (an extra)
    from jinja2.sandbox import ImmutableSandboxedEnvironment  # noqa: PLC0415

    class Environment(ImmutableSandboxedEnvironment):
        """Jinja's sandbox, in which what a template makes is counted."""

        intercepted_binops = frozenset(("+", "*", "**", "%"))

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            sizes = [len(x) if isinstance(x, Sized) else x for x in (left, right)]
            if operator == "**":
                _refuse("it asks for a power")
            if operator == "*" and sizes != [left, right]:
                BUDGET.spend(abs(int(sizes[0] * sizes[1])))
            if operator == "%" and isinstance(left, str):
                BUDGET.asked("format", [left])
            return BUDGET.made(super().call_binop(context, operator, left, right))

        def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
            method = getattr(obj, "__wrapped__", obj)
            own = getattr(method, "__self__", None)
            BUDGET.asked(getattr(method, "__name__", ""), (own, *args, *kwargs.values()))
            return BUDGET.made(super().call(context, obj, *args, **kwargs))

        def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
            return attr != "translate" and super().is_safe_attribute(obj, attr, value)

    environment = Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols"],
        finalize=BUDGET.made,
    )
    known = {name: own for name, own in environment.filters.items() if name not in _NO_FILTERS}
    filters = {name: _counting(own) for name, own in {**known, "tojson": _to_json}.items()}
    filters["_span"] = jinja2.pass_context(_mark_generated if spans else _leave_unmarked)
    filters["_made"] = jinja2.pass_context(_made)
    filters["_joined"] = _joined
    environment.filters = filters
    del environment.globals["lipsum"]
    names: dict[str, Any] = environment.globals
    names.update(raise_exception=_refuse, strftime_now=_now)
    return environment


def _mark_generated(context: Any, text: str, scopes: Sequence[Sequence[Any]]) -> str:
    """Put `SPAN` around a text, with the numbers of the messages among the variables in scope.

    Messages are compared by identity: two of them may say the same.
    """
    messages = context.parent["messages"]
    BUDGET.spend(_STEP + len(messages))
    numbers = {id(message): i for i, message in enumerate(messages)}
    found = [{numbers[id(x)] for x in scope if id(x) in numbers} for scope in reversed(scopes)]
    answers = ({i for i in own if messages[i]["role"] == "assistant"} for own in found)
    owners = next(filter(None, answers), set[int]().union(*found))
    begin, middle, end = SPAN
    return f"{begin}{','.join(map(str, sorted(owners)))}{middle}{text}{end}"


def _leave_unmarked(_context: Any, text: str, _scopes: Sequence[Sequence[Any]]) -> str:
    return text


def _pass_variables(node: Any, nodes: Any, scopes: list[list[str]]) -> None:
    """Give each `_span` filter the variables that are set before it, a list for each scope.

    A variable that is set later must not be named: Jinja would look for it outside of the loop
    then, and the template would render something else.

    Args:
        node: Where to look; its children are visited in the order of the source.
        nodes: The module `jinja2.nodes`.
        scopes: The variables of each loop, macro or block around it, the outermost first.

    Effects:
        Changes the filters of the tree, and adds to the last of `scopes`.
    """
    inner = isinstance(
        node, nodes.For | nodes.Macro | nodes.CallBlock | nodes.With | nodes.FilterBlock
    )
    if inner:
        scopes = [*scopes, []]
    if isinstance(node, nodes.Name) and node.ctx in ("store", "param"):
        scopes[-1].append(node.name)
    for child in node.iter_child_nodes(exclude=("filter",)):
        _pass_variables(child, nodes, scopes)
    if isinstance(node, nodes.FilterBlock) and node.filter.name == "_span":
        lists = [nodes.List([nodes.Name(x, "load") for x in scope]) for scope in scopes]
        node.filter.args = [nodes.List(lists)]


def _made(_: Any, value: Any) -> Any:
    return BUDGET.made(value)


def _joined(parts: Sequence[Any]) -> str:
    return BUDGET.made("".join(map(str, parts)))


def _counting(own: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter whose numbers and results are spent."""

    @functools.wraps(own)
    def counted(*args: Any, **kwargs: Any) -> Any:
        BUDGET.asked(own.__name__, (*args, *kwargs.values()))
        return BUDGET.made(own(*args, **kwargs))

    return counted


def _counted(tree: Any, nodes: Any) -> Any:
    """Return a parsed template in which loops and joined texts are spent."""
    from jinja2.visitor import NodeTransformer  # noqa: PLC0415  (an extra)

    class Counted(NodeTransformer):
        def visit_For(self, node: Any) -> Any:  # noqa: N802
            self.generic_visit(node)
            node.iter = nodes.Filter(node.iter, "_made", [], [], None, None)
            tick = nodes.Filter(nodes.Const(""), "_made", [], [], None, None)
            node.body.insert(0, nodes.Output([tick]))
            return node

        def visit_Concat(self, node: Any) -> Any:  # noqa: N802
            self.generic_visit(node)
            return nodes.Filter(nodes.List(node.nodes), "_joined", [], [], None, None)

    found = Counted().visit(tree)
    found.set_lineno(1)
    found.set_environment(tree.environment)
    return found


def _refuse(message: str) -> None:
    import jinja2  # noqa: PLC0415  (an extra)

    raise jinja2.TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    text = json.dumps(value, ensure_ascii=ensure_ascii)
    BUDGET.spend(len(text) * (1 + int(options.get("indent") or 0)))
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _now(form: str) -> str:
    return datetime.now().strftime(form)  # noqa: DTZ005  (the day where the user is)
