"""Run Jinja templates without access to files or Python's internals, and for a limited time.

Jinja's own sandbox keeps a template from Python's internals. On top of it, each loop iteration,
each call and each character that is made is charged to a budget, so that a template that would
never end, or fill the memory, is rejected.
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

_MAX_COST = 1 << 26
"""The budget of a rendering: 1 for each character, `_STEP` for a loop iteration or a call."""
_STEP = 16
_NO_FILTERS = ("random", "wordwrap")
_OTHER_FILES = ("Import", "FromImport", "Include", "Extends")

SPAN = ("\ue002", "\ue004", "\ue003")
"""The marks of generated text: before the indices of the messages that it can belong to, between
these and the text, and after the text.
"""


class _Budget(threading.local):
    """The cost of this thread's current rendering."""

    spent = 0

    def spend(self, cost: int) -> None:
        import jinja2  # noqa: PLC0415  (an extra)

        self.spent += cost
        if self.spent > _MAX_COST:
            raise jinja2.TemplateError(f"it makes more than {_MAX_COST} letters, or never ends")

    def charge_value(self, value: Any) -> Any:
        """Charge the characters or items of a value, and return it."""
        self.spend(_STEP + (len(value) if isinstance(value, Sized) else 0))
        return value

    def charge_call(self, name: str, values: Sequence[Any]) -> None:
        """Charge what a call could make of its arguments, before it is made."""
        numbers = sum(abs(x) for x in values if type(x) is int)
        texts = [x for x in values if isinstance(x, str)]
        longest = max(map(len, texts), default=1)
        # "%99999d" and the like: a few characters that make many.
        if name.endswith("format") and texts and re.search(r"\d{5}|\*", texts[0]):
            _raise_template_error("it asks for a field of more than 9999 letters")
        if name.endswith("replace") and len(texts) > 2:
            numbers += (texts[0].count(texts[1]) + 1) * len(texts[2])
        elif name.endswith("join"):
            numbers += max(len(x) for x in (*values, "") if isinstance(x, Sized)) * longest
        else:
            numbers *= max(1, longest)
        self.spend(_STEP + numbers)


BUDGET = _Budget()


@functools.lru_cache(maxsize=8)
def compile_template(source: str, *, spans: bool = False) -> tuple[Any, str | None]:
    """Compile a source in an environment like the one `transformers` gives to chat templates.

    Args:
        source: The Jinja text.
        spans: Whether to put `SPAN` around the text in `{% generation %}`, with the indices of the
            messages that the source's variables hold there: the answers of the innermost loop or
            macro that has one, else all messages.

    Returns:
        The compiled template, for `render_template`; and the name under which it reads reasoning,
        if it does.

    Raises:
        ConfigError: jinja2 is missing.
        ValueError: The source is no Jinja, or accesses other files or Python's internals.

    Examples:
        >>> compile_template("{% include 'other' %}")
        Traceback (most recent call last):
        ...
        ValueError: make_jinja_template: line 1 asks for another file (Include), which is never read
    """
    with needs_extra("hf"):
        import jinja2  # noqa: PLC0415  (an extra)
        from jinja2 import nodes  # noqa: PLC0415  (an extra)
    environment = _make_environment(spans=spans)
    # Jinja has no `generation` tag: a block that passes its text through a filter replaces it.
    source = re.sub(r"({%[-+]?\s*)generation(\s*[-+]?%})", r"\1filter _span\2", source)
    source = re.sub(r"({%[-+]?\s*)endgeneration(\s*[-+]?%})", r"\1endfilter\2", source)
    try:
        tree = environment.parse(source)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(
            f"make_jinja_template: line {error.lineno} is no Jinja: {error.message}"
        ) from error
    for kind in _OTHER_FILES:
        for node in tree.find_all(getattr(nodes, kind)):
            raise ValueError(
                f"make_jinja_template: line {node.lineno} asks for another file ({kind}), which is "
                "never read"
            )
    names = {node.attr for node in tree.find_all(nodes.Getattr)}
    names |= {node.value for node in tree.find_all(nodes.Const)}  # as in m["x"] and "x" in m
    internals = sorted(x for x in names if isinstance(x, str) and re.fullmatch("__\\w+__", x))
    if internals:
        raise ValueError(f"make_jinja_template: it asks for {internals[0]}, of Python's insides")
    reasoning_name = next((name for name in REASONING if name in names), None)
    _pass_variables(tree, nodes, [[]])
    try:
        return environment.from_string(_insert_charges(tree, nodes)), reasoning_name
    except jinja2.TemplateSyntaxError as error:  # a filter or a test that Jinja does not know
        raise ValueError(f"make_jinja_template: line {error.lineno}: {error.message}") from error


def render_template(template: Any, **values: Any) -> str:
    """Render a compiled template.

    Raises:
        jinja2.TemplateError: It rejects the values, or exceeds its budget.

    Examples:
        >>> render_template(compile_template("{{ a ~ 1 }}")[0], a="b")
        'b1'
    """
    import jinja2  # noqa: PLC0415  (an extra)

    BUDGET.spent = 0
    try:
        return template.render(**values)
    except (MemoryError, RecursionError, OverflowError) as error:
        raise jinja2.TemplateError(f"{type(error).__name__}: {error}") from error


def _make_environment(*, spans: bool) -> Any:
    import jinja2  # noqa: PLC0415  (an extra)
    from jinja2.sandbox import ImmutableSandboxedEnvironment  # noqa: PLC0415

    class Environment(ImmutableSandboxedEnvironment):
        """Jinja's sandbox, with operators and calls charged to the budget."""

        intercepted_binops = frozenset(("+", "*", "**", "%"))

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            sizes = [len(x) if isinstance(x, Sized) else x for x in (left, right)]
            if operator == "**":
                _raise_template_error("it asks for a power")
            # A text or a list times a number; two numbers are their own sizes.
            if operator == "*" and sizes != [left, right]:
                BUDGET.spend(abs(int(sizes[0] * sizes[1])))
            if operator == "%" and isinstance(left, str):
                BUDGET.charge_call("format", [left])
            return BUDGET.charge_value(super().call_binop(context, operator, left, right))

        def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
            # Jinja's sandbox wraps `str.format`; the method inside is bound to the text that it
            # formats.
            method = getattr(obj, "__wrapped__", obj)
            owner = getattr(method, "__self__", None)
            BUDGET.charge_call(getattr(method, "__name__", ""), (owner, *args, *kwargs.values()))
            return BUDGET.charge_value(super().call(context, obj, *args, **kwargs))

        def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
            # A table for `translate` can make a long text of each character.
            return attr != "translate" and super().is_safe_attribute(obj, attr, value)

    environment = Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols"],
        finalize=BUDGET.charge_value,
    )
    filters = {
        name: _charge_filter(function)
        for name, function in environment.filters.items()
        if name not in _NO_FILTERS
    }
    filters["tojson"] = _charge_filter(_to_json)
    filters["_span"] = jinja2.pass_context(_mark_generated if spans else _leave_unmarked)
    filters["_charge"] = jinja2.pass_context(_charge)
    filters["_join"] = _join
    environment.filters = filters
    # `lipsum` makes random text of any length.
    del environment.globals["lipsum"]
    names: dict[str, Any] = environment.globals
    names.update(raise_exception=_raise_template_error, strftime_now=_format_now)
    return environment


def _mark_generated(context: Any, text: str, scopes: Sequence[Sequence[Any]]) -> str:
    """Put `SPAN` around a text, with the indices of the messages among the variables in scope.

    Messages are compared by identity: two of them may have the same content.
    """
    messages = context.parent["messages"]
    BUDGET.spend(_STEP + len(messages))
    index = {id(message): i for i, message in enumerate(messages)}
    # The innermost scope first.
    by_scope = [{index[id(x)] for x in scope if id(x) in index} for scope in reversed(scopes)]
    answers = ({i for i in scope if messages[i]["role"] == "assistant"} for scope in by_scope)
    owners = next(filter(None, answers), set[int]().union(*by_scope))
    start, middle, end = SPAN
    return f"{start}{','.join(map(str, sorted(owners)))}{middle}{text}{end}"


def _leave_unmarked(_context: Any, text: str, _scopes: Sequence[Sequence[Any]]) -> str:
    return text


def _pass_variables(node: Any, nodes: Any, scopes: list[list[str]]) -> None:
    """Pass to each `_span` filter the variables that are set before it, a list for each scope.

    A variable that is set later must not be passed: Jinja would then look it up outside of the
    loop, and render something else.

    Args:
        node: A node of the tree; its children are visited in the order of the source.
        nodes: The module `jinja2.nodes`.
        scopes: The variables of each enclosing loop, macro or block, the outermost first.

    Effects:
        Changes the filters of the tree, and adds to the last of `scopes`.
    """
    if isinstance(node, nodes.For | nodes.Macro | nodes.CallBlock | nodes.With | nodes.FilterBlock):
        scopes = [*scopes, []]
    if isinstance(node, nodes.Name) and node.ctx in ("store", "param"):
        scopes[-1].append(node.name)
    for child in node.iter_child_nodes(exclude=("filter",)):
        _pass_variables(child, nodes, scopes)
    if isinstance(node, nodes.FilterBlock) and node.filter.name == "_span":
        lists = [nodes.List([nodes.Name(x, "load") for x in scope]) for scope in scopes]
        node.filter.args = [nodes.List(lists)]


def _charge(_: Any, value: Any) -> Any:
    return BUDGET.charge_value(value)


def _join(parts: Sequence[Any]) -> str:
    return BUDGET.charge_value("".join(map(str, parts)))


def _charge_filter(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter whose arguments and result are charged."""

    @functools.wraps(function)
    def charged(*args: Any, **kwargs: Any) -> Any:
        BUDGET.charge_call(function.__name__, (*args, *kwargs.values()))
        return BUDGET.charge_value(function(*args, **kwargs))

    return charged


def _insert_charges(tree: Any, nodes: Any) -> Any:
    """Return a parsed template whose loops and concatenations are charged."""
    from jinja2.visitor import NodeTransformer  # noqa: PLC0415  (an extra)

    class Transformer(NodeTransformer):
        def visit_For(self, node: Any) -> Any:  # noqa: N802
            self.generic_visit(node)
            node.iter = nodes.Filter(node.iter, "_charge", [], [], None, None)
            step = nodes.Filter(nodes.Const(""), "_charge", [], [], None, None)
            node.body.insert(0, nodes.Output([step]))
            return node

        def visit_Concat(self, node: Any) -> Any:  # noqa: N802
            self.generic_visit(node)
            return nodes.Filter(nodes.List(node.nodes), "_join", [], [], None, None)

    charged = Transformer().visit(tree)
    # The new nodes lack a line and an environment, which the compiler needs.
    charged.set_lineno(1)
    charged.set_environment(tree.environment)
    return charged


def _raise_template_error(message: str) -> None:
    import jinja2  # noqa: PLC0415  (an extra)

    raise jinja2.TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    # Charged before it is made: an indent may put that many blanks before each item.
    text = json.dumps(value, ensure_ascii=ensure_ascii)
    BUDGET.spend(len(text) * (1 + int(options.get("indent") or 0)))
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _format_now(form: str) -> str:
    return datetime.now().strftime(form)  # noqa: DTZ005  (the user's local day)
