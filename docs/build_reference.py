"""Build the reference from trainkit's source: signatures and docstrings, read without importing.

python docs/build_reference.py            # writes docs/_build/reference, begin at index.md

The front page has `tk.*` and the families, alphabetical; a page stands for a room of the package.
What is in no table of contents stands on the page of internals, with links to the source. A public
name without a docstring is an error, and so is a link of any page of the project that leads
nowhere. A constant is public when a docstring stands below it.
"""
# ruff: noqa: INP001, T201 -- a script, which prints

from __future__ import annotations

import ast
import inspect
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent
PACKAGE = ROOT / "trainkit"
BUILT = HERE / "_build" / "reference"  # ignored by git
HEAD = re.compile(r"^(Args|Attributes|Returns|Yields|Raises|Effects|Examples):\n", re.MULTILINE)
ITEM = re.compile(r"^(\*{0,2}[\w.]+): ", re.MULTILINE)
ASSIGNED = (ast.Assign, ast.AnnAssign)
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
KEEP = "<!-- fmt: off -->"  # the formatter knows Markdown, and these pages are nobody's to format


@cache
def parse(path: Path) -> ast.Module:
    """Return the syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"))


def module_of(path: Path) -> str:
    """Return the dotted name of a file: trainkit.packing.bins."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def value_of(tree: ast.Module, name: str) -> Any:
    """Return the literal that a module assigns to a name, or None."""
    nodes = [node for node in tree.body if isinstance(node, ast.Assign)]
    found = [node.value for node in nodes if ast.unparse(node.targets[0]) == name]
    return ast.literal_eval(found[0]) if found else None


def contents() -> dict[str, list[str]]:
    """Return {room: the names that `tk.` has of it}, as the table of contents lists them."""
    table = imports_of(PACKAGE / "__init__.py")
    modules = [f"{home}.{name}" for name, home in table.items()]
    rooms = [m.removeprefix("trainkit.") for m in modules if file_of(m).exists() and has_names(m)]
    names = {n: home for n, home in table.items() if not file_of(f"{home}.{n}").exists()}
    return {r: [n for n, home in names.items() if home == f"trainkit.{r}"] for r in rooms}


def has_names(module: str) -> bool:
    """Return whether a module has names of its own: the table of a wing lists rooms alone."""
    table = imports_of(file_of(module)) if file_of(module).name == "__init__.py" else {}
    return not table or any(not file_of(f"{home}.{name}").exists() for name, home in table.items())


@cache
def imports_of(path: Path) -> dict[str, str]:
    """Return {name: the module it comes from} of a file, or of the stub that says it lazily."""
    stub = path.with_suffix(".pyi")
    tree = parse(stub if stub.exists() else path)
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    package = [module_of(path)]
    homes = [".".join(package * node.level + [node.module] * bool(node.module)) for node in nodes]
    return {
        alias.name: home for node, home in zip(nodes, homes, strict=True) for alias in node.names
    }


def families(room: str) -> dict[str, str]:
    """Return {name: module to import it from} of a room: what its table, or its one file, has."""
    file = file_of(f"trainkit.{room}")
    if file.name != "__init__.py":
        homes = {name: module_of(file) for name in members(file)}
    else:
        tables = [path for path in files_of(room) if path.name == "__init__.py"]
        tables.sort(key=lambda path: -len(path.parts))
        listed = [
            (module_of(path), value_of(parse(path), "__all__") or imports_of(path))
            for path in tables
        ]
        homes = {name: module for module, names in listed for name in names}
        homes = {n: m for n, m in homes.items() if not file_of(f"{m}.{n}").exists()}  # no room
    return homes | dict.fromkeys(contents()[room], "trainkit")


def file_of(module: str) -> Path:
    """Return the file of a module."""
    path = PACKAGE.parent / module.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def defined_in(name: str, path: Path) -> Path | None:
    """Return the file that defines a name of a file, or None if nothing is written about it."""
    if name in members(path):
        return path
    home = imports_of(path).get(name)
    return defined_in(name, file_of(home)) if home else None


def shown_names(room: str) -> dict[str, tuple[Path, str]]:
    """Return {name: (the file that defines it, module to import it from)}, alphabetical."""
    tables = [path for path in files_of(room) if path.name == "__init__.py"] or files_of(room)
    found = {}
    for name, home in sorted(families(room).items(), key=lambda item: item[0].lower()):
        places = [place for table in tables if (place := defined_in(name, table))]
        found |= {name: (places[0], home)} if places else {}
    return found


def signature(node: ast.FunctionDef, text: Callable[[ast.AST], str]) -> str:
    """Return name, arguments and result: in one line, or one argument per line if that is long."""

    def written(args: list[ast.arg], defaults: list[Any]) -> list[str]:
        pairs = zip_longest(reversed(args), reversed(defaults))
        return [text(arg) + (f" = {default(text(d))}" if d else "") for arg, d in pairs][::-1]

    a = node.args
    args = written(a.posonlyargs + a.args, a.defaults)
    args += [f"*{text(a.vararg)}"] if a.vararg else ["*"] if a.kwonlyargs else []
    args += written(a.kwonlyargs, a.kw_defaults) + ([f"**{text(a.kwarg)}"] if a.kwarg else [])
    end = f") -> {text(node.returns)}" if node.returns else ")"
    line = f"{node.name}({', '.join(args)}{end}"
    return line if len(line) <= 96 else f"{node.name}(\n    " + ",\n    ".join(args) + f",\n{end}"


def as_markdown(docstring: str) -> str:
    """Return a docstring with bold heads in place of its sections, and arguments as a list."""
    first, *sections = HEAD.split(docstring)
    blocks = [first.strip()]
    for head, body in zip(sections[::2], sections[1::2], strict=True):
        inside = "".join(re.findall(r"\A(?:(?:    .*)?(?:\n|\Z))+", body))
        text = textwrap.dedent(inside).strip()
        if head == "Examples":
            text = f"```pycon\n{text}\n```"
        elif head in ("Args", "Attributes", "Raises"):
            text = ITEM.sub(r"- `\1`: ", text)
        blocks += [f"**{head}**", text, body[len(inside) :].strip()]
    return "\n\n".join(filter(None, blocks))


@cache
def members(path: Path) -> dict[str, tuple[str, str, int]]:
    """Return {name: (how it is written down, docstring, line)} of the public names of a file."""
    return {name: (shown, docstring or "", line) for name, shown, docstring, line in _members(path)}


def _members(path: Path) -> Iterator[tuple[str, str, str | None, int]]:
    source = path.read_text(encoding="utf-8")
    lines = [line.encode() for line in source.split("\n")]  # ast counts columns in bytes

    def text(node: ast.AST) -> str:
        # As ast.get_source_segment, which splits the whole source at every call (4.7 s in all).
        found = lines[node.lineno - 1 : node.end_lineno]
        found[-1] = found[-1][: node.end_col_offset]
        found[0] = found[0][node.col_offset :]
        return " ".join(b" ".join(found).decode().split())

    body = parse(path).body
    for node, below in zip_longest(body, body[1:]):
        if isinstance(node, ast.FunctionDef) and node.name[0] != "_":
            yield node.name, signature(node, text), ast.get_docstring(node), node.lineno
        elif isinstance(node, ast.ClassDef) and node.name[0] != "_":
            stated = [part for part in node.body if isinstance(part, ast.AnnAssign)]
            fields = [field(part) for part in stated if not text(part.target).startswith("_")]
            bases = f"({', '.join(map(text, node.bases))})" if node.bases else ""
            shown = "\n    ".join([f"class {node.name}{bases}:", *fields]).removesuffix(":")
            inner = [part for part in node.body if isinstance(part, ast.FunctionDef)]
            public = [part for part in inner if part.name.startswith("__") or part.name[0] != "_"]
            methods = [(signature(part, text), ast.get_docstring(part)) for part in public]
            methods_text = "\n".join(
                f"- `{head}`: {doc.splitlines()[0]}" for head, doc in methods if doc
            )
            docstring = ast.get_docstring(node)
            yield (
                node.name,
                shown,
                docstring and f"{docstring}\n\n{methods_text}".strip(),
                node.lineno,
            )
        elif isinstance(node, ASSIGNED) and is_text(below):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            name = text(target)
            docstring = inspect.cleandoc(str(below.value.value))
            value = text(node.value)
            shown = text(node).removesuffix(value) + default(value)
            yield from [(name, shown, docstring, node.lineno)] if name[0] != "_" else []


def is_text(node: ast.AST | None) -> bool:
    """Return whether a statement is a string: the docstring of the constant above it."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def field(node: ast.AnnAssign) -> str:
    """Return a field of a record with its default, which attrs may have wrapped."""
    value, shown = node.value, f"{ast.unparse(node.target)}: {ast.unparse(node.annotation)}"
    if isinstance(value, ast.Call) and ast.unparse(value.func) == "attrs.field":
        given = {word.arg: word.value for word in value.keywords}
        value = given.get("default", ast.Constant(...) if "factory" in given else None)
    return shown + (f" = {default(ast.unparse(value))}" if value else "")


def default(text: str) -> str:
    """Return a value as it is written, or dots for one of private names: nobody's business.

    Examples:
        >>> default("_NO_CHANGES"), default("(_LLAMA, _PHI3)"), default("-1")
        ('...', '...', '-1')
    """
    return "..." if re.search(r"(?<![\w./-])_[A-Za-z]", text) else text


def first_sentence(docstring: str) -> str:
    """Return the first paragraph of a docstring on one line."""
    return " ".join(docstring.split("\n\n", maxsplit=1)[0].split())


def files_of(room: str) -> list[Path]:
    """Return the files of a room, without those of the rooms inside it."""
    first = file_of(f"trainkit.{room}")
    if first.name != "__init__.py":
        return [first]
    inner = {file_of(f"trainkit.{other}") for other in room_paths() if other.startswith(f"{room}.")}
    files = sorted(first.parent.rglob("*.py"))
    folders = {path.parent for path in inner if path.name == "__init__.py"}
    return [path for path in files if path not in inner and not folders & {*path.parents}]


@cache
def room_paths() -> frozenset[str]:
    """Return the dotted paths of all rooms, without the package's name."""
    return frozenset(contents())


def room_page(room: str) -> str:
    """Return the page of a room: what it is for, and each name of its table, alphabetical."""
    blocks = []
    for name, (path, home) in shown_names(room).items():
        shown, docstring, _ = members(path)[name]
        blocks += [f"## {name}", f"`from {home} import {name}`", f"```python\n{shown}\n```"]
        blocks.append(as_markdown(docstring))
    about = ast.get_docstring(parse(files_of(room)[0])) or ""
    return "\n\n".join([f"# trainkit.{room}", KEEP, about, *blocks]) + "\n"


def front_page() -> str:
    """Return the first page: `tk.*`, and the names of the families, alphabetical."""
    rooms = contents()
    tk = {name: room for room, names in rooms.items() for name in names}
    lines = []
    for name in sorted(tk, key=str.lower):
        path, _ = shown_names(tk[name])[name]
        sentence = first_sentence(members(path)[name][1])
        lines.append(f"- [`tk.{name}`]({tk[name]}.md#{name.lower()}): {sentence}")
    parts = ["# Reference", KEEP, "`import trainkit as tk`", "\n".join(lines), "## Families"]
    for room in sorted(rooms):
        about = first_sentence(ast.get_docstring(parse(files_of(room)[0])) or "")
        links = [f"[{name}]({room}.md#{name.lower()})" for name in shown_names(room)]
        parts += [f"### [trainkit.{room}]({room}.md)", about, ", ".join(links)]
    parts.append("What the families are made of stands on the page of [internals](internals.md).")
    return "\n\n".join(parts) + "\n"


def internals_page() -> str:
    """Return the second page: functions and classes in no table, with the lines that have them."""
    about = (
        "What is in no table of contents. Nobody needs it to train, and any commit may change it."
    )
    parts = ["# Internals", KEEP, about]
    listed = {(name, path) for room in contents() for name, (path, _) in shown_names(room).items()}
    for path in [path for room in sorted(contents()) for path in files_of(room)]:
        rest = [name for name in sorted(members(path), key=str.lower) if (name, path) not in listed]
        lines = []
        for name in rest:
            _, docstring, line = members(path)[name]
            lines.append(f"- [`{name}`]({link_to(path)}#L{line}): {first_sentence(docstring)}")
        parts += [f"## {module_of(path)}", "\n".join(lines)] if lines else []
    return "\n\n".join(parts) + "\n"


def link_to(path: Path) -> str:
    """Return the link from a page to a file of the package."""
    return "../" * len(BUILT.relative_to(ROOT).parts) + path.relative_to(ROOT).as_posix()


def build() -> dict[str, str]:
    """Return {file name: text} of all pages."""
    pages = {f"{room}.md": room_page(room) for room in contents()}
    return pages | {"index.md": front_page(), "internals.md": internals_page()}


def gaps() -> list[str]:
    """Return the names that have no docstring: public ones of files, and those of a table."""
    found_by_file = {path: members(path) for path in PACKAGE.rglob("*.py")}
    bare = [
        f"{module_of(p)}.{n}"
        for p, found in found_by_file.items()
        for n in found
        if not found[n][1]
    ]
    for room in contents():
        bare += [f"trainkit.{room}.{n}" for n in families(room).keys() - shown_names(room).keys()]
    return [f"{name} has no docstring" for name in bare]


def anchors_of(text: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    heads = re.findall(r"^#+ (.*)$", FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def broken_links(pages: Mapping[Path, str]) -> list[str]:
    """Return the links of pages that lead to no file, or to no heading of a page."""
    found = []
    for path, text in pages.items():
        for link in LINK.findall(FENCE.sub("", text)):
            file, _, anchor = link.partition("#")
            target = Path(os.path.normpath(path.parent / file)) if file else path
            if link.startswith("https://"):
                continue
            if target not in pages and not target.exists():
                found.append(f"{path.relative_to(ROOT)}: {link} leads nowhere")
            elif anchor and target in pages and anchor not in anchors_of(pages[target]):
                found.append(f"{path.relative_to(ROOT)}: there is no #{anchor} in {target.name}")
    return found


def main() -> int:
    """Write the pages; say which names have no docstring and which links lead nowhere."""
    built = {BUILT / name: text for name, text in build().items()}
    pages = [ROOT / "README.md", *(p for p in HERE.rglob("*.md") if BUILT not in p.parents)]
    problems = gaps() + broken_links(built | {path: path.read_text() for path in pages})
    shutil.rmtree(BUILT, ignore_errors=True)
    BUILT.mkdir(parents=True)
    for path, text in built.items():
        path.write_text(text, encoding="utf-8")
    print("\n".join(problems) or f"{len(built)} pages: {(BUILT / 'index.md').relative_to(ROOT)}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
