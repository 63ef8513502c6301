"""How wide the house is, measured by its syntax: for the ratchet of test_architecture.py.

Everything takes the text of files, and is tried on texts that are written for it.
"""

import ast
import io
import re
import tokenize
from collections import Counter
from functools import cache
from itertools import chain

DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DEGREES = ("pp", "dp_replicate", "dp_shard", "ring", "ulysses", "tp", "ep")


@cache
def nodes_of(text):
    """Return every node of a text's syntax tree; a text is parsed and walked once."""
    return list(ast.walk(ast.parse(text)))


def span(node):
    """Return the numbers of the lines of a node."""
    return range(node.lineno, node.end_lineno + 1)


@cache
def code_lines(text):
    """Return the numbers of the lines that hold code: no blanks, comments and docstrings."""
    written = {
        number
        for number, line in enumerate(text.splitlines(), 1)
        if line.strip() and not line.strip().startswith("#")
    }
    for node in nodes_of(text):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            written -= set(span(node)) if isinstance(node.value.value, str) else set()
    return frozenset(written)


# ------------------------------------------------------------------------------ code that refuses


def refusing_lines(text):
    """Return the lines of code that only refuse: raises, asserts, and the ifs that lead there.

    A handler that raises counts whole: it translates an error.
    """
    found = set()
    for node in nodes_of(text):
        if isinstance(node, ast.Raise | ast.Assert):
            found.update(span(node))
        elif isinstance(node, ast.If) and isinstance(node.body[-1], ast.Raise):
            found.update(range(node.lineno, node.body[-1].end_lineno + 1))
        elif isinstance(node, ast.ExceptHandler):
            raises = any(isinstance(inner, ast.Raise) for inner in ast.walk(node))
            found.update(span(node) if raises else [])
    return found & code_lines(text)


def refusing_share(files):
    """Return the part of all code that only refuses."""
    refusing = sum(len(refusing_lines(text)) for text in files.values())
    return refusing / sum(len(code_lines(text)) for text in files.values())


# ------------------------------------------------------------------------------ how much to read

LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
DIALECT = {
    "told",
    "tell",
    "tells",
    "telling",
    "said",
    "heard",
    "asked",
    "beside",
    "dealt",
    "deal",
    "begun",
    "kept",
    "mend",
    "whoever",
}
"""Words for which the field has a term, or a sentence that reads better."""


@cache
def tokens_of(text):
    """Return the tokens of a text, comments and line ends included."""
    return list(tokenize.generate_tokens(io.StringIO(text).readline))


def code_tokens(text):
    """Return the number of tokens of code: names, numbers, strings and operators."""
    lines = code_lines(text)
    return sum(token.type not in LAYOUT and token.start[0] in lines for token in tokens_of(text))


def comments(text):
    """Return the number of comments."""
    return sum(token.type == tokenize.COMMENT for token in tokens_of(text))


def keyword_bags(text):
    """Return the calls that unpack keywords which are not the caller's own `**options`."""
    own = set()
    for function in nodes_of(text):
        if isinstance(function, DEFINITIONS) and function.args.kwarg:
            name = function.args.kwarg.arg
            own |= {
                id(word)
                for call in ast.walk(function)
                if isinstance(call, ast.Call)
                for word in call.keywords
                if word.arg is None and isinstance(word.value, ast.Name) and word.value.id == name
            }
    return [
        call.lineno
        for call in nodes_of(text)
        if isinstance(call, ast.Call)
        for word in call.keywords
        if word.arg is None and id(word) not in own
    ]


def message_pieces(text):
    """Return the names of strings that a function uses only to put a message together."""
    found = []
    for function in nodes_of(text):
        if not isinstance(function, DEFINITIONS):
            continue
        inside = list(ast.walk(function))
        strings = {
            node.targets[0].id
            for node in inside
            if isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and (
                isinstance(node.value, ast.JoinedStr)
                or (isinstance(node.value, ast.Constant) and isinstance(node.value.value, str))
            )
        }
        raised = Counter(
            name.id
            for node in inside
            if isinstance(node, ast.Raise)
            for name in ast.walk(node)
            if isinstance(name, ast.Name)
        )
        read = Counter(
            node.id
            for node in inside
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
        )
        found += [name for name in sorted(strings) if read[name] and read[name] == raised[name]]
    return found


def private_functions_used_once(text):
    """Return the private functions of a file that stand in it twice: written, and called once."""
    words = Counter(re.findall(r"\w+", text))
    return [
        node.name
        for node in nodes_of(text)[0].body
        if isinstance(node, DEFINITIONS) and node.name.startswith("_") and words[node.name] == 2
    ]


def dialect_words(text):
    """Return the words of `DIALECT` in code, comments and docstrings, also as parts of names."""
    words = re.findall(r"[A-Za-z]+", text.replace("_", " "))
    return [word for word in words if word.lower() in DIALECT]


# ------------------------------------------------------------------------------ imports


def loaded_imports(text):
    """Return what a file imports when it is loaded: not for type checkers, not in functions."""
    found, todo = set(), [nodes_of(text)[0]]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            todo += node.orelse
        elif not isinstance(node, DEFINITIONS):
            todo += ast.iter_child_nodes(node)
    return found


def import_chain(modules):
    """Return the longest chain of modules that load each other, of {module: text}."""

    def homes(name):
        while name and name not in modules:
            name = name.rpartition(".")[0]
        return name

    edges = {
        module: {homes(name) for name in loaded_imports(text)} - {"", module, "trainkit"}
        for module, text in modules.items()
    }

    @cache
    def below(module):
        return (module, *max((below(name) for name in edges[module]), key=len, default=()))

    return max((below(module) for module in modules), key=len)


# ------------------------------------------------------------------------------ degrees


def names_in_a_row(node):
    """Return the names that stand beside each other in a node, as a table or a signature."""
    if isinstance(node, DEFINITIONS):
        return [arg.arg for arg in chain(node.args.args, node.args.kwonlyargs)]
    if isinstance(node, ast.ClassDef):
        return [ast.unparse(part.target) for part in node.body if isinstance(part, ast.AnnAssign)]
    if isinstance(node, ast.Call):
        return [word.arg for word in node.keywords if not isinstance(word.value, ast.Constant)]
    inside = getattr(node, "keys" if isinstance(node, ast.Dict) else "elts", [])
    return [part.value for part in inside if isinstance(part, ast.Constant)]


def tables_of_degrees(text):
    """Return the lines at which four or more names of degrees stand beside each other."""
    rows = [(node, names_in_a_row(node)) for node in nodes_of(text)]
    return sorted(node.lineno for node, names in rows if len({*names} & {*DEGREES}) >= 4)


# ------------------------------------------------------------------------------ recipes


def shared_share(texts, run=6):
    """Return the part of the lines of code that stand in `run` or more equal ones of another."""
    files = []
    for text in texts:
        lines = text.splitlines()
        files.append([" ".join(lines[n - 1].split()) for n in sorted(code_lines(text))])
    runs = [{tuple(f[at : at + run]) for at in range(len(f) - run + 1)} for f in files]
    seen = Counter(chain.from_iterable(runs))
    shared = 0
    for lines in files:
        hits = [at for at in range(len(lines) - run + 1) if seen[tuple(lines[at : at + run])] > 1]
        shared += len({line for at in hits for line in range(at, at + run)})
    return shared / max(1, sum(map(len, files)))


# ------------------------------------------------------------------------------ the ratchet


def above(measured, reached, room=0.03):
    """Return a sentence for each figure that has grown by more than the room."""
    return [
        f"{name}: {measured[name]:,g} is more than {limit:,g} ({most:,g} was reached, and "
        f"{room:.0%} of room). Make it smaller; a change that needs more raises REACHED in the "
        "same commit and says there why"
        for name, most in reached.items()
        if measured[name] > (limit := round(most * (1 + room), 4))
    ]
